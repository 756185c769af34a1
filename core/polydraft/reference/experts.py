"""The reference's mixture-of-experts kernels: `route_experts` by sorting, `expert_mlp` expert by expert.

The kernel table lists them. The terms of a row are added in the order of its choices, whichever expert ran first; with
row-invariant arithmetic their products are made of tiles of one shape, too. A packed stack is the float32 one that it stands for.
`expert_leaves` is `expert_mlp` with several sums a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.reference.packed_weights import rounding
from polydraft.reference.provider import Kernel, Run, plain

Product = Callable[[Array, Array], Array]
"""weight [O, I], x [n, I] -> [n, O]."""


def route_experts(a: Any, n: int) -> None:
    """Score, mask groups, sort, weigh."""
    logits, chosen = a.logits[:n], a.expert_ids.shape[1]
    scores = _softmax(logits) if a.scoring == "softmax" else _sigmoid(logits)
    selection = scores if a.bias is None else scores + a.bias.array
    selection = np.where(np.isnan(selection), -np.inf, selection)
    if a.num_groups > 1:
        groups = selection.reshape(n, a.num_groups, -1)
        two = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
        kept = np.zeros((n, a.num_groups), bool)
        np.put_along_axis(kept, np.argsort(-two, axis=-1, kind="stable")[:, : a.top_groups], True, axis=-1)
        selection = np.where(kept[..., None], groups, -np.inf).reshape(n, -1)
    ids = np.argsort(-selection, axis=-1, kind="stable")[:, :chosen]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if a.renormalize != "none":
        total = weights.sum(axis=-1, keepdims=True)
        weights /= total + np.float32(a.floor) if a.renormalize == "sum" else np.maximum(total, np.float32(a.floor))
    a.expert_ids[:n], a.expert_weights[:n] = ids, weights * np.float32(a.scale)
    if a.row_slot is not None:
        absent = a.row_slot[:n] < 0
        a.expert_ids[:n][absent], a.expert_weights[:n][absent] = -1, 0.0


def _softmax(logits: Array) -> Array:
    power: Array = np.exp(logits - logits.max(axis=-1, keepdims=True))
    power /= power.sum(axis=-1, keepdims=True)
    return power


def _sigmoid(logits: Array) -> Array:
    with np.errstate(over="ignore"):
        result: Array = 1.0 / (1.0 + np.exp(-logits))
    return result


def expert_mlp(product: Product) -> Callable[[Any, Limits], Run]:
    """The kernel `expert_mlp` over a way to make products."""

    def bind(a: Any, limits: Limits) -> Run:
        del limits
        gate_up, down = a.gate_up.array, a.down.array
        rounded, rounded_between = rounding(a.gate_up.packing), rounding(a.down.packing)
        half = down.shape[2]

        def run(n: int) -> None:
            ids = a.expert_ids[:n]
            terms = np.zeros((*ids.shape, a.x.shape[1]), np.float32)
            for expert in np.unique(ids[ids >= 0]):
                rows, places = np.nonzero(ids == expert)
                gated = product(gate_up[expert], rounded(a.x[rows]))
                gated = rounded_between(_silu(gated[:, :half]) * gated[:, half:])
                terms[rows, places] = product(down[expert], gated) * a.expert_weights[rows, places, None]
            out = a.out[:n]
            out[...] = 0.0
            for place in range(ids.shape[1]):
                out += terms[:, place]
            if a.shared is not None:
                out += a.shared[:n] if a.shared_gate is None else a.shared[:n] * _sigmoid(a.shared_gate[:n])

        return run

    return bind


def expert_leaves(product: Product) -> Callable[[Any, Limits], Run]:
    """The kernel `expert_leaves` over a way to make products."""

    def bind(a: Any, limits: Limits) -> Run:
        del limits
        gate_up, down, leaves = a.gate_up.array, a.down.array, a.leaves
        half, (_, hidden, width) = gate_up.shape[1] // 2, down.shape
        of_leaf = len(gate_up) // leaves if a.split == "experts" else 0

        def run(n: int) -> None:
            ids, weights = a.expert_ids[:n], a.expert_weights[:n]
            terms = np.zeros((*ids.shape, leaves, hidden), np.float32)
            for expert in np.unique(ids[ids >= 0]).tolist():
                rows, places = np.nonzero(ids == expert)
                gated = product(gate_up[expert], a.x[rows])
                gated = _silu(gated[:, :half]) * gated[:, half:]
                scale = weights[rows, places, None]
                if of_leaf:
                    terms[rows, places, expert // of_leaf] = product(down[expert], gated) * scale
                    continue
                for leaf in range(leaves):
                    part = gated[:, leaf * width : (leaf + 1) * width]
                    terms[rows, places, leaf] = product(down[expert * leaves + leaf], part) * scale
            out = a.out[:n].reshape(n, leaves, hidden)
            out[...] = 0.0
            for place in range(ids.shape[1]):
                out += terms[:, place]
            if a.shared is not None:
                shared = a.shared[:n].reshape(out.shape)
                out += shared if a.shared_gate is None else shared * _sigmoid(a.shared_gate[:n])[:, None]

        return run

    return bind


def _silu(gate: Array) -> Array:
    with np.errstate(over="ignore"):
        result: Array = gate / (1.0 + np.exp(-gate))
    return result


def matrix_product(weight: Array, x: Array) -> Array:
    """x @ weight.T by whatever shape it has."""
    product: Array = x @ weight.T
    return product


KERNELS: dict[str, Kernel] = {
    "route_experts": plain(route_experts),
    "expert_mlp": expert_mlp(matrix_product),
    "expert_leaves": expert_leaves(matrix_product),
}
