"""The ledger of KV blocks: which are free, which slot holds which, which finished text can be shared, and the audit.

The scheduler takes blocks for slots and gives them back; the device only sees the resulting block table. Who gets a block is the
scheduler's decision. Target and MTP caches share one numbering.

A block may be shared once all its target *and* MTP rows are committed. Row p of the MTP cache depends on token p + 1, so a
block's key is a digest of all tokens up to its end and the one after it: with another next token it is another block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from polydraft.device import Array
from polydraft.errors import OutOfBlocks
from polydraft.sentinels import NO_BLOCK

KEY_BYTES = 16


class Grant(NamedTuple):
    """Blocks that slots were given: `counts[i]` to `slots[i]`, as entries of its table from `starts[i]` on; `blocks` int32 has
    those of one slot after the other."""

    slots: Array
    starts: Array
    counts: Array
    blocks: Array


NO_GRANT = Grant(*(np.empty(0, np.int32) for _ in Grant._fields))


class BlockLedger:
    """`num_blocks` blocks of `block_size` tokens, granted to slots in order of position.

    `table` [max_seqs, max_blocks] int32 is the host's block table (NO_BLOCK where nothing is granted), `num_granted`
    [max_seqs] the length of each slot's run. A block is free, held by one or more slots, or idle: held by none, but keyed
    and kept until its place is needed (least recently used first). Without `shares` no block is ever keyed.
    """

    def __init__(self, *, num_blocks: int, block_size: int, max_seqs: int, max_blocks: int, shares: bool = True) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.shares = shares
        """Whether requests whose texts begin alike have blocks in common."""
        self.table = np.full((max_seqs, max_blocks), NO_BLOCK, np.int32)
        self.num_granted = np.zeros(max_seqs, np.int64)
        self.num_hits = 0
        """Tokens whose rows were found in the cache instead of computed."""
        self.on_release: list[Callable[[int], None]] = []
        """Called with each slot before it is released; empty unless an instrument listens."""
        self._holders = np.zeros(num_blocks, np.int32)
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._keys: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_keyed = np.zeros(max_seqs, np.int64)
        self._chain: list[bytes] = [b""] * max_seqs

    # -- granting ----------------------------------------------------------------------------------
    @property
    def num_free(self) -> int:
        """Blocks that could be granted now: free ones and idle ones."""
        return self._num_free + len(self._idle)

    @property
    def num_spare(self) -> int:
        """Those of them whose rows nobody could share."""
        return self._num_free

    def blocks_for(self, tokens: Array | int) -> Array | int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def room(self, slots: Array, tokens: Array) -> Array:
        """Tokens that each slot's blocks hold beyond its count of them; below 0 where it lacks some."""
        room: Array = self.num_granted[slots] * self.block_size - tokens
        return room

    def lacking(self, slots: Array, tokens: Array) -> Array:
        """Blocks each slot still needs to hold its count of tokens."""
        missing: Array = np.maximum(self.blocks_for(tokens) - self.num_granted[slots], 0)
        return missing

    def grant(self, slots: Array, counts: Array) -> Grant:
        """Give `counts[i]` blocks to `slots[i]`.

        Raises `OutOfBlocks` and grants nothing when there are not enough."""
        total = int(counts.sum())
        if total > self.num_free:
            raise OutOfBlocks(f"{total} KV blocks were asked for, {self.num_free} are free; pause or preempt a request")
        if total == 0:
            return NO_GRANT
        while self._num_free < total:
            self._push(self._forget(next(iter(self._idle))))
        held, slot = self.num_granted[slots], slots.repeat(counts)
        index = (held - (counts.cumsum() - counts)).repeat(counts) + np.arange(total)
        blocks = self._free[self._num_free - total : self._num_free][::-1].copy()
        self._num_free -= total
        self.table[slot, index] = blocks
        self._holders[blocks] = 1
        self.num_granted[slots] = held + counts
        return Grant(slots, held, counts, blocks)

    def release(self, slot: int) -> None:
        """Take back everything a slot holds. The caller has applied the last snapshot in flight for it."""
        for notify in self.on_release:
            notify(slot)
        count = int(self.num_granted[slot])
        # The end of a text goes first, so that of idle blocks the shared beginnings live longest.
        for block in self.table[slot, :count][::-1].tolist():
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._keys:
                self._idle[block] = None
            else:
                self._push(block)
        self.table[slot, :count] = NO_BLOCK
        self.num_granted[slot] = self._num_keyed[slot] = 0
        self._chain[slot] = b""

    def _push(self, block: int) -> None:
        self._free[self._num_free] = block
        self._num_free += 1

    # -- sharing -----------------------------------------------------------------------------------
    def match(self, tokens: Array, most: int) -> list[int]:
        """Blocks that already hold the rows of a beginning of `tokens`, at most `most` of them."""
        found: list[int] = []
        key = b""
        for index in range(most):
            key = self._key(key, tokens, index)
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def room_beside(self, blocks: list[int]) -> int:
        """Blocks that could be granted once `blocks` have been adopted."""
        return self.num_free - sum(not self._holders[block] for block in blocks)

    def adopt(self, slot: int, blocks: list[int], tokens: Array) -> None:
        """Let an empty slot share `blocks` as its first ones."""
        assert self.num_granted[slot] == 0, "only an empty slot can adopt blocks"
        for index, block in enumerate(blocks):
            self._idle.pop(block, None)
            self._holders[block] += 1
            self.table[slot, index] = block
            self._chain[slot] = self._key(self._chain[slot], tokens, index)
        self.num_granted[slot] = self._num_keyed[slot] = len(blocks)
        self.num_hits += len(blocks) * self.block_size

    def granted(self, slot: int) -> Array:
        """[n] int32: the blocks of a slot, in order of position."""
        blocks: Array = self.table[slot, : self.num_granted[slot]].copy()
        return blocks

    def remember(self, slots: Array, tokens: Array, num_committed: Array) -> None:
        """Key the blocks of `slots` whose rows are all committed. `tokens` [max_seqs, L] holds each slot's text, which is at
        least one token longer than `num_committed` [len(slots)] rows."""
        if not self.shares:
            return
        full = num_committed // self.block_size
        some = full > self._num_keyed[slots]
        for slot, count in zip(slots[some].tolist(), full[some].tolist(), strict=True):
            for index in range(int(self._num_keyed[slot]), count):
                key = self._chain[slot] = self._key(self._chain[slot], tokens[slot], index)
                block = int(self.table[slot, index])
                if key not in self._block_of and block not in self._keys:
                    self._block_of[key], self._keys[block] = block, key
            self._num_keyed[slot] = count

    def keep_private(self, slot: int) -> None:
        """Key none of a slot's further blocks: some of their rows may be missing."""
        self._num_keyed[slot] = self.table.shape[1] + 1

    def forget_all(self) -> None:
        """Drop every key: rows computed with other weights must not be shared. Blocks in use stay with their slots, whose text
        is never keyed again."""
        for block in list(self._idle):
            self._push(self._forget(block))
        self._keys.clear()
        self._block_of.clear()
        self._num_keyed[self.num_granted > 0] = self.table.shape[1] + 1

    def _forget(self, block: int) -> int:
        """Drop the key of an idle block, which makes it an ordinary free one."""
        del self._idle[block]
        del self._block_of[self._keys.pop(block)]
        return block

    def _key(self, before: bytes, tokens: Array, index: int) -> bytes:
        start = index * self.block_size
        return blake2b(before + tokens[start : start + self.block_size + 1].tobytes(), digest_size=KEY_BYTES).digest()

    # -- checking ----------------------------------------------------------------------------------
    def audit(self) -> None:
        """Every block is free, idle or held, as often as the table says; `AssertionError` says which rule broke."""
        held = np.bincount(self.table[self.table != NO_BLOCK], minlength=self.num_blocks)
        assert np.array_equal(held, self._holders), "a block's holders and the table disagree"
        free = self._free[: self._num_free]
        idle = np.fromiter(self._idle, np.int64, len(self._idle))
        apart = np.sort(np.concatenate((np.flatnonzero(held), free, idle)))
        assert np.array_equal(apart, np.arange(self.num_blocks)), "a block is lost, or free and held at once"
        lengths = (self.table != NO_BLOCK).sum(axis=1)
        assert np.array_equal(lengths, self.num_granted), "granted counts and table disagree"
        columns = np.arange(self.table.shape[1])
        assert ((self.table != NO_BLOCK) == (columns < lengths[:, None])).all(), "a slot's run has a hole"
        assert {key: block for block, key in self._keys.items()} == self._block_of, "keys and blocks disagree"
        assert all(block in self._keys for block in self._idle), "an idle block has no key"
