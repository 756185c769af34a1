"""Lays out a pass on a place whose memory the host sees: where each head is, as index tensors made once per pass.

`forward_meta.py` makes one for each pass and the kernels in `kernels/host_attention.py` read it. Rows that carry nothing are
moved along and cleared afterwards, so most indices depend on the number of rows alone. Queries, keys and values are not touched
here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft_paddle.ops import Kept, Tensor, take


@dataclass(frozen=True)
class HeadRows:
    """What `rope_kv_write` moves, for n rows. int32.

    `heads` [n * (heads + 2 * kv_heads)] the heads of qkv seen as one head a row: all of q, all of k, all of v. `halves` the
    halves of the heads of q and k, the second before the first, from qkv seen as half a head a row. `positions` that of each head
    of q and k. `destinations` [2 * n] where k and v go in a cache's `rows`; the spare row for those that go nowhere."""

    heads: Tensor
    halves: Tensor
    positions: Tensor
    destinations: Tensor
    turns: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Rotation factors of each head in `positions`, by the table that they were taken from."""

    def factors(self, own: Tensor, partner: Tensor) -> tuple[Tensor, Tensor]:
        """Of the tables `own` and `partner` the rows of `positions`, taken once a pass."""
        found = self.turns.get(id(own))
        if found is None:
            found = self.turns[id(own)] = take(own, self.positions), take(partner, self.positions)
        return found


@dataclass(frozen=True)
class SegmentHeads:
    """One segment of equally padded runs: S runs, G = kv_heads, M = places * groups, C keys; int32 as `gather_nd` wants it.

    `q` [S, G, M, 1] heads of q; `keys` [S, G, C, 1] those of the cache; `mask` [S, G, M, C] float32 what is added to a score
    (None: nothing is hidden); `out` [rows, G, groups, 1] where in the result each head of `rows` is found. `q` and `out` are None
    where each row is a run. `rows` None: all rows of the pass, in order, also those that carry nothing."""

    q: Tensor | None
    keys: Tensor
    mask: Tensor | None
    out: Tensor | None
    rows: Tensor | None


class HostLayout:
    """Rows and runs of one pass, and the indices of heads for each pair of head counts that asked. A run is consecutive rows of
    one slot. Where the pass falls into windows of equal length, as in most steps without prefill, these are one segment; else
    runs of at most `window` rows share one, and longer ones have their own."""

    def __init__(
        self, kept: Kept, *, row_slot: Array, positions: Array, block_table: Array, block_size: int, window: int
    ) -> None:
        self._kept, self._table, self._block_size, self._window = kept, block_table, block_size, window
        self._slots, self._positions, self._carries = row_slot, positions, row_slot >= 0
        self.complete = bool(self._carries.all())
        self.some = self.complete or bool(self._carries.any())
        if self.some and not self.complete:  # what carries nothing looks like the beginning of somebody's text
            self._slots = np.where(self._carries, row_slot, row_slot[self._carries.argmax()])
            self._positions = np.where(self._carries, positions, 0)
        self._head_rows: dict[tuple[int, int, int], HeadRows] = {}
        self._segments: dict[tuple[int, int, int], tuple[SegmentHeads, ...]] = {}

    @classmethod
    def of(cls, a: Any, n: int, limits: Limits) -> HostLayout:
        """The pass's layout from its metadata, or one built here when the kernel is run without any."""
        if a.meta is not None:
            layout: HostLayout = a.meta.layout
            return layout
        row_slot, positions, table = (np.from_dlpack(t) for t in (a.row_slot, a.positions, a.block_table))
        return cls(
            Kept(), row_slot=row_slot[:n], positions=positions[:n], block_table=table,
            block_size=a.block_size, window=limits.window,
        )  # fmt: skip

    @functools.cached_property
    def empty(self) -> Tensor:
        """Rows that carry nothing; not for a complete pass."""
        return self._kept.put("empty", (~self._carries).nonzero()[0])

    # -- rotation and cache writes -----------------------------------------------------------------
    def head_rows(self, heads: int, kv_heads: int, cache_rows: int) -> HeadRows:
        """What `rope_kv_write` moves to caches of so many rows, of a pass with some row."""
        key = heads, kv_heads, cache_rows
        found = self._head_rows.get(key)
        if found is None:
            positions, destinations = self._places(*key)
            found = self._head_rows[key] = HeadRows(*_rows_pattern(len(self._slots), heads, kv_heads), positions, destinations)
        return found

    def _places(self, heads: int, kv_heads: int, cache_rows: int) -> tuple[Tensor, Tensor]:
        n, places, size = len(self._slots), self._positions[:, None], self._block_size
        positions, view = self._kept.get(f"positions{heads, kv_heads}", (n * (heads + kv_heads),))
        view[: n * heads].reshape(n, heads)[...] = places
        view[n * heads :].reshape(n, kv_heads)[...] = places
        blocks = self._table[self._slots, self._positions // size]
        at = blocks * size + self._positions % size
        destinations, (k, v) = self._kept.get(f"destinations{cache_rows}", (2, n))
        k[...], v[...] = at, at + cache_rows // 2
        if not self.complete or blocks.min() < 0:
            lost = ~self._carries | (blocks < 0)
            k[lost] = v[lost] = cache_rows - 1
        return positions, destinations.reshape([-1])

    # -- attention ---------------------------------------------------------------------------------
    def segments(self, heads: int, kv_heads: int, reach: int = 0) -> tuple[SegmentHeads, ...]:
        """What attention over the last `reach` keys (0: all) moves, segment by segment, of a pass with some row."""
        found = self._segments.get((heads, kv_heads, reach))
        if found is None:
            width = self._regular()
            made = [self._windows(width, heads, kv_heads, reach)] if width else self._runs(heads, kv_heads, reach)
            found = self._segments[heads, kv_heads, reach] = tuple(made)
        return found

    def _regular(self) -> int:
        """The length of windows that the pass falls into, each of another slot than its neighbours; 0 where it does not."""
        return next((width for width in (self._window, 1) if self._falls_into(width)), 0)

    def _falls_into(self, width: int) -> bool:
        if len(self._slots) % width:
            return False
        slots, carries = self._slots.reshape(-1, width), self._carries.reshape(-1, width)
        first, begun = slots[:, 0], carries[:, 0]
        split = first[1:] == first[:-1]
        if (split if self.complete else split & begun[1:] & begun[:-1]).any():
            return False
        alone = slots == first[:, None]
        return bool((alone if self.complete else alone & begun[:, None] | ~carries).all())

    def _windows(self, width: int, heads: int, kv_heads: int, reach: int) -> SegmentHeads:
        """All rows, in windows of this length."""
        positions = self._positions.reshape(-1, width)
        q, out = _windows_pattern(len(positions), width, heads, kv_heads) if width > 1 else (None, None)
        return SegmentHeads(q, *self._seen("", self._slots[::width], positions, heads, kv_heads, reach), out, None)

    def _runs(self, heads: int, kv_heads: int, reach: int) -> list[SegmentHeads]:
        """The rows that carry something, by runs."""
        rows = self._carries.nonzero()[0]
        slots = self._slots[rows]
        first = np.concatenate([[0], (slots[1:] != slots[:-1]).nonzero()[0] + 1])
        length = np.diff(first, append=len(slots))
        short = length <= self._window
        groups = [short.nonzero()[0], *(~short).nonzero()[0][:, None]]
        made: list[SegmentHeads] = []
        for runs in (group for group in groups if len(group)):
            offset = np.arange(length[runs].max())
            padded = offset >= length[runs][:, None]
            packed = rows[first[runs][:, None] + np.where(padded, 0, offset)]
            q, out, filled = _runs_pattern(packed, padded, heads, kv_heads)
            name = f"run{len(made)}"
            seen = self._seen(name, self._slots[packed[:, 0]], self._positions[packed], heads, kv_heads, reach)
            made.append(SegmentHeads(q, *seen, out, filled))
        return made

    def _seen(
        self, name: str, slots: Array, positions: Array, heads: int, kv_heads: int, reach: int
    ) -> tuple[Tensor, Tensor | None]:
        """`keys` and `mask` of the segment `name` whose runs have these slots [S] and positions [S, W]."""
        runs, width, size = *positions.shape, self._block_size
        last = positions.max(axis=1, keepdims=True)
        first = max(int(positions.min()) + 1 - reach, 0) // size if reach else 0
        blocks, name = self._table[slots, first : int(last.max()) // size + 1, None], f"{name}of{reach}"
        places = np.arange(first * size, (first + blocks.shape[1]) * size, dtype=np.int32)
        rows = (blocks * size + np.arange(size, dtype=np.int32)).reshape(runs, -1)
        # A key beyond the run's last row is never visible; pointing it at the first key keeps poison out of the products.
        rows = np.maximum(np.where(places <= last, rows, rows[:, :1]), 0)
        keys, view = self._kept.get(f"keys{name}", (runs, kv_heads, len(places), 1))
        np.add((rows * kv_heads)[:, None, :, None], np.arange(kv_heads, dtype=np.int32)[:, None, None], out=view)
        hidden = places > positions[:, :, None]
        if reach:
            hidden |= places <= positions[:, :, None] - reach
        if not hidden.any():
            return keys, None
        mask, view = self._kept.get(f"mask{name}", (runs, kv_heads, width * (heads // kv_heads), len(places)), "float32")
        view.reshape(runs, kv_heads, width, -1, len(places))[...] = np.where(hidden, HIDDEN, SEEN)[:, None, :, None, :]
        return keys, mask


HIDDEN, SEEN = np.float32(-np.inf), np.float32(0)


# -- what depends on the number of rows or runs alone -------------------------------------------------
@functools.lru_cache(maxsize=32)
def _rows_pattern(rows: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """`heads` and `halves` of a `HeadRows`."""
    begin = np.arange(rows)[:, None] * (heads + 2 * kv_heads)
    turned = np.concatenate([(begin + np.arange(heads)).ravel(), (begin + np.arange(heads, heads + kv_heads)).ravel()])
    v = (begin + np.arange(heads + kv_heads, heads + 2 * kv_heads)).ravel()
    return _tensor(np.concatenate([turned, v])), _tensor((2 * turned[:, None] + [1, 0]).ravel())


@functools.lru_cache(maxsize=32)
def _windows_pattern(runs: int, width: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """`q` and `out` of a segment of full windows."""
    packed = np.arange(runs * width).reshape(runs, width)
    q, out, _ = _runs_pattern(packed, np.zeros(packed.shape, bool), heads, kv_heads)
    return q, out


def _runs_pattern(packed: Array, padded: Array, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """`q`, `out` and `rows` of a `SegmentHeads`, for packed rows [runs, width] of which some places are padding."""
    groups = heads // kv_heads
    q = packed[:, None, :, None] * heads + np.arange(heads).reshape(kv_heads, 1, groups)
    place_of = np.arange(q.size).reshape(q.shape).transpose(0, 2, 1, 3).reshape(packed.size, kv_heads, groups, 1)
    filled = (~padded).ravel().nonzero()[0]
    return _tensor(q.reshape(len(packed), kv_heads, -1, 1)), _tensor(place_of[filled]), _tensor(packed.ravel()[filled])


def _tensor(index: Array) -> Tensor:
    return paddle.from_dlpack(index.astype(np.int32))
