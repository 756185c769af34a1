"""Owns the column layout of the two packed int32 records that cross between host and device: slot updates and snapshots.

Staging writes by these indices, `update_slots` and `snapshot_output` are defined by them, and commit reads by them. Nothing
here holds a value or a rule; what a column means is said in the contract that reads it.
"""

from enum import IntEnum
from typing import Final


class SlotUpdate(IntEnum):
    """Column of an `update_slots` row; `temperature`, `top_p`, `min_p` and the three penalties travel as the bits of a float32,
    the two seed words as the bits of a uint32. The stop tokens of the slot follow, `NO_TOKEN` in unused places."""

    SLOT = 0
    PHASE = 1
    PROMPT_LEN = 2
    NUM_GENERATED = 3
    KV_LEN = 4
    PREFILL_LEN = 5
    MAX_TOTAL = 6
    EPOCH = 7
    TOP_K = 8
    SEED_LOW = 9
    SEED_HIGH = 10
    TEMPERATURE = 11
    TOP_P = 12
    MIN_P = 13
    REPETITION_PENALTY = 14
    PRESENCE_PENALTY = 15
    FREQUENCY_PENALTY = 16
    MIN_TOKENS = 17
    NUM_BIASES = 18
    BAD_LEN = 19


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


SLOT_UPDATE_COLUMNS: Final = tuple(column.name.lower() for column in SlotUpdate)
"""Names of the fixed columns of a slot update, in order."""

SLOT_UPDATE_STOP_TOKENS: Final = len(SLOT_UPDATE_COLUMNS)
"""First of the S stop-token columns; a slot update has `SLOT_UPDATE_STOP_TOKENS + S` columns."""

SNAPSHOT_COLUMNS: Final = tuple(column.name.lower() for column in Snapshot)
"""Names of the fixed columns of a snapshot record, in order."""

SNAPSHOT_TOKENS: Final = len(SNAPSHOT_COLUMNS)
"""First of the W token columns; a snapshot record has `SNAPSHOT_TOKENS + W` columns."""
