"""Attention metadata: the tiles of packed rows that one block of an attention kernel works on, computed on the device.

Core fills it before the first attention of a pass, and every layer of the pass reads it. It does not read keys or values. The
host knows only upper bounds of it, so a captured pass stays correct for any contents.
"""

from __future__ import annotations

from typing import Final

from polydraft.backend import PassBuffers, StepMeta
from polydraft.contracts.base import Limits
from polydraft.device import Stream
from polydraft_cuda.compiler import ROWS
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import source

PREFILL_TILE: Final = 64
"""Rows of a tile in a pass that prefills: what a tensor-core kernel wants."""
THREADS: Final = (64, 256, 1024)
"""Threads of the search, a row each at a time."""


class CudaForwardMeta:
    """Tiles of one kind of pass. `tiles` int32 [R, 4]: first row, rows, slot, position of the first row; `num_tiles` [1].

    Rows of a tile are consecutive rows of one slot at consecutive positions: at most a window, or `PREFILL_TILE`
    rows where the pass prefills. Tiles are in the order of their rows; rows without a slot are in none."""

    def __init__(self, device: CudaDevice, buffers: PassBuffers, limits: Limits) -> None:
        rows = buffers.row_slot.shape[0]
        self.role, self.block_table, self._limits = buffers.role, buffers.block_table, limits
        self.tiles = device.empty(f"meta.{buffers.role}.tiles", (rows, 4), "i32")
        self.num_tiles = device.empty(f"meta.{buffers.role}.num_tiles", (1,), "i32")
        self.step = StepMeta(0, 0, 0, has_prefill=False)
        fill = device.function(source("forward_meta.cu"), "fill_tiles")
        self._launches = {
            prefill: {
                threads: fill.bind(
                    1, threads, buffers.row_slot, buffers.positions, self.tiles, self.num_tiles, size, ROWS, dependent=True
                )
                for threads in THREADS
            }
            for prefill, size in ((False, limits.window), (True, PREFILL_TILE))
        }

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Enqueue the search for tiles among the rows now in the pass's buffers."""
        self.step = step
        threads = next((threads for threads in THREADS if step.launch_rows <= threads), THREADS[-1])
        self._launches[step.has_prefill][threads](stream, step.launch_rows)

    def max_tiles(self, n: int) -> int:
        """Upper bound of `num_tiles` for a launch of `n` rows; a slot has one run of rows, and a window is one tile."""
        slots = self.step.real_slots or self._limits.max_seqs
        return min(n, slots + (n // PREFILL_TILE if self.step.has_prefill else 0))
