"""What a list of results comes to: which profile holds, or what stands in its way.

Reports are judged by it when they are made and again when they are verified. It reads the catalogue of checks, runs nothing, and
looks at no backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polydraft.conformance.catalogue import must_own, must_pass
from polydraft.conformance.outcomes import FAILS, HOLDS, KIT_ERROR, NOTHING, OUTCOMES, SPEC, Result


@dataclass(frozen=True)
class Verdict:
    """What a list of results comes to. `sentence` is for people, `problems` say one by one why it does not hold."""

    status: int
    sentence: str
    problems: tuple[str, ...]


def judge(results: Sequence[Result], owners: Mapping[str, str], *, profile: str, complete: bool = True) -> Verdict:
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
    claim = f"polydraft-conformance {SPEC} / {profile} ({_counts(owners)})" if complete else "what was asked for"
    claim += f" / {count['waived']} waivers" if count["waived"] else ""
    problems = [f"{r.id}: {r.message}" for r in failed]
    missing = _missing(results, profile) if complete else []
    problems += [f"{id_}: {why}, but {profile} needs it" for id_, why in missing]
    foreign = _disowned(owners, profile) if complete else []
    nothing = f"no compute kernel is the backend's own; implement at least one of {', '.join(foreign)}"
    if complete and not failed and not {"own", "emulated"} & {owners.get(name) for name in must_own(profile)}:
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


def _missing(results: Sequence[Result], profile: str) -> list[tuple[str, str]]:
    """Ids of the must-pass list that did not pass, other than those that failed, with what became of them."""
    outcome = {r.id: r.outcome for r in results}
    wanted = [(id_, outcome.get(id_, "not run")) for id_ in must_pass(profile)]
    return [(id_, why) for id_, why in wanted if why not in ("pass", "waived", "fail")]


def _disowned(owners: Mapping[str, str], profile: str) -> list[str]:
    """Kernels of the must-own list that are not the backend's own; `basic` asks only that it is not all of them."""
    wanted = must_own(profile)
    lacking = [name for name in wanted if owners.get(name) not in ("own", "emulated")]
    return lacking if profile != "basic" or len(lacking) == len(wanted) else []


def _counts(owners: Mapping[str, str]) -> str:
    kinds = ("own", "delegated", "emulated")
    each = [(kind, sum(owner == kind for owner in owners.values())) for kind in kinds]
    return ", ".join(f"{number} {kind}" for kind, number in each if number or kind != "emulated")
