"""Defines `pack_rows`: the rows of one target pass (tokens, slots, positions), packed from the slot state in launch order.

The runner launches it at the start of the target's part of a step. It never reads a length from the host: the plan gives
upper bounds, the slot state decides, and the tail up to the launch length is padded here and only here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.scenes import Scene, Slot, random_scene
from polydraft.contracts.sizes import CONTEXT, DRAFTS, SLOTS, SMALL, Sizes
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT, Phase


class PackRowsV1(Args):
    """Buffers of `pack_rows`. Launch length: rows, at least as many as the sequences have together.

    Sequences are packed one after the other: `seq_start` is the sum of all `seq_len` before, also for empty sequences and
    those past the end, so that all B entries of both are written whatever the launch length.
    """

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    seq_rows: Buffer = tensor("B", "i32", "Rows planned for each sequence (an upper bound); without meaning past the end.")
    phase: Buffer = tensor("B", "i32", "`Phase` by slot.")
    kv_len: Buffer = tensor("B", "i32", "Committed rows of the target's cache, by slot.")
    prefill_len: Buffer = tensor("B", "i32", "Tokens to prefill before decoding, by slot.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far, by slot.")
    tokens: Buffer = tensor("B L", "i32", "Token history by slot.")
    drafts: Buffer = tensor("B K", "i32", "Drafts waiting, by slot.")
    draft_len: Buffer = tensor("B", "i32", "Number of drafts waiting, by slot.")
    ids: Buffer = tensor("R", "i32", "Token of each row.", access="out", pad=NO_TOKEN)
    row_slot: Buffer = tensor("R", "i32", "Slot of each row.", access="out", pad=PAD_SLOT)
    positions: Buffer = tensor("R", "i32", "Absolute position of each row.", access="out", pad=0)
    seq_start: Buffer = tensor("B", "i32", "First row of each sequence; all B entries are written.", access="out")
    seq_len: Buffer = tensor("B", "i32", "Rows of each sequence; all B entries are written.", access="out")


def golden(a: Any, n: int) -> None:
    """A prefill sequence has its next prompt tokens as rows, a decode sequence its newest token and its drafts."""
    a.ids[:n], a.row_slot[:n], a.positions[:n] = NO_TOKEN, PAD_SLOT, 0
    row = 0
    for i, slot in enumerate(a.slot_order):
        length = 0
        if slot >= 0 and a.phase[slot] == Phase.PREFILL:
            length = min(a.seq_rows[i], a.prefill_len[slot] - a.kv_len[slot])
        elif slot >= 0 and a.phase[slot] == Phase.DECODE:
            length = min(a.seq_rows[i], 1 + a.draft_len[slot])
        a.seq_start[i], a.seq_len[i] = row, length
        for j in range(length):
            position = a.kv_len[slot] + j
            if a.phase[slot] == Phase.PREFILL:
                a.ids[row] = a.tokens[slot, position]
            elif j == 0:
                a.ids[row] = a.tokens[slot, a.prompt_len[slot] + a.num_generated[slot] - 1]
            else:
                a.ids[row] = a.drafts[slot, j - 1]
            a.row_slot[row], a.positions[row] = slot, position
            row += 1


SCENES = {  # shared with pack_logit_rows
    "all_phases_in_another_order_than_slots": Scene(
        slots=(
            Slot(phase=Phase.PREFILL, prompt=5, generated=0, kv=1, planned=2),
            Slot(drafts=(1, 2)),
            Slot(phase=Phase.FINISHED, drafts=(3,)),
            Slot(phase=Phase.PREFILL, prompt=3, generated=0),
            Slot(phase=Phase.PAUSED, drafts=(4,)),
            Slot(phase=Phase.IDLE, drafts=(5,)),
            Slot(prompt=2, generated=5, drafts=(6,)),
        ),
        order=(6, 2, 3, 5, 1, 4, 0),
    ),
    "order_shorter_than_the_batch": Scene(slots=(Slot(drafts=(1,)), Slot(), Slot(drafts=(2, 3))), order=(2,), pads=1),
    "finished_slot_between_running_ones": Scene(
        slots=(Slot(drafts=(1,)), Slot(phase=Phase.FINISHED, drafts=(2,)), Slot(drafts=(3, 4))), order=(0, 1, 2)
    ),
    "first_chunk_of_a_prompt": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=6, generated=0, planned=2), Slot(drafts=(1,))), order=(0, 1)
    ),
    "middle_chunk_of_a_prompt": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=6, generated=0, kv=2, planned=3), Slot(drafts=(1,))), order=(0, 1)
    ),
    "last_chunk_of_a_prompt": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=6, generated=0, kv=4, planned=2), Slot(drafts=(1,))), order=(1, 0)
    ),
    "plan_beyond_the_end_of_the_prompt": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=6, generated=0, kv=4, planned=5), Slot(drafts=(1,), planned=4)),
        order=(0, 1),
    ),
    "resumed_request_prefills_all_but_its_last_token": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=3, generated=3), Slot(phase=Phase.PREFILL, prompt=3, generated=0)),
        order=(0, 1),
    ),
    "chunk_of_a_resumed_request": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=3, generated=3, kv=2, planned=2), Slot()), order=(0, 1)
    ),
    "resumed_after_one_token": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=3, generated=1), Slot(phase=Phase.PREFILL, prompt=3, generated=0)),
        order=(0, 1),
    ),
    "prompt_of_one_token": Scene(
        slots=(Slot(phase=Phase.PREFILL, prompt=1, generated=0), Slot(prompt=1, generated=1)), order=(1, 0)
    ),
    "fewer_drafts_than_places": Scene(slots=(Slot(drafts=(1,)), Slot(), Slot(drafts=(1, 2, 3))), order=(0, 1, 2)),
    "plan_cuts_the_drafts": Scene(slots=(Slot(drafts=(1, 2, 3), planned=2), Slot(drafts=(4,), planned=1)), order=(0, 1)),
    "sequence_without_planned_rows": Scene(slots=(Slot(drafts=(1,), planned=0), Slot(drafts=(2,))), order=(0, 1)),
    "rows_fill_the_launch": Scene(slots=(Slot(drafts=(1, 2)), Slot()), order=(1, 0), tail=0),
    "rows_fill_the_buffers": Scene(slots=(Slot(drafts=(1, 2)), Slot()), order=(0, 1), tail=0, spare=0),
    "history_is_full": Scene(slots=(Slot(room=0), Slot(room=1)), order=(0, 1)),
    "one_draft_a_round": Scene(slots=(Slot(drafts=(1,)), Slot()), order=(0, 1), num_drafts=1),
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
    "empty_batch": Scene(slots=(Slot(drafts=(1,)), Slot()), order=(), tail=2),
    "no_rows": Scene(slots=(Slot(), Slot()), order=(), tail=0),
}


def cases() -> Iterator[Case]:
    """Named cases of `pack_rows`."""
    for name, scene in SCENES.items():
        yield scene.case(name, PackRowsV1, "rows")


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """A random scene."""
    return random_scene(rng, sizes).case("random", PackRowsV1, "rows")


CONTRACT = REGISTRY.add(
    Contract(
        name="pack_rows",
        version=1,
        unit="rows",
        args=PackRowsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Pack the rows of the next target pass from the slot state.",
        source="FastDeploy speculate_pre_process, with the padding written.",
        equivalent_mutants={
            "unpad(drafts)": "drafts below draft_len are tokens, the rest are not read",
            "swap(prompt_len,num_generated)": "only their sum is used",
        },
        feature="dense",
        grows={"B": SLOTS, "K": DRAFTS, "L": CONTEXT},
    )
)
