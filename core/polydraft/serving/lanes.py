"""The timeline of a serving engine, step by step: what the host did when, and when the device was at work.

The worker drains it with the results of each step. It times the stages of a step but no single launch, and keeps nothing that was
drained.
"""

from __future__ import annotations

from polydraft.engine import Engine
from polydraft.instruments.timeline import BOUND, EXACT, HOST_STAGES
from polydraft.instruments.trace import Trace
from polydraft.serving import wire

MOST_SPANS = 4096
"""Spans that wait to be reported at most; the oldest go first."""
SHOWN = frozenset(HOST_STAGES) - {"launch", "collect"}
"""Stages of the host's lane that enclose no other one. Where launches run at once, `launch` is the device's."""


class Lanes:
    """The spans of an engine's steps since the last look, in milliseconds of its clock.

    A synchronous device works while the host launches, which is exact; of any other one the host knows that it works from a
    step's launch to the end of the wait for its snapshot, which is an upper bound. `said` says which of them it is."""

    def __init__(self, engine: Engine) -> None:
        """`engine` was built with a trace of its stages alone."""
        self._trace = engine.instruments[Trace]
        self._exact = not engine.info.capabilities.asynchronous
        self._launched: dict[int, float] = {}
        self._spans: list[wire.Span] = []
        self.said = EXACT if self._exact else BOUND
        self.busy_s = 0.0
        """Time in which the device was at work, as far as the lanes know."""
        self._until = 0.0

    def drain(self) -> list[wire.Span]:
        """What has ended since the last time, in order of its end."""
        self.note()
        spans, self._spans = self._spans, []
        return spans

    def note(self) -> None:
        """Take over what the trace has, so that it does not grow while nobody drains."""
        uploaded: dict[int, float] = {}
        for span in self._trace.drain():
            if span.name in SHOWN:
                self._add("host", span.name, span.start_s, span.end_s)
            if span.name == "upload":
                uploaded[span.step] = span.end_s
            elif span.name == "launch" and self._exact:
                self._add("device", f"step {span.step}", uploaded.get(span.step, span.start_s), span.end_s)
            elif span.name == "launch":
                self._add("host", "launch", uploaded.get(span.step, span.start_s), span.end_s)
                self._launched[span.step] = span.start_s
            elif span.name == "wait" and span.step in self._launched:
                self._add("device", f"step {span.step}", self._launched.pop(span.step), span.end_s)
        del self._spans[:-MOST_SPANS]

    def _add(self, side: str, name: str, start_s: float, end_s: float) -> None:
        if side == "device":  # steps in flight overlap
            self.busy_s += max(end_s - max(start_s, self._until), 0.0)
            self._until = max(self._until, end_s)
        self._spans.append((side, name, round(1e3 * start_s, 3), round(1e3 * (end_s - start_s), 3)))
