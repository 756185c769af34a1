"""What a program is made of before it is bound, and the pass with which a backend gives some of it to kernels of its own.

A kernel table may have a `program_pass`: a pure function over the unbound program of a step that returns it with some runs of
launches rewritten. `polydraft.program.fusion` runs it once for each program, checks what came back, and tells what was joined.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from polydraft.backend import ForwardMeta
from polydraft.contracts.base import Args, Limits, OpaqueSpec, Provider, Unit
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import Buffer, Launch


@dataclass(frozen=True)
class Node:
    """One launch before binding: contract, arguments, what its launch length counts, and the stage it belongs to."""

    contract: str
    args: Args | CompositeArgs
    unit: Unit
    stage: str


@dataclass(frozen=True)
class Fill:
    """Metadata of one pass: filled in place before the pass's first attention."""

    meta: ForwardMeta
    pass_index: int
    unit: Unit
    stage: str


@dataclass(frozen=True)
class Call:
    """A launch that is bound already and that no contract describes: a block which computes itself. Nothing is fused over it."""

    name: str
    launch: Launch
    unit: Unit
    stage: str


@dataclass(frozen=True, eq=False)
class Rewritten:
    """One launch that a backend's pass gives to another of its kernels, or several in a row that it gives to one.

    `dead`: buffers that several launches would write and that this kernel does not. `why`: what is gained, and what allows it,
    for people. Several become one only where launches are captured as a graph and, `beside_graphs`, in steps of such an engine
    that no graph fits, which prompts are, unless an instrument wants launches one by one. Otherwise they stay what they were, so
    that whoever looks between launches finds what each contract says."""

    nodes: tuple[Node, ...]
    kernel: str
    why: str
    dead: tuple[Buffer, ...] = ()
    beside_graphs: bool = False

    @property
    def captured(self) -> bool:
        """Whether it holds in captured steps alone."""
        return len(self.nodes) > 1

    @property
    def contract(self) -> str:
        """Names of the contracts that the kernel computes, joined by '+'."""
        return "+".join(node.contract for node in self.nodes)

    @property
    def unit(self) -> Unit:
        """What the launch length counts, for all of them."""
        return self.nodes[0].unit

    @property
    def stage(self) -> str:
        """The stage of the first."""
        return self.nodes[0].stage

    @property
    def records(self) -> tuple[Args, ...]:
        """The argument records of all contracts, in order."""
        return tuple(record for node in self.nodes for record in records_of(node))


Entry = Node | Fill | Call | Rewritten
"""What programs are built from."""


# -- what a backend brings -------------------------------------------------------------------------
@dataclass(frozen=True)
class OwnKernel:
    """A kernel that only the pass of its backend can choose. `parts`: the contracts that it computes, in order; its provider is
    bound to their records as to those of a composite, or to the one record where it is one contract."""

    parts: tuple[str, ...]
    provider: Provider


@dataclass(frozen=True)
class UnboundProgram:
    """What a pass is handed: one program of a step, with composites laid over it, before anything is bound.

    `name` says the kind of step and the part of it; `served`: contracts and composites whose kernels are those of the plugin that
    is asked, which alone it may give to other kernels of its own."""

    name: str
    entries: tuple[Entry, ...]
    served: frozenset[str]
    limits: Limits
    elsewhere: tuple[Sequence[Entry], ...] = field(default=(), repr=False)
    """The other programs of the step."""

    def is_read(self, buffer: Buffer, end: int) -> bool:
        """Whether anybody reads what the entries in front of `end` leave in `buffer`: a later entry, another program of the step,
        or these themselves in the next step."""
        return self._readers.is_read(buffer, end)

    @functools.cached_property
    def _readers(self) -> Readers:
        return Readers(self.entries, self.elsewhere)


class ProgramPass(Protocol):
    """What a kernel table may have as `program_pass`."""

    @property
    def kernels(self) -> Mapping[str, OwnKernel]:
        """Kernels that `rewrite` may name."""

    def rewrite(self, program: UnboundProgram) -> Sequence[Entry]:
        """Return the entries of `program` in their order, runs of them as `Rewritten`. A pure function: what it returns follows
        from the program, and nothing of it is remembered. Core refuses what is not the same program."""


# -- who reads what --------------------------------------------------------------------------------
class Readers:
    """Who reads a buffer before it is written anew, among the entries of a program and those of the other programs of a step.
    Metadata fills count as nobody: they read only what describes rows."""

    def __init__(self, entries: Sequence[Entry], elsewhere: Iterable[Iterable[Entry]]) -> None:
        self._touched: dict[int, list[tuple[int, bool]]] = {}
        for place, entry in enumerate(entries):
            for record in records_of(entry):
                for buffer, reads in record.touches.items():
                    self._touched.setdefault(buffer, []).append((place, reads))
        self._elsewhere = [_first_touches(others) for others in elsewhere]

    def is_read(self, buffer: Buffer, end: int) -> bool:
        """Whether anybody reads what the entries in front of `end` leave in `buffer`: a later entry, another program of the step,
        or these themselves in the next step. Whoever touches it first decides."""
        mine = self._touched.get(id(buffer), ())
        behind = next((reads for place, reads in mine if place >= end), False)
        anew = next((reads for place, reads in mine if place < end), False)
        return behind or anew or any(first.get(id(buffer), False) for first in self._elsewhere)


def _first_touches(entries: Iterable[Entry]) -> dict[int, bool]:
    """Buffers, by identity, to whether the first contract that touches them reads what was there."""
    found: dict[int, bool] = {}
    for record in (record for entry in entries for record in records_of(entry)):
        for buffer, reads in record.touches.items():
            found.setdefault(buffer, reads)
    return found


def records_of(entry: Entry) -> tuple[Args, ...]:
    """The argument records of an entry's contracts, in the order in which they compute."""
    if isinstance(entry, Rewritten):
        return entry.records
    if isinstance(entry, Node):
        return entry.args.parts if isinstance(entry.args, CompositeArgs) else (entry.args,)
    return ()


def accesses(record: Args) -> Iterator[tuple[Any, str]]:
    """Buffers, weights and caches of a record, with the access that its contract declares."""
    yield from record.buffers().values()
    for name, spec in record.specs().items():
        if isinstance(spec, OpaqueSpec):
            yield getattr(record, name), spec.access
