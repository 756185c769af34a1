"""A backend with variants, written into a folder as installed packages, for tests of what `--enable-variants` finds and files.

The tests of variants call it. Variants here serve `swiglu`, quick to check: one computes as the reference does, one is wrong, one
ends its process, one waits for ever.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.plugin_doubles import Packages
from tests.support.project import ROOT

BACKEND = """
import dataclasses, json, pathlib
from polydraft import hookimpl
from polydraft.backend import Variant
from {base} import *
import {base} as base

@hookimpl
def polydraft_backend_info(spec):
    runs_with = json.loads((pathlib.Path(__file__).parent / "runs_with.json").read_text())
    info = base.polydraft_backend_info(spec=spec)
    variants = tuple(Variant(f"chip-{{kind}}", ("swiglu",), f"a {{kind}} kernel") for kind in {kinds})
    return dataclasses.replace(info, name="chip", variants=variants, runs_with=runs_with)
"""
HOOKS = """
for name in vars(base):
    if name.startswith("polydraft_") and name != "polydraft_backend_info":
        globals()[name] = getattr(base, name)
"""
PACK = """
import os, time
from types import SimpleNamespace
from polydraft import hookimpl
import {base} as base

class Broken:
    def __init__(self, provider):
        self.provider = provider

    def workspace_bytes(self, args, limits):
        return self.provider.workspace_bytes(args, limits)

    def bind(self, args, limits, workspace):
        launch = self.provider.bind(args, limits, workspace)

        def run(stream, n):
            if {kind!r} == "deadly":
                os._exit(9)
            while {kind!r} == "endless":
                time.sleep(0.05)
            if {kind!r} != "wrong":
                launch(stream, n)

        return run

@hookimpl
def polydraft_kernels(device):
    table = base.polydraft_kernels(device=device)
    return SimpleNamespace(providers={{"swiglu": Broken(table.providers["swiglu"])}}, versions={{"swiglu": 1}})
"""


class Chip:
    """The backend `chip`, a copy of `base`, with a variant `chip-KIND` of every kind."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], base: str) -> None:
        self.root = root / "packages"
        self.root.mkdir()
        self.runs_with(device="chip 1", driver="7.0", library="chiplib 2.1")
        packages = Packages(self.root, monkeypatch)
        packages.install("chip", (BACKEND + HOOKS).format(base=base, kinds=kinds), backends="chip = chip")
        for kind in kinds:
            packages.install(f"chip_{kind}", PACK.format(base=base, kind=kind), kernels=f"chip-{kind} = chip_{kind}")
        monkeypatch.setenv("POLYDRAFT_CACHE_DIR", str(root / "cache"))
        monkeypatch.setenv("PYTHONPATH", f"{self.root}:{ROOT}")

    def runs_with(self, **what: str) -> None:
        """Change what the backend says that it runs with."""
        (self.root / "runs_with.json").write_text(json.dumps(what))

    def change_code(self, module: str) -> None:
        """Change the code of a package without changing what it does."""
        path = self.root / f"{module}.py"
        path.write_text(path.read_text() + "# another line\n")
