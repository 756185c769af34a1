"""Tables worked out by hand for the state contracts: golden and reference kernel must both give exactly these numbers.

Nothing expected here was computed by the code under test. The tables complement the generated cases: a table shows what is meant,
the cases show that it holds elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.scatter import CONTRACT as SCATTER
from polydraft.contracts.kernels.scatter import Run
from polydraft.contracts.layout import SNAPSHOT_COLUMNS
from polydraft.reference.state_kernels import KERNELS
from polydraft.sentinels import Finish, Phase

IDLE, PREFILL, DECODE, PAUSED, FINISHED = (int(phase) for phase in Phase)
NONE, STOP, LENGTH, _, ERROR, _ = (int(finish) for finish in Finish)
POISON = 77
LIMITS = Limits(2, 2, 8, 4, 12, 4, 8, 3, 1, 100)
"""No state kernel needs them; what is read comes from the arrays."""

Launch = Callable[[str, Any, int], None]


def by_golden(name: str, a: Any, n: int) -> None:
    REGISTRY[name].golden(a, n)


def by_reference(name: str, a: Any, n: int) -> None:
    KERNELS[name](a, LIMITS)(n)


@pytest.fixture(params=[by_golden, by_reference], ids=["golden", "reference"])
def launch(request: pytest.FixtureRequest) -> Launch:
    function: Launch = request.param
    return function


def ints(*values: Any) -> Any:
    """A single row of numbers or several rows."""
    return np.array(values, np.int32)


def outputs(**shapes: Any) -> dict[str, Any]:
    return {name: np.full(shape, POISON, np.int32) for name, shape in shapes.items()}


def same(a: Any, **wanted: Any) -> None:
    for name, value in wanted.items():
        assert getattr(a, name).tolist() == value, name


def test_layout_is_what_the_host_writes_and_reads() -> None:
    assert [run.name for run in Run] == ["COLUMN", "SLOT", "START", "COUNT", "OFFSET"]
    assert list(Run) == [0, 1, 2, 3, 4]
    assert SNAPSHOT_COLUMNS == ("slot", "epoch", "num_tokens", "accepted", "drafted", "finish", "phase", "kv_len")


def test_two_drafts_a_round_from_prompt_to_first_verified_window(launch: Launch) -> None:
    """K = 2, prompt t0..t4 = 10..14 in slot 1. The target says t5 = 15, the draft 16 and 17; the target agrees with 16 and
    says 27 instead of 17. Committed rows and rows of the draft grow together: 5 after the prompt, 7 after the round."""
    a = SimpleNamespace(
        slot_order=ints(1, -1),
        seq_rows=ints(5, 0),
        phase=ints(IDLE, PREFILL),
        kv_len=ints(0, 0),
        prefill_len=ints(0, 5),
        prompt_len=ints(0, 5),
        num_generated=ints(0, 0),
        max_total=ints(0, 11),
        epoch=ints(8, 3),
        finish=ints(NONE, NONE),
        stop_tokens=ints([-1], [99]),
        tokens=ints([0] * 12, [10, 11, 12, 13, 14, 0, 0, 0, 0, 0, 0, 0]),
        drafts=ints([-1, -1], [-1, -1]),
        draft_len=ints(0, 0),
        block_table=ints([-1, -1, -1], [4, 2, 7]),
        choices=ints(15, 0, 0, 0),
        chosen=ints(16, 0),
        block_size=4,
        lookahead=2,
        num_drafts=2,
        **outputs(ids=8, row_slot=8, positions=8, draft_ids=8, draft_row_slot=8),
        **outputs(logit_row=4, logit_slot=4, logit_position=4),
        **outputs(seq_start=2, seq_len=2, logit_start=2, logit_len=2, window_len=2, accepted=2, drafted=2, out_len=2),
        **outputs(out_accepted=2, draft_slot=2, draft_position=2, draft_budget=2, next_ids=2),
        **outputs(window=(2, 3), out_tokens=(2, 3), record=(2, 11)),
    )

    # The prompt.
    launch("reserve_blocks", a, 1)
    same(a, phase=[IDLE, PREFILL])
    launch("pack_rows", a, 6)
    same(a, ids=[10, 11, 12, 13, 14, -1, 77, 77], row_slot=[1, 1, 1, 1, 1, -1, 77, 77])
    same(a, positions=[0, 1, 2, 3, 4, 0, 77, 77], seq_start=[0, 5], seq_len=[5, 0])
    launch("pack_logit_rows", a, 2)
    same(a, logit_row=[4, -1, 77, 77], logit_slot=[1, -1, 77, 77], logit_position=[5, 0, 77, 77])
    same(a, logit_start=[0, 1], logit_len=[1, 0])
    launch("verify_match", a, 1)
    same(a, window=[[15, -1, -1], [77, 77, 77]], window_len=[1, 77], accepted=[0, 77], drafted=[-1, 77])
    launch("commit_window", a, 1)
    same(a, tokens=[[0] * 12, [10, 11, 12, 13, 14, 15, 0, 0, 0, 0, 0, 0]], num_generated=[0, 1], kv_len=[0, 5])
    same(a, phase=[IDLE, DECODE], finish=[NONE, NONE], out_tokens=[[15, -1, -1], [77, 77, 77]])
    same(a, out_len=[1, 77], out_accepted=[0, 77])
    launch("snapshot_output", a, 2)
    same(a, record=[[1, 3, 1, 0, -1, NONE, DECODE, 5, 15, -1, -1], [-1, 0, 0, 0, -1, 0, 0, 0, -1, -1, -1]])

    # Draft rows 0..4 embed t1..t5; two drafts fit, since 6 tokens are known and 11 allowed.
    launch("pack_draft_rows", a, 6)
    same(a, draft_ids=[11, 12, 13, 14, 15, -1, 77, 77], draft_row_slot=[1, 1, 1, 1, 1, -1, 77, 77])
    launch("begin_draft", a, 1)
    same(a, draft_slot=[1, 77], draft_position=[4, 77], draft_budget=[2, 77])
    a.pass_index = 0
    launch("advance_draft", a, 1)
    same(a, drafts=[[-1, -1], [16, -1]], draft_len=[0, 1], draft_slot=[1, 77], draft_position=[5, 77], next_ids=[16, 77])
    a.chosen[0], a.pass_index = 17, 1
    launch("advance_draft", a, 1)
    same(a, drafts=[[-1, -1], [16, 17]], draft_len=[0, 2], draft_slot=[-1, 77], draft_position=[5, 77], next_ids=[-1, 77])

    # The round: it wants 5 + 1 + 2 + 2 = 10 tokens, that is all three blocks.
    a.block_table[1, 2] = -1
    launch("reserve_blocks", a, 1)
    same(a, phase=[IDLE, PAUSED])
    a.block_table[1, 2] = 7
    launch("reserve_blocks", a, 1)
    same(a, phase=[IDLE, DECODE])
    a.seq_rows[0] = 3
    launch("pack_rows", a, 4)
    same(a, ids=[15, 16, 17, -1, 14, -1, 77, 77], positions=[5, 6, 7, 0, 4, 0, 77, 77], seq_len=[3, 0])
    launch("pack_logit_rows", a, 3)
    same(a, logit_row=[0, 1, 2, 77], logit_position=[6, 7, 8, 77], logit_len=[3, 0], logit_start=[0, 3])
    a.choices[:] = 16, 27, 88, 0
    launch("verify_match", a, 1)
    same(a, window=[[16, 27, -1], [77, 77, 77]], window_len=[2, 77], accepted=[1, 77], drafted=[2, 77])
    launch("commit_window", a, 1)
    same(a, tokens=[[0] * 12, [10, 11, 12, 13, 14, 15, 16, 27, 0, 0, 0, 0]], num_generated=[0, 3], kv_len=[0, 7])
    launch("snapshot_output", a, 1)
    same(a, record=[[1, 3, 2, 1, 2, NONE, DECODE, 7, 16, 27, -1], [-1, 0, 0, 0, -1, 0, 0, 0, -1, -1, -1]])
    launch("pack_draft_rows", a, 4)
    same(a, draft_ids=[16, 27, -1, -1, 15, -1, 77, 77], draft_row_slot=[1, 1, -1, -1, 1, -1, 77, 77])
    launch("begin_draft", a, 1)
    same(a, draft_slot=[1, 77], draft_position=[6, 77], draft_budget=[2, 77], drafts=[[-1, -1], [-1, -1]], draft_len=[0, 0])


def slot_columns() -> tuple[Any, ...]:
    """Two slots: a number, a float, a row of three numbers and a row of four floats, all of them old."""
    return tuple(np.full(shape, POISON, dtype) for shape, dtype in (
        (2, np.int32), (2, np.float32), ((2, 3), np.int32), ((2, 4), np.float32)
    ))  # fmt: skip


def test_scatter_writes_a_slot_whole_and_floats_and_seeds_as_bits(launch: Launch) -> None:
    """Slot 1 is filled from payload words 2 to 11; what is behind them, and a run of no slot, goes nowhere. 1056964608 is 0.5,
    0x3FC00000 is 1.5, -(2**30) is -2 and -(2**31) is -0 as the bits of a float32; -1 stays -1 in a column of numbers."""
    a = SimpleNamespace(
        runs=ints([0, 1, 0, 1, 2], [1, 1, 0, 1, 3], [2, 1, 0, 3, 4], [3, 1, 0, 4, 7], [2, -1, 0, 3, 11], [0, 0, 0, 1, 11]),
        payload=np.array([8, 8, -(2**30), 1056964608, -1, 2**31 - 1, 9, 0x3FC00000, -(2**30), 0, -(2**31), 5, 5, 5], np.int32),
        columns=slot_columns(),
    )
    launch("scatter", a, 5)
    numbers, floats, rows, wide = a.columns
    assert numbers.tolist() == [77, -(2**30)]
    assert floats.tolist() == [77.0, 0.5]
    assert rows.tolist() == [[77] * 3, [-1, 2**31 - 1, 9]]
    assert wide.view(np.int32).tolist() == [[0x429A0000] * 4, [0x3FC00000, -(2**30), 0, -(2**31)]], "bit for bit"
    assert wide[1].tolist() == [1.5, -2.0, 0.0, 0.0]


def test_scatter_writes_single_places_and_leaves_those_beside_them(launch: Launch) -> None:
    """A token behind the others of a history, the last entry of a table, one bias; a run of no words; two runs of one text lie
    in any order in the payload."""
    a = SimpleNamespace(
        runs=ints([2, 1, 2, 1, 3], [2, 0, 0, 1, 0], [3, 1, 1, 2, 1], [2, -1, 0, 3, 0], [3, 0, 2, 0, 1], [0, 1, 0, 1, 3]),
        payload=np.array([-1, -(2**30), 0x3FC00000, 5], np.int32),
        columns=slot_columns(),
    )
    launch("scatter", a, 6)
    numbers, floats, rows, wide = a.columns
    assert (numbers.tolist(), floats.tolist()) == ([77, 5], [77.0, 77.0])
    assert rows.tolist() == [[-1, 77, 77], [77, 77, 5]]
    assert wide.tolist() == [[77.0] * 4, [77.0, -2.0, 1.5, 77.0]]


def scattered(runs: Any, payload: Any, columns: tuple[Any, ...]) -> tuple[Any, ...]:
    """A second opinion: every column as a list of bytes of words, written one word after the other."""
    flat = [bytearray(column.tobytes()) for column in columns]
    words = payload.tobytes()
    for column, slot, start, count, offset in runs.tolist():
        width = columns[column].size // len(columns[column])
        for i in range(count):
            if slot >= 0:
                place = 4 * (slot * width + start + i)
                flat[column][place : place + 4] = words[4 * (offset + i) : 4 * (offset + i) + 4]
    return tuple(np.frombuffer(bytes(one), column.dtype).reshape(column.shape) for one, column in zip(flat, columns, strict=True))


def test_scatter_is_what_a_naive_loop_makes_of_it(launch: Launch) -> None:
    cases = [*SCATTER.cases(), *(SCATTER.generate(np.random.default_rng(seed)) for seed in range(200))]
    assert any(case.n < len(case.arrays["runs"]) for case in cases)
    for case in cases:
        arrays = case.arrays
        wanted = scattered(arrays["runs"][: case.n], arrays["payload"], arrays["columns"])
        a = SimpleNamespace(runs=arrays["runs"], payload=arrays["payload"], columns=tuple(c.copy() for c in arrays["columns"]))
        launch("scatter", a, case.n)
        for mine, its in zip(a.columns, wanted, strict=True):
            assert mine.tobytes() == its.tobytes(), case.name


@pytest.mark.parametrize(
    ("kv_len", "draft_len", "max_total", "granted", "phase", "wanted"),
    [
        (3, 1, 20, 2, DECODE, DECODE),  # 3 + 1 + 1 + 2 = 7 tokens: two blocks
        (4, 1, 20, 2, DECODE, DECODE),  # 8 tokens: still two
        (5, 1, 20, 2, DECODE, PAUSED),  # 9 tokens: three
        (5, 1, 8, 2, DECODE, DECODE),  # the request ends after 8
        (5, 0, 20, 2, PAUSED, DECODE),  # 8 tokens: it goes on
        (5, 1, 20, 2, PAUSED, PAUSED),
        (0, 0, 20, 0, PREFILL, PREFILL),
        (5, 1, 20, 0, FINISHED, FINISHED),
        (5, 1, 20, 5, IDLE, IDLE),
    ],
)
def test_reserve_blocks(
    launch: Launch, kv_len: int, draft_len: int, max_total: int, granted: int, phase: int, wanted: int
) -> None:
    a = SimpleNamespace(slot_order=ints(0), phase=ints(phase), kv_len=ints(kv_len), draft_len=ints(draft_len))
    a.max_total, a.block_size, a.lookahead = ints(max_total), 4, 2
    a.block_table = ints([9, 8, 7, 6, 5][:granted] + [-1] * (5 - granted))
    launch("reserve_blocks", a, 1)
    same(a, phase=[wanted])


def test_packing_a_mixed_batch(launch: Launch) -> None:
    """Slot 2 decodes with one draft, slot 0 prefills two of the four tokens left, slot 3 is finished, slot 1 is a resumed
    request (5 tokens known) whose last two rows complete it."""
    a = SimpleNamespace(
        slot_order=ints(2, 0, 3, 1),
        seq_rows=ints(3, 2, 3, 4),
        phase=ints(PREFILL, PREFILL, DECODE, FINISHED),
        kv_len=ints(1, 2, 3, 5),
        prefill_len=ints(5, 4, 2, 2),
        prompt_len=ints(5, 3, 2, 2),
        num_generated=ints(0, 2, 2, 3),
        tokens=ints([10, 11, 12, 13, 14], [20, 21, 22, 23, 24], [30, 31, 32, 33, 0], [40, 41, 42, 43, 44]),
        drafts=ints([-1, -1], [-1, -1], [35, -1], [45, -1]),
        draft_len=ints(0, 0, 1, 1),
        **outputs(ids=8, row_slot=8, positions=8, seq_start=4, seq_len=4),
        **outputs(logit_row=5, logit_slot=5, logit_position=5, logit_start=4, logit_len=4),
    )
    launch("pack_rows", a, 7)
    same(a, ids=[33, 35, 11, 12, 22, 23, -1, 77], row_slot=[2, 2, 0, 0, 1, 1, -1, 77], positions=[3, 4, 1, 2, 2, 3, 0, 77])
    same(a, seq_start=[0, 2, 4, 4], seq_len=[2, 2, 0, 2])
    launch("pack_logit_rows", a, 3)
    same(a, logit_row=[0, 1, -1, 77, 77], logit_slot=[2, 2, -1, 77, 77], logit_position=[4, 5, 0, 77, 77])
    same(a, logit_start=[0, 2, 2, 2], logit_len=[2, 0, 0, 0])


def commit(launch: Launch, window: list[int], window_len: int, **fields: Any) -> Any:
    """Slot 0 with history 10, 11, 12 (two of it prompt) and one row a window token; `fields` override."""
    a = SimpleNamespace(
        slot_order=ints(0), seq_len=ints(window_len), window=ints(window), window_len=ints(window_len),
        accepted=ints(max(window_len - 1, 0)), prompt_len=ints(2), prefill_len=ints(2), max_total=ints(8),
        stop_tokens=ints([7, -1]), tokens=ints([10, 11, 12, 0, 0, 0, 0, 0]), num_generated=ints(1), kv_len=ints(2),
        phase=ints(DECODE), finish=ints(NONE), **outputs(out_tokens=(1, 3), out_len=1, out_accepted=1),
    )  # fmt: skip
    vars(a).update(fields)
    launch("commit_window", a, 1)
    return a


@pytest.mark.parametrize(
    ("window", "window_len", "max_total", "tokens", "finish", "accepted"),
    [
        ([1, 2, 3], 3, 8, [1, 2, 3], NONE, 2),
        ([1, 2, 3], 3, 6, [1, 2, 3], LENGTH, 2),
        ([1, 2, 3], 3, 5, [1, 2], LENGTH, 2),
        ([1, 2, 3], 3, 4, [1], LENGTH, 1),
        ([7, 2, 3], 3, 8, [7], STOP, 1),
        ([1, 7, 3], 3, 8, [1, 7], STOP, 2),
        ([1, 2, 7], 3, 8, [1, 2, 7], STOP, 2),
        ([1, 7, 3], 3, 5, [1, 7], STOP, 2),  # a stop token where the request is full as well
        ([1, 2, 7], 3, 5, [1, 2], LENGTH, 2),
        ([7, -1, -1], 1, 8, [7], STOP, 0),
        ([-1, 2, 3], 3, 8, [], ERROR, 0),
        ([1, -1, 3], 3, 8, [1], ERROR, 1),
        ([7, -1, 3], 3, 8, [7], STOP, 1),
        ([1, -1, -1], 2, 4, [1], LENGTH, 1),
    ],
)
def test_commit_of_a_decode_window(
    launch: Launch, window: list[int], window_len: int, max_total: int, tokens: list[int], finish: int, accepted: int
) -> None:
    a = commit(launch, window, window_len, max_total=ints(max_total))
    count = len(tokens)
    same(a, tokens=[[10, 11, 12, *tokens, *[0] * (5 - count)]], num_generated=[1 + count], kv_len=[2 + count], finish=[finish])
    same(a, phase=[DECODE if finish == NONE else FINISHED], out_len=[count], out_accepted=[accepted])
    same(a, out_tokens=[[*tokens, *[-1] * (3 - count)]])


@pytest.mark.parametrize(
    ("seq_len", "kv_len", "prefill_len", "num_generated", "window", "wanted"),
    [
        # What is wanted: phase, rows committed, tokens generated, reason to finish, tokens emitted.
        (1, 0, 3, 0, [], (PREFILL, 1, 0, NONE, 0)),  # more of the prompt to come
        (2, 1, 3, 0, [5], (DECODE, 3, 1, NONE, 1)),  # complete: its first token
        (2, 1, 3, 0, [7], (FINISHED, 3, 1, STOP, 1)),
        (2, 1, 3, 0, [-1], (FINISHED, 3, 0, ERROR, 0)),
        (2, 2, 4, 2, [], (DECODE, 4, 2, NONE, 0)),  # resumed: its last token is known, nothing is emitted
        (1, 2, 4, 2, [], (PREFILL, 3, 2, NONE, 0)),
        (0, 2, 4, 2, [], (PREFILL, 2, 2, NONE, 0)),  # no rows: nothing happens
    ],
)
def test_commit_of_a_prefill(
    launch: Launch,
    seq_len: int,
    kv_len: int,
    prefill_len: int,
    num_generated: int,
    window: list[int],
    wanted: tuple[int, ...],
) -> None:
    padded = [*window, *[-1] * (3 - len(window))]
    a = commit(
        launch, padded, len(window), seq_len=ints(seq_len), kv_len=ints(kv_len), phase=ints(PREFILL),
        prefill_len=ints(prefill_len), prompt_len=ints(3), num_generated=ints(num_generated), accepted=ints(2),
    )  # fmt: skip
    assert (a.phase[0], a.kv_len[0], a.num_generated[0], a.finish[0], a.out_len[0]) == wanted
    same(a, out_accepted=[0])


@pytest.mark.parametrize(
    ("choices", "drafts", "logit_len", "phase", "window", "accepted", "drafted"),
    [
        ([1, 2, 3], [1, 2], 3, DECODE, [1, 2, 3], 2, 2),
        ([1, 9, 3], [1, 2], 3, DECODE, [1, 9, -1], 1, 2),
        ([9, 2, 3], [1, 2], 3, DECODE, [9, -1, -1], 0, 2),
        ([1, 2, 3], [1, 2], 2, DECODE, [1, 2, -1], 1, 1),  # the plan had no row for the second draft
        ([1, 2, 3], [1, 2], 1, DECODE, [1, -1, -1], 0, 0),
        ([-1, 2, 3], [1, 2], 3, DECODE, [-1, -1, -1], 0, 2),  # a NaN row: the error reaches the commit
        ([1, 2, 3], [1, 2], 1, PREFILL, [1, -1, -1], 0, -1),
        ([1, 2, 3], [1, 2], 0, PREFILL, [-1, -1, -1], 0, -1),
        ([1, 2, 3], [1, 2], 0, PAUSED, [-1, -1, -1], 0, -1),
    ],
)
def test_verify_match(
    launch: Launch,
    choices: list[int],
    drafts: list[int],
    logit_len: int,
    phase: int,
    window: list[int],
    accepted: int,
    drafted: int,
) -> None:
    a = SimpleNamespace(choices=ints(4, *choices), slot_order=ints(1, -1), phase=ints(0, phase), logit_start=ints(1, 4))
    a.logit_len, a.drafts = ints(logit_len, 0), ints([0, 0], drafts)
    vars(a).update(outputs(window=(2, 3), window_len=2, accepted=2, drafted=2))
    launch("verify_match", a, 2)
    same(a, window=[window, [-1, -1, -1]], window_len=[accepted + 1 if logit_len else 0, 0])
    same(a, accepted=[accepted, 0], drafted=[drafted, -1])


@pytest.mark.parametrize(
    ("known", "max_total", "phase", "num_drafts", "slot", "position", "budget"),
    [
        (6, 20, DECODE, 2, 1, 4, 2),
        (6, 20, DECODE, 1, 1, 4, 1),  # the step makes one
        (6, 20, DECODE, 0, -1, 0, 0),  # none, but what was drafted before is used up
        (6, 8, DECODE, 2, 1, 4, 1),  # two tokens left: a draft and the target's
        (6, 7, DECODE, 2, -1, 0, 0),
        (6, 20, FINISHED, 2, -1, 0, 0),
        (6, 20, PREFILL, 2, -1, 0, 0),
    ],
)
def test_begin_draft(
    launch: Launch, known: int, max_total: int, phase: int, num_drafts: int, slot: int, position: int, budget: int
) -> None:
    a = SimpleNamespace(slot_order=ints(1, 0), seq_len=ints(1, 0), phase=ints(DECODE, phase), kv_len=ints(3, known - 1))
    a.num_drafts = num_drafts
    a.prompt_len, a.num_generated, a.max_total = ints(2, 4), ints(2, known - 4), ints(20, max_total)
    a.drafts, a.draft_len = ints([8, 9], [5, 6]), ints(2, 2)
    vars(a).update(outputs(draft_slot=2, draft_position=2, draft_budget=2))
    launch("begin_draft", a, 2)
    same(a, draft_slot=[slot, -1], draft_position=[position, 0], draft_budget=[budget, 0])
    same(a, drafts=[[8, 9], [-1, -1]], draft_len=[2, 0])  # slot 0 had no rows: its drafts are still waiting


def test_advance_draft_keeps_what_is_drafted_when_nothing_can_be_chosen(launch: Launch) -> None:
    a = SimpleNamespace(
        chosen=ints(-1, 31, 32, 0), draft_budget=ints(3, 3, 2, 3), draft_slot=ints(2, 0, 1, -1), draft_position=ints(4, 5, 6, 0),
        drafts=ints([10, -1, -1], [11, -1, -1], [12, -1, -1]), draft_len=ints(1, 1, 1), pass_index=1, **outputs(next_ids=4),
    )  # fmt: skip
    launch("advance_draft", a, 4)
    same(a, drafts=[[10, 31, -1], [11, 32, -1], [12, -1, -1]], draft_len=[2, 2, 1], draft_slot=[-1, 0, -1, -1])
    same(a, draft_position=[4, 6, 6, 0], next_ids=[-1, 31, -1, -1])


def test_draft_rows_follow_the_committed_tokens_only(launch: Launch) -> None:
    """Slot 0 keeps two of three rows, slot 1 is finished, slot 2 is in the middle of its prompt."""
    a = SimpleNamespace(
        row_slot=ints(2, 2, 0, 0, 0, 1, -1, 0), positions=ints(0, 1, 2, 3, 4, 1, 0, 0), phase=ints(DECODE, FINISHED, PREFILL),
        prompt_len=ints(3, 2, 4), num_generated=ints(2, 2, 0),
        tokens=ints([10, 11, 12, 13, 14], [20, 21, 22, 23, 0], [30, 31, 32, 33, 0]), **outputs(draft_ids=8, draft_row_slot=8),
    )  # fmt: skip
    launch("pack_draft_rows", a, 7)
    same(a, draft_ids=[31, 32, 13, 14, -1, -1, -1, 77], draft_row_slot=[2, 2, 0, 0, -1, -1, -1, 77])
