"""The way down: padding is written, only what is new is sent, and staging is not touched while a step may still read it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, SamplingParams
from polydraft.reference.queued import QueuedDevice
from polydraft.runtime.buffers import StepBuffers
from polydraft.runtime.plan import StepPlan
from polydraft.runtime.stage import Stage, StagingSet
from polydraft.sentinels import PAD_SLOT
from tests.support import tiny
from tests.support.host_loop import HostLoop, limits, request

LIMITS = limits()


@pytest.fixture
def device() -> QueuedDevice:
    return QueuedDevice()


@pytest.fixture
def buffers(device: QueuedDevice) -> Any:
    return StepBuffers.allocate(device, LIMITS, sampling=False)


def plan(step_id: int, slots: list[int], rows: list[int], **updates: Any) -> StepPlan:
    n, columns = len(slots), staged_columns()
    empty = {name: np.empty((0, width), np.int32) for name, width in columns.items()}
    return StepPlan(
        step_id=step_id, slots=np.array(slots, np.intp), rows=np.array(rows, np.int32), epochs=np.ones(n, np.int32),
        decode=np.ones(n, bool), emits=np.ones(n, bool), flights=np.ones((3, n), np.int64), num_rows=sum(rows),
        num_logit_rows=sum(rows), has_prefill=False, sampling=False, processed=bool(updates), **{**empty, **updates},
    )  # fmt: skip


def staged_columns() -> dict[str, int]:
    """Staged writes of a plan and the columns of each."""
    device = QueuedDevice()
    allocated: Any = StepBuffers.allocate(device, LIMITS, sampling=False)
    names = [f.name for f in dataclasses.fields(StepPlan) if f.name.endswith("_updates")]
    return {name: getattr(allocated, name).shape[1] for name in names}


def uploads(device: QueuedDevice) -> int:
    return device.counters.uploads


def test_launch_order_is_padded_to_its_whole_capacity(device: QueuedDevice, buffers: Any):
    stage = Stage(device, LIMITS, buffers, depth=1)
    stage.upload(device.stream, plan(1, [2, 0], [3, 5]))
    device.synchronize()
    assert buffers.slot_order.array.tolist() == [2, 0, PAD_SLOT]
    assert buffers.seq_rows.array.tolist() == [3, 5, 0]
    stage.upload(device.stream, plan(2, [1], [3]))
    device.synchronize()
    assert buffers.slot_order.array.tolist() == [1, PAD_SLOT, PAD_SLOT], "the tail of the longer order before it is gone"
    assert buffers.seq_rows.array.tolist() == [3, 0, 0]


def test_order_that_the_device_has_is_not_sent_again(device: QueuedDevice, buffers: Any):
    stage = Stage(device, LIMITS, buffers, depth=1)
    first = plan(1, [0, 1], [3, 3])
    stage.upload(device.stream, first)
    sent = uploads(device)
    stage.upload(device.stream, dataclasses.replace(first, step_id=2))
    assert uploads(device) == sent
    stage.upload(device.stream, plan(3, [0, 1], [3, 3]))
    assert uploads(device) == sent + 2, "equal is not the same: only the very same array is known to be down"


def test_staged_writes_are_sent_as_far_as_they_reach(device: QueuedDevice, buffers: Any):
    stage = Stage(device, LIMITS, buffers, depth=0)
    writes = {name: np.arange(2 * width, dtype=np.int32).reshape(2, width) for name, width in staged_columns().items()}
    before = device.counters.copy()
    stage.upload(device.stream, plan(1, [0], [3], **writes))
    device.synchronize()
    for name, values in writes.items():
        assert np.array_equal(getattr(buffers, name).array[:2], values), name
        assert (getattr(buffers, name).array[2:] != values[0, 1]).all(), name
    payload = sum(values.nbytes for values in writes.values()) + 2 * 4 * LIMITS.max_seqs
    assert device.counters.bytes_uploaded - before.bytes_uploaded == payload


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_staging_is_rewritten_only_after_as_many_steps_as_can_be_in_flight(device: QueuedDevice, buffers: Any, depth: int):
    """Nothing runs until it is waited for: each of `depth` + 1 steps must still find what was staged for it."""
    stage = Stage(device, LIMITS, buffers, depth=depth)
    seen: list[list[int]] = []
    for step in range(depth + 1):
        stage.upload(device.stream, plan(step, [step], [step + 1]))
        device.enqueue(device.stream, lambda: seen.append([*buffers.slot_order.array[:1], *buffers.seq_rows.array[:1]]))
    device.synchronize()
    assert seen == [[step, step + 1] for step in range(depth + 1)]


def test_one_step_more_would_have_been_too_many(device: QueuedDevice, buffers: Any):
    stage = Stage(device, LIMITS, buffers, depth=0)
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
    upload, collect = Stage.upload, llm.engine.runner.collect

    def noting_upload(stage: Stage, stream: Any, step: StepPlan) -> None:
        mine = stage._ring[step.step_id % len(stage._ring)]
        assert all(number in collected for number, other in enumerate(used, 1) if other is mine), "a set is still in use"
        used.append(mine)
        upload(stage, stream, step)

    def noting_collect(ticket: Any) -> Any:
        collected.append(ticket.plan.step_id)
        return collect(ticket)

    monkeypatch.setattr(Stage, "upload", noting_upload)
    monkeypatch.setattr(llm.engine.runner, "collect", noting_collect)
    llm.generate([[3, 5], [7], [9, 2, 4]], SamplingParams(max_new_tokens=12))
    assert len({id(one) for one in used}) == depth + 1
    assert collected == list(range(1, len(used) + 1))
    assert len(used) > 3 * (depth + 1)


def test_every_plan_of_a_run_fits_its_staging(device: QueuedDevice, buffers: Any):
    capacities = limits(num_blocks=11)
    allocated: Any = StepBuffers.allocate(device, capacities, sampling=False)
    loop = HostLoop(capacities, depth=1)
    loop.add(*[request(n, prompt=14 + n, new=20 - n) for n in range(5)])
    loop.run()
    for one in loop.plans:
        for name in staged_columns():
            values, buffer = getattr(one, name), getattr(allocated, name)
            assert values.dtype == np.int32
            assert len(values) <= buffer.shape[0]
            assert values.shape[1] == buffer.shape[1]


def test_staging_has_the_shapes_of_what_it_feeds(device: QueuedDevice, buffers: Any):
    staging = StagingSet.allocate(device, LIMITS, buffers, 0)
    for field in dataclasses.fields(StagingSet):
        assert getattr(staging, field.name).array.shape == getattr(buffers, field.name).shape, field.name


def test_cleared_order_is_sent_again(device: QueuedDevice, buffers: Any):
    stage = Stage(device, LIMITS, buffers, depth=1)
    first = plan(1, [0, 1], [3, 3])
    stage.upload(device.stream, first)
    stage.clear(device.stream)
    assert buffers.slot_order.array.tolist() == [PAD_SLOT] * 3
    assert buffers.seq_rows.array.tolist() == [0] * 3
    stage.upload(device.stream, dataclasses.replace(first, step_id=2))
    device.synchronize()
    assert buffers.slot_order.array.tolist() == [0, 1, PAD_SLOT]
