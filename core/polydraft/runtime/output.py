"""Owns what a caller sees: text of streaming requests in whole characters, stop strings, and finished results.

The engine tells it of requests and outcomes and hands its records out on `poll`. It never looks at the device and never
holds a request back for a slow reader.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from polydraft.models.tokenizer import IncrementalDecoder, Tokenizer
from polydraft.runtime.plan import StepOutcome
from polydraft.runtime.provenance import StepLogprobs, TokenLogprobs, TokenRecord, token_records
from polydraft.runtime.request import Request, Status
from polydraft.runtime.slots import SlotTable


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


@dataclass
class _Stream:
    """Text state of one request."""

    request: Request
    decoder: IncrementalDecoder
    text: str = ""
    held: str = ""
    """End of the text that may be the beginning of a stop string."""
    decoded: int = 0
    reported_tokens: int = 0
    reported_rounds: int = 0
    reported_text: int = 0
    stopped: bool = False
    logprobs: list[StepLogprobs] = field(default_factory=list)

    def steps(self) -> tuple[StepLogprobs, ...]:
        """Log probabilities of the steps so far; each is looked at once."""
        self.logprobs += [StepLogprobs.of(*one) for one in self.request.logprobs[len(self.logprobs) :]]
        return tuple(self.logprobs)


@dataclass
class OutputTracker:
    """Text and news of every request in the engine."""

    slots: SlotTable
    tokenizer: Tokenizer
    _streams: dict[str, _Stream] = field(default_factory=dict)
    _finished: list[Request] = field(default_factory=list)

    def track(self, request: Request) -> None:
        """A request entered the engine."""
        self._streams[request.id] = _Stream(request, IncrementalDecoder(self.tokenizer))

    def advance(self, outcome: StepOutcome) -> list[Request]:
        """Note first tokens, and decode the new ones of requests that watch for stop strings; returns those that one ended."""
        t = self.slots
        slots = outcome.slots[outcome.num_tokens > 0]
        waited_for = slots[(t.fresh[slots] | t.watched[slots]) & ~t.leaving[slots]]
        return [t.request[slot] for slot in waited_for.tolist() if self._advance(slot)]

    def _advance(self, slot: int) -> bool:
        """Whether a stop string ended the request in a slot."""
        request = self.slots.request[slot]
        assert request is not None, "a live slot has a request"
        if request.first_token_s is None:
            request.first_token_s = time.perf_counter()
            self.slots.fresh[slot] = False
        if not request.params.stop:
            return False
        self.slots.sync(request)
        return self._decode(self._streams[request.id])

    def _decode(self, stream: _Stream, *, last: bool = False) -> bool:
        """Bring the text up to the request's tokens, one at a time where a stop string may cut; True when one did."""
        request = stream.request
        while stream.decoded < len(request.token_ids) and not stream.stopped:
            step = 1 if request.params.stop else len(request.token_ids) - stream.decoded
            piece = stream.decoder.push(request.token_ids[stream.decoded : stream.decoded + step])
            stream.decoded += step
            self._append(stream, piece)
        if last and not stream.stopped:
            self._append(stream, stream.decoder.flush())
            stream.text, stream.held = stream.text + stream.held, ""
        return stream.stopped

    def _append(self, stream: _Stream, piece: str) -> None:
        stops = stream.request.params.stop
        text = stream.held + piece
        # A match must end in the piece: what is held may contain one that came before the tokens that have to be generated.
        found = [(text.find(stop, max(len(stream.held) - len(stop) + 1, 0)), stop) for stop in stops]
        hits = [hit for hit in found if hit[0] >= 0]
        if hits and stream.decoded > stream.request.params.min_tokens:
            stream.text, stream.held, stream.stopped = stream.text + text[: min(hits)[0]], "", True
            return
        keep = _held_back(text, stops)
        stream.text, stream.held = stream.text + text[: len(text) - keep], text[len(text) - keep :]

    def finish(self, request: Request) -> None:
        """A request ended, for whatever reason; a stop string cuts its tokens where the text ended."""
        stream = self._streams[request.id]
        if request.token_ids and request.first_token_s is None:
            request.first_token_s = request.finish_s
        self._decode(stream, last=True)
        if stream.stopped and stream.decoded < len(request.token_ids):
            cut(request, stream.decoded)
        if stream.stopped:  # whatever the device met behind the stop string does not count: without drafts it had not come
            request.finish_reason, request.error = "stop", ""
        self._finished.append(request)

    def collect(self) -> list[RequestOutput]:
        """Records of streaming requests with news, then of those that ended."""
        t, records = self.slots, []
        for slot in (t.news & t.streaming & ~t.leaving).nonzero()[0].tolist():
            request = t.request[slot]
            assert request is not None, "a live slot has a request"
            stream, t.news[slot] = self._streams[request.id], False
            t.sync(request)
            if len(request.token_ids) > stream.reported_tokens:
                self._decode(stream)
                records.append(self._record(stream))
        records += [self._record(self._streams.pop(request.id)) for request in self._finished]
        self._finished.clear()
        return records

    @staticmethod
    def _record(stream: _Stream) -> RequestOutput:
        r = stream.request
        record = RequestOutput(
            id=r.id,
            prompt_ids=r.prompt_ids,
            token_ids=tuple(r.token_ids),
            text=stream.text,
            text_delta=stream.text[stream.reported_text :],
            new_token_ids=tuple(r.token_ids[stream.reported_tokens :]),
            rounds=tuple(r.rounds),
            new_rounds=tuple(r.rounds[stream.reported_rounds :]),
            drafted=r.drafted,
            finished=r.status is Status.FINISHED,
            finish_reason=r.finish_reason,
            error=r.error,
            ttft_s=None if r.first_token_s is None else r.first_token_s - r.arrival_s,
            latency_s=None if r.finish_s is None else r.finish_s - r.arrival_s,
            round_drafts=tuple(r.round_drafts),
            forced=tuple(sorted(place for place in r.forced if place < len(r.token_ids))),
            logprobs=stream.steps(),
            prompt_logprobs=_of_prompt(r),
        )
        stream.reported_text, stream.reported_tokens = len(stream.text), len(r.token_ids)
        stream.reported_rounds = len(r.rounds)
        return record


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Characters at the end of `text` that could still become a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def cut(request: Request, num_tokens: int) -> None:
    """Drop tokens behind a stop string, and the rounds that only produced such tokens."""
    request.token_ids = request.token_ids[:num_tokens]
    produced, rounds = 1, []
    for accepted in request.rounds:
        if produced >= num_tokens:
            break
        rounds.append(min(accepted, num_tokens - produced))
        produced += accepted + 1
    request.rounds, request.round_drafts = rounds, request.round_drafts[: len(rounds)]


def _of_prompt(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    """By position, once every token of the prompt has been predicted."""
    found = request.prompt_logprobs
    if request.params.prompt_logprobs is None or len(found) < len(request.prompt_ids) - 1:
        return None
    return (None, *(found[position] for position in range(1, len(request.prompt_ids))))
