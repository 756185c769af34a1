"""Defines `sum_leaves`: the leaves of a sum that ranks may share out, added in one balanced binary tree.

Half of a decoder block launches it behind `linear_leaves` or `expert_leaves`, where a text has to be the same for every number of
ranks: ranks keep subtrees of one tree, and the collective `all_reduce` joins those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, param, tensor
from polydraft.contracts.sizes import HIDDEN, ROWS, SMALL, Sizes, fitted, launched, several
from polydraft.device import Buffer


class SumLeavesV1(Args):
    """Arguments of `sum_leaves`."""

    x: Buffer = tensor("N LP", "f32", "The leaves of each row side by side, the first one first.")
    leaves: int = param("How many there are.")
    out: Buffer = tensor(
        "N H", "float", "Their sum: float32 in the order of the tree, rounded once; f32 where ranks go on with it.", access="out"
    )


def tree_sum(terms: Sequence[Array]) -> Array:
    """The sum of a balanced binary tree over `terms`: neighbours are added pairwise until one is left. Where their number is odd
    the last waits for the next turn."""
    while len(terms) > 1:
        pairs = [terms[i] + terms[i + 1] for i in range(0, len(terms) - 1, 2)]
        terms = [*pairs, terms[-1]] if len(terms) % 2 else pairs
    return terms[0]


def golden(a: Any, n: int) -> None:
    """Row by row."""
    width = a.out.shape[1]
    for r in range(n):
        a.out[r] = tree_sum([a.x[r, leaf * width : (leaf + 1) * width] for leaf in range(a.leaves)])


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Sum of all magnitudes."""
    magnitude = np.zeros((len(a.x), a.x.shape[1] // a.leaves))
    magnitude[:n] = np.abs(a.x[:n]).reshape(n, a.leaves, magnitude.shape[1]).sum(axis=1)
    return {"out": magnitude}


def _case(name: str, x: Array, n: int, leaves: int) -> Case:
    return Case(name, {"x": x}, {"leaves": leaves}, n, {"out": ((len(x), x.shape[1] // leaves), "act")})


def cases() -> Iterator[Case]:
    """Named cases of `sum_leaves`."""
    rng = np.random.default_rng(41)
    for leaves in (1, 2, 3, 4):
        yield _case(f"leaves_{leaves}", rng.standard_normal((5, 7 * leaves), np.float32), 4, leaves)
    x = rng.standard_normal((3, 20), np.float32)
    yield _case("every_row_used", x, 3, 4)
    yield _case("nothing_to_do", x, 0, 4)
    unlike = np.repeat(np.array([1, 1e-3, 1e3, 1e-6], np.float32), 5)
    yield _case("leaves_of_unlike_magnitude", x * unlike, 2, 4)
    yield _case("leaves_cancel", np.concatenate((x, -x), axis=1), 3, 8)
    broken = x.copy()
    broken[0, 7], broken[1, 19] = np.nan, np.inf
    yield _case("nan_and_infinity_stay_in_their_column", broken, 2, 4)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random leaves of random magnitudes."""
    rows, width, leaves = (int(v) for v in rng.integers((1, 1, 1), (9, 20, 6)))
    rows, width = fitted(sizes, N=several(sizes, rows), H=width)
    x = rng.standard_normal((rows, width * leaves), np.float32) * np.float32(10.0 ** rng.uniform(-2, 2))
    return _case("random", x, launched(rng, sizes, rows), leaves)


CONTRACT = REGISTRY.add(
    Contract(
        name="sum_leaves",
        version=1,
        unit="any",
        args=SumLeavesV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Sum of leaves that lie side by side, in one balanced binary tree.",
        source="Pairwise summation (Higham 1993), over as many terms whatever the number of ranks is.",
        tolerance={"out": 2.0},
        scale=scale,
        constraints=("1 <= leaves", "leaves <= 16", "LP == leaves * H"),
        symbols={"LP": "elements of all leaves"},
        feature="leaves",
        grows={"N": ROWS, "H": HIDDEN},
        independent=("N",),
    )
)
