"""The kernel table of the reference backend: which NumPy kernel serves which contract, weights, caches and scratch.

`polydraft_kernels` returns it; the queued device reuses it unchanged through `device.bind_kernel`. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polydraft.backend import CacheSpec, Collectives, Weight
from polydraft.contracts.base import Provider
from polydraft.contracts.packing import Matrix, Packing
from polydraft.device import Array
from polydraft.errors import ContractError
from polydraft.ranks import Group
from polydraft.reference.kv_grid import to_grid
from polydraft.reference.packed_weights import packing_of, unpacked
from polydraft.reference.provider import Kernel


class NumpyWeight:
    """A weight as a C-contiguous float32 array, in its canonical shape, and how it came packed."""

    __slots__ = ("array", "packing", "role")

    def __init__(self, role: str, array: Array, packing: Packing | None = None) -> None:
        self.role, self.array, self.packing = role, array, packing

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


class NumpyCache:
    """One layer's KV rows as `kv` [2, num_kv_heads, num_blocks * block_size, head_dim]: keys, then values, heads outermost so
    that one gather serves a whole head. Fresh rows hold NaN: reading one that was never written shows. Quantised rows are float32
    numbers on their grid, which takes as much memory as others."""

    __slots__ = ("_settle", "kv", "spec")

    def __init__(self, spec: CacheSpec, rows: Array, settle: Callable[[], object] = lambda: None) -> None:
        self.spec, self.kv, self._settle = spec, rows, settle
        rows.fill(np.nan)

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def read_logical(self) -> tuple[Array, Array]:
        """(k, v) as [num_blocks, block_size, num_kv_heads, head_dim]; tests only."""
        self._settle()
        s = self.spec
        logical = self.kv.reshape(2, s.num_kv_heads, s.num_blocks, s.block_size, s.head_dim).transpose(0, 2, 3, 1, 4)
        return logical[0].copy(), logical[1].copy()

    def write_logical(self, k: Array, v: Array) -> None:
        """Overwrite all rows; tests only."""
        self._settle()
        for index, value in enumerate((k, v)):
            value = to_grid(value, self.spec.kv) if self.spec.kv else value  # noqa: PLW2901  as it is kept
            self.kv[index] = value.transpose(2, 0, 1, 3).reshape(self.kv.shape[1:])


def kernels(row_invariant: bool) -> dict[str, Kernel]:
    """Contract (or composite) name to kernel; `row_invariant` chooses fixed-tile arithmetic where it matters."""
    from polydraft.reference import (
        constraints,
        experts,
        invariant_kernels,
        leaves,
        logprobs,
        numeric_kernels,
        processing,
        rejection,
        state_kernels,
        thinking,
    )

    table = {**state_kernels.KERNELS, **numeric_kernels.KERNELS, **processing.KERNELS, **rejection.KERNELS, **logprobs.KERNELS}
    table.update(constraints.KERNELS)
    table.update(thinking.KERNELS)
    table.update(experts.KERNELS)
    table.update(leaves.KERNELS)
    if row_invariant:
        table.update(invariant_kernels.KERNELS)
    return table


def kernel_names() -> list[str]:
    """Names served, for identity."""
    return sorted(kernels(row_invariant=False))


class NumpyTable:
    """The `KernelTable` of every NumPy device."""

    def __init__(self, device: Any) -> None:
        chosen = kernels(device.row_invariant)
        from polydraft.contracts import COMPOSITES, REGISTRY

        self.providers: Mapping[str, Provider] = {name: device.bind_kernel(kernel) for name, kernel in chosen.items()}
        self.versions: Mapping[str, int] = {n: 1 if n in COMPOSITES else REGISTRY[n].version for n in chosen}
        self._device = device

    def prepare_weight(self, role: str, value: Matrix, dtype: str, previous: Weight | None = None) -> Weight:
        """Keep the canonical array in float32; `previous` is refilled at its address."""
        if dtype != "f32":
            raise ContractError(f"the reference backend computes in f32, got dtype {dtype!r}; leave --dtype on auto")
        if previous is None:
            array, pages = unpacked(value), self._device.pages
            if pages is not None:
                array, canonical = pages.empty("weight", array.shape, "f32"), array
                np.copyto(array, canonical)
            return NumpyWeight(role, array, packing_of(value))
        target: Array = previous.array  # type: ignore[attr-defined]
        if target.shape != value.shape:
            raise ContractError(f"weight update: got shape {value.shape}, wanted {target.shape}; load the same architecture")
        self._device.settle()
        np.copyto(target, unpacked(value))
        return previous

    def allocate_cache(self, spec: CacheSpec) -> NumpyCache:
        """A fresh cache, counted as one allocation; `DeviceError` when memory is short."""
        shape = (2, spec.num_kv_heads, spec.num_blocks * spec.block_size, spec.head_dim)
        pages = self._device.pages
        rows: Array = pages.empty("cache", shape, "f32") if pages else self._device.empty("cache", shape, "f32").host_array
        self._device.settle()
        return NumpyCache(spec, rows, self._device.settle)


def collectives(device: Any, group: Group) -> Collectives:
    """The collectives of any device that runs NumPy kernels (`device.bind_kernel`)."""
    from polydraft.contracts import COLLECTIVES
    from polydraft.ranks.kernels import kernels as of_ranks

    providers = {name: device.bind_kernel(kernel) for name, kernel in of_ranks(group).items()}
    return Collectives(providers, {one.name: one.version for one in COLLECTIVES})
