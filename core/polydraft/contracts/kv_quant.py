"""Owns the definition of quantised KV rows: which numbers a cache can hold, and which of them is kept for a given one.

Goldens, the harness and the conformance kit call it in NumPy float64. It never says how a backend lays such rows out in memory.

A row (one position of one KV head; keys and values apart) has a scale of its own, a power of two 2**e, and holds small numbers
q: what is read is q * 2**e. Nothing is calibrated, and a row's bits depend on that row alone, so that shared blocks, rejected
drafts, chunks and row invariance are what they are without quantisation. Powers of two make reading exact in every dtype of
activations. Shared exponents as scales: Rouhani et al. 2023, Microscaling Data Formats for Deep Learning.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from polydraft.device import Array

Kv = Literal["", "int8"]
"""How the rows of a cache are kept, `CacheSpec.kv`; "": in the activation dtype."""
KV_DTYPES: Final[tuple[Kv, ...]] = ("int8",)
"""The quantised ones."""
LARGEST: Final = 127
"""Of the numbers q, of either sign."""
LEAST_EXPONENT: Final = -100
MOST_EXPONENT: Final = 100
BROKEN: Final = 127
"""Exponent of a row that holds a NaN or an infinity, and of fresh memory: all of it reads as NaN."""


def exponents(x: Array) -> Array:
    """The exponent e of each row x [..., head_dim], int64 [...]: the least with amax <= 127 * 2**e, from -100 to 100; -100 for a
    row of zeros, `BROKEN` for one with a NaN or an infinity."""
    wide = np.asarray(x, np.float64)
    sound: Array = np.asarray(np.isfinite(wide).all(axis=-1))
    amax = np.abs(np.where(sound[..., None], wide, 0.0)).max(axis=-1, initial=0.0)
    fraction, exponent = np.frexp(amax)  # amax = fraction * 2**exponent, fraction from 1/2 to below 1
    least = exponent.astype(np.int64) - np.where(fraction * 128.0 <= LARGEST, 7, 6)
    clamped = np.clip(np.where(amax > 0.0, least, LEAST_EXPONENT), LEAST_EXPONENT, MOST_EXPONENT)
    return np.where(sound, clamped, BROKEN)


def quantise(x: Array) -> Array:
    """What is read back of rows x [..., head_dim]: float64 of the same shape, each the nearest of -127..127 times 2**e, ties to
    even. Numbers that are on that grid already stay as they are."""
    e = exponents(x)
    quantum = np.ldexp(1.0, np.where(e == BROKEN, 0, e))[..., None]
    wide = np.where((e == BROKEN)[..., None], np.nan, np.asarray(x, np.float64))
    return np.asarray(np.clip(np.rint(wide / quantum), -LARGEST, LARGEST) * quantum)


def quanta(x: Array) -> Array:
    """2**e of each row x [..., head_dim], as [..., 1]; NaN for a broken row."""
    e = exponents(x)
    return np.asarray(np.where(e == BROKEN, np.nan, np.ldexp(1.0, np.where(e == BROKEN, 0, e))))[..., None]
