"""What a program is made of before it is bound, and how several of its launches become one.

There are two ways. *Composites* that the kernel table has are laid over runs of launches by core (`fuse`). What a composite
cannot say (buffers of different names that are one, conditions on shapes, what stands in front) the backend's own *program pass*
says: a pure function over the unbound program that returns it with some runs given to kernels of its own (`ProgramPass`,
`Rewritten`). Core runs it once for each program, checks that what came back is the same program, and tells what was joined
(`Joined`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from polydraft.backend import ForwardMeta
from polydraft.contracts import COMPOSITES
from polydraft.contracts.base import Args, Limits, OpaqueSpec, ParamSpec, Provider, Unit
from polydraft.contracts.composite import Composite, CompositeArgs
from polydraft.device import Buffer, Launch
from polydraft.errors import PluginError

if TYPE_CHECKING:
    from polydraft.kernel_table import BoundTable, TablePass


@dataclass(frozen=True)
class Node:
    """One launch before binding: contract, arguments, what its launch length counts, and the room it belongs to."""

    contract: str
    args: Args | CompositeArgs
    unit: Unit
    room: str


@dataclass(frozen=True)
class Fill:
    """Metadata of one pass: filled in place before the pass's first attention."""

    meta: ForwardMeta
    pass_index: int
    unit: Unit
    room: str


@dataclass(frozen=True)
class Call:
    """A launch that is bound already and that no contract describes: a block which computes itself. Nothing is fused over it."""

    name: str
    launch: Launch
    unit: Unit
    room: str


@dataclass(frozen=True, eq=False)
class Rewritten:
    """One launch that a backend's pass gives to another of its kernels, or several in a row that it gives to one.

    `dead`: buffers that several launches would write and that this kernel does not. `why`: what is gained, and what allows it,
    for people. Several become one only where launches are captured as a graph. Launched one by one they stay what they were, so
    that whoever looks between launches finds what each contract says."""

    nodes: tuple[Node, ...]
    kernel: str
    why: str
    dead: tuple[Buffer, ...] = ()

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
    def room(self) -> str:
        """The room of the first."""
        return self.nodes[0].room

    @property
    def records(self) -> tuple[Args, ...]:
        """The argument records of all contracts, in order."""
        return tuple(record for node in self.nodes for record in _records(node))


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

    def is_read(self, buffer: Buffer, start: int, end: int) -> bool:
        """Whether anybody reads what entries `start` to `end` leave in `buffer`: a later entry, another program of the step, or
        an earlier entry in the next step."""
        mine = self._touched.get(id(buffer), ())
        behind = next((reads for place, reads in mine if place >= end), False)
        in_front = next((reads for place, reads in mine if place < start), False)
        return behind or in_front or any(first.get(id(buffer), False) for first in self._touched_elsewhere)

    @functools.cached_property
    def _touched(self) -> Mapping[int, Sequence[tuple[int, bool]]]:
        """Buffers, by identity, to the entries that touch them, in order, and whether each reads what was there."""
        found: dict[int, list[tuple[int, bool]]] = {}
        for place, entry in enumerate(self.entries):
            for buffer, reads in _first_touches((entry,)).items():
                found.setdefault(buffer, []).append((place, reads))
        return found

    @functools.cached_property
    def _touched_elsewhere(self) -> Sequence[Mapping[int, bool]]:
        """The same of the other programs, of whose entries the first decides."""
        return [_first_touches(entries) for entries in self.elsewhere]


class ProgramPass(Protocol):
    """What a kernel table may have as `program_pass`."""

    @property
    def kernels(self) -> Mapping[str, OwnKernel]:
        """Kernels that `rewrite` may name."""

    def rewrite(self, program: UnboundProgram) -> Sequence[Entry]:
        """Return the entries of `program` in their order, runs of them as `Rewritten`. A pure function: what it returns follows
        from the program, and nothing of it is remembered. Core refuses what is not the same program."""


# -- composites ------------------------------------------------------------------------------------
def fuse(nodes: Sequence[Entry], table: BoundTable, others: Sequence[Sequence[Entry]] = ()) -> list[Entry]:
    """Replace each run of nodes that a registered composite describes by the largest such composite the table owns.

    A run stays as it is where somebody reads what the composite would not write: a later node, a node of the `other`
    programs of the step, or an earlier node in the next step."""
    owned = sorted((c for c in COMPOSITES.values() if c.name in table.providers), key=lambda c: -len(c.parts))
    result: list[Entry] = []
    index = 0
    while index < len(nodes):
        for composite in owned:
            end = index + len(composite.parts)
            run = matches(composite, nodes[index:end])
            if run and not _reads_dead(composite, run, (nodes[end:], nodes[:index], *others)):
                parts = CompositeArgs(tuple(n.args for n in run if isinstance(n.args, Args)))
                result.append(Node(composite.name, parts, run[0].unit, run[0].room))
                index = end
                break
        else:
            result.append(nodes[index])
            index += 1
    return result


def matches(composite: Composite, nodes: Iterable[Entry]) -> list[Node]:
    """The nodes as a run of the composite's parts, or an empty list: the same contracts in the same order, launch lengths that
    count the same (or, where the parts are defined over different ones, what their contracts say), and fields of one name
    that are the same buffer or the same parameter."""
    run = [n for n in nodes if isinstance(n, Node)]
    if tuple(n.contract for n in run) != composite.parts:
        return []
    declared = [contract.unit for contract in composite.contracts]
    mixed = len(set(declared) - {"any"}) > 1
    if len({n.unit for n in run}) > 1 and not (mixed and declared == [n.unit for n in run]):
        return []
    seen: dict[str, Any] = {}
    for contract, node in zip(composite.contracts, run, strict=True):
        for name, spec in contract.args.specs().items():
            value = getattr(node.args, name)
            first = seen.setdefault(name, value)
            if not (first == value if isinstance(spec, ParamSpec) else first is value):
                return []
    return run


def _reads_dead(composite: Composite, run: Sequence[Node], elsewhere: Iterable[Sequence[Entry]]) -> bool:
    """Whether a program piece in `elsewhere` reads a dead buffer of the run before it has written it anew. Metadata fills read
    only what describes rows, which no composite declares dead."""
    dead = [next(getattr(n.args, name) for n in run if hasattr(n.args, name)) for name in composite.dead]
    return any(_is_read(buffer, piece) for piece in elsewhere for buffer in dead)


def _is_read(buffer: Any, entries: Iterable[Entry]) -> bool:
    for record in (record for entry in entries for record in _records(entry)):
        touched = {access for value, access in _accesses(record) if value is buffer}
        if touched:
            return touched != {"out"}
    return False


def _first_touches(entries: Iterable[Entry]) -> dict[int, bool]:
    """Buffers, by identity, to whether the first contract that touches them reads what was there."""
    found: dict[int, bool] = {}
    for record in (record for entry in entries for record in _records(entry)):
        here: dict[int, bool] = {}
        for value, access in _accesses(record):
            here[id(value)] = here.get(id(value), False) or access != "out"
        for buffer, reads in here.items():
            found.setdefault(buffer, reads)
    return found


def _records(entry: Entry) -> tuple[Args, ...]:
    """The argument records of an entry's contracts, in the order in which they compute."""
    if isinstance(entry, Rewritten):
        return entry.records
    if isinstance(entry, Node):
        return entry.args.parts if isinstance(entry.args, CompositeArgs) else (entry.args,)
    return ()


def _accesses(record: Args) -> Iterator[tuple[Any, str]]:
    """Buffers, weights and caches of a record, with the access that its contract declares."""
    yield from record.buffers().values()
    for name, spec in record.specs().items():
        if isinstance(spec, OpaqueSpec):
            yield getattr(record, name), spec.access


# -- a backend's pass ------------------------------------------------------------------------------
def rewrite(
    name: str, entries: Sequence[Entry], others: Sequence[Sequence[Entry]], table: BoundTable, limits: Limits
) -> list[Entry]:
    """Run the passes of the table over a program whose composites are chosen, and check what each returns. `others`: the other
    programs of the step. Raises `PluginError` naming the plugin and the program."""
    found = list(entries)
    for one in table.passes:
        program = UnboundProgram(name, tuple(found), one.served, limits, tuple(others))
        found = list(one.program_pass.rewrite(program))
        _check(one, program, found)
    return found


def pass_of(entry: Rewritten, table: BoundTable) -> TablePass:
    """The pass that has rewritten an entry: a contract is served by one plugin."""
    return next(one for one in table.passes if entry.nodes[0].contract in one.served)


def _check(one: TablePass, program: UnboundProgram, found: Sequence[Entry]) -> None:
    """Every entry of the program is in `found` once and in its place, so that whoever reads behind a write still does; each
    rewritten run goes to a kernel of the plugin for just these contracts; and nobody misses what is not written any more."""
    where = f"plugin {one.source!r}: its pass over {program.name}"
    place, before = 0, {id(entry) for entry in program.entries}
    for entry in found:
        there = entry.nodes if isinstance(entry, Rewritten) and id(entry) not in before else (entry,)
        end = place + len(there)
        if not there or [*map(id, there)] != [*map(id, program.entries[place:end])]:
            got = getattr(entry, "contract", type(entry).__name__)
            raise PluginError(
                f"{where} returned {got} as entry {place}, wanted all entries in their order; rewrite runs in place"
            )
        if isinstance(entry, Rewritten) and id(entry) not in before:
            problem = _problem(one, program, entry, place, end)
            if problem:
                raise PluginError(
                    f"{where} gives {entry.contract} to kernel {entry.kernel!r}, {problem}; leave that run as it is"
                )
        place = end
    if place != len(program.entries):
        raise PluginError(f"{where} returned {place} entries, wanted {len(program.entries)}; return every entry once")


def _problem(one: TablePass, program: UnboundProgram, entry: Rewritten, start: int, end: int) -> str:
    """What forbids to rewrite entries `start` to `end` so; "" where nothing does."""
    if entry.kernel not in one.program_pass.kernels:
        return "which it does not have"
    wanted = one.program_pass.kernels[entry.kernel].parts
    if tuple(entry.contract.split("+")) != wanted:
        return f"which is for {'+'.join(wanted)}"
    strange = [node.contract for node in entry.nodes if node.contract not in one.served]
    if strange:
        return f"but {strange[0]} is served by another plugin"
    if len({node.unit for node in entry.nodes}) > 1:
        return "but their launch lengths count different things"
    if entry.dead and not entry.captured:
        return "which does not write everything that this one launch has to"
    for buffer in entry.dead:
        name = getattr(buffer, "name", "a buffer")
        first, *others = [*filter(None, ({a for v, a in _accesses(r) if v is buffer} for r in entry.records)), set[str]()]
        if first != {"out"} or not any(touched - {"out"} for touched in others):  # the host may read what no launch does
            return f"which does not write {name}, but that is not what one of these launches writes for another"
        if program.is_read(buffer, start, end):
            return f"which does not write {name}, but somebody reads that"
    return ""


# -- what is told ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Joined:
    """Launches that became one, or went to another kernel, for `--explain` and reports. `captured`: in captured steps alone."""

    contracts: str
    by: str
    """The plugin whose kernel it is."""
    why: str
    captured: bool = False


def joined(entry: Entry, table: BoundTable) -> Joined | None:
    """What was joined into an entry that is to be bound; None for a launch of one contract by the table's provider."""
    if isinstance(entry, Rewritten):
        return Joined(entry.contract, pass_of(entry, table).source, entry.why, entry.captured)
    if isinstance(entry, Node) and isinstance(entry.args, CompositeArgs):
        return Joined(entry.contract, table.owners.get(entry.contract, ""), COMPOSITES[entry.contract].doc)
    return None
