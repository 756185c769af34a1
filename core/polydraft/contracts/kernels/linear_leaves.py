"""Defines `linear_leaves`: a projection whose inputs ranks may share out, computed as one product for each of several stretches
of the inputs.

The output projection of attention and the down projection of a network launch it in the place of `linear`, where a text has to be
the same for every number of ranks: a rank computes the stretches that it keeps, to the bits that one device has of them.
`sum_leaves` adds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, opaque, param, tensor
from polydraft.contracts.sizes import ROWS, SMALL, Ladder, Sizes, fitted, launched, several
from polydraft.device import Buffer


class LinearLeavesV1(Args):
    """Arguments of `linear_leaves`. Each leaf is computed as `linear` computes a projection of as many inputs."""

    x: Buffer = tensor("N I", "act", "Input rows: the inputs of all leaves side by side, I = leaves * J.")
    weight: Any = opaque("weight", "A matrix for each leaf, one row an output.", shape="LV O J")
    bias: Any = opaque("weight", "Added to the first leaf; None for no bias.", shape="O", optional=True)
    leaves: int = param("How many there are (LV).")
    out: Buffer = tensor("N LP", "f32", "Products of the leaves side by side, LP = leaves * O.", access="out")


def golden(a: Any, n: int) -> None:
    """Leaf by leaf."""
    _, outputs, inputs = a.weight.shape
    for r in range(n):
        for leaf in range(a.leaves):
            product = a.weight[leaf] @ a.x[r, leaf * inputs : (leaf + 1) * inputs]
            if leaf == 0 and a.bias is not None:
                product = product + a.bias
            a.out[r, leaf * outputs : (leaf + 1) * outputs] = product


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Sum of absolute terms of each element."""
    leaves, outputs, inputs = a.weight.shape
    magnitude = np.zeros((len(a.x), leaves, outputs))
    for leaf in range(leaves):
        part = np.abs(a.x[:n, leaf * inputs : (leaf + 1) * inputs])
        magnitude[:n, leaf] = part @ np.abs(a.weight[leaf]).T + (0.0 if leaf or a.bias is None else np.abs(a.bias))
    return {"out": magnitude.reshape(len(a.x), -1)}


def _case(name: str, x: Array, weight: Array, n: int, *, bias: Array | None = None) -> Case:
    leaves, outputs, _ = weight.shape
    return Case(
        name, {"x": x, "weight": weight, "bias": bias}, {"leaves": leaves}, n, {"out": ((len(x), leaves * outputs), "f32")}
    )


def cases() -> Iterator[Case]:
    """Named cases of `linear_leaves`."""
    rng = np.random.default_rng(42)
    x, weight = rng.standard_normal((6, 20), np.float32), rng.standard_normal((4, 4, 5), np.float32)
    for leaves in (1, 2, 3, 4):
        yield _case(f"leaves_{leaves}", x[:, : 5 * leaves].copy(), weight[:leaves].copy(), 5)
    bias = rng.standard_normal(4, np.float32)
    yield _case("a_bias_is_the_first_leafs", x, weight, 6, bias=bias)
    yield _case("one_row", x[:1], weight, 1, bias=bias)
    yield _case("nothing_to_do", x, weight, 0, bias=bias)
    yield _case("square_matrices_are_not_transposed", x, rng.standard_normal((4, 5, 5), np.float32), 5)
    yield _case("one_input_a_leaf", x[:, :3].copy(), rng.standard_normal((3, 7, 1), np.float32), 4)
    broken = x.copy()
    broken[2, 3], broken[4] = np.nan, 0.0
    yield _case("nan_stays_in_its_leaf_and_row", broken, weight, 6, bias=bias)
    wide = rng.standard_normal((17, 74), np.float32)
    yield _case("more_rows_and_outputs_than_a_tile", wide, rng.standard_normal((2, 35, 37), np.float32), 16)
    unused = x.copy()
    unused[4:] = np.nan
    yield _case("rows_beyond_the_launch_are_not_read", unused, weight, 4, bias=bias)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows and matrices, bias on or off."""
    rows, inputs, outputs, leaves = (int(v) for v in rng.integers((1, 1, 1, 1), (10, 12, 12, 6)))
    rows, inputs, outputs = fitted(sizes, N=several(sizes, rows), J=inputs, O=outputs)
    x, weight = (
        rng.standard_normal((rows, leaves * inputs), np.float32),
        rng.standard_normal((leaves, outputs, inputs), np.float32),
    )
    bias = rng.standard_normal(outputs, np.float32) if rng.integers(2) else None
    return _case("random", x, weight, launched(rng, sizes, rows), bias=bias)


CONTRACT = REGISTRY.add(
    Contract(
        name="linear_leaves",
        version=1,
        unit="any",
        args=LinearLeavesV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="A projection by stretches of its inputs: their products side by side.",
        source="Shoeybi et al. 2019, Megatron-LM: layers split by rows, with as many stretches whatever the number of ranks is.",
        tolerance={"out": 3.0},
        sums={"out": "J"},
        products=True,
        scale=scale,
        deterministic="run-to-run",
        constraints=("1 <= leaves", "I % leaves == 0"),
        symbols={"LV": "leaves", "J": "inputs of one leaf", "LP": "outputs of all leaves"},
        feature="leaves",
        compute=True,
        grows={"N": ROWS, "J": Ladder((257, 1025, 4864)), "O": Ladder((257, 1025, 5120))},
        independent=("N",),
    )
)
