"""Screens the outputs of a head with an 8-bit copy of its weights, so that a greedy choice reads less memory.

A greedy choice needs only the highest logit. Scores from the 8-bit weights show which outputs can be the highest, since the error
of each score is bounded, and only those few are computed from the original weights. The chosen token is the one that all products
would give, and a round reads half as much of a head. The 8-bit copy is made when a choice is bound after a head, and again with
every update of its weight. Where too many outputs can be the highest, the device itself reads the head whole, and for a while
does not look again.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from polydraft.device import Launch
from polydraft_cuda.compiler import ROWS, act, sequence
from polydraft_cuda.device import CudaBuffer, CudaDevice
from polydraft_cuda.kernels.projections import TILE_ROWS, TILE_WARPS, Size, tensor_map
from polydraft_cuda.kernels.provider import source
from polydraft_cuda.kernels.sampling import of_ranks
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
        weight.screen = Screen(device, weight)
        weight.screen.pack(weight)
    return weight.screen


class Screen:
    """A weight of [outputs, inputs] in a byte each (`kernels/screen.cuh`), and what looks at it share: they run one behind the
    other."""

    def __init__(self, device: CudaDevice, weight: Any) -> None:
        outputs, inputs = weight.shape
        self._device = device
        self.padded = -(-outputs // PAD) * PAD
        self.bytes: CudaBuffer = device.empty("weight.screen", (self.padded, inputs), "u8")
        self.columns: CudaBuffer = device.empty("weight.screen_columns", (inputs,), "f32")
        """What each input's weights are divided by before they are turned."""
        self.scales: CudaBuffer = device.empty("weight.screen_scales", (outputs,), "f32")
        self.slacks: CudaBuffer = device.empty("weight.screen_slacks", (outputs, 2), "f32")
        """The lengths of what bytes leave of an output's weights, and of these."""
        self.state: CudaBuffer = device.zeros("screen.state", (4,), "i32")
        """Whether looks are worth their time (`kernels/screen_state.cuh`)."""
        self.turned: CudaBuffer = device.empty("screen.turned", (MOST_ROWS, inputs), "f16")
        self.pairs: CudaBuffer = device.empty("screen.pairs", (self.padded // 2, MOST_ROWS), "bf16")
        """Scores."""

    def pack(self, weight: Any) -> None:
        """Make the bytes of a weight that has been written; waits."""
        device, (outputs, inputs), defines = self._device, weight.shape, act(weight.dtype)
        device.fill_bytes(self.bytes, 0)
        device.fill_bytes(self.state, 0)
        find = device.function(source("screen.cu"), "screen_columns", **defines)
        find.bind(inputs // 64, 256, weight, self.columns, int(outputs), int(inputs))(device.stream, 1)
        make = device.function(source("screen.cu"), "screen_weights", **defines)
        arguments = weight, self.columns, self.bytes, self.scales, self.slacks, int(inputs)
        make.bind(outputs, 256, *arguments, shared=_values(inputs))(device.stream, 1)
        device.synchronize()


def _values(inputs: int) -> int:
    """Bytes of shared memory in which so many numbers are turned: a word in 33 is left out."""
    return 4 * (inputs + inputs // 32)


class Looked(NamedTuple):
    """What a first look leaves of up to `size.rows` rows: the best score and its output by warp and row, the bounds of rows, and
    the projection that they are of. The higher scores of pairs of outputs lie with its weight."""

    best: Any
    bounds: Any
    projection: Any
    size: Size


def look(device: CudaDevice, a: Any, row_slot: Any, size: Size) -> tuple[Launch, Looked]:
    """Bind the turn of up to `size.rows` rows of a projection whose weight has bytes, and `linear_screen` behind it."""
    (outputs, inputs), (tokens, cluster, _), screen = a.weight.shape, size, a.weight.screen
    bounds = device.empty("screen.bounds", (tokens, 4), "f32")
    turn = device.function(source("screen.cu"), "screen_turn", **act(a.x.dtype)).bind(
        lambda n: (n, 1, 1), 512, a.x, screen.columns, row_slot, screen.turned, bounds, screen.state, inputs,
        shared=_values(inputs),
        dependent=True,
    )  # fmt: skip
    stage = TILE_ROWS * 64 + tokens * 128
    stages = min(BYTES // stage, MOST_STAGES)
    function = device.function(
        source("linear_screen.cu"), "linear_screen", arch_features="a", TOKENS=tokens, STAGES=stages, CLUSTER=cluster,
        **act(screen.turned.dtype),
    )  # fmt: skip
    shared, threads = stages * stage + 1024, 2 * 128 + 32
    at_once = function.most_clusters(threads, shared, cluster) if cluster > 1 else int(device.num_sms)
    blocks = cluster * min(at_once, -(-outputs // (TILE_ROWS * cluster)))
    best = device.empty("screen.best", (blocks * TILE_WARPS, tokens, 2), "f32")
    score = function.bind(
        blocks, threads, tensor_map(device, screen.turned, tokens // cluster), screen.bytes, screen.scales, screen.pairs, best,
        screen.state, outputs, inputs, shared=shared, cluster=cluster if cluster > 1 else None, dependent=True,
    )  # fmt: skip
    return sequence(turn, score), Looked(best, bounds, a, size)


def choose(device: CudaDevice, a: Any, looked: Looked) -> Launch:
    """Bind the choice of an argmax behind that look: the product of the best score, then of all outputs that may reach it. Where
    these are too many, it leaves in the weight's state that the head is to be read whole."""
    p, tokens = looked.projection, looked.size.rows
    (outputs, inputs), screen = p.weight.shape, p.weight.screen
    defines, best = {"TOKENS": tokens, **act(p.x.dtype)}, device.empty("screen.chosen", (tokens, 2), "i32")
    settle = device.function(source("screen.cu"), "screen_settle", **defines).bind(
        lambda n: (n, 1, 1), 256, looked.best, p.x, p.weight, a.row_slot, best, looked.bounds, screen.state, looked.best.shape[0],
        tokens, inputs, dependent=True,
    )  # fmt: skip
    blocks = min(BLOCKS * int(device.num_sms), -(-outputs * tokens // (2 * 256 * 8)))  # each warp has eight scores a lane
    tickets = device.zeros("screen.tickets", (1,), "i32")
    reach = device.function(source("screen.cu"), "screen_choose", **defines, **of_ranks(a)).bind(
        blocks, 256, screen.pairs, screen.slacks, p.x, p.weight, a.row_slot, a.tokens, best, looked.bounds, screen.state, tickets,
        ROWS, outputs, inputs, dependent=True,
    )  # fmt: skip
    return sequence(settle, reach)
