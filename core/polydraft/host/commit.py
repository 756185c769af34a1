"""Folds an outcome into the slot table, and ends the requests that finished with it.

The engine applies outcomes in step order; whole arrays are updated at once and only requests that end are walked. Slots are not
released here: the scheduler does that once nothing is in flight for them.
"""

from __future__ import annotations

import numpy as np

from polydraft.host.kv_blocks import BlockLedger
from polydraft.host.request import Request, Status
from polydraft.host.slots import SlotTable
from polydraft.host.totals import EngineTotals
from polydraft.program.plan import StepOutcome, StepPlan
from polydraft.sentinels import Finish, Phase

_PAUSED = int(Phase.PAUSED)
REASONS = {finish: finish.name.lower() for finish in Finish}
_PLACES = np.arange(256)
"""Places of a window; rounds are kept as bytes, so there are never more."""
NAN_ERROR = "the model produced NaN logits for this request; its text ends before them (check the checkpoint and dtype)"
NOTHING_LEFT = (
    "no token was left to choose: the constraint, with bad_words and logit_bias, forbids them all here (or the model produced "
    "NaN logits); forbid fewer"
)


def apply(
    slots: SlotTable, ledger: BlockLedger, plan: StepPlan, outcome: StepOutcome, totals: EngineTotals | None = None
) -> list[Request]:
    """Fold one outcome in and count it; returns the requests that ended. Sequences whose request left meanwhile are only counted
    down."""
    assert outcome.step_id == plan.step_id, "an outcome is folded in with the plan of its own step"
    t, ids = slots, outcome.slots
    t.in_flight_counts -= plan.in_flight_counts
    if totals is not None:
        totals.drafts_per_step[plan.num_made] += 1
    live = (t.epoch[ids] == outcome.epochs) & ~t.draining[ids]
    every = np.count_nonzero(live) == len(live)  # in a quarter of the time that `all` takes, or `any`
    if outcome.logprobs is not None:
        outcome.logprobs.belong(outcome.num_tokens, None if every else live, t.occupants())
        t.reports.append(outcome.logprobs)
    return _fold(t, ledger, outcome if every else outcome.of(live), totals)


def _fold(t: SlotTable, ledger: BlockLedger, outcome: StepOutcome, totals: EngineTotals | None) -> list[Request]:
    ids, num_tokens, drafted, kv_len = outcome.slots, outcome.num_tokens, outcome.drafted, outcome.kv_len
    known = t.num_known[ids]
    # Whole windows, not only the new tokens: nothing reads beyond the known tokens, and there is room for one more.
    t.tokens[ids[:, None], known[:, None] + _PLACES[: outcome.tokens.shape[1]]] = outcome.tokens
    t.num_known[ids], t.kv_len[ids] = known + num_tokens, kv_len

    rounds, with_round, accepted, looked_up = drafted >= 0, ids, outcome.accepted, outcome.looked_up
    if np.count_nonzero(rounds) < len(rounds):
        if totals is not None:
            totals.paused += int((outcome.phase == _PAUSED).sum())
        with_round, accepted, drafted = ids[rounds], accepted[rounds], drafted[rounds]
        looked_up = None if looked_up is None else looked_up[rounds]
    number = t.num_rounds[with_round]
    t.rounds[with_round, number], t.round_drafts[with_round, number] = accepted, drafted
    if looked_up is not None:
        t.round_lookups[with_round, number] = looked_up
    t.num_rounds[with_round] = number + 1
    if totals is not None:
        totals.add(int(num_tokens.sum()), accepted, drafted)

    finish = outcome.finish
    if not np.count_nonzero(finish):
        ledger.remember(ids, t.tokens, kv_len)
        return []
    goes_on, ends = finish == 0, finish.nonzero()[0]  # of a request that ended, the draft has not seen the last window
    ledger.remember(ids[goes_on], t.tokens, kv_len[goes_on])
    return [_ended(t, slot, Finish(reason)) for slot, reason in zip(ids[ends].tolist(), finish[ends].tolist(), strict=True)]


def _ended(t: SlotTable, slot: int, finish: Finish) -> Request:
    """A request that the device has ended."""
    request = end(t, slot, REASONS[finish])
    if finish is Finish.ERROR and request.binding is not None:
        request.finish_reason, request.error = "refused", NOTHING_LEFT
    return request


def end(t: SlotTable, slot: int, reason: str) -> Request:
    """Finish the request in a slot with what it has; the slot leaves once nothing is in flight for it."""
    request = t.request[slot]
    assert request is not None, "a finishing slot has a request"
    t.sync(request)
    request.status, request.finish_reason = Status.FINISHED, reason
    if reason == "error":
        request.error = NAN_ERROR
    t.phase[slot] = Phase.FINISHED
    t.draining[slot] = True
    return request
