"""Faults of sums by leaf: other orders of adding, leaves that have what is not theirs, products whose bits depend on what is
beside them.

Faulty backends apply them as changes of goldens (`fault_injection.Computed`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polydraft.conformance import fault_injection as by
from polydraft.device import Array


def _leaves(a: Any, n: int) -> Array:
    """The leaves of `sum_leaves` in float32, [leaves, n, H]."""
    found: Array = a.x[:n].astype(np.float32).reshape(n, a.leaves, a.out.shape[1]).swapaxes(0, 1).copy()
    return found


def one_after_the_other(golden: by.Golden, a: Any, n: int) -> None:
    """Leaf by leaf."""
    golden(a, n)
    total, *others = _leaves(a, n)
    for other in others:
        total = total + other
    a.out[:n] = total


def halves(golden: by.Golden, a: Any, n: int) -> None:
    """The second half of the leaves is added to the first until one is left, as reductions over threads do."""
    golden(a, n)
    terms = list(_leaves(a, n))
    while len(terms) > 1:
        half = (len(terms) + 1) // 2
        terms = [one + other for one, other in zip(terms, terms[half:], strict=False)] + terms[len(terms) - half : half]
    a.out[:n] = terms[0]


def a_bias_a_leaf(golden: by.Golden, a: Any, n: int) -> None:
    """Every leaf has the bias."""
    golden(a, n)
    if a.bias is not None:
        outputs = len(a.bias)
        for leaf in range(1, a.leaves):
            a.out[:n, leaf * outputs : (leaf + 1) * outputs] += a.bias


def experts_in_turn(golden: by.Golden, a: Any, n: int) -> None:
    """Expert e is in leaf e mod their number."""
    if a.split == "experts":
        count = len(a.gate_up)
        turned = np.argsort(np.arange(count) % a.leaves, kind="stable")  # where a run has expert e: those of one leaf together
        places = np.argsort(turned)
        a.gate_up, a.down = a.gate_up[turned], a.down[turned]
        a.expert_ids = np.where(a.expert_ids >= 0, places[np.clip(a.expert_ids, 0, count - 1)], a.expert_ids)
    golden(a, n)


def many_outputs(golden: by.Golden, a: Any, n: int) -> None:
    """Where outputs are more than a tile has, columns are added in the opposite order."""
    golden(a, n)
    if getattr(a.weight, "packing", None) is not None or len(a.weight) <= 32:
        return
    x, weight = np.asarray(a.x[:n], np.float32), np.asarray(a.weight, np.float32)
    total = np.zeros((n, len(weight)), np.float32)
    for column in reversed(range(weight.shape[1])):
        total += x[:, column, None] * weight[:, column]
    a.out[:n] = total + (0 if a.bias is None else np.asarray(a.bias, np.float32))
