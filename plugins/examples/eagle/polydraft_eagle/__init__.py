"""EAGLE for polydraft: a proposer that taps the target and has a checkpoint of its own.

polydraft calls the hook while it builds an engine. `draft_model.py` reads the checkpoint, `proposer.py` appends the launches, and
`testing.py` computes the same naively.
"""

from __future__ import annotations

from polydraft import hookimpl
from polydraft.models import Block, ModelDescription
from polydraft.proposers import DraftWeights, Factory, Proposer, ProposerContext
from polydraft_eagle.draft_model import LAYER, DraftModel
from polydraft_eagle.proposer import EagleProposer


class Eagle:
    """The factory. Negotiation asks it for `layers` before there is a proposer, the loader for `weights`."""

    def layers(self, model: ModelDescription, draft_model: str) -> dict[str, Block]:
        """The decoder layer by prefix: what its cache costs is counted, and allocated, with those of the target."""
        return {LAYER: DraftModel.read(draft_model, model).block}

    def weights(self, model: ModelDescription, draft_model: str) -> DraftWeights:
        """What is read from the draft model's checkpoint. That there is this function lets users give `--draft-model`."""
        return DraftModel.read(draft_model, model).weights()

    def __call__(self, context: ProposerContext) -> Proposer:
        """The proposer of one engine."""
        return EagleProposer(context, DraftModel.read(context.draft_model, context.model))


@hookimpl
def polydraft_proposers() -> list[tuple[str, Factory]]:
    """Add `eagle` to what `--proposer` knows."""
    return [("eagle", Eagle())]
