"""The committed results of the CUDA backend's own benchmarks against the page that shows them."""

import json
from collections import Counter

import pytest

from bench.invariant_cost import FIGURES, table
from polydraft.bench.report import renewed
from tests.support.project import ROOT
from tests.support.schemas import published

RESULTS = ROOT / "bench" / "results"


def result(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_the_cost_of_invariance_is_that_of_the_result():
    measured = result("cuda_invariant.json")
    assert (measured["schema"], measured["device"]) == ("polydraft.bench/1", "NVIDIA H200")
    page = (ROOT / "docs" / "backends" / "cuda.md").read_text(encoding="utf-8")
    assert renewed(page, FIGURES, table(measured["rows"])) == page
    for row in measured["rows"]:
        ms = row["ms_by_engine"]
        assert row["cost"] == pytest.approx(ms["invariant"] / ms["default"] - 1)
        assert (row["acceptance"], row["weights"]) == ("synthetic", "random")


def test_the_committed_proof_is_dead_and_counted():
    proof = json.loads((ROOT / "docs" / "backends" / "cuda-mutants.json").read_text(encoding="utf-8"))
    published("polydraft.prove/1").validate(proof)
    trials = proof["trials"]
    assert proof["backend"] == "cuda"
    assert all(trial["ok"] for trial in trials)
    found = Counter((trial["kind"], trial["broken"]) for trial in trials)
    page = " ".join((ROOT / "docs" / "backends" / "cuda.md").read_text(encoding="utf-8").split())
    dead, moot, left = (found["mutant", outcome] for outcome in ("fail", "pass", "not run"))
    assert f"in all {len(trials)} trials" in page
    assert f"{dead} mutants die, {moot} make no difference to it, {left} needs what it does not offer" in page
    assert f"the {found['variant', 'pass']} checks of harmless variants pass" in page


def test_a_committed_soak_found_nothing_and_says_how_long_it_ran():
    page = (ROOT / "docs" / "backends" / "cuda.md").read_text(encoding="utf-8")
    rows = {row["backend"]: row for row in result("soak.json")["rows"]}
    for row in rows.values():
        assert row["problems"] == []
        assert row.get("error", 0) == 0
        assert row["compared"] > 1000
        assert all(end <= 1.01 * before for before, end in row["memory_held"].values())
    cuda = rows["cuda"]
    said = f"A soak of {cuda['seconds']:.0f} seconds"
    assert said in page
    for name in ("steps", "requests", "abort", "preemptions", "compared"):
        assert f"{cuda[name]:,}" in page, name
