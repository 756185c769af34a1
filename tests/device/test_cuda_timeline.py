"""The CUDA device's timeline without a device: what is noted, in which order, and on which clock."""

from types import SimpleNamespace
from typing import Any

import pytest

from polydraft_cuda.timeline import CudaTimeline


class Event:
    """Stands for a timed event: knows the millisecond at which the device reached it."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self.ms = -1.0

    def record(self, stream: object) -> None:
        self._clock[0] += 1.5
        self.ms = self._clock[0]

    def synchronize(self) -> None: ...

    def since(self, earlier: "Event") -> float:
        return self.ms - earlier.ms


def test_operations_lie_between_their_events_on_the_clock_of_the_host(monkeypatch: pytest.MonkeyPatch):
    now, waited, made, stream = (
        iter((100.0, 100.2, 100.3, 200.0, 200.1)),
        list[str](),
        list[Event](),
        SimpleNamespace(name="compute"),
    )
    clock = [0.0]
    monkeypatch.setattr("polydraft_cuda.timeline.time.perf_counter", lambda: next(now))

    def timer() -> Event:
        made.append(Event(clock))
        return made[-1]

    device: Any = SimpleNamespace(timer=timer, stream=stream, call=lambda name, doing="": waited.append(name))
    timeline = CudaTimeline(device)
    timeline.restart()
    for kind in ("replay", "download"):
        timeline.begin(kind, stream).record(stream)  # type: ignore[arg-type]
    spans = timeline.spans
    assert waited == ["cuCtxSynchronize"]
    assert [(s.kind, s.stream, s.issued_s) for s in spans] == [("replay", "compute", 100.2), ("download", "compute", 100.3)]
    assert [(round(s.start_s, 6), round(s.end_s, 6)) for s in spans] == [(100.0015, 100.003), (100.0045, 100.006)]
    timeline.restart()
    timeline.begin("upload", stream).record(stream)  # type: ignore[arg-type]
    (span,) = timeline.spans
    assert (span.kind, span.issued_s, round(span.start_s, 6), round(span.end_s, 6)) == ("upload", 200.1, 200.0015, 200.003)
    assert len(made) == 5, "events are recorded again, not made again"
