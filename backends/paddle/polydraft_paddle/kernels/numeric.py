"""Float kernels in portable Paddle operations: embedding, products, norms, rotation, cache writes and attention.

`table.py` lists them. Sums are taken in float32. Rows that carry nothing are masked, not skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.rope_kv_write import turns
from polydraft.device import Array
from polydraft_paddle import fused
from polydraft_paddle.kernels.kv_quant import QuantisedCache
from polydraft_paddle.kernels.sampling import argmax, gumbel_noise, process_logits, sample
from polydraft_paddle.ops import (
    Tensor,
    and_behind,
    carried,
    choose,
    constant,
    direct,
    flat,
    in_place,
    into,
    into_as,
    kept_as,
    part,
    put,
    take,
)
from polydraft_paddle.provider import Kernel, Run, plain
from polydraft_paddle.row_layout import MOST_GATHERED, Angles, Keys, RowLayout, Turns
from polydraft_paddle.tiles import MOST_BY_ROW, MOST_IN_ONE, Heads, Tile, Tiles


def as_float(x: Tensor) -> Tensor:
    """`x` in float32."""
    return x if x.dtype == paddle.float32 else direct.cast(x, paddle.float32)


def _masked_rows(rows: Tensor, carries: Tensor) -> Tensor:
    """Zero rows where `carries`, of one shape with them, does not hold, also where the row holds NaN."""
    return choose(carries, rows, 0.0)


def _put_rows(out: Tensor, n: int, rows: Tensor, carries: Tensor) -> None:
    """Fill `out` with `rows` in its dtype, and with zeros where `carries`, of one shape with them, does not hold."""
    rows = rows if rows.dtype == out.dtype else direct.cast(rows, out.dtype)
    into(out, n, direct.where, carries, rows, constant(0.0, rows))


def embed(a: Any, n: int) -> None:
    """Look rows up; negative ids give zero rows."""
    _look_up(a.out, n, a.weight, a.ids[:n])


def _look_up(out: Tensor, n: int, table: Tensor, index: Tensor) -> None:
    _pick_rows(out, n, table, carried(index), index)


def _pick_rows(out: Tensor, n: int, table: Tensor, there: Tensor, index: Tensor) -> None:
    """Fill `out` with the rows of `table` at `index` [n] where these are `there`, elsewhere with the row of zeros behind it."""
    into_as(out, n, table.dtype, direct.gather, and_behind(table), choose(there, index, table.shape[0]), 0)


def normalized(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """RMSNorm over the last axis, in float32."""
    wide, gain = as_float(x), as_float(weight)
    if fused.has_norm(wide):
        return fused.rms_norm(wide, gain + 1.0 if plus_one else gain, eps)
    return direct.multiply(*_unit_and_gain(wide, gain, eps, plus_one))


def _unit_and_gain(x: Tensor, gain: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """The factors of RMSNorm; where the place divides by the root of the sum of squares in one operation, the mean's part of that
    is in the second."""
    if fused.has("norm", x):
        root = x.shape[-1] ** 0.5
        return direct.norm(x, -1, eps * x.shape[-1], False)[0], direct.scale(gain, root, root if plus_one else 0.0, True)
    mean = direct.mean(direct.multiply(x, x), [-1], True)
    return direct.multiply(x, direct.rsqrt(direct.scale(mean, 1.0, eps, True))), gain + 1.0 if plus_one else gain


def rms_norm(a: Any, limits: Limits) -> Run:
    """RMSNorm."""
    del limits
    straight = _in_one_dtype(a) and fused.has_norm_into(a.x)
    inverse = paddle.empty([a.out.shape[0]], "float32") if straight else None

    def run(n: int) -> None:
        if not n:
            return
        if straight:
            fused.rms_norm_into(part(a.out, 0, n), part(inverse, 0, n), part(a.x, 0, n), _gain(a), a.eps)
            return
        x = as_float(part(a.x, 0, n))
        if fused.has_norm(x):
            put(part(a.out, 0, n), fused.rms_norm(x, as_float(_gain(a)), a.eps))
        else:
            into_as(a.out, n, paddle.float32, direct.multiply, *_unit_and_gain(x, as_float(a.weight), a.eps, a.plus_one))

    return run


def _in_one_dtype(a: Any) -> bool:
    """Whether rows, factors and result of the norm are of one dtype, without a sum that would be rounded among the factors."""
    return bool(a.out.dtype == a.x.dtype == _gain(a).dtype)


def _gain(a: Any) -> Tensor:
    """The factors of the norm's elements, as they are kept, or their sum with 1 in float32."""
    return as_float(a.weight) + 1.0 if a.plus_one else a.weight


def add_and_norm(a: Any, limits: Limits) -> Run:
    """Composite `residual_add+rms_norm`."""
    add, norm = a.parts
    if not (_in_one_dtype(norm) and add.y.dtype == add.x.dtype and fused.has("add_and_norm", add.x)):
        normalize = rms_norm(norm, limits)

        def one_by_one(n: int) -> None:
            if n:
                residual_add(add, n)
                normalize(n)

        return one_by_one
    inverse = paddle.empty([norm.out.shape[0]], "float32")

    def run(n: int) -> None:
        if n:
            out, kept, x, y = (part(tensor, 0, n) for tensor in (norm.out, inverse, add.x, add.y))
            fused.add_and_norm_into(out, kept, x, y, _gain(norm), norm.eps)

    return run


def residual_add(a: Any, n: int) -> None:
    """x += y."""
    in_place(direct.add_, part(a.x, 0, n), part(a.y, 0, n))


def linear(a: Any, limits: Limits) -> Run:
    """x @ W.T + b, in the wider of the dtypes of x and the result: sums are rounded once."""
    del limits
    wide = a.out.dtype  # logits are float32 whatever the activations are
    mixed = a.weight.dtype != wide and fused.has("mixed_product", a.weight)
    weight, bias = a.weight if mixed else kept_as(a.weight, wide), None if a.bias is None else kept_as(a.bias, wide)

    def run(n: int) -> None:
        if not n:
            return
        x = part(a.x, 0, n)
        x = x if x.dtype == wide else direct.cast(x, wide)
        if bias is not None and not mixed and fused.has("linear", x):
            into(a.out, n, direct.linear_v2, x, weight, bias, True)
            return
        into(a.out, n, direct.matmul, x, weight, False, True)
        if bias is not None:
            in_place(direct.add_, part(a.out, 0, n), bias)

    return run


def rope_tables(a: Any, max_len: int) -> tuple[Tensor, Tensor]:
    """Factors [max_len, head_dim] float32 of an element and of its partner in the pair; elements that do not rotate have factors
    1 and 0. Layers of one shape on one place share them."""
    key = _rotation(a, max_len)
    found = _TABLES.get(key)
    if found is None:
        host = _rope_factors(a, max_len)
        found = _TABLES[key] = paddle.to_tensor(host[0], place=a.qkv.place), paddle.to_tensor(host[1], place=a.qkv.place)
    return found


_TABLES: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}


def _rotation(a: Any, max_len: int) -> tuple[object, ...]:
    """What the rotation of a layer depends on."""
    return a.frequencies, a.attention_factor, a.style, a.head_dim, max_len, str(a.qkv.place)


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


def partners(a: Any) -> Array:
    """Which element each one's partner in its rotation pair is, itself where it does not rotate; int32 [head_dim]."""
    first, second = _pairs(len(a.frequencies), a.style)
    swap = np.arange(a.head_dim, dtype=np.int32)
    swap[first], swap[second] = second, first
    return swap


def turns_of(a: Any, max_len: int) -> Turns:
    """How the heads of qkv rotate: in pieces as long as partners lie side by side. Layers of one shape on one place share it."""
    key = *_rotation(a, max_len), a.num_heads, a.num_kv_heads
    found = _TURNS.get(key)
    if found is None:
        factors = np.zeros((max_len + 1, 2, a.head_dim), np.float32)
        factors[-1, 0] = 1.0
        factors[:-1, 0], factors[:-1, 1] = _rope_factors(a, max_len)
        width = math.gcd(len(a.frequencies), a.head_dim) if a.style == "half" else 1
        swapped = partners(a)[::width] // width
        pieces = np.concatenate([np.arange(len(swapped), dtype=np.int32), swapped])
        heads = np.arange(a.num_heads + 2 * a.num_kv_heads, dtype=np.int32)[:, None] * len(swapped)
        table, pattern = (paddle.to_tensor(values, place=a.qkv.place) for values in (factors, heads + pieces))
        found = _TURNS[key] = Turns(table, pattern, a.num_kv_heads, width)
    return found


_TURNS: dict[tuple[object, ...], Turns] = {}


def angles_of(a: Any, max_len: int) -> Angles:
    """How far whole heads of qkv turn. Layers of one shape on one place share it."""
    key = *_rotation(a, max_len), a.num_heads, a.num_kv_heads
    found = _ANGLES.get(key)
    if found is None:
        half = np.arange(a.head_dim // 2)
        pair = np.concatenate([half, half]) if a.style == "half" else half.repeat(2)
        cos, sin = (np.pad(table[:, pair].astype(np.float32), ((0, 1), (0, 0))) for table in turns(a, max_len))
        cos[-1] = 1.0
        upload = partial(paddle.to_tensor, place=a.qkv.place)
        least = np.zeros((1, a.num_heads + 2 * a.num_kv_heads), np.int32)
        least[:, -a.num_kv_heads :] = max_len
        found = _ANGLES[key] = Angles(upload(sin), upload(cos), upload(least))
    return found


_ANGLES: dict[tuple[object, ...], Angles] = {}


def rope_kv_write(a: Any, limits: Limits) -> Run:
    """Rotate q and k, keep q, write k and v to the paged cache; in one operation what the place has one for, which turns whole
    heads."""
    whole = 2 * len(a.frequencies) == a.head_dim and not isinstance(a.cache, QuantisedCache)
    return (turn_whole if whole and fused.offers("rotate", a.qkv.place) else turn_pieces)(a, limits)


def turn_whole(a: Any, limits: Limits) -> Run:
    """Heads are turned as they lie, those of v by nothing, into memory with heads of zeros behind them: rows that carry nothing
    take those for q. All go to the cache, where those of q go nowhere."""
    heads, dim = a.num_heads, a.head_dim
    angles, (rows, width) = angles_of(a, limits.max_len), a.qkv.shape
    per_row = width // dim
    shape = rows * per_row + heads, dim
    made = partial(paddle.zeros, shape) if a.meta is None else partial(a.meta.zeros, shape)
    turned, queries, spread = made("float32"), direct.view_shape(a.q_out, [-1, dim]), a.cache.spread(heads)
    kept = turned if a.q_out.dtype == turned.dtype else made(a.q_out.dtype)

    def run(n: int) -> None:
        if not n:
            return
        layout, count = RowLayout.of(a, n), n * per_row
        mine = part(turned, 0, count)
        fused.rotate_into(mine, direct.reshape(_heads(a, n), [count, dim]), *layout.angles(angles), a.style == "interleaved")
        if kept is not turned:  # rounded once for queries and cache
            into(kept, count, direct.cast, mine, kept.dtype)
            mine = part(kept, 0, count)
        into(queries, n * heads, direct.gather, kept, layout.queries(heads, per_row, rows * per_row), 0)
        layout.rotated = a.q_out
        pieces = direct.view_shape(a.cache.whole, [-1, dim])
        to = layout.destinations(a.cache, spread)
        in_place(direct.put_along_axis_, pieces, to, a.cache.stored(mine), 0, "assign", True)

    return run


def _heads(a: Any, n: int) -> Tensor:
    """Those of q, k and v of n rows, normed where the layer wants it; float32 [n, heads, D]."""
    heads, kv_heads, dim = a.num_heads, a.num_kv_heads, a.head_dim
    qkv = direct.reshape(as_float(part(a.qkv, 0, n)), [n, heads + 2 * kv_heads, dim])
    if a.q_norm is None:
        return qkv
    q = normalized(qkv[:, :heads], a.q_norm, a.eps, False)
    k = normalized(qkv[:, heads : heads + kv_heads], a.k_norm, a.eps, False)
    return direct.concat([q, k, qkv[:, heads + kv_heads :]], 1)


def turn_pieces(a: Any, limits: Limits) -> Run:
    """Each head beside what turns into it, by one gather."""
    turns = turns_of(a, limits.max_len)

    def rotate(qkv: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
        index, factors = layout.turns(turns)
        pairs = direct.reshape(take(direct.reshape(qkv, [-1, turns.width]), index), factors.shape)
        turned, of_q = direct.sum(direct.multiply(pairs, factors), [1], None, False), qkv.shape[0] * a.num_heads
        return part(turned, 0, of_q), part(turned, of_q, turned.shape[0])

    return rotate_and_keep(a, rotate)


def rotate_and_keep(a: Any, rotate: Callable[[Tensor, RowLayout], tuple[Tensor, Tensor]]) -> Run:
    """Norm heads where the layer wants it, turn those of q and k by `rotate(qkv [n, heads, head_dim], layout)`, and file them
    all: it returns the heads of q, then those of k and v, both row by row."""
    heads, kv_heads, dim, spread = a.num_heads, a.num_kv_heads, a.head_dim, a.cache.spread()

    def run(n: int) -> None:
        if not n:
            return
        layout = RowLayout.of(a, n)
        q, kv = rotate(_heads(a, n), layout)
        _put_rows(a.q_out, n, direct.reshape(q, [n, heads * dim]), layout.carries(heads * dim))
        layout.rotated = a.q_out
        to = layout.destinations(a.cache, spread)
        pieces = direct.view_shape(a.cache.whole, [-1, to.shape[1]])
        stored = direct.reshape(a.cache.stored(direct.reshape(kv, [2 * n, kv_heads * dim])), to.shape)
        in_place(direct.put_along_axis_, pieces, to, stored, 0, "assign", True)

    return run


Keep = Callable[..., None]
"""Keeps what an operation makes of its arguments, [n, G, M, D] float32: `keep(operation, *arguments)`."""
Mix = Callable[[Tensor, Tensor, Tensor, Keys, Keep], None]
"""What `mix` is one of."""


def portable_mix(q: Tensor, k: Tensor, v: Tensor, keys: Keys, keep: Keep) -> None:
    """Softmax attention of q [n, G, M, D], whose scale is in it, over those of the keys and values [n, G, C, D] that are
    visible."""
    scores = direct.where(keys.visible, direct.matmul(q, k, False, True), keys.hidden)
    keep(direct.matmul, softmax(scores), v, False, False)


def paged_attention(a: Any, limits: Limits, mix: Mix = portable_mix) -> Run:
    """Row by row, each over its slot's whole table, in one operation where the place has one, whose scale of scores is fixed; by
    tiles of rows where that would copy much."""
    del limits
    portable = mix is portable_mix and not isinstance(a.cache, QuantisedCache)
    exact = portable and a.q.dtype == a.out.dtype == a.cache.rows.dtype and fused.has("attend", a.q)
    dtype = a.q.dtype if exact else paddle.float32  # of attention in one operation
    whole = portable and a.softmax_scale == a.head_dim**-0.5 and fused.offers("attend", a.q.place, dtype)
    heads = Heads(a.num_heads, a.num_kv_heads, a.head_dim)
    most = MOST_IN_ONE * 4 // a.q.element_size() if whole and exact else MOST_IN_ONE if whole else MOST_BY_ROW

    def run(n: int) -> None:
        if not n:
            return
        layout = RowLayout.of(a, n)
        tiles = layout.tiles(heads, a.sliding_window, most) if portable else None
        if tiles:
            attend_tiles(a, n, tiles, heads)
        elif whole:
            attend_whole(a, n, layout, dtype)
        else:
            attend_rows(a, part(a.q, 0, n), layout, a.out, mix)

    return run


def attend_tiles(a: Any, n: int, tiles: Tiles, heads: Heads) -> None:
    """Attention of tiles of rows over the keys of each one's slot, which are copied once for all its rows. Values that not every
    row of a tile sees, those of its own rows, are read by each row for itself, as `attend_rows` reads all: a NaN among them is no
    other row's."""
    queries = direct.view_shape(part(a.q, 0, n), [-1, heads.dim])
    mixed = [_mixed(a, queries, tile, heads) for tile in tiles.parts(a.cache, heads, MOST_GATHERED)]
    every = mixed[0] if len(mixed) == 1 else direct.concat(mixed, 0)
    out = direct.view_shape(a.out, [-1, heads.dim])
    into_as(out, n * heads.q, paddle.float32, direct.gather, every, tiles.order(heads), 0)


def _mixed(a: Any, queries: Tensor, tile: Tile, heads: Heads) -> Tensor:
    """What the heads of each row of a tile come to, [S * G * M, D] float32."""
    count, kv_heads, in_group, context = tile.visible.shape
    q = direct.scale(as_float(take(queries, tile.queries)), a.softmax_scale, 0.0, True)
    read = as_float(take(direct.reshape(a.cache.rows, [-1, heads.dim]), tile.pieces))
    size, groups = count * kv_heads * context, heads.q // heads.kv
    k, v = (direct.view_shape(part(read, i * size, (i + 1) * size), [count, kv_heads, context, heads.dim]) for i in (0, 1))
    later = direct.view_shape(part(read, 2 * size, read.shape[0]), [count, kv_heads, in_group // groups, -1, heads.dim])
    scores = direct.matmul(direct.view_shape(q, [count, kv_heads, in_group, heads.dim]), k, False, True)
    weights = softmax(direct.where(tile.visible, scores, tile.hidden))
    mixed = direct.view_shape(direct.matmul(weights, v, False, False), [*later.shape[:3], groups, heads.dim])
    own = direct.view_shape(take(flat(weights), tile.own), [*later.shape[:3], groups, later.shape[3]])
    return direct.view_shape(direct.add(mixed, direct.matmul(own, later, False, False)), [-1, heads.dim])


def attend_rows(a: Any, q: Tensor, layout: RowLayout, out: Tensor, mix: Mix = portable_mix) -> None:
    """Attention of the rows `q` [n, P], each over its slot's whole table, over the first rows of `out`: what lies beyond its
    position is never read, so that poison there stays there. Rows that carry nothing see zeros alone, and become that."""
    kv_heads, dim, groups = a.num_kv_heads, a.head_dim, a.num_heads // a.num_kv_heads
    heads_out = direct.view_shape(out, [-1, kv_heads, groups, dim])
    for keys in layout.keys(a.cache, 2 * kv_heads * dim * 4, (kv_heads, groups), a.sliding_window):
        k, v = _keys_and_values(a, keys)
        some = direct.scale(as_float(part(q, keys.begin, keys.end)), a.softmax_scale, 0.0, True)
        keep = partial(into_as, part(heads_out, keys.begin, keys.end), keys.end - keys.begin, paddle.float32)
        mix(direct.reshape(some, [-1, kv_heads, groups, dim]), k, v, keys, keep)


def attend_whole(a: Any, n: int, layout: RowLayout, dtype: Any) -> None:
    """Attention of rows over their slots' whole tables, by the place's own operation in `dtype`: float32, or that of queries,
    cache and result. What rows that carry nothing ask for is zeros, of which nothing but zeros comes."""
    heads, kv_heads, dim = a.num_heads, a.num_kv_heads, a.head_dim
    rows = direct.reshape(a.cache.rows, [-1, dim])
    exact = dtype == a.q.dtype
    q = part(a.q, 0, n) if exact else as_float(part(a.q, 0, n))
    if a.q is not layout.rotated:
        q = _masked_rows(q, layout.carries(heads * dim))
    q, out = (direct.view_shape(t, [-1, 1, heads, dim]) for t in (q, part(a.out, 0, n)))
    for places in layout.places(a.cache, 2 * kv_heads * dim * q.element_size(), heads, a.sliding_window, dtype):
        count, context = places.end - places.begin, places.added.shape[3]
        read = take(rows, places.pieces)
        both = direct.reshape(read if exact else as_float(read), [2 * count, context, kv_heads, dim])
        k, v = part(both, 0, count), part(both, count, 2 * count)
        some, to = part(q, places.begin, places.end), part(out, places.begin, places.end)
        mixed = to if to.dtype == dtype else paddle.empty(to.shape, dtype)
        fused.attend_into(mixed, some, k, v, places.added)
        if mixed is not to:
            into(to, count, direct.cast, mixed, to.dtype)


def _keys_and_values(a: Any, keys: Keys) -> tuple[Tensor, Tensor]:
    """Those that rows attend to, each [n, G, C, D] float32."""
    (n, kv_heads, _, context), dim = keys.visible.shape, a.head_dim
    if isinstance(a.cache, QuantisedCache):
        read = a.cache.read(take(a.cache.rows, keys.pieces)).reshape([2, n, context, kv_heads, dim])
        moved = direct.transpose(read, [0, 1, 3, 2, 4])
    else:
        moved = as_float(take(direct.reshape(a.cache.rows, [-1, dim]), keys.pieces))
    both = direct.reshape(moved, [2 * n, kv_heads, context, dim])
    return part(both, 0, n), part(both, n, 2 * n)


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis; a NaN among the scores makes its row NaN, which Paddle's own softmax on the CPU hides."""
    if fused.has("softmax", scores):
        return direct.softmax(scores, -1)
    if fused.has("logsumexp", scores):
        return direct.exp(direct.subtract(scores, direct.logsumexp(scores, [-1], True, False)))
    weights = direct.exp(direct.subtract(scores, direct.max(scores, [-1], True)))
    return direct.divide(weights, direct.sum(weights, [-1], None, True))


def swiglu(a: Any, n: int) -> None:
    """silu(gate) * up."""
    gate_up, half = part(a.gate_up, 0, n), a.out.shape[1]
    if a.out.dtype == gate_up.dtype and fused.has("swiglu", gate_up):
        into(a.out, n, direct.swiglu, gate_up, None)
        return
    gate_up = as_float(gate_up)
    if fused.has("swiglu", gate_up):
        into_as(a.out, n, paddle.float32, direct.swiglu, gate_up, None)
    else:
        into_as(a.out, n, paddle.float32, direct.multiply, direct.silu(gate_up[:, :half]), gate_up[:, half:])


def gather_rows(a: Any, n: int) -> None:
    """Copy rows; negative indices give zero rows."""
    _look_up(a.out, n, a.x, a.index[:n])


def select_last_rows(a: Any, n: int) -> None:
    """Each drafting sequence's newest committed row; zero rows elsewhere. A sequence without rows may begin behind them all."""
    start = part(a.seq_start, 0, n)
    row = direct.add(start, direct.subtract(part(a.draft_position, 0, n), take(and_behind(a.positions), start)))
    _pick_rows(a.out, n, a.hidden, carried(part(a.draft_slot, 0, n)), row)


def combine_draft_inputs(a: Any, n: int) -> None:
    """[norm(hidden) | norm(embedding)] or the reverse."""
    embedding = a.embedding[:n]
    if a.mask_first_position:
        embedding = _masked_rows(embedding, (a.positions[:n] != 0).unsqueeze(1).expand_as(embedding))
    hidden = normalized(a.hidden[:n], a.hid_norm, a.eps, a.plus_one)
    halves = [hidden, normalized(embedding, a.emb_norm, a.eps, a.plus_one)]
    into_as(a.out, n, paddle.float32, direct.concat, halves if a.order == "hidden_first" else halves[::-1], 1)


KERNELS: dict[str, Kernel] = {
    "rope_kv_write": rope_kv_write,
    "paged_attention": paged_attention,
    "rms_norm": rms_norm,
    "residual_add+rms_norm": add_and_norm,
    "linear": linear,
    **{function.__name__: plain(function) for function in (
        embed, residual_add, swiglu, gather_rows, select_last_rows, combine_draft_inputs, process_logits,
        argmax, gumbel_noise, sample,
    )},
}  # fmt: skip
"""Contract name to kernel."""
