"""The ranks beside rank 0: how they are started, how they get every plan, and how all of them end.

The engine of rank 0 makes plans and gives results; the others only run what it launches, in the same order. They are threads of
this process, each with an engine of its own, or processes (`polydraft.rank_worker`). Nothing comes back from them but what ranks
exchange within launches; whatever goes wrong with one of them is said in the place where ranks meet, and ends all.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import queue
import select
import struct
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, Final, Protocol

import numpy as np

from polydraft.child_process import await_end, ending, read_message, running, write_message
from polydraft.contracts.packing import PACKINGS, Matrix, PackedWeight
from polydraft.device import Array
from polydraft.errors import DeviceError, PolydraftError
from polydraft.host.draft_policy import DraftView
from polydraft.json_text import parsed
from polydraft.program.host_inputs import HostInputs
from polydraft.program.plan import StepPlan
from polydraft.program.plan_bytes import PlanReader, PlanWriter
from polydraft.ranks import Exchange, Group
from polydraft.ranks.exchange import Waiting
from polydraft.ranks.mailbox import ROOM, Message
from polydraft.step.runner import InFlightStep, Runner

WORKER = "polydraft.rank_worker"
END = b""
"""The message behind the last plan."""
_OF_WEIGHTS, _OF_INPUTS = -1, -2
"""What messages about weights, and with host inputs, begin with. That of a plan begins with its step, which is no such number."""
_WORD: Final = struct.Struct("=q")
_INPUTS: Final = struct.Struct("=4q")
"""In front of host inputs: of which step, whether it is bound, and whether they come in its middle."""
ENDING_S = 10.0
"""Seconds that a process has to end in; then it is killed."""
SAYING_S = 1.0
"""Seconds within which it is said how a process has ended whose pipe is closed."""
SHARED = Path("/dev/shm")  # noqa: S108  the file there has no name
"""Where files are memory, on systems that have such a place."""
_BY_PIPE: Final = b""
"""In a mailbox: the next message has come by the pipe."""
_WAKE: Final = bytes(1)
"""In a pipe: there is a message in the mailbox."""
SOON_S = 0.002
"""Seconds within which the next plan comes where rank 0 is in the middle of texts."""
EAGER_S = 0.001
"""Of these those in which a process looks for it all the time."""
NAP_S = 0.05
"""Seconds after which a process that sleeps looks into its mailbox, though nobody has woken it: who puts a message there may have
looked whether it sleeps just before."""


class Inbox(Protocol):
    """Messages of rank 0, where they arrive."""

    def get(self, *, timeout: float | None = None) -> Message:
        """The next one. Raises `queue.Empty` where none comes in so many seconds."""


class Rungs:
    """The draft policy of a rank that plans nothing: what programs there are, and no choice among them."""

    def __init__(self, rungs: Sequence[int]) -> None:
        self.rungs = tuple(rungs)

    def choose(self, view: DraftView) -> int:
        """Never asked."""
        raise NotImplementedError


Data = Sequence[memoryview | bytes]
"""What lies behind a message, piece by piece."""


class Channel(Protocol):
    """The way from rank 0 to another rank."""

    def send(self, message: Message, data: Data = ()) -> None:
        """Hand a message over, with what lies behind it; `END` is the last one. Raises `DeviceError` where nobody takes it any
        more."""

    @property
    def behind(self) -> int:
        """Messages that the rank has not taken yet."""

    def join(self) -> None:
        """Wait until that rank has ended, and see to it that it does."""


class Rank(Protocol):
    """What a rank beside rank 0 is to whoever runs it: an engine."""

    @property
    def runner(self) -> Runner: ...
    def close(self) -> None: ...

    def keep_share(self, name: str, value: Matrix) -> None:
        """A tensor of this rank's share of weights that lie in the memory of rank 0."""

    def check_weights(self, directory: str, draft: str | None) -> None:
        """Read and check this rank's share of the weights in `directory`, "": of those that were kept, as all ranks do now; of
        those of a draft model in `draft` as well, unless they stay."""

    def take_weights(self) -> None:
        """Put them in place, as all ranks do now."""

    def drop_weights(self) -> None:
        """They are not wanted any more."""


def follow(rank: Rank, overlap: int, inbox: Inbox) -> None:
    """Run the plans of rank 0 until there are no more, and do with weights what it does. A step is waited for before its staging
    is used again; nobody looks at its outcome. Where no further plan comes soon everything is waited for, drafts too: some
    devices do nothing until somebody waits, and that of rank 0 may be further on than its host. No earlier: rank 0 plans while
    its device works on steps that it has launched ahead, and here the next one has to be launched as early."""
    runner, reader, in_flight = rank.runner, PlanReader(), deque[InFlightStep]()
    half: InFlightStep | None = None
    while True:
        while len(in_flight) > overlap:
            runner.collect(in_flight.popleft())
        try:
            message = inbox.get(timeout=SOON_S)
        except queue.Empty:
            while in_flight:
                runner.collect(in_flight.popleft())
            runner.device.synchronize()
            message = inbox.get()
        if message == END:
            return
        if isinstance(message, int) or (what := _WORD.unpack_from(message)[0]) >= 0:
            flight = runner.launch(reader.read(message))
            if flight.split:
                half = flight  # until its host inputs are here
            else:
                in_flight.append(flight)
        elif what == _OF_WEIGHTS:
            _change(rank, message)
        else:
            _, step_id, bound, middle = _INPUTS.unpack_from(message)
            runner.inputs.take(memoryview(message)[_INPUTS.size :], step_id, bound=bool(bound), middle=bool(middle))
            if middle and half is not None:
                runner.resume(half)
                in_flight.append(half)
                half = None


def _of_weights(what: str, *words: Any) -> bytes:
    """A message about weights: what to do, and with what. Whole words, so that data behind it is aligned."""
    text = json.dumps((what, *words)).encode()
    return _WORD.pack(_OF_WEIGHTS) + _WORD.pack(len(text)) + text + bytes(-len(text) % 8)


def _arrays(message: bytes, begin: int, forms: Sequence[tuple[str, Sequence[int]]]) -> list[Array]:
    """The arrays of these dtypes and shapes that lie in a message from `begin` on."""
    found = list[Array]()
    for dtype, shape in forms:
        found.append(np.frombuffer(message, dtype, math.prod(shape), begin).reshape(shape))
        begin += found[-1].nbytes + -found[-1].nbytes % 8
    return found


def _change(rank: Rank, message: bytes) -> None:
    """Do what a message about weights says."""
    begin = 2 * _WORD.size
    (size,) = _WORD.unpack_from(message, _WORD.size)
    what, *words = parsed(message[begin : begin + size])
    if what == "keep":
        name, packing, shape, forms = words
        arrays = _arrays(message, begin + size + -size % 8, forms)
        rank.keep_share(name, PackedWeight(PACKINGS[packing], tuple(shape), *arrays) if packing else arrays[0])
    elif what == "check":
        rank.check_weights(*words)
    elif what == "take":
        rank.take_weights()
    else:
        rank.drop_weights()


def said(rank: int, error: BaseException) -> str:
    """What all ranks are told of the error that one of them ends with."""
    return f"rank {rank} failed: {error}" if isinstance(error, PolydraftError) else f"rank {rank} failed: {error!r}"


class Followers:
    """The other ranks of an engine."""

    def __init__(self, group: Group, channels: Sequence[Channel]) -> None:
        self.group = group
        """Rank 0."""
        self._channels, self._writer, self._ended = channels, PlanWriter(), False

    def send(self, plan: StepPlan) -> None:
        """Have the other ranks launch a step. Raises `DeviceError` where one of them has ended."""
        self._tell(self._writer.write(plan))

    def give_inputs(self, inputs: HostInputs, plan: StepPlan, *, middle: bool) -> None:
        """Hand over what was filled for a step, before it is sent, or in its middle. Raises as `send` does."""
        rows, arrays = inputs.filled(plan, middle=middle)
        self._tell(_INPUTS.pack(_OF_INPUTS, plan.step_id, plan.bound, middle) + rows, arrays)

    # Messages about weights come to the other ranks in the order of plans, so each step runs with the same ones on all ranks.
    def give_share(self, rank: int, name: str, value: Matrix) -> None:
        """Have a rank keep a tensor of its share, until it is told to take or to drop it. Raises as `send` does."""
        self.group.exchange.raise_failure()
        packing, arrays = (value.packing.name, value.arrays) if isinstance(value, PackedWeight) else ("", (value,))
        message = _of_weights("keep", name, packing, value.shape, [(array.dtype.str, array.shape) for array in arrays])
        data = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
        self._channels[rank - 1].send(message, [part for one in data for part in (one, bytes(-len(one) % 8))])

    def check_weights(self, directory: str, draft: str | None) -> None:
        """Have the other ranks read what they keep of the weights in `directory`, "": check what each was given, and come to
        where ranks agree; the same of a draft model's in `draft`, None: they stay. Raises as `send` does."""
        self._tell(_of_weights("check", directory, draft))

    def take_weights(self) -> None:
        """Have them put these in place, and come to where ranks agree. Raises as `send` does."""
        self._tell(_of_weights("take"))

    def drop_weights(self) -> None:
        """Have them forget what they were given or have opened. Raises as `send` does."""
        self._tell(_of_weights("drop"))

    @property
    def behind(self) -> list[int]:
        """Of each other rank, the messages that it has not taken yet."""
        return [channel.behind for channel in self._channels]

    def _tell(self, message: Message, data: Data = ()) -> None:
        self.group.exchange.raise_failure()
        for channel in self._channels:
            channel.send(message, data)

    def abandon(self, sentence: str) -> str:
        """Rank 0 cannot go on: the others end with it. Returns why, which is what was said first."""
        with suppress(DeviceError):
            self.group.exchange.fail(sentence)
        return self.group.exchange.failure

    def end(self) -> None:
        """There are no more plans: let all ranks end, and wait until they have. Calling it again is fine."""
        if self._ended:
            return
        self._ended = True
        for channel in self._channels:
            with suppress(DeviceError):
                channel.send(END)
        self.group.exchange.close()
        for channel in self._channels:
            channel.join()


# -- threads ---------------------------------------------------------------------------------------
class ThreadChannel:
    """A rank that is a thread."""

    def __init__(self, group: Group, build: Callable[[Group], Rank], overlap: int) -> None:
        self._inbox = queue.Queue[Message]()  # before Python 3.13 a SimpleQueue may wait on where its time is over
        arguments = (group, build, overlap, self._inbox)
        self._thread = threading.Thread(target=_run, args=arguments, name=f"rank {group.rank}", daemon=True)
        self._thread.start()

    def send(self, message: Message, data: Data = ()) -> None:
        """Queue it."""
        self._inbox.put(message if isinstance(message, int) else b"".join((message, *data)))

    @property
    def behind(self) -> int:
        """Those in its queue."""
        return self._inbox.qsize()

    def join(self) -> None:
        """Wait: a thread that does not end keeps nobody."""
        self._thread.join(ENDING_S)


def _run(group: Group, build: Callable[[Group], Rank], overlap: int, inbox: Inbox) -> None:
    """The thread of a rank."""
    rank: Rank | None = None
    try:
        rank = build(group)
        follow(rank, overlap, inbox)
    except BaseException as error:  # noqa: BLE001  said to all ranks, of which rank 0 raises it
        with suppress(DeviceError):
            group.exchange.fail(said(group.rank, error))
    finally:
        if rank is not None:
            with suppress(PolydraftError):
                rank.close()


def start_threads(size: int, capacity: int, patience_s: float, overlap: int, build: Callable[[Group], Rank]) -> Followers:
    """Start `size` - 1 ranks as threads; `build` makes the engine of one, in its thread. Only rank 0 loses patience: the others
    wait for as long as it does, and end with it."""
    exchanges = Exchange.of_threads(size, capacity, math.inf)
    exchanges[0].patience_s = patience_s
    first, *others = (Group(rank, size, exchange) for rank, exchange in enumerate(exchanges))
    with ExitStack() as unless_all:
        unless_all.callback(first.exchange.close)
        channels = [ThreadChannel(group, build, overlap) for group in others]
        unless_all.pop_all()
    return Followers(first, channels)


# -- processes -------------------------------------------------------------------------------------
class ProcessInbox:
    """Messages of rank 0 to this process: short ones by a mailbox, for which it looks for a while whenever it wants one; others,
    and what wakes it, by a pipe. It ends when there are no more, or rank 0 has gone."""

    def __init__(self, pipe: RawIOBase, exchange: Exchange, *, building: bool = False) -> None:
        """`building`: the process ends with the pipe, wherever it is, as long as this is set."""
        self.building = building
        self._pipe, self._exchange, self._box = pipe, exchange, exchange.mailbox(exchange.rank)
        self._long = queue.SimpleQueue[bytes]()
        self._came, self._ended = threading.Event(), False
        threading.Thread(target=self._deliver, name="messages", daemon=True).start()

    def get(self, *, timeout: float | None = None) -> Message:
        """As `Inbox`. `END` where there are no more."""
        begin, given = time.monotonic(), math.inf if timeout is None else timeout
        while True:
            ended = self._ended  # looked at first: what came before the end is in the mailbox
            message = self._box.take()
            if message is not None:
                self._box.asleep = False
                return self._long.get() if message == _BY_PIPE else message
            if ended:
                return END
            waited = time.monotonic() - begin
            if waited > given:
                self._box.asleep = False
                raise queue.Empty
            if waited < EAGER_S:
                time.sleep(0)
            elif not self._box.asleep:
                self._box.asleep = True  # and look once more: rank 0 may not have seen it
            else:
                self._came.wait(min(given - waited, NAP_S))
                self._came.clear()  # what came is in the mailbox; it may have been taken already, and is waited for no more

    def _deliver(self) -> None:
        """Take what comes by the pipe. Behind the last message rank 0 waits for nothing any more, and may be gone."""
        while message := read_message(self._pipe):
            if message != _WAKE:
                self._long.put(message)
            self._came.set()
        if self.building:  # which may take minutes, and nobody wants it any more
            os._exit(0)
        self._ended = True
        self._came.set()
        self._exchange.close()


class PatientPipe(RawIOBase):
    """A pipe that is written to, for as long as somebody reads at its other end."""

    def __init__(self, pipe: IO[bytes], bear: Callable[[Waiting], None]) -> None:
        """`pipe` has no buffer. `bear` is called while nothing is read, and raises what ends the waiting."""
        os.set_blocking(pipe.fileno(), False)
        self._pipe, self._bear, self._room = pipe, bear, select.poll()
        self._room.register(pipe, select.POLLOUT)

    def write(self, data: Any) -> int:
        """Write all of it. Raises as `bear`."""
        left, waiting = memoryview(data).cast("B"), Waiting()
        while left:
            count: int | None = self._pipe.write(left)
            if count is None:
                self._bear(waiting)
                self._room.poll(1000 * NAP_S)
            else:
                left, waiting = left[count:], Waiting()
        return len(data)


class ProcessChannel:
    """A rank that is a process. A thread watches it: one that ends before it should is a failure of all ranks."""

    def __init__(self, rank: int, exchange: Exchange, start: Mapping[str, Any], memory: int) -> None:
        self._rank, self._exchange, self._ending, self._box = rank, exchange, False, exchange.mailbox(rank)
        self._process = subprocess.Popen(  # noqa: S603  this interpreter, which Ctrl-C does not reach: rank 0 decides
            running(WORKER), stdin=subprocess.PIPE, bufsize=0, pass_fds=(memory,), start_new_session=True
        )
        assert self._process.stdin is not None, "it was asked for"
        self._pipe = PatientPipe(self._process.stdin, self._bear)
        self._lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name=f"rank {rank}", daemon=True)
        self._watcher.start()
        with ExitStack() as unless_said:
            unless_said.callback(self.drop)
            self._write(json.dumps({**start, "rank": rank, "memory": memory}).encode())
            unless_said.pop_all()

    def send(self, message: Message, data: Data = ()) -> None:
        """Put it into the mailbox, or where it is long write it into the pipe, and say so there."""
        if not isinstance(message, int):
            if message == END:
                self._ending = True
                self._write(END)
                return
            if data or len(message) > ROOM:
                self._write(message, *data)
                message = _BY_PIPE
        asleep = self._box.put(message)
        if asleep is None:
            waiting = Waiting()
            while (asleep := self._box.put(message)) is None:
                self._bear(waiting)
                time.sleep(EAGER_S)
        if asleep:
            self._write(_WAKE)

    def _bear(self, waiting: Waiting) -> None:
        self._exchange.bear(waiting, self._rank, "did not take what it was sent")

    def _write(self, *message: bytes | memoryview) -> None:
        """Write it into the pipe, behind its length."""
        try:
            with self._lock:
                write_message(self._pipe, *message)
        except (OSError, ValueError):  # it has ended, or is about to be waited for
            if not self._ending:
                self._watcher.join(SAYING_S)  # it knows better why
                self._exchange.raise_failure()
                self._exchange.fail(f"rank {self._rank} takes no more plans{self._exchange.last_clause(self._rank)}")
        except BaseException as error:  # such as Ctrl-C: what comes next would be read as the rest of this
            with suppress(DeviceError):
                self._exchange.fail(f"rank {self._rank} was sent a part of a message ({type(error).__name__})")
            raise

    @property
    def behind(self) -> int:
        """Those in its mailbox."""
        return self._box.behind

    def drop(self) -> None:
        """Have it end where nobody is going to use it: who watches a process would keep it for good."""
        self._ending = True
        self.join()

    def join(self) -> None:
        """Wait, and kill what does not end."""
        pipe = self._process.stdin
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
        await_end(self._process, ENDING_S)
        self._watcher.join()

    def _watch(self) -> None:
        try:
            if hasattr(os, "waitid"):
                self._watch_for_stops(self._process.pid)
        except ChildProcessError:
            pass
        except DeviceError:  # it would not end by itself
            self._process.kill()
        status = self._process.wait()
        if not self._ending:
            how, last = ending(status), self._exchange.last_clause(self._rank)
            with suppress(DeviceError):
                self._exchange.fail(f"rank {self._rank} (process {self._process.pid}) ended: {how}{last}")

    def _watch_for_stops(self, process: int) -> None:
        """Until it ends. The system says when it is stopped, also while others wait for it as long as it takes. Raises
        `DeviceError` where it does not go on soon, and `ChildProcessError` where somebody else has taken its end."""
        look, now = os.WNOWAIT, os.WNOHANG
        while (change := os.waitid(os.P_PID, process, os.WEXITED | os.WSTOPPED | look)) and change.si_code == os.CLD_STOPPED:
            waiting = Waiting()
            os.waitid(os.P_PID, process, os.WSTOPPED | now)
            while os.waitid(os.P_PID, process, os.WEXITED | os.WCONTINUED | now | look) is None:
                self._exchange.bear(waiting, self._rank, f"(process {process}) was stopped and did not go on")
                time.sleep(NAP_S)
            os.waitid(os.P_PID, process, os.WCONTINUED | now)


def start_processes(size: int, capacity: int, patience_s: float, start: Mapping[str, Any]) -> Followers:
    """Start `size` - 1 ranks as processes, as `start_threads` does. `start`: what they need to know besides how ranks meet, as
    JSON has it."""
    with ExitStack() as kept:  # gone from its folder, and kept by who maps it
        file = kept.enter_context(tempfile.TemporaryFile(dir=SHARED if os.access(SHARED, os.W_OK) else None))
        memory = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)  # a process without standard input would have it in that place
        kept.callback(os.close, memory)
        Exchange.prepare(memory, size, capacity)
        exchange = Exchange.over(memory, 0, size, capacity, patience_s)
        known = {**start, "size": size, "capacity": capacity}
        channels = list[ProcessChannel]()
        unless_all = kept.enter_context(ExitStack())
        for rank in range(1, size):
            channels.append(ProcessChannel(rank, exchange, known, memory))
            unless_all.callback(channels[-1].drop)
        unless_all.pop_all()
    return Followers(Group(0, size, exchange), channels)
