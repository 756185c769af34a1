"""A run of the kit from selection to report: which checks, in which order, what is written, and how a report is judged again.

The command line and vendors' tests call `conform`; `conform verify` calls `verify`. The verdict is derived from the written
results, not from the run itself, so that both agree. Outcomes of checks are decided by the checks.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any, Final

import numpy as np

from polydraft._version import __version__
from polydraft.conformance.catalogue import lists_digest, of_profile
from polydraft.conformance.check import Check
from polydraft.conformance.kernel_checks import Options
from polydraft.conformance.outcomes import (
    CLAIMED,
    FAILS,
    LEVELS,
    OUTCOMES,
    PROFILES,
    SPEC,
    Result,
    as_result,
)
from polydraft.conformance.target import Target
from polydraft.conformance.verdict import Verdict, judge
from polydraft.conformance.waivers import Waiver, apply
from polydraft.errors import ConfigError
from polydraft.json_text import as_json

SCHEMA = "polydraft.conform/1"
NO_CASES = ("expansion", "repeat", "seeds", "surprises")
"""Checks of L2 whose names could be those of cases; the names of the others have hyphens."""
DRAWN: Final = ("surprises", "many-launches")
"""Ends of the ids of checks in which something hangs on the seed."""
RESTS_ON: Final = {"L3": ("graph_capture",), "L4": ("asynchronous",)}
"""Capabilities without which a level has nothing to show."""
Listen = Callable[[Result], None]


@dataclass(frozen=True)
class Selection:
    """What was asked for. A profile is claimed only where nothing narrows it."""

    profile: str = "basic"
    level: str = ""
    contract: str = ""
    case: str = ""
    seed: int = 0
    """Draws the surprises: cases of kernels that are on no list."""
    deep: bool = False
    check: str = ""
    """Id of one check."""
    features: tuple[str, ...] = ()
    """What is claimed, with all that it rests on; whatever the backend has all of where nothing is named."""
    allow_cpu_fallback: bool = False
    """What the device has no kernel for may run on the CPU; a claim then says what did."""

    @property
    def complete(self) -> bool:
        return not (self.level or self.contract or self.case or self.check)

    @property
    def wants(self) -> tuple[str, ...]:
        """Capabilities without which what was asked for cannot be shown."""
        if self.check:
            return tuple(need for need in self._one().needs if need in CLAIMED["full"])
        return RESTS_ON.get(self.level, ()) if self.level else CLAIMED.get(self.profile, ())

    def checks(self) -> list[Check]:
        """The checks it names. Raises `ConfigError` where it names none."""
        if self.profile not in PROFILES:
            raise ConfigError(f"profile is {self.profile!r}, wanted one of {', '.join(PROFILES)}; choose one of those")
        if self.level and self.level not in LEVELS:
            raise ConfigError(f"level is {self.level!r}, wanted one of {', '.join(LEVELS)}; choose one of those")
        if self.case and not self.contract:
            raise ConfigError("a case belongs to a contract; add --contract NAME")
        if self.check:
            return [self._one()]
        pool = of_profile("full" if self.level else self.profile, Options(self.seed, self.case, self.deep), self.features)
        found = [
            check
            for check in pool
            if (not self.level or check.level == self.level) and (not self.contract or check.kernel == self.contract)
        ]
        if not found:
            raise ConfigError(f"no check fits {self.describe()}; `polydraft contracts` lists contracts, and each page its cases")
        return found

    def _one(self) -> Check:
        """The check that was named. Raises `ConfigError` where there is none."""
        pool = {check.id: check for check in of_profile("full", Options(self.seed, deep=self.deep))}
        if self.check not in pool:
            from difflib import get_close_matches

            near = get_close_matches(self.check, pool, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"no check is called {self.check!r}; {hint}report.json, which --out FOLDER writes, has them all")
        return pool[self.check]

    def describe(self) -> str:
        """The selection as options."""
        given = {"level": self.level, "contract": self.contract, "case": self.case, "check": self.check}
        named = [f"--{name} {value}" for name, value in given.items() if value not in ("", None)]
        return " ".join([*(named or [f"--profile {self.profile}"]), *(f"--feature {name}" for name in self.features)])


@dataclass(frozen=True)
class Report:
    """A finished run: `content` is what report.json holds, of schema polydraft.conform/1."""

    content: dict[str, Any]

    @property
    def status(self) -> int:
        """The exit status of the command."""
        return int(self.content["verdict"]["status"])

    @property
    def results(self) -> list[Result]:
        """Every check that was run."""
        return [as_result(record) for record in self.content["results"]]

    def write(self, directory: Path) -> None:
        """Write report.json, junit.xml and report.txt into `directory`, which is made where it is missing."""
        from polydraft.conformance.pages import junit, page

        make_folder(directory)
        (directory / "report.json").write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        (directory / "junit.xml").write_text(junit(self), encoding="utf-8")
        (directory / "report.txt").write_text(page(self), encoding="utf-8")


def make_folder(directory: Path) -> None:
    """Make the folder that a report will be written into, where it is missing. Raises `ConfigError` where nothing can be written
    there; asked before a run, that costs no result."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"nothing can be written into {directory}, got {error.strerror or error}, wanted a folder of yours, or a name for "
            "a new one; choose another"
        ) from error


def conform(
    backend: str | object,
    *,
    device: str = "",
    selection: Selection | None = None,
    files: Sequence[str] = (),
    packs: Sequence[str] = (),
    waivers: Sequence[Waiver] = (),
    command: Sequence[str] = (),
    listen: Listen | None = None,
    limit_s: float | None = None,
) -> Report:
    """Run the kit on a backend (a name, or a plugin object), with kernel packs laid over it, and return the report. Raises
    `PluginError` for a backend that cannot be loaded or a pack that has no table for the device, `ConfigError` for a selection
    that names nothing and `DeviceError` for a device that was named and cannot be opened; everything else is in the report.

    With `limit_s`, a backend that is given by name runs in a process of its own, in which a check may take that many seconds:
    a crash or a hang is then a failed check. Otherwise checks run here."""
    selection = selection or Selection()
    checks = selection.checks()
    target = Target(
        backend, device=device, files=files, packs=packs, wants=selection.wants, allow_cpu_fallback=selection.allow_cpu_fallback
    )
    start, begun = time.perf_counter(), datetime.now(timezone.utc)
    results: list[Result] = []
    if target.info.available and limit_s is not None and isinstance(backend, str):
        from polydraft.conformance import isolation

        seen = isolation.run(
            backend, device=target.device_spec, files=files, packs=packs, selection=selection, limit_s=limit_s, listen=listen
        )
        target.owners, target.withdrawn, target.kernels = seen.owners, seen.withdrawn, seen.kernels
        results = [one if "(rerun: " in one.message else with_causes(one, target) for one in seen.results]  # of lost children
    elif target.info.available:
        target.refuse_unopenable()
        target.ask_packs()
        for check in checks:
            results.append(with_causes(check.result(target), target))
            if listen is not None:
                listen(results[-1])
        target.close()
    left = target.plugins.off_device(target.device_spec) if selection.complete else None
    results, unfit = apply(waivers, results, version=target.info.version, today=date.today())  # noqa: DTZ011  expiry is a local date
    return make(
        target,
        selection,
        results,
        waivers=waivers,
        unfit=unfit,
        command=command,
        begun=begun,
        seconds=time.perf_counter() - start,
        off_device=left,
    )


def with_causes(result: Result, target: Target) -> Result:
    """A failure with the command that runs it again where it has none yet, and the mutants that it looks like."""
    if result.outcome != "fail":
        return result
    from polydraft.conformance.causes import causes

    case = result.id.rpartition("/")[2]
    named = result.level == "L2" and "-" not in case and case not in NO_CASES
    again = f"--contract {result.kernel} --case {case}" if named else f"--check {result.id}"
    again = f"--level {result.level}" if case.startswith("process-") else again  # lost outside of any check
    rerun = "" if "(rerun: " in result.message else f" (rerun: {target.command} {again})"
    looks = causes(result)
    return replace(result, message=f"{result.message}{rerun}" + (f"; looks like {looks}" if looks else ""))


def make(
    target: Target,
    selection: Selection,
    results: Sequence[Result],
    *,
    waivers: Sequence[Waiver] = (),
    unfit: Sequence[str] = (),
    command: Sequence[str] = (),
    begun: datetime | None = None,
    seconds: float = 0.0,
    off_device: Mapping[str, Any] | None = None,
) -> Report:
    """Put a report together and judge it. `off_device`: what `Plugins.off_device` said, of a run that claims a profile."""
    begun = begun or datetime.now(timezone.utc)
    info, loaded = target.info, target.plugins.backend
    declared = info.capabilities.describe()
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "spec": SPEC,
        "kit": {"version": __version__, "lists": lists_digest()},
        "claim": {**asdict(selection), "complete": selection.complete},
        "command": list(command),
        "begun": begun.isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "backend": {
            "name": info.name, "version": info.version, "package": info.package, "origin": loaded.origin,
            "digest": loaded.digest, "evidence": info.evidence, "evidence_on": info.evidence_on,
            "available": info.available, "reason": info.reason,
            "device": target.device_spec or (info.devices[0] if info.devices else ""), "capabilities": declared,
            "contracts": dict(info.contract_versions), "runs_with": dict(info.runs_with), "device_reason": target.device_reason,
            "withdrawn": dict(info.withdrawn),
        },
        "packs": [pack.report() for pack in (*target.plugins.packs, *target.plugins.variants)],
        "kernels": dict(target.kernels),
        "machine": {"python": platform.python_version(), "platform": platform.platform(), "numpy": np.__version__},
        "owners": dict(target.owners),
        "not_claimed": [name for name, value in declared.items() if value is False and name != "bring_up"],
        "waivers": [asdict(waiver) for waiver in waivers],
        "unfit_waivers": list(unfit),
        "results": [asdict(result) for result in results],
    }  # fmt: skip
    content |= {"off_device": off_device} if off_device is not None else {}
    content = as_json(content)  # what is judged is what is written
    content["verdict"] = _verdict(content)
    content["digest"] = digest_of(content)
    return Report(content)


def _verdict(content: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict over what a report says was seen."""
    results = [as_result(record) for record in content["results"]]
    claim = content["claim"]
    verdict = judge(results, content["owners"], profile=claim["profile"], features=claim["features"], complete=claim["complete"])
    if content["unfit_waivers"] and verdict.status == 0:
        sentence, problems = "a waiver does not fit what was seen", tuple(content["unfit_waivers"])
        verdict = replace(verdict, status=FAILS, sentence=sentence, problems=problems)
    verdict = _staying(content, _bounded(content, verdict))
    if not content["backend"]["available"]:
        verdict = Verdict(verdict.status, f"nothing was proved: the backend is not available: {content['backend']['reason']}", ())
    counts = {outcome: sum(r.outcome == outcome for r in results) for outcome in OUTCOMES}
    features = {name: {"state": one.state, "lacking": list(one.lacking)} for name, one in verdict.features.items()}
    return {
        "status": verdict.status, "sentence": verdict.sentence, "problems": list(verdict.problems), "counts": counts,
        "features": features,
    }  # fmt: skip


def _bounded(content: Mapping[str, Any], verdict: Verdict) -> Verdict:
    """A backend in bring-up claims `basic` at most."""
    claim = content["claim"]
    if not content["backend"]["capabilities"].get("bring_up") or not claim["complete"] or claim["profile"] == "basic":
        return verdict
    problem = f"it declares bring_up, with which basic is the most that can be claimed, not {claim['profile']}"
    return _against(verdict, problem)


def _staying(content: Mapping[str, Any], verdict: Verdict) -> Verdict:
    """A backend whose operations leave the device claims nothing for it, unless that was allowed: then the claim says so."""
    left = content.get("off_device", {"operations": {}, "problem": ""})
    names = [f"{operation} ({contract or 'loading'})" for contract, found in left["operations"].items() for operation in found]
    allowed = content["claim"].get("allow_cpu_fallback", False)
    if allowed and left.get("asked") and not left["problem"]:
        count = len({operation for found in left["operations"].values() for operation in found})
        some = f"with {count} operations on the CPU" if count else "with no operation on the CPU, which was allowed"
        return replace(verdict, sentence=f"{verdict.sentence}; {some}")
    problem = left["problem"] or (f"operations leave the device for the CPU: {', '.join(names)}" if names else "")
    if not problem:
        return verdict
    return _against(verdict, problem)


def _against(verdict: Verdict, problem: str) -> Verdict:
    """The verdict with one more problem, which comes first."""
    sentence, problems = f"{verdict.sentence}; {problem}", (problem, *verdict.problems)
    return replace(verdict, status=verdict.status or FAILS, sentence=sentence, problems=problems)


def digest_of(content: Mapping[str, Any]) -> str:
    """Digest of a report's content besides the digest itself. It guards against accidents and careless edits, not against an
    author who computes it anew: a report is self-certified."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def verify(content: Mapping[str, Any]) -> list[str]:
    """What is wrong with a report: nothing where the list is empty. Derives its verdict again from its results."""
    wanted = {"schema", "spec", "kit", "claim", "results", "owners", "verdict", "digest", "backend", "waivers", "unfit_waivers"}
    lacking = sorted(wanted - set(content))
    if content.get("schema") != SCHEMA or lacking:
        return [f"this is no report of schema {SCHEMA}; it lacks {', '.join(lacking) or 'nothing else'}"]
    try:
        return _wrong(content)
    except (AttributeError, KeyError, TypeError, ValueError, ConfigError) as error:
        return [f"it cannot be read as a report: {type(error).__name__}: {error}"]


def _wrong(content: Mapping[str, Any]) -> list[str]:
    """The same of what has all parts, which may be malformed."""
    wrong = []
    if content["digest"] != digest_of(content):
        wrong.append("the digest is not that of the content: something was changed after the run")
    if content["spec"] != SPEC:
        return [*wrong, f"this kit knows specification {SPEC}, the report is of {content['spec']}; use the kit of that version"]
    if content["kit"]["lists"] != (expected := lists_digest()):
        wrong.append(f"the lists of specification {content['spec']} are {content['kit']['lists']} there and {expected} here")
    try:
        verdict = _verdict(content)
    except (TypeError, KeyError, ValueError) as error:
        return [*wrong, f"its results cannot be read: {type(error).__name__}: {error}"]
    if verdict != content["verdict"]:
        wrong.append(f"its results come to {verdict['status']} ({verdict['sentence']}), it says {content['verdict']['status']}")
    claimed = {waiver["id"] for waiver in content["waivers"]}
    waived = {record["id"] for record in content["results"] if record["outcome"] == "waived"}
    wrong += [f"{id_} is waived without a waiver" for id_ in sorted(waived - claimed)]
    strange = [record["id"] for record in content["results"] if record["outcome"] not in OUTCOMES]
    wrong += [f"{id_} has an outcome that does not exist" for id_ in strange]
    complete = Selection(**{key: value for key, value in content["claim"].items() if key != "complete"}).complete
    if complete != content["claim"]["complete"]:
        wrong.append("it claims a profile on a part of its checks")
    return wrong


def command_line(selection: Selection) -> list[str]:
    """How this process was called, for the report, with the seed that it drew for itself where something hangs on it: to be run
    again as it was."""
    given = ["polydraft", *sys.argv[1:]]
    known = any(word == "--seed" or word.startswith("--seed=") for word in given)
    drawn = not known and any(check.id.endswith(DRAWN) for check in selection.checks())
    return [*given, "--seed", str(selection.seed)] if drawn else given
