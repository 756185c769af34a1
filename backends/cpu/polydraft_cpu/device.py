"""The CPU as a device: aligned arrays as device memory, one stream with events, and a context of the compiled library.

`polydraft_open_device` makes one per engine. Launches and copies return at once, and a thread of the library carries them out in
order, unless the device string says `queue=0`. The device does not read memory on the host's behalf before the work issued
earlier has run.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from polydraft.device import DTYPES, Array, Buffer, Launch, Staging, Stream
from polydraft.errors import DeviceError
from polydraft.reference.device import NumpyStaging, ReferenceDevice
from polydraft.reference.provider import Kernel
from polydraft_cpu import library
from polydraft_cpu.host_kernel import HostProvider
from polydraft_cpu.options import CpuOptions
from polydraft_cpu.timeline import CpuTimeline

ALIGNMENT = 64
"""Bytes: a cache line and the widest vector."""
TURN = 64
"""Commands after which somebody looks which of them have run."""


def aligned(shape: Sequence[int], dtype: Any) -> Array:
    """An array of zeros that starts at a cache line."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    array: Array = raw[start : start + size].view(dtype).reshape(shape)
    return array


def rows_of(array: Array) -> tuple[int, int]:
    """The address of an array, and the bytes of a row."""
    return array.ctypes.data, array.nbytes // max(len(array), 1)


class CpuBuffer:
    """Device memory: an array that the host sees once everything that was issued has run."""

    __slots__ = ("__weakref__", "_array", "_device", "dtype", "name", "rows", "shape")

    def __init__(self, name: str, array: Array, dtype: str, device: CpuDevice) -> None:
        self.name, self.dtype, self._array, self._device = name, dtype, array, device
        self.shape: tuple[int, ...] = array.shape
        self.rows = rows_of(array)

    @property
    def host_array(self) -> Array:
        """The memory itself, for binding and for tests; waits."""
        self._device.settle()
        return self._array


class CpuStaging(NumpyStaging):
    """Host memory that copies start from or end in."""

    __slots__ = ("rows",)

    def __init__(self, name: str, array: Array) -> None:
        super().__init__(name, array)
        self.rows = rows_of(array)


class CpuStream:
    """The one queue of a device: whatever was recorded before stands before."""

    def wait(self, event: CpuEvent) -> None:
        """An event of this device lies on this stream, ahead of what follows."""
        event.device.refuse_in_capture("waiting for an event")


class CpuEvent:
    """A point in the stream: the number of the command issued last."""

    __slots__ = ("_number", "device")

    def __init__(self, device: CpuDevice) -> None:
        self.device, self._number = device, 0

    def record(self, stream: Stream) -> None:
        """Move the event behind what was issued."""
        del stream
        self.device.refuse_in_capture("recording an event")
        self._number = self.device.last

    def query(self) -> bool:
        """Whether all of that has run."""
        return self.device.reached(self._number)

    def synchronize(self) -> None:
        """Wait until all of that has run, and work along meanwhile."""
        self.device.refuse_in_capture("waiting for an event")
        self.device.counters.host_syncs += 1
        self.device.wait_for(self._number)


class CpuDevice(ReferenceDevice):
    """The CPU. `gate` is None while launches simply run; in a capture, and on a closed device, it is called first by each."""

    def __init__(self, options: CpuOptions, *, dtype: str, row_invariant: bool) -> None:
        super().__init__("cpu", dtype=dtype, row_invariant=row_invariant)
        self.options, self.library = options, library.load()
        level = options.isa or library.levels()[-1]
        self.context = self.library.pd_open(level.encode(), options.num_threads, options.queue, options.pin)
        if not self.context:
            raise DeviceError(f"device option isa={level}: {library.last_error()}; choose one of those or leave it out")
        self.level = level
        self.gate: Callable[[object], None] | None = None
        self.kept: list[Any] | None = None
        """What the launches of the capture in progress are bound to."""
        self.last = 0
        """The number of the command issued last."""
        self.clocked: CpuTimeline | None = None
        """Where commands are noted while somebody wants a timeline."""
        self.failures: list[tuple[str, BaseException]] = []
        """The kernel in Python that failed, and what it raised; commands behind it are not carried out."""
        self._outstanding: deque[tuple[int, tuple[object, ...]]] = deque()
        self.rope_tables: dict[tuple[tuple[float, ...], float, int], Array] = {}
        self._finalizer = weakref.finalize(self, self.library.pd_close, self.context)

    @property
    def act_code(self) -> int:
        """Number of the activation dtype in the library."""
        return library.DTYPE_CODES[self.dtype]

    # -- order -------------------------------------------------------------------------------------
    def make_stream(self, name: str) -> Any:
        """The one stream there is."""
        del name
        return getattr(self, "stream", None) or CpuStream()

    def event(self) -> CpuEvent:
        """A fresh event, which stands behind nothing."""
        return CpuEvent(self)

    def issued(self, number: int, *memory: object) -> None:
        """Note a command, and keep what it works on until it has run."""
        if self.clocked is not None and number > self.last:
            self.clocked.issued(number)
        self.last = number
        self._outstanding.append((number, memory))
        if number % TURN == 0:
            self._release()

    def reached(self, number: int) -> bool:
        """Whether the command of this number has run; does not wait."""
        return bool(self.library.pd_reached(self.context, number))

    def wait_for(self, number: int) -> None:
        """Wait until the command of this number has run. Raises `DeviceError` where a kernel in Python has failed."""
        self.library.pd_wait(self.context, number)
        self._release(number)
        if self.failures:
            self._give_up()

    def settle(self) -> None:
        """Wait until everything has run; not counted. Raises as `wait_for`."""
        if self._outstanding or self.failures:
            self.wait_for(self.last)

    def _give_up(self) -> NoReturn:
        """Let commands that were issued pass without effect, and raise what a kernel in Python raised."""
        self.library.pd_wait(self.context, self.last)
        self._release(self.last)
        self.library.pd_mend(self.context)
        name, error = self.failures.pop()
        if not isinstance(error, Exception):  # Ctrl-C
            raise error
        raise DeviceError(
            f"kernel {name} failed on device {self.spec} ({type(error).__name__}: {error}); every step in flight is void, "
            "ask again"
        ) from error

    def _release(self, number: int = 0) -> None:
        """Let go of what commands up to this number worked on, and of others that have run."""
        outstanding = self._outstanding
        while outstanding and (outstanding[0][0] <= number or self.reached(outstanding[0][0])):
            outstanding.popleft()

    def synchronize(self) -> None:
        """Wait until everything has run; refused in a capture."""
        self.refuse_in_capture("waiting for the device")
        super().synchronize()
        self.settle()

    # -- launches ----------------------------------------------------------------------------------
    def launch_of(self, op: int, name: str, alive: object) -> Launch:
        """The launch of an operation of the library; `alive` is what it works on."""
        run, counters = self.library.pd_launch, self.counters

        def launch(stream: Stream, n: int) -> None:
            del stream
            if self.gate is not None:
                self.gate(alive)
            counters.launches += 1
            if self.clocked is not None:
                self.clocked.issuing("kernel", name, n)
            self.issued(run(op, n), alive)

        return launch

    def bind_kernel(self, kernel: Kernel) -> Any:
        """The provider through which this device runs a NumPy kernel: queued and captured like a compiled one."""
        return HostProvider(kernel, self)

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        """Wait until everything that was issued has run, and do `work` then; refused in a capture."""
        del stream
        self.refuse_in_capture("work of the host")
        self.settle()
        work()

    # -- memory ------------------------------------------------------------------------------------
    def _allocate(self, name: str, shape: Sequence[int], dtype: str) -> Array:
        self._refuse(f"allocating {name}")
        try:
            array = aligned(shape, DTYPES[dtype])
        except MemoryError as error:
            size = math.prod(shape) * DTYPES[dtype].itemsize
            raise DeviceError(
                f"device {self.spec} could not allocate {size:,} bytes for {name}; lower --num-blocks, --max-num-seqs, "
                "--max-batched-tokens or --max-model-len"
            ) from error
        self.counters.allocations += 1
        self.counters.bytes_allocated += array.nbytes
        return array

    def empty(self, name: str, shape: Sequence[int], dtype: str) -> Any:
        """Allocate a buffer; `DeviceError` when memory is short, in a capture, and on a closed device."""
        return CpuBuffer(name, self._allocate(name, tuple(shape), dtype), dtype, self)

    def staging(self, name: str, shape: Sequence[int], dtype: str) -> CpuStaging:
        """Allocate host memory, likewise."""
        return CpuStaging(name, self._allocate(name, tuple(shape), dtype))

    def load(self, target: Buffer, value: Array) -> None:
        """Overwrite a buffer from the host behind everything that was issued, outside the step path."""
        self.refuse_in_capture(f"loading {target.name}")
        super().load(target, value)

    # -- copies ------------------------------------------------------------------------------------
    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        """Issue a copy of the first `rows` of staging into a buffer."""
        del stream
        self.refuse_in_capture("an upload")
        self.counters.uploads += 1
        self.counters.bytes_uploaded += self._move("upload", target, source, rows)

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """Issue a copy of the first `rows` of a buffer into staging."""
        del stream
        self.refuse_in_capture("a download")
        self.counters.downloads += 1
        self.counters.bytes_downloaded += self._move("download", target, source, rows)

    def _move(self, kind: str, target: Any, source: Any, rows: int) -> int:
        """Bytes that a copy takes between memory of equal rows."""
        if self.gate is not None:
            self.gate(target)
        (to, size), (start, same) = target.rows, source.rows
        assert size == same, "staging has the rows of its buffer"
        nbytes: int = rows * size
        if self.clocked is not None:
            self.clocked.issuing(kind, f"copy {target.name}", rows)
        self.issued(self.library.pd_move(self.context, to, start, nbytes), target, source)
        return nbytes

    def refuse_in_capture(self, what: str) -> None:
        """Raise `DeviceError` while a capture records launches."""
        if self.kept is not None:
            raise DeviceError(f"{what} while a graph is captured; do it before the capture begins")

    def _refuse(self, what: str) -> None:
        """The same, and on a closed device."""
        self.refuse_in_capture(what)
        if not self._open:
            _closed(what)

    # -- times -------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def keep_timeline(self) -> Iterator[None]:
        """Note when launches and copies run, for `timeline`, as long as the context lasts; waits at both ends."""
        self.clocked = CpuTimeline(self)
        try:
            yield
        finally:
            try:
                self.settle()
            finally:
                self.library.pd_time(self.context, 0)
                self.clocked = None

    def now_s(self) -> float:
        """Seconds of the host's clock, which a timeline is on. Raises `DeviceError` while none is kept."""
        self.timeline()
        return time.perf_counter()

    def timeline(self) -> CpuTimeline:
        """What ran since `keep_timeline` began. Raises `DeviceError` while none is kept."""
        if self.clocked is None:
            raise DeviceError(f"device {self.spec} keeps no timeline; ask it to with keep_timeline()")
        return self.clocked

    # -- captures ----------------------------------------------------------------------------------
    def begin_capture(self) -> None:
        """Record launches from now on instead of running them."""
        self._refuse("beginning another capture")
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
        """Let run what was issued and end the threads; a launch, copy or allocation after this raises `DeviceError`."""
        if self._open:
            self.library.pd_stop(self.context)
            self._outstanding.clear()
        self.gate = _closed
        super().close()


def _closed(what: object) -> NoReturn:
    del what
    raise DeviceError("device cpu is closed; open a new engine")
