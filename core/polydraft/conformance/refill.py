"""Weights that are filled anew at their addresses: cases for checks of what kernels that are bound to them make of it.

L0 launches such kernels, L3 replays them, L6 looks at what refilling leaves in use. What an engine does with new weights is
looked at in `host_checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.conformance.harness import Bound, weights_of
from polydraft.conformance.kernel_checks import legal, named_cases
from polydraft.conformance.modes import kinds
from polydraft.conformance.target import Opened, Target
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Case, Contract
from polydraft.contracts.packing import Matrix, PackedWeight


def cases(target: Target, opened: Opened) -> Iterator[tuple[Contract, Case, Case]]:
    """Of each contract that the table serves and that has weights: a case with all of them, and one of each kind of numbers in
    which the backend takes them packed; each with the same on other weights."""
    order = target.info.capabilities.row_order
    for kernel in REGISTRY:
        names = weights_of(kernel)
        if not names or kernel.name not in opened.table.providers:
            continue
        whole = max(
            (one for one in named_cases(kernel) if one.n), key=lambda one: sum(one.arrays.get(n) is not None for n in names)
        )
        for one in (whole, *_packed(kernel, target)):
            case = legal(one, order)
            arrays = {
                name: _other(value) if name in names and value is not None else value for name, value in case.arrays.items()
            }
            yield kernel, case, replace(case, name=f"{case.name}, on other weights", arrays=arrays)


def _packed(kernel: Contract, target: Target) -> Iterator[Case]:
    """One case of each kind of numbers, with zero points and without."""
    declared = getattr(target.info.capabilities, kernel.packings) if kernel.packed_cases else ()
    for packing in kinds(declared):
        assert kernel.packed_cases
        yield next(one for one in kernel.packed_cases(packing) if one.n)


def _other(value: Matrix) -> Matrix:
    """A weight of the same form with other contents: numbers, scales and zero points alike."""
    if not isinstance(value, PackedWeight):
        return np.asarray(-np.roll(value, 1, axis=0) - np.float32(0.5))
    numbers = np.ascontiguousarray(np.flip(value.numbers, axis=-2))
    zeros = None if value.zeros is None else np.asarray(15 - value.zeros, np.uint8)
    return replace(value, numbers=numbers, scales=value.scales * np.float32(2), zeros=zeros)


def bound(kernel: Contract, case: Case, target: Target, opened: Opened, init_meta: Any) -> Bound:
    """The kernel on the first dtype that is declared, over copies of the weights: a backend may keep what it is given, and a
    refill would then write into the case itself."""
    act = target.info.capabilities.dtypes[0]
    weights = {name: deepcopy(case.arrays[name]) for name in weights_of(kernel)}
    own = replace(case, arrays={**case.arrays, **weights})
    return Bound(kernel, own, opened.device, opened.table, act=act, init_meta=init_meta)
