"""Named points of a step for listeners: the beginning and the end of each stage of the host's work.

Engine and runner call `notify_around` for a stage that has listeners, and run the stage directly where there are none, so an
empty list costs one check. They know nothing of the listeners, which are instruments (`polydraft.instruments`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
    """A listener at points. Whatever it does takes the host's time."""

    @property
    def order(self) -> int:
        """Listeners with a lower order begin first and end last."""

    def begin(self, stage: Stage, subject: Any) -> None:
        """A stage is about to begin."""

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        """It has ended; `result` is None where it raised."""


@dataclass(eq=False)
class Points:
    """The listeners of each stage. A list is empty unless a listener was added; callers only test whether it is empty."""

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
        """Stop listening. A stage that has begun still calls the listener's `end`."""
        listeners: list[Listener] = getattr(self, stage)
        if listener in listeners:
            listeners.remove(listener)

    def notify_around(self, stage: Stage, subject: object, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, and notify every listener of the stage before and after it. Whatever raises, the function or a
        listener, each whose `begin` has returned is ended."""
        listeners: list[Listener] = getattr(self, stage)
        call = partial(function, *args, **kwargs)
        for one in reversed(listeners):
            call = partial(_notify_around, one, stage, subject, call)
        return call()

    def wants_eager(self, plan: StepPlan) -> bool:
        """Whether an instrument needs the launches of this step enqueued one by one."""
        return any(wants(plan) for wants in self.eager)


def _notify_around(listener: Listener, stage: Stage, subject: object, function: Callable[[], T]) -> T:
    result: T | None = None
    listener.begin(stage, subject)
    try:
        result = function()
    finally:
        listener.end(stage, subject, result)
    return result
