"""Graph capture and replay: the driver records a run of launches once, and one call enqueues it again.

Core asks for it through `polydraft_graph_capture` and decides what is captured. No launch is given memory of its own, so all
graphs share the buffers of the engine; a graph itself holds only the driver's record of its launches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from polydraft.device import Stream
from polydraft_cuda import driver
from polydraft_cuda.device import CudaDevice


class CudaGraph:
    """A captured run of launches; gone with the last reference to it."""

    def __init__(self, device: CudaDevice, executable: Any, nbytes: int) -> None:
        self._device, self._executable, self.nbytes = device, executable, nbytes
        self._launch, self._counters = device.cuda.cuGraphLaunch, device.counters
        device.at_close.append(weakref.finalize(self, device.cuda.cuGraphExecDestroy, executable))  # once; NCCL waits for it

    def replay(self, stream: Stream) -> None:
        """Enqueue all of it by one call; never blocks."""
        handle = stream.handle  # type: ignore[attr-defined]
        self._counters.graph_replays += 1
        kept = self._device.kept
        last = kept.begin("replay", stream) if kept is not None else None
        (code,) = self._launch(self._executable, handle)
        if code in driver.CONTEXT:
            self._device.make_current()
            (code,) = self._launch(self._executable, handle)
        if code:
            raise self._device.failure(int(code), "replaying a graph")
        if last is not None:
            last.record(stream)


class CudaCapture:
    """The facility that core captures with."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def capture(self, stream: Stream, fn: Callable[[], None]) -> CudaGraph:
        """Record what `fn` enqueues on `stream`; nothing of it runs. Raises `DeviceError` for a wait or an allocation inside,
        and whatever `fn` raises."""
        device, cuda = self._device, self._device.cuda
        device.refuse_in_capture("a second capture")
        handle = stream.handle  # type: ignore[attr-defined]
        free = self._free()
        graph = self._recorded(handle, fn)
        try:
            executable = device.call("cuGraphInstantiate", graph, 0, doing="building a graph")
        finally:
            cuda.cuGraphDestroy(graph)
        device.call("cuGraphUpload", executable, handle, doing="uploading a graph")
        device.call("cuStreamSynchronize", handle, doing="uploading a graph")
        captured = CudaGraph(device, executable, max(free - self._free(), 0))
        self._graphs.add(captured)
        return captured

    def _recorded(self, handle: Any, fn: Callable[[], None]) -> Any:
        """What `fn` enqueues, as the driver's graph."""
        device = self._device
        # Relaxed: memory or a graph of an engine that is gone may be freed meanwhile, by the collector, on this thread; waits and
        # allocations of ours are refused as it is.
        mode = device.cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        device.call("cuStreamBeginCapture", handle, mode, doing="beginning a capture")
        device.capturing = True
        try:
            fn()
        except BaseException:
            self._discard(handle)
            raise
        finally:
            device.capturing = False
        return device.call("cuStreamEndCapture", handle, doing="ending a capture")

    def _discard(self, handle: Any) -> None:
        """End a capture that failed."""
        code, graph = self._device.cuda.cuStreamEndCapture(handle)
        if not code and graph is not None:
            self._device.cuda.cuGraphDestroy(graph)

    def _free(self) -> int:
        return int(self._device.call("cuMemGetInfo", doing="asking for free memory")[0])

    def memory(self) -> int:
        """Bytes that the device had fewer behind the captures of the graphs that are alive."""
        return sum(graph.nbytes for graph in self._graphs)
