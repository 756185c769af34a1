"""Unsigned 32-bit words in Paddle: sums, rotations and exclusive ors, with bit operations or, where a place has none, by
arithmetic.

The kernels of noise compute with them; `learn` finds out what a place has when it is opened. Nothing here draws noise.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np
import paddle

from polydraft_paddle.installation import set_fallback
from polydraft_paddle.ops import Tensor, constant, number, take

BASE: Final = 1 << 32


class Words(Protocol):
    """Arithmetic of words, which are held as each kind of it likes."""

    def of(self, x: Tensor) -> Tensor:
        """The words that are the bits of `x`, int32."""

    def add(self, a: Tensor, b: Tensor, more: int = 0) -> Tensor:
        """a + b + more modulo 2**32."""

    def rotate_left(self, a: Tensor, bits: int) -> Tensor:
        """Rotated by 1 to 31 bits."""

    def xor(self, a: Tensor, b: Tensor) -> Tensor:
        """Of one shape."""

    def upper_24(self, a: Tensor) -> Tensor:
        """Without the last eight bits, int32."""


class BitWords:
    """Words as int32 of the same bits, whose sums wrap."""

    def of(self, x: Tensor) -> Tensor:
        return x

    def add(self, a: Tensor, b: Tensor, more: int = 0) -> Tensor:
        return a + b + number(more, a) if more else a + b

    def rotate_left(self, a: Tensor, bits: int) -> Tensor:
        left = paddle.bitwise_left_shift(a, number(bits, a))
        return paddle.bitwise_or(left, _shifted_right(a, 32 - bits))

    def xor(self, a: Tensor, b: Tensor) -> Tensor:
        return paddle.bitwise_xor(a, b)

    def upper_24(self, a: Tensor) -> Tensor:
        return _shifted_right(a, 8)


def _shifted_right(a: Tensor, bits: int) -> Tensor:
    return paddle.bitwise_right_shift(a, number(bits, a), is_arithmetic=False)


class TableWords:
    """Words as int64 from 0 on, so that no sum overflows: a rotation is a product and its two halves, and an exclusive or looks
    pairs of bytes up in a table. As many launches again as with bit operations."""

    def __init__(self, place: Any) -> None:
        byte = np.arange(256, dtype=np.int32)
        self._table = paddle.to_tensor((byte[:, None] ^ byte).reshape(-1), place=place)

    def of(self, x: Tensor) -> Tensor:
        return paddle.stack([x, constant(0, x)], axis=-1).view("int64").reshape(x.shape)

    def add(self, a: Tensor, b: Tensor, more: int = 0) -> Tensor:
        return (a + b + number(more, a) if more else a + b) % number(BASE, a)

    def rotate_left(self, a: Tensor, bits: int) -> Tensor:
        product, base = a * number(1 << bits, a), number(BASE, a)
        return product % base + product // base

    def xor(self, a: Tensor, b: Tensor) -> Tensor:
        pairs = self._bytes(a) * 256 + self._bytes(b)
        return self.of(take(self._table, pairs).astype("uint8").view("int32")).reshape(a.shape)

    def upper_24(self, a: Tensor) -> Tensor:
        return (a // number(256, a)).astype("int32")

    def _bytes(self, a: Tensor) -> Tensor:
        """The four bytes of each word, int32 in one dimension."""
        low = a.reshape([-1]).view("int32").reshape([-1, 2])[:, 0].contiguous()
        return low.view("uint8").astype("int32")


_LEARNT: dict[Any, TableWords] = {}
_BITS: Final = BitWords()


def learn(place: Any) -> None:
    """Find out whether `place`, which is being opened and is current, has bit operations on int32. Kunlun XPU has not, and Paddle
    would run them on the CPU in silence, whatever it is told of falling back."""
    if not place.is_xpu_place():
        ones = paddle.ones([1], "int32")
        allowed = set_fallback(allowed=False)
        try:
            _BITS.xor(_BITS.rotate_left(ones, 1), ones)
        except (RuntimeError, OSError):
            pass
        else:
            return
        finally:
            set_fallback(allowed=allowed)
    _LEARNT[place] = TableWords(place)


def words_at(place: Any) -> Words:
    """The arithmetic of words for `place`."""
    return _LEARNT.get(place, _BITS)
