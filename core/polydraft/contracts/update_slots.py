"""Defines `update_slots`: staged whole-slot writes that admit, resume or abort requests at a step boundary.

The runner launches it first in a step that has such writes. It never touches the token history or a slot that no row
names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.layout import SLOT_UPDATE_STOP_TOKENS, SlotUpdate
from polydraft.device import Buffer
from polydraft.sentinels import NO_BLOCK, NO_TOKEN, Finish


class UpdateSlotsV1(Args):
    """Buffers of `update_slots`. Launch length: update rows."""

    updates: Buffer = tensor("U F", "i32", "One slot a row, columns `SlotUpdate`, then S stop tokens; slot < 0: no update.")
    phase: Buffer = tensor("B", "i32", "`Phase` of each slot.", access="inout")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens of each slot.", access="inout")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far.", access="inout")
    kv_len: Buffer = tensor("B", "i32", "Committed rows of the target's cache.", access="inout")
    prefill_len: Buffer = tensor("B", "i32", "Tokens to prefill before decoding.", access="inout")
    max_total: Buffer = tensor("B", "i32", "Prompt and generated tokens allowed.", access="inout")
    epoch: Buffer = tensor("B", "i32", "Count of requests the slot has served.", access="inout")
    top_k: Buffer = tensor("B", "i32", "Tokens kept when sampling; 0: all.", access="inout")
    finish: Buffer = tensor("B", "i32", "`Finish`; set to NONE.", access="inout")
    draft_len: Buffer = tensor("B", "i32", "Drafts waiting; set to 0.", access="inout")
    seed: Buffer = tensor("B 2", "u32", "Random key of the request, low word first.", access="inout")
    temperature: Buffer = tensor("B", "f32", "Sampling temperature; 0: greedy.", access="inout")
    top_p: Buffer = tensor("B", "f32", "Probability mass kept when sampling.", access="inout")
    min_p: Buffer = tensor("B", "f32", "Smallest probability kept, relative to the largest.", access="inout")
    repetition_penalty: Buffer = tensor("B", "f32", "Factor on logits of tokens in the text; 1: off.", access="inout")
    presence_penalty: Buffer = tensor("B", "f32", "Taken off tokens generated before; 0: off.", access="inout")
    frequency_penalty: Buffer = tensor("B", "f32", "Taken off for each time a token was generated; 0: off.", access="inout")
    min_tokens: Buffer = tensor("B", "i32", "Tokens to generate before a stop token may come.", access="inout")
    num_biases: Buffer = tensor("B", "i32", "Entries of the slot's table of logit biases.", access="inout")
    bad_len: Buffer = tensor("B", "i32", "Places in use of the slot's table of bad words.", access="inout")
    stop_tokens: Buffer = tensor("B S", "i32", "Tokens that end the request; NO_TOKEN in unused places.", access="inout")
    drafts: Buffer = tensor("B K", "i32", "Drafts waiting; set to NO_TOKEN.", access="inout")
    block_table: Buffer = tensor("B MB", "i32", "Granted blocks; set to NO_BLOCK.", access="inout")


INTEGERS = (
    "phase", "prompt_len", "num_generated", "kv_len", "prefill_len", "max_total", "epoch", "top_k", "min_tokens", "num_biases",
    "bad_len",
)  # fmt: skip
"""Fields copied from the column of the same name."""
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields whose column holds float32 bits."""


def golden(a: Any, n: int) -> None:
    """Overwrite every field of each named slot; at most one row names a slot."""
    for row in a.updates[:n]:
        slot = row[SlotUpdate.SLOT]
        if slot < 0:
            continue
        for name in INTEGERS:
            getattr(a, name)[slot] = row[SlotUpdate[name.upper()]]
        for name in FLOATS:
            bits = row[SlotUpdate[name.upper()]]
            getattr(a, name)[slot] = np.array([bits], np.int32).view(np.float32)[0]
        for word, column in enumerate((SlotUpdate.SEED_LOW, SlotUpdate.SEED_HIGH)):
            a.seed[slot, word] = int(row[column]) % 2**32
        a.finish[slot] = Finish.NONE
        a.draft_len[slot] = 0
        for j, token in enumerate(row[SLOT_UPDATE_STOP_TOKENS:]):
            a.stop_tokens[slot, j] = token
        for j in range(a.drafts.shape[1]):
            a.drafts[slot, j] = NO_TOKEN
        for j in range(a.block_table.shape[1]):
            a.block_table[slot, j] = NO_BLOCK


NUM_SLOTS, NUM_STOPS, NUM_DRAFTS, NUM_BLOCKS = 5, 2, 3, 4


def _update(slot: int, rng: np.random.Generator, **columns: int) -> list[int]:
    """A row of random numbers below 1000 and random floats, but for the columns given."""
    row = [int(value) for value in rng.integers(0, 1000, SLOT_UPDATE_STOP_TOKENS + NUM_STOPS)]
    for name in FLOATS:
        row[SlotUpdate[name.upper()]] = int(np.float32(rng.uniform(0.0, 2.0)).view(np.int32))
    for name, value in {"slot": slot, **columns}.items():
        row[SlotUpdate[name.upper()]] = value
    return row


def _case(name: str, rows: list[list[int]], n: int, rng: np.random.Generator) -> Case:
    """Old state everywhere, so that a field that is left alone or reset to the wrong value shows."""
    lines = (*INTEGERS, "finish", "draft_len")
    arrays: dict[str, Any] = {key: rng.integers(1, 1000, NUM_SLOTS).astype(np.int32) for key in lines}
    arrays |= {key: rng.uniform(0.1, 2.0, NUM_SLOTS).astype(np.float32) for key in FLOATS}
    tables = {"stop_tokens": NUM_STOPS, "drafts": NUM_DRAFTS, "block_table": NUM_BLOCKS}
    arrays |= {key: rng.integers(1, 1000, (NUM_SLOTS, width)).astype(np.int32) for key, width in tables.items()}
    arrays["seed"] = rng.integers(0, 2**32, (NUM_SLOTS, 2), np.uint32)
    arrays["updates"] = np.array(rows, np.int32)
    return Case(name, arrays, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `update_slots`."""
    rng = np.random.default_rng(1)
    rows = [_update(slot, rng) for slot in (3, 0, 4)]
    yield _case("slots_in_another_order_than_rows", rows, 3, rng)
    yield _case("stale_rows_beyond_the_launch_length", rows, 2, rng)
    yield _case("row_that_names_no_slot", [rows[0], _update(-1, rng), rows[1]], 3, rng)
    yield _case("nothing_to_do", rows, 0, rng)
    words = _update(1, rng, seed_low=-1, seed_high=-(2**31))
    yield _case("seed_words_with_the_highest_bit", [words, words], 1, rng)
    values = dict(zip(FLOATS, (0.0, 1.0, -0.0, 1.5, -2.0, 1e-8), strict=True))
    floats = {name: int(np.float32(value).view(np.int32)) for name, value in values.items()}
    yield _case("floats_are_bits_not_numbers", [_update(2, rng, **floats), rows[0]], 1, rng)
    ended = _update(2, rng)
    ended[SLOT_UPDATE_STOP_TOKENS:] = [7, NO_TOKEN]
    yield _case("unused_stop_token", [ended, rows[0]], 1, rng)


def generate(rng: np.random.Generator) -> Case:
    """Random updates of distinct slots, some rows naming none."""
    slots = rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)]
    rows = [_update(int(slot) if rng.random() < 0.8 else -1, rng) for slot in slots]
    for row in rows:
        row[SlotUpdate.SEED_LOW], row[SlotUpdate.SEED_HIGH] = (int(w) for w in rng.integers(-(2**31), 2**31, 2))
    return _case("random", rows, int(rng.integers(0, len(rows) + 1)), rng)


CONTRACT = REGISTRY.add(
    Contract(
        name="update_slots",
        version=1,
        unit="slot_updates",
        args=UpdateSlotsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Overwrite the whole state of the slots that the update rows name.",
        source="FastDeploy insert_tasks, which writes the same fields one host call at a time.",
        equivalent_mutants={
            "reverse(updates)": "no two rows name the same slot, so their order is free",
            "swap(finish,draft_len)": "both are set to 0",
        },
        constraints=(f"F == S + {SLOT_UPDATE_STOP_TOKENS}",),
    )
)
