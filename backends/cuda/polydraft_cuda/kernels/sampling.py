"""Launches that choose tokens: argmax, noise, filtered sampling without a sort, sampled drafts, rejection verification.

Target rows and draft rows use the same kernels. A row's choice depends only on its logits, its slot's parameters and the noise of
its position: sums over a row are sums of integers, so their order does not matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.pack import pointers
from polydraft_cuda.kernels.provider import Kernel, source

THREADS = 1024
"""`THREADS` of sampling.cuh."""
PARAMETERS = ("temperature", "top_p", "min_p", "top_k")


class Keys(NamedTuple):
    """What stands for the record of an `argmax` where ranks have shared out the vocabulary: they exchange what is chosen."""

    row_slot: Any
    tokens: Any
    """[rows, 2] int32: a key of 64 bits of each row (`logit_key` of sampling.cuh)."""


def of_ranks(a: Any) -> dict[str, int]:
    """Defines of a kernel that leaves a choice."""
    return {"PAIRS": 1} if isinstance(a, Keys) else {}


def _rows(n: int) -> int:
    """A block a row."""
    return n


def argmax(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Blocks share a row. What they gather lies in memory of this kernel's own, which is zero between launches."""
    del limits, workspace
    rows, vocab = a.logits.shape
    blocks = min(-(-vocab // 4096), 32)
    best, tickets = device.zeros("argmax.best", (rows, 2), "i32"), device.zeros("argmax.tickets", (rows,), "i32")
    function = device.function(source("sampling.cu"), "argmax")
    return function.bind(lambda n: (n, blocks, 1), 256, a.logits, a.row_slot, a.tokens, vocab, best, tickets, dependent=True)


def argmax_among(device: CudaDevice, a: Any, kept: Any, state: Any = None) -> Launch:
    """The choice among what the warps of a head have kept (value and id, [warps, rows, 2]); logits are not looked at. `state`: of
    a first look, where the choice may have been made by it."""
    warps, pitch, _ = kept.shape
    function = device.function(source("sampling.cu"), "argmax_among", **of_ranks(a))
    return function.bind(lambda n: -(-n // 8), 256, kept, a.row_slot, a.tokens, state, warps, pitch, ROWS, dependent=True)


def gumbel_noise(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Blocks share a row; a thread makes two tokens' noise at a time."""
    del limits, workspace
    vocab = a.noise.shape[1]
    blocks = min(-(-vocab // 2048), 64)
    return device.function(source("sampling.cu"), "gumbel_noise").bind(
        lambda n: (n, blocks, 1),
        256,
        a.row_slot,
        a.positions,
        a.seed,
        a.temperature,
        a.noise,
        vocab,
        int(a.ahead),
        int(a.draw),
        dependent=True,
    )


def uniform_noise(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a row."""
    del limits, workspace
    return device.function(source("sampling.cu"), "uniform_noise").bind(
        lambda n: -(-n // 128),
        128,
        a.row_slot,
        a.positions,
        a.seed,
        a.uniforms,
        int(a.ahead),
        int(a.draw),
        ROWS,
        dependent=True,
    )


def sample(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a row, with noise that was stored."""
    del limits, workspace
    return device.function(source("sampling.cu"), "sample").bind(
        _rows,
        THREADS,
        a.logits,
        a.noise,
        a.row_slot,
        None,
        None,
        pointers(a, PARAMETERS),
        a.tokens,
        a.logits.shape[1],
        0,
        0,
        dependent=True,
    )


def noise_and_sample(device: CudaDevice, args: Any, limits: Any, workspace: Any) -> Launch:
    """Composite: noise is made where it is added."""
    del limits, workspace
    noise, a = args.parts
    return device.function(source("sampling.cu"), "sample").bind(
        _rows, THREADS, a.logits, None, a.row_slot, noise.positions, noise.seed, pointers(a, PARAMETERS), a.tokens,
        a.logits.shape[1], int(noise.ahead), int(noise.draw), dependent=True,
    )  # fmt: skip


def filter_probs(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a row."""
    del limits, workspace
    kernel = device.function(source("sampling.cu"), "filter_probs")
    return kernel.bind(_rows, THREADS, a.logits, a.row_slot, pointers(a, PARAMETERS), a.logits.shape[1], dependent=True)


def draw_draft(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a row."""
    del limits, workspace
    return device.function(source("sampling.cu"), "draw_draft").bind(
        _rows, THREADS, a.probs, a.noise, a.row_slot, a.draft_len, a.tokens, a.draft_probs, a.draft_probs.shape[1],
        a.probs.shape[1], dependent=True,
    )  # fmt: skip


def verify_rejection(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a sequence."""
    del limits, workspace
    return device.function(source("sampling.cu"), "verify_rejection").bind(
        _rows, THREADS, a.probs, a.draft_probs, a.uniforms, a.noise, a.slot_order, a.phase, a.logit_start, a.logit_len, a.drafts,
        a.drafts.shape[1], a.window, a.window_len, a.accepted, a.drafted, a.probs.shape[1], dependent=True,
    )  # fmt: skip


KERNELS = {
    "argmax": Kernel(argmax),
    "gumbel_noise": Kernel(gumbel_noise),
    "uniform_noise": Kernel(uniform_noise),
    "sample": Kernel(sample),
    "gumbel_noise+sample": Kernel(noise_and_sample),
    "filter_probs": Kernel(filter_probs),
    "draw_draft": Kernel(draw_draft),
    "verify_rejection": Kernel(verify_rejection),
}
