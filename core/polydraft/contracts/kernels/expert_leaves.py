"""Defines `expert_leaves`: what `expert_mlp` computes, as several sums of each row that ranks may share out.

A mixture-of-experts block launches it in the place of `expert_mlp`, where a text has to be the same for every number of ranks: a
rank computes the leaves that it keeps, to the bits that one device has of them. `sum_leaves` adds them. A leaf has the terms of
some of the features of every expert, or of some of the experts, whichever ranks share out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, opaque, param, tensor
from polydraft.contracts.kernels.expert_mlp import between, chosen_ids, expert_arrays
from polydraft.contracts.kernels.swiglu import sigmoid, silu
from polydraft.contracts.sizes import CHOSEN, EXPERTS, HIDDEN, ROWS, SMALL, Sizes, fitted, launched, several
from polydraft.device import Buffer


class ExpertLeavesV1(Args):
    """Arguments of `expert_leaves`. Weights of experts without rows are not read."""

    x: Buffer = tensor("N H", "act", "Input rows.")
    expert_ids: Buffer = tensor("N EK", "i32", "Experts of each row, at most once each; negative: none in this place.")
    expert_weights: Buffer = tensor("N EK", "f32", "What the output of each is multiplied by; not read where there is none.")
    gate_up: Any = opaque("weight", "Gate rows, then up rows, of each expert: G = 2 * I.", shape="EX G H")
    down: Any = opaque(
        "weight",
        'Projects back: a matrix for each leaf of each expert, expert by expert, I = leaves * J; with split "experts" one an '
        "expert, I = J.",
        shape="EXL H J",
    )
    shared: Buffer | None = tensor(
        "N LP", "f32", "Leaves of the shared experts' output, each added to its sum; None: there are none.", optional=True
    )
    shared_gate: Buffer | None = tensor(
        "N 1", "f32", "Logit whose sigmoid `shared` is multiplied by; None: it is not.", optional=True
    )
    leaves: int = param("How many there are.")
    split: Literal["features", "experts"] = param(
        "What a leaf has the terms of: its stretch of the inputs of every down projection, or its run of EX / leaves experts."
    )
    out: Buffer = tensor(
        "N LP", "f32",
        "The leaves side by side, LP = leaves * H: of each the sum over the choices of weight * down(silu(gate) * up), then "
        "shared; terms in the order of the choices, added in float32 from 0 on. silu(gate) * up may be rounded to act.",
        access="out",
    )  # fmt: skip


def terms_of(a: Any, expert: int) -> Iterator[tuple[int, slice, Any]]:
    """The leaves that an expert has terms in: the leaf, which of the expert's features these are of, and the matrix."""
    if a.split == "experts":
        yield expert // (len(a.gate_up) // a.leaves), slice(None), a.down[expert]
        return
    width = a.down.shape[2]
    for leaf in range(a.leaves):
        yield leaf, slice(leaf * width, (leaf + 1) * width), a.down[expert * a.leaves + leaf]


def golden(a: Any, n: int) -> None:
    """One term a choice and leaf."""
    hidden, half = a.x.shape[1], a.gate_up.shape[1] // 2
    for r in range(n):
        total = np.zeros((a.leaves, hidden))
        for expert, weight in zip(a.expert_ids[r].tolist(), a.expert_weights[r], strict=True):
            if expert >= 0:
                gate, up = np.split(a.gate_up[expert] @ a.x[r], [half])
                gated = np.array([silu(g) for g in gate]) * up
                for leaf, features, matrix in terms_of(a, expert):
                    total[leaf] += weight * (matrix @ gated[features])
        if a.shared is not None:
            total += a.shared[r].reshape(a.leaves, hidden) * (1.0 if a.shared_gate is None else sigmoid(a.shared_gate[r, 0]))
        a.out[r] = total.reshape(-1)


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """What an element is off by where every product and every rounding to the dtype is off by one unit."""
    rows, hidden = a.x.shape
    magnitude = np.zeros((rows, a.leaves, hidden))
    for r in range(n):
        for expert, weight in zip(a.expert_ids[r].tolist(), a.expert_weights[r], strict=True):
            if expert >= 0:
                _, off = between(a.x[r], a.gate_up[expert])
                for leaf, features, matrix in terms_of(a, expert):
                    magnitude[r, leaf] += np.abs(weight) * (np.abs(matrix) @ off[features])
        if a.shared is not None:
            magnitude[r] += np.abs(a.shared[r]).reshape(a.leaves, hidden)
    return {"out": magnitude.reshape(rows, -1)}


TOLERANCE: Final = 4.0
SUBNORMAL: Final = 2.0**-14
"""Below this float16 is as coarse as at it."""


def tipped(a: Any, n: int, off: float) -> Mapping[str, Array]:
    """Half of what eps of the activations is of each number of silu(gate) * up, 2**-14 at least, by absolute weights: what their
    rounding moves."""
    moved = np.zeros((len(a.x), a.leaves, a.x.shape[1]))
    for r in range(n):
        for expert, weight in zip(a.expert_ids[r].tolist(), a.expert_weights[r], strict=True):
            if expert >= 0:
                numbers, _ = between(a.x[r], a.gate_up[expert])
                rounded = off / (2.0 * TOLERANCE) * np.maximum(np.abs(numbers), SUBNORMAL)
                for leaf, features, matrix in terms_of(a, expert):
                    moved[r, leaf] += np.abs(weight) * (np.abs(matrix) @ rounded[features])
    return {"out": moved.reshape(len(a.x), -1)}


def _case(
    name: str, x: Array, ids: Array, gate_up: Array, down: Array, n: int, *, leaves: int, split: str = "features",
    weights: Array | None = None, shared: Array | None = None, shared_gate: Array | None = None,
) -> Case:  # fmt: skip
    arrays = expert_arrays(x, ids, gate_up, down, weights, shared, shared_gate)
    return Case(name, arrays, {"leaves": leaves, "split": split}, n, {"out": ((len(x), leaves * x.shape[1]), "f32")})


def _stacks(rng: np.random.Generator, experts: int, hidden: int, width: int, pieces: int) -> tuple[Array, Array]:
    """gate_up and down of experts whose down projection has `pieces` stretches of `width` inputs."""
    gate_up = rng.standard_normal((experts, 2 * width * pieces, hidden), np.float32)
    return gate_up, rng.standard_normal((experts * pieces, hidden, width), np.float32)


def cases() -> Iterator[Case]:
    """Named cases of `expert_leaves`."""
    rng = np.random.default_rng(43)
    x, ids = rng.standard_normal((6, 7), np.float32), chosen_ids(rng, 6, 4, 3)
    by_experts = _stacks(rng, 4, 7, 5, 1)
    for leaves in (1, 2, 4):
        yield _case(f"features_in_{leaves}", x, ids, *_stacks(rng, 4, 7, 3, leaves), 5, leaves=leaves)
        of_each = rng.standard_normal((6, 7 * leaves), np.float32)
        yield _case(f"experts_in_{leaves}", x, ids, *by_experts, 5, leaves=leaves, split="experts", shared=of_each)
    by_features, shared = _stacks(rng, 4, 7, 3, 4), rng.standard_normal((6, 28), np.float32)
    gates = np.array([[0.5], [-3.0], [0.0], [90.0], [-90.0], [1.0]], np.float32)
    yield _case("shared_experts_behind_a_gate", x, ids, *by_features, 6, leaves=4, shared=shared, shared_gate=gates)
    some = ids.copy()
    some[1], some[3, 0], some[4, 2] = -1, -1, -1
    unset = np.full((6, 3), 0.5, np.float32)
    unset[some < 0] = np.nan
    yield _case("places_without_an_expert", x, some, *by_features, 6, leaves=4, weights=unset, shared=shared)
    yield _case("leaves_without_an_expert", x, np.full((6, 1), 2), *by_experts, 6, leaves=4, split="experts")
    unread = by_features[0].copy(), by_features[1].copy()
    unread[0][1], unread[1][4:8] = np.nan, np.nan
    yield _case("an_expert_without_rows_is_not_read", x, np.array([[0, 2], [3, 0], [2, 3]] * 2), *unread, 6, leaves=4)
    beyond = ids.copy()
    beyond[4:] = 1_000_000
    yield _case("rows_beyond_the_launch_are_not_read", x, beyond, *by_features, 4, leaves=4)
    broken = x.copy()
    broken[2, 3] = np.nan
    yield _case("a_row_of_nan_stays_alone", broken, ids, *by_experts, 6, leaves=2, split="experts")
    yield _case("one_row", x[:1], ids[:1], *by_features, 1, leaves=4)
    wide = rng.standard_normal((37, 6), np.float32)
    yield _case(
        "more_rows_and_experts_than_a_tile", wide, chosen_ids(rng, 37, 12, 3), *_stacks(rng, 12, 6, 3, 2), 35, leaves=2,
    )  # fmt: skip
    yield _case("nothing_to_do", x, ids, *by_features, 0, leaves=4)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random experts in either split; some places of some rows have none."""
    rows, hidden, width, most = (int(v) for v in rng.integers((1, 1, 1, 1), (12, 20, 6, 3)))
    leaves, split = int(rng.choice([1, 2, 4])), str(rng.choice(["features", "experts"]))
    rows, hidden = fitted(sizes, N=several(sizes, rows), H=hidden)
    (experts,) = fitted(sizes, EX=max(4 * most, -(-sizes.get("EK", 0) // 4) * 4))
    leaves = math.gcd(leaves, experts) if split == "experts" else leaves  # any number of experts may be asked for
    chosen = min(experts, *fitted(sizes, EK=int(rng.choice([1, 3, 4]))))
    gate_up, down = _stacks(rng, experts, hidden, width, leaves if split == "features" else 1)
    if sizes:  # as trained weights are: float16 ends at 65504
        gate_up, down = gate_up / np.float32(hidden**0.5), down / np.float32(width**0.5)
    ids = np.where(rng.random((rows, chosen)) < rng.choice([0.0, 0.3]), -1, chosen_ids(rng, rows, experts, chosen))
    shared = rng.standard_normal((rows, leaves * hidden), np.float32) if rng.integers(2) else None
    gate = rng.standard_normal((rows, 1), np.float32) if shared is not None and rng.integers(2) else None
    return _case(
        "random", rng.standard_normal((rows, hidden), np.float32), ids, gate_up, down, launched(rng, sizes, rows), leaves=leaves,
        split=split, weights=rng.random((rows, chosen), np.float32), shared=shared, shared_gate=gate,
    )  # fmt: skip


CONTRACT = REGISTRY.add(
    Contract(
        name="expert_leaves",
        version=1,
        unit="any",
        args=ExpertLeavesV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Weighted sums of the networks of each row's experts, by stretches of features or runs of experts.",
        source="`expert_mlp`, with as many sums whatever the number of ranks is.",
        tolerance={"out": TOLERANCE},
        products=True,
        scale=scale,
        deterministic="run-to-run",
        constraints=("1 <= leaves", "LP == leaves * H"),
        symbols={
            "EX": "experts",
            "EK": "experts of a row",
            "EXL": "matrices of all experts",
            "J": "inputs of one matrix",
            "LP": "elements of all leaves",
        },
        feature="leaves",
        compute=True,
        grows={"N": ROWS, "H": HIDDEN, "EX": EXPERTS, "EK": CHOSEN},
        independent=("N",),
        tipped=tipped,
    )
)
