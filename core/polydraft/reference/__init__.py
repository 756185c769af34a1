"""The reference backend: an ordinary plugin that computes every contract in float32 NumPy on the CPU.

It is always installed and the embedded default; vendors are compared with it and the emulator computes in it. It never
shares code with the goldens, against which it is tested like any other backend. It has two devices: on `cpu`, the default,
everything has happened when a call returns; on `queued` work waits in streams until somebody waits, and graphs are captured.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING

from polydraft._version import __version__
from polydraft.backend import BackendInfo, Capabilities
from polydraft.contracts.packing import PACKINGS
from polydraft.hooks import hookimpl

if TYPE_CHECKING:
    from polydraft.backend import Collectives, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft.device import GraphCapture
    from polydraft.ranks import Group
    from polydraft.reference.device import ReferenceDevice
    from polydraft.reference.queued import QueuedDevice

DEVICES = ("cpu", "queued")
CAPABILITIES = Capabilities(
    dtypes=("f32",),
    row_invariant=True,
    pool_temporaries=True,
    kv_dtypes=("int8", "fp8"),
    weight_packings=tuple(PACKINGS),
    expert_packings=tuple(PACKINGS),
    sliding_window=True,
    ranks="threads",
    ordered_sums=True,
    sleep=True,
)
QUEUED = dataclasses.replace(CAPABILITIES, asynchronous=True, graph_capture=True)
"""What it can do on `queued`: the same kernels, with order and graphs that a plain call cannot show."""


@hookimpl
def polydraft_backend_info(spec: str) -> BackendInfo:
    """Identity; always available, since NumPy is a dependency of core. Queues are a model of a device, so what is seen on
    `queued` counts as an emulator's."""
    from polydraft.contracts import COMPOSITES, REGISTRY
    from polydraft.reference.table import kernel_names

    queued = spec == "queued"
    return BackendInfo(
        name="reference",
        version=__version__,
        package="polydraft",
        device_pattern="cpu, or queued",
        summary="float32 NumPy on the CPU: the readable backend that the others are measured against",
        devices=DEVICES,
        capabilities=QUEUED if queued else CAPABILITIES,
        evidence="emulator" if queued else "silicon",
        evidence_on="" if queued else "AMD EPYC CPU, 2026-11-21",
        contract_versions=MappingProxyType(
            {name: 1 if name in COMPOSITES else REGISTRY[name].version for name in kernel_names()}
        ),
    )


@hookimpl
def polydraft_open_device(spec: str, options: DeviceOptions) -> ReferenceDevice:
    """Open the CPU, at once or through queues."""
    from polydraft.errors import DeviceError
    from polydraft.reference.device import ReferenceDevice
    from polydraft.reference.queued import QueuedDevice

    if spec not in ("", *DEVICES):
        raise DeviceError(
            f"the reference backend runs on 'cpu' or 'queued', got {spec!r}; leave --device out or choose another --backend"
        )
    if spec == "queued":
        return QueuedDevice(dtype=options.dtype, row_invariant=options.row_invariant, can_sleep=options.sleep)
    return ReferenceDevice("cpu", dtype=options.dtype, row_invariant=options.row_invariant, can_sleep=options.sleep)


@hookimpl
def polydraft_kernels(device: ReferenceDevice) -> KernelTable:
    """Every contract, bound to the device's way of running NumPy."""
    from polydraft.reference.table import NumpyTable

    return NumpyTable(device)


@hookimpl
def polydraft_graph_capture(device: QueuedDevice) -> GraphCapture:
    """Capture and replay, on `queued`."""
    from polydraft.reference.queued import QueuedCapture

    return QueuedCapture(device)  # type: ignore[return-value]


@hookimpl
def polydraft_init_forward_meta(device: ReferenceDevice, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
    """Gather indices shared by all layers of a pass."""
    from polydraft.reference.forward_meta import NumpyForwardMeta

    return NumpyForwardMeta(device, buffers, limits)


@hookimpl
def polydraft_collectives(device: ReferenceDevice, group: Group) -> Collectives:
    """Sums and copies through memory that all ranks have."""
    from polydraft.reference.table import collectives

    return collectives(device, group)
