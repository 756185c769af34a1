"""Steady state: a step of pure decode allocates nothing, uploads nothing, waits once, and is the same launches every time.

Blocks as long as the model make the steady state exact: no grant interrupts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.device import DeviceCounters
from polydraft.step.runner import Runner
from tests.support.depth import crossed
from tests.support.emulator import emulated
from tests.support.runs import DEVICES, come_to_rest, engine

SLOTS = 3
EMULATED = ("emulator-0", "emulator-1", "emulator-2")
"""The hostile device at every depth."""


def on(device: str, **options: Any) -> Engine:
    """An engine on one of `DEVICES` or `EMULATED`."""
    if device in EMULATED:
        return emulated(f"seed={SLOTS}&rows=prefill-first", "narrow", overlap=int(device[-1]), **options)
    return engine("narrow", device=device, **options)


def steady(device: str, *, num_drafts: int, temperature: float = 0.0, **options: Any) -> Engine:
    """An engine whose slots are all in the middle of a long text."""
    running = on(device, draft_tokens=num_drafts, max_num_seqs=SLOTS, block_size=96, **options)
    for i in range(SLOTS):
        running.add((i + 1, 5, 9), SamplingParams(max_new_tokens=90, ignore_eos=True, temperature=temperature, seed=i))
    for _ in range(6):
        running.step()
    assert running.slots.in_flight.sum() == SLOTS * running.resolved.overlap
    return running


def deltas(running: Engine, steps: int) -> Iterator[dict[str, int]]:
    """What each of the next steps asked of the device."""
    for _ in range(steps):
        before = running.device.counters.copy()
        assert running.step()
        after = running.device.counters
        names = (name for name in DeviceCounters.__dataclass_fields__ if name != "extra")
        yield {name: getattr(after, name) - getattr(before, name) for name in names}


@pytest.mark.parametrize(("device", "num_drafts", "temperature"), crossed(3, [*DEVICES, *EMULATED], [0, 3], [0.0, 1.0]))
def test_a_step_of_pure_decode(device: str, num_drafts: int, temperature: float) -> None:
    running = steady(device, num_drafts=num_drafts, temperature=temperature)
    asked = list(deltas(running, 12))
    assert all(step == asked[0] for step in asked), asked
    assert asked[0] == {
        "launches": asked[0]["launches"],
        "host_syncs": 1,
        "uploads": 0,
        "bytes_uploaded": 0,
        "downloads": 1,
        "bytes_downloaded": SLOTS * (8 + num_drafts + 1) * 4,
        "allocations": 0,
        "bytes_allocated": 0,
        "graph_replays": 0,
    }
    finish(running)


@pytest.mark.parametrize("device", EMULATED)
def test_a_replayed_step_of_pure_decode(device: str) -> None:
    """One graph and one copy: nothing else is asked of the device. Without overlap the copy stands between two graphs."""
    running = steady(device, num_drafts=3, graph="decode", graph_sizes=(SLOTS,))
    asked = list(deltas(running, 12))
    assert all(step == asked[0] for step in asked), asked
    graphs = 2 if running.resolved.overlap == 0 else 1
    wanted = {"graph_replays": graphs, "downloads": 1, "host_syncs": 1, "bytes_downloaded": SLOTS * (8 + 4) * 4}
    assert asked[0] == {**dict.fromkeys(asked[0], 0), **wanted}
    finish(running)


def finish(running: Engine) -> None:
    while running.has_work:
        running.step()
    assert len(running.poll()) == SLOTS
    come_to_rest(running)


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_launches_of_a_step_are_those_of_the_program(num_drafts: int) -> None:
    """One launch an entry: what `describe` lists is what runs, and a draft pass more is a fixed number of launches more."""
    running = steady("lazy-1", num_drafts=num_drafts)
    programs = running.runner.programs["greedy"]
    listed = len(programs["target"].describe()) + len(programs["draft"].describe())
    assert {step["launches"] for step in deltas(running, 5)} == {listed}
    assert (len(programs["draft"].describe()) == 0) == (num_drafts == 0)
    finish(running)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_grant_of_blocks_is_all_that_a_long_decode_uploads(num_drafts: int) -> None:
    running = engine("narrow", device="lazy-1", draft_tokens=num_drafts, max_num_seqs=1, block_size=4)
    running.add((1, 2, 3), SamplingParams(max_new_tokens=90, ignore_eos=True))
    for _ in range(4):
        running.step()
    while (running.slots.num_known < 60).all():
        before = running.ledger.num_free
        (asked,) = deltas(running, 1)
        granted = before - running.ledger.num_free
        # one run of five words, and its payload
        assert (asked["uploads"], asked["bytes_uploaded"]) == ((2, 4 * (5 + granted)) if granted else (0, 0))
        assert (asked["allocations"], asked["host_syncs"]) == (0, 1)


@pytest.mark.parametrize("device", [*DEVICES, *EMULATED])
def test_nothing_is_allocated_or_awaited_by_prefill_admission_or_an_end(device: str) -> None:
    """Not only in the steady state: behind construction the device never allocates, and a step never waits twice."""
    running = on(device, draft_tokens=2, max_num_seqs=2, block_size=3, max_batched_tokens=7)
    allocations = running.device.counters.allocations
    for i in range(5):
        running.add(tuple(range(1, 10 + i)), SamplingParams(max_new_tokens=5 + i))
    while running.has_work:
        before = running.device.counters.host_syncs
        running.step()
        assert running.device.counters.host_syncs - before <= 1
    assert len(running.poll()) == 5
    assert running.device.counters.allocations == allocations


@pytest.mark.parametrize("device", ["reference", "lazy-1"])
def test_no_hook_is_called_in_a_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer on the plugin manager raises, and so does every hook of the plugin that somebody looks up."""
    running = engine("narrow", device=device, draft_tokens=2, max_num_seqs=2)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a hook was called in a step: {args}")

    manager = running.plugins.manager
    undo = manager.add_hookcall_monitoring(refuse, lambda *args: None)
    for plugin in manager.get_plugins():
        for name in dir(plugin):
            if name.startswith("polydraft_"):
                monkeypatch.setattr(plugin, name, refuse)
    for i in range(4):
        running.add((i + 1, 2), SamplingParams(max_new_tokens=9, temperature=i % 2, seed=1))
    running.step()
    running.abort("request-3")
    while running.has_work:
        running.step()
    assert len(running.poll()) == 4
    with pytest.raises(AssertionError, match="a hook was called"):
        running.plugins.gather("polydraft_models")
    undo()


@pytest.mark.parametrize("device", ["lazy-1", *EMULATED])
def test_an_engine_with_allocations_in_a_step_would_fail(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Runner.launch

    def wasteful(self: Runner, plan: Any) -> Any:
        self.device.empty("temporary", (1,), "i32")
        self.device.synchronize()
        return launch(self, plan)

    running = steady(device, num_drafts=1)
    monkeypatch.setattr(Runner, "launch", wasteful)
    (asked,) = deltas(running, 1)
    assert (asked["allocations"], asked["host_syncs"]) == (1, 2)


@pytest.mark.parametrize("device", ["lazy-1", *EMULATED])
def test_a_second_wait_in_a_step_would_be_counted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any event, also of one that has been reached already."""
    launch = Runner.launch

    def impatient(self: Runner, plan: Any) -> Any:
        flight = launch(self, plan)
        flight.event.synchronize()
        return flight

    running = steady(device, num_drafts=1)
    monkeypatch.setattr(Runner, "launch", impatient)
    (asked,) = deltas(running, 1)
    assert asked["host_syncs"] == 2


def test_steady_means_that_the_very_same_plan_arrays_are_used_again() -> None:
    """Which is why nothing is uploaded: the launch order on the device is still the right one."""
    running = steady("reference", num_drafts=2)
    plans: list[Any] = []
    launch = running.runner.launch
    running.runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]  # type: ignore[method-assign, func-returns-value]
    for _ in range(4):
        running.step()
    assert all(plan.slots is plans[0].slots for plan in plans)
    assert [plan.step_id - plans[0].step_id for plan in plans] == [0, 1, 2, 3]
    assert all(np.array_equal(plan.slots, range(SLOTS)) for plan in plans)
