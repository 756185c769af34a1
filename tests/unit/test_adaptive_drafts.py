"""The adaptive draft policy against worlds whose costs and acceptance are known: it comes close to the best fixed number.

Each step of a world takes what its windows and its drafts cost, and accepts drafts by chance, with a seed. Nothing here measures
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from polydraft.contracts.base import Limits
from polydraft.host.adaptive_drafts import BEGINNING, EVERY, SETTLING, SOON, TRIAL, StepTimes, hoped, shares
from polydraft.host.draft_policy import Always, DraftPolicy, DraftView, Windows, check_policy
from polydraft.host.rehearsal import Rehearsal
from polydraft.host.slots import SlotTable
from tests.support.depth import crossed, deep
from tests.support.simulated_steps import Cost, Step, World, rehearse

GOOD, POOR = (0.8, 0.75, 0.75, 0.7, 0.7), (0.5, 0.4, 0.25, 0.2, 0.2)
COSTS: dict[str, Cost] = {
    "weights": lambda step: 5.0 + 0.4 * step.drafts + 0.02 * step.rows,
    "rows": lambda step: 2.0 + 0.3 * step.drafts + 0.5 * step.rows,
    "experts": lambda step: 2.0 + 6.0 * (1.0 - float(np.exp(-step.rows / 12.0))) + 0.4 * step.drafts,
}
"""What a step takes that verifies so many rows and makes k drafts: a device that mostly reads weights, one that computes,
and experts, of which more rows read more."""


def rates(size: int, cost: Cost, chances: Any, *, steps: int = 1500, noise: float = 0.0) -> tuple[float, dict[int, float]]:
    """Of the adaptive policy, and of every fixed number that it may choose."""

    def world() -> World:
        return World(size, cost, lambda world, slots: np.array(chances), noise=noise)

    chosen = world()
    policy = chosen.adaptive()
    return chosen.run(policy, size, steps), {k: world().run(Always(k), size, steps) for k in policy.rungs}


@pytest.mark.parametrize(("cost", "chances", "size", "noise"), crossed(8, COSTS, [GOOD, POOR], [1, 8, 32], [0.0, 0.2]), ids=str)
def test_it_comes_close_to_the_best_fixed_number(cost: str, chances: Any, size: int, noise: float) -> None:
    adaptive, fixed = rates(size, COSTS[cost], chances, noise=noise)
    assert adaptive > (0.95 if noise else 0.97) * max(fixed.values()), (adaptive, fixed)


def test_no_drafts_where_none_pay_and_drafts_again_when_they_do() -> None:
    world = World(8, COSTS["rows"], lambda world, slots: np.array(POOR if world.now < 4000.0 else [0.99] * 5))
    policy = world.adaptive()
    while world.now < 4000.0:
        world.step(policy, 8)
    assert world.chosen[-EVERY:].count(0) > EVERY / 2
    for _ in range(2000):
        world.step(policy, 8)
    assert min(world.chosen[-2 * EVERY :]) > 0, "it noticed, since it tries the others now and then"


def test_times_of_steps_with_prompts_are_not_those_of_decoding() -> None:
    world = World(4, lambda step: COSTS["weights"](step) + 500.0 * step.has_prefill, lambda world, slots: np.array(GOOD))
    policy = world.adaptive()
    for i in range(400):
        world.step(policy, 4, has_prefill=i % 7 == 0)
    assert policy.times.mean[:, : len(policy.rungs)].max() < 10.0


def test_a_step_without_requests_that_decode_keeps_the_number() -> None:
    world = World(4, COSTS["weights"], lambda world, slots: np.array(GOOD))
    policy = world.adaptive()
    before = policy.choose(DraftView(world.slots, np.arange(0), True, world.totals))
    assert before == 3
    world.run(policy, 4, 100)
    assert policy.choose(DraftView(world.slots, np.arange(0), True, world.totals)) in policy.rungs


@pytest.mark.parametrize("size", [1, 8])
def test_where_all_requests_are_others_it_decides_at_once(size: int) -> None:
    world = World(size, COSTS["rows"], lambda world, slots: np.array([0.3] * 5))
    policy = world.adaptive()
    world.run(policy, size, 1000)
    with mock.patch.object(policy, "_decide", wraps=policy._decide) as decided:
        for _ in range(3):
            policy.choose(DraftView(world.slots, np.arange(0), True, world.totals))
            world.begin()
            before = decided.call_count
            world.step(policy, size)
            assert decided.call_count == before + 1
            world.step(policy, size, has_prefill=True)
            assert decided.call_count == before + 1, "they are those of before"


def test_where_some_have_ended_it_waits_for_the_others_to_end() -> None:
    world = World(64, COSTS["weights"], lambda world, slots: np.array(GOOD))
    policy = world.adaptive()
    world.run(policy, 64, 600)
    with mock.patch.object(policy, "_decide", wraps=policy._decide) as decided:
        for count in (30, 14, 7, 3, 1):  # another bucket each time
            world.step(policy, count)
        assert decided.call_count == 0
        for _ in range(SOON):
            world.step(policy, 1)
        assert decided.call_count == 1
        world.step(policy, 40)
        assert decided.call_count == 2, "those who come are decided on at once"


@pytest.mark.parametrize("took", [0.0, 0.5])
def test_decisions_are_seldom_where_they_take_as_long_as_a_step(took: float) -> None:
    """Requests of 160 steps of a millisecond, one after the other: where a decision is no time, one is made 8 steps behind the
    first, and 16 behind that; where it is half a step, hardly more than the first of each request, and trials seldom pay."""
    world = World(1, lambda step: 1.0 + 0.02 * step.drafts, lambda world, slots: np.array([0.9] * 5), noise=0.05)
    policy, decided = world.adaptive(), list[int]()
    clock, decide = policy.clock, policy._decide

    def slow(view: DraftView) -> None:
        decide(view)
        decided.append(len(world.chosen))

    policy.clock = lambda: clock() + took * len(decided)
    with mock.patch.object(policy, "_decide", slow):
        for _ in range(20):
            policy.choose(DraftView(world.slots, np.arange(0), True, world.totals))
            world.begin()
            world.run(policy, 1, 160)
    late = sum(step >= 1600 for step in decided)
    assert late < 36 if took else late > 45, late


@pytest.mark.parametrize(("size", "within"), [(1, 16), (8, 32)])
def test_drafts_are_soon_tried_for_requests_of_which_nobody_verified_one(size: int, within: int) -> None:
    world = World(size, COSTS["rows"], lambda world, slots: np.array(GOOD if world.slots.epoch[0] > 1 else [0.02] * 5))
    policy = world.adaptive()
    world.run(policy, size, 1000)
    assert world.chosen[-1] == 0
    policy.choose(DraftView(world.slots, np.arange(0), True, world.totals))
    world.begin()
    world.run(policy, size, within)
    assert max(world.chosen[-within:]) > 0


def test_requests_that_want_no_drafts_make_none() -> None:
    world = World(4, COSTS["weights"], lambda world, slots: np.array(GOOD))
    world.slots.window[:] = 1
    policy = world.adaptive()
    world.run(policy, 4, 300)
    assert world.chosen[-200:].count(0) > 150


def test_acceptance_is_that_of_each_request_and_place() -> None:
    rows = np.array([[0.9, 0.8, 0.7, 0.6, 0.5], [0.2, 0.1, 0.1, 0.1, 0.1]])
    world = World(2, COSTS["weights"], lambda world, slots: rows[slots])
    policy = world.adaptive()
    world.run(Always(5), 2, 400)
    for end in range(EVERY, 401, EVERY):  # as the policy looks: now and then, at the rounds since
        world.slots.num_rounds[:] = end
        policy.acceptance.look(world.slots, np.arange(2), EVERY)
    found = policy.acceptance.of(np.arange(2)).T
    assert np.abs(found[0] - rows[0]).max() < 0.25
    assert found[1, 0] < 0.4
    assert found[0].cumprod().sum() > 3.0 * found[1].cumprod().sum()


@pytest.mark.parametrize(("usual", "believed"), [(0.95, 0.95), (0.2, 0.7)])
def test_behind_a_stretch_without_drafts_they_are_believed_to_be_as_good_as_usual(usual: float, believed: float) -> None:
    """Or better, so that they are tried again."""
    world = World(4, COSTS["weights"], lambda world, slots: np.array([usual] * 5))
    policy = world.adaptive()
    world.run(Always(3), 4, 200)
    for end in range(EVERY, 201, EVERY):
        world.slots.num_rounds[:] = end
        policy.acceptance.look(world.slots, np.arange(4), EVERY)
    assert policy.acceptance.of_all()[0] == pytest.approx(usual, abs=0.1)
    world.slots.round_drafts[:], world.slots.rounds[:] = 0, 0
    for end in range(200 + EVERY, 1001, EVERY):
        world.slots.num_rounds[:] = end
        policy.acceptance.look(world.slots, np.arange(4), EVERY)
    assert policy.acceptance.of_all()[0] == pytest.approx(believed, abs=0.03)


def test_requests_that_come_when_all_have_gone_soon_show_that_they_are_others() -> None:
    world = World(32, COSTS["weights"], lambda world, slots: np.array(GOOD if world.slots.epoch[0] < 2 else [0.1] * 5))
    policy = world.adaptive()
    world.run(policy, 32, 500)
    assert policy.acceptance.of_all()[0] == pytest.approx(0.8, abs=0.05)
    policy.choose(DraftView(world.slots, np.arange(0), True, world.totals))
    assert policy.acceptance.of_all()[0] == pytest.approx(0.8, abs=0.1), "nobody has shown anything else"
    world.begin()
    world.run(Always(3), 32, 4)
    policy.acceptance.look(world.slots, np.arange(32), 4)
    assert policy.acceptance.of_all()[0] < 0.3


def test_what_nobody_measures_stays_known_on_a_steady_machine() -> None:
    doubts = []
    for noise in (0.005, 0.1):
        times, rng = StepTimes((8,), RUNGS), np.random.default_rng(5)
        for now in range(0, 640, 16):
            samples = 2.0 * (1.0 + noise * rng.standard_normal(16))
            times.measured(0, 0 if now > 64 else 2, samples.tolist(), now, 0)
        doubts.append(apart(times, 0, 640)[2])
    assert doubts[0] < 0.5 * doubts[1]


def test_a_new_request_in_a_slot_begins_anew() -> None:
    world = World(2, COSTS["weights"], lambda world, slots: np.array([[1.0] * 5, [0.0] * 5])[slots])
    policy = world.adaptive()
    world.run(policy, 2, 100)
    everyone = policy.acceptance.of_all()
    assert policy.acceptance.of(np.array([1]))[0, 0] < 0.1
    world.slots.epoch[1] += 1
    world.slots.num_rounds[1] = 0
    policy.acceptance.look(world.slots, np.array([1]), 1)
    assert policy.acceptance.of(np.array([1]))[:, 0] == pytest.approx(everyone, abs=0.02)


# -- times ------------------------------------------------------------------------------------------------------------------
BUCKETS, RUNGS = (1, 2, 4, 8), (0, 1, 3)


def apart(times: StepTimes, bucket: int, now: int) -> Any:
    """How far the logarithm of each rung's time may be off, measured from that of rung 0."""
    mean, cov = times.belief(bucket, now, 0)
    slopes = np.eye(3, 4) / mean[:3, None]
    slopes -= slopes[0]
    return np.sqrt((slopes @ cov * slopes).sum(axis=1))


def test_rungs_move_together_once_they_are_known() -> None:
    times = StepTimes(BUCKETS, RUNGS)
    times.measured(0, 2, [8.0] * 9, 10, 0)
    assert times.mean[0, :3] == pytest.approx([8.0 / 1.9, 8.0 * 1.3 / 1.9, 8.0]), "the first one says how slow the machine is"
    assert apart(times, 0, 10)[2] > 0.2, "and nothing about how it grows with the number of drafts"
    times.measured(0, 0, [2.0] * 9, 20, 0)
    assert times.mean[0, :3] == pytest.approx([2.0, 4.0, 8.0], rel=0.2)
    assert apart(times, 0, 20)[2] < 0.1
    for step in range(12):
        times.measured(0, 2, [8.0 + step] * 9, 30 + 10 * step, 0)
    assert times.mean[0, :3] == pytest.approx([13.0, 15.0, 19.0], rel=0.1)


def test_longer_texts_add_the_same_to_all() -> None:
    """And shorter ones take it away again, however often; were they taken for a slower machine, three drafts would be believed to
    take 16 in between."""
    times = StepTimes(BUCKETS, RUNGS)
    for now in range(10, 100, 20):
        times.measured(0, 2, [8.0] * 9, now, 0)
        times.measured(0, 0, [2.0] * 9, now + 10, 0)
    now = 100
    for _ in range(6):
        for i in range(17):
            times.measured(0, 0, [2.0 + i / 8] * 16, now := now + 16, 0)
        assert times.mean[0, 0] == pytest.approx(4.0, rel=0.01)
        assert times.mean[0, 2] == pytest.approx(10.0, rel=0.1)


def test_what_tokens_add_is_told_apart_from_the_level() -> None:
    """By numbers of drafts, of which one alone is measured while texts grow; and it goes when other texts begin."""
    base, every, each = (2.0, 4.0, 8.0), 1.0 / 4096.0, 0.5 / 4096.0
    times, now = StepTimes((8,), RUNGS), 0

    def measure(rung: int, tokens: int) -> None:
        nonlocal now
        times.measured(0, rung, [base[rung] + tokens * (every + RUNGS[rung] * each)] * 16, now := now + 16, tokens)

    for rung in (2, 0, 1):
        measure(rung, 64)
    for rung in (2, 0):
        for tokens in range(64, 4096, 128):
            measure(rung, tokens)
    for tokens in (2048, 64, 4096):
        exact = [base[rung] + tokens * (every + k * each) for rung, k in enumerate(RUNGS)]
        assert times.belief(0, now, tokens)[0][:3] == pytest.approx(exact, rel=0.25), "it was half as much again"


def test_what_tokens_add_is_that_of_the_bucket_beside() -> None:
    times = StepTimes(BUCKETS, RUNGS)
    for now, tokens in enumerate(range(0, 4096, 128)):
        times.measured(3, 0, [2.0 + tokens / 2048.0] * 16, 16 * now, tokens)
    times.measured(2, 0, [2.0 + 1024 / 2048.0] * 16, 1000, 1024)
    assert times.belief(2, 1000, 2048)[0][0] == pytest.approx(3.0, rel=0.1)


def test_buckets_are_like_their_neighbours_but_for_the_level() -> None:
    times = StepTimes(BUCKETS, RUNGS)
    for now, rung, seconds in ((10, 2, 8.0), (20, 0, 2.0), (30, 1, 4.0)):
        times.measured(0, rung, [seconds] * 9, now, 0)
    near, far = apart(times, 1, 30), apart(times, 3, 30)
    assert (apart(times, 0, 30)[1:] < near[1:]).all()
    assert (near[1:] < far[1:]).all()
    times.measured(1, 0, [6.0] * 9, 40, 0)
    assert times.mean[1, :3] == pytest.approx([6.0, 12.0, 24.0], rel=0.1)


def test_what_nobody_measures_grows_uncertain_and_stays_above_nothing() -> None:
    times = StepTimes(BUCKETS, RUNGS)
    times.measured(0, 2, [8.0] * 9, 10, 0)
    times.measured(0, 0, [2.0] * 9, 20, 0)
    assert apart(times, 0, 20)[2] < apart(times, 0, 120)[2] < apart(times, 0, 5_000)[2] < 0.6
    times.measured(0, 1, [7.9] * 9, 5_010, 0)
    times.measured(0, 2, [80.0] * 9, 5_020, 0)
    assert times.mean.min() >= 0.0
    assert times.mean[0, 0] >= 0.1 * 80.0 - 1e-9


def test_noise_and_unrest_are_those_of_the_machine() -> None:
    rng = np.random.default_rng(3)
    found = []
    for noise, drift in ((0.001, 0.0), (0.1, 0.0), (0.01, 0.02)):
        times, level = StepTimes(BUCKETS, RUNGS), 1.0
        for now in range(16, 1600, 16):
            level *= float(np.exp(4.0 * drift * rng.standard_normal()))
            times.measured(0, 2, [level * float(np.exp(noise * rng.standard_normal())) for _ in range(16)], now, 0)
        found.append((times.noise, times.unrest**0.5))
    (quiet, still), (loud, calm), (_, wild) = found
    assert quiet < 0.003
    assert loud == pytest.approx(0.1, rel=0.3)
    assert max(still, calm) < 0.01 < wild < 0.04


def test_rows_cost_what_steps_without_them_save() -> None:
    times = StepTimes(BUCKETS, RUNGS)
    for now, rung, seconds in ((10, 2, 8.0), (20, 0, 2.0), (30, 2, 8.0)):
        times.measured(0, rung, [seconds] * 9, now, 0)
    assert times.part(times.mean[0]) == pytest.approx(0.5, abs=0.1)
    for now in range(40, 200, 10):
        times.measured(0, 2, [8.0] * 9, now, 0, spared=0.5)
    assert times.part(times.mean[0]) < 0.1, "a replay at full size"
    assert times.belief(1, 200, 0)[0][-1] < 0.1, "as it will be for other numbers of requests"
    assert times.steps[0, 2] == 18
    assert times.limited_steps[0] == 16 * 9


def test_beliefs_stay_beliefs_whatever_is_measured() -> None:
    """Contexts that jump between nothing and 100,000 tokens, and steps that take what nobody expected. With this seed spreads of
    less than nothing came of a covariance from which what was learned was subtracted."""
    buckets, rungs, rng, now = (1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 3, 5), np.random.default_rng(2), 0
    times, scale = StepTimes(buckets, rungs), 10.0 ** rng.uniform(-6, 0)
    for _ in range(4000):
        bucket, now = int(rng.integers(0, 7)), now + int(rng.integers(1, 600))
        tokens = float(rng.choice([0, 8, 1e3, 1e5]) * rng.random() * buckets[bucket])
        if rng.random() < 0.7:
            rung, count = int(rng.integers(0, 5)), int(rng.integers(1, 129))
            seconds = scale * (1.0 + 0.3 * rungs[rung] + 1e-6 * tokens) * np.exp(0.3 * rng.standard_normal())
            samples = seconds * np.exp(0.05 * rng.standard_normal(count))
            times.measured(bucket, rung, samples.tolist(), now, tokens, float(rng.choice([0, 0, 0.3, 1.0])) if rung else 0.0)
        mean, cov = times.belief(bucket, now, tokens)
        assert np.isfinite(mean).all()
        assert mean[:-1].min() >= 0.0
        assert np.linalg.eigvalsh(cov)[0] > -1e-9 * np.abs(cov).max()


def test_hope_is_what_is_above_nothing() -> None:
    draws = np.random.default_rng(1).standard_normal(200_000)
    for mean, spread in ((0.0, 1.0), (-0.05, 0.02), (0.03, 0.1)):
        assert hoped(mean, spread**2) == pytest.approx(np.maximum(mean + spread * draws, 0.0).mean(), rel=0.1, abs=1e-5)


# -- trials -----------------------------------------------------------------------------------------------------------------
def test_trials_are_few_where_nothing_changes() -> None:
    world = World(8, COSTS["rows"], lambda world, slots: np.array(GOOD), noise=0.1, drift=0.02)
    policy = world.adaptive()
    world.run(policy, 8, 3000)
    best = max(policy.rungs, key=world.chosen.count)
    late = world.chosen[1000:]
    assert late.count(best) > 0.93 * len(late)
    assert len(set(world.chosen[:300])) > 2, "nobody knew"
    assert 5 not in late, "it costs twice as much for what it brings"


def test_a_step_without_drafts_may_be_much_faster_than_the_others_let_expect() -> None:
    times = StepTimes(BUCKETS, RUNGS)
    for now in range(10, 200, 20):
        times.measured(0, 1, [4.0] * 9, now, 0)
        times.measured(0, 2, [5.0] * 9, now + 10, 0)
    assert times.mean[0, 0] == pytest.approx(3.5, rel=0.1)
    assert apart(times, 0, 200)[1] > 0.15, "all passes of a proposer have something in common"
    times.measured(0, 0, [2.0] * 9, 210, 0)
    assert apart(times, 0, 210)[1] < 0.08


def test_places_that_nobody_tries_are_soon_believed_to_be_like_the_one_before() -> None:
    deep = np.array([0.9, 0.95, 0.95, 0.95, 0.95])
    world = World(4, COSTS["rows"], lambda world, slots: deep * (1.0 if len(world.chosen) > 400 else [1.0, 0.1, 0.1, 0.1, 0.1]))
    policy = world.adaptive()
    world.run(policy, 4, 400)
    assert world.chosen[-50:].count(1) > 40
    assert policy.acceptance.of_all()[2] == pytest.approx(policy.acceptance.of_all()[1], abs=0.1), "it was not tried for long"
    world.run(policy, 4, 400)
    assert policy.acceptance.of_all()[1] > 0.8


@pytest.mark.parametrize(("late", "before", "after"), [(0, 0.9, 0.1), (1, 0.9, 0.1), (1, 0.3, 0.95)])
def test_it_decides_at_once_where_other_drafts_are_accepted_than_expected(late: int, before: float, after: float) -> None:
    """Within 24 steps; the next decision would come after 48 or more."""
    chances = np.full(5, before)
    world = World(32, COSTS["weights"], lambda world, slots: chances, late=late)
    policy = world.adaptive()
    while policy._left < 48:
        world.step(policy, 32)
    chosen = world.chosen[-1]
    assert chosen > 0, "where no draft is verified nothing shows"
    chances[:] = after
    world.run(policy, 32, 24)
    assert world.chosen[-1] < chosen if after < before else world.chosen[-1] > chosen, world.chosen[-24:]


@pytest.mark.parametrize("size", [1, 64])
def test_what_is_accepted_is_no_surprise_where_nothing_changes(size: int) -> None:
    """Requests that are unlike each other, of which some verify fewer drafts."""
    surprises = 0
    for seed in range(4):
        world = World(size, COSTS["weights"], unlike, noise=0.03, late=1, seed=seed)
        policy = world.adaptive()
        with mock.patch.object(policy.acceptance, "refuted", wraps=policy.acceptance.refuted) as refuted:
            world.run(policy, size, 1500)
        surprises += refuted.call_count
    assert surprises <= 8


def test_a_bucket_beside_a_known_one_needs_hardly_a_trial() -> None:
    world = World(64, COSTS["weights"], lambda world, slots: np.array(POOR), noise=0.05)
    policy = world.adaptive()
    world.run(policy, 64, 800)
    changes = []
    for count in (56, 48, 40):
        before = len(world.chosen)
        world.run(policy, count, 100)
        changes.append(int((np.diff(world.chosen[before:]) != 0).sum()))
    assert max(changes) <= 4, "at most two trials, there and back"


def test_a_trial_times_the_steps_that_are_of_one_kind() -> None:
    world = World(4, COSTS["weights"], lambda world, slots: np.array(GOOD), late=1)
    policy, counts, measured = world.adaptive(), [], StepTimes.measured

    def count(times: StepTimes, bucket: int, rung: int, samples: list[float], *others: Any) -> None:
        counts.append(len(samples))
        measured(times, bucket, rung, samples, *others)

    with mock.patch.object(StepTimes, "measured", count):
        world.run(policy, 4, 300)
    assert min(counts) == TRIAL - SETTLING
    bucket = policy.times.buckets.index(4)
    for rung, k in enumerate(policy.rungs):
        if policy.times.steps[bucket, rung]:
            exact = COSTS["weights"](Step(4, k + 1, 4 * (k + 1), k, False))
            assert policy.times.mean[bucket, rung] == pytest.approx(exact, rel=0.05), "none of those between"


@pytest.mark.parametrize("size", [1, 64])
def test_decisions_become_seldom(size: int) -> None:
    world = World(size, COSTS["weights"], lambda world, slots: np.array(GOOD), noise=0.03)
    policy = world.adaptive()
    with mock.patch.object(policy, "_decide", wraps=policy._decide) as decided:
        world.run(policy, size, 1000)
        first = decided.call_count
        world.run(policy, size, 4000)
    assert decided.call_count - first < 4000 / 40


# -- requests ---------------------------------------------------------------------------------------------------------------
def unlike(world: World, slots: Any) -> Any:
    """Drafts of every other request are hardly ever right."""
    return np.where((slots % 2 == 0)[:, None], np.array([0.9, 0.9, 0.9, 0.85, 0.85]), np.array([0.2, 0.15, 0.1, 0.1, 0.1]))


@pytest.mark.parametrize("noise", [0.2, deep(0.0)])
def test_requests_whose_drafts_are_seldom_right_verify_few(noise: float) -> None:
    world = World(32, COSTS["weights"], unlike, noise=noise)
    policy = world.adaptive()
    adaptive = world.run(policy, 32, 1500)
    fixed = max(World(32, COSTS["weights"], unlike, noise=noise).run(Always(k), 32, 1500) for k in policy.rungs)
    assert adaptive > (1.03 if noise else 1.05) * fixed
    assert policy.windows is not None
    assert policy.windows.rows[::2].mean() > (1.5 if noise else 2.0) * policy.windows.rows[1:32:2].mean()
    report = policy.report()
    assert 0 < report["limited_steps"] < 1500
    assert report["row_ms"]["32"] == pytest.approx(1e3 * 0.02, rel=0.75 if noise else 0.05), "as the world has it"


@pytest.mark.parametrize("size", [64, deep(8)])
def test_nobody_is_limited_where_rows_cost_nothing(size: int) -> None:
    def world() -> World:
        return World(size, lambda step: 5.0 + 0.4 * step.drafts, unlike)

    chosen = world()
    policy = chosen.adaptive()
    pace = chosen.run(policy, size, 1500)
    assert policy.windows is None
    assert pace > 0.97 * max(world().run(Always(k), size, 1500) for k in policy.rungs), "nor does it cost to find that out"


def test_a_request_that_was_limited_is_tried_again() -> None:
    world = World(32, COSTS["weights"], lambda world, slots: unlike(world, slots if world.now < 9000.0 else 0 * slots))
    policy = world.adaptive()
    while world.now < 9000.0:
        world.step(policy, 32)
    assert policy.windows is not None
    assert policy.windows.rows[1:32:2].mean() < 3
    for _ in range(1000):
        world.step(policy, 32)
    lengths = world.slots.round_drafts[1, world.slots.num_rounds[1] - 200 : world.slots.num_rounds[1]]
    assert lengths.mean() > 3.0


def test_windows_are_of_the_requests_that_they_were_made_for() -> None:
    slots, decode = SlotTable(Limits(4, 5, 64, 64, 100, 16, 64, 4, 1, 100)), np.array([0, 2, 3])
    slots.epoch[:] = 7, 1, 2, 3
    windows = Windows(np.array([1, 2, 3, 4], np.int32), slots.epoch.copy())
    rows = np.full(3, 6, np.int32)
    assert windows.limit(rows, slots, decode).tolist() == [1, 3, 4]
    assert windows.limit(np.full(3, 2, np.int32), slots, decode).tolist() == [1, 2, 2]
    slots.epoch[2] += 1  # another request
    assert windows.limit(rows, slots, decode).tolist() == [1, 6, 4]


@pytest.mark.parametrize("most", [1, 2, 7])
def test_it_is_a_policy_for_any_number(most: int) -> None:
    world = World(3, COSTS["weights"], lambda world, slots: np.full(most, 0.9), most=most)
    policy = world.adaptive()
    assert check_policy(policy, world.limits) is policy
    world.run(policy, 3, 300)
    assert set(world.chosen) <= set(policy.rungs)
    assert max(world.chosen[-EVERY:]) == most


def test_what_it_measured_can_be_told() -> None:
    world = World(4, COSTS["weights"], lambda world, slots: np.array(GOOD))
    policy = world.adaptive()
    assert policy.report()["step_ms"] == {}
    world.run(policy, 4, 200)
    report = policy.report()
    assert set(report["step_ms"]) == {"4"}
    assert len(report["acceptance"]) == 5
    assert report["acceptance"][0] == pytest.approx(0.8, abs=0.1)


# -- batches that change ----------------------------------------------------------------------------------------------------
def falling(world: World, slots: Any) -> Any:
    """Drafts of every other request are seldom right from its 128th token on."""
    fallen = (slots % 2 == 1) & (world.done[slots] >= 128)
    return np.where(fallen[:, None], 0.3, np.array([0.8, 0.75, 0.75, 0.75, 0.75]))


def drained(policy_of: Callable[[World], DraftPolicy], cost: Cost, *, noise: float = 0.03) -> float:
    """Tokens a millisecond of a batch whose requests end one after the other, behind one that taught what steps cost."""
    world = World(64, cost, falling, lengths=64 + 16 * np.arange(64), noise=noise, late=1)
    policy = policy_of(world)
    world.drain(policy)
    world.begin(64 + 16 * np.arange(64))
    return world.drain(policy)


def fixed_at(num_drafts: int) -> Callable[[World], DraftPolicy]:
    return lambda world: Always(num_drafts)


def test_a_batch_that_drains_is_faster_than_with_any_fixed_number() -> None:
    adaptive = drained(World.adaptive, COSTS["experts"])
    fixed = [drained(fixed_at(k), COSTS["experts"]) for k in (0, 1, 3, 5)]
    assert adaptive > 1.01 * max(fixed)


def test_requests_that_are_slow_are_not_left_behind() -> None:
    """The sum of tokens would be largest with three drafts, which help every other request alone."""
    chances = np.array([[0.97] * 5, [0.02] * 5])
    world = World(2, lambda step: 3.0 + step.drafts, lambda world, slots: chances[slots])
    policy = world.adaptive()
    world.run(policy, 2, 1500)
    assert max(world.chosen[-200:], key=world.chosen[-200:].count) <= 1


def most_chosen(cost: Cost, long: int) -> int:
    """The number that is chosen for two requests, of which the first accepts drafts and the one called `long` ends last."""
    chances = np.array([[0.97] * 5, [0.02] * 5])
    world = World(2, cost, lambda world, slots: chances[slots])
    policy = world.adaptive(rehearsed=True)
    world.slots.max_total[1 - long] = 0
    world.run(policy, 2, 1000)
    return max(set(world.chosen[-200:]), key=world.chosen[-200:].count)


def test_the_request_that_ends_last_counts_where_it_holds_up_the_others() -> None:
    assert most_chosen(lambda step: 3.0 + 0.7 * step.drafts, long=0) == 5
    assert most_chosen(lambda step: 3.0 + 0.7 * step.drafts, long=1) == 0


def test_requests_count_alike_where_each_takes_its_own_time() -> None:
    assert {most_chosen(lambda step: step.requests * (3.0 + step.drafts), long) for long in (0, 1)} == {1}


def test_shares_are_what_a_step_less_of_each_request_saves() -> None:
    steps = np.array([100.0, 50.0, 400.0, 10.0])
    assert shares(steps, alone=2.0, together=8.0) == pytest.approx([0.25] * 4), "each adds 2, and nothing is in common"
    last = shares(steps, alone=8.0, together=8.0)
    assert last[2] > 0.99
    assert shares(steps, alone=5.0, together=8.0) == pytest.approx(0.5 * (last + 0.25), rel=1e-6), "1 each, and 4 in common"
    assert shares(steps[:1], alone=3.0, together=3.0).tolist() == [1.0]


# -- rehearsals -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("late", [0, 1])
def test_a_rehearsal_tells_what_steps_take(late: int) -> None:
    world = World(64, COSTS["weights"], lambda world, slots: np.array(GOOD), late=late)
    policy = world.adaptive(rehearsed=True)
    times = policy.times
    assert [times.buckets[i] for i in np.flatnonzero(times.known)] == [1, 4, 16, 64]
    for count in (1, 4, 16, 64):
        bucket = times.buckets.index(count)
        for rung, k in enumerate(policy.rungs):
            exact = COSTS["weights"](Step(count, k + 1, count * (k + 1), k, False))
            assert times.mean[bucket, rung] == pytest.approx(exact, rel=0.02)
    rows = 64 * 5 * 0.02
    assert times.part(times.mean[times.buckets.index(64)]) == pytest.approx(rows / (rows + 5 * 0.4), abs=0.1)
    assert world.chosen == [], "in another world"


def test_behind_a_rehearsal_it_begins_faster() -> None:
    def pace(cost: Cost, chances: Any, *, rehearsed: bool) -> float:
        world = World(32, cost, lambda world, slots: np.array(chances), noise=0.05, late=1)
        return world.run(world.adaptive(rehearsed=rehearsed), 32, 120)

    worlds = [(cost, chances) for cost in COSTS.values() for chances in (GOOD, POOR)]
    gains = [pace(*world, rehearsed=True) / pace(*world, rehearsed=False) for world in worlds]
    assert min(gains) > 0.96, "who begins without decides anew as soon as drafts are not accepted"
    assert sum(gains) > 1.005 * len(gains)


def test_a_rehearsal_ends_when_its_time_is_over() -> None:
    world = World(64, COSTS["weights"], lambda world, slots: np.array(GOOD))
    policy, took = world.adaptive(), []
    rehearsal = Rehearsal(policy.times, policy.clock, most_s=400.0)
    for size in rehearsal.sizes:
        rehearse(world, rehearsal, size)
        took.append(world.now)
    assert 100.0 < took[0] < 100.0 + 2 * COSTS["weights"](Step(64, 6, 384, 5, False))
    assert took[-1] < 400.0 + 2 * COSTS["weights"](Step(1, 6, 6, 5, False))
    assert policy.times.known[-1], "the largest batch has had its share"
    assert not policy.times.steps[-1].all(), "but not for every rung"
    assert policy.times.known[0], "and so has the smallest"


def test_steps_of_another_kind_are_not_timed_in_a_rehearsal() -> None:
    world = World(4, lambda step: COSTS["weights"](step) + 500.0 * step.has_prefill, lambda world, slots: np.array(GOOD))
    policy = world.adaptive()
    rehearsal = Rehearsal(policy.times, policy.clock, most_s=1e6)
    rehearsal.next_size()
    while not rehearsal.done:
        i = len(world.chosen)
        world.step(rehearsal, 4 if i % 17 else 3, has_prefill=i % 11 == 0)
    assert policy.times.steps[2].all()
    assert policy.times.mean[:, : len(policy.rungs)].max() < 10.0


def test_drafts_are_verified_before_the_first_decision_behind_a_rehearsal() -> None:
    world = World(32, COSTS["rows"], lambda world, slots: np.array(POOR))
    world.run(world.adaptive(rehearsed=True), 32, 40)
    assert world.chosen[: BEGINNING - 1] == [3] * (BEGINNING - 1)
    assert max(world.chosen[BEGINNING:]) < 2
