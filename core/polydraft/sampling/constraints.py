"""Constraints on output: grammars, as masks over the rows of every window.

A request with a constraint gets a binding (`grammars.py`), which is asked whenever a step of the request has been applied: what
does each position of the next window allow, given the drafts that wait? Grammars are followed by processes of their own, so
asking costs the engine a message. The host feature here takes the answers in the middle of the next step and uploads bits. Text
is not repaired afterwards: what a mask forbids is never chosen, with drafts or without.

A step waits for masks, but not long. A request whose masks are late leaves the step as one that is preempted does: it keeps
its tokens, and comes back when the masks are there. Until its grammar is quick again, a step takes it only with masks that are
there already.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from polydraft.device import Array
from polydraft.errors import RequestError
from polydraft.models.tokenizer import Tokenizer
from polydraft.program.declare import StepBuffer
from polydraft.program.host_inputs import HostView, Needs
from polydraft.program.program import ProgramBuilder
from polydraft.sampling.automaton import ALL
from polydraft.sampling.grammars import Binding, Grammars
from polydraft.sampling.thinking import Markers
from polydraft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from polydraft.host.request import Request
    from polydraft.proposers.base import ProposerContext

WAIT_SHARE: Final = 0.4
"""Of all time, what steps may wait for masks: nobody else becomes slower than by that."""
MOST_WAIT_S: Final = 0.02
"""Seconds that one step may wait for masks, when steps did not wait before."""


class Constraints:
    """Binds requests to grammars, and makes the host feature that asks those. One an engine; raises `CapabilityError` where the
    library for grammars is not installed when a grammar is first asked for. `thinking`: what is around it, where a text may
    think; a grammar binds the reply behind it."""

    name = "constraints"
    needs: Needs = "previous_tokens"

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, eos: Sequence[int], thinking: Markers | None = None) -> None:
        self._thinking = thinking
        self._grammars = Grammars(tokenizer.directory / "tokenizer.json", vocab, eos)
        self._changed: list[Binding] = []
        self._since, self._allowed_s = time.perf_counter(), MOST_WAIT_S
        self.late: list[int] = []
        """Slots whose masks were not there when a step needed them; the engine takes them out of the step."""

    def __call__(self, context: ProposerContext) -> ConstraintFeature:
        """The feature, for an engine's runner."""
        return ConstraintFeature(context, self)

    def bind(self, params: SamplingParams, prompt_ids: Sequence[int]) -> Binding | None:
        """What binds a request, None where it asks for nothing. Raises `RequestError` for what can be seen to be wrong without
        its grammar, and `CapabilityError` where there are no grammars."""
        if not isinstance(params.constraint, tuple):
            return None
        thinking = None if self._thinking is None else self._thinking.of(params)
        binding = self._grammars.bind(*params.constraint, thinking, prompt_ids)
        binding.ask((), ())
        return binding

    def compile(self, binding: Binding, *, wait: bool) -> None:
        """Raise `RequestError` where the constraint of a request cannot be used, as far as that is known; `wait` until it is."""
        while wait and not binding.compiled:
            self._changed += self._grammars.poll(None)
        if binding.error:
            raise RequestError(binding.error, "constraint")

    def changed(self, wait_s: float = 0.0) -> list[Binding]:
        """Bindings that have been answered, or failed, since the last time; waits so long for one at most."""
        found, self._changed = self._changed + self._grammars.poll(0.0 if self._changed else wait_s), []
        return found

    def wait(self, bindings: Collection[Binding]) -> None:
        """Wait for masks, as long as a step may."""
        begin = time.perf_counter()
        self._allowed_s = min(self._allowed_s + WAIT_SHARE * (begin - self._since), MOST_WAIT_S)
        self._since = now = begin
        while not all(one.ready for one in bindings) and now < begin + self._allowed_s:
            self._changed += self._grammars.poll(begin + self._allowed_s - now)
            now = time.perf_counter()
        self._allowed_s -= now - begin

    def close(self) -> None:
        """End the processes of grammars."""
        self._grammars.close()


class ConstraintFeature:
    """Masks of every window row, uploaded in the middle of a step; a sequence without a constraint costs a zero."""

    name = Constraints.name
    needs: Needs = Constraints.needs
    reads_drafts = for_bound = True

    def __init__(self, context: ProposerContext, constraints: Constraints) -> None:
        words = -(-context.limits.vocab_size // 32)
        self.buffers = (StepBuffer("masks", f"B W {words}", "u32", initial=0), StepBuffer("masked", "B", initial=0))
        self.inputs = ("masks", "masked")
        self._constraints = constraints
        self._uploaded = False

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        """Masks of the constrained sequences of this step; nothing where there is none and the device knows. What a sequence
        whose masks are late or failed is told here does not matter: the engine takes no token of it."""
        t, slots = view.slots, view.plan.slots
        places = (t.bound[slots] & view.plan.emits & ~t.draining[slots]).nonzero()[0]
        before, self._uploaded = self._uploaded, bool(places.size)
        if not places.size and not before:
            return 0
        masked, masks = arrays["masked"], arrays["masks"]
        masked[:], masks[:] = 0, ALL  # whole arrays: a launch may read as many rows as there are slots
        bound = [(i, slot, request) for i, slot in zip(places.tolist(), slots[places].tolist(), strict=True)
                 if (request := t.request[slot]) is not None]  # fmt: skip
        self._constraints.wait([request.binding for *_, request in bound if request.binding is not None])
        for i, slot, request in bound:
            if request.binding is None or request.binding.error:
                continue
            if not request.binding.ready:
                self._constraints.late.append(slot)
                continue
            drafts = min(view.draft_len[slot], view.plan.rows[i] - 1) if view.plan.decode[i] else 0
            masked[i] = self._fill(view, slot, request, request.binding, masks[i, : drafts + 1])
        return len(masked)

    def reset(self) -> None:
        """The device has failed: masks that it was sent may be lost, and so may their being taken back."""
        self._uploaded = True

    @staticmethod
    def _fill(view: HostView, slot: int, request: Request, binding: Binding, rows: Array) -> int:
        t = view.slots
        known = int(t.num_known[slot] - t.prompt_len[slot])
        single = binding.take(rows)
        request.forced = {place for place in request.forced if place < known}
        request.forced |= {known + place for place, alone in enumerate(single) if alone}
        t.held[slot] = not binding.quick
        return len(rows)

    def append(self, program: ProgramBuilder) -> None:
        """One launch after the processing of the target's logits."""
        program.add("mask_logits", "seqs", "verify")
