"""Owns the recording of a step timeline: the wrappers around an engine's rooms, launches and copies.

`generate --trace FILE` and `polydraft bench` instrument an engine with it; without one nothing is wrapped and nothing is paid.
It never changes what runs or when: it only looks at the clock before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from polydraft._version import __version__
from polydraft.device import Buffer, Device, Event, Staging, Stream
from polydraft.timeline import (
    BOUND,
    EXACT,
    HOST,
    INPUTS,
    Recording,
    Span,
    Timeline,
    clock_of,
    immediate,
    in_flight,
    keeps_timeline,
    order,
    placed,
)

if TYPE_CHECKING:
    from polydraft.engine import Engine
    from polydraft.runtime.program import Bound, Program


def put_in_place(owner: object, name: str, value: object) -> Callable[[], None]:
    """Set an attribute of one object; what is returned puts back what was there."""
    own = vars(owner)
    undo = partial(setattr, owner, name, own[name]) if name in own else partial(delattr, owner, name)
    setattr(owner, name, value)
    return undo


class Recorder:
    """Wraps the rooms of an engine, from outside, until `remove`. With `calls`, every launch and copy is recorded as well."""

    def __init__(self, engine: Engine, *, calls: bool = True) -> None:
        self._engine, self._calls = engine, calls
        self._timed = keeps_timeline(engine.device)
        self.now = clock_of(engine.device)
        self._ended: list[tuple[str, str, float, float, int, str, int]] = []
        self._step, self._since = 0, self.now()
        self._undo: list[Callable[[], None]] = []
        self._wrap_rooms()
        if calls:
            self._wrap_calls()

    def remove(self) -> None:
        """Take every wrapper away again; what was recorded stays."""
        while self._undo:
            self._undo.pop()()

    # -- wrapping ----------------------------------------------------------------------------------
    def _wrap_rooms(self) -> None:
        engine, runner = self._engine, self._engine.runner
        self._wrap(engine, "step", self._timed_call("step", "step"))
        self._wrap(engine.scheduler, "plan", self._planned)
        self._wrap(runner, "launch", self._timed_call("room", "launch"))
        self._wrap(runner.stage, "upload", self._timed_call("room", "upload"))
        if runner.inputs.splits:
            self._wrap(engine, "supply", self._timed_call("room", INPUTS, lambda ticket: ticket.plan.step_id))
        self._wrap(runner, "collect", self._timed_call("room", "collect", lambda ticket: ticket.plan.step_id))
        self._replace(runner, "_outputs", [(staging, _TimedEvent(event, self)) for staging, event in runner._outputs])
        self._wrap(engine, "apply", self._timed_call("room", "commit", lambda plan, outcome: plan.step_id))
        self._wrap(engine, "poll", self._timed_call("room", "output"))

    def _wrap_calls(self) -> None:
        runner = self._engine.runner
        copies = _TimedCopies(runner.device, self)
        self._replace(runner, "device", copies)
        self._replace(runner.stage, "_device", copies)
        self._replace(runner.inputs, "_device", copies)
        self._wrap(runner, "rebind", self._rebound)
        self._trace_programs()
        self._undo.append(lambda: setattr(runner, "programs", self._bare))

    def _trace_programs(self) -> None:
        """Put traced programs in place of those that the runner has now, which come back when the recorder goes."""
        runner = self._engine.runner
        self._bare = runner.programs
        runner.programs = {
            kind: {part: self._traced(program) for part, program in programs.items()} for kind, programs in self._bare.items()
        }
        if runner.graphs is not None:
            self._wrap(runner.graphs, "replay", self._replayed)

    def _wrap(self, owner: object, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._replace(owner, name, wrap(getattr(owner, name)))

    def _replace(self, owner: object, name: str, value: object) -> None:
        self._undo.append(put_in_place(owner, name, value))

    def _rebound(self, rebind: Callable[[], None]) -> Callable[[], None]:
        """New programs, and new graphs of them, are as bare as the first ones were."""

        def call() -> None:
            rebind()
            self._trace_programs()

        return call

    # -- recording ---------------------------------------------------------------------------------
    def file(self, kind: str, name: str, start_s: float, *, step: int | None = None, room: str = "", rows: int = 0) -> None:
        """End a host span now."""
        self._ended.append((kind, name, start_s, self.now(), self._step if step is None else step, room, rows))

    def _timed_call(self, kind: str, name: str, step_of: Callable[..., int] | None = None) -> Callable[..., Callable[..., Any]]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                start = self.now()
                try:
                    return function(*args, **kwargs)
                finally:
                    self.file(kind, name, start, step=step_of(*args, **kwargs) if step_of else None)

            return call

        return wrap

    def _planned(self, plan: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            start = self.now()
            made = plan()
            if made is not None:
                self._step = made.step_id
            self.file("room", "plan", start)
            return made

        return call

    def _replayed(self, replay: Callable[..., None]) -> Callable[..., None]:
        def call(kind: str, piece: str, bucket: int) -> None:
            start = self.now()
            replay(kind, piece, bucket)
            self.file("call", f"graph {piece}", start, room=piece, rows=bucket)

        return call

    def _traced(self, program: Program) -> Program:
        calls = tuple((self._traced_launch(entry), entry.unit) for entry in program.entries)
        return replace(program, calls=calls)

    def _traced_launch(self, bound: Bound) -> Callable[[Stream, int], None]:
        launch, name, room = bound.launch, bound.contract, bound.room

        def call(stream: Stream, n: int) -> None:
            start = self.now()
            launch(stream, n)
            self.file("call", name, start, room=room, rows=n)

        return call

    # -- the recording -----------------------------------------------------------------------------
    def drain(self) -> list[Span]:
        """Host spans that have ended since the last time, in order of their end; they are forgotten here."""
        ended, self._ended = self._ended, []
        return [Span(HOST, "host", *values) for values in ended]

    def finish(self) -> Recording:
        """What was recorded so far, with the device's side of it. Steps in flight are not waited for."""
        host = sorted((Span(HOST, "host", *values) for values in self._ended), key=order)
        if self._timed:
            timeline: Timeline = self._engine.device.timeline()  # type: ignore[attr-defined]
            spans, said = placed(host, [o for o in timeline.spans if o.issued_s >= self._since]), timeline.label
        elif self._engine.info.capabilities.asynchronous:
            spans, said = in_flight(host, self._engine.resolved.overlap + 1), BOUND
        else:
            spans, said = immediate(host), EXACT
        return Recording(tuple(sorted(spans, key=order)), said, self._about())

    def _about(self) -> dict[str, Any]:
        r = self._engine.resolved
        about = {"backend": r.backend, "device": self._engine.device.spec, "model": self._engine.model.name}
        return {**about, "draft_tokens": r.limits.num_drafts, "overlap": r.overlap, "graph": r.graph, "polydraft": __version__}


class _TimedCopies:
    """The device of a runner, with its two kinds of copies recorded."""

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self._device, self._recorder = device, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        start = self._recorder.now()
        self._device.upload(stream, target, source, rows)
        self._recorder.file("call", f"copy {target.name}", start, room="upload", rows=rows)

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        start = self._recorder.now()
        self._device.download(stream, target, source, rows)
        self._recorder.file("call", f"copy {source.name}", start, room="snapshot", rows=rows)


class _TimedEvent:
    """The event behind a snapshot, with the wait for it recorded."""

    def __init__(self, event: Event, recorder: Recorder) -> None:
        self._event, self._recorder = event, recorder
        self._step = 0

    def record(self, stream: Stream) -> None:
        self._step = self._recorder._step
        self._event.record(stream)

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        start = self._recorder.now()
        self._event.synchronize()
        self._recorder.file("room", "wait", start, step=self._step)
