"""What a stop string leaves of a request's tokens and rounds."""

from __future__ import annotations

import pytest

from polydraft import SamplingParams
from polydraft.runtime.request import Request
from polydraft.runtime.taken import cut

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
