"""Owns the whole plugin surface: every hook a backend, kernel pack or extension may implement, typed and documented.

`plugins.py` resolves these once per engine into bound callables; a step makes no hook call. Nothing here has behaviour:
an unimplemented hook means that the plugin does not offer that thing.

Three families carry what really differs between platforms: *kernel launch* (`polydraft_kernels`), *graph capture*
(`polydraft_graph_capture`) and *forward-metadata init* (`polydraft_init_forward_meta`); identity, device, extension and
observer hooks surround them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from polydraft.backend import BackendInfo, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft.device import Device, GraphCapture

PROJECT = "polydraft"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class StepObserver(Protocol):
    """Called with finished, host-side step records only, after a step has been applied."""

    def step_finished(self, plan: Any, outcome: Any) -> None:
        """`plan` is the frozen `StepPlan`, `outcome` the frozen `StepOutcome`; both are safe to keep."""


@hookspec(firstresult=True)
def polydraft_backend_info() -> BackendInfo:  # type: ignore[empty-body]
    """Say who you are: name, version, device pattern, capabilities, contract versions, availability with a reason.

    Called by `doctor` and before a device is opened. Must be cheap: import no framework and touch no device; when a
    library or device is missing return `available=False` with one sentence that names the next step.
    """


@hookspec(firstresult=True)
def polydraft_open_device(spec: str, options: DeviceOptions) -> Device:  # type: ignore[empty-body]
    """Open the device named by `spec` ("" means your default) and return it.

    Called once per engine. Raise `DeviceError` naming what is missing and what to do.
    """


@hookspec(firstresult=True)
def polydraft_kernels(device: Device) -> KernelTable:  # type: ignore[empty-body]
    """Return providers by contract (or composite) name, and the factories for weights and caches.

    Called once per engine, for the backend first and then for each kernel pack enabled by name, which may return a table
    with only the providers it replaces. A provider is bound once to its buffers and then launched with a stream and a
    launch length; it returns nothing, allocates nothing and never synchronises.
    """


@hookspec(firstresult=True)
def polydraft_graph_capture(device: Device) -> GraphCapture:  # type: ignore[empty-body]
    """Return the capture facility. Called once, only when the capability `graph_capture` is declared.

    Buckets, order, warm-up, padding and refusals are core's business: capture records a run of launches, replay enqueues
    it again on the same addresses.
    """


@hookspec(firstresult=True)
def polydraft_init_forward_meta(device: Device, buffers: PassBuffers, limits: Limits) -> ForwardMeta:  # type: ignore[empty-body]
    """Allocate your attention metadata for one kind of pass; its `fill(stream, step)` is enqueued before each such pass.

    Called once per kind of pass (target; draft over the target's rows; draft step). The result is handed to attention
    kernels as their `meta` argument; core never looks inside.
    """


@hookspec
def polydraft_proposers(register: Callable[..., None]) -> None:
    """Add proposers: call `register(name, factory)` for each; `factory(context)` returns a `Proposer`."""


@hookspec
def polydraft_models(register: Callable[..., None]) -> None:
    """Add model families: call `register(family)` with a `polydraft.models.families.Family` for each architecture."""


@hookspec
def polydraft_step_observers() -> Iterable[StepObserver]:  # type: ignore[empty-body]
    """Return observers of finished steps (metrics, tracing). Called once per engine; nothing is called per step without one."""


HOOKS: tuple[str, ...] = (
    "polydraft_backend_info",
    "polydraft_open_device",
    "polydraft_kernels",
    "polydraft_graph_capture",
    "polydraft_init_forward_meta",
    "polydraft_proposers",
    "polydraft_models",
    "polydraft_step_observers",
)
