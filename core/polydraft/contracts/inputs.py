"""Builds the inputs of a contract run: its default cases, their sizes, and fresh poisoned arguments for a golden.

The harness, the adequacy gate and the tests of contracts use it for every run. It runs nothing, and does not fill in what a case
leaves out.

Activation dtype: a case holds its "act" floats, weights and caches in float32. A run for `act` rounds them to that
dtype first, for the golden and the kernel alike, so that what is compared is arithmetic and not rounding of inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from polydraft.contracts.arguments import constraint_fails
from polydraft.contracts.base import (
    Case,
    ColumnsSpec,
    Contract,
    Limits,
    LogicalCache,
    OpaqueSpec,
    ParamSpec,
    TensorSpec,
    column_index,
    column_name,
)
from polydraft.contracts.compare import EPS, from_host, to_host
from polydraft.contracts.composite import Composite, as_contract
from polydraft.contracts.kv_quant import quantise
from polydraft.contracts.packing import PackedWeight
from polydraft.device import DTYPES, Array
from polydraft.errors import ContractError

SEEDS: Final = 20
"""Generated cases of a contract that every run takes, beside the named ones."""

FLEXIBLE: Final = ("act", "float")
"""Dtype names that a run replaces: "act" by its activation dtype, "float" by what the case says of that output."""

Kernel = Contract | Composite
"""What a provider implements."""


@dataclass(frozen=True)
class Poison:
    """What memory holds that nobody has written. Both numbers are exact in every dtype they are used for and should
    occur in no case; the float is finite, since a NaN written and a NaN never overwritten could not be told apart."""

    real: float = -24576.0
    integer: int = 0x5A5A5A5A

    def of(self, dtype: str) -> float | int:
        """The poison of a dtype name, in canonical numbers."""
        return self.real if dtype in EPS else self.integer & (2 ** (8 * DTYPES[dtype].itemsize) - 1)


POISON: Final = Poison()


def kernel_of(name: str) -> Kernel:
    """The contract or composite called `name`. Raises `ContractError` for one that is not known here."""
    from polydraft.contracts import COMPOSITES, REGISTRY  # loads every contract

    return COMPOSITES[name] if name in COMPOSITES else REGISTRY[name]


@functools.cache
def _composition(composite: Composite) -> Contract:
    return as_contract(composite)


def contract_of(kernel: Kernel) -> Contract:
    """Return a contract as it is, a composite as one contract over the fields of all its parts."""
    return _composition(kernel) if isinstance(kernel, Composite) else kernel


def default_cases(kernel: Kernel, seeds: int = SEEDS) -> Iterator[Case]:
    """Yield the named cases, then `seeds` generated ones."""
    yield from contract_of(kernel).cases()
    for seed in range(seeds):
        yield generated(kernel, seed)


def optional_cases(kernel: Kernel, capability: str = "") -> Iterator[Case]:
    """Yield the cases that are asked only of who declares `capability`, or any of a contract's."""
    for name, cases in contract_of(kernel).optional_cases.items():
        if capability in ("", name):
            yield from cases()


def generated(kernel: Kernel, seed: int) -> Case:
    """Return the generated case of one seed, named `seed-<number>` and the same in every run."""
    contract = contract_of(kernel)
    return dataclasses.replace(contract.generate(np.random.default_rng(seed)), name=f"seed-{seed}")


def symbols(contract: Contract, case: Case) -> dict[str, int]:
    """Return the size of every shape symbol in this case.

    Raises `ContractError` where the case and the record disagree: an argument missing or unknown, a dtype that is not
    the declared one, axes or sizes that contradict the record or another argument, a negative launch length.
    """
    specs = contract.args.specs()
    unknown = sorted({*case.arrays, *case.outputs, *case.params} - set(specs))
    if unknown:
        raise _unusable(contract, case, ", ".join(unknown), "a value", f"fields of {contract.args.__name__} only")
    if case.n < 0:
        raise _unusable(contract, case, "the launch", f"length {case.n}", "0 or more")
    sizes: dict[str, int] = {}
    for name, spec in specs.items():
        if isinstance(spec, ParamSpec):
            if name not in case.params:
                raise _unusable(contract, case, name, "no value", "one")
            continue
        if isinstance(spec, ColumnsSpec):
            for column in _columns(contract, case, name):
                sizes.setdefault("B", len(column))
            continue
        shape = _shape(contract, case, name, spec)
        if shape is None or not spec.shape:
            continue
        axes = spec.shape.split()
        wanted = [int(s) if s.isdigit() else sizes.setdefault(s, size) for s, size in zip(axes, shape, strict=False)]
        if len(axes) != len(shape) or wanted != list(shape):
            raise _unusable(contract, case, name, f"shape {shape}", f"[{spec.shape}], here {wanted}")
    broken = constraint_fails(contract, sizes, case.params)
    if broken:
        raise _unusable(contract, case, "the whole", f"{sizes | dict(case.params)}", broken)
    return sizes


def _columns(contract: Contract, case: Case, name: str) -> tuple[Array, ...]:
    """The columns that a case gives to an argument."""
    columns: Any = case.arrays.get(name)
    legal = isinstance(columns, tuple) and all(c.dtype in (np.int32, np.float32) and c.ndim in (1, 2) for c in columns)
    if not legal or len({len(column) for column in columns}) != 1:
        raise _unusable(contract, case, name, f"{columns!r}", "a tuple of int32 or float32 arrays, [B] or [B, width]")
    return tuple(columns)


def _shape(contract: Contract, case: Case, name: str, spec: TensorSpec | OpaqueSpec) -> tuple[int, ...] | None:
    """The shape a case gives to an argument; None where there is none or the argument may be, and is, left out."""
    if isinstance(spec, TensorSpec) and spec.access == "out":
        shape, dtype = case.outputs.get(name, (None, ""))
        if shape is None or not (dtype == spec.dtype or (spec.dtype == "float" and dtype in ("act", "f32"))):
            raise _unusable(contract, case, name, f"{(shape, dtype)} in `outputs`", f"a shape and {spec.dtype}")
        return shape
    value = case.arrays.get(name)
    if value is None and _may_be_absent(contract, name):
        return None
    if isinstance(value, LogicalCache):
        return None
    if isinstance(value, PackedWeight):
        return value.shape
    wanted = DTYPES["f32"] if isinstance(spec, OpaqueSpec) or spec.dtype in FLEXIBLE else DTYPES[spec.dtype]
    if not isinstance(value, np.ndarray) or value.dtype != wanted:
        raise _unusable(contract, case, name, f"{getattr(value, 'dtype', type(value))}", f"an array of {wanted}")
    return tuple(value.shape)


def _may_be_absent(contract: Contract, name: str) -> bool:
    fields = dataclasses.fields(contract.args)  # type: ignore[arg-type]
    return any(field.name == name and field.default is None for field in fields)


def _unusable(contract: Contract, case: Case, name: str, got: str, wanted: str) -> ContractError:
    return ContractError(f"{contract.key}, case {case.name!r}: {name} has {got}, wanted {wanted}; correct the case")


def limits_of(contract: Contract, case: Case) -> Limits:
    """Return capacities that fit a case exactly; a capacity the contract has no symbol for is as small as it can be."""
    size = symbols(contract, case)
    cache = next((value for value in case.arrays.values() if isinstance(value, LogicalCache)), None)
    num_blocks, block_size = cache.k.shape[:2] if cache else (1, 1)
    block_size = int(case.params.get("block_size", block_size))
    max_blocks = size.get("MB", 1)
    return Limits(
        max_seqs=size.get("B", 1),
        num_drafts=size.get("K", size.get("W", 1) - 1),
        max_rows=size.get("R", size.get("N", 1)),
        max_logit_rows=size.get("NL", size.get("N", 1)),
        max_len=size.get("L", max_blocks * block_size),
        block_size=block_size,
        num_blocks=int(num_blocks),
        max_blocks=max_blocks,
        max_stop_tokens=size.get("S", 1),
        vocab_size=size.get("V", 1),
        max_logprobs=size.get("E", 0) - 1,
    )


def field_of(name: str) -> str:
    """The field of a record that the array `name` belongs to: `cache` of `cache.k`, `columns` of `columns[3]`."""
    return name.partition(".")[0].partition("[")[0]


def dtype_of(contract: Contract, case: Case, name: str, act: str) -> str:
    """Return the dtype name in which the array `name` is handed over: caches are read back in float32."""
    spec = contract.args.specs().get(field_of(name))
    if isinstance(spec, ColumnsSpec):
        return "f32" if case.arrays[field_of(name)][column_index(name)].dtype == np.float32 else "i32"
    if not isinstance(spec, TensorSpec):
        return "f32"
    declared = case.outputs[name][1] if spec.access == "out" else spec.dtype
    return act if declared in FLEXIBLE else declared


def namespace(contract: Contract, case: Case, act: str = "f32", poison: Poison = POISON, kv: str = "") -> SimpleNamespace:
    """Return fresh arguments for a golden: floats rounded to their dtype and widened to float64, integers as they are,
    outputs poisoned, caches as `LogicalCache`, quantised where `kv` says so, packed weights as they are, metadata and absent
    arguments None."""
    a = SimpleNamespace(**case.params)
    for name, spec in contract.args.specs().items():
        value = case.arrays.get(name)
        if isinstance(spec, ParamSpec):
            continue
        if isinstance(spec, TensorSpec):
            dtype = dtype_of(contract, case, name, act)
            if spec.access == "out":
                value = np.full(case.outputs[name][0], poison.of(dtype), np.float64 if dtype in EPS else DTYPES[dtype])
            elif value is not None:
                value = _rounded(value, dtype)
        elif isinstance(spec, ColumnsSpec):
            columns: Any = value
            value = tuple(_rounded(one, dtype_of(contract, case, column_name(name, i), act)) for i, one in enumerate(columns))
        elif isinstance(value, LogicalCache):
            value = kept(value, act, kv)
        elif value is not None and not isinstance(value, PackedWeight):
            value = _rounded(value, act)
        setattr(a, name, value)
    return a


def kept(cache: LogicalCache, act: str, kv: str = "") -> LogicalCache:
    """The rows of a cache as a run for `act` holds them, quantised where `kv` says so."""
    k, v = _rounded(cache.k, act), _rounded(cache.v, act)
    return LogicalCache(quantise(k, kv), quantise(v, kv)) if kv else LogicalCache(k, v)


def _rounded(value: Array, dtype: str) -> Array:
    return from_host(to_host(value, dtype), dtype) if dtype in EPS else value.copy()


def arrays(contract: Contract, a: Any) -> dict[str, Array]:
    """Return every array of a namespace that a launch could change, by argument name: tensors (inputs too, so that a
    kernel that writes one is seen), caches as `<name>.k` and `<name>.v`, columns as `<name>[<i>]`. Nothing is copied."""
    found: dict[str, Array] = {}
    for name, spec in contract.args.specs().items():
        value = getattr(a, name)
        if isinstance(value, LogicalCache):
            found |= {f"{name}.k": value.k, f"{name}.v": value.v}
        elif isinstance(spec, ColumnsSpec):
            found |= {column_name(name, i): column for i, column in enumerate(value)}
        elif isinstance(spec, TensorSpec) and value is not None:
            found[name] = value
    return found
