"""Defines `reserve_blocks`: pauses slots whose next window is not covered by granted blocks, and wakes those that are again.

The runner launches it before the rows of a step are packed, when all staged grants are in. It never allocates:
grants come from the host, by `scatter`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, param, tensor
from polydraft.contracts.scenes import Scene, Slot, random_scene
from polydraft.contracts.sizes import BLOCKS, SLOTS, SMALL, Sizes
from polydraft.device import Buffer
from polydraft.sentinels import Phase


class ReserveBlocksV1(Args):
    """Buffers and parameters of `reserve_blocks`. Launch length: sequences.

    `max_total` of a scheduled slot is at most `MB * block_size`.
    """

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    phase: Buffer = tensor("B", "i32", "`Phase` by slot; only DECODE and PAUSED are read and written.", access="inout")
    kv_len: Buffer = tensor("B", "i32", "Committed rows of the target's cache, by slot.")
    draft_len: Buffer = tensor("B", "i32", "Drafts waiting, by slot.")
    max_total: Buffer = tensor("B", "i32", "Prompt and generated tokens allowed, by slot.")
    block_table: Buffer = tensor("B MB", "i32", "Granted blocks by slot, NO_BLOCK where there is none.")
    block_size: int = param("Tokens of a block.")
    lookahead: int = param("Tokens wanted beyond the window (rows that the draft's passes write).")


def golden(a: Any, n: int) -> None:
    """A window needs its own rows and `lookahead` more, yet never more than the request may still hold."""
    for slot in a.slot_order[:n]:
        if slot < 0 or a.phase[slot] not in (Phase.DECODE, Phase.PAUSED):
            continue
        need = min(a.kv_len[slot] + 1 + a.draft_len[slot] + a.lookahead, a.max_total[slot])
        num_blocks = -(-need // a.block_size)
        covered = all(a.block_table[slot, index] >= 0 for index in range(num_blocks))
        a.phase[slot] = Phase.DECODE if covered else Phase.PAUSED


SCENES = {
    # Blocks of 4, 2 tokens of lookahead: 6 known tokens and 1 draft want 5 + 1 + 1 + 2 = 9 tokens.
    "one_token_more_than_two_blocks": Scene(slots=(Slot(drafts=(1,), granted=2), Slot(drafts=(1,), granted=3)), order=(0, 1)),
    "exactly_two_blocks": Scene(slots=(Slot(granted=1), Slot(granted=2)), order=(1, 0)),
    "one_token_less_than_two_blocks": Scene(slots=(Slot(generated=1, granted=1), Slot(generated=1, granted=2)), order=(0, 1)),
    "request_ends_before_the_lookahead": Scene(
        slots=(Slot(drafts=(1, 2), room=2, granted=2), Slot(drafts=(1, 2), room=3, granted=2)), order=(0, 1)
    ),
    "paused_slot_wakes_and_another_stays": Scene(
        slots=(Slot(phase=Phase.PAUSED, drafts=(1,)), Slot(phase=Phase.PAUSED, drafts=(1,), granted=2)), order=(1, 0)
    ),
    "hole_before_granted_blocks": Scene(slots=(Slot(hole=1), Slot(hole=2), Slot(hole=0)), order=(0, 1, 2)),
    "other_phases_stay": Scene(
        slots=(
            Slot(phase=Phase.PREFILL, granted=0),
            Slot(phase=Phase.FINISHED, granted=0),
            Slot(phase=Phase.IDLE),
            Slot(granted=0),
            Slot(phase=Phase.PREFILL),
        ),
        order=(1, 4, 0, 3, 2),
    ),
    "order_shorter_than_the_batch": Scene(slots=(Slot(granted=0), Slot(), Slot(granted=0)), order=(0,), pads=1),
    "beyond_the_launch_length": Scene(slots=(Slot(granted=0), Slot(granted=0)), order=(1, 0), length=1),
    "empty_batch": Scene(slots=(Slot(granted=0), Slot(granted=0)), order=(), pads=1),
    "no_sequences": Scene(slots=(Slot(granted=0),), order=()),
    "blocks_of_one_token": Scene(slots=(Slot(granted=8), Slot(granted=7)), order=(0, 1), block_size=1),
    "no_lookahead": Scene(slots=(Slot(drafts=(1, 2), granted=2), Slot(drafts=(1, 2, 3), granted=2)), order=(0, 1), lookahead=0),
}


def cases() -> Iterator[Case]:
    """Named cases of `reserve_blocks`."""
    for name, scene in SCENES.items():
        yield scene.case(name, ReserveBlocksV1)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """A random scene."""
    return random_scene(rng, sizes).case("random", ReserveBlocksV1)


CONTRACT = REGISTRY.add(
    Contract(
        name="reserve_blocks",
        version=1,
        unit="seqs",
        args=ReserveBlocksV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Pause decoding slots that lack blocks for their next window; wake those that have them again.",
        source="FastDeploy speculate_schedule_cache and recover_decode_task, as one function of the block table.",
        equivalent_mutants={
            "plus(block_table)": "only whether a block is granted matters, not which",
            "swap(kv_len,draft_len)": "only their sum is used",
            "reverse(slot_order)": "slots do not depend on each other",
        },
        constraints=("block_size >= 1", "lookahead >= 0"),
        feature="dense",
        grows={"B": SLOTS, "MB": BLOCKS},
    )
)
