"""Launches kernels in Python on the CPU: the library calls them in their place of the queue and of a captured graph.

`CpuDevice.bind_kernel` returns the provider, for kernel packs whose kernels are in NumPy. A kernel runs on the thread that
carries out the commands, when it gets Python's lock; what it raises is raised by whoever waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Args, Limits, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import Launch
from polydraft.reference.provider import Kernel, arrays_of
from polydraft_cpu.library import HOST_FUNCTION

if TYPE_CHECKING:
    from polydraft_cpu.device import CpuDevice


@dataclass(frozen=True)
class HostProvider:
    """A `Provider` over a kernel in Python."""

    kernel: Kernel
    device: CpuDevice

    def bind(self, args: Args | CompositeArgs, limits: Limits, workspace: Workspace | None) -> Launch:
        """Resolve the arrays once and return the launch."""
        del workspace
        device, name, failures = self.device, name_of(args), self.device.failures
        run = self.kernel(arrays_of(args), limits)

        def carry_out(n: int) -> int:
            try:
                run(n)
            except BaseException as error:  # noqa: BLE001  ctypes would print and drop it
                failures.append((name, error))
                return 1
            return 0

        function = HOST_FUNCTION(carry_out)
        op = device.library.pd_bind_host(device.context, name.encode(), function)
        return device.launch_of(op, name, (args, function))

    def workspace_bytes(self, args: Args | CompositeArgs, limits: Limits) -> int:
        """As of every NumPy kernel: none."""
        del args, limits
        return 0


def name_of(args: Args | CompositeArgs) -> str:
    """The contract or composite that a record is one of."""
    records = {contract.args: contract.name for contract in REGISTRY}
    parts = args.parts if isinstance(args, CompositeArgs) else (args,)
    return "+".join(records.get(type(part), type(part).__name__) for part in parts)
