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
from polydraft.sentinels import PAD_SLOT
from polydraft_paddle.ops import Tensor, choose, numbers, owners


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


@dataclass(frozen=True)
class Windows:
    """The rows of a pass without prefill, sequence by sequence, in shapes that the host knows: `shape` is (S, W), `rows` [S * W]
    int32 the packed row of each place, -1 where there is none."""

    shape: tuple[int, int]
    rows: Tensor


def windows(row_slot: Tensor, sequences: int, width: int) -> Windows:
    """Number the runs of equal slots and the places in them, on the device; a run has at most `width` rows."""
    n = row_slot.shape[0]
    index = numbers(n, row_slot)
    before = paddle.concat([paddle.full_like(row_slot[:1], PAD_SLOT), row_slot[:-1]])
    starts = (row_slot >= 0) & (row_slot != before)
    sequence = paddle.cumsum(starts.astype("int32"), dtype="int32") - 1
    first = paddle.cummax(choose(starts, index, 0), axis=0)[0]
    place = choose(row_slot >= 0, sequence * width + index - first, -1)
    named, row = owners(place, sequences * width)
    return Windows((sequences, width), choose(named, row.astype("int32"), -1))


class PaddleForwardMeta:
    """The `ForwardMeta` of a place. Where the host sees the rows they are grouped there (`segments`); elsewhere a pass without
    prefill is laid out in windows on the device, and one with prefill not at all."""

    def __init__(self, device: Any, buffers: PassBuffers, limits: Limits) -> None:
        self._device, self._limits = device, limits
        self._tensors = tuple(b.tensor for b in (buffers.row_slot, buffers.positions, buffers.block_table))  # type: ignore[attr-defined]
        self._host_visible = device.host_visible
        self.layout: tuple[Segment, ...] | Windows | None = None

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Lay out the rows now in the pass's buffers; nothing waits, and on the host only host memory is read."""
        del stream
        n = step.launch_rows
        self.layout = None
        if self._host_visible:
            self._device.counters.launches += 1
            row_slot, positions, block_table = (np.from_dlpack(t) for t in self._tensors)
            self.layout = grouped(
                row_slot=row_slot[:n],
                positions=positions[:n],
                block_table=block_table,
                block_size=self._limits.block_size,
                window=self._limits.window,
            )
        elif n and not step.has_prefill:
            self._device.counters.launches += 1
            sequences = min(n, step.real_slots or self._limits.max_seqs)
            self.layout = windows(self._tensors[0][:n], sequences, min(n, self._limits.window))


def layout_of(a: Any, n: int, limits: Limits) -> tuple[Segment, ...] | Windows | None:
    """The pass's layout from its metadata, or segments built here when the kernel is run without any on host memory."""
    if a.meta is not None:
        layout: tuple[Segment, ...] | Windows | None = a.meta.layout
        return layout
    if not a.q.place.is_cpu_place():
        return None
    return grouped(
        row_slot=np.from_dlpack(a.row_slot)[:n],
        positions=np.from_dlpack(a.positions)[:n],
        block_table=np.from_dlpack(a.block_table),
        block_size=a.block_size,
        window=limits.window,
    )
