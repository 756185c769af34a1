"""Launches for log probabilities: what is kept before logits change, what is found, stored and packed for the host.

They run only in steps in which some slot requests log probabilities. Ranks are exact, as in the sampler's filters.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS, sequence
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.pack import pointers
from polydraft_cuda.kernels.provider import Kernel, source
from polydraft_cuda.kernels.sampling import THREADS

PART: Final = 1024
"""`PART` of logprobs.cu: logits that a warp surveys."""
PART_BYTES: Final = 16 + 32 * 4
"""What it leaves of them."""
WARPS: Final = 8
"""Of a block of a survey."""
ALONE: Final = 64
"""Threads that report a token where nobody may ask for others beside it."""
OF_WINDOWS: Final = ("slot_order", "logit_start", "out_tokens", "num_top", "temperature")
OF_DRAFTS: Final = ("row_slot", "tokens", "draft_len", "num_top")
"""Fields of the structures in which kernels are told whose rows they see."""


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


def survey_bytes(device: CudaDevice, a: Any, limits: Any) -> int:
    """What a survey leaves of every row of a launch."""
    del device, limits
    return math.prod(_places(a)) * -(-int(a.logits.shape[1]) // PART) * PART_BYTES


def _places(a: Any) -> tuple[int, ...]:
    """Rows of a launch at most: places of windows, or rows of drafts."""
    return tuple(a.out_tokens.shape) if hasattr(a, "out_tokens") else (int(a.logits.shape[0]),)


def _surveyed(device: CudaDevice, a: Any, workspace: Any, names: tuple[str, ...], report: Launch) -> Launch:
    """A survey of rows in front of what reports of them: a warp a part, blocks share a row."""
    vocab, (_, *window) = int(a.logits.shape[1]), _places(a)
    width, blocks = (window or [1])[0], -(-vocab // (PART * WARPS))
    survey = device.function(source("logprobs.cu"), "survey_windows" if window else "survey_drafts").bind(
        lambda n: (n, width, blocks), 32 * WARPS, a.logits, pointers(a, names), workspace.buffer, vocab, dependent=True
    )  # fmt: skip
    return sequence(survey, report)


def top_logprobs(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a place of a window, behind a survey."""
    del limits
    width, columns = a.ids.shape[1], a.ids.shape[2]
    report = device.function(source("logprobs.cu"), "top_logprobs").bind(
        lambda n: (n, width, 1), THREADS, a.logits, pointers(a, OF_WINDOWS), workspace.buffer, a.ids, a.logprobs, a.ranks,
        a.logits.shape[1], columns, dependent=True,
    )  # fmt: skip
    return _surveyed(device, a, workspace, OF_WINDOWS, report)


def draft_logprobs(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A warp a row, behind a survey; of probabilities by itself."""
    del limits
    drawn = a.given == "probs"
    report = device.function(source("logprobs.cu"), "draft_logprobs").bind(
        lambda n: n, 32, a.logits, pointers(a, OF_DRAFTS), workspace.buffer, a.draft_logprobs, a.draft_logprobs.shape[1],
        a.logits.shape[1], int(drawn), dependent=True,
    )  # fmt: skip
    return report if drawn else _surveyed(device, a, workspace, OF_DRAFTS, report)


def draft_top_logprobs(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a row, behind a survey."""
    del limits
    drafts, columns = a.draft_top_ids.shape[1], a.draft_top_ids.shape[2]
    report = device.function(source("logprobs.cu"), "draft_top_logprobs").bind(
        lambda n: n, THREADS, a.logits, pointers(a, OF_DRAFTS), workspace.buffer, a.draft_top_ids, a.draft_tops, drafts,
        a.logits.shape[1], columns, int(a.given == "probs"), dependent=True,
    )  # fmt: skip
    return _surveyed(device, a, workspace, OF_DRAFTS, report)


PACKED: Final = ("extra", "drafts", "draft_logprobs", "draft_top_ids", "draft_tops", "record")


class Packed(ctypes.Structure):
    """`Packed` of logprobs.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in PACKED),
        *((name, ctypes.c_int) for name in ("num_drafts", "flag", "width", "capacity")),
    )

    def __init__(self, a: Any) -> None:
        width, capacity = a.ids.shape[1], a.ids.shape[2]
        drafts = 0 if a.drafts is None else a.drafts.shape[1]
        buffers = (getattr(a, name) for name in PACKED)
        super().__init__(*(None if one is None else one.pointer for one in buffers), drafts, int(a.flag), width, capacity)


def pack_logprobs(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A block a sequence, and one where there is none: a record has a header."""
    del limits, workspace
    return device.function(source("logprobs.cu"), "pack_logprobs").bind(
        lambda n: max(n, 1), 128, a.slot_order, a.num_top, a.ids, a.logprobs, a.ranks, Packed(a), ROWS, dependent=True
    )  # fmt: skip


def reported(device: CudaDevice, args: Any, limits: Any, workspace: Any) -> Launch:
    """What is found goes into the record at once: a block a place of a window, behind a survey."""
    del limits
    a, pack = args.parts
    width, threads = a.out_tokens.shape[1], THREADS if a.ids.shape[2] > 1 else ALONE
    report = device.function(source("logprobs.cu"), "report_logprobs").bind(
        lambda n: (max(n, 1), width, 1), threads, a.logits, pointers(a, OF_WINDOWS), workspace.buffer, Packed(pack),
        a.logits.shape[1], ROWS, dependent=True,
    )  # fmt: skip
    return _surveyed(device, a, workspace, OF_WINDOWS, report)


KERNELS = {
    "keep_logits": Kernel(keep_logits),
    "forbid_filtered": Kernel(forbid_filtered),
    "top_logprobs": Kernel(top_logprobs, survey_bytes),
    "draft_logprobs": Kernel(draft_logprobs, survey_bytes),
    "draft_top_logprobs": Kernel(draft_top_logprobs, survey_bytes),
    "pack_logprobs": Kernel(pack_logprobs),
}
