"""Tries a backend's variants on the user's own device: runs each through the kit and records the result.

`polydraft conform BACKEND --enable-variants` calls it. A variant that passes is in use from then on, for this device, driver,
library and code alone; one that fails, crashes or hangs stays off. The backend itself is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from polydraft._version import __version__
from polydraft.backend import Variant
from polydraft.conformance import isolation
from polydraft.conformance.catalogue import lists_digest
from polydraft.conformance.outcomes import FAILS, HOLDS, NOTHING
from polydraft.conformance.report import RESTS_ON, Listen, Selection
from polydraft.conformance.verdict import judge
from polydraft.errors import ContractError, PolydraftError
from polydraft.plugins.plugins import Plugins, variant_digests
from polydraft.plugins.variants import Judgement, add

SCHEMA: Final = "polydraft.enable_variants/1"
LEVELS: Final = ("L5", "L3", "L4")
"""Whole texts, then graphs and overlap where the backend has them: what is run when a variant's own contracts have passed."""


@dataclass(frozen=True)
class Trials:
    """What came of every variant, of schema polydraft.enable_variants/1."""

    backend: str
    spec: str
    judgements: tuple[Judgement, ...]
    file: Path | None
    """Where they were filed; None where there was nothing to try."""
    reason: str = ""
    """Why the backend is not available."""

    @property
    def status(self) -> int:
        """0 where every variant passed, 1 where one did not, 4 where there was none."""
        if not self.judgements:
            return NOTHING
        return HOLDS if all(one.passed for one in self.judgements) else FAILS

    @property
    def content(self) -> dict[str, Any]:
        """For --json."""
        return {
            "schema": SCHEMA, "backend": self.backend, "device": self.spec, "status": self.status,
            "file": str(self.file) if self.file else None, "judgements": [asdict(one) for one in self.judgements],
        }  # fmt: skip

    def page(self) -> str:
        """For people: a line a variant, and what is in use from now on."""
        where = f"{self.backend} on {self.spec or 'its default device'}"
        if not self.judgements:
            return f"{where} {f'is not available: {self.reason}' if self.reason else 'brings no variants'}; nothing was tried\n"
        lines = [
            f"{one.variant:<28}{'in use' if one.passed else 'off':<8}{', '.join(one.contracts)}: {one.sentence}"
            for one in self.judgements
        ]
        used = sum(one.passed for one in self.judgements)
        held = ", ".join(f"{name} {value}" for name, value in self.judgements[0].runs_with.items() if value)
        lines += ["", f"{used} of {len(lines)} variants of {where} are in use, as long as nothing of this changes: {held}"]
        lines += [f"filed in {self.file}; --variants off leaves them out"]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Trial:
    """One run of `--enable-variants`: how the kit is run. `levels` are those that follow a variant's own contracts."""

    backend: str
    device: str
    limit_s: float
    levels: tuple[str, ...]
    listen: Listen | None

    def of_contracts(self, variant: Variant) -> Iterator[Selection]:
        """The checks of what a variant serves, then whole runs: what comes first is quick, and stops the rest where it fails."""
        yield from (Selection("full", contract=contract) for contract in variant.contracts)
        yield from self.whole()

    def whole(self) -> Iterator[Selection]:
        """The levels alone."""
        yield from (Selection("full", level=level) for level in self.levels)

    def run(self, packs: Sequence[str], selections: Iterable[Selection]) -> tuple[str, int]:
        """Run selections with `packs` laid over the backend, up to the first in which something fails: what failed, "" where
        nothing did, and how many checks passed."""
        passed = 0
        for selection in selections:
            seen = isolation.run(
                self.backend, device=self.device, files=(), packs=packs, variants=False, selection=selection,
                limit_s=self.limit_s, listen=self.listen, most_deaths=1,
            )  # fmt: skip
            if any(capability in seen.withdrawn for capability in RESTS_ON.get(selection.level, ())):
                continue
            results = seen.results
            verdict = judge(results, {}, profile="full", complete=False)
            passed += sum(result.outcome == "pass" for result in results)
            if verdict.status != HOLDS:
                return next(iter(verdict.problems), f"{selection.describe()}: {verdict.sentence}"), passed
        return "", passed


def enable(
    backend: str, *, device: str = "", limit_s: float, levels: Sequence[str] = LEVELS, listen: Listen | None = None
) -> Trials:
    """Try every variant that `backend` brings for `device`, and file what came of it. Raises `ContractError` for a backend that
    does not say what it runs with: a result could never be recognised as out of date."""
    plugins = Plugins.load(backend, device=device, variants=False)
    info = plugins.info()
    if not info.available or not info.variants:
        return Trials(backend, device, (), None, info.reason)
    if not any(info.runs_with.values()):
        raise ContractError(
            f"backend {backend} says nothing of its device, driver and library (BackendInfo.runs_with), so what its variants "
            "come to here could never be recognised as out of date; let it say so"
        )
    shown = [one for one in levels if all(getattr(info.capabilities, name) for name in RESTS_ON.get(one, ()))]
    trial = Trial(backend, device, limit_s, tuple(shown), listen)
    found = [_tried(trial, plugins, variant) for variant in info.variants]
    passed = [one.variant for one in found if one.passed]
    if len(passed) > 1:
        problem, _ = trial.run(passed, trial.whole())
        if problem:
            sentence = f"together with {', '.join(passed)}: {problem}"
            found = [replace(one, passed=False, sentence=sentence) if one.passed else one for one in found]
    return Trials(backend, device, tuple(found), add(found))


def _tried(trial: Trial, plugins: Plugins, variant: Variant) -> Judgement:
    digests, problem, count = None, "", 0
    try:
        isolation.refuse_deadly(trial.backend, files=(), packs=(variant.name,), limit_s=trial.limit_s)
        digests = variant_digests(plugins.backend, variant.name)
        problem = "" if digests else "its kernel pack is not installed"
    except PolydraftError as error:
        problem = str(error)
    if not problem:
        problem, count = trial.run([variant.name], trial.of_contracts(variant))
    return Judgement(
        backend=trial.backend, variant=variant.name, runs_with=dict(plugins.info().runs_with), digests=digests or {},
        spec=trial.device, contracts=variant.contracts, passed=not problem, sentence=problem or f"{count} checks passed",
        day=datetime.now(timezone.utc).date().isoformat(), kit=f"{__version__}, lists {lists_digest()}",
    )  # fmt: skip
