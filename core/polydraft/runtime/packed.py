"""Owns the reading of packed records: the word that says what a record is, and log probabilities out of int32 words.

The runner decodes with it what a step brought back, and the wire between processes begins its records with the same word. It
never guesses: a record that does not fit its own header, or what was asked for, is refused whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polydraft.contracts.layout import (
    LOGPROB_VERSION,
    MAX_COLUMNS,
    MAX_FLAG,
    LogprobEntry,
    LogprobHeader,
    LogprobRow,
    entry_words,
    record_words,
)
from polydraft.device import Array
from polydraft.errors import RecordError
from polydraft.sentinels import NO_TOKEN


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


def decode_logprobs(words: Array, *, flag: int, columns: int, width: int, most: int, max_seqs: int, vocab: int) -> LogprobBlock:
    """Read a record of log probabilities from int32 `words`, which may be longer. `most`: entries that were asked for at most.

    Copies what it returns. Raises `RecordError` for a header that does not fit what was asked for or the words that there are,
    and for a slot, token, rank or number that cannot be."""
    if words.ndim != 1 or words.dtype != np.int32 or len(words) < len(LogprobHeader):
        raise RecordError(f"a record has {words.size} words of {words.dtype}, wanted at least {len(LogprobHeader)} of int32")
    head = {part.name.lower(): int(words[part]) for part in LogprobHeader}
    found = unpack_word(head["flag_and_columns"])
    entries, size = head["num_entries"], head["num_words"]
    if found[0] != flag or head["version"] != LOGPROB_VERSION:
        raise RecordError(
            f"a record of log probabilities has flag {found[0]} and version {head['version']}, wanted {flag} and "
            f"{LOGPROB_VERSION}; the backend packs something else"
        )
    if not 0 <= entries <= most or head["width"] != width or found[1] != (columns if entries else 0):
        raise RecordError(
            f"a record of log probabilities has {entries} entries of {head['width']} rows and {found[1]} columns, wanted at most "
            f"{most} of {width} and {columns}; the backend packs something else"
        )
    wanted = record_words(entries, width, found[1])
    if size != wanted or size > len(words):
        raise RecordError(
            f"a record of log probabilities says {size} words for {entries} entries, wanted {wanted} of the {len(words)} that "
            "there are; it was cut, or packed wrong"
        )
    body = words[len(LogprobHeader) : size].reshape(entries, entry_words(width, found[1]) if entries else 0).copy()
    block = _split(body, width, columns)
    _check(block, max_seqs=max_seqs, vocab=vocab)
    return block


def _split(body: Array, width: int, columns: int) -> LogprobBlock:
    """Views of the parts of the entries."""
    if not len(body):
        body = np.empty((0, entry_words(width, columns)), np.int32)
    rows = body[:, len(LogprobEntry) :].reshape(len(body), width, len(LogprobRow) + 2 * columns)
    ids = rows[..., len(LogprobRow) :]
    return LogprobBlock(
        slots=body[:, LogprobEntry.SLOT],
        extra=body[:, LogprobEntry.EXTRA],
        ranks=rows[..., LogprobRow.RANK],
        drafts=rows[..., LogprobRow.DRAFT],
        draft_logprobs=rows[..., LogprobRow.DRAFT_LOGPROB].copy().view(np.float32),
        ids=ids[..., :columns],
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
