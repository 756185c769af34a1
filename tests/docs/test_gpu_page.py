"""What docs/performance.md shows of results measured on a GPU against those results."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_heads, gpu_launches, gpu_page, gpu_prompts, gpu_rounds, host_time
from polydraft import Engine
from polydraft.bench import report
from polydraft.bench.measure import Load, run
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.models.families import FamilyRegistry
from tests.docs.pages import read
from tests.support import tiny
from tests.support.project import ROOT

PAGE = ROOT / "docs" / "performance.md"
THERE = [name for name in gpu_page.SHOWN if (gpu_page.RESULTS / name).is_file()]


def result(name: str) -> dict[str, Any]:
    found = gpu_page.read(name)
    assert found is not None
    return found


def test_the_page_is_what_the_script_would_make_of_the_results():
    page = read(PAGE)
    assert gpu_page.renewed(page) == page


def test_every_result_that_is_there_is_shown_and_no_other():
    shown = re.findall(r"<!-- figures: bench/results/(cuda[a-z_]*\.json) -->", read(PAGE))
    assert sorted(shown) == sorted(THERE)
    assert {"cuda.json", "cuda_launches.json"} <= set(THERE)


@pytest.mark.parametrize("name", THERE)
def test_a_table_follows_its_result(name: str):
    found = result(name)
    assert (found["schema"], found["device"]) == ("polydraft.bench/1", "NVIDIA H200")
    changed = copy.deepcopy(found)
    for row in changed["rows"]:
        for field in ("ms_per_round", "round_us", "ttft_ms"):
            if row.get(field):
                row[field] *= 1.5
    before, after = gpu_page.SHOWN[name](found), gpu_page.SHOWN[name](changed)
    assert len(before) == len(after)
    assert before != after
    assert all(paragraph in read(PAGE) for paragraph in before)


@pytest.mark.parametrize("name", [name for name in THERE if name not in ("cuda_launches.json", "cuda_prompts.json")])
def test_rows_say_what_is_synthetic_and_what_their_floor_is(name: str):
    for row in result(name)["rows"]:
        assert row["weights"] == "random"
        assert row["acceptance"] == ("synthetic" if row["draft_tokens"] else "measured")
        share = row["floor_bytes"] / row["copy_bytes_per_s"] / (1e-3 * row["ms_per_round"])
        assert row["copy_rate_share"] == pytest.approx(share)


def test_every_cell_of_the_comparison_is_there_and_measured_alike():
    rows = result("cuda.json")["rows"]
    cells = [(row["shape"], row["draft_tokens"], row["batch"]) for row in rows]
    assert cells == [("mimo-7b", drafts, batch) for drafts in (0, 3) for batch in gpu_rounds.BATCHES]
    assert {(row["prompt_tokens"], row["new_tokens"], row["dtype"], row["graph"], row["overlap"]) for row in rows} == {
        (512, 256, "bf16", "decode", 1)
    }
    ratios = gpu_page.ratios(result("cuda.json"))
    assert list(ratios) == cells
    others = {
        (row["shape"], row["draft_tokens"], row["batch"]): row["ms_per_round"]
        for row in gpu_rounds.peer()["rows"]
        if row["gpus"] == 1 and row["weights"] == "bf16"
    }
    for row, cell in zip(rows, cells, strict=True):
        assert ratios[cell] == pytest.approx(row["ms_per_round"] / others[cell])


def test_no_head_makes_rounds_by_bytes_much_slower_than_those_that_read_it_whole():
    shares = gpu_heads.compared(result("cuda_heads.json"))
    assert {name for _, name in shares} == set(gpu_heads.FAMILIES)
    assert max(share for _, _, share in shares.values()) <= 1.03
    for batch in {batch for batch, _ in shares}:
        assert shares[batch, "normal"][2] < 1, "and what they save is still saved"


def test_both_sides_of_the_comparison_say_how_a_round_is_estimated_and_take_full_ones():
    for estimator in (result("cuda.json")["estimator"], gpu_rounds.ESTIMATOR, gpu_rounds.peer()["estimator"]):
        assert "median" in estimator
        assert "in which all requests of the batch take part" in estimator
    whole = gpu_page.end_to_end()
    assert list(whole) == [("mimo-7b", drafts, batch) for drafts in (0, 3) for batch in gpu_rounds.BATCHES]
    assert all(0 < share < 1 for share in whole.values())
    for row in gpu_rounds.peer()["rows"]:
        if "polydraft_ms_per_round" in row:
            share = row["polydraft_ms_per_round"] / row["ms_per_round"]
            assert row["polydraft_end_to_end_share"] >= share - 0.01, "prompts are no smaller a share of ours"


def test_kernels_of_a_round_add_up_to_it_and_are_of_a_kind():
    for row in result("cuda_launches.json")["rows"]:
        assert sum(figures["us"] for figures in row["kernels"].values()) == pytest.approx(row["round_us"])
        assert sum(gpu_launches.by_kind(row).values()) == pytest.approx(1e-3 * row["round_us"])
        books = {kernel for kernel in row["kernels"] if gpu_launches.kind_of(kernel) == gpu_launches.OTHERS}
        assert {gpu_launches.ONCE, "verify_and_commit", "snapshot_output"} <= books
        assert row["kernels"][gpu_launches.ONCE]["launches"] == pytest.approx(1.0)
        assert gpu_launches.by_kind(row)[gpu_launches.OTHERS] < 0.03 * 1e-3 * row["round_us"], "no large one is in no kind"
        assert row["floor_us"] < row["round_us"]


def test_operations_of_a_prompt_are_those_of_weights_and_of_causal_attention():
    checkpoint = RandomCheckpoint(ROOT / "bench" / "shapes" / "tiny.json")
    model, _ = FamilyRegistry().describe(checkpoint)
    checkpoint.close()
    weights = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 768
    keys = sum(range(1, 101))
    wanted = 8 * (2 * 100 * weights + 2 * 2 * 256 * keys)
    assert gpu_prompts.target_operations(model, 1, 100) == pytest.approx(wanted, rel=0.01)
    assert gpu_prompts.target_operations(model, 3, 100) == 3 * gpu_prompts.target_operations(model, 1, 100)
    assert gpu_prompts.draft_operations(model, 1, 100, 3) == 0, "the only step's draft pass is behind the first token"
    assert gpu_prompts.draft_operations(model, 2, 8192, 0) == 0
    weights = 256 * 2 * 256 + 256 * (256 + 2 * 128)  # what joins state and token, and QKV
    prompt = 2 * 8192 * weights + 2 * 2 * 256 * sum(range(1, 8193))
    assert gpu_prompts.draft_operations(model, 2, 8192, 3) == pytest.approx(2 * prompt, rel=0.001), "all but the last rows"


@pytest.mark.parametrize("overlap", [0, 1])
def test_prompts_go_through_in_the_steps_that_the_scheduler_plans(overlap: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_prompts, "BATCHED_TOKENS", 24)
    config = EngineConfig(
        model=str(tiny.checkpoint("narrow")), backend="reference", draft_tokens=2, max_num_seqs=5, max_batched_tokens=24,
        prefix_cache=False, overlap=overlap,
    )  # fmt: skip
    engine, planned = Engine(config), list[int]()
    plan = engine.scheduler.plan

    def told() -> Any:
        made = plan()
        if made is not None and made.has_prefill:
            planned.append(int(made.rows[~made.decode].sum()))
        return made

    engine.scheduler.plan = told  # type: ignore[method-assign]
    run(engine, Load(5, 11, 12))
    assert planned == gpu_prompts.prefill_rows(5, 11, 2)
    assert len(planned) > 2


@pytest.mark.deep
def test_rounds_can_be_drawn(tmp_path: Path):
    gpu_page.draw_rounds(result("cuda.json"), tmp_path / "rounds.png")
    assert (tmp_path / "rounds.png").stat().st_size > 10_000


def test_acceptance_of_a_reduced_vocabulary_is_that_of_the_demo_checkpoint():
    if "cuda_draft_vocab.json" not in THERE:
        pytest.skip("no such result is committed")
    rows = json.loads((gpu_page.RESULTS / "draft_vocab.json").read_text(encoding="utf-8"))["rows"]
    said = gpu_page.vocabularies(result("cuda_draft_vocab.json"))[2]
    assert f"{rows[1]['tokens_per_round']:.2f} with {rows[1]['draft_vocab']:,}" in said


def test_tables_of_experts_and_of_two_gpus_are_those_of_their_runs():
    def rows(name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((gpu_page.RESULTS / name).read_text(encoding="utf-8"))["rows"]
        return found

    def rounds(**wanted: Any) -> list[str]:
        """Milliseconds by batch."""
        every = [row for name in ("experts.json", "ranks.json", "cuda.json") for row in rows(name)]
        found = sorted((row for row in every if wanted.items() <= row.items()), key=lambda row: row["batch"])
        return [f"{row['ms_per_round']:.2f}" for row in found]

    page = read(ROOT / "docs" / "backends" / "cuda.md")
    for k in (0, 3):
        for shape in ("ernie21", "glm12"):
            assert f"| `{shape}` | {k} | {' | '.join(rounds(shape=shape, draft_tokens=k))} |" in page
        two, one = (rounds(shape="mimo-7b", draft_tokens=k, tensor_parallel=ranks) for ranks in (2, 1))
        assert f"| {k} | {' | '.join(two)} | {' / '.join(one)} |" in page
    host = json.loads((gpu_page.RESULTS / "ranks_host_time.json").read_text(encoding="utf-8"))["rows"]
    assert report.renewed(page, host_time.OF_RANKS, host_time.table_of_ranks(host)) == page
    for named, launches in (
        ("`all_reduce`", "all_reduce"), ("`all_reduce`, `residual_add+rms_norm`", "all_reduce, residual_add+rms_norm"),
        ("joined", "all_reduce+residual_add+rms_norm"),
    ):  # fmt: skip
        us = {row["batch"]: row["us"] for row in rows("collectives.json") if row["launches"] == launches}
        assert f"| {named} | " + " | ".join(f"{us[count]:.1f}" for count in (1, 8, 32, 64, 128, 256)) + " |" in page
