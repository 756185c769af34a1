"""The stage that limits the length of thinking and of the reply behind it: what a request may ask for, and its slot columns.

The runner appends it behind all other stages, and its commit behind that of the step. A slot's columns have its limits and where
its reply begins, so a step costs two launches more and no work of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from polydraft.program.declare import Admission, Column, LogitRows, StepBuffer
from polydraft.sampling.processing import Stage, refuse_unknown
from polydraft.sampling.thinking import Markers, Thinking
from polydraft.sampling_params import MAX_REPLY_STARTS, SamplingParams
from polydraft.sentinels import NO_LIMIT

if TYPE_CHECKING:
    from polydraft.host.request import Request
    from polydraft.program.program import ProgramBuilder


def _reply_from(admission: Admission) -> int:
    thinking, prompt = limits_of(admission.request), len(admission.request.prompt_ids)
    return 0 if thinking is None else thinking.reply_from(admission.known[:prompt].tolist(), admission.known[prompt:])


def _limit(count: int | None) -> int:
    return NO_LIMIT if count is None else count


class ThinkingLimits(Stage):
    """Limits of thinking and of the reply, and what the reply may begin with. The last stage of all: what it forces comes,
    whatever forbids it."""

    name = "thinking_limits"
    contracts = ("limit_thinking", "commit_thinking")
    columns = (
        Column("reply_from", "Place of the reply's first token among generated ones; -1: the text thinks.", value=_reply_from),
        Column("think_limit", "Tokens of thinking at most; -1: any number.", empty=NO_LIMIT,
               value=lambda a: _limit(a.params.thinking_limit)),
        Column("reply_limit", "Tokens of the reply at most; -1: any number.", empty=NO_LIMIT,
               value=lambda a: _limit(a.params.reply_budget)),
        Column("num_reply_starts", "Places of `reply_starts` in use.", value=lambda a: len(a.params.reply_start_token_ids)),
        Column("reply_starts", "Tokens that the reply may begin with.", f"B {MAX_REPLY_STARTS}",
               value=lambda a: a.params.reply_start_token_ids, resets=False),
    )  # fmt: skip

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self.buffers = (
            StepBuffer("think_end", str(len(markers.end)), initial=np.array(markers.end, np.int32)),
            StepBuffer("think_forced", str(len(markers.forced)), initial=np.array(markers.forced, np.int32)),
        )

    def wants(self, params: SamplingParams) -> bool:
        """Whether there is a limit."""
        return params.limits_thinking

    def prepare(self, params: SamplingParams, encode: Callable[[str], list[int]], vocab_size: int) -> Thinking:
        """The limits. Raises `RequestError` for tokens that the model does not have."""
        del encode
        refuse_unknown("reply_start_token_ids", params.reply_start_token_ids, vocab_size)
        return self._markers.of(params)

    def emit(self, rows: LogitRows) -> None:
        """One launch over the rows."""
        rows.add("limit_thinking")

    def commit(self, program: ProgramBuilder) -> None:
        """One launch over the sequences."""
        program.add("commit_thinking", "seqs", "commit", num_forced=len(self._markers.forced))


def limits_of(request: Request) -> Thinking | None:
    """The limits of a request, None where it has none."""
    found: Thinking | None = request.prepared.get(ThinkingLimits.name)
    return found
