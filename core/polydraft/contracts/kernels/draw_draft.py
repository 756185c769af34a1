"""Defines `draw_draft`: draws a draft from its own distribution with given noise, and files that distribution.

Under rejection verification a proposer's rows run it behind `filter_probs`; `advance_draft` then files the draft itself. It
never shares noise with the target: that would tie the draft to the token it is later held against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.sizes import DRAFTS, MANY_TOKENS, SLOTS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN


class DrawDraftV1(Args):
    """Arguments of `draw_draft`. A slot has at most one row and fewer than K drafts."""

    probs: Buffer = tensor("N V", "f32", "Probabilities that the draft is drawn with; all 0: none can be drawn.")
    noise: Buffer = tensor("N V", "f32", "Standard Gumbel noise.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    draft_len: Buffer = tensor("B", "i32", "Drafts that each slot has already.")
    tokens: Buffer = tensor("N", "i32", "The draft of each row; NO_TOKEN: none could be drawn.", access="out", pad=NO_TOKEN)
    draft_probs: Buffer = tensor("B K V", "f32", "Distribution of each draft of each slot.", access="inout")


def drawn(weights: Array, noise: Array) -> int:
    """Return the token with the highest log(weight) + noise, the lowest id of equals; NO_TOKEN when no weight is positive."""
    ids = [v for v in range(len(weights)) if weights[v] > 0]
    return min(ids, key=lambda v: (-(math.log(weights[v]) + noise[v]), v)) if ids else NO_TOKEN


def golden(a: Any, n: int) -> None:
    """Draw row by row; a row's distribution is filed behind those of the drafts that its slot has."""
    for r in range(n):
        slot = a.row_slot[r]
        a.tokens[r] = NO_TOKEN
        if slot >= 0:
            a.tokens[r] = drawn(a.probs[r], a.noise[r])
            a.draft_probs[slot, a.draft_len[slot]] = a.probs[r]


def landmarks(vocab: int) -> list[int]:
    """Ten tokens from the first to the last of a vocabulary; those of a vocabulary of ten."""
    return [int(token) for token in np.linspace(0, vocab - 1, 10)]


def distribution(rng: np.random.Generator, vocab: int) -> Array:
    """A random distribution, float32, of which about a third is 0. In a vocabulary as large as those of models nearly all of it
    lies on a few tokens, those of `landmarks` among them."""
    weights = np.exp(rng.normal(0, 1.5, vocab)) * (rng.random(vocab) < 0.7)
    if vocab > MANY_TOKENS:
        heavy = [*landmarks(vocab), *rng.integers(0, vocab, 14).tolist()]
        weights[heavy] += 2.0**20 * rng.random(len(heavy))
    weights[rng.integers(vocab)] += 1.0
    return np.asarray(weights / weights.sum(), np.float32)


def clear(weights: Array, noise: Array) -> bool:
    """Whether no float32 error can change what is drawn."""
    wide = np.asarray(weights, np.float64)
    sums = np.sort(np.log(wide[wide > 0]) + np.asarray(noise, np.float64)[wide > 0])
    return bool(np.diff(sums[-2:]).min(initial=np.inf) > 1e-3)


def _case(
    name: str, rows: Sequence[tuple[int, Array, Array]], draft_len: Sequence[int], n: int | None = None, *, num_drafts: int = 3
) -> Case:
    """Rows are (slot, probabilities, noise)."""
    row_slot, probs, noise = ([row[i] for row in rows] for i in range(3))
    arrays = {"probs": np.array(probs, np.float32), "noise": np.array(noise, np.float32)}
    arrays |= {"row_slot": np.array(row_slot, np.int32), "draft_len": np.array(draft_len, np.int32)}
    shape = len(draft_len), num_drafts, len(rows[0][1])
    arrays["draft_probs"] = np.random.default_rng(34).random(shape, np.float32)
    return Case(name, arrays, {}, len(rows) if n is None else n, {"tokens": ((len(rows),), "i32")})


def _rows(slots: Sequence[int], vocab: int = 6, seed: int = 35) -> list[tuple[int, Array, Array]]:
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, Array, Array]] = []
    while len(rows) < len(slots):
        probs, noise = distribution(rng, vocab), rng.gumbel(size=vocab).astype(np.float32)
        if clear(probs, noise):
            rows.append((slots[len(rows)], probs, noise))
    return rows


def cases() -> Iterator[Case]:
    """Named cases of `draw_draft`."""
    yield _case("each_slot_files_behind_what_it_has", _rows([2, 0, 3]), [1, 0, 2, 0], 3)
    yield _case("sequences_that_are_done", _rows([-1, 2, -1, 0]), [1, 0, 1], 4)
    yield _case("beyond_the_launch_length", _rows([1, 0, 2]), [0, 1, 2], 2)
    zeros = np.zeros(4)
    ties = [(0, np.array([0.25, 0.25, 0.25, 0.25]), zeros), (1, np.array([0, 0.5, 0.0, 0.5]), zeros)]
    yield _case("lowest_id_of_equals", ties, [0, 0])
    favoured = np.array([99.0, 0.0, 99.0, 0.0])
    yield _case("noise_does_not_raise_the_impossible", [(0, np.array([0, 0.5, 0, 0.5]), np.array([99, 0, 99, 1]))], [2])
    halves, tenths = np.array([0.5, 0.25, 0.25, 0]), np.array([0.9, 0.1, 0, 0])
    weighed = [(0, halves, np.array([0, 0.69, 0.72, 0])), (1, tenths, np.array([0, 3, 0, 3]))]
    yield _case("noise_and_probability_weigh_alike", weighed, [0, 1])
    yield _case("certain_draft", [(0, np.array([0, 0, 1, 0]), zeros), (1, np.array([1, 0, 0, 0]), favoured[::-1])], [0, 1])
    yield _case("nothing_can_be_drawn", [(0, zeros, favoured), (1, np.array([0, 1, 0, 0]), favoured)], [1, 1])
    yield _case("one_draft_a_round", _rows([1, 0]), [0, 0], 2, num_drafts=1)
    yield _case("nothing_to_do", _rows([1, 0]), [0, 0], 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random distributions for slots in random order, some rows without a slot."""
    size, num_drafts, vocab = (int(v) for v in rng.integers((1, 1, 2), (6, 4, 12)))
    size, num_drafts, vocab = fitted(sizes, B=several(sizes, size), K=num_drafts, V=vocab)
    slots = [int(slot) if rng.random() < 0.8 else -1 for slot in rng.permutation(size)]
    rows = _rows(slots, vocab, seed=int(rng.integers(2**31)))
    draft_len = [int(v) for v in rng.integers(num_drafts // 2 if "K" in sizes else 0, num_drafts, size)]
    return _case("random", rows, draft_len, launched(rng, sizes, size), num_drafts=num_drafts)


CONTRACT = REGISTRY.add(
    Contract(
        name="draw_draft",
        version=1,
        unit="any",
        args=DrawDraftV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Draw a draft with Gumbel noise and keep the distribution that it was drawn from.",
        source="Gumbel-max: Maddison et al. 2014; draft probabilities: Leviathan et al. 2023; Chen et al. 2023.",
        feature="rejection",
        grows={"B": SLOTS, "K": DRAFTS, "V": VOCABULARY},
    )
)
