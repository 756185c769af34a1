"""Defines `process_logits`: the processing that every row of logits gets, the mask of the padded vocabulary.

The step program launches it behind the head, on target and draft logits; what single requests ask for follows in contracts of
its own (`penalise_logits`, `bias_logits`, `forbid_tokens`), in steps of which some slot asks. It never normalises and never
touches a row without a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, param, tensor
from polydraft.contracts.sizes import ROWS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer


class ProcessLogitsV1(Args):
    """Arguments of `process_logits`."""

    logits: Buffer = tensor("N V", "f32", "Logits; rows of negative slots stay as they are.", access="inout")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    num_valid: int = param("Vocabulary size of the tokenizer, at most V: columns at and beyond it become -inf.")


def golden(a: Any, n: int) -> None:
    """Mask the padded vocabulary row by row, whatever was there."""
    for r in range(n):
        if a.row_slot[r] >= 0:
            for v in range(a.num_valid, a.logits.shape[1]):
                a.logits[r, v] = -np.inf


def _case(name: str, logits: Array, slots: Sequence[int], n: int, *, num_valid: int) -> Case:
    return Case(name, {"logits": logits, "row_slot": np.array(slots, np.int32)}, {"num_valid": num_valid}, n)


def cases() -> Iterator[Case]:
    """Named cases of `process_logits`."""
    logits = np.random.default_rng(10).standard_normal((5, 9), np.float32)
    yield _case("padded_vocabulary_is_masked", logits, [0, 2, 1, 1, 3], 4, num_valid=6)
    yield _case("nothing_is_padded", logits, [0, 2, 1, 1, 3], 4, num_valid=9)
    yield _case("rows_without_a_slot_stay", logits, [-1, 2, -1, 0, -5], 5, num_valid=7)
    broken = logits.copy()
    broken[1, 2], broken[1, 7], broken[2, 8], broken[3] = np.nan, np.nan, np.inf, -np.inf
    yield _case("nan_and_infinity_of_the_padding_go_others_stay", broken, [0, 1, 2, 3, 4], 4, num_valid=7)
    yield _case("all_padding", logits, [-1, -1, -1, 1, 1], 3, num_valid=4)
    yield _case("nothing_to_do", logits, [0, 1, 2, 3, 4], 0, num_valid=4)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random logits, a quarter of the rows without a slot."""
    rows, vocab = (int(v) for v in rng.integers((1, 2), (9, 30)))
    rows, vocab = fitted(sizes, N=several(sizes, rows), V=vocab)
    slots = np.where(rng.random(rows) < 0.25, -1, rng.integers(0, 6, rows))
    slots[0] = 0 if sizes else slots[0]
    logits = rng.standard_normal((rows, vocab), np.float32)
    n, num_valid = launched(rng, sizes, rows), int(rng.integers(1, vocab + 1))
    return _case("random", logits, [int(s) for s in slots], n, num_valid=num_valid)


CONTRACT = REGISTRY.add(
    Contract(
        name="process_logits",
        version=1,
        unit="any",
        args=ProcessLogitsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Columns of the padded vocabulary become -inf.",
        source="Checkpoints pad the head to a round number of rows; a padded row must never win.",
        equivalent_mutants={"plus(row_slot)": "only the sign of a slot is read, and this leaves every sign as it is"},
        constraints=("1 <= num_valid <= V",),
        feature="dense",
        grows={"N": ROWS, "V": VOCABULARY},
        independent=("N",),
    )
)
