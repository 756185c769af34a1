"""A sampling parameter of a plugin: its column, its contract and its kernel come with it, and core knows none of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, Engine, SamplingParams
from polydraft.cli import main
from polydraft.contracts.base import REGISTRY
from polydraft.contracts.docs import render
from polydraft.errors import ConfigError, PluginError, RequestError
from polydraft.program.declare import Column, LogitsStage, Parameter
from polydraft.sampling.processing import Stage
from tests.conformance.conftest import one_process
from tests.support import tiny
from tests.support.cpu import needs_kernels
from tests.support.depth import first
from tests.support.plugin_doubles import backend
from tests.support.runs import Ask, drive, essence, solo

__all__ = ["one_process"]  # the fixture
FILE = str(Path(tiny.__file__).with_name("scale_stage.py"))
"""Loaded as a plugin alone: it adds a contract, which no other test is to meet."""
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    before = set(REGISTRY.names())
    yield
    for name in set(REGISTRY.names()) - before:
        REGISTRY.remove(name)


def llm(**options: Any) -> LLM:
    return LLM(model=str(tiny.checkpoint("narrow")), **{"backend": "reference", "max_num_seqs": 3, "plugins": (FILE,), **options})


def texts(served: LLM, **params: Any) -> list[int]:
    (output,) = served.generate([PROMPT], SamplingParams(max_new_tokens=16, ignore_eos=True, **params))
    return list(output.token_ids)


@pytest.mark.parametrize("options", [{}, {"device": "queued", "graph": "decode", "overlap": 1}, {"sanitize": True}], ids=str)
@pytest.mark.parametrize("drafts", [0, 3])
def test_logits_times_two_are_half_the_temperature(drafts: int, options: dict[str, Any]) -> None:
    served = llm(draft_tokens=drafts, invariant=True, **options)
    sampled = {"temperature": 1.0, "seed": 7}
    assert texts(served, extra={"logit_scale": 2.0}, **sampled) == texts(served, temperature=0.5, seed=7)
    assert texts(served, extra={"logit_scale": 1.0}, **sampled) == texts(served, **sampled)
    assert texts(served, extra={"logit_scale": 2.0}, **sampled) != texts(served, **sampled), "it does something"
    served.close()


@needs_kernels
@pytest.mark.parametrize("graph", ["off", "decode"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("drafts", [0, 3])
def test_texts_of_the_cpu_backend_are_those_of_the_reference(drafts: int, overlap: int, graph: str) -> None:
    """Its kernels are compiled and queued; this one is in NumPy and stands among them."""
    asked = [
        SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=1.0, seed=7, extra=extra)
        for extra in ({"logit_scale": 2.0}, {}, {"logit_scale": 5.0})
    ]
    of_reference, of_cpu = (
        [(output.token_ids, output.rounds) for output in llm(draft_tokens=drafts, **options).generate([PROMPT] * 3, asked)]
        for options in ({}, {"backend": "cpu", "overlap": overlap, "graph": graph})
    )
    assert of_cpu == of_reference


@needs_kernels
def test_by_default_the_cpu_backend_overlaps_and_captures_it() -> None:
    served = llm(backend="cpu", draft_tokens=3)
    assert served.engine.resolved.overlap == 1
    texts(served, temperature=1.0, extra={"logit_scale": 2.0})
    counters, graphs = served.engine.device.counters, served.engine.runner.graphs
    assert counters.graph_replays > 5
    assert graphs is not None
    assert graphs.whole
    assert graphs.counters.eager_steps == 1, "that of the prompt"
    served.close()


def test_a_package_without_a_kernel_for_this_backend_costs_only_those_who_want_it(tmp_path: Path) -> None:
    """Its table is empty there."""
    pack = tmp_path / "scale_elsewhere.py"
    source = Path(FILE).read_text(encoding="utf-8")
    bound = "providers={NAME: device.bind_kernel(plain(scale))}, versions={NAME: 1}"
    assert bound in source
    pack.write_text(source.replace(bound, "providers={}, versions={}"), encoding="utf-8")
    for named in ({}, {"kernels": ("scale_elsewhere",)}):
        served = llm(draft_tokens=2, plugins=(str(pack),), **named)
        assert texts(served, presence_penalty=0.5) == texts(llm(draft_tokens=2), presence_penalty=0.5)
        with pytest.raises(
            RequestError, match=r"^the request wants logit scale, but this backend has no scale_logits; leave it out"
        ):
            texts(served, extra={"logit_scale": 2.0})
        assert len(texts(served, extra={"logit_scale": 1.0})) == 16
        served.close()


def generated(*arguments: str) -> list[str]:
    """What `polydraft generate` is asked with the plugin."""
    ask = ["generate", "w3 w1 w4", "--model", str(tiny.checkpoint("narrow")), "--backend", "reference", "--plugin", FILE]
    return [*ask, "--max-new-tokens", "12", "--ignore-eos", "--draft-tokens", "2", "--invariant", "--json", *arguments]


def test_a_parameter_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def tokens(*arguments: str) -> list[int]:
        with pytest.raises(SystemExit) as exit_:
            main(generated("--seed", "7", *arguments))
        assert exit_.value.code in (None, 0)
        return list(json.loads(capsys.readouterr().out)["requests"][0]["token_ids"])

    halved = tokens("--temperature", "0.5")
    assert tokens("--temperature", "1", "--param", "logit_scale=2.0") == halved
    assert tokens("--temperature", "1", "--param", "logit_scale=1") == tokens("--temperature", "1") != halved


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("logit_scales=2",), "the request has the parameter 'logit_scales', which no stage knows; known: logit_scale"),
        (("logit_scale=big",), "logit_scale is 'big', wanted a number above 0; correct the request"),
        (("logit_scale=[2]",), "logit_scale is [2], wanted a number above 0; correct the request"),
        (("logit_scale",), "'logit_scale' is no NAME=VALUE, wanted the name of a parameter and its value"),
        (("logit_scale=2", "logit_scale=3"), "--param logit_scale was given twice, wanted one value; drop the other"),
    ],
)
def test_a_wrong_parameter_on_the_command_line(asked: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(generated(*(part for one in asked for part in ("--param", one))))
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("where", first(1, [["reference"], ["--matrix", "reference"]]), ids=" ".join)
def test_conform_knows_the_contract_of_a_plugin(where: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["conform", *where, "--plugin", FILE, "--contract", "scale_logits", "--case", "rows_of_several_slots", "--json"])
    said = capsys.readouterr()
    assert exit_.value.code == 0, said.err
    assert "scale_logits" in said.out


def test_conform_still_says_what_no_plugin_brings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["conform", "reference", "--plugin", FILE, "--contract", "scale_logit"])
    assert exit_.value.code == 2
    assert "no contract is called 'scale_logit'; did you mean 'scale_logits'?" in capsys.readouterr().err


def test_the_page_of_a_contract_of_a_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["contracts", "scale_logits", "--plugin", FILE])
    said = capsys.readouterr()
    assert (exit_.value.code, said.err) == (0, "")
    assert said.out == render(REGISTRY["scale_logits"])


def test_contracts_of_a_plugin_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["contracts", "--plugin", "nothing_of_this_name"])
    assert exit_.value.code == 1
    assert "--plugin nothing_of_this_name failed to import: ModuleNotFoundError" in capsys.readouterr().err


def test_neighbours_are_not_touched() -> None:
    served = llm(draft_tokens=2, invariant=True)
    alone = texts(served, temperature=1.0, seed=3)
    asked = [SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=1.0, seed=3, extra=extra) for extra in (
        {"logit_scale": 5.0}, {}, {"logit_scale": 0.2})]  # fmt: skip
    assert list(served.generate([PROMPT] * 3, asked)[1].token_ids) == alone


def test_what_no_stage_knows_or_accepts_is_refused() -> None:
    served = llm(draft_tokens=0)
    with pytest.raises(
        RequestError, match=r"^the request has the parameter 'logit_scales', which no stage knows; known: logit_scale"
    ):
        texts(served, extra={"logit_scales": 2.0})
    with pytest.raises(RequestError, match=r"^logit_scale is -1, wanted a number above 0; correct the request$"):
        texts(served, extra={"logit_scale": -1})
    assert len(texts(served)) == 16, "others are served"
    bare = LLM(model=str(tiny.checkpoint("narrow")), backend="reference", draft_tokens=0)
    with pytest.raises(RequestError, match="no plugin of this engine brings any"):
        texts(bare, extra={"logit_scale": 2.0})


TOLD = Parameter("told", 0, "Anything.", "anything", lambda value: True)


class Told(Stage):
    """A stage whose column holds what the request says, and which does nothing."""

    name = "told"
    parameters = (TOLD,)

    def __init__(self, *columns: Column, prepares: Any = None) -> None:
        self.columns, self._prepares = columns, prepares

    def wants(self, params: SamplingParams) -> bool:
        return "told" in params.extra

    def prepare(self, params: SamplingParams, encode: Any, vocab_size: int) -> Any:
        if self._prepares is not None:
            raise self._prepares


def with_stage(stage: LogitsStage) -> Engine:
    """An engine with the stage of a plugin."""
    plugin = backend(polydraft_parameters=lambda: [stage])
    return LLM(plugin=plugin, model=str(tiny.checkpoint("narrow")), max_num_seqs=3, draft_tokens=3, invariant=True).engine


def column(shape: str = "B", dtype: Any = "f32", *, resets: bool = True) -> Column:
    return Column("told", "What was told.", shape, dtype, value=lambda a: a.params.extra.get("told", 0), resets=resets)


FREE = SamplingParams(max_new_tokens=12, ignore_eos=True)
NUMBER, ROW = "wanted a number of", "wanted at most 3 numbers of"
WRONG: list[tuple[Column, Any, str]] = [
    (column(), 10**400, NUMBER), (column(), 1e300, NUMBER), (column(), "a", NUMBER), (column(), [1], NUMBER),
    (column(), [], NUMBER), (column(), None, NUMBER), (column(), {}, NUMBER), (column(dtype="i32"), 2**31, NUMBER),
    (column(dtype="i32"), 0.5, NUMBER),
    (column(dtype="i32"), math.nan, NUMBER), (column("B 3"), [1, 2, 3, 4], ROW), (column("B 3"), [[1], [2]], ROW),
    (column("B 3"), [1, "2"], ROW), (column("B 3", "i32"), [2**40], ROW), (column("B 3", "i32", resets=False), [1] * 4, ROW),
    (column("B 3", "i32", resets=False), [-(2**31) - 1], ROW),
]  # fmt: skip


@pytest.mark.parametrize(("declared", "value", "wanted"), WRONG, ids=range(len(WRONG)))
def test_what_a_column_cannot_hold_is_refused_when_it_arrives(declared: Column, value: Any, wanted: str) -> None:
    """Not when it is admitted, in one step with others."""
    served = with_stage(Told(declared))
    asks = [Ask((3, 1, 4), FREE), Ask((2, 7), FREE, arrival=2)]

    def also(_: Engine) -> None:
        with pytest.raises(RequestError, match=f"into the slot column 'told', {wanted}"):
            served.add([5, 6], SamplingParams(extra={"told": value}))

    for output in drive(served, asks, each_step=also):
        assert essence(output) == essence(solo("narrow", 3, output.prompt_ids, FREE))


@pytest.mark.parametrize(
    "value",
    [(column(), math.inf), (column(), np.float32(2)), (column("B 3"), 1), (column("B 3", "i32"), [1, 2, 3])],
    ids=["inf", "np.float32", "one of three", "a row of whole numbers"],
)
def test_what_a_column_can_hold_is_served(value: tuple[Column, Any]) -> None:
    declared, told = value
    ask = Ask((3, 1, 4), replace(FREE, extra={"told": told}))
    (output,) = drive(with_stage(Told(declared)), [ask])
    assert essence(output) == essence(solo("narrow", 3, output.prompt_ids, FREE))


@pytest.mark.parametrize("error", [ValueError("no"), ConfigError("no")])
def test_a_stage_that_raises_refuses_its_request_alone(error: Exception) -> None:
    fails = Column("told", "", value=lambda a: 1 // (a.params.extra.get("told", 1)))
    served = with_stage(Told(fails))
    with pytest.raises(RequestError, match=r"puts a value that it cannot hold \(ZeroDivisionError: .*\) into the slot column"):
        served.add([1], SamplingParams(extra={"told": 0}))
    served = with_stage(Told(column(), prepares=error))
    with pytest.raises(RequestError, match=rf"the stage 'told' cannot take the request \({type(error).__name__}: no\)"):
        served.add([1], SamplingParams(extra={"told": 1}))
    (output,) = drive(served, [Ask((3, 1, 4), FREE)])
    assert essence(output) == essence(solo("narrow", 3, output.prompt_ids, FREE))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (column(dtype="act"), "slot column 'told' has the shape 'B' and the dtype 'act', wanted 'B' or 'B WIDTH' and one of i32"),
        (column("3"), "slot column 'told' has the shape '3'"),
        (column("B W W"), "slot column 'told' has the shape 'B W W'"),
        (column(""), "slot column 'told' has the shape ''"),
        (column("B Q"), r"a module declares the shape 'B Q', wanted numbers and symbols \(B, .*\); correct 'Q'"),
    ],
)
def test_a_column_that_is_none_is_refused(wrong: Column, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_stage(Told(wrong))


NONE: Any = None
THREE: Any = 3
NO_STAGES: list[tuple[dict[str, Any], str]] = [
    ({"columns": ("told",)}, r"a stage with the columns \('told',\), wanted a tuple of Column; correct it"),
    ({"columns": None}, "a stage with the columns None, wanted a tuple of Column"),
    ({"parameters": ("told",)}, r"a stage with the parameters \('told',\), wanted a tuple of Parameter"),
    ({"contracts": "scale_logits"}, "a stage with the contracts 'scale_logits', wanted a tuple of str"),
    ({"wants": None}, r"a Told, wanted a LogitsStage: its wants does not take \(params\); add it"),
    ({"name": 3}, "a stage with the name 3, wanted a text; correct it"),
    ({"parameters": (replace(TOLD, name=THREE),)}, "a stage with a Parameter with the name 3, wanted a text; correct it"),
    ({"parameters": (replace(TOLD, doc=NONE),)}, "a stage with a Parameter with the doc None, wanted a text"),
    ({"parameters": (replace(TOLD, wanted=THREE),)}, "a stage with a Parameter with the wanted 3, wanted a text"),
    ({"parameters": (replace(TOLD, accepts=NONE),)}, "a stage with a Parameter with accepts None, wanted a function"),
    ({"columns": (Column(THREE, ""),)}, "a stage with a Column with the name 3, wanted a text"),
    ({"columns": (Column("told", "", THREE),)}, "a stage with a Column with the shape 3, wanted a text"),
    ({"columns": (Column("told", "", value=THREE),)}, "a stage with a Column with the value 3, wanted a function"),
]


@pytest.mark.parametrize(("change", "said"), NO_STAGES, ids=range(len(NO_STAGES)))
def test_what_is_no_stage_is_refused(change: dict[str, Any], said: str) -> None:
    stage = Told(column())
    for name, value in change.items():
        setattr(stage, name, value)
    with pytest.raises(PluginError, match=f"^plugin 'double': polydraft_parameters returned {said}"):
        with_stage(stage)
    with pytest.raises(PluginError, match=r"^plugin 'double': polydraft_parameters returned an int, wanted a LogitsStage"):
        with_stage(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("no")])
def test_a_stage_whose_emit_raises_is_named(error: Exception) -> None:
    class Silent(Told):
        def emit(self, rows: Any) -> None:
            raise error

    said = rf"^plugin 'double': emit of the stage 'told' raised {type(error).__name__}: '?no'?; repair the plugin"
    with pytest.raises(PluginError, match=said):
        with_stage(Silent(column()))
