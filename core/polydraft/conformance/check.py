"""One check of the kit: its id, what it needs of a backend, and the tally through which it compares.

The check modules build checks, the runner runs them. A check states what it expects through its tally and does not decide its own
outcome: a wrong comparison, an exception and an empty tally are distinguished here, the same way for every level.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polydraft.conformance.outcomes import Outcome, Result
from polydraft.contracts import REGISTRY
from polydraft.contracts.compare import Comparison, Headroom
from polydraft.contracts.features import with_base

if TYPE_CHECKING:
    from polydraft.conformance.target import Target

MOST_FAILURES = 3
"""Sentences of one check that are kept; the rest is counted."""


class Unsupported(Exception):  # noqa: N818  no error: the backend does not claim this
    """Raised by a check that finds, while it runs, that the backend does not declare what it needs; says what that is."""


class Unseen(Exception):  # noqa: N818  no error: nobody can look
    """Raised by a check that has no way to see, from outside of this backend, what it is about: `what: why not`."""


class Wrong(Exception):  # noqa: N818  no error of the kit: what it says is wrong with the backend
    """Raised where a check can say that something is wrong and cannot go on; a sentence."""


@dataclass
class Tally:
    """What one check compared, and what was wrong."""

    comparisons: int = 0
    failures: list[str] = field(default_factory=list)
    headroom: Headroom | None = None
    like: set[str] | None = None
    """Mutants that leave what every comparison found that failed; None before the first."""
    near_ties: int = 0
    """Texts in fewer bits that differ at a close choice, or behind the first one, up to which they were compared."""
    cases: int = 0
    """Cases of a kernel that were held against its golden."""

    def equal(self, what: str, got: Any, wanted: Any) -> None:
        """Exactly equal, shapes included; NaN equals NaN. Counts every element."""
        got_a, wanted_a = np.asarray(got), np.asarray(wanted)
        self.comparisons += max(int(wanted_a.size), 1)
        if got_a.shape != wanted_a.shape:
            self.failures.append(_of_another_shape(what, got_a, wanted_a))
            return
        nan = wanted_a.dtype.kind == "f" and got_a.dtype.kind == "f"
        same = (got_a == wanted_a) | (np.isnan(got_a) & np.isnan(wanted_a) if nan else False)
        if not np.all(same):
            index = tuple(int(i) for i in np.argwhere(~np.asarray(same))[0]) if got_a.ndim else ()
            where = f"{what}[{', '.join(map(str, index))}]" if index else what
            self.failures.append(f"{where} is {got_a[index]!s}, wanted {wanted_a[index]!s}")

    def same_bits(self, what: str, got: Any, wanted: Any) -> None:
        """Equal to the bit, shapes included: zeros of either sign and NaN are told apart. Counts every element."""
        got_a, wanted_a = np.ascontiguousarray(got), np.ascontiguousarray(wanted)
        self.comparisons += max(int(wanted_a.size), 1)
        if got_a.shape != wanted_a.shape:
            self.failures.append(_of_another_shape(what, got_a, wanted_a))
            return
        width = wanted_a.dtype.itemsize
        differ = (got_a.reshape(-1).view(np.uint8) != wanted_a.reshape(-1).view(np.uint8)).reshape(-1, width).any(axis=1)
        if differ.any():
            index = tuple(int(i) for i in np.unravel_index(int(differ.argmax()), wanted_a.shape))
            where = f"{what}[{', '.join(map(str, index))}]"
            self.failures.append(f"{where} is {got_a[index]!s}, wanted the very bits of {wanted_a[index]!s}")

    def no_error(self, who: str, error: str) -> None:
        """A request ended in no error; `who` says which."""
        self.comparisons += 1
        if error:
            self.failures.append(f"{who} ended in an error: {error}")

    def true(self, statement: str, holds: bool) -> None:
        """`statement` says what should be the case."""
        self.comparisons += 1
        if not holds:
            self.failures.append(f"wanted: {statement}")

    def compared(self, comparison: Comparison, replay: str = "") -> None:
        """File a comparison of the harness; `replay` is what brings it about again."""
        self.cases += 1
        self.comparisons += comparison.elements
        if not comparison.ok:
            self.failures.append(comparison.describe() + replay)
            self.like = set(comparison.like) if self.like is None else self.like & set(comparison.like)
        near = comparison.headroom
        if near is not None and (self.headroom is None or near.ratio > self.headroom.ratio):
            self.headroom = near

    def raises(self, kind: type[Exception], what: str, call: Callable[[], object]) -> None:
        """`call` raises `kind`."""
        self.comparisons += 1
        try:
            call()
        except kind:
            return
        except Exception as error:  # noqa: BLE001  whatever else it raises is what is wrong
            self.failures.append(f"{what} raised {type(error).__name__}: {error}, wanted {kind.__name__}")
            return
        self.failures.append(f"{what} raised nothing, wanted {kind.__name__}")


def _of_another_shape(what: str, got: Any, wanted: Any) -> str:
    """Where two lists part, or both whole."""
    if got.ndim == wanted.ndim == 1:
        common = min(len(got), len(wanted))
        parted = np.flatnonzero(got[:common] != wanted[:common])
        if len(parted):
            at = int(parted[0])
            return f"{what}[{at}] is {got[at]}, wanted {wanted[at]} ({len(got)} entries, wanted {len(wanted)})"
    return f"{what} has {_brief(got)}, wanted {_brief(wanted)}"


def _brief(value: Any) -> str:
    text = np.array2string(np.asarray(value), threshold=12).replace("\n", " ") if np.ndim(value) else repr(value)
    return f"shape {np.shape(value)}: {text}"


@dataclass(frozen=True)
class Check:
    """One check. `id` begins with its level. `needs` names capabilities that must be declared; `kernel` a contract or composite
    that must be offered. `features`: those of which it proves something; a claim for all of them needs it to pass.

    `optional`: a backend may leave the kernel out, whatever it claims."""

    id: str
    run: Callable[[Target, Tally], None]
    needs: tuple[str, ...] = ()
    kernel: str = ""
    optional: bool = False
    features: tuple[str, ...] = ("dense",)
    basic: bool = True
    """Whether `basic` contains it, too, where it contains its level."""

    @property
    def level(self) -> str:
        return self.id.partition("/")[0]

    def result(self, target: Target) -> Result:
        """Run it, catching everything."""
        start = time.perf_counter()
        tally = Tally()
        outcome, message = self._outcome(target, tally)
        near = tally.headroom
        return Result(
            self.id, outcome, tally.comparisons, round(time.perf_counter() - start, 4), message, self.kernel,
            None if near is None else round(near.ratio, 6), "" if near is None else near.describe(), tally.near_ties,
            cases=tally.cases, like=tuple(sorted(tally.like or ())),
        )  # fmt: skip

    def _outcome(self, target: Target, tally: Tally) -> tuple[Outcome, str]:
        lacking = self._lacking(target)
        if lacking is not None:
            return lacking
        try:
            self.run(target, tally)
        except Unsupported as reason:
            return "unsupported", str(reason)
        except Unseen as reason:
            return "unseen", str(reason)
        except Wrong as sentence:
            return "fail", str(sentence)
        except Exception as error:  # noqa: BLE001  whatever a backend raises is its outcome
            return _blame(error)
        if tally.failures:
            rest = len(tally.failures) - MOST_FAILURES
            kept = tally.failures[:MOST_FAILURES] + ([f"and {rest} more"] if rest > 0 else [])
            return "fail", "; ".join(kept)
        if tally.comparisons == 0:
            return "error", "the check compared nothing, which proves nothing"
        return "pass", ""

    def _lacking(self, target: Target) -> tuple[Outcome, str] | None:
        for capability in self.needs:
            if not getattr(target.info.capabilities, capability):
                return "unsupported", target.info.withdrawn.get(capability) or f"capability {capability} is not declared"
        if self.kernel and self.kernel not in target.offered:
            if self.optional or "dense" not in self.features:
                return "unsupported", f"{self.kernel} is not offered"
            return "fail", f"{self.kernel} is not offered, and every engine needs it; implement it or enable a kernel pack"
        wanted = () if self.kernel else with_base(self.features)[1:]  # without `dense` an engine says itself what it lacks
        missing = [contract.name for contract in REGISTRY.of(wanted) if contract.name not in target.offered]
        if missing:
            return "unsupported", f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not offered"
        return None


_KIT = Path(__file__).parent


def _is_anybodys(value: object) -> bool:
    """Whether an object is of core's making, or of Python's, and no backend's."""
    return type(value).__module__.partition(".")[0] in ("polydraft", "builtins", "numpy", "types")


def _blame(error: Exception) -> tuple[Outcome, str]:
    """An exception whose innermost frame lies in the kit is the kit's, save where an object of the backend's lacks a member;
    every other one is the backend's, and so is one of the harness, which handles what the backend returned."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = Path(frames[-1].filename) if frames else _KIT
    where = f"{inner.name}:{frames[-1].lineno}" if frames else "nowhere"
    if cause := traceback.extract_tb(error.__cause__.__traceback__ if error.__cause__ else None):
        where += f" because of {Path(cause[-1].filename).name}:{cause[-1].lineno}"  # what waits raises what a launch did
    if inner.parent != _KIT or inner.name == "harness.py":
        return "fail", f"{type(error).__name__}: {error} (raised in {where})"
    if isinstance(error, AttributeError) and not _is_anybodys(error.obj):
        return "fail", f"{type(error.obj).__name__} has no {error.name}; add it (see polydraft.backend and polydraft.device)"
    return "error", f"{type(error).__name__}: {error} (raised in {where})"
