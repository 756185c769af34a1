"""Launches that process logits as requests specify: padded vocabulary, penalties, biases, forbidden tokens, masks, limits.

They run between the head and the choice of a token. No counts are kept between steps: a row's text is read each time.
"""

from __future__ import annotations

import ctypes
from typing import Any

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import Kernel, source
from polydraft_cuda.kernels.verify import THREADS, blocks

COUNTERS = 64
"""Blocks of `penalise_logits` at most; each wants an int32 a token of the vocabulary."""


class Text(ctypes.Structure):
    """`Text` of process.cu."""

    _fields_ = (
        ("pointers", ctypes.c_void_p * 4),
        ("max_len", ctypes.c_int32),
        ("num_drafts", ctypes.c_int32),
        ("ahead", ctypes.c_int32),
    )


def text(a: Any) -> Text:
    """The text of each slot, as an argument."""
    pointers = (ctypes.c_void_p * 4)(*(getattr(a, n).pointer for n in ("tokens", "drafts", "prompt_len", "num_generated")))
    return Text(pointers, a.tokens.shape[1], a.drafts.shape[1], int(a.ahead))


class Thinking(ctypes.Structure):
    """`Thinking` of process.cu."""

    _fields_ = (
        ("pointers", ctypes.c_void_p * 7),
        ("width", ctypes.c_int32),
        ("num_stops", ctypes.c_int32),
        ("num_end", ctypes.c_int32),
        ("num_forced", ctypes.c_int32),
    )


THINKING = ("think_limit", "reply_limit", "reply_starts", "num_reply_starts", "stop_tokens", "think_end", "think_forced")


def process_logits(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a row; nothing where the head is not padded."""
    del limits, workspace
    vocab = a.logits.shape[1]
    kernel = device.function(source("process.cu"), "process_logits")
    padded = int(a.num_valid) < vocab
    return kernel.bind(lambda n: n if padded else 0, 128, a.logits, a.row_slot, int(a.num_valid), vocab, dependent=True)


def counters(a: Any) -> int:
    """Blocks that penalise."""
    return min(COUNTERS, int(a.logits.shape[0]))


def penalise_workspace(device: CudaDevice, a: Any, limits: Any) -> int:
    """Counts of every token for each block."""
    del device, limits
    return counters(a) * int(a.logits.shape[1]) * 4


def penalise_logits(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Blocks take rows in turn."""
    del limits
    most = counters(a)
    return device.function(source("process.cu"), "penalise_logits").bind(
        lambda n: min(n, most), 256, a.logits, a.row_slot, a.positions, text(a), a.repetition_penalty, a.presence_penalty,
        a.frequency_penalty, workspace.buffer, a.logits.shape[1], ROWS, dependent=True,
    )  # fmt: skip


def bias_logits(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a row."""
    del limits, workspace
    return device.function(source("process.cu"), "bias_logits").bind(
        lambda n: n,
        64,
        a.logits,
        a.row_slot,
        a.num_biases,
        a.bias_ids,
        a.biases,
        a.biases.shape[1],
        a.logits.shape[1],
        dependent=True,
    )


def forbid_tokens(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a row."""
    del limits, workspace
    return device.function(source("process.cu"), "forbid_tokens").bind(
        lambda n: n, 64, a.logits, a.row_slot, a.positions, text(a), a.min_tokens, a.stop_tokens, a.stop_tokens.shape[1],
        a.bad_words, a.bad_words.shape[1], a.bad_len, a.logits.shape[1], dependent=True,
    )  # fmt: skip


def mask_logits(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Blocks share a row, a place of a window each."""
    del limits, workspace
    width, words, vocab = a.masks.shape[1], a.masks.shape[2], a.logits.shape[1]
    parts = min(-(-vocab // 2048), 64)
    return device.function(source("process.cu"), "mask_logits").bind(
        lambda n: (n, width, parts), 256, a.slot_order, a.logit_start, a.logit_len, a.masked, a.masks, words, a.logits, vocab,
        dependent=True,
    )  # fmt: skip


def limit_thinking(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """Blocks share a row."""
    del limits, workspace
    vocab = a.logits.shape[1]
    parts = min(-(-vocab // 2048), 64)
    sizes = (a.reply_starts.shape[1], a.stop_tokens.shape[1], a.think_end.shape[0], a.think_forced.shape[0])
    thinking = Thinking((ctypes.c_void_p * 7)(*(getattr(a, name).pointer for name in THINKING)), *sizes)
    return device.function(source("process.cu"), "limit_thinking").bind(
        lambda n: (n, parts, 1), 256, a.logits, a.row_slot, a.positions, text(a), a.reply_from, thinking, vocab, dependent=True
    )


def commit_thinking(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread a sequence."""
    del limits, workspace
    pointers = (ctypes.c_void_p * 4)(a.tokens.pointer, None, a.prompt_len.pointer, a.num_generated.pointer)
    return device.function(source("process.cu"), "commit_thinking").bind(
        blocks, THREADS, a.slot_order, a.out_len, Text(pointers, a.tokens.shape[1], 0, 0), a.think_limit, a.think_end,
        a.think_end.shape[0], int(a.num_forced), a.reply_from, ROWS, dependent=True,
    )  # fmt: skip


KERNELS = {
    "process_logits": Kernel(process_logits),
    "penalise_logits": Kernel(penalise_logits, penalise_workspace),
    "bias_logits": Kernel(bias_logits),
    "forbid_tokens": Kernel(forbid_tokens),
    "mask_logits": Kernel(mask_logits),
    "limit_thinking": Kernel(limit_thinking),
    "commit_thinking": Kernel(commit_thinking),
}
