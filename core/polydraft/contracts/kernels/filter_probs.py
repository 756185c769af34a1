"""Defines `filter_probs`: turns a row of logits, in place, into the probabilities with which its token is drawn.

Rejection verification launches it on target rows and on draft rows, so that what a draft was drawn from and what it is held
against went through the same filters. It never draws: `sample` draws from the very same distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.kernels.argmax import highest, spaced
from polydraft.contracts.kernels.sample import HALVES, Slot, kept, margin, spread_out, wide
from polydraft.contracts.sizes import ROWS, SLOTS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN


class FilterProbsV1(Args):
    """Arguments of `filter_probs`; temperature and filters are those of `sample`, in the same order."""

    logits: Buffer = tensor(
        "N V", "f32", "In: logits, -inf forbids a token. Out: probabilities, all 0 where a row has NaN, +inf or nothing but "
        "-inf; rows of negative slots stay as they are.", access="inout",
    )  # fmt: skip
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    temperature: Buffer = tensor("B", "f32", "Divides the logits of the slot's rows; 0: the highest logit has probability 1.")
    top_k: Buffer = tensor("B", "i32", "Keep this many highest tokens, of equals the lower ids; 0: all.")
    top_p: Buffer = tensor("B", "f32", "Keep tokens while the probability before them is below this; from 1 on: all.")
    min_p: Buffer = tensor("B", "f32", "Keep tokens with at least this share of the highest probability; 0: all.")


def probabilities(a: Any, r: int) -> list[float]:
    """Return the probabilities of row `r`: a softmax over what the filters keep."""
    slot, row = a.row_slot[r], a.logits[r]
    probs = [0.0] * len(row)
    best = highest(row)
    if best == NO_TOKEN:
        return probs
    if a.temperature[slot] == 0:
        probs[best] = 1.0
        return probs
    z = row / a.temperature[slot]
    ids = kept(z, top_k=int(a.top_k[slot]), top_p=a.top_p[slot], min_p=a.min_p[slot])
    shares = [math.exp(value - z[best]) for value in z[ids].tolist()]
    whole = sum(shares)
    for v, share in zip(ids, shares, strict=True):
        probs[v] = share / whole
    return probs


def golden(a: Any, n: int) -> None:
    """Row by row."""
    for r in range(n):
        if a.row_slot[r] >= 0:
            a.logits[r] = probabilities(a, r)


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """p * (2 + twice the distance of z from the best z): an error of z becomes a relative error of its exponential."""
    magnitude = np.zeros_like(a.logits)
    for r in range(n):
        slot = a.row_slot[r]
        if slot >= 0 and a.temperature[slot] != 0:
            finite = np.where(np.isfinite(a.logits[r]), a.logits[r], 0.0) / a.temperature[slot]
            magnitude[r] = np.multiply(probabilities(a, r), 2.0 + 2.0 * np.abs(finite).max())
    return {"logits": magnitude}


def _case(name: str, rows: Sequence[tuple[int, Array]], slots: Sequence[Slot], n: int | None = None) -> Case:
    """Rows are (slot, logits)."""
    arrays: dict[str, Array] = {"logits": np.array([row for _, row in rows], np.float32)}
    arrays["row_slot"] = np.array([slot for slot, _ in rows], np.int32)
    for field in Slot._fields:
        arrays[field] = np.array([getattr(slot, field) for slot in slots], np.int32 if field == "top_k" else np.float32)
    return Case(name, arrays, {}, len(rows) if n is None else n)


def _each(name: str, logits: ArrayLike, slots: Sequence[Slot]) -> Case:
    """The same logits under each slot's parameters, slots in reverse order."""
    return _case(name, [(slot, np.array(logits)) for slot in reversed(range(len(slots)))], slots)


def cases() -> Iterator[Case]:
    """Named cases of `filter_probs`."""
    yield _each("top_k_keeps_the_best", HALVES, [Slot(top_k=k) for k in (0, 1, 2, 3, 5, 9)])
    yield _each("top_k_keeps_the_lower_id_of_equals", HALVES, [Slot(top_k=4), Slot(top_k=4, temperature=3)])
    yield _each("top_p_keeps_what_crosses", HALVES, [Slot(top_p=p) for p in (0, 0.3, 0.6, 0.8, 0.9, 0.97, 1)])
    yield _each("min_p_is_a_share_of_the_best", HALVES, [Slot(min_p=m) for m in (0, 0.1, 0.2, 0.4, 0.7)])
    yield _each("top_p_counts_what_top_k_left", HALVES, [Slot(top_k=2, top_p=0.6), Slot(top_p=0.6)])
    together = [Slot(0.8, 4, 0.9, 0.3), Slot(0.8, 3, 0.99, 0.05), Slot(1.6, 4, 0.8, 0.1), Slot(1.6, 0, 0.85, 0.4)]
    yield _each("filters_together", HALVES, together)
    yield _each("temperature_divides_the_logits", HALVES, [Slot(t) for t in (0.05, 0.3, 0.6, 1, 2, 9)])
    yield _each("greedy_is_certain_and_reads_no_filter", [1, 4, 4, 2], [Slot(0, 2, 0.1, 0.9), Slot(0), Slot(1)])
    rng = np.random.default_rng(33)
    logits = spaced(rng, 6, 9)
    mixed = [Slot(), Slot(0.7, 3), Slot(0.0), Slot(1.3, top_p=0.7)]
    order = [3, -1, 0, 1, -6, 2]
    yield _case("pad_rows_stay", list(zip(order, logits, strict=True)), mixed, 5)
    yield _case("nothing_to_do", list(zip(order, logits, strict=True)), mixed, 0)
    broken = np.array([logits[0]] * 6)
    broken[0, 3], broken[1, 8], broken[2], broken[3, 1] = np.nan, np.nan, -np.inf, np.inf
    broken[4], broken[4, 6], broken[5, :7] = -np.inf, -1, -np.inf
    for sampled in (Slot(0.9), Slot(0.9, 2, 0.9, 0.01), Slot(0.0)):
        kind = "greedy" if sampled.temperature == 0 else "filtered" if sampled.top_k else "sampled"
        yield _case(f"broken_and_forbidden_rows_{kind}", [(0, row) for row in broken], [sampled])
    slots = [Slot(top_k=10), Slot(top_p=540.5 / 600), Slot(top_k=300, top_p=0.5017), Slot(min_p=0.5), Slot(top_k=599)]
    yield _case("flat_row_wider_than_any_shortlist", [(slot, np.zeros(600)) for slot in range(5)], slots)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows and parameters, redrawn until no float32 error can change a filter's decision; some rows without a slot."""
    size, num_rows, vocab = (int(v) for v in rng.integers((1, 1, 2), (5, 7, 40)))
    size, num_rows, vocab = fitted(sizes, B=size, N=several(sizes, num_rows), V=vocab)
    slots = [
        Slot(float(rng.choice([0, 0.5, 1, 1.5])), int(rng.choice([0, 1, 3, 8])), float(rng.choice([0.3, 0.8, 0.95, 1])),
             float(rng.choice([0, 0.05, 0.2])))
        for _ in range(size)
    ]  # fmt: skip
    if sizes:
        slots[-1] = slots[-1]._replace(temperature=1.5, **wide(vocab))
    rows: list[tuple[int, Array]] = []
    while len(rows) < num_rows:
        slot = int(rng.integers(-1, size)) if not sizes or rows else size - 1
        logits = spread_out(rng, vocab)
        divisor = np.float64(np.float32(slots[slot].temperature or 1.0))
        if margin(logits.astype(np.float64) / divisor, np.zeros(vocab), slots[slot]) > 1e-3:
            rows.append((slot, logits))
    return _case("random", rows, slots, launched(rng, sizes, num_rows))


CONTRACT = REGISTRY.add(
    Contract(
        name="filter_probs",
        version=1,
        unit="any",
        args=FilterProbsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Temperature, top-k, top-p and min-p, then a softmax over what is left.",
        source="Rejection sampling holds drafts against the filtered distribution: Leviathan et al. 2023; Chen et al. 2023.",
        tolerance={"logits": 4.0},
        scale=scale,
        feature="rejection",
        grows={"N": ROWS, "B": SLOTS, "V": VOCABULARY},
        independent=("N",),
    )
)
