"""The host side of the runtime without a model: scheduler, ledger and commit around a device simulated in plain Python.

`FakeDevice` keeps what plans brought down and answers each with an outcome. `HostLoop` drives both as the engine does, with steps
in flight, and checks each plan against the actual state of the device. The unit tests of the scheduler use it.

Nothing is computed: token p of request r is `text(r, p)`, a row of a cache is the text and position it was written for, and how
many drafts are accepted is drawn from a seeded generator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.scatter import Run
from polydraft.host.commit import apply, end
from polydraft.host.kv_blocks import BlockLedger
from polydraft.host.request import Request, Status
from polydraft.host.scheduler import Scheduler
from polydraft.host.slots import SlotTable
from polydraft.program.columns import BLOCK_TABLE, HISTORY
from polydraft.program.plan import StepOutcome, StepPlan
from polydraft.sampling.processing import STAGES
from polydraft.sampling.verify import Verifier
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import NO_BLOCK, NO_TOKEN, Finish, Phase
from polydraft.step.batch import Batch

VOCABULARY = 1000
COLUMNS = (*Batch.columns, *Verifier.columns, *(column for stage in STAGES for column in stage.columns))
"""Those of an engine without plugins and log probabilities."""


def limits(**changes: int) -> Limits:
    """Small capacities: 3 slots, 2 drafts, blocks of 4 tokens."""
    wanted = {"max_seqs": 3, "num_drafts": 2, "max_len": 40, "block_size": 4, "num_blocks": 40, "max_rows": 24, **changes}
    window = wanted["num_drafts"] + 1
    derived = {"max_logit_rows": wanted["max_seqs"] * window, "max_blocks": -(-wanted["max_len"] // wanted["block_size"])}
    return Limits(**wanted, **derived, max_stop_tokens=2, vocab_size=VOCABULARY)


def text(number: int, position: int) -> int:
    """The token that request `number` has at `position`, prompt and output alike. Every third request has the same text, so
    that blocks are shared."""
    return (number % 3 * 131 + position * 7 + position * position) % VOCABULARY


def request(number: int, *, prompt: int = 5, new: int = 8, temperature: float = 0.0) -> Request:
    """Request `number`, with a prompt of `prompt` tokens and `new` tokens to generate."""
    prompt_ids = tuple(text(number, p) for p in range(prompt))
    params = SamplingParams(max_new_tokens=new, temperature=temperature)
    return Request(
        id=str(number),
        prompt_ids=prompt_ids,
        params=params,
        number=number,
        seed=(number, 0),
        stop_token_ids=(),
        max_total=prompt + new,
    )


@dataclass
class FakeSlot:
    """One slot as the device knows it."""

    number: int = -1
    phase: int = Phase.IDLE
    kv_len: int = 0
    prefill_len: int = 0
    known: int = 0
    max_total: int = 0
    epoch: int = 0
    drafts: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    uploads: int = 0
    """Tokens staged since the slot was occupied."""
    blocks: dict[int, int] = field(default_factory=dict)


def staged(plan: StepPlan, capacities: Limits) -> dict[int, dict[str, dict[int, int]]]:
    """What a plan stages: by slot in the order of runs, by column, by place, the word; block tables without unused places. Checks
    what `scatter` relies on."""
    names = [column.name for column in COLUMNS] if plan.writes.admits else [BLOCK_TABLE]
    width = {column.name: column.width(capacities) for column in COLUMNS if column.name not in {HISTORY, BLOCK_TABLE}}
    found: dict[int, dict[str, dict[int, int]]] = {}
    for run in plan.writes.runs.tolist():
        slot, name, start, count, offset = (run[word] for word in (Run.SLOT, Run.COLUMN, Run.START, Run.COUNT, Run.OFFSET))
        column = found.setdefault(slot, {})
        name = names[name]
        assert slot >= 0, "a run names no slot"
        assert name not in column, "two runs name a column of a slot"
        assert 0 <= start <= start + count <= width.get(name, start + count), "a run lies beyond its column"
        assert 0 <= offset <= offset + count <= len(plan.writes.payload), "a run lies beyond the payload"
        words = plan.writes.payload[offset : offset + count].tolist()
        column[name] = {start + i: word for i, word in enumerate(words) if name != BLOCK_TABLE or word != NO_BLOCK}
    return found


class FakeDevice:
    """Keeps slots from staged writes alone, and does to them what the state kernels would do."""

    def __init__(self, limits: Limits, seed: int) -> None:
        self.limits, self.rng = limits, np.random.default_rng(seed)
        self.slots = [FakeSlot() for _ in range(limits.max_seqs)]
        self.rows: dict[tuple[int, int], tuple[int, int] | None] = {}
        """(block, place in it) to (text, position) of the row that was written there last; None for one of no text."""
        self.num_pauses = 0

    def accept(self, number: int, drafted: int) -> int:
        """How many of its drafts request `number` accepts; a test may replace it."""
        del number
        return int(self.rng.integers(0, drafted + 1))

    def step(self, plan: StepPlan, numbers: dict[int, int]) -> StepOutcome:
        """Run one plan; `numbers` says which request a newly occupied slot serves."""
        self._write(plan, numbers)
        window, n = self.limits.window, plan.num_seqs
        num_logit_rows = int(plan.decode.sum()) * window  # an upper bound: a window may have fewer drafts
        columns: dict[str, Any] = {
            name: np.zeros(n, np.int32) for name in ("num_tokens", "accepted", "finish", "phase", "kv_len")
        }
        drafted, tokens = np.full(n, -1, np.int32), np.full((n, window), NO_TOKEN, np.int32)
        for i, slot in enumerate(plan.slots.tolist()):
            s = self.slots[slot]
            assert s.epoch == plan.epochs[i], "a plan names an epoch that the device does not have"
            self._reserve(s)
            held = [self.rows.get(self._place(s, p)) for p in range(s.kv_len)]
            assert held == [(s.number % 3, p) for p in range(s.kv_len)], "a committed row is not where the block table says"
            produced = 0
            if s.phase == Phase.PREFILL:
                produced = self._prefill(s, int(plan.rows[i]))
                assert plan.emits[i] == produced, "a plan is wrong about the end of a prompt"
                num_logit_rows += produced
            elif s.phase == Phase.DECODE:
                produced, drafted[i] = self._decode(s, int(plan.rows[i]))
                columns["accepted"][i] = produced - 1
                assert plan.emits[i], "a plan denies a window its token"
            self.num_pauses += s.phase == Phase.PAUSED
            tokens[i, :produced] = [text(s.number, s.known - produced + place) for place in range(produced)]
            columns["num_tokens"][i], columns["phase"][i], columns["kv_len"][i] = produced, s.phase, s.kv_len
            columns["finish"][i] = Finish.LENGTH if produced and s.known == s.max_total else Finish.NONE
            if columns["finish"][i]:
                s.phase = Phase.FINISHED
        assert plan.num_logit_rows == num_logit_rows, "launch length of the logit rows"
        return StepOutcome(step_id=plan.step_id, slots=plan.slots, epochs=plan.epochs, drafted=drafted, tokens=tokens, **columns)

    def _write(self, plan: StepPlan, numbers: dict[int, int]) -> None:
        for slot, words in staged(plan, self.limits).items():
            if "epoch" in words:  # an admission, which fills everything
                one = {name: values[0] for name, values in words.items() if 0 in values}
                self.slots[slot] = FakeSlot(
                    number=numbers[slot], phase=one["phase"], kv_len=one["kv_len"],
                    known=one["prompt_len"] + one["num_generated"], prefill_len=one["prefill_len"], max_total=one["max_total"],
                    epoch=one["epoch"],
                )  # fmt: skip
            tokens = words.get(HISTORY, {})
            self.slots[slot].tokens.update(tokens)
            self.slots[slot].uploads += len(tokens)
            self.slots[slot].blocks.update(words.get(BLOCK_TABLE, {}))

    def _reserve(self, s: FakeSlot) -> None:
        """Pause a decoding slot whose window is not covered, wake one that is."""
        if s.phase in {Phase.DECODE, Phase.PAUSED}:
            need = min(s.kv_len + 1 + s.drafts + self.limits.num_drafts, s.max_total)
            s.phase = Phase.DECODE if self._covered(s, need) else Phase.PAUSED

    def _covered(self, s: FakeSlot, num_tokens: int) -> bool:
        return all(s.blocks.get(index, NO_BLOCK) >= 0 for index in range(-(-num_tokens // self.limits.block_size)))

    def _prefill(self, s: FakeSlot, rows: int) -> int:
        length = min(rows, s.prefill_len - s.kv_len)
        assert length > 0, "a prefill was planned without rows"
        assert self._covered(s, s.kv_len + length), "a prefill row has no block"
        wanted = range(s.kv_len, min(s.kv_len + length + 1, s.known))
        assert all(s.tokens.get(p) == text(s.number, p) for p in wanted), "a row's token, or the one behind it, was not staged"
        self._commit(s, length, length)
        if s.kv_len < s.prefill_len:
            return 0
        fresh = s.prefill_len == s.known
        s.phase, s.known = Phase.DECODE, s.known + fresh
        self._draft(s)
        return int(fresh)

    def _decode(self, s: FakeSlot, rows: int) -> tuple[int, int]:
        assert s.kv_len == s.known - 1, "a decoding slot lacks rows"
        drafted = min(s.drafts, rows - 1)
        produced = 1 + self.accept(s.number, drafted)
        s.known += produced
        self._commit(s, produced, 1 + drafted)
        self._draft(s)
        return produced, drafted

    def _place(self, s: FakeSlot, position: int) -> tuple[int, int]:
        size = self.limits.block_size
        return s.blocks.get(position // size, NO_BLOCK), position % size

    def _commit(self, s: FakeSlot, kept: int, written: int) -> None:
        """Write rows behind the committed ones, of which the first `kept` become committed and the others are of no text."""
        for place in range(written):
            position = s.kv_len + place
            self.rows[self._place(s, position)] = (s.number % 3, position) if place < kept else None
        s.kv_len += kept

    def _draft(self, s: FakeSlot) -> None:
        """Draft, which writes rows of no text behind the committed ones, where there are blocks for them."""
        s.drafts = max(0, min(self.limits.num_drafts, s.max_total - s.known - 1))
        for place in range(s.drafts):
            if self._place(s, s.kv_len + place)[0] >= 0:
                self.rows[self._place(s, s.kv_len + place)] = None


class HostLoop:
    """Scheduler, ledger, slot table and a fake device, driven as the engine drives them with `depth` steps in flight."""

    def __init__(self, limits: Limits, *, depth: int = 0, seed: int = 0, shares: bool = True, **scheduler: Any) -> None:
        self.limits, self.depth = limits, depth
        self.slots = SlotTable(limits)
        self.ledger = BlockLedger(
            num_blocks=limits.num_blocks, block_size=limits.block_size, max_seqs=limits.max_seqs, max_blocks=limits.max_blocks,
            shares=shares,
        )  # fmt: skip
        self.scheduler = Scheduler(limits, self.slots, self.ledger, COLUMNS, **scheduler)
        self.device = FakeDevice(limits, seed)
        self.in_flight: deque[tuple[StepPlan, StepOutcome]] = deque()
        self.plans: list[StepPlan] = []
        self.admitted: list[int] = []
        """Numbers of requests in the order of their admissions, repeated when they come back."""
        self.ended: list[Request] = []

    def add(self, *requests: Request) -> None:
        """Queue requests."""
        self.scheduler.waiting.extend(requests)

    def abort(self, one: Request) -> None:
        """End a request that waits or runs."""
        if one.status is Status.WAITING:
            self.scheduler.waiting.remove(one)
            one.status = Status.FINISHED
        elif one.status is Status.RUNNING:
            end(self.slots, one.slot, "abort")

    def launch(self) -> StepPlan | None:
        """Plan a step and let the device run it; its outcome stays in flight."""
        plan = self.scheduler.plan()
        if plan is not None:
            numbers = {slot: one.number for slot, one in enumerate(self.slots.request) if one is not None}
            self._check(plan)
            self.admitted += [numbers[slot] for slot, words in staged(plan, self.device.limits).items() if "epoch" in words]
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.step(plan, numbers)))
        self.ledger.audit()
        return plan

    def collect(self) -> None:
        """Apply the oldest outcome in flight."""
        self.ended += apply(self.slots, self.ledger, *self.in_flight.popleft())
        self.ledger.audit()

    def step(self) -> bool:
        """As `Engine.step`: False when there was nothing to do."""
        plan = self.launch()
        if not self.in_flight:
            self.scheduler.release_drained()
            return False
        if plan is None or len(self.in_flight) > self.depth:
            self.collect()
        return True

    def run(self, most: int = 500) -> None:
        """Step until everybody has ended; fails when that takes more than `most` steps."""
        for _ in range(most):
            if not (self.in_flight or self.scheduler.waiting or (self.slots.phase != Phase.IDLE).any()):
                return
            self.step()
        raise AssertionError(f"not done after {most} steps: {list(self.scheduler.waiting)}, {self.slots.phase}")

    def _check(self, plan: StepPlan) -> None:
        """What holds for every plan, whoever runs."""
        limits, n = self.limits, plan.num_seqs
        assert 0 < n <= limits.max_seqs
        assert len({*plan.slots.tolist()}) == n, "a slot is scheduled twice"
        assert plan.rows.shape == plan.epochs.shape == plan.decode.shape == plan.emits.shape == (n,)
        assert (plan.rows > 0).all()
        assert (plan.rows[plan.decode] == limits.window).all()
        assert int(plan.rows.sum()) == plan.num_rows <= limits.max_rows, "more rows than a step may have"
        assert plan.num_logit_rows <= limits.max_logit_rows
        assert plan.has_prefill == bool((~plan.decode).any())
        assert plan.sampling == any(self.slots.sampling[plan.slots])
