"""The proposer interface and the built-in proposers; a proposer fills `drafts` and `draft_len` for the next round.

The runner asks one proposer for its launches when the step program is built, and never again. How many passes a proposer makes,
and whether it has a model, is up to the proposer. It sees no requests, only the state on the device.
"""

from polydraft.program.declare import Column, Pass, StepBuffer
from polydraft.program.program import ProgramBuilder
from polydraft.proposers.base import Drafting, DraftWeights, Factory, Proposer, ProposerContext, ProposerRegistry
from polydraft.sampling.draft_vocab import places_of

__all__ = [
    "Column",
    "DraftWeights",
    "Drafting",
    "Factory",
    "Pass",
    "ProgramBuilder",
    "Proposer",
    "ProposerContext",
    "ProposerRegistry",
    "StepBuffer",
    "places_of",
]
