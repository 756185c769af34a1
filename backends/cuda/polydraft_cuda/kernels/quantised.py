"""Kernels for quantised KV rows: rotation of queries and keys with the store, and attention over such rows.

`rope.py` and `attention.py` bind them where a cache is quantised. They are separate launches, in captured steps too.
"""

from __future__ import annotations

from typing import Any, Final

from polydraft.contracts.base import Limits
from polydraft.device import Launch, Stream
from polydraft_cuda.compiler import ROWS, act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import source

KV: Final = {"int8": 1, "fp8": 2}
"""Of `kernels/quant.cuh`."""
MOST_HEAD_DIM: Final = 128
PREFILL_KEYS: Final = 64
WARPS: Final = 4
Shape = tuple[int, int, int]
"""Blocks of a cluster, warps that keys are dealt to in each, and groups of keys that a warp has room for."""
SHAPES: tuple[tuple[int, Shape], ...] = (
    (16, (8, 2, 3)), (128, (2, 8, 3)), (264, (2, 4, 3)), (1 << 30, (1, 4, 3)),
)  # fmt: skip
"""Tiles times key heads at most, to a shape."""
INVARIANT: tuple[tuple[int, Shape], ...] = ((1 << 30, (4, 4, 3)),)
NARROW: tuple[tuple[int, Shape], ...] = ((1 << 30, (1, 4, 4)),)
"""Where there are no clusters."""


def rope_kv_write(device: CudaDevice, a: Any, table: Any) -> Launch:
    """A warp a head; `table` has the turns of each position."""
    heads = a.num_heads + 2 * a.num_kv_heads
    function = device.function(
        source("rope_quant.cu"), "rope_kv_write_quant", KV=KV[a.cache.spec.kv], NORMS=int(a.q_norm is not None),
        INTERLEAVED=int(a.style == "interleaved"), TILED=int(a.cache.tiled), **act(a.qkv.dtype),
    )  # fmt: skip
    return function.bind(
        lambda n: (n, -(-heads // WARPS), 1), 32 * WARPS, a.qkv, a.row_slot, a.positions, a.block_table, a.cache.keys,
        a.cache.values, a.q_norm, a.k_norm, table, a.q_out, a.block_table.shape[1], int(a.num_heads), int(a.num_kv_heads),
        int(a.head_dim), 2 * len(a.frequencies), int(a.block_size), float(a.eps), shared=4 * WARPS * int(a.head_dim),
        dependent=True,
    )  # fmt: skip


def paged_attention(device: CudaDevice, a: Any, limits: Limits) -> Launch:
    """Windows, prefill tiles, or the plain kernel for sizes that tensor cores do not take."""
    if a.meta is None or not a.cache.tiled or a.head_dim > MOST_HEAD_DIM:
        return _plain(device, a)
    shapes = NARROW if device.arch != "sm_90" else INVARIANT if device.row_invariant else SHAPES
    windows = [(most, _windows(device, a, limits, shape)) for most, shape in shapes]
    prefill = None if device.row_invariant else _prefill(device, a)
    meta, heads = a.meta, a.num_kv_heads

    def launch(stream: Stream, n: int) -> None:
        if prefill is not None and meta.step.has_prefill:
            prefill(stream, n)
            return
        clusters = meta.max_tiles(n) * heads
        next(window for most, window in windows if clusters <= most)(stream, n)

    return launch


def _windows(device: CudaDevice, a: Any, limits: Limits, shape: Shape) -> Launch:
    """A cluster a tile of rows and key head."""
    splits, key_warps, stages = shape
    group, dim = a.num_heads // a.num_kv_heads, int(a.head_dim)
    tiles = 1 if device.row_invariant or limits.window * group <= 16 else 2
    if tiles > 1:  # each tile has warps of its own
        key_warps = max(key_warps // tiles, 1)
    function = device.function(
        source("attention_quant.cu"), "attention_quant", KV=KV[a.cache.spec.kv], HEAD_DIM=dim, GROUP=int(group), TILES=tiles,
        KEY_WARPS=key_warps, SPLITS=splits, STAGES=stages, BLOCK_GROUPS=int(a.block_size) // 16,
        **window(a), **act(a.q.dtype),
    )  # fmt: skip
    sums, ring = key_warps * 16 * tiles * (dim + 4) * 4, key_warps * tiles * stages * 32 * (dim + 1)
    meta, heads = a.meta, int(a.num_kv_heads)
    return function.bind(
        lambda n: (splits, heads, meta.max_tiles(n)), 32 * key_warps * tiles, *_shared(a), shared=max(sums, ring),
        cluster=splits if splits > 1 else None, dependent=True,
    )  # fmt: skip


def _prefill(device: CudaDevice, a: Any) -> Launch:
    """A block a tile of rows and two query heads of one key head."""
    heads, dim = 2 if a.num_heads // a.num_kv_heads % 2 == 0 else 1, int(a.head_dim)
    function = device.function(
        source("attention_quant_prefill.cu"), "attention_quant_prefill", KV=KV[a.cache.spec.kv], HEAD_DIM=dim, HEADS=heads,
        BLOCK_GROUPS=int(a.block_size) // 16, **window(a), **act(a.q.dtype),
    )  # fmt: skip
    meta, across = a.meta, int(a.num_heads) // heads
    shared = 2 * PREFILL_KEYS * (2 * dim + 2 * (dim + 1))
    return function.bind(
        lambda n: (across, meta.max_tiles(n), 1), 128 * heads, *_shared(a), shared=shared, dependent=True
    )  # fmt: skip


def window(a: Any) -> dict[str, float | str]:
    """Defines of every kernel of attention for a layer with a sliding window, and of no other."""
    return {"WINDOW": int(a.sliding_window)} if a.sliding_window else {}


def _shared(a: Any) -> tuple[Any, ...]:
    """Arguments of both."""
    return (
        a.q, a.cache.keys, a.cache.values, a.meta.tiles, a.meta.num_tiles, a.row_slot, a.block_table, a.out, ROWS,
        a.block_table.shape[1], int(a.num_heads), int(a.num_kv_heads), float(a.softmax_scale),
    )  # fmt: skip


def _plain(device: CudaDevice, a: Any) -> Launch:
    """A block a row and query head."""
    function = device.function(
        source("attention_plain.cu"),
        "attention_plain",
        KV=KV[a.cache.spec.kv],
        TILED=int(a.cache.tiled),
        **window(a),
        **act(a.q.dtype),
    )
    heads = int(a.num_heads)
    return function.bind(
        lambda n: (n, heads, 1), 128, a.q, a.cache.keys, a.cache.values, a.row_slot, a.positions, a.block_table, a.out,
        a.block_table.shape[1], heads, int(a.num_kv_heads), int(a.head_dim), int(a.block_size), float(a.softmax_scale),
        dependent=True,
    )  # fmt: skip
