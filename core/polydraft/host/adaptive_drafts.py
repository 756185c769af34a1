"""The draft policy behind `--draft-tokens auto:K`: as many drafts as give most tokens a second, from what is measured in the run.

Two things decide how many drafts pay: what a step costs with them, and how many of them the target accepts. Both are learned
while requests are served. A step that verifies k drafts and makes k new ones is timed from one plan to the next, by rung and by
bucket of decoding requests, as soon as the steps before it were of the same kind; acceptance is counted by request and by place
in the window, and forgotten slowly. Every `EVERY` steps, and where requests came or went, the policy takes the rung with the
most expected tokens a second. A rung whose time nobody knows is tried for a few steps where it might be the best one, and the
best of the others now and then, since times and texts change.

Requests are told apart: a draft whose chance, times those before it, is worth less than the row that verifies it is not verified
(`windows`). What a row costs is measured too, as the time that a step saves without some: where that is nothing, as in steps that
are bound by weights or replayed at full size, nobody is limited.

The goodput that is maximised is that of SmartSpec (Liu et al., 2024, arXiv:2406.14066); the measured times in place of a model of
the machine, and acceptance by request and place, are this module's. Nothing here touches the device, and no text depends on it.
"""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.host.draft_policy import DraftView, Windows, ladder
from polydraft.host.slots import SlotTable
from polydraft.step.graphs import default_buckets

EVERY = 16
"""Steps from one decision to the next: what a decision costs is then small beside what it is about."""
MANY = 16
"""Requests from which on a decision that changes nothing holds twice as long: it costs more then, and is seldom another."""
SETTLING = 2
"""Steps after a change that are not timed: their windows are those of before, and so are those in flight."""
TRIAL = 6
"""Steps for which a rung is tried, those that settle included."""
TRY_AGAIN, SELDOM = 64, 512
"""Steps after which the best of the other rungs is tried again: twice as many each time that nothing follows from it."""
ENOUGH = 16
"""Timed steps after which the time of a rung is trusted, and a change of it believed to be a change of all."""
GAIN = 0.02
"""By how much more tokens a second another rung must promise: no change is free."""
FIRST = 3
"""Drafts of the first steps at most, when nothing is known."""
SLOPE_FROM = 1
"""Drafts of the steps that are tried next, so that two points are known: they are seldom far from the best."""
DOUBT = 0.8
"""The part of its estimated time that a rung might take, for each doubling of the batch between it and what was measured."""
LEAST_AWAY = 0.35
"""Doublings that a rung of the very same bucket counts for."""
FORGET, FORGET_ALL = 0.95, 0.9995
"""What is left of a round's evidence after the next round: of its request, and of all requests."""
FORGET_IDLE = 0.99
"""What is left of a request's evidence about a place after a round that verified no draft there: in the end it is tried again."""
ROW_SHARE = 0.9
"""The part of what a draft costs that its row is hoped to cost, until that is measured."""
PRIOR, PRIOR_CHANCE = 4.0, 0.7
"""Rounds that what is known of all requests counts for in the estimate of one; and what is believed of all at first."""


class StepTimes:
    """Seconds of a step by bucket of decoding requests and by rung.

    Within a bucket the rung that runs is always up to date. What changes its time (longer texts, a slower clock, more requests of
    the bucket) changes the others', too, so they are moved along, until they are measured again."""

    def __init__(self, buckets: tuple[int, ...], rungs: tuple[int, ...]) -> None:
        self.buckets, self.rungs = buckets, rungs
        self.seconds = np.full((len(buckets), len(rungs)), np.nan)
        """[bucket, rung], NaN where nothing was measured."""
        self.row_seconds = np.full(len(buckets), np.nan)
        """[bucket]: what a row less saves, NaN where that was not measured."""
        self._steps = np.zeros((len(buckets), len(rungs)))
        """Behind each of them, as far as they count."""
        self._last: tuple[int, int, bool] | None = None
        self._estimates: dict[int, tuple[Array, Array]] = {}
        """What `estimate` has answered, by bucket, until a time changes beside the others."""

    def measured(self, bucket: int, rung: int, seconds: float, steps: int, spared: float = 0.0) -> None:
        """So many steps of this bucket and rung, both by index, took so long each; windows had `spared` rows less than all."""
        if spared:
            self._measured_less(bucket, rung, seconds, spared)
            return
        row, cell, known = self.seconds[bucket], (bucket, rung, False), self._steps[bucket, rung]
        if cell == self._last and known >= ENOUGH:
            self._move(bucket, seconds / float(row[rung]))
            return
        self._estimates.clear()
        known = known if cell == self._last else min(known, ENOUGH / 2)
        row[rung] = (row[rung] * known + seconds * steps) / (known + steps) if known else seconds
        self._steps[bucket, rung], self._last = known + steps, cell

    def _measured_less(self, bucket: int, rung: int, seconds: float, spared: float) -> None:
        """Beside the time of all rows, just before: what one row costs. While such steps run on: that all has become slower."""
        full, each, cell = self.seconds[bucket, rung], self.row_seconds[bucket], (bucket, rung, True)
        if np.isnan(full):
            return
        if cell == self._last and not np.isnan(each):
            self._move(bucket, seconds / max(float(full - spared * each), 0.1 * float(full)))
        else:
            found = max(full - seconds, 0.0) / spared
            self.row_seconds[bucket] = found if np.isnan(each) else (each + found) / 2.0
        self._last = cell

    def _move(self, bucket: int, factor: float) -> None:
        """All times of a bucket have become longer by this factor."""
        self.seconds[bucket] *= factor
        self.row_seconds[bucket] *= factor
        if bucket in self._estimates:
            seconds, sure = self._estimates[bucket]
            self._estimates[bucket] = seconds * factor, sure

    def estimate(self, bucket: int) -> tuple[Array, Array] | None:
        """[rungs] float64: seconds of a step by rung, measured or estimated; and the part of it that it might take instead, 1
        where it was measured. None where not even two rungs of one bucket are known, or nothing is of this one."""
        if bucket in self._estimates:
            return self._estimates[bucket]
        row, sure = self.seconds[bucket].copy(), np.ones(len(self.rungs))
        here = ~np.isnan(row)
        if here.all():
            return row, sure
        known = (~np.isnan(self.seconds)).sum(axis=1) > 1
        if not here.any() or not known.any():
            return None
        away = np.abs(np.log2(self.buckets) - np.log2(self.buckets[bucket]))
        nearest = int(np.argmin(np.where(known, away, np.inf)))
        rungs, other = np.array(self.rungs, np.float64), self.seconds[nearest]
        there = ~np.isnan(other)
        shape = _line(rungs, rungs[there], other[there])
        slower = np.interp(rungs, rungs[here], (row / shape)[here])
        row[~here], sure[~here] = (shape * slower)[~here], DOUBT ** max(float(away[nearest]), LEAST_AWAY)
        self._estimates[bucket] = row, sure
        return row, sure


def _line(x: Array, known_x: Array, known_y: Array) -> Array:
    """Linear interpolation, continued beyond the ends, and never below a tenth of the least value that is known."""
    y = np.interp(x, known_x, known_y)
    for end, inner, beyond in ((0, 1, x < known_x[0]), (-1, -2, x > known_x[-1])):
        slope = (known_y[end] - known_y[inner]) / (known_x[end] - known_x[inner])
        y = np.where(beyond, known_y[end] + slope * (x - known_x[end]), y)
    line: Array = np.maximum(y, 0.1 * known_y.min())
    return line


class Acceptance:
    """Chances that the draft at each place of a window is accepted, given that those before it were, by slot."""

    def __init__(self, limits: Limits) -> None:
        b, k = limits.max_seqs, limits.num_drafts
        self._places = np.arange(k, dtype=np.uint8)[:, None]
        self._back = np.arange(1, EVERY + 1)[:, None]
        self._epoch = np.full(b, -1, np.int64)
        self._seen = np.zeros(b, np.int64)
        self._accepted, self._tried = np.zeros((k, b)), np.zeros((k, b))
        self._all_accepted, self._all_tried = np.zeros(k), np.zeros(k)

    def look(self, slots: SlotTable, decode: Array) -> None:
        """Count the rounds of these slots since the last look, at most the `EVERY` newest."""
        rounds = slots.num_rounds[decode]
        new = decode[self._epoch[decode] != slots.epoch[decode]]
        self._epoch[new], self._accepted[:, new], self._tried[:, new], self._seen[new] = slots.epoch[new], 0.0, 0.0, 0
        at = rounds - self._back  # [EVERY, n], so that sums go along whole rows
        fresh = (at >= self._seen[decode]) & (at >= 0)
        place = np.where(fresh, decode * slots.rounds.shape[1] + at, 0)
        counted = np.empty((3, *at.shape), np.uint8)
        np.multiply(slots.rounds.reshape(-1).take(place), fresh, out=counted[0])
        np.multiply(slots.round_drafts.reshape(-1).take(place), fresh, out=counted[2])
        np.minimum(counted[0] + np.uint8(1), counted[2], out=counted[1])
        hits, tried, offered = (counted[:, None] > self._places[:, None]).sum(axis=2, dtype=np.uint8)
        count = fresh.sum(axis=0, dtype=np.uint8)
        left = _LEFT[offered] * _LEFT_IDLE[count - offered]
        self._accepted[:, decode] = self._accepted[:, decode] * left + hits
        self._tried[:, decode] = self._tried[:, decode] * left + tried
        left_of_all = FORGET_ALL ** int(count.sum())
        self._all_accepted = self._all_accepted * left_of_all + hits.sum(axis=1)
        self._all_tried = self._all_tried * left_of_all + tried.sum(axis=1)
        self._seen[decode] = rounds

    def of_all(self) -> Array:
        """[places] float64: the chances over all requests; a place that nobody has tried is taken to be like the one before."""
        chances, before = np.empty(len(self._places)), PRIOR_CHANCE
        for place, (accepted, tried) in enumerate(zip(self._all_accepted.tolist(), self._all_tried.tolist(), strict=True)):
            before = (accepted + before) / (tried + 1.0)
            chances[place] = before
        return chances

    def of(self, decode: Array) -> Array:
        """[places, len(decode)] float64: the chances of each of these slots. A request that does worse than the others at one
        place is believed to do as much worse at the next, until it is tried there."""
        inverse = 1.0 / (self._tried[:, decode] + PRIOR)
        shown, open_ = self._accepted[:, decode] * inverse, PRIOR * inverse
        chances, ratio = np.empty(shown.shape), np.ones(len(decode))
        for place, chance in enumerate(self.of_all().tolist()):
            believed = np.minimum(chance * ratio, 1.0)
            np.add(shown[place], open_[place] * believed, out=chances[place])
            ratio = chances[place] / max(chance, 1e-6)
        return chances

    def lasting(self, decode: Array, windows: Array) -> Array:
        """[places, len(decode)] float64: the chance that the draft at a place and all before it are accepted, 0 behind the rows
        (`windows` [len(decode)]) that each request allows."""
        chances: Array = np.where(self._places < windows - 1, self.of(decode), 0.0).cumprod(axis=0)
        return chances


_LEFT, _LEFT_IDLE = (left ** np.arange(EVERY + 1) for left in (FORGET, FORGET_IDLE))
"""By number of rounds."""


def summed(by_place: Array, rungs: tuple[int, ...]) -> Array:
    """[rungs] float64: the sum over all slots [places, n] and the places of each rung."""
    sums: Array = np.concatenate(([0.0], by_place.sum(axis=1).cumsum()))[list(rungs)]
    return sums


class AdaptiveDrafts:
    """The policy: see the module. `rungs` are those of the ladder. Deterministic, but for its clock."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rungs = ladder(limits.num_drafts)
        self.times = StepTimes(default_buckets(limits.max_seqs), self.rungs)
        self.acceptance = Acceptance(limits)
        self._clock = clock
        self._rung = bisect.bisect_right(self.rungs, FIRST) - 1
        """The number that is chosen, as an index of `rungs`, like all below."""
        self._bucket, self._bounds = 0, (0, 0)
        self._settled, self._left = 0, 0
        self._patience, self._until_try = TRY_AGAIN, TRY_AGAIN
        self._best = self._rung
        self._before = 0.0
        self._samples: list[float] = []
        self.windows: Windows | None = None
        """What requests verify at most, as `DraftPolicy` says."""
        self._rate = 0.0
        """Tokens a second of each request, as the last decision expected them."""
        self._spared, self._limited_steps, self._again = 0, 0, False
        """Rows a step that nobody verifies because of them; steps with some; and whether it is their turn to be tried again."""

    def choose(self, view: DraftView) -> int:
        """The rung that was decided on, and now and then another decision. The time since the last call is that of a step, if the
        last ones were like it."""
        now, count = self._clock(), len(view.decode)
        if not count or view.has_prefill:
            self._settled = 0
            return self.rungs[self._rung]
        if self._settled > SETTLING:
            self._samples.append(now - self._before)
        self._settled, self._before = self._settled + 1, now
        self._left -= 1
        self._limited_steps += self._spared > 0
        if not self._bounds[0] < count <= self._bounds[1]:
            self._enter(bisect.bisect_left(self.times.buckets, count))
        if self._left <= 0:
            self._decide(view)
            self._spared = 0 if self.windows is None else self._rows_less(view, self.windows)
        return self.rungs[self._rung]

    def _enter(self, bucket: int) -> None:
        """Another number of requests decodes: steps are timed anew, and decided on at once."""
        self._file()
        self._bucket, self._settled, self._left, self._rate = bucket, 0, 0, 0.0
        self._bounds = self.times.buckets[bucket - 1] if bucket else 0, self.times.buckets[bucket]

    def _file(self) -> None:
        """File the times since the last change; those of interrupted steps do not count."""
        if self._samples:
            seconds = statistics.median(self._samples)
            self.times.measured(self._bucket, self._rung, seconds, len(self._samples), self._spared)
            self._samples.clear()

    def _decide(self, view: DraftView) -> None:
        self._file()
        self.acceptance.look(view.slots, view.decode)
        estimate = self.times.estimate(self._bucket)
        if estimate is None:
            known = not np.isnan(self.times.seconds[self._bucket, self._rung])
            self._take(self.rungs.index(SLOPE_FROM) if known and len(self.rungs) > 1 else self._rung, TRIAL)
            return
        seconds, sure = estimate
        lasting = self.acceptance.lasting(view.decode, view.slots.window[view.decode])
        whole = (len(view.decode) + summed(lasting, self.rungs)) / seconds
        kept, limited = self._limited(lasting, seconds, whole)
        row_known = not np.isnan(self.times.row_seconds[self._bucket])
        limited = np.where(sure < 1.0, whole, limited)
        rates = np.maximum(whole, limited) if row_known else whole
        best, hopes = int(rates.argmax()), np.where(sure < 1.0, rates / sure, 0.0)
        if best != self._best:
            self._best, self._patience, self._until_try = best, TRY_AGAIN, TRY_AGAIN
        if hopes.max() > rates[best]:
            self._take(int(hopes.argmax()), TRIAL)
        elif not row_known and limited[tried := int(limited.argmax())] > rates[best] * (1.0 + GAIN):
            self._take(tried, TRIAL, self._windows(view, kept))
        elif self._until_try <= 0 and len(self.rungs) > 1:
            self._patience = self._until_try = min(2 * self._patience, SELDOM)
            self._again = not self._again and row_known
            others = np.where(np.arange(len(rates)) == best, -1.0, rates)
            if self._again and not self._spared:
                self.times.row_seconds[self._bucket] = np.nan  # the next decision tries windows, if they might pay
            self._take(self._rung if self._again else int(others.argmax()), TRIAL)
        else:
            rung = best if rates[best] > rates[self._rung] * (1.0 + GAIN) else self._rung
            pays = row_known and limited[rung] > whole[rung] * (1.0 if self._spared else 1.0 + GAIN)
            windows = self._windows(view, kept) if pays else None
            steps = EVERY if rung != self._rung or windows is not self.windows or len(view.decode) < MANY else 2 * EVERY
            self._take(rung, steps, windows)
            self._until_try -= steps

    def _limited(self, lasting: Array, seconds: Array, whole: Array) -> tuple[Array, Array]:
        """[places, n] bool: the drafts of each request that are worth their rows; and [rungs] float64: tokens a second of a step
        that verifies those alone. A row is worth the tokens that its time brings elsewhere."""
        count, most = lasting.shape[1], self.rungs[-1]
        draft = max(float(seconds[-1] - seconds[0]), 0.0) / max(most * count, 1)  # a row, and its share of the draft's pass
        measured = self.times.row_seconds[self._bucket]
        row = min(ROW_SHARE * draft if np.isnan(measured) else float(measured), draft)
        if row <= 0.0 or count < 2:
            return lasting > 0.0, whole
        kept = lasting > max(float(whole.max()), self._rate * count) * row
        spared = summed((lasting > 0.0) ^ kept, self.rungs)
        rates = (count + summed(lasting * kept, self.rungs)) / np.maximum(seconds - row * spared, 0.1 * seconds)
        self._rate = float(rates.max()) / count
        return kept, rates

    def _windows(self, view: DraftView, kept: Array) -> Windows:
        """Those of the slots that decode, as long as they hold the same requests; the very same ones where none differs."""
        slots, decode = view.slots, view.decode
        rows = np.full(len(slots.epoch), self.rungs[-1] + 1, np.int32)
        rows[decode] = kept.sum(axis=0) + 1
        old = self.windows
        if old is not None and (old.rows[decode] == rows[decode]).all() and (old.epochs[decode] == slots.epoch[decode]).all():
            return old
        return Windows(rows, slots.epoch.copy())

    def _rows_less(self, view: DraftView, windows: Windows) -> int:
        """Rows of a step that nobody verifies."""
        rows = np.minimum(view.slots.window[view.decode], self.rungs[self._rung] + 1)
        return int((rows - windows.limit(rows, view.slots, view.decode)).sum())

    def _take(self, rung: int, steps: int, windows: Windows | None = None) -> None:
        if rung != self._rung or windows is not self.windows:
            self._rung, self.windows, self._settled = rung, windows, 0
        self._left = steps

    def report(self) -> dict[str, Any]:
        """What was measured, for people and machines: milliseconds of a step by requests and drafts, and chances by place."""
        times = {
            str(size): {str(k): round(1e3 * s, 4) for k, s in zip(self.rungs, row.tolist(), strict=True) if not math.isnan(s)}
            for size, row in zip(self.times.buckets, self.times.seconds, strict=True)
            if not np.isnan(row).all()
        }
        rows = {
            str(size): round(1e3 * each, 5)
            for size, each in zip(self.times.buckets, self.times.row_seconds.tolist(), strict=True)
            if not math.isnan(each)
        }
        chances = [round(chance, 3) for chance in self.acceptance.of_all().tolist()]
        return {"step_ms": times, "row_ms": rows, "acceptance": chances, "limited_steps": self._limited_steps}
