"""Host memory that can be given back while arrays over it stay: what `sleep` is on the devices of the reference.

Arrays lie in anonymous pages of their own. The operating system takes such pages back when it is told that nobody needs what is
in them, and has zeros in their place when they are touched again (`madvise(2)`, MADV_DONTNEED).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Literal

import numpy as np

from polydraft.device import DTYPES, Array

Kind = Literal["weight", "cache"]


class SleepingPages:
    """All such arrays of one device."""

    def __init__(self) -> None:
        self._arrays: list[tuple[Kind, mmap.mmap, Array]] = []
        self._kept: list[tuple[Array, Array]] = []

    def empty(self, kind: Kind, shape: Sequence[int], dtype: str) -> Array:
        """A fresh array of zeros."""
        size = int(np.prod(shape)) * DTYPES[dtype].itemsize
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array: Array = np.frombuffer(pages, np.uint8, size).view(DTYPES[dtype]).reshape(tuple(shape))
        self._arrays.append((kind, pages, array))
        return array

    def sleep(self, *, keep_weights: bool) -> None:
        """As `Sleeping`."""
        self._kept.clear()
        for kind, pages, array in self._arrays:
            if keep_weights and kind == "weight":
                self._kept.append((array, array.copy()))
            pages.madvise(mmap.MADV_DONTNEED)

    def wake(self) -> None:
        """As `Sleeping`."""
        for array, kept in self._kept:
            array[...] = kept
        self._kept.clear()
