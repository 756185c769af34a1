"""Where ranks of one host meet on their GPUs: memory of each that all others write into, and what happens when one stays away.
GPUs that do not reach each other's memory meet over NCCL (`nccl.py`).

Collectives (`kernels/collectives.cu`) run in this memory without the host. A launch that waits in vain gives up and leaves a note
on the host; whoever waits for the device then asks the other hosts who is missing, or came for something else
(`polydraft.ranks.Exchange.judge`), so that all ranks end with the same sentence. Ranks are processes, which open each other's
memory by the driver's handles, or threads of one process.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from polydraft.backend import Collectives
from polydraft.contracts import COLLECTIVES
from polydraft.errors import DeviceError
from polydraft.ranks import Group, Note
from polydraft.ranks.exchange import KINDS
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.driver import HANDLE_BYTES, bytes_of_handle

BLOCKS: Final = 128
"""Blocks of a launch at most."""
CHUNK: Final = 4096
"""Bytes that a block brings before another one helps it."""
WORD_ROWS: Final = 16
"""Rows that are brought as words which carry their count, at most: twice the bytes, and no wait for a flag."""
WORD_BYTES: Final = 32 << 10
"""Of such words of a row."""
MOST_RANKS: Final = 8
WAYS: Final = {"peers": "memory of each other's GPUs", "nccl": "NCCL"}
"""How ranks meet, by the word of `--device` for it."""
_DEAD: Final = 16
"""Words in front of the flags (`collectives.cu`)."""
LOOK_S: Final = 0.05
"""Seconds between two looks at whether the ranks have failed."""


def span(capacity: int) -> int:
    """Bytes of a block's stretch, where a rank brings `capacity` bytes to a launch at most: whole vectors of 16."""
    return max(-(-capacity // (16 * BLOCKS)) * 16, CHUNK)


def region_bytes(size: int, capacity: int) -> int:
    """Bytes of the memory of one of `size` ranks that the others write into: words, flags, stretches, and words that carry their
    count (`Region` of `collectives.cu`)."""
    return 8 * (_DEAD + 2 * BLOCKS * size) + 2 * size * (BLOCKS * span(capacity) + WORD_ROWS * WORD_BYTES)


class Place:
    """What the collectives of one rank are bound to. Ranks find each other when they launch the first one."""

    def __init__(self, device: CudaDevice, group: Group) -> None:
        """Raises `DeviceError` for more ranks than kernels are made for."""
        if group.size > MOST_RANKS:
            raise DeviceError(f"{group.size} ranks, the cuda backend takes {MOST_RANKS} at most; use fewer")
        self.device, self.rank, self.size, self._group = device, group.rank, group.size, group
        self._region: Any = None
        self._found = False

    def number(self) -> int:
        """Of the next launch, counted in the order in which a rank binds them."""
        return self._group.next_launch()

    def region(self) -> Any:
        """What kernels see of it, whole once the ranks have found each other."""
        if self._region is None:
            self._region = self._made()
        return self._region

    def come(self, nbytes: int) -> None:
        """In front of each launch, to which this rank brings `nbytes`: find the others, in front of the first. Raises
        `DeviceError` where a rank does not come or cannot be reached, or for more than there is room for."""
        exchange = self._group.exchange
        if nbytes > exchange.capacity:
            exchange.fail(f"rank {self.rank} brought {nbytes} bytes to a launch, wanted at most {exchange.capacity}")
        if not self._found:
            self._find()
            self._found = True

    def _words(self) -> tuple[Any, int, int]:
        """Two records of eight words on the host, 0 at first, which kernels and the host both write; where each begins."""
        words = self.device.staging("ranks.words", (2, 8 * 8), "u8")
        words.array[:] = 0
        self.device.held.append(words)
        return words.array.view(np.int64), words.pointer, words.pointer + 8 * 8

    def _made(self) -> Any:
        """Memory, and what kernels see of it."""
        raise NotImplementedError

    def _find(self) -> None:
        """Find the other ranks."""
        raise NotImplementedError


class MeetingPlace(Place):
    """Memory of each rank that all others write into."""

    def __init__(self, device: CudaDevice, group: Group) -> None:
        super().__init__(device, group)
        self._crowded = False

    def rows_with_room(self, row_bytes: int) -> int:
        """Rows of a launch whose blocks have whole ones, at most."""
        return span(self._group.exchange.capacity) // row_bytes * BLOCKS

    def rows_of_words(self, row_bytes: int) -> int:
        """Rows that are brought as words which carry their count."""
        return WORD_ROWS if 2 * row_bytes <= WORD_BYTES else 0

    def come(self, nbytes: int) -> None:
        """As `Place`. Ranks that are threads of one process and share a GPU (the conformance kit's) come together each time: the
        driver runs nothing at once of two streams that the host has made an allocation between."""
        super().come(nbytes)
        if self._crowded:
            self._wait()

    def _made(self) -> Any:
        device, exchange = self.device, self._group.exchange
        each = span(exchange.capacity)
        memory = device.empty("ranks.region", (region_bytes(self.size, exchange.capacity),), "u8")
        device.fill_bytes(memory, 0)
        counts = device.zeros("ranks.counts", (BLOCKS,), "i32")  # waits, for the memory as well
        device.held += [memory, counts]
        self._memory = memory.pointer
        (self._stop, self._fault), *pointers = self._words()
        patience = 0 if math.isinf(exchange.patience_s) else int(exchange.patience_s * 1e9)
        fields = [
            ("memory", ctypes.c_uint64 * self.size), ("counts", ctypes.c_uint64), ("stop", ctypes.c_uint64),
            ("fault", ctypes.c_uint64), ("patience_ns", ctypes.c_int64), ("span", ctypes.c_int64), ("word_span", ctypes.c_int64),
            ("rank", ctypes.c_int32), ("blocks", ctypes.c_int32), ("word_blocks", ctypes.c_int32),
        ]  # fmt: skip
        kind = type("Region", (ctypes.Structure,), {"_fields_": fields})
        nowhere = (ctypes.c_uint64 * self.size)()
        return kind(nowhere, counts.pointer, *pointers, patience, each, WORD_BYTES, self.rank, BLOCKS, WORD_ROWS)

    def _find(self) -> None:
        told, group = self._group.exchange.share(self._told(self._memory)), self._group
        self._region.memory[:] = [self._opened(rank, one) for rank, one in enumerate(told)]
        self._crowded = len({one[:16].tobytes() for one in told}) < len(told)
        self.device.after_wait = partial(judge, group, self._fault)  # the device is not to keep the place
        arguments = weakref.ref(self), group, self._stop
        threading.Thread(target=_watch, args=arguments, name=f"rank {self.rank} watches", daemon=True).start()
        self._wait()  # until all have opened all memory

    def _wait(self) -> None:
        """Until the hosts of all ranks have come."""
        self._group.exchange.share(np.zeros(1, np.uint8))

    def _told(self, pointer: int) -> Any:
        """What the other ranks need to open this one's memory."""
        handle = self.device.call("cuIpcGetMemHandle", pointer, doing="sharing memory of a rank")
        words = np.array([os.getpid(), self.device.index, pointer], np.int64).view(np.uint8)
        return np.concatenate([words, np.frombuffer(bytes_of_handle(handle), np.uint8)])

    def _opened(self, rank: int, told: Any) -> int:
        """The address at which this rank reaches the memory of another."""
        device = self.device
        process, index, pointer = told[:-HANDLE_BYTES].view(np.int64).tolist()
        if process == os.getpid():
            if index != device.index:
                device.reach(index)
            return int(pointer)
        try:
            found = device.open_handle(told[-HANDLE_BYTES:].tobytes(), f"opening memory of rank {rank}")
        except DeviceError as error:
            raise DeviceError(
                f"rank {self.rank} on {device.spec} cannot reach memory of rank {rank} on cuda:{index} ({error}); ranks need "
                "GPUs that reach each other (nvidia-smi topo -p2p r shows which do), or --device with ?collectives=nccl"
            ) from error
        device.at_close.append(weakref.finalize(self, device.let_go, found))  # once, whichever comes first
        return found


def judge(group: Group, fault: Any) -> None:
    """Raise what a launch has found, once the host has waited for the device."""
    if fault[0]:
        _, kind, launch, step, n, nbytes, late, _ = fault.tolist()
        group.exchange.judge(Note(KINDS[kind], launch, step, n, nbytes), late)


def _watch(place: weakref.ref[MeetingPlace], group: Group, stop: Any) -> None:
    """Tell launches that wait when some rank has failed, which its host says, or the engine was closed."""
    while place() is not None:
        if group.exchange.failure:
            stop[0] = 1
            return
        time.sleep(LOOK_S)


def collectives(device: CudaDevice, group: Group) -> Collectives:
    """All of them, on one device. Nothing is exchanged yet."""
    from polydraft_cuda.kernels.provider import CudaProvider, Kernel
    from polydraft_cuda.program_pass import CudaPass

    def provider(kernel: Kernel) -> CudaProvider:
        return CudaProvider(kernel, device)

    made: Mapping[str, Kernel]
    program_pass: CudaPass | None = None
    way, why = device.meets
    if way == "nccl":
        from polydraft_cuda.kernels import carried
        from polydraft_cuda.nccl import Communicator

        communicator = Communicator(device, group)
        made, nbytes = carried.kernels(communicator), communicator.nbytes
    else:
        from polydraft_cuda.kernels import collectives

        place = MeetingPlace(device, group)
        made, program_pass = collectives.kernels(place), CudaPass(device, provider, place=place)
        nbytes = region_bytes(group.size, group.exchange.capacity)
    providers = {name: provider(kernel) for name, kernel in made.items()}
    versions = {name: COLLECTIVES[name].version for name in providers}
    return Collectives(providers, versions, program_pass, nbytes, (WAYS[way], why))
