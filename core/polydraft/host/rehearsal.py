"""What steps take, before anything is served: the first belief of a policy that chooses the number of drafts.

Requests of random tokens decode in a few sizes of batch, with each number of drafts, and once with drafts that nobody verifies:
by launches and graphs that steps have, planned and collected as an engine does. Slots, blocks and results are thrown away.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from polydraft.backend import RowOrder
from polydraft.contracts.base import Limits
from polydraft.host.adaptive_drafts import QUIET, SETTLING, TRIAL, StepTimes, tokens_of
from polydraft.host.commit import apply, end
from polydraft.host.draft_policy import DraftView, Windows
from polydraft.host.kv_blocks import BlockLedger
from polydraft.host.request import Request
from polydraft.host.scheduler import Scheduler
from polydraft.host.slots import SlotTable
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import Phase
from polydraft.step.runner import InFlightStep, Runner

MOST_S = 1.5
"""Seconds that it takes at most, but for steps that have begun; each size of batch has an equal share, and what others left."""
APART = 4
"""How many times smaller the next size of batch is: those between are like their neighbours."""
PROMPT = 8
"""Tokens of a prompt."""
PASSES = 4
"""Times that each size is gone through at most, where steps take unlike times and there is time left: on a busy machine a few
steps tell little."""


class Rehearsal:
    """A draft policy that times what `times` has beliefs about: `sizes`, one after the other (`next_size`), each until it is
    `done`. Seconds are those of `clock`."""

    def __init__(self, times: StepTimes, clock: Callable[[], float], *, most_s: float = MOST_S) -> None:
        self.rungs = times.rungs
        self.windows: Windows | None = None
        self.sizes = _sizes(times.buckets[-1])
        """Requests that decode together, descending."""
        self.done = False
        first, *between, last = range(len(self.rungs))
        self._ways = [(last, False), (first, False), (last, True), *((rung, False) for rung in between)]
        """Rungs by index, each with whether nobody verifies its drafts: those that tell most come first."""
        self._times, self._clock = times, clock
        self._begun, self._share, self._size = clock(), most_s / len(self.sizes), 0
        self._way, self._pass, self._count, self._steps, self._before = 0, 0, 0, 0, 0.0
        self._samples: list[float] = []

    def next_size(self) -> bool:
        """Begin the next size; whether those before have left time for it."""
        self._size, self._way, self._pass, self._count = self._size + 1, 0, 0, 0
        self.done = self._late(self._clock())
        return not self.done

    def _late(self, now: float) -> bool:
        return now - self._begun > self._size * self._share

    def choose(self, view: DraftView) -> int:
        """The number that is timed just now: until there are as many times as a trial gives (`AdaptiveDrafts`)."""
        now, count = self._clock(), len(view.decode)
        if view.has_prefill or count != self._count:
            self._count, self._steps = count, 0
            self._samples.clear()
        elif self._steps > SETTLING:
            self._samples.append(now - self._before)
        if len(self._samples) == TRIAL - SETTLING:
            self._file(tokens_of(view))
        self._before, self._steps = now, self._steps + 1
        self.done = self._way == len(self._ways) or self._late(now)
        rung, unverified = self._ways[min(self._way, len(self._ways) - 1)]
        if unverified != (self.windows is not None):
            self.windows = Windows(np.ones_like(view.slots.window), view.slots.epoch.copy()) if unverified else None
        return self.rungs[rung]

    def _file(self, tokens: int) -> None:
        rung, unverified = self._ways[self._way]
        bucket = bisect.bisect_left(self._times.buckets, self._count)
        self._times.measured(bucket, rung, self._samples, 0, tokens, float(unverified))
        self._samples.clear()
        self._steps, self._way = 0, self._way + 1
        if self._way == len(self._ways) and self._pass + 1 < PASSES and self._times.noise > QUIET:
            self._way, self._pass = 0, self._pass + 1


def _sizes(most: int) -> list[int]:
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(max(sizes[-1] // APART, 1))
    return sizes


def rehearse(policy: Rehearsal, runner: Runner, limits: Limits, row_order: RowOrder, *, overlap: int) -> None:
    """Run the steps that `policy` asks for, `overlap` of them in flight. For a runner whose host fills no inputs, before it
    serves."""
    counters = None if runner.graphs is None else replace(runner.graphs.counters)
    slots, rng = SlotTable(limits), np.random.default_rng(0)
    ledger = BlockLedger(
        num_blocks=limits.num_blocks, block_size=limits.block_size, max_seqs=limits.max_seqs, max_blocks=limits.max_blocks,
        shares=False,
    )  # fmt: skip
    scheduler = Scheduler(limits, slots, ledger, runner.columns, row_order, policy=policy)
    in_flight = deque[InFlightStep]()

    def collect() -> None:
        flight = in_flight.popleft()
        apply(slots, ledger, flight.plan, runner.collect(flight))

    def step() -> bool:
        plan = scheduler.plan()
        if plan is not None:
            in_flight.append(runner.launch(plan))
        if in_flight and (plan is None or len(in_flight) > overlap):
            collect()
        return plan is not None or bool(in_flight)

    for size in policy.sizes:
        if not policy.next_size():
            continue
        room = min(limits.num_blocks // size * limits.block_size, limits.max_len)
        prompt = min(PROMPT, limits.max_len - 1)
        for number in range(size):
            ids = tuple(rng.integers(0, limits.vocab_size, prompt).tolist())
            scheduler.queue(Request(f"rehearsal-{number}", ids, _PARAMS, number, (number, 0), (), max(room, prompt + 1)))
        while not policy.done and step():
            pass
        scheduler.waiting.clear()
        while in_flight:
            collect()
        for slot in np.flatnonzero((slots.phase != Phase.IDLE) & ~slots.draining).tolist():
            end(slots, slot, "abort")
        scheduler.release_drained()
        scheduler.waiting.clear()  # what was preempted has returned to it
    runner.device.synchronize()  # the last drafts come after the snapshot that was waited for
    runner.reset()
    if runner.graphs is not None and counters is not None:
        runner.graphs.counters = counters


_PARAMS = SamplingParams(ignore_eos=True)
