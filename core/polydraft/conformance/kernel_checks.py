"""Level L2: every kernel against its golden, derived from the contract records alone.

A new contract has its checks as soon as it is registered. Each named case is one check, and each large one, of which `basic` has
one a contract; the generated ones are one check per contract, and so are those that the seed of the run draws.
Composites are checked as one kernel and as their expansion. Tolerances come from the contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any, Final

import numpy as np

from polydraft.backend import CacheSpec, RowOrder
from polydraft.conformance.check import Check, Tally, Unsupported, Wrong
from polydraft.conformance.harness import check_kernel, run_golden, run_kernel
from polydraft.conformance.target import Opened, Target
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Case, Contract, OpaqueSpec, TensorSpec
from polydraft.contracts.compare import Expected
from polydraft.contracts.composite import Composite, Expansion
from polydraft.contracts.inputs import FLEXIBLE, SEEDS, Kernel, contract_of, generated, kernel_of, optional_cases
from polydraft.contracts.kernels.rope_kv_write import border_case
from polydraft.contracts.kv_quant import KV_DTYPES, Kv
from polydraft.contracts.large import large, large_packed, large_sizes, models, of_model, several_large, sizes_of, surprise
from polydraft.contracts.packing import PACKINGS
from polydraft.contracts.sizes import Sizes, named
from polydraft.sentinels import Phase

DEEP_SEEDS: Final = 500
SURPRISES, MORE_SURPRISES, DEEP_SURPRISES = 3, 16, 200
"""Cases of a contract that the seed of a run draws: for `basic`, above it, and deep."""
COUNTED: Final = {"any": "N", "rows": "R", "logit_rows": "NL", "prompt_rows": "NL"}
"""Units whose buffers can grow by rows that carry nothing, and the symbol of their capacity."""
MARKS: Final = ("row_slot", "slot_order", "index", "ids", "draft_slot")
"""Inputs that say, by a negative number, that a row carries nothing."""
MOST_SEEDS: Final = 400
"""Generated cases among which two of one form are looked for."""
SPARE: Final = 3
"""Rows by which a bucket is larger."""
BY_SEQUENCE: Final = ("slot_order", "seq_rows")
"""Inputs of the packing contracts that count sequences; their other inputs of that size count slots."""


@dataclass(frozen=True)
class Options:
    """What was asked of L2: `case` runs that case alone, `seed` draws the surprises; `deep` means hundreds of generated cases
    and surprises a contract, the sizes of whole models, and every dtype."""

    seed: int = 0
    case: str = ""
    deep: bool = False


def checks(options: Options) -> Iterator[Check]:
    """Every check of L2, contract by contract."""
    for contract in REGISTRY:
        yield from _of_kernel(contract, options, optional=False)
    for composite in COMPOSITES.values():
        yield from _of_kernel(composite, options, optional=True)


def kernels() -> tuple[str, ...]:
    """Names of the contracts and composites that `checks` goes through; plugins may bring more."""
    return (*REGISTRY.names(), *COMPOSITES)


def _of_kernel(kernel: Kernel, options: Options, *, optional: bool) -> Iterator[Check]:
    def check(name: str, function: Any, *rest: Any, **fields: Any) -> Check:
        run = partial(function, kernel, *rest)
        return Check(f"L2/{kernel.name}/{name}", run, kernel=kernel.name, optional=optional, features=kernel.features, **fields)

    if options.case:
        yield from (check(name, function, *rest) for name, function, *rest in _asked(kernel, options))
        return
    yield from (check(case.name, _named, case.name) for case in named_cases(kernel))
    yield check("seeds", _seeds, range(DEEP_SEEDS if options.deep else SEEDS))
    for place, sizes in enumerate(large_sizes(kernel)):
        yield check(named(sizes), _large, sizes, basic=options.deep or not place)
    yield check("surprises", _surprises, options.seed, range(SURPRISES))
    most = DEEP_SURPRISES if options.deep else MORE_SURPRISES
    yield check("more-surprises", _surprises, options.seed, range(SURPRISES, most), basic=options.deep)
    if options.deep:
        yield from (check(f"model-{model}", _model, model) for model in models(kernel))
    if isinstance(kernel, Composite):
        yield Check(f"L2/{kernel.name}/expansion", partial(_expansion, kernel), features=kernel.features)
        return
    yield check("repeat", _repeat)
    yield check("guard-bands", _guard_bands)
    if kernel.unit in COUNTED:
        yield check("larger-bucket", _larger_bucket)
    if _has_free_rows(kernel):
        yield check("permuted-rows", _permuted)
    if is_float(kernel):
        yield check("other-dtypes", _other_dtypes, options)
        yield check("invariant-mode", _invariant_mode, needs=("row_invariant",))
        yield check("large-repeat", _large_repeat, basic=False)
    if _is_rowwise(kernel):
        yield check("row-alone", _row_alone, needs=("row_invariant",))
        yield check("large-row-alone", _large_row_alone, needs=("row_invariant",), basic=False)
    if kernel.grows and (is_float(kernel) or has_cache(kernel)):
        yield check("large-other-modes", _large_other_modes, basic=False)
    yield from _of_declared(kernel, check)


def _of_declared(kernel: Contract, check: Callable[..., Check]) -> Iterator[Check]:
    """Those of capabilities: quantised rows, packed weights, and what only some kernels of a contract can do."""
    yield from (check(f"kv-{kv}", _quantised, kv, needs=("kv_dtypes",)) for kv in (KV_DTYPES if has_cache(kernel) else ()))
    if kernel.packed_cases:
        yield from (check(f"packed-{one}", _packed, one, needs=(kernel.packings,)) for one in PACKINGS)
        yield check("large-packed", _large_packed, needs=(kernel.packings,), basic=False)
    for capability in kernel.optional_cases:
        yield check(capability.replace("_", "-"), _optional, capability, needs=(capability,))


def _asked(kernel: Kernel, options: Options) -> Iterator[tuple[Any, ...]]:
    """The check of the one case that was asked for, as name, function and its arguments: a named one, `seed-7`, `surprise-3`,
    `V-152064` (of any sizes) or `model-mimo-7b`. None where the contract has no such case."""
    name = options.case
    kind, _, which = name.partition("-")
    if name in [case.name for case in named_cases(kernel)]:
        yield name, _named, name
    elif kind == "model" and which in models(kernel):
        yield name, _model, which
    elif which.isdecimal() and kind == "seed":
        yield "seeds", _seeds, [int(which)]
    elif which.isdecimal() and kind == "surprise":
        yield "surprises", _surprises, options.seed, [int(which)]
    elif sizes := sizes_of(kernel, name):
        yield name, _large, sizes


# -- cases and goldens, which no backend changes -------------------------------------------------------
@cache
def _cases(name: str) -> tuple[Case, ...]:
    return tuple(contract_of(kernel_of(name)).cases())


def named_cases(kernel: Kernel) -> tuple[Case, ...]:
    """The named cases of a contract or composite."""
    return _cases(kernel.name)


def case_of(kernel: Kernel, name: str, target: Target) -> Case:
    """A named case, in an order that the backend declares."""
    found = next(case for case in named_cases(kernel) if case.name == name)
    return legal(found, target.info.capabilities.row_order)


@lru_cache(maxsize=2048)  # the few that most checks of a kernel begin with; they are small
def _drawn(name: str, seed: int) -> Case:
    return generated(kernel_of(name), seed)


def random_case(kernel: Kernel, seed: int) -> Case:
    """The generated case of one seed."""
    return _drawn(kernel.name, seed)


def _generated(kernel: Kernel, seed: int, target: Target) -> Case:
    return legal(random_case(kernel, seed), target.info.capabilities.row_order)


def all_cases(kernel: Kernel, target: Target, seeds: int) -> list[Case]:
    """The named cases and `seeds` generated ones, in an order that the backend declares."""
    order = target.info.capabilities.row_order
    return [legal(case, order) for case in (*named_cases(kernel), *(random_case(kernel, seed) for seed in range(seeds)))]


def legal(case: Case, row_order: RowOrder) -> Case:
    """The case with its sequences in the order that the backend declares, where it packs them: core promises no other one.

    For "slot" the slots are renamed, for "prefill_first" the sequences change places; what is packed stays the same work."""
    if row_order == "seeded" or not {"slot_order", "seq_rows", "phase"} <= set(case.arrays):
        return case
    order, arrays = case.arrays["slot_order"], dict(case.arrays)
    old = order[order >= 0]
    if row_order == "prefill_first":
        places = np.argsort(arrays["phase"][old] != Phase.PREFILL, kind="stable")
        for name in BY_SEQUENCE:
            arrays[name] = arrays[name].copy()
            arrays[name][: len(old)] = case.arrays[name][: len(old)][places]
        return replace(case, arrays=arrays)
    new, size = np.sort(old), len(order)
    for name, value in case.arrays.items():
        if name not in BY_SEQUENCE and value is not None and len(value) == size:
            arrays[name] = value.copy()
            arrays[name][new] = value[old]
    arrays["slot_order"] = order.copy()
    arrays["slot_order"][: len(new)] = new
    return replace(case, arrays=arrays)


Wants = Callable[[Case, Opened, str], Mapping[str, Expected]]
"""What the golden leaves of a case, on a device, for an activation dtype."""


def _wants(kernel: Kernel, kv: Kv = "") -> Wants:
    """The golden, run once for each case however many modes of a backend are held against it."""
    known: dict[tuple[int, str, str], tuple[Case, Mapping[str, Expected]]] = {}

    def want(case: Case, opened: Opened, act: str) -> Mapping[str, Expected]:
        key = id(case), act, opened.products
        if key not in known:  # with the case, whose id is its own as long as it is there
            known[key] = case, run_golden(kernel, case, act, kv=kv, products=opened.products)
        return known[key][1]

    return want


def _run(
    kernel: Kernel, case: Case, opened: Opened, tally: Tally, *, act: str, command: str, kv: Kv = "", seed: int | None = None,
    wants: Wants | None = None,
) -> None:  # fmt: skip
    want = None if wants is None else wants(case, opened, act)
    comparison = check_kernel(
        kernel, case, opened.device, opened.table, act=act, init_meta=opened.init_meta, products=opened.products, kv=kv, want=want
    )
    tally.compared(comparison, _rerun(kernel, case, command, seed))


def _rerun(kernel: Kernel, case: Case, command: str, seed: int | None = None) -> str:
    which = "" if " " in case.name else f" --case {case.name}" + ("" if seed is None else f" --seed {seed}")
    return f" (rerun: {command} --contract {kernel.name}{which})"


def _run_guarded(
    kernel: Kernel, case: Case, opened: Opened, tally: Tally, *, act: str, command: str, seed: int | None = None,
    wants: Wants | None = None,
) -> None:  # fmt: skip
    """As `_run`, with patterns around every buffer that have to survive; whatever goes wrong names the case."""
    from polydraft.conformance.guards import GuardedDevice

    device: Any = GuardedDevice(opened.device)
    again = _rerun(kernel, case, command, seed)
    try:
        _run(kernel, case, replace(opened, device=device), tally, act=act, command=command, seed=seed, wants=wants)
    except Exception as error:
        raise Wrong(f"{kernel.name}, case {case.name!r}: {type(error).__name__}: {error}{again}") from error
    known = len(tally.failures)
    device.hold(tally, case.name, _read)
    tally.failures[known:] = [failure + again for failure in tally.failures[known:]]


# -- checks --------------------------------------------------------------------------------------------
def opened_for(target: Target, kernel: Kernel, dtype: str = "", *, row_invariant: bool = False) -> tuple[Opened, str]:
    """The device on which a kernel is checked, and its activation dtype; one device a kernel."""
    act = dtype or target.info.capabilities.dtypes[0]
    return target.opened(dtype=act, row_invariant=row_invariant, key=kernel.name), act


def _named(kernel: Kernel, name: str, target: Target, tally: Tally) -> None:
    """One named case on poisoned outputs: values, inputs unchanged, rows beyond the launch untouched."""
    opened, act = opened_for(target, kernel)
    _run(kernel, case_of(kernel, name, target), opened, tally, act=act, command=target.command)


def _seeds(kernel: Kernel, seeds: Sequence[int], target: Target, tally: Tally) -> None:
    """Generated cases; a failure names its seed."""
    opened, act = opened_for(target, kernel)
    for seed in seeds:
        _run(kernel, _generated(kernel, seed, target), opened, tally, act=act, command=target.command)


def _large(kernel: Kernel, sizes: Sizes, target: Target, tally: Tally) -> None:
    """These dimensions at the sizes that products have, all else small; nothing beside any buffer is written."""
    opened, act = opened_for(target, kernel)
    case = legal(several_large(kernel, sizes), target.info.capabilities.row_order)
    _run_guarded(kernel, case, opened, tally, act=act, command=target.command)


def _surprises(kernel: Kernel, seed: int, numbers: Sequence[int], target: Target, tally: Tally) -> None:
    """Cases that are on no list, in each dtype in turn, and each second one of each by the kernels of a row-invariant engine
    where there are any: nobody can have tuned a kernel to them."""
    capabilities = target.info.capabilities
    for number in numbers:
        turn, dtype = divmod(number, len(capabilities.dtypes))
        invariant = capabilities.row_invariant and turn % 2 == 1
        opened, act = opened_for(target, kernel, capabilities.dtypes[dtype], row_invariant=invariant)
        case = legal(surprise(kernel, seed, number), capabilities.row_order)
        _run_guarded(kernel, case, opened, tally, act=act, command=target.command, seed=seed)


def _largest(kernel: Kernel) -> Iterator[Case]:
    """The largest case of each dimension."""
    return (large(kernel, symbol, ladder.steps[-1]) for symbol, ladder in contract_of(kernel).grows.items())


def _large_other_modes(kernel: Contract, target: Target, tally: Tally) -> None:
    """The largest cases in every further dtype, by the kernels of a row-invariant engine, and over quantised KV rows."""
    capabilities = target.info.capabilities
    first, others = capabilities.dtypes[0], capabilities.dtypes[1:] if is_float(kernel) else ()
    modes: list[tuple[str, bool, Kv]] = [(dtype, False, "") for dtype in others]
    modes += [(first, True, "")] if capabilities.row_invariant and is_float(kernel) else []
    modes += [(first, False, kv) for kv in KV_DTYPES if kv in capabilities.kv_dtypes and has_cache(kernel)]
    if not modes:
        raise Unsupported("it computes in one way alone")
    for act, invariant, kv in modes:
        opened, _ = opened_for(target, kernel, act, row_invariant=invariant)
        for case in _largest(kernel):
            _run(kernel, legal(case, capabilities.row_order), opened, tally, act=act, command=target.command, kv=kv)


def _model(kernel: Kernel, model: str, target: Target, tally: Tally) -> None:
    """All the sizes of a published model at once, in every dtype."""
    for dtype in target.info.capabilities.dtypes if is_float(kernel) else target.info.capabilities.dtypes[:1]:
        opened, act = opened_for(target, kernel, dtype)
        case = legal(of_model(kernel, model), target.info.capabilities.row_order)
        _run(kernel, case, opened, tally, act=act, command=target.command)


def _expansion(composite: Composite, target: Target, tally: Tally) -> None:
    """The composite's parts one after the other give what the composite's golden gives."""
    opened, act = opened_for(target, composite)
    lacking = [part for part in composite.parts if part not in opened.table.providers]
    if lacking:
        raise Unsupported(f"{', '.join(lacking)} is not offered")
    providers = {composite.name: Expansion(composite, opened.table.providers)}
    table = Table(opened.table, providers)
    for case in all_cases(composite, target, 5):
        tally.compared(
            check_kernel(composite, case, opened.device, table, act=act, init_meta=opened.init_meta, products=opened.products)
        )


class Table:
    """A kernel table with other providers."""

    def __init__(self, table: Any, providers: Mapping[str, Any]) -> None:
        self.providers, self.versions = providers, table.versions
        self.prepare_weight, self.allocate_cache = table.prepare_weight, table.allocate_cache


def _repeat(kernel: Contract, target: Target, tally: Tally) -> None:
    """What the contract calls deterministic gives the same bits again, in other memory."""
    if kernel.deterministic == "none":
        raise Unsupported("the contract promises no determinism")
    opened, act = opened_for(target, kernel)
    _same_again(kernel, _generated(kernel, 1, target), opened, tally, act=act)


def _same_again(kernel: Contract, case: Case, opened: Opened, tally: Tally, *, act: str) -> None:
    """A case twice, to the bit."""
    first, second = (run_kernel(kernel, case, opened.device, opened.table, act=act, init_meta=opened.init_meta) for _ in range(2))
    for name in first:
        tally.same_bits(f"{name} of the second run (case {case.name})", second[name], first[name])


def _guard_bands(kernel: Contract, target: Target, tally: Tally) -> None:
    """Memory in front of and behind every buffer of the launch keeps what it held."""
    from polydraft.conformance.guards import GuardedDevice

    opened, act = opened_for(target, kernel)
    for seed in (2, 3):
        device: Any = GuardedDevice(opened.device)
        case = _generated(kernel, seed, target)
        run_kernel(kernel, case, device, opened.table, act=act, init_meta=opened.init_meta)
        device.hold(tally, case.name, _read)


@cache
def pairs(name: str, row_order: RowOrder) -> tuple[tuple[Case, Case], ...]:
    """Pairs of cases of one form and other contents of the contract or composite `name`; where there is none, a case and the same
    with the rows of its floats moved on."""
    kernel = kernel_of(name)
    pool: dict[object, list[Case]] = {}
    drawn = (random_case(kernel, seed) for seed in range(MOST_SEEDS))  # no more of them than it takes
    for number, case in enumerate(chain(named_cases(kernel), drawn)):
        if case.n:
            pool.setdefault(_form(case), []).append(legal(case, row_order))
        if number > SEEDS and any(len(group) > 1 for group in pool.values()):
            break
    groups = sorted(pool.values(), key=len, reverse=True)
    pairs = [(group[0], group[1]) for group in groups if len(group) > 1]
    return tuple(pairs[:2]) or ((groups[0][0], moved_on(groups[0][0])),)


def moved_on(case: Case) -> Case:
    """The case with every row of float inputs one place further on."""
    floats = {n: v for n, v in case.arrays.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"}
    moved = {name: np.roll(value, 1, axis=0) for name, value in floats.items()}
    return replace(case, name=f"{case.name}, moved on", arrays={**case.arrays, **moved})


def _form(case: Case) -> object:
    """What has to be equal for two cases to fit the same buffers."""
    shapes = {name: _shapes(value) for name, value in case.arrays.items()}
    return repr((sorted(shapes.items()), sorted(case.params.items()), sorted(case.outputs.items())))


def _shapes(value: Any) -> Any:
    """The shape of an array or a cache, those of a tuple of columns, None of what was left out."""
    if isinstance(value, tuple):
        return tuple(map(_shapes, value))
    return None if value is None else getattr(value, "shape", None) or value.k.shape


def _read(device: Any, buffer: Any) -> Any:
    staging, event = device.staging("conform.read", buffer.shape, buffer.dtype), device.event()
    device.download(device.stream, staging, buffer, buffer.shape[0])
    event.record(device.stream)
    event.synchronize()
    return staging.array.copy()


def larger(contract: Contract, case: Case) -> Case:
    """The same work launched for `SPARE` more rows or sequences, which carry nothing: what a bucket does to a step."""
    symbol, specs = COUNTED[contract.unit], contract.args.specs()
    arrays, outputs = dict(case.arrays), dict(case.outputs)
    for name, spec in specs.items():
        if not isinstance(spec, TensorSpec) or spec.symbols[0] != symbol:
            continue
        if name in outputs:
            shape, dtype = outputs[name]
            outputs[name] = (shape[0] + SPARE, *shape[1:]), dtype
        elif arrays[name] is not None:
            empty = np.full((SPARE, *arrays[name].shape[1:]), -1 if name in MARKS else 0, arrays[name].dtype)
            arrays[name] = np.concatenate((arrays[name][: case.n], empty, arrays[name][case.n :]))
    return replace(case, name=f"{case.name} in a larger bucket", arrays=arrays, outputs=outputs, n=case.n + SPARE)


def _larger_bucket(kernel: Contract, target: Target, tally: Tally) -> None:
    """Rows and sequences that carry nothing, behind those that do, change nothing about them."""
    opened, act = opened_for(target, kernel)
    for seed in (4, 5):
        _run(kernel, larger(kernel, _generated(kernel, seed, target)), opened, tally, act=act, command=target.command)


def is_float(kernel: Kernel) -> bool:
    """Whether the activation dtype matters."""
    specs = contract_of(kernel).args.specs().values()
    return any(isinstance(s, OpaqueSpec) or (isinstance(s, TensorSpec) and s.dtype in FLEXIBLE) for s in specs)


def _other_dtypes(kernel: Contract, options: Options, target: Target, tally: Tally) -> None:
    """Every further dtype that is declared, on the named cases (and, deep, on the generated ones)."""
    others = target.info.capabilities.dtypes[1:]
    if not others:
        raise Unsupported(f"no dtype besides {target.info.capabilities.dtypes[0]} is declared")
    cases = all_cases(kernel, target, SEEDS if options.deep else 3)
    for dtype in others:
        opened, act = opened_for(target, kernel, dtype)
        for case in cases:
            _run(kernel, case, opened, tally, act=act, command=target.command)


def _invariant_mode(kernel: Contract, target: Target, tally: Tally) -> None:
    """The kernels that a row-invariant engine uses are the same contracts."""
    opened, act = opened_for(target, kernel, row_invariant=True)
    for case in all_cases(kernel, target, 5):
        _run(kernel, case, opened, tally, act=act, command=target.command)


def _has_free_rows(kernel: Contract) -> bool:
    """Whether rows may come in any order: every buffer is by row or by slot, and no cache ties rows together."""
    specs = kernel.args.specs().values()
    symbols = {s.symbols[0] for s in specs if isinstance(s, TensorSpec)}
    return "N" in symbols and symbols <= {"N", "B"} and not any(isinstance(s, OpaqueSpec) and s.kind == "cache" for s in specs)


def _permuted(kernel: Contract, target: Target, tally: Tally) -> None:
    """The launched rows in another order: each result belongs to its row, whoever stands beside it."""
    opened, act = opened_for(target, kernel)
    by_row = [n for n, s in kernel.args.specs().items() if isinstance(s, TensorSpec) and s.symbols[0] == "N"]
    for seed in range(6):
        case = random_case(kernel, seed)
        order = np.arange(max((len(v) for n, v in case.arrays.items() if n in by_row and v is not None), default=0))
        order[: case.n] = np.random.default_rng(seed).permutation(case.n)
        moved = {n: v[order] if n in by_row and v is not None else v for n, v in case.arrays.items()}
        _run(kernel, replace(case, arrays=moved, name=f"permuted seed {seed}"), opened, tally, act=act, command=target.command)


def has_cache(kernel: Kernel) -> bool:
    """Whether it reads or writes KV rows."""
    return any(isinstance(s, OpaqueSpec) and s.kind == "cache" for s in contract_of(kernel).args.specs().values())


def _quantised(kernel: Kernel, kv: Kv, target: Target, tally: Tally) -> None:
    """The same cases over a cache of quantised rows, in every dtype that is declared, and by the kernels of a row-invariant
    engine; fresh rows read as NaN."""
    capabilities = target.info.capabilities
    if kv not in capabilities.kv_dtypes:
        raise Unsupported(f"KV rows in {kv} are not declared")
    all_of, few, wants = all_cases(kernel, target, SEEDS), all_cases(kernel, target, 3), _wants(kernel, kv)
    borders = [border_case()] if kernel.name == "rope_kv_write" else []
    for dtype, invariant in dict.fromkeys([*((d, False) for d in capabilities.dtypes),
                                           (capabilities.dtypes[0], capabilities.row_invariant)]):  # fmt: skip
        opened, act = opened_for(target, kernel, dtype, row_invariant=invariant)
        for case in [*(all_of if dtype == capabilities.dtypes[0] else few), *borders]:
            want = wants(case, opened, act)
            comparison = check_kernel(
                kernel, case, opened.device, opened.table, act=act, init_meta=opened.init_meta, kv=kv, want=want
            )
            tally.compared(comparison, f" (rows in {kv}, activations in {act})")
        fresh = opened.table.allocate_cache(CacheSpec(3, 2, 2, 4, act, kv=kv))
        for half, rows in zip(("keys", "values"), fresh.read_logical(), strict=True):
            tally.true(f"fresh {half} read as NaN", bool(np.isnan(rows).all()))


def _optional(kernel: Kernel, capability: str, target: Target, tally: Tally) -> None:
    """The cases of a capability, in every dtype and form of KV rows that is declared, and by the kernels of a row-invariant
    engine."""
    declared = target.info.capabilities
    modes: list[tuple[str, bool, Kv]] = [(dtype, False, "") for dtype in declared.dtypes]
    modes += [(declared.dtypes[0], True, "")] if declared.row_invariant else []
    modes += [(declared.dtypes[0], False, kv) for kv in KV_DTYPES if kv in declared.kv_dtypes and has_cache(kernel)]
    for act, invariant, kv in modes:
        opened, _ = opened_for(target, kernel, act, row_invariant=invariant)
        for case in optional_cases(kernel, capability):
            _run(kernel, case, opened, tally, act=act, command=target.command, kv=kv)


def _packed(kernel: Contract, packing: str, target: Target, tally: Tally) -> None:
    """The cases of a packing, in every dtype that is declared, and by the kernels of a row-invariant engine, whose rows are the
    same alone."""
    declared = target.info.capabilities
    if packing not in getattr(declared, kernel.packings):
        raise Unsupported(f"weights packed as {packing} are not declared ({kernel.packings})")
    assert kernel.packed_cases
    modes = [(dtype, False) for dtype in declared.dtypes] + [(declared.dtypes[0], True)] * declared.row_invariant
    cases, wants = list(kernel.packed_cases(packing)), _wants(kernel)
    for act, invariant in modes:
        opened, _ = opened_for(target, kernel, act, row_invariant=invariant)
        for case in cases:
            _run_guarded(kernel, case, opened, tally, act=act, command=target.command, wants=wants)
            if invariant:
                _each_row_alone(kernel, case, opened, tally, act=act)


def _large_packed(kernel: Contract, target: Target, tally: Tally) -> None:
    """Matrices at the sizes that products have, in every packing that is declared; nothing beside any buffer is written."""
    opened, act = opened_for(target, kernel)
    for packing in getattr(target.info.capabilities, kernel.packings):
        for case in large_packed(kernel, packing):
            _run_guarded(kernel, case, opened, tally, act=act, command=target.command)
            if tally.failures:  # to say what a large one looks like takes seconds
                return


def _is_rowwise(kernel: Contract) -> bool:
    """Whether rows of floats can be run one by one: what is written has one row a launched row, and what is read beside such rows
    are tables by slot, weights and a cache."""
    tensors = [s for s in kernel.args.specs().values() if isinstance(s, TensorSpec)]
    opaque = [s for s in kernel.args.specs().values() if isinstance(s, OpaqueSpec)]
    by_row = all(s.symbols[0] == "N" or (s.symbols[0] == "B" and s.access == "in") for s in tensors)
    floats = any(s.access != "in" and s.dtype in (*FLEXIBLE, "f32") for s in tensors)
    return floats and by_row and all(s.access == "in" for s in opaque)


def _row_alone(kernel: Contract, target: Target, tally: Tally) -> None:
    """A row's bits do not depend on how many rows are launched, nor on its place: the claim `row_invariant`."""
    opened, act = opened_for(target, kernel, row_invariant=True)
    cases = [random_case(kernel, seed) for seed in range(SEEDS)]
    for case in [case for case in cases if case.n > 1][:4]:
        _each_row_alone(kernel, case, opened, tally, act=act)


def _large_row_alone(kernel: Contract, target: Target, tally: Tally) -> None:
    """The same of the largest cases: where sums are long and rows many, kernels choose other ways to add."""
    opened, act = opened_for(target, kernel, row_invariant=True)
    for case in chain(_largest(kernel), (several_large(kernel, sizes) for sizes in kernel.together)):
        _each_row_alone(kernel, case, opened, tally, act=act)


def _large_repeat(kernel: Contract, target: Target, tally: Tally) -> None:
    """What the contract calls deterministic gives the same bits again in its largest cases, where threads add together."""
    opened, act = opened_for(target, kernel)
    for case in _largest(kernel):
        _same_again(kernel, case, opened, tally, act=act)


def _each_row_alone(kernel: Contract, case: Case, opened: Opened, tally: Tally, *, act: str) -> None:
    """The first and the last row of a case, alone and among the others."""
    run = partial(run_kernel, kernel, device=opened.device, table=opened.table, act=act, init_meta=opened.init_meta)
    specs, together = kernel.args.specs(), run(case)
    tensors = {name: spec for name, spec in specs.items() if isinstance(spec, TensorSpec)}
    rows = [name for name, spec in tensors.items() if spec.symbols[0] == "N" and case.arrays.get(name) is not None]
    for row in {0, case.n - 1}:
        moved = {**case.arrays, **{name: np.roll(case.arrays[name], -row, axis=0) for name in rows}}
        alone = run(replace(case, arrays=moved, n=1))
        for name, spec in tensors.items():
            if spec.access != "in":
                tally.same_bits(f"{name} of row {row} alone (case {case.name})", alone[name][0], together[name][row])
