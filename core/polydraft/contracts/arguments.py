"""Checks the arguments a kernel is bound to: whether a record fits its contract, before any backend sees it.

Core checks every record once, when a program is bound (`BoundTable.bind`), so a provider may rely on it. The conformance kit
binds the records of `misfits`, all of which must be refused. Contents are not checked, and nothing of this runs in a step.

What a record promises follows from its declaration alone: every buffer is there unless it may be left out, has the declared dtype
("act" is one dtype throughout the record) and rank, sizes that share a symbol are equal, the contract's `constraints` hold, and
no buffer that is written stands in two places. N alone, the rows of a launch, is a capacity of each buffer for itself: buffers of
several kinds of pass meet in one launch, and the launch length lies within all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from polydraft.contracts.base import (
    Args,
    ColumnsSpec,
    Contract,
    OpaqueSpec,
    ParamSpec,
    TensorSpec,
    column_name,
    contract_named,
)
from polydraft.contracts.composite import Composite, CompositeArgs
from polydraft.contracts.constraints import Constraint
from polydraft.device import Buffer
from polydraft.errors import ContractError

FREE: Final = "N"
"""The symbol whose sizes need not be equal."""
ACTIVATIONS: Final = ("f32", "bf16", "f16")
"""What "act" may stand for."""
COLUMN_DTYPES: Final = ("i32", "f32")
"""What a slot column may hold."""
_DTYPES: Final[Mapping[str, tuple[str, ...]]] = {"act": ACTIVATIONS, "float": ACTIVATIONS}


@dataclass(frozen=True)
class _Tensor:
    """One buffer argument, as the check wants it."""

    name: str
    spec: TensorSpec
    axes: tuple[str | int, ...]
    dtypes: tuple[str, ...]
    is_act: bool


@dataclass(frozen=True)
class _Rules:
    """What there is to check in the records of a contract."""

    tensors: tuple[_Tensor, ...]
    fixed: Mapping[str | int, int]
    """Sizes that are numbers."""
    columns: tuple[str, ...]
    """Fields that hold slot columns."""
    opaque: tuple[str, ...]
    """Weights and caches that have to be there; metadata is the backend's business."""
    may_be_absent: frozenset[str]
    params: tuple[str, ...]
    constraints: tuple[Constraint, ...]


@functools.cache
def _rules(record: Any, constraints: tuple[str, ...]) -> _Rules:
    specs: Mapping[str, Any] = record.specs()
    absent = frozenset(f.name for f in dataclasses.fields(record) if f.default is None)
    tensors = tuple(_tensor(name, spec) for name, spec in specs.items() if isinstance(spec, TensorSpec))
    fixed: dict[str | int, int] = {axis: axis for one in tensors for axis in one.axes if isinstance(axis, int)}
    opaque = tuple(n for n, s in specs.items() if isinstance(s, OpaqueSpec) and s.kind != "meta" and n not in absent)
    params = tuple(name for name, spec in specs.items() if isinstance(spec, ParamSpec))
    columns = tuple(name for name, spec in specs.items() if isinstance(spec, ColumnsSpec))
    return _Rules(tensors, fixed, columns, opaque, absent, params, tuple(Constraint.read(text) for text in constraints))


def _rules_of(contract: Contract) -> _Rules:
    return _rules(contract.args, contract.constraints)  # type: ignore[arg-type]  # a class is hashable


def _tensor(name: str, spec: TensorSpec) -> _Tensor:
    axes = tuple(int(symbol) if symbol.isdigit() else symbol for symbol in spec.symbols)
    return _Tensor(name, spec, axes, _DTYPES.get(spec.dtype, (spec.dtype,)), spec.dtype == "act")


def check_arguments(kernel: Contract | Composite, args: Args | CompositeArgs) -> None:
    """Raise `ContractError` where `args` is no record of `kernel` or is not what the contract declares; the sentence names the
    argument, what it is and what was wanted. A composite's record is checked part by part. Some microseconds, since building an
    engine asks hundreds of times."""
    if isinstance(kernel, Composite):
        for contract, part in zip(kernel.contracts, getattr(args, "parts", ()), strict=True):
            _check(contract, part)
    elif type(args) is not kernel.args:
        raise ContractError(
            f"{kernel.key}: got a record of {type(args).__name__}, wanted {kernel.args.__name__}; pass that record"
        )
    else:
        _check(kernel, args)


def check_records(name: str, args: Args | CompositeArgs) -> None:
    """As `check_arguments`, for what a provider of `name` is bound to: a contract, or several joined by '+', each with a record,
    whether a composite describes them or a pass over programs."""
    records = args.parts if isinstance(args, CompositeArgs) else (args,)
    for part, record in zip(name.split("+"), records, strict=True):
        check_arguments(contract_named(part), record)


def _check(contract: Contract, args: Any) -> None:
    rules = _rules_of(contract)
    sizes: dict[str | int, Any] = dict(rules.fixed)
    owners: dict[int, _Tensor] = {}
    act = ""
    for one in rules.tensors:
        buffer = getattr(args, one.name)
        if buffer is None:
            if one.name not in rules.may_be_absent:
                raise _misfit(contract, one.name, "missing", "a buffer")
            continue
        shape, axes, other = buffer.shape, one.axes, owners.setdefault(id(buffer), one)
        if buffer.dtype not in one.dtypes or (one.is_act and buffer.dtype != (act := act or buffer.dtype)):
            wanted = " or ".join((act,) if one.is_act and act else one.dtypes)
            raise _misfit(contract, one.name, f"of dtype {buffer.dtype}", wanted)
        if len(shape) != len(axes):
            raise _misfit(contract, one.name, f"of shape {tuple(shape)}", f"[{one.spec.shape}]")
        for axis, size in zip(axes, shape, strict=True):
            if sizes.setdefault(axis, size) != size and axis != FREE:
                wanted = f"{axis} = {sizes[axis]} in [{one.spec.shape}]"
                raise _misfit(contract, one.name, f"of shape {tuple(shape)}", wanted)
        if other is not one and _is_written(one, other):
            raise _misfit(
                contract, one.name, f"the buffer of {other.name}, too", "one of its own, since one of the two is written"
            )
    for name in rules.columns:
        _check_columns(contract, args, name, sizes)
    missing = next((name for name in rules.opaque if getattr(args, name) is None), None)
    if missing is not None:
        raise _misfit(contract, missing, "missing", "what the backend made for it")
    if rules.constraints:
        _check_constraints(contract, rules, sizes, args)


def _check_columns(contract: Contract, args: Any, name: str, sizes: dict[str | int, Any]) -> None:
    """Each column is a buffer of its own, in a dtype and of a shape that a column may have."""
    columns, seen = getattr(args, name), [id(getattr(args, one.name)) for one in _rules_of(contract).tensors]
    if not isinstance(columns, tuple) or not columns:
        raise _misfit(contract, name, f"{columns!r}", "a tuple of at least one slot column")
    for i, column in enumerate(columns):
        shape, place = tuple(column.shape), column_name(name, i)
        if column.dtype not in COLUMN_DTYPES:
            raise _misfit(contract, place, f"of dtype {column.dtype}", " or ".join(COLUMN_DTYPES))
        if len(shape) not in (1, 2) or sizes.setdefault("B", shape[0]) != shape[0]:
            raise _misfit(contract, place, f"of shape {shape}", f"[B] or [B, width], here B = {sizes.get('B', shape[0])}")
        if id(column) in seen:
            raise _misfit(contract, place, "the buffer of another argument, too", "one of its own, since it is written")
        seen.append(id(column))


def _is_written(*tensors: _Tensor) -> bool:
    return any(one.spec.access != "in" for one in tensors)


def constraint_fails(contract: Contract, sizes: Mapping[Any, Any], params: Mapping[str, Any]) -> str:
    """The first constraint of `contract` that does not hold, "" where all do. One that names a symbol without a size (of a buffer
    that was left out) says nothing."""
    rules = _rules_of(contract)
    known = {**sizes, **params}
    return next((one.text for one in rules.constraints if all(name in known for name in one.names) and not one.holds(known)), "")


def _check_constraints(contract: Contract, rules: _Rules, sizes: Mapping[Any, Any], args: Args) -> None:
    params = {name: getattr(args, name) for name in rules.params}
    broken = constraint_fails(contract, sizes, params)
    if broken:
        known = {**sizes, **params}
        names = next(one.names for one in rules.constraints if one.text == broken)
        got = ", ".join(f"{name} = {known[name]!r}" for name in names)
        raise ContractError(f"{contract.key}: got {got}, wanted {broken}; bind it to sizes and parameters that fit")


def _misfit(contract: Contract, name: str, got: str, wanted: str) -> ContractError:
    return ContractError(f"{contract.key}: argument {name} is {got}, wanted {wanted}; bind it to what the contract declares")


# -- records that do not fit ---------------------------------------------------------------------------
Make = Callable[[str, tuple[int, ...], str], Buffer]
"""Allocates a buffer by name, shape and dtype."""


@dataclass(frozen=True)
class Misfit:
    """A record that must be refused: the argument (or constraint) that the refusal has to name, what is wrong, the record."""

    names: str
    what: str
    args: Args


def misfits(contract: Contract, args: Args, make: Make) -> Iterator[Misfit]:
    """Every way in which a record that fits can be spoiled by one change, made from the contract's declaration: each buffer in
    another dtype, with an axis more, with another size where that is bound, left out, or in the place of another; each
    constraint broken."""
    rules = _rules_of(contract)
    bound = _bound_symbols(rules, args)
    for one in rules.tensors:
        buffer = getattr(args, one.name)
        if buffer is None:
            continue
        shape, name = tuple(buffer.shape), one.name

        def spoiled(what: str, value: Any, names: str = name, name: str = name) -> Misfit:
            return Misfit(names, what, _changed(args, {name: value}))

        other = "u8" if buffer.dtype != "u8" else "i32"
        yield spoiled(f"{name} in {other}", make(name, shape, other))
        yield spoiled(f"{name} with an axis more", make(name, (*shape, 1), buffer.dtype))
        for axis, symbol in enumerate(one.axes):
            if symbol in bound:  # whichever of the buffers that share it is named
                grown = (*shape[:axis], shape[axis] + 1, *shape[axis + 1 :])
                yield spoiled(f"{name} with another size of {symbol}", make(name, grown, buffer.dtype), "")
        if name not in rules.may_be_absent:
            yield spoiled(f"no {name}", None)
        twin = _twin(rules, args, one)
        if twin is not None:
            yield spoiled(f"{name} and {twin} in one buffer", getattr(args, twin), "")
    for name in rules.columns:
        yield from _spoiled_columns(args, make, name)
    for constraint in rules.constraints:
        yield from _broken(contract, args, make, constraint)


def _spoiled_columns(args: Args, make: Make, name: str) -> Iterator[Misfit]:
    """The record with one of its slot columns in another dtype, of another rank or size, twice, or with none at all."""
    columns: tuple[Buffer, ...] = getattr(args, name)
    yield Misfit(name, f"no {name}", _changed(args, {name: ()}))
    for i, column in enumerate(columns):
        shape, place = tuple(column.shape), column_name(name, i)
        spoiled = {
            f"{place} in u8": make(place, shape, "u8"),
            f"{place} with two axes more": make(place, (*shape, 1, 1), column.dtype),
            f"{place} with another size of B": make(place, (shape[0] + 1, *shape[1:]), column.dtype),
        }
        for what, buffer in spoiled.items():
            changed = (*columns[:i], buffer, *columns[i + 1 :])
            yield Misfit(name, what, _changed(args, {name: changed}))
    yield Misfit(name, f"{name}[0] twice", _changed(args, {name: (columns[0], *columns)}))


def _bound_symbols(rules: _Rules, args: Args) -> set[str | int]:
    """Sizes that more than one axis has, and those that the record fixes."""
    axes = [axis for one in rules.tensors if getattr(args, one.name) is not None for axis in one.axes]
    return {axis for axis in axes if isinstance(axis, int) or axes.count(axis) > 1} - {FREE}


def _twin(rules: _Rules, args: Args, one: _Tensor) -> str | None:
    """Another argument of the same form, where one of the two is written."""
    mine = getattr(args, one.name)
    for other in rules.tensors:
        its = getattr(args, other.name)
        alike = other is not one and its is not None and one.axes == other.axes and its.dtype == mine.dtype
        if alike and _is_written(one, other):
            return other.name
    return None


def _broken(contract: Contract, args: Args, make: Make, constraint: Constraint) -> Iterator[Misfit]:
    """The record with one constraint broken, by the first parameter or size of it that can break it alone."""
    rules, text = _rules_of(contract), constraint.text
    for name in constraint.names:
        for what, found in _varied(rules, args, make, name):
            if _first_broken(contract, found) == text:
                yield Misfit(text, f"{what}, against {text}", found)
                return


def _varied(rules: _Rules, args: Args, make: Make, name: str) -> Iterator[tuple[str, Args]]:
    """The record with other values of the parameter, or larger sizes of the symbol, called `name`."""
    if name in rules.params:
        for value in _others(getattr(args, name)):
            yield f"{name} = {value!r}", _changed(args, {name: value})
    elif any(name in one.axes and getattr(args, one.name) is not None for one in rules.tensors):
        for more in (1, 2, 64, 1 << 16):  # the last for what has to fit into 16 bits
            yield f"{more} more of {name}", _resized(rules, args, make, name, more)


def _others(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return ((*value, *value), value * 64)
    return ("neither",) if isinstance(value, str) else (value + 1, 0, -1, 2 * value + 1, 1 << 30)


def _first_broken(contract: Contract, args: Args) -> str:
    rules = _rules_of(contract)
    sizes: dict[Any, Any] = {}
    for one in rules.tensors:
        buffer = getattr(args, one.name)
        if buffer is not None:
            sizes |= dict(zip(one.axes, buffer.shape, strict=True))
    return constraint_fails(contract, sizes, {name: getattr(args, name) for name in rules.params})


def _resized(rules: _Rules, args: Args, make: Make, symbol: str, more: int) -> Args:
    """The record with every axis called `symbol` longer by `more`."""
    changed: dict[str, Any] = {}
    for one in rules.tensors:
        buffer = getattr(args, one.name)
        if buffer is not None and symbol in one.axes:
            shape = tuple(size + more * (axis == symbol) for axis, size in zip(one.axes, buffer.shape, strict=True))
            changed[one.name] = make(one.name, shape, buffer.dtype)
    return _changed(args, changed)


def _changed(args: Args, fields: Mapping[str, Any]) -> Args:
    changed: Args = dataclasses.replace(args, **fields)  # type: ignore[type-var]  # every subclass of Args is a dataclass
    return changed
