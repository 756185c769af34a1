"""The device's timeline: pairs of timed events around graphs and copies, recorded while a tool asks for it.

`CudaDevice.keep_timeline` installs it, `generate --trace` reads it. It is off by default and then costs a step nothing; while on
it costs about fifteen microseconds. Launches outside of graphs are not timed: an event for each would change what it measures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from polydraft.device import Stream
from polydraft.instruments.timeline import Operation

if TYPE_CHECKING:
    from polydraft_cuda.device import CudaDevice, CudaEvent

KINDS: Final = {"cuMemcpyHtoDAsync": "upload", "cuMemcpyDtoHAsync": "download"}
"""What a copy is called in a timeline, by the driver's name of it."""


class CudaTimeline:
    """What ran since it was begun last. Its events are made once and recorded again each time: making one takes the host longer
    than recording it, and a step of a small model is as short as what the host does for it."""

    label = "measured: events around graphs and copies"

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pairs: list[tuple[CudaEvent, CudaEvent]] = []
        self._noted: list[tuple[str, str, float]] = []
        self._origin = device.timer()
        self._zero_s = 0.0

    def restart(self) -> None:
        """Forget what was noted; times of the device are tied to the host's clock by an event that is waited for here."""
        self._noted.clear()
        self._origin.record(self._device.stream)
        self._origin.synchronize()
        self._zero_s = time.perf_counter()

    def begin(self, kind: str, stream: Stream) -> CudaEvent:
        """Note that something of `kind` is about to be enqueued; the event it ends with is to be recorded behind it."""
        place = len(self._noted)
        if place == len(self._pairs):
            self._pairs.append((self._device.timer(), self._device.timer()))
        first, last = self._pairs[place]
        self._noted.append((stream.name, kind, time.perf_counter()))  # type: ignore[attr-defined]
        first.record(stream)
        return last

    @property
    def spans(self) -> Sequence[Operation]:
        """In issue order; waits for what is enqueued. Raises `DeviceError` when the device was lost."""
        self._device.call("cuCtxSynchronize", doing="waiting for the device")
        return tuple(
            Operation(stream, kind, kind, 0, issued, self._at(first), self._at(last))
            for (stream, kind, issued), (first, last) in zip(self._noted, self._pairs, strict=False)
        )

    def _at(self, event: CudaEvent) -> float:
        return self._zero_s + 1e-3 * event.since(self._origin)
