"""Counts of what was computed twice and compared, and when differing results are more than rounding explains."""

from __future__ import annotations

from typing import Final

import numpy as np

RECENT: Final = 32
"""Comparisons that are looked at together where rounding may make results differ."""
MOST_TIES: Final = 4
"""Differing ones among them that rounding may explain: candidates for a token are seldom within rounding of each other."""


class Differences:
    """`checked`: comparisons so far; `differed`: those of them whose results differed. With `exact` arithmetic none may."""

    def __init__(self, *, exact: bool) -> None:
        self.checked = self.differed = 0
        self.exact = exact
        self._recent = np.zeros(RECENT, bool)

    def count(self, differs: bool) -> bool:
        """Count one more; returns whether that is to be told."""
        self._recent[self.checked % RECENT] = differs
        self.checked += 1
        self.differed += differs
        told = differs and (self.exact or int(self._recent.sum()) > MOST_TIES)
        if told:
            self._recent[:] = False
        return told

    def __str__(self) -> str:
        return f"{self.differed} of {self.checked} checks"
