"""Defines `own_experts`: which experts of each row are this rank's, where ranks keep experts whole.

The feed-forward half with experts launches it behind `route_experts`, which every rank runs over all experts. Nothing is
exchanged: it is among the collectives because what it computes depends on the rank that launches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import COLLECTIVES, Args, Array, Case, Contract, param, tensor
from polydraft.contracts.sizes import SMALL, Sizes
from polydraft.device import Buffer


class OwnExpertsV1(Args):
    """Arguments of `own_experts`, of one rank."""

    expert_ids: Buffer = tensor("N EK", "i32", "Experts of each row, among all; negative: none in this place.")
    own: Buffer = tensor(
        "N EK",
        "i32",
        "The same counted from the rank's first expert; -1 where it is another rank's, or none.",
        access="out",
        pad=-1,
    )
    num_kept: int = param("Experts that each rank keeps: rank g has those from g * num_kept on.")


def golden(a: Any, n: int) -> None:
    """Place by place."""
    for rank in range(len(a.expert_ids)):
        for r in range(n):
            for place, expert in enumerate(a.expert_ids[rank, r].tolist()):
                mine = expert >= 0 and expert // a.num_kept == rank
                a.own[rank, r, place] = expert % a.num_kept if mine else -1


def _case(name: str, ids: Array, n: int, *, ranks: int, num_kept: int) -> Case:
    """`ids` [rows, k], the same on all ranks."""
    arrays = {"expert_ids": np.tile(ids.astype(np.int32), (ranks, 1, 1))}
    return Case(name, arrays, {"num_kept": num_kept}, n, {"own": ((ranks, *ids.shape), "i32")})


def _choices(rng: np.random.Generator, rows: int, k: int, experts: int) -> Array:
    return np.array([rng.permutation(experts)[:k] for _ in range(rows)])


def cases() -> Iterator[Case]:
    """Named cases of `own_experts`."""
    rng = np.random.default_rng(35)
    for ranks in (1, 2, 3, 4):
        yield _case(f"ranks_{ranks}", _choices(rng, 6, 3, 4 * ranks), 5, ranks=ranks, num_kept=4)
    ids = _choices(rng, 5, 2, 8)
    yield _case("every_row_used", ids, 5, ranks=4, num_kept=2)
    yield _case("nothing_to_do", ids, 0, ranks=4, num_kept=2)
    yield _case("as_many_experts_as_models_have", _choices(rng, 65, 8, 512), 64, ranks=2, num_kept=256)
    none = ids.copy()
    none[1], none[3, 0] = -1, -7
    yield _case("rows_and_places_without_an_expert", none, 5, ranks=4, num_kept=2)
    yield _case("all_rows_choose_experts_of_one_rank", ids % 2 + 4, 5, ranks=4, num_kept=2)
    yield _case("first_and_last_expert_of_each_rank", np.array([[0, 1], [2, 3], [4, 5], [5, 0]]), 4, ranks=3, num_kept=2)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random choices of two to five ranks, some places without an expert."""
    del sizes
    ranks, rows, kept, k = (int(v) for v in rng.integers((2, 1, 1, 1), (6, 9, 6, 3)))
    ids = _choices(rng, rows, k, ranks * kept)
    ids[rng.random(ids.shape) < 0.2] = -1
    return _case("random", ids, int(rng.integers(1, rows + 1)), ranks=ranks, num_kept=kept)


CONTRACT = COLLECTIVES.add(
    Contract(
        name="own_experts",
        version=1,
        unit="any",
        args=OwnExpertsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="own := the row's experts that this rank keeps, counted from its first; -1 for the others.",
        source="Experts split over the ranks of tensor-parallel attention, without an exchange of rows.",
        equivalent_mutants={"reverse(expert_ids)": "experts are the same on all ranks, so their order is none"},
        constraints=("1 <= num_kept",),
        symbols={"EK": "experts of a row"},
    )
)
