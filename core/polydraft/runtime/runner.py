"""Owns one step on the device, room by room: upload, pack, target forward, verify, commit, snapshot, propose.

The engine calls `launch` with a plan and later `collect` for its outcome; between the two nothing waits for the device. Where
steps meet host inputs in their middle (`inputs.splits`), `launch` enqueues the target's pass alone and `resume` the rest. It
never sees a request, decides nothing about who runs, and allocates nothing once it is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polydraft.backend import CacheSpec, PassBuffers, Weight
from polydraft.contracts.base import Limits, Unit
from polydraft.contracts.commit_window import CommitWindowV1
from polydraft.contracts.gather_rows import GatherRowsV1
from polydraft.contracts.kv_quant import Kv
from polydraft.contracts.layout import SNAPSHOT_TOKENS
from polydraft.contracts.pack_logit_rows import PackLogitRowsV1
from polydraft.contracts.pack_rows import PackRowsV1
from polydraft.contracts.reserve_blocks import ReserveBlocksV1
from polydraft.contracts.snapshot_output import SnapshotOutputV1
from polydraft.contracts.update_bad_words import UpdateBadWordsV1
from polydraft.contracts.update_biases import UpdateBiasesV1
from polydraft.contracts.update_blocks import UpdateBlocksV1
from polydraft.contracts.update_slots import UpdateSlotsV1
from polydraft.contracts.update_tokens import UpdateTokensV1
from polydraft.device import Array, Buffer, Device, Event, GraphCapture, Staging
from polydraft.models.decoder import Norm, PassRows, emit_block, emit_embed, emit_linear, emit_norm
from polydraft.models.description import ModelDescription
from polydraft.plugins import BoundTable, Plugins
from polydraft.proposers.base import Factory, ProposerContext
from polydraft.runtime.buffers import Scratch, SlotState, StepBuffers
from polydraft.runtime.graphs import CapturedSteps, GraphPolicy, Part, Piece
from polydraft.runtime.host_inputs import FeatureFactory, HostInputs
from polydraft.runtime.logprobs import Logprobs, refuse_lacking
from polydraft.runtime.packed import Snapshots
from polydraft.runtime.plan import StepOutcome, StepPlan
from polydraft.runtime.program import Lengths, Program, ProgramBuilder, StepContext, StepKind, build
from polydraft.runtime.stage import Stage
from polydraft.runtime.verify import PROCESSING, RULES, Verifier


@dataclass(frozen=True)
class Ticket:
    """A step in flight: its plan, where its snapshot lands once the event has completed, and how its rooms are launched: the
    kind of step, the launch lengths, the bucket it is replayed in."""

    plan: StepPlan
    staging: Staging
    event: Event
    kind: str
    lengths: Lengths
    bucket: int | None


Programs = dict[Part, Program]
"""The launches of one kind of step: staged writes ("update"), the target's rooms up to the snapshot (or up to the logits, where
the rest is "verify"), the proposer's behind it."""


WISHES = ((False, False), (True, False), (True, True))
"""Whether a kind of step reports log probabilities of its tokens, and of prompts."""


def has_updates(plan: StepPlan) -> bool:
    """Whether a plan carries staged writes."""
    return bool(len(plan.slot_updates) or len(plan.token_updates) or len(plan.block_updates))


class Runner:
    """Everything between a plan and its outcome. Built once: buffers, caches, metadata, and the programs of each kind of step.

    `lacking`: contracts without which the backend cannot process logits; where there are any, no plan may ask for it."""

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
        verify: str,
        depth: int,
        dtype: str,
        accept_schedule: tuple[float, ...] = (),
        raw_logprobs: bool = True,
        features: Sequence[FeatureFactory] = (),
        draft_ids: Array | None = None,
        kv: Kv = "",
    ) -> None:
        self.device, self.limits, self.model, self.weights = device, limits, model, weights
        self._plugins, self._table, self._dtype, self._depth, self._draft_ids = plugins, table, dtype, depth, draft_ids
        self._kv: Kv = kv
        self.state = SlotState.allocate(device, limits)
        self._stores_noise = verify == "rejection" or "gumbel_noise+sample" not in table.providers
        self.step = StepBuffers.allocate(device, limits, sampling=self._stores_noise)
        self.context = StepContext(row_order=plugins.info().capabilities.row_order)
        self._norm = Norm(model.eps, model.norm_plus_one)
        self._allocate_target()
        context = self._proposer_context()
        self.proposer = proposer(context)
        brought = [*getattr(self.proposer, "features", ()), *(feature(context) for feature in features)]
        self.inputs = HostInputs(device, brought, self.state, depth)
        keep_drafts = verify == "rejection" and limits.num_drafts > 0 and getattr(self.proposer, "soft", False)
        self._logprobs: Logprobs | None = None
        if limits.max_logprobs >= 0:
            refuse_lacking(table.providers)
            self._logprobs = Logprobs(
                device, limits, self.state, self.step, raw=raw_logprobs, verify=verify, draws=keep_drafts, depth=depth
            )
        self._verifier = Verifier(
            device, limits, self.state, self.step,
            num_valid=model.vocab_size, keep_drafts=keep_drafts, schedule=accept_schedule, logprobs=self._logprobs,
        )  # fmt: skip
        self.lacking = tuple(name for name in PROCESSING if name not in table.providers)
        self._kinds = {
            (bool(sampling), processed, logprobs, prompt): StepKind(rule, processed, logprobs, prompt)
            for processed in ((False,) if self.lacking else (False, True))
            for sampling, rule in enumerate(RULES[verify])
            for logprobs, prompt in WISHES[: 1 if self._logprobs is None else len(WISHES)]
        }
        self._names = {wishes: kind.name for wishes, kind in self._kinds.items()}
        self.programs: dict[str, Programs] = {kind.name: self._build(kind) for kind in self._kinds.values()}
        self.graphs: CapturedSteps | None = None
        self._snapshots = Snapshots(limits)
        self.stage = Stage(device, limits, self.step, depth)
        self._outputs = [
            (device.staging(f"snapshot{i}", self.step.record.shape, "i32"), device.event()) for i in range(depth + 1)
        ]

    # -- one step ----------------------------------------------------------------------------------
    def launch(self, plan: StepPlan) -> Ticket:
        """Enqueue a whole step, or its first half where steps meet host inputs in their middle; never blocks."""
        stream, kind, n = self.device.stream, self._kind(plan), self._lengths(plan)
        bucket = self.graphs.choose(plan) if self.graphs and plan.prompt_top is None else None
        context = self.context
        context.real_slots, context.has_prefill, context.use_graph = plan.num_seqs, plan.has_prefill, bucket is not None
        self.stage.upload(stream, plan)
        if self._logprobs is not None:
            self._logprobs.upload(stream, plan)
        self.inputs.upload_first(stream, plan.step_id)
        if has_updates(plan):
            self.programs[kind]["update"].run(stream, n)
        self._run(kind, "step" if self._is_whole(bucket) else "target", n, bucket)
        ticket = Ticket(plan, *self._outputs[plan.step_id % len(self._outputs)], kind, n, bucket)
        if not self.inputs.splits:
            self._finish(ticket)
        return ticket

    def resume(self, ticket: Ticket) -> None:
        """Enqueue the second half of the step launched last, behind its host inputs, which are filled by now; never blocks."""
        self.inputs.upload_middle(self.device.stream, ticket.plan.step_id)
        self._run(ticket.kind, "verify", ticket.lengths, ticket.bucket)
        self._finish(ticket)

    def _finish(self, ticket: Ticket) -> None:
        """Snapshot and drafts. The snapshot's copy stands before the draft passes, so results do not wait for them, unless
        somebody reads the drafts, too, or the whole step is one graph, which it is only where results are read a step late."""
        stream, step_id = self.device.stream, ticket.plan.step_id
        self.device.download(stream, ticket.staging, self.step.record, ticket.plan.num_seqs)
        if self._logprobs is not None:
            self._logprobs.download(stream, ticket.plan)
        if not self.inputs.reads_drafts:
            ticket.event.record(stream)
        if not self._is_whole(ticket.bucket) and ticket.plan.drafting:
            self._run(ticket.kind, "draft", ticket.lengths, ticket.bucket)
        if self.inputs.reads_drafts:
            self.inputs.download_drafts(stream, step_id)
            ticket.event.record(stream)
        self.inputs.consumed(stream)

    def _is_whole(self, bucket: int | None) -> bool:
        """Whether a step is replayed as one graph."""
        return bucket is not None and self.graphs is not None and self.graphs.whole

    def _run(self, kind: str, piece: Piece, n: Lengths, bucket: int | None) -> None:
        """Replay a piece of the step in its bucket, or enqueue its launches one by one."""
        if bucket is None or self.graphs is None:
            assert piece != "step", "only a step that is replayed is whole"
            self.programs[kind][piece].run(self.device.stream, n)
        else:
            self.graphs.replay(kind, piece, bucket)

    def collect(self, ticket: Ticket) -> StepOutcome:
        """Wait for a step's snapshot and decode it: the only host wait of a step."""
        plan = ticket.plan
        ticket.event.synchronize()
        if self.inputs.reads_drafts:
            self.inputs.collect_drafts(plan.step_id)
        record = self._snapshots.read(ticket.staging.array, plan.slots)
        logprobs = None if self._logprobs is None else self._logprobs.collect()
        _, epochs, num_tokens, accepted, drafted, finish, phase, kv_len = record.T[:SNAPSHOT_TOKENS]  # as `Snapshot` says
        return StepOutcome(
            plan.step_id, plan.slots, epochs, num_tokens, accepted, drafted, finish, phase, kv_len, record[:, SNAPSHOT_TOKENS:],
            logprobs,
        )  # fmt: skip

    def void(self) -> None:
        """The device has failed: no step is in flight, and nothing that it was sent counts as there."""
        self.stage.void()
        self.inputs.void()
        if self._logprobs is not None:
            self._logprobs.void()

    def _kind(self, plan: StepPlan) -> str:
        """Name of the kind of step that serves a plan; prompts are reported by steps that report tokens, too."""
        prompt = plan.prompt_top is not None
        return self._names[plan.sampling, plan.processed, prompt or plan.num_top is not None, prompt]

    @staticmethod
    def _lengths(plan: StepPlan) -> Lengths:
        """In the order of `UNITS`."""
        return (
            plan.num_rows, plan.num_logit_rows, plan.num_seqs, len(plan.slot_updates), len(plan.token_updates),
            len(plan.block_updates), len(plan.bias_updates), len(plan.bad_word_updates), plan.num_prompt_rows,
        )  # fmt: skip

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
        return CacheSpec(
            limits.num_blocks, limits.block_size, attention.num_kv_heads, attention.head_dim, self._dtype, kv=self._kv
        )

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
            sampling=self._stores_noise,
            dtype=self._dtype,
            draft_ids=self._draft_ids,
            kv=self._kv,
        )

    def _choose(self, program: ProgramBuilder, **rows: Any) -> None:
        """What a proposer is given: the verifier, which exists only once the proposer does."""
        self._verifier.choose(program, **rows)

    def _build(self, kind: StepKind) -> Programs:
        parts: tuple[Part, ...] = ("update", "target", "verify", "draft") if self.inputs.splits else ("update", "target", "draft")
        builders = {p: ProgramBuilder(f"{kind.name}.{p}", self._table, self.limits, self.context, kind) for p in parts}
        target = builders["target"]
        self._updates(builders["update"])
        self._pack(target)
        self._forward(target)
        verify = builders.get("verify", target)
        self._verifier.verify(verify, (feature.append for feature in self.inputs.features))
        self._commit(verify)
        if kind.logprobs and self._logprobs is not None:
            self._logprobs.append(verify)
        if kind.prompt and self._logprobs is not None:
            self._logprobs.append_prompt(verify, self._head, self.model.vocab_size)
        self.proposer.append(builders["draft"], sampling=kind.rule != "greedy")
        return dict(zip(parts, build(tuple(builders.values())), strict=True))

    def rebind(self) -> None:
        """Bind every program again, and capture again what was captured: some weight lies at another address now."""
        self.programs = {kind.name: self._build(kind) for kind in self._kinds.values()}
        if self.graphs is not None:
            graphs = self.graphs
            self.capture(graphs.policy, graphs.capture, graphs.uncapturable)

    def capture(self, policy: GraphPolicy, capture: GraphCapture, uncapturable: frozenset[str]) -> None:
        """Capture every step that `policy` replays. Called before the first step, and again when an address has changed."""
        self.stage.clear(self.device.stream)
        whole = policy.mode == "decode" and self._depth > 0 and not self.inputs.splits
        self.graphs = CapturedSteps(self.device, capture, policy, self.limits, self.context, uncapturable, whole)
        prompts = {kind.name for kind in self._kinds.values() if kind.prompt}  # such steps are never replayed
        self.graphs.capture_all({name: programs for name, programs in self.programs.items() if name not in prompts})

    def _updates(self, program: ProgramBuilder) -> None:
        s, t = self.state, self.step
        slots = UpdateSlotsV1(
            updates=t.slot_updates, phase=s.phase, prompt_len=s.prompt_len, num_generated=s.num_generated, kv_len=s.kv_len,
            prefill_len=s.prefill_len, max_total=s.max_total, epoch=s.epoch, top_k=s.top_k, finish=s.finish,
            draft_len=s.draft_len, seed=s.seed, temperature=s.temperature, top_p=s.top_p, min_p=s.min_p,
            stop_tokens=s.stop_tokens, drafts=s.drafts, block_table=s.block_table, repetition_penalty=s.repetition_penalty,
            presence_penalty=s.presence_penalty, frequency_penalty=s.frequency_penalty, min_tokens=s.min_tokens,
            num_biases=s.num_biases, bad_len=s.bad_len,
        )  # fmt: skip
        program.add("update_slots", slots, "slot_updates", "upload")
        program.add("update_tokens", UpdateTokensV1(updates=t.token_updates, tokens=s.tokens), "token_updates", "upload")
        blocks = UpdateBlocksV1(updates=t.block_updates, block_table=s.block_table)
        program.add("update_blocks", blocks, "block_updates", "upload")
        if program.kind.processed:
            biases = UpdateBiasesV1(updates=t.bias_updates, bias_ids=s.bias_ids, biases=s.biases)
            program.add("update_biases", biases, "bias_updates", "upload")
            words = UpdateBadWordsV1(updates=t.bad_word_updates, bad_words=s.bad_words)
            program.add("update_bad_words", words, "bad_word_updates", "upload")

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
        self._head(program, t.logit_row, "logit_rows")

    def _head(self, program: ProgramBuilder, rows: Buffer, unit: Unit) -> None:
        """The target's head over the packed rows that are named in `rows`."""
        room, out = "target", self.step.logits
        program.add("gather_rows", GatherRowsV1(x=self.hidden, index=rows, out=self._last), unit, room)
        emit_norm(program, self._norm, self.weights["norm"], x=self._last, out=self._last_normed, unit=unit, room=room)
        emit_linear(program, self.weights["lm_head"], x=self._last_normed, out=out, unit=unit, room=room)

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
