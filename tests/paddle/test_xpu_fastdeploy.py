"""The kernel pack `xpu/fastdeploy` on stand-ins with upstream's signatures: each adaptor holds its contract.

The stand-ins are made from what FastDeploy's public source says of its operators (`tests/support/stand_ins`). That shows what the
adaptors make of the operators, and nothing of a chip.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.errors import ContractError, PluginError
from tests.support.paddle import answer, needs_device, needs_graphs, needs_paddle, polydraft, script
from tests.support.project import ROOT, pyproject

sys.path.insert(0, str(ROOT / "backends" / "paddle"))
sys.path.insert(0, str(ROOT / "backends" / "xpu"))
import polydraft_xpu.fastdeploy as pack
from polydraft_xpu.fastdeploy import installed
from polydraft_xpu.fastdeploy.adaptors import ADAPTORS, EVIDENCE, REFUSALS

STAND_INS = ROOT / "tests" / "support" / "stand_ins"
WITH_THEM = {"PYTHONPATH": os.pathsep.join(filter(None, (str(STAND_INS), os.environ.get("PYTHONPATH", ""))))}
NAMED = ("--plugin", "polydraft_xpu.fastdeploy")
OPERATORS = {one.operator for one in ADAPTORS}

CASES = """
import importlib, json, os, sys
import numpy as np
from polydraft_paddle.installation import import_paddle
import_paddle()
from polydraft.backend import DeviceOptions
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.conformance.harness import check_kernel, contract_of
from polydraft_paddle import open_place, polydraft_kernels
import polydraft_xpu.fastdeploy as pack
from polydraft_xpu.fastdeploy import Call
from polydraft_xpu.fastdeploy.adaptors import ADAPTORS
from polydraft_xpu.fastdeploy.installed import parameters
import fastdeploy.model_executor.ops.xpu as operators

device = open_place(sys.argv[1], DeviceOptions())
backend = polydraft_kernels(device)
used = {}
called = Call.__call__
def watched(self, values):
    key = f"{self.adaptor.contract} {self.adaptor.operator} {self.adaptor.read}"
    used[key] = used.get(key, 0) + 1
    return called(self, values)
Call.__call__ = watched

def failures(table, contract, seeds):
    kernel = COMPOSITES[contract] if contract in COMPOSITES else REGISTRY[contract]
    as_one = contract_of(kernel)
    for case in [*as_one.cases(), *(as_one.generate(np.random.default_rng(seed)) for seed in range(seeds))]:
        try:
            outcome = check_kernel(kernel, case, device, table)
        except AssertionError as error:
            yield f"{contract} {case.name}: {error!r}"
            continue
        if not outcome.ok:
            yield f"{contract} {case.name}: {outcome}"

def opened():
    table = pack.polydraft_kernels(device)
    table.prepare_weight, table.allocate_cache = backend.prepare_weight, backend.allocate_cache
    return table
"""

HOLDS = (
    CASES
    + """
class Unnamed:
    # As pybind11 makes a function of which nobody named the arguments.
    def __init__(self, operator):
        count = len(parameters(operator))
        self.operator, self.__doc__ = operator, f"it({', '.join(f'arg{i}: object' for i in range(count))}) -> None"

    def __call__(self, *arguments):
        return self.operator(*arguments)

for variables in json.loads(sys.argv[2]):
    os.environ.update(variables)
    importlib.reload(operators)
    if "UNNAMED" in variables:
        for name in {one.operator for one in ADAPTORS}:
            setattr(operators, name, Unnamed(getattr(operators, name)))
    used.clear()
    table = opened()
    wrong = [one for contract in table.providers for one in failures(table, contract, 3)]
    told = {"served": sorted(table.providers), "wrong": wrong, "used": dict(used), "left_out": table.notes.left_out}
    print(json.dumps(told))
    for name in variables:
        del os.environ[name]
"""
)


def holds(place: str, *variables: dict[str, str]) -> list[dict[str, Any]]:
    """What the pack serves under each set of variables, which of its cases went wrong, and which adaptors were used."""
    run = script(HOLDS, place, json.dumps(variables), environment=WITH_THEM)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(variables)
    return found


def test_the_pack_is_found_by_its_name_and_imports_nothing_by_itself():
    assert pyproject()["project"]["entry-points"]["polydraft.kernels"][pack.NAME] == "polydraft_xpu.fastdeploy"
    assert not {"paddle", "fastdeploy"} & {*vars(pack), *vars(installed), *vars(sys.modules[ADAPTORS[0].__module__])}


def test_records_are_of_contracts_that_there_are():
    known = {*REGISTRY.names(), *COMPOSITES}
    assert {one.contract for one in ADAPTORS} <= known
    assert {name for one in REFUSALS for name in one.contracts} <= known
    assert not {one.operator for one in REFUSALS} & OPERATORS
    for one in ADAPTORS:
        assert one.differs
        assert {*one.writes} <= {*one.takes}
        assert bool(one.only) == (one.fits is not None)
        assert len(one.read) == 12


@needs_paddle
def test_each_adaptor_holds_its_contract_with_every_version_that_was_read():
    now, before, last = holds("cpu", {}, {"STAND_INS_OF": "autumn 2025"}, {"STAND_INS_LACK": "eagle_get_hidden_states"})
    contracts = sorted({one.contract for one in ADAPTORS})
    for found in (now, before, last):
        assert found["wrong"] == []
    assert now["served"] == before["served"] == last["served"] == contracts
    every = {f"{one.contract} {one.operator} {one.read}" for one in ADAPTORS}
    assert {*now["used"], *before["used"], *last["used"]} == every, "an adaptor that nobody has called is no adaptor"
    assert now["left_out"] == {}


@needs_paddle
@pytest.mark.deep
def test_each_adaptor_holds_its_contract_where_rows_are_kept_or_arguments_named_otherwise():
    accepted, unnamed = holds("cpu", {"STAND_INS_KEEP": "accepted rows", "STAND_INS_LACK": "fast_swiglu_xpu"}, {"UNNAMED": "yes"})
    assert accepted["wrong"] == unnamed["wrong"] == []
    assert unnamed["served"] == sorted({one.contract for one in ADAPTORS})
    assert accepted["left_out"] == {"swiglu": "the installed FastDeploy does not fit: fast_swiglu_xpu is not there"}


WRONG = (
    CASES
    + """
import functools

def numbered_from_one(f, **a):
    return [one + (place == 1) for place, one in enumerate(f(**a))]

def first_rows_alone(f, **a):
    return f(**{**a, "cu_seqlens_q_output": a["cu_seqlens_q_output"] * 0})

def everything_was_accepted(f, **a):
    return f(**{**a, "actual_draft_token_num": 0})

def just_prefilled(f, **a):
    return f(**{**a, "step_idx": a["step_idx"] + 1})

def moves_nowhere(f, **a):
    return f(**{**a, "seq_lens_decoder": a["seq_lens_decoder"].clone()})

def without_gain(f, **a):
    return f(**{**a, "norm_weight": a["norm_weight"] * 0 + 1})

def the_other_half(f, x):
    return f(x.roll(x.shape[1] // 2, 1))

for name, fault in {
    "speculate_pre_process": numbered_from_one, "verify_draft_tokens": first_rows_alone,
    "eagle_get_hidden_states": everything_was_accepted, "eagle_get_self_hidden_states": just_prefilled,
    "draft_model_update": moves_nowhere, "fused_rms_norm_xpu": without_gain, "fast_swiglu_xpu": the_other_half,
}.items():
    right = getattr(operators, name)
    setattr(operators, name, functools.wraps(right)(functools.partial(fault, right)))
    if name == "eagle_get_self_hidden_states":
        del operators.eagle_get_hidden_states
    table = opened()
    for contract, by in table.notes.computed_by.items():
        if name in by:
            print(json.dumps([name, contract, next(failures(table, contract, 3), "")]))
    setattr(operators, name, right)
"""
)


@needs_paddle
@pytest.mark.deep
def test_an_operator_that_does_something_else_is_found():
    """The kit's cases see it through the adaptor, for every operator and each contract that it serves."""
    run = script(WRONG, "cpu", environment=WITH_THEM)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert {(name, contract) for name, contract, _ in found} == {(one.operator, one.contract) for one in ADAPTORS}
    assert [(name, contract) for name, contract, problem in found if not problem] == []


# -- what is installed ---------------------------------------------------------------------------------
def compiled(first_line: str) -> Any:
    """A function that tells Python nothing but its docstring."""

    class Compiled:
        __doc__ = first_line

        @property
        def __signature__(self) -> None:
            raise ValueError("no signature found for builtin")

        def __call__(self) -> None: ...

    return Compiled()


def test_names_of_parameters_are_read_wherever_they_are():
    assert installed.parameters(lambda x, seq_len: None) == ("x", "seq_len")
    assert installed.parameters(lambda *arguments: None) == ()
    head = "eagle(input: paddle::Tensor, bias: Optional[paddle::Tensor] = None, num: typing.SupportsInt) -> list[paddle::Tensor]"
    assert installed.parameters(compiled(f"{head}\n\nSays something: of its own.")) == ("input", "bias", "num")
    unnamed = installed.parameters(compiled("eagle(arg0: paddle::Tensor, arg1: int) -> None"))
    assert (unnamed, installed.are_names(unnamed)) == (("arg0", "arg1"), False)
    assert installed.parameters(compiled("")) == ()


def test_other_parameters_than_were_read_are_named():
    (swiglu,) = (one for one in ADAPTORS if one.contract == "swiglu")
    found = {"fast_swiglu_xpu": lambda x: None}
    assert installed.unfit(swiglu, found) == ""
    assert installed.unfit(swiglu, {"fast_swiglu_xpu": lambda *a: None}) == "", "where nothing can be read it is tried"
    assert installed.unfit(swiglu, {}) == "fast_swiglu_xpu is not there"
    unnamed = compiled("fast_swiglu_xpu(arg0: paddle::Tensor) -> list"), compiled("fast_swiglu_xpu(arg0: int, arg1: int) -> list")
    assert [installed.unfit(swiglu, {"fast_swiglu_xpu": one}) for one in unnamed] == [
        "", "fast_swiglu_xpu takes (arg0, arg1), wanted (x)"
    ]  # fmt: skip
    more = {"fast_swiglu_xpu": lambda x, turn: None}
    assert installed.unfit(swiglu, more) == "fast_swiglu_xpu takes (x, turn), wanted (x)"


def test_an_operator_that_returns_too_little_or_takes_other_arguments_is_named():
    (swiglu,) = (one for one in ADAPTORS if one.contract == "swiglu")
    values = {"gate_up": SimpleNamespace(dtype="paddle.float32")}
    with pytest.raises(ContractError, match="fast_swiglu_xpu returned 0 tensors, wanted gated; leave the pack out"):
        pack.Call(swiglu, lambda x: None, by_name=True)(values)
    with pytest.raises(ContractError, match=r"fast_swiglu_xpu does not take x .*; leave the pack out of --kernels and report it"):
        pack.Call(swiglu, lambda y: None, by_name=True)(values)
    assert pack.Call(swiglu, lambda x: [x], by_name=False)(values) == {"gated": values["gate_up"]}


def test_without_fastdeploy_the_pack_says_how_to_get_it():
    with pytest.raises(PluginError) as refused:
        installed.operators(sorted(OPERATORS))
    assert "fastdeploy.model_executor.ops.xpu, which cannot be imported (ModuleNotFoundError: No module named" in str(
        refused.value
    )
    assert "pip install fastdeploy-xpu -i https://www.paddlepaddle.org.cn/" in str(refused.value)


def test_a_fastdeploy_without_its_operators_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(rebuild=print))
    with pytest.raises(PluginError, match="has none of fast_swiglu_xpu: FastDeploy is there without its operators; install"):
        installed.operators(["fast_swiglu_xpu"])
    assert list(installed.operators(["fast_swiglu_xpu", "rebuild"])) == ["rebuild"]


# -- the command ---------------------------------------------------------------------------------------
@pytest.mark.deep
@needs_paddle
def test_one_command_tells_operator_by_operator():
    lacking = {**WITH_THEM, "STAND_INS_LACK": "draft_model_update"}
    run = polydraft("conform", "xpu", "--device", "cpu", *NAMED, "--contract", "select_last_rows", environment=lacking)
    assert run.returncode == 0, run.stderr[-2000:] + run.stdout[-2000:]
    lines = run.stdout.splitlines()
    at = lines.index(f"kernels of polydraft_xpu.fastdeploy, seen by its authors on {EVIDENCE}:")
    told = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[at + 1 : lines.index("", at)]}
    assert {*told} == {one.contract for one in ADAPTORS}
    assert re.fullmatch(r"holds in 1\d checks +eagle_get_hidden_states, eagle_get_self_hidden_states", told["select_last_rows"])
    assert re.fullmatch(r"not run +verify_draft_tokens", told["verify_match"])
    assert re.fullmatch(
        r"left out +the installed FastDeploy does not fit: draft_model_update is not there", told["advance_draft"]
    )


ASKED = ("generate", "def fibonacci(n):", "--draft-tokens", "3", "--max-new-tokens", "16")


@pytest.mark.deep
@needs_paddle
def test_text_and_rounds_are_those_of_the_reference():
    wanted = answer(*ASKED, "--backend", "reference")
    got = answer(*ASKED, "--backend", "xpu", "--device", "cpu", *NAMED, environment=WITH_THEM)
    assert got["requests"][0]["token_ids"] == wanted["requests"][0]["token_ids"]
    assert got["totals"]["steps"] == wanted["totals"]["steps"]


@pytest.mark.deep
@needs_device
@needs_graphs
def test_steps_are_captured_in_pieces_around_operators_that_wait():
    wanted = answer(*ASKED, "--backend", "reference")
    got = answer(*ASKED, "--backend", "xpu", "--device", "polyemu:0", *NAMED, environment=WITH_THEM)
    assert got["requests"][0]["token_ids"] == wanted["requests"][0]["token_ids"]
    assert got["totals"]["steps"] == wanted["totals"]["steps"]
    assert got["totals"]["graph_replays"] > 3 * got["totals"]["steps"]
    (held,) = holds("polyemu:0", {})
    assert held["wrong"] == []
