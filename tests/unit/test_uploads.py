"""The way down: padding is written, only what is new is sent, and staging is not touched while a step may still read it."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, SamplingParams
from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.scatter import Run
from polydraft.program.columns import NOTHING, Writes, max_payload, max_runs
from polydraft.program.declare import StepBuffer
from polydraft.program.plan import StepPlan
from polydraft.program.program import Memory
from polydraft.reference.queued import QueuedDevice
from polydraft.sentinels import PAD_SLOT
from polydraft.step.uploads import StagingSet, Uploads
from tests.support import tiny
from tests.support.host_loop import COLUMNS, HostLoop, limits, request
from tests.support.slot_columns import SlotColumns

LIMITS = limits()


@pytest.fixture
def device() -> QueuedDevice:
    return QueuedDevice()


@pytest.fixture
def buffers(device: QueuedDevice) -> Any:
    return allocated(device, LIMITS)


def allocated(device: QueuedDevice, capacities: Limits) -> Any:
    """The buffers that staging feeds, as the runner allocates them."""
    memory = Memory(device, capacities, "f32")
    runs, payload = f"{max_runs(COLUMNS, capacities)} 5", f"{max_payload(COLUMNS, capacities)}"
    shapes = {"slot_order": "B", "seq_rows": "B", "runs": runs, "payload": payload}
    memory.allocate(StepBuffer(name, shape) for name, shape in shapes.items())
    return SimpleNamespace(**memory.buffers)


def plan(step_id: int, slots: list[int], rows: list[int], writes: Writes = NOTHING) -> StepPlan:
    n = len(slots)
    return StepPlan(
        step_id=step_id, slots=np.array(slots, np.intp), rows=np.array(rows, np.int32), epochs=np.ones(n, np.int32),
        decode=np.ones(n, bool), emits=np.ones(n, bool), in_flight_counts=np.ones((4, n), np.int64), num_rows=sum(rows),
        num_logit_rows=sum(rows), window=4, num_drafts=3, has_prefill=False, sampling=False, writes=writes,
    )  # fmt: skip


def uploads(device: QueuedDevice) -> int:
    return device.counters.uploads


def test_launch_order_is_padded_to_its_whole_capacity(device: QueuedDevice, buffers: Any):
    stage = Uploads(device, vars(buffers), depth=1)
    stage.upload(device.stream, plan(1, [2, 0], [3, 5]))
    device.synchronize()
    assert buffers.slot_order.array.tolist() == [2, 0, PAD_SLOT]
    assert buffers.seq_rows.array.tolist() == [3, 5, 0]
    stage.upload(device.stream, plan(2, [1], [3]))
    device.synchronize()
    assert buffers.slot_order.array.tolist() == [1, PAD_SLOT, PAD_SLOT], "the tail of the longer order before it is gone"
    assert buffers.seq_rows.array.tolist() == [3, 0, 0]


def test_order_that_the_device_has_is_not_sent_again(device: QueuedDevice, buffers: Any):
    stage = Uploads(device, vars(buffers), depth=1)
    first = plan(1, [0, 1], [3, 3])
    stage.upload(device.stream, first)
    sent = uploads(device)
    stage.upload(device.stream, dataclasses.replace(first, step_id=2))
    assert uploads(device) == sent
    stage.upload(device.stream, plan(3, [0, 1], [3, 3]))
    assert uploads(device) == sent + 2, "equal is not the same: only the very same array is known to be down"


def test_staged_writes_are_sent_as_far_as_they_reach(device: QueuedDevice, buffers: Any):
    stage = Uploads(device, vars(buffers), depth=0)
    runs, payload = np.arange(1, 11, dtype=np.int32).reshape(2, 5), np.arange(100, 107, dtype=np.int32)
    before = device.counters.copy()
    stage.upload(device.stream, plan(1, [0], [3], Writes(runs, payload, admits=True)))
    device.synchronize()
    assert np.array_equal(buffers.runs.array[:2], runs)
    assert np.array_equal(buffers.payload.array[:7], payload)
    assert not np.isin(buffers.runs.array[2:], runs).any()
    assert not np.isin(buffers.payload.array[7:], payload).any()
    assert device.counters.bytes_uploaded - before.bytes_uploaded == runs.nbytes + payload.nbytes + 2 * 4 * LIMITS.max_seqs
    sent = uploads(device)
    stage.upload(device.stream, plan(2, [0], [3]))
    assert uploads(device) == sent + 2, "nothing but the launch order"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_staging_is_rewritten_only_after_as_many_steps_as_can_be_in_flight(device: QueuedDevice, buffers: Any, depth: int):
    """Nothing runs until it is waited for: each of `depth` + 1 steps must still find what was staged for it."""
    stage = Uploads(device, vars(buffers), depth=depth)
    seen: list[list[int]] = []
    for step in range(depth + 1):
        stage.upload(device.stream, plan(step, [step], [step + 1]))
        device.enqueue(device.stream, lambda: seen.append([*buffers.slot_order.array[:1], *buffers.seq_rows.array[:1]]))
    device.synchronize()
    assert seen == [[step, step + 1] for step in range(depth + 1)]


def test_one_step_more_would_have_been_too_many(device: QueuedDevice, buffers: Any):
    stage = Uploads(device, vars(buffers), depth=0)
    seen: list[int] = []
    for step in range(2):
        stage.upload(device.stream, plan(step, [step], [1]))
        device.enqueue(device.stream, lambda: seen.append(int(buffers.slot_order.array[0])))
    device.synchronize()
    assert seen == [1, 1], "this device would not notice staging that is rewritten too early"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_engine_collects_a_step_before_its_staging_is_used_again(monkeypatch: pytest.MonkeyPatch, depth: int):
    queued: dict[str, Any] = {"backend": "reference", "device": "queued", "graph": "off"}
    llm = LLM(model=str(tiny.checkpoint("narrow")), **queued, overlap=depth, max_num_seqs=2)
    used: list[StagingSet] = []
    collected: list[int] = []
    upload, collect = Uploads.upload, llm.engine.runner.collect

    def noting_upload(stage: Uploads, stream: Any, step: StepPlan) -> None:
        mine = stage._ring[step.step_id % len(stage._ring)]
        assert all(number in collected for number, other in enumerate(used, 1) if other is mine), "a set is still in use"
        used.append(mine)
        upload(stage, stream, step)

    def noting_collect(flight: Any) -> Any:
        collected.append(flight.plan.step_id)
        return collect(flight)

    monkeypatch.setattr(Uploads, "upload", noting_upload)
    monkeypatch.setattr(llm.engine.runner, "collect", noting_collect)
    llm.generate([[3, 5], [7], [9, 2, 4]], SamplingParams(max_new_tokens=12))
    assert len({id(one) for one in used}) == depth + 1
    assert collected == list(range(1, len(used) + 1))
    assert len(used) > 3 * (depth + 1)


def test_every_plan_of_a_run_fits_its_staging(device: QueuedDevice):
    capacities = limits(num_blocks=11)
    buffers = allocated(device, capacities)
    loop = HostLoop(capacities, depth=1)
    loop.add(*[request(n, prompt=14 + n, new=20 - n) for n in range(5)])
    loop.run()
    assert {plan.writes.admits for plan in loop.plans if plan.writes} == {True, False}
    held = SlotColumns(COLUMNS, capacities)
    for one in loop.plans:
        runs, payload = one.writes.runs, one.writes.payload
        assert runs.dtype == np.int32
        assert payload.dtype == np.int32
        assert (runs.ndim, runs.shape[1], payload.ndim) == (2, len(Run), 1)
        assert len(runs) <= buffers.runs.shape[0]
        assert len(payload) <= buffers.payload.shape[0]
        held.write(one.writes)  # which checks that each run lies within its column


def test_the_number_of_a_step_goes_with_what_is_sent_alone(device: QueuedDevice):
    """From memory that a step in flight does not read."""
    memory = Memory(device, LIMITS, "f32")
    memory.allocate([StepBuffer("step", "1", initial=0)])
    buffers = {**vars(allocated(device, LIMITS)), "step": memory.buffers["step"]}
    stage = Uploads(device, buffers, depth=1)
    seen, first, other = list[int](), plan(5, [0, 1], [3, 3]), plan((1 << 31) + 8, [0, 1], [3, 3])
    writes = Writes(np.arange(1, 6, dtype=np.int32).reshape(1, 5), np.arange(2, dtype=np.int32))
    for two in (first, first.again(6, NOTHING, 1)), (first.again(7, writes, 3), other), (other.again(9, NOTHING, 3),):
        for step in two:
            stage.upload(device.stream, step)
            device.enqueue(device.stream, lambda: seen.append(int(buffers["step"].array[0])))
        device.synchronize()
    assert seen == [5, 5, 7, 8, 8]


def test_staging_has_the_shapes_of_what_it_feeds(device: QueuedDevice, buffers: Any):
    for staging in Uploads(device, vars(buffers), depth=1)._ring:
        assert set(staging._fields) == {"slot_order", "seq_rows", "runs", "payload"}
        for name in staging._fields:
            assert getattr(staging, name).array.shape == getattr(buffers, name).shape, name


def test_cleared_order_is_sent_again(device: QueuedDevice, buffers: Any):
    stage = Uploads(device, vars(buffers), depth=1)
    first = plan(1, [0, 1], [3, 3])
    stage.upload(device.stream, first)
    stage.clear(device.stream)
    assert buffers.slot_order.array.tolist() == [PAD_SLOT] * 3
    assert buffers.seq_rows.array.tolist() == [0] * 3
    stage.upload(device.stream, dataclasses.replace(first, step_id=2))
    device.synchronize()
    assert buffers.slot_order.array.tolist() == [0, 1, PAD_SLOT]
