"""Screens the outputs of a head with an 8-bit copy of its weights, so that a greedy choice reads less memory.

A greedy choice needs only the highest logit. Scores from the 8-bit weights show which outputs can be the highest, since the error
of each score is bounded, and only those few are computed from the original weights. The chosen token is the one that all products
would give, and a round reads half as much of a head. The 8-bit copy is made when a choice is bound after a head, and again with
every update of its weight.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS, act, sequence
from polydraft_cuda.device import CudaBuffer, CudaDevice
from polydraft_cuda.kernels.projections import TILE_ROWS, TILE_WARPS, Size, tensor_map
from polydraft_cuda.kernels.provider import source
from polydraft_cuda.storage import CudaWeight

BYTES: Final = 200 << 10
"""Bytes of `linear_screen` in flight at most."""
MOST_STAGES: Final = 16
"""Chunks of it in flight, where rows are few."""
BLOCKS: Final = 2
"""Blocks of `screen_choose` on a multiprocessor."""
MOST_ROWS = 128
"""Rows of a look at most: more are a matter of arithmetic, of which bytes save none."""
PAD: Final = 2 * TILE_ROWS
"""Outputs are filled up to a multiple of this, with bytes of zero."""


def screen_of(device: CudaDevice, a: Any) -> Screen | None:
    """The bytes of a projection's weight, made where it has none yet; None where it can have none: its inputs have to fill whole
    chunks, and it has to be told of updates."""
    weight = a.weight
    if not isinstance(weight, CudaWeight) or a.bias is not None or weight.shape[1] % 128:
        return None
    if weight.screen is None:
        weight.screen = Screen(device, weight.shape)
        weight.screen.pack(weight)
    return weight.screen


class Screen:
    """A weight of [outputs, inputs] in a byte each, with a scale and a slack for each output (`kernels/screen.cuh`)."""

    def __init__(self, device: CudaDevice, shape: tuple[int, ...]) -> None:
        outputs, inputs = shape
        self._device = device
        self.padded = -(-outputs // PAD) * PAD
        self.bytes: CudaBuffer = device.empty("weight.screen", (self.padded, inputs), "u8")
        self.scales: CudaBuffer = device.empty("weight.screen_scales", (outputs,), "f32")
        self.slacks: CudaBuffer = device.empty("weight.screen_slacks", (outputs,), "f32")
        self.pairs: CudaBuffer = device.empty("screen.pairs", (self.padded // 2, MOST_ROWS), "bf16")
        """Scores of every look, one behind the other."""

    def pack(self, weight: Any) -> None:
        """Make the bytes of a weight that has been written; waits."""
        outputs, inputs = weight.shape
        self._device.fill_bytes(self.bytes, 0)
        function = self._device.function(source("screen.cu"), "screen_weights", **act(weight.dtype))
        function.bind(outputs, 256, weight, self.bytes, self.scales, self.slacks, int(inputs))(self._device.stream, 1)
        self._device.synchronize()


class Looked(NamedTuple):
    """What a first look leaves of up to `size.rows` rows: the best score and its output by warp and row, and the projection that
    they are of. The higher scores of pairs of outputs lie with its weight."""

    best: Any
    projection: Any
    size: Size


def look(device: CudaDevice, a: Any, size: Size) -> tuple[Launch, Looked]:
    """Bind `linear_screen` for up to `size.rows` rows of a projection whose weight has bytes."""
    (outputs, inputs), (tokens, cluster, _) = a.weight.shape, size
    stage = TILE_ROWS * 64 + tokens * 128
    stages = min(BYTES // stage, MOST_STAGES)
    function = device.function(
        source("linear_screen.cu"), "linear_screen", arch_features="a", TOKENS=tokens, STAGES=stages, CLUSTER=cluster,
        **act(a.x.dtype),
    )  # fmt: skip
    shared, threads = stages * stage + 1024, 2 * 128 + 32
    at_once = function.most_clusters(threads, shared, cluster) if cluster > 1 else int(device.num_sms)
    blocks = cluster * min(at_once, -(-outputs // (TILE_ROWS * cluster)))
    screen, best = a.weight.screen, device.empty("screen.best", (blocks * TILE_WARPS, tokens, 2), "f32")
    launch = function.bind(
        blocks, threads, tensor_map(device, a.x, tokens // cluster), screen.bytes, screen.scales, screen.pairs, best,
        outputs, inputs, shared=shared, cluster=cluster if cluster > 1 else None, dependent=True,
    )  # fmt: skip
    return launch, Looked(best, a, size)


def choose(device: CudaDevice, a: Any, looked: Looked) -> Launch:
    """Bind the choice of an argmax behind that look: the product of the best score, then of all outputs that may reach it."""
    p, tokens = looked.projection, looked.size.rows
    outputs, inputs = p.weight.shape
    defines = {"TOKENS": tokens, **act(p.x.dtype)}
    best, bounds = device.empty("screen.chosen", (tokens, 2), "i32"), device.empty("screen.bounds", (tokens, 2), "f32")
    settle = device.function(source("screen.cu"), "screen_settle", **defines).bind(
        lambda n: (n, 1, 1), 256, looked.best, p.x, p.weight, a.row_slot, best, bounds, looked.best.shape[0], tokens, inputs,
        dependent=True,
    )  # fmt: skip
    blocks = min(BLOCKS * int(device.num_sms), -(-outputs * tokens // (2 * 256 * 8)))  # each warp has eight scores a lane
    tickets = device.zeros("screen.tickets", (1,), "i32")
    reach = device.function(source("screen.cu"), "screen_choose", **defines).bind(
        blocks, 256, p.weight.screen.pairs, p.weight.screen.slacks, p.x, p.weight, a.row_slot, a.tokens, best, bounds, tickets,
        ROWS, outputs, inputs, dependent=True,
    )  # fmt: skip
    return sequence(settle, reach)
