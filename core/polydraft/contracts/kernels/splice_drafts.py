"""Defines `splice_drafts`: drafts that were found elsewhere take the place of those that a model made, or follow them.

A proposer with a model and a lookup launches it behind the model's passes. It never runs a model, and leaves slots alone that do
not draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.sizes import DRAFTS, SLOTS, SMALL, Sizes, fitted
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT


class SpliceDraftsV1(Args):
    """Arguments of `splice_drafts`. Launch length: sequences. With `same` the leading drafts of a slot that are also the found
    ones in their places, the found ones become its drafts if same is at least `agree` and less than `found_len`."""

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    draft_budget: Buffer = tensor("B", "i32", "Drafts it may make, by sequence; not above 0: it does not draft.")
    agree: Buffer = tensor("B", "i32", "Leading drafts that the found ones have to agree with, by sequence; 0: none.")
    found: Buffer = tensor("B K", "i32", "Drafts that were found, by slot; places at or beyond found_len hold anything.")
    found_len: Buffer = tensor("B", "i32", "How many were found, by slot.")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot; NO_TOKEN at and beyond draft_len.", access="inout")
    draft_len: Buffer = tensor("B", "i32", "Drafts by slot.", access="inout")
    kept_drafts: Buffer = tensor("B", "i32", "Leading drafts that were there before, by slot.", access="inout")
    draft_logprobs: Buffer | None = tensor(
        "B K", "f32", "Log probability of each draft; 0 where one is drafted that was found.", access="inout", optional=True
    )


def golden(a: Any, n: int) -> None:
    """Compare from the first draft on, then take all that was found or nothing."""
    for i in range(n):
        slot = a.slot_order[i]
        if slot < 0 or a.draft_budget[i] <= 0:
            continue
        drafts = [int(token) for token in a.drafts[slot, : a.draft_len[slot]]]
        found = [int(token) for token in a.found[slot, : a.found_len[slot]]]
        same = 0
        while same < min(len(drafts), len(found)) and drafts[same] == found[same]:
            same += 1
        taken = a.agree[i] <= same < len(found)
        if taken:
            for j in range(a.drafts.shape[1]):
                a.drafts[slot, j] = found[j] if j < len(found) else NO_TOKEN
                if a.draft_logprobs is not None and same <= j < len(found):
                    a.draft_logprobs[slot, j] = 0.0
            a.draft_len[slot] = len(found)
        a.kept_drafts[slot] = same if taken else len(drafts)


@dataclass(frozen=True)
class Slot:
    """One slot of a case: its drafts, those that were found, and how many of the former have to agree."""

    drafts: tuple[int, ...]
    found: tuple[int, ...]
    agree: int = 0
    budget: int = 4


def _case(
    name: str, slots: Sequence[Slot], *, order: Sequence[int] | None = None, n: int | None = None, width: int = 4,
    logprobs: bool = False,
) -> Case:  # fmt: skip
    order = list(range(len(slots))) if order is None else list(order)
    slots = [*slots, *[Slot((), (), budget=0)] * (len(order) - len(slots))]  # as many slots as sequences
    order += [PAD_SLOT] * (len(slots) - len(order))
    drafts, found = np.full((len(slots), width), NO_TOKEN, np.int32), np.full((len(slots), width), 7, np.int32)
    for slot, one in enumerate(slots):
        drafts[slot, : len(one.drafts)], found[slot, : len(one.found)] = one.drafts, one.found
    by_sequence = [slots[slot] if slot >= 0 else Slot((), ()) for slot in order]
    arrays = {
        "slot_order": order,
        "draft_budget": [one.budget for one in by_sequence],
        "agree": [one.agree for one in by_sequence],
        "found_len": [len(one.found) for one in slots],
        "draft_len": [len(one.drafts) for one in slots],
        "kept_drafts": [50 + slot for slot in range(len(slots))],
    }
    every: dict[str, Any] = {key: np.array(value, np.int32) for key, value in arrays.items()}
    drawn = -1 - np.arange(drafts.size, dtype=np.float32).reshape(drafts.shape) if logprobs else None
    every |= {"drafts": drafts, "found": found, "draft_logprobs": drawn}
    return Case(name, every, {}, len(order) if n is None else n)


def cases() -> Iterator[Case]:
    """Named cases of `splice_drafts`."""
    yield _case("nothing_to_do", [Slot((1,), (2, 3))], n=0)
    yield _case("a_tail_behind_drafts_that_agree", [Slot((1, 2), (1, 2, 3, 4), 2), Slot((5,), (5, 6), 1)])
    yield _case("fewer_agree_than_have_to", [Slot((1, 2), (1, 9, 3, 4), 2), Slot((5, 6), (6, 6, 7), 1)])
    yield _case("another_tail_than_the_model_s", [Slot((1, 2, 3, 4), (1, 2, 9, 8), 2), Slot((1, 2, 3), (1, 9, 9, 8), 1)])
    yield _case("none_has_to_agree", [Slot((1, 2, 3), (9, 8, 7, 6)), Slot((1, 2, 3), (1, 2, 7))])
    yield _case("fewer_were_found_than_drafted", [Slot((1, 2, 3, 4), (9, 8)), Slot((1, 2, 3), (1, 9), 1)])
    yield _case(
        "what_was_found_is_drafted_already", [Slot((1, 2, 3), (1, 2), 1), Slot((1, 2, 3), (1, 2, 3)), Slot((4,), (4,), 1)]
    )
    yield _case("nothing_was_found", [Slot((1, 2, 3), ()), Slot((1,), (), 1)])
    yield _case("nothing_was_drafted", [Slot((), (4, 5, 6)), Slot((), (4, 5), 1)])
    yield _case("more_have_to_agree_than_there_are", [Slot((1, 2), (1, 2, 3, 4), 3), Slot((1, 2), (1, 2, 3, 4), 99)])
    yield _case("one_does_not_draft", [Slot((1, 2), (1, 2, 3), budget=0), Slot((1, 2), (1, 2, 3), budget=1)])
    yield _case(
        "log_probabilities", [Slot((1, 2, 3), (1, 9, 8), 1), Slot((1, 2, 3), (9, 8), 1), Slot((1,), (2, 4))], logprobs=True
    )
    yield _case("all_places", [Slot((1, 2, 3, 4), (1, 2, 3, 5), 3), Slot((1, 2, 3, 4), (5, 6, 7, 8))])
    yield _case("one_place", [Slot((1,), (2,)), Slot((1,), (2,), 1), Slot((), (2,))], width=1)
    yield _case(
        "another_order_than_slots",
        [Slot((1, 2), (1, 2, 3), 2), Slot((4, 5), (4, 6, 7), 2), Slot((8,), (9, 9, 9)), Slot((3, 3), (3, 3, 3), 1)],
        order=[2, PAD_SLOT, 1, 0, PAD_SLOT, 3],
        n=5,
    )


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random drafts over few tokens, and found ones that agree at first; launch order shuffled."""
    width, count = fitted(sizes, K=4, B=int(rng.integers(1, 6)) + 1)
    slots = []
    for i in range(count - 1):
        whole = bool(sizes) and i in (0, count - 2)
        text = tuple(int(t) for t in rng.integers(0, 200_000 if whole else 3, width))
        drafted, right = int(rng.integers(0, width + 1)), int(rng.integers(0, width + 1))
        size = width if whole else int(rng.integers(0, width + 1))
        found = tuple(token if place < right else token + 1 for place, token in enumerate(text))[:size]
        agree, budget = int(rng.integers(0, width + 2)), int(rng.integers(0, width + 1))
        if whole:  # what was found for all places is taken, behind all drafts but the last
            drafted, agree, budget = width - 1, min(right, width - 1), width
        slots.append(Slot(text[:drafted], found, agree, budget))
    order = [int(slot) for slot in rng.permutation(len(slots))] + [PAD_SLOT]
    return _case(
        "random", slots, order=order, n=len(slots) + int(rng.integers(0, 2)), width=width, logprobs=bool(rng.integers(2))
    )


CONTRACT = REGISTRY.add(
    Contract(
        name="splice_drafts",
        version=1,
        unit="seqs",
        args=SpliceDraftsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Draft what was found, where enough of the model's own drafts agree with it.",
        source="Own; SGLang #36783 appends what a lookup found where it agrees with the model's drafts.",
        equivalent_mutants={"unpad(drafts)": "places at or beyond draft_len are not looked at"},
        feature="drafting",
        grows={"B": SLOTS, "K": DRAFTS},
    )
)
