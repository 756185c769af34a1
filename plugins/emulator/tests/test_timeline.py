"""Modelled time, on a host clock that the test turns by hand."""

from types import SimpleNamespace

import pytest

from polydraft.errors import ConfigError, DeviceError
from polydraft.instruments.timeline import Operation
from polydraft_emulator import timeline
from polydraft_emulator.device import EmulatorDevice
from polydraft_emulator.options import POLICIES
from polydraft_emulator.testing import Log, open_device

US = 1e-6


class Host:
    """The clock of the host, in microseconds."""

    def __init__(self) -> None:
        self.at = 1000.0

    def thread_time(self) -> float:
        return self.at * US

    def works(self, microseconds: float) -> None:
        self.at += microseconds


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    clock = Host()
    monkeypatch.setattr(timeline, "time", SimpleNamespace(thread_time=clock.thread_time))
    return clock


def spans(device: EmulatorDevice) -> list[tuple[str, int, int, int]]:
    """(name, issued, start, end) in whole microseconds."""
    return [(s.name, round(s.issued_s / US), round(s.start_s / US), round(s.end_s / US)) for s in device.timeline().spans]


def test_a_device_that_is_ahead_waits_for_the_host_and_one_behind_queues(host: Host):
    device = open_device("latency=kernel:20")
    log = Log(device)
    log.issue("a")
    host.works(5)
    log.issue("b")
    host.works(50)
    log.issue("c")
    assert spans(device) == [("a", 0, 0, 20), ("b", 5, 20, 40), ("c", 55, 55, 75)]
    assert device.timeline().label == "modelled"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_emulator_itself_takes_does_not_count(policy: str, host: Host):
    device = open_device(f"latency=kernel:20&policy={policy}")
    device.enqueue(device.stream, lambda: host.works(1_000_000), "slow to emulate")
    device.synchronize()
    host.works(3)
    device.enqueue(device.stream, lambda: host.works(1_000_000), "slow too")
    device.synchronize()
    assert spans(device) == [("slow to emulate", 0, 0, 20), ("slow too", 23, 23, 43)]


def test_a_wait_moves_the_host_to_the_end_of_what_it_waits_for(host: Host):
    device = open_device("latency=kernel:20,download:7")
    log, event = Log(device), device.event()
    log.issue("a")
    event.record(device.stream)
    log.issue("b")
    event.synchronize()
    log.issue("c")
    host.works(100)
    event.synchronize()
    log.issue("d")
    assert spans(device) == [("a", 0, 0, 20), ("b", 0, 20, 40), ("c", 20, 40, 60), ("d", 120, 120, 140)]


def test_streams_overlap_where_their_engines_differ_and_events_allow(host: Host):
    device = open_device("latency=kernel:20,upload:8,download:6&policy=lazy")
    log, copy, event = Log(device), device.make_stream("copy"), device.event()
    buffer, staging = device.empty("b", (2,), "i32"), device.staging("s", (2,), "i32")
    log.issue("a")
    device.upload(copy, buffer, staging, 2)
    event.record(copy)
    log.issue("side", device.make_stream("side"))
    device.stream.wait(event)
    log.issue("uses the copy")
    device.download(copy, staging, buffer, 2)
    assert host.at == 1000
    assert spans(device) == [
        ("a", 0, 0, 20),
        ("b", 0, 0, 8),
        ("side", 0, 20, 40),
        ("uses the copy", 0, 40, 60),
        ("b", 0, 8, 14),
    ]


def test_costs_by_contract_kind_and_row_and_of_a_call(host: Host):
    device = open_device("latency=linear:10+2,kernel:5,op:1,issue:3")
    from polydraft_emulator.streams import Work

    for name, rows in (("linear", 4), ("embed", 9)):
        device.executor.issue(device.stream, Work("kernel", name, rows, lambda: None))
    buffer, staging = device.empty("b", (2,), "i32"), device.staging("s", (2,), "i32")
    device.upload(device.stream, buffer, staging, 2)
    assert host.at == 1000
    assert spans(device) == [("linear", 3, 3, 21), ("embed", 6, 21, 26), ("b", 9, 26, 27)]
    first = device.timeline().spans[0]
    assert first == Operation("compute", "kernel", "linear", 4, first.issued_s, first.start_s, first.end_s)


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_costs_its_start_and_its_launches(seed: int, host: Host):
    device = open_device(f"latency=replay:4,kernel:10,issue:1&seed={seed}")
    Log(device).capture("ab").replay(device.stream)
    assert host.at == 1000
    assert spans(device) == [("graph", 1, 1, 5), ("a", 1, 5, 15), ("b", 1, 15, 25)]


def test_a_delay_holds_its_operation_back(host: Host):
    device = open_device("latency=kernel:10&delay=kernel@2:500")
    log = Log(device)
    for name in "abc":
        log.issue(name)
    assert host.at == 1000
    assert spans(device) == [("a", 0, 0, 10), ("b", 0, 510, 520), ("c", 0, 520, 530)]


def test_query_follows_the_clock(host: Host):
    device = open_device("latency=kernel:10")
    log, event = Log(device), device.event()
    log.issue("a")
    event.record(device.stream)
    assert not event.query()
    host.works(9)
    assert not event.query()
    host.works(1)
    assert event.query()
    assert log.ran == ["a"]


def test_idle_share(host: Host):
    device = open_device("latency=kernel:20,download:100")
    log, staging = Log(device), device.staging("s", (2,), "i32")
    assert device.timeline().idle_share() == 0
    for _ in range(4):
        log.issue("step")
        host.works(25)
    device.download(device.stream, staging, device.empty("b", (2,), "i32"), 2)
    assert device.timeline().idle_share() == pytest.approx(15 / 95)
    assert device.timeline().idle_share("download") == 0
    assert device.timeline().idle_share(since=70 * US) == 0


def test_no_timeline_without_latencies_and_no_wrong_ones():
    with pytest.raises(DeviceError, match="keeps no timeline; open it with the option latency"):
        open_device().timeline()
    for wrong in ("kernel", "kernel:fast", "kernels:20", "linear:20+"):
        with pytest.raises(ConfigError, match="latency has"):
            open_device(f"latency={wrong}")
