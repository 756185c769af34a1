"""A vendor's inner loop: the package that is written, one function alone, a test file of one name, packs, and bad endings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft.cli import main
from polydraft.cli.new_backend import TEMPLATE, write
from polydraft.conformance import KernelMismatch, check_kernel, conform
from polydraft.conformance.causes import causes, named
from polydraft.conformance.check import Tally
from polydraft.conformance.kernel_checks import named_cases
from polydraft.conformance.outcomes import Result
from polydraft.conformance.pages import page
from polydraft.conformance.report import Selection, make
from polydraft.conformance.target import Target
from polydraft.conformance.vendor import Conformance
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.compare import Comparison, Mismatch
from polydraft.contracts.composite import as_contract
from polydraft.contracts.large import large_sizes, several_large
from polydraft.errors import ConfigError, PluginError
from tests.support.project import ROOT
from tests.support.schemas import published


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main.main(list(args))
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


# -- new-backend -------------------------------------------------------------------------------------
def test_the_template_in_plugins_is_what_new_backend_writes(tmp_path: Path):
    """`python -c "from polydraft.cli.new_backend import write; ..."` with the folder plugins/template writes it anew."""
    files = write("template", tmp_path)
    kept = ROOT / "plugins" / "template"
    assert {file: (tmp_path / file).read_text() for file in files} == {file: (kept / file).read_text() for file in files}
    assert {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.suffix in {".py", ".md", ".toml"}} == set(files)


def test_the_template_is_small():
    code = [line for file in (TEMPLATE / "polydraft_mychip").glob("*.py") for line in file.read_text().splitlines()]
    assert len(code) <= 110


@pytest.fixture
def mychip(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh package, importable without installing it."""
    status, out, err = run(capsys, "new-backend", "my_chip2", "--into", str(tmp_path))
    assert (status, err) == (0, "")
    folder = tmp_path / "polydraft-my-chip2"
    assert f"pip install -e {folder}" in out
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.deep
def test_an_untouched_package_proves_nothing(mychip: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(mychip))  # the kit runs checks in a process of its own
    status, out, _ = run(capsys, "conform", "my_chip2", "--plugin", "polydraft_my_chip2", "--json")
    verdict = json.loads(out)["verdict"]
    assert status == verdict["status"] == 4
    assert verdict["counts"]["fail"] == verdict["counts"]["error"] == 0
    assert verdict["sentence"].startswith("nothing was proved: no compute kernel is the backend's own; implement at least one of")


def test_the_name_is_everywhere(mychip: Path):
    text = "".join(path.read_text() for path in mychip.rglob("*") if path.is_file())
    assert "ychip" not in text.replace("my_chip2", "").replace("MyChip2", "")
    assert 'my_chip2 = "polydraft_my_chip2"' in text
    assert 'name = "polydraft-my-chip2"' in text


def test_json_of_new_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = run(capsys, "new-backend", "mychip", "--into", str(tmp_path), "--json")
    answer = json.loads(out)
    published("polydraft.new_backend/1").validate(answer)
    assert status == 0
    assert all((Path(answer["folder"]) / file).is_file() for file in answer["files"])


def test_new_backend_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "polydraft-there").mkdir()
    (tmp_path / "file").write_text("")
    for name, into, said in (
        ("My-Chip", tmp_path, "name is 'My-Chip', wanted lower-case letters"),
        ("reference", tmp_path, "a backend called 'reference' is installed already; choose another name"),
        ("there", tmp_path, "exists already, wanted a folder that is not there"),
        ("mychip", tmp_path / "file", "cannot be written: "),
    ):
        status, out, err = run(capsys, "new-backend", name, "--into", str(into))
        assert (status, out) == (2, "")
        assert said in err


# -- one function ------------------------------------------------------------------------------------
class Memory:
    """What only `up` and `down` can open."""

    def __init__(self, array: Any) -> None:
        self.hidden = array.copy()


def up(array: Any) -> Memory:
    return Memory(array)


def down(memory: Memory) -> Any:
    return memory.hidden


def residual_add(a: Any, n: int) -> None:
    a.x.hidden[:n] += a.y.hidden[:n]


@pytest.mark.parametrize("name", [*REGISTRY.names(), *COMPOSITES])
def test_every_contract_can_be_checked_alone(name: str):
    """The golden in float64 would pass; here it runs on what the function is given, and its own rounding is far within."""
    contract = as_contract(COMPOSITES[name]) if name in COMPOSITES else REGISTRY[name]

    def function(a: Any, n: int) -> Any:
        from types import SimpleNamespace

        flat: dict[str, Any] = {}
        for part in a.parts if hasattr(a, "parts") else (a,):
            flat |= vars(part)
        wide: dict[str, Any] = {
            k: v.astype(np.float64) if isinstance(v, np.ndarray) and v.dtype.kind == "f" else v for k, v in flat.items()
        }
        if "cache" in wide:
            wide["cache"] = SimpleNamespace(k=wide["cache"][0], v=wide["cache"][1])
        with np.errstate(all="ignore"):
            contract.golden(SimpleNamespace(**wide), n)
        if "cache" in wide:
            wide["cache"] = np.stack((wide["cache"].k, wide["cache"].v))
        return {k: v.astype(flat[k].dtype) for k, v in wide.items() if isinstance(v, np.ndarray)}

    case = named_cases(COMPOSITES.get(name) or REGISTRY[name])[0].name
    assert all(
        found.ok for found in (*check_kernel(name, function, seeds=2, large=False), *check_kernel(name, function, case=case))
    )


def test_a_function_that_writes_in_place_in_memory_of_its_own():
    found = check_kernel("residual_add", residual_add, up, down)
    kernel = REGISTRY["residual_add"]
    large = [several_large(kernel, sizes).name for sizes in large_sizes(kernel)]
    assert len(found) == len(named_cases(kernel)) + 20 + len(large)
    assert [one.case for one in found[-len(large) :]] == large
    assert check_kernel("residual_add", residual_add, up, down, case="H-4000")[0].elements == 2 * 12 * 4000
    assert check_kernel("residual_add", residual_add, up, down, case="seed-123")[0].case == "seed-123"


def test_a_function_in_bf16_sees_bits():
    def embed(a: Any, n: int) -> None:
        assert a.out.dtype == a.weight.dtype == np.uint16
        a.out[:n] = np.where(a.ids[:n, None] >= 0, a.weight[a.ids[:n]], 0)

    check_kernel("embed", embed, dtype="bf16")


def test_a_mismatch_can_be_acted_on():
    def wrong(a: Any, n: int) -> None:
        residual_add(a, len(a.x.hidden))

    with pytest.raises(KernelMismatch) as caught:
        check_kernel("residual_add", wrong, up, down)
    first, rerun = str(caught.value).splitlines()
    assert first.startswith("residual_add/1, case 'rows_beyond_the_launch_stay': x[3, 0] is ")
    assert "as before the launch (this element may not be written)" in first
    assert rerun.startswith("rerun: check_kernel('residual_add', ..., case='rows_beyond_the_launch_stay'); what it has to do: ")
    with pytest.raises(KernelMismatch, match=r"case='seed-5'\)"):
        check_kernel("swiglu", lambda a, n: None, case="seed-5")


def test_an_exception_names_its_case():
    with pytest.raises(ZeroDivisionError) as caught:
        check_kernel("linear", lambda a, n: 1 // 0, case="one_row")  # type: ignore[arg-type,return-value]
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["while running linear/1, case 'one_row', launch length 1"]


def test_what_does_not_exist_cannot_be_checked():
    with pytest.raises(ConfigError, match="no contract is called 'linaer'"):
        check_kernel("linaer", residual_add)
    with pytest.raises(ConfigError, match="linear has no case 'tiny'; it has with_bias, "):
        check_kernel("linear", residual_add, case="tiny")


# -- a test file of one name -------------------------------------------------------------------------
VENDOR = """
from polydraft.conformance.vendor import Conformance


class TestMine(Conformance):
    backend = "{backend}"
    plugins = ({plugin!r},)
"""


def pytest_in(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", *args, "test_mine.py"],
        cwd=folder, capture_output=True, text=True, check=False, env=None,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.fixture
def vendor(tmp_path: Path) -> Callable[[str, str], Path]:
    def make(backend: str, plugin: str) -> Path:
        (tmp_path / "test_mine.py").write_text(VENDOR.format(backend=backend, plugin=plugin))
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        return tmp_path

    return make


BYTES = str(ROOT / "tests" / "support" / "bytes_backend.py")


@pytest.mark.deep
def test_a_vendors_whole_test_file(vendor: Callable[[str, str], Path]):
    answer = pytest_in(vendor("bytes", BYTES))
    assert " passed" in answer, answer
    assert "failed" not in answer
    assert "capability graph_capture is not declared" in answer
    assert "checks were not run here" not in answer, "the claim was judged"


def test_a_part_of_the_checks_claims_nothing(vendor: Callable[[str, str], Path]):
    answer = pytest_in(vendor("bytes", BYTES), "-k", "L2/swiglu or claim")
    assert "checks were not run here; a claim needs all of them" in answer, answer


class Metafunc:
    """What pytest hands to `pytest_generate_tests`."""

    fixturenames = ("check",)

    def parametrize(self, name: str, values: list[Any], ids: Callable[[Any], str]) -> None:
        assert name == "check"
        self.checks = {ids(value): value for value in values}


def mine(**settings: Any) -> tuple[Any, dict[str, Any]]:
    """A vendor's class with these settings, and its tests by id."""
    cls: Any = type("TestMine", (Conformance,), {"backend": "bytes", "plugins": (BYTES,), **settings})
    found = Metafunc()
    cls.pytest_generate_tests(found)
    return cls(), found.checks


def test_a_class_has_a_test_for_each_check_and_one_for_the_claim():
    _, tests = mine()
    assert list(tests) == [check.id for check in Selection().checks()] + ["claim"]
    assert set(mine(profile="graph")[1]) - set(tests) == {c.id for c in Selection("graph").checks()} - set(tests)
    Conformance.pytest_generate_tests(type("Other", (), {"fixturenames": ()})())


def test_a_claim_for_features_runs_their_checks():
    dense, every = mine(features=("dense",))[1], mine()[1]
    assert set(dense) < set(every)
    assert {"L5/sampled/0", "L2/sample/seeds"} == {"L5/sampled/0", "L2/sample/seeds"} & (set(every) - set(dense))


def test_outcomes_are_those_of_pytest(tmp_path: Path):
    (tmp_path / "broken.py").write_text(Path(BYTES).read_text().replace("* up)", "+ up)"))
    good, tests = mine()
    broken, _ = mine(plugins=(str(tmp_path / "broken.py"),))
    good.test_conformance(tests["L2/swiglu/one_column"])
    with pytest.raises(pytest.skip.Exception, match="capability graph_capture is not declared"):
        good.test_conformance(tests["L0/capture-facility"])
    said = r"L2/swiglu/one_column: .* \(rerun: polydraft conform bytes --plugin .* --case one_column\)$"
    with pytest.raises(pytest.fail.Exception, match=said):
        broken.test_conformance(tests["L2/swiglu/one_column"])
    with pytest.raises(pytest.skip.Exception, match="checks were not run here; a claim needs all of them"):
        good.test_conformance(tests["claim"])


@pytest.mark.parametrize(("fault", "said"), [("", ""), ("fail", "1 checks failed"), ("unsupported", "are missing")])
def test_the_claim_is_judged_over_all_results(fault: str, said: str):
    test, tests = mine()
    for id_ in tests:
        outcome = fault if fault and id_ == "L1/load-replaces-all" else "pass"
        test._results[id_] = Result(id_, outcome, 1)  # type: ignore[arg-type]
    del test._results["claim"]
    test.target().owners |= {"swiglu": "own"}
    if not fault:
        return test.test_conformance(None)
    with pytest.raises(pytest.fail.Exception, match=said):
        test.test_conformance(None)
    return None


# -- kernel packs ------------------------------------------------------------------------------------
PACK = """
from polydraft import hookimpl
from polydraft.backend import PackNotes
import numpy as np


class Swiglu:
    def bind(self, args, limits, workspace):
        gate_up, out = args.gate_up.host_array, args.out.host_array

        def launch(stream, n):
            gate, up = np.split(gate_up[:n], 2, axis=1)
            with np.errstate(over="ignore"):
                out[:n] = gate / (1 + np.exp(-gate)) * up{fault}

        return launch

    def workspace_bytes(self, args, limits):
        return 0


class Table:
    providers, versions = {{"swiglu": Swiglu()}}, {{"swiglu": 1}}
    notes = PackNotes(
        computed_by={{"swiglu": "a division"}}, left_out={{"linear": "NumPy is slow"}}, evidence="paper", library="numpy 9"
    )


@hookimpl
def polydraft_kernels(device):
    return Table()
"""


@pytest.mark.parametrize(("fault", "status"), [("", 0), (" + 1", 1)])
def test_a_pack_is_tested_over_its_backend(tmp_path: Path, fault: str, status: int):
    file = tmp_path / "fast.py"
    file.write_text(PACK.format(fault=fault))
    report = conform("reference", files=[str(file)], packs=["fast"], selection=Selection(contract="swiglu"))
    assert report.status == status, page(report)
    assert [pack["name"] for pack in report.content["packs"]] == ["fast"]
    lines = page(report).splitlines()
    at = lines.index("kernels of fast (numpy 9), seen by its authors on paper:")
    said = r"fails in [1-9]\d* of 1\d checks" if fault else r"holds in 1\d checks"
    assert re.fullmatch(rf"  swiglu +{said} +a division", lines[at + 1])
    assert re.fullmatch(r"  linear +left out +NumPy is slow", lines[at + 2])
    if status:
        assert f"(rerun: polydraft conform reference --plugin {file} --kernels fast --contract swiglu" in page(report)
    else:
        target = Target("reference", files=[str(file)], packs=["fast"])
        assert target.opened().table.overrides[0].contract == "swiglu"
        with target.engine(max_num_seqs=1) as engine:
            assert [override.contract for override in engine.table.overrides] == ["swiglu"]


PARTICULAR = """
from types import SimpleNamespace
from polydraft import hookimpl
from polydraft.errors import PluginError


@hookimpl
def polydraft_kernels(device):
    if "Proxy" in [each.__name__ for each in type(device).__mro__]:
        raise PluginError(f"kernel pack 'fast' is for another family of devices, got a {type(device).__name__}; leave it out")
    return SimpleNamespace(providers={}, versions={})
"""


def test_a_pack_meets_the_device_that_it_knows_in_every_check(tmp_path: Path):
    """Also where a check has copies come late."""
    file = tmp_path / "fast.py"
    file.write_text(PARTICULAR)
    report = conform("reference", device="queued", files=[str(file)], selection=Selection(check="L4/delayed-copies"))
    assert report.status == 0, page(report)


NOTHING_HERE = """
from polydraft import hookimpl
from polydraft.errors import PluginError


@hookimpl
def polydraft_kernels(device):
    raise PluginError("kernel pack 'fast' calls operators that are not installed; install them")
"""


@pytest.mark.parametrize("limit_s", [None, 60.0], ids=["here", "in another process"])
def test_a_pack_without_a_table_is_said_once_before_any_check(tmp_path: Path, limit_s: float | None):
    file = tmp_path / "fast.py"
    file.write_text(NOTHING_HERE)
    with pytest.raises(PluginError, match="calls operators that are not installed; install them"):
        conform("reference", files=[str(file)], selection=Selection(contract="swiglu"), limit_s=limit_s)


@pytest.mark.usefixtures("one_process")
def test_a_pack_without_a_table_is_bad_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "fast.py"
    file.write_text(NOTHING_HERE)
    status, out, err = run(capsys, "conform", "reference", "--plugin", str(file), "--contract", "swiglu")
    assert (status, out) == (2, "")
    assert err == "polydraft: kernel pack 'fast' calls operators that are not installed; install them\n"


@pytest.mark.usefixtures("one_process")
def test_conform_takes_packs(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "fast.py"
    file.write_text(PACK.format(fault=""))
    args = ("conform", "reference", "--plugin", str(file), "--kernels", "fast")
    status, out, _ = run(capsys, *args, "--contract", "swiglu", "--json")
    answer = json.loads(out)
    published("polydraft.conform/1").validate(answer)
    assert (status, answer["packs"][0]["role"]) == (0, "kernel pack")
    assert run(capsys, *args, "--prove")[0] == 2
    status, _, err = run(capsys, "conform", "reference", "--kernels", "nobody")
    assert (status, "no plugin 'nobody' in polydraft.kernels" in err) == (2, True)


# -- bad endings; crashes, hangs and open delegation are in test_command.py -----------------------------
HEAD = """
import dataclasses
import threading
from polydraft import BackendInfo, hookimpl, reference
from polydraft.conformance.target import Proxy, TableProxy
from polydraft.reference import polydraft_collectives, polydraft_init_forward_meta, polydraft_open_device


class Disguised(Proxy):
    pass


class Hidden(Proxy):
    def bind(self, args, limits, workspace):
        launch = self._inner.bind(args, limits, workspace)

        def run(stream, n):
            thread = threading.Thread(target=launch, args=(stream, n))
            thread.start()
            thread.join()

        return run


class Empty(Proxy):
    providers, versions = {}, {}


@hookimpl
def polydraft_kernels(device):
    return TABLE(reference.polydraft_kernels(device))


@hookimpl
def polydraft_backend_info():
    return dataclasses.replace(reference.polydraft_backend_info(""), name="bad", CLAIM)
"""


@pytest.mark.parametrize(
    ("table", "claim", "said"),
    [
        pytest.param("Empty", "contract_versions={}", "polydraft_kernels offers no kernel; return a table", id="empty"),
        pytest.param(
            "lambda t: TableProxy(t, {})", "contract_versions={'swiglu': 1}", "differ in ", id="lying about what it offers"
        ),
        pytest.param(
            "lambda t: t", "capabilities=dataclasses.replace(reference.CAPABILITIES, dtypes=('f32', 'bf16'))",
            "the reference backend computes in f32, got dtype 'bf16'", id="lying about a dtype",
        ),
        pytest.param(
            "lambda t: TableProxy(t, {n: Disguised(p) for n, p in t.providers.items()})", "evidence='silicon'",
            "kernels that silently run the reference's code", id="silently delegating",
        ),
        pytest.param(
            "lambda t: TableProxy(t, {'swiglu': Hidden(t.providers['swiglu'])})", "evidence='silicon'",
            "swiglu calls numeric_kernels.swiglu", id="delegating in a thread",
        ),
    ],
)  # fmt: skip
def test_a_bad_backend_fails_with_its_reason(tmp_path: Path, table: str, claim: str, said: str):
    file = tmp_path / "bad.py"
    file.write_text(HEAD.replace("TABLE", f"({table})").replace("CLAIM", claim))
    report = conform("bad", files=[str(file)], selection=Selection(level="L0"))
    assert report.status == 1
    assert said in page(report)


# -- causes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("message", "mutants"),
    [
        ("ContractError: linear/1: the launch allocated 0 and synchronised 2 times (raised in x.py:3)", ["M24"]),
        ("ContractError: linear/1: the launch allocated 1 and synchronised 0 times (raised in x.py:3)", ["M22"]),
        ("ContractError: linear/1: the launch returned 3, wanted None; let it return nothing (raised in x.py:3)", []),
        ("AssertionError: a block is lost, or free and held at once (raised in kv_blocks.py:3)", ["M33", "M35"]),
        ("waits in each steady step[0] is 2, wanted 1", ["M24"]),
        ("waits in each steady step[0] is 0, wanted 1", []),
        ("allocations in each steady step[0] is 2, wanted 0", ["M22"]),
        ("wanted: the device counts a replay or more a replayed step, got 0 in 19", ["M20"]),
        ("wanted: the device counts a replay or more a replayed step, got 7 in 19", []),
        ("out[0, 0] is -24576, wanted 1; it was left as before the launch", []),
        ("PluginError: plugin 'x' is broken (raised in x.py:3)", []),
        ("the check did not end within 120 s; it hangs, or --timeout is too short", []),
        ("the process died in this check (SIGSEGV, Segmentation fault), at x.py:3, in launch", []),
        ("tokens of request 0 (prompt of 1, K=0)[3] is 45, wanted 39", []),
        ("acceptance trace of request 0 (prompt of 1, K=3)[1] is 0, wanted 1 (27 entries, wanted 14)", []),
        ("a load of shape (3, 4) into (4, 3) raised nothing, wanted Exception", []),
    ],
)
def test_a_sentence_that_only_one_kind_of_fault_brings_about_names_it(message: str, mutants: list[str]):
    """Every other one names nothing: a guess that is wrong costs more than none."""
    assert list(named(Result("L5/greedy/K0-B1", "fail", 1, message=message))) == mutants


def test_what_many_mutants_leave_tells_none_of_them():
    assert named(Result("L2/x/y", "fail", like=("M01", "M02"))) == ("M01", "M02")
    assert named(Result("L2/x/y", "fail", like=("M01", "M02", "M03"))) == ()
    assert causes(Result("L2/x/y", "fail", like=("M07", "M08"))) == (
        "M07 (the target's token of the last row instead of the accepted one) or M08 (first mismatch counted as accepted)"
    )


def test_a_kernel_that_is_wrong_in_a_way_of_its_own_is_taken_for_none():
    """In the very case that kills M17, and where the case of M17 is not what is wrong."""

    def tie(a: Any, n: int, first: int) -> None:
        for row in range(n):
            if a.row_slot[row] < 0 or not np.isfinite(a.logits[row].max()):
                a.tokens[row] = -1
            else:
                a.tokens[row] = np.flatnonzero(a.logits[row] == a.logits[row].max())[first]

    for function, hint in ((lambda a, n: tie(a, n, -1), True), (lambda a, n: a.tokens[:n].fill(3), False)):
        with pytest.raises(KernelMismatch) as caught:
            check_kernel("argmax", function, case="lowest_id_of_equals")
        assert ("looks like M17 (another rule for ties)" in str(caught.value)) == hint
        assert ("looks like" in str(caught.value)) == hint


def test_a_check_over_several_cases_names_what_explains_them_all():
    tally = Tally()
    wrong = Mismatch("argmax/1", "a", "tokens", "value", "1", "2")
    for like in (("M01", "M17"), ("M17", "M02")):
        tally.compared(Comparison("argmax/1", "a", 1, (wrong,), None, like))
        tally.compared(Comparison("argmax/1", "b", 1, (), None))
    assert tally.like == {"M17"}
    assert tally.failures == ["argmax/1, case 'a': tokens is 1, wanted 2"] * 2
    tally.compared(Comparison("argmax/1", "c", 1, (wrong,), None))
    assert tally.like == set()


def test_a_case_with_several_wrong_arguments_is_named_once():
    tally = Tally()
    wrong = [Mismatch("argmax/1", "a", name, "value", "1", "2") for name in ("tokens", "logits")]
    tally.compared(Comparison("argmax/1", "a", 1, tuple(wrong), None), " (rerun: this)")
    assert tally.failures == ["argmax/1, case 'a': tokens is 1, wanted 2; logits is 1, wanted 2 (rerun: this)"]


# -- the page ----------------------------------------------------------------------------------------
def test_the_page_tells_each_thing_once_and_leaves_room_for_others():
    results = [Result(f"L2/linear/case_{i}", "fail", 1, message=f"out[{i}] is wrong (rerun: this)") for i in range(5)]
    results += [Result(f"L1/round-trip/{i}", "fail", 1, message=f"no device (rerun: that {i})") for i in range(4)]
    results += [Result("L5/prefix-hit", "fail", 1, message="tokens differ")]
    text = page(make(Target("reference"), Selection(level="L2"), results))
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    assert lines == [
        *(f"- L2/linear/case_{i}: out[{i}] is wrong (rerun: this)" for i in range(3)),
        "- L1/round-trip/0 and 3 more: no device (rerun: that 0)",
        "- L5/prefix-hit: tokens differ",
        "- and 2 more kinds of failure of L2/linear; --out FOLDER writes all of them into report.json",
    ]
