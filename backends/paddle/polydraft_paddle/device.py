"""The Paddle device: tensors on one place as device memory, Paddle's streams and events, copies to and from staging.

The plugin opens it. On the CPU place everything has happened when a call returns. On any other place work is queued on one
compute stream, which all devices of the place share and which `place.py` makes Paddle's current one.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle

from polydraft.device import DTYPES, Array, Buffer, DeviceCounters, Event, Staging, Stream
from polydraft.errors import DeviceError
from polydraft.reference.device import ImmediateEvent, ImmediateStream
from polydraft.reference.provider import EagerProvider, Kernel, NumpyProvider
from polydraft_paddle import fused, threads, words
from polydraft_paddle.companions import host_memory
from polydraft_paddle.device_name import take_apart
from polydraft_paddle.graph import why_no_graphs
from polydraft_paddle.installation import has_graphs
from polydraft_paddle.ops import CONVERTED, Tensor, give_numbers
from polydraft_paddle.place import compute_stream, place_of, use
from polydraft_paddle.provider import FAILURES, device_error, missing_kernel, refused
from polydraft_paddle.table import PADDLE_DTYPES

BEHIND = {
    ("f32", 2): np.float32(0), ("f16", 2): np.float16(0), ("bf16", 2): np.float32(0),
    ("i32", 2): np.int32(-1), ("i32", 1): np.int32(0),
}  # fmt: skip
"""What the row behind memory holds, by dtype and number of axes: zeros, and of tables of int32 what is no token and no block.
Those of float16 come in that dtype: a place that holds it need not convert to it."""


class PaddleBuffer:
    """Device memory. `tensor` is for kernels of this family, never for core; u32 is held as int32 of the same bits."""

    __slots__ = ("dtype", "name", "shape", "tensor")

    def __init__(self, name: str, tensor: Tensor, dtype: str) -> None:
        self.name, self.tensor, self.dtype = name, tensor, dtype
        self.shape: tuple[int, ...] = tuple(tensor.shape)

    @property
    def host_array(self) -> Array:
        """The same bytes for NumPy, where the host sees the memory of the place."""
        return np.asarray(_Memory(self.tensor, self.dtype))


class _Memory:
    """Memory of a tensor that NumPy may write to, and which is there for as long; Paddle 3.2 lends it for reading alone."""

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self._tensor, shape = tensor, tuple(tensor.shape)
        self.__array_interface__ = {
            "version": 3, "shape": shape, "typestr": np.dtype(DTYPES[dtype]).str, "data": (tensor.data_ptr(), False)
        }  # fmt: skip


class PaddleStaging:
    """Host memory that copies start from or end in: `array` and `tensor` are the same bytes."""

    __slots__ = ("array", "name", "tensor")

    def __init__(self, name: str, array: Array, tensor: Tensor) -> None:
        self.name, self.array, self.tensor = name, array, tensor


class PaddleStream:
    """A Paddle stream of a place that has streams."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def wait(self, event: Event) -> None:
        """Make later work wait for `event`."""
        self.stream.wait_event(event.event)  # type: ignore[attr-defined]


class PaddleEvent:
    """A Paddle event of a place that has streams."""

    def __init__(self, device: PaddleDevice) -> None:
        self.event = paddle.device.Event()  # of the place that is current, which the device has set
        self._device, self._recorded = device, False

    def record(self, stream: Stream) -> None:
        """Move the event behind all work of `stream`."""
        self.event.record(stream.stream)  # type: ignore[attr-defined]
        self._recorded = True

    def query(self) -> bool:
        """True when the recorded point has been reached."""
        self._device.refuse_in_capture("event.query")
        return not self._recorded or bool(self.event.query())

    def synchronize(self) -> None:
        """Block until the recorded point has been reached; counted."""
        self._device.refuse_in_capture("event.synchronize")
        self._device.counters.host_syncs += 1
        if self._recorded:
            self._device.before_wait(self.event.query)
            self.event.synchronize()
            self._device.after_wait()


class PaddleDevice:
    """One Paddle place."""

    bind_kernel: Callable[[Kernel], NumpyProvider]
    """The provider of a kernel in NumPy: there on a place whose memory the host sees, and on no other."""

    def __init__(self, spec: str, *, dtype: str = "f32") -> None:
        self.spec, self.dtype = spec, dtype
        self.host_visible = spec == "cpu"
        """Device memory is host memory, and work has happened when a call returns."""
        with refused(spec):
            use(spec)
        self.place = paddle.framework._current_expected_place()
        self.counters = DeviceCounters()
        self.graphs: list[Any] = []
        """Captured graphs, given back on `close`."""
        self.capturing = False
        self.guest: Any = None
        """What a kernel pack that serves every kernel puts in place of what is done here: something with `allocate_cache` as of a
        kernel table, `init_forward_meta(buffers, limits)`, `upload` and `download(stream, to, source, nbytes)` by address, and
        `close()`."""
        self.target_pass: Any = None
        """Forward metadata of the target's pass."""
        self.before_wait: Callable[[Callable[[], bool]], None] = _nothing
        """Called before the host waits for the device, with what says whether it still has to."""
        self.after_wait: Callable[[], None] = _nothing
        """Called when the host has waited for the device; raises `DeviceError` for what collectives have found."""
        self.withdrawn: dict[str, str] = {}
        """Declared capabilities that this place was found to lack, each with the reason."""
        self._open = True
        if self.host_visible:
            threads.one()
            self.stream: Any = ImmediateStream()
            self.bind_kernel = functools.partial(EagerProvider, enqueue=lambda _, work: work(), counters=self.counters)
        else:
            with refused(spec):
                self.stream = PaddleStream(compute_stream(spec))
                give_numbers(self.place)
                words.learn(self.place)
                fused.learn(self.place)
            if has_graphs(take_apart(spec).kind) and (reason := why_no_graphs(self)):
                self.withdrawn["graph_capture"] = reason
            self.counters = DeviceCounters()  # nobody asked for that trial

    def make_stream(self, name: str) -> Any:
        """Another stream of this place."""
        del name
        use(self.spec)
        return ImmediateStream() if self.host_visible else PaddleStream(paddle.device.Stream(place_of(self.spec)))

    def event(self) -> Event:
        """A fresh event."""
        use(self.spec)
        return ImmediateEvent(self.counters) if self.host_visible else PaddleEvent(self)

    # -- memory ------------------------------------------------------------------------------------
    def empty(self, name: str, shape: Sequence[int], dtype: str) -> PaddleBuffer:
        """Allocate a buffer; `DeviceError` when memory is short or the device is closed."""
        self.check_open(name)
        size = math.prod(shape) * DTYPES[dtype].itemsize
        use(self.spec)
        try:
            tensor = self._table(list(shape), dtype)
        except FAILURES as error:
            if missing_kernel(error):
                raise device_error(self.spec, error, name) from error
            raise DeviceError(
                f"device {self.spec} could not allocate {size:,} bytes for {name}; lower --num-blocks, --max-num-seqs or "
                "--max-batched-tokens"
            ) from error
        self.counters.allocations += 1
        self.counters.bytes_allocated += size
        return PaddleBuffer(name, tensor, dtype)

    def _table(self, shape: list[int], dtype: str) -> Tensor:
        """Memory of this shape, and a row behind it where kernels look for one: its tensor is then `and_behind` of the result."""
        behind = BEHIND.get((dtype, len(shape)))
        if behind is None:
            return paddle.empty(shape, PADDLE_DTYPES[dtype])
        both = paddle.empty([shape[0] + 1, *shape[1:]], PADDLE_DTYPES[dtype])
        table, row = both[: shape[0]], both[shape[0] :]
        self._fill(row, np.full([1, *shape[1:]], behind))
        table.and_behind = both
        return table

    def staging(self, name: str, shape: Sequence[int], dtype: str) -> PaddleStaging:
        """Allocate host memory that Paddle and NumPy both see, page-locked where the place's package offers that."""
        self.check_open(name)
        array = np.zeros(tuple(shape), DTYPES[dtype])
        pinned = host_memory(self.spec, array.nbytes) if array.nbytes else None
        if pinned is not None:
            array = np.frombuffer(pinned, array.dtype, array.size).reshape(array.shape)
            array[...] = 0
        self.counters.allocations += 1
        self.counters.bytes_allocated += array.nbytes
        return PaddleStaging(name, array, _shared(array, dtype))

    def check_open(self, name: str) -> None:
        """`DeviceError` when the device has been closed, or `name` would be made while a graph is captured."""
        self.refuse_in_capture(f"allocation of {name}")
        if not self._open:
            raise DeviceError(f"device {self.spec} is closed; open a new engine to allocate {name}")

    def refuse_in_capture(self, what: str) -> None:
        """`DeviceError` while a graph is captured: nothing may wait or allocate there."""
        if self.capturing:
            raise DeviceError(f"{what} while device {self.spec} captures a graph; do it before the capture")

    def load(self, target: Buffer, value: Array) -> None:
        """Overwrite a buffer from the host, outside the step path."""
        if target.shape != value.shape:
            raise DeviceError(
                f"buffer {target.name} has shape {target.shape}, got a value of shape {value.shape}; pass that shape"
            )
        self.refuse_in_capture(f"load of {target.name}")
        self.fill(target.tensor, value, target.name)  # type: ignore[attr-defined]

    def fill(self, tensor: Tensor, value: Array, name: str) -> None:
        """Overwrite a tensor from the host; bf16 arrives as float32 or as its bits. A view whose rows overlap in memory (what
        `polydraft bench --shape` gives) travels as the memory it spans, and is spread out on the device."""
        use(self.spec)
        with refused(self.spec, name):
            self._fill(tensor, value)

    def _fill(self, tensor: Tensor, value: Array) -> None:
        if value.ndim == 2 and value.dtype == np.float32 and 0 < value.strides[0] < 4 * value.shape[1] and value.strides[1] == 4:
            step = value.strides[0] // 4
            span = np.lib.stride_tricks.as_strided(value, ((value.shape[0] - 1) * step + value.shape[1],), (4,), writeable=False)
            pool = paddle.to_tensor(span, place=self.place).astype(tensor.dtype)
            tensor.copy_(paddle.as_strided(pool, list(value.shape), [step, 1]), True)
            return
        host = np.ascontiguousarray(value)
        if host.dtype == np.uint32:
            host = host.view(np.int32)
        if host.dtype == np.uint16:
            host = (host.astype(np.uint32) << 16).view(np.float32)
        rows = max(len(host), 1)
        if tensor.element_size() != host.itemsize:
            rows = max(1, min(rows, CONVERTED * rows // max(host.nbytes, 1)))
        for begin in range(0, max(len(host), 1), rows):
            there = paddle.to_tensor(host[begin : begin + rows], place=self.place)
            tensor[begin : begin + rows].copy_(there if there.dtype == tensor.dtype else there.astype(tensor.dtype), True)

    # -- copies ------------------------------------------------------------------------------------
    def upload(self, stream: Stream, target: Buffer, source: Staging, rows: int) -> None:
        """Queue a copy of the first `rows` of staging into a buffer."""
        nbytes = source.array[:rows].nbytes
        self.counters.uploads += 1
        self.counters.bytes_uploaded += nbytes
        if self.guest is not None and nbytes:
            self.guest.upload(stream, target.tensor.data_ptr(), source.array.ctypes.data, nbytes)  # type: ignore[attr-defined]
            return
        self._copy(stream, target.tensor, source.tensor, rows)  # type: ignore[attr-defined]

    def download(self, stream: Stream, target: Staging, source: Buffer, rows: int) -> None:
        """Queue a copy of the first `rows` of a buffer into staging."""
        nbytes = target.array[:rows].nbytes
        self.counters.downloads += 1
        self.counters.bytes_downloaded += nbytes
        if self.guest is not None and nbytes:
            self.guest.download(stream, target.array.ctypes.data, source.tensor.data_ptr(), nbytes)  # type: ignore[attr-defined]
            return
        self._copy(stream, target.tensor, source.tensor, rows)  # type: ignore[attr-defined]

    def _copy(self, stream: Stream, target: Tensor, source: Tensor, rows: int) -> None:
        if not rows:
            return
        use(self.spec)
        try:
            if self.host_visible or stream is self.stream:
                target[:rows].copy_(source[:rows], False)
            else:
                with paddle.device.stream_guard(stream.stream):  # type: ignore[attr-defined]
                    target[:rows].copy_(source[:rows], False)
        except FAILURES as error:
            raise device_error(self.spec, error) from error

    # -- the rest ----------------------------------------------------------------------------------
    def memory(self) -> int:
        """Bytes ever allocated (nothing is freed before `close`)."""
        return self.counters.bytes_allocated

    def synchronize(self) -> None:
        """Block until everything queued has run; counted."""
        self.refuse_in_capture("synchronize")
        self.counters.host_syncs += 1
        if not self.host_visible:
            self.before_wait(self.stream.stream.query)
            paddle.device.synchronize(place_of(self.spec))
            self.after_wait()

    def close(self) -> None:
        """Wait for what is queued, which must not run on while the process ends; give the graphs back and refuse further use."""
        if self._open:
            self._open = False
            if not self.host_visible:
                with contextlib.suppress(OSError, RuntimeError):  # of a lost device: whoever asked it for results has been told
                    self.before_wait(self.stream.stream.query)
                    paddle.device.synchronize(place_of(self.spec))
            for graph in self.graphs:
                graph.release()
            if self.guest is not None:
                self.guest.close()


def _nothing(reached: Callable[[], bool] | None = None) -> None:
    """What comes before and after a wait of a device that is no rank's."""
    del reached


def _shared(array: Array, dtype: str) -> Tensor:
    """A CPU tensor over the bytes of `array`."""
    if dtype in ("u32", "bf16"):  # words that only travel here
        array = array.view(np.int32 if dtype == "u32" else np.int16)
    if not array.size:
        return paddle.empty(list(array.shape), dtype=PADDLE_DTYPES[dtype])
    tensor = paddle.from_dlpack(array)
    return tensor.view("bfloat16") if dtype == "bf16" else tensor
