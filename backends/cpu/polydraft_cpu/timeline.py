"""The device's timeline: start and end of every launch and copy, recorded while a tool asks for it.

`CpuDevice.keep_timeline` installs it; traces and benchmarks read it. It is off by default and then costs a step nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from polydraft.instruments.timeline import Operation

if TYPE_CHECKING:
    from polydraft_cpu.device import CpuDevice


class CpuTimeline:
    """What ran since it was made, on the clock of the thread that carries it out."""

    label = "measured: the clock of the device's own thread"

    def __init__(self, device: CpuDevice) -> None:
        device.settle()
        self._device = device
        self._issued: dict[int, tuple[str, str, int, float]] = {}
        self._next = ("", "", 0, 0.0)
        before, clock, after = time.perf_counter(), 1e-9 * device.library.pd_time(device.context, 1), time.perf_counter()
        self._shift_s = 0.0 if before <= clock <= after else (before + after) / 2 - clock
        """What lies between the clocks; on Linux they are one."""

    def issuing(self, kind: str, name: str, rows: int) -> None:
        """Note what is about to be issued."""
        self._next = (kind, name, rows, time.perf_counter())

    def issued(self, number: int) -> None:
        """Note the number that it got; launches of nothing get none of their own."""
        self._issued.setdefault(number, self._next)

    @property
    def spans(self) -> Sequence[Operation]:
        """In issue order, the launches of a graph behind its start; waits for what is outstanding."""
        device = self._device
        device.settle()
        words = np.empty((device.library.pd_num_spans(device.context), 5), np.int64)
        device.library.pd_spans(device.context, words.ctypes.data)
        found: list[Operation] = []
        before = 0
        for number, rows, start_ns, end_ns, name in words.tolist():
            kind, what, launched, issued_s = self._issued[number]
            start_s, end_s = (self._shift_s + 1e-9 * ns for ns in (start_ns, end_ns))
            if kind == "replay":
                if number != before:
                    found.append(Operation("compute", kind, what, 0, issued_s, start_s, start_s))
                kind, what, launched = "kernel", (ctypes.string_at(name)).decode(), rows
            found.append(Operation("compute", kind, what, launched, issued_s, start_s, end_s))
            before = number
        return tuple(found)
