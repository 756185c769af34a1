"""The adequacy gate itself: weak cases must be found weak, strong ones strong, and no listing may cover for either."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polydraft.conformance.adequacy import audit
from polydraft.contracts.base import Args, Case, Contract, LogicalCache, columns, opaque, param, tensor
from polydraft.contracts.inputs import namespace
from polydraft.contracts.mutants import Shown, mutants
from polydraft.errors import ContractError
from tests.contracts import toy

# One row of slot 0 that fills its buffer, in plain mode: it shows that something is computed, and hides the rest.
WEAK = toy.case("one_row", [0], 1, rows=1)
IDLE = ("zero(last)", "plus(last)", "minus(last)")


def test_weak_cases_have_survivors():
    report = audit(toy.with_cases(WEAK))
    assert not report.ok
    assert set(report.survivors) == {
        "more-rows", "unpad(row_slot)", "zero(row_slot)", "reverse(x)", "reverse(row_slot)", "reverse(gain)", "reverse(offset)",
        "reverse-all(N)", "reverse-all(B)", "flip(mode=plain)",
    }  # fmt: skip
    assert "blend/1: no default case notices reverse(x); add a case, or prove" in report.describe()


def test_strong_cases_kill_everything():
    report = audit(toy.CONTRACT)
    assert report.describe() == f"blend/1: {len(report.killed)} mutants killed, 0 equivalent, {len(IDLE)} idle"
    assert report.ok
    assert report.idle == IDLE
    assert len(report.killed) > 20


@pytest.mark.parametrize(
    ("mutant", "killer"),
    [
        ("more-rows", toy.case("stale_row", [0, 1], 1, rows=2)),
        ("unpad(row_slot)", toy.case("padding", [0, -1], 2)),
        ("zero(row_slot)", toy.case("another_slot", [2], 1)),
        ("reverse(x)", toy.case("two_rows", [0, 0], 2)),
        ("flip(mode=plain)", toy.case("negated", [0], 1, rows=1, mode="negated")),
    ],
)
def test_one_more_case_kills_one_more_mutant(mutant: str, killer: Case):
    report = audit(toy.with_cases(WEAK, killer))
    assert report.killed[mutant] == killer.name
    assert mutant not in report.survivors


def test_generated_cases_count():
    strong = next(iter(toy.strong_cases()))
    contract = toy.with_cases(WEAK, generate=lambda rng: strong)
    assert "more-rows" in audit(contract, seeds=0).survivors
    assert audit(contract, seeds=1).killed["more-rows"] == "seed-0"


def test_listed_survivor_is_accepted():
    survivors = audit(toy.with_cases(WEAK)).survivors
    report = audit(toy.with_cases(WEAK, equivalent_mutants=dict.fromkeys(survivors, "said so")))
    assert report.ok
    assert set(report.equivalent) == set(survivors)


def test_listed_mutant_that_dies_is_an_error():
    report = audit(dataclasses.replace(toy.CONTRACT, equivalent_mutants={"zero(gain)": "wrong"}))
    assert not report.ok
    assert report.stale == ("zero(gain)",)
    assert "zero(gain) is listed as equivalent, but dies in case" in report.describe()


@pytest.mark.parametrize("unknown", ["zero(nothing)", "plus(last)"])
def test_listed_mutant_that_is_none_is_an_error(unknown: str):
    # The second one exists but is idle: listing it would claim a proof for nothing.
    report = audit(dataclasses.replace(toy.CONTRACT, equivalent_mutants={unknown: "wrong"}))
    assert report.stale == (unknown,)


def test_contract_without_cases_proves_nothing():
    report = audit(toy.with_cases(), seeds=0)
    assert not report.ok
    assert "no mutant died" in report.describe()


def test_golden_that_fails_is_no_verdict():
    def golden(a: Any, n: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        audit(dataclasses.replace(toy.CONTRACT, golden=golden))


class LookupV1(Args):
    """Arguments of a table lookup with a counter that is only written."""

    index: Any = tensor("N", "i32", "Row of the table.")
    table: Any = tensor("V", "f32", "Numbers.")
    used: Any = tensor("V", "i32", "1 where a row was used.", access="inout")
    out: Any = tensor("N", "f32", "The numbers.", access="out")


def lookup(golden: Any, *indices: int, table: tuple[float, ...] = (5.0,)) -> Contract:
    arrays = {"index": np.array(indices, np.int32), "table": np.array(table, np.float32)}
    arrays["used"] = np.zeros(len(table), np.int32)
    only = Case("only", arrays, {}, len(indices), {"out": ((len(indices),), "f32")})
    return Contract("lookup", 1, "any", LookupV1, golden, lambda: iter([only]), lambda rng: only, "Look up.", "None.")


def test_crash_of_a_mutant_counts_as_killed():
    def golden(a: Any, n: int) -> None:
        for r in range(n):
            a.out[r] = a.table[a.index[r]]
            a.used[a.index[r]] = 1

    # Index 1 of a table with one row: nothing differs, the golden raises IndexError.
    report = audit(lookup(golden, 0))
    assert report.killed["plus(index)"] == "only"
    # One row too many raises as well, but a kernel would not: this case cannot tell.
    assert "more-rows" in report.survivors


def test_warning_of_a_mutant_does_not_count():
    def golden(a: Any, n: int) -> None:
        for r in range(n):
            a.out[r] = min(1.0 / a.table[a.index[r]], 0.0)  # 0 for every table of positive numbers, and for zeros
            a.used[a.index[r]] = 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "zero(table)" in audit(lookup(golden, 0)).survivors


def test_fault_that_harms_an_input_is_seen():
    def golden(a: Any, n: int) -> None:
        a.out[:n] = a.table[a.index[:n]]
        a.used[:] = 1
        if a.table[0] == 0:
            a.index[0] = 9

    assert "zero(table)" in audit(lookup(golden, 0, table=(0.0, 1.0))).survivors
    # With a table that is not zero the outputs stay as they are; the harm to `index` is the only difference.
    assert audit(lookup(golden, 1, table=(3.0, 0.0))).killed["zero(table)"] == "only"


def test_misread_state_is_still_written_where_it_belongs():
    class CounterV1(Args):
        """Arguments of a counter that saturates."""

        limit: Any = tensor("B", "i32", "Largest count.")
        count: Any = tensor("B", "i32", "Counts.", access="inout")

    def golden(a: Any, n: int) -> None:
        for i in range(n):
            a.count[i] = min(a.count[i] + 1, a.limit[i])

    def contract(counts: list[int]) -> Contract:
        arrays = {"limit": np.array([4, 4, 4], np.int32), "count": np.array(counts, np.int32)}
        only = Case("only", arrays, {}, 2)
        return Contract("counter", 1, "seqs", CounterV1, golden, lambda: iter([only]), lambda rng: only, "Count.", "None.")

    # Saturated counters look the same when they are read one too high, below the launch length and beyond.
    assert "plus(count)" in audit(contract([4, 4, 2])).survivors
    assert "plus(count)" in audit(contract([4, 1, 2])).killed


class EverythingV1(Args):
    """One argument of every kind."""

    updates: Any = tensor("T 3", "i32", "Slot, position, token.")
    bits: Any = tensor("B", "u32", "Bits.")
    first: Any = tensor("B H", "act", "Floats.")
    second: Any = tensor("B H", "act", "Floats.")
    flags: Any = tensor("B", "i32", "Never < 0.")
    state: Any = tensor("B", "i32", "State.", access="inout")
    weight: Any = opaque("weight", "Weight.", shape="H")
    gain: Any = opaque("weight", "Weight.", shape="H", optional=True)
    cache: Any = opaque("cache", "Cache.", access="inout")
    meta: Any = opaque("meta", "Metadata.", optional=True)
    held: Any = columns("Slot columns.")
    left: Any = tensor("B", "i32", "Output.", access="out")
    right: Any = tensor("B", "i32", "Output.", access="out")
    size: int = param("Integer.")
    width: int = param("Integer.")
    eps: float = param("Float.")
    none: float = param("Float that is 0.")
    on: bool = param("Flag.")
    style: str = param('"half" or "full".')


EVERYTHING = Case(
    "one",
    {
        "updates": np.array([[1, 2, 3], [4, 5, 6]], np.int32), "bits": np.array([7, 2**32 - 1, 0], np.uint32),
        "first": np.ones((3, 2), np.float32), "second": np.full((3, 2), 2, np.float32),
        "flags": np.array([1, 2, 3], np.int32), "state": np.array([3, -1, 0], np.int32),
        "weight": np.ones(2, np.float32), "gain": None,
        "held": (np.array([7, 8, 9], np.int32), np.ones((3, 2), np.float32)),
        "cache": LogicalCache(np.ones((1, 1, 1, 2), np.float32), np.full((1, 1, 1, 2), 2, np.float32)),
    },
    {"size": 1, "width": 2, "eps": 0.5, "none": 0.0, "on": True, "style": "half"},
    2,
    {"left": ((3,), "i32"), "right": ((3,), "i32")},
)  # fmt: skip


def everything(golden: Any) -> Contract:
    return Contract("all", 1, "runs", EverythingV1, golden, lambda: iter([EVERYTHING]), lambda rng: EVERYTHING, "All.", "None.")


def test_mutants_follow_from_the_record():
    contract = everything(lambda a, n: None)
    assert [mutant.id for mutant in mutants(contract, [EVERYTHING])] == [
        "fewer-rows", "more-rows",
        "zero(updates)", "plus(updates)", "minus(updates)",
        "zero(updates[:,0])", "zero(updates[:,1])", "zero(updates[:,2])",
        "swap(updates[:,0],updates[:,1])", "swap(updates[:,1],updates[:,2])",
        "zero(bits)", "plus(bits)", "minus(bits)",
        "zero(first)", "zero(second)",
        "zero(flags)", "plus(flags)", "minus(flags)", "unpad(flags)",  # its description speaks of a sentinel
        "unwritten(state)", "zero(state)", "plus(state)", "minus(state)", "unpad(state)",  # a case holds one
        "zero(weight)", "zero(gain)", "absent(gain)",
        "unwritten(cache.k)", "zero(cache.k)", "unwritten(cache.v)", "zero(cache.v)",
        "unwritten(left)", "unwritten(right)",
        "unwritten(held[0])", "unwritten(held[1])", "misplaced(held)",
        "swap(first,second)", "swap(flags,state)", "swap(weight,gain)", "swap(cache.k,cache.v)", "swap(left,right)",
        "reverse(updates)", "reverse(bits)", "reverse(first)", "reverse(second)", "reverse(flags)", "reverse-all(B)",
        "plus(size)", "minus(size)", "swap(size,width)", "plus(width)", "minus(width)",
        "double(eps)", "half(eps)", "swap(eps,none)", "double(none)", "half(none)",
        "flip(on)", "flip(style=full)", "flip(style=half)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "argument", "seen"),
    [
        ("zero(updates)", "updates", [[0, 0, 0], [0, 0, 0]]),
        ("zero(updates[:,1])", "updates", [[1, 0, 3], [4, 0, 6]]),
        ("swap(updates[:,0],updates[:,1])", "updates", [[2, 1, 3], [5, 4, 6]]),
        ("swap(updates[:,1],updates[:,2])", "updates", [[1, 3, 2], [4, 6, 5]]),
        ("plus(bits)", "bits", [8, 0, 1]),
        ("minus(bits)", "bits", [6, 2**32 - 2, 2**32 - 1]),
        ("plus(state)", "state", [4, -1, 1]),
        ("minus(state)", "state", [2, -1, -1]),
        ("unpad(state)", "state", [3, 0, 0]),
        ("reverse(flags)", "flags", [2, 1, 3]),
        ("reverse-all(B)", "bits", [2**32 - 1, 7, 0]),
        ("reverse-all(B)", "flags", [2, 1, 3]),
        ("reverse-all(B)", "state", [3, -1, 0]),
        ("swap(first,second)", "first", [[2.0, 2.0]] * 3),
        ("swap(first,second)", "second", [[1.0, 1.0]] * 3),
        ("swap(cache.k,cache.v)", "cache.k", [[[[2.0, 2.0]]]]),
        ("swap(cache.k,cache.v)", "cache.v", [[[[1.0, 1.0]]]]),
        ("zero(cache.v)", "cache.k", [[[[1.0, 1.0]]]]),
        ("zero(cache.v)", "cache.v", [[[[0.0, 0.0]]]]),
        ("misplaced(held)", "held", [[[1.0, 1.0]] * 3, [7, 8, 9]]),
        ("zero(weight)", "weight", [0.0, 0.0]),
        ("swap(weight,gain)", "weight", None),
        ("absent(gain)", "gain", None),
        ("fewer-rows", "n", 1),
        ("more-rows", "n", 3),
        ("plus(size)", "size", 2),
        ("minus(size)", "size", 0),
        ("swap(size,width)", "size", 2),
        ("double(eps)", "eps", 1.0),
        ("half(eps)", "eps", 0.25),
        ("double(none)", "none", 1.0),
        ("half(none)", "none", -1.0),
        ("flip(on)", "on", False),
        ("flip(style=full)", "style", "full"),
    ],
)
def test_what_the_golden_of_a_mutant_sees(mutant: str, argument: str, seen: Any):
    views: list[Any] = []

    def golden(a: Any, n: int) -> None:
        name, _, half = argument.partition(".")
        value = n if name == "n" else getattr(getattr(a, name), half) if half else getattr(a, name)
        value = [column.tolist() for column in value] if isinstance(value, tuple) else value
        views.append(value.tolist() if isinstance(value, np.ndarray) else value)

    contract = everything(golden)
    run = {one.id: one.run for one in mutants(contract, [EVERYTHING])}[mutant]
    run(golden, namespace(contract, EVERYTHING), EVERYTHING.n)
    assert views == [seen]


def test_a_column_that_is_not_written_keeps_what_it_held():
    def golden(a: Any, n: int) -> None:
        for column in a.held:
            column[:n] = 3

    contract, found = everything(golden), []
    for mutant in mutants(contract, [EVERYTHING]):
        if mutant.id.startswith("unwritten(held"):
            a = namespace(contract, EVERYTHING)
            mutant.run(golden, a, EVERYTHING.n)
            found.append([column.tolist() for column in a.held])
    assert found == [[[7, 8, 9], [[3.0, 3.0], [3.0, 3.0], [1.0, 1.0]]], [[3, 3, 9], [[1.0, 1.0]] * 3]]


def test_no_rows_cannot_be_fewer():
    lengths: list[int] = []
    fewer = next(mutants(toy.CONTRACT, [WEAK]))
    fewer.run(lambda a, n: lengths.append(n), namespace(toy.CONTRACT, WEAK), 0)
    assert lengths == [0]


@pytest.mark.parametrize(
    ("read", "noted"),
    [
        (lambda x: x[1], True),
        (lambda x: x[1:], True),
        (list, True),
        (lambda x: x + 1, True),
        (lambda x: x.sum(), True),
        (lambda x: x.copy(), True),
        (lambda x: np.concatenate([x, x]), True),
        (lambda x: x.shape[0] + len(x), False),
        (lambda x: x.__setitem__(1, 7), False),
        (lambda x: x.__setitem__(slice(None), 7), False),
        (lambda x: x.fill(7), False),
    ],
)
def test_reads_are_told_from_writes(read: Callable[[Any], Any], noted: bool):
    true = np.array([4, 5, 6], np.int32)
    shown = Shown.of(true, np.array([0, 0, 0], np.int32))
    read(shown)
    assert shown.was_read is noted


def test_writes_reach_the_true_array():
    true = np.array([[4, 5], [6, 7]], np.int32)
    shown = Shown.of(true, np.zeros((2, 2), np.int32))
    shown[0, 1] += 1
    shown[1] = [8, 9]
    assert true.tolist() == [[4, 1], [8, 9]]
    assert np.asarray(shown).tolist() == [[0, 1], [8, 9]]
    copy = shown.copy()
    copy[0, 0] = 3
    assert true[0, 0] == 4


def test_writes_that_bypass_the_index_arrive_in_the_end():
    true = np.array([[4.0, 5.0], [6.0, 7.0], [8.0, 9.0], [np.nan, 1.0]])
    shown = Shown.of(true, np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [np.nan, np.nan]]))
    row = shown[0]
    row[1] = 3.0
    np.add(shown[1], 2.0, out=shown[1])
    shown[2] = 0.0  # what was shown there anyway, and yet written
    shown.settle()
    np.testing.assert_array_equal(true, [[4.0, 3.0], [2.0, 2.0], [0.0, 0.0], [np.nan, 1.0]])
    shown.fill(1.0)
    shown.settle()
    assert (true == 1.0).all()


def test_text_parameter_with_one_value_is_an_error():
    class StyleV1(Args):
        """A parameter that says nothing about its values."""

        style: str = param("How.")

    one = Case("one", {}, {"style": "half"}, 1)
    contract = Contract("s", 1, "any", StyleV1, lambda a, n: None, lambda: iter([one]), lambda rng: one, "S.", "None.")
    with pytest.raises(ContractError, match="s/1: parameter style has the values"):
        list(mutants(contract, [one]))
