"""Owns what can be said of a single token: who proposed it, in which round, and its log probabilities.

Requests keep the rows of each step as they came; records of single tokens are made from them only when somebody asks, off the
step's path. It never looks at the device and never changes a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from polydraft.device import Array
from polydraft.runtime.packed import LogprobBlock, PackedLogprobs
from polydraft.sentinels import NO_TOKEN

if TYPE_CHECKING:
    from polydraft.runtime.request import Request

Source = Literal["target", "draft", "corrected", "forced"]
"""Who chose a token. `target`: the target with no draft to hold it against (the prefill's token, or the one behind a window
that was accepted whole); `draft`: a draft that the target agreed with; `corrected`: the target, in the place of a draft that
it rejected; `forced`: a constraint that left no choice."""


class TokenLogprobs(NamedTuple):
    """Log probability and rank of one token, and the most likely tokens of its place, best first."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely one."""
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log probabilities of the tokens that one step emitted for one request: where they are in the step's block, of which its
    arrays are views, made when somebody looks. Row j is token j, or draft j of the round."""

    block: LogprobBlock
    entry: int
    count: int
    """Tokens."""
    num_top: int
    """Most likely ones that were wanted beside each."""

    @property
    def ids(self) -> Array:
        """[n, C]: the token, then the C - 1 most likely ones (NO_TOKEN where the vocabulary ends)."""
        return self.block.ids[self.entry, : self.count, : self.num_top + 1]

    @property
    def logprobs(self) -> Array:
        """[n, C]: theirs."""
        return self.block.logprobs[self.entry, : self.count, : self.num_top + 1]

    @property
    def ranks(self) -> Array:
        """[n]: of the token, 1 for the most likely one."""
        return self.block.ranks[self.entry, : self.count]

    @property
    def drawn(self) -> Array:
        """[n]: with which the token was drawn as a draft; NaN where it was none."""
        return self.block.drawn[self.entry, : self.count]

    @property
    def drafts(self) -> Array:
        """[d]: every draft that the round verified, accepted or not."""
        return self.block.drafts[self.entry, : self.block.num_drafts[self.entry]]

    @property
    def draft_logprobs(self) -> Array:
        """[d]: with which each was drawn (0 where no model drew it)."""
        return self.block.draft_logprobs[self.entry, : self.block.num_drafts[self.entry]]

    def token(self, row: int) -> TokenLogprobs:
        """One row as plain Python."""
        ids, logprobs = self.ids[row].tolist(), self.logprobs[row].tolist()
        top = tuple((token, logprob) for token, logprob in zip(ids[1:], logprobs[1:], strict=True) if token != NO_TOKEN)
        return TokenLogprobs(ids[0], logprobs[0], int(self.ranks[row]), top)

    def draft_tokens(self) -> tuple[tuple[int, float], ...]:
        """The drafts of the round and their log probabilities."""
        return tuple(zip(self.drafts.tolist(), self.draft_logprobs.tolist(), strict=True))


def file(records: PackedLogprobs) -> None:
    """Split the records of a step and tell each request where the rows that belong to it are. Raises `RecordError` for a record
    that cannot be read; nothing is filed then."""
    expected = records.expected
    tokens, prompt = records.blocks()
    if tokens is not None:
        for entry, (request, count, top) in enumerate(_wanting(records)):
            if count > 0 and request is not None:
                request.logprobs.append(StepLogprobs(tokens, entry, count, top))
    if prompt is None or expected.prompt_top is None:
        return
    counts = dict(zip(expected.slots.tolist(), records.counts.tolist(), strict=False))
    for entry, (slot, position) in enumerate(zip(prompt.slots.tolist(), prompt.extra.tolist(), strict=True)):
        request = records.occupants[slot]
        if request is not None and counts.get(slot, -1) >= 0:
            rows = StepLogprobs(prompt, entry, 1, int(expected.prompt_top[slot]))
            request.prompt_logprobs[position] = rows.token(0)


def lose(records: PackedLogprobs, why: str) -> None:
    """The records cannot be read: whoever they held something for is told so, and keeps no log probabilities."""
    slots = records.expected.slots
    for slot in slots[records.counts[: len(slots)] >= 0].tolist():
        request = records.occupants[slot]
        if request is not None and request.params.reported:
            request.unreadable = request.unreadable or why
            request.logprobs.clear()


def _wanting(records: PackedLogprobs) -> list[tuple[Request | None, int, int]]:
    """Request, tokens and wish of each entry."""
    slots, wishes = records.expected.slots, records.expected.num_top
    if wishes is None:
        return []
    wanted = wishes[slots] >= 0
    counts = records.counts[: len(slots)][wanted].tolist()
    slots = slots[wanted]
    found = zip(slots.tolist(), counts, wishes[slots].tolist(), strict=True)
    return [(records.occupants[slot], count, top) for slot, count, top in found]


class TokenRecord(NamedTuple):
    """All that is known of one output token. `round` counts decode rounds from 0, -1: the token that the prefill chose;
    `draft_position` counts drafts of the round from 1, 0: no draft. What was not asked for is None or empty."""

    token_id: int
    source: Source
    draft_position: int
    round: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()
    draft_logprob: float | None = None


def origins(
    num_tokens: int, rounds: Sequence[int], drafted: Sequence[int], forced: Collection[int] = ()
) -> Iterator[tuple[Source, int, int]]:
    """(source, draft position, round) of each of a request's tokens, from the drafts that its rounds accepted and verified, and
    the places that a constraint `forced`."""
    for place, (source, position, number) in enumerate(_by_round(num_tokens, rounds, drafted)):
        yield ("forced" if place in forced else source), position, number


def _by_round(num_tokens: int, rounds: Sequence[int], drafted: Sequence[int]) -> Iterator[tuple[Source, int, int]]:
    if num_tokens:
        yield "target", 0, -1
    left = num_tokens - 1
    for number, (accepted, verified) in enumerate(zip(rounds, drafted, strict=True)):
        for place in range(min(accepted, left)):
            yield "draft", place + 1, number
        left -= accepted
        if left > 0:
            yield ("corrected" if accepted < verified else "target"), 0, number
            left -= 1


def token_records(
    token_ids: Sequence[int], rounds: Sequence[int], drafted: Sequence[int], logprobs: Sequence[StepLogprobs],
    forced: Collection[int] = (), start: int = 0,
) -> tuple[TokenRecord, ...]:  # fmt: skip
    """Records of the tokens from `start` on; `logprobs` are those of all steps so far, empty where none were asked for."""
    places = [(step, row) for step in logprobs for row in range(step.count)]
    records = []
    for index, (source, position, number) in enumerate(origins(len(token_ids), rounds, drafted, forced)):
        if index < start:
            continue
        record = TokenRecord(token_ids[index], source, position, number)
        if places:
            step, row = places[index]
            _, logprob, rank, top = step.token(row)
            of_draft = float(step.draft_logprobs[position - 1]) if position else None
            record = TokenRecord(token_ids[index], source, position, number, logprob, rank, top, of_draft)
        records.append(record)
    return tuple(records)
