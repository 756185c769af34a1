"""Greedy rounds of the demo checkpoint: the engine accepts in every round exactly what a recomputing oracle accepts.

On five code prompts of 128 new tokens the oracle gives 1.90 / 2.65 / 3.31 / 4.21 tokens a round at K = 1 / 2 / 3 / 5.
"""

from __future__ import annotations

import pytest

from polydraft import SamplingParams
from tests.oracle import CODE_PROMPTS, STOPPING_PROMPT, greedy_rounds
from tests.support.runs import DEVICES, Ask, demo_prompt, drive, engine, oracle

TOKENS_PER_ROUND = {1: 1.9012, 2: 2.6458, 3: 3.3073, 5: 4.2053}
"""By K, over the five prompts with 128 new tokens each."""


def mean_tokens_a_round(device: str, num_drafts: int, prompts: tuple[str, ...], num_tokens: int, *, invariant: bool) -> float:
    """Compare each request with the oracle, print and return the tokens of a round on average."""
    asks = [Ask(demo_prompt(prompt), SamplingParams(max_new_tokens=num_tokens)) for prompt in prompts]
    outputs = drive(engine(device=device, draft_tokens=num_drafts, invariant=invariant), asks)
    for ask, output in zip(asks, outputs, strict=True):
        replay = greedy_rounds(oracle(""), ask.prompt_ids, num_drafts, num_tokens, (0,))
        assert output.token_ids == tuple(replay.token_ids)
        assert output.rounds == tuple(replay.rounds)
    rounds = [accepted for output in outputs for accepted in output.rounds]
    mean = 1 + sum(rounds) / len(rounds)
    print(f"K={num_drafts} {device}: {mean:.4f} tokens a round in {len(rounds)} rounds")  # noqa: T201  `pytest -rP` shows it
    return mean


@pytest.mark.deep  # in `make test` the rounds of the backend `cpu` and of an emulator are the oracle's
@pytest.mark.parametrize("num_drafts", TOKENS_PER_ROUND)
def test_rounds_equal_the_oracle(num_drafts: int) -> None:
    prompts = (*CODE_PROMPTS[:2], STOPPING_PROMPT)
    mean = mean_tokens_a_round("reference", num_drafts, prompts, 24, invariant=False)
    assert mean > 1.5, "drafts are hardly ever accepted"


@pytest.mark.deep
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_drafts", TOKENS_PER_ROUND)
def test_rounds_equal_the_oracle_deep(device: str, num_drafts: int, invariant: bool) -> None:
    mean = mean_tokens_a_round(device, num_drafts, CODE_PROMPTS, 128, invariant=invariant)
    assert mean == pytest.approx(TOKENS_PER_ROUND[num_drafts], abs=1e-4)
