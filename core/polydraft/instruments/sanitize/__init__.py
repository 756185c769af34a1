"""The hazard checker: an instrument around any device that holds every access against happens-before.

`Engine` adds it where `EngineConfig.sanitize` asks for it, and nothing of it exists otherwise. From the accesses that contracts
declare it works out what is ordered with what, and reports what is not, by name (`HAZARDS`). It never changes a result, and
never asks which backend it is watching. `docs/sanitize.md` says what it finds and how to read a report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polydraft.backend import ForwardMeta, KernelTable, PassBuffers
from polydraft.device import Device, GraphCapture, Launch
from polydraft.errors import ConfigError
from polydraft.instruments.base import Instrument
from polydraft.instruments.sanitize.checker import Checker
from polydraft.instruments.sanitize.device import WatchedDevice
from polydraft.instruments.sanitize.hazards import HAZARDS, Hazard, Operation, Report
from polydraft.instruments.sanitize.kernels import Pass, WatchedCapture, WatchedFactories, watched_launch
from polydraft.instruments.sanitize.observed import Observed, ObservesAccesses
from polydraft.plugins.kernel_table import Binding
from polydraft.program.points import Stage

if TYPE_CHECKING:
    from polydraft.engine import Engine

__all__ = ["HAZARDS", "Hazard", "Observed", "ObservesAccesses", "Operation", "Report", "Sanitizer"]


class Sanitizer(Instrument):
    """Follows one engine from the opening of its device to its end. `strict` raises at the first finding, where it happens.

    It checks what the engine is built of, too, so it cannot begin later; `close` raises `HazardError` for what was found."""

    name = "sanitize"
    order = 20
    stages = ("launch", "resume", "collect")

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__()
        self.checker = Checker(strict=strict)
        self._watched: WatchedDevice | None = None
        self._passes: dict[int, Pass] = {}
        self._in_flight: dict[int, Any] = {}
        self.checker.on_void(self._in_flight.clear)

    @property
    def report(self) -> Report:
        """What was found so far."""
        return self.checker.report

    # -- places ------------------------------------------------------------------------------------
    def device(self, device: Device) -> WatchedDevice:
        """Every call of the device is reported to the checker."""
        self._watched = WatchedDevice(device, self.checker)
        return self._watched

    @property
    def watched(self) -> WatchedDevice:
        """The device as the engine has it."""
        assert self._watched is not None, "the device is opened first"
        return self._watched

    def factories(self, table: KernelTable) -> WatchedFactories:
        """Weights and caches are memory that the checker knows."""
        return WatchedFactories(table, self.checker, table.providers, table.versions)

    def capture(self, capture: GraphCapture) -> WatchedCapture:
        """What a graph is captured of is what its replays do."""
        return WatchedCapture(capture, self.watched)

    def metadata(self, meta: ForwardMeta, buffers: PassBuffers) -> None:
        """A fill reads the pass's buffers, and writes the metadata."""
        self._passes[id(meta)] = Pass.of(meta, buffers, self.checker)

    def bind(self, binding: Binding, launch: Launch) -> Launch:
        """Every launch is reported with what its contract declares."""
        return watched_launch(binding, launch, self.watched, self._passes)

    # -- steps -------------------------------------------------------------------------------------
    def built(self, engine: Engine) -> None:
        """Follow its steps: which one is launched or collected, and which slots are let go."""
        super().built(engine)
        engine.ledger.on_release.append(self._released)

    def begin(self, stage: Stage, subject: Any) -> None:
        """The host is in the launch path of a step, or in its collection."""
        plan = subject if stage == "launch" else subject.plan
        if stage == "launch":
            self._in_flight[plan.step_id] = plan.slots
            if self.checker.observations is not None:
                self.checker.observations.step_holds(plan.step_id, self.engine.ledger.table[plan.slots].ravel().tolist())
        self.checker.enter("collect" if stage == "collect" else "launch", plan.step_id)

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        """It has left it."""
        self.checker.leave()
        if stage == "collect" and result is not None:
            self._in_flight.pop(subject.plan.step_id, None)

    def _released(self, slot: int) -> None:
        self.checker.release(slot, [step for step, slots in self._in_flight.items() if slot in slots])

    def stop(self) -> None:
        """It cannot: an access that it has not seen would make every later one a hazard."""
        raise ConfigError("sanitize follows a run to its end and cannot be stopped; build an engine without it")

    def close(self) -> None:
        """Raise `HazardError` for what was found."""
        self.report.check()
