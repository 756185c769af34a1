"""The EAGLE-3 proposer: the first pass over the target's rows, fed by its taps, then passes of one row a sequence, fed by itself.

The runner has it append its launches behind the step's commit. Like the MTP head it rolls nothing back: each step writes its
cache anew over the rows that the target has computed, and rows of drafts are written over.
"""

from __future__ import annotations

from typing import Any

from polydraft.models import At, emit_block, emit_block_rows, emit_linear, narrowed
from polydraft.proposers import Drafting, Pass, ProgramBuilder, ProposerContext, StepBuffer, places_of
from polydraft_eagle3.draft_model import FC, LAYER, PREFIX, DraftModel

ROWS, NEWEST = "eagle3.rows", "eagle3.newest"
"""The residual stream: of all rows [R, H], and of each sequence's newest [B, H], which later passes work on in place."""


class Eagle3Proposer:
    """Drafts with one decoder layer of its own; what it looks like is data in `DraftModel`."""

    name = "eagle3"
    soft = True  # every draft comes from `choose`

    def __init__(self, context: ProposerContext, draft_model: DraftModel) -> None:
        hidden = draft_model.hidden_size
        self._choose, self._block, self._norm = context.choose, draft_model.block, draft_model.norm
        self._scratch = self._block.scratch(hidden)
        self._first = Pass("eagle3.first", "draft", "rows", "draft_row_slot", "positions")
        self._later = Pass("eagle3.later", "draft", "seqs", "draft_slot", "draft_position")
        self.passes = (self._first, self._later)
        self.blocks = {LAYER: self._block}
        self.taps = {f"eagle3.tap.{i}": point for i, point in enumerate(draft_model.points)}
        widths = {one.name: one.width for one in self._block.work(hidden)}
        self.buffers = (
            *Drafting.buffers,
            *(StepBuffer(name, "R") for name in ("draft_ids", "draft_row_slot")),
            *(StepBuffer(name, "B") for name in ("next_ids", "chosen")),
            StepBuffer(ROWS, f"R {hidden}", "act"),
            StepBuffer(NEWEST, f"B {hidden}", "act"),
            StepBuffer("eagle3.normed", f"B {hidden}", "act"),
            StepBuffer("eagle3.attended", f"B {widths['attended']}", "act"),
            StepBuffer("eagle3.logits", "B V", "f32"),
            StepBuffer("eagle3.noise", "B V" if context.stores_noise else "1 V", "f32"),
        )
        self._head_logits = "eagle3.logits"
        if draft_model.draft_ids is not None:  # the head scores some tokens; the others get -inf
            self._head_logits = "eagle3.few_logits"
            places = places_of(draft_model.draft_ids, context.limits.vocab_size)
            self.buffers += (
                StepBuffer(self._head_logits, f"B {draft_model.head_size}", "f32"),
                StepBuffer("eagle3.places", "V", initial=places),
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
            self._draft(program, index, entered["stage"])

    def _enter(self, program: ProgramBuilder, index: int) -> dict[str, Any]:
        """Begin a pass: its metadata, the embeddings of its tokens, and in the first the taps. Returns where its block works."""
        rows, x, ids = (self._later, NEWEST, "next_ids") if index else (self._first, ROWS, "draft_ids")
        unit, stage = rows.unit, f"draft {index}"
        program.fill(rows.name, index, unit, stage)
        program.add("embed", unit, stage, ids=ids, weight="embed", out=self._scratch["embedded"])
        if index == 0:
            self._fuse(program, stage)
        return {"x": x, "rows": rows, "scratch": self._scratch, "stage": stage}

    def _fuse(self, program: ProgramBuilder, stage: str) -> None:
        """The three taps, projected to the hidden size."""
        branch = self._scratch["branch"]
        for tap, weight in zip(self.taps, FC, strict=True):
            out = ROWS if weight == FC[0] else branch
            emit_linear(program, f"{PREFIX}.{weight}", x=tap, out=out, unit="rows", stage=stage)
            if out == branch:
                program.add("residual_add", "rows", stage, x=ROWS, y=branch)

    def _narrow(self, at: At) -> At:
        """Of each drafting sequence its newest row: the others were there for their keys and values."""
        for x, out in ((at.x, NEWEST), (at.scratch["attended"], "eagle3.attended")):
            at.program.add("select_last_rows", "seqs", at.stage, hidden=x, out=out)
        return narrowed(at, x=NEWEST, unit="seqs", attended="eagle3.attended")

    def _draft(self, program: ProgramBuilder, index: int, stage: str) -> None:
        """A token by the target's rules. `NEWEST` has what the layer made, and the next pass is fed with it."""
        self._norm.emit(program, f"{PREFIX}.norm", x=NEWEST, out="eagle3.normed", unit="seqs", stage=stage)
        emit_linear(program, f"{PREFIX}.lm_head", x="eagle3.normed", out=self._head_logits, unit="seqs", stage=stage)
        if self._head_logits != "eagle3.logits":
            program.add("spread_logits", "seqs", stage, x=self._head_logits, places="eagle3.places", out="eagle3.logits")
        self._choose(
            program, logits="eagle3.logits", row_slot="draft_slot", positions="draft_position", ahead=2, tokens="chosen",
            noise="eagle3.noise", unit="seqs", stage=stage,
        )  # fmt: skip
        program.add("advance_draft", "seqs", stage, pass_index=index)
