"""Owns the way back: an outcome folded into the slot table and the requests it ended.

The engine applies outcomes in step order; whole arrays are updated at once and only requests that end are walked. It never
releases a slot itself: that happens in the scheduler once nothing is in flight for it.
"""

from __future__ import annotations

import numpy as np

from polydraft.runtime.plan import StepOutcome, StepPlan
from polydraft.runtime.request import Request, Status
from polydraft.runtime.slots import SlotTable
from polydraft.sentinels import Finish, Phase

REASONS = {finish: finish.name.lower() for finish in Finish}
NAN_ERROR = "the model produced NaN logits for this request; its text ends before them (check the checkpoint and dtype)"


def apply(slots: SlotTable, plan: StepPlan, outcome: StepOutcome) -> list[Request]:
    """Fold one outcome in; returns the requests that ended. Sequences whose request left meanwhile are only counted down."""
    t, ids = slots, outcome.slots
    t.in_flight[ids] -= 1
    t.in_flight_decode[ids] -= plan.decode
    t.in_flight_tokens[ids] -= plan.emits
    live = (t.epoch[ids] == outcome.epochs) & ~t.leaving[ids]
    if not live.all():
        keep = np.flatnonzero(live)
        return _fold(t, ids[keep], outcome, keep)
    return _fold(t, ids, outcome, slice(None))


def _fold(t: SlotTable, ids: np.ndarray, outcome: StepOutcome, keep: np.ndarray | slice) -> list[Request]:  # type: ignore[type-arg]
    num_tokens, tokens = outcome.num_tokens[keep], outcome.tokens[keep]
    known = t.num_known[ids]
    for place in range(int(num_tokens.max(initial=0))):
        some = num_tokens > place
        t.tokens[ids[some], known[some] + place] = tokens[some, place]
    t.num_known[ids] = known + num_tokens
    t.kv_len[ids] = outcome.kv_len[keep]
    rounds = outcome.drafted[keep] >= 0
    with_round = ids[rounds]
    t.rounds[with_round, t.num_rounds[with_round]] = outcome.accepted[keep][rounds]
    t.num_rounds[with_round] += 1
    t.drafted[with_round] += outcome.drafted[keep][rounds]
    finish = outcome.finish[keep]
    return [
        end(t, slot, REASONS[Finish(reason)])
        for slot, reason in zip(ids[finish > 0].tolist(), finish[finish > 0].tolist(), strict=True)
    ]


def end(t: SlotTable, slot: int, reason: str) -> Request:
    """Finish the request in a slot with what it has; the slot leaves once nothing is in flight for it."""
    request = t.request[slot]
    assert request is not None, "a finishing slot has a request"
    t.sync(request)
    request.status, request.finish_reason = Status.FINISHED, reason
    if reason == "error":
        request.error = NAN_ERROR
    t.phase[slot] = Phase.FINISHED
    t.leaving[slot] = True
    return request
