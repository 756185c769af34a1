"""Tables worked out by hand for the processing of logits: golden and reference kernel must both give exactly these numbers.

They cover penalties, biases, forbidden tokens and limits of thinking; nothing expected here was computed by the code under test.
They complement the generated cases: a table shows what is meant, the cases show that it holds elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Limits
from polydraft.reference import processing, thinking

KERNELS = {**processing.KERNELS, **thinking.KERNELS}
LIMITS = Limits(2, 3, 8, 4, 12, 4, 8, 3, 1, 6)
"""No processing kernel needs them."""
INF, NAN = math.inf, math.nan
Launch = Callable[[str, Any, int], None]


def by_golden(name: str, a: Any, n: int) -> None:
    REGISTRY[name].golden(a, n)


def by_reference(name: str, a: Any, n: int) -> None:
    KERNELS[name](a, LIMITS)(n)


@pytest.fixture(params=[by_golden, by_reference], ids=["golden", "reference"])
def launch(request: pytest.FixtureRequest) -> Launch:
    function: Launch = request.param
    return function


def of_text(
    logits: Sequence[Any], behind: Sequence[int], *, prompt: Sequence[int], generated: Sequence[int], drafts: Sequence[int],
    ahead: int = 0, **fields: Any,
) -> Any:  # fmt: skip
    """Rows of slot 1 with so many drafts before them; slot 0 has another text, and behind slot 1's there is an older one."""
    known = [*prompt, *generated]
    a = SimpleNamespace(logits=np.array(logits, np.float32), row_slot=np.full(len(logits), 1, np.int32), ahead=ahead)
    a.positions = np.array([len(known) + some - ahead for some in behind], np.int32)
    a.tokens = np.array([[4] * (len(known) + 2), [*known, 2, 2]], np.int32)
    a.drafts = np.array([[4, 4, 4], [*drafts, *[2] * (3 - len(drafts))]], np.int32)
    a.prompt_len = np.array([1, len(prompt)], np.int32)
    a.num_generated = np.array([1, len(generated)], np.int32)
    vars(a).update(fields)
    return a


def penalties(**own: float) -> dict[str, Any]:
    """Slot 0 has the harshest of all."""
    values = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, **own}
    return {name: np.array([50.0, value], np.float32) for name, value in values.items()}


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    ("own", "rows"),
    [
        # The text: prompt 0 1, output 1 3, drafts 3 4. Logits 2, -2, 1, 4, -1, 8 in every row.
        ({}, [[2, -2, 1, 4, -1, 8]] * 3),
        ({"repetition_penalty": 2}, [[1, -4, 1, 2, -1, 8], [1, -4, 1, 2, -1, 8], [1, -4, 1, 2, -2, 8]]),
        ({"repetition_penalty": 0.5}, [[4, -1, 1, 8, -1, 8], [4, -1, 1, 8, -1, 8], [4, -1, 1, 8, -0.5, 8]]),
        ({"presence_penalty": 0.5}, [[2, -2.5, 1, 3.5, -1, 8], [2, -2.5, 1, 3.5, -1, 8], [2, -2.5, 1, 3.5, -1.5, 8]]),
        ({"frequency_penalty": 0.25}, [[2, -2.25, 1, 3.75, -1, 8], [2, -2.25, 1, 3.5, -1, 8], [2, -2.25, 1, 3.5, -1.25, 8]]),
        ({"presence_penalty": -0.5}, [[2, -1.5, 1, 4.5, -1, 8], [2, -1.5, 1, 4.5, -1, 8], [2, -1.5, 1, 4.5, -0.5, 8]]),
        (
            {"repetition_penalty": 2, "presence_penalty": 0.5, "frequency_penalty": 0.25},
            [[1, -4.75, 1, 1.25, -1, 8], [1, -4.75, 1, 1, -1, 8], [1, -4.75, 1, 1, -2.75, 8]],
        ),
    ],
)
def test_penalties(launch: Launch, own: dict[str, float], rows: list[list[float]], ahead: int) -> None:
    a = of_text(
        [[2, -2, 1, 4, -1, 8]] * 3, [0, 1, 2], prompt=[0, 1], generated=[1, 3], drafts=[3, 4], ahead=ahead, **penalties(**own)
    )
    launch("penalise_logits", a, 3)
    assert a.logits.tolist() == rows


def test_penalties_of_a_first_token_count_the_prompt_for_repetition_only(launch: Launch) -> None:
    own = penalties(repetition_penalty=4, presence_penalty=1, frequency_penalty=1)
    a = of_text([[8, 8, 8, NAN, -INF, INF]] * 2, [0, 0], prompt=[0, 1, 1, 3, 4, 5], generated=[], drafts=[0], **own)
    launch("penalise_logits", a, 1)
    np.testing.assert_array_equal(a.logits, [[2, 2, 8, NAN, -INF, INF], [8, 8, 8, NAN, -INF, INF]])


def test_rows_of_other_slots_and_of_none_stay(launch: Launch) -> None:
    a = of_text([[1, 1, 1, 1, 1, 1]] * 3, [0, 0, 0], prompt=[0], generated=[1], drafts=[], **penalties(presence_penalty=1))
    a.row_slot[:] = -1, 1, -7
    launch("penalise_logits", a, 3)
    assert a.logits.tolist() == [[1] * 6, [1, 0, 1, 1, 1, 1], [1] * 6]


def test_biases(launch: Launch) -> None:
    a = SimpleNamespace(
        logits=np.array([[1, 2, 3, 4], [1, NAN, -INF, 4], [1, 2, 3, 4], [1, 2, 3, 4]], np.float32),
        row_slot=np.array([1, 1, -1, 0], np.int32), num_biases=np.array([0, 2], np.int32),
        bias_ids=np.array([[3, 3, 3], [2, 1, 0]], np.int32), biases=np.array([[9, 9, 9], [-100, 0.5, 9]], np.float32),
    )  # fmt: skip
    launch("bias_logits", a, 4)
    np.testing.assert_array_equal(a.logits, [[1, 2.5, -97, 4], [1, NAN, -INF, 4], [1, 2, 3, 4], [1, 2, 3, 4]])


def forbidden(launch: Launch, behind: int, bad: Sequence[Sequence[int]] = (), least: int = 0, **text: Any) -> set[int]:
    """Tokens that one row may not choose; stop tokens are 5 and 0, and slot 0 forbids everything."""
    table = [token for word in bad for token in (*word, -1)]
    tables = [[0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 0, -1], [*table, *[4, -1] * 7][:14]]
    a = of_text(
        [[0.0] * 6], [behind], **text, min_tokens=np.array([99, least], np.int32),
        stop_tokens=np.array([[1, 2, 3], [5, -1, 0]], np.int32), bad_words=np.array(tables, np.int32),
        bad_len=np.array([12, len(table)], np.int32),
    )  # fmt: skip
    launch("forbid_tokens", a, 1)
    assert set(a.logits[0].tolist()) <= {0.0, -INF}
    return set(np.flatnonzero(a.logits[0]).tolist())


@pytest.mark.parametrize(
    ("bad", "wanted"),
    [
        # The text: prompt 1 2, output 3 1, drafts 2 3 1; rows have 0, 1, 2 and 3 of them behind the output.
        ([], [set(), set(), set(), set()]),
        ([[4]], [{4}, {4}, {4}, {4}]),
        ([[4], [0]], [{0, 4}, {0, 4}, {0, 4}, {0, 4}]),
        ([[1, 2]], [{2}, set(), set(), {2}]),
        ([[3, 1, 5]], [{5}, set(), set(), {5}]),
        ([[1, 2, 4]], [set(), {4}, set(), set()]),  # 1 is output, 2 a draft
        ([[2, 3, 4]], [set(), set(), {4}, set()]),  # two drafts
        ([[3, 1, 2, 3, 1, 0]], [set(), set(), set(), {0}]),  # as long as the output
        ([[2, 3, 1, 2, 3, 1, 0]], [set(), set(), set(), set()]),  # longer: the prompt does not count
        ([[2, 3]], [set(), {3}, set(), set()]),  # the 2 of the prompt does not count
        ([[3, 3], [1, 1], [2, 2]], [{1}, {2}, {3}, {1}]),
    ],
)
def test_bad_words(launch: Launch, bad: list[list[int]], wanted: list[set[int]]) -> None:
    text: dict[str, Any] = {"prompt": [1, 2], "generated": [3, 1], "drafts": [2, 3, 1]}
    assert [forbidden(launch, behind, bad, **text) for behind in range(4)] == wanted


@pytest.mark.parametrize(("least", "early"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (6, 4), (9, 4)])
def test_stop_tokens_before_their_time(launch: Launch, least: int, early: int) -> None:
    """Two tokens are generated: rows 0 to 3 would choose the third to the sixth."""
    text: dict[str, Any] = {"prompt": [1, 2], "generated": [3, 1], "drafts": [2, 3, 1]}
    found = [forbidden(launch, behind, [[4]], least, **text) for behind in range(4)]
    assert found == [{0, 4, 5}] * early + [{4}] * (4 - early)


def limits(**own: int) -> dict[str, Any]:
    """Slot 0 has begun its reply and may not go on. Thinking ends with 1 3, and 4 1 3 is spelt out at its limit."""
    values = {"reply_from": -1, "think_limit": -1, "reply_limit": -1, "num_reply_starts": 0, **own}
    neighbour = {"reply_from": 0, "think_limit": 0, "reply_limit": 0, "num_reply_starts": 1}
    columns = {name: np.array([neighbour[name], value], np.int32) for name, value in values.items()}
    return {
        **columns, "reply_starts": np.array([[0, 0, 0], [2, 5, 0]], np.int32),
        "stop_tokens": np.array([[3, 3], [5, 0]], np.int32),
        "think_end": np.array([1, 3], np.int32), "think_forced": np.array([4, 1, 3], np.int32),
    }  # fmt: skip


ANY = {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    ("own", "drafts", "wanted"),
    [
        # The text: prompt 1, output 0 1, and the drafts. Rows have 2, 3, 4 and 5 generated tokens before theirs.
        ({}, (3, 0, 0), [ANY, ANY, ANY, ANY]),
        ({"think_limit": 4}, (0, 0, 4), [ANY, ANY, {4}, {1}]),
        ({"think_limit": 2}, (4, 1, 3), [{4}, {1}, {3}, ANY]),
        ({"think_limit": 2, "num_reply_starts": 2}, (4, 1, 3), [{4}, {1}, {3}, {2, 5}]),
        ({"num_reply_starts": 2}, (3, 0, 1), [ANY, {2, 5}, ANY, ANY]),
        ({"think_limit": 3, "num_reply_starts": 1}, (3, 2, 1), [ANY, {2}, ANY, ANY]),
        ({"think_limit": 2, "num_reply_starts": 2}, (3, 1, 3), [{4}, {1}, {3}, {2, 5}]),
        ({"reply_limit": 1}, (3, 0, 1), [ANY, ANY, {5}, {5}]),
        ({"reply_from": 1, "reply_limit": 2, "think_limit": 0}, (0, 0, 0), [ANY, {5}, {5}, {5}]),
        ({"reply_from": 2, "reply_limit": 0, "num_reply_starts": 2}, (0, 0, 0), [{5}] * 4),
        ({"reply_from": 2, "num_reply_starts": 2}, (5, 1, 3), [{2, 5}, ANY, ANY, ANY]),
    ],
)
def test_thinking(launch: Launch, own: dict[str, int], drafts: tuple[int, ...], wanted: list[set[int]], ahead: int) -> None:
    rows = [[7, 8, 9, 1, 2, 3]] * 4
    a = of_text(rows, range(4), prompt=[1], generated=[0, 1], drafts=drafts, ahead=ahead, **limits(**own))
    launch("limit_thinking", a, 4)
    assert a.logits.tolist() == [[x if v in some else -INF for v, x in enumerate(rows[0])] for some in wanted]


def test_what_is_forced_comes_unless_it_is_no_number(launch: Launch) -> None:
    rows = [[1, 2, 3, 4, -INF, 6], [NAN] * 6, [1, 2, 3, 4, -5, 6], [1, 2, 3, 4, INF, 6]]
    a = of_text(rows, [0] * 4, prompt=[1], generated=[0], drafts=[], **limits(think_limit=1))
    a.row_slot[2] = -1
    launch("limit_thinking", a, 4)
    np.testing.assert_array_equal(a.logits, [[*[-INF] * 4, 0, -INF], [*[-INF] * 4, NAN, -INF], rows[2], [*[-INF] * 4, INF, -INF]])


@pytest.mark.parametrize(
    ("limit", "text", "new", "wanted"),
    [
        (-1, (0, 1, 3), 1, 3), (-1, (0, 1, 3), 3, 3), (-1, (1, 3, 0), 1, -1), (-1, (1, 3, 0), 3, 2), (-1, (3, 0, 0), 3, -1),
        (3, (0, 1, 3), 1, 3), (2, (0, 1, 3), 2, -1), (1, (0, 4, 1, 3), 1, 4), (1, (0, 4, 1), 2, -1), (0, (4, 1, 3, 1, 3), 3, 3),
        (-1, (1, 3), 0, -1),
    ],
)  # fmt: skip
def test_where_thinking_ends(launch: Launch, limit: int, text: tuple[int, ...], new: int, wanted: int) -> None:
    """Behind a prompt that ends with 1; sequence 1 has slot 0, whose reply has begun."""

    def lines(*rows: Sequence[int]) -> Any:
        return np.array([[*row, *[0] * 9][:9] for row in rows], np.int32)

    a = SimpleNamespace(
        slot_order=np.array([1, 0, -1], np.int32), out_len=np.array([new, 1, 2], np.int32),
        out_tokens=lines(text[len(text) - new :], [3], [1, 3]), tokens=lines([1, 3, 1, 3], [2, 1, *text, 1, 3]),
        prompt_len=np.array([1, 2], np.int32), num_generated=np.array([3, len(text)], np.int32),
        think_limit=np.array([-1, limit], np.int32), think_end=np.array([1, 3], np.int32), num_forced=3,
        reply_from=np.array([0, -1], np.int32),
    )  # fmt: skip
    launch("commit_thinking", a, 3)
    assert a.reply_from.tolist() == [0, wanted]
