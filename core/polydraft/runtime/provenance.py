"""Owns what can be said of a single token: who proposed it, in which round, and its log probabilities.

Requests keep the rows of each step as they came; records of single tokens are made from them only when somebody asks, off the
step's path. It never looks at the device and never changes a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

from polydraft.device import Array
from polydraft.runtime.packed import LogprobBlock
from polydraft.sentinels import NO_TOKEN

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


class StepLogprobs(NamedTuple):
    """Log probabilities of the tokens that one step emitted for one request; row j is token j, or draft j of the round.

    `ids`, `logprobs` [n, C]: the token, then the C - 1 most likely ones (NO_TOKEN where the vocabulary ends). `ranks` [n].
    `drafts`, `draft_logprobs` [d]: every draft that the round verified, accepted or not, and the log probability with which it
    was drawn (0 where no model drew it)."""

    ids: Array
    logprobs: Array
    ranks: Array
    drafts: Array
    draft_logprobs: Array

    @classmethod
    def of(cls, block: LogprobBlock, entry: int, count: int, num_top: int) -> StepLogprobs:
        """The first `count` rows of an entry, with the columns that this request wants: views, nothing is copied."""
        columns = slice(0, num_top + 1)
        drafted = int((block.drafts[entry] != NO_TOKEN).sum())
        return cls(
            block.ids[entry, :count, columns],
            block.logprobs[entry, :count, columns],
            block.ranks[entry, :count],
            block.drafts[entry, :drafted],
            block.draft_logprobs[entry, :drafted],
        )

    def token(self, row: int) -> TokenLogprobs:
        """One row as plain Python."""
        ids, logprobs = self.ids[row].tolist(), self.logprobs[row].tolist()
        top = tuple((token, logprob) for token, logprob in zip(ids[1:], logprobs[1:], strict=True) if token != NO_TOKEN)
        return TokenLogprobs(ids[0], logprobs[0], int(self.ranks[row]), top)

    def draft_tokens(self) -> tuple[tuple[int, float], ...]:
        """The drafts of the round and their log probabilities."""
        return tuple(zip(self.drafts.tolist(), self.draft_logprobs.tolist(), strict=True))


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
    places = [(step, row) for step in logprobs for row in range(len(step.ranks))]
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
