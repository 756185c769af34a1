"""Owns the choice of a kernel for a projection, by its shape and the number of rows.

Few rows are a matter of reading the weights at the speed of memory: `linear_tile` streams them into warp-group products on
sm_90, `linear_pair` does so for matrices of few outputs, `linear_stream` into registers for small matrices and on other
architectures. Many rows go to cuBLASLt. What none of them takes (float32, odd sizes) goes to `linear_plain`. In row-invariant
mode every number of rows takes the same sums.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Launch, Stream
from polydraft_cuda import cublaslt
from polydraft_cuda.compiler import ROWS, act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import Kernel, source

TILE_ROWS: Final = 128
"""Outputs of a tile of `linear_tile`: two warp groups."""
PAIR_ROWS: Final = 64
"""Outputs of a tile of `linear_pair`."""
STAGES: Final = {8: 7, 16: 7, 32: 6, 64: 5, 256: 4}
"""Rows of a launch of `linear_tile` at most, to the chunks that are in flight: so many that one block fills a multiprocessor's
share of bandwidth, and so few that attention fits beside it."""
MOST_TILE_ROWS: Final = 32
"""More rows than this are faster by cuBLASLt."""
PAIR_STAGES: Final = {8: 7, 16: 6, 32: 5}
"""The same of `linear_pair`, in double chunks."""
STREAM_TOKENS: Final = (8, 16)
SMALL: Final = 12 << 20
"""Bytes of a matrix up to which `linear_stream` is faster: nothing has to be summed over blocks."""
_FLAGS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_LAST: weakref.WeakKeyDictionary[Any, Projection] = weakref.WeakKeyDictionary()


class TensorMap(ctypes.Structure):
    """CUtensorMap: how the copy engine reads a matrix."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(device: Any, matrix: Any, rows: int, *, paired: bool = False) -> TensorMap:
    """Boxes of `rows` by 64 elements of a row-major 16-bit matrix, in 128-byte swizzled rows; zeros beyond its end. `paired`: of
    the upper and the lower half of the matrix, eight rows of each in turn."""
    height, width = matrix.shape
    if paired:
        sizes, strides, box = (width, 8, 2, height // 16), (2 * width, height * width, 16 * width), (64, 8, 2, rows // 16)
    else:
        sizes, strides, box = (width, height), (2 * width,), (64, rows)  # type: ignore[assignment]
    encoded = device.call("cuTensorMapEncodeTiled", *_described(matrix, sizes, strides, box), doing="describing a matrix")
    return TensorMap((ctypes.c_uint64 * 16)(*(int(word) for word in encoded.opaque)))


def _described(matrix: Any, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> tuple[Any, ...]:
    from cuda.bindings import driver

    number, word = driver.cuuint64_t, driver.cuuint32_t
    kinds = driver.CUtensorMapDataType
    return (
        kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if matrix.dtype == "bf16" else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        len(sizes), matrix.pointer, [number(s) for s in sizes], [number(s) for s in strides], [word(s) for s in box],
        [word(1) for _ in box], driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B, driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip


def flags(device: Any) -> Any:
    """One word a block, zero between launches: blocks tell each other through it that their share of a tile is there."""
    found = _FLAGS.get(device)
    if found is None:
        found = _FLAGS[device] = device.empty("linear.flags", (1024,), "u32")
        device.load(found, np.zeros(1024, np.uint32))
    return found


def is_tiled(device: CudaDevice, a: Any) -> bool:
    """Whether `linear_tile` takes this projection."""
    return bool(device.arch == "sm_90" and a.x.dtype != "f32" and a.weight.shape[1] % 64 == 0)


def is_streamed(a: Any) -> bool:
    """Whether `linear_stream` takes this projection."""
    return bool(a.x.dtype != "f32" and a.weight.shape[1] % 64 == 0 and a.weight.shape[0] % 16 == 0)


def pair_sizes(device: CudaDevice, a: Any) -> tuple[int, ...]:
    """Sizes in which `linear_pair` takes this projection: all where its clusters run at once, the narrowest where half of them
    come in a second wave."""
    outputs, inputs = a.weight.shape
    blocks = 2 * -(-outputs // PAIR_ROWS)
    if not is_tiled(device, a) or inputs % 128 or 2 * blocks > 3 * device.num_sms:
        return ()
    return tuple(PAIR_STAGES) if blocks <= device.num_sms else (min(PAIR_STAGES),)


def num_blocks(device: CudaDevice, a: Any) -> int:
    """Blocks of `linear_tile`: one a multiprocessor, or fewer where each would get less than four chunks."""
    outputs, inputs = a.weight.shape
    chunks = -(-outputs // TILE_ROWS) * (inputs // 64)
    return max(1, min(int(device.num_sms), int(chunks) // 4))


def workspace_bytes(device: CudaDevice, a: Any, limits: Limits) -> int:
    """Shares of tiles, or cuBLASLt's scratch."""
    del limits
    if not is_tiled(device, a):
        return cublaslt.WORKSPACE if uses_library(a) else 0
    widest = max(STAGES) if device.row_invariant or cublaslt.library() is None else MOST_TILE_ROWS
    return max(int(num_blocks(device, a)) * TILE_ROWS * widest * 4, cublaslt.WORKSPACE if uses_library(a) else 0)


def uses_library(a: Any) -> bool:
    """Whether cuBLASLt may take this projection: it wants 16-byte rows."""
    outputs, inputs = a.weight.shape
    return a.x.dtype != "f32" and inputs % 8 == 0 and outputs % 8 == 0 and cublaslt.library() is not None


def defines(a: Any) -> dict[str, int]:
    """What every kernel of a projection is told."""
    return {"OUT_F32": int(a.out.dtype == "f32"), "BIAS": int(a.bias is not None), **act(a.x.dtype)}


def linear(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """Bind the kernels that this shape can use, and choose among them by the number of rows."""
    del limits
    launch = choose(device, a, workspace)
    found = _LAST[device] = Projection(a, workspace, launch)
    return found.launch


class Projection:
    """A bound projection. Where a gated activation was bound behind it, the two become one launch while a graph is captured; what
    is launched by itself always writes what its contract says."""

    def __init__(self, a: Any, workspace: Any, alone: Launch) -> None:
        self.a, self.workspace, self._alone = a, workspace, alone
        self._gated: Launch | None = None
        self._device: Any = None

    def launch(self, stream: Stream, n: int) -> None:
        """Enqueue the projection, or both where `takes` says so."""
        if self._gated is not None and self.takes(n):
            self._gated(stream, n)
        else:
            self._alone(stream, n)

    def takes(self, n: int) -> bool:
        """Whether a launch of `n` rows is one with the activation behind it."""
        return self._gated is not None and n <= MOST_TILE_ROWS and bool(self._device.capturing)

    def join(self, device: CudaDevice, out: Any) -> bool:
        """Join the activation that writes to `out`; whether that can be done. Few rows only: then the launch is what it costs."""
        outputs, a = self.a.weight.shape[0], self.a
        big = is_tiled(device, a) and a.weight.nbytes > SMALL and outputs % 16 == 0 and a.bias is None
        if device.row_invariant or not big:
            return False
        sizes = tuple(size for size in STAGES if size <= MOST_TILE_ROWS)
        self._device, self._gated = device, tiles(device, a, self.workspace, sizes, gated=out)
        return True


def projection_of(device: CudaDevice, gate_up: Any) -> Projection | None:
    """The projection that was bound last on this device, if it writes `gate_up`."""
    found = _LAST.get(device)
    return found if found is not None and found.a.out is gate_up else None


def choose(device: CudaDevice, a: Any, workspace: Any) -> Launch:
    """The launch that takes any number of rows."""
    scratch = 0 if workspace is None else workspace.buffer.pointer
    if device.row_invariant:
        return tiles(device, a, workspace, (*STAGES,)) if is_tiled(device, a) else plain(device, a)
    steps: list[tuple[int, Launch]] = []  # most rows, launch
    if is_streamed(a) and (a.weight.nbytes <= SMALL or not is_tiled(device, a)):
        steps += [(tokens, stream(device, a, tokens)) for tokens in STREAM_TOKENS]
    steps += [(tokens, pair(device, a, tokens)) for tokens in pair_sizes(device, a)]
    many = cublaslt.bind(device, a.x, a.weight, a.bias, a.out, scratch) if uses_library(a) else None
    if is_tiled(device, a):
        steps.append((MOST_TILE_ROWS if many else 1 << 30, tiles(device, a, workspace, (8, 16, 32) if many else (*STAGES,))))
    steps.append((1 << 30, many or plain(device, a)))
    return steps[0][1] if len(steps) == 1 else by_rows(steps)


def by_rows(steps: list[tuple[int, Launch]]) -> Launch:
    """The first launch that takes as many rows."""

    def launch(stream: Stream, n: int) -> None:
        for most, one in steps:
            if n <= most:
                one(stream, n)
                return

    return launch


def tiles(device: CudaDevice, a: Any, workspace: Any, sizes: tuple[int, ...], *, gated: Any = None) -> Launch:
    """`linear_tile` in the narrowest size that takes all rows, or in several launches of the widest."""
    most = min(a.x.shape[0], max(sizes)) if max(sizes) < max(STAGES) else a.x.shape[0]
    needed = [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < most]
    narrow = {size: tile(device, a, workspace, size, 0, gated) for size in needed}
    widest = needed[-1]
    wide = [] if gated else [tile(device, a, workspace, widest, first) for first in range(widest, most, widest)]

    def launch(stream: Stream, n: int) -> None:
        if n <= 0:
            return
        narrow[next((size for size in needed if n <= size), widest)](stream, n)
        for i, one in enumerate(wide):
            if n <= (i + 1) * widest:
                break
            one(stream, n)

    return launch


def tile(device: CudaDevice, a: Any, workspace: Any, tokens: int, first: int, gated: Any = None) -> Launch:
    """`linear_tile` for rows `first` to `first + tokens`. Where `gated` is given, silu(gate) * up goes there alone."""
    outputs, inputs = a.weight.shape
    stages = STAGES[tokens]
    function = device.function(
        source("linear_tile.cu"), "linear_tile", arch_features="a", TOKENS=tokens, STAGES=stages, GATED=int(gated is not None),
        **defines(a),
    )  # fmt: skip
    weights = tensor_map(device, a.weight, TILE_ROWS, paired=gated is not None)
    return function.bind(
        num_blocks(device, a), 2 * 128 + 32, weights, tensor_map(device, a.x, tokens), gated or a.out, a.bias, workspace.buffer,
        flags(device), ROWS, first, outputs, inputs, shared=stages * (TILE_ROWS + tokens) * 128 + 1024, dependent=True,
    )  # fmt: skip


def pair(device: CudaDevice, a: Any, tokens: int) -> Launch:
    """`linear_pair` for up to `tokens` rows."""
    outputs, inputs = a.weight.shape
    stages = PAIR_STAGES[tokens]
    function = device.function(
        source("linear_pair.cu"), "linear_pair", arch_features="a", TOKENS=tokens, STAGES=stages, **defines(a)
    )
    return function.bind(
        2 * -(-outputs // PAIR_ROWS), 2 * 128 + 32, tensor_map(device, a.weight, PAIR_ROWS), tensor_map(device, a.x, tokens),
        a.out, a.bias, ROWS, outputs, inputs, shared=stages * 2 * (PAIR_ROWS + tokens) * 128 + 1024, cluster=2, dependent=True,
    )  # fmt: skip


def stream(device: CudaDevice, a: Any, tokens: int) -> Launch:
    """`linear_stream` for up to `tokens` rows."""
    outputs, inputs = a.weight.shape
    function = device.function(
        source("linear_stream.cu"), "linear_stream", TOKENS=tokens, TILES=1, DEPTH=4, WARPS=8, MIN_BLOCKS=2, **defines(a),
    )  # fmt: skip
    blocks = min(outputs // 16, 2 * device.num_sms)
    return function.bind(blocks, 256, a.x, a.weight, a.bias, a.out, ROWS, outputs, inputs, dependent=True)


def plain(device: CudaDevice, a: Any) -> Launch:
    """`linear_plain` for any number of rows."""
    outputs, inputs = a.weight.shape
    function = device.function(source("linear_plain.cu"), "linear_plain", **defines(a))
    grid: Callable[[int], tuple[int, int, int]] = lambda n: (-(-outputs // 4), min(-(-n // 8), 1024), 1)  # noqa: E731
    return function.bind(grid, 128, a.x, a.weight, a.bias, a.out, ROWS, outputs, inputs, dependent=True)


KERNELS: dict[str, Kernel] = {"linear": Kernel(linear, workspace_bytes)}
