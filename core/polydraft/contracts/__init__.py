"""The contracts: what each kernel of a step takes, writes and promises, with a float64 golden that defines its result.

The step program, backends, the conformance kit and the pages take the registry from here. Importing this package alone loads
no contract, so that `polydraft.backend` and plugins stay cheap to import. Taking `REGISTRY`, `COMPOSITES` or an argument
record (`LinearV1`) loads every module of `polydraft.contracts.kernels`: what lies there is the list of contracts, and no
other list exists.
"""

from __future__ import annotations

import re
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polydraft.contracts.base import REGISTRY
    from polydraft.contracts.composite import COMPOSITES, Composite, CompositeArgs

__all__ = ["COMPOSITES", "REGISTRY", "Composite", "CompositeArgs"]

_RECORD = re.compile(r"[A-Z]\w*V[0-9]+")
"""Names of argument records."""


def _load() -> dict[str, Any]:
    """Import every module of contracts and the composites; return what this package exports, argument records among it."""
    kernels = import_module("polydraft.contracts.kernels")
    for module in iter_modules(kernels.__path__, f"{kernels.__name__}."):
        import_module(module.name)
    registry = import_module("polydraft.contracts.base").REGISTRY
    composite = import_module("polydraft.contracts.composite")
    names = {contract.args.__name__: contract.args for contract in registry}
    return (
        names | {name: getattr(composite, name) for name in ("COMPOSITES", "Composite", "CompositeArgs")} | {"REGISTRY": registry}
    )


def __getattr__(name: str) -> Any:
    # Other names are not worth loading everything for: Python asks here before it imports a submodule.
    if name in __all__ or _RECORD.fullmatch(name):
        names = _load()
        if name in names:
            globals().update(names)
            return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
