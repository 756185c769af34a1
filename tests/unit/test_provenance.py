"""Who proposed each token, against a naive walk over one text; and what a stop string leaves of a request's tokens and rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydraft import SamplingParams
from polydraft.errors import RecordError
from polydraft.host.request import Request
from polydraft.output.engine_outputs import cut
from polydraft.output.provenance import Source, origin, provenance

Text = tuple[int, list[int], list[int], set[int]]
"""Tokens, drafts accepted and verified by round, forced places."""


def naive(num_tokens: int, rounds: Sequence[int], drafted: Sequence[int], forced: Collection[int]) -> list[list[int]]:
    """Source, draft position and round of each token of a text, one after the other."""

    def walk() -> Iterator[tuple[int, int, int]]:
        yield Source.TARGET, 0, -1
        for number, (accepted, verified) in enumerate(zip(rounds, drafted, strict=True)):
            for place in range(accepted):
                yield Source.DRAFT, place + 1, number
            yield (Source.CORRECTED if accepted < verified else Source.TARGET), 0, number

    found = [list(origin) for origin, _ in zip(walk(), range(num_tokens), strict=False)]
    return [[Source.FORCED if place in forced else source, *rest] for place, (source, *rest) in enumerate(found)]


def whole(text: Text, told: tuple[int, int] = (0, 0), upto: tuple[int, int] | None = None) -> tuple[Any, ...]:
    """What is new of a text behind the tokens and rounds that were told, up to some."""
    tokens, rounds, drafted, forced = text
    tokens, last = upto or (tokens, len(rounds))
    return tokens - told[0], rounds[told[1] : last], drafted[told[1] : last], told, forced


def found(parts: Sequence[tuple[Any, ...]]) -> list[list[int]]:
    """Of one request after the other."""
    counts, rounds, drafted, told, forced = zip(*parts, strict=True)
    accepted, verified = (np.array([value for part in values for value in part], np.int32) for values in (rounds, drafted))
    round_ends, token_ends = np.cumsum([len(part) for part in rounds]), np.cumsum(counts)
    told_tokens, told_rounds = zip(*told, strict=True)
    rows = provenance(accepted, verified, round_ends, token_ends, told_tokens, told_rounds, forced)
    assert rows.dtype == np.int32
    return [list(origin(word)) for word in rows.tolist()]


@st.composite
def texts(draw: st.DrawFn) -> Text:
    """Texts of whole rounds, cut anywhere in the last one; none at all among them."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
    rounds, drafted = [min(pair) for pair in pairs], [max(pair) for pair in pairs]
    tokens = 1 + sum(rounds) + len(rounds)
    tokens -= draw(st.integers(0, rounds[-1] + 1 if rounds else 1))
    return tokens, rounds, drafted, set(draw(st.lists(st.integers(0, 30), max_size=4)))


@given(st.lists(texts(), min_size=1, max_size=6))
def test_a_batch_of_texts_is_what_each_is_alone(batch: list[Text]) -> None:
    assert found([whole(text) for text in batch]) == [row for text in batch for row in naive(*text)]


@given(st.lists(st.tuples(texts(), st.integers(0, 9)), min_size=1, max_size=6))
def test_what_came_in_two_parts_is_what_came_at_once(batch: list[tuple[Text, int]]) -> None:
    """Parts end where a step did; requests that bring nothing this time, or their first token, lie beside others."""
    first, second, wanted = [], [], []
    for text, steps in batch:
        tokens, rounds, *_ = text
        number = max(min(steps, len(rounds)) - 1, 0)
        upto = (min(1 + sum(rounds[:number]) + number, tokens), number) if steps else (0, 0)
        first.append(whole(text, upto=upto))
        second.append(whole(text, told=upto))
        wanted.append((naive(*text)[: upto[0]], naive(*text)[upto[0] :]))
    assert found(first) == [row for part, _ in wanted for row in part]
    assert found(second) == [row for _, part in wanted for row in part]


def test_nothing_new_has_no_provenance() -> None:
    assert found([(0, [], [], (0, 0), ())]) == []
    none = np.empty(0, np.int32)
    assert provenance(none, none, none, none, [], [], []).shape == (0,)


ROUNDS = [2, 0, 3]
"""After the prefill's token: tokens 2 to 4, token 5, tokens 6 to 9."""


@pytest.mark.parametrize(
    ("num_tokens", "rounds"),
    [
        (1, []),  # the prefill's token is no round
        (2, [1]),
        (3, [2]),
        (4, [2]),  # the target's own token ends the round
        (5, [2, 0]),
        (6, [2, 0, 1]),
        (8, [2, 0, 3]),
        (9, [2, 0, 3]),
    ],
)
def test_rounds_that_produced_only_what_was_cut_are_dropped(num_tokens: int, rounds: list[int]) -> None:
    request = Request("r", (1, 2), SamplingParams(), number=0, seed=(0, 0), stop_token_ids=(), max_total=20)
    request.token_ids, request.rounds = list(range(9)), list(ROUNDS)
    cut(request, num_tokens)
    assert request.token_ids == list(range(num_tokens))
    assert request.rounds == rounds


def test_rounds_that_cannot_have_brought_the_tokens_are_refused() -> None:
    ints = lambda *values: np.array(values, np.int32)  # noqa: E731
    with pytest.raises(RecordError, match=r"^rounds that bring 3 tokens came with 9, wanted as many; what the device says"):
        provenance(ints(1), ints(3), ints(1), ints(9), [0], [0], [()])
