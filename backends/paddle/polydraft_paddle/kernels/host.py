"""Owns the float kernels of the place whose memory the host sees: the same contracts, in the operations that are quick there.

`table.py` lays them over the portable ones on the CPU place. On it Paddle copies strided views and broadcasts element by element,
so heads are moved by gathering whole heads with indices that the pass's metadata made once for all layers, products go straight
into their buffer, and a fused norm takes the place of five operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.sentinels import NO_TOKEN
from polydraft_paddle.host_layout import HeadRows, HostLayout, SegmentHeads
from polydraft_paddle.kernels import numeric
from polydraft_paddle.kernels.kv_quant import QuantisedCache
from polydraft_paddle.kernels.numeric import attend_rows, rope_tables, swap_columns
from polydraft_paddle.ops import Tensor, both, choose, clamp, direct, numbers, take
from polydraft_paddle.provider import Kernel, Run

fused_rms_norm = paddle.incubate.nn.functional.fused_rms_norm
swiglu_operation = getattr(paddle.nn.functional, "swiglu", None) or paddle.incubate.nn.functional.swiglu  # moved in 3.3


class First:
    """The first rows of some tensors, as views that are kept as long as the launch length stays the same."""

    __slots__ = ("_length", "_tensors", "_views")

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors, self._length, self._views = tensors, 0, ()

    def rows(self, n: int) -> tuple[Tensor, ...]:
        """Views of the first `n` rows."""
        if n != self._length:
            self._views = tuple(tensor[:n] for tensor in self._tensors)
            self._length = n
        return self._views


def linear(a: Any, limits: Limits) -> Run:
    """x @ W.T + b, summed straight into `out`; the bias is there before the product is added."""
    del limits
    by_column = a.weight.t()
    if not by_column.is_contiguous():  # an embedding that is the head as well
        return _linear_by_row(a)
    bias, first = None if a.bias is None else a.bias.reshape([1, -1]), First(a.out, a.x)

    def run(n: int) -> None:
        if not n:
            return
        out, x = first.rows(n)
        if bias is not None:
            out.copy_(take(bias, _zeros(n)), False)
        direct.addmm_(out, x, by_column, 0.0 if bias is None else 1.0, 1.0)

    return run


def _linear_by_row(a: Any) -> Run:
    first = First(a.out, a.x)

    def run(n: int) -> None:
        if n:
            out, x = first.rows(n)
            product = direct.matmul(x, a.weight, False, True)
            out.copy_(product if a.bias is None else product + a.bias, False)

    return run


def _zeros(count: int) -> Tensor:
    """`count` zeros, int32: an index that repeats the first row."""
    if count not in _ZEROS:
        _ZEROS[count] = paddle.zeros([count], "int32")
    return _ZEROS[count]


_ZEROS: dict[int, Tensor] = {}


def normalized(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """RMSNorm over the last axis of rows, by Paddle's fused operation."""
    return fused_rms_norm(x, weight + 1.0 if plus_one else weight, None, eps, 1)[0]


def rms_norm(a: Any, limits: Limits) -> Run:
    """RMSNorm."""
    del limits
    first = First(a.out, a.x)

    def run(n: int) -> None:
        if n:
            out, x = first.rows(n)
            out.copy_(normalized(x, a.weight, a.eps, a.plus_one), False)

    return run


def add_and_norm(a: Any, limits: Limits) -> Run:
    """Composite `residual_add+rms_norm`."""
    add, norm = a.parts
    first, normalize = First(add.x, add.y), rms_norm(norm, limits)

    def run(n: int) -> None:
        if n:
            x, y = first.rows(n)
            x.add_(y)
            normalize(n)

    return run


def fused_swiglu(a: Any, limits: Limits) -> Run:
    """silu(gate) * up, by Paddle's fused operation."""
    del limits
    first = First(a.out, a.gate_up)

    def run(n: int) -> None:
        if n:
            out, gate_up = first.rows(n)
            out.copy_(swiglu_operation(gate_up), False)

    return run


def swiglu(a: Any, limits: Limits) -> Run:
    """silu(gate) * up, on halves that are moved as rows: on the CPU this is quicker than the fused operation."""
    del limits
    first, halves = First(a.out), a.gate_up.reshape([-1, a.out.shape[1]])

    def run(n: int) -> None:
        if n:
            gates = _evens(n)
            gate, up = take(halves, gates), take(halves, gates + 1)
            first.rows(n)[0].copy_(direct.multiply_(direct.silu(gate), up), False)

    return run


def _evens(count: int) -> Tensor:
    """The first `count` even numbers, int32."""
    if count not in _EVENS:
        _EVENS[count] = paddle.arange(0, 2 * count, 2, dtype="int32")
    return _EVENS[count]


_EVENS: dict[int, Tensor] = {}


def embed(a: Any, limits: Limits) -> Run:
    """Look rows up; negative ids give zero rows."""
    del limits
    return _gather(a.weight, a.ids, a.out)


def gather_rows(a: Any, limits: Limits) -> Run:
    """Copy rows; negative indices give zero rows."""
    del limits
    return _gather(a.x, a.index, a.out)


def _gather(table: Tensor, index: Tensor, out: Tensor) -> Run:
    first, index_h = First(out, index), np.from_dlpack(index)

    def run(n: int) -> None:
        if n:
            out, index = first.rows(n)
            _put_rows(out, take(table, clamp(index)), index_h[:n] >= 0)

    return run


def _put_rows(out: Tensor, rows: Tensor, carries: Array) -> None:
    """Copy `rows` to `out`, and zeros for those that carry nothing."""
    out.copy_(rows, False)
    if not carries.all():
        empty = paddle.to_tensor(np.flatnonzero(~carries).astype(np.int32))
        paddle.scatter_(out, empty, paddle.zeros([empty.shape[0], out.shape[1]], out.dtype))


def select_last_rows(a: Any, limits: Limits) -> Run:
    """Each drafting sequence's newest committed row; zero rows elsewhere."""
    del limits
    first, slot_h = First(a.out, a.seq_start, a.draft_position), np.from_dlpack(a.draft_slot)

    def run(n: int) -> None:
        if not n:
            return
        out, seq_start, position = first.rows(n)
        carries = slot_h[:n] >= 0
        if not carries.all():
            keep = paddle.to_tensor(carries)
            seq_start = choose(keep, seq_start, 0)
            row = choose(keep, seq_start + position - take(a.positions, seq_start), 0)
        else:
            row = seq_start + position - take(a.positions, seq_start)
        _put_rows(out, take(a.hidden, row), carries)

    return run


def combine_draft_inputs(a: Any, limits: Limits) -> Run:
    """[norm(hidden) | norm(embedding)] or the reverse."""
    del limits
    first, positions_h = First(a.out, a.hidden, a.embedding), np.from_dlpack(a.positions)

    def run(n: int) -> None:
        if not n:
            return
        out, hidden, embedding = first.rows(n)
        if a.mask_first_position and not positions_h[:n].all():
            begins = paddle.to_tensor(positions_h[:n] == 0).unsqueeze(1)
            embedding = choose(begins.expand_as(embedding), paddle.zeros_like(embedding), embedding)
        halves = [normalized(hidden, a.hid_norm, a.eps, a.plus_one), normalized(embedding, a.emb_norm, a.eps, a.plus_one)]
        out.copy_(direct.concat(halves if a.order == "hidden_first" else halves[::-1], 1), False)

    return run


def rope_kv_write(a: Any, limits: Limits) -> Run:
    """Rotate q and k, keep q, write k and v to the paged cache; rows that carry nothing are left out."""
    if isinstance(a.cache, QuantisedCache):
        return numeric.rope_kv_write(a, limits)
    heads, kv_heads, dim = a.num_heads, a.num_kv_heads, a.head_dim
    own, partner = rope_tables(a, limits.max_len, a.qkv)
    halves = a.style == "half" and a.rope_dims == dim
    swap = paddle.to_tensor([1, 0], dtype="int32") if halves else swap_columns(a)

    def swapped(rows: Tensor) -> Tensor:
        if halves:
            return direct.reshape(direct.gather(direct.reshape(rows, [-1, 2, dim // 2]), swap, 1), [-1, dim])
        return direct.gather(rows, swap, 1)

    first = First(a.q_out, a.qkv)

    def run(n: int) -> None:
        if not n:
            return
        at: HeadRows = HostLayout.of(a, n, limits).head_rows(heads, kv_heads)
        q_out, qkv = first.rows(n)
        if not at.count:
            q_out.zero_()
            return
        split, qkv = at.count * heads, direct.reshape(qkv, [n * (heads + 2 * kv_heads), dim])
        qk = take(qkv, at.qk)
        if a.q_norm is not None:
            parts = [normalized(qk[:split], a.q_norm, a.eps, False), normalized(qk[split:], a.k_norm, a.eps, False)]
            qk = direct.concat(parts, 0)
        of_itself, of_partner = at.factors(own, partner)
        turned = direct.multiply_(swapped(qk), of_partner)
        qk = direct.add_(direct.multiply_(qk, of_itself), turned)
        q = direct.reshape(qk[:split], [at.count, heads * dim])
        if at.count == n:
            q_out.copy_(q, False)
        else:
            q_out.zero_()
            paddle.scatter_(a.q_out, at.rows, q)
        k, v = (direct.reshape(t, [at.count, kv_heads * dim]) for t in (qk[split:], take(qkv, at.v)))
        if at.granted is not None:
            k, v = take(k, at.granted), take(v, at.granted)
        if at.destinations.shape[0]:
            paddle.scatter_(a.cache.k, at.destinations, k)
            paddle.scatter_(a.cache.v, at.destinations, v)

    return run


def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, float]:
    """Softmax attention of q [S, G, M, D], whose scale is in it, over k and v [S, G, C, D], with `mask` [S, G, M, C] added; and a
    number that is not finite where the scores were broken: Paddle's softmax hides a NaN among them."""
    scores = direct.matmul(q, k, False, True)
    sound = total(scores)
    if mask is not None:
        scores = direct.add_(scores, mask)
    return direct.matmul(direct.softmax(scores, -1), v, False, False), sound


def total(tensor: Tensor) -> float:
    """The sum of all elements: not finite where one is not, or where they overflow."""
    with np.errstate(all="ignore"):
        return float(np.from_dlpack(tensor).sum())


Mix = Callable[[Any, Any, Any, Any], tuple[Any, float]]
"""What `mix` is one of."""


def paged_attention(a: Any, limits: Limits, mix: Mix = mix) -> Run:
    """Windows of all slots in one padded product, long prefill runs one by one; row by row over a quantised cache."""
    if isinstance(a.cache, QuantisedCache):
        return numeric.attend_each(a)
    flat = tuple(t.reshape([-1, a.head_dim]) for t in (a.q, a.cache.k, a.cache.v))
    first = First(a.out)

    def run(n: int) -> None:
        if not n:
            return
        layout, (out,) = HostLayout.of(a, n, limits), first.rows(n)
        if not layout.complete:
            out.zero_()
        for segment in layout.segments(a.num_heads, a.num_kv_heads):
            result = attend(a, flat, segment, mix)
            if segment.whole:
                out.copy_(result, False)
            else:
                paddle.scatter_(a.out, segment.rows, result)

    return run


def attend(a: Any, flat: tuple[Tensor, ...], at: SegmentHeads, mix: Mix) -> Tensor:
    """Attention of one segment over q, keys and values as one head a row; returns its rows one behind the other. Rows that met a
    NaN are redone over exactly their own keys."""
    shape = [at.runs, a.num_kv_heads, -1, a.head_dim]
    q, k, v = (direct.reshape(take(t, heads), shape) for t, heads in zip(flat, (at.q, at.keys, at.keys), strict=True))
    mixed, sound = mix(direct.scale(q, a.softmax_scale, 0.0, True), k, v, at.mask)
    result = direct.reshape(take(direct.reshape(mixed, [-1, a.head_dim]), at.out), [-1, a.num_heads * a.head_dim])
    if not math.isfinite(sound + total(result)):
        result = attend_rows(a, at.rows, at.rows.shape[0])
    return result


def argmax(a: Any, limits: Limits) -> Run:
    """Highest logit, lowest id among equals. A sum of tiny shares is NaN where a row has NaN, or both infinities, and is nothing
    else by accident."""
    del limits
    columns = a.logits.shape[1]
    shares, flat, first = paddle.full([columns, 1], 1e-8), a.logits.reshape([-1]), First(a.tokens, a.logits, a.row_slot)

    def run(n: int) -> None:
        if not n:
            return
        out, logits, row_slot = first.rows(n)
        tokens = logits.argmax(axis=1, dtype="int32")
        top = take(flat, numbers(n, tokens) * columns + tokens)
        whole = both(direct.isfinite(top), ~direct.isnan(direct.reshape(direct.matmul(logits, shares, False, False), [n])))
        out.copy_(choose(both(whole, row_slot >= 0), tokens, NO_TOKEN), False)

    return run


KERNELS: dict[str, Kernel] = {
    "residual_add+rms_norm": add_and_norm,
    **{function.__name__: function for function in (
        embed, rms_norm, linear, rope_kv_write, paged_attention, swiglu, gather_rows, argmax, select_last_rows,
        combine_draft_inputs,
    )},
}  # fmt: skip
"""Contract or composite to kernel."""
