"""Waivers: failures that a vendor knows, with reason, address and date, and whether each still fits what was seen.

The runner applies them after the run; a waived check has run like any other. A level, a pattern or an error of the kit cannot be
waived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path

from polydraft import json_text
from polydraft.conformance.outcomes import Result
from polydraft.errors import ConfigError


@dataclass(frozen=True)
class Waiver:
    """One known failure: exact id, why, where it is followed, until when (ISO date), and for which backend versions."""

    id: str
    reason: str
    url: str
    expires: str
    versions: tuple[str, ...]


def load(path: Path) -> list[Waiver]:
    """Waivers of a JSON file, a list of objects with every field. Raises `ConfigError` for anything else."""
    records = json_text.read(path, list, "name a file of waivers, or correct it", what=f"the file of waivers {path}")
    try:
        for number, record in enumerate(records):
            if set(record) != {field.name for field in fields(Waiver)}:
                raise ValueError(f"entry {number} has {', '.join(record)}")
        waivers = [Waiver(**{**record, "versions": tuple(record["versions"])}) for record in records]
        for waiver in waivers:
            date.fromisoformat(waiver.expires)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the file of waivers {path} cannot be used ({type(error).__name__}: {error}), wanted objects with id, reason, "
            "url, expires (YYYY-MM-DD) and versions; correct the file"
        ) from error
    return waivers


def apply(waivers: Sequence[Waiver], results: Sequence[Result], *, version: str, today: date) -> tuple[list[Result], list[str]]:
    """Results with fitting failures waived, and a sentence for every waiver that does not fit: unknown id, expired, meant for
    another version, twice, or a check that passes after all."""
    by_id = {result.id: result for result in results}
    unfit, changed = [], dict(by_id)
    for waiver in waivers:
        result = by_id.get(waiver.id)
        why = ""
        if result is None:
            why = "no check that was run has this id"
        elif version not in waiver.versions:
            why = f"it is for versions {', '.join(waiver.versions)}, this is {version}"
        elif date.fromisoformat(waiver.expires) < today:
            why = f"it expired on {waiver.expires}"
        elif result.outcome != "fail":
            why = f"the check came to {result.outcome}"
        elif changed[waiver.id].outcome == "waived":
            why = "it is given twice"
        if why:
            unfit.append(f"waiver {waiver.id}: {why}; remove or renew it")
        else:
            assert result is not None, "a waiver that fits has a result"
            changed[waiver.id] = replace(result, outcome="waived", message=f"{waiver.reason} ({waiver.url}): {result.message}")
    return [changed[result.id] for result in results], unfit
