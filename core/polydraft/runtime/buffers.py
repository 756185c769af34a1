"""Owns every device buffer of an engine: the slot state that lives across steps, and the buffers one step works in.

The engine allocates them once at start-up; the step program binds kernels to them, staging writes into the plan buffers.
Nothing is ever allocated, freed or rebound afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.contracts.layout import SLOT_UPDATE_STOP_TOKENS, SNAPSHOT_TOKENS
from polydraft.device import DTYPES, Buffer, Device

if TYPE_CHECKING:
    from polydraft.models.description import Block


@dataclass(frozen=True)
class SlotState:
    """The truth about every slot, by slot: written only by `update_*`, `reserve_blocks`, `commit_window` and the proposer.

    int32 unless said otherwise. `tokens` [B, L] prompt, then generated; `prompt_len`, `num_generated`, `kv_len` (committed
    target rows), `prefill_len`, `max_total`, `phase`, `finish`, `epoch` [B]; `drafts` [B, K] with `draft_len` [B];
    `block_table` [B, MB]; sampling: `temperature`, `top_p`, `min_p` [B] f32, `top_k` [B], `seed` [B, 2] u32,
    `stop_tokens` [B, S]; processing: `repetition_penalty`, `presence_penalty`, `frequency_penalty` [B] f32, `min_tokens` [B],
    `bias_ids` [B, A] and `biases` [B, A] f32 of which `num_biases` [B] count, `bad_words` [B, X] of which `bad_len` [B] count.
    """

    tokens: Buffer
    prompt_len: Buffer
    num_generated: Buffer
    kv_len: Buffer
    prefill_len: Buffer
    max_total: Buffer
    phase: Buffer
    finish: Buffer
    epoch: Buffer
    drafts: Buffer
    draft_len: Buffer
    block_table: Buffer
    temperature: Buffer
    top_p: Buffer
    min_p: Buffer
    top_k: Buffer
    seed: Buffer
    stop_tokens: Buffer
    repetition_penalty: Buffer
    presence_penalty: Buffer
    frequency_penalty: Buffer
    min_tokens: Buffer
    num_biases: Buffer
    bias_ids: Buffer
    biases: Buffer
    bad_len: Buffer
    bad_words: Buffer

    @classmethod
    def allocate(cls, device: Device, limits: Limits) -> SlotState:
        """Allocate all of it and mark every slot idle."""
        b = limits.max_seqs
        shapes = {
            "tokens": (b, limits.max_len),
            "drafts": (b, limits.num_drafts),
            "block_table": (b, limits.max_blocks),
            "seed": (b, 2),
            "stop_tokens": (b, limits.max_stop_tokens),
            "bias_ids": (b, limits.max_biases),
            "biases": (b, limits.max_biases),
            "bad_words": (b, limits.max_bad_words),
        }
        floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "biases")
        dtypes = {**dict.fromkeys(floats, "f32"), "seed": "u32"}
        names = cls.__dataclass_fields__
        state = cls(**{n: device.empty(f"state.{n}", shapes.get(n, (b,)), dtypes.get(n, "i32")) for n in names})
        _clear(device, state)
        return state


def _clear(device: Device, state: SlotState) -> None:
    """Give every field a defined value: a slot's first update overwrites all it needs."""
    for name in state.__dataclass_fields__:
        buffer: Buffer = getattr(state, name)
        device.load(buffer, np.full(buffer.shape, -1 if name in _NEGATIVE else 0, DTYPES[buffer.dtype]))


_NEGATIVE = ("tokens", "drafts", "block_table", "stop_tokens", "bad_words")


@dataclass(frozen=True)
class StepBuffers:
    """What one step works in; the comment says who fills each. By sequence index [B], packed row [R] or logit row [NL]."""

    # staging
    slot_order: Buffer
    seq_rows: Buffer
    slot_updates: Buffer
    token_updates: Buffer
    block_updates: Buffer
    bias_updates: Buffer
    bad_word_updates: Buffer
    # pack_rows
    ids: Buffer
    row_slot: Buffer
    positions: Buffer
    seq_start: Buffer
    seq_len: Buffer
    # pack_logit_rows
    logit_row: Buffer
    logit_slot: Buffer
    logit_position: Buffer
    logit_start: Buffer
    logit_len: Buffer
    # target head
    logits: Buffer
    noise: Buffer
    choices: Buffer
    uniforms: Buffer
    # verify_match, verify_rejection
    window: Buffer
    window_len: Buffer
    accepted: Buffer
    drafted: Buffer
    # commit_window
    out_tokens: Buffer
    out_len: Buffer
    out_accepted: Buffer
    # snapshot_output
    record: Buffer

    @classmethod
    def allocate(cls, device: Device, limits: Limits, *, sampling: bool) -> StepBuffers:
        """Allocate for the limits; `noise` is a token-sized buffer unless sampling was asked for."""
        b, r, nl, w = limits.max_seqs, limits.max_rows, limits.max_logit_rows, limits.window
        by_row, by_logit_row = (r,), (nl,)
        shapes: dict[str, tuple[int, ...]] = {
            "slot_updates": (b, SLOT_UPDATE_STOP_TOKENS + limits.max_stop_tokens),
            "token_updates": (max_token_updates(limits), 3),
            "block_updates": (max_block_updates(limits), 3),
            "bias_updates": (b * limits.max_biases, 4),
            "bad_word_updates": (b * limits.max_bad_words, 3),
            "ids": by_row, "row_slot": by_row, "positions": by_row,
            "logit_row": by_logit_row, "logit_slot": by_logit_row, "logit_position": by_logit_row,
            "choices": by_logit_row, "uniforms": by_logit_row,
            "logits": (nl, limits.vocab_size),
            "noise": (nl if sampling else 1, limits.vocab_size),
            "window": (b, w), "out_tokens": (b, w),
            "record": (b, SNAPSHOT_TOKENS + w),
        }  # fmt: skip
        dtypes = {"logits": "f32", "noise": "f32", "uniforms": "f32"}
        names = cls.__dataclass_fields__
        return cls(**{n: device.empty(f"step.{n}", shapes.get(n, (b,)), dtypes.get(n, "i32")) for n in names})


def max_token_updates(limits: Limits) -> int:
    """Tokens staged in one step at most: the known text of the requests admitted in it, for which any one text has room."""
    return limits.max_len + limits.max_rows


def max_block_updates(limits: Limits) -> int:
    """Blocks granted in one step at most: a whole table, when every slot is admitted at once."""
    return limits.max_seqs * limits.max_blocks


@dataclass(frozen=True)
class Scratch:
    """What one decoder block works in, by row, in the activation dtype. Blocks of one shape share it, target and draft too:
    they run one after the other on one stream."""

    normed: Buffer
    qkv: Buffer
    q: Buffer
    attended: Buffer
    branch: Buffer
    gate_up: Buffer
    gated: Buffer

    @classmethod
    def allocate(cls, device: Device, limits: Limits, *, hidden: int, block: Block, dtype: str) -> Scratch:
        """Allocate for `max_rows` rows of this block."""
        q, kv, ffn = block.attention.q_size, block.attention.kv_size, block.feed_forward.intermediate_size
        widths = {
            "normed": hidden, "qkv": q + 2 * kv, "q": q, "attended": q, "branch": hidden, "gate_up": 2 * ffn, "gated": ffn,
        }  # fmt: skip
        return cls(**{n: device.empty(f"scratch.{n}", (limits.max_rows, w), dtype) for n, w in widths.items()})
