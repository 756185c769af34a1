"""Defines `all_gather`: the columns of all ranks side by side, left with every rank.

It joins the columns of the embedding, and the logits of a vocabulary that ranks have shared out where a step needs them all. It
computes nothing: what arrives is what was there, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import COLLECTIVES, Args, Array, Case, Contract, tensor
from polydraft.contracts.collectives._step import STEP_MUTANTS, step_number
from polydraft.contracts.sizes import SMALL, Sizes
from polydraft.device import Buffer


class AllGatherV1(Args):
    """Arguments of `all_gather`, of one rank."""

    x: Buffer = tensor("N I", "float", "This rank's columns; of the last ranks some may be padding.")
    out: Buffer = tensor(
        "N O", "float", "Columns of rank 0, then of rank 1 and so on, as many as it has room for; the dtype of x.", access="out"
    )
    step: Buffer = step_number()


def golden(a: Any, n: int) -> None:
    """Copy element by element; what does not fit is padding."""
    ranks, _, width = a.x.shape
    for rank in range(ranks):
        for r in range(n):
            for column in range(a.out.shape[2]):
                a.out[rank, r, column] = a.x[column // width, r, column % width]


def _case(name: str, x: Array, n: int, columns: int) -> Case:
    arrays = {"x": x.astype(np.float32), "step": np.full((len(x), 1), 7, np.int32)}
    return Case(name, arrays, {}, n, {"out": ((len(x), x.shape[1], columns), "f32")})


def cases() -> Iterator[Case]:
    """Named cases of `all_gather`."""
    rng = np.random.default_rng(32)
    for ranks in (1, 2, 3, 4):
        yield _case(f"ranks_{ranks}", rng.standard_normal((ranks, 5, 3)), 4, 3 * ranks)
    x = rng.standard_normal((4, 3, 5))
    yield _case("every_row_used", x, 3, 20)
    yield _case("nothing_to_do", x, 0, 20)
    yield _case("padding_of_the_last_rank_is_left_out", x, 2, 18)
    yield _case("a_rank_of_padding_alone", x, 3, 13)
    yield _case("as_many_columns_as_models_have", rng.standard_normal((2, 2, 4099)), 1, 8197)
    yield _case("as_many_rows_as_a_step_has", rng.standard_normal((3, 257, 5)), 256, 14)
    broken = x.copy()
    broken[1, 0, 2], broken[3, 1, 4], broken[2, 1, 0] = np.nan, np.inf, -np.inf
    yield _case("nan_and_infinity_stay_in_their_column", broken, 2, 20)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows of two to five ranks."""
    del sizes
    ranks, rows, width = (int(v) for v in rng.integers((2, 1, 1), (6, 9, 20)))
    columns = ranks * width - int(rng.integers(0, width))
    return _case("random", rng.standard_normal((ranks, rows, width)), int(rng.integers(1, rows + 1)), columns)


CONTRACT = COLLECTIVES.add(
    Contract(
        name="all_gather",
        version=1,
        unit="any",
        args=AllGatherV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="out := the columns of all ranks side by side, rows below the launch length.",
        source="Shoeybi et al. 2019, Megatron-LM: layers split by columns.",
        equivalent_mutants=STEP_MUTANTS,
    )
)
