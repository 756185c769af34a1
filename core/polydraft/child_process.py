"""Commands that start this interpreter once more, messages to it, its end, and what became of it in words.

A child imports what its parent imports. `python -m` and `python -c` put the working directory first on the path, where a folder
or a file may have the name of a module: a clone of this repository, or somebody's `queue.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from io import RawIOBase
from pathlib import Path
from typing import IO, Final

PATH: Final = "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep)\n"
"""First of all, before anything is looked for on the path; the two modules are there already."""
MODULE: Final = "sys.argv.pop(0); from runpy import run_module; run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
FRAME: Final = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""A line of what `faulthandler` writes."""
LIBRARY: Final = Path(os.__file__).parent
DUMPS: Final = ("Fatal Python error: ", "Current thread ", "Thread 0x")
"""How a thread's frames begin there."""


class Written(Exception):  # noqa: N818  no error of its own: the cause of one, which --debug shows
    """What a child wrote before it died."""


def running(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` as a program, as `python -m` would, on this process's path. It begins with the name, for who
    looks for it in a list of processes."""
    return [sys.executable, "-c", f"# {module}\n{PATH}{MODULE}", os.pathsep.join(sys.path), module, *arguments]


def executing(source: str, *arguments: str) -> list[str]:
    """The command that runs `source`, as `python -c` would, on this process's path."""
    return [sys.executable, "-c", PATH + source, os.pathsep.join(sys.path), *arguments]


def write_message(pipe: IO[bytes] | RawIOBase, *parts: bytes | memoryview) -> None:
    """Write these bytes as one message, which `read_message` reads at the other end: behind its length."""
    pipe.write(sum(map(len, parts)).to_bytes(8, "little"))
    pipe.writelines(parts)
    pipe.flush()


def read_message(pipe: RawIOBase) -> bytes:
    """The next message of a pipe; none where it is closed before its end, however it came to be closed. `pipe` has no buffer: a
    process that ends while a thread waits for a buffer's next bytes is aborted."""
    length = _read(pipe, 8)
    return _read(pipe, int.from_bytes(length, "little")) if length else b""


def _read(pipe: RawIOBase, size: int) -> bytes:
    """So many bytes; none where there are fewer."""
    found = bytearray()
    while len(found) < size:
        if not (piece := pipe.read(size - len(found))):
            return b""
        found += piece
    return bytes(found)


def await_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a process that was told to end, and kill it where it has not in so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ending(status: int) -> str:
    """How a process with this status ended: `exit status 3`, `SIGSEGV, Segmentation fault`."""
    try:
        return f"exit status {status}" if status >= 0 else f"{signal.Signals(-status).name}, {signal.strsignal(-status)}"
    except ValueError:  # a real-time signal, which has no name
        return f"signal {-status}"


def last_place(written: str) -> str:
    """Where a process was according to the last dump of `faulthandler` in what it wrote: `kernels.py:12, in linear`; "" where
    there is none. Of several threads, the one that the signal met; the innermost frame that is not Python's own library."""
    _, mark, dump = written.rpartition("Current thread ")
    frames = FRAME.findall(dump.partition("\n\n")[0]) if mark else []
    own = [frame for frame in frames if not Path(frame[0]).is_relative_to(LIBRARY) or "site-packages" in frame[0]]
    return next((f"{Path(file).name}:{line}, in {name}" for file, line, name in own or frames), "")


def last_words(written: str) -> str:
    """The last line that a process wrote before any dump of `faulthandler`; "" where it wrote nothing."""
    said = re.split("|".join(f"^{re.escape(mark)}" for mark in DUMPS), written, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""
