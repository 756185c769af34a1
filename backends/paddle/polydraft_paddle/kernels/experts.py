"""Mixture of experts in Paddle operations: `route_experts`, and `expert_mlp` for every place and for the host's.

`table.py` lists them. The terms of a row are added in the order of its choices. The host alone sees which experts have
rows, on the CPU place; elsewhere no shape depends on data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft_paddle.kernels.numeric import softmax
from polydraft_paddle.ops import First, Kept, Tensor, as_int, at, both, choose, index_of, numbers, pick, put, take
from polydraft_paddle.provider import Kernel, Run, plain

MOST_GATHERED = 1 << 28
"""Bytes of the weights that are copied at a time, an expert's for each choice."""
MOST_ROWS = 512
"""Rows whose terms are held at a time where every row goes through every expert."""
NONE = float("-inf")


def route_experts(a: Any, n: int) -> None:
    """Score, mask groups, sort, weigh."""
    logits = a.logits[:n]
    scores = softmax(logits) if a.scoring == "softmax" else _sigmoid(logits)
    selection = scores if a.bias is None else scores + a.bias.astype("float32")
    selection = choose(paddle.isnan(selection), paddle.full_like(selection, NONE), selection)
    if a.num_groups > 1:
        selection = _of_best_groups(selection, a.num_groups, a.top_groups)
    chosen = a.expert_ids.shape[1]
    ids = paddle.argsort(-selection, axis=1, stable=True)[:, :chosen].astype("int32")
    rows = numbers(n, ids).unsqueeze(1).expand_as(ids)
    weights = pick(scores, rows, ids)
    if a.renormalize != "none":
        total = weights.sum(axis=1, keepdim=True)
        weights = weights / (total + a.floor if a.renormalize == "sum" else paddle.clip(total, min=a.floor))
    weights = weights * a.scale
    if a.row_slot is not None:
        there = (a.row_slot[:n] >= 0).unsqueeze(1).expand_as(ids)
        ids, weights = choose(there, ids, -1), choose(there, weights, 0.0)
    put(a.expert_ids[:n], ids)
    put(a.expert_weights[:n], weights)


def _sigmoid(x: Tensor) -> Tensor:
    """By exp, which places have that lack it; 0 where that overflows."""
    return 1.0 / (1.0 + paddle.exp(-x))


def _of_best_groups(selection: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """`selection` [n, experts] with -infinity outside of the `top_groups` groups whose two best sum to most."""
    n, experts = selection.shape
    groups = selection.reshape([n, num_groups, experts // num_groups])
    best = groups.max(axis=2, keepdim=True)
    worth = best.squeeze(2)
    if experts > num_groups:
        equal = groups >= best
        others = choose(equal, paddle.full_like(groups, NONE), groups).max(axis=2)
        worth = worth + choose(as_int(equal).sum(axis=2) > 1, worth, others)
    mine, other = worth.unsqueeze(2), worth.unsqueeze(1)
    index = numbers(num_groups, selection)
    earlier = (index.unsqueeze(0) < index.unsqueeze(1)).unsqueeze(0)
    ahead = (other > mine) | both(other >= mine, earlier)
    kept = as_int(ahead).sum(axis=2, keepdim=True) < top_groups
    return choose(kept.expand_as(groups), groups, NONE).reshape([n, experts])


def _gated(x: Tensor, gate_up: Tensor) -> Tensor:
    """silu(gate) * up of rows [..., H] through [..., G, H], in the dtype of `x`."""
    product = paddle.matmul(x, gate_up, transpose_y=True)
    half = product.shape[-1] // 2
    wide = product.astype("float32")
    return (paddle.nn.functional.silu(wide[..., :half]) * wide[..., half:]).astype(x.dtype)


def _by_choice(a: Any, x: Tensor, ids: Tensor) -> list[Tensor]:
    """What each choice says of its row, [n, H] a choice: through copies of the weights that were chosen."""

    def term(place: int) -> Tensor:
        expert = ids[:, place]
        gated = _gated(x.unsqueeze(1), at(a.gate_up, expert))
        return paddle.matmul(gated, at(a.down, expert), transpose_y=True).squeeze(1).astype("float32")

    return [term(place) for place in range(ids.shape[1])]


def _by_expert(a: Any, x: Tensor, ids: Tensor) -> list[Tensor]:
    """As `_by_choice`, with every row through every expert: weights are read once, where there are more choices than experts."""
    terms = [paddle.zeros([*x.shape], "float32") for _ in range(ids.shape[1])]
    for expert in range(a.gate_up.shape[0]):
        said = paddle.matmul(_gated(x, a.gate_up[expert]), a.down[expert], transpose_y=True).astype("float32")
        for place, before in enumerate(terms):
            terms[place] = choose((ids[:, place : place + 1] == expert).expand_as(said), said, before)
    return terms


def expert_mlp(a: Any, limits: Limits) -> Run:
    """Experts by choice for few rows, by expert for many."""
    del limits
    experts, chosen = a.gate_up.shape[0], a.expert_ids.shape[1]
    one = int(a.gate_up.element_size()) * int(np.prod(a.gate_up.shape[1:]))
    few = max(1, MOST_GATHERED // one)

    def run(n: int) -> None:
        terms, most = (_by_expert, MOST_ROWS) if n * chosen > 2 * experts else (_by_choice, few)
        for begin in range(0, n, most):
            _sum(a, begin, min(begin + most, n), terms)

    return run


def _sum(a: Any, begin: int, end: int, terms: Callable[[Any, Tensor, Tensor], list[Tensor]]) -> None:
    """Rows `begin` to `end` of the result."""
    ids, weights = a.expert_ids[begin:end], a.expert_weights[begin:end]
    total = paddle.zeros([end - begin, a.x.shape[1]], "float32")
    for place, term in enumerate(terms(a, a.x[begin:end], ids)):
        there = (ids[:, place : place + 1] >= 0).expand_as(term)
        total = total + choose(there, term * weights[:, place : place + 1], 0.0)
    put(a.out[begin:end], total if a.shared is None else total + _shared(a, begin, end))


def _shared(a: Any, begin: int, end: int) -> Tensor:
    """What the shared experts add to rows `begin` to `end`, in float32."""
    shared = a.shared[begin:end].astype("float32")
    return shared if a.shared_gate is None else shared * _sigmoid(a.shared_gate[begin:end])


def host_expert_mlp(a: Any, limits: Limits) -> Run:
    """`expert_mlp` where the host sees which experts have rows: each expert's rows at once, and no others."""
    del limits
    ids_h, weights_h, width = np.from_dlpack(a.expert_ids), np.from_dlpack(a.expert_weights), a.x.shape[1]
    first, kept = First(a.out), Kept()

    def run(n: int) -> None:
        if not n:
            return
        ids = ids_h[:n]
        terms = np.zeros((*ids.shape, width), np.float32)
        for expert in np.unique(ids[ids >= 0]).tolist():
            rows, places = np.nonzero(ids == expert)
            gated = _gated(take(a.x, index_of(rows)), a.gate_up[expert])
            said = paddle.matmul(gated, a.down[expert], transpose_y=True).numpy()
            terms[rows, places] = said * weights_h[rows, places, None]
        tensor, total = kept.get("total", (n, width), "float32")
        terms.sum(axis=1, out=total)
        if a.shared is not None:
            total += _shared(a, 0, n).numpy()
        first.rows(n)[0].copy_(tensor, False)

    return run


KERNELS: dict[str, Kernel] = {"route_experts": plain(route_experts), "expert_mlp": expert_mlp}
"""Contract to kernel."""
HOST: dict[str, Kernel] = {"expert_mlp": host_expert_mlp}
"""Those of a place whose memory the host sees."""
