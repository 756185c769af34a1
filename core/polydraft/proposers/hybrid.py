"""The hybrid proposer: drafts of a model, and of what texts said before, whichever are right for longer.

Chosen by `--proposer hybrid`; it pays where texts repeat and yet bring something new. The model is the checkpoint's MTP head,
or the EAGLE-3 head that `--draft-model` names. Both draft in every round: the head in its passes, the lookup of the suffix
proposer on the host while the target's pass runs. `splice_drafts` then joins them: where what was found agrees with enough of
the head's first drafts, the rest of it follows them. How many are enough is worked out for each sequence from what both have
been seen to be worth; none are, where what was found is expected to give more than the head.

Lookup beside a model's drafts: SuffixDecoding (Oliaro et al. 2024) takes one or the other by its score; SGLang #36783 takes a
tail where both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np

from polydraft.device import Array
from polydraft.models.block import Block
from polydraft.models.description import ModelDescription
from polydraft.program.declare import Column, StepBuffer
from polydraft.program.host_inputs import HostView, Needs
from polydraft.program.program import ProgramBuilder
from polydraft.proposers.base import DraftWeights, ProposerContext
from polydraft.proposers.eagle3 import Eagle3Proposer
from polydraft.proposers.mtp import MtpProposer
from polydraft.proposers.suffix import SuffixGuesses, SuffixProposer

EVERY: Final = 8
"""Steps from one count of the model's drafts to the next."""
FADES: Final = 0.98
"""Share of what was counted that a count keeps."""
PRIOR, PRIOR_WEIGHT = 0.7, 8.0
"""Chance that a draft of the model is accepted, given those before it, until much was counted."""


class ModelDrafts:
    """How often the model's draft at each of `places` is right, given those before it: counted where it was verified, and where
    another token was accepted in its place."""

    def __init__(self, places: int) -> None:
        self._places, self._back = np.arange(places), np.arange(1, EVERY + 1)
        self._tried = np.full(places, PRIOR_WEIGHT)
        self._right = self._tried * PRIOR

    def count(self, view: HostView) -> None:
        """The newest `EVERY` rounds of the slots that decode."""
        t, slots = view.slots, view.plan.slots[view.plan.decode]
        at = t.num_rounds[slots, None] - self._back
        of = slots[:, None], np.maximum(at, 0)
        accepted, drafted, looked_up = (rounds[of].astype(np.int64) for rounds in (t.rounds, t.round_drafts, t.round_lookups))
        own = (drafted - looked_up)[..., None]
        verified = (self._places < np.minimum(accepted[..., None] + 1, own)) & (at >= 0)[..., None]
        right = verified & (self._places < accepted[..., None])
        refuted = (self._places == own) & ((looked_up > 0) & (accepted[..., None] > own)[..., 0] & (at >= 0))[..., None]
        self._tried = FADES * self._tried + (verified | refuted).sum(axis=(0, 1))
        self._right = FADES * self._right + right.sum(axis=(0, 1))

    @property
    def chances(self) -> Array:
        """[places] float64."""
        chances: Array = self._right / self._tried
        return chances


class HybridGuesses(SuffixGuesses):
    """Guesses as the suffix proposer has them, and how many of the model's drafts have to agree with what follows in each."""

    name = "hybrid"
    inputs = (*SuffixGuesses.inputs, "guess_agree")

    def __init__(self, context: ProposerContext, passes: int) -> None:
        super().__init__(context)
        self.buffers = (*self.buffers, StepBuffer("guess_agree", "B", initial=0))
        self._num_drafts, self._model, self._steps = context.limits.num_drafts, ModelDrafts(passes), 0
        self._weigh()

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        rows, n = super().fill(view, arrays), len(view.plan.slots)
        if self._steps % EVERY == 0:
            self._model.count(view)
            self._weigh()
        self._steps += 1
        arrays["guess_agree"][:n] = self._agree[self.guesses.source, self.guesses.match]
        return rows

    def _weigh(self) -> None:
        """Work out [source, match] int64: the fewest drafts of the model behind which the lookup is expected to be right in at
        least as many further tokens as the model is. Of the tokens that a guess runs over, one is taken to have held: there are
        no drafts otherwise."""
        chances, gains = self._model.chances, self._index.gains
        agree = np.arange(len(chances) + 1)
        model = np.array([np.cumprod(chances[first:]).sum() for first in agree])
        longer = np.minimum(np.arange(gains.shape[1])[:, None] + 1 + agree, gains.shape[1] - 1)
        self._agree = (gains[:, longer, self._num_drafts - agree] >= model).argmax(axis=2)


class HybridProposer:
    """Drafts of a head and of a lookup, joined on the device. Under rejection verification all of them count as certain."""

    name = "hybrid"
    ranks = True
    needs: Needs = "previous_tokens"
    lookups_from = "kept_drafts"
    options: ClassVar[Mapping[str, float]] = MappingProxyType({**SuffixProposer.options, "model_drafts": 0})
    """Those of the suffix proposer, and the passes of the model a round: 0 for as many as the step makes drafts. With fewer, what
    was found follows them, at no cost of the device."""
    columns = (Column("kept_drafts", "Leading drafts that the model made; those behind them were looked up."),)

    @staticmethod
    def layers(model: ModelDescription, draft_model: str = "") -> dict[str, Block]:
        """Those of the head."""
        return Eagle3Proposer.layers(model, draft_model) if draft_model else MtpProposer.layers(model)

    @staticmethod
    def weights(model: ModelDescription, draft_model: str) -> DraftWeights | None:
        """What is read from the draft model's checkpoint, where one is named."""
        return Eagle3Proposer.weights(model, draft_model) if draft_model else None

    note = staticmethod(Eagle3Proposer.note)

    def __init__(self, context: ProposerContext) -> None:
        limits = context.limits
        self._model = Eagle3Proposer(context) if context.draft_model else MtpProposer(context)
        self.state, self.taps = self._model.state, getattr(self._model, "taps", {})
        self.hidden_size = getattr(self._model, "hidden_size", context.model.hidden_size)
        self._passes = min(int(context.options["model_drafts"]) or limits.num_drafts, limits.num_drafts)
        self._draft_logprobs = "draft_logprobs" if limits.max_logprobs >= 0 else None
        self.features = (HybridGuesses(context, self._passes),)
        self.blocks, self.passes = self._model.blocks, self._model.passes
        self.buffers = (*self._model.buffers, StepBuffer("found", "B K", initial=0), StepBuffer("found_len", "B", initial=0))

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        """The model's passes, with the lookup in front and the joining behind them; without drafts the model's keep part."""
        self._model.begin(program, num_drafts)
        if num_drafts:
            program.add("align_drafts", "seqs", "begin_draft", drafts="found", draft_len="found_len")
        self._model.draft(program, min(num_drafts, self._passes))
        if num_drafts:
            program.add(
                "splice_drafts", "seqs", "draft lookup", agree="guess_agree", draft_logprobs=self._draft_logprobs,
            )  # fmt: skip
