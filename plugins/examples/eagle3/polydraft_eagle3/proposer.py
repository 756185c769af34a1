"""The EAGLE-3 proposer: the first pass over the target's rows, fed by its taps, then passes of one row a sequence, fed by itself.

The runner has it append its launches behind the step's commit. Like the MTP head it rolls nothing back: each step writes its
cache anew over the rows that the target has computed, and rows of drafts are written over.
"""

from __future__ import annotations

from polydraft.models.block import At, narrowed
from polydraft.models.decoder import emit_linear
from polydraft.program.declare import Pass, StepBuffer
from polydraft.program.program import ProgramBuilder
from polydraft.proposers import ProposerContext
from polydraft.proposers.base import Drafting
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

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        """`num_drafts` passes; without drafts the keep part of the first, which is all of it up to keys and values."""
        program.add("pack_draft_rows", "rows", "begin_draft")
        program.add("begin_draft", "seqs", "begin_draft", num_drafts=num_drafts)
        at = self._enter(program, 0, self._first, ROWS, "draft_ids")
        self._fuse(at)
        if num_drafts == 0:
            self._block.mixer.keep(at)
            return
        self._block.mixer.mix(at)
        self._draft(self._narrow(at), 0)
        for index in range(1, num_drafts):
            at = self._enter(program, index, self._later, NEWEST, "next_ids")
            self._block.mixer.mix(at)
            self._draft(at, index)

    def _enter(self, program: ProgramBuilder, index: int, rows: Pass, x: str, ids: str) -> At:
        """Begin a pass: its metadata, and the embeddings of its tokens."""
        at = At(program, self._norm, LAYER, rows, rows.unit, f"draft {index}", x, self._scratch)
        program.fill(rows.name, index, at.unit, at.stage)
        at.add("embed", ids=ids, weight="embed", out=at.scratch["embedded"])
        return at

    def _fuse(self, at: At) -> None:
        """The three taps, projected to the hidden size."""
        for tap, weight in zip(self.taps, FC, strict=True):
            out = at.x if weight == FC[0] else at.scratch["branch"]
            at.add("linear", x=tap, weight=f"{PREFIX}.{weight}", bias=None, out=out)
            if out != at.x:
                at.add("residual_add", x=at.x, y=out)

    def _narrow(self, at: At) -> At:
        """Of each drafting sequence its newest row: the others were there for their keys and values."""
        for x, out in ((at.x, NEWEST), (at.scratch["attended"], "eagle3.attended")):
            at.program.add("select_last_rows", "seqs", at.stage, hidden=x, out=out)
        return narrowed(at, x=NEWEST, unit="seqs", attended="eagle3.attended")

    def _draft(self, at: At, index: int) -> None:
        """The rest of the layer, which leaves in `NEWEST` what the next pass is fed with; then a token by the target's rules."""
        self._block.mixer.finish(at)
        at.add("residual_add", x=at.x, y=at.scratch["branch"])
        self._norm.emit(at.program, at.own("post_norm"), x=at.x, out=at.scratch["normed"], unit=at.unit, stage=at.stage)
        self._block.feed_forward.emit(at)
        at.add("residual_add", x=at.x, y=at.scratch["branch"])
        self._norm.emit(at.program, "eagle3.norm", x=at.x, out="eagle3.normed", unit=at.unit, stage=at.stage)
        emit_linear(at.program, "eagle3.lm_head", x="eagle3.normed", out="eagle3.logits", unit=at.unit, stage=at.stage)
        self._choose(
            at.program, logits="eagle3.logits", row_slot="draft_slot", positions="draft_position", ahead=2, tokens="chosen",
            noise="eagle3.noise", unit=at.unit, stage=at.stage,
        )  # fmt: skip
        at.add("advance_draft", pass_index=index)
