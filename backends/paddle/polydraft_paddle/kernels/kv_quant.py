"""Quantised KV rows in portable Paddle operations: their memory layout, and how they are written and read.

`table.py` allocates such caches, the kernels of `numeric` write and read through it. It does not decide whether to quantise, and
reads nothing back to the host.

A row is `heads * dim` bytes q + 128, then a byte e + 128 for each head, in whole words: few places scatter bytes. Powers of
two come from a table and exponents from the bits, since not every place's `pow` and `log` are exact; sums with 1.5 * 2**23
round half to even whatever `round` does. The numbers are those of `polydraft.contracts.kv_quant`.
"""

from __future__ import annotations

import numpy as np
import paddle

from polydraft.backend import CacheSpec
from polydraft.contracts.kv_quant import BROKEN, LARGEST, LEAST_EXPONENT, MOST_EXPONENT
from polydraft.device import Array
from polydraft_paddle.cache import CacheRows
from polydraft_paddle.ops import Tensor, choose, number, take

ZERO = 128
"""The byte that stands for 0."""
ZERO_WORD = -0x7F7F7F80
"""A word of such bytes, as int32: in a row of them every number is 0."""
MOST = LARGEST["int8"]
MANTISSA, MANTISSA_OF_MOST = 2**23 - 1, 2**23 * 127 // 64 - 2**23
"""Those bits of a float32, and of 127 times a power of two."""
EXPONENT_OF_MOST = 127 + 6
"""That of the float32 127 as it is stored."""
ROUNDER = 1.5 * 2.0**23
"""Added to a float32 below 2**22 and taken away again: leaves a whole number, ties to even."""


class QuantisedCache(CacheRows):
    """One layer's KV rows, `k` and `v` [num_blocks * block_size, words] int32, read whole. Fresh ones read as NaN."""

    __slots__ = ()

    def __init__(self, spec: CacheSpec, rows: Tensor) -> None:
        _powers(rows)  # now, since a launch must not upload them
        super().__init__(spec, rows, units=1, fresh=-1, zero=ZERO_WORD)  # every byte 255, the exponents' too; and every byte ZERO

    def read_logical(self) -> tuple[Array, Array]:
        """(k, v) as [num_blocks, block_size, num_kv_heads, head_dim]; tests only."""
        k, v = (self.read(half + 0).numpy().reshape(self._logical()).copy() for half in (self.k, self.v))
        return k, v

    def write_logical(self, k: Array, v: Array) -> None:
        """Overwrite all rows, quantised; tests only."""
        for half, value in ((self.k, k), (self.v, v)):
            rows = np.ascontiguousarray(value.reshape(half.shape[0], -1), np.float32)
            half.copy_(self.stored(paddle.to_tensor(rows, place=half.place)), True)

    def stored(self, values: Tensor) -> Tensor:
        """`values` [n, heads * dim] as rows of words."""
        n, heads, dim = values.shape[0], self.spec.num_kv_heads, self.spec.head_dim
        x = values.reshape([n, heads, dim]).astype("float32")
        broken = paddle.isnan((x * 0.0).sum(axis=-1, keepdim=True))
        x = choose(broken.expand_as(x), paddle.zeros_like(x), x)
        e = exponents(paddle.maximum(x, -x).max(axis=-1, keepdim=True))
        finer = power(ZERO - e).reshape([n, heads, 1])
        q = paddle.clip(x * finer, -MOST, MOST) + ROUNDER - ROUNDER
        e = choose(broken, paddle.full_like(e, BROKEN), e)
        parts = [(part + ZERO).reshape([n, -1]) for part in (q.astype("int32"), e)]
        spare = -(heads * (dim + 1)) % 4
        if spare:
            parts.append(paddle.zeros_like(parts[0][:, :spare]))
        return paddle.concat(parts, axis=1).astype("uint8").view("int32")

    def read(self, rows: Tensor) -> Tensor:
        """[n, heads * dim] float32, from rows of words that begin where their memory does: Paddle's views as another dtype lose
        an offset."""
        n, heads, dim = rows.shape[0], self.spec.num_kv_heads, self.spec.head_dim
        wide = rows.view("uint8").astype("int32")
        q = (wide[:, : heads * dim] - ZERO).astype("float32").reshape([n, heads, dim])
        return (q * power(wide[:, heads * dim : heads * (dim + 1)]).reshape([n, heads, 1])).reshape([n, heads * dim])


def exponents(amax: Tensor) -> Tensor:
    """The least e with amax <= 127 * 2**e, int32, within the range of exponents, of finite numbers that are not negative: the
    exponent of the float32 itself, and one more where its mantissa is above that of 127."""
    words = amax.view("int32")
    above = number(MANTISSA - MANTISSA_OF_MOST, words)
    e = (words + above) // number(MANTISSA + 1, words) - EXPONENT_OF_MOST
    return paddle.clip(e, LEAST_EXPONENT, MOST_EXPONENT)


def power(exponent: Tensor) -> Tensor:
    """2**(exponent - 128) float32 in one dimension, NaN for that of a broken row; `exponent` int32 from 0 to 255."""
    return take(_powers(exponent), exponent.reshape([-1]))


def _powers(like: Tensor) -> Tensor:
    """Every such power where `like` lies; made once for each place."""
    key = str(like.place)
    if key not in _POWERS:
        powers = np.exp2(np.arange(256, dtype=np.float64) - ZERO)
        powers[ZERO + BROKEN] = np.nan
        _POWERS[key] = paddle.to_tensor(powers.astype(np.float32), place=like.place)
    return _POWERS[key]


_POWERS: dict[str, Tensor] = {}


def words(spec: CacheSpec) -> int:
    """int32 words of a row."""
    return -(-spec.num_kv_heads * (spec.head_dim + 1) // 4)
