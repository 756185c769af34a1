"""The list of kernels: which module serves which contract or composite.

The identity hook takes the names from it, the table takes the providers. Importing it loads no CUDA library and compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import import_module
from typing import Final

from polydraft_cuda.kernels.provider import Kernel

MODULES: Final = (
    "scatter",
    "pack",
    "rows",
    "norms",
    "linear",
    "rope",
    "attention",
    "mlp",
    "routing",
    "experts",
    "leaves",
    "process",
    "sampling",
    "verify",
    "commit",
    "draft",
    "logprobs",
)
"""Modules of this folder in the order of a step; each has `KERNELS`, and no two serve one contract."""


@functools.cache
def kernels() -> Mapping[str, Kernel]:
    """Contract (or composite) name to kernel."""
    found: dict[str, Kernel] = {}
    for name in MODULES:
        found.update(import_module(f"polydraft_cuda.kernels.{name}").KERNELS)
    return found


def versions() -> dict[str, int]:
    """Contract (or composite) name to the version of the contract that its kernel was written for."""
    from polydraft.contracts import COMPOSITES, REGISTRY

    return {name: 1 if name in COMPOSITES else REGISTRY[name].version for name in kernels()}
