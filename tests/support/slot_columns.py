"""Slot columns on the host, written by a naive loop from what plans stage: what the device would hold.

`SlotColumns` checks what `scatter` relies on and then copies words one by one. The unit tests of columns, of the scheduler and of
staging use it. It uses no golden of a contract and no kernel, so it is an independent opinion.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.program.columns import BLOCK_TABLE, Writes
from polydraft.program.declare import Column


class SlotColumns:
    """Arrays of columns by name, every place of them `old` until something is written."""

    def __init__(self, columns: Sequence[Column], limits: Limits, old: float = 77) -> None:
        self.names = [column.name for column in columns]
        self.arrays: dict[str, Any] = {}
        for column in columns:
            shape = (limits.max_seqs,) if column.shape == "B" else (limits.max_seqs, column.width(limits))
            self.arrays[column.name] = np.full(shape, old, {"i32": np.int32, "f32": np.float32}[column.dtype])

    def __getitem__(self, name: str) -> Any:
        """A column as nested lists."""
        return self.arrays[name].tolist()

    def write(self, writes: Writes) -> None:
        """Write what a step stages. Each run lies within its column and the payload, and no two of them in one row of a
        column."""
        names = self.names if writes.admits else [BLOCK_TABLE]
        assert writes.runs.dtype == np.int32
        assert writes.payload.dtype == np.int32
        rows = set()
        for column, slot, start, count, offset in writes.runs.tolist():
            assert 0 <= column < len(names), "a run names no column"
            array = self.arrays[names[column]]
            width = 1 if array.ndim == 1 else array.shape[1]
            assert 0 <= slot < len(array), "a run names no slot"
            assert 0 <= start <= start + count <= width, "a run lies beyond its column"
            assert 0 <= offset <= offset + count <= len(writes.payload), "a run lies beyond the payload"
            assert (column, slot) not in rows, "two runs name one row"
            rows.add((column, slot))
            for i in range(count):
                word = int(writes.payload[offset + i])
                value = struct.unpack("<f", struct.pack("<i", word))[0] if array.dtype == np.float32 else word
                array[(slot,) if array.ndim == 1 else (slot, start + i)] = value
