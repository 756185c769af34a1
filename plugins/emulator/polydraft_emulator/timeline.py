"""Modelled time: how long operations take, a clock on which the emulator's own work costs nothing, and the timeline.

The device keeps one when the option `latency` is given, and `device.timeline()` returns it. No accelerator is measured: durations
are given, host time is measured as processor time of the thread, so that other processes of the machine do not count, and every
result is labelled as modelled.

`latency=<what>:<microseconds>[+<microseconds a row>]`, several joined by commas. `what` is a contract by name, a kind of
operation (`kernel`, `upload`, `download`, `replay`: the cost of starting a graph), `op` for what nothing else names, or
`issue`: host time that one call to the device takes.

An operation starts when it has been issued, the operation before it on its stream has ended, the events it waits for have
been reached, and its engine is free: there is one engine for kernels, one for uploads, one for downloads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from polydraft.errors import ConfigError
from polydraft.instruments.timeline import Operation

ENGINES = {"kernel": "kernel", "replay": "kernel", "upload": "upload", "download": "download"}
"""Which engine an operation of a kind occupies."""
NAMES = (*ENGINES, "op", "issue")

_COST = re.compile(r"([a-z_+]+):(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Timeline:
    """Operations in issue order, in seconds of modelled time since the device was opened. `label` goes wherever a figure of it is
    shown."""

    spans: tuple[Operation, ...]
    label: str = "modelled"
    blocked_s: float = 0.0
    """Seconds that the host has spent waiting for the device."""

    def idle_share(self, kind: str = "kernel", *, since: float = 0.0) -> float:
        """Share of the time between the first start and the last end in which the engine of `kind` did nothing, over the
        spans issued at or after `since`; 0 without spans."""
        mine = [s for s in self.spans if s.issued_s >= since and ENGINES[s.kind] == ENGINES[kind]]
        if not mine:
            return 0.0
        whole = max(s.end_s for s in mine) - min(s.start_s for s in mine)
        return 1.0 - sum(s.end_s - s.start_s for s in mine) / whole if whole else 0.0


def costs(text: str, names: frozenset[str]) -> dict[str, tuple[float, float]]:
    """Read the option `latency`: seconds and seconds a row by name. Raises `ConfigError`."""
    found: dict[str, tuple[float, float]] = {}
    for part in filter(None, text.split(",")):
        match = _COST.fullmatch(part)
        if match is None or match[1] not in names.union(NAMES):
            known = ", ".join((*NAMES, *sorted(names)))
            raise ConfigError(
                f"emulator option latency has {part!r}, wanted <what>:<microseconds>[+<microseconds a row>] with one of {known}; "
                "correct it"
            )
        found[match[1]] = (1e-6 * float(match[2]), 1e-6 * float(match[3] or 0))
    return found


class Clock:
    """Host time without the emulator's own, and the device time that follows from it. One thread drives the device.

    The device encloses all it does in `with clock`; what passes inside does not count."""

    def __init__(self, text: str, names: frozenset[str]) -> None:
        self._costs: Mapping[str, tuple[float, float]] = costs(text, names)
        self._issue = self._costs.get("issue", (0.0, 0.0))[0]
        self._origin = time.thread_time()
        self._excluded = self._waited = self._blocked = self._entered = 0.0
        self._depth = 0
        self._free = dict.fromkeys(ENGINES.values(), 0.0)
        self._spans: list[Operation] = []

    def __enter__(self) -> None:
        if not self._depth:
            self._entered = time.thread_time()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            self._excluded += time.thread_time() - self._entered

    def now(self) -> float:
        """Seconds of modelled host time."""
        wall = self._entered if self._depth else time.thread_time()
        return wall - self._origin - self._excluded + self._waited

    def wait_until(self, moment: float) -> None:
        """The host blocked: it goes on at `moment`, or at once when that has passed."""
        blocked = max(moment - self.now(), 0.0)
        self._waited += blocked
        self._blocked += blocked

    def issue(self) -> float:
        """The host called the device; returns when the call was over."""
        self._waited += self._issue
        return self.now()

    def occupy(
        self, parts: Sequence[tuple[str, str, int]], *, stream: str, issued: float, earliest: float, extra: float
    ) -> float:
        """Place an operation of (kind, name, rows) parts, which run one after the other; returns when it ends. `earliest` is
        when its stream and its events let it start; `extra` seconds hold the first part back."""
        end = earliest + extra
        for kind, name, rows in parts:
            engine = ENGINES[kind]
            start = max(issued, end, self._free[engine])
            fixed, each = self._costs.get(name) or self._costs.get(kind) or self._costs.get("op") or (0.0, 0.0)
            end = self._free[engine] = start + fixed + each * rows
            self._spans.append(Operation(stream, kind, name, rows, issued, start, end))
        return end

    def timeline(self) -> Timeline:
        """What has been placed so far."""
        return Timeline(tuple(self._spans), blocked_s=self._blocked)
