"""Synthetic acceptance by hand: which choices become the draft, which become another token, and which stay.

Nothing expected here was computed by the code under test.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Limits
from polydraft.reference.state_kernels import KERNELS

LIMITS = Limits(3, 2, 16, 9, 12, 4, 8, 3, 1, 50)


def by_golden(a: Any, n: int) -> None:
    REGISTRY["force_choices"].golden(a, n)


def by_reference(a: Any, n: int) -> None:
    KERNELS["force_choices"](a, LIMITS)(n)


@pytest.mark.parametrize("launch", [by_golden, by_reference])
@pytest.mark.parametrize(("n", "wanted"), [(3, [7, 30, 31, 8, 40, -1, 0, 3]), (1, [7, 30, 31, 20, 40, -1, 49, 3])])
def test_a_table(launch: Any, n: int, wanted: list[int]) -> None:
    """Slots 2, 0, 1 in launch order, chances 0.5 and 0.25, a vocabulary of 50.

    Slot 2 verifies drafts 7 and 9 in rows 0 and 1: 0.4 < 0.5 takes the 7; 0.25 is not below 0.25, and the choice 30 is another
    token already. Row 2 is the target's own. Slot 0 has one draft, 8, in row 3: 0.0 takes it. Slot 1 verifies 1 and 49 in rows
    5 and 6: row 5 could choose nothing and stays so; 0.9 refuses the 49 that the target chose too, and behind the last token of
    the vocabulary comes 0. With a launch of one sequence only the first is touched."""
    a = SimpleNamespace(
        slot_order=np.array([2, 0, 1], np.int32),
        logit_start=np.array([0, 3, 5], np.int32),
        logit_len=np.array([3, 2, 3], np.int32),
        drafts=np.array([[8, -1], [1, 49], [7, 9]], np.int32),
        uniforms=np.array([0.4, 0.25, 0.0, 0.0, 0.0, 0.0, 0.9, 0.0], np.float32),
        chances=np.array([0.5, 0.25], np.float32),
        choices=np.array([20, 30, 31, 20, 40, -1, 49, 3], np.int32),
        num_valid=50,
    )
    launch(a, n)
    assert a.choices.tolist() == wanted
