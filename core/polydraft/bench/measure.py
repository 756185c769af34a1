"""Times one run: requests of one length through an engine, and the time of a round of all of them.

The timed run records nothing but the device's own timeline; the host time by stage comes from a second run in which stages are
recorded. What to compare is decided elsewhere, and prefill is not mixed into the figures of a round.

A *full* step is one in which every request has a decode round. Figures of rounds are those of full steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.engine import Engine
from polydraft.errors import DeviceError, RequestError
from polydraft.instruments.base import Instrument
from polydraft.instruments.idle import Idle
from polydraft.instruments.timeline import EXACT, HOST, HOST_STAGES, OWN_TIME, Recording, clock_of
from polydraft.instruments.trace import Trace
from polydraft.instruments.trace_figures import OTHER, busy_host, by_stage, host_seconds, idle_share
from polydraft.output.request_output import RequestOutput
from polydraft.sampling_params import SamplingParams


def instruments() -> tuple[Instrument, ...]:
    """What an engine that is measured has to be built with; all of it is off but in the runs that want it.

    Launches are recorded only where the device computes inside the calls and does not say how long: all other recordings look
    at the clock a dozen times a step."""
    return Trace(calls="immediate", on=False), Idle()


@dataclass(frozen=True)
class Load:
    """What is asked of an engine: `batch` greedy requests at once, prompts of random tokens, ends by length alone."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    logprobs: int | None = None
    """Log probabilities that each request asks for; the engine has to allow as many."""

    def add(self, engine: Engine) -> None:
        """Queue the requests; their seeds, and so synthetic acceptance, are the same in every run."""
        vocab = engine.model.vocab_size
        for i in range(self.batch):
            prompt = np.random.default_rng(i).integers(1, vocab, self.prompt_tokens).tolist()
            params = SamplingParams(max_new_tokens=self.new_tokens, ignore_eos=True, seed=i, logprobs=self.logprobs)
            engine.add(prompt, params)


@dataclass(frozen=True)
class Step:
    """One call of the engine: when it began and how long it took, seconds on the device's clock where it keeps one and on the
    wall elsewhere, seconds that its device measured itself, and what was applied in it."""

    number: int
    start_s: float
    seconds: float
    kernel_seconds: float
    rounds: int
    new_tokens: int


Watch = Callable[[int], None]
"""Hears after each step how many tokens it brought. It costs time, so only runs whose figures nobody keeps have one."""


def run(engine: Engine, load: Load, watch: Watch | None = None) -> tuple[list[Step], list[RequestOutput]]:
    """Serve the load to its end. Raises `DeviceError` for a request that failed."""
    load.add(engine)
    steps: list[Step] = []
    outputs: list[RequestOutput] = []
    totals, extra, now = engine.totals, engine.device.counters.extra, clock_of(engine.device)
    while len(outputs) < load.batch:
        rounds, tokens, own = totals.rounds, totals.new_tokens, extra.get(OWN_TIME, 0)
        start = now()
        engine.step()
        outputs += engine.poll()
        seconds, own_s = now() - start, 1e-9 * (extra.get(OWN_TIME, 0) - own)
        steps.append(Step(totals.steps, start, seconds, own_s, totals.rounds - rounds, totals.new_tokens - tokens))
        if watch is not None:
            watch(steps[-1].new_tokens)
    for output in outputs:
        if output.finish_reason == "error":
            raise DeviceError(f"request {output.id} of the benchmark failed: {output.error}")
    return steps, outputs


def full_steps(steps: list[Step], load: Load) -> list[Step]:
    """Raises `RequestError` when there is none: the requests are too short to meet."""
    full = [step for step in steps if step.rounds == load.batch]
    if not full:
        raise RequestError(
            f"no step had a round of all {load.batch} requests, since they end after {load.new_tokens} tokens each; raise "
            "--new-tokens or lower --prompt-tokens"
        )
    return full


def timed(engine: Engine, load: Load, watch: Watch | None = None) -> dict[str, float]:
    """Figures of one bare run. `idle_share`: of the device in its full steps, where the device says when it worked. Raises
    `ConfigError` for an engine that was built without `instruments`."""
    now = clock_of(engine.device)
    with engine.instruments[Idle].watching(now, about=load.new_tokens) as idle_between:
        start = now()
        steps, outputs = run(engine, load, watch)
        seconds = now() - start
        full = full_steps(steps, load)
        idle = idle_between(*_launched(steps, full, ahead=engine.resolved.overlap))
    figures = {
        "ms_per_round": 1e3 * statistics.median(step.seconds for step in full),
        "tokens_per_round": sum(step.new_tokens for step in full) / sum(step.rounds for step in full),
        "tokens_per_s": load.batch * load.new_tokens / seconds,
    }
    if idle is not None:
        figures["idle_share"] = idle
    if OWN_TIME in engine.device.counters.extra:
        figures["host_us_per_step"] = 1e6 * statistics.median(step.seconds - step.kernel_seconds for step in full)
    if now is time.perf_counter:  # the clock by which requests know when they came
        figures["ttft_ms"] = 1e3 * statistics.median(output.ttft_s or 0.0 for output in outputs)
    return figures


def _launched(steps: Sequence[Step], full: Sequence[Step], *, ahead: int) -> tuple[float, float]:
    """When the first of the full steps was about to be launched, and when the last one had been: a call applies one step and
    launches the one that is so many later. Prefill runs on behind the launch of the first."""
    numbers = {step.number - ahead for step in full}
    calls = [step for step in steps if step.number in numbers]
    return calls[0].start_s, calls[-1].start_s + calls[-1].seconds


def profiled(engine: Engine, load: Load) -> tuple[dict[str, float | None], dict[str, float]]:
    """Host figures of one recorded run, and host microseconds by stage: medians over full steps. Raises `ConfigError` for an
    engine that was built without `instruments`."""
    own, trace = OWN_TIME in engine.device.counters.extra, engine.instruments[Trace]
    trace.start()
    try:
        steps, _ = run(engine, load)
        while engine.has_work:  # a step that was launched ahead belongs to this run
            engine.step()
    finally:
        trace.stop()
    recording = trace.finish()
    full = {step.number: step for step in full_steps(steps, load)}
    stages = {number: dict(found) for number, found in host_seconds(recording).items() if number in full}
    for number, found in stages.items():
        found["launch"] -= full[number].kernel_seconds
    by_name = {stage: 1e6 * values.median for stage, values in by_stage(stages).items()}
    figures: dict[str, float | None] = {}
    if not own:  # otherwise the bare run knows it, without the recorder's own time
        figures["host_us_per_step"] = 1e6 * statistics.median(busy_host(found) for found in stages.values())
    if recording.device_times == EXACT and not own:
        figures["idle_share"] = _idle_by_calls(recording, stages)
    return figures, {stage: by_name.get(stage, 0.0) for stage in (*HOST_STAGES, OTHER)}


def _idle_by_calls(recording: Recording, steps: Mapping[int, Any]) -> float | None:
    """Idle share of a device that runs what it is given inside the calls, between the first launch and the last commit of
    `steps`."""
    host = [s for s in recording.spans if s.side == HOST and s.step in steps and s.name in {"launch", "commit"}]
    start, end = min(s.start_s for s in host), max(s.end_s for s in host)
    return idle_share(s for s in recording.spans if s.start_s >= start and s.end_s <= end)
