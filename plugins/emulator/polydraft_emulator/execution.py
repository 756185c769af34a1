"""Carries work from the host's call to its end: issuing, recording, running, failing and waiting.

The device, its streams and its events pass everything on to the one executor of their device. The order is decided in
`schedule.py`. A failure is reported at a wait, not earlier.

A failure voids everything that has not run. The next wait raises it, once; events that were recorded after voided work raise
whenever they are waited for, and what is issued between the failure and the wait is void too. Whatever the failed operation
writes is poisoned. A lost device raises at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np

from polydraft.device import DeviceCounters
from polydraft.errors import DeviceError
from polydraft.reference.device import poison_array
from polydraft_emulator.faults import HOW, Faults, Trigger
from polydraft_emulator.memory import Guard
from polydraft_emulator.observe import Eyes
from polydraft_emulator.options import Options, launch_names
from polydraft_emulator.schedule import DONE, DROPPED, QUEUED, Operation, Schedule
from polydraft_emulator.timeline import Clock

if TYPE_CHECKING:
    from polydraft_emulator.graph import Recording
    from polydraft_emulator.streams import EmulatorEvent, EmulatorStream, Work


class Executor:
    """Queues of one device and all that concerns them. `recording` is set while a graph is captured; `guard` opens device
    memory to work that runs."""

    def __init__(self, options: Options, counters: DeviceCounters) -> None:
        names = launch_names()
        self.options, self.counters = options, counters
        self.guard = Guard()
        self.schedule = Schedule(options.policy, options.seed, self._execute)
        self.faults = Faults(options.fault, options.delay, names)
        self.clock = Clock(options.latency, names) if options.latency else None
        self.recording: Recording | None = None
        self.eyes = Eyes(self.guard)
        self._error: DeviceError | None = None
        self._lost = ""

    # -- issuing -----------------------------------------------------------------------------------
    def issue(self, stream: EmulatorStream, work: Work) -> None:
        """Queue work, or record it while a graph is captured."""
        work.operation = self.eyes.operation
        if self.recording is not None:
            self.recording.add(stream, work)
            return
        if work.kind == "kernel":
            self.counters.launches += 1
        self._put(stream, [[work]])

    def replay(self, stream: EmulatorStream, works: Sequence[Work]) -> None:
        """Queue the work of a captured graph, as one unit or as one a launch: another stream may come in between or not."""
        self.counters.graph_replays += 1
        self._put(stream, [list(works)] if self.schedule.coin() else [[work] for work in works], graph=True)

    def _put(self, stream: EmulatorStream, units: list[list[Work]], *, graph: bool = False) -> None:
        """Queue each unit as one operation."""
        with self.clock or nullcontext():
            self.check_alive()
            issued = self.clock.issue() if self.clock else 0.0
            fault = self.faults.strike("replay", "graph") if graph else None
            for unit in units:
                operation = self._operation(stream, unit, fault)
                if self.clock:
                    parts = [(work.kind, work.name, work.rows) for work in unit]
                    parts = [("replay", "graph", 0), *parts] if graph and unit is units[0] else parts
                    stream.end_s = self.clock.occupy(
                        parts, stream=stream.name, issued=issued, earliest=stream.end_s, extra=operation.delay_s or 0.0
                    )
                fault = None
                if self._error is None and not self._lost:  # void otherwise: something failed, and the host does not know yet
                    self.schedule.submit(operation)

    def _operation(self, stream: EmulatorStream, unit: list[Work], fault: Trigger | None) -> Operation:
        pairs: list[tuple[Work, Trigger | None]] = [(work, None) for work in unit]
        delay: float | None = None
        if self.faults.any:
            struck = [self.faults.strike(work.kind, work.name) for work in unit]
            pairs = list(zip(unit, [struck[0] or fault, *struck[1:]], strict=True))
            delay = max((d for work in unit if (d := self.faults.delay(work.kind, work.name)) is not None), default=None)
        for work in unit:
            if work.issued is not None:
                work.issued()
        return Operation(unit[0].name, stream.queue, pairs, delay_s=delay)

    def _execute(self, operation: Operation) -> None:
        """Run one operation; what it raises becomes a failure of the device."""
        self.guard.depth += 1
        try:
            with np.errstate(all="ignore"):  # a device raises no floating-point exceptions
                for work, fault in operation.work:
                    if fault is not None:
                        self._fail(work, fault, f"as fault={fault.text} asks")
                        return
                    try:
                        self.eyes.run(work) if work.operation else work.run()
                    except Exception as error:  # noqa: BLE001  whatever a kernel stumbles over, the host learns at its next wait
                        self._fail(work, None, f"{type(error).__name__}: {error}", error)
                        return
        finally:
            self.guard.depth -= 1

    def _fail(self, work: Work, fault: Trigger | None, why: str, cause: Exception | None = None) -> None:
        for array in work.spoils:
            poison_array(array)
        self.schedule.drop()
        how = (fault.argument if fault else "") or "fail"
        sentence = f"{work.kind} {work.name!r} {HOW[how]} on {self.options} ({why}); every step in flight is void, ask again"
        if how == "lost":
            self._lost = sentence.replace("ask again", "open a new engine")
        else:
            self._error = DeviceError(sentence)
            self._error.__cause__ = cause

    # -- waiting -----------------------------------------------------------------------------------
    def mark(self, event: EmulatorEvent, stream: EmulatorStream) -> None:
        """Record `event` on `stream`."""
        self.refuse_in_capture("event.record")
        self.check_alive()
        event.mark, event.end_s = Operation("event", stream.queue, ()), stream.end_s
        if self._error is None:
            self.schedule.submit(event.mark)
        else:
            event.mark.state = DROPPED

    def hold(self, stream: EmulatorStream, event: EmulatorEvent) -> None:
        """Make `stream` wait for `event`."""
        self.refuse_in_capture("stream.wait")
        self.check_alive()
        if event.mark is None or self._error is not None:
            return
        self._check_reached(event.mark, dropped_only=True)
        operation = Operation("wait", stream.queue, (), after=(event.mark,))
        stream.end_s = max(stream.end_s, event.end_s)
        self.schedule.submit(operation)

    def ask(self, event: EmulatorEvent) -> bool:
        """Whether the point of `event` has been reached."""
        self.refuse_in_capture("event.query")
        self.check_alive()
        mark = event.mark
        if mark is None:
            return True
        with self.clock or nullcontext():
            if self.clock:
                if self.clock.now() < event.end_s:
                    return False
                self.schedule.reach(mark)
            elif mark.state == QUEUED:
                self.schedule.query()
        self._check_reached(mark, dropped_only=True)
        return mark.state == DONE

    def wait_for(self, event: EmulatorEvent) -> None:
        """Block the host until the point of `event` has been reached."""
        self.refuse_in_capture("event.synchronize")
        self.counters.host_syncs += 1
        self.check_alive()
        if event.mark is None:
            return
        with self.clock or nullcontext():
            self.schedule.reach(event.mark)
            if self.clock:
                self.clock.wait_until(event.end_s)
        self._check_reached(event.mark)

    def settle(self, streams: Sequence[EmulatorStream]) -> None:
        """Run everything; raises the `DeviceError` of whatever failed since the last wait."""
        self.refuse_in_capture("device.synchronize")
        self.counters.host_syncs += 1
        self.check_alive()
        with self.clock or nullcontext():
            self.schedule.drain()
            if self.clock:
                self.clock.wait_until(max(stream.end_s for stream in streams))
        self._check_reached(None)

    def _check_reached(self, mark: Operation | None, *, dropped_only: bool = False) -> None:
        """Surface what failed: the loss of the device, then the pending error, then a point that will never be reached."""
        self.check_alive()
        if self._error is not None and not dropped_only:
            error, self._error = self._error, None
            raise error
        if mark is not None and mark.state == DROPPED:
            raise DeviceError(
                f"an event on {self.options} marks work that an earlier failure has voided; record it again behind work that runs"
            )

    def check_alive(self) -> None:
        """Raise `DeviceError` on a device that was lost or closed."""
        if self._lost:
            raise DeviceError(self._lost)

    def close(self) -> None:
        """Run nothing any more and raise at every call."""
        self.schedule.drop()
        self._lost = f"device {self.options} is closed; open a new engine"

    def refuse_in_capture(self, call: str) -> None:
        """Raise `DeviceError` naming `call` while a graph is captured."""
        if self.recording is not None:
            raise DeviceError(f"{call} is not allowed while a graph is captured; move it out of the captured function")
