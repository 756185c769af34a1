"""Owns who runs in the next step: admission, prefill chunks, block grants, pausing and preemption.

The engine calls `plan` once a step and gets a frozen `StepPlan`; everything is decided from applied snapshots and upper
bounds, so a plan never waits for the device. It never touches a buffer.

Fairness, stated: first come, first served. Decoding slots come before prefill, older requests get blocks first, a waiting
request is never overtaken, and when blocks run out the youngest running request is preempted, keeps its tokens and returns
to the head of the queue.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from polydraft.backend import RowOrder
from polydraft.contracts.base import Limits
from polydraft.contracts.layout import SLOT_UPDATE_STOP_TOKENS, SlotUpdate
from polydraft.device import Array
from polydraft.runtime.kv_blocks import BlockLedger
from polydraft.runtime.plan import StepPlan
from polydraft.runtime.request import Request, Status
from polydraft.runtime.slots import SlotTable
from polydraft.sentinels import NO_TOKEN, Phase

_NO_SLOTS: Array = np.empty(0, np.int32)
_NO_TRIPLES: Array = np.empty((0, 3), np.int32)


class Scheduler:
    """Plans steps over a slot table and a block ledger. `waiting` is the queue, oldest first."""

    def __init__(self, limits: Limits, slots: SlotTable, ledger: BlockLedger, row_order: RowOrder = "slot") -> None:
        self.limits, self.slots, self.ledger, self.row_order = limits, slots, ledger, row_order
        self.waiting: deque[Request] = deque()
        self.num_preemptions = 0
        self._step_id = 0
        self._last: StepPlan | None = None
        self._shuffle = np.random.default_rng(0)
        self._no_slot_updates = np.empty((0, SLOT_UPDATE_STOP_TOKENS + limits.max_stop_tokens), np.int32)

    # -- the plan ----------------------------------------------------------------------------------
    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing that could run now."""
        self.release_drained()
        decode = self._decoding()
        blocks = self._grant_windows(decode)
        decode = decode[~self.slots.leaving[decode]]
        chunks, slot_updates, grants = self._plan_prefill(self.limits.max_rows - len(decode) * self.limits.window)
        if not len(decode) and not chunks:
            return None
        plan = self._assemble(decode, chunks, slot_updates, [blocks, *grants])
        self._advance(plan)
        return plan

    def _decoding(self) -> Array:
        """Decoding slots, oldest request first, without those that the steps in flight end by length."""
        t = self.slots
        running = (t.phase == Phase.DECODE) & ~t.leaving & (t.num_known + t.in_flight_tokens < t.max_total)
        slots = np.flatnonzero(running)
        return slots[np.argsort(t.number[slots], kind="stable")] if len(slots) > 1 else slots

    def _grant_windows(self, decode: Array) -> Array:
        """Grant what the next window and its drafts may need; when blocks run short, oldest first, and preempt if stuck."""
        if not len(decode):
            return _NO_TRIPLES
        t, limits = self.slots, self.limits
        base = np.maximum(t.kv_len[decode], t.prefill_planned[decode])
        ahead = (t.in_flight_decode[decode] + 1) * limits.window + 2 * limits.num_drafts
        lacking = self.ledger.lacking(decode, np.minimum(base + ahead, t.max_total[decode]))
        if lacking.sum() > self.ledger.num_free:
            lacking = np.where(np.cumsum(lacking) <= self.ledger.num_free, lacking, 0)
            self._preempt_if_stuck(decode, lacking)
        some = lacking > 0
        return self.ledger.grant(decode[some], lacking[some])

    def _preempt_if_stuck(self, decode: Array, granted: Array) -> None:
        """A slot is stuck when, with nothing in flight, its very next window has no blocks: the youngest request must go."""
        t, limits = self.slots, self.limits
        need = np.minimum(t.kv_len[decode] + 1 + 2 * limits.num_drafts, t.max_total[decode])
        have = (self.ledger.num_granted[decode] + granted) * limits.block_size
        stuck = (need > have) & (t.in_flight[decode] == 0)
        if not stuck.any() or (t.leaving & (t.in_flight > 0)).any():
            return
        running = np.flatnonzero(((t.phase == Phase.DECODE) | (t.phase == Phase.PREFILL)) & ~t.leaving)
        victim = int(running[np.argmax(t.number[running])])
        t.leaving[victim] = True
        self.num_preemptions += 1
        request = t.request[victim]
        assert request is not None, "a running slot has a request"
        request.num_preemptions += 1

    def _plan_prefill(self, budget: int) -> tuple[list[tuple[int, int]], list[Array], list[Array]]:
        """(slot, chunk) of running and newly admitted prefills, slot updates and block grants of the admitted."""
        t = self.slots
        chunks: list[tuple[int, int]] = []
        updates: list[Array] = []
        grants: list[Array] = []
        running = np.flatnonzero((t.phase == Phase.PREFILL) & ~t.leaving)
        for slot in running[np.argsort(t.number[running])].tolist():
            if budget <= 0:
                return chunks, updates, grants
            budget -= self._take_chunk(slot, budget, chunks)
        while self.waiting and budget > 0 and not t.leaving.any():
            slot_or_none = t.free_slot()
            if slot_or_none is None or not self._fits(self.waiting[0]):
                break
            request = self.waiting.popleft()
            t.occupy(slot_or_none, request)
            slot = np.array([slot_or_none])
            grants.append(self.ledger.grant(slot, self.ledger.lacking(slot, np.array([self._admission_need(request)]))))
            updates.append(self._slot_update(request))
            budget -= self._take_chunk(slot_or_none, budget, chunks)
        return chunks, updates, grants

    def _admission_need(self, request: Request) -> int:
        """Tokens whose blocks a request is granted when it is admitted: all of its prefill and the first window."""
        return min(request.num_known + self.limits.window + 2 * self.limits.num_drafts, request.max_total)

    def _fits(self, request: Request) -> bool:
        return int(self.ledger.blocks_for(self._admission_need(request))) <= self.ledger.num_free

    def _take_chunk(self, slot: int, budget: int, chunks: list[tuple[int, int]]) -> int:
        chunk = min(budget, int(self.slots.prefill_len[slot] - self.slots.prefill_planned[slot]))
        chunks.append((slot, chunk))
        return chunk

    # -- assembling --------------------------------------------------------------------------------
    def _assemble(self, decode: Array, chunks: list[tuple[int, int]], slot_updates: list[Array], grants: list[Array]) -> StepPlan:
        t, limits, last = self.slots, self.limits, self._last
        decode = np.sort(decode).astype(np.int32)
        self._step_id += 1
        blocks = np.concatenate(grants) if len(grants) > 1 else grants[0]
        if not chunks and last is not None and not last.has_prefill and np.array_equal(last.slots, decode):
            # The steady state: the very same arrays again, so that staging need not send them.
            slots, rows, runs_window, emits = last.slots, last.rows, last.decode, last.emits
            epochs = last.epochs
        else:
            slots, rows = self._launch_order(decode, chunks)
            epochs = t.epoch[slots]
            runs_window = t.phase[slots] == Phase.DECODE
            emits = runs_window | (t.prefill_planned[slots] + rows == t.num_known[slots])
        self._last = plan = StepPlan(
            step_id=self._step_id,
            slots=slots,
            rows=rows,
            epochs=epochs,
            decode=runs_window,
            emits=emits,
            slot_updates=np.stack(slot_updates) if slot_updates else self._no_slot_updates,
            token_updates=self._token_updates(chunks) if chunks else _NO_TRIPLES,
            block_updates=blocks,
            num_rows=len(decode) * limits.window + sum(c for _, c in chunks),
            num_logit_rows=len(decode) * limits.window + sum(self._is_last(s, c) for s, c in chunks),
            has_prefill=bool(chunks),
            sampling=bool(t.sampling[slots].any()),
        )
        return plan

    def _launch_order(self, decode: Array, chunks: list[tuple[int, int]]) -> tuple[Array, Array]:
        """Slots and planned rows in the order the backend packs them."""
        prefill = np.array([s for s, _ in chunks], np.int32)
        slots = np.concatenate((prefill, decode)).astype(np.int32)
        rows = np.concatenate((np.array([c for _, c in chunks], np.int32), np.full(len(decode), self.limits.window, np.int32)))
        if self.row_order == "slot":
            order = np.argsort(slots, kind="stable")
        elif self.row_order == "seeded":
            order = self._shuffle.permutation(len(slots))
        else:
            order = np.arange(len(slots))
        return slots[order], rows[order]

    def _is_last(self, slot: int, chunk: int) -> bool:
        """Whether this chunk ends a fresh prompt, whose next token must be chosen."""
        t = self.slots
        return bool(t.prefill_planned[slot] + chunk == t.prefill_len[slot] == t.num_known[slot])

    def _token_updates(self, chunks: list[tuple[int, int]]) -> Array:
        """Tokens of each chunk, and the one behind it, which the draft's last row of the chunk embeds."""
        t = self.slots
        parts = []
        for slot, chunk in chunks:
            start = int(t.uploaded[slot])
            end = int(min(t.prefill_planned[slot] + chunk + 1, t.num_known[slot]))
            part = np.empty((max(end - start, 0), 3), np.int32)
            part[:, 0], part[:, 1], part[:, 2] = slot, np.arange(start, end), t.tokens[slot, start:end]
            parts.append(part)
            t.uploaded[slot] = max(end, start)
        return np.concatenate(parts)

    def _slot_update(self, request: Request) -> Array:
        t, slot, params = self.slots, request.slot, request.params
        row = np.full(SLOT_UPDATE_STOP_TOKENS + self.limits.max_stop_tokens, NO_TOKEN, np.int32)
        row[SlotUpdate.SLOT], row[SlotUpdate.PHASE] = slot, Phase.PREFILL
        row[SlotUpdate.PROMPT_LEN] = t.prompt_len[slot]
        row[SlotUpdate.NUM_GENERATED] = t.num_known[slot] - t.prompt_len[slot]
        row[SlotUpdate.KV_LEN] = t.kv_len[slot]
        row[SlotUpdate.PREFILL_LEN] = t.prefill_len[slot]
        row[SlotUpdate.MAX_TOTAL], row[SlotUpdate.EPOCH] = t.max_total[slot], t.epoch[slot]
        row[SlotUpdate.TOP_K] = params.top_k
        row[SlotUpdate.SEED_LOW : SlotUpdate.SEED_HIGH + 1] = np.array(request.seed, np.uint32).view(np.int32)
        floats = np.array((params.temperature, params.top_p, params.min_p), np.float32)
        row[SlotUpdate.TEMPERATURE : SlotUpdate.MIN_P + 1] = floats.view(np.int32)
        stops = request.stop_token_ids
        row[SLOT_UPDATE_STOP_TOKENS : SLOT_UPDATE_STOP_TOKENS + len(stops)] = stops
        return row

    def _advance(self, plan: StepPlan) -> None:
        """Move the planned state behind this step."""
        t, slots = self.slots, plan.slots
        t.in_flight[slots] += 1
        t.in_flight_decode[slots] += plan.decode
        t.in_flight_tokens[slots] += plan.emits
        if plan.has_prefill:
            t.prefill_planned[slots] += np.where(plan.decode, 0, plan.rows)
            ends = ~plan.decode & (t.prefill_planned[slots] == t.prefill_len[slots])
            t.phase[slots[ends]] = Phase.DECODE

    # -- leaving -----------------------------------------------------------------------------------
    def release_drained(self) -> None:
        """Free slots that leave once the last snapshot in flight for them has been applied; preempted requests queue again."""
        t = self.slots
        for slot in np.flatnonzero(t.leaving & (t.in_flight == 0)).tolist():
            request = t.request[slot]
            assert request is not None, "a leaving slot has a request"
            if request.status is Status.RUNNING:
                t.sync(request)
                request.status, request.slot = Status.WAITING, -1
                self.waiting.insert(self._queue_place(request), request)
            self.ledger.release(slot)
            t.vacate(slot)

    def _queue_place(self, request: Request) -> int:
        """Where a preempted request joins the queue: by arrival, which is at the head unless older ones wait too."""
        return next((i for i, other in enumerate(self.waiting) if other.number > request.number), len(self.waiting))
