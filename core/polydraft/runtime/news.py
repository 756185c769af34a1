"""Owns the record in which a step's news of all requests cross to another process: one packed, versioned run of bytes.

The engine's process packs what `poll` returned, once a step; the other side unpacks it into plain arrays and makes Python
objects of them only for whoever asks. Neither side trusts the other: what does not fit its own lengths is refused whole.

Layout, all int32 in the machine's order (both processes run on it): the header; one row of counts a request; then of all
requests one after the other their tokens, rounds, drafts verified by round, forced places, and of those with log probabilities
the ranks, the drafts' numbers, the token ids and numbers of exactly the columns that somebody asked for; last the texts in
UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from polydraft.contracts.layout import Flag
from polydraft.device import Array
from polydraft.errors import RecordError
from polydraft.runtime.output import RequestOutput
from polydraft.runtime.packed import pack_word, unpack_word
from polydraft.sentinels import NO_TOKEN, Finish

VERSION = 1


class Head(IntEnum):
    """Word of the header."""

    FLAG_AND_COLUMNS = 0
    VERSION = 1
    NUM_REQUESTS = 2
    NUM_WORDS = 3
    """Of the whole record without the texts."""
    TEXT_BYTES = 4


class Count(IntEnum):
    """Word of a request's row."""

    HANDLE = 0
    FINISH = 1
    """`Finish`; NONE while it goes on."""
    TOKENS = 2
    ROUNDS = 3
    FORCED = 4
    ROWS = 5
    """Rows of log probabilities: of the tokens, then of the prompt from its second token on; 0 where none were asked for."""
    TEXT = 6
    """Bytes of the new text."""
    ERROR = 7
    """Bytes of the error's sentence."""


class News(NamedTuple):
    """What is new of one request. Arrays are int32 [t], [r] or [f] (places of the text that a constraint forced), `logprobs`
    float32 [rows, C], `draft_logprobs` float32 [rows], NaN where the token was no draft. The first `len(token_ids)` rows belong
    to the tokens, the others to the prompt."""

    handle: int
    finish: str
    """`Finish` in lower case, "" while it goes on."""
    token_ids: Array
    rounds: Array
    round_drafts: Array
    forced: Array
    ranks: Array
    draft_logprobs: Array
    ids: Array
    logprobs: Array
    text: str
    error: str


REASONS = {finish.name.lower(): finish for finish in Finish}


def news_of(handle: int, output: RequestOutput) -> News:
    """What an output of `Engine.poll` brings, without making an object of any token."""
    new, rounds = len(output.new_token_ids), len(output.new_rounds)
    drafted = output.round_drafts[len(output.round_drafts) - rounds :] if rounds else ()
    ranks, drafts, ids, logprobs = _rows(output, len(output.token_ids) - new)
    return News(
        handle, output.finish_reason or "", _ints(output.new_token_ids), _ints(output.new_rounds), _ints(drafted),
        _ints([place for place in output.forced if place >= len(output.token_ids) - new]), ranks, drafts, ids, logprobs,
        output.text_delta, output.error,
    )  # fmt: skip


def _ints(values: Sequence[int]) -> Array:
    return np.array(values, np.int32)


def _rows(output: RequestOutput, start: int) -> tuple[Array, Array, Array, Array]:
    """Ranks, numbers of drafts, ids and numbers of the new tokens, and of the prompt's with the last news."""
    steps = output.logprobs
    ranks = [step.ranks for step in steps]
    ids, logprobs = [step.ids for step in steps], [step.logprobs for step in steps]
    drafts = []
    for step in steps:
        own = np.full(len(step.ranks), np.nan, np.float32)
        count = min(len(own), len(step.drafts))
        same = step.drafts[:count] == step.ids[:count, 0]
        own[:count][same] = step.draft_logprobs[:count][same]
        drafts.append(own)
    parts = [np.concatenate(p)[start : len(output.token_ids)] if p else None for p in (ranks, drafts, ids, logprobs)]
    prompt = [one for one in output.prompt_logprobs or () if one is not None] if output.finished else []
    width = max(len(one.top) for one in prompt) + 1 if prompt else parts[2].shape[1] if parts[2] is not None else 0
    columns = max(width, parts[2].shape[1] if parts[2] is not None else 0)
    rows = (0 if parts[0] is None else len(parts[0])) + len(prompt)
    out_ranks, out_drafts = np.zeros(rows, np.int32), np.full(rows, np.nan, np.float32)
    out_ids, out_logprobs = np.full((rows, columns), NO_TOKEN, np.int32), np.zeros((rows, columns), np.float32)
    of_tokens = [part for part in parts if part is not None]
    if of_tokens:
        n, c = of_tokens[2].shape
        for whole, part in zip((out_ranks, out_drafts), of_tokens[:2], strict=True):
            whole[:n] = part
        out_ids[:n, :c], out_logprobs[:n, :c] = of_tokens[2], of_tokens[3]
    for row, one in enumerate(prompt, rows - len(prompt)):
        out_ranks[row] = one.rank
        for column, (token, value) in enumerate([(one.token_id, one.logprob), *one.top]):
            out_ids[row, column], out_logprobs[row, column] = token, value
    return out_ranks, out_drafts, out_ids, out_logprobs


def pack(news: Sequence[News]) -> bytes:
    """One record. Raises `RecordError` for more columns than a record can have."""
    columns = max((one.ids.shape[1] for one in news if len(one.ranks)), default=0)
    texts = [(one.text.encode(), one.error.encode()) for one in news]
    rows = np.array(
        [
            (
                n.handle,
                REASONS.get(n.finish, Finish.NONE),
                len(n.token_ids),
                len(n.rounds),
                len(n.forced),
                len(n.ranks),
                len(t),
                len(e),
            )
            for n, (t, e) in zip(news, texts, strict=True)
        ],
        np.int32,
    ).reshape(len(news), len(Count))
    parts = [rows.ravel()]
    for one in news:
        parts += [one.token_ids, one.rounds, one.round_drafts, one.forced]
        if len(one.ranks):
            fill = ((0, 0), (0, columns - one.ids.shape[1]))
            ids, logprobs = np.pad(one.ids, fill, constant_values=NO_TOKEN), np.pad(one.logprobs, fill)
            parts += [one.ranks, one.draft_logprobs.view(np.int32), ids.ravel(), logprobs.ravel().view(np.int32)]
    body = np.concatenate(parts).astype(np.int32)
    blob = b"".join(part for pair in texts for part in pair)
    word = pack_word(int(Flag.STEP), columns)
    header = np.array([word, VERSION, len(news), len(Head) + len(body), len(blob)], np.int32)
    return header.tobytes() + body.tobytes() + blob


class _Reader:
    """Takes parts off the words and bytes of a record, never more than there are."""

    def __init__(self, words: Array, blob: bytes) -> None:
        self.words, self.blob, self._at, self._byte = words, blob, 0, 0

    def take(self, count: int) -> Array:
        part = self.words[self._at : self._at + count]
        self._at += count
        if len(part) < count:
            raise RecordError(f"a record of news ends {count - len(part)} words early; it was cut, or packed wrong")
        return part

    def text(self, count: int) -> str:
        part = self.blob[self._byte : self._byte + count]
        self._byte += count
        try:
            if len(part) == count:
                return part.decode()
        except UnicodeDecodeError as error:
            raise RecordError(f"a record of news has text that is no UTF-8: {error}; it was cut, or packed wrong") from error
        raise RecordError(f"a record of news ends {count - len(part)} bytes of text early; it was cut, or packed wrong")

    def done(self) -> bool:
        """Whether all was taken."""
        return self._at == len(self.words) and self._byte == len(self.blob)


def unpack(data: bytes) -> list[News]:
    """The news of a record. Raises `RecordError` for anything that `pack` would not have written."""
    if len(data) < 4 * len(Head):
        raise RecordError(f"a record of news has {len(data)} bytes, wanted at least {4 * len(Head)}; it was cut")
    header = np.frombuffer(data, np.int32, len(Head))
    flag, columns = unpack_word(int(header[Head.FLAG_AND_COLUMNS]))
    if flag != Flag.STEP or header[Head.VERSION] != VERSION:
        raise RecordError(
            f"a record has flag {flag} and version {header[Head.VERSION]}, wanted {int(Flag.STEP)} and {VERSION}; restart the "
            "older of the two processes"
        )
    count, words, size = (int(header[place]) for place in (Head.NUM_REQUESTS, Head.NUM_WORDS, Head.TEXT_BYTES))
    if count < 0 or size < 0 or words < len(Head) + count * len(Count) or 4 * words + size != len(data):
        raise RecordError(
            f"a record of news says {count} requests, {words} words and {size} bytes of text, and has {len(data)} bytes; it was "
            "cut, or packed wrong"
        )
    reader = _Reader(np.frombuffer(data, np.int32, words - len(Head), 4 * len(Head)), data[4 * words :])
    table = reader.take(count * len(Count)).reshape(count, len(Count))
    if (table[:, Count.HANDLE :] < 0).any() or (table[:, Count.FINISH] > max(Finish)).any():
        raise RecordError("a record of news has a count below 0 or an unknown end; it was overwritten, or packed wrong")
    found = [_one(reader, row, columns) for row in table.tolist()]
    texts = [(reader.text(row[Count.TEXT]), reader.text(row[Count.ERROR])) for row in table.tolist()]
    if not reader.done():
        raise RecordError("a record of news has more words or text than its requests; it was overwritten, or packed wrong")
    return [one._replace(text=text, error=error) for one, (text, error) in zip(found, texts, strict=True)]


def _one(reader: _Reader, row: list[int], columns: int) -> News:
    counts = (Count.TOKENS, Count.ROUNDS, Count.ROUNDS, Count.FORCED)
    tokens, rounds, drafts, forced = (reader.take(row[part]) for part in counts)
    rows = row[Count.ROWS]
    ranks, draft_logprobs = reader.take(rows), reader.take(rows).view(np.float32)
    ids, logprobs = reader.take(rows * columns), reader.take(rows * columns).view(np.float32)
    shape = rows, columns
    finish = Finish(row[Count.FINISH])
    return News(
        row[Count.HANDLE], "" if finish is Finish.NONE else finish.name.lower(), tokens, rounds, drafts, forced, ranks,
        draft_logprobs, ids.reshape(shape), logprobs.reshape(shape), "", "",
    )  # fmt: skip
