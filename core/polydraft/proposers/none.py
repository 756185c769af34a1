"""The proposer that never drafts: plain decoding through the very same step.

Chosen by `--proposer none` or K = 0, and the baseline that every other proposer's text must equal. It launches nothing.
"""

from __future__ import annotations

from polydraft.program.program import ProgramBuilder
from polydraft.proposers.base import ProposerContext


class NoProposer:
    """Drafts nothing: `draft_len` stays 0 from the slot's admission on."""

    name = "none"
    ranks = True

    def __init__(self, context: ProposerContext) -> None:
        del context

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        """Nothing to launch."""
