"""The plugin interface: the hooks that a backend, kernel pack or extension may implement, each a typed pluggy specification.

There is no other plugin interface. An engine calls the hooks through its own plugin manager while it is built; a step calls none.
A plugin implements only the hooks for what it offers.

Only the backend implements hooks marked `firstresult`; an engine has one backend. Every named plugin may implement the others,
and all results are used. Any plugin may wrap any hook. Platforms differ mainly in three hooks: *kernel launch*
(`polydraft_kernels`), *graph capture* (`polydraft_graph_capture`) and *forward-metadata init* (`polydraft_init_forward_meta`).
`docs/plugins.md` has a section for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from polydraft.backend import BackendInfo, Collectives, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft.device import Device, GraphCapture
    from polydraft.instruments.base import Instrument
    from polydraft.models.family import Family
    from polydraft.program.declare import LogitsStage
    from polydraft.program.plan import StepOutcome, StepPlan
    from polydraft.proposers.base import Factory
    from polydraft.ranks import Group

PROJECT = "polydraft"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class StepObserver(Protocol):
    """Receives the host-side records of each step after the step has been applied."""

    def step_finished(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Called once per step. Both records are frozen and safe to keep. The host waits until this returns."""


@hookspec(firstresult=True)
def polydraft_backend_info(spec: str) -> BackendInfo:  # type: ignore[empty-body]
    """Describe the backend: name, version, device pattern, capabilities, contract versions, availability with a reason.

    `spec` is the requested device ("": the backend's default). A backend whose capabilities and evidence do not depend on it may
    omit the argument.

    Called once when the plugin is loaded, by an engine or by `doctor`, before any device is opened. It must be cheap: import no
    framework and open no device. If a library or device is missing, return `available=False` with one sentence that names the
    next step. `name` is the name of the entry point, `contract_versions` is what `polydraft_kernels` offers.
    """


@hookspec(firstresult=True)
def polydraft_open_device(spec: str, options: DeviceOptions) -> Device:  # type: ignore[empty-body]
    """Open the device named by `spec` ("": the backend's default) and return it.

    Called once per engine, after negotiation and before weights are read. Raise a `DeviceError` that names what is missing and
    what to do.
    """


@hookspec
def polydraft_kernels(device: Device) -> KernelTable:  # type: ignore[empty-body]
    """Return providers by contract (or composite) name, and the factories for weights and caches.

    Called once per engine, for the backend and for each kernel pack enabled by name. A kernel pack may return a table with only
    the providers that it replaces, and an empty one where it has none for the device. If several packs replace the same one, the
    user's order (`--kernels`) decides, not the order of calls. A provider is bound once to its buffers and then launched with a
    stream and a launch length; it returns nothing, allocates nothing and does not synchronise. It does not know what else was
    bound. Launches are merged by composites, or by the table's `program_pass` if it has one
    (`polydraft.plugins.program_pass.ProgramPass`).
    """


@hookspec(firstresult=True)
def polydraft_graph_capture(device: Device) -> GraphCapture:  # type: ignore[empty-body]
    """Return an object that captures and replays graphs. Required if the capability `graph_capture` is declared; called at most
    once.

    Capture records a run of launches, and replay enqueues it again on the same addresses. Core decides buckets, order, warm-up,
    padding and refusals.
    """


@hookspec(firstresult=True)
def polydraft_init_forward_meta(device: Device, buffers: PassBuffers, limits: Limits) -> ForwardMeta:  # type: ignore[empty-body]
    """Allocate attention metadata for one kind of pass; its `fill(stream, step)` is enqueued before each such pass.

    Called once per kind of pass: the target's, the first draft pass (over the target's rows), the later draft passes. Attention
    kernels get the result as their `meta` argument; it is opaque to core.
    """


@hookspec(firstresult=True)
def polydraft_collectives(device: Device, group: Group) -> Collectives:  # type: ignore[empty-body]
    """Return the collectives of one rank: a provider and a version for each contract of `COLLECTIVES`. Required if the capability
    `ranks` is declared.

    Called once for each rank of an engine that has several, behind `polydraft_kernels`. A provider is bound and launched like
    that of a kernel. All ranks bind the same collectives in the same order, and launch the same ones in each step. Where a rank
    does not come, or comes for something else, all of them raise a `DeviceError` that names it, as `group.exchange` does.
    """


@hookspec(firstresult=True)
def polydraft_visible_devices() -> Sequence[str]:  # type: ignore[empty-body]
    """Return the devices that can be opened on this machine now, as `--device` takes them.

    Optional, for backends that cannot tell without loading a framework; `devices` of the identity is then those that they have
    in any case. `doctor` calls it, an engine does not. It may take seconds, and should ask the framework in a separate process.
    Raise `DeviceError` if it cannot be determined.
    """


@hookspec(firstresult=True)
def polydraft_off_device(spec: str) -> Mapping[str, Sequence[str]]:  # type: ignore[empty-body]
    """Return the framework operations that run on the CPU instead of the device `spec`: their names, by the contract that uses
    them.

    Optional, for backends on a framework that may fall back to the CPU for operations without a device kernel. The conformance
    kit calls it for a profile, and `doctor --probe` does; an engine does not. It may take seconds, and should run every operation
    in a separate process with the fallback allowed. Return {} if nothing falls back. Raise `DeviceError` if it cannot be
    determined.
    """


@hookspec
def polydraft_proposers() -> Iterable[tuple[str, Factory]]:  # type: ignore[empty-body]
    """Return proposers as pairs of a name and a factory; `factory(context)` returns a `Proposer`.

    Called once per engine, before negotiation. The factory runs only if its proposer is chosen. A name that is already taken is a
    `ConfigError` that names both plugins.
    """


@hookspec
def polydraft_models() -> Iterable[Family]:  # type: ignore[empty-body]
    """Return model families, one `polydraft.models.family.Family` for each architecture.

    Called once per engine, before the checkpoint is opened. An architecture that is already taken is a `PluginError` that names
    both plugins.
    """


@hookspec
def polydraft_parameters() -> Iterable[LogitsStage]:  # type: ignore[empty-body]
    """Return stages of logits processing (`polydraft.program.declare.LogitsStage`), with their request parameters.

    Requests set such a parameter in `SamplingParams.extra`, with `--param NAME=VALUE`, or as a field of an HTTP body. A stage
    declares the slot columns that it reads and the contracts that it launches, after core's own stages. A kernel pack of the
    same plugin may provide these contracts. Called once per engine, when everything else is decided.
    """


@hookspec
def polydraft_instruments() -> Iterable[Instrument]:  # type: ignore[empty-body]
    """Return instruments (`polydraft.instruments.base.Instrument`), which observe binding, launches and the points of
    each step.

    Called once per engine, as soon as its plugins are loaded and before the device is opened. Return new objects for each engine.
    They are sorted together with the instruments that the engine was given, by `Instrument.order`.
    """


@hookspec
def polydraft_step_observers() -> Iterable[StepObserver]:  # type: ignore[empty-body]
    """Return observers of finished steps (metrics, tracing).

    Called once per engine, after everything else is built. Without an observer nothing is called per step.
    """


HOOKS: tuple[str, ...] = tuple(name for name, value in list(globals().items()) if hasattr(value, f"{PROJECT}_spec"))
"""Every hook, in the order of this file."""
FIRST_RESULT: frozenset[str] = frozenset(name for name in HOOKS if getattr(globals()[name], f"{PROJECT}_spec")["firstresult"])
"""The hooks that only the backend implements."""
