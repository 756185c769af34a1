"""Rotary embedding with the store of keys and values, and the table of cosines and sines that it uses.

Layers with the same rotation share one table; it is computed in float64 when the first of them is bound.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Launch
from polydraft_cuda.compiler import act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import quantised
from polydraft_cuda.kernels.provider import Kernel, source

WARPS = 4
_TABLES: weakref.WeakKeyDictionary[Any, dict[tuple[float, int], Any]] = weakref.WeakKeyDictionary()


def turns(device: CudaDevice, theta: float, dims: int, length: int) -> Any:
    """[length, dims / 2, 2] float32: cosine and sine of each position and frequency."""
    tables = _TABLES.setdefault(device, {})
    found = tables.get((theta, dims))
    if found is None or found.shape[0] < length:
        frequency = theta ** (-np.arange(0, dims, 2) / dims)
        angle = np.arange(length)[:, None] * frequency
        found = tables[theta, dims] = device.empty("rope.turns", (length, dims // 2, 2), "f32")
        device.load(found, np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32))
    return found


def table_of(device: CudaDevice, a: Any, limits: Limits) -> Any:
    """The turns of a layer: of all positions that a text or a block table has room for."""
    return turns(device, float(a.theta), int(a.rope_dims), max(limits.max_len, a.block_table.shape[1] * a.block_size))


def rope_kv_write(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """A warp a head."""
    del workspace
    table = table_of(device, a, limits)
    if a.cache.spec.kv:
        return quantised.rope_kv_write(device, a, table)
    heads = a.num_heads + 2 * a.num_kv_heads
    function = device.function(
        source("rope.cu"), "rope_kv_write", NORMS=int(a.q_norm is not None), INTERLEAVED=int(a.style == "interleaved"),
        TILED=int(a.cache.tiled), **act(a.qkv.dtype),
    )  # fmt: skip
    return function.bind(
        lambda n: (n, -(-heads // WARPS), 1), 32 * WARPS, a.qkv, a.row_slot, a.positions, a.block_table, a.cache.keys,
        a.cache.values, a.q_norm, a.k_norm, table, a.q_out, a.block_table.shape[1], int(a.num_heads), int(a.num_kv_heads),
        int(a.head_dim), int(a.rope_dims), int(a.block_size), float(a.eps), dependent=True,
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {"rope_kv_write": Kernel(rope_kv_write)}
