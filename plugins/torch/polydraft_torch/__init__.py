"""PyTorch on the CPU as a backend of polydraft, asynchronous: who it is, and which device and kernels it brings.

The hooks are asked once for each engine. Nothing here imports PyTorch before a device is opened.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from polydraft import BackendInfo, Capabilities, hookimpl
from polydraft.backend import PassBuffers
from polydraft.contracts.base import Limits
from polydraft.errors import DeviceError
from polydraft.plugins.bring_up import contract_versions
from polydraft.reference.forward_meta import NumpyForwardMeta

if TYPE_CHECKING:
    from polydraft_torch.device import TorchDevice
    from polydraft_torch.kernels import TorchTable


@hookimpl
def polydraft_backend_info() -> BackendInfo:
    """Identity; not available where PyTorch is not installed."""
    there = find_spec("torch") is not None
    return BackendInfo(
        name="torch",
        version="0.1.0",
        package="polydraft-torch",
        device_pattern="cpu",
        summary="float32 PyTorch on the CPU, behind a queue and a thread",
        available=there,
        reason="" if there else "PyTorch is not installed; install the package torch",
        devices=("cpu",),
        capabilities=Capabilities(asynchronous=True, pool_temporaries=True, sliding_window=True),
        contract_versions=contract_versions(),
        evidence="silicon",
        evidence_on="AMD EPYC CPU, 2026-11-21",
    )


@hookimpl
def polydraft_open_device(spec: str) -> TorchDevice:
    """Open the CPU."""
    from polydraft_torch.device import TorchDevice

    if spec not in ("", "cpu"):
        raise DeviceError(f"device is {spec!r}, wanted 'cpu'; leave --device out")
    return TorchDevice()


@hookimpl
def polydraft_kernels(device: TorchDevice) -> TorchTable:
    """Own kernels for what costs time, the reference's for what counts."""
    from polydraft_torch.kernels import TorchTable

    return TorchTable(device)


@hookimpl
def polydraft_init_forward_meta(device: TorchDevice, buffers: PassBuffers, limits: Limits) -> NumpyForwardMeta:
    """Own attention needs none; core wants one, and the reference's takes any device with `enqueue` and `counters`."""
    return NumpyForwardMeta(device, buffers, limits)
