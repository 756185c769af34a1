"""Defines `rms_norm`: scale every row to unit root mean square, then by a learned weight.

Every decoder block and the MTP block launch it. It never subtracts a mean and never lets one row look at another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, opaque, param, tensor
from polydraft.contracts.sizes import HIDDEN, PASS_ROWS, SMALL, Sizes, fitted, launched, several
from polydraft.device import Buffer


class RmsNormV1(Args):
    """Arguments of `rms_norm`."""

    x: Buffer = tensor("N D", "act", "Rows to normalise; statistics are taken in at least float32.")
    weight: Any = opaque("weight", "Gain of each column.", shape="D")
    out: Buffer = tensor("N D", "act", "Normalised rows.", access="out")
    eps: float = param("Added to the mean of squares; greater than 0.")
    plus_one: bool = param("The gain is 1 + weight instead of weight (Qwen3-Next).")


def normalize(x: Array, weight: Array, *, eps: float, plus_one: bool) -> Array:
    """Return RMSNorm of one float64 vector; the other goldens that normalise share it."""
    mean_square = sum(v * v for v in x) / len(x)
    gain = 1.0 + weight if plus_one else weight
    normalized: Array = x / np.sqrt(mean_square + eps) * gain
    return normalized


def golden(a: Any, n: int) -> None:
    """Normalise row by row."""
    for r in range(n):
        a.out[r] = normalize(a.x[r], a.weight, eps=a.eps, plus_one=a.plus_one)


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Magnitude of each product, with 1 + weight counted as 1 + |weight|: that sum may cancel."""
    magnitude = np.zeros_like(a.x)
    for r in range(n):
        magnitude[r] = np.abs(normalize(a.x[r], np.abs(a.weight), eps=a.eps, plus_one=a.plus_one))
    return {"out": magnitude}


def _case(name: str, x: Array, weight: Array, n: int, *, eps: float = 1e-5, plus_one: bool = False) -> Case:
    return Case(name, {"x": x, "weight": weight}, {"eps": eps, "plus_one": plus_one}, n, {"out": (x.shape, "act")})


def cases() -> Iterator[Case]:
    """Named cases of `rms_norm`."""
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((6, 8), np.float32), rng.standard_normal(8, np.float32)
    yield _case("plain_gain", x, weight, 4)
    yield _case("gain_is_one_plus_weight", x, weight - np.float32(0.5), 4, plus_one=True)
    yield _case("epsilon_outweighs_the_squares", x * np.float32(1e-3), weight, 5, eps=1e-5)
    yield _case("squares_far_above_one", x * np.float32(1e3), weight, 5)
    yield _case("common_offset_is_kept", x + np.float32(3), weight, 5)
    yield _case("one_column", x[:, :1].copy(), weight[:1], 5)
    yield _case("row_as_wide_as_no_vector", rng.standard_normal((3, 67), np.float32), np.ones(67, np.float32), 3)
    holes = x.copy()
    holes[1], holes[3] = np.nan, 0.0
    yield _case("nan_row_and_zero_row_stay_alone", holes, weight, 5)
    yield _case("nothing_to_do", x, weight, 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows of random magnitude."""
    rows, width = (int(v) for v in rng.integers((1, 1), (8, 34)))
    rows, width = fitted(sizes, N=several(sizes, rows), D=width)
    x = rng.standard_normal((rows, width), np.float32) * np.float32(10.0 ** rng.uniform(-2, 2))
    weight = rng.standard_normal(width, np.float32)
    n, plus_one = launched(rng, sizes, rows), bool(rng.integers(2))
    return _case("random", x, weight, n, eps=float(rng.choice([1e-6, 1e-5])), plus_one=plus_one)


CONTRACT = REGISTRY.add(
    Contract(
        name="rms_norm",
        version=1,
        unit="any",
        args=RmsNormV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="x / sqrt(mean(x**2) + eps), times weight or 1 + weight.",
        source="Zhang and Sennrich 2019, Root Mean Square Layer Normalization.",
        tolerance={"out": 4.0},
        scale=scale,
        sums={"out": "D"},
        deterministic="run-to-run",
        constraints=("eps > 0",),
        feature="dense",
        compute=True,
        grows={"N": PASS_ROWS, "D": HIDDEN},
        independent=("N",),
    )
)
