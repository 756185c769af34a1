"""Owns the engine: requests in, steps, results out, on one thread and without ever blocking longer than one snapshot.

`LLM`, the command line and the server are clients of it. It wires scheduler, runner and commit together and never decides
what they decide.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polydraft.backend import DeviceOptions, Weight
from polydraft.config import AUTO, EngineConfig
from polydraft.errors import PolydraftError, RequestError
from polydraft.models.checkpoint import Checkpoint, load_weights
from polydraft.models.families import FamilyRegistry
from polydraft.models.tokenizer import Tokenizer
from polydraft.plugins import Plugins
from polydraft.proposers.base import built_in
from polydraft.runtime.commit import apply, end
from polydraft.runtime.kv_blocks import BlockLedger
from polydraft.runtime.output import OutputTracker, RequestOutput
from polydraft.runtime.plan import StepOutcome, StepPlan
from polydraft.runtime.request import Request, Status
from polydraft.runtime.resolve import Resolved, resolve
from polydraft.runtime.runner import Runner, Ticket
from polydraft.runtime.scheduler import Scheduler
from polydraft.runtime.slots import SlotTable
from polydraft.sampling_params import MAX_STOP_TOKENS, SamplingParams

if TYPE_CHECKING:
    from polydraft.hooks import StepObserver
    from polydraft.models.description import ModelDescription

ROLES = {"embed": "embedding", "norm": "norm", "lm_head": "linear"}
"""Role of a canonical tensor for `prepare_weight`; the others follow from their last part."""


@dataclass
class EngineTotals:
    """Counts since the engine was built; seconds are host time of whole steps."""

    new_tokens: int = 0
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    rounds: int = 0
    accepted: int = 0
    drafted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """By draft position: rounds in which that draft became output."""
    drafted_at: list[int] = field(default_factory=list)
    """By draft position: rounds that verified a draft there."""


class Engine:
    """Continuous batching over one model and one device. Not thread-safe; every call returns promptly.

    `add` and `abort` only touch the host. `step` plans and launches one step and collects as many as the overlap depth
    wants. `poll` returns what has happened since the last poll.
    """

    def __init__(self, config: EngineConfig | None = None, *, backend: object | None = None) -> None:
        """Build everything; errors come in this order: plugin, checkpoint header, negotiation, device, weights.

        `backend` is a plugin object that stands in for the one named in `config` (tests)."""
        self.config = config or EngineConfig()
        name = "reference" if self.config.backend == AUTO else self.config.backend
        self.plugins = Plugins.load(backend or name, packs=self.config.kernels, files=self.config.plugins)
        self.families, self.proposers = FamilyRegistry(), built_in()
        self.plugins.collect("polydraft_models", self.families.register)
        self.plugins.collect("polydraft_proposers", self.proposers.register)
        self._checkpoint = Checkpoint(self._model_dir())
        self.model, table = self.families.describe(self._checkpoint)
        self.info = self.plugins.info()
        self.resolved: Resolved = resolve(self.config, self.info, self.model, proposers=tuple(self.proposers.names()))
        self.tokenizer = Tokenizer.from_dir(self._model_dir())
        options = DeviceOptions(self.resolved.dtype, self.resolved.invariant, block_size=self.resolved.limits.block_size)
        self.device = self.plugins.open_device(self.config.device, options)
        self.table = self.plugins.kernels(self.device)
        weights = self._load_weights(load_weights(self._checkpoint, self.model, table))
        self.runner = Runner(
            device=self.device, plugins=self.plugins, table=self.table, model=self.model, weights=weights,
            limits=self.resolved.limits, proposer=self.proposers.factory(self.resolved.proposer),
            depth=self.resolved.overlap, dtype=self.resolved.dtype,
        )  # fmt: skip
        self._build_host()

    def _model_dir(self) -> Path:
        if self.config.model:
            return Path(self.config.model)
        from polydraft.demo import demo_model_path

        return demo_model_path()

    def _load_weights(self, canonical: object) -> dict[str, Weight]:
        """Prepare each weight once; MTP weights only when something drafts with them."""
        from collections.abc import Mapping

        assert isinstance(canonical, Mapping)
        dtype, weights = self.resolved.dtype, {}
        for name in canonical:
            if name.startswith("mtp.") and self.resolved.proposer != "mtp":
                continue
            if name == "lm_head" and self.model.tie_embeddings:
                weights[name] = self.table.prepare_weight("linear", canonical["embed"], dtype)
                continue
            weights[name] = self.table.prepare_weight(role_of(name), canonical[name], dtype)
        return weights

    def _build_host(self) -> None:
        limits = self.resolved.limits
        self.slots = SlotTable(limits)
        self.ledger = BlockLedger(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_seqs=limits.max_seqs,
            max_blocks=limits.max_blocks,
        )
        self.scheduler = Scheduler(limits, self.slots, self.ledger, self.info.capabilities.row_order)
        self.requests: dict[str, Request] = {}
        self.totals = EngineTotals(accepted_at=[0] * limits.num_drafts, drafted_at=[0] * limits.num_drafts)
        self._in_flight: deque[Ticket] = deque()
        self._outputs = OutputTracker(self.slots, self.tokenizer)
        self._number = 0
        self._observers: list[StepObserver] = self.plugins.observers()

    # -- requests ----------------------------------------------------------------------------------
    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        stream: bool = False,
    ) -> str:
        """Queue a request and return its id. Raises `RequestError`; other requests are not affected."""
        params = params or SamplingParams()
        request_id = id if id is not None else f"request-{self._number}"
        if request_id in self.requests:
            raise RequestError(f"request id {request_id!r} is in use; choose another, or wait until that request has ended")
        prompt_ids = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else self._checked_ids(prompt)
        request = Request(
            id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            number=self._number,
            seed=self._seed(params),
            stop_token_ids=self._stop_token_ids(params),
            max_total=self._max_total(prompt_ids, params),
            stream=stream,
            arrival_s=time.perf_counter(),
        )
        self._number += 1
        self.requests[request_id] = request
        self.scheduler.waiting.append(request)
        self._outputs.track(request)
        return request_id

    def _checked_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        ids = np.asarray(prompt)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise RequestError(
                f"prompt_ids are {type(prompt).__name__} of dtype {ids.dtype}, wanted a list of token ids; correct the request"
            )
        vocab = self.model.vocab_size
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
        if wrong.size:
            raise RequestError(
                f"prompt token {int(wrong[0])} is {int(ids[wrong[0]])}, wanted an id from 0 to {vocab - 1}; use this model's tokenizer"
            )
        return tuple(int(i) for i in ids)

    def _max_total(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> int:
        limits = self.resolved.limits
        if not prompt_ids:
            raise RequestError("the prompt is empty, wanted at least one token; add text or a beginning-of-text token")
        if len(prompt_ids) >= limits.max_len:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, wanted fewer than {limits.max_len} (model length, one token of output "
                "included); shorten it"
            )
        total = min(len(prompt_ids) + params.max_new_tokens, limits.max_len)
        need = int(self.ledger.blocks_for(total))
        if need > limits.num_blocks:
            raise RequestError(
                f"the request may grow to {total} tokens = {need} KV blocks, the pool has {limits.num_blocks}; raise --num-blocks or "
                "lower max_new_tokens"
            )
        return total

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self.model.eos_token_ids
        ids = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
        if len(ids) > MAX_STOP_TOKENS:
            raise RequestError(f"{len(ids)} stop token ids, wanted at most {MAX_STOP_TOKENS} with the model's own; name fewer")
        if self.resolved.verify == "greedy" and params.temperature > 0:
            raise RequestError(f"temperature is {params.temperature}, wanted 0 under --verify greedy; use --verify coupled")
        return ids

    def _seed(self, params: SamplingParams) -> tuple[int, int]:
        seed = params.seed if params.seed is not None else self.config.seed + self._number
        return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF

    def abort(self, request_id: str) -> None:
        """End a request with what it has so far. An unknown id raises; one that has ended is left alone."""
        request = self.requests.get(request_id)
        if request is None:
            raise RequestError(f"no request {request_id!r} is in this engine; it may have ended and been polled")
        self._stop(request, "abort")

    def _stop(self, request: Request, reason: str) -> None:
        if request.status is Status.WAITING:
            self.scheduler.waiting.remove(request)
            request.status, request.finish_reason = Status.FINISHED, reason
        elif request.status is Status.RUNNING:
            end(self.slots, request.slot, reason)
        else:
            return
        self._finished(request)

    # -- steps -------------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """Whether a step could still change something: waiting or running requests, or steps in flight."""
        return bool(self._in_flight or self.scheduler.waiting or (self.slots.phase != 0).any())

    def step(self) -> bool:
        """Launch one step if there is one, and collect what is due. Returns False when there was nothing to do."""
        start = time.perf_counter()
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(self.runner.launch(plan))
        if not self._in_flight:
            return self._unstick()
        if plan is None or len(self._in_flight) > self.resolved.overlap:
            self._apply(self._in_flight.popleft())
        elapsed = time.perf_counter() - start
        if plan is not None and plan.has_prefill:
            self.totals.prefill_s += elapsed
        else:
            self.totals.decode_s += elapsed
        return True

    def _unstick(self) -> bool:
        """Nothing runs and nothing is in flight: a drained slot may just have made room, otherwise the engine is idle."""
        self.scheduler.release_drained()
        return False

    def _apply(self, ticket: Ticket) -> None:
        outcome = self.runner.collect(ticket)
        self._count(ticket.plan, outcome)
        ended = apply(self.slots, ticket.plan, outcome)
        for request in self._outputs.advance(outcome):
            end(self.slots, request.slot, "stop")
            ended.append(request)
        for request in ended:
            self._finished(request)
        for observer in self._observers:
            observer.step_finished(ticket.plan, outcome)

    def _finished(self, request: Request) -> None:
        request.finish_s = time.perf_counter()
        self._outputs.finish(request)

    def _count(self, plan: StepPlan, outcome: StepOutcome) -> None:
        totals = self.totals
        live = self.slots.epoch[outcome.slots] == outcome.epochs
        live &= ~self.slots.leaving[outcome.slots]
        rounds = live & (outcome.drafted >= 0)
        totals.steps += 1
        totals.new_tokens += int(outcome.num_tokens[live].sum())
        totals.rounds += int(rounds.sum())
        totals.accepted += int(outcome.accepted[rounds].sum())
        totals.drafted += int(outcome.drafted[rounds].sum())
        for place in range(self.resolved.limits.num_drafts):
            totals.accepted_at[place] += int((outcome.accepted[rounds] > place).sum())
            totals.drafted_at[place] += int((outcome.drafted[rounds] > place).sum())

    # -- results -----------------------------------------------------------------------------------
    def poll(self) -> list[RequestOutput]:
        """What has happened since the last poll: new text of streaming requests, and every request that ended."""
        outputs = self._outputs.collect()
        for output in outputs:
            if output.finished:
                self.requests.pop(output.id, None)
        return outputs

    def close(self) -> None:
        """Give the device back."""
        self.device.close()
        self._checkpoint.close()

    @property
    def description(self) -> ModelDescription:
        """The model that is loaded."""
        return self.model


def role_of(name: str) -> str:
    """Role of a canonical tensor: embedding, norm, bias or linear."""
    if name in ROLES:
        return ROLES[name]
    last = name.rsplit(".", 1)[-1]
    return "norm" if last.endswith("norm") else "bias" if last.endswith("bias") else "linear"


__all__ = ["Engine", "EngineTotals", "PolydraftError", "RequestOutput"]
