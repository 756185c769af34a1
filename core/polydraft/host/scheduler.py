"""The scheduler: plans which requests run in the next step (admission, prefill chunks, block grants, preemption).

The engine calls `plan` once per step and gets a frozen `StepPlan`. All decisions are made from applied snapshots and upper
bounds, so a plan does not wait for the device. The scheduler does not touch device buffers.

Fairness: first come, first served. Decoding slots come before prefill, older requests get blocks first, and a waiting request is
never overtaken. When blocks run out, slots without them are left out of the step, or the youngest running request is
preempted: it keeps its tokens and returns to its place in the queue, by arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from polydraft.backend import RowOrder
from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.errors import ConfigError
from polydraft.host.draft_policy import Always, DraftPolicy, DraftView, Windows
from polydraft.host.kv_blocks import NO_GRANT, BlockLedger, Grant
from polydraft.host.request import Request, Status
from polydraft.host.slots import SlotTable
from polydraft.host.totals import EngineTotals
from polydraft.program.columns import ColumnWriter, max_staged_tokens
from polydraft.program.declare import Admission, Column
from polydraft.program.plan import StepPlan
from polydraft.sentinels import Phase

Admits = Literal["all", "begun", "none"]
PREALLOCATED_STEPS = 8
"""Number of steps for which all decoding slots get blocks as soon as one of them needs some, while blocks are plenty: no request
waits, and at least half of the spare blocks are left. A step that grants costs the host a third more, and the device a copy and a
launch."""
_PREFILL, _DECODE = int(Phase.PREFILL), int(Phase.DECODE)
"""As plain numbers, because NumPy compares arrays with these several times faster."""


class Scheduler:
    """Plans steps over a slot table and a block ledger. `waiting` is the queue, oldest first; `queue` and `leave` change it."""

    def __init__(
        self, limits: Limits, slots: SlotTable, ledger: BlockLedger, columns: Sequence[Column], row_order: RowOrder = "slot", *,
        policy: DraftPolicy | None = None, totals: EngineTotals | None = None,
    ) -> None:  # fmt: skip
        """`totals`: what the policy may look at besides."""
        self.limits, self.slots, self.ledger, self.row_order = limits, slots, ledger, row_order
        self._totals = EngineTotals() if totals is None else totals
        self._writer = ColumnWriter(columns, limits)
        self._policy: DraftPolicy = Always(limits.num_drafts) if policy is None else policy
        self._rungs = tuple(self._policy.rungs)
        """Those that there are programs for, whatever the policy says later."""
        self._limited: Windows | None = None
        """What the policy lets requests verify, as the last plan has it."""
        self._waiting_drafts = limits.num_drafts
        """The maximum number of drafts that the last step made for a slot."""
        self.waiting: deque[Request] = deque()
        self.held: list[Request] = []
        """Requests that would wait, but whose grammar is not ready; they hold nobody up."""
        self.num_preemptions = 0
        self.num_looked_up = 0
        """Tokens of prefills that were looked up in the prefix cache: the denominator of its hit rate."""
        self.admits: Admits = "all"
        """Which waiting requests may be admitted: all, only those that were in a slot before, or none."""
        self._step_id = 0
        self._last: StepPlan | None = None
        self._windows_ahead = 0
        """Number of further steps of the same slots that the granted blocks are sure to cover, if each step adds the largest
        window."""
        self._shuffle = np.random.default_rng(0)
        self._asked: tuple[Request | None, Array] = None, np.empty(0, np.int32)
        """The request whose place was last looked for, and its tokens."""

    # -- the plan ----------------------------------------------------------------------------------
    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run now."""
        self.release_drained()
        decode = self._decoding()
        decode, grant, short = self._grant_windows(decode)
        window = self._waiting_drafts + 1
        last = self._last_of(decode)
        limited: Windows | None = getattr(self._policy, "windows", None)
        if last is not None and (last.window != window or limited is not self._limited):
            last = None
        self._limited = limited
        rows = self._window_rows(decode, window) if last is None else last.rows
        windows = int(rows.sum()) if last is None else last.num_rows
        chunks, admitted = self._plan_prefill(self.limits.max_rows - windows, admit=not short)
        if not len(decode) and not chunks:
            # A request that was just preempted and has nothing in flight frees its slot at once, without an empty step.
            return self.plan() if self._drained().size else None
        self._step_id += 1
        num_drafts = self._choose(DraftView(self.slots, decode, bool(chunks), self._totals))
        if last is None or chunks:
            plan = self._assemble(decode, rows, chunks, admitted, grant, window=window, num_drafts=num_drafts)
        else:
            plan = last.again(self._step_id, self._writer.grants(*grant), num_drafts)
        self._last, self._waiting_drafts = plan, num_drafts
        self._advance(plan)
        return plan

    def _choose(self, view: DraftView) -> int:
        """What the policy answers. Raises `ConfigError` for what is none of its rungs."""
        answer: Any = self._policy.choose(view)
        if not isinstance(answer, (int, np.integer)) or answer not in self._rungs:
            raise ConfigError(f"the draft policy chose {answer!r}, wanted one of its rungs {self._rungs}; correct its `choose`")
        return int(answer)

    def _last_of(self, decode: Array) -> StepPlan | None:
        """The last plan, if it ran windows of the same slots and nothing else."""
        last = self._last
        return last if last is not None and not last.has_prefill and last.slots.tobytes() == decode.tobytes() else None

    def _window_rows(self, decode: Array, window: int) -> Array:
        """[n] int32: upper bound of the rows of each decoding slot: the step's window, limited by its request and the policy."""
        rows: Array = self.slots.window[decode]
        if window != self.limits.window:
            rows = np.minimum(rows, np.int32(window))
        return rows if self._limited is None else self._limited.limit(rows, self.slots, decode)

    def _decoding(self) -> Array:
        """Decoding slots, except those whose masks are awaited, and those that reach their maximum length in a step that is in
        flight."""
        t = self.slots
        running = (t.phase == _DECODE) & ~t.draining & ~t.held & (t.num_known + t.in_flight_tokens < t.max_total)
        slots: Array = running.nonzero()[0]
        return slots

    def _grant_windows(self, decode: Array) -> tuple[Array, Grant, bool]:
        """Grant the blocks that the next window and its drafts may need. The device counts with the maximum number of drafts,
        whatever the steps verify and make. Returns the slots that can run, what was granted, and whether blocks ran short, in
        which case no request is admitted."""
        if not len(decode):
            return decode, NO_GRANT, False
        if self._windows_ahead and self._last_of(decode) is not None:
            self._windows_ahead -= 1
            return decode, NO_GRANT, False
        t, limits, ledger = self.slots, self.limits, self.ledger
        base, most = np.maximum(t.kv_len[decode], t.prefill_planned[decode]), t.max_total[decode]
        ahead = base + t.in_flight_rows[decode] + (limits.window + 2 * limits.num_drafts)
        ahead = np.minimum(ahead, most)
        room = int(ledger.room(decode, ahead).min())
        self._windows_ahead = max(room, 0) // limits.window
        if room >= 0:
            return decode, NO_GRANT, False
        lacking = ledger.lacking(decode, ahead)
        if lacking.sum() > ledger.num_free:
            return self._grant_scarce(decode, base, lacking)
        more = ledger.lacking(decode, np.minimum(ahead + PREALLOCATED_STEPS * limits.window, most))
        plenty = not self.waiting and 2 * more.sum() <= ledger.num_spare
        return decode, ledger.grant(decode, more if plenty else lacking), False

    def _grant_scarce(self, decode: Array, base: Array, lacking: Array) -> tuple[Array, Grant, bool]:
        """Grant `lacking` blocks while there are any, oldest request first. A slot is left out if its blocks do not cover the
        next window after its last applied state (`base` rows). Once nothing is in flight for such a slot it cannot continue, so
        the youngest request is preempted."""
        t, limits, ledger = self.slots, self.limits, self.ledger
        age = np.argsort(t.number[decode], kind="stable")
        decode, base, lacking = decode[age], base[age], lacking[age]
        grant = ledger.grant(decode, np.where(np.cumsum(lacking) <= ledger.num_free, lacking, 0))
        need = np.minimum(base + 1 + 2 * limits.num_drafts, t.max_total[decode])
        starved = need > ledger.num_granted[decode] * limits.block_size
        if (starved & (t.in_flight[decode] == 0)).any() and not self._preempting():
            self._preempt_youngest()
        return np.sort(decode[~starved & ~t.draining[decode]]), grant, True

    def _preempt_youngest(self) -> None:
        """Stop scheduling the youngest running request. It returns to the queue when it has drained."""
        running = self._running()
        self.preempt(int(running[np.argmax(self.slots.number[running])]))

    def preempt_all(self) -> None:
        """Stop scheduling every running request. Each returns to the queue when it has drained."""
        for slot in self._running().tolist():
            self.preempt(slot)

    def _running(self) -> Array:
        t = self.slots
        return np.flatnonzero(((t.phase == _DECODE) | (t.phase == _PREFILL)) & ~t.draining)

    def preempt(self, slot: int, *, recompute: bool = False) -> None:
        """Stop scheduling the request in a slot. It returns to the queue when it has drained; what is in flight for it is
        discarded. `recompute`: not for lack of blocks, but to compute all its rows anew."""
        request = self.slots.request[slot]
        assert request is not None, "a running slot has a request"
        self.slots.draining[slot] = True
        request.num_preemptions += 1
        request.recompute = recompute
        self.num_preemptions += not recompute

    def _plan_prefill(self, budget: int, *, admit: bool) -> tuple[list[tuple[int, int]], list[Admission]]:
        """(slot, chunk) of running and newly admitted prefills, and the admissions. `budget`: rows left in this step."""
        t = self.slots
        chunks: list[tuple[int, int]] = []
        admitted: list[Admission] = []
        running = ((t.phase == _PREFILL) & ~t.draining).nonzero()[0]
        for slot in running[np.argsort(t.number[running])].tolist() if running.size else ():
            if budget <= 0:
                return chunks, admitted
            budget -= self._take_chunk(slot, budget, chunks)
        if not admit or self.admissible() is None or self._preempting():
            return chunks, admitted
        room = max_staged_tokens(self.limits)
        while budget > 0 and (request := self.admissible()) is not None and request.num_known <= room:
            slot = t.free_slot()
            admission = None if slot is None else self._admit(slot, request)
            if slot is None or admission is None:
                break
            self.waiting.remove(request)
            room -= request.num_known
            admitted.append(admission)
            budget -= self._take_chunk(slot, budget, chunks)
        return chunks, admitted

    def admissible(self) -> Request | None:
        """The oldest waiting request that may be admitted. One that has begun may wait behind an older one that has not, for want
        of its grammar or of room."""
        if self.admits == "all":
            return self.waiting[0] if self.waiting else None
        return next((one for one in self.waiting if one.begun), None) if self.admits == "begun" else None

    def _preempting(self) -> bool:
        """Whether a preempted request is still draining. Its blocks are for the requests that it was preempted for."""
        draining = np.flatnonzero(self.slots.draining).tolist()
        return any(r is not None and r.status is Status.RUNNING for r in (self.slots.request[slot] for slot in draining))

    def _admit(self, slot: int, request: Request) -> Admission | None:
        """Place a request in a slot, sharing the blocks that already contain its beginning; None if there is no room for the
        rest.

        It gets the blocks of its whole prefill and first window at once, so that a prefill cannot stall half-way. At least one
        row is always left to compute, since drafting starts from the hidden state of the last known token."""
        limits, ledger = self.limits, self.ledger
        known = self._tokens_of(request)
        prefill_len = len(known) - 1 if request.token_ids else len(known)
        shares = ledger.shares and not request.recompute
        share = shares and request.params.prompt_logprobs is None  # shared rows have no logits
        shared = ledger.match(known, (prefill_len - 1) // limits.block_size) if share else []
        need = min(len(known) + limits.window + 2 * limits.num_drafts, request.max_total)
        rest = int(ledger.blocks_for(need)) - len(shared)
        if rest > ledger.room_beside(shared):
            return None
        num_cached = len(shared) * limits.block_size
        self.slots.occupy(slot, request, known=known, prefill_len=prefill_len, num_cached=num_cached)
        ledger.adopt(slot, shared, known)
        self.num_looked_up += prefill_len * share
        if request.params.max_drafts == 0:
            ledger.keep_private(slot)  # steps without drafts leave the proposer's rows unwritten
        ledger.grant(np.array([slot]), np.array([rest]))
        return Admission(request, slot, int(self.slots.epoch[slot]), known, prefill_len, num_cached, ledger.granted(slot))

    def _tokens_of(self, request: Request) -> Array:
        """Prompt and text so far of a request that waits, [num_known] int32. Those of the last one are kept: where it lacks
        room, it is asked for again in every plan."""
        last, tokens = self._asked
        if last is not request or len(tokens) != request.num_known:
            tokens = np.array((*request.prompt_ids, *request.token_ids), np.int32)
            self._asked = request, tokens
        return tokens

    def _take_chunk(self, slot: int, budget: int, chunks: list[tuple[int, int]]) -> int:
        chunk = min(budget, int(self.slots.prefill_len[slot] - self.slots.prefill_planned[slot]))
        if self.slots.prompt_top[slot] >= 0:  # the head runs over them with the buffers of logit rows
            chunk = min(chunk, self.limits.max_logit_rows - sum(self._prompt_rows(s, c) for s, c in chunks))
        if chunk > 0:
            chunks.append((slot, chunk))
        return chunk

    # -- assembling --------------------------------------------------------------------------------
    def _assemble(
        self, decode: Array, window_rows: Array, chunks: list[tuple[int, int]], admitted: list[Admission], grant: Grant, *,
        window: int, num_drafts: int,
    ) -> StepPlan:  # fmt: skip
        t = self.slots
        slots, rows = self._launch_order(decode, window_rows, chunks)
        windows = int(window_rows.sum())
        runs_window = t.phase[slots] == _DECODE
        emits = runs_window | (t.prefill_planned[slots] + rows == t.num_known[slots])
        in_flight_counts = np.zeros_like(t.in_flight_counts)
        in_flight_counts[:, slots] = np.ones(len(slots), bool), runs_window, emits, runs_window * window
        num_top = self._num_top(slots)
        prompt_top, num_prompt_rows = self._prompt_top(chunks)
        return StepPlan(
            step_id=self._step_id,
            slots=slots,
            rows=rows,
            epochs=t.epoch[slots],
            decode=runs_window,
            emits=emits,
            in_flight_counts=in_flight_counts,
            writes=self._writer.admissions(admitted, *grant) if admitted else self._writer.grants(*grant),
            num_rows=windows + sum(c for _, c in chunks),
            num_logit_rows=windows + sum(self._is_last(s, c) for s, c in chunks),
            window=window,
            num_drafts=num_drafts,
            has_prefill=bool(chunks),
            drafting=bool((t.window[slots] > 1).any()),
            sampling=bool(t.sampling[slots].any()),
            processed=bool(t.processed[slots].any()),
            bound=bool(t.bound[slots].any()),
            num_top=num_top,
            prompt_top=prompt_top,
            num_prompt_rows=num_prompt_rows,
        )

    def _launch_order(self, decode: Array, windows: Array, chunks: list[tuple[int, int]]) -> tuple[Array, Array]:
        """Slots and planned rows in the order in which the backend packs them."""
        slots = np.concatenate((np.array([s for s, _ in chunks], np.intp), decode))
        rows = np.concatenate((np.array([c for _, c in chunks], np.int32), windows))
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

    def _num_top(self, slots: Array) -> Array | None:
        """Requested log probabilities of the scheduled slots, by slot; None if none are requested."""
        wanted = self.limits.max_logprobs >= 0 and (self.slots.num_top[slots] >= 0).any()
        return self.slots.num_top.copy() if wanted else None

    def _prompt_top(self, chunks: list[tuple[int, int]]) -> tuple[Array | None, int]:
        """Requested log probabilities of the prompt tokens that these chunks predict, by slot, and the number of such rows."""
        rows = {slot: count for slot, chunk in chunks if (count := self._prompt_rows(slot, chunk)) > 0}
        if not rows:
            return None, 0
        wanted = np.full(self.limits.max_seqs, -1, np.int32)
        wanted[list(rows)] = self.slots.prompt_top[list(rows)]
        return wanted, sum(rows.values())

    def _prompt_rows(self, slot: int, chunk: int) -> int:
        """Rows of the next chunk of a slot that predict a prompt token whose log probability is requested."""
        t = self.slots
        if t.prompt_top[slot] < 0:
            return 0
        begin = int(t.prefill_planned[slot])
        return max(min(begin + chunk, int(t.prompt_len[slot]) - 1) - begin, 0)

    def _advance(self, plan: StepPlan) -> None:
        """Advance the planned state past this step."""
        t, slots = self.slots, plan.slots
        t.in_flight_counts += plan.in_flight_counts
        if plan.has_prefill:
            t.prefill_planned[slots] += np.where(plan.decode, 0, plan.rows)
            ends = ~plan.decode & (t.prefill_planned[slots] == t.prefill_len[slots])
            t.phase[slots[ends]] = Phase.DECODE

    # -- draining ----------------------------------------------------------------------------------
    def release_drained(self) -> None:
        """Free the draining slots that have nothing in flight any more; preempted requests return to the queue."""
        t = self.slots
        for slot in self._drained().tolist():
            request = t.request[slot]
            assert request is not None, "a draining slot has a request"
            if request.status is Status.RUNNING:
                t.sync(request)
                request.status, request.slot = Status.WAITING, -1
                self.queue(request)
            self.ledger.release(slot)
            t.vacate(slot)

    def _drained(self) -> Array:
        """Draining slots that no step in flight uses."""
        draining: Array = self.slots.draining.nonzero()[0]
        return draining[self.slots.in_flight[draining] == 0] if draining.size else draining

    # -- the queue ---------------------------------------------------------------------------------
    def queue(self, request: Request) -> None:
        """Let a request wait: by arrival, unless its grammar is not ready yet."""
        if not request.ready:
            self.held.append(request)
        elif not self.waiting or self.waiting[-1].number < request.number:
            self.waiting.append(request)
        else:
            place = next(i for i, other in enumerate(self.waiting) if other.number > request.number)
            self.waiting.insert(place, request)

    def release_held(self) -> None:
        """Let the held requests wait whose grammar has become ready."""
        held, self.held = self.held, []
        for request in held:
            self.queue(request)

    def leave(self, request: Request) -> None:
        """A request that waits has ended."""
        (self.waiting if request in self.waiting else self.held).remove(request)
