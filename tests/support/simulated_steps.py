"""Steps that are not computed but timed by a model, for draft policies: whose drafts are right, and what a step takes, are given.

A world serves requests with a real policy, which sees a real slot table and the world's clock, and nothing measures time. Texts
are random numbers that were drawn before: whether the draft at a place behind a token is right does not depend on who asks, so
that policies are compared on the same texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.host.adaptive_drafts import AdaptiveDrafts
from polydraft.host.draft_policy import DraftPolicy, DraftView, Windows
from polydraft.host.rehearsal import MOST_S, Rehearsal
from polydraft.host.slots import SlotTable
from polydraft.host.totals import EngineTotals


class Step(NamedTuple):
    """What the time of a step depends on."""

    requests: int
    """Those that decode."""
    window: int
    """Rows of a request at most: the drafts of the step before, and one."""
    rows: int
    """Rows of all requests, less those that requests leave out."""
    drafts: int
    """Drafts that the step makes for each request."""
    has_prefill: bool
    written: float = 0.0
    """Tokens that a request has written, in the mean."""


Cost = Callable[[Step], float]
"""Milliseconds of a step."""
Chances = Callable[["World", Array], Any]
"""[n, K] or [K]: the chance that the draft at each place is right, given those before it, of the slots [n] of a world."""
LENGTH = 20_000
STRETCH = 8
"""Steps without drafts after which the machine's speed is another."""


def _wandering(seed: tuple[int, int]) -> Array:
    """[4096] float64 with variance 1, each much like the one before."""
    fresh, at, path = np.random.default_rng(seed).standard_normal(4096), 0.0, np.empty(4096)
    for place, new in enumerate(fresh.tolist()):
        at = path[place] = 0.95 * at + 0.31 * new
    return path


def rehearse(world: World, rehearsal: Rehearsal, size: int) -> None:
    """Steps of so many requests, as long as a rehearsal wants them."""
    more = rehearsal.next_size()
    while more:
        world.step(rehearsal, size)
        more = not rehearsal.done


class World:
    """`size` requests, one a slot, that decode from the first step on; each until it has as many tokens as `lengths` [size] says,
    by default for ever. `noise`: spread of step times, as a part of them; `drift`: how far the machine's speed wanders from its
    mean in the long run; `late`: steps that are planned before the outcome of one is known, as with overlap."""

    def __init__(
        self, size: int, cost: Cost, chances: Chances, *, most: int = 5, lengths: Array | None = None, noise: float = 0.0,
        drift: float = 0.0, late: int = 0, seed: int = 7,
    ) -> None:  # fmt: skip
        self.limits = Limits(size, most, 64, 64, LENGTH, 16, 64, 4, 1, 100)
        self.cost, self.chances = cost, chances
        self.slots = SlotTable(self.limits)
        self.chosen: list[int] = []
        """What the policy has answered."""
        self.tokens = 0
        self.totals = EngineTotals(accepted_at=[0] * most, drafted_at=[0] * most)
        """What the policy sees of them; `tokens` is what they will be once all outcomes are known."""
        self.spared = 0
        """Rows that windows have left out."""
        self.now = 0.0
        """Milliseconds at the end of the last step."""
        self._noise, self._drift, self._late, self._seed = noise, drift, late, seed
        self._rng, self._speeds = np.random.default_rng(seed), np.random.default_rng((seed, 1))
        self._slow, self._stretch = _wandering((seed, 2)) * drift, STRETCH * cost(Step(size, 1, size, 0, False))
        self._window, self._clock = 1, 0.0
        self._windows: Windows | None = None
        self.begin(lengths)

    def begin(self, lengths: Array | None = None) -> None:
        """Place the next requests, once those before have ended."""
        size = self.limits.max_seqs
        self.slots.epoch += 1
        self.slots.num_rounds[:] = self.slots.num_known[:] = 0
        self.slots.max_total[:] = LENGTH if lengths is None else lengths
        self.done = np.zeros(size, np.int64)
        """[size]: tokens of each request so far."""
        self._fate = self._rng.random((size, 1 << 12, self.limits.num_drafts), np.float32)
        self._outcomes: deque[tuple[Array, Array, Array, float]] = deque()

    def adaptive(self, kind: type[AdaptiveDrafts] = AdaptiveDrafts, *, rehearsed: bool = False) -> AdaptiveDrafts:
        """The policy that is tried, with this world's clock; after a rehearsal, as an engine has one, in another world."""
        at = self
        policy = kind(self.limits, clock=lambda: at._clock)
        if rehearsed:
            at = World(
                self.limits.max_seqs, self.cost, lambda world, slots: np.zeros(world.limits.num_drafts),
                most=self.limits.num_drafts, noise=self._noise, drift=self._drift, late=self._late, seed=self._seed + 1000,
            )  # fmt: skip
            rehearsal = Rehearsal(policy.times, policy.clock, most_s=1e3 * MOST_S)
            for size in rehearsal.sizes:
                rehearse(at, rehearsal, size)
            at = self
        return policy

    def step(self, policy: DraftPolicy, count: int | None = None, *, has_prefill: bool = False) -> int:
        """One step of the first `count` slots, by default of those that have not ended; answers the drafts that it makes."""
        slots = np.flatnonzero(self.slots.num_known < self.slots.max_total) if count is None else np.arange(count)
        made = policy.choose(DraftView(self.slots, slots, has_prefill, self.totals))
        most = np.minimum(self._window, self.slots.window[slots])
        rows = most if self._windows is None else self._windows.limit(most, self.slots, slots)
        self._windows = getattr(policy, "windows", None)  # of the next step, as the scheduler has it
        step = Step(len(slots), self._window, int(rows.sum()), made, has_prefill, float(self.done[slots].mean()))
        self.now += self.cost(step) * self._speed()
        self.spared += int((most - rows).sum())
        places = np.arange(self.limits.num_drafts)
        right = self._fate[slots, self.done[slots] % self._fate.shape[1]] < self.chances(self, slots)
        accepted = (right & (places < rows[:, None] - 1)).cumprod(axis=1).sum(axis=1)
        new = np.minimum(accepted + 1, self.slots.max_total[slots] - self.done[slots])  # 0 where an end was not known yet
        self.done[slots] += new
        self.tokens += int(new.sum())
        self._outcomes.append((slots, accepted, rows - 1, self.now))
        while len(self._outcomes) > self._late:
            self._apply(*self._outcomes.popleft())
        self._window = made + 1
        self.chosen.append(made)
        return made

    def _speed(self) -> float:
        """The factor of the next step's time: noise, to the slow side, and how slow the machine is just now."""
        slow = self._slow[int(self.now / self._stretch) % len(self._slow)]
        return (1.0 + self._noise * abs(float(self._speeds.standard_normal()))) * float(np.exp(slow))

    def _apply(self, slots: Array, accepted: Array, verified: Array, ended: float) -> None:
        at = self.slots.num_rounds[slots]
        self.slots.rounds[slots, at], self.slots.round_drafts[slots, at] = accepted, verified
        self.slots.num_rounds[slots] += 1
        self.totals.add(int((accepted + 1).sum()), accepted, verified)
        self.slots.num_known[slots] += accepted + 1
        self._clock = ended

    def run(self, policy: DraftPolicy, count: int, steps: int) -> float:
        """Tokens a millisecond over all steps so far, of which `steps` are new."""
        for _ in range(steps):
            self.step(policy, count)
        return self.tokens / self.now

    def drain(self, policy: DraftPolicy) -> float:
        """Tokens a millisecond until all requests have ended."""
        tokens, begun = self.tokens, self.now
        while bool((self.slots.num_known < self.slots.max_total).any()):
            self.step(policy)
        return (self.tokens - tokens) / (self.now - begun)
