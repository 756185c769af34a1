"""What an engine tells while it is built, which takes minutes for large models and slow devices.

The engine calls a function; commands show what it is told on a terminal or as lines, a server writes it into its log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal

Stage = Literal["weights", "graphs"]
Loading = Callable[[Stage, int, int], None]
"""Called with a stage, and how much of it is done, of how much: `weights` in bytes that are on the device, in the dtype that is
kept; `graphs` in sizes of steps that are captured. Called by the thread that builds the engine, which waits meanwhile."""
INTERVAL_S: Final = 10.0
"""Between lines that are kept, in a pipe or a log."""


def unheard(stage: Stage, done: int, total: int) -> None:
    """Nobody is told."""


def said(stage: Stage, done: int, total: int) -> str:
    """How far a stage is, for people."""
    if stage == "weights":
        return f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB of weights loaded"
    return f"{done} of {total} sizes of steps captured as graphs"


def at_intervals(told: Loading) -> Loading:
    """Pass on what is told, once in ten seconds at most, and nothing in the first ten."""
    last = time.monotonic()

    def passed_on(stage: Stage, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= INTERVAL_S:
            last = now
            told(stage, done, total)

    return passed_on
