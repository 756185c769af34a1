"""The reference backend: an ordinary plugin that computes every contract in float32 NumPy on the CPU.

It is always installed and the embedded default; vendors are compared with it and the emulator computes in it. It never
shares code with the goldens, against which it is tested like any other backend.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from polydraft._version import __version__
from polydraft.backend import BackendInfo, Capabilities
from polydraft.hooks import hookimpl

if TYPE_CHECKING:
    from polydraft.backend import DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft.reference.device import ReferenceDevice

CAPABILITIES = Capabilities(dtypes=("f32",), row_invariant=True, pool_temporaries=True)


@hookimpl
def polydraft_backend_info() -> BackendInfo:
    """Identity; always available, since NumPy is a dependency of core."""
    from polydraft.contracts import COMPOSITES, REGISTRY
    from polydraft.reference.table import kernel_names

    return BackendInfo(
        name="reference",
        version=__version__,
        package="polydraft",
        device_pattern="cpu",
        summary="float32 NumPy on the CPU: the readable backend that the others are measured against",
        devices=("cpu",),
        capabilities=CAPABILITIES,
        evidence="silicon",
        evidence_on="AMD EPYC CPU, 2026-11-21",
        contract_versions=MappingProxyType(
            {name: 1 if name in COMPOSITES else REGISTRY[name].version for name in kernel_names()}
        ),
    )


@hookimpl
def polydraft_open_device(spec: str, options: DeviceOptions) -> ReferenceDevice:
    """Open the CPU."""
    from polydraft.errors import DeviceError
    from polydraft.reference.device import ReferenceDevice

    if spec not in ("", "cpu"):
        raise DeviceError(f"the reference backend runs on 'cpu', got {spec!r}; leave --device out or choose another --backend")
    return ReferenceDevice("cpu", dtype=options.dtype, row_invariant=options.row_invariant)


@hookimpl
def polydraft_kernels(device: ReferenceDevice) -> KernelTable:
    """Every contract, bound to the device's way of running NumPy."""
    from polydraft.reference.table import NumpyTable

    return NumpyTable(device)


@hookimpl
def polydraft_init_forward_meta(device: ReferenceDevice, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
    """Gather indices shared by all layers of a pass."""
    from polydraft.reference.forward_meta import NumpyForwardMeta

    return NumpyForwardMeta(device, buffers, limits)
