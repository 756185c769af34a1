"""Memory of one layer's KV rows: keys and values of all blocks, and two rows behind each that no block has.

`table.py` allocates caches; quantised ones are in `kernels/kv_quant.py`. The layouts of a pass (`row_layout.py`,
`host_layout.py`) say where in them rows go and are read. Nothing here computes.
"""

from __future__ import annotations

import numpy as np
import paddle

from polydraft.backend import CacheSpec
from polydraft.device import Array
from polydraft_paddle.ops import Tensor

BEHIND = 2
"""Rows behind the blocks of a half: one of zeros, which is never written, and one that takes what goes nowhere."""
FILLED = 4096
"""Rows of a fresh cache that are filled in one copy."""


class CacheRows:
    """`rows` [2 * half, width]: keys and, from row `half` on, values, each with `BEHIND` rows behind those of all blocks, of
    which `k` and `v` are views. A row is written and read as `units` pieces of equal width; the place of a row is the number of
    its first piece within its half."""

    __slots__ = ("half", "k", "pieces", "rows", "spec", "units", "v")

    def __init__(self, spec: CacheSpec, rows: Tensor, *, units: int, fresh: float, zero: float) -> None:
        """Fill every row with `fresh`, and the rows of zeros with `zero`, which stands for it. Synchronous."""
        self.spec, self.rows, self.units = spec, rows, units
        self.half: int = rows.shape[0] // 2
        length = self.half - BEHIND
        self.k, self.v = rows[:length], rows[self.half : self.half + length]
        pieces = np.arange(2, dtype=np.int32)[:, None] * (self.half * units) + np.arange(units, dtype=np.int32)
        self.pieces: Tensor = paddle.to_tensor(pieces, place=rows.place)
        """Those of the first key and of the first value, int32 [2, units]."""
        shape, dtype = (min(FILLED, rows.shape[0]), rows.shape[1]), np.int32 if rows.dtype == paddle.int32 else np.float32
        filled = paddle.to_tensor(np.full(shape, fresh, dtype), place=rows.place).astype(rows.dtype)
        for first in range(0, rows.shape[0], FILLED):  # uploaded, because Paddle's fill operations refuse NaN
            some = rows[first : first + FILLED]
            some.copy_(filled[: some.shape[0]], False)
        zeros = paddle.to_tensor(np.full((1, shape[1]), zero, dtype), place=rows.place).astype(rows.dtype)
        for first in (length, self.half + length):
            rows[first : first + 1].copy_(zeros, False)

    @property
    def zeros(self) -> int:
        """Place of the row of zeros."""
        return (self.half - BEHIND) * self.units

    @property
    def nowhere(self) -> int:
        """Place of the row that takes what goes nowhere."""
        return (self.half - 1) * self.units

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

    def __init__(self, spec: CacheSpec, rows: Tensor) -> None:
        super().__init__(spec, rows, units=spec.num_kv_heads, fresh=np.nan, zero=0.0)

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
