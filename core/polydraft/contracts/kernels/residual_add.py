"""Defines `residual_add`: add a branch's output to the residual stream in place.

Every decoder block launches it after attention and after the feed-forward part. It never scales and never skips a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.sizes import HIDDEN, PASS_ROWS, SMALL, Sizes, fitted, launched, several
from polydraft.device import Buffer


class ResidualAddV1(Args):
    """Arguments of `residual_add`."""

    x: Buffer = tensor("N H", "act", "Residual stream, x := x + y.", access="inout")
    y: Buffer = tensor("N H", "act", "What the branch adds.")


def golden(a: Any, n: int) -> None:
    """Add row by row."""
    for r in range(n):
        a.x[r] = a.x[r] + a.y[r]


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Sum of both magnitudes (within a factor of two before and after the addition)."""
    magnitude = np.zeros_like(a.x)
    magnitude[:n] = np.abs(a.x[:n]) + np.abs(a.y[:n])
    return {"x": magnitude}


def _case(name: str, x: Array, y: Array, n: int) -> Case:
    return Case(name, {"x": x, "y": y}, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `residual_add`."""
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal((5, 7), np.float32) for _ in range(2))
    yield _case("rows_beyond_the_launch_stay", x, y, 3)
    yield _case("every_row_used", x, y, 5)
    yield _case("nothing_to_do", x, y, 0)
    yield _case("small_branch_on_a_large_stream", x * np.float32(1e4), y * np.float32(1e-2), 4)
    yield _case("branch_cancels_the_stream", x, -x, 4)
    broken_x, broken_y = x.copy(), y.copy()
    broken_x[0, 1], broken_y[2, 3] = np.nan, np.inf
    yield _case("nan_and_infinity_stay_in_their_column", broken_x, broken_y, 4)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows of random magnitudes."""
    rows, width = (int(v) for v in rng.integers((1, 1), (9, 20)))
    rows, width = fitted(sizes, N=several(sizes, rows), H=width)
    x, y = (rng.standard_normal((rows, width), np.float32) * np.float32(10.0 ** rng.uniform(-2, 2)) for _ in range(2))
    return _case("random", x, y, launched(rng, sizes, rows))


CONTRACT = REGISTRY.add(
    Contract(
        name="residual_add",
        version=1,
        unit="any",
        args=ResidualAddV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="x := x + y, rows below the launch length.",
        source="He et al. 2016, Deep Residual Learning.",
        tolerance={"x": 1.0},
        scale=scale,
        feature="dense",
        grows={"N": PASS_ROWS, "H": HIDDEN},
        independent=("N", "H"),
    )
)
