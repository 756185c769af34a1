"""The adequacy gate: the default cases of a contract must kill every automatic mutant of its golden.

Tests run it for every registered contract on NumPy alone, before any backend runs. It judges the cases and not a backend, since a
fault that no case detects in the golden would pass in a kernel as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polydraft.conformance.harness import deliver, run_golden
from polydraft.contracts.base import Case, Contract, LogicalCache
from polydraft.contracts.compare import Expected, compare
from polydraft.contracts.inputs import SEEDS, arrays, default_cases, namespace, optional_cases
from polydraft.contracts.mutants import Mutant, Shown, mutants


@dataclass(frozen=True)
class Adequacy:
    """The verdict over one contract's cases; all tuples hold mutant ids."""

    contract: str
    killed: Mapping[str, str]
    """Mutant id to the name of the case that killed it."""
    survivors: tuple[str, ...]
    """Killed by no case and not listed as equivalent."""
    stale: tuple[str, ...]
    """Listed as equivalent, but killed, or no mutant of this contract."""
    equivalent: tuple[str, ...]
    """Listed, and alive."""
    idle: tuple[str, ...]
    """Alive because they misread an argument that the golden only writes, in every case."""

    @property
    def ok(self) -> bool:
        return bool(self.killed) and not self.survivors and not self.stale

    def describe(self) -> str:
        """One line a fault of the case set; otherwise one line of numbers."""
        advice = "add a case, or prove in `equivalent_mutants` that none can"
        lines = [f"{self.contract}: no default case notices {mutant}; {advice}" for mutant in self.survivors]
        for mutant in self.stale:
            killer = self.killed.get(mutant)
            why = "is no mutant of this contract" if killer is None else f"dies in case {killer!r}"
            lines.append(f"{self.contract}: {mutant} is listed as equivalent, but {why}; remove it there")
        if not self.killed:
            lines.append(f"{self.contract}: no mutant died, so the cases prove nothing; add cases")
        counts = f"{len(self.killed)} mutants killed, {len(self.equivalent)} equivalent, {len(self.idle)} idle"
        return "\n".join(lines) or f"{self.contract}: {counts}"


@dataclass(frozen=True, eq=False)
class _Trial:
    """A case with the golden's answer."""

    case: Case
    want: Mapping[str, Expected]


def audit(contract: Contract, seeds: int = SEEDS) -> Adequacy:
    """Run every mutant on the named cases and `seeds` generated ones until one kills it.

    A mutant dies by a mismatch in any array, inputs included, or by an exception. Raises what the golden itself raises.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # mutants compute nonsense; a warning turned into an error would count as a kill
        trials = [
            _Trial(case, run_golden(contract, case)) for case in (*default_cases(contract, seeds), *optional_cases(contract))
        ]
        killed: dict[str, str] = {}
        alive: list[Mutant] = []
        for mutant in mutants(contract, [trial.case for trial in trials]):
            killer = next((trial for trial in trials if _kills(contract, trial, mutant)), None)
            if killer is None:
                alive.append(mutant)
                continue
            killed[mutant.id] = killer.case.name
            trials.remove(killer)
            trials.insert(0, killer)  # what killed this mutant most likely kills the next
        read = _read(contract, trials)
    idle = tuple(mutant.id for mutant in alive if mutant.misreads and mutant.misreads not in read)
    rest = [mutant.id for mutant in alive if mutant.id not in idle]
    listed = contract.equivalent_mutants
    return Adequacy(
        contract.key,
        killed,
        survivors=tuple(mutant for mutant in rest if mutant not in listed),
        stale=tuple(mutant for mutant in listed if mutant not in rest),
        equivalent=tuple(mutant for mutant in rest if mutant in listed),
        idle=idle,
    )


def _kills(contract: Contract, trial: _Trial, mutant: Mutant) -> bool:
    a = namespace(contract, trial.case)
    try:
        mutant.run(contract.golden, a, trial.case.n)
    except Exception:  # noqa: BLE001  a mutant may fail in any way
        return mutant.crash_kills
    got = deliver(contract, trial.case, arrays(contract, a))
    return not compare(contract, trial.case, got, trial.want).ok


def _read(contract: Contract, trials: Sequence[_Trial]) -> set[str]:
    """Arrays that the golden reads in at least one case."""
    read: set[str] = set()
    for trial in trials:
        a = namespace(contract, trial.case)
        watched = {name: Shown.of(array, array) for name, array in arrays(contract, a).items()}
        for name in contract.args.specs():
            if name in watched:
                setattr(a, name, watched[name])
            elif f"{name}.k" in watched:
                setattr(a, name, LogicalCache(watched[f"{name}.k"], watched[f"{name}.v"]))
        contract.golden(a, trial.case.n)
        read |= {name for name, array in watched.items() if array.was_read}
    return read
