"""Defines `draft_ngram`: drafts copied from what followed the latest earlier occurrence of the text's last tokens.

The n-gram proposer launches it behind `begin_draft`. It never runs a model and leaves slots alone that do not draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, param, tensor
from polydraft.contracts.sizes import CONTEXT, DRAFTS, SLOTS, SMALL, Sizes, fitted
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT


class DraftNgramV1(Args):
    """Arguments of `draft_ngram`. Launch length: sequences. With known = prompt_len + num_generated, the longest n from
    `max_ngram` down to `min_ngram` whose last n known tokens occur earlier decides; of its occurrences the latest one."""

    draft_slot: Buffer = tensor("B", "i32", "Slot that drafts, by sequence; PAD_SLOT: this sequence does not draft.")
    draft_budget: Buffer = tensor("B", "i32", "Drafts it may make, by sequence.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far, by slot.")
    tokens: Buffer = tensor("B L", "i32", "History by slot; places at or beyond known hold anything.")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot, emptied before; the first draft_len are written.", access="inout")
    draft_len: Buffer = tensor("B", "i32", "Drafts found by slot: budget, or fewer where the text ends first.", access="inout")
    max_ngram: int = param("Longest run of tokens looked for.")
    min_ngram: int = param("Shortest run of tokens looked for, at least 1.")


def golden(a: Any, n: int) -> None:
    """Longest run first, latest place first."""
    for i in range(n):
        slot, budget = a.draft_slot[i], a.draft_budget[i]
        if slot < 0:
            continue
        known = a.prompt_len[slot] + a.num_generated[slot]
        text = [int(token) for token in a.tokens[slot, :known]]
        follows = find(text, max_ngram=a.max_ngram, min_ngram=a.min_ngram)
        found = text[follows : follows + budget] if follows else []
        for j, token in enumerate(found):
            a.drafts[slot, j] = token
        a.draft_len[slot] = len(found)


def find(text: Sequence[int], *, max_ngram: int, min_ngram: int) -> int:
    """Place of the token behind the occurrence that decides; 0 when the text's end occurs nowhere earlier."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[len(text) - size :]:
                return start + size
    return 0


@dataclass(frozen=True)
class Text:
    """One slot of a case: its known tokens, how many of them are generated, the budget, and whether it drafts."""

    known: tuple[int, ...]
    generated: int = 1
    budget: int = 3
    drafts: bool = True


def _case(
    name: str, texts: Sequence[Text], *, order: Sequence[int] | None = None, n: int | None = None, width: int = 4, **params: int
) -> Case:
    order = list(range(len(texts))) if order is None else list(order)
    texts = [*texts, *[Text((0,), drafts=False)] * (len(order) - len(texts))]  # as many slots as sequences
    order += [PAD_SLOT] * (len(texts) - len(order))
    slots, length = len(texts), max(len(t.known) for t in texts) + 2
    tokens = np.full((slots, length), 7, np.int32)  # what lies beyond the known text looks like text
    for slot, text in enumerate(texts):
        tokens[slot, : len(text.known)] = text.known
    active = [slot if slot >= 0 and texts[slot].drafts else PAD_SLOT for slot in order]
    arrays = {
        "draft_slot": active,
        "draft_budget": [texts[slot].budget if slot >= 0 else 0 for slot in active],
        "prompt_len": [len(t.known) - t.generated for t in texts],
        "num_generated": [t.generated for t in texts],
        "draft_len": [0] * slots,
    }
    return Case(
        name,
        {
            **{key: np.array(value, np.int32) for key, value in arrays.items()},
            "tokens": tokens,
            "drafts": np.full((slots, width), NO_TOKEN, np.int32),
        },
        {"max_ngram": 3, "min_ngram": 1, **params},
        len(order) if n is None else n,
    )


def cases() -> Iterator[Case]:
    """Named cases of `draft_ngram`."""
    yield _case("nothing_to_do", [Text((1, 2, 1))], n=0)
    yield _case("latest_of_two_places", [Text((1, 2, 3, 1, 2, 4, 1, 2))])
    yield _case("longer_run_beats_later_place", [Text((5, 1, 2, 9, 8, 2, 6, 6, 1, 2))])
    yield _case("text_that_overlaps_its_own_end", [Text((4, 4, 4, 4))])
    yield _case("fewer_tokens_follow_than_wanted", [Text((3, 6, 3), budget=4)])
    yield _case("budget_cuts", [Text((1, 2, 3, 4, 5, 1), budget=2), Text((1, 2, 3, 4, 5, 1), budget=1)])
    yield _case("no_earlier_place", [Text((1, 2, 3)), Text((9,), generated=0)])
    yield _case("text_beyond_the_known_is_not_text", [Text((7, 7, 3, 9)), Text((1, 7))])
    yield _case("shortest_run_is_too_long", [Text((1, 2, 9, 2)), Text((1, 2, 9, 1, 2))], min_ngram=2)
    yield _case("longest_run_is_bounded", [Text((1, 2, 3, 8, 9, 2, 3, 6, 1, 2, 3))], max_ngram=2)
    yield _case(
        "idle_sequences_between_drafting_ones",
        [Text((1, 2, 1)), Text((3, 4, 3), drafts=False), Text((5, 6, 5), generated=2), Text((8, 9, 8))],
        order=[2, PAD_SLOT, 1, 0, PAD_SLOT, 3],
        n=5,
    )


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random texts over few tokens, so that runs repeat; some slots idle, launch order shuffled."""
    width, count = fitted(sizes, K=4, B=int(rng.integers(1, 6)) + 1)
    texts = [
        Text(
            tuple(int(t) for t in rng.integers(0, 3, rng.integers(1, 14))),
            generated=0,
            budget=int(rng.integers(1, width + 1)),
            drafts=bool(rng.random() < 0.8),
        )
        for _ in range(count - 1)
    ]
    texts = [Text(t.known, int(rng.integers(0, len(t.known))), t.budget, t.drafts) for t in texts]
    if sizes:  # a long text that ends in what stands once in its first half, before drafts for all places
        long = [int(t) for t in rng.integers(0, 200_000, max(sizes.get("L", 0) - 2, 4 * width))]
        place = int(rng.integers(0, len(long) // 2))
        texts[0] = Text((*long[:-3], *long[place : place + 3]), int(rng.integers(0, len(long))), width)
    order = [int(slot) for slot in rng.permutation(len(texts))] + [PAD_SLOT]
    low = int(rng.integers(1, 3))
    n, high = len(texts) + int(rng.integers(0, 2)), low + int(rng.integers(0, 3))
    return _case("random", texts, order=order, n=n, width=width, min_ngram=low, max_ngram=high)


CONTRACT = REGISTRY.add(
    Contract(
        name="draft_ngram",
        version=1,
        unit="seqs",
        args=DraftNgramV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Draft what followed the last tokens when they occurred before.",
        source="Prompt lookup decoding (Saxena 2023); FastDeploy ngram_match.",
        equivalent_mutants={"swap(prompt_len,num_generated)": "only their sum is used"},
        constraints=("1 <= min_ngram <= max_ngram",),
        feature="drafting",
        grows={"B": SLOTS, "K": DRAFTS, "L": CONTEXT},
    )
)
