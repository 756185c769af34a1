"""The layout of the packed int32 records that cross from the device to the host: snapshots and log probabilities.

`snapshot_output` and `pack_logprobs` are defined by these indices, and commit reads by them. What a column means is said in the
contract that writes it.
"""

from enum import IntEnum
from typing import Final


class Snapshot(IntEnum):
    """Column of a `snapshot_output` record; the tokens of the window follow, `NO_TOKEN` in unused places."""

    SLOT = 0
    EPOCH = 1
    NUM_TOKENS = 2
    ACCEPTED = 3
    DRAFTED = 4
    FINISH = 5
    PHASE = 6
    KV_LEN = 7


class LogprobHeader(IntEnum):
    """Word of the header of a record of log probabilities; its entries follow."""

    FLAG_AND_COLUMNS = 0
    """What the record is in the low 8 bits, the number of columns that it really has in the 16 bits above; the top 8 are 0."""
    VERSION = 1
    NUM_ENTRIES = 2
    WIDTH = 3
    """Rows of an entry: places of a window, or 1."""
    NUM_WORDS = 4
    """Of the whole record."""


class LogprobEntry(IntEnum):
    """Word of an entry, one a sequence; its rows follow."""

    SLOT = 0
    EXTRA = 1
    """The drafts that the round verified (-1: no decode round); of a prompt row, the position of its token."""


class LogprobRow(IntEnum):
    """Word of a row, one a place of the window; the token ids of all columns follow, then the bits of their float32 log
    probabilities. A row whose token was not emitted has rank 0 and NO_TOKEN in every column. In a record of flag DRAFTS the same
    columns follow of the draft that was verified there, NO_TOKEN and 0 where there was none."""

    RANK = 0
    DRAFT = 1
    DRAFT_LOGPROB = 2


LOGPROB_VERSION: Final = 1
"""Of the layout of a record of log probabilities."""

MAX_FLAG: Final = (1 << 8) - 1
MAX_COLUMNS: Final = (1 << 16) - 1
"""What the first word of a header has room for."""


class Flag(IntEnum):
    """What a packed record is."""

    STEP = 1
    """Deltas of requests, from the engine's process to another one."""
    TARGET = 3
    """Log probabilities of the tokens of a step."""
    DRAFTS = 4
    """The same, and in each row those of the draft that was verified there."""
    PROMPT = 5
    """Log probabilities of prompt tokens."""


HEADER_WORDS: Final = len(LogprobHeader)
ENTRY_WORDS: Final = len(LogprobEntry)
ROW_WORDS: Final = len(LogprobRow)
"""Fixed words of the parts of a record; the columns of a row follow its own."""


def row_words(columns: int, *, drafts: bool = False) -> int:
    """Words of a row; `drafts`: with the columns of its draft."""
    return ROW_WORDS + (4 if drafts else 2) * columns


def entry_words(width: int, columns: int, *, drafts: bool = False) -> int:
    """Words of an entry."""
    return ENTRY_WORDS + width * row_words(columns, drafts=drafts)


def record_words(entries: int, width: int, columns: int, *, drafts: bool = False) -> int:
    """Words of a record of log probabilities."""
    return HEADER_WORDS + entries * entry_words(width, columns, drafts=drafts)


SNAPSHOT_COLUMNS: Final = tuple(column.name.lower() for column in Snapshot)
"""Names of the fixed columns of a snapshot record, in order."""

SNAPSHOT_TOKENS: Final = len(SNAPSHOT_COLUMNS)
"""First of the W token columns; a snapshot record has `SNAPSHOT_TOKENS + W` columns."""
