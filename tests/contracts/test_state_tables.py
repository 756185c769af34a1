"""Tables worked out by hand for the state contracts: golden and reference kernel must both give exactly these numbers.

Owns the literal side of the state contracts; nothing expected here was computed by the code under test.
Run by `make test`. Never replaces the generated cases: a table shows what is meant, they show that it holds elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Limits
from polydraft.contracts.layout import SLOT_UPDATE_COLUMNS, SNAPSHOT_COLUMNS
from polydraft.reference.state_kernels import KERNELS
from polydraft.sentinels import Finish, Phase

IDLE, PREFILL, DECODE, PAUSED, FINISHED = (int(phase) for phase in Phase)
NONE, STOP, LENGTH, _, ERROR = (int(finish) for finish in Finish)
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
    assert SLOT_UPDATE_COLUMNS == (
        "slot", "phase", "prompt_len", "num_generated", "kv_len", "prefill_len", "max_total", "epoch", "top_k",
        "seed_low", "seed_high", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "min_tokens", "num_biases", "bad_len",
    )  # fmt: skip
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


def test_update_slots_reads_floats_and_seeds_as_bits(launch: Launch) -> None:
    lines = ("phase", "prompt_len", "num_generated", "kv_len", "prefill_len", "max_total", "epoch", "top_k", "finish")
    tables = ("min_tokens", "num_biases", "bad_len")
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = 0x3FC00000, 0x3E800000, -(2**30)  # 1.5, 0.25 and -2 as the bits of a float32
    a = SimpleNamespace(
        updates=ints(
            [1, PREFILL, 5, 0, 2, 5, 20, 4, 40, -1, 7, 1056964608, 1065353216, 0, *penalties, 6, 2, 3, 9, -1],
            [-1, PREFILL, 6, 1, 3, 6, 21, 5, 41, 8, 8, 0, 0, 0, 0, 0, 0, 7, 3, 4, 1, 1],
        ),
        seed=np.full((2, 2), POISON, np.uint32),
        **{name: np.full(2, POISON, np.float32) for name in floats},
        **outputs(**dict.fromkeys((*lines, *tables), 2), draft_len=2, stop_tokens=(2, 2), drafts=(2, 3), block_table=(2, 4)),
    )
    launch("update_slots", a, 2)
    same(a, phase=[77, PREFILL], prompt_len=[77, 5], num_generated=[77, 0], kv_len=[77, 2], prefill_len=[77, 5])
    same(a, max_total=[77, 20], epoch=[77, 4], top_k=[77, 40], finish=[77, NONE], draft_len=[77, 0])
    same(a, seed=[[77, 77], [2**32 - 1, 7]], temperature=[77.0, 0.5], top_p=[77.0, 1.0], min_p=[77.0, 0.0])
    same(a, stop_tokens=[[77, 77], [9, -1]], drafts=[[77] * 3, [-1] * 3], block_table=[[77] * 4, [-1] * 4])
    same(a, repetition_penalty=[77.0, 1.5], presence_penalty=[77.0, 0.25], frequency_penalty=[77.0, -2.0])
    same(a, min_tokens=[77, 6], num_biases=[77, 2], bad_len=[77, 3])


def test_a_bias_is_bits_too(launch: Launch) -> None:
    a = SimpleNamespace(updates=ints([1, 2, 5, -(2**30)], [-1, 0, 6, 0], [0, 0, 9, 0x3FC00000]), **outputs(bias_ids=(2, 3)))
    a.biases = np.full((2, 3), POISON, np.float32)
    launch("update_biases", a, 3)
    same(a, bias_ids=[[9, 77, 77], [77, 77, 5]], biases=[[1.5, 77.0, 77.0], [77.0, 77.0, -2.0]])


@pytest.mark.parametrize(
    ("name", "field"), [("update_tokens", "tokens"), ("update_blocks", "block_table"), ("update_bad_words", "bad_words")]
)
def test_single_entries(launch: Launch, name: str, field: str) -> None:
    a = SimpleNamespace(updates=ints([1, 2, 5], [-1, 0, 6], [0, 0, -1], [1, 0, 8]), **outputs(**{field: (2, 3)}))
    launch(name, a, 3)
    same(a, **{field: [[-1, 77, 77], [77, 77, 5]]})


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
    ("known", "max_total", "phase", "seq_len", "slot", "position", "budget"),
    [
        (6, 20, DECODE, 1, 1, 4, 2),
        (6, 8, DECODE, 1, 1, 4, 1),  # two tokens left: a draft and the target's
        (6, 7, DECODE, 1, -1, 0, 0),
        (6, 20, FINISHED, 1, -1, 0, 0),
        (6, 20, PREFILL, 1, -1, 0, 0),
    ],
)
def test_begin_draft(
    launch: Launch, known: int, max_total: int, phase: int, seq_len: int, slot: int, position: int, budget: int
) -> None:
    a = SimpleNamespace(slot_order=ints(1, 0), seq_len=ints(seq_len, 0), phase=ints(DECODE, phase), kv_len=ints(3, known - 1))
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
