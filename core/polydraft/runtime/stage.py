"""Owns the way down: a plan's arrays into pinned staging, and from there onto the device, asynchronously.

The runner calls `upload` first in every step. It is the only place that writes padding into the launch order, and it never
waits: a set of staging is used again only after the step that used it has been collected.
"""

from __future__ import annotations

from dataclasses import dataclass

from polydraft.contracts.base import Limits
from polydraft.device import Array, Buffer, Device, Staging, Stream
from polydraft.runtime.buffers import StepBuffers, max_block_updates, max_token_updates
from polydraft.runtime.plan import StepPlan
from polydraft.sentinels import PAD_SLOT

UPDATES = ("slot_updates", "token_updates", "block_updates", "bias_updates", "bad_word_updates")
"""Staged writes of a plan; the last two only in steps of which some slot has its logits processed."""


@dataclass(frozen=True)
class StagingSet:
    """Pinned memory of one step in flight, one array a plan buffer."""

    slot_order: Staging
    seq_rows: Staging
    slot_updates: Staging
    token_updates: Staging
    block_updates: Staging
    bias_updates: Staging
    bad_word_updates: Staging

    @classmethod
    def allocate(cls, device: Device, limits: Limits, buffers: StepBuffers, index: int) -> StagingSet:
        """Staging of the shapes of the plan buffers."""

        def like(buffer: Buffer) -> Staging:
            return device.staging(f"staging{index}.{buffer.name}", buffer.shape, "i32")

        assert buffers.token_updates.shape[0] == max_token_updates(limits), "token staging must hold a whole step"
        assert buffers.block_updates.shape[0] == max_block_updates(limits), "block staging must hold a whole step"
        return cls(**{name: like(getattr(buffers, name)) for name in cls.__dataclass_fields__})


class Stage:
    """A ring of staging sets, one for every step that can be in flight and the one being planned."""

    def __init__(self, device: Device, limits: Limits, buffers: StepBuffers, depth: int) -> None:
        self._device, self._buffers, self._limits = device, buffers, limits
        self._ring = [StagingSet.allocate(device, limits, buffers, i) for i in range(depth + 1)]
        self._sent: Array | None = None

    def upload(self, stream: Stream, plan: StepPlan) -> None:
        """Enqueue what the device does not have yet: staged writes, and the launch order unless it is the last one sent."""
        staging = self._ring[plan.step_id % len(self._ring)]
        for name in UPDATES if plan.processed else UPDATES[:3]:
            values: Array = getattr(plan, name)
            if len(values):
                self._send(stream, name, staging, values, len(values))
        if plan.slots is not self._sent:
            n = plan.num_seqs
            order, rows = staging.slot_order.array, staging.seq_rows.array
            order[:n], rows[:n] = plan.slots, plan.rows
            order[n:], rows[n:] = PAD_SLOT, 0
            self._device.upload(stream, self._buffers.slot_order, staging.slot_order, len(order))
            self._device.upload(stream, self._buffers.seq_rows, staging.seq_rows, len(rows))
            self._sent = plan.slots

    def clear(self, stream: Stream) -> None:
        """Empty the device's launch order, and wait: outside the step path, before graphs are captured."""
        staging = self._ring[0]
        staging.slot_order.array[:], staging.seq_rows.array[:] = PAD_SLOT, 0
        self._device.upload(stream, self._buffers.slot_order, staging.slot_order, len(staging.slot_order.array))
        self._device.upload(stream, self._buffers.seq_rows, staging.seq_rows, len(staging.seq_rows.array))
        self._device.synchronize()
        self._sent = None

    def void(self) -> None:
        """The device has failed: the launch order that it was sent may be lost."""
        self._sent = None

    def _send(self, stream: Stream, name: str, staging: StagingSet, values: Array, rows: int) -> None:
        pinned: Staging = getattr(staging, name)
        pinned.array[:rows] = values
        self._device.upload(stream, getattr(self._buffers, name), pinned, rows)
