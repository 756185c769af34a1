"""Owns loading: entry points by name, one plugin manager per engine, validation, and the table of bound callables.

The engine, `doctor` and the conformance kit call it before the first step; everything wrong with a plugin is said here,
naming plugin, hook and fix. It never loads what nobody named: an installed but unselected plugin changes nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from polydraft import hooks
from polydraft.backend import BackendInfo, DeviceOptions, ForwardMeta, KernelTable, PassBuffers, Weight
from polydraft.contracts.base import Limits, Provider
from polydraft.device import Array, Device, GraphCapture
from polydraft.errors import PluginError

BACKENDS = "polydraft.backends"
KERNELS = "polydraft.kernels"
EXTENSIONS = "polydraft.extensions"
REQUIRED_OF_BACKEND = (
    "polydraft_backend_info",
    "polydraft_open_device",
    "polydraft_kernels",
    "polydraft_init_forward_meta",
)


def find(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group by name, sorted, so that installation order never matters. Two packages claiming one name
    are an error that names both."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=lambda e: (e.name, e.value)):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise PluginError(
                f"two packages register {entry.name!r} in {group}: {_origin(other)} and {_origin(entry)}; uninstall one"
            )
        found[entry.name] = entry
    return found


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name if entry.dist else 'unknown'} ({entry.value})"


def load_entry(group: str, name: str) -> Any:
    """Import the one plugin that was named. Raises `PluginError` naming it, the cause and what to do."""
    entries = find(group)
    if name not in entries:
        raise PluginError(f"no plugin {name!r} in {group}; installed: {', '.join(entries) or 'none'}; run `polydraft doctor`")
    try:
        return entries[name].load()
    except Exception as error:
        raise PluginError(
            f"plugin {name!r} ({_origin(entries[name])}) failed to import: {type(error).__name__}: {error}; "
            "repair or uninstall that package, or choose another backend"
        ) from error


def load_file(where: str) -> ModuleType:
    """Import a plugin from a `FILE.py` path or an importable module name (`--plugin`)."""
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise PluginError(f"--plugin {where}: no such Python file; give a path to a file or an importable module")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"--plugin {where} failed to import: {type(error).__name__}: {error}; repair it") from error


def digest(plugin: object) -> str:
    """First 16 hex digits of a SHA-256 over the Python sources of the plugin's package (or its single file)."""
    file = getattr(plugin, "__file__", None)
    if file is None:
        return "unknown"
    path = Path(file)
    sources = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    sha = hashlib.sha256()
    for source in sources:
        sha.update(source.name.encode())
        sha.update(source.read_bytes())
    return sha.hexdigest()[:16]


def _check(manager: pluggy.PluginManager, plugin: object, name: str, required: Sequence[str]) -> None:
    """Register one plugin and say what is wrong with it: unknown hook, unknown argument, missing hook."""
    for attribute in dir(plugin):
        marked = getattr(getattr(plugin, attribute, None), f"{hooks.PROJECT}_impl", None)
        if ((attribute.startswith("polydraft_") and callable(getattr(plugin, attribute))) or marked is not None) and (
            attribute not in hooks.HOOKS
        ):
            raise PluginError(
                f"plugin {name!r} implements unknown hook {attribute!r}; known hooks: {', '.join(hooks.HOOKS)}; rename or remove it"
            )
        if attribute in hooks.HOOKS and marked is None:
            raise PluginError(f"plugin {name!r} defines {attribute} without @hookimpl; decorate it with polydraft.hookimpl")
    try:
        manager.register(plugin, name)
    except pluggy.PluginValidationError as error:
        raise PluginError(
            f"plugin {name!r} does not fit the hook's signature: {' '.join(str(error).split())}; fix its arguments"
        ) from error
    except ValueError as error:
        raise PluginError(f"plugin {name!r} is registered twice: {error}; name it once") from error
    for hook in required:
        if not hasattr(plugin, hook):
            raise PluginError(f"backend plugin {name!r} lacks the hook {hook}; implement it (see polydraft.hooks)")


@dataclass(frozen=True)
class Override:
    """A contract that an enabled kernel pack serves instead of the backend."""

    contract: str
    pack: str
    digest: str


@dataclass(frozen=True)
class BoundTable:
    """The kernel table of one engine: the backend's providers with those of enabled packs laid over it, in order."""

    backend: KernelTable
    providers: Mapping[str, Provider]
    versions: Mapping[str, int]
    overrides: tuple[Override, ...]

    def prepare_weight(self, role: str, value: Array, dtype: str, previous: Weight | None = None) -> Weight:
        """As `KernelTable.prepare_weight`, by the backend."""
        return self.backend.prepare_weight(role, value, dtype, previous)

    def allocate_cache(self, spec: Any) -> Any:
        """As `KernelTable.allocate_cache`, by the backend."""
        return self.backend.allocate_cache(spec)


@dataclass
class Plugins:
    """One engine's plugins: a manager of its own, the backend, packs and extensions that were named."""

    backend_name: str
    manager: pluggy.PluginManager
    backend: object
    packs: tuple[tuple[str, object], ...] = ()
    extensions: tuple[tuple[str, object], ...] = ()
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        backend: str | object,
        *,
        packs: Sequence[str] = (),
        extensions: Sequence[str] = (),
        files: Sequence[str] = (),
    ) -> Plugins:
        """Load what was named and validate it. `backend` is an entry-point name, or a plugin object (tests, `--plugin`)."""
        manager = pluggy.PluginManager(hooks.PROJECT)
        manager.add_hookspecs(hooks)
        loaded_files = [(where, load_file(where)) for where in files]
        provided = {
            module.polydraft_backend_info().name: module
            for _, module in loaded_files
            if hasattr(module, "polydraft_backend_info")
        }
        if isinstance(backend, str):
            name, plugin = backend, provided.get(backend) or load_entry(BACKENDS, backend)
        else:
            name, plugin = getattr(backend, "name", type(backend).__name__), backend
        _check(manager, plugin, name, REQUIRED_OF_BACKEND)
        loaded_packs = tuple((pack, load_entry(KERNELS, pack)) for pack in packs)
        loaded_extensions = [(e, load_entry(EXTENSIONS, e)) for e in extensions]
        loaded_extensions += [(where, m) for where, m in loaded_files if m is not plugin]
        for other, module in (*loaded_packs, *loaded_extensions):
            _check(manager, module, other, ())
        self = cls(name, manager, plugin, loaded_packs, tuple(loaded_extensions))
        self.digests = {n: digest(p) for n, p in ((name, plugin), *loaded_packs, *loaded_extensions)}
        return self

    def info(self) -> BackendInfo:
        """The backend's identity, checked for type."""
        info = self._call("polydraft_backend_info")
        if not isinstance(info, BackendInfo):
            raise PluginError(
                f"plugin {self.backend_name!r}: polydraft_backend_info returned {type(info).__name__}, wanted BackendInfo"
            )
        return info

    def open_device(self, spec: str, options: DeviceOptions) -> Device:
        """Open the backend's device."""
        device: Device = self._call("polydraft_open_device", spec=spec, options=options)
        return device

    def kernels(self, device: Device) -> BoundTable:
        """The backend's table with the packs laid over it; the first pack named wins, a clash without an order cannot arise."""
        table: KernelTable = self._call("polydraft_kernels", device=device)
        check_versions(self.backend_name, table)
        providers, versions = dict(table.providers), dict(table.versions)
        overrides: dict[str, Override] = {}
        for name, pack in self.packs:
            extra: KernelTable = pack.polydraft_kernels(device=device)  # type: ignore[attr-defined]
            check_versions(name, extra)
            for contract, provider in extra.providers.items():
                if contract not in overrides:
                    overrides[contract] = Override(contract, name, self.digests[name])
                    providers[contract], versions[contract] = provider, extra.versions[contract]
        return BoundTable(table, providers, versions, tuple(overrides.values()))

    def graph_capture(self, device: Device) -> GraphCapture:
        """The backend's capture facility; asked for only when the capability is declared."""
        capture: GraphCapture = self._call("polydraft_graph_capture", device=device)
        return capture

    def init_forward_meta(self, device: Device, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
        """The backend's metadata for one kind of pass."""
        meta: ForwardMeta = self._call("polydraft_init_forward_meta", device=device, buffers=buffers, limits=limits)
        return meta

    def collect(self, hook: str, register: Callable[..., None]) -> None:
        """Run an extension hook of every loaded plugin with `register`."""
        getattr(self.manager.hook, hook)(register=register)

    def observers(self) -> list[hooks.StepObserver]:
        """Observers of every loaded plugin, in registration order."""
        return [o for group in reversed(self.manager.hook.polydraft_step_observers()) for o in group]

    def _call(self, hook: str, **arguments: Any) -> Any:
        """Call one hook of the backend alone: other plugins never answer for it."""
        implementation = getattr(self.backend, hook, None)
        if implementation is None:
            raise PluginError(f"backend plugin {self.backend_name!r} lacks the hook {hook}; implement it (see polydraft.hooks)")
        caller = self.manager.subset_hook_caller(hook, [p for p in self.manager.get_plugins() if p is not self.backend])
        result = caller(**arguments)
        if result is None:
            raise PluginError(
                f"plugin {self.backend_name!r}: {hook} returned None; return the object that polydraft.hooks describes"
            )
        return result


def check_versions(name: str, table: KernelTable) -> None:
    """Every provider names a known contract or composite and a version that core serves (the newest or the one before)."""
    from polydraft.contracts import COMPOSITES, REGISTRY

    for contract in table.providers:
        if contract in COMPOSITES:
            continue
        if contract not in REGISTRY.names():
            raise PluginError(
                f"plugin {name!r}: polydraft_kernels offers unknown contract {contract!r}; see `polydraft contracts` for the names"
            )
        version, newest = table.versions.get(contract), REGISTRY[contract].version
        if version is None or not newest - 1 <= version <= newest:
            raise PluginError(
                f"plugin {name!r}: contract {contract!r} is version {version}, core serves {newest}; rebuild it for that version"
            )


@dataclass(frozen=True)
class Found:
    """One installed backend as `doctor` shows it: its identity, or why it could not be asked."""

    name: str
    origin: str
    info: BackendInfo | None
    problem: str = ""


def survey() -> Iterator[Found]:
    """Every installed backend, in name order; a broken one is reported, not raised."""
    for name, entry in find(BACKENDS).items():
        try:
            plugins = Plugins.load(name)
            yield Found(name, _origin(entry), plugins.info())
        except PluginError as error:
            yield Found(name, _origin(entry), None, str(error))
