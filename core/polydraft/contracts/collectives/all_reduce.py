"""Defines `all_reduce`: the sum over all ranks of what each has computed of a branch, left with every rank.

Every decoder block launches it after each of its halves where a model is split over several ranks: each rank has computed with
its share of heads, intermediate features or experts. It never depends on who arrives first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polydraft.contracts.base import COLLECTIVES, Args, Array, Case, Contract, tensor
from polydraft.contracts.collectives._step import STEP_MUTANTS, step_number
from polydraft.contracts.sizes import SMALL, Sizes
from polydraft.device import Buffer


class AllReduceV1(Args):
    """Arguments of `all_reduce`, of one rank."""

    x: Buffer = tensor(
        "N H", "float", "This rank's terms; afterwards the sum of all ranks' terms. f32 where they are sums by leaf.",
        access="inout",
    )  # fmt: skip
    step: Buffer = step_number()


def golden(a: Any, n: int) -> None:
    """Add rank by rank, row by row."""
    for r in range(n):
        total = np.zeros_like(a.x[0, r])
        for rank in range(len(a.x)):
            total = total + a.x[rank, r]
        for rank in range(len(a.x)):
            a.x[rank, r] = total


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Sum of all magnitudes."""
    magnitude = np.zeros_like(a.x)
    magnitude[:, :n] = np.abs(a.x[:, :n]).sum(axis=0)
    return {"x": magnitude}


def _case(name: str, x: Array, n: int) -> Case:
    return Case(name, {"x": x.astype(np.float32), "step": np.full((len(x), 1), 7, np.int32)}, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `all_reduce`."""
    rng = np.random.default_rng(31)
    for ranks in (1, 2, 3, 4):
        yield _case(f"ranks_{ranks}", rng.standard_normal((ranks, 5, 6)), 4)
    x = rng.standard_normal((4, 3, 5))
    yield _case("every_row_used", x, 3)
    yield _case("nothing_to_do", x, 0)
    yield _case("ranks_of_unlike_magnitude", x * np.array([1, 1e-3, 1e3, 1e-6])[:, None, None], 2)
    yield _case("ranks_cancel", np.concatenate((x, -x)), 3)
    yield _case("as_many_columns_as_models_have", rng.standard_normal((2, 3, 5120)), 2)
    yield _case("as_many_rows_as_a_step_has", rng.standard_normal((3, 257, 5)), 256)
    broken = x.copy()
    broken[1, 0, 2], broken[3, 1, 4] = np.nan, np.inf
    yield _case("nan_and_infinity_stay_in_their_column", broken, 2)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows of two to five ranks."""
    del sizes
    ranks, rows, width = (int(v) for v in rng.integers((2, 1, 1), (6, 9, 20)))
    x = rng.standard_normal((ranks, rows, width)) * 10.0 ** rng.uniform(-2, 2)
    return _case("random", x, int(rng.integers(1, rows + 1)))


CONTRACT = COLLECTIVES.add(
    Contract(
        name="all_reduce",
        version=1,
        unit="any",
        args=AllReduceV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="x := sum of all ranks' x, rows below the launch length; float32, rounded once.",
        source="Shoeybi et al. 2019, Megatron-LM: one sum behind each half of a block.",
        equivalent_mutants=STEP_MUTANTS,
        tolerance={"x": 1.0},
        sums={"x": "G"},
        scale=scale,
    )
)
