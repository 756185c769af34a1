"""The float kernels of the reference backend in plain vectorised NumPy, each bound once to its arrays.

The kernel table lists them; `invariant_kernels` replaces the few whose bits depend on the width of a launch. No golden is called:
these are an implementation, the goldens are the definition.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.rope_kv_write import turns
from polydraft.device import Array
from polydraft.reference.forward_meta import Layout, Segment, build_layout
from polydraft.reference.kv_grid import to_grid
from polydraft.reference.packed_weights import rounding
from polydraft.reference.provider import Kernel, Run, plain
from polydraft.reference.sampling import argmax, gumbel_noise, noise_and_sample, process_logits, sample

GEMV_ROWS = 2
"""Up to this many rows, one matrix-vector product a row beats a matrix product of so few columns (bench/gemm_layouts.py)."""
GEMM_DIRECT_ROWS = 48
"""From this many rows on, `x @ W.T` beats `(W @ x.T).T` on OpenBLAS (bench/gemm_layouts.py)."""


def embed(a: Any, n: int) -> None:
    """Look rows up; negative ids give zero rows."""
    ids = a.ids[:n]
    np.take(a.weight.array, ids, axis=0, mode="clip", out=a.out[:n])
    a.out[:n][ids < 0] = 0.0


def norm_rows(x: Array, weight: Array, eps: float, plus_one: bool, out: Array) -> None:
    """RMSNorm over the last axis into `out`."""
    scale = np.add.reduce(np.square(x), axis=-1, keepdims=True)  # `mean` takes longer for one row than all of this
    scale /= x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    np.divide(x, scale, out=out)
    out *= 1.0 + weight if plus_one else weight


def rms_norm(a: Any, n: int) -> None:
    """RMSNorm."""
    norm_rows(a.x[:n], a.weight.array, a.eps, a.plus_one, a.out[:n])


def residual_add(a: Any, n: int) -> None:
    """x += y."""
    a.x[:n] += a.y[:n]


def add_and_norm(a: Any, n: int) -> None:
    """Composite `residual_add+rms_norm`."""
    add, norm = a.parts
    residual_add(add, n)
    rms_norm(norm, n)


def linear(a: Any, limits: Limits) -> Run:
    """x @ W.T + b. Few rows go through `W @ x.T`, which OpenBLAS does up to twice as fast."""
    del limits
    weight: Array = a.weight.array
    bias = None if a.bias is None else a.bias.array
    transposed, rounded = weight.T, rounding(a.weight.packing)

    def run(n: int) -> None:
        out, x = a.out[:n], rounded(a.x[:n])
        if n <= GEMV_ROWS:
            for row in range(n):
                np.matmul(weight, x[row], out=out[row])
            if bias is not None:
                out += bias
        elif n >= GEMM_DIRECT_ROWS:
            np.matmul(x, transposed, out=out)
            if bias is not None:
                out += bias
        elif bias is None:
            out[...] = np.matmul(weight, x.T).T
        else:
            np.add(np.matmul(weight, x.T).T, bias, out=out)

    return run


_ROPE_TABLES: WeakValueDictionary[tuple[Any, ...], Array] = WeakValueDictionary()
"""Both tables of `rope_tables` in one array, of which they are views, while somebody has them."""


def rope_tables(a: Any, max_len: int) -> tuple[Array, Array]:
    """Factors [max_len, 1, head_dim] float32 of an element and of its partner in the pair; elements that do not rotate have
    factors 1 and 0. Layers that turn alike share them while one of them is bound, so nobody may write them."""
    key = tuple(a.frequencies), a.attention_factor, a.style, a.head_dim, max_len
    both = _ROPE_TABLES.get(key)
    if both is None:
        cos, sin = turns(a, max_len)
        both = np.zeros((2, max_len, 1, a.head_dim), np.float32)
        own, partner = both
        own[...] = 1
        first, second = pair_slices(len(a.frequencies), a.style)
        own[:, 0, first] = own[:, 0, second] = cos
        partner[:, 0, first], partner[:, 0, second] = -sin, sin
        _ROPE_TABLES[key] = both  # not before: ranks may bind in threads
    return both[0], both[1]


def pair_slices(pairs: int, style: str) -> tuple[slice, slice]:
    """First and second elements of the rotation pairs."""
    if style == "half":
        return slice(0, pairs), slice(pairs, 2 * pairs)
    return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)


def rope_kv_write(a: Any, limits: Limits) -> Run:
    """Rotate q and k, keep q, write k and v to the paged cache."""
    heads, kv_heads, dim = a.num_heads, a.num_kv_heads, a.head_dim
    own, partner = rope_tables(a, limits.max_len)
    first, second = pair_slices(len(a.frequencies), a.style)
    quantised = a.cache.spec.kv

    def run(n: int) -> None:
        qkv = a.qkv[:n].reshape(n, heads + 2 * kv_heads, dim)
        qk = qkv[:, : heads + kv_heads]
        if a.q_norm is not None:
            qk = qk.copy()
            norm_rows(qk[:, :heads], a.q_norm.array, a.eps, False, qk[:, :heads])
            norm_rows(qk[:, heads:], a.k_norm.array, a.eps, False, qk[:, heads:])
        positions = a.positions[:n]
        swapped = qk.copy()
        swapped[..., first], swapped[..., second] = qk[..., second], qk[..., first]
        swapped *= partner[positions]
        qk = qk * own[positions]
        qk += swapped
        a.q_out[:n] = qk[:, :heads].reshape(n, heads * dim)
        layout = layout_of(a, n, limits)
        k, v = qk[:, heads:], qkv[:, heads + kv_heads :]
        if len(layout.valid) < n:
            a.q_out[:n][a.row_slot[:n] < 0] = 0.0
            k, v = k[layout.valid], v[layout.valid]
        kv = a.cache.kv
        if quantised:
            k, v = to_grid(k, quantised), to_grid(v, quantised)
        kv[0][:, layout.destinations] = k.swapaxes(0, 1)
        kv[1][:, layout.destinations] = v.swapaxes(0, 1)

    return run


def layout_of(a: Any, n: int, limits: Limits) -> Layout:
    """The pass's layout from its metadata, or built here when the kernel is run without any."""
    if a.meta is not None:
        layout: Layout = a.meta.layout
        return layout
    return build_layout(
        row_slot=a.row_slot[:n],
        positions=a.positions[:n],
        block_table=a.block_table,
        block_size=a.block_size,
        window=limits.window,
    )


def paged_attention(a: Any, limits: Limits) -> Run:
    """Windows of all slots in one padded product, long prefill runs one by one."""

    def run(n: int) -> None:
        layout = layout_of(a, n, limits)
        out = a.out[:n]
        if sum(s.flat_rows.size for s in layout.segments) < n:
            out[...] = 0.0
        for segment in layout.segments_within(a.sliding_window):
            attend(a, segment, out)

    return run


def attend(a: Any, segment: Segment, out: Array) -> None:
    """Softmax attention of one segment; rows whose sum met NaN are redone over exactly their own keys."""
    kv_heads, dim = a.num_kv_heads, a.head_dim
    groups = a.num_heads // kv_heads
    runs, width = segment.rows.shape
    q = a.q[np.maximum(segment.rows, 0)].reshape(runs, width, kv_heads, groups, dim)
    q = q.transpose(2, 0, 1, 3, 4).reshape(kv_heads, runs, width * groups, dim)
    q *= a.softmax_scale
    gathered = None if segment.spans else a.cache.kv[:, :, segment.keys]
    scores = score_keys(a, segment, q, gathered).reshape(kv_heads, runs, width, groups, -1)
    if a.sliding_window or not (width == 1 and segment.spans):
        np.copyto(scores, -np.inf, where=~segment.visible[None, :, :, None, :])
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = mix_values(a, segment, scores.reshape(kv_heads, runs, width * groups, -1), gathered)
    mixed = mixed.reshape(kv_heads, runs, width, groups, dim).transpose(1, 2, 0, 3, 4).reshape(runs * width, -1)
    result = mixed[segment.flat_places]
    if np.isnan(result.sum()):
        redo_poisoned(a, segment, result)
    out[segment.flat_rows] = result


def score_keys(a: Any, segment: Segment, q: Array, gathered: Array | None) -> Array:
    """q [kv_heads, runs, M, dim] times keys -> [kv_heads, runs, M, C]; -inf behind the keys of a run read in place."""
    if gathered is not None:
        product: Array = np.matmul(q, gathered[0].swapaxes(-1, -2))
        return product
    keys = a.cache.kv[0].swapaxes(-1, -2)
    scores = np.full((*q.shape[:3], segment.keys.shape[1]), -np.inf, np.float32)
    for run, (first, count) in enumerate(segment.spans):
        np.matmul(q[:, run], keys[:, :, first : first + count], out=scores[:, run, :, :count])
    return scores


def mix_values(a: Any, segment: Segment, weights: Array, gathered: Array | None) -> Array:
    """weights [kv_heads, runs, M, C] times values -> [kv_heads, runs, M, dim]."""
    if gathered is not None:
        product: Array = np.matmul(weights, gathered[1])
        return product
    values = a.cache.kv[1]
    mixed = np.empty((*weights.shape[:3], a.head_dim), np.float32)
    for run, (first, count) in enumerate(segment.spans):
        np.matmul(weights[:, run, :, :count], values[:, first : first + count], out=mixed[:, run])
    return mixed


def redo_poisoned(a: Any, segment: Segment, result: Array) -> None:
    """Zero weight times NaN is NaN: attend again, row by row, over the visible keys alone."""
    kv_heads, dim = a.num_kv_heads, a.head_dim
    width = segment.rows.shape[1]
    for index in np.flatnonzero(np.isnan(result).any(axis=1)):
        run, place = divmod(int(segment.flat_places[index]), width)
        keys, values = a.cache.kv[:, :, segment.keys[run][segment.visible[run, place]]]
        q = a.q[segment.flat_rows[index]].reshape(kv_heads, -1, dim)
        scores = np.matmul(q, keys.transpose(0, 2, 1)) * a.softmax_scale
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result[index] = np.matmul(scores / scores.sum(axis=-1, keepdims=True), values).reshape(-1)


def swiglu(a: Any, n: int) -> None:
    """silu(gate) * up."""
    half = a.out.shape[1]
    gate, up, out = a.gate_up[:n, :half], a.gate_up[:n, half:], a.out[:n]
    with np.errstate(over="ignore"):
        np.exp(-gate, out=out)
    out += 1.0
    np.divide(gate, out, out=out)
    out *= up


def gather_rows(a: Any, n: int) -> None:
    """Copy rows; negative indices give zero rows."""
    index = a.index[:n]
    np.take(a.x, index, axis=0, mode="clip", out=a.out[:n])
    a.out[:n][index < 0] = 0.0


def select_last_rows(a: Any, n: int) -> None:
    """Each drafting sequence's newest committed row; zero rows elsewhere."""
    active = a.draft_slot[:n] >= 0
    start = np.where(active, a.seq_start[:n], 0)
    row = np.where(active, start + a.draft_position[:n] - a.positions[start], 0)
    np.take(a.hidden, row, axis=0, mode="clip", out=a.out[:n])
    a.out[:n][~active] = 0.0


def combine_draft_inputs(a: Any, n: int) -> None:
    """[norm(hidden) | norm(embedding)] or the reverse."""
    size = a.hidden.shape[1]
    embedding = a.embedding[:n]
    if a.mask_first_position:
        embedding = np.where(a.positions[:n, None] == 0, np.float32(0), embedding)
    hidden_at, embedding_at = (0, size) if a.order == "hidden_first" else (size, 0)
    norm_rows(a.hidden[:n], a.hid_norm.array, a.eps, a.plus_one, a.out[:n, hidden_at : hidden_at + size])
    norm_rows(embedding, a.emb_norm.array, a.eps, a.plus_one, a.out[:n, embedding_at : embedding_at + size])


def spread_logits(a: Any, n: int) -> None:
    """Columns where they belong, -inf elsewhere."""
    np.take(a.x[:n], a.places, axis=1, mode="clip", out=a.out[:n])
    a.out[:n, a.places < 0] = -np.inf


KERNELS: dict[str, Kernel] = {
    "embed": plain(embed),
    "rms_norm": plain(rms_norm),
    "residual_add": plain(residual_add),
    "residual_add+rms_norm": plain(add_and_norm),
    "linear": linear,
    "rope_kv_write": rope_kv_write,
    "paged_attention": paged_attention,
    "swiglu": plain(swiglu),
    "gather_rows": plain(gather_rows),
    "select_last_rows": plain(select_last_rows),
    "combine_draft_inputs": plain(combine_draft_inputs),
    "spread_logits": plain(spread_logits),
    "process_logits": plain(process_logits),
    "argmax": plain(argmax),
    "gumbel_noise": plain(gumbel_noise),
    "sample": plain(sample),
    "gumbel_noise+sample": plain(noise_and_sample),
}
