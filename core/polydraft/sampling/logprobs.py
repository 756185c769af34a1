"""Log probabilities on the device: their buffers, their launches in a step, and the records that come back from it.

The runner builds it only where the engine reports log probabilities. What each slot requests goes down with the plan, so that a
captured graph serves any number of columns; one record of exactly the requested columns comes up. Requests themselves are not
known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits, Unit
from polydraft.contracts.layout import Flag, record_words
from polydraft.device import Array, Buffer, Staging, Stream
from polydraft.errors import CapabilityError
from polydraft.plugins.program_pass import Node
from polydraft.program.declare import Admission, Column, StepBuffer
from polydraft.program.packed import Expected, PackedLogprobs, Wanted
from polydraft.program.plan import StepPlan
from polydraft.program.program import Memory, ProgramBuilder
from polydraft.sentinels import NO_TOKEN

KEEP = "keep_logits"
CONTRACTS = (KEEP, "top_logprobs", "pack_logprobs", "pack_prompt_rows")
"""What a backend needs for an engine that reports log probabilities, and for nothing else."""
FILTERS = ("filter_probs", "forbid_filtered")
"""And besides for processed ones of requests that sample."""
OF_DRAFTS = ("draft_logprobs", "draft_top_logprobs")
"""And for those of drafts."""
STAGE = "logprobs"
PROMPT_ROWS: Unit = "prompt_rows"


def _results(of: str) -> dict[str, str]:
    """What `top_logprobs` writes and `pack_logprobs` packs."""
    return {name: f"logprobs.{of}.{name}" for name in ("ids", "logprobs", "ranks")}


def refuse_lacking(providers: Mapping[str, Any], *, filters: bool, drafts: bool) -> None:
    """Raises `CapabilityError` naming the contracts that are not among `providers`; `filters`, `drafts`: those of `FILTERS`, of
    `OF_DRAFTS`, too."""
    wanted = (*CONTRACTS, *(FILTERS if filters else ()), *(OF_DRAFTS if drafts else ()))
    lacking = [name for name in wanted if name not in providers]
    if lacking:
        raise CapabilityError(
            f"log probabilities were asked for, but this backend has no {', '.join(lacking)}; leave --logprobs out, or use "
            "another backend"
        )


class _Landing(PackedLogprobs):
    """Pinned memory for the records of one step, which is handed on with them: views of it as long as those can be, and the
    copies that fill them, made anew when what is `expected` changes."""

    __slots__ = ("_pair", "copies")

    def __init__(self, pair: tuple[Staging, Staging], max_seqs: int, home: deque[_Landing]) -> None:
        super().__init__(_NOTHING, None, None, np.empty(max_seqs, np.int32), home)
        self._pair = pair
        self.copies: tuple[tuple[Staging, Buffer, int], ...] = ()

    def expect(self, expected: Expected, sources: Sequence[Buffer]) -> None:
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


def _top(admission: Admission) -> int:
    """Most likely tokens that a request wants beside each, -1: no log probabilities."""
    count = admission.params.logprobs
    return -1 if count is None else count


def _drawn_top(admission: Admission) -> int:
    return _top(admission) if admission.params.temperature > 0 else -1


def _prompt_top(admission: Admission) -> int:
    count = admission.params.prompt_logprobs
    return -1 if count is None else count


class Logprobs:
    """Log probabilities of an engine that reports them: what they keep on the device, their launches, and their records.

    `raw`: of the logits before penalties, biases, forbidden tokens and temperature; else after them, and of requests that sample
    after top-k, top-p and min-p. Prompt tokens are always reported raw. `draws`: drafts of slots that sample are drawn from
    distributions that are kept. `drafts`: those of drafts are reported, too, with as many of the most likely tokens; else none of
    their logits are kept, and a backend may choose them without computing all."""

    def __init__(self, limits: Limits, *, raw: bool, verify: str, draws: bool, drafts: bool = False) -> None:
        self._limits, self._raw, self.drafts = limits, raw, drafts
        self._keeps = raw or verify != "greedy"
        draws = draws and drafts
        self._drawn = "drawn_top" if draws else "num_top"
        self.columns = (
            Column("num_top", "Most likely tokens wanted beside each; -1: no log probabilities.", empty=-1, value=_top),
            Column("prompt_top", "The same of tokens of the prompt.", empty=-1, value=_prompt_top),
            *((Column("drawn_top", "`num_top` of slots that sample.", empty=-1, value=_drawn_top),) if draws else ()),
        )
        words = {
            "window": record_words(limits.max_seqs, limits.window, limits.max_logprobs + 1, drafts=drafts),
            "prompt": record_words(limits.max_logit_rows, 1, limits.max_logprobs + 1),
        }
        of_places = {"window": "B W", "prompt": "NL 1"}
        self.buffers = [
            *(StepBuffer(f"logprobs.{of}.ids", f"{places} E") for of, places in of_places.items()),
            *(StepBuffer(f"logprobs.{of}.logprobs", f"{places} E", "f32") for of, places in of_places.items()),
            *(StepBuffer(f"logprobs.{of}.ranks", places) for of, places in of_places.items()),
            *(StepBuffer(f"logprobs.{of}.record", str(count)) for of, count in words.items()),
            StepBuffer("draft_logprobs", "B K", "f32", initial=0),  # what no model drew is certain
            *(StepBuffer("draft_top_ids", "B K E", initial=NO_TOKEN) for _ in range(drafts)),  # a lookup has itself alone
            *(StepBuffer("draft_tops", "B K E", "f32", initial=0) for _ in range(drafts)),
            *(StepBuffer(name, "NL") for name in ("prompt_row", "prompt_slot", "prompt_position")),
            StepBuffer("prompt_token", "NL 1"),
            StepBuffer("prompt_start", "NL", initial=np.arange(limits.max_logit_rows)),  # prompt row i is logit row i
            *((StepBuffer("kept", "NL V", "f32"),) if self._keeps else ()),
        ]

    def attach(self, memory: Memory, depth: int) -> None:
        """Allocate pinned memory for the records, once the buffers are there; `depth`: steps in flight."""
        self._device, self._depth = memory.device, depth
        self._sources = [memory.buffers[f"logprobs.{of}.record"] for of in ("window", "prompt")]
        self._free: deque[_Landing] = deque()
        for i in range(depth + 1 + SPARE):
            pair = self._like(self._sources[0], i), self._like(self._sources[1], i)
            self._free.append(_Landing(pair, self._limits.max_seqs, self._free))
        self._in_flight: deque[_Landing | None] = deque()
        """Of every step in flight, oldest first."""
        self._slots: Array | None = None
        self._expected: Expected | None = None
        """What steps with these slots bring."""

    def _like(self, buffer: Buffer, index: int) -> Staging:
        return self._device.staging(f"landing{index}.{buffer.name}", buffer.shape, "i32")

    # -- launches ----------------------------------------------------------------------------------
    def keep(self, program: ProgramBuilder, raw: int) -> None:
        """Add the copy of the target's logits that are to be reported, where they are overwritten before the step knows its
        tokens: of the model's own, which are there behind the first `raw` launches, or of what the others have made of them."""
        changed = len(program.nodes) > raw
        if program.kind.logprobs and (program.kind.rule == "rejection" or (self._raw and changed)):
            program.add(KEEP, "logit_rows", STAGE, row_slot="logit_slot")
            if self._raw:
                program.nodes.insert(raw, program.nodes.pop())

    def append(self, program: ProgramBuilder) -> None:
        """Append, after the commit, the launches that report the tokens of the step."""
        out, kept = _results("window"), any(isinstance(node, Node) and node.contract == KEEP for node in program.nodes)
        if not self._raw and program.kind.rule != "greedy":
            self._filter(program, kept=kept)
            kept = True
        program.add(
            "top_logprobs", "seqs", STAGE, logits="kept" if kept else "logits",
            temperature=None if self._raw else "temperature", **out,
        )  # fmt: skip
        of_drafts = {name: name if self.drafts else None for name in ("draft_top_ids", "draft_tops")}
        program.add(
            "pack_logprobs", "seqs", STAGE, extra="drafted", drafts="drafts", draft_logprobs="draft_logprobs",
            record="logprobs.window.record", flag=int(self._flag), **of_drafts, **out,
        )  # fmt: skip

    def _filter(self, program: ProgramBuilder, *, kept: bool) -> None:
        """Append what leaves in `kept` the processed logits of tokens that the filters keep. `kept`: whether they are there
        already, and `logits` holds the probabilities that were left; else `logits`, of which tokens were chosen, is used up."""
        if not kept:
            program.add(KEEP, "logit_rows", STAGE, row_slot="logit_slot")
            program.add("filter_probs", "logit_rows", STAGE, row_slot="logit_slot")
        program.add("forbid_filtered", "logit_rows", STAGE, logits="kept", probs="logits", row_slot="logit_slot")

    def append_prompt(self, program: ProgramBuilder, head: Callable[[ProgramBuilder, str, Unit], None], num_valid: int) -> None:
        """Append, after everything that needs the step's logits, the launches that report prompt tokens. `head(program, rows,
        unit)` runs the target's head over packed rows into `logits`."""
        out, unit = _results("prompt"), PROMPT_ROWS
        program.add("pack_prompt_rows", unit, STAGE, num_top="prompt_top")
        head(program, "prompt_row", unit)
        program.add("process_logits", unit, STAGE, row_slot="prompt_slot", num_valid=num_valid)
        program.add(
            "top_logprobs", unit, STAGE, slot_order="prompt_slot", logit_start="prompt_start", out_tokens="prompt_token",
            num_top="prompt_top", temperature=None, **out,
        )  # fmt: skip
        program.add(
            "pack_logprobs", unit, STAGE, slot_order="prompt_slot", num_top="prompt_top", extra="prompt_position", drafts=None,
            draft_logprobs=None, draft_top_ids=None, draft_tops=None, record="logprobs.prompt.record", flag=int(Flag.PROMPT),
            **out,
        )  # fmt: skip

    def append_drafts(self, add: Callable[..., None], tokens: str, *, drawn: bool) -> None:
        """Append, after the choice of drafts over some rows of logits, the filing of their log probabilities; `drawn`: of slots
        that sample, and the logits are the distributions that they were drawn with. `add(contract, **fields)` launches over those
        rows."""
        for contract in OF_DRAFTS:
            add(contract, tokens=tokens, num_top=self._drawn if drawn else "num_top", given="probs" if drawn else "logits")

    @property
    def _flag(self) -> Flag:
        return Flag.DRAFTS if self.drafts else Flag.TARGET

    # -- up ----------------------------------------------------------------------------------------
    def reset(self) -> None:
        """The device has failed: no record is on its way."""
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
            requested = top[plan.slots]
            count, columns = int((requested >= 0).sum()), int(requested.max()) + 1
            sizes = limits.window, count, limits.max_seqs, limits.vocab_size
            tokens = Wanted(int(self._flag), columns, *sizes, drafts=self.drafts)
        if prompt_top is not None:
            columns = int(prompt_top[plan.slots].max()) + 1
            prompt = Wanted(int(Flag.PROMPT), columns, 1, plan.num_prompt_rows, limits.max_seqs, limits.vocab_size)
        if tokens is None and prompt is None:
            return None
        return Expected(tokens, prompt, plan.slots, top, prompt_top)
