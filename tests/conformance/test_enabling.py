"""`conform --enable-variants`: what passes is in use afterwards, what fails, crashes or hangs is not, and each says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polydraft.conformance import isolation
from polydraft.conformance.enabling import Trial, enable
from polydraft.errors import ContractError
from polydraft.plugins import variants
from polydraft.plugins.plugins import Plugins
from polydraft.reference.queued import QueuedDevice
from tests.conformance.test_command import conform  # noqa: F401  a fixture
from tests.support.variants import Chip


def used() -> list[str]:
    return [one.name for one in Plugins.load("chip").variants]


@pytest.mark.deep
def test_one_that_passes_one_that_is_wrong_and_one_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Chip(tmp_path, monkeypatch, ("deadly", "good", "wrong"), "polydraft.reference")
    trials = enable("chip", limit_s=60, levels=())
    sentences = {one.variant: one.sentence for one in trials.judgements}
    assert {one.variant: one.passed for one in trials.judgements} == {
        "chip-deadly": False, "chip-good": True, "chip-wrong": False,
    }  # fmt: skip
    assert sentences["chip-good"].endswith(" checks passed")
    assert "the process died in this check (exit status 9)" in sentences["chip-deadly"]
    assert sentences["chip-wrong"].startswith("L2/swiglu/")
    assert (trials.status, used()) == (1, ["chip-good"])
    assert "chip-good                   in use  swiglu:" in trials.page()
    assert "1 of 3 variants of chip on its default device are in use" in trials.page()


def test_one_that_hangs_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Chip(tmp_path, monkeypatch, ("endless",), "polydraft.reference")
    (judgement,) = enable("chip", limit_s=1, levels=()).judgements
    assert not judgement.passed
    assert "did not end within 1 s; it hangs" in judgement.sentence


@pytest.mark.deep
@pytest.mark.usefixtures("one_process")
def test_the_command_runs_whole_texts_too_and_files_what_came_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conform):  # noqa: F811
    chip = Chip(tmp_path, monkeypatch, ("good",), "polydraft.reference")
    monkeypatch.setitem(enable.__kwdefaults__ or {}, "levels", ("L1", "L3"))  # L5 takes seconds
    answer = conform("chip", "--enable-variants", "--out", str(tmp_path / "out"), "--json")
    assert answer.status == 0
    assert answer.json["file"] == str(variants.file())
    assert json.loads((tmp_path / "out" / "variants.json").read_text()) == answer.json
    assert used() == ["chip-good"]
    chip.runs_with(device="chip 1", driver="8.0", library="chiplib 2.1")
    assert used() == []


@pytest.mark.usefixtures("one_process")
def test_without_variants_nothing_is_proved(conform):  # noqa: F811
    answer = conform("reference", "--enable-variants")
    assert answer.status == 4
    assert answer.out == "reference on its default device brings no variants; nothing was tried\n"


def test_a_backend_that_does_not_say_what_it_runs_with_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Chip(tmp_path, monkeypatch, ("good",), "polydraft.reference").runs_with(device="", driver="")
    with pytest.raises(ContractError, match="could never be recognised as out of date"):
        enable("chip", limit_s=60, levels=())


@pytest.mark.parametrize("beside", [("--prove",), ("--level", "L2"), ("--plugin", "x.py"), ("--kernels", "x")])
def test_it_stands_alone(conform, beside: tuple[str, ...]):  # noqa: F811
    answer = conform("reference", "--enable-variants", *beside)
    assert answer.status == 2
    assert "--enable-variants runs what each variant needs; name BACKEND and --device alone beside it" in answer.err


def test_variants_that_fail_together_are_all_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Chip(tmp_path, monkeypatch, ("good", "other"), "polydraft.reference")
    monkeypatch.setattr(isolation, "refuse_deadly", lambda *args, **options: None)
    monkeypatch.setattr(Trial, "run", lambda self, packs, selections: ("L5: they differ", 0) if len(packs) > 1 else ("", 9))
    trials = enable("chip", limit_s=60, levels=())
    assert [one.sentence for one in trials.judgements] == ["together with chip-good, chip-other: L5: they differ"] * 2
    assert used() == []


@pytest.mark.usefixtures("one_process")
@pytest.mark.deep
def test_graphs_are_not_asked_of_a_variant_on_a_device_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The backend declares them, and every check of them is left out there."""
    Chip(tmp_path, monkeypatch, ("good",), "polydraft.reference")
    monkeypatch.setattr(QueuedDevice, "withdrawn", {"graph_capture": "it captured nothing"}, raising=False)
    (judgement,) = enable("chip", device="queued", limit_s=60, levels=("L3",)).judgements
    assert (judgement.passed, judgement.sentence.partition(" ")[2]) == (True, "checks passed"), judgement.sentence
