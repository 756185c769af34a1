"""The proof of the kit: every mutant around a backend has to be killed by its named check, and the legal variants have to
pass.

`conform --prove` and the tests call it. A mutant that its check does not kill means that the kit, or the backend's own answer to
that check, proves less than it says. The backend itself is not judged here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from polydraft.conformance.catalogue import every_check
from polydraft.conformance.check import Check
from polydraft.conformance.faulty_backends import CORES, LEGAL_VARIANTS, MUTANTS, Mutant, Variant
from polydraft.conformance.outcomes import CLAIMED, FAILS, HOLDS, NOTHING, Result
from polydraft.conformance.target import Target
from polydraft.conformance.verdict import judge
from polydraft.errors import PluginError

SCHEMA = "polydraft.prove/1"


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

    @property
    def ok(self) -> bool:
        """A mutant that died of its fault, a variant that passed, or what the backend's capabilities leave out."""
        if self.unbroken == "unsupported" or (self.moot and self.unbroken == self.broken == "pass"):
            return True
        return self.unbroken == "pass" and self.broken == ("fail" if self.kind == "mutant" else "pass")


@dataclass(frozen=True)
class Proof:
    """The matrix of one backend, of schema polydraft.prove/1."""

    backend: str
    trials: tuple[Trial, ...]

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
            "schema": SCHEMA, "backend": self.backend, "status": self.status, "not_a_backends": dict(CORES),
            "trials": [{**asdict(trial), "ok": trial.ok} for trial in self.trials],
        }  # fmt: skip


def prove(
    backend: str | object,
    *,
    device: str = "",
    files: Sequence[str] = (),
    mutants: Iterable[Mutant] = MUTANTS,
    variants: Iterable[Variant] = LEGAL_VARIANTS,
) -> Proof:
    """Run each mutant's killer and each variant's checks, with and without the change."""
    checks = {check.id: check for check in every_check()}
    target = Target(backend, device=device, files=files, wants=CLAIMED["full"])
    unbroken: dict[str, Result] = {}
    trials = [_mutant(mutant, target, checks, unbroken) for mutant in mutants]
    for variant in variants:
        trials += [_variant(variant, check_id, target, checks, unbroken) for check_id in variant.passes]
    target.close()
    return Proof(target.info.name, tuple(trials))


def _mutant(mutant: Mutant, target: Target, checks: Mapping[str, Check], unbroken: dict[str, Result]) -> Trial:
    claims_it_falsely = mutant.id == "M46"
    needs = "unsupported" if mutant.needs and not getattr(target.info.capabilities, mutant.needs) else ""
    before = needs or ("pass" if claims_it_falsely else _once(mutant.killer, target, checks, unbroken).outcome)
    if before != "pass":
        return Trial(mutant.id, mutant.title, mutant.killer, before, "not run", "", "mutant")
    try:
        broken = Target(mutant.broken(target.plugin), device=target.device_spec)
    except PluginError as error:  # it could not even be loaded, whichever check was to find out
        return Trial(mutant.id, mutant.title, mutant.killer, before, "fail", str(error), "mutant", mutant.moot)
    with nullcontext() if mutant.core is None else mutant.core():
        result = checks[mutant.killer].result(broken)
    broken.close()
    outcome, message = _judged(result) if mutant.judged else (result.outcome, result.message)
    return Trial(mutant.id, mutant.title, mutant.killer, before, outcome, message, "mutant", mutant.moot)


def _judged(result: Result) -> tuple[str, str]:
    """What the verdict over this result says: "fail" where nothing follows from it."""
    verdict = judge([result], {}, profile="full", complete=False)
    return "fail" if verdict.status == NOTHING else result.outcome, verdict.sentence


def _variant(variant: Variant, check_id: str, target: Target, checks: Mapping[str, Check], unbroken: dict[str, Result]) -> Trial:
    before = _once(check_id, target, checks, unbroken).outcome
    if before != "pass":
        return Trial(variant.id, variant.title, check_id, before, "not run", "", "variant")
    changed = Target(variant.changed(target.plugin), device=target.device_spec)
    with nullcontext() if variant.core is None else variant.core():
        result = checks[check_id].result(changed)
    changed.close()
    return Trial(variant.id, variant.title, check_id, before, result.outcome, result.message, "variant")


def _once(check_id: str, target: Target, checks: Mapping[str, Check], unbroken: dict[str, Result]) -> Result:
    if check_id not in unbroken:
        unbroken[check_id] = checks[check_id].result(target)
    return unbroken[check_id]


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
    wrong = sum(not trial.ok for trial in proof.trials)
    alive = f"{left} not tried, {moot} make no difference"
    lines += ["", f"{killed} of {len(mutants)} mutants killed around {proof.backend}, {alive}; {wrong} trials are wrong"]
    lines += [f"{trial.id} may live: {trial.moot}" for trial in mutants if trial.moot and trial.broken == "pass"]
    lines += [f"not to be tried yet: {', '.join(f'{id_} ({why})' for id_, why in CORES.items())}"] if CORES else []
    return "\n".join(lines) + "\n"
