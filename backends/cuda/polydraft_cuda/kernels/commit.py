"""Launches that commit windows to the texts of the slots, and the snapshot for the host.

They run after verification. Nothing else on the device writes a text, and nothing committed is taken back.
"""

from __future__ import annotations

from typing import Any

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.pack import pointers
from polydraft_cuda.kernels.provider import Kernel, source
from polydraft_cuda.kernels.verify import THREADS, WINDOW, blocks

COMMIT = (
    "slot_order", "seq_len", "prompt_len", "prefill_len", "max_total", "stop_tokens", "tokens", "num_generated", "kv_len",
    "phase", "finish", "out_tokens", "out_len", "out_accepted",
)  # fmt: skip
SNAPSHOT = ("slot_order", "epoch", "out_len", "out_accepted", "drafted", "finish", "phase", "kv_len", "out_tokens")


def _sizes(a: Any) -> tuple[int, int, int]:
    """Stop tokens, places of a text, tokens of a window."""
    return a.stop_tokens.shape[1], a.tokens.shape[1], a.out_tokens.shape[1]


def commit_window(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a sequence."""
    del limits, workspace
    kernel = device.function(source("commit.cu"), "commit_window")
    return kernel.bind(blocks, THREADS, pointers(a, COMMIT), a.window, a.window_len, a.accepted, *_sizes(a), ROWS, dependent=True)


def verify_and_commit(device: CudaDevice, args: Any, limits: Any, workspace: Any) -> Launch:
    """Composite: the window is read where the choices lie."""
    del limits, workspace
    verify, commit = args.parts
    kernel = device.function(source("commit.cu"), "verify_and_commit")
    return kernel.bind(
        blocks,
        THREADS,
        pointers(verify, WINDOW),
        pointers(commit, COMMIT),
        verify.drafted,
        *_sizes(commit),
        ROWS,
        dependent=True,
    )


def snapshot_output(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A warp a sequence."""
    del limits, workspace
    kernel = device.function(source("commit.cu"), "snapshot_output")
    return kernel.bind(lambda n: n, 32, pointers(a, SNAPSHOT), a.record, a.out_tokens.shape[1], dependent=True)


KERNELS = {
    "commit_window": Kernel(commit_window),
    "verify_match+commit_window": Kernel(verify_and_commit),
    "snapshot_output": Kernel(snapshot_output),
}
