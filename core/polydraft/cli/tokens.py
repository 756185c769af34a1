"""Shows single tokens: who proposed each, and its log probabilities, as JSON and as a table.

`polydraft generate` calls it for requests that asked for log probabilities or provenance. It computes no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polydraft.cli.show import Screen
    from polydraft.models.tokenizer import Tokenizer
    from polydraft.output.request_output import RequestOutput, TokenRecord


def number(logprob: float) -> float | None:
    """A log probability as JSON knows numbers: None for a token that cannot come."""
    return logprob if math.isfinite(logprob) else None


class Tokens:
    """Tells tokens with their text, each decoded by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """What one token alone decodes to; a part of a character is U+FFFD."""
        if token_id not in self._texts:
            self._texts[token_id] = self._tokenizer.decode((token_id,))
        return self._texts[token_id]

    def provenance(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Who proposed each token."""
        return [self._origin(record) for record in output.tokens]

    def logprobs(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Each token with its log probabilities and who proposed it."""
        return [
            {
                **self._origin(record),
                **self._numbers(record),
                "draft_logprob": None if record.draft_logprob is None else number(record.draft_logprob),
            }
            for record in output.tokens
        ]

    def prompt_logprobs(self, output: RequestOutput) -> list[dict[str, Any] | None] | None:
        """Each prompt token with its log probabilities, None for the first."""
        found = output.prompt_logprobs
        return None if found is None else [None if one is None else self._of_prompt(one) for one in found]

    def drafts(self, output: RequestOutput) -> list[list[dict[str, Any]]]:
        """What each round drafted, accepted or not: in the order of `rounds`."""
        found: list[list[dict[str, Any]]] = [
            [
                {"token_id": token, "token": self.text(token), "logprob": None if value is None else number(value)}
                for token, value in drafts
            ]
            for drafts in output.drafts
        ]
        for drafts, tops in zip(found, output.draft_tops, strict=False):
            for draft, top in zip(drafts, tops, strict=True):
                draft["top_logprobs"] = self._top(top)
        return found

    def _origin(self, record: TokenRecord) -> dict[str, Any]:
        return {
            "token_id": record.token_id,
            "token": self.text(record.token_id),
            "source": record.source,
            "draft_position": record.draft_position or None,
            "round": record.round if record.round >= 0 else None,
        }

    def _of_prompt(self, one: TokenRecord) -> dict[str, Any]:
        return {"token_id": one.token_id, "token": self.text(one.token_id), **self._numbers(one)}

    def _numbers(self, record: TokenRecord) -> dict[str, Any]:
        logprob = None if record.logprob is None else number(record.logprob)
        return {"logprob": logprob, "rank": record.rank, "top_logprobs": self._top(record.top)}

    def _top(self, top: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        return [{"token_id": token, "token": self.text(token), "logprob": number(value)} for token, value in top]


def request_fields(tokens: Tokens, output: RequestOutput, *, provenance: bool) -> Mapping[str, Any]:
    """What the JSON of a request has besides: only what was asked for."""
    fields: dict[str, Any] = {"tokens": tokens.provenance(output)} if provenance else {}
    if output.logprobs:
        fields |= {"logprobs": tokens.logprobs(output), "drafts": tokens.drafts(output)}
    prompt = tokens.prompt_logprobs(output)
    return fields | ({} if prompt is None else {"prompt_logprobs": prompt})


def show(screen: Screen, tokens: Tokens, output: RequestOutput) -> None:
    """A table of a request's tokens for a person."""
    head = ("token", "source", "round", "logprob", "rank", "most likely")
    screen.table(head, _rows(tokens, output))


def _rows(tokens: Tokens, output: RequestOutput) -> Iterator[Sequence[str]]:
    for record in output.tokens:
        source = f"draft {record.draft_position}" if record.draft_position else record.source
        at = str(record.round) if record.round >= 0 else "prefill"
        top = "  ".join(f"{tokens.text(token)!r} {value:.2f}" for token, value in record.top)
        logprob = "" if record.logprob is None else f"{record.logprob:.3f}"
        yield repr(tokens.text(record.token_id)), source, at, logprob, str(record.rank or ""), top
