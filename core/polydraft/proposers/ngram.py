"""The n-gram proposer: drafts looked up in the request's own text, on the device, without a model.

Chosen by `--proposer ngram`; it pays where output repeats its input (edits, extraction, code). It keeps no state of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from polydraft.errors import ConfigError
from polydraft.program.program import ProgramBuilder
from polydraft.proposers.base import Drafting, ProposerContext


class NgramProposer:
    """Drafts up to K tokens in one launch; often fewer, since a run must have occurred before."""

    name = "ngram"
    ranks = True
    options: ClassVar[Mapping[str, float]] = MappingProxyType({"min_ngram": 2, "max_ngram": 4})
    """Tokens that have to occur again, at least, and tokens that are looked for first."""
    buffers = Drafting.buffers

    def __init__(self, context: ProposerContext) -> None:
        self._least, self._most = int(context.options["min_ngram"]), int(context.options["max_ngram"])
        if not 1 <= self._least <= self._most:
            raise ConfigError(
                f"proposer ngram: min_ngram is {self._least} and max_ngram {self._most}, wanted 1 <= min_ngram <= max_ngram; "
                "correct --proposer-option"
            )

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        """Two launches, the same for greedy and sampling steps: a draft is a guess, the verifier's choice decides."""
        program.add("begin_draft", "seqs", "begin_draft", num_drafts=num_drafts)
        if num_drafts:
            program.add("draft_ngram", "seqs", "draft 0", max_ngram=self._most, min_ngram=self._least)
