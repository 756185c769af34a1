"""The reference's own reading of packed weights and rounding of activations, in float32.

Its weights and the kernels of `linear` and `expert_mlp` call it. Nothing is kept packed: a weight is the float32 matrix that it
stands for, which takes as much memory as others, with its packing beside it where activations are rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from polydraft.contracts.packing import Matrix, PackedWeight, Packing
from polydraft.device import Array
from polydraft.reference.kv_grid import nearest_fp8

MOST = {"int8": np.float32(127), "fp8": np.float32(448)}


def packing_of(value: Matrix) -> Packing | None:
    """How a weight came, None where it was not packed."""
    return value.packing if isinstance(value, PackedWeight) else None


def unpacked(value: Matrix) -> Array:
    """The float32 matrix or stack that a weight stands for; a view where it was not packed."""
    if not isinstance(value, PackedWeight):
        return np.ascontiguousarray(value, np.float32)
    if value.ndim == 3:
        return np.stack([unpacked(one) for one in value])
    outputs, inputs = value.shape
    packing, column = value.packing, np.arange(inputs)
    if packing.number == "int8":
        found = value.numbers.astype(np.float32)
    elif packing.number == "fp8":
        bits = value.numbers.astype(np.uint32)  # shifted to where float32 has them, whose exponent counts from 120 lower
        found = ((bits & 128) << 24 | (bits & 127) << 20).view(np.float32) * np.float32(2.0**120)
    else:
        # `take` leaves rows whole; an index would leave columns so, and products would sum in another order.
        found = (np.take(value.numbers, column // 2, axis=1) >> (column % 2 * 4).astype(np.uint8) & 15).astype(np.float32)
    group = column // packing.columns if packing.columns else np.zeros(inputs, np.int64)
    row = np.arange(outputs) // packing.rows
    if packing.number == "int4":
        found -= np.float32(8) if value.zeros is None else value.zeros[row[:, None], group].astype(np.float32)
    found *= value.scales[row[:, None], group]
    return found


def rounding(packing: Packing | None) -> Callable[[Array], Array]:
    """What `linear` does to rows [n, inputs] float32 before it multiplies them."""
    if packing is None or not packing.activations:
        return lambda x: x
    most, columns = MOST[packing.rounded_to], packing.columns

    def rounded(x: Array) -> Array:
        out = np.empty_like(x)
        width = columns or x.shape[1]
        for begin in range(0, x.shape[1], width):
            part = x[:, begin : begin + width]
            with np.errstate(invalid="ignore", over="ignore"):
                scale = np.maximum(np.abs(part).max(axis=1, keepdims=True) / most, np.float32(2.0**-100))
                scale[~np.isfinite(scale)] = np.nan
                quotient = part / scale
            out[:, begin : begin + width] = (np.rint(quotient) if packing.rounded_to == "int8" else nearest_fp8(quotient)) * scale
        return out

    return rounded
