"""`conform --enable-variants` on places of Paddle: what was right there is in use there, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.paddle import needs_device, polydraft
from tests.support.variants import Chip


@pytest.mark.deep
@needs_device
@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ["cpu", "polyemu:0"])
def test_one_that_passes_one_that_is_wrong_and_one_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str):
    chip = Chip(tmp_path, monkeypatch, ("deadly", "good", "wrong"), "polydraft_paddle")
    run = polydraft("conform", "chip", "--device", device, "--enable-variants", "--json", timeout=500)
    judged = {one["variant"]: one for one in json.loads(run.stdout)["judgements"]}
    assert {name: one["passed"] for name, one in judged.items()} == {
        "chip-deadly": False, "chip-good": True, "chip-wrong": False,
    }, run.stdout  # fmt: skip
    assert "the process died in this check (exit status 9)" in judged["chip-deadly"]["sentence"]
    assert judged["chip-wrong"]["sentence"].startswith("L2/swiglu/")
    options = ("generate", "def f(x):", "--backend", "chip", "--device", device, "--max-new-tokens", "2")
    answer = json.loads(polydraft(*options, "--max-num-seqs", "1", "--max-model-len", "64", "--json").stdout)
    assert answer["config"]["variants"] == ["chip-good"]
    chip.runs_with(device="chip 1", driver="7.1", library="chiplib 2.1")
    doctor = json.loads(polydraft("doctor", "--json").stdout)
    rows = next(one for one in doctor["backends"] if one["name"] == "chip")["variants"]
    row = next(one for one in rows if (one["name"], one["device"]) == ("chip-good", device))
    assert "the driver was 7.0 and is 7.1" in row["reason"]
