"""The soak: what it serves, and that it notices what it is there to notice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import soak
from polydraft import Engine
from polydraft.host.kv_blocks import BlockLedger
from polydraft.output.request_output import RequestOutput
from tests.support.runs import engine

TURNS = 160


def turns() -> Callable[[], float]:
    """A clock that counts how often it is looked at: as many steps on any machine."""
    count = itertools.count()
    return lambda: float(next(count))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """On the reference's queued device, with room for few."""
    monkeypatch.setattr(soak, "PROMPTS", 6)
    ways: tuple[dict[str, float], ...] = ({}, {"temperature": 0.8, "top_p": 0.9}, {"logprobs": 1})
    monkeypatch.setattr(soak, "WAYS", ways)
    running = engine("narrow", device="lazy-1", draft_tokens=3, max_num_seqs=4, num_blocks=14, max_model_len=96, logprobs=1)
    monkeypatch.setattr(soak, "prompts", lambda served_by: [[i + 1, 5, 9, *range(1, 2 + i)] for i in range(6)])
    yield running
    running.close()


def test_a_sound_engine_has_no_problem(served: Engine) -> None:
    watch = soak.soak(served, TURNS, exact=True, clock=turns())
    watch.problems = [problem for problem in watch.problems if "memory" not in problem]
    assert watch.problems == []
    assert watch.counts["requests"] == watch.counts["length"] + watch.counts["abort"] + watch.counts["stop"]
    assert min(watch.counts[name] for name in ("steps", "requests", "tokens", "accepted", "compared")) > 5
    found = soak.row(served, watch, TURNS)
    assert (found["backend"], found["problems"], found["requests"]) == ("reference", [], watch.counts["requests"])


def test_blocks_that_stay_away_are_seen(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockLedger.release

    def keeps_one(self: BlockLedger, slot: int) -> None:
        release(self, slot)
        self._num_free -= self._num_free == self.num_blocks

    monkeypatch.setattr(BlockLedger, "release", keeps_one)
    with pytest.raises(AssertionError, match="block"):
        soak.soak(served, TURNS, exact=True, clock=turns())


def test_a_text_that_changes_is_seen(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ended = [0], soak.ended

    def other(running: Engine) -> Iterator[RequestOutput]:
        for output in ended(running):
            found[0] += 1
            object.__setattr__(output, "token_ids", (found[0] % 7, *output.token_ids[1:]))
            yield output

    monkeypatch.setattr(soak, "ended", other)
    watch = soak.soak(served, TURNS, exact=True, clock=turns())
    assert any("had another text before" in problem for problem in watch.problems)
    assert watch.counts["other texts"] > 0


def test_requests_that_fail_are_seen() -> None:
    watch, output = soak.Watch(), RequestOutput("r", (1,), (2,), "", "", (), (), (), 0, True, "error", "the device was lost")
    soak._judge(watch, output, (0, 0), exact=False)
    assert watch.problems == ["r: the device was lost"]


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([100] * 40, []),
        ([50] * 10 + [100] * 30, []),
        ([100] * 30 + [102] * 10, ["host memory grew from 100 to 102 bytes"]),
        ([100, 100], ["the run was too short to judge memory"]),
    ],
)
def test_memory_has_to_be_flat_behind_the_warm_up(held: list[int], said: list[str]) -> None:
    watch = soak.Watch(memory=[{"host": value, "device": 7} for value in held])
    watch.judge_memory()
    assert watch.problems == said


def test_a_result_keeps_one_row_for_each_backend_and_arithmetic(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    for backend, invariant, seconds in (("cpu", True, 1), ("cuda", True, 2), ("cpu", False, 3), ("cpu", True, 4)):
        soak.save(path, {"backend": backend, "dtype": "f32", "invariant": invariant, "seconds": seconds})
    rows = json.loads(path.read_text())["rows"]
    assert [(row["backend"], row["seconds"]) for row in rows] == [("cuda", 2), ("cpu", 3), ("cpu", 4)]
