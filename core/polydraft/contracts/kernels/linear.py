"""Defines `linear`: multiply every row by a weight matrix and add an optional bias.

All projections and the language-model head launch it. It never applies an activation and never looks at slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, opaque, tensor
from polydraft.contracts.sizes import INPUTS, ROWS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer


class LinearV1(Args):
    """Arguments of `linear`. `out` has the activation dtype, or f32 where it holds logits: "float" means either."""

    x: Buffer = tensor("N I", "act", "Input rows.")
    weight: Any = opaque("weight", "Matrix, one row an output: out = x @ weight.T + bias.", shape="O I")
    bias: Any = opaque("weight", "Added to every row; None for no bias.", shape="O", optional=True)
    out: Buffer = tensor("N O", "float", "Products, accumulated in at least float32 and rounded once.", access="out")


def golden(a: Any, n: int) -> None:
    """One sum of products an output element."""
    for r in range(n):
        for o in range(len(a.weight)):
            a.out[r, o] = (a.x[r] * a.weight[o]).sum() + (0.0 if a.bias is None else a.bias[o])


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Sum of absolute terms of each element."""
    magnitude = np.zeros((len(a.x), len(a.weight)))
    magnitude[:n] = np.abs(a.x[:n]) @ np.abs(a.weight).T + (0.0 if a.bias is None else np.abs(a.bias))
    return {"out": magnitude}


def _case(name: str, x: Array, weight: Array, n: int, *, bias: Array | None = None, dtype: str = "act") -> Case:
    arrays = {"x": x, "weight": weight, "bias": bias}
    return Case(name, arrays, {}, n, {"out": ((len(x), len(weight)), dtype)})


def cases() -> Iterator[Case]:
    """Named cases of `linear`."""
    rng = np.random.default_rng(3)
    x, weight, bias = (rng.standard_normal(s, np.float32) for s in ((6, 7), (4, 7), 4))
    yield _case("with_bias", x, weight, 5, bias=bias)
    yield _case("without_bias", x, weight, 5)
    yield _case("one_row", x[:1], weight, 1, bias=bias)
    yield _case("nothing_to_do", x, weight, 0, bias=bias)
    square = rng.standard_normal((7, 7), np.float32)
    yield _case("square_matrix_is_not_transposed", x, square, 6)
    yield _case("logits_in_float32", x, rng.standard_normal((19, 7), np.float32), 4, dtype="f32")
    large = np.float32(100) * rng.standard_normal((4, 33), np.float32)
    cancelling = np.concatenate([large, -large, x[:4]], axis=1)
    once, rest = rng.standard_normal((5, 33), np.float32), rng.standard_normal((5, 7), np.float32)
    yield _case("large_terms_cancel", cancelling, np.concatenate([once, once, rest], axis=1), 3)
    broken = x.copy()
    broken[2, 3], broken[4] = np.nan, 0.0
    yield _case("nan_row_and_zero_row_stay_alone", broken, weight, 6, bias=bias)
    wide = rng.standard_normal((17, 5), np.float32)
    yield _case("more_rows_than_a_tile", wide, rng.standard_normal((3, 5), np.float32), 16)
    unused = x.copy()
    unused[4:] = np.nan
    yield _case("rows_beyond_the_launch_are_not_read", unused, weight, 4, bias=bias)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows and matrix, bias on or off."""
    rows, inputs, outputs = (int(v) for v in rng.integers((1, 1, 1), (10, 30, 12)))
    rows, inputs, outputs = fitted(sizes, N=several(sizes, rows), I=inputs, O=outputs)
    x, weight = rng.standard_normal((rows, inputs), np.float32), rng.standard_normal((outputs, inputs), np.float32)
    bias = rng.standard_normal(outputs, np.float32) if rng.integers(2) else None
    return _case("random", x, weight, launched(rng, sizes, rows), bias=bias)


CONTRACT = REGISTRY.add(
    Contract(
        name="linear",
        version=1,
        unit="any",
        args=LinearV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="x @ weight.T + bias.",
        source="Matrix product; the head writes float32 logits.",
        tolerance={"out": 3.0},
        products=True,
        scale=scale,
        deterministic="run-to-run",
        feature="dense",
        compute=True,
        grows={"N": ROWS, "I": INPUTS, "O": VOCABULARY},
        independent=("N", "O"),
    )
)
