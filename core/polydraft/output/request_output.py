"""What callers get of a request: its text, tokens, rounds and, where asked for, what is known of every single token.

`OutputProcessor` makes one whenever something is new. Numbers stay in the arrays they came in, and become Python objects where
somebody looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from polydraft.device import Array
from polydraft.output.provenance import SourceName, provenance
from polydraft.program.packed import NO_ROWS, has_drafts
from polydraft.sentinels import NO_TOKEN


class TokenRecord(NamedTuple):
    """All that is known of one token. `round` counts decode rounds from 0, -1: the token that the prefill chose, or one of the
    prompt; `draft_position` counts drafts of the round from 1, 0: no draft. `rank` is 1 for the most likely token; `top`: the
    most likely tokens of the place, best first. What was not asked for is None or empty."""

    token_id: int
    source: SourceName
    draft_position: int
    round: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()
    draft_logprob: float | None = None
    """With which the token was drawn as a draft, 0 where no model drew it; None where it was no draft, and in engines without
    `draft_logprobs`."""
    draft_top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens of the distribution that the draft verified in this place was chosen from, accepted or not; () where
    none was, and in engines without `draft_logprobs`."""


@dataclass(frozen=True)
class RequestOutput:
    """One request as it stands. `text_delta`, `new_token_ids` and `new_rounds` came since the last record; the rest is the
    whole so far, complete when `finished`."""

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
    """Why it ended with "error", or "refused": then what it asked for was not possible."""
    ttft_s: float | None = None
    """Seconds from its arrival to its first token; None before."""
    latency_s: float | None = None
    """Seconds from its arrival to its end; None before."""
    round_drafts: tuple[int, ...] = ()
    """Drafts that each round verified."""
    round_lookups: tuple[int, ...] = ()
    """Those of them, the last ones, that were looked up beside a model's."""
    forced: tuple[int, ...] = ()
    """Places of tokens that a constraint left no choice for, ascending."""
    logprobs: tuple[Array, ...] = field(default=(), repr=False, compare=False)
    """Rows of each step so far that emitted tokens, as `row_type` says; () where none were asked for. `tokens` has them by
    token."""
    prompt_rows: Array | None = field(default=None, repr=False, compare=False)
    """Such rows of the prompt from its second token on; None where none were asked for, and before all are known."""

    @property
    def accepted(self) -> int:
        """Drafts that became output."""
        return sum(self.rounds)

    @property
    def tokens(self) -> tuple[TokenRecord, ...]:
        """All tokens so far with who proposed them and what is known of their probability; made when asked for."""
        return tuple(self._records(0))

    @property
    def new_tokens(self) -> tuple[TokenRecord, ...]:
        """Likewise of `new_token_ids`."""
        return tuple(self._records(len(self.token_ids) - len(self.new_token_ids)))

    @property
    def drafts(self) -> tuple[tuple[tuple[int, float | None], ...], ...]:
        """What each round drafted, accepted or not, with the log probability that each was drawn with (0 where no model drew
        it; None in engines without `draft_logprobs`); () where no log probabilities were asked for."""
        kept = [rows[rows["draft"] != NO_TOKEN] for rows in self.logprobs[1:]]  # the first step chose with no drafts
        told = [rows["draft_logprob"].tolist() if has_drafts(rows) else [None] * len(rows) for rows in kept]
        return tuple(tuple(zip(rows["draft"].tolist(), own, strict=True)) for rows, own in zip(kept, told, strict=True))

    @property
    def draft_tops(self) -> tuple[tuple[tuple[tuple[int, float], ...], ...], ...]:
        """Of each of `drafts` the most likely tokens of the distribution that it was chosen from, best first, () where no model
        chose it; () in engines without `draft_logprobs`."""
        kept = [rows[rows["draft"] != NO_TOKEN] for rows in self.logprobs[1:] if has_drafts(rows)]
        return tuple(tuple(map(draft_top, rows)) for rows in kept)

    @property
    def prompt_logprobs(self) -> tuple[TokenRecord | None, ...] | None:
        """Of each prompt token, None for the first; None where none were asked for, and before all are known."""
        if self.prompt_rows is None:
            return None
        return (None, *(TokenRecord(int(row["ids"][0]), "prompt", 0, -1, *_numbers(row)) for row in self.prompt_rows))

    def _records(self, start: int) -> Iterator[TokenRecord]:
        rows = rows_of(self.logprobs, self.rounds, len(self.token_ids), prefill=True)
        origins = provenance(len(self.token_ids), self.rounds, self.round_drafts, self.round_lookups, self.forced, start)
        for place, one in enumerate(origins, start):
            record = TokenRecord(self.token_ids[place], *one)
            if len(rows):
                own = drawn(rows[place]) if one.draft_position else None
                record = TokenRecord(*record[:4], *_numbers(rows[place]), own, draft_top(rows[place]))
            yield record


def rows_of(steps: Sequence[Array], rounds: Sequence[int], num_tokens: int, *, prefill: bool) -> Array:
    """One row a token, of `num_tokens` that these rounds brought, out of the windows of the steps that emitted them; NO_ROWS
    where there are no steps. `prefill`: the first step is the one in which the prefill chose its token. A stop string may have
    cut the last tokens."""
    counts = [1] * prefill + [accepted + 1 for accepted in rounds] if steps else []  # a round is a step, as is the prefill's end
    parts = [rows[:count] for rows, count in zip(steps, counts, strict=False)]
    if not parts:
        return NO_ROWS
    return (parts[0] if len(parts) == 1 else np.concatenate(parts))[:num_tokens]


def drawn(row: Any) -> float | None:
    """With which log probability the draft of a row was drawn; None where rows do not have those of drafts."""
    return float(row["draft_logprob"]) if has_drafts(row) else None


def draft_top(row: Any) -> tuple[tuple[int, float], ...]:
    """The most likely tokens of the distribution that the draft of a row was chosen from; () where no model chose it, and where
    rows have no columns of drafts. A lookup leaves those of the draft whose place it took, which begin with that draft."""
    if not has_drafts(row) or row["draft"] == NO_TOKEN or row["draft_top_ids"][0] != row["draft"]:
        return ()
    return _pairs(row["draft_top_ids"].tolist()[1:], row["draft_tops"].tolist()[1:])


def _pairs(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((token, value) for token, value in zip(ids, logprobs, strict=True) if token != NO_TOKEN)


def _numbers(row: Any) -> tuple[float, int, tuple[tuple[int, float], ...]]:
    """Log probability, rank and most likely tokens of a row."""
    ids, logprobs = row["ids"].tolist(), row["logprobs"].tolist()
    return logprobs[0], int(row["rank"]), _pairs(ids[1:], logprobs[1:])
