"""Owns the proposer that never drafts: plain decoding through the very same step.

Chosen by `--proposer none` or K = 0, and the baseline that every other proposer's text must equal. It launches nothing.
"""

from __future__ import annotations

from polydraft.proposers.base import ProposerContext, ProposerShape
from polydraft.runtime.program import ProgramBuilder


class NoProposer:
    """Drafts nothing: `draft_len` stays 0 from the slot's first update on."""

    name = "none"

    def __init__(self, context: ProposerContext) -> None:
        del context
        self.shape = ProposerShape(max_width=0, fixed=True, one_call=True)

    def append(self, program: ProgramBuilder, *, sampling: bool) -> None:
        """Nothing to launch."""
        del program, sampling
