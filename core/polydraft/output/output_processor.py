"""Makes results of what an engine hands over: texts in whole characters, and whose log probabilities are whose.

An `OutputProcessor` works once a batch, on any one thread but never in a step, and keeps what it has reported of each request.
Callers in the same process get a `RequestOutput`, the whole so far; another process gets a `RequestDelta`, only what is new. It
changes no request, since those belong to the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from polydraft.device import Array
from polydraft.errors import RecordError
from polydraft.host.request import Request
from polydraft.models.tokenizer import Tokenizer
from polydraft.output.detokenizer import Detokenizer
from polydraft.output.engine_outputs import EngineOutputs
from polydraft.output.provenance import check_rounds
from polydraft.output.request_delta import NO_PLACES, RequestDelta
from polydraft.output.request_output import RequestOutput, rows_of
from polydraft.program.packed import NO_ROWS, PackedLogprobs, entry_type, has_drafts, row_type
from polydraft.sampling.thinking import ForcedPlaces
from polydraft.sampling.thinking_stage import limits_of


class _RequestState:
    """What was made of one request so far, and where its last update began."""

    __slots__ = (
        "detokenizer", "error", "finished", "forced", "limited", "logprobs", "new_chars", "new_rounds", "new_steps",
        "new_tokens", "prompt", "prompt_told", "request", "round_drafts", "round_lookups", "rounds", "text", "token_ids",
    )  # fmt: skip

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.detokenizer = Detokenizer(tokenizer, skip_special_tokens=request.params.skip_special_tokens)
        self.token_ids: list[int] = []
        self.rounds: list[int] = []
        self.round_drafts: list[int] = []
        self.round_lookups: list[int] = []
        self.forced: tuple[int, ...] = ()
        """Places that a constraint left no choice for, ascending; of tokens to come, too."""
        limits = limits_of(request)
        self.limited = None if limits is None else ForcedPlaces(limits, request.prompt_ids)
        """Tells which places the limits of thinking have forced."""
        self.logprobs: list[Array] = []
        """Rows of the window of each step that emitted tokens."""
        top = request.params.prompt_logprobs
        self.prompt = None if top is None else np.zeros(len(request.prompt_ids) - 1, row_type(top + 1))
        """Rows of the prompt from its second token on; rank -1 where none came yet. None where none were asked for."""
        if self.prompt is not None:
            self.prompt["rank"] = -1
        self.prompt_told = False
        """Whether a delta has had them."""
        self.text, self.error, self.finished = "", "", False
        self.new_tokens = self.new_rounds = self.new_steps = self.new_chars = 0

    def update(
        self, tokens: list[int], rounds: list[int], drafts: list[int], lookups: list[int], forced: tuple[int, ...],
        text: str | None, *, finished: bool,
    ) -> None:  # fmt: skip
        """Append what is new. `forced`: all places so far that a grammar left no choice for; `text`: the whole, where the engine
        had to decode it."""
        self.new_tokens, self.new_rounds, self.new_chars = len(self.token_ids), len(self.rounds), len(self.text)
        self.token_ids += tokens
        self.rounds += rounds
        self.round_drafts += drafts
        self.round_lookups += lookups
        limited = self.limited.of(self.token_ids) if self.limited is not None else ()
        self.forced = tuple(sorted({*forced, *limited})) if forced and limited else forced or tuple(limited)
        self.finished = finished
        if text is None:
            self.detokenizer.push(tokens)
            if finished:
                self.detokenizer.end()
            text = self.detokenizer.text
        self.text = text

    @property
    def prompt_rows(self) -> Array | None:
        """Of the prompt, once every token of it has been predicted."""
        if self.error or self.prompt is None or not bool((self.prompt["rank"] >= 0).all()):
            return None
        return self.prompt

    @property
    def end(self) -> tuple[str | None, str]:
        """Why it ended, and the sentence of an error; None while it goes on."""
        if not self.finished:
            return None, ""
        return ("error", self.error) if self.error else (self.request.finish_reason, self.request.error)

    def output(self) -> RequestOutput:
        """The whole so far."""
        r, (finish_reason, error) = self.request, self.end
        token_ids, rounds = tuple(self.token_ids), tuple(self.rounds)
        return RequestOutput(
            id=r.id,
            prompt_ids=r.prompt_ids,
            token_ids=token_ids,
            text=self.text,
            text_delta=self.text[self.new_chars :],
            new_token_ids=token_ids[self.new_tokens :],
            rounds=rounds,
            new_rounds=rounds[self.new_rounds :],
            drafted=r.drafted if self.finished else sum(self.round_drafts),
            finished=self.finished,
            finish_reason=finish_reason,
            error=error,
            ttft_s=None if r.first_token_s is None else r.first_token_s - r.arrival_s,
            latency_s=r.finish_s - r.arrival_s if self.finished and r.finish_s is not None else None,
            round_drafts=tuple(self.round_drafts),
            round_lookups=tuple(self.round_lookups),
            forced=self._forced(0) if self.forced else (),
            logprobs=tuple(self.logprobs),
            prompt_rows=self.prompt_rows,
        )

    def _forced(self, start: int) -> tuple[int, ...]:
        """Places of tokens from `start` on that a constraint left no choice for."""
        return tuple([place for place in self.forced if start <= place < len(self.token_ids)])

    def delta(self, tokens: Array, rounds: Array, round_drafts: Array, round_lookups: Array) -> RequestDelta:
        """What the last update brought, with the arrays that it was made of."""
        finish, error = self.end
        prompt = None if self.prompt_told else self.prompt_rows
        self.prompt_told |= prompt is not None
        steps, self.new_steps = self.logprobs[self.new_steps :], len(self.logprobs)
        places = self._forced(self.new_tokens) if self.forced and self.forced[-1] >= self.new_tokens else ()
        forced = np.array(places, np.int32) if places else NO_PLACES
        rows = rows_of(steps, self.rounds[self.new_rounds :], len(tokens), prefill=not self.new_tokens) if steps else NO_ROWS
        return RequestDelta(
            int(self.request.id), finish or "", tokens, rounds, round_drafts, round_lookups, forced, rows,
            NO_ROWS if prompt is None else prompt, self.text[self.new_chars :], error,
        )  # fmt: skip


def _joined(parts: Sequence[Sequence[int]]) -> Array:
    return np.fromiter(chain.from_iterable(parts), np.int32)


def _ends(parts: Sequence[Sequence[int]]) -> Array:
    return np.cumsum([len(part) for part in parts])


class OutputProcessor:
    """Makes results of batches in the order in which they were taken, on one thread. Whoever uses it asks either for `outputs` or
    for `deltas`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[int, _RequestState] = {}
        """By the request's number."""
        self.error: RecordError | None = None
        """A record that could not be read; the engine has to end its requests (`Engine.fail`). Reset by the caller."""

    def outputs(self, batch: EngineOutputs) -> list[RequestOutput]:
        """Of streaming requests that go on, then of those that ended."""
        return [state.output() for state, *_ in self._updated(batch)]

    def deltas(self, batch: EngineOutputs) -> list[RequestDelta]:
        """Likewise. Ids of the requests are whole numbers: the handles that the other process has given them."""
        return [state.delta(*new) for state, *new in self._updated(batch)]

    def _updated(self, batch: EngineOutputs) -> list[tuple[_RequestState, Array, Array, Array, Array]]:
        """States after their update, with the new tokens of each, and of its rounds drafts accepted, verified and looked up."""
        if not batch:
            return []
        for records in batch.logprobs:
            try:
                self._file(records)
            except RecordError as error:
                self.error = self.error or error
                self._lose(records, str(error))
            finally:
                records.give_back()
        found = self._update(batch, finished=False) if batch.requests else []
        return found + self._update(self._of_ended(batch), finished=True) if batch.ended else found

    def _of_ended(self, batch: EngineOutputs) -> EngineOutputs:
        """What is new of the requests that ended, as of those that go on."""
        states = [self._of(request) for request in batch.ended]
        tokens = [state.request.token_ids[len(state.token_ids) :] for state in states]
        rounds = [state.request.rounds[len(state.rounds) :] for state in states]
        drafts = [state.request.round_drafts[len(state.rounds) :] for state in states]
        lookups = [state.request.round_lookups[len(state.rounds) :] for state in states]
        for state in states:
            if state.error:
                state.logprobs.clear()
        return EngineOutputs(
            requests=batch.ended, texts=batch.ended_texts,
            forced=tuple([tuple(sorted(request.forced)) for request in batch.ended]), tokens=_joined(tokens),
            token_ends=_ends(tokens), rounds=_joined(rounds), round_drafts=_joined(drafts),
            round_lookups=_joined(lookups), round_ends=_ends(rounds),
        )  # fmt: skip

    def _update(self, batch: EngineOutputs, *, finished: bool) -> list[tuple[_RequestState, Array, Array, Array, Array]]:
        """Tell the states of its `requests` what is new."""
        rounds, drafts, lookups = (one.astype(np.int32) for one in (batch.rounds, batch.round_drafts, batch.round_lookups))
        plain = batch.tokens.tolist(), rounds.tolist(), drafts.tolist(), lookups.tolist()
        ends = zip(batch.token_ends.tolist(), batch.round_ends.tolist(), strict=True)
        found, begin, first = [], 0, 0
        for request, text, forced, (end, last) in zip(batch.requests, batch.texts, batch.forced, ends, strict=True):
            state = self._of(request)
            if finished or not state.error:  # else it is about to end with that error
                new = plain[0][begin:end], plain[1][first:last], plain[2][first:last], plain[3][first:last]
                try:
                    check_rounds(end - begin, new[1], prefill=not state.token_ids and end > begin, ended=finished)
                except RecordError as error:  # the caller ends all other requests with it
                    self.error, state.error = self.error or error, state.error or str(error)
                state.update(*new, forced, text, finished=finished)
                found.append((state, batch.tokens[begin:end], rounds[first:last], drafts[first:last], lookups[first:last]))
            if finished:
                del self._states[request.number]
            begin, first = end, last
        return found

    def _of(self, request: Request) -> _RequestState:
        state = self._states.get(request.number)
        if state is None:
            state = self._states[request.number] = _RequestState(request, self._tokenizer)
        return state

    # -- log probabilities -------------------------------------------------------------------------
    def _file(self, records: PackedLogprobs) -> None:
        """Give each request the rows of a step that are its own. Raises `RecordError` for a record that cannot be read;
        nothing of it is filed then."""
        expected = records.expected
        tokens, prompt = records.decode()
        if tokens is not None and expected.num_top is not None:
            self._file_tokens(records, tokens, expected.num_top)
        if prompt is not None:
            self._file_prompt(records, prompt)

    def _file_tokens(self, records: PackedLogprobs, entries: Array, num_top: Array) -> None:
        slots = records.expected.slots
        wanting = num_top[slots] >= 0
        counts, slots = records.counts[: len(slots)][wanting], slots[wanting]
        if len(entries) != len(slots):
            raise RecordError(
                f"a record of log probabilities has {len(entries)} entries, wanted those of {len(slots)} requests; it was "
                "overwritten, or packed wrong"
            )
        by_top: dict[int, Array] = {}
        for entry, (slot, count, top) in enumerate(zip(slots.tolist(), counts.tolist(), num_top[slots].tolist(), strict=True)):
            request = records.occupants[slot]
            if count > 0 and request is not None:
                if top not in by_top:
                    by_top[top] = _narrow(entries, top + 1)
                self._of(request).logprobs.append(by_top[top][entry])

    def _file_prompt(self, records: PackedLogprobs, entries: Array) -> None:
        slots = records.expected.slots
        live = set(slots[records.counts[: len(slots)] >= 0].tolist())
        for slot in np.unique(entries["slot"]).tolist():
            request = records.occupants[slot]
            if request is not None and slot in live:
                rows, mine = self._of(request).prompt, entries["slot"] == slot
                positions = entries["extra"][mine]
                low, high, most = int(positions.min()), int(positions.max()), 0 if rows is None else len(rows)
                if rows is None or low < 1 or high > most:
                    raise RecordError(
                        f"a record of log probabilities has positions {low} to {high} of a prompt, wanted 1 to {most}; it was "
                        "overwritten, or packed wrong"
                    )
                rows[positions - 1] = _narrow(entries, rows.dtype["ids"].shape[0])[mine, 0]

    def _lose(self, records: PackedLogprobs, why: str) -> None:
        """The records cannot be read: whoever they held something for ends with that error, and has no log probabilities."""
        slots = records.expected.slots
        for slot in slots[records.counts[: len(slots)] >= 0].tolist():
            request = records.occupants[slot]
            if request is not None and request.params.reported:
                state = self._of(request)
                state.error = state.error or why
                state.logprobs.clear()


def _narrow(entries: Array, shown: int) -> Array:
    """Rows of the entries with the first columns alone, [m, W]: views."""
    rows = entries["rows"]
    columns = rows.dtype["ids"].shape[0]
    if shown < columns:
        rows = entries.view(entry_type(rows.shape[1], columns, shown, drafts=has_drafts(rows)))["rows"]
    found: Array = rows
    return found
