"""Alarms on acceptance: each fires on what it is for, and none on a thousand honest runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polydraft.contracts.base import Limits
from polydraft.host.acceptance_alarms import BLOCK, KINDS, AcceptanceAlarms
from polydraft.host.slots import SlotTable
from polydraft.host.totals import EngineTotals
from polydraft.program.plan import StepOutcome
from polydraft.sentinels import Phase
from tests.support.depth import among

K = 3
SLOTS = 8
NONE = dict.fromkeys(KINDS, 0)
NOBODY = np.zeros(0, np.int32)
NO_ROUNDS = StepOutcome(0, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, np.zeros((0, 1), np.int32))


class Run:
    """Steps of an engine with `SLOTS` requests, whose drafts are accepted by chance."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        limits = Limits(SLOTS, K, 64, 64, 4096, 16, 64, 4, 1, 100)
        self.totals = EngineTotals(accepted_at=[0] * K, drafted_at=[0] * K, drafts_per_step=[0] * (K + 1))
        self.slots = SlotTable(limits)
        self.said: list[str] = []
        self.alarms = AcceptanceAlarms(self.totals, self.slots, self.said.append, **options)
        self.rng = np.random.default_rng(seed)
        self.slots.num_rounds[:] = 100  # requests are in the middle of their texts

    def steps(
        self, number: int, chance: Callable[[int, bool], Any], *, graph: Callable[[int], bool] = lambda i: True,
        served: Callable[[int], Any] = lambda i: range(SLOTS),
    ) -> None:  # fmt: skip
        """`chance(i, by_graph)`, of all or by slot, of step i, whose drafts were made by a graph or not; `served(i)`: the slots
        of that step."""
        before = False
        for i in range(number):
            slots = np.array(served(i))
            p = np.broadcast_to(chance(i, before), SLOTS)[slots, None]
            accepted = (self.rng.random((len(slots), K)) < p).cumprod(axis=1).sum(axis=1)
            drafted = np.full(len(slots), K)
            self.totals.add(len(slots) + int(accepted.sum()), accepted, drafted)
            none = np.zeros(len(slots), np.int32)
            tokens, epochs = accepted + 1, self.slots.epoch[slots].copy()
            outcome = StepOutcome(i, slots, epochs, tokens, accepted, drafted, none, none, none, np.zeros((len(slots), K + 1)))
            before = graph(i)
            self.alarms.step(outcome, replayed=before)


def test_a_proposer_that_is_never_right() -> None:
    run = Run()
    run.steps(1000, lambda i, by_graph: 0.005)
    assert run.alarms.count == {**NONE, "floor": 1}
    assert "wanted 3% or more" in run.said[0]
    silent = Run(floor=0.0)
    silent.steps(1000, lambda i, by_graph: 0.005)
    assert silent.alarms.count == NONE


def test_a_proposer_that_is_never_right_soon_after_the_start() -> None:
    """Before there is enough to call it a fall: as where weights are replaced early, without the proposer's."""
    run = Run()
    run.steps(1000, lambda i, by_graph: 0.6 if i < 40 else 0.005)
    assert run.alarms.count == {**NONE, "floor": 1}, "once"
    run.steps(1000, lambda i, by_graph: 0.05 if i // 64 % 2 else 0.005)
    assert run.alarms.count == {**NONE, "floor": 1}, "a little more is not enough"
    run.steps(300, lambda i, by_graph: 0.6 if i < 100 else 0.005)
    assert run.alarms.count == {**NONE, "floor": 2}, "it was right for a while"


def test_new_weights_are_not_held_against_graphs() -> None:
    """With better drafts texts take fewer rounds, so that more of them have a prompt computed beside them, without a graph."""
    run = Run()
    run.steps(800, lambda i, by_graph: 0.6, graph=lambda i: i % 10 > 0)
    run.alarms.weights_changed()
    run.steps(2400, lambda i, by_graph: 0.01, graph=lambda i: i % 30 > 0)
    assert run.alarms.count == {**NONE, "fall": 1}


@pytest.mark.parametrize("after", [0.0, 0.2])
def test_drafts_that_were_better_before(after: float) -> None:
    run = Run()
    run.steps(1500, lambda i, by_graph: 0.6 if i < 800 else after)
    assert run.alarms.count == {**NONE, "fall": 1}, "once, and then it is usual"
    assert "see that the proposer's were, too" in run.said[0]
    run.steps(1500, lambda i, by_graph: 0.6 if i < 800 else after)
    assert run.alarms.count["fall"] == 2, "it rose and fell again"


def test_graphs_that_draft_worse() -> None:
    run = Run()
    run.steps(2000, lambda i, by_graph: 0.1 if by_graph else 0.6, graph=lambda i: i % 5 > 1)
    assert run.alarms.count == {**NONE, "graphs": 1}
    assert "serve with --graph off" in run.said[0]


def test_graphs_that_draft_worse_for_short_stretches() -> None:
    """A prompt arrives every twelve steps and is computed without a graph, beside requests that decode."""
    run = Run()
    run.steps(4000, lambda i, by_graph: 0.1 if by_graph else 0.6, graph=lambda i: i % 12 > 0)
    assert run.alarms.count == {**NONE, "graphs": 1}


def test_requests_that_no_graph_serves() -> None:
    """Too many requests for a graph, of which half are easy and short; then the others alone, by graphs."""
    run = Run()
    crowded = lambda i: i % 20 < 8  # noqa: E731  a condition of three calls below
    run.steps(
        6000, lambda i, by_graph: [0.2] * 4 + [0.95] * 4, graph=lambda i: not crowded(i),
        served=lambda i: range(SLOTS if crowded(i) else 4),
    )  # fmt: skip
    assert run.alarms.count == NONE


def test_a_text_whose_first_drafts_are_easy() -> None:
    """Those of its prompt's step, which no graph computes: of each request alone the first round, and of no other's."""
    run, length = Run(), 12

    def begins(i: int) -> range:
        run.slots.num_rounds[0] = i % length
        if i % length == 0:
            run.slots.epoch[0] += 1
        return range(1)

    run.steps(
        8000, lambda i, by_graph: 0.95 if i % length == 0 else 0.25, graph=lambda i: i % length != length - 1, served=begins
    )
    assert run.alarms.count == NONE


def looping(run: Run, slot: int, period: int, *, accepted: int = K) -> None:
    """A request in a slot whose text has that period (0: none), and whose rounds were accepted."""
    t = run.slots
    t.epoch[slot] += 1
    t.phase[slot], t.prompt_len[slot], t.num_known[slot], t.num_rounds[slot] = Phase.DECODE, 5, 405, 100
    t.tokens[slot, :405] = np.arange(405) % period if period else run.rng.integers(0, 9, 405)
    t.rounds[slot, :100], t.round_drafts[slot, :100] = accepted, K


def test_texts_that_repeat_themselves() -> None:
    run = Run()
    for slot, (period, accepted) in enumerate(((7, K), (0, K), (1, K), (4, K - 1), (32, K), (33, K))):
        looping(run, slot, period, accepted=accepted)
    run.steps(300, lambda i, by_graph: 0.9)
    assert run.alarms.count == {**NONE, "loop": 3}, "each request once"
    assert run.said == [run.said[0]], "and one sentence"
    assert "repeats its last 7 tokens" in run.said[0]
    looping(run, 0, 2)
    run.steps(100, lambda i, by_graph: 0.9)
    assert run.alarms.count["loop"] == 4, "another request in the same slot"


@pytest.mark.parametrize("part", among((0,), range(100)))
def test_honest_runs_are_silent(part: int) -> None:
    """Of good and poor proposers, on texts that come in stretches of their own, with and without graphs."""
    for seed in range(10 * part, 10 * part + 10):
        run = Run(seed)
        stretches = np.clip(run.rng.uniform(0.1, 0.95) * run.rng.uniform(0.75, 1.15, 40), 0.0, 1.0).tolist()
        replayed = (run.rng.random(2000) < run.rng.random()).tolist()
        apart = np.clip(run.rng.uniform(0.4, 1.6, SLOTS), 0.0, 1.0) if seed % 2 else np.ones(SLOTS)
        few = range(int(run.rng.integers(2, SLOTS + 1))) if seed % 2 else range(SLOTS)  # those that graphs serve
        run.steps(
            1600, lambda i, by_graph: honest(stretches)(i, by_graph) * apart, graph=replayed.__getitem__,  # noqa: B023
            served=lambda i: few if replayed[i] else range(SLOTS),  # noqa: B023
        )  # fmt: skip
        assert run.alarms.count == NONE, (seed, run.said)
        assert run.totals.rounds > 4 * BLOCK


def honest(stretches: list[float]) -> Callable[[int, bool], float]:
    """The chance of each step, whoever made its drafts."""
    return lambda i, by_graph: stretches[i // 40]


def test_an_engine_without_drafts_has_no_alarms() -> None:
    limits = Limits(1, 0, 8, 8, 64, 16, 8, 4, 1, 100)
    alarms = AcceptanceAlarms(EngineTotals(), SlotTable(limits), pytest.fail)
    for _ in range(200):
        alarms.step(NO_ROUNDS, replayed=False)
    assert alarms.count == NONE
