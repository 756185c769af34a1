"""Owns what a check may come to, how the levels make up a profile, and the verdict over a list of results.

The runner files results, the report keeps them, and `conform verify` judges them again with the same function. It never runs a
check and never looks at a backend: a verdict follows from the written results alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final, Literal

Outcome = Literal["pass", "fail", "error", "unsupported", "waived"]
"""`error`: the kit failed, not the backend. `unsupported`: a capability or an optional kernel that the backend does not declare;
never a pass. `waived`: failed, and a waiver that is in force says so."""
OUTCOMES: Final = ("pass", "fail", "error", "unsupported", "waived")

Level = Literal["L0", "L1", "L2", "L3", "L4", "L5", "L6"]
LEVELS: Final[Mapping[Level, str]] = {
    "L0": "load", "L1": "device", "L2": "kernels", "L3": "graph", "L4": "overlap", "L5": "lossless", "L6": "sanity",
}  # fmt: skip
Profile = Literal["basic", "graph", "async", "full"]
PROFILES: Final[Mapping[Profile, tuple[Level, ...]]] = {
    "basic": ("L0", "L1", "L2", "L5"),
    "graph": ("L0", "L1", "L2", "L3", "L5"),
    "async": ("L0", "L1", "L2", "L3", "L4", "L5"),
    "full": ("L0", "L1", "L2", "L3", "L4", "L5", "L6"),
}
"""Profile to its levels; each contains the one before. Sampled texts (`L5/sampled`) belong to `full` alone."""

SPEC: Final = "1.0"
"""Version of the specification: a minor one may add mandatory checks, and a report is judged by the lists it names."""

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

    @property
    def level(self) -> str:
        return self.id.partition("/")[0]


@dataclass(frozen=True)
class Verdict:
    """What a list of results comes to. `sentence` is for people, `problems` say one by one why it does not hold."""

    status: int
    sentence: str
    problems: tuple[str, ...]


@cache
def frozen_list(kind: Literal["mustpass", "mustown"], profile: str, spec: str = SPEC) -> tuple[str, ...]:
    """The ids of a shipped list, in order: checks that a claim needs as pass (or waived), or kernels a claim needs as own.

    Lines that begin with `#` are comments. Raises `FileNotFoundError` for a specification that this kit does not know."""
    file = resources.files("polydraft.conformance").joinpath("lists", f"{kind}-{profile}-{spec}.txt")
    lines = file.read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def judge(
    results: Sequence[Result], owners: Mapping[str, str], *, profile: str, spec: str = SPEC, complete: bool = True
) -> Verdict:
    """The verdict over all results of a run for `profile`. With `complete` False (a single level, contract or case was asked
    for) the lists are left out: no profile is claimed."""
    count = {outcome: sum(r.outcome == outcome for r in results) for outcome in OUTCOMES}
    broken = [r for r in results if r.outcome == "error"]
    empty = [r for r in results if r.outcome == "pass" and r.comparisons < 1]
    twice = len({r.id for r in results}) != len(results)
    if broken or empty or twice:
        problems = [f"{r.id}: {r.message}" for r in broken] + [f"{r.id} passed without a comparison" for r in empty]
        problems += ["a check is listed twice"] if twice else []
        return Verdict(KIT_ERROR, f"the kit failed in {len(problems)} places; nothing follows from this run", tuple(problems))
    failed = [r for r in results if r.outcome == "fail"]
    if not count["pass"] and not failed:
        return Verdict(NOTHING, "nothing was proved: no check passed", ())
    claim = f"polydraft-conformance {spec} / {profile} ({_counts(owners)})" if complete else "what was asked for"
    claim += f" / {count['waived']} waivers" if count["waived"] else ""
    problems = [f"{r.id}: {r.message}" for r in failed]
    missing = _missing(results, profile, spec) if complete else []
    problems += [f"{id_}: {why}, but {profile} needs it" for id_, why in missing]
    foreign = _disowned(owners, profile, spec) if complete else []
    nothing = f"no compute kernel is the backend's own; implement at least one of {', '.join(foreign)}"
    if complete and not failed and not {"own", "emulated"} & {owners.get(name) for name in frozen_list("mustown", profile, spec)}:
        return Verdict(NOTHING, f"nothing was proved: {nothing}", (nothing, *problems))
    if foreign and profile == "basic":  # which wants one of them, not all
        problems.append(nothing)
    else:
        problems += [f"{name} is not the backend's own kernel, and {profile} needs it to be" for name in foreign]
    if problems:
        counts = {"checks failed": len(failed), "are missing": len(missing), "kernels are not its own": len(foreign)}
        if profile == "basic":
            counts["compute kernels are not its own"] = counts.pop("kernels are not its own")
        many = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
        return Verdict(FAILS, f"{claim} fails: {many}", tuple(problems))
    return Verdict(HOLDS, f"{claim} holds: {count['pass']} checks passed, {count['unsupported']} not claimed", ())


def _missing(results: Sequence[Result], profile: str, spec: str) -> list[tuple[str, str]]:
    """Ids of the must-pass list that did not pass, other than those that failed, with what became of them."""
    outcome = {r.id: r.outcome for r in results}
    wanted = [(id_, outcome.get(id_, "not run")) for id_ in frozen_list("mustpass", profile, spec)]
    return [(id_, why) for id_, why in wanted if why not in ("pass", "waived", "fail")]


def _disowned(owners: Mapping[str, str], profile: str, spec: str) -> list[str]:
    """Kernels of the must-own list that are not the backend's own; `basic` asks only that it is not all of them."""
    wanted = frozen_list("mustown", profile, spec)
    lacking = [name for name in wanted if owners.get(name) not in ("own", "emulated")]
    return lacking if profile != "basic" or len(lacking) == len(wanted) else []


def _counts(owners: Mapping[str, str]) -> str:
    kinds = ("own", "delegated", "emulated")
    each = [(kind, sum(owner == kind for owner in owners.values())) for kind in kinds]
    return ", ".join(f"{number} {kind}" for kind, number in each if number or kind != "emulated")


def as_result(record: Mapping[str, Any]) -> Result:
    """A result as it was written."""
    return Result(**record)
