"""The EAGLE proposer: the first pass over the target's rows, fed by its tap, then passes of one row a sequence, fed by itself.

The runner has it append its launches behind the step's commit. Like the MTP head it rolls nothing back: each step writes its
cache anew over the rows that the target has computed, and rows of drafts are written over.
"""

from __future__ import annotations

from typing import Any

from polydraft.models import At, emit_block, emit_block_rows, emit_linear, narrowed
from polydraft.proposers import Drafting, Pass, ProgramBuilder, ProposerContext, StepBuffer
from polydraft_eagle.draft_model import LAYER, PREFIX, DraftModel

TAP, ROWS, NEWEST = "eagle.tap", "eagle.rows", "eagle.newest"
"""The target's states, [R, H]; and the residual stream: of all rows [R, H], and of each sequence's newest [B, H], which later
passes work on in place."""


class EagleProposer:
    """Drafts with one decoder layer of its own; what it looks like is data in `DraftModel`."""

    name = "eagle"
    soft = True  # every draft comes from `choose`
    state = NEWEST

    def __init__(self, context: ProposerContext, draft_model: DraftModel) -> None:
        hidden = draft_model.hidden_size
        self._choose, self._block, self._norm = context.choose, draft_model.block, draft_model.norm
        self._scratch = self._block.scratch(hidden)
        self._first = Pass("eagle.first", "draft", "rows", "draft_row_slot", "positions")
        self._later = Pass("eagle.later", "draft", "seqs", "draft_slot", "draft_position")
        self.passes = (self._first, self._later)
        self.blocks = {LAYER: self._block}
        self.taps = {TAP: "final"}
        widths = {one.name: one.width for one in self._block.work(hidden)}
        self.buffers = (
            *Drafting.buffers,
            *(StepBuffer(name, "R") for name in ("draft_ids", "draft_row_slot")),
            *(StepBuffer(name, "B") for name in ("next_ids", "chosen")),
            *(StepBuffer(name, f"R {hidden}", "act") for name in (ROWS, "eagle.embedded")),
            StepBuffer(NEWEST, f"B {hidden}", "act"),
            StepBuffer("eagle.attended", f"B {widths['attended']}", "act"),
            StepBuffer("eagle.logits", "B V", "f32"),
            StepBuffer("eagle.noise", "B V" if context.stores_noise else "1 V", "f32"),
        )

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        """`num_drafts` passes; without drafts the keep part of the first, which is all of it up to keys and values."""
        program.add("pack_draft_rows", "rows", "begin_draft")
        program.add("begin_draft", "seqs", "begin_draft", num_drafts=num_drafts)
        if num_drafts == 0:
            emit_block_rows(program, self._block, self._norm, LAYER, **self._enter(program, 0))
        for index in range(num_drafts):
            entered = self._enter(program, index)
            emit_block(program, self._block, self._norm, LAYER, **entered, narrow=None if index else self._narrow)
            self._draft(program, entered["stage"], index)

    def _enter(self, program: ProgramBuilder, index: int) -> dict[str, Any]:
        """Begin a pass: its metadata, and what enters its layer, from the embeddings of its tokens and the states. Returns where
        its block works."""
        rows, x, ids = (self._later, NEWEST, "next_ids") if index else (self._first, ROWS, "draft_ids")
        unit, stage, branch = rows.unit, f"draft {index}", self._scratch["branch"]
        program.fill(rows.name, index, unit, stage)
        program.add("embed", unit, stage, ids=ids, weight="embed", out="eagle.embedded")
        emit_linear(program, f"{PREFIX}.fc.state", x=NEWEST if index else TAP, out=branch, unit=unit, stage=stage)
        program.add("linear", unit, stage, x="eagle.embedded", weight=f"{PREFIX}.fc.embedding", bias=f"{PREFIX}.fc.bias", out=x)
        program.add("residual_add", unit, stage, x=x, y=branch)
        return {"x": x, "rows": rows, "scratch": self._scratch, "stage": stage}

    def _narrow(self, at: At) -> At:
        """Of each drafting sequence its newest row: the others were there for their keys and values."""
        for x, out in ((at.x, NEWEST), (at.scratch["attended"], "eagle.attended")):
            at.program.add("select_last_rows", "seqs", at.stage, hidden=x, out=out)
        return narrowed(at, x=NEWEST, unit="seqs", attended="eagle.attended")

    def _draft(self, program: ProgramBuilder, stage: str, index: int) -> None:
        """A token by the target's rules and head. `NEWEST` has what the layer made, and the next pass is fed with it."""
        emit_linear(program, "lm_head", x=NEWEST, out="eagle.logits", unit="seqs", stage=stage)
        self._choose(
            program, logits="eagle.logits", row_slot="draft_slot", positions="draft_position", ahead=2, tokens="chosen",
            noise="eagle.noise", unit="seqs", stage=stage,
        )  # fmt: skip
        program.add("advance_draft", "seqs", stage, pass_index=index)
