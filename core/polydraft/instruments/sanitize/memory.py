"""What the checker knows of each memory: buffers, staging, weights, caches and metadata, by identity.

The checker looks memory up here and reads and writes these records. They never touch the memory itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polydraft.instruments.sanitize.order import History
from polydraft.instruments.sanitize.site import Trace


class Rows:
    """A set of rows, as disjoint ascending ranges."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, low: int, high: int) -> None:
        """Add rows [low, high)."""
        apart = [r for r in self._ranges if r[1] < low or high < r[0]]
        touching = [r for r in self._ranges if r[0] <= high and low <= r[1]]
        merged = (min([low, *(r[0] for r in touching)]), max([high, *(r[1] for r in touching)]))
        self._ranges = sorted([*apart, merged])

    def holds(self, low: int, high: int) -> bool:
        """Whether all rows of [low, high) are in the set."""
        return low >= high or any(r[0] <= low and high <= r[1] for r in self._ranges)

    def clear(self) -> None:
        """Empty the set."""
        self._ranges.clear()


class Copied(NamedTuple):
    """The last copy into a memory: how many rows it wrote, and who asked for it."""

    rows: int
    trace: Trace
    values: Any = None
    """What was copied, of a memory that says how far others are read."""


@dataclass(eq=False)
class Memory:
    """One memory. `rows` is its leading dimension, 1 where the checker does not look inside (weights, caches, metadata)."""

    thing: Any
    """What core holds; kept, so that no other object takes over its identity."""
    name: str
    rows: int
    history: History = field(default_factory=History)
    made: Trace | None = None
    """Its allocation."""
    freed: Trace | None = None
    """By whom it was given back."""
    moved_to: int | None = None
    """The address at which it was found last when that was none that a launch is bound to."""
    bound: bool = False
    """Whether a launch is bound to it."""
    tells_reach: bool = False
    """It holds runs, which say how far a launch reads their payload."""
    paged: bool = False
    """Its rows are KV blocks: devices that see what is written say which, contracts declare all of them."""
    uploaded: Copied | None = None
    """The last upload, as long as nothing else has written since."""

    @property
    def address(self) -> int | None:
        """Where it lies, on backends that tell (`address` of a buffer, weight or cache)."""
        address: int | None = getattr(self.thing, "address", None)
        return address

    def named(self, low: int, high: int) -> str:
        """The memory with rows [low, high), for people."""
        return self.name if (low, high) == (0, self.rows) else f"{self.name}[{low}:{high}]"


@dataclass(eq=False)
class StagingMemory(Memory):
    """Pinned host memory, and how far the protocol of `Device.upload` and `Device.download` has got with it."""

    written: Rows = field(default_factory=Rows)
    """Rows that the host has written for the next upload."""
    sent: Trace | None = None
    """The upload of `written`, if there was one: the next write of the host begins a new set."""
    written_step: int | None = None
    """The step in which the host last wrote."""
    landed: Copied | None = None
    """The last download."""
    unread: Trace | None = None
    """The last download, until the host reads it."""


class Memories:
    """Every memory that was ever seen, by identity."""

    def __init__(self) -> None:
        self._known: dict[int, Memory] = {}

    def add(self, memory: Memory) -> Memory:
        """Take a memory in."""
        self._known[id(memory.thing)] = memory
        return memory

    def __getitem__(self, thing: Any) -> Memory:
        """The record of `thing`, made now for memory that did not come through the checker."""
        known = self._known.get(id(thing))
        return known if known is not None else self.add(Memory(thing, _name(thing), _rows(thing)))

    def __iter__(self) -> Any:
        return iter(list(self._known.values()))


def _name(thing: Any) -> str:
    return str(getattr(thing, "name", "") or type(thing).__name__)


def _rows(thing: Any) -> int:
    shape = getattr(thing, "shape", None)
    return int(shape[0]) if isinstance(shape, tuple) and shape else 1
