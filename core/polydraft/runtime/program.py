"""Owns the step program: the flat list of bound launches that one kind of step consists of, and how it is built.

The runner walks it once a step; tracing, the hazard checker, capture and null mode walk the same list. It never decides
what runs: models, proposers and the runner's own rooms append nodes, and fusion only replaces runs by their composite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polydraft.backend import ForwardMeta, StepMeta
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import UNITS, Args, Limits, Unit
from polydraft.contracts.composite import Composite, CompositeArgs
from polydraft.device import Launch, Stream
from polydraft.errors import CapabilityError
from polydraft.plugins import BoundTable


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
    role: Literal["target", "draft"]
    pass_index: int
    unit: Unit
    room: str


@dataclass
class StepContext:
    """What the host knows of the step being launched; set once per step, read by metadata fills."""

    real_slots: int = 0
    has_prefill: bool = False
    use_graph: bool = False
    dummy: bool = False


@dataclass(frozen=True)
class Bound:
    """One entry of a program: the launch, the index of its launch length in `Lengths`, and its names for people."""

    launch: Launch
    unit: int
    contract: str
    room: str


Lengths = tuple[int, ...]
"""Launch lengths of a step, in the order of `UNITS`."""


@dataclass(frozen=True)
class Program:
    """A flat list of bound launches. `run` is the whole step path on the host: one call per launch, nothing else."""

    name: str
    entries: tuple[Bound, ...]
    calls: tuple[tuple[Launch, int], ...]

    def run(self, stream: Stream, lengths: Lengths) -> None:
        """Enqueue every launch in order; never blocks, never allocates."""
        for launch, unit in self.calls:
            launch(stream, lengths[unit])

    def describe(self) -> list[str]:
        """Contract names in launch order, for `doctor`, tests and `--explain`."""
        return [entry.contract for entry in self.entries]


class ProgramBuilder:
    """Collects nodes, fuses them, binds them. One builder per program."""

    def __init__(self, name: str, table: BoundTable, limits: Limits, context: StepContext) -> None:
        self.name, self.table, self.limits, self.context = name, table, limits, context
        self._nodes: list[Node | Fill] = []

    def add(self, contract: str, args: Args, unit: Unit, room: str) -> None:
        """Append a launch of `contract`."""
        self._nodes.append(Node(contract, args, unit, room))

    def fill(self, meta: ForwardMeta, role: Literal["target", "draft"], pass_index: int, unit: Unit, room: str) -> None:
        """Append the filling of a pass's metadata."""
        self._nodes.append(Fill(meta, role, pass_index, unit, room))

    def build(self) -> Program:
        """Fuse, check that every contract has a provider, bind."""
        nodes = fuse(self._nodes, self.table)
        missing = sorted({n.contract for n in nodes if isinstance(n, Node) and n.contract not in self.table.providers})
        if missing:
            raise CapabilityError(
                f"the step program {self.name!r} needs contracts that the backend does not own: {', '.join(missing)}; "
                "implement them or inherit them from a backend that does (see `polydraft contracts`)"
            )
        entries = tuple(self._bind(node) for node in nodes)
        return Program(self.name, entries, tuple((e.launch, e.unit) for e in entries))

    def _bind(self, node: Node | Fill) -> Bound:
        unit = UNITS.index(node.unit)
        if isinstance(node, Fill):
            return Bound(_fill_launch(node, self.context), unit, "forward_meta", node.room)
        provider = self.table.providers[node.contract]
        return Bound(provider.bind(node.args, self.limits, None), unit, node.contract, node.room)


def _fill_launch(node: Fill, context: StepContext) -> Launch:
    fill, role, index = node.meta.fill, node.role, node.pass_index

    def launch(stream: Stream, n: int) -> None:
        fill(stream, StepMeta(role, index, n, context.real_slots, context.has_prefill, context.use_graph, context.dummy))

    return launch


def fuse(nodes: Sequence[Node | Fill], table: BoundTable) -> list[Node | Fill]:
    """Replace each run of nodes that a registered composite describes by the largest such composite the table owns."""
    owned = sorted((c for c in COMPOSITES.values() if c.name in table.providers), key=lambda c: -len(c.parts))
    result: list[Node | Fill] = []
    index = 0
    while index < len(nodes):
        match = next((c for c in owned if matches(c, nodes[index : index + len(c.parts)])), None)
        if match is None:
            result.append(nodes[index])
            index += 1
            continue
        run = [n for n in nodes[index : index + len(match.parts)] if isinstance(n, Node)]
        result.append(Node(match.name, CompositeArgs(tuple(n.args for n in run)), run[0].unit, run[0].room))  # type: ignore[arg-type, misc]
        index += len(run)
    return result


def matches(composite: Composite, nodes: Iterable[Node | Fill]) -> bool:
    """The same contracts in the same order over one unit, connected by the same buffers."""
    run = [n for n in nodes if isinstance(n, Node)]
    return (
        tuple(n.contract for n in run) == composite.parts
        and len({n.unit for n in run}) == 1
        and all(_field(run[w.source].args, w.output) is _field(run[w.target].args, w.input) for w in composite.wires)
    )


def _field(args: Any, name: str) -> Any:
    return getattr(args, name)


def lengths(**by_unit: int) -> Lengths:
    """Launch lengths by unit name; units not named are 0."""
    return tuple(by_unit.get(unit, 0) for unit in UNITS)


def served(name: str) -> int:
    """Newest version of a contract, for reports."""
    return REGISTRY[name].version
