"""Defines `update_bad_words`: staged writes of single places into the slots' tables of words that may not be generated.

The runner launches it after `update_slots` in a step that admits a request with such words. It never changes how many places
are in use: `update_slots` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.device import Buffer


class UpdateBadWordsV1(Args):
    """Buffers of `update_bad_words`. Launch length: update rows."""

    updates: Buffer = tensor("Y 3", "i32", "Slot, place, token (NO_TOKEN behind each word); slot < 0: no update.")
    bad_words: Buffer = tensor("B X", "i32", "Words of each slot, one behind the other.", access="inout")


def golden(a: Any, n: int) -> None:
    """Write each place; at most one row names it."""
    for slot, place, token in a.updates[:n]:
        if slot >= 0:
            a.bad_words[slot, place] = token


def _case(name: str, rows: list[tuple[int, int, int]], n: int) -> Case:
    old = np.arange(1000, 1000 + 4 * 6, dtype=np.int32).reshape(4, 6)
    return Case(name, {"updates": np.array(rows, np.int32).reshape(-1, 3), "bad_words": old}, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `update_bad_words`."""
    rows = [(2, 0, 11), (2, 1, 12), (2, 2, -1), (0, 0, 0), (0, 1, -1)]
    yield _case("two_words_of_two_slots", rows, 5)
    yield _case("stale_rows_beyond_the_launch_length", rows, 2)
    yield _case("row_that_names_no_slot", [rows[0], (-1, 3, 14), rows[1], (-1, 0, 15)], 4)
    yield _case("last_place_of_the_last_slot", [(3, 5, 2**31 - 1), (0, 5, 9)], 1)
    yield _case("nothing_to_do", rows, 0)


def generate(rng: np.random.Generator) -> Case:
    """Random values for distinct places, some rows naming no slot."""
    places = rng.permutation(24)[: rng.integers(1, 9)]
    rows = [(int(p) // 6 if rng.random() < 0.8 else -1, int(p) % 6, int(rng.integers(-1, 100))) for p in places]
    return _case("random", rows, int(rng.integers(0, len(rows) + 1)))


CONTRACT = REGISTRY.add(
    Contract(
        name="update_bad_words",
        version=1,
        unit="bad_word_updates",
        args=UpdateBadWordsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Write single places of the tables of bad words.",
        source="FastDeploy keeps bad_tokens a slot; runs of tokens as in vLLM's bad_words.",
        equivalent_mutants={
            "reverse(updates)": "no two rows name the same place, so their order is free",
        },
    )
)
