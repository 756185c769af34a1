"""Where ranks meet: in a process group of `paddle.distributed` on places that have a stream, in the host's memory on the CPU.

`polydraft_collectives` calls it. In a process group a collective is queued on the compute stream, by the library that the place
brings (NCCL, BKCL, or the xccl calls of a custom device), and lies in graphs like a kernel; a process is one rank of it at most.
Paddle's Gloo, which the CPU has, ends the process of a rank that another length comes to, so there ranks meet as those of other
devices whose memory is the host's.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from paddle.base import core

from polydraft.backend import Collectives
from polydraft.contracts import COLLECTIVES
from polydraft.environment import dictating
from polydraft.ranks import Group, Note
from polydraft.ranks.exchange import KINDS
from polydraft.reference.table import collectives as in_host_memory
from polydraft_paddle.companions import collectives_of
from polydraft_paddle.device import PaddleDevice
from polydraft_paddle.device_name import take_apart
from polydraft_paddle.installation import first_line
from polydraft_paddle.ops import Tensor
from polydraft_paddle.provider import FAILURES, PaddleProvider

PROCESS_GROUPS: Final = {"gpu": "ProcessGroupNCCL", "xpu": "ProcessGroupBKCL"}
"""Of kinds of place that Paddle knows by itself."""
HERE: Final = "127.0.0.1"
TRAINER: Final = "PADDLE_TRAINER_ID"
STORE_S: Final = 60
"""Seconds that a rank waits for what another one puts into Paddle's store."""
NAP_S: Final = 5e-5
"""Seconds between two looks at whether the device has come to where the host waits for it."""
LOOK_S: Final = 0.05
"""Seconds between two looks at whether the ranks have failed."""
_NUMBERS = itertools.count(1)
"""Of the process groups whose rank 0 is in this process."""


class MeetingPlace:
    """The process group of one rank. Ranks find each other when they launch the first collective."""

    def __init__(self, device: PaddleDevice, group: Group) -> None:
        self.device, self.rank, self.size, self._group = device, group.rank, group.size, group
        self._library = collectives_of(device.spec)
        self._process_group: Any = None
        self._room: Tensor | None = None

    def caller(self, kind: str, step: Tensor, row_bytes: int) -> Callable[..., None]:
        """`call(n, operation, *arguments)` of a launch that is being bound: queue that operation of the process group, to which
        this rank brings `n` rows."""
        launch, address, number = self._group.next_launch(), step.data_ptr(), KINDS.index(kind)
        expect = self._library.expect if self._library else None

        def call(n: int, operation: str, *arguments: Any) -> None:
            if expect is not None:
                expect(number, launch, address, n, n * row_bytes)
            if self._process_group is None:
                self._begin(operation, *arguments)
            else:
                getattr(self._process_group, operation)(*arguments)

        return call

    def room(self, elements: int) -> Tensor:
        """A float32 tensor of so many elements at least, for what ranks have brought: launches use it one after the other."""
        if self._room is None or self._room.shape[0] < elements:
            self._room = self.device.empty("ranks.room", (elements,), "f32").tensor
        return self._room

    def _begin(self, operation: str, *arguments: Any) -> None:
        """Find the other ranks, and queue the first launch, in which Paddle makes the communicator. Paddle's store tells ranks
        where; nobody needs it any longer then, nor the port that it listens on."""
        exchange, spec = self._group.exchange, self.device.spec
        server, port = _serve() if self.rank == 0 else (None, 0)
        try:
            port, number = exchange.share(np.array([port, next(_NUMBERS) if self.rank == 0 else 0], np.int64))[0].tolist()
            exchange.raise_failure()  # of a rank that has waited for this one in vain, and has no store any more
            if self._library:
                self._library.be_patient(exchange.patience_s)
            self._process_group = _made(spec, core.TCPStore(HERE, port, False, 1, STORE_S), self.rank, self.size, number)
            getattr(self._process_group, operation)(*arguments)
        except (*FAILURES, ValueError) as error:
            exchange.fail(f"rank {self.rank} cannot reach the others from {spec} ({first_line(error)})")
        finally:
            del server
        if self._library:
            _look_after(self, self._group, self._library.joined())


def _look_after(place: MeetingPlace, group: Group, communicator: Any) -> None:
    """Let collectives end that wait in vain, and say why once the host has waited for the device."""

    def judge() -> None:
        if (found := communicator.gave_up()) is not None:
            kind, launch, step, n, nbytes, late = found
            group.exchange.judge(Note(KINDS[kind], launch, step, n, nbytes), late)

    place.device.before_wait, place.device.after_wait = _nap_until, judge
    arguments = weakref.ref(place), group, communicator
    threading.Thread(target=_watch, args=arguments, name=f"rank {group.rank} watches", daemon=True).start()


def _nap_until(reached: Callable[[], bool]) -> None:
    """Let other threads run while collectives may wait for ranks that are gone. In a wait of Paddle's own none would, nor what
    tells those collectives, nor what hears that rank 0 has ended."""
    while not reached():
        time.sleep(NAP_S)


def _watch(place: weakref.ref[MeetingPlace], group: Group, communicator: Any) -> None:
    """Tell collectives that wait when some rank has failed, which its host says, or the engine was closed."""
    while place() is not None:
        if group.exchange.failure:
            communicator.abandon()
            return
        time.sleep(LOOK_S)


def _serve() -> tuple[Any, int]:
    """Paddle's store, and the port that it listens on: on every interface, as it takes no address."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return core.TCPStore(HERE, port, True, 1, STORE_S), port


def _made(spec: str, store: Any, rank: int, size: int, number: int) -> Any:
    """The process group of that number. Paddle asks the environment which rank of all this process is."""
    kind = take_apart(spec).kind
    with dictating(TRAINER, str(rank)):
        if kind in PROCESS_GROUPS:
            return getattr(core, PROCESS_GROUPS[kind]).create(store, rank, size, number)
        return core.ProcessGroupCustom.create(store, kind, rank, size, number)


def collectives(device: PaddleDevice, group: Group) -> Collectives:
    """All of them, on one device. Nothing is exchanged yet."""
    from polydraft_paddle.kernels.collectives import kernels

    if device.host_visible:
        return in_host_memory(device, group)
    found = kernels(MeetingPlace(device, group))
    providers = {name: PaddleProvider(kernel, device.counters, device.spec) for name, kernel in found.items()}
    return Collectives(providers, {name: COLLECTIVES[name].version for name in providers})
