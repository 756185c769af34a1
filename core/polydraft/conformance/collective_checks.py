"""Level L2 of collectives: what ranks exchange, each rank a device and a thread of this process.

For backends that declare `ranks`. The cases come from the contracts; beside them ranks come late, come for different things, or
do not come at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from polydraft.backend import Collectives
from polydraft.conformance.check import Check, Tally
from polydraft.conformance.harness import Bound, run_golden, run_kernel
from polydraft.conformance.target import Opened, Target
from polydraft.contracts import COLLECTIVES
from polydraft.contracts.base import Case, Contract
from polydraft.contracts.compare import compare
from polydraft.contracts.inputs import default_cases
from polydraft.contracts.kernels.sum_leaves import tree_sum
from polydraft.contracts.stacking import stacked
from polydraft.device import Array
from polydraft.errors import DeviceError
from polydraft.ranks import Exchange, Group

CAPACITY: Final = 1 << 16
PATIENCE_S, SHORT_S = 2.0, 0.3
"""Seconds that a rank waits for the others; where one will not come."""
TURNS: Final = 12
MOST_RANKS: Final = 8


def checks() -> Iterator[Check]:
    """Every check of collectives."""
    for contract in COLLECTIVES:
        yield _check(contract.name, partial(_cases, contract))
    yield _check("ordered-sums", _ordered, "ordered_sums")
    yield _check("late-ranks", _late)
    yield _check("ranks-that-part", _parting)
    yield _check("a-rank-that-does-not-come", _absent)


def _check(name: str, run: Callable[[Target, Tally], None], *needs: str) -> Check:
    return Check(f"L2/collectives/{name}", run, needs=("ranks", *needs), features=())


class Ranks:
    """The devices of as many ranks as are wanted; use it in `with`."""

    def __init__(self, target: Target) -> None:
        self._target, self._opened = target, list[Opened]()

    def __enter__(self) -> Ranks:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(self, *exc: object) -> None:
        for one in self._opened:
            one.device.close()

    def meet(self, size: int, patience_s: float = PATIENCE_S) -> list[tuple[Opened, Collectives]]:
        """Devices with collectives of a new group."""
        while len(self._opened) < size:
            self._opened.append(self._target.open(dtype="f32"))
        exchanges = Exchange.of_threads(size, CAPACITY, patience_s)
        plugins = self._target.plugins
        groups = [Group(rank, size, exchange) for rank, exchange in enumerate(exchanges)]
        return [(one, plugins.collectives(one.device, group)) for one, group in zip(self._opened, groups, strict=False)]


def together(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each rank's work returns, or raised, each in a thread of its own."""
    found: list[Any] = [None] * len(work)

    def run(rank: int) -> None:
        try:
            found[rank] = work[rank]()
        except Exception as error:  # noqa: BLE001  looked at by the caller
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def of_rank(case: Case, rank: int) -> Case:
    """What one rank is bound to."""
    outputs = {name: (shape[1:], dtype) for name, (shape, dtype) in case.outputs.items()}
    return replace(case, arrays={name: array[rank] for name, array in case.arrays.items()}, outputs=outputs)


def num_ranks(case: Case) -> int:
    """Ranks of a case of a collective."""
    return len(next(iter(case.arrays.values())))


def run_ranks(contract: Contract, case: Case, ranks: Ranks) -> dict[str, Array]:
    """What all ranks are left with, by argument, along an axis of ranks. Raises what the first rank raised that did."""

    def work(rank: int, opened: Opened, collectives: Collectives) -> Callable[[], dict[str, Array]]:
        return lambda: run_kernel(contract, of_rank(case, rank), opened.device, _table(opened, collectives))

    met = ranks.meet(num_ranks(case))
    found = together([work(rank, *one) for rank, one in enumerate(met)])
    for one in found:
        if isinstance(one, Exception):
            raise one
    return {name: np.stack([one[name] for one in found]) for name in found[0]}


def _table(opened: Opened, collectives: Collectives) -> Any:
    return replace(opened.table, providers=collectives.providers, versions=collectives.versions)


def _cases(contract: Contract, target: Target, tally: Tally) -> None:
    """Every case, named and generated, against the golden of all ranks."""
    whole = stacked(contract)
    with Ranks(target) as ranks:
        for case in default_cases(whole, 5):
            tally.compared(compare(whole, case, run_ranks(contract, case, ranks), run_golden(whole, case)))


def _ordered(target: Target, tally: Tally) -> None:
    """Sums of as many ranks as may be are those of the tree, to the bit, on every rank; two ranks show nothing, for addition
    commutes."""
    contract, rng = COLLECTIVES["all_reduce"], np.random.default_rng(3)
    with Ranks(target) as ranks:
        for size in (3, 4, 5, MOST_RANKS):
            x = (rng.standard_normal((size, 6, 40)) * 10.0 ** rng.uniform(-3, 3, (size, 1, 40))).astype(np.float32)
            case = Case(f"ranks_{size}", {"x": x, "step": np.zeros((size, 1), np.int32)}, {}, 6)
            got = run_ranks(contract, case, ranks)["x"]
            for rank in range(size):
                tally.same_bits(f"the sum of {size} ranks on rank {rank}", got[rank], tree_sum(list(x)))


def _late(target: Target, tally: Tally) -> None:
    """Launches that follow each other at once, with ranks coming late by turns: nobody reads what is not there yet, or what was
    there before."""
    size, rows, rng = 3, 5, np.random.default_rng(4)
    x = rng.standard_normal((TURNS, size, rows, 7)).astype(np.float32)
    late = rng.integers(size, size=TURNS)
    contract = COLLECTIVES["all_reduce"]

    def work(rank: int, opened: Opened, collectives: Collectives) -> Callable[[], list[Array]]:
        cases = [Case("late", {"x": x[i, rank], "step": np.full(1, i, np.int32)}, {}, rows) for i in range(TURNS)]
        table = _table(opened, collectives)
        bound = [Bound(contract, case, opened.device, table) for case in cases]

        def run() -> list[Array]:
            for i, one in enumerate(bound):
                if late[i] == rank:
                    time.sleep(0.005)
                one.launch(one.stream, rows)
            return [one.read()["x"] for one in bound]

        return run

    with Ranks(target) as ranks:
        found = together([work(rank, *one) for rank, one in enumerate(ranks.meet(size))])
    for rank, one in enumerate(found):
        if isinstance(one, Exception):
            raise one
        for i in range(TURNS):
            near = np.allclose(one[i], x[i].sum(axis=0), rtol=1e-4, atol=1e-4)
            tally.true(f"launch {i} adds what the ranks brought to it, on rank {rank}", near)


def _raise_all(target: Target, tally: Tally, what: str, named: str, kinds: Sequence[tuple[str, int] | None]) -> None:
    """Ranks that come for `kinds`, a collective and a launch length each, all raise an error that names `named`."""

    def work(rank: int, opened: Opened, collectives: Collectives) -> Callable[[], object]:
        kind = kinds[rank]
        if kind is None:
            return lambda: None
        name, n = kind
        arrays: dict[str, Any] = {"x": np.zeros((6, 4) if name == "all_reduce" else 6, np.float32), "step": np.zeros(1, np.int32)}
        if name == "broadcast":
            arrays["x"] = arrays["x"].astype(np.int32)
        table, case = _table(opened, collectives), Case(what, arrays, {}, n)
        return lambda: run_kernel(COLLECTIVES[name], case, opened.device, table)

    with Ranks(target) as ranks:
        found = together([work(rank, *one) for rank, one in enumerate(ranks.meet(len(kinds), SHORT_S))])
    for rank, (kind, error) in enumerate(zip(kinds, found, strict=True)):
        if kind is not None:
            tally.true(f"{what}: a DeviceError on rank {rank}, got {error!r}", isinstance(error, DeviceError))
            tally.true(f"{what}: {named!r} in what rank {rank} says, got {str(error)!r}", named in str(error))


def _parting(target: Target, tally: Tally) -> None:
    """Another collective, or another length, is an error on every rank that names the first rank that differs."""
    _raise_all(target, tally, "another collective", "rank 1 came", [("all_reduce", 3), ("broadcast", 3), ("all_reduce", 3)])
    _raise_all(target, tally, "another length", "rank 2 came", [("all_reduce", 3), ("all_reduce", 3), ("all_reduce", 2)])


def _absent(target: Target, tally: Tally) -> None:
    """A rank that does not come is an error on the others that names it."""
    _raise_all(target, tally, "a rank that does not come", "rank 1 did not come", [("all_reduce", 3), None, ("all_reduce", 3)])
