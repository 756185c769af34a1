"""Shows the progress of tests that take minutes: a line on standard error now and then, past pytest's capture of output.

Tests marked `deep` call `Progress`; the session passes it pytest's configuration when it begins. It does not change what a test
does, and prints nothing in tests that end soon. `timeout_s` says how long this session lets a test take.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import Any

session: Any = None
"""pytest's configuration of the running session."""


def timeout_s() -> float:
    """Seconds that a test of the running session may take, unless it says otherwise itself."""
    return float(session.getoption("timeout") or session.getini("timeout"))


class Progress:
    """Counts what a test has done; `total` is how much it will do."""

    def __init__(self, what: str, total: int, every_s: float = 20.0) -> None:
        self._what, self._total, self._every_s = what, total, every_s
        self._done, self._begin = 0, time.monotonic()
        self._said = self._begin

    def tick(self) -> None:
        """One more is done; say so if nothing was said for a while."""
        self._done += 1
        now = time.monotonic()
        if now - self._said >= self._every_s:
            self._said = now
            say(f"{self._what}: {self._done:,} of {self._total:,} in {now - self._begin:.0f} s")


def say(text: str) -> None:
    """A line on the session's own standard error."""
    capture = session.pluginmanager.getplugin("capturemanager") if session is not None else None
    with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
        print(f"\n{text}", file=sys.stderr, flush=True)  # noqa: T201  it is what this module is for
