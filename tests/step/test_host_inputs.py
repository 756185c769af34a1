"""Data from the host in every step: drafts made on the host and masks that know the text, at every depth and in every schedule.

What a step is fed depends on the steps before alone, so texts and rounds are the same whether or not the device runs ahead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.config import EngineConfig
from polydraft.errors import CapabilityError, DeviceError
from polydraft.instruments.base import Instrument
from polydraft.instruments.timeline import DEVICE
from polydraft.instruments.trace import Trace
from polydraft.program.host_inputs import FeatureFactory, Needs
from tests.support import host_features, tiny
from tests.support.depth import crossed
from tests.support.emulator import SCHEDULES, Emulator
from tests.support.host_features import NoRepeats, Watching
from tests.support.poison import poison_free_blocks
from tests.support.runs import Ask, drive, essence, solo

DEPTHS = (0, 1, 2)
each_depth = pytest.mark.parametrize("depth", DEPTHS)
GREEDY, SAMPLED = SamplingParams(ignore_eos=True), SamplingParams(temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
SLOTS, DRAFTS = 3, 3


def served(
    query: str | None, features: Sequence[FeatureFactory] = (), *, instruments: Sequence[Instrument] = (), **options: Any
) -> Engine:
    """An engine on an emulator with the options of `query`, or on the reference."""
    config: dict[str, Any] = {
        "model": str(tiny.checkpoint("narrow")), "plugins": (*tiny.PLUGINS, host_features.__name__), "draft_tokens": DRAFTS,
        "max_num_seqs": SLOTS, "max_batched_tokens": 30, "invariant": True, "graph": "off", "backend": "reference", **options,
    }  # fmt: skip
    plugin = None if query is None else Emulator(f"emulator:0?{query}")
    return Engine(EngineConfig.from_mapping(config), backend=plugin, features=features, instruments=instruments)


def asks(tokens: int = 20) -> list[Ask]:
    """Requests that join while others run, with a prompt of several chunks, and one that is aborted."""
    kinds = (GREEDY, SAMPLED, GREEDY, GREEDY, SAMPLED)
    prompts = ((5, 7, 9, 5, 7), (3, 1, 4, 1, 5, 9, 2, 6), tuple(range(1, 40)), (2,), (8, 8, 8))
    every = [
        Ask(prompt, replace(params, max_new_tokens=tokens - 3 * i), arrival=2 * i)
        for i, (prompt, params) in enumerate(zip(prompts, kinds, strict=True))
    ]
    return [*every, Ask((4, 4), replace(GREEDY, max_new_tokens=tokens), 3, abort=9)]


def essences(engine: Engine, some: list[Ask]) -> list[Mapping[str, Any]]:
    """What the requests came to; of the one that was aborted nothing, since steps are not moments."""
    outputs = drive(engine, some, each_step=poison_free_blocks if "emulator" in engine.device.spec else None)
    engine.close()
    return [essence(output) for output, ask in zip(outputs, some, strict=True) if ask.abort is None]


@pytest.fixture(autouse=True, scope="module")
def corpus() -> Iterator[None]:
    """Texts like those of this page, every seventh token another: drafts that are right most of the time."""
    plain = [solo("narrow", 0, ask.prompt_ids, ask.params).token_ids for ask in asks()]
    masked = [one["token_ids"] for one in masked_plainly()]
    for ask, token_ids in (*zip(asks(), plain, strict=True), *zip(asks(), masked, strict=False)):
        text = (*ask.prompt_ids, *token_ids)
        host_features.CORPUS.append(tuple(token if i % 7 else (token + 1) % 64 for i, token in enumerate(text)))
    yield
    host_features.CORPUS.clear()


# -- drafts of the host ------------------------------------------------------------------------------------------------
@functools.cache
def synchronous(proposer: str) -> list[Mapping[str, Any]]:
    return essences(served(None, proposer=proposer), asks())


@pytest.mark.parametrize("proposer", ["host-suffix", "host-fixed"])
def test_drafts_of_the_host_change_no_text_and_some_are_accepted(proposer: str) -> None:
    found = synchronous(proposer)
    alone = [solo("narrow", 0, ask.prompt_ids, ask.params) for ask in asks() if ask.abort is None]
    assert [one["token_ids"] for one in found] == [output.token_ids for output in alone]
    assert sum(sum(one["rounds"]) for one in found) > 5
    drafted = [(one["drafted"], len(one["rounds"])) for one in found]
    if proposer == "host-fixed":  # but for the end of a text, which has no room for all
        assert all(drafts >= DRAFTS * (rounds - 2) for drafts, rounds in drafted)
    else:
        assert any(0 < drafts < DRAFTS * (rounds - 2) for drafts, rounds in drafted)


@each_depth
@pytest.mark.parametrize("graph", ["off", "decode"])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_behind_the_launch_are_the_same_at_every_depth(seed: int, graph: str, depth: int) -> None:
    schedule = SCHEDULES[(7 * seed + depth) % len(SCHEDULES)]
    sizes: dict[str, Any] = {"graph": graph, "graph_sizes": (1, 2, 3)} if graph != "off" else {}
    engine = served(f"seed={seed}&{schedule}", proposer="host-suffix", overlap=depth, **sizes)
    assert essences(engine, asks()) == synchronous("host-suffix"), engine.device.spec


@each_depth
@pytest.mark.parametrize("seed", range(3))
def test_the_suffix_proposer_changes_no_text_at_any_depth(seed: int, depth: int) -> None:
    schedule = SCHEDULES[(5 * seed + depth) % len(SCHEDULES)]
    options: dict[str, Any] = {"proposer": "suffix", "draft_tokens": 4, "proposer_options": ("min_token_prob=0",)}
    engine = served(f"seed={seed}&{schedule}", overlap=depth, num_blocks=40, block_size=4, **options)
    some = [*asks(), *(replace(ask, arrival=30 + ask.arrival) for ask in asks() if ask.abort is None)]
    found = essences(engine, some)
    alone = [solo("narrow", 0, ask.prompt_ids, ask.params).token_ids for ask in some if ask.abort is None]
    assert [one["token_ids"] for one in found] == alone
    assert sum(sum(one["rounds"]) for one in found) > 5


def test_drafts_before_the_launch_wait_for_the_step_before() -> None:
    engine = served("seed=3&policy=lazy", proposer="host-fixed")
    assert engine.resolved.overlap == 0
    assert "proposer host-fixed needs exact_lengths" in next(d.reason for d in engine.resolved.decisions if d.name == "overlap")
    assert essences(engine, asks()) == synchronous("host-fixed")
    with pytest.raises(CapabilityError, match="--overlap 1: proposer host-fixed needs exact_lengths"):
        served("", proposer="host-fixed", overlap=1)


# -- masks that know the text --------------------------------------------------------------------------------------------
@functools.cache
def masked_plainly() -> list[Mapping[str, Any]]:
    """No drafts, one step after the other, on the reference."""
    return essences(served(None, (NoRepeats,), draft_tokens=0, proposer="none"), asks())


@functools.cache
def masked_synchronously(proposer: str) -> list[Mapping[str, Any]]:
    return essences(served(None, (NoRepeats,), proposer=proposer), asks())


def test_a_mask_rules_every_token() -> None:
    for one, ask in zip(masked_plainly(), asks(), strict=False):
        text = [ask.prompt_ids[-1], *one["token_ids"]]
        assert all(a % 3 != b % 3 for a, b in itertools.pairwise(text))
    free = [solo("narrow", 0, ask.prompt_ids, ask.params).token_ids for ask in asks() if ask.abort is None]
    assert [one["token_ids"] for one in masked_plainly()] != free


@pytest.mark.parametrize("proposer", ["mtp", "host-suffix"])
def test_a_mask_is_lossless_behind_drafts(proposer: str) -> None:
    found = masked_synchronously(proposer)
    assert [one["token_ids"] for one in found] == [one["token_ids"] for one in masked_plainly()]
    assert sum(sum(one["rounds"]) for one in found) > 5


@pytest.mark.parametrize(
    ("of", "graph", "depth"), crossed(4, [("mtp", 1), ("mtp", 2), ("host-suffix", 3)], ["off", "decode"], DEPTHS), ids=str
)
def test_a_mask_is_the_same_at_every_depth(of: tuple[str, int], graph: str, depth: int) -> None:
    proposer, seed = of
    schedule = SCHEDULES[(5 * seed + depth) % len(SCHEDULES)]
    sizes: dict[str, Any] = {"graph": graph, "graph_sizes": (1, 2, 3)} if graph != "off" else {}
    engine = served(f"seed={seed}&{schedule}", (NoRepeats,), proposer=proposer, overlap=depth, **sizes)
    assert essences(engine, asks()) == masked_synchronously(proposer), engine.device.spec


@pytest.mark.parametrize("uncapturable", ["forward_meta", "align_drafts", "residual_add,argmax"])
def test_halves_are_captured_in_pieces_where_they_must_be(uncapturable: str) -> None:
    options: dict[str, Any] = {"graph": "decode", "graph_sizes": (3,), "overlap": 1}
    engine = served(f"seed=8&uncapturable={uncapturable}", (NoRepeats,), proposer="host-suffix", **options)
    graphs = engine.runner.graphs
    assert graphs is not None
    assert essences(engine, asks()) == masked_synchronously("host-suffix")
    assert graphs.counters.replayed_steps > 10


@each_depth
@pytest.mark.parametrize("proposer", ["mtp", "host-suffix"])
def test_texts_survive_preemption(proposer: str, depth: int) -> None:
    """Blocks run out, and requests queue again. A guess is made from before a step, and a request that comes back has a better
    one: its rounds may differ, its text does not."""
    crowd = [replace(ask, arrival=min(ask.arrival, 2)) for ask in asks() if ask.abort is None]
    engine = served(
        f"seed={depth}", (NoRepeats,), proposer=proposer, overlap=depth, block_size=2, num_blocks=32, max_batched_tokens=12
    )
    found = drive(engine, crowd, each_step=poison_free_blocks)
    assert engine.scheduler.num_preemptions > 0
    assert [output.token_ids for output in found] == [one["token_ids"] for one in masked_plainly()]
    engine.close()


# -- what it costs -------------------------------------------------------------------------------------------------------
def test_a_step_in_two_halves_still_waits_once_and_the_device_runs_ahead() -> None:
    engine = served("seed=1", (NoRepeats,), overlap=1, block_size=96)
    for i in range(SLOTS):
        engine.add((i + 1, 5, 9), replace(GREEDY, max_new_tokens=80))
    for _ in range(5):
        engine.step()
    for _ in range(6):
        before = engine.device.counters.copy()
        engine.step()
        after = engine.device.counters
        assert after.host_syncs - before.host_syncs == 1
        assert after.allocations == before.allocations
        assert after.uploads - before.uploads == 1
        assert after.downloads - before.downloads == 3, "the snapshot, the drafts and how many they are"
        assert engine.slots.in_flight.sum() == SLOTS, "a whole step is in flight while the host goes on"
    engine.close()


def test_the_target_runs_while_the_host_fills_its_inputs() -> None:
    """The order of the host's calls: the first half of a step, then the wait for the step before, then the second half."""
    engine, calls = served("policy=lazy", (NoRepeats,), overlap=1), list[tuple[str, int]]()
    runner = engine.runner

    def noted(name: str, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            calls.append((name, x.step_id if name == "launch" else x.plan.step_id))
            return inner(x)

        return call

    for name in ("launch", "collect", "resume"):
        setattr(runner, name, noted(name, getattr(runner, name)))
    drive(engine, [Ask((1, 2, 3), replace(GREEDY, max_new_tokens=9))])
    engine.close()
    steps = [step for name, step in calls if name == "launch"]
    wanted = [("launch", steps[0]), ("resume", steps[0])]
    for step in steps[1:]:
        wanted += [("launch", step), ("collect", step - 1), ("resume", step)]
    assert calls == [*wanted, ("collect", steps[-1])]


def test_a_timeline_shows_the_middle_of_a_step() -> None:
    """The target's pass of a step runs on the device while the host collects the step before and fills the inputs."""
    latency = "kernel:50,upload:5,download:5,issue:1"
    trace = Trace()
    engine = served(f"policy=fifo&latency={latency}", (NoRepeats,), instruments=(trace,), overlap=1)
    drive(engine, [Ask((1, 2, 3), replace(GREEDY, max_new_tokens=16))])
    spans = trace.finish().spans
    engine.close()
    middles = {span.step: span for span in spans if span.name == "inputs" and span.kind == "stage"}
    assert len(middles) > 5
    uploads = [span for span in spans if span.side == DEVICE and span.name == "mask"]
    assert {span.lane for span in uploads} == {"inputs"}, "they have a stream of their own"
    targets = {s: [x for x in spans if x.side == DEVICE and x.stage == "target" and x.step == s] for s in middles}
    hidden = [s for s, middle in middles.items() if targets[s] and middle.start_s < targets[s][-1].end_s]
    assert len(hidden) >= len(middles) - 2


@pytest.mark.parametrize("features", [(NoRepeats,), ()], ids=["mask", "none"])
def test_a_feature_is_free_where_there_is_none(features: tuple[FeatureFactory, ...]) -> None:
    engine = served("", features)
    programs = engine.runner.programs["greedy"]
    assert list(programs) == (["target", "verify", "draft"] if features else ["target", "draft"])
    joined = [contract for part in ("target", "verify") if part in programs for contract in programs[part].describe()]
    assert [c for c in joined if c in {"lm_head", "linear", "process_logits", "residual_add", "argmax"}][-2:] == (
        ["residual_add", "argmax"] if features else ["process_logits", "argmax"]
    )
    engine.close()


# -- what a feature is told ------------------------------------------------------------------------------------------------
@each_depth
def test_what_is_known_is_what_was_asked_for(depth: int) -> None:
    """With `previous_tokens` the text as it stands before the step; with less, a bound that is never too low."""
    middle, bound = Watching("previous_tokens"), Watching("upper_bound_lengths")
    engine = served("seed=4", (middle, bound), overlap=depth)
    drive(engine, asks())
    engine.close()
    assert len(middle.seen) == len(bound.seen) > 15
    older = 0
    for (step, slots, exact, most), (other, order, told, upper) in zip(middle.seen, bound.seen, strict=True):
        assert step == other
        assert np.array_equal(slots, order)
        assert (upper >= exact).all(), "an upper bound holds"
        assert (most >= exact).all()
        assert (upper <= exact + (DRAFTS + 1) * max(depth, 1)).all(), "and says something"
        older += int((told < exact).sum())
    assert (older > 0) == (depth > 0), "before the launch the host is behind, unless nothing overlaps"


@each_depth
@pytest.mark.parametrize("needs", ["none", "upper_bound_lengths"])
def test_what_needs_no_result_costs_nothing(needs: Needs, depth: int) -> None:
    engine = served("seed=4", (Watching(needs),), overlap=depth)
    assert not engine.runner.inputs.splits(bound=True)
    seen = 0

    def deepest(engine: Engine) -> None:
        nonlocal seen
        seen = max(seen, int(engine.slots.in_flight.max()))

    drive(engine, asks(), each_step=deepest)
    assert seen == depth
    engine.close()


# -- when things go wrong ----------------------------------------------------------------------------------------------------
@each_depth
@pytest.mark.parametrize("fault", ["upload@30", "align_drafts@9", "residual_add@20", "download@14", "op@700:oom"])
def test_a_fault_around_host_inputs_voids_what_is_in_flight_alone(fault: str, depth: int) -> None:
    engine = served(f"seed=2&fault={fault}", (NoRepeats,), proposer="host-suffix", overlap=depth)
    some = [ask for ask in asks() if ask.abort is None]
    outputs = drive(engine, some, each_step=poison_free_blocks)
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert 1 <= len(failed) <= SLOTS
    assert all(engine.device.spec in output.error for output in failed)
    for output, wanted in zip(outputs, masked_plainly(), strict=True):
        assert output.token_ids == wanted["token_ids"][: len(output.token_ids)]
        assert output in failed or len(output.token_ids) == len(wanted["token_ids"])
    assert not engine.failure
    engine.close()


@each_depth
@pytest.mark.parametrize("needs", ["upper_bound_lengths", "previous_tokens"])
def test_a_feature_hears_that_what_it_sent_may_be_lost(needs: Needs, depth: int) -> None:
    engine = served("seed=2&fault=op@700", (Watching(needs),), overlap=depth)
    drive(engine, [ask for ask in asks() if ask.abort is None])
    (watcher,) = engine.runner.inputs.features
    assert isinstance(watcher, host_features.Watcher)
    assert watcher.voided == 1
    engine.close()


def test_a_lost_device_ends_every_request() -> None:
    engine = served("seed=2&fault=op@300:lost", (NoRepeats,), proposer="host-suffix", overlap=1)
    outputs = drive(engine, [replace(ask, arrival=0) for ask in asks() if ask.abort is None])
    assert {output.finish_reason for output in outputs} == {"error"}
    with pytest.raises(DeviceError, match="lost the device"):
        engine.add((1, 2))
    engine.close()


@each_depth
def test_the_hazard_checker_has_nothing_to_say(depth: int) -> None:
    options: dict[str, Any] = {"graph": "decode", "graph_sizes": (1, 3)} if depth == 1 else {}
    engine = served("seed=6&policy=lazy", (NoRepeats,), proposer="host-suffix", overlap=depth, sanitize=True, **options)
    drive(engine, asks())
    assert engine.hazards == ()
    engine.close()


@pytest.mark.parametrize("proposer", ["suffix", "hybrid"])
def test_the_hazard_checker_has_nothing_to_say_of_a_lookup(proposer: str) -> None:
    """With fewer requests than slots, too."""
    engine = served("seed=6&policy=lazy", proposer=proposer, overlap=1, graph="decode", graph_sizes=(1, 3), sanitize=True)
    drive(engine, asks())
    assert engine.hazards == ()
    engine.close()


@pytest.mark.parametrize("removed", ["uploaded", "consumed"])
def test_the_hazard_checker_misses_no_edge_of_the_inputs(removed: str) -> None:
    """The compute stream must wait for the upload, and the next upload for those who read the last one."""
    engine = served("seed=6&policy=lazy", proposer="host-suffix", overlap=1, sanitize=True)
    inputs: Any = engine.runner.inputs
    event = inputs._uploaded if removed == "uploaded" else inputs._consumed
    waiting: Any = engine.device.stream if removed == "uploaded" else inputs._stream
    wait = waiting.wait
    waiting.wait = lambda one: None if one is event else wait(one)
    drive(engine, [ask for ask in asks() if ask.abort is None])
    assert "unordered-access" in {hazard.name for hazard in engine.hazards}
    assert any(hazard.memory.startswith("guess") for hazard in engine.hazards)
