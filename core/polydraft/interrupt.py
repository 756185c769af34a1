"""Handles Ctrl-C while work is under way: it is noted, and acted on where nothing is left half done.

`LLM` and the command line put it around the calls that must not break off in the middle. A handler that a program has installed
for itself is not replaced.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed since; a second press raises `KeyboardInterrupt` at once.

    Outside the main thread, and where SIGINT is ignored or already handled, nothing changes and the function
    returns False.
    """
    num_presses = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal num_presses
        del signum, frame
        num_presses += 1
        if num_presses > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: num_presses > 0
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
