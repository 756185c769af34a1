"""Which values of a parameter `make test` takes; all the others are left to `make deep`.

Tests that draw many programs or go through every combination use it in `pytest.mark.parametrize`; tests of whole steps, which are
the most and the longest, are thinned besides (`thin`, for `tests/conftest.py`). The choice follows from the place in the list
alone, so every run of `make test` takes the same ones.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def deep(value: Any) -> Any:
    """The value, or the tuple of values of several parameters, for `make deep` alone."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.deep)


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """`make test` takes the first `count`."""
    return [value if place < count else deep(value) for place, value in enumerate(values)]


def among(taken: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`make test` takes those that are among `taken`."""
    return [value if value in taken else deep(value) for value in values]


MOST = 40
"""Combinations of a product that `make deep` takes, about: with all of them it would not end within an evening."""


def crossed(every: int, *axes: Iterable[Any], most: float = MOST) -> list[Any]:
    """Combinations of the axes, for as many parameters. `make test` takes one in `every`, along diagonals: with axes that
    are not much shorter than `every`, each value comes up, and with it others than with its neighbour. `make deep` takes all
    others, of large products those along further diagonals, `most` of them or so."""
    places = list(itertools.product(*(enumerate(axis) for axis in axes)))
    apart = max(len(places) // most, 1)
    chosen = []
    for one in places:
        diagonal, values = sum(place for place, _ in one), tuple(value for _, value in one)
        if diagonal % every == 0:
            chosen.append(values)
        elif (diagonal + 1) % apart == 0:
            chosen.append(deep(values))
    return chosen


def thin(items: Sequence[pytest.Item]) -> None:
    """Of the tests `items`, leave to `make deep` one of the two that a function has, by turns the second and the first; of more,
    take the first and every fifth, from nine on every seventh: steps that are no lengths of axes, so that with the number of
    those taken each value comes up. Functions that choose themselves which are deep are left as they are."""
    of_function: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            of_function[item.nodeid.partition("[")[0]].append(item)
    pairs = 0
    for same in of_function.values():
        if any(item.get_closest_marker("deep") for item in same):
            continue
        every = 2 if len(same) == 2 else 5 if len(same) < 9 else 7
        pairs += len(same) == 2
        taken = pairs % 2 if len(same) == 2 else 0
        for place, item in enumerate(same):
            if place % every != taken:
                item.add_marker(pytest.mark.deep)
