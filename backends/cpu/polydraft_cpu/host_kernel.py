"""Launches kernels in Python on the CPU: the library calls them in their place of the queue and of a captured graph.

`CpuDevice.bind_kernel` returns the provider, for kernel packs whose kernels are in NumPy. A kernel runs on the thread that
carries out the commands, when it gets Python's lock; what it raises is raised by whoever waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polydraft.contracts.base import Args, Limits, Workspace
from polydraft.contracts.composite import CompositeArgs, name_of
from polydraft.device import Launch
from polydraft.errors import DeviceError
from polydraft.reference.provider import Kernel, arrays_of
from polydraft_cpu.library import HOST_FUNCTION

if TYPE_CHECKING:
    from polydraft_cpu.device import CpuBuffer, CpuDevice


@dataclass(frozen=True)
class HostProvider:
    """A `Provider` over a kernel in Python."""

    kernel: Kernel
    device: CpuDevice

    def bind(self, args: Args | CompositeArgs, limits: Limits, workspace: Workspace | None) -> Launch:
        """Resolve the arrays once and return the launch. Raises `DeviceError` for a buffer in bfloat16, which NumPy would take
        for integers."""
        del workspace
        device, name = self.device, name_of(args)
        for buffer in buffers_of(args):
            if buffer.dtype == "bf16":
                raise DeviceError(
                    f"the kernel of {name} is in NumPy, which has no bfloat16, got the buffer {buffer.name} in it; "
                    "give --dtype f32"
                )
        run = self.kernel(arrays_of(args), limits)

        def carry_out(n: int) -> int:
            try:
                run(n)
            except BaseException as error:  # noqa: BLE001  ctypes would print and drop it
                device.failures.append((name, error))  # which also keeps the device from becoming garbage meanwhile
                return 1
            return 0

        function = HOST_FUNCTION(carry_out)
        op = device.library.pd_bind_host(device.context, name.encode(), function)
        return device.launch_of(op, name, (args, function))

    def workspace_bytes(self, args: Args | CompositeArgs, limits: Limits) -> int:
        """As of every NumPy kernel: none."""
        del args, limits
        return 0


def buffers_of(args: Args | CompositeArgs) -> Iterator[CpuBuffer]:
    """The buffers of a record, columns among them."""
    for part in args.parts if isinstance(args, CompositeArgs) else (args,):
        for value in vars(part).values():
            yield from (one for one in (value if isinstance(value, tuple) else (value,)) if hasattr(one, "host_array"))
