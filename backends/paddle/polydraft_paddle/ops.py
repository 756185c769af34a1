"""The few array idioms that all Paddle kernels here are made of: masked gathers, scatters without races, row numbers.

The kernels call them. No shape depends on data and nothing is read back to the host, so a kernel made of them can be queued on a
stream and captured in a graph. Where Paddle's functions spend more time checking than computing, its operations are called
directly.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle

from polydraft.device import Array
from polydraft.errors import ContractError

Tensor = Any
"""A `paddle.Tensor`; the wheel has no types to check against."""
direct = paddle._C_ops
"""Paddle's operations without the functions around them, which cost twice as much as a small operation itself. Only those are
called here whose arguments have been the same in every supported Paddle: it ends the process where they differ."""
LARGEST = 2**31 - 1
KEPT = 1 << 16
"""Constants of at most this many elements are made once."""


class First:
    """The first rows of some tensors, as views that are kept for the launch lengths met last."""

    __slots__ = ("_found", "_tensors")

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors: tuple[Tensor, ...] = tensors
        self._found: dict[int, tuple[Tensor, ...]] = {}

    def rows(self, n: int) -> tuple[Tensor, ...]:
        """Views of the first `n` rows."""
        found = self._found.get(n)
        if found is None:
            if len(self._found) == LENGTHS:
                self._found.clear()
            found = self._found[n] = tuple(tensor[:n] for tensor in self._tensors)
        return found


LENGTHS = 16
"""So many launch lengths are remembered for each kernel."""


def numbers(count: int, like: Tensor) -> Tensor:
    """0 to count - 1, int32, where `like` lies; not to be written to. Made once for each length and place, from those of the
    place where it was given some, since a launch must not upload constants."""
    key = count, like.place
    found = _NUMBERS.get(key)
    if found is None:
        counted = _NUMBERS.get((COUNTED, key[1]))
        found = counted[:count] if counted is not None and count < COUNTED else _uploaded_numbers(*key)
        _NUMBERS[key] = found
    return found


_NUMBERS: dict[tuple[int, Any], Tensor] = {}
COUNTED = 1 << 18
"""So many numbers are given to a place that is not the host: as many as the largest vocabularies have ids."""


def give_numbers(place: Any) -> None:
    """Upload them, when the place is opened."""
    _NUMBERS[COUNTED, place] = _uploaded_numbers(COUNTED, place)


def _uploaded_numbers(count: int, place: Any) -> Tensor:
    return paddle.to_tensor(np.arange(count, dtype=np.int32), place=place)


def multiples(count: int, step: int, like: Tensor) -> Tensor:
    """The first `count` multiples of `step`, from 0 on, int32, where `like` lies; not to be written to. Made once for each."""
    key = count, step, like.place
    found = _MULTIPLES.get(key)
    if found is None:
        counted = numbers(count, like)
        found = _MULTIPLES[key] = direct.multiply(counted, number(step, counted))
    return found


_MULTIPLES: dict[tuple[int, int, Any], Tensor] = {}


def constant(value: float, like: Tensor, dtype: str | None = None) -> Tensor:
    """A tensor of the shape and place of `like`, in `dtype` or its own, filled with `value`; not to be written to."""
    return full(like.shape, value, like, dtype)


def full(shape: list[int], value: float, like: Tensor, dtype: str | None = None) -> Tensor:
    """The same in another shape."""
    key = value, tuple(shape), dtype or like.dtype, like.place
    found = _CONSTANTS.get(key)
    if found is None:
        found = paddle.full(shape, value, key[2])
        if math.prod(key[1]) <= KEPT:
            _CONSTANTS[key] = found
    return found


_CONSTANTS: dict[tuple[float, tuple[int, ...], Any, Any], Tensor] = {}


def number(value: int, like: Tensor) -> Tensor:
    """`value` as a tensor of one element in the dtype and at the place of `like`, not to be written to: what is computed with
    a bare number may pass through float32 on its way."""
    key = value, like.dtype, like.place
    found = _SINGLE.get(key)
    if found is None:
        found = _SINGLE[key] = paddle.full_like(like.reshape([-1])[:1], value)
    return found


_SINGLE: dict[tuple[int, Any, Any], Tensor] = {}


SHAPES = 4
"""So many shapes of a tensor are kept: those of the target's pass and the draft passes, on both sides of a block's border."""


class Kept:
    """Tensors on the host by name, overwritten in place where their shape is one of the `most` met last: passes of a few shapes
    follow one another, and making a tensor takes longer than what is done with it."""

    def __init__(self, most: int = SHAPES) -> None:
        self._found: dict[str, dict[tuple[int, ...], tuple[Tensor, Array]]] = {}
        self._most = most

    def get(self, name: str, shape: tuple[int, ...], dtype: str = "int32") -> tuple[Tensor, Array]:
        """A tensor of this shape and the array over the same bytes, holding anything."""
        shapes = self._found.setdefault(name, {})
        found = shapes.get(shape)
        if found is None:
            if len(shapes) == self._most:
                del shapes[next(iter(shapes))]
            array = np.empty(shape, dtype)
            found = shapes[shape] = paddle.from_dlpack(array), array  # the other way round Paddle 3.2 gives a read-only array
        return found

    def put(self, name: str, values: Array) -> Tensor:
        """`values` as an int32 tensor."""
        tensor, array = self.get(name, values.shape)
        array[...] = values
        return tensor


class _Indices(threading.local):
    def __init__(self) -> None:
        self.kept = Kept(256)


def index_of(values: Array) -> Tensor:
    """The integers `values` [n] as an int32 tensor on the host, which holds them until this thread asks for as many again."""
    return _INDICES.kept.put("index", values)


_INDICES = _Indices()


def on_host(x: Tensor) -> bool:
    """Whether bare numbers cost nothing beside `x`: elsewhere Paddle makes a tensor of each, with a kernel, every time."""
    return bool(x.place.is_cpu_place())


def clamp(index: Tensor) -> Tensor:
    """`index` with 0 for what is negative."""
    return direct.clip(index, 0, LARGEST) if on_host(index) else direct.maximum(index, number(0, index))


def carried(index: Tensor) -> Tensor:
    """Which of these slots, rows or ids there are: none is negative."""
    return index >= 0 if on_host(index) else direct.greater_equal(index, number(0, index))


def equals(x: Tensor, value: int) -> Tensor:
    """Where `x` is `value`."""
    return x == value if on_host(x) else direct.equal(x, number(value, x))


def above(x: Tensor, value: int) -> Tensor:
    """Where `x` is greater than `value`."""
    return x > value if on_host(x) else direct.greater_than(x, number(value, x))


def within(index: Tensor, count: int) -> Tensor:
    """`index` clipped to 0 and `count` - 1."""
    return direct.clip(index, 0, count - 1)


def take(table: Tensor, index: Tensor) -> Tensor:
    """Rows of `table` at `index`, none of which is negative."""
    return direct.gather(table, index, 0)


def part(table: Tensor, begin: int, end: int) -> Tensor:
    """Rows `begin` to `end` of a table that lies in one piece, as a view."""
    return direct.view_slice(table, begin, end)


def flat(table: Tensor) -> Tensor:
    """The elements of a table that lies in one piece, as a view."""
    return direct.view_shape(table, [-1])


def and_behind(table: Tensor) -> Tensor:
    """A buffer or weight and the row that lies behind it (`PaddleDevice.empty`), for whoever looks up none of its rows: zeros,
    and NO_TOKEN and NO_BLOCK in a table of int32. Drafts and tokens that go nowhere are written there, where nobody looks them
    up: tokens to the last place, since the first one is looked up."""
    return table.and_behind


def kept_as(weight: Tensor, dtype: Any) -> Tensor:
    """A weight in `dtype`; where that is another than it has, a copy that is made once and filled anew with it (`refresh`). Not
    to be asked for in a step."""
    if weight.dtype == dtype:
        return weight
    copies = weight.__dict__.setdefault("copies", {})
    if dtype not in copies:
        copies[dtype] = paddle.empty(weight.shape, dtype)
        refresh(weight)
    return copies[dtype]


CONVERTED = 1 << 26
"""Bytes of a weight that are in memory at a time in another dtype than it is kept in."""


def refresh(weight: Tensor) -> None:
    """Fill the copies of a weight in other dtypes with what it holds now."""
    for copy in weight.__dict__.get("copies", {}).values():
        rows = max(1, CONVERTED * weight.shape[0] // max(1, copy.size * copy.element_size()))
        for begin in range(0, weight.shape[0], rows):
            copy[begin : begin + rows].copy_(weight[begin : begin + rows].astype(copy.dtype), False)


def at(table: Tensor, index: Tensor) -> Tensor:
    """Rows of `table` at `index`; a negative index reads row 0, which the caller masks."""
    return take(table, clamp(index))


def taken(index: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    """Of each of these tables [B] int32 the elements at `index` [n], none of which is negative, by one gather."""
    rows = direct.gather(direct.stack(tables, 0), index, 1)
    return tuple(direct.view_shape(part(rows, i, i + 1), [-1]) for i in range(len(tables)))


def pick(table: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """`table[row, column]` for indices of one shape, clipped into the table; zeros from a table without columns."""
    rows, columns = table.shape
    if not columns:
        return paddle.zeros_like(row + column).astype(table.dtype)
    row, column = within(row, rows), within(column, columns)
    if rows * columns > LARGEST:
        row, column = direct.cast(row, paddle.int64), direct.cast(column, paddle.int64)
    place = direct.add(direct.multiply(row, number(columns, row)), column)
    found = take(direct.reshape(table, [-1]), direct.reshape(place, [-1]))
    return direct.reshape(found, place.shape)


def choose(condition: Tensor, yes: Tensor, no: Tensor | float) -> Tensor:
    """`paddle.where` with a number as the second choice."""
    shape = yes.shape
    if isinstance(no, paddle.Tensor):
        other, same = no, no.shape == shape
    else:
        other, same = constant(no, yes), True
    if same and condition.shape == shape:
        return direct.where(condition, yes, other)
    return paddle.where(condition, yes, other)


def both(first: Tensor, second: Tensor) -> Tensor:
    """Where both hold, broadcast."""
    return direct.bitwise_and(first, second)


def masked(value: Tensor, condition: Tensor) -> Tensor:
    """`value`, int32, with 0 where the condition does not hold, broadcast."""
    if condition.shape == value.shape:
        return direct.where(condition, value, constant(0, value))
    return direct.multiply(value, as_int(condition))


def as_int(condition: Tensor) -> Tensor:
    """1 where it holds, else 0; int32."""
    return direct.cast(condition, paddle.int32)


def first_where(condition: Tensor) -> Tensor:
    """Place along the last axis of the first element that holds, int32; the size of the axis where none does. By a maximum,
    because not every place has one of int32 the other way round, nor says which of equal maxima its `argmax` finds."""
    return condition.shape[-1] - direct.max(_behind(condition), [-1], False)


def first_of(condition: Tensor) -> Tensor:
    """The same where one does, and any place where none does: those that hold have different numbers, of which every `argmax`
    finds the greatest."""
    return _behind(condition).argmax(axis=-1, dtype="int32")


def _behind(condition: Tensor) -> Tensor:
    """Of elements that hold how many places of the last axis there are from each on, 0 of the others; int32."""
    key = condition.shape[-1], condition.place
    behind = _BEHIND.get(key)
    if behind is None:
        behind = _BEHIND[key] = key[0] - numbers(key[0], condition)
    return direct.multiply(as_int(condition), behind)


_BEHIND: dict[tuple[int, Any], Tensor] = {}
"""By size and place, how many places of an axis there are from each one on."""


def ranges_of(ends: Tensor, values: Tensor) -> Tensor:
    """How many of `ends` [s], which ascend, each of `values` [n] has reached: the range that it is in, int32 [n]. By comparing
    all of them, which needs no search on the place."""
    reached = direct.less_equal(direct.unsqueeze(ends, [0]), direct.unsqueeze(values, [1]))
    return direct.sum(reached, [1], paddle.int32, False)


def named(slots: Tensor, num_slots: int) -> Tensor:
    """For each slot: whether some entry of `slots` [n] names it, bool [num_slots]."""
    return direct.any(_names(slots, num_slots), [1], False)


def owners(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """For each slot: whether some entry of `slots` [n] names it, and the first that does, int32 [num_slots].

    A slot is named at most once, so writing by slot becomes a gather: no scatter_rows, no race."""
    names = _names(slots, num_slots)
    return direct.any(names, [1], False), as_int(names).argmax(axis=1, dtype="int32")


def _names(slots: Tensor, num_slots: int) -> Tensor:
    return direct.equal(direct.unsqueeze(slots, [0]), direct.unsqueeze(numbers(num_slots, slots), [1]))


def write_where(target: Tensor, condition: Tensor, value: Tensor | float) -> None:
    """Overwrite `target`, which lies in one piece, in place where `condition` holds, which is broadcast over the trailing axes,
    as `value` is over all."""
    if condition.ndim < target.ndim:
        condition = direct.reshape(condition, [*condition.shape, *[1] * (target.ndim - condition.ndim)])
    if condition.shape != target.shape:
        condition = condition.expand_as(target)
    chosen = value if isinstance(value, paddle.Tensor) else constant(value, target)
    chosen = chosen if chosen.dtype == target.dtype else direct.cast(chosen, target.dtype)
    if chosen.shape != target.shape:
        chosen = chosen.expand_as(target)
    into(target, target.shape[0], direct.where, condition, chosen, target)


class Column(NamedTuple):
    """One column of a table [B, K] by slot."""

    table: Tensor
    number: int


Write = tuple[Any, Any, Any]
"""A tensor by slot or a `Column`, the value of each entry (or one for all), and which entries it holds for (None: all)."""


def file_by_slot(slots: Tensor, valid: Tensor, *writes: Write) -> None:
    """Write values of entries [n] to the slots that they name, where the entry is `valid`. A slot is named at most once, and
    looks for its entry."""
    first = writes[0][0]
    found, row = owners(choose(valid, slots, -1), (first.table if isinstance(first, Column) else first).shape[0])
    for target, value, where in writes:
        condition = found if where is None else both(found, take(where, row))
        filed = take(value, row) if isinstance(value, paddle.Tensor) else value
        if isinstance(target, Column):
            there = equals(numbers(target.table.shape[1], slots), target.number)
            condition, filed = both(direct.unsqueeze(condition, [1]), direct.unsqueeze(there, [0])), direct.unsqueeze(filed, [1])
            write_where(target.table, condition, filed)
        else:
            write_where(target, condition, filed)


def scatter_rows(table: Tensor, index: Tensor, value: Tensor, valid: Tensor) -> None:
    """`table[index[i]] = value[i]` where `valid[i]`; table [R] or [R, W] in place, index and valid [n], n > 0.

    An entry that is not valid repeats a valid one; when there is none, row 0 is written with what it holds. Rows go by
    `put_along_axis` where memory is not the host's: there `scatter` may wait for its index."""
    one = as_int(valid).argmax(axis=0, keepdim=True, dtype="int32")
    some = take(valid, one)
    spare_index = direct.where(some, take(index, one), constant(0, one))
    repeated = constant(0, index)
    index = direct.where(valid, index, take(spare_index, repeated))
    if value.ndim == 1:
        spare = direct.where(some, take(value, one), table[:1])
        written = direct.where(valid, value, take(spare, repeated))
        in_place(direct.put_along_axis_, table, index, written, 0, "assign", True)
        return
    wide = direct.unsqueeze(some, [1]).expand([1, value.shape[1]])
    spare = paddle.where(wide, take(value, one), table[:1])
    column = direct.unsqueeze(valid, [1])
    written = paddle.where(column.expand_as(value), value, take(spare, repeated))
    if table.place.is_cpu_place():
        in_place(paddle.scatter_, table, index, written)
    else:
        in_place(direct.put_along_axis_, table, direct.unsqueeze(index, [1]).expand_as(value), written, 0, "assign", True)


def in_place(operation: Callable[..., Any], table: Tensor, *arguments: Any) -> None:
    """Run an operation that writes in place on `table`, which lies in one piece. Where Paddle falls back to the CPU, such an
    operation gives the tensor at hand new memory with the result, and what else looks at the old one never sees it. So a further
    view is handed over, and copied back where it has moved; on a device that has the operation nothing is copied."""
    view = direct.view_shape(table, table.shape)
    operation(view, *arguments)
    if view.data_ptr() != table.data_ptr():
        table.copy_(view, False)


def into(buffer: Tensor, n: int, operation: Callable[..., Any], *arguments: Any) -> None:
    """Run an operation of `direct` that writes its result straight over the first `n` rows of `buffer`, in the buffer's dtype.
    Where Paddle falls back to the CPU the result is copied there. Raises `ContractError` for another shape."""
    out = part(buffer, 0, n)
    wanted = out.shape
    operation(*arguments, out=out)
    if out.shape != wanted:
        raise _other_shape(out.shape, wanted)
    if out.data_ptr() != buffer.data_ptr():
        buffer[:n].copy_(out, False)


def into_as(buffer: Tensor, n: int, dtype: Any, operation: Callable[..., Any], *arguments: Any) -> None:
    """The same for an operation whose result is of `dtype`, converted where the buffer has another."""
    if buffer.dtype == dtype:
        into(buffer, n, operation, *arguments)
    else:
        into(buffer, n, direct.cast, operation(*arguments), buffer.dtype)


def put_chosen(buffer: Tensor, n: int, condition: Tensor, yes: Tensor, no: float) -> None:
    """Over the first `n` rows of `buffer`: `yes`, of its dtype, where `condition` holds, which has the same shape; else `no`."""
    into(buffer, n, direct.where, condition, yes, constant(no, yes))


def put(out: Tensor, value: Tensor) -> None:
    """Copy `value` over `out` in place, converted to its dtype; queued, never waited for. Raises `ContractError` for another
    shape: Paddle's own copy would take on the source's shape and write past the end of the target's memory."""
    if out.shape != value.shape:
        raise _other_shape(value.shape, out.shape)
    out.copy_(value if value.dtype == out.dtype else value.astype(out.dtype), False)


def _other_shape(got: list[int], wanted: list[int]) -> ContractError:
    return ContractError(
        f"a kernel's result has shape {tuple(got)}, wanted {tuple(wanted)}; bind buffers of the launch's capacity"
    )
