"""The adaptive draft policy against worlds whose costs and acceptance are known: it comes close to the best fixed number.

A world is a clock: each step takes what its windows and its drafts cost, and accepts drafts by chance, with a seed. Nothing here
measures time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polydraft.contracts.base import Limits
from polydraft.host.adaptive_drafts import ENOUGH, EVERY, SELDOM, AdaptiveDrafts, StepTimes
from polydraft.host.draft_policy import Always, DraftPolicy, DraftView, Windows, check_policy
from polydraft.host.slots import SlotTable
from tests.support.depth import crossed

GOOD, POOR = (0.8, 0.75, 0.75, 0.7, 0.7), (0.5, 0.4, 0.25, 0.2, 0.2)
Cost = Callable[[int, int], float]
COSTS: dict[str, Cost] = {
    "weights": lambda rows, k: 5.0 + 0.4 * k + 0.02 * rows,
    "rows": lambda rows, k: 2.0 + 0.3 * k + 0.5 * rows,
    "experts": lambda rows, k: 2.0 + 6.0 * (1.0 - float(np.exp(-rows / 12.0))) + 0.4 * k,
}
"""What a step takes that verifies so many rows and makes k drafts: a device that mostly reads weights, one that computes,
and experts, of which more rows read more."""


class World:
    """Serves `size` slots that decode for ever. `chances(slots)` is [n, K] or [K]; `noise` the spread of step times; without
    `limiting` all drafts are verified, whatever the policy says."""

    def __init__(self, size: int, cost: Cost, chances: Callable[[Any], Any], *, most: int = 5, noise: float = 0.0) -> None:
        self.limits = Limits(size, most, 64, 64, 20_000, 16, 64, 4, 1, 100)
        self.slots = SlotTable(self.limits)
        self.slots.epoch[:] = 1
        self.cost, self.chances, self.noise = cost, chances, noise
        self.now, self.tokens, self.window, self.spared = 0.0, 0, 1, 0
        self.limiting, self._windows = True, None
        self.chosen: list[int] = []
        self._rng = np.random.default_rng(7)

    def step(self, policy: DraftPolicy, count: int, *, has_prefill: bool = False) -> int:
        """One step of the first `count` slots."""
        slots = np.arange(count)
        made = policy.choose(DraftView(self.slots, slots, has_prefill))
        rows = np.minimum(self.window, self.slots.window[slots])
        if self._windows is not None:
            rows = self._windows.limit(rows, self.slots, slots)
        self._windows = getattr(policy, "windows", None) if self.limiting else None  # of the next step, as the scheduler has it
        self.now += self.cost(int(rows.sum()), made) * (1.0 + self.noise * abs(self._rng.standard_normal()))
        verified = rows - 1
        self.spared += count * self.window - int(rows.sum())
        chances = np.broadcast_to(self.chances(slots), (count, self.limits.num_drafts))
        drawn = (self._rng.random(chances.shape) < chances) & (np.arange(chances.shape[1]) < verified[:, None])
        accepted = drawn.cumprod(axis=1).sum(axis=1)
        at = self.slots.num_rounds[slots]
        self.slots.rounds[slots, at], self.slots.round_drafts[slots, at] = accepted, verified
        self.slots.num_rounds[slots] += 1
        self.tokens += count + int(accepted.sum())
        self.window = made + 1
        self.chosen.append(made)
        return made

    def run(self, policy: DraftPolicy, count: int, steps: int) -> float:
        """Tokens a millisecond."""
        for _ in range(steps):
            self.step(policy, count)
        return self.tokens / self.now

    def adaptive(self) -> AdaptiveDrafts:
        return AdaptiveDrafts(self.limits, clock=lambda: self.now)


def rates(size: int, cost: Cost, chances: Any, *, steps: int = 800, noise: float = 0.0) -> tuple[float, dict[int, float]]:
    """Of the adaptive policy, and of every fixed number that it may choose."""

    def world() -> World:
        return World(size, cost, lambda slots: np.array(chances), noise=noise)

    chosen = world()
    policy = chosen.adaptive()
    return chosen.run(policy, size, steps), {k: world().run(Always(k), size, steps) for k in policy.rungs}


@pytest.mark.parametrize(("cost", "chances", "size", "noise"), crossed(4, COSTS, [GOOD, POOR], [1, 8, 32], [0.0, 0.2]), ids=str)
def test_it_comes_close_to_the_best_fixed_number(cost: str, chances: Any, size: int, noise: float) -> None:
    adaptive, fixed = rates(size, COSTS[cost], chances, noise=noise)
    assert adaptive > 0.95 * max(fixed.values()), (adaptive, fixed)


def test_no_drafts_where_none_pay_and_drafts_again_when_they_do() -> None:
    world = World(8, COSTS["rows"], lambda slots: np.array(POOR if world.now < 4000.0 else [0.99] * 5))
    policy = world.adaptive()
    while world.now < 4000.0:
        world.step(policy, 8)
    assert world.chosen[-EVERY:].count(0) > EVERY / 2
    for _ in range(4 * SELDOM):
        world.step(policy, 8)
    assert min(world.chosen[-2 * EVERY :]) > 0, "it noticed, since it tries the others now and then"


def test_times_of_steps_with_prompts_are_not_those_of_decoding() -> None:
    world = World(4, COSTS["weights"], lambda slots: np.array(GOOD))
    policy = world.adaptive()
    for i in range(400):
        prompt = i % 7 == 0
        world.step(policy, 4, has_prefill=prompt)
        world.now += 500.0 * prompt
    known = policy.times.seconds[~np.isnan(policy.times.seconds)]
    assert known.max() < 10.0


def test_a_step_without_requests_that_decode_keeps_the_number() -> None:
    world = World(4, COSTS["weights"], lambda slots: np.array(GOOD))
    policy = world.adaptive()
    before = policy.choose(DraftView(world.slots, np.arange(0), True))
    assert before == 3
    world.run(policy, 4, 100)
    assert policy.choose(DraftView(world.slots, np.arange(0), True)) in policy.rungs


def test_requests_that_want_no_drafts_make_none() -> None:
    world = World(4, COSTS["weights"], lambda slots: np.array(GOOD))
    world.slots.window[:] = 1
    policy = world.adaptive()
    world.run(policy, 4, 300)
    assert world.chosen[-200:].count(0) > 150


def test_acceptance_is_that_of_each_request_and_place() -> None:
    rows = np.array([[0.9, 0.8, 0.7, 0.6, 0.5], [0.2, 0.1, 0.1, 0.1, 0.1]])
    world = World(2, COSTS["weights"], lambda slots: rows[slots])
    policy = world.adaptive()
    world.run(Always(5), 2, 400)
    for end in range(EVERY, 401, EVERY):  # as the policy looks: now and then, at the rounds since
        world.slots.num_rounds[:] = end
        policy.acceptance.look(world.slots, np.arange(2))
    found = policy.acceptance.of(np.arange(2)).T
    assert np.abs(found[0] - rows[0]).max() < 0.25
    assert found[1, 0] < 0.4
    assert found[0].cumprod().sum() > 3.0 * found[1].cumprod().sum()


def test_a_new_request_in_a_slot_begins_anew() -> None:
    world = World(2, COSTS["weights"], lambda slots: np.array([[1.0] * 5, [0.0] * 5])[slots])
    policy = world.adaptive()
    world.run(policy, 2, 100)
    everyone = policy.acceptance.of_all()
    assert policy.acceptance.of(np.array([1]))[0, 0] < 0.1
    world.slots.epoch[1] += 1
    world.slots.num_rounds[1] = 0
    policy.acceptance.look(world.slots, np.array([1]))
    assert policy.acceptance.of(np.array([1]))[:, 0] == pytest.approx(everyone, abs=0.02)


def estimated(times: StepTimes, bucket: int) -> tuple[Any, Any]:
    found = times.estimate(bucket)
    assert found is not None
    return found


def test_times_of_a_bucket_move_together_once_they_are_known() -> None:
    times = StepTimes((1, 2), (0, 1, 3))
    assert times.estimate(0) is None
    times.measured(0, 0, 2.0, 4)
    assert times.estimate(0) is None, "nobody knows how it grows with the number of drafts"
    times.measured(0, 2, 8.0, ENOUGH)
    seconds, sure = estimated(times, 0)
    assert list(seconds) == [2.0, 4.0, 8.0]
    assert sure[0] == sure[2] == 1.0 > sure[1]
    times.measured(0, 2, 16.0, 3)  # the machine became slower
    assert times.seconds[0].tolist()[::2] == [4.0, 16.0]
    assert times.estimate(1) is None, "nothing was measured there"
    times.measured(1, 0, 6.0, 3)
    seconds, sure = estimated(times, 1)
    assert list(seconds) == [6.0, 12.0, 24.0]
    assert sure[1] < 0.9


# -- requests ---------------------------------------------------------------------------------------------------------------
def unlike(slots: Any) -> Any:
    """Drafts of every other request are hardly ever right."""
    return np.where((slots % 2 == 0)[:, None], np.array([0.9, 0.9, 0.9, 0.85, 0.85]), np.array([0.2, 0.15, 0.1, 0.1, 0.1]))


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_requests_whose_drafts_are_seldom_right_verify_few(noise: float) -> None:
    world = World(32, COSTS["weights"], unlike, noise=noise)
    policy = world.adaptive()
    adaptive = world.run(policy, 32, 1500)
    fixed = max(World(32, COSTS["weights"], unlike, noise=noise).run(Always(k), 32, 1500) for k in policy.rungs)
    assert adaptive > 1.05 * fixed
    assert policy.windows is not None
    assert policy.windows.rows[::2].mean() > 2.0 * policy.windows.rows[1:32:2].mean()
    report = policy.report()
    assert 0 < report["limited_steps"] < 1500
    assert noise or report["row_ms"]["32"] == pytest.approx(1e3 * 0.02, rel=0.01), "as the world has it"


@pytest.mark.parametrize("size", [8, 64])
def test_nobody_is_limited_where_rows_cost_nothing(size: int) -> None:
    world = World(size, lambda rows, k: 5.0 + 0.4 * k, unlike)
    policy = world.adaptive()
    world.run(policy, size, 1500)
    assert policy.windows is None
    assert policy.report()["limited_steps"] < 100, "only where it was tried"


def test_a_request_that_was_limited_is_tried_again() -> None:
    world = World(32, COSTS["weights"], lambda slots: unlike(slots if world.now < 9000.0 else 0 * slots))
    policy = world.adaptive()
    while world.now < 9000.0:
        world.step(policy, 32)
    assert policy.windows is not None
    assert policy.windows.rows[1] < 3
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
    world = World(3, COSTS["weights"], lambda slots: np.full(most, 0.9), most=most)
    policy = world.adaptive()
    assert check_policy(policy, world.limits) is policy
    world.run(policy, 3, 300)
    assert set(world.chosen) <= set(policy.rungs)
    assert max(world.chosen[-EVERY:]) == most


def test_what_it_measured_can_be_told() -> None:
    world = World(4, COSTS["weights"], lambda slots: np.array(GOOD))
    policy = world.adaptive()
    assert policy.report()["step_ms"] == {}
    world.run(policy, 4, 200)
    report = policy.report()
    assert set(report["step_ms"]) == {"4"}
    assert len(report["acceptance"]) == 5
    assert report["acceptance"][0] == pytest.approx(0.8, abs=0.1)
