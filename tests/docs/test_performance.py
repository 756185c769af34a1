"""Tables of docs/performance.md against the committed results they name."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.cpu_vs_transformers import experts_table
from polydraft.bench.report import renewed
from tests.docs.pages import read, section
from tests.support.project import ROOT

PAGE = ROOT / "docs" / "performance.md"


def script(name: str) -> Any:
    """A script of `bench/` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_host_time_is_that_of_the_result():
    """The page is what the script would make of it again."""
    bench = script("host_time")
    result = json.loads((ROOT / "bench" / "results" / "host_time.json").read_text(encoding="utf-8"))
    page = read(PAGE)
    assert renewed(page, bench.FIGURES, *bench.paragraphs(result)) == page
    assert renewed(page, bench.FIGURES, *bench.paragraphs({**result, "date": "1999-01-01"})) != page


def test_host_time_is_what_is_wanted():
    bench = script("host_time")
    result = json.loads((ROOT / "bench" / "results" / "host_time.json").read_text(encoding="utf-8"))
    assert result["schema"] == "polydraft.bench/1"
    assert all(result[key] for key in ("date", "commit", "device", "versions", "method"))
    seen = {(row["batch"], row["prefix_cache"]): row for row in result["rows"]}
    for batch, most in bench.WANTED.items():
        assert str(most) in section(read(PAGE), "Host time of a step")
        for cache in (True, False):
            row = seen[batch, cache]
            assert (row["backend"], row["draft_tokens"], row["acceptance"]) == ("null", 3, "synthetic")
            assert row["host_us_per_step"] < most


def test_every_marked_result_and_picture_exists():
    page = read(PAGE)
    for path in re.findall(r"<!-- figures: (\S+) -->", page):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page):
        assert (PAGE.parent / path).is_file(), path


@pytest.mark.deep
def test_kernels_of_rounds_can_be_drawn(tmp_path: Path):
    result = json.loads((ROOT / "bench" / "results" / "cuda_launches.json").read_text(encoding="utf-8"))
    script("gpu_launches").draw(result, tmp_path / "launches.png")
    assert (tmp_path / "launches.png").stat().st_size > 10_000


def test_drafts_of_both_are_worth_those_of_the_better_where_texts_repeat():
    """`bench/repetitive_texts.py` writes result and table."""
    name = "bench/results/repetitive_texts.json"
    measured = json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
    assert f"<!-- figures: {name} -->\n\n{script('repetitive_texts').table(measured)}\n" in read(PAGE)
    found = {(row["text"], row["draft_tokens"], row["method"]): row["tokens_per_round"] for row in measured}
    for (text, num_drafts, _), tokens in found.items():
        assert found[text, num_drafts, "hybrid"] >= 0.97 * tokens
    host = json.loads((ROOT / "bench/results/suffix_host_time.json").read_text(encoding="utf-8"))["rows"]
    by_batch = {row["batch"]: row["us_per_step"] for row in host}
    assert f"{by_batch[64]:.0f} us a step at\nbatch 64 and {by_batch[1]:.0f} at batch 1" in read(PAGE)
    assert by_batch[64] < 150


def test_the_table_of_experts_is_that_of_its_result():
    """`bench/cpu_vs_transformers.py --experts` writes both; the text is the same as transformers' in float32."""
    name = "bench/results/cpu_experts.json"
    measured = json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
    assert f"<!-- figures: {name} -->\n\n{experts_table(measured)}\n" in read(PAGE)
    found = {(row["name"], row["batch"]): row for row in measured}
    for batch in (1, 8):
        assert found["cpu f32 K=0", batch]["same_tokens"] == 1
        assert min(found[f"cpu {dtype} K=0", batch]["speedup_vs_transformers"] for dtype in ("f32", "bf16")) >= 3
