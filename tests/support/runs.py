"""Runs of an engine for tests of the step: every kind of device, arrivals in the middle, an audit every step.

It has the list of device kinds, the requests of a run and its driver, which always ends. The tests of `tests/step` compare the
results; the driver fails only where the engine hangs, loses a block or does not come to rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from polydraft import LLM, Engine, RequestOutput, SamplingParams, reference
from polydraft.backend import RowOrder
from polydraft.conformance.oracle.coupled import CoupledRounds, Sampling, coupled_rounds
from polydraft.conformance.oracle.model import OracleModel
from polydraft.conformance.target import wrap
from polydraft.demo import demo_model_path
from polydraft.host.request import Status
from polydraft.models import Tokenizer
from polydraft.reference.queued import QueuedDevice
from polydraft.sentinels import Phase
from tests.oracle.processing import processed
from tests.support import tiny

LAZY: dict[str, Any] = {"backend": "reference", "device": "queued", "graph": "off"}
"""Options of `LLM` for the reference's queued device, on which nothing runs until somebody waits; without graphs."""
DEVICES: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"},
    "lazy-0": {**LAZY, "overlap": 0},
    "lazy-1": {**LAZY, "overlap": 1},
    "lazy-2": {**LAZY, "overlap": 2},
}
"""Options of `LLM` by kind of device: the synchronous reference, and the queued device at every overlap depth."""


def packing(order: RowOrder) -> Any:
    """The reference, declaring another order of rows: the NumPy kernels follow the launch order and do not mind."""

    def declared(info: Any) -> Any:
        return replace(info, capabilities=replace(info.capabilities, row_order=order))

    return wrap(reference, polydraft_backend_info=declared)


ORDERS: dict[str, dict[str, Any]] = {
    "lazy-seeded": {**LAZY, "plugin": packing("seeded"), "overlap": 1},
    "lazy-prefill-first": {**LAZY, "plugin": packing("prefill_first"), "overlap": 2},
}
"""Queued devices that pack rows in another order than slots."""


def engine(model: str = "", /, *, device: str = "reference", invariant: bool = True, **options: Any) -> Engine:
    """An engine on the tiny checkpoint `model` ("": the demo checkpoint, or the directory that `options` name)."""
    if model:
        options |= {"model": str(tiny.checkpoint(model)), "plugins": tiny.PLUGINS}
    return LLM(**{**(DEVICES | ORDERS)[device], "invariant": invariant, **options}).engine


@functools.cache
def oracle(model: str) -> OracleModel:
    """The float64 oracle of a tiny checkpoint, or of the demo checkpoint (""); it remembers what it has worked out."""
    return tiny.oracle(model) if model else OracleModel.from_dir(demo_model_path())


@functools.cache
def demo_prompt(text: str) -> tuple[int, ...]:
    """The ids of a prompt for the demo checkpoint."""
    return tuple(Tokenizer.from_dir(demo_model_path()).encode(text))


@dataclass(frozen=True)
class Ask:
    """One request of a run: it arrives before step `arrival`, and is aborted before step `abort` if that comes in time."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: int = 0
    abort: int | None = None

    @property
    def sampling(self) -> Sampling:
        """How the oracle chooses tokens for this request."""
        p = self.params
        assert p.seed is not None or p.temperature == 0, "a sampled request of a test has a seed of its own"
        return Sampling(p.temperature, p.top_p, p.top_k, p.min_p, p.seed or 0)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end it; 0 is the end of text of every model here."""
        return (*(() if self.params.ignore_eos else (0,)), *self.params.stop_token_ids)


def drive(
    engine: Engine, asks: Sequence[Ask], *, each_step: Callable[[Engine], None] | None = None, limit: int = 3000
) -> list[RequestOutput]:
    """Serve `asks` to their ends; results in their order. Audits the ledger after every step and the engine at the end.
    The request of `asks[2]` is called "ask-2".

    After `limit` steps the run is taken to hang; the longest takes some hundreds."""
    done: dict[str, RequestOutput] = {}
    arrived: dict[int, str] = {}
    step = 0
    while len(done) < len(asks):
        for index, ask in enumerate(asks):
            if ask.arrival == step:
                arrived[index] = engine.add(ask.prompt_ids, ask.params, id=f"ask-{index}")
            if ask.abort == step and index in arrived and arrived[index] not in done:
                engine.abort(arrived[index])
        assert engine.step() or not engine.has_work, "step() said that there was nothing to do, yet there is work"
        engine.ledger.audit()
        if each_step is not None:
            each_step(engine)
        done |= {output.id: output for output in engine.poll() if output.finished}
        step += 1
        assert step < limit, f"{len(asks) - len(done)} of {len(asks)} requests have not ended after {step} steps"
    come_to_rest(engine)
    return [done[arrived[index]] for index in range(len(asks))]


def come_to_rest(engine: Engine) -> None:
    """Let the steps in flight end, then check that nothing is left: no slot, no block, no request, no queued work."""
    for _ in range(2 * engine.resolved.overlap + 2):
        engine.step()
    engine.ledger.audit()
    assert not engine.has_work, "an engine without requests has work"
    assert not engine.step(), "an engine without requests runs steps"
    assert (engine.slots.phase == Phase.IDLE).all(), "a drained engine holds a slot"
    assert not engine.slots.in_flight.any(), "a drained engine counts steps in flight"
    assert engine.ledger.num_free == engine.ledger.num_blocks, "a drained engine holds blocks"
    assert not engine.requests, "a drained engine knows requests"
    if isinstance(engine.device, QueuedDevice):
        engine.device.synchronize()


def drafts_at(served_by: Engine, some: tuple[Ask, ...]) -> dict[tuple[int, ...], list[int]]:
    """Drafts of all requests on a synchronous device, by the tokens that were known when they were made."""
    found: dict[tuple[int, int], list[int]] = {}
    columns: Any = served_by.runner.memory.buffers

    def look(_: Engine) -> None:
        for name, request in served_by.requests.items():
            if request.slot >= 0 and (count := int(columns["draft_len"].host_array[request.slot])):
                known = int(served_by.slots.num_known[request.slot])
                found[int(name.removeprefix("ask-")), known] = columns["drafts"].host_array[request.slot][:count].tolist()

    outputs = drive(served_by, some, each_step=look)
    texts = [(*ask.prompt_ids, *output.token_ids) for ask, output in zip(some, outputs, strict=True)]
    return {texts[i][:known]: drafts for (i, known), drafts in found.items()}


@functools.cache
def _solo_engine(model: str, num_drafts: int) -> Engine:
    return engine(model, draft_tokens=num_drafts, max_num_seqs=1, prefix_cache=False)


@functools.lru_cache(maxsize=1024)
def solo(model: str, num_drafts: int, prompt_ids: tuple[int, ...], params: SamplingParams) -> RequestOutput:
    """The request alone, in `invariant` mode on the reference with everything else at its default."""
    return drive(_solo_engine(model, num_drafts), [Ask(prompt_ids, params)])[0]


@functools.lru_cache(maxsize=1024)
def solo_moved(
    model: str,
    num_drafts: int,
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    kept: int,
    rules: tuple[tuple[str, Any], ...] = (),
) -> RequestOutput:
    """The request alone, of which `kept` tokens come from the weights of `model` and the others from those of `moved(model)`;
    `rules`: further options of its engine, where some are kept.

    It fails where `kept` tokens end in the middle of a round."""
    if not kept:
        return solo(tiny.moved(model), num_drafts, prompt_ids, params)

    def each_step(alone: Engine) -> None:
        if (
            alone.requests["ask-0"].status is Status.RUNNING
            and alone.slots.num_known[0] >= len(prompt_ids) + kept
            and not updated
        ):
            assert alone.slots.num_known[0] == len(prompt_ids) + kept, "weights were replaced in the middle of a round"
            alone.update_weights(tiny.checkpoint(tiny.moved(model)), running="recompute")
            updated.append(kept)

    updated: list[int] = []
    alone = engine(model, draft_tokens=num_drafts, max_num_seqs=1, prefix_cache=False, **dict(rules))
    output = drive(alone, [Ask(prompt_ids, params)], each_step=each_step)[0]
    assert updated, f"the request alone ended before it had {kept} tokens"
    return output


@functools.lru_cache(maxsize=1024)
def replay(model: str, num_drafts: int, ask: Ask) -> CoupledRounds:
    """What the recomputing oracle makes of the request; it knows nothing of stop strings."""
    p, begin = ask.params, len(ask.prompt_ids)

    def process(logits: np.ndarray[Any, Any], known: Sequence[int]) -> np.ndarray[Any, Any]:
        return processed(logits, known[:begin], known[begin:], p)

    return coupled_rounds(oracle(model), ask.prompt_ids, ask.sampling, num_drafts, p.max_new_tokens, ask.stop_ids, process)


def essence(output: RequestOutput) -> Mapping[str, Any]:
    """What must not depend on how a request was served."""
    names = ("token_ids", "text", "rounds", "drafted", "finish_reason", "error")
    return {name: getattr(output, name) for name in names}
