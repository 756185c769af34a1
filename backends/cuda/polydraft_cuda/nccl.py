"""Where ranks meet whose GPUs do not reach each other's memory: a communicator of NCCL, by NVIDIA's own Python binding (nccl4py).

NCCL carries bytes, in one call, `ncclAllGather`; kernels of ours lay them down and compute with them (`kernels/carried.py`). A
gather that waits in vain has no patience of its own: a thread looks at how far this rank's launches have come, and aborts the
communicator where they wait for too long, or the ranks have failed. The engine, which waits for the device, then finds out who is
missing (`polydraft.ranks.Exchange.judge`).

Nor has a call in which the host waits for other ranks to be found. A thread makes these, and is left behind where it waits in
vain: a communicator must not be aborted while a call of it runs. With NCCL's own remedy, communicators that do not block, each
gather would be launched by a thread of its own.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from itertools import permutations
from typing import Any, Final

import numpy as np

from polydraft.device import Array, Stream
from polydraft.errors import DeviceError
from polydraft.ranks import Exchange, Group, Note
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.ranks import LOOK_S, Place, judge

HEAD: Final = 16
"""Bytes in front of what a rank brings (`carried.cu`)."""
OWN_BYTES: Final = 1 << 30
"""Of device memory that NCCL takes for itself; 874 MiB were seen over two H200s."""
ID_BYTES: Final = 128
_UINT8: Final = 1
"""ncclUint8."""
FIND: Final = 6
"""Times as long as for a launch ranks wait to be found: NCCL then reads its kernels, from a disk that may be slow."""
VAIN: Final = "NCCL did not bring the ranks together (NCCL_DEBUG=INFO says what it waits for)"
JOIN_S: Final = 10.0
"""Seconds that closing a device waits for NCCL to end."""
UNORDERED: Final = "sums over NCCL were not run over four ranks, where their order shows"
"""Why `ordered_sums` is withdrawn; they are added in the tree that it asks for."""
INSTALL: Final = "install the extra: pip install 'polydraft[nccl]'"


@functools.cache
def library() -> Any:
    """The binding with its library loaded, or None where one of them is not installed."""
    try:
        from nccl.bindings import nccl

        nccl.get_version()
    except (ImportError, OSError, RuntimeError):
        return None
    return nccl


def choose(asked: str, indices: Sequence[int], reaches: Callable[[int, int], bool]) -> tuple[str, str]:
    """How ranks on these GPUs meet, "peers" or "nccl", and why. `asked`: one of the two, or "". `reaches(a, b)`: whether `a` can
    read and write memory of `b`. Raises `DeviceError` where it cannot be, or not as asked."""
    apart = next((pair for pair in permutations(dict.fromkeys(indices), 2) if not reaches(*pair)), None)
    missing = f"cuda:{apart[0]} cannot reach memory of cuda:{apart[1]} (nvidia-smi topo -p2p r shows which can)" if apart else ""
    if asked == "nccl" or (missing and not asked):
        if library() is None:
            raise DeviceError(f"{missing or 'collectives=nccl'}: ranks would meet over NCCL, which is not installed; {INSTALL}")
        if len(set(indices)) < len(indices):
            raise DeviceError("two ranks on one GPU do not meet over NCCL; give each a device of its own")
        return "nccl", missing or "asked for"
    if missing:
        raise DeviceError(f"{missing}, as collectives=peers wants it; leave the option out, for NCCL")
    return "peers", "asked for" if asked else "the GPUs reach each other's memory"


def _stride(nbytes: int) -> int:
    """Bytes that a rank's part of what is gathered takes."""
    return HEAD + -(-nbytes // 16) * 16


class Communicator(Place):
    """What the collectives of one rank are bound to. Ranks find each other when they launch the first one."""

    def __init__(self, device: CudaDevice, group: Group) -> None:
        super().__init__(device, group)
        self._ended, self._closing = threading.Event(), threading.Event()
        weakref.finalize(self, self._closing.set).atexit = False
        self._nccl: Any = library()
        self._communicator: Any = None

    @property
    def nbytes(self) -> int:
        """Of device memory that it takes."""
        return self.size * _stride(self._group.exchange.capacity) + OWN_BYTES

    def come(self, nbytes: int) -> None:
        """As `Place`. Raises `DeviceError` once the communicator was aborted, too."""
        super().come(nbytes)
        if self._ended.is_set():
            self._group.exchange.raise_failure()
            judge(self._group, self._fault)

    def gather(self, stream: Stream, nbytes: int) -> None:
        """Enqueue: what ranks have laid down, `nbytes` and a head each, goes to all of them."""
        stride, device = _stride(nbytes), self.device
        device.counters.launches += 1
        try:
            self._nccl.all_gather(
                self._memory + self.rank * stride, self._memory, stride, _UINT8, self._communicator,
                stream.address,  # type: ignore[attr-defined]
            )  # fmt: skip
        except self._nccl.NCCLError as error:
            raise DeviceError(f"NCCL failed in a gather of rank {self.rank} on {device.spec} ({error})") from error

    def _made(self) -> Any:
        device = self.device
        memory = device.empty("ranks.carried", (self.size * _stride(self._group.exchange.capacity),), "u8")
        count = device.zeros("ranks.count", (1,), "i32")
        device.held += [memory, count]
        self._memory, ((self._came, self._fault), *pointers) = memory.pointer, self._words()
        names = ("memory", ctypes.c_uint64), ("count", ctypes.c_uint64), ("came", ctypes.c_uint64), ("fault", ctypes.c_uint64)
        kind = type("Carried", (ctypes.Structure,), {"_fields_": [*names, ("rank", ctypes.c_int32)]})
        return kind(memory.pointer, count.pointer, *pointers, self.rank)

    def _find(self) -> None:
        device, exchange = self.device, self._group.exchange
        mine = bytes(self._nccl.get_unique_id()) if self.rank == 0 else bytes(ID_BYTES)
        told = exchange.share(np.frombuffer(mine, np.uint8))[0]
        usual = exchange.patience_s
        exchange.patience_s = FIND * usual
        try:
            self._meet(told.tobytes())
            self._came[:2] = 1, 0  # for the one who watches: what `_join` has enqueued is waited for
            self._have_watched()
            device.synchronize()
            self._came[:2] = 0
        finally:
            exchange.patience_s = usual

    def _meet(self, told: bytes) -> None:
        """Wait until NCCL has found all ranks. Raises `DeviceError` where one does not come."""
        exchange, met = self._group.exchange, futures.Future[None]()
        threading.Thread(target=self._join, args=(told, met), name=f"rank {self.rank} meets", daemon=True).start()
        begin = time.monotonic()
        while not futures.wait([met], LOOK_S).done:
            late = time.monotonic() - begin > exchange.patience_s
            if (exchange.failure or exchange.judging or late) and met.cancel():
                exchange.judge(Note("start", 0, 0, 0, 0), (self.rank + 1) % self.size, VAIN)
        try:
            met.result()
        except self._nccl.NCCLError as error:
            raise DeviceError(f"rank {self.rank} on {self.device.spec} cannot meet the others over NCCL ({error})") from error

    def _join(self, told: bytes, met: futures.Future[None]) -> None:
        """Make the communicator and use it, since NCCL connects when it is first used. Nobody may want it any more then."""
        device, nccl = self.device, self._nccl
        failure: BaseException | None = None
        try:
            device.make_current()
            self._communicator = nccl.comm_init_rank(self.size, nccl.UniqueId.from_buffer(told), self.rank)
            for nbytes in (16, self._group.exchange.capacity):
                if not met.cancelled():
                    self.gather(device.stream, nbytes)
        except BaseException as error:  # noqa: BLE001  raised by `_meet`
            failure = error
        wanted = met.set_running_or_notify_cancel()
        if wanted and failure is None:
            met.set_result(None)
            return
        if wanted:
            met.set_exception(failure)
        if self._communicator is not None:
            with suppress(Exception):  # it is given up
                nccl.comm_abort(self._communicator)

    def _have_watched(self) -> None:
        """Have the communicator watched, and aborted when the device is closed at the latest."""
        device, exchange = self.device, self._group.exchange
        watched = exchange, self._came, self._fault, (self.rank + 1) % self.size, self._closing, self._ended
        end = functools.partial(self._nccl.comm_abort, self._communicator)
        watcher = threading.Thread(target=_watch, args=(*watched, end), name=f"rank {self.rank} watches", daemon=True)
        watcher.start()
        device.at_close += [functools.partial(watcher.join, JOIN_S), self._closing.set]  # the last one first
        device.after_wait = functools.partial(judge, self._group, self._fault)  # the device is not to keep the place


def _watch(
    exchange: Exchange, came: Array, fault: Array, next_rank: int, closing: threading.Event, ended: threading.Event,
    end: Callable[[], None],
) -> None:  # fmt: skip
    """End a communicator when the ranks have failed, one of them has given up, or this one has waited for too long: launches that
    wait end, with a note of what this rank came for. Or when the device is closed. NCCL itself keeps its memory until the graphs
    that hold its launches are gone."""
    since, last = time.monotonic(), -1
    while not closing.wait(LOOK_S):
        waits, now = came[0] != came[1], time.monotonic()
        if not waits or came[0] != last:
            since, last = now, int(came[0])
        if waits and (exchange.failure or exchange.judging or now - since > exchange.patience_s):
            fault[1:7] = *came[2:7], next_rank
            fault[0] = 1
        if exchange.failure or fault[0]:
            break
    ended.set()
    if not closing.is_set():
        time.sleep(LOOK_S)  # until a launch that did not see it yet has been enqueued
    with suppress(Exception):  # it is given up
        end()
