"""The recording of a step timeline: what the host did at the points of each step, and its launches and copies.

`generate --trace FILE`, `polydraft bench` and the server's playground put it around an engine. It never changes what runs or
when: it only looks at the clock before and after.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from polydraft._version import __version__
from polydraft.device import Buffer, Device, Launch, Staging, Stream
from polydraft.errors import DeviceError
from polydraft.instruments.base import Instrument, Setting, WrappedDevice, bare
from polydraft.instruments.timeline import (
    BOUND,
    EXACT,
    HOST,
    HOST_STAGES,
    INPUTS,
    OWN_TIME,
    TOLERANCE_S,
    Operation,
    Recording,
    Span,
    Timeline,
    clock_of,
    immediate,
    in_flight,
    keeping,
    keeps_timeline,
    order,
    placed,
)
from polydraft.program.points import STAGES, Stage

if TYPE_CHECKING:
    from polydraft.plugins.kernel_table import Binding
    from polydraft.program.plan import StepWidth

Calls = Literal["all", "immediate", "none"]
"""Which launches and copies are recorded: all, those of a device that computes inside them and does not say how long, none."""
RECORDED_STAGES = frozenset((*HOST_STAGES, INPUTS))
"""Stages that a recording has spans of."""


class Trace(Instrument):
    """Records from `start` on until `stop`; `finish` gives what there is. With `calls` launches and copies, too."""

    name = "trace"
    order = 30
    stages = tuple(stage for stage in STAGES if stage != "resume")

    def __init__(self, *, calls: Calls = "all", on: bool = True) -> None:
        super().__init__(on=on)
        self._calls: Calls = calls
        self._asynchronous = False
        self._ended: list[tuple[str, str, float, float, int, str, int]] = []
        self._widths: dict[int, StepWidth] = {}
        self._begun: list[float] = []
        """When the stages that are open now began, the innermost last."""
        self._step = 0
        self._calling = False
        """Whether calls are recorded now: in a step, and not within a call that is recorded itself."""
        self.now = time.perf_counter
        self._since = 0.0
        self._timed = False
        """Whether the device tells when it worked."""
        self._last_operations: tuple[Sequence[Operation], str] = (), ""
        """Its operations, and what kind of time they have, as they were when the recording stopped."""
        self._keeping = ExitStack()

    def refuse(self, setting: Setting) -> str:
        """Nothing; what the backend says of itself is what decides about calls."""
        self._asynchronous = setting.info.capabilities.asynchronous
        return ""

    # -- places ------------------------------------------------------------------------------------
    def device(self, device: Device) -> Device:
        """Its copies are calls."""
        if self._calls == "immediate" and (self._asynchronous or OWN_TIME in device.counters.extra):
            self._calls = "none"
        return device if self._calls == "none" else _TimedCopies(device, self)

    def bind(self, binding: Binding, launch: Launch) -> Launch:
        """A launch is a call."""
        if self._calls == "none":
            return launch
        name, stage = binding.contract, binding.stage

        def call(stream: Stream, n: int) -> None:
            if not self._calling:
                launch(stream, n)
                return
            self._calling = False
            start = self.now()
            try:
                launch(stream, n)
            finally:
                self.file("call", name, start, stage=stage, rows=n)
                self._calling = True

        return call

    def start(self) -> None:
        """Begin anew: what was recorded before is forgotten."""
        device = bare(self.engine.device)
        if self._calls == "all":
            self._keeping.enter_context(keeping(device))
        self.now, self._timed = clock_of(device), keeps_timeline(device)
        self._ended.clear()
        self._widths.clear()
        self._since = self.now()
        super().start()

    def stop(self) -> None:
        """Record no more; what was recorded stays."""
        try:
            if self.is_on:
                self._last_operations = self._operations()
        finally:
            self._keeping.close()
            super().stop()

    def closing(self) -> None:
        """Stop, while the device can still say what it did; a device that is lost says nothing."""
        with suppress(DeviceError):
            self.stop()

    # -- recording ---------------------------------------------------------------------------------
    def begin(self, stage: Stage, subject: Any) -> None:
        """Look at the clock."""
        del subject
        if stage == "step":
            self._calling = self._calls != "none"
        elif stage == "replay":
            self._calling = False  # launches between its graphs are part of it
        self._begun.append(self.now())

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        """File what has ended."""
        start = self._begun.pop()
        if stage == "plan" and result is not None:
            self._step = result.step_id
        elif stage == "launch":
            self._widths[subject.step_id] = subject.width
        if stage == "step":
            self._calling = False
            self.file("step", "step", start)
        elif stage == "replay" and self._calls != "none":
            self.file("call", f"graph {subject.piece}", start, stage=subject.piece, rows=subject.bucket)
            self._calling = True
        elif stage in RECORDED_STAGES:
            self.file("stage", stage, start, step=_step_of(subject))

    def file(self, kind: str, name: str, start_s: float, *, step: int | None = None, stage: str = "", rows: int = 0) -> None:
        """End a host span now."""
        self._ended.append((kind, name, start_s, self.now(), self._step if step is None else step, stage, rows))

    @property
    def calling(self) -> bool:
        """Whether calls are recorded now."""
        return self._calling

    # -- the recording -----------------------------------------------------------------------------
    def drain(self) -> list[Span]:
        """Host spans that have ended since the last time, in order of their end; they are forgotten here."""
        ended, self._ended = self._ended, []
        self._widths.clear()
        return [Span(HOST, "host", *values) for values in ended]

    def finish(self) -> Recording:
        """What was recorded so far, with the device's side of it. Steps in flight are not waited for."""
        host = sorted((Span(HOST, "host", *values) for values in self._ended), key=order)
        if self._timed:
            operations, said = self._operations() if self.is_on else self._last_operations
            spans = placed(host, within_steps(host, operations))
        elif self.engine.info.capabilities.asynchronous:
            spans, said = in_flight(host, self.engine.resolved.overlap + 1), BOUND
        else:
            spans, said = immediate(host), EXACT
        return Recording(tuple(sorted(spans, key=order)), said, self._about(), dict(self._widths))

    def _operations(self) -> tuple[Sequence[Operation], str]:
        """What the device did for the engine since the beginning, where it tells, and what kind of time that has."""
        if not self._timed:
            return (), ""
        device: Any = bare(self.engine.device)
        timeline: Timeline = device.timeline()
        aside = self.engine.instruments.aside
        return [o for o in timeline.spans if o.issued_s >= self._since and not aside.covers(o.issued_s)], timeline.label

    def _about(self) -> dict[str, Any]:
        engine, r = self.engine, self.engine.resolved
        about = {"backend": r.backend, "device": engine.device.spec, "model": engine.model.name}
        return {**about, "draft_tokens": r.limits.num_drafts, "overlap": r.overlap, "graph": r.graph, "polydraft": __version__}


def within_steps(host: Sequence[Span], operations: Sequence[Operation]) -> list[Operation]:
    """The operations that were issued in a step: what is captured anew or loaded between two of them is no part of any."""
    steps = sorted((span.start_s, span.end_s) for span in host if span.kind == "step")
    place = [bisect.bisect_right(steps, (operation.issued_s + TOLERANCE_S, inf)) - 1 for operation in operations]
    return [o for at, o in zip(place, operations, strict=True) if at >= 0 and o.issued_s <= steps[at][1] + TOLERANCE_S]


def _step_of(subject: Any) -> int | None:
    """The step that a plan or a step in flight is of; None of stages that have no subject."""
    return None if subject is None else getattr(subject, "plan", subject).step_id


class _TimedCopies(WrappedDevice):
    """A device whose two kinds of copies are calls."""

    def __init__(self, inner: Device, trace: Trace) -> None:
        super().__init__(inner)
        self._trace = trace

    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        """Copy down."""
        if not self._trace.calling:
            self.inner.upload(stream, target, source, rows)
            return
        start = self._trace.now()
        self.inner.upload(stream, target, source, rows)
        self._trace.file("call", f"copy {target.name}", start, stage="upload", rows=rows)

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """Copy up."""
        if not self._trace.calling:
            self.inner.download(stream, target, source, rows)
            return
        start = self._trace.now()
        self.inner.download(stream, target, source, rows)
        self._trace.file("call", f"copy {source.name}", start, stage="snapshot", rows=rows)
