"""Defines `advance_draft`: files the draft just chosen and decides whether the sequence drafts on.

The runner launches it at the end of every draft pass. It never touches committed state: drafts are proposals until the
target has verified them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, param, tensor
from polydraft.contracts.sizes import DRAFTS, SLOTS, SMALL, Sizes, fitted, several
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT


class AdvanceDraftV1(Args):
    """Buffers and parameters of `advance_draft`. Launch length: sequences.

    Active sequences (`draft_slot >= 0`) have `pass_index < draft_budget`.
    """

    chosen: Buffer = tensor("B", "i32", "Token chosen for each sequence; NO_TOKEN: none could be chosen.")
    draft_budget: Buffer = tensor("B", "i32", "Drafts each sequence may make in this round.")
    draft_slot: Buffer = tensor("B", "i32", "Slot of each sequence that still drafts; PAD_SLOT: done.", access="inout")
    draft_position: Buffer = tensor("B", "i32", "Position of the row the next pass runs.", access="inout")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot.", access="inout")
    draft_len: Buffer = tensor("B", "i32", "Number of drafts by slot.", access="inout")
    next_ids: Buffer = tensor("B", "i32", "Token the next pass embeds.", access="out", pad=NO_TOKEN)
    pass_index: int = param("Which draft of the round was chosen, from 0.")


def golden(a: Any, n: int) -> None:
    """A sequence stops drafting when its budget is used up or no token could be chosen."""
    for i, slot in enumerate(a.draft_slot[:n]):
        a.next_ids[i] = NO_TOKEN
        if slot < 0:
            continue
        if a.chosen[i] >= 0:
            a.drafts[slot, a.pass_index] = a.chosen[i]
            a.draft_len[slot] = a.pass_index + 1
        if a.chosen[i] >= 0 and a.pass_index + 1 < a.draft_budget[i]:
            a.draft_position[i] += 1
            a.next_ids[i] = a.chosen[i]
        else:
            a.draft_slot[i] = PAD_SLOT


def _case(
    name: str, sequences: tuple[tuple[int, int, int], ...], n: int, *, pass_index: int, num_slots: int = 5, num_drafts: int = 4
) -> Case:
    """`sequences` are (slot, token chosen, budget); a slot that drafts has `pass_index` drafts already."""
    lines = np.array([*sequences, *[(PAD_SLOT, 7, 0)] * (num_slots - len(sequences))], np.int32).reshape(num_slots, 3)
    drafts = np.where(np.arange(num_drafts) < pass_index, 50 + np.arange(num_slots * num_drafts).reshape(num_slots, -1), NO_TOKEN)
    arrays = {
        "chosen": lines[:, 1].copy(),
        "draft_budget": lines[:, 2].copy(),
        "draft_slot": lines[:, 0].copy(),
        "draft_position": np.where(lines[:, 0] < 0, 0, 20 + np.arange(num_slots)).astype(np.int32),
        "drafts": drafts.astype(np.int32),
        "draft_len": np.full(num_slots, pass_index, np.int32),
    }
    return Case(name, arrays, {"pass_index": pass_index}, n, {"next_ids": ((num_slots,), "i32")})


def cases() -> Iterator[Case]:
    """Named cases of `advance_draft`."""
    yield _case("first_draft_of_several", ((3, 8, 2), (0, 9, 4), (4, 1, 3)), 3, pass_index=0)
    yield _case("budget_of_one", ((3, 8, 1), (0, 9, 2)), 3, pass_index=0)
    yield _case("budget_reached_in_a_later_pass", ((1, 8, 2), (0, 9, 3), (4, 5, 4)), 4, pass_index=1)
    yield _case("last_place", ((1, 8, 4), (2, 9, 4)), 2, pass_index=3)
    yield _case("nothing_could_be_chosen", ((1, NO_TOKEN, 3), (0, 9, 3), (2, NO_TOKEN, 1)), 3, pass_index=0)
    yield _case("nothing_could_be_chosen_later", ((1, NO_TOKEN, 3), (0, 9, 3)), 2, pass_index=1)
    yield _case("sequence_that_is_done_between_others", ((1, 8, 3), (PAD_SLOT, 6, 1), (0, 9, 3)), 3, pass_index=1)
    yield _case("token_zero_is_a_token", ((1, 0, 2), (0, 0, 1)), 2, pass_index=0)
    yield _case("whole_batch", ((4, 1, 2), (3, 2, 2), (2, 3, 2), (1, 4, 2), (0, 5, 2)), 5, pass_index=0)
    yield _case("beyond_the_launch_length", ((4, 1, 2), (3, 2, 2)), 1, pass_index=0)
    yield _case("empty_batch", (), 2, pass_index=0)
    yield _case("no_sequences", (), 0, pass_index=0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random drafting sequences in random order, some done, some without a token."""
    (num_drafts,) = fitted(sizes, K=4)
    pass_index, num_slots = int(rng.integers(num_drafts // 2 if "K" in sizes else 0, num_drafts)), int(rng.integers(1, 7))
    (num_slots,) = fitted(sizes, B=several(sizes, num_slots))
    slots = rng.permutation(num_slots)[: rng.integers(num_slots // 2 + 1 if sizes else 0, num_slots + 1)]
    sequences = tuple(
        (
            int(slot) if rng.random() < 0.8 else PAD_SLOT,
            int(rng.integers(0, 10)) if rng.random() < 0.85 else NO_TOKEN,
            int(rng.integers(pass_index + 1, num_drafts + 1)),
        )
        for slot in slots
    )
    n = int(rng.integers(len(sequences), num_slots + 1))
    return _case("random", sequences, n, pass_index=pass_index, num_slots=num_slots, num_drafts=num_drafts)


CONTRACT = REGISTRY.add(
    Contract(
        name="advance_draft",
        version=1,
        unit="seqs",
        args=AdvanceDraftV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="File the draft just chosen; go on to the next, or stop.",
        source="FastDeploy draft_model_update, with the budget decided once a round.",
        constraints=("0 <= pass_index < K",),
        feature="dense",
        grows={"B": SLOTS, "K": DRAFTS},
    )
)
