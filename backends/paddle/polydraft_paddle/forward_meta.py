"""Attention metadata: how rows are grouped where the host sees the rows of a pass; elsewhere windows laid out on the device.

`polydraft_init_forward_meta` returns it and attention reads it. On a device with its own memory no length reaches the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from polydraft.backend import PassBuffers, StepMeta
from polydraft.contracts.base import Limits
from polydraft.device import Stream
from polydraft.sentinels import PAD_SLOT
from polydraft_paddle.companions import watched
from polydraft_paddle.host_layout import HostLayout
from polydraft_paddle.ops import Kept, Tensor, as_int, choose, clamp, first_where, numbers, take
from polydraft_paddle.place import use
from polydraft_paddle.provider import FAILURES, device_error


@dataclass(frozen=True)
class Windows:
    """The rows of a pass without prefill, sequence by sequence, in shapes that the host knows: `shape` is (S, W), `rows` [S * W]
    int32 the packed row of each place, `places` [N] the place of each packed row, -1 where there is none."""

    shape: tuple[int, int]
    rows: Tensor
    places: Tensor


def windows(row_slot: Tensor, sequences: int, width: int) -> Windows:
    """Number the runs of equal slots and the places in them, on the device; a run has at most `width` rows."""
    n = row_slot.shape[0]
    index = numbers(n, row_slot)
    before = paddle.concat([paddle.full_like(row_slot[:1], PAD_SLOT), row_slot[:-1]])
    starts = (row_slot >= 0) & (row_slot != before)
    sequence = paddle.cumsum(starts.astype("int32"), dtype="int32") - 1
    there = row_slot >= 0
    member = (sequence.unsqueeze(0) == numbers(sequences, index).unsqueeze(1)) & there.unsqueeze(0)
    first = first_where(member)
    column = numbers(width, index).unsqueeze(0)
    rows = choose(column < as_int(member).sum(axis=1, keepdim=True, dtype="int32"), first.unsqueeze(1) + column, -1)
    places = sequence * width + index - take(first, clamp(sequence))
    return Windows((sequences, width), rows.reshape([-1]), choose(there, places, -1))


class PaddleForwardMeta:
    """The `ForwardMeta` of a place. Where the host sees the rows they are grouped there; elsewhere a pass without prefill is laid
    out in windows on the device, and one with prefill not at all."""

    def __init__(self, device: Any, buffers: PassBuffers, limits: Limits) -> None:
        self._device, self._limits = device, limits
        self._tensors = tuple(b.tensor for b in (buffers.row_slot, buffers.positions, buffers.block_table))  # type: ignore[attr-defined]
        self._arrays = tuple(np.from_dlpack(t) for t in self._tensors) if device.host_visible else ()
        self._kept = Kept()
        self._windows = watched(device.spec, "forward_meta", windows)
        self.layout: HostLayout | Windows | None = None

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Lay out the rows now in the pass's buffers; nothing waits, and on the host only host memory is read."""
        del stream
        n = step.launch_rows
        self.layout = None
        use(self._device.spec)
        if self._arrays:
            self._device.counters.launches += 1
            row_slot, positions, block_table = self._arrays
            self.layout = HostLayout(
                self._kept,
                row_slot=row_slot[:n],
                positions=positions[:n],
                block_table=block_table,
                block_size=self._limits.block_size,
                window=self._limits.window,
            )
        elif n and not step.has_prefill:
            self._device.counters.launches += 1
            sequences = min(n, step.real_slots or self._limits.max_seqs)
            try:
                self.layout = self._windows(self._tensors[0][:n], sequences, min(n, self._limits.window))
            except FAILURES as error:
                raise device_error(self._device.spec, error, "forward_meta") from error
