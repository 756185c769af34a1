"""The guarded view through which the host reaches pinned staging: every read and write of it is reported to the checker.

`WatchedStaging.array` hands it out instead of the plain array. It is an ordinary array in all else, and never delays, copies
or refuses an access. Two ways around it are not seen: a plain array made of it by `np.asarray`, and C code given its address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from polydraft.device import Array, Staging
from polydraft.instruments.sanitize.checker import Checker
from polydraft.instruments.sanitize.memory import StagingMemory


class WatchedStaging:
    """Staging of the inner device, with a guarded `array`."""

    def __init__(self, inner: Staging, checker: Checker, memory: StagingMemory) -> None:
        self.inner, self.memory, self._checker = inner, memory, checker

    @property
    def array(self) -> Array:
        """The host view; its rows are the first dimension."""
        view = self.inner.array.view(WatchedArray)
        view.guard = Guard(self._checker, self.memory, self.inner.array)
        return view


class Guard:
    """Turns accesses to arrays within one staging into rows of it."""

    def __init__(self, checker: Checker, memory: StagingMemory, whole: Array) -> None:
        self._checker, self._memory = checker, memory
        self._start, self._row_bytes = address(whole), max(1, whole.nbytes // max(1, len(whole)))

    def reads(self, view: Array) -> None:
        """The host reads what `view` shows."""
        if view.size:
            self._checker.host_reads_staging(self._memory, *self._rows(view))

    def writes(self, view: Array) -> None:
        """The host writes what `view` shows."""
        if view.size:
            self._checker.host_writes_staging(self._memory, *self._rows(view))

    def _rows(self, view: Array) -> tuple[int, int]:
        steps = [(size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)]
        low = address(view) + sum(step for step in steps if step < 0) - self._start
        high = address(view) + sum(step for step in steps if step > 0) + view.itemsize - self._start
        return low // self._row_bytes, -(-high // self._row_bytes)


def address(array: Array) -> int:
    """Address of the first element."""
    return int(array.__array_interface__["data"][0])


class WatchedArray(np.ndarray[Any, np.dtype[Any]]):
    """A view of staging. Slices are watched views, too; whatever takes values out of one, or puts some in, is reported."""

    guard: Guard | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.guard = getattr(source, "guard", None)

    def plain(self) -> Array:
        """The same view, unwatched."""
        return self.view(np.ndarray)

    def reading(self) -> Array:
        """The same view, unwatched, once the read has been reported."""
        plain = self.plain()
        if self.guard is not None:
            self.guard.reads(plain)
        return plain

    def writing(self) -> Array:
        """The same view, unwatched, once the write has been reported."""
        plain = self.plain()
        if self.guard is not None:
            self.guard.writes(plain)
        return plain

    def __getitem__(self, key: Any) -> Any:
        plain = self.plain()
        result = plain[key]
        if isinstance(result, np.ndarray) and (not result.size or np.may_share_memory(result, plain)):
            return super().__getitem__(key)
        if self.guard is not None:
            self.guard.reads(_touched(plain, key))
        return result

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = self.plain()
        if self.guard is not None:
            self.guard.writes(_touched(plain, key))
        plain[key] = _unwatched(value)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[Any, ...] = (), **options: Any) -> Any:
        plain_inputs = [_unwatched(value) for value in inputs]
        if not out:
            return getattr(ufunc, method)(*plain_inputs, **options)
        targets = tuple(t.writing() if isinstance(t, WatchedArray) else t for t in out)
        getattr(ufunc, method)(*plain_inputs, out=targets, **options)
        return out[0] if len(out) == 1 else out

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        del types
        if function is np.copyto:  # the one function that writes its first argument
            target, source, *rest = args
            target = target.writing() if isinstance(target, WatchedArray) else target
            return np.copyto(target, _unwatched(source), *rest, **kwargs)
        return function(*(_unwatched(value) for value in args), **{name: _unwatched(value) for name, value in kwargs.items()})


def _unwatched(value: Any) -> Any:
    """Replace watched arrays by plain ones, as reads; also within a list or tuple."""
    if isinstance(value, WatchedArray):
        return value.reading()
    if isinstance(value, (list, tuple)) and any(isinstance(item, WatchedArray) for item in value):
        return type(value)(_unwatched(item) for item in value)
    return value


def _touched(plain: Array, key: Any) -> Array:
    """What indexing by `key` touches: the view itself for slices; else the rows that an index or a mask picks, from the first
    of them to the last."""
    first = key[0] if isinstance(key, tuple) and key else key
    if isinstance(first, (int, np.integer)):
        at = int(first) % max(1, len(plain))
        return plain[at : at + 1]
    result = plain[key]
    if isinstance(result, np.ndarray) and np.may_share_memory(result, plain):
        return result
    picked = np.asarray(first) if isinstance(first, (list, np.ndarray)) else np.arange(len(plain))
    picked = np.flatnonzero(picked) if picked.dtype == bool else picked % max(1, len(plain))
    return plain[int(picked.min()) : int(picked.max()) + 1] if picked.size else plain[:0]


def _watch_method(name: str, verb: str) -> None:
    plain_method = cast("Callable[..., Any]", getattr(np.ndarray, name))

    def method(self: WatchedArray, *args: Any, **kwargs: Any) -> Any:
        return plain_method(getattr(self, verb)(), *(_unwatched(value) for value in args), **kwargs)

    setattr(WatchedArray, name, method)


READERS = (
    "all", "any", "argmax", "argmin", "argsort", "astype", "choose", "compress", "copy", "cumprod", "cumsum", "diagonal", "dot",
    "dump", "dumps", "flatten", "item", "max", "mean", "min", "nonzero", "prod", "repeat", "round", "searchsorted", "std", "sum",
    "take", "tobytes", "tofile", "tolist", "trace", "var", "__bool__", "__contains__", "__copy__", "__deepcopy__", "__float__",
    "__index__", "__int__", "__reduce__", "__repr__", "__str__",
)  # fmt: skip
"""Methods that take values out; what they return is unwatched."""
WRITERS = ("byteswap", "fill", "partition", "put", "sort")
"""Methods that put values in."""
for _name in READERS:
    _watch_method(_name, "reading")
for _name in WRITERS:
    _watch_method(_name, "writing")
