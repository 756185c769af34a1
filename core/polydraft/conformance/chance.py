"""Statistics for the kit: chi-square tails, and how large a sample has to be to detect a fault of a given size.

L5 uses it once, for sampling whose texts depend on the drafts and are compared as a distribution. Sample sizes are computed, not
guessed: a threshold on a distance without one lets the classic wrong samplers pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from polydraft.device import Array

ALPHA: Final = 1e-6
"""Chance to fail a right sampler."""
POWER: Final = 0.999
"""Chance to find a wrong one of the distance that a size is computed for."""
LEAST_EXPECTED: Final = 5.0
"""Cells that are expected less often are counted together."""


def tails(x: float, most: int) -> Array:
    """Entry i [most + 1]: the chance that chi-square with 2 i degrees of freedom exceeds x, which is a sum of Poisson terms."""
    i = np.arange(most)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.maximum(i[1:], 1)))))[:most]
    return np.concatenate(([0.0], np.cumsum(np.exp(i * np.log(x / 2) - x / 2 - log_factorial))))


def tail(x: float, freedom: int) -> float:
    """The same for any number of degrees; an odd one is rounded up, which is careful."""
    if x <= 0:
        return 1.0
    half = (freedom + 1) // 2
    return float(tails(x, half)[half])


def power(size: float, distance: float, freedom: int) -> float:
    """Chance to find a total variation of at least `distance` with `size` samples: the noncentrality n sum (dp^2 / p) is at least
    4 n distance^2, and a noncentral chi-square is a Poisson mixture of central ones."""
    x = _least(lambda x: tail(x, freedom) < ALPHA, 1.0, 1e5)
    half, least = 2 * size * distance**2, (freedom + 1) // 2
    mixture = np.diff(tails(2 * half, int(half + 12 * np.sqrt(half) + 20)))
    return float(mixture @ tails(x, least + len(mixture))[least:][: len(mixture)])


def sample_size(distance: float, cells: int) -> int:
    """Samples that find a total variation of `distance` among `cells` outcomes with the chance `POWER`."""
    return math.ceil(_least(lambda size: power(size, distance, cells - 1) > POWER, 10.0, 1e6))


def _least(reached: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest number from which on `reached` holds, to a thousandth."""
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def p_value(seen: Mapping[Any, int], expected: Mapping[Any, float]) -> float:
    """Chance of counts as far from the probabilities `expected` as `seen`, or farther; 0 for an outcome that cannot be."""
    size = sum(seen.values())
    if any(outcome not in expected for outcome in seen) or size == 0:
        return 0.0
    cells: list[tuple[float, int]] = []
    mass, count = 0.0, 0
    for outcome, probability in sorted(expected.items(), key=lambda one: one[1]):
        mass, count = mass + probability, count + seen.get(outcome, 0)
        if size * mass >= LEAST_EXPECTED:
            cells.append((mass, count))
            mass, count = 0.0, 0
    if mass and cells:
        cells[-1] = (cells[-1][0] + mass, cells[-1][1] + count)
    if len(cells) < 2:
        return 1.0
    statistic = sum((count - size * mass) ** 2 / (size * mass) for mass, count in cells)
    return tail(statistic, len(cells) - 1)
