"""The contracts: what each kernel of a step takes, writes and promises, with a float64 golden that defines its result.

The step program, backends, the conformance kit and the pages take the registry from here. Importing this package alone loads
no contract, so that `polydraft.backend` and plugins stay cheap to import. Taking `REGISTRY`, `COMPOSITES` or an argument
record (`LinearV1`) loads every module of `polydraft.contracts.kernels`: what lies there is the list of contracts, and no
other list exists. `COLLECTIVES` is the same for what lies in `polydraft.contracts.collectives`.
"""

from __future__ import annotations

import re
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polydraft.contracts.base import COLLECTIVES, REGISTRY, contract_named
    from polydraft.contracts.composite import COMPOSITES, Composite, CompositeArgs

__all__ = ["COLLECTIVES", "COMPOSITES", "REGISTRY", "Composite", "CompositeArgs", "contract_named"]

_RECORD = re.compile(r"[A-Z]\w*V[0-9]+")
"""Names of argument records."""


def _load() -> dict[str, Any]:
    """Import every module of contracts and the composites; return what this package exports, argument records among it."""
    for folder in ("kernels", "collectives"):
        package = import_module(f"polydraft.contracts.{folder}")
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    base, composite = import_module("polydraft.contracts.base"), import_module("polydraft.contracts.composite")
    names = {contract.args.__name__: contract.args for contract in (*base.REGISTRY, *base.COLLECTIVES)}
    names |= {name: getattr(composite, name) for name in ("COMPOSITES", "Composite", "CompositeArgs")}
    return names | {name: getattr(base, name) for name in ("REGISTRY", "COLLECTIVES", "contract_named")}


def __getattr__(name: str) -> Any:
    # Other names are not worth loading everything for: Python asks here before it imports a submodule.
    if name in __all__ or _RECORD.fullmatch(name):
        names = _load()
        if name in names:
            globals().update(names)
            return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
