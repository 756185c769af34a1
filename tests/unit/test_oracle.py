"""The oracle itself: its rounds on a scripted model worked out by hand, and its figures on the demo model."""

from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from polydraft.conformance.oracle.checkpoints import TINY_MIMO, write_checkpoint
from polydraft.demo import demo_model_path
from polydraft.models import Tokenizer
from tests.oracle import CODE_PROMPTS, STOPPING_PROMPT, OracleModel, greedy_rounds

V = 16
TEXT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # what the scripted target says, prompt included


class Scripted:
    """A target that continues TEXT, and a draft head that is right except about the tokens in `wrong`."""

    def __init__(self, wrong: Sequence[int] = (), max_model_len: int = 100) -> None:
        self.wrong = frozenset(wrong)
        self.description = SimpleNamespace(max_model_len=max_model_len, mtp=object(), blocks=[object()] * 8)
        self.texts: dict[tuple[int, ...], Any] = {}

    def target_states(self, token_ids: Sequence[int]) -> Any:
        return np.arange(len(token_ids))[:, None]

    def target_logits(self, states: Any) -> Any:
        logits = np.zeros((len(states), V))
        for row, position in enumerate(states[:, 0]):
            logits[row, TEXT[(position + 1) % len(TEXT)]] = 2.0
            logits[row, 15] = 0.5
        return logits

    def draft(self, token_ids: Sequence[int], states: Any, num_drafts: int) -> tuple[list[int], None]:
        return [token for token, _ in self.drafting(token_ids, states, num_drafts)], None

    def drafting(self, token_ids: Sequence[int], states: Any, num_drafts: int) -> Iterator[tuple[int, Any]]:
        assert len(states) == len(token_ids) - 1
        for k in range(num_drafts):
            token = TEXT[(len(token_ids) + k) % len(TEXT)]
            said = 0 if token in self.wrong else token
            yield said, 2.0 * (np.arange(V) == said)


def play(K: int, max_new: int, eos: Sequence[int] = (), **script: Any) -> tuple[list[int], list[int]]:
    model = cast("OracleModel", Scripted(**script))
    result = greedy_rounds(model, TEXT[:2], K, max_new, eos)
    assert result.margins == [1.5] * len(result.token_ids)
    return result.token_ids, result.rounds


@pytest.mark.parametrize(
    ("K", "max_new", "script", "tokens", "rounds"),
    [
        (0, 4, {}, 4, [0, 0, 0]),
        (1, 5, {}, 5, [1, 1]),  # 5 | 6 7 | 8 9
        (1, 6, {}, 6, [1, 1, 0]),  # the last token has no room for a draft
        (3, 10, {}, 10, [3, 3, 0]),
        (3, 9, {}, 9, [3, 3]),
        (3, 8, {}, 8, [3, 2]),  # the second round may draft 2 tokens only
        (2, 8, {"wrong": [7]}, 8, [1, 2, 1]),  # 5 | 6 (7) | 8 9 10 | 11 12
        (3, 8, {"wrong": [6, 7]}, 8, [0, 0, 3, 0]),
        (3, 1, {}, 1, []),
        (3, 0, {}, 0, []),
        (3, 9, {"eos": [5]}, 1, []),  # the prefill's token ends the text
        (3, 9, {"eos": [6]}, 2, [1]),  # three were accepted, one counts
        (3, 9, {"eos": [8]}, 4, [3]),
        (3, 9, {"eos": [9]}, 5, [3]),  # the target's own token ends it
        (3, 9, {"eos": [10]}, 6, [3, 1]),
        (3, 9, {"eos": [9], "wrong": [9]}, 5, [3]),
        (2, 9, {"eos": [7], "wrong": [7]}, 3, [1]),
        (3, 9, {"max_model_len": 6}, 4, [2]),
        (3, 9, {"max_model_len": 2}, 0, []),
    ],
)
def test_rounds_by_hand(K: int, max_new: int, script: dict[str, Any], tokens: int, rounds: list[int]) -> None:
    assert play(K, max_new, **script) == (TEXT[2 : 2 + tokens], rounds)


def test_what_is_known_of_one_k_is_reused_for_another() -> None:
    model = Scripted(wrong=[7, 9])
    results = [greedy_rounds(cast("OracleModel", model), TEXT[:2], K, 9, ()) for K in (3, 1, 0)]
    assert [result.token_ids for result in results] == [TEXT[2:11]] * 3
    assert [result.rounds for result in results] == [[1, 1, 3], [1, 1, 1, 1], [0] * 8]
    assert len(model.texts) == 1


def test_ties_go_to_the_lowest_id(tmp_path: Any) -> None:
    model = OracleModel.from_dir(write_checkpoint(tmp_path))
    model.w["lm_head"][:] = model.w["lm_head"][0]
    result = greedy_rounds(model, [5, 6, 7], 2, 5, ())
    assert (result.token_ids, result.margins) == ([0] * 5, [0.0] * 5)
    assert result.rounds == [2, 0]


@pytest.mark.parametrize("seed", range(4))
def test_one_text_whatever_k(tmp_path: Any, seed: int) -> None:
    """On random weights almost nothing is accepted; each K is computed with a model of its own, so nothing is reused."""
    directory = write_checkpoint(tmp_path, seed=seed)
    prompt = [int(i) for i in np.random.default_rng(seed).integers(0, TINY_MIMO["vocab_size"], 1 + seed)]
    results = [greedy_rounds(OracleModel.from_dir(directory), prompt, K, 20, ()) for K in range(4)]
    assert all(result.token_ids == results[0].token_ids for result in results)
    assert all(1 + len(result.rounds) + sum(result.rounds) == 20 for result in results)


@cache
def demo() -> tuple[OracleModel, Tokenizer]:
    return OracleModel.from_dir(demo_model_path()), Tokenizer.from_dir(demo_model_path())


@pytest.mark.deep
@pytest.mark.parametrize(
    ("K", "tokens_per_round"),
    [(0, 1), (1, 315 / 173), (2, 315 / 129), (3, 315 / 108), (5, 315 / 91)],
)
def test_tokens_per_round_of_the_demo_model(K: int, tokens_per_round: float) -> None:
    """With 128 new tokens a prompt, it is 1.90 / 2.65 / 3.31 / 4.21 for K = 1 / 2 / 3 / 5."""
    model, tokenizer = demo()
    results = [greedy_rounds(model, tokenizer.encode(prompt), K, 64, (0,)) for prompt in CODE_PROMPTS]
    assert [len(result.token_ids) for result in results] == [64] * 5
    rounds = [accepted for result in results for accepted in result.rounds]
    assert 1 + sum(rounds) / len(rounds) == pytest.approx(tokens_per_round, abs=1e-9)
    assert min(margin for result in results for margin in result.margins) > 0.03


def test_a_prompt_that_stops() -> None:
    model, tokenizer = demo()
    result = greedy_rounds(model, tokenizer.encode(STOPPING_PROMPT), 3, 64, (0,))
    assert (len(result.token_ids), result.token_ids[-1], result.rounds) == (12, 0, [0, 0, 3, 3, 1])


def test_a_wrong_convention_changes_no_token_and_costs_nearly_all_drafts() -> None:
    model, tokenizer = demo()
    prompt = tokenizer.encode(CODE_PROMPTS[0])
    right = greedy_rounds(model, prompt, 3, 12, ())
    wrong = greedy_rounds(OracleModel.from_dir(demo_model_path(), order="embedding_first"), prompt, 3, 12, ())
    assert wrong.token_ids == right.token_ids
    assert sum(wrong.rounds) <= 1 < sum(right.rounds)
