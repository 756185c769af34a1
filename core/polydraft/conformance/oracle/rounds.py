"""Greedy MTP speculative decoding replayed by full recomputation, to be compared with what the engine reports.

The target's greedy text does not depend on K, so it is computed once for each prompt and kept: drafts only serve as
guesses that let one forward confirm several tokens. A token counts as known only where it is the argmax of logits
computed over nothing but known tokens before it. The drafts behind a position are recomputed from scratch, once for
every K.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from polydraft.conformance.oracle.model import OracleModel

_GUESSES_PER_BLOCK = 0.75
"""Drafts of one forward of `GreedyText` for each block of the target, since a pass of the MTP head costs about a block: a
matter of speed only."""


class GreedyRounds(NamedTuple):
    """What greedy decoding with K drafts a round yields; `margins` are in units of logits."""

    token_ids: list[int]
    """The generated tokens, the stop token included."""
    rounds: list[int]
    """Accepted drafts of each decode round; the token sampled by the prefill is not a round."""
    margins: list[float]
    """For each generated token the target's best logit minus its second: below ~1e-3 a float32 engine may differ."""


class Draft(NamedTuple):
    """One draft: whether the target says the same, and the head's best logit minus its second."""

    right: bool
    margin: float


class GreedyText:
    """The target's greedy continuation of one prompt, known as far as somebody has asked for it."""

    def __init__(self, model: OracleModel, prompt_ids: Sequence[int]) -> None:
        self.model = model
        self.token_ids = list(prompt_ids)
        self.margins = [np.nan] * len(self.token_ids)
        self.states = model.target_states(self.token_ids)[: len(self.token_ids) - 1]
        self._drafts: dict[int, list[Draft]] = {}

    def need(self, position: int) -> int:
        """Return the token at `position`, computing as far as that takes."""
        while len(self.token_ids) <= position:
            self._extend()
        return self.token_ids[position]

    def _extend(self) -> None:
        """One forward over the known tokens and a guess; learns the confirmed guesses and the token behind them."""
        known = len(self.token_ids)
        num_guesses = int(len(self.model.description.blocks) * _GUESSES_PER_BLOCK)
        has_states = self.model.description.mtp is not None and 1 < known == len(self.states) + 1
        guess = self.model.draft(self.token_ids, self.states, num_guesses)[0] if has_states and num_guesses else []
        states = self.model.target_states([*self.token_ids, *guess])
        for logits, guessed in zip(self.model.target_logits(states[known - 1 :]), [*guess, None], strict=True):
            second, best = np.partition(logits, -2)[-2:]
            self.margins.append(float(best - second))
            self.token_ids.append(int(np.argmax(logits)))
            if self.token_ids[-1] != guessed:
                break
        self.states = states[: len(self.token_ids) - 1]

    def drafts(self, position: int, most: int) -> list[Draft]:
        """The drafts behind the first `position` tokens up to the first wrong one, at most `most`: all that a round looks at,
        whatever its K. Recomputed from scratch, once."""
        found = self._drafts.get(position, [])
        if len(found) < most and all(draft.right for draft in found):
            found = []
            for token_id, logits in self.model.drafting(self.token_ids[:position], self.states[: position - 1], most):
                second, best = np.partition(logits, -2)[-2:]
                found.append(Draft(token_id == self.need(position + len(found)), float(best - second)))
                if not found[-1].right:
                    break
            self._drafts[position] = found
        return found[:most]


def greedy_text(model: OracleModel, prompt_ids: Sequence[int]) -> GreedyText:
    """The text of a prompt, which the model remembers."""
    key = tuple(prompt_ids)
    if key not in model.texts:
        model.texts[key] = GreedyText(model, prompt_ids)
    text: GreedyText = model.texts[key]
    return text


def greedy_rounds(
    model: OracleModel, prompt_ids: Sequence[int], K: int | Sequence[int], max_new: int, eos_ids: Collection[int]
) -> GreedyRounds:
    """Decode `prompt_ids` greedily with up to `K` MTP drafts a round, until a stop, `max_new` or the model's length; with as many
    as `K` says of each round, none in later ones, where it is a sequence.

    A round drafts min(K, room - 1) tokens, where room is how many tokens may still come, so that accepted drafts and
    the target's own token always fit. A round that meets a stop token counts the accepted drafts up to and with it.
    """
    text = greedy_text(model, prompt_ids)
    limit = min(len(prompt_ids) + max_new, model.description.max_model_len)
    length = len(prompt_ids)
    rounds: list[int] = []
    if length < limit:
        stopped = text.need(length) in eos_ids
        length += 1
        while length < limit and not stopped:
            wanted = K if isinstance(K, int) else next(iter(K[len(rounds) :]), 0)
            num_drafts = min(wanted, limit - length - 1)
            accepted = sum(draft.right for draft in text.drafts(length, num_drafts))
            text.need(length + accepted)
            emitted = text.token_ids[length : length + accepted + 1]
            stops = [i for i, token_id in enumerate(emitted) if token_id in eos_ids]
            if stops:
                emitted, stopped = emitted[: stops[0] + 1], True
            rounds.append(min(accepted, len(emitted)))
            length += len(emitted)
    begin = len(prompt_ids)
    return GreedyRounds(text.token_ids[begin:length], rounds, text.margins[begin:length])
