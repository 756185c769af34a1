"""Owns what a caller sees: text of streaming requests in whole characters, stop strings, and finished results.

The engine tells it of requests and outcomes and hands its records out on `poll`. It never looks at the device and never
holds a request back for a slow reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from polydraft.models.tokenizer import IncrementalDecoder, Tokenizer
from polydraft.runtime.plan import StepOutcome
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
    ttft_s: float | None = None
    latency_s: float | None = None

    @property
    def accepted(self) -> int:
        """Drafts that became output."""
        return sum(self.rounds)


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
    dirty: bool = False
    stopped: bool = False


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
        """Decode the new tokens of requests that stream or watch for stop strings; returns those that a stop string ended."""
        ended = []
        for slot in outcome.slots[outcome.num_tokens > 0].tolist():
            request = self.slots.request[slot]
            if request is None or request.status is not Status.RUNNING:
                continue
            stream = self._streams[request.id]
            stream.dirty = True
            if request.params.stop:
                self.slots.sync(request)
                if self._decode(stream):
                    ended.append(request)
        return ended

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
        hits = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        if hits:
            stream.text, stream.held, stream.stopped = stream.text + text[: min(hits)[0]], "", True
            return
        keep = _held_back(text, stops)
        stream.text, stream.held = stream.text + text[: len(text) - keep], text[len(text) - keep :]

    def finish(self, request: Request) -> None:
        """A request ended, for whatever reason; a stop string cuts its tokens where the text ended."""
        stream = self._streams[request.id]
        self._decode(stream, last=True)
        if stream.stopped and stream.decoded < len(request.token_ids):
            cut(request, stream.decoded)
        if stream.stopped and request.finish_reason in ("length", "stop"):
            request.finish_reason = "stop"
        self._finished.append(request)

    def collect(self) -> list[RequestOutput]:
        """Records of streaming requests with news, then of those that ended."""
        news = [s for s in self._streams.values() if s.dirty and s.request.stream and s.request.status is Status.RUNNING]
        for stream in news:
            self.slots.sync(stream.request)
            self._decode(stream)
        records = [self._record(s) for s in news]
        for request in self._finished:
            records.append(self._record(self._streams.pop(request.id)))
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
            latency_s=None if r.finish_s is None else r.finish_s - r.arrival_s,
        )
        stream.reported_text, stream.reported_tokens = len(stream.text), len(r.token_ids)
        stream.reported_rounds, stream.dirty = len(r.rounds), False
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
    request.rounds = rounds


def empty_ids() -> np.ndarray:  # type: ignore[type-arg]
    """No ids."""
    return np.empty(0, np.int32)
