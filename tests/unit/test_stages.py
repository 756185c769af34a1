"""Logits processing in stages: what a request wants is checked by the stage, and one of a plugin is no different."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft.contracts import REGISTRY
from polydraft.errors import RequestError
from polydraft.host.kv_blocks import NO_GRANT
from polydraft.host.request import Request
from polydraft.plugins.program_pass import Node
from polydraft.program.columns import ColumnWriter
from polydraft.program.declare import Admission, Column, LogitRows, LogitsStage, Parameter
from polydraft.program.program import Memory, ProgramBuilder, StepContext
from polydraft.reference.device import ReferenceDevice
from polydraft.sampling.processing import STAGES, Processing
from polydraft.sampling.verify import Rows
from polydraft.sampling_params import SamplingParams
from tests.support.host_loop import COLUMNS, limits
from tests.support.slot_columns import SlotColumns


class Floor:
    """Keeps logits of slots that ask for it from falling, with a parameter and a column of its own."""

    name = "logit_floor"
    parameters = (
        Parameter(
            "floor", 0.0, "Least logit.", "a number from -50 to 50", lambda value: isinstance(value, float) and abs(value) <= 50
        ),
        Parameter("words", "", "What it does not hold for.", "a text", lambda value: isinstance(value, str)),
    )
    columns = (
        Column("floor", "Least logit.", dtype="f32", empty=-1e30, value=lambda a: a.request.prepared.get("logit_floor", -1e30)),
    )
    contracts = ("bias_logits", "forbid_tokens")

    def wants(self, params: SamplingParams) -> bool:
        """Whether there is a floor."""
        return "floor" in params.extra

    def prepare(self, params: SamplingParams, encode: Callable[[str], list[int]], vocab_size: int) -> float:
        """The floor; refused where the words have tokens that the model does not."""
        if max(encode(params.extra.get("words", "")), default=0) >= vocab_size:
            raise RequestError("words are none of this model; correct the request")
        floor: float = params.extra["floor"]
        return floor

    def emit(self, rows: LogitRows) -> None:
        """Two launches, the second over a table of its own name."""
        rows.add("bias_logits")
        rows.add("forbid_tokens", bad_len="floor.len")


FLOOR: LogitsStage = Floor()


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def prepared(params: SamplingParams, *stages: LogitsStage, lacking: tuple[str, ...] = ()) -> dict[str, Any]:
    provided = [name for name in REGISTRY.names() if name not in lacking]
    return Processing(provided, [("double", stage) for stage in stages]).prepare(params, encode, 128)


# -- what a request wants ------------------------------------------------------------------------------------------------
def test_a_parameter_of_a_stage_is_prepared_by_it():
    assert prepared(SamplingParams(extra={"floor": 2.5, "words": "ab"}), FLOOR) == {"logit_floor": 2.5}
    assert prepared(SamplingParams(extra={"words": "ab"}), FLOOR) == {}, "known, yet nothing that the stage wants"
    assert prepared(SamplingParams(), FLOOR) == {}
    both = prepared(SamplingParams(extra={"floor": 0.0}, min_tokens=1, bad_words=("a",)), FLOOR)
    assert both == {"forbidden_tokens": (97, -1, 32, 97, -1), "logit_floor": 0.0}


@pytest.mark.parametrize(
    ("extra", "stages", "sentence"),
    [
        ({"roof": 1}, (FLOOR,), r"^the request has the parameter 'roof', which no stage knows; known: floor, words$"),
        (
            {"floor": 1.0},
            (),
            r"^the request has the parameter 'floor', which no stage knows; no plugin of this engine brings any$",
        ),
        ({"floor": 51.0}, (FLOOR,), r"^floor is 51\.0, wanted a number from -50 to 50; correct the request$"),
        ({"floor": "1"}, (FLOOR,), r"^floor is '1', wanted a number from -50 to 50; correct the request$"),
        ({"floor": 1.0, "words": 3}, (FLOOR,), r"^words is 3, wanted a text; correct the request$"),
        ({"words": 3}, (FLOOR,), r"^words is 3, wanted a text"),
        ({"floor": 1.0, "words": "\u0100"}, (FLOOR,), r"^words are none of this model; correct the request$"),
    ],
)
def test_wrong_parameters_of_stages_are_refused(extra: Any, stages: Any, sentence: str):
    with pytest.raises(RequestError, match=sentence):
        prepared(SamplingParams(extra=extra), *stages)


@pytest.mark.parametrize("extra", [3, [("floor", 1.0)], {3: 1.0}, {"": 1.0}], ids=str)
def test_extra_is_a_mapping_of_names(extra: Any):
    with pytest.raises(RequestError, match=r"^extra is .*, wanted a mapping of names to values; correct the request$"):
        SamplingParams(extra=extra)


@pytest.mark.parametrize(
    ("params", "lacking", "sentence"),
    [
        ({"presence_penalty": 1}, "penalise_logits", "the request wants penalties, but this backend has no penalise_logits"),
        ({"logit_bias": {1: 1}}, "bias_logits", "the request wants logit bias, but this backend has no bias_logits"),
        ({"min_tokens": 1}, "forbid_tokens", "the request wants forbidden tokens, but this backend has no forbid_tokens"),
        ({"extra": {"floor": 1.0}}, "forbid_tokens", "the request wants logit floor, but this backend has no forbid_tokens"),
    ],
)
def test_a_stage_that_the_backend_cannot_run_is_refused_to_those_who_want_it(params: Any, lacking: str, sentence: str):
    with pytest.raises(RequestError, match=rf"^{sentence}; leave it out, or use another backend$"):
        prepared(SamplingParams(**params), FLOOR, lacking=(lacking,))
    assert prepared(SamplingParams(), FLOOR, lacking=(lacking,)) == {}
    others: dict[str, dict[str, Any]] = {
        "penalise_logits": {"logit_bias": {1: 1}},
        "bias_logits": {"min_tokens": 1},
        "forbid_tokens": {"presence_penalty": 1},
    }
    assert prepared(SamplingParams(**others[lacking]), FLOOR, lacking=(lacking,))


def test_limits_of_what_a_slot_holds():
    for params, sentence in (
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, r"^logit_bias has 301 token ids, wanted at most 300; name fewer$"),
        ({"bad_words": [(1,) * 512]}, r"^bad_words take 513 places .*, wanted at most 512; name fewer$"),
        ({"logit_bias": {128: 1.0}}, r"^logit_bias names token id 128, wanted at most 127; use this model's tokenizer$"),
        ({"bad_words": [(128,)]}, r"^bad_words names token id 128, wanted at most 127; use this model's tokenizer$"),
    ):
        with pytest.raises(RequestError, match=sentence):
            prepared(SamplingParams(**params))  # type: ignore[arg-type]
    assert prepared(SamplingParams(logit_bias=dict.fromkeys(range(128), 1.0), bad_words=((1,) * 511,)))


# -- what a stage brings ---------------------------------------------------------------------------------------------------
def test_a_column_of_a_stage_goes_down_with_the_others():
    columns, capacities = (*COLUMNS, *FLOOR.columns), limits()
    wants = Request("1", (1,), SamplingParams(extra={"floor": 2.5}), 1, (1, 0), (), 5, prepared={"logit_floor": 2.5})
    other = Request("2", (1,), SamplingParams(), 2, (2, 0), (), 5)
    known = np.array([1], np.int32)
    admitted = [Admission(one, slot, 1, known, 1, 0, known) for slot, one in ((2, wants), (0, other))]
    held = SlotColumns(columns, capacities, old=7)
    held.write(ColumnWriter(columns, capacities).admissions(admitted, *NO_GRANT))
    assert held["floor"] == [np.float32(-1e30), 7.0, 2.5]
    assert Processing((), [("double", FLOOR)]).columns[-1] is FLOOR.columns[0]


@pytest.mark.parametrize("value", ["high", None, [1]], ids=str)
def test_a_value_that_a_check_cannot_look_at_is_refused(value: Any):
    """Whatever a request brings, the engine goes on."""
    stage: Any = SimpleNamespace(
        name="mine", columns=(), contracts=(), parameters=(Parameter("mine", 0, "", "a number", lambda value: value + 1 > 0),)
    )
    with pytest.raises(RequestError, match="wanted a number; correct the request"):
        Processing((), [("double", stage)]).prepare(SamplingParams(extra={"mine": value}), lambda text: [], 8)


@pytest.mark.parametrize("provided", [True, False])
def test_a_stage_launches_over_the_rows_of_whoever_chooses(provided: bool):
    """Behind those of core, over the rows' own logits and slots; not at all where the backend lacks one of its contracts."""
    names = [name for name in REGISTRY.names() if provided or name != "forbid_tokens"]
    fields = {name for stage in STAGES for contract in stage.contracts for name in REGISTRY[contract].args.specs()}
    memory = Memory(ReferenceDevice(), limits(), "f32")
    rows = {"draft.logits", "draft_slot", "draft_position", "floor.len"}
    memory.buffers = {name: ReferenceDevice().empty(name, (3,), "i32") for name in fields | rows}
    table: Any = None
    program = ProgramBuilder("step", table, memory, StepContext())
    Processing(names, [("double", FLOOR)]).emit(
        Rows(program, "draft.logits", "draft_slot", "draft_position", 2, "seqs", "draft 0")
    )
    nodes = [node for node in program.nodes if isinstance(node, Node)]
    core = [contract for stage in STAGES for contract in stage.contracts]
    wanted = [*core, "bias_logits", "forbid_tokens"] if provided else [name for name in core if name != "forbid_tokens"]
    assert [node.contract for node in nodes] == wanted
    for node in nodes:
        args: Any = node.args
        assert (args.logits.name, args.row_slot.name) == ("draft.logits", "draft_slot")
        assert (node.unit, node.stage) == ("seqs", "draft 0")
    if provided:
        last: Any = nodes[-1].args
        assert (last.bad_len.name, last.bad_words.name) == ("floor.len", "bad_words")
        assert (last.positions.name, last.ahead) == ("draft_position", 2)
