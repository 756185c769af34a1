"""Host features for tests: two proposers that draft on the host, and a rule for texts that masks logits.

One proposer works like a suffix proposer and guesses after the target's launch (variable width, `previous_tokens`), the other
waits for the exact tokens and always fills its width (`exact_lengths`); the mask needs the drafts of the step, too. The tests of
`tests/step` name this file as a plugin to have the proposers. What a run must show is in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from polydraft import hookimpl
from polydraft.device import Array
from polydraft.program.declare import StepBuffer
from polydraft.program.host_inputs import HostView, Needs
from polydraft.program.program import ProgramBuilder
from polydraft.proposers import ProposerContext
from polydraft.proposers.base import Drafting, Factory
from polydraft.sentinels import Finish

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
    buffers: Sequence[StepBuffer] = ()
    inputs: Sequence[str] = ()

    def append(self, program: ProgramBuilder) -> None:
        del program

    def reset(self) -> None:
        """Every step fills all of it anyway."""


class Guesses(_Feature):
    """What the text may go on with behind the tokens known before the step: a window, and the drafts behind it."""

    name = "guesses"
    needs: Needs = "previous_tokens"

    def __init__(self, context: ProposerContext) -> None:
        self.buffers = (
            StepBuffer("guess", f"B {context.limits.window + context.limits.num_drafts}", initial=0),
            StepBuffer("guess_start", "B", initial=0),
            StepBuffer("guess_len", "B", initial=0),
        )
        self.inputs = ("guess", "guess_start", "guess_len")

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        for array in arrays.values():
            array[:] = 0
        for i, slot in enumerate(view.plan.slots.tolist()):
            known = int(view.slots.num_known[slot])
            guess = run_on(view.slots.tokens[slot, :known].tolist(), arrays["guess"].shape[1])
            arrays["guess"][i, : len(guess)], arrays["guess_start"][i], arrays["guess_len"][i] = guess, known, len(guess)
        return len(arrays["guess_start"])


class HostSuffixProposer:
    """Drafts from what the text said before, worked out on the host while the target's pass runs; as many as hold."""

    name = "host-suffix"
    needs: Needs = "previous_tokens"
    buffers = Drafting.buffers

    def __init__(self, context: ProposerContext) -> None:
        self.features = (Guesses(context),)

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        program.add("begin_draft", "seqs", "begin_draft", num_drafts=num_drafts)
        if num_drafts:
            program.add("align_drafts", "seqs", "draft 0")


class Exact(_Feature):
    """As many drafts as each request has room for, straight into the state of its slot."""

    name = "exact drafts"
    needs: Needs = "exact_lengths"
    inputs = ("drafts", "draft_len")

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
        self.features = (Exact(),)

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        del program


class NoRepeats(_Feature):
    """A rule for texts, as a grammar is one: behind a token t only tokens of another remainder by 3 may follow. What it adds to
    logits goes by logit row, so it has to know every draft of the step and every request that has ended."""

    name: ClassVar[str] = "no repeats"
    needs: ClassVar[Needs] = "previous_tokens"
    reads_drafts = True
    buffers = (StepBuffer("mask", "NL V", "f32", initial=0),)
    inputs = ("mask",)

    def __init__(self, context: ProposerContext) -> None:
        del context

    def append(self, program: ProgramBuilder) -> None:
        program.add("residual_add", "logit_rows", "verify", x="logits", y="mask")

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
        if t.draining[slot] and not (request and request.finish_reason == Finish.STOP.name.lower() and request.params.stop):
            continue  # the device knows as well: no rows
        if plan.decode[i]:
            found += [int(t.tokens[slot, known - 1]), *view.drafts[slot, : min(view.draft_len[slot], plan.rows[i] - 1)].tolist()]
        elif plan.emits[i]:
            found.append(int(t.tokens[slot, known - 1]))
    return found


class Watcher(_Feature):
    """Brings nothing; writes down what it was told, by step."""

    def __init__(self, needs: Needs, seen: list[Any]) -> None:
        self.name, self.needs, self._seen, self.voided = f"watcher of {needs}", needs, seen, 0
        self.buffers = (StepBuffer(f"known.{needs}", "B", initial=0),)
        self.inputs = (f"known.{needs}",)

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        ids = view.plan.slots
        self._seen.append((view.plan.step_id, ids.copy(), view.slots.num_known[ids].copy(), view.most_known.copy()))
        (known,) = arrays.values()
        known[:] = 0
        return len(known)

    def reset(self) -> None:
        self.voided += 1


class Watching:
    """The factory of a watcher."""

    def __init__(self, needs: Needs) -> None:
        self.name, self.needs = f"watcher of {needs}", needs
        self.seen: list[Any] = []

    def __call__(self, context: ProposerContext) -> Watcher:
        del context
        return Watcher(self.needs, self.seen)


@hookimpl
def polydraft_proposers() -> list[tuple[str, Factory]]:
    """Add both proposers."""
    return [("host-suffix", HostSuffixProposer), ("host-fixed", HostFixedProposer)]
