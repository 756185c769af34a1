"""Defines `expert_mlp`: the gated feed-forward networks of the experts that each row was given to, and their weighted sum.

A mixture-of-experts block launches it behind `route_experts`. Experts may have any number of rows, none included. What a row gets
depends on its own choices alone: terms are summed in the order of its choices, so other rows of the launch cannot change its bits
where a backend's products are row-invariant.

Both stacks may be packed (`contracts/packing.py`), each in a packing of its own, where a backend declares that it takes them so.
Where a packing rounds activations, each row is rounded by its own scales in front of either product: x, and silu(gate) * up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, opaque, tensor
from polydraft.contracts.kernels.swiglu import sigmoid, silu
from polydraft.contracts.packing import PACKINGS, Matrix, PackedWeight, Packing, moves, multiplied, pack
from polydraft.contracts.sizes import (
    CHOSEN,
    EXPERT_WIDTH,
    EXPERTS,
    HIDDEN,
    PASS_ROWS,
    SMALL,
    Sizes,
    fitted,
    launched,
    several,
)
from polydraft.device import Buffer


class ExpertMlpV1(Args):
    """Arguments of `expert_mlp`. Weights of experts without rows are not read."""

    x: Buffer = tensor("N H", "act", "Input rows.")
    expert_ids: Buffer = tensor("N EK", "i32", "Experts of each row, at most once each; negative: none in this place.")
    expert_weights: Buffer = tensor("N EK", "f32", "What the output of each is multiplied by; not read where there is none.")
    gate_up: Any = opaque("weight", "Gate rows, then up rows, of each expert: G = 2 * I.", shape="EX G H")
    down: Any = opaque("weight", "Projects back, one matrix an expert.", shape="EX H I")
    shared: Buffer | None = tensor(
        "N H", "act", "Output of the shared experts, added to the sum; None: there are none.", optional=True
    )
    shared_gate: Buffer | None = tensor(
        "N 1", "f32", "Logit whose sigmoid `shared` is multiplied by; None: it is not.", optional=True
    )
    out: Buffer = tensor(
        "N H", "act",
        "Sum over the choices of weight * down(silu(gate) * up), then shared: terms in the order of the choices, added in "
        "float32 and rounded once. silu(gate) * up may be rounded to act.",
        access="out",
    )  # fmt: skip


def _product(matrix: Matrix, row: Array) -> Array:
    """matrix @ row, of what both stand for."""
    rows, numbers = multiplied(row[None], matrix)
    return np.asarray(numbers @ rows[0])


def golden(a: Any, n: int) -> None:
    """One term a choice."""
    half = a.gate_up.shape[1] // 2
    for r in range(n):
        total = np.zeros(a.x.shape[1])
        for expert, weight in zip(a.expert_ids[r], a.expert_weights[r], strict=True):
            if expert >= 0:
                gate, up = np.split(_product(a.gate_up[expert], a.x[r]), [half])
                total += weight * _product(a.down[expert], np.array([silu(g) for g in gate]) * up)
        if a.shared is not None:
            total += a.shared[r] * (1.0 if a.shared_gate is None else sigmoid(a.shared_gate[r, 0]))
        a.out[r] = total


@dataclass(frozen=True)
class _Term:
    """One expert of a row: what comes out between its products, and how far off that is by one unit of each product and
    rounding; `down` is what that matrix stands for."""

    row: int
    weight: float
    hidden: Array
    off: Array
    down: Array


def _terms(a: Any, n: int) -> Iterator[_Term]:
    for r in range(n):
        for expert, weight in zip(a.expert_ids[r], a.expert_weights[r], strict=True):
            if expert < 0:
                continue
            hidden, off = between(a.x[r], a.gate_up[expert])
            yield _Term(r, weight, hidden, off, multiplied(hidden[None], a.down[expert])[1])


def between(row: Array, gate_up: Matrix) -> tuple[Array, Array]:
    """silu(gate) * up of a row and one expert, and how far off that is by one unit of each product and rounding."""
    rows, matrix = multiplied(row[None], gate_up)
    half = len(matrix) // 2
    gate, up = np.split(matrix @ rows[0], [half])
    gate_terms, up_terms = np.split(np.abs(matrix) @ np.abs(rows[0]), [half])
    tail = np.exp(-np.abs(gate))
    share = np.where(gate >= 0, 1.0, tail) / (1.0 + tail)  # sigmoid(gate)
    gated, slope = gate * share, np.abs(share * (1.0 + gate * (1.0 - share)))
    off = slope * gate_terms * np.abs(up) + np.abs(gated) * (up_terms + np.abs(up) * (1.0 + np.abs(gate)))
    return gated * up, off


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """What an element is off by where every product and every rounding to the dtype is off by one unit."""
    magnitude = np.zeros(a.x.shape)
    for term in _terms(a, n):
        off = term.off
        if rounds(a.down):
            off = off + _of_scales(term, a.down.packing)
        magnitude[term.row] += np.abs(term.weight) * (np.abs(term.down) @ off)
    if a.shared is not None:
        magnitude[:n] += np.abs(a.shared[:n])
    return {"out": magnitude}


def _of_scales(term: _Term, packing: Packing) -> Array:
    """How far off a row that is rounded is because the scales that it is rounded with are."""
    most, off = (_groups(np.abs(value), packing).max(axis=1, keepdims=True) for value in (term.hidden, term.off))
    share = np.divide(off, most, out=np.zeros_like(off), where=most > 0)
    return np.asarray((_groups(np.abs(term.hidden), packing) * share).reshape(-1)[: len(term.hidden)])


def _groups(row: Array, packing: Packing) -> Array:
    """The columns of a row that have a scale of their own, [groups, columns]."""
    width = packing.columns or len(row)
    return np.pad(row, (0, -len(row) % width)).reshape(-1, width)


def rounds(stack: Matrix) -> bool:
    """Whether rows are rounded in front of a product with it."""
    return isinstance(stack, PackedWeight) and stack.packing.activations


def tipped(a: Any, n: int, off: float) -> Mapping[str, Array]:
    """Where weights are packed and rows rounded, a step of the grid for each number of silu(gate) * up that may lie on either
    side of a border between two."""
    if not rounds(a.down):
        return {}
    moved, packing = np.zeros(a.x.shape), a.down.packing
    for term in _terms(a, n):
        may = off * (term.off + _of_scales(term, packing))
        steps = np.nan_to_num(moves(term.hidden[None], may[None], packing)[0])
        moved[term.row] += np.abs(term.weight) * (np.abs(term.down) @ steps)
    return {"out": moved}


def expert_arrays(
    x: Array, ids: Array, gate_up: Array, down: Array, weights: Array | None, shared: Array | None, shared_gate: Array | None
) -> dict[str, Any]:
    """Inputs of a case; weights of the choices that all differ unless they are given."""
    if weights is None:
        weights = np.asarray(1.0 / (2.0 + np.arange(ids.size).reshape(ids.shape) % 5), np.float32)
    return {
        "x": x, "expert_ids": np.asarray(ids, np.int32), "expert_weights": weights, "gate_up": gate_up, "down": down,
        "shared": shared, "shared_gate": shared_gate,
    }  # fmt: skip


def _case(
    name: str, x: Array, ids: Array, gate_up: Array, down: Array, n: int, *, weights: Array | None = None,
    shared: Array | None = None, shared_gate: Array | None = None,
) -> Case:  # fmt: skip
    arrays = expert_arrays(x, ids, gate_up, down, weights, shared, shared_gate)
    return Case(name, arrays, {}, n, {"out": (x.shape, "act")})


def chosen_ids(rng: np.random.Generator, rows: int, experts: int, chosen: int) -> Array:
    """So many different experts a row, at random."""
    return np.array([rng.permutation(experts)[:chosen] for _ in range(rows)]).reshape(rows, chosen)


def cases() -> Iterator[Case]:
    """Named cases of `expert_mlp`."""
    rng = np.random.default_rng(32)
    x, shared = rng.standard_normal((2, 6, 7), np.float32)
    gate_up, down = rng.standard_normal((4, 10, 7), np.float32), rng.standard_normal((4, 7, 5), np.float32)
    ids = chosen_ids(rng, 6, 4, 2)
    yield _case("two_experts_a_row", x, ids, gate_up, down, 5)
    yield _case("every_row_used", x, ids, gate_up, down, 6)
    yield _case("shared_experts_are_added", x, ids, gate_up, down, 5, shared=shared)
    gates = np.array([[0.5], [-3.0], [0.0], [90.0], [-90.0], [1.0]], np.float32)
    yield _case("shared_experts_behind_a_gate", x, ids, gate_up, down, 5, shared=shared, shared_gate=gates)
    yield _case("one_row", x[:1], ids[:1], gate_up, down, 1)
    yield _case("all_rows_choose_one_expert", x, np.full((6, 1), 2), gate_up, down, 6)
    yield _case("the_last_expert_alone", x, np.full((6, 1), 3), gate_up, down, 4)
    yield _case("every_expert_chosen", x, chosen_ids(rng, 6, 4, 4), gate_up, down, 6)
    some = ids.copy()
    some[1], some[3, 0], some[4, 1] = -1, -1, -1
    unset = np.full((6, 2), 0.5, np.float32)
    unset[some < 0] = np.nan
    yield _case("places_without_an_expert", x, some, gate_up, down, 6, weights=unset)
    yield _case("rows_without_experts_keep_the_shared", x, some, gate_up, down, 6, weights=unset, shared=shared)
    unread = gate_up.copy(), down.copy()
    unread[0][1], unread[1][1] = np.nan, np.nan
    yield _case("an_expert_without_rows_is_not_read", x, np.array([[0, 2], [3, 0], [2, 3], [0, 3], [3, 2], [2, 0]]), *unread, 6)
    beyond = ids.copy()
    beyond[4:] = 1_000_000
    yield _case("rows_beyond_the_launch_are_not_read", x, beyond, gate_up, down, 4)
    uneven = np.array([[0, 1], [0, 2], [0, 3], [0, 1], [1, 0], [0, 2]])
    large = np.where(np.arange(4)[:, None, None] == 0, np.float32(100), np.float32(1)) * down
    yield _case("loads_differ", x, uneven, gate_up, large, 6)
    broken = x.copy()
    broken[2, 3] = np.nan
    yield _case("a_row_of_nan_stays_alone", broken, ids, gate_up, down, 6)
    yield _case("zero_and_negative_weights", x, ids, gate_up, down, 5, weights=np.array([[0, 1], [-1, 0.5]] * 3, np.float32))
    wide = rng.standard_normal((37, 6), np.float32)
    more = rng.standard_normal((11, 6, 6), np.float32), rng.standard_normal((11, 6, 3), np.float32)
    yield _case("more_rows_and_experts_than_a_tile", wide, chosen_ids(rng, 37, 11, 3), *more, 35)
    even = rng.standard_normal((75, 64), np.float32)
    stacked = rng.standard_normal((5, 128, 64), np.float32) / 8, rng.standard_normal((5, 64, 64), np.float32) / 8
    crowded = np.where(np.arange(75)[:, None] < 70, [[1, 3]], [[4, 1]])
    yield _case("whole_tiles_with_many_rows_of_one_expert", even, crowded, *stacked, 74, shared=even[::-1].copy())
    yield _case("whole_tiles_with_few_rows", even[:3], chosen_ids(rng, 3, 5, 3), *stacked, 3)
    yield _case("nothing_to_do", x, ids, gate_up, down, 0)


def packed_cases(packing: str) -> Iterator[Case]:
    """Cases of a packing, by its name: the experts' scales, zero points and columns all differ."""
    kind, rng, experts = PACKINGS[packing], np.random.default_rng(26), 4
    x, shared = np.float32(2) ** rng.integers(-2, 3, (5, 1)).astype(np.float32) * rng.standard_normal((2, 5, 160), np.float32)

    def stack(outputs: int, inputs: int) -> Array:
        sizes = np.exp2(rng.integers(-3, 3, (experts, -(-outputs // 8), -(-inputs // 16))))
        grown = np.kron(sizes, np.ones((1, 8, 16)))[:, :outputs, :inputs]
        return np.asarray(
            grown * (rng.standard_normal((experts, outputs, inputs)) + rng.standard_normal((outputs, 1))), np.float32
        )

    wide = stack(2 * 136, 160) / np.float32(16), stack(160, 136)
    yield _packed(kind, _case(f"scales_differ {packing}", x, chosen_ids(rng, 5, experts, 2), *wide, 4, shared=shared))
    yield _packed(kind, _case(f"one_row {packing}", x[:1], np.array([[2, 0, 3]]), *wide, 1))
    small = stack(2 * 19, 37), stack(37, 19)
    chosen = np.array([[0, 2], [3, -1], [-1, 3], [2, 0], [-1, -1]])
    case = _packed(kind, _case(f"an_expert_without_rows_is_not_read {packing}", x[:, :37].copy(), chosen, *small, 5))
    for name in ("gate_up", "down"):
        case.arrays[name].scales[1] = np.nan
    yield case
    broken = x[:, :37].copy()
    broken[1, 20], broken[2] = np.nan, 0.0
    yield _packed(kind, _case(f"nan_row_and_zero_row_stay_alone {packing}", broken, chosen_ids(rng, 5, experts, 2), *small, 5))
    many = rng.standard_normal((21, 32), np.float32)
    crowded = np.where(np.arange(21)[:, None] < 19, [[1, 3]], [[2, 1]])
    yield _packed(kind, _case(f"more_rows_than_a_tile {packing}", many, crowded, stack(2 * 32, 32), stack(32, 32), 20))


def _packed(packing: Packing, case: Case) -> Case:
    stacks = {name: pack(case.arrays[name], packing) for name in ("gate_up", "down")}
    return replace(case, arrays={**case.arrays, **stacks})


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random experts; some places of some rows have none."""
    rows, hidden, width, experts = (int(v) for v in rng.integers((1, 1, 1, 3), (12, 20, 12, 9)))
    rows, hidden, width = fitted(sizes, N=several(sizes, rows), H=hidden, I=width)
    (experts,) = fitted(sizes, EX=max(experts, sizes.get("EK", 0)))
    chosen = min(experts, *fitted(sizes, EK=int(rng.choice([1, 3, 4, 5]))))  # sums of three terms and more depend on their order
    gate_up, down = (
        rng.standard_normal((experts, 2 * width, hidden), np.float32),
        rng.standard_normal((experts, hidden, width), np.float32),
    )
    if sizes:  # as trained weights are: float16 ends at 65504
        gate_up, down = gate_up / np.float32(hidden**0.5), down / np.float32(width**0.5)
    ids = np.where(rng.random((rows, chosen)) < rng.choice([0.0, 0.3]), -1, chosen_ids(rng, rows, experts, chosen))
    shared = rng.standard_normal((rows, hidden), np.float32) if rng.integers(2) else None
    gate = rng.standard_normal((rows, 1), np.float32) if shared is not None and rng.integers(2) else None
    return _case(
        "random", rng.standard_normal((rows, hidden), np.float32), ids, gate_up, down, launched(rng, sizes, rows),
        weights=rng.random((rows, chosen), np.float32), shared=shared, shared_gate=gate,
    )  # fmt: skip


CONTRACT = REGISTRY.add(
    Contract(
        name="expert_mlp",
        version=1,
        unit="any",
        args=ExpertMlpV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Weighted sum of the gated feed-forward networks of each row's experts, and of shared experts.",
        source="Shazeer et al. 2017, Outrageously Large Neural Networks; Dai et al. 2024, DeepSeekMoE (shared experts).",
        tolerance={"out": 4.0},
        products=True,
        scale=scale,
        deterministic="run-to-run",
        feature="experts",
        compute=True,
        symbols={"EX": "experts", "EK": "experts of a row"},
        grows={"N": PASS_ROWS, "H": HIDDEN, "I": EXPERT_WIDTH, "EX": EXPERTS, "EK": CHOSEN},
        independent=("N",),
        packed_cases=packed_cases,
        packings="expert_packings",
        tipped=tipped,
    )
)
