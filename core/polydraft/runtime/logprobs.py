"""Owns log probabilities on the device: their buffers, their launches in a step, and the records that come back from it.

The runner builds one where the engine reports log probabilities, and nothing of it exists elsewhere. Wishes go down by slot
with the plan, so that a captured graph serves any number of columns; up comes one record of exactly the columns asked for. It
never knows a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits, Unit
from polydraft.contracts.draft_logprobs import DraftLogprobsV1
from polydraft.contracts.keep_logits import KeepLogitsV1
from polydraft.contracts.layout import Flag, record_words
from polydraft.contracts.pack_logprobs import PackLogprobsV1
from polydraft.contracts.pack_prompt_rows import PackPromptRowsV1
from polydraft.contracts.process_logits import ProcessLogitsV1
from polydraft.contracts.top_logprobs import TopLogprobsV1
from polydraft.device import Array, Buffer, Device, Staging, Stream
from polydraft.errors import CapabilityError
from polydraft.runtime.buffers import SlotState, StepBuffers
from polydraft.runtime.packed import Expected, PackedLogprobs, Wanted
from polydraft.runtime.plan import StepPlan
from polydraft.runtime.program import ProgramBuilder

CONTRACTS = ("keep_logits", "top_logprobs", "pack_logprobs", "draft_logprobs", "pack_prompt_rows")
"""What a backend needs for an engine that reports log probabilities, and for nothing else."""
ROOM = "logprobs"


def refuse_lacking(providers: Mapping[str, Any]) -> None:
    """Raises `CapabilityError` naming the contracts that are not among `providers`."""
    lacking = [name for name in CONTRACTS if name not in providers]
    if lacking:
        raise CapabilityError(
            f"log probabilities were asked for, but this backend has no {', '.join(lacking)}; leave --logprobs out, or use "
            "another backend"
        )


@dataclass(frozen=True)
class _Results:
    """What `top_logprobs` writes and `pack_logprobs` packs, for `count` sequences of `width` places."""

    ids: Buffer
    logprobs: Buffer
    ranks: Buffer
    record: Buffer

    @classmethod
    def allocate(cls, device: Device, name: str, count: int, width: int, columns: int) -> _Results:
        shape = count, width, columns
        return cls(
            device.empty(f"{name}.ids", shape, "i32"),
            device.empty(f"{name}.logprobs", shape, "f32"),
            device.empty(f"{name}.ranks", shape[:2], "i32"),
            device.empty(f"{name}.record", (record_words(count, width, columns),), "i32"),
        )


class _Landing(PackedLogprobs):
    """Pinned memory for the records of one step, which is handed on with them: views of it as long as those can be, and the
    copies that fill them, made anew when what is `expected` changes."""

    __slots__ = ("_pair", "copies")

    def __init__(self, pair: tuple[Staging, Staging], max_seqs: int, home: deque[_Landing]) -> None:
        super().__init__(_NOTHING, None, None, np.empty(max_seqs, np.int32), home)
        self._pair = pair
        self.copies: tuple[tuple[Staging, Buffer, int], ...] = ()

    def expect(self, expected: Expected, sources: tuple[Buffer, Buffer]) -> None:
        """The next records are these."""
        self.expected = expected
        views = [
            None if wanted is None else staging.array[: wanted.words]
            for wanted, staging in zip(expected[:2], self._pair, strict=True)
        ]
        self.tokens, self.prompt = views
        parts = zip(self._pair, sources, views, strict=True)
        self.copies = tuple((staging, source, len(view)) for staging, source, view in parts if view is not None)


_NOTHING = Expected(None, None, np.empty(0, np.int32), None, None)
SPARE = 8
"""Landings besides those of steps in flight: the records of so many steps may wait unread where they came; further ones are
copied."""


class Logprobs:
    """Everything between the wishes of a plan and its records. `raw`: of the logits before penalties, biases, forbidden tokens
    and temperature; else behind them, before top-k, top-p and min-p. Prompt tokens are always reported raw.
    `draws`: drafts of slots that sample are drawn from distributions that are kept."""

    def __init__(
        self,
        device: Device,
        limits: Limits,
        state: SlotState,
        step: StepBuffers,
        *,
        raw: bool,
        verify: str,
        draws: bool,
        depth: int,
    ) -> None:
        self._device, self._limits, self._state, self._step, self._raw = device, limits, state, step, raw
        self._depth = depth
        b, nl, columns = limits.max_seqs, limits.max_logit_rows, limits.max_logprobs + 1
        self._window = _Results.allocate(device, "logprobs.window", b, limits.window, columns)
        self._prompt = _Results.allocate(device, "logprobs.prompt", nl, 1, columns)
        self._num_top, self._prompt_top = (self._by_slot(name) for name in ("num_top", "prompt_top"))
        self._drawn_top = self._by_slot("drawn_top") if draws else self._num_top
        self._draft_logprobs = device.empty("logprobs.drafts", (b, limits.num_drafts), "f32")
        device.load(self._draft_logprobs, np.zeros((b, limits.num_drafts), np.float32))  # what no model drew is certain
        keeps = raw or verify == "rejection"
        self._kept = device.empty("logprobs.kept", (nl, limits.vocab_size), "f32") if keeps else None
        self._row, self._slot, self._position = (
            device.empty(f"logprobs.prompt.{name}", (nl,), "i32") for name in ("row", "slot", "position")
        )
        self._token = device.empty("logprobs.prompt.token", (nl, 1), "i32")
        self._row_of_seq = device.empty("logprobs.prompt.start", (nl,), "i32")  # prompt row i is logit row i
        device.load(self._row_of_seq, np.arange(nl, dtype=np.int32))
        wishes = self._num_top, self._prompt_top, self._drawn_top
        self._ring = [{b.name: self._like(b, i) for b in wishes} for i in range(depth + 1)]
        """Wishes on their way down, by place."""
        self._sent: dict[str, Array] = {}
        self._sources = self._window.record, self._prompt.record
        self._free: deque[_Landing] = deque()
        for i in range(depth + 1 + SPARE):
            pair = self._like(self._sources[0], i), self._like(self._sources[1], i)
            self._free.append(_Landing(pair, b, self._free))
        self._in_flight: deque[_Landing | None] = deque()
        """Of every step in flight, oldest first."""
        self._slots: Array | None = None
        self._expected: Expected | None = None
        """What steps with these slots bring."""

    def _by_slot(self, name: str) -> Buffer:
        buffer = self._device.empty(f"logprobs.{name}", (self._limits.max_seqs,), "i32")
        self._device.load(buffer, np.full(buffer.shape, -1, np.int32))
        return buffer

    def _like(self, buffer: Buffer, index: int) -> Staging:
        return self._device.staging(f"landing{index}.{buffer.name}", buffer.shape, "i32")

    # -- launches ----------------------------------------------------------------------------------
    def keep(self, program: ProgramBuilder, logits: Buffer, row_slot: Buffer, *, raw: bool) -> None:
        """Append the copy of the target's logits, at the place that is `raw` or behind processing, where one is needed."""
        if self._kept is not None and raw == self._raw and self._changes(program):
            keep = KeepLogitsV1(logits=logits, row_slot=row_slot, num_top=self._num_top, kept=self._kept)
            program.add("keep_logits", keep, "logit_rows", ROOM)

    def _changes(self, program: ProgramBuilder) -> bool:
        """Whether the logits that are to be reported are overwritten before the step knows its tokens."""
        return program.kind.logprobs and (program.kind.rule == "rejection" or (self._raw and program.kind.processed))

    def append(self, program: ProgramBuilder) -> None:
        """Append, behind the commit, the launches that report the tokens of the step."""
        t, s, out = self._step, self._state, self._window
        top = TopLogprobsV1(
            logits=self._kept if self._changes(program) and self._kept is not None else t.logits,
            slot_order=t.slot_order, logit_start=t.logit_start, out_tokens=t.out_tokens, num_top=self._num_top,
            temperature=None if self._raw else s.temperature, ids=out.ids, logprobs=out.logprobs, ranks=out.ranks,
        )  # fmt: skip
        program.add("top_logprobs", top, "seqs", ROOM)
        pack = PackLogprobsV1(
            slot_order=t.slot_order, num_top=self._num_top, ids=out.ids, logprobs=out.logprobs, ranks=out.ranks,
            extra=t.drafted, drafts=s.drafts, draft_logprobs=self._draft_logprobs, record=out.record, flag=int(Flag.TARGET),
        )  # fmt: skip
        program.add("pack_logprobs", pack, "seqs", ROOM)

    def append_prompt(
        self, program: ProgramBuilder, head: Callable[[ProgramBuilder, Buffer, Unit], None], num_valid: int
    ) -> None:
        """Append, behind everything that needs the step's logits, the launches that report prompt tokens. `head(program, rows,
        unit)` runs the target's head over packed rows into `step.logits`."""
        t, s, out, slots = self._step, self._state, self._prompt, self._slot
        pack_rows = PackPromptRowsV1(
            slot_order=t.slot_order, seq_start=t.seq_start, seq_len=t.seq_len, positions=t.positions, prompt_len=s.prompt_len,
            num_top=self._prompt_top, tokens=s.tokens, prompt_row=self._row, prompt_slot=slots,
            prompt_position=self._position, prompt_token=self._token,
        )  # fmt: skip
        program.add("pack_prompt_rows", pack_rows, "prompt_rows", ROOM)
        head(program, self._row, "prompt_rows")
        mask = ProcessLogitsV1(logits=t.logits, row_slot=slots, num_valid=num_valid)
        program.add("process_logits", mask, "prompt_rows", ROOM)
        top = TopLogprobsV1(
            logits=t.logits, slot_order=slots, logit_start=self._row_of_seq, out_tokens=self._token, num_top=self._prompt_top,
            temperature=None, ids=out.ids, logprobs=out.logprobs, ranks=out.ranks,
        )  # fmt: skip
        program.add("top_logprobs", top, "prompt_rows", ROOM)
        pack = PackLogprobsV1(
            slot_order=slots, num_top=self._prompt_top, ids=out.ids, logprobs=out.logprobs, ranks=out.ranks,
            extra=self._position, drafts=None, draft_logprobs=None, record=out.record, flag=int(Flag.PROMPT),
        )  # fmt: skip
        program.add("pack_logprobs", pack, "prompt_rows", ROOM)

    def append_drafts(
        self, program: ProgramBuilder, logits: Buffer, row_slot: Buffer, tokens: Buffer, *, drawn: bool, unit: Unit, room: str
    ) -> None:
        """Append, behind the choice of drafts, the filing of their log probabilities; `drawn`: of slots that sample, and `logits`
        holds the probabilities that their drafts were drawn with."""
        file = DraftLogprobsV1(
            logits=logits, row_slot=row_slot, tokens=tokens, draft_len=self._state.draft_len,
            num_top=self._drawn_top if drawn else self._num_top,
            draft_logprobs=self._draft_logprobs, given="probs" if drawn else "logits",
        )  # fmt: skip
        program.add("draft_logprobs", file, unit, room)

    # -- down and up -------------------------------------------------------------------------------
    def upload(self, stream: Stream, plan: StepPlan) -> None:
        """Enqueue the wishes of a plan, unless the device has them."""
        landing = self._ring[plan.step_id % len(self._ring)]
        self._upload(stream, landing, plan.num_top, self._num_top)
        self._upload(stream, landing, plan.prompt_top, self._prompt_top)
        if self._drawn_top is not self._num_top:
            self._upload(stream, landing, plan.drawn_top, self._drawn_top)

    def _upload(self, stream: Stream, landing: Mapping[str, Staging], wishes: Array | None, buffer: Buffer) -> None:
        sent = self._sent.get(buffer.name)
        if wishes is None or wishes is sent:
            return
        self._sent[buffer.name] = wishes
        if sent is None or not np.array_equal(wishes, sent):
            landing[buffer.name].array[:] = wishes
            self._device.upload(stream, buffer, landing[buffer.name], len(wishes))

    def void(self) -> None:
        """The device has failed: the wishes that it was sent may be lost, and no record is on its way."""
        self._sent.clear()
        self._free.extend(landing for landing in self._in_flight if landing is not None)
        self._in_flight.clear()

    def download(self, stream: Stream, plan: StepPlan) -> None:
        """Enqueue the copies of the records, as long as they can be."""
        if plan.slots is not self._slots:
            self._slots, self._expected = plan.slots, self._expect(plan)
        expected = self._expected
        if expected is None:
            self._in_flight.append(None)
            return
        landing = self._free.pop()  # the one that was read last: its memory is warm
        self._in_flight.append(landing)
        if landing.expected is not expected:
            landing.expect(expected, self._sources)
        for target, record, words in landing.copies:
            self._device.download(stream, target, record, words)

    def collect(self) -> PackedLogprobs | None:
        """The records of the oldest step in flight, whose event has completed, unread, where they landed; copies of them where
        too few landings would be left for the steps to come."""
        landing = self._in_flight.popleft()
        if landing is None or len(self._free) >= self._depth + 1:
            return landing
        tokens, prompt = (None if view is None else view.copy() for view in (landing.tokens, landing.prompt))
        landing.give_back()
        return PackedLogprobs(landing.expected, tokens, prompt, landing.counts.copy())

    def _expect(self, plan: StepPlan) -> Expected | None:
        """The records of a plan's step; None where it brings none."""
        top, prompt_top, limits = plan.num_top, plan.prompt_top, self._limits
        tokens = prompt = None
        if top is not None:
            wishes = top[plan.slots]
            count, columns = int((wishes >= 0).sum()), int(wishes.max()) + 1
            tokens = Wanted(int(Flag.TARGET), columns, limits.window, count, limits.max_seqs, limits.vocab_size)
        if prompt_top is not None:
            columns = int(prompt_top[plan.slots].max()) + 1
            prompt = Wanted(int(Flag.PROMPT), columns, 1, plan.num_prompt_rows, limits.max_seqs, limits.vocab_size)
        if tokens is None and prompt is None:
            return None
        return Expected(tokens, prompt, plan.slots, top, prompt_top)
