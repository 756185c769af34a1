"""Launches from choices to windows: comparing drafts with what the target chose, and the synthetic acceptance schedule.

They run after the choice of tokens. Rejection verification is in `sampling.py`, beside the distributions it compares.
"""

from __future__ import annotations

from typing import Any

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.pack import pointers
from polydraft_cuda.kernels.provider import Kernel, source

THREADS = 32
"""Threads of a block: one a sequence, spread over as many multiprocessors as there are warps."""
WINDOW = ("choices", "slot_order", "phase", "logit_start", "logit_len", "drafts")


def blocks(n: int) -> int:
    """Blocks of a thread a sequence."""
    return -(-n // THREADS)


def verify_match(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a sequence."""
    del limits, workspace
    return device.function(source("verify.cu"), "verify_match").bind(
        blocks,
        THREADS,
        pointers(a, WINDOW),
        a.drafts.shape[1],
        a.window,
        a.window_len,
        a.accepted,
        a.drafted,
        ROWS,
        dependent=True,
    )


def force_choices(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a sequence."""
    del limits, workspace
    return device.function(source("verify.cu"), "force_choices").bind(
        blocks, THREADS, a.slot_order, a.logit_start, a.logit_len, a.drafts, a.drafts.shape[1], a.uniforms, a.chances, a.choices,
        int(a.num_valid), ROWS, dependent=True,
    )  # fmt: skip


KERNELS = {"verify_match": Kernel(verify_match), "force_choices": Kernel(force_choices)}
