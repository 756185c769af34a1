"""What an engine asks of its device, exactly: building it, a step of pure decode, and one scripted run, as `counters.json` says.

Whoever changes a number on purpose writes the file anew and says why in the change:

    python -m tests.step.test_counters > tests/step/counters.json
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polydraft import Engine, SamplingParams
from polydraft.device import DeviceCounters
from polydraft.program.plan import StepPlan
from polydraft.step.runner import InFlightStep, Runner
from tests.support.runs import engine

COMMITTED = Path(__file__).with_name("counters.json")
COUNTED = tuple(f.name for f in dataclasses.fields(DeviceCounters) if f.name != "extra")
KINDS = [(rule, num_drafts) for rule in ("greedy", "sampling") for num_drafts in (0, 3)]
WARM_UP, STEPS = 6, 8


def asked(running: Engine, before: DeviceCounters) -> dict[str, int]:
    """What was asked of the device since `before`."""
    after = running.device.counters
    return {name: getattr(after, name) - getattr(before, name) for name in COUNTED}


def params(rule: str, seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.9 if rule == "sampling" else 0.0, seed=seed, ignore_eos=True, **options)


def steady_step(rule: str, num_drafts: int) -> tuple[dict[str, int], dict[str, int]]:
    """Building an engine for three slots, and one step in which all of them decode and no block is granted."""
    running = engine("narrow", draft_tokens=num_drafts, max_num_seqs=3, block_size=96)
    built = asked(running, DeviceCounters())
    for i in range(3):
        running.add((i + 1, 5, 9), params(rule, i, max_new_tokens=90))
    for _ in range(WARM_UP):
        running.step()
    steps = []
    for _ in range(STEPS):
        before = running.device.counters.copy()
        running.step()
        steps.append(asked(running, before))
    assert all(step == steps[0] for step in steps), "a step of pure decode is like any other"
    return built, steps[0]


def whole_run(rule: str, num_drafts: int) -> dict[str, int]:
    """Five requests on two slots: prompts in chunks, one that waits, one that arrives late, one that is aborted, a shared
    beginning, blocks granted on the way, and the ends of all."""
    running = engine("narrow", draft_tokens=num_drafts, max_num_seqs=2, block_size=4, max_batched_tokens=12)
    before = running.device.counters.copy()
    for i, length in enumerate((3, 21, 9)):
        running.add(tuple(range(1, length + 1)), params(rule, i, max_new_tokens=12 + i))
    steps = 0
    while running.has_work:
        running.step()
        running.poll()
        steps += 1
        if steps == 4:
            running.add(tuple(range(1, 14)), params(rule, 3, max_new_tokens=7), id="late")
            running.add((7, 7, 7), params(rule, 4, max_new_tokens=30), id="aborted")
        if "aborted" in running.requests and running.requests["aborted"].slot >= 0 and "late" not in running.requests:
            running.abort("aborted")
    assert not running.requests, "every request has ended"
    return {"steps": running.totals.steps, **asked(running, before)}


def counters(rule: str, num_drafts: int) -> dict[str, dict[str, int]]:
    built, step = steady_step(rule, num_drafts)
    return {"construction": built, "steady step": step, "whole run": whole_run(rule, num_drafts)}


def name(rule: str, num_drafts: int) -> str:
    return f"{rule}, K = {num_drafts}"


@pytest.mark.parametrize(("rule", "num_drafts"), KINDS)
def test_counters_are_the_committed_ones(rule: str, num_drafts: int) -> None:
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))[name(rule, num_drafts)]
    assert counters(rule, num_drafts) == committed, "see the module's first lines"


def test_the_file_has_no_more() -> None:
    assert set(json.loads(COMMITTED.read_text(encoding="utf-8"))) == {name(*kind) for kind in KINDS}


def test_the_numbers_say_what_they_must() -> None:
    """Whatever they are: one wait, one copy back and no allocation a step, and drafts cost launches alone."""
    for kind, parts in json.loads(COMMITTED.read_text(encoding="utf-8")).items():
        step, run = parts["steady step"], parts["whole run"]
        assert (step["host_syncs"], step["downloads"], step["uploads"], step["allocations"]) == (1, 1, 0, 0), kind
        assert (run["host_syncs"], run["allocations"]) == (run["steps"], 0), kind
        assert parts["construction"]["launches"] == 0, kind


# -- these tests can fail --------------------------------------------------------------------------
def launch_twice(runner: Runner) -> None:
    """The first launch of the target's program, which packs rows, once more for no row."""
    call, _ = runner.programs["greedy"]["target"].calls[0]
    call(runner.device.stream, 0)


WASTES: dict[str, tuple[Callable[[Runner], object], set[str]]] = {
    "a launch": (launch_twice, {"launches"}),
    "a wait": (lambda runner: runner.device.synchronize(), {"host_syncs"}),
    "a copy": (
        lambda runner: runner.device.upload(
            runner.device.stream, runner.memory.buffers["slot_order"], runner.uploads._ring[0].slot_order, 3
        ),
        {"uploads", "bytes_uploaded"},
    ),
    "an allocation": (lambda runner: runner.device.empty("temporary", (2,), "i32"), {"allocations", "bytes_allocated"}),
}
"""What a step might do too much, and the counters that tell."""


@pytest.mark.parametrize("waste", WASTES)
def test_one_too_many_shows(waste: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, (extra, told) = Runner.launch, WASTES[waste]

    def wasteful(self: Runner, plan: StepPlan) -> InFlightStep:
        extra(self)
        return launch(self, plan)

    monkeypatch.setattr(Runner, "launch", wasteful)
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))[name("greedy", 0)]["steady step"]
    _, step = steady_step("greedy", 0)
    assert {counter for counter in COUNTED if step[counter] != committed[counter]} == told


if __name__ == "__main__":
    print(json.dumps({name(*kind): counters(*kind) for kind in KINDS}, indent=1))  # noqa: T201  the file itself
