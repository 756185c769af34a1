"""Row-invariant variants of the few reference kernels whose bits would depend on the width or context of a launch.

The kernel table swaps them in when `row_invariant` is requested; the emulator computes in them. Here a product is always made of
tiles of one fixed shape and a sum is always taken in one fixed order, so a row's bits depend on that row alone, and those of an
output or a head on that output or head: a rank that keeps some of them computes the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.reference.experts import expert_leaves, expert_mlp
from polydraft.reference.forward_meta import KEY_CHUNK
from polydraft.reference.leaves import linear_leaves
from polydraft.reference.numeric_kernels import layout_of
from polydraft.reference.packed_weights import rounding
from polydraft.reference.provider import Kernel, Run

TILE_ROWS = 8
"""Rows of a product tile: 4 and 8 keep a row's bits on OpenBLAS with one and two threads, 16 and 32 do not."""
TILE_OUTPUTS = 12
"""Outputs of a product tile. Without one, OpenBLAS sums an output in another order where there are more or fewer beside it. Its
kernels for AVX2 take 12 outputs at once and sum those beyond a multiple of 12 in another order: in tiles of 32 an output's bits
depended on its place."""
ROW_BATCH = 32
"""Attention rows worked on together; bounds the gathered copy of their keys, and cannot touch their bits."""


def tiled_product(weight: Array, x: Array) -> Array:
    """x [n, I] @ weight.T in tiles of `TILE_ROWS` rows and `TILE_OUTPUTS` outputs, the last ones filled up with zeros."""
    outputs, inputs = weight.shape
    whole = outputs // TILE_OUTPUTS * TILE_OUTPUTS
    tiles, rest = weight[:whole].reshape(-1, TILE_OUTPUTS, inputs), None
    if whole < outputs:
        rest = np.zeros((TILE_OUTPUTS, inputs), np.float32)
        rest[: outputs - whole] = weight[whole:]
    out = np.empty((len(x), outputs), np.float32)
    rows = np.zeros((TILE_ROWS, inputs), np.float32)
    for start in range(0, len(x), TILE_ROWS):
        count = min(TILE_ROWS, len(x) - start)
        rows[:count] = x[start : start + count]
        rows[count:] = 0.0
        if whole:
            out[start : start + count, :whole] = np.matmul(tiles, rows.T).reshape(whole, TILE_ROWS).T[:count]
        if rest is not None:
            out[start : start + count, whole:] = np.matmul(rest, rows.T)[: outputs - whole].T[:count]
    return out


def linear(a: Any, limits: Limits) -> Run:
    """x @ W.T + b in tiles of rows."""
    del limits
    weight: Array = a.weight.array
    bias, rounded = None if a.bias is None else a.bias.array, rounding(a.weight.packing)

    def run(n: int) -> None:
        a.out[:n] = tiled_product(weight, rounded(a.x[:n]))
        if bias is not None:
            a.out[:n] += bias

    return run


def paged_attention(a: Any, limits: Limits) -> Run:
    """Each row over its own keys in chunks of `KEY_CHUNK`, chunk results added in order of position."""

    def run(n: int) -> None:
        layout = layout_of(a, n, limits)
        out = a.out[:n]
        out[...] = 0.0
        for segment in layout.segments_within(a.sliding_window):
            runs = np.repeat(np.arange(len(segment.rows)), segment.rows.shape[1])[segment.flat_places]
            visible = segment.visible.reshape(-1, segment.visible.shape[-1])[segment.flat_places]
            for start in range(0, len(segment.flat_rows), ROW_BATCH):
                batch = slice(start, start + ROW_BATCH)
                rows = segment.flat_rows[batch]
                out[rows] = attend_rows(a, a.q[rows], segment.keys[runs[batch]], visible[batch])

    return run


def attend_rows(a: Any, q: Array, keys: Array, visible: Array) -> Array:
    """q [r, heads * dim], flat cache rows `keys` [r, C], `visible` [r, C] -> [r, heads * dim]."""
    rows, kv_heads, dim = len(q), a.num_kv_heads, a.head_dim
    chunks = -(-keys.shape[1] // KEY_CHUNK)
    # An invisible key is replaced by the first that the row sees: its weight is an exact zero, and no poison reaches the sums.
    seen = np.zeros((rows, chunks * KEY_CHUNK), bool)
    seen[:, : keys.shape[1]] = visible
    first = keys[np.arange(rows), visible.argmax(axis=1)][:, None]
    used = np.repeat(first, chunks * KEY_CHUNK, axis=1)
    np.copyto(used[:, : keys.shape[1]], keys, where=visible)
    gathered = a.cache.kv[:, :, used].reshape(2, kv_heads, rows, chunks, KEY_CHUNK, dim)
    q = np.ascontiguousarray(q.reshape(rows, kv_heads, -1, dim).transpose(1, 0, 2, 3))
    scores = np.stack([_of_each_head(q, gathered[0, :, :, c].swapaxes(-1, -2)) for c in range(chunks)], axis=2)
    scores *= a.softmax_scale
    np.copyto(scores, -np.inf, where=~seen.reshape(1, rows, chunks, 1, KEY_CHUNK))
    scores -= scores.max(axis=(2, 4), keepdims=True)
    np.exp(scores, out=scores)
    partial = scores.sum(axis=-1)
    total, mixed = partial[:, :, 0].copy(), _of_each_head(scores[:, :, 0], gathered[1, :, :, 0])
    for c in range(1, chunks):
        total += partial[:, :, c]
        mixed += _of_each_head(scores[:, :, c], gathered[1, :, :, c])
    mixed /= total[..., None]
    result: Array = mixed.transpose(1, 0, 2, 3).reshape(rows, -1)
    return result


def _of_each_head(x: Array, matrix: Array) -> Array:
    """x [kv_heads, r, G, M] times matrix [kv_heads, r, M, O] -> [kv_heads, r, G, O], by one product for each of the G query
    heads: how many share a key-value head differs where ranks keep heads."""
    product: Array = np.matmul(x[..., None, :], matrix[:, :, None])
    return product[..., 0, :]


KERNELS: dict[str, Kernel] = {
    "linear": linear,
    "linear_leaves": linear_leaves(tiled_product),
    "paged_attention": paged_attention,
    "expert_mlp": expert_mlp(tiled_product),
    "expert_leaves": expert_leaves(tiled_product),
}
