"""A plan as bytes, for the ranks that run it and did not make it: what the runner reads of it, and nothing is unpickled.

Rank 0 writes every plan that it launches, the others read them in the same order. Most plans have the arrays of the one before
(`StepPlan.again`), and those are not sent again: what reads them finds the very same arrays, as rank 0 does.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from polydraft.device import Array
from polydraft.program.columns import Writes
from polydraft.program.plan import StepPlan

WHOLE: Final = ("step_id", "num_rows", "num_logit_rows", "window", "num_drafts", "num_prompt_rows")
FLAGS: Final = ("has_prefill", "sampling", "drafting", "processed")
ARRAYS: Final = ("slots", "rows", "epochs", "decode", "emits", "num_top", "prompt_top")
DTYPES: Final = tuple(np.dtype(name) for name in ("int32", "int64", "bool"))
_NONE, _AS_BEFORE, _HERE = range(3)
_WORDS_OF_A_RUN: Final = 5
NOT_SENT: Final = np.empty((4, 0), np.int64)
"""In the place of what only the host of rank 0 counts."""


class PlanWriter:
    """Writes the plans of rank 0, in their order."""

    def __init__(self) -> None:
        self._sent: dict[str, Array | None] = {}

    def write(self, plan: StepPlan) -> bytes:
        """The plan. Words of int64 say what follows: the numbers, the flags, how much is written into columns, and of each array
        whether it is there, its dtype and its length."""
        head = [*(int(getattr(plan, name)) for name in WHOLE), *(int(getattr(plan, name)) for name in FLAGS)]
        head += [int(plan.writes.admits), len(plan.writes.runs), len(plan.writes.payload)]
        body = [np.ascontiguousarray(plan.writes.runs, np.int32), np.ascontiguousarray(plan.writes.payload, np.int32)]
        for name in ARRAYS:
            array = getattr(plan, name)
            if array is None:
                head += [_NONE, 0, 0]
            elif array is self._sent.get(name):
                head += [_AS_BEFORE, 0, 0]
            else:
                head += [_HERE, DTYPES.index(array.dtype), len(array)]
                body.append(np.ascontiguousarray(array))
            self._sent[name] = array
        return b"".join([np.array(head, np.int64).tobytes(), *(array.tobytes() for array in body)])


class PlanReader:
    """Reads them."""

    def __init__(self) -> None:
        self._read: dict[str, Array | None] = {}

    def read(self, message: bytes) -> StepPlan:
        """The plan of a message. Its arrays are those of an earlier plan where rank 0's are."""
        count = len(WHOLE) + len(FLAGS)
        words: list[int] = np.frombuffer(message, np.int64, count + 3 + 3 * len(ARRAYS)).tolist()
        place = 8 * len(words)

        def take(dtype: Any, size: int) -> Array:
            nonlocal place
            found = np.frombuffer(message, dtype, size, place)
            place += found.nbytes
            return found

        admits, num_runs, num_words = words[count : count + 3]
        runs = take(np.int32, num_runs * _WORDS_OF_A_RUN).reshape(num_runs, _WORDS_OF_A_RUN)
        payload = take(np.int32, num_words)
        for i, name in enumerate(ARRAYS):
            state, dtype, size = words[count + 3 + 3 * i :][:3]
            if state != _AS_BEFORE:
                self._read[name] = take(DTYPES[dtype], size) if state == _HERE else None
        numbers: dict[str, Any] = dict(zip(WHOLE, words, strict=False))
        flags: dict[str, Any] = {name: bool(word) for name, word in zip(FLAGS, words[len(WHOLE) :], strict=False)}
        arrays: dict[str, Any] = dict(self._read)
        return StepPlan(**numbers, **flags, **arrays, in_flight_counts=NOT_SENT, writes=Writes(runs, payload, bool(admits)))
