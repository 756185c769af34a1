"""Owns the layout of a pass on the place whose memory the host sees: which heads lie where, as index tensors made once a pass.

`forward_meta.py` makes one for each pass and the kernels in `kernels/host.py` read it. Rows are grouped as the reference backend
groups them; nothing here touches keys or values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.reference.forward_meta import Segment, build_layout
from polydraft_paddle.ops import Tensor, take


@dataclass(frozen=True)
class HeadRows:
    """Of `count` rows that carry something: `rows` [count] their packed rows; `qk` [count * heads + count * kv_heads] and `v`
    [count * kv_heads] the heads to take from qkv seen as one head a row, all of q first; `positions` that of each head in `qk`;
    `destinations` the cache rows of those in `granted` (None: of all). int32."""

    count: int
    rows: Tensor
    qk: Tensor
    v: Tensor
    positions: Tensor
    destinations: Tensor
    granted: Tensor | None
    turns: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Rotation factors of each head in `qk`, by the table that they were taken from."""

    def factors(self, own: Tensor, partner: Tensor) -> tuple[Tensor, Tensor]:
        """Of the tables `own` and `partner` the rows of `positions`, taken once a pass."""
        found = self.turns.get(id(own))
        if found is None:
            found = self.turns[id(own)] = take(own, self.positions), take(partner, self.positions)
        return found


@dataclass(frozen=True)
class SegmentHeads:
    """One segment of equally padded runs: which heads of q [runs, kv_heads, places * groups] and of the cache [runs, kv_heads,
    keys] to take; what hides a key from a row ([runs, kv_heads, places * groups, keys] float32; None: nothing is hidden); and
    where each head of `rows` is found in the result. `whole` when these are all rows of the pass, in order."""

    runs: int
    q: Tensor
    keys: Tensor
    mask: Tensor | None
    out: Tensor
    rows: Tensor
    whole: bool


class HostLayout:
    """Rows, runs and cache rows of one pass, and the indices of heads for each pair of head counts that asked."""

    def __init__(self, *, row_slot: Array, positions: Array, block_table: Array, block_size: int, window: int) -> None:
        self._layout = build_layout(
            row_slot=row_slot, positions=positions, block_table=block_table, block_size=block_size, window=window
        )
        self._rows, self._positions = np.flatnonzero(row_slot >= 0), positions
        self.complete = len(self._rows) == len(row_slot)
        self._head_rows: dict[tuple[int, int], HeadRows] = {}
        self._segments: dict[tuple[int, int], tuple[SegmentHeads, ...]] = {}

    @classmethod
    def of(cls, a: Any, n: int, limits: Limits) -> HostLayout:
        """The pass's layout from its metadata, or one built here when the kernel is run without any."""
        if a.meta is not None:
            layout: HostLayout = a.meta.layout
            return layout
        row_slot, positions, table = (np.from_dlpack(t) for t in (a.row_slot, a.positions, a.block_table))
        return cls(
            row_slot=row_slot[:n], positions=positions[:n], block_table=table, block_size=a.block_size, window=limits.window
        )

    def head_rows(self, heads: int, kv_heads: int) -> HeadRows:
        """What `rope_kv_write` moves."""
        found = self._head_rows.get((heads, kv_heads))
        if found is None:
            rows, granted = self._rows, self._layout.valid
            places = self._positions[rows]
            found = self._head_rows[heads, kv_heads] = HeadRows(
                len(rows),
                *_rows_pattern(rows.tobytes(), heads, kv_heads),
                positions=_tensor(np.concatenate([places.repeat(heads), places.repeat(kv_heads)])),
                destinations=_tensor(self._layout.destinations),
                granted=None if len(granted) == len(rows) else _tensor(np.searchsorted(rows, granted)),
            )
        return found

    def segments(self, heads: int, kv_heads: int) -> tuple[SegmentHeads, ...]:
        """What attention moves, segment by segment."""
        found = self._segments.get((heads, kv_heads))
        if found is None:
            made = (self._segment(segment, heads, kv_heads) for segment in self._layout.segments)
            found = self._segments[heads, kv_heads] = tuple(made)
        return found

    def _segment(self, segment: Segment, heads: int, kv_heads: int) -> SegmentHeads:
        runs, width = segment.rows.shape
        q, out, rows = _segment_pattern(segment.rows.tobytes(), width, heads, kv_heads)
        keys = segment.keys[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]
        mask = None
        if not segment.visible.all():
            hidden = np.where(segment.visible, np.float32(0), np.float32(-np.inf))[:, None, :, None, :]
            shape = runs, kv_heads, width, heads // kv_heads, keys.shape[2]
            mask = paddle.from_dlpack(np.broadcast_to(hidden, shape).copy().reshape(runs, kv_heads, -1, keys.shape[2]))
        whole = self.complete and len(segment.flat_rows) == len(self._rows)
        return SegmentHeads(runs, q, _tensor(keys.ravel()), mask, out, rows, whole)


@functools.lru_cache(maxsize=32)
def _rows_pattern(rows: bytes, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """`rows`, `qk` and `v` of a `HeadRows`: the same for every pass of the same rows, as in most steps without prefill."""
    packed = np.frombuffer(rows, np.intp)
    first = packed[:, None] * (heads + 2 * kv_heads)
    q, k, v = (
        (first + np.arange(start, start + size)).ravel()
        for start, size in ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads))
    )
    return _tensor(packed), _tensor(np.concatenate([q, k])), _tensor(v)


@functools.lru_cache(maxsize=32)
def _segment_pattern(rows: bytes, width: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """`q`, `out` and `rows` of a `SegmentHeads`, for packed rows [runs, width] of which -1 is padding."""
    packed = np.frombuffer(rows, np.intp).reshape(-1, width)
    of_head = np.arange(heads).reshape(kv_heads, 1, heads // kv_heads)
    q = np.maximum(packed, 0)[:, None, :, None] * heads + of_head
    place_of = np.arange(q.size).reshape(q.shape).transpose(0, 2, 1, 3).reshape(packed.size, heads)
    filled = np.flatnonzero(packed.ravel() >= 0)
    return _tensor(q.ravel()), _tensor(place_of[filled].ravel()), _tensor(packed.ravel()[filled])


def _tensor(index: Array) -> Tensor:
    return paddle.from_dlpack(index.astype(np.int32)) if index.size else paddle.zeros([0], "int32")
