"""The named points of a step at which somebody may listen: when a stage of the host's work begins and when it has ended.

Engine and runner say what they are about to do (`told`) where somebody listens at that point, and do it as it is where nobody
does: an empty list costs them the question. They know nothing of who listens; instruments (`polydraft.instruments`) do.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, get_args

if TYPE_CHECKING:
    from polydraft.program.plan import StepPlan

P = ParamSpec("P")
T = TypeVar("T")

Stage = Literal["step", "plan", "launch", "upload", "replay", "inputs", "resume", "collect", "wait", "commit", "output"]
"""What the host does for a step, and what it is about (the *subject* of `begin` and `end`):

| stage | what happens | subject |
|---|---|---|
| step | `Engine.step`; encloses all but the output | None |
| plan | the scheduler plans; its result is the plan, or None | None |
| launch | a step is enqueued, or its first half | the `StepPlan` |
| upload | its runs into slot columns and launch order are, within the launch | the `StepPlan` |
| replay | a captured piece of it is | the `Replay` |
| inputs | the middle of a step that meets host inputs there: collects those before it, and resumes | the `InFlightStep` |
| resume | the second half of such a step is enqueued | the `InFlightStep` |
| collect | a snapshot is waited for and decoded | the `InFlightStep` |
| wait | the wait, within | the `InFlightStep` |
| commit | an outcome is folded into slots and requests | the `StepPlan` |
| output | results are made of what has happened | None |
"""
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Replay:
    """A captured piece of a step that is replayed: the kind of step, the piece ("step" is all of it), the bucket, and the drafts
    that it makes, for each of which and one more it has a row of every slot."""

    kind: str
    piece: str
    bucket: int
    num_drafts: int


class Listener(Protocol):
    """Somebody who listens at points. What it does in between is its own business, and takes the host's time."""

    @property
    def order(self) -> int:
        """Those of a lower order begin first and end last."""

    def begin(self, stage: Stage, subject: Any) -> None:
        """A stage is about to begin."""

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        """It has ended; `result` is None where it raised."""


@dataclass(eq=False)
class Points:
    """Who listens where, by stage. The lists are empty unless somebody was added, and are asked by their truth alone."""

    step: list[Listener] = field(default_factory=list)
    plan: list[Listener] = field(default_factory=list)
    launch: list[Listener] = field(default_factory=list)
    upload: list[Listener] = field(default_factory=list)
    replay: list[Listener] = field(default_factory=list)
    inputs: list[Listener] = field(default_factory=list)
    resume: list[Listener] = field(default_factory=list)
    collect: list[Listener] = field(default_factory=list)
    wait: list[Listener] = field(default_factory=list)
    commit: list[Listener] = field(default_factory=list)
    output: list[Listener] = field(default_factory=list)
    eager: list[Callable[[StepPlan], bool]] = field(default_factory=list)
    """Asked before a step is replayed: where one of them says so, its launches are enqueued one by one instead."""

    def add(self, stage: Stage, listener: Listener) -> None:
        """Listen at a stage from now on; once, however often it is said."""
        listeners: list[Listener] = getattr(self, stage)
        if listener not in listeners:
            bisect.insort(listeners, listener, key=lambda one: one.order)

    def remove(self, stage: Stage, listener: Listener) -> None:
        """Listen no longer. A stage that has begun is still ended for it."""
        listeners: list[Listener] = getattr(self, stage)
        if listener in listeners:
            listeners.remove(listener)

    def told(self, stage: Stage, subject: object, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, telling all who listen at the stage before and after it, also where it raises."""
        listeners: tuple[Listener, ...] = tuple(getattr(self, stage))
        result: Any = None
        for one in listeners:
            one.begin(stage, subject)
        try:
            result = function(*args, **kwargs)
        finally:
            for one in reversed(listeners):
                one.end(stage, subject, result)
        return result  # type: ignore[no-any-return]

    def wants_eager(self, plan: StepPlan) -> bool:
        """Whether somebody has the launches of this step enqueued one by one."""
        return any(wants(plan) for wants in self.eager)
