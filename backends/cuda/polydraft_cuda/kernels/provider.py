"""Adapts a kernel's Python function, which packs arguments, to the `Provider` that core binds.

Each module of this folder lists its kernels with it, and the table wraps them for one device. It launches nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polydraft.contracts.base import Limits, Workspace
from polydraft.device import Launch

if TYPE_CHECKING:
    from polydraft_cuda.device import CudaDevice

Bind = Callable[["CudaDevice", Any, Limits, Any], Launch]
"""`bind(device, args, limits, workspace) -> launch`; `workspace` has a `buffer` where the kernel wants one."""
Bytes = Callable[["CudaDevice", Any, Limits], int]
FOLDER = Path(__file__).parent


def source(name: str) -> Path:
    """A `.cu` file of this folder."""
    return FOLDER / name


def no_workspace(device: CudaDevice, args: Any, limits: Limits) -> int:
    """Most kernels want none."""
    del device, args, limits
    return 0


@dataclass(frozen=True)
class Kernel:
    """One contract's (or composite's) kernel, for any device."""

    bind: Bind
    workspace_bytes: Bytes = no_workspace


@dataclass(frozen=True)
class CudaProvider:
    """A kernel on one device: what `KernelTable.providers` holds."""

    kernel: Kernel
    device: CudaDevice

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Compile, load and pack; nothing runs yet. The launch keeps alive what it was bound to: a kernel may know a buffer by
        its address alone."""
        launch = self.kernel.bind(self.device, args, limits, workspace)
        launch.__dict__["bound"] = args, workspace
        return launch

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """Bytes of scratch that this kernel wants for these arguments."""
        return self.kernel.workspace_bytes(self.device, args, limits)
