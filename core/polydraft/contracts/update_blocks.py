"""Defines `update_blocks`: staged writes of single block-table entries (blocks granted since the last step).

The runner launches it after `update_slots` in a step that has such writes. It never allocates and never touches a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.device import Buffer
from polydraft.sentinels import NO_BLOCK


class UpdateBlocksV1(Args):
    """Buffers of `update_blocks`. Launch length: update rows."""

    updates: Buffer = tensor("M 3", "i32", "Slot, index in its table, block (NO_BLOCK revokes); slot < 0: no update.")
    block_table: Buffer = tensor("B MB", "i32", "Granted blocks of each slot.", access="inout")


def golden(a: Any, n: int) -> None:
    """Write each entry; at most one row names a place."""
    for slot, index, block in a.updates[:n]:
        if slot >= 0:
            a.block_table[slot, index] = block


def _case(name: str, rows: list[tuple[int, int, int]], n: int) -> Case:
    old = np.arange(1000, 1000 + 4 * 6, dtype=np.int32).reshape(4, 6)
    return Case(name, {"updates": np.array(rows, np.int32).reshape(-1, 3), "block_table": old}, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `update_blocks`."""
    rows = [(2, 5, 11), (0, 0, 12), (2, 4, 13), (3, 1, 0)]
    yield _case("any_order_of_slots_and_places", rows, 4)
    yield _case("stale_rows_beyond_the_launch_length", rows, 2)
    yield _case("row_that_names_no_slot", [rows[0], (-1, 3, 14), rows[1], (-1, 0, 15)], 4)
    yield _case("block_is_revoked", [(3, 5, NO_BLOCK), (0, 5, 9)], 1)
    yield _case("nothing_to_do", rows, 0)


def generate(rng: np.random.Generator) -> Case:
    """Random values for distinct places, some rows naming no slot."""
    places = rng.permutation(24)[: rng.integers(1, 9)]
    rows = [(int(p) // 6 if rng.random() < 0.8 else -1, int(p) % 6, int(rng.integers(0, 100))) for p in places]
    return _case("random", rows, int(rng.integers(0, len(rows) + 1)))


CONTRACT = REGISTRY.add(
    Contract(
        name="update_blocks",
        version=1,
        unit="block_updates",
        args=UpdateBlocksV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Write single entries of block tables.",
        source="FastDeploy insert_tasks (block tables).",
        equivalent_mutants={
            "reverse(updates)": "no two rows name the same place, so their order is free",
        },
    )
)
