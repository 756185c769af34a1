"""A plan as bytes, for the ranks that run it and did not make it: what the runner reads of it, and nothing is unpickled.

Rank 0 writes every plan that it launches, the others read them in the same order. Most plans have the arrays of the one before
(`StepPlan.again`), and those are not sent again: what reads them finds the very same arrays, as rank 0 does. Such a plan costs
rank 0 a few microseconds.

A message has the numbers of a plan, its flags, and how much it writes into columns (`HEAD`, int64); of each array whether it is
there, its dtype and its length (`TAIL`, int64); then the arrays that are there, behind runs and payload.
"""

from __future__ import annotations

import struct
from operator import attrgetter, is_
from typing import Any, Final

import numpy as np

from polydraft.device import Array
from polydraft.program.columns import Writes
from polydraft.program.plan import StepPlan

WHOLE: Final = ("step_id", "num_rows", "num_logit_rows", "window", "num_drafts", "num_prompt_rows")
FLAGS: Final = ("has_prefill", "sampling", "drafting", "processed", "bound")
ARRAYS: Final = ("slots", "rows", "epochs", "decode", "emits", "num_top", "prompt_top")
DTYPES: Final = tuple(np.dtype(name) for name in ("int32", "int64", "bool"))
HEAD: Final = struct.Struct(f"={len(WHOLE) + len(FLAGS) + 3}q")
TAIL: Final = struct.Struct(f"={3 * len(ARRAYS)}q")
_NONE, _AS_BEFORE, _HERE = range(3)
_ALL_AS_BEFORE: Final = TAIL.pack(*(_AS_BEFORE, 0, 0) * len(ARRAYS))
_NUMBERS: Final = attrgetter(*WHOLE, *FLAGS)
_ARRAYS: Final = attrgetter(*ARRAYS)
_WORDS_OF_A_RUN: Final = 5
NOT_SENT: Final = np.empty((4, 0), np.int64)
"""In the place of what only the host of rank 0 counts."""


class PlanWriter:
    """Writes the plans of rank 0, in their order."""

    def __init__(self) -> None:
        self._sent: tuple[object, ...] = (object(),) * len(ARRAYS)  # which no plan has

    def write(self, plan: StepPlan) -> bytes:
        """The plan as a message."""
        writes, arrays, sent = plan.writes, _ARRAYS(plan), self._sent
        message = HEAD.pack(*_NUMBERS(plan), writes.admits, len(writes.runs), len(writes.payload))
        if all(map(is_, arrays, sent)):
            message += _ALL_AS_BEFORE
            return message + writes.runs.tobytes() + writes.payload.tobytes() if writes else message
        known = list(map(is_, arrays, sent))
        self._sent = arrays
        tail = TAIL.pack(*(word for one, so in zip(arrays, known, strict=True) for word in _entry(one, so)))
        here = [array for array, so in zip(arrays, known, strict=True) if not so and array is not None]
        return b"".join((message, tail, *map(np.ndarray.tobytes, (writes.runs, writes.payload, *here))))


def _entry(array: Array | None, known: bool) -> tuple[int, int, int]:
    """What the tail says of an array."""
    if known:
        return _AS_BEFORE, 0, 0
    return (_NONE, 0, 0) if array is None else (_HERE, DTYPES.index(array.dtype), len(array))


class PlanReader:
    """Reads them."""

    def __init__(self) -> None:
        self._read: dict[str, Array | None] = {}

    def read(self, message: bytes) -> StepPlan:
        """The plan of a message. Its arrays are those of an earlier plan where rank 0's are."""
        *numbers, admits, num_runs, num_words = HEAD.unpack_from(message)
        place = HEAD.size + TAIL.size

        def take(dtype: Any, size: int) -> Array:
            nonlocal place
            found = np.frombuffer(message, dtype, size, place)
            place += found.nbytes
            return found

        runs = take(np.int32, num_runs * _WORDS_OF_A_RUN).reshape(num_runs, _WORDS_OF_A_RUN)
        payload = take(np.int32, num_words)
        if message[HEAD.size : HEAD.size + TAIL.size] != _ALL_AS_BEFORE:
            words = TAIL.unpack_from(message, HEAD.size)
            for name, state, dtype, size in zip(ARRAYS, words[::3], words[1::3], words[2::3], strict=True):
                if state != _AS_BEFORE:
                    self._read[name] = take(DTYPES[dtype], size) if state == _HERE else None
        values: dict[str, Any] = dict(zip(WHOLE, numbers, strict=False))
        values |= {name: bool(number) for name, number in zip(FLAGS, numbers[len(WHOLE) :], strict=True)}
        arrays: dict[str, Any] = self._read
        return StepPlan(**values, **arrays, in_flight_counts=NOT_SENT, writes=Writes(runs, payload, bool(admits)))
