"""The emulator's attention metadata: the reference's grouping of rows, translated to where cache rows really lie.

Core fills it before each pass and passes it to attention kernels. It does not touch keys or values, and runs only when the device
does.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from polydraft.backend import PassBuffers, StepMeta
from polydraft.contracts.base import Limits
from polydraft.device import Buffer
from polydraft.reference.forward_meta import Layout, build_layout
from polydraft_emulator.streams import EmulatorStream, Work

if TYPE_CHECKING:
    from polydraft_emulator.device import EmulatorDevice


class EmulatorForwardMeta:
    """Metadata of one kind of pass. `layout` is valid from the run of a fill until the next one."""

    def __init__(
        self, device: EmulatorDevice, *, row_slot: Buffer, positions: Buffer, block_table: Buffer, limits: Limits
    ) -> None:
        self._executor, self._limits = device.executor, limits
        self._uses = tuple(device.bound(memory) for memory in (row_slot, positions, block_table))
        self._rows = device.row_map(limits.num_blocks, limits.block_size)
        self.layout = Layout((), np.empty(0, int), np.empty(0, int))

    @classmethod
    def of_pass(cls, device: EmulatorDevice, buffers: PassBuffers, limits: Limits) -> EmulatorForwardMeta:
        """Metadata over the buffers of a kind of pass."""
        return cls(device, row_slot=buffers.row_slot, positions=buffers.positions, block_table=buffers.block_table, limits=limits)

    def fill(self, stream: EmulatorStream, step: StepMeta) -> None:
        """Issue the grouping of the rows that the pass's buffers will hold by then."""
        n = step.launch_rows
        self._executor.issue(stream, Work("kernel", "forward_meta", n, lambda: self.build(n), uses=self._uses))

    def build(self, n: int) -> None:
        """Group the first `n` rows; work of the device."""
        row_slot, positions, block_table = (array for _, array in self._uses)
        layout = build_layout(
            row_slot=row_slot[:n],
            positions=positions[:n],
            block_table=block_table,
            block_size=self._limits.block_size,
            window=self._limits.window,
        )
        rows = self._rows
        segments = tuple(dataclasses.replace(s, keys=rows[s.keys], spans=()) for s in layout.segments)
        self.layout = Layout(segments, layout.valid, rows[layout.destinations])
