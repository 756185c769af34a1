"""How many drafts a step makes: the ladder of numbers there are programs for, and who chooses among them.

A step verifies what the step before drafted (at most `StepPlan.window` rows a slot) and then makes `StepPlan.num_drafts` drafts.
The scheduler asks a policy for that number once a step, from what the host knows; whatever it answers, texts are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from polydraft.config import AUTO
from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.errors import ConfigError
from polydraft.host.slots import SlotTable
from polydraft.host.totals import EngineTotals

LADDER = (0, 1, 2, 3, 5)
"""Numbers of drafts that a step may make, besides the most that the engine is built for."""


def ladder(most: int) -> tuple[int, ...]:
    """What a step of an engine with at most `most` drafts may make, ascending; `most` is the last."""
    return (*(rung for rung in LADDER if rung < most), most)


class DraftView(NamedTuple):
    """What a policy may look at: the host's view of every slot, which of them decode in the step ([n] slots), whether prompts are
    computed beside them, and what the engine has counted so far."""

    slots: SlotTable
    decode: Array
    has_prefill: bool
    totals: EngineTotals


class Windows(NamedTuple):
    """Rows that rounds verify at most, by slot: what a policy that tells requests apart has as `windows`."""

    rows: Array
    """[B] int32, each at least 1: drafts that are verified, and one."""
    epochs: Array
    """[B] int32: the requests that they are of, as `SlotTable.epoch` counts them; others are not limited."""

    def limit(self, rows: Array, slots: SlotTable, decode: Array) -> Array:
        """The rows [n] int32 of the slots in `decode` [n], none more than here."""
        mine = slots.epoch[decode] == self.epochs[decode]
        limited: Array = np.where(mine, np.minimum(rows, self.rows[decode]), rows)
        return limited


class DraftPolicy(Protocol):
    """Chooses the number of drafts of each step.

    One that tells requests apart also has `windows`: `Windows`, or None where none is limited. It replaces them by others where
    it changes its mind, and never changes their arrays: plans keep what they were made from. One that does not go with every
    engine has `check`, which is called with the `Limits` of one and raises `ConfigError`."""

    @property
    def rungs(self) -> tuple[int, ...]:
        """Every number that `choose` may answer, ascending. Programs are built, and graphs captured, for these alone; the last
        is the most that the engine drafts."""

    def choose(self, view: DraftView) -> int:
        """Drafts that the step being planned makes for each slot at most, one of `rungs`. Called once a step.
        What it raises, or another answer, ends the running requests and is raised by `Engine.step`."""


class Always:
    """The same number in every step."""

    def __init__(self, num_drafts: int) -> None:
        self.rungs = (num_drafts,)

    def choose(self, view: DraftView) -> int:
        """The one there is."""
        del view
        return self.rungs[0]


def most_drafts(policy: DraftPolicy) -> int | str:
    """The most that a policy chooses, for an engine that was not told; "auto" where it has no such number, which `check_policy`
    refuses."""
    rungs = getattr(policy, "rungs", None)
    return rungs[-1] if isinstance(rungs, Sequence) and rungs and isinstance(rungs[-1], int) and rungs[-1] >= 0 else AUTO


def check_policy(policy: DraftPolicy | None, limits: Limits) -> DraftPolicy:
    """The policy of an engine; None: the most drafts in every step. Raises `ConfigError` for what is no policy, and for rungs
    that the engine has not."""
    if policy is None:
        return Always(limits.num_drafts)
    if not callable(getattr(policy, "choose", None)) or not isinstance(getattr(policy, "rungs", None), Sequence):
        raise ConfigError(f"the draft policy is {policy!r}, wanted one with `rungs` and `choose`; see DraftPolicy")
    check: Callable[[Limits], None] | None = getattr(policy, "check", None)
    if check is not None:
        check(limits)
    rungs = tuple(policy.rungs)
    ascending = all(isinstance(rung, int) for rung in rungs) and rungs == tuple(sorted(set(rungs)))
    if not ascending or not rungs or rungs[0] < 0 or rungs[-1] != limits.num_drafts:
        raise ConfigError(
            f"the draft policy chooses among {rungs}, wanted ascending numbers of drafts, the last of them {limits.num_drafts}, "
            "the most of this engine; correct its rungs, or the number of draft tokens"
        )
    return policy
