"""Owns the engine's end of results: what is new of every request since it was last taken, as arrays; and stop strings.

The engine tells it of requests and outcomes, and `take` hands a batch over, from which `Converter` (`runtime/output.py`) makes
results on whatever thread it likes. Only texts that a stop string may end are decoded here, since the next step depends on
them. It never looks at the device, and never waits for whoever makes results: what is not taken stays where it is, once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from polydraft.device import Array
from polydraft.models.tokenizer import IncrementalDecoder, Tokenizer
from polydraft.runtime.packed import PackedLogprobs
from polydraft.runtime.plan import StepOutcome
from polydraft.runtime.request import Request
from polydraft.runtime.slots import SlotTable

MOST_REPORTS = 256
"""Steps whose log probabilities are kept unread while nothing else is to be told."""
_NONE: Array = np.empty(0, np.int32)


class Ended(NamedTuple):
    """A request that ended; it changes no more. `text`: what stop strings left of it, None where none was watched for."""

    request: Request
    text: str | None


@dataclass(frozen=True)
class Taken:
    """What is new of an engine's requests, in the order of being taken. All of it belongs to whoever took it.

    `requests`: those that stream and go on; `texts`: whole texts of those among them that watch for stop strings, else None;
    `forced`: all places so far that a constraint left no choice for. `tokens` int32, `rounds`, `round_drafts` uint8: of one
    request after the other; request i has those before `token_ends[i]`, `round_ends[i]`, from the ends of i - 1 on."""

    reports: tuple[PackedLogprobs, ...] = ()
    requests: tuple[Request, ...] = ()
    texts: tuple[str | None, ...] = ()
    forced: tuple[tuple[int, ...], ...] = ()
    tokens: Array = field(default_factory=_NONE.copy)
    token_ends: Array = field(default_factory=_NONE.copy)
    rounds: Array = field(default_factory=_NONE.copy)
    round_drafts: Array = field(default_factory=_NONE.copy)
    round_ends: Array = field(default_factory=_NONE.copy)
    ended: tuple[Ended, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reports or self.requests or self.ended)


class Text:
    """The text of one request as it grows, whole characters only, and the stop strings that may end it."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._decoder, self._stops, self._min_tokens = IncrementalDecoder(tokenizer), stops, min_tokens
        self.text = ""
        self.decoded = 0
        """Tokens that it knows."""
        self.stopped = False
        self._held = ""
        """End of the text that may be the beginning of a stop string."""

    def push(self, token_ids: list[int]) -> bool:
        """Append tokens, one at a time where a stop string may cut; True when one did, and nothing behind it counts."""
        if not self._stops:
            self.decoded += len(token_ids)
            self.text += self._decoder.push(token_ids)
            return False
        for token in token_ids if not self.stopped else ():
            self.decoded += 1
            self._append(self._decoder.push((token,)))
            if self.stopped:
                break
        return self.stopped

    def end(self) -> None:
        """No more tokens: what was held back is text, too."""
        if self.stopped:
            return
        self._append(self._decoder.flush())
        if not self.stopped:
            self.text, self._held = self.text + self._held, ""

    def _append(self, piece: str) -> None:
        text, stops = self._held + piece, self._stops
        # A match must end in the piece: what is held may contain one that came before the tokens that have to be generated.
        found = [(text.find(stop, max(len(self._held) - len(stop) + 1, 0)), stop) for stop in stops]
        hits = [hit for hit in found if hit[0] >= 0]
        if hits and self.decoded > self._min_tokens:
            self.text, self._held, self.stopped = self.text + text[: min(hits)[0]], "", True
            return
        keep = _held_back(text, stops)
        self.text, self._held = self.text + text[: len(text) - keep], text[len(text) - keep :]


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Characters at the end of `text` that could still become a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


@dataclass
class Results:
    """What the engine has to tell of its requests. `take` empties it."""

    slots: SlotTable
    tokenizer: Tokenizer
    _watched: dict[int, Text] = field(default_factory=dict)
    """Texts that a stop string may end, by the request's number."""
    _ended: list[Ended] = field(default_factory=list)

    def track(self, request: Request) -> None:
        """A request entered the engine."""
        params = request.params
        if params.stop:
            self._watched[request.number] = Text(self.tokenizer, params.stop, params.min_tokens)

    def advance(self, outcome: StepOutcome) -> list[Request]:
        """Note first tokens, and decode the new ones of requests that watch for stop strings; returns those that one ended."""
        t = self.slots
        awaited = t.fresh | t.watched
        if not np.count_nonzero(awaited):
            return []
        slots = outcome.slots[outcome.num_tokens > 0]
        waited_for = slots[awaited[slots] & ~t.leaving[slots]]
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
        text = self._watched[request.number]
        return text.push(request.token_ids[text.decoded :])

    def finish(self, request: Request) -> None:
        """A request ended, for whatever reason; a stop string cuts its tokens where the text ended."""
        if request.token_ids and request.first_token_s is None:
            request.first_token_s = request.finish_s
        text = self._watched.pop(request.number, None)
        if text is not None:
            text.push(request.token_ids[text.decoded :])
            text.end()
            if text.decoded < len(request.token_ids):
                cut(request, text.decoded)
            if text.stopped:  # whatever the device met behind the stop string does not count: without drafts it had not come
                request.finish_reason, request.error = "stop", ""
        self._ended.append(Ended(request, None if text is None else text.text))

    def take(self) -> Taken:
        """What is new: a handful of whole-array operations, however many requests there are."""
        t = self.slots
        slots: Array = (t.streaming & ~t.leaving).nonzero()[0]
        if slots.size:  # of a request that was preempted all may have been told
            slots = slots[t.num_known[slots] - t.prompt_len[slots] > t.told[slots]]
        reports = t.reports
        if not slots.size and not self._ended and len(reports) < MOST_REPORTS:
            return _NOTHING
        t.reports, ended, self._ended = [], tuple(self._ended), []
        if not slots.size:
            return Taken(reports=tuple(reports), ended=ended)
        generated, num_rounds = t.num_known[slots] - t.prompt_len[slots], t.num_rounds[slots]
        places, token_ends = _places(slots, t.prompt_len[slots] + t.told[slots], generated - t.told[slots], t.tokens.shape[1])
        of_rounds, round_ends = _places(slots, t.told_rounds[slots], num_rounds - t.told_rounds[slots], t.rounds.shape[1])
        t.told[slots], t.told_rounds[slots] = generated, num_rounds
        requests = [request for slot in slots.tolist() if (request := t.request[slot]) is not None]
        return Taken(
            reports=tuple(reports), requests=tuple(requests), ended=ended,
            texts=tuple([self._watched[r.number].text if r.params.stop else None for r in requests]),
            forced=tuple([tuple(sorted(r.forced)) if r.automaton is not None else () for r in requests]),
            tokens=t.tokens.reshape(-1)[places], token_ends=token_ends,
            rounds=t.rounds.reshape(-1)[of_rounds], round_drafts=t.round_drafts.reshape(-1)[of_rounds], round_ends=round_ends,
        )  # fmt: skip


_NOTHING = Taken()


def _places(slots: Array, begins: Array, counts: Array, stride: int) -> tuple[Array, Array]:
    """Places in flattened rows of length `stride`: of each slot `counts` from `begins` on; and where each slot's end."""
    ends: Array = np.cumsum(counts)
    first = slots * stride + begins - (ends - counts)
    return np.repeat(first, counts) + np.arange(ends[-1] if len(ends) else 0), ends


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
