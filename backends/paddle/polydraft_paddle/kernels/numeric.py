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
from polydraft_paddle import fused
from polydraft_paddle.kernels.kv_quant import QuantisedCache
from polydraft_paddle.kernels.sampling import argmax, gumbel_noise, process_logits, sample
from polydraft_paddle.ops import Tensor, at, carried, choose, constant, direct, in_place, into, put, scatter_rows, take
from polydraft_paddle.provider import Kernel, Run, plain
from polydraft_paddle.row_layout import Keys, RowLayout


def as_float(x: Tensor) -> Tensor:
    """`x` in float32."""
    return x if x.dtype == paddle.float32 else direct.cast(x, paddle.float32)


def _masked_rows(rows: Tensor, carries: Tensor) -> Tensor:
    """Zero rows where nothing is carried, also where the row holds NaN."""
    return choose(carries.unsqueeze(1).expand_as(rows), rows, 0.0)


def _put_rows(out: Tensor, n: int, rows: Tensor, carries: Tensor) -> None:
    """Fill `out` with `rows` in its dtype, and with zeros where `carries`, of one shape with them, does not hold."""
    rows = rows if rows.dtype == out.dtype else direct.cast(rows, out.dtype)
    into(out, n, direct.where, carries, rows, constant(0.0, rows))


def embed(a: Any, n: int) -> None:
    """Look rows up; negative ids give zero rows."""
    _look_up(a.out, n, a.weight, a.ids[:n])


def _look_up(out: Tensor, n: int, table: Tensor, index: Tensor) -> None:
    rows = at(table, index)
    _put_rows(out, n, rows, direct.unsqueeze(carried(index), [1]).expand_as(rows))


def normalized(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """RMSNorm over the last axis, in float32."""
    wide, gain = as_float(x), as_float(weight)
    gain = gain + 1.0 if plus_one else gain
    if fused.has("rms_norm", wide):
        return fused.rms_norm(wide, gain, eps)
    return _to_unit(wide, eps) * gain


def _to_unit(x: Tensor, eps: float) -> Tensor:
    return x * paddle.rsqrt(paddle.mean(x * x, axis=-1, keepdim=True) + eps)


def rms_norm(a: Any, n: int) -> None:
    """RMSNorm."""
    x = a.x[:n]
    if x.dtype == paddle.float32 and not fused.has("rms_norm", x):
        into(a.out, n, direct.multiply, _to_unit(x, a.eps), a.weight + 1.0 if a.plus_one else a.weight)
    else:
        put(a.out[:n], normalized(x, a.weight, a.eps, a.plus_one))


def residual_add(a: Any, n: int) -> None:
    """x += y."""
    in_place(direct.add_, a.x[:n], a.y[:n])


def linear(a: Any, n: int) -> None:
    """x @ W.T + b, in the wider of the dtypes of x and the result: sums are rounded once."""
    wide = a.out.dtype  # logits are float32 whatever the activations are
    into(a.out, n, direct.matmul, *(t if t.dtype == wide else t.astype(wide) for t in (a.x[:n], a.weight)), False, True)
    if a.bias is not None:
        in_place(direct.add_, a.out[:n], a.bias if a.bias.dtype == wide else a.bias.astype(wide))


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
    tables = rope_tables(a, limits.max_len, a.qkv)
    swap = swap_columns(a)

    def rotate(qkv: Tensor, layout: RowLayout) -> Tensor:
        own, partner = layout.turns(*tables, a.num_kv_heads, qkv.shape[1])
        return direct.add(direct.multiply(qkv, own), direct.multiply(direct.index_select(qkv, swap, 2), partner))

    return rotate_and_keep(a, rotate)


def rotate_and_keep(a: Any, rotate: Callable[[Tensor, RowLayout], Tensor]) -> Run:
    """Norm heads where the layer wants it, turn those of q and k by `rotate(qkv [n, heads, head_dim], layout)`, which leaves
    those of v, and file them all."""
    heads, kv_heads, dim = a.num_heads, a.num_kv_heads, a.head_dim

    def run(n: int) -> None:
        if not n:
            return
        layout = RowLayout.of(a, n)
        qkv = as_float(a.qkv[:n]).reshape([n, heads + 2 * kv_heads, dim])
        if a.q_norm is not None:
            q = normalized(qkv[:, :heads], a.q_norm, a.eps, False)
            k = normalized(qkv[:, heads : heads + kv_heads], a.k_norm, a.eps, False)
            qkv = direct.concat([q, k, qkv[:, heads + kv_heads :]], 1)
        qkv = rotate(qkv, layout)
        _put_rows(a.q_out, n, qkv[:, :heads].reshape([n, heads * dim]), layout.carries(heads * dim))
        _file(a.cache, layout, qkv[:, heads:].reshape([2 * n, kv_heads * dim]))

    return run


def _file(cache: Any, layout: RowLayout, rows: Tensor) -> None:
    """Write `rows` [2 * n, kv_heads * head_dim], the key of each row of the pass and then its value, where they have a place; the
    others go to the cache's spare row."""
    if isinstance(cache, QuantisedCache):
        place, granted = layout.granted
        for half, values in zip((cache.k, cache.v), rows.reshape([-1, 2, rows.shape[1]]).unbind(1), strict=True):
            scatter_rows(half, place, cache.rows_of(values), granted)
        return
    stored = rows if rows.dtype == cache.rows.dtype else direct.cast(rows, cache.rows.dtype)
    places = layout.destinations(cache.k.shape[0], rows.shape[1])
    in_place(direct.put_along_axis_, cache.rows, places, stored, 0, "assign", True)


def mix(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Softmax attention of q [n, G, M, D], whose scale is in it, over keys and values [n, G, C, D], with `hidden` [n, 1, 1, C]
    added to scores."""
    return direct.matmul(softmax(direct.matmul(q, k, False, True) + hidden), v, False, False)


Mix = Callable[[Any, Any, Any, Any], Any]
"""What `mix` is one of."""


def paged_attention(a: Any, limits: Limits, mix: Mix = mix) -> Run:
    """Row by row, each over its slot's whole table."""
    del limits

    def run(n: int) -> None:
        if n:
            layout = RowLayout.of(a, n)
            mixed = attend_rows(a, a.q[:n], layout, mix)
            _put_rows(a.out, n, mixed, layout.carries(mixed.shape[1]))

    return run


def attend_rows(a: Any, q: Tensor, layout: RowLayout, mix: Mix = mix) -> Tensor:
    """Attention of the rows `q` [n, P], each over its slot's whole table: what lies beyond its position is never read, so that
    poison there stays there. Returns [n, P] float32, with anything for rows that carry nothing."""
    kv_heads, dim = a.num_kv_heads, a.head_dim
    item = 4 if isinstance(a.cache, QuantisedCache) else int(a.cache.rows.element_size())
    parts = []
    for keys in layout.keys(2 * kv_heads * dim * item, a.sliding_window):
        k, v = _keys_and_values(a, layout, keys)
        some = (q if keys.end - keys.begin == q.shape[0] else q[keys.begin : keys.end]).astype("float32") * a.softmax_scale
        parts.append(mix(some.reshape([-1, kv_heads, a.num_heads // kv_heads, dim]), k, v, keys.hidden))
    return (parts[0] if len(parts) == 1 else direct.concat(parts, 0)).reshape(q.shape)


def _keys_and_values(a: Any, layout: RowLayout, keys: Keys) -> tuple[Tensor, Tensor]:
    """Those that rows attend to, each [n, G, C, D] float32."""
    (n, context), kv_heads, dim = keys.places.shape, a.num_kv_heads, a.head_dim
    if isinstance(a.cache, QuantisedCache):
        rows = [a.cache.read(take(half, keys.places.reshape([-1]))) for half in (a.cache.k, a.cache.v)]
        k, v = (t.reshape([n, context, kv_heads, dim]).transpose([0, 2, 1, 3]) for t in rows)
        return k, v
    heads = layout.heads(keys, kv_heads, a.cache.k.shape[0])
    moved = take(a.cache.rows.reshape([-1, dim]), heads).astype("float32").reshape([2, n, kv_heads, context, dim])
    return moved[0], moved[1]


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis; a NaN among the scores makes its row NaN, which Paddle's own softmax on the CPU hides."""
    weights = paddle.exp(scores - scores.max(axis=-1, keepdim=True))
    return weights / weights.sum(axis=-1, keepdim=True)


def swiglu(a: Any, n: int) -> None:
    """silu(gate) * up."""
    gate_up, half = as_float(a.gate_up[:n]), a.out.shape[1]
    if fused.has("swiglu", a.out):
        into(a.out, n, direct.swiglu, gate_up, None)
    else:
        put(a.out[:n], direct.silu(gate_up[:, :half]) * gate_up[:, half:])


def gather_rows(a: Any, n: int) -> None:
    """Copy rows; negative indices give zero rows."""
    _look_up(a.out, n, a.x, a.index[:n])


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
