"""Parts of the hazard checker: what orders operations, which rows collide, what the guarded view sees, what a launch touches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polydraft.backend import DeviceOptions
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.kernels.gather_rows import GatherRowsV1
from polydraft.contracts.kernels.pack_rows import PackRowsV1
from polydraft.errors import DeviceError, HazardError
from polydraft.instruments.sanitize import Hazard, Operation, Report
from polydraft.instruments.sanitize.accesses import declare
from polydraft.instruments.sanitize.checker import Checker
from polydraft.instruments.sanitize.device import WatchedDevice
from polydraft.instruments.sanitize.hazards import MOST_HAZARDS
from polydraft.instruments.sanitize.memory import Memories, Rows
from tests.support.planted_device import PlantedDevice


class Bench:
    """A watched device with two streams, a buffer, and staging of 8 rows."""

    def __init__(self) -> None:
        self.checker = Checker()
        self.device = WatchedDevice(PlantedDevice(DeviceOptions(), observing=False), self.checker)
        self.a, self.b = self.device.stream, self.device.make_stream("b")
        self.buffer = self.device.empty("buffer", (8,), "i32")
        self.down, self.up, self.other = (self.device.staging(name, (8,), "i32") for name in ("down", "up", "other"))
        self.up.array[:] = 1
        self.other.array[:] = 2

    def write(self, stream: Any, rows: int = 8, source: Any = None) -> None:
        self.device.upload(stream, self.buffer, source or self.up, rows)

    def read(self, stream: Any, rows: int = 8) -> None:
        self.device.download(stream, self.down, self.buffer, rows)

    def recorded(self, stream: Any) -> Any:
        event = self.device.event()
        event.record(stream)
        return event

    @property
    def names(self) -> list[str]:
        return [hazard.name for hazard in self.checker.report.hazards]


# -- order ---------------------------------------------------------------------------------------------
def in_order_of_a_stream(t: Bench) -> None:
    t.write(t.a)
    t.read(t.a)


def over_an_event(t: Bench) -> None:
    t.write(t.a)
    t.b.wait(t.recorded(t.a))
    t.read(t.b)


def over_two_events_and_a_third_stream(t: Bench) -> None:
    third = t.device.make_stream("third")
    t.write(t.a)
    third.wait(t.recorded(t.a))
    t.b.wait(t.recorded(third))
    t.read(t.b)


def over_the_host(t: Bench) -> None:
    t.write(t.a)
    t.recorded(t.a).synchronize()
    t.read(t.b)


def over_a_query_that_said_yes(t: Bench) -> None:
    t.write(t.a)
    assert t.recorded(t.a).query()
    t.read(t.b)


def over_a_wait_for_the_device(t: Bench) -> None:
    t.write(t.a)
    t.device.synchronize()
    t.read(t.b)


def reads_of_both(t: Bench) -> None:
    t.read(t.a)
    t.device.download(t.b, t.other, t.buffer, 8)


def host_reads_behind_the_event(t: Bench) -> None:
    t.read(t.a)
    t.recorded(t.a).synchronize()
    assert t.down.array[:2].copy().tolist() == [0, 0]


def host_writes_behind_the_event(t: Bench) -> None:
    t.write(t.a)
    t.recorded(t.a).synchronize()
    t.up.array[:] = 3


def host_writes_rows_that_were_not_sent(t: Bench) -> None:
    t.write(t.a, 4)
    t.up.array[4:] = 3


def load_behind_the_event(t: Bench) -> None:
    t.write(t.a)
    t.recorded(t.a).synchronize()
    t.device.load(t.buffer, np.zeros(8, np.int32))


ORDERED = [
    in_order_of_a_stream, over_an_event, over_two_events_and_a_third_stream, over_the_host, over_a_query_that_said_yes,
    over_a_wait_for_the_device, reads_of_both, host_reads_behind_the_event, host_writes_behind_the_event,
    host_writes_rows_that_were_not_sent, load_behind_the_event,
]  # fmt: skip


@pytest.mark.parametrize("steps", ORDERED, ids=lambda steps: steps.__name__)
def test_what_is_ordered_is_no_hazard(steps: Callable[[Bench], None]) -> None:
    bench = Bench()
    steps(bench)
    assert bench.names == []


def write_then_read_elsewhere(t: Bench) -> None:
    t.write(t.a)
    t.read(t.b)


def read_then_write_elsewhere(t: Bench) -> None:
    t.read(t.a)
    t.write(t.b)


def write_twice(t: Bench) -> None:
    t.write(t.a)
    t.write(t.b, source=t.other)


def event_before_the_write(t: Bench) -> None:
    event = t.recorded(t.a)
    t.write(t.a)
    t.b.wait(event)
    t.read(t.b)


def event_of_the_wrong_stream(t: Bench) -> None:
    t.write(t.a)
    t.b.wait(t.recorded(t.b))
    t.read(t.b)


def wait_behind_the_read(t: Bench) -> None:
    t.write(t.a)
    event = t.recorded(t.a)
    t.read(t.b)
    t.b.wait(event)


def the_hosts_knowledge_of_one_stream_is_not_of_the_other(t: Bench) -> None:
    t.write(t.a)
    t.recorded(t.b).synchronize()
    t.read(t.b)


def an_event_that_moved_on_to_another_stream(t: Bench) -> None:
    event = t.device.event()
    t.write(t.a)
    event.record(t.a)
    t.device.stream_of(t.a).wait(event)
    event.record(t.b)
    t.b.wait(event)
    t.read(t.b)


def load_while_it_is_read(t: Bench) -> None:
    t.read(t.a)
    t.device.load(t.buffer, np.zeros(8, np.int32))


UNORDERED = [
    write_then_read_elsewhere, read_then_write_elsewhere, write_twice, event_before_the_write, event_of_the_wrong_stream,
    wait_behind_the_read, the_hosts_knowledge_of_one_stream_is_not_of_the_other, an_event_that_moved_on_to_another_stream,
    load_while_it_is_read,
]  # fmt: skip


@pytest.mark.parametrize("steps", UNORDERED, ids=lambda steps: steps.__name__)
def test_what_is_not_ordered_is_found_once(steps: Callable[[Bench], None]) -> None:
    bench = Bench()
    steps(bench)
    assert bench.names == ["unordered-access"]
    (hazard,) = bench.checker.report.hazards
    assert hazard.memory == "buffer"
    assert hazard.first is not None
    assert f"edge {hazard.first.where} -> {hazard.second.where}" in hazard.missing


def test_only_rows_that_both_touch_collide() -> None:
    bench = Bench()
    bench.write(bench.a, 8)
    bench.read(bench.b, 3)
    (hazard,) = bench.checker.report.hazards
    assert hazard.memory == "buffer[0:3]"


def unordered(bench: Bench) -> set[str]:
    return {hazard.memory for hazard in bench.checker.report.hazards if hazard.name == "unordered-access"}


def test_a_write_that_another_only_partly_covers_is_not_forgotten() -> None:
    bench = Bench()
    bench.write(bench.a, 8)
    bench.write(bench.a, 2)
    bench.read(bench.b)
    assert unordered(bench) == {"buffer", "buffer[0:2]"}


def test_a_read_that_a_write_only_partly_covers_is_not_forgotten() -> None:
    bench = Bench()
    bench.read(bench.a, 8)
    bench.write(bench.a, 2)
    bench.write(bench.b, 8, source=bench.other)
    assert unordered(bench) == {"buffer", "buffer[0:2]"}


def test_what_is_sent_is_written_in_the_same_step() -> None:
    bench = Bench()
    bench.checker.enter("launch", 1)
    bench.up.array[:] = 1
    bench.checker.memories[bench.buffer].bound = True
    bench.write(bench.a)
    bench.write(bench.a)
    bench.checker.leave()
    assert bench.names == []
    bench.checker.enter("launch", 2)
    bench.write(bench.a)
    bench.checker.leave()
    assert bench.names == ["stale-upload"]


def test_a_failed_device_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was issued before is void, so neither the unread snapshot nor the rewritten staging means anything."""
    bench = Bench()
    bench.write(bench.a)
    bench.read(bench.a)

    def fail() -> None:
        raise DeviceError("lost")

    monkeypatch.setattr(bench.device.inner, "synchronize", fail)
    with pytest.raises(DeviceError, match="lost"):
        bench.device.synchronize()
    bench.up.array[:] = 4
    bench.read(bench.a)
    assert bench.names == []


def test_memory_of_a_closed_device_is_freed() -> None:
    bench = Bench()
    bench.device.close()
    bench.write(bench.a)
    assert set(bench.names) == {"freed-memory"}


# -- the guarded view ----------------------------------------------------------------------------------
class Seen:
    """A guard that writes down what it is told."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.told: list[tuple[str, int, int]] = []
        bench = Bench()
        bench.checker.host_reads_staging = lambda memory, low, high: self.told.append(("read", low, high))  # type: ignore[method-assign]
        bench.checker.host_writes_staging = lambda memory, low, high: self.told.append(("write", low, high))  # type: ignore[method-assign]
        self.staging = bench.device.staging("seen", array.shape, "i32")
        self.staging.inner.array[...] = array

    @property
    def array(self) -> Any:
        return self.staging.array


TOUCHES: dict[str, tuple[Callable[[Any], Any], list[tuple[str, int, int]]]] = {
    "slice": (lambda a: a[2:5], []),
    "length and shape": (lambda a: (len(a), a.shape, a[1:].dtype, a.T.shape), []),
    "copy of a slice": (lambda a: a[2:5].copy(), [("read", 2, 5)]),
    "element": (lambda a: int(a[3, 1]), [("read", 3, 4)]),
    "last row": (lambda a: a[-1].tolist(), [("read", 5, 6)]),
    "column": (lambda a: a[1:4, 2].max(), [("read", 1, 4)]),
    "step": (lambda a: a[1::2].sum(), [("read", 1, 6)]),
    "backwards": (lambda a: a[::-1][:2].copy(), [("read", 4, 6)]),
    "rows by index": (lambda a: a[[4, 1]], [("read", 1, 5)]),
    "rows by mask": (lambda a: a[np.arange(6) == 3], [("read", 3, 4)]),
    "transposed": (lambda a: a[:2].T.copy(), [("read", 0, 2)]),
    "comparison": (lambda a: a[:3] >= 0, [("read", 0, 3)]),
    "function": (lambda a: np.concatenate((a[:1], a[4:])), [("read", 0, 1), ("read", 4, 6)]),
    "iteration": (lambda a: [int(row[0]) for row in a[:2]], [("read", 0, 1), ("read", 1, 2)]),
    "truth": (lambda a: bool(a[5, 0]), [("read", 5, 6)]),
    "words": (lambda a: str(a[:1]), [("read", 0, 1)]),
    "assignment": (lambda a: a.__setitem__(slice(1, 3), 7), [("write", 1, 3)]),
    "assignment to all": (lambda a: a.__setitem__(slice(None), 7), [("write", 0, 6)]),
    "assignment to a column": (lambda a: a.__setitem__((slice(2, 4), 0), 7), [("write", 2, 4)]),
    "assignment to a row": (lambda a: a.__setitem__(2, 7), [("write", 2, 3)]),
    "assignment by index": (lambda a: a.__setitem__([5, 3], 7), [("write", 3, 6)]),
    "in place": (lambda a: a[:2].__iadd__(1), [("read", 0, 2), ("write", 0, 2)]),
    "copyto": (lambda a: np.copyto(a[4:], 9), [("write", 4, 6)]),
    "out of a ufunc": (lambda a: np.add(1, 2, out=a[:1]), [("write", 0, 1)]),
    "fill": (lambda a: a[3:].fill(0), [("write", 3, 6)]),
    "from itself": (lambda a: a.__setitem__(slice(0, 1), a[5:]), [("write", 0, 1), ("read", 5, 6)]),
    "nothing": (lambda a: a[2:2].copy(), []),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_the_view_tells_rows_and_does_what_an_array_does(name: str) -> None:
    act, told = TOUCHES[name]
    plain = np.arange(18, dtype=np.int32).reshape(6, 3)
    seen = Seen(plain)
    wanted, got = act(plain), act(seen.array)
    assert seen.told == told
    assert np.array_equal(np.asarray(seen.staging.inner.array), plain)
    if isinstance(wanted, np.ndarray):
        assert np.array_equal(np.asarray(got), wanted)
        assert type(got) is np.ndarray or np.may_share_memory(np.asarray(got), seen.staging.inner.array)
    else:
        assert got == wanted


def test_what_is_taken_out_is_a_plain_array() -> None:
    seen = Seen(np.zeros((6, 3), np.int32))
    assert all(
        type(value) is np.ndarray
        for value in (seen.array.copy(), seen.array[:2] + 1, np.stack([seen.array[:1]]), seen.array[[0]])
    )


# -- declared accesses ---------------------------------------------------------------------------------
class Thing:
    """A buffer as core knows it."""

    def __init__(self, name: str, *shape: int) -> None:
        self.name, self.shape, self.dtype = name, shape, "i32"


def touched(name: str, args: Any, n: int) -> dict[str, tuple[int, int, bool, bool]]:
    touches = declare(name, args, None, Memories()).touches(n)
    return {t.memory.name: (t.low, t.high, t.reads, t.writes) for t in touches}


def test_rows_that_the_length_counts_and_whole_fields() -> None:
    found = touched("gather_rows", GatherRowsV1(x=Thing("x", 10, 4), index=Thing("index", 6), out=Thing("out", 6, 4)), 3)
    assert found == {"x": (0, 10, True, False), "index": (0, 3, True, False), "out": (0, 3, False, True)}


def test_a_field_by_slot_is_touched_as_a_whole() -> None:
    fields = {name: Thing(name, 20 if spec.symbols[0] == "R" else 5) for name, spec in PackRowsV1.specs().items()}  # type: ignore[union-attr]
    found = touched("pack_rows", PackRowsV1(**fields), 12)
    assert found["ids"] == (0, 12, False, True)
    assert found["slot_order"] == (0, 5, True, False)
    assert found["seq_len"] == (0, 5, False, True)


def test_a_composite_is_the_sum_of_its_parts_and_its_dead_buffers_have_no_capacity() -> None:
    from polydraft.contracts.kernels.gumbel_noise import GumbelNoiseV1
    from polydraft.contracts.kernels.sample import SampleV1

    def args(record: Any, **given: Any) -> Any:
        return record(**{name: given.get(name, Thing(name, 8, 4)) for name in record.specs()})

    noise, slot = Thing("noise", 1, 4), Thing("row_slot", 8)
    parts = CompositeArgs(
        (args(GumbelNoiseV1, noise=noise, row_slot=slot, draw=0, ahead=0), args(SampleV1, noise=noise, row_slot=slot))
    )
    declared = declare("gumbel_noise+sample", parts, None, Memories())
    assert declared.smallest is not None
    assert declared.smallest.rows == 8
    found = {t.memory.name: (t.high, t.reads, t.writes) for t in declared.touches(5)}
    assert found["noise"] == (1, True, True)
    assert found["row_slot"] == (5, True, False)
    assert found["tokens"] == (5, False, True)


# -- small records -------------------------------------------------------------------------------------
def test_rows_join_what_touches() -> None:
    rows = Rows()
    rows.add(4, 6)
    rows.add(0, 2)
    assert not rows.holds(0, 6)
    rows.add(2, 4)
    assert rows.holds(0, 6)
    assert rows.holds(3, 3)
    assert not rows.holds(0, 7)
    rows.clear()
    assert not rows.holds(0, 1)


def test_a_report_keeps_so_many_findings_and_counts_the_rest() -> None:
    report = Report()
    report.check()
    for i in range(MOST_HAZARDS + 3):
        report.add(Hazard("sync-in-launch", f"m{i}", Operation("wait", "host", "a.py:1", None), None, "nothing"))
    assert (len(report.hazards), report.num_more) == (MOST_HAZARDS, 3)
    with pytest.raises(HazardError, match=rf"found {MOST_HAZARDS + 3} hazards:(.|\n)*and 3 more that were not kept"):
        report.check()
