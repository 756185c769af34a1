"""Defines `gather_rows`: pick rows by index, such as the hidden rows that need logits.

The step program launches it before the head. It never changes a value and never writes a row that was not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.sizes import HIDDEN, PASS_ROWS, SMALL, Sizes, fitted, launched, several
from polydraft.device import Buffer


class GatherRowsV1(Args):
    """Arguments of `gather_rows`. Precondition: every index is below R."""

    x: Buffer = tensor("R H", "act", "Rows to pick from.")
    index: Buffer = tensor("N", "i32", "Row of x for each output row; NO_ROW (any negative index) for none.")
    out: Buffer = tensor("N H", "act", "Picked rows, moved bit for bit.", access="out", pad=0.0)


def golden(a: Any, n: int) -> None:
    """Copy one row an index; a negative index gives a zero row."""
    for r in range(n):
        a.out[r] = a.x[a.index[r]] if a.index[r] >= 0 else 0.0


def _case(name: str, x: Array, index: Sequence[int], n: int) -> Case:
    out = ((len(index), x.shape[1]), "act")
    return Case(name, {"x": x, "index": np.array(index, np.int32)}, {}, n, {"out": out})


def cases() -> Iterator[Case]:
    """Named cases of `gather_rows`."""
    x = np.random.default_rng(5).standard_normal((9, 4), np.float32)
    yield _case("first_and_last_row", x, [8, 0, 4, 1], 3)
    yield _case("no_row_between_rows", x, [-1, 3, -1, -7, 5, 2], 5)
    yield _case("rows_repeat_and_go_backwards", x, [6, 6, 2, 1, 0, 6, 3], 6)
    yield _case("more_outputs_than_rows", x[:2], [1, 0, 1, 1, 0, -1], 6)
    yield _case("nothing_to_do", x, [1, 2], 0)
    broken = x.copy()
    broken[3], broken[5, 1] = np.nan, np.inf
    yield _case("nan_and_infinity_are_moved", broken, [3, 4, 5, -1, 6], 4)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random indices, a quarter of them negative."""
    rows, width, picks = (int(v) for v in rng.integers((1, 1, 1), (16, 12, 14)))
    rows, width, picks = fitted(sizes, R=rows, H=width, N=several(sizes, picks))
    index = np.where(rng.random(picks) < 0.25, -rng.integers(1, 5, picks), rng.integers(0, rows, picks))
    index[0] = rows - 1 if sizes else index[0]
    x = rng.standard_normal((rows, width), np.float32)
    return _case("random", x, [int(v) for v in index], launched(rng, sizes, picks))


CONTRACT = REGISTRY.add(
    Contract(
        name="gather_rows",
        version=1,
        unit="any",
        args=GatherRowsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="out[r] = x[index[r]]; a negative index gives a zero row.",
        source="Row selection before the head (upstream: rebuild_padding, gather_next_token).",
        feature="dense",
        grows={"N": PASS_ROWS, "R": PASS_ROWS, "H": HIDDEN},
        independent=("N", "H"),
    )
)
