"""Device memory that the host cannot read: poisoned when it is allocated, and poisoned again when it is freed.

The device allocates it, and kernels get its arrays while they are bound or run. Any other access, on the host's time, raises an
error that names the memory.
"""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import numpy as np

from polydraft.backend import CacheSpec
from polydraft.contracts.packing import Packing
from polydraft.device import Array
from polydraft.errors import DeviceError, GraphBufferError
from polydraft.reference.device import poison_array
from polydraft.reference.kv_grid import to_grid


class Guard:
    """Counts how deep the device is in work of its own; only then may its memory be opened. Also a context manager. `opened`
    notes what is opened, while somebody wants to know."""

    __slots__ = ("depth", "opened")

    def __init__(self) -> None:
        self.depth = 0
        self.opened: list[Memory] | None = None

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.depth -= 1


class Memory:
    """A stretch of device memory with a name and an address. Its contents are opened to running kernels only."""

    __slots__ = ("__weakref__", "_array", "_guard", "address", "freed", "name")

    def __init__(self, name: str, array: Array, guard: Guard) -> None:
        self.name, self._array, self._guard, self.freed = name, array, guard, False
        self.address = _address(array)
        """Where the memory lies; changes only when the device moves it. Whoever watches asks for it in every launch."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._array.nbytes)

    def open(self) -> Array:
        """The contents, for kernels. Raises `DeviceError` on the host's time and for memory that was given back."""
        if self.freed:
            raise DeviceError(f"device memory {self.name} was freed, yet something uses it; bind to memory that is alive")
        if not self._guard.depth:
            raise DeviceError(
                f"the host looked into device memory {self.name}, which it cannot read; download it and wait for an event behind "
                "the copy"
            )
        if self._guard.opened is not None:
            self._guard.opened.append(self)
        return self._array

    def belongs_to(self, guard: Guard) -> bool:
        """Whether this is memory of the device with this guard."""
        return self._guard is guard

    def is_at(self, array: Array) -> bool:
        """Whether the memory still is what `array`, taken when a kernel was bound, showed."""
        return self._array is array and not self.freed

    # What follows is for the device alone.
    def give_up(self) -> None:
        """Poison and end."""
        poison_array(self._array)
        self.freed = True

    def replace(self) -> None:
        """Continue at another address with the same contents; the old ones are poisoned."""
        old, self._array = self._array, self._array.copy()
        self.address = _address(self._array)
        poison_array(old)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class EmulatorBuffer(Memory):
    """A buffer as core knows it: name, shape, dtype, and nothing to read."""

    __slots__ = ("dtype", "shape")

    def __init__(self, name: str, array: Array, dtype: str, guard: Guard) -> None:
        super().__init__(name, array, guard)
        self.dtype = dtype
        self.shape: tuple[int, ...] = array.shape

    @property
    def host_array(self) -> Array:
        """The contents, under the name that kernels of the NumPy family use; see `open`."""
        return self.open()

    @host_array.setter
    def host_array(self, value: Array) -> None:
        del value
        raise GraphBufferError(
            f"buffer {self.name} cannot be given another array: kernels and graphs are bound to its address; copy into it"
        )

    def discard(self, blocks: Array, rows: int) -> None:
        """Poison the `rows` of each of `blocks`; work of the device."""
        for block in blocks.tolist():
            poison_array(self._array[block * rows : (block + 1) * rows])


class EmulatorWeight(Memory):
    """A prepared weight: float32, canonical shape, and how it came packed."""

    __slots__ = ("packing", "role")

    def __init__(self, role: str, array: Array, guard: Guard, packing: Packing | None = None) -> None:
        super().__init__(f"weight ({role})", array, guard)
        self.role, self.packing = role, packing


class EmulatorCache(Memory):
    """One layer's KV cache [2, num_kv_heads, num_blocks * block_size, head_dim] float32: keys, then values.

    Row r of the paged numbering (block * block_size + place) lies at `row_map[r]`. Fresh and discarded rows hold NaN."""

    __slots__ = ("_settle", "row_map", "spec")

    def __init__(self, spec: CacheSpec, row_map: Array, guard: Guard, settle: Any) -> None:
        shape = (2, spec.num_kv_heads, spec.num_blocks * spec.block_size, spec.head_dim)
        super().__init__("KV cache", np.full(shape, np.nan, np.float32), guard)
        self.spec, self.row_map, self._settle = spec, row_map, settle

    @property
    def kv(self) -> Array:
        """The contents, under the name that kernels use; see `open`."""
        return self.open()

    def read_logical(self) -> tuple[Array, Array]:
        """(k, v) as [num_blocks, block_size, num_kv_heads, head_dim]; synchronises; tests only."""
        self._settle()
        s = self.spec
        rows = self._array[:, :, self.row_map].reshape(2, s.num_kv_heads, s.num_blocks, s.block_size, s.head_dim)
        logical = rows.transpose(0, 2, 3, 1, 4)
        return logical[0].copy(), logical[1].copy()

    def write_logical(self, k: Array, v: Array) -> None:
        """Overwrite all rows; synchronises; tests only."""
        self._settle()
        for index, value in enumerate((k, v)):
            value = to_grid(value, self.spec.kv) if self.spec.kv else value  # noqa: PLW2901  as it is kept
            self._array[index][:, self.row_map] = value.transpose(2, 0, 1, 3).reshape(self._array.shape[1:])

    def discard(self, blocks: Array) -> None:
        """Fill the rows of `blocks` with NaN; work of the device."""
        size = self.spec.block_size
        rows = (blocks[:, None] * size + np.arange(size)).ravel()
        self._array[:, :, self.row_map[rows]] = np.nan


class EmulatorStaging:
    """Pinned host memory: the host may always look, and sees poison where nothing was written yet."""

    __slots__ = ("array", "name")

    def __init__(self, name: str, array: Array) -> None:
        self.name, self.array = name, array


@functools.lru_cache(maxsize=8)
def row_map(seed: int, num_blocks: int, block_size: int) -> Array:
    """Where each row of the paged numbering lies: blocks permuted, and the places within each block permuted, by `seed`.
    Read-only; the same on every version of NumPy, because it is made of raw bits."""
    bits = np.random.PCG64(seed)
    blocks = bits.random_raw(num_blocks).argsort()
    places = bits.random_raw(num_blocks * block_size).reshape(num_blocks, block_size).argsort(axis=1)
    lies: Array = (blocks[:, None] * block_size + places).ravel()
    lies.flags.writeable = False
    return lies
