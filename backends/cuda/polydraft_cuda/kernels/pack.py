"""Launches from slot state to packed rows: block reservation, packing, and the rows that need logits.

They open the target's part of a step. The host knows no row count: every thread block finds the rows of the sequences itself.
"""

from __future__ import annotations

import ctypes
from typing import Any

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import Kernel, source

THREADS = 256
SLOTS = ("phase", "kv_len", "prefill_len", "prompt_len", "num_generated")
ROW_OUTPUTS = ("ids", "row_slot", "positions", "seq_start", "seq_len")
PROMPT_OUTPUTS = ("prompt_row", "prompt_slot", "prompt_position", "prompt_token")
LOGIT_OUTPUTS = ("logit_row", "logit_slot", "logit_position", "logit_start", "logit_len")


def pointers(a: Any, names: tuple[str, ...]) -> Any:
    """The addresses of several buffers, as a structure of pointers; null for what is left out."""
    buffers = (getattr(a, name) for name in names)
    return (ctypes.c_void_p * len(names))(*(None if one is None else one.pointer for one in buffers))


def blocks(n: int) -> int:
    """At least one: offsets of sequences are written whatever the launch length."""
    return max(-(-n // THREADS), 1)


def reserve_blocks(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A warp a sequence."""
    del limits, workspace
    return device.function(source("pack.cu"), "reserve_blocks").bind(
        lambda n: -(-n // (THREADS // 32)), THREADS, a.slot_order, a.phase, a.kv_len, a.draft_len, a.max_total, a.block_table,
        a.block_table.shape[1], int(a.block_size), int(a.lookahead), ROWS, dependent=True,
    )  # fmt: skip


def _rows(a: Any) -> tuple[Any, ...]:
    """Arguments up to the outputs."""
    return (
        a.slot_order, a.seq_rows, a.slot_order.shape[0], pointers(a, SLOTS), a.tokens, a.tokens.shape[1], a.drafts,
        a.drafts.shape[1], a.draft_len, pointers(a, ROW_OUTPUTS),
    )  # fmt: skip


def pack_rows(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a row."""
    del limits, workspace
    kernel = device.function(source("pack.cu"), "pack_rows")
    return kernel.bind(blocks, THREADS, *_rows(a), ROWS, shared=4 * (a.slot_order.shape[0] + 1), dependent=True)


def pack_logit_rows(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a logit row."""
    del limits, workspace
    size = a.slot_order.shape[0]
    return device.function(source("pack.cu"), "pack_logit_rows").bind(
        blocks, THREADS, a.slot_order, size, pointers(a, SLOTS), a.seq_start, a.seq_len, pointers(a, LOGIT_OUTPUTS), ROWS,
        shared=4 * (size + 1), dependent=True,
    )  # fmt: skip


def pack_both(device: CudaDevice, args: Any, limits: Any, workspace: Any) -> Launch:
    """Composite: a thread a row, and the logit rows over their whole capacity."""
    del limits, workspace
    rows, logits = args.parts
    size, capacity = rows.slot_order.shape[0], logits.logit_row.shape[0]
    return device.function(source("pack.cu"), "pack_both").bind(
        lambda n: blocks(max(n, capacity)), THREADS, *_rows(rows), pointers(logits, LOGIT_OUTPUTS), capacity, ROWS,
        shared=4 * (3 * size + 2), dependent=True,
    )  # fmt: skip


def pack_prompt_rows(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a prompt row."""
    del limits, workspace
    size = a.slot_order.shape[0]
    return device.function(source("pack.cu"), "pack_prompt_rows").bind(
        lambda n: -(-n // THREADS), THREADS, a.slot_order, size, a.seq_start, a.seq_len, a.positions, a.prompt_len, a.num_top,
        a.tokens, a.tokens.shape[1], pointers(a, PROMPT_OUTPUTS), ROWS, shared=4 * (size + 1), dependent=True,
    )  # fmt: skip


KERNELS = {
    "reserve_blocks": Kernel(reserve_blocks),
    "pack_rows": Kernel(pack_rows),
    "pack_logit_rows": Kernel(pack_logit_rows),
    "pack_rows+pack_logit_rows": Kernel(pack_both),
    "pack_prompt_rows": Kernel(pack_prompt_rows),
}
