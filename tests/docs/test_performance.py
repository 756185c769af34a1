"""Tables of docs/performance.md against the committed results they name."""

import importlib.util
import json
import re
from typing import Any

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
    assert bench.put_into(page, result) == page
    assert bench.put_into(page, {**result, "date": "1999-01-01"}) != page


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


def test_rounds_on_a_gpu_are_those_of_the_result():
    bench = script("gpu_rounds")
    result = json.loads((ROOT / "bench" / "results" / "cuda.json").read_text(encoding="utf-8"))
    page = read(PAGE)
    assert bench.put_into(page, result) == page
    assert bench.markdown(result) in section(page, "Decode rounds on an NVIDIA GPU")
    assert all(row["ms_per_round"] <= 0.26 * other for row, other in beside(bench, result, "small", "tiny"))
    assert all(0.81 <= round(row["ms_per_round"] / other, 2) <= 0.96 for row, other in beside(bench, result, "mimo-7b"))


def beside(bench: Any, result: dict[str, Any], *shapes: str) -> list[tuple[dict[str, Any], float]]:
    """Rows of these shapes, each with what the other engine takes."""
    found = [
        (row, bench.VLLM[row["shape"], row["draft_tokens"]][bench.BATCHES.index(row["batch"])])
        for row in result["rows"]
        if row["shape"] in shapes
    ]
    assert found
    return found
