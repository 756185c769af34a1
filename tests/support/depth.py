"""Which values of a parameter `make test` takes; all the others are left to `make deep`.

Tests that draw many programs or go through every combination use it in `pytest.mark.parametrize`. The choice follows from the
place in the list alone, so every run of `make test` takes the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
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


def crossed(every: int, *axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes, for as many parameters. `make test` takes one in `every`, along diagonals: with axes that
    are not much shorter than `every`, each value comes up, and with it others than with its neighbour."""
    places = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        tuple(value for _, value in one)
        if sum(place for place, _ in one) % every == 0
        else deep(tuple(value for _, value in one))
        for one in places
    ]
