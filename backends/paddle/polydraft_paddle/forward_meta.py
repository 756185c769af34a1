"""Owns the attention metadata: where the host can see a pass's rows, how they are grouped; elsewhere nothing but the tables.

`polydraft_init_forward_meta` returns it and attention reads it. On a device of its own nothing is grouped: that would need a
length on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from polydraft.backend import PassBuffers, StepMeta
from polydraft.contracts.base import Limits
from polydraft.device import Array, Stream
from polydraft.reference.forward_meta import build_layout
from polydraft_paddle.ops import Tensor


@dataclass(frozen=True)
class Segment:
    """One group of equally padded runs, as tensors.

    `shape` is (runs S, places M); `rows` [S * M] int32 packed row of each place, row 0 for padding; `keys` [S * C] int32 cache
    row of each key; `visible` [S, 1, M, 1, C] bool; `filled` the packed rows of the places that carry one, and `places` which
    those are."""

    shape: tuple[int, int]
    rows: Tensor
    keys: Tensor
    visible: Tensor
    filled: Tensor
    places: Tensor


def grouped(*, row_slot: Array, positions: Array, block_table: Array, block_size: int, window: int) -> tuple[Segment, ...]:
    """Group the rows of a pass on the host; see `polydraft.reference.forward_meta.build_layout`."""
    layout = build_layout(row_slot=row_slot, positions=positions, block_table=block_table, block_size=block_size, window=window)
    return tuple(
        Segment(
            shape=segment.rows.shape,
            rows=_tensor(np.maximum(segment.rows, 0).ravel()),
            keys=_tensor(segment.keys.ravel()),
            visible=paddle.to_tensor(segment.visible[:, None, :, None, :]),
            filled=_tensor(segment.flat_rows),
            places=_tensor(segment.flat_places),
        )
        for segment in layout.segments
    )


def _tensor(index: Array) -> Tensor:
    return paddle.to_tensor(index.astype(np.int32))


class PaddleForwardMeta:
    """The `ForwardMeta` of a place; `segments` is None where the host cannot see the rows."""

    def __init__(self, device: Any, buffers: PassBuffers, limits: Limits) -> None:
        self._device, self._limits = device, limits
        self._tensors = tuple(b.tensor for b in (buffers.row_slot, buffers.positions, buffers.block_table))  # type: ignore[attr-defined]
        self.segments: tuple[Segment, ...] | None = () if device.host_visible else None

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Group the rows now in the pass's buffers, where that costs no synchronisation."""
        del stream
        if self.segments is None:
            return
        n = step.launch_rows
        self._device.counters.launches += 1
        row_slot, positions, block_table = (np.from_dlpack(t) for t in self._tensors)
        self.segments = grouped(
            row_slot=row_slot[:n],
            positions=positions[:n],
            block_table=block_table,
            block_size=self._limits.block_size,
            window=self._limits.window,
        )


def segments_of(a: Any, n: int, limits: Limits) -> tuple[Segment, ...] | None:
    """The pass's segments from its metadata, or built here when the kernel is run without any on host memory."""
    if a.meta is not None:
        segments: tuple[Segment, ...] | None = a.meta.segments
        return segments
    if not a.q.place.is_cpu_place():
        return None
    return grouped(
        row_slot=np.from_dlpack(a.row_slot)[:n],
        positions=np.from_dlpack(a.positions)[:n],
        block_table=np.from_dlpack(a.block_table),
        block_size=a.block_size,
        window=limits.window,
    )
