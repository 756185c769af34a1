"""Adapts contract records to Paddle kernels: resolves buffers to tensors once, then launches.

`table.py` wraps every kernel with it. It does not decide when work runs: Paddle queues operations on the current stream of the
device.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from polydraft.contracts.base import Args, Limits, Workspace
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import DeviceCounters, Launch, Stream
from polydraft.errors import DeviceError
from polydraft_paddle.companions import watched
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


def contract_of(args: Args | CompositeArgs) -> str:
    """The contract, or composite, whose record `args` is; for people."""
    from polydraft.contracts import COLLECTIVES, REGISTRY

    kinds = [type(part) for part in args.parts] if isinstance(args, CompositeArgs) else [type(args)]
    return "+".join(contract.name for kind in kinds for contract in (*REGISTRY, *COLLECTIVES) if contract.args is kind)


def _tensor_of(value: Any) -> Any:
    return tuple(map(_tensor_of, value)) if isinstance(value, tuple) else getattr(value, "tensor", value)


MISSING = re.compile(r"The kernel (?:with key \(.*, (?P<dtype>\w+)\) of kernel )?`(?P<operation>\w+)` is not registered")
"""What Paddle says of an operation that has no kernel on a place."""
WITH_A_CPU_KERNEL = re.compile(r"support following Backends: (?:\w+, )*CPU\b|wrong DataType .* FLAGS_enable_api_kernel_fallback")
"""What it adds where there is one for the CPU that it was told not to take; it does not look for one where the place has the
operation in other dtypes."""
NEVER_FALLS_BACK = frozenset({"contiguous", "strided_copy"})
"""Operations that every other one rests on: Paddle calls the place's own kernel of them, whatever it is told of falling back."""


def missing_kernel(error: BaseException | None) -> str:
    """The operation that Paddle had no kernel of on the place, when that is what it complains of; else ""."""
    missing = MISSING.search(" ".join(str(error).split()))
    return missing["operation"] if missing else ""


@contextmanager
def refused(spec: str, wanted_by: str = "") -> Iterator[None]:
    """Turn what Paddle raises within the block, which is outside the step, into a `device_error`."""
    try:
        yield
    except FAILURES as error:
        raise device_error(spec, error, wanted_by) from error


def device_error(spec: str, error: BaseException, wanted_by: str = "") -> DeviceError:
    """What Paddle raised in the course of its work, in one sentence: an operation without a kernel on this place is named, with
    its dtype and the contract (or what else) it is `wanted_by`."""
    text = " ".join(str(error).split())
    if missing := MISSING.search(text):
        dtype = f" in {missing['dtype']}" if missing["dtype"] else ""
        lacking = f"Paddle has no kernel of {missing['operation']!r}{dtype} for device {spec}"
        lacking += f", which {wanted_by} needs" if wanted_by else ""
        if missing["operation"] in NEVER_FALLS_BACK or not WITH_A_CPU_KERNEL.search(text):
            return DeviceError(f"{lacking}, and never runs it on the CPU instead; register one in the device's plugin")
        return DeviceError(
            f"{lacking}, and falling back to the CPU is off; register one in the device's plugin, or allow it with "
            "--allow-cpu-fallback"
        )
    if isinstance(error, MemoryError):
        return DeviceError(
            f"device {spec} ran out of memory in the course of its work ({first_line(error)}); lower --num-blocks, "
            "--max-num-seqs or --max-batched-tokens, or use --graph off"
        )
    where = f" in {wanted_by}" if wanted_by else ""
    return DeviceError(
        f"device {spec} answered with an error{where} ({first_line(error)}); check the device, its free memory and its driver, "
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
        counters, spec, contract = self.counters, self.spec, contract_of(args)
        use(spec)
        with refused(spec, contract):
            run = self.kernel(tensors_of(args), limits)

        def launch(stream: Stream, n: int) -> None:
            del stream  # the place has one compute stream
            counters.launches += 1
            use(spec)
            try:
                run(n)
            except FAILURES as error:
                raise device_error(spec, error, contract) from error

        return watched(spec, contract, launch)

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """Temporaries come from Paddle's own pool (declared as `pool_temporaries`)."""
        del args, limits
        return 0
