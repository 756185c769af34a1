"""The lazy device itself: nothing runs before somebody waits, and each mistake that a synchronous device hides shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.errors import DeviceError
from polydraft.runtime.stage import Stage
from tests.support.lazy_device import LazyDevice, LazyEvent
from tests.support.runs import Ask, drive, engine, essence, solo

ASKS = [Ask((3, 1, 4, 1, 5), SamplingParams(max_new_tokens=16, ignore_eos=True), i) for i in range(3)]
POISON = np.int32(-0x5A5A5A5B)  # 0xA5 in every byte


def is_lossless(served_by: Engine) -> None:
    alone = [solo("deep", 2, ask.prompt_ids, ask.params) for ask in ASKS]
    outputs = drive(served_by, ASKS, limit=100)
    assert [essence(output) for output in outputs] == [essence(output) for output in alone]


def test_an_upload_reads_its_staging_when_it_runs() -> None:
    device = LazyDevice()
    buffer, staging, event = device.empty("b", (4,), "i32"), device.staging("s", (4,), "i32"), device.event()
    assert (buffer.host_array == POISON).all()
    staging.array[:] = 1
    device.upload(device.stream, buffer, staging, 3)
    event.record(device.stream)
    staging.array[:] = 2
    event.synchronize()
    assert buffer.host_array.tolist() == [2, 2, 2, POISON]


def test_a_download_is_poison_until_it_has_run() -> None:
    device = LazyDevice()
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
    device, ran = LazyDevice(), []
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
    device, ran = LazyDevice(), []
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
    device = LazyDevice()
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
    assert isinstance(lazy.device, LazyDevice)
    assert lazy.device.outstanding
    assert lazy.device.counters.host_syncs == 0
    is_lossless(engine("deep", device="lazy-1", draft_tokens=2))


def test_staging_rewritten_while_an_upload_waits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring one set too small, which no synchronous device would mind."""
    build: Any = Stage.__init__
    monkeypatch.setattr(Stage, "__init__", lambda self, *rest: build(self, *rest[:-1], rest[-1] - 1))
    is_lossless(engine("deep", device="reference", draft_tokens=2, overlap=1))
    lazy = engine("deep", device="lazy-1", draft_tokens=2)
    with pytest.raises((AssertionError, IndexError)):
        is_lossless(lazy)


def test_a_snapshot_read_before_its_event_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = engine("deep", device="lazy-1", draft_tokens=2)
    monkeypatch.setattr(LazyEvent, "synchronize", lambda self: None)
    with pytest.raises(IndexError):  # poison for a slot
        is_lossless(lazy)
