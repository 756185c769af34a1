"""Defines quantised KV rows: which numbers a cache can hold, and which of them is stored for a given one.

Goldens, the harness and the conformance kit call it in NumPy float64. How a backend lays such rows out in memory is left to the
backend.

A row (one position of one KV head; keys and values apart) has a scale of its own, a power of two 2**e, and holds small numbers
q, whole ones ("int8") or floats of four bits exponent and three bits mantissa ("fp8"): what is read is q * 2**e. Nothing is
calibrated, and a row's bits depend on that row alone, so that shared blocks, rejected drafts, chunks and row invariance are what
they are without quantisation. Powers of two make reading exact in every dtype of activations. Shared exponents as scales: Rouhani
et al. 2023, Microscaling Data Formats for Deep Learning; E4M3: Micikevicius et al. 2022, FP8 Formats for Deep Learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np

from polydraft.device import Array

Kv = Literal["", "int8", "fp8"]
"""How the rows of a cache are kept, `CacheSpec.kv`; "": in the activation dtype."""
KV_DTYPES: Final[tuple[Kv, ...]] = ("int8", "fp8")
"""The quantised ones."""
LARGEST: Final[Mapping[str, int]] = {"int8": 127, "fp8": 448}
"""Of the numbers q, of either sign."""
MANTISSA: Final = 3
"""Bits behind the point of a number q in fp8."""
LEAST_NORMAL: Final = -6
"""Exponent of the smallest number q in fp8 that has all of them; below it numbers lie as far apart as just above it."""
LEAST_EXPONENT: Final = -100
MOST_EXPONENT: Final = 100
BROKEN: Final = 127
"""Exponent of a row that holds a NaN or an infinity, and of fresh memory: all of it reads as NaN."""


def exponents(x: Array, kv: str) -> Array:
    """The exponent e of each row x [..., head_dim], int64 [...]: the least with amax <= LARGEST[kv] * 2**e, from -100 to 100;
    -100 for a row of zeros, `BROKEN` for one with a NaN or an infinity."""
    wide = np.asarray(x, np.float64)
    sound: Array = np.asarray(np.isfinite(wide).all(axis=-1))
    amax = np.abs(np.where(sound[..., None], wide, 0.0)).max(axis=-1, initial=0.0)
    fraction, exponent = np.frexp(amax)  # amax = fraction * 2**exponent, fraction from 1/2 to below 1
    most, whole = np.frexp(float(LARGEST[kv]))
    least = exponent.astype(np.int64) - np.where(fraction <= most, whole, whole - 1)
    clamped = np.clip(np.where(amax > 0.0, least, LEAST_EXPONENT), LEAST_EXPONENT, MOST_EXPONENT)
    return np.where(sound, clamped, BROKEN)


def quantise(x: Array, kv: str) -> Array:
    """What is read back of rows x [..., head_dim]: float64 of the same shape, each the nearest number q times 2**e, ties to the
    even one, LARGEST[kv] at most. Numbers that are on that grid already stay as they are."""
    e = exponents(x, kv)
    quantum = np.ldexp(1.0, np.where(e == BROKEN, 0, e))[..., None]
    wide = np.where((e == BROKEN)[..., None], np.nan, np.asarray(x, np.float64)) / quantum
    steps = _steps(wide, kv)
    return np.asarray(np.clip(np.rint(wide / steps) * steps, -LARGEST[kv], LARGEST[kv]) * quantum)


def quanta(x: Array, kv: str) -> Array:
    """The distance of neighbours on the grid around each number of rows x [..., head_dim], float64 of the same shape; NaN in a
    broken row."""
    e = exponents(x, kv)
    quantum = np.where(e == BROKEN, np.nan, np.ldexp(1.0, np.where(e == BROKEN, 0, e)))[..., None]
    return np.asarray(_steps(np.nan_to_num(np.asarray(x, np.float64) / quantum), kv) * quantum)


def _steps(q: Array, kv: str) -> Array:
    """The distance of neighbours around numbers q that are not rounded yet."""
    if kv == "int8":
        return np.ones_like(q)
    magnitude = np.frexp(np.where(np.isfinite(q) & (q != 0.0), q, 2.0**LEAST_NORMAL))[1] - 1
    return np.asarray(np.ldexp(1.0, np.maximum(magnitude, LEAST_NORMAL) - MANTISSA))
