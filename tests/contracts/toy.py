"""A toy contract whose every fault is easy to see, on which the harness, the comparison and the adequacy gate are tested.

It has `blend`, its kernel in NumPy, and builders of cases, for the tests of this folder. It is not registered, so that no other
test meets it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from polydraft.contracts.base import Args, Case, Contract, param, tensor
from polydraft.device import Array, Buffer
from polydraft.sentinels import PAD_SLOT


class BlendV1(Args):
    """Arguments of `blend`: every row is scaled and shifted by numbers of its slot, and the slot counts its rows."""

    x: Buffer = tensor("N H", "act", "Rows.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; PAD_SLOT: none.")
    gain: Buffer = tensor("B", "f32", "Factor of each slot.")
    offset: Buffer = tensor("B", "f32", "Added for each slot.")
    count: Buffer = tensor("B", "i32", "Rows of each slot so far.", access="inout")
    last: Buffer = tensor("B", "i32", "Newest row of each slot.", access="inout")
    out: Buffer = tensor("N H", "act", "Blended rows.", access="out", pad=0.0)
    times: int = param("How often the offset is added.")
    mode: Literal["plain", "negated"] = param("Sign of the result.")


def golden(a: Any, n: int) -> None:
    """Row by row."""
    for r in range(n):
        a.out[r] = 0.0
        if a.row_slot[r] >= 0:
            slot = a.row_slot[r]
            blended = a.x[r] * a.gain[slot] + a.times * a.offset[slot]
            a.out[r] = blended if a.mode == "plain" else -blended
            a.count[slot] += 1
            a.last[slot] = r


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Sum of the magnitudes of both terms."""
    terms = np.zeros_like(a.out)
    for r in range(n):
        if a.row_slot[r] >= 0:
            slot = a.row_slot[r]
            terms[r] = abs(a.x[r] * a.gain[slot]) + abs(a.times * a.offset[slot])
    return {"out": terms}


def case(
    name: str, row_slot: Sequence[int], n: int, *, rows: int = 4, times: int = 2, mode: str = "plain", seed: int = 0
) -> Case:
    """Random rows and slot numbers; `rows` is the capacity, and rows that `row_slot` leaves out are padding."""
    rng = np.random.default_rng(seed)
    slots = np.array([*row_slot, *[PAD_SLOT] * (rows - len(row_slot))], np.int32)
    gain, offset = rng.standard_normal((2, 3), np.float32)
    arrays = {"x": rng.standard_normal((rows, 2), np.float32), "row_slot": slots, "gain": gain, "offset": offset}
    arrays |= {"count": rng.integers(1, 9, 3, np.int32), "last": rng.integers(5, 9, 3, np.int32)}
    return Case(name, arrays, {"times": times, "mode": mode}, n, {"out": ((rows, 2), "act")})


def strong_cases() -> Iterator[Case]:
    """Cases that kill every mutant."""
    yield case("padding_between_rows", [2, PAD_SLOT, 0, 1], 3)
    yield case("rows_of_one_slot", [1, 1, 0], 3)
    yield case("negated", [0, 2, 1], 2, mode="negated")


def generate(rng: np.random.Generator) -> Case:
    """A case that shows little: one row of slot 0 that fills its buffer."""
    return case("one_row", [0], 1, rows=1, seed=int(rng.integers(100)))


CONTRACT = Contract(
    name="blend",
    version=1,
    unit="any",
    args=BlendV1,
    golden=golden,
    cases=strong_cases,
    generate=generate,
    doc="Scale and shift rows.",
    source="Made up.",
    tolerance={"out": 4.0},
    scale=scale,
)


def with_cases(*cases: Case, **changes: Any) -> Contract:
    """`blend` with other named cases (and other fields of the record)."""
    return dataclasses.replace(CONTRACT, cases=lambda: iter(cases), **changes)


Body = Callable[[Any, int], None]


def kernel(a: Any, n: int) -> None:
    """`blend` over arrays of the device's own dtypes, correct."""
    valid = np.flatnonzero(a.row_slot[:n] >= 0)
    slots = a.row_slot[valid]
    a.out[:n] = 0
    blended = a.x[valid] * a.gain[slots, None] + np.float32(a.times) * a.offset[slots, None]
    a.out[valid] = blended if a.mode == "plain" else -blended
    np.add.at(a.count, slots, 1)
    a.last[slots] = valid
