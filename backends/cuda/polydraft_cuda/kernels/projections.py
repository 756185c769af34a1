"""The projection kernels, each bound to one size: how its work is divided, what it has in flight, how it is launched.

`linear.py` chooses among them. A binder does not depend on the number of rows of a launch; the launch it returns accepts any
number up to its size.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from polydraft.device import DTYPES, Launch
from polydraft_cuda.compiler import ROWS, act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.packed import CudaPackedWeight, Rounded, is_eight, packing_of, product_defines
from polydraft_cuda.kernels.provider import source

TILE_ROWS: Final = 128
"""Outputs of a tile of `linear_tile`: two warp groups."""
TILE_WARPS: Final = 8
"""Warps that have sums of `linear_tile`."""
PAIR_ROWS: Final = 64
"""Outputs of a tile of `linear_pair`."""


class Size(NamedTuple):
    """A size of `linear_tile`: rows of a launch at most, blocks that bring them together, and chunks that are in flight: so many
    that one block fills a multiprocessor's share of bandwidth, and with few rows so few that attention fits beside it."""

    rows: int
    cluster: int
    stages: int


class Split(NamedTuple):
    """A size of `linear_split`: rows of a launch at most, outputs of a block or of two, chunks of a stage, stages in flight, and
    blocks that split the inputs."""

    rows: int
    width: int
    chunks: int
    stages: int
    blocks: int
    order: int = 0
    """1: sums are taken in the order of the inputs; such a launch takes any number of rows, in blocks of so many."""


class Parts(NamedTuple):
    """A size of `linear_parts`: rows of a launch at most, chunks in flight, whole tiles of a block, and blocks that split the
    inputs of a tile that is left."""

    rows: int
    stages: int
    whole: int = 0
    blocks: int = 0


class Matrix(NamedTuple):
    """A matrix that lies in memory of another shape."""

    shape: tuple[int, ...]
    dtype: str
    pointer: int


MOST_STAGES: Final = 16
"""Of a ring, where weights are packed."""
ROWS_BYTES = 190 << 10
"""Bytes of `linear_rows` in flight."""
SHARING: Final = 2
"""Blocks of `linear_split` that bring many rows of x for each other, where one has all inputs of its outputs."""
PROMPT_STAGES: Final = 4
"""Of `linear_prompt`, as many as there is room for."""
PROMPT_BANDS: Final = 8
"""Of 256 rows, which `linear_prompt` takes through all outputs before the next ones."""
PAIR_STAGES: Final = {8: 7, 16: 6, 32: 5}
"""Rows of a launch of `linear_pair` at most, to the double chunks in flight."""
_FLAGS: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Any]]] = weakref.WeakKeyDictionary()
"""The flags of each device, by kernel; the launches that use them keep them alive, and with them the device."""


class TensorMap(ctypes.Structure):
    """CUtensorMap: how the copy engine reads a matrix."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(device: Any, matrix: Any, rows: int, *, paired: int = 0, chunks: int = 0) -> TensorMap:
    """Boxes of `rows` by 128 bytes of a row-major matrix, or of each of a stack, in 128-byte swizzled rows; zeros beyond its
    end. `paired`: of the upper and the lower half of the matrix, so many rows of each in turn. `chunks`: so many of
    these side by side."""
    *stacked, height, width = matrix.shape
    each = DTYPES[matrix.dtype].itemsize
    row, across = each * width, 128 // each
    sizes: tuple[int, ...] = (width, paired, 2, height // (2 * paired)) if paired else (width, height)
    strides: tuple[int, ...] = (row, height // 2 * row, paired * row) if paired else (row,)
    box: tuple[int, ...] = (across, paired, 2, rows // (2 * paired)) if paired else (across, rows)
    if stacked:
        sizes, strides, box = (*sizes, *stacked), (*strides, height * row), (*box, 1)
    if chunks:
        sizes, strides, box = (across, *sizes[1:], width // across), (*strides, 128), (*box, chunks)
    kind = {"bf16": "BFLOAT16", "f16": "FLOAT16", "u8": "UINT8"}[matrix.dtype]
    return _encoded(device, matrix, kind, sizes, strides, box, "128B")


def _encoded(
    device: Any, matrix: Any, kind: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: str
) -> TensorMap:
    from cuda.bindings import driver

    number, word = driver.cuuint64_t, driver.cuuint32_t
    described = (
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        len(sizes), matrix.pointer, [number(s) for s in sizes], [number(s) for s in strides], [word(s) for s in box],
        [word(1) for _ in box], driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    encoded = device.call("cuTensorMapEncodeTiled", *described, doing="describing a matrix")
    return TensorMap((ctypes.c_uint64 * 16)(*(int(word) for word in encoded.opaque)))


def piece_map(device: CudaDevice, weight: CudaPackedWeight, rows: int, *, paired: bool = False, chunks: int = 1) -> TensorMap:
    """Boxes of what `rows` outputs of a packed weight, or of a matrix of a stack, have of `chunks` chunks of 64 inputs: pieces of
    8 outputs, those of the upper and the lower half of the matrix in turn where it is `paired`; zeros beyond its end."""
    *stacked, outputs, inputs = weight.shape
    piece, pieces, width = 8 * piece_bytes(weight), -(-outputs // 8), inputs // 64
    row = piece * width
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    if stacked:
        halves = 2 if paired else 1
        sizes = piece // 4, halves, pieces // halves, *stacked, width
        strides = pieces // halves * row, row, pieces * row, piece
        box = piece // 4, halves, rows // (8 * halves), 1, chunks
    elif paired:
        sizes = piece // 8, 2, 2, pieces // 2, width
        strides = piece // 2, pieces // 2 * row, row, piece
        box = piece // 8, 2, 2, rows // 16, chunks
    else:
        sizes, strides, box = (piece // 4, pieces, width), (row, piece), (piece // 4, rows // 8, chunks)
    return _encoded(device, weight.in_pieces(device), "UINT32", sizes, strides, box, "NONE")


def piece_bytes(weight: CudaPackedWeight) -> int:
    """Bytes that an output has of a chunk of 64 inputs."""
    return 32 if weight.packing.number == "int4" else 64


def chunk_bytes(a: Any) -> int:
    """Bytes that an output has of a chunk of `linear_tile`."""
    return 128 if packing_of(a) is None or is_eight(a) else piece_bytes(a.weight)


def flags(device: Any, kernel: str = "linear") -> Any:
    """One word a block, zero between launches: blocks of a kernel tell each other through it that their share is there. Kernels
    that may run beside each other have their own."""
    known = _FLAGS.setdefault(device, {})
    found = known[kernel]() if kernel in known else None
    if found is None:
        found = device.empty(f"{kernel}.flags", (1024,), "u32")
        device.load(found, np.zeros(1024, np.uint32))
        known[kernel] = weakref.ref(found)
    return found


def num_blocks(device: CudaDevice, a: Any, cluster: int = 1, at_once: int = 1 << 30) -> int:
    """Blocks of `linear_tile`: as many clusters as run at once, or fewer where each would get less than four chunks, or none of
    the tiles that it has as a whole."""
    outputs, inputs = a.weight.shape
    tiles = -(-outputs // (TILE_ROWS * cluster))
    shares = tiles if is_whole_tiled(device, a) else tiles * (inputs // 64) // 4
    return cluster * max(1, min(int(device.num_sms) // cluster, int(shares), at_once))


def is_whole_tiled(device: CudaDevice, a: Any) -> bool:
    """Whether a block of `linear_tile` has whole tiles: where rows are invariant, the sum of an output does not depend on how
    many others there are. Packed matrices are not shared out where that is promised."""
    return bool(device.row_invariant and packing_of(a) is None)


def defines(a: Any) -> dict[str, int]:
    """What every kernel of a projection is told."""
    return {"OUT_F32": int(a.out.dtype == "f32"), "BIAS": int(a.bias is not None), **act(a.x.dtype)}


def tile(
    device: CudaDevice, a: Any, workspace: Any, size: Size, first: int, gated: Any = None, best: Any = None, keeps: bool = False,
    state: Any = None, rounded: Rounded | None = None,
) -> Launch:  # fmt: skip
    """`linear_tile` for rows `first` to `first + size.rows`. Where `gated` is given, silu(gate) * up goes there alone; where
    `best` is, the best outputs of each row, alone unless it `keeps` outputs, and with the `state` of a look only where this look
    wants it. `rounded`: the rows, where they are others than x."""
    outputs, inputs = a.weight.shape
    rounded = rounded or Rounded(a.x, None, 0)
    packing, eight, paired = packing_of(a), is_eight(a), gated is not None
    tokens, cluster, stages = packed_size(a, size) if packing else size
    function = device.function(
        source("linear_tile.cu"), "linear_tile", arch_features="a", TOKENS=tokens, STAGES=stages, CLUSTER=cluster,
        GATED=int(paired), BEST=0 if best is None else 1 + keeps, EIGHT=int(eight),
        **({"ORDER": 1} if is_whole_tiled(device, a) else {}), **product_defines(a), **defines(a),
    )  # fmt: skip
    shared = stages * (TILE_ROWS * chunk_bytes(a) + tokens * 128) + 1024
    crowded = packing is not None and tokens >= (128 if packing.columns or eight else 256)  # as the kernel has it
    threads = 2 * 128 + (128 if crowded else 32)
    at_once = function.most_clusters(threads, shared, cluster) if cluster > 1 else device.num_sms
    if packing and not eight:
        weights = piece_map(device, a.weight, TILE_ROWS, paired=paired)
    else:
        weights = tensor_map(device, a.weight.numbers if eight else a.weight, TILE_ROWS, paired=8 * paired)
    scales, zeros = (a.weight.scales, a.weight.zeros) if packing else (None, None)
    return function.bind(
        num_blocks(device, a, cluster, at_once), threads, weights, tensor_map(device, rounded.x, tokens // cluster),
        gated or a.out, best, a.bias, workspace.buffer, flags(device), state, scales, zeros, rounded.scales, rounded.pitch,
        ROWS, first, outputs, inputs, shared=shared, cluster=cluster if cluster > 1 else None, dependent=True,
    )  # fmt: skip


def packed_size(a: Any, size: Size) -> Size:
    """A size of `linear_tile` with as many bytes in flight where weights are packed."""
    inflight = size.stages * (TILE_ROWS + size.rows) * 128
    return size._replace(stages=min(inflight // (TILE_ROWS * chunk_bytes(a) + size.rows * 128), MOST_STAGES))


def rows_of(device: CudaDevice, a: Any, unit: int = 16) -> int:
    """Outputs of a block that has some for itself: an even share of them, in `unit`s."""
    return -(-int(a.weight.shape[0]) // (unit * int(device.num_sms))) * unit


def rows(
    device: CudaDevice, a: Any, tokens: int, cluster: int, gated: Any = None, fetched: Any = None
) -> Launch | None:  # fmt: skip
    """`linear_rows` for up to `tokens` rows; None where its blocks would not run all at once. `fetched`: another weight, of whole
    lines of 128 bytes, that it brings into the second cache."""
    outputs, inputs = a.weight.shape
    share = rows_of(device, a)
    chunks, groups = (1, -(-share // 64)) if share > 64 else (4 if tokens < 64 else 2, 2)
    stages = ROWS_BYTES // (chunks * (share + tokens) * 128)
    stages -= stages % 2 if groups == 2 and share <= 64 else 0
    function = device.function(
        source("linear_rows.cu"), "linear_rows", arch_features="a", TOKENS=tokens, OUTPUTS=share, CHUNKS=chunks, STAGES=stages,
        CLUSTER=cluster, GATED=int(gated is not None), ORDER=int(device.row_invariant), FETCHES=int(fetched is not None),
        **defines(a),
    )  # fmt: skip
    clusters, threads = -(-outputs // (share * cluster)), groups * 128 + 32
    shared = stages * chunks * (share + tokens) * 128 + (-share % 64) * 128 + 1024
    if cluster > 1 and function.most_clusters(threads, shared, cluster) < clusters:
        return None
    return function.bind(
        clusters * cluster, threads, tensor_map(device, a.weight, share, paired=8 * (gated is not None), chunks=chunks),
        tensor_map(device, a.x, tokens // cluster), gated or a.out, a.bias, ROWS, outputs, inputs, fetched,
        fetched.nbytes if fetched else 0, shared=shared, cluster=cluster if cluster > 1 else None, dependent=True,
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


def split(device: CudaDevice, a: Any, size: Split, gated: Any = None, *, leaves: int = 1, added: bool = False) -> Launch | None:
    """`linear_split` for up to `size.rows` rows; None where its blocks would not run all at once. Of several `leaves` the weight
    has the matrix of each; they lie side by side in `out`, or are `added`."""
    outputs, inputs = a.weight.shape[-2:]
    tokens, width, chunks, stages, blocks, order = size
    sharing = SHARING if order and blocks == 1 and 64 < tokens <= 128 else 1
    function = device.function(
        source("linear_split.cu"), "linear_split", arch_features="a", TOKENS=tokens, WIDTH=width, CHUNKS=chunks, STAGES=stages,
        SPLIT=blocks, GATED=int(gated is not None), ORDER=order, SHARED=sharing,
        **({"LEAVES": leaves} if added else {}), **defines(a),
    )  # fmt: skip
    tiles = -(-outputs // (width * sharing)) * sharing
    band = max(tokens, 64)  # a warp group reads 64 rows, whatever lies behind those of x
    threads = 3 * 128 if tokens > 192 else 2 * band + 32  # two groups of twice as many rows, and what fetches for them
    given = 2 * width * band if blocks > 1 else 0
    shared = stages * chunks * (width + tokens) * 128 + (band - tokens) * 128 + given + 1024
    if blocks > 1 and function.most_clusters(threads, shared, blocks) < tiles:
        return None
    matrix = Matrix((leaves * outputs, inputs), a.weight.dtype, a.weight.pointer)
    return function.bind(
        (lambda n: (tiles * blocks, -(-n // tokens), 1 if added else leaves)) if order else tiles * blocks, threads,
        tensor_map(device, matrix, width, paired=int(gated is not None), chunks=chunks),
        tensor_map(device, a.x, tokens // sharing), gated or a.out, a.bias, ROWS, outputs, inputs, shared=shared,
        cluster=max(blocks, sharing) if blocks * sharing > 1 else None, dependent=True,
    )  # fmt: skip


def prompt(device: CudaDevice, a: Any, gated: Any) -> Launch:
    """`linear_prompt` for any number of rows, of gate and up: silu(gate) * up goes to `gated`."""
    outputs, inputs = a.weight.shape
    function = device.function(
        source("linear_prompt.cu"), "linear_prompt", arch_features="a", STAGES=PROMPT_STAGES, BANDS=PROMPT_BANDS,
        **act(a.x.dtype),
    )  # fmt: skip
    threads, shared = 3 * 128, PROMPT_STAGES * 3 * 128 * 128 + 8 * 16 * 72 * 2 + 1024
    return function.bind(
        2 * function.most_clusters(threads, shared, 2), threads, tensor_map(device, a.weight, 128, paired=8),
        tensor_map(device, a.x, 128), gated, ROWS, outputs, inputs, shared=shared, cluster=2, dependent=True,
    )  # fmt: skip


def parts(
    device: CudaDevice, a: Any, workspace: Any, size: Parts, gated: Any = None, rounded: Rounded | None = None
) -> Launch:  # fmt: skip
    """`linear_parts` for up to `size.rows` rows; all of its blocks run at once. Where `gated` is given, silu(gate) * up goes
    there alone. `rounded`: the rows, where they and the weight are E4M3."""
    outputs, inputs = a.weight.shape
    tokens, stages, whole, blocks = size
    paired, eight = gated is not None, is_eight(a)
    function = device.function(
        source("linear_parts.cu"), "linear_parts", arch_features="a", TOKENS=tokens, WHOLE=whole, SPLIT=blocks, STAGES=stages,
        BIAS=int(a.bias is not None), GATED=int(paired), EIGHT=int(eight), **act(a.x.dtype),
    )  # fmt: skip
    x, weight, scales, row_scales = a.x, a.weight, None, None
    if eight and rounded is not None:
        x, weight, scales, row_scales = rounded.x, a.weight.numbers, a.weight.scales, rounded.scales
    leaving = 64 * (TILE_ROWS // (1 + paired) + 8) * 2  # rows on their way out
    return function.bind(
        device.num_sms if whole else tiles_of(a) * blocks, 2 * 128 + (128 if eight else 32),
        tensor_map(device, weight, TILE_ROWS, paired=8 * paired), tensor_map(device, x, tokens), gated or a.out, a.bias, scales,
        row_scales, workspace.buffer, flags(device, "linear_parts"), ROWS, outputs, inputs,
        shared=stages * (TILE_ROWS + tokens) * 128 + leaving + 1024, dependent=True,
    )  # fmt: skip


def tiles_of(a: Any) -> int:
    """Tiles of 128 outputs."""
    return -(-int(a.weight.shape[0]) // TILE_ROWS)


def parts_bytes(device: CudaDevice, a: Any, size: Parts) -> int:
    """What blocks of `linear_parts` leave for each other."""
    left, given = tiles_of(a) - size.whole * int(device.num_sms), -(-size.rows // (8 * size.blocks)) * 8
    return left * size.blocks**2 * given * TILE_ROWS * 4


def stream(device: CudaDevice, a: Any, tokens: int) -> Launch:
    """`linear_stream` for up to `tokens` rows."""
    outputs, inputs = a.weight.shape
    function = device.function(
        source("linear_stream.cu"), "linear_stream", TOKENS=tokens, TILES=1, DEPTH=4, WARPS=8, MIN_BLOCKS=2, **defines(a),
    )  # fmt: skip
    blocks = min(outputs // 16, 2 * device.num_sms)
    return function.bind(blocks, 256, a.x, a.weight, a.bias, a.out, ROWS, outputs, inputs, dependent=True)


def plain(device: CudaDevice, a: Any, rounded: Rounded | None = None, leaves: int = 1) -> Launch:
    """`linear_plain` for any number of rows, of x or of what x was rounded to. Of several `leaves` the weight has the matrix of
    each."""
    outputs, inputs = a.weight.shape[-2:]
    rounded = rounded or Rounded(a.x, None, 0)
    scales, zeros = (a.weight.scales, a.weight.zeros) if packing_of(a) else (None, None)
    function = device.function(source("linear_plain.cu"), "linear_plain", **product_defines(a), **defines(a))
    grid: Callable[[int], tuple[int, int, int]] = lambda n: (-(-outputs // 4), min(-(-n // 8), 1024), leaves)  # noqa: E731
    return function.bind(
        grid, 128, rounded.x, a.weight, a.bias, a.out, scales, zeros, rounded.scales, rounded.pitch, ROWS, outputs, inputs,
        dependent=True,
    )  # fmt: skip
