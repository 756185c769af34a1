"""Slot columns on their way down: what admissions and grants stage, applied by a naive loop, is exactly what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydraft import LLM
from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.scatter import Run
from polydraft.errors import ConfigError, ContractError
from polydraft.host.kv_blocks import NO_GRANT, Grant
from polydraft.host.request import Request
from polydraft.program.columns import (
    BLOCK_TABLE,
    HISTORY,
    NOTHING,
    ColumnWriter,
    Writes,
    max_payload,
    max_runs,
    max_staged_tokens,
)
from polydraft.program.declare import Admission, Column, StepBuffer
from polydraft.program.program import Memory
from polydraft.reference.device import ReferenceDevice
from polydraft.sampling.logprobs import Logprobs
from polydraft.sampling.processing import STAGES
from polydraft.sampling.verify import Verifier
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import Finish, Phase
from polydraft.step.batch import Batch
from tests.support import tiny
from tests.support.slot_columns import SlotColumns

LIMITS = Limits(
    max_seqs=4, num_drafts=2, max_rows=12, max_logit_rows=12, max_len=8, block_size=4, num_blocks=16, max_blocks=3,
    max_stop_tokens=2, vocab_size=50, max_logprobs=3,
)  # fmt: skip
OLD = 77


def extra(name: str) -> Any:
    """The value of a column: what the request's parameter of that name says."""
    return lambda a: a.params.extra[name]


COLUMNS = (
    Column(HISTORY, "Not reset, as long as the text.", "B L", empty=-1, value=lambda a: a.known, resets=False),
    Column("count", "A number.", empty=9, value=extra("count")),
    Column("share", "A float.", dtype="f32", empty=1, value=extra("share")),
    Column("flag", "Filled by the device.", empty=3),
    Column("gain", "A float filled by the device.", dtype="f32", empty=-0.5),
    Column("ids", "A row of numbers.", "B 3", empty=-2, value=extra("ids")),
    Column("scales", "A row of floats.", "B 4", "f32", empty=2.5, value=extra("scales")),
    Column("drafts", "A row that the device fills.", "B K", empty=-1),
    Column("loose", "Floats that are not reset.", "B 3", "f32", empty=4, value=extra("loose"), resets=False),
    Column("kept", "What no request fills and none resets.", "B 2", empty=5, resets=False),
    Column("level", "A number that is not reset, which makes no difference.", empty=6, value=extra("count"), resets=False),
    Column(BLOCK_TABLE, "Blocks.", "B MB", empty=-1, value=lambda a: a.blocks),
    Column("last", "Behind the block table.", "B 1", empty=8, value=extra("count")),
)


def request(number: int = 0, **params: Any) -> Request:
    """A request without a text of its own."""
    given: dict[str, Any] = {"prompt_ids": (1,), "number": number, "seed": (number, 0), "stop_token_ids": (), "max_total": 5}
    named = {name: params.pop(name) for name in list(params) if name in given or name == "prepared"}
    return Request(id=str(number), params=SamplingParams(**params), **{**given, **named})


def admission(
    slot: int, *, count: Any = 0, share: Any = 0.0, ids: Any = (), scales: Any = (), loose: Any = (), known: Sequence[int] = (1,),
    blocks: Sequence[int] = (),
) -> Admission:  # fmt: skip
    """A request that fills `COLUMNS`."""
    values = {"count": count, "share": share, "ids": ids, "scales": scales, "loose": loose}
    one = request(slot, extra=values)
    return Admission(one, slot, 1, np.array(known, np.int32), len(known), 0, np.array(blocks, np.int32))


def grant(*given: tuple[int, int, Sequence[int]]) -> Grant:
    """Slot, first entry of its table, blocks."""
    slots, starts, blocks = (list(part) for part in zip(*given, strict=True))
    flat = np.array([block for some in blocks for block in some], np.int32)
    return Grant(np.array(slots), np.array(starts), np.array([len(some) for some in blocks]), flat)


def written(writes: Writes, columns: Sequence[Column] = COLUMNS, limits: Limits = LIMITS) -> SlotColumns:
    """Columns that held `OLD` everywhere, behind a step's writes."""
    held = SlotColumns(columns, limits, OLD)
    held.write(writes)
    return held


# -- writes ------------------------------------------------------------------------------------------------------------
def test_two_admissions_and_two_grants_worked_out_by_hand() -> None:
    """Slots 2 and 0 are filled, in this order; slots 1 and 3 are granted blocks behind those that they have."""
    admitted = (
        admission(2, count=-5, share=0.25, ids=(7,), scales=(1.5, -0.0, 3), loose=(0.125, -8), known=(1, 2, 3), blocks=(4, 5)),
        admission(0, count=2**31 - 1, share=-3, ids=[1, 2, 3], scales=np.arange(4), known=(9,)),
    )
    granted = grant((1, 1, (6, 7)), (3, 0, (8,)))
    writes = ColumnWriter(COLUMNS, LIMITS).admissions(admitted, *granted)
    assert writes.admits
    held = written(writes)
    assert {name: held[name] for name in held.arrays} == {
        "tokens": [[9, *[OLD] * 7], [OLD] * 8, [1, 2, 3, *[OLD] * 5], [OLD] * 8],
        "count": [2**31 - 1, OLD, -5, OLD],
        "share": [-3.0, OLD, 0.25, OLD],
        "flag": [3, OLD, 3, OLD],
        "gain": [-0.5, OLD, -0.5, OLD],
        "ids": [[1, 2, 3], [OLD] * 3, [7, -2, -2], [OLD] * 3],
        "scales": [[0.0, 1.0, 2.0, 3.0], [OLD] * 4, [1.5, 0.0, 3.0, 2.5], [OLD] * 4],
        "drafts": [[-1, -1], [OLD] * 2, [-1, -1], [OLD] * 2],
        "loose": [[OLD] * 3, [OLD] * 3, [0.125, -8.0, OLD], [OLD] * 3],
        "kept": [[OLD] * 2] * 4,
        "level": [2**31 - 1, OLD, -5, OLD],
        "block_table": [[-1] * 3, [OLD, 6, 7], [4, 5, -1], [8, OLD, OLD]],
        "last": [[2**31 - 1], [OLD], [-5], [OLD]],
    }
    assert np.signbit(held.arrays["scales"][2, 1]), "a float is its bits"


def test_one_admission_says_nothing_of_the_next() -> None:
    """The row of words that admissions start from is not written over."""
    writer = ColumnWriter(COLUMNS, LIMITS)
    writer.admissions((admission(1, count=5, share=6, ids=(7, 7, 7), scales=(8, 8, 8, 8), blocks=(1, 2, 3)),), *NO_GRANT)
    held = written(writer.admissions((admission(1),), *NO_GRANT))
    assert (held["count"][1], held["share"][1], held["ids"][1], held["scales"][1]) == (0, 0.0, [-2] * 3, [2.5] * 4)
    assert held["block_table"][1] == [-1] * 3


def test_grants_alone_are_runs_of_the_block_table() -> None:
    granted = grant((3, 0, (5,)), (0, 2, ()), (1, 1, (9, 2)))
    writes = ColumnWriter.grants(*granted)
    assert not writes.admits
    assert writes
    assert writes.runs.tolist() == [[0, 3, 0, 1, 0], [0, 1, 1, 2, 1]], "a slot that is granted nothing has no run"
    assert written(writes)["block_table"] == [[OLD] * 3, [OLD, 9, 2], [OLD] * 3, [5, OLD, OLD]]


def test_nothing_granted_is_nothing_to_write() -> None:
    writes = ColumnWriter.grants(*NO_GRANT)
    assert writes is NOTHING
    assert not writes
    assert (writes.runs.shape, writes.payload.shape) == ((0, len(Run)), (0,))


values = st.integers(-(2**31), 2**31 - 1)
floats = st.floats(width=32, allow_nan=False)


@given(data=st.data())
def test_any_admissions_and_grants_write_exactly_what_was_asked_for(data: st.DataObject) -> None:
    """What an admission means, said column by column: `empty` and the values over it, or the values alone."""
    slots = data.draw(st.permutations(range(4)), "slots")
    num_admitted = data.draw(st.integers(1, 4), "admitted")
    wanted = SlotColumns(COLUMNS, LIMITS, OLD).arrays

    admitted = []
    for slot in slots[:num_admitted]:
        asked = {
            "count": data.draw(values), "share": data.draw(floats), "ids": data.draw(st.lists(values, max_size=3)),
            "scales": data.draw(st.lists(floats, max_size=4)), "loose": data.draw(st.lists(floats, max_size=3)),
        }  # fmt: skip
        known = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=8), "known")
        blocks = data.draw(st.lists(st.integers(0, 15), max_size=3), "blocks")
        admitted.append(admission(slot, known=known, blocks=blocks, **asked))
        filled = {**asked, "tokens": known, "block_table": blocks, "level": asked["count"], "last": asked["count"]}
        for column in COLUMNS:
            place = wanted[column.name][slot : slot + 1].reshape(-1)
            mine = np.atleast_1d(np.asarray(filled.get(column.name, ()), place.dtype))
            if column.resets:
                place[:] = column.empty
            place[: len(mine)] = mine
    given_to = []
    for slot in slots[num_admitted:]:
        start = data.draw(st.integers(0, 2), "start")
        blocks = data.draw(st.lists(st.integers(0, 15), max_size=3 - start), "granted")
        given_to.append((slot, start, blocks))
        wanted["block_table"][slot, start : start + len(blocks)] = blocks
    granted = grant(*given_to) if given_to else NO_GRANT
    held = written(ColumnWriter(COLUMNS, LIMITS).admissions(admitted, *granted))
    for name, array in wanted.items():
        assert held.arrays[name].tobytes() == array.tobytes(), name


def test_what_is_staged_at_most_fits() -> None:
    """All slots are admitted with every place full, or are granted whole tables."""
    writer = ColumnWriter(COLUMNS, LIMITS)
    full: Any = {"count": 1, "share": 1, "ids": (1, 2, 3), "scales": (1, 2, 3, 4), "loose": (1, 2, 3), "blocks": (1, 2, 3)}
    lengths = (8, 8, 3, 1)
    assert sum(lengths) == max_staged_tokens(LIMITS)
    most = writer.admissions([admission(i, known=[1] * n, **full) for i, n in enumerate(lengths)], *NO_GRANT)  # type: ignore[arg-type]
    beside = writer.admissions(
        [admission(0, known=[1] * 8, **full)],
        *grant(*((slot, 0, (1, 2, 3)) for slot in (1, 2, 3))),  # type: ignore[arg-type]
    )
    for writes in (most, beside, ColumnWriter.grants(*grant(*((slot, 0, (1, 2, 3)) for slot in range(4))))):
        assert len(writes.runs) <= max_runs(COLUMNS, LIMITS)
        assert len(writes.payload) <= max_payload(COLUMNS, LIMITS)
        written(writes)


@pytest.mark.parametrize(
    ("column", "spoiled"), [("ids", {"ids": (1, 2, 3, 4)}), ("scales", {"scales": [0.5] * 5}), ("loose", {"loose": [0.5] * 4})]
)
def test_more_values_than_a_column_is_wide_are_refused(column: str, spoiled: Any) -> None:
    """They would lie in the next column's words, or in the next slot."""
    width = {"ids": 3, "scales": 4, "loose": 3}[column]
    sentence = rf"^slot column '{column}' got {width + 1} values for slot 2, wanted at most {width}; correct its `value`$"
    with pytest.raises(ContractError, match=sentence):
        ColumnWriter(COLUMNS, LIMITS).admissions((admission(2, **spoiled),), *NO_GRANT)


# -- columns of core -----------------------------------------------------------------------------------------------------
LOGPROBS = Logprobs(LIMITS, raw=True, verify="rejection", draws=True, drafts=True)
CORE = (*Batch.columns, *Verifier.columns, *(c for stage in STAGES for c in stage.columns), *LOGPROBS.columns)


def test_every_column_of_core_carries_what_was_asked_for() -> None:
    """A request that was preempted behind two tokens, with one shared block, and wishes for everything."""
    asked = request(
        6, prompt_ids=(3, 4, 5), seed=(2**32 - 1, 5), stop_token_ids=(9,), max_total=8, prepared={"forbidden_tokens": (8, -1)},
        temperature=0.5, top_p=0.25, min_p=0.125, top_k=7, repetition_penalty=1.5, presence_penalty=-2, frequency_penalty=0.25,
        logit_bias={4: 2.5, 2: -1}, min_tokens=6, logprobs=2, prompt_logprobs=0,
    )  # fmt: skip
    one = Admission(asked, 1, 4, np.array([3, 4, 5, 6, 7], np.int32), 4, 4, np.array([11, 12], np.int32))
    held = written(ColumnWriter(CORE, LIMITS).admissions((one,), *NO_GRANT), CORE)
    mine = {name: held[name][1] for name in held.arrays}
    tables = {name: mine.pop(name) for name in ("bias_ids", "biases", "bad_words")}
    assert mine == {
        "tokens": [3, 4, 5, 6, 7, OLD, OLD, OLD], "prompt_len": 3, "num_generated": 2, "kv_len": 4, "prefill_len": 4,
        "max_total": 8, "phase": Phase.PREFILL, "finish": Finish.NONE, "epoch": 4, "stop_tokens": [9, -1], "seed": [-1, 5],
        "block_table": [11, 12, -1], "drafts": [-1, -1], "draft_len": 0,
        "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125,
        "repetition_penalty": 1.5, "presence_penalty": -2.0, "frequency_penalty": 0.25,
        "num_biases": 2, "min_tokens": 6, "bad_len": 2, "num_top": 2, "prompt_top": 0, "drawn_top": 2,
    }  # fmt: skip
    assert tables["bias_ids"] == [2, 4, *[OLD] * 298]
    assert tables["biases"] == [-1.0, 2.5, *[OLD] * 298]
    assert tables["bad_words"] == [8, -1, *[OLD] * 510]
    others = [array[slot] for array in held.arrays.values() for slot in (0, 2, 3)]
    assert all((array == OLD).all() for array in others), "another slot was written"


def test_a_request_that_asks_for_nothing_leaves_logits_as_they_are() -> None:
    one = Admission(request(), 0, 1, np.array([1], np.int32), 1, 0, np.array([3], np.int32))
    held = written(ColumnWriter(CORE, LIMITS).admissions((one,), *NO_GRANT), CORE)
    mine = {name: held[name][0] for name in held.arrays}
    neutral = {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "num_biases": 0, "min_tokens": 0, "bad_len": 0, "num_top": -1, "prompt_top": -1,
        "drawn_top": -1,
    }  # fmt: skip
    assert {name: mine[name] for name in neutral} == neutral


# -- one name ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("second", [StepBuffer("tokens", "R"), Column("tokens", "Another.")], ids=["buffer", "column"])
def test_two_buffers_of_one_name_are_refused(second: Any) -> None:
    memory = Memory(ReferenceDevice(), LIMITS, "f32")
    with pytest.raises(ConfigError, match=r"^two modules declare a buffer 'tokens', wanted one; rename it in one of them$"):
        memory.allocate((*Batch.columns, Column("mine", "Mine."), second))


@pytest.mark.parametrize("dtype", ["f64", "", None])
def test_a_buffer_of_an_unknown_dtype_is_refused(dtype: Any) -> None:
    memory = Memory(ReferenceDevice(), LIMITS, "f32")
    said = rf"^a module declares the buffer 'mine' with the dtype {dtype!r}, wanted one of i32, .*, act; correct its declaration$"
    with pytest.raises(ConfigError, match=said):
        memory.allocate((StepBuffer("mine", "R", dtype),))


def test_columns_are_allocated_empty_and_step_buffers_as_declared() -> None:
    device = ReferenceDevice()
    memory = Memory(device, LIMITS, "bf16")
    ramp = np.arange(4)
    memory.allocate((*COLUMNS, StepBuffer("act", "R 5", "act"), StepBuffer("ramp", "B", initial=ramp), StepBuffer("one", "1")))
    arrays: dict[str, Any] = {name: buffer.host_array for name, buffer in memory.buffers.items()}  # type: ignore[attr-defined]
    for column in COLUMNS:
        assert (arrays[column.name] == np.float32(column.empty)).all(), column.name
        assert memory.buffers[column.name].dtype == column.dtype
    assert (arrays["tokens"].shape, arrays["drafts"].shape, arrays["count"].shape) == ((4, 8), (4, 2), (4,))
    assert (memory.buffers["act"].dtype, memory.buffers["act"].shape) == ("bf16", (12, 5))
    assert arrays["ramp"].tolist() == [0, 1, 2, 3]


def test_an_engine_has_a_buffer_for_each_column_and_launches_scatter_over_them() -> None:
    runner = LLM(model=str(tiny.checkpoint("narrow")), backend="reference", max_num_seqs=3).engine.runner
    buffers = runner.memory.buffers
    for name, columns in {"admit": runner.columns, "grant": [c for c in runner.columns if c.name == BLOCK_TABLE]}.items():
        (entry,) = runner.writes[name].entries
        args: Any = entry.args
        assert entry.contract == "scatter"
        assert [id(column) for column in args.columns] == [id(buffers[column.name]) for column in columns]
        assert (args.runs, args.payload) == (buffers["runs"], buffers["payload"])
    launched = {contract for kind in runner.programs.values() for part in kind.values() for contract in part.describe()}
    assert "scatter" not in launched, "programs of a kind of step are captured, staged writes never"
    for column in runner.columns:
        assert buffers[column.name].shape[0] == 3
        assert int(np.prod(buffers[column.name].shape)) == 3 * column.width(runner.limits)
