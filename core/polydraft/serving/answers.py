"""What a text of the engine becomes in OpenAI's JSON, whole or in pieces.

The service feeds it the deltas of a request as they come. Token texts, and the JSON of log probabilities and provenance, are made
here, in the process that talks to clients, and only for those who asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polydraft.models.tokenizer import Tokenizer
from polydraft.output.provenance import provenance
from polydraft.output.request_delta import RequestDelta
from polydraft.sentinels import NO_TOKEN
from polydraft.serving.wire import Span

FINISH = {"stop": "stop", "length": "length", "abort": "stop", "error": "stop"}
IMPOSSIBLE = -9999.0
"""OpenAI's number for the log probability of a token that cannot come."""


class TokenTexts:
    """What single tokens decode to; the most frequent ones are remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        """The text of one token alone; a part of a character is U+FFFD."""
        if token not in self._known:
            if len(self._known) > 1 << 17:
                self._known.clear()
            self._known[token] = self._tokenizer.decode((token,), skip_special_tokens=False)
        return self._known[token]


class Choice:
    """One text on its way to a client."""

    def __init__(self, index: int, prompt_ids: Sequence[int], texts: TokenTexts) -> None:
        self.index, self.prompt_ids, self._texts = index, prompt_ids, texts
        self.text = ""
        self.token_ids: list[int] = []
        self.rounds: list[int] = []
        self.round_drafts: list[int] = []
        self.forced: set[int] = set()
        self.finish = ""
        self.error = ""
        self._timing: dict[str, Any] = {"step_ms": 0.0, "host_gap_ms": 0.0, "spans": []}
        self._rows: list[Any] = []
        """Log probabilities by token, of `row_type`; none where none were asked for."""
        self._prompt_rows: list[Any] = []
        """Likewise of the prompt from its second token on."""
        self._reported = 0
        self._offset = 0

    def feed(self, delta: RequestDelta) -> str:
        """Take what is new; returns the new text."""
        self.token_ids += delta.token_ids.tolist()
        self.rounds += delta.rounds.tolist()
        self.round_drafts += delta.round_drafts.tolist()
        self.forced.update(delta.forced.tolist())
        if len(delta.logprobs):  # copies: the message has the deltas of other requests, too
            self._rows += list(delta.logprobs.copy())
        if len(delta.prompt_logprobs):
            self._prompt_rows = list(delta.prompt_logprobs.copy())
        self.text += delta.text
        self.finish, self.error = delta.finish, delta.error
        return delta.text

    # -- what was asked for ------------------------------------------------------------------------
    def time(self, step_ms: float, host_gap_ms: float, spans: Sequence[Span]) -> None:
        """How long the step that brought the last delta took, and what went on where since the one before."""
        self._timing["step_ms"], self._timing["host_gap_ms"] = round(step_ms, 3), round(host_gap_ms, 3)
        self._timing["spans"] += spans

    def take_timing(self) -> dict[str, Any]:
        """All that was noted since the last time."""
        timing, self._timing = self._timing, {**self._timing, "spans": []}
        return timing

    def new_tokens(self) -> range:
        """Places of the tokens that were not reported yet; they count as reported."""
        new = range(self._reported, len(self.token_ids))
        self._reported = len(self.token_ids)
        return new

    def provenance(self, places: range) -> list[dict[str, Any]]:
        """Who proposed the tokens at these places, their probability and round."""
        records = []
        origins = provenance(places.stop, self.rounds, self.round_drafts, self.forced, places.start)
        for place, (source, position, number) in zip(places, origins, strict=True):
            token = self.token_ids[place]
            record: dict[str, Any] = {"token_id": token, "token": self._texts.of(token), "source": source}
            record |= {"draft_position": position or None, "round": number if number >= 0 else None}
            record["round_drafts"] = self.round_drafts[number] if number >= 0 else None
            if place < len(self._rows):
                row = self._rows[place]
                record["probability"] = math.exp(float(row["logprobs"][0]))
                record["draft_probability"] = math.exp(float(row["draft_logprob"])) if position else None
            records.append(record)
        return records

    def chat_logprobs(self, places: range, top: int) -> dict[str, Any]:
        """`logprobs` of a chat's choice."""
        content = []
        for place in places:
            pairs = self._pairs(self._rows[place])
            one = self._chat_token(*pairs[0])
            content.append({**one, "top_logprobs": [self._chat_token(*pair) for pair in pairs[1 : top + 1]]})
        return {"content": content, "refusal": None}

    def completion_logprobs(self, places: range, top: int) -> dict[str, Any]:
        """`logprobs` of a completion's choice."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for place in places:
            self._add_row(columns, self._rows[place], top)
        return dict(columns)

    def prompt_logprobs(self, top: int) -> dict[str, list[Any]]:
        """The same of the prompt's tokens, the first without a number; `text_offset` counts on from here."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        first = self._texts.of(self.prompt_ids[0])
        for part, value in (("tokens", first), ("token_logprobs", None), ("top_logprobs", None), ("text_offset", 0)):
            columns[part].append(value)
        self._offset = len(first)
        for row in self._prompt_rows:
            self._add_row(columns, row, top)
        return columns

    def _add_row(self, columns: dict[str, list[Any]], row: Any, top: int) -> None:
        pairs = self._pairs(row)
        text = self._texts.of(pairs[0][0])
        columns["tokens"].append(text)
        columns["token_logprobs"].append(pairs[0][1])
        likely = {self._texts.of(token): value for token, value in reversed(pairs[1 : top + 1])}
        columns["top_logprobs"].append({text: pairs[0][1]} | likely if likely else None)  # OpenAI's has the token that came, too
        columns["text_offset"].append(self._offset)
        self._offset += len(text)

    @staticmethod
    def _pairs(row: Any) -> list[tuple[int, float]]:
        ids, values = row["ids"].tolist(), row["logprobs"].tolist()
        return [(t, v if math.isfinite(v) else IMPOSSIBLE) for t, v in zip(ids, values, strict=True) if t != NO_TOKEN]

    def _chat_token(self, token: int, value: float) -> dict[str, Any]:
        text = self._texts.of(token)
        whole = "\ufffd" not in text
        return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}


def usage(choices: Sequence[Choice], num_prompts: int) -> dict[str, Any]:
    """`usage`: tokens of the prompts (each once) and of all texts, and the drafts among them."""
    by_prompt = len(choices) // max(num_prompts, 1)
    prompt = sum(len(choice.prompt_ids) for choice in choices[:: max(by_prompt, 1)])
    new = sum(len(choice.token_ids) for choice in choices)
    accepted = sum(sum(choice.rounds) for choice in choices)
    drafted = sum(sum(choice.round_drafts) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def error_body(message: str, kind: str, code: int) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
