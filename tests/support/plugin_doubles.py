"""Plugins for tests of the seam: backends and packs put together from the reference's hooks, and fake installed packages.

`backend` and `pack` take what differs as arguments; `install` writes a package that `importlib.metadata` finds. The unit tests of
plugins, hooks and programs use them. Nothing is registered with the real installation: packages live in a temporary folder on
`sys.path`.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polydraft import hookimpl, reference
from polydraft.backend import BackendInfo
from polydraft.contracts.base import Limits, Provider, Workspace
from polydraft.device import Launch
from polydraft.reference.table import NumpyTable


def plugin(name: str, **hooks: Any) -> ModuleType:
    """A module called `name` with `hooks`; functions are marked, None takes a hook away."""
    module = ModuleType(name)
    for hook, value in hooks.items():
        if value is not None:
            bare = isinstance(value, types.FunctionType) and not hasattr(value, "polydraft_impl")
            setattr(module, hook, hookimpl(value) if bare else value)
    return module


def info(name: str = "double", **changes: Any) -> BackendInfo:
    """The reference's identity under another name; `changes` are fields of it or of its capabilities."""
    base = reference.polydraft_backend_info("")
    fields = {f.name for f in dataclasses.fields(BackendInfo)}
    caps = dataclasses.replace(base.capabilities, **{k: v for k, v in changes.items() if k not in fields})
    return dataclasses.replace(base, name=name, capabilities=caps, **{k: v for k, v in changes.items() if k in fields})


def backend(name: str = "double", /, *, changes: Any = None, **hooks: Any) -> ModuleType:
    """A backend that computes like the reference, on the CPU at once. `changes` (a mapping) go to its identity, `hooks` replace
    or, with None, remove hooks."""
    inherited = {hook: value for hook, value in vars(reference).items() if hook.startswith("polydraft_")}
    inherited.pop("polydraft_graph_capture")
    identity = {"polydraft_backend_info": lambda: info(name, **(changes or {}))}
    return plugin(name, **{**inherited, **identity, **hooks})


def backend_without(*contracts: str) -> ModuleType:
    """A backend that neither declares nor offers `contracts`."""

    def polydraft_kernels(device: Any) -> NumpyTable:
        table = NumpyTable(device)
        table.providers = {c: p for c, p in table.providers.items() if c not in contracts}
        table.versions = {c: table.versions[c] for c in table.providers}
        return table

    kept = {c: v for c, v in info().contract_versions.items() if c not in contracts}
    return backend(changes={"contract_versions": kept}, polydraft_kernels=polydraft_kernels)


@dataclasses.dataclass(frozen=True)
class Tagged:
    """A reference provider with an owner, so that a test can see whose kernel is used."""

    provider: Provider
    owner: str

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        return self.provider.bind(args, limits, workspace)

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        return self.provider.workspace_bytes(args, limits)


def pack_kernels(owner: str, *contracts: str, version: int = 1) -> Callable[[Any], Any]:
    """The hook `polydraft_kernels` of a pack that offers `contracts`."""

    def polydraft_kernels(device: Any) -> Any:
        table = NumpyTable(device)
        providers = {c: Tagged(table.providers[c], owner) for c in contracts}
        return SimpleNamespace(providers=providers, versions=dict.fromkeys(contracts, version))

    return polydraft_kernels


def pack_source(owner: str, *contracts: str) -> str:
    """The source of a kernel pack that offers `contracts`, for files and packages."""
    return (
        "from polydraft import hookimpl\nfrom tests.support.plugin_doubles import pack_kernels\n"
        f"polydraft_kernels = hookimpl(pack_kernels({owner!r}, *{contracts!r}))\n"
    )


class Packages:
    """A folder on `sys.path` into which a test installs packages."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._monkeypatch = root, monkeypatch
        monkeypatch.syspath_prepend(root)

    def install(self, name: str, source: str, **entries: str) -> Path:
        """Install the module `name` with entry points `group="entry = name"` (groups without the prefix `polydraft.`)."""
        self._monkeypatch.delitem(sys.modules, name, raising=False)
        path = self.root / f"{name}.py"
        path.write_text(source)
        folder = self.root / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        text = "".join(f"[polydraft.{group}]\n{entry}\n" for group, entry in entries.items())
        (folder / "entry_points.txt").write_text(text)
        return path
