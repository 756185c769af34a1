"""Owns the few array idioms that every Paddle kernel here is made of: masked gathers, scatters without races, row numbers.

The kernels call them. No shape here depends on data and nothing is read back to the host, so that a kernel made of them can be
queued on a stream and captured in a graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

Tensor = Any
"""A `paddle.Tensor`; the wheel has no types to check against."""


def numbers(count: int, like: Tensor) -> Tensor:
    """0 to count - 1, int32, where `like` lies. Made once for each length and place: a launch does not upload constants."""
    key = count, str(like.place)
    if key not in _NUMBERS:
        _NUMBERS[key] = paddle.to_tensor(np.arange(count, dtype=np.int32), place=like.place)
    return _NUMBERS[key]


_NUMBERS: dict[tuple[int, str], Tensor] = {}


def at(table: Tensor, index: Tensor) -> Tensor:
    """Rows of `table` at `index`; a negative index reads row 0, which the caller masks."""
    return paddle.gather(table, paddle.clip(index, min=0))


def pick(table: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """`table[row, column]` for indices of one shape, clipped into the table; zeros from a table without columns."""
    rows, columns = table.shape
    if not columns:
        return paddle.zeros_like(row + column).astype(table.dtype)
    flat = paddle.clip(row, 0, rows - 1) * columns + paddle.clip(column, 0, columns - 1)
    return paddle.gather(table.reshape([-1]), flat.reshape([-1])).reshape(flat.shape)


def choose(condition: Tensor, yes: Tensor, no: Tensor | float) -> Tensor:
    """`paddle.where` with a number as the second choice."""
    return paddle.where(condition, yes, no if isinstance(no, paddle.Tensor) else paddle.full_like(yes, no))


def owners(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """For each slot: whether some entry of `slots` [n] names it, and the first that does, int64 [num_slots].

    A slot is named at most once, so writing by slot becomes a gather: no scatter, no race."""
    same = slots.unsqueeze(0) == numbers(num_slots, slots).unsqueeze(1)
    return same.any(axis=1), same.astype("int32").argmax(axis=1)


def write_where(target: Tensor, condition: Tensor, value: Tensor | float) -> None:
    """Overwrite `target` in place where `condition` holds, which is broadcast over the trailing axes."""
    while condition.ndim < target.ndim:
        condition = condition.unsqueeze(-1)
    target.copy_(choose(condition.expand_as(target), _filled(target, value), target), False)


def _filled(target: Tensor, value: Tensor | float) -> Tensor:
    return value.astype(target.dtype) if isinstance(value, paddle.Tensor) else paddle.full_like(target, value)


def scatter(table: Tensor, index: Tensor, value: Tensor, valid: Tensor) -> None:
    """`table[index[i]] = value[i]` where `valid[i]`; table [R, ...] in place, index and valid [n], n > 0.

    An entry that is not valid repeats the first valid one; when there is none, row 0 is written with what it holds."""
    first = valid.astype("int32").argmax(axis=0, keepdim=True)
    some = paddle.gather(valid, first)
    spare_index = paddle.where(some, paddle.gather(index, first), paddle.zeros_like(index[:1]))
    wide = some.reshape([1] * value.ndim).expand([1, *value.shape[1:]])
    spare_value = paddle.where(wide, paddle.gather(value, first), table[:1])
    mask = valid.reshape([-1] + [1] * (value.ndim - 1)).expand_as(value)
    index = paddle.where(valid, index, spare_index.expand_as(index))
    paddle.scatter_(table, index, paddle.where(mask, value, spare_value.expand_as(value)))


def put(out: Tensor, value: Tensor) -> None:
    """Copy `value` over `out` in place, converted to its dtype; queued, never waited for."""
    out.copy_(value if value.dtype == out.dtype else value.astype(out.dtype), False)
