"""Broken and minimal backends for tests of the kit, made from the reference and the emulator.

It also makes the one report of each whole backend that several tests look at. The tests of `tests/conformance` use it; it runs no
check by itself.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

from polydraft import reference
from polydraft.conformance.matrix import table
from polydraft.conformance.report import Report, Selection, conform
from polydraft.conformance.target import TableProxy, wrap
from polydraft.plugins.plugins import survey
from tests.support import emulator  # finds the plugin in this checkout
from tests.support.emulator import Emulator

__all__ = ["BACKENDS", "alone", "basic", "emulator", "installed", "kernels", "named", "raising", "unavailable"]

BACKENDS: dict[str, Any] = {"reference": reference, "emulator": Emulator("emulator:0?seed=3")}


@functools.cache
def basic(name: str) -> Report:
    """The report of a whole backend for the profile basic, made once."""
    return conform(BACKENDS[name], command=("polydraft", "conform", name))


@functools.cache
def installed() -> tuple[str, ...]:
    """Every backend that is installed, can run here and computes: what cross-backend tests run over."""
    found = [one.name for one in survey() if one.info is not None and one.info.available and one.info.evidence != "double only"]
    return (*BACKENDS, *(name for name in found if name not in BACKENDS))


@functools.cache
def kernels(name: str) -> Report:
    """A backend's report that has its kernels: of the whole profile where tests want that anyway."""
    return basic(name) if name == "reference" else conform(BACKENDS.get(name, name), selection=Selection(level="L2"))


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """The table of one backend, made once for the tests of each contract."""
    return table([kernels(name)])


def named(plugin: Any, name: str, **changes: Any) -> ModuleType:
    """The same backend under another name, which is then not the reference; `changes` go to its identity."""
    module = wrap(plugin, polydraft_backend_info=lambda info: dataclasses.replace(info, name=name, **changes))
    module.conformance_base = None  # type: ignore[attr-defined]
    return module


def unavailable() -> ModuleType:
    """A backend whose library is missing."""
    return named(reference, "absent", available=False, reason="the library is not installed; install it")


def raising(contract: str, error: type[Exception]) -> ModuleType:
    """A backend one of whose kernels raises."""

    class Raising:
        def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
            raise error(f"{contract} is not ready")

        def workspace_bytes(self, args: Any, limits: Any) -> int:
            return 0

    return wrap(reference, polydraft_kernels=lambda table, device: TableProxy(table, {contract: Raising()}))
