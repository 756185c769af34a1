"""Where a call came from: the nearest frame that is neither the checker nor a loop that walks a step program.

The checker takes a trace at every operation and only words it when there is something to say. It keeps no frame alive.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import NamedTuple

from polydraft.instruments.sanitize.hazards import Operation

_PACKAGE = Path(__file__).parents[2]
_PASSING = ("instruments", "program/points.py", "program/program.py", "step/graphs.py", "kernel_table.py")
_SKIPPED = (contextlib.__file__, *(str(_PACKAGE / name) for name in _PASSING))
"""The checker itself, other instruments, and what only passes calls on: who called *them* is what somebody wants to know."""


class Trace(NamedTuple):
    """One operation, before anybody has asked for its words."""

    what: str
    where: str
    step: int | None
    file: str
    line: int

    @property
    def operation(self) -> Operation:
        """The same for people."""
        path = Path(self.file)
        inside = path.relative_to(_PACKAGE.parent).parts if _PACKAGE in path.parents else path.parts[-3:]
        return Operation(self.what, self.where, f"{'/'.join(inside)}:{self.line}", self.step)


def caller() -> tuple[str, int]:
    """File and line of the call that brought the checker here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
