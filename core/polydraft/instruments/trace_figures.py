"""The figures of a recording: host time by stage and step, device operations by name, and how long the device idled.

`polydraft trace` shows them, `polydraft bench` reports some of them. It never guesses: what a recording does not hold has no
figure.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polydraft.instruments.timeline import DEVICE, EXACT, HOST, HOST_STAGES, INPUTS, Recording, Span

OTHER = "other"
"""What a step takes on the host outside of every stage: queues, the totals, the wrappers of the recording."""


@dataclass(frozen=True)
class Quantiles:
    """Median, tenth and ninetieth percentile of some values."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """Of at least one value."""
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


class Stretch(Protocol):
    """Whatever has a beginning and an end in seconds: a span, an operation of a device."""

    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


def busy_seconds(stretches: Iterable[Stretch]) -> float:
    """Length of the union of some stretches of time."""
    total, end = 0.0, float("-inf")
    for one in sorted(stretches, key=lambda s: s.start_s):
        total += max(one.end_s - max(one.start_s, end), 0.0)
        end = max(end, one.end_s)
    return total


def idle_among(stretches: Sequence[Stretch]) -> float | None:
    """Share of the time between the first and the last of them that none covers; None without any."""
    if not stretches:
        return None
    whole = max(s.end_s for s in stretches) - min(s.start_s for s in stretches)
    return max(1.0 - busy_seconds(stretches) / whole, 0.0) if whole else 0.0


def idle_share(spans: Iterable[Span]) -> float | None:
    """Share of the time between the first and the last device span among `spans` in which the device did nothing; None
    without any."""
    return idle_among([s for s in spans if s.side == DEVICE])


def host_seconds(recording: Recording) -> dict[int, dict[str, float]]:
    """Host seconds by step and stage, each stage without the stages inside it; for steps that were launched and applied.

    What a synchronous device computed during a call is no host time; where the device is asynchronous, a call only issues."""
    inside = ("step", "stage", "call") if recording.device_times == EXACT else ("step", "stage")
    steps: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    open_spans: list[Span] = []
    for span in recording.spans:
        if span.side != HOST or span.kind not in inside:
            continue
        while open_spans and open_spans[-1].end_s <= span.start_s:
            open_spans.pop()
        if open_spans:
            around = open_spans[-1]
            steps[around.step][_stage(around)] -= span.seconds
        if span.kind != "call":
            steps[span.step][_stage(span)] += span.seconds
            open_spans.append(span)
    order = (*HOST_STAGES, INPUTS, OTHER)
    return {
        step: {stage: stages[stage] for stage in order if stage in stages}
        for step, stages in sorted(steps.items())
        if step > 0 and {"launch", "commit"} <= stages.keys()
    }


def _stage(span: Span) -> str:
    return span.name if span.kind == "stage" else OTHER


def operations(recording: Recording) -> dict[str, tuple[int, float]]:
    """Device operations by name: how many, and seconds together, longest first."""
    found: dict[str, tuple[int, float]] = {}
    for span in recording.spans:
        if span.side == DEVICE and span.kind != "graph":
            name = "step" if span.kind == "step" else span.name
            count, seconds = found.get(name, (0, 0.0))
            found[name] = (count + 1, seconds + span.seconds)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def by_stage(steps: Mapping[int, Mapping[str, float]]) -> dict[str, Quantiles]:
    """Quantiles of each stage over the steps that have it, in order of the stages; seconds."""
    return {
        stage: Quantiles.of(values)
        for stage in (*HOST_STAGES, INPUTS, OTHER)
        if (values := [stages[stage] for stages in steps.values() if stage in stages])
    }


def busy_host(stages: Mapping[str, float]) -> float:
    """Host seconds of one step in which the host did something: all stages but the wait."""
    return sum(seconds for stage, seconds in stages.items() if stage != "wait")


def drafts_per_step(recording: Recording, steps: Iterable[int]) -> list[int]:
    """How many of these steps made no draft for a slot, how many one at most, and so on; nothing where the recording does not
    say."""
    made = [recording.widths[step].num_drafts for step in steps if step in recording.widths]
    return [made.count(number) for number in range(max(made, default=-1) + 1)]


def summary(recording: Recording) -> dict[str, Any]:
    """The figures for people and for `--json`; times in microseconds."""
    steps = host_seconds(recording)
    totals = [busy_host(stages) for stages in steps.values()]
    return {
        "about": recording.about,
        "device_times": recording.device_times,
        "steps": len(steps),
        "drafts_per_step": drafts_per_step(recording, steps),
        "device_idle_share": idle_share(recording.spans),
        "host_us_per_step": _microseconds(Quantiles.of(totals)) if totals else None,
        "host_us_by_stage": {stage: _microseconds(values) for stage, values in by_stage(steps).items()},
        "device_operations": {
            name: {"count": count, "total_us": 1e6 * seconds} for name, (count, seconds) in operations(recording).items()
        },
    }


def _microseconds(values: Quantiles) -> dict[str, float]:
    return {"median": 1e6 * values.median, "p10": 1e6 * values.p10, "p90": 1e6 * values.p90}
