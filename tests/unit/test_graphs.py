"""Graph policy: which step is replayed in which bucket, in what order buckets are captured, and how programs are split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from polydraft.contracts.base import UNITS, Limits
from polydraft.runtime.graphs import CapturedSteps, GraphPolicy, default_buckets
from polydraft.runtime.plan import StepPlan
from polydraft.runtime.program import Bound, Program, StepContext

LIMITS = Limits(
    max_seqs=16, num_drafts=3, max_rows=128, max_logit_rows=64, max_len=64, block_size=4, num_blocks=64, max_blocks=16,
    max_stop_tokens=2, vocab_size=10,
)  # fmt: skip
EMPTY = np.empty((0, 3), np.int32)


def plan(num_seqs: int, *, prefill_rows: int = 0) -> StepPlan:
    """`num_seqs` decoding sequences, and a prefill of `prefill_rows` rows if there are any."""
    decode = np.array([True] * num_seqs + [False] * bool(prefill_rows))
    slots = np.arange(len(decode), dtype=np.int32)
    values: dict[str, Any] = dict.fromkeys(StepPlan.__dataclass_fields__)
    values |= {
        "step_id": 1, "slots": slots, "rows": slots, "epochs": slots, "decode": decode, "emits": decode,
        "slot_updates": EMPTY, "token_updates": EMPTY, "block_updates": EMPTY, "num_rows": num_seqs * 4 + prefill_rows,
        "num_logit_rows": num_seqs * 4, "has_prefill": prefill_rows > 0, "sampling": False, "version": 1,
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

    def program(self, *contracts: str) -> Program:
        def launch(name: str) -> Any:
            return lambda stream, n: self.events.append(f"{'+' if self.capturing else ''}{name}:{n}")

        entries = tuple(Bound(launch(name), UNITS.index("seqs"), name, "room") for name in contracts)
        return Program("p", entries, tuple((e.launch, e.unit) for e in entries))


def steps(log: Log, policy: GraphPolicy, uncapturable: frozenset[str] = frozenset()) -> CapturedSteps:
    return CapturedSteps(log, log, policy, LIMITS, StepContext(), uncapturable)  # type: ignore[arg-type]


def test_buckets_are_captured_largest_first_after_two_eager_runs() -> None:
    log = Log()
    steps(log, GraphPolicy("decode", (1, 2))).capture_all({"greedy": {"target": log.program("a"), "draft": log.program("b")}})
    one = ["a:{0}", "a:{0}", "sync", "capture", "+a:{0}", "b:{0}", "b:{0}", "sync", "capture", "+b:{0}"]
    assert log.events == [e.format(2) for e in one] + [e.format(1) for e in one]


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_a_backend_is_told_what_kind_of_step_it_captures(mode: Any) -> None:
    """A kernel that takes every slot's new rows for one window may be captured into a decode step alone."""
    log, seen = Log(), []
    captured = steps(log, GraphPolicy(mode, (2,)))
    program = log.program("a")
    look = lambda stream, n: seen.append((captured.context.use_graph, captured.context.has_prefill))  # noqa: E731
    captured.capture_all({"greedy": {"target": Program("p", program.entries, ((look, program.calls[0][1]),))}})
    assert set(seen) == {(True, mode == "prefill")}
    assert (captured.context.use_graph, captured.context.has_prefill) == (False, False)


def test_the_parts_of_a_whole_step_are_one_graph_but_for_its_updates() -> None:
    log = Log()
    parts = {"update": log.program("u"), "target": log.program("a"), "draft": log.program("b")}
    captured = CapturedSteps(log, log, GraphPolicy("decode", (2,)), LIMITS, StepContext(), whole=True)  # type: ignore[arg-type]
    captured.capture_all({"greedy": parts})  # type: ignore[dict-item]
    assert log.events == ["a:2", "b:2"] * 2 + ["sync", "capture", "+a:2", "+b:2"]
    captured.replay("greedy", "step", 2)
    assert log.events[-1] == "replay"
    assert captured.counters.captured == 1


def test_what_cannot_be_captured_at_the_end_of_one_part_splits_a_whole_step_once() -> None:
    log = Log()
    parts = {"target": log.program("a", "meta"), "draft": log.program("meta", "b")}
    captured = steps(log, GraphPolicy("decode", (1,)), frozenset({"meta"}))
    captured.whole = True
    captured.capture_all({"greedy": parts})  # type: ignore[dict-item]
    log.events.clear()
    captured.replay("greedy", "step", 1)
    assert log.events == ["replay", "meta:1", "meta:1", "replay"]


def test_a_program_is_split_at_contracts_that_cannot_be_captured() -> None:
    log = Log()
    program = log.program("a", "meta", "b", "c", "meta", "d")
    captured = steps(log, GraphPolicy("decode", (2,)), frozenset({"meta"}))
    captured.capture_all({"greedy": {"target": program, "draft": log.program()}})
    log.events.clear()
    captured.replay("greedy", "target", 2)
    assert log.events == ["replay", "meta:2", "replay", "meta:2", "replay"]
    assert captured.counters.captured == 3


def test_one_decision_a_step_is_counted() -> None:
    captured = steps(Log(), GraphPolicy("decode", (1, 2)))
    assert [captured.choose(plan(n)) for n in (1, 2, 3)] == [1, 2, None]
    assert captured.choose(plan(1, prefill_rows=3)) is None
    counters = captured.counters
    assert (counters.replayed_steps, counters.eager_steps, counters.too_large) == (2, 2, 1)
