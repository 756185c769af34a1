"""Checks of binding (L2): records that do not fit are refused, bindings are independent of each other, and each lasts.

They follow from the contract records alone, like everything at this level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from polydraft.conformance.check import Check, Tally
from polydraft.conformance.harness import Bound, check_kernel, held, record_of, run_golden, run_kernel
from polydraft.conformance.kernel_checks import (
    Options,
    Table,
    case_of,
    legal,
    named_cases,
    opened_for,
    pairs,
)
from polydraft.conformance.target import Opened, Target
from polydraft.conformance.wear import DRAWN, FEW, LAUNCHES, MANY, worn
from polydraft.contracts import REGISTRY
from polydraft.contracts.arguments import misfits
from polydraft.contracts.base import Case, Contract, LogicalCache, OpaqueSpec
from polydraft.contracts.inputs import Kernel, kernel_of, limits_of
from polydraft.errors import ContractError

LAYERS: Final = 16
"""Layers of one form: as many weights and caches as a list of a fixed length might not hold."""
SIDE_BY_SIDE: Final = 2
"""Cases of each kernel that are bound beside those of all others."""


def checks(options: Options) -> Iterator[Check]:
    """Four checks a contract, one more where it has weights or caches, and one of all; none where a case was asked for."""
    if options.case:
        return
    yield Check("L2/all-kernels/side-by-side", _side_by_side, basic=False)
    for contract in REGISTRY:
        for name, run in (
            ("refused-arguments", partial(_refused, contract)),
            ("bound-again", partial(_bound_again, contract)),
            ("new-contents", partial(_new_contents, contract)),
            ("many-launches", partial(_many_launches, contract, options.seed)),
        ):
            basic = name != "many-launches"
            yield Check(f"L2/{contract.name}/{name}", run, kernel=contract.name, features=contract.features, basic=basic)
        if any(isinstance(spec, OpaqueSpec) and spec.kind in ("weight", "cache") for spec in contract.args.specs().values()):
            run = partial(_many_layers, contract)
            yield Check(f"L2/{contract.name}/many-layers", run, kernel=contract.name, features=contract.features, basic=False)


def _refused(kernel: Contract, target: Target, tally: Tally) -> None:
    """Every record that breaks the contract in one place is refused by a sentence that names it, and the provider works on as if
    nothing had been. What is refused follows from the contract's declaration (`contracts/arguments.py`)."""
    opened, act = opened_for(target, kernel)
    case = max((case_of(kernel, one.name, target) for one in named_cases(kernel) if one.n), key=lambda one: len(one.arrays))
    run = partial(run_kernel, kernel, case, opened.device, opened.table, act=act, init_meta=opened.init_meta)
    before = run()
    args: Any = record_of(kernel, case, opened.device, opened.table, act)
    limits = limits_of(kernel, case)
    opened.table.bind(kernel.name, args, limits)
    for misfit in misfits(kernel, args, lambda name, shape, dtype: opened.device.empty(f"conform.{name}", shape, dtype)):
        said = "nothing"
        try:
            opened.table.bind(kernel.name, misfit.args, limits)
        except ContractError as refusal:
            said = str(refusal)
        except Exception as error:  # noqa: BLE001  the provider has seen what it never should
            said = f"{type(error).__name__}: {error}"
        named = kernel.key in said and misfit.names in said
        wanted = f"a refusal that names {kernel.key} and {misfit.names or 'what does not fit'}"
        tally.true(f"{wanted}, when it is bound to {misfit.what}; binding says {said!r}", named)
    if kernel.deterministic != "none":
        for name, array in run().items():
            tally.same_bits(f"{name} behind what was refused", array, before[name])


@dataclass(frozen=True)
class BoundAgain:
    """A provider that is bound once more, to the memory of the case `other`, before its first launch is used."""

    provider: Any
    kernel: Contract
    other: Case
    opened: Opened
    act: str

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        """The launch of the first binding; the other is never used."""
        launch, table = self.provider.bind(args, limits, workspace), self.opened.table
        other: Any = record_of(self.kernel, self.other, self.opened.device, table, self.act)
        fitting = limits_of(self.kernel, self.other)
        self.provider.bind(other, fitting, table.workspace(self.workspace_bytes(other, fitting)))
        return launch

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        """The provider's."""
        return int(self.provider.workspace_bytes(args, limits))


def _bound_again(kernel: Contract, target: Target, tally: Tally) -> None:
    """Each binding is for itself: one of them does not take another's place."""
    opened, act = opened_for(target, kernel)
    provider = opened.table.providers[kernel.name]
    one, other = pairs(kernel.name, target.info.capabilities.row_order)[0]
    twice = Table(opened.table, {kernel.name: BoundAgain(provider, kernel, one, opened, act)})
    tally.compared(
        check_kernel(kernel, other, opened.device, twice, act=act, init_meta=opened.init_meta, products=opened.products)
    )


def _many_layers(kernel: Contract, target: Target, tally: Tally) -> None:
    """As in a model of many layers, whose weights and caches are of one form: all of them are there before the first is used, and
    each layer's are its own."""
    opened, act = opened_for(target, kernel)
    first = pairs(kernel.name, target.info.capabilities.row_order)[0][0]
    cases = [_of_layer(first, layer) for layer in range(LAYERS)]
    _all_at_once([(kernel, case) for case in cases], opened, act, tally)


def _of_layer(case: Case, layer: int) -> Case:
    """The case with other floats in each layer, none of them much larger."""
    factor = 1 + layer / LAYERS

    def scaled(value: Any) -> Any:
        if isinstance(value, LogicalCache):
            return LogicalCache(value.k * factor, value.v * factor)
        return np.asarray(value * factor, value.dtype) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value

    arrays = {name: scaled(value) for name, value in case.arrays.items()}
    return replace(case, name=f"{case.name} of layer {layer + 1}", arrays=arrays)


def _side_by_side(target: Target, tally: Tally) -> None:
    """Every kernel that there is, bound on one device before the first is launched, as engines with all features bind them."""
    opened, order = target.opened(key="all kernels"), target.info.capabilities.row_order
    kernels = [kernel_of(name) for name in opened.table.providers]
    bound = [(kernel, legal(case, order)) for kernel in kernels for case in named_cases(kernel)[:SIDE_BY_SIDE] if case.n]
    _all_at_once(bound, opened, target.info.capabilities.dtypes[0], tally)


def _all_at_once(bound: Sequence[tuple[Kernel, Case]], opened: Opened, act: str, tally: Tally) -> None:
    """Bind each kernel to its case, then launch all of them, then look."""
    each = [Bound(one, case, opened.device, opened.table, act=act, init_meta=opened.init_meta) for one, case in bound]
    for (_, case), one in zip(bound, each, strict=True):
        one.launch(opened.device.stream, case.n)
    for (kernel, case), one in zip(bound, each, strict=True):
        want = run_golden(kernel, case, act, products=opened.products)
        tally.compared(held(kernel, case, one.read(), want, act=act), f", beside {len(each) - 1} other bindings")


def _new_contents(kernel: Contract, target: Target, tally: Tally) -> None:
    """Bound once, launched many times on contents that change at the same addresses: nothing is remembered, nothing wears out."""
    opened, act = opened_for(target, kernel)
    for place, cases in enumerate(pairs(kernel.name, target.info.capabilities.row_order)):
        _launched(kernel, cases, FEW if place else LAUNCHES, opened, act, tally)


def _many_launches(kernel: Contract, seed: int, target: Target, tally: Tally) -> None:
    """The same for longer: more often than a counter or a ring of the kernel's own may hold, and a number that nobody knows."""
    opened, act = opened_for(target, kernel)
    count = MANY + int(np.random.default_rng(seed).integers(DRAWN))
    _launched(kernel, pairs(kernel.name, target.info.capabilities.row_order)[0], count, opened, act, tally)
    if tally.failures:
        tally.failures[0] += f" (rerun: {target.command} --check L2/{kernel.name}/many-launches --seed {seed})"


def _launched(kernel: Contract, cases: Sequence[Case], count: int, opened: Opened, act: str, tally: Tally) -> None:
    """One binding, launched `count` times on the contents of `cases`."""
    bound = Bound(kernel, cases[0], opened.device, opened.table, act=act, init_meta=opened.init_meta)
    launch = partial(bound.launch, opened.device.stream)
    worn(kernel, cases, bound, {"launched": launch}, tally, products=opened.products, count=count)
