"""Owns the reference's own quantisation of KV rows, in float32.

Its cache and the kernel that writes rows call it. It never packs anything: rows stay float32 numbers, on the grid that
`contracts/kv_quant.py` defines.
"""

from __future__ import annotations

import numpy as np

from polydraft.device import Array

LEAST, MOST = -100, 100
"""Exponents of a scale."""


def to_grid(rows: Array) -> Array:
    """The nearest numbers q * 2**e, q from -127 to 127, of each row [..., head_dim] float32; a row with a NaN or an infinity
    becomes NaN. Returns a fresh array."""
    amax = np.abs(rows).max(axis=-1, keepdims=True, initial=0.0)
    fraction, exponent = np.frexp(amax)
    exponent = np.where(fraction > np.float32(127 / 128), exponent - 6, exponent - 7)
    exponent = np.clip(np.where(amax > 0.0, exponent, LEAST), LEAST, MOST)
    with np.errstate(all="ignore"):  # of broken rows, and of numbers far below or above the range of exponents
        q = np.clip(np.rint(np.ldexp(rows, -exponent)), -127.0, 127.0)
    return np.where(np.isfinite(amax), np.ldexp(q, exponent), np.float32(np.nan)).astype(np.float32, copy=False)
