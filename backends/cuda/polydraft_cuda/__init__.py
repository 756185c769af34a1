"""The CUDA backend: kernels of its own for NVIDIA GPUs from compute capability 8.0 on, tuned for 9.0, without a tensor framework.

It reaches the device through NVIDIA's own Python packages: the driver's bindings, and NVRTC, which compiles each kernel on first
use for the device at hand. Weights, caches and kernels know nothing of another library, and buffers come and go by DLPack.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from polydraft import hookimpl
from polydraft._version import __version__
from polydraft.backend import BackendInfo, Capabilities
from polydraft.contracts.packing import PACKINGS

if TYPE_CHECKING:
    from polydraft.backend import Collectives, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft.device import GraphCapture
    from polydraft.ranks import Group
    from polydraft_cuda.device import CudaDevice

PACKED = tuple(name for name, one in PACKINGS.items() if not (one.activations and one.number == "int4"))
CAPABILITIES = Capabilities(
    dtypes=("bf16", "f16", "f32"),
    asynchronous=True,
    graph_capture=True,
    row_invariant=True,
    kv_dtypes=("int8", "fp8"),
    sliding_window=True,
    sleep=True,
    weight_packings=PACKED,
    expert_packings=PACKED,
    ranks="processes",
    rank_dtypes=("bf16", "f16", "f32"),
    rank_devices=True,
    ordered_sums=True,
)
EVIDENCE = MappingProxyType({"sm_90": "silicon"})
"""Architectures that the kernels ran on; those of `compiler.ARCHITECTURES` beside them are compiled only."""


@hookimpl
def polydraft_backend_info() -> BackendInfo:
    """Identity; opens nothing and imports no library of CUDA."""
    from polydraft_cuda.kernels import versions
    from polydraft_cuda.probe import look

    found = look()
    return BackendInfo(
        name="cuda",
        version=__version__,
        package="polydraft",
        device_pattern="cuda:<index>, or one index for each rank, cuda:<index>,<index>[?collectives=peers|nccl]",
        summary="NVIDIA GPUs: own kernels, streams and graphs, no tensor framework",
        available=not found.reason,
        reason=found.reason,
        devices=found.devices,
        capabilities=CAPABILITIES,
        contract_versions=MappingProxyType(versions()),
        evidence="silicon",
        evidence_on="NVIDIA H200, 2026-11-21",
    )


@hookimpl
def polydraft_open_device(spec: str, options: DeviceOptions) -> CudaDevice:
    """Open `cuda:<index>` ("" and `cuda`: the first); of several ranks each the one that many behind it, or the one at its place
    of `cuda:<index>,<index>`. They meet as `?collectives=` says, or as their GPUs allow. Raises `DeviceError` saying what is
    missing."""
    from polydraft.errors import DeviceError
    from polydraft_cuda.device import CudaDevice, reaches
    from polydraft_cuda.nccl import UNORDERED, choose
    from polydraft_cuda.probe import look
    from polydraft_cuda.ranks import WAYS

    place, _, option = (spec or "cuda:0").partition("?")
    kind, _, listed = place.partition(":")
    indices = (listed or "0").split(",")
    if kind != "cuda" or not all(index.isdecimal() for index in indices):
        raise DeviceError(
            f"the cuda backend runs on 'cuda:<index>', got {spec!r}; leave --device out or choose another --backend"
        )
    if len(indices) > 1 and options.rank >= len(indices):
        raise DeviceError(f"--device {spec} has {len(indices)} devices, and this is rank {options.rank}; name one for each rank")
    if option not in ("", *(f"collectives={way}" for way in WAYS)):
        raise DeviceError(f"device {spec!r} has the option {option!r}, wanted collectives={' or '.join(WAYS)}; correct it")
    first, num_ranks = int(indices[0]), max(options.num_ranks, options.rank + 1)
    devices = [int(index) for index in indices] if len(indices) > 1 else [*range(first, first + num_ranks)]
    found = look()
    if found.reason:
        raise DeviceError(f"cuda is not available: {found.reason}")
    meets = choose(option.partition("=")[2], devices, reaches) if options.num_ranks > 1 else None
    index = devices[options.rank]
    device = CudaDevice(index, dtype=options.dtype, row_invariant=options.row_invariant, can_sleep=options.sleep, meets=meets)
    if meets is not None and meets[0] == "nccl":
        device.withdrawn = {"ordered_sums": UNORDERED}
    return device


@hookimpl
def polydraft_kernels(device: CudaDevice) -> KernelTable:
    """Every contract, compiled for the device when it is first bound."""
    from polydraft_cuda.table import CudaTable

    return CudaTable(device)


@hookimpl
def polydraft_collectives(device: CudaDevice, group: Group) -> Collectives:
    """Over memory of each other's GPUs, or NCCL."""
    from polydraft_cuda.ranks import collectives

    return collectives(device, group)


@hookimpl
def polydraft_graph_capture(device: CudaDevice) -> GraphCapture:
    """Capture by the driver."""
    from polydraft_cuda.graph import CudaCapture

    return CudaCapture(device)


@hookimpl
def polydraft_init_forward_meta(device: CudaDevice, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
    """Tiles of rows that attend together, found on the device."""
    from polydraft_cuda.forward_meta import CudaForwardMeta

    return CudaForwardMeta(device, buffers, limits)
