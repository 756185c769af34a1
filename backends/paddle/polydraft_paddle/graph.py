"""Graph capture through Paddle's own `CUDAGraph`, which custom devices also offer when their runtime has the calls.

`polydraft_graph_capture` returns it on places that have streams. It captures whatever Paddle queues on the compute stream of the
device meanwhile. A step of which a part runs on the CPU is not captured, because that part would not be replayed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from polydraft.device import Stream
from polydraft.errors import DeviceError
from polydraft_paddle.companions import graph_memory
from polydraft_paddle.installation import black_list, first_line, set_fallback
from polydraft_paddle.place import use
from polydraft_paddle.provider import FAILURES, device_error, missing_kernel, refused

if TYPE_CHECKING:
    from polydraft_paddle.device import PaddleDevice


def open_capture(device: PaddleDevice) -> PaddleGraphCapture:
    """The capture facility of a device; `DeviceError` where its place offers no graphs, which Paddle decides when its module of
    graphs is imported."""
    from paddle.device.cuda import graphs

    if not graphs.is_cuda_graph_supported():
        raise DeviceError(f"Paddle offers no graphs on {device.spec}; use --graph off")
    return PaddleGraphCapture(device)


def why_no_graphs(device: PaddleDevice) -> str:
    """Why graphs do not work on the place of an open device, in a clause, found out once a process by capturing a copy and
    replaying it over other contents; "" where they work."""
    if device.spec not in _TRIED:
        _TRIED[device.spec] = _tried(device)
    return _TRIED[device.spec]


_TRIED: dict[str, str] = {}


def _tried(device: PaddleDevice) -> str:
    try:
        use(device.spec)
        with refused(device.spec):
            source, target, other = (paddle.to_tensor(np.full(4, value, np.float32), place=device.place) for value in (0, 0, 1))
        graph = open_capture(device).capture(device.stream, lambda: target.copy_(source, False))
        with refused(device.spec):
            source.copy_(other, False)
            graph.replay(device.stream)
            device.synchronize()
            seen = target.numpy().tolist()
        device.graphs.remove(graph)
        graph.release()
    except DeviceError as error:
        return str(error).partition(";")[0]
    return "" if seen == [1.0] * 4 else f"device {device.spec} captured a copy that did nothing when it was replayed"


class PaddleGraph:
    """A captured run of launches, with the device's counters."""

    def __init__(self, graph: Any, device: PaddleDevice) -> None:
        self._graph, self._device = graph, device
        self.release = weakref.finalize(self, graph.reset)
        """Gives the graph back, once: when it is called, and at the latest when the process ends. Paddle itself would do so
        behind its devices, and die of it."""

    def replay(self, stream: Stream) -> None:
        """Queue the captured work again on the compute stream."""
        del stream
        self._device.check_open("a graph")
        self._device.counters.graph_replays += 1
        use(self._device.spec)
        try:
            self._graph.replay()
        except FAILURES as error:
            raise device_error(self._device.spec, error) from error


class PaddleGraphCapture:
    """Captures on the compute stream of one device."""

    def __init__(self, device: PaddleDevice) -> None:
        self._device = device

    def capture(self, stream: Stream, fn: Callable[[], object]) -> PaddleGraph:
        """Run `fn` once, recording what it queues; `DeviceError` with Paddle's reason when something in it cannot be captured."""
        from paddle.device.cuda.graphs import CUDAGraph

        spec = self._device.spec
        if stream is not self._device.stream:
            raise DeviceError(f"device {spec} captures its compute stream alone; issue the launches there")
        if secret := black_list(spec):
            raise DeviceError(
                f"{secret} runs operations of {spec} on the CPU, which no graph replays; unset it or use --graph off"
            )
        self._device.synchronize()
        use(spec)
        graph = CUDAGraph(self._device.place)
        allowed = set_fallback(allowed=False)
        try:
            graph.capture_begin()
            self._device.capturing = True
            try:
                fn()
            except BaseException:
                with contextlib.suppress(*FAILURES, ValueError):  # why it broke off is what matters
                    graph.capture_end()
                    graph.reset()
                raise
            else:
                graph.capture_end()
            finally:
                self._device.capturing = False
        except DeviceError as error:
            operation = missing_kernel(error.__cause__)
            if not operation or not allowed:
                raise
            raise DeviceError(
                f"Paddle has no kernel of {operation!r} for device {spec}, and what runs on the CPU instead is not captured; "
                "register one in the device's plugin, or use --graph off"
            ) from error
        except (*FAILURES, ValueError) as error:
            raise DeviceError(f"device {spec} could not capture a step: {first_line(error)}; use --graph off") from error
        finally:
            set_fallback(allowed=allowed)
        captured = PaddleGraph(graph, self._device)
        self._device.graphs.append(captured)
        return captured

    def memory(self) -> int:
        """Bytes that graphs hold, where the place's package tells; Paddle's own pools do not tell them from other memory."""
        return graph_memory(self._device.spec)
