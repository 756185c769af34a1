"""The way from a name to an imported plugin whose hooks are in order: entry points, files, modules, and digests of their code.

Only what somebody named is imported, and no hook is called here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from polydraft.errors import PluginError, UnknownPluginError
from polydraft.plugins.checks import BACKEND, EXTENSION, PACK, Role, answered, check_hooks


@dataclass(frozen=True)
class Loaded:
    """A plugin that was named, imported and checked: what errors call it, what it is for, where it came from."""

    name: str
    role: Role
    origin: str
    plugin: object
    digest: str
    entry: str = ""
    """Name of the entry point that it was loaded from, "" for any other."""

    @classmethod
    def from_entry(cls, role: Role, name: str) -> Loaded:
        """Import the entry point `name` of the role's group."""
        entry, plugin = load_entry(role.group, name)
        check_hooks(name, plugin, role)
        return cls(name, role, origin(entry), plugin, digest(plugin), name)

    @classmethod
    def from_option(cls, where: str) -> Loaded:
        """What `--plugin` names: a file, an installed extension, or a module. The hooks that it answers tell what it is for."""
        if where in find(EXTENSION.group):
            return cls.from_entry(EXTENSION, where)
        module = load_file(where)
        have = answered(module)
        role = BACKEND if "polydraft_backend_info" in have else PACK if "polydraft_kernels" in have else EXTENSION
        name = Path(where).stem if where.endswith(".py") else where
        check_hooks(name, module, role)
        return cls(name, role, where, module, digest(module))

    @classmethod
    def from_object(cls, plugin: object) -> Loaded:
        """Take a backend that is at hand already."""
        name = getattr(plugin, "__name__", type(plugin).__name__)
        check_hooks(name, plugin, BACKEND)
        return cls(name, BACKEND, name, plugin, digest(plugin))

    @property
    def label(self) -> str:
        """What a plugin manager knows it by: kind and name."""
        return f"{self.role.noun} {self.name}"

    def report(self) -> dict[str, str]:
        """Name, role, origin and digest, for `doctor` and every report."""
        return {"name": self.name, "role": self.role.noun, "origin": self.origin, "digest": self.digest}


def find(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Entry points of a group by name, sorted, so that installation order never matters. Several packages may claim one
    name: that is an error only for who asks for it."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=group), key=lambda e: (e.name, e.value)):
        same = found.setdefault(entry.name, [])
        if all(entry.value != other.value for other in same):
            same.append(entry)
    return {name: tuple(entries) for name, entries in found.items()}


def origin(entry: EntryPoint) -> str:
    """Package and object that an entry point names, for people."""
    return f"{entry.dist.name if entry.dist else 'unknown'} ({entry.value})"


def load_entry(group: str, name: str) -> tuple[EntryPoint, Any]:
    """Import the one plugin that was named: its entry point, and what that is of. Raises `PluginError` naming it, the cause and
    what to do."""
    installed = find(group)
    if name not in installed:
        there = ", ".join(installed) or "none"
        raise UnknownPluginError(f"no plugin {name!r} in {group}; installed: {there}; run `polydraft doctor`")
    entry, *others = installed[name]
    if others:
        raise PluginError(
            f"several packages register {name!r} in {group}: {' and '.join(map(origin, installed[name]))}; uninstall all but one"
        )
    try:
        return entry, entry.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {name!r} ({origin(entry)}) failed to import: {type(error).__name__}: {error}; "
            "repair or uninstall that package, or choose another plugin"
        ) from error


def load_file(where: str) -> ModuleType:
    """Import a plugin from a `FILE.py` path or an importable module name (`--plugin`). A file is run afresh each time."""
    try:
        return _run_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        for role, option in ((PACK, "--kernels"), (BACKEND, "--backend")):
            if where in find(role.group):
                raise UnknownPluginError(f"--plugin {where}: {where} is an installed {role.noun}; name it by {option}") from error
        raise PluginError(
            f"--plugin {where} failed to import: {type(error).__name__}: {error}; repair it, or give a path to a file or an "
            "importable module"
        ) from error


@lru_cache(maxsize=64)
def _compiled(path: str, source: bytes) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


class _AsItIsNow(SourceFileLoader):
    """Runs what the file says now. Python's own would run byte code of before where a file was edited twice within a second and
    has kept its length."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return _compiled(path, self.get_data(path))


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PluginError(f"--plugin {path}: no such Python file; give a path to a file or an importable module")
    # A name of its own, so that a file called like an installed module takes nothing's place.
    name = f"polydraft_file_plugin_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsItIsNow(name, str(path)))
    assert spec is not None, "a file that ends in .py has a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def digest(plugin: object) -> str:
    """First 16 hex digits of a SHA-256 over every file of the plugin's package, or over its single file; "unknown" for code
    that has no file."""
    module = plugin if isinstance(plugin, ModuleType) else sys.modules.get(getattr(plugin, "__module__", ""))
    file = getattr(module, "__file__", None)
    if file is None:
        return "unknown"
    path = Path(file)
    packaged = bool(getattr(module, "__package__", ""))
    files = sorted(p for p in path.parent.rglob("*") if p.is_file() and "__pycache__" not in p.parts) if packaged else [path]
    sha = hashlib.sha256()
    for each in files:
        sha.update(str(each.relative_to(path.parent)).encode())
        sha.update(each.read_bytes())
    return sha.hexdigest()[:16]
