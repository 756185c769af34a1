"""The kernel pack `paddle/cuda`: the kernels of the CUDA backend for the Paddle backend, on Paddle's tensors and stream.

`--kernels paddle/cuda` enables it on `gpu:N` and on `polycuda:N`, whose pointers and streams are the driver's own. It serves
every contract of that backend, so it also brings the order in which a cache lies in memory and the metadata that attention
reads. Nothing is copied.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from polydraft.backend import CacheSpec, PassBuffers, StepMeta
from polydraft.contracts.base import Limits, Provider, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import DTYPES, Launch, Stream
from polydraft.errors import DeviceError
from polydraft.hooks import hookimpl
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.forward_meta import CudaForwardMeta
from polydraft_cuda.kernels import kernels, versions
from polydraft_cuda.kernels.provider import CudaProvider, Kernel
from polydraft_cuda.program_pass import CudaPass
from polydraft_cuda.storage import CudaCache

if TYPE_CHECKING:
    from polydraft.device import Device

PLACES = ("gpu", "polycuda")
"""Kinds of place whose memory and streams are CUDA's."""
NAMES = {"int32": "i32", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "uint8": "u8"}
"""Paddle's dtypes as those of the seam."""


def index_of(spec: str) -> int:
    """The number of the GPU behind a Paddle place. Raises `DeviceError` for a place that is none."""
    kind, _, index = spec.partition(":")
    if kind not in PLACES or not (index or "0").isdecimal():
        places = " and ".join(f"{place}:<index>" for place in PLACES)
        raise DeviceError(
            f"kernel pack paddle/cuda runs on {places}, got {spec!r}; leave it out of --kernels, or choose another --device"
        )
    return int(index or 0)


class GuestStream:
    """Paddle's compute stream, as kernels of this package want one."""

    def __init__(self, cuda: Any, address: int) -> None:
        self.name, self.address, self.handle = "paddle", address, cuda.CUstream(address)


class GuestDevice(CudaDevice):
    """The GPU behind an open Paddle place. It allocates what kernels keep to themselves, and nothing else."""

    def __init__(self, host: Any, index: int) -> None:
        self._host = host
        super().__init__(index, dtype=host.dtype)
        self.cuda.cuStreamDestroy(self.stream.handle)
        self.stream = self.stream_of(host.stream)
        self.counters = host.counters
        self._streams: weakref.WeakKeyDictionary[Any, GuestStream] = weakref.WeakKeyDictionary({host.stream: self.stream})

    def stream_of(self, stream: Any) -> GuestStream:
        """A stream of the Paddle backend by the driver's handle."""
        base = stream.stream.stream_base
        return GuestStream(self.cuda, int(base.raw_stream if hasattr(base, "raw_stream") else base.cuda_stream))

    def free(self, pointer: int) -> None:
        """Give memory back. That is no part of a graph which Paddle may be capturing just then, on this thread."""
        cuda = self.cuda
        _, before = cuda.cuThreadExchangeStreamCaptureMode(cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        super().free(pointer)
        cuda.cuThreadExchangeStreamCaptureMode(before)

    def close(self) -> None:
        """Give back what kernels kept to themselves; nothing is queued any more, and the stream is Paddle's."""
        self._open = False
        for pointer in list(self._memory):
            self.free(pointer)

    def copy(self, call: str, stream: Any, to: int, source: int, nbytes: int) -> None:
        """Enqueue one of the driver's copies on a stream of the Paddle backend."""
        if stream not in self._streams:
            self._streams[stream] = self.stream_of(stream)
        self._copy(call, to, source, nbytes, self._streams[stream])  # type: ignore[arg-type]

    @property
    def capturing(self) -> bool:
        """Whether Paddle captures a graph."""
        return bool(self._host.capturing)

    @capturing.setter
    def capturing(self, value: bool) -> None:
        del value  # Paddle begins and ends captures


@dataclass(frozen=True, eq=False)
class Borrowed:
    """A Paddle tensor by its address, as kernels want a buffer; it keeps the tensor alive."""

    tensor: Any
    name: str
    dtype: str
    pointer: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def borrow(value: Any) -> Borrowed:
    """A buffer or weight of the Paddle backend."""
    tensor = value.tensor
    dtype = getattr(value, "dtype", None) or NAMES[str(tensor.dtype).rpartition(".")[2]]
    if not tensor.is_contiguous():
        raise DeviceError("kernel pack paddle/cuda: a buffer is not contiguous; report it")
    shape = tuple(int(size) for size in tensor.shape)
    pointer = int(tensor.data_ptr()) if math.prod(shape) else 0
    name = getattr(value, "name", getattr(value, "role", ""))
    return Borrowed(tensor, name, dtype, pointer, shape)


class GuestCache(CudaCache):
    """One layer's keys and values in the order of these kernels, in a Paddle tensor."""

    @property
    def k(self) -> Any:
        """What kernels of the Paddle backend ask a cache for."""
        raise DeviceError("kernel pack paddle/cuda lays out the caches; no other pack can serve attention beside it")

    v = k


class GuestMeta:
    """The metadata of one kind of pass, filled on Paddle's stream."""

    def __init__(self, device: GuestDevice, buffers: PassBuffers, limits: Limits) -> None:
        lent = PassBuffers(buffers.role, *(borrow(b) for b in (buffers.row_slot, buffers.positions, buffers.block_table)))
        self._device, self._lent = device, lent
        self.own = CudaForwardMeta(device, lent, limits)

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Enqueue it."""
        del stream
        self.own.fill(self._device.stream, step)


@dataclass(frozen=True)
class Guest:
    """What takes the place of the Paddle backend's own caches, metadata and copies while the pack is enabled
    (`PaddleDevice.guest`): a copy costs a call of the driver instead of three of Paddle."""

    device: GuestDevice
    allocate: Any
    """The Paddle device's own `empty`."""

    def allocate_cache(self, spec: CacheSpec) -> GuestCache:
        """A fresh cache, set to NaN."""
        shape = (2, spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        buffer: Any = borrow(self.allocate("cache", shape, spec.dtype))
        self.device.fill_bytes(buffer, 0xFF)
        return GuestCache(self.device, spec, buffer)

    def init_forward_meta(self, buffers: PassBuffers, limits: Limits) -> GuestMeta:
        """Tiles of rows that attend together."""
        return GuestMeta(self.device, buffers, limits)

    def close(self) -> None:
        """The Paddle device is closed, and waited for."""
        self.device.close()

    def upload(self, stream: Stream, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy to the device, by addresses."""
        self.device.copy("cuMemcpyHtoDAsync", stream, to, source, nbytes)

    def download(self, stream: Stream, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy to the host, by addresses."""
        self.device.copy("cuMemcpyDtoHAsync", stream, to, source, nbytes)


def lend(args: Any) -> Any:
    """The record with addresses in place of tensors; parameters as they are."""
    if isinstance(args, CompositeArgs):
        return SimpleNamespace(parts=tuple(lend(part) for part in args.parts))
    return SimpleNamespace(**{field.name: _lent(getattr(args, field.name)) for field in dataclasses.fields(args)})


def _lent(value: Any) -> Any:
    if isinstance(value, GuestMeta):
        return value.own
    if isinstance(value, tuple):  # slot columns
        return tuple(map(_lent, value))
    return borrow(value) if hasattr(value, "tensor") else value


@dataclass(frozen=True)
class GuestProvider:
    """A kernel of the CUDA backend behind the Paddle backend's buffers."""

    inner: CudaProvider
    device: GuestDevice

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Take the addresses once. The launch goes to Paddle's stream, whatever stream it is handed."""
        scratch: Any = None if workspace is None else SimpleNamespace(buffer=borrow(workspace.buffer))
        launch, own = self.inner.bind(lend(args), limits, scratch), self.device.stream

        def run(stream: Stream, n: int) -> None:
            del stream
            launch(own, n)

        return run

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """As the kernel says."""
        return self.inner.workspace_bytes(lend(args), limits)


@dataclass(frozen=True)
class GuestTable:
    """What the pack offers."""

    providers: Mapping[str, Provider]
    versions: Mapping[str, int]
    program_pass: CudaPass


@hookimpl
def polydraft_kernels(device: Device) -> GuestTable:
    """Every contract and composite of the CUDA backend, on the Paddle place that `device` is."""
    from polydraft_cuda.probe import look

    if not hasattr(device, "guest"):
        raise DeviceError("kernel pack paddle/cuda goes with --backend paddle; leave it out of --kernels, or choose that backend")
    index = index_of(device.spec)
    if problem := look().reason:
        raise DeviceError(f"kernel pack paddle/cuda cannot run: {problem}")
    guest = GuestDevice(device, index)
    device.guest = Guest(guest, device.empty)

    def provider(kernel: Kernel) -> GuestProvider:
        return GuestProvider(CudaProvider(kernel, guest), guest)

    return GuestTable({name: provider(kernel) for name, kernel in kernels().items()}, versions(), CudaPass(guest, provider, lend))
