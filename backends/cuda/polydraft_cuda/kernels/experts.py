"""The products of experts: those of one row's choices, or over lists that the device makes, and their sum.

Nothing is sorted and nothing is counted on the host: lists of each expert's rows are made on the device, and persistent blocks
take tiles of whichever experts have rows. 16-bit weights of even sizes go through `experts_row.cu` and `experts_tile.cu` on
sm_90, and elsewhere, or where rows have to be invariant, through `experts_stream.cu`. Packed ones (`kernels/packed.py`) go
through `experts_tile.cu` on sm_90, few rows and many; anything else through plain kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from polydraft.contracts.base import Limits
from polydraft.device import DTYPES, Launch, Stream
from polydraft.errors import ContractError
from polydraft_cuda.compiler import ROWS, act, sequence
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.packed import (
    CudaPackedWeight,
    Rounded,
    place_rounded,
    product_defines,
    round_rows,
    rounded_bytes,
)
from polydraft_cuda.kernels.projections import TILE_ROWS, piece_bytes, piece_map, tensor_map
from polydraft_cuda.kernels.provider import Kernel, source

LIST_THREADS = 512
LIST_BLOCKS: Final = 2
"""Blocks of an expert that gather its rows."""
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
"""Sizes of `experts_tile.cu`: rows of one expert that a block multiplies at once. For the last, packed ones lack registers."""
SPREAD: Final = 1.5
"""Standard deviations by which the rows of an expert seldom exceed their mean."""
TILE_BYTES: Final = 200 << 10
"""Bytes of such a block, or of one of `experts_row.cu`, in flight. With half of them the blocks of two launches fit beside each
other: that is slower, by a tenth for one row and by up to two fifths for more."""
MOST_WIDTH: Final = 256
"""Rows of weights that a block multiplies at once with one row."""
MOST_CHOSEN: Final = 16
"""Experts of a row whose terms a thread has at once."""


class Sized(NamedTuple):
    """The products of experts for a launch of `most` rows at most."""

    most: int
    lists: Launch | None
    """Makes what `products` reads; one row wants none, unless it is rounded."""
    products: Launch


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
    (experts, both, hidden), places = a.gate_up.shape, a.expert_ids.shape[0] * a.expert_ids.shape[1]
    found = []
    for shape, dtype in (
        ((experts + 1,), "i32"), ((places,), "i32"), ((places, both // 2), a.x.dtype), ((places, _matrices(a) * hidden), "f32"),
        ((places, hidden), a.x.dtype),
    ):  # fmt: skip
        found.append(_Part(shape, dtype, pointer))
        pointer += found[-1].nbytes
    return tuple(found)


def _matrices(a: Any) -> int:
    """Leaves as which the down projection of each expert is given, side by side in its terms; else 1."""
    return int(a.down.shape[0]) // int(a.gate_up.shape[0])


class _Factors(NamedTuple):
    """One of the products: rows by a stack of matrices."""

    x: Any
    weight: Any


def _products(a: Any, h: _Part) -> tuple[_Factors, _Factors]:
    return _Factors(a.x, a.gate_up), _Factors(h, a.down)


def workspace_bytes(device: CudaDevice, a: Any, limits: Limits) -> int:
    """Lists, what is between the two products, the terms of every choice, and its row; and what rows are rounded to."""
    del device, limits
    return _place_rounded(a, _parts(a))[1]


def _rounded_bytes(a: _Factors) -> int:
    return -(-rounded_bytes(a) // 256) * 256


def _place_rounded(a: Any, parts: Sequence[_Part]) -> tuple[tuple[Rounded, Rounded, Rounded], int]:
    """Rows as they are multiplied: of x, of x in the order of the list, and of h; and where they end. Where they are rounded, the
    second have the place of the last part, and the others are behind it."""
    *_, h, _, rows = parts
    (up, down), listed = _products(a, h), _Factors(rows, a.gate_up)
    first = rows.pointer + max(rows.nbytes, _rounded_bytes(listed))
    second = first + _rounded_bytes(up)
    placed = place_rounded(up, first), place_rounded(listed, rows.pointer), place_rounded(down, second)
    return placed, second + _rounded_bytes(down)


def idle_at_first(a: Any, pointer: int = 0) -> tuple[int, int]:
    """Where the terms lie in a workspace at `pointer`, and their bytes: nobody touches them before the second product."""
    terms = _parts(a, pointer)[3]
    return terms.pointer, terms.nbytes


def is_packed(weight: Any) -> bool:
    """Whether a stack is packed."""
    return isinstance(weight, CudaPackedWeight)


def is_streamed(a: Any) -> bool:
    """Whether other kernels than plain ones take these experts."""
    even = a.x.dtype != "f32" and a.gate_up.shape[2] % 64 == 0 and a.down.shape[2] % 64 == 0
    return bool(even and all(weight.tiled for weight in (a.gate_up, a.down) if is_packed(weight)))


def expert_mlp(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """Lists, gate and up, down, sum. Raises `ContractError` for more experts than a block can list."""
    del limits
    return _summed(device, a, workspace, sizes(device, a, workspace))


def expert_leaves(device: CudaDevice, a: Any, limits: Limits, workspace: Any) -> Launch:
    """The same with the sums of all leaves side by side: each of its own terms of every expert, or of all terms of its own
    experts. Which products there are depends on the sizes of one leaf alone. Raises as `expert_mlp`."""
    del limits
    of_leaf = int(a.gate_up.shape[0]) // int(a.leaves) if a.split == "experts" else 0
    return _summed(device, a, workspace, sizes(device, a, workspace, invariant=True), of_leaf)


def _summed(device: CudaDevice, a: Any, workspace: Any, found: list[Sized], of_leaf: int = 0) -> Launch:
    """Products, and the sum of their terms: where there is `of_leaf`, of so many experts after the other."""
    terms, width = _parts(a, workspace.buffer.pointer)[3], int(a.out.shape[1])
    last = device.function(source("experts.cu"), "sum_experts", **act(a.out.dtype)).bind(
        lambda n: (n, -(-width // SUM_THREADS), 1), SUM_THREADS, terms, a.expert_ids, a.expert_weights, a.shared, a.shared_gate,
        a.out, int(a.expert_ids.shape[1]), terms.shape[1], width, of_leaf, dependent=True,
    )  # fmt: skip

    def launch(stream: Stream, n: int) -> None:
        if n > 0:
            one = fitting(found, n)
            for step in (one.lists, one.products, last):
                if step is not None:
                    step(stream, n)

    return launch


def is_row_wise(a: Any) -> bool:
    """Whether `sum_and_add` takes these experts."""
    return bool(is_streamed(a) and a.shared_gate is None and a.expert_ids.shape[1] <= MOST_CHOSEN and a.x.shape[1] <= 8 * 1024)


def sum_and_add(device: CudaDevice, a: Any, add: Any, normed: Any, workspace: Any) -> Launch:
    """The sum of `expert_mlp`, added to the stream, and the norm of that, if there is one; the sum by itself is not stored."""
    (_, hidden), chosen, terms = a.x.shape, int(a.expert_ids.shape[1]), _parts(a, workspace.buffer.pointer)[3]
    norm = (normed.weight, normed.out, hidden, float(normed.eps)) if normed else (None, None, hidden, 0.0)
    threads = -(-hidden // 256) * 32
    function = device.function(
        source("experts_sum.cu"), "sum_and_add", THREADS=threads, CHOSEN=chosen, SHARED=int(a.shared is not None),
        NORM=int(normed is not None), PLUS_ONE=int(normed is not None and normed.plus_one), **act(a.x.dtype),
    )  # fmt: skip
    return function.bind(lambda n: n, threads, terms, a.expert_ids, a.expert_weights, a.shared, add.x, *norm, dependent=True)


def fitting(found: Sequence[Sized], n: int) -> Sized:
    """The first that takes as many rows, or the last."""
    return next((one for one in found if n <= one.most), found[-1])


def sizes(device: CudaDevice, a: Any, workspace: Any, *, early: bool = False, invariant: bool = False) -> list[Sized]:
    """The products for every number of rows, with what they need. `early`: one launch or more stands between what makes lists and
    the products, which then fetch weights while it ends. `invariant`: a term does not depend on the number of rows, whatever the
    device promises. Raises `ContractError` for more experts than a block can list."""
    (experts, both, hidden), chosen = a.gate_up.shape, int(a.expert_ids.shape[1])
    if experts > MOST_EXPERTS:
        raise ContractError(f"experts of the cuda backend are {MOST_EXPERTS} at most, got {experts}")
    begins, entries, h, terms, _ = parts = _parts(a, workspace.buffer.pointer)
    (x, gathered, between), _ = _place_rounded(a, parts)
    of_x, of_h = _products(a, h)
    first = [] if x.scales is None else [round_rows(device, of_x, x)]
    middle = [] if between.scales is None else [round_rows(device, of_h, between, chosen)]

    def lists(to: Rounded | None) -> Launch:
        function = device.function(source("experts.cu"), "list_experts", **act("f32"))
        of_rows = (x.x, to.x, x.scales, to.scales, x.pitch, to.pitch) if to else (None, None, None, None, 0, 0)
        groups = to.scales.shape[0] if to and to.scales else 0
        return sequence(*first, function.bind(
            (experts, LIST_BLOCKS if to else 1, 1), LIST_THREADS, a.expert_ids, begins, entries, *of_rows, groups, ROWS, chosen,
            hidden // 8, dependent=True,
        ))  # fmt: skip

    packed, leaves, invariant = (is_packed(a.gate_up), is_packed(a.down)), _matrices(a), invariant or device.row_invariant
    tiled = device.arch == "sm_90" and (not invariant or all(packed))
    if not is_streamed(a) or (any(packed) and not tiled):
        up = _plain(device, a, x, a.gate_up, h, both // 2, gated=1)
        down = _plain(device, a, between, a.down, terms, hidden, leaves=leaves)
        return [Sized(1 << 30, None, sequence(*first, up, *middle, down))]
    if not tiled:
        found = []
        for size in INVARIANT if invariant else SIZES:
            up = _stream(device, a, size, a.x, a.gate_up, (begins, entries), h, both // 2, gated=1)
            down = _stream(device, a, size, h, a.down, (begins, entries), terms, hidden, leaves=leaves)
            found.append(Sized(_fitting(size.tokens, experts, chosen), lists(None), sequence(up, down)))
        return found

    def one_row(x: Rounded, weight: Any, out: _Part, outputs: int, *, gated: int = 0, early: bool = False) -> Launch:
        if is_packed(weight):
            return _tile(device, a, 0, x, weight, (a.expert_ids, None), out, outputs, gated=gated, early=early)
        return _row(device, a, x.x, weight, out, outputs, gated=gated, early=early)

    up, down = one_row(x, a.gate_up, h, both // 2, gated=1, early=early), one_row(between, a.down, terms, hidden)
    found = [Sized(1, sequence(*first) if first else None, sequence(up, *middle, down))]
    for tokens in TILE_TOKENS[:-1] if any(packed) else TILE_TOKENS:
        up = _tile(device, a, tokens, gathered, a.gate_up, (begins, entries), h, both // 2, gated=1, early=early)
        down = _tile(device, a, tokens, between, a.down, (begins, entries), terms, hidden)
        found.append(Sized(_fitting(tokens, experts, chosen), lists(gathered), sequence(up, *middle, down)))
    return found


def _fitting(tokens: int, experts: int, chosen: int) -> int:
    """Rows for which so many of one expert at once are enough: where all experts are as likely, one in some fifteen has more, and
    what it reads again comes from the second cache. A larger size would spend power on rows that are not there."""
    root = (math.sqrt(SPREAD**2 + 4 * tokens) - SPREAD) / 2  # of the mean m with m + SPREAD * sqrt(m) == tokens
    return max(tokens, int(root**2 * experts / chosen))


def _plain(
    device: CudaDevice, a: Any, x: Rounded, weight: Any, out: Any, outputs: int, *, gated: int = 0, leaves: int = 1
) -> Launch:
    chosen = int(a.expert_ids.shape[1])
    function = device.function(
        source("experts.cu"), "expert_plain", GATED=gated, PIECES=int(is_packed(weight) and weight.tiled),
        **product_defines(_Factors(x.x, weight)), **act(a.x.dtype),
    )  # fmt: skip
    return function.bind(
        lambda n: (n * chosen, -(-outputs // PLAIN_WARPS), leaves), PLAIN_WARPS * 32, x.x, weight, a.expert_ids, out,
        *_scales(x, weight), chosen, outputs, int(weight.shape[2]), dependent=True,
    )  # fmt: skip


def _scales(x: Rounded, weight: Any) -> tuple[Any, Any, Any, int]:
    """Scales and zero points of a packed stack, and scales of rows and their pitch, as kernels take them."""
    return (weight.scales, weight.zeros, x.scales, x.pitch) if is_packed(weight) else (None, None, None, 0)


def _stream(
    device: CudaDevice, a: Any, size: Size, x: Any, weight: Any, lists: Any, out: Any, outputs: int, *, gated: int = 0,
    leaves: int = 1,
) -> Launch:  # fmt: skip
    experts, inputs = int(weight.shape[0]) // leaves, int(weight.shape[2])
    chosen, step = int(a.expert_ids.shape[1]), 8 * size.tiles * (1 if gated else 2)
    tiles = -(-outputs // step)
    defines = {"TOKENS": size.tokens, "TILES": size.tiles, "WARPS": size.warps, "DEPTH": size.depth, "MIN_BLOCKS": MIN_BLOCKS}
    function = device.function(source("experts_stream.cu"), "expert_stream", GATED=gated, **defines, **act(a.x.dtype))
    most = -(-int(device.num_sms) * MIN_BLOCKS // leaves)
    return function.bind(
        lambda n: (min(most, min(experts, n * chosen) * tiles), leaves, 1), size.warps * 32, x, weight, *lists, out, chosen,
        experts, outputs, inputs, shared=size.warps * size.depth * size.tiles * CHUNK_BYTES, dependent=True,
    )  # fmt: skip


def _row(
    device: CudaDevice, a: Any, x: Any, weight: Any, out: Any, outputs: int, *, gated: int = 0, early: bool = False
) -> Launch:
    _, height, inputs = weight.shape
    chosen, width = (
        int(a.expert_ids.shape[1]),
        row_width(int(device.num_sms), int(height), int(a.expert_ids.shape[1]), 16 if gated else 8),
    )
    stage, tiles = (width + 8) * 128, -(-int(height) // width)
    stages = TILE_BYTES // stage
    function = device.function(
        source("experts_row.cu"), "expert_row", arch_features="a", WIDTH=width, STAGES=stages, GATED=gated, EARLY=int(early),
        **act(a.x.dtype),
    )  # fmt: skip
    return function.bind(
        chosen * tiles, 128 + 32, tensor_map(device, weight, width, paired=gated), tensor_map(device, x, 8), a.expert_ids, out,
        tiles, outputs, inputs, shared=stages * stage + 7 * 1024 + 1024, dependent=True,
    )  # fmt: skip


def row_width(num_sms: int, height: int, chosen: int, unit: int) -> int:
    """Rows of weights of a block for one row, a multiple of `unit`: so few that all blocks run at once, or as many times over as
    they have to."""
    times = -(-chosen * height // (num_sms * MOST_WIDTH))
    width = -(-chosen * height // (num_sms * times * unit)) * unit
    while width < MOST_WIDTH and chosen * -(-height // width) > num_sms * times:
        width += unit
    return width


def _tile(
    device: CudaDevice, a: Any, tokens: int, x: Rounded, weight: Any, lists: Any, out: Any, outputs: int, *, gated: int = 0,
    early: bool = False,
) -> Launch:  # fmt: skip
    """`tokens` 0: for one row alone, with choices in place of lists."""
    experts, height, inputs = weight.shape
    most, chosen, packed, alone = int(device.num_sms), int(a.expert_ids.shape[1]), is_packed(weight), not tokens
    rows, tokens = (row_width(most, int(height), chosen, 64), 8) if alone else (TILE_ROWS, tokens)
    tiles = -(-int(height) // rows)
    stage = 2 * (rows * piece_bytes(weight) + tokens * 128) if packed else (rows + tokens) * 128
    stages, groups = TILE_BYTES // stage, rows // 64
    crowded = packed and weight.packing.columns and tokens >= 64  # as the kernel has it
    threads = groups * 128 + (128 if crowded else 32)
    function = device.function(
        source("experts_tile.cu"), "expert_tile", arch_features="a", TOKENS=tokens, GROUPS=groups, STAGES=stages, GATED=gated,
        ALONE=int(alone), EARLY=int(early), **product_defines(_Factors(x.x, weight)), **act(a.x.dtype),
    )  # fmt: skip
    if packed:
        weights, of_x = piece_map(device, weight, rows, paired=bool(gated), chunks=2), tensor_map(device, x.x, tokens, chunks=2)
    else:
        weights, of_x = tensor_map(device, weight, rows, paired=8 * gated), tensor_map(device, x.x, tokens)
    return function.bind(
        lambda n: min(most, min(experts, n * chosen) * tiles), threads, weights, of_x, *lists, out,
        *_scales(x, weight), chosen, experts, outputs, inputs, shared=stages * stage + 1024, dependent=True,
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "expert_mlp": Kernel(expert_mlp, workspace_bytes),
    "expert_leaves": Kernel(expert_leaves, workspace_bytes),
}
