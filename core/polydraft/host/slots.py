"""The host's view of every slot: arrays that match the applied snapshots, and what is planned or in flight.

The scheduler reads and advances it when it plans, commit when it applies an outcome; both work on whole arrays, and only joining,
leaving and finishing walk requests. All it knows of the device comes from the last applied snapshot.
"""

from __future__ import annotations

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.host.request import Request, Status
from polydraft.program.packed import PackedLogprobs
from polydraft.sentinels import NO_TOKEN, Phase


class SlotTable:
    """Per-slot arrays, indexed by slot [B].

    Applied (from snapshots): `num_known`, `kv_len`, `num_rounds`, `tokens` [B, L + W] (windows are written whole), and by round
    [B, L] `rounds` (drafts accepted), `round_drafts` (drafts verified) and `round_lookups` (those, the last ones, that were
    looked up beside a model's).
    Requested: `num_top`, `prompt_top`: most likely tokens reported beside each, -1 for no log probabilities.
    `window`: rows of a round at most, the drafts that the request lets be verified and one.
    Planned: `phase` (PREFILL until its last chunk is planned), `prefill_planned` rows.
    In flight: `in_flight` steps that hold the slot, `in_flight_decode` those that run a window, `in_flight_tokens` those that
    emit at least one token unless paused, `in_flight_rows` what windows may add to the text; `in_flight_counts` [4, B] is all
    four. `draining`: not scheduled any more, released once nothing is in flight. `bound`: a constraint binds the output; `held`:
    not scheduled until its masks are there.
    For output: `reported`, `reported_rounds` (tokens and rounds already reported), and why more is reported before the end:
    `streaming`, `watched` (a stop string may end it), `fresh` (no token yet). `reports`: log probabilities of finished steps,
    until results are made of them.
    """

    def __init__(self, limits: Limits) -> None:
        b, self._num_drafts = limits.max_seqs, limits.num_drafts
        self.request: list[Request | None] = [None] * b
        self._occupants: tuple[Request | None, ...] | None = None
        self.reports: list[PackedLogprobs] = []
        self.phase = np.full(b, Phase.IDLE, np.int32)
        self.epoch = np.zeros(b, np.int32)
        self.number = np.zeros(b, np.int64)
        self.prompt_len = np.zeros(b, np.int64)
        self.num_known = np.zeros(b, np.int64)
        self.kv_len = np.zeros(b, np.int64)
        self.prefill_len = np.zeros(b, np.int64)
        self.prefill_planned = np.zeros(b, np.int64)
        self.max_total = np.zeros(b, np.int64)
        self.window = np.full(b, limits.window, np.int32)
        self.sampling = np.zeros(b, bool)
        self.processed = np.zeros(b, bool)
        self.draining = np.zeros(b, bool)
        self.bound = np.zeros(b, bool)
        self.held = np.zeros(b, bool)
        self.reported = np.zeros(b, np.int64)
        self.reported_rounds = np.zeros(b, np.int64)
        self.streaming = np.zeros(b, bool)
        self.watched = np.zeros(b, bool)
        self.fresh = np.zeros(b, bool)
        self.in_flight_counts = np.zeros((4, b), np.int64)
        self.in_flight, self.in_flight_decode, self.in_flight_tokens, self.in_flight_rows = self.in_flight_counts
        self.tokens = np.full((b, limits.max_len + limits.window), NO_TOKEN, np.int32)
        self.rounds = np.zeros((b, limits.max_len), np.uint8)
        self.round_drafts = np.zeros((b, limits.max_len), np.uint8)
        self.round_lookups = np.zeros((b, limits.max_len), np.uint8)
        self.num_rounds = np.zeros(b, np.int64)
        self.num_top = np.full(b, -1, np.int32)
        self.prompt_top = np.full(b, -1, np.int32)

    def free_slot(self) -> int | None:
        """The lowest idle slot."""
        idle = np.flatnonzero(self.phase == Phase.IDLE)
        return int(idle[0]) if idle.size else None

    def occupants(self) -> tuple[Request | None, ...]:
        """The request in each slot now; the very same record until one comes or goes."""
        if self._occupants is None:
            self._occupants = tuple(self.request)
        return self._occupants

    def occupy(self, slot: int, request: Request, *, known: Array, prefill_len: int, num_cached: int) -> None:
        """Place a request: its known tokens become the slot's, of which the rows of the first `num_cached` exist already; the
        slot's epoch moves on."""
        request.slot, request.status = slot, Status.RUNNING
        self.request[slot], self._occupants = request, None
        self.epoch[slot] += 1
        self.number[slot] = request.number
        self.phase[slot] = Phase.PREFILL
        self.prompt_len[slot] = len(request.prompt_ids)
        self.num_known[slot] = len(known)
        self.prefill_len[slot] = prefill_len
        self.kv_len[slot] = self.prefill_planned[slot] = num_cached
        self.max_total[slot] = request.max_total
        self.window[slot] = self._most_rows(request.params.max_drafts)
        self.sampling[slot] = request.params.temperature > 0
        self.processed[slot] = request.processed
        self.reported[slot], self.reported_rounds[slot] = request.reported
        self.streaming[slot], self.watched[slot] = request.stream, bool(request.params.stop)
        self.fresh[slot] = request.first_token_s is None
        self.tokens[slot, : len(known)] = known
        self.rounds[slot, : len(request.rounds)] = request.rounds
        self.round_drafts[slot, : len(request.rounds)] = request.round_drafts
        self.round_lookups[slot, : len(request.rounds)] = request.round_lookups
        self.num_rounds[slot] = len(request.rounds)
        self.num_top[slot] = _num_requested(request.params.logprobs)
        self.prompt_top[slot] = _num_requested(request.params.prompt_logprobs)
        self.in_flight_counts[:, slot] = 0
        self.draining[slot] = False
        self.bound[slot] = request.binding is not None
        self.held[slot] = request.binding is not None and request.begun  # until the masks behind what it had are there

    def _most_rows(self, max_drafts: int | None) -> int:
        return self._num_drafts + 1 if max_drafts is None else min(max_drafts, self._num_drafts) + 1

    def sync(self, request: Request) -> None:
        """Copy what a running request has produced so far out of its slot."""
        slot = request.slot
        request.token_ids = self.tokens[slot, self.prompt_len[slot] : self.num_known[slot]].tolist()
        request.rounds = self.rounds[slot, : self.num_rounds[slot]].tolist()
        request.round_drafts = self.round_drafts[slot, : self.num_rounds[slot]].tolist()
        request.round_lookups = self.round_lookups[slot, : self.num_rounds[slot]].tolist()
        request.drafted = sum(request.round_drafts)
        request.reported = int(self.reported[slot]), int(self.reported_rounds[slot])

    def vacate(self, slot: int) -> None:
        """Make the slot idle. Nothing may be in flight for it."""
        assert self.in_flight[slot] == 0, "a slot was released while a step that holds it is in flight"
        self.request[slot] = self._occupants = None
        self.phase[slot] = Phase.IDLE
        self.draining[slot] = self.bound[slot] = self.held[slot] = self.streaming[slot] = self.watched[slot] = self.fresh[
            slot
        ] = False
        self.num_top[slot] = self.prompt_top[slot] = -1


def _num_requested(count: int | None) -> int:
    return -1 if count is None else count
