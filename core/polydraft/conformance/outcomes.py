"""What a check may come to, and how the levels of checks make up a profile.

The runner files results and the report keeps them; `verdict.py` judges them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Outcome = Literal["pass", "fail", "error", "unsupported", "unseen", "waived"]
"""`error`: the kit failed, not the backend. `unsupported`: a capability or an optional kernel that the backend does not declare;
never a pass. `unseen`: declared, and nobody can see it from outside of the backend; never a pass either, and every verdict says
so. `waived`: failed, and a waiver that is in force says so."""
OUTCOMES: Final = ("pass", "fail", "error", "unsupported", "unseen", "waived")

Level = Literal["L0", "L1", "L2", "L3", "L4", "L5", "L6"]
LEVELS: Final[Mapping[Level, str]] = {
    "L0": "load", "L1": "device", "L2": "kernels", "L3": "graph", "L4": "overlap", "L5": "lossless", "L6": "sanity",
}  # fmt: skip
Profile = Literal["basic", "graph", "async", "full"]
PROFILES: Final[Mapping[Profile, tuple[Level, ...]]] = {
    "basic": ("L0", "L1", "L2", "L5"),
    "graph": ("L0", "L1", "L2", "L3", "L5"),
    "async": ("L0", "L1", "L2", "L4", "L5", "L6"),
    "full": ("L0", "L1", "L2", "L3", "L4", "L5", "L6"),
}
"""Profile to its levels. `graph` and `async` are independent of each other, `full` is both."""
CLAIMED: Final[Mapping[str, tuple[str, ...]]] = {
    "basic": (), "graph": ("graph_capture",), "async": ("asynchronous",), "full": ("graph_capture", "asynchronous"),
}  # fmt: skip
"""Capabilities without which a profile cannot be claimed."""

SPEC: Final = "1.0"
"""Version of the specification: a minor one may add mandatory checks. A report names it and the digest of its lists."""

HOLDS, FAILS, USAGE, KIT_ERROR, NOTHING = 0, 1, 2, 3, 4
"""Exit statuses: the claim holds; it fails; bad usage; the kit failed; nothing was proved."""

Ownership = Literal["own", "delegated", "emulated", "unknown"]
"""Whose code a kernel ran in. `delegated`: the reference's, openly. `emulated`: likewise, in a backend that calls its evidence
"emulator": it proves order, lifetime and layout, not arithmetic."""


@dataclass(frozen=True)
class Result:
    """One check, run. `comparisons`: elements or statements compared; a check that compared nothing is an `error`."""

    id: str
    outcome: Outcome
    comparisons: int = 0
    seconds: float = 0.0
    message: str = ""
    kernel: str = ""
    """Contract or composite of an L2 check."""
    headroom: float | None = None
    """Largest error over tolerance that was seen; None where everything was compared exactly."""
    headroom_at: str = ""
    near_ties: int = 0
    """Texts in fewer bits that differ behind a close choice, which is tolerated and counted."""
    cases: int = 0
    """Cases of a kernel that were held against its golden."""
    like: tuple[str, ...] = ()
    """Mutants that leave just what was found wrong, by id."""
    output: str = ""
    """What the process wrote in this check, in which it was lost: the end of it."""

    @property
    def level(self) -> str:
        return self.id.partition("/")[0]


def as_result(record: Mapping[str, Any]) -> Result:
    """A result as it was written."""
    return Result(**{**record, "like": tuple(record["like"])})
