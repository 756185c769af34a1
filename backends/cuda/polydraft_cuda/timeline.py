"""Owns the device's own account of when it worked: pairs of timed events around graphs and copies, for as long as somebody asks.

`CudaDevice.keep_timeline` puts it in place, `polydraft bench` reads it for the share of time in which the device was idle. It
is off by default and costs a step nothing then. Launches outside of graphs are not timed: an event for each would change what
it measures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from polydraft.device import Stream
from polydraft.timeline import Operation

if TYPE_CHECKING:
    from polydraft_cuda.device import CudaDevice, CudaEvent

KINDS: Final = {"cuMemcpyHtoDAsync": "upload", "cuMemcpyDtoHAsync": "download"}
"""What a copy is called in a timeline, by the driver's name of it."""


class CudaTimeline:
    """What ran since it was made. Times of the device are tied to the host's clock by one event that was waited for then."""

    label = "measured: events around graphs and copies"

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._noted: list[tuple[str, str, float, CudaEvent, CudaEvent]] = []
        self._origin = device.timer()
        self._origin.record(device.stream)
        self._origin.synchronize()
        self._zero_s = time.perf_counter()

    def begin(self, kind: str, stream: Stream) -> CudaEvent:
        """Note that something of `kind` is about to be enqueued; the event it ends with is to be recorded behind it."""
        first, last = self._device.timer(), self._device.timer()
        self._noted.append((stream.name, kind, time.perf_counter(), first, last))  # type: ignore[attr-defined]
        first.record(stream)
        return last

    @property
    def spans(self) -> Sequence[Operation]:
        """In issue order; waits for what is enqueued. Raises `DeviceError` when the device was lost."""
        self._device.call("cuCtxSynchronize", doing="waiting for the device")
        return tuple(
            Operation(stream, kind, kind, 0, issued, self._at(first), self._at(last))
            for stream, kind, issued, first, last in self._noted
        )

    def _at(self, event: CudaEvent) -> float:
        return self._zero_s + 1e-3 * event.since(self._origin)
