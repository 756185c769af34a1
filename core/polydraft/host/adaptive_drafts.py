"""The draft policy behind `--draft-tokens auto:K`: as many drafts as bring requests forward fastest, as measured in the run.

Two things decide how many drafts pay: what a step costs with them, and how many of them the target accepts. Both are learned
while requests are served. A step that verifies k drafts and makes k new ones is timed from one plan to the next, by rung and by
bucket of decoding requests, as soon as the steps before it were of the same kind; acceptance is counted by request and by place
in the window, and forgotten slowly. Decisions are seldom, and seldomer while nothing follows from them, but one is made at once
where more or fewer drafts are accepted than the last one expected.

What is maximised is the pace of the requests, their tokens a second in the geometric mean, weighted so that the time in which all
of them end is shortest (`shares`). A request that is slow holds its slot the longer, so that a token of it is worth the more. The
plain sum of all tokens would let those run ahead whose drafts are right anyway, and leave the others for the end.

Times are beliefs with a spread (`StepTimes`): rungs and buckets are alike, as far as they are neighbours, what nobody measures
grows uncertain, and what texts add as they grow is told apart, since it goes when others begin. The first ones are those of a
rehearsal, where there was one (`polydraft.host.rehearsal`). A rung is tried for a few steps where what that may bring, by its
spread, is more than what the trial costs: the knowledge gradient (Frazier, Powell and Dayanik, 2008, doi:10.1137/070693424). So
there are many trials while nothing is known, few later, and hardly one of a rung that is far behind.

Requests are told apart: a draft whose chance, times those before it, is worth less than the row that verifies it is not verified
(`windows`). What a row costs belongs to the beliefs: where that is nothing, as in steps that are bound by weights or replayed at
full size, nobody is limited.

That measured times and acceptance choose the number is the goodput of SmartSpec (Liu et al., 2024, arXiv:2406.14066). Nothing
here touches the device, and no text depends on it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.host.draft_policy import DraftView, Windows, ladder
from polydraft.host.slots import SlotTable
from polydraft.host.totals import EngineTotals
from polydraft.step.graphs import default_buckets

SOON, EVERY, SELDOM = 4, 16, 256
"""Steps from one decision to the next: twice as many each time that nothing follows from it, `SELDOM` at most; `EVERY` where
something does, twice `SOON` where others decode than before, and `SOON` where fewer of them do."""
DECIDING = 0.01
"""Part of the time that decisions may take which follow from nothing but that time has passed: where steps are short, they are
further apart."""
LOOK, MANY = 32, 1024
"""Newest rounds of a request that a decision counts at most, and those of all together."""
SETTLING = 2
"""Steps after a change that are not timed: their windows are those of before, and so are those in flight."""
TRIAL, SHORT_TRIAL = 5, 3
"""Steps for which a rung is tried, those that settle included; the fewer where one time, and one round of each request, tell
enough."""
QUIET, ENOUGH = 0.03, 16
"""Where they do: the spread of a step's time below which, and the requests from which on."""
WORTH = 2.0
"""Steps that a short trial must promise beyond what it costs."""
CHANGE = 0.7
"""Steps that a change of the rung costs: the first one verifies the drafts of before, and its time is that of the larger rung."""
STAY = 96, 256
"""Steps for which what a trial shows is useful, at least and at most; between them, as many as the bucket has seen so far, or
fewer where requests that end leave it sooner."""
GAIN, LIMITS = CHANGE / STAY[0], 0.015
"""By how much more pace another rung must promise, and windows, which hide what the drafts are worth that they leave out."""
FIRST, BEGINNING = 3, 5
"""Drafts of the first steps at most; and the steps before the first decision where times are known from a rehearsal, which does
not show whether drafts are right."""
FAR, LAST = 512, 4.0
"""Steps still to take for which a request counts at most: ends that are further away are seldom reached; and the power of them
that its chance to be the last one grows with: ends may come sooner than they have to."""
FORGET, FORGET_ALL = 0.95, 0.98
"""What is left of a round's evidence about its request after the next round, and about all requests after the next step: a place
that nobody tries any more is soon taken to be like the one before it, which may have changed. As much as of all is left of a
request's evidence about a place after a round that verified no draft there: in the end it is tried again."""
CHECK, SURPRISE, REFUTED = 4, 4.0, 0.25
"""Timed steps from one look at how many drafts are accepted to the next; standard deviations from what was expected at which
the next decision is made at once; and what is left then of the evidence of before."""
USUAL = 4096.0
"""Rounds after which it is forgotten how often the first draft was accepted usually, about."""
PRIOR, PRIOR_CHANCE, OTHERS = 4.0, 0.7, 32.0
"""Rounds that what is known of all requests counts for in the estimate of one; what is believed of all at first; and rounds that
count of all at most where none of those requests is left, since others may be of another kind."""

# Spreads of the beliefs about times, in times of a step without drafts, but for those of rows.
SLOPE, SLOPES = 0.3, 0.3
"""What a draft costs, and how far off that may be."""
CURVED, ROUGH = 0.1, 0.03
"""How far a rung may be off that line, together with its neighbours, and alone."""
NO_PASS = 0.2
"""How far a step without drafts may be off besides, which leaves out what all passes of a proposer have in common."""
SLOPES_AWAY, CURVED_AWAY, ROUGH_AWAY, NO_PASS_AWAY = 0.08, 0.05, 0.03, 0.08
"""How much further in a bucket that is a doubling away."""
SLOPES_STALE, ROUGH_STALE, RESTLESS = 0.0015, 0.001, 0.06
"""How much further after each step, and after `STAY` of them at most, where the spread of a step's time is that of the third
number or more; less on steadier machines, as it is less."""
ROWS, ROWS_SPREAD, ROWS_AWAY, ROWS_STALE = 0.5, 0.4, 0.1, 0.001
"""The part of a draft's cost that is the row which verifies it, and the spreads of that."""
LONG = 512
"""Tokens that each request of a bucket has in the caches, where they add to a step:"""
GROWTH, GROWTH_SPREAD, GROWTH_AWAY, GROWTH_STALE = 0.2, 0.3, 0.03, 0.0005
"""so much to every one, in times of a step without drafts, and the spreads of that;"""
DRAFTS_GROWTH, DRAFTS_GROWTH_SPREAD, DRAFTS_GROWTH_AWAY, DRAFTS_GROWTH_STALE = 0.02, 0.03, 0.03, 0.0001
"""and so much more for each draft."""
UNSEEN, UNSEEN_DEEP = 0.006, 0.003
"""Spread of the pace of a rung, as a part of it, after each step that verified no drafts, and after each that verified fewer:
texts change, which the drafts at one place tell of the others."""
UNKNOWN = 0.15
"""Spread of the pace of one request with more drafts than now, as a part of it, while none of its drafts was verified."""
MOST_NOISE, MOST_UNREST = 0.5, 0.1
"""Spread of several times, and change from one step to the next, that are believed at most: one that was interrupted says little
of the others."""
UNREST, NOISE = 0.02, 0.1
"""Change of the times of all rungs from one step to the next, and the spread of one step's time, until both are known."""


class StepTimes:
    """Beliefs about the seconds of a step, by bucket of decoding requests: its time at each rung, which part of the cost of
    drafts is that of the rows that verify them, and what each token in the caches adds, to every step and for each draft. All are
    normal together, so that a measurement also moves what it was not about, as far as that is alike (a Kalman filter).

    `mean` is [buckets, rungs + 3] and `cov` [buckets, rungs + 3, rungs + 3], in the order above, with times as they are at the
    tokens of the last measurement; they mean something where a bucket is `known` [buckets]."""

    def __init__(self, buckets: tuple[int, ...], rungs: tuple[int, ...]) -> None:
        self.buckets, self.rungs = buckets, rungs
        n = len(rungs)
        self.mean, self.cov = np.zeros((len(buckets), n + 3)), np.zeros((len(buckets), n + 3, n + 3))
        self.known = np.zeros(len(buckets), bool)
        self.steps, self.limited_steps = np.zeros((len(buckets), n), np.int64), np.zeros(len(buckets), np.int64)
        """[buckets, rungs]: steps that were timed with all their rows; [buckets]: those with fewer."""
        self.noise, self.unrest = NOISE, UNREST**2
        """Spread of one step's time, and variance that each step adds to those of all rungs, both as parts of a step's time."""
        self._at, self._tokens = np.zeros(len(buckets), np.int64), np.zeros(len(buckets))
        """[buckets]: the step that each belief is of, and the tokens in the caches of its requests."""
        self._last = -1, -1, 0
        """Bucket, rung and step of the last measurement."""
        self._timed, self._repeats = 16, 3
        """Steps behind `noise`, and measurements behind `unrest`; with as many as what is believed at first stands for."""
        self._same = np.eye(n + 3)
        self._level, self._drafts = np.append(np.ones(n), np.zeros(3)), np.array(rungs, np.float64)
        self._alike = np.multiply.outer(self._level, self._level)
        self._first = (
            np.append(1.0 + SLOPE * np.array(rungs), (ROWS, GROWTH, DRAFTS_GROWTH)),
            self._spread(SLOPES, CURVED, ROUGH, NO_PASS, ROWS_SPREAD, GROWTH_SPREAD, DRAFTS_GROWTH_SPREAD),
        )
        self._away = self._spread(
            SLOPES_AWAY, CURVED_AWAY, ROUGH_AWAY, NO_PASS_AWAY, ROWS_AWAY, GROWTH_AWAY, DRAFTS_GROWTH_AWAY
        )  # fmt: skip
        self._stale = self._spread(SLOPES_STALE, 0.0, ROUGH_STALE, 0.0, ROWS_STALE, GROWTH_STALE, DRAFTS_GROWTH_STALE)

    def _spread(
        self, slopes: float, curved: float, rough: float, no_pass: float, rows: float, growth: float, drafts_growth: float
    ) -> Array:
        n, k = len(self.rungs), self._drafts
        cov = np.diag(np.append(np.zeros(n), (rows, growth, drafts_growth)) ** 2)
        cov[:n, :n] = slopes**2 * np.outer(k, k) + curved**2 * np.exp(-(((k[:, None] - k) / 2.0) ** 2)) + rough**2 * np.eye(n)
        cov[0, 0] += no_pass**2 * (self.rungs[0] == 0)
        return cov

    def belief(self, bucket: int, now: int, tokens: float) -> tuple[Array, Array]:
        """Mean [rungs + 1] and covariance [rungs + 1, rungs + 1] of a bucket at step `now`, when its requests have so many tokens
        in the caches. One that was never measured is taken to be like the nearest one that was; its level is anything."""
        mean, cov = self._moved(bucket, now, tokens)
        n = len(self.rungs) + 1
        return mean[:n], cov[:n, :n]

    def _moved(self, bucket: int, now: int, tokens: float) -> tuple[Array, Array]:
        """`mean` and `cov` of a bucket, which are now those of this step and of so many tokens."""
        mean, cov, passed = self.mean[bucket], self.cov[bucket], now - int(self._at[bucket])
        self._at[bucket] = now
        if self.known[bucket]:
            self._grow(mean, cov, tokens - self._tokens[bucket])
            if passed:
                passed = min(passed, STAY[1])
                self._widen(bucket, passed * min((self.noise / RESTLESS) ** 2, 1.0) * self._stale)
                cov += passed * self.unrest * mean[0] ** 2 * self._alike
        elif self.known.any():
            away = np.abs(np.log2(self.buckets) - math.log2(self.buckets[bucket]))
            nearest = int(np.where(self.known, away, np.inf).argmin())
            mean[:], cov[:] = self.mean[nearest], self.cov[nearest]
            self._grow(mean, cov, tokens - self._tokens[nearest])
            self._widen(bucket, float(away[nearest]) * self._away)
        else:
            unit = self._units(bucket, 1.0)
            mean[:], cov[:] = self._first[0] * unit, self._first[1] * np.multiply.outer(unit, unit)
        self._tokens[bucket] = tokens
        return mean, cov

    def _grow(self, mean: Array, cov: Array, tokens: float) -> None:
        """Move a belief to where there are so many tokens more."""
        n, k = len(self.rungs), self._drafts
        low = 0.3 * mean[:n]
        mean[:n] += tokens * (mean[-2] + k * mean[-1])
        np.maximum(mean[:n], low, out=mean[:n])  # what tokens add may be overrated
        cov[:n] += tokens * (cov[-2] + k[:, None] * cov[-1])
        cov[:, :n] += tokens * (cov[:, -2:-1] + cov[:, -1:] * k)

    def _units(self, bucket: int, seconds: float) -> Array:
        """[rungs + 3]: what spreads are given in, where a step without drafts takes so long."""
        unit = seconds * self._level
        unit[-3], unit[-2:] = 1.0, seconds / (LONG * self.buckets[bucket])
        return unit

    def _widen(self, bucket: int, by: Array) -> None:
        """Add a spread to the belief of a bucket."""
        unit = self._units(bucket, float(self.mean[bucket, 0]))
        self.cov[bucket] += by * np.multiply.outer(unit, unit)

    def measured(self, bucket: int, rung: int, samples: list[float], now: int, tokens: float, spared: float = 0.0) -> None:
        """Steps of this bucket and rung, the last one before step `now`, took so long each, in seconds, with `tokens` in the
        caches in the mean; of the rows that verify drafts they had the part `spared` less."""
        n, alone = len(self.rungs), not self.known.any()
        mean, cov = self._moved(bucket, now, tokens)
        ordered, count = sorted(samples), len(samples)
        lower, upper = ordered[: count - count // 2], ordered[count // 2 :]  # both have the middle one, if there is one
        seconds = max((lower[-1] + upper[0]) / 2.0, 1e-9)
        if count > 2:
            spread = min(1.25 * (sum(upper) - sum(lower)) / (count * seconds), MOST_NOISE)
            self._timed += count
            self.noise += max(count / self._timed, 0.03) * (spread - self.noise)
        saved = self.part(mean) * spared
        expected = float((1.0 - saved) * mean[rung] + saved * mean[0])
        told = np.zeros(len(mean))
        told[rung], told[n] = 1.0 - saved, -spared * (mean[rung] - mean[0])
        told[0] += saved
        if spared:
            self.limited_steps[bucket] += count
        else:
            self.steps[bucket, rung] += count
        if not self.known[bucket]:
            self._begin(mean, cov, told, seconds / expected, seconds, count, alone)
            self.known[bucket] = True
            return
        error, toward = seconds - expected, cov @ told
        if self._last[:2] == (bucket, rung):
            unrest = ((error / seconds) ** 2 - 2.0 * self.doubt(count)) / max(now - self._last[2], 1)
            self._repeats += 1
            self.unrest += max(1.0 / self._repeats, 0.03) * (min(unrest, 10.0 * self.unrest) - self.unrest)
            self.unrest = min(max(self.unrest, 1e-7), MOST_UNREST**2)
        self._last = bucket, rung, now
        doubt = self.doubt(count) * seconds**2
        gain = toward / (float(toward @ told) + doubt)
        mean += gain * error
        np.maximum(mean[:n], 0.1 * seconds, out=mean[:n])  # what nobody measured might be below nothing
        mean[n] = min(float(mean[n]), 1.0)
        np.maximum(mean[n + 1 :], 0.0, out=mean[n + 1 :])
        self._learn(cov, gain, told, doubt)

    def _learn(self, cov: Array, gain: Array, told: Array, doubt: float) -> None:
        """What is left of a covariance where the mean is moved by `gain` times the error of what was `told`, whose variance is
        `doubt`: in a form that stays a covariance (Joseph's)."""
        left = self._same - np.multiply.outer(gain, told)
        cov[:] = left @ cov @ left.T + doubt * np.multiply.outer(gain, gain)

    def _begin(self, mean: Array, cov: Array, told: Array, factor: float, seconds: float, count: int, alone: bool) -> None:
        """The first measurement of a bucket says what its level is, and nothing about how its rungs differ; where it is the first
        one of all (`alone`), what tokens add is a part of that level, too."""
        n = len(self.rungs)
        factors = np.full(len(mean), factor)
        factors[n if alone else slice(n, None)] = 1.0
        mean *= factors
        cov *= np.multiply.outer(factors, factors)
        told[n] *= factor
        self._learn(cov, mean * self._level / seconds, told, self.doubt(count) * seconds**2)

    def doubt(self, count: int) -> float:
        """The variance of the median of so many steps, as a part of their time squared."""
        return 1.6 * self.noise**2 / count + 1e-6

    def part(self, mean: Array) -> float:
        """Which part of the cost of drafts is that of their rows."""
        return min(max(float(mean[len(self.rungs)]), 0.0), 1.0)


class Acceptance:
    """Chances that the draft at each place of a window is accepted, given that those before it were, by slot."""

    def __init__(self, limits: Limits) -> None:
        b, k = limits.max_seqs, limits.num_drafts
        self._places = np.arange(k, dtype=np.uint8)[:, None]
        self._back = np.arange(1, LOOK + 1)[:, None]
        self._epoch = np.full(b, -1, np.int64)
        self._seen = np.zeros(b, np.int64)
        self._counts, self._all = np.zeros((2, k, b)), np.zeros((2, k))
        """Drafts that were accepted, and those that were reached: by place and slot, and by place."""
        self._usual = np.array((PRIOR * PRIOR_CHANCE, PRIOR))
        """The same of the first place, over a longer time."""

    def look(self, slots: SlotTable, decode: Array, steps: int) -> None:
        """Count the rounds of these slots since the last look, `steps` ago: at most the newest `LOOK`, and `MANY` of all."""
        # Here and in what follows sums are reductions of ufuncs: methods of arrays take as long again to find them.
        rounds = slots.num_rounds[decode]
        new = decode[self._epoch[decode] != slots.epoch[decode]]
        if new.size:
            self._epoch[new], self._counts[:, :, new], self._seen[new] = slots.epoch[new], 0.0, 0
        new_rounds = rounds - self._seen[decode]
        most = int(np.maximum.reduce(new_rounds))
        back = self._back[: min(max(MANY // len(decode), 1), most)]
        fresh = back <= new_rounds  # [up to LOOK, n], so that sums go along whole rows
        at = (rounds + decode * slots.rounds.shape[1]) - back
        counted = np.empty((len(back), 3, 1, len(decode)), np.uint8)
        accepted, reached, verified = counted[:, 0, 0], counted[:, 1, 0], counted[:, 2, 0]
        np.multiply(slots.rounds.reshape(-1).take(at, mode="clip"), fresh, out=accepted)
        np.multiply(slots.round_drafts.reshape(-1).take(at, mode="clip"), fresh, out=verified)
        np.minimum(accepted + np.uint8(1), verified, out=reached)
        found = np.add.reduce((counted > self._places).view(np.uint8), axis=0, dtype=np.uint8)  # [3, places, n]
        count = np.minimum(new_rounds, len(back))
        left = _LEFT[count, found[2]]
        if len(back) < most:
            left *= FORGET_ALL ** (new_rounds - count)
        self._counts[:, :, decode] = self._counts.take(decode, axis=2) * left + found[:2]
        new_of_all = np.add.reduce(found[:2], axis=2, dtype=np.int64)
        self._all = self._all * FORGET_ALL**steps + new_of_all
        self._usual = self._usual * max(1.0 - new_of_all[1, 0] / USUAL, 0.0) + new_of_all[:, 0]
        self._seen[decode] = rounds

    def refuted(self) -> None:
        """What was seen last contradicts what was seen before."""
        self._counts *= REFUTED
        self._all *= REFUTED

    def fade(self) -> None:
        """Those who decode next are others."""
        self._all *= min(1.0, OTHERS / max(float(self._all[1, 0]), 1.0))

    def of_all(self) -> list[float]:
        """[places]: the chances over all requests; a place that nobody has tried is taken to be like the one before, and the
        first one to be as usual, or better."""
        chances, before = [], max(PRIOR_CHANCE, float(self._usual[0] / self._usual[1]))
        for accepted, reached in zip(*self._all.tolist(), strict=True):
            before = (accepted + PRIOR * before) / (reached + PRIOR)
            chances.append(before)
        return chances

    def of(self, decode: Array) -> Array:
        """[places, len(decode)] float64: the chances of each of these slots. A request that does worse than the others is
        believed to do as much worse at places where it was not tried."""
        (accepted, reached), all_ = self._counts.take(decode, axis=2), np.array(self.of_all())
        ratio = (np.add.reduce(accepted) + PRIOR) / (all_ @ reached + PRIOR)
        chances: Array = (accepted + PRIOR * np.minimum(np.multiply.outer(all_, ratio), 1.0)) / (reached + PRIOR)
        return chances

    def unknown(self, decode: Array) -> int:
        """How many of these slots no draft was verified of."""
        return len(decode) - int(np.count_nonzero(self._counts[1, 0].take(decode)))

    def lasting(self, decode: Array, windows: Array) -> Array:
        """[places, len(decode)] float64: the chance that the draft at a place and all before it are accepted, 0 behind the rows
        (`windows` [len(decode)]) that each request allows."""
        chances: Array = np.multiply.accumulate(self.of(decode) * (self._places < windows - 1))
        return chances


_ODD = range(1, 512, 2)
"""What the square of a number of drafts grows by from one to the next."""
_ROUNDS = np.arange(LOOK + 1)
_LEFT = FORGET**_ROUNDS * FORGET_ALL ** np.maximum(_ROUNDS[:, None] - _ROUNDS, 0)
"""What is left of evidence about a place, by number of rounds, and of those that verified a draft there."""


def tokens_of(view: DraftView) -> int:
    """Tokens that the requests which decode have in the caches, as far as the host knows."""
    tokens: int = np.add.reduce(view.slots.num_known.take(view.decode))
    return tokens


def hoped(mean: float, variance: float) -> float:
    """What a normal number is above 0, on average, where below it counts as nothing."""
    spread = math.sqrt(variance)
    return spread * math.exp(-0.5 * mean**2 / variance) / math.sqrt(2.0 * math.pi) + 0.5 * mean * math.erfc(
        -mean / (spread * math.sqrt(2.0))
    )


def shares(steps: Array, alone: float, together: float) -> Array:
    """[n]: what the progress of each request in a step is worth, of 1 in all, where the time until all have ended counts. `steps`
    [n] are those that each still takes; a step takes so long with one request, and so long with all of these. A step less of one
    request saves what a request adds to a step; if it is the last one to end, also what a step takes in any case."""
    each, last = (together - alone) / max(len(steps) - 1, 1), steps**LAST
    found: Array = each + max(alone - each, 0.0) * last / np.add.reduce(last)
    total: float = np.add.reduce(found)
    return found / total


class _Way(NamedTuple):
    """A way to go on: a rung, with windows or without."""

    rung: int
    spared: float
    """The part of the drafts that nobody verifies because of windows; 0 without."""
    seconds: float
    """Of a step."""
    pace: float
    """Logarithm of the tokens a second of the requests, as a geometric mean."""


class AdaptiveDrafts:
    """The policy: see the module. `rungs` are those of the ladder. Deterministic, but for its clock."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rungs = ladder(limits.num_drafts)
        self.times = StepTimes(default_buckets(limits.max_seqs), self.rungs)
        self.acceptance = Acceptance(limits)
        self.clock = clock
        """Seconds."""
        self._rung = bisect.bisect_right(self.rungs, FIRST) - 1
        """The number that is chosen, as an index of `rungs`, like all below."""
        self._bucket, self._bounds = 0, (0, 0)
        self._settled, self._left, self._pause = 0, 0, EVERY
        self._chosen = self._rung, False
        """The last rung that was not tried but chosen, and whether with windows."""
        self._step, self._filed, self._looked = 0, 0, 0
        """Steps so far, and when times and rounds were last filed."""
        self._stayed, self._stays = [0] * len(self.times.buckets), 0.0
        """Steps of each bucket; and those until requests that end leave this one, if no others come."""
        self._ran = [0] * len(self.rungs)
        """The last step of each rung, or of one above it."""
        self._before = 0.0
        self._samples: list[float] = []
        self._tokens: list[int] = []
        """Those in the caches, at every eighth of `_samples`."""
        self._expected, self._counted = (0.0, math.inf), (0, 0)
        """Mean and variance of the drafts accepted in a round, as the last decision has them; and the engine's rounds and
        accepted drafts at the first of `_samples`."""
        self.windows: Windows | None = None
        """What requests verify at most, as `DraftPolicy` says."""
        self._limited_seconds = 0.0
        """Seconds of the best way, as the last decision in this bucket has it, 0 before the first one: what is worth its row
        depends on the time of a step without the others."""
        self._spared, self._limited_steps = 0.0, 0
        """The part of a step's drafts that nobody verifies because of them; steps with some."""
        self._deciding = 0.0
        """Seconds that a decision takes, as the last ones did; 0 before the first one."""

    def choose(self, view: DraftView) -> int:
        """The rung that was decided on, and now and then another decision. The time since the last call is that of a step, if the
        last ones were like it."""
        now, count = self.clock(), len(view.decode)
        if not count or view.has_prefill:
            self._settled = 0
            if not count:
                self._bounds = 0, 0  # whoever decodes next is another
                self.acceptance.fade()
            return self.rungs[self._rung]
        if self._settled >= SETTLING:
            timed = len(self._samples)
            if not timed % 8:
                self._tokens.append(tokens_of(view))
            if not timed % CHECK:
                self._check(view.totals, timed)
            self._samples.append(now - self._before)
        self._settled, self._before = self._settled + 1, now
        self._step += 1
        self._left -= 1
        self._limited_steps += self._spared > 0.0
        if not self._bounds[0] < count <= self._bounds[1]:
            self._enter(bisect.bisect_left(self.times.buckets, count))
        if self._left <= 0:
            self._decide(view)
            took = self.clock() - now
            self._deciding += 0.25 * (min(took, 4.0 * self._deciding) - self._deciding) if self._deciding else took
        return self.rungs[self._rung]

    def _check(self, totals: EngineTotals, timed: int) -> None:
        """Decide at once where other numbers of drafts are accepted, in so many steps since the first one that was timed, than
        the last decision expected. What it expected is uncertain itself: it rests on the rounds that are not forgotten."""
        if not timed:
            self._counted = totals.rounds, totals.accepted
            return
        (mean, variance), rounds = self._expected, totals.rounds - self._counted[0]
        error = totals.accepted - self._counted[1] - mean * rounds
        if error**2 > SURPRISE**2 * variance * rounds * (1.0 + timed * (1.0 - FORGET)):
            self.acceptance.refuted()
            self._left = 0

    def _enter(self, bucket: int) -> None:
        """Another number of requests decodes, or others than before: steps are timed anew, and decided on at once; but behind a
        rehearsal drafts must have been verified, and where some have ended the others may do so, too."""
        self._file()
        left = BEGINNING if not self._looked and self.times.known.any() else 0
        self._left = SOON if self._bounds[1] and bucket < self._bucket else left
        # The first steps behind a rehearsal are those of a process that just begins to serve: -left keeps them from being timed.
        self._bucket, self._settled, self._pause, self._limited_seconds = bucket, -left, SOON, 0.0
        self._bounds = self.times.buckets[bucket - 1] if bucket else 0, self.times.buckets[bucket]

    def _file(self) -> None:
        """File the times since the last change; those of interrupted steps do not count."""
        self._stayed[self._bucket] += self._step - self._filed
        self._filed = self._step
        self._ran[: self._rung + 1] = [self._step] * (self._rung + 1)
        if self._samples:
            tokens = sum(self._tokens) / len(self._tokens)
            self.times.measured(self._bucket, self._rung, self._samples, self._step, tokens, self._spared)
            self._samples.clear()
            self._tokens.clear()

    def _decide(self, view: DraftView) -> None:
        """Take what has the best pace, or what is worth a trial."""
        self._file()
        slots, decode = view.slots, view.decode
        self.acceptance.look(slots, decode, self._step - self._looked)
        self._looked = self._step
        mean, cov = self.times.belief(self._bucket, self._step, tokens_of(view))
        lasting = self.acceptance.lasting(decode, slots.window[decode])
        steps = np.maximum(slots.max_total[decode] - slots.num_known[decode], 1) / (
            1.0 + np.add.reduce(lasting[: self.rungs[self._chosen[0]]])
        )
        self._stays = float(np.sort(steps)[len(decode) - self._bounds[0] - 1])
        together = float(mean[self._chosen[0]])
        alone = min(float(self.times.mean[0, self._chosen[0]]), together)  # nothing, where that is not known
        gains = np.log1p(np.add.accumulate(lasting))
        gains[1:] -= gains[:-1]
        gains *= shares(np.minimum(steps, FAR), alone, together)
        ways, kept = self._ways(mean, lasting, gains)
        paces = [way.pace for way in ways]
        best = paces.index(max(paces))
        limited = self.windows is not None
        now = next((i for i, way in enumerate(ways) if (way.rung, way.spared > 0.0) == (self._rung, limited)), self._rung)
        unknown = UNKNOWN**2 * self.acceptance.unknown(decode) / len(decode) ** 2
        trial = SHORT_TRIAL if self.times.noise < QUIET and len(decode) >= ENOUGH else TRIAL
        costs = self._deciding / ways[now].seconds
        tried = self._worth_trying(ways, best, cov, unknown, trial, CHANGE + costs)
        if tried not in (best, now):
            taken, steps = tried, trial
        else:
            taken = best if paces[best] > paces[now] + GAIN else now
            chosen = ways[taken].rung, ways[taken].spared > 0.0
            apart = 2 * self._pause if chosen == self._chosen else EVERY
            steps = self._pause = min(max(apart, int(costs / DECIDING)), SELDOM)
            self._chosen = chosen
        self._expect(lasting, ways[taken], kept)
        self._take(ways[taken], self._windows(view, kept) if ways[taken].spared else None, steps)

    def _expect(self, lasting: Array, way: _Way, kept: Array) -> None:
        """Note how many drafts are accepted in a round, if it goes on in this way."""
        made = lasting[: self.rungs[way.rung]]
        at = (np.add.reduce(made * kept[: len(made)] if way.spared else made, axis=1) / lasting.shape[1]).tolist()
        mean = sum(at)
        self._expected = mean, sum(map(operator.mul, at, _ODD)) - mean**2

    def _ways(self, mean: Array, lasting: Array, gains: Array) -> tuple[list[_Way], Array]:
        """Every rung, by index; and every rung with those drafts alone that are worth their rows, which are [places, n] bool.
        `gains` [places, n] is what each draft adds to the logarithm of the pace; its row must not take that away from all."""
        part, seconds = self.times.part(mean), mean[:-1].tolist()
        paces = [gain - math.log(each) for gain, each in zip(self._by_rung(gains), seconds, strict=True)]
        ways = [_Way(rung, 0.0, *both) for rung, both in enumerate(zip(seconds, paces, strict=True))]
        possible = lasting > 0.0
        drafts = self._by_rung(possible)
        row = part * (seconds[-1] - seconds[0]) / max(drafts[-1], 1.0)
        if row <= 0.0 or gains.shape[1] < 2:
            return ways, possible
        kept: Array = gains > row / (self._limited_seconds or max(ways, key=_pace).seconds)
        for rung, (gain, left) in enumerate(zip(self._by_rung(gains * kept), self._by_rung(kept), strict=True)):
            if left < drafts[rung]:
                spared = 1.0 - left / drafts[rung]
                time = seconds[rung] - part * spared * (seconds[rung] - seconds[0])
                ways.append(_Way(rung, spared, time, gain - math.log(time) - LIMITS))
        self._limited_seconds = max(ways, key=_pace).seconds
        return ways, kept

    def _by_rung(self, by_place: Array) -> list[float]:
        """[rungs]: the sum over the slots [places, n] and the places of each rung."""
        sums = [0.0, *itertools.accumulate(np.add.reduce(by_place, axis=1).tolist())]
        return [sums[k] for k in self.rungs]

    def _worth_trying(self, ways: list[_Way], best: int, cov: Array, unknown: float, trial: int, costs: float) -> int:
        """The way that promises most by being tried, more than its trial costs, by index; the best one where there is none.
        `unknown` is the variance of the pace with more drafts than the best one has, `trial` the steps of a trial, `costs` those
        that it takes besides."""
        n, base, part = len(self.rungs), ways[0].seconds, self.times.part(self.times.mean[self._bucket])
        rows = []
        for way in ways:  # how the logarithm of its seconds grows with each of the beliefs
            row = [0.0] * (n + 1)
            row[way.rung] = (1.0 - part * way.spared) / way.seconds
            row[0] += part * way.spared / way.seconds
            row[n] = -way.spared * (ways[way.rung].seconds - base) / way.seconds
            rows.append(row)
        slopes = np.array(rows)
        slopes -= slopes[best]
        variances = np.add.reduce(slopes @ cov * slopes, axis=1).tolist()
        stay = min(max(min(self._stayed[self._bucket], self._stays), STAY[0]), STAY[1])
        doubt = self.times.doubt(trial - SETTLING) + self.times.unrest * EVERY
        found, most = best, WORTH if trial == SHORT_TRIAL else 0.0
        for i, (way, of_times) in enumerate(zip(ways, variances, strict=True)):
            variance = of_times + unknown * (way.rung > ways[best].rung)
            for rung, spread in (min(way.rung, 1), UNSEEN), (way.rung, UNSEEN_DEEP):
                variance += spread**2 * min(self._step - self._ran[rung], STAY[1])
            if i != best and variance > 0.0:
                ahead = way.pace - ways[best].pace
                worth = stay * hoped(ahead, variance**2 / (variance + doubt)) + trial * min(ahead, 0.0) - costs
                if worth > most:
                    found, most = i, worth
        return found

    def _windows(self, view: DraftView, kept: Array) -> Windows:
        """Those of the slots that decode, as long as they hold the same requests; the very same ones where none differs."""
        slots, decode = view.slots, view.decode
        rows = np.full(len(slots.epoch), self.rungs[-1] + 1, np.int32)
        rows[decode] = kept.sum(axis=0) + 1
        old = self.windows
        if old is not None and (old.rows[decode] == rows[decode]).all() and (old.epochs[decode] == slots.epoch[decode]).all():
            return old
        return Windows(rows, slots.epoch.copy())

    def _take(self, way: _Way, windows: Windows | None, steps: int) -> None:
        if way.rung != self._rung or windows is not self.windows:
            self._rung, self.windows, self._settled = way.rung, windows, 0
        self._spared, self._left = way.spared, steps

    def report(self) -> dict[str, Any]:
        """What was measured, for people and machines: milliseconds of a step by requests and drafts, and chances by place."""
        times, rows = {}, {}
        for place in self.times.known.nonzero()[0].tolist():
            size, seconds = str(self.times.buckets[place]), self.times.mean[place, : len(self.rungs)].tolist()
            steps = self.times.steps[place].tolist()
            times[size] = {str(k): round(1e3 * each, 4) for k, each, many in zip(self.rungs, seconds, steps, strict=True) if many}
            if self.times.limited_steps[place]:
                drafts = max(self.rungs[-1] * self.times.buckets[place], 1)
                rows[size] = round(1e3 * self.times.part(self.times.mean[place]) * (seconds[-1] - seconds[0]) / drafts, 5)
        chances = [round(chance, 3) for chance in self.acceptance.of_all()]
        return {"step_ms": times, "row_ms": rows, "acceptance": chances, "limited_steps": self._limited_steps}


def _pace(way: _Way) -> float:
    return way.pace
