"""Owns the whole plugin surface: every hook a backend, kernel pack or extension may implement, typed and documented.

`plugins.py` resolves these once per engine into bound callables; a step makes no hook call. Nothing here has behaviour:
an unimplemented hook means that the plugin does not offer that thing.

Three families carry what really differs between platforms: *kernel launch* (`polydraft_kernels`), *graph capture*
(`polydraft_graph_capture`) and *forward-metadata init* (`polydraft_init_forward_meta`); identity, device, extension and
observer hooks surround them. `docs/plugins.md` has a section for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from polydraft.backend import BackendInfo, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft.device import Device, GraphCapture
    from polydraft.models.families import Family
    from polydraft.proposers.base import Factory
    from polydraft.runtime.plan import StepOutcome, StepPlan

PROJECT = "polydraft"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class StepObserver(Protocol):
    """Called with finished, host-side step records only, after a step has been applied."""

    def step_finished(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Both records are frozen and safe to keep; the host waits while this runs."""


class RegisterProposer(Protocol):
    """What `polydraft_proposers` is handed: `register(name, factory)`."""

    def __call__(self, name: str, factory: Factory) -> None:
        """Add a proposer under `name`; `ConfigError` when the name is taken."""


class RegisterFamily(Protocol):
    """What `polydraft_models` is handed: `register(family)`."""

    def __call__(self, family: Family) -> None:
        """Add a model family; `PluginError` when its architecture is taken."""


@hookspec(firstresult=True)
def polydraft_backend_info(spec: str) -> BackendInfo:  # type: ignore[empty-body]
    """Say who you are: name, version, device pattern, capabilities, contract versions, availability with a reason.

    `spec` is the device that was asked for ("" means your default), for backends whose capabilities or evidence depend on it; the
    others leave the argument out.

    Called once when the plugin is loaded, by an engine or by `doctor`, before any device is opened. Must be cheap: import no
    framework and touch no device; when a library or device is missing return `available=False` with one sentence that
    names the next step. `name` is the name of the entry point, `contract_versions` what `polydraft_kernels` offers.
    """


@hookspec(firstresult=True)
def polydraft_open_device(spec: str, options: DeviceOptions) -> Device:  # type: ignore[empty-body]
    """Open the device named by `spec` ("" means your default) and return it.

    Called once per engine, after negotiation and before weights are read. Raise `DeviceError` naming what is missing and
    what to do.
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
    """Return the capture facility. Required when the capability `graph_capture` is declared, and then called at most once.

    Buckets, order, warm-up, padding and refusals are core's business: capture records a run of launches, replay enqueues
    it again on the same addresses.
    """


@hookspec(firstresult=True)
def polydraft_init_forward_meta(device: Device, buffers: PassBuffers, limits: Limits) -> ForwardMeta:  # type: ignore[empty-body]
    """Allocate your attention metadata for one kind of pass; its `fill(stream, step)` is enqueued before each such pass.

    Called once per kind of pass (target; draft over the target's rows; draft step). The result is handed to attention
    kernels as their `meta` argument; core never looks inside.
    """


@hookspec(firstresult=True)
def polydraft_off_device(spec: str) -> Mapping[str, Sequence[str]]:  # type: ignore[empty-body]
    """Say which operations of a framework leave the device `spec` for the CPU: their names, by the contract that uses them.

    Optional, for backends on a framework that may run elsewhere what the device has no kernel for. Called by the conformance
    kit for a profile and by `doctor --probe`, never by an engine: it may take seconds, and should try every operation in a
    process of its own, with such runs allowed. {} when everything stays. Raise `DeviceError` when it cannot be found out.
    """


@hookspec
def polydraft_proposers(register: RegisterProposer) -> None:
    """Add proposers: call `register(name, factory)` for each; `factory(context)` returns a `Proposer`.

    Called once per engine, before negotiation. The factory runs only when its proposer is chosen.
    """


@hookspec
def polydraft_models(register: RegisterFamily) -> None:
    """Add model families: call `register(family)` with a `polydraft.models.families.Family` for each architecture.

    Called once per engine, before the checkpoint is opened.
    """


@hookspec
def polydraft_step_observers() -> Iterable[StepObserver]:  # type: ignore[empty-body]
    """Return observers of finished steps (metrics, tracing).

    Called once per engine, when all else is built; nothing is called per step without an observer.
    """


HOOKS: tuple[str, ...] = (
    "polydraft_backend_info",
    "polydraft_open_device",
    "polydraft_kernels",
    "polydraft_graph_capture",
    "polydraft_init_forward_meta",
    "polydraft_off_device",
    "polydraft_proposers",
    "polydraft_models",
    "polydraft_step_observers",
)
"""Every hook, in the order of this page."""
