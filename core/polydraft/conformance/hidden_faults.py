"""Faults that no counter of the backend's shows: calls that wait, memory taken in launches, kernels that wear out, engines that
share what is one's own.

`faulty_backends.py` puts them around backends. All of them take back what they leave in counters, and leave captures alone, as a
backend would that hides them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

from polydraft.conformance import fault_injection as by
from polydraft.conformance.target import Proxy, TableProxy, bare, wrap
from polydraft.device import further_stream
from polydraft.errors import DeviceError

LONG: Final = 1 << 16
"""Elements of a copy that is long."""
OFTEN: Final = 32
"""Launches of which one waits: fewer than a step makes."""
LATE: Final = 100
"""Which use of something goes wrong."""
LATER: Final = 200
"""Which use goes wrong of what has been tried for a while."""
SLOW_S: Final = 0.001
"""Seconds of the host that a launch takes on a slow device."""
QUEUE: Final = 256
"""Calls that a short queue holds: more than a step makes."""


def finish(device: Any) -> None:
    """Wait for everything, in secret; a capture is left alone."""
    with by.uncounted(device), suppress(DeviceError):
        device.synchronize()


def every_launch(change: Callable[[Any, Any], Any]) -> by.Break:
    """Replace the launches of all kernels: `change(launch, device)` returns what is launched instead, once for each binding."""
    return by.with_table(lambda table, device: {n: by.Launched(one, change, device) for n, one in table.providers.items()})


def both(first: by.Break, second: by.Break) -> by.Break:
    """Two faults at once."""
    return lambda plugin: second(first(plugin))


# -- calls that wait -----------------------------------------------------------------------------------
def finishing(launch: Any, device: Any) -> Any:
    """A launch behind which the queue is empty."""

    def run(stream: Any, n: int) -> None:
        launch(stream, n)
        finish(device)

    return run


def now_and_then(plugin: Any) -> Any:
    """One launch of some is such a launch, whichever kernel's it is."""
    number = [0]

    def change(launch: Any, device: Any) -> Any:
        def run(stream: Any, n: int) -> None:
            launch(stream, n)
            number[0] += 1
            if not number[0] % OFTEN:
                finish(device)

        return run

    return every_launch(change)(plugin)


def one_in_flight(plugin: Any) -> Any:
    """A launch waits for the one before it, and for nothing else."""
    last: dict[Any, Any] = {}

    def change(launch: Any, device: Any) -> Any:
        def run(stream: Any, n: int) -> None:
            with by.uncounted(device), suppress(DeviceError):
                if device in last:
                    last[device].synchronize()
            launch(stream, n)
            with suppress(DeviceError):
                last.setdefault(device, device.event()).record(stream)

        return run

    return every_launch(change)(plugin)


class WaitingCopies(Proxy):
    """A device whose copies, or only long ones, have happened when the call returns."""

    def __init__(self, inner: Any, least: int = 0) -> None:
        super().__init__(inner)
        self._least = least

    def upload(self, stream: Any, target: Any, source: Any, rows: int) -> None:
        self._inner.upload(stream, target, source, rows)
        self._wait(source, rows)

    def download(self, stream: Any, target: Any, source: Any, rows: int) -> None:
        self._inner.download(stream, target, source, rows)
        self._wait(target, rows)

    def _wait(self, staging: Any, rows: int) -> None:
        if staging.array[:rows].size >= self._least:
            finish(self._inner)


class WaitingRecords(Proxy):
    """An event that is recorded when everything before it has run."""

    def __init__(self, inner: Any, device: Any) -> None:
        super().__init__(inner)
        self._device = device

    def record(self, stream: Any) -> None:
        self._inner.record(stream)
        finish(self._device)


class WaitingForAll(Proxy):
    """An event of which waiting waits for whatever was enqueued."""

    def __init__(self, inner: Any, device: Any) -> None:
        super().__init__(inner)
        self._device = device

    def synchronize(self) -> None:
        self._inner.synchronize()
        finish(self._device)


class WaitingStreams(Proxy):
    """A device whose streams make the host wait for the events that they should wait for."""

    def make_stream(self, name: str) -> Any:
        stream, device = self._inner.make_stream(name), self._inner

        def wait(event: Any) -> None:
            with by.uncounted(device):
                event.synchronize()

        vars(stream)["wait"] = wait  # a stream may be frozen
        return stream


def metadata_waits(plugin: Any) -> Any:
    """Forward metadata is worked out on the host, which waits for what it reads."""

    def waiting(meta: Any, device: Any, **_: Any) -> Any:
        fill = meta.fill

        def filled(stream: Any, step: Any) -> None:
            finish(bare(device))
            fill(stream, step)

        vars(meta)["fill"] = filled
        return meta

    return wrap(plugin, polydraft_init_forward_meta=waiting)


class WaitingReplays(Proxy):
    """A facility whose graphs have been replayed when the call returns."""

    def __init__(self, inner: Any, device: Any) -> None:
        super().__init__(inner)
        self._device = device

    def capture(self, stream: Any, fn: Callable[[], None]) -> Any:
        graph = self._inner.capture(stream, fn)

        def replay(stream: Any) -> None:
            graph.replay(stream)
            finish(self._device)

        return SimpleNamespace(replay=replay)


# -- copies out of their turn ----------------------------------------------------------------------------
class _Aside(Proxy):
    """A device with a way past the streams: what is done on a stream of its own, and has happened when the call returns."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._stream: Any = None

    def _aside(self, copy: Callable[..., None], *arguments: Any) -> None:
        device = self._inner
        with by.uncounted(device):
            self._stream = self._stream or further_stream(device, "mutant.aside")
        copy(self._stream, *arguments)
        with by.uncounted(device):
            event = device.event()
            event.record(self._stream)
            event.synchronize()


class EarlyUploads(_Aside):
    """A device whose uploads happen when they are called."""

    def upload(self, stream: Any, target: Any, source: Any, rows: int) -> None:
        del stream
        self._aside(self._inner.upload, target, source, rows)


class EarlyDownloads(_Aside):
    """A device whose downloads happen when they are called."""

    def download(self, stream: Any, target: Any, source: Any, rows: int) -> None:
        del stream
        self._aside(self._inner.download, target, source, rows)


class EarlyLoads(_Aside):
    """A device whose loads overtake what still works on the buffer, by staging that it keeps: making some may wait."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._pins: dict[Any, Any] = {}

    def load(self, target: Any, value: Any) -> None:
        if tuple(target.shape) != value.shape:
            self._inner.load(target, value)  # which refuses it
        form = value.shape, target.dtype
        with by.uncounted(self._inner):
            if form not in self._pins:
                self._pins[form] = self._inner.staging("mutant.load", *form)
            self._pins[form].array[...] = value
            self._aside(self._inner.upload, target, self._pins[form], len(value))


class AliasingLoads(Proxy):
    """A device whose loads read the caller's array when their turn comes: here, when somebody waits."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._late: list[tuple[Any, Any]] = []

    def load(self, target: Any, value: Any) -> None:
        self._inner.load(target, value)
        self._late.append((target, value))

    def synchronize(self) -> None:
        self._inner.synchronize()
        late, self._late = self._late, []
        for target, value in late:
            self._inner.load(target, value)


# -- memory --------------------------------------------------------------------------------------------
def allocating(launch: Any, device: Any) -> Any:
    """A launch with a clone that nobody keeps."""

    def run(stream: Any, n: int) -> None:
        with by.uncounted(device), suppress(DeviceError):
            device.empty("mutant.clone", (4,), "f32")
        launch(stream, n)

    return run


def _take(device: Any, kept: list[Any]) -> None:
    """Allocate past the functions that the device shows, and keep it."""
    with by.uncounted(device), suppress(DeviceError):
        kept.append(type(device).empty(device, "mutant.kept", (16,), "f32"))


def keeping(launch: Any, device: Any) -> Any:
    """A launch that leaves memory taken."""
    kept: list[Any] = []

    def run(stream: Any, n: int) -> None:
        _take(device, kept)
        launch(stream, n)

    return run


def keeping_elsewhere(launch: Any, device: Any) -> Any:
    """A launch that leaves memory of the host taken, by a thread of its own."""
    del device
    kept: list[Any] = []
    worker = ThreadPoolExecutor(1)

    def run(stream: Any, n: int) -> None:
        worker.submit(lambda: kept.append(bytearray(4096))).result()
        launch(stream, n)

    return run


class KeepingUploads(Proxy):
    """A device whose uploads leave memory taken."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._kept: list[Any] = []

    def upload(self, stream: Any, target: Any, source: Any, rows: int) -> None:
        _take(self._inner, self._kept)
        self._inner.upload(stream, target, source, rows)


# -- wear ----------------------------------------------------------------------------------------------
def wears_out(at: int) -> Callable[[Any, Any], Any]:
    """A launch that does nothing once, the `at`th time."""

    def change(launch: Any, device: Any) -> Any:
        del device
        number = [0]

        def run(stream: Any, n: int) -> None:
            number[0] += 1
            if number[0] != at:
                launch(stream, n)

        return run

    return change


class GraphsWearOut(Proxy):
    """A facility each of whose graphs does nothing once, late."""

    def capture(self, stream: Any, fn: Callable[[], None]) -> Any:
        graph, number = self._inner.capture(stream, fn), [0]

        def replay(stream: Any) -> None:
            number[0] += 1
            if number[0] != LATE:
                graph.replay(stream)

        return SimpleNamespace(replay=replay)


def captured_for_good(plugin: Any) -> Any:
    """A binding that has been captured is replayed from then on, and launched no more."""
    captures = [False]

    def change(launch: Any, device: Any) -> Any:
        del device
        captured: list[bool] = []

        def run(stream: Any, n: int) -> None:
            if captures[0]:
                captured.append(True)
            if captures[0] or not captured:
                launch(stream, n)

        return run

    with_captures = by.with_capture(lambda facility, device: by.NotedCaptures(facility, captures))
    return both(by.launched("swiglu", change), with_captures)(plugin)


# -- engines -------------------------------------------------------------------------------------------
def caches_of_all(plugin: Any) -> Any:
    """The first cache of a table is that of every other table that asks for one of its form first, the second likewise."""
    made: dict[Any, Any] = {}

    class Shared(TableProxy):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner, {})
            self._asked = 0

        def allocate_cache(self, spec: Any) -> Any:
            self._asked += 1
            key = self._asked, spec
            if key not in made:
                made[key] = self._inner.allocate_cache(spec)
            return made[key]

    return wrap(plugin, polydraft_kernels=lambda table, device: Shared(table))


def bindings_of_all(plugin: Any) -> Any:
    """The first binding of a kernel takes the place of the first binding of that kernel in every other table, and so on."""
    bound: dict[Any, Any] = {}

    class Placed(Proxy):
        def __init__(self, inner: Any, name: str) -> None:
            super().__init__(inner)
            self._name, self._number = name, 0

        def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
            self._number += 1
            key = self._name, self._number
            bound[key] = self._inner.bind(args, limits, workspace)

            def launch(stream: Any, n: int) -> None:
                bound[key](stream, n)  # whatever that is by then

            return launch

    return by.with_table(lambda table, device: {n: Placed(one, n) for n, one in table.providers.items()})(plugin)


def closed_with_another(plugin: Any) -> Any:
    """Closing one device ends all that are open."""
    opened: list[Any] = []

    class Together(Proxy):
        ended = False

        def upload(self, stream: Any, target: Any, source: Any, rows: int) -> None:
            if self.ended:
                raise DeviceError("the context of this device was destroyed; open a new engine")
            self._inner.upload(stream, target, source, rows)

        def close(self) -> None:
            for one in opened:
                one.ended = True
            self._inner.close()

    def open_device(answer: Any, **_: Any) -> Any:
        opened.append(Together(answer))
        return opened[-1]

    return wrap(plugin, polydraft_open_device=open_device)


# -- what is legal ---------------------------------------------------------------------------------------
def slow(launch: Any, device: Any) -> Any:
    """A launch that takes the host long, and waits for nothing."""
    del device

    def run(stream: Any, n: int) -> None:
        time.sleep(SLOW_S)
        launch(stream, n)

    return run


class LateLoads(Proxy):
    """A device whose loads wait for everything that was enqueued."""

    def load(self, target: Any, value: Any) -> None:
        finish(self._inner)
        self._inner.load(target, value)


class Amnesia(Proxy):
    """A device that drops the weights that it is to keep while it sleeps."""

    def sleep(self, *, keep_weights: bool) -> None:
        del keep_weights
        self._inner.sleep(keep_weights=False)


class SnapshotUploads(Proxy):
    """A device that takes what an upload brings when it is called, and copies it to the buffer when it is its turn."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._taken: list[tuple[Any, Any]] = []

    def upload(self, stream: Any, target: Any, source: Any, rows: int) -> None:
        with by.uncounted(self._inner):
            self._taken = [(event, taken) for event, taken in self._taken if not event.query()]
            taken = self._inner.staging("variant.upload", (max(rows, 1), *source.array.shape[1:]), target.dtype)
        taken.array[:rows] = source.array[:rows]
        self._inner.upload(stream, target, taken, rows)
        event = self._inner.event()
        event.record(stream)
        self._taken.append((event, taken))


class _Bounded:
    """Waits, each time that half a queue has been filled, until the half before it is empty."""

    def __init__(self, device: Any) -> None:
        self._device, self._event, self._calls = device, device.event(), 0

    def note(self, stream: Any) -> None:
        """A call has been made on a stream."""
        self._calls += 1
        if not self._calls % (QUEUE // 2):
            with by.uncounted(self._device), suppress(DeviceError):
                self._event.synchronize()
                self._event.record(stream)


class _BoundedDevice(Proxy):
    """A device whose copies lie in such a queue."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.calls = _Bounded(inner)

    def upload(self, stream: Any, target: Any, source: Any, rows: int) -> None:
        self._inner.upload(stream, target, source, rows)
        self.calls.note(stream)

    def download(self, stream: Any, target: Any, source: Any, rows: int) -> None:
        self._inner.download(stream, target, source, rows)
        self.calls.note(stream)


def short_queue(plugin: Any) -> Any:
    """A device that blocks when its queue is full, of copies and launches alike."""
    queues: dict[Any, _Bounded] = {}

    def open_device(answer: Any, **_: Any) -> Any:
        device = _BoundedDevice(answer)
        queues[bare(answer)] = device.calls
        return device

    def change(launch: Any, device: Any) -> Any:
        def run(stream: Any, n: int) -> None:
            launch(stream, n)
            queues[device].note(stream)

        return run

    return both(every_launch(change), lambda one: wrap(one, polydraft_open_device=open_device))(plugin)
