"""Defines `spread_logits`: logits over a reduced vocabulary become logits over the whole one.

The runner launches it behind the head of a draft pass that scores some tokens only. It never changes a logit; what has none is
-inf, so that no rule can choose it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.sizes import ROWS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer

NO_PLACE = -1
"""In `places`: a token outside the reduced vocabulary."""


class SpreadLogitsV1(Args):
    """Arguments of `spread_logits`. Precondition: every place is below VD."""

    x: Buffer = tensor("N VD", "f32", "Logits of each row over the reduced vocabulary.")
    places: Buffer = tensor("V", "i32", "Column of x that scores each token; negative: none does.")
    out: Buffer = tensor("N V", "f32", "Logits of each row over the whole vocabulary.", access="out")


def golden(a: Any, n: int) -> None:
    """Token by token."""
    for r in range(n):
        for v, place in enumerate(a.places):
            a.out[r, v] = a.x[r, place] if place >= 0 else -np.inf


def _case(name: str, x: Array, places: Sequence[int], n: int) -> Case:
    arrays = {"x": x.astype(np.float32), "places": np.array(places, np.int32)}
    return Case(name, arrays, {}, n, {"out": ((len(x), len(places)), "f32")})


def cases() -> Iterator[Case]:
    """Named cases of `spread_logits`."""
    rng = np.random.default_rng(61)
    x = rng.normal(0, 3, (5, 4))
    yield _case("some_tokens_have_no_column", x, [-1, 0, -1, 1, 2, -1, 3], 5)
    yield _case("columns_in_any_order", x, [2, -1, 0, 3, -1, 1], 4)
    yield _case("every_token_has_one", x, [0, 1, 2, 3], 5)
    yield _case("any_negative_place_is_none", x, [-7, 3, -2, 0, -1, 1, 2], 5)
    yield _case("beyond_the_launch_length", x, [0, -1, 1, 2, 3], 2)
    broken = x.copy()
    broken[0, 1], broken[1, 0], broken[2] = np.nan, np.inf, -np.inf
    yield _case("broken_logits_as_they_are", broken, [3, -1, 1, 0, -1, 2], 5)
    yield _case("one_column", rng.normal(0, 3, (3, 1)), [-1, -1, 0], 3)
    places = np.full(1030, NO_PLACE)
    places[rng.permutation(1030)[:300]] = np.arange(300)
    yield _case("more_columns_than_a_tile", rng.normal(0, 3, (3, 300)), places.tolist(), 2)
    yield _case("nothing_to_do", x, [0, -1, 1, 2, 3], 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random columns at random places."""
    rows, columns, others = (int(v) for v in rng.integers((1, 1, 0), (7, 12, 12)))
    rows, columns, vocab = fitted(sizes, N=several(sizes, rows), VD=columns, V=columns + others)
    scored = range(columns) if columns <= vocab else rng.permutation(columns)[:vocab]
    places = rng.permutation([*scored, *[NO_PLACE] * (vocab - columns)])
    return _case("random", rng.normal(0, 3, (rows, columns)), places.tolist(), launched(rng, sizes, rows))


CONTRACT = REGISTRY.add(
    Contract(
        name="spread_logits",
        version=1,
        unit="any",
        args=SpreadLogitsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Place logits over a reduced vocabulary among those of the whole one.",
        source="Zhao et al. 2025, FR-Spec: drafts from a frequency-ranked part of the vocabulary.",
        feature="drafting",
        grows={"N": ROWS, "V": VOCABULARY, "VD": VOCABULARY},
        independent=("N",),
    )
)
