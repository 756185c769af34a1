"""The hazard checker: a wrapper around any device, kernel table and graph capture that holds every access against happens-before.

`Engine` puts it in place when `EngineConfig.sanitize` asks for it, and nothing of it exists otherwise. From the accesses that
contracts declare it works out what is ordered with what, and reports what is not, by name (`HAZARDS`). It never changes a
result, and never asks which backend it is watching. `docs/sanitize.md` says what it finds and how to read a report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polydraft.backend import DeviceOptions, ForwardMeta, PassBuffers
from polydraft.contracts.base import Limits, Provider
from polydraft.device import Device, GraphCapture
from polydraft.kernel_table import BoundTable
from polydraft.plugins import Plugins
from polydraft.sanitize.checker import Checker
from polydraft.sanitize.device import WatchedDevice
from polydraft.sanitize.hazards import HAZARDS, Hazard, Operation, Report
from polydraft.sanitize.kernels import WatchedCapture, WatchedFactories, WatchedLaunch, WatchedMeta, WatchedProvider
from polydraft.sanitize.observed import Observed, ObservesAccesses

if TYPE_CHECKING:
    from polydraft.engine import Engine
    from polydraft.runtime.plan import StepOutcome, StepPlan
    from polydraft.runtime.runner import Ticket

__all__ = ["HAZARDS", "Hazard", "Observed", "ObservesAccesses", "Operation", "Report", "WatchedPlugins", "watch"]


@dataclass(frozen=True)
class WatchedPlugins(Plugins):
    """One engine's plugins, whose devices, kernels, metadata and graphs come watched."""

    checker: Checker = dataclasses.field(default_factory=Checker)

    @classmethod
    def over(cls, plugins: Plugins) -> WatchedPlugins:
        """The same plugins, watched by a checker of their own."""
        return cls(**{field.name: getattr(plugins, field.name) for field in dataclasses.fields(Plugins)})

    def open_device(self, spec: str, options: DeviceOptions) -> Device:
        """Open the backend's device, and watch it."""
        return WatchedDevice(super().open_device(spec, options), self.checker)

    def kernels(self, device: Device) -> BoundTable:
        """The table with packs laid over it, every provider watched."""
        watched = _watched(device)
        table = super().kernels(watched.inner)
        providers: Mapping[str, Provider] = {
            name: WatchedProvider(name, table.versions[name], provider, watched) for name, provider in table.providers.items()
        }
        factories = WatchedFactories(table.backend, self.checker, table.backend.providers, table.backend.versions)
        return dataclasses.replace(table, backend=factories, device=watched, providers=providers)

    def graph_capture(self, device: Device) -> GraphCapture:
        """The backend's capture facility, watched."""
        watched = _watched(device)
        return WatchedCapture(super().graph_capture(watched.inner), watched)

    def init_forward_meta(self, device: Device, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
        """The backend's metadata for one kind of pass, watched."""
        watched = _watched(device)
        return WatchedMeta(super().init_forward_meta(watched.inner, buffers, limits), buffers, watched)


def _watched(device: Device) -> WatchedDevice:
    assert isinstance(device, WatchedDevice), "watched plugins have opened the device"
    return device


def watch(engine: Engine, checker: Checker) -> None:
    """Follow the steps of an engine whose plugins are watched: which one is launched or collected, and which slots are let go."""
    runner, ledger = engine.runner, engine.ledger
    launch, resume, collect, release = runner.launch, runner.resume, runner.collect, ledger.release
    in_flight: dict[int, Any] = {}
    labelled: list[Any] = []

    def watched_launch(plan: StepPlan) -> Ticket:
        if not labelled or labelled[-1] is not runner.programs:
            labelled[:] = [runner.programs]
            _label(runner.programs)
        in_flight[plan.step_id] = plan.slots
        if checker.observations is not None:
            checker.observations.step_holds(plan.step_id, ledger.table[plan.slots].ravel().tolist())
        with checker.within("launch", plan.step_id):
            return launch(plan)

    def watched_resume(ticket: Ticket) -> None:
        with checker.within("launch", ticket.plan.step_id):
            resume(ticket)

    def watched_collect(ticket: Ticket) -> StepOutcome:
        with checker.within("collect", ticket.plan.step_id):
            outcome = collect(ticket)
        in_flight.pop(ticket.plan.step_id, None)
        return outcome

    def watched_release(slot: int) -> None:
        checker.release(slot, [step for step, slots in in_flight.items() if slot in slots])
        release(slot)

    checker.on_void(in_flight.clear)
    # The instances' own attributes: callers that hold these objects see them, and other engines do not.
    runner.launch, runner.resume = watched_launch, watched_resume  # type: ignore[method-assign]
    runner.collect = watched_collect  # type: ignore[method-assign]
    ledger.release = watched_release  # type: ignore[method-assign]
    _label(runner.programs)


def _label(programs: Mapping[str, Mapping[Any, Any]]) -> None:
    """Tell each launch its program and room."""
    for parts in programs.values():
        for program in parts.values():
            for entry in program.entries:
                if isinstance(entry.launch, WatchedLaunch):
                    entry.launch.label = f"{entry.contract} ({program.name}: {entry.room})"
