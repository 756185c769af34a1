"""Float kernels in portable Paddle operations: embedding, products, norms, rotation, cache writes and attention.

`table.py` lists them. Sums are taken in float32. Rows that carry nothing are masked, not skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.rope_kv_write import turns
from polydraft_paddle.forward_meta import Windows
from polydraft_paddle.kernels.kv_quant import rows_at, rows_for
from polydraft_paddle.kernels.sampling import argmax, gumbel_noise, process_logits, sample
from polydraft_paddle.ops import Tensor, as_int, at, choose, direct, in_place, numbers, pick, put, scatter_rows
from polydraft_paddle.provider import Kernel, Run, plain


def _masked_rows(rows: Tensor, carries: Tensor) -> Tensor:
    """Zero rows where nothing is carried, also where the row holds NaN."""
    return choose(carries.unsqueeze(1).expand_as(rows), rows, 0.0)


def embed(a: Any, n: int) -> None:
    """Look rows up; negative ids give zero rows."""
    ids = a.ids[:n]
    put(a.out[:n], _masked_rows(at(a.weight, ids), ids >= 0))


def normalized(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """RMSNorm over the last axis, in float32."""
    wide = x.astype("float32")
    gain = weight.astype("float32")
    scale = paddle.rsqrt(paddle.mean(wide * wide, axis=-1, keepdim=True) + eps)
    return wide * scale * (gain + 1.0 if plus_one else gain)


def rms_norm(a: Any, n: int) -> None:
    """RMSNorm."""
    put(a.out[:n], normalized(a.x[:n], a.weight, a.eps, a.plus_one))


def residual_add(a: Any, n: int) -> None:
    """x += y."""
    in_place(direct.add_, a.x[:n], a.y[:n])


def linear(a: Any, n: int) -> None:
    """x @ W.T + b, in the wider of the dtypes of x and the result: sums are rounded once."""
    wide = a.out.dtype  # logits are float32 whatever the activations are
    product = paddle.matmul(*(t if t.dtype == wide else t.astype(wide) for t in (a.x[:n], a.weight)), transpose_y=True)
    put(a.out[:n], product if a.bias is None else product + a.bias)


def rope_tables(a: Any, max_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Factors [max_len, head_dim] float32 of an element and of its partner in the pair; elements that do not rotate have factors
    1 and 0. Layers of one shape on one place share them."""
    key = a.frequencies, a.attention_factor, a.style, a.head_dim, max_len, str(like.place)
    found = _TABLES.get(key)
    if found is None:
        host = _rope_factors(a, max_len)
        found = _TABLES[key] = paddle.to_tensor(host[0], place=like.place), paddle.to_tensor(host[1], place=like.place)
    return found


_TABLES: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}


def _rope_factors(a: Any, max_len: int) -> tuple[Any, Any]:
    cos, sin = turns(a, max_len)
    own, partner = np.ones((max_len, a.head_dim), np.float32), np.zeros((max_len, a.head_dim), np.float32)
    first, second = _pairs(len(a.frequencies), a.style)
    own[:, first] = own[:, second] = cos
    partner[:, first], partner[:, second] = -sin, sin
    return own, partner


def _pairs(count: int, style: str) -> tuple[Any, Any]:
    """First and second elements of the rotation pairs."""
    half = np.arange(count)
    return (half, half + count) if style == "half" else (2 * half, 2 * half + 1)


def swap_columns(a: Any) -> Tensor:
    """Column of each element's partner in its rotation pair, its own where it does not rotate; int32 [head_dim]."""
    first, second = _pairs(len(a.frequencies), a.style)
    swap = np.arange(a.head_dim, dtype=np.int32)
    swap[first], swap[second] = second, first
    return paddle.to_tensor(swap, place=a.qkv.place)


def rope_kv_write(a: Any, limits: Limits) -> Run:
    """Rotate q and k, keep q, write k and v to the paged cache."""
    own, partner = rope_tables(a, limits.max_len, a.qkv)
    swap = swap_columns(a)

    def rotate(qk: Tensor, positions: Tensor) -> Tensor:
        swapped = paddle.index_select(qk, swap, axis=2)
        at_row = paddle.clip(positions, 0, limits.max_len - 1)
        return qk * paddle.gather(own, at_row).unsqueeze(1) + swapped * paddle.gather(partner, at_row).unsqueeze(1)

    return rotate_and_keep(a, rotate)


def rotate_and_keep(a: Any, rotate: Callable[[Tensor, Tensor], Tensor]) -> Run:
    """Norm heads where the layer wants it, turn them by `rotate(qk [n, heads, head_dim], positions [n])`, and file them all."""
    heads, kv_heads, dim = a.num_heads, a.num_kv_heads, a.head_dim

    def run(n: int) -> None:
        if not n:
            return
        row_slot, positions = a.row_slot[:n], a.positions[:n]
        qkv = a.qkv[:n].reshape([n, heads + 2 * kv_heads, dim])
        qk = qkv[:, : heads + kv_heads]
        if a.q_norm is not None:
            q = normalized(qk[:, :heads], a.q_norm, a.eps, False)
            qk = paddle.concat([q, normalized(qk[:, heads:], a.k_norm, a.eps, False)], axis=1)
        qk = rotate(qk, positions)
        put(a.q_out[:n], _masked_rows(qk[:, :heads].reshape([n, heads * dim]), row_slot >= 0))
        block = pick(at(a.block_table, row_slot), numbers(n, row_slot), positions // a.block_size)
        granted = (row_slot >= 0) & (block >= 0)
        place = block * a.block_size + positions % a.block_size
        scatter_rows(a.cache.k, place, rows_for(a.cache, a.cache.k, qk[:, heads:].reshape([n, -1])), granted)
        scatter_rows(a.cache.v, place, rows_for(a.cache, a.cache.v, qkv[:, heads + kv_heads :].reshape([n, -1])), granted)

    return run


def mix(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention of q [S, G, M, D], whose scale is in it, over the keys and values [S, G, C, D] that are `visible`
    [S, G, M, C]; what is not may be NaN among the keys. Places that see nothing get finite numbers."""
    return paddle.matmul(softmax(choose(visible, paddle.matmul(q, k, transpose_y=True), -1e30)), v)


Mix = Callable[[Any, Any, Any, Any], Any]
"""What `mix` is one of."""


def paged_attention(a: Any, limits: Limits, mix: Mix = mix) -> Run:
    """Windows over a context of fixed length, or row by row in a pass with prefill."""
    del limits

    def run(n: int) -> None:
        if not n:
            return
        layout = None if a.meta is None else a.meta.layout
        if layout is None:
            put(a.out[:n], attend_rows(a, numbers(n, a.row_slot), n))
            return
        put(a.out[:n], attend_windows(a, layout, mix))

    return run


def attend_windows(a: Any, layout: Windows, mix: Mix = mix) -> Tensor:
    """Attention of all windows, each over its slot's whole table, read once a slot. A NaN among the values reaches the rows that
    may see it and no others. Returns [N, P] float32."""
    sequences, width = layout.shape
    kv_heads, dim = a.num_kv_heads, a.head_dim
    groups = a.num_heads // kv_heads
    rows = paddle.clip(layout.rows, min=0)
    positions = choose(layout.rows >= 0, paddle.gather(a.positions, rows), -1).reshape([sequences, width])
    slots = paddle.gather(a.row_slot, rows.reshape([sequences, width])[:, 0])
    table = paddle.clip(at(a.block_table, slots), min=0)
    context = table.shape[1] * a.block_size
    places = (table.unsqueeze(2) * a.block_size + numbers(a.block_size, rows)).reshape([sequences * context])
    k, v = (
        rows_at(a.cache, t, places).reshape([sequences, context, kv_heads, dim]).transpose([0, 2, 1, 3]).astype("float32")
        for t in (a.cache.k, a.cache.v)
    )
    q = paddle.gather(a.q, rows).reshape([sequences, width, kv_heads, groups, dim]).astype("float32") * a.softmax_scale
    q = q.transpose([0, 2, 1, 3, 4]).reshape([sequences, kv_heads, width * groups, dim])
    key = numbers(context, rows)
    visible = _within(key, positions.unsqueeze(2), a.sliding_window).reshape([sequences, 1, width, 1, context])
    visible = visible.expand([sequences, kv_heads, width, groups, context]).reshape([sequences, kv_heads, -1, context])
    broken = paddle.isnan(v)
    mixed = mix(q, k, choose(broken, paddle.zeros_like(v), v), visible).reshape([sequences, kv_heads, width, groups, dim])
    if a.sliding_window:
        met = paddle.matmul(visible.astype("float32"), broken.astype("float32"))
        seen = (met > 0.0).reshape([sequences, kv_heads, width, groups, dim])
    else:
        behind = (context - key).reshape([1, 1, context, 1])
        first = context - (as_int(broken) * behind).max(axis=2).reshape([sequences, kv_heads, 1, 1, dim])
        seen = first <= positions.reshape([sequences, 1, width, 1, 1])
    mixed = choose(seen.expand_as(mixed), paddle.full_like(mixed, float("nan")), mixed).transpose([0, 2, 1, 3, 4])
    return _masked_rows(at(mixed.reshape([sequences * width, -1]), layout.places), layout.places >= 0)


def _within(key: Tensor, position: Tensor, window: int) -> Tensor:
    """Whether rows at these positions see the keys at those: the last `window` of them, 0: all."""
    seen = key <= position
    return seen & (key > position - window) if window else seen


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis; a NaN among the scores makes its row NaN, which Paddle's own softmax on the CPU hides."""
    weights = paddle.exp(scores - scores.max(axis=-1, keepdim=True))
    return weights / weights.sum(axis=-1, keepdim=True)


def attend_each(a: Any) -> Run:
    """Attention row by row, whatever the metadata says."""

    def run(n: int) -> None:
        if n:
            put(a.out[:n], attend_rows(a, numbers(n, a.row_slot), n))

    return run


def attend_rows(a: Any, rows: Tensor, count: int) -> Tensor:
    """Attention of packed `rows` [count], each over its slot's whole table: what lies beyond its position is masked out of scores
    and values alike, so that poison there stays there. Returns [count, P] float32."""
    kv_heads, dim = a.num_kv_heads, a.head_dim
    groups = a.num_heads // kv_heads
    slots, positions = paddle.gather(a.row_slot, rows), paddle.gather(a.positions, rows)
    table = at(a.block_table, slots)
    context = table.shape[1] * a.block_size
    places = paddle.clip(table, min=0).unsqueeze(2) * a.block_size + numbers(a.block_size, rows)
    places = places.reshape([count * context])
    visible = _within(numbers(context, rows).unsqueeze(0), positions.unsqueeze(1), a.sliding_window) & (slots >= 0).unsqueeze(1)
    k, v = (
        rows_at(a.cache, t, places).reshape([count, context, kv_heads, dim]).astype("float32") for t in (a.cache.k, a.cache.v)
    )
    seen = visible.reshape([count, context, 1, 1])
    v = choose(seen.expand_as(v), v, 0.0).transpose([0, 2, 1, 3])
    q = paddle.gather(a.q, rows).reshape([count, kv_heads, groups, dim]).astype("float32") * a.softmax_scale
    scores = paddle.matmul(q, k.transpose([0, 2, 3, 1]))
    # Rows that carry nothing see nothing: finite scores keep their softmax finite, and their result is masked.
    hidden = paddle.full_like(scores, -1e30)
    scores = paddle.where(visible.reshape([count, 1, 1, context]).expand_as(scores), scores, hidden)
    mixed = paddle.matmul(softmax(scores), v).reshape([count, -1])
    return _masked_rows(mixed, slots >= 0)


def swiglu(a: Any, n: int) -> None:
    """silu(gate) * up."""
    half = a.out.shape[1]
    gate_up = a.gate_up[:n].astype("float32")
    put(a.out[:n], paddle.nn.functional.silu(gate_up[:, :half]) * gate_up[:, half:])


def gather_rows(a: Any, n: int) -> None:
    """Copy rows; negative indices give zero rows."""
    index = a.index[:n]
    put(a.out[:n], _masked_rows(at(a.x, index), index >= 0))


def select_last_rows(a: Any, n: int) -> None:
    """Each drafting sequence's newest committed row; zero rows elsewhere."""
    active = a.draft_slot[:n] >= 0
    start = choose(active, a.seq_start[:n], 0)
    row = start + a.draft_position[:n] - paddle.gather(a.positions, start)
    put(a.out[:n], _masked_rows(at(a.hidden, choose(active, row, 0)), active))


def combine_draft_inputs(a: Any, n: int) -> None:
    """[norm(hidden) | norm(embedding)] or the reverse."""
    embedding = a.embedding[:n]
    if a.mask_first_position:
        embedding = _masked_rows(embedding, a.positions[:n] != 0)
    hidden = normalized(a.hidden[:n], a.hid_norm, a.eps, a.plus_one)
    halves = [hidden, normalized(embedding, a.emb_norm, a.eps, a.plus_one)]
    put(a.out[:n], paddle.concat(halves if a.order == "hidden_first" else halves[::-1], axis=1))


KERNELS: dict[str, Kernel] = {
    "rope_kv_write": rope_kv_write,
    "paged_attention": paged_attention,
    **{function.__name__: plain(function) for function in (
        embed, rms_norm, residual_add, linear, swiglu, gather_rows, select_last_rows, combine_draft_inputs, process_logits,
        argmax, gumbel_noise, sample,
    )},
}  # fmt: skip
"""Contract name to kernel."""
