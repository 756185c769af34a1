"""Defines `commit_window`: the one place where tokens become history, lengths grow and requests end.

The runner launches it after verification, once a step. It never writes a cache and never rolls anything back: rows of
rejected drafts lie at `kv_len` and beyond, and are overwritten before they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.kernels.verify_match import SCENES
from polydraft.contracts.scenes import random_scene
from polydraft.contracts.sizes import CONTEXT, SLOTS, SMALL, TABLE, WINDOW, Sizes
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, Finish, Phase


class CommitWindowV1(Args):
    """Buffers of `commit_window`. Launch length: sequences.

    A sequence without rows changes nothing. Scheduled slots with rows are in phase PREFILL or DECODE and have `finish`
    NONE; `known = prompt_len + num_generated` is below `max_total`, which is at most L. The `out_*` arrays are by sequence
    index and written for every sequence below the launch length.
    """

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    seq_len: Buffer = tensor("B", "i32", "Packed rows of each sequence.")
    window: Buffer = tensor("B W", "i32", "Tokens to commit, by sequence.")
    window_len: Buffer = tensor("B", "i32", "Number of tokens to commit, by sequence.")
    accepted: Buffer = tensor("B", "i32", "Drafts accepted, by sequence.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    prefill_len: Buffer = tensor("B", "i32", "Tokens to prefill before decoding, by slot.")
    max_total: Buffer = tensor("B", "i32", "Prompt and generated tokens allowed, by slot.")
    stop_tokens: Buffer = tensor("B S", "i32", "Tokens that end the request, by slot; NO_TOKEN matches nothing.")
    tokens: Buffer = tensor("B L", "i32", "Token history by slot.", access="inout")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far, by slot.", access="inout")
    kv_len: Buffer = tensor("B", "i32", "Committed rows of the target's cache, by slot.", access="inout")
    phase: Buffer = tensor("B", "i32", "`Phase` by slot.", access="inout")
    finish: Buffer = tensor("B", "i32", "`Finish` by slot.", access="inout")
    out_tokens: Buffer = tensor("B W", "i32", "Tokens emitted, the rest NO_TOKEN.", access="out", pad=NO_TOKEN)
    out_len: Buffer = tensor("B", "i32", "Number of tokens emitted.", access="out", pad=0)
    out_accepted: Buffer = tensor("B", "i32", "Accepted drafts that were emitted; 0 in a prefill.", access="out", pad=0)


def golden(a: Any, n: int) -> None:
    """Advance each sequence that had rows, then commit its window unless its prefill goes on or its token is known."""
    for i, slot in enumerate(a.slot_order[:n]):
        a.out_tokens[i], a.out_len[i], a.out_accepted[i] = NO_TOKEN, 0, 0
        if slot < 0 or a.seq_len[i] == 0:
            continue
        if a.phase[slot] == Phase.PREFILL:
            a.kv_len[slot] += a.seq_len[i]
            if a.kv_len[slot] == a.prefill_len[slot]:
                _commit(a, i, slot)
        elif a.phase[slot] == Phase.DECODE:
            emitted = _commit(a, i, slot)
            a.kv_len[slot] += emitted
            a.out_accepted[i] = min(a.accepted[i], emitted)


def _commit(a: Any, i: int, slot: int) -> int:
    """Append the window token by token until one ends the request; return the number of tokens appended."""
    emitted, reason = 0, Finish.NONE
    for token in a.window[i, : a.window_len[i]]:
        if token == NO_TOKEN:
            reason = Finish.ERROR
            break
        known = a.prompt_len[slot] + a.num_generated[slot]
        a.tokens[slot, known] = token
        a.num_generated[slot] += 1
        a.out_tokens[i, emitted] = token
        emitted += 1
        if token in a.stop_tokens[slot]:
            reason = Finish.STOP
            break
        if known + 1 == a.max_total[slot]:
            reason = Finish.LENGTH
            break
    a.out_len[i] = emitted
    a.phase[slot] = Phase.DECODE if reason == Finish.NONE else Phase.FINISHED
    if reason != Finish.NONE:
        a.finish[slot] = reason
    return emitted


def cases() -> Iterator[Case]:
    """Named cases of `commit_window`."""
    for name, scene in SCENES.items():
        yield scene.case(name, CommitWindowV1)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """A random scene."""
    return random_scene(rng, sizes).case("random", CommitWindowV1)


CONTRACT = REGISTRY.add(
    Contract(
        name="commit_window",
        version=1,
        unit="seqs",
        args=CommitWindowV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Append verified windows to the history, up to a stop token, the length limit or an error.",
        source="FastDeploy unified_update_model_status.",
        equivalent_mutants={
            "unpad(slot_order)": "a sequence past the end has no rows",
        },
        feature="dense",
        compute=True,
        grows={"B": SLOTS, "W": WINDOW, "L": CONTEXT, "S": TABLE},
    )
)
