"""Keeps a stream busy while something is tried, and says whether the work in front of it is still running afterwards.

The checks of what returns (`return_checks.py`) are made with it. The work is copies, and launches of `linear`: what every device
has. Whether it still runs is seen twice, in an event behind it and in host memory into which its last piece is copied, so that
neither a counter nor `query` has to be believed. How much work is needed is measured on the device; no outcome hangs on how long
something took.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from polydraft.conformance.check import Unseen, Wrong
from polydraft.contracts.base import Limits
from polydraft.contracts.compare import to_host
from polydraft.contracts.inputs import POISON
from polydraft.contracts.kernels.linear import LinearV1
from polydraft.device import Array, Device, Stream

PIECE_S: Final = 0.0002
"""Seconds of device work that a piece of work takes at least."""
BUSY_S: Final = 0.005
"""Seconds for which a stream is kept busy at least."""
LONGER: Final = 4.0
"""Times as long as what is tried takes by itself."""
LONGEST_S: Final = 2.0
"""Seconds for which it is kept busy at most."""
LEAST: Final = 8
"""Pieces of work in front of what is tried, at least."""
CONTROLS: Final = 128
"""How often a stream is filled before it counts as one that cannot be; as often again each time that its work is seen running."""
OPEN: Final = 6
"""How often that has to be."""
SIZINGS: Final = 3
"""How often a kind of work is measured, where what was found is seen neither running nor waited for: a host that was busy with
something else while its pieces were timed has found pieces that are too short."""
ATTEMPTS: Final = 8
"""How often something is tried, for each time that the stream was filled until `OPEN`, before it counts as what waits for the
work in front of it. Once is proof of the opposite; a device that makes progress with every call, and a host that is busy with
something else, need more than one attempt."""
SIZES: Final = tuple(1 << power for power in range(15, 25))
"""Elements of a copy, tried in turn until one takes long enough."""
SHAPES: Final = ((128, 128), (256, 128), (256, 256), (256, 512), (1024, 1024), (4096, 2048), (8192, 4096))
"""Rows of a launch, and the width of the square weight that they are multiplied by, likewise."""
ASKED: Final = 3
"""How often an event is asked where nothing else can be seen: one may hesitate."""
COPIES: Final = (4, 1 << 14, 1 << 20)
"""Elements of copies that are tried behind the work: some devices take other ways for short ones."""
LANDED: Final = 16
"""Elements that are copied to the host behind the work."""


class Work(Protocol):
    """One kind of work on one device."""

    name: str

    def issue(self, stream: Stream, *, last: bool = False, whole: bool = True) -> None:
        """Enqueue a piece; the `last` one leaves what `mark` copies to the host. A piece that is not `whole` is one row of it."""

    def prepare(self) -> None:
        """Make what the last piece leaves new. The device is at rest."""

    def mark(self, stream: Stream) -> None:
        """Enqueue the copy to the host."""

    def landed(self) -> bool:
        """Whether that copy is there."""


class Copies:
    """Uploads of `size` elements; the last one brings a number up that comes down again."""

    name = "copies"

    def __init__(self, device: Device, size: int) -> None:
        self._device, self._size, self._number = device, size, 0
        self._buffer = device.empty("conform.busy", (size,), "i32")
        self._ups = [device.staging(f"conform.busy{i}", (size,), "i32") for i in range(2)]
        self._down = device.staging("conform.busy.down", (size,), "i32")
        for up in self._ups:
            up.array[...] = -2

    def issue(self, stream: Stream, *, last: bool = False, whole: bool = True) -> None:
        """One upload."""
        self._device.upload(stream, self._buffer, self._ups[last], self._size if whole else 1)

    def prepare(self) -> None:
        """The next number."""
        self._number += 1
        self._ups[1].array[:LANDED], self._down.array[:LANDED] = self._number, -1

    def mark(self, stream: Stream) -> None:
        """Down with it."""
        self._device.download(stream, self._down, self._buffer, LANDED)

    def landed(self) -> bool:
        """All of it."""
        return bool((self._down.array[:LANDED] == self._number).all())


class Launches:
    """Launches of `linear` with a square weight; the last one is of a row of its own, whose result comes down."""

    name = "launches"

    def __init__(self, device: Device, table: Any, dtype: str, shape: tuple[int, int]) -> None:
        self._device, (self._rows, width) = device, shape
        values = np.random.default_rng(width).standard_normal(shape, np.float32)
        weight = table.prepare_weight("linear", np.eye(width, dtype=np.float32) + np.float32(0.5), dtype)
        self._whole, *_ = self._bound(table, weight, values, dtype)
        self._last, self._out, self._poison = self._bound(table, weight, values[:1], dtype)
        self._down = device.staging("conform.busy.down", (1, width), dtype)
        self._last(device.stream, 1)
        self.mark(device.stream)
        device.synchronize()
        self._result = self._down.array.copy()

    def _bound(self, table: Any, weight: Any, values: Array, dtype: str) -> tuple[Any, Any, Array]:
        (rows, width), device = values.shape, self._device
        x, out = (device.empty(f"conform.busy.{name}", (rows, width), dtype) for name in ("x", "out"))
        poison = to_host(np.full((rows, width), POISON.real), dtype)
        device.load(x, to_host(values, dtype))
        device.load(out, poison)
        limits = Limits(1, 1, rows, rows, rows, 1, 1, 1, 1, width)
        return table.bind("linear", LinearV1(x=x, weight=weight, bias=None, out=out), limits), out, poison

    def issue(self, stream: Stream, *, last: bool = False, whole: bool = True) -> None:
        """One launch, and one more behind the last."""
        self._whole(stream, self._rows if whole else 1)
        if last:
            self._last(stream, 1)

    def prepare(self) -> None:
        """Poison for what the last launch writes."""
        self._device.load(self._out, self._poison)
        self._down.array.view(np.uint8).fill(0x5A)

    def mark(self, stream: Stream) -> None:
        """Down with the row."""
        self._device.download(stream, self._down, self._out, 1)

    def landed(self) -> bool:
        """The row as it was when nothing was in its way."""
        return bool((self._down.array == self._result).all())


class Filling:
    """A way to keep a stream busy. `piece_s`: seconds that a piece of its work takes; `marked`: whether the last piece is copied
    to the host, which it is not on a device whose downloads wait. `event` lies behind the work, `attempts` is how often to try
    something behind it."""

    def __init__(self, device: Device, work: Work, piece_s: float, *, marked: bool = True) -> None:
        self.work, self.piece_s, self._marked = work, piece_s, marked
        self.event, self.attempts = device.event(), ATTEMPTS

    def fill(self, stream: Stream, seconds: float) -> None:
        """Enqueue about so many seconds of work. The device is at rest. Where nothing is copied to the host, a piece follows the
        event: on a device that does nothing before somebody waits, a point with nothing behind it is not reached when all work
        has run."""
        self.work.prepare()
        for left in reversed(range(max(math.ceil(seconds / self.piece_s), LEAST))):
            if not left and not self._marked:
                self.event.record(stream)
            self.work.issue(stream, last=not left)
        if self._marked:
            self.work.mark(stream)
            self.event.record(stream)

    def runs(self) -> bool:
        """Whether the work is still running, as far as can be seen."""
        landed = self._marked and self.work.landed()
        return not landed and not any(self.event.query() for _ in range(1 if self._marked else ASKED))


@dataclass
class Busy:
    """All ways to keep one stream of a device busy: `fillings`. `waits`: of work that would do and does not, the calls that take
    as long as it."""

    device: Device
    stream: Stream
    fillings: Sequence[Filling]
    waits: Sequence[str]

    def need(self) -> None:
        """Where there is no way, raise `Wrong` on a device whose calls wait, and `Unseen` on one that is quick."""
        if self.waits and not self.fillings:
            raise Wrong(f"asynchronous is declared, but the host waits for work that was issued: {', '.join(self.waits)}")
        if not self.fillings:
            raise Unseen("whether calls return before work has run: the device was never busy for long enough to look")

    def returns(self, call: Callable[[], object], *, before: Callable[[], object] | None = None) -> bool:
        """Whether `call` returns while work in front of it runs, for each way to keep the stream busy. `before` is called first
        each time, on a device at rest. A call that was seen to wait is tried again after it was measured anew how often the
        work is seen running at all: that may have changed with the load of the host. Raises as `need`."""
        self.need()

        def prepare() -> None:
            self.device.synchronize()
            if before is not None:
                before()

        return all(
            self._returns(filling, call, prepare)
            or (_is_open(self.device, self.stream, filling) and self._returns(filling, call, prepare))
            for filling in self.fillings
        )

    def _returns(self, filling: Filling, call: Callable[[], object], prepare: Callable[[], None]) -> bool:
        with at_rest(self.device):
            prepare()
            call()  # whatever settles at a first call
            seconds = max(BUSY_S, LONGER * min(timed(call, prepare) for _ in range(3)))
            for _ in range(filling.attempts):
                prepare()
                filling.fill(self.stream, min(seconds, LONGEST_S))
                call()
                if filling.runs():
                    return True
        return False


@contextmanager
def at_rest(device: Device) -> Iterator[None]:
    """Wait for the device behind the block, however it ends: what was enqueued works on memory of the check."""
    try:
        yield
    finally:
        device.synchronize()


def timed(call: Callable[[], object], prepare: Callable[[], object]) -> float:
    """Seconds of one call behind `prepare`."""
    prepare()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- finding out -----------------------------------------------------------------------------------------
def busy(device: Device, table: Any, dtype: str, stream: Stream | None = None) -> Busy:
    """Find out in which ways a stream of a device can be kept busy (None: the one that kernels run on, and launches keep busy as
    well), and how much work that takes."""
    compute, stream = stream is None, device.stream if stream is None else stream
    kinds: list[Sequence[Callable[[], Work]]] = [[partial(Copies, device, size) for size in SIZES]]
    if compute and "linear" in table.providers:
        kinds.append([partial(Launches, device, table, dtype, shape) for shape in SHAPES])
    tried = [_tried(device, stream, kind) for kind in kinds]
    waits = dict.fromkeys(waiting for _, waiting in tried if waiting)
    return Busy(device, stream, [filling for filling, _ in tried if filling is not None], tuple(waits))


def _tried(device: Device, stream: Stream, kind: Sequence[Callable[[], Work]]) -> tuple[Filling | None, str]:
    """The way to keep the stream busy with one kind of work, or what waits for that work ("" where nothing is seen to)."""
    for _ in range(SIZINGS):
        work, piece_s = _sized(device, stream, kind)
        if not piece_s:
            break
        ways = (Filling(device, work, piece_s, marked=marked) for marked in (True, False))
        usable = next((way for way in ways if _is_open(device, stream, way)), None)
        waiting = "" if usable is not None else _waiting(device, stream, work, piece_s)
        if usable is not None or waiting:
            return usable, waiting
    return None, ""


def _sized(device: Device, stream: Stream, kind: Sequence[Callable[[], Work]]) -> tuple[Work, float]:
    """The first work of which a piece takes long enough, also beside the host's time to issue one, and the seconds of a piece; 0
    where none does."""
    for make in kind:
        work = make()
        row_s, whole_s = (_seconds(device, stream, work, whole=whole) for whole in (False, True))
        piece_s = whole_s - row_s
        if piece_s > max(PIECE_S, 2 * _seconds(device, stream, work, whole=False, wait=False)):
            return work, piece_s
    return kind[0](), 0.0


def _seconds(device: Device, stream: Stream, work: Work, *, whole: bool, wait: bool = True) -> float:
    """Seconds until one piece, or one row of it, has run, or without `wait` until it has been issued: the least of some."""

    def call() -> None:
        work.issue(stream, whole=whole)
        if wait:
            device.synchronize()

    with at_rest(device):
        call()
        return min(timed(call, device.synchronize) for _ in range(5))


def _is_open(device: Device, stream: Stream, filling: Filling) -> bool:
    """Whether its work can be seen running behind one more launch or copy; how often that took decides its attempts."""
    number = seen = 0
    while seen < OPEN and number < CONTROLS * (1 + seen):
        number += 1
        with at_rest(device):
            filling.fill(stream, BUSY_S)
            filling.work.issue(stream, whole=False)
            seen += filling.runs()
    filling.attempts = ATTEMPTS * number
    return seen == OPEN


def _waiting(device: Device, stream: Stream, work: Work, piece_s: float) -> str:
    """What takes as long as the work, of the calls that enqueue it, copy it and ask for it; "" where they do not. Enqueuing waits
    where it takes longer than enqueuing as many single rows, by more than half of the work; calls behind it where they take more
    than a quarter, since it runs while it is enqueued. The first is the least of some times, the others are medians."""
    event = device.event()

    def issue(*, whole: bool = True) -> None:
        for _ in range(LEAST):
            work.issue(stream, whole=whole)

    behind: dict[str, Callable[[], object]] = {
        "downloads wait": lambda: work.mark(stream),
        "event.record() waits": lambda: event.record(stream),
        "event.query() waits": event.query,
    }
    rows, whole, took = math.inf, math.inf, {name: list[float]() for name in behind}
    for _ in range(7):
        with at_rest(device):
            rows = min(rows, timed(partial(issue, whole=False), device.synchronize))
            whole = min(whole, timed(issue, device.synchronize))
            for name, call in behind.items():
                took[name].append(timed(call, lambda: None))
    if whole - rows > LEAST * piece_s / 2:
        return f"{work.name} wait"
    longest = max(took, key=lambda name: statistics.median(took[name]))
    return longest if statistics.median(took[longest]) > LEAST * piece_s / 4 else ""
