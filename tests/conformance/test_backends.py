"""The kit on whole backends: who passes what, with which verdict, and how each kind of failure ends."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from polydraft import reference
from polydraft.conformance import overlap_checks, sanity_checks
from polydraft.conformance.catalogue import every_check, must_own, must_pass
from polydraft.conformance.check import Check, Tally
from polydraft.conformance.graph_checks import checks as graph_checks
from polydraft.conformance.matrix import in_words, markdown, plain, table
from polydraft.conformance.outcomes import CLAIMED, PROFILES
from polydraft.conformance.pages import claim_of, junit, page
from polydraft.conformance.report import Selection, conform, verify
from polydraft.conformance.target import Target, wrap
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.features import FEATURES
from polydraft.errors import ContractError
from tests.conformance.doubles import BACKENDS, alone, basic, installed, kernels, named, raising, unavailable
from tests.support.schemas import published

CHECKS = {check.id: check for check in every_check()}


# -- who passes ----------------------------------------------------------------------------------------
@pytest.mark.deep  # `make conform` claims it as well
@pytest.mark.parametrize("name", BACKENDS)
def test_basic_holds(name: str):
    report = basic(name)
    assert report.status == 0, page(report)
    counts = report.content["verdict"]["counts"]
    assert counts["fail"] == counts["error"] == counts["waived"] == 0
    assert counts["pass"] > 700
    assert all(result.comparisons > 0 for result in report.results if result.outcome == "pass")
    kind = {"reference": "own", "emulator": "emulated"}[name]
    assert set(report.content["owners"].values()) == {kind}
    published("polydraft.conform/1").validate(report.content)


def test_no_kernel_of_the_reference_is_taken_for_one_s_own():
    """The emulator runs them all, behind providers of its own."""
    owners = conform(BACKENDS["emulator"], selection=Selection(check="L0/ownership")).content["owners"]
    assert set(owners) >= set(REGISTRY.names())
    assert {name for name, owner in owners.items() if owner != "emulated"} == set()


@pytest.mark.deep
@pytest.mark.parametrize("checks", [graph_checks, overlap_checks.checks, sanity_checks.checks], ids=["L3", "L4", "L6"])
@pytest.mark.parametrize("name", BACKENDS)
def test_both_pass_the_other_levels(name: str, checks: Any):
    """With these and `basic` both hold `full`; the reference on the device that has queues and graphs."""
    target = Target(BACKENDS[name], wants=CLAIMED["full"])
    results = [check.result(target) for check in checks()]
    allowed = {("pass", False), ("pass", True), ("unsupported", True)}
    found = [(r.id, r.outcome, r.message) for r in results if (r.outcome, "+" in r.id) not in allowed]
    assert found == [], "all but kernels of several contracts, which nobody needs"


@pytest.mark.deep
@pytest.mark.parametrize("name", BACKENDS)
def test_full_holds(name: str):
    report = conform(BACKENDS[name], selection=Selection("full"))
    assert report.status == 0, page(report)
    assert report.content["backend"]["evidence"] == "emulator"
    cells = {(row["level"], row["contract"]): row["cells"] for row in table([report])["rows"]}
    owners = {one["owner"] for one in cells["L2", "linear"].values()}
    assert owners == {"own" if name == "reference" else "emulated"}


@pytest.mark.parametrize(
    ("selection", "device", "reason"),
    [
        (Selection("basic"), "", ""),
        (Selection("graph"), "queued", "none was named, and it is the first that declares graph_capture"),
        (Selection("full"), "queued", "none was named, and it is the first that declares graph_capture and asynchronous"),
        (Selection(level="L3"), "queued", "none was named, and it is the first that declares graph_capture"),
        (Selection(level="L0"), "", ""),
        (Selection(check="L4/slow-host"), "queued", "none was named, and it is the first that declares asynchronous"),
        (Selection("full", contract="swiglu"), "queued", "graph_capture and asynchronous"),
    ],
    ids=lambda given: given.describe() if isinstance(given, Selection) else None,
)
def test_the_device_is_one_that_can_show_what_is_claimed(selection: Selection, device: str, reason: str):
    target = Target("reference", wants=selection.wants)
    assert target.device_spec == device
    assert reason in target.device_reason
    assert bool(reason) == bool(target.device_reason)
    named = Target("reference", device="cpu", wants=selection.wants)
    assert (named.device_spec, named.device_reason) == ("cpu", "")
    assert not named.info.capabilities.asynchronous


def test_the_device_that_was_taken_is_told():
    report = conform("reference", selection=Selection(check="L3/capture/runs-nothing"))
    assert (report.status, report.content["backend"]["device"]) == (0, "queued")
    assert "on queued (none was named, and it is the first that declares graph_capture)" in page(report)
    assert "polydraft conform reference --device queued" in page(report)
    published("polydraft.conform/1").validate(report.content)
    assert verify(report.content) == []


def test_a_backend_that_has_no_such_device_is_tested_on_its_default():
    assert Target(named(reference, "plain", devices=("cpu",)), wants=CLAIMED["full"]).device_spec == ""


def test_a_synchronous_backend_without_graphs_claims_neither():
    target = Target("reference")
    assert {check.result(target).outcome for check in (*graph_checks(), *overlap_checks.checks())} == {"unsupported"}


# -- several backends ------------------------------------------------------------------------------------
@pytest.mark.deep  # `make conform` claims `basic` of them each time
@pytest.mark.parametrize("name", installed())
@pytest.mark.parametrize("contract", [*REGISTRY.names(), *COMPOSITES])
def test_every_backend_keeps_every_contract_that_it_offers(name: str, contract: str):
    """The project's cross-backend tests are the kit's own checks, seen contract by contract."""
    content = alone(name)
    cell = next(row for row in content["rows"] if (row["level"], row["contract"]) == ("L2", contract))["cells"][name]
    failed = [r.message for r in kernels(name).results if r.kernel == contract and r.outcome not in ("pass", "unsupported")]
    assert failed == []
    assert cell["outcome"] == "pass" or contract not in content["backends"][0] or REGISTRY[contract].feature != "dense"


@pytest.mark.deep
def test_one_table_of_all():
    names = [name for name in installed() if name in ("reference", "cpu")]
    content = table([kernels(name) for name in names])
    published("polydraft.matrix/1").validate(content)
    assert content["status"] == 0, plain(content)
    assert [one["name"] for one in content["backends"]] == names
    by_row = {(row["level"], row["contract"]): row["cells"] for row in content["rows"]}
    assert list(by_row) == sorted(by_row, key=lambda key: (key[0], key[1] != ""))
    assert by_row["L2", "linear"]["reference"]["owner"] == "own"
    assert by_row["L2", "linear"]["cpu"]["outcome"] == "pass"
    assert by_row["L5", ""]["reference"]["outcome"] == "pass"
    assert 0 < by_row["L2", "linear"]["reference"]["headroom"] <= 1
    classes = {one["name"]: one["evidence"] for one in content["backends"]}
    assert classes["cpu"] == "silicon"
    for page_of_table in (markdown(content), plain(content)):
        for one in content["backends"]:
            assert claim_of(one) in page_of_table
    assert "| L2 kernels | linear |" in markdown(content)


@pytest.mark.deep
def test_a_table_says_what_failed_and_what_was_not_run():
    failing = conform(raising("swiglu", ContractError), selection=Selection(contract="swiglu"))
    whole = kernels("cpu")
    content = table([failing, whole])
    assert content["status"] == 1
    cells = {(row["level"], row["contract"]): row["cells"] for row in content["rows"]}
    assert cells["L2", "swiglu"]["reference"]["outcome"] == "fail"
    assert " FAIL" in in_words(cells["L2", "swiglu"]["reference"])
    assert in_words(cells["L2", "linear"]["reference"]) == "not run"
    twins = table([failing, failing])
    assert {one["name"] for one in twins["backends"]} == {"reference on cpu"}
    none: dict[str, Any] = dict.fromkeys(("pass", "fail", "error", "unsupported", "unseen", "waived"), 0)
    waived = {**none, "outcome": "waived", "pass": 1, "waived": 1, "owner": "own"}
    assert in_words(waived) == "1 of 2 own, 1 WAIVED"
    assert in_words({**waived, "outcome": "unsupported"}) == "-"
    assert in_words({**waived, "waived": 0, "unseen": 2, "outcome": "unseen"}) == "1 of 3 own, 2 not seen"


# -- verdicts ------------------------------------------------------------------------------------------
def test_a_backend_that_is_not_there_proves_nothing():
    report = conform(unavailable())
    assert (report.status, report.results) == (4, [])
    assert "the library is not installed; install it" in report.content["verdict"]["sentence"]


def test_a_higher_profile_needs_its_capabilities():
    report = conform("reference", device="cpu", selection=Selection("graph", "L3"))
    assert (report.status, {r.outcome for r in report.results}) == (4, {"unsupported"})


@pytest.mark.parametrize("error", [ContractError, ZeroDivisionError])
def test_a_backend_that_raises_fails_and_is_quoted(error: type[Exception]):
    report = conform(raising("swiglu", error), selection=Selection(contract="swiglu"))
    assert report.status == 1
    assert {r.outcome for r in report.results} == {"fail", "unsupported"}
    assert any(f"{error.__name__}: swiglu is not ready" in problem for problem in report.content["verdict"]["problems"])


def test_faults_of_the_kit_are_its_own():
    def broken(target: Target, tally: Tally) -> None:
        from polydraft.conformance.probe import prompts

        prompts("many")  # type: ignore[arg-type]

    def empty(target: Target, tally: Tally) -> None:
        pass

    target = Target("reference")
    assert Check("L1/broken", broken).result(target).outcome == "error"
    result = Check("L1/empty", empty).result(target)
    assert (result.outcome, result.message) == ("error", "the check compared nothing, which proves nothing")


class Bare:
    """What hands on to a real object, without one of its members."""

    def __init__(self, inner: Any, missing: str) -> None:
        self._inner, self._missing = inner, missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(f"no {name}", name=name, obj=self)
        return getattr(self._inner, name)


@pytest.mark.parametrize(
    ("function", "missing", "asked"),
    [("event", "query", "event()"), ("staging", "array", "staging()"), ("empty", "shape", "empty()")],
)
def test_a_member_that_is_missing_is_the_backends_fault(function: str, missing: str, asked: str):
    def opened(device: Any, **_: Any) -> Any:
        real = getattr(device, function)
        setattr(device, function, lambda *given: Bare(real(*given), missing))
        return device

    lacking = named(reference, "lacking")
    lacking = wrap(lacking, polydraft_open_device=opened)
    report = conform(lacking, selection=Selection(level="L1"))
    assert report.status == 1
    (problem,) = {result.message.partition(" (raised in ")[0] for result in report.results if result.outcome == "fail"}
    assert problem.startswith(f"PluginError: plugin 'lacking': {asked} of the device of polydraft_open_device returned a Bare, ")
    assert f": it has no {missing}; add it (see polydraft.backend and polydraft.device)" in problem


def test_a_stream_is_looked_at_as_well():
    def opened(device: Any, **_: Any) -> Any:
        device.stream = Bare(device.stream, "wait")
        return device

    (result,) = conform(wrap(reference, polydraft_open_device=opened), selection=Selection(check="L0/dtypes")).results
    assert (result.outcome, "stream of the device" in result.message) == ("fail", True)


class Weightless:
    """No weight at all."""


def test_what_is_first_used_in_a_check_may_lack_a_member_too():
    def kernels(table: Any, **_: Any) -> Any:
        table.prepare_weight = lambda *given: Weightless()
        return table

    result = CHECKS["L0/dtypes"].result(Target(wrap(reference, polydraft_kernels=kernels)))
    said = "Weightless has no nbytes; add it (see polydraft.backend and polydraft.device)"
    assert (result.outcome, result.message) == ("fail", said)


# -- lists ---------------------------------------------------------------------------------------------
def test_ids_are_unique():
    ids = [check.id for check in every_check()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("profile", PROFILES)
def test_lists_follow_from_the_contracts(profile: str):
    """What has to be there is checked with every case; what may be left out is in no list."""
    for features in (("dense",), ("dense", "sampling"), tuple(FEATURES)):
        passing, owning = must_pass(profile, features), must_own(profile, features)
        for contract in REGISTRY:
            for case in contract.cases():
                assert (f"L2/{contract.name}/{case.name}" in passing) == (contract.feature in features), contract.key
        wanted = [contract.name for contract in REGISTRY if contract.feature in features]
        assert owning == tuple(name for name in wanted if REGISTRY[name].compute or profile != "basic")
        assert ("L5/sampled/0" in passing) == ("sampling" in features)
        assert not any("+" in id_.split("/")[1] for id_ in passing), "composites may be left out"
    assert len(must_own(profile, ("dense",))) == (10 if profile == "basic" else 22)


def test_full_is_graphs_and_asynchrony_and_these_are_independent():
    basic, graph, asynchronous, full = (set(must_pass(profile, tuple(FEATURES))) for profile in PROFILES)
    assert basic < graph < full
    assert basic < asynchronous < full
    assert {id_.partition("/")[0] for id_ in graph - asynchronous} == {"L0", "L3", "L5"}
    assert {id_ for id_ in graph - asynchronous if id_.startswith("L5/")} == {"L5/taps/replayed"}
    assert {id_.partition("/")[0] for id_ in asynchronous - graph} == {"L1", "L4", "L6"}
    assert full - graph - asynchronous == {
        "L4/graphs-and-overlap", "L4/replays-return", "L4/replayed-steps-return", "L6/replays", "L6/memory-of-replayed-steps",
    }  # fmt: skip


STREAMS_ALONE = wrap(
    reference,
    polydraft_backend_info=lambda info: dataclasses.replace(
        info, capabilities=dataclasses.replace(info.capabilities, graph_capture=False)
    ),
)


def test_a_device_with_streams_and_no_capture_has_what_asynchrony_needs():
    target = Target(STREAMS_ALONE, device="queued")
    checks = {check.id: check for check in every_check()}
    found = {id_: checks[id_].result(target).outcome for id_ in ("L4/overlap-2/arrivals", "L6/one-wait-a-step", "L6/replays")}
    assert list(found.values()) == ["pass", "pass", "unsupported"]
    wanted = {need for id_ in must_pass("async", tuple(FEATURES)) for need in checks[id_].needs}
    assert wanted == {"asynchronous"}


@pytest.mark.deep
def test_a_device_with_streams_and_no_capture_claims_async():
    report = conform(STREAMS_ALONE, device="queued", selection=Selection("async"))
    assert report.status == 0, page(report)
    assert "graph_capture" in report.content["not_claimed"]
    refused = conform(STREAMS_ALONE, device="queued", selection=Selection("full", features=("dense",)))
    assert refused.status == 1
    assert "(capability graph_capture is not declared), but the claim needs it" in page(refused)


# -- reports -------------------------------------------------------------------------------------------
@pytest.mark.deep
def test_what_is_written(tmp_path: Path):
    report = basic("reference")
    report.write(tmp_path / "new")
    content = json.loads((tmp_path / "new" / "report.json").read_text())
    assert content == report.content
    assert verify(content) == []
    suites = ET.fromstring((tmp_path / "new" / "junit.xml").read_text())
    assert [suite.get("name") for suite in suites] == ["L0", "L1", "L2", "L5"]
    assert sum(len(suite) for suite in suites) == len(report.results)
    text = (tmp_path / "new" / "report.txt").read_text()
    claim = f"basic for {', '.join(FEATURES)} ({len(content['owners'])} own, 0 delegated)"
    assert f"polydraft-conformance 1.0 / {claim} holds" in text
    for name in FEATURES:
        assert re.search(rf"^{name} +claimed +{len(REGISTRY.of([name]))} own$", text, re.MULTILINE)
    assert "self-certified" in text
    assert all(kernel in text for kernel in ("linear", "paged_attention", "swiglu"))
    assert text.count("\n") < 60


def test_failures_are_in_every_form():
    report = conform(raising("swiglu", ContractError), selection=Selection(contract="swiglu"))
    suites = ET.fromstring(junit(report))
    assert suites.find(".//failure") is not None
    assert re.search(r"^- L2/swiglu/\w+ and \d+ more: ", page(report), re.MULTILINE)
    assert "swiglu is not ready" in page(report)
