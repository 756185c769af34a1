"""The optional protocol by which a device tells what its operations really touched, and the comparison with declarations.

Emulators implement it; on other devices the checker believes the contracts. It never orders anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from polydraft.instruments.sanitize.accesses import Touch
from polydraft.instruments.sanitize.memory import Memories
from polydraft.instruments.sanitize.site import Trace

MOST_OPEN = 20_000
"""Operations outside of graphs that are remembered; far more than can be in flight."""
MOST_STEPS = 16
"""Steps whose blocks are remembered; more than can be in flight."""


class Observed(NamedTuple):
    """One access that a device has seen. `memory` is what core holds: a buffer, weight or cache."""

    operation: int
    memory: Any
    access: Literal["read", "write"]
    rows: tuple[int, int] | None = None
    """[low, high), or None where the device cannot tell; of a cache these are blocks, one at a time."""


class ObservesAccesses(Protocol):
    """What a device adds to `Device` to have its kernels held against their contracts."""

    operation: int
    """Set by the checker before each launch, copy and metadata fill. All work issued from then on, and every run of it (replays
    of a graph included), is that operation's."""

    def observed_accesses(self) -> Sequence[Observed]:
        """What work that has run since the last call has touched. Called behind waits; never blocks."""


def observer(device: Any) -> ObservesAccesses | None:
    """The device as an observer, if it is one."""
    found: ObservesAccesses | None = device if hasattr(device, "observed_accesses") else None
    return found


class Observations:
    """Operations that have been issued and what they declared, by number."""

    def __init__(self, device: ObservesAccesses) -> None:
        self._device = device
        self._number = 0
        self._open: dict[int, tuple[Trace, list[Touch]]] = {}
        self._captured: dict[int, tuple[Trace, list[Touch]]] = {}
        self._held: dict[int, frozenset[int]] = {}

    def step_holds(self, step: int, blocks: Iterable[int]) -> None:
        """A step is launched, whose slots hold these KV blocks."""
        self._held[step] = frozenset(blocks)
        if len(self._held) > MOST_STEPS:
            del self._held[next(iter(self._held))]

    def begin(self, trace: Trace, touches: list[Touch], *, captured: bool) -> None:
        """Number the next operation."""
        self._number += 1
        self._device.operation = self._number
        (self._captured if captured else self._open)[self._number] = trace, touches
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]

    def undeclared(self, memories: Memories) -> Iterator[tuple[str, str, Trace, str]]:
        """(hazard, memory, operation, what is missing) of each access seen since the last call that nobody declared,
        and of each write into a KV block that no slot of the step holds."""
        for operation, thing, access, rows in self._device.observed_accesses():
            known = self._open.get(operation) or self._captured.get(operation)
            if known is None:
                continue
            trace, touches = known
            memory = memories[thing]
            low, high = rows or (0, 0)
            if memory.paged and access == "write" and rows and not self._may_write(operation, trace.step, low):
                yield "foreign-block", memory.named(low, high), trace, "a grant of that block to a slot of the step"
            mine = [t for t in touches if t.memory is memory and (t.reads if access == "read" else t.writes)]
            if any(rows is None or (t.low <= low and high <= t.high) for t in mine):
                continue
            about = memory.named(low, high) if rows else memory.name
            declared = f"it declares rows {mine[0].low} to {mine[0].high}" if mine else f"it declares no {access} of it"
            yield f"undeclared-{access}", about, trace, f"an argument with that access in the contract's record; {declared}"

    def _may_write(self, operation: int, step: int | None, block: int) -> bool:
        """Whether some slot of the operation's step holds a block; of what a graph does, some slot of a step in flight."""
        known = step is not None and operation not in self._captured
        return any(block in held for number, held in self._held.items() if not known or number == step)
