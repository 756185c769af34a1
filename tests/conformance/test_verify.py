"""Judging again: tampered reports, waivers, and the verdict as a function of results."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from polydraft.conformance.catalogue import must_own, must_pass
from polydraft.conformance.outcomes import Result
from polydraft.conformance.report import Selection, digest_of, make, verify
from polydraft.conformance.target import Target
from polydraft.conformance.verdict import judge
from polydraft.conformance.waivers import Waiver, apply, load
from polydraft.errors import ConfigError
from tests.support.depth import crossed

DENSE = ("dense",)
OWN = dict.fromkeys(must_own("basic", DENSE), "own")


def passed(profile: str = "basic") -> list[Result]:
    return [Result(id_, "pass", 1) for id_ in must_pass(profile, DENSE)]


@functools.cache
def report() -> Any:
    """What is written when everything passes; how a run comes to it does not matter here."""
    target = Target("reference")
    target.owners = dict(OWN)
    return make(target, Selection(), passed()).content


# -- tampering -----------------------------------------------------------------------------------------
def hide_failure(content: Any) -> None:
    content["results"][5]["outcome"] = "fail"


def drop_result(content: Any) -> None:
    del content["results"][40]


def repeat_result(content: Any) -> None:
    content["results"].append(content["results"][0])


def no_comparison(content: Any) -> None:
    content["results"][5]["comparisons"] = 0


def invent_outcome(content: Any) -> None:
    content["results"][5]["outcome"] = "fine"


def waive_silently(content: Any) -> None:
    content["results"][5]["outcome"] = "waived"


def claim_more(content: Any) -> None:
    content["claim"]["profile"] = "full"


def claim_a_part(content: Any) -> None:
    content["claim"]["level"] = "L2"


def claim_a_feature(content: Any) -> None:
    content["claim"]["features"] = ["grammar"]


def call_it_claimed(content: Any) -> None:
    content["verdict"]["features"]["grammar"]["state"] = "claimed"


def disown(content: Any) -> None:
    content["owners"] = dict.fromkeys(content["owners"], "delegated")


def other_lists(content: Any) -> None:
    content["kit"]["lists"] = "0" * 16


def later_spec(content: Any) -> None:
    content["spec"] = "9.9"


def strange_field(content: Any) -> None:
    content["results"][0]["mood"] = "good"


TAMPERINGS: list[Callable[[Any], None]] = [
    hide_failure, drop_result, repeat_result, no_comparison, invent_outcome, waive_silently, claim_more, claim_a_part,
    claim_a_feature, call_it_claimed, disown, other_lists, later_spec, strange_field,
]  # fmt: skip


@pytest.mark.parametrize(
    ("tamper", "careful"), crossed(2, TAMPERINGS, [False, True]), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_tampering_shows(tamper: Callable[[Any], None], careful: bool):
    """Also where the digest was computed anew: what was written must still come to what it says."""
    content = copy.deepcopy(report())
    assert verify(content) == []
    tamper(content)
    if careful:
        content["digest"] = digest_of(content)
    assert verify(content)


def test_what_is_no_report():
    assert "lacks" in verify({})[0]
    assert verify({"schema": "polydraft.doctor/1"})


@pytest.mark.parametrize("part", ["kit", "claim", "waivers", "verdict", "owners"])
@pytest.mark.parametrize("value", [5, {"unknown": 1}, [3], None], ids=str)
def test_what_is_malformed_is_no_fault_of_the_kit(part: str, value: Any):
    content = {**copy.deepcopy(report()), part: value}
    content["digest"] = digest_of(content)
    assert verify(content)


def test_an_edited_figure_shows_in_the_digest_alone():
    content = copy.deepcopy(report())
    content["backend"]["version"] = "2.0"
    assert verify(content) == ["the digest is not that of the content: something was changed after the run"]


# -- the verdict ---------------------------------------------------------------------------------------
def test_all_passed():
    assert judge(passed(), OWN, profile="basic").status == 0


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (lambda r: [*r[1:], Result(r[0].id, "fail", 1, message="wrong")], 1, "1 checks failed"),
        (lambda r: [*r[1:], Result(r[0].id, "unsupported")], 1, "1 are missing"),
        (lambda r: r[1:], 1, "1 are missing"),
        (lambda r: [*r, Result("L9/extra", "fail", 1)], 1, "1 checks failed"),
        (lambda r: [*r[1:], Result(r[0].id, "waived", 1)], 0, "1 waivers"),
        (lambda r: [*r[1:], Result(r[0].id, "error", message="oops")], 3, "the kit failed in 1 places"),
        (lambda r: [*r[1:], Result(r[0].id, "pass", 0)], 3, "the kit failed"),
        (lambda r: [*r, r[0]], 3, "the kit failed"),
        (lambda r: [], 4, "nothing was proved"),
        (lambda r: [Result(x.id, "unsupported") for x in r], 4, "nothing was proved"),
    ],
)
def test_one_change(change: Callable[[list[Result]], list[Result]], status: int, said: str):
    verdict = judge(change(passed()), OWN, profile="basic")
    assert verdict.status == status
    assert said in verdict.sentence
    assert bool(verdict.problems) == (status in (1, 3))


def test_one_kernel_of_its_own_is_enough_for_basic_and_no_more():
    one = {**dict.fromkeys(OWN, "delegated"), "linear": "own"}
    verdict = judge(passed(), one, profile="basic")
    assert verdict.status == 0
    assert f"basic for dense (1 own, {len(OWN) - 1} delegated)" in verdict.sentence
    assert judge(passed(), dict.fromkeys(OWN, "delegated"), profile="basic").status == 4
    graph = judge(passed("graph"), one, profile="graph")
    assert graph.status == 1
    assert "embed is not the backend's own kernel, and graph needs it to be" in graph.problems


def test_without_a_claim_the_lists_do_not_matter():
    verdict = judge(passed()[:3], {}, profile="basic", complete=False)
    assert (verdict.status, verdict.problems) == (0, ())


# -- waivers -------------------------------------------------------------------------------------------
def waiver(**changes: Any) -> Waiver:
    fields = {"id": "L2/x", "reason": "known", "url": "https://example.org/1", "expires": "2026-12-31", "versions": ("1.0",)}
    return Waiver(**{**fields, **changes})


FAILED = Result("L2/x", "fail", 4, message="is 1, wanted 2")
TODAY = date(2026, 11, 21)


def test_a_waiver_that_fits():
    (result,), unfit = apply([waiver()], [FAILED], version="1.0", today=TODAY)
    assert (result.outcome, result.comparisons, unfit) == ("waived", 4, [])
    assert "known" in result.message
    assert "is 1, wanted 2" in result.message


@pytest.mark.parametrize(
    ("changes", "result", "said"),
    [
        ({"id": "L2/y"}, FAILED, "no check that was run has this id"),
        ({"expires": "2026-11-20"}, FAILED, "it expired on 2026-11-20"),
        ({"versions": ("0.9",)}, FAILED, "it is for versions 0.9, this is 1.0"),
        ({}, Result("L2/x", "pass", 1), "the check came to pass"),
        ({}, Result("L2/x", "error"), "the check came to error"),
    ],
)
def test_a_waiver_that_does_not_fit(changes: dict[str, Any], result: Result, said: str):
    (after,), unfit = apply([waiver(**changes)], [result], version="1.0", today=TODAY)
    assert after == result
    assert said in unfit[0]


def test_a_waiver_given_twice():
    (unfit,) = apply([waiver(), waiver()], [FAILED], version="1.0", today=TODAY)[1]
    assert "given twice" in unfit


def test_files_of_waivers(tmp_path: Path):
    file = tmp_path / "waivers.json"
    record = {"id": "L2/x", "reason": "r", "url": "u", "expires": "2026-12-31", "versions": ["1.0"]}
    file.write_text(json.dumps([record]))
    assert load(file) == [Waiver("L2/x", "r", "u", "2026-12-31", ("1.0",))]
    for wrong in ("{", "[{}]", json.dumps([{**record, "expires": "soon"}]), json.dumps([{**record, "mood": 1}])):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"is no valid JSON|cannot be used \(\w+Error: "):
            load(file)
