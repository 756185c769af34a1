"""Adapts contract records to plain NumPy kernels.

The reference backend lists its kernels through it, and devices that compute in NumPy (the reference, eager or queued, the
emulator) bind through it. When a launch runs is up to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from polydraft.contracts.base import Args, Limits, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import DeviceCounters, Launch, Stream

Run = Callable[[int], None]
"""A kernel bound to its arrays: does the work for a launch length."""
Kernel = Callable[[Any, Limits], Run]
"""Binds a namespace of arrays (named like the contract's fields; weights, caches, metadata and parameters as they are)."""
Enqueue = Callable[[Stream, Callable[[], None]], None]
"""How a device makes work happen: the reference calls it at once, a queued device later."""


def plain(function: Callable[[Any, int], None]) -> Kernel:
    """Turn a kernel that needs no preparation, `function(a, n)`, into a `Kernel`."""

    def bind(a: Any, limits: Limits) -> Run:
        del limits
        return lambda n: function(a, n)

    bind.__doc__ = function.__doc__
    return bind


def arrays_of(args: Args | CompositeArgs) -> SimpleNamespace:
    """Replace each buffer in `args`, and each of a tuple of columns, by its array; leave weights, caches, metadata,
    parameters and None as they are. A composite becomes a namespace with `parts`."""
    if isinstance(args, CompositeArgs):
        return SimpleNamespace(parts=tuple(arrays_of(part) for part in args.parts))
    return SimpleNamespace(**{name: _array_of(getattr(args, name)) for name in args.specs()})


def _array_of(value: Any) -> Any:
    return tuple(map(_array_of, value)) if isinstance(value, tuple) else getattr(value, "host_array", value)


@dataclass(frozen=True)
class NumpyProvider:
    """A `Provider` over a NumPy kernel; `enqueue` decides when it runs, its launches are counted in `counters`."""

    kernel: Kernel
    enqueue: Enqueue
    counters: DeviceCounters = field(default_factory=DeviceCounters)

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Resolve the arrays once and return the launch."""
        del workspace
        run, enqueue, counters = self.kernel(arrays_of(args), limits), self.enqueue, self.counters

        def launch(stream: Stream, n: int) -> None:
            counters.launches += 1
            enqueue(stream, lambda: run(n))

        return launch

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """NumPy kernels bring their own temporaries (declared as `pool_temporaries`)."""
        del args, limits
        return 0


@dataclass(frozen=True)
class EagerProvider(NumpyProvider):
    """The synchronous shortcut: a launch is a plain call."""

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """As `NumpyProvider.bind`, without a queue in between."""
        del workspace
        run, counters = self.kernel(arrays_of(args), limits), self.counters

        def launch(stream: Stream, n: int) -> None:
            del stream
            counters.launches += 1
            run(n)

        return launch
