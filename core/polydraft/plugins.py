"""Owns one engine's plugins: what was named, one plugin manager for it, and the typed facade through which hooks are asked.

The engine, `doctor` and the conformance kit call it before the first step; everything wrong with a plugin is said here,
naming plugin, hook and fix. It never loads what nobody named: an installed but unselected plugin changes nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from polydraft import hooks
from polydraft.backend import BackendInfo, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
from polydraft.contracts.base import Limits
from polydraft.device import Device, GraphCapture
from polydraft.errors import DeviceError, PluginError, PolydraftError
from polydraft.kernel_table import BoundTable, Override, PackTable, Shadowed, lay_over
from polydraft.plugin_checks import (
    BACKEND,
    EXTENSION,
    EXTENSION_HOOKS,
    PACK,
    PartialTable,
    Role,
    check_bring_up,
    check_claims,
    check_hooks,
    check_info,
    check_result,
    check_table,
    implemented,
)
from polydraft.plugin_loading import digest, find, load_entry, load_file, origin
from polydraft.variants import verdicts

__all__ = [
    "BACKENDS",
    "EXTENSIONS",
    "KERNELS",
    "BoundTable",
    "Found",
    "Loaded",
    "Override",
    "Plugins",
    "Shadowed",
    "find",
    "survey",
]

BACKENDS, KERNELS, EXTENSIONS = BACKEND.group, PACK.group, EXTENSION.group
"""The three entry-point groups."""


@dataclass(frozen=True)
class Loaded:
    """A plugin that was named, imported and checked: what errors call it, what it is for, where it came from. A backend has
    said who it is (`info`)."""

    name: str
    role: Role
    origin: str
    plugin: object
    digest: str
    info: BackendInfo | None = None

    @classmethod
    def from_entry(cls, role: Role, name: str, spec: str = "") -> Loaded:
        """Import the entry point `name` of the role's group. A backend must call itself by that name; `spec` is the device that
        it is asked about."""
        plugin = load_entry(role.group, name)
        check_hooks(name, plugin, role)
        info = _identity(name, plugin, spec) if role is BACKEND else None
        if info is not None and info.name != name:
            raise PluginError(
                f"plugin {name!r} ({origin(find(role.group)[name][0])}): polydraft_backend_info names it {info.name!r}, wanted "
                "the name of its entry point; make the two equal"
            )
        return cls(name, role, origin(find(role.group)[name][0]), plugin, digest(plugin), info)

    @classmethod
    def from_option(cls, where: str, spec: str = "") -> Loaded:
        """What `--plugin` names: a file, an installed extension, or a module. Hooks tell what a file or module is for."""
        if where in find(EXTENSIONS):
            return cls.from_entry(EXTENSION, where)
        module = load_file(where)
        have = implemented(module)
        role = BACKEND if "polydraft_backend_info" in have else PACK if "polydraft_kernels" in have else EXTENSION
        name = Path(where).stem if where.endswith(".py") else where
        check_hooks(name, module, role)
        info = _identity(name, module, spec) if role is BACKEND else None
        return cls(info.name if info else name, role, where, module, digest(module), info)

    @classmethod
    def from_object(cls, plugin: object, spec: str = "") -> Loaded:
        """Take a backend that is at hand already."""
        name = getattr(plugin, "__name__", type(plugin).__name__)
        check_hooks(name, plugin, BACKEND)
        info = _identity(name, plugin, spec)
        return cls(info.name, BACKEND, name, plugin, digest(plugin), info)

    def report(self) -> dict[str, str]:
        """Name, role, origin and digest, for `doctor` and every report."""
        return {"name": self.name, "role": self.role.noun, "origin": self.origin, "digest": self.digest}


@dataclass(frozen=True)
class Plugins:
    """One engine's plugins: a manager of its own, and the backend, packs and extensions that were named.

    `packs` lie in order of precedence; the first `num_ordered` of them are those that the user put in order."""

    manager: pluggy.PluginManager
    backend: Loaded
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
        given = [Loaded.from_option(where, device) for where in files]
        chosen = _pick(BACKEND, backend, given, device) if isinstance(backend, str) else Loaded.from_object(backend, device)
        ordered = [_pick(PACK, name, given) for name in packs]
        unordered = [one for one in given if one.role is PACK and one not in ordered]
        others = [Loaded.from_entry(EXTENSION, name) for name in extensions] + [one for one in given if one.role is EXTENSION]
        for one in given:
            if one.role is BACKEND and one is not chosen:
                raise PluginError(
                    f"--plugin {one.origin} brings the backend {one.name!r}, but {chosen.name!r} is selected; "
                    f"add --backend {one.name}, or leave the plugin out"
                )
        packs_ = (*ordered, *unordered)
        mine, unused = _variants(chosen, packs_, device, wanted=variants)
        manager = pluggy.PluginManager(hooks.PROJECT)
        manager.add_hookspecs(hooks)
        for one in (chosen, *packs_, *mine, *others):
            _register(manager, one)
        return cls(manager, chosen, packs_, tuple(others), len(ordered), mine, unused)

    @property
    def backend_name(self) -> str:
        """Name of the backend."""
        return self.backend.name

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
        assert self.backend.info is not None, "a backend has said who it is before it is chosen"
        return self.backend.info

    def info_on(self, spec: str) -> BackendInfo:
        """Its identity on another device, which is not opened."""
        return _identity(self.backend.name, self.backend.plugin, spec)

    def open_device(self, spec: str, options: DeviceOptions) -> Device:
        """Open the backend's device."""
        device: Device = self._ask(self.backend, "polydraft_open_device", Device, spec=spec, options=options)
        return device

    def kernels(self, device: Device) -> BoundTable:
        """The backend's table with the packs laid over it, first wins, and beneath them the variants that are used. Raises
        `PluginError` for a table that does not fit, and for two packs that claim one contract without an order."""
        hook = "polydraft_kernels"
        table: KernelTable = self._ask(self.backend, hook, KernelTable, device=device)
        check_table(self.backend.name, table)
        check_claims(self.backend.name, self.info(), table)
        check_bring_up(self.backend.name, self.info(), table)
        packs = []
        for place, pack in enumerate((*self.packs, *self.variants)):
            extra: PartialTable = self._ask(pack, hook, PartialTable, device=device)
            check_table(pack.name, extra)
            packs.append(PackTable(pack.name, pack.digest, extra, not len(self.packs) > place >= self.num_ordered))
        count = len(self.packs)
        return lay_over(self.backend.name, table, device, packs[:count], packs[count:])

    def graph_capture(self, device: Device) -> GraphCapture:
        """The backend's capture facility; asked for only when the capability is declared."""
        capture: GraphCapture = self._ask(self.backend, "polydraft_graph_capture", GraphCapture, device=device)
        return capture

    def init_forward_meta(self, device: Device, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
        """The backend's metadata for one kind of pass."""
        hook = "polydraft_init_forward_meta"
        meta: ForwardMeta = self._ask(self.backend, hook, ForwardMeta, device=device, buffers=buffers, limits=limits)
        return meta

    def off_device(self, spec: str) -> dict[str, Any]:
        """Which operations of a framework leave the device: `asked` whether the backend can say, `operations` their names by
        contract, `problem` why it could not be found out."""
        hook, answer = "polydraft_off_device", {"asked": False, "operations": {}, "problem": ""}
        if hook not in implemented(self.backend.plugin) or not self.info().available:
            return answer
        try:
            found: Mapping[str, Sequence[str]] = self._ask(self.backend, hook, Mapping, spec=spec)
        except DeviceError as error:
            return {**answer, "asked": True, "problem": str(error)}
        with _named(self.backend.name, hook):
            return {**answer, "asked": True, "operations": {str(name): list(map(str, names)) for name, names in found.items()}}

    def collect(self, hook: str, register: Callable[..., None]) -> None:
        """Run an extension hook of every loaded plugin, in order; `register` learns the plugin's name as `plugin=`."""
        for one in self._with(hook):
            self._ask(one, hook, None, register=functools.partial(register, plugin=one.name))

    def observers(self) -> list[hooks.StepObserver]:
        """Observers of every loaded plugin, in order."""
        hook, found = "polydraft_step_observers", []
        for one in self._with(hook):
            with _named(one.name, hook):
                mine = list(self._ask(one, hook, Iterable))
            for observer in mine:
                check_result(one.name, hook, observer, hooks.StepObserver)
            found += mine
        return found

    def _with(self, hook: str) -> list[Loaded]:
        return [one for one in self.loaded if hook in implemented(one.plugin)]

    def _ask(self, one: Loaded, hook: str, wanted: type | None, **arguments: Any) -> Any:
        """Ask one plugin one hook: no other plugin ever answers for it. `wanted` is the protocol of the answer."""
        if hook not in implemented(one.plugin):
            raise PluginError(f"plugin {one.name!r} lacks the hook {hook}; implement it (see polydraft.hooks)")
        others = [plugin for plugin in self.manager.get_plugins() if plugin is not one.plugin]
        with _named(one.name, hook):
            result = self.manager.subset_hook_caller(hook, others)(**arguments)
        if hook in EXTENSION_HOOKS:  # these have no first result but a list of them, here of one plugin's
            result = result[0] if result else None
        if wanted is not None:
            check_result(one.name, hook, result, wanted)
        return result


@contextmanager
def _named(name: str, hook: str) -> Iterator[None]:
    """What a hook raises without meaning to becomes an error that names it."""
    try:
        yield
    except PolydraftError:
        raise
    except Exception as error:
        raise PluginError(
            f"plugin {name!r}: {hook} raised {type(error).__name__}: {error}; repair the plugin, or raise a polydraft error with "
            "the next step"
        ) from error


def _identity(name: str, plugin: Any, spec: str) -> BackendInfo:
    """Ask a backend, whose hooks are checked, who it is on the device `spec`."""
    with _named(name, "polydraft_backend_info"):
        hook = plugin.polydraft_backend_info
        info = hook(spec=spec) if inspect.signature(hook).parameters else hook()
    return check_info(name, plugin, info)


def _pick(role: Role, name: str, given: Sequence[Loaded], spec: str = "") -> Loaded:
    """The plugin called `name` (or, from `--plugin`, located at it) for `role`."""
    mine = [one for one in given if one.role is role and name in {one.name, one.origin}]
    if not mine:
        return Loaded.from_entry(role, name, spec)
    claims = [f"--plugin {one.origin}" for one in mine] + [origin(entry) for entry in find(role.group).get(name, ())]
    if len(claims) > 1:
        raise PluginError(f"the {role.noun} {name!r} comes from {' and from '.join(claims)}; leave out or rename all but one")
    return mine[0]


def _register(manager: pluggy.PluginManager, one: Loaded) -> None:
    try:
        manager.register(one.plugin, f"{one.role.noun} {one.name}")
    except ValueError as error:
        raise PluginError(
            f"the {one.role.noun} {one.name!r} ({one.origin}) is named twice, or its module is also named as something else; "
            "name it once"
        ) from error
    except pluggy.PluginValidationError as error:  # whatever the checks did not foresee
        raise PluginError(
            f"plugin {one.name!r} does not fit a hook's signature: {' '.join(str(error).split())}; fix its arguments"
        ) from error


def _variants(
    backend: Loaded, packs: Sequence[Loaded], device: str, *, wanted: bool
) -> tuple[tuple[Loaded, ...], dict[str, str]]:
    """The backend's variants that are in use besides the packs that were named, and why the others are not."""
    assert backend.info is not None, "a backend has said who it is before it is chosen"
    names = [one.name for one in backend.info.variants]
    if not names or not wanted:
        return (), dict.fromkeys(names, "variants are off")
    named = {one.name for one in packs}
    reasons = verdicts(backend.info, functools.partial(variant_digests, backend), device)
    used = tuple(Loaded.from_entry(PACK, name) for name, reason in reasons.items() if not reason and name not in named)
    return used, {name: reason for name, reason in reasons.items() if reason and name not in named}


def variant_digests(backend: Loaded, name: str) -> dict[str, str] | None:
    """Digests of the code that a judgement of the backend's variant `name` stands for: of the backend, and of the whole package
    that the variant's pack is a part of. None where that is not installed."""
    if name not in find(KERNELS):
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
    for name, entries in find(BACKENDS).items():
        where = " and ".join(map(origin, entries))
        try:
            one = Loaded.from_entry(BACKEND, name)
            yield Found(name, where, one.info, digest=one.digest)
        except PluginError as error:
            yield Found(name, where, None, str(error))
