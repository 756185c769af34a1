"""Backends that compute like the reference except for a few kernels, for tests that a faulty kernel is detected.

The tests of `tests/step` pass the result of `backend_with` to `LLM(plugin=...)`. What a backend declares is unchanged; only what
it computes differs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from polydraft.contracts import COMPOSITES
from polydraft.reference.provider import plain
from polydraft.reference.table import NumpyTable
from tests.support.plugin_doubles import backend


def backend_with(**kernels: Callable[[Any, int], None]) -> ModuleType:
    """A backend with these kernels, `function(a, n)` by contract; none of them may be part of a composite."""

    def polydraft_kernels(device: Any) -> NumpyTable:
        table = NumpyTable(device)
        replaced = {name: device.bind_kernel(plain(kernel)) for name, kernel in kernels.items()}
        table.providers = {**table.providers, **replaced}
        return table

    parts = {part for name in COMPOSITES for part in name.split("+")}
    assert not parts & set(kernels), "the fused kernel would run instead"
    return backend(polydraft_kernels=polydraft_kernels)
