"""Checks that what a proposer keeps (its keys and values, the state that it feeds back) is what the committed tokens make of it.

No text shows whether it is: wrong rows make worse drafts, and drafts change no text. So now and then a request is preempted: it
keeps its tokens, all rows are computed anew from them, without blocks of the prefix cache, and it goes on. What it drafts behind
these rows must be what it had drafted behind the old ones; and where arithmetic does not depend on how rows are batched, the
state that the proposer feeds back, which all its rows have gone into, must have the same bits. That costs a prefill, and the
request waits meanwhile.

Drafts and state are copied up in every step, behind the results that the host waits for, and read one step late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from polydraft.device import Array
from polydraft.host.differences import Differences
from polydraft.host.request import Request, Status
from polydraft.host.scheduler import Scheduler
from polydraft.host.slots import SlotTable
from polydraft.program.plan import Drafted, StepOutcome, StepPlan


@dataclass
class _Check:
    """A request that is checked, how many tokens it has, and the step and slot whose drafts are to be read next."""

    request: Request
    known: int
    plan: StepPlan
    slot: int
    before: Drafted | None = None
    """What was drafted behind the old rows, once it was read."""
    computed: bool = False
    """Whether the step has computed its rows anew."""


class DraftStateCheck:
    """Checks so many of the rounds (`share`, 0 to 1) of an engine, at most one request at a time.

    `drafted(plan, slot)`: what the step before the one that was collected last has drafted. `tell` gets a sentence when that
    differs, more often than rounding explains unless arithmetic is `exact`."""

    def __init__(
        self, share: float, scheduler: Scheduler, slots: SlotTable, drafted: Callable[[StepPlan, int], Drafted],
        tell: Callable[[str], None], *, exact: bool,
    ) -> None:  # fmt: skip
        self.compared = Differences(exact=exact)
        self._share, self._scheduler, self._slots, self._drafted, self._tell = share, scheduler, slots, drafted, tell
        self._due, self._turn = 0.0, 0
        self._check: _Check | None = None

    def step(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """A step was applied."""
        self._due = min(self._due + self._share * int(np.count_nonzero(plan.decode)), 1.0)
        if self._check is not None:
            self._go_on(self._check, plan)
        if self._check is None and self._due >= 1.0 and plan.num_made:
            self._begin(plan, outcome.drafted >= 0)

    def forget(self) -> None:
        """Weights change, or steps are void: what was drafted before cannot be compared with what is drafted after."""
        self._check = None

    def _begin(self, plan: StepPlan, had_round: Array) -> None:
        """Preempt one of the requests for which the step has drafted, another one each time. `had_round` [n] bool, by sequence:
        the device pauses those that lack blocks, and what lies behind their passes is of another step, or of nothing."""
        t, slots = self._slots, plan.slots[plan.decode & had_round]
        fit = slots[~t.draining[slots] & ~t.bound[slots] & (t.num_known[slots] + 1 < t.max_total[slots]) & (t.window[slots] > 1)]
        if not fit.size:
            return
        slot = int(fit[self._turn % fit.size])
        request = t.request[slot]
        assert request is not None, "a live slot has a request"
        self._turn, self._due = self._turn + 1, 0.0
        self._scheduler.preempt(slot, recompute=True)
        self._check = _Check(request, int(t.num_known[slot]), plan, slot)

    def _go_on(self, check: _Check, plan: StepPlan) -> None:
        if check.before is None:
            check.before = self._drafted(check.plan, check.slot)
        if check.request.status is Status.FINISHED:
            self._check = None
        elif check.computed:
            self._compare(check.before, self._drafted(check.plan, check.slot))
            self._check = None
        elif check.request.status is Status.RUNNING and not self._slots.draining[check.request.slot]:
            self._look_for_rows(check, plan)

    def _look_for_rows(self, check: _Check, plan: StepPlan) -> None:
        """Whether this step has computed the last of the rows."""
        t, slot = self._slots, check.request.slot
        if int(t.num_known[slot]) != check.known:
            self._check = None  # it was preempted once more behind them
        elif t.kv_len[slot] == check.known - 1 and slot in plan.slots[~plan.decode]:
            check.plan, check.slot, check.computed = plan, slot, True

    def _compare(self, before: Drafted, after: Drafted) -> None:
        both = min(len(before.drafts), len(after.drafts))
        if not both:
            return  # one of the two steps made no drafts
        old, new = before.drafts[:both].tolist(), after.drafts[:both].tolist()
        states = self.compared.exact and len(before.drafts) == len(after.drafts) and before.state and after.state
        differs = old != new or bool(states and before.state != after.state)
        if self.compared.count(differs):
            where = ", from another state" if old == new else ""
            self._tell(
                f"drafts were {old}, and {new} behind rows that were computed anew from the same tokens{where} "
                f"({self.compared}), wanted the same: the proposer's rows are not those of the text; drop the prefix cache "
                "(update_weights does), and run polydraft conform on this backend"
            )
