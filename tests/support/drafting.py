"""Draft policies for tests: the number of drafts is drawn anew for every step, and how many of them each request verifies.

It also gives a policy to an engine that another helper builds. The tests of the step use it; comparing results is up to them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from polydraft import engine as engine_module
from polydraft.contracts.base import Limits
from polydraft.host.draft_policy import DraftPolicy, DraftView, Windows, check_policy, ladder


class Drawn:
    """Any rung of the ladder, drawn with a seed; it stays for a while, so that there are stretches without drafts. So do the
    windows of requests."""

    windows: Windows | None = None

    def __init__(self, limits: Limits, seed: int) -> None:
        self.rungs = ladder(limits.num_drafts)
        self._rng, self._last = random.Random(seed), limits.num_drafts

    def choose(self, view: DraftView) -> int:
        if self._rng.random() < 0.6:
            self._last = self._rng.choice(self.rungs)
        if self._rng.random() < 0.2:
            rows = [self._rng.randint(1, self.rungs[-1] + 1) for _ in view.slots.window]
            self.windows = Windows(np.array(rows, np.int32), view.slots.epoch.copy()) if self._rng.random() < 0.7 else None
        return self._last


@contextmanager
def deciding(make: Callable[[Limits], DraftPolicy]) -> Iterator[None]:
    """Engines that are built within have the policy that `make` makes."""

    def given(policy: Any, limits: Limits) -> DraftPolicy:
        del policy
        return check_policy(make(limits), limits)

    with mock.patch.object(engine_module, "check_policy", given):
        yield


def drawing(seed: int) -> Any:
    """Engines that are built within draw the number of drafts of every step."""
    return deciding(lambda limits: Drawn(limits, seed))
