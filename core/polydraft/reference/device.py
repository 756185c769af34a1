"""The reference device: NumPy arrays as device memory; every launch and copy is done before the call returns.

The reference plugin opens it; the queued device derives from it and only changes *when* work happens. It promises no more than
the protocol in `polydraft.device`, so core cannot rely on its being synchronous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polydraft.device import DTYPES, Array, Buffer, DeviceCounters, Event, Staging, Stream
from polydraft.errors import DeviceError
from polydraft.reference.provider import EagerProvider, Kernel, NumpyProvider
from polydraft.reference.sleeping import SleepingPages


class NumpyBuffer:
    """Device memory of the reference family. `host_array` is for kernels and tests of this family, never for core."""

    __slots__ = ("dtype", "host_array", "name", "shape")

    def __init__(self, name: str, array: Array, dtype: str) -> None:
        self.name, self.host_array, self.dtype = name, array, dtype
        self.shape: tuple[int, ...] = array.shape


class NumpyStaging:
    """Pinned host memory: an ordinary array here."""

    __slots__ = ("array", "name")

    def __init__(self, name: str, array: Array) -> None:
        self.name, self.array = name, array


class ImmediateStream:
    """A stream on which everything has already happened."""

    def wait(self, event: Event) -> None:
        """Nothing to wait for."""


class ImmediateEvent:
    """An event that is complete as soon as it is recorded."""

    def __init__(self, counters: DeviceCounters) -> None:
        self._counters = counters

    def record(self, stream: Stream) -> None:
        """Nothing is outstanding."""

    def query(self) -> bool:
        """Always complete."""
        return True

    def synchronize(self) -> None:
        """Counted, because a real device would block here."""
        self._counters.host_syncs += 1


class ReferenceDevice:
    """The synchronous NumPy device. `poison` fills fresh memory with a pattern so that reading it unwritten shows; with
    `can_sleep` weights and caches lie where they can be given back."""

    provider: type[NumpyProvider] = EagerProvider

    def __init__(
        self, spec: str = "cpu", *, dtype: str = "f32", row_invariant: bool = False, poison: bool = False, can_sleep: bool = False
    ) -> None:
        self.pages = SleepingPages() if can_sleep else None
        self.spec, self.dtype, self.row_invariant, self.poison = spec, dtype, row_invariant, poison
        self.counters = DeviceCounters()
        self.stream: Any = self.make_stream("compute")
        self._open = True

    # -- what the queued device changes ------------------------------------------------------------
    def make_stream(self, name: str) -> Any:
        """A stream of this device's kind."""
        del name
        return ImmediateStream()

    def event(self) -> Event:
        """A fresh event."""
        return ImmediateEvent(self.counters)

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        """Make `work` happen on `stream`; at once here."""
        del stream
        work()

    def settle(self) -> None:
        """Let everything happen that was enqueued; nothing is outstanding here. Not counted: never on the step path."""

    def memory_of(self, buffer: Buffer) -> Array:
        """The memory that a copy reads or writes."""
        array: Array = buffer.host_array  # type: ignore[attr-defined]
        return array

    # -- memory ------------------------------------------------------------------------------------
    def empty(self, name: str, shape: Sequence[int], dtype: str) -> NumpyBuffer:
        """Allocate a buffer; `DeviceError` when memory is short or the device is closed."""
        array = self._allocate(name, shape, dtype)
        return NumpyBuffer(name, array, dtype)

    def staging(self, name: str, shape: Sequence[int], dtype: str) -> NumpyStaging:
        """Allocate host memory."""
        return NumpyStaging(name, self._allocate(name, shape, dtype))

    def _allocate(self, name: str, shape: Sequence[int], dtype: str) -> Array:
        if not self._open:
            raise DeviceError(f"device {self.spec} is closed; open a new engine to allocate {name}")
        try:
            array = np.zeros(tuple(shape), DTYPES[dtype])
        except MemoryError as error:
            size = math.prod(shape) * DTYPES[dtype].itemsize
            raise DeviceError(
                f"device {self.spec} could not allocate {size:,} bytes for {name}; lower --num-blocks, --max-num-seqs, "
                "--max-batched-tokens or --max-model-len"
            ) from error
        if self.poison:
            poison_array(array)
        self.counters.allocations += 1
        self.counters.bytes_allocated += array.nbytes
        return array

    def load(self, target: Buffer, value: Array) -> None:
        """Overwrite a buffer from the host, outside the step path."""
        array: Array = target.host_array  # type: ignore[attr-defined]
        if array.shape != value.shape:
            raise DeviceError(
                f"buffer {target.name} has shape {array.shape}, got a value of shape {value.shape}; pass that shape"
            )
        array[...] = value

    # -- copies ------------------------------------------------------------------------------------
    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        """Copy the first `rows` of staging into a buffer."""
        to, frm = self.memory_of(target)[:rows], source.array[:rows]
        self.counters.uploads += 1
        self.counters.bytes_uploaded += frm.nbytes
        self.enqueue(stream, lambda: np.copyto(to, frm))

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """Copy the first `rows` of a buffer into staging."""
        to, frm = target.array[:rows], self.memory_of(source)[:rows]
        self.counters.downloads += 1
        self.counters.bytes_downloaded += frm.nbytes
        self.enqueue(stream, lambda: np.copyto(to, frm))

    def sleep(self, *, keep_weights: bool) -> None:
        """As `Sleeping`. Raises `DeviceError` of a device that was opened without."""
        self._sleeper().sleep(keep_weights=keep_weights)

    def wake(self) -> None:
        """As `Sleeping`."""
        self._sleeper().wake()

    def _sleeper(self) -> SleepingPages:
        if self.pages is None:
            raise DeviceError(f"device {self.spec} was opened without sleep; build the engine with --enable-sleep-mode")
        self.settle()
        return self.pages

    # -- the rest ----------------------------------------------------------------------------------
    def bind_kernel(self, kernel: Kernel) -> NumpyProvider:
        """The provider through which this device runs a NumPy kernel."""
        return self.provider(kernel, self.enqueue, self.counters)

    def memory(self) -> int:
        """Bytes ever allocated (nothing is freed before `close`)."""
        return self.counters.bytes_allocated

    def synchronize(self) -> None:
        """Counted, because a real device would block here."""
        self.counters.host_syncs += 1

    def close(self) -> None:
        """Refuse further allocation."""
        self._open = False


def poison_array(array: Array) -> None:
    """Fill with values that show when used: NaN for floats, a huge negative pattern for integers."""
    if array.dtype.kind == "f":
        array.fill(np.nan)
    else:
        array.view(np.uint8).fill(0xA5)
