"""Slot columns on their way to the device: which there are, and a step's writes of them as runs for `scatter`.

The scheduler stages what a request fills when it is admitted, and the blocks that are granted later; the runner uploads runs and
payload and launches `scatter` over them. A column is known here by its declaration alone.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.scatter import Run
from polydraft.device import Array
from polydraft.errors import ConfigError, ContractError, RequestError
from polydraft.program.declare import Admission, Column, sizes_of

HISTORY = "tokens"
"""The column of token histories, of which a step fills as much as the scheduler admits."""
BLOCK_TABLE = "block_table"
"""The column that is written between admissions, too: blocks are granted while a text grows."""
_NUMPY = {"i32": np.int32, "f32": np.float32}
"""Dtypes of columns."""


@dataclass(frozen=True)
class Writes:
    """What a step writes into slot columns: `runs` [U, 5] int32 (words `Run`) and `payload` [T] int32. `admits`: the runs count
    columns among all of the engine's; else all of them are of the block table."""

    runs: Array
    payload: Array
    admits: bool = False

    def __bool__(self) -> bool:
        return len(self.runs) > 0


NOTHING = Writes(np.empty((0, len(Run)), np.int32), np.empty(0, np.int32))


def max_staged_tokens(limits: Limits) -> int:
    """Tokens of histories staged in one step at most: the known text of the requests admitted in it, for which any one text has
    room."""
    return limits.max_len + limits.max_rows


def max_runs(columns: Sequence[Column], limits: Limits) -> int:
    """Runs of one step at most: every slot is admitted, or is granted blocks."""
    return limits.max_seqs * (len(columns) + 1)


def max_payload(columns: Sequence[Column], limits: Limits) -> int:
    """Words of one step's payload at most."""
    widths = sum(column.width(limits) for column in columns if column.name != HISTORY)
    return limits.max_seqs * (widths + limits.max_blocks) + max_staged_tokens(limits)


def check_columns(columns: Sequence[Column], limits: Limits) -> None:
    """Raise `ConfigError` for a column that is neither a value nor a row of values of every slot, or of another dtype."""
    for column in columns:
        sizes = sizes_of(column.shape, limits)
        if column.shape.split()[:1] != ["B"] or len(sizes) > 2 or column.dtype not in _NUMPY:
            raise ConfigError(
                f"slot column {column.name!r} has the shape {column.shape!r} and the dtype {column.dtype!r}, wanted 'B' or 'B "
                f"WIDTH' and one of {', '.join(_NUMPY)}; correct its declaration"
            )


def check_value(column: Column, one: Admission, limits: Limits) -> None:
    """Raise `RequestError` where a column cannot hold what a request puts there, or its `value` raises."""
    if column.value is None:
        return
    try:
        given = column.value(one)
        values = np.asarray(given)
        with np.errstate(all="raise"):
            words = values.astype(_NUMPY[column.dtype])
    except Exception as error:  # noqa: BLE001  the code of a plugin
        said = f"a value that it cannot hold ({type(error).__name__}: {error})"
    else:
        fits = values.ndim == 0 or (values.ndim == 1 and column.shape != "B" and len(values) <= column.width(limits))
        if fits and values.dtype.kind in "biuf" and (column.dtype == "f32" or np.array_equal(words, values)):
            return
        said = reprlib.repr(given)
    wanted = "a number" if column.shape == "B" else f"at most {column.width(limits)} numbers"
    raise RequestError(
        f"the request puts {said} into the slot column {column.name!r}, wanted {wanted} of {column.dtype}; correct the request, "
        "or the plugin that accepts it"
    )


class ColumnWriter:
    """Makes the writes of a step. Most of what an admission writes has its place in one fixed row of words; only columns that are
    not reset after their values come as runs of their own length after it."""

    def __init__(self, columns: Sequence[Column], limits: Limits) -> None:
        self.columns = tuple(columns)
        self._block_table = next(i for i, column in enumerate(columns) if column.name == BLOCK_TABLE)
        self._widths = {column.name: column.width(limits) for column in columns}
        self._loose = [(i, column) for i, column in enumerate(columns) if not column.resets and column.value is not None]
        self._row, self._runs, offsets = self._template([c for c in enumerate(columns) if c[1].resets], limits)
        filled = [(offsets[i], c) for i, c in enumerate(columns) if c.resets and c.value is not None]
        single = [(offset, column) for offset, column in filled if column.shape == "B"]
        self._ints, self._int_values = _split(single, "i32")
        self._floats, self._float_values = _split(single, "f32")
        self._wide = [(offset, column) for offset, column in filled if column.shape != "B"]

    @staticmethod
    def _template(fixed: Sequence[tuple[int, Column]], limits: Limits) -> tuple[Array, Array, dict[int, int]]:
        """The empty row of an admission, its runs (slot and place in the payload still to be added), and each column's offset."""
        words, runs, offsets, offset = [], [], {}, 0
        for index, column in fixed:
            width = column.width(limits)
            words.append(_words(np.full(width, column.empty), column.dtype))
            runs.append((index, 0, 0, width, offset))
            offsets[index] = offset
            offset += width
        return np.concatenate(words), np.array(runs, np.int32), offsets

    def admissions(self, admitted: Sequence[Admission], slots: Array, starts: Array, counts: Array, blocks: Array) -> Writes:
        """Everything that the admitted requests fill, and the blocks granted to other slots (as in `grants`)."""
        runs, payload, offset = [], [], 0
        for one in admitted:
            row, mine = self._row.copy(), self._runs.copy()
            row[self._ints] = [value(one) for value in self._int_values]
            row[self._floats] = np.array([value(one) for value in self._float_values], np.float32).view(np.int32)
            for place, column in self._wide:
                values = self._values(one, column)
                row[place : place + len(values)] = values
            mine[:, Run.SLOT] = one.slot
            mine[:, Run.OFFSET] += offset
            runs.append(mine)
            payload.append(row)
            offset += len(row)
            for index, column in self._loose:
                values = self._values(one, column)
                if len(values):
                    runs.append(np.array([(index, one.slot, 0, len(values), offset)], np.int32))
                    payload.append(values)
                    offset += len(values)
        granted = self.grants(slots, starts, counts, blocks)
        if granted:
            granted.runs[:, Run.COLUMN] = self._block_table
            granted.runs[:, Run.OFFSET] += offset
            runs.append(granted.runs)
            payload.append(granted.payload)
        return Writes(np.concatenate(runs), np.concatenate(payload), admits=True)

    def _values(self, one: Admission, column: Column) -> Array:
        """The words of a column that has values. Raises `ContractError` where they are more than it is wide: they would lie in
        the next column, or in the next slot."""
        assert column.value is not None, "only columns with a value are asked"
        values = _words(column.value(one), column.dtype)
        if len(values) > self._widths[column.name]:
            raise ContractError(
                f"slot column {column.name!r} got {len(values)} values for slot {one.slot}, wanted at most "
                f"{self._widths[column.name]}; correct its `value`"
            )
        return values

    @staticmethod
    def grants(slots: Array, starts: Array, counts: Array, blocks: Array) -> Writes:
        """Blocks granted to `slots`, `counts[i]` of them from entry `starts[i]` of its table on, one slot after the other in
        `blocks`."""
        if not len(blocks):
            return NOTHING
        runs = np.zeros((len(slots), len(Run)), np.int32)
        runs[:, Run.SLOT], runs[:, Run.START], runs[:, Run.COUNT] = slots, starts, counts
        runs[:, Run.OFFSET] = np.cumsum(counts) - counts
        return Writes(runs[counts > 0], blocks)


def _split(columns: Sequence[tuple[int, Column]], dtype: str) -> tuple[Array, list[Callable[[Admission], Any]]]:
    """Offsets and values of the columns of one dtype."""
    mine = [(offset, column.value) for offset, column in columns if column.dtype == dtype and column.value is not None]
    return np.array([offset for offset, _ in mine], np.intp), [value for _, value in mine]


def _words(values: object, dtype: str) -> Array:
    """Values of a column as its words."""
    if dtype == "f32":
        return np.atleast_1d(np.asarray(values, np.float32)).view(np.int32)
    return np.atleast_1d(np.asarray(values)).astype(np.int32, copy=False)
