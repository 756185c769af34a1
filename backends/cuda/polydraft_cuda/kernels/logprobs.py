"""Launches for log probabilities: what is kept before logits change, what is found, stored and packed for the host.

They run only in steps in which some slot requests log probabilities. Ranks are exact, as in the sampler's filters.
"""

from __future__ import annotations

from typing import Any

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import Kernel, source
from polydraft_cuda.kernels.sampling import THREADS


def keep_logits(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Blocks share a row."""
    del limits, workspace
    vocab = a.logits.shape[1]
    blocks = min(-(-vocab // 1024), 64)
    return device.function(source("logprobs.cu"), "keep_logits").bind(
        lambda n: (n, blocks, 1),
        256,
        a.logits,
        a.row_slot,
        a.num_top,
        a.kept,
        vocab,
        dependent=True,
    )


def forbid_filtered(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Blocks share a row."""
    del limits, workspace
    vocab = a.logits.shape[1]
    blocks = min(-(-vocab // 1024), 64)
    return device.function(source("logprobs.cu"), "forbid_filtered").bind(
        lambda n: (n, blocks, 1), 256, a.logits, a.probs, a.row_slot, a.num_top, a.temperature, a.top_k, a.top_p, a.min_p, vocab,
        dependent=True,
    )  # fmt: skip


def top_logprobs(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a place of a window."""
    del limits, workspace
    width, columns = a.ids.shape[1], a.ids.shape[2]
    return device.function(source("logprobs.cu"), "top_logprobs").bind(
        lambda n: (n, width, 1), THREADS, a.logits, a.slot_order, a.logit_start, a.out_tokens, a.num_top, a.temperature, a.ids,
        a.logprobs, a.ranks, a.logits.shape[1], columns, dependent=True,
    )  # fmt: skip


def draft_logprobs(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a row."""
    del limits, workspace
    return device.function(source("logprobs.cu"), "draft_logprobs").bind(
        lambda n: n, THREADS, a.logits, a.row_slot, a.tokens, a.draft_len, a.num_top, a.draft_logprobs,
        a.draft_logprobs.shape[1], a.logits.shape[1], int(a.given == "probs"), dependent=True,
    )  # fmt: skip


def draft_top_logprobs(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a row."""
    del limits, workspace
    drafts, columns = a.draft_top_ids.shape[1], a.draft_top_ids.shape[2]
    return device.function(source("logprobs.cu"), "draft_top_logprobs").bind(
        lambda n: n, THREADS, a.logits, a.row_slot, a.tokens, a.draft_len, a.num_top, a.draft_top_ids, a.draft_tops, drafts,
        a.logits.shape[1], columns, int(a.given == "probs"), dependent=True,
    )  # fmt: skip


def pack_logprobs(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a sequence, and one where there is none: a record has a header."""
    del limits, workspace
    width, columns = a.ids.shape[1], a.ids.shape[2]
    drafts = 0 if a.drafts is None else a.drafts.shape[1]
    return device.function(source("logprobs.cu"), "pack_logprobs").bind(
        lambda n: max(n, 1), 128, a.slot_order, a.num_top, a.ids, a.logprobs, a.ranks, a.extra, a.drafts, a.draft_logprobs,
        a.draft_top_ids, a.draft_tops, drafts, a.record, int(a.flag), width, columns, ROWS, dependent=True,
    )  # fmt: skip


KERNELS = {
    "keep_logits": Kernel(keep_logits),
    "forbid_filtered": Kernel(forbid_filtered),
    "top_logprobs": Kernel(top_logprobs),
    "draft_logprobs": Kernel(draft_logprobs),
    "draft_top_logprobs": Kernel(draft_top_logprobs),
    "pack_logprobs": Kernel(pack_logprobs),
}
