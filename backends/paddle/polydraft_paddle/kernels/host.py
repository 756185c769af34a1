"""Float kernels for a place whose memory the host sees: the same contracts, in the operations that are fast there.

`table.py` lays them over the portable ones on the CPU place. There Paddle copies strided views and broadcasts element by element,
so rows are moved by gathering, products go straight into their buffer, and a fused norm replaces five operations. Rotation and
attention are in `host_attention.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.sentinels import NO_TOKEN
from polydraft_paddle.installation import processor
from polydraft_paddle.kernels import numeric
from polydraft_paddle.ops import First, Tensor, choose, clamp, constant, direct, index_of, part, take
from polydraft_paddle.provider import Kernel, Run
from polydraft_paddle.threads import spread

fused_rms_norm = paddle.incubate.nn.functional.fused_rms_norm
swiglu_operation = getattr(paddle.nn.functional, "swiglu", None) or paddle.incubate.nn.functional.swiglu  # moved in 3.3


def linear(a: Any, limits: Limits) -> Run:
    """x @ W.T + b, summed straight into `out`; the bias is there before the product is added."""
    del limits
    by_column = a.weight.t()
    if not by_column.is_contiguous():  # an embedding that is the head as well
        return _linear_by_row(a)
    bias, first, size = None if a.bias is None else a.bias.reshape([1, -1]), First(a.out, a.x), math.prod(by_column.shape)

    def run(n: int) -> None:
        if not n:
            return
        out, x = first.rows(n)
        if bias is not None:
            out.copy_(take(bias, _zeros(n)), False)
        spread(n * size, direct.addmm_, out, x, by_column, 0.0 if bias is None else 1.0, 1.0)

    return run


def _linear_by_row(a: Any) -> Run:
    first, size = First(a.out, a.x), math.prod(a.weight.shape)

    def run(n: int) -> None:
        if n:
            out, x = first.rows(n)
            product = spread(n * size, direct.matmul, x, a.weight, False, True)
            out.copy_(product if a.bias is None else product + a.bias, False)

    return run


@functools.lru_cache(maxsize=64)
def _zeros(count: int) -> Tensor:
    """`count` zeros, int32: an index that repeats the first row."""
    return paddle.zeros([count], "int32")


@functools.cache
def fuses_norms() -> bool:
    """Whether this processor can do Paddle's fused norm: it is made of AVX-512, and ends the process where there is none (Paddle
    3.3.1)."""
    return "avx512f" in processor()[1]


def normalized(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """RMSNorm over the last axis of rows, by Paddle's fused operation where the processor can do it."""
    if not fuses_norms():
        return numeric.normalized(x, weight, eps, plus_one)
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
    summed, normalize = residual_add(add, limits), rms_norm(norm, limits)

    def run(n: int) -> None:
        summed(n)
        normalize(n)

    return run


def residual_add(a: Any, limits: Limits) -> Run:
    """x += y."""
    del limits
    first = First(a.x, a.y)

    def run(n: int) -> None:
        if n:
            direct.add_(*first.rows(n))

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
            moved = take(halves, _alternate(n))
            gated = direct.silu(part(moved, 0, n))
            first.rows(n)[0].copy_(direct.multiply_(gated, part(moved, n, 2 * n)), False)

    return run


@functools.lru_cache(maxsize=64)
def _alternate(count: int) -> Tensor:
    """The first `count` even numbers, then the odd ones; int32."""
    return paddle.arange(2 * count, dtype="int32").reshape([count, 2]).t().reshape([-1])


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
            carries = index_h[:n] >= 0
            _put_rows(out, take(table, index if carries.all() else clamp(index)), carries)

    return run


def _put_rows(out: Tensor, rows: Tensor, carries: Array) -> None:
    """Copy `rows` to `out`, and zeros for those that carry nothing."""
    out.copy_(rows, False)
    if not carries.all():
        empty_rows(out, index_of(np.flatnonzero(~carries)))


def empty_rows(out: Tensor, rows: Tensor) -> None:
    """Zero these rows [n] int32 of `out`."""
    direct.scatter_(out, rows, constant(0.0, out[: rows.shape[0]]), True)


def select_last_rows(a: Any, limits: Limits) -> Run:
    """Each drafting sequence's newest committed row; zero rows elsewhere."""
    del limits
    first = First(a.out)
    arrays: list[Array] = [np.from_dlpack(t) for t in (a.draft_slot, a.seq_start, a.draft_position, a.positions)]
    slot_h, start_h, wanted_h, positions_h = arrays

    def run(n: int) -> None:
        if not n:
            return
        carries = slot_h[:n] >= 0
        start = start_h[:n] * carries
        rows = start + wanted_h[:n] - positions_h[start]
        _put_rows(first.rows(n)[0], take(a.hidden, index_of(rows * carries)), carries)

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


def argmax(a: Any, limits: Limits) -> Run:
    """Highest logit, lowest id among equals, read where it lies: Paddle's own operation looks at one element after the other."""
    del limits
    first, logits_h, slots_h = First(a.tokens), np.from_dlpack(a.logits), np.from_dlpack(a.row_slot)

    def run(n: int) -> None:
        if not n:
            return
        tokens = logits_h[:n].argmax(axis=1)  # of the first NaN where there is one
        top = logits_h[np.arange(n), tokens]
        tokens[~np.isfinite(top) | (slots_h[:n] < 0)] = NO_TOKEN
        first.rows(n)[0].copy_(index_of(tokens), False)

    return run


KERNELS: dict[str, Kernel] = {
    "residual_add+rms_norm": add_and_norm,
    **{function.__name__: function for function in (
        embed, rms_norm, residual_add, linear, swiglu, gather_rows, argmax, select_last_rows, combine_draft_inputs,
    )},
}  # fmt: skip
"""Contract or composite to kernel."""
