"""Weights and caches on the device: matrices row by row in the activation dtype, keys and values in blocks.

The kernel table makes them, and kernels read their addresses. A weight is packed so that every kernel can read it: there is one
copy, and an update overwrites it. Only a large head has a second copy, in 8 bits, for screening its outputs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from polydraft.backend import CacheSpec, Weight
from polydraft.contracts.compare import from_host, to_host
from polydraft.contracts.kv_quant import BROKEN, exponents, quantise
from polydraft.device import DTYPES, Array
from polydraft.errors import ContractError
from polydraft_cuda.device import CudaBuffer, CudaDevice

if TYPE_CHECKING:
    from polydraft_cuda.kernels.screen import Screen

CHUNK = 1 << 22
"""Elements rounded at a time on the host."""
ROUNDING = min(8, os.cpu_count() or 1)
"""Threads that round."""


class CudaWeight:
    """A weight in its canonical shape, row by row, in the activation dtype. `screen`: the same once more in a byte each, made
    when a greedy choice is bound behind a large head."""

    __slots__ = ("buffer", "role", "screen")

    def __init__(self, role: str, buffer: CudaBuffer) -> None:
        self.role, self.buffer = role, buffer
        self.screen: Screen | None = None

    @property
    def pointer(self) -> int:
        """Device address."""
        return self.buffer.pointer

    @property
    def shape(self) -> tuple[int, ...]:
        """Canonical shape."""
        return self.buffer.shape

    @property
    def dtype(self) -> str:
        """Dtype name."""
        return self.buffer.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.buffer.nbytes


def prepare_weight(device: CudaDevice, role: str, value: Array, dtype: str, previous: Weight | None = None) -> CudaWeight:
    """Round a canonical float32 array to `dtype` and copy it to the device, over `previous` where there is one; waits.

    A view whose rows overlap in memory (what `polydraft bench --shape` gives) travels as the memory it spans and is spread out
    on the device."""
    if dtype not in ("f32", "bf16", "f16"):
        raise ContractError(f"weights of the cuda backend are f32, bf16 or f16, got {dtype!r}; leave --dtype on auto")
    dtype = "f32" if role == "router" else dtype  # what is chosen does not depend on the dtype of activations
    if previous is None:
        weight = CudaWeight(role, device.empty(f"weight.{role}", value.shape, dtype))
    elif isinstance(previous, CudaWeight) and previous.shape == value.shape and previous.dtype == dtype:
        weight = previous
    else:
        raise ContractError(
            f"weight update: got {dtype} of shape {value.shape}, wanted {getattr(previous, 'dtype', '?')} of shape "
            f"{getattr(previous, 'shape', '?')}; load the same architecture"
        )
    if value.ndim > 1 and 0 < value.strides[-2] < value.shape[-1] * 4 and value.strides[-1] == 4:
        _spread(device, weight, value)
    else:
        _copy(device, weight, value)
    if weight.screen is not None:
        weight.screen.pack(weight)
    return weight


def _copy(device: CudaDevice, weight: CudaWeight, value: Array) -> None:
    """Round and copy a stretch at a time."""
    flat, size = value.reshape(-1), DTYPES[weight.dtype].itemsize
    for number, part in enumerate(_rounded(flat, weight.dtype)):
        device.write(weight.pointer + number * CHUNK * size, part)


def _rounded(flat: Array, dtype: str) -> Iterator[Array]:
    """Stretches of `CHUNK` elements in `dtype`; of more than one, by several threads."""
    if flat.size <= CHUNK:
        yield to_host(flat, dtype)
        return
    with ThreadPoolExecutor(ROUNDING) as pool:
        for begin in range(0, flat.size, CHUNK * ROUNDING):
            starts = range(begin, min(begin + CHUNK * ROUNDING, flat.size), CHUNK)
            yield from pool.map(lambda start: to_host(flat[start : start + CHUNK], dtype), starts)


def _spread(device: CudaDevice, weight: CudaWeight, value: Array) -> None:
    """Copy the memory that an overlapping view spans, and write its rows out on the device."""
    from polydraft_cuda.compiler import act
    from polydraft_cuda.kernels.provider import source

    shape = (1,) * (3 - value.ndim) + value.shape
    stack_step, step, _ = steps = (*(0,) * (3 - value.ndim), *(stride // 4 for stride in value.strides))
    length = 1 + sum(one * (count - 1) for one, count in zip(steps, shape, strict=True))
    span = np.lib.stride_tricks.as_strided(value, (length,), (4,), writeable=False)
    pool = device.empty("weight.pool", span.shape, weight.dtype)
    device.write(pool.pointer, to_host(span, weight.dtype))
    function = device.function(source("rows.cu"), "spread_rows", VECTOR=0, **act(weight.dtype))
    function.bind((shape[1], shape[0], 1), 256, pool, weight, step, stack_step, shape[2])(device.stream, 1)
    device.synchronize()


def _tiled(spec: CacheSpec) -> bool:
    return spec.dtype != "f32" and spec.head_dim % 32 == 0 and spec.block_size % 16 == 0


@dataclass(frozen=True)
class _Rows:
    """Keys, then values of one layer in one buffer: what caches of every form have alike."""

    device: CudaDevice
    spec: CacheSpec
    buffer: CudaBuffer

    @property
    def tiled(self) -> bool:
        """Whether groups of 16 rows are permuted: 16-bit activations, heads of whole 32s, blocks of whole groups."""
        return _tiled(self.spec)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.buffer.nbytes

    @property
    def keys(self) -> Address:
        """Where the keys begin."""
        return Address(self.buffer.pointer)

    @property
    def values(self) -> Address:
        """Where the values begin."""
        return Address(self.buffer.pointer + self.buffer.nbytes // 2)


class CudaCache(_Rows):
    """One layer's keys and values: [2, num_blocks, num_kv_heads, block_size, head_dim], so that a head's rows of a block lie
    together; `tiled` ones in the order of tensor-core operands (`kernels/cache.cuh`). Fresh memory is set to NaN: reading a row
    that was never written shows."""

    def read_logical(self) -> tuple[Array, Array]:
        """(k, v) as [num_blocks, block_size, num_kv_heads, head_dim] float32; waits; tests only."""
        stored = self.device.read(self.buffer.pointer, self.buffer.shape, self.buffer.dtype)
        if self.tiled:
            groups = stored.reshape(2, -1, 16 * self.spec.head_dim)
            stored = np.stack([groups[i][:, order] for i, order in enumerate(tile_orders(self.spec.head_dim))]).reshape(
                stored.shape
            )
        logical = from_host(stored, self.buffer.dtype).astype(np.float32).transpose(0, 1, 3, 2, 4)
        return logical[0].copy(), logical[1].copy()

    def write_logical(self, k: Array, v: Array) -> None:
        """Overwrite all of it; waits; tests only."""
        both = np.ascontiguousarray(np.stack([k, v]).transpose(0, 1, 3, 2, 4))
        stored = to_host(both, self.buffer.dtype)
        if self.tiled:
            groups, tiles = stored.reshape(2, -1, 16 * self.spec.head_dim), np.empty_like(stored)
            for i, order in enumerate(tile_orders(self.spec.head_dim)):
                tiles[i].reshape(-1, 16 * self.spec.head_dim)[:, order] = groups[i]
            stored = tiles
        self.device.load(self.buffer, stored)


def tile_orders(head_dim: int) -> tuple[Array, Array]:
    """Places of the elements (row, d) of a group of 16 rows, row by row, for keys and for values: `key_offset` and `value_offset`
    of `kernels/cache.cuh`."""
    k, d = np.arange(16)[:, None], np.arange(head_dim)[None, :]
    keys = (((k >> 3) * (head_dim >> 5) + (d >> 5)) * 32 + (k & 7) * 4 + ((d & 31) >> 3)) * 8 + (d & 7)
    n = d >> 3
    values = (((n >> 1) * 32 + (d & 7) * 4 + ((k & 7) >> 1)) * 4 + (n & 1) * 2 + (k >> 3)) * 2 + (k & 1)
    return keys.reshape(-1), values.reshape(-1)


class QuantisedCache(_Rows):
    """One layer's quantised keys and values: [2, num_blocks, num_kv_heads, groups, rows * (head_dim + 1)] bytes, of each group of
    rows the numbers and then the exponents (`kernels/quant.cuh`). A tiled group has 16 rows, another is the whole block. Fresh
    memory has the exponent that reads as NaN."""

    def _parts(self, stored: Array) -> tuple[Array, Array]:
        """Views of numbers [2, groups, rows * dim] and exponents [2, groups, rows]."""
        rows = 16 if self.tiled else self.spec.block_size
        groups = stored.reshape(2, -1, rows * (self.spec.head_dim + 1))
        return groups[..., :-rows], groups[..., -rows:]

    def _orders(self) -> tuple[Array, Array]:
        """Places of the elements of a group, row by row, for keys and for values."""
        if self.tiled:
            keys, values = ((order & ~3) | ((order & 1) << 1) | (order >> 1 & 1) for order in tile_orders(self.spec.head_dim))
            return keys, values
        plain = np.arange(self.spec.block_size * self.spec.head_dim)
        return plain, plain

    def read_logical(self) -> tuple[Array, Array]:
        """(k, v) as [num_blocks, block_size, num_kv_heads, head_dim] float32; waits; tests only."""
        s = self.spec
        codes, e = self._parts(self.device.read(self.buffer.pointer, self.buffer.shape, "u8"))
        numbers = np.stack([codes[i][:, order] for i, order in enumerate(self._orders())])
        values = decode(numbers.reshape(*e.shape, s.head_dim), s.kv) * powers(e.view(np.int8))[..., None]
        shape = (2, s.num_blocks, s.num_kv_heads, s.block_size, s.head_dim)
        logical = values.astype(np.float32).reshape(shape).transpose(0, 1, 3, 2, 4)
        return logical[0].copy(), logical[1].copy()

    def write_logical(self, k: Array, v: Array) -> None:
        """Overwrite all of it, quantised; waits; tests only."""
        stored = np.empty(self.buffer.shape, np.uint8)
        codes, e = self._parts(stored)
        rows = np.stack([k, v]).transpose(0, 1, 3, 2, 4).reshape(*e.shape, self.spec.head_dim)
        e[...] = exponents(rows, self.spec.kv).astype(np.int8).view(np.uint8)
        numbers = np.nan_to_num(quantise(rows, self.spec.kv) / powers(e.view(np.int8))[..., None])
        found = encode(numbers, self.spec.kv).reshape(codes.shape)
        for i, order in enumerate(self._orders()):
            codes[i][:, order] = found[i]
        self.device.load(self.buffer, stored)


def powers(e: Array) -> Array:
    """2**e float64 of int8 exponents, NaN for that of a broken row."""
    return np.where(e == BROKEN, np.nan, np.exp2(e.astype(np.float64)))


def decode(codes: Array, kv: str) -> Array:
    """The numbers q, float64, that bytes stand for: sign and magnitude, or E4M3."""
    sign, magnitude = np.where(codes & 128, -1.0, 1.0), (codes & 127).astype(np.int64)
    if kv == "int8":
        return np.asarray(sign * magnitude)
    exponent, mantissa = magnitude >> 3, magnitude & 7
    normal = exponent > 0
    return np.asarray(sign * np.ldexp(np.where(normal, 8.0, 0.0) + mantissa, np.where(normal, exponent, 1) - 10))


def encode(numbers: Array, kv: str) -> Array:
    """The bytes that stand for numbers q."""
    sign, magnitude = np.where(np.signbit(numbers), 128, 0), np.abs(numbers)
    if kv == "int8":
        return np.asarray(sign + magnitude, np.uint8)
    exponent = np.maximum(np.frexp(np.maximum(magnitude, 2.0**-6))[1] - 1, -6)  # of the leading digit; 2**-6 where there is none
    eighths = np.ldexp(magnitude, 3 - exponent)  # from 8 to 15, less where there is none
    return np.asarray(sign + 8 * (exponent + 6) + eighths, np.uint8)


@dataclass(frozen=True)
class Address:
    """A place within a buffer, as an argument of a kernel."""

    pointer: int


def allocate_cache(device: CudaDevice, spec: CacheSpec) -> CudaCache | QuantisedCache:
    """A fresh cache of one layer. Raises `DeviceError` with what would fit."""
    if spec.kv:
        numbers = (2, spec.num_blocks, spec.num_kv_heads, spec.block_size * (spec.head_dim + 1))
        quantised = QuantisedCache(device, spec, device.empty("cache", numbers, "u8"))
        device.fill_bytes(quantised.buffer, BROKEN)
        return quantised
    shape = (2, spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    cache = CudaCache(device, spec, device.empty("cache", shape, spec.dtype))
    device.fill_bytes(cache.buffer, 0xFF)  # NaN in every float dtype
    return cache
