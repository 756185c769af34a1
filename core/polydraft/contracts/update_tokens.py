"""Defines `update_tokens`: staged writes of single tokens into the token history (prompts of new and resumed requests).

The runner launches it after `update_slots` in a step that has such writes. It never changes a length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.device import Buffer


class UpdateTokensV1(Args):
    """Buffers of `update_tokens`. Launch length: update rows."""

    updates: Buffer = tensor("T 3", "i32", "Slot, position, token; slot < 0: no update.")
    tokens: Buffer = tensor("B L", "i32", "Token history of each slot.", access="inout")


def golden(a: Any, n: int) -> None:
    """Write each token; at most one row names a place."""
    for slot, position, token in a.updates[:n]:
        if slot >= 0:
            a.tokens[slot, position] = token


def _case(name: str, rows: list[tuple[int, int, int]], n: int) -> Case:
    old = np.arange(1000, 1000 + 4 * 6, dtype=np.int32).reshape(4, 6)
    return Case(name, {"updates": np.array(rows, np.int32).reshape(-1, 3), "tokens": old}, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `update_tokens`."""
    rows = [(2, 5, 11), (0, 0, 12), (2, 4, 13), (3, 1, 0)]
    yield _case("any_order_of_slots_and_places", rows, 4)
    yield _case("stale_rows_beyond_the_launch_length", rows, 2)
    yield _case("row_that_names_no_slot", [rows[0], (-1, 3, 14), rows[1], (-1, 0, 15)], 4)
    yield _case("last_place_of_the_last_slot", [(3, 5, 2**31 - 1), (0, 5, 9)], 1)
    yield _case("nothing_to_do", rows, 0)


def generate(rng: np.random.Generator) -> Case:
    """Random values for distinct places, some rows naming no slot."""
    places = rng.permutation(24)[: rng.integers(1, 9)]
    rows = [(int(p) // 6 if rng.random() < 0.8 else -1, int(p) % 6, int(rng.integers(0, 100))) for p in places]
    return _case("random", rows, int(rng.integers(0, len(rows) + 1)))


CONTRACT = REGISTRY.add(
    Contract(
        name="update_tokens",
        version=1,
        unit="token_updates",
        args=UpdateTokensV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Write single tokens into the history.",
        source="FastDeploy insert_tasks (prompt tokens).",
        equivalent_mutants={
            "reverse(updates)": "no two rows name the same place, so their order is free",
        },
    )
)
