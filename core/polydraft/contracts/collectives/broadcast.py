"""Defines `broadcast`: every rank gets the tokens that rank 0 has chosen.

It follows each choice that every rank makes for itself, from the same logits and with the same noise: what goes on is what rank 0
chose, whatever the others' arithmetic made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import COLLECTIVES, Args, Array, Case, Contract, tensor
from polydraft.contracts.collectives._step import STEP_MUTANTS, step_number
from polydraft.contracts.sizes import SMALL, Sizes
from polydraft.device import Buffer


class BroadcastV1(Args):
    """Arguments of `broadcast`, of one rank."""

    x: Buffer = tensor("N", "i32", "Tokens; afterwards those of rank 0.", access="inout")
    step: Buffer = step_number()


def golden(a: Any, n: int) -> None:
    """Copy row by row."""
    for rank in range(1, len(a.x)):
        for r in range(n):
            a.x[rank, r] = a.x[0, r]


def _case(name: str, x: Array, n: int) -> Case:
    return Case(name, {"x": x.astype(np.int32), "step": np.full((len(x), 1), 7, np.int32)}, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `broadcast`."""
    rng = np.random.default_rng(34)
    for ranks in (1, 2, 3, 4):
        yield _case(f"ranks_{ranks}", rng.integers(-1, 90, (ranks, 6)), 4)
    x = rng.integers(-1, 1 << 30, (4, 5))
    yield _case("every_row_used", x, 5)
    yield _case("as_many_rows_as_a_step_has", rng.integers(-1, 90, (3, 513)), 512)
    yield _case("nothing_to_do", x, 0)
    yield _case("all_agree_already", np.tile(x[:1], (4, 1)), 3)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random tokens of two to five ranks."""
    del sizes
    ranks, rows = (int(v) for v in rng.integers((2, 1), (6, 9)))
    return _case("random", rng.integers(-1, 90, (ranks, rows)), int(rng.integers(1, rows + 1)))


CONTRACT = COLLECTIVES.add(
    Contract(
        name="broadcast",
        version=1,
        unit="any",
        args=BroadcastV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="x := rank 0's x, rows below the launch length.",
        source="Ranks that sample for themselves may part where their arithmetic differs.",
        equivalent_mutants=STEP_MUTANTS,
    )
)
