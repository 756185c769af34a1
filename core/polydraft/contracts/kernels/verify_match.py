"""Defines `verify_match`: accept the drafts that equal the target's choices, up to the first one that differs.

The runner launches it after the target has chosen a token in each logit row (greedy, or sampled with the coupled noise of the
position). It does not change slot state; `commit_window` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.scenes import Scene, Slot, random_scene
from polydraft.contracts.sizes import DRAFTS, SLOTS, SMALL, Sizes
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, Phase


class VerifyMatchV1(Args):
    """Buffers of `verify_match`. Launch length: sequences.

    Outputs are indexed by sequence. A decode sequence with `logit_len` rows has `logit_len - 1` drafts in this launch. Its window
    is the accepted drafts and the target's choice after them. `drafted` is -1 for a sequence that verified no window
    (prefill, finished, paused).
    """

    choices: Buffer = tensor("NL", "i32", "Token that the target chose in each logit row; NO_TOKEN: none could be chosen.")
    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT after the end of the launch order.")
    phase: Buffer = tensor("B", "i32", "`Phase` by slot, as it was when the rows were packed.")
    logit_start: Buffer = tensor("B", "i32", "First logit row of each sequence.")
    logit_len: Buffer = tensor("B", "i32", "Logit rows of each sequence.")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot, as they were when the rows were packed.")
    window: Buffer = tensor("B W", "i32", "Tokens of the window, then NO_TOKEN.", access="out", pad=NO_TOKEN)
    window_len: Buffer = tensor("B", "i32", "Tokens in the window: accepted + 1; 0 without logit rows.", access="out", pad=0)
    accepted: Buffer = tensor("B", "i32", "Number of accepted drafts.", access="out", pad=0)
    drafted: Buffer = tensor("B", "i32", "Number of drafts verified in this round; -1: no decode round.", access="out", pad=-1)


def golden(a: Any, n: int) -> None:
    """Walk each window until a draft differs."""
    for i, slot in enumerate(a.slot_order[:n]):
        a.window[i], a.window_len[i], a.accepted[i], a.drafted[i] = NO_TOKEN, 0, 0, -1
        if slot < 0 or a.logit_len[i] == 0:
            continue
        choices = a.choices[a.logit_start[i] : a.logit_start[i] + a.logit_len[i]]
        accepted = 0
        if a.phase[slot] == Phase.DECODE:
            a.drafted[i] = a.logit_len[i] - 1
            while accepted < a.drafted[i] and choices[accepted] == a.drafts[slot, accepted]:
                accepted += 1
        a.accepted[i], a.window_len[i] = accepted, accepted + 1
        a.window[i, : accepted + 1] = choices[: accepted + 1]


SCENES = {  # shared with commit_window
    "no_draft_accepted": Scene(slots=(Slot(drafts=(1, 2, 3), choices=(9, 2, 3, 4)), Slot()), order=(0, 1)),
    "all_drafts_accepted": Scene(slots=(Slot(drafts=(1, 2, 3), choices=(1, 2, 3, 4)), Slot()), order=(0, 1)),
    "agreement_after_a_disagreement_counts_for_nothing": Scene(
        slots=(Slot(drafts=(1, 2, 3), choices=(1, 9, 3, 4)), Slot(drafts=(5, 6), choices=(9, 6, 7))), order=(1, 0)
    ),
    "window_ends_where_the_next_one_agrees": Scene(
        slots=(Slot(drafts=(1, 2), choices=(1, 7), planned=2), Slot(drafts=(2, 3), choices=(2, 3, 4))), order=(0, 1)
    ),
    "dropped_draft_equals_the_next_choice": Scene(
        slots=(Slot(drafts=(1, 2, 3), choices=(1, 2), planned=2), Slot(drafts=(3,), choices=(3, 4))), order=(0, 1)
    ),
    "fewer_drafts_than_places": Scene(slots=(Slot(drafts=(1,), choices=(1, 5)), Slot(choices=(6,))), order=(0, 1)),
    "first_token_of_a_prompt": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=4, generated=0, choices=(5,)), Slot(drafts=(1,), choices=(1, 2))),
        order=(0, 1),
    ),
    "chunk_of_a_prompt": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=6, generated=0, kv=1, planned=3), Slot(drafts=(1,), choices=(1, 2))),
        order=(0, 1),
    ),
    "resumed_prefill_completes": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=3, generated=3), Slot(drafts=(1,), choices=(2, 2))), order=(1, 0)
    ),
    "chunk_of_a_resumed_request": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=3, generated=3, kv=1, planned=2), Slot(choices=(2,))), order=(0, 1)
    ),
    "all_phases_in_another_order_than_slots": Scene(
        slots=(
            Slot(phase=Phase.PREFILL, prompt=5, generated=0, kv=1, planned=2),
            Slot(drafts=(1, 2), choices=(1, 2, 3)),
            Slot(phase=Phase.FINISHED, drafts=(3,)),
            Slot(phase=Phase.PREFILL, prompt=3, generated=0, choices=(1,)),
            Slot(phase=Phase.PAUSED, drafts=(4,)),
            Slot(phase=Phase.IDLE, drafts=(5,)),
            Slot(prompt=2, generated=5, drafts=(6,), choices=(2, 1)),
        ),
        order=(6, 2, 3, 5, 1, 4, 0),
    ),
    "finished_slot_between_running_ones": Scene(
        slots=(
            Slot(drafts=(1,), choices=(1, 2)),
            Slot(phase=Phase.FINISHED, drafts=(3,)),
            Slot(drafts=(3,), choices=(3, 4)),
        ),
        order=(0, 1, 2),
    ),
    "stop_token_first": Scene(slots=(Slot(drafts=(1, 2, 3), choices=(1, 2, 3, 4), stop=(1,)), Slot(stop=(8, 9))), order=(0, 1)),
    "stop_token_second": Scene(slots=(Slot(drafts=(1, 2, 3), choices=(1, 2, 3, 4), stop=(8, 2)), Slot(stop=(1,))), order=(0, 1)),
    "stop_token_last_draft": Scene(slots=(Slot(drafts=(1, 2, 3), choices=(1, 2, 3, 4), stop=(3,)), Slot()), order=(0, 1)),
    "stop_token_is_the_targets": Scene(slots=(Slot(drafts=(1, 2, 3), choices=(1, 2, 3, 4), stop=(4,)), Slot()), order=(1, 0)),
    "stop_token_beyond_the_window": Scene(slots=(Slot(drafts=(1, 2), choices=(7, 2, 3), stop=(2,)), Slot()), order=(0, 1)),
    "stop_tokens_of_another_slot": Scene(
        slots=(Slot(choices=(5,), stop=(6,)), Slot(choices=(6,), stop=(5,)), Slot(choices=(5,), stop=(7, 5))),
        order=(2, 0, 1),
    ),
    "two_stop_tokens_in_a_window": Scene(
        slots=(Slot(drafts=(1, 2, 3), choices=(1, 2, 3, 4), stop=(3, 2)), Slot(stop=(1,))), order=(0, 1)
    ),
    "first_token_stops": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=2, generated=0, choices=(5,), stop=(5,)), Slot()), order=(0, 1)
    ),
    "full_inside_the_window": Scene(slots=(Slot(drafts=(1, 2, 3), choices=(1, 2, 3, 4), room=2), Slot(room=1)), order=(0, 1)),
    "full_at_the_end_of_the_window": Scene(
        slots=(Slot(drafts=(1, 2), choices=(1, 2, 3), room=3), Slot(drafts=(1, 2), choices=(1, 2, 3), room=4)),
        order=(0, 1),
    ),
    "stop_token_and_full_at_once": Scene(slots=(Slot(drafts=(1,), choices=(1, 2), room=2, stop=(2,)), Slot()), order=(0, 1)),
    "first_token_fills_the_request": Scene(
        slots=(
            Slot(phase=Phase.PREFILL, prompt=2, generated=0, room=1),
            Slot(phase=Phase.PREFILL, generated=0, room=2),
        ),
        order=(0, 1),
    ),
    "nan_in_the_first_row": Scene(slots=(Slot(drafts=(1, 2), choices=(NO_TOKEN, 2, 3)), Slot()), order=(0, 1)),
    "nan_after_an_accepted_draft": Scene(slots=(Slot(drafts=(1, 2), choices=(1, NO_TOKEN, 3)), Slot()), order=(1, 0)),
    "nan_after_a_stop_token": Scene(slots=(Slot(drafts=(1, 2), choices=(1, NO_TOKEN, 3), stop=(1,)), Slot()), order=(0, 1)),
    "nan_behind_the_last_token_allowed": Scene(slots=(Slot(drafts=(1,), choices=(1, NO_TOKEN), room=1), Slot()), order=(0, 1)),
    "nan_in_a_prefill": Scene(
        slots=(Slot(phase=Phase.PREFILL, generated=0, choices=(NO_TOKEN,)), Slot(stop=(3,), choices=(NO_TOKEN,))),
        order=(0, 1),
    ),
    "one_draft_a_round": Scene(slots=(Slot(drafts=(1,), choices=(1, 2)), Slot(choices=(3,))), order=(0, 1), num_drafts=1),
    "sequence_without_planned_rows": Scene(slots=(Slot(drafts=(1,), planned=0), Slot(choices=(3,))), order=(0, 1)),
    "order_shorter_than_the_batch": Scene(slots=(Slot(), Slot(drafts=(1,), choices=(1, 2)), Slot()), order=(1,), pads=1),
    "beyond_the_launch_length": Scene(slots=(Slot(choices=(1,)), Slot(choices=(2,))), order=(1, 0), length=1),
    "aborted_and_failed_in_the_prompt": Scene(
        slots=(
            Slot(phase=Phase.IDLE, prompt=5, generated=0, kv=2),
            Slot(phase=Phase.FINISHED, prompt=5, generated=0, kv=3),
            Slot(phase=Phase.FINISHED, prompt=3, generated=0, kv=3),
            Slot(drafts=(1,), choices=(1, 2)),
        ),
        order=(1, 0, 3, 2),
    ),
    "prefill_with_nothing_left_to_do": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=3, generated=0, kv=3), Slot(drafts=(1,))), order=(1, 0)
    ),
    "prefill_with_nothing_left_and_not_scheduled": Scene(
        slots=(Slot(drafts=(1,)), Slot(phase=Phase.PREFILL, prompt=3, generated=0, kv=3)), order=(0,), pads=1
    ),
    "empty_batch": Scene(slots=(Slot(), Slot()), order=(), pads=2),
    "no_sequences": Scene(slots=(Slot(), Slot()), order=()),
}


def cases() -> Iterator[Case]:
    """Named cases of `verify_match`."""
    for name, scene in SCENES.items():
        yield scene.case(name, VerifyMatchV1)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """A random scene."""
    return random_scene(rng, sizes).case("random", VerifyMatchV1)


CONTRACT = REGISTRY.add(
    Contract(
        name="verify_match",
        version=1,
        unit="seqs",
        args=VerifyMatchV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Accept the drafts that equal the target's choices, and add the target's next choice.",
        source="Greedy verification of speculative decoding: Stern et al. 2018; Leviathan et al. 2023.",
        equivalent_mutants={
            "unpad(slot_order)": "a sequence past the end has no logit rows",
            "unpad(drafts)": "drafts below draft_len are tokens, the rest are not read",
        },
        constraints=("W == K + 1",),
        feature="dense",
        compute=True,
        grows={"B": SLOTS, "K": DRAFTS},
    )
)
