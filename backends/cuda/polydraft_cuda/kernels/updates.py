"""Owns the launches of staged writes: admitted and aborted slots, tokens, blocks, biases and bad words.

They come first in a step that has such writes, and are never captured. Each writes what its rows name and nothing else.
"""

from __future__ import annotations

import ctypes
from typing import Any

from polydraft.contracts.layout import SLOT_UPDATE_STOP_TOKENS, SlotUpdate
from polydraft.contracts.update_slots import FLOATS, INTEGERS
from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import Kernel, source

THREADS = 128


def blocks(n: int) -> int:
    """Blocks of a thread a row."""
    return -(-n // THREADS)


class Columns(ctypes.Structure):
    """`Columns` of updates.cu."""

    _fields_ = (
        ("integers", ctypes.c_void_p * len(INTEGERS)),
        ("integer_columns", ctypes.c_int32 * len(INTEGERS)),
        ("floats", ctypes.c_void_p * len(FLOATS)),
        ("float_columns", ctypes.c_int32 * len(FLOATS)),
    )


def update_slots(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block an update row."""
    del limits, workspace
    columns = Columns()
    for names, targets, places in (
        (INTEGERS, columns.integers, columns.integer_columns),
        (FLOATS, columns.floats, columns.float_columns),
    ):
        for i, name in enumerate(names):
            targets[i], places[i] = getattr(a, name).pointer, SlotUpdate[name.upper()]
    kernel = device.function(source("updates.cu"), "update_slots")
    return kernel.bind(
        lambda n: n, THREADS, a.updates, a.updates.shape[1], SLOT_UPDATE_STOP_TOKENS, columns, a.finish, a.draft_len, a.seed,
        a.stop_tokens, a.stop_tokens.shape[1], a.drafts, a.drafts.shape[1], a.block_table, a.block_table.shape[1],
        dependent=True,
    )  # fmt: skip


def _places(field: str) -> Kernel:
    """Rows of slot, place and value into the table called `field`."""

    def bind(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
        del limits, workspace
        target = getattr(a, field)
        kernel = device.function(source("updates.cu"), "update_places")
        return kernel.bind(blocks, THREADS, a.updates, target, target.shape[1], ROWS, dependent=True)

    return Kernel(bind)


def update_biases(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread an update row."""
    del limits, workspace
    kernel = device.function(source("updates.cu"), "update_biases")
    return kernel.bind(blocks, THREADS, a.updates, a.bias_ids, a.biases, a.biases.shape[1], ROWS, dependent=True)


KERNELS = {
    "update_slots": Kernel(update_slots),
    "update_tokens": _places("tokens"),
    "update_blocks": _places("block_table"),
    "update_biases": Kernel(update_biases),
    "update_bad_words": _places("bad_words"),
}
