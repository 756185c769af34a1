"""One open NVIDIA GPU: memory, streams, events, pinned staging, copies, and the kernels loaded onto it.

`polydraft_open_device` returns it and every provider binds through it. It works in the device's primary context, as other
libraries of the process do, so that memory is shared with them. It does not wait for the device on the step path.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from polydraft.device import DTYPES, Array, Buffer, DeviceCounters, Event, Staging, Stream
from polydraft.errors import DeviceError
from polydraft_cuda import driver
from polydraft_cuda.compiler import Function, Module, compile_source
from polydraft_cuda.remapped import DROPPED, RemappedMemory
from polydraft_cuda.timeline import KINDS, CudaTimeline

if TYPE_CHECKING:
    from polydraft_cuda.ipc import SharedTensors

SPARE = 1 << 28
"""Bytes that the driver should find free for what it needs itself."""
ALIGNMENT = 256
"""Bytes to which an allocation is rounded up: nothing shares a line, and an empty buffer has an address."""
REMAPPED = ("weight", DROPPED)
"""Kinds of memory, the first word of a name, that an engine which may sleep gives back."""


class CudaBuffer:
    """Device memory at a fixed address; freed when its device is closed, or with the last reference to it.

    Exchanges with other libraries without copying: `__dlpack__` and `__cuda_array_interface__` (`interop.py`)."""

    def __init__(self, device: CudaDevice, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype, self.device = name, shape, dtype, device
        self.nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        self.pointer = device.allocate(name, self.nbytes)
        self._release = weakref.finalize(self, device.free, self.pointer)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; bf16 travels as its 16 bits."""
        from polydraft_cuda.interop import cuda_array_interface

        return cuda_array_interface(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(kDLCUDA, index)."""
        return 2, self.device.index

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """A capsule over this memory; `stream` of the consumer waits for what is queued here."""
        from polydraft_cuda.interop import export_dlpack

        del options  # maximal versions and copies that a consumer would allow: the plain form serves all
        return export_dlpack(self, stream)


class CudaStaging:
    """Page-locked host memory, so that copies run beside the host. Freed with the last reference to `array` or its views."""

    def __init__(self, device: CudaDevice, name: str, shape: tuple[int, ...], dtype: str) -> None:
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        self.name = name
        self.pointer = device.allocate_host(name, nbytes)
        memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(self.pointer)
        weakref.finalize(memory, device.free_host, self.pointer)
        self.array: Array = np.frombuffer(memoryview(memory), np.uint8, nbytes).view(DTYPES[dtype]).reshape(shape)


class CudaStream:
    """An in-order queue that never waits for the legacy default stream."""

    def __init__(self, device: CudaDevice, name: str = "compute") -> None:
        self.name, self._cuda = name, device.cuda
        flags = device.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = device.call("cuStreamCreate", flags, doing=f"creating stream {name}")
        self.address = int(self.handle)

    def wait(self, event: Event) -> None:
        """Later work waits for `event`; the host does not."""
        driver.check(self._cuda.cuStreamWaitEvent(self.handle, event.handle, 0), "waiting for an event")  # type: ignore[attr-defined]


class CudaEvent:
    """A point in a stream. `timed` ones can be subtracted (`since`)."""

    def __init__(self, device: CudaDevice, *, timed: bool = False) -> None:
        self._device, self._cuda = device, device.cuda
        kinds = device.cuda.CUevent_flags
        self.handle = device.call("cuEventCreate", kinds.CU_EVENT_DEFAULT if timed else kinds.CU_EVENT_DISABLE_TIMING)
        weakref.finalize(self, _quietly, device.cuda.cuEventDestroy, self.handle)

    def record(self, stream: Stream) -> None:
        """Behind all work queued on `stream` so far."""
        driver.check(self._cuda.cuEventRecord(self.handle, stream.handle), "recording an event")  # type: ignore[attr-defined]

    def query(self) -> bool:
        """Whether it has been reached. Raises `DeviceError` when the device was lost."""
        self._device.refuse_in_capture("an event's query")
        (code,) = self._cuda.cuEventQuery(self.handle)
        if code == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        driver.check((code,), "asking an event")
        return True

    def synchronize(self) -> None:
        """Wait for it; counted."""
        self._device.refuse_in_capture("a wait for an event")
        self._device.counters.host_syncs += 1
        driver.check(self._cuda.cuEventSynchronize(self.handle), "waiting for the device")
        self._device.after_wait()

    def since(self, earlier: CudaEvent) -> float:
        """Milliseconds between two timed events that have been reached."""
        return float(driver.check(self._cuda.cuEventElapsedTime(earlier.handle, self.handle), "timing"))


class CudaDevice:
    """One GPU of this process. `dtype` is the activation dtype that the engine computes in; with `can_sleep` the memory of
    weights and caches can be given back. `meets`: how ranks meet (`WAYS` of ranks.py), and why."""

    withdrawn: Mapping[str, str] = MappingProxyType({})
    """As `Withdrawing`."""
    uniform_routing = False
    """For benchmarks with random weights: experts are drawn by the bits of a row's logits (`bench/uniform_routing.py`)."""

    def __init__(
        self, index: int = 0, *, dtype: str = "f32", row_invariant: bool = False, can_sleep: bool = False,
        meets: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.meets = meets or ("peers", "")
        self.index, self.dtype, self.row_invariant = index, dtype, row_invariant
        self.spec = f"cuda:{index}"
        self.cuda: Any = driver.module()
        self.counters = DeviceCounters()
        self.capturing = False
        self.after_wait: Callable[[], None] = _nothing
        """Called when the host has waited for the device; raises `DeviceError` for what launches have found."""
        self.kept: CudaTimeline | None = None
        """Where operations are noted while somebody wants a timeline."""
        self._timeline: CudaTimeline | None = None
        self.held: list[object] = []
        """What lives until the device is closed: to free memory waits for all that runs, which may wait for this thread."""
        self.at_close: list[Callable[[], object]] = []
        """Called when it is closed, behind the wait, the last first."""
        self._open = True
        self._held = self._peak = 0
        self._memory: dict[int, tuple[str, int]] = {}
        self._context, self.ordinal = _primary_context(index)
        self.make_current()
        major, minor = (self.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self.arch = f"sm_{major}{minor}"
        if major < 8:
            raise DeviceError(
                f"device {self.spec} ({device_name(index)}) has compute capability {major}.{minor}, wanted 8.0 or newer; "
                "choose another device or --backend"
            )
        self.dependent = major >= 9
        """Whether kernels may be launched as dependent: brought onto the device while the one before them ends."""
        self.num_sms = self.attribute("MULTIPROCESSOR_COUNT")
        self.shared_bytes = self.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.stream: Any = CudaStream(self)
        self._remapped = RemappedMemory(self) if can_sleep else None

    # -- context -----------------------------------------------------------------------------------
    def make_current(self) -> None:
        """Make this device's context the current one of the calling thread."""
        driver.check(self.cuda.cuCtxSetCurrent(self._context), f"making {self.spec} current")

    def call(self, name: str, *arguments: Any, doing: str = "") -> Any:
        """A driver call outside the step path, from whatever thread; its value. Raises `DeviceError`."""
        if not self._open:
            raise DeviceError(f"device {self.spec} is closed; open a new engine before {doing or name}")
        self.make_current()
        return driver.check(getattr(self.cuda, name)(*arguments), doing or name)

    def attribute(self, name: str) -> int:
        """A device attribute by the driver's name for it."""
        kind = getattr(self.cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.check(self.cuda.cuDeviceGetAttribute(kind, self.ordinal), f"asking {self.spec}"))

    def refuse_in_capture(self, what: str) -> None:
        """Raises `DeviceError` while a graph is captured."""
        if self.capturing:
            raise DeviceError(f"{what} is not allowed while a graph is captured on {self.spec}; do it before the capture")

    # -- memory ------------------------------------------------------------------------------------
    def empty(self, name: str, shape: Sequence[int], dtype: str) -> CudaBuffer:
        """Allocate; contents are whatever was there. Raises `DeviceError` with what is held where memory is short."""
        return CudaBuffer(self, name, tuple(int(size) for size in shape), dtype)

    def zeros(self, name: str, shape: Sequence[int], dtype: str) -> CudaBuffer:
        """Allocate and clear, when a kernel is bound that keeps something between its launches; waits."""
        buffer = self.empty(name, shape, dtype)
        self.write(buffer.pointer, np.zeros(buffer.shape, DTYPES[dtype]))
        return buffer

    def staging(self, name: str, shape: Sequence[int], dtype: str) -> CudaStaging:
        """Allocate page-locked host memory."""
        return CudaStaging(self, name, tuple(int(size) for size in shape), dtype)

    def allocate(self, name: str, nbytes: int) -> int:
        """Address of fresh device memory."""
        self._admit(name)
        size, kind = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT, name.partition(".")[0]
        if self._remapped is not None and kind in REMAPPED:
            pointer = self._remapped.allocate(kind, size)
            code = 0 if pointer else driver.OUT_OF_MEMORY
        else:
            code, pointer = self.cuda.cuMemAlloc(size)
        if code == driver.OUT_OF_MEMORY:
            raise DeviceError(self._shortage(name, nbytes))
        driver.check((code,), f"allocating {nbytes:,} bytes for {name}")
        self._memory[int(pointer)] = name, size
        self.counters.allocations += 1
        self.counters.bytes_allocated += nbytes
        self._held += size
        self._peak = max(self._peak, self._held)
        return int(pointer)

    def _admit(self, name: str) -> None:
        if not self._open:
            raise DeviceError(f"device {self.spec} is closed; open a new engine to allocate {name}")
        self.refuse_in_capture(f"allocating {name}")
        self.make_current()

    def _shortage(self, name: str, nbytes: int) -> str:
        """What was wanted, what is free, what holds the rest, and what would fit."""
        free, state, kinds = self._holdings()
        caches = kinds.get("cache", 0)
        if name.partition(".")[0] == "cache":
            share = (caches + free) / (caches + nbytes)
            plan = (
                f"the caches so far and this one would fit with --num-blocks at {share:.0%} of what it is, more layers with less"
            )
        else:
            plan = (
                "lower --num-blocks"
                if caches > nbytes
                else "lower --max-num-seqs or --max-batched-tokens, or choose a smaller model"
            )
        return f"device {self.spec} has no {_gib(nbytes)} for {name}: {state}; {plan}"

    def _holdings(self) -> tuple[int, str, dict[str, int]]:
        """Bytes that are free, who holds the others in words, and what this engine holds by kind."""
        free, total = (int(size) for size in driver.check(self.cuda.cuMemGetInfo(), "asking for free memory"))
        kinds: dict[str, int] = {}
        for held, size in self._memory.values():
            kind = held.partition(".")[0]
            kinds[kind] = kinds.get(kind, 0) + size
        largest = sorted(kinds.items(), key=lambda item: -item[1])[:4]
        parts = ", ".join(f"{kind} {_gib(size)}" for kind, size in largest)
        others = max(total - free - self._held, 0)
        state = f"{_gib(free)} of {_gib(total)} are free, this engine holds {_gib(self._held)} ({parts or 'nothing'}), "
        return free, f"{state}others {_gib(others)}", kinds

    def failure(self, code: int, doing: str) -> DeviceError:
        """The error of a failed call in a step. What runs allocates nothing, so where memory is short it is the driver's own."""
        if code != driver.OUT_OF_MEMORY:
            return driver.failure(code, doing)
        try:
            _, state, kinds = self._holdings()
        except DeviceError:
            return driver.failure(code, doing)
        caches = kinds.get("cache", 0)
        plan = f"--num-blocks at {1 - SPARE / caches:.0%} of what it is" if caches > 2 * SPARE else "a smaller --max-num-seqs"
        return DeviceError(f"{doing}: the driver has no memory left for itself: {state}; {plan} would leave it {_gib(SPARE)}")

    def free(self, pointer: int) -> None:
        """Give memory back; what was freed already stays so."""
        held = self._memory.pop(pointer, None)
        if held is not None:
            self._held -= held[1]
            self.cuda.cuCtxSetCurrent(self._context)
            if self._remapped is None or not self._remapped.free(pointer):
                self.cuda.cuMemFree(pointer)

    def sleep(self, *, keep_weights: bool) -> None:
        """As `Sleeping`. Raises `DeviceError` of a device that was opened without."""
        self._sleeper().sleep(keep_weights=keep_weights)

    def wake(self) -> None:
        """As `Sleeping`."""
        self._sleeper().wake()

    def open_shared(self, shared: Mapping[str, Mapping[str, Any]]) -> SharedTensors:
        """As `OpensShared`: CUDA's handles between processes (`ipc.py`)."""
        from polydraft_cuda.ipc import SharedTensors

        return SharedTensors(self, shared)

    def _sleeper(self) -> RemappedMemory:
        if self._remapped is None:
            raise DeviceError(f"device {self.spec} was opened without sleep; build the engine with --enable-sleep-mode")
        self.refuse_in_capture("sleep")
        self.make_current()
        return self._remapped

    def allocate_host(self, name: str, nbytes: int) -> int:
        """Address of fresh page-locked memory."""
        self._admit(name)
        pointer = driver.check(
            self.cuda.cuMemAllocHost(max(nbytes, 1)), f"allocating {nbytes:,} bytes of pinned memory for {name}"
        )
        self.counters.allocations += 1
        return int(pointer)

    def free_host(self, pointer: int) -> None:
        """Give page-locked memory back."""
        self.cuda.cuCtxSetCurrent(self._context)
        self.cuda.cuMemFreeHost(pointer)

    def load(self, target: Buffer, value: Array) -> None:
        """Overwrite a buffer from the host; waits."""
        self.refuse_in_capture("loading a buffer")
        if tuple(target.shape) != value.shape or DTYPES[target.dtype] != value.dtype:
            raise DeviceError(
                f"buffer {target.name} is {target.dtype} of shape {tuple(target.shape)}, got {value.dtype} of shape "
                f"{value.shape}; pass that"
            )
        self.write(target.pointer, np.ascontiguousarray(value))  # type: ignore[attr-defined]

    def write(self, pointer: int, value: Array) -> None:
        """Copy a contiguous host array to an address, behind what is queued; waits."""
        if value.nbytes:
            self.call("cuMemcpyHtoDAsync", pointer, value.ctypes.data, value.nbytes, self.stream.handle, doing="loading")
            self.call("cuStreamSynchronize", self.stream.handle, doing="loading")

    def fill_bytes(self, buffer: Buffer, byte: int) -> None:
        """Set every byte of a buffer, behind what is queued; does not wait."""
        pointer, nbytes = buffer.pointer, buffer.nbytes  # type: ignore[attr-defined]
        if nbytes:
            self.call("cuMemsetD8Async", pointer, byte, nbytes, self.stream.handle, doing="filling")

    def read(self, pointer: int, shape: Sequence[int], dtype: str) -> Array:
        """A host copy of memory, behind what is queued; waits. For tests and tools."""
        value: Array = np.empty(tuple(shape), DTYPES[dtype])
        if value.nbytes:
            # First, because a copy to pageable memory keeps other threads from launching while it waits for the stream.
            self.call("cuStreamSynchronize", self.stream.handle, doing="reading")
            self.call("cuMemcpyDtoHAsync", value.ctypes.data, pointer, value.nbytes, self.stream.handle, doing="reading")
            self.call("cuStreamSynchronize", self.stream.handle, doing="reading")
            self.after_wait()
        return value

    # -- copies ------------------------------------------------------------------------------------
    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        """Enqueue a copy of the first `rows` of staging."""
        nbytes = source.array[:rows].nbytes
        self.counters.uploads += 1
        self.counters.bytes_uploaded += nbytes
        if nbytes:
            self._copy("cuMemcpyHtoDAsync", target.pointer, source.pointer, nbytes, stream)  # type: ignore[attr-defined]

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """Enqueue a copy of the first `rows` of a buffer."""
        nbytes = target.array[:rows].nbytes
        self.counters.downloads += 1
        self.counters.bytes_downloaded += nbytes
        if nbytes:
            self._copy("cuMemcpyDtoHAsync", target.pointer, source.pointer, nbytes, stream)  # type: ignore[attr-defined]

    def _copy(self, name: str, target: int, source: int, nbytes: int, stream: Stream) -> None:
        call, handle = getattr(self.cuda, name), stream.handle  # type: ignore[attr-defined]
        last = self.kept.begin(KINDS[name], stream) if self.kept is not None else None
        (code,) = call(target, source, nbytes, handle)
        if code in driver.CONTEXT and self._open:
            self.make_current()
            (code,) = call(target, source, nbytes, handle)
        if code:
            raise self.failure(int(code), "a copy")
        if last is not None:
            last.record(stream)

    # -- kernels -----------------------------------------------------------------------------------
    def function(self, source: Path, name: str, **defines: str | float) -> Function:
        """A kernel, compiled (or read from the cache) and loaded once a process. `arch_features="a"` compiles for the
        architecture's own instructions. Raises `DeviceError` when it does not compile or load."""
        self.make_current()
        features = str(defines.pop("arch_features", ""))
        module = _module(self.index, source, self.arch + features, tuple(sorted(defines.items())))
        return Function(module.function(name), name, self.counters, self.make_current, self.dependent, self.failure)

    # -- the rest ----------------------------------------------------------------------------------
    def event(self) -> CudaEvent:
        """A fresh event."""
        self._admit("an event")
        return CudaEvent(self)

    def timer(self) -> CudaEvent:
        """A fresh event that can be subtracted from another."""
        self._admit("an event")
        return CudaEvent(self, timed=True)

    def make_stream(self, name: str) -> CudaStream:
        """Another stream: work on it is ordered with that of others by events alone."""
        return CudaStream(self, name)

    def memory(self) -> int:
        """Bytes of device memory that this engine held at its peak, graphs excluded."""
        return self._peak

    @contextlib.contextmanager
    def keep_timeline(self) -> Iterator[None]:
        """Note when graphs and copies run, for `timeline`, as long as the context lasts; waits once."""
        self._timeline = self._timeline or CudaTimeline(self)
        self._timeline.restart()
        self.kept = self._timeline
        try:
            yield
        finally:
            self.kept = None

    def now_s(self) -> float:
        """Seconds of the host's clock, which a timeline is on. Raises `DeviceError` while none is kept."""
        self.timeline()
        return time.perf_counter()

    def timeline(self) -> CudaTimeline:
        """What ran since `keep_timeline` began. Raises `DeviceError` while none is kept."""
        if self.kept is None:
            raise DeviceError(f"device {self.spec} keeps no timeline; ask it to with keep_timeline()")
        return self.kept

    def free_memory(self) -> int:
        """Bytes of device memory that nobody holds."""
        return int(self.call("cuMemGetInfo", doing="asking for free memory")[0])

    def memory_taken(self) -> int:
        """As `TellsMemory`, by the driver: bytes that are not free."""
        free, total = self.call("cuMemGetInfo", doing="asking for free memory")
        return int(total) - int(free)

    def synchronize(self) -> None:
        """Wait for everything in the context; counted."""
        self.refuse_in_capture("device.synchronize")
        self.counters.host_syncs += 1
        self.call("cuCtxSynchronize", doing="waiting for the device")
        self.after_wait()

    def reach(self, index: int) -> None:
        """Let kernels here read and write memory of another device that this process has opened. Raises `DeviceError` where the
        two are not linked."""
        self.make_current()
        (code,) = self.cuda.cuCtxEnablePeerAccess(_primary_context(index)[0], 0)
        if code not in (0, self.cuda.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
            raise driver.failure(int(code), f"reaching memory of cuda:{index} from {self.spec}")

    def open_handle(self, handle: bytes, doing: str) -> int:
        """Address of an allocation of another process of this machine, by the driver's handle (cuIpcGetMemHandle). Raises
        `DeviceError` where the driver refuses it."""
        flags = int(self.cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return int(self.call("cuIpcOpenMemHandle", driver.handle_of_bytes(handle), flags, doing=doing))

    def let_go(self, pointer: int) -> None:
        """Close memory of another process."""
        self.cuda.cuCtxSetCurrent(self._context)
        self.cuda.cuIpcCloseMemHandle(pointer)

    def close(self) -> None:
        """Wait, then free what is held. The context stays: it is shared by the process and ends with it."""
        if not self._open:
            return
        with contextlib.suppress(DeviceError):
            self.call("cuCtxSynchronize")
        self._open = False
        for end in reversed(self.at_close):
            end()
        self.held.clear()
        for pointer in list(self._memory):
            self.free(pointer)
        _quietly(self.cuda.cuStreamDestroy, self.stream.handle)


def _nothing() -> None:
    """Most launches find nothing."""


def _quietly(call: Any, handle: Any) -> None:
    """Give a handle back; a device that is lost has taken it already."""
    call(handle)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"


@functools.cache
def _primary_context(index: int) -> tuple[Any, Any]:
    """(context, ordinal) of a device; retained for the life of the process, which other libraries share it with."""
    cuda = driver.module()
    try:
        driver.check(cuda.cuInit(0), "starting the CUDA driver")
    except RuntimeError as error:  # the library of the driver cannot be found
        raise DeviceError(
            f"no NVIDIA driver is installed ({str(error).partition(chr(10))[0]}); install one, or choose another --backend"
        ) from error
    count = int(driver.check(cuda.cuDeviceGetCount(), "counting devices"))
    if not 0 <= index < count:
        raise DeviceError(f"cuda:{index} does not exist, got {count} device(s); choose one of them with --device cuda:<index>")
    ordinal = driver.check(cuda.cuDeviceGet(index), f"opening cuda:{index}")
    return driver.check(cuda.cuDevicePrimaryCtxRetain(ordinal), f"opening cuda:{index}"), ordinal


@functools.cache
def driver_version() -> int:
    """The driver's CUDA version as 1000 * major + 10 * minor."""
    return int(driver.check(driver.module().cuDriverGetVersion(), "asking the driver"))


@functools.cache
def device_name(index: int) -> str:
    """What the device calls itself."""
    name = driver.check(driver.module().cuDeviceGetName(100, _primary_context(index)[1]), "asking for a name")
    return bytes(name).partition(b"\0")[0].decode()


def reaches(index: int, other: int) -> bool:
    """Whether kernels on a device can read and write memory of another one."""
    cuda, doing = driver.module(), f"asking whether cuda:{index} reaches memory of cuda:{other}"
    driver.check(cuda.cuInit(0), doing)
    ordinals = (driver.check(cuda.cuDeviceGet(one), doing) for one in (index, other))
    return bool(driver.check(cuda.cuDeviceCanAccessPeer(*ordinals), doing))


@functools.cache
def _module(index: int, source: Path, arch: str, defines: tuple[tuple[str, str | float], ...]) -> Module:
    """Loaded code; the current context is that of `index`."""
    del index  # part of the key
    cubin = compile_source(source, defines=dict(defines), arch=arch, driver_version=driver_version())
    return Module(cubin, source.name)
