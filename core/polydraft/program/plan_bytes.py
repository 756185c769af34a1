"""A plan as a message, for the ranks that run it and did not make it: what the runner reads of it, and nothing is unpickled.

Rank 0 writes every plan that it launches, the others read them in the same order. Most plans are the one before again
(`StepPlan.again`), and only what is new of them is sent: who reads them makes them in the same way, with the very same arrays, as
rank 0 does. Where nothing is written into columns either, the message is a number: the step and its number of drafts.

Other messages are bytes. One begins with what is new in every plan: its step, its number of drafts, and how much it writes into
columns (`HEAD`, int64); runs and payload follow. Behind them come, where the plan is not the one before again, its other
numbers and flags, of each array whether it is there, its dtype and its length (`TAIL`, int64), and the arrays that are there.
"""

from __future__ import annotations

import struct
from operator import attrgetter
from typing import Any, Final

import numpy as np

from polydraft.device import Array
from polydraft.program.columns import NOTHING, Writes
from polydraft.program.plan import StepPlan

NEW: Final = ("step_id", "num_drafts", "writes")
"""What `StepPlan.again` is given."""
WHOLE: Final = ("num_rows", "num_logit_rows", "window", "num_prompt_rows")
FLAGS: Final = ("has_prefill", "sampling", "drafting", "processed", "bound")
ARRAYS: Final = ("slots", "rows", "epochs", "decode", "emits", "num_top", "prompt_top")
DTYPES: Final = tuple(np.dtype(name) for name in ("int32", "int64", "bool"))
HEAD: Final = struct.Struct("=5q")
TAIL: Final = struct.Struct(f"={len(WHOLE) + len(FLAGS) + 3 * len(ARRAYS)}q")
_NUMBERS: Final = attrgetter(*WHOLE, *FLAGS)
_ARRAYS: Final = attrgetter(*ARRAYS)
_WORDS_OF_A_RUN: Final = 5
_DRAFTS_BITS: Final = 16
_MOST_DRAFTS: Final = (1 << _DRAFTS_BITS) - 1
NOT_SENT: Final = np.empty((4, 0), np.int64)
"""In the place of what only the host of rank 0 counts."""


class PlanWriter:
    """Writes the plans of rank 0, in their order."""

    def __init__(self) -> None:
        self._slots: Array | None = None
        """Those of the plan before."""

    def write(self, plan: StepPlan) -> bytes | int:
        """The plan as a message."""
        writes, again, self._slots = plan.writes, plan.slots is self._slots, plan.slots
        num_runs = len(writes.runs)
        if again and not num_runs:
            return plan.step_id << _DRAFTS_BITS | plan.num_drafts
        message = HEAD.pack(plan.step_id, plan.num_drafts, num_runs, len(writes.payload), writes.admits)
        if num_runs:
            message += writes.runs.tobytes() + writes.payload.tobytes()
        return message if again else message + _rest(plan)


def _rest(plan: StepPlan) -> bytes:
    """What a plan has in common with those that are it again."""
    arrays = _ARRAYS(plan)
    tail = TAIL.pack(*_NUMBERS(plan), *(word for one in arrays for word in _entry(one)))
    return b"".join((tail, *(one.tobytes() for one in arrays if one is not None)))


def _entry(array: Array | None) -> tuple[int, int, int]:
    """What the tail says of an array."""
    return (0, 0, 0) if array is None else (1, DTYPES.index(array.dtype), len(array))


class PlanReader:
    """Reads them."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None

    def read(self, message: bytes | int) -> StepPlan:
        """The plan of a message. Its arrays are those of the plan before where rank 0's are."""
        if isinstance(message, int):
            return self._again(message >> _DRAFTS_BITS, NOTHING, message & _MOST_DRAFTS)
        step_id, num_drafts, num_runs, num_words, admits = HEAD.unpack_from(message)
        place = HEAD.size

        def take(dtype: Any, size: int) -> Array:
            nonlocal place
            found = np.frombuffer(message, dtype, size, place)
            place += found.nbytes
            return found

        writes = NOTHING
        if num_runs:
            runs = take(np.int32, num_runs * _WORDS_OF_A_RUN).reshape(num_runs, _WORDS_OF_A_RUN)
            writes = Writes(runs, take(np.int32, num_words), bool(admits))
        if place == len(message):
            return self._again(step_id, writes, num_drafts)
        words = TAIL.unpack_from(message, place)
        place += TAIL.size
        values: dict[str, Any] = dict(zip(WHOLE, words, strict=False))
        values |= {name: bool(word) for name, word in zip(FLAGS, words[len(WHOLE) :], strict=False)}
        entries = words[len(WHOLE) + len(FLAGS) :]
        for name, here, dtype, size in zip(ARRAYS, entries[::3], entries[1::3], entries[2::3], strict=True):
            values[name] = take(DTYPES[dtype], size) if here else None
        self._last = StepPlan(step_id, num_drafts=num_drafts, writes=writes, in_flight_counts=NOT_SENT, **values)
        return self._last

    def _again(self, step_id: int, writes: Writes, num_drafts: int) -> StepPlan:
        assert self._last is not None, "the first plan is none again"
        self._last = self._last.again(step_id, writes, num_drafts)
        return self._last
