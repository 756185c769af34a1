"""Defines `pack_logit_rows`: which packed rows need logits, and what position each of them decides.

The runner launches it after `pack_rows`, before the target's head. It never selects a row whose choice is already known:
prompt rows before the last one, and the last row of a resumed request, whose next token is forced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.kernels.pack_rows import SCENES
from polydraft.contracts.scenes import random_scene
from polydraft.contracts.sizes import SLOTS, SMALL, Sizes
from polydraft.device import Buffer
from polydraft.sentinels import NO_ROW, PAD_SLOT, Phase


class PackLogitRowsV1(Args):
    """Buffers of `pack_logit_rows`. Launch length: logit rows, at least as many as the sequences have together.

    `logit_start` is the sum of all `logit_len` before, also for sequences without logits and those past the end, so that
    all B entries of both are written whatever the launch length.
    """

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    phase: Buffer = tensor("B", "i32", "`Phase` by slot.")
    kv_len: Buffer = tensor("B", "i32", "Committed rows of the target's cache, by slot.")
    prefill_len: Buffer = tensor("B", "i32", "Tokens to prefill before decoding, by slot.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far, by slot.")
    seq_start: Buffer = tensor("B", "i32", "First packed row of each sequence.")
    seq_len: Buffer = tensor("B", "i32", "Packed rows of each sequence.")
    logit_row: Buffer = tensor("NL", "i32", "Packed row of each logit row.", access="out", pad=NO_ROW)
    logit_slot: Buffer = tensor("NL", "i32", "Slot of each logit row.", access="out", pad=PAD_SLOT)
    logit_position: Buffer = tensor(
        "NL", "i32", "Absolute position of the token each row chooses: that of the row plus 1.", access="out", pad=0
    )
    logit_start: Buffer = tensor("B", "i32", "First logit row of each sequence; all B entries are written.", access="out")
    logit_len: Buffer = tensor("B", "i32", "Logit rows of each sequence; all B entries are written.", access="out")


def golden(a: Any, n: int) -> None:
    """A decode sequence needs all its rows, a prefill that becomes complete its last one, others none."""
    a.logit_row[:n], a.logit_slot[:n], a.logit_position[:n] = NO_ROW, PAD_SLOT, 0
    place = 0
    for i, slot in enumerate(a.slot_order):
        length, first = 0, 0
        if slot >= 0 and a.phase[slot] == Phase.DECODE:
            length = a.seq_len[i]
        elif slot >= 0 and a.phase[slot] == Phase.PREFILL and a.seq_len[i] > 0:
            completes = a.kv_len[slot] + a.seq_len[i] == a.prefill_len[slot]
            fresh = a.prefill_len[slot] == a.prompt_len[slot] + a.num_generated[slot]
            length, first = int(completes and fresh), a.seq_len[i] - 1
        a.logit_start[i], a.logit_len[i] = place, length
        for j in range(first, first + length):
            a.logit_row[place], a.logit_slot[place] = a.seq_start[i] + j, slot
            a.logit_position[place] = a.kv_len[slot] + j + 1
            place += 1


def cases() -> Iterator[Case]:
    """Named cases of `pack_logit_rows`."""
    for name, scene in SCENES.items():
        yield scene.case(name, PackLogitRowsV1, "logit_rows")


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """A random scene."""
    return random_scene(rng, sizes).case("random", PackLogitRowsV1, "logit_rows")


CONTRACT = REGISTRY.add(
    Contract(
        name="pack_logit_rows",
        version=1,
        unit="logit_rows",
        args=PackLogitRowsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Select the rows that need logits, and the position each of them decides.",
        source="FastDeploy speculate_pre_process (output rows) and gather_next_token.",
        equivalent_mutants={
            "unpad(slot_order)": "a sequence past the end has no rows",
            "swap(prompt_len,num_generated)": "only their sum is used",
            "swap(prefill_len,prompt_len)": "they differ for resumed requests alone, which have no logits either way",
        },
        feature="dense",
        grows={"B": SLOTS},
    )
)
