"""What the hazard checker says: the list of hazard names, the record of one finding, and the report that collects them.

The checker files findings, tests and the command line read them. It never decides that something is a hazard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from polydraft.errors import HazardError

HAZARDS: Mapping[str, str] = MappingProxyType(
    {
        "unordered-access": "two operations touch the same memory, one of them writes, and nothing orders the two",
        "early-host-read": "the host read staging while a download into it was not known to be done",
        "staging-rewritten": "the host wrote staging while a copy out of it or into it was not known to be done",
        "snapshot-overwritten": "a download landed on staging whose last download the host had never read",
        "stale-upload": "an upload sent staging rows that nobody had written for it",
        "stale-padding": "a launch read rows of a buffer behind those that its last upload wrote",
        "stale-host-read": "the host read staging rows behind those that the last download wrote",
        "unrecorded-event": "somebody waited for an event that was never recorded, which orders nothing",
        "event-rerecorded": "an event was recorded again while nobody had waited for its last point",
        "freed-memory": "an operation used memory that had been given back, or memory was given back under an operation",
        "rebound-buffer": "a launch used memory that lies at another address than when the launch was bound",
        "captured-buffer-rebound": "memory that a graph has captured moved, or was allocated anew under its name",
        "unbound-buffer": "a copy of the launch path used a buffer that no launch is bound to",
        "sync-in-launch": "the host waited for the device in the launch path of a step",
        "allocation-in-launch": "memory was allocated in the launch path of a step",
        "sync-in-capture": "the host waited for the device, or asked it, while a graph was captured",
        "allocation-in-capture": "memory was allocated while a graph was captured",
        "host-access-in-capture": "the host touched staging while a graph was captured; a replay will not do so again",
        "above-capacity": "a launch or copy counted more rows than a buffer has",
        "negative-length": "a launch or copy counted a negative number of rows",
        "undeclared-read": "an operation read memory, or rows, that its contract does not say it reads",
        "undeclared-write": "an operation wrote memory, or rows, that its contract does not say it writes",
        "foreign-block": "an operation wrote a KV block that no slot of its step holds",
        "slot-released-in-flight": "a slot and its blocks were released while a step that holds the slot was in flight",
    }
)
"""Every hazard by name, with its meaning; names never change theirs."""

MOST_HAZARDS = 100
"""Different hazards that a report keeps; later ones are only counted."""


@dataclass(frozen=True)
class Operation:
    """One thing that the host did or asked a stream to do."""

    what: str
    """E.g. `launch rms_norm (greedy.target: target)`, `download step.record -> snapshot0`, `host read of snapshot0`."""
    where: str
    """`host`, or the name of a stream."""
    site: str
    """`file:line` of the call, outside the checker and the loops that walk a step program."""
    step: int | None
    """Number of the step that was being launched or collected; None outside of steps."""

    def __str__(self) -> str:
        place = "" if self.where == "host" else f" on stream {self.where}"
        return f"{self.what}{place} ({'outside a step' if self.step is None else f'step {self.step}'}, {self.site})"


@dataclass(frozen=True)
class Hazard:
    """One finding: `second` is what was done when it showed, `first` the operation it collides with (None where a rule needs no
    second party), `missing` the edge or the rule that was broken. `str` gives all of it as one sentence."""

    name: str
    memory: str
    """Buffer, staging, cache, weight, metadata, event or slot; with the rows in question where they are known."""
    second: Operation
    first: Operation | None
    missing: str
    count: int = 1
    """How often the same two operations did this."""

    @property
    def key(self) -> tuple[object, ...]:
        """Findings with equal keys are one: the same operations from the same places, in whatever step."""
        first = self.first
        return self.name, self.memory, self.second.what, self.second.site, first and first.what, first and first.site

    def __str__(self) -> str:
        against = f" against {self.first}" if self.first else ""
        again = f" [{self.count} times]" if self.count > 1 else ""
        return f"{self.name} of {self.memory}: {self.second}{against}; missing: {self.missing}{again}"


class Report:
    """The findings of one engine, in the order they first showed. `strict` raises `HazardError` at once."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._found: dict[tuple[object, ...], Hazard] = {}
        self.num_more = 0
        """Findings that did not fit any more."""

    @property
    def hazards(self) -> tuple[Hazard, ...]:
        """What was found, each once."""
        return tuple(self._found.values())

    @property
    def names(self) -> frozenset[str]:
        """Names of what was found."""
        return frozenset(hazard.name for hazard in self._found.values())

    def add(self, hazard: Hazard) -> None:
        """File a finding. Raises `HazardError` when the report is strict."""
        assert hazard.name in HAZARDS, "a hazard has a name of the list"
        known = self._found.get(hazard.key)
        if known is not None:
            self._found[hazard.key] = replace(known, count=known.count + 1)
        elif len(self._found) < MOST_HAZARDS:
            self._found[hazard.key] = hazard
        else:
            self.num_more += 1
        if self.strict:
            raise HazardError(str(hazard), (hazard,))

    def check(self) -> None:
        """Raise `HazardError` with every finding, one a line; return where there is none."""
        if not self._found:
            return
        more = f"\n  and {self.num_more} more that were not kept" if self.num_more else ""
        count = len(self._found) + self.num_more
        lines = "".join(f"\n  {hazard}" for hazard in self._found.values())
        raise HazardError(f"the hazard checker found {count} hazard{'s' * (count > 1)}:{lines}{more}", self.hazards)
