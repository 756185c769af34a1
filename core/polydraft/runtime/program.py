"""Owns the step program: the flat list of bound launches that one kind of step consists of, and how it is built.

The runner walks it once a step; tracing, the hazard checker, capture and null mode walk the same list. It never decides
what runs: models, proposers and the runner's own rooms append nodes, and fusion only replaces runs by their composite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from polydraft.backend import ForwardMeta, RowOrder, StepMeta
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import UNITS, Args, Limits, ParamSpec, Unit
from polydraft.contracts.composite import Composite, CompositeArgs
from polydraft.device import Launch, Stream
from polydraft.errors import CapabilityError, ContractError
from polydraft.kernel_table import BoundTable

Rule = Literal["greedy", "sampling", "rejection"]
"""How the rows of a step choose their tokens: argmax; noise of the position, shared by drafts; or drafts with noise of their
own, accepted by chance. A greedy slot gets the same tokens by each of them."""


class StepKind(NamedTuple):
    """What distinguishes the programs of an engine: the rule, and whether requests have their logits processed, and want log
    probabilities of tokens or of their prompt (with which the others go)."""

    rule: Rule = "greedy"
    processed: bool = False
    logprobs: bool = False
    prompt: bool = False

    @property
    def name(self) -> str:
        """For people, and to look the programs up."""
        return ".".join((self.rule, *(part for part in ("processed", "logprobs", "prompt") if getattr(self, part))))


GREEDY = StepKind()


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


@dataclass(frozen=True)
class Call:
    """A launch that is bound already and that no contract describes: a block which computes itself. Nothing is fused over it."""

    name: str
    launch: Launch
    unit: Unit
    room: str


Entry = Node | Fill | Call
"""What programs are built from."""


@dataclass
class StepContext:
    """What the host knows of the step being launched; set once per step (`row_order` once per engine), read by metadata
    fills."""

    real_slots: int = 0
    has_prefill: bool = False
    use_graph: bool = False
    dummy: bool = False
    row_order: RowOrder = "slot"


@dataclass(frozen=True)
class Bound:
    """One entry of a program: the launch, the index of its launch length in `Lengths`, and its names for people.

    `args`: what it was bound to (of a metadata fill, its node; None of a launch that no contract describes), in contract version
    `version`; whoever walks a program to look at memory needs it, running it does not."""

    launch: Launch
    unit: int
    contract: str
    room: str
    args: Args | CompositeArgs | Fill | None = None
    version: int = 1


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
    """Collects the nodes of one program; `build` turns those of a whole step into programs. `kind` says which step."""

    def __init__(self, name: str, table: BoundTable, limits: Limits, context: StepContext, kind: StepKind = GREEDY) -> None:
        self.name, self.table, self.limits, self.context, self.kind = name, table, limits, context, kind
        self.nodes: list[Entry] = []

    def add(self, contract: str, args: Args, unit: Unit, room: str) -> None:
        """Append a launch of `contract`. Raises `ContractError` for a name nobody registered, a record that is not the newest
        of that contract, or a launch length that counts something else than the contract does."""
        wanted = REGISTRY[contract]
        if type(args) is not wanted.args:
            raise ContractError(
                f"{self.name}: launch of {wanted.key}, got {type(args).__name__}, wanted {wanted.args.__name__}; pass that record"
            )
        if wanted.unit not in {"any", unit}:
            raise ContractError(
                f"{self.name}: launch of {wanted.key}, got a length in {unit}, wanted {wanted.unit}; count what it counts"
            )
        self.nodes.append(Node(contract, args, unit, room))

    def fill(self, meta: ForwardMeta, role: Literal["target", "draft"], pass_index: int, unit: Unit, room: str) -> None:
        """Append the filling of a pass's metadata."""
        self.nodes.append(Fill(meta, role, pass_index, unit, room))

    def call(self, name: str, launch: Launch, unit: Unit, room: str) -> None:
        """Append a launch that no contract describes."""
        self.nodes.append(Call(name, launch, unit, room))

    def build(self) -> Program:
        """Build this program as if it were the whole step."""
        return build((self,))[0]

    def bind(self, node: Entry) -> Bound:
        """Bind one node to the provider that the table has for it, in the version that the provider was written for."""
        unit = UNITS.index(node.unit)
        if isinstance(node, Call):
            return Bound(node.launch, unit, node.name, node.room)
        if isinstance(node, Fill):
            return Bound(_fill_launch(node, self.context), unit, "forward_meta", node.room, node)
        version = self.table.versions[node.contract]
        args = node.args if isinstance(node.args, CompositeArgs) else as_version(node.contract, node.args, version)
        return Bound(self.table.bind(node.contract, args, self.limits), unit, node.contract, node.room, args, version)


def build(builders: Sequence[ProgramBuilder]) -> tuple[Program, ...]:
    """Build the programs of one kind of step, which run one after the other: fuse, check that every contract has a provider,
    bind. Raises `CapabilityError` naming all contracts that nobody provides."""
    fused = []
    for place, builder in enumerate(builders):
        others = [other.nodes for i, other in enumerate(builders) if i != place]
        fused.append(fuse(builder.nodes, builder.table, others))
    missing = {
        node.contract: builder.name
        for builder, nodes in zip(builders, fused, strict=True)
        for node in nodes
        if isinstance(node, Node) and node.contract not in builder.table.providers
    }
    if missing:
        needed = ", ".join(f"{contract} (in {missing[contract]})" for contract in sorted(missing))
        raise CapabilityError(
            f"the step needs contracts that the backend does not own: {needed}; implement them, or enable a kernel pack that "
            "does (see `polydraft contracts`)"
        )
    programs = []
    for builder, nodes in zip(builders, fused, strict=True):
        entries = tuple(builder.bind(node) for node in nodes)
        programs.append(Program(builder.name, entries, tuple((e.launch, e.unit) for e in entries)))
    return tuple(programs)


def _fill_launch(node: Fill, context: StepContext) -> Launch:
    fill = node.meta.fill

    def launch(stream: Stream, n: int) -> None:
        fill(stream, step_meta(node, context, n))

    return launch


def step_meta(node: Fill, c: StepContext, n: int) -> StepMeta:
    """What the metadata of one pass is filled with, for a launch of `n` rows."""
    phase: Literal["decode", "prefill"] = "prefill" if c.has_prefill else "decode"
    return StepMeta(node.role, node.pass_index, n, c.real_slots, c.has_prefill, c.use_graph, c.dummy, c.row_order, phase)


# -- fusion ----------------------------------------------------------------------------------------
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
    return any(_is_read(buffer, piece) for buffer in dead for piece in elsewhere)


def _is_read(buffer: Any, nodes: Sequence[Entry]) -> bool:
    for node in nodes:
        touched = {access for value, access in _accesses(node) if value is buffer}
        if touched:
            return touched != {"out"}
    return False


def _accesses(node: Entry) -> Iterator[tuple[Any, str]]:
    """Buffers that a node is bound to, with the access that its contract declares."""
    if isinstance(node, Node) and isinstance(node.args, Args):
        for name, spec in node.args.specs().items():
            if not isinstance(spec, ParamSpec):
                yield getattr(node.args, name), spec.access


# -- versions and lengths --------------------------------------------------------------------------
def as_version(name: str, args: Args, version: int) -> Args:
    """Express the newest record of a contract in an older version, for providers written for that.

    Raises `CapabilityError` when the step uses a field that the older version does not have, or cannot give one it wants."""
    newest = REGISTRY[name]
    if version == newest.version:
        return args
    older = REGISTRY[f"{name}/{version}"].args
    fields = older.specs()
    unknown = [f for f in args.specs() if f not in fields and getattr(args, f) is not None]
    absent = [f for f in fields if f not in args.specs()]
    if unknown or absent:
        raise CapabilityError(
            f"the step uses {', '.join(unknown + absent)} of contract {newest.key} in a way that version {version}, which the "
            f"backend has, does not know; update the backend to version {newest.version}"
        )
    return older(**{f: getattr(args, f) for f in fields})


def lengths(**by_unit: int) -> Lengths:
    """Launch lengths by unit name; units not named are 0."""
    return tuple(by_unit.get(unit, 0) for unit in UNITS)
