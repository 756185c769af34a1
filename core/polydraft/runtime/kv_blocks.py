"""Owns the ledger of KV blocks: which are free, which slot holds which, and the audit that nothing is lost.

The scheduler takes blocks for slots and commit returns them; the device only ever sees the resulting block table. It never
decides who deserves a block, and target and MTP caches share one numbering.
"""

from __future__ import annotations

import numpy as np

from polydraft.device import Array
from polydraft.errors import OutOfBlocks
from polydraft.sentinels import NO_BLOCK


class BlockLedger:
    """`num_blocks` blocks of `block_size` tokens, granted to slots in order of position.

    `table` [max_seqs, max_blocks] int32 is the host's block table (NO_BLOCK where nothing is granted), `num_granted`
    [max_seqs] the length of each slot's run.
    """

    def __init__(self, *, num_blocks: int, block_size: int, max_seqs: int, max_blocks: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.table = np.full((max_seqs, max_blocks), NO_BLOCK, np.int32)
        self.num_granted = np.zeros(max_seqs, np.int64)
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    def blocks_for(self, tokens: Array | int) -> Array | int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def lacking(self, slots: Array, tokens: Array) -> Array:
        """Blocks each slot still needs to hold its count of tokens."""
        missing: Array = np.maximum(self.blocks_for(tokens) - self.num_granted[slots], 0)
        return missing

    def grant(self, slots: Array, counts: Array) -> Array:
        """Give `counts[i]` blocks to `slots[i]`; returns block updates [sum, 3] (slot, index, block).

        Raises `OutOfBlocks` and grants nothing when there are not enough."""
        total = int(counts.sum())
        if total > self._num_free:
            raise OutOfBlocks(f"{total} KV blocks were asked for, {self._num_free} are free; pause or preempt a request")
        if total == 0:
            return np.empty((0, 3), np.int32)
        slot = np.repeat(slots, counts)
        first = np.repeat(self.num_granted[slots] - (np.cumsum(counts) - counts), counts)
        index = first + np.arange(total)
        blocks = self._free[self._num_free - total : self._num_free][::-1]
        self._num_free -= total
        self.table[slot, index] = blocks
        self.num_granted[slots] += counts
        return np.stack((slot, index, blocks), axis=1).astype(np.int32)

    def release(self, slot: int) -> None:
        """Take back everything a slot holds. The caller has applied the last snapshot in flight for it."""
        count = int(self.num_granted[slot])
        if count:
            self._free[self._num_free : self._num_free + count] = self.table[slot, :count][::-1]
            self._num_free += count
            self.table[slot, :count] = NO_BLOCK
            self.num_granted[slot] = 0

    def audit(self) -> None:
        """Every block is free or granted exactly once, and runs have no holes; `AssertionError` says which rule broke."""
        granted = self.table[self.table != NO_BLOCK]
        free = self._free[: self._num_free]
        everything = np.sort(np.concatenate((granted, free)))
        assert np.array_equal(everything, np.arange(self.num_blocks)), "a block is lost or granted twice"
        lengths = (self.table != NO_BLOCK).sum(axis=1)
        assert np.array_equal(lengths, self.num_granted), "granted counts and table disagree"
        columns = np.arange(self.table.shape[1])
        assert ((self.table != NO_BLOCK) == (columns < lengths[:, None])).all(), "a slot's run has a hole"
