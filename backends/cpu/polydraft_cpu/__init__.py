"""The CPU backend: C++ kernels behind every contract, the default where the package's build found a compiler.

Weights stay in bfloat16 where that changes no number, sums are in float32 and in one order, so that texts are bit-equal for
every number of drafts, batch and chunk; launches wait in a queue, and decode steps are replayed in one call.
`docs/backends/cpu.md` tells how it came about.
"""

from __future__ import annotations

import platform
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
    from polydraft_cpu.device import CpuDevice

CAPABILITIES = Capabilities(
    dtypes=("f32", "bf16"),
    asynchronous=True,
    graph_capture=True,
    row_invariant=True,
    weight_packings=tuple(PACKINGS),
    expert_packings=tuple(PACKINGS),
    sliding_window=True,
    ranks="processes" if platform.machine() in ("x86_64", "AMD64") else "",  # where a store is seen behind those before it
    ordered_sums=platform.machine() in ("x86_64", "AMD64"),
)


@hookimpl
def polydraft_backend_info(spec: str) -> BackendInfo:
    """Identity; not available where the compiled kernels are missing. Without a queue, work is done when a call returns."""
    from dataclasses import replace

    from polydraft_cpu.kernels import versions
    from polydraft_cpu.library import levels, missing
    from polydraft_cpu.options import PATTERN, says_no_queue, usable_processors

    reason = missing()
    how = "" if reason else f" ({levels()[-1]}, {usable_processors()} threads)"
    return BackendInfo(
        name="cpu",
        version=__version__,
        package="polydraft",
        device_pattern=PATTERN,
        summary=f"compiled C++ kernels on the CPU{how}",
        available=not reason,
        reason=reason,
        devices=("cpu",),
        capabilities=replace(CAPABILITIES, asynchronous=False) if says_no_queue(spec) else CAPABILITIES,
        contract_versions=MappingProxyType(versions()),
        evidence="silicon",
        evidence_on="AMD EPYC CPU, 2026-11-21",
    )


@hookimpl
def polydraft_open_device(spec: str, options: DeviceOptions) -> CpuDevice:
    """Open the CPU with the options of the device string."""
    from polydraft_cpu.device import CpuDevice
    from polydraft_cpu.options import parse

    return CpuDevice(parse(spec), dtype=options.dtype, row_invariant=options.row_invariant)


@hookimpl
def polydraft_kernels(device: CpuDevice) -> KernelTable:
    """Every contract, compiled for this processor."""
    from polydraft_cpu.kernels import CpuTable

    return CpuTable(device)


@hookimpl
def polydraft_graph_capture(device: CpuDevice) -> GraphCapture:
    """Whole steps as one call."""
    from polydraft_cpu.graph import CpuCapture

    return CpuCapture(device)


@hookimpl
def polydraft_init_forward_meta(device: CpuDevice, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
    """None is needed."""
    del device, buffers, limits
    from polydraft_cpu.forward_meta import CpuForwardMeta

    return CpuForwardMeta()


@hookimpl
def polydraft_collectives(device: CpuDevice, group: Group) -> Collectives:
    """Sums and copies through shared memory, in NumPy on the thread that carries out launches."""
    from polydraft.reference.table import collectives

    return collectives(device, group)
