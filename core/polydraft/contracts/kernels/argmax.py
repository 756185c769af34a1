"""Defines `argmax`: the greedy choice of a token from every logit row.

The greedy verifier launches it on target logits and the proposer on draft logits. It never hides a broken row: a row
whose highest logit is not finite chooses NO_TOKEN, which ends the request with an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.sizes import MANY_TOKENS, ROWS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN


class ArgmaxV1(Args):
    """Arguments of `argmax`."""

    logits: Buffer = tensor("N V", "f32", "Logits; -inf forbids a token.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    tokens: Buffer = tensor(
        "N", "i32", "Highest logit's id, the lowest of equals; NO_TOKEN for a row with NaN, +inf or nothing but -inf.",
        access="out", pad=NO_TOKEN,
    )  # fmt: skip


def highest(row: Array) -> int:
    """Return the id of the highest value, the lowest of equals; NO_TOKEN when the row has NaN or +inf, or only -inf."""
    best, most = NO_TOKEN, -math.inf
    for v, logit in enumerate(row.tolist()):
        if math.isnan(logit) or logit == math.inf:
            return NO_TOKEN
        if logit > most:
            best, most = v, logit
    return best


def best_first(row: Array) -> list[int]:
    """Return the ids of a row without NaN, the highest value first, of equals the lower id."""
    down = [-value for value in row.tolist()]
    return sorted(range(len(down)), key=down.__getitem__)  # which keeps the order of equals


def golden(a: Any, n: int) -> None:
    """Scan row by row."""
    for r in range(n):
        a.tokens[r] = highest(a.logits[r]) if a.row_slot[r] >= 0 else NO_TOKEN


PEAKS = 24
"""Tokens that matter in a row of many."""


def spaced(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    """Return logits [rows, vocab] float32 whose values in a row are at least 1/8 apart, in random order.

    In a vocabulary as large as those of models only the highest are; the others are multiples of 1/16, many of them equal, so
    far below that together they have less than 1/100 of the probability up to a temperature of 1.5."""
    if vocab > MANY_TOKENS:
        logits = np.round(16 * np.clip(rng.normal(0, 2, (rows, vocab)), -8, 6)) / 16
        for r, row in enumerate(logits):
            ids = rng.permutation(vocab)[:PEAKS]
            if r % 2 == 0:  # the highest one at the end
                ids = np.array([*ids[ids < vocab - 9][: PEAKS - 1], vocab - 1 - rng.integers(9)])
            row[ids] = 30 + np.cumsum(rng.uniform(0.125, 0.5, PEAKS))[-len(ids) :]
        return logits.astype(np.float32)
    steps = np.cumsum(rng.uniform(0.125, 0.5, (rows, vocab)), axis=1) - vocab / 6
    return rng.permuted(steps, axis=1).astype(np.float32)


def _case(name: str, logits: Array, n: int, slots: Sequence[int] | None = None) -> Case:
    row_slot = np.array(range(len(logits)) if slots is None else slots, np.int32)
    return Case(name, {"logits": logits, "row_slot": row_slot}, {}, n, {"tokens": ((len(logits),), "i32")})


def cases() -> Iterator[Case]:
    """Named cases of `argmax`."""
    rng = np.random.default_rng(11)
    logits = spaced(rng, 7, 12)
    yield _case("several_rows_a_slot", logits, 6, [2, 2, 0, 0, 0, 1, 1])
    yield _case("pad_rows_between_valid_rows", logits, 6, [-1, 0, -4, 1, -1, 2, 3])
    ties = np.zeros((5, 12), np.float32)
    ties[1, [3, 11]], ties[2, [0, 11]], ties[3, 5:9], ties[4] = 2.5, 1.0, 0.5, -7.0
    yield _case("lowest_id_of_equals", ties, 5)
    zeros = -np.abs(logits[:4])
    zeros[0, [2, 7]], zeros[1, [2, 7]], zeros[2, [0, 11]], zeros[3] = (-0.0, 0.0), (0.0, -0.0), (-0.0, 0.0), -0.0
    zeros[3, 5] = 0.0
    yield _case("zeros_of_both_signs_are_equal", zeros, 4)
    ends = logits.copy()
    ends[0, 0], ends[1, 11] = 99, 99
    close = -np.abs(logits[:4])
    for row, value in zip(close, np.array([1.0, 1e-9, 1e-20, 1e9], np.float32), strict=True):
        row[[3, 8]] = value, np.nextafter(value, np.float32(np.inf))
    yield _case("the_last_digit_decides", close, 4)
    yield _case("both_ends_of_the_vocabulary", ends, 2)
    broken = logits.copy()
    broken[0, 4], broken[1, 0], broken[2, 11], broken[4] = np.nan, np.nan, np.nan, np.nan
    yield _case("nan_anywhere_chooses_nothing", broken, 6)
    forbidden = np.full((5, 12), -np.inf, np.float32)
    forbidden[1, 7], forbidden[2, [2, 9]], forbidden[4, 3] = -3e38, [-5, -4], np.inf
    yield _case("forbidden_tokens_and_overflow", forbidden, 5)
    yield _case("all_values_below_minus_one", logits - np.float32(50), 6)
    wide = spaced(rng, 3, 1030)
    wide[0, 1029], wide[1, 1024], wide[2, [512, 1027]] = 999, 999, 999
    yield _case("more_columns_than_a_tile", wide, 3)
    yield _case("one_token", logits[:, :1].copy(), 3)
    yield _case("nothing_to_do", logits, 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows, a few without a slot, with NaN or with an exact tie of the best."""
    rows, vocab = (int(v) for v in rng.integers((1, 2), (9, 70)))
    rows, vocab = fitted(sizes, N=several(sizes, rows), V=vocab)
    logits = spaced(rng, rows, vocab)
    for row in logits[bool(sizes) :]:
        kind, at = rng.integers(6), rng.integers(vocab)
        row[at] = np.nan if kind == 0 else row.max() if kind == 1 else row[at]
    slots = np.where(rng.random(rows) < 0.2, -1, rng.integers(0, 6, rows))
    slots[0] = 0 if sizes else slots[0]
    return _case("random", logits, launched(rng, sizes, rows), [int(s) for s in slots])


CONTRACT = REGISTRY.add(
    Contract(
        name="argmax",
        version=1,
        unit="any",
        args=ArgmaxV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Id of the highest logit; a row that cannot choose gives NO_TOKEN.",
        source="Greedy decoding.",
        equivalent_mutants={"plus(row_slot)": "only the sign of a slot is read, and this leaves every sign as it is"},
        feature="dense",
        compute=True,
        grows={"N": ROWS, "V": VOCABULARY},
        independent=("N",),
    )
)
