"""The proposer interface and the built-in proposers; a proposer fills `drafts` and `draft_len` for the next round.

The runner asks one proposer for its launches when the step program is built, and never again. How many passes a proposer makes,
and whether it has a model, is up to the proposer. It sees no requests, only the state on the device.
"""

from polydraft.proposers.base import Proposer, ProposerContext, ProposerRegistry

__all__ = ["Proposer", "ProposerContext", "ProposerRegistry"]
