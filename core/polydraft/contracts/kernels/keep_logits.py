"""Defines `keep_logits`: a copy of the logits of those who want log probabilities, before something changes them in place.

The runner launches it in steps whose logits are processed or filtered in place while log probabilities are wanted of what
they were. It never runs where they stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.sizes import ROWS, SLOTS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer


class KeepLogitsV1(Args):
    """Arguments of `keep_logits`."""

    logits: Buffer = tensor("N V", "f32", "Logits of each row.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    num_top: Buffer = tensor("B", "i32", "Most likely tokens wanted beside the emitted one, by slot; -1: no log probabilities.")
    kept: Buffer = tensor("N V", "f32", "The rows whose slot wants log probabilities; others are 0.", access="out", pad=0)


def golden(a: Any, n: int) -> None:
    """Copy row by row."""
    for r, slot in enumerate(a.row_slot[:n]):
        a.kept[r] = a.logits[r] if slot >= 0 and a.num_top[slot] >= 0 else 0.0


def _case(name: str, logits: Array, row_slot: Sequence[int], num_top: Sequence[int], n: int) -> Case:
    arrays = {"logits": logits, "row_slot": np.array(row_slot, np.int32), "num_top": np.array(num_top, np.int32)}
    return Case(name, arrays, {}, n, {"kept": (logits.shape, "f32")})


def cases() -> Iterator[Case]:
    """Named cases of `keep_logits`."""
    rng = np.random.default_rng(52)
    logits = rng.normal(0, 3, (6, 7)).astype(np.float32)
    yield _case("rows_of_several_slots", logits, [1, 1, 0, 2, 2, 0], [0, 3, -1], 6)
    yield _case("rows_that_carry_nothing", logits, [-1, 1, -3, 0, -1, 1], [2, 0], 5)
    yield _case("beyond_the_launch_length", logits, [0, 1, 0, 1, 0, 1], [5, 0], 3)
    broken = logits.copy()
    broken[0, 2], broken[1, 3], broken[2] = np.nan, np.inf, -np.inf
    yield _case("broken_and_forbidden_rows_as_they_are", broken, [0, 0, 0, 1, 1, 1], [0, -1], 6)
    yield _case("nobody_wants_it", logits, [0, 1, 0, 1, 0, 1], [-1, -1], 6)
    yield _case("nothing_to_do", logits, [0, 1, 0, 1, 0, 1], [0, 0], 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows of random slots."""
    rows, vocab, size = (int(v) for v in rng.integers((1, 1, 1), (9, 20, 5)))
    rows, vocab, size = fitted(sizes, N=several(sizes, rows), V=vocab, B=size)
    slots = [int(s) for s in rng.integers(-1, size, rows)]
    num_top = [int(k) for k in rng.integers(-1, 3, size)]
    return _case("random", rng.normal(0, 3, (rows, vocab)).astype(np.float32), slots, num_top, launched(rng, sizes, rows))


CONTRACT = REGISTRY.add(
    Contract(
        name="keep_logits",
        version=1,
        unit="any",
        args=KeepLogitsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Copy the logits of which log probabilities are wanted.",
        source="Raw log probabilities of processed logits, as vLLM's logprobs_mode offers them.",
        equivalent_mutants={"plus(num_top)": "only its sign is read, and this leaves every sign as it is"},
        feature="logprobs",
        grows={"N": ROWS, "B": SLOTS, "V": VOCABULARY},
        independent=("N", "V"),
    )
)
