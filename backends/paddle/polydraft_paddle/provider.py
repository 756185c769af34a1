"""Adapts contract records to Paddle kernels: resolves buffers to tensors once, then launches.

`table.py` wraps every kernel with it. It does not decide when work runs: Paddle queues operations on the current stream of the
device.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from polydraft.contracts.base import Args, Limits, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import DeviceCounters, Launch, Stream
from polydraft.errors import DeviceError
from polydraft_paddle.installation import first_line
from polydraft_paddle.place import use

FAILURES = (OSError, RuntimeError, MemoryError)
"""What Paddle raises where a place, its driver or its memory fails."""
Run = Callable[[int], None]
"""A kernel bound to its tensors: does the work for a launch length."""
Kernel = Callable[[Any, Limits], Run]
"""Binds a namespace of tensors (named like the contract's fields; parameters, metadata and None as they are)."""


def plain(function: Callable[[Any, int], None]) -> Kernel:
    """Turn `function(a, n)` into a `Kernel`; a launch of nothing returns at once."""

    def bind(a: Any, limits: Limits) -> Run:
        del limits

        def run(n: int) -> None:
            if n:
                function(a, n)

        return run

    bind.__doc__ = function.__doc__
    return bind


def tensors_of(args: Args | CompositeArgs) -> SimpleNamespace:
    """Replace buffers and weights in `args` by their tensors; a composite becomes a namespace with `parts`."""
    if isinstance(args, CompositeArgs):
        return SimpleNamespace(parts=tuple(tensors_of(part) for part in args.parts))
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}  # type: ignore[arg-type]
    return SimpleNamespace(**{name: _tensor_of(value) for name, value in values.items()})


def _tensor_of(value: Any) -> Any:
    return tuple(map(_tensor_of, value)) if isinstance(value, tuple) else getattr(value, "tensor", value)


def missing_kernel(error: BaseException | None) -> str:
    """The operation that Paddle had no kernel of on the place, when that is what it complains of; else ""."""
    missing = re.search(r"The kernel (?:with key .* of kernel )?`(\w+)` is not registered", " ".join(str(error).split()))
    return missing[1] if missing else ""


def device_error(spec: str, error: BaseException) -> DeviceError:
    """What Paddle raised in the course of its work, in one sentence: an operation without a kernel on this place is named."""
    operation = missing_kernel(error)
    if operation:
        return DeviceError(
            f"Paddle has no kernel of {operation!r} for device {spec}, and falling back to the CPU is off; register one in the "
            "device's plugin, or allow it with --allow-cpu-fallback"
        )
    if isinstance(error, MemoryError):
        return DeviceError(
            f"device {spec} ran out of memory in the course of its work ({first_line(error)}); lower --num-blocks, "
            "--max-num-seqs or --max-batched-tokens, or use --graph off"
        )
    return DeviceError(
        f"device {spec} answered with an error ({first_line(error)}); check the device, its free memory and its driver, "
        "then start again"
    )


@dataclass(frozen=True)
class PaddleProvider:
    """A `Provider` over a Paddle kernel; launches are counted in `counters`."""

    kernel: Kernel
    counters: DeviceCounters
    spec: str
    """The device as the user names it."""

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Resolve the tensors once and return the launch."""
        del workspace
        run, counters, spec = self.kernel(tensors_of(args), limits), self.counters, self.spec

        def launch(stream: Stream, n: int) -> None:
            del stream  # the place has one compute stream
            counters.launches += 1
            use(spec)
            try:
                run(n)
            except FAILURES as error:
                raise device_error(spec, error) from error

        return launch

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """Temporaries come from Paddle's own pool (declared as `pool_temporaries`)."""
        del args, limits
        return 0
