"""The kernel of `top_n_sigma` in NumPy, and its launch on devices whose memory NumPy can see.

`polydraft_kernels` returns the table. It never copies: other memory is refused when the engine is built.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits, Provider, Workspace
from polydraft.device import Array, Launch, Stream
from polydraft.errors import DeviceError
from polydraft.reference.device import ReferenceDevice
from polydraft.reference.provider import arrays_of, plain
from polydraft_cpu.device import CpuDevice
from polydraft_top_n_sigma.contract import CONTRACT


def top_n_sigma(a: Any, n: int) -> None:
    """The kernel: row by row, so that the bits of a row depend on that row alone."""
    for row in np.flatnonzero(a.row_slot[:n] >= 0):
        sigmas, logits = a.top_n_sigma[a.row_slot[row]], a.logits[row]
        finite: Array = logits[np.isfinite(logits)]
        if sigmas > 0 and finite.size:
            logits[logits < finite.max() - sigmas * finite.std(dtype=np.float64)] = -np.inf


class CpuProvider:
    """The kernel on the CPU backend, whose queue takes compiled kernels alone: a launch waits for what was issued before it, and
    runs. Such steps are neither overlapped nor captured."""

    def __init__(self, device: CpuDevice) -> None:
        self._device = device

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Take the arrays out of the record, once."""
        del limits, workspace
        device, arrays = self._device, arrays_of(args)

        def launch(stream: Stream, n: int) -> None:
            del stream
            if device.kept is not None:
                raise DeviceError("top_n_sigma on the backend cpu is not part of a graph; give --graph off")
            device.counters.launches += 1
            device.settle()
            top_n_sigma(arrays, n)

        return launch

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """NumPy brings its own temporaries."""
        del args, limits
        return 0


def table(device: Any) -> SimpleNamespace:
    """The kernel by its contract. Raises `DeviceError` for a device whose memory NumPy cannot see."""
    provider: Provider
    if isinstance(device, CpuDevice):
        provider = CpuProvider(device)
    elif isinstance(device, ReferenceDevice):
        provider = device.bind_kernel(plain(top_n_sigma))
    else:
        raise DeviceError(
            f"top_n_sigma has kernels for the backends reference and cpu, got the device {device.spec}; choose one of those, or "
            "leave the package out of --plugin and --kernels"
        )
    return SimpleNamespace(providers={CONTRACT.name: provider}, versions={CONTRACT.name: CONTRACT.version})
