"""Level L2 of collectives: what ranks exchange, each rank a device and a thread of this process, or a process where the backend
declares that one can be a single rank.

For backends that declare `ranks`. The cases come from the contracts; beside them ranks come late, come for different things, or
do not come at all.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from polydraft.backend import Collectives
from polydraft.conformance.check import Check, Tally, Unseen, Unsupported
from polydraft.conformance.harness import run_golden
from polydraft.conformance.rank_jobs import JOBS, LATE_RANKS, TURNS, Found, Kind, cases, num_ranks, terms, turns
from polydraft.conformance.rank_processes import processes_of
from polydraft.conformance.target import Opened, Target
from polydraft.contracts import COLLECTIVES
from polydraft.contracts.base import Contract
from polydraft.contracts.compare import compare
from polydraft.contracts.kernels.sum_leaves import tree_sum
from polydraft.contracts.stacking import stacked
from polydraft.errors import DeviceError
from polydraft.ranks import Exchange, Group
from polydraft.ranks.exchange import PATIENCE_S

CAPACITY: Final = 1 << 20
"""Bytes that a rank brings to a launch at most."""
SHORT_S: Final = 0.3
"""Seconds that a rank waits for others where one will not come; elsewhere it is as in an engine, since some may still compile."""
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
    """As many ranks as are wanted, which do the same jobs; use it in `with`. Garbage is collected before and not meanwhile: where
    ranks share a device, to free memory waits for launches that wait for the rank whose thread would collect."""

    def __init__(self, target: Target, patience_s: float = PATIENCE_S) -> None:
        self._target, self._patience_s, self._opened = target, patience_s, list[Opened]()

    def __enter__(self) -> Ranks:  # noqa: PYI034  typing.Self needs Python 3.11
        self._collects = gc.isenabled()
        gc.collect()
        gc.disable()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            for one in self._opened:
                one.device.close()
        finally:
            if self._collects:
                gc.enable()

    def run(self, size: int, job: str, **values: Any) -> list[Found | Exception]:
        """What a job of `JOBS` leaves each rank with, or raises there."""
        if self._target.info.capabilities.single_rank:
            look_for_ranks(self._target, size)
            return processes_of(self._target).run(size, CAPACITY, self._patience_s, job, values)
        work = [partial(JOBS[job], rank, *one, **values) for rank, one in enumerate(self._meet(size))]
        return together(work)

    def left(self, size: int, job: str, **values: Any) -> list[Found]:
        """As `run`; raises what the first rank raised that did."""
        left = list[Found]()
        for one in self.run(size, job, **values):
            if isinstance(one, Exception):
                raise one
            left.append(one)
        return left

    def _meet(self, size: int) -> list[tuple[Opened, Collectives]]:
        """Devices of this process with collectives of a new group."""
        while len(self._opened) < size:
            self._opened.append(self._target.open(dtype="f32"))
        plugins, exchanges = self._target.plugins, Exchange.of_threads(size, CAPACITY, self._patience_s)
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


def look_for_ranks(target: Target, ranks: int) -> None:
    """Raise where processes of so many ranks cannot be had here."""
    declared, named = target.info.capabilities, target.device_spec.count(",") + 1
    devices = named if named > 1 else len(target.info.devices)
    if declared.ranks == "processes" and not target.plugins.backend.entry:
        raise Unsupported("ranks are processes, which are given a backend by its name, and this one is an object")
    if declared.rank_devices and devices < ranks:
        raise Unseen(f"{ranks} ranks need as many devices, and {'these are' if named > 1 else 'this machine has'} {devices}")


def _cases(contract: Contract, target: Target, tally: Tally) -> None:
    """Every case, named and generated, against the golden of all ranks."""
    whole = stacked(contract)
    with Ranks(target) as ranks:
        for number, case in enumerate(cases(contract.name)):
            left = ranks.left(num_ranks(case), "run_case", contract=contract.name, number=number)
            got = {name: np.stack([one[name] for one in left]) for name in left[0]}
            tally.compared(compare(whole, case, got, run_golden(whole, case)))


def _ordered(target: Target, tally: Tally) -> None:
    """Sums of as many ranks as may be are those of the tree, to the bit, on every rank; two ranks show nothing, for addition
    commutes."""
    with Ranks(target) as ranks:
        for size in (3, 4, 5, MOST_RANKS):
            for rank, one in enumerate(ranks.left(size, "run_sum", of=size)):
                tally.same_bits(f"the sum of {size} ranks on rank {rank}", one["x"], tree_sum(list(terms(size))))


def _late(target: Target, tally: Tally) -> None:
    """Launches that follow each other at once, with ranks coming late by turns: nobody reads what is not there yet, or what was
    there before."""
    with Ranks(target) as ranks:
        left = ranks.left(LATE_RANKS, "run_turns")
    for rank, one in enumerate(left):
        for i in range(TURNS):
            near = np.allclose(one[str(i)], turns()[0][i].sum(axis=0), rtol=1e-4, atol=1e-4)
            tally.true(f"launch {i} adds what the ranks brought to it, on rank {rank}", near)


def _raise_all(target: Target, tally: Tally, what: str, named: str, kinds: Sequence[Kind | None]) -> None:
    """Ranks that come for `kinds` all raise an error that names `named`."""
    with Ranks(target, SHORT_S) as ranks:
        found = ranks.run(len(kinds), "run_kind", kinds=kinds)
    for rank, (kind, error) in enumerate(zip(kinds, found, strict=True)):
        if kind is not None:
            tally.true(f"{what}: a DeviceError on rank {rank}, got {error!r}", isinstance(error, DeviceError))
            tally.true(f"{what}: {named!r} in what rank {rank} says, got {str(error)!r}", named in str(error))


def _parting(target: Target, tally: Tally) -> None:
    """Another collective, length or step is an error on every rank that names the first rank that differs."""
    usual: Kind = ("all_reduce", 3, 7)
    _raise_all(target, tally, "another collective", "rank 1 came", [usual, ("broadcast", 3, 7), usual])
    _raise_all(target, tally, "another length", "rank 2 came", [usual, usual, ("all_reduce", 2, 7)])
    _raise_all(target, tally, "another step", "rank 1 came", [usual, ("all_reduce", 3, 6), usual])


def _absent(target: Target, tally: Tally) -> None:
    """A rank that does not come is an error on the others that names it."""
    _raise_all(
        target, tally, "a rank that does not come", "rank 1 did not come", [("all_reduce", 3, 7), None, ("all_reduce", 3, 7)]
    )
