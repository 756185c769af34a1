"""Where the ranks of one host meet: a region of memory that all of them have, threads of one process or processes.

A collective of a device whose memory is the host's is one `swap`: each rank lays down what it brings, waits until all have, and
reads what the others brought. Ranks compare what they came for (`Note`) each time, so a rank that skips, repeats or resizes a
collective is an error on all of them and never a wrong sum; one that does not come is, too, once patience ends.

What a rank brings stays readable until it comes for the next collective but one: there are two slots a rank, taken in turn, and
who comes for the next has read all of this one.

The region also has a mailbox for each rank (`mailbox.py`), for what rank 0 tells it.

Between processes the region is a file that lies in memory. What of it is used has its memory before it is written: a process that
writes where there is none left is ended by a signal.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from polydraft.device import Array
from polydraft.errors import DeviceError
from polydraft.ranks import mailbox
from polydraft.ranks.mailbox import Mailbox

KINDS: Final = ("all_gather", "all_reduce", "argmax_pair", "broadcast")
"""The collectives."""
_MET: Final = (*KINDS, "start")
"""What ranks meet for, by the number that notes have for it."""
PATIENCE_S: Final = 10.0
"""Seconds that a rank waits for another one in a collective."""
_EAGER: Final = 200
"""Looks at the others before a waiting rank begins to sleep between them."""
_NAP_S: Final = 5e-5
_GAP_S: Final = 0.2
"""Seconds between two looks that count as such; what is longer was no waiting."""
_LINE, _TEXT, _WORDS = 8, 1024, 6
"""Words of a cache line; bytes of a sentence; words of a note."""
_CLOSED: Final = -1
_JUDGED: Final = 1 << 40
"""Count behind which ranks meet to find out why their devices gave up; launches that meet without the host are not counted."""
_JUDGES_S: Final = 2.0
"""Seconds that they wait for each other then."""
CLOSED: Final = "the ranks of this engine were closed"


class Note(NamedTuple):
    """What a rank came for: the collective, its launch (counted in the order in which a rank binds them), the step whose plan it
    runs (the first one of those with that plan), the launch length, and the bytes that it brings."""

    kind: str
    launch: int
    step: int
    n: int
    nbytes: int

    def __str__(self) -> str:
        if self.kind == "start":
            return "start (ranks wait for each other)"
        return f"{self.kind} (launch {self.launch} of the plan of step {self.step}, {self.n} rows, {self.nbytes} bytes)"


class Waiting:
    """How long somebody waits, without the time in which its own process was stopped (Ctrl-Z), as those of all ranks are then."""

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Until now. It is asked again and again."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, _GAP_S)
        self._looked = now
        return self._seconds


class Exchange:
    """One rank's view of the region. Not thread-safe: a rank's collectives come one after the other."""

    def __init__(self, memory: Any, rank: int, size: int, capacity: int, patience_s: float = PATIENCE_S) -> None:
        """`memory`: a writable buffer of `nbytes(size, capacity)` bytes, all 0 at first. `capacity`: bytes that a rank brings to
        a collective at most."""
        self.rank, self.size, self.capacity, self.patience_s = rank, size, capacity, patience_s
        words = _LINE * (1 + size)
        region = np.frombuffer(memory, np.uint8)
        head = region[: 8 * words].view(np.int64)
        self._state, self._arrived = head[:1].data, head[_LINE::_LINE]
        boxes, texts, notes = size * mailbox.NBYTES, size * _TEXT, 8 * size * 2 * _WORDS
        rest = region[8 * words :]
        self._boxes = rest[:boxes].reshape(size, mailbox.NBYTES)  # whole lines behind whole lines
        self._texts = rest[boxes : boxes + texts].reshape(size, _TEXT)
        self._notes = rest[boxes + texts :][:notes].view(np.int64).reshape(size, 2, _WORDS)
        room = _room(capacity)
        self._data = rest[boxes + texts + notes :][: size * 2 * room].reshape(size, 2, room)
        self._count = 0
        self._file: int | None = None

    @staticmethod
    def nbytes(size: int, capacity: int) -> int:
        """Bytes of the region of `size` ranks."""
        return 8 * _LINE * (1 + size) + 8 * size * 2 * _WORDS + size * (_TEXT + mailbox.NBYTES) + size * 2 * _room(capacity)

    @classmethod
    def prepare(cls, file: int, size: int, capacity: int) -> None:
        """Give an empty file the size of a region, and memory for all but what ranks bring to launches, which `reserve` does.
        Raises as that."""
        whole, room = cls.nbytes(size, capacity), _room(capacity)
        os.ftruncate(file, whole)
        slots = whole - size * 2 * room
        for begin, count in ((0, slots), *((slots + slot * room, _TEXT) for slot in range(size * 2))):
            _allocate(file, begin, count)

    @classmethod
    def over(cls, file: int, rank: int, size: int, capacity: int, patience_s: float = PATIENCE_S) -> Exchange:
        """The view of one rank of the region in a file that `prepare` has made. The file may be closed then."""
        found = cls(mmap.mmap(file, 0), rank, size, capacity, patience_s)
        found._file = os.dup(file)
        weakref.finalize(found, os.close, found._file)
        return found

    def reserve(self) -> None:
        """See to it that there is memory for what ranks bring to launches; whoever binds one that meets here asks for it. Raises
        `DeviceError` where there is not."""
        if self._file is not None:
            _allocate(self._file, 0, self.nbytes(self.size, self.capacity))
            self._file = None

    @classmethod
    def of_threads(cls, size: int, capacity: int, patience_s: float = PATIENCE_S) -> list[Exchange]:
        """The views of all ranks of one process."""
        memory = np.zeros(cls.nbytes(size, capacity), np.uint8)
        return [cls(memory, rank, size, capacity, patience_s) for rank in range(size)]

    def swap(self, note: Note, mine: Array) -> list[Array]:
        """Bring `mine`, and return what each rank has brought, in the same shape; read it before the next call. Raises
        `DeviceError`, on every rank, where ranks came for different things, one does not come, or one has failed."""
        if mine.nbytes > self.capacity:
            self.fail(f"rank {self.rank} brought {mine.nbytes} bytes to {note}, wanted at most {self.capacity}")
        return self._swap(note, mine, self.patience_s)

    def share(self, mine: Array) -> list[Array]:
        """Bring something that building needs, and return copies of what each rank has brought. Raises as `swap` does."""
        return [one.copy() for one in self.swap(Note("start", 0, 0, 0, mine.nbytes), mine)]

    def judge(self, note: Note, late: int, vain: str = "") -> None:
        """Launches of this rank's device, which meet without the host, have given up in `note`, waiting for rank `late`: find
        out, with the hosts of all ranks that did, who came for something else or not at all. `vain`: what is said where all hosts
        come, "": that `late` did not. Whose patience has no end leaves it to the others to lose theirs. Raises `DeviceError`,
        always, and the same one on all that met."""
        self.raise_failure()
        self._count = _JUDGED
        mine = np.array([late, self.patience_s], np.float64)
        found = self._swap(note, mine, math.inf if math.isinf(self.patience_s) else min(self.patience_s, _JUDGES_S), late)
        late, patience_s = int(found[0][0]), min(patience_s for _, patience_s in found)
        within = "" if math.isinf(patience_s) else f" within {patience_s:g} s"
        self.fail((vain or f"rank {late} did not come to {note}") + within)

    @property
    def judging(self) -> bool:
        """Whether a rank has come to `judge`, for those whose launches would wait on without it."""
        return bool((self._arrived > _JUDGED).any())

    def meet(self, stage: int) -> None:
        """Wait, for as long as it takes, until all ranks have come to the same stage of being built. Raises as `swap` does."""
        self._swap(Note("start", stage, 0, 0, 0), np.empty(0, np.uint8), math.inf)

    def agree(self, reason: str, flag: bool) -> tuple[str, bool]:
        """Wait, for as long as it takes, until all ranks have tried something, such as to read weights. `reason`: why this rank
        could not, "" where it could. Returns the reason of the first that could not, and whether any rank brought the flag, the
        same on all ranks. Raises as `swap` does."""
        mine, said = np.zeros(_TEXT, np.uint8), np.frombuffer(reason.encode()[: _TEXT - 1], np.uint8)
        mine[0], mine[1 : 1 + len(said)] = flag, said
        brought = self._swap(Note("start", 0, 0, 0, mine.nbytes), mine, math.inf)
        reasons = [_text(one[1:]) for one in brought]
        return next(filter(None, reasons), ""), any(one[0] for one in brought)

    def everywhere(self, so: bool) -> bool:
        """Whether something is so on all ranks. Waits and raises as `agree` does."""
        return not self.agree("", not so)[1]

    def least(self, count: int) -> int:
        """The least number that a rank has brought. Waits and raises as `agree` does."""
        mine = np.array([count], np.int64)
        return int(min(self._swap(Note("start", 0, 0, 0, mine.nbytes), mine, math.inf))[0])

    def _swap(self, note: Note, mine: Array, patience_s: float, suspect: int = 0) -> list[Array]:
        self._count += 1
        slot = self._count % 2
        self._data[self.rank, slot, : mine.nbytes] = np.ascontiguousarray(mine).view(np.uint8).reshape(-1)
        self._notes[self.rank, slot] = (_MET.index(note.kind), *note[1:], self._count)
        self._arrived[self.rank] = self._count  # last, and in one word: who sees it sees the rest
        self._await_all(note, patience_s, suspect)
        self._compare(slot)
        found = self._data[:, slot, : mine.nbytes]
        return [one.view(mine.dtype).reshape(mine.shape) for one in found]

    def _await_all(self, note: Note, patience_s: float, suspect: int) -> None:
        """Of several that do not come the `suspect` is named, else the first: the others may still wait for that one."""
        waiting, looks = Waiting(), 0
        while (self._arrived < self._count).any():
            self.raise_failure()
            looks += 1
            time.sleep(0 if looks < _EAGER else _NAP_S)
            if waiting.seconds() > patience_s:
                came = self._arrived >= self._count
                late = int(np.argmin(came)) if came[suspect] else suspect
                counted = self._count <= _JUDGED
                which, last = (f"collective {self._count}, ", self.last_clause(late)) if counted else ("", "")
                self.fail(f"rank {late} did not come to {which}{note}, within {self.patience_s:g} s{last}")

    def _compare(self, slot: int) -> None:
        notes = self._notes[:, slot]
        other = (notes != notes[0]).any(axis=1)
        if other.any():
            rank = int(np.argmax(other))
            which = f"to collective {self._count} " if self._count <= _JUDGED else ""
            self.fail(
                f"rank {rank} came {which}for {self._note(rank, slot)}, rank 0 for {self._note(0, slot)}, wanted the same on all "
                "ranks"
            )

    def _note(self, rank: int, slot: int) -> Note:
        kind, launch, step, n, nbytes, _ = self._notes[rank, slot].tolist()
        return Note(_MET[kind], launch, step, n, nbytes)

    def last_clause(self, rank: int) -> str:
        """The collective that a rank came to last, as the end of a sentence; "" where its host came to none of a step, as where
        launches meet without it."""
        count = int(self._arrived[rank])
        note = self._note(rank, count % 2)
        return f"; its last was collective {count}, {note}" if 0 < count <= _JUDGED and note.kind != "start" else ""

    def bear(self, waiting: Waiting, rank: int, what: str) -> None:
        """Between two looks at whether a rank has done something: raises `DeviceError`, on every rank, where one has failed, or
        this one has waited for too long. `what`: what the other one did not do."""
        self.raise_failure()
        if waiting.seconds() > self.patience_s:
            self.fail(f"rank {rank} {what} within {self.patience_s:g} s{self.last_clause(rank)}")

    def mailbox(self, rank: int) -> Mailbox:
        """The one of messages to that rank."""
        return Mailbox(self._boxes[rank])

    # -- failures ----------------------------------------------------------------------------------
    def fail(self, sentence: str) -> None:
        """Say to all ranks why they end, unless it was said already, and raise it. Any rank may, and whoever watches one."""
        if not self._state[0]:
            text = np.frombuffer(sentence.encode()[:_TEXT], np.uint8)
            self._texts[self.rank] = 0
            self._texts[self.rank, : len(text)] = text
            self._state[0] = self.rank + 1
        self.raise_failure()

    def close(self) -> None:
        """Let no rank wait any longer: the engine is closed. What failed before stays said."""
        if not self._state[0]:
            self._state[0] = _CLOSED

    @property
    def failure(self) -> str:
        """Why the ranks end, "" while they do not."""
        state = self._state[0]
        if state == 0:
            return ""
        if state == _CLOSED:
            return CLOSED
        return f"{_text(self._texts[state - 1])}; every rank ends here, start the engine again"

    def raise_failure(self) -> None:
        """Raise `DeviceError` where a rank has failed, or the engine was closed."""
        if self._state[0]:
            raise DeviceError(self.failure)


def _allocate(file: int, begin: int, count: int) -> None:
    """Have memory for a stretch of a file, where the system can say that there is none."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, begin, count)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # a place that cannot tell
            return
        there = os.fstatvfs(file)
        wanted, free = (nbytes / 2**20 for nbytes in (count, there.f_bavail * there.f_frsize))
        raise DeviceError(
            f"ranks meet in shared memory, of which they want {wanted:.1f} MiB, and {free:.1f} MiB are free (/dev/shm); give it "
            "more, in a container by --shm-size, or lower --max-num-seqs or --max-batched-tokens"
        ) from None


def _room(capacity: int) -> int:
    """Bytes of a slot: for what a rank brings to a collective, or to `agree`."""
    return max(capacity, _TEXT)


def _text(stored: Array) -> str:
    """A sentence that a rank has left, of which zeros follow."""
    return bytes(stored).rstrip(b"\0").decode(errors="replace")


@dataclass
class Group:
    """One rank of an engine, as a backend's collectives are made for it."""

    rank: int
    size: int
    exchange: Exchange
    """Where ranks of one host meet. A backend that has a way of its own between devices needs it only to find the others."""
    num_bound: int = field(default=0)
    """Collectives that this rank has bound, which number its launches."""

    def next_launch(self) -> int:
        """The number of a launch that is being bound."""
        launch = self.num_bound
        self.num_bound += 1
        return launch

    def swapper(self, kind: str, step: Array) -> Callable[[int, Array], Sequence[Array]]:
        """`swap(n, mine)` of a launch that is being bound; `step` [1] int32 is read when it runs. One rank meets itself. Raises
        `DeviceError` where there is no memory to meet in."""
        launch, exchange = self.next_launch(), self.exchange
        exchange.reserve()

        def swap(n: int, mine: Array) -> Sequence[Array]:
            return exchange.swap(Note(kind, launch, int(step[0]), n, math.prod(mine.shape) * mine.itemsize), mine)

        return swap
