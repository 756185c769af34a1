"""The emulated device: its memory, its streams and events, and copies that happen as late as waits allow.

Core drives it through the protocols of `polydraft.device`, tests through what it has beyond them. It computes nothing itself, and
does not let the host see what has not reached the host yet.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from polydraft.device import DTYPES, Array, DeviceCounters
from polydraft.errors import DeviceError
from polydraft.instruments.sanitize import Observed
from polydraft.reference.device import poison_array
from polydraft.reference.provider import Kernel
from polydraft_emulator.execution import Executor
from polydraft_emulator.kernels import EmulatorProvider
from polydraft_emulator.memory import EmulatorBuffer, EmulatorCache, EmulatorStaging, Memory, row_map
from polydraft_emulator.options import Options
from polydraft_emulator.streams import EmulatorEvent, EmulatorStream, Work
from polydraft_emulator.timeline import Timeline

M = TypeVar("M", bound=Memory)


class EmulatorDevice:
    """One emulated accelerator. Beyond the protocol: more streams, memory that moves or is given back, and a timeline."""

    def __init__(self, options: Options, *, dtype: str = "f32") -> None:
        self.options, self.dtype = options, dtype
        self.counters = DeviceCounters()
        self.executor = Executor(options, self.counters)
        self.guard = self.executor.guard
        self._memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._held = self._peak = 0
        self._streams: list[EmulatorStream] = []
        self.stream = self.make_stream("compute")

    @property
    def spec(self) -> str:
        """The device string that opens this device again."""
        return str(self.options)

    def make_stream(self, name: str) -> EmulatorStream:
        """A further stream; `stream` is the one called compute."""
        self._streams.append(EmulatorStream(name, self.executor))
        return self._streams[-1]

    def event(self) -> EmulatorEvent:
        """A fresh event, which marks nothing."""
        return EmulatorEvent(self.executor)

    # -- memory ------------------------------------------------------------------------------------
    def empty(self, name: str, shape: Sequence[int], dtype: str) -> EmulatorBuffer:
        """Allocate poisoned memory. Raises `DeviceError` when memory is short, in a capture, and on a closed or lost device."""
        self._take(name, math.prod(shape) * DTYPES[dtype].itemsize)
        return self.keep(EmulatorBuffer(name, _poisoned(shape, dtype), dtype, self.guard))

    def staging(self, name: str, shape: Sequence[int], dtype: str) -> EmulatorStaging:
        """Allocate poisoned host memory. Raises as `empty` does, save for its size."""
        self._take(name, 0)
        return EmulatorStaging(name, _poisoned(shape, dtype))

    def keep(self, memory: M) -> M:
        """Take charge of memory that was made for this device; returns it."""
        self._memories.add(memory)
        return memory

    def reserve(self, name: str, nbytes: int) -> None:
        """Count an allocation of `nbytes` for something that is no buffer. Raises as `empty` does."""
        self._take(name, nbytes)

    def give_back(self, nbytes: int) -> None:
        """The opposite of `reserve`."""
        self._held -= nbytes

    def _take(self, name: str, nbytes: int) -> None:
        self.executor.refuse_in_capture(f"allocating {name}")
        self.executor.check_alive()
        capacity, fault = self.options.capacity, self.executor.faults.strike("alloc", name)
        if fault is not None or (capacity is not None and self._held + nbytes > capacity):
            free = "none" if fault or capacity is None else f"{capacity - self._held:,} bytes"
            raise DeviceError(
                f"device {self.spec} could not allocate {nbytes:,} bytes for {name}, free: {free}; lower --num-blocks, "
                "--max-num-seqs or --max-batched-tokens"
            )
        self._held += nbytes
        self._peak = max(self._peak, self._held)
        self.counters.allocations += 1
        self.counters.bytes_allocated += nbytes

    def load(self, target: EmulatorBuffer, value: Array) -> None:
        """Overwrite a buffer from the host, at once and in no stream's order: an error while work in flight uses it."""
        self.executor.refuse_in_capture(f"load of {target.name}")
        self.executor.check_alive()
        self.check_idle(target)
        if target.shape != value.shape:
            raise DeviceError(
                f"buffer {target.name} has shape {target.shape}, got a value of shape {value.shape}; pass that shape"
            )
        with self.guard:
            target.open()[...] = value

    def read(self, source: EmulatorBuffer) -> Array:
        """A copy of a buffer's contents; synchronises; tests only."""
        self.synchronize()
        with self.guard:
            return source.open().copy()

    def row_map(self, num_blocks: int, block_size: int) -> Array:
        """Where the rows of a KV cache of this size lie on this device, [num_blocks * block_size]."""
        if self.options.layout == "plain":
            return np.arange(num_blocks * block_size)
        return row_map(self.options.seed, num_blocks, block_size)

    def check_idle(self, memory: Memory) -> None:
        """Raise `DeviceError` while work that has not run uses `memory`."""
        queued = (work for operation in self.executor.schedule for work, _ in operation.work)
        if any(memory is used for work in queued for used, _ in work.uses):
            raise DeviceError(
                f"device memory {memory.name} was overwritten from the host while work in flight uses it; synchronise before"
            )

    def free(self, memory: Memory) -> None:
        """Give memory back at once: it is poisoned, and opening it raises `DeviceError`. Core never does this."""
        self._held -= memory.nbytes
        memory.give_up()

    def move(self, memory: Memory) -> None:
        """Let memory continue at another address, as a framework does that assigns a new tensor. What was bound to the old
        address finds poison there, and a graph that was captured on it refuses to replay."""
        memory.replace()

    def discard(self, blocks: Array, paged: Mapping[EmulatorBuffer, int] = MappingProxyType({})) -> None:
        """Poison KV blocks [n] in every cache, and in the buffers `paged`, which have so many rows for each block, behind what
        was issued on the compute stream: tests call it for freed blocks."""
        caches = [memory for memory in self._memories if isinstance(memory, EmulatorCache)]
        chosen = np.array(blocks)

        def run() -> None:
            for cache in caches:
                cache.discard(chosen)
            for buffer, rows in paged.items():
                buffer.discard(chosen, rows)

        number, self.operation = self.operation, 0  # the tests' own doing
        self.executor.issue(self.stream, Work("kernel", "discard", len(chosen), run))
        self.operation = number

    def memory(self) -> int:
        """Peak of bytes held, captured graphs included."""
        return self._peak

    def close(self) -> None:
        """Give everything back; what has not run never will."""
        self.executor.close()
        for memory in self._memories:
            if not memory.freed:
                memory.give_up()

    # -- issuing work ------------------------------------------------------------------------------
    def bind_kernel(self, kernel: Kernel) -> EmulatorProvider:
        """The provider through which this device runs a NumPy kernel, of its own table or of a kernel pack."""
        return EmulatorProvider(kernel, self)

    def upload(self, stream: EmulatorStream, target: EmulatorBuffer, source: EmulatorStaging, rows: int) -> None:
        """Queue a copy of the first `rows` rows; the staging is read when the copy runs."""
        use = self.bound(target)
        to, frm = use[1][:rows], source.array[:rows]
        self._check_rows(target, rows)
        self.counters.uploads += 1
        self.counters.bytes_uploaded += to.nbytes
        self.executor.issue(stream, Work("upload", target.name, rows, lambda: np.copyto(to, frm), uses=(use,), spoils=(to,)))

    def download(self, stream: EmulatorStream, target: EmulatorStaging, source: EmulatorBuffer, rows: int) -> None:
        """Queue a copy of the first `rows` rows; all of the staging holds poison until the copy has run."""
        use = self.bound(source)
        to, frm = target.array[:rows], use[1][:rows]
        self._check_rows(source, rows)
        self.counters.downloads += 1
        self.counters.bytes_downloaded += to.nbytes
        whole = target.array
        work = Work("download", source.name, rows, lambda: np.copyto(to, frm), uses=(use,), issued=lambda: poison_array(whole))
        self.executor.issue(stream, work)

    def _check_rows(self, buffer: EmulatorBuffer, rows: int) -> None:
        if not 0 <= rows <= buffer.shape[0]:
            raise DeviceError(
                f"a copy of {rows} rows does not fit buffer {buffer.name}, which has {buffer.shape[0]}; correct the count"
            )

    def bound(self, memory: object) -> tuple[Memory, Array]:
        """Memory of this device and what it shows now, to bind work to. Raises `DeviceError` for anything else."""
        if not isinstance(memory, Memory) or not memory.belongs_to(self.guard):
            raise DeviceError(f"{getattr(memory, 'name', memory)!r} is no memory of device {self.spec}; allocate it there")
        with self.guard:
            return memory, memory.open()

    def enqueue(self, stream: EmulatorStream, work: Callable[[], None], name: str = "host function") -> None:
        """Queue any function as one kernel; device memory is open to it."""
        self.executor.issue(stream, Work("kernel", name, 0, work))

    # -- what a checker asks ---------------------------------------------------------------------------
    @property
    def operation(self) -> int:
        """The number under which work is observed that is issued from now on; 0 for none."""
        return self.executor.eyes.operation

    @operation.setter
    def operation(self, number: int) -> None:
        self.executor.eyes.operation = number

    def observed_accesses(self) -> list[Observed]:
        """What work that has run since the last call has touched: see `observe.py`."""
        return self.executor.eyes.observed()

    @property
    def outstanding(self) -> int:
        """Operations that were issued and have not run."""
        return self.executor.schedule.outstanding

    def synchronize(self) -> None:
        """Run everything; raises the `DeviceError` of whatever failed since the last wait."""
        self.executor.settle(self._streams)

    def now_s(self) -> float:
        """Seconds of modelled host time, the clock of the timeline. Raises `DeviceError` without the option `latency`."""
        if self.executor.clock is None:
            raise DeviceError(f"device {self.spec} keeps no timeline; open it with the option latency, e.g. latency=kernel:20")
        return self.executor.clock.now()

    def timeline(self) -> Timeline:
        """Modelled times of what was issued so far. Raises `DeviceError` without the option `latency`."""
        if self.executor.clock is None:
            raise DeviceError(f"device {self.spec} keeps no timeline; open it with the option latency, e.g. latency=kernel:20")
        return self.executor.clock.timeline()


def _poisoned(shape: Sequence[int], dtype: str) -> Array:
    array = np.empty(tuple(shape), DTYPES[dtype])
    poison_array(array)
    return array
