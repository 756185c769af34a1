"""Reads what a step sends to the host: the snapshot's rows, and the packed record of log probabilities beside them.

The runner reads snapshots with it in every step. A record of log probabilities stays unread where it landed until something needs
results; then it is checked and becomes one structured NumPy array, whose rows are passed on unchanged. A record that
does not fit its own header, or what was asked for, is refused whole. Messages between processes begin with the same word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
    row_words,
)
from polydraft.device import Array
from polydraft.errors import RecordError
from polydraft.sentinels import NO_TOKEN, Finish, Phase

if TYPE_CHECKING:
    from polydraft.host.request import Request


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


@lru_cache(maxsize=1024)
def row_type(columns: int, shown: int | None = None, *, drafts: bool = False) -> np.dtype[Any]:
    """Of a row of log probabilities with so many columns: fields `rank`, `draft`, `draft_logprob`, and of the first `shown`
    columns (all without it) `ids` and `logprobs`; with `drafts` also `draft_top_ids` and `draft_tops`, the same of the draft.

    A row is one place of a window (or a prompt token). `rank` is 0 where no token was emitted; `ids`, `logprobs`: the emitted
    token, then the most likely ones, NO_TOKEN and 0 where there is none. `draft`, `draft_logprob`: what the round verified in
    this place, accepted or not, NO_TOKEN and 0 where there was none."""
    most = columns if shown is None else shown
    fields: dict[str, tuple[Any, int]] = {
        "rank": (np.int32, LogprobRow.RANK), "draft": (np.int32, LogprobRow.DRAFT),
        "draft_logprob": (np.float32, LogprobRow.DRAFT_LOGPROB), "ids": ((np.int32, (most,)), ROW_WORDS),
        "logprobs": ((np.float32, (most,)), ROW_WORDS + columns),
    }  # fmt: skip
    if drafts:
        fields["draft_top_ids"] = (np.int32, (most,)), ROW_WORDS + 2 * columns
        fields["draft_tops"] = (np.float32, (most,)), ROW_WORDS + 3 * columns
    return _type(fields, row_words(columns, drafts=drafts))


@lru_cache(maxsize=1024)
def entry_type(width: int, columns: int, shown: int | None = None, *, drafts: bool = False) -> np.dtype[Any]:
    """Of an entry of a record of log probabilities: `slot`, `extra` and `width` `rows` of `row_type`. `extra`: the drafts that
    the round verified, -1 where there was no round; of a prompt row, the position of its token."""
    fields: dict[str, tuple[Any, int]] = {
        "slot": (np.int32, LogprobEntry.SLOT), "extra": (np.int32, LogprobEntry.EXTRA),
        "rows": ((row_type(columns, shown, drafts=drafts), (width,)), ENTRY_WORDS),
    }  # fmt: skip
    return _type(fields, entry_words(width, columns, drafts=drafts))


def _type(fields: Mapping[str, tuple[Any, int]], words: int) -> np.dtype[Any]:
    """Of a part of a record, by name the type and first word of each field."""
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype(
        {"names": [*fields], "formats": [*formats], "offsets": [4 * int(at) for at in offsets], "itemsize": 4 * words}
    )


def has_drafts(rows: Any) -> bool:
    """Whether rows, or a single one, have columns of drafts."""
    return "draft_top_ids" in (rows.dtype.names or ())


NO_ROWS: Final[Array] = np.empty(0, row_type(0))
"""Where no log probabilities were asked for."""


@dataclass(frozen=True)
class Wanted:
    """What a record of log probabilities has to be: its flag, columns, rows of an entry, and `most` entries; slots below
    `max_seqs` and tokens below `vocab`; `drafts`: with the columns of drafts."""

    flag: int
    columns: int
    width: int
    most: int
    max_seqs: int
    vocab: int
    drafts: bool = False

    @property
    def words(self) -> int:
        """Words of the record at most."""
        return record_words(self.most, self.width, self.columns, drafts=self.drafts)


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

    def decode(self) -> tuple[Array | None, Array | None]:
        """Their entries, of tokens and of prompt tokens. Raises as `decode_logprobs` does."""
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


def decode_logprobs(words: Array, wanted: Wanted) -> Array:
    """The entries of a record of log probabilities, [m] of `entry_type`, in launch order, out of int32 `words`, which may be
    longer: a copy, since requests keep views of it, and the record's memory goes back to the step's thread.

    Raises `RecordError` for a header that does not fit what was wanted or the words that there are, and for a slot, token, rank
    or number that cannot be."""
    size = _check_header(words, wanted)
    entries: Array = words[HEADER_WORDS:size].copy().view(entry_type(wanted.width, wanted.columns, drafts=wanted.drafts))
    _check(entries, max_seqs=wanted.max_seqs, vocab=wanted.vocab)
    return entries


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
    total = record_words(entries, width, found[1], drafts=wanted.drafts)
    if size != total or size > len(words):
        raise RecordError(
            f"a record of log probabilities says {size} words for {entries} entries, wanted {total} of the {len(words)} that "
            "there are; it was cut, or packed wrong"
        )
    return total


def _check(entries: Array, *, max_seqs: int, vocab: int) -> None:
    rows = entries["rows"]
    tops = has_drafts(rows)
    for what, values, low, high in (
        ("slot", entries["slot"], 0, max_seqs - 1),
        ("token", rows["ids"], NO_TOKEN, vocab - 1),
        ("draft", rows["draft"], NO_TOKEN, vocab - 1),
        ("rank", rows["rank"], 0, vocab),
        *((("draft column", rows["draft_top_ids"], NO_TOKEN, vocab - 1),) if tops else ()),
    ):
        if values.size and (values.min() < low or values.max() > high):
            raise RecordError(
                f"a record of log probabilities has a {what} between {values.min()} and {values.max()}, wanted {low} to {high}; "
                "it was overwritten, or packed wrong"
            )
    for numbers in (rows["logprobs"], rows["draft_logprob"], *((rows["draft_tops"],) if tops else ())):
        if numbers.size and not bool((numbers <= 1e-3).all()):  # NaN is not; rounding may leave a little above 0
            raise RecordError("a record has a log probability that is NaN or above 0; it was overwritten, or packed wrong")
