"""The CPU backend for tests: skipped with its own reason where it cannot be used, opened with any options.

It has the mark for modules that need the compiled kernels, and opens a device with its table. It builds nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polydraft_cpu
from polydraft.backend import DeviceOptions
from polydraft.contracts.base import Limits
from polydraft.plugins.kernel_table import DeviceWorkspace
from polydraft_cpu import library
from polydraft_cpu.device import CpuDevice
from polydraft_cpu.kernels import CpuTable

REASON = library.missing()
needs_kernels = pytest.mark.skipif(bool(REASON), reason=f"the cpu backend is not available: {REASON}")
LEVELS = [] if REASON else library.levels()
"""Instruction levels of this machine."""
LIMITS = Limits(8, 3, 64, 32, 256, 16, 128, 16, 1, 512)


def opened(spec: str = "cpu", dtype: str = "f32") -> tuple[CpuDevice, CpuTable]:
    """A device and its kernel table."""
    device = polydraft_cpu.polydraft_open_device(spec, DeviceOptions(dtype))
    return device, CpuTable(device)


def bound(device: CpuDevice, table: CpuTable, name: str, args: Any) -> Any:
    """`run(n)` of a kernel that is bound to `args`."""
    provider = table.providers[name]
    nbytes = provider.workspace_bytes(args, LIMITS)
    workspace = DeviceWorkspace(device.empty("workspace", (nbytes,), "u8"), nbytes) if nbytes else None
    launch = provider.bind(args, LIMITS, workspace)
    return lambda n: launch(device.stream, n)


def loaded(device: CpuDevice, name: str, value: Any) -> Any:
    """A buffer with these contents; float arrays take the device's dtype."""
    from polydraft.contracts.compare import to_host

    value = np.asarray(value)
    dtype = device.dtype if value.dtype.kind == "f" else "i32"
    buffer = device.empty(name, value.shape, dtype)
    device.load(buffer, to_host(value, dtype))
    return buffer
