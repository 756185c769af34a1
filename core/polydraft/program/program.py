"""Step programs: the flat lists of bound launches that a step consists of, and how they are built.

The runner walks these lists in each step, graphs are captured from them, and instruments wrap launches as they are bound. Models,
proposers and the runner append the entries, and `program/fusion.py` decides which of them become one launch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from polydraft.backend import Cache, ForwardMeta, StepMeta, Weight
from polydraft.contracts import contract_named
from polydraft.contracts.base import UNITS, Args, ColumnsSpec, Contract, Limits, OpaqueSpec, ParamSpec, Spec, TensorSpec, Unit
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import DTYPES, Buffer, Device, Launch, Stream
from polydraft.errors import CapabilityError, ConfigError, ContractError
from polydraft.plugins.kernel_table import Binding, BoundTable
from polydraft.plugins.program_pass import Call, Entry, Fill, Node, Rewritten
from polydraft.program.declare import Column, StepBuffer, sizes_of, wrong_dtype
from polydraft.program.fusion import Joined, fuse, joined, pass_of, rewrite

Rule = Literal["greedy", "sampling", "rejection"]
"""How the rows of a step choose their tokens: argmax ("greedy"); with the noise of the position, which drafts share ("sampling");
or with separate noise for drafts and rejection sampling ("rejection"). A greedy slot gets the same tokens by each rule."""


class StepKind(NamedTuple):
    """A step kind, the key of a set of programs: the rule, and whether some request of the step needs logits processing, log
    probabilities of its tokens, or those of its prompt, or is bound by a grammar. A step that reports prompts reports tokens,
    too."""

    rule: Rule = "greedy"
    processed: bool = False
    logprobs: bool = False
    prompt: bool = False
    bound: bool = False

    @property
    def picks(self) -> bool:
        """Whether all that is wanted of logits is the highest of each row: nobody then needs a row as a whole."""
        return self == GREEDY

    @property
    def name(self) -> str:
        """Name for messages, and key of the programs."""
        return ".".join((self.rule, *(part for part in ("processed", "logprobs", "prompt", "bound") if getattr(self, part))))


GREEDY = StepKind()


@dataclass
class StepContext:
    """What the host knows of the step being launched. It is set once per step, and metadata fills read it."""

    real_slots: int = 0
    has_prefill: bool = False


@dataclass(frozen=True)
class Bound:
    """One entry of a program: the launch, the index of its launch length in `Lengths`, its contract and its stage.

    `args`: what it was bound to (the node of a metadata fill; None for a launch that no contract describes). Tools that inspect
    memory need it; running the program does not. `joined`: how it came to serve several contracts, or to use another kernel than
    the table's. `spans`: the number of entries that it replaces in `Program.entries`."""

    launch: Launch
    unit: int
    contract: str
    stage: str
    args: Args | CompositeArgs | Fill | None = None
    joined: Joined | None = None
    spans: int = 1


Lengths = tuple[int, ...]
"""Launch lengths of a step, in the order of `UNITS`."""


@dataclass(frozen=True)
class Program:
    """A flat list of bound launches. `run` only calls each launch in turn; no other host work happens. `captured`: the
    list from which a graph is captured, if the backend's program pass merged more launches there; () if it is the same list.
    `beside`: the calls of a step that no graph fits, in an engine that has graphs; () if they are the same."""

    name: str
    entries: tuple[Bound, ...]
    calls: tuple[tuple[Launch, int], ...]
    captured: tuple[Bound, ...] = ()
    beside: tuple[tuple[Launch, int], ...] = ()

    def run(self, stream: Stream, lengths: Lengths, *, beside_graphs: bool = False) -> None:
        """Enqueue every launch in order; never blocks, never allocates."""
        for launch, unit in (beside_graphs and self.beside) or self.calls:
            launch(stream, lengths[unit])

    def recorded(self) -> Iterator[tuple[str, Launch, int]]:
        """The launches to capture: contract names, launch, and the index of its launch length."""
        if self.captured:
            return ((entry.contract, entry.launch, entry.unit) for entry in self.captured)
        return ((entry.contract, launch, unit) for entry, (launch, unit) in zip(self.entries, self.calls, strict=True))

    def describe(self) -> list[str]:
        """Contract names in the order of eager launches."""
        return [entry.contract for entry in self.entries]


@dataclass
class Memory:
    """Everything that launches are bound to, by name: the declared and allocated buffers, prepared weights, caches, and the
    metadata of each kind of pass."""

    device: Device
    limits: Limits
    act: str
    """Dtype of activations."""
    buffers: dict[str, Buffer] = field(default_factory=dict)
    weights: Mapping[str, Weight] = field(default_factory=dict)
    caches: dict[str, Cache] = field(default_factory=dict)
    metas: dict[str, ForwardMeta] = field(default_factory=dict)
    ranks: int = 1
    """Ranks that run the same programs over their shares of the weights."""

    def allocate(self, declared: Iterable[Column | StepBuffer]) -> None:
        """Allocate the declared buffers; columns begin with every slot empty. Raises `ConfigError` if two have the same name, and
        for an unknown dtype."""
        for one in declared:
            wrong = wrong_dtype(one) if isinstance(one, StepBuffer) else ""
            if wrong:
                raise ConfigError(f"a module declares the buffer {one.name!r} with {wrong}; correct its declaration")
            dtype = self.act if one.dtype == "act" else one.dtype
            shape = sizes_of(one.shape, self.limits)
            if one.name in self.buffers:
                raise ConfigError(f"two modules declare a buffer {one.name!r}, wanted one; rename it in one of them")
            buffer = self.buffers[one.name] = self.device.empty(one.name, shape, dtype)
            initial = one.empty if isinstance(one, Column) else one.initial
            if initial is not None:
                self.device.load(buffer, np.full(shape, initial, DTYPES[dtype]))

    def find(self, wanted: Contract, name: str, spec: Spec, given: Any) -> Any:
        """The object that a field of a record is bound to: `given` itself, or the one with that name. Raises `ContractError` if
        no module declares the name."""
        if isinstance(spec, ColumnsSpec):
            column = TensorSpec("B", "", spec.access, spec.doc)
            return tuple(self.find(wanted, name, column, one) for one in given)
        if isinstance(spec, ParamSpec) or not isinstance(given, str):
            return given
        kind = spec.kind if isinstance(spec, OpaqueSpec) else "buffer"
        there: Mapping[str, Any] = getattr(self, _PLACES[kind])
        if given not in there:
            raise ContractError(
                f"launch of {wanted.key}: {name} is the {kind} {given!r}, which no module declares; declare it, or "
                "correct the name"
            )
        return there[given]


_PLACES: Final = {"buffer": "buffers", "weight": "weights", "cache": "caches", "meta": "metas"}
"""The fields of `Memory` by kind of what they hold."""


@functools.cache
def _optional(record: type[Args]) -> frozenset[str]:
    """Fields of a kind of record that may be left out."""
    return frozenset(one.name for one in dataclasses.fields(record) if one.default is not dataclasses.MISSING)  # type: ignore[arg-type]


class ProgramBuilder:
    """Collects the nodes of one program. The module's function `build` makes the programs of a whole step from several builders;
    the method `build` is for a program that is a step by itself. `kind` says which step."""

    def __init__(self, name: str, table: BoundTable, memory: Memory, context: StepContext, kind: StepKind = GREEDY) -> None:
        self.name, self.table, self.memory, self.context, self.kind = name, table, memory, context, kind
        self.limits = memory.limits
        self.nodes: list[Entry] = []

    def add(self, contract: str, unit: Unit, stage: str, /, **fields: Any) -> None:
        """Append a launch of `contract`, whose launch length counts `unit`.

        `fields` are those of the contract's record: parameters as values; buffers, weights, caches and metadata by their declared
        name (or as objects). A buffer that is not given is the one with the name of the field, so most launches on slot columns
        and step buffers give none. An optional buffer has to be given, otherwise it is absent. Raises `ContractError` for an
        unregistered contract, an unknown or missing field, or a launch length in another unit than the contract's."""
        wanted = contract_named(contract)
        if wanted.unit not in {"any", unit}:
            raise ContractError(
                f"{self.name}: launch of {wanted.key}, got a length in {unit}, wanted {wanted.unit}; count what it counts"
            )
        specs = wanted.args.specs()
        if not fields.keys() <= specs.keys():
            unknown = ", ".join(sorted(fields.keys() - specs.keys()))
            raise ContractError(
                f"{self.name}: launch of {wanted.key}, got {unknown}, wanted fields of it: {', '.join(specs)}; correct the names"
            )
        bound: dict[str, Any] = {}
        for name, spec in specs.items():
            if name in fields:
                bound[name] = self.memory.find(wanted, name, spec, fields[name])
            elif name not in _optional(wanted.args):  # type: ignore[arg-type]  # a class is hashable
                if not isinstance(spec, TensorSpec):
                    raise ContractError(f"{self.name}: launch of {wanted.key}, {name} is missing, wanted a value; give one")
                bound[name] = self.memory.find(wanted, name, spec, name)
        self.nodes.append(Node(contract, wanted.args(**bound), unit, stage))

    def fill(self, meta: ForwardMeta | str, pass_index: int, unit: Unit, stage: str) -> None:
        """Append the filling of a pass's metadata."""
        self.nodes.append(Fill(self.memory.metas[meta] if isinstance(meta, str) else meta, pass_index, unit, stage))

    def call(self, name: str, launch: Launch, unit: Unit, stage: str) -> None:
        """Append a launch that no contract describes."""
        self.nodes.append(Call(name, launch, unit, stage))

    def build(self) -> Program:
        """Build this program as a whole step by itself."""
        return build((self,))[0]

    def bind(self, node: Entry) -> Bound:
        """Bind one node to its provider in the table."""
        unit = UNITS.index(node.unit)
        if isinstance(node, Call):
            launch = self.table.instrumented(node.launch, Binding(node.name, program=self.name, stage=node.stage))
            return Bound(launch, unit, node.name, node.stage)
        if isinstance(node, Fill):
            binding = Binding("forward_meta", args=node, program=self.name, stage=node.stage)
            launch = self.table.instrumented(_fill_launch(node, self.context), binding)
            return Bound(launch, unit, binding.contract, node.stage, node)
        known = joined(node, self.table)
        if isinstance(node, Rewritten):
            own = pass_of(node, self.table).program_pass.kernels[node.kernel]
            records = node.records
            args: Args | CompositeArgs = records[0] if len(records) == 1 else CompositeArgs(records)
            launch = self.table.bind(node.contract, args, self.limits, provider=own.provider, program=self.name, stage=node.stage)
            return Bound(launch, unit, node.contract, node.stage, args, known, len(node.nodes))
        launch = self.table.bind(node.contract, node.args, self.limits, program=self.name, stage=node.stage)
        return Bound(launch, unit, node.contract, node.stage, node.args, known)

    def finish(self, entries: Sequence[Entry]) -> Program:
        """The program of these entries. An entry that is the same with and without capture is bound once."""
        bound: dict[int, Bound] = {}

        def bind(entry: Entry) -> Bound:
            if id(entry) not in bound:
                bound[id(entry)] = self.bind(entry)
            return bound[id(entry)]

        def listed(merged: Callable[[Rewritten], bool]) -> tuple[Bound, ...]:
            """With runs apart, but for those that are `merged`."""
            found = ((e,) if not isinstance(e, Rewritten) or not e.captured or merged(e) else e.nodes for e in entries)
            return tuple(bind(one) for run in found for one in run)

        apart = listed(lambda run: False)
        if not any(isinstance(entry, Rewritten) and entry.captured for entry in entries):
            return Program(self.name, apart, tuple((one.launch, one.unit) for one in apart))
        beside, together = listed(lambda run: run.beside_graphs), listed(lambda run: True)
        calls, own = (tuple((one.launch, one.unit) for one in found) for found in (apart, beside))
        return Program(self.name, apart, calls, () if together == apart else together, () if own == calls else own)


def build(builders: Sequence[ProgramBuilder]) -> tuple[Program, ...]:
    """Build the programs of one step kind, some or all of which run in a step. In this order: replace runs of nodes by
    composites, check that every contract has a provider, apply the program passes of the table, bind. Raises `CapabilityError`
    that names all contracts without a provider, and `PluginError` for a pass that returns a different program."""
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
    refuse_lacking("the step needs contracts that the backend", missing)
    return tuple(
        builder.finish(rewrite(builder.name, nodes, fused[:place] + fused[place + 1 :], builder.table, builder.limits))
        for place, (builder, nodes) in enumerate(zip(builders, fused, strict=True))
    )


def refuse_lacking(who: str, missing: Mapping[str, str]) -> None:
    """Raise `CapabilityError` where contracts are `missing`, by name with a place that launches each; `who` begins the sentence
    with what needs them and who does not own them."""
    if missing:
        needed = ", ".join(f"{contract} (in {missing[contract]})" for contract in sorted(missing))
        raise CapabilityError(
            f"{who} does not own: {needed}; implement them, or enable a kernel pack that does (see `polydraft contracts`)"
        )


class JoinedLaunches(NamedTuple):
    """Launches that became one in the same way, and how many there are in each program."""

    joined: Joined
    launches: Mapping[str, int]
    """Program to the number of launches."""


def joined_launches(programs: Sequence[Program]) -> list[JoinedLaunches]:
    """The launches that became one, in the order of the first launch of each."""
    found: dict[Joined, dict[str, int]] = {}
    for program in programs:
        for entry in program.captured or program.entries:
            if entry.joined is not None:
                launches = found.setdefault(entry.joined, {})
                launches[program.name] = launches.get(program.name, 0) + 1
    return [JoinedLaunches(one, launches) for one, launches in found.items()]


def _fill_launch(node: Fill, context: StepContext) -> Launch:
    fill = node.meta.fill

    def launch(stream: Stream, n: int) -> None:
        fill(stream, step_meta(node, context, n))

    return launch


def step_meta(node: Fill, c: StepContext, n: int) -> StepMeta:
    """The values that the metadata of one pass is filled from, for a launch of `n` rows."""
    return StepMeta(node.pass_index, n, c.real_slots, c.has_prefill)


# -- lengths ---------------------------------------------------------------------------------------
def lengths(**by_unit: int) -> Lengths:
    """Launch lengths by unit name; units not named are 0."""
    return tuple(by_unit.get(unit, 0) for unit in UNITS)
