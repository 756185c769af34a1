"""The MTP proposer: drafts up to K tokens per step with the model's own multi-token-prediction head, one layer applied K times.

The runner appends its launches after the step's commit. Rows that later passes write for drafts are never rolled back, only
overwritten before they are read: those of positions that the next step commits by its first pass, from the target's hidden
states, the others by its later passes.

Row p of the head combines the hidden state at position p with token p + 1 and predicts token p + 2 (DeepSeek-V3 technical report,
section 2.2). The first pass runs over the target's packed rows. Row p is valid once token p + 1 is known, so the last row of a
prefill chunk uses the true next prompt token, and the row of a rejected draft is skipped. Later passes feed the newest hidden
state of each sequence back ("recycled") together with the token just drafted. A step that makes no drafts still runs the first
pass up to its keys and values (the keep part), so that the cache has the rows of all committed tokens when drafting resumes.
"""

from __future__ import annotations

from polydraft.errors import CapabilityError
from polydraft.models.block import At, Block, Norm, emit_block, emit_block_rows, narrowed
from polydraft.models.decoder import HIDDEN, emit_embedding, emit_head, emit_linear, shares
from polydraft.models.description import ModelDescription
from polydraft.models.weights import DRAFT_HEAD
from polydraft.program.declare import Pass, StepBuffer
from polydraft.program.program import ProgramBuilder
from polydraft.proposers.base import Drafting, ProposerContext
from polydraft.sampling.draft_vocab import few_buffers

LAYER = "mtp.0"


class MtpProposer:
    """Drafts with one MTP layer. The conventions of a model family are the fields of `Mtp`."""

    name = "mtp"
    ranks = True
    soft = True
    state = "draft.last"

    @staticmethod
    def layers(model: ModelDescription, draft_model: str = "") -> dict[str, Block]:
        """The head's decoder blocks, by prefix. Negotiation calls this before a proposer exists."""
        del draft_model  # the head is in the target's checkpoint
        return model.mtp.layers if model.mtp else {}

    def __init__(self, context: ProposerContext) -> None:
        model = context.model
        if model.mtp is None:
            raise CapabilityError(f"proposer 'mtp' needs an MTP head: {model.mtp_note}; use --proposer none")
        self._c, self._mtp = context, model.mtp
        self._norm = Norm(model.eps, model.norm_plus_one)
        self.blocks, hidden = self.layers(model), model.hidden_size
        self._layer = self.blocks[LAYER]
        self._scratch = self._layer.scratch(hidden)
        self._extend = Pass("draft.extend", "draft", "rows", "draft_row_slot", "positions")
        self._advance = Pass("draft.advance", "draft", "seqs", "draft_slot", "draft_position")
        self.passes = (self._extend, self._advance)
        self._fed = "draft.fed" if model.mtp.feed == "post" else HIDDEN
        self.buffers = [
            *Drafting.buffers,
            *(StepBuffer(name, "R") for name in ("draft_ids", "draft_row_slot")),
            *(StepBuffer(name, "B") for name in ("next_ids", "chosen")),
            *(StepBuffer(f"draft.{name}", f"R {width}", "act") for name, width in self._row_widths(hidden).items()),
            *(StepBuffer(f"draft.{name}", f"B {width}", "act") for name, width in self._last_widths(hidden).items()),
            StepBuffer("draft.logits", "B V", "f32"),
            *shares(model, embedded=("draft.embedded", "R"), logits=("draft.logits", "B")),
            StepBuffer("draft.noise", "B V" if context.stores_noise else "1 V", "f32"),
        ]
        if context.draft_ids is not None:
            self.buffers += few_buffers("draft.logits", context.draft_ids, model.vocab_share, context.rank)

    def _row_widths(self, hidden: int) -> dict[str, int]:
        widths = {"embedded": hidden, "combined": 2 * hidden, "x": hidden}
        return widths | ({"fed": hidden} if self._mtp.feed == "post" else {})

    def _last_widths(self, hidden: int) -> dict[str, int]:
        widths = {one.name: one.width for one in self._layer.work(hidden)}
        carried = {f"last_{name}": widths[name] for name in self._layer.mixer.carried}
        return {"last": hidden, "last_normed": hidden, **carried}

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        """Append one pass over the target's rows, then `num_drafts` - 1 passes with one row per sequence. With `num_drafts` 0
        append only the keep part: the first pass up to its keys and values."""
        self.begin(program, num_drafts)
        self.draft(program, num_drafts)

    def begin(self, program: ProgramBuilder, num_drafts: int) -> None:
        """Append what comes before the passes of a round with at most `num_drafts` drafts."""
        stage = "begin_draft"
        program.add("pack_draft_rows", "rows", stage)
        program.add("begin_draft", "seqs", stage, num_drafts=num_drafts)
        if self._mtp.feed == "post":
            self._norm.emit(program, "norm", x=HIDDEN, out=self._fed, unit="rows", stage=stage)

    def draft(self, program: ProgramBuilder, passes: int) -> None:
        """Append so many passes; with 0, the keep part."""
        if passes == 0:
            self._combine(program, 0, self._extend, "draft keep")
            emit_block_rows(
                program, self._layer, self._norm, LAYER, x="draft.x", rows=self._extend, scratch=self._scratch,
                stage="draft keep",
            )  # fmt: skip
        for index in range(passes):
            stage = f"draft {index}"
            rows = self._extend if index == 0 else self._advance
            self._combine(program, index, rows, stage)
            self._block(program, index, rows, stage)
            self._choose(program, index, stage)

    def _combine(self, program: ProgramBuilder, index: int, rows: Pass, stage: str) -> None:
        """Embed the tokens, combine them with the hidden state, and project: the input of the decoder block."""
        mtp, unit = self._mtp, rows.unit
        ids, state = ("draft_ids", self._fed) if index == 0 else ("next_ids", self._recycled())
        program.fill(rows.name, index, unit, stage)
        emit_embedding(program, "draft.embedded", unit=unit, stage=stage, ids=ids)
        program.add(
            "combine_draft_inputs", unit, stage, embedding="draft.embedded", hidden=state, emb_norm=f"{LAYER}.emb_norm",
            hid_norm=f"{LAYER}.hid_norm", positions=rows.positions, eps=self._norm.eps, plus_one=self._norm.plus_one,
            order=mtp.order, mask_first_position=mtp.mask_first_position, out="draft.combined",
        )  # fmt: skip
        emit_linear(program, f"{LAYER}.proj", x="draft.combined", out=_stream(index), unit=unit, stage=stage)

    def _block(self, program: ProgramBuilder, index: int, rows: Pass, stage: str) -> None:
        """The decoder block and the final norm; the newest row of each drafting sequence ends in `draft.last`. In the first pass
        only these rows continue after attention, since the others are needed only for their keys and values. Later passes have
        one row per sequence, and it lies there from the start."""

        def narrow(at: At) -> At:
            self._select(program, "draft.x", "draft.last", stage)
            for name in self._layer.mixer.carried:
                self._select(program, at.scratch[name], f"draft.last_{name}", stage)
            carried = {name: f"draft.last_{name}" for name in self._layer.mixer.carried}
            return narrowed(at, x="draft.last", unit="seqs", row_slot="draft_slot", **carried)

        whole = LAYER in program.memory.weights  # a block that computes itself needs all rows
        emit_block(
            program, self._layer, self._norm, LAYER, x=_stream(index), rows=rows, scratch=self._scratch, stage=stage,
            narrow=None if index or whole else narrow,
        )  # fmt: skip
        if whole and not index:
            self._select(program, "draft.x", "draft.last", stage)
        weight = f"{LAYER}.final_norm" if self._mtp.final_norm == "own" else "norm"
        self._norm.emit(program, weight, x="draft.last", out="draft.last_normed", unit="seqs", stage=stage)

    def _recycled(self) -> str:
        return "draft.last" if self._mtp.recycle == "pre" else "draft.last_normed"

    @staticmethod
    def _select(program: ProgramBuilder, rows: str, out: str, stage: str) -> None:
        """The newest row of each drafting sequence."""
        program.add("select_last_rows", "seqs", stage, hidden=rows, out=out)

    def _choose(self, program: ProgramBuilder, index: int, stage: str) -> None:
        """Logits, one token per sequence by the target's own rule, and the inputs of the next pass. Noise is that of
        the target, or separate noise if drafts are verified by rejection."""
        few = self._c.draft_ids is not None
        weight = DRAFT_HEAD if few else "lm_head"
        emit_head(program, x="draft.last_normed", out="draft.logits", unit="seqs", stage=stage, weight=weight, few=few)
        self._c.choose(
            program, logits="draft.logits", row_slot="draft_slot", positions="draft_position", ahead=2, tokens="chosen",
            noise="draft.noise", unit="seqs", stage=stage,
        )  # fmt: skip
        program.add("advance_draft", "seqs", stage, pass_index=index)


def _stream(index: int) -> str:
    """The residual stream of a pass: of the target's rows first, then of one row a sequence."""
    return "draft.last" if index else "draft.x"
