"""One engine's plugins: what was named, loaded and checked, and its hooks behind typed methods.

The engine, `doctor` and the conformance kit build one `Plugins` before the first step; everything wrong with a plugin is said
then, naming plugin, hook and fix. An installed plugin that nobody names is not even imported.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from polydraft import hooks
from polydraft.backend import BackendInfo, Collectives, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
from polydraft.contracts import COLLECTIVES
from polydraft.contracts.base import Limits
from polydraft.device import Device, GraphCapture, withdrawn
from polydraft.errors import DeviceError, PluginError
from polydraft.plugins.checks import (
    BACKEND,
    EXTENSION,
    PACK,
    check_bring_up,
    check_claims,
    check_pass,
    check_result,
    check_table,
    check_withdrawn,
)
from polydraft.plugins.kernel_table import BoundTable, Override, PackTable, Shadowed, lay_over
from polydraft.plugins.loading import Loaded, digest, find, origin
from polydraft.plugins.manager import Manager, identify
from polydraft.plugins.variants import verdicts
from polydraft.ranks import Group

__all__ = [
    "BoundTable",
    "Found",
    "Loaded",
    "Override",
    "Plugins",
    "Shadowed",
    "find",
    "identify",
    "survey",
    "visible_devices",
]


@dataclass(frozen=True)
class Plugins:
    """One engine's plugins: a manager of its own, and the backend, packs and extensions that were named.

    `packs` lie in order of precedence; the first `num_ordered` of them are those that the user put in order."""

    manager: Manager
    backend: Loaded
    identity: BackendInfo
    """What the backend said of itself when it was loaded."""
    packs: tuple[Loaded, ...] = ()
    extensions: tuple[Loaded, ...] = ()
    num_ordered: int = 0
    variants: tuple[Loaded, ...] = ()
    """Those of the backend's variants that are in use, in its order, which give way to every pack."""
    unused_variants: Mapping[str, str] = field(default_factory=dict)
    """The others, each with the reason."""

    @classmethod
    def load(
        cls,
        backend: str | object,
        *,
        packs: Sequence[str] = (),
        extensions: Sequence[str] = (),
        files: Sequence[str] = (),
        device: str = "",
        variants: bool = True,
    ) -> Plugins:
        """Load what was named and validate it.

        `backend` is an entry-point name, the name of a backend in `files`, or a plugin object; it is asked what it can do on
        `device` ("": its default). `packs` are named likewise, in order of precedence; a pack in `files` that they leave out is
        enabled too, without a place in the order. Of the backend's variants those are added that the kit has passed on this
        device, unless `variants` is off. Raises `PluginError`."""
        given = [Loaded.from_option(where) for where in files]
        chosen = _backend(backend, [one for one in given if one.role is BACKEND])
        ordered = [_pack(name, given) for name in packs]
        packs_ = (*ordered, *(one for one in given if one.role is PACK and one not in ordered))
        others = (
            *(Loaded.from_entry(EXTENSION, name) for name in extensions),
            *(one for one in given if one.role is EXTENSION),
        )
        manager = Manager((*packs_, *others, chosen))
        info = manager.identity(chosen, device)
        _refuse_others(backend, chosen, info)
        renamed = dataclasses.replace(chosen, name=info.name)
        mine, unused = _variants(renamed, info, packs_, device, wanted=variants)
        if mine or renamed.name != chosen.name:
            manager = Manager((*packs_, *mine, *others, renamed))
        chosen = renamed
        return cls(manager, chosen, info, packs_, others, len(ordered), mine, unused)

    @property
    def loaded(self) -> tuple[Loaded, ...]:
        """Backend, packs, variants and extensions, in order of registration."""
        return (self.backend, *self.packs, *self.variants, *self.extensions)

    @property
    def digests(self) -> dict[str, str]:
        """Digest of every plugin by name."""
        return {one.name: one.digest for one in self.loaded}

    def report(self) -> list[dict[str, str]]:
        """Every plugin of this engine with its digest, for `doctor` and every report."""
        return [one.report() for one in self.loaded]

    def info(self) -> BackendInfo:
        """The backend's identity, as it was when it was loaded."""
        return self.identity

    def info_on(self, spec: str) -> BackendInfo:
        """Its identity on another device, which is not opened."""
        return self.manager.identity(self.backend, spec)

    def open_device(self, spec: str, options: DeviceOptions) -> Device:
        """Open the backend's device."""
        device: Device = self.manager.hook.polydraft_open_device(spec=spec, options=options)
        return device

    def info_of(self, device: Device) -> BackendInfo:
        """The backend's identity on an open device: less what the device was found to lack. Raises `PluginError` where that is no
        capability that can be taken back."""
        found = withdrawn(device)
        check_withdrawn(self.backend.name, self.identity, found)
        return self.identity.without(found)

    def kernels(self, device: Device) -> BoundTable:
        """The backend's table with the packs laid over it, first wins, and beneath them the variants that are used. Raises
        `PluginError` for a table that does not fit, and for two packs that claim one contract without an order."""
        tables = {one.label: table for one, table in self.manager.gather("polydraft_kernels", device=device)}
        table, name = tables[self.backend.label], self.backend.name
        check_result(name, "polydraft_kernels", table, KernelTable)  # a wrapper has to leave the factories in it
        check_table(name, table)
        check_claims(name, self.identity, table)
        check_bring_up(name, self.identity, table)
        packs = []
        for place, pack in enumerate((*self.packs, *self.variants)):
            extra = tables[pack.label]
            check_table(pack.name, extra, PACK)
            packs.append(PackTable(pack.name, pack.digest, extra, not len(self.packs) > place >= self.num_ordered))
        count = len(self.packs)
        return lay_over(name, table, device, packs[:count], packs[count:])

    def graph_capture(self, device: Device) -> GraphCapture:
        """The backend's capture facility; asked for only when the capability is declared."""
        hook = "polydraft_graph_capture"
        if not self.manager.answering(hook):
            raise PluginError(f"plugin {self.backend.name!r} lacks the hook {hook}; implement it (see polydraft.hooks)")
        capture: GraphCapture = self.manager.hook.polydraft_graph_capture(device=device)
        return capture

    def init_forward_meta(self, device: Device, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
        """The backend's metadata for one kind of pass."""
        meta: ForwardMeta = self.manager.hook.polydraft_init_forward_meta(device=device, buffers=buffers, limits=limits)
        return meta

    def collectives(self, device: Device, group: Group) -> Collectives:
        """The backend's collectives of one rank; asked for only when the capability `ranks` is declared. Raises `PluginError`
        where one is missing, or of another version, and for a pass over programs that cannot be run."""
        hook = "polydraft_collectives"
        found: Collectives = self.manager.hook.polydraft_collectives(device=device, group=group)
        wanted = {one.name: one.version for one in COLLECTIVES}
        if dict(found.versions) != wanted or found.providers.keys() != wanted.keys():
            got = ", ".join(f"{name}/{found.versions.get(name, '?')}" for name in sorted(found.providers))
            raise PluginError(
                f"plugin {self.backend.name!r}: {hook} returned {got or 'none'}, wanted "
                f"{', '.join(f'{name}/{version}' for name, version in wanted.items())}; provide these"
            )
        check_pass(self.backend.name, hook, found.program_pass)
        return found

    def off_device(self, spec: str) -> dict[str, Any]:
        """Which operations of a framework leave the device: `asked` whether the backend can say, `operations` their names by
        contract, `problem` why it could not be found out."""
        answer = {"asked": False, "operations": {}, "problem": ""}
        if not self.manager.answering("polydraft_off_device") or not self.identity.available:
            return answer
        try:
            found: Mapping[str, Sequence[str]] = self.manager.hook.polydraft_off_device(spec=spec)
        except DeviceError as error:
            return {**answer, "asked": True, "problem": str(error)}
        return {**answer, "asked": True, "operations": {str(name): list(map(str, names)) for name, names in found.items()}}

    def gather(self, hook: str) -> list[tuple[str, Any]]:
        """What all plugins returned for a hook that many may answer: the name of a plugin with each of its items."""
        return [(one.name, item) for one, items in self.manager.gather(hook) for item in items]

    def observers(self) -> list[hooks.StepObserver]:
        """Observers of every loaded plugin, in order."""
        return [observer for _, observer in self.gather("polydraft_step_observers")]


def _backend(backend: str | object, brought: Sequence[Loaded]) -> Loaded:
    """The backend: the one that `--plugin` brings, where there is one, or else the installed one or the object."""
    if len(brought) > 1:
        both = " and ".join(f"--plugin {one.origin}" for one in brought)
        raise PluginError(f"{both} each bring a backend, wanted one for an engine; leave out all but one")
    if brought:
        return brought[0]
    return Loaded.from_entry(BACKEND, backend) if isinstance(backend, str) else Loaded.from_object(backend)


def _refuse_others(backend: str | object, chosen: Loaded, info: BackendInfo) -> None:
    """A backend that `--plugin` brings has to be the one that was named, and the only one of that name."""
    if chosen.entry or chosen.plugin is backend:
        return
    if backend not in (info.name, chosen.origin):
        other = backend if isinstance(backend, str) else Loaded.from_object(backend).name
        raise PluginError(
            f"--plugin {chosen.origin} brings the backend {info.name!r}, but {other!r} is selected; "
            f"add --backend {info.name}, or leave the plugin out"
        )
    _refuse_namesakes(dataclasses.replace(chosen, name=info.name), (chosen,))


def _pack(name: str, given: Sequence[Loaded]) -> Loaded:
    """The kernel pack called `name`, or, from `--plugin`, located at it."""
    mine = [one for one in given if one.role is PACK and name in {one.name, one.origin}]
    if not mine:
        return Loaded.from_entry(PACK, name)
    _refuse_namesakes(dataclasses.replace(mine[0], name=name), mine)
    return mine[0]


def _refuse_namesakes(one: Loaded, given: Sequence[Loaded]) -> None:
    """Raises `PluginError` where several of `given`, or an installed package too, have the name and role of `one`."""
    claims = [f"--plugin {each.origin}" for each in given] + [origin(entry) for entry in find(one.role.group).get(one.name, ())]
    if len(claims) > 1:
        several = " and from ".join(claims)
        raise PluginError(f"the {one.role.noun} {one.name!r} comes from {several}; leave out or rename all but one")


def _variants(
    backend: Loaded, info: BackendInfo, packs: Sequence[Loaded], device: str, *, wanted: bool
) -> tuple[tuple[Loaded, ...], dict[str, str]]:
    """The backend's variants that are in use besides the packs that were named, and why the others are not."""
    names = [one.name for one in info.variants]
    if not names or not wanted:
        return (), dict.fromkeys(names, "variants are off")
    named = {one.name for one in packs}
    reasons = verdicts(info, functools.partial(variant_digests, backend), device)
    used = tuple(Loaded.from_entry(PACK, name) for name, reason in reasons.items() if not reason and name not in named)
    return used, {name: reason for name, reason in reasons.items() if reason and name not in named}


def variant_digests(backend: Loaded, name: str) -> dict[str, str] | None:
    """Digests of the code that a judgement of the backend's variant `name` stands for: of the backend, and of the whole package
    that the variant's pack is a part of. None where that is not installed."""
    if name not in find(PACK.group):
        return None
    pack = Loaded.from_entry(PACK, name).plugin
    module = getattr(pack, "__name__", "") if isinstance(pack, ModuleType) else type(pack).__module__
    return {"backend": backend.digest, "variant": digest(sys.modules.get(module.partition(".")[0], pack))}


# -- what is installed -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Found:
    """One installed backend as `doctor` shows it: its identity, or why it could not be asked."""

    name: str
    origin: str
    info: BackendInfo | None
    problem: str = ""
    digest: str = ""


def survey() -> Iterator[Found]:
    """Every installed backend, in name order; a broken one is reported, not raised."""
    for name, entries in find(BACKEND.group).items():
        where = " and ".join(map(origin, entries))
        try:
            one = Loaded.from_entry(BACKEND, name)
            yield Found(name, where, identify(one), digest=one.digest)
        except PluginError as error:
            yield Found(name, where, None, str(error))


def visible_devices(name: str) -> tuple[str, ...]:
    """Devices of an installed backend that can be opened now and that its identity cannot tell of; () where it looks for none.
    Raises `DeviceError` where it cannot find out."""
    manager, hook = Manager((Loaded.from_entry(BACKEND, name),)), "polydraft_visible_devices"
    return tuple(manager.hook.polydraft_visible_devices()) if manager.answering(hook) else ()
