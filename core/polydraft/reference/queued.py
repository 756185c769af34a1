"""The queued device: the reference's kernels on streams that are queues, with captured graphs, on the same CPU.

The reference plugin opens it for the device string `queued`, so that overlap and graphs can be tried without an accelerator. It
computes nothing itself, and runs no item earlier than an event or `synchronize` demands it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from polydraft.contracts.base import Args, Limits, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import Array, Buffer, Launch, Staging, Stream
from polydraft.errors import DeviceError, GraphBufferError, PolydraftError
from polydraft.reference.device import ReferenceDevice, poison_array
from polydraft.reference.provider import Kernel, arrays_of

Work = Callable[[], None]


class Mark:
    """One recorded point of a stream: reached once everything queued before it has run."""

    def __init__(self, stream: QueuedStream) -> None:
        self.stream, self.reached = stream, False

    def arrive(self) -> None:
        """The point itself, as an item of the queue."""
        self.reached = True

    def reach(self) -> None:
        """Run the mark's stream up to it, and nothing behind it."""
        while not self.reached:
            self.stream.run_one()


class QueuedStream:
    """A queue of work. `wait` queues a barrier, which runs another stream only when its own turn comes."""

    def __init__(self, name: str, device: QueuedDevice) -> None:
        self.name, self._device = name, device
        self.queue: deque[Work] = deque()

    def wait(self, event: QueuedEvent) -> None:
        """Later work of this stream runs behind the event's point."""
        self._device.refuse_in_capture("stream.wait")
        if event.mark is not None:
            self.queue.append(event.mark.reach)

    def run_one(self) -> None:
        """Run the oldest item. An empty queue means that somebody waits for what was never queued, or was given up."""
        if not self.queue:
            raise DeviceError(
                f"stream {self.name} is empty, yet somebody waits for it; record the event behind work that has not failed"
            )
        self._device.perform(self.queue.popleft())


class QueuedEvent:
    """A point in a stream. Recording it again moves it; those who waited for the old point still wait for that."""

    def __init__(self, device: QueuedDevice) -> None:
        self._device = device
        self.mark: Mark | None = None

    def record(self, stream: QueuedStream) -> None:
        """Move the event behind what `stream` holds."""
        self._device.refuse_in_capture("event.record")
        self.mark = Mark(stream)
        stream.queue.append(self.mark.arrive)

    def query(self) -> bool:
        """Whether the point was reached. Asking runs nothing."""
        self._device.refuse_in_capture("event.query")
        return self.mark is None or self.mark.reached

    def synchronize(self) -> None:
        """Run what stands before the point."""
        self._device.refuse_in_capture("event.synchronize")
        self._device.counters.host_syncs += 1
        if self.mark is not None:
            self.mark.reach()


class QueuedBuffer:
    """Device memory. Looking at it from the host while work is outstanding raises; kernels look when they are bound and run."""

    def __init__(self, name: str, array: Array, dtype: str, device: QueuedDevice) -> None:
        self.name, self.dtype, self.array, self._device = name, dtype, array, device
        self.shape: tuple[int, ...] = array.shape

    @property
    def host_array(self) -> Array:
        """The memory itself."""
        if self._device.outstanding and not self._device.is_open:
            raise DeviceError(f"the host looked at device buffer {self.name} with work outstanding; wait for an event first")
        return self.array


Place = tuple[QueuedBuffer, Array]
"""A buffer, and the memory that it was when something was bound to it."""


class QueuedProvider:
    """A `Provider` over a NumPy kernel whose launches are queued."""

    def __init__(self, kernel: Kernel, device: QueuedDevice) -> None:
        self._kernel, self._device = kernel, device

    def bind(self, args: Args | CompositeArgs, limits: Limits, workspace: Workspace | None) -> Launch:
        """Resolve the arrays once and return the launch."""
        del workspace
        device, parts = self._device, args.parts if isinstance(args, CompositeArgs) else (args,)
        with device.memory_open():
            run = self._kernel(arrays_of(args), limits)
        buffers = (value for part in parts for value in vars(part).values())
        places = tuple((value, value.array) for value in buffers if isinstance(value, QueuedBuffer))

        def launch(stream: Stream, n: int) -> None:
            device.counters.launches += 1
            device.enqueue(stream, partial(run, n), places)

        return launch

    def workspace_bytes(self, args: Args | CompositeArgs, limits: Limits) -> int:
        """As of every NumPy kernel: none."""
        del args, limits
        return 0


class QueuedDevice(ReferenceDevice):
    """The reference device with queues: launches and copies return at once and run when an event behind them is waited for.

    An upload reads its staging when it runs; the staging of a download holds poison from the call until the copy has run, and
    all memory does until it is written. What a launch raises is raised by whoever waits for it, as `DeviceError`."""

    def __init__(self, *, dtype: str = "f32", row_invariant: bool = False, can_sleep: bool = False) -> None:
        self.streams: list[QueuedStream] = []
        self.recording: QueuedGraph | None = None
        self._depth = 0
        super().__init__("queued", dtype=dtype, row_invariant=row_invariant, poison=True, can_sleep=can_sleep)

    # -- order -------------------------------------------------------------------------------------
    @property
    def outstanding(self) -> bool:
        """Whether anything is queued that has not run."""
        return any(stream.queue for stream in self.streams)

    @property
    def is_open(self) -> bool:
        """Whether an item runs or a kernel is bound: both may look at memory."""
        return self._depth > 0

    @contextmanager
    def memory_open(self) -> Iterator[None]:
        """Device memory may be looked at meanwhile."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def perform(self, work: Work) -> None:
        """Run one item. Where it fails, everything that was queued is given up with it."""
        self._depth += 1  # as `memory_open`, of which this is asked hundreds of thousands of times
        try:
            work()
        except PolydraftError:
            self._give_up()
            raise
        except Exception as error:
            self._give_up()
            raise DeviceError(
                f"work on device {self.spec} failed ({type(error).__name__}: {error}); every step in flight is void, ask again"
            ) from error
        finally:
            self._depth -= 1

    def _give_up(self) -> None:
        for stream in self.streams:
            stream.queue.clear()

    def make_stream(self, name: str) -> QueuedStream:
        """A further stream, ordered with the others by events alone."""
        self.streams.append(QueuedStream(name, self))
        return self.streams[-1]

    def event(self) -> Any:
        """A fresh event, which marks nothing."""
        return QueuedEvent(self)

    def enqueue(self, stream: Stream, work: Work, places: Sequence[Place] = ()) -> None:
        """Queue `work`, or record it while a graph is captured; `places` is the memory it is bound to."""
        assert isinstance(stream, QueuedStream), "the streams of this device are its own"
        if self.recording is None:
            stream.queue.append(work)
        else:
            self.recording.add(stream, work, places)

    def settle(self) -> None:
        """Run everything."""
        for stream in self.streams:
            while stream.queue:
                stream.run_one()

    def synchronize(self) -> None:
        """Run everything; counted."""
        self.refuse_in_capture("device.synchronize")
        super().synchronize()
        self.settle()

    def close(self) -> None:
        """What has not run never will."""
        self._give_up()
        super().close()

    def refuse_in_capture(self, call: str) -> None:
        """Raise `DeviceError` naming `call` while a graph is captured."""
        if self.recording is not None:
            raise DeviceError(f"{call} is not allowed while a graph is captured; move it out of the captured function")

    # -- memory ------------------------------------------------------------------------------------
    def bind_kernel(self, kernel: Kernel) -> Any:
        """The provider through which this device runs a NumPy kernel."""
        return QueuedProvider(kernel, self)

    def empty(self, name: str, shape: Sequence[int], dtype: str) -> Any:
        """Allocate poisoned memory. `DeviceError` in a capture, too."""
        return QueuedBuffer(name, self._allocate(name, shape, dtype), dtype, self)

    def _allocate(self, name: str, shape: Sequence[int], dtype: str) -> Array:
        self.refuse_in_capture(f"allocating {name}")
        return super()._allocate(name, shape, dtype)

    def memory_of(self, buffer: Buffer) -> Array:
        """Open to copies, which look at it when they run."""
        assert isinstance(buffer, QueuedBuffer), "the buffers of this device are its own"
        return buffer.array

    def load(self, target: Buffer, value: Array) -> None:
        """Overwrite a buffer behind everything that was queued."""
        self.refuse_in_capture(f"load of {target.name}")
        self.settle()
        super().load(target, value)

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """Queue a copy of the first `rows` rows."""
        if self.recording is None:
            poison_array(target.array)
        super().download(stream, target, source, rows)

    def move(self, buffer: QueuedBuffer) -> None:
        """Let a buffer continue at another address, as a framework does that assigns a new tensor: for tests. What was bound to
        the old one finds poison there, and a graph that was captured on it refuses to replay."""
        self.settle()
        old, buffer.array = buffer.array, buffer.array.copy()
        poison_array(old)


class QueuedGraph:
    """A captured run of launches over the memory that they were bound to."""

    def __init__(self, stream: Stream, device: QueuedDevice) -> None:
        self._stream, self._device = stream, device
        self._works: list[Work] = []
        self._places: dict[int, Place] = {}

    def add(self, stream: Stream, work: Work, places: Sequence[Place]) -> None:
        """Record work in place of queueing it."""
        if stream is not self._stream:
            raise DeviceError("work was issued on another stream than the one that is captured; capture one stream at a time")
        self._works.append(work)
        self._places.update((id(array), (buffer, array)) for buffer, array in places)

    def replay(self, stream: QueuedStream) -> None:
        """Queue the launches again; never blocks. Raises `GraphBufferError` where memory has moved since."""
        self._device.refuse_in_capture("graph.replay")
        for buffer, array in self._places.values():
            if buffer.array is not array:
                raise GraphBufferError(
                    f"{buffer.name} lies at another address since this graph was captured on {self._device.spec}; copy into "
                    "captured memory instead of replacing it, or capture again"
                )
        self._device.counters.graph_replays += 1
        stream.queue.extend(self._works)


class QueuedCapture:
    """The facility that core captures with. A graph is a list of calls on the host, so it takes no memory of the device."""

    def __init__(self, device: QueuedDevice) -> None:
        self._device = device

    def capture(self, stream: Stream, fn: Callable[[], None]) -> QueuedGraph:
        """Record what `fn` issues on `stream`. Raises `DeviceError` for whatever a capture forbids."""
        self._device.refuse_in_capture("a second capture")
        graph = self._device.recording = QueuedGraph(stream, self._device)
        try:
            fn()
        finally:
            self._device.recording = None
        return graph

    def memory(self) -> int:
        """Bytes of device memory held by graphs."""
        return 0
