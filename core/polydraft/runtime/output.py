"""Owns what a caller sees: results of requests, with their text in whole characters, made of what the engine hands over.

A `Converter` makes them once a batch, on any one thread but never in a step: numbers stay in the arrays they came in, and become
Python objects where somebody looks at them. It never looks at the device, and never changes a request that still runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from polydraft.device import Array
from polydraft.errors import RecordError
from polydraft.models.tokenizer import Tokenizer
from polydraft.runtime.provenance import StepLogprobs, TokenLogprobs, TokenRecord, file, lose, token_records
from polydraft.runtime.request import Request
from polydraft.runtime.taken import Ended, Taken, Text


@dataclass(frozen=True)
class RequestOutput:
    """One request's news. `text_delta`, `new_token_ids` and `new_rounds` since the last record; the rest is the whole so far,
    complete when `finished`."""

    id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    text_delta: str
    new_token_ids: tuple[int, ...]
    rounds: tuple[int, ...]
    new_rounds: tuple[int, ...]
    drafted: int
    finished: bool
    finish_reason: str | None
    error: str = ""
    """Why it ended with "error"."""
    ttft_s: float | None = None
    """Seconds from its arrival to its first token; None before."""
    latency_s: float | None = None
    """Seconds from its arrival to its end; None before."""
    round_drafts: tuple[int, ...] = ()
    """Drafts that each round verified."""
    forced: tuple[int, ...] = ()
    """Places of tokens that a constraint left no choice for, ascending."""
    logprobs: tuple[StepLogprobs, ...] = ()
    """Of every step so far that emitted tokens; () where none were asked for. `tokens` has them by token."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Of each prompt token, None for the first; None where none were asked for, and before all are known."""

    @property
    def accepted(self) -> int:
        """Drafts that became output."""
        return sum(self.rounds)

    @property
    def tokens(self) -> tuple[TokenRecord, ...]:
        """All tokens so far with who proposed them and what is known of their probability; made when asked for."""
        return token_records(self.token_ids, self.rounds, self.round_drafts, self.logprobs, self.forced)

    @property
    def new_tokens(self) -> tuple[TokenRecord, ...]:
        """Likewise of `new_token_ids`."""
        start = len(self.token_ids) - len(self.new_token_ids)
        return token_records(self.token_ids, self.rounds, self.round_drafts, self.logprobs, self.forced, start)


@dataclass(slots=True)
class Told:
    """What was told of a request so far."""

    text: Text
    token_ids: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    round_drafts: list[int] = field(default_factory=list)
    steps: list[StepLogprobs] = field(default_factory=list)
    length: int = 0
    """Characters."""


@dataclass(slots=True)
class Piece:
    """What is new of one request, for whoever makes a result or a record of it, at once: `told` goes on with the next piece.

    Arrays are [t] and [r]; `forced`: places among all tokens, ascending; `steps`: log probabilities of the steps that brought
    the new tokens."""

    request: Request
    told: Told
    tokens: Array
    rounds: Array
    round_drafts: Array
    forced: tuple[int, ...]
    text: str
    new_text: str
    steps: Sequence[StepLogprobs]
    finished: bool

    def output(self) -> RequestOutput:
        """As the offline interface gives it."""
        r, told = self.request, self.told
        return RequestOutput(
            id=r.id,
            prompt_ids=r.prompt_ids,
            token_ids=tuple(told.token_ids),
            text=self.text,
            text_delta=self.new_text,
            new_token_ids=tuple(self.tokens.tolist()),
            rounds=tuple(told.rounds),
            new_rounds=tuple(self.rounds.tolist()),
            drafted=r.drafted if self.finished else sum(told.round_drafts),
            finished=self.finished,
            finish_reason=r.finish_reason if self.finished else None,
            error=r.error if self.finished else "",
            ttft_s=None if r.first_token_s is None else r.first_token_s - r.arrival_s,
            latency_s=r.finish_s - r.arrival_s if self.finished and r.finish_s is not None else None,
            round_drafts=tuple(told.round_drafts),
            forced=tuple(place for place in self.forced if place < len(told.token_ids)),
            logprobs=tuple(told.steps),
            prompt_logprobs=of_prompt(r),
        )


class Converter:
    """Makes pieces of what was taken, in that order, on one thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._told: dict[int, Told] = {}
        self.error: RecordError | None = None
        """A record that could not be read, until somebody takes note: the engine then has to end its requests (`Engine.fail`)."""

    def pieces(self, taken: Taken) -> list[Piece]:
        """News of streaming requests, then of those that ended."""
        if not taken:
            return []
        for records in taken.reports:
            try:
                file(records)
            except RecordError as error:
                self.error = self.error or error
                lose(records, str(error))
            finally:
                records.give_back()
        return [*self._going(taken), *(self._ended(ended) for ended in taken.ended)]

    def _going(self, taken: Taken) -> Iterator[Piece]:
        begin, first = 0, 0
        ends = zip(taken.token_ends.tolist(), taken.round_ends.tolist(), strict=True)
        for request, whole, forced, (end, last) in zip(taken.requests, taken.texts, taken.forced, ends, strict=True):
            tokens, rounds = taken.tokens[begin:end], taken.rounds[first:last]
            drafts, begin, first = taken.round_drafts[first:last], end, last
            if not request.unreadable:  # it is about to end with that error
                yield self._piece(request, tokens, rounds, drafts, forced, whole, finished=False)

    def _ended(self, ended: Ended) -> Piece:
        request = ended.request
        told = self._of(request)
        if request.unreadable:
            request.finish_reason, request.error = "error", request.unreadable
            told.steps.clear()
        tokens = np.array(request.token_ids[len(told.token_ids) :], np.int32)
        rounds = np.array(request.rounds[len(told.rounds) :], np.int32)
        drafts = np.array(request.round_drafts[len(told.rounds) :], np.int32)
        forced = tuple(sorted(request.forced)) if request.forced else ()
        piece = self._piece(request, tokens, rounds, drafts, forced, ended.text, finished=True)
        del self._told[request.number]
        return piece

    def _piece(
        self, request: Request, tokens: Array, rounds: Array, drafts: Array, forced: tuple[int, ...], whole: str | None, *,
        finished: bool,
    ) -> Piece:  # fmt: skip
        told = self._of(request)
        new = tokens.tolist()
        told.token_ids += new
        told.rounds += rounds.tolist()
        told.round_drafts += drafts.tolist()
        text = self._text(told, new, whole, finished=finished)
        fresh = request.logprobs[len(told.steps) :] if not request.unreadable else []
        told.steps += fresh
        piece = Piece(request, told, tokens, rounds, drafts, forced, text, text[told.length :], fresh, finished)
        told.length = len(text)
        return piece

    @staticmethod
    def _text(told: Told, new: list[int], whole: str | None, *, finished: bool) -> str:
        """The whole text: decoded here, unless the engine had to."""
        if whole is not None:
            return whole
        told.text.push(new)
        if finished:
            told.text.end()
        return told.text.text

    def _of(self, request: Request) -> Told:
        if request.number not in self._told:
            self._told[request.number] = Told(Text(self._tokenizer))
        return self._told[request.number]


def of_prompt(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    """By position, once every token of the prompt has been predicted."""
    found = request.prompt_logprobs
    if request.params.prompt_logprobs is None or request.unreadable or len(found) < len(request.prompt_ids) - 1:
        return None
    return (None, *(found[position] for position in range(1, len(request.prompt_ids))))
