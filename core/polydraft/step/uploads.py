"""The way down: a plan's arrays into pinned staging, and from there onto the device, asynchronously.

The runner calls `upload` first in every step. It is the only place that writes padding into the launch order, and it never
waits: a set of staging is used again only after the step that used it has been collected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from polydraft.device import Array, Buffer, Device, Staging, Stream
from polydraft.program.plan import StepPlan
from polydraft.sentinels import PAD_SLOT

NUMBER = "step"
"""The buffer that has the number of the step, where there are ranks."""


class StagingSet(NamedTuple):
    """Pinned memory of one step in flight, an array for each plan buffer."""

    slot_order: Staging
    seq_rows: Staging
    runs: Staging
    payload: Staging


class Uploads:
    """A ring of staging sets, one for every step that can be in flight and the one being planned.

    Where there are ranks, the number of the step goes with its arrays, by which they notice that they run different plans. A step
    for which nothing is sent runs the plan of the step before once more, under the number of that; how often a rank has done so
    shows in how much it launches."""

    def __init__(self, device: Device, buffers: Mapping[str, Buffer], depth: int) -> None:
        self._device = device
        self._buffers = [buffers[name] for name in StagingSet._fields]
        self._ring = [
            StagingSet(*(device.staging(f"staging{i}.{b.name}", b.shape, b.dtype) for b in self._buffers))
            for i in range(depth + 1)
        ]
        self._number = buffers.get(NUMBER)
        places = range(0 if self._number is None else depth + 1)
        self._numbers = [device.staging(f"staging{i}.{NUMBER}", (1,), "i32") for i in places]
        self._sent: Array | None = None

    def upload(self, stream: Stream, plan: StepPlan) -> None:
        """Enqueue what the device does not have yet: runs into slot columns, and the launch order unless it was the last sent."""
        if plan.slots is self._sent and not plan.writes:
            return
        place = plan.step_id % len(self._ring)
        staging, (slot_order, seq_rows, runs, payload) = self._ring[place], self._buffers
        if self._number is not None:
            self._numbers[place].array[0] = plan.step_id & 0x7FFFFFFF
            self._device.upload(stream, self._number, self._numbers[place], 1)
        if plan.writes:
            self._send(stream, runs, staging.runs, plan.writes.runs)
            self._send(stream, payload, staging.payload, plan.writes.payload)
        if plan.slots is not self._sent:
            n = plan.num_seqs
            order, rows = staging.slot_order.array, staging.seq_rows.array
            order[:n], rows[:n] = plan.slots, plan.rows
            order[n:], rows[n:] = PAD_SLOT, 0
            self._device.upload(stream, slot_order, staging.slot_order, len(order))
            self._device.upload(stream, seq_rows, staging.seq_rows, len(rows))
            self._sent = plan.slots

    def clear(self, stream: Stream) -> None:
        """Empty the device's launch order, and wait: outside the step path, before graphs are captured."""
        staging, (slot_order, seq_rows, *_) = self._ring[0], self._buffers
        staging.slot_order.array[:], staging.seq_rows.array[:] = PAD_SLOT, 0
        self._device.upload(stream, slot_order, staging.slot_order, len(staging.slot_order.array))
        self._device.upload(stream, seq_rows, staging.seq_rows, len(staging.seq_rows.array))
        self._device.synchronize()
        self._sent = None

    def reset(self) -> None:
        """The device has failed: the launch order that it was sent may be lost."""
        self._sent = None

    def _send(self, stream: Stream, buffer: Buffer, staging: Staging, values: Array) -> None:
        staging.array[: len(values)] = values
        self._device.upload(stream, buffer, staging, len(values))
