"""OpenCL as a backend of polydraft: who it is, and which device and kernels it brings.

The hooks are asked once for each engine. Nothing here imports pyopencl before a device is opened.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from polydraft import BackendInfo, Capabilities, hookimpl
from polydraft.backend import StepMeta
from polydraft.contracts import REGISTRY
from polydraft.device import Stream
from polydraft.errors import DeviceError

if TYPE_CHECKING:
    from polydraft_opencl.device import OpenCLDevice
    from polydraft_opencl.kernels import OpenCLTable

CONTRACTS = tuple(contract.name for contract in REGISTRY.of(("dense", "sampling")))
"""What it implements, each as a kernel of that name in a file `*.cl`."""


@hookimpl
def polydraft_backend_info() -> BackendInfo:
    """Identity; not available where pyopencl is not installed."""
    there = find_spec("pyopencl") is not None
    return BackendInfo(
        name="opencl",
        version="0.1.0",
        package="polydraft-opencl",
        device_pattern="opencl:<index>",
        summary="float32 kernels in OpenCL C, in buffers that the host cannot see",
        available=there,
        reason="" if there else "pyopencl is not installed; install it, and an implementation of OpenCL such as PoCL",
        devices=("opencl:0",),
        capabilities=Capabilities(asynchronous=True, row_invariant=True, sliding_window=True, synthetic_acceptance=False),
        contract_versions={name: REGISTRY[name].version for name in CONTRACTS},
        evidence="silicon",
        evidence_on="AMD EPYC CPU under PoCL 3.1, 2026-11-23",
    )


@hookimpl
def polydraft_open_device(spec: str) -> OpenCLDevice:
    """Open the device of that index, counted over all platforms; the first by default."""
    from polydraft_opencl.device import OpenCLDevice

    name, _, index = (spec or "opencl:0").partition(":")
    if name != "opencl" or not (index or "0").isdecimal():
        raise DeviceError(f"device is {spec!r}, wanted opencl:<index>, such as opencl:0; leave --device out for the first one")
    return OpenCLDevice(int(index or "0"))


@hookimpl
def polydraft_kernels(device: OpenCLDevice) -> OpenCLTable:
    """All kernels are its own."""
    from polydraft_opencl.kernels import OpenCLTable

    return OpenCLTable(device)


class NoMeta:
    """Forward metadata of kernels that read what describes the rows themselves."""

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Nothing to prepare."""


@hookimpl
def polydraft_init_forward_meta() -> NoMeta:
    """Attention reads slots, positions and the block table itself."""
    return NoMeta()
