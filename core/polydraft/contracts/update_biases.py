"""Defines `update_biases`: staged writes of single entries into the slots' tables of logit biases.

The runner launches it after `update_slots` in a step that admits a request with a logit bias. It never changes how many
entries count: `update_slots` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.device import Buffer


class UpdateBiasesV1(Args):
    """Buffers of `update_biases`. Launch length: update rows."""

    updates: Buffer = tensor("J 4", "i32", "Slot, entry, token id, bits of the float32 bias; slot < 0: no update.")
    bias_ids: Buffer = tensor("B A", "i32", "Token of each entry, by slot.", access="inout")
    biases: Buffer = tensor("B A", "f32", "Bias of each entry, by slot.", access="inout")


def golden(a: Any, n: int) -> None:
    """Write each entry; at most one row names it."""
    for slot, entry, token, bits in a.updates[:n]:
        if slot >= 0:
            a.bias_ids[slot, entry] = token
            a.biases[slot, entry] = np.array([bits], np.int32).view(np.float32)[0]


def _case(name: str, rows: list[tuple[int, int, int, float]], n: int) -> Case:
    """Rows are (slot, entry, token, bias)."""
    updates = np.array([(*row[:3], int(np.float32(row[3]).view(np.int32))) for row in rows], np.int32).reshape(-1, 4)
    old = np.arange(1000, 1000 + 4 * 3, dtype=np.int32).reshape(4, 3)
    return Case(name, {"updates": updates, "bias_ids": old, "biases": old.astype(np.float32)}, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `update_biases`."""
    rows = [(2, 1, 11, -100.0), (0, 0, 12, 2.5), (2, 2, 13, 1e-8), (3, 0, 0, 0.0)]
    yield _case("any_order_of_slots_and_entries", rows, 4)
    yield _case("stale_rows_beyond_the_launch_length", rows, 2)
    yield _case("row_that_names_no_slot", [rows[0], (-1, 2, 14, 5.0), rows[1], (-1, 0, 15, 6.0)], 4)
    yield _case("last_entry_of_the_last_slot", [(3, 2, 2**31 - 1, 100.0), (0, 2, 9, 1.0)], 1)
    yield _case("nothing_to_do", rows, 0)


def generate(rng: np.random.Generator) -> Case:
    """Random values for distinct entries, some rows naming no slot."""
    places = rng.permutation(12)[: rng.integers(1, 7)]
    rows = [
        (int(p) // 3 if rng.random() < 0.8 else -1, int(p) % 3, int(rng.integers(0, 100)), float(rng.uniform(-100, 100)))
        for p in places
    ]
    return _case("random", rows, int(rng.integers(0, len(rows) + 1)))


CONTRACT = REGISTRY.add(
    Contract(
        name="update_biases",
        version=1,
        unit="bias_updates",
        args=UpdateBiasesV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Write single entries of the tables of logit biases.",
        source="OpenAI's logit_bias as a table of fixed size a slot.",
        equivalent_mutants={
            "reverse(updates)": "no two rows name the same entry, so their order is free",
        },
    )
)
