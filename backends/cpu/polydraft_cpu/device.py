"""Owns the CPU as a device: aligned arrays as device memory, a context of the compiled library with its threads, captures.

`polydraft_open_device` makes one an engine. Launches and copies are done when they return; everything else is the protocol
of `polydraft.device`, in the way of the reference device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from polydraft.device import DTYPES, Array, Buffer, Staging, Stream
from polydraft.errors import DeviceError
from polydraft.reference.device import NumpyBuffer, ReferenceDevice
from polydraft_cpu import library
from polydraft_cpu.options import CpuOptions

ALIGNMENT = 64
"""Bytes: a cache line and the widest vector."""


def aligned(shape: Sequence[int], dtype: Any) -> Array:
    """An array of zeros that starts at a cache line."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    array: Array = raw[start : start + size].view(dtype).reshape(shape)
    return array


class CpuDevice(ReferenceDevice):
    """The CPU. `gate` is None while launches simply run; in a capture, and on a closed device, it is called first by each."""

    def __init__(self, options: CpuOptions, *, dtype: str, row_invariant: bool) -> None:
        super().__init__("cpu", dtype=dtype, row_invariant=row_invariant)
        self.options, self.library = options, library.load()
        level = options.isa or library.levels()[-1]
        self.context = self.library.pd_open(level.encode(), options.num_threads, options.pin)
        if not self.context:
            raise DeviceError(f"device option isa={level}: {library.last_error()}; choose one of those or leave it out")
        self.level = level
        self.gate: Callable[[object], None] | None = None
        self.kept: list[Any] | None = None
        """What the launches of the capture in progress are bound to."""
        self.rope_tables: dict[tuple[float, int, int], Array] = {}
        self._finalizer = weakref.finalize(self, self.library.pd_close, self.context)

    @property
    def act_code(self) -> int:
        """Number of the activation dtype in the library."""
        return library.DTYPE_CODES[self.dtype]

    # -- memory ------------------------------------------------------------------------------------
    def _allocate(self, name: str, shape: Sequence[int], dtype: str) -> Array:
        if not self._open:
            raise DeviceError(f"device {self.spec} is closed; open a new engine to allocate {name}")
        self.refuse_in_capture(f"allocating {name}")
        try:
            array = aligned(shape, DTYPES[dtype])
        except MemoryError as error:
            size = math.prod(shape) * DTYPES[dtype].itemsize
            raise DeviceError(
                f"device {self.spec} could not allocate {size:,} bytes for {name}; lower --num-blocks, --max-num-seqs or "
                "--max-batched-tokens"
            ) from error
        self.counters.allocations += 1
        self.counters.bytes_allocated += array.nbytes
        return array

    def empty(self, name: str, shape: Sequence[int], dtype: str) -> NumpyBuffer:
        """Allocate a buffer; `DeviceError` when memory is short, in a capture, and on a closed device."""
        return NumpyBuffer(name, self._allocate(name, tuple(shape), dtype), dtype)

    def load(self, target: Buffer, value: Array) -> None:
        """Overwrite a buffer from the host, outside the step path."""
        self.refuse_in_capture(f"loading {target.name}")
        super().load(target, value)

    # -- copies and waits --------------------------------------------------------------------------
    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        """Copy the first `rows` of staging into a buffer."""
        self.refuse_in_capture("an upload")
        super().upload(stream, target, source, rows)

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """Copy the first `rows` of a buffer into staging."""
        self.refuse_in_capture("a download")
        super().download(stream, target, source, rows)

    def synchronize(self) -> None:
        """Everything has run already; refused in a capture."""
        self.refuse_in_capture("waiting for the device")
        super().synchronize()

    def refuse_in_capture(self, what: str) -> None:
        """Raise `DeviceError` while a capture records launches."""
        if self.kept is not None:
            raise DeviceError(f"{what} while a graph is captured; do it before the capture begins")

    # -- captures ----------------------------------------------------------------------------------
    def begin_capture(self) -> None:
        """Record launches from now on instead of running them."""
        self.refuse_in_capture("beginning another capture")
        self.kept = []
        self.gate = self.kept.append
        self.library.pd_record(self.context)

    def end_capture(self) -> tuple[int, list[Any]]:
        """The address of the recorded program, and what has to live as long as it."""
        kept, self.kept, self.gate = self.kept, None, None
        program = self.library.pd_recorded(self.context)
        assert kept is not None, "a capture has begun"
        return program, kept

    def close(self) -> None:
        """End the threads; a launch, copy or allocation after this raises `DeviceError`."""
        if self._open:
            self.library.pd_stop(self.context)
        self.gate = _closed
        super().close()


def _closed(what: object) -> NoReturn:
    del what
    raise DeviceError("device cpu is closed; open a new engine")
