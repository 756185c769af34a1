"""Graph policy: which step is replayed in which bucket, in what order buckets are captured, and how programs are split."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from polydraft.contracts.base import UNITS, Limits, Unit
from polydraft.program.columns import NOTHING
from polydraft.program.plan import StepPlan
from polydraft.program.program import Bound, Program, StepContext
from polydraft.step.graphs import LEAST_FREE, CapturedSteps, GraphPolicy, Held, Shape, default_buckets

LIMITS = Limits(
    max_seqs=16, num_drafts=3, max_rows=128, max_logit_rows=64, max_len=64, block_size=4, num_blocks=64, max_blocks=16,
    max_stop_tokens=2, vocab_size=10,
)  # fmt: skip


def plan(num_seqs: int, *, prefill_rows: int = 0) -> StepPlan:
    """`num_seqs` decoding sequences, and a prefill of `prefill_rows` rows if there are any."""
    decode = np.array([True] * num_seqs + [False] * bool(prefill_rows))
    slots = np.arange(len(decode), dtype=np.int32)
    values: dict[str, Any] = dict.fromkeys(StepPlan.__dataclass_fields__)
    values |= {
        "step_id": 1, "slots": slots, "rows": slots, "epochs": slots, "decode": decode, "emits": decode,
        "writes": NOTHING, "num_rows": num_seqs * 4 + prefill_rows,
        "num_logit_rows": num_seqs * 4, "window": 4, "num_drafts": 3, "drafting": True,
        "has_prefill": prefill_rows > 0, "sampling": False,
    }  # fmt: skip
    return StepPlan(**values)


def test_default_buckets_are_dense_where_it_matters_and_end_at_the_largest() -> None:
    assert default_buckets(1) == (1,)
    assert default_buckets(3) == (1, 2, 3)
    assert default_buckets(16) == (1, 2, 4, 8, 16)
    large = default_buckets(300)
    assert large[:6] == (1, 2, 4, 8, 16, 24)
    assert large[-2:] == (288, 300)
    assert list(large) == sorted(set(large))
    for size in range(8, 257):
        bucket = min(b for b in large if b >= size)
        assert bucket - size < max(8, size / 8)


@pytest.mark.parametrize(("seqs", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, None)])
def test_a_decode_step_takes_the_next_bucket_never_a_smaller_one(seqs: int, bucket: int | None) -> None:
    assert GraphPolicy("decode", (1, 2, 4, 8)).bucket(plan(seqs)) == bucket


def test_kinds_of_steps_that_are_not_replayed() -> None:
    decode, prefill = GraphPolicy("decode", (1, 2, 4)), GraphPolicy("prefill", (8, 32))
    assert decode.bucket(plan(2, prefill_rows=5)) is None
    assert decode.bucket(plan(0, prefill_rows=5)) is None
    assert prefill.bucket(plan(0, prefill_rows=5)) == 8
    assert prefill.bucket(plan(0, prefill_rows=33)) is None
    assert prefill.bucket(plan(1, prefill_rows=5)) is None
    assert GraphPolicy("off", ()).bucket(plan(1)) is None


def test_lengths_of_a_bucket_are_its_full_windows() -> None:
    """The number of drafts reaches the launch lengths: a bucket of b sequences launches b * (K + 1) rows."""
    by_unit = dict(zip(UNITS, GraphPolicy("decode", (4,)).lengths(4, LIMITS), strict=True))
    assert (by_unit["rows"], by_unit["logit_rows"], by_unit["seqs"]) == (16, 16, 4)
    by_unit = dict(zip(UNITS, GraphPolicy("prefill", (8,)).lengths(8, LIMITS), strict=True))
    assert (by_unit["rows"], by_unit["logit_rows"], by_unit["seqs"]) == (8, 8, 8)


@dataclass
class Log:
    """A device and capture double that writes down what happens, in order."""

    events: list[str] = field(default_factory=list)
    capturing: bool = False
    stream: object = None

    def synchronize(self) -> None:
        self.events.append("sync")

    def capture(self, stream: object, fn: Any) -> Log:
        del stream
        self.events.append("capture")
        self.capturing = True
        fn()
        self.capturing = False
        return self

    def replay(self, stream: object) -> None:
        del stream
        self.events.append("replay")

    def memory(self) -> int:
        return 0

    def program(self, *contracts: str, unit: Unit = "seqs") -> Program:
        def launch(name: str) -> Any:
            return lambda stream, n: self.events.append(f"{'+' if self.capturing else ''}{name}:{n}")

        entries = tuple(Bound(launch(name), UNITS.index(unit), name, "stage") for name in contracts)
        return Program("p", entries, tuple((e.launch, e.unit) for e in entries))


def steps(log: Log, policy: GraphPolicy, uncapturable: frozenset[str] = frozenset()) -> CapturedSteps:
    return CapturedSteps(log, log, policy, LIMITS, StepContext(), uncapturable)  # type: ignore[arg-type]


def greedy(parts: dict[Any, Program]) -> Any:
    """What is captured of an engine with one kind of step, which always makes the most drafts."""
    return {"greedy": {3: parts}}


def test_buckets_are_captured_largest_first_after_two_eager_runs() -> None:
    log = Log()
    told: list[tuple[str, int, int]] = []
    parts = {"target": log.program("a"), "draft": log.program("b")}
    steps(log, GraphPolicy("decode", (1, 2))).capture_all(greedy(parts), lambda *how_far: told.append(how_far))
    assert told == [("graphs", 0, 2), ("graphs", 1, 2), ("graphs", 2, 2)]
    one = ["a:{0}", "a:{0}", "sync", "capture", "+a:{0}", "b:{0}", "b:{0}", "sync", "capture", "+b:{0}"]
    assert log.events == [e.format(2) for e in one] + [e.format(1) for e in one]


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_a_backend_is_told_what_kind_of_step_it_captures(mode: Any) -> None:
    """A kernel that takes every slot's new rows for one window may be captured into a decode step alone."""
    log, seen = Log(), []
    captured = steps(log, GraphPolicy(mode, (2,)))
    program = log.program("a")
    look = lambda stream, n: seen.append(captured.context.has_prefill)  # noqa: E731
    captured.capture_all(greedy({"target": Program("p", program.entries, ((look, program.calls[0][1]),))}))
    assert set(seen) == {mode == "prefill"}
    assert not captured.context.has_prefill


def test_the_parts_of_a_whole_step_are_one_graph() -> None:
    log = Log()
    parts = {"target": log.program("a"), "draft": log.program("b")}
    captured = CapturedSteps(log, log, GraphPolicy("decode", (2,)), LIMITS, StepContext(), whole=True)  # type: ignore[arg-type]
    captured.capture_all(greedy(parts))
    assert log.events == ["a:2", "b:2"] * 2 + ["sync", "capture", "+a:2", "+b:2"]
    captured.replay("greedy", "step", Shape(2, 3))
    assert log.events[-1] == "replay"
    assert captured.counters.captured == 1


def test_what_cannot_be_captured_at_the_end_of_one_part_splits_a_whole_step_once() -> None:
    log = Log()
    parts = {"target": log.program("a", "meta"), "draft": log.program("meta", "b")}
    captured = steps(log, GraphPolicy("decode", (1,)), frozenset({"meta"}))
    captured.whole = True
    captured.capture_all(greedy(parts))
    log.events.clear()
    captured.replay("greedy", "step", Shape(1, 3))
    assert log.events == ["replay", "meta:1", "meta:1", "replay"]


def test_a_program_is_split_at_contracts_that_cannot_be_captured() -> None:
    log = Log()
    program = log.program("a", "meta", "b", "c", "meta", "d")
    captured = steps(log, GraphPolicy("decode", (2,)), frozenset({"meta"}))
    captured.capture_all(greedy({"target": program, "draft": log.program()}))
    log.events.clear()
    captured.replay("greedy", "target", Shape(2, 3))
    assert log.events == ["replay", "meta:2", "replay", "meta:2", "replay"]
    assert captured.counters.captured == 3


def test_a_graph_is_made_from_what_a_pass_has_joined() -> None:
    log = Log()
    program = replace(log.program("a", "b", "c"), captured=log.program("a", "b+c").entries)
    captured = steps(log, GraphPolicy("decode", (2,)))
    captured.capture_all(greedy({"target": program}))
    assert log.events == ["a:2", "b+c:2"] * 2 + ["sync", "capture", "+a:2", "+b+c:2"]


def test_what_computes_a_contract_that_cannot_be_captured_cannot_be_either() -> None:
    log = Log()
    captured = steps(log, GraphPolicy("decode", (2,)), frozenset({"c"}))
    captured.capture_all(greedy({"target": log.program("a", "b+c", "d")}))
    log.events.clear()
    captured.replay("greedy", "target", Shape(2, 3))
    assert log.events == ["replay", "b+c:2", "replay"]


def test_one_decision_a_step_is_counted() -> None:
    log = Log()
    captured = steps(log, GraphPolicy("decode", (1, 2)))
    captured.capture_all(greedy({"target": log.program("a")}))
    assert [captured.choose(plan(n)) for n in (1, 2, 3)] == [Shape(1, 3), Shape(2, 3), None]
    assert captured.choose(plan(1, prefill_rows=3)) is None
    counters = captured.counters
    assert (counters.replayed_steps, counters.eager_steps, counters.too_large) == (2, 2, 1)


# -- several numbers of drafts -------------------------------------------------------------------------
def rungs(log: Log, policy: GraphPolicy, *numbers: int) -> CapturedSteps:
    """Whole steps that verify and make these numbers of drafts, captured."""
    captured = steps(log, policy)
    captured.whole = True
    captured.capture_all(
        {"greedy": {k: {"target": log.program("t", unit="rows"), "draft": log.program(f"d{k}")} for k in numbers}}
    )
    return captured


def test_each_number_of_drafts_is_captured_with_the_windows_that_it_fills() -> None:
    log = Log()
    captured = rungs(log, GraphPolicy("decode", (2, 4)), 0, 3)
    assert [e for e in log.events if e.startswith("+")] == ["+t:16", "+d3:4", "+t:8", "+d3:2", "+t:4", "+d0:4", "+t:2", "+d0:2"]
    assert captured.held == {3: Held((2, 4), graphs=2), 0: Held((2, 4), graphs=2)}


@pytest.mark.parametrize(
    ("window", "num_drafts", "drafting", "shape"),
    [(1, 0, True, 0), (2, 1, True, 1), (4, 3, True, 3), (4, 0, True, 3), (1, 3, True, 3), (1, 2, True, 3), (4, 3, False, 0)],
)
def test_a_step_between_two_numbers_is_replayed_in_the_larger(window: int, num_drafts: int, drafting: bool, shape: int) -> None:
    captured = rungs(Log(), GraphPolicy("decode", (2,)), 0, 1, 3)
    step = replace(plan(1), window=window, num_drafts=num_drafts, drafting=drafting)
    assert captured.choose(step) == Shape(2, shape)


def test_fewer_drafts_than_the_most_have_a_budget() -> None:
    captured = rungs(Log(), GraphPolicy("decode", (1, 2, 4), most_captures=5), 0, 1, 3)
    assert captured.held == {3: Held((1, 2, 4), graphs=3), 1: Held((2, 4), left_out=(1,), graphs=2), 0: Held((), (1, 2, 4))}
    assert captured.counters.captured == 5
    asked = [(replace(plan(n), window=k + 1, num_drafts=k)) for n in (1, 2) for k in (0, 1, 3)]
    assert [captured.choose(step) for step in asked] == [(1, 3)] * 3 + [(2, 1), (2, 1), (2, 3)]
    none = rungs(Log(), GraphPolicy("decode", (1, 2), most_captures=0), 0, 3)
    assert none.held == {3: Held((1, 2), graphs=2), 0: Held(left_out=(1, 2))}, "those of the most are always there"


def test_graphs_for_fewer_drafts_leave_memory_to_others() -> None:
    class Telling(Log):
        free = LEAST_FREE + 24

        def free_memory(self) -> int:
            self.free -= 5
            return self.free

    captured = rungs(Telling(), GraphPolicy("decode", (1, 2)), 0, 3)
    assert captured.held == {3: Held((1, 2), graphs=2, num_bytes=10), 0: Held((), (1, 2))}
