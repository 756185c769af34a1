"""Faults of packed weights: scales, zero points and halves of bytes read from the wrong place, activations rounded together.

Faulty backends compute `linear` and `expert_mlp` on the host with what these functions make of their arguments. Weights that are
not packed are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.contracts.packing import Matrix, PackedWeight, rounded, stacked, unpacked
from polydraft.device import Array


def neighbour(weight: PackedWeight) -> Matrix:
    """Scales are read one block further along the inputs, or along the outputs where there is one for all inputs."""
    return replace(weight, scales=np.roll(weight.scales, -1, axis=int(weight.scales.shape[1] > 1)))


def transposed(weight: PackedWeight) -> Matrix:
    """Scales are read as if those of one block of inputs lay side by side."""
    return replace(weight, scales=np.ascontiguousarray(weight.scales.T).reshape(weight.scales.shape))


def zero_off_by_one(weight: PackedWeight) -> Matrix:
    """Zero points as some files have them, 1 less than what is meant."""
    return weight if weight.zeros is None else replace(weight, zeros=np.asarray(weight.zeros + 1, np.uint8))


def swapped(weight: PackedWeight) -> Matrix:
    """Even columns are read from the high half of a byte."""
    if weight.packing.number != "int4":
        return weight
    return replace(weight, numbers=np.asarray(weight.numbers << 4 | weight.numbers >> 4, np.uint8))


def border(weight: PackedWeight) -> Matrix:
    """The first column of each group but the first is read with the scale of the group before."""
    matrix, width = weight.read(np.float64), weight.packing.columns
    first = np.arange(width, weight.shape[1], width) if width else np.zeros(0, np.int64)
    scales = weight.scales[np.arange(weight.shape[0]) // weight.packing.rows]
    for column in first:
        matrix[:, column] *= scales[:, column // width - 1].astype(np.float64) / scales[:, column // width]
    return matrix


def next_expert(weight: PackedWeight) -> Matrix:
    """Scales of a stack are those of the expert behind."""
    return replace(weight, scales=np.roll(weight.scales, -1, axis=0))


def next_zeros(weight: PackedWeight) -> Matrix:
    """Zero points of a stack are those of the expert behind."""
    return weight if weight.zeros is None else replace(weight, zeros=np.roll(weight.zeros, -1, axis=0))


def unrounded(weight: PackedWeight) -> Matrix:
    """Rows are multiplied as they are."""
    return weight.read(np.float64)


def of_each(change: Callable[[PackedWeight], Matrix]) -> Callable[[PackedWeight], Matrix]:
    """The same fault in each matrix of a stack."""

    def changed(stack: PackedWeight) -> Matrix:
        found = [change(one) for one in stack]
        packed = [one for one in found if isinstance(one, PackedWeight)]
        return stacked(packed) if packed else np.stack([unpacked(one, np.float64) for one in found])

    return changed


def reading(change: Callable[[PackedWeight], Matrix], weight: str = "weight") -> Callable[[Any], Any]:
    """What a kernel with that fault takes a weight of a namespace for."""

    def read(a: Any) -> Any:
        value = getattr(a, weight)
        return change(value) if isinstance(value, PackedWeight) else value

    return read


def rounded_together(a: Any, weight: str = "weight") -> Array:
    """Rows as a kernel rounds them that has one scale for all rows of a launch: they stay on its grid when they are rounded again
    by the rows' own scales, or move further."""
    value = getattr(a, weight)
    if not isinstance(value, PackedWeight) or not value.packing.activations:
        return np.asarray(a.x)
    whole = replace(value.packing, rows=1, columns=0)
    return rounded(a.x.reshape(1, -1), whole).reshape(a.x.shape)
