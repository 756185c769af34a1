"""What an engine hands over: everything that is new of its requests since the last time, as arrays.

`OutputCollector` is the engine's own part: it hears of requests and outcomes, lets stop strings end texts, since the next step
depends on that, and `take` hands a batch over. `OutputProcessor` makes results of batches on whatever thread it likes. What is
not taken stays where it is, once, so nothing waits for the code that makes results.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from polydraft.device import Array
from polydraft.host.request import Request
from polydraft.host.slots import SlotTable
from polydraft.models.tokenizer import Tokenizer
from polydraft.output.detokenizer import Detokenizer
from polydraft.output.provenance import rounds_within
from polydraft.program.packed import PackedLogprobs
from polydraft.program.plan import StepOutcome

MOST_UNREAD = 256
"""Steps whose log probabilities are kept unread while nothing else is new."""
_NONE: Array = np.empty(0, np.int32)


class EngineOutputs(NamedTuple):
    """What is new of an engine's requests, in the order of being taken. The caller of `take` owns all of it.

    `logprobs`: the records of the steps, where they landed. `requests`: those that stream and go on; `texts`: whole texts of
    those among them that watch for stop strings, else None; `forced`: all places so far that a constraint left no choice for.
    `tokens` int32, `rounds`, `round_drafts`, `round_lookups` uint8: of one request after the other; request i has those before
    `token_ends[i]`, `round_ends[i]`, from the ends of i - 1 on. `ended`: requests that ended and change no more; `ended_texts`:
    what stop strings left of their texts, None where none was watched for."""

    logprobs: tuple[PackedLogprobs, ...] = ()
    requests: tuple[Request, ...] = ()
    texts: tuple[str | None, ...] = ()
    forced: tuple[tuple[int, ...], ...] = ()
    tokens: Array = _NONE
    token_ends: Array = _NONE
    rounds: Array = _NONE
    round_drafts: Array = _NONE
    round_lookups: Array = _NONE
    round_ends: Array = _NONE
    ended: tuple[Request, ...] = ()
    ended_texts: tuple[str | None, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.logprobs or self.requests or self.ended)


@dataclass
class OutputCollector:
    """What the engine has to hand over of its requests. `take` empties it."""

    slots: SlotTable
    tokenizer: Tokenizer
    _watched: dict[int, Detokenizer] = field(default_factory=dict)
    """Texts that a stop string may end, by the request's number."""
    _ended: list[Request] = field(default_factory=list)
    _ended_texts: list[str | None] = field(default_factory=list)

    def track(self, request: Request) -> None:
        """A request entered the engine."""
        params = request.params
        if params.stop:
            self._watched[request.number] = Detokenizer(
                self.tokenizer, params.stop, params.min_tokens, skip_special_tokens=params.skip_special_tokens
            )

    def advance(self, outcome: StepOutcome) -> list[Request]:
        """Note first tokens, and decode the new ones of requests that watch for stop strings; returns those that one ended."""
        t = self.slots
        awaited = t.fresh | t.watched
        if not np.count_nonzero(awaited):
            return []
        slots = outcome.slots[outcome.num_tokens > 0]
        waited_for = slots[awaited[slots] & ~t.draining[slots]]
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
        t, text = self.slots, self._watched[request.number]
        return text.push(t.tokens[slot, t.prompt_len[slot] + text.decoded : t.num_known[slot]].tolist())

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
            if text.stopped:  # whatever the device met after the stop string does not count: without drafts it had not come
                request.finish_reason, request.error = "stop", ""
        self._ended.append(request)
        self._ended_texts.append(None if text is None else text.text)

    def take(self) -> EngineOutputs:
        """What is new: a handful of whole-array operations, however many requests there are."""
        t = self.slots
        slots: Array = (t.streaming & ~t.draining).nonzero()[0]
        known = old = slots
        if slots.size:  # of a request that was preempted all may have been reported
            known, old = t.num_known[slots], t.prompt_len[slots] + t.reported[slots]
            new = known > old
            if np.count_nonzero(new) < len(new):
                slots, known, old = slots[new], known[new], old[new]
        logprobs = t.reports
        if not slots.size and not self._ended and len(logprobs) < MOST_UNREAD:
            return _NOTHING
        ended, ended_texts = tuple(self._ended), tuple(self._ended_texts)
        t.reports, self._ended, self._ended_texts = [], [], []
        if not slots.size:
            return EngineOutputs(logprobs=tuple(logprobs), ended=ended, ended_texts=ended_texts)
        num_rounds, old_rounds = t.num_rounds[slots], t.reported_rounds[slots]
        places, token_ends = _places(slots, old, known - old, t.tokens.shape[1])
        of_rounds, round_ends = _places(slots, old_rounds, num_rounds - old_rounds, t.rounds.shape[1])
        t.reported[slots] += known - old
        t.reported_rounds[slots] = num_rounds
        requests = [request for slot in slots.tolist() if (request := t.request[slot]) is not None]
        return EngineOutputs(
            logprobs=tuple(logprobs), requests=tuple(requests), ended=ended, ended_texts=ended_texts,
            texts=tuple([self._watched[r.number].text if r.params.stop else None for r in requests]),
            forced=tuple([tuple(sorted(r.forced)) if r.binding is not None else () for r in requests]),
            tokens=t.tokens.reshape(-1)[places], token_ends=token_ends,
            rounds=t.rounds.reshape(-1)[of_rounds], round_drafts=t.round_drafts.reshape(-1)[of_rounds],
            round_lookups=t.round_lookups.reshape(-1)[of_rounds], round_ends=round_ends,
        )  # fmt: skip


_NOTHING = EngineOutputs()


def _places(slots: Array, begins: Array, counts: Array, stride: int) -> tuple[Array, Array]:
    """Places in flattened rows of length `stride`: of each slot `counts` from `begins` on; and where each slot's end."""
    ends: Array = counts.cumsum()
    first = slots * stride + begins - (ends - counts)
    return first.repeat(counts) + np.arange(ends[-1]), ends


def cut(request: Request, num_tokens: int) -> None:
    """Drop tokens after a stop string, and the rounds that only produced such tokens."""
    request.token_ids = request.token_ids[:num_tokens]
    request.rounds = rounds_within(request.rounds, num_tokens)
    request.round_drafts = request.round_drafts[: len(request.rounds)]
    request.round_lookups = request.round_lookups[: len(request.rounds)]
