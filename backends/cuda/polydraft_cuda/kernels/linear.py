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
from typing import Any, Final, NamedTuple

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


class Size(NamedTuple):
    """A size of `linear_tile`: rows of a launch at most, blocks that bring them together, and chunks that are in flight: so many
    that one block fills a multiprocessor's share of bandwidth, and with few rows so few that attention fits beside it."""

    rows: int
    cluster: int
    stages: int


SIZES: tuple[Size, ...] = (Size(8, 1, 7), Size(16, 1, 7), Size(32, 2, 6), Size(64, 2, 8), Size(128, 2, 6), Size(256, 2, 4))
INVARIANT: tuple[Size, ...] = (Size(8, 1, 7), Size(16, 1, 7), Size(32, 1, 6), Size(64, 1, 5), Size(256, 1, 4))
"""Where a row's sums must not depend on the number of rows: one division of the work."""
MOST_TILE_ROWS = 64
"""More rows than this are faster by cuBLASLt, where blocks have to share tiles; small matrices from the half of it on."""
WIDE_SHARE: tuple[tuple[int, int], ...] = ((8, 1), (16, 1), (32, 2), (64, 2), (128, 2))
NARROW_SHARE: tuple[tuple[int, int], ...] = ((8, 1), (32, 2))
"""Sizes of `linear_rows` where a block has many outputs, and where it has few: rows of a launch at most, blocks of a cluster."""
ROWS_BYTES = 190 << 10
"""Bytes of `linear_rows` in flight."""
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


def tensor_map(device: Any, matrix: Any, rows: int, *, paired: bool = False, chunks: int = 0) -> TensorMap:
    """Boxes of `rows` by 64 elements of a row-major 16-bit matrix, in 128-byte swizzled rows; zeros beyond its end. `paired`: of
    the upper and the lower half of the matrix, eight rows of each in turn. `chunks`: so many of these side by side."""
    height, width = matrix.shape
    sizes: tuple[int, ...] = (width, 8, 2, height // 16) if paired else (width, height)
    strides: tuple[int, ...] = (2 * width, height * width, 16 * width) if paired else (2 * width,)
    box: tuple[int, ...] = (64, 8, 2, rows // 16) if paired else (64, rows)
    if chunks:
        sizes, strides, box = (64, *sizes[1:], width // 64), (*strides, 128), (*box, chunks)
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


def num_blocks(device: CudaDevice, a: Any, cluster: int = 1, at_once: int = 1 << 30) -> int:
    """Blocks of `linear_tile`: as many clusters as run at once, or fewer where each would get less than four chunks."""
    outputs, inputs = a.weight.shape
    chunks = -(-outputs // (TILE_ROWS * cluster)) * (inputs // 64)
    return cluster * max(1, min(int(device.num_sms) // cluster, int(chunks) // 4, at_once))


def workspace_bytes(device: CudaDevice, a: Any, limits: Limits) -> int:
    """Shares of tiles, or cuBLASLt's scratch."""
    del limits
    if not is_tiled(device, a):
        return cublaslt.WORKSPACE if uses_library(a) else 0
    shares = max(num_blocks(device, a, size.cluster) * size.rows for size in sizes_of(device))
    return max(shares * TILE_ROWS * 4, cublaslt.WORKSPACE if uses_library(a) else 0)


def tile_rows(device: CudaDevice, a: Any) -> int:
    """Rows of a launch of `linear_tile` at most, where there is cuBLASLt as well."""
    if a.weight.shape[0] >= 4 * TILE_ROWS * device.num_sms:  # blocks have tiles of their own
        return max(size.rows for size in SIZES)
    return MOST_TILE_ROWS // 2 if a.weight.nbytes <= SMALL else MOST_TILE_ROWS


def sizes_of(device: CudaDevice) -> tuple[Size, ...]:
    """Sizes of `linear_tile` on this device."""
    return INVARIANT if device.row_invariant else SIZES


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
    found = _LAST[device] = Projection(device, a, workspace)
    return found.launch


class Projection:
    """A bound projection. Where a gated activation was bound behind it, the two become one launch while a graph is captured; what
    is launched by itself always writes what its contract says."""

    def __init__(self, device: CudaDevice, a: Any, workspace: Any) -> None:
        self.a, self._workspace, self._device = a, workspace, device
        self._alone = choose(device, a, workspace)
        self._gated: Launch | None = None
        self._most = 0

    def launch(self, stream: Stream, n: int) -> None:
        """Enqueue the projection, or both where `takes` says so."""
        if self._gated is not None and self.takes(n):
            self._gated(stream, n)
        else:
            self._alone(stream, n)

    def takes(self, n: int) -> bool:
        """Whether a launch of `n` rows is one with the activation behind it."""
        return self._gated is not None and n <= self._most and bool(self._device.capturing)

    def join(self, out: Any) -> bool:
        """Join the activation that writes to `out`; whether that can be done. Few rows only: then the launch is what it costs."""
        outputs, a, device = self.a.weight.shape[0], self.a, self._device
        big = is_tiled(device, a) and a.weight.nbytes > SMALL and outputs % 16 == 0 and a.bias is None
        if device.row_invariant or not big:
            return False
        steps = [(tokens, one) for tokens, cluster in rows_sizes(device, a) if (one := rows(device, a, tokens, cluster, out))]
        if not steps:
            steps = [(most := tile_rows(device, a), tiles(device, a, self._workspace, SIZES, most=most, gated=out))]
        self._gated, self._most = by_rows(steps), max(tokens for tokens, _ in steps)
        return True


def projection_of(device: CudaDevice, gate_up: Any) -> Projection | None:
    """The projection that was bound last on this device, if it writes `gate_up`."""
    found = _LAST.get(device)
    return found if found is not None and found.a.out is gate_up else None


def choose(device: CudaDevice, a: Any, workspace: Any) -> Launch:
    """The launch that takes any number of rows."""
    scratch = 0 if workspace is None else workspace.buffer.pointer
    if device.row_invariant:
        return tiles(device, a, workspace, INVARIANT) if is_tiled(device, a) else plain(device, a)
    steps: list[tuple[int, Launch]] = []  # most rows, launch
    if is_streamed(a) and (a.weight.nbytes <= SMALL or not is_tiled(device, a)):
        steps += [(tokens, stream(device, a, tokens)) for tokens in STREAM_TOKENS]
    steps += [(tokens, one) for tokens, cluster in rows_sizes(device, a) if (one := rows(device, a, tokens, cluster))]
    steps += [(tokens, pair(device, a, tokens)) for tokens in pair_sizes(device, a)]
    many = cublaslt.bind(device, a.x, a.weight, a.bias, a.out, scratch) if uses_library(a) else None
    if is_tiled(device, a):
        most, taken = tile_rows(device, a) if many else 1 << 30, max((tokens for tokens, _ in steps), default=0)
        left = tuple(size for size in SIZES if size.rows > taken)
        if taken < most:
            steps.append((most, tiles(device, a, workspace, left or SIZES[-1:], most=most)))
    steps.append((1 << 30, many or plain(device, a)))
    return by_rows(sorted(steps, key=lambda step: step[0]))


def by_rows(steps: list[tuple[int, Launch]]) -> Launch:
    """The first launch that takes as many rows."""

    def launch(stream: Stream, n: int) -> None:
        for most, one in steps:
            if 0 < n <= most:
                one(stream, n)
                return

    return launch


def tiles(
    device: CudaDevice, a: Any, workspace: Any, sizes: tuple[Size, ...], *, most: int = 1 << 30, gated: Any = None
) -> Launch:
    """`linear_tile` in the narrowest size that takes all rows, or in several launches of the widest."""
    most = min(a.x.shape[0], most)
    needed = [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1].rows < most]
    narrow = [(size.rows, tile(device, a, workspace, size, 0, gated)) for size in needed]
    widest = needed[-1]
    wide = [] if gated else [tile(device, a, workspace, widest, first) for first in range(widest.rows, most, widest.rows)]

    def launch(stream: Stream, n: int) -> None:
        if n <= 0:
            return
        next((one for tokens, one in narrow if n <= tokens), narrow[-1][1])(stream, n)
        for i, one in enumerate(wide):
            if n <= (i + 1) * widest.rows:
                break
            one(stream, n)

    return launch


def tile(device: CudaDevice, a: Any, workspace: Any, size: Size, first: int, gated: Any = None) -> Launch:
    """`linear_tile` for rows `first` to `first + size.rows`. Where `gated` is given, silu(gate) * up goes there alone."""
    outputs, inputs = a.weight.shape
    tokens, cluster, stages = size
    function = device.function(
        source("linear_tile.cu"), "linear_tile", arch_features="a", TOKENS=tokens, STAGES=stages, CLUSTER=cluster,
        GATED=int(gated is not None), **defines(a),
    )  # fmt: skip
    shared, threads = stages * (TILE_ROWS + tokens) * 128 + 1024, 2 * 128 + 32
    at_once = function.most_clusters(threads, shared, cluster) if cluster > 1 else device.num_sms
    return function.bind(
        num_blocks(device, a, cluster, at_once), threads, tensor_map(device, a.weight, TILE_ROWS, paired=gated is not None),
        tensor_map(device, a.x, tokens // cluster), gated or a.out, a.bias, workspace.buffer, flags(device), ROWS, first,
        outputs, inputs, shared=shared, cluster=cluster if cluster > 1 else None, dependent=True,
    )  # fmt: skip


def rows_of(device: CudaDevice, a: Any) -> int:
    """Outputs of a block of `linear_rows`: an even share of them, in sixteens."""
    return -(-int(a.weight.shape[0]) // (16 * int(device.num_sms))) * 16


def rows_sizes(device: CudaDevice, a: Any) -> tuple[tuple[int, int], ...]:
    """Sizes in which `linear_rows` takes this projection."""
    share = rows_of(device, a)
    if not is_tiled(device, a) or a.weight.nbytes <= SMALL or not 32 <= share <= 192:
        return ()
    return WIDE_SHARE if share >= 128 else NARROW_SHARE if share >= 40 else NARROW_SHARE[1:]


def rows(device: CudaDevice, a: Any, tokens: int, cluster: int, gated: Any = None) -> Launch | None:
    """`linear_rows` for up to `tokens` rows; None where its blocks would not run all at once."""
    outputs, inputs = a.weight.shape
    share = rows_of(device, a)
    chunks, groups = (1, -(-share // 64)) if share > 64 else (4 if tokens < 64 else 2, 2)
    stages = ROWS_BYTES // (chunks * (share + tokens) * 128)
    stages -= stages % 2 if groups == 2 and share <= 64 else 0
    function = device.function(
        source("linear_rows.cu"), "linear_rows", arch_features="a", TOKENS=tokens, OUTPUTS=share, CHUNKS=chunks, STAGES=stages,
        CLUSTER=cluster, GATED=int(gated is not None), **defines(a),
    )  # fmt: skip
    clusters, threads = -(-outputs // (share * cluster)), groups * 128 + 32
    shared = stages * chunks * (share + tokens) * 128 + (-share % 64) * 128 + 1024
    if cluster > 1 and function.most_clusters(threads, shared, cluster) < clusters:
        return None
    return function.bind(
        clusters * cluster, threads, tensor_map(device, a.weight, share, paired=gated is not None, chunks=chunks),
        tensor_map(device, a.x, tokens // cluster), gated or a.out, a.bias, ROWS, outputs, inputs, shared=shared,
        cluster=cluster if cluster > 1 else None, dependent=True,
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
