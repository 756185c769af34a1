"""The server's log: one JSON object per line, without any text of prompts or answers unless that was requested.

Routes and the engine client write events to it. A log that cannot be written does not stop a request: lines are dropped and
counted.
"""

from __future__ import annotations

import json
import sys
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from polydraft.errors import ConfigError


class Log:
    """Events as lines. `file` "" is standard error. `lost`: lines that could not be written. Raises `ConfigError` for a file
    that cannot be opened."""

    def __init__(self, file: str = "", *, prompts: bool = False) -> None:
        self.prompts = prompts
        """Whether texts may be written."""
        self.lost = 0
        self._lock = threading.Lock()
        self._out: TextIO | None = None
        try:
            self._out = Path(file).open("a", encoding="utf-8", buffering=1) if file else None  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--log-file {file} cannot be written: {error.strerror}; choose another file") from error

    def tell(self, event: str, **fields: Any) -> None:
        """Write one line. Never raises."""
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": event, **fields}, default=str, ensure_ascii=False)
        out = self._out or sys.stderr
        with self._lock:
            try:
                out.write(line + "\n")
                out.flush()
            except (OSError, ValueError, AttributeError):  # a full disk, a closed stream, no stream at all
                self.lost += 1

    def texts(self, **fields: Any) -> dict[str, Any]:
        """Fields that hold text: themselves where that was asked for, else nothing."""
        return fields if self.prompts else {}

    def sentence(self, error: str, kind: str, status: int) -> str:
        """An error as it may be written: a message about a client's own mistake may repeat what it sent."""
        return error if self.prompts or status not in (400, 404) else kind

    def close(self) -> None:
        """Close the file."""
        if self._out is not None:
            try:
                self._out.close()
            except OSError:
                self.lost += 1
