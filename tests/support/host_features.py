"""Features of the host, as doubles: two proposers that draft on the host, and a rule for texts that masks logits.

Owns a suffix-style proposer that guesses behind the target's launch (variable width, `previous_tokens`), one that waits for the
exact tokens and always fills its width (`exact_lengths`), and a mask that needs the drafts of the step, too.
Called by the tests of `tests/step`, which name this file as a plugin to have the proposers.
Never compares: what a run must show is in its test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from polydraft import hookimpl
from polydraft.contracts import AlignDraftsV1, BeginDraftV1, ResidualAddV1
from polydraft.device import Array, Buffer
from polydraft.proposers import ProposerContext, ProposerShape
from polydraft.runtime.host_inputs import HostView, Needs
from polydraft.runtime.program import ProgramBuilder
from polydraft.sentinels import Finish


def _ints(context: ProposerContext, name: str, *shape: int) -> Buffer:
    buffer = context.device.empty(name, shape, "i32")
    context.device.load(buffer, np.zeros(shape, np.int32))
    return buffer


CORPUS: list[tuple[int, ...]] = []
"""Texts of earlier requests, in which both proposers look as well; tests put some there."""


def run_on(text: Sequence[int], size: int) -> list[int]:
    """What follows the end of the text where that occurs in the corpus or earlier in the text, again and again; as far as it
    does."""
    known, found = list(text), list[int]()
    while len(found) < size:
        places = (
            (length, source, start + length)
            for length in (3, 2)
            for source in (*CORPUS, known)
            for start in range(len(source) - length)
            if tuple(source[start : start + length]) == tuple(known[-length:])
        )
        place = next(places, None)
        if place is None:
            break
        found.append(place[1][place[2]])
        known.append(found[-1])
    return found


class _Feature:
    """What all of them share: nothing is done to logits."""

    reads_drafts = False

    def append(self, program: ProgramBuilder) -> None:
        del program

    def void(self) -> None:
        """Every step fills all of it anyway."""


class Guesses(_Feature):
    """What the text may go on with behind the tokens known before the step: a window, and the drafts behind it."""

    name = "guesses"
    needs: Needs = "previous_tokens"

    def __init__(self, context: ProposerContext) -> None:
        b, size = context.limits.max_seqs, context.limits.window + context.limits.num_drafts
        self.inputs: Mapping[str, Buffer] = {
            "guess": _ints(context, "host.guess", b, size),
            "start": _ints(context, "host.guess_start", b),
            "len": _ints(context, "host.guess_len", b),
        }

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        arrays["guess"][:], arrays["start"][:], arrays["len"][:] = 0, 0, 0
        for i, slot in enumerate(view.plan.slots.tolist()):
            known = int(view.slots.num_known[slot])
            guess = run_on(view.slots.tokens[slot, :known].tolist(), arrays["guess"].shape[1])
            arrays["guess"][i, : len(guess)], arrays["start"][i], arrays["len"][i] = guess, known, len(guess)
        return len(arrays["start"])


class HostSuffixProposer:
    """Drafts from what the text said before, worked out on the host while the target's pass runs; as many as hold."""

    name = "host-suffix"
    needs: Needs = "previous_tokens"

    def __init__(self, context: ProposerContext) -> None:
        self.shape = ProposerShape(max_width=context.limits.num_drafts, fixed=False, one_call=True)
        self._state, self._step = context.state, context.step
        self._guesses = Guesses(context)
        self.features = (self._guesses,)
        b = context.limits.max_seqs
        self._slot, self._position, self._budget = (_ints(context, f"host.{n}", b) for n in ("slot", "position", "budget"))

    def append(self, program: ProgramBuilder, *, sampling: bool) -> None:
        del sampling
        s, t, guess = self._state, self._step, self._guesses.inputs
        begin = BeginDraftV1(
            slot_order=t.slot_order, seq_len=t.seq_len, phase=s.phase, kv_len=s.kv_len, prompt_len=s.prompt_len,
            num_generated=s.num_generated, max_total=s.max_total, drafts=s.drafts, draft_len=s.draft_len,
            draft_slot=self._slot, draft_position=self._position, draft_budget=self._budget,
        )  # fmt: skip
        program.add("begin_draft", begin, "seqs", "begin_draft")
        align = AlignDraftsV1(
            draft_slot=self._slot, draft_budget=self._budget, prompt_len=s.prompt_len, num_generated=s.num_generated,
            tokens=s.tokens, guess=guess["guess"], guess_start=guess["start"], guess_len=guess["len"], drafts=s.drafts,
            draft_len=s.draft_len,
        )  # fmt: skip
        program.add("align_drafts", align, "seqs", "draft 0")


class Exact(_Feature):
    """As many drafts as each request has room for, straight into the state of its slot."""

    name = "exact drafts"
    needs: Needs = "exact_lengths"

    def __init__(self, context: ProposerContext) -> None:
        self.inputs: Mapping[str, Buffer] = {"drafts": context.state.drafts, "draft_len": context.state.draft_len}

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        t, width = view.slots, arrays["drafts"].shape[1]
        arrays["drafts"][:], arrays["draft_len"][:] = -1, 0
        for slot in view.plan.slots[view.plan.decode].tolist():
            known = int(t.num_known[slot])
            room = max(0, min(width, int(t.max_total[slot]) - known - 1))
            text = t.tokens[slot, :known].tolist()
            drafts = (run_on(text, room) + [text[-1]] * room)[:room]
            arrays["drafts"][slot, :room], arrays["draft_len"][slot] = drafts, room
        return len(arrays["draft_len"])


class HostFixedProposer:
    """Always fills its width, from the exact tokens of the step before; costs all overlap."""

    name = "host-fixed"
    needs: Needs = "exact_lengths"

    def __init__(self, context: ProposerContext) -> None:
        self.shape = ProposerShape(max_width=context.limits.num_drafts, fixed=True, one_call=True)
        self.features = (Exact(context),)

    def append(self, program: ProgramBuilder, *, sampling: bool) -> None:
        del program, sampling


class NoRepeats(_Feature):
    """A rule for texts, as a grammar is one: behind a token t only tokens of another remainder by 3 may follow. What it adds to
    logits goes by logit row, so it has to know every draft of the step and every request that has ended."""

    name: ClassVar[str] = "no repeats"
    needs: ClassVar[Needs] = "previous_tokens"
    reads_drafts = True

    def __init__(self, context: ProposerContext) -> None:
        self._step, shape = context.step, context.step.logits.shape
        self._mask = context.device.empty("host.mask", shape, "f32")
        context.device.load(self._mask, np.zeros(shape, np.float32))
        self.inputs: Mapping[str, Buffer] = {"mask": self._mask}

    def append(self, program: ProgramBuilder) -> None:
        program.add("residual_add", ResidualAddV1(x=self._step.logits, y=self._mask), "logit_rows", "verify")

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        mask = arrays["mask"]
        mask[:] = 0
        remainders = np.arange(mask.shape[1]) % 3
        for row, last in enumerate(_last_tokens(view)):
            mask[row] = np.where(remainders == last % 3, -np.inf, 0)
        return len(mask)


def _last_tokens(view: HostView) -> list[int]:
    """The token before each logit row of the step."""
    t, plan, found = view.slots, view.plan, []
    for i, slot in enumerate(plan.slots.tolist()):
        known, request = int(t.num_known[slot]), t.request[slot]
        if t.leaving[slot] and not (request and request.finish_reason == Finish.STOP.name.lower() and request.params.stop):
            continue  # the device knows as well: no rows
        if plan.decode[i]:
            found += [int(t.tokens[slot, known - 1]), *view.drafts[slot, : view.draft_len[slot]].tolist()]
        elif plan.emits[i]:
            found.append(int(t.tokens[slot, known - 1]))
    return found


class Watcher(_Feature):
    """Brings nothing; writes down what it was told, by step."""

    def __init__(self, needs: Needs, seen: list[Any], context: ProposerContext) -> None:
        self.name, self.needs, self._seen, self.voided = f"watcher of {needs}", needs, seen, 0
        self.inputs: Mapping[str, Buffer] = {"known": _ints(context, f"host.{needs}", context.limits.max_seqs)}

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        ids = view.plan.slots
        self._seen.append((view.plan.step_id, ids.copy(), view.slots.num_known[ids].copy(), view.most_known.copy()))
        arrays["known"][:] = 0
        return len(arrays["known"])

    def void(self) -> None:
        self.voided += 1


class Watching:
    """The factory of a watcher."""

    def __init__(self, needs: Needs) -> None:
        self.name, self.needs = f"watcher of {needs}", needs
        self.seen: list[Any] = []

    def __call__(self, context: ProposerContext) -> Watcher:
        return Watcher(self.needs, self.seen, context)


@hookimpl
def polydraft_proposers(register: Callable[..., None]) -> None:
    """Add both proposers."""
    register("host-suffix", HostSuffixProposer)
    register("host-fixed", HostFixedProposer)
