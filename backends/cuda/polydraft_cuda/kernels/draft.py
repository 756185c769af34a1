"""Launches around a proposer's passes: shifted rows, the beginning of a round, storing each draft, spreading logits of a reduced
vocabulary over the whole one, and n-gram lookup.

They run after the commit and see the text as it is then. The passes themselves are launches of the model.
"""

from __future__ import annotations

from typing import Any

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import Kernel, source
from polydraft_cuda.kernels.verify import THREADS, blocks

SEARCHERS = 256


def pack_draft_rows(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a row."""
    del limits, workspace
    return device.function(source("draft.cu"), "pack_draft_rows").bind(
        lambda n: -(-n // 128), 128, a.row_slot, a.positions, a.phase, a.prompt_len, a.num_generated, a.tokens,
        a.tokens.shape[1], a.draft_ids, a.draft_row_slot, ROWS, dependent=True,
    )  # fmt: skip


def begin_draft(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a sequence."""
    del limits, workspace
    return device.function(source("draft.cu"), "begin_draft").bind(
        blocks, THREADS, a.slot_order, a.seq_len, a.phase, a.kv_len, a.prompt_len, a.num_generated, a.max_total, a.drafts,
        a.drafts.shape[1], a.draft_len, a.draft_slot, a.draft_position, a.draft_budget, int(a.num_drafts), ROWS, dependent=True,
    )  # fmt: skip


def advance_draft(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a sequence."""
    del limits, workspace
    return device.function(source("draft.cu"), "advance_draft").bind(
        blocks, THREADS, a.chosen, a.draft_budget, a.draft_slot, a.draft_position, a.drafts, a.drafts.shape[1], a.draft_len,
        a.next_ids, int(a.pass_index), ROWS, dependent=True,
    )  # fmt: skip


def spread_logits(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Blocks of four columns a thread for each row."""
    del limits, workspace
    vocab = int(a.out.shape[1])
    return device.function(source("draft.cu"), "spread_logits").bind(
        lambda n: (n, -(-vocab // (4 * SEARCHERS)), 1), SEARCHERS, a.x, int(a.x.shape[1]), a.places, a.out, vocab, dependent=True,
    )  # fmt: skip


def draft_ngram(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a sequence."""
    del limits, workspace
    return device.function(source("draft.cu"), "draft_ngram").bind(
        lambda n: n, SEARCHERS, a.draft_slot, a.draft_budget, a.prompt_len, a.num_generated, a.tokens, a.tokens.shape[1],
        a.drafts, a.drafts.shape[1], a.draft_len, int(a.max_ngram), int(a.min_ngram), dependent=True,
    )  # fmt: skip


def align_drafts(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a sequence."""
    del limits, workspace
    return device.function(source("draft.cu"), "align_drafts").bind(
        blocks, THREADS, a.draft_slot, a.draft_budget, a.prompt_len, a.num_generated, a.tokens, a.tokens.shape[1], a.guess,
        a.guess.shape[1], a.guess_start, a.guess_len, a.drafts, a.drafts.shape[1], a.draft_len, ROWS, dependent=True,
    )  # fmt: skip


def splice_drafts(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a sequence."""
    del limits, workspace
    return device.function(source("draft.cu"), "splice_drafts").bind(
        blocks, THREADS, a.slot_order, a.draft_budget, a.agree, a.found, a.found_len, a.drafts, a.drafts.shape[1], a.draft_len,
        a.kept_drafts, a.draft_logprobs, ROWS, dependent=True,
    )  # fmt: skip


KERNELS = {
    "pack_draft_rows": Kernel(pack_draft_rows),
    "begin_draft": Kernel(begin_draft),
    "spread_logits": Kernel(spread_logits),
    "advance_draft": Kernel(advance_draft),
    "draft_ngram": Kernel(draft_ngram),
    "align_drafts": Kernel(align_drafts),
    "splice_drafts": Kernel(splice_drafts),
}
