"""The reference's queued device: nothing runs before somebody waits, and each mistake that a synchronous device hides shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polydraft import Engine, SamplingParams, reference
from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.residual_add import ResidualAddV1
from polydraft.errors import DeviceError, GraphBufferError
from polydraft.reference.queued import QueuedCapture, QueuedDevice, QueuedEvent
from polydraft.step.uploads import Uploads
from tests.support.runs import Ask, drive, engine, essence, solo

ASKS = [Ask((3, 1, 4, 1, 5), SamplingParams(max_new_tokens=16, ignore_eos=True), i) for i in range(3)]
LIMITS = Limits(1, 1, 8, 8, 16, 4, 4, 4, 1, 8)
POISON = np.int32(-0x5A5A5A5B)  # 0xA5 in every byte


def is_lossless(served_by: Engine) -> None:
    alone = [solo("deep", 2, ask.prompt_ids, ask.params) for ask in ASKS]
    outputs = drive(served_by, ASKS, limit=100)
    assert [essence(output) for output in outputs] == [essence(output) for output in alone]


def test_an_upload_reads_its_staging_when_it_runs() -> None:
    device = QueuedDevice()
    buffer, staging, event = device.empty("b", (4,), "i32"), device.staging("s", (4,), "i32"), device.event()
    assert (buffer.host_array == POISON).all()
    staging.array[:] = 1
    device.upload(device.stream, buffer, staging, 3)
    event.record(device.stream)
    staging.array[:] = 2
    event.synchronize()
    assert buffer.host_array.tolist() == [2, 2, 2, POISON]


def test_a_download_is_poison_until_it_has_run() -> None:
    device = QueuedDevice()
    buffer, staging, event = device.empty("b", (3,), "f32"), device.staging("s", (3,), "f32"), device.event()
    device.load(buffer, np.arange(3, dtype=np.float32))
    staging.array[:] = 7
    device.download(device.stream, staging, buffer, 2)
    event.record(device.stream)
    assert np.isnan(staging.array).all()
    event.synchronize()
    assert staging.array[:2].tolist() == [0, 1]
    assert np.isnan(staging.array[2])


def test_only_what_stands_before_an_event_runs() -> None:
    device, ran = QueuedDevice(), []
    first, second, never = device.event(), device.event(), device.event()
    assert never.query()
    device.enqueue(device.stream, lambda: ran.append(1))
    first.record(device.stream)
    device.enqueue(device.stream, lambda: ran.append(2))
    second.record(device.stream)
    assert (ran, first.query(), second.query()) == ([], False, False)
    first.synchronize()
    assert (ran, first.query(), second.query()) == ([1], True, False)
    first.record(device.stream)  # moves behind the second
    assert not first.query()
    first.synchronize()
    assert (ran, second.query()) == ([1, 2], True)
    assert device.counters.host_syncs == 2


def test_streams_are_ordered_by_events_alone() -> None:
    device, ran = QueuedDevice(), []
    copies, both, done = device.make_stream("copies"), device.event(), device.event()
    device.enqueue(device.stream, lambda: ran.append("compute"))
    both.record(device.stream)
    copies.wait(both)  # type: ignore[arg-type]
    device.enqueue(copies, lambda: ran.append("copy"))  # type: ignore[arg-type]
    done.record(copies)  # type: ignore[arg-type]
    device.enqueue(device.stream, lambda: ran.append("later"))
    done.synchronize()
    assert ran == ["compute", "copy"]
    device.synchronize()
    assert ran == ["compute", "copy", "later"]


def test_the_host_cannot_look_at_device_memory_while_work_is_outstanding() -> None:
    device = QueuedDevice()
    buffer, seen = device.empty("b", (2,), "i32"), []
    device.enqueue(device.stream, lambda: seen.append(buffer.host_array.shape))
    with pytest.raises(DeviceError, match="the host looked at device buffer b"):
        _ = buffer.host_array
    device.synchronize()
    assert (seen, buffer.host_array.shape) == ([(2,)], (2,))


def test_overlap_is_one_by_default_and_steps_return_before_they_have_run() -> None:
    lazy = engine("deep", device="lazy-1", draft_tokens=2)
    assert engine("deep", device="lazy-1", draft_tokens=2, overlap="auto").resolved.overlap == 1
    lazy.add(ASKS[0].prompt_ids, ASKS[0].params)
    lazy.step()
    assert isinstance(lazy.device, QueuedDevice)
    assert lazy.device.outstanding
    assert lazy.device.counters.host_syncs == 0
    is_lossless(engine("deep", device="lazy-1", draft_tokens=2))


def test_staging_rewritten_while_an_upload_waits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring one set too small, which no synchronous device would mind."""
    build: Any = Uploads.__init__
    monkeypatch.setattr(Uploads, "__init__", lambda self, *rest: build(self, *rest[:-1], rest[-1] - 1))
    is_lossless(engine("deep", device="reference", draft_tokens=2, overlap=1))
    lazy = engine("deep", device="lazy-1", draft_tokens=2)
    with pytest.raises((AssertionError, IndexError)):
        is_lossless(lazy)


def test_a_snapshot_read_before_its_event_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = engine("deep", device="lazy-1", draft_tokens=2)
    monkeypatch.setattr(QueuedEvent, "synchronize", lambda self: None)
    with pytest.raises(AssertionError, match="of a snapshot has slot -"):  # poison
        is_lossless(lazy)


# -- graphs --------------------------------------------------------------------------------------------
def adding(device: QueuedDevice) -> tuple[Any, Callable[[], None]]:
    """A buffer of ones, and a launch that adds ones to it."""
    x, y = device.empty("x", (1, 2), "f32"), device.empty("y", (1, 2), "f32")
    for buffer in (x, y):
        device.load(buffer, np.ones((1, 2), np.float32))
    provider = reference.polydraft_kernels(device).providers["residual_add"]
    launch = provider.bind(ResidualAddV1(x=x, y=y), LIMITS, None)
    return x, lambda: launch(device.stream, 1)


def test_a_capture_records_and_a_replay_is_queued() -> None:
    device = QueuedDevice()
    x, run = adding(device)
    graph = QueuedCapture(device).capture(device.stream, run)
    assert not device.outstanding
    graph.replay(device.stream)  # type: ignore[arg-type]
    graph.replay(device.stream)  # type: ignore[arg-type]
    assert device.outstanding
    device.synchronize()
    assert (x.host_array == 3).all()
    assert device.counters.graph_replays == 2


CALLS: dict[str, Callable[[QueuedDevice], object]] = {
    "device.synchronize": lambda device: device.synchronize(),
    "allocating late": lambda device: device.empty("late", (1,), "i32"),
    "event.record": lambda device: device.event().record(device.stream),
    "event.query": lambda device: device.event().query(),
    "event.synchronize": lambda device: device.event().synchronize(),
    "stream.wait": lambda device: device.stream.wait(device.event()),
    "a second capture": lambda device: QueuedCapture(device).capture(device.stream, lambda: None),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_capture_forbids(call: str) -> None:
    device = QueuedDevice()

    def enqueue() -> None:
        CALLS[call](device)

    with pytest.raises(DeviceError, match=f"{call} is not allowed while a graph is captured"):
        QueuedCapture(device).capture(device.stream, enqueue)
    device.synchronize()  # and goes on


def test_memory_that_has_moved_is_refused() -> None:
    device = QueuedDevice()
    x, run = adding(device)
    graph = QueuedCapture(device).capture(device.stream, run)
    device.move(x)
    with pytest.raises(GraphBufferError, match="x lies at another address"):
        graph.replay(device.stream)  # type: ignore[arg-type]
    device.synchronize()
    assert (x.host_array == 1).all()


def test_one_stream_is_captured() -> None:
    device = QueuedDevice()
    other = device.make_stream("other")
    with pytest.raises(DeviceError, match="another stream than the one that is captured"):
        QueuedCapture(device).capture(device.stream, lambda: device.enqueue(other, lambda: None))  # type: ignore[arg-type]


def test_what_a_launch_raises_is_raised_by_who_waits_and_voids_the_rest() -> None:
    device, ran = QueuedDevice(), []
    event = device.event()
    device.enqueue(device.stream, lambda: ran.append(1 // 0))
    device.enqueue(device.stream, lambda: ran.append(2))
    event.record(device.stream)
    with pytest.raises(DeviceError, match=r"failed \(ZeroDivisionError: .*\); every step in flight is void") as caught:
        event.synchronize()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not device.outstanding
    with pytest.raises(DeviceError, match="somebody waits for it"):
        event.synchronize()
    device.enqueue(device.stream, lambda: ran.append(3))
    device.synchronize()
    assert ran == [3]


def test_an_engine_replays_its_steps() -> None:
    captured = engine("deep", device="lazy-1", draft_tokens=2, graph="decode", graph_sizes=(1, 3), max_num_seqs=3)
    is_lossless(captured)
    assert captured.device.counters.graph_replays > 0
