"""The EAGLE-3 proposer: drafts with a small model of its own, which is fed with hidden states of some layers of the target.

Chosen by `--proposer eagle3 --draft-model DIR`. The runner has it append its launches behind the step's commit. The first pass
runs over the target's rows and is fed by its taps; later passes have one row a sequence and are fed by the model's own output.
Like the MTP head it rolls nothing back: each step writes its caches anew over the rows that the target has computed, and rows of
drafts are written over. `eagle3_model.py` says what the model is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polydraft.models.block import At, Block, emit_block, emit_block_rows, narrowed
from polydraft.models.decoder import emit_embedding, emit_head, shares
from polydraft.models.description import ModelDescription
from polydraft.program.declare import Pass, StepBuffer
from polydraft.program.program import ProgramBuilder
from polydraft.proposers.base import Drafting, DraftWeights, ProposerContext
from polydraft.proposers.eagle3_model import PREFIX, Eagle3Model
from polydraft.sampling.draft_vocab import few_buffers

ROWS, NEWEST = "eagle3.rows", "eagle3.newest"
"""The residual stream: of all rows [R, H], and of each sequence's newest [B, H], which later passes work on in place."""
NORMED, ENTERED = "eagle3.normed", "eagle3.entered"
"""[B, H]: the output behind the final norm, and a copy of what enters a later pass."""
LOGITS = "eagle3.logits"
"""[B, V]: of a pass."""


class Eagle3Proposer:
    """Drafts with decoder layers of its own; what they look like is data in `Eagle3Model`."""

    name = "eagle3"
    ranks = True
    soft = True
    state = NEWEST

    @staticmethod
    def layers(model: ModelDescription, draft_model: str) -> dict[str, Block]:
        """The decoder layers by prefix. Negotiation calls this before a proposer exists."""
        return dict(Eagle3Model.read(draft_model, model).blocks)

    @staticmethod
    def weights(model: ModelDescription, draft_model: str) -> DraftWeights:
        """What is read from the draft model's checkpoint."""
        return Eagle3Model.read(draft_model, model).weights()

    @staticmethod
    def note(model: ModelDescription, draft_model: str) -> str:
        """What of the draft model no text would show."""
        return Eagle3Model.read(draft_model, model).note

    def __init__(self, context: ProposerContext) -> None:
        self._model = model = Eagle3Model.read(context.draft_model, context.model)
        self._choose, self._norm = context.choose, model.norm
        self.hidden_size = hidden = model.hidden_size
        self.blocks = dict(model.blocks)
        first, *_, last = (*self.blocks.values(), *self.blocks.values())
        self._scratch = first.scratch(hidden)
        self._enters_apart = "entered" in self._scratch
        self._first = Pass("eagle3.first", "draft", "rows", "draft_row_slot", "positions")
        self._later = Pass("eagle3.later", "draft", "seqs", "draft_slot", "draft_position")
        self.passes = (self._first, self._later)
        self.taps = {f"eagle3.tap.{i}": point for i, point in enumerate(model.points)}
        widths = {one.name: one.width for one in last.work(hidden)}
        self.buffers = [
            *Drafting.buffers,
            *(StepBuffer(name, "R") for name in ("draft_ids", "draft_row_slot")),
            *(StepBuffer(name, "B") for name in ("next_ids", "chosen")),
            StepBuffer(ROWS, f"R {hidden}", "act"),
            *(StepBuffer(name, f"B {hidden}", "act") for name in (NEWEST, NORMED)),
            *(StepBuffer(f"eagle3.{name}", f"B {widths[name]}", "act") for name in last.mixer.carried),
            StepBuffer(LOGITS, "B V", "f32"),
            *shares(context.model, embedded=(self._scratch["embedded"], "R"), logits=(LOGITS, "B"), hidden=hidden),
            StepBuffer("eagle3.noise", "B V" if context.stores_noise else "1 V", "f32"),
        ]
        if model.fc_norm:
            self.buffers.append(StepBuffer("eagle3.normed_tap", f"R {model.target_hidden_size}", "act"))
        if self._enters_apart != model.norm_output:  # a pass would overwrite what it is fed with, or is fed from elsewhere
            rows = np.arange(context.limits.max_seqs, dtype=np.int32)
            self.buffers.append(StepBuffer("eagle3.row_of_seq", "B", initial=rows))
        if self._enters_apart and not model.norm_output:
            self.buffers.append(StepBuffer(ENTERED, f"B {hidden}", "act"))
        if model.draft_ids is not None:
            self.buffers += few_buffers(LOGITS, model.draft_ids, model.vocab_share, context.rank)

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        """`num_drafts` passes; without drafts the keep part of the first, which is all of it up to keys and values."""
        self.begin(program, num_drafts)
        self.draft(program, num_drafts)

    def begin(self, program: ProgramBuilder, num_drafts: int) -> None:
        """Append what comes before the passes of a round with at most `num_drafts` drafts."""
        program.add("pack_draft_rows", "rows", "begin_draft")
        program.add("begin_draft", "seqs", "begin_draft", num_drafts=num_drafts)

    def draft(self, program: ProgramBuilder, passes: int) -> None:
        """Append so many passes; with 0, the keep part."""
        if passes == 0:
            self._pass(program, 0, "draft keep", keep=True)
        for index in range(passes):
            stage = f"draft {index}"
            self._pass(program, index, stage)
            self._choose_token(program, index, stage)

    def _pass(self, program: ProgramBuilder, index: int, stage: str, *, keep: bool = False) -> None:
        """Its layers over the rows of a pass. Behind the last of them only the newest row of each sequence goes on."""
        rows, x, ids = (self._later, NEWEST, "next_ids") if index else (self._first, ROWS, "draft_ids")
        program.fill(rows.name, index, rows.unit, stage)
        embed = "eagle3.embed" if "eagle3.embed" in program.memory.weights else "embed"
        emit_embedding(program, self._scratch["embedded"], unit=rows.unit, stage=stage, weight=embed, ids=ids)
        scratch = self._recycle(program, stage) if index else self._fuse(program, stage)
        *whole, last = self.blocks.items()
        for prefix, block in whole:
            emit_block(program, block, self._norm, prefix, x=x, rows=rows, scratch=scratch, stage=stage)
            scratch = last[1].scratch(self.hidden_size)
        prefix, block = last
        if keep:
            emit_block_rows(program, block, self._norm, prefix, x=x, rows=rows, scratch=scratch, stage=stage)
        else:
            narrow = None if index else self._narrow
            emit_block(program, block, self._norm, prefix, x=x, rows=rows, scratch=scratch, stage=stage, narrow=narrow)

    def _fuse(self, program: ProgramBuilder, stage: str) -> Mapping[str, str]:
        """The taps, joined and projected to the width of the model: W [a | b] = W_a a + W_b b. Returns the scratch of the first
        layer."""
        out, branch = self._scratch["entered"] if self._enters_apart else ROWS, self._scratch["branch"]
        for i, tap in enumerate(self.taps):
            x = tap
            if self._model.fc_norm:
                x = "eagle3.normed_tap"
                self._norm.emit(program, f"{PREFIX}.fc_norm.{i}", x=tap, out=x, unit="rows", stage=stage)
            bias = f"{PREFIX}.fc_bias" if self._model.fc_bias and i == 0 else None
            into = branch if i else out
            program.add("linear", "rows", stage, x=x, weight=f"{PREFIX}.fc.{i}", bias=bias, out=into)
            if i:
                program.add("residual_add", "rows", stage, x=out, y=branch)
        return self._scratch

    def _recycle(self, program: ProgramBuilder, stage: str) -> Mapping[str, str]:
        """What the pass before has left, brought to where the first layer takes it. Returns the scratch of that layer."""
        fed = NORMED if self._model.norm_output else NEWEST
        if self._enters_apart and fed == NORMED:
            return {**self._scratch, "entered": NORMED}
        if self._enters_apart or fed == NORMED:
            out = ENTERED if self._enters_apart else NEWEST
            program.add("gather_rows", "seqs", stage, x=fed, index="eagle3.row_of_seq", out=out)
        return {**self._scratch, "entered": ENTERED} if self._enters_apart else self._scratch

    @staticmethod
    def _narrow(at: At) -> At:
        """Of each drafting sequence its newest row: the others were there for their keys and values."""
        for x, out in ((at.x, NEWEST), (at.scratch["attended"], "eagle3.attended")):
            at.program.add("select_last_rows", "seqs", at.stage, hidden=x, out=out)
        return narrowed(at, x=NEWEST, unit="seqs", row_slot="draft_slot", attended="eagle3.attended")

    def _choose_token(self, program: ProgramBuilder, index: int, stage: str) -> None:
        """A token by the target's rules. `NEWEST` has what the layers made, and the next pass is fed with it."""
        self._norm.emit(program, f"{PREFIX}.norm", x=NEWEST, out=NORMED, unit="seqs", stage=stage)
        head = "lm_head" if self._model.head == "target" else f"{PREFIX}.lm_head"
        few = self._model.draft_ids is not None
        emit_head(program, x=NORMED, out=LOGITS, unit="seqs", stage=stage, weight=head, few=few)
        self._choose(
            program, logits=LOGITS, row_slot="draft_slot", positions="draft_position", ahead=2, tokens="chosen",
            noise="eagle3.noise", unit="seqs", stage=stage,
        )  # fmt: skip
        program.add("advance_draft", "seqs", stage, pass_index=index)
