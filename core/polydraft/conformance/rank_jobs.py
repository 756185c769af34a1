"""What one rank does in a check of collectives: runs cases, comes late, comes for something else.

The checks (`collective_checks.py`) have every rank do the same job, in a thread of its own or in a process (`rank_processes.py`).
A job is a name and values that JSON has; whoever runs it makes the cases anew. What it returns are arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from polydraft.backend import Collectives
from polydraft.conformance.harness import Bound, run_kernel
from polydraft.conformance.target import Opened
from polydraft.contracts import COLLECTIVES
from polydraft.contracts.base import Case
from polydraft.contracts.inputs import default_cases
from polydraft.contracts.stacking import stacked
from polydraft.device import Array

DRAWN: Final = 5
"""Generated cases of a contract."""
TURNS: Final = 12
LATE_RANKS: Final = 3
LATE_S: Final = 0.005


@cache
def cases(contract: str) -> tuple[Case, ...]:
    """Named and generated cases of all ranks."""
    return tuple(default_cases(stacked(COLLECTIVES[contract]), DRAWN))


@cache
def terms(size: int) -> Array:
    """What `size` ranks bring to a sum whose order shows, [ranks, rows, columns] float32."""
    rng = np.random.default_rng((3, size))
    return (rng.standard_normal((size, 6, 40)) * 10.0 ** rng.uniform(-3, 3, (size, 1, 40))).astype(np.float32)


@cache
def turns() -> tuple[Array, Array]:
    """What ranks bring to launches that follow each other, [turns, ranks, rows, columns] float32, and the one that is late."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((TURNS, LATE_RANKS, 5, 7)).astype(np.float32)
    return x, rng.integers(LATE_RANKS, size=TURNS)


def of_rank(case: Case, rank: int) -> Case:
    """What one rank is bound to."""
    outputs = {name: (shape[1:], dtype) for name, (shape, dtype) in case.outputs.items()}
    return replace(case, arrays={name: array[rank] for name, array in case.arrays.items()}, outputs=outputs)


def num_ranks(case: Case) -> int:
    """Ranks of a case of a collective."""
    return len(next(iter(case.arrays.values())))


Kind = tuple[str, int, int]
"""What a rank comes for: `all_reduce` or `broadcast`, the launch length, the step."""
Found = Mapping[str, Array]
"""What a job leaves a rank with."""
Job = Callable[..., Found]
"""`job(rank, opened, collectives, **values)`."""


def run_case(rank: int, opened: Opened, collectives: Collectives, *, contract: str, number: int) -> Found:
    """Run a case of a contract; the arguments as they are left, by name."""
    case = of_rank(cases(contract)[number], rank)
    return run_kernel(COLLECTIVES[contract], case, opened.device, _table(opened, collectives))


def run_sum(rank: int, opened: Opened, collectives: Collectives, *, of: int) -> Found:
    """Add the terms of as many ranks."""
    case = Case(f"ranks_{of}", {"x": terms(of)[rank], "step": np.zeros(1, np.int32)}, {}, 6)
    return run_kernel(COLLECTIVES["all_reduce"], case, opened.device, _table(opened, collectives))


def run_turns(rank: int, opened: Opened, collectives: Collectives) -> Found:
    """Launch sums that follow each other at once, some of them late; each sum, by its place."""
    x, late = turns()
    rows, table = x.shape[2], _table(opened, collectives)
    given = [Case("late", {"x": x[i, rank], "step": np.full(1, i, np.int32)}, {}, rows) for i in range(TURNS)]
    bound = [Bound(COLLECTIVES["all_reduce"], case, opened.device, table) for case in given]
    for i, one in enumerate(bound):
        if late[i] == rank:
            time.sleep(LATE_S)
        one.launch(one.stream, rows)
    return {str(i): one.read()["x"] for i, one in enumerate(bound)}


def run_kind(rank: int, opened: Opened, collectives: Collectives, *, kinds: Sequence[Kind | None]) -> Found:
    """Come for a collective, a launch length and a step of its own, or not at all."""
    kind = kinds[rank]
    if kind is None:
        return {}
    name, n, step = kind
    x = np.zeros((6, 4), np.float32) if name == "all_reduce" else np.zeros(6, np.int32)
    case = Case("kind", {"x": x, "step": np.full(1, step, np.int32)}, {}, n)
    return run_kernel(COLLECTIVES[name], case, opened.device, _table(opened, collectives))


def _table(opened: Opened, collectives: Collectives) -> Any:
    return replace(opened.table, providers=collectives.providers, versions=collectives.versions)


JOBS: Final[Mapping[str, Job]] = {job.__name__: job for job in (run_case, run_sum, run_turns, run_kind)}
