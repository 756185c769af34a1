"""Graph capture on the CPU: records a run of launches as a list and replays the list by one call, without Python in between.

`polydraft_graph_capture` returns it. Core decides what is captured and when it is replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from polydraft.device import Stream
from polydraft_cpu.device import CpuDevice


class CpuGraph:
    """Recorded launches; `replay` issues them on the addresses and with the launch lengths of the capture."""

    def __init__(self, device: CpuDevice, program: int, kept: list[object]) -> None:
        self._device, self._program, self._kept = device, program, kept
        self._replay, self._forget = device.library.pd_replay, device.library.pd_forget
        self.nbytes: int = device.library.pd_program_bytes(program)

    def __del__(self) -> None:
        """No weak reference does this: at the end of the process, and for garbage, its turn could come before that of the device,
        which carries out what is outstanding."""
        self._forget(self._program)

    def replay(self, stream: Stream) -> None:
        """Issue the launches again, all of them in one call."""
        del stream
        device = self._device
        if device.gate is not None:
            device.refuse_in_capture("a replay")
            device.gate(self)
        device.counters.graph_replays += 1
        if device.clocked is not None:
            device.clocked.issuing("replay", "graph", 0)
        device.issued(self._replay(device.context, self._program), self)


class CpuCapture:
    """The capture facility of one device."""

    def __init__(self, device: CpuDevice) -> None:
        self._device = device
        self._graphs: weakref.WeakSet[CpuGraph] = weakref.WeakSet()

    def capture(self, stream: Stream, fn: Callable[[], None]) -> CpuGraph:
        """Run `fn` once; its launches are recorded and do not run. `DeviceError` when it waits, copies or allocates."""
        del stream
        device = self._device
        device.begin_capture()
        try:
            fn()
        except BaseException:
            device.library.pd_forget(device.end_capture()[0])
            raise
        graph = CpuGraph(device, *device.end_capture())
        self._graphs.add(graph)
        return graph

    def memory(self) -> int:
        """Bytes of the recorded lists."""
        return sum(graph.nbytes for graph in self._graphs)
