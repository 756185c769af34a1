"""The state machine of slots on the device: which columns it keeps, and the launches that pack a step, commit it and report it.

Rows of the scheduled slots are packed in launch order, the target and the verifier work on them, and `commit_window` writes
what was accepted back into the columns. Everything here is integers; models, sampling and proposers bind to these names.
"""

from __future__ import annotations

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.contracts.layout import SNAPSHOT_TOKENS
from polydraft.program.columns import BLOCK_TABLE, HISTORY
from polydraft.program.declare import Admission, Column, StepBuffer
from polydraft.program.program import ProgramBuilder
from polydraft.sentinels import NO_BLOCK, NO_TOKEN, Finish, Phase


def _seed(admission: Admission) -> np.ndarray:
    return np.array(admission.request.seed, np.uint32).view(np.int32)


class Batch:
    """The columns that every engine has, and the launches around the target's pass."""

    columns = (
        Column(HISTORY, "Prompt, then generated.", "B L", empty=NO_TOKEN, value=lambda a: a.known, resets=False),
        Column("prompt_len", "Tokens of the prompt.", value=lambda a: len(a.request.prompt_ids)),
        Column("num_generated", "Tokens generated so far.", value=lambda a: len(a.known) - len(a.request.prompt_ids)),
        Column("kv_len", "Committed rows of the target's cache.", value=lambda a: a.num_cached),
        Column("prefill_len", "Tokens to prefill before decoding.", value=lambda a: a.prefill_len),
        Column("max_total", "Prompt and generated tokens allowed.", value=lambda a: a.request.max_total),
        Column("phase", "`Phase`.", empty=Phase.IDLE, value=lambda a: Phase.PREFILL),
        Column("finish", "`Finish`.", empty=Finish.NONE),
        Column("epoch", "Requests that the slot has served.", value=lambda a: a.epoch),
        Column("stop_tokens", "Tokens that end the text.", "B S", empty=NO_TOKEN, value=lambda a: a.request.stop_token_ids),
        Column("seed", "Key of the request's randomness: the bits of two 32-bit words, low first.", "B 2", value=_seed),
        Column(BLOCK_TABLE, "Blocks of the paged cache, in order of position.", "B MB", empty=NO_BLOCK, value=lambda a: a.blocks),
        Column("drafts", "Drafts that the next round verifies.", "B K", empty=NO_TOKEN),
        Column("draft_len", "How many there are."),
    )

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.buffers = (
            StepBuffer("slot_order", "B"),
            StepBuffer("seq_rows", "B"),
            *(StepBuffer(name, "R") for name in ("ids", "row_slot", "positions")),
            *(StepBuffer(name, "B") for name in ("seq_start", "seq_len", "logit_start", "logit_len")),
            *(StepBuffer(name, "NL") for name in ("logit_row", "logit_slot", "logit_position")),
            StepBuffer("out_tokens", "B W"),
            *(StepBuffer(name, "B") for name in ("out_len", "out_accepted")),
            StepBuffer("record", f"B {SNAPSHOT_TOKENS + limits.window}"),
        )

    def pack(self, program: ProgramBuilder) -> None:
        """From slot columns to packed rows and logit rows; slots without the blocks that they need are paused."""
        limits = self._limits
        program.add("reserve_blocks", "seqs", "pack", block_size=limits.block_size, lookahead=limits.num_drafts)
        program.add("pack_rows", "rows", "pack")
        program.add("pack_logit_rows", "logit_rows", "pack")

    def commit(self, program: ProgramBuilder) -> None:
        """From windows to committed text, and the record that goes up to the host."""
        program.add("commit_window", "seqs", "commit")
        program.add("snapshot_output", "seqs", "snapshot")
