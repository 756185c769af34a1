"""Cache kinds: what a layer may store between steps, as data. A kind says what to allocate, what it costs, what a prefix hit is
worth.

A kind of block half (`models/block.py`) declares them. Rows of keys and values are laid out by the backend (`allocate_cache`);
everything else is an ordinary buffer, called "PREFIX.NAME", which launches bind by that name.

Nothing clears a cache when a slot gets another request. Paged rows need it not: a row is written before it is read. A state of
a slot begins anew where its contract sees it: in `positions`, a sequence whose first row is at position 0 starts from nothing;
one that also starts at block borders keeps the `epoch` of its slot beside the state, and loads the border where that column
has moved on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from polydraft.backend import CacheSpec
from polydraft.contracts.base import Limits
from polydraft.contracts.kv_quant import Kv
from polydraft.program.declare import StepBuffer, sizes_of

ITEM_BYTES = {"f32": 4, "i32": 4, "bf16": 2, "f16": 2, "u8": 1, "i8": 1}

Hit = Literal["block", "border", "never"]
"""What it is worth that the blocks of a text's beginning are there already: "block", every row in them counts; "border", the
kind stores at the end of each block what it goes on from; "never", what it keeps is in no block. Requests share blocks unless
some cache of the engine says "never"."""


class CacheKind:
    """One cache of one layer. A kind, also one of a plugin, is a frozen dataclass that says what differs from nothing."""

    @property
    def hit(self) -> Hit:
        """A kind may have a field or a class variable instead."""
        return "block"

    def block_bytes(self, block_size: int, dtype: str, kv: Kv) -> int:
        """Bytes of one block of `block_size` tokens, activations being `dtype`."""
        del block_size, dtype, kv
        return 0

    def slot_bytes(self, limits: Limits, dtype: str) -> int:
        """Bytes of one slot, however long its text is."""
        del limits, dtype
        return 0

    def buffers(self, prefix: str, limits: Limits) -> tuple[StepBuffer, ...]:
        """What the runtime allocates for the layer `prefix`."""
        del prefix, limits
        return ()

    def spec(self, limits: Limits, dtype: str, kv: Kv) -> CacheSpec | None:
        """What the backend is asked for instead; None: nothing. Launches find it under the layer's prefix."""
        del limits, dtype, kv
        return None


@dataclass(frozen=True)
class KvRows(CacheKind):
    """Paged rows of keys and values, as the backend lays them out; at most one of them in a layer."""

    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: str, kv: Kv) -> int:
        """Keys and values; of quantised ones a byte each, and their exponents."""
        size = self.num_kv_heads * self.head_dim
        return block_size * 2 * ((size + self.num_kv_heads) if kv else size * ITEM_BYTES.get(dtype, 4))

    def spec(self, limits: Limits, dtype: str, kv: Kv) -> CacheSpec:
        """Rows of all blocks."""
        return CacheSpec(limits.num_blocks, limits.block_size, self.num_kv_heads, self.head_dim, dtype, kv=kv)


@dataclass(frozen=True)
class PagedRows(CacheKind):
    """Paged rows in a plain buffer: [num_blocks * block_size, width], row `table[slot, p // block_size] * block_size + p %
    block_size` for position p; or [num_blocks, width] with one row for each block (`per` "block")."""

    name: str
    width: int
    dtype: str = "act"
    per: Literal["token", "block"] = "token"
    hit: Hit = "block"

    def block_bytes(self, block_size: int, dtype: str, kv: Kv) -> int:
        """Rows of one block; they are kept as they are, however keys and values are."""
        del kv
        return (block_size if self.per == "token" else 1) * self.width * _item(self.dtype, dtype)

    def buffers(self, prefix: str, limits: Limits) -> tuple[StepBuffer, ...]:
        """One, of zeros."""
        rows = limits.num_blocks * (limits.block_size if self.per == "token" else 1)
        return (StepBuffer(f"{prefix}.{self.name}", f"{rows} {self.width}", self.dtype, initial=0),)


@dataclass(frozen=True)
class SlotState(CacheKind):
    """A state of each slot, whose size does not grow with its text: [B, *shape]."""

    name: str
    shape: str
    """What follows B, as in a declaration: "4 16 16", or "W 64" for a ring of a window's inputs."""
    dtype: str = "f32"
    hit: Hit = "never"
    """"border" where the kind stores at the end of each block, in `PagedRows`, what the state was there."""

    def slot_bytes(self, limits: Limits, dtype: str) -> int:
        """The state of one slot."""
        return math.prod(sizes_of(self.shape, limits)) * _item(self.dtype, dtype)

    def buffers(self, prefix: str, limits: Limits) -> tuple[StepBuffer, ...]:
        """One, of zeros."""
        del limits
        return (StepBuffer(f"{prefix}.{self.name}", f"B {self.shape}", self.dtype, initial=0),)


class Cached(Protocol):
    """Whatever has caches: a decoder block."""

    @property
    def caches(self) -> tuple[CacheKind, ...]: ...


def block_bytes(blocks: Mapping[str, Cached], block_size: int, dtype: str, kv: Kv) -> int:
    """Bytes of one block over all these layers."""
    return sum(cache.block_bytes(block_size, dtype, kv) for cache in _caches(blocks.values()))


def slot_bytes(blocks: Mapping[str, Cached], limits: Limits, dtype: str) -> int:
    """Bytes of one slot's states over all these layers."""
    return sum(cache.slot_bytes(limits, dtype) for cache in _caches(blocks.values()))


def never_hit(blocks: Mapping[str, Cached]) -> list[str]:
    """Layers for which blocks of a common beginning are worth nothing."""
    return [prefix for prefix, block in blocks.items() if any(cache.hit == "never" for cache in block.caches)]


def _caches(blocks: Iterable[Cached]) -> list[CacheKind]:
    return [cache for block in blocks for cache in block.caches]


def _item(dtype: str, act: str) -> int:
    """Bytes of an element; "act" is the dtype of activations."""
    return ITEM_BYTES.get(act if dtype == "act" else dtype, 4)
