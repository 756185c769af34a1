"""Checks of binding (L2): records that do not fit are refused, bindings are independent of each other, and each lasts.

They follow from the contract records alone, like everything at this level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
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
    random_case,
)
from polydraft.conformance.modes import Mode, first_mode, further_modes
from polydraft.conformance.target import Opened, Target
from polydraft.conformance.wear import DRAWN, FEW, LAUNCHES, MANY, Use, worn
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.arguments import misfits
from polydraft.contracts.base import Case, Contract, LogicalCache, OpaqueSpec, ParamSpec
from polydraft.contracts.composite import Composite
from polydraft.contracts.inputs import SEEDS, Kernel, contract_of, kernel_of, limits_of, symbols
from polydraft.errors import ContractError

LAYERS: Final = 96
"""Layers of one form: as many weights and caches as a list of a fixed length might not hold, and as large models have."""
LOOKED_AT: Final = (0, 1, 2, 3, *range(7, LAYERS, 8))
"""Those of which results are compared."""
TIED: Final = ("num_heads", "num_kv_heads", "head_dim", "block_size", "leaves", "split", "ahead", "given", "sliding_window")
"""Parameters that say how memory lies and what is in it, so that none can be changed alone, or that not everybody takes."""
SIDE_BY_SIDE: Final = 2
"""Cases of each kernel that are bound beside those of all others."""


def checks(options: Options) -> Iterator[Check]:
    """Three checks a contract or composite, more of contracts that have what they are about, and one of all; none where a case
    was asked for."""
    if options.case:
        return
    yield Check("L2/all-kernels/side-by-side", _side_by_side, basic=False)
    for kernel in (*REGISTRY, *COMPOSITES.values()):
        whole = isinstance(kernel, Composite)
        for name, run in (
            ("bound-again", partial(_bound_again, kernel)),
            ("new-contents", partial(_new_contents, kernel)),
            ("many-launches", partial(_many_launches, kernel, options.seed)),
        ):
            basic, id_ = name != "many-launches", f"L2/{kernel.name}/{name}"
            yield Check(id_, run, kernel=kernel.name, optional=whole, features=kernel.features, basic=basic)
    for contract in REGISTRY:
        run = partial(_refused, contract)
        yield Check(f"L2/{contract.name}/refused-arguments", run, kernel=contract.name, features=contract.features)
        if parameters(contract):
            run = partial(_other_parameters, contract)
            yield Check(f"L2/{contract.name}/other-parameters", run, kernel=contract.name, features=contract.features)
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
    kernel: Kernel
    other: Case
    opened: Opened
    act: str

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        """The launch of the first binding; the other is never used."""
        launch, table = self.provider.bind(args, limits, workspace), self.opened.table
        other: Any = record_of(self.kernel, self.other, self.opened.device, table, self.act)
        fitting = limits_of(contract_of(self.kernel), self.other)
        self.provider.bind(other, fitting, table.workspace(self.workspace_bytes(other, fitting)))
        return launch

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        """The provider's."""
        return int(self.provider.workspace_bytes(args, limits))


def _bound_again(kernel: Kernel, target: Target, tally: Tally) -> None:
    """Each binding is for itself: one of them does not take another's place."""
    opened, act = opened_for(target, kernel)
    provider = opened.table.providers[kernel.name]
    one, other = pairs(kernel.name, target.info.capabilities.row_order)[0]
    twice = Table(opened.table, {kernel.name: BoundAgain(provider, kernel, one, opened, act)})
    tally.compared(
        check_kernel(kernel, other, opened.device, twice, act=act, init_meta=opened.init_meta, products=opened.products)
    )


def parameters(kernel: Contract) -> list[str]:
    """Parameters of a contract that can be changed alone."""
    return [name for name, spec in kernel.args.specs().items() if isinstance(spec, ParamSpec) and name not in TIED]


@cache
def other_parameter(name: str, parameter: str) -> tuple[Case, Case] | None:
    """A case of the contract `name`, and the same with another value of one parameter, which makes a difference; None where that
    cannot be had. Of numbers a smaller one is taken, which leaves indices where they may be, or of floats one that is larger."""
    kernel = REGISTRY[name]
    drawn = [case for case in (*named_cases(kernel), *(random_case(kernel, seed) for seed in range(SEEDS))) if case.n]
    values = dict.fromkeys(case.params[parameter] for case in drawn)
    for case in drawn:
        mine = case.params[parameter]
        for value in (*values, *([4 * mine] if isinstance(mine, float) else [])):
            other = replace(case, name=f"{case.name}, {parameter}={value}", params={**case.params, parameter: value})
            if value != mine and not (isinstance(mine, int) and value > mine) and _fits(kernel, other):
                one, another = (run_golden(kernel, each) for each in (case, other))
                if any(not np.array_equal(one[n].value, another[n].value, equal_nan=True) for n in one):
                    return case, other
    return None


def _fits(kernel: Contract, case: Case) -> bool:
    """Whether the contract's constraints hold of a case, and its golden stays within its arrays."""
    try:
        symbols(kernel, case)
        run_golden(kernel, case)
    except (ContractError, IndexError):
        return False
    return True


def _other_parameters(kernel: Contract, target: Target, tally: Tally) -> None:
    """Bindings of one form that differ in a parameter alone, as those of a model and of its head, of layers or of two engines:
    what one was told, another one was not."""
    (opened, act), order = opened_for(target, kernel), target.info.capabilities.row_order
    found = [pair for one in parameters(kernel) if (pair := other_parameter(kernel.name, one)) is not None]
    _all_at_once([(kernel, legal(case, order)) for pair in found for case in pair], opened, act, tally)


def _many_layers(kernel: Contract, target: Target, tally: Tally) -> None:
    """As in a model of many layers, whose weights and caches are of one form: all of them are there before the first is used, and
    each layer's are its own."""
    opened, act = opened_for(target, kernel)
    first = pairs(kernel.name, target.info.capabilities.row_order)[0][0]
    cases = [_of_layer(first, layer) for layer in range(LAYERS)]
    _all_at_once([(kernel, case) for case in cases], opened, act, tally, LOOKED_AT)


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


def _all_at_once(
    bound: Sequence[tuple[Kernel, Case]], opened: Opened, act: str, tally: Tally, places: Sequence[int] = ()
) -> None:
    """Bind each kernel to its case, then launch all of them, then look at all, or at those at `places`."""
    each = [Bound(one, case, opened.device, opened.table, act=act, init_meta=opened.init_meta) for one, case in bound]
    for (_, case), one in zip(bound, each, strict=True):
        one.launch(opened.device.stream, case.n)
    for place in places or range(len(bound)):
        (kernel, case), one = bound[place], each[place]
        want = run_golden(kernel, case, act, products=opened.products)
        tally.compared(held(kernel, case, one.read(), want, act=act), f", beside {len(each) - 1} other bindings")


def _new_contents(kernel: Kernel, target: Target, tally: Tally) -> None:
    """Bound once, launched many times on contents that change at the same addresses: nothing is remembered, nothing wears out."""
    for place, cases in enumerate(pairs(kernel.name, target.info.capabilities.row_order)):
        _launched(kernel, first_mode(target), cases, FEW if place else LAUNCHES, target, tally)


def _many_launches(kernel: Kernel, seed: int, target: Target, tally: Tally) -> None:
    """The same for longer: more often than a counter or a ring of the kernel's own may hold, and a number that nobody knows; and
    for a while in every other mode."""
    count, first = MANY + int(np.random.default_rng(seed).integers(DRAWN)), first_mode(target)
    for mode in (first, *further_modes(kernel, target.info.capabilities)):
        _launched(kernel, mode, mode.cases(kernel, target), count if mode == first else FEW, target, tally)
    if tally.failures:
        tally.failures[0] += f" (rerun: {target.command} --check L2/{kernel.name}/many-launches --seed {seed})"


def _launched(kernel: Kernel, mode: Mode, cases: Sequence[Case], count: int, target: Target, tally: Tally) -> None:
    """One binding, launched `count` times on the contents of `cases`."""
    opened, _ = opened_for(target, kernel, mode.act, row_invariant=mode.row_invariant)
    bound = mode.bound(kernel, cases[0], opened, opened.init_meta)
    uses: dict[str, Use] = {f"launched, {mode.name}": partial(bound.launch, opened.device.stream)}
    worn(kernel, cases, bound, uses, tally, products=opened.products, count=count)
