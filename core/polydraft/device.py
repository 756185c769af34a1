"""The protocols through which core uses a device: buffers, streams, events, staging and graphs.

The runtime is written against these protocols alone, and every backend's `open_device` returns an implementation. A call does not
promise that work has happened: a launch or copy is only known to be done after an event that follows it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@runtime_checkable
class Buffer(Protocol):
    """Device memory with a name, a shape, a dtype and a fixed address. Core never reads or writes its contents.

    `dtype` is one of the names in `DTYPES`. A buffer is allocated once by `Device.empty` and never rebound.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


class Staging(Protocol):
    """Pinned host memory that copies start from or end in.

    `array` is the host view for *writing before an upload*. After a download it may be read only once the event recorded
    after the copy has completed; a hostile device fills it with poison until then.
    """

    @property
    def array(self) -> Array: ...


class Stream(Protocol):
    """An in-order queue of device work. Work on different streams is ordered only by events."""

    def wait(self, event: "Event") -> None:
        """Make later work of this stream wait for `event`; never blocks the host."""


class Event(Protocol):
    """A point in a stream. `synchronize` is the only call of a step that may block the host."""

    def record(self, stream: Stream) -> None:
        """Move the event after all work queued on `stream` so far; never blocks the host."""

    def query(self) -> bool:
        """True when the recorded point has been reached (or nothing was recorded); never blocks the host."""

    def synchronize(self) -> None:
        """Block the host until the recorded point has been reached."""


Launch = Callable[[Stream, int], None]
"""A bound kernel: enqueue it on a stream for a launch length (an upper bound known to the host). Returns nothing."""

DTYPES: dict[str, np.dtype[Any]] = {
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "u8": np.dtype(np.uint8),
}
"""Dtype names used at the seam and the NumPy dtype of their host representation (bf16 travels as its 16 bits)."""


@dataclass
class DeviceCounters:
    """What a device was asked to do; plain additions, always on. Bytes count payload, not padding. `load` counts as nothing."""

    launches: int = 0
    """Kernels that were launched, and fillings of forward metadata; not those that a graph replays."""
    host_syncs: int = 0
    """Calls of `Event.synchronize` and `Device.synchronize`, whether they had to wait or not."""
    uploads: int = 0
    downloads: int = 0
    bytes_uploaded: int = 0
    bytes_downloaded: int = 0
    allocations: int = 0
    """Calls of `empty` and `staging`, and the memory of weights, caches and metadata."""
    bytes_allocated: int = 0
    """Of device memory; what counts here of host memory is the device's own choice."""
    graph_replays: int = 0
    extra: dict[str, int] = field(default_factory=dict)
    """Whatever else a device counts, by name."""

    def copy(self) -> "DeviceCounters":
        """Return a snapshot, to be subtracted later."""
        return DeviceCounters(**{**self.__dict__, "extra": dict(self.extra)})


class Device(Protocol):
    """One open accelerator (or a stand-in) with everything the runtime may ask of it."""

    @property
    def spec(self) -> str:
        """The device as the user names it, e.g. `cpu`, `cuda:0`."""

    @property
    def counters(self) -> DeviceCounters: ...

    @property
    def stream(self) -> Stream:
        """The compute stream: every launch of a step goes here, in order."""

    def empty(self, name: str, shape: Sequence[int], dtype: str) -> Buffer:
        """Allocate an uninitialised buffer that lives as long as the device. Raises `DeviceError` when memory is short."""

    def staging(self, name: str, shape: Sequence[int], dtype: str) -> Staging:
        """Allocate pinned host memory."""

    def event(self) -> Event: ...

    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        """Enqueue a copy of the first `rows` of `source` over those of `target`. `source` may be rewritten only after an
        event after this copy has completed."""

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """Enqueue a copy of the first `rows` of `source` into `target`."""

    def load(self, target: Buffer, value: Array) -> None:
        """Fill a buffer from a host array of the same shape, behind everything queued on the compute stream and outside the step
        path (may synchronise). The array is the caller's again when this returns. A device may refuse it with `DeviceError` while
        queued work uses the buffer."""

    def memory(self) -> int:
        """Bytes of device memory held by this process, peak."""

    def synchronize(self) -> None:
        """Block until everything enqueued has run; never called on the step path."""

    def close(self) -> None:
        """Free everything. A closed device raises `DeviceError` on use."""


class ManyStreams(Protocol):
    """What a device adds to `Device` that runs more than one stream side by side; core asks for it by `further_stream`."""

    def make_stream(self, name: str) -> Stream:
        """A further stream, when the engine is built. Its copies may run while the compute stream is busy."""


class TellsMemory(Protocol):
    """What a device adds to `Device` whose driver or framework counts memory. The conformance kit looks for it, core does not."""

    def memory_taken(self) -> int:
        """Bytes of device memory in use now, whoever took them, as the driver or framework counts and not the backend."""


class Sleeping(Protocol):
    """What a device adds to `Device` whose backend declares the capability `sleep`. Core calls it on a device at rest that was
    opened for it, and launches nothing while it sleeps."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Give back the memory that `prepare_weight` and `allocate_cache` took. Weights are copied to host memory before, or with
        `keep_weights` False dropped; rows of caches are dropped. Waits. Addresses, and graphs that were captured with them,
        stay. A device that sleeps drops, with `keep_weights` False, the weights that it kept."""

    def wake(self) -> None:
        """Take memory again at the same addresses, with the weights that were kept in it; what was dropped is undefined. Waits.
        Raises `DeviceError` where memory is short; the device then sleeps on."""


class OpensShared(Protocol):
    """What a device adds to `Device` that reads arrays of another process of the same machine."""

    def open_shared(self, shared: Mapping[str, Mapping[str, Any]]) -> AbstractContextManager[Mapping[str, Any]]:
        """The arrays that `shared` describes in the words of the device's own library, by name, for as long as the context lasts;
        `MemoryCheckpoint` reads them. Raises `CheckpointError` for what is malformed, and `DeviceError` for what is gone."""


def further_stream(device: Device, name: str) -> Stream:
    """A stream beside the compute stream, or the compute stream itself on devices that have no other."""
    make: Callable[[str], Stream] | None = getattr(device, "make_stream", None)
    return make(name) if make is not None else device.stream


class Withdrawing(Protocol):
    """What a device adds to `Device` that finds out, when it is opened, that it lacks what its backend declares."""

    withdrawn: Mapping[str, str]
    """Capabilities that the backend declares and this device was found to lack, each with the reason in a clause."""


def withdrawn(device: Device) -> Mapping[str, str]:
    """Declared capabilities that an open device was found to lack, each with the reason; {} of a device that tries nothing."""
    found: Mapping[str, str] = getattr(device, "withdrawn", {})
    return found


class Graph(Protocol):
    """A captured run of launches over fixed buffers."""

    def replay(self, stream: Stream) -> None:
        """Enqueue the captured launches again, on the addresses they were captured with."""


class GraphCapture(Protocol):
    """What the graph hook returns: the backend only captures and replays, policy lives in core."""

    def capture(self, stream: Stream, fn: Callable[[], None]) -> Graph:
        """Run `fn` once, recording instead of executing its launches. Host synchronisation or allocation inside raises."""

    def memory(self) -> int:
        """Bytes held by captured graphs."""
