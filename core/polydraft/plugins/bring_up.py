"""Bring-up of a backend: a synchronous device made of four functions, and a kernel table in which the reference stands in for
missing kernels.

A vendor's first plugin derives from `BringUpDevice` and returns `BringUpTable(device, own={...})`; `polydraft new-backend` writes
one. Nothing is hidden: delegated kernels are counted as such, and the capability `bring_up` has to be declared. With it there are
no graphs, no overlap, and no claim beyond the profile `basic`.

A delegated kernel waits for the device, copies every argument to the host, runs the reference's NumPy kernel there and copies
what was written back. That is slow and makes a whole engine run on the first day; each kernel that is written replaces one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, Literal

import numpy as np

from polydraft.backend import CacheSpec, PassBuffers, StepMeta, Weight
from polydraft.contracts.base import Limits, OpaqueSpec, Provider, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import DTYPES, Array, Buffer, DeviceCounters, Launch, Staging, Stream
from polydraft.errors import ContractError, DeviceError, PluginError
from polydraft.reference.device import ImmediateStream, NumpyStaging
from polydraft.reference.forward_meta import Layout, build_layout
from polydraft.reference.provider import Kernel
from polydraft.reference.table import NumpyCache, kernels

OwnKernel = Callable[[Any, int], None]
"""A kernel of the vendor's: `kernel(a, n)` works in place on the launch length `n`. `a` has the fields of the contract: device
memory for buffers, weights and `cache` ([2, num_blocks, block_size, num_kv_heads, head_dim], keys then values), `meta`, plain
values for parameters, None for what was left out. For a composite, `a.parts` has one such `a` a part."""

DEVICE_FUNCTIONS: Final = ("allocate", "write", "read", "wait")
"""What a device has to bring: everything else of the protocol is made from these."""
CACHE_KERNELS: Final = ("rope_kv_write", "paged_attention")
"""Kernels that share a cache: both are the backend's own, or neither is."""


def contract_versions(own: Mapping[str, OwnKernel] = MappingProxyType({})) -> dict[str, int]:
    """Name to version of what a `BringUpTable` with these kernels offers: every contract, and the composites among `own`."""
    from polydraft.contracts import COMPOSITES, REGISTRY

    single = {name: REGISTRY[name].version for name in kernels(row_invariant=False) if name not in COMPOSITES}
    return single | {name: 1 for name in own if name in COMPOSITES}


# -- the device ------------------------------------------------------------------------------------
class BringUpBuffer:
    """Device memory with its name, shape and dtype. `memory` is what `allocate` returned."""

    __slots__ = ("_mirror", "dtype", "memory", "name", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str, memory: Any) -> None:
        self.name, self.shape, self.dtype, self.memory = name, shape, dtype, memory
        self._mirror: Array | None = None

    @property
    def mirror(self) -> Array:
        """Host memory of the same shape, in which delegated kernels find the contents."""
        if self._mirror is None:
            self._mirror = np.zeros(self.shape, DTYPES[self.dtype])
        return self._mirror


class BringUpEvent:
    """A point in a stream on which nothing overlaps: whoever asks waits for the device."""

    def __init__(self, device: BringUpDevice) -> None:
        self._device = device

    def record(self, stream: Stream) -> None:
        """Nothing to note: a later wait covers more, never less."""

    def query(self) -> bool:
        """True, behind a wait."""
        self._device.wait()
        return True

    def synchronize(self) -> None:
        """Wait, counted."""
        self._device.synchronize()


class BringUpDevice:
    """A synchronous device. A subclass defines the four functions of `DEVICE_FUNCTIONS` and nothing else; core may notice no more
    than that launches and copies are done when something waits for them."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.counters = DeviceCounters()
        self.stream: Any = ImmediateStream()
        self._open = True

    # -- the vendor's ------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Device memory for an array; what it holds does not matter. Raises `DeviceError` or `MemoryError` when it is short."""
        raise NotImplementedError

    def write(self, memory: Any, value: Array) -> None:
        """Copy a contiguous host array over the first `len(value)` rows of `memory`, behind the work already enqueued."""
        raise NotImplementedError

    def read(self, memory: Any, into: Array) -> None:
        """Copy the first `len(into)` rows of `memory` into a contiguous host array, behind the work already enqueued; blocks
        until the host has them."""
        raise NotImplementedError

    def wait(self) -> None:
        """Block until everything enqueued has run."""
        raise NotImplementedError

    # -- what core asks ----------------------------------------------------------------------------
    def empty(self, name: str, shape: Sequence[int], dtype: str) -> BringUpBuffer:
        """As `Device.empty`."""
        return BringUpBuffer(name, tuple(shape), dtype, self._allocated(name, tuple(shape), DTYPES[dtype]))

    def _allocated(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        if not self._open:
            raise DeviceError(f"device {self.spec} is closed; open a new engine to allocate {name}")
        size = math.prod(shape) * dtype.itemsize
        try:
            memory = self.allocate(shape, dtype)
        except MemoryError as error:
            raise DeviceError(
                f"device {self.spec} could not allocate {size:,} bytes for {name}; lower --num-blocks or --max-num-seqs"
            ) from error
        self.counters.allocations += 1
        self.counters.bytes_allocated += size
        return memory

    def staging(self, name: str, shape: Sequence[int], dtype: str) -> NumpyStaging:
        """As `Device.staging`: an ordinary host array, since nothing overlaps."""
        if not self._open:
            raise DeviceError(f"device {self.spec} is closed; open a new engine to allocate {name}")
        return NumpyStaging(name, np.zeros(tuple(shape), DTYPES[dtype]))

    def event(self) -> BringUpEvent:
        """As `Device.event`."""
        return BringUpEvent(self)

    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        """As `Device.upload`."""
        del stream  # there is one, and nothing is ever outstanding on it
        value = source.array[:rows]
        self.counters.uploads += 1
        self.counters.bytes_uploaded += value.nbytes
        if rows:
            self.write(target.memory, value)  # type: ignore[attr-defined]  # a buffer of this device
            self.wait()

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """As `Device.download`."""
        del stream
        into = target.array[:rows]
        self.counters.downloads += 1
        self.counters.bytes_downloaded += into.nbytes
        if rows:
            self.read(source.memory, into)  # type: ignore[attr-defined]  # a buffer of this device

    def load(self, target: Buffer, value: Array) -> None:
        """As `Device.load`."""
        if tuple(value.shape) != tuple(target.shape):
            raise DeviceError(
                f"buffer {target.name} has shape {target.shape}, got a value of shape {value.shape}; pass that shape"
            )
        if value.size:
            self.write(target.memory, np.ascontiguousarray(value, DTYPES[target.dtype]))  # type: ignore[attr-defined]
            self.wait()

    def memory(self) -> int:
        """Bytes ever allocated: nothing is freed before `close`."""
        return self.counters.bytes_allocated

    def synchronize(self) -> None:
        """As `Device.synchronize`."""
        self.counters.host_syncs += 1
        self.wait()

    def close(self) -> None:
        """Wait, then refuse further allocation."""
        if self._open:
            self.wait()
        self._open = False


# -- weights, caches, metadata -----------------------------------------------------------------------
class BringUpWeight:
    """A weight twice: `memory` on the device for own kernels, `array` on the host for delegated ones; both canonical float32."""

    __slots__ = ("array", "memory")
    packing: Final = None  # none is declared

    def __init__(self, memory: Any, array: Array) -> None:
        self.memory, self.array = memory, array

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


class BringUpCache:
    """One layer's KV cache on the device, for own cache kernels; delegated ones use the reference's."""

    def __init__(self, device: BringUpDevice, spec: CacheSpec) -> None:
        self._device = device
        self.shape = (2, spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.memory = device.empty("cache", self.shape, "f32").memory
        device.write(self.memory, np.full(self.shape, np.nan, np.float32))  # reading a row that was never written shows
        device.wait()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * 4

    def read_logical(self) -> tuple[Array, Array]:
        """As `Cache.read_logical`."""
        both = np.empty(self.shape, np.float32)
        self._device.read(self.memory, both)
        return both[0], both[1]

    def write_logical(self, k: Array, v: Array) -> None:
        """As `Cache.write_logical`."""
        self._device.write(self.memory, np.ascontiguousarray(np.stack((k, v)), np.float32))
        self._device.wait()


class BringUpMeta:
    """The reference's attention metadata, built on the host from copies of the rows that the device holds."""

    def __init__(self, device: BringUpDevice, buffers: PassBuffers, limits: Limits) -> None:
        self._device, self._limits = device, limits
        self._buffers: tuple[Any, ...] = (buffers.row_slot, buffers.positions, buffers.block_table)
        self.layout = Layout((), np.empty(0, int), np.empty(0, int))

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Copy and group the rows of this pass."""
        del stream
        row_slot, positions, block_table = (_fetched(self._device, buffer) for buffer in self._buffers)
        n = step.launch_rows
        self.layout = build_layout(
            row_slot=row_slot[:n],
            positions=positions[:n],
            block_table=block_table,
            block_size=self._limits.block_size,
            window=self._limits.window,
        )


def _fetched(device: BringUpDevice, buffer: BringUpBuffer) -> Array:
    """The contents of a buffer, in its mirror."""
    if buffer.mirror.size:
        device.read(buffer.memory, buffer.mirror)
    return buffer.mirror


# -- kernels -----------------------------------------------------------------------------------------
class Own:
    """The provider of one kernel of the vendor's."""

    def __init__(self, device: BringUpDevice, kernel: OwnKernel) -> None:
        self._device, self._kernel = device, kernel

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Resolve the memory once and return the launch."""
        del limits, workspace
        return partial(_launch_own, self._device.counters, self._kernel, _opened(args, "memory"))

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """None: a kernel of the first days brings its own temporaries (declared as `pool_temporaries`)."""
        del args, limits
        return 0


def _launch_own(counters: DeviceCounters, kernel: OwnKernel, a: Any, stream: Stream, n: int) -> None:
    del stream
    counters.launches += 1
    kernel(a, n)


def _opened(args: Any, attribute: Literal["memory", "mirror"]) -> SimpleNamespace:
    """A record's fields with what a kernel needs in place of buffers, weights and caches; a composite's as `parts`."""
    if isinstance(args, CompositeArgs):
        return SimpleNamespace(parts=tuple(_opened(part, attribute) for part in args.parts))
    values = {field.name: getattr(args, field.name) for field in fields(args)}
    return SimpleNamespace(**{name: _inside(value, attribute) for name, value in values.items()})


def _inside(value: Any, attribute: str) -> Any:
    """What a kernel needs in the place of an argument, and of each of a tuple of slot columns."""
    return tuple(_inside(one, attribute) for one in value) if isinstance(value, tuple) else getattr(value, attribute, value)


class Delegated:
    """The provider of a kernel that the reference computes on host copies."""

    def __init__(self, device: BringUpDevice, kernel: Kernel) -> None:
        self._device, self._kernel = device, kernel

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Bind the reference's kernel to the mirrors."""
        del workspace
        there = list(args.buffers().values())
        for name, spec in args.specs().items():
            _refuse_foreign(name, spec, getattr(args, name))
        run = self._kernel(_opened(args, "mirror"), limits)
        written = tuple(buffer for buffer, access in there if access != "in")
        return partial(_launch_delegated, self._device, run, tuple(buffer for buffer, _ in there), written)

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """None: the work is done on the host."""
        del args, limits
        return 0


def _refuse_foreign(name: str, spec: object, value: object) -> None:
    """A delegated kernel can use the reference's caches and metadata alone."""
    if isinstance(spec, OpaqueSpec) and value is not None:
        fits = {"weight": BringUpWeight, "cache": NumpyCache, "meta": BringUpMeta}[spec.kind]
        if not isinstance(value, fits):
            raise ContractError(
                f"{name} of a delegated kernel is of type {type(value).__name__}, wanted {fits.__name__}; leave weights, caches "
                "and metadata to polydraft.plugins.bring_up, or write that kernel"
            )


def _launch_delegated(
    device: BringUpDevice,
    run: Callable[[int], None],
    buffers: tuple[BringUpBuffer, ...],
    written: tuple[BringUpBuffer, ...],
    stream: Stream,
    n: int,
) -> None:
    """Down, compute, up."""
    del stream
    device.counters.launches += 1
    device.wait()
    for buffer in buffers:
        _fetched(device, buffer)
    run(n)
    for buffer in written:
        if buffer.mirror.size:
            device.write(buffer.memory, buffer.mirror)
    device.wait()


class BringUpTable:
    """The kernel table of bring-up: `own` by contract or composite name, the reference for every other contract.

    Raises `PluginError` for a name that is no contract, and where only one of the two cache kernels is the backend's own."""

    def __init__(self, device: BringUpDevice, own: Mapping[str, OwnKernel] = MappingProxyType({})) -> None:
        self.versions: Mapping[str, int] = contract_versions(own)
        strange = sorted(set(own) - set(self.versions))
        if strange:
            raise PluginError(f"own kernels {', '.join(strange)} are no contracts; `polydraft contracts` lists the names")
        shared = [name for name in CACHE_KERNELS if any(name in one.split("+") for one in own)]
        if len(shared) == 1:
            raise PluginError(
                f"of {' and '.join(CACHE_KERNELS)}, only {shared[0]} is an own kernel; they share the cache, so write both or "
                "leave both out"
            )
        self._device, self._owns_cache = device, bool(shared)
        delegated = kernels(row_invariant=False)
        self.providers: Mapping[str, Provider] = {
            name: Own(device, own[name]) if name in own else Delegated(device, delegated[name]) for name in self.versions
        }

    def prepare_weight(self, role: str, value: Array, dtype: str, previous: Weight | None = None) -> BringUpWeight:
        """As `KernelTable.prepare_weight`: the canonical array, on the device and on the host."""
        del dtype  # bring-up computes in f32
        if isinstance(previous, BringUpWeight):
            if previous.array.shape != value.shape:
                raise ContractError(
                    f"weight update: got shape {value.shape}, wanted {previous.array.shape}; load the same architecture"
                )
            np.copyto(previous.array, value)
            weight = previous
        else:
            memory = self._device.empty(f"a weight ({role})", value.shape, "f32").memory
            weight = BringUpWeight(memory, np.array(value, np.float32, order="C"))
        self._device.write(weight.memory, weight.array)
        self._device.wait()
        return weight

    def allocate_cache(self, spec: CacheSpec) -> BringUpCache | NumpyCache:
        """As `KernelTable.allocate_cache`: on the device for own cache kernels, on the host for delegated ones."""
        if self._owns_cache:
            return BringUpCache(self._device, spec)
        self._device.counters.allocations += 1
        rows = np.empty((2, spec.num_kv_heads, spec.num_blocks * spec.block_size, spec.head_dim), np.float32)
        return NumpyCache(spec, rows)
