"""The Python side of the emulated Paddle device: where its library lies, pinned memory, what it counts, faults it can have, and
lists of operations that it can be narrowed to.

polydraft's Paddle backend, tests and tools use it. It has to be asked after `import paddle`, which loads the library; the device
works without it.
"""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from polydraft_paddle_emu.operation_lists import NAMES, OperationList, read

DEVICE: Final = "polyemu:0"
"""What `paddle.set_device` and `--device` call it."""
COUNTERS: Final = (
    "kernels", "copies", "pageable_copies", "synchronous_copies", "graph_launches", "collectives", "bytes_in_use", "peak_bytes",
    "graph_bytes",
)  # fmt: skip
"""What `counter` knows: device kernels queued; copies queued, those of them that on a chip would wait, because an end of them is
host memory that is not pinned, and copies that the host waited for; graphs launched; collectives queued; bytes in use and their
peak, and bytes among them that captured work was given, which all graphs share."""
KNOBS: Final = ("latency_us", "copies_until_failure", "bytes_limit", "lost", "tf32", "last_maximum", "no_graphs")
"""What `set_knob` knows: microseconds that every piece of work takes at least; copies until one fails (-1: none does); bytes of
device memory; and, not 0, a device that answers nothing any more, that rounds the factors of float32 products to TF32, whose
`argmax` takes the last of equal maxima, that captures nothing."""


def library() -> Path:
    """The device's library, in the folder in which Paddle looks for custom devices."""
    return Path(__file__).parent.parent / "paddle_custom_device" / "libpaddle-polyemu.so"


@cache
def _loaded() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library()))
    loaded.polyemu_counter.restype = ctypes.c_int64
    loaded.polyemu_counter.argtypes = [ctypes.c_char_p]
    loaded.polyemu_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    loaded.polyemu_pinned.restype = ctypes.c_void_p
    loaded.polyemu_pinned.argtypes = [ctypes.c_size_t]
    loaded.polyemu_unpinned.restype = None
    loaded.polyemu_unpinned.argtypes = [ctypes.c_void_p]
    loaded.polyemu_offer.restype = ctypes.c_int64
    loaded.polyemu_offer.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]
    loaded.polyemu_begin.restype = None
    loaded.polyemu_begin.argtypes = [ctypes.c_char_p]
    loaded.polyemu_end.restype = ctypes.c_char_p
    loaded.polyemu_be_patient.argtypes = [ctypes.c_int64]
    loaded.polyemu_be_patient.restype = None
    loaded.polyemu_expect.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    loaded.polyemu_expect.restype = None
    loaded.polyemu_communicator.restype = ctypes.c_void_p
    loaded.polyemu_abandon.restype = None
    loaded.polyemu_log.restype = ctypes.c_char_p
    return loaded


def counter(name: str) -> int:
    """One of `COUNTERS`, since the process began. Raises `KeyError` for another name."""
    if name not in COUNTERS:
        raise KeyError(f"the device counts {', '.join(COUNTERS)}, got {name!r}; name one of these")
    return int(_loaded().polyemu_counter(name.encode()))


def set_knob(name: str, value: int) -> None:
    """Set one of `KNOBS` for the process. Raises `KeyError` for another name."""
    if name not in KNOBS:
        raise KeyError(f"the device has the knobs {', '.join(KNOBS)}, got {name!r}; name one of these")
    _loaded().polyemu_set(name.encode(), value)


def reason() -> str:
    """Why there is no device: there always is one."""
    return ""


def graph_memory() -> int:
    """Bytes of device memory that graphs hold for what their work computes on the way, all graphs of the process together."""
    return counter("graph_bytes")


def pinned_memory(index: int, nbytes: int) -> Any:
    """A ctypes array of `nbytes` bytes of pinned memory for copies to and from device `index`. It is given back with the last
    reference to it or to a view of it. Raises `MemoryError` where there is none."""
    del index
    pointer = _loaded().polyemu_pinned(max(nbytes, 1))
    if not pointer:
        raise MemoryError(f"no {nbytes:,} bytes of pinned memory")
    memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(pointer)
    weakref.finalize(memory, _loaded().polyemu_unpinned, pointer).atexit = False  # copies may still be queued then
    return memory


# -- collectives -------------------------------------------------------------------------------------
class Communicator:
    """What the process is one rank of."""

    def __init__(self, handle: int) -> None:
        self._handle = ctypes.c_void_p(handle)

    def abandon(self) -> None:
        """Let its collectives wait for nobody any more: they do nothing from now on."""
        _loaded().polyemu_abandon(self._handle)

    def gave_up(self) -> tuple[int, ...] | None:
        """None while collectives do what they should. Once they have given up: kind, launch, step, rows and bytes of the one in
        which this rank did, as `Collectives.expect` was told, and the rank that did not come, or came for something else."""
        found = (ctypes.c_int64 * 6)()
        return tuple(found) if _loaded().polyemu_gave_up(self._handle, found) else None


class Collectives:
    """What the device's library of collectives is told beside what Paddle tells it."""

    def be_patient(self, seconds: float) -> None:
        """How long collectives of communicators to come wait for other ranks; infinity for as long as it takes, as at first."""
        _loaded().polyemu_be_patient(-1 if math.isinf(seconds) else int(seconds * 1000))

    def expect(self, kind: int, launch: int, step: int, rows: int, nbytes: int) -> None:
        """What this thread queues next, for ranks to compare when it runs; `step` is the address of an int32 on the device."""
        _loaded().polyemu_expect(kind, launch, step, rows, nbytes)

    def joined(self) -> Communicator:
        """The communicator that the process has joined last."""
        return Communicator(_loaded().polyemu_communicator())


collectives: Final = Collectives()


# -- lists of operations -----------------------------------------------------------------------------
def chosen(options: str) -> OperationList | None:
    """The list that the options of a device's name choose, `ops=NAME`; None where there are no options. Raises `ValueError`."""
    if not options:
        return None
    key, _, name = options.partition("=")
    if key != "ops" or name not in NAMES:
        raise ValueError(f"got the options {options!r}, wanted {' or '.join(f'ops={known}' for known in NAMES)}")
    return read(name)


def f32_matmul(options: str) -> str:
    """What float32 products round their factors to, "f32" or "tf32". Raises `ValueError` for options that there are not."""
    wanted = chosen(options)
    return wanted.f32_matmul if wanted else "f32"


def activations(options: str) -> tuple[str, ...] | None:
    """Dtypes that a model can be run in, None for all that the device has. Raises `ValueError` for options that there are not."""
    wanted = chosen(options)
    return wanted.activations if wanted else None


def configure(options: str, *, refuse_waits: bool) -> None:
    """Open the device with what the options of its name choose: with a list Paddle's table loses every other kernel of the
    device, for good, and a launch in which the host waits is complained of, if waits are to be refused. Raises `ValueError`
    for options that there are not, and for others than the process has opened the device with before."""
    wanted = chosen(options)
    if not _OPENED:
        _OPENED.append(wanted)
        if wanted is not None:
            offered = "\n".join(f"{name} {' '.join(sorted(dtypes))}" for name, dtypes in wanted.kernels.items() if dtypes)
            _loaded().polyemu_offer(offered.encode(), " ".join(sorted(wanted.waits)).encode(), wanted.is_custom)
            set_knob("tf32", wanted.f32_matmul == "tf32")
            set_knob("last_maximum", wanted.last_maximum)
            set_knob("no_graphs", not wanted.graphs)
            gc.callbacks.append(_collecting)
    if _OPENED[0] is not wanted:
        before = f"with ops={_OPENED[0].name}" if _OPENED[0] else "without options"
        raise ValueError(f"this process has opened the device {before}, which lasts until it ends; use another process")
    _LAUNCHES.refuse_waits = refuse_waits


_OPENED: list[OperationList | None] = []
"""What the process has opened the device with, once it has."""


class Launches:
    """What the device is told of launches, and says of them."""

    refuse_waits = False

    def begin(self, contract: str) -> None:
        """The launch of a contract begins on this thread."""
        _loaded().polyemu_begin(contract.encode())

    def end(self) -> str:
        """It has ended: what made the host wait in it, for a sentence; "" where nothing did, or waits are allowed."""
        waits = Counter(_loaded().polyemu_end().decode().splitlines())
        return " and ".join(what if n == 1 else f"{n} times {what}" for what, n in waits.items()) if self.refuse_waits else ""


_LAUNCHES: Final = Launches()
COLLECTING: Final = "garbage collection"
"""What the log calls waits of Python's collector, which Paddle's events make when they go: a launch within the one that it came
upon."""


def _collecting(phase: str, info: Any) -> None:
    del info
    if phase == "start":
        _LAUNCHES.begin(COLLECTING)
    else:
        _LAUNCHES.end()


def launches() -> Launches | None:
    """Whom to tell of launches; None where the device was opened without a list."""
    return _LAUNCHES if _OPENED and _OPENED[0] else None


class Seen(NamedTuple):
    """What the device has seen since it was opened with a list, by contract ("" outside launches)."""

    kernels: dict[str, Counter[str]]
    """Kernels that ran, such as `add in float32`. What is replayed counts once, when it was captured."""
    waits: dict[str, Counter[str]]
    """What made the host wait: a kernel that waits for the host on the chip, or a copy or a synchronisation."""


def log() -> Seen:
    """The device's log."""
    seen = Seen({}, {})
    for line in _loaded().polyemu_log().decode().splitlines():
        kind, contract, what, count = line.split("\t")
        (seen.kernels if kind == "kernel" else seen.waits).setdefault(contract, Counter())[what] = int(count)
    return seen
