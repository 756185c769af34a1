"""Variants of a backend's kernels: what is filed of them, what invalidates it, and that nothing else is ever in use."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polydraft import LLM
from polydraft.cli.doctor import examine
from polydraft.errors import ConfigError, PluginError
from polydraft.plugins import variants
from polydraft.plugins.checks import BACKEND
from polydraft.plugins.plugins import Loaded, Plugins, identify, survey, variant_digests
from polydraft.plugins.variants import Judgement
from tests.support.variants import Chip


@pytest.fixture
def chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chip:
    return Chip(tmp_path, monkeypatch, ("good", "wrong"), "polydraft.reference")


def judgement(name: str = "chip-good", **changes: Any) -> Judgement:
    """What the kit would file of a variant that passed here today."""
    loaded = Loaded.from_entry(BACKEND, "chip")
    return Judgement(
        **{
            "backend": "chip", "variant": name, "runs_with": dict(identify(loaded).runs_with),
            "digests": variant_digests(loaded, name) or {}, "spec": "", "contracts": ("swiglu",), "passed": True,
            "sentence": "24 checks passed", "day": "2026-11-21", "kit": "1", **changes,
        }
    )  # fmt: skip


def used() -> list[str]:
    return [one.name for one in Plugins.load("chip").variants]


def test_none_is_in_use_by_itself(chip: Chip):
    plugins = Plugins.load("chip")
    assert plugins.variants == ()
    assert plugins.unused_variants["chip-good"] == ("it has not been tried here; run polydraft conform chip --enable-variants")


def test_one_that_has_passed_is_in_use_and_serves_its_contract(chip: Chip):
    variants.add([judgement()])
    llm = LLM(backend="chip", max_num_seqs=1, max_model_len=64)
    assert [(o.contract, o.pack) for o in llm.engine.table.overrides] == [("swiglu", "chip-good")]
    decision = next(d for d in llm.engine.resolved.decisions if d.name == "variants")
    assert decision.chosen == ("chip-good",)
    assert decision.reason.startswith("chip-good has passed on this device; chip-wrong: it has not been tried here")


def test_one_that_has_failed_is_not(chip: Chip):
    variants.add([judgement("chip-wrong", passed=False, sentence="L2/swiglu/seeds: wrong")])
    assert used() == []
    assert (
        "failed on 2026-11-21 (device chip 1, driver 7.0, library chiplib 2.1; L2/swiglu/seeds: wrong)"
        in (Plugins.load("chip").unused_variants["chip-wrong"])
    )


def test_one_that_has_failed_is_not_so_much_as_imported(chip: Chip, monkeypatch: pytest.MonkeyPatch):
    """It may have ended the process that tried it."""
    variants.add([judgement("chip-wrong", passed=False, sentence="it died when it was imported")])
    from_entry = Loaded.from_entry

    def watched(role: Any, name: str) -> Any:
        assert name != "chip-wrong"
        return from_entry(role, name)

    monkeypatch.setattr(Loaded, "from_entry", watched)
    assert used() == []


def test_one_that_cannot_be_imported_any_more_is_said_to_be_so(chip: Chip, monkeypatch: pytest.MonkeyPatch):
    variants.add([judgement()])
    from_entry = Loaded.from_entry

    def broken(role: Any, name: str) -> Any:
        if name == "chip-good":
            raise PluginError("'chip-good' cannot be imported")
        return from_entry(role, name)

    monkeypatch.setattr(Loaded, "from_entry", broken)
    assert used() == []
    why = Plugins.load("chip").unused_variants["chip-good"]
    assert why == "its kernel pack cannot be loaded: 'chip-good' cannot be imported"


def test_they_can_be_left_out(chip: Chip):
    variants.add([judgement()])
    llm = LLM(backend="chip", variants="off", max_num_seqs=1, max_model_len=64)
    assert llm.engine.table.overrides == ()
    with pytest.raises(ConfigError, match="variants is 'chip-good', wanted one of auto, off"):
        LLM(backend="chip", variants="chip-good")


def test_a_pack_that_was_named_goes_before_a_variant(chip: Chip, tmp_path: Path):
    variants.add([judgement()])
    named = Plugins.load("chip", packs=("chip-wrong",))
    table = named.kernels(named.open_device("", _options()))
    assert [(o.contract, o.pack) for o in table.overrides] == [("swiglu", "chip-wrong")]
    assert [(s.owner, s.by) for s in table.shadowed if s.contract == "swiglu"] == [
        ("chip-good", "chip-wrong"),
        ("chip", "chip-wrong"),
    ]
    both = Plugins.load("chip", packs=("chip-good",))
    assert [one.name for one in both.loaded] == ["chip", "chip-good"]


def _options() -> Any:
    from polydraft.backend import DeviceOptions

    return DeviceOptions()


def another_device(chip: Chip) -> None:
    chip.runs_with(device="chip 2", driver="7.0", library="chiplib 2.1")


def another_driver(chip: Chip) -> None:
    chip.runs_with(device="chip 1", driver="7.1", library="chiplib 2.1")


def another_library(chip: Chip) -> None:
    chip.runs_with(device="chip 1", driver="7.0", library="chiplib 2.2")


def an_unknown_driver(chip: Chip) -> None:
    chip.runs_with(device="chip 1", driver="", library="chiplib 2.1")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_device, "the device was chip 1 and is chip 2"),
        (another_driver, "the driver was 7.0 and is 7.1"),
        (another_library, "the library was chiplib 2.1 and is chiplib 2.2"),
        (an_unknown_driver, "the driver was 7.0 and is unknown"),
        (lambda chip: chip.change_code("chip_good"), "the code of the variant was another"),
        (lambda chip: chip.change_code("chip"), "the code of the backend was another"),
    ],
)
def test_whatever_changes_puts_it_out_of_use(chip: Chip, change: Callable[[Chip], None], reason: str):
    variants.add([judgement()])
    assert used() == ["chip-good"]
    change(chip)
    plugins = Plugins.load("chip")
    assert plugins.variants == ()
    unused = plugins.unused_variants["chip-good"]
    assert unused.endswith(f"24 checks passed), but {reason}; run polydraft conform chip --enable-variants")


def test_another_device_of_the_same_kind_is_served_and_the_command_names_it(chip: Chip):
    variants.add([judgement(spec="cpu")])
    assert [one.name for one in Plugins.load("chip", device="cpu").variants] == ["chip-good"]
    assert "--device cpu --enable-variants" in Plugins.load("chip", device="cpu").unused_variants["chip-wrong"]


def test_a_newer_judgement_replaces_that_of_the_same_machine_alone(chip: Chip):
    elsewhere = judgement(runs_with={"device": "chip 9"})
    variants.add([judgement(), elsewhere])
    variants.add([judgement(passed=False, day="2026-11-22")])
    assert {(one.runs_with["device"], one.passed) for one in variants.filed()} == {("chip 1", False), ("chip 9", True)}
    assert used() == []


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": "polydraft.variants/2", "judgements": []}',
        '{"schema": "polydraft.variants/1", "judgements": [{}]}',
    ],
)
def test_a_file_that_is_none_is_one_sentence(chip: Chip, text: str):
    variants.file().parent.mkdir(parents=True)
    variants.file().write_text(text)
    with pytest.raises(
        ConfigError, match=r"variants\.json .*delete it, then run polydraft conform BACKEND --enable-variants again"
    ):
        Plugins.load("chip")
    Plugins.load("chip", variants=False)  # who leaves them out never reads it
    Plugins.load("reference")  # nor does a backend without any


def test_an_unknown_field_is_refused_and_nothing_half_written_stays(chip: Chip):
    path = variants.add([judgement()])
    content = json.loads(path.read_text())
    assert [one.name for one in path.parent.iterdir()] == ["variants.json"]
    content["judgements"][0]["extra"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="lacks fields or has others"):
        variants.filed()


def test_doctor_shows_each_and_a_file_that_is_none(chip: Chip, monkeypatch: pytest.MonkeyPatch):
    mine = [found for found in survey() if found.name == "chip"]
    monkeypatch.setattr("polydraft.plugins.plugins.survey", lambda: mine)  # others take seconds to look at
    variants.add([judgement(), judgement("chip-wrong", passed=False, sentence="it died")])
    rows = next(one for one in examine()["backends"] if one["name"] == "chip")["variants"]
    assert [(row["name"], row["used"]) for row in rows] == [("chip-good", True), ("chip-wrong", False)]
    assert "it died" in rows[1]["reason"]
    variants.file().write_text("{")
    rows = next(one for one in examine()["backends"] if one["name"] == "chip")["variants"]
    assert "variants.json is no valid JSON, got " in rows[0]["reason"]


def test_one_whose_pack_is_gone_says_so(chip: Chip):
    variants.add([replace(judgement(), variant="chip-good")])
    (chip.root / "chip_good-1.0.dist-info" / "entry_points.txt").write_text("")
    assert "its kernel pack is not installed" in Plugins.load("chip").unused_variants["chip-good"]
