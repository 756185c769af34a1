"""Rotary embedding with the store of keys and values, and the table of cosines and sines that it uses.

Layers with the same rotation share one table. It is computed in float64 when the first of them is bound, and freed with the last
of their launches.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.rope_kv_write import turns
from polydraft.device import Launch
from polydraft_cuda.compiler import act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import quantised
from polydraft_cuda.kernels.provider import Kernel, source

WARPS = 4
_TABLES: weakref.WeakKeyDictionary[Any, dict[tuple[tuple[float, ...], float], weakref.ref[Any]]] = weakref.WeakKeyDictionary()
"""The tables of each device; the launches that use them keep them alive, and with them the device."""


def table_of(device: CudaDevice, a: Any, limits: Limits) -> Any:
    """[positions, pairs, 2] float32: cosine and sine of each pair at every position that a text or a block table has room for."""
    length = max(limits.max_len, a.block_table.shape[1] * a.block_size)
    tables, key = _TABLES.setdefault(device, {}), (a.frequencies, float(a.attention_factor))
    found = tables[key]() if key in tables else None
    if found is None or found.shape[0] < length:
        found = device.empty("rope.turns", (length, len(a.frequencies), 2), "f32")
        device.load(found, np.stack(turns(a, length), axis=-1).astype(np.float32))
        tables[key] = weakref.ref(found)
    return found


def has_whole_turns(a: Any) -> bool:
    """Whether heads are turned as a whole, in halves and without norms, so that a thread of a block has 16 elements of one."""
    whole = a.cache.tiled and a.q_norm is None and a.style == "half" and 2 * len(a.frequencies) == a.head_dim
    return bool(whole and a.head_dim % 32 == 0 and (a.num_heads + 2 * a.num_kv_heads) * a.head_dim <= 16 * 1024)


def rope_kv_write(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """A warp a head, or a block a row."""
    del workspace
    table = table_of(device, a, limits)
    if a.cache.spec.kv:
        return quantised.rope_kv_write(device, a, table)
    heads, whole = a.num_heads + 2 * a.num_kv_heads, has_whole_turns(a)
    function = device.function(
        source("rope.cu"), "rope_kv_write", NORMS=int(a.q_norm is not None), INTERLEAVED=int(a.style == "interleaved"),
        TILED=int(a.cache.tiled), **({"HEAD_DIM": int(a.head_dim)} if whole else {}), **act(a.qkv.dtype),
    )  # fmt: skip
    return function.bind(
        lambda n: n if whole else (n, -(-heads // WARPS), 1), heads * int(a.head_dim) // 16 if whole else 32 * WARPS, a.qkv,
        a.row_slot, a.positions, a.block_table, a.cache.keys, a.cache.values, a.q_norm, a.k_norm, table, a.q_out,
        a.block_table.shape[1], int(a.num_heads), int(a.num_kv_heads), int(a.head_dim), 2 * len(a.frequencies),
        int(a.block_size), float(a.eps), dependent=True,
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {"rope_kv_write": Kernel(rope_kv_write)}
