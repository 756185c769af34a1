"""The server's log: one JSON object per line, without any text of prompts or answers unless that was requested.

Routes and the engine client tell it events; a thread of its own writes them, since whoever reads the other end of a pipe may
stop reading. A log that cannot be written, or not in time, does not stop a request: lines are dropped and counted.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import sys
import threading
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from polydraft.errors import ConfigError

MOST_WAITING = 10_000
"""Lines that wait to be written, at most."""
LAST_S = 2.0
"""Seconds that closing waits for them to be written."""


class Log:
    """Events as lines. `file` "" is standard error. `lost`: lines that could not be written. Raises `ConfigError` for a file
    that cannot be opened, and for a named pipe that nobody reads."""

    def __init__(self, file: str = "", *, prompts: bool = False) -> None:
        self.prompts = prompts
        """Whether texts may be written."""
        self.lost = 0
        self._out = _opened(file)
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()

    def tell(self, event: str, **fields: Any) -> None:
        """Have one line written. Never raises and never waits."""
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": event, **fields}, default=str, ensure_ascii=False)
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.lost += 1

    def _write(self) -> None:
        """Past Python's own buffers: at exit they would wait for a write that does not end."""
        for line in iter(self._lines.get, None):
            data = f"{line}\n".encode(errors="backslashreplace")
            try:
                while data:
                    data = data[os.write(self._out, data) :]
            except OSError:  # a full disk, a closed stream, no stream at all
                self.lost += 1

    def texts(self, **fields: Any) -> dict[str, Any]:
        """Fields that hold text: themselves where that was asked for, else nothing."""
        return fields if self.prompts else {}

    def sentence(self, error: str, kind: str, status: int) -> str:
        """An error as it may be written: a message about a client's own mistake may repeat what it sent."""
        return error if self.prompts or status not in (400, 404) else kind

    def close(self) -> None:
        """Write what waits, for `LAST_S` at most, and close the file."""
        with suppress(queue.Full):
            self._lines.put_nowait(None)
        self._writer.join(LAST_S)
        if self._writer.is_alive():
            self.lost += self._lines.qsize()
        elif self._out >= 0:
            with suppress(OSError):
                os.close(self._out)


def _opened(file: str) -> int:
    """A descriptor of the log's own; -1 where standard error is closed."""
    if not file:
        try:
            return os.dup(sys.stderr.fileno())
        except (OSError, ValueError, AttributeError):
            return -1
    try:
        out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        why = "nobody reads this pipe" if error.errno == errno.ENXIO else error.strerror
        raise ConfigError(f"--log-file {file} cannot be written: {why}; choose another file") from error
    os.set_blocking(out, True)
    return out
