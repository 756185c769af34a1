"""What is new of one request for another process, and the message in which the deltas of a whole batch cross.

`OutputProcessor` makes deltas in the engine's process, `pack` makes one run of bytes of a batch, and `unpack` gives the other
side the same deltas, whose arrays are views of those bytes; Python objects are made of them only on request. Neither side
trusts the other: what does not fit its own lengths is refused whole.

Layout, all int32 in the machine's order (both processes run on it): the header; one row of counts a request; then of one request
after the other its tokens, rounds, drafts verified by round, forced places, and, if log probabilities were requested, rows of its
tokens and of its prompt, as the device packed them, of exactly the columns asked for; last the texts in UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from polydraft.contracts.layout import MAX_COLUMNS, Flag, row_words
from polydraft.device import Array
from polydraft.errors import RecordError
from polydraft.program.packed import NO_ROWS, has_drafts, pack_word, row_type, unpack_word
from polydraft.sentinels import Finish

VERSION = 5


class Head(IntEnum):
    """Word of the header."""

    FLAG_AND_COLUMNS = 0
    """The most columns of a request."""
    VERSION = 1
    NUM_REQUESTS = 2
    NUM_WORDS = 3
    """Of the whole message without the texts."""
    TEXT_BYTES = 4


class Count(IntEnum):
    """Word of a request's row."""

    HANDLE = 0
    FINISH = 1
    """`Finish`; NONE while it goes on."""
    TOKENS = 2
    ROUNDS = 3
    FORCED = 4
    COLUMNS = 5
    """Of the rows of its tokens; 0 where no log probabilities were asked for, and there are no rows."""
    PROMPT_ROWS = 6
    """Rows of the prompt from its second token on, with the delta that they are complete in; else 0."""
    PROMPT_COLUMNS = 7
    OF_DRAFTS = 8
    """1 where the rows of its tokens have the columns of drafts, too."""
    TEXT = 9
    """Bytes of the new text."""
    ERROR = 10
    """Bytes of the error's sentence."""


class RequestDelta(NamedTuple):
    """What is new of one request."""

    handle: int
    finish: str
    """`Finish` in lower case, "" while it goes on."""
    token_ids: Array
    """int32 [t]."""
    rounds: Array
    """int32 [r]: drafts that each new round accepted."""
    round_drafts: Array
    """int32 [r]: drafts that it verified."""
    round_lookups: Array
    """int32 [r]: those of them, the last ones, that were looked up beside a model's."""
    forced: Array
    """int32 [f]: places of new tokens among all of the request that a constraint left no choice for, ascending."""
    logprobs: Array
    """[t] of `row_type`: `draft_logprob` is of the token where it was a draft. [0] where none were asked for."""
    prompt_logprobs: Array
    """[p] of `row_type`: the prompt from its second token on, with the delta that they are complete in; else [0]."""
    text: str
    error: str


NO_PLACES: Final[Array] = np.empty(0, np.int32)
"""Where nothing was forced."""
FINISHES = {finish.name.lower(): int(finish) for finish in Finish}


def pack(deltas: Sequence[RequestDelta]) -> bytes:
    """One message. Raises `RecordError` for more columns than a record can have."""
    counts, parts, texts = [], [], []
    most = 0
    for one in deltas:
        columns, of_prompt = _columns(one.logprobs), _columns(one.prompt_logprobs)
        most = max(most, columns, of_prompt)
        text, error = one.text.encode(), one.error.encode()
        texts += [text, error]
        counts.append(
            (
                one.handle, FINISHES.get(one.finish, 0), len(one.token_ids), len(one.rounds), len(one.forced), columns,
                len(one.prompt_logprobs), of_prompt, int(has_drafts(one.logprobs)), len(text), len(error),
            )
        )  # fmt: skip
        parts += [one.token_ids.tobytes(), one.rounds.tobytes(), one.round_drafts.tobytes(), one.round_lookups.tobytes()]
        parts.append(one.forced.tobytes())
        if columns or of_prompt:
            parts += [_words(one.logprobs, columns), _words(one.prompt_logprobs, of_prompt)]
    table = np.array(counts, np.int32).tobytes()
    body, blob = b"".join(parts), b"".join(texts)
    size = len(Head) + (len(table) + len(body)) // 4
    header = np.array([pack_word(int(Flag.STEP), most), VERSION, len(deltas), size, len(blob)], np.int32)
    return b"".join((header.tobytes(), table, body, blob))


def _columns(rows: Array) -> int:
    """Of these rows; 0 where there are none."""
    columns: int = rows.dtype["ids"].shape[0] if len(rows) else 0
    return columns


def _words(rows: Array, columns: int) -> bytes:
    """The words of rows, without the columns that only other requests asked for."""
    if not columns:
        return b""
    wanted = row_type(columns, drafts=has_drafts(rows))
    return (rows if rows.dtype == wanted else rows.astype(wanted)).tobytes()


class _Reader:
    """Takes parts off the words and bytes of a message, never more than there are."""

    def __init__(self, words: Array, blob: bytes) -> None:
        self.words, self.blob, self._at, self._byte = words, blob, 0, 0

    def take(self, count: int) -> Array:
        part = self.words[self._at : self._at + count]
        self._at += count
        if len(part) < count:
            raise RecordError(f"a message of deltas ends {count - len(part)} words early; it was cut, or packed wrong")
        return part

    def rows(self, count: int, columns: int, *, drafts: bool = False) -> Array:
        """Rows of log probabilities; NO_ROWS where there are no columns."""
        if not count or not columns:
            return NO_ROWS
        return self.take(count * row_words(columns, drafts=drafts)).view(row_type(columns, drafts=drafts))

    def text(self, count: int) -> str:
        part = self.blob[self._byte : self._byte + count]
        self._byte += count
        try:
            if len(part) == count:
                return part.decode()
        except UnicodeDecodeError as error:
            raise RecordError(f"a message of deltas has text that is no UTF-8: {error}; it was cut, or packed wrong") from error
        raise RecordError(f"a message of deltas ends {count - len(part)} bytes of text early; it was cut, or packed wrong")

    def done(self) -> bool:
        """Whether all was taken."""
        return self._at == len(self.words) and self._byte == len(self.blob)


def unpack(data: bytes) -> list[RequestDelta]:
    """The deltas of a message. Raises `RecordError` for anything that `pack` would not have written."""
    if len(data) < 4 * len(Head):
        raise RecordError(f"a message of deltas has {len(data)} bytes, wanted at least {4 * len(Head)}; it was cut")
    header = np.frombuffer(data, np.int32, len(Head))
    flag, columns = unpack_word(int(header[Head.FLAG_AND_COLUMNS]))
    if flag != Flag.STEP or header[Head.VERSION] != VERSION:
        raise RecordError(
            f"a message has flag {flag} and version {header[Head.VERSION]}, wanted {int(Flag.STEP)} and {VERSION}; restart the "
            "older of the two processes"
        )
    count, words, size = (int(header[place]) for place in (Head.NUM_REQUESTS, Head.NUM_WORDS, Head.TEXT_BYTES))
    if count < 0 or size < 0 or words < len(Head) + count * len(Count) or 4 * words + size != len(data):
        raise RecordError(
            f"a message of deltas says {count} requests, {words} words and {size} bytes of text, and has {len(data)} bytes; it "
            "was cut, or packed wrong"
        )
    reader = _Reader(np.frombuffer(data, np.int32, words - len(Head), 4 * len(Head)), data[4 * words :])
    table = reader.take(count * len(Count)).reshape(count, len(Count))
    _check(table, columns)
    found = [_one(reader, row) for row in table.tolist()]
    texts = [(reader.text(row[Count.TEXT]), reader.text(row[Count.ERROR])) for row in table.tolist()]
    if not reader.done():
        raise RecordError("a message of deltas has more words or text than its requests; it was overwritten, or packed wrong")
    return [one._replace(text=text, error=error) for one, (text, error) in zip(found, texts, strict=True)]


def _check(table: Array, columns: int) -> None:
    """Raises `RecordError` for counts that cannot be; the most columns must be those of the header."""
    most = int(table[:, [Count.COLUMNS, Count.PROMPT_COLUMNS]].max(initial=0))
    wrong = (table < 0).any() or (table[:, Count.OF_DRAFTS] > 1).any()
    if wrong or (table[:, Count.FINISH] > max(Finish)).any() or most != columns or most > MAX_COLUMNS:
        raise RecordError(
            "a message of deltas has a count below 0, an unknown end, or other columns than it says; it was overwritten, or "
            "packed wrong"
        )


def _one(reader: _Reader, row: list[int]) -> RequestDelta:
    num_tokens, num_rounds = row[Count.TOKENS], row[Count.ROUNDS]
    finish = Finish(row[Count.FINISH])
    return RequestDelta(
        handle=row[Count.HANDLE],
        finish="" if finish is Finish.NONE else finish.name.lower(),
        token_ids=reader.take(num_tokens),
        rounds=reader.take(num_rounds),
        round_drafts=reader.take(num_rounds),
        round_lookups=reader.take(num_rounds),
        forced=reader.take(row[Count.FORCED]),
        logprobs=reader.rows(num_tokens, row[Count.COLUMNS], drafts=bool(row[Count.OF_DRAFTS])),
        prompt_logprobs=reader.rows(row[Count.PROMPT_ROWS], row[Count.PROMPT_COLUMNS]),
        text="",
        error="",
    )
