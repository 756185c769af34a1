"""Defines `linear`: multiply every row by a weight matrix and add an optional bias.

All projections and the language-model head launch it. It never applies an activation and never looks at slots. The matrix may be
packed (`contracts/packing.py`), where a backend declares that it takes it so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, opaque, tensor
from polydraft.contracts.packing import PACKINGS, Packing, multiplied, pack
from polydraft.contracts.sizes import INPUTS, PASS_ROWS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer


class LinearV1(Args):
    """Arguments of `linear`. `out` has the activation dtype, or f32 where it holds logits: "float" means either."""

    x: Buffer = tensor("N I", "act", "Input rows.")
    weight: Any = opaque("weight", "Matrix, one row an output: out = x @ weight.T + bias.", shape="O I")
    bias: Any = opaque("weight", "Added to every row; None for no bias.", shape="O", optional=True)
    out: Buffer = tensor("N O", "float", "Products, accumulated in at least float32 and rounded once.", access="out")


def golden(a: Any, n: int) -> None:
    """One sum of products an output element."""
    x, weight = multiplied(a.x, a.weight)
    for r in range(n):
        for o in range(len(weight)):
            a.out[r, o] = (x[r] * weight[o]).sum() + (0.0 if a.bias is None else a.bias[o])


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Sum of absolute terms of each element."""
    x, weight = multiplied(a.x, a.weight)
    magnitude = np.zeros((len(x), len(weight)))
    magnitude[:n] = np.abs(x[:n]) @ np.abs(weight).T + (0.0 if a.bias is None else np.abs(a.bias))
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


def packed_cases(packing: str) -> Iterator[Case]:
    """Cases of a packing, by its name: its scales, zero points and columns all differ."""
    kind, rng = PACKINGS[packing], np.random.default_rng(25)
    x = rng.standard_normal((5, 300), np.float32) * np.array([[1], [2], [4], [8], [16]], np.float32)
    magnitudes = np.float32(2) ** rng.integers(-3, 3, (-(-150 // 8), -(-300 // 16)))
    grown = np.kron(magnitudes, np.ones((8, 16), np.float32))[:150, :300] * rng.standard_normal((150, 300), np.float32)
    matrix = np.asarray(grown + grown.std() * rng.standard_normal((150, 1)), np.float32)
    for name, outputs, inputs, n in (("scales_differ", 150, 300, 5), ("odd_columns", 19, 37, 4), ("one_row", 33, 160, 1)):
        bias = rng.standard_normal(outputs, np.float32)
        yield _packed(kind, _case(f"{name} {packing}", x[:, :inputs].copy(), matrix[:outputs, :inputs].copy(), n, bias=bias))
    broken = x[:, :160].copy()
    broken[1, 140], broken[2] = np.nan, 0.0
    yield _packed(kind, _case(f"nan_row_and_zero_row_stay_alone {packing}", broken, matrix[:20, :160].copy(), 5))
    zeros = matrix[:20, :160].copy()
    zeros[3], zeros[:, 32:64] = 0.0, 0.0
    yield _packed(kind, _case(f"zero_weights {packing}", x[:, :160].copy(), zeros, 5, dtype="f32"))
    wide = rng.standard_normal((19, 256), np.float32)
    yield _packed(kind, _case(f"more_rows_than_a_tile {packing}", wide, rng.standard_normal((67, 256), np.float32), 18))


def _packed(packing: Packing, case: Case) -> Case:
    return replace(case, arrays={**case.arrays, "weight": pack(case.arrays["weight"], packing)})


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
        sums={"out": "I"},
        products=True,
        scale=scale,
        deterministic="run-to-run",
        feature="dense",
        compute=True,
        grows={"N": PASS_ROWS, "I": INPUTS, "O": VOCABULARY},
        together=({"N": 129, "I": 4099, "O": 4099},),  # also more than 2**24 weights
        independent=("N", "O"),
        packed_cases=packed_cases,
    )
)
