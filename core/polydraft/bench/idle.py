"""Owns how long a device had nothing to do while steps of a timed run went by, asked by as little as it takes to know.

`measure` runs inside of `watching`. Where steps are replayed whole and the device has timers, the event behind each step becomes
a timed one, which a step does not notice; elsewhere the operations of a device that keeps a timeline tell it. It never
guesses: of a device that tells nothing nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from math import nan
from typing import TYPE_CHECKING, Protocol

from polydraft.device import Event, Stream
from polydraft.timeline import keeping, keeps_timeline
from polydraft.trace import put_in_place
from polydraft.trace_figures import idle_among

if TYPE_CHECKING:
    from polydraft.engine import Engine

Share = Callable[[float, float], float | None]
"""The share of time in which the device was idle, between what was launched first and what was launched last between two
moments of the clock; None where nobody knows."""


class Timer(Event, Protocol):
    """An event that knows when it was reached. A device that has them makes them by `timer()`."""

    def since(self, earlier: Timer) -> float:
        """Milliseconds between two that have been reached."""


@contextmanager
def watching(engine: Engine, now: Callable[[], float], *, about: int) -> Iterator[Share]:
    """Watch an engine's device meanwhile; give what says how long it was idle. `now`: the clock of the moments, in seconds;
    `about` as many steps will go by: what they need is made beforehand."""
    graphs = engine.runner.graphs
    with ExitStack() as stack:
        if graphs is not None and graphs.whole and hasattr(engine.device, "timer"):
            ends = StepEnds(engine.device.timer, engine.device.stream, now, about)
            outputs = [(staging, ends.event()) for staging, _ in engine.runner._outputs]
            stack.callback(put_in_place(engine.runner, "_outputs", outputs))
            stack.callback(put_in_place(graphs, "replay", partial(ends.replay, graphs.replay)))
            yield ends.idle
        else:
            # Launches by themselves are left alone: telling of each would take longer than the launch.
            stack.enter_context(nullcontext() if graphs is None else keeping(engine.device))
            yield partial(_idle_by_operations, engine.device)


def _idle_by_operations(device: object, begin: float, end: float) -> float | None:
    if not keeps_timeline(device):
        return None
    return idle_among([o for o in device.timeline().spans if begin <= o.issued_s <= end])  # type: ignore[attr-defined]


class StepEnds:
    """When each step ended, on the device's clock, and when its launch returned, on the host's.

    A step that was launched before the one in front of it had ended begins there. Behind one that came later the device has
    been idle until its launch returned, or a few microseconds less: what stands in front of its graph may have begun."""

    def __init__(self, timer: Callable[[], Timer], stream: Stream, now: Callable[[], float], about: int) -> None:
        self._timer, self._stream, self._now = timer, stream, now
        self._spare = [timer() for _ in range(about)]
        self._replayed_s = nan
        self._steps: list[tuple[float, Timer]] = []
        self._origin, self._zero_s = self._tie()

    def _tie(self) -> tuple[Timer, float]:
        """A moment that both clocks know."""
        timer = self._timer()
        timer.record(self._stream)
        timer.synchronize()
        return timer, self._now()

    def replay(self, replay: Callable[..., None], kind: str, piece: str, bucket: int) -> None:
        """Replay a step as the engine does, and note when that returned."""
        replay(kind, piece, bucket)
        self._replayed_s = self._now()

    def event(self) -> StepEnd:
        """A stand-in for the event behind a step."""
        return StepEnd(self)

    def ended(self, stream: Stream) -> Timer:
        """The end of the step that was enqueued last."""
        timer = self._spare.pop() if self._spare else self._timer()
        timer.record(stream)
        self._steps.append((self._replayed_s, timer))
        self._replayed_s = nan
        return timer

    def idle(self, begin: float, end: float) -> float | None:
        """Of the time from the end of the first step that was replayed between the two moments to the end of the last. Waits."""
        last, last_s = self._tie()
        rate = (last_s - self._zero_s) / last.since(self._origin)  # the clocks drift apart by microseconds a second
        steps = [(s, self._zero_s + rate * timer.since(self._origin)) for s, timer in self._steps if begin <= s <= end]
        if len(steps) < 2:
            return None
        waited = sum(max(replayed - before, 0.0) for (_, before), (replayed, _) in pairwise(steps))
        return waited / (steps[-1][1] - steps[0][1])


class StepEnd:
    """Stands for an event of the runner: a timed one each time that it is recorded."""

    def __init__(self, ends: StepEnds) -> None:
        self._ends = ends
        self._timer: Timer | None = None

    def record(self, stream: Stream) -> None:
        """Behind all work queued on `stream` so far."""
        self._timer = self._ends.ended(stream)

    def query(self) -> bool:
        """Whether it has been reached."""
        return self._timer is None or self._timer.query()

    def synchronize(self) -> None:
        """Wait for it."""
        if self._timer is not None:
            self._timer.synchronize()
