"""What a list of results comes to: which profile holds for which features, or what stands in its way.

Reports are judged by it when they are made and again when they are verified. It reads the catalogue of checks, runs nothing, and
looks at no backend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from polydraft.conformance.catalogue import features_by_id, must_own, must_pass
from polydraft.conformance.outcomes import FAILS, HOLDS, KIT_ERROR, NOTHING, OUTCOMES, SPEC, Result
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.features import FEATURES, with_base

State = Literal["claimed", "left out", "incomplete", "absent"]
"""`left out`: all of it is there, and it was not asked for. `incomplete`: a part is there, or all of it and not as the backend's
own, or what it rests on is not claimed. `absent`: nothing of it is there."""
OWN: Final = ("own", "emulated")
"""Whose code a kernel has to run in to count as the backend's own."""


class Standing(NamedTuple):
    """How a claim stands to one feature. `lacking`: its contracts that are not there, or in profiles above `basic` not the
    backend's own."""

    state: State
    lacking: tuple[str, ...]


def standings(owners: Mapping[str, str], *, profile: str, asked: Collection[str] = ()) -> dict[str, Standing]:
    """Feature to how a claim of `profile` stands to it. Claimed is what was `asked` for with all that it rests on; where nothing
    was, `dense` and whatever is there with all that it rests on. `owners`: whose code each kernel that is offered runs in."""
    wanted = with_base(asked)
    found: dict[str, Standing] = {}
    for name, feature in FEATURES.items():
        contracts = [contract.name for contract in REGISTRY.of([name])]
        lacking = tuple(one for one in contracts if not _there(owners.get(one), profile))
        rests = all(found[base].state == "claimed" for base in feature.rests_on)
        state: State
        if name in wanted or (not asked and not lacking and rests):
            state = "claimed"
        elif asked and not lacking:
            state = "left out"
        else:
            state = "incomplete" if any(one in owners for one in contracts) else "absent"
        found[name] = Standing(state, lacking)
    return found


def _there(owner: str | None, profile: str) -> bool:
    return owner is not None if profile == "basic" else owner in OWN


@dataclass(frozen=True)
class Verdict:
    """What a list of results comes to. `sentence` is for people, `problems` say one by one why it does not hold; `features`: how
    a claim stands to each, empty where nothing is claimed."""

    status: int
    sentence: str
    problems: tuple[str, ...]
    features: Mapping[str, Standing] = field(default_factory=dict)


def judge(
    results: Sequence[Result],
    owners: Mapping[str, str],
    *,
    profile: str,
    features: Collection[str] = (),
    complete: bool = True,
) -> Verdict:
    """The verdict over all results of a run for `profile` and the `features` that were asked for. With `complete` False (a single
    level, contract or case was asked for) the lists are left out: no profile is claimed."""
    broken = [r for r in results if r.outcome == "error"]
    empty = [r for r in results if r.outcome == "pass" and r.comparisons < 1]
    twice = len({r.id for r in results}) != len(results)
    if broken or empty or twice:
        problems = [f"{r.id}: {r.message}" for r in broken] + [f"{r.id} passed without a comparison" for r in empty]
        problems += ["a check is listed twice"] if twice else []
        return Verdict(KIT_ERROR, f"the kit failed in {len(problems)} places; nothing follows from this run", tuple(problems))
    if not any(r.outcome in ("pass", "fail") for r in results):
        return Verdict(NOTHING, "nothing was proved: no check passed", ())
    failed = [r for r in results if r.outcome == "fail"]
    problems = [f"{r.id}: {r.message}" for r in failed]
    if not complete:
        return _ruled("what was asked for", results, problems, {"checks failed": len(failed)})
    standing = standings(owners, profile=profile, asked=features)
    claimed = tuple(name for name, one in standing.items() if one.state == "claimed")
    missing, foreign = _missing(results, profile, claimed), _disowned(owners, profile, claimed)
    problems += [f"{id_}: {why}, but the claim needs it" for id_, why in missing]
    nothing = f"no compute kernel is the backend's own; implement at least one of {', '.join(foreign)}"
    if not failed and not set(OWN) & {owners.get(name) for name in must_own(profile, claimed)}:
        return Verdict(NOTHING, f"nothing was proved: {nothing}", (nothing, *problems), standing)
    if foreign and profile == "basic":  # which wants one of them, not all
        problems.append(nothing)
    else:
        problems += [f"{name} is not the backend's own kernel, and {profile} needs it to be" for name in foreign]
    whose = "compute kernels" if profile == "basic" else "kernels"
    counts = {"checks failed": len(failed), "are missing": len(missing), f"{whose} are not its own": len(foreign)}
    claim = f"polydraft-conformance {SPEC} / {profile} for {_claimed(owners, claimed)}{_without(standing)}"
    about = features_by_id()
    return _ruled(claim, [r for r in results if set(claimed).issuperset(about.get(r.id, ()))], problems, counts, standing)


def _ruled(
    claim: str,
    results: Sequence[Result],
    problems: Sequence[str],
    counts: Mapping[str, int],
    standing: Mapping[str, Standing] = MappingProxyType({}),
) -> Verdict:
    """Whether `claim` holds. `results`: those that it is about; `counts`: what went wrong, and how often."""
    number = {outcome: sum(r.outcome == outcome for r in results) for outcome in OUTCOMES}
    claim += f" / {number['waived']} waivers" if number["waived"] else ""
    if problems:
        many = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return Verdict(FAILS, f"{claim} fails: {many}", tuple(problems), standing)
    rest = f", {number['unsupported']} are of what it does not have" if number["unsupported"] else ""
    unseen = [f"{what} ({len(ids)} checks)" for what, ids in not_seen(results).items()]
    rest += f"; not seen: {', '.join(unseen)}" if unseen else ""
    return Verdict(HOLDS, f"{claim} holds: {number['pass']} checks passed{rest}", (), standing)


def not_seen(results: Sequence[Result]) -> dict[str, list[str]]:
    """What is declared and could not be looked at, in words, to the ids of the checks that would have."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.outcome == "unseen":
            found.setdefault(result.message.partition(": ")[0], []).append(result.id)
    return found


def _missing(results: Sequence[Result], profile: str, claimed: tuple[str, ...]) -> list[tuple[str, str]]:
    """Ids of the must-pass list that did not pass, other than those that failed or that nobody can see, with what became of
    them."""
    found = {r.id: r for r in results}
    wanted = {id_: found[id_].outcome if id_ in found else "not run" for id_ in must_pass(profile, claimed)}
    return [
        (id_, f"{why} ({found[id_].message})" if id_ in found and found[id_].message else why)
        for id_, why in wanted.items()
        if why not in ("pass", "waived", "unseen", "fail")
    ]


def _disowned(owners: Mapping[str, str], profile: str, claimed: tuple[str, ...]) -> list[str]:
    """Kernels of the must-own list that are not the backend's own; `basic` asks only that it is not all of them."""
    wanted = must_own(profile, claimed)
    lacking = [name for name in wanted if owners.get(name) not in OWN]
    return lacking if profile != "basic" or len(lacking) == len(wanted) else []


def _without(standing: Mapping[str, Standing]) -> str:
    """What the claim is not about, and why where that is not that nothing of it is there."""
    why = {"absent": "", "incomplete": " (incomplete)", "left out": " (not asked for)"}
    rest = [f"{name}{why[one.state]}" for name, one in standing.items() if one.state != "claimed"]
    return f", without {', '.join(rest)}" if rest else ""


def _claimed(owners: Mapping[str, str], claimed: tuple[str, ...]) -> str:
    """The claimed features and whose kernels they have; apart from them those without a kernel of the backend's own."""
    mine = [name for name in claimed if any(owners.get(one.name) in OWN for one in REGISTRY.of([name]))] or list(claimed)
    delegated = [name for name in claimed if name not in mine]
    rest = f", wholly delegated: {', '.join(delegated)}" if delegated else ""
    return f"{', '.join(mine)} ({_counts(owners, claimed)}){rest}"


def _counts(owners: Mapping[str, str], claimed: tuple[str, ...]) -> str:
    """Whose kernels those of the claimed features are, composites among them."""
    kernels = {contract.name: contract.features for contract in REGISTRY} | {c.name: c.features for c in COMPOSITES.values()}
    mine = [owner for name, owner in owners.items() if set(claimed).issuperset(kernels.get(name, ()))]
    each = [(kind, mine.count(kind)) for kind in ("own", "delegated", "emulated")]
    return ", ".join(f"{number} {kind}" for kind, number in each if number or kind != "emulated")
