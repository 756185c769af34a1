"""Forward metadata: how rows are grouped where the host sees the rows of a pass; elsewhere what layers compute once a pass.

`polydraft_init_forward_meta` returns it; rotation and attention read it. On a device with its own memory no length reaches the
host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from polydraft.backend import PassBuffers, StepMeta
from polydraft.contracts.base import Limits
from polydraft.device import Stream
from polydraft_paddle.host_layout import HostLayout
from polydraft_paddle.ops import Kept
from polydraft_paddle.place import use
from polydraft_paddle.row_layout import Bounds, RowLayout


class PaddleForwardMeta:
    """The `ForwardMeta` of a place. Where the host sees the rows they are grouped there, elsewhere laid out on the device by
    whoever asks first."""

    def __init__(self, device: Any, buffers: PassBuffers, limits: Limits) -> None:
        self._device, self._limits = device, limits
        self._tensors = tuple(b.tensor for b in (buffers.row_slot, buffers.positions, buffers.block_table))  # type: ignore[attr-defined]
        self._arrays = tuple(np.from_dlpack(t) for t in self._tensors) if device.host_visible else ()
        self._kept = Kept()
        self._shared: dict[tuple[Any, ...], Any] = {}
        self.layout: HostLayout | RowLayout | None = None
        self._target: PaddleForwardMeta | None = None
        """That of the target's pass where this one is over its rows."""
        self._over: list[PaddleForwardMeta] = []
        """Those of passes over the rows of this one."""
        if buffers.role == "target":
            device.target_pass = self
        elif device.target_pass is not None and device.target_pass._tensors[1] is self._tensors[1]:
            self._target = device.target_pass
            self._target._over.append(self)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor that the layers of the pass share, one after the other; zero where none has written."""
        key = *shape, dtype
        if key not in self._shared:
            self._shared[key] = paddle.zeros(shape, dtype)
        return self._shared[key]

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Lay out the rows now in the pass's buffers; nothing waits, and on the host only host memory is read."""
        del stream
        n = step.launch_rows
        use(self._device.spec)
        if not self._arrays:
            row_slot, positions, block_table = self._tensors
            before = self._target.layout if self._target else None
            assert before is None or isinstance(before, RowLayout)
            bounds = Bounds(step.real_slots, self._limits.window, windows_alone=not step.has_prefill)
            self.layout = RowLayout(row_slot[:n], positions[:n], block_table, self._limits.block_size, before, bounds)
            for one in self._over:
                one.layout = None  # and with it what this pass had found before
            return
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
