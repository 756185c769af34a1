"""Tables of docs/performance.md against the committed results they name."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
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
def test_regions_on_a_gpu_can_be_drawn(tmp_path: Path):
    result = json.loads((ROOT / "bench" / "results" / "cuda_regions.json").read_text(encoding="utf-8"))
    script("gpu_regions").draw(result, str(tmp_path / "regions.png"))
    assert (tmp_path / "regions.png").stat().st_size > 10_000


def test_a_region_has_the_launches_and_the_bytes_of_its_name():
    bench = script("gpu_regions")

    def entries(stage: str, *contracts: str) -> list[Any]:
        return [SimpleNamespace(stage=stage, contract=contract) for contract in contracts]

    layer = (
        "rms_norm", "linear", "rope_kv_write", "paged_attention", "linear", "residual_add+rms_norm", "linear", "swiglu", "linear",
    )  # fmt: skip
    target = [
        *entries("pack", "pack_rows"),
        *entries("target", "embed", "forward_meta", *layer, *layer, "gather_rows", "rms_norm", "linear"),
        *entries("verify", "argmax"),
    ]
    draft = [*entries("begin_draft", "begin_draft"), *entries("draft 0", "embed", "linear"), *entries("draft 1", "linear")]
    found = bench.regions(target, draft)
    names = {name: [entry.contract for entry in of] for name, of in found.items()}
    assert len(names["target pass"]) == 2 + 2 * len(layer) + 3
    assert (names["projections"].count("linear"), names["projections"].count("swiglu")) == (8, 2)
    assert names["attention"] == ["rope_kv_write", "paged_attention"] * 2
    assert names["norms"] == ["rms_norm", "residual_add+rms_norm"] * 2
    assert names["head"] == ["gather_rows", "rms_norm", "linear"]
    assert (names["gate and up"], names["qkv"], names["down"]) == (["linear", "swiglu"] * 2, ["linear"] * 2, ["linear"] * 2)
    assert found["qkv"][0] is target[4]
    assert (names["draft pass 0"], names["draft pass 1"]) == (["embed", "linear"], ["linear"])
    assert names["choosing"] == ["argmax"]
    assert not {"pack_rows", "begin_draft"} & {contract for of in names.values() for contract in of}, (
        "they need slots that move on"
    )
    assert len(names["a round"]) == len(target) + len(draft) - 2

    attention = SimpleNamespace(q_size=16, kv_size=8)
    block = SimpleNamespace(mixer=attention, feed_forward=SimpleNamespace(intermediate_size=20))
    model = SimpleNamespace(hidden_size=12, vocab_size=100, blocks=(block, block))
    bytes_of = bench.floors(model, 3, 50)
    weights = 12 * 32 + 12 * 16 + 3 * 12 * 20
    assert bytes_of["projections"] == 2 * 2 * weights
    assert bytes_of["attention"] == 2 * 2 * 2 * 8 * 3 * 50
    assert bytes_of["target pass"] == bytes_of["projections"] + bytes_of["attention"] + 2 * 1200
    assert bytes_of["draft pass"] == 2 * (weights + 2 * 144 + 2 * 8 * 150 + 1200)


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
