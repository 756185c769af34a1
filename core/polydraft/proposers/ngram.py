"""The n-gram proposer: drafts looked up in the request's own text, on the device, without a model.

Chosen by `--proposer ngram`; it pays where output repeats its input (edits, extraction, code). It keeps no state of its own.
"""

from __future__ import annotations

from polydraft.program.program import ProgramBuilder
from polydraft.proposers.base import Drafting, ProposerContext

MAX_NGRAM = 4
MIN_NGRAM = 2


class NgramProposer:
    """Drafts up to K tokens in one launch; often fewer, since a run must have occurred before."""

    name = "ngram"
    buffers = Drafting.buffers

    def __init__(self, context: ProposerContext) -> None:
        del context

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        """Two launches, the same for greedy and sampling steps: a draft is a guess, the verifier's choice decides."""
        program.add("begin_draft", "seqs", "begin_draft", num_drafts=num_drafts)
        if num_drafts:
            program.add("draft_ngram", "seqs", "draft 0", max_ngram=MAX_NGRAM, min_ngram=MIN_NGRAM)
