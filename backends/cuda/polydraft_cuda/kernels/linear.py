"""Chooses the kernel of a projection by its shape and the number of rows.

With few rows the speed is that of reading the weights from memory. On sm_90 they are streamed into warp-group products: by
`linear_rows` where outputs divide evenly among the multiprocessors, by `linear_pair` where outputs are few, by `linear_split`
where rows are more, and by `linear_tile` otherwise. `linear_stream` takes small matrices and other architectures. Many rows go to
cuBLASLt. What none of them accepts (float32, odd sizes) goes to `linear_plain`. In row-invariant mode every number of rows takes
the same sums, those in the order of the inputs, and so does every number of outputs: a rank has the bits of its outputs. Packed
weights are multiplied by `linear_tile` as they are, whatever the number of rows, or by `linear_plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Launch, Stream
from polydraft_cuda import cublaslt
from polydraft_cuda.compiler import sequence
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import norms, screen
from polydraft_cuda.kernels.mlp import swiglu
from polydraft_cuda.kernels.packed import Rounded, is_eight, packing_of, place_rounded, round_rows, rounded_bytes
from polydraft_cuda.kernels.projections import (
    MOST_STAGES,
    PAIR_ROWS,
    PAIR_STAGES,
    TILE_ROWS,
    TILE_WARPS,
    Parts,
    Size,
    Split,
    num_blocks,
    pair,
    parts,
    parts_bytes,
    plain,
    prompt,
    rows,
    rows_of,
    split,
    stream,
    tile,
    tiles_of,
)
from polydraft_cuda.kernels.provider import Kernel
from polydraft_cuda.kernels.routing import is_router, router
from polydraft_cuda.kernels.sampling import argmax, argmax_among

SIZES: tuple[Size, ...] = (Size(8, 1, 7), Size(16, 1, 7), Size(32, 2, 6), Size(64, 2, 8), Size(128, 2, 6), Size(256, 2, 4))
INVARIANT: tuple[Size, ...] = (Size(16, 2, 7), Size(32, 2, 6), Size(64, 2, 8), Size(128, 2, 6), Size(256, 2, 4))
"""Where a row's sums must not depend on the number of rows: one division of the work. A multiprocessor has room for one block of
any of them, so that as many clusters run at once in each."""
MOST_GROUPED_ROWS: Final = 128
"""Of a launch, where scales are of groups of inputs."""
MOST_TILE_ROWS = 64
"""More rows than this are faster by cuBLASLt, where blocks have to share tiles; small matrices from the half of it on."""
WIDE_SHARE: tuple[tuple[int, int], ...] = ((8, 1), (16, 1), (32, 2), (64, 2), (128, 2))
NARROW_SHARE: tuple[tuple[int, int], ...] = ((8, 1), (32, 2))
"""Sizes of `linear_rows` where a block has many outputs, and where it has few: rows of a launch at most, blocks of a cluster."""
SPLIT_SIZES: tuple[tuple[int, int], ...] = ((32, 2), (64, 2), (128, 1))
"""Sizes of `linear_split` for two blocks a tile: rows of a launch at most, and chunks of a stage."""
SPLIT_BYTES = 205 << 10
"""Bytes of such a block in flight at most."""
GATED = Split(256, 0, 1, 4, 1)
"""The size of `linear_split` for gate and up where a block has many outputs; its width is a block's even share."""
FEWER: Final = 192
"""Rows of a launch at most in which it takes fewer, 64 to a warp group."""
LEAST_GATED: Final = 80
"""Outputs of a block from which on that is faster for gate and up than two launches."""
PARTS: tuple[Parts, ...] = (Parts(192, 5),)
EIGHT_PARTS: tuple[Parts, ...] = (Parts(128, 6), Parts(256, 4))
"""Rows of a launch of `linear_parts` at most, and chunks in flight, also where E4M3 is multiplied by E4M3."""
MOST_PARTS: Final = 4
"""Blocks that have a tile of it."""
LEAST_BUSY, LEAST_BUSY_EIGHT = 0.9, 0.7
"""Share of the multiprocessors' time that it must have work for, so that it is faster than others."""
LEAST_ROWS, LEAST_ROWS_EIGHT = 128, 64
"""Rows up to which others are faster."""
LEAST_INPUTS: Final = 8192
"""Inputs of such a projection at least, where weights are not packed."""
ORDER_SIZES: tuple[tuple[int, int], ...] = ((8, 2), *SPLIT_SIZES)
"""Sizes of `linear_split` where a block takes all inputs of its outputs in order: rows of a launch at most, and chunks of a
stage."""
ORDER_ROWS: Final = 128
"""Rows of such a block in which a large number of them is taken."""
ORDER_BYTES: Final = 224 << 10
"""Bytes of shared memory of such a block at most."""
LEAST_PROMPT_ROWS = 4096
"""Rows from which on gate, up and their activation are faster by `linear_prompt` than by cuBLASLt and a launch behind it."""
STREAM_TOKENS: Final = (8, 16)
SMALL: Final = 12 << 20
"""Bytes of a matrix up to which `linear_stream` is faster: nothing has to be summed over blocks."""


def is_tiled(device: CudaDevice, a: Any) -> bool:
    """Whether `linear_tile` takes this projection."""
    if packing_of(a):
        return bool(a.weight.tiled)
    return bool(device.arch == "sm_90" and a.x.dtype != "f32" and a.weight.shape[1] % 64 == 0)


def is_whole(device: CudaDevice, a: Any) -> bool:
    """Whether weights lie on sm_90 as matrices of 16 bits, of which several kernels take boxes."""
    return is_tiled(device, a) and packing_of(a) is None


def is_streamed(a: Any) -> bool:
    """Whether `linear_stream` takes this projection."""
    outputs, inputs = a.weight.shape
    return bool(a.x.dtype != "f32" and inputs % 64 == 0 and outputs % 16 == 0 and packing_of(a) is None)


def pair_sizes(device: CudaDevice, a: Any) -> tuple[int, ...]:
    """Sizes in which `linear_pair` takes this projection: all where its clusters run at once, the narrowest where half of them
    come in a second wave."""
    outputs, inputs = a.weight.shape
    blocks = 2 * -(-outputs // PAIR_ROWS)
    if not is_whole(device, a) or inputs % 128 or 2 * blocks > 3 * device.num_sms:
        return ()
    return tuple(PAIR_STAGES) if blocks <= device.num_sms else (min(PAIR_STAGES),)


def split_sizes(device: CudaDevice, a: Any) -> tuple[Split, ...]:
    """Sizes in which `linear_split` takes this projection: where two blocks can have an even share of the outputs."""
    width = width_of(device, a)
    if not is_whole(device, a) or a.weight.nbytes <= SMALL or a.weight.shape[0] % 8 or not 32 <= width <= 128:
        return ()
    return tuple(Split(n, width, chunks, SPLIT_BYTES // (chunks * (width + n) * 128), 2) for n, chunks in SPLIT_SIZES)


def parts_sizes(device: CudaDevice, a: Any) -> tuple[Parts, ...]:
    """Sizes in which `linear_parts` takes this projection: where nearly all multiprocessors have work until it ends."""
    (outputs, inputs), eight = a.weight.shape, is_eight(a) and not a.weight.packing.columns
    taken = eight or (is_whole(device, a) and inputs >= LEAST_INPUTS)
    if not taken or device.row_invariant or a.weight.nbytes <= SMALL or outputs % 8 or a.out.dtype != a.x.dtype:
        return ()
    whole, left = divmod(tiles_of(a), int(device.num_sms))
    blocks = min(MOST_PARTS, int(device.num_sms) // left, inputs // 128) if left else 0  # each has a chunk at least
    sizes, least = (EIGHT_PARTS, LEAST_BUSY_EIGHT) if eight else (PARTS, LEAST_BUSY)
    if blocks < 2 or tiles_of(a) < least * device.num_sms * (whole + 1 / blocks):
        return ()
    return tuple(size._replace(whole=whole, blocks=blocks) for size in sizes)


def with_parts(
    device: CudaDevice, a: Any, workspace: Any, usual: Launch, *, gated: Any = None, rounded: Rounded | None = None,
    before: Sequence[Launch] = (),
) -> Launch:  # fmt: skip
    """`linear_parts` behind `before` for the numbers of rows in which it is faster, and the `usual` launch for all others."""
    launches = [
        (size.rows, sequence(*before, parts(device, a, workspace, size, gated, rounded))) for size in parts_sizes(device, a)
    ]
    least = LEAST_ROWS if packing_of(a) is None else LEAST_ROWS_EIGHT
    return by_rows([(least, usual), *launches, (1 << 30, usual)]) if launches else usual


def is_wide(device: CudaDevice, a: Any) -> bool:
    """Whether blocks of `linear_rows` have so many outputs that sums are taken in the order of the inputs."""
    return bool(rows_sizes(device, a)) and rows_of(device, a) > 64 and int(a.weight.shape[0]) % 16 == 0


def in_order(device: CudaDevice, a: Any, workspace: Any) -> Launch:
    """The launch where rows are invariant: the sum of an output is taken in the order of the inputs. It is the same whichever
    kernel takes it, so the number of rows, and that of outputs beside it, may choose."""
    if a.weight.shape[0] % 8 or has_own_tiles(device, a):
        return tiles(device, a, workspace, INVARIANT)
    if is_wide(device, a):
        return by_rows([*wide_in_order(device, a), (1 << 30, wide_split(device, a))])
    return by_rows(split_in_order(device, a))


def wide_in_order(device: CudaDevice, a: Any, gated: Any = None) -> list[tuple[int, Launch]]:
    """Launches of `linear_rows`, and the rows that they take."""
    return [(tokens, one) for tokens, cluster in rows_sizes(device, a) if (one := rows(device, a, tokens, cluster, gated))]


def wide_split(device: CudaDevice, a: Any, gated: Any = None) -> Launch:
    """The launch of `linear_split` that takes more rows than those."""
    launch = split(device, a, GATED._replace(width=rows_of(device, a, 8), order=1), gated)
    assert launch is not None, "no block waits for another"
    return launch


def split_in_order(device: CudaDevice, a: Any, leaves: int = 1, *, added: bool = False) -> list[tuple[int, Launch]]:
    """Launches of `linear_split` and the rows that they take. `leaves`: so many products of the matrices of a weight. A block has
    all inputs of its outputs of one of them; of leaves that are `added` those of all, or of half of them with few rows."""
    outputs, width = int(a.weight.shape[-2]), width_of(device, a)
    across, blocks = outputs if added else leaves * outputs, 2 if added and leaves > 1 and width <= TILE_ROWS else 1
    sizes = [(n, _in_order(n, _even(device, across) if blocks == 1 else width, chunks, blocks)) for n, chunks in ORDER_SIZES]
    sizes.append((2 * ORDER_ROWS, _in_order(ORDER_ROWS, _even(device, 2 * across), 1)))
    sizes.append((1 << 30, _in_order(ORDER_ROWS, TILE_ROWS, 1)))
    return [(n, one) for n, size in sizes if (one := split(device, a, size, leaves=leaves, added=added))]


def _in_order(rows: int, width: int, chunks: int, blocks: int = 1) -> Split:
    """A size of `linear_split` with as much in flight as there is room for."""
    given = 2 * width * max(rows, 64) if blocks > 1 else 0
    inflight = ORDER_BYTES - given - max(64 - rows, 0) * 128
    return Split(rows, width, chunks, min(inflight // (chunks * (width + rows) * 128), MOST_STAGES), blocks, 1)


def _even(device: CudaDevice, height: int) -> int:
    """Outputs of a block, in 8s and no more than a tile has, where `height` of them are shared out evenly."""
    times = -(-height // (TILE_ROWS * int(device.num_sms)))
    return -(-height // (8 * times * int(device.num_sms))) * 8


def width_of(device: CudaDevice, a: Any) -> int:
    """Outputs, in 16s, of which half of the multiprocessors have an even share."""
    return -(-int(a.weight.shape[-2]) // (16 * (int(device.num_sms) // 2))) * 16


def workspace_bytes(device: CudaDevice, a: Any, limits: Limits) -> int:
    """Shares of tiles, or cuBLASLt's scratch; behind them rows that are rounded."""
    del limits
    return 0 if is_router(a) else _shares_bytes(device, a) + rounded_bytes(a)


def _shares_bytes(device: CudaDevice, a: Any) -> int:
    if not is_tiled(device, a):
        return cublaslt.WORKSPACE if uses_library(a) else 0
    shares = max(num_blocks(device, a, size.cluster) * size.rows for size in sizes_of(device, a))
    left = max((parts_bytes(device, a, size) for size in parts_sizes(device, a)), default=0)
    return max(shares * TILE_ROWS * 4, left, cublaslt.WORKSPACE if uses_library(a) else 0)


def rounding(device: CudaDevice, a: Any, workspace: Any) -> tuple[Rounded, list[Launch]]:
    """The rows of a projection as it multiplies them, and the launches that make them."""
    found = place_rounded(a, workspace.buffer.pointer + _shares_bytes(device, a) if rounded_bytes(a) else 0)
    return found, [round_rows(device, a, found)] if found.scales else []


def tile_rows(device: CudaDevice, a: Any) -> int:
    """Rows of a launch of `linear_tile` at most, where there is cuBLASLt as well."""
    if has_own_tiles(device, a) or packing_of(a):
        return max(size.rows for size in sizes_of(device, a))
    return MOST_TILE_ROWS // 2 if a.weight.nbytes <= SMALL else MOST_TILE_ROWS


def has_own_tiles(device: CudaDevice, a: Any) -> bool:
    """Whether there are so many outputs that blocks seldom share a tile."""
    return bool(a.weight.shape[0] >= 4 * TILE_ROWS * device.num_sms)


def sizes_of(device: CudaDevice, a: Any) -> tuple[Size, ...]:
    """Sizes of `linear_tile` on this device. Sums of groups want registers beside those of all."""
    sizes, packing = INVARIANT if device.row_invariant else SIZES, packing_of(a)
    return tuple(size for size in sizes if size.rows <= MOST_GROUPED_ROWS) if packing and packing.columns else sizes


def uses_library(a: Any) -> bool:
    """Whether cuBLASLt may take this projection: it wants 16-byte rows, and no packed ones."""
    outputs, inputs = a.weight.shape
    whole = packing_of(a) is None and inputs % 8 == 0 and outputs % 8 == 0
    return bool(whole and a.x.dtype != "f32" and cublaslt.library() is not None)


def linear(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """Bind the kernels that this shape can use, and choose among them by the number of rows."""
    del limits
    if is_router(a):
        return router(device, a)
    return product(device, a, workspace, *rounding(device, a, workspace))


def is_gated(device: CudaDevice, a: Any) -> bool:
    """Whether this projection and the gated activation of what it writes are faster as one launch: for few rows, where the second
    launch is what it costs."""
    big = is_tiled(device, a) and a.weight.nbytes > SMALL and a.weight.shape[0] % 16 == 0 and a.bias is None
    return big and (not device.row_invariant or is_wide(device, a))


def gated(device: CudaDevice, args: Any, limits: Limits, workspace: Any, *, fetched: Any = None) -> Launch:
    """Gate, up and their activation: one launch for few rows, else two. `fetched`: as in `rows`."""
    del limits
    a, activation = args.parts
    return gated_product(device, a, activation, workspace, *rounding(device, a, workspace), fetched=fetched)


def gated_product(
    device: CudaDevice, a: Any, activation: Any, workspace: Any, rounded: Rounded, before: Sequence[Launch], *,
    fetched: Any = None,
) -> Launch:  # fmt: skip
    """The same of rows that are `rounded`, by the launches `before` it."""
    out, sizes = activation.out, rows_sizes(device, a)
    apart = sequence(product(device, a, workspace, rounded, before), swiglu(device, activation, None, None))
    if device.row_invariant:
        return by_rows([*wide_in_order(device, a, out), (GATED.rows, wide_split(device, a, out)), (1 << 30, apart)])
    steps = [(tokens, one) for tokens, cluster in sizes if (one := rows(device, a, tokens, cluster, out, fetched))]
    if steps:
        steps += [(size.rows, one) for size in gated_splits(device, a) if (one := split(device, a, size, out))]
    taken = max((tokens for tokens, _ in steps), default=0)
    steps += [(size.rows, one) for size in split_sizes(device, a) if size.rows > taken and (one := split(device, a, size, out))]
    if not steps:
        most = tile_rows(device, a)
        joined = tiles(device, a, workspace, sizes_of(device, a), most=most, gated=out, rounded=rounded)
        steps = [(most, sequence(*before, joined))]
        usual = by_rows([*steps, (1 << 30, apart)])
        return with_parts(device, a, workspace, usual, gated=out, rounded=rounded, before=before)
    steps.append((LEAST_PROMPT_ROWS - 1 if is_whole(device, a) else 1 << 30, apart))
    return by_rows([*steps, (1 << 30, prompt(device, a, out))] if is_whole(device, a) else steps)


def gated_splits(device: CudaDevice, a: Any) -> tuple[Split, ...]:
    """Sizes in which `linear_split` takes gate and up with more rows than `linear_rows` does, a block each."""
    share, width = rows_of(device, a), rows_of(device, a, 8)
    if share >= 128:
        return tuple(GATED._replace(rows=n, width=width) for n in (FEWER, GATED.rows))
    sizes = SPLIT_SIZES[1:] if share >= LEAST_GATED else ()
    return tuple(Split(n, width, chunks, SPLIT_BYTES // (chunks * (width + n) * 128), 1) for n, chunks in sizes)


def is_rounded(device: CudaDevice, normed: Any, a: Any) -> bool:
    """Whether a norm can round its rows for the projection behind it, and nobody else wants them otherwise: where a block has
    them in registers."""
    packing = packing_of(a)
    return bool(packing and packing.activations and is_tiled(device, a) and norms.is_kept(normed))


def behind_norm(device: CudaDevice, args: Any, limits: Limits, workspace: Any, *, early: bool = False) -> Launch:
    """A norm, behind a residual addition or not, and the projection of its rows, with its activation or not. The norm rounds its
    rows, `early` as `norms.add_and_norm_early` does."""
    del limits
    *front, a, activation = args.parts if hasattr(args.parts[-1], "gate_up") else (*args.parts, None)
    normed, y = front[-1], front[0].y if len(front) > 1 else None
    rounded = place_rounded(a, workspace.buffer.pointer + _shares_bytes(device, a))
    before = norms.rounded(device, normed, y, a, rounded, early=early)
    if activation is None:
        return sequence(before, product(device, a, workspace, rounded, ()))
    return sequence(before, gated_product(device, a, activation, workspace, rounded, ()))


def is_chosen_from(device: CudaDevice, a: Any) -> bool:
    """Whether the choice of each row's highest output is faster without writing outputs: those of a large head, whose blocks have
    tiles of their own."""
    return is_tiled(device, a) and has_own_tiles(device, a) and bool(a.out.dtype == "f32")


def chosen(device: CudaDevice, args: Any, limits: Limits, workspace: Any, *, looks: int = 0, keeps: bool = False) -> Launch:
    """A head and the choice of each row's highest output, of an unpadded vocabulary, as `kept_choices` has it. Many rows are two
    launches that write logits."""
    a, _, choice = args.parts
    apart = sequence(linear(device, a, limits, workspace), argmax(device, choice, limits, None))
    return by_rows([*kept_choices(device, a, choice, workspace, looks=looks, keeps=keeps), (1 << 30, apart)])


def kept_choices(
    device: CudaDevice, a: Any, choice: Any, workspace: Any, *, looks: int = 0, keeps: bool = False
) -> list[tuple[int, Launch]]:
    """Launches of a head that leave an argmax's choice (or its `Keys`), by the rows that they take at most; logits are written
    where it `keeps` them. Every warp keeps the best of its own (value and id, [warps, rows, 2]), and those are looked at.
    `looks`: rows of a launch at most whose bytes are looked at first, where the weight has some, and the rest runs only where
    that has given up."""
    most, sizes = min(int(a.x.shape[0]), tile_rows(device, a)), sizes_of(device, a)
    rounded, before = rounding(device, a, workspace)
    looks = looks if looks and screen.screen_of(device, a) is not None else 0
    steps: list[tuple[int, Launch]] = []
    for size in (size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1].rows < most):
        first, state = [], None
        if size.rows <= looks:
            launch, looked = screen.look(device, a, choice.row_slot, size)
            first, state = [launch, screen.choose(device, choice, looked)], a.weight.screen.state
        best = device.empty("linear.best", (int(device.num_sms) * TILE_WARPS, size.rows, 2), "f32")
        device.load(best, np.full(best.shape, -np.inf, np.float32))  # warps of blocks that are not launched
        keep = tile(device, a, workspace, size, 0, best=best, keeps=keeps, state=state, rounded=rounded)
        steps.append((min(size.rows, most), sequence(*before, *first, keep, argmax_among(device, choice, best, state))))
    return steps


def screened(device: CudaDevice, args: Any, limits: Limits, workspace: Any) -> Launch:
    """`chosen` by a look at the weight's bytes. Its products are summed in another order, so that where rows have to be invariant
    no text is chosen by it."""
    return chosen(device, args, limits, workspace, looks=screen.MOST_ROWS)


def kept(device: CudaDevice, args: Any, limits: Limits, workspace: Any) -> Launch:
    """`chosen` where somebody reads the outputs afterwards."""
    return chosen(device, args, limits, workspace, keeps=True)


def product(device: CudaDevice, a: Any, workspace: Any, rounded: Rounded, before: Sequence[Launch]) -> Launch:
    """The launch that takes any number of rows, which are `rounded` by the launches `before` it."""
    scratch = 0 if workspace is None else workspace.buffer.pointer
    if packing_of(a):
        tiled = is_tiled(device, a)
        usual = tiles(device, a, workspace, sizes_of(device, a), rounded=rounded) if tiled else plain(device, a, rounded)
        return with_parts(device, a, workspace, sequence(*before, usual), rounded=rounded, before=before)
    if device.row_invariant:
        return in_order(device, a, workspace) if is_tiled(device, a) else plain(device, a)
    steps: list[tuple[int, Launch]] = []  # most rows, launch
    if is_streamed(a) and (a.weight.nbytes <= SMALL or not is_tiled(device, a)):
        steps += [(tokens, stream(device, a, tokens)) for tokens in STREAM_TOKENS]
    steps += [(tokens, one) for tokens, cluster in rows_sizes(device, a) if (one := rows(device, a, tokens, cluster))]
    evenly = max((tokens for tokens, _ in steps), default=0)
    splits = [size for size in split_sizes(device, a) if size.rows > evenly]
    steps += [(size.rows, one) for size in splits if (one := split(device, a, size))]
    steps += [(tokens, pair(device, a, tokens)) for tokens in pair_sizes(device, a) if tokens not in dict(steps)]
    many = cublaslt.bind(device, a.x, a.weight, a.bias, a.out, scratch) if uses_library(a) else None
    if is_tiled(device, a):
        most, taken = tile_rows(device, a) if many else 1 << 30, max((tokens for tokens, _ in steps), default=0)
        left = tuple(size for size in SIZES if size.rows > taken)
        if taken < most:
            steps.append((most, tiles(device, a, workspace, left or SIZES[-1:], most=most)))
    steps.append((1 << 30, many or plain(device, a)))
    return with_parts(device, a, workspace, by_rows(sorted(steps, key=lambda step: step[0])))


def by_rows(steps: list[tuple[int, Launch]]) -> Launch:
    """The first launch that takes as many rows."""

    def launch(stream: Stream, n: int) -> None:
        for most, one in steps:
            if 0 < n <= most:
                one(stream, n)
                return

    return launch


def tiles(
    device: CudaDevice, a: Any, workspace: Any, sizes: tuple[Size, ...], *, most: int = 1 << 30, gated: Any = None,
    rounded: Rounded | None = None,
) -> Launch:  # fmt: skip
    """`linear_tile` in the narrowest size that takes all rows, or in several launches of the widest."""
    most = min(a.x.shape[0], most)
    needed = [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1].rows < most]
    narrow = [(size.rows, tile(device, a, workspace, size, 0, gated, rounded=rounded)) for size in needed]
    widest = needed[-1]
    firsts = () if gated else range(widest.rows, most, widest.rows)
    wide = [tile(device, a, workspace, widest, first, rounded=rounded) for first in firsts]

    def launch(stream: Stream, n: int) -> None:
        if n <= 0:
            return
        next((one for tokens, one in narrow if n <= tokens), narrow[-1][1])(stream, n)
        for i, one in enumerate(wide):
            if n <= (i + 1) * widest.rows:
                break
            one(stream, n)

    return launch


def rows_sizes(device: CudaDevice, a: Any) -> tuple[tuple[int, int], ...]:
    """Sizes in which `linear_rows` takes this projection."""
    share = rows_of(device, a)
    if not is_whole(device, a) or a.weight.nbytes <= SMALL or not 32 <= share <= 192:
        return ()
    return WIDE_SHARE if share >= 128 else NARROW_SHARE if share >= 40 else ()


KERNELS: dict[str, Kernel] = {"linear": Kernel(linear, workspace_bytes)}
