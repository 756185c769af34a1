"""Defines `top_n_sigma`: forbids tokens whose logit lies too many standard deviations below the highest of its row.

The stage of this package launches it behind core's own stages, over target and draft rows alike. It never divides by the
temperature, and need not: that moves the highest logit, the deviation and the border alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Args, Case, Contract, tensor
from polydraft.device import Array, Buffer


class TopNSigmaV1(Args):
    """Arguments of `top_n_sigma`. A logit within rounding of the border may fall on either side of it."""

    logits: Buffer = tensor(
        "N V", "f32", "Logits; -inf forbids a token. Rows of negative slots stay, NaN and infinities stay.", access="inout"
    )
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    top_n_sigma: Buffer = tensor("B", "f32", "Standard deviations that a slot keeps below the highest logit; 0: all tokens.")


def border(row: Sequence[float], sigmas: float) -> float:
    """The least logit that stays, in two passes over the finite ones: tokens that are forbidden already have no say."""
    finite = [x for x in row if math.isfinite(x)]
    if not finite or sigmas == 0:
        return -math.inf
    mean = sum(finite) / len(finite)
    return max(finite) - sigmas * math.sqrt(sum((x - mean) ** 2 for x in finite) / len(finite))


def golden(a: Any, n: int) -> None:
    """Token by token."""
    for r in range(n):
        slot = a.row_slot[r]
        if slot >= 0:
            least = border(a.logits[r], a.top_n_sigma[slot])
            for v, x in enumerate(a.logits[r]):
                if x < least:
                    a.logits[r, v] = -math.inf


def _case(name: str, logits: Any, slots: Sequence[int], sigmas: Sequence[float], n: int) -> Case:
    arrays = {
        "logits": np.array(logits, np.float32),
        "row_slot": np.array(slots, np.int32),
        "top_n_sigma": np.array(sigmas, np.float32),
    }
    return Case(name, arrays, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `top_n_sigma`. Borders are exact in float32, or far from every logit."""
    logits = np.array([[5, 1, 0, 4, -3, 2], [0, 6, 5, 3, 1, -2], [2, -4, 1, 7, 6, 0], [3, 2, -5, 0, 8, 4]], np.float32)
    yield _case("slots_in_another_order_than_rows", logits, [2, 0, 1, 2], [1.0, 0.25, 2.25], 4)
    yield _case("a_slot_without_it_beside_others", logits, [0, 1, 0, 2], [0.0, 1.0, 0.5], 4)
    yield _case("rows_without_a_slot_stay", logits, [-1, 1, -7, 0], [0.5, 1.0], 4)
    yield _case("stale_rows_beyond_the_launch_length", logits, [0, 1, 0, 1], [0.5, 1.0], 2)
    yield _case("a_logit_on_the_border_stays", [[0, 2, 0, 2], [0, 2, 0, 2]], [0, 1], [2.0, 1.5], 2)
    yield _case("the_deviation_divides_by_all_tokens", [[0, 0, 3], [3, 0, 0]], [0, 0], [2.0], 2)
    yield _case("forbidden_tokens_have_no_say", [[-np.inf, 2, 4, 3, -np.inf, -np.inf]], [0], [2.0], 1)
    yield _case("nan_and_infinities_stay", [[np.nan, 0, 4, 3], [np.inf, 0, 4, 3], [-np.inf] * 4], [0, 0, 0], [1.0], 3)
    yield _case("equal_logits_all_stay", [[2, 2, 2], [-7, -7, -7]], [0, 0], [0.5], 2)
    yield _case("a_small_spread_far_from_zero", logits[:2] + 2**15, [0, 1], [1.0, 0.5], 2)
    yield _case("nothing_to_do", logits, [0, 1, 0, 1], [0.5, 1.0], 0)


def generate(rng: np.random.Generator) -> Case:
    """Random rows of 3 logits or more (of 2, one may always lie on the border), redrawn until none is near it; some slotless."""
    size, rows, vocab = (int(v) for v in rng.integers((1, 1, 3), (5, 8, 40)))
    sigmas: Array = rng.choice([0.0, 0.5, 1.0, 2.0, 3.0], size).astype(np.float32)
    slots = [int(s) for s in np.where(rng.random(rows) < 0.25, -1, rng.integers(0, size, rows))]
    logits = [_clear(rng, vocab, float(sigmas[slot])) for slot in slots]
    return _case("random", logits, slots, sigmas.tolist(), int(rng.integers(1, rows + 1)))


def _clear(rng: np.random.Generator, vocab: int, sigmas: float) -> Array:
    while True:
        row = rng.normal(0, 3, vocab).astype(np.float32)
        if np.abs(row - border(row.tolist(), sigmas)).min() > 1e-3:
            return row


CONTRACT = REGISTRY.add(
    Contract(
        name="top_n_sigma",
        version=1,
        unit="any",
        args=TopNSigmaV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Forbid tokens that lie more than n standard deviations below the highest logit.",
        source="Tang et al. 2024, Top-n-sigma: Not All Logits Are You Need, arXiv:2411.07641.",
    )
)
