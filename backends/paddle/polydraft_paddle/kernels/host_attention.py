"""Rotation, cache writes and attention for a place whose memory the host sees, in the operations that are fast there.

`table.py` lays them over the portable ones on the CPU place. Whole heads are gathered with indices that the layout of the pass
made once for all layers. Which row attends to which is decided elsewhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft_paddle.host_layout import HeadRows, HostLayout, SegmentHeads
from polydraft_paddle.kernels import numeric
from polydraft_paddle.kernels.host import empty_rows, normalized
from polydraft_paddle.kernels.kv_quant import QuantisedCache
from polydraft_paddle.kernels.numeric import attend_rows, partners, rope_tables
from polydraft_paddle.ops import First, Tensor, direct, numbers, part, take
from polydraft_paddle.provider import Kernel, Run
from polydraft_paddle.row_layout import RowLayout
from polydraft_paddle.threads import spread


def rope_kv_write(a: Any, limits: Limits) -> Run:
    """Rotate q and k, keep q, write k and v to the paged cache; rows that carry nothing are left out."""
    if isinstance(a.cache, QuantisedCache):
        return numeric.rope_kv_write(a, limits)
    heads, kv_heads, dim = a.num_heads, a.num_kv_heads, a.head_dim
    own, partner = rope_tables(a, limits.max_len)
    by_half = a.q_norm is None and a.style == "half" and 2 * len(a.frequencies) == dim
    columns = None if by_half else paddle.to_tensor(partners(a), place=a.qkv.place)
    in_heads, in_halves = a.qkv.reshape([-1, dim]), a.qkv.reshape([-1, dim // 2]) if by_half else None
    cache, first, q_heads = a.cache.rows, First(a.q_out), First(a.q_out.reshape([-1, dim]))
    kv_rows = cache.reshape([-1, kv_heads, dim])

    def run(n: int) -> None:
        if not n:
            return
        layout, (out,) = HostLayout.of(a, n, limits), first.rows(n)
        if not layout.some:
            out.zero_()
            return
        at: HeadRows = layout.head_rows(heads, kv_heads, cache.shape[0])
        moved, num_q, num_qk, num_rows = take(in_heads, at.heads), n * heads, n * (heads + kv_heads), len(at.heads)
        qk = part(moved, 0, num_qk)
        if a.q_norm is not None:
            parts = [
                normalized(part(qk, 0, num_q), a.q_norm, a.eps, False),
                normalized(part(qk, num_q, num_qk), a.k_norm, a.eps, False),
            ]
            qk.copy_(direct.concat(parts, 0), False)
        if columns is None:
            swapped = direct.view_shape(take(in_halves, at.halves), [num_qk, dim])
        else:
            swapped = direct.gather(qk, columns, 1)
        of_itself, of_partner = at.factors(own, partner)
        direct.add_(direct.multiply_(qk, of_itself), direct.multiply_(swapped, of_partner))
        q_heads.rows(num_q)[0].copy_(part(moved, 0, num_q), False)
        if not layout.complete:
            empty_rows(out, layout.empty)
        direct.scatter_(kv_rows, at.destinations, direct.view_shape(part(moved, num_q, num_rows), [2 * n, kv_heads, dim]), True)

    return run


def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, float]:
    """Softmax attention of q [S, G, M, D], whose scale is in it, over k and v [S, G, C, D], with `mask` [S, G, M, C] added; and a
    number that is not finite where scores or values were broken.

    The softmax is divided by its sum behind the product with v, and not shifted by the highest score, which takes Paddle as long
    as the exponentials do: whether that was needed, or a score was NaN, sums and result tell."""
    context = k.shape[2]
    work = q.size * context
    scores = spread(work, direct.matmul, q, k, False, True)
    if mask is not None:
        direct.add_(scores, mask)
    weights = direct.exp(scores)
    sums = direct.matmul(weights, ones(context), False, False)
    mixed = direct.divide_(spread(work, direct.matmul, weights, v, False, False), sums)
    sound = total(mixed)
    if math.isfinite(sound) and sums.numpy().min() > FAINT:
        return mixed, sound
    broken = math.nan if np.isnan(scores.numpy()).any() else 0.0  # Paddle's softmax hides a NaN
    mixed = spread(work, direct.matmul, direct.softmax_(scores, -1), v, False, False)
    return mixed, broken + total(mixed)


FAINT = 1e-28
"""A sum of exponentials below which some that count may have vanished."""


@functools.lru_cache(maxsize=64)
def ones(count: int) -> Tensor:
    """A column [count, 1] float32 of ones: a product with it is a sum."""
    return paddle.ones([count, 1], "float32")


def total(tensor: Tensor) -> float:
    """The sum of all elements: not finite where one is not, or where they overflow."""
    with np.errstate(all="ignore"):
        return float(tensor.numpy().sum())


Mix = Callable[[Any, Any, Any, Any], tuple[Any, float]]
"""What `mix` is one of."""


def paged_attention(a: Any, limits: Limits, mix: Mix = mix) -> Run:
    """Windows of all slots in one padded product, long prefill runs one by one; row by row over a quantised cache."""
    if isinstance(a.cache, QuantisedCache):
        return numeric.paged_attention(a, limits)
    shape = [-1, a.num_kv_heads, a.num_heads // a.num_kv_heads, a.head_dim]
    q, k, v = (t.reshape([-1, a.head_dim]) for t in (a.q, a.cache.k, a.cache.v))
    first = First(a.out, a.out.reshape(shape), a.q.reshape(shape))

    def attend(at: SegmentHeads, rows: Tensor) -> Tensor:
        """Attention of one segment, as rows of heads one behind the other. Rows that met a NaN are redone over exactly their own
        keys."""
        wanted = direct.scale(rows if at.q is None else direct.gather_nd(q, at.q), a.softmax_scale, 0.0, True)
        mixed, sound = mix(wanted, direct.gather_nd(k, at.keys), direct.gather_nd(v, at.keys), at.mask)
        result = mixed if at.out is None else direct.gather_nd(direct.view_shape(mixed, [-1, a.head_dim]), at.out)
        if not math.isfinite(sound):
            packed = numbers(rows.shape[0], rows) if at.rows is None else at.rows
            among = RowLayout(take(a.row_slot, packed), take(a.positions, packed), a.block_table, a.block_size)
            exact = paddle.empty_like(rows)
            attend_rows(a, take(a.q, packed), among, exact)
            result = direct.reshape(exact, shape)
        return result

    def run(n: int) -> None:
        if not n:
            return
        layout, (out, heads_out, rows) = HostLayout.of(a, n, limits), first.rows(n)
        if not layout.some:
            out.zero_()
            return
        for segment in layout.segments(a.num_heads, a.num_kv_heads, a.sliding_window):
            result = attend(segment, rows)
            if segment.rows is None:
                heads_out.copy_(result, False)
            else:
                direct.scatter_(heads_out, segment.rows, result, True)
        if not layout.complete:
            empty_rows(out, layout.empty)

    return run


KERNELS: dict[str, Kernel] = {"rope_kv_write": rope_kv_write, "paged_attention": paged_attention}
"""Contract to kernel."""
