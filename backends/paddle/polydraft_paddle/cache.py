"""Memory of one layer's KV rows: keys and values of all blocks, and rows around them that no block has.

`table.py` allocates caches; quantised ones are in `kernels/kv_quant.py`. The layouts of a pass (`row_layout.py`,
`host_layout.py`) say where in them rows go and are read. Nothing here computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import paddle

from polydraft.backend import CacheSpec
from polydraft.device import Array
from polydraft_paddle.ops import Tensor

BEHIND = 2
"""Rows behind the blocks of a half: one of zeros, which is never written, and one that takes what goes nowhere."""
FRONT = 1
"""Rows in front of all. On a device of its own a key or value without a place has a negative one, and a maximum leads it to
the row in front of its half."""
FILLED = 4096
"""Rows of a fresh cache that are filled in one copy."""


class Spread(NamedTuple):
    """The pieces that a row of rotated heads goes to, counted from its place in the cache.

    They are those of the whole memory. `pieces` int32 [1, others + 2 * units, width]: `others` that go nowhere, then those of key
    and value, each as often as it has elements. `least` int32 [1, others + 2 * units, 1]: what they are at least."""

    pieces: Tensor
    least: Tensor


_SPREAD: dict[tuple[Any, ...], Spread] = {}


class CacheRows:
    """`rows` [2 * half, width]: keys and, from row `half` on, values, each with `BEHIND` rows behind those of all blocks, of
    which `k` and `v` are views. `whole` has `FRONT` rows before these. A row is written and read as `units` pieces of equal
    width; the place of a row is the number of its first piece within its half."""

    __slots__ = ("half", "k", "pieces", "rows", "spec", "units", "v", "whole")

    def __init__(self, spec: CacheSpec, whole: Tensor, *, units: int, fresh: float, zero: float) -> None:
        """Fill every row of `whole` [FRONT + 2 * half, width] with `fresh`, and the rows of zeros with `zero`, which stands for
        it. Synchronous."""
        rows = whole[FRONT:]
        self.spec, self.whole, self.rows, self.units = spec, whole, rows, units
        self.half: int = rows.shape[0] // 2
        length = self.half - BEHIND
        self.k, self.v = rows[:length], rows[self.half : self.half + length]
        self.pieces: Tensor = paddle.to_tensor(self.first_pieces(), place=rows.place)
        """`first_pieces`."""
        shape, dtype = (min(FILLED, whole.shape[0]), rows.shape[1]), np.int32 if rows.dtype == paddle.int32 else np.float32
        filled = paddle.to_tensor(np.full(shape, fresh, dtype), place=rows.place).astype(rows.dtype)
        for first in range(0, whole.shape[0], FILLED):  # uploaded, because Paddle's fill operations refuse NaN
            some = whole[first : first + FILLED]
            some.copy_(filled[: some.shape[0]], False)
        zeros = paddle.to_tensor(np.full((1, shape[1]), zero, dtype), place=rows.place).astype(rows.dtype)
        for first in (length, self.half + length):
            rows[first : first + 1].copy_(zeros, False)

    @property
    def zeros(self) -> int:
        """Place of the row of zeros."""
        return (self.half - BEHIND) * self.units

    def spread(self, others: int = 0) -> Spread:
        """Where a row of `others` heads, keys and values goes. Caches of one shape on one place share it."""
        width, place = self.rows.shape[1] // self.units, self.rows.place
        key = self.half, self.units, width, others, str(place)
        if key not in _SPREAD:
            own = self.first_pieces().reshape(-1)
            pieces = np.concatenate([np.full(others, -self.half * self.units, np.int32), own + FRONT * self.units])
            least = np.concatenate([np.zeros(others, np.int32), own])
            spread = np.repeat(pieces[None, :, None], width, 2), least[None, :, None]
            _SPREAD[key] = Spread(*(paddle.to_tensor(values, place=place) for values in spread))
        return _SPREAD[key]

    def first_pieces(self) -> Array:
        """Those of the first key and of the first value, int32 [2, units]."""
        first: Array = np.arange(2, dtype=np.int32)[:, None] * (self.half * self.units) + np.arange(self.units, dtype=np.int32)
        return first

    @property
    def nbytes(self) -> int:
        """Of the rows of blocks."""
        return sum(int(t.size) * int(t.element_size()) for t in (self.k, self.v))

    def _logical(self) -> tuple[int, int, int, int]:
        s = self.spec
        return s.num_blocks, s.block_size, s.num_kv_heads, s.head_dim


class PaddleCache(CacheRows):
    """KV rows as `k` and `v` [num_blocks * block_size, num_kv_heads * head_dim], read head by head. Fresh ones hold NaN."""

    __slots__ = ()

    def __init__(self, spec: CacheSpec, whole: Tensor) -> None:
        super().__init__(spec, whole, units=spec.num_kv_heads, fresh=np.nan, zero=0.0)

    def stored(self, values: Tensor) -> Tensor:
        """`values` [n, num_kv_heads * head_dim] as rows are kept."""
        return values if values.dtype == self.rows.dtype else values.astype(self.rows.dtype)

    def read_logical(self) -> tuple[Array, Array]:
        """(k, v) as [num_blocks, block_size, num_kv_heads, head_dim]; tests only."""
        k, v = (t.astype("float32").numpy().reshape(self._logical()).copy() for t in (self.k, self.v))
        return k, v

    def write_logical(self, k: Array, v: Array) -> None:
        """Overwrite all rows; tests only."""
        for tensor, value in ((self.k, k), (self.v, v)):
            rows = np.ascontiguousarray(value.reshape(tensor.shape), np.float32)
            tensor.copy_(paddle.to_tensor(rows, place=tensor.place).astype(tensor.dtype), True)
