"""Shapes of a step: what is launched depends on the running sequences and on K, never on how many drafts are accepted.

So captured graphs need no warm-up that accepts drafts, and every bucket serves every round. A proposer's declaration says what
its launches have room for, and the number of drafts reaches every place that counts with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from polydraft import Engine, SamplingParams
from polydraft.contracts.layout import SNAPSHOT_TOKENS
from polydraft.plugins.program_pass import Node
from polydraft.program import program as program_module
from polydraft.program.program import lengths
from polydraft.step import runner as runner_module
from polydraft.step.graphs import Shape
from tests.support import host_features, tiny
from tests.support.emulator import emulated
from tests.support.runs import Ask, drive

MODEL, SLOTS, DRAFTS = "narrow", 5, 3
BUCKETS = (1, 2, 4, 5)
ALWAYS, NEVER = (1.0,) * DRAFTS, (0.0,) * DRAFTS
Launches = tuple[tuple[str, int], ...]


def served(graph: str, **options: Any) -> Engine:
    sizes = {"graph": graph, "graph_sizes": BUCKETS} if graph != "off" else {"graph": "off"}
    return emulated("policy=fifo", MODEL, **{"draft_tokens": DRAFTS, "max_num_seqs": SLOTS, "overlap": 1, **sizes, **options})


def launched(engine: Engine, asks: list[Ask]) -> Mapping[int, set[Launches]]:
    """Kernels with their launch lengths, in order, of each step of pure decode without staged writes; by running sequences, or by
    bucket where steps are replayed."""
    found: dict[int, set[Launches]] = defaultdict(set)
    device: Any = engine.device
    executor, runner, issued = device.executor, engine.runner, list[tuple[str, int]]()
    put, launch = executor._put, runner.launch

    def noted(stream: Any, units: Any, **options: Any) -> None:
        issued.extend((work.name, work.rows) for unit in units for work in unit if work.kind == "kernel")
        put(stream, units, **options)

    def launch_noted(plan: Any) -> Any:
        issued.clear()
        flight = launch(plan)
        if not plan.has_prefill and not plan.writes:
            found[plan.num_seqs if flight.shape is None else flight.shape.bucket].add(tuple(issued))
        return flight

    executor._put = noted
    runner.launch = launch_noted  # type: ignore[method-assign]
    drive(engine, asks)
    engine.close()
    return found


def draining(params: SamplingParams = SamplingParams()) -> list[Ask]:  # noqa: B008  frozen
    """As many requests as slots, of which one after the other ends: the batch shrinks through every size."""
    each = [SamplingParams(**{**vars(params), "max_new_tokens": 10 + 12 * i, "ignore_eos": True}) for i in range(SLOTS)]
    return [Ask((i + 1, 5, 9), one) for i, one in enumerate(each)]


# -- acceptance changes no shape -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("graph", ["off", "decode"])
def test_a_step_launches_the_same_whether_all_drafts_are_accepted_or_none(graph: str) -> None:
    all_, none = (launched(served(graph, accept_schedule=schedule, block_size=96), draining()) for schedule in (ALWAYS, NEVER))
    assert set(all_) == set(none) == (set(BUCKETS) if graph == "decode" else set(range(1, SLOTS + 1)))
    for size, launches in all_.items():
        assert len(launches) == 1, "steps of one size are all alike"
        assert launches == none[size]
        rows = {n for _, n in next(iter(launches))}
        assert rows == {size, size * (DRAFTS + 1)}, "full windows for the target and the first pass, one row a sequence behind"


@pytest.mark.parametrize(("overlap", "pieces"), [(0, ("target", "draft")), (1, ("step",)), (2, ("step",))])
@pytest.mark.parametrize("schedule", [ALWAYS, NEVER], ids=["all", "none"])
def test_every_captured_bucket_is_replayed(schedule: tuple[float, ...], overlap: int, pieces: tuple[str, ...]) -> None:
    """With verification that accepts everything a request of this length has (K + 1) x 2 tokens and more in every batch size.
    With overlap a step is one graph; without it the snapshot's copy stands in front of the draft passes."""
    engine = served("decode", accept_schedule=schedule, overlap=overlap)
    graphs, replayed = engine.runner.graphs, set()
    assert graphs is not None
    replay, captured = graphs.replay, {(piece, shape) for _, piece, shape in graphs._calls}

    def noted(kind: str, piece: Any, shape: Shape) -> None:
        replayed.add((piece, shape))
        replay(kind, piece, shape)

    graphs.replay = noted  # type: ignore[method-assign]
    outputs = drive(engine, draining())
    engine.close()
    assert replayed == captured == {(piece, Shape(bucket, DRAFTS)) for piece in pieces for bucket in BUCKETS}
    assert graphs.counters.eager_steps <= 2, "nothing but prefill runs eagerly"
    assert {output.accepted for output in outputs} == {0} or schedule is ALWAYS
    assert all(len(output.token_ids) >= 2 * (DRAFTS + 1) for output in outputs)


def test_capturing_asks_for_no_request() -> None:
    """Buckets are captured before the first request, over an empty launch order, and the first decode step is replayed."""
    engine = served("decode")
    assert engine.totals.steps == 0
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.counters.captured == len(BUCKETS) * len(engine.runner.programs)
    drive(engine, [Ask((1, 2, 3), SamplingParams(max_new_tokens=9, ignore_eos=True))])
    assert engine.runner.graphs.counters.eager_steps == 1
    engine.close()


# -- what a proposer launches ----------------------------------------------------------------------------------------------
PROPOSERS = [
    ("mtp", True, False), ("ngram", False, True), ("host-suffix", False, True), ("host-fixed", True, True), ("none", True, True),
]  # fmt: skip
"""Name, whether every round is full, and whether all drafts come from one call or from a pass each."""


@pytest.mark.parametrize("graph", ["off", "decode"])
@pytest.mark.parametrize(("proposer", "fixed", "one_call"), PROPOSERS)
def test_launches_have_the_shape_of_the_proposer(proposer: str, fixed: bool, one_call: bool, graph: str) -> None:
    drafts = {"draft_tokens": 0 if proposer == "none" else DRAFTS}
    plugins = (*tiny.PLUGINS, host_features.__name__)
    depth = {"overlap": 0 if proposer == "host-fixed" else 1}
    engine = served(graph, proposer=proposer, plugins=plugins, **drafts, **depth)
    most, names = engine.resolved.limits.num_drafts, engine.runner.programs["greedy"]["draft"].describe()
    outputs = drive(engine, draining())
    engine.close()
    if one_call:
        assert len(names) == len(set(names)) <= 2, "no launch is made for each draft"
    else:
        assert sum("advance_draft" in name for name in names) == most
    assert all(output.drafted <= most * len(output.rounds) for output in outputs)
    full = [output.drafted >= most * (len(output.rounds) - 3) for output in outputs]  # but for the end of a text
    assert all(full) == fixed, "of fixed width means that every round is full"


# -- the number of drafts --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_the_number_of_drafts_reaches_every_place_and_is_nowhere_a_hard_coded_zero(
    num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One caller that leaves it out (or at 0) makes drafting silently cheaper and worse, and changes no text."""
    nodes: list[Node] = []
    build = program_module.build

    def noted(builders: Any) -> Any:
        nodes.extend(node for builder in builders for node in builder.nodes if isinstance(node, Node))
        return build(builders)

    monkeypatch.setattr(runner_module, "build", noted)
    engine = served("decode", draft_tokens=num_drafts)
    window, limits = num_drafts + 1, engine.resolved.limits
    assert (limits.num_drafts, limits.window, limits.max_logit_rows) == (num_drafts, window, SLOTS * window)
    buffers = engine.runner.memory.buffers
    assert buffers["drafts"].shape == (SLOTS, num_drafts)
    assert buffers["window"].shape == buffers["out_tokens"].shape == (SLOTS, window)
    assert buffers["record"].shape == (SLOTS, SNAPSHOT_TOKENS + window)
    lookaheads = {node.args.lookahead for node in nodes if node.contract == "reserve_blocks"}  # type: ignore[union-attr]
    assert lookaheads == {num_drafts}
    passes = [node.args.pass_index for node in nodes if node.contract == "advance_draft"]  # type: ignore[union-attr]
    assert sorted(set(passes)) == list(range(num_drafts))
    graphs = engine.runner.graphs
    assert graphs is not None
    wanted = lengths(rows=4 * window, logit_rows=4 * window, seqs=4)
    assert graphs.policy.lengths(4, limits) == wanted
    plans: list[Any] = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]  # type: ignore[method-assign, func-returns-value]
    outputs = drive(engine, draining())
    engine.close()
    decode = [plan for plan in plans if not plan.has_prefill]
    assert decode
    assert all((plan.rows == window).all() and plan.num_rows == plan.num_seqs * window for plan in decode)
    assert all(output.drafted >= num_drafts * (len(output.rounds) - num_drafts) for output in outputs)
    assert sum(output.accepted for output in outputs) > 0
