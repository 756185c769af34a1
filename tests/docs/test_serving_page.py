"""The tables of the page about serving are those that its scripts make of the committed results."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from polydraft.bench.report import renewed
from polydraft.serving import reasoning, tool_calls
from polydraft.serving.markers import Form
from tests.docs.pages import rows
from tests.support.project import ROOT

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "file"), [("serve_load", "serving"), ("logprob_cost", "logprobs"), ("serve_attacks", "serve_attacks")]
)
def test_a_table_is_made_of_its_result(name: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(name, monkeypatch)
    rows = json.loads((ROOT / "bench" / "results" / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    assert renewed(PAGE, module.FIGURES, module.markdown(rows)) == PAGE


def test_the_load_lost_nothing() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "serving.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        assert row["clients"] >= 200
        assert row["seconds"] >= 60
        assert (row["errors"], row["texts_that_differ"]) == (0, 0)
        assert row["itl_p99_ms"] > 0
        for middle, end in (row["http_rss_mib"], row["engine_rss_mib"]):
            assert end < 1.03 * middle, "memory grows in the last half"


def test_log_probabilities_cost_a_step_next_to_nothing_and_fewer_columns_fewer_bytes() -> None:
    rows = {row["asked"]: row for row in json.loads((ROOT / "bench/results/logprobs.json").read_text(encoding="utf-8"))["rows"]}
    assert rows["top 0"]["batch"] == 64
    assert rows["top 0"]["ratio"] <= 1.03
    assert rows["top 0"]["bytes_per_step"] < rows["top 5"]["bytes_per_step"] < rows["fixed 21 columns"]["bytes_per_step"]


def test_no_attack_doubles_the_time_of_a_neighbour() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "serve_attacks.json").read_text(encoding="utf-8"))["rows"]
    assert len({row["attack"] for row in rows}) >= 6
    assert max(row["ratio"] for row in rows) <= 2


@pytest.mark.parametrize(("heading", "forms"), [("Reasoning", reasoning.FORMS), ("Tools", tool_calls.FORMS)])
def test_forms_are_in_the_order_in_which_templates_are_asked_for_them(heading: str, forms: Mapping[str, Form]) -> None:
    """The first whose signs a template has is taken, so the order of the table matters."""
    table = rows(PAGE.partition(f"\n### {heading}\n")[2])
    assert [re.findall(r"`(\w+)`", name)[0] for name, *_ in table] == list(forms)
    assert [signs.startswith("none") for *_, signs in table] == [not form.signs for form in forms.values()]
