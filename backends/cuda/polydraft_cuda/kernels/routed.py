"""A feed-forward half with experts as few launches, in an order that leaves memory no pause: for captured steps.

The shared experts' first projection, whose weights are on their way while rows are normed, comes first, and beside it runs the
router, whose product and choice are one launch and read little. Lists are made directly behind that, the shared experts' second
projection comes next, and while it ends the experts' weights are fetched. The sum of all is added to the stream and normed where
it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from polydraft.contracts.base import Limits
from polydraft.contracts.composite import CompositeArgs
from polydraft.device import Launch, Stream
from polydraft_cuda.compiler import sequence
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import experts, linear, routing
from polydraft_cuda.kernels.mlp import swiglu

ROUTED: Final = ("linear", "route_experts")
SHARED: Final = ("linear", "swiglu", "linear")
ADDED: Final = ("expert_mlp", "residual_add")
"""The contracts, in order; there may be no shared experts, and a norm behind the last one."""


def is_routed(device: CudaDevice, project: Any, a: Any) -> bool:
    """Whether a router's projection and the experts behind it are faster so."""
    ours = device.arch == "sm_90" and not device.row_invariant and experts.is_row_wise(a)
    return ours and routing.is_router(project) and int(a.x.shape[0]) <= routing.MOST_ROWS


class _Records(NamedTuple):
    """The argument records."""

    project: Any
    choice: Any
    shared: Sequence[Any]
    experts: Any
    add: Any
    norm: Any


def _records(args: Any) -> _Records:
    project, choice, *rest = args.parts
    shared = rest[: len(SHARED)] if len(rest) > 3 else []
    mlp, add, *norm = rest[len(shared) :]
    return _Records(project, choice, shared, mlp, add, norm[0] if norm else None)


def workspace_bytes(device: CudaDevice, args: Any, limits: Limits) -> int:
    """What the experts want: projections, which end before there are terms, have the place of these, or where they want more than
    that, one of their own behind all. What has been listed outlasts them."""
    found = _records(args)
    whole = experts.workspace_bytes(device, found.experts, limits)
    wanted = _scratch_bytes(device, found.shared, limits)
    return whole if wanted <= experts.idle_at_first(found.experts)[1] else whole + wanted


def _scratch_bytes(device: CudaDevice, shared: Sequence[Any], limits: Limits) -> int:
    return max((linear.workspace_bytes(device, one, limits) for one in shared[::2]), default=0)


def routed_experts(device: CudaDevice, args: Any, limits: Limits, workspace: Any) -> Launch:
    """From the router's projection to the stream, or its norm."""
    project, choice, shared, a, add, norm = _records(args)
    early, last = bool(shared), experts.sum_and_add(device, a, add, norm, workspace)
    route, sizes = routing.router(device, project, choice, early=early), experts.sizes(device, a, workspace, early=early)
    lines = project.weight.nbytes % 128 == project.weight.pointer % 16 == 0
    fetched = project.weight if lines else None
    begun, rest = _shared(device, shared, a, limits, workspace, fetched) if shared else (sequence(), sequence())

    def launch(stream: Stream, n: int) -> None:
        if n > 0:
            one = experts.fitting(sizes, n)
            begun(stream, n)
            route(stream, n)
            if one.lists is not None:
                one.lists(stream, n)
            rest(stream, n)
            one.products(stream, n)
            last(stream, n)

    return launch


def _shared(
    device: CudaDevice, shared: Sequence[Any], a: Any, limits: Limits, workspace: Any, fetched: Any
) -> tuple[Launch, Launch]:  # fmt: skip
    """The shared experts' first launch, which like every projection lets the next one come once it has seen what was before it,
    and the others. With few rows the first brings `fetched`, the router's weights, into the second cache: the router has few
    blocks, each of which waits long for as many bytes beside a launch that reads as fast as it can."""
    up, activation, down = shared
    place, room = experts.idle_at_first(a, workspace.buffer.pointer)
    if _scratch_bytes(device, shared, limits) > room:
        place = workspace.buffer.pointer + experts.workspace_bytes(device, a, limits)
    scratch = SimpleNamespace(buffer=SimpleNamespace(pointer=place))
    second = linear.linear(device, down, limits, scratch)
    if linear.is_gated(device, up):
        return linear.gated(device, CompositeArgs((up, activation)), limits, scratch, fetched=fetched), second
    return linear.linear(device, up, limits, scratch), sequence(swiglu(device, activation, limits, None), second)
