"""Device memory that can be given back while its addresses stay: reserved addresses, and physical memory behind them or not.

The device allocates weights and caches here where an engine may sleep, and nowhere else. Kernels, graphs and descriptors for the
copy engine know addresses alone, so they are whole again once memory is behind these. Uses the driver's virtual memory management
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html), which deals in granules of 2 MiB; what is small shares one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polydraft.device import Array
from polydraft.errors import DeviceError
from polydraft_cuda import driver

if TYPE_CHECKING:
    from polydraft_cuda.device import CudaDevice

DROPPED = "cache"
"""Kind of memory whose contents nobody wants back."""


@dataclass
class _Span:
    """Addresses from `start` on; `memory` behind them, None while it is given back. `parts`: what lies in it, by address."""

    start: int
    size: int
    kind: str
    memory: Any = None
    used: int = 0
    parts: set[int] = field(default_factory=set)
    kept: Array | None = None
    """The contents on the host, while asleep."""


class RemappedMemory:
    """All such memory of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, cuda = device, device.cuda
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index
        self._access = cuda.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granule = int(device.call("cuMemGetAllocationGranularity", self._properties, least))
        self._spans: dict[int, _Span] = {}
        self._shared: dict[str, _Span] = {}
        self._asleep = False

    def allocate(self, kind: str, size: int) -> int:
        """Address of `size` bytes, or 0 where there is no memory left. `kind`: what of, `DROPPED` or anything else."""
        if self._asleep:
            raise DeviceError(f"device {self._device.spec} is asleep; wake it up before a {kind} is allocated")
        if size > self._granule // 2:
            span = self._mapped(kind, -(-size // self._granule) * self._granule)
        else:
            span = self._shared.get(kind)
            if span is None or span.used + size > span.size:
                span = self._mapped(kind, self._granule)
                if span is not None:
                    self._shared[kind] = span
        if span is None:
            return 0
        pointer = span.start + span.used
        span.used += size
        span.parts.add(pointer)
        self._spans[pointer] = span
        return pointer

    def free(self, pointer: int) -> bool:
        """Give a part back, and its addresses with the last part of a span. False where it is not from here."""
        span = self._spans.pop(pointer, None)
        if span is None:
            return False
        span.parts.discard(pointer)
        if not span.parts:
            if self._shared.get(span.kind) is span:
                del self._shared[span.kind]
            self._unmap(span)
            self._device.cuda.cuMemAddressFree(span.start, span.size)
        return True

    def sleep(self, *, keep_weights: bool) -> None:
        """Give all memory back. What is no cache is copied to the host before, if `keep_weights`. The device is at rest. Asleep
        already, it drops what it kept unless `keep_weights`. Where a copy fails it stays awake."""
        spans = self._all()
        if not keep_weights:
            for span in spans:
                span.kept = None
        elif not self._asleep:
            copies = [None if span.kind == DROPPED else self._device.read(span.start, (span.used,), "u8") for span in spans]
            for span, copy in zip(spans, copies, strict=True):
                span.kept = copy
        self._unmap(*spans)
        self._asleep = True

    def wake(self) -> None:
        """Have memory behind all addresses again, and what was kept in it. Awake already, it does nothing. Raises `DeviceError`
        where there is not enough memory, or the driver fails; it then takes none, sleeps on and keeps what it kept."""
        if not self._asleep:
            return
        spans = self._all()
        try:
            if not all(self._map(span) for span in spans):
                missing = sum(span.size for span in spans)
                raise DeviceError(
                    f"device {self._device.spec} has no {missing / 2**30:.2f} GiB for weights and caches that slept; free memory "
                    "there and wake it up again"
                )
            for span in spans:
                if span.kept is not None:
                    self._device.write(span.start, span.kept)
        except BaseException:
            self._unmap(*spans)
            raise
        for span in spans:
            span.kept = None
        self._asleep = False

    def _all(self) -> list[_Span]:
        return list({id(span): span for span in self._spans.values()}.values())

    def _mapped(self, kind: str, size: int) -> _Span | None:
        span = _Span(int(self._device.call("cuMemAddressReserve", size, 0, 0, 0)), size, kind)
        mapped = False
        try:
            mapped = self._map(span)
        finally:
            if not mapped:
                self._device.cuda.cuMemAddressFree(span.start, span.size)
        return span if mapped else None

    def _map(self, span: _Span) -> bool:
        """Whether there is memory behind the addresses now. Where something else than memory is missing it raises `DeviceError`,
        and there is none."""
        code, memory = self._device.cuda.cuMemCreate(span.size, self._properties, 0)
        if code == driver.OUT_OF_MEMORY:
            return False
        driver.check((code,), "allocating device memory")
        span.memory = memory
        try:
            self._device.call("cuMemMap", span.start, span.size, 0, memory, 0)
            self._device.call("cuMemSetAccess", span.start, span.size, [self._access], 1)
        except BaseException:
            self._unmap(span)
            raise
        return True

    def _unmap(self, *spans: _Span) -> None:
        """Nobody asks whether the driver could: it refuses to unmap what was not mapped yet."""
        for span in spans:
            if span.memory is not None:
                self._device.cuda.cuMemUnmap(span.start, span.size)
                self._device.cuda.cuMemRelease(span.memory)
                span.memory = None
