"""Owns the MTP proposer: K drafts from the model's own multi-token-prediction head, one recurrent layer used K times.

The runner appends its launches behind the step's commit. It never rolls anything back: each round its cache is rewritten
over the accepted rows with the target's true hidden states, and rows written for drafts are simply written over.

Row p of the head combines the state at position p with token p + 1 and predicts token p + 2 (DeepSeek-V3 technical report,
section 2.2). The first pass runs over the target's packed rows; row p is valid once token p + 1 is known, so a chunk border
of a prefill uses the true next prompt token, and a rejected draft's row drops out. Later passes feed each sequence's newest
state back ("recycled") with the token just drafted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polydraft.backend import CacheSpec, PassBuffers
from polydraft.contracts.advance_draft import AdvanceDraftV1
from polydraft.contracts.base import Unit
from polydraft.contracts.begin_draft import BeginDraftV1
from polydraft.contracts.combine_draft_inputs import CombineDraftInputsV1
from polydraft.contracts.pack_draft_rows import PackDraftRowsV1
from polydraft.contracts.select_last_rows import SelectLastRowsV1
from polydraft.contracts.spread_logits import SpreadLogitsV1
from polydraft.device import Buffer
from polydraft.draft_vocab import places_of
from polydraft.errors import CapabilityError
from polydraft.models.decoder import Norm, PassRows, emit_block, emit_embed, emit_linear, emit_norm
from polydraft.proposers.base import ProposerContext, ProposerShape
from polydraft.runtime.buffers import Scratch
from polydraft.runtime.program import ProgramBuilder
from polydraft.runtime.weights import DRAFT_HEAD

LAYER = "mtp.0"


class MtpProposer:
    """Drafts with one MTP layer; every switch of `Mtp` is data here."""

    name = "mtp"
    soft = True

    def __init__(self, context: ProposerContext) -> None:
        model, limits, device = context.model, context.limits, context.device
        if model.mtp is None:
            raise CapabilityError(f"proposer 'mtp' needs an MTP head: {model.mtp_note}; use --proposer none")
        self._c, self._mtp = context, model.mtp
        self.shape = ProposerShape(max_width=limits.num_drafts, fixed=True, one_call=False)
        self._norm = Norm(model.eps, model.norm_plus_one)
        attention, hidden = model.mtp.block.attention, model.hidden_size
        heads, dim = attention.num_kv_heads, attention.head_dim
        spec = CacheSpec(limits.num_blocks, limits.block_size, heads, dim, context.dtype, kv=context.kv)
        self._cache = context.allocate_cache(spec)
        same = model.mtp.block == model.blocks[0]
        self._scratch = (
            context.scratch
            if same
            else Scratch.allocate(device, limits, hidden=hidden, block=model.mtp.block, dtype=context.dtype)
        )

        def act(name: str, *shape: int) -> Buffer:
            return device.empty(f"draft.{name}", shape, context.dtype)

        def ints(name: str, *shape: int) -> Buffer:
            return device.empty(f"draft.{name}", shape, "i32")

        b, r = limits.max_seqs, limits.max_rows
        self._ids, self._row_slot = ints("ids", r), ints("row_slot", r)
        self._slot, self._position, self._budget = ints("slot", b), ints("position", b), ints("budget", b)
        self._next_ids, self._chosen = ints("next_ids", b), ints("chosen", b)
        self._embedded, self._combined, self._x = (
            act("embedded", r, hidden),
            act("combined", r, 2 * hidden),
            act("x", r, hidden),
        )
        self._fed = act("fed", r, hidden) if model.mtp.feed == "post" else context.target_hidden
        self._last, self._last_normed = act("last", b, hidden), act("last_normed", b, hidden)
        self._last_attended = act("last_attended", b, attention.q_size)
        self._logits = device.empty("draft.logits", (b, limits.vocab_size), "f32")
        self._narrow(context)
        self._noise = device.empty("draft.noise", (b if context.sampling else 1, limits.vocab_size), "f32")
        self._row_of_seq = ints("row_of_seq", b)  # in a pass of one row a sequence, sequence i is row i
        device.load(self._row_of_seq, np.arange(b, dtype=np.int32))
        table = context.state.block_table
        extend = PassBuffers("draft", self._row_slot, context.step.positions, table)
        advance = PassBuffers("draft", self._slot, self._position, table)
        self._extend_rows = self._rows("rows", extend)
        self._advance_rows = self._rows("seqs", advance)

    def _narrow(self, context: ProposerContext) -> None:
        """What a reduced vocabulary takes: logits over it, and the place of each token in it."""
        ids, limits, device = context.draft_ids, context.limits, context.device
        self._few: tuple[Buffer, Buffer] | None = None
        if ids is not None:
            logits = device.empty("draft.few_logits", (limits.max_seqs, len(ids)), "f32")
            places = device.empty("draft.places", (limits.vocab_size,), "i32")
            device.load(places, places_of(ids, limits.vocab_size))
            self._few = logits, places

    def _rows(self, unit: Unit, buffers: PassBuffers) -> PassRows:
        meta = self._c.init_forward_meta(buffers)
        return PassRows(unit, buffers.row_slot, buffers.positions, buffers.block_table, meta, self._c.limits.block_size)

    def append(self, program: ProgramBuilder, *, sampling: bool) -> None:
        """One pass over the target's rows, then K - 1 passes of one row a sequence."""
        del sampling
        self._begin(program)
        for index in range(self._c.limits.num_drafts):
            room = f"draft {index}"
            rows = self._extend_rows if index == 0 else self._advance_rows
            self._combine(program, index, rows, room)
            self._block(program, index, rows, room)
            self._choose(program, index, room)

    def _begin(self, program: ProgramBuilder) -> None:
        c, s, t = self._c, self._c.state, self._c.step
        pack = PackDraftRowsV1(
            row_slot=t.row_slot, positions=t.positions, phase=s.phase, prompt_len=s.prompt_len,
            num_generated=s.num_generated, tokens=s.tokens, draft_ids=self._ids, draft_row_slot=self._row_slot,
        )  # fmt: skip
        program.add("pack_draft_rows", pack, "rows", "begin_draft")
        begin = BeginDraftV1(
            slot_order=t.slot_order, seq_len=t.seq_len, phase=s.phase, kv_len=s.kv_len, prompt_len=s.prompt_len,
            num_generated=s.num_generated, max_total=s.max_total, drafts=s.drafts, draft_len=s.draft_len,
            draft_slot=self._slot, draft_position=self._position, draft_budget=self._budget,
        )  # fmt: skip
        program.add("begin_draft", begin, "seqs", "begin_draft")
        if self._mtp.feed == "post":
            emit_norm(
                program,
                self._norm,
                c.weights["norm"],
                x=c.target_hidden,
                out=self._fed,
                unit="rows",
                room="begin_draft",
            )

    def _combine(self, program: ProgramBuilder, index: int, rows: PassRows, room: str) -> None:
        """Embed, combine with the state and project: what the decoder block works on."""
        c, mtp, unit = self._c, self._mtp, rows.unit
        ids, state = (self._ids, self._fed) if index == 0 else (self._next_ids, self._recycled())
        program.fill(rows.meta, "draft", index, unit, room)
        emit_embed(program, c.weights, ids=ids, out=self._embedded, unit=unit, room=room)
        combine = CombineDraftInputsV1(
            embedding=self._embedded, hidden=state, emb_norm=c.weights[f"{LAYER}.emb_norm"],
            hid_norm=c.weights[f"{LAYER}.hid_norm"], positions=rows.positions, eps=self._norm.eps,
            plus_one=self._norm.plus_one, order=mtp.order, mask_first_position=mtp.mask_first_position, out=self._combined,
        )  # fmt: skip
        program.add("combine_draft_inputs", combine, unit, room)
        emit_linear(program, c.weights[f"{LAYER}.proj"], x=self._combined, out=self._x, unit=unit, room=room)

    def _block(self, program: ProgramBuilder, index: int, rows: PassRows, room: str) -> None:
        """The decoder block; leaves the newest row of each drafting sequence in `_last`, and its norm. Of the first pass only
        these rows go behind attention, since the others are there for their keys and values. Later passes have one row a
        sequence, which moves all the same: the next pass overwrites `_x` while reading the recycled state."""
        weights = self._c.weights

        def narrow() -> tuple[Buffer, Scratch, Unit]:
            self._select(program, index, self._x, self._last, room)
            self._select(program, index, self._scratch.attended, self._last_attended, room)
            return self._last, replace(self._scratch, attended=self._last_attended), "seqs"

        whole = index > 0 or LAYER in weights  # a block that computes itself takes all rows
        emit_block(
            program, self._mtp.block, self._norm, weights, LAYER,
            x=self._x, rows=rows, cache=self._cache, scratch=self._scratch, room=room, narrow=None if whole else narrow,
        )  # fmt: skip
        if whole:
            self._select(program, index, self._x, self._last, room)
        weight = weights[f"{LAYER}.final_norm" if self._mtp.final_norm == "own" else "norm"]
        emit_norm(program, self._norm, weight, x=self._last, out=self._last_normed, unit="seqs", room=room)

    def _recycled(self) -> Buffer:
        return self._last if self._mtp.recycle == "pre" else self._last_normed

    def _select(self, program: ProgramBuilder, index: int, rows: Buffer, out: Buffer, room: str) -> None:
        """The newest row of each drafting sequence."""
        t = self._c.step
        first = index == 0
        select = SelectLastRowsV1(
            hidden=rows,
            positions=t.positions if first else self._position,
            seq_start=t.seq_start if first else self._row_of_seq,
            draft_slot=self._slot,
            draft_position=self._position,
            out=out,
        )
        program.add("select_last_rows", select, "seqs", room)

    def _choose(self, program: ProgramBuilder, index: int, room: str) -> None:
        """Logits, one token a sequence by the target's own rules and noise, and the step to the next pass."""
        c, s = self._c, self._c.state
        self._score(program, room)
        c.choose(
            program, logits=self._logits, row_slot=self._slot, positions=self._position, ahead=2,
            tokens=self._chosen, noise=self._noise, unit="seqs", room=room,
        )  # fmt: skip
        advance = AdvanceDraftV1(
            pass_index=index, chosen=self._chosen, draft_budget=self._budget, draft_slot=self._slot,
            draft_position=self._position, drafts=s.drafts, draft_len=s.draft_len, next_ids=self._next_ids,
        )  # fmt: skip
        program.add("advance_draft", advance, "seqs", room)

    def _score(self, program: ProgramBuilder, room: str) -> None:
        """Logits of the whole vocabulary; those of tokens that may not be drafted are -inf."""
        weights, x = self._c.weights, self._last_normed
        if self._few is None:
            emit_linear(program, weights["lm_head"], x=x, out=self._logits, unit="seqs", room=room)
            return
        few, places = self._few
        emit_linear(program, weights[DRAFT_HEAD], x=x, out=few, unit="seqs", room=room)
        program.add("spread_logits", SpreadLogitsV1(x=few, places=places, out=self._logits), "seqs", room)
