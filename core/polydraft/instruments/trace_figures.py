"""The figures of a recording: host time by room and step, device operations by name, and how long the device idled.

`polydraft trace` shows them, `polydraft bench` reports some of them. It never guesses: what a recording does not hold has no
figure.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polydraft.instruments.timeline import DEVICE, EXACT, HOST, INPUTS, ROOMS, Recording, Span

OTHER = "other"
"""What a step takes on the host outside of every room: queues, the totals, the wrappers of the recording."""


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
    """Host seconds by step and room, each room without the rooms inside it; for steps that were launched and applied.

    What a synchronous device computed during a call is no host time; where the device is asynchronous, a call only issues."""
    inside = ("step", "room", "call") if recording.device_times == EXACT else ("step", "room")
    steps: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    open_spans: list[Span] = []
    for span in recording.spans:
        if span.side != HOST or span.kind not in inside:
            continue
        while open_spans and open_spans[-1].end_s <= span.start_s:
            open_spans.pop()
        if open_spans:
            around = open_spans[-1]
            steps[around.step][_room(around)] -= span.seconds
        if span.kind != "call":
            steps[span.step][_room(span)] += span.seconds
            open_spans.append(span)
    order = (*ROOMS, INPUTS, OTHER)
    return {
        step: {room: rooms[room] for room in order if room in rooms}
        for step, rooms in sorted(steps.items())
        if step > 0 and {"launch", "commit"} <= rooms.keys()
    }


def _room(span: Span) -> str:
    return span.name if span.kind == "room" else OTHER


def operations(recording: Recording) -> dict[str, tuple[int, float]]:
    """Device operations by name: how many, and seconds together, longest first."""
    found: dict[str, tuple[int, float]] = {}
    for span in recording.spans:
        if span.side == DEVICE and span.kind != "graph":
            name = "step" if span.kind == "step" else span.name
            count, seconds = found.get(name, (0, 0.0))
            found[name] = (count + 1, seconds + span.seconds)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def by_room(steps: Mapping[int, Mapping[str, float]]) -> dict[str, Quantiles]:
    """Quantiles of each room over the steps that have it, in order of the rooms; seconds."""
    return {
        room: Quantiles.of(values)
        for room in (*ROOMS, INPUTS, OTHER)
        if (values := [rooms[room] for rooms in steps.values() if room in rooms])
    }


def busy_host(rooms: Mapping[str, float]) -> float:
    """Host seconds of one step in which the host did something: all rooms but the wait."""
    return sum(seconds for room, seconds in rooms.items() if room != "wait")


def summary(recording: Recording) -> dict[str, Any]:
    """The figures for people and for `--json`; times in microseconds."""
    steps = host_seconds(recording)
    totals = [busy_host(rooms) for rooms in steps.values()]
    return {
        "about": recording.about,
        "device_times": recording.device_times,
        "steps": len(steps),
        "device_idle_share": idle_share(recording.spans),
        "host_us_per_step": _microseconds(Quantiles.of(totals)) if totals else None,
        "host_us_by_room": {room: _microseconds(values) for room, values in by_room(steps).items()},
        "device_operations": {
            name: {"count": count, "total_us": 1e6 * seconds} for name, (count, seconds) in operations(recording).items()
        },
    }


def _microseconds(values: Quantiles) -> dict[str, float]:
    return {"median": 1e6 * values.median, "p10": 1e6 * values.p10, "p90": 1e6 * values.p90}
