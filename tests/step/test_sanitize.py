"""The hazard checker: nothing on the project's own runner, and every planted hazard by its name."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polydraft import LLM, Engine, SamplingParams
from polydraft.cli import main
from polydraft.errors import HazardError
from polydraft.instruments.sanitize import HAZARDS, Sanitizer
from polydraft.instruments.sanitize.device import WatchedDevice
from polydraft.plugins.plugins import Plugins
from polydraft.step.runner import Runner
from tests.support import tiny
from tests.support.depth import among, crossed
from tests.support.emulator import Emulator
from tests.support.planted import ASKS, MODEL, PLANTED, Planted, watched
from tests.support.planted_device import PlantedPlugin
from tests.support.project import ROOT
from tests.support.runs import DEVICES, ORDERS, Ask, drive, essence

EMULATORS = [f"emulator:0?seed={seed}&rows={rows}" for seed, rows in enumerate(("slot", "prefill-first", "seeded"))]


def essences(engine: Engine, asks: list[Ask], steps: int = 200) -> list[Mapping[str, Any]]:
    return [essence(output) for output in drive(engine, asks, limit=steps)]


# -- the project's own runner --------------------------------------------------------------------------
SHARED = tuple(range(1, 36))
OWN: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5},
    {"logit_bias": {7: 1.0}},
    {"bad_words": ("w5",), "min_tokens": 4},
)
BUSY = [
    Ask(
        (*SHARED, i),
        SamplingParams(max_new_tokens=10 + 4 * i, ignore_eos=True, temperature=i % 2, seed=i, **own),  # type: ignore[arg-type]
        arrival=2 * i,
        abort=9 if i == 2 else None,
    )
    for i, own in enumerate(OWN)
]
"""Requests that share a beginning, sample or not, have their logits processed or not, want more blocks than there are, and of
which one is aborted."""
CRAMPED = {"max_num_seqs": 3, "max_batched_tokens": 24, "block_size": 8, "num_blocks": 9, "draft_tokens": 2, "max_model_len": 80}


def busy(plugin: object | None, **options: Any) -> Engine:
    model: dict[str, Any] = {"model": str(tiny.checkpoint("deep")), "plugins": tiny.PLUGINS, "invariant": True}
    return LLM(plugin=plugin, **{**model, **CRAMPED, **options}).engine


@functools.cache
def plain_busy() -> list[Mapping[str, Any]]:
    return essences(busy(None, backend="reference"), BUSY)


def check_clean(engine: Engine) -> None:
    outputs = essences(engine, BUSY)
    assert engine.hazards == ()
    assert engine.scheduler.num_preemptions > 0
    assert engine.ledger.num_hits > 0
    aborted = next(i for i, output in enumerate(outputs) if output["finish_reason"] == "abort")
    assert aborted == 2
    assert [o for i, o in enumerate(outputs) if i != aborted] == [o for i, o in enumerate(plain_busy()) if i != aborted]
    engine.close()


@pytest.mark.parametrize("device", [*DEVICES, *ORDERS])
def test_own_runner_is_clean(device: str) -> None:
    options = dict((DEVICES | ORDERS)[device])
    check_clean(busy(options.pop("plugin", None), sanitize=True, **options))


@pytest.mark.parametrize(
    ("watched_by", "graph"),
    crossed(4, [(PlantedPlugin(), 1), *((Emulator(spec), i) for i, spec in enumerate(EMULATORS))], ["off", "decode"]),
)
def test_own_runner_is_clean_with_graphs(watched_by: tuple[object, int], graph: str) -> None:
    plugin, overlap = watched_by
    engine = busy(plugin, sanitize=True, overlap=overlap, graph=graph)
    check_clean(engine)
    assert (engine.device.counters.graph_replays > 0) == (graph == "decode")


@pytest.mark.parametrize("running", ["finish", "recompute"])
def test_an_update_of_the_weights_is_clean(running: Any) -> None:
    engine = watched(PlantedPlugin(), graph="decode")
    for ask in ASKS:
        engine.add(ask.prompt_ids, ask.params)
    for _ in range(3):
        engine.step()
    engine.update_weights(tiny.checkpoint(MODEL), running=running)
    while engine.has_work:
        engine.step()
    assert engine.totals.steps > 6
    engine.close()


@pytest.mark.parametrize("fault", ["copy@9", "op@300:fail", "download@4:fail,op@420", "op@260:lost"])
def test_a_device_that_fails_is_no_hazard(fault: str) -> None:
    """What was in flight is void: its snapshots are never read, its events never waited for, its slots let go at once."""
    engine = watched(Emulator(f"emulator:0?seed=5&fault={fault}"), overlap=2)
    reasons = {output["finish_reason"] for output in essences(engine, ASKS)}
    assert "error" in reasons
    engine.close()


@pytest.mark.parametrize(
    "options",
    [{"draft_tokens": 0}, {"draft_tokens": 3, "verify": "rejection"}, {"draft_tokens": 2, "proposer": "ngram"}],
    ids=str,
)
def test_other_drafts_and_verifiers_are_clean(options: dict[str, Any]) -> None:
    engine = watched(PlantedPlugin(), **options)
    essences(engine, ASKS)
    engine.close()


# -- planted hazards -----------------------------------------------------------------------------------
@functools.cache
def unmutated(overlap: int, graph: bool, observing: bool) -> list[Mapping[str, Any]]:
    """What the run of all mutants gives without any; nothing is found."""
    engine = watched(PlantedPlugin(observing=observing), overlap=overlap, graph="decode" if graph else "off")
    outputs = essences(engine, ASKS)
    assert engine.hazards == ()
    return outputs


def run(planted: Planted, engine: Engine, steps: int = 200) -> list[Mapping[str, Any]] | None:
    """Plant, and serve to the end if it comes to that within so many steps."""
    try:
        planted.plant(engine)
        return essences(engine, ASKS, steps)
    except Exception:  # noqa: BLE001  a host that trusts what it should not ends in many ways
        return None


@pytest.mark.parametrize("planted", among(PLANTED[::4], PLANTED), ids=lambda planted: planted.name)
def test_planted_hazard_is_found_by_name(planted: Planted) -> None:
    """Exactly what was planted is found, on a synchronous device whose texts mostly do not tell."""
    engine = planted.engine()
    outputs = run(planted, engine)
    found, expected = {hazard.name for hazard in engine.hazards}, {planted.hazard, *planted.also}
    assert expected <= found <= expected | planted.consequences
    assert any(re.search(planted.about, hazard.memory) for hazard in engine.hazards if hazard.name == planted.hazard)
    right = unmutated(planted.overlap, planted.graph, bool(planted.kernels))
    assert (outputs == right) == planted.harmless
    with pytest.raises(HazardError, match=planted.hazard):
        engine.close()


ON_ANY_DEVICE = [planted for planted in PLANTED if not planted.kernels]


@pytest.mark.parametrize("planted", among(ON_ANY_DEVICE[1::4], ON_ANY_DEVICE), ids=lambda planted: planted.name)
def test_planted_hazard_is_found_on_the_emulator(planted: Planted) -> None:
    """The same on a device that makes the most of it; what comes after the first mistake is anybody's guess."""
    engine = planted.engine(Emulator("emulator:0?seed=3&policy=lazy"))
    run(planted, engine, 12)
    assert planted.hazard in {hazard.name for hazard in engine.hazards}


def test_every_name_is_planted() -> None:
    assert len(PLANTED) >= 20
    assert {name for planted in PLANTED for name in (planted.hazard, *planted.also)} == set(HAZARDS)


# -- reports -------------------------------------------------------------------------------------------
def mutant(name: str) -> Engine:
    planted = next(p for p in PLANTED if p.name == name)
    engine = planted.engine()
    planted.plant(engine)
    return engine


def test_a_report_names_both_operations_both_places_the_step_and_the_missing_edge() -> None:
    engine = mutant("staging_shared_by_steps")
    drive(engine, ASKS)
    hazard = next(h for h in engine.hazards if "slot_order" in h.memory)
    first, second = hazard.first, hazard.second
    assert first is not None
    assert (hazard.name, hazard.memory) == ("staging-rewritten", "staging0.slot_order[0:2]")
    assert (second.what, second.where, second.step) == ("host write of staging0.slot_order[0:2]", "host", 2)
    assert (first.what, first.where, first.step) == ("upload staging0.slot_order -> slot_order", "compute", 1)
    assert all(re.fullmatch(r"polydraft/step/uploads\.py:\d+", operation.site) for operation in (first, second))
    assert "edge compute -> host" in hazard.missing
    sentence = str(hazard)
    assert "\n" not in sentence
    assert all(text in sentence for text in (hazard.name, hazard.memory, str(first), str(second), hazard.missing))


def test_launches_are_named_by_contract_program_and_room() -> None:
    engine = mutant("draft_passes_on_a_side_stream")
    drive(engine, ASKS)
    streams = {(h.first.where, h.second.where) for h in engine.hazards if h.first}
    assert streams == {("side", "compute"), ("compute", "side")}
    places = r"((greedy|sampling)[a-z-]*\.(target|draft): [\w ]+|(admit|grant): upload)"
    pattern = rf"(launch [a-z_+]+ \({places}\)|fill of .*|(up|down)load .*)"
    assert all(re.fullmatch(pattern, operation.what) for h in engine.hazards for operation in (h.first, h.second) if operation)


def test_a_place_is_never_inside_the_checker_or_a_loop_over_a_program() -> None:
    for name in ("kernel_allocates_in_its_launch", "kernel_waits_for_its_device", "launch_longer_than_its_buffers"):
        engine = mutant(name)
        with contextlib.suppress(Exception):
            drive(engine, ASKS)
        sites = {operation.site for h in engine.hazards for operation in (h.first, h.second) if operation}
        assert all(re.fullmatch(r"polydraft/step/(runner|uploads)\.py:\d+", site) for site in sites), sites


def test_the_same_finding_is_counted_and_not_repeated() -> None:
    engine = mutant("kernel_waits_for_its_device")
    drive(engine, ASKS)
    assert sum(hazard.count for hazard in engine.hazards) == engine.totals.steps
    assert len(engine.hazards) < engine.totals.steps / 2
    assert all(str(hazard).endswith(f"[{hazard.count} times]") == (hazard.count > 1) for hazard in engine.hazards)


def test_strict_raises_at_the_operation_itself() -> None:
    engine = mutant("buffer_allocated_in_the_launch_path")
    engine.instruments[Sanitizer].report.strict = True
    with pytest.raises(
        HazardError, match=r"^allocation-in-launch of temporary: .*step 1, tests/support/planted\.py:\d+"
    ) as caught:
        drive(engine, ASKS)
    assert caught.value.hazards == engine.hazards


def test_close_gives_the_device_back_and_raises_every_finding() -> None:
    engine = mutant("uploads_on_a_side_stream")
    drive(engine, ASKS)
    with pytest.raises(HazardError) as caught:
        engine.close()
    lines = str(caught.value).splitlines()
    assert lines[0] == f"the hazard checker found {len(engine.hazards)} hazards:"
    assert [line.strip() for line in lines[1:]] == [str(hazard) for hazard in engine.hazards]
    assert caught.value.hazards == engine.hazards


def generate(*arguments: str) -> int:
    given = ("generate", "w1 w2", "--model", str(tiny.checkpoint("narrow")), "--max-new-tokens", "6", "--json", *arguments)
    status = main.main(given, standalone_mode=False)
    return int(status or 0)


def test_the_command_tells_hazards_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate() == 0
    plain = json.loads(capsys.readouterr().out)
    assert generate("--sanitize") == 0
    clean = capsys.readouterr()
    assert (json.loads(clean.out)["requests"], clean.err) == (plain["requests"], "")

    launch = Runner.launch
    monkeypatch.setattr(Runner, "launch", lambda self, plan: (self.device.synchronize(), launch(self, plan))[1])
    assert generate() == 0
    capsys.readouterr()
    assert generate("--sanitize") == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["requests"] == plain["requests"]
    assert told.err.startswith(
        "polydraft: the hazard checker found 1 hazard:\n  sync-in-launch of the device: wait for the device (step 1, "
    )


# -- cost and scope ------------------------------------------------------------------------------------
def test_nothing_is_wrapped_without_it() -> None:
    engine = watched(None, sanitize=False, backend="reference")
    assert not isinstance(engine.device, WatchedDevice)
    assert type(engine.plugins) is Plugins
    assert engine.hazards == ()
    assert not any(vars(engine.points).values())
    assert not engine.ledger.on_release
    kinds = [entry.launch for parts in engine.runner.programs.values() for program in parts.values() for entry in program.entries]
    assert not any("sanitize" in type(launch).__module__ for launch in kinds)
    assert not any("sanitize" in type(staging).__module__ for staging, _ in engine.runner._outputs)


def test_the_page_explains_every_name() -> None:
    text = Path(ROOT / "docs" / "sanitize.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([a-z-]+)` \| (.*?) \|", text, re.MULTILINE))
    assert listed == dict(HAZARDS)
