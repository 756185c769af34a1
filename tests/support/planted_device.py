"""A synchronous device double for tests of the hazard checker: it tolerates every hazard, and sees what kernels touch.

It has buffers that can move and be freed, further streams, a capture without rules, and `observed_accesses` by KV block. The
planted hazards run on it and give the right text wherever only the order of things is wrong. It refuses nothing, so whatever is
found on it, the checker has found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polydraft import hookimpl, reference
from polydraft.backend import BackendInfo, CacheSpec, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
from polydraft.contracts.base import Limits
from polydraft.device import Array, Stream
from polydraft.instruments.sanitize import Observed
from polydraft.reference.device import NumpyBuffer, ReferenceDevice
from polydraft.reference.provider import Kernel, NumpyProvider
from polydraft.reference.table import NumpyCache, kernels

Work = Callable[[], None]
KernelOf = Callable[["PlantedDevice", Kernel], Kernel]
"""Makes a planted kernel of the genuine one."""


class PlantedBuffer:
    """Device memory with an address that `PlantedDevice.move` changes. Opening it while a kernel runs counts as a read."""

    def __init__(self, name: str, array: Array, dtype: str, device: PlantedDevice) -> None:
        self.name, self.dtype, self.array, self._device = name, dtype, array, device
        self.shape: tuple[int, ...] = array.shape

    @property
    def address(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    @property
    def host_array(self) -> Array:
        self._device.opened(self)
        return self.array


class PlantedDevice(ReferenceDevice):
    """The synchronous NumPy device with more streams, memory that moves, and eyes if `observing`."""

    provider = NumpyProvider  # every launch goes through `enqueue`

    def __init__(self, options: DeviceOptions, *, observing: bool) -> None:
        super().__init__("planted", row_invariant=options.row_invariant)
        self.recording: list[tuple[int, Work]] | None = None
        self.operation = 0
        self.buffers: list[PlantedBuffer] = []
        self.caches: list[NumpyCache] = []
        self._running: int | None = None
        self._seen: list[Observed] = []
        if observing:
            self.observed_accesses = self._observed_accesses

    def empty(self, name: str, shape: Sequence[int], dtype: str) -> NumpyBuffer:
        buffer = PlantedBuffer(name, self._allocate(name, shape, dtype), dtype, self)
        if name != "cache":  # what core holds of that is the cache around it
            self.buffers.append(buffer)
        return buffer  # type: ignore[return-value]  # another class with the same face

    def free(self, memory: Any) -> None:
        """Give memory back: nothing happens to it here."""

    def move(self, buffer: PlantedBuffer) -> None:
        """Let a buffer go on at another address; what was bound to the old one stays there."""
        buffer.array = buffer.array.copy()

    # -- work --------------------------------------------------------------------------------------
    def enqueue(self, stream: Stream, work: Work) -> None:
        if self.recording is not None:
            self.recording.append((self.operation, work))
        else:
            self.run(self.operation, work)

    def run(self, operation: int, work: Work) -> None:
        """Run work of an operation, and see what it writes."""
        if not hasattr(self, "observed_accesses"):
            work()
            return
        before = [buffer.array.copy() for buffer in self.buffers]
        cached = [cache.kv.copy() for cache in self.caches]
        self._running = operation
        work()
        self._running = None
        for buffer, old in zip(self.buffers, before, strict=True):
            rows = _changed(old, buffer.array)
            if rows.size:
                self._seen.append(Observed(operation, buffer, "write", (int(rows[0]), int(rows[-1]) + 1)))
        for cache, old in zip(self.caches, cached, strict=True):
            rows = _changed(np.moveaxis(old, 2, 0), np.moveaxis(cache.kv, 2, 0)) // cache.spec.block_size
            self._seen += [Observed(operation, cache, "write", (block, block + 1)) for block in np.unique(rows).tolist()]

    def opened(self, buffer: PlantedBuffer) -> None:
        """A buffer's contents were asked for."""
        if self._running is not None:
            self._seen.append(Observed(self._running, buffer, "read"))

    def _observed_accesses(self) -> Sequence[Observed]:
        seen, self._seen = self._seen, []
        return seen


def _changed(old: Array, new: Array) -> Array:
    """Rows whose bytes differ."""
    if not old.size:
        return np.empty(0, int)
    both = [np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1) for array in (old, new)]
    rows: Array = np.flatnonzero((both[0] != both[1]).any(axis=1))
    return rows


class PlantedGraph:
    """A list of work."""

    def __init__(self, device: PlantedDevice, works: list[tuple[int, Work]]) -> None:
        self._device, self._works = device, works

    def replay(self, stream: Stream) -> None:
        self._device.counters.graph_replays += 1
        for operation, work in self._works:
            self._device.run(operation, work)


class PlantedCapture:
    """Records what is enqueued, and allows everything else."""

    def __init__(self, device: PlantedDevice) -> None:
        self._device = device

    def capture(self, stream: Stream, fn: Callable[[], None]) -> PlantedGraph:
        works: list[tuple[int, Work]] = []
        self._device.recording = works
        try:
            fn()
        finally:
            self._device.recording = None
        return PlantedGraph(self._device, works)

    def memory(self) -> int:
        return 0


class PlantedPlugin:
    """The backend plugin; `planted` replaces kernels by contract."""

    def __init__(self, planted: Mapping[str, KernelOf] | None = None, *, observing: bool = False) -> None:
        self._planted, self._observing = planted or {}, observing

    @hookimpl
    def polydraft_backend_info(self) -> BackendInfo:
        info = reference.polydraft_backend_info("")
        capabilities = dataclasses.replace(info.capabilities, graph_capture=True, ranks="", ordered_sums=False, sleep=False)
        return dataclasses.replace(info, name="planted", devices=("planted",), capabilities=capabilities, evidence="double only")

    @hookimpl
    def polydraft_open_device(self, spec: str, options: DeviceOptions) -> PlantedDevice:
        return PlantedDevice(options, observing=self._observing)

    @hookimpl
    def polydraft_kernels(self, device: PlantedDevice) -> KernelTable:
        table = reference.polydraft_kernels(device)
        genuine = kernels(device.row_invariant)
        planted = {name: device.bind_kernel(plant(device, genuine[name])) for name, plant in self._planted.items()}
        table.providers = {**table.providers, **planted}  # type: ignore[misc]
        allocate = table.allocate_cache

        def allocate_cache(spec: CacheSpec) -> Any:
            device.caches.append(allocate(spec))  # type: ignore[arg-type]
            return device.caches[-1]

        table.allocate_cache = allocate_cache  # type: ignore[method-assign]
        return table

    @hookimpl
    def polydraft_init_forward_meta(self, device: PlantedDevice, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
        return reference.polydraft_init_forward_meta(device, buffers, limits)

    @hookimpl
    def polydraft_graph_capture(self, device: PlantedDevice) -> PlantedCapture:
        return PlantedCapture(device)
