"""The reference's own quantisation of KV rows, in float32.

Its cache and the kernel that writes rows call it. Nothing is packed: rows stay float32 numbers, on the grid that
`contracts/kv_quant.py` defines.
"""

from __future__ import annotations

import numpy as np

from polydraft.device import Array

LEAST, MOST = -100, 100
"""Exponents of a scale."""
LARGEST = {"int8": (127 / 128, 7), "fp8": (7 / 8, 9)}
"""The largest number q, 127 and 448, as a fraction and the exponent of its power of two."""


def to_grid(rows: Array, kv: str) -> Array:
    """The nearest numbers q * 2**e of each row [..., head_dim] float32, q as `kv` says; a row with a NaN or an infinity becomes
    NaN. Returns a fresh array."""
    most, whole = LARGEST[kv]
    amax = np.abs(rows).max(axis=-1, keepdims=True, initial=0.0)
    fraction, exponent = np.frexp(amax)
    exponent = exponent - np.where(fraction > np.float32(most), whole - 1, whole)
    exponent = np.clip(np.where(amax > 0.0, exponent, LEAST), LEAST, MOST)
    with np.errstate(all="ignore"):  # of broken rows, and of numbers far below or above the range of exponents
        q = np.ldexp(rows, -exponent)
        q = nearest_fp8(q) if kv == "fp8" else np.rint(q)
        q = np.clip(q, -np.ldexp(most, whole), np.ldexp(most, whole))
    return np.where(np.isfinite(amax), np.ldexp(q, exponent), np.float32(np.nan)).astype(np.float32, copy=False)


def nearest_fp8(q: Array) -> Array:
    """Whole eighths of the power of two below each number, which is 2**-6 at least; numbers beyond 448 are not cut."""
    place = np.maximum(np.frexp(q)[1] - 1, -6) - 3
    return np.asarray(np.ldexp(np.rint(np.ldexp(q, -place)), place))
