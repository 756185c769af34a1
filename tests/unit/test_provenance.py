"""Who proposed each token, against a naive walk over one text; and what a stop string leaves of a request's tokens and rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydraft import SamplingParams
from polydraft.errors import RecordError
from polydraft.host.request import Request
from polydraft.output.engine_outputs import cut
from polydraft.output.provenance import check_rounds, provenance

Text = tuple[int, list[int], list[int], list[int], set[int]]
"""Tokens; drafts accepted, verified and looked up by round; forced places."""


def naive(
    num_tokens: int, rounds: Sequence[int], drafted: Sequence[int], lookups: Sequence[int], forced: Collection[int]
) -> list[tuple[str, int, int]]:
    """Source, draft position and round of each token of a text, one after the other."""

    def walk() -> Iterator[tuple[str, int, int]]:
        yield "target", 0, -1
        for number, (accepted, verified, looked_up) in enumerate(zip(rounds, drafted, lookups, strict=True)):
            made = ["draft"] * (verified - looked_up) + ["lookup"] * looked_up
            for place in range(accepted):
                yield made[place], place + 1, number
            yield ("corrected" if accepted < verified else "target"), 0, number

    found = [*zip(range(num_tokens), walk(), strict=False)]
    return [("forced" if place in forced else source, *rest) for place, (source, *rest) in found]  # type: ignore[misc]


@st.composite
def texts(draw: st.DrawFn) -> Text:
    """Texts of whole rounds, cut anywhere in the last one; none at all among them."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
    rounds, drafted = [min(pair) for pair in pairs], [max(pair) for pair in pairs]
    tokens = 1 + sum(rounds) + len(rounds)
    tokens -= draw(st.integers(0, rounds[-1] + 1 if rounds else 1))
    lookups = [draw(st.integers(0, verified)) for verified in drafted]
    return tokens, rounds, drafted, lookups, set(draw(st.lists(st.integers(0, 30), max_size=4)))


@given(texts())
def test_every_token_of_a_text_from_any_place_on(text: Text) -> None:
    wanted = naive(*text)
    assert len(wanted) == text[0]
    for start in range(text[0] + 1):
        assert list(provenance(*text, start)) == wanted[start:]


@given(texts(), st.integers(0, 9))
def test_what_came_in_two_parts_is_what_came_at_once(text: Text, steps: int) -> None:
    """Parts end where a step did."""
    tokens, rounds, drafted, lookups, forced = text
    number = max(min(steps, len(rounds)) - 1, 0)
    upto = min(1 + sum(rounds[:number]) + number, tokens) if steps else 0
    first = list(provenance(upto, rounds[:number], drafted[:number], lookups[:number], forced))
    assert first + list(provenance(*text, upto)) == naive(*text)
    check_rounds(upto, rounds[:number], prefill=upto > 0, ended=False)
    check_rounds(tokens - upto, rounds[number:], prefill=not upto and tokens > 0, ended=True)


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


@pytest.mark.parametrize(
    ("num_tokens", "rounds", "prefill", "ended"),
    [
        (9, [1], True, False),
        (9, [1], True, True),
        (2, [3], False, False),  # cut, and goes on
        (1, [1, 3], False, True),  # cut in an earlier round than the last
        (1, [], False, True),
        (0, [], True, True),
    ],
)
def test_rounds_that_cannot_have_brought_the_tokens_are_refused(
    num_tokens: int, rounds: list[int], prefill: bool, ended: bool
) -> None:
    brought = sum(rounds) + len(rounds) + prefill
    said = f"^rounds that bring {brought} tokens came with {num_tokens}, wanted as many; what the device says"
    with pytest.raises(RecordError, match=said):
        check_rounds(num_tokens, rounds, prefill=prefill, ended=ended)
