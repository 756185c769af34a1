"""Checks one function against one contract: no backend, no device, no plugin.

A kernel author calls `check_kernel` in a repository of any kind, with two functions that carry arrays to the device and back. The
cases, the golden and the comparison are those of level L2. It is no claim of conformance: only a backend can conform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np

from polydraft.conformance.causes import causes, resembled
from polydraft.conformance.harness import run_golden
from polydraft.conformance.outcomes import Result
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Case, ColumnsSpec, Contract, LogicalCache, OpaqueSpec, ParamSpec, TensorSpec, column_name
from polydraft.contracts.compare import Comparison, compare, from_host
from polydraft.contracts.compare import to_host as host_form
from polydraft.contracts.composite import Composite, split
from polydraft.contracts.inputs import SEEDS, Kernel, contract_of, default_cases, dtype_of, kernel_of, namespace
from polydraft.contracts.large import called, large_sizes, several_large
from polydraft.device import Array
from polydraft.errors import ConfigError

Function = Callable[[Any, int], "Mapping[str, Any] | None"]
"""`function(a, n)`: `a` has the fields of the contract as device arrays (weights and `cache` [2, num_blocks, block_size,
num_kv_heads, head_dim] too; parameters as they are, `meta` None), `n` is the launch length. It writes in place and returns
None, or returns the arrays that it made by field name. For a composite, `a.parts` has one such namespace a part."""


class KernelMismatch(AssertionError):  # noqa: N818  an assertion that failed, as pytest shows it
    """A function does not do what its contract says; the message holds case, argument, index, got, wanted and the next step."""


def check_kernel(
    contract: str,
    function: Function,
    to_device: Callable[[Array], Any] = np.array,
    to_host: Callable[[Any], Array] = np.asarray,
    *,
    case: str = "",
    seeds: int = SEEDS,
    large: bool = True,
    dtype: str = "f32",
) -> list[Comparison]:
    """Compare `function` with the golden of `contract` (or composite) on every named case, `seeds` generated ones and (unless
    `large` is off) those with dimensions as large as products have them; or on one `case` alone, such as "seed-7" or "V-32000".
    Return the comparisons.

    `to_device` gets a NumPy array and returns device memory of its own, `to_host` the way back; arrays are in the host form
    of `dtype` (bf16 as its 16 bits in uint16). Raises `KernelMismatch` at the first case that differs, and `ConfigError` for a
    contract, case or dtype that does not exist. What the function raises is passed on, with a note of the case."""
    kernel = _kernel(contract)
    found = []
    for one in _cases(kernel, case, seeds, large=large):
        want = run_golden(kernel, one, dtype)
        got = _run(kernel, one, function, to_device, to_host, dtype)
        comparison = compare(contract_of(kernel), one, got, want)
        if not comparison.ok:
            raise KernelMismatch(_message(kernel, one, replace(comparison, like=resembled(kernel, one, got, act=dtype)), dtype))
        found.append(comparison)
    return found


def _kernel(name: str) -> Kernel:
    if name not in COMPOSITES and name not in REGISTRY:
        raise ConfigError(f"no contract is called {name!r}; `polydraft contracts` lists them all")
    return kernel_of(name)


def _cases(kernel: Kernel, case: str, seeds: int, *, large: bool) -> Iterable[Case]:
    if not case:
        more = (several_large(kernel, sizes) for sizes in large_sizes(kernel)) if large else ()
        return chain(default_cases(kernel, seeds), more)
    chosen = called(kernel, case)
    if chosen is None:
        names = ", ".join(one.name for one in contract_of(kernel).cases())
        raise ConfigError(f"{kernel.name} has no case {case!r}; it has {names}")
    return [chosen]


def _run(
    kernel: Kernel,
    case: Case,
    function: Function,
    upload: Callable[[Array], Any],
    download: Callable[[Any], Array],
    dtype: str,
) -> dict[str, Array]:
    """Run the function once on poisoned outputs; every array back in its host form, nothing dead."""
    contract = contract_of(kernel)
    given = _given(contract, case, upload, dtype)
    parts = SimpleNamespace(parts=split(kernel, given)) if isinstance(kernel, Composite) else given
    try:
        made = function(parts, case.n)
    except Exception as error:
        _note(error, f"while running {contract.key}, case {case.name!r}, launch length {case.n}")
        raise
    got: dict[str, Array] = {}
    for name, spec in contract.args.specs().items():
        value = (made or {}).get(name, getattr(given, name))
        if value is None or isinstance(spec, ParamSpec) or (isinstance(spec, OpaqueSpec) and spec.kind != "cache"):
            continue
        if isinstance(spec, ColumnsSpec):
            got |= {column_name(name, i): download(column) for i, column in enumerate(value)}
            continue
        array = download(value)
        if isinstance(spec, OpaqueSpec):
            both = from_host(array, dtype).astype(np.float32)
            got |= {f"{name}.k": both[0], f"{name}.v": both[1]}
        else:
            got[name] = array
    dead = kernel.dead if isinstance(kernel, Composite) else ()
    return {name: array for name, array in got.items() if name not in dead}


def _given(contract: Contract, case: Case, upload: Callable[[Array], Any], dtype: str) -> SimpleNamespace:
    """The fields of the record, on the device."""
    a = namespace(contract, case, dtype)
    for name, spec in contract.args.specs().items():
        value = getattr(a, name)
        if value is None or isinstance(spec, ParamSpec):
            continue
        if isinstance(spec, ColumnsSpec):
            places = [dtype_of(contract, case, column_name(name, i), dtype) for i in range(len(value))]
            uploaded = (upload(host_form(column, place)) for column, place in zip(value, places, strict=True))
            setattr(a, name, tuple(uploaded))
            continue
        if isinstance(value, LogicalCache):
            array = host_form(np.stack((value.k, value.v)), dtype)
        else:
            array = host_form(value, dtype_of(contract, case, name, dtype) if isinstance(spec, TensorSpec) else dtype)
        setattr(a, name, upload(array))
    return a


def _message(kernel: Kernel, case: Case, comparison: Comparison, dtype: str) -> str:
    """What differs, what it looks like, and how to see it again."""
    again = f"case={case.name!r}" + ("" if dtype == "f32" else f", dtype={dtype!r}")
    looks = causes(Result(case.name, "fail", like=comparison.like))
    lines = [comparison.describe(), *([f"looks like {looks}"] if looks else [])]
    lines += [f"rerun: check_kernel({kernel.name!r}, ..., {again}); what it has to do: polydraft contracts {kernel.name}"]
    return "\n".join(lines)


def _note(error: Exception, text: str) -> None:
    """Attach a note where Python can show it (3.11 and later)."""
    if hasattr(error, "add_note"):
        error.add_note(text)
