"""The kit's own judgement, without running a check: selections, verdicts, reports, waivers.

These tests are quick, since `tools/mutate_kit.py` runs them against every small change of the code that they are about.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Callable
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from polydraft import __version__, reference
from polydraft.backend import BackendInfo
from polydraft.conformance import catalogue, isolation
from polydraft.conformance import report as reporting
from polydraft.conformance.catalogue import lists_digest, must_own, must_pass
from polydraft.conformance.check import Check
from polydraft.conformance.outcomes import (
    CLAIMED,
    FAILS,
    HOLDS,
    KIT_ERROR,
    LEVELS,
    NOTHING,
    OUTCOMES,
    PROFILES,
    SPEC,
    USAGE,
    Result,
    as_result,
)
from polydraft.conformance.pages import page
from polydraft.conformance.report import Selection, conform, digest_of, make, verify, with_causes
from polydraft.conformance.target import Target, wrap
from polydraft.conformance.verdict import Verdict, judge, standings
from polydraft.conformance.waivers import Waiver, apply, load
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.features import FEATURES, Feature, with_base
from polydraft.errors import ConfigError, ContractError, DeviceError
from polydraft.plugins.plugins import Plugins
from tests.support.plugin_doubles import pack_source

DENSE = ("dense",)
OWN = dict.fromkeys(must_own("basic", DENSE), "own")
PASSED = tuple(Result(id_, "pass", 1) for id_ in must_pass("basic", DENSE))
ALL_OWN = dict.fromkeys(must_own("full", DENSE), "own")
EVERYTHING = dict.fromkeys(REGISTRY.names(), "own")
ALL = len(EVERYTHING)
WITHOUT = f", without {', '.join(name for name in FEATURES if name != 'dense')}"


def other(index: int, outcome: Any, **fields: Any) -> list[Result]:
    """All passed, save for one."""
    results = list(PASSED)
    results[index] = dataclasses.replace(results[index], outcome=outcome, **fields)
    return results


# -- outcomes ------------------------------------------------------------------------------------------
def test_numbers_and_names():
    assert (HOLDS, FAILS, USAGE, KIT_ERROR, NOTHING) == (0, 1, 2, 3, 4)
    assert OUTCOMES == ("pass", "fail", "error", "unsupported", "unseen", "waived")
    assert LEVELS == {
        "L0": "load", "L1": "device", "L2": "kernels", "L3": "graph", "L4": "overlap", "L5": "lossless", "L6": "sanity",
    }  # fmt: skip
    assert PROFILES == {
        "basic": ("L0", "L1", "L2", "L5"),
        "graph": ("L0", "L1", "L2", "L3", "L5"),
        "async": ("L0", "L1", "L2", "L4", "L5", "L6"),
        "full": ("L0", "L1", "L2", "L3", "L4", "L5", "L6"),
    }
    both = ("graph_capture", "asynchronous")
    assert CLAIMED == {"basic": (), "graph": both[:1], "async": both[1:], "full": both}
    assert SPEC == "1.0"
    result = Result("L2/x/y", "pass")
    assert (result.comparisons, result.seconds, result.headroom, result.near_ties) == (0, 0.0, None, 0)
    assert (result.cases, result.like, result.level) == (0, (), "L2")
    assert as_result(dataclasses.asdict(result)) == result


HOLD = f"polydraft-conformance 1.0 / basic for dense ({len(OWN)} own, 0 delegated){WITHOUT}"


@pytest.mark.parametrize(
    ("results", "status", "sentence", "problems"),
    [
        (PASSED, 0, f"{HOLD} holds: {len(PASSED)} checks passed", ()),
        (other(3, "fail", message="wrong"), 1, f"{HOLD} fails: 1 checks failed", (f"{PASSED[3].id}: wrong",)),
        (
            other(3, "unsupported"), 1, f"{HOLD} fails: 1 are missing",
            (f"{PASSED[3].id}: unsupported, but the claim needs it",),
        ),
        (PASSED[1:], 1, f"{HOLD} fails: 1 are missing", (f"{PASSED[0].id}: not run, but the claim needs it",)),
        (
            other(3, "waived"), 0, f"{HOLD} / 1 waivers holds: {len(PASSED) - 1} checks passed", (),
        ),
        (
            (*PASSED, Result("L3/more", "unsupported")), 0,
            f"{HOLD} holds: {len(PASSED)} checks passed, 1 are of what it does not have", (),
        ),
        (
            (*other(3, "unseen", message="memory: nobody tells"), Result("L3/more", "unseen", message="memory: not here")), 0,
            f"{HOLD} holds: {len(PASSED) - 1} checks passed; not seen: memory (2 checks)", (),
        ),
        (
            other(3, "error", message="oops"), 3, "the kit failed in 1 places; nothing follows from this run",
            (f"{PASSED[3].id}: oops",),
        ),
        (
            other(3, "pass", comparisons=0), 3, "the kit failed in 1 places; nothing follows from this run",
            (f"{PASSED[3].id} passed without a comparison",),
        ),
        (
            (*PASSED, PASSED[0]), 3, "the kit failed in 1 places; nothing follows from this run",
            ("a check is listed twice",),
        ),
        ((), 4, "nothing was proved: no check passed", ()),
        ((Result("L1/x", "unsupported"),), 4, "nothing was proved: no check passed", ()),
        ((Result("L1/x", "unseen"),), 4, "nothing was proved: no check passed", ()),
        ((Result("L1/x", "waived", 1),), 4, "nothing was proved: no check passed", ()),
        (
            (*PASSED[2:], Result(PASSED[1].id, "fail", 1, message="no")), 1, f"{HOLD} fails: 1 checks failed, 1 are missing",
            (f"{PASSED[1].id}: no", f"{PASSED[0].id}: not run, but the claim needs it"),
        ),
    ],
)  # fmt: skip
def test_verdicts(results: Any, status: int, sentence: str, problems: tuple[str, ...]):
    verdict = judge(list(results), OWN, profile="basic")
    assert (verdict.status, verdict.sentence, verdict.problems) == (status, sentence, problems)


def test_a_failure_without_a_pass_is_a_failure():
    verdict = judge([Result("L1/x", "fail", 1, message="no")], {}, profile="basic", complete=False)
    assert verdict == Verdict(1, "what was asked for fails: 1 checks failed", ("L1/x: no",))


def test_owners_decide_what_is_claimed():
    names = list(OWN)
    one = {**dict.fromkeys(OWN, "delegated"), names[2]: "own"}
    assert judge(PASSED, one, profile="basic").sentence.startswith(
        f"polydraft-conformance 1.0 / basic for dense (1 own, {len(OWN) - 1} delegated){WITHOUT} holds"
    )
    emulated = dict.fromkeys(OWN, "emulated")
    claim = f"basic for dense (0 own, 0 delegated, {len(OWN)} emulated){WITHOUT} holds"
    assert claim in judge(PASSED, emulated, profile="basic").sentence
    for owners in (dict.fromkeys(OWN, "delegated"), {}, dict.fromkeys(OWN, "unknown")):
        verdict = judge(PASSED, owners, profile="basic")
        nothing = f"no compute kernel is the backend's own; implement at least one of {', '.join(OWN)}"
        assert (verdict.status, verdict.sentence, verdict.problems) == (4, f"nothing was proved: {nothing}", (nothing,))
    broken = judge(other(0, "fail", message="no"), dict.fromkeys(OWN, "delegated"), profile="basic")
    claim = f"polydraft-conformance 1.0 / basic for dense (0 own, {len(OWN)} delegated){WITHOUT}"
    nothing = f"no compute kernel is the backend's own; implement at least one of {', '.join(OWN)}"
    sentence = f"{claim} fails: 1 checks failed, {len(OWN)} compute kernels are not its own"
    assert (broken.status, broken.sentence, broken.problems) == (1, sentence, (f"{PASSED[0].id}: no", nothing))
    missing = judge(PASSED[1:], dict.fromkeys(OWN, "delegated"), profile="basic")
    assert (missing.status, len(missing.problems)) == (4, 2)


def test_higher_profiles_want_every_kernel():
    passed = [Result(id_, "pass", 1) for id_ in must_pass("graph", DENSE)]
    assert judge(passed, ALL_OWN, profile="graph").status == 0
    foreign = {**ALL_OWN, "embed": "delegated", "argmax": "unknown"}
    verdict = judge(passed, foreign, profile="graph")
    assert verdict.status == 1
    assert verdict.sentence.endswith("fails: 2 kernels are not its own")
    assert set(verdict.problems) == {
        f"{name} is not the backend's own kernel, and graph needs it to be" for name in ("embed", "argmax")
    }
    assert judge(passed, {**ALL_OWN, "embed": "emulated"}, profile="graph").status == 0


def test_without_a_claim_neither_lists_nor_owners_matter():
    verdict = judge(PASSED[:3], {}, profile="basic", complete=False)
    assert verdict == Verdict(0, "what was asked for holds: 3 checks passed", ())


# -- features ------------------------------------------------------------------------------------------
def test_features_are_listed_behind_what_they_rest_on():
    names = list(FEATURES)
    assert names[0] == "dense"
    assert all(names.index(base) < names.index(name) for name, one in FEATURES.items() for base in one.rests_on)
    assert all(REGISTRY.of([name]) for name in FEATURES), "a feature without a contract would be claimed by everybody"
    assert {contract.feature for contract in REGISTRY if contract.compute} == {"dense", "experts", "leaves"}


def test_a_claim_includes_what_its_features_rest_on():
    assert with_base(()) == ("dense",)
    assert with_base(["grammar"]) == ("dense", "grammar")
    assert with_base(["schedule", "dense"]) == ("dense", "sampling", "rejection", "schedule")
    with pytest.raises(ConfigError, match=r"^feature is 'dens', wanted some of dense, sampling, .*; choose among those$"):
        with_base(["sampling", "dens"])
    with pytest.raises(ConfigError, match="feature is 'dens'"):
        Selection(features=("dens",)).checks()


def test_a_further_feature_is_a_line_and_what_contracts_say(monkeypatch: pytest.MonkeyPatch):
    contract = dataclasses.replace(REGISTRY["swiglu"], name="state_update", feature="states")
    with pytest.raises(ContractError, match=r"^contract state_update/1 belongs to feature 'states', wanted one of dense, "):
        REGISTRY.add(contract)
    monkeypatch.setitem(FEATURES, "states", Feature("a recurrent state"))  # type: ignore[arg-type]  # Final, and a dict
    REGISTRY.add(contract)
    try:
        assert "state_update" in must_own.__wrapped__("basic", ("dense", "states"))
        ids = {check.id for check in Selection(features=("states",)).checks()}
        assert {"L2/state_update/seeds", "L2/linear/seeds"} < ids
        assert "L2/sample/seeds" not in ids
        assert standings(EVERYTHING, profile="full")["states"] == ("absent", ("state_update",))
        owners = {**EVERYTHING, "state_update": "own"}
        assert standings(owners, profile="full")["states"] == ("claimed", ())
    finally:
        REGISTRY.remove("state_update")


def owning(*names: str, but: str = "own") -> dict[str, str]:
    """Owners of the contracts of some features; the first contract of the last is `but`."""
    owners = {contract.name: "own" for contract in REGISTRY.of(names)}
    owners[REGISTRY.of(names[-1:])[0].name] = but
    return owners


@pytest.mark.parametrize(
    ("owners", "profile", "asked", "states"),
    [
        (EVERYTHING, "full", (), dict.fromkeys(FEATURES, "claimed")),
        (dict.fromkeys(EVERYTHING, "emulated"), "full", (), dict.fromkeys(FEATURES, "claimed")),
        (dict.fromkeys(EVERYTHING, "delegated"), "basic", (), dict.fromkeys(FEATURES, "claimed")),
        (dict.fromkeys(EVERYTHING, "delegated"), "graph", (), dict.fromkeys(FEATURES, "incomplete") | {"dense": "claimed"}),
        ({}, "basic", (), {"dense": "claimed"}),
        (owning("dense", "sampling"), "async", (), {"dense": "claimed", "sampling": "claimed"}),
        (owning("dense", "sampling", but="delegated"), "async", (), {"dense": "claimed", "sampling": "incomplete"}),
        (owning("dense", "sampling", but="unknown"), "async", (), {"dense": "claimed", "sampling": "incomplete"}),
        (owning("dense", "sampling", but="delegated"), "basic", (), {"dense": "claimed", "sampling": "claimed"}),
        (owning("dense", "rejection"), "full", (), {"dense": "claimed", "rejection": "incomplete"}),
        (EVERYTHING, "full", ("sampling",), dict.fromkeys(FEATURES, "left out") | {"dense": "claimed", "sampling": "claimed"}),
        (
            owning("dense", "rejection", but="delegated"), "full", ("sampling",),
            {"dense": "claimed", "sampling": "claimed", "rejection": "incomplete"},
        ),
        (owning("dense"), "full", ("rejection",), dict.fromkeys(("dense", "sampling", "rejection"), "claimed")),
    ],
)  # fmt: skip
def test_what_is_claimed(owners: dict[str, str], profile: str, asked: tuple[str, ...], states: dict[str, str]):
    found = standings(owners, profile=profile, asked=asked)
    assert {name: one.state for name, one in found.items()} == dict.fromkeys(FEATURES, "absent") | states
    there = ("own", "emulated", "delegated", "unknown") if profile == "basic" else ("own", "emulated")
    for name, one in found.items():
        assert one.lacking == tuple(c.name for c in REGISTRY.of([name]) if owners.get(c.name) not in there)


def test_the_sentence_names_what_is_claimed_and_what_is_absent():
    owners = owning("dense", "sampling", "logprobs", but="delegated") | dict.fromkeys(COMPOSITES, "own")
    passed = [Result(id_, "pass", 1) for id_ in must_pass("graph", ("dense", "sampling"))]
    other = [Result("L2/pack_logprobs/seeds", "pass", 1), Result("L2/mask_logits/seeds", "unsupported")]
    mine = [Result("L2/sample/other-dtypes", "unsupported"), Result("L9/strange", "pass", 1)]
    verdict = judge([*passed, *other, *mine], owners, profile="graph")
    claim = "graph for dense, sampling (28 own, 0 delegated)"
    without = "without rejection, processing, logprobs (incomplete), grammar, thinking, experts, leaves, drafting, schedule"
    counted = f"{len(passed) + 1} checks passed, 1 are of what it does not have"
    assert (verdict.status, verdict.sentence) == (0, f"polydraft-conformance 1.0 / {claim}, {without} holds: {counted}")
    asked = judge([*passed, *other, *mine], EVERYTHING, profile="graph", features=("sampling", "dense"))
    assert "sampling (24 own, 0 delegated), without rejection (not asked for), processing (not asked for)," in asked.sentence
    every = judge([Result(id_, "pass", 1) for id_ in must_pass("graph", tuple(FEATURES))], EVERYTHING, profile="graph")
    assert every.sentence.startswith(
        f"polydraft-conformance 1.0 / graph for {', '.join(FEATURES)} ({ALL} own, 0 delegated) holds: "
    )


def test_features_without_a_kernel_of_its_own_are_named_apart():
    """`grammar` rests on the reference alone, and a count over all of it would hide that."""
    owners = dict.fromkeys(EVERYTHING, "delegated") | {"swiglu": "own", "sample": "own"}
    passed = [Result(id_, "pass", 1) for id_ in must_pass("basic", tuple(FEATURES))]
    sentence = judge(passed, owners, profile="basic").sentence
    rest = ", ".join(name for name in FEATURES if name not in ("dense", "sampling"))
    assert sentence.startswith(
        f"polydraft-conformance 1.0 / basic for dense, sampling (2 own, {ALL - 2} delegated), wholly delegated: {rest} holds"
    )


def test_a_feature_that_was_asked_for_has_to_be_there():
    dense, id_ = owning("dense"), "L5/sampled/2"
    lacking = Result(id_, "unsupported", message="sample is not offered")
    verdict = judge([*PASSED, lacking], dense, profile="basic", features=("sampling",))
    missing = len(must_pass("basic", ("dense", "sampling"))) - len(PASSED)
    assert (verdict.status, verdict.sentence.endswith(f"fails: {missing} are missing")) == (1, True)
    assert verdict.problems[-1] == f"{id_}: unsupported (sample is not offered), but the claim needs it"
    assert judge([*PASSED, lacking], dense, profile="basic").status == 0
    graph = judge([], dense | {"sample": "own"}, profile="graph", features=("sampling",))
    assert graph.status == 4, "nothing passed"
    graph = judge([Result("L1/x", "pass", 1)], dense | {"sample": "own"}, profile="graph", features=("sampling",))
    assert "gumbel_noise is not the backend's own kernel, and graph needs it to be" in graph.problems


def test_what_fails_fails_whether_it_is_claimed_or_not():
    failed = Result("L2/mask_logits/seeds", "fail", 1, message="no")
    verdict = judge([*PASSED, failed], OWN, profile="basic")
    assert (verdict.status, verdict.problems) == (1, ("L2/mask_logits/seeds: no",))


def test_a_selection_of_features_runs_their_checks():
    every, dense = (Selection(features=features).checks() for features in ((), DENSE))
    assert {name for check in every for name in check.features} == set(FEATURES)
    assert {name for check in dense for name in check.features} == {"dense"}
    assert "L2/gumbel_noise+sample/seeds" not in {check.id for check in dense}
    sampled = {check.id for check in Selection(features=("sampling",), level="L5").checks()}
    assert {"L5/sampled/0", "L5/greedy/K0-B1"} < sampled
    assert "L5/sampled/distribution" not in sampled


# -- selections ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("selection", "complete", "described"),
    [
        (Selection(), True, "--profile basic"),
        (Selection("full", deep=True), True, "--profile full"),
        (Selection("async", features=("dense", "grammar")), True, "--profile async --feature dense --feature grammar"),
        (Selection(level="L2"), False, "--level L2"),
        (Selection(contract="linear"), False, "--contract linear"),
        (Selection(contract="linear", case="one_row"), False, "--contract linear --case one_row"),
        (Selection(contract="linear", seed=9), False, "--contract linear"),
        (Selection(case="one_row"), False, "--case one_row"),
        (Selection(seed=9), True, "--profile basic"),
    ],
)
def test_selections(selection: Selection, complete: bool, described: str):
    assert (selection.complete, selection.describe()) == (complete, described)


def test_what_a_selection_names():
    assert {check.level for check in Selection().checks()} == {"L0", "L1", "L2", "L5"}
    assert {"", "linear"} < {check.kernel for check in Selection().checks()}
    assert {check.level for check in Selection("graph").checks()} == {"L0", "L1", "L2", "L3", "L5"}
    assert {check.level for check in Selection(level="L1").checks()} == {"L1"}
    assert {check.level for check in Selection(level="L6").checks()} == {"L6"}, "a level beyond the profile is run as well"
    assert {check.kernel for check in Selection(contract="swiglu").checks()} == {"swiglu"}
    assert {check.level for check in Selection(contract="swiglu").checks()} == {"L2"}
    assert [check.id for check in Selection(contract="linear", case="one_row").checks()] == ["L2/linear/one_row"]
    for case, id_ in {"seed-3": "seeds", "surprise-5": "surprises", "O-777": "O-777", "model-mimo-7b": "model-mimo-7b"}.items():
        assert [check.id for check in Selection(contract="linear", case=case).checks()] == [f"L2/linear/{id_}"]
    assert {check.id for check in Selection("graph", contract="linear").checks()} > {"L3/kernel/linear"}
    assert {check.level for check in Selection("async").checks()} == {"L0", "L1", "L2", "L4", "L5", "L6"}


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (Selection("most"), "profile is 'most', wanted one of basic, graph, async, full; choose one of those"),
        (Selection(level="L9"), "level is 'L9', wanted one of L0, L1, L2, L3, L4, L5, L6; choose one of those"),
        (Selection(case="one_row"), "a case belongs to a contract; add --contract NAME"),
        (Selection(contract="linear", case="V-7"), "no check fits --contract linear --case V-7; "),
        (Selection(contract="linear", case="model-none"), "no check fits --contract linear --case model-none; "),
        (Selection(contract="nonesuch"), "no check fits --contract nonesuch; `polydraft contracts` lists contracts"),
        (Selection(level="L1", contract="linear"), "no check fits --level L1 --contract linear; "),
    ],
)
def test_what_names_nothing(selection: Selection, said: str):
    with pytest.raises(ConfigError) as raised:
        selection.checks()
    assert str(raised.value).startswith(said)


# -- reports -------------------------------------------------------------------------------------------
BEGUN = datetime(2026, 11, 21, 12, 30, 5, 999, tzinfo=timezone.utc)


def report(results: Any = PASSED, target: Target | None = None, selection: Selection | None = None, **options: Any) -> Any:
    """A report over results that nobody ran."""
    target = target or Target("reference")
    target.owners = dict(options.pop("owners", OWN))
    given = {"command": ("polydraft", "conform", "reference"), "begun": BEGUN, "seconds": 1.23456}
    return make(target, selection or Selection(), list(results), **{**given, **options})


def other_backend(**changes: Any) -> Any:
    """The reference with another identity; `changes` are fields of it or of its capabilities."""

    def info(answer: BackendInfo) -> BackendInfo:
        names = {field.name for field in dataclasses.fields(answer)}
        capabilities = {name: value for name, value in changes.items() if name not in names}
        mine = {name: value for name, value in changes.items() if name in names}
        return dataclasses.replace(answer, capabilities=dataclasses.replace(answer.capabilities, **capabilities), **mine)

    return wrap(reference, polydraft_backend_info=info)


def test_what_a_report_holds():
    target = Target("reference")
    info, content = target.info, report(target=target).content
    assert content["schema"] == "polydraft.conform/1"
    assert (content["spec"], content["kit"]) == ("1.0", {"version": __version__, "lists": lists_digest()})
    assert content["claim"] == {
        "profile": "basic", "level": "", "contract": "", "case": "", "seed": 0, "deep": False, "check": "", "features": [],
        "allow_cpu_fallback": False, "complete": True,
    }  # fmt: skip
    assert (content["command"], content["begun"]) == (["polydraft", "conform", "reference"], "2026-11-21T12:30:05+00:00")
    assert content["seconds"] == 1.235
    backend = content["backend"]
    assert (backend["name"], backend["version"], backend["package"]) == (info.name, info.version, info.package)
    assert (backend["evidence"], backend["evidence_on"], backend["available"]) == (info.evidence, info.evidence_on, True)
    assert (backend["origin"], backend["digest"]) == (target.plugins.backend.origin, target.plugins.backend.digest)
    assert (backend["device"], backend["reason"], backend["contracts"]) == ("cpu", "", dict(info.contract_versions))
    assert (backend["device_reason"], backend["runs_with"]) == ("", dict(info.runs_with))
    assert set(content["machine"]) == {"python", "platform", "numpy"}
    assert (content["owners"], content["packs"], content["waivers"], content["unfit_waivers"]) == (OWN, [], [], [])
    assert "graph_capture" in content["not_claimed"]
    assert "row_invariant" not in content["not_claimed"]
    assert "bring_up" not in content["not_claimed"]
    assert [as_result(one) for one in content["results"]] == list(PASSED)
    assert content["verdict"] == {
        "status": 0, "sentence": f"{HOLD} holds: {len(PASSED)} checks passed", "problems": [],
        "counts": {"pass": len(PASSED), "fail": 0, "error": 0, "unsupported": 0, "unseen": 0, "waived": 0},
        "features": {
            name: {"state": "claimed", "lacking": [one.name for one in REGISTRY.of(DENSE) if one.name not in OWN]}
            if name == "dense"
            else {"state": "absent", "lacking": [one.name for one in REGISTRY.of([name])]}
            for name in FEATURES
        },
    }  # fmt: skip
    assert content["digest"] == digest_of(content)
    assert json.loads(json.dumps(content)) == content


def test_a_device_that_was_asked_for_is_named():
    target = Target("reference", device="cpu:7")
    assert report(target=target).content["backend"]["device"] == "cpu:7"
    assert report(target=Target(other_backend(devices=()))).content["backend"]["device"] == ""


def test_a_report_begins_now_unless_it_says_so():
    content = make(Target("reference"), Selection(), list(PASSED)).content
    begun = datetime.fromisoformat(content["begun"])
    assert (content["seconds"], content["command"]) == (0.0, [])
    assert abs((datetime.now(timezone.utc) - begun).total_seconds()) < 60


def test_reading_and_writing(tmp_path: Path):
    one = report(other(3, "fail", message="no"))
    assert (one.status, one.results[3].outcome) == (1, "fail")
    for _ in range(2):
        one.write(tmp_path / "a" / "b")
    text = (tmp_path / "a" / "b" / "report.json").read_text()
    assert json.loads(text) == one.content
    assert text.startswith('{\n "schema"')
    assert text.endswith("}\n")
    assert (tmp_path / "a" / "b" / "junit.xml").read_text().startswith("<?xml")
    assert "1 checks failed" in (tmp_path / "a" / "b" / "report.txt").read_text()


def test_the_words_of_a_backend_do_not_break_the_xml(tmp_path: Path):
    report(other(0, "error", message="\x1b[31mred\x1b[0m \x00 <&> \ufffe")).write(tmp_path)
    (message,) = (one.get("message") for one in ElementTree.parse(tmp_path / "junit.xml").iter("error"))
    assert message == "\ufffd[31mred\ufffd[0m \ufffd <&> \ufffd"


def test_an_unfit_waiver_fails_what_would_hold():
    content = report(unfit=["waiver L2/x: no check has this id"]).content
    assert content["verdict"]["status"] == 1
    assert content["verdict"]["sentence"] == "a waiver does not fit what was seen"
    assert content["verdict"]["problems"] == ["waiver L2/x: no check has this id"]
    failing = report(other(0, "fail", message="no"), unfit=["waiver"]).content["verdict"]
    assert (failing["status"], failing["problems"]) == (1, [f"{PASSED[0].id}: no"])


def test_bring_up_claims_basic_at_most():
    target = Target(other_backend(bring_up=True))
    assert report(target=target).status == 0
    passed = [Result(id_, "pass", 1) for id_ in must_pass("graph", DENSE)]
    verdict = report(passed, target, Selection("graph"), owners=ALL_OWN).content["verdict"]
    problem = "it declares bring_up, with which basic is the most that can be claimed, not graph"
    assert verdict["status"] == 1
    assert verdict["sentence"].endswith(f"; {problem}")
    assert verdict["problems"] == [problem]
    both = report(passed[1:], target, Selection("graph"), owners=ALL_OWN).content["verdict"]
    assert both["problems"] == [problem, f"{passed[0].id}: not run, but the claim needs it"]
    nothing = report([], target, Selection("graph"), owners={}).content["verdict"]
    assert nothing["status"] == 4, "what was nothing stays nothing"
    assert report(passed, target, Selection("graph", "L3"), owners=ALL_OWN).status == 0, "a part claims nothing"
    assert report(passed, None, Selection("graph"), owners=ALL_OWN).status == 0


def test_a_backend_that_is_not_there_says_why():
    content = report([], Target(other_backend(available=False, reason="no driver; install it")), owners={}).content
    assert content["verdict"]["sentence"] == "nothing was proved: the backend is not available: no driver; install it"
    assert (content["verdict"]["status"], content["verdict"]["problems"]) == (4, [])
    assert content["backend"]["reason"] == "no driver; install it"


# -- running -------------------------------------------------------------------------------------------


def one_case() -> Selection:
    """A selection of one check that exists."""
    check = next(check for check in Selection(contract="residual_add").checks() if "-" not in check.id.rpartition("/")[2])
    return Selection(contract="residual_add", case=check.id.rpartition("/")[2])


def test_a_run_here():
    heard: list[Result] = []
    seen = conform("reference", selection=one_case(), listen=heard.append, command=["c"])
    assert seen.results == heard
    assert [one.outcome for one in heard] == ["pass"]
    assert (seen.status, seen.content["command"], seen.content["claim"]["complete"]) == (0, ["c"], False)
    assert seen.content["seconds"] < 60
    begun = datetime.fromisoformat(seen.content["begun"])
    assert abs((datetime.now(timezone.utc) - begun).total_seconds()) < 60
    assert conform(reference, selection=one_case(), limit_s=1e-9).status == 0, "an object runs here"
    assert conform("reference", selection=one_case()).results[0].seconds < 60


def test_a_run_here_says_what_packs_serve(tmp_path: Path):
    file = tmp_path / "fast.py"
    file.write_text(pack_source("fast", "residual_add"))
    seen = conform("reference", files=[str(file)], packs=["fast"], selection=one_case())
    assert [one["contract"] for one in seen.content["kernels"]["overrides"]] == ["residual_add"]
    assert conform("reference", selection=one_case()).content["kernels"] == {}


def test_a_run_gives_its_device_back(monkeypatch: pytest.MonkeyPatch):
    closed: list[bool] = []
    close = Target.close

    def noted(self: Target) -> None:
        closed.append(self._kept is not None)
        close(self)

    monkeypatch.setattr(Target, "close", noted)
    conform("reference", selection=one_case())
    assert closed[-1], "the last device was open until then"


def test_a_run_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {}

    def run(backend: str, **options: Any) -> Any:
        asked.update(options, backend=backend)
        return isolation.Watched(list(PASSED), dict(OWN), {"graph_capture": "it captured nothing"}, {"packs": {"fast": {}}})

    monkeypatch.setattr(isolation, "run", run)

    def listen(result: Result) -> None:
        """Nobody speaks."""

    seen = conform("reference", device="cpu", limit_s=5.0, listen=listen)
    assert (seen.status, seen.content["owners"]) == (0, OWN)
    assert seen.content["backend"]["withdrawn"] == {"graph_capture": "it captured nothing"}
    assert seen.content["kernels"] == {"packs": {"fast": {}}}
    assert asked == {
        "backend": "reference", "device": "cpu", "files": (), "packs": (), "selection": Selection(), "limit_s": 5.0,
        "listen": listen,
    }  # fmt: skip
    asked.clear()
    gone = other_backend(available=False, reason="gone")
    assert (conform(gone, limit_s=5.0).status, conform(gone).status, asked) == (4, 4, {})
    monkeypatch.setattr(reporting, "Target", lambda backend, **options: Target(gone))
    assert (conform("reference", limit_s=5.0).results, asked) == ([], {})


def test_what_a_lost_process_left_unsaid_is_said_for_it(monkeypatch: pytest.MonkeyPatch):
    lost = Result("L2/embed/all_padding", "fail", 1, kernel="embed", message="the process died", output="boom")
    told = Result("L2/embed/seeds", "fail", 1, kernel="embed", message="wrong (rerun: so); looks like M01 (x)")
    monkeypatch.setattr(isolation, "run", lambda *given, **options: isolation.Watched([lost, told, PASSED[0]]))
    first, second, third = conform("reference", limit_s=1.0, selection=Selection(level="L2")).results
    assert first.message == "the process died (rerun: polydraft conform reference --contract embed --case all_padding)"
    assert (first.output, second, third) == ("boom", told, PASSED[0])


def test_waivers_are_applied_behind_the_run(monkeypatch: pytest.MonkeyPatch):
    version = Target("reference").info.version
    monkeypatch.setattr(isolation, "run", lambda *given, **options: isolation.Watched(other(3, "fail", message="no"), dict(OWN)))
    known = Waiver(PASSED[3].id, "known", "https://example.org/1", "9999-12-31", (version,))
    holds = conform("reference", limit_s=1.0, waivers=[known])
    assert holds.status == 0
    assert "/ 1 waivers holds" in holds.content["verdict"]["sentence"]
    assert holds.content["waivers"] == [{**dataclasses.asdict(known), "versions": [version]}]
    assert conform("reference", limit_s=1.0, waivers=[dataclasses.replace(known, versions=("0.0",))]).status == 1
    expired = conform("reference", limit_s=1.0, waivers=[dataclasses.replace(known, expires="2000-01-01")])
    assert "it expired on 2000-01-01" in expired.content["unfit_waivers"][0]


class Named:
    """A target of which only the command matters."""

    command = "polydraft conform mychip"


@pytest.mark.parametrize(
    ("result", "rerun"),
    [
        (Result("L2/swiglu/one_row", "fail", 1, kernel="swiglu", message="x"), "--contract swiglu --case one_row"),
        (Result("L2/swiglu/new-contents", "fail", 1, kernel="swiglu", message="x"), "--check L2/swiglu/new-contents"),
        (Result("L2/swiglu/seeds", "fail", 1, kernel="swiglu", message="x"), "--check L2/swiglu/seeds"),
        (Result("L2/swiglu/repeat", "fail", 1, kernel="swiglu", message="x"), "--check L2/swiglu/repeat"),
        (Result("L2/a+b/expansion", "fail", 1, kernel="a+b", message="x"), "--check L2/a+b/expansion"),
        (Result("L3/kernel/swiglu", "fail", 1, kernel="swiglu", message="x"), "--check L3/kernel/swiglu"),
        (Result("L5/greedy/K3-B3", "fail", 1, message="x"), "--check L5/greedy/K3-B3"),
    ],
)
def test_a_failure_says_how_to_see_it_again(result: Result, rerun: str):
    told = with_causes(result, Named())  # type: ignore[arg-type]
    assert told.message == f"x (rerun: polydraft conform mychip {rerun})"
    alike = dataclasses.replace(result, message="x (rerun: so)", like=("M17",))
    assert with_causes(alike, Named()).message == "x (rerun: so); looks like M17 (another rule for ties)"  # type: ignore[arg-type]
    for outcome in ("pass", "error", "unsupported", "unseen", "waived"):
        fine = dataclasses.replace(result, outcome=outcome)
        assert with_causes(fine, Named()) is fine  # type: ignore[arg-type]


def test_no_cause_is_made_up():
    told = with_causes(Result("L0/process-0", "fail", 1, message="PluginError: broken"), Named())  # type: ignore[arg-type]
    assert told.message == "PluginError: broken (rerun: polydraft conform mychip --level L0)"


# -- one check, and what asks for a device ---------------------------------------------------------------
def test_a_check_by_its_id():
    one = Selection(check="L4/slow-host")
    assert ([check.id for check in one.checks()], one.complete, one.describe()) == (
        ["L4/slow-host"],
        False,
        "--check L4/slow-host",
    )
    with pytest.raises(
        ConfigError,
        match=r"^no check is called 'L1/empty-copy'; did you mean L1/empty-copies\? report\.json, which --out FOLDER writes",
    ):
        Selection(check="L1/empty-copy").checks()
    with pytest.raises(ConfigError, match=r"^no check is called 'zzz'; report\.json, which --out FOLDER writes, has them all$"):
        Selection(check="zzz").checks()


@pytest.mark.parametrize(
    ("selection", "wants"),
    [
        (Selection(), ()),
        (Selection("graph"), ("graph_capture",)),
        (Selection("async"), ("asynchronous",)),
        (Selection(check="L4/graphs-and-overlap"), ("asynchronous", "graph_capture")),
        (Selection("full"), ("graph_capture", "asynchronous")),
        (Selection("full", level="L0"), ()),
        (Selection(level="L3"), ("graph_capture",)),
        (Selection(level="L4"), ("asynchronous",)),
        (Selection(check="L4/slow-host"), ("asynchronous",)),
        (Selection(check="L3/replay/two-graphs"), ("graph_capture",)),
        (Selection(check="L5/host-inputs/eager"), ()),
        (Selection("full", check="L1/empty-copies"), ()),
    ],
    ids=lambda given: given.describe() if isinstance(given, Selection) else None,
)
def test_what_a_device_has_to_declare(selection: Selection, wants: tuple[str, ...]):
    assert selection.wants == wants


# -- operations that leave the device --------------------------------------------------------------------
def leaving(operations: dict[str, list[str]] | None, problem: str = "", results: Any = PASSED) -> Any:
    """The report of a backend that says this of its operations."""
    target = Target("reference")
    target.owners = dict(OWN)
    left = None if operations is None else {"operations": operations, "problem": problem}
    return make(target, Selection(), list(results), off_device=left).content


def test_operations_that_leave_the_device_fail_the_claim():
    content = leaving({"linear": ["matmul", "cast"], "": ["copy"], "embed": []})
    said = "operations leave the device for the CPU: matmul (linear), cast (linear), copy (loading)"
    assert (content["verdict"]["status"], content["verdict"]["problems"]) == (1, [said])
    assert content["verdict"]["sentence"].endswith(f"checks passed; {said}")
    assert content["off_device"] == {"operations": {"linear": ["matmul", "cast"], "": ["copy"], "embed": []}, "problem": ""}
    untold = leaving({"linear": ["matmul"]}, "the device cannot be opened")["verdict"]
    assert (untold["status"], untold["problems"]) == (1, ["the device cannot be opened"])
    nothing = leaving({"linear": ["matmul"]}, results=())["verdict"]
    assert nothing["status"] == 4, "what else is wrong counts first"


def test_what_may_leave_the_device_is_part_of_the_claim():
    allowed = Selection(allow_cpu_fallback=True)

    def claimed(operations: dict[str, list[str]], problem: str = "", asked: bool = True) -> tuple[int, str]:
        target = Target("reference", allow_cpu_fallback=True)
        target.owners = dict(OWN)
        left = {"asked": asked, "operations": operations, "problem": problem}
        content = make(target, allowed, list(PASSED), off_device=left).content
        assert content["claim"]["allow_cpu_fallback"]
        assert verify(content) == []
        assert content["verdict"]["features"]["dense"]["state"] == "claimed"
        return content["verdict"]["status"], content["verdict"]["sentence"].rpartition("; ")[2]

    assert claimed({"linear": ["matmul", "cast"], "embed": ["cast"], "": ["copy"]}) == (0, "with 3 operations on the CPU")
    assert claimed({}) == (0, "with no operation on the CPU, which was allowed")
    assert claimed({}, "the process died") == (1, "the process died")
    assert "on the CPU" not in claimed({}, asked=False)[1]


def test_the_page_says_what_left_the_device_or_that_nobody_knows():
    def said(operations: dict[str, list[str]], problem: str = "") -> str:
        left = {"asked": True, "operations": operations, "problem": problem}
        text = page(make(Target("reference"), Selection(), list(PASSED), off_device=left))
        return re.search("^operations that leave the device for the CPU: (.*)$", text, re.MULTILINE)[1]  # type: ignore[index]

    assert said({}) == "none"
    assert said({"linear": ["matmul", "cast"], "embed": ["cast"], "": ["copy"]}) == "3"
    assert said({}, "the process died (SIGSEGV)") == "not known: the process died (SIGSEGV)"


def test_nothing_leaves_or_nobody_says():
    assert (leaving({})["verdict"]["status"], leaving({})["off_device"]["problem"]) == (0, "")
    assert (leaving(None)["verdict"]["status"], "off_device" in leaving(None)) == (0, False)


@pytest.mark.parametrize(
    ("left", "status", "said"),
    [
        ({"asked": True, "operations": {}, "problem": ""}, 0, "with no operation on the CPU, which was allowed"),
        ({"asked": True, "operations": {"linear": ["matmul", "cast"]}, "problem": ""}, 0, "with 2 operations on the CPU"),
        ({"asked": True, "operations": {}, "problem": "the probe died"}, 1, "the probe died"),
        ({"asked": False, "operations": {}, "problem": ""}, 0, ""),
        (
            {"asked": False, "operations": {"linear": ["matmul"]}, "problem": ""},
            1,
            "leave the device for the CPU: matmul (linear)",
        ),
    ],
)
def test_a_claim_with_operations_on_the_cpu_says_so(left: dict[str, Any], status: int, said: str):
    target = Target("reference")
    target.owners = dict(OWN)
    content = make(target, Selection(allow_cpu_fallback=True), list(PASSED), off_device=left).content
    assert content["verdict"]["status"] == status
    assert content["verdict"]["sentence"].endswith(f"; {said}" if said.startswith("with") else said or "checks passed")
    assert content["verdict"]["features"]["dense"]["state"] == "claimed"
    old = {**content, "claim": {key: value for key, value in content["claim"].items() if key != "allow_cpu_fallback"}}
    strict = reporting._verdict(old)
    assert strict["status"] == int(bool(left["operations"] or left["problem"])), "what says nothing of it allows nothing"


def test_a_whole_run_asks_what_leaves_its_device(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def off_device(self: Plugins, spec: str) -> Any:
        asked.append(spec)
        return {"operations": {"linear": ["matmul"]}, "problem": ""}

    monkeypatch.setattr(Plugins, "off_device", off_device)
    monkeypatch.setattr(isolation, "run", lambda *given, **options: isolation.Watched(list(PASSED), dict(OWN)))
    assert conform("reference", limit_s=1.0).status == 1
    assert conform("reference", limit_s=1.0, selection=Selection("full")).status == 1
    assert asked == ["", "queued"], "of the device that was tested"
    assert conform("reference", limit_s=1.0, selection=Selection(level="L0")).status == 0
    assert len(asked) == 2


def test_the_command_line_has_the_seed_where_something_hangs_on_it(monkeypatch: pytest.MonkeyPatch):
    given = ["polydraft", "conform", "z"]
    monkeypatch.setattr(sys, "argv", ["/x/y", *given[1:]])
    assert reporting.command_line(Selection(seed=7)) == [*given, "--seed", "7"]
    assert reporting.command_line(Selection(check="L2/linear/many-launches", seed=7)) == [*given, "--seed", "7"]
    assert reporting.command_line(Selection(level="L1", seed=7)) == given
    assert reporting.command_line(Selection(contract="linear", case="one_row", seed=7)) == given
    for mine in (["--seed", "7"], ["--seed=7"]):
        monkeypatch.setattr(sys, "argv", ["/x/y", *given[1:], *mine])
        assert reporting.command_line(Selection(seed=7)) == [*given, *mine]


# -- digests and judging again -------------------------------------------------------------------------
def test_digests(monkeypatch: pytest.MonkeyPatch):
    digest = lists_digest()
    assert len(digest) == 16
    assert digest_of({"a": 1, "digest": "x"}) == digest_of({"digest": "y", "a": 1}) != digest_of({"a": 2})
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    check = Check("L1/x", print, features=("dense", "sampling"))
    moved = {"sample": dataclasses.replace(REGISTRY["sample"], feature="dense")}
    changes: list[tuple[object, str, object]] = [
        (catalogue, "_mandatory", lambda profile: [check]),
        (catalogue, "_mandatory", lambda profile: [dataclasses.replace(check, id="L1/y")]),
        (catalogue, "_mandatory", lambda profile: [dataclasses.replace(check, features=("dense",))]),
        (catalogue, "_mandatory", lambda profile: [check] if profile == "full" else []),
        (catalogue, "must_own", lambda profile, features: ("sample",)),
        (catalogue, "must_own", lambda profile, features: ("sample", "linear")),
        (catalogue, "must_own", lambda profile, features: ("sample",) if profile == "basic" else ()),
        (catalogue, "REGISTRY", {one.name: one for one in REGISTRY} | moved),
    ]
    digests = {digest}
    for place, name, value in changes:
        with monkeypatch.context() as patched:
            if name == "REGISTRY":
                patched.setattr(catalogue, "must_own", lambda profile, features: ("sample",))
            patched.setattr(place, name, value)
            digests.add(lists_digest())
    assert len(digests) == 1 + len(changes)
    monkeypatch.setattr(catalogue, "_mandatory", lambda profile: [check])
    monkeypatch.setattr(catalogue, "must_own", lambda profile, features: ("sample",))
    one = "mustpass\n{0}\nL1/x\ndense\nsampling\nmustown\n{0}\nsample\nsampling\n"
    whole = "".join(one.format(profile) for profile in PROFILES)
    assert lists_digest() == hashlib.sha256(whole.encode()).hexdigest()[:16], "two kits agree on it"


def test_a_right_report_is_believed():
    for one in (report(), report(other(3, "fail", message="no")), report([])):
        assert verify(one.content) == []


def changed(content: Any, change: Callable[[Any], None], *, careful: bool = True) -> list[str]:
    copied = copy.deepcopy(content)
    change(copied)
    if careful:
        copied["digest"] = digest_of(copied)
    return verify(copied)


def test_what_is_no_report():
    everything = "backend, claim, digest, kit, owners, results, schema, spec, unfit_waivers, verdict, waivers"
    assert verify({}) == [f"this is no report of schema polydraft.conform/1; it lacks {everything}"]
    content = report().content
    assert verify({**content, "schema": "polydraft.doctor/1"}) == [
        "this is no report of schema polydraft.conform/1; it lacks nothing else"
    ]
    for key in ("spec", "kit", "claim", "results", "owners", "verdict", "digest", "backend", "waivers", "unfit_waivers"):
        rest = {name: value for name, value in content.items() if name != key}
        assert verify(rest) == [f"this is no report of schema polydraft.conform/1; it lacks {key}"]


def test_edits_are_found_one_by_one():
    content = report().content
    sentence = content["verdict"]["sentence"]
    edited = "the digest is not that of the content: something was changed after the run"
    assert changed(content, lambda c: c["backend"].update(version="2.0"), careful=False) == [edited]
    assert changed(content, lambda c: c["backend"].update(version="2.0")) == []
    assert changed(content, lambda c: c.update(spec="9.9")) == [
        "this kit knows specification 1.0, the report is of 9.9; use the kit of that version"
    ]
    assert changed(content, lambda c: c.update(spec="9.9"), careful=False)[0] == edited
    assert changed(content, lambda c: c["kit"].update(lists="0")) == [
        f"the lists of specification 1.0 are 0 there and {lists_digest()} here"
    ]
    strange = changed(content, lambda c: c["results"][0].update(mood="good"))
    assert len(strange) == 1
    assert strange[0].startswith("its results cannot be read: TypeError: ")
    unread = changed(content, lambda c: c["backend"].pop("available"))
    assert unread == ["its results cannot be read: KeyError: 'available'"]
    hidden = changed(content, lambda c: c["results"][5].update(outcome="fail"))
    assert hidden == [f"its results come to 1 ({HOLD} fails: 1 checks failed), it says 0"]
    assert changed(content, lambda c: c["verdict"].update(sentence="fine")) == [f"its results come to 0 ({sentence}), it says 0"]


def test_waivers_and_outcomes_of_a_report():
    waived = report(other(3, "waived"))
    assert verify(waived.content) == [f"{PASSED[3].id} is waived without a waiver"]
    waiver = Waiver(PASSED[3].id, "r", "u", "9999-12-31", ("1",))
    assert verify(report(other(3, "waived"), waivers=[waiver]).content) == []
    odd = report(other(3, "fine")).content
    assert f"{PASSED[3].id} has an outcome that does not exist" in verify(odd)


@pytest.mark.parametrize("narrowed", [{"level": "L2"}, {"contract": "linear"}, {"case": "x"}, {"check": "x"}])
def test_a_part_is_no_claim(narrowed: dict[str, Any]):
    content = report().content
    assert changed(content, lambda c: c["claim"].update(narrowed)) == ["it claims a profile on a part of its checks"]
    assert "it claims a profile on a part of its checks" in changed(content, lambda c: c["claim"].update(complete=False))


# -- waivers -------------------------------------------------------------------------------------------
TODAY = date(2026, 11, 21)
FAILED = Result("L2/x", "fail", 4, message="is 1, wanted 2")
KNOWN = Waiver("L2/x", "known", "https://example.org/1", "2026-11-21", ("1.0", "1.1"))


def test_a_fitting_waiver():
    passed = Result("L2/y", "pass", 1)
    results, unfit = apply([KNOWN], [passed, FAILED], version="1.1", today=TODAY)
    assert results == [
        passed,
        dataclasses.replace(FAILED, outcome="waived", message="known (https://example.org/1): is 1, wanted 2"),
    ]
    assert unfit == []


@pytest.mark.parametrize(
    ("waivers", "result", "version", "why"),
    [
        ([dataclasses.replace(KNOWN, id="L2/z")], FAILED, "1.0", "no check that was run has this id"),
        ([KNOWN], FAILED, "2.0", "it is for versions 1.0, 1.1, this is 2.0"),
        ([dataclasses.replace(KNOWN, expires="2026-11-20")], FAILED, "1.0", "it expired on 2026-11-20"),
        ([KNOWN], dataclasses.replace(FAILED, outcome="pass"), "1.0", "the check came to pass"),
        ([KNOWN], dataclasses.replace(FAILED, outcome="error"), "1.0", "the check came to error"),
        ([KNOWN], dataclasses.replace(FAILED, outcome="unsupported"), "1.0", "the check came to unsupported"),
    ],
)
def test_an_unfit_waiver(waivers: list[Waiver], result: Result, version: str, why: str):
    results, unfit = apply(waivers, [result], version=version, today=TODAY)
    assert results == [result]
    assert unfit == [f"waiver {waivers[0].id}: {why}; remove or renew it"]


def test_a_waiver_given_twice():
    results, unfit = apply([KNOWN, KNOWN], [FAILED], version="1.0", today=TODAY)
    assert [one.outcome for one in results] == ["waived"]
    assert unfit == ["waiver L2/x: it is given twice; remove or renew it"]


def test_files_of_waivers(tmp_path: Path):
    file = tmp_path / "w.json"
    record = {"id": "L2/x", "reason": "r", "url": "u", "expires": "2026-12-31", "versions": ["1.0", "1.1"]}
    file.write_text(json.dumps([record, record]))
    assert load(file) == [Waiver("L2/x", "r", "u", "2026-12-31", ("1.0", "1.1"))] * 2
    without = {name: value for name, value in record.items() if name != "versions"}
    for wrong in (
        "{",
        json.dumps([without]),
        json.dumps([{**record, "expires": "soon"}]),
        json.dumps([{**record, "mood": 1}]),
        "3",
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"^the file of waivers .*w\.json .*, wanted (a JSON list|objects with id, reason)"):
            load(file)
    file.write_text(json.dumps([record, without]))
    with pytest.raises(
        ConfigError, match=r"entry 1 has id, reason, url, expires\), wanted .* expires \(YYYY-MM-DD\) and versions;"
    ):
        load(file)
    with pytest.raises(ConfigError, match="none is missing, wanted a JSON file"):
        load(tmp_path / "none")


@pytest.mark.parametrize(
    ("error", "said"), [(OSError(28, "No space left on device"), "No space left on device"), (OSError("odd"), "odd")]
)
def test_a_folder_that_cannot_be_written_into_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: OSError, said: str
):
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("polydraft.conformance.report.tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=rf"^nothing can be written into .*, got {said}, wanted a folder of yours"):
        reporting.make_folder(tmp_path / "new")


def test_a_named_device_that_cannot_be_opened_is_refused_before_a_check():
    begun: list[Any] = []
    with pytest.raises((ConfigError, DeviceError)):
        conform("reference", device="nowhere", selection=Selection(check="L2/swiglu/seeds"), listen=begun.append)
    assert not begun


def test_a_claim_of_before_the_fallback_could_be_allowed_does_not_allow_it():
    left = {"asked": True, "operations": {"": ["copy"]}, "problem": ""}
    content = make(Target("reference"), Selection(), list(PASSED), off_device=left).content
    content["claim"].pop("allow_cpu_fallback", None)
    verdict = Verdict(0, "it holds", ())
    assert reporting._staying(content, verdict).status == 1
