"""Defines `swiglu`: the gated activation between the two projections of a feed-forward block.

Every dense feed-forward part launches it on the joint gate and up projection. It never looks at slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.sizes import FEED_FORWARD, PASS_ROWS, SMALL, Sizes, fitted, launched, several
from polydraft.device import Buffer


class SwigluV1(Args):
    """Arguments of `swiglu`."""

    gate_up: Buffer = tensor("N G", "act", "Gate columns, then up columns: G = 2 * I.")
    out: Buffer = tensor("N I", "act", "silu(gate) * up, with silu(g) = g / (1 + exp(-g)).", access="out")


def sigmoid(g: float) -> float:
    """Return the logistic function of g, without overflow on either side."""
    return 1.0 / (1.0 + math.exp(-g)) if g >= 0 else math.exp(g) / (1.0 + math.exp(g))


def silu(g: float) -> float:
    """Return g times the logistic function of g."""
    return g * sigmoid(g)


def golden(a: Any, n: int) -> None:
    """Element by element."""
    width = a.out.shape[1]
    for r in range(n):
        for i in range(width):
            a.out[r, i] = silu(a.gate_up[r, i]) * a.gate_up[r, width + i]


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Magnitude of the result times 1 + |gate|, the condition of exp; the floor lets float32 underflow to zero."""
    width = a.gate_up.shape[1] // 2
    magnitude = np.zeros((len(a.gate_up), width))
    for r in range(n):
        for i in range(width):
            gate, up = a.gate_up[r, i], abs(a.gate_up[r, width + i])
            magnitude[r, i] = abs(silu(gate)) * up * (1.0 + abs(gate)) + 1e-28 * up
    return {"out": magnitude}


def _case(name: str, gate: Array, up: Array, n: int) -> Case:
    return Case(name, {"gate_up": np.concatenate([gate, up], axis=1)}, {}, n, {"out": (gate.shape, "act")})


def cases() -> Iterator[Case]:
    """Named cases of `swiglu`."""
    rng = np.random.default_rng(4)
    gate, up = rng.standard_normal((2, 6, 5), np.float32)
    yield _case("gate_comes_before_up", gate, up, 5)
    yield _case("every_row_used", gate, up, 6)
    yield _case("one_column", gate[:, :1], up[:, :1], 4)
    saturated = np.array([[100, -100, 0, 20, -20], [-200, 200, -88, 88, -0.5]], np.float32)
    yield _case("saturated_gates_do_not_overflow", saturated, up[:2], 2)
    yield _case("large_up_values", gate, up * np.float32(1e4), 5)
    broken = gate.copy()
    broken[1, 2] = np.nan
    yield _case("nan_stays_in_its_element", broken, up, 4)
    yield _case("nothing_to_do", gate, up, 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random gates of a few magnitudes."""
    rows, width = (int(v) for v in rng.integers((1, 1), (8, 14)))
    rows, width = fitted(sizes, N=several(sizes, rows), I=width)
    gate, up = rng.standard_normal((2, rows, width), np.float32)
    return _case("random", gate * np.float32(rng.choice([0.1, 1, 5])), up, launched(rng, sizes, rows))


CONTRACT = REGISTRY.add(
    Contract(
        name="swiglu",
        version=1,
        unit="any",
        args=SwigluV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="silu(gate) * up of a joint [gate | up] row.",
        source="Shazeer 2020, GLU Variants Improve Transformer.",
        tolerance={"out": 3.0},
        scale=scale,
        constraints=("G == 2 * I",),
        feature="dense",
        compute=True,
        grows={"N": PASS_ROWS, "I": FEED_FORWARD},
        independent=("N",),
    )
)
