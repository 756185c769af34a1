"""The router of experts: its product with float32 weights, the choice of each row's experts, and both as one launch.

Logits are the same however they are launched, whatever the number of rows.
"""

from __future__ import annotations

from typing import Any, Final

from polydraft.contracts.base import Limits
from polydraft.device import Launch, Stream
from polydraft_cuda.compiler import ROWS, act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.projections import flags
from polydraft_cuda.kernels.provider import Kernel, source

ROUTER_ROWS, ROUTER_OUTPUTS, ROUTER_WARPS = 16, 8, 16
"""Of a block of the router; a warp takes as many inputs at once as there are warps."""
MOST_CLUSTER: Final = 8
"""Blocks of a cluster on every device that has clusters."""
MOST_CLUSTERED: Final = 120
"""Blocks in clusters that an H200 runs at once: 15 clusters of eight fit. More blocks are faster without clusters."""
ROUTER_SHARED: Final = (ROUTER_WARPS + MOST_CLUSTER) * ROUTER_ROWS * ROUTER_OUTPUTS * 4 + 16
"""Bytes of the arrays that it declares itself at most."""
MOST_KEPT: Final = 16
"""Times 16 inputs whose weights a warp has before it looks at rows."""
MOST_ROWS: Final = ROUTER_ROWS * 1024
"""Of a launch that chooses: `flags` has 1024 words."""
ROUTE_WARPS = 4
FREE_SHARED: Final = 48 << 10
"""Bytes of shared memory that a block has without asking for more, its kernel's own arrays included."""
SCORING: Final = ("softmax", "sigmoid")
RENORMALIZE: Final = ("none", "sum", "clamp")


def is_router(a: Any) -> bool:
    """Whether the weights of a projection are more exact than the activations."""
    return bool(a.weight.dtype == "f32" and a.x.dtype != "f32")


def router(device: CudaDevice, a: Any, choice: Any = None, *, early: bool = False) -> Launch:
    """A projection whose weights stay float32 beside 16-bit activations; with `choice`, what `route_experts` makes of its logits
    as well. `early`: x was made two launches back, and the launch in front, which has waited for that, is run beside."""
    outputs, inputs = a.weight.shape
    chooses: tuple[Any, ...] = (None,) * 5 + (0,) * 5 + (0.0,) * 2
    if choice is not None:
        chooses = (
            choice.bias,
            choice.row_slot,
            choice.expert_ids,
            choice.expert_weights,
            flags(device, "router"),
            *_parameters(choice),
        )

    blocks, turn = -(-outputs // ROUTER_OUTPUTS), 16 * ROUTER_WARPS
    times = -(-inputs // turn)
    cluster = blocks if choice is not None and 1 < blocks <= MOST_CLUSTER else 0
    rows = int(a.x.shape[0])
    clustered = MOST_CLUSTERED // blocks * ROUTER_ROWS if cluster else rows
    vector = inputs % 4 == 0 and a.x.pointer % 8 == 0 and a.weight.pointer % 16 == 0

    def of(few: int, cluster: int) -> Launch:
        function = device.function(
            source("route.cu"), "router", KEPT=min(times, MOST_KEPT), FEW=few, EARLY=int(early), VECTOR=int(vector),
            WHOLE=int(vector and inputs % turn == 0 and times <= MOST_KEPT), CHOOSES=int(choice is not None),
            EACH=-(-outputs // 32), CLUSTER=cluster, UNIFORM=int(choice is not None and device.uniform_routing),
            **act(a.x.dtype),
        )  # fmt: skip
        return function.bind(
            lambda n: (blocks, -(-n // ROUTER_ROWS), 1), ROUTER_WARPS * 32, a.x, a.weight, a.out, ROWS,
            outputs, inputs, *chooses, shared=chooser_bytes(choice) if choice is not None else 0, cluster=cluster or None,
            dependent=True,
        )  # fmt: skip

    few, many = of(1, cluster), of(0, cluster)
    apart = of(0, 0) if rows > clustered else many

    def launch(stream: Stream, n: int) -> None:
        (few if n <= ROUTER_ROWS // 2 else many if n <= clustered else apart)(stream, n)

    return launch


def route_experts(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """A warp a row."""
    del limits, workspace
    function = device.function(
        source("route.cu"), "route_experts", EACH=-(-int(a.logits.shape[1]) // 32), UNIFORM=int(device.uniform_routing),
        **act("f32"),
    )  # fmt: skip
    return function.bind(
        lambda n: -(-n // ROUTE_WARPS), ROUTE_WARPS * 32, a.logits, a.bias, a.row_slot, a.expert_ids, a.expert_weights, ROWS,
        int(a.logits.shape[1]), *_parameters(a), shared=ROUTE_WARPS * _words(a) * 4, dependent=True,
    )  # fmt: skip


def _parameters(a: Any) -> tuple[Any, ...]:
    """How a row's experts are chosen, as kernels take it."""
    return (
        int(a.expert_ids.shape[1]), SCORING.index(a.scoring), int(a.num_groups), int(a.top_groups),
        RENORMALIZE.index(a.renormalize), float(a.floor), float(a.scale),
    )  # fmt: skip


def chooser_bytes(choice: Any) -> int:
    """Shared memory that `router` asks for when it chooses. Of the 48 KiB that a block has without asking for more, its sums take
    some; where that leaves too little, just more than 48 KiB is asked for."""
    wanted = ROUTER_WARPS * _words(choice) * 4
    return max(wanted, FREE_SHARED + 16) if wanted > FREE_SHARED - ROUTER_SHARED else wanted


def _words(a: Any) -> int:
    """Words of shared memory that the choice of a row wants."""
    return 2 * int(a.logits.shape[1]) + int(a.num_groups) + int(a.expert_ids.shape[1])


KERNELS: dict[str, Kernel] = {"route_experts": Kernel(route_experts)}
