"""Owns the record in which a step's news of all requests cross to another process: one packed, versioned run of bytes.

The engine's process packs what a `Converter` made, once a batch; the other side unpacks it into plain arrays and makes Python
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
from polydraft.runtime.output import Piece, of_prompt
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


REASONS = {finish.name.lower(): int(finish) for finish in Finish}


def news_of(handle: int, piece: Piece) -> News:
    """What a piece brings: its arrays as they are, and no object of any token."""
    request, told = piece.request, piece.told
    first = len(told.token_ids) - len(piece.tokens)
    ranks, drafts, ids, logprobs = _rows(piece)
    finish, error = (request.finish_reason or "", request.error) if piece.finished else ("", "")
    forced = np.array([place for place in piece.forced if first <= place < len(told.token_ids)], np.int32)
    return News(
        handle, finish, piece.tokens, piece.rounds, piece.round_drafts, forced, ranks, drafts, ids, logprobs, piece.new_text,
        error,
    )  # fmt: skip


def _rows(piece: Piece) -> tuple[Array, Array, Array, Array]:
    """Ranks, numbers of drafts, ids and numbers of the new tokens, and of the prompt's with the last news."""
    prompt = [one for one in of_prompt(piece.request) or () if one is not None] if piece.finished else []
    if not prompt and len(piece.steps) == 1 and piece.steps[0].count == len(piece.tokens):
        (step,) = piece.steps
        return step.ranks, step.drawn, step.ids, step.logprobs
    ids, values = [step.ids for step in piece.steps], [step.logprobs for step in piece.steps]
    count = len(piece.tokens) if piece.steps else 0
    of_tokens = ids[0].shape[1] if ids else 0
    columns = max([of_tokens, *(len(one.top) + 1 for one in prompt)])
    shape = count + len(prompt), columns
    out_ranks, out_drafts = np.zeros(shape[0], np.int32), np.full(shape[0], np.nan, np.float32)
    out_ids, out_values = np.full(shape, NO_TOKEN, np.int32), np.zeros(shape, np.float32)
    if count:  # a stop string may have cut the last tokens
        out_ranks[:count] = np.concatenate([step.ranks for step in piece.steps])[:count]
        out_drafts[:count] = np.concatenate([step.drawn for step in piece.steps])[:count]
        out_ids[:count, :of_tokens] = np.concatenate(ids)[:count]
        out_values[:count, :of_tokens] = np.concatenate(values)[:count]
    for row, one in enumerate(prompt, count):
        out_ranks[row] = one.rank
        for column, (token, value) in enumerate([(one.token_id, one.logprob), *one.top]):
            out_ids[row, column], out_values[row, column] = token, value
    return out_ranks, out_drafts, out_ids, out_values


def pack(news: Sequence[News]) -> bytes:
    """One record. Raises `RecordError` for more columns than a record can have."""
    columns = max((one.ids.shape[1] for one in news if len(one.ranks)), default=0)
    word = pack_word(int(Flag.STEP), columns)
    texts = [(one.text.encode(), one.error.encode()) for one in news]
    counts = [
        (n.handle, REASONS.get(n.finish, 0), len(n.token_ids), len(n.rounds), len(n.forced), len(n.ranks), len(text), len(error))
        for n, (text, error) in zip(news, texts, strict=True)
    ]
    parts = [np.array(counts, np.int32).ravel()]
    for one in news:
        parts += [one.token_ids, one.rounds, one.round_drafts, one.forced]
        if len(one.ranks):
            parts += [one.ranks, _words(one.draft_logprobs)]
            parts += [_wide(one.ids, columns, NO_TOKEN).ravel(), _words(_wide(one.logprobs, columns, 0)).ravel()]
    body = np.concatenate(parts, dtype=np.int32, casting="unsafe")
    blob = b"".join(part for pair in texts for part in pair)
    header = np.array([word, VERSION, len(news), len(Head) + len(body), len(blob)], np.int32)
    return header.tobytes() + body.tobytes() + blob


def _words(numbers: Array) -> Array:
    """The bits of float32 numbers."""
    return np.ascontiguousarray(numbers).view(np.int32)


def _wide(rows: Array, columns: int, fill: int) -> Array:
    """Rows of so many columns."""
    if rows.shape[1] == columns:
        return rows
    wide = np.full((len(rows), columns), fill, rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide


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
