"""How plans reach the ranks beside rank 0, and when these launch them."""

from __future__ import annotations

import math
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft import child_process
from polydraft.errors import DeviceError
from polydraft.host import followers
from polydraft.host.followers import END, ProcessChannel, ProcessInbox, ThreadChannel, follow
from polydraft.program.columns import NOTHING, Writes
from polydraft.program.plan import StepPlan
from polydraft.program.plan_bytes import PlanReader, PlanWriter
from polydraft.ranks import Exchange, Group
from polydraft.ranks.exchange import Waiting
from polydraft.ranks.mailbox import NBYTES, NUMBERS, PLACES, ROOM, Mailbox, Message


def plan_of(step_id: int, like: StepPlan | None = None) -> StepPlan:
    if like is not None:
        return like.again(step_id, NOTHING, like.num_drafts)
    arrays: dict[str, Any] = {name: np.arange(3, dtype=np.int32) for name in ("slots", "rows", "epochs")}
    arrays |= {name: np.ones(3, np.bool_) for name in ("decode", "emits")}
    counts = np.zeros((4, 3), np.int64)
    return StepPlan(
        step_id, **arrays, in_flight_counts=counts, writes=NOTHING, num_rows=12, num_logit_rows=12, window=4, num_drafts=3,
        has_prefill=False, sampling=False,
    )  # fmt: skip


# -- the mailbox -------------------------------------------------------------------------------------------
def test_messages_are_taken_in_the_order_in_which_they_were_put():
    memory, chance, sent = np.zeros(NBYTES, np.uint8), random.Random(0), deque[Message]()
    put, take = Mailbox(memory), Mailbox(memory)
    full = 0
    for _ in range(4000):
        if chance.random() < 0.55:
            size = chance.choice((0, 1, 280, ROOM, None))
            message = chance.choice((0, 5 << 16, NUMBERS - 1)) if size is None else chance.randbytes(size)
            if put.put(message) is not None:
                sent.append(message)
            else:
                full += 1
                assert len(sent) == PLACES
        else:
            assert take.take() == (sent.popleft() if sent else None)
        assert put.behind == len(sent)
    assert full > 0


@pytest.mark.parametrize("late", ["the message", "its size"])
def test_a_message_is_taken_once_all_of_it_is_seen(late: str):
    """Though the count is seen before, and what lay in that place is a whole message."""
    memory = np.zeros(NBYTES, np.uint8)
    put, take = Mailbox(memory), Mailbox(memory)
    for number in range(PLACES):
        assert put.put(number.to_bytes(8, "little")) is not None
        assert take.take() == number.to_bytes(8, "little")
    before = memory.copy()
    assert put.put(b"new plan") is not None
    after, begin = memory.copy(), np.flatnonzero(memory != before)[0] // 8 * 8
    own = slice(begin + 8, begin + 16) if late == "the message" else slice(begin, begin + 8)
    memory[own] = before[own]
    assert take.take() is None
    memory[own] = after[own]
    assert take.take() == b"new plan"


def test_memory_in_which_nothing_was_written_has_no_message():
    """Not even an empty one."""
    memory = np.zeros(NBYTES, np.uint8)
    taking = Mailbox(memory)
    assert taking.take() is None
    assert Mailbox(memory).put(b"") is not None
    assert taking.take() == b""
    assert taking.take() is None


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_plan_like_the_one_before_is_put_into_one_line_of_the_cache(size: int):
    """For which whoever puts it may have to wait; in one word of it."""
    memory, writer, first = np.zeros(Exchange.nbytes(size, 64), np.uint8), PlanWriter(), plan_of(1)
    writer.write(first)
    for rank in range(size):
        box = Exchange(memory, rank, size, 64).mailbox(rank)
        for step_id in range(2, 2 + PLACES):
            before, plan = memory.copy(), plan_of(step_id, first)
            assert box.put(writer.write(plan)) is not None
            assert len(set(np.flatnonzero(memory != before) // 8)) == 1


def test_a_line_that_both_sides_have_read_is_written_where_it_changes_alone():
    Mailbox(bytes(NBYTES)).asleep = False
    with pytest.raises(TypeError, match="read-only"):
        Mailbox(bytes(NBYTES)).asleep = True


# -- the inbox of a thread ---------------------------------------------------------------------------------
def test_a_thread_that_is_late_itself_notices_that_no_further_plan_comes(monkeypatch: pytest.MonkeyPatch):
    """Its time to wait is then over before it begins to wait, where `SimpleQueue.get` waits for ever before Python 3.13."""
    monkeypatch.setattr(followers, "SOON_S", 1e-6)
    taken, waited_behind = list[None](), queue.Queue[int]()
    device = SimpleNamespace(synchronize=lambda: waited_behind.put(len(taken)))
    rank: Any = SimpleNamespace(
        runner=SimpleNamespace(device=device), drop_weights=lambda: taken.append(None), close=lambda: None
    )
    channel = ThreadChannel(Group(1, 2, Exchange.of_threads(2, 64)[1]), lambda _: rank, 0)
    for number in range(0, 4000, 2):
        while waited_behind.get(timeout=10) < number:
            pass
        for _ in range(2):
            channel.send(followers._of_weights("drop"))
    channel.send(END)
    channel.join()


# -- the inbox of a process ------------------------------------------------------------------------------
class Ends:
    """Both ends of the way to a process, in this one."""

    def __init__(self) -> None:
        first, other = Exchange.of_threads(2, 64, math.inf)
        reads, writes = os.pipe()
        self.pipe, self.box, self.reads = os.fdopen(writes, "wb"), first.mailbox(1), FileIO(reads)
        self.inbox = ProcessInbox(self.reads, other)

    def by_pipe(self, message: bytes) -> None:
        child_process.write_message(self.pipe, message)
        assert self.box.put(followers._BY_PIPE) is not None

    def end(self) -> None:
        """As where rank 0 is gone; returns when it is known."""
        self.pipe.close()
        while not self.inbox._ended:
            time.sleep(0.001)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.end()
    made.reads.close()


def test_long_messages_keep_their_place_among_short_ones(ends: Ends):
    assert ends.box.put(b"one") is not None
    ends.by_pipe(b"two" * ROOM)
    assert ends.box.put(b"three") is not None
    assert [ends.inbox.get() for _ in range(3)] == [b"one", b"two" * ROOM, b"three"]
    with pytest.raises(queue.Empty):
        ends.inbox.get(timeout=0.02)
    assert not ends.box.asleep, "a process that works takes plans without being woken"


def test_what_was_put_before_the_end_comes_before_it(ends: Ends):
    assert ends.box.put(b"last") is not None
    ends.end()
    assert [ends.inbox.get(), ends.inbox.get()] == [b"last", END]


@pytest.mark.parametrize("woken", [True, False])
def test_one_that_sleeps_is_woken_or_looks_by_itself(ends: Ends, woken: bool, monkeypatch: pytest.MonkeyPatch):
    """Whoever puts a message may have looked whether it sleeps just before."""
    monkeypatch.setattr(followers, "NAP_S", 60.0 if woken else 0.01)

    def put() -> None:
        while not ends.box.asleep:
            time.sleep(0.001)
        ends.box.put(b"plan")
        if woken:
            child_process.write_message(ends.pipe, followers._WAKE)

    thread = threading.Thread(target=put)
    thread.start()
    assert ends.inbox.get(timeout=20) == b"plan"
    thread.join()
    assert not ends.box.asleep


def test_one_that_is_woken_late_sleeps_on(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    """By a message that it has taken already."""
    looks, take = 0, ends.inbox._box.take

    def look() -> Message | None:
        nonlocal looks
        looks += ends.box.asleep
        if looks == 1:
            child_process.write_message(ends.pipe, followers._WAKE)
        return take()

    monkeypatch.setattr(Mailbox, "take", lambda box: look())
    with pytest.raises(queue.Empty):
        ends.inbox.get(timeout=0.3)
    assert looks < 20


SWALLOWS = "import sys; sys.stdin.buffer.read()"
SLEEPS = "import time; time.sleep(60)"


@contextmanager
def channel_to(script: str, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> Iterator[tuple[ProcessChannel, Exchange]]:
    """A channel to a process that runs a script, and what that sees of where ranks meet."""
    monkeypatch.setattr(followers, "running", lambda _: [sys.executable, "-c", script])
    monkeypatch.setattr(followers, "ENDING_S", 1.0)
    first, other = Exchange.of_threads(2, 64, patience_s)
    with tempfile.TemporaryFile() as memory:
        made = ProcessChannel(1, first, {}, memory.fileno())
    yield made, other
    monkeypatch.undo()
    made._ending = True
    made._process.kill()
    made.join()


@contextmanager
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ProcessChannel, Exchange, list[bytes]]]:
    """A channel to a process that swallows all; what is written into its pipe behind the first message, as a list that grows."""
    with channel_to(SWALLOWS, monkeypatch, 10.0) as (made, other):
        written = list[bytes]()
        monkeypatch.setattr(followers, "write_message", lambda _, *parts: written.append(b"".join(parts)))
        yield made, other, written


@pytest.mark.parametrize("data", [(), (bytes(1 << 20),)], ids=["in the mailbox", "in the pipe"])
def test_nobody_waits_for_ever_for_a_rank_that_takes_nothing(data: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch):
    """Nor to tell it that there is no more."""
    with channel_to(SLEEPS, monkeypatch, 0.3) as (sending, exchange):
        for _ in range(PLACES * (not data)):
            sending.send(b"message")
        begin = time.monotonic()
        wanted = "rank 1 did not take what it was sent within 0.3 s; every rank ends here"
        for _ in range(2):
            with pytest.raises(DeviceError, match=wanted):
                sending.send(b"one more", data)
        assert exchange.failure.startswith("rank 1 did not take")
        with suppress(DeviceError):
            sending.send(END)
        assert time.monotonic() - begin < 5


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="this system does not say that a process was stopped")
def test_a_process_that_is_stopped_is_named_once_it_does_not_go_on(monkeypatch: pytest.MonkeyPatch):
    """Where nobody waits for it in a step, too. Ctrl-C and Ctrl-Z do not reach it."""
    with channel_to(SLEEPS, monkeypatch, 1.0) as (sending, exchange):
        process = sending._process.pid
        assert os.getsid(process) == process != os.getsid(0)
        for _ in range(4):
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(process, signal.SIGCONT)
            time.sleep(0.1)
        assert exchange.failure == ""
        os.kill(process, signal.SIGSTOP)
        begin = time.monotonic()
        while not exchange.failure:
            assert time.monotonic() - begin < 20
            time.sleep(0.01)
        assert sending._process.wait(20) == -signal.SIGKILL, "nobody has to wait for it"
        assert exchange.failure.startswith(
            f"rank 1 (process {process}) was stopped and did not go on within 1 s; every rank ends"
        )


def test_time_in_which_all_are_stopped_is_no_waiting(monkeypatch: pytest.MonkeyPatch):
    """As by Ctrl-Z."""
    clock = iter([0.0, 0.1, 0.2, 1000.0, 1000.1])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    waiting = Waiting()
    assert [round(waiting.seconds(), 6) for _ in range(4)] == [0.1, 0.2, 0.4, 0.5]


def test_a_plan_is_written_into_a_pipe_for_nobody_who_looks(monkeypatch: pytest.MonkeyPatch):
    with channel(monkeypatch) as (sending, exchange, written):
        box = exchange.mailbox(1)
        sending.send(b"plan")
        assert written == []
        assert sending.behind == 1
        box.asleep = True
        sending.send(b"plan")
        assert written == [followers._WAKE]
        box.asleep = False
        sending.send(b"long" * ROOM)
        sending.send(b"head", [b"data"])
        assert written[1:] == [b"long" * ROOM, b"headdata"]
        assert [box.take() for _ in range(4)] == [b"plan", b"plan", followers._BY_PIPE, followers._BY_PIPE]


BUILDS = """
import math, time
from io import FileIO
from polydraft.host.followers import ProcessInbox
from polydraft.ranks import Exchange
inbox = ProcessInbox(FileIO(0, closefd=False), Exchange.of_threads(2, 64, math.inf)[1], building=True)
time.sleep(100)
"""


def test_a_process_that_is_still_being_built_ends_with_rank_0():
    """And not when it is built, minutes later."""
    command = child_process.executing(BUILDS)
    subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=True)


# -- plans -------------------------------------------------------------------------------------------------
def test_arrays_of_the_plan_before_are_not_sent_again():
    writer, reader, first = PlanWriter(), PlanReader(), plan_of(1)
    writes = Writes(np.arange(10, dtype=np.int32).reshape(2, 5), np.arange(3, dtype=np.int32))
    plans = first, plan_of(2, first), first.again(3, writes, 1), first.again(4, NOTHING, 0), plan_of(5)
    messages = [writer.write(one) for one in plans]
    whole, short, other = [one for one in messages if isinstance(one, bytes)]
    assert [isinstance(one, int) for one in messages] == [False, True, False, True, False]
    assert len(short) < len(whole) == len(other) <= ROOM
    found = [reader.read(one) for one in messages]
    assert all(one.slots is found[0].slots for one in found[:-1])
    assert found[-1].slots is not found[0].slots
    np.testing.assert_array_equal(found[-1].slots, first.slots)
    assert [(one.step_id, one.num_drafts, bool(one.writes)) for one in found] == [
        (1, 3, False), (2, 3, False), (3, 1, True), (4, 0, False), (5, 3, False)
    ]  # fmt: skip


class Runs:
    """A rank whose steps end one after the other: rank 0 sends the next plan a while after each."""

    def __init__(self, sends: Callable[[int], None]) -> None:
        self.events, self._sends = list[str](), sends
        self.runner: Any = self
        self.device = SimpleNamespace(synchronize=lambda: self.events.append("rest"))

    def launch(self, plan: StepPlan) -> Any:
        self.events.append(f"launch {plan.step_id}")
        return SimpleNamespace(split=False, plan=plan)

    def collect(self, flight: Any) -> None:
        self.events.append(f"collect {flight.plan.step_id}")
        self._sends(flight.plan.step_id)


def test_a_step_is_launched_while_the_one_before_runs(monkeypatch: pytest.MonkeyPatch):
    """As rank 0 does, which sends a plan when it has seen the results of the last but one: whoever waits for the last meanwhile
    has a device without work. In front of a longer pause everything is waited for."""
    monkeypatch.setattr(followers, "SOON_S", 0.5)
    inbox, writer = queue.SimpleQueue[Message](), PlanWriter()
    plans = [plan_of(1)]
    plans += [plan_of(step, plans[0]) for step in (2, 3, 4)]
    messages = [writer.write(plan) for plan in plans]

    def send(collected: int) -> None:
        if collected + 2 <= len(messages):
            threading.Timer(0.02, lambda: inbox.put(messages[collected + 1])).start()
        elif collected == len(messages):
            inbox.put(END)

    inbox.put(messages[0])
    inbox.put(messages[1])
    rank: Any = Runs(send)
    follow(rank, 1, inbox)
    ahead = ["launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "launch 4", "collect 3"]
    assert rank.events == [*ahead, "collect 4", "rest"]
