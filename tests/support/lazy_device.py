"""A lazy accelerator for tests: the reference kernels on a device where nothing runs until something waits for it.

Owns streams that are queues, memory that is poisoned until it is written, and the plugin object `LLM(plugin=...)` takes.
Called by tests that must see what a synchronous device hides: staging rewritten too early, results read too early.
Never computes anything itself, and never runs an item earlier than an event or `synchronize` demands it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polydraft import hookimpl, reference
from polydraft.backend import BackendInfo, DeviceOptions, ForwardMeta, KernelTable, PassBuffers, RowOrder
from polydraft.contracts.base import Limits
from polydraft.device import Array, Buffer, Event, Staging, Stream
from polydraft.errors import DeviceError
from polydraft.reference.device import ReferenceDevice, poison_array
from polydraft.reference.provider import NumpyProvider

Work = Callable[[], None]


class Mark:
    """One recorded point of a stream: reached once everything queued before it has run."""

    def __init__(self, stream: LazyStream) -> None:
        self.stream, self.reached = stream, False

    def reach(self) -> None:
        """Run the mark's stream up to it, and nothing behind it."""
        while not self.reached:
            self.stream.run_one()


class LazyStream:
    """A queue of work. `wait` queues a barrier, which runs another stream only when its own turn comes."""

    def __init__(self, name: str, device: LazyDevice) -> None:
        self.name, self._device = name, device
        self.queue: deque[Work] = deque()

    def wait(self, event: LazyEvent) -> None:
        if event.mark is not None:
            self.queue.append(event.mark.reach)

    def run_one(self) -> None:
        """Run the oldest item; an empty queue means that somebody waits for what was never queued."""
        if not self.queue:
            raise DeviceError(f"stream {self.name} is empty, yet somebody waits for it; record the event behind its work")
        self._device.running += 1
        try:
            self.queue.popleft()()
        finally:
            self._device.running -= 1


class LazyEvent:
    """A point in a stream. Recording it again moves it; those who waited for the old point still wait for that."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.mark: Mark | None = None

    def record(self, stream: LazyStream) -> None:
        mark = self.mark = Mark(stream)

        def arrive() -> None:
            mark.reached = True

        stream.queue.append(arrive)

    def query(self) -> bool:
        return self.mark is None or self.mark.reached

    def synchronize(self) -> None:
        self._device.counters.host_syncs += 1
        if self.mark is not None:
            self.mark.reach()


class LazyBuffer:
    """Device memory. Looking at it from the host while work is outstanding raises; kernels look while they run."""

    def __init__(self, name: str, array: Array, dtype: str, device: LazyDevice) -> None:
        self.name, self.dtype, self.array, self._device = name, dtype, array, device
        self.shape: tuple[int, ...] = array.shape

    @property
    def host_array(self) -> Array:
        if self._device.outstanding and not self._device.running:
            raise DeviceError(f"the host looked at device buffer {self.name} with work outstanding; wait for an event first")
        return self.array


class LazyDevice(ReferenceDevice):
    """The reference device with queues: launches and copies return at once and run when an event behind them is waited for.

    An upload reads its staging when it runs; the staging of a download holds poison from the call until the copy has run.
    """

    provider = NumpyProvider

    def __init__(self, spec: str = "lazy", *, dtype: str = "f32", row_invariant: bool = False) -> None:
        self.running = 0
        self.streams: list[LazyStream] = []
        super().__init__(spec, dtype=dtype, row_invariant=row_invariant, poison=True)

    @property
    def outstanding(self) -> bool:
        """Whether anything is queued that has not run."""
        return any(stream.queue for stream in self.streams)

    def make_stream(self, name: str) -> LazyStream:
        self.streams.append(LazyStream(name, self))
        return self.streams[-1]

    def event(self) -> Event:
        return LazyEvent(self)  # type: ignore[return-value]

    def enqueue(self, stream: Stream, work: Work) -> None:
        assert isinstance(stream, LazyStream)
        stream.queue.append(work)

    def empty(self, name: str, shape: Sequence[int], dtype: str) -> LazyBuffer:  # type: ignore[override]
        return LazyBuffer(name, self._allocate(name, shape, dtype), dtype, self)

    def load(self, target: Buffer, value: Array) -> None:
        self._drain()
        super().load(target, value)

    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        assert isinstance(target, LazyBuffer)
        to, frm = target.array[:rows], source.array[:rows]
        self.counters.uploads += 1
        self.counters.bytes_uploaded += frm.nbytes
        self._queue_copy(stream, to, frm)

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        assert isinstance(source, LazyBuffer)
        to, frm = target.array[:rows], source.array[:rows]
        self.counters.downloads += 1
        self.counters.bytes_downloaded += frm.nbytes
        poison_array(target.array)
        self._queue_copy(stream, to, frm)

    @staticmethod
    def _queue_copy(stream: Stream, to: Array, frm: Array) -> None:
        assert isinstance(stream, LazyStream)
        stream.queue.append(lambda: np.copyto(to, frm))

    def synchronize(self) -> None:
        super().synchronize()
        self._drain()

    def _drain(self) -> None:
        for stream in self.streams:
            while stream.queue:
                stream.run_one()


class LazyPlugin:
    """A backend plugin without a package: the reference's kernels and metadata on a `LazyDevice`.

    `row_order` is what it declares: the NumPy kernels follow the launch order and do not mind."""

    name = "lazy"

    def __init__(self, row_order: RowOrder = "slot") -> None:
        self.row_order = row_order

    @hookimpl
    def polydraft_backend_info(self) -> BackendInfo:
        info = reference.polydraft_backend_info()
        capabilities = dataclasses.replace(info.capabilities, asynchronous=True, row_order=self.row_order)
        return dataclasses.replace(
            info, name=self.name, devices=("lazy",), device_pattern="lazy", capabilities=capabilities, evidence="emulator"
        )

    @hookimpl
    def polydraft_open_device(self, spec: str, options: DeviceOptions) -> LazyDevice:
        return LazyDevice(spec or "lazy", dtype=options.dtype, row_invariant=options.row_invariant)

    @hookimpl
    def polydraft_kernels(self, device: Any) -> KernelTable:
        return reference.polydraft_kernels(device)

    @hookimpl
    def polydraft_init_forward_meta(self, device: Any, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
        return reference.polydraft_init_forward_meta(device, buffers, limits)
