"""Owns the reading of packed records: snapshots, the word that says what a record is, and log probabilities out of int32 words.

The runner keeps with it what a step brought back, and the wire between processes begins its records with the same word. It
never guesses: a record that does not fit its own header, or what was asked for, is refused whole. The step's path never
looks at log probabilities: header and body are checked and split when somebody wants the numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.contracts.layout import (
    ENTRY_WORDS,
    HEADER_WORDS,
    LOGPROB_VERSION,
    MAX_COLUMNS,
    MAX_FLAG,
    ROW_WORDS,
    LogprobEntry,
    LogprobRow,
    Snapshot,
    entry_words,
    record_words,
)
from polydraft.device import Array
from polydraft.errors import RecordError
from polydraft.sentinels import NO_TOKEN, Finish, Phase

if TYPE_CHECKING:
    from polydraft.runtime.request import Request


def pack_word(flag: int, columns: int) -> int:
    """The first word of a record: `flag` in the low 8 bits, `columns` in the 16 bits above. Raises `RecordError` for a number
    that does not fit."""
    if not 0 <= flag <= MAX_FLAG:
        raise RecordError(f"a record has flag {flag}, wanted 0 to {MAX_FLAG}; choose a smaller flag")
    if not 0 <= columns <= MAX_COLUMNS:
        raise RecordError(f"a record has {columns} columns, wanted 0 to {MAX_COLUMNS}; ask for fewer log probabilities")
    return flag | columns << 8


def unpack_word(word: int) -> tuple[int, int]:
    """(flag, columns) of a first word. Raises `RecordError` where one of the bits above is set."""
    if not 0 <= word < 1 << 24:
        raise RecordError(f"the first word of a record is {word:#x}, wanted at most 24 bits; sender and reader disagree")
    return word & MAX_FLAG, word >> 8


class Snapshots:
    """Reads the snapshot record of a step, one row a sequence: columns `Snapshot`, then the window's tokens.

    Its shape is the engine's, so it has no header to disagree with; every word is held against what it can be instead."""

    def __init__(self, limits: Limits) -> None:
        drafts, most = limits.num_drafts, np.iinfo(np.int32).max
        bounds = {
            Snapshot.SLOT: (0, limits.max_seqs - 1), Snapshot.EPOCH: (0, most), Snapshot.NUM_TOKENS: (0, limits.window),
            Snapshot.ACCEPTED: (0, drafts), Snapshot.DRAFTED: (-1, drafts), Snapshot.FINISH: (0, max(Finish)),
            Snapshot.PHASE: (0, max(Phase)), Snapshot.KV_LEN: (0, limits.max_len),
        }  # fmt: skip
        pairs = [*(bounds[column] for column in Snapshot), *[(NO_TOKEN, limits.vocab_size - 1)] * limits.window]
        self._low = np.array([low for low, _ in pairs], np.int32)
        self._span = np.array([high - low for low, high in pairs], np.uint32)

    def read(self, words: Array, slots: Array) -> Array:
        """A copy of the rows of `slots`, the plan's, from int32 `words` [>= n, C]. Raises `RecordError` for another shape,
        another slot, or a word that cannot be."""
        if words.ndim != 2 or words.dtype != np.int32 or words.shape[1] != len(self._low) or len(words) < len(slots):
            raise RecordError(
                f"a snapshot has {words.dtype} words {words.shape}, wanted int32 of at least {len(slots)} rows of "
                f"{len(self._low)}; the engine was built for other limits"
            )
        record: Array = words[: len(slots)].copy()
        wrong = (record - self._low).view(np.uint32) > self._span
        if np.count_nonzero(wrong) or np.count_nonzero(record[:, Snapshot.SLOT] != slots):
            self._refuse(record, wrong, slots)
        return record

    def _refuse(self, record: Array, wrong: Array, slots: Array) -> None:
        wrong[:, Snapshot.SLOT] |= record[:, Snapshot.SLOT] != slots
        row, column = (int(place) for place in np.argwhere(wrong)[0])
        name = Snapshot(column).name.lower() if column in list(Snapshot) else f"token {column - len(Snapshot)}"
        low, high = int(self._low[column]), int(self._low[column]) + int(self._span[column])
        what = f"{low} to {high}" if column != Snapshot.SLOT else str(int(slots[row]))
        raise RecordError(
            f"row {row} of a snapshot has {name} {record[row, column]}, wanted {what}; it was overwritten, or packed wrong"
        )


@dataclass(frozen=True)
class LogprobBlock:
    """Log probabilities of one step: an entry for each sequence that wants them, in launch order. m entries, W places of a
    window (1 for prompt rows), C columns.

    `slots`, `extra` [m]: the drafts that the round verified, -1 where there was no round; of a prompt row, the position of its
    token. `ranks` [m, W], 0 where no token was emitted. `drafts` [m, W] and `draft_logprobs` [m, W]: what the round verified,
    NO_TOKEN and 0 behind it. `ids`, `logprobs` [m, W, C]: the emitted token, then the most likely ones; NO_TOKEN and 0 where
    there is none."""

    slots: Array
    extra: Array
    ranks: Array
    drafts: Array
    draft_logprobs: Array
    ids: Array
    logprobs: Array

    @cached_property
    def num_drafts(self) -> list[int]:
        """Drafts of each entry."""
        counts: list[int] = (self.drafts != NO_TOKEN).sum(axis=1).tolist()
        return counts

    @cached_property
    def drawn(self) -> Array:
        """[m, W] float32: of each emitted token the log probability with which it was drawn as a draft; NaN where it was none."""
        accepted = (self.drafts == self.ids[..., 0]) & (self.drafts != NO_TOKEN)
        return np.where(accepted, self.draft_logprobs, np.float32(np.nan))


@dataclass(frozen=True)
class Wanted:
    """What a record of log probabilities has to be: its flag, columns, rows of an entry, and `most` entries; slots below
    `max_seqs` and tokens below `vocab`."""

    flag: int
    columns: int
    width: int
    most: int
    max_seqs: int
    vocab: int

    @property
    def words(self) -> int:
        """Words of the record at most."""
        return record_words(self.most, self.width, self.columns)


class Expected(NamedTuple):
    """What steps of one composition bring: the records of their tokens and of prompt tokens, None where there is none, and whose
    they are, as in the plan: `slots` [n] in launch order, `num_top` and `prompt_top` [B]."""

    tokens: Wanted | None
    prompt: Wanted | None
    slots: Array
    num_top: Array | None
    prompt_top: Array | None


class PackedLogprobs:
    """The records of one step where they came, int32 words at which nobody has looked yet; what they have to be; and, once the
    step was applied, whose they are. It keeps nothing else of the step alive: that would cost the next ones their warm memory.

    `counts` [>= n]: tokens of each sequence, -1 where its request had left. `occupants`: the request in each slot then. `home`:
    where it waits for a later step once all has been read; None: there will be none."""

    __slots__ = ("counts", "expected", "home", "occupants", "prompt", "tokens")

    def __init__(
        self, expected: Expected, tokens: Array | None, prompt: Array | None, counts: Array, home: deque[Any] | None = None
    ) -> None:
        self.expected, self.tokens, self.prompt, self.counts, self.home = expected, tokens, prompt, counts, home
        self.occupants: tuple[Request | None, ...] = ()

    def belong(self, num_tokens: Array, live: Array | None, occupants: tuple[Request | None, ...]) -> None:
        """To these: `num_tokens` of each sequence, those that are `live` (None: all), and the requests by slot."""
        counts = self.counts[: len(num_tokens)]
        counts[:] = num_tokens
        if live is not None:
            counts[~live] = -1
        self.occupants = occupants

    def blocks(self) -> tuple[LogprobBlock | None, LogprobBlock | None]:
        """What they say, of tokens and of prompt tokens. Raises as `decode_logprobs` does."""
        tokens, prompt, *_ = self.expected
        return (
            None if tokens is None or self.tokens is None else decode_logprobs(self.tokens, tokens),
            None if prompt is None or self.prompt is None else decode_logprobs(self.prompt, prompt),
        )

    def give_back(self) -> None:
        """Everything has been read, by whatever thread; called once."""
        self.occupants = ()
        if self.home is not None:
            self.home.append(self)


def decode_logprobs(words: Array, wanted: Wanted) -> LogprobBlock:
    """Read a record of log probabilities from int32 `words`, which may be longer; the block holds copies of them.

    Raises `RecordError` for a header that does not fit what was wanted or the words that there are, and for a slot, token, rank
    or number that cannot be."""
    size = _check_header(words, wanted)
    block = _split(words[HEADER_WORDS:size], wanted.width, wanted.columns)
    _check(block, max_seqs=wanted.max_seqs, vocab=wanted.vocab)
    return block


def _check_header(words: Array, wanted: Wanted) -> int:
    """Words of a record whose header fits."""
    flag, columns, width, most = wanted.flag, wanted.columns, wanted.width, wanted.most
    if words.ndim != 1 or words.dtype != np.int32 or len(words) < HEADER_WORDS:
        raise RecordError(f"a record has {words.size} words of {words.dtype}, wanted at least {HEADER_WORDS} of int32")
    word, version, entries, rows, size = words[:HEADER_WORDS].tolist()
    found = unpack_word(word)
    if found[0] != flag or version != LOGPROB_VERSION:
        raise RecordError(
            f"a record of log probabilities has flag {found[0]} and version {version}, wanted {flag} and {LOGPROB_VERSION}; the "
            "backend packs something else"
        )
    if not 0 <= entries <= most or rows != width or found[1] != (columns if entries else 0):
        raise RecordError(
            f"a record of log probabilities has {entries} entries of {rows} rows and {found[1]} columns, wanted at most {most} "
            f"of {width} and {columns}; the backend packs something else"
        )
    total = record_words(entries, width, found[1])
    if size != total or size > len(words):
        raise RecordError(
            f"a record of log probabilities says {size} words for {entries} entries, wanted {total} of the {len(words)} that "
            "there are; it was cut, or packed wrong"
        )
    return total


def _split(words: Array, width: int, columns: int) -> LogprobBlock:
    """Copies of the parts of the entries: requests keep them, and the record's memory goes back to the step's thread."""
    body = words.reshape(-1, entry_words(width, columns))
    rows = body[:, ENTRY_WORDS:].reshape(len(body), width, ROW_WORDS + 2 * columns)
    ids = rows[..., ROW_WORDS:]
    return LogprobBlock(
        slots=body[:, LogprobEntry.SLOT].copy(),
        extra=body[:, LogprobEntry.EXTRA].copy(),
        ranks=rows[..., LogprobRow.RANK].copy(),
        drafts=rows[..., LogprobRow.DRAFT].copy(),
        draft_logprobs=rows[..., LogprobRow.DRAFT_LOGPROB].copy().view(np.float32),
        ids=ids[..., :columns].copy(),
        logprobs=ids[..., columns:].copy().view(np.float32),
    )


def _check(block: LogprobBlock, *, max_seqs: int, vocab: int) -> None:
    for what, values, low, high in (
        ("slot", block.slots, 0, max_seqs - 1),
        ("token", block.ids, NO_TOKEN, vocab - 1),
        ("draft", block.drafts, NO_TOKEN, vocab - 1),
        ("rank", block.ranks, 0, vocab),
    ):
        if values.size and (values.min() < low or values.max() > high):
            raise RecordError(
                f"a record of log probabilities has a {what} between {values.min()} and {values.max()}, wanted {low} to {high}; "
                "it was overwritten, or packed wrong"
            )
    for numbers in (block.logprobs, block.draft_logprobs):
        if numbers.size and not bool((numbers <= 1e-3).all()):  # NaN is not; rounding may leave a little above 0
            raise RecordError("a record has a log probability that is NaN or above 0; it was overwritten, or packed wrong")
