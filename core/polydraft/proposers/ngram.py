"""Owns the n-gram proposer: drafts looked up in the request's own text, on the device, without a model.

Chosen by `--proposer ngram`; it pays where output repeats its input (edits, extraction, code). It keeps no state of its own.
"""

from __future__ import annotations

from polydraft.contracts.begin_draft import BeginDraftV1
from polydraft.contracts.draft_ngram import DraftNgramV1
from polydraft.proposers.base import ProposerContext, ProposerShape
from polydraft.runtime.program import ProgramBuilder

MAX_NGRAM = 4
MIN_NGRAM = 2


class NgramProposer:
    """Drafts up to K tokens in one launch; often fewer, since a run must have occurred before."""

    name = "ngram"

    def __init__(self, context: ProposerContext) -> None:
        self._state, self._step = context.state, context.step
        self.shape = ProposerShape(max_width=context.limits.num_drafts, fixed=False, one_call=True)
        sizes = (context.limits.max_seqs,)
        self._slot, self._position, self._budget = (
            context.device.empty(f"draft.{name}", sizes, "i32") for name in ("slot", "position", "budget")
        )

    def append(self, program: ProgramBuilder, *, sampling: bool) -> None:
        """Two launches, the same for greedy and sampling steps: a draft is a guess, the verifier's choice decides."""
        del sampling
        s, t = self._state, self._step
        begin = BeginDraftV1(
            slot_order=t.slot_order, seq_len=t.seq_len, phase=s.phase, kv_len=s.kv_len, prompt_len=s.prompt_len,
            num_generated=s.num_generated, max_total=s.max_total, drafts=s.drafts, draft_len=s.draft_len,
            draft_slot=self._slot, draft_position=self._position, draft_budget=self._budget,
        )  # fmt: skip
        program.add("begin_draft", begin, "seqs", "begin_draft")
        look_up = DraftNgramV1(
            draft_slot=self._slot, draft_budget=self._budget, prompt_len=s.prompt_len, num_generated=s.num_generated,
            tokens=s.tokens, drafts=s.drafts, draft_len=s.draft_len, max_ngram=MAX_NGRAM, min_ngram=MIN_NGRAM,
        )  # fmt: skip
        program.add("draft_ngram", look_up, "seqs", "draft 0")
