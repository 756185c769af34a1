"""The table of several backends: backend by contract by level, each claim with its evidence class.

`polydraft conform --matrix` runs the kit on each and writes it; the project's own tests make it from the same reports. It is made
from reports alone and adds no judgement of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from polydraft.conformance.outcomes import LEVELS, OUTCOMES, PROFILES, SPEC
from polydraft.conformance.pages import claim_of
from polydraft.conformance.report import Report, make_folder

SCHEMA: Final = "polydraft.matrix/1"
NOT_RUN: Final = "not run"
WORST_FIRST: Final = ("error", "fail", "waived", "unseen", "pass", "unsupported")
"""What a cell comes to: the first of these that one of its checks came to."""
STATUS_ORDER: Final = (3, 1, 2, 4, 0)
"""The status of a table is the first of these that one of its backends has."""


def table(reports: Sequence[Report]) -> dict[str, Any]:
    """The table of `reports`, one a backend, of schema polydraft.matrix/1."""
    found = {_title(report, reports): report for report in reports}
    keys = dict.fromkeys((r.level, r.kernel) for report in reports for r in report.results)
    order = sorted(keys, key=lambda key: (key[0], key[1] != "", list(keys).index(key)))
    rows = [
        {"level": level, "contract": kernel, "cells": {name: _cell(report, level, kernel) for name, report in found.items()}}
        for level, kernel in order
    ]
    status = next(s for s in STATUS_ORDER if not reports or s in {report.status for report in reports})
    backends = [_backend(name, report) for name, report in found.items()]
    lists = [report.content["kit"]["lists"] for report in reports]
    return {
        "schema": SCHEMA, "spec": SPEC, "lists": lists[0] if lists else "", "status": status, "backends": backends, "rows": rows,
    }  # fmt: skip


def _title(report: Report, reports: Sequence[Report]) -> str:
    """The backend's name, with its device where two reports are of one backend."""
    backend = report.content["backend"]
    twins = sum(other.content["backend"]["name"] == backend["name"] for other in reports)
    return f"{backend['name']} on {backend['device']}" if twins > 1 else str(backend["name"])


def _backend(name: str, report: Report) -> dict[str, Any]:
    content, backend = report.content, report.content["backend"]
    taken = ("version", "package", "digest", "device", "evidence", "evidence_on", "available")
    claimed = [feature for feature, one in content["verdict"]["features"].items() if one["state"] == "claimed"]
    return {
        "name": name, **{key: backend[key] for key in taken}, "profile": content["claim"]["profile"],
        "features": claimed, "begun": content["begun"], "status": report.status, "sentence": content["verdict"]["sentence"],
    }  # fmt: skip


def _cell(report: Report, level: str, kernel: str) -> dict[str, Any]:
    """What the checks of one level and contract came to; `own` says whose kernel it is."""
    mine = [result for result in report.results if (result.level, result.kernel) == (level, kernel)]
    count = {outcome: sum(result.outcome == outcome for result in mine) for outcome in OUTCOMES}
    outcome = next((outcome for outcome in WORST_FIRST if count[outcome]), NOT_RUN)
    used = [result.headroom for result in mine if result.headroom is not None]
    owner = report.content["owners"].get(kernel, "") if kernel else ""
    return {"outcome": outcome, **count, "owner": owner, "headroom": max(used, default=None)}


# -- for people --------------------------------------------------------------------------------------
def markdown(content: Mapping[str, Any]) -> str:
    """The table as a page: who was asked, then a row a level and contract."""
    names = [backend["name"] for backend in content["backends"]]
    lines = [f"Specification {content['spec']}, lists {content['lists']}, status {content['status']}.", ""]
    lines += ["| backend | evidence | device | day | verdict |", "|---|---|---|---|---|"]
    for one in content["backends"]:
        day = one["begun"][:10]
        lines.append(f"| {one['name']} {one['version']} | {claim_of(one)} | {one['device']} | {day} | {one['sentence']} |")
    lines += ["", f"| level | contract | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for row in content["rows"]:
        cells = " | ".join(in_words(row["cells"][name]) for name in names)
        lines.append(f"| {row['level']} {LEVELS[row['level']]} | {row['contract'] or 'all of it'} | {cells} |")
    return "\n".join(lines) + "\n"


def in_words(cell: Mapping[str, Any]) -> str:
    """Such as `24 own`, `23 of 24 own, 1 FAIL`, `-` for what is not offered or not claimed."""
    outcome = cell["outcome"]
    if outcome in (NOT_RUN, "unsupported"):
        return "not run" if outcome == NOT_RUN else "-"
    run = sum(cell[one] for one in OUTCOMES if one != "unsupported")
    passed = str(run) if cell["pass"] == run else f"{cell['pass']} of {run}"
    owner = f" {cell['owner']}" if cell["owner"] else ""
    bad = "".join(f", {cell[one]} {one.upper()}" for one in ("error", "fail", "waived") if cell[one])
    return f"{passed}{owner}{bad}" + (f", {cell['unseen']} not seen" if cell["unseen"] else "")


def plain(content: Mapping[str, Any]) -> str:
    """The same for a terminal: columns instead of bars."""
    names = [backend["name"] for backend in content["backends"]]
    width = max([14, *(len(name) + 2 for name in names)])
    lines = [f"{one['name']}: {one['sentence']}; evidence: {claim_of(one)}" for one in content["backends"]]
    lines += ["", f"{'level':<14}{'contract':<30}" + "".join(f"{name:<{width}}" for name in names).rstrip()]
    for row in content["rows"]:
        cells = "".join(f"{in_words(row['cells'][name]):<{width}}" for name in names)
        lines.append(f"{row['level'] + ' ' + LEVELS[row['level']]:<14}{row['contract'] or 'all of it':<30}{cells}".rstrip())
    return "\n".join(lines) + "\n"


def write(content: Mapping[str, Any], directory: Path) -> None:
    """Write matrix.json and matrix.md into `directory`, which is made where it is missing."""
    make_folder(directory)
    (directory / "matrix.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (directory / "matrix.md").write_text(markdown(content), encoding="utf-8")


class Wanted(NamedTuple):
    """One backend of a table; "" where device or profile were left out."""

    name: str
    device: str
    profile: str


def wanted(text: str) -> Wanted:
    """Read `NAME`, `NAME=DEVICE`, `NAME@PROFILE` or `NAME=DEVICE@PROFILE`."""
    head, _, tail = text.rpartition("@")
    rest, profile = (head, tail) if head and tail in PROFILES else (text, "")
    name, _, device = rest.partition("=")
    return Wanted(name, device, profile)


def run(backends: Sequence[str], conform: Callable[[str, str, str], Report], directory: Path | None = None) -> dict[str, Any]:
    """Run `conform(name, device, profile)` on each of `backends` (see `wanted`), and make the table of the reports; with
    `directory`, each report is written into a folder of its own beside the table. Raises `ConfigError`, before anything is run,
    where one of these folders cannot be."""
    if directory is not None:
        for text in backends:
            make_folder(directory / _folder(text))
    reports: list[Report] = []
    for text in backends:
        reports.append(conform(*wanted(text)))
        if directory is not None:
            reports[-1].write(directory / _folder(text))
    content = table(reports)
    if directory is not None:
        write(content, directory)
    return content


def _folder(wanted: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in wanted)
