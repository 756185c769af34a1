"""The watched device: streams, events, copies and memory of any device, each call reported to the checker and passed on.

Core gets it instead of the backend's device; the backend's own code only ever sees its own objects again. It never changes
when or whether something happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polydraft.device import Array, Buffer, Device, Event, Staging, Stream, further_stream
from polydraft.errors import DeviceError
from polydraft.instruments.base import WrappedDevice, bare
from polydraft.instruments.sanitize.checker import Checker
from polydraft.instruments.sanitize.memory import Memory, StagingMemory
from polydraft.instruments.sanitize.observed import Observations, observer
from polydraft.instruments.sanitize.order import Agent
from polydraft.instruments.sanitize.ordering import Point
from polydraft.instruments.sanitize.staging import WatchedStaging


class WatchedStream:
    """A stream of the inner device."""

    def __init__(self, inner: Stream, device: WatchedDevice, agent: Agent) -> None:
        self.inner, self.agent, self._device = inner, agent, device

    def wait(self, event: Event) -> None:
        """Make later work wait for `event`; never blocks the host."""
        checker = self._device.checker
        if isinstance(event, WatchedEvent):
            checker.stream_waits(self.agent, event.point, event.name)
            event = event.inner
        with checker.inside(self._device.inner, "stream.wait", self.agent):
            self.inner.wait(event)


class WatchedEvent:
    """An event of the inner device; `point` is what it stands for, `name` what reports call it."""

    def __init__(self, inner: Event, device: WatchedDevice, name: str) -> None:
        self.inner, self.name, self.point, self._device = inner, name, Point(), device

    def record(self, stream: Stream) -> None:
        """Move the event behind all work queued on `stream` so far."""
        watched = self._device.stream_of(stream)
        self._device.checker.record(self.point, watched.agent, self.name)
        with self._device.checker.inside(self._device.inner, "event.record", watched.agent):
            self.inner.record(watched.inner)

    def query(self) -> bool:
        """True when the recorded point has been reached; never blocks the host."""
        checker = self._device.checker
        if checker.recording is not None:
            checker.wait_refused_here(f"query of {self.name}", self.name)
        reached = bool(self._device.failing(self.inner.query))
        if reached:
            checker.host_knows(self.point)
        return reached

    def synchronize(self) -> None:
        """Block the host until the recorded point has been reached."""
        self._device.checker.host_waits(self.point, self.name)
        self._device.failing(self.inner.synchronize)
        self._device.checker.host_knows(self.point)


class WatchedDevice(WrappedDevice):
    """Any device, watched. What a device has beyond the protocol is reached as it is, but for what takes or gives a stream or
    gives memory back."""

    stream: WatchedStream

    def __init__(self, inner: Device, checker: Checker) -> None:
        super().__init__(inner)
        self.checker = checker
        self._streams: dict[int, WatchedStream] = {}
        self.stream = self.stream_of(inner.stream, "compute")
        self._num_events = 0
        observing = observer(bare(inner))
        if observing is not None:
            checker.observations = Observations(observing)

    # -- streams and events ------------------------------------------------------------------------
    def stream_of(self, stream: Any, name: str = "") -> WatchedStream:
        """The watched form of a stream, which may be one already."""
        if isinstance(stream, WatchedStream):
            return stream
        if id(stream) not in self._streams:
            agent = self.checker.agent(name or str(getattr(stream, "name", "")) or f"stream {len(self._streams)}")
            self._streams[id(stream)] = WatchedStream(stream, self, agent)
        return self._streams[id(stream)]

    def make_stream(self, name: str) -> WatchedStream:
        """A further stream, or the compute stream on devices that have no other."""
        return self.stream_of(further_stream(self.inner, name), name)

    def event(self) -> WatchedEvent:
        """A fresh event."""
        self._num_events += 1
        return WatchedEvent(self.inner.event(), self, f"event {self._num_events}")

    def failing(self, call: Any) -> Any:
        """Call the device; a `DeviceError` voids what is in flight."""
        try:
            return call()
        except DeviceError:
            self.checker.reset()
            raise

    # -- memory ------------------------------------------------------------------------------------
    def empty(self, name: str, shape: Sequence[int], dtype: str) -> Buffer:
        """Allocate a buffer: the backend's own object."""
        trace = self.checker.allocates(name)
        buffer = self.inner.empty(name, shape, dtype)
        self.checker.memories.add(Memory(buffer, name, int(shape[0]) if shape else 1, made=trace))
        return buffer

    def staging(self, name: str, shape: Sequence[int], dtype: str) -> WatchedStaging:
        """Allocate pinned host memory, whose `array` is guarded."""
        trace = self.checker.allocates(name, staging=True)
        staging = self.inner.staging(name, shape, dtype)
        memory = StagingMemory(staging, name, int(shape[0]) if shape else 1, made=trace)
        self.checker.memories.add(memory)
        return WatchedStaging(staging, self.checker, memory)

    def load(self, target: Buffer, value: Array) -> None:
        """Fill a buffer from a host array, outside the step path."""
        self.checker.host_writes(target, "load")
        self.failing(lambda: self.inner.load(target, value))

    def free(self, memory: Any) -> None:
        """Give memory back, on devices that can; `AttributeError` elsewhere."""
        free: Any = self.inner.free  # type: ignore[attr-defined]
        self.checker.free(memory)
        free(memory)

    # -- copies ------------------------------------------------------------------------------------
    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        """Enqueue a copy of the first `rows` rows of staging into a buffer."""
        watched, (inner, memory) = self.stream_of(stream), self._staging(source)
        self.checker.upload(watched.agent, target, memory, rows)
        with self.checker.inside(self.inner, f"upload into {target.name}", watched.agent):
            self.inner.upload(watched.inner, target, inner, rows)

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """Enqueue a copy of the first `rows` rows of a buffer into staging."""
        watched, (inner, memory) = self.stream_of(stream), self._staging(target)
        self.checker.download(watched.agent, memory, source, rows)
        with self.checker.inside(self.inner, f"download of {source.name}", watched.agent):
            self.inner.download(watched.inner, inner, source, rows)

    def _staging(self, staging: Staging) -> tuple[Staging, StagingMemory]:
        if not isinstance(staging, WatchedStaging):
            raise DeviceError(f"staging of {type(staging).__name__} was not allocated by {self.spec}; use its own")
        return staging.inner, staging.memory

    def enqueue(self, stream: Stream, work: Any, *more: Any) -> None:
        """Enqueue a function of the host's, on devices that can; what it touches is not known. `AttributeError` elsewhere."""
        enqueue: Any = self.inner.enqueue  # type: ignore[attr-defined]
        watched = self.stream_of(stream)
        self.checker.issue(watched.agent, "host function", [])
        enqueue(watched.inner, work, *more)

    # -- the rest ----------------------------------------------------------------------------------
    def synchronize(self) -> None:
        """Block until everything enqueued has run. An engine asks for it where no step is in flight, or where it discards those
        that are."""
        self.checker.wait_refused_here("wait for the device", "the device")
        self.failing(self.inner.synchronize)
        self.checker.reset()

    def close(self) -> None:
        """Free everything; what is used behind this is reported."""
        self.inner.close()
        self.checker.close()
