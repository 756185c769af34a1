"""Where a text of few bits parts from the exact one, and how close the choice was there: tests of backends in 16 bits use it.

Texts and rounds of an engine are held against the recomputing oracle in float64. A divergence is legal when the oracle itself
could hardly tell the two choices apart; `gap` says how far apart it has them, in logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from polydraft.conformance.oracle import OracleModel, greedy_rounds


class Divergence(NamedTuple):
    """The first other choice of a text. `place` counts generated tokens. `gap`: how much lower than its best logit the oracle has
    what the engine chose; of a draft that nobody reports, how much lower its second best."""

    what: Literal["token", "draft"]
    place: int
    gap: float


def divergences(
    model: OracleModel, prompt_ids: Sequence[int], token_ids: Sequence[int], rounds: Sequence[int], num_drafts: int
) -> list[Divergence]:
    """At most two: the first other token, and the first round before it that accepted more or fewer drafts. Equal texts and
    rounds have none."""
    wanted = greedy_rounds(model, prompt_ids, num_drafts, len(token_ids), ())
    pairs = enumerate(zip(token_ids, wanted.token_ids, strict=True))
    parted = next((place for place, (got, want) in pairs if got != want), len(token_ids))
    found = []
    if parted < len(token_ids):
        logits = model.target_logits(model.target_states([*prompt_ids, *wanted.token_ids[:parted]])[-1:])[0]
        found.append(Divergence("token", parted, float(logits.max() - logits[token_ids[parted]])))
    known = 1
    for got, want in zip(rounds, wanted.rounds, strict=False):
        place = known + min(got, want)
        if place >= parted:
            break
        if got != want:
            text = [*prompt_ids, *wanted.token_ids]
            found.append(Divergence("draft", place, _draft_gap(model, text, len(prompt_ids) + known, got, want)))
            break
        known += got + 1
    return found


def _draft_gap(model: OracleModel, text: list[int], begin: int, got: int, want: int) -> float:
    """Of the draft behind `text[:begin]` that one of the two accepted."""
    at = min(got, want)
    states = model.target_states(text[: begin - 1])
    row = model.draft(text[:begin], states, at + 1)[1][at]
    if got > want:  # the engine drafted what the text has
        return float(row.max() - row[text[begin + at]])
    second, best = np.partition(row, -2)[-2:]
    return float(best - second)
