"""The device: buffers that the host cannot see, in-order queues, events. Copies and launches return before they have run.

Core opens it through the hook. Context and program are made once in a process; memory and queues belong to one engine.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pyopencl as cl

from polydraft.contracts.kernels.scatter import Run
from polydraft.contracts.layout import Snapshot
from polydraft.device import DTYPES, Array, DeviceCounters
from polydraft.errors import DeviceError
from polydraft.sentinels import Finish, Phase

LANES = 64
"""Work-items of a group."""
SOURCES = ("common", "rows", "attention", "sampling", "state")


@cache
def compiled(index: int) -> tuple[Any, Any, dict[str, list[str]]]:
    """Context and program of a device, by its place among those of all platforms; and the parameters of each kernel."""
    with told("OpenCL does not answer; install an implementation, such as PoCL"):
        devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    if index >= len(devices):
        known = ", ".join(f"opencl:{i} ({device.name})" for i, device in enumerate(devices)) or "none"
        raise DeviceError(f"device is 'opencl:{index}', there are: {known}; take one of them, or install an implementation")
    numbers = [f"-D{kind.__name__.upper()}_{one.name}={int(one)}" for kind in (Phase, Finish, Snapshot, Run) for one in kind]
    source = "\n".join((files(__package__) / f"{name}.cl").read_text(encoding="utf-8") for name in SOURCES)
    found = re.findall(r"kernel void (\w+)\((.*?)\)", source, re.DOTALL)
    names = {kernel: [one.split()[-1].lstrip("*") for one in parameters.split(",")] for kernel, parameters in found}
    with told(f"{devices[index].name} does not compile the kernels; take another device"):
        context = cl.Context([devices[index]])
        with catch_warnings():
            simplefilter("ignore", cl.CompilerWarning)  # a compiler that says how it went
            return context, cl.Program(context, source).build([*numbers, f"-DLANES={LANES}"]), names


@contextmanager
def told(what: str) -> Iterator[None]:
    """Raise what OpenCL reports as `DeviceError`."""
    try:
        yield
    except cl.Error as error:
        lines = [line for line in str(error).splitlines() if "error:" in line] or [str(error)]
        raise DeviceError(f"{what}. It says: {'; '.join(lines[:3])}") from error


class OpenCLBuffer:
    """Device memory, also that of a weight."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.memory: Any = None
        self.nbytes = int(np.prod(shape)) * DTYPES[dtype].itemsize


@dataclass(frozen=True)
class OpenCLStaging:
    """Host memory that the device reads and writes directly, mapped as long as its array lives."""

    array: Array


class OpenCLStream:
    """An in-order queue."""

    def __init__(self, context: Any) -> None:
        self.queue = cl.CommandQueue(context)

    def wait(self, event: OpenCLEvent) -> None:
        if event.marker is not None:
            cl.enqueue_barrier(self.queue, wait_for=[event.marker])


@dataclass
class OpenCLEvent:
    """A point in a queue. A copy or launch that failed before it is told by `synchronize`."""

    counters: DeviceCounters
    marker: Any = None

    def record(self, stream: OpenCLStream) -> None:
        """It flushes, since nobody may wait for work that its queue keeps back."""
        self.marker = cl.enqueue_marker(stream.queue)
        stream.queue.flush()

    def query(self) -> bool:
        """A failure, which is a negative status, is an end too."""
        return self.marker is None or self.marker.command_execution_status <= cl.command_execution_status.COMPLETE

    def synchronize(self) -> None:
        self.counters.host_syncs += 1
        if self.marker is not None:
            with told("a launch or copy failed; open a new engine"):
                self.marker.wait()


class OpenCLDevice:
    """As the protocol `Device`, with `ManyStreams`: a compute queue, and further ones for copies beside it."""

    def __init__(self, index: int) -> None:
        self.context, self.program, self.parameters = compiled(index)
        self.spec, self.counters = f"opencl:{index}", DeviceCounters()
        self.stream = OpenCLStream(self.context)
        self._streams, self._open = [self.stream], True
        self._taken: list[Any] = []
        self._copies: deque[Any] = deque()

    def make_stream(self, name: str) -> OpenCLStream:
        del name
        self._streams.append(OpenCLStream(self.context))
        return self._streams[-1]

    def empty(self, name: str, shape: Sequence[int], dtype: str) -> OpenCLBuffer:
        if not self._open:
            raise DeviceError(f"{name}: the device is closed; open a new engine")
        buffer = OpenCLBuffer(name, tuple(shape), dtype)
        with told(f"{name} of {buffer.nbytes} bytes is not to be had; lower --num-blocks or --max-num-seqs"):
            buffer.memory = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, max(buffer.nbytes, 1))
        self._taken.append(buffer.memory)
        self.counters.allocations += 1
        self.counters.bytes_allocated += buffer.nbytes
        return buffer

    def staging(self, name: str, shape: Sequence[int], dtype: str) -> OpenCLStaging:
        number, count = DTYPES[dtype], int(np.prod(shape))
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR
        with told(f"staging {name} is not to be had"):
            memory = cl.Buffer(self.context, flags, max(count, 1) * number.itemsize)
            both = cl.map_flags.READ | cl.map_flags.WRITE
            array, _ = cl.enqueue_map_buffer(self.stream.queue, memory, both, 0, (max(count, 1),), number)
        return OpenCLStaging(array[:count].reshape(tuple(shape)))

    def event(self) -> OpenCLEvent:
        return OpenCLEvent(self.counters)

    def upload(self, stream: OpenCLStream, target: OpenCLBuffer, source: OpenCLStaging, rows: int) -> None:
        self.counters.uploads += 1
        self.counters.bytes_uploaded += self._copy(stream, target.memory, source.array[:rows], up=True)

    def download(self, stream: OpenCLStream, target: OpenCLStaging, source: OpenCLBuffer, rows: int) -> None:
        self.counters.downloads += 1
        self.counters.bytes_downloaded += self._copy(stream, source.memory, target.array[:rows], up=False)

    def _copy(self, stream: OpenCLStream, memory: Any, host: Array, up: bool) -> int:
        """Enqueue a copy and keep its event until it is done: pyopencl waits for a copy whose event nobody keeps."""
        while self._copies and self._copies[0].command_execution_status <= cl.command_execution_status.COMPLETE:
            self._copies.popleft()
        if host.nbytes:
            pair = (memory, host) if up else (host, memory)
            self._copies.append(cl.enqueue_copy(stream.queue, *pair, is_blocking=False))
        return host.nbytes

    def load(self, target: OpenCLBuffer, value: Array) -> None:
        if value.shape != target.shape:
            raise DeviceError(f"{target.name} is loaded from shape {value.shape}, wanted {target.shape}; load all of it")
        self.synchronize()
        if value.nbytes:
            cl.enqueue_copy(self.stream.queue, target.memory, np.ascontiguousarray(value, DTYPES[target.dtype]))

    def read(self, source: OpenCLBuffer) -> Array:
        """What is in a buffer, behind all work; not for the step path."""
        self.synchronize()
        value: Array = np.empty(source.shape, DTYPES[source.dtype])
        if value.nbytes:
            cl.enqueue_copy(self.stream.queue, value, source.memory)
        return value

    def memory(self) -> int:
        """Nothing is given back before the end."""
        return self.counters.bytes_allocated

    def synchronize(self) -> None:
        self.counters.host_syncs += 1
        with told("a launch or copy failed; open a new engine"):
            for stream in self._streams:
                stream.queue.finish()

    def close(self) -> None:
        if self._open:
            self.synchronize()
            self._open = False
            self._copies.clear()
            for memory in self._taken:
                memory.release()
