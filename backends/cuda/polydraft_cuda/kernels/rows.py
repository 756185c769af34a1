"""Moves rows: embedding lookup, gathering by index, and the newest committed row of each drafting sequence.

Every pass begins with one of these, and another one feeds the head. A row is copied bit for bit.
"""

from __future__ import annotations

from typing import Any

from polydraft.device import Launch
from polydraft_cuda.compiler import act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import Kernel, source


def units(buffer: Any) -> tuple[dict[str, int], int]:
    """Defines for rows like those of `buffer`, and how many units of copying such a row has."""
    width = buffer.shape[1]
    lanes = 4 if buffer.dtype == "f32" else 8
    vector = int(width % lanes == 0)
    return {"VECTOR": vector, **act(buffer.dtype)}, width // lanes if vector else width


def one_block_a_row(n: int) -> int:
    """Grid of kernels that give each row a block."""
    return n


def embed(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Gather from the table."""
    del limits, workspace
    defines, size = units(a.out)
    return device.function(source("rows.cu"), "gather_rows", **defines).bind(
        one_block_a_row, 128, a.weight, a.ids, a.out, size, dependent=True
    )


def gather_rows(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Gather by index."""
    del limits, workspace
    defines, size = units(a.out)
    return device.function(source("rows.cu"), "gather_rows", **defines).bind(
        one_block_a_row, 128, a.x, a.index, a.out, size, dependent=True
    )


def select_last_rows(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Gather by position."""
    del limits, workspace
    defines, size = units(a.out)
    return device.function(source("rows.cu"), "select_last_rows", **defines).bind(
        one_block_a_row, 128, a.hidden, a.positions, a.seq_start, a.draft_slot, a.draft_position, a.out, size, dependent=True
    )


KERNELS: dict[str, Kernel] = {
    "embed": Kernel(embed),
    "gather_rows": Kernel(gather_rows),
    "select_last_rows": Kernel(select_last_rows),
}
