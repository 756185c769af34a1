"""The page on overlap against what it rests on: the committed result, the limits it claims, and the tests that it names."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import pytest

from polydraft.bench.report import renewed
from tests.docs.pages import read, section
from tests.support.emulator import Emulator  # the script needs the plugin, which need not be installed
from tests.support.project import ROOT

PAGE = read(ROOT / "docs" / "overlap.md")
RESULT = "bench/results/overlap_idle.json"
COMMAND = f"python bench/overlap_idle.py --out {RESULT} --plot docs/images/overlap_idle.png --page docs/overlap.md"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script that measures and writes the page."""
    assert Emulator.__module__ == "polydraft_emulator"
    spec = importlib.util.spec_from_file_location("overlap_idle", ROOT / "bench" / "overlap_idle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result() -> Any:
    return json.loads((ROOT / RESULT).read_text(encoding="utf-8"))


def test_the_table_is_that_of_the_result(script: Any, result: Any) -> None:
    """The command on the page writes it anew."""
    text = section(PAGE, "How long the device waits")
    assert script.FIGURES == RESULT
    assert renewed(text, RESULT, script.markdown(result["rows"])) == text
    assert COMMAND in text


def test_the_result_says_what_a_figure_must_say(result: Any) -> None:
    assert result["schema"] == "polydraft.bench/1"
    assert all(result[key] for key in ("date", "commit", "device", "versions", "method", "rows"))
    assert result["device"].startswith("modelled")
    assert {row["label"] for row in result["rows"]} == {"modelled"}
    assert "*modelled*" in PAGE


def test_the_device_waits_no_longer_than_the_page_says(script: Any, result: Any) -> None:
    assert script.MOST == {"decode": 0.01, "mixed": 0.05}
    assert "less than 1 % in decode alone and less than 5 %" in " ".join(PAGE.split())
    judged = [r for r in result["rows"] if r["overlap"] == 1 and r["host_us_per_step"] < r["kernel_us_per_step"]]
    assert {row["workload"] for row in judged} == set(script.WORKLOADS), "some rows of each kind are held to the limit"
    assert script.too_idle(result["rows"]) == []


def test_a_device_that_waits_too_long_fails_the_script(script: Any, result: Any) -> None:
    late = {"overlap": 1, "host_us_per_step": 1.0, "kernel_us_per_step": 2.0, "idle_share": 0.02, "workload": "decode"}
    (row, *_) = (row for row in result["rows"] if row["workload"] == "decode")
    assert len(script.too_idle([{**row, **late}])) == 1
    assert script.too_idle([{**row, **late, "host_us_per_step": 3.0}]) == []
    assert script.too_idle([{**row, **late, "overlap": 0}]) == []


def test_one_run_of_the_script_measures(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps of it, so that it is not only run when somebody wants figures."""
    import numpy as np

    monkeypatch.setattr(script, "STEPS", 2)
    monkeypatch.setattr(script, "WARM_UP", 2)
    engine = script.build(10, 1, "off")
    measured = script.run(engine, "mixed", np.random.default_rng(0))
    assert not engine.has_work
    engine.close()
    assert 0 <= measured.idle_share < 1
    assert measured.host_us > 0
    assert 1000 < measured.kernel_us < 1200
    rows = [script.row(graph, workload, 10, depth, [measured]) for graph in script.GRAPHS for workload in script.WORKLOADS
            for depth in script.DEPTHS]  # fmt: skip
    assert len(script.table(rows)) == 4


def test_every_row_beside_fastdeploy_says_what_and_why() -> None:
    rows = re.findall(r"^\| (?!-)(.+?) \| (.+?) \| (.+?) \|$", section(PAGE, "Beside FastDeploy's design"), re.MULTILINE)
    assert len(rows) > 15
    for needed in ("real_bsz", "slot < 0", "a prefill is present", "(running + paused slots)", "one step late", "stop flag"):
        assert any(needed in there for there, _, _ in rows), needed
