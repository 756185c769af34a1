"""Defines `forbid_filtered`: forbids, in the kept logits of a row, the tokens that top-k, top-p and min-p have cut.

The runner launches it behind `filter_probs` where processed log probabilities are wanted of rows that sample: these are of the
tokens that could come. It never touches what a token is chosen from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.sizes import ROWS, SLOTS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer


class ForbidFilteredV1(Args):
    """Arguments of `forbid_filtered`. Filters are those of `sample`; rows of a slot without any, or with temperature 0, stay."""

    logits: Buffer = tensor("N V", "f32", "Kept logits of each row; those of tokens that were cut become -inf.", access="inout")
    probs: Buffer = tensor("N V", "f32", "Probabilities of the same rows behind the filters; 0: the token was cut.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    num_top: Buffer = tensor("B", "i32", "Most likely tokens wanted beside the emitted one, by slot; -1: no log probabilities.")
    temperature: Buffer = tensor("B", "f32", "Divides the logits of the slot's rows; 0: greedy.")
    top_k: Buffer = tensor("B", "i32", "Tokens kept when sampling; 0: all.")
    top_p: Buffer = tensor("B", "f32", "Probability mass kept when sampling; from 1 on: all.")
    min_p: Buffer = tensor("B", "f32", "Smallest probability kept, relative to the largest; 0: all.")


def golden(a: Any, n: int) -> None:
    """Token by token."""
    for r, slot in enumerate(a.row_slot[:n]):
        if slot < 0 or a.num_top[slot] < 0 or a.temperature[slot] == 0:
            continue
        if a.top_k[slot] > 0 or a.top_p[slot] < 1 or a.min_p[slot] > 0:
            for v, share in enumerate(a.probs[r]):
                if share == 0:
                    a.logits[r, v] = -np.inf


Slot = tuple[int, float, int, float, float]
"""Columns wanted, temperature, top-k, top-p and min-p."""
WARM: Slot = (0, 0.5, 0, 1.0, 0.0)


def _case(
    name: str, slots: Sequence[Slot], row_slot: Sequence[int], n: int | None = None, *, vocab: int = 7, seed: int = 5
) -> Case:
    rng = np.random.default_rng(seed)
    shape = len(row_slot), vocab
    probs: Array = rng.random(shape).astype(np.float32)
    probs[rng.random(shape) < 0.6] = 0
    columns = zip(*slots, strict=True)
    names = {"num_top": np.int32, "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    arrays: dict[str, Array] = {"logits": rng.normal(0, 3, shape).astype(np.float32), "probs": probs}
    arrays["row_slot"] = np.array(row_slot, np.int32)
    arrays |= {name: np.array(values, dtype) for (name, dtype), values in zip(names.items(), columns, strict=True)}
    return Case(name, arrays, {}, len(row_slot) if n is None else n)


def cases() -> Iterator[Case]:
    """Named cases of `forbid_filtered`."""
    yield _case("each_filter_alone", [(0, 0.5, 3, 1.0, 0.0), (2, 2.0, 0, 0.5, 0.0), (0, 1.0, 0, 1.0, 0.25)], [1, 0, 2, 1])
    yield _case("only_the_best_is_kept", [(0, 1.0, 1, 1.0, 0.0), WARM], [0, 1])
    yield _case("all_filters_at_once", [(1, 0.7, 2, 0.9, 0.1)], [0, 0])
    yield _case("no_filter_cuts_nothing", [WARM, (3, 1.0, 0, 2.0, 0.0), (0, 1.0, 4, 1.0, 0.0)], [0, 1, 2, 0])
    yield _case("greedy_slots_are_not_filtered", [(0, 0.0, 3, 0.5, 0.5), (0, 1.0, 3, 0.5, 0.5)], [0, 1, 0])
    yield _case("some_slots_want_none", [(-1, 1.0, 3, 0.5, 0.5), (0, 1.0, 3, 0.5, 0.5)], [0, 1, 0, 1])
    yield _case("rows_that_carry_nothing", [(0, 1.0, 3, 1.0, 0.0)] * 2, [-1, 1, -4, 0])
    yield _case("beyond_the_launch_length", [(0, 1.0, 3, 1.0, 0.0)] * 2, [1, 0, 1], 2)
    yield _case("nothing_to_do", [(0, 1.0, 3, 1.0, 0.0)], [0, 0], 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random filters, and probabilities of which some are 0."""
    rows, vocab, size = (int(v) for v in rng.integers((1, 1, 1), (9, 20, 5)))
    rows, vocab, size = fitted(sizes, N=several(sizes, rows), V=vocab, B=size)
    slots: list[Slot] = [
        (
            int(rng.integers(-1, 2)), float(rng.choice([0.0, 0.5, 1.5])), int(rng.choice([0, 3])), float(rng.choice([1.0, 0.5])),
            float(rng.choice([0.0, 0.25])),
        )
        for _ in range(size)
    ]  # fmt: skip
    row_slot = [int(s) for s in rng.integers(-1, size, rows)]
    if sizes:
        slots[-1], row_slot[0] = (0, 0.5, 3, 1.0, 0.0), size - 1
    return _case("random", slots, row_slot, launched(rng, sizes, rows), vocab=vocab, seed=int(rng.integers(2**31)))


CONTRACT = REGISTRY.add(
    Contract(
        name="forbid_filtered",
        version=1,
        unit="any",
        args=ForbidFilteredV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Forbid, for log probabilities, the tokens that the filters of a request have cut.",
        source="vLLM's logprobs_mode processed_logprobs, which are of what top-k and top-p leave.",
        equivalent_mutants={"plus(num_top)": "only its sign is read, and this leaves every sign as it is"},
        feature="logprobs",
        grows={"N": ROWS, "B": SLOTS, "V": VOCABULARY},
        independent=("N", "V"),
    )
)
