"""The hooks that a backend, kernel pack or extension may implement: one pluggy hook specification each, typed and documented.

They are the whole plugin surface. An engine calls them through its own plugin manager while it is built; a step calls none.
A hook that a plugin leaves out means that it does not offer that thing.

Hooks marked `firstresult` are questions to the backend, of which an engine has one. The others may be answered by every plugin
that was named, and all answers count. Any plugin may wrap any hook. Three carry what really differs between platforms:
*kernel launch* (`polydraft_kernels`), *graph capture* (`polydraft_graph_capture`) and *forward-metadata init*
(`polydraft_init_forward_meta`). `docs/plugins.md` has a section for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from polydraft.backend import BackendInfo, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft.device import Device, GraphCapture
    from polydraft.instruments.base import Instrument
    from polydraft.models.families import Family
    from polydraft.program.declare import LogitsStage
    from polydraft.program.plan import StepOutcome, StepPlan
    from polydraft.proposers.base import Factory

PROJECT = "polydraft"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class StepObserver(Protocol):
    """Called with finished, host-side step records only, after a step has been applied."""

    def step_finished(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Both records are frozen and safe to keep; the host waits while this runs."""


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


@hookspec
def polydraft_kernels(device: Device) -> KernelTable:  # type: ignore[empty-body]
    """Return providers by contract (or composite) name, and the factories for weights and caches.

    Called once per engine, of the backend and of each kernel pack enabled by name, which may return a table with only the
    providers it replaces. Which pack wins is the user's order (`--kernels`), not the order of calls. A provider is bound once
    to its buffers and then launched with a stream and a launch length; it returns nothing, allocates nothing and never
    synchronises. It knows nothing of what else was bound: launches that become one are composites, or the business of the
    table's `program_pass`, if it brings one (`polydraft.program.fusion.ProgramPass`).
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
def polydraft_proposers() -> Iterable[tuple[str, Factory]]:  # type: ignore[empty-body]
    """Return proposers as pairs of a name and a factory; `factory(context)` returns a `Proposer`.

    Called once per engine, before negotiation. The factory runs only when its proposer is chosen. A name that is taken is a
    `ConfigError` naming both plugins.
    """


@hookspec
def polydraft_models() -> Iterable[Family]:  # type: ignore[empty-body]
    """Return model families, one `polydraft.models.families.Family` for each architecture.

    Called once per engine, before the checkpoint is opened. An architecture that is taken is a `PluginError` naming both
    plugins.
    """


@hookspec
def polydraft_parameters() -> Iterable[LogitsStage]:  # type: ignore[empty-body]
    """Return stages of logits processing (`polydraft.program.declare.LogitsStage`), with the request parameters that they bring.

    Requests give such a parameter in `SamplingParams.extra`, as `--param NAME=VALUE`, or as a field of an HTTP body. A stage
    declares the slot columns it reads and the contracts it launches, behind core's own stages; a kernel pack of the same plugin
    may own these contracts. Called once per engine, when all else is decided.
    """


@hookspec
def polydraft_instruments() -> Iterable[Instrument]:  # type: ignore[empty-body]
    """Return instruments (`polydraft.instruments.base.Instrument`), which watch what an engine binds, launches and steps through.

    Called once per engine, as soon as its plugins are loaded and before the device is opened; each answer is for that engine
    alone. They lie among those that the engine was given, in the order that each of them says (`Instrument.order`).
    """


@hookspec
def polydraft_step_observers() -> Iterable[StepObserver]:  # type: ignore[empty-body]
    """Return observers of finished steps (metrics, tracing).

    Called once per engine, when all else is built; nothing is called per step without an observer.
    """


HOOKS: tuple[str, ...] = tuple(name for name, value in list(globals().items()) if hasattr(value, f"{PROJECT}_spec"))
"""Every hook, in the order of this page."""
FIRST_RESULT: frozenset[str] = frozenset(name for name in HOOKS if getattr(globals()[name], f"{PROJECT}_spec")["firstresult"])
"""Those that one plugin answers: the backend."""
