"""The reference's kernels of sums by leaf: a projection by stretches of its inputs, and the tree that adds the leaves.

The kernel table lists them; with row-invariant arithmetic the products are made of tiles of one shape. The experts' are in
`experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.sum_leaves import tree_sum
from polydraft.reference.experts import Product, matrix_product
from polydraft.reference.provider import Kernel, Run, plain


def linear_leaves(product: Product) -> Callable[[Any, Limits], Run]:
    """The kernel `linear_leaves` over a way to make products."""

    def bind(a: Any, limits: Limits) -> Run:
        del limits
        weight, bias = a.weight.array, None if a.bias is None else a.bias.array
        leaves, outputs, inputs = weight.shape

        def run(n: int) -> None:
            for leaf in range(leaves):
                out = a.out[:n, leaf * outputs : (leaf + 1) * outputs]
                out[...] = product(weight[leaf], a.x[:n, leaf * inputs : (leaf + 1) * inputs])
            if bias is not None:
                a.out[:n, :outputs] += bias

        return run

    return bind


def sum_leaves(a: Any, n: int) -> None:
    """Add neighbours pairwise."""
    x = a.x[:n].reshape(n, a.leaves, a.out.shape[1])
    a.out[:n] = tree_sum([x[:, leaf] for leaf in range(a.leaves)])


KERNELS: dict[str, Kernel] = {"linear_leaves": linear_leaves(matrix_product), "sum_leaves": plain(sum_leaves)}
