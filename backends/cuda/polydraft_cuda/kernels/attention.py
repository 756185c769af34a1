"""Chooses an attention kernel: decode windows, prefill tiles, or the plain kernel for everything else.

The fast kernels work on the tiles in the forward metadata; the plain one needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polydraft.contracts.base import Limits
from polydraft.device import Launch, Stream
from polydraft_cuda.compiler import ROWS, act, sequence
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import quantised
from polydraft_cuda.kernels.provider import Kernel, source
from polydraft_cuda.kernels.rope import rope_kv_write, table_of

MOST_HEAD_DIM = 128
PREFILL_KEYS = 64
WARPS_AT_ONCE = 8
"""Of `attention_decode` on a multiprocessor, where a block has a tile to itself. Blocks are given out as the projection in front
ends: if more of them fitted, multiprocessors that are free first would get more than their share of the work."""
Shape = tuple[int, int, int]
"""Blocks of a cluster, warps that keys are dealt to in each, and groups of keys that a warp has room for."""
SHAPES: tuple[tuple[int, Shape], ...] = (
    (16, (8, 2, 2)), (64, (2, 8, 2)), (128, (1, 8, 2)), (264, (1, 4, 2)), (1 << 30, (1, 2, 3)),
)  # fmt: skip
"""Tiles times key heads at most, to the shape with which a pass was fastest there on an H200 (8 key heads of 128, 640 keys)."""
SINGLE: tuple[tuple[int, Shape], ...] = ((16, (8, 2, 3)), *SHAPES[1:-1], (1 << 30, (1, 2, 2)))
"""The same where a window is one row."""
INVARIANT: tuple[tuple[int, Shape], ...] = ((16, (8, 1, 4)), (128, (1, 8, 2)), (1 << 30, (1, 8, 3)))
"""The same where rows are invariant: keys are dealt to eight warps, whatever blocks these are in, and joined in one order."""
NARROW: tuple[tuple[int, Shape], ...] = ((1 << 30, (1, 4, 3)),)
"""Where there are no clusters."""


def paged_attention(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """Bind what this shape can use; which of it runs is chosen by the pass's metadata at each launch."""
    del workspace
    if a.cache.spec.kv:
        return quantised.paged_attention(device, a, limits)
    if not is_fast(a):
        return plain(device, a)
    windows = by_clusters(a, [(most, decode(device, a, limits, shape)) for most, shape in shapes_of(device, limits)])
    return windows if device.row_invariant else by_phase(a, windows, prompts(device, a, limits))


def is_fast(a: Any) -> bool:
    """Whether kernels that work on the tiles of forward metadata take this attention."""
    return bool(a.meta is not None and a.cache.tiled and a.head_dim <= MOST_HEAD_DIM)


def by_phase(a: Any, windows: Launch, prompts: Launch) -> Launch:
    """One launch for passes of windows alone, another for those that prefill."""
    meta = a.meta

    def launch(stream: Stream, n: int) -> None:
        (prompts if meta.step.has_prefill else windows)(stream, n)

    return launch


def by_clusters(a: Any, sized: list[tuple[int, Launch]], tiles: Callable[[int], int] | None = None) -> Launch:
    """The first launch that takes as many clusters as a pass has, of all its tiles at most or of `tiles(n)`."""
    most_tiles, heads = tiles or a.meta.max_tiles, a.num_kv_heads

    def launch(stream: Stream, n: int) -> None:
        clusters = most_tiles(n) * heads
        for most, window in sized:
            if clusters <= most:
                window(stream, n)
                return

    return launch


def turns_inside(device: CudaDevice, turn: Any, a: Any, limits: Limits) -> bool:
    """Whether one launch can turn rows, store them and attend, behind the projection that writes them: heads are turned without
    norms, as a whole, or half of 128 elements in halves, and the tiles of a block hold all new rows of a slot. Not invariant rows
    of float16, whose bits nobody has compared yet."""
    if device.arch != "sm_90" or a.cache.spec.kv or not is_fast(a) or (device.row_invariant and device.dtype == "f16"):
        return False
    plain_heads = turn.q_norm is None and turn.k_norm is None
    rotary = 2 * len(turn.frequencies)
    held = a.head_dim % 64 == 0 and (rotary == a.head_dim or (rotary, a.head_dim, turn.style) == (64, 128, "half"))
    most = 16 * tiles_of(device, a, limits)
    return bool(plain_heads and held and limits.window * (a.num_heads // a.num_kv_heads) <= most)


def tiles_of(device: CudaDevice, a: Any, limits: Limits) -> int:
    """Tiles of 16 packed rows of a block of `attention_decode`."""
    return 1 if device.row_invariant or limits.window * (a.num_heads // a.num_kv_heads) <= 16 else 2


def _turned(turn: Any) -> dict[str, int]:
    """Defines of a turn that is not one of whole heads in halves."""
    rotary = 2 * len(turn.frequencies)
    return {
        **({"INTERLEAVED": 1} if turn.style == "interleaved" else {}), **({"ROTARY": rotary} if rotary < turn.head_dim else {}),
    }  # fmt: skip


def turned_attention(device: CudaDevice, args: Any, limits: Limits, workspace: Any) -> Launch:
    """Both at once in passes of windows alone; one after the other in those that prefill, whose rows lie in several tiles."""
    turn, a = args.parts
    apart = sequence(rope_kv_write(device, turn, limits, workspace), paged_attention(device, a, limits, workspace))
    shapes = shapes_of(device, limits)
    windows = by_clusters(a, [(most, decode(device, a, limits, shape, turn)) for most, shape in shapes])
    return by_phase(a, windows, apart)


def shapes_of(device: CudaDevice, limits: Limits) -> tuple[tuple[int, Shape], ...]:
    """Shapes of `attention_decode` by the number of clusters."""
    if device.arch != "sm_90":
        return NARROW
    if device.row_invariant:
        return INVARIANT
    return SINGLE if limits.window == 1 else SHAPES


def decode(device: CudaDevice, a: Any, limits: Limits, shape: Shape, turn: Any = None, few: int = 0) -> Launch:
    """A cluster a tile of rows and key head; with the arguments of a turn from the rows of the projection in front.
    `few`: of tiles with no more rows, and of no others."""
    splits, key_warps, stages = shape
    group = a.num_heads // a.num_kv_heads
    tiles = tiles_of(device, a, limits)
    if tiles > 1:  # each tile has warps of its own
        key_warps = max(key_warps // tiles, 1)
    function = device.function(
        source("attention_decode.cu"), "attention_decode", HEAD_DIM=int(a.head_dim), GROUP=int(group), TILES=tiles,
        KEY_WARPS=key_warps, SPLITS=splits, STAGES=stages, BLOCK_GROUPS=int(a.block_size) // 16,
        ROPE=limits.window if turn else 0, **(_turned(turn) if turn else {}), **quantised.window(a), **act(a.q.dtype),
    )  # fmt: skip
    sums = key_warps * 16 * tiles * (a.head_dim + 10) * 4
    ring = key_warps * tiles * stages * a.head_dim * 64
    at_once = max(WARPS_AT_ONCE // (key_warps * tiles), 1)
    share = int(device.shared_bytes) // (at_once + 1) if splits == 1 else 0  # one block more does not fit
    meta, heads = a.meta, int(a.num_kv_heads)
    turned = (turn.qkv, table_of(device, turn, limits)) if turn else (None, None)
    return function.bind(
        lambda n: (splits, heads, meta.max_tiles(n)), 32 * key_warps * tiles, a.q, a.cache.keys, a.cache.values, meta.tiles,
        meta.num_tiles, a.row_slot, a.block_table, a.out, *turned,
        ROWS, a.block_table.shape[1], int(a.num_heads), heads, float(a.softmax_scale), few, shared=max(sums, ring, share) + 1024,
        cluster=splits if splits > 1 else None, dependent=True,
    )  # fmt: skip


def prefill_tiles(device: CudaDevice, a: Any, few: int = 0) -> Launch:
    """A block a tile of rows and two query heads of one key head; those of up to `few` rows are left out."""
    heads = 2 if a.num_heads // a.num_kv_heads % 2 == 0 else 1
    grouped = is_grouped(device, a)
    name, features = ("attention_prompt", {"arch_features": "a"}) if grouped else ("attention_prefill", {})
    function = device.function(
        source(f"{name}.cu"), name, HEAD_DIM=int(a.head_dim), HEADS=heads, BLOCK_GROUPS=int(a.block_size) // 16,
        **features, **quantised.window(a), **act(a.q.dtype),
    )  # fmt: skip
    meta, across = a.meta, int(a.num_heads) // heads
    operands = 4 + (heads if grouped else 0)  # of 64 rows: two steps of keys and values, and queries
    return function.bind(
        lambda n: (across, meta.max_tiles(n), 1), 128 * heads, a.q, a.cache.keys, a.cache.values, meta.tiles, meta.num_tiles,
        a.row_slot, a.block_table, a.out, ROWS, a.block_table.shape[1], int(a.num_heads), int(a.num_kv_heads),
        float(a.softmax_scale), *((few,) if grouped else ()), shared=operands * PREFILL_KEYS * a.head_dim * 2 + 1024,
        dependent=True,
    )  # fmt: skip


def prompts(device: CudaDevice, a: Any, limits: Limits) -> Launch:
    """Tiles of 64 rows, and those of few, such as windows that decode beside prompts, by the kernel of windows: as one of 64 rows
    each would take as long. A slot that is alone has nobody beside it."""
    whole = prefill_tiles(device, a)
    if not is_grouped(device, a):
        return whole
    meta, few = a.meta, limits.window
    sized = [(most, decode(device, a, limits, shape, few=few)) for most, shape in shapes_of(device, limits)]
    windows = by_clusters(a, sized, lambda n: min(n, meta.step.real_slots or limits.max_seqs))  # one of a slot
    apart = sequence(windows, prefill_tiles(device, a, few))

    def launch(stream: Stream, n: int) -> None:
        (whole if meta.step.real_slots == 1 else apart)(stream, n)

    return launch


def is_grouped(device: CudaDevice, a: Any) -> bool:
    """Whether prefill tiles are multiplied by warp groups."""
    return bool(device.arch == "sm_90" and a.head_dim in (64, 128))


def plain(device: CudaDevice, a: Any) -> Launch:
    """A block a row and query head."""
    function = device.function(
        source("attention_plain.cu"), "attention_plain", TILED=int(a.cache.tiled), **quantised.window(a), **act(a.q.dtype)
    )
    heads = int(a.num_heads)
    return function.bind(
        lambda n: (n, heads, 1), 128, a.q, a.cache.keys, a.cache.values, a.row_slot, a.positions, a.block_table, a.out,
        a.block_table.shape[1], heads, int(a.num_kv_heads), int(a.head_dim), int(a.block_size), float(a.softmax_scale),
        dependent=True,
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {"paged_attention": Kernel(paged_attention)}
