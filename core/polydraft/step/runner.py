"""One step on the device: upload, pack, target forward, verify, commit, snapshot, propose.

The modules of an engine (the batch's state machine, the model, logits processing, the verifier, a proposer, host features)
declare what they need. The runner allocates it, lets each module append its launches to the programs of every step kind, and
binds them. The buffers that it handles itself are those that cross between host and device: the plan, host inputs, the snapshot,
and log probabilities, which have a record of their own to copy and to read. `launch` turns a plan into launches, and `collect`
turns the snapshot into an outcome. Nothing between the two waits for the device. If a step takes host inputs in its middle
(`InFlightStep.split`), `launch` enqueues only the target's pass, and `resume` enqueues the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polydraft.backend import PassBuffers, Weight
from polydraft.contracts.base import Limits
from polydraft.contracts.kv_quant import Kv
from polydraft.contracts.layout import SNAPSHOT_TOKENS
from polydraft.device import Array, Device, Event, GraphCapture, Staging, Stream
from polydraft.errors import ConfigError
from polydraft.loading import Loading, unheard
from polydraft.models.block import Block, scratch_buffers
from polydraft.models.decoder import Target
from polydraft.models.description import ModelDescription
from polydraft.plugins.plugins import BoundTable, Plugins
from polydraft.program.columns import BLOCK_TABLE, check_columns, max_payload, max_runs
from polydraft.program.declare import Column, LogitsStage, StepBuffer
from polydraft.program.host_inputs import FeatureFactory, HostInputs
from polydraft.program.packed import Snapshots
from polydraft.program.plan import Drafted, StepOutcome, StepPlan
from polydraft.program.points import Points, Replay
from polydraft.program.program import (
    JoinedLaunches,
    Lengths,
    Memory,
    Program,
    ProgramBuilder,
    StepContext,
    StepKind,
    build,
    joined_launches,
)
from polydraft.proposers.base import ProposerContext, ProposerFactory
from polydraft.sampling.logprobs import Logprobs, refuse_lacking
from polydraft.sampling.processing import Processing
from polydraft.sampling.thinking import Markers
from polydraft.sampling.thinking_stage import ThinkingLimits
from polydraft.sampling.verify import RULES, Verifier
from polydraft.step.batch import Batch
from polydraft.step.graphs import CapturedSteps, GraphPolicy, Held, Part, Piece, Shape
from polydraft.step.uploads import NUMBER, Uploads


@dataclass(frozen=True)
class InFlightStep:
    """An in-flight step: its plan, where its snapshot is once the event has completed, and how it was launched (step kind, launch
    lengths, the captured shape that it is replayed in, and whether in two halves)."""

    plan: StepPlan
    staging: Staging
    event: Event
    kind: str
    lengths: Lengths
    shape: Shape | None
    split: bool


Programs = dict[Part, Program]
"""The launches of one step kind. "target": the target's stages up to the snapshot; if the step is split for host inputs, "target"
ends at the logits and "verify" is the rest. "draft": the proposer's launches for a step with the maximum number of drafts."""

REQUESTED_OUTPUTS = ((False, False), (True, False), (True, True))
"""Whether a step kind reports log probabilities of its tokens, and of prompts."""


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The resolved options from which the steps of an engine are built."""

    limits: Limits
    dtype: str
    """Dtype of activations."""
    verify: str
    overlap: int
    """Maximum number of steps that are launched and not yet collected while the next one is planned."""
    rungs: tuple[int, ...]
    """Numbers of drafts that a step may make, ascending; the last is the maximum."""
    kv: Kv = ""
    accept_schedule: tuple[float, ...] = ()
    raw_logprobs: bool = True
    """Whether log probabilities are those of the logits before logits processing."""
    draft_logprobs: bool = False
    """Whether drafts are reported with their most likely tokens."""
    proposer_options: Mapping[str, float] = field(default_factory=dict)
    thinking: Markers | None = None
    """What is around thinking; None where nothing is known to end it."""
    keeps_drafts: bool = False
    """Whether the drafts of each step are copied to the host, for whoever reads them later (`LateDrafts`)."""


class Lookups:
    """The column of a proposer that says from which place on a slot's drafts were looked up, copied up with each snapshot: then
    it says so of the drafts that the step has verified."""

    def __init__(self, memory: Memory, column: str, depth: int) -> None:
        self._device, self._column = memory.device, memory.buffers[column]
        self._landing = [memory.device.staging(f"{column}{i}", self._column.shape, "i32") for i in range(depth + 1)]

    def download(self, stream: Stream, step_id: int) -> None:
        """Enqueue the copy; before the draft passes of the step."""
        self._device.download(stream, self._landing[step_id % len(self._landing)], self._column, self._column.shape[0])

    def collect(self, plan: StepPlan, drafted: Array) -> Array:
        """[n] int32: of the `drafted` drafts that each sequence has verified those, the last ones, that were looked up."""
        own = self._landing[plan.step_id % len(self._landing)].array[plan.slots]
        looked_up: Array = np.maximum(drafted - own, 0)
        return looked_up


class LateDrafts:
    """The drafts of each step, copied behind its draft passes: nobody waits for them, and they may be read once a later step was
    collected."""

    def __init__(self, memory: Memory, column: str, state: str, depth: int) -> None:
        """`column`: where drafts are partly looked up, the one that says from which place on; `state`: the buffer with what the
        proposer feeds back, by sequence; "" for none."""
        self._device = memory.device
        self._has_column, self._has_state = bool(column), bool(state)
        self._sources = [memory.buffers[name] for name in ("drafts", "draft_len", *filter(None, (column, state)))]
        self._landing = [
            [memory.device.staging(f"late.{source.name}{i}", source.shape, source.dtype) for source in self._sources]
            for i in range(depth + 2)
        ]
        self._passes = [0] * len(self._landing)

    def download(self, stream: Stream, step_id: int, passes: int) -> None:
        """Enqueue the copy behind a step that ran so many draft passes."""
        place = step_id % len(self._landing)
        self._passes[place] = passes
        for staging, source in zip(self._landing[place], self._sources, strict=True):
            np.any(staging.array)  # of most steps nobody looks at them, which `--sanitize` would take for results that are lost
            self._device.download(stream, staging, source, source.shape[0])

    def of(self, plan: StepPlan, slot: int) -> Drafted:
        """Of one slot, of the step before the one that was collected last."""
        place = plan.step_id % len(self._landing)
        arrays = [staging.array for staging in self._landing[place]]
        size = int(min(arrays[1][slot], arrays[2][slot]) if self._has_column else arrays[1][slot])
        last = self._has_state and size == self._passes[place]  # else its last pass was not the step's
        state = arrays[-1][plan.slots.tolist().index(slot)].tobytes() if last else b""
        return Drafted(arrays[0][slot, :size].copy(), state)


class Runner:
    """Turns a plan into an outcome. It is built once, with its memory and the programs of each step kind."""

    def __init__(
        self,
        config: StepConfig,
        *,
        device: Device,
        plugins: Plugins,
        table: BoundTable,
        model: ModelDescription,
        weights: Mapping[str, Weight],
        proposer: ProposerFactory,
        features: Sequence[FeatureFactory] = (),
        stages: Sequence[tuple[str, LogitsStage]] = (),
        draft_ids: Array | None = None,
        draft_model: str = "",
        rank: int = 0,
        points: Points | None = None,
    ) -> None:
        self.device, self.limits, self.model, self._table, self._config = device, config.limits, model, table, config
        self.points = Points() if points is None else points
        limits, depth = config.limits, config.overlap
        self.memory = Memory(device, limits, config.dtype, weights=weights, ranks=model.ranks)
        self.context = StepContext()
        rejects = config.verify == "rejection"
        stores_noise = rejects or "gumbel_noise+sample" not in table.providers
        self._batch = Batch(limits)
        self.processing = Processing(table.providers, stages, [ThinkingLimits(config.thinking)] if config.thinking else [])
        context = ProposerContext(
            limits, model, self._choose, stores_noise, config.dtype, draft_ids, draft_model, config.proposer_options, rank
        )
        self._factory, self.proposer = proposer, proposer.make(context)
        brought = [*getattr(self.proposer, "features", ()), *(feature(context) for feature in features)]
        self._target = Target(model, limits, _mapped((self.proposer, *brought), "taps"))
        keep_drafts = rejects and limits.num_drafts > 0 and getattr(self.proposer, "soft", False)
        self._logprobs: Logprobs | None = None
        if limits.max_logprobs >= 0:
            refuse_lacking(
                table.providers, filters=not config.raw_logprobs and config.verify != "greedy", drafts=config.draft_logprobs
            )
            self._logprobs = Logprobs(
                limits, raw=config.raw_logprobs, verify=config.verify, draws=keep_drafts,
                drafts=config.draft_logprobs and limits.num_drafts > 0,
            )  # fmt: skip
        self._verifier = Verifier(
            self.processing, num_valid=model.vocab_size, stores_noise=stores_noise, keep_drafts=keep_drafts,
            schedule=config.accept_schedule, logprobs=self._logprobs,
        )  # fmt: skip
        modules = (self._batch, self._verifier, self.processing, self._target, self._logprobs, self.proposer, *brought)
        self._allocate(plugins, modules)
        self.inputs = HostInputs(self.memory, brought, depth)
        if self._logprobs is not None:
            self._logprobs.attach(self.memory, depth)
        self._kinds = {
            (bool(sampling), processed, logprobs, prompt, bound): StepKind(rule, processed, logprobs, prompt, bound)
            for bound in ((False, True) if self.inputs.tells_bound else (False,))
            for processed in ((False, True) if self.processing.possible else (False,))
            for sampling, rule in enumerate(RULES[config.verify])
            for logprobs, prompt in REQUESTED_OUTPUTS[: 1 if self._logprobs is None else len(REQUESTED_OUTPUTS)]
        }
        self._names = {requested: kind.name for requested, kind in self._kinds.items()}
        self._build_programs()
        self.graphs: CapturedSteps | None = None
        self._snapshots = Snapshots(limits)
        self.uploads = Uploads(device, self.memory.buffers, depth)
        column = getattr(self.proposer, "lookups_from", "")
        self._lookups = Lookups(self.memory, column, depth) if column else None
        state = getattr(self.proposer, "state", "")
        self.late_drafts = LateDrafts(self.memory, column, state, depth) if config.keeps_drafts else None
        self._record = self.memory.buffers["record"]
        staging = [device.staging(f"snapshot{i}", self._record.shape, "i32") for i in range(depth + 1)]
        self._outputs = [(landing, device.event()) for landing in staging]

    # -- one step ----------------------------------------------------------------------------------
    def launch(self, plan: StepPlan) -> InFlightStep:
        """Enqueue a whole step, or its first half if steps take host inputs in their middle; never blocks."""
        stream, kind, n = self.device.stream, self._kind(plan), self._lengths(plan)
        shape = self._shape(plan)
        context = self.context
        context.real_slots, context.has_prefill = plan.num_seqs, plan.has_prefill
        if self.points.upload:
            self.points.notify_around("upload", plan, self.uploads.upload, stream, plan)
        else:
            self.uploads.upload(stream, plan)
        self.inputs.upload_first(stream, plan.step_id)
        if plan.writes:
            self.writes["admit" if plan.writes.admits else "grant"].run(stream, n)
        split = self.inputs.splits(bound=plan.bound)
        flight = InFlightStep(plan, *self._outputs[plan.step_id % len(self._outputs)], kind, n, shape, split)
        self._run("step" if self._is_whole(flight) else "target", flight)
        if not split:
            self._finish(flight)
        return flight

    def resume(self, flight: InFlightStep) -> None:
        """Enqueue the second half of the last launched step, after its host inputs, which must be filled; never blocks."""
        self.inputs.upload_middle(self.device.stream, flight.plan.step_id, bound=flight.plan.bound)
        self._run("verify", flight)
        self._finish(flight)

    def _finish(self, flight: InFlightStep) -> None:
        """Enqueue the snapshot's copy and the draft passes. The copy comes first, so results do not wait for the drafts, with
        two exceptions: a host feature reads the drafts, or the whole step is one graph, whose results are read one step late."""
        stream, step_id = self.device.stream, flight.plan.step_id
        reads_drafts = self.inputs.reads_drafts(bound=flight.plan.bound)
        self.device.download(stream, flight.staging, self._record, flight.plan.num_seqs)
        if self._lookups is not None:
            self._lookups.download(stream, step_id)
        if self._logprobs is not None:
            self._logprobs.download(stream, flight.plan)
        if not reads_drafts:
            flight.event.record(stream)
        if not self._is_whole(flight) and flight.plan.drafting:
            self._run("draft", flight)
        if reads_drafts:
            self.inputs.download_drafts(stream, step_id)
            flight.event.record(stream)
        if self.late_drafts is not None:
            # A graph may have been captured for more drafts than the plan asks for, and then makes them.
            passes = flight.plan.num_made if flight.shape is None else flight.shape.num_drafts
            self.late_drafts.download(stream, step_id, passes)
        if flight.split:
            self.inputs.consumed(stream)

    def _shape(self, plan: StepPlan) -> Shape | None:
        """The captured shape that a step is replayed in; None if its launches are enqueued one by one."""
        points = self.points
        if self.graphs is None or plan.prompt_top is not None or (points.eager and points.wants_eager(plan)):
            return None
        return self.graphs.choose(plan)

    def _is_whole(self, flight: InFlightStep) -> bool:
        """Whether a step is replayed as one graph."""
        return flight.shape is not None and self.graphs is not None and self.graphs.whole and not flight.split

    def _run(self, piece: Piece, flight: InFlightStep) -> None:
        """Replay a captured piece of the step, or enqueue its launches one by one."""
        kind, shape = flight.kind, flight.shape
        if shape is None or self.graphs is None:
            assert piece != "step", "only a step that is replayed is whole"
            program = self.drafts[kind][flight.plan.num_drafts] if piece == "draft" else self.programs[kind][piece]
            beside = self.graphs is not None and not self.points.eager
            program.run(self.device.stream, flight.lengths, beside_graphs=beside)
        elif self.points.replay:
            self.points.notify_around("replay", Replay(kind, piece, *shape), self.graphs.replay, kind, piece, shape)
        else:
            self.graphs.replay(kind, piece, shape)

    def collect(self, flight: InFlightStep) -> StepOutcome:
        """Wait for a step's snapshot and decode it: the only host wait of a step."""
        plan = flight.plan
        if self.points.wait:
            self.points.notify_around("wait", flight, flight.event.synchronize)
        else:
            flight.event.synchronize()
        if self.inputs.reads_drafts(bound=plan.bound):
            self.inputs.collect_drafts(plan.step_id)
        record = self._snapshots.read(flight.staging.array, plan.slots)
        logprobs = None if self._logprobs is None else self._logprobs.collect()
        _, epochs, num_tokens, accepted, drafted, finish, phase, kv_len = record.T[:SNAPSHOT_TOKENS]  # as `Snapshot` says
        looked_up = None if self._lookups is None else self._lookups.collect(plan, drafted)
        return StepOutcome(
            plan.step_id, plan.slots, epochs, num_tokens, accepted, drafted, finish, phase, kv_len, record[:, SNAPSHOT_TOKENS:],
            looked_up, logprobs,
        )  # fmt: skip

    def reset(self) -> None:
        """After a device failure: no step is in flight, and everything sent to the device has to be sent again."""
        self.uploads.reset()
        self.inputs.reset()
        if self._logprobs is not None:
            self._logprobs.reset()

    def _kind(self, plan: StepPlan) -> str:
        """Name of the step kind of a plan. A step that reports prompts reports tokens, too."""
        prompt = plan.prompt_top is not None
        bound = plan.bound and self.inputs.tells_bound
        return self._names[plan.sampling, plan.processed, prompt or plan.num_top is not None, prompt, bound]

    @staticmethod
    def _lengths(plan: StepPlan) -> Lengths:
        """In the order of `UNITS`."""
        return plan.num_rows, plan.num_logit_rows, plan.num_seqs, len(plan.writes.runs), plan.num_prompt_rows

    # -- building ----------------------------------------------------------------------------------
    def _allocate(self, plugins: Plugins, modules: Sequence[object]) -> None:
        """Allocate what the modules declare, the buffers for staged runs, and the metadata of each kind of pass."""
        limits, memory = self.limits, self.memory
        self.columns: tuple[Column, ...] = tuple(_declared(modules, "columns"))
        check_columns(self.columns, limits)
        staged = (
            StepBuffer("runs", f"{max_runs(self.columns, limits)} 5"),
            StepBuffer("payload", str(max_payload(self.columns, limits))),
        )
        numbered = (StepBuffer(NUMBER, "1", initial=0),) if memory.ranks > 1 else ()
        memory.allocate((*self.columns, *staged, *numbered, *_declared(modules, "buffers")))
        blocks: dict[str, Block] = _mapped(modules, "blocks")
        own = getattr(self.proposer, "hidden_size", self.model.hidden_size)
        scratch: dict[str, StepBuffer] = {}
        across = memory.ranks > 1 and memory.act != "f32"
        for module in modules:
            width = own if module is self.proposer else self.model.hidden_size
            of_blocks = getattr(module, "blocks", {}).values()
            scratch |= {one.name: one for one in scratch_buffers(of_blocks, width, across=across)}
        memory.allocate(scratch.values())
        for prefix, cache in ((prefix, cache) for prefix, block in blocks.items() for cache in block.caches):
            memory.allocate(cache.buffers(prefix, limits))
            spec = cache.spec(limits, memory.act, self._config.kv)
            if spec is not None:
                memory.caches[prefix] = self._table.allocate_cache(spec)
        for one in _declared(modules, "passes"):
            rows, positions = memory.buffers[one.row_slot], memory.buffers[one.positions]
            buffers = PassBuffers(one.role, rows, positions, memory.buffers[BLOCK_TABLE])
            memory.metas[one.name] = plugins.init_forward_meta(self.device, buffers, limits)

    def _choose(self, program: ProgramBuilder, **rows: Any) -> None:
        """The choice of tokens as a proposer gets it. The verifier is built after the proposer, hence this method."""
        self._verifier.choose(program, **rows)

    def _build_programs(self) -> None:
        self.writes: dict[str, Program] = {
            "admit": self._scatter("admit", [column.name for column in self.columns]),
            "grant": self._scatter("grant", [BLOCK_TABLE]),
        }
        """Programs that write slot columns: all columns, or the block table alone. They are never captured."""
        self.programs: dict[str, Programs] = {}
        self.drafts: dict[str, dict[int, Program]] = {}
        """The proposer's launches, by step kind and by number of drafts that the step makes."""
        for kind in self._kinds.values():
            self.programs[kind.name], self.drafts[kind.name] = self._build(kind)

    def _scatter(self, name: str, columns: Sequence[str]) -> Program:
        program = ProgramBuilder(name, self._table, self.memory, self.context)
        program.add("scatter", "runs", "upload", columns=columns)
        return program.build()

    def _build(self, kind: StepKind) -> tuple[Programs, dict[int, Program]]:
        def builder(name: str) -> ProgramBuilder:
            return ProgramBuilder(f"{kind.name}.{name}", self._table, self.memory, self.context, kind)

        target = builder("target")
        self._batch.pack(target)
        self._target.forward(target)
        split = self.inputs.splits(bound=kind.bound)
        verify = builder("verify") if split else target
        self._verifier.verify(verify, (feature.append for feature in self.inputs.of(bound=kind.bound)))
        self._batch.commit(verify)
        if kind.processed:
            self.processing.commit(verify)
        if kind.logprobs and self._logprobs is not None:
            self._logprobs.append(verify)
        if kind.prompt and self._logprobs is not None:
            self._logprobs.append_prompt(verify, self._target.head, self.model.vocab_size)
        most = self.limits.num_drafts
        drafts = {rung: builder("draft" if rung == most else f"draft of {rung}") for rung in self._config.rungs}
        for rung, draft in drafts.items():
            with self._factory.named("append"):
                self.proposer.append(draft, rung)
        always: dict[Part, ProgramBuilder] = {"target": target, "verify": verify} if split else {"target": target}
        built = build((*always.values(), *drafts.values()))
        by_rung = dict(zip(drafts, built[len(always) :], strict=True))
        return {**dict(zip(always, built, strict=False)), "draft": by_rung[most]}, by_rung

    def joined(self) -> list[JoinedLaunches]:
        """The launches that became one in the programs, for `--explain` and reports."""
        return joined_launches([
            program
            for kind, parts in self.programs.items()
            for program in (*(program for part, program in parts.items() if part != "draft"), *self.drafts[kind].values())
        ])  # fmt: skip

    def captured(self) -> dict[int, Held]:
        """The graphs by number of drafts, for `--explain` and reports; empty without graphs."""
        return self.graphs.held if self.graphs is not None else {}

    def rebind(self) -> None:
        """Bind and capture every program again, because some weight has a new address."""
        self._build_programs()
        if self.graphs is not None:
            policy, capture, uncapturable = self.graphs.policy, self.graphs.capture, self.graphs.uncapturable
            self.capture(policy, capture, uncapturable, self.graphs.everywhere)

    def capture(
        self, policy: GraphPolicy, capture: GraphCapture, uncapturable: frozenset[str], everywhere: Callable[[bool], bool] = bool,
        loading: Loading = unheard,
    ) -> None:  # fmt: skip
        """Capture every step that `policy` replays, `everywhere` alike. Called before the first step, and again when an address
        has changed. `loading` is told how far that is. Where it fails all steps run without graphs."""
        self.uploads.clear(self.device.stream)
        whole = policy.mode == "decode" and self._config.overlap > 0
        self.graphs = None  # what there was is of no use any more, and the new ones want its memory
        graphs = CapturedSteps(
            self.device, capture, policy, self.limits, self.context, uncapturable, whole, everywhere=everywhere
        )  # fmt: skip
        prompts = {kind.name for kind in self._kinds.values() if kind.prompt}  # such steps are never replayed
        by_kind = {
            name: {rung: {**programs, "draft": draft} for rung, draft in self.drafts[name].items()}
            for name, programs in self.programs.items()
            if name not in prompts
        }
        graphs.capture_all(by_kind, loading)
        self.graphs = graphs


def _declared(modules: Iterable[object], what: str) -> list[Any]:
    """The declarations in the attribute `what` of all modules; a module without any needs no such attribute."""
    return [one for module in modules for one in getattr(module, what, ())]


def _mapped(modules: Iterable[object], what: str) -> dict[str, Any]:
    """The same for declarations by name. Raises `ConfigError` if two have the same name."""
    found: dict[str, Any] = {}
    for module in modules:
        declared: Mapping[str, Any] = getattr(module, what, {})
        if twice := found.keys() & declared.keys():
            raise ConfigError(f"two modules declare {what} called {min(twice)!r}, wanted one; rename it in one of them")
        found |= declared
    return found
