"""Graph capture and replay on the emulator: a list of launches over fixed addresses, and what is forbidden during a capture.

Core asks for it through `polydraft_graph_capture`, captures a function and replays the result. Core also decides what is captured
and when it is replayed.

While a function is captured its launches and copies are recorded and do not run. The host may not wait, ask an event, record
or wait for one, allocate, or load: each is a `DeviceError` that names the call. A replay runs on the addresses of the capture;
where a buffer, weight or cache has moved or was freed since, it raises `GraphBufferError` and runs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from polydraft.device import Array
from polydraft.errors import DeviceError, GraphBufferError
from polydraft_emulator.memory import Memory

if TYPE_CHECKING:
    from polydraft_emulator.device import EmulatorDevice
    from polydraft_emulator.execution import Executor
    from polydraft_emulator.streams import EmulatorStream, Work

NODE_BYTES = 4096
"""Device memory that a captured launch occupies: modelled, in the order of what drivers take for a node and its arguments."""


class Recording:
    """What a capture has recorded so far."""

    def __init__(self, stream: EmulatorStream, uncapturable: frozenset[str]) -> None:
        self.stream, self._uncapturable = stream, uncapturable
        self.works: list[Work] = []

    def add(self, stream: EmulatorStream, work: Work) -> None:
        """Record work instead of issuing it."""
        if stream is not self.stream:
            raise DeviceError(
                f"{work.kind} {work.name!r} was issued on stream {stream.name} while {self.stream.name} is captured; "
                "capture one stream at a time"
            )
        if work.name in self._uncapturable:
            raise DeviceError(f"{work.name} cannot be captured on this device (capability uncapturable); split the graph there")
        self.works.append(work)


class EmulatorGraph:
    """A captured run of launches. `nbytes`: what it holds on the device while it is alive."""

    def __init__(self, executor: Executor, works: list[Work]) -> None:
        self._executor, self._works = executor, tuple(works)
        self._addresses: dict[Memory, Array] = {memory: array for work in works for memory, array in work.uses}
        self.nbytes = NODE_BYTES * len(works)

    def replay(self, stream: EmulatorStream) -> None:
        """Issue the launches again; never blocks. Raises `GraphBufferError` when an address has changed."""
        self._executor.refuse_in_capture("graph.replay")
        for memory, array in self._addresses.items():
            if not memory.is_at(array):
                how = "was freed" if memory.freed else "lies at another address"
                raise GraphBufferError(
                    f"{memory.name} {how} since this graph was captured on {self._executor.options}; copy into captured memory "
                    "instead of replacing it, or capture again"
                )
        self._executor.replay(stream, self._works)


class EmulatorCapture:
    """The facility that core captures with."""

    def __init__(self, device: EmulatorDevice, uncapturable: frozenset[str]) -> None:
        self._device, self._uncapturable = device, uncapturable
        self._graphs: weakref.WeakSet[EmulatorGraph] = weakref.WeakSet()

    def capture(self, stream: EmulatorStream, fn: Callable[[], None]) -> EmulatorGraph:
        """Record what `fn` issues on `stream`. Raises `DeviceError` for anything that a capture forbids, and when the device
        has no memory for the graph."""
        device, executor = self._device, self._device.executor
        executor.refuse_in_capture("a second capture")
        recording = executor.recording = Recording(stream, self._uncapturable)
        try:
            fn()
        finally:
            executor.recording = None
        graph = EmulatorGraph(executor, recording.works)
        device.reserve(f"a graph of {len(recording.works)} launches", graph.nbytes)
        weakref.finalize(graph, device.give_back, graph.nbytes)
        self._graphs.add(graph)
        return graph

    def memory(self) -> int:
        """Bytes held by the graphs that are alive; modelled, see `NODE_BYTES`."""
        return sum(graph.nbytes for graph in self._graphs)
