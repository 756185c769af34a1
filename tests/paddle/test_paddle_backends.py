"""The Paddle and XPU backends: conformance, the reference's text and rounds, one sentence for whatever is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.paddle import (
    HAS_GRAPHS,
    answer,
    forked,
    forked_command,
    needs_device,
    needs_graphs,
    needs_paddle,
    polydraft,
    script,
)

PROMPT = "def fibonacci(n):"
SMALL = ("--max-new-tokens", "12", "--max-num-seqs", "1", "--max-model-len", "64", "--block-size", "16")


def conforms(folder: Path, backend: str, device: str, *selection: str) -> dict[str, Any]:
    run = polydraft("conform", backend, "--device", device, *selection, "--out", str(folder), timeout=1700)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    checks = report["results"]
    assert [c for c in checks if c["outcome"] in ("fail", "error")] == [], run.stdout[-3000:]
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return report


@needs_paddle
@pytest.mark.deep  # `make conform` claims it, too
@pytest.mark.timeout(300)
def test_basic_holds_on_the_cpu(tmp_path: Path):
    report = conforms(tmp_path, "paddle", "cpu", "--profile", "basic")
    assert set(report["owners"].values()) == {"own"}


@needs_device
@pytest.mark.deep  # `make conform` claims `basic` of both
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "level"), [("paddle", "L1"), ("xpu", "L0")])
def test_a_level_holds_on_a_custom_device(tmp_path: Path, backend: str, level: str):
    conforms(tmp_path, backend, "polyemu:0", "--level", level)


@needs_device
@pytest.mark.deep  # `make conform` checks it with `basic`
def test_quantised_rows_are_kept_right_on_a_custom_device(tmp_path: Path):
    conforms(tmp_path, "xpu", "polyemu:0", "--check", "L2/rope_kv_write/kv-int8")


@needs_paddle
def test_quantised_rows_are_declared_where_they_were_tried():
    from polydraft_paddle import describe

    found = {spec: describe("paddle", "", spec).capabilities.kv_dtypes for spec in ("cpu", "polyemu:0", "gpu:0", "xpu:0")}
    assert found == {"cpu": ("int8",), "polyemu:0": ("int8",), "gpu:0": (), "xpu:0": ()}


ALL = (("--profile", "full"),) if HAS_GRAPHS else (("--profile", "basic"), ("--level", "L4"), ("--level", "L6"))
"""What a custom device can show: `full`, or all of it that needs no graphs, which Paddle has there since 3.3."""


@pytest.mark.deep
@needs_device
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("selection", ALL, ids=lambda selection: selection[1])
@pytest.mark.parametrize("backend", ["paddle", "xpu"])
def test_all_that_there_is_holds_on_a_custom_device(tmp_path: Path, backend: str, selection: tuple[str, ...]):
    """Every operation of every check has a kernel on the device: falling back is off, so one that has none is an error. What was
    not tried lacks graphs, sums in one order, sleep, rows whose bits do not depend on the launch, another dtype, two kernels in
    one, or a buffer that can be bound elsewhere; what was not seen is memory, which Paddle keeps, and on a loaded machine
    steps."""
    report = conforms(tmp_path, backend, "polyemu:0", *selection)
    assert report["verdict"]["counts"]["waived"] == 0
    lacks = r"(graph_capture|row_invariant|ordered_sums|sleep) is not declared|no dtype besides|KV rows in fp8"
    lacks += r"|\+\w+ is not offered|no method move|_leaves is not offered|weight_packings|expert_packings"
    lacks += r"|in one way alone|memory in use|steps are launched before"
    assert [c for c in report["results"] if c["outcome"] != "pass" and not re.search(lacks, c["message"])] == []


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    return answer("generate", PROMPT, "--backend", "reference", *SMALL)["requests"][0]


def same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Text and rounds; no near-tie was met, so none is tolerated."""
    request = got["requests"][0]
    assert (request["token_ids"], request["rounds"]) == (wanted["token_ids"], wanted["rounds"])


@pytest.mark.deep
@needs_paddle
def test_the_cpu_says_what_the_reference_says(wanted: dict[str, Any]):
    same(answer("generate", PROMPT, "--backend", "paddle", "--device", "cpu", *SMALL), wanted)


@pytest.mark.deep
@needs_device
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "overlap", "graph"),
    [
        ("paddle", "0", "off"),
        ("paddle", "1", "auto"),  # graphs where the installed Paddle has them
        pytest.param("xpu", "0", "decode", marks=needs_graphs),  # xpu at overlap 1: test_xpu_extras.py
    ],
)
def test_a_custom_device_says_what_the_reference_says(wanted: dict[str, Any], backend: str, overlap: str, graph: str):
    options = ("--backend", backend, "--device", "polyemu:0", "--overlap", overlap, "--graph", graph)
    got = answer("generate", PROMPT, *options, *SMALL)
    same(got, wanted)
    assert (got["totals"]["graph_replays"] > 0) == (HAS_GRAPHS and graph != "off")


# -- what can be wrong -------------------------------------------------------------------------------
@needs_paddle
@pytest.mark.parametrize(
    ("backend", "device", "sentence"),
    [
        ("paddle", "xpu:7", "Paddle has no device 'xpu:7'; it offers cpu"),
        ("xpu", "xpu:0", "the installed Paddle is not that for Kunlun XPU; install paddlepaddle-xpu"),
        ("xpu", "elsewhere:0", "Paddle has no device 'elsewhere:0'; it offers cpu"),
    ],
)
def test_a_place_that_there_is_not_is_one_sentence(backend: str, device: str, sentence: str):
    run = forked_command("generate", PROMPT, "--backend", backend, "--device", device, "--max-new-tokens", "1")
    assert run.returncode == (2 if "not that for" in sentence else 1)
    assert sentence in run.stderr.strip().splitlines()[-1]


LOST = """
import polydraft_paddle_emu as device
from polydraft import LLM, SamplingParams
llm = LLM(backend="paddle", device="polyemu:0", draft_tokens=1, max_num_seqs=1, max_model_len=64, graph="off")
print(llm.generate(["x"], SamplingParams(max_new_tokens=2))[0].finish_reason)
device.set_knob("lost", 1)
print(llm.generate(["x"], SamplingParams(max_new_tokens=2))[0].error)
device.set_knob("lost", 0)
llm.engine.device.close()
"""


@needs_device
def test_a_lost_device_is_one_sentence():
    run = forked(LOST)
    before, error = run.stdout.strip().splitlines()
    assert before == "length", run.stderr[-2000:]
    assert error.startswith("device polyemu:0 answered with an error (")
    assert error.endswith("check the device, its free memory and its driver, then start again")


@needs_paddle
def test_paddle_is_imported_only_when_it_is_chosen():
    code = "import sys; from polydraft import LLM; LLM(backend='reference').generate(['x']); print('paddle' in sys.modules)"
    run = script(code)
    assert run.stdout.split()[-1] == "False", run.stderr[-1000:]


@pytest.mark.deep
@needs_paddle
def test_its_noise_is_kept_out_of_the_way():
    """`answer` refuses a run that says anything on standard error; so do the tests of custom devices, which use it too."""
    answer("generate", PROMPT, "--backend", "paddle", "--temperature", "0.8", "--logprobs", "2", *SMALL)
