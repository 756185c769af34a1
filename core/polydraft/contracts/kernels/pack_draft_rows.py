"""Defines `pack_draft_rows`: the rows of the draft's first pass, which runs over the target's rows one token ahead.

The runner launches it after `commit_window`: row p of the draft pairs the target's hidden state at p with token p + 1. It
never keeps a row whose next token is not committed, so rejected drafts leave nothing in the draft's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.scenes import Scene, Slot, random_scene
from polydraft.contracts.sizes import CONTEXT, SLOTS, SMALL, Sizes
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT, Phase


class PackDraftRowsV1(Args):
    """Buffers of `pack_draft_rows`. Launch length: rows, the same as the target's.

    Positions are shared with the target's rows.
    """

    row_slot: Buffer = tensor("R", "i32", "Slot of each of the target's rows; PAD_SLOT: none.")
    positions: Buffer = tensor("R", "i32", "Absolute position of each of the target's rows.")
    phase: Buffer = tensor("B", "i32", "`Phase` by slot, after the commit.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far by slot, after the commit.")
    tokens: Buffer = tensor("B L", "i32", "Token history by slot.")
    draft_ids: Buffer = tensor("R", "i32", "Token each row embeds: the one after its position.", access="out", pad=NO_TOKEN)
    draft_row_slot: Buffer = tensor("R", "i32", "Slot of each row.", access="out", pad=PAD_SLOT)


def golden(a: Any, n: int) -> None:
    """Keep the rows of running slots whose next token is known."""
    for row, slot in enumerate(a.row_slot[:n]):
        a.draft_ids[row], a.draft_row_slot[row] = NO_TOKEN, PAD_SLOT
        if slot < 0 or a.phase[slot] not in (Phase.PREFILL, Phase.DECODE):
            continue
        if a.positions[row] + 1 < a.prompt_len[slot] + a.num_generated[slot]:
            a.draft_ids[row] = a.tokens[slot, a.positions[row] + 1]
            a.draft_row_slot[row] = slot


SCENES = {  # shared with begin_draft; slots are as the commit left them
    "prompt_completed": Scene(slots=(Slot(prompt=4, generated=1, ran=4, kept=4), Slot(ran=1, kept=1)), order=(0, 1)),
    "chunk_looks_one_token_into_the_next": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=6, generated=0, kv=3, ran=2, kept=2), Slot(ran=1, kept=1)), order=(1, 0)
    ),
    "resumed_prefill_completed": Scene(slots=(Slot(prompt=3, generated=3, ran=5, kept=5), Slot(ran=1, kept=1)), order=(0, 1)),
    "chunk_of_a_resumed_request": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=2, generated=4, kv=4, ran=3, kept=3), Slot(ran=1, kept=1)), order=(0, 1)
    ),
    "all_drafts_accepted": Scene(slots=(Slot(ran=4, kept=4), Slot(ran=2, kept=2, drafts=(1,))), order=(0, 1)),
    "some_drafts_rejected": Scene(slots=(Slot(ran=4, kept=2, drafts=(1, 2, 3)), Slot(ran=3, kept=1)), order=(1, 0)),
    "finished_slot_between_running_ones": Scene(
        slots=(Slot(ran=2, kept=2), Slot(phase=Phase.FINISHED, ran=3, kept=2, drafts=(4, 5)), Slot(ran=1, kept=1)),
        order=(0, 1, 2),
    ),
    "failed_slot": Scene(slots=(Slot(phase=Phase.FINISHED, ran=2, kept=0), Slot(ran=2, kept=1)), order=(0, 1)),
    "paused_and_idle_slots_keep_their_drafts": Scene(
        slots=(
            Slot(phase=Phase.PAUSED, drafts=(1, 2), ran=0),
            Slot(phase=Phase.IDLE, drafts=(3,), ran=0),
            Slot(drafts=(4, 5), ran=0),
            Slot(drafts=(6, 7), ran=3, kept=1),
        ),
        order=(2, 3, 0, 1),
    ),
    "room_for_one_draft": Scene(slots=(Slot(ran=2, kept=2, room=2), Slot(ran=1, kept=1, room=3)), order=(0, 1)),
    "room_for_no_draft": Scene(slots=(Slot(ran=2, kept=2, room=1), Slot(ran=1, kept=1, room=5)), order=(0, 1)),
    "room_for_exactly_all_drafts": Scene(slots=(Slot(ran=2, kept=2, room=4), Slot(ran=1, kept=1, room=3)), order=(1, 0)),
    "one_draft_a_round": Scene(slots=(Slot(ran=2, kept=2), Slot(ran=1, kept=1, room=1)), order=(0, 1), num_drafts=1),
    "step_of_fewer_drafts_than_places": Scene(
        slots=(Slot(ran=2, kept=2, drafts=(1, 2, 3)), Slot(ran=1, kept=1, room=2), Slot(ran=0, drafts=(4, 5, 6))),
        order=(2, 0, 1),
        step_drafts=2,
    ),
    "step_without_drafts": Scene(
        slots=(Slot(ran=2, kept=2, drafts=(1, 2, 3)), Slot(ran=0, drafts=(4, 5)), Slot(ran=1, kept=1)),
        order=(0, 1, 2),
        step_drafts=0,
    ),
    "order_shorter_than_the_batch": Scene(
        slots=(Slot(drafts=(1,), ran=1, kept=1), Slot(drafts=(2,), ran=2, kept=1), Slot(drafts=(3,), ran=1, kept=1)),
        order=(1,),
        pads=1,
    ),
    "beyond_the_launch_length": Scene(
        slots=(Slot(drafts=(1,), ran=1, kept=1), Slot(drafts=(2,), ran=1, kept=1)), order=(1, 0), length=1, tail=-1
    ),
    "empty_batch": Scene(slots=(Slot(drafts=(1,)), Slot()), order=(), pads=2, tail=2),
    "no_sequences": Scene(slots=(Slot(drafts=(1,)), Slot()), order=(), tail=0),
}


def cases() -> Iterator[Case]:
    """Named cases of `pack_draft_rows`."""
    for name, scene in SCENES.items():
        yield scene.case(name, PackDraftRowsV1, "rows")


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """A random scene."""
    return random_scene(rng, sizes, after=True).case("random", PackDraftRowsV1, "rows")


CONTRACT = REGISTRY.add(
    Contract(
        name="pack_draft_rows",
        version=1,
        unit="rows",
        args=PackDraftRowsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Shift the target's rows by one token for the draft's first pass.",
        source="DeepSeek-V3 (2024), multi-token prediction; FastDeploy draft_model_preprocess.",
        equivalent_mutants={
            "swap(prompt_len,num_generated)": "only their sum is used",
        },
        feature="dense",
        grows={"B": SLOTS, "L": CONTEXT},
    )
)
