"""What a text of the engine becomes in OpenAI's JSON, whole or in pieces.

The service feeds it the deltas of a request as they come. Token texts, and the JSON of log probabilities and provenance, are made
here, in the process that talks to clients, and only for those who asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polydraft.models.tokenizer import TextOffsets, Tokenizer
from polydraft.output.provenance import provenance
from polydraft.output.request_delta import RequestDelta
from polydraft.output.request_output import draft_top, drawn
from polydraft.program.packed import has_drafts
from polydraft.sentinels import NO_TOKEN
from polydraft.serving.reasoning import ReasoningReader
from polydraft.serving.tool_calls import Call, CallReader
from polydraft.serving.wire import Span

FINISH = {"stop": "stop", "length": "length", "abort": "stop", "error": "stop", "refused": "stop"}
MOST_SAID = 2000
"""Characters of an error's message."""
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

    def text(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of several."""
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def offsets(self, start: int, **shown: bool) -> TextOffsets:
        """Where in a text that begins at `start` its tokens do; `shown` as in `TextOffsets`."""
        return TextOffsets(self._tokenizer, start, **shown)


@dataclass
class Said:
    """What a text says in an answer's fields, or what is new of it."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, new: Said) -> None:
        """Append what is new."""
        self.content += new.content
        self.reasoning += new.reasoning
        for call in new.calls:
            if call.index == len(self.calls):
                self.calls.append(Call(call.index, call.id, call.name))
            self.calls[call.index].arguments += call.arguments


class Choice:
    """One text on its way to a client."""

    def __init__(self, index: int, prompt_ids: Sequence[int], texts: TokenTexts, *, skip_special_tokens: bool = True) -> None:
        self.index, self.prompt_ids, self._texts, self._skips = index, prompt_ids, texts, skip_special_tokens
        self.reasoning: ReasoningReader | None = None
        """What tells reasoning in the text from the reply; None: all of it is reply."""
        self.calls: CallReader | None = None
        """What reads calls of tools; None: there are none."""
        self.said = Said()
        self.reasoning_tokens = self._opening = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.rounds: list[int] = []
        self.round_drafts: list[int] = []
        self.round_lookups: list[int] = []
        self.forced: set[int] = set()
        self._policies: list[tuple[int, str]] = []
        """Places from which on other weights drew the tokens, and their digests."""
        self.finish = ""
        self.error = ""
        self._timing: dict[str, Any] = {"step_ms": 0.0, "host_gap_ms": 0.0, "spans": []}
        self._rows: list[Any] = []
        """Log probabilities by token, of `row_type`; none where none were asked for."""
        self._prompt_rows: list[Any] = []
        """Likewise of the prompt from its second token on."""
        self._reported = 0
        self._offsets = self._offsets_from(0)

    def _offsets_from(self, start: int, *, generated: bool = True) -> TextOffsets:
        return self._texts.offsets(start, skip_special_tokens=self._skips, generated=generated)

    def prompt_text(self) -> str:
        """The prompt as it is echoed."""
        return self._texts.text(self.prompt_ids, skip_special_tokens=self._skips)

    def weights_digests(self, places: range) -> list[str]:
        """Of the weights that drew these tokens, in order, each once."""
        ends = [begin for begin, _ in self._policies[1:]] + [len(self.token_ids)]
        drew = (
            digest
            for (begin, digest), end in zip(self._policies, ends, strict=False)
            if max(begin, places.start) < min(end, places.stop)
        )
        return list(dict.fromkeys(drew))

    def feed(self, delta: RequestDelta, weights_digest: str = "") -> Said:
        """Take what is new, which weights of this digest drew; returns what it says."""
        if len(delta.token_ids) and (not self._policies or self._policies[-1][1] != weights_digest):
            self._policies.append((len(self.token_ids), weights_digest))
        self.token_ids += delta.token_ids.tolist()
        self.rounds += delta.rounds.tolist()
        self.round_drafts += delta.round_drafts.tolist()
        self.round_lookups += delta.round_lookups.tolist()
        self.forced.update(delta.forced.tolist())
        if len(delta.logprobs):  # copies: the message has the deltas of other requests, too
            self._rows += list(delta.logprobs.copy())
        if len(delta.prompt_logprobs):
            self._prompt_rows = list(delta.prompt_logprobs.copy())
        self.text += delta.text
        self.finish, self.error = delta.finish, delta.error
        new = Said(delta.text) if self.reasoning is None else self._told_apart(delta.text, self.reasoning)
        if self.calls is not None:
            new.content, new.calls = self.calls.feed(new.content, last=bool(self.finish))
        self.said.add(new)
        return new

    def _told_apart(self, text: str, reader: ReasoningReader) -> Said:
        before = reader.state
        reasoning, reply = reader.feed(text, last=bool(self.finish))
        if before in ("begin", "reasoning") and reader.reasons:
            if before == "begin":
                self._opening = self._tokens(reader.opening)
            self.reasoning_tokens = len(self.token_ids) - self._opening - self._tokens(-reader.closing)
        return Said(reply, reasoning)

    def _tokens(self, characters: int) -> int:
        """Tokens that the first so many characters are made of, or the last ones where their number is negative."""
        count = 0
        while count < len(self.token_ids):
            ids = self.token_ids[:count] if characters >= 0 else self.token_ids[len(self.token_ids) - count :]
            if len(self._texts.text(ids, skip_special_tokens=False)) >= abs(characters):
                break
            count += 1
        return count

    @property
    def finish_reason(self) -> str | None:
        """As OpenAI has it; None while the text goes on."""
        if not self.finish:
            return None
        reason = FINISH[self.finish]
        return "tool_calls" if reason == "stop" and self.said.calls else reason

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
        origins = provenance(places.stop, self.rounds, self.round_drafts, self.round_lookups, self.forced, places.start)
        for place, (source, position, number) in zip(places, origins, strict=True):
            token = self.token_ids[place]
            record: dict[str, Any] = {"token_id": token, "token": self._texts.of(token), "source": source}
            record |= {"draft_position": position or None, "round": number if number >= 0 else None}
            record["round_drafts"] = self.round_drafts[number] if number >= 0 else None
            if place < len(self._rows):
                row = self._rows[place]
                record["probability"] = math.exp(float(row["logprobs"][0]))
                own = drawn(row) if position else None
                record["draft_probability"] = None if own is None else math.exp(own)
                if has_drafts(row):
                    verified, likely = int(row["draft"]), draft_top(row)
                    record["draft"] = None if verified == NO_TOKEN else self._texts.of(verified)
                    record["draft_top_logprobs"] = [self._listed(token, number) for token, number in likely] or None
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
        columns = _columns()
        for place in places:
            self._add_row(columns, self._rows[place], top, self._offsets.push(self.token_ids[place]))
        return columns

    def prompt_logprobs(self, top: int) -> dict[str, list[Any]]:
        """The same of the prompt's tokens, the first without a number; `text_offset` counts on from here."""
        columns, offsets = _columns(), self._offsets_from(0, generated=False)
        for part, value in zip(columns, (self._texts.of(self.prompt_ids[0]), None, None, None, 0), strict=True):
            columns[part].append(value)
        offsets.push(self.prompt_ids[0])
        for token, row in zip(self.prompt_ids[1:], self._prompt_rows, strict=False):
            self._add_row(columns, row, top, offsets.push(token))
        self._offsets = self._offsets_from(len(self.prompt_text()))
        return columns

    def _add_row(self, columns: dict[str, list[Any]], row: Any, top: int, offset: int) -> None:
        (chosen, value), *likely = self._pairs(row)[: top + 1]
        columns["tokens"].append(self._texts.of(chosen))
        columns["token_logprobs"].append(value)
        by_text = {self._texts.of(token): number for token, number in reversed(likely)}
        # OpenAI's has the token that came, too.
        columns["top_logprobs"].append({self._texts.of(chosen): value} | by_text if likely else None)
        entries = [self._listed(token, number) for token, number in likely]
        columns["top_logprobs_list"].append(entries or None)
        columns["text_offset"].append(offset)

    @staticmethod
    def _pairs(row: Any) -> list[tuple[int, float]]:
        ids, values = row["ids"].tolist(), row["logprobs"].tolist()
        return [(t, v if math.isfinite(v) else IMPOSSIBLE) for t, v in zip(ids, values, strict=True) if t != NO_TOKEN]

    def _listed(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token, "token": self._texts.of(token), "logprob": max(logprob, IMPOSSIBLE)}

    def _chat_token(self, token: int, value: float) -> dict[str, Any]:
        text = self._texts.of(token)
        whole = "\ufffd" not in text
        return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}


def _columns() -> dict[str, list[Any]]:
    """OpenAI's `logprobs` of a completion, and the most likely tokens as lists, too: several of them may have one text, since
    a part of a character alone is U+FFFD."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "top_logprobs_list": [], "text_offset": []}


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
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def error_body(message: str, kind: str, code: int, param: str = "") -> dict[str, Any]:
    """OpenAI's form of an error; `param`: the field that it is about. Message and field may repeat what a client has sent, and
    are cut where that is long."""
    field = shortened(param, MOST_SAID) or None
    return {"error": {"message": shortened(message, MOST_SAID), "type": kind, "param": field, "code": code}}


def shortened(text: str, most: int) -> str:
    """A text, or its beginning and end and how long it is, where it has more than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... {text[len(text) - most // 2 :]} ({len(text)} characters)"
