"""How long a device had nothing to do while steps of a timed run went by, asked by as little as it takes to know.

`polydraft bench` runs inside of `watching`. Where steps are replayed whole and the device has timers, one is recorded behind each
step, which a step does not notice; elsewhere the operations of a device that keeps a timeline tell it. It never guesses: of a
device that tells nothing nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from math import nan
from typing import TYPE_CHECKING, Any, Protocol

from polydraft.device import Event, Stream
from polydraft.instruments.base import Aside, Instrument, bare
from polydraft.instruments.timeline import keeping, keeps_timeline
from polydraft.instruments.trace_figures import idle_among

if TYPE_CHECKING:
    from polydraft.program.points import Stage

Share = Callable[[float, float], float | None]
"""The share of time in which the device was idle, between what was launched first and what was launched last between two
moments of the clock; None where nobody knows."""


class Timer(Event, Protocol):
    """An event that knows when it was reached. A device that has them makes them by `timer()`."""

    def since(self, earlier: Timer) -> float:
        """Milliseconds between two that have been reached."""


class Idle(Instrument):
    """Measures while somebody is inside of `watching`, and is off else."""

    name = "idle"
    order = 40
    stages = ("replay", "launch")
    measures = True

    def __init__(self) -> None:
        super().__init__(on=False)
        self._ends: StepEnds | None = None

    @contextmanager
    def watching(self, now: Callable[[], float], *, about: int) -> Iterator[Share]:
        """Watch the engine's device meanwhile; give what says how long it was idle. `now`: the clock of the moments, in seconds;
        `about` as many steps will go by: what they need is made beforehand."""
        graphs, device = self.engine.runner.graphs, bare(self.engine.device)
        timer: Callable[[], Timer] | None = getattr(device, "timer", None)
        if graphs is not None and graphs.whole and timer is not None:
            self._ends = StepEnds(timer, device.stream, now, about)
            self.start()
            try:
                yield self._ends.idle
            finally:
                self.stop()
                self._ends = None
        else:
            # Launches by themselves are left alone: telling of each would take longer than the launch.
            with nullcontext() if graphs is None else keeping(device):
                yield partial(_idle_by_operations, device, self.engine.instruments.aside)

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        """A step was replayed; or it is enqueued as a whole, and ends with what has been enqueued so far."""
        del subject, result
        assert self._ends is not None, "it listens while it watches"
        if stage == "replay":
            self._ends.replayed()
        else:
            self._ends.ended()


def _idle_by_operations(device: Any, aside: Aside, begin: float, end: float) -> float | None:
    if not keeps_timeline(device):
        return None
    return idle_among([o for o in device.timeline().spans if begin <= o.issued_s <= end and not aside.covers(o.issued_s)])


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

    def replayed(self) -> None:
        """The launch of a step has just returned."""
        self._replayed_s = self._now()

    def ended(self) -> None:
        """All of a step is enqueued: its end is the end of what stands on the stream."""
        timer = self._spare.pop() if self._spare else self._timer()
        timer.record(self._stream)
        self._steps.append((self._replayed_s, timer))
        self._replayed_s = nan

    def idle(self, begin: float, end: float) -> float | None:
        """Of the time from the end of the first step that was replayed between the two moments to the end of the last. Waits."""
        last, last_s = self._tie()
        rate = (last_s - self._zero_s) / last.since(self._origin)  # the clocks drift apart by microseconds a second
        steps = [(s, self._zero_s + rate * timer.since(self._origin)) for s, timer in self._steps if begin <= s <= end]
        if len(steps) < 2:
            return None
        waited = sum(max(replayed - before, 0.0) for (_, before), (replayed, _) in pairwise(steps))
        return waited / (steps[-1][1] - steps[0][1])
