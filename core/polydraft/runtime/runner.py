"""Owns one step on the device, room by room: upload, pack, target forward, verify, commit, snapshot, propose.

The engine calls `launch` with a plan and later `collect` for its outcome; between the two nothing waits for the device. It
never sees a request, decides nothing about who runs, and allocates nothing once it is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polydraft.backend import CacheSpec, PassBuffers, Weight
from polydraft.contracts.argmax import ArgmaxV1
from polydraft.contracts.base import Limits, Unit
from polydraft.contracts.commit_window import CommitWindowV1
from polydraft.contracts.gather_rows import GatherRowsV1
from polydraft.contracts.gumbel_noise import GumbelNoiseV1
from polydraft.contracts.layout import SNAPSHOT_TOKENS, Snapshot
from polydraft.contracts.pack_logit_rows import PackLogitRowsV1
from polydraft.contracts.pack_rows import PackRowsV1
from polydraft.contracts.process_logits import ProcessLogitsV1
from polydraft.contracts.reserve_blocks import ReserveBlocksV1
from polydraft.contracts.sample import SampleV1
from polydraft.contracts.snapshot_output import SnapshotOutputV1
from polydraft.contracts.update_blocks import UpdateBlocksV1
from polydraft.contracts.update_slots import UpdateSlotsV1
from polydraft.contracts.update_tokens import UpdateTokensV1
from polydraft.contracts.verify_match import VerifyMatchV1
from polydraft.device import Buffer, Device, Event, Staging
from polydraft.models.decoder import Norm, PassRows, emit_block, emit_embed, emit_linear, emit_norm
from polydraft.models.description import ModelDescription
from polydraft.plugins import BoundTable, Plugins
from polydraft.proposers.base import Factory, ProposerContext
from polydraft.runtime.buffers import Scratch, SlotState, StepBuffers
from polydraft.runtime.plan import StepOutcome, StepPlan
from polydraft.runtime.program import Lengths, Program, ProgramBuilder, StepContext, lengths
from polydraft.runtime.stage import Stage


@dataclass(frozen=True)
class Ticket:
    """A step in flight: its plan, and where its snapshot lands once the event has completed."""

    plan: StepPlan
    staging: Staging
    event: Event


@dataclass(frozen=True)
class Programs:
    """The launches of one kind of step: staged writes, the target's rooms up to the snapshot, the proposer's behind it."""

    update: Program
    target: Program
    draft: Program


class Runner:
    """Everything between a plan and its outcome. Built once: buffers, caches, metadata, and two kinds of programs."""

    def __init__(
        self,
        *,
        device: Device,
        plugins: Plugins,
        table: BoundTable,
        model: ModelDescription,
        weights: Mapping[str, Weight],
        limits: Limits,
        proposer: Factory,
        depth: int,
        dtype: str,
    ) -> None:
        self.device, self.limits, self.model, self.weights = device, limits, model, weights
        self._plugins, self._table, self._dtype = plugins, table, dtype
        self.state = SlotState.allocate(device, limits)
        self.step = StepBuffers.allocate(device, limits, sampling="gumbel_noise+sample" not in table.providers)
        self.context = StepContext()
        self._norm = Norm(model.eps, model.norm_plus_one)
        self._allocate_target()
        self.proposer = proposer(self._proposer_context())
        self.programs = {sampling: self._build(sampling) for sampling in (False, True)}
        self._stage = Stage(device, limits, self.step, depth)
        self._outputs = [
            (device.staging(f"snapshot{i}", self.step.record.shape, "i32"), device.event()) for i in range(depth + 1)
        ]

    # -- one step ----------------------------------------------------------------------------------
    def launch(self, plan: StepPlan) -> Ticket:
        """Enqueue a whole step; never blocks. The snapshot's copy stands before the draft passes, so results do not wait
        for them."""
        stream, programs = self.device.stream, self.programs[plan.sampling]
        self.context.real_slots, self.context.has_prefill = plan.num_seqs, plan.has_prefill
        n = self._lengths(plan)
        self._stage.upload(stream, plan)
        programs.update.run(stream, n) if self._has_updates(plan) else None
        programs.target.run(stream, n)
        staging, event = self._outputs[plan.step_id % len(self._outputs)]
        self.device.download(stream, staging, self.step.record, plan.num_seqs)
        event.record(stream)
        programs.draft.run(stream, n)
        return Ticket(plan, staging, event)

    def collect(self, ticket: Ticket) -> StepOutcome:
        """Wait for a step's snapshot and decode it: the only host wait of a step."""
        ticket.event.synchronize()
        record = ticket.staging.array[: ticket.plan.num_seqs].copy()
        column = record.T
        return StepOutcome(
            step_id=ticket.plan.step_id,
            slots=column[Snapshot.SLOT],
            epochs=column[Snapshot.EPOCH],
            num_tokens=column[Snapshot.NUM_TOKENS],
            accepted=column[Snapshot.ACCEPTED],
            drafted=column[Snapshot.DRAFTED],
            finish=column[Snapshot.FINISH],
            phase=column[Snapshot.PHASE],
            kv_len=column[Snapshot.KV_LEN],
            tokens=record[:, SNAPSHOT_TOKENS:],
        )

    @staticmethod
    def _has_updates(plan: StepPlan) -> bool:
        return bool(len(plan.slot_updates) or len(plan.token_updates) or len(plan.block_updates))

    @staticmethod
    def _lengths(plan: StepPlan) -> Lengths:
        return lengths(
            rows=plan.num_rows,
            logit_rows=plan.num_logit_rows,
            seqs=plan.num_seqs,
            slot_updates=len(plan.slot_updates),
            token_updates=len(plan.token_updates),
            block_updates=len(plan.block_updates),
        )

    # -- building ----------------------------------------------------------------------------------
    def _allocate_target(self) -> None:
        device, limits, model = self.device, self.limits, self.model
        h, r, nl = model.hidden_size, limits.max_rows, limits.max_logit_rows
        self.hidden = device.empty("target.hidden", (r, h), self._dtype)
        self._last = device.empty("target.last", (nl, h), self._dtype)
        self._last_normed = device.empty("target.last_normed", (nl, h), self._dtype)
        shapes = dict.fromkeys(model.blocks)
        self._scratch = {b: Scratch.allocate(device, limits, hidden=h, block=b, dtype=self._dtype) for b in shapes}
        self.caches = [self._table.allocate_cache(self._cache_spec(block.attention)) for block in model.blocks]
        rows = PassBuffers("target", self.step.row_slot, self.step.positions, self.state.block_table)
        meta = self._plugins.init_forward_meta(device, rows, limits)
        self._rows = PassRows("rows", rows.row_slot, rows.positions, rows.block_table, meta, limits.block_size)

    def _cache_spec(self, attention: Any) -> CacheSpec:
        limits = self.limits
        return CacheSpec(limits.num_blocks, limits.block_size, attention.num_kv_heads, attention.head_dim, self._dtype)

    def _proposer_context(self) -> ProposerContext:
        return ProposerContext(
            device=self.device,
            limits=self.limits,
            model=self.model,
            weights=self.weights,
            state=self.state,
            step=self.step,
            target_hidden=self.hidden,
            scratch=self._scratch[self.model.blocks[0]],
            allocate_cache=self._table.allocate_cache,
            init_forward_meta=lambda rows: self._plugins.init_forward_meta(self.device, rows, self.limits),
            choose=self._choose,
            sampling="gumbel_noise+sample" not in self._table.providers,
            dtype=self._dtype,
        )

    def _build(self, sampling: bool) -> Programs:
        kind = "sampling" if sampling else "greedy"
        builders = [ProgramBuilder(f"{kind}.{n}", self._table, self.limits, self.context) for n in ("update", "target", "draft")]
        update, target, draft = builders
        self._updates(update)
        self._pack(target)
        self._forward(target)
        self._verify(target, sampling)
        self._commit(target)
        self.proposer.append(draft, sampling=sampling)
        return Programs(*(builder.build() for builder in builders))

    def _updates(self, program: ProgramBuilder) -> None:
        s, t = self.state, self.step
        slots = UpdateSlotsV1(
            updates=t.slot_updates, phase=s.phase, prompt_len=s.prompt_len, num_generated=s.num_generated, kv_len=s.kv_len,
            prefill_len=s.prefill_len, max_total=s.max_total, epoch=s.epoch, top_k=s.top_k, finish=s.finish,
            draft_len=s.draft_len, seed=s.seed, temperature=s.temperature, top_p=s.top_p, min_p=s.min_p,
            stop_tokens=s.stop_tokens, drafts=s.drafts, block_table=s.block_table,
        )  # fmt: skip
        program.add("update_slots", slots, "slot_updates", "upload")
        program.add("update_tokens", UpdateTokensV1(updates=t.token_updates, tokens=s.tokens), "token_updates", "upload")
        blocks = UpdateBlocksV1(updates=t.block_updates, block_table=s.block_table)
        program.add("update_blocks", blocks, "block_updates", "upload")

    def _pack(self, program: ProgramBuilder) -> None:
        s, t = self.state, self.step
        reserve = ReserveBlocksV1(
            slot_order=t.slot_order, phase=s.phase, kv_len=s.kv_len, draft_len=s.draft_len, max_total=s.max_total,
            block_table=s.block_table, block_size=self.limits.block_size, lookahead=self.limits.num_drafts,
        )  # fmt: skip
        program.add("reserve_blocks", reserve, "seqs", "pack")
        counters = {n: getattr(s, n) for n in ("phase", "kv_len", "prefill_len", "prompt_len", "num_generated")}
        pack = PackRowsV1(
            slot_order=t.slot_order, seq_rows=t.seq_rows, tokens=s.tokens, drafts=s.drafts, draft_len=s.draft_len,
            ids=t.ids, row_slot=t.row_slot, positions=t.positions, seq_start=t.seq_start, seq_len=t.seq_len, **counters,
        )  # fmt: skip
        program.add("pack_rows", pack, "rows", "pack")
        pack_logits = PackLogitRowsV1(
            slot_order=t.slot_order, seq_start=t.seq_start, seq_len=t.seq_len, logit_row=t.logit_row,
            logit_slot=t.logit_slot, logit_position=t.logit_position, logit_start=t.logit_start, logit_len=t.logit_len,
            **counters,
        )  # fmt: skip
        program.add("pack_logit_rows", pack_logits, "logit_rows", "pack")

    def _forward(self, program: ProgramBuilder) -> None:
        t, room = self.step, "target"
        emit_embed(program, self.weights, ids=t.ids, out=self.hidden, unit="rows", room=room)
        program.fill(self._rows.meta, "target", 0, "rows", room)
        for index, (block, cache) in enumerate(zip(self.model.blocks, self.caches, strict=True)):
            emit_block(
                program, block, self._norm, self.weights, f"layers.{index}",
                x=self.hidden, rows=self._rows, cache=cache, scratch=self._scratch[block], room=room,
            )  # fmt: skip
        gather = GatherRowsV1(x=self.hidden, index=t.logit_row, out=self._last)
        program.add("gather_rows", gather, "logit_rows", room)
        emit_norm(program, self._norm, self.weights["norm"], x=self._last, out=self._last_normed, unit="logit_rows", room=room)
        emit_linear(program, self.weights["lm_head"], x=self._last_normed, out=t.logits, unit="logit_rows", room=room)

    def _verify(self, program: ProgramBuilder, sampling: bool) -> None:
        s, t = self.state, self.step
        self._choose(
            program, logits=t.logits, row_slot=t.logit_slot, positions=t.logit_position, ahead=0, tokens=t.choices,
            noise=t.noise, unit="logit_rows", room="verify", sampling=sampling,
        )  # fmt: skip
        verify = VerifyMatchV1(
            choices=t.choices, slot_order=t.slot_order, phase=s.phase, logit_start=t.logit_start, logit_len=t.logit_len,
            drafts=s.drafts, window=t.window, window_len=t.window_len, accepted=t.accepted, drafted=t.drafted,
        )  # fmt: skip
        program.add("verify_match", verify, "seqs", "verify")

    def _choose(
        self, program: ProgramBuilder, *, logits: Buffer, row_slot: Buffer, positions: Buffer, ahead: int, tokens: Buffer,
        noise: Buffer, unit: Unit, room: str, sampling: bool,
    ) -> None:  # fmt: skip
        """One token a row, for target and draft alike: process, then argmax, or noise of the position and sampling."""
        s = self.state
        process = ProcessLogitsV1(logits=logits, row_slot=row_slot, num_valid=self.model.vocab_size)
        program.add("process_logits", process, unit, room)
        if not sampling:
            program.add("argmax", ArgmaxV1(logits=logits, row_slot=row_slot, tokens=tokens), unit, room)
            return
        make = GumbelNoiseV1(
            row_slot=row_slot,
            positions=positions,
            seed=s.seed,
            temperature=s.temperature,
            ahead=ahead,
            draw=0,
            noise=noise,
        )
        program.add("gumbel_noise", make, unit, room)
        choose = SampleV1(
            logits=logits, noise=noise, row_slot=row_slot, temperature=s.temperature, top_p=s.top_p, min_p=s.min_p,
            top_k=s.top_k, tokens=tokens,
        )  # fmt: skip
        program.add("sample", choose, unit, room)

    def _commit(self, program: ProgramBuilder) -> None:
        s, t = self.state, self.step
        commit = CommitWindowV1(
            slot_order=t.slot_order, seq_len=t.seq_len, window=t.window, window_len=t.window_len, accepted=t.accepted,
            prompt_len=s.prompt_len, prefill_len=s.prefill_len, max_total=s.max_total, stop_tokens=s.stop_tokens,
            tokens=s.tokens, num_generated=s.num_generated, kv_len=s.kv_len, phase=s.phase, finish=s.finish,
            out_tokens=t.out_tokens, out_len=t.out_len, out_accepted=t.out_accepted,
        )  # fmt: skip
        program.add("commit_window", commit, "seqs", "commit")
        snapshot = SnapshotOutputV1(
            slot_order=t.slot_order, epoch=s.epoch, out_len=t.out_len, out_accepted=t.out_accepted, drafted=t.drafted,
            finish=s.finish, phase=s.phase, kv_len=s.kv_len, out_tokens=t.out_tokens, record=t.record,
        )  # fmt: skip
        program.add("snapshot_output", snapshot, "seqs", "snapshot")
