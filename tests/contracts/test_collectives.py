"""The contracts of collectives: their cases are adequate, their order of sums is one tree, and where ranks meet nothing goes
wrong in silence. The kit's own checks of them run around every backend that has ranks."""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft.conformance.adequacy import audit
from polydraft.conformance.collective_checks import Ranks, checks, together
from polydraft.conformance.harness import run_golden
from polydraft.conformance.rank_jobs import terms
from polydraft.conformance.rank_processes import Meeting, Other, processes_of
from polydraft.conformance.target import Target
from polydraft.contracts import COLLECTIVES, REGISTRY, contract_named
from polydraft.contracts.base import Contract
from polydraft.contracts.kernels.sum_leaves import tree_sum
from polydraft.contracts.stacking import stacked
from polydraft.errors import ContractError, DeviceError
from polydraft.host.followers import ENDING_S
from polydraft.plugins.default_backend import default_backend
from polydraft.ranks import Exchange, Group, Note
from polydraft.ranks import exchange as exchange_module
from polydraft.ranks.exchange import CLOSED, KINDS
from tests.conformance.doubles import BACKENDS
from tests.support.depth import crossed
from tests.support.project import ROOT

BY_NAME = {**BACKENDS, **({"cpu": "cpu"} if default_backend().name == "cpu" else {})}
each = pytest.mark.parametrize("contract", list(COLLECTIVES), ids=lambda contract: contract.name)
CHECKS = list(checks())


@each
def test_cases_are_adequate(contract: Contract):
    found = audit(stacked(contract))
    assert found.ok, found.describe()


@pytest.mark.parametrize(
    ("backend", "check"), crossed(2, BY_NAME, CHECKS), ids=lambda value: str(getattr(value, "id", value)).rpartition("/")[2]
)
def test_backends_with_ranks_pass(backend: str, check: Any):
    result = check.result(Target(BY_NAME[backend]))
    assert result.outcome == "pass", result.message


@pytest.mark.timeout(60)
def test_a_process_that_dies_fails_its_check_and_no_other(monkeypatch: pytest.MonkeyPatch):
    """While ranks wait without end for each other's devices, as where opening one ends the process."""
    ask = Other.ask

    def die(self: Other, job: Any) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        ask(self, job)

    target = Target("reference")
    ranks, case = processes_of(target), (2, 1 << 16, 2.0, "run_sum", {"of": 2})
    with monkeypatch.context() as there:
        there.setattr(Other, "ask", die)
        found = ranks.run(*case)
    for error in found:
        assert isinstance(error, DeviceError)
        assert str(error).startswith("the process of rank 1 ended: SIGKILL, Killed")
    left = [one["x"] for one in ranks.run(*case) if not isinstance(one, Exception)]
    np.testing.assert_array_equal(left, [tree_sum(list(terms(2)))] * 2)


@pytest.mark.timeout(60)
def test_processes_end_with_rank_0_also_while_they_wait_for_it(tmp_path: Path):
    """A kit that hangs is killed in the middle of a check; ranks that nobody comes to would keep the cores busy for good."""
    target = {"backend": "reference", "device": "", "files": [], "packs": [], "variants": True, "allow_cpu_fallback": False}
    one, file = Other(target, 1), tmp_path / "meeting"
    with file.open("w+b") as memory:
        Exchange.prepare(memory.fileno(), 2, 1 << 16)
        exchange = Exchange.over(memory.fileno(), 0, 2, 1 << 16)
        one.ask((Meeting(0, str(file), 2, 1 << 16, 2.0), "run_sum", {"of": 2}))
        while not exchange._arrived[1]:
            time.sleep(0.01)
        one._pipe.close()
        assert one._process.wait(ENDING_S) == 0
        one.end()


@pytest.mark.timeout(60)
def test_a_rank_that_left_out_a_group_joins_the_next_one():
    """Where groups meet has the same name again, and the third group is as large as the first."""
    target = Target("reference")
    ranks = processes_of(target)
    for size in (3, 2, 3):
        left = [one["x"] for one in ranks.run(size, 1 << 16, 20.0, "run_sum", {"of": size}) if not isinstance(one, Exception)]
        np.testing.assert_array_equal(left, [tree_sum(list(terms(size)))] * size)


def test_collectives_are_no_kernels():
    """No kernel table has to offer them, and a launch finds both."""
    assert not set(COLLECTIVES.names()) & set(REGISTRY.names())
    assert COLLECTIVES.names() == sorted((*KINDS, "own_experts")), "one exchanges nothing"
    assert contract_named("all_reduce") is COLLECTIVES["all_reduce"]
    assert contract_named("linear") is REGISTRY["linear"]
    with pytest.raises(ContractError, match="no contract is named 'all_to_all'"):
        contract_named("all_to_all")


@each
def test_the_page_of_ranks_has_them(contract: Contract):
    page = (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
    assert f"| `{contract.name}` |" in page


def test_a_golden_by_hand():
    """Three ranks, two rows, the second of which is not launched."""
    whole = stacked(COLLECTIVES["all_reduce"])
    case = next(case for case in whole.cases() if case.name == "ranks_3")
    found = run_golden(whole, case)["x"].value
    wanted = case.arrays["x"].astype(np.float64)
    wanted[:, : case.n] = wanted[0, : case.n] + wanted[1, : case.n] + wanted[2, : case.n]
    np.testing.assert_allclose(found, wanted, rtol=1e-15)


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(1, "0"), (2, "(0+1)"), (3, "((0+1)+2)"), (4, "((0+1)+(2+3))"), (5, "(((0+1)+(2+3))+4)"), (6, "(((0+1)+(2+3))+(4+5))")],
)
def test_the_tree(count: int, wanted: str):
    class Term(str):
        __slots__ = ()

        def __add__(self, other: str) -> Term:
            return Term(f"({super().__add__('+')}{other})")

    terms: Any = [Term(i) for i in range(count)]
    assert tree_sum(terms) == wanted


# -- where ranks meet --------------------------------------------------------------------------------------
def note(kind: str = "all_reduce", launch: int = 0, step: int = 3, n: int = 2, nbytes: int = 16) -> Note:
    return Note(kind, launch, step, n, nbytes)


def swaps(*of_ranks: Callable[[Exchange], Any], patience_s: float = 0.3) -> list[Any]:
    exchanges = Exchange.of_threads(len(of_ranks), 64, patience_s)
    return together([partial(work, one) for work, one in zip(of_ranks, exchanges, strict=True)])


def test_everybody_gets_what_everybody_brings_however_often_they_meet():
    def meet(exchange: Exchange) -> list[list[int]]:
        found = []
        for i in range(50):
            if (i + exchange.rank) % 7 == 0:
                time.sleep(0.001)
            mine = np.full(2, 100 * exchange.rank + i, np.int64)
            found.append([int(one[0]) for one in exchange.swap(note(step=i), mine)])
        return found

    for one in swaps(meet, meet, meet, patience_s=5):
        assert one == [[i, 100 + i, 200 + i] for i in range(50)]


def test_ranks_agree_on_the_first_reason_and_whether_one_brought_the_flag():
    """Also where a sentence is longer than there is room for; then they go on."""

    def agree(reason: str, flag: bool) -> Callable[[Exchange], Any]:
        def work(exchange: Exchange) -> Any:
            found = exchange.agree(reason, flag)
            return found, [one.tolist() for one in exchange.swap(note(nbytes=4), np.array([exchange.rank], np.int32))]

        return work

    long, after = "rank 2 failed: ä" * 200, [[0], [1], [2]]
    assert swaps(agree("", False), agree("", False), agree("", False)) == [(("", False), after)] * 3
    assert swaps(agree("", False), agree("no room", True), agree("x", False)) == [(("no room", True), after)] * 3
    for (reason, flag), _ in swaps(agree("", True), agree("", False), agree(long, False)):
        assert flag
        assert long.startswith(reason.rstrip("\ufffd"))
        assert len(reason) > 500


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (note(kind="broadcast"), "broadcast (launch 0 of the plan of step 3, 2 rows, 16 bytes)"),
        (note(launch=5), "all_reduce (launch 5 of the plan of step 3"),
        (note(step=2), "all_reduce (launch 0 of the plan of step 2"),
        (note(n=1), "all_reduce (launch 0 of the plan of step 3, 1 rows"),
        (note(nbytes=8), "all_reduce (launch 0 of the plan of step 3, 2 rows, 8 bytes)"),
    ],
)
def test_whoever_comes_for_something_else_ends_all(other: Note, words: str):
    def come(what: Note) -> Callable[[Exchange], Any]:
        return lambda exchange: exchange.swap(what, np.zeros(2, np.int64))

    found = swaps(come(note()), come(note()), come(other))
    assert all(isinstance(error, DeviceError) for error in found)
    said = {str(error) for error in found}
    assert len(said) == 1, "every rank says the same"
    assert f"rank 2 came to collective 1 for {words}" in said.pop()


def test_whoever_does_not_come_is_named_with_its_last_collective():
    def twice(exchange: Exchange) -> None:
        exchange.swap(note(), np.zeros(2, np.int64))
        exchange.swap(note(launch=1), np.zeros(2, np.int64))

    first, second = swaps(twice, lambda exchange: exchange.swap(note(), np.zeros(2, np.int64)))
    assert isinstance(first, DeviceError)
    assert re.fullmatch(
        r"rank 1 did not come to collective 2, all_reduce \(launch 1 of the plan of step 3, 2 rows, 16 bytes\), within 0.3 s; "
        r"its last was collective 1, all_reduce \(launch 0 of the plan of step 3, 2 rows, 16 bytes\); every rank ends here, "
        "start the engine again",
        str(first),
    )
    assert len(second) == 2, "it knew nothing of it"


def test_hosts_whose_devices_gave_up_find_out_who_differs_or_stays_away(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 has patience, the others wait for as long as it does: whoever judges first accuses nobody who comes later."""
    monkeypatch.setattr(exchange_module, "_JUDGES_S", 0.1)

    def judging(*launches: int | None, apart: bool = False) -> set[str]:
        exchanges = Exchange.of_threads(len(launches), 64, math.inf)
        exchanges[0].patience_s = 10

        def judge(rank: int) -> None:
            if (launch := launches[rank]) is not None:
                time.sleep(0.3 if rank == 0 else 0)
                if apart:
                    exchanges[rank]._state = np.zeros(1, np.int64).data
                exchanges[rank].judge(note(launch=launch), 2 - rank)

        found = together([partial(judge, rank) for rank in range(len(launches))])
        return {str(error) for error in found if error is not None}

    (absent,) = judging(5, 5, None)
    assert absent.startswith(f"rank 2 did not come to {note(launch=5)}, within 10 s; every rank")
    (waited_for,) = judging(5, None, None)
    assert waited_for.startswith("rank 2 did not come to "), "rank 1 may wait for it as well, without end"
    (other,) = judging(5, 6, 5)
    assert other.startswith(f"rank 1 came for {note(launch=6)}, rank 0 for all_reduce (launch 5 ")
    late = judging(5, 5, 5, apart=True)
    assert late == {f"rank 2 did not come to {note(launch=5)} within 10 s; every rank ends here, start the engine again"}, (
        "those that met say the same, also where each does so before it can know that another has"
    )


def test_a_failure_reaches_those_who_wait_at_once():
    begin = time.monotonic()

    def fail(exchange: Exchange) -> None:
        time.sleep(0.05)
        exchange.fail("rank 1 is out of memory")

    found = swaps(lambda exchange: exchange.swap(note(), np.zeros(2, np.int64)), fail, patience_s=30)
    assert time.monotonic() - begin < 10
    assert ["rank 1 is out of memory; every rank ends here" in str(error) for error in found] == [True, True]


def test_the_first_failure_stays_said_and_a_closed_engine_keeps_nobody():
    first, second = Exchange.of_threads(2, 64)
    with pytest.raises(DeviceError, match="rank 0 said so"):
        first.fail("rank 0 said so")
    with pytest.raises(DeviceError, match="rank 0 said so"):
        second.fail("rank 1 said something else")
    second.close()
    assert first.failure == "rank 0 said so; every rank ends here, start the engine again"
    first, second = Exchange.of_threads(2, 64, patience_s=30)
    waiting = threading.Thread(target=lambda: together([lambda: first.swap(note(), np.zeros(2, np.int64))]))
    waiting.start()
    second.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert first.failure == CLOSED


def test_no_garbage_is_collected_while_ranks_meet():
    """To free memory of a device waits for what runs there, which may wait for the rank whose thread collects."""
    gone, garbage = list[int](), Exchange.of_threads(1, 8)
    garbage.append(garbage)  # type: ignore[arg-type]
    weakref.finalize(garbage[0], gone.append, 1)
    del garbage
    with Ranks(Target("reference")):
        assert gone == [1]
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_does_not_fit_is_refused():
    (one,) = Exchange.of_threads(1, 8)
    with pytest.raises(DeviceError, match=r"rank 0 brought 16 bytes to all_reduce .*, wanted at most 8"):
        one.swap(note(), np.zeros(2, np.int64))


def test_launches_are_numbered_as_they_are_bound():
    (exchange,) = Exchange.of_threads(1, 64)
    exchange.meet(0)
    assert exchange.last_clause(0) == "", "to be built is no collective"
    group, step = Group(0, 1, exchange), np.zeros(1, np.int32)
    first, second = group.swapper("all_reduce", step), group.swapper("broadcast", step)
    second(2, np.zeros(2, np.int32))
    assert exchange.last_clause(0) == "; its last was collective 2, broadcast (launch 1 of the plan of step 0, 2 rows, 8 bytes)"
    first(1, np.zeros(1, np.int32))
    assert exchange.last_clause(0) == "; its last was collective 3, all_reduce (launch 0 of the plan of step 0, 1 rows, 4 bytes)"
