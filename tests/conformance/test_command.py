"""`polydraft conform`: exit statuses, JSON against its schemas, and sentences that can be acted on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from polydraft.cli import main
from polydraft.conformance.report import Selection
from polydraft.conformance.report import conform as run_kit
from polydraft.errors import DeviceError
from tests.support import minimal_backend
from tests.support.project import ROOT

MINIMAL = minimal_backend.__file__


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        answer = json.loads(self.out)
        file = answer["schema"].removeprefix("polydraft.").replace("/", "-")
        jsonschema.validate(answer, json.loads((ROOT / "core/polydraft/schemas" / f"{file}.json").read_text()))
        return answer


@pytest.fixture
def conform(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    def call(*args: str) -> Answer:
        given = ["conform", *args]
        monkeypatch.setattr(sys, "argv", ["polydraft", *given])
        with pytest.raises(SystemExit) as exit_:
            main.main(given)
        out, err = capsys.readouterr()
        return Answer(int(exit_.value.code or 0), out, err)

    return call


@pytest.mark.usefixtures("one_process")
def test_one_check_by_its_id(conform: Callable[..., Answer]):
    answer = conform("reference", "--check", "L1/closed-device-refuses", "--json")
    assert (answer.status, [result["id"] for result in answer.json["results"]]) == (0, ["L1/closed-device-refuses"])
    assert answer.json["claim"]["complete"] is False
    wrong = conform("reference", "--check", "L1/closed-device-refuse")
    assert wrong.status == 2
    assert "no check is called 'L1/closed-device-refuse'; did you mean L1/closed-device-refuses? report.json" in wrong.err


SWAPPED = """
import dataclasses
from polydraft import reference
from polydraft.conformance.faulty_backends import MUTANTS
mutant = next(m for m in MUTANTS if m.id == "{id}")
globals().update({{k: v for k, v in vars(mutant.broken(reference)).items() if k.startswith("polydraft_")}})
from polydraft import hookimpl
_info = [polydraft_backend_info]
@hookimpl
def polydraft_backend_info():
    return dataclasses.replace(_info[0](spec=""), name="broken")
"""


@pytest.fixture
def broken(tmp_path: Path) -> Callable[[str], str]:
    """A file with a backend called "broken", which is a mutant of the reference."""

    def write(mutant: str) -> str:
        file = tmp_path / "broken.py"
        file.write_text(SWAPPED.format(id=mutant))
        return str(file)

    return write


def test_one_contract_in_an_instant(conform: Callable[..., Answer]):
    answer = conform("reference", "--contract", "verify_match", "--case", "seed-7")
    assert answer.status == 0
    assert "what was asked for holds: 1 checks passed" in answer.out
    assert "run it again with\n  polydraft conform reference --contract verify_match --case seed-7\n" in answer.out


@pytest.mark.usefixtures("one_process")
def test_one_case_and_one_level(conform: Callable[..., Answer]):
    case = conform("reference", "--contract", "linear", "--case", "one_row", "--json").json
    assert [result["id"] for result in case["results"]] == ["L2/linear/one_row"]
    level = conform("reference", "--level", "L1", "--json").json
    assert {result["id"][:2] for result in level["results"]} == {"L1"}
    assert level["claim"]["complete"] is False


@pytest.mark.usefixtures("one_process")
def test_features_are_given_one_by_one_or_between_commas(conform: Callable[..., Answer]):
    given = ("--feature", "dense,sampling", "--feature", "grammar", "--feature", "dense")
    answer = conform("reference", "--level", "L0", *given, "--json")
    assert (answer.status, answer.json["claim"]["features"]) == (0, ["dense", "sampling", "grammar"])
    sampled = conform("reference", "--contract", "sample", "--case", "top_k_keeps_the_best", "--feature", "sampling", "--json")
    assert [result["id"] for result in sampled.json["results"]] == ["L2/sample/top_k_keeps_the_best"]
    none = conform("reference", "--contract", "sample", "--case", "top_k_keeps_the_best", "--feature", "dense")
    assert (none.status, "no check fits --contract sample --case top_k_keeps_the_best --feature dense" in none.err) == (2, True)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("mutant", "contract", "said"),
    [("M01", "select_last_rows", "L2/select_last_rows/resumed_prefill_is_no_special_case: select_last_rows/1, case "),
     ("M17", "argmax", "tokens[")],
)  # fmt: skip
def test_a_failure_says_what_where_and_how_to_see_it_again(
    conform: Callable[..., Answer], broken: Callable[[str], str], mutant: str, contract: str, said: str
):
    answer = conform("broken", "--plugin", broken(mutant), "--contract", contract)
    assert answer.status == 1
    assert said in answer.out
    assert f"(rerun: polydraft conform broken --plugin {broken(mutant)} --contract {contract} --" in answer.out
    assert f"looks like {mutant}" in answer.out
    assert "wanted" in answer.out


@pytest.mark.deep
@pytest.mark.usefixtures("one_process")
def test_a_thin_backend_has_its_kernels_counted(conform: Callable[..., Answer], tmp_path: Path):
    answer = conform("minimal", "--plugin", MINIMAL, "--json", "--out", str(tmp_path))
    owners, sentence = answer.json["owners"], answer.json["verdict"]["sentence"]
    assert owners["residual_add"] == "own"
    assert set(owners.values()) == {"own", "delegated"}
    assert answer.status == 4, "one addition is no compute kernel"
    assert sentence.startswith("nothing was proved: no compute kernel is the backend's own; implement at least one of argmax")
    assert "self-certified" in (tmp_path / "report.txt").read_text()
    again = conform("verify", str(tmp_path / "report.json"), "--json")
    assert (again.status, again.json["consistent"]) == (4, True)


@pytest.mark.usefixtures("one_process")
def test_verify_refuses_what_was_changed(conform: Callable[..., Answer], tmp_path: Path):
    assert conform("reference", "--level", "L0", "--out", str(tmp_path)).status == 0
    file = tmp_path / "report.json"
    assert conform("verify", str(file)).out.startswith("consistent; it says: what was asked for")
    file.write_text(file.read_text().replace('"pass"', '"fail"', 1))
    assert conform("verify", str(file)).status == 1


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nobody",), "no plugin 'nobody' in polydraft.backends"),
        (("reference", "--contract", "linaer"), "did you mean 'linear'?"),
        (("reference", "--contract", "linear", "--case", "no_such_case"), "no check fits --contract linear --case no_such_case"),
        (("reference", "--case", "seed-3"), "a case belongs to a contract"),
        (("reference", "--profile", "gold"), "'gold' is not one of"),
        (("reference", "--feature", "densest"), "feature is 'densest', wanted some of dense, sampling, "),
        (("reference", "report.json"), "one argument too many"),
        (("verify",), "needs the path of a report.json"),
        (("verify", "no/such/report.json"), "the report no/such/report.json is missing"),
        (("reference", "--level", "L1", "--waivers", "no.json"), "the file of waivers no.json is missing"),
        (("reference", "--prove", "--level", "L2"), "leave out all but BACKEND, --device, --plugin, --seed"),
    ],
)
def test_bad_usage(conform: Callable[..., Answer], args: tuple[str, ...], said: str):
    answer = conform(*args)
    assert (answer.status, answer.out) == (2, "")
    assert said in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.usefixtures("one_process")
def test_a_device_that_cannot_be_opened_proves_nothing(conform: Callable[..., Answer]):
    for given in (("reference", "--device", "foo"), ("--matrix", "reference=foo")):
        answer = conform(*given, "--level", "L1")
        assert (answer.status, answer.out) == (1, "")
        assert answer.err.startswith("polydraft: the reference backend runs on 'cpu' or 'queued', got 'foo'")
    with pytest.raises(DeviceError, match="got 'foo'"):
        run_kit("reference", device="foo", selection=Selection(level="L1"))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("what", [("reference",), ("--matrix", "reference,emulator"), ("reference", "--enable-variants")])
def test_reports_that_cannot_be_written_are_refused_before_anything_runs(
    conform: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: tuple[str, ...]
):
    (tmp_path / "file").touch()
    monkeypatch.setattr("polydraft.conformance.report.conform", lambda *given, **named: pytest.fail("it ran"))
    monkeypatch.setattr("polydraft.conformance.enabling.enable", lambda *given, **named: pytest.fail("it ran"))
    for out in ("file", "file/below"):
        answer = conform(*what, "--out", str(tmp_path / out))
        assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
        assert f"nothing can be written into {tmp_path / 'file'}" in answer.err


@pytest.mark.usefixtures("one_process")
def test_the_schemas_refuse_what_does_not_fit(conform: Callable[..., Answer]):
    report = conform("reference", "--level", "L1", "--json").json
    schema = json.loads((ROOT / "core/polydraft/schemas/conform-1.json").read_text())
    assert jsonschema.Draft202012Validator(schema).is_valid(report)
    for change in ({"extra": 1}, {"results": [{"id": "x"}]}, {"owners": {"linear": "borrowed"}}):
        assert not jsonschema.Draft202012Validator(schema).is_valid({**report, **change})


@pytest.mark.usefixtures("one_process")
def test_a_table_of_backends(conform: Callable[..., Answer], broken: Callable[[str], str], tmp_path: Path):
    given = ("--matrix", "reference,emulator=emulator:0?seed=4", "--contract", "argmax", "--case", "lowest_id_of_equals")
    answer = conform(*given, "--out", str(tmp_path / "out"), "--json")
    assert (answer.status, [one["device"] for one in answer.json["backends"]]) == (0, ["cpu", "emulator:0?seed=4"])
    assert json.loads((tmp_path / "out" / "matrix.json").read_text()) == answer.json
    assert (tmp_path / "out" / "matrix.md").is_file()
    assert (tmp_path / "out" / "reference" / "report.json").is_file()
    mixed = conform("--matrix", "reference,broken", "--plugin", broken("M17"), *given[2:])
    assert mixed.status == 1
    assert "broken: what was asked for fails" in mixed.out
    assert conform("--matrix", "reference,nonesuch").status == 2
    for wrong in (("reference", "--matrix", "emulator"), (), ("--matrix", "reference", "--prove")):
        assert conform(*wrong).status == 2


DOOMED = """
import dataclasses, os, time
from polydraft import hookimpl, reference
from polydraft.conformance.target import TableProxy
from polydraft.reference import polydraft_collectives, polydraft_init_forward_meta, polydraft_open_device


class Doomed:
    def bind(self, args, limits, workspace):
        {fate}

    def workspace_bytes(self, args, limits):
        return 0


@hookimpl
def polydraft_backend_info():
    return dataclasses.replace(reference.polydraft_backend_info(""), name="doomed")


@hookimpl
def polydraft_kernels(device):
    return TableProxy(reference.polydraft_kernels(device), {{"embed": Doomed()}})
"""


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        (
            "print('X'); os.abort()",
            "the process died in this check (SIGABRT, Aborted), at doomed.py:{line}, in bind; it wrote 'X'",
        ),
        (
            "__import__('ctypes').string_at(8)",
            "the process died in this check (SIGSEGV, Segmentation fault), at doomed.py:{line}, in bind",
        ),
        ("os._exit(0)", "the process died in this check (exit status 0)"),
        (
            "time.sleep(600)",
            "the check did not end within 1 s; it hangs, or --timeout is too short, at doomed.py:{line}, in bind",
        ),
    ],
)
def test_a_backend_that_crashes_or_hangs_fails_its_checks(conform: Callable[..., Answer], tmp_path: Path, fate: str, said: str):
    file = tmp_path / "doomed.py"
    file.write_text(DOOMED.format(fate=fate))
    answer = conform("doomed", "--plugin", str(file), "--contract", "embed", "--case", "all_padding", "--timeout", "1", "--json")
    assert answer.status == 1
    (result,) = answer.json["results"]
    again = f" (rerun: polydraft conform doomed --plugin {file} --contract embed --case all_padding)"
    line = 1 + DOOMED.split("\n").index("        {fate}")
    assert (result["id"], result["outcome"], result["kernel"]) == ("L2/embed/all_padding", "fail", "embed")
    assert result["message"] == said.format(line=line) + again
    assert result["output"] in answer.err, "what it wrote is shown"
    assert ("Current thread" in result["output"]) == ("doomed.py" in said)


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        (
            "os.write(2, b'a driver speaks\\n'); os.abort()",
            "loaded (SIGABRT, Aborted, at doomed.py:{line}, in <module>); it wrote 'a driver speaks'; look at its imports",
        ),
        ("time.sleep(600)", "loading 'doomed' did not end within 2 s; look at its imports"),
    ],
)
def test_a_backend_that_does_not_survive_its_import_fails(
    conform: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str, said: str
):
    if "sleep" in fate:
        monkeypatch.setattr("polydraft.conformance.isolation.START_S", 1.0)
    file = tmp_path / "doomed.py"
    file.write_text(DOOMED.format(fate="pass") + f"\n{fate}\n")
    answer = conform("doomed", "--plugin", str(file), "--timeout", "1")
    assert (answer.status, answer.out) == (1, "")
    assert said.format(line=file.read_text().count("\n")) in answer.err
    assert answer.err.count("\n") == 1
    if "abort" in fate:
        assert "Fatal Python error: Aborted" in conform("doomed", "--plugin", str(file), "--debug").err


@pytest.mark.deep
def test_checks_behind_a_crash_are_run(conform: Callable[..., Answer], tmp_path: Path):
    file = tmp_path / "doomed.py"
    file.write_text(DOOMED.format(fate="os.abort()"))
    results = conform("doomed", "--plugin", str(file), "--level", "L0", "--json").json["results"]
    outcome = {result["id"]: result["outcome"] for result in results}
    assert outcome["L0/weights-refill-in-place"] == "fail"
    assert outcome["L0/undeclared-is-refused"] == "pass"
    assert len(outcome) == len(results)


POOR = """
import dataclasses
from polydraft import hookimpl, reference
from polydraft.errors import DeviceError
from polydraft.reference import polydraft_collectives, polydraft_graph_capture, polydraft_init_forward_meta, polydraft_kernels


@hookimpl
def polydraft_backend_info():
    info = reference.polydraft_backend_info("queued")
    return dataclasses.replace(info, name="poor", devices=("queued",))


@hookimpl
def polydraft_open_device(spec, options):
    if not options.allow_cpu_fallback:
        raise DeviceError("device poor:0 has no kernel of 'add'; write one")
    device = reference.polydraft_open_device(spec, options)
    device.withdrawn = {"graph_capture": "device poor:0 captured nothing"}
    return device
"""


@pytest.fixture
def poor(tmp_path: Path) -> tuple[str, ...]:
    """A backend that declares graphs, on a device without any that computes only with the fallback."""
    file = tmp_path / "poor.py"
    file.write_text(POOR)
    return "poor", "--plugin", str(file), "--device", "queued"


def test_what_a_device_lacks_is_not_claimed_and_the_report_says_why(conform: Callable[..., Answer], poor: tuple[str, ...]):
    answer = conform(*poor, "--level", "L0", "--allow-cpu-fallback", "--json")
    assert answer.status == 0
    outcome = {result["id"]: (result["outcome"], result["message"]) for result in answer.json["results"]}
    assert outcome["L0/capture-facility"] == ("unsupported", "device poor:0 captured nothing")
    assert outcome["L0/undeclared-is-refused"][0] == "pass", "an engine with graphs is one of them"
    assert outcome["L0/identity"][0] == "pass"
    backend = answer.json["backend"]
    assert backend["withdrawn"] == {"graph_capture": "device poor:0 captured nothing"}
    assert (backend["capabilities"]["graph_capture"], "graph_capture" in answer.json["not_claimed"]) == (False, True)
    assert answer.json["claim"]["allow_cpu_fallback"]


@pytest.mark.usefixtures("one_process")
def test_a_level_of_graphs_proves_nothing_on_a_device_without(conform: Callable[..., Answer], poor: tuple[str, ...]):
    answer = conform(*poor, "--level", "L3", "--allow-cpu-fallback", "--json")
    assert (answer.status, {result["outcome"] for result in answer.json["results"]}) == (4, {"unsupported"})


@pytest.mark.usefixtures("one_process")
def test_the_fallback_is_allowed_where_the_command_says_so(conform: Callable[..., Answer], poor: tuple[str, ...]):
    refused = conform(*poor, "--level", "L1")
    assert (refused.status, refused.err) == (1, "polydraft: device poor:0 has no kernel of 'add'; write one\n")
    failing = conform(*poor, "--contract", "swiglu", "--allow-cpu-fallback")
    assert (failing.status, "--contract swiglu --allow-cpu-fallback" in failing.out) == (0, True)
    for other in ("--prove", "--enable-variants"):
        answer = conform(*poor, "--allow-cpu-fallback", other)
        assert answer.status == 2
        assert "hold the device's own kernels; leave --allow-cpu-fallback out" in answer.err
