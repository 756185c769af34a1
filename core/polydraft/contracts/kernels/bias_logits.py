"""Defines `bias_logits`: adds the biases that a request names to the logits of single tokens.

The step program launches it behind `penalise_logits` in steps of which some request wants processing, for target and draft
rows alike. It never reads the text: a bias is the same in every row of a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.sizes import ROWS, SLOTS, SMALL, TABLE, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer


class BiasLogitsV1(Args):
    """Arguments of `bias_logits`. Preconditions: the entries of a slot name different tokens, each below V."""

    logits: Buffer = tensor("N V", "f32", "Logits; rows of negative slots stay as they are.", access="inout")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    num_biases: Buffer = tensor("B", "i32", "Entries of each slot's table that count.")
    bias_ids: Buffer = tensor("B A", "i32", "Token of each entry, by slot.")
    biases: Buffer = tensor("B A", "f32", "Bias of each entry, by slot.")


def golden(a: Any, n: int) -> None:
    """Add entry by entry."""
    for r in range(n):
        slot = a.row_slot[r]
        if slot >= 0:
            for entry in range(a.num_biases[slot]):
                a.logits[r, a.bias_ids[slot, entry]] += a.biases[slot, entry]


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """|logit| + |bias|: one rounding."""
    magnitude = np.abs(a.logits)
    for r in range(n):
        slot = a.row_slot[r]
        for entry in range(a.num_biases[slot] if slot >= 0 else 0):
            magnitude[r, a.bias_ids[slot, entry]] += abs(a.biases[slot, entry])
    return {"logits": magnitude}


TABLES = (((3, 2.5), (0, -100.0), (8, 0.5)), (), ((8, -1.25),), ((1, 1e-3), (2, 7.0)))
"""Entries of the slots of named cases."""


def _case(name: str, logits: Array, slots: Sequence[int], n: int, tables: Sequence[Sequence[tuple[int, float]]] = TABLES) -> Case:
    """Entries behind those of a slot are stale, and would be noticed."""
    width = max(1, *(len(table) for table in tables))
    stale = [((1 + slot) % logits.shape[1], 40.0 + slot) for slot in range(len(tables))]
    filled = [[*table, *[stale[slot]] * (width - len(table))] for slot, table in enumerate(tables)]
    arrays = {
        "logits": logits,
        "row_slot": np.array(slots, np.int32),
        "num_biases": np.array([len(table) for table in tables], np.int32),
        "bias_ids": np.array([[token for token, _ in table] for table in filled], np.int32),
        "biases": np.array([[bias for _, bias in table] for table in filled], np.float32),
    }
    return Case(name, arrays, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `bias_logits`."""
    logits = np.random.default_rng(30).standard_normal((6, 9), np.float32)
    yield _case("slots_in_another_order_than_rows", logits, [2, 0, 0, 3, 1, 0], 5)
    yield _case("rows_without_a_slot_stay", logits, [-1, 0, -9, 2, -1, 0], 5)
    broken = logits.copy()
    broken[0, 3], broken[0, 0], broken[1, 8], broken[2, 5] = np.nan, -np.inf, np.inf, np.nan
    yield _case("nan_and_infinities_stay", broken, [0, 0, 2, 2, 3, 3], 6)
    yield _case("one_entry_a_slot", logits, [1, 0, 1, 0, 1, 0], 6, [((4, 3.0),), ((5, -3.0),)])
    yield _case("no_entry_at_all", logits, [1, 0, 1, 0, 1, 0], 6, [(), ()])
    yield _case("nothing_to_do", logits, [0, 2, 3, 0, 2, 3], 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random tables of distinct tokens, a quarter of the rows without a slot."""
    rows, vocab, size = (int(v) for v in rng.integers((1, 4, 1), (8, 20, 5)))
    rows, vocab, size, most = fitted(sizes, N=several(sizes, rows), V=max(vocab, sizes.get("A", 0)), B=size, A=3)
    least = [most if sizes else 0, *[0] * (size - 1)]
    tables = [
        [(int(v), float(np.float32(rng.normal(0, 9)))) for v in rng.permutation(vocab)[: rng.integers(low, most + 1)]]
        for low in least
    ]
    if sizes:  # the last token of all among them
        tables[0] = [(vocab - 1, 2.5), *((v, bias) for v, bias in tables[0] if v < vocab - 1)][: max(len(tables[0]), 1)]
    slots = [int(s) for s in np.where(rng.random(rows) < 0.25, -1, rng.integers(0, size, rows))]
    return _case("random", rng.standard_normal((rows, vocab), np.float32), slots, launched(rng, sizes, rows), tables)


CONTRACT = REGISTRY.add(
    Contract(
        name="bias_logits",
        version=1,
        unit="any",
        args=BiasLogitsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Add a request's biases to the logits of the tokens it names.",
        source="logit_bias of OpenAI's interface.",
        tolerance={"logits": 1.0},
        scale=scale,
        feature="processing",
        grows={"N": ROWS, "B": SLOTS, "V": VOCABULARY, "A": TABLE},
        independent=("N",),
    )
)
