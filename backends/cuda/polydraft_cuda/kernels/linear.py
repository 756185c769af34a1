"""Owns the choice of a kernel for a projection, by its shape and the number of rows.

Few rows are a matter of reading the weights at the speed of memory: `linear_tile` streams them into warp-group products on
sm_90, `linear_stream` into registers for small matrices and on other architectures. Many rows go to cuBLASLt. What none of them
takes (float32, odd sizes) goes to `linear_plain`. In row-invariant mode every number of rows takes the same sums.
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
STAGES: Final = {8: 7, 16: 7, 32: 6, 64: 5, 256: 4}
"""Rows of a launch of `linear_tile` at most, to the chunks that are in flight: so many that one block fills a multiprocessor's
share of bandwidth, and so few that attention fits beside it."""
MOST_TILE_ROWS: Final = 64
"""More rows than this are faster by cuBLASLt."""
STREAM_TOKENS: Final = (8, 16)
SMALL: Final = 12 << 20
"""Bytes of a matrix up to which `linear_stream` is faster: nothing has to be summed over blocks."""
_FLAGS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class TensorMap(ctypes.Structure):
    """CUtensorMap: how the copy engine reads a matrix."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(device: Any, matrix: Any, rows: int) -> TensorMap:
    """Boxes of `rows` by 64 elements of a row-major 16-bit matrix, in 128-byte swizzled rows; zeros beyond its end."""
    encoded = device.call("cuTensorMapEncodeTiled", *_described(matrix, rows), doing="describing a matrix to the copy engine")
    return TensorMap((ctypes.c_uint64 * 16)(*(int(word) for word in encoded.opaque)))


def _described(matrix: Any, rows: int) -> tuple[Any, ...]:
    from cuda.bindings import driver

    number, word = driver.cuuint64_t, driver.cuuint32_t
    kinds = driver.CUtensorMapDataType
    height, width = matrix.shape
    return (
        kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if matrix.dtype == "bf16" else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        2, matrix.pointer, [number(width), number(height)], [number(2 * width)], [word(64), word(rows)], [word(1), word(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
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
    return device.arch == "sm_90" and a.x.dtype != "f32" and a.weight.shape[1] % 64 == 0


def is_streamed(a: Any) -> bool:
    """Whether `linear_stream` takes this projection."""
    return a.x.dtype != "f32" and a.weight.shape[1] % 64 == 0 and a.weight.shape[0] % 16 == 0


def num_blocks(device: CudaDevice, a: Any) -> int:
    """Blocks of `linear_tile`: one a multiprocessor, or fewer where each would get less than four chunks."""
    outputs, inputs = a.weight.shape
    chunks = -(-outputs // TILE_ROWS) * (inputs // 64)
    return max(1, min(device.num_sms, chunks // 4))


def workspace_bytes(device: CudaDevice, a: Any, limits: Limits) -> int:
    """Shares of tiles, or cuBLASLt's scratch."""
    del limits
    if not is_tiled(device, a):
        return cublaslt.WORKSPACE if uses_library(a) else 0
    widest = max(STAGES) if device.row_invariant or cublaslt.library() is None else MOST_TILE_ROWS
    return max(num_blocks(device, a) * TILE_ROWS * widest * 4, cublaslt.WORKSPACE if uses_library(a) else 0)


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
    scratch = 0 if workspace is None else workspace.buffer.pointer
    if device.row_invariant:
        return tiles(device, a, workspace, (*STAGES,)) if is_tiled(device, a) else plain(device, a)
    steps: list[tuple[int, Launch]] = []  # most rows, launch
    if is_streamed(a) and (a.weight.nbytes <= SMALL or not is_tiled(device, a)):
        steps += [(tokens, stream(device, a, tokens)) for tokens in STREAM_TOKENS]
    many = cublaslt.bind(device, a.x, a.weight, a.bias, a.out, scratch) if uses_library(a) else None
    if is_tiled(device, a):
        steps.append((MOST_TILE_ROWS if many else 1 << 30, tiles(device, a, workspace, (8, 16, 32, 64) if many else (*STAGES,))))
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


def tiles(device: CudaDevice, a: Any, workspace: Any, sizes: tuple[int, ...]) -> Launch:
    """`linear_tile` in the narrowest size that takes all rows, or in several launches of the widest."""
    most = a.x.shape[0]
    needed = [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < most]
    narrow = {size: tile(device, a, workspace, size, 0) for size in needed}
    widest = needed[-1]
    wide = [tile(device, a, workspace, widest, first) for first in range(widest, most, widest)]

    def launch(stream: Stream, n: int) -> None:
        if n <= 0:
            return
        narrow[next((size for size in needed if n <= size), widest)](stream, n)
        for i, one in enumerate(wide):
            if n <= (i + 1) * widest:
                break
            one(stream, n)

    return launch


def tile(device: CudaDevice, a: Any, workspace: Any, tokens: int, first: int) -> Launch:
    """`linear_tile` for rows `first` to `first + tokens`."""
    outputs, inputs = a.weight.shape
    stages = STAGES[tokens]
    function = device.function(
        source("linear_tile.cu"), "linear_tile", arch_features="a", TOKENS=tokens, GROUPS=2, TILES=1, STAGES=stages, MIN_BLOCKS=1,
        ADD=0, **defines(a),
    )  # fmt: skip
    return function.bind(
        num_blocks(device, a), 2 * 128 + 32, tensor_map(device, a.weight, TILE_ROWS), tensor_map(device, a.x, tokens), a.out,
        a.bias, workspace.buffer, flags(device), ROWS, first, outputs, inputs, shared=stages * (TILE_ROWS + tokens) * 128 + 1024,
        dependent=True,
    )  # fmt: skip


def stream(device: CudaDevice, a: Any, tokens: int) -> Launch:
    """`linear_stream` for up to `tokens` rows."""
    outputs, inputs = a.weight.shape
    function = device.function(
        source("linear_stream.cu"), "linear_stream", TOKENS=tokens, TILES=1, DEPTH=4, WARPS=8, MIN_BLOCKS=2, ADD=0,
        GATED=0, **defines(a),
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
