"""Processes that are one rank each in checks of collectives, for backends of which a process can be no more than that.

`collective_checks.py` has jobs done by them. Rank 0 is the process of the kit; the others are started when they are first wanted,
and run this module. A job and what it leaves travel as JSON over pipes; ranks meet in a file that all map.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from polydraft.backend import Collectives
from polydraft.child_process import await_end, ending, read_message, running, write_message
from polydraft.conformance.rank_jobs import JOBS, Found
from polydraft.conformance.target import Opened, Target
from polydraft.errors import DeviceError, PolydraftError
from polydraft.host.followers import ENDING_S, SHARED
from polydraft.json_text import parsed
from polydraft.ranks import Exchange, Group

MODULE: Final = "polydraft.conformance.rank_processes"


def processes_of(target: Target) -> RankProcesses:
    """Those of a target, which live as long as it."""
    found = _ALL.get(target)
    if found is None:
        found = _ALL[target] = RankProcesses(
            {
                "backend": target.info.name, "device": target.device_spec, "files": target.files, "packs": target.packs,
                "variants": target.uses_variants, "allow_cpu_fallback": target.allow_cpu_fallback,
            },
            Rank(target, 0),
        )  # fmt: skip
    return found


_ALL: weakref.WeakKeyDictionary[Target, RankProcesses] = weakref.WeakKeyDictionary()


_MEETINGS: Final = itertools.count()


class Meeting(NamedTuple):
    """Where the ranks of one group meet. `number`: which meeting it is; the name of a file that is closed may come again."""

    number: int
    file: str
    size: int
    capacity: int
    patience_s: float


class Rank:
    """One rank of groups that follow one another, in this process. Each group begins with a fresh device: the last one may have
    ended with an error that its device keeps."""

    def __init__(self, target: Target, rank: int) -> None:
        self._plugins, self._rank = target.plugins, rank
        self._target = weakref.ref(target)
        self._opened = self._open()
        self._met: tuple[Meeting, Collectives] | None = None
        self._exchange: Exchange | None = None
        self._alone = False

    def do(self, meeting: Meeting, job: str, values: Mapping[str, Any]) -> Found | Exception:
        """What a job leaves this rank with, or raises."""
        try:
            if self._met is None or self._met[0] != meeting:
                self._met = meeting, self._join(meeting)
            return JOBS[job](self._rank, self._opened, self._met[1], **values)
        except Exception as error:  # noqa: BLE001  looked at by the check
            return error

    def _join(self, meeting: Meeting) -> Collectives:
        """Wait, for as long as it takes, until all ranks have a device: to open one takes longer than ranks wait in checks."""
        with Path(meeting.file).open("r+b") as file:
            exchange = Exchange.over(file.fileno(), self._rank, meeting.size, meeting.capacity, meeting.patience_s)
        self._exchange = exchange
        if self._alone:
            exchange.close()
        try:
            self.close()
            self._opened = self._open()
        except PolydraftError as error:
            exchange.fail(str(error))
        exchange.meet(0)
        return self._plugins.collectives(self._opened.device, Group(self._rank, meeting.size, exchange))

    def _open(self) -> Opened:
        target = self._target()
        assert target is not None, "checks are of a target"
        return target.open(dtype="f32", rank=self._rank)

    def leave(self) -> None:
        """Wait for no other rank any more, on another thread than this rank's: rank 0 has gone."""
        self._alone = True  # first of all: another exchange may be joined meanwhile
        if self._exchange is not None:
            self._exchange.close()

    def close(self) -> None:
        """Close its device."""
        self._opened.device.close()


class RankProcesses:
    """Rank 0 and the processes of the others."""

    def __init__(self, target: Mapping[str, Any], first: Rank) -> None:
        self._target, self._first, self._others = target, first, list[Other]()
        self._file = ExitStack()
        self._meeting: Meeting | None = None
        weakref.finalize(self, _end, first, self._others, self._file)

    def run(self, size: int, capacity: int, patience_s: float, job: str, values: Mapping[str, Any]) -> list[Found | Exception]:
        """What a job leaves each of `size` ranks with. Ranks stay together while they are as many and none raises."""
        while len(self._others) < size - 1:
            self._others.append(Other(self._target, len(self._others) + 1))
        others = self._others[: size - 1]
        if self._meeting is None or self._meeting[2:] != (size, capacity, patience_s):
            self._file.close()
            made = tempfile.TemporaryFile(dir=SHARED if SHARED.is_dir() else None)  # noqa: SIM115  closed with this object
            file = self._file.enter_context(made)
            number = file.fileno()
            Exchange.prepare(number, size, capacity)
            name = f"/proc/{os.getpid()}/fd/{number}"  # no other name, which could be left behind
            self._meeting = Meeting(next(_MEETINGS), name, size, capacity, patience_s)
            exchange = Exchange.over(number, 0, size, capacity)
            for one in others:
                one.meet_in(exchange)
        asked = self._meeting, job, values
        for one in others:
            one.ask(asked)
        found = [self._first.do(*asked), *(one.answer() for one in others)]
        if any(isinstance(one, Exception) for one in found):
            self._meeting = None
        for number, one in enumerate(others):
            if one.ended:
                one.end()
                self._others[number] = Other(self._target, number + 1)
        return found


def _end(first: Rank, others: list[Other], file: ExitStack) -> None:
    for one in others:
        one.end()
    file.close()
    with suppress(Exception):  # what a check has broken may not close
        first.close()


class Other:
    """The process of a rank beside rank 0. A thread watches it: one that ends is a failure of all ranks, which wait without end
    until each has a device."""

    def __init__(self, target: Mapping[str, Any], rank: int) -> None:
        out, inside = os.pipe()
        start = json.dumps({"target": target, "rank": rank})
        self._process = subprocess.Popen(  # noqa: S603  this interpreter, this module
            running(MODULE, start, str(inside)), stdin=subprocess.PIPE, pass_fds=(inside,)
        )
        os.close(inside)
        assert self._process.stdin is not None, "it was asked for"
        self._pipe = self._process.stdin
        self._rank, self._answers = rank, FileIO(out)
        self._exchange: Exchange | None = None
        self._watcher = threading.Thread(target=self._watch, name=f"process of rank {rank}", daemon=True)
        self._watcher.start()

    def meet_in(self, exchange: Exchange) -> None:
        """Say there that the process has ended, if it does or has done so already."""
        self._exchange = exchange
        if self.ended:
            self._say(exchange)

    @property
    def ended(self) -> bool:
        """Whether the process has."""
        return self._process.poll() is not None

    def _watch(self) -> None:
        self._process.wait()
        if self._exchange is not None:
            self._say(self._exchange)

    def _say(self, exchange: Exchange) -> None:
        with suppress(DeviceError):
            exchange.fail(self._sentence())

    def _sentence(self) -> str:
        return f"the process of rank {self._rank} ended: {ending(self._process.wait())}"

    def ask(self, job: Any) -> None:
        """Have a job done."""
        with suppress(OSError):  # it has ended, which is said where its answer is wanted
            write_message(self._pipe, json.dumps(job).encode())

    def answer(self) -> Found | Exception:
        """What that left it with, or raised. A process that has ended is an error."""
        message = read_message(self._answers)
        if not message:
            return DeviceError(self._sentence())
        said = parsed(message)
        if "error" in said:
            return DeviceError(said["error"]) if said["device"] else RuntimeError(said["error"])
        return {name: _array(*one) for name, one in said["left"].items()}

    def end(self) -> None:
        """Let it end, and see to it that it does."""
        with suppress(OSError):
            self._pipe.close()
        await_end(self._process, ENDING_S)
        self._watcher.join()
        self._answers.close()


def _array(dtype: str, shape: list[int], text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)


def _said(found: Found | Exception) -> dict[str, Any]:
    """What `Other.answer` reads."""
    if isinstance(found, Exception):
        device = isinstance(found, DeviceError)
        return {"error": str(found) if device else repr(found), "device": device}
    return {"left": {name: (one.dtype.str, one.shape, base64.b64encode(one.tobytes()).decode()) for name, one in found.items()}}


def main(start: str, inside: str) -> None:
    """Do the jobs that come over standard input, until it is closed: also by the end of rank 0 in the middle of a job, in which
    this rank would wait for it without end."""
    said = parsed(start)
    target = Target(**said["target"])
    rank, jobs = Rank(target, said["rank"]), queue.SimpleQueue[bytes]()

    def deliver() -> None:
        pipe = FileIO(0, closefd=False)
        while message := read_message(pipe):
            jobs.put(message)
        rank.leave()
        jobs.put(b"")

    threading.Thread(target=deliver, name="jobs", daemon=True).start()
    with suppress(BrokenPipeError), os.fdopen(int(inside), "wb") as answers:
        while message := jobs.get():
            meeting, job, values = parsed(message)
            write_message(answers, json.dumps(_said(rank.do(Meeting(*meeting), job, values))).encode())
    rank.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
