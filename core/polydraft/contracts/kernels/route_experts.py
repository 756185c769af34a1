"""Defines `route_experts`: which experts a row is given to, and how much each of them counts.

A mixture-of-experts block launches it on the router's logits, in front of `expert_mlp`. A row is always given to as many experts:
nothing depends on what other rows chose, so no expert has a capacity and no row is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, opaque, param, tensor
from polydraft.contracts.kernels.swiglu import sigmoid
from polydraft.contracts.sizes import CHOSEN, EXPERTS, PASS_ROWS, SMALL, Sizes, fitted, launched, several
from polydraft.device import Buffer


class RouteExpertsV1(Args):
    """Arguments of `route_experts`."""

    logits: Buffer = tensor("N EX", "f32", "The router's logits.")
    bias: Any = opaque(
        "weight", "Added to the scores to select experts, never to weigh them; None for none.", shape="EX", optional=True
    )
    row_slot: Buffer | None = tensor(
        "N", "i32", "Slot of each row; a negative one has no experts. None: all rows have.", optional=True
    )
    expert_ids: Buffer = tensor(
        "N EK", "i32", "Chosen experts, best selection score first; of equal scores the lowest id first.", access="out", pad=-1
    )
    expert_weights: Buffer = tensor(
        "N EK", "f32", "What the output of each chosen expert is multiplied by.", access="out", pad=0.0
    )
    scoring: Literal["softmax", "sigmoid"] = param(
        "Makes scores of logits, in at least float32: softmax over all experts, or sigmoid."
    )
    num_groups: int = param("Experts form this many groups of consecutive ids; 1: no groups.")
    top_groups: int = param(
        "Groups that a row may choose from: those with the largest sum of their two best selection scores, of equal ones the "
        "first. Selection scores of the others count as -infinity."
    )
    renormalize: Literal["none", "sum", "clamp"] = param(
        "What the scores of the chosen are divided by: nothing, their sum plus `floor`, or the larger of their sum and `floor`."
    )
    floor: float = param("See `renormalize`; greater than 0.")
    scale: float = param("Weights are multiplied by it, after they have been renormalised.")


def scores_of(logits: Array, scoring: str) -> Array:
    """Scores of one row: softmax or sigmoid, without overflow."""
    if scoring == "softmax":
        power = np.exp(logits - logits.max())
        shares: Array = power / power.sum()
        return shares
    return np.array([sigmoid(v) for v in logits])


def best(values: Array, count: int) -> list[int]:
    """Indices of the `count` largest values, largest first, of equal ones the first; NaN counts as -infinity."""
    ranked = np.where(np.isnan(values), -np.inf, values)
    return sorted(range(len(values)), key=lambda i: (-ranked[i], i))[:count]


def golden(a: Any, n: int) -> None:
    """Row by row: score, mask groups, choose, weigh."""
    experts, chosen = a.logits.shape[1], a.expert_ids.shape[1]
    size = experts // a.num_groups
    for r in range(n):
        if a.row_slot is not None and a.row_slot[r] < 0:
            a.expert_ids[r], a.expert_weights[r] = -1, 0.0
            continue
        scores = scores_of(a.logits[r], a.scoring)
        selection = scores if a.bias is None else scores + a.bias
        if a.num_groups > 1:
            groups = selection.reshape(a.num_groups, size)
            kept = best(np.array([group[best(group, 2)].sum() for group in groups]), a.top_groups)
            selection = np.where(np.isin(np.arange(experts) // size, kept), selection, -np.inf)
        ids = best(selection, chosen)
        weights = scores[ids]
        if a.renormalize == "sum":
            weights = weights / (weights.sum() + a.floor)
        elif a.renormalize == "clamp":
            weights = weights / max(weights.sum(), a.floor)
        a.expert_ids[r], a.expert_weights[r] = ids, weights * a.scale


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Magnitude of each weight times 1 + twice the largest |logit|, the condition of exp and of its sum."""
    golden(a, n)
    finite = np.where(np.isfinite(a.logits), np.abs(a.logits), 0.0)
    magnitude = np.abs(np.nan_to_num(a.expert_weights)) * (1.0 + 2.0 * finite.max(axis=1, keepdims=True, initial=0.0))
    return {"expert_weights": magnitude}


PLAIN: Mapping[str, Any] = {
    "scoring": "softmax", "num_groups": 1, "top_groups": 1, "renormalize": "none", "floor": 1e-20, "scale": 1.0,
}  # fmt: skip


def _case(
    name: str, logits: Array, chosen: int, n: int, *, bias: Array | None = None, slots: Array | None = None, **params: Any
) -> Case:
    arrays = {"logits": logits, "bias": bias, "row_slot": slots}
    shape = len(logits), chosen
    return Case(name, arrays, {**PLAIN, **params}, n, {"expert_ids": (shape, "i32"), "expert_weights": (shape, "f32")})


def _apart(rng: np.random.Generator, rows: int, experts: int, step: float = 0.25) -> Array:
    """Logits that differ by at least `step` within a row: rounding cannot swap two of them. They are not symmetric about 0, where
    sums of two sigmoids would be equal."""
    ranks = np.array([rng.permutation(experts) for _ in range(rows)]).reshape(rows, experts)
    return np.asarray((ranks - experts / 2) * step + 0.09, np.float32)


def _biases(ranks: Array) -> Array:
    """Biases in the order of `ranks`, which are 0 and up: exact in bf16, and neighbours at least 2 apart, so that none comes near
    another with a score between 0 and 1 added."""
    number = ranks - len(ranks) // 2
    distance = np.where(number < 0, -1 - number, number)
    magnitude = np.ldexp(128.0 + distance % 128, 1 + distance // 128)
    return np.asarray(np.where(number < 0, -magnitude, magnitude), np.float32)


def cases() -> Iterator[Case]:
    """Named cases of `route_experts`."""
    rng = np.random.default_rng(31)
    logits = _apart(rng, 6, 8)
    yield _case("softmax_over_all_experts", logits, 3, 5)
    yield _case("every_row_used", logits, 2, 6)
    yield _case("softmax_over_the_chosen", logits, 3, 5, renormalize="sum")
    yield _case("sigmoid_renormalised_and_scaled", logits, 3, 5, scoring="sigmoid", renormalize="sum", scale=2.5)
    yield _case("scaled_alone", logits, 3, 5, scoring="sigmoid", scale=1.5)
    bias = np.asarray(rng.permutation(8) * 0.5 - 2.0, np.float32)
    for scoring in ("softmax", "sigmoid"):
        yield _case(
            f"bias_selects_and_does_not_weigh_{scoring}", logits, 3, 5, bias=bias, scoring=scoring, renormalize="sum", scale=1.5
        )
        yield _case(f"bias_without_renormalisation_{scoring}", logits, 3, 5, bias=bias, scoring=scoring)
    small = np.full((3, 8), -20.0, np.float32) + _apart(rng, 3, 8)
    yield _case("a_sum_below_the_floor_is_clamped", small, 2, 3, scoring="sigmoid", renormalize="clamp", floor=1e-3, scale=2.0)
    yield _case(
        "a_sum_above_the_floor_is_not_clamped", logits, 2, 5, scoring="sigmoid", renormalize="clamp", floor=1e-3, scale=2.0
    )
    yield _case("the_floor_is_added_to_the_sum", small, 2, 3, scoring="sigmoid", renormalize="sum", floor=1e-3, scale=2.0)
    grouped = _apart(rng, 6, 12)
    yield _case("groups", grouped, 3, 6, scoring="sigmoid", num_groups=4, top_groups=2, renormalize="sum")
    yield _case("one_group_is_left", grouped, 3, 6, scoring="sigmoid", num_groups=3, top_groups=1)
    yield _case("all_groups_are_left", grouped, 4, 6, scoring="sigmoid", num_groups=3, top_groups=3)
    negative = np.asarray(-2.0 - 0.125 * rng.permutation(12), np.float32)
    yield _case(
        "negative_selection_scores_win_over_masked_groups",
        grouped,
        3,
        6,
        bias=negative,
        scoring="sigmoid",
        num_groups=4,
        top_groups=2,
    )
    lonely = np.array([[6, -6, -6, -6, 3, 3.5, -1, -2, 2, 2.5, 1, 0]], np.float32)
    yield _case("two_good_experts_beat_one_best", lonely, 2, 1, scoring="sigmoid", num_groups=3, top_groups=1)
    even = np.zeros((4, 8), np.float32)
    even[1, 5], even[2, [2, 6]], even[3] = 1.0, 1.0, [3, 1, 3, 1, 3, 1, 3, 1]
    yield _case("of_equal_scores_the_lowest_id", even, 3, 4)
    yield _case("of_equal_groups_the_first", even[:2], 2, 2, scoring="sigmoid", num_groups=4, top_groups=1)
    slots = np.array([-1, 0, 3, 2, -1, 1], np.int32)
    yield _case("rows_without_a_slot_have_no_experts", logits, 3, 6, slots=slots, renormalize="sum")
    yield _case("rows_beyond_the_launch_are_left_alone", logits, 3, 3, slots=slots)
    yield _case("every_expert_is_chosen", logits[:, :4], 4, 5, renormalize="sum")
    yield _case("one_expert_of_one", logits[:, :1], 1, 4, renormalize="sum")
    far = np.array([[85, -85, 0, 20], [-80, -82, -84, -86]], np.float32)
    for scoring in ("softmax", "sigmoid"):
        yield _case(f"large_logits_do_not_overflow_{scoring}", far, 2, 2, scoring=scoring, renormalize="sum")
    broken = logits.copy()
    broken[1, 2], broken[3] = np.nan, np.nan
    yield _case("nan_is_chosen_last_sigmoid", broken, 7, 5, scoring="sigmoid")
    yield _case("a_row_of_nan_has_the_first_experts", broken, 3, 5, renormalize="sum")
    many = _apart(rng, 3, 160, 0.0625)
    yield _case(
        "more_experts_than_a_warp", many, 8, 3, bias=np.zeros(160, np.float32), scoring="sigmoid", renormalize="sum", scale=2.5
    )
    yield _case("nothing_to_do", logits, 3, 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random experts, groups and settings; selection scores lie apart."""
    groups = int(rng.choice([1, 1, 2, 4]))
    size, rows = int(rng.integers(2, 7)), several(sizes, int(rng.integers(1, 8)))
    if sizes:
        size = -(-sizes.get("EX", max(groups * size, sizes.get("EK", 1) * groups)) // groups)
    rows, experts, top = *fitted(sizes, N=rows), groups * size, int(rng.integers(1, groups + 1))
    (chosen,) = fitted(sizes, EK=int(rng.integers(1, min(top * size, 8) + 1)))
    chosen = min(chosen, top * size)
    logits, bias = _apart(rng, rows, experts, min(0.25, 10 / experts)), None  # float32 tells no sigmoid from 1 far above 0
    if rng.integers(2):
        bands = rng.permutation(groups)[:, None] * size  # of their own, so that no two groups come near each other either
        bias = _biases((bands + [rng.permutation(size) for _ in range(groups)]).reshape(-1))
    slots = np.asarray(rng.integers(-1, 4, rows), np.int32) if rng.integers(2) else None
    return _case(
        "random", logits, chosen, launched(rng, sizes, rows), bias=bias, slots=slots,
        scoring=str(rng.choice(["softmax", "sigmoid"])), num_groups=groups, top_groups=top,
        renormalize=str(rng.choice(["none", "sum", "clamp"])), floor=float(rng.choice([1e-20, 1e-12, 0.5])),
        scale=float(rng.choice([1.0, 1.5, 2.5])),
    )  # fmt: skip


CONTRACT = REGISTRY.add(
    Contract(
        name="route_experts",
        version=1,
        unit="any",
        args=RouteExpertsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Scores of the router's logits, the best experts of each row, and their weights.",
        source="Shazeer et al. 2017 (softmax); DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 2.1 (bias, groups).",
        tolerance={"expert_weights": 4.0},
        scale=scale,
        feature="experts",
        equivalent_mutants={"plus(row_slot)": "only the sign of a slot is read"},
        constraints=(
            'scoring in ("softmax", "sigmoid")',
            'renormalize in ("none", "sum", "clamp")',
            "0 < floor",
            "1 <= top_groups <= num_groups",
            "EX % num_groups == 0",
            "EK <= top_groups * (EX // num_groups)",
        ),
        symbols={"EX": "experts", "EK": "experts of a row"},
        grows={"N": PASS_ROWS, "EX": EXPERTS, "EK": CHOSEN},
        independent=("N",),
    )
)
