"""The proof of the kit: every mutant around a backend has to be killed by its named check, and the legal variants have to
pass.

`conform --prove` and the tests call it. A mutant that its check does not kill means that the kit, or the backend's own answer to
that check, proves less than it says. The backend itself is not judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final, NamedTuple

from polydraft.conformance.catalogue import every_check
from polydraft.conformance.causes import named
from polydraft.conformance.check import Check
from polydraft.conformance.faulty_backends import CORES, LEGAL_VARIANTS, MUTANTS, Mutant, Variant
from polydraft.conformance.kernel_checks import Options
from polydraft.conformance.outcomes import CLAIMED, FAILS, HOLDS, NOTHING, Result
from polydraft.conformance.target import Target
from polydraft.conformance.verdict import judge
from polydraft.errors import PluginError

SCHEMA = "polydraft.prove/1"
Change = Mutant | Variant
CHANGES: Final[Mapping[str, Change]] = {**{one.id: one for one in MUTANTS}, **{one.id: one for one in LEGAL_VARIANTS}}
CLAIMS_FALSELY: Final = "M46"
"""The mutant whose killer says nothing of the backend as it is, which does not claim what the check is about."""


@dataclass(frozen=True)
class Trial:
    """One mutant or variant. `unbroken`, `broken`: what its check came to without and with the change."""

    id: str
    title: str
    check: str
    unbroken: str
    broken: str
    message: str
    kind: str
    moot: str = ""
    """Why it may live."""
    looks: tuple[str, ...] = ()
    """The mutants that its death was said to look like."""

    @property
    def ok(self) -> bool:
        """A mutant that died of its fault and was not taken for another one, a variant that passed, or what the backend's
        capabilities leave out or nobody can see around it."""
        if self.looks and self.id not in self.looks:
            return False
        if self.unbroken in ("unsupported", "unseen") or (self.moot and self.unbroken == self.broken == "pass"):
            return True
        return self.unbroken == "pass" and self.broken == ("fail" if self.kind == "mutant" else "pass")


@dataclass(frozen=True)
class Proof:
    """The matrix of one backend, of schema polydraft.prove/1."""

    backend: str
    trials: tuple[Trial, ...]
    seed: int = 0
    """What drew the surprises and the numbers of launches of the checks."""

    @property
    def status(self) -> int:
        """0 where every mutant died and every variant lived, 4 where none could be tried."""
        if not any(trial.unbroken == "pass" for trial in self.trials):
            return NOTHING
        return HOLDS if all(trial.ok for trial in self.trials) else FAILS

    @property
    def content(self) -> dict[str, Any]:
        """For --json."""
        return {
            "schema": SCHEMA, "backend": self.backend, "seed": self.seed, "status": self.status, "not_a_backends": dict(CORES),
            "trials": [{**asdict(trial), "ok": trial.ok} for trial in self.trials],
        }  # fmt: skip


class Task(NamedTuple):
    """One check around one mutant or variant of a backend; around the backend as it is where `change` is ""."""

    change: str
    check: str

    @property
    def id(self) -> str:
        """One word."""
        return f"{self.change or 'unbroken'}:{self.check}"


def prove(
    backend: str | object,
    *,
    device: str = "",
    files: Sequence[str] = (),
    mutants: Iterable[Mutant] = MUTANTS,
    variants: Iterable[Variant] = LEGAL_VARIANTS,
    seed: int = 0,
    limit_s: float | None = None,
    listen: Callable[[Result], None] | None = None,
) -> Proof:
    """Run each mutant's killer and each variant's checks, with and without the change. `seed` draws what `Options.seed` does, in
    each of them.

    With `limit_s`, those of this module's mutants and variants around a backend that is given by name run in processes of their
    own, in which a check may take that many seconds: a crash or a hang is then a failed check. Otherwise they run here."""
    target = Target(backend, device=device, files=files, wants=CLAIMED["full"])
    changes: dict[str, Change] = {**{one.id: one for one in mutants}, **{one.id: one for one in variants}}
    trials = [Task(change.id, check) for change in changes.values() for check in _tried_by(change)]

    def run(tasks: Sequence[Task]) -> Mapping[Task, Result]:
        if limit_s is None or not isinstance(backend, str):
            return {task: run_task(task, target, changes, seed) for task in tasks}
        from polydraft.conformance.isolation import run_tasks

        return run_tasks(backend, tasks, device=target.device_spec, files=files, seed=seed, limit_s=limit_s, listen=listen)

    declared = target.info.capabilities
    undeclared = {m.id for m in changes.values() if isinstance(m, Mutant) and m.needs and not getattr(declared, m.needs)}
    asked = dict.fromkeys(check for change, check in trials if change not in undeclared and change != CLAIMS_FALSELY)
    unbroken = run([Task("", check) for check in asked])
    before = {
        task: "unsupported" if task.change in undeclared
        else "pass" if task.change == CLAIMS_FALSELY
        else _or_lost(unbroken, Task("", task.check)).outcome
        for task in trials
    }  # fmt: skip
    broken = run([task for task in trials if before[task] == "pass"])
    target.close()
    return Proof(target.info.name, tuple(_trial(changes[task.change], task, before[task], broken) for task in trials), seed)


def run_task(task: Task, target: Target, changes: Mapping[str, Change] = CHANGES, seed: int = 0) -> Result:
    """What the check of a task comes to, in this process. `target`: the backend as it is."""
    check = _checks(seed)[task.check]
    if not task.change:
        return check.result(target)
    change = changes[task.change]
    try:
        make = change.broken if isinstance(change, Mutant) else change.changed
        changed = Target(make(target.plugin), device=target.device_spec)
    except PluginError as error:  # it could not even be loaded, whichever check was to find out
        return Result(task.check, "fail", message=str(error))
    with nullcontext() if change.core is None else change.core():
        result = check.result(changed)
    changed.close()
    return result


def _tried_by(change: Change) -> tuple[str, ...]:
    return (change.killer,) if isinstance(change, Mutant) else change.passes


@cache
def _checks(seed: int) -> Mapping[str, Check]:
    return {check.id: check for check in every_check(Options(seed))}


def _or_lost(results: Mapping[Task, Result], task: Task) -> Result:
    """The result of a task, or that it has none, because the processes that were to run it were lost."""
    return results.get(task) or Result(task.check, "error", message="it was not run, since no process got as far as that")


def _trial(change: Change, task: Task, before: str, broken: Mapping[Task, Result]) -> Trial:
    kind, moot = ("mutant", change.moot) if isinstance(change, Mutant) else ("variant", "")
    if before != "pass":
        return Trial(change.id, change.title, task.check, before, "not run", "", kind)
    result = _or_lost(broken, task)
    judged = isinstance(change, Mutant) and change.judged
    outcome, message = _judged(result) if judged else (result.outcome, result.message)
    looks = named(result) if kind == "mutant" and outcome == "fail" and not judged else ()
    return Trial(change.id, change.title, task.check, before, outcome, message, kind, moot, looks)


def _judged(result: Result) -> tuple[str, str]:
    """What the verdict over this result says: "fail" where nothing follows from it."""
    verdict = judge([result], {}, profile="full", complete=False)
    return "fail" if verdict.status == NOTHING else result.outcome, verdict.sentence


def matrix(proof: Proof) -> str:
    """The matrix for people: a line a trial, then what it comes to."""
    words = {"fail": "killed", "pass": "lives", "not run": "not tried", "error": "kit error", "unsupported": "not offered"}
    lines = []
    for trial in proof.trials:
        mark = " " if trial.ok else "!"
        lines.append(f"{mark} {trial.id}  {words.get(trial.broken, trial.broken):<12}{trial.check:<66}{trial.title}")
    mutants = [trial for trial in proof.trials if trial.kind == "mutant"]
    killed = sum(trial.ok and trial.broken == "fail" for trial in mutants)
    moot = sum(trial.ok and trial.broken == "pass" for trial in mutants)
    left = sum(trial.unbroken != "pass" for trial in mutants)
    told = sum(bool(trial.looks) for trial in mutants)
    wrong = sum(not trial.ok for trial in proof.trials)
    alive = f"{left} not tried, {moot} make no difference"
    lines += ["", f"{killed} of {len(mutants)} mutants killed around {proof.backend}, {alive}; {wrong} trials are wrong"]
    lines += [f"seed {proof.seed} drew what is on no list"]
    lines += [f"{told} of the dead are told by name from what they left"]
    lines += [f"{trial.id} may live: {trial.moot}" for trial in mutants if trial.moot and trial.broken == "pass"]
    lines += [f"not to be tried yet: {', '.join(f'{id_} ({why})' for id_, why in CORES.items())}"] if CORES else []
    return "\n".join(lines) + "\n"
