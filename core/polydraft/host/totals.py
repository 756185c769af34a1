"""Counts of an engine: tokens, steps, rounds, and drafts by position.

Commit adds the results of each step, the engine adds its seconds and subtracts what a stop string takes back. Single requests are
not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from polydraft.device import Array


@dataclass
class EngineTotals:
    """Counts since the engine was built; seconds are host time of whole steps."""

    new_tokens: int = 0
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    rounds: int = 0
    accepted: int = 0
    drafted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """By draft position: rounds in which that draft became output."""
    drafted_at: list[int] = field(default_factory=list)
    """By draft position: rounds that verified a draft there."""
    drafts_per_step: list[int] = field(default_factory=list)
    """By number of drafts: steps that were to make so many for a slot."""
    paused: int = 0
    """Rounds that a sequence missed because it had no blocks for them."""

    def add(self, num_tokens: int, accepted: Array, drafted: Array) -> None:
        """A step was applied: tokens of its live sequences, and drafts of those that had a round, int32 [rounds]."""
        self.steps += 1
        self.new_tokens += num_tokens
        self.rounds += len(accepted)
        self.accepted += _file(self.accepted_at, accepted)
        self.drafted += _file(self.drafted_at, drafted)

    def take_back(self, num_tokens: int, before: Sequence[int], after: Sequence[int]) -> None:
        """A stop string cut `num_tokens` off a request whose rounds were `before` and are `after`; its drafts stay verified."""
        self.new_tokens -= num_tokens
        self.rounds -= len(before) - len(after)
        self.accepted -= sum(before) - sum(after)
        for place in range(len(self.accepted_at)):
            self.accepted_at[place] -= sum(a > place for a in before) - sum(a > place for a in after)


def _file(places: list[int], counts: Array) -> int:
    """Add to each place how many counts lie beyond it; returns their sum."""
    if not places:
        return 0
    beyond = total = 0
    found = np.bincount(counts, minlength=len(places) + 1).tolist()
    for place in range(len(places), 0, -1):
        beyond += found[place]
        total += beyond
        places[place - 1] += beyond
    return total
