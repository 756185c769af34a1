"""What a draft policy has decided, as a file of JSON lines: who writes it, and the policy that decides so again.

A run of the same requests in the same order is then the same step by step: with `rejection` verification, whose sampled texts
depend on how many drafts were verified, and where tokens are within rounding of each other.

The first line says among which numbers of drafts the policy chose (`rungs`), and for how many slots. Each further one is a step
that differs from the one before it: its number, from 0 on, the drafts that it makes, and where requests are told apart the
windows of the step behind it (`rows` and `epochs` as `Windows` has them).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

import numpy as np

from polydraft import json_text
from polydraft.contracts.base import Limits
from polydraft.errors import ConfigError
from polydraft.host.draft_policy import DraftView, Windows
from polydraft.instruments.base import Instrument
from polydraft.instruments.output_file import writing
from polydraft.program.points import Stage

if TYPE_CHECKING:
    from polydraft.engine import Engine

SCHEMA: Final = "polydraft.draft_decisions/1"
MOST: Final = (1 << 31) - 1


class Decision(NamedTuple):
    """What was decided in a step and holds from there on."""

    step: int
    drafts: int
    windows: Windows | None

    def line(self) -> str:
        """As the file has it."""
        found: dict[str, Any] = {"step": self.step, "drafts": self.drafts}
        if self.windows is not None:
            found |= {"rows": self.windows.rows.tolist(), "epochs": self.windows.epochs.tolist()}
        return json.dumps(found) + "\n"


def head(rungs: Sequence[int], slots: int) -> str:
    """The first line."""
    return json.dumps({"schema": SCHEMA, "rungs": list(rungs), "slots": slots}) + "\n"


class DraftRecorder(Instrument):
    """Writes each step whose number of drafts, or whose windows, differ from those of the step before, as it is planned: a run
    that ends in an error can be repeated up to there."""

    name = "drafts"
    order = 60
    stages = ("plan",)

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._path = Path(path)
        self._file: TextIO | None = None
        self._step = -1
        self._last: tuple[int, Windows | None] = -1, None
        """Number of drafts, and windows, of the step that was planned last."""

    def built(self, engine: Engine) -> None:
        """Raises as `writing` does."""
        super().built(engine)
        self._write(head(engine.draft_policy.rungs, engine.resolved.limits.max_seqs))

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        """A step was planned, or there is none. Raises as `writing` does."""
        del stage, subject
        if result is None:
            return
        self._step += 1
        decided = result.num_drafts, getattr(self.engine.draft_policy, "windows", None)
        if decided[0] != self._last[0] or decided[1] is not self._last[1]:
            self._last = decided
            self._write(Decision(self._step, *decided).line())

    def _write(self, line: str) -> None:
        with writing(self._path):
            if self._file is None:
                self._file = self._path.open("w", encoding="utf-8", buffering=1)
            self._file.write(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class ReplayedDrafts:
    """The policy that decides as a file says, step by step; behind its last line as that says."""

    def __init__(self, rungs: Sequence[int], slots: int, decisions: Sequence[Decision]) -> None:
        self.rungs, self._slots = tuple(rungs), slots
        self.windows: Windows | None = None
        """What requests verify at most, as `DraftPolicy` says."""
        self._decisions, self._next = decisions, 0
        self._step, self._drafts = -1, self.rungs[-1]

    @classmethod
    def read(cls, path: Path) -> ReplayedDrafts:
        """Raises `ConfigError` where it cannot be read, or is no such file."""
        try:
            first, *lines = path.read_bytes().splitlines()
        except (OSError, ValueError) as error:
            got = getattr(error, "strerror", None) or "no lines"
            raise ConfigError(f"{path} cannot be read as draft decisions, got {got}; name a file of --record-drafts") from error
        known = _object(first, path, 1)
        rungs: Any = known.get("rungs")
        slots: Any = known.get("slots")
        if known.get("schema") != SCHEMA or not _whole(rungs, 255) or not rungs or not _whole([slots], MOST):
            raise ConfigError(f"{path} does not begin as draft decisions do, wanted {SCHEMA}; name a file of --record-drafts")
        decisions = [_decision(_object(line, path, i), f"{path}, line {i}", rungs, slots) for i, line in enumerate(lines, 2)]
        if any(one.step >= other.step for one, other in pairwise(decisions)):
            raise ConfigError(f"{path} has steps out of order, wanted ascending ones; name a file of --record-drafts")
        return cls(rungs, slots, decisions)

    def check(self, limits: Limits) -> None:
        """Raise `ConfigError` where an engine of these limits cannot decide so."""
        if self.rungs[-1] != limits.num_drafts:
            raise ConfigError(
                f"the draft decisions to replay are of an engine with at most {self.rungs[-1]} drafts, and this one has "
                f"{limits.num_drafts}; give --draft-tokens as it was then"
            )
        if self._slots != limits.max_seqs:
            raise ConfigError(
                f"the draft decisions to replay are of an engine with {self._slots} slots, and this one has {limits.max_seqs}; "
                "give --max-num-seqs as it was then"
            )

    def choose(self, view: DraftView) -> int:
        """As it was decided."""
        del view
        self._step += 1
        while self._next < len(self._decisions) and self._decisions[self._next].step <= self._step:
            _, self._drafts, self.windows = self._decisions[self._next]
            self._next += 1
        return self._drafts


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    return json_text.checked(line, dict, f"{path}, line {number}", "name a file of --record-drafts")


def _whole(values: object, most: int) -> bool:
    """Whether these are whole numbers from 0 to `most`."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= most for value in values)


def _decision(found: dict[str, Any], where: str, rungs: Sequence[int], slots: int) -> Decision:
    values: list[Any] = [found.get(name) for name in ("step", "drafts", "rows", "epochs")]
    step, drafts, rows, epochs = values
    limited = _whole(rows, rungs[-1] + 1) and _whole(epochs, MOST) and len(rows) == len(epochs) == slots and min(rows) > 0
    if not _whole([step], MOST) or drafts not in rungs or not (limited or rows is epochs is None):
        raise ConfigError(f"{where} is no draft decision of {slots} slots among {tuple(rungs)}; name a file of --record-drafts")
    windows = Windows(np.array(rows, np.int32), np.array(epochs, np.int32)) if limited else None
    return Decision(step, drafts, windows)
