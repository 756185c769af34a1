"""Claims carry their evidence: on the generated page, in `doctor`, in reports."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polydraft import reference
from polydraft.backend import BackendInfo
from polydraft.conformance.report import Selection, conform
from polydraft.conformance.target import Target, wrap
from tests.conformance.doubles import named
from tests.docs.pages import rows, section
from tests.support.project import ROOT

WEAK = ("emulator", "compiled only", "double only")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "make_evidence_page.py"
    spec = importlib.util.spec_from_file_location("make_evidence_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_generated(tool: ModuleType):
    """`python tools/make_evidence_page.py` writes it anew."""
    assert tool.PAGE.read_text() == tool.page()


def test_every_backend_of_the_repository_is_on_it(tool: ModuleType):
    shown = {row[0]: row for row in rows(section(tool.PAGE.read_text(), "Backends"))}
    assert {"reference", "null", "emulator"} <= set(shown)
    for one in tool.backends():
        assert shown[one["name"]][2] == one["evidence"]
        assert one["evidence"] in tool.MEANING
        if one["evidence"] not in WEAK:
            assert re.search(r", \d{4}-\d{2}-\d{2}$", one["on"]), (
                f"{one['name']}: the class {one['evidence']} names device and day"
            )


def test_claims_have_a_day_a_device_and_a_class(tool: ModuleType):
    assert tool.claims()
    for one in tool.claims():
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", one["day"])
        assert one["status"] == 0
        assert one["evidence"] in tool.MEANING
        assert re.match(rf"polydraft-conformance 1.0 / {one['profile']} (for .* )?\(", one["sentence"])


def test_reports_become_claims(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tool, "CLAIMS", tmp_path / "claims.json")
    report = conform("reference", selection=Selection(level="L1"))
    (tmp_path / "report.json").write_text(json.dumps(report.content))
    for _ in range(2):
        tool.add([tmp_path / "report.json"])
    (claim,) = tool.claims()
    assert (claim["name"], claim["evidence"], claim["evidence_on"]) == (
        "reference",
        "silicon",
        Target("reference").info.evidence_on,
    )
    assert "what was asked for holds" in tool.page()
    with pytest.raises(ValueError, match="is not consistent"):
        tool.taken({**report.content, "seconds": -1})


def test_a_claim_that_another_includes_goes(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    claim = {"name": "mine", "device": "chip:0", "status": 0}
    kept = [
        claim | {"profile": "async", "day": "2026-11-02"},
        claim | {"profile": "graph", "day": "2026-11-02"},
        claim | {"profile": "basic", "day": "2026-11-03"},
        claim | {"profile": "basic", "day": "2026-11-01", "device": "chip:1"},
    ]
    included = [claim | {"profile": "basic", "day": "2026-11-02", "device": "chip:2"}]
    by = [claim | {"profile": "graph", "day": "2026-11-02", "device": "chip:2"}]
    monkeypatch.setattr(tool, "CLAIMS", tmp_path / "claims.json")
    tool.CLAIMS.write_text(json.dumps([*kept, *included, *by]))
    tool.add([])
    assert sorted(tool.claims(), key=str) == sorted([*kept, *by], key=str)


def test_a_class_that_stands_for_a_device_names_it():
    bare = named(reference, "bare", evidence_on="")
    problems = conform(bare, selection=Selection(level="L0")).content["verdict"]["problems"]
    assert any("evidence_on has a device and a day (DEVICE, YYYY-MM-DD), got ''" in problem for problem in problems)
    emulated = wrap(reference, polydraft_backend_info=lambda info: dataclasses.replace(info, evidence="emulator", evidence_on=""))
    results: list[Any] = conform(emulated, selection=Selection(level="L0")).results
    assert next(r for r in results if r.id == "L0/identity").outcome == "pass"


def test_what_is_shown():
    info = BackendInfo("x", "1", "p", "x", "s", evidence="silicon", evidence_on="a chip, 2026-11-21")
    assert info.claim == "silicon (a chip, 2026-11-21)"
    assert dataclasses.replace(info, evidence_on="", evidence="emulator").claim == "emulator"
    assert info.__class__("x", "1", "p", "x", "s").claim == "double only"
