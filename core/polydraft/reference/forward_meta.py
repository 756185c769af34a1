"""The reference attention metadata: which rows form a window, where their keys lie, what each row may see.

`fill` computes it once per pass from the pass's buffers, and the attention and KV write of every layer share it. Keys and values
themselves are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from polydraft.backend import PassBuffers, StepMeta
from polydraft.contracts.base import Limits
from polydraft.device import Array, Stream

KEY_CHUNK = 64
"""Keys of one attention chunk, at absolute positions, so that a chunk is the same whatever follows it."""


@dataclass(frozen=True)
class Segment:
    """One group of equally padded runs: `rows` [S, M] packed row of each (run, place), -1 for padding; `keys` [S, C] flat
    cache row of each key position; `visible` [S, M, C] bool."""

    rows: Array
    keys: Array
    visible: Array
    flat_rows: Array
    """The valid entries of `rows` in order, and..."""
    flat_places: Array
    """...their places in the flattened [S * M]."""
    spans: tuple[tuple[int, int], ...]
    """(first cache row, number of keys) of each run where every run's keys lie one behind the other, else empty: such runs
    are read in place instead of being gathered."""

    def within(self, window: int) -> Segment:
        """The same where each row sees the last `window` of its keys alone; whole chunks that no row sees are left out."""
        places = self.visible.sum(axis=2, keepdims=True) - 1
        begin = max(int(places.min()) + 1 - window, 0) // KEY_CHUNK * KEY_CHUNK
        seen = self.visible & (np.arange(self.visible.shape[2]) > places - window)
        spans = tuple((first + begin, count - begin) for first, count in self.spans)
        return replace(self, keys=self.keys[:, begin:], visible=seen[:, :, begin:], spans=spans)


@dataclass(frozen=True)
class Layout:
    """Everything attention needs for one pass: segments, and the KV destination of every valid row."""

    segments: tuple[Segment, ...]
    """Of attention over all earlier keys."""
    valid: Array
    """Packed rows that carry a token and whose block is granted."""
    destinations: Array
    """Flat cache row of each entry of `valid`."""
    windowed: dict[int, tuple[Segment, ...]] = field(default_factory=dict)
    """Segments by the window of those layers that asked."""

    def segments_within(self, window: int) -> tuple[Segment, ...]:
        """Segments of attention over the last `window` keys, 0: all; made once a pass."""
        if not window:
            return self.segments
        if window not in self.windowed:
            self.windowed[window] = tuple(segment.within(window) for segment in self.segments)
        return self.windowed[window]


def build_layout(*, row_slot: Array, positions: Array, block_table: Array, block_size: int, window: int) -> Layout:
    """Group the valid rows of a pass. Runs of at most `window` rows share one padded segment; longer runs stand alone."""
    rows = (row_slot >= 0).nonzero()[0]
    if rows.size == 0:
        return Layout((), rows, rows)
    slots, places = row_slot[rows], positions[rows]
    blocks = block_table[slots, places // block_size]
    destinations = blocks * block_size + places % block_size
    granted = blocks >= 0
    begins = np.ones(rows.size + 1, bool)  # a run begins here, or the last has ended
    np.logical_or(slots[1:] != slots[:-1], rows[1:] != rows[:-1] + 1, out=begins[1:-1])
    borders = begins.nonzero()[0]
    starts, lengths = borders[:-1], borders[1:] - borders[:-1]
    last = np.maximum.reduceat(places, starts)
    short = lengths <= window
    groups = [short.nonzero()[0]] if short.any() else []
    groups += [np.array([i]) for i in (~short).nonzero()[0]]
    segments = tuple(_segment(rows, places, slots, starts[g], lengths[g], last[g], block_table, block_size) for g in groups)
    return Layout(segments, rows[granted], destinations[granted])


def _segment(
    rows: Array,
    places: Array,
    slots: Array,
    starts: Array,
    lengths: Array,
    last: Array,
    block_table: Array,
    block_size: int,
) -> Segment:
    width, num_blocks = int(lengths.max()), int(last.max()) // block_size + 1
    place = starts[:, None] + np.arange(width)
    padded = np.arange(width) >= lengths[:, None]
    place = np.where(padded, starts[:, None], place)
    key_positions = np.arange(num_blocks * block_size)
    blocks = block_table[slots[starts], :num_blocks]
    keys = (blocks[:, :, None] * block_size + np.arange(block_size)).reshape(len(starts), -1)
    # A key beyond the run's last row is never visible; pointing it at the first key keeps poison out of the products.
    real = key_positions <= last[:, None]
    in_place = bool((~real | (keys - keys[:, :1] == key_positions)).all())
    spans = tuple(zip(keys[:, 0].tolist(), (last + 1).tolist(), strict=True)) if in_place else ()
    keys = np.where(real, keys, keys[:, :1])
    visible = key_positions <= places[place][:, :, None]
    packed = np.where(padded, -1, rows[place])
    flat = (packed.ravel() >= 0).nonzero()[0]
    return Segment(packed, np.maximum(keys, 0), visible, packed.ravel()[flat], flat, spans)


class NumpyForwardMeta:
    """The `ForwardMeta` of NumPy devices; `layout` is valid from `fill` until the next one."""

    def __init__(self, device: Any, buffers: PassBuffers, limits: Limits) -> None:
        self._device, self._limits = device, limits
        self._arrays = (buffers.row_slot, buffers.positions, buffers.block_table)
        self.layout = Layout((), np.empty(0, int), np.empty(0, int))

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Enqueue the grouping of the rows now in the pass's buffers."""
        n = step.launch_rows
        self._device.counters.launches += 1
        self._device.enqueue(stream, lambda: self._build(n))

    def _build(self, n: int) -> None:
        row_slot, positions, block_table = (b.host_array for b in self._arrays)  # type: ignore[attr-defined]
        self.layout = build_layout(
            row_slot=row_slot[:n],
            positions=positions[:n],
            block_table=block_table,
            block_size=self._limits.block_size,
            window=self._limits.window,
        )
