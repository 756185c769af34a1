"""The engine: takes requests, runs steps and returns results, on one thread, without waiting longer than for one snapshot.

`LLM`, the command line and the server use it. It wires scheduler, runner and commit together and decides nothing itself.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from polydraft.backend import DeviceOptions
from polydraft.config import AUTO, EngineConfig
from polydraft.contracts.packing import Matrix
from polydraft.device import Sleeping
from polydraft.engine_weights import EngineWeights, NewWeights
from polydraft.errors import CapabilityError, CheckpointError, ConfigError, DeviceError, PolydraftError, RequestError
from polydraft.host.acceptance_alarms import FLOOR, AcceptanceAlarms
from polydraft.host.adaptive_drafts import AdaptiveDrafts
from polydraft.host.commit import apply, end
from polydraft.host.device_memory import check_fits, fill
from polydraft.host.draft_policy import DraftPolicy, check_policy, most_drafts
from polydraft.host.draft_state_check import DraftStateCheck
from polydraft.host.followers import Followers, Rungs, said, start_processes, start_threads
from polydraft.host.input_processor import InputProcessor
from polydraft.host.kv_blocks import BlockLedger
from polydraft.host.rehearsal import Rehearsal, rehearse
from polydraft.host.request import Request, Status
from polydraft.host.scheduler import Scheduler
from polydraft.host.slots import SlotTable
from polydraft.host.text_check import TextCheck
from polydraft.host.totals import EngineTotals
from polydraft.instruments.base import Instrument, Instruments, Setting
from polydraft.instruments.sanitize import Hazard, Sanitizer
from polydraft.loading import Loading, unheard
from polydraft.models.block import Block, lacking
from polydraft.models.checkpoint import Checkpoint
from polydraft.models.families import FamilyRegistry
from polydraft.models.memory_checkpoint import WeightSource
from polydraft.models.ranks import in_leaves, largest_message, of_ranks
from polydraft.models.tokenizer import Tokenizer
from polydraft.models.weights import read_ahead
from polydraft.output.engine_outputs import EngineOutputs, OutputCollector
from polydraft.output.output_processor import OutputProcessor
from polydraft.output.request_output import RequestOutput
from polydraft.plugins.default_backend import default_backend
from polydraft.plugins.kernel_table import refuse_strangers
from polydraft.plugins.plugins import Plugins
from polydraft.program.host_inputs import FeatureFactory, HostView, Needs
from polydraft.program.plan import StepOutcome, StepPlan
from polydraft.program.points import Points
from polydraft.program.program import refuse_lacking
from polydraft.proposers.base import built_in
from polydraft.ranks import Group, exchange
from polydraft.resolve import Resolved, resolve
from polydraft.sampling import draft_vocab
from polydraft.sampling.constraints import Constraints
from polydraft.sampling.processing import checked_stages
from polydraft.sampling.thinking import Markers
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import Phase
from polydraft.step.graphs import GraphPolicy
from polydraft.step.runner import InFlightStep, Runner, StepConfig

if TYPE_CHECKING:
    from polydraft.hooks import StepObserver
    from polydraft.models.description import ModelDescription

GRAMMAR_WAIT_S = 0.005
"""How long a step with nothing to do waits for the grammars of its requests."""
Running = Literal["finish", "recompute"]
"""What happens to running requests when weights are replaced, or the engine falls asleep."""
SleepLevel = Literal[1, 2]
"""What happens to weights while the engine sleeps: 1 keeps them in host memory, 2 drops them."""


class Engine:
    """Continuous batching over one model and one device. Not thread-safe. `add`, `abort`, `step` and `poll` wait for one
    snapshot at most; `update_weights` first runs steps until no request is in the middle of a text.

    `add` and `abort` only change host state. `step` plans and launches one step; it collects the oldest step in flight once there
    are more than the overlap depth, or once there is nothing to launch. `poll` returns what is new since the last poll.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        backend: object | None = None,
        checkpoint: Checkpoint | None = None,
        features: Sequence[FeatureFactory] = (),
        instruments: Sequence[Instrument] = (),
        draft_policy: DraftPolicy | None = None,
        loading: Loading = unheard,
        group: Group | None = None,
    ) -> None:
        """Build everything; errors come in this order: plugin, checkpoint header, negotiation, device, weights.

        `backend` is a plugin object that replaces the one named in `config` (tests). `checkpoint` is an open checkpoint that
        replaces its `model` (benchmarks); the engine closes it. `features` provide host inputs for every step. `draft_policy`
        chooses how many drafts each step makes, at most as `config` says, or else its last rung; without one, every step makes as
        many as pay (`auto:K`), or the maximum.
        `instruments` observe the run, in addition to those of plugins; the hazard checker is added if the configuration asks for
        it. `loading` is told how far it is with weights and graphs (`polydraft.loading`). `group` is given to the engines of
        ranks beside rank 0, which plan nothing: their steps are launched by `polydraft.host.followers`."""
        self.config = EngineConfig() if config is None else config
        if draft_policy is not None and self.config.draft_tokens == AUTO:
            self.config = replace(self.config, draft_tokens=most_drafts(draft_policy))
        _check_built_from(self.config, checkpoint, features, instruments, loading)
        self.default = default_backend() if self.config.backend == AUTO and backend is None else None
        """The backend that `auto` stands for; None if a backend was named."""
        name = self.default.name if self.default else self.config.backend
        self.plugins = Plugins.load(
            backend or name, packs=self.config.kernels, files=self.config.plugins, device=self.config.device,
            variants=self.config.variants == AUTO,
        )  # fmt: skip
        watching = self.plugins.gather("polydraft_instruments")
        checked = any(isinstance(one, Sanitizer) for one in (*instruments, *(one for _, one in watching)))
        added = (Sanitizer(),) if self.config.sanitize and not checked else ()
        self.instruments = Instruments((*instruments, *added), watching)
        self.families, self.proposers = FamilyRegistry(), built_in()
        for plugin, family in self.plugins.gather("polydraft_models"):
            self.families.register(family, plugin=plugin)
        for plugin, (proposer, factory) in self.plugins.gather("polydraft_proposers"):
            self.proposers.register(proposer, factory, plugin=plugin)
        opened = checkpoint or Checkpoint(self._model_dir())
        self.model, _ = self.families.describe(opened, self.config.mtp_conventions)
        if self.model.mtp and self.model.mtp_note and group is None:
            logging.getLogger(__name__).warning(self.model.mtp_note)
        self.info = self.plugins.info()
        narrow = self.config.draft_vocab
        self._draft_ids = draft_vocab.read(narrow, self.model.vocab_size, self.model.eos_token_ids) if narrow else None
        needs = {f.name: f.needs for f in (*features, *((Constraints,) if self.config.constraints else ()))}
        self.resolved = self._negotiated(needs)
        if draft_policy is None and self.resolved.adaptive:
            draft_policy = AdaptiveDrafts(self.resolved.limits)
        self.draft_policy = check_policy(draft_policy, self.resolved.limits)
        """Chooses the number of drafts of each step."""
        self._followers: Followers | None = None
        """The other ranks, where this is rank 0 of several."""
        self.group = group
        """This rank, where the model is split over several."""
        if self.resolved.ranks > 1 and group is None:
            self._refuse_given(features)
            self._followers = self._start_followers(backend, checkpoint)
            self.group = self._followers.group
            weakref.finalize(self, self._followers.end)
        try:
            self._build(needs, features, opened, loading)
        except BaseException as error:
            if self._followers is not None:
                ended = self._followers.group.exchange.failure
                self._followers.abandon(said(0, error))
                self._followers.end()
                if ended and isinstance(error, PolydraftError):  # which a kernel that met it may have put into other words
                    raise DeviceError(ended) from error
            raise

    def _start_followers(self, backend: object | None, checkpoint: Checkpoint | None) -> Followers:
        """The other ranks, which build their engines meanwhile."""
        resolved, config, rungs = self.resolved, replace(self.config, backend=self.info.name), self.draft_policy.rungs
        brought = self.proposers.weights(resolved.proposer, self.model, config.draft_model)
        draft_hidden = brought.hidden_size if brought else 0
        share = of_ranks(self.model, resolved.ranks, whole_experts=resolved.whole_experts)
        capacity = largest_message(share, resolved.limits, draft_hidden)
        if self.info.capabilities.ranks == "threads":

            def build(group: Group) -> Engine:
                return Engine(config, backend=backend, checkpoint=checkpoint, draft_policy=Rungs(rungs), group=group)

            return start_threads(resolved.ranks, capacity, exchange.PATIENCE_S, resolved.overlap, build)
        opening = None if checkpoint is None else checkpoint.opening
        if backend is not None or (checkpoint is not None and opening is None):
            raise CapabilityError(
                f"--tensor-parallel {resolved.ranks}: ranks of backend {self.info.name} are processes, got an object as backend "
                "or checkpoint, wanted names; give these, or use one rank"
            )
        start = {"config": asdict(config), "rungs": rungs, "checkpoint": opening}
        return start_processes(resolved.ranks, capacity, exchange.PATIENCE_S, start)

    def _refuse_given(self, features: Sequence[FeatureFactory]) -> None:
        """Refuse what rank 0 alone is given and would have it run other launches than the others, or wants whole weights."""
        if features:
            raise CapabilityError(
                f"{' and '.join(one.name for one in features)} with --tensor-parallel {self.resolved.ranks}: what is given to an "
                "engine as an object reaches rank 0 alone; leave out one of the two"
            )
        for one in self.instruments:
            if one.reads_weights or (one.eager and self.resolved.graph != "off"):
                why = "weights as they are stored" if one.reads_weights else "launches one by one, which others replay as graphs"
                raise CapabilityError(
                    f"instrument {one.name} with --tensor-parallel {self.resolved.ranks}: it wants {why}; "
                    f"{'leave out one of the two' if one.reads_weights else 'use --graph off'}"
                )

    def _build(
        self, needs: Mapping[str, Needs], features: Sequence[FeatureFactory], checkpoint: Checkpoint, loading: Loading
    ) -> None:  # fmt: skip
        """Open the device and put everything onto it."""
        whole_experts = self.resolved.whole_experts
        model = in_leaves(self.model, whole_experts=whole_experts) if self.resolved.leaves else self.model
        self._share = of_ranks(model, self.resolved.ranks, whole_experts=whole_experts)
        self.plugins = self.instruments.over(self.plugins)
        self.tokenizer = Tokenizer.from_dir(checkpoint.path)
        end = self.config.think_end_ids
        markers = Markers(self.config.think_start_ids, end, self.config.think_forced_ids or end) if end else None
        self._constraints: Constraints | None = None
        if self.config.constraints:
            self._constraints = Constraints(
                self.tokenizer, vocab=self.model.vocab_size, eos=self.model.eos_token_ids, thinking=markers
            )
            features = (*features, self._constraints)
        options = DeviceOptions(
            self.resolved.dtype, self.resolved.invariant, self.config.allow_cpu_fallback, self.config.enable_sleep_mode,
            self._own_rank, self.resolved.ranks,
        )  # fmt: skip
        self.device = self.plugins.open_device(self.config.device, options)
        self._negotiate_again(needs)
        self.table, meeting = self.plugins.kernels(self.device), 0
        if self.group is not None:
            collectives = self.plugins.collectives(self.device, self.group)
            self.table, meeting = self.table.with_collectives(collectives, self.info.name), collectives.nbytes
            if collectives.meets is not None:
                self.resolved = self.resolved.with_decision("collectives", *collectives.meets)
        self._refuse_strangers()
        self.weights = EngineWeights(
            self.config, self.resolved, info=self.info, table=self.table, checkpoint=checkpoint, model=self.model,
            share=self._share, families=self.families, proposers=self.proposers, group=self.group, rank=self._own_rank,
            everywhere=self._everywhere, draft_ids=self._draft_ids,
        )  # fmt: skip
        """What this rank keeps of them, and what becomes of them."""
        self._refuse_lacking_kinds()
        bound = self.weights.load(self.device, self._draft_layers(), loading)
        self.resolved = fill(self.device, self.resolved, self._least, meeting)
        check_fits(self.device, self.resolved, meeting)
        steps = StepConfig(
            limits=self.resolved.limits, dtype=self.resolved.dtype, verify=self.resolved.verify, overlap=self.resolved.overlap,
            rungs=self.draft_policy.rungs, kv=self.resolved.kv, accept_schedule=self.resolved.accept_schedule,
            raw_logprobs=self.config.logprobs_mode == "raw_logprobs", proposer_options=self.resolved.proposer_options,
            thinking=markers, draft_logprobs=self.config.draft_logprobs,
            keeps_drafts=self.config.check_draft_state > 0,
        )  # fmt: skip
        self.runner = Runner(
            steps, device=self.device, plugins=self.plugins, table=self.table, model=self._share, weights=bound,
            proposer=self.proposers.factory(self.resolved.proposer), features=features,
            stages=checked_stages(self.plugins.gather("polydraft_parameters")), draft_ids=self._draft_ids,
            draft_model=self.config.draft_model, rank=options.rank, points=self.points,
        )  # fmt: skip
        if self.group is not None:
            self.group.exchange.meet(0)
        if self.resolved.graph != "off":
            policy = GraphPolicy(self.resolved.graph, self.resolved.graph_sizes)
            uncapturable = self.table.uncapturable.union(self.info.capabilities.uncapturable)
            self.runner.capture(policy, self.plugins.graph_capture(self.device), uncapturable, self._everywhere, loading)
        drafts = self.resolved.limits.num_drafts
        if drafts and isinstance(self.draft_policy, AdaptiveDrafts) and self.group is None and not self.runner.inputs.always:
            rehearsal = Rehearsal(self.draft_policy.times, self.draft_policy.clock)
            order, depth = self.info.capabilities.row_order, self.resolved.overlap
            rehearse(rehearsal, self.runner, self.resolved.limits, order, overlap=depth)
        self._build_host()
        if self.group is not None:
            self.group.exchange.meet(1)
        self.instruments.built(self)

    def _negotiated(self, needs: Mapping[str, Needs]) -> Resolved:
        """The plan on the backend as it is known, once no instrument refuses it. `needs`: of the features, by name."""
        resolved = resolve(
            self.config,
            self.info,
            self.model,
            proposers=self.proposers.needs(),
            draft_models=self.proposers.draft_models(),
            proposer_options=self.proposers.options,
            layers=self.proposers.layers,
            draft_note=self.proposers.note,
            features=needs,
            default=self.default.reason if self.default else "",
            draft_vocab=None if self._draft_ids is None else len(self._draft_ids),
            variants=[one.name for one in self.plugins.variants],
            unused_variants=self.plugins.unused_variants,
            sharing=self.proposers.of_ranks(),
        )
        self.instruments.check(Setting(resolved, self.info))
        return resolved

    def _negotiate_again(self, needs: Mapping[str, Needs]) -> None:
        """Plan anew where the device, once open, turned out to lack what its backend declares."""
        self.info = self.plugins.info_of(self.device)
        if not self.info.withdrawn:
            return
        try:
            self.resolved = self._negotiated(needs)
        except PolydraftError:
            self.device.close()
            raise

    def _draft_layers(self) -> Mapping[str, Block]:
        """The proposer's decoder blocks, by prefix."""
        return self.proposers.layers(self.resolved.proposer, self._share, self.config.draft_model)

    def _refuse_strangers(self) -> None:
        """Refuse kernel packs where they would be given what nobody says that they take."""
        kv, blocks = self.resolved.kv, {**self.model.layers, **self._draft_layers()}
        if kv:
            refuse_strangers(self.table, self.info, f"--kv-dtype {kv}", ("rope_kv_write", "paged_attention"))
        if any("sliding_window" in block.capabilities for block in blocks.values()):
            refuse_strangers(self.table, self.info, f"sliding windows of model {self.model.name}", ("paged_attention",))

    def _refuse_lacking_kinds(self) -> None:
        """Refuse, before weights are read, blocks whose kinds launch contracts that have no provider on this device."""
        blocks = {**self._share.layers, **self._draft_layers()}
        computed = {prefix: block for prefix, block in blocks.items() if prefix not in self.weights.custom_blocks}
        who = f"model {self.model.name} has blocks that launch what backend {self.info.name}"
        refuse_lacking(who, lacking(computed, self.table.providers))

    def _everywhere(self, so: bool) -> bool:
        """Whether something is so on all ranks, which all ask this."""
        return so if self.group is None else self.group.exchange.everywhere(so)

    def _least(self, count: int) -> int:
        """The least of what all ranks bring, which all ask this."""
        return count if self.group is None else self.group.exchange.least(count)

    @property
    def _own_rank(self) -> int:
        """Which of the ranks this is."""
        return 0 if self.group is None else self.group.rank

    def _model_dir(self) -> Path:
        if self.config.model is not None:
            return Path(self.config.model)
        from polydraft.demo import demo_model_path

        return demo_model_path()

    def _build_host(self) -> None:
        limits = self.resolved.limits
        self.slots = SlotTable(limits)
        self.ledger = BlockLedger(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_seqs=limits.max_seqs,
            max_blocks=limits.max_blocks,
            shares=self.resolved.prefix_cache,
        )
        self.totals = EngineTotals(
            accepted_at=[0] * limits.num_drafts, drafted_at=[0] * limits.num_drafts, drafts_per_step=[0] * limits.window
        )
        self.scheduler = Scheduler(
            limits,
            self.slots,
            self.ledger,
            self.runner.columns,
            self.info.capabilities.row_order,
            policy=self.draft_policy,
            totals=self.totals,
        )
        self._input_processor = InputProcessor(
            model=self.model, tokenizer=self.tokenizer, limits=limits, verify=self.resolved.verify, seed=self.config.seed,
            processing=self.runner.processing, constraints=self._constraints,
        )  # fmt: skip
        self.requests: dict[str, Request] = {}
        learned = bool(self._draft_layers()) and not self.resolved.accept_schedule
        self.alarms = AcceptanceAlarms(
            self.totals, self.slots, logging.getLogger(__name__).warning, floor=FLOOR if learned else 0.0
        )
        """What looks wrong about how many drafts are accepted."""
        self.draft_state: DraftStateCheck | None = None
        """Compares what the proposer keeps with what the text makes of it, if that was asked for."""
        if (late := self.runner.late_drafts) is not None:
            self.draft_state = DraftStateCheck(
                self.config.check_draft_state, self.scheduler, self.slots, late.of, partial(self.alarms.tell, "state"),
                exact=self.config.invariant,
            )  # fmt: skip
        self.text_check: TextCheck | None = None
        """Compares texts with those that plain decoding writes, if that was asked for."""
        if self.config.check_texts:
            self.text_check = TextCheck(
                self.config.check_texts, self.scheduler.queue, self.totals, partial(self.alarms.tell, "text"),
                exact=self.config.invariant,
            )  # fmt: skip
        self.failure = ""
        """Why no requests are served any more; "" while the device works."""
        self.sleep_level: SleepLevel | None = None
        """How it sleeps; None while it is awake."""
        self._in_flight: deque[InFlightStep] = deque()
        self._outputs = OutputCollector(self.slots, self.tokenizer)
        self._processor = OutputProcessor(self.tokenizer)
        self._number = 0
        self._observers: list[StepObserver] = self.plugins.observers()

    # -- requests ----------------------------------------------------------------------------------
    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,  # noqa: A002  what callers and records call it
        stream: bool = False,
        compiled: bool = True,
    ) -> str:
        """Queue a request and return its id. Raises `RequestError` for a request that cannot be served; other requests are not
        affected. Raises `DeviceError` after the device has failed for good or the engine was closed. Waits until a grammar is
        compiled; without `compiled` it does not, and a request whose grammar cannot be used ends as "refused"."""
        if self.failure:
            raise DeviceError(self.failure)
        self.refuse_resting("a request was given")
        params = SamplingParams() if params is None else params
        given: object = self._free_id() if id is None else id
        request_id = given if isinstance(given, str) else ""
        if not request_id:
            raise RequestError(f"the request id is {given!r}, wanted a text that is not empty; correct it or leave it out")
        if request_id in self.requests:
            raise RequestError(f"request id {request_id!r} is in use; choose another, or wait until that request has ended")
        request = self._input_processor.make_request(prompt, params, request_id=request_id, number=self._number, stream=stream)
        if request.binding is not None and self._constraints is not None:
            try:
                self._constraints.compile(request.binding, wait=compiled)
            except BaseException:  # Ctrl-C while it waits as well
                request.binding.end()
                raise
            request.binding.request = request
        self._number += 1
        self.requests[request_id] = request
        self.scheduler.queue(request)
        self._outputs.track(request)
        return request_id

    def _free_id(self) -> str:
        """A request id that is not in use."""
        number = self._number
        while f"request-{number}" in self.requests:
            number += 1
        return f"request-{number}"

    def abort(self, request_id: str) -> None:
        """End a request with the tokens that it has so far. Does nothing if it has ended. Raises `RequestError` for an unknown
        id."""
        given: object = request_id
        request = self.requests.get(request_id) if isinstance(given, str) else None
        if request is None:
            raise RequestError(f"no request {request_id!r} is in this engine; it may have ended and been polled")
        self._stop(request, "abort")

    def _stop(self, request: Request, reason: str) -> None:
        if request.status is Status.WAITING:
            self.scheduler.leave(request)
            request.status, request.finish_reason = Status.FINISHED, reason
        elif request.status is Status.RUNNING:
            end(self.slots, request.slot, reason)
        else:
            return
        self._finished(request)

    # -- steps -------------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """Whether there is anything to do: waiting or running requests, or steps in flight. An engine that sleeps, or whose
        weights are not whole, does nothing."""
        if self.rests:
            return False
        return bool(self._in_flight or self.scheduler.waiting or self.scheduler.held or (self.slots.phase != 0).any())

    @property
    def checks_text(self) -> bool:
        """Whether a text is being written once more (`check_texts`), which is in no result."""
        return self.text_check is not None and self.text_check.shadow is not None

    @property
    def points(self) -> Points:
        """The points of a step at which instruments listen."""
        return self.instruments.points

    def step(self) -> bool:
        """Launch one step if there is one, and collect the step that is due. Returns False if there was nothing to do.

        A `DeviceError` ends requests and not the engine. Running requests end with its message. Waiting requests are served if
        the device still works; otherwise they end with the message in `failure`. Any other error, of a kernel, an instrument or a
        draft policy, has the same effect and is raised. Whatever else breaks a step off, such as Ctrl-C, aborts the running
        requests and is raised."""
        if self.rests:
            return False
        points = self.instruments.points
        try:
            return points.notify_around("step", None, self._step) if points.step else self._step()
        except DeviceError as error:
            self._recover(str(error))
            return True
        except Exception as error:  # what the step has planned, launched and applied by now do not agree
            self._recover(f"a step failed: {type(error).__name__}: {error}")
            raise
        except BaseException:
            self._recover("")
            raise

    def _step(self) -> bool:
        start = time.perf_counter()
        points = self.instruments.points
        if self._constraints is not None:
            self._hear(self._constraints)
        plan = points.notify_around("plan", None, self.scheduler.plan) if points.plan else self.scheduler.plan()
        if plan is not None:
            self._launch(plan)
        if not self._in_flight:
            return self._unstick()
        if plan is None or len(self._in_flight) > self.resolved.overlap:
            self._collect()
        elapsed = time.perf_counter() - start
        if plan is not None and plan.has_prefill:
            self.totals.prefill_s += elapsed
        else:
            self.totals.decode_s += elapsed
        return True

    def _launch(self, plan: StepPlan) -> None:
        """Fill the host inputs of a step and launch it."""
        inputs = self.runner.inputs
        if inputs.fills_first:
            inputs.fill(self._view(plan), middle=False)
        if self._followers is not None:
            if inputs.fills_first:
                self._followers.give_inputs(inputs, plan, middle=False)
            self._followers.send(plan)
        points, launch = self.instruments.points, self.runner.launch
        flight = points.notify_around("launch", plan, launch, plan) if points.launch else launch(plan)
        self._in_flight.append(flight)
        if flight.split and points.inputs:
            points.notify_around("inputs", flight, self.supply, flight)
        elif flight.split:
            self.supply(flight)

    def supply(self, flight: InFlightStep) -> None:
        """The middle of a step: while its target pass runs, apply all earlier steps, fill its host inputs, and launch the
        rest."""
        while self._in_flight[0] is not flight:
            self._collect()
        self.runner.inputs.fill(self._view(flight.plan), middle=True)
        if self._followers is not None:
            self._followers.give_inputs(self.runner.inputs, flight.plan, middle=True)
        if self._constraints is not None:
            self._hear(self._constraints)
        points = self.instruments.points
        if points.resume:
            points.notify_around("resume", flight, self.runner.resume, flight)
        else:
            self.runner.resume(flight)

    # -- constraints -------------------------------------------------------------------------------
    def _hear(self, constraints: Constraints, wait_s: float = 0.0) -> None:
        """Act on what the grammars of requests have answered: requests go on, or end because theirs cannot be followed. A request
        whose masks are late is preempted."""
        for binding in constraints.changed(wait_s):
            request = binding.request
            if request is None or request.status is Status.FINISHED:
                continue
            if binding.error:
                self._fail(request, binding.error, "refused")
            elif request.status is Status.RUNNING:
                self.slots.held[request.slot] = False
        late, constraints.late = constraints.late, []
        for slot in late:
            request = self.slots.request[slot]
            if request is not None and request.binding is not None and not self.slots.draining[slot]:
                request.binding.late += 1
                self.scheduler.preempt(slot)
        if self.scheduler.held:
            self.scheduler.release_held()

    def _ask(self, plan: StepPlan) -> None:
        """A step was applied: ask for the masks of the next windows of its constrained requests."""
        t, inputs, slots = self.slots, self.runner.inputs, plan.slots
        decodes = t.kv_len[slots] == t.num_known[slots] - 1
        for slot in slots[t.bound[slots] & ~t.draining[slots] & decodes].tolist():
            request = t.request[slot]
            if request is not None and request.binding is not None:
                begin = int(t.prompt_len[slot]) + request.binding.consumed
                drafts = inputs.drafts[slot, : inputs.draft_len[slot]].tolist()
                request.binding.ask(t.tokens[slot, begin : t.num_known[slot]].tolist(), drafts)

    def _view(self, plan: StepPlan) -> HostView:
        inputs = self.runner.inputs
        return HostView(plan, self.slots, inputs.drafts, inputs.draft_len)

    def _recover(self, why: str) -> None:
        """End the running requests with the sentence `why`, "" for no error, and discard every step in flight. The state of the
        device is not used afterwards: no slot continues and no block is shared. Requests admitted later work, since admission
        stages the whole state of a slot."""
        self._in_flight.clear()
        if self._followers is not None:  # the others may be in another step, or have ended
            self.failure = self._followers.abandon(why or "rank 0 was interrupted")
            why = why and self.failure  # a kernel that did not hear of the end of a rank says "ask again"
        self.runner.reset()
        if self.draft_state is not None:
            self.draft_state.forget()
        try:
            self.device.synchronize()
        except DeviceError as last:
            self.failure = self.failure or str(last)
        except KeyboardInterrupt:
            self.failure = "the wait for the device was interrupted, so nobody knows what it still does; make a new engine"
            raise
        finally:
            self._end_running(why)

    def heed_ranks(self) -> None:
        """Fail where another rank has ended while nothing ran, as the next step would. Costs next to nothing."""
        if self._followers is not None and not self.failure and (ended := self._followers.group.exchange.failure):
            self._recover(ended)

    def _end_running(self, why: str) -> None:
        t = self.slots
        for slot in np.flatnonzero((t.phase != Phase.IDLE) & ~t.draining).tolist():
            self._fail(t.request[slot], why)
        t.in_flight_counts[:] = 0
        self.scheduler.release_drained()  # preempted requests queue again here
        self.ledger.forget_all()
        for request in [*self.scheduler.waiting, *self.scheduler.held] if self.failure else ():
            self._fail(request, self.failure)

    def _fail(self, request: Request | None, sentence: str, reason: str = "error") -> None:
        assert request is not None, "a running slot has a request"
        self._stop(request, reason if sentence else "abort")
        request.error = sentence

    def _unstick(self) -> bool:
        """Nothing runs and nothing is in flight: release drained slots, which may make room, and wait a little for grammars that
        requests wait for. Returns whether there are such."""
        self.scheduler.release_drained()
        if self._constraints is None or not (self.scheduler.held or self.slots.held.any()):
            return False
        self._hear(self._constraints, GRAMMAR_WAIT_S)
        return True

    def _collect(self) -> None:
        """Wait for the oldest step in flight and apply its outcome."""
        flight = self._in_flight.popleft()
        points, plan, collect = self.instruments.points, flight.plan, self.runner.collect
        outcome = points.notify_around("collect", flight, collect, flight) if points.collect else collect(flight)
        if points.commit:
            points.notify_around("commit", plan, self.apply, plan, outcome)
        else:
            self.apply(plan, outcome)
        self.alarms.step(outcome, replayed=flight.shape is not None)
        if self.draft_state is not None:
            self.draft_state.step(plan, outcome)

    def apply(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Fold the outcome of a step into slots, requests and totals, and call the observers."""
        ended = apply(self.slots, self.ledger, plan, outcome, self.totals)
        for request in self._outputs.advance(outcome):
            end(self.slots, request.slot, "stop")
            ended.append(request)
        for request in ended:
            self._finished(request)
        if plan.bound:
            self._ask(plan)
        for observer in self._observers:
            observer.step_finished(plan, outcome)

    def _finished(self, request: Request) -> None:
        request.finish_s = time.perf_counter()
        if request.binding is not None:
            request.binding.end()
        if self.text_check is not None and self.text_check.ended(request):
            return
        num_tokens, rounds = len(request.token_ids), request.rounds
        self._outputs.finish(request)
        self.totals.take_back(num_tokens - len(request.token_ids), rounds, request.rounds)
        if self.text_check is not None and not self.scheduler.waiting and self._is_fixed(request):
            self._number += self.text_check.offer(request, self._number)

    def _is_fixed(self, request: Request) -> bool:
        """Whether drafts cannot change its text."""
        return self.resolved.verify != "rejection" or request.params.temperature == 0

    # -- results -----------------------------------------------------------------------------------
    def poll(self) -> list[RequestOutput]:
        """Results since the last poll: new text of streaming requests, and every request that ended."""
        points = self.instruments.points
        return points.notify_around("output", None, self._poll) if points.output else self._poll()

    def _poll(self) -> list[RequestOutput]:
        outputs = self._processor.outputs(self.take())
        error, self._processor.error = self._processor.error, None
        if error is not None:
            self.fail(error)
            outputs += self._processor.outputs(self.take())
        return outputs

    def take(self) -> EngineOutputs:
        """The same as arrays, for an `OutputProcessor` that makes the results on another thread. Use either `poll` or `take` on
        an engine, and process the arrays in the order in which they were taken. It costs a step next to nothing."""
        taken = self._outputs.take()
        for request in taken.ended:
            self.requests.pop(request.id, None)
        return taken

    def fail(self, error: DeviceError) -> None:
        """Handle invalid data from the device: end the running requests, as `step` does after a device failure."""
        self._recover(str(error))

    # -- weights -----------------------------------------------------------------------------------
    def update_weights(
        self,
        source: WeightSource,
        *,
        draft: WeightSource | None = None,
        running: Running = "finish",
        step: Callable[[], object] | None = None,
    ) -> None:
        """Replace all weights in place by those of `source`, and continue. `source` is a checkpoint directory, or arrays on the
        host (`MemoryCheckpoint`) by the names that its tensors have there, those of an MTP head among them; they are read before
        this returns, and not kept. `draft` is the same for a proposer with a checkpoint of its own, whose weights stay as they
        are without it.

        Steps in flight are applied first. Running requests, including preempted ones, either "finish" on the old weights, or
        "recompute": they keep their tokens, are prefilled again and continue with the new weights. Requests that have not been in
        a slot use only the new weights. Meanwhile `step` takes the place of `Engine.step`, which it has to call: what it does
        besides may be anything but another change of weights. The prefix cache is dropped. Raises `CheckpointError`, before
        anything changes, if `source` or `draft` is broken or of another model; raises `CapabilityError` if blocks of the model
        keep their own weights, if there is nothing that `draft` is of, or if an instrument reads weights where they were loaded
        from. Values are read twice, to be checked and to be put in place. Where the second reading fails, or brings others
        (`CheckpointError`), the engine rests until another update: requests that have begun wait, and others are refused.

        Where there are ranks, each reads what it keeps of a directory, and is given that of arrays, as a copy. They go on with
        the new weights together; what one of them cannot do fails on all (`CheckpointError`), and one that ends meanwhile ends
        the engine (`DeviceError`)."""
        self._refuse_update(source, draft, running)
        with self.weights.opened(source, draft) as new, ExitStack() as offered:
            if self._followers is not None:
                offered.enter_context(self._offered(self._followers, new))
            self._on_all_ranks(new.read, lambda others: others.check_weights(*new.places))
            try:
                self._quiesce(running, step)
                if self.text_check is not None:
                    self.text_check.weights_changed(self._number)
                    if self.text_check.shadow is not None:
                        self._stop(self.text_check.shadow, "abort")  # its text is of the old weights
                moved = self._put(new)
            finally:
                self.scheduler.admits = "all"
        self._forget_rows()
        self.alarms.weights_changed()
        if moved:
            self._rebind()

    def _put(self, new: NewWeights) -> bool:
        """Put these in place, as all ranks do now; whether some weight has moved, on any of them."""
        try:
            moved = self._on_all_ranks(lambda: self.weights.put(new), Followers.take_weights)
        except BaseException as error:
            if not self.failure:
                self.weights.tear(new, error)
            raise
        self.weights.adopt(new)
        return moved

    def _rebind(self) -> None:
        """Bind and capture anew, as all ranks do."""
        try:
            self.runner.rebind()
            if self.group is not None:
                self.group.exchange.meet(1)
        except BaseException as error:
            if self._followers is not None:  # the others wait
                self._recover(said(0, error))
            raise

    def _on_all_ranks(self, work: Callable[[], object], say: Callable[[Followers], None] | None = None) -> bool:
        """Do a part of an update, as all ranks do once rank 0 has told the others (`say`), and wait for them; whether it was true
        of any. Raises what it raises here, and `CheckpointError` where it has failed on another rank. Where ranks cannot agree
        any more, the engine has ended."""
        if self.group is None:
            return bool(work())
        error: BaseException | None = None
        found = False
        try:
            if self._followers is not None and say is not None:
                say(self._followers)
            self.device.synchronize()  # launches of steps meet where ranks agree
            try:
                found = bool(work())
            except BaseException as raised:  # noqa: BLE001  raised below, once the others know
                error = raised
            reason = "" if error is None else said(self.group.rank, error)
            reason, found = self.group.exchange.agree(reason, found)
        except BaseException as ended:
            if self._followers is None:
                self.group.exchange.fail(said(self.group.rank, ended))
                raise
            self._recover(str(ended))
            if isinstance(ended, PolydraftError):  # a kernel that met it may have put it into other words
                raise DeviceError(self.failure) from ended
            raise
        if error is not None:
            raise error
        if reason:
            raise CheckpointError(reason)
        return found

    @contextmanager
    def _offered(self, followers: Followers, new: NewWeights) -> Iterator[None]:
        """What the other ranks have of new weights, their shares of those that are arrays, they forget where this is left by an
        error."""
        try:
            for rank in range(1, followers.group.size):
                with ExitStack() as files:
                    for update in self.weights.given_to(rank, new, files):
                        for name, value in read_ahead(update.canonical, update.nbytes):
                            followers.give_share(rank, name, value)
            yield
        except BaseException:
            try:
                followers.drop_weights()
            except DeviceError as ended:
                if not self.failure:
                    self._recover(str(ended))
            raise

    # -- weights of a rank beside rank 0, which are new when rank 0 says so (`host.followers.Rank`) ----
    def keep_share(self, name: str, value: Matrix) -> None:
        """A tensor of this rank's share of weights that rank 0 has in memory."""
        self.weights.keep_share(name, value)

    def check_weights(self, directory: str, draft: str | None) -> None:
        """Read what this rank keeps of the weights in `directory`, "": what it was given, and say what is wrong with them; of
        those of the proposer's own checkpoint in `draft` the same, None: these stay."""
        with self._told_rank_0():
            self._on_all_ranks(lambda: self.weights.offer(directory, draft).read())

    def take_weights(self) -> None:
        """Put them in place."""
        new, moved = self.weights.offered, False
        assert new is not None, "all ranks have checked them"
        with self._told_rank_0():
            moved = self._put(new)
            self.weights.drop()
        if moved:
            self._rebind()

    def drop_weights(self) -> None:
        """Forget them."""
        self.weights.drop()

    @contextmanager
    def _told_rank_0(self) -> Iterator[None]:
        """What is raised here rank 0 raises, too, unless ranks have ended."""
        try:
            yield
        except Exception:  # noqa: BLE001  rank 0 knows it
            assert self.group is not None, "one rank has nobody to tell"
            self.group.exchange.raise_failure()

    def _refuse_update(self, source: WeightSource, draft: WeightSource | None, running: Running) -> None:
        """Raise where this engine takes no new weights, or not these."""
        _check_running("update_weights", running)
        for name, given in (("source", source), *((("draft", draft),) if draft is not None else ())):
            if not isinstance(given, (str, PathLike, Mapping)):
                what = type(given).__name__
                raise CheckpointError(
                    f"update_weights: {name} is {what}, wanted a checkpoint directory, or arrays by name; give one"
                )
        if self.sleep_level is not None:
            self.refuse_resting("weights were given")
        if self.weights.custom_blocks:
            raise CapabilityError(
                f"{', '.join(self.weights.custom_blocks)} of this model compute themselves and keep their own weights; change "
                "these there, or start another engine"
            )
        if self.failure:
            raise DeviceError(self.failure)
        if draft is not None and self.weights.draft is None:
            raise CapabilityError(
                f"draft weights were given, but proposer {self.resolved.proposer} has no checkpoint of its own; leave them out"
            )
        in_memory = isinstance(source, Mapping) or isinstance(draft, Mapping)
        reading = [one.name for one in self.instruments if one.reads_weights] if in_memory else []
        if reading:
            raise CapabilityError(
                f"weights in memory were given, and instrument {reading[0]} reads weights where they were loaded from; write "
                "them to a directory, or build the engine without it"
            )

    def _forget_rows(self) -> None:
        """Nothing in a cache is of use any more."""
        self.ledger.forget_all()
        if self.draft_state is not None:
            self.draft_state.forget()

    def shared(self, described: Mapping[str, Mapping[str, Any]]) -> AbstractContextManager[Mapping[str, Any]]:
        """Arrays that another process of this machine shares, as a source for `update_weights` and `wake_up` while the context
        lasts. Raises `CapabilityError` where the device reads none, and what `OpensShared` raises."""
        opener: Callable[..., AbstractContextManager[Mapping[str, Any]]] | None = getattr(self.device, "open_shared", None)
        if opener is None:
            raise CapabilityError(
                f"device {self.device.spec} of backend {self.info.name} reads no memory of other processes; give arrays or a "
                "directory"
            )
        return opener(described)

    def _quiesce(self, running: Running, step: Callable[[], object] | None) -> None:
        """Run steps until nothing is in flight and no slot is in the middle of a text."""
        if self.weights.torn:
            running = "recompute"  # what has begun cannot go on with these
        self.scheduler.admits = "begun" if running == "finish" else "none"
        if running == "recompute":
            self.scheduler.preempt_all()
        while (
            self._in_flight or (self.slots.phase != Phase.IDLE).any() or self.scheduler.admissible() or self._begun_held(running)
        ):
            (step or self.step)()
        self.device.synchronize()  # the last step's draft passes come after the snapshot that was waited for

    def _begun_held(self, running: Running) -> bool:
        """Whether a request that must finish first awaits its grammar."""
        return running == "finish" and any(request.begun for request in self.scheduler.held)

    # -- sleep -------------------------------------------------------------------------------------
    def sleep(self, level: SleepLevel = 1, *, running: Running = "finish", step: Callable[[], object] | None = None) -> None:
        """Give the memory of weights and caches of keys and values back, until `wake_up`. Level 1 keeps weights in host memory,
        level 2 drops them. Captured graphs and all other buffers stay.

        Running requests "finish" first, or are to "recompute": they keep their tokens, and are prefilled again afterwards, as
        requests that wait go on then; `step` is that of `update_weights`. The prefix cache is dropped. A request that comes
        meanwhile is refused. An engine that sleeps at level 1 drops its weights at level 2, and otherwise sleeps on. Raises
        `CapabilityError` for an engine that was built without `enable_sleep_mode`."""
        if not self.config.enable_sleep_mode:
            raise CapabilityError(
                "this engine was built without --enable-sleep-mode (enable_sleep_mode), wanted with; build it so"
            )
        if level not in (1, 2):
            raise CapabilityError(f"sleep: level is {level!r}, wanted 1 or 2; correct the call")
        _check_running("sleep", running)
        if level == 2 and self.weights.custom_blocks:
            raise CapabilityError(
                f"{', '.join(self.weights.custom_blocks)} of this model compute themselves and keep their own weights, which "
                "cannot be read anew; sleep at level 1"
            )
        if self.sleep_level is not None:
            if level > self.sleep_level:
                cast("Sleeping", self.device).sleep(keep_weights=False)
                self.sleep_level = level
            return
        try:
            self._quiesce(running, step)
            self._forget_rows()
            cast("Sleeping", self.device).sleep(keep_weights=level == 1)
            self.sleep_level = level
        finally:
            self.scheduler.admits = "all"

    def wake_up(self, source: WeightSource | None = None, *, draft: WeightSource | None = None) -> None:
        """Take the memory again, and go on. Weights are those of before: from host memory, or after level 2 read anew where they
        came from; with `source`, those (`update_weights`). Does nothing if the engine is awake, but replaces weights if there
        are some. Raises `DeviceError` where memory is short, and `CheckpointError` as `update_weights`, or where weights that
        were dropped came from memory and `source` is missing; the engine then sleeps on."""
        level = self.sleep_level
        if source is None and (level == 2 or draft is not None):
            source = self.weights.again()
        if level == 2 and draft is None:
            draft = self.weights.draft_again()
        if level is not None:
            cast("Sleeping", self.device).wake()
            self.sleep_level = None
        if source is None:
            return
        try:
            self.update_weights(source, draft=draft, running="recompute")
        except BaseException:
            if level is not None:
                cast("Sleeping", self.device).sleep(keep_weights=level == 1)
                self.sleep_level = level
            raise

    @property
    def rests(self) -> bool:
        """Whether it serves nothing for now: it sleeps, or its weights are not whole."""
        return self.sleep_level is not None or bool(self.weights.torn)

    def refuse_resting(self, what: str) -> None:
        """Raise `DeviceError` if the engine rests. `what`: what happened, in a clause."""
        if self.sleep_level is not None:
            raise DeviceError(f"{what}, and this engine is asleep, wanted one that is awake; wake it up first")
        if self.weights.torn:
            raise DeviceError(f"{what}, and {self.weights.torn}")

    @property
    def behind(self) -> list[int]:
        """Of each rank beside rank 0, what it was told to do and has not begun yet, such as steps; [] where there are none."""
        return self._followers.behind if self._followers is not None else []

    @property
    def hazards(self) -> tuple[Hazard, ...]:
        """The hazards found so far; empty without `sanitize`."""
        checking = self.instruments.find(Sanitizer)
        return checking.report.hazards if checking else ()

    def close(self) -> None:
        """Close the device and the checkpoint. Then raises the error of an instrument, such as `HazardError` of the hazard
        checker."""
        self.failure = self.failure or "this engine is closed, wanted an open one; make a new one"
        if self._constraints is not None:
            self._constraints.close()
        self.instruments.closing()
        self.drop_weights()
        if self._followers is not None:
            self._followers.end()
        self.device.close()
        self.checkpoint.close()
        self.instruments.close()

    @property
    def checkpoint(self) -> Checkpoint:
        """Where its weights come from, open."""
        return self.weights.checkpoint

    @property
    def description(self) -> ModelDescription:
        """Description of the loaded model."""
        return self.model

    @property
    def share(self) -> ModelDescription:
        """Description of what this rank computes with, in sums by leaf where bits are the same for every number of ranks."""
        return self._share


def _check_built_from(config: object, checkpoint: object, features: object, instruments: object, loading: object) -> None:
    """Raise where what an engine is to be built from is something else, which would fail far from here, or not at all."""
    listed = isinstance(features, Sequence) and all(map(callable, features))
    for name, given, fits, what in (
        ("config", config, isinstance(config, EngineConfig), "an EngineConfig, which names a directory as its model"),
        ("checkpoint", checkpoint, isinstance(checkpoint, (Checkpoint, NoneType)), "an open Checkpoint; a directory is a model"),
        ("features", features, listed, "a list of classes of host inputs"),
        ("instruments", instruments, isinstance(instruments, Sequence), "a list of instruments"),
        ("loading", loading, callable(loading), "a function of a stage, how much of it is done, and of how much"),
    ):
        if not fits:
            raise ConfigError(f"{name} is {given!r}, wanted {what}; correct the call")


def _check_running(call: str, running: object) -> None:
    if running not in ("finish", "recompute"):
        raise CapabilityError(f"{call}: running is {running!r}, wanted finish or recompute; correct the call")


__all__ = ["Engine", "EngineTotals", "PolydraftError", "RequestOutput"]
