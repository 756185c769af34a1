"""Automatic mutants of a golden: faults made by changing its inputs, not its code.

The adequacy gate runs them on the default cases. A mutant knows nothing of a particular contract: everything follows from the
record, so a new contract has its mutants as soon as it has its fields.
"""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from polydraft.contracts.base import Case, ColumnsSpec, Contract, LogicalCache, OpaqueSpec, ParamSpec, TensorSpec, column_name
from polydraft.contracts.compare import EPS
from polydraft.device import DTYPES, Array
from polydraft.errors import ContractError

Golden = Callable[[Any, int], None]
Run = Callable[[Golden, Any, int], None]
Change = Callable[[Array, int], Array]
"""(array, launch length) -> what the mutant sees instead, of the same shape."""

_SENTINEL: Final = re.compile(r"PAD_SLOT|NO_TOKEN|NO_BLOCK|NO_ROW|negative|< 0|-1")
"""An integer input whose description says this has to be negative somewhere in the cases."""


@dataclass(frozen=True)
class Mutant:
    """One fault: `run(golden, a, n)` does what the golden does on `a` for launch length `n`, with the fault between."""

    id: str
    """What `Contract.equivalent_mutants` lists."""
    run: Run
    misreads: str = ""
    """The `inout` argument of which only reads are wrong; where it is only ever written, the mutant says nothing."""
    crash_kills: bool = True
    """Whether an exception counts; not where a kernel would silently run on over a buffer's end."""


def mutants(contract: Contract, cases: Sequence[Case]) -> Iterator[Mutant]:
    """Yield every mutant of a contract, those of rows first; `cases` show which values occur. In the ids, `x` is an
    argument, `cache.k` one half of a cache, `B` a shape symbol:

    - `fewer-rows`, `more-rows`: the launch length is one off; `unwritten(x)`: an output keeps what it held;
    - `zero(x)`, `absent(x)`: an input is dropped; `plus(x)`, `minus(x)`: integers that are not sentinels are one off;
      `unpad(x)`: negative entries are taken for 0; `reverse(x)`, `reverse-all(B)`: rows are credited to other rows;
    - `swap(x,y)`: two inputs or two outputs that a positional call could mix up;
    - `zero(x[:,2])`, `swap(x[:,2],x[:,3])`: the same for the words of staged runs;
    - `unwritten(columns[1])`, `misplaced(columns)`: a slot column keeps what it held; each takes what belongs to the next;
    - `plus(p)`, `minus(p)`, `double(p)`, `half(p)`, `flip(p)`, `flip(p=other)`, `swap(p,q)`: static parameters.

    Raises `ContractError` for a text parameter whose other values are not known.
    """
    specs = contract.args.specs()
    yield Mutant("fewer-rows", lambda golden, a, n: golden(a, max(n - 1, 0)))
    yield Mutant("more-rows", lambda golden, a, n: golden(a, n + 1), crash_kills=False)
    for path, spec in _paths(specs):
        if spec.access != "in":
            yield Mutant(f"unwritten({path})", _unwritten(path))
        if spec.access != "out":
            yield from _misreadings(contract, path, spec, cases)
    for name in (name for name, spec in specs.items() if isinstance(spec, ColumnsSpec)):
        yield from _of_columns(name, cases)
    yield from _swaps(specs)
    yield from _reversals(specs)
    for name, parameter in specs.items():
        if isinstance(parameter, ParamSpec):
            yield from _parameters(contract, name, parameter, cases)


def _paths(specs: Mapping[str, Any]) -> Iterator[tuple[str, TensorSpec | OpaqueSpec]]:
    """Every array argument; a cache is two."""
    for name, spec in specs.items():
        if isinstance(spec, TensorSpec) or (isinstance(spec, OpaqueSpec) and spec.kind == "weight"):
            yield name, spec
        elif isinstance(spec, OpaqueSpec) and spec.kind == "cache":
            yield f"{name}.k", spec
            yield f"{name}.v", spec


def _misreadings(contract: Contract, path: str, spec: TensorSpec | OpaqueSpec, cases: Sequence[Case]) -> Iterator[Mutant]:
    def misread(kind: str, change: Change) -> Mutant:
        return Mutant(f"{kind}({path})", _misread([path], change), misreads=path if spec.access == "inout" else "")

    yield misread("zero", lambda x, n: np.zeros_like(x))
    held = [case.arrays.get(path) for case in cases]
    if isinstance(spec, OpaqueSpec):
        if spec.kind == "weight" and any(array is None for array in held):
            yield Mutant(f"absent({path})", lambda golden, a, n: golden(_with(a, path, None), n))
        return
    if spec.dtype not in DTYPES or spec.dtype in EPS:
        return
    yield misread("plus", lambda x, n: np.where(x >= 0, x + x.dtype.type(1), x))
    yield misread("minus", lambda x, n: np.where(x >= 0, x - x.dtype.type(1), x))
    if _SENTINEL.search(spec.doc) or any(array is not None and (array < 0).any() for array in held):
        yield misread("unpad", lambda x, n: np.maximum(x, x.dtype.type(0)))
    if contract.unit == "runs" and spec.access == "in" and len(spec.symbols) == 2:
        yield from _words(path, min(array.shape[1] for array in held if array is not None))


def _of_columns(name: str, cases: Sequence[Case]) -> Iterator[Mutant]:
    """One column keeps what it held, and every column takes the place of the next; the golden never reads them."""
    for i in range(max(len(case.arrays[name]) for case in cases)):
        yield Mutant(f"unwritten({column_name(name, i)})", _kept_column(name, i))
    yield Mutant(f"misplaced({name})", _misplaced(name))


def _kept_column(name: str, index: int) -> Run:
    def run(golden: Golden, a: Any, n: int) -> None:
        columns = getattr(a, name)
        before = columns[index].copy() if index < len(columns) else None
        golden(a, n)
        if before is not None:
            columns[index][...] = before

    return run


def _misplaced(name: str) -> Run:
    return lambda golden, a, n: golden(_with(a, name, getattr(a, name)[1:] + getattr(a, name)[:1]), n)


def _words(path: str, width: int) -> Iterator[Mutant]:
    """Staged runs are one array of several words a row, each of which is an argument of its own."""

    def dropped(column: int) -> Change:
        return lambda x, n: np.where(np.arange(x.shape[1]) == column, x.dtype.type(0), x)

    def exchanged(column: int) -> Change:
        return lambda x, n: x[:, [*range(column), column + 1, column, *range(column + 2, x.shape[1])]]

    for i in range(width):
        yield Mutant(f"zero({path}[:,{i}])", _misread([path], dropped(i)))
    for i in range(width - 1):
        yield Mutant(f"swap({path}[:,{i}],{path}[:,{i + 1}])", _misread([path], exchanged(i)))


def _swaps(specs: Mapping[str, Any]) -> Iterator[Mutant]:
    alike: dict[object, list[str]] = {}
    for path, spec in _paths(specs):
        kind = (spec.dtype, spec.access == "out") if isinstance(spec, TensorSpec) else spec.kind
        alike.setdefault((kind, spec.shape), []).append(path)
    for paths in alike.values():
        for x, y in itertools.combinations(paths, 2):
            yield Mutant(f"swap({x},{y})", _swapped(x, y))


def _reversals(specs: Mapping[str, Any]) -> Iterator[Mutant]:
    together: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if isinstance(spec, TensorSpec) and spec.access == "in":
            together.setdefault(spec.symbols[0], []).append(name)
            yield Mutant(f"reverse({name})", _misread([name], _reversed))
    for symbol, names in together.items():
        if len(names) > 1:
            yield Mutant(f"reverse-all({symbol})", _misread(names, _reversed))


def _reversed(x: Array, n: int) -> Array:
    return np.concatenate([x[:n][::-1], x[n:]])


def _parameters(contract: Contract, name: str, spec: ParamSpec, cases: Sequence[Case]) -> Iterator[Mutant]:
    def changed(kind: str, change: Callable[[Any], Any]) -> Mutant:
        return Mutant(f"{kind})", lambda golden, a, n: golden(_with(a, name, change(getattr(a, name))), n))

    values = [case.params[name] for case in cases]
    types = {type(value) for value in values}
    if types == {bool}:
        yield changed(f"flip({name}", lambda value: not value)
    elif types == {int}:
        yield changed(f"plus({name}", lambda value: value + 1)
        yield changed(f"minus({name}", lambda value: value - 1)
    elif types <= {int, float}:
        yield changed(f"double({name}", lambda value: value * 2.0 if value else 1.0)
        yield changed(f"half({name}", lambda value: value * 0.5 if value else -1.0)
    elif types == {tuple}:
        yield changed(f"reverse({name}", lambda value: value[::-1])
        yield changed(f"shorter({name}", lambda value: value[:-1])
    elif types == {str}:
        for legal in _legal(contract, name, spec):
            yield changed(f"flip({name}={legal}", partial(_constant, legal))
    for other, other_spec in contract.args.specs().items():
        later = isinstance(other_spec, ParamSpec) and other > name
        if later and {type(case.params[other]) for case in cases} == types:
            yield Mutant(f"swap({name},{other})", _swapped(name, other))


def _constant(result: str, value: str) -> str:
    del value
    return result


def _legal(contract: Contract, name: str, spec: ParamSpec) -> list[str]:
    """Values of a text parameter: those of its `Literal` annotation, else the words that its description quotes."""
    hint = typing.get_type_hints(contract.args)[name]
    legal = sorted(set(typing.get_args(hint)) or set(re.findall(r'"(\w+)"', spec.doc)))
    if len(legal) < 2:
        raise ContractError(
            f"{contract.key}: parameter {name} has the values {legal}, wanted at least two; annotate it with a Literal"
        )
    return legal


# -- how a fault gets between the golden and its arguments ----------------------------------------------


def _get(a: Any, path: str) -> Any:
    name, _, half = path.partition(".")
    return getattr(getattr(a, name), half) if half else getattr(a, name)


def _with(a: Any, path: str, value: Any) -> SimpleNamespace:
    """The same arguments with one replaced."""
    name, _, half = path.partition(".")
    if half:
        cache = getattr(a, name)
        value = LogicalCache(value, cache.v) if half == "k" else LogicalCache(cache.k, value)
    return SimpleNamespace(**{**vars(a), name: value})


def _swapped(x: str, y: str) -> Run:
    return lambda golden, a, n: golden(_with(_with(a, x, _get(a, y)), y, _get(a, x)), n)


def _unwritten(path: str) -> Run:
    def run(golden: Golden, a: Any, n: int) -> None:
        array = _get(a, path)
        before = array.copy()
        golden(a, n)
        array[...] = before

    return run


class Shown(np.ndarray[Any, Any]):
    """What a mutant shows of an array: what is stored in it reaches the true array too, and reads are noted.

    Storing by index arrives at once and exactly; whatever else writes (views, `fill`, in-place arithmetic) arrives with
    `settle`, as far as it changed something.
    """

    true: Array | None = None
    first: Array
    was_read = False

    @classmethod
    def of(cls, true: Array, false: Array) -> Shown:
        """Show `false` for `true`, of the same shape and dtype."""
        shown = np.array(false, true.dtype).view(cls)
        shown.true, shown.first = true, np.array(false, true.dtype)
        return shown

    def settle(self) -> None:
        """Bring the true array up to date; to be called once, when the golden is done."""
        if self.true is not None:
            now = np.asarray(self)
            changed = (now != self.first) & ~(np.isnan(now) & np.isnan(self.first))
            self.true[changed] = now[changed]

    def __array_finalize__(self, source: Any) -> None:
        if isinstance(source, Shown):  # a copy or a view of it, which is an array of its own
            source.was_read = True

    def __getitem__(self, key: Any) -> Any:
        self.was_read = True
        return np.asarray(self)[key]

    def __iter__(self) -> Iterator[Any]:
        self.was_read = True
        return iter(np.asarray(self))

    def __setitem__(self, key: Any, value: Any) -> None:
        np.asarray(self)[key] = value
        if self.true is not None:
            self.true[key] = value

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self.was_read = True
        return super().__array_function__(func, types, args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...] = (), **options: Any) -> Any:
        self.was_read = True
        if out:
            options["out"] = tuple(np.asarray(x) for x in out)
        return getattr(ufunc, method)(*(np.asarray(x) for x in inputs), **options)


def _misread(paths: Sequence[str], change: Change) -> Run:
    """Let the golden read changed arrays; what it writes there arrives in the true ones."""

    def run(golden: Golden, a: Any, n: int) -> None:
        given = {path: _get(a, path) for path in paths}
        shown = {path: Shown.of(true, change(true, n)) for path, true in given.items() if true is not None}
        faulty = a  # arguments that this case leaves out stay None
        for path, false in shown.items():
            faulty = _with(faulty, path, false)
        golden(faulty, n)
        for false in shown.values():
            false.settle()

    return run
