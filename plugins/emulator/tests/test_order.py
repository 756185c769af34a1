"""The order of work: always a linear extension of stream order and event edges, and by chance any of them."""

import random

import pytest

from polydraft_emulator.device import EmulatorDevice
from polydraft_emulator.options import POLICIES
from polydraft_emulator.testing import Log, open_device

each_policy = pytest.mark.parametrize("policy", POLICIES)
SEEDS = range(25)


def random_program(device: EmulatorDevice, rng: random.Random) -> tuple[Log, list[tuple[int, int]]]:
    """Issue 30 pieces of work on three streams with events between them; returns the edges that every order must keep."""
    log, streams = Log(device), [device.stream, device.make_stream("copy"), device.make_stream("side")]
    events = [(device.event(), -1)]
    last = [-1, -1, -1]
    edges: list[tuple[int, int]] = []
    pending: list[list[int]] = [[], [], []]
    for number in range(30):
        at = rng.randrange(3)
        if rng.random() < 0.5:
            event, behind = rng.choice(events)
            streams[at].wait(event)
            pending[at].append(behind)
        log.issue(str(number), streams[at])
        edges += [(before, number) for before in (*pending[at], last[at]) if before >= 0]
        last[at], pending[at] = number, []
        if rng.random() < 0.5:
            event = device.event()
            event.record(streams[at])
            events.append((event, number))
        if rng.random() < 0.2:
            rng.choice(events)[0].synchronize()
    return log, edges


@each_policy
@pytest.mark.parametrize("seed", SEEDS)
def test_every_order_keeps_streams_and_events(policy: str, seed: int):
    device = open_device(f"policy={policy}&seed={seed}")
    log, edges = random_program(device, random.Random(seed))
    device.synchronize()
    assert sorted(log.ran, key=int) == [str(n) for n in range(30)]
    place = {int(name): index for index, name in enumerate(log.ran)}
    assert len(edges) > 20
    assert all(place[before] < place[after] for before, after in edges)


def test_one_seed_is_one_order():
    def order(seed: int) -> list[str]:
        log, _ = random_program(device := open_device(f"seed={seed}"), random.Random(1))
        device.synchronize()
        return log.ran

    assert all(order(seed) == order(seed) for seed in SEEDS)
    assert len({tuple(order(seed)) for seed in SEEDS}) > 20


def two_streams(query: str) -> tuple[Log, EmulatorDevice]:
    """a1, a2 on the compute stream and b1, b2 on another, issued in turn; nothing connects them."""
    device = open_device(query)
    log, other = Log(device), device.make_stream("other")
    for name in ("a1", "b1", "a2", "b2"):
        log.issue(name, other if name[0] == "b" else device.stream)
    return log, device


def test_random_reaches_every_legal_order():
    orders = set()
    for seed in range(120):
        log, device = two_streams(f"seed={seed}")
        device.synchronize()
        orders.add("".join(log.ran))
    assert orders == {"a1a2b1b2", "a1b1a2b2", "a1b1b2a2", "b1a1a2b2", "b1a1b2a2", "b1b2a1a2"}


@pytest.mark.parametrize(
    ("policy", "before", "ran"),
    [
        ("lazy", [], ["a1"]),
        ("fifo", [], ["a1"]),
        ("reversed", [], ["b1", "b2", "a1"]),
        ("eager", ["a1", "b1", "a2", "b2"], ["a1", "b1", "a2", "b2"]),
    ],
)
def test_what_a_policy_runs_for_the_first_operation(policy: str, before: list[str], ran: list[str]):
    device = open_device(f"policy={policy}")
    log, other, event = Log(device), device.make_stream("other"), device.event()
    log.issue("a1")
    event.record(device.stream)
    log.issue("b1", other)
    log.issue("a2")
    log.issue("b2", other)
    assert log.ran == before
    event.synchronize()
    assert log.ran == ran


def test_lazy_runs_ancestors_on_other_streams_and_nothing_else():
    device = open_device("policy=lazy")
    log, copy, side = Log(device), device.make_stream("copy"), device.make_stream("side")
    uploaded, done = device.event(), device.event()
    log.issue("upload", copy)
    uploaded.record(copy)
    log.issue("later upload", copy)
    log.issue("unrelated", side)
    device.stream.wait(uploaded)
    log.issue("kernel")
    done.record(device.stream)
    log.issue("later kernel")
    done.synchronize()
    assert log.ran == ["upload", "kernel"]


def test_random_is_lazy_with_some_seeds_and_runs_ahead_with_others():
    at_issue, at_wait = set(), set()
    for seed in range(80):
        device = open_device(f"seed={seed}")
        log, event = Log(device), device.event()
        log.issue("first")
        event.record(device.stream)
        for name in range(20):
            log.issue(str(name))
        at_issue.add(len(log.ran))
        event.synchronize()
        at_wait.add(len(log.ran))
    assert 0 in at_issue
    assert max(at_issue) > 5
    assert {1, 21} <= at_wait


# -- events -------------------------------------------------------------------------------------------------


@each_policy
@pytest.mark.parametrize("seed", range(10))
def test_query_is_true_only_when_the_work_is_done_and_some_day_it_is(policy: str, seed: int):
    device = open_device(f"policy={policy}&seed={seed}")
    log, event = Log(device), device.event()
    assert event.query()
    for name in range(20):
        log.issue(str(name))
    event.record(device.stream)
    for name in range(5):
        log.issue(f"later {name}")
    for _ in range(400):
        if event.query():
            assert len(log.ran) >= 20
            return
    pytest.fail("a device that makes no progress would hang a host that polls")


def test_query_during_an_operation_of_another_stream_is_false():
    device = open_device("policy=lazy")
    log, other, event, said = Log(device), device.make_stream("other"), device.event(), []
    log.issue("work")
    event.record(device.stream)
    device.enqueue(other, lambda: said.append(event.mark is not None and event.mark.state), "look")
    done = device.event()
    done.record(other)
    done.synchronize()
    assert said == [0]
    assert log.ran == []


def test_an_event_recorded_again_marks_the_new_point():
    device = open_device("policy=lazy")
    log, other, event = Log(device), device.make_stream("other"), device.event()
    log.issue("a")
    event.record(device.stream)
    other.wait(event)  # keeps waiting for the first point
    log.issue("b")
    event.record(device.stream)
    log.issue("x", other)
    done = device.event()
    done.record(other)
    done.synchronize()
    assert log.ran == ["a", "x"]
    event.synchronize()
    assert log.ran[2:] == ["b"]


def test_an_event_that_marks_nothing_holds_nothing_up():
    device = open_device("policy=lazy")
    log, event = Log(device), device.event()
    event.synchronize()
    device.stream.wait(event)
    log.issue("a")
    event.record(device.stream)
    event.synchronize()
    assert log.ran == ["a"]


def test_waits_are_counted():
    device = open_device()
    event = device.event()
    event.record(device.stream)
    event.synchronize()
    event.query()
    device.synchronize()
    assert device.counters.host_syncs == 2


# -- delays -------------------------------------------------------------------------------------------------


@each_policy
@pytest.mark.parametrize("seed", range(5))
def test_a_delayed_operation_runs_when_nothing_else_may(policy: str, seed: int):
    device = open_device(f"policy={policy}&seed={seed}&delay=kernel@1")
    log, other, event = Log(device), device.make_stream("other"), device.event()
    log.issue("slow")
    log.issue("behind it")
    for name in range(6):
        log.issue(str(name), other)
    event.record(other)
    event.synchronize()
    assert "slow" not in log.ran
    device.synchronize()
    assert log.ran[6:] == ["slow", "behind it"]
