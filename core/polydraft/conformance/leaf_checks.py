"""Level L2 of sums by leaf: what one rank computes has the bits that one device has of it, and the tree has one order.

For backends that declare `ordered_sums`, on the kernels of a row-invariant engine, in each dtype in which ranks add up. The
cases are those of contracts, taken apart as ranks take a model apart; whole engines follow in `lossless_checks.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from polydraft.conformance.check import Check, Tally
from polydraft.conformance.harness import run_kernel
from polydraft.conformance.kernel_checks import opened_for
from polydraft.conformance.target import Target
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Case, LogicalCache
from polydraft.contracts.compare import to_host
from polydraft.contracts.inputs import generated
from polydraft.contracts.kernels.sum_leaves import tree_sum
from polydraft.device import Array

RANKS: Final = (2, 4)
ROWS: Final = 5
LEAVES: Final = 4
"""As many leaves as a sum has, of which ranks have a run each."""


def checks() -> Iterator[Check]:
    """Every check of sums by leaf."""
    for name, contract, compare in (
        ("order", "sum_leaves", _order), ("projections", "linear_leaves", _projections), ("experts", "expert_leaves", _experts),
        ("columns", "linear", _columns), ("heads", "paged_attention", _heads),
    ):  # fmt: skip
        yield Check(f"L2/leaves/{name}", _in_each_dtype(contract, compare), needs=("row_invariant", "ordered_sums"), features=())


Run = Callable[[Case], dict[str, Array]]
"""Runs a case, and gives what its outputs are left with as it is stored."""


def _in_each_dtype(contract: str, compare: Callable[[Run, str, Tally], None]) -> Callable[[Target, Tally], None]:
    """A check that runs cases of a contract by the kernel that a row-invariant engine has."""
    kernel = REGISTRY[contract]

    def check(target: Target, tally: Tally) -> None:
        for dtype in target.info.capabilities.rank_dtypes:
            opened, act = opened_for(target, kernel, dtype, row_invariant=True)
            run = partial(run_kernel, kernel, device=opened.device, table=opened.table, act=act, init_meta=opened.init_meta)
            compare(run, act, tally)

    return check


def _order(run: Run, act: str, tally: Tally) -> None:
    """Leaves of unlike magnitude, added in the order of the tree to the bit; two show nothing, for addition commutes. Rounded
    once, or not at all where other ranks go on."""
    rng, width = np.random.default_rng(6), 40
    for leaves, dtype in itertools.product((1, 3, 4, 8, 16), dict.fromkeys((act, "f32"))):
        x = (rng.standard_normal((ROWS, leaves, width)) * 10.0 ** rng.uniform(-3, 3, (1, leaves, width))).astype(np.float32)
        stored = "act" if dtype == act else dtype
        case = Case("tree", {"x": x.reshape(ROWS, -1)}, {"leaves": leaves}, ROWS, {"out": ((ROWS, width), stored)})
        wanted = to_host(tree_sum([x[:, leaf] for leaf in range(leaves)]), dtype)
        tally.same_bits(f"the sum of {leaves} leaves in {dtype}", run(case)["out"], wanted)


def _projections(run: Run, act: str, tally: Tally) -> None:
    """A run of the leaves of a projection, by itself."""
    rng = np.random.default_rng(7)
    for outputs, width in ((40, 8), (33, 13), (96, 160), (200, 192)):
        x, weight = _random(rng, ROWS, LEAVES * width), _random(rng, LEAVES, outputs, width)
        whole = run(_linear_leaves(x, weight, bias := _random(rng, outputs)))["out"]
        for ranks in RANKS:
            for rank in range(ranks):
                kept, inputs, columns = (_share(rank, ranks, size) for size in (LEAVES, LEAVES * width, LEAVES * outputs))
                part = run(_linear_leaves(x[:, inputs].copy(), weight[kept], None if rank else bias))["out"]
                tally.same_bits(f"leaves of rank {rank} of {ranks}, {outputs} outputs, in {act}", part, whole[:, columns])


def _linear_leaves(x: Array, weight: Array, bias: Array | None) -> Case:
    arrays = {"x": x, "weight": weight.copy(), "bias": bias}
    return Case("leaves", arrays, {"leaves": len(weight)}, len(x), {"out": ((len(x), weight.shape[0] * weight.shape[1]), "f32")})


def _experts(run: Run, act: str, tally: Tally) -> None:
    """A run of the leaves of a sum over experts, by itself: of features, and of whole experts."""
    for hidden, width in ((24, 12), (128, 64)):
        _experts_of(run, act, tally, hidden, width)


def _experts_of(run: Run, act: str, tally: Tally, hidden: int, width: int) -> None:
    rng, experts = np.random.default_rng(8), 8
    x, shared, gate = _random(rng, ROWS, hidden), _random(rng, ROWS, LEAVES * hidden), _random(rng, ROWS, 1)
    ids = np.array([rng.permutation(experts)[:3] for _ in range(ROWS)], np.int32)
    weights, gate_up = rng.random((ROWS, 3), np.float32), _random(rng, experts, 2, LEAVES, width, hidden)
    down = _random(rng, experts, LEAVES, hidden, width)

    def leaves(split: str, ids: Array, gate_up: Array, down: Array, shared: Array) -> Array:
        count = shared.shape[1] // hidden
        arrays = {
            "x": x, "expert_ids": ids.astype(np.int32), "expert_weights": weights, "shared": shared.copy(), "shared_gate": gate,
            "gate_up": gate_up.reshape(len(gate_up), -1, hidden).copy(), "down": down.reshape(-1, hidden, down.shape[-1]).copy(),
        }  # fmt: skip
        params = {"leaves": count, "split": split}
        return run(Case(split, arrays, params, ROWS, {"out": ((ROWS, count * hidden), "f32")}))["out"]

    joined = np.moveaxis(down, 1, 2).reshape(experts, hidden, -1)
    by_features = leaves("features", ids, gate_up, down, shared)
    by_experts = leaves("experts", ids, gate_up, joined, shared)
    for ranks in RANKS:
        for rank in range(ranks):
            columns, some, mine = (_share(rank, ranks, size) for size in (LEAVES * hidden, LEAVES, experts))
            part = leaves("features", ids, gate_up[:, :, some], down[:, some], shared[:, columns])
            tally.same_bits(f"features of rank {rank} of {ranks}, {hidden} outputs, in {act}", part, by_features[:, columns])
            own = np.where((ids >= mine.start) & (ids < mine.stop), ids - mine.start, -1)
            part = leaves("experts", own, gate_up[mine], joined[mine], shared[:, columns])
            tally.same_bits(f"experts of rank {rank} of {ranks}, {hidden} outputs, in {act}", part, by_experts[:, columns])


def _columns(run: Run, act: str, tally: Tally) -> None:
    """Outputs of a projection, by themselves: the same bits, whatever there is beside them and wherever they begin."""
    rng = np.random.default_rng(9)
    for outputs, inputs in ((90, 32), (101, 24), (64, 300), (48, 7), (530, 64), (704, 320)):
        x, weight = _random(rng, ROWS, inputs), _random(rng, outputs, inputs)

        def product(rows: Array, x: Array = x) -> Array:
            case = Case("columns", {"x": x, "weight": rows.copy(), "bias": None}, {}, ROWS, {"out": ((ROWS, len(rows)), "f32")})
            return run(case)["out"]

        whole = product(weight)
        for ranks in (*RANKS, outputs // 3):
            width = -(-outputs // ranks)
            for begin in {0, width, outputs // 2, (outputs - 1) // width * width}:  # the last share may be narrower
                part = weight[begin : begin + width]
                tally.same_bits(
                    f"outputs {begin} on of {outputs}, by {width}, in {act}", product(part), whole[:, begin : begin + len(part)]
                )


def _heads(run: Run, act: str, tally: Tally) -> None:
    """A query head by itself, with its key-value head: as many share that one as there are on the rank."""
    kernel = REGISTRY["paged_attention"]
    cases = [case for case in (generated(kernel, seed) for seed in range(12)) if case.params["num_heads"] > 1]
    for case in cases[:4]:
        heads, kv, dim = (int(case.params[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
        whole, cache = run(case)["out"], case.arrays["cache"]
        for head in range(heads):
            columns, group = slice(head * dim, (head + 1) * dim), slice(head // (heads // kv), head // (heads // kv) + 1)
            own = LogicalCache(cache.k[:, :, group].copy(), cache.v[:, :, group].copy())
            arrays: dict[str, Any] = {**case.arrays, "q": case.arrays["q"][:, columns].copy(), "cache": own}
            (rows, _), dtype = case.outputs["out"]
            params = {**case.params, "num_heads": 1, "num_kv_heads": 1}
            alone = run(replace(case, arrays=arrays, params=params, outputs={"out": ((rows, dim), dtype)}))["out"]
            tally.same_bits(f"head {head} of {heads} ({case.name}) in {act}", alone[: case.n], whole[: case.n, columns])


def _random(rng: np.random.Generator, *shape: int) -> Array:
    found: Array = rng.standard_normal(shape, np.float32)
    return found


def _share(rank: int, ranks: int, size: int) -> slice:
    """What a rank has of `size` that are shared out evenly."""
    return slice(rank * size // ranks, (rank + 1) * size // ranks)
