"""Faults of packed weights: scales, zero points and halves of bytes read from the wrong place, activations rounded together.

Faulty backends compute `linear` on the host with what these functions make of its arguments. Weights that are not packed are left
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.contracts.packing import Matrix, PackedWeight, rounded
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


def reading(change: Callable[[PackedWeight], Matrix]) -> Callable[[Any], Any]:
    """What a kernel with that fault takes the weight of a namespace for."""
    return lambda a: change(a.weight) if isinstance(a.weight, PackedWeight) else a.weight


def rounded_together(a: Any) -> Array:
    """Rows as a kernel rounds them that has one scale for all rows of a launch: they stay on its grid when they are rounded again
    by the rows' own scales, or move further."""
    weight = a.weight
    if not isinstance(weight, PackedWeight) or not weight.packing.activations:
        return np.asarray(a.x)
    whole = replace(weight.packing, rows=1, columns=0)
    return rounded(a.x.reshape(1, -1), whole).reshape(a.x.shape)
