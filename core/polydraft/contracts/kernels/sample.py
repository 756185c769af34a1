"""Defines `sample`: draw a token from every logit row by adding given noise and taking the highest.

The coupled verifier launches it on target logits and, where drafts are sampled, the proposer on draft logits. It never
makes randomness of its own: with the same logits and noise the token is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.kernels.argmax import best_first, highest, spaced
from polydraft.contracts.sizes import MANY_TOKENS, ROWS, SLOTS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN


class SampleV1(Args):
    """Arguments of `sample`."""

    logits: Buffer = tensor("N V", "f32", "Logits; -inf forbids a token.")
    noise: Buffer = tensor("N V", "f32", "Standard Gumbel noise; not read where the temperature is 0.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    temperature: Buffer = tensor("B", "f32", "Divides the logits of the slot's rows; 0: the highest logit, no filters.")
    top_k: Buffer = tensor("B", "i32", "Keep this many highest tokens, of equals the lower ids; 0: all.")
    top_p: Buffer = tensor("B", "f32", "Keep tokens while the probability before them is below this; from 1 on: all.")
    min_p: Buffer = tensor("B", "f32", "Keep tokens with at least this share of the highest probability; 0: all.")
    tokens: Buffer = tensor(
        "N", "i32", "Chosen id; NO_TOKEN for a row with NaN, +inf or nothing but -inf.", access="out", pad=NO_TOKEN
    )


def ranked(z: Array, top_k: int) -> tuple[list[int], list[float], list[float]]:
    """Return the ids that top-k keeps, best first, each one's share of the best probability, and the probability before
    it, which is a softmax over what top-k keeps.
    """
    order = best_first(z)
    order = order[:top_k] if top_k > 0 else order
    shares = [math.exp(value - z[order[0]]) for value in z[order].tolist()]
    whole = sum(shares)
    before = [mass / whole for mass in accumulate(shares[:-1], initial=0.0)]
    return order, shares, before


def kept(z: Array, *, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Return the ids that survive top-k, then top-p over what top-k left, then min-p; the best one always does."""
    order, shares, before = ranked(z, top_k)
    inside = [i == 0 or top_p >= 1.0 or before[i] < top_p for i in range(len(order))]
    return [v for v, share, keep in zip(order, shares, inside, strict=True) if keep and share >= min_p]


def golden(a: Any, n: int) -> None:
    """Row by row: the argmax decides what is broken and what is greedy; else filter, add noise, take the highest."""
    for r in range(n):
        slot = a.row_slot[r]
        best = highest(a.logits[r]) if slot >= 0 else NO_TOKEN
        if best != NO_TOKEN and a.temperature[slot] != 0:
            z = a.logits[r] / a.temperature[slot]
            noisy = z + a.noise[r]
            ids = kept(z, top_k=int(a.top_k[slot]), top_p=a.top_p[slot], min_p=a.min_p[slot])
            best = min(ids, key=lambda v: (-noisy[v], v))
        a.tokens[r] = best


class Slot(NamedTuple):
    """Sampling parameters of one slot of a case."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def spread_out(rng: np.random.Generator, vocab: int) -> Array:
    """Return one row of logits that stand apart, close enough for the filters to cut between them."""
    row = spaced(rng, 1, vocab)[0]
    return np.asarray(row if vocab > MANY_TOKENS else row / 3)


MANY_KEPT = 300
"""Tokens that top-k keeps in some rows of a vocabulary as large as those of models: more than a short list has."""


def wide(vocab: int) -> dict[str, Any]:
    """Filters of the last slot of a large case: in a vocabulary as large as those of models, top-k alone, and many tokens."""
    return {"top_k": MANY_KEPT, "top_p": 1.0, "min_p": 0.0} if vocab > MANY_TOKENS else {}


def margin(z: Array, noise: Array, slot: Slot) -> float:
    """Return how far the choice is from any other: at the borders of the filters and between the best two sums."""
    order, shares, before = ranked(z, slot.top_k)
    gaps = [math.inf]
    if slot.top_p < 1.0:
        gaps.append(np.abs(np.array(before[1:]) - slot.top_p).min(initial=math.inf))
    if slot.min_p > 0.0:
        gaps.append(np.abs(np.array(shares) - slot.min_p).min())
    if 0 < slot.top_k < len(z):
        gaps.append(z[order[-1]] - z[z < z[order[-1]]].max(initial=-math.inf))
    ids = kept(z, top_k=slot.top_k, top_p=slot.top_p, min_p=slot.min_p)
    if len(ids) > 1:
        gaps.append(np.diff(np.partition(z[ids] + noise[ids], -2)[-2:])[0])
    return float(min(gaps))


def _case(name: str, rows: Sequence[tuple[int, Array, Array]], slots: Sequence[Slot], n: int | None = None) -> Case:
    """Rows are (slot, logits, noise)."""
    row_slot, logits, noise = ([row[i] for row in rows] for i in range(3))
    arrays = {"logits": np.array(logits, np.float32), "noise": np.array(noise, np.float32)}
    arrays["row_slot"] = np.array(row_slot, np.int32)
    for field in Slot._fields:
        arrays[field] = np.array([getattr(slot, field) for slot in slots], np.int32 if field == "top_k" else np.float32)
    return Case(name, arrays, {}, len(rows) if n is None else n, {"tokens": ((len(rows),), "i32")})


def _each(name: str, logits: ArrayLike, noise: ArrayLike, slots: Sequence[Slot]) -> Case:
    """The same logits and noise under each slot's parameters, slots in reverse order."""
    row = np.array(logits), np.array(noise)
    return _case(name, [(slot, *row) for slot in reversed(range(len(slots)))], slots)


HALVES = np.log([0.125, 0.5, 0.0625, 0.25, 0.0625])
"""Logits with easy probabilities; best first: tokens 1, 3, 0, then 2 and 4 equal."""
UPHILL = np.array([3.0, 0.0, 5.0, 1.5, 7.0])
"""Noise that favours what is less probable: without filters token 4 wins, then 2, 0, 3, 1."""


def cases() -> Iterator[Case]:
    """Named cases of `sample`."""
    yield _each("top_k_keeps_the_best", HALVES, UPHILL, [Slot(top_k=k) for k in (0, 1, 2, 3, 5, 9)])
    yield _each("top_k_keeps_the_lower_id_of_equals", HALVES, UPHILL, [Slot(top_k=4), Slot(top_k=4, temperature=3)])
    yield _each("top_p_keeps_what_crosses", HALVES, UPHILL, [Slot(top_p=p) for p in (0, 0.3, 0.6, 0.8, 0.9, 0.97, 1)])
    yield _each("top_p_border_is_excluded", [0] * 4, [0, 1, 2, 3], [Slot(top_p=p) for p in (0.25, 0.5, 0.75)])
    yield _each("top_p_one_keeps_what_rounds_away", [0, -50, -50], [0, 60, 61], [Slot(), Slot(top_p=0.9)])
    yield _each("top_p_above_one_keeps_all", HALVES, UPHILL, [Slot(top_p=1.5), Slot(top_p=1.0, top_k=7)])
    yield _each("min_p_is_a_share_of_the_best", HALVES, UPHILL, [Slot(min_p=m) for m in (0, 0.1, 0.2, 0.4, 0.7)])
    # 0.5 and 0.25 become 2/3 and 1/3 once top-k has cut the rest: 0.6 keeps one of them then, and two before.
    yield _each("top_p_counts_what_top_k_left", HALVES, UPHILL, [Slot(top_k=2, top_p=0.6), Slot(top_p=0.6)])
    together = [Slot(0.8, 4, 0.9, 0.3), Slot(0.8, 3, 0.99, 0.05), Slot(1.6, 4, 0.8, 0.1), Slot(1.6, 0, 0.85, 0.4)]
    yield _each("filters_together", HALVES, UPHILL, together)
    yield _each("temperature_divides_the_logits", HALVES, UPHILL / 4, [Slot(t) for t in (0.05, 0.3, 0.6, 1, 2, 9)])
    yield _each("small_temperature_is_not_greedy", [1.0, 0.9], [0, 3], [Slot(0.05), Slot(0.01)])
    tempered = [Slot(t, top_p=0.6) for t in (0.4, 1, 4)] + [Slot(t, min_p=0.4) for t in (0.4, 1, 4)]
    yield _each("filters_see_the_temperature", HALVES, UPHILL, tempered)
    yield _each("greedy_reads_no_noise_and_no_filter", [1, 4, 4, 2], [np.nan] * 4, [Slot(0, 2, 0.1, 0.9), Slot(0)])
    yield _each("lowest_id_of_equal_sums", [1, 0.5, 1.5, 1.5], [0.5, 1, 0, 0], [Slot(), Slot(top_k=3), Slot(top_k=2)])
    yield _each("min_p_one_keeps_the_equals_of_the_best", [2, 5, 5, 4.5], [9, 0, 1, 9], [Slot(min_p=1), Slot()])
    rng = np.random.default_rng(12)
    logits, noise = spaced(rng, 6, 9), rng.gumbel(size=(6, 9))
    mixed = [Slot(), Slot(0.7, 3), Slot(0.0), Slot(1.3, top_p=0.7)]
    order = [3, -1, 0, 0, -6, 2]
    yield _case("pad_rows_between_rows_of_several_slots", list(zip(order, logits, noise, strict=True)), mixed, 5)
    yield _case("nothing_to_do", list(zip(order, logits, noise, strict=True)), mixed, 0)
    broken = np.array([logits[0]] * 6)
    broken[0, 3], broken[1, 8], broken[2], broken[3, 1] = np.nan, np.nan, -np.inf, np.inf
    broken[4], broken[4, 6], broken[5, :7] = -np.inf, -1, -np.inf
    for sampled in (Slot(0.9), Slot(0.9, 2, 0.9, 0.01), Slot(0.0)):
        rows = [(0, row, np.arange(9.0)[::-1]) for row in broken]
        kind = "greedy" if sampled.temperature == 0 else "filtered" if sampled.top_k else "sampled"
        yield _case(f"broken_and_forbidden_rows_{kind}", rows, [sampled])
    flat, peak = np.zeros(600), np.zeros(600)
    peak[590] = 50
    slots = [Slot(top_k=10), Slot(top_p=540.5 / 600), Slot(top_k=300, top_p=0.5017), Slot(min_p=0.5), Slot(top_k=599)]
    yield _case("flat_row_wider_than_any_shortlist", [(slot, flat, peak) for slot in range(5)], slots)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows and parameters, redrawn until no float32 error can change a choice; some rows without a slot."""
    size, num_rows, vocab = (int(v) for v in rng.integers((1, 1, 2), (5, 7, 40)))
    size, num_rows, vocab = fitted(sizes, B=size, N=several(sizes, num_rows), V=vocab)
    slots = [
        Slot(float(rng.choice([0, 0.5, 1, 1.5])), int(rng.choice([0, 1, 3, 8])), float(rng.choice([0.3, 0.8, 0.95, 1])),
             float(rng.choice([0, 0.05, 0.2])))
        for _ in range(size)
    ]  # fmt: skip
    if sizes:
        slots[-1] = slots[-1]._replace(temperature=1.5, **wide(vocab))
    rows: list[tuple[int, Array, Array]] = []
    while len(rows) < num_rows:
        slot = int(rng.integers(-1, size)) if not sizes or rows else size - 1
        logits, noise = spread_out(rng, vocab), rng.gumbel(size=vocab).astype(np.float32)
        if vocab > MANY_TOKENS:  # without filters one that is far from the most likely ones wins
            places = np.argsort(-logits)[64:250] if slots[slot].top_k == MANY_KEPT else np.arange(vocab)
            noise[rng.choice(places if rows else places[places >= vocab // 2])] += 60  # who stops in the middle is noticed
        divisor = np.float64(np.float32(slots[slot].temperature or 1.0))
        if margin(logits.astype(np.float64) / divisor, noise.astype(np.float64), slots[slot]) > 1e-3:
            rows.append((slot, logits, noise))
    return _case("random", rows, slots, launched(rng, sizes, num_rows))


CONTRACT = REGISTRY.add(
    Contract(
        name="sample",
        version=1,
        unit="any",
        args=SampleV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Temperature, top-k, top-p and min-p, then the highest sum of logit and Gumbel noise.",
        source="Gumbel-max: Maddison et al. 2014; top-k: Fan et al. 2018; top-p: Holtzman et al. 2020; "
        "min-p: Nguyen et al. 2024.",
        feature="sampling",
        grows={"N": ROWS, "B": SLOTS, "V": VOCABULARY},
        independent=("N",),
    )
)
