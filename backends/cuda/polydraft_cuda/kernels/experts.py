"""Mixture of experts: the router's product, the choice, and the experts' own products over lists that the device makes.

Nothing is sorted and nothing is counted on the host: lists of each expert's rows are made on the device, and persistent blocks
take tiles of whichever experts have rows. 16-bit weights of even sizes go through `experts_tile.cu` on sm_90, and elsewhere, or
where rows have to be invariant, through `experts_stream.cu`; anything else goes through the plain kernels.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

from polydraft.contracts.base import Limits
from polydraft.device import DTYPES, Launch, Stream
from polydraft.errors import ContractError
from polydraft_cuda.compiler import ROWS, act, sequence
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.projections import TILE_ROWS, tensor_map
from polydraft_cuda.kernels.provider import Kernel, source

ROUTER_ROWS, ROUTER_OUTPUTS, ROUTER_THREADS = 8, 4, 128
ROUTER_FEW = 32
"""Rows of a launch up to which a block of the router has one output."""
ROUTE_WARPS = 4
LIST_THREADS = 256
SUM_THREADS = 256
PLAIN_WARPS = 4
MOST_EXPERTS: Final = 512
"""As many have room in a block's list of items."""


class Size(NamedTuple):
    """A size of `experts_stream.cu`: rows of one expert that a block multiplies at once, rows of a tile by 16, warps of a block,
    chunks that each has in flight."""

    tokens: int
    tiles: int
    warps: int
    depth: int


SIZES: Final = (Size(8, 2, 8, 2), Size(16, 4, 4, 2), Size(32, 4, 4, 2))
INVARIANT: Final = (Size(8, 2, 8, 2), Size(16, 2, 8, 2), Size(32, 2, 8, 2))
"""Where a row's sums must not depend on the number of rows: the same warps."""
MIN_BLOCKS: Final = 2
"""Blocks of a multiprocessor."""
CHUNK_BYTES: Final = 16 * 64 * 2
TILE_TOKENS: Final = (8, 16, 32, 64, 128, 256)
"""Sizes of `experts_tile.cu`: rows of one expert that a block multiplies at once."""
TILE_BYTES: Final = 200 << 10
"""Bytes of such a block in flight."""
SCORING: Final = ("softmax", "sigmoid")
RENORMALIZE: Final = ("none", "sum", "clamp")


def router(device: CudaDevice, a: Any) -> Launch:
    """A projection whose weights stay float32 beside 16-bit activations: a block has eight rows, and one output while these are
    few, else several that share what is read of x. Sums are the same."""
    outputs, inputs = a.weight.shape

    def of(each: int) -> Launch:
        function = device.function(source("experts.cu"), "router", OUTPUTS=each, **act(a.x.dtype))
        grid = lambda n: (outputs // each, -(-n // ROUTER_ROWS), 1)  # noqa: E731
        return function.bind(grid, ROUTER_THREADS, a.x, a.weight, a.out, ROWS, outputs, inputs, dependent=True)

    few, many = of(1), of(ROUTER_OUTPUTS if outputs % ROUTER_OUTPUTS == 0 else 1)

    def launch(stream: Stream, n: int) -> None:
        (few if n <= ROUTER_FEW else many)(stream, n)

    return launch


def route_experts(device: CudaDevice, a: Any, limits: Limits, workspace: Any, *, uniform: bool = False) -> Launch:
    """A warp a row. `uniform`: experts are drawn by the bits of a row's logits, for benchmarks with random weights."""
    del limits, workspace
    experts, chosen = int(a.logits.shape[1]), int(a.expert_ids.shape[1])
    function = device.function(source("experts.cu"), "route_experts", UNIFORM=int(uniform), **act("f32"))
    return function.bind(
        lambda n: -(-n // ROUTE_WARPS), ROUTE_WARPS * 32, a.logits, a.bias, a.row_slot, a.expert_ids, a.expert_weights, ROWS,
        experts, chosen, SCORING.index(a.scoring), int(a.num_groups), int(a.top_groups), RENORMALIZE.index(a.renormalize),
        float(a.floor), float(a.scale), shared=ROUTE_WARPS * (2 * experts + int(a.num_groups)) * 4, dependent=True,
    )  # fmt: skip


class _Part(NamedTuple):
    """A part of the workspace."""

    shape: tuple[int, ...]
    dtype: str
    pointer: int = 0

    @property
    def nbytes(self) -> int:
        """A multiple of 256."""
        return -(-math.prod(self.shape) * DTYPES[self.dtype].itemsize // 256) * 256


def _parts(a: Any, pointer: int = 0) -> tuple[_Part, ...]:
    """The parts of the workspace, one behind the other: begins, list, h, terms, and rows of x in the order of the list."""
    (experts, _, hidden), half, places = a.gate_up.shape, a.down.shape[2], a.expert_ids.shape[0] * a.expert_ids.shape[1]
    found = []
    for shape, dtype in (
        ((experts + 1,), "i32"), ((places,), "i32"), ((places, half), a.x.dtype), ((places, hidden), "f32"),
        ((places, hidden), a.x.dtype),
    ):  # fmt: skip
        found.append(_Part(shape, dtype, pointer))
        pointer += found[-1].nbytes
    return tuple(found)


def workspace_bytes(device: CudaDevice, a: Any, limits: Limits) -> int:
    """Lists, what is between the two products, the terms of every choice, and its row."""
    del device, limits
    return sum(part.nbytes for part in _parts(a))


def is_streamed(a: Any) -> bool:
    """Whether `experts_stream.cu` takes these experts."""
    _, both, hidden = a.gate_up.shape
    return bool(a.x.dtype != "f32" and hidden % 64 == 0 and (both // 2) % 64 == 0)


def expert_mlp(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """Lists, gate and up, down, sum. Raises `ContractError` for more experts than a block can list."""
    del limits
    (experts, both, hidden), chosen = a.gate_up.shape, int(a.expert_ids.shape[1])
    if experts > MOST_EXPERTS:
        raise ContractError(f"expert_mlp of the cuda backend takes {MOST_EXPERTS} experts at most, got {experts}")
    begins, entries, h, terms, rows = _parts(a, workspace.buffer.pointer)

    def lists(gathered: _Part | None) -> Launch:
        function = device.function(source("experts.cu"), "list_experts", **act("f32"))
        of_rows = (a.x, gathered) if gathered else (None, None)
        return function.bind(
            experts, LIST_THREADS, a.expert_ids, begins, entries, *of_rows, ROWS, chosen, hidden // 8, dependent=True
        )

    last = device.function(source("experts.cu"), "sum_experts", **act(a.x.dtype)).bind(
        lambda n: (-(-hidden // SUM_THREADS), n, 1), SUM_THREADS, terms, a.expert_ids, a.expert_weights, a.shared, a.shared_gate,
        a.out, chosen, hidden, dependent=True,
    )  # fmt: skip
    if not is_streamed(a):
        return sequence(
            lists(None),
            _plain(device, a, a.x, a.gate_up, h, both // 2, gated=1),
            _plain(device, a, h, a.down, terms, hidden),
            last,
        )
    steps = []
    if device.arch == "sm_90" and not device.row_invariant:
        for tokens in TILE_TOKENS:
            up = _tile(device, a, tokens, rows, a.gate_up, (begins, entries), h, both // 2, gated=1)
            down = _tile(device, a, tokens, h, a.down, (begins, entries), terms, hidden)
            steps.append((_fitting(tokens, experts, chosen), sequence(lists(rows), up, down, last)))
    else:
        for size in INVARIANT if device.row_invariant else SIZES:
            up = _stream(device, a, size, a.x, a.gate_up, (begins, entries), h, both // 2, gated=1)
            down = _stream(device, a, size, h, a.down, (begins, entries), terms, hidden)
            steps.append((_fitting(size.tokens, experts, chosen), sequence(lists(None), up, down, last)))

    def launch(stream: Stream, n: int) -> None:
        if n > 0:
            next((one for most, one in steps if n <= most), steps[-1][1])(stream, n)

    return launch


def _fitting(tokens: int, experts: int, chosen: int) -> int:
    """Rows for which so many of one expert at once are enough: twice the rows of an even share are seldom exceeded, and what is
    exceeded is read from the second cache."""
    return max(tokens, tokens * experts // (2 * chosen))


def _plain(device: CudaDevice, a: Any, x: Any, weight: Any, out: Any, outputs: int, *, gated: int = 0) -> Launch:
    chosen = int(a.expert_ids.shape[1])
    function = device.function(source("experts.cu"), "expert_plain", GATED=gated, **act(a.x.dtype))
    return function.bind(
        lambda n: (-(-outputs // PLAIN_WARPS), n * chosen, 1), PLAIN_WARPS * 32, x, weight, a.expert_ids, out, chosen, outputs,
        int(weight.shape[2]), dependent=True,
    )  # fmt: skip


def _stream(
    device: CudaDevice, a: Any, size: Size, x: Any, weight: Any, lists: Any, out: Any, outputs: int, *, gated: int = 0
) -> Launch:
    experts, _, inputs = weight.shape
    chosen, step = int(a.expert_ids.shape[1]), 8 * size.tiles * (1 if gated else 2)
    tiles = -(-outputs // step)
    defines = {"TOKENS": size.tokens, "TILES": size.tiles, "WARPS": size.warps, "DEPTH": size.depth, "MIN_BLOCKS": MIN_BLOCKS}
    function = device.function(source("experts_stream.cu"), "expert_stream", GATED=gated, **defines, **act(a.x.dtype))
    most = int(device.num_sms) * MIN_BLOCKS
    return function.bind(
        lambda n: min(most, min(experts, n * chosen) * tiles), size.warps * 32, x, weight, *lists, out, chosen, experts, outputs,
        inputs, shared=size.warps * size.depth * size.tiles * CHUNK_BYTES, dependent=True,
    )  # fmt: skip


def _tile(
    device: CudaDevice, a: Any, tokens: int, x: Any, weight: Any, lists: Any, out: Any, outputs: int, *, gated: int = 0
) -> Launch:
    experts, _, inputs = weight.shape
    chosen, tiles = int(a.expert_ids.shape[1]), -(-outputs // (TILE_ROWS // 2 if gated else TILE_ROWS))
    stage = (TILE_ROWS + tokens) * 128
    stages = TILE_BYTES // stage
    function = device.function(
        source("experts_tile.cu"), "expert_tile", arch_features="a", TOKENS=tokens, STAGES=stages, GATED=gated, **act(a.x.dtype)
    )
    most = int(device.num_sms)
    return function.bind(
        lambda n: min(most, min(experts, n * chosen) * tiles), 2 * 128 + 32,
        tensor_map(device, weight, TILE_ROWS, paired=8 * gated), tensor_map(device, x, tokens), *lists, out, experts, outputs,
        inputs, shared=stages * stage + 1024, dependent=True,
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "route_experts": Kernel(route_experts),
    "expert_mlp": Kernel(expert_mlp, workspace_bytes),
}
