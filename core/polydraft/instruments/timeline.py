"""The record of a step timeline: spans of host and device, and how the device's side of a recording is found.

`trace` fills it; files, figures and pictures read it. It never wraps anything and never looks at a clock.

Where the device's times come from is said wherever they are shown (`Recording.device_times`):

* a device with a timeline of its own (`TimedDevice`) tells when each operation ran, on its own clock, always or while it is
  asked to (`keeping`);
* a synchronous device runs what it is given before the call returns, so the call is the execution;
* of any other device the host only knows that a step is over when the wait for its snapshot returns: its lanes show each
  step from its launch to that moment, which is an upper bound of what it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from polydraft.errors import DeviceError
from polydraft.program.plan import StepWidth

HOST, DEVICE = 1, 2
"""The two sides of a timeline; process ids in a file."""
HOST_STAGES = ("plan", "upload", "launch", "wait", "collect", "commit", "output")
"""Host stages of a step. `launch` encloses `upload`, `collect` (decoding the snapshot) the `wait` for it."""
INPUTS = "inputs"
"""The stage of steps that meet host inputs in their middle: the step before collected, the arrays filled, the second half
launched."""
EXACT, BOUND = "exact: a synchronous device", "from launch to snapshot: an upper bound"
"""What is said of device times that are no device's own."""
OWN_TIME = "kernel_ns"
"""Extra counter of a device that measures what its kernels take inside the calls of the host."""
TOLERANCE_S = 1e-9
"""Two readings of one clock that are nearer than this count as equal."""


@dataclass(frozen=True)
class Operation:
    """One operation of a device's own timeline, in seconds of its clock. `kind` is kernel, upload, download or replay: the
    cost of starting a graph, whose kernels follow with the same `issued_s`. `rows`: launch length, or rows copied."""

    stream: str
    kind: str
    name: str
    rows: int
    issued_s: float
    start_s: float
    end_s: float


class Timeline(Protocol):
    """Operations in issue order. `label` says what kind of time it is, for example "modelled"."""

    @property
    def spans(self) -> Sequence[Operation]: ...
    @property
    def label(self) -> str: ...


class TimedDevice(Protocol):
    """What a device has beyond its protocol where it keeps a timeline; both raise `DeviceError` where it keeps none."""

    def now_s(self) -> float:
        """The clock of the timeline, also for host time."""

    def timeline(self) -> Timeline:
        """What was issued so far and has a place on the clock."""


@dataclass(frozen=True)
class Span:
    """One stretch of time on a lane of one side; seconds on the recording's clock.

    `kind`: "step", "stage" and "call" (a launch, a copy, a graph replay) on the host; "work", "graph" (which encloses its
    works) and "step" on the device. `stage` is where in the step a call or work belongs. `flows`: numbers that a call shares
    with the device spans it brought about, each with one.
    """

    side: int
    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    step: int
    stage: str = ""
    rows: int = 0
    flows: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Recording:
    """Spans in order of start, enclosing ones first; `about` says of which engine, `widths` of each launched step how much it
    verified and drafted, by its number."""

    spans: tuple[Span, ...]
    device_times: str
    about: dict[str, Any]
    widths: Mapping[int, StepWidth] = field(default_factory=dict)


def keeps_timeline(device: object) -> bool:
    """Whether a device tells when its operations ran."""
    return clock_of(device) is not time.perf_counter


def clock_of(device: object) -> Callable[[], float]:
    """The device's own clock where it keeps a timeline, the host's elsewhere; seconds."""
    now: Callable[[], float] = getattr(device, "now_s", time.perf_counter)
    try:
        now()
    except DeviceError:
        return time.perf_counter
    return now


def order(span: Span) -> tuple[float, float]:
    """Sorts spans by their start, enclosing ones first."""
    return span.start_s, -span.end_s


@contextmanager
def keeping(device: object) -> Iterator[None]:
    """Have a device that keeps a timeline when it is asked to (`keep_timeline`) do so meanwhile."""
    keep: Callable[[], AbstractContextManager[None]] = getattr(device, "keep_timeline", nullcontext)
    with keep():
        yield


# -- the device's side -----------------------------------------------------------------------------
def immediate(host: list[Span]) -> list[Span]:
    """Every call once more, as the work that it was."""
    spans, flow = [], 0
    for span in host:
        if span.kind == "call":
            flow += 1
            span = replace(span, flows=(flow,))  # noqa: PLW2901  the same span, with its number
            spans.append(replace(span, side=DEVICE, lane="compute", kind="work"))
        spans.append(span)
    return spans


def in_flight(host: list[Span], lanes: int) -> list[Span]:
    """Each step from its launch to the end of the wait for it, on as many lanes as steps can be in flight."""
    ends = {span.step: span.end_s for span in host if span.name == "wait"}
    spans = []
    for span in host:
        if span.kind == "stage" and span.name == "launch" and span.step in ends:
            span = replace(span, flows=(span.step,))  # noqa: PLW2901  likewise
            lane = f"in flight {span.step % lanes + 1}"
            spans.append(replace(span, side=DEVICE, lane=lane, kind="step", name=f"step {span.step}", end_s=ends[span.step]))
        spans.append(span)
    return spans


def placed(host: list[Span], operations: Sequence[Operation]) -> list[Span]:
    """The device's own operations, each group of one issue tied to the call during which it was issued."""
    calls = [(place, span) for place, span in enumerate(host) if span.kind == "call"]
    device: list[Span] = []
    flows: dict[int, list[int]] = {}
    number = at = 0
    for group in _groups(operations):
        while at < len(calls) and calls[at][1].end_s < group[0].issued_s - TOLERANCE_S:
            at += 1
        inside = at < len(calls) and calls[at][1].start_s <= group[0].issued_s + TOLERANCE_S
        place, call = calls[at] if inside else (-1, None)
        number += inside
        if inside:
            flows.setdefault(place, []).append(number)
        device += _work(group, call, (number,) if inside else ())
    tied = [replace(span, flows=tuple(flows.get(place, ()))) for place, span in enumerate(host)]
    return tied + device


def _groups(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Operations by issue: a graph with all its kernels is one group, everything else alone."""
    groups: list[list[Operation]] = []
    for operation in operations:
        graph = groups[-1] if groups and groups[-1][0].kind == "replay" else []
        if graph and operation.kind != "replay" and operation.issued_s == graph[0].issued_s:
            graph.append(operation)
        else:
            groups.append([operation])
    return groups


def _work(group: list[Operation], call: Span | None, flows: tuple[int, ...]) -> list[Span]:
    first, step, stage = group[0], call.step if call else 0, call.stage if call else ""

    def span(operation: Operation, kind: str, name: str, end_s: float, own: tuple[int, ...]) -> Span:
        return Span(DEVICE, operation.stream, kind, name, operation.start_s, end_s, step, stage, operation.rows, own)

    if first.kind != "replay":
        return [span(first, "work", first.name, first.end_s, flows)]
    whole = span(first, "graph", call.name if call else "graph", max(operation.end_s for operation in group), flows)
    return [whole, *(span(o, "work", o.name if o is not first else "start of the graph", o.end_s, ()) for o in group)]
