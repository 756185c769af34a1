"""Constraints on output: grammars and the length of thinking, as masks over the rows of every window.

A request with a constraint gets an automaton. In the middle of each step the host feature here asks it what each position of the
window allows, given the drafts before it, and uploads bits. Text is not repaired afterwards: what a mask forbids is never chosen,
with drafts or without.

An automaton follows committed tokens only. For the positions of a window it tries the drafts one after the other and takes them
back, so that a rejected draft leaves no trace. A draft that its own position forbids ends the trying: the target cannot choose
it, so no row after it counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from polydraft.device import Array
from polydraft.errors import CapabilityError, RequestError
from polydraft.models.tokenizer import Tokenizer
from polydraft.program.declare import StepBuffer
from polydraft.program.host_inputs import HostView, Needs
from polydraft.program.program import ProgramBuilder
from polydraft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from polydraft.host.request import Request
    from polydraft.proposers.base import ProposerContext

MOST_GRAMMARS: Final = 64
"""Compiled grammars that are kept for further requests."""
ALL: Final = np.uint32(0xFFFFFFFF)


class Phase(NamedTuple):
    """Where a text stands: `thinking` or not, tokens of it, how far the end of thinking is spelt, and tokens of the reply."""

    thinking: bool
    spent: int
    spelt: int
    replied: int


@dataclass(frozen=True)
class Thinking:
    """The length of thinking and of the reply after it. `start`, `end`: token ids that begin and end thinking; without `start`
    a text thinks from its beginning on. After `limit` thinking tokens the end is spelt out, after `reply` tokens the text
    ends."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    limit: int | None
    reply: int | None
    eos: int

    def first(self, prompt: Sequence[int]) -> Phase:
        """The phase after a prompt."""
        begun = not self.start or _last(prompt, self.start) > _last(prompt, self.end)
        return Phase(begun, 0, 0, 0)

    def forced(self, phase: Phase) -> int | None:
        """The only token that may come, or None where the phase leaves the choice."""
        if phase.thinking and self.limit is not None and phase.spent >= self.limit:
            return self.end[phase.spelt]
        if not phase.thinking and self.reply is not None and phase.replied >= self.reply:
            return self.eos
        return None

    def behind(self, phase: Phase, token: int) -> Phase:
        """The phase after one more token."""
        if not phase.thinking:
            return phase._replace(replied=phase.replied + 1)
        over = self.limit is not None and phase.spent >= self.limit
        spelt = phase.spelt + 1 if token == self.end[phase.spelt] else int(token == self.end[0])
        if spelt == len(self.end):
            return Phase(False, phase.spent, 0, 0)
        return phase._replace(spent=phase.spent + (not over), spelt=spelt)


def _last(text: Sequence[int], part: Sequence[int]) -> int:
    """Where `part` begins in `text` for the last time; -1 where it does not."""
    places = (i for i in range(len(text) - len(part), -1, -1) if part and tuple(text[i : i + len(part)]) == tuple(part))
    return next(places, -1)


class Automaton:
    """What a text allows next. `matcher`: of the grammar (`llguidance.LLMatcher`), None without one."""

    def __init__(self, matcher: Any, thinking: Thinking | None, prompt: Sequence[int], eos: Sequence[int]) -> None:
        self._matcher, self._thinking, self._eos = matcher, thinking, tuple(eos)
        self._phase = thinking.first(prompt) if thinking is not None else Phase(False, 0, 0, 0)
        self.consumed = 0
        """Committed tokens that it has followed."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Committed tokens."""
        for token in tokens:
            self._step(token)
        self.consumed += len(tokens)

    def _step(self, token: int) -> int:
        """One token; returns how many the matcher took."""
        in_reply = not self._phase.thinking
        if self._thinking is not None:
            self._phase = self._thinking.behind(self._phase, token)
        if self._matcher is None or not in_reply or self._matcher.is_stopped() or token in self._eos:
            return 0
        return int(self._matcher.consume_token(token))

    def fill(self, drafts: Sequence[int], rows: Array) -> list[bool]:
        """Write the masks of the places 0 to len(drafts) into `rows` [W, words]; returns of each place whether one token alone
        may come there. Leaves the automaton as it was."""
        before, taken, single = self._phase, 0, []
        for place in range(len(drafts) + 1):
            single.append(self._row(rows[place]))
            if place == len(drafts) or not _allows(rows[place], drafts[place]):
                rows[place + 1 :] = ALL
                break
            taken += self._step(drafts[place])
        if taken:
            self._matcher.rollback(taken)
        self._phase = before
        return single

    def _row(self, row: Array) -> bool:
        forced = self._thinking.forced(self._phase) if self._thinking is not None else None
        if forced is not None:
            _only(row, (forced,))
            return True
        if self._matcher is None or self._phase.thinking:
            row[:] = ALL
            return False
        from llguidance.numpy import fill_next_token_bitmask

        if self._matcher.is_stopped():
            _only(row, self._eos)
        else:
            fill_next_token_bitmask(self._matcher, row.view(np.int32)[None], 0)
            if self._matcher.is_error() or not row.any():
                _only(row, self._eos)
            elif any(_allows(row, token) for token in self._eos):
                for token in self._eos:
                    row[token // 32] |= np.uint32(1 << token % 32)
        return int(np.bitwise_count(row).sum() if hasattr(np, "bitwise_count") else np.unpackbits(row.view(np.uint8)).sum()) == 1


def _allows(row: Array, token: int) -> bool:
    return bool(int(row[token // 32]) >> (token % 32) & 1)


def _only(row: Array, tokens: Sequence[int]) -> None:
    row[:] = 0
    for token in tokens:
        row[token // 32] |= np.uint32(1 << token % 32)


class Constraints:
    """Makes automata of requests, and the host feature that asks them. One an engine; raises `CapabilityError` where the library
    for grammars is not installed when a grammar is first asked for."""

    name = "constraints"
    needs: Needs = "previous_tokens"

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, eos: Sequence[int], start: Sequence[int], end: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, tuple(eos)
        self._start, self._end = tuple(start), tuple(end)
        self._ll: Any = None
        self._grammars: dict[tuple[str, str], Any] = {}

    def __call__(self, context: ProposerContext) -> ConstraintFeature:
        """The feature, for an engine's runner."""
        return ConstraintFeature(context)

    def automaton(self, params: SamplingParams, prompt_ids: Sequence[int]) -> Automaton | None:
        """The automaton of a request, None where it asks for nothing. Raises `RequestError` for a constraint that is none."""
        if not params.constrained:
            return None
        if (params.thinking_limit is not None or params.reply_budget is not None) and not self._end:
            raise RequestError(
                "thinking_limit or reply_budget was given, but the engine does not know what ends thinking; give it think_end_ids"
            )
        thinking = None
        if self._end:
            eos = self._eos[0] if self._eos else 0
            thinking = Thinking(self._start, self._end, params.thinking_limit, params.reply_budget, eos)
        matcher = self._matcher(*params.constraint) if isinstance(params.constraint, tuple) else None
        return Automaton(matcher, thinking, prompt_ids, self._eos)

    def _matcher(self, kind: str, text: str) -> Any:
        if (kind, text) not in self._grammars:
            if len(self._grammars) >= MOST_GRAMMARS:
                self._grammars.clear()
            self._grammars[kind, text] = self._compile(kind, text)
        return self._grammars[kind, text].deep_copy()

    def _compile(self, kind: str, text: str) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise CapabilityError("grammars need the package llguidance; install it: pip install 'polydraft[grammar]'") from error
        if self._ll is None:
            file = self._tokenizer.directory / "tokenizer.json"
            try:
                self._ll = llguidance.LLTokenizer(str(file), n_vocab=self._vocab, eos_token=self._eos[0] if self._eos else None)
            except ValueError as error:
                raise RequestError(
                    f"grammars cannot be used with the tokenizer of this model: {error}; leave them out"
                ) from error
        make = llguidance.LLMatcher
        try:
            matcher = make(self._ll, _grammar(kind, text))
        except Exception as error:
            raise RequestError(f"the {kind} of the request cannot be used: {error}; correct it") from error
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())
            raise RequestError(f"the {kind} of the request cannot be used: {reason}; correct it")
        return matcher


def _grammar(kind: str, text: str) -> str:
    """A constraint in the library's own form; its converter reads EBNF as llama.cpp (GBNF) and xgrammar write it."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark, gbnf_to_lark

    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind in ("lark", "ebnf", "grammar"):
        convert = {"ebnf": gbnf_to_lark, "grammar": any_to_lark}.get(kind, str)
        return str(LLMatcher.grammar_from_lark(convert(text)))
    return str(LLMatcher.grammar_from_json_schema(text))


class ConstraintFeature:
    """Masks of every window row, uploaded in the middle of a step; a sequence without a constraint costs a zero."""

    name = Constraints.name
    needs: Needs = Constraints.needs
    reads_drafts = True

    def __init__(self, context: ProposerContext) -> None:
        words = -(-context.limits.vocab_size // 32)
        self.buffers = (StepBuffer("masks", f"B W {words}", "u32", initial=0), StepBuffer("masked", "B", initial=0))
        self.inputs = ("masks", "masked")
        self._uploaded = False

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        """Masks of the constrained sequences of this step; nothing where there is none and the device knows."""
        t, plan = view.slots, view.plan
        bound = [
            (i, slot, request)
            for i, slot in enumerate(plan.slots.tolist())
            if (request := t.request[slot]) is not None
            and request.automaton is not None
            and plan.emits[i]
            and not t.draining[slot]
        ]
        before, self._uploaded = self._uploaded, bool(bound)
        if not bound and not before:
            return 0
        masked, masks = arrays["masked"], arrays["masks"]
        masked[:], masks[:] = 0, ALL  # whole arrays: a launch may read as many rows as there are slots
        for i, slot, request in bound:
            drafts = view.drafts[slot, : min(view.draft_len[slot], plan.rows[i] - 1)].tolist() if plan.decode[i] else []
            masked[i] = self._fill(view, slot, request, drafts, masks[i])
        return len(masked)

    def reset(self) -> None:
        """The device has failed: masks that it was sent may be lost, and so may their being taken back."""
        self._uploaded = True

    @staticmethod
    def _fill(view: HostView, slot: int, request: Request, drafts: list[int], rows: Array) -> int:
        t, automaton = view.slots, request.automaton
        assert automaton is not None, "only constrained requests come here"
        begin = int(t.prompt_len[slot])
        known = int(t.num_known[slot]) - begin
        automaton.follow(t.tokens[slot, begin + automaton.consumed : begin + known].tolist())
        single = automaton.fill(drafts, rows)
        request.forced = {place for place in request.forced if place < known}
        request.forced |= {known + place for place, alone in enumerate(single) if alone}
        return len(drafts) + 1

    def append(self, program: ProgramBuilder) -> None:
        """One launch after the processing of the target's logits."""
        program.add("mask_logits", "seqs", "verify")
