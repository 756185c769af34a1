"""Owns the adapter between contract records and Paddle kernels: resolves buffers to tensors once, then launches.

`table.py` wraps every kernel with it. It never decides when work runs: Paddle queues operations on the device's current stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from polydraft.contracts.base import Args, Limits, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import DeviceCounters, Launch, Stream

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
    return SimpleNamespace(**{name: getattr(value, "tensor", value) for name, value in values.items()})


@dataclass(frozen=True)
class PaddleProvider:
    """A `Provider` over a Paddle kernel; launches are counted in `counters`."""

    kernel: Kernel
    counters: DeviceCounters

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Resolve the tensors once and return the launch."""
        del workspace
        run, counters = self.kernel(tensors_of(args), limits), self.counters

        def launch(stream: Stream, n: int) -> None:
            del stream  # the device has one compute stream, and made it current when it was opened
            counters.launches += 1
            run(n)

        return launch

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """Temporaries come from Paddle's own pool (declared as `pool_temporaries`)."""
        del args, limits
        return 0
