"""Owns rotary embedding with the store of keys and values, and the table of cosines and sines it turns by.

Layers that turn alike share one table; it is made in float64 when the first of them is bound.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Launch, Stream
from polydraft_cuda.compiler import act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import quantised
from polydraft_cuda.kernels.joins import projection_of
from polydraft_cuda.kernels.provider import Kernel, source

WARPS = 4
_LAST: weakref.WeakKeyDictionary[Any, weakref.ref[Turning]] = weakref.WeakKeyDictionary()
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


class Turning:
    """A bound turn of rows with their store. Where attention was bound behind it, the two become one launch while a graph of
    decode steps is captured; what is launched by itself always writes what its contract says. Its launcher keeps it alive."""

    def __init__(self, device: CudaDevice, a: Any, table: Any, alone: Launch) -> None:
        self.a, self.table, self.joined = a, table, False
        self._device, self._alone, self._projection = device, alone, projection_of(device, a.qkv)

    @property
    def plain(self) -> bool:
        """Whether the turn is the one that attention knows: of whole heads, halves against each other, of rows that a projection
        of ours has just written."""
        a = self.a
        whole = a.rope_dims == a.head_dim and a.style == "half" and a.q_norm is None and a.k_norm is None
        return bool(whole and self._projection is not None)

    def takes(self) -> bool:
        """Whether a launch now is one with the attention behind it."""
        return bool(self.joined and self._device.capturing and not self.a.meta.step.has_prefill)

    def __call__(self, stream: Stream, n: int) -> None:
        """Enqueue it, unless attention does its work."""
        if not self.takes():
            self._alone(stream, n)


def turning_of(device: CudaDevice, q: Any) -> Turning | None:
    """The turn that was bound last on this device, if it writes `q`."""
    last = _LAST.get(device)
    found = last() if last is not None else None
    return found if found is not None and found.a.q_out is q else None


def rope_kv_write(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """A warp a head."""
    del workspace
    length = max(limits.max_len, a.block_table.shape[1] * a.block_size)
    table = turns(device, float(a.theta), int(a.rope_dims), length)
    if a.cache.spec.kv:
        return quantised.rope_kv_write(device, a, table)
    heads = a.num_heads + 2 * a.num_kv_heads
    function = device.function(
        source("rope.cu"), "rope_kv_write", NORMS=int(a.q_norm is not None), INTERLEAVED=int(a.style == "interleaved"),
        TILED=int(a.cache.tiled), **act(a.qkv.dtype),
    )  # fmt: skip
    alone = function.bind(
        lambda n: (n, -(-heads // WARPS), 1), 32 * WARPS, a.qkv, a.row_slot, a.positions, a.block_table, a.cache.keys,
        a.cache.values, a.q_norm, a.k_norm, table, a.q_out, a.block_table.shape[1], int(a.num_heads), int(a.num_kv_heads),
        int(a.head_dim), int(a.rope_dims), int(a.block_size), float(a.eps), dependent=True,
    )  # fmt: skip
    found = Turning(device, a, table, alone)
    _LAST[device] = weakref.ref(found)
    return found


KERNELS: dict[str, Kernel] = {"rope_kv_write": Kernel(rope_kv_write)}
