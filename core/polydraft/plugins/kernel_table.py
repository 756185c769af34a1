"""The kernel table of one engine: the backend's providers, with those of enabled packs laid over them.

`plugins.py` builds it once, the step program binds from it, and `doctor` and reports show what was replaced and what was left
out. It changes no kernel, and does not choose between packs that the user has not put in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from polydraft.backend import BackendInfo, Cache, CacheSpec, Collectives, KernelTable, PackNotes, Weight
from polydraft.contracts.arguments import check_records
from polydraft.contracts.base import Args, Limits, Provider, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.packing import Matrix
from polydraft.device import Buffer, Device, Launch
from polydraft.errors import CapabilityError, PluginError
from polydraft.plugins.checks import PartialTable

if TYPE_CHECKING:
    from polydraft.plugins.program_pass import Fill, ProgramPass


@dataclass(frozen=True)
class Override:
    """A contract (or composite) that an enabled kernel pack serves instead of, or beside, the backend."""

    contract: str
    pack: str
    digest: str
    computed_by: str = ""
    """What computes it, where the pack says so."""


@dataclass(frozen=True)
class Shadowed:
    """A provider that was left out, because an earlier pack has claimed `contract` or, for a composite, one of its parts."""

    contract: str
    owner: str
    by: str


@dataclass(frozen=True)
class PackTable:
    """What one enabled pack offers. `ordered` when the user put it in order (`--kernels`), first wins."""

    name: str
    digest: str
    table: PartialTable
    ordered: bool

    @property
    def notes(self) -> PackNotes | None:
        """What its table says of its kernels, if anything."""
        return getattr(self.table, "notes", None)


@dataclass(frozen=True)
class TablePass:
    """The pass over programs that the backend or a pack called `source` brings, and the contracts and composites that it may give
    to kernels of its own: those that are served by its table."""

    source: str
    served: frozenset[str]
    program_pass: ProgramPass


@dataclass(frozen=True)
class DeviceWorkspace:
    """Scratch memory of an engine: `nbytes` bytes of device memory that every launch may overwrite."""

    buffer: Buffer
    nbytes: int


@dataclass(frozen=True)
class Binding:
    """What a launch was bound to, for whoever looks at launches: the contract (or composite), its version and its record;
    the node of a metadata fill ("forward_meta"); nothing of a launch that no contract describes. `program` and `stage` say where
    in the step it stands."""

    contract: str
    version: int = 1
    args: Args | CompositeArgs | Fill | None = None
    workspace: Workspace | None = None
    program: str = ""
    stage: str = ""


class Binder(Protocol):
    """Somebody who looks at launches."""

    def bind(self, binding: Binding, launch: Launch) -> Launch:
        """The launch, or what is enqueued in its place: it has to enqueue the launch once."""


@dataclass(frozen=True)
class BoundTable:
    """Providers and versions by contract or composite name, and the backend's factories for weights and caches.

    `instruments` wrap every launch that is bound here, the innermost first."""

    backend: KernelTable
    device: Device
    providers: Mapping[str, Provider]
    versions: Mapping[str, int]
    overrides: tuple[Override, ...] = ()
    shadowed: tuple[Shadowed, ...] = ()
    uncapturable: frozenset[str] = frozenset()
    """What packs serve and say that it cannot be captured, beside what the backend declares."""
    notes: Mapping[str, PackNotes] = field(default_factory=dict)
    """What packs say of their kernels, by pack."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """Contract or composite name to the backend or pack that serves it."""
    passes: tuple[TablePass, ...] = ()
    instruments: tuple[Binder, ...] = ()
    _workspaces: list[DeviceWorkspace] = field(default_factory=list, repr=False)

    def prepare_weight(self, role: str, value: Matrix, dtype: str, previous: Weight | None = None) -> Weight:
        """As `KernelTable.prepare_weight`, by the backend."""
        return self.backend.prepare_weight(role, value, dtype, previous)

    def allocate_cache(self, spec: CacheSpec) -> Cache:
        """As `KernelTable.allocate_cache`, by the backend."""
        return self.backend.allocate_cache(spec)

    def bind(
        self, name: str, args: Args | CompositeArgs, limits: Limits, *, provider: Provider | None = None, program: str = "",
        stage: str = "",
    ) -> Launch:  # fmt: skip
        """Bind the provider of `name` to `args`, with workspace as it wants. With `provider` bind that instead, a kernel of a
        pass for the contracts that `name` spells. `program` and `stage` are for people.

        Raises `ContractError` where the record is not what the contract declares; the provider then sees nothing of it."""
        check_records(name, args)
        provider = self.providers[name] if provider is None else provider
        workspace = self.workspace(provider.workspace_bytes(args, limits))
        launch = provider.bind(args, limits, workspace)
        return self.instrumented(launch, Binding(name, self.versions.get(name, 1), args, workspace, program, stage))

    def instrumented(self, launch: Launch, binding: Binding) -> Launch:
        """A bound launch, within all instruments: the launch itself where there are none."""
        for one in self.instruments:
            launch = one.bind(binding, launch)
        return launch

    def with_collectives(self, collectives: Collectives, by: str) -> BoundTable:
        """The table with what ranks exchange, beside its kernels, which one pass may join; `by`: the name of the backend."""
        owners = {**self.owners, **dict.fromkeys(collectives.providers, by)}
        brought = {one.source: one.program_pass for one in self.passes}
        if collectives.program_pass is not None:
            brought[by] = collectives.program_pass
        return replace(
            self, providers={**self.providers, **collectives.providers}, versions={**self.versions, **collectives.versions},
            owners=owners, passes=tuple(_pass_of(source, owners, one) for source, one in brought.items()),
        )  # fmt: skip

    def workspace(self, nbytes: int) -> Workspace | None:
        """Scratch of at least `nbytes` bytes, None for 0; programs are built from it, a step never asks.

        All launches of an engine share it, because they run in order on one stream and nothing in it survives a launch."""
        if nbytes <= 0:
            return None
        if not self._workspaces or self._workspaces[-1].nbytes < nbytes:
            name = f"workspace{len(self._workspaces)}"
            self._workspaces.append(DeviceWorkspace(self.device.empty(name, (nbytes,), "u8"), nbytes))
        return self._workspaces[-1]

    def report(self) -> dict[str, Any]:
        """What packs replaced and what was left out, for `doctor` and reports."""
        return {
            "overrides": [vars(override) for override in self.overrides],
            "shadowed": [vars(one) for one in self.shadowed],
            "left_out": [
                {"contract": name, "pack": pack, "reason": reason}
                for pack, notes in self.notes.items()
                for name, reason in notes.left_out.items()
            ],
            "packs": {pack: {"evidence": notes.evidence, "library": notes.library} for pack, notes in self.notes.items()},
        }


def parts_of(name: str) -> frozenset[str]:
    """The contracts that a provider of `name` computes: itself, or the parts of a composite."""
    from polydraft.contracts import COMPOSITES

    return frozenset(COMPOSITES[name].parts if name in COMPOSITES else (name,))


def lay_over(
    backend: str, table: KernelTable, device: Device, packs: Sequence[PackTable], variants: Sequence[PackTable] = ()
) -> BoundTable:
    """Lay `packs`, first wins, over the table of the backend called `backend`; its own `variants` give way to all of them.

    A composite is left out where an earlier pack claims one of its parts: fusing there would pass by the kernel that was
    asked for. Errors: `PluginError` when two packs claim one contract and at least one of them has no place in the order."""
    refuse_unordered(packs)
    owner: dict[str, str] = {}
    claimed: dict[str, str] = {}
    providers: dict[str, Provider] = {}
    versions: dict[str, int] = {}
    overrides: list[Override] = []
    shadowed: list[Shadowed] = []
    uncapturable: set[str] = set()
    sources = (*packs, *variants, PackTable(backend, "", table, ordered=True))
    for source in sources:
        notes = source.notes or PackNotes()
        for contract, provider in sorted(source.table.providers.items()):
            parts = parts_of(contract)
            by = owner.get(contract) if len(parts) == 1 else next((claimed[p] for p in sorted(parts) if p in claimed), None)
            if by is not None:
                shadowed.append(Shadowed(contract, source.name, by))
                continue
            owner[contract], providers[contract] = source.name, provider
            versions[contract] = source.table.versions[contract]
            if source.table is not table:
                overrides.append(Override(contract, source.name, source.digest, notes.computed_by.get(contract, "")))
                uncapturable |= parts & set(notes.uncapturable)
        for part in _claims(source):
            claimed.setdefault(part, source.name)
    return BoundTable(
        table, device, providers, versions, tuple(overrides), tuple(shadowed),
        uncapturable=frozenset(uncapturable), notes={one.name: one.notes for one in sources if one.notes is not None},
        owners=owner, passes=tuple(_passes(sources, owner)),
    )  # fmt: skip


def _passes(sources: Sequence[PackTable], owners: Mapping[str, str]) -> Iterator[TablePass]:
    """The passes that tables bring, each over what its own table serves."""
    for source in sources:
        brought = getattr(source.table, "program_pass", None)
        if brought is not None:
            yield _pass_of(source.name, owners, brought)


def _pass_of(source: str, owners: Mapping[str, str], brought: ProgramPass) -> TablePass:
    """The pass of the backend or pack `source`, over what it serves."""
    return TablePass(source, frozenset(name for name, owner in owners.items() if owner == source), brought)


def refuse_unordered(packs: Sequence[PackTable]) -> None:
    """Two packs may claim one contract only where the user has put both in order."""
    for index, first in enumerate(packs):
        for second in packs[index + 1 :]:
            shared = sorted(_claims(first) & _claims(second))
            if shared and not (first.ordered and second.ordered):
                raise PluginError(
                    f"kernel packs {first.name!r} and {second.name!r} both claim {', '.join(shared)} in polydraft_kernels; "
                    f"say which one wins: --kernels {first.name},{second.name}"
                )


def refuse_strangers(table: BoundTable, info: BackendInfo, what: str, contracts: Collection[str]) -> None:
    """Raises `CapabilityError` where a pack that is no variant of the backend serves some of `contracts`, of which `what` asks
    more than every kernel can: what the backend declares (`kv_dtypes`, `sliding_window`) says nothing about other kernels."""
    own = {variant.name for variant in info.variants}
    for one in table.overrides:
        touched = sorted(parts_of(one.contract) & {*contracts})
        if touched and one.pack not in own:
            raise CapabilityError(
                f"{what}: kernel pack {one.pack!r} serves {', '.join(touched)}, and only kernels of backend {info.name} itself "
                "are known to take this; leave out one of the two"
            )


def _claims(pack: PackTable) -> frozenset[str]:
    """Every contract that a pack computes, alone or within a composite."""
    return frozenset().union(*(parts_of(name) for name in pack.table.providers))
