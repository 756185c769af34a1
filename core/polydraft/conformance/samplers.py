"""The classic wrong samplers of speculative decoding as formulas: the distribution each produces instead of the target's p.

L5 derives its sample size from the one that is hardest to detect, and takes the prompt on which they show most. No sampler runs
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from polydraft.device import Array

Sampler = Callable[[Array, Array, Array], Array]
"""(p, q, q before filtering) -> the distribution that comes out. p, q [V]: of the target and of the draft, filtered."""


def _output(p: Array, q: Array, filed: Array, chance: Array, behind: Array | None = None) -> Array:
    """Accept a draft drawn from q with `chance`; draw from `behind`, else from what p has more than `filed`, where it is not."""
    left = np.maximum(p - filed, 0.0)
    rest = behind if behind is not None else left / left.sum() if left.sum() > 0 else p
    accepted = q * np.where(q > 0, chance, 0.0)
    result: Array = accepted + (1 - accepted.sum()) * rest
    return result


def _ratio(p: Array, filed: Array) -> Array:
    result: Array = np.minimum(1.0, p / np.where(filed > 0, filed, 1.0))
    return result


def right(p: Array, q: Array, unfiltered: Array) -> Array:
    """Accept with min(1, p / q), else draw from (p - q)+: comes out as p."""
    del unfiltered
    return _output(p, q, q, _ratio(p, q))


WRONG: Final[Mapping[str, Sampler]] = {
    "recovered token from p": lambda p, q, unfiltered: _output(p, q, q, _ratio(p, q), p),
    "one-hot rule on soft drafts": lambda p, q, unfiltered: _output(p, q, q, p),
    "always accept": lambda p, q, unfiltered: _output(p, q, q, np.ones_like(p)),
    "q before filtering": lambda p, q, unfiltered: _output(p, q, unfiltered, _ratio(p, unfiltered)),
}


def deviation(sampler: Sampler, p: Array, q: Array, unfiltered: Array) -> float:
    """Total variation of what comes out from p."""
    return float(np.abs(sampler(p, q, unfiltered) - p).sum() / 2)


def filtered(logits: Array, temperature: float, top_k: int) -> Array:
    """The distribution over the `top_k` highest logits."""
    shares = np.exp((logits - logits.max()) / temperature)
    probs = np.zeros_like(shares)
    kept = np.argsort(-shares, kind="stable")[:top_k]
    probs[kept] = shares[kept] / shares[kept].sum()
    return np.asarray(probs)
