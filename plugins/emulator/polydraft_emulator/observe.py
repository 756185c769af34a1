"""Observes what the emulator's operations touch, for the hazard checker: who wrote which rows or KV blocks, who opened what.

The executor runs work through it when operations are numbered (`ObservesAccesses` of core); otherwise nothing is observed and
nothing is paid. It does not judge an access.

A write is seen by its effect: memory that the work is bound to, or has opened, holds other bytes afterwards. A read is seen where
work opens memory that it was not bound to; NumPy does not report which rows of an array it reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from polydraft.device import Array
from polydraft.instruments.sanitize import Observed
from polydraft_emulator.memory import EmulatorCache, Guard, Memory
from polydraft_emulator.streams import Work


class Eyes:
    """Accesses of one device. `operation`: the number of what is issued from now on; 0 while nobody asks."""

    def __init__(self, guard: Guard) -> None:
        self.operation = 0
        self._guard = guard
        self._seen: list[Observed] = []

    def run(self, work: Work) -> None:
        """Run work of a numbered operation."""
        bound = {id(memory): (memory, array) for memory, array in work.uses}
        before = [(memory, array, array.copy()) for memory, array in bound.values()]
        opened: list[Memory] = []
        self._guard.opened = opened
        try:
            work.run()
        finally:
            self._guard.opened = None
        strange = {id(memory): memory for memory in opened if id(memory) not in bound}
        self._seen += [Observed(work.operation, memory, "read") for memory in strange.values()]
        for memory, array, old in before:
            self._seen += [Observed(work.operation, memory, "write", rows) for rows in _written(memory, array, old)]

    def observed(self) -> list[Observed]:
        """What was seen since the last call."""
        seen, self._seen = self._seen, []
        return seen


def _written(memory: Memory, array: Array, old: Array) -> Iterator[tuple[int, int]]:
    """[low, high) of the rows whose bytes differ: all in one, or each block of a cache by itself."""
    if not array.size or array.tobytes() == old.tobytes():
        return
    if isinstance(memory, EmulatorCache):
        rows: Array = np.any(_differs(array, old), axis=(0, 1, 3))
        for block in np.flatnonzero(rows[memory.row_map].reshape(memory.spec.num_blocks, -1).any(axis=1)).tolist():
            yield block, block + 1
    else:
        changed = np.flatnonzero(_differs(array, old).reshape(len(array), -1).any(axis=1))
        yield int(changed[0]), int(changed[-1]) + 1


def _differs(array: Array, old: Array) -> Array:
    """Elementwise, by bytes: a NaN is equal to itself."""
    whole = np.dtype(f"u{array.dtype.itemsize}")
    differs: Array = np.not_equal(array.view(whole), old.view(whole))
    return differs
