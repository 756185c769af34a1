"""The oracle of sampled texts itself: published numbers, tables worked by hand, and agreement with its greedy sister."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polydraft import SamplingParams
from polydraft.conformance.oracle.coupled import Sampling, coupled_along, coupled_rounds, gumbel, threefry
from polydraft.conformance.oracle.rounds import greedy_rounds
from tests.oracle.processing import ended_by_text, processed
from tests.support import tiny
from tests.support.depth import first

Array = NDArray[Any]
HALVES = np.log([0.125, 0.5, 0.0625, 0.25, 0.0625])
"""Easy probabilities; best first: tokens 1, 3, 0, then 2 and 4 equal."""


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers_of_its_authors(
    key: tuple[int, int], counter: tuple[int, int], words: tuple[int, int]
) -> None:
    assert threefry(key, counter) == words


def test_noise_is_standard_gumbel_and_keyed_by_seed_and_position() -> None:
    noise = np.concatenate([gumbel(seed, position, 97) for seed in (1, 2**32, 2**63) for position in range(40)])
    assert len(np.unique(noise)) > 0.99 * len(noise)
    assert noise.mean() == pytest.approx(0.5772, abs=0.05)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.15)
    assert gumbel(7, 3, 8)[:5].tolist() == gumbel(7, 3, 5).tolist()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_k=3), {0, 1, 3}),
        (Sampling(1.0, top_k=4), {0, 1, 2, 3}),  # of the equals 2 and 4 the lower id
        (Sampling(1.0, top_p=0.4), {1}),
        (Sampling(1.0, top_p=0.7), {1, 3}),
        (Sampling(1.0, top_p=0.6, top_k=2), {1}),  # with top-k, 0.5 has become 2/3
        (Sampling(1.0, min_p=0.2), {0, 1, 3}),
        (Sampling(1.0, top_k=4, top_p=0.9, min_p=0.3), {1, 3}),
    ],
)
def test_filters_by_hand(sampling: Sampling, kept: set[int]) -> None:
    assert set(np.flatnonzero(sampling._keep(HALVES, 0.0))) == kept


def test_tokens_are_drawn_with_their_probabilities() -> None:
    drawn = [Sampling(1.0, seed=5).choose(HALVES, position)[0] for position in range(4000)]
    assert np.bincount(drawn) / 4000 == pytest.approx(np.exp(HALVES), abs=0.03)


@pytest.mark.parametrize(
    ("sampling", "logits", "clear"),
    [
        (Sampling(), [1.0, 1.00005, 0.0], False),
        (Sampling(), [1.0, 1.0002, 0.0], True),
        (Sampling(1.0, top_k=1), [1.0, 1.00005, -9.0], False),
        (Sampling(1.0, top_k=1), [1.0, 2.0, -9.0], True),
        (Sampling(1.0, top_p=0.5), [0.0, 0.0], False),  # the second begins exactly at the border
        (Sampling(1.0, top_p=0.6), [0.0, -50.0], True),
        (Sampling(1.0, min_p=0.5), [0.0, math.log(0.50005)], False),
        (Sampling(1.0, min_p=0.4), [0.0, math.log(0.1)], True),
    ],
)
def test_what_a_float32_engine_may_decide_otherwise_is_not_clear(sampling: Sampling, logits: list[float], clear: bool) -> None:
    found = [sampling.choose(np.array(logits), position)[1] for position in range(60)]
    assert all(found) if clear else not all(found)


FILTERS = (
    Sampling(), Sampling(0.8, top_p=0.9), Sampling(1.0, top_k=5), Sampling(1.3, min_p=0.1), Sampling(0.5, top_p=0.1),
    Sampling(1.0, top_k=1), Sampling(1.2, top_k=9, top_p=0.7, min_p=0.05),
)  # fmt: skip


@pytest.mark.parametrize("tolerance", [1e-4, 0.1, 0.4])
def test_what_rounding_may_bring_about_is_among_what_may_be_chosen(tolerance: float) -> None:
    """Any two logits are nearer or farther apart by at most as much as they are off."""
    rng, close, seen = np.random.default_rng(0), 0, 0
    for sampling in FILTERS:
        for position in range(40):
            logits = 2 * rng.standard_normal(12)
            moved = logits + tolerance * rng.choice([-0.499, 0.0, 0.499], (20, 12))
            may, (token_id, clear) = sampling.may(logits, position, tolerance), sampling.choose(logits, position, tolerance)
            found = {sampling.choose(one, position)[0] for one in moved}
            assert may[token_id]
            assert all(may[one] for one in found)
            assert found == {token_id} or not clear
            close, seen = close + (not clear), seen + (found != {token_id})
    assert close < 200, "most choices are clear"
    assert seen >= close // 4, "most of what may be chosen is"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=20, seed=4)], ids=["greedy", "sampled"])
def test_an_engines_text_is_judged_behind_its_own_tokens(sampling: Sampling) -> None:
    model, prompt, tolerance = tiny.oracle("narrow"), [5, 9, 2], 0.35

    def along(token_ids: Sequence[int], rounds: Sequence[int], tolerance: float = tolerance) -> tuple[list[int], list[int]]:
        found = coupled_along(model, prompt, (token_ids, rounds), sampling, 3, 20, (), tolerance=tolerance)
        return found.token_ids, found.rounds

    exact = coupled_rounds(model, prompt, sampling, 3, 20, ())
    text, rounds = exact.token_ids, exact.rounds
    assert along(text, rounds) == along(text, rounds, 1e-4) == (text, rounds)
    assert coupled_along(model, prompt, (text, rounds), sampling, 3, 20, ()).clear == 20
    for wrong in (text[:-1], [*text, 1], [*text[:7], 10_000, *text[8:]]):
        assert along(wrong, rounds)[0] != wrong
    assert along(text, [rounds[0] + 1, *rounds[1:]])[1] != [rounds[0] + 1, *rounds[1:]]
    assert along(text, rounds[:-1])[1] != rounds[:-1]

    states = model.target_states([*prompt, *text])[len(prompt) - 1 :]
    choices = [sampling.may(row, len(prompt) + i, tolerance) for i, row in enumerate(model.target_logits(states))]
    place = next(i for i, may in enumerate(choices) if may.sum() > 1)
    other = next(token for token in np.flatnonzero(choices[place]).tolist() if token != text[place])
    begun = [*text[:place], other]
    behind = coupled_rounds(model, [*prompt, *begun], sampling, 0, 20 - len(begun), ()).token_ids
    mine = [*begun, *behind]
    assert along(mine, [0] * 19)[0] == mine
    assert along(mine, [0] * 19, 1e-4)[0] != mine
    assert coupled_along(model, prompt, (mine, [0] * 19), sampling, 0, 20, (), tolerance=tolerance).differs
    unlikely = [*text[:place], int(np.flatnonzero(~choices[place])[0]), *text[place + 1 :]]
    assert along(unlikely, rounds)[0][place] == text[place]


@pytest.mark.parametrize(
    ("out", "stop", "min_tokens", "end"),
    [
        ([7, 12, 3], ("w12",), 0, (2, "w7 ")),
        ([7, 12, 3], ("w1",), 0, (2, "w7 ")),
        ([7, 12, 3], ("w7 ",), 0, (2, "")),  # the space comes with the next word
        ([7, 12, 3], ("2 w3", "7 w12"), 0, (2, "w")),
        ([7, 12, 3], ("w3", "w7 w12 w"), 0, (3, "")),  # of two that end together the longer one
        ([7, 12, 7], ("w7",), 1, (3, "w7 w12 ")),
        ([7, 12, 7], ("w7 w1",), 2, None),
        ([7, 0, 3], ("w3",), 0, (3, "w7 ")),
        ([7, 12, 3], ("w4",), 0, None),
    ],
)
def test_stop_strings_by_hand(out: list[int], stop: tuple[str, ...], min_tokens: int, end: tuple[int, str] | None) -> None:
    assert ended_by_text(out, SamplingParams(stop=stop, min_tokens=min_tokens)) == end


def test_processing_by_hand() -> None:
    logits = np.array([0.5, 4.0, -2.0, 1.0, 3.0])
    given = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 1.5}, bad_words=((1, 4), "w2"),
        min_tokens=4, stop_token_ids=(3,),
    )  # fmt: skip
    # Of the prompt token 2 counts for repetition alone; 1 was generated twice, and 4 would end the word (1, 4).
    assert processed(logits, [2], [1, 4, 1], given).tolist() == [-np.inf, 2 - 0.5 - 0.5, -np.inf, -np.inf, -np.inf]
    assert processed(logits, [2], [1, 4, 1, 4], given).tolist() == [0.5, 1.0, -np.inf, 2.5, 1.5 - 0.5 - 0.5]


def test_drafts_are_processed_with_the_drafts_before_them() -> None:
    """Every token is forbidden once it stands in the text: then none comes twice, and drafts that knew less would be wrong."""
    seen: list[int] = []

    def once(logits: Array, known: Sequence[int]) -> Array:
        seen.append(len(known))
        return np.where(np.isin(np.arange(len(logits)), known), -np.inf, logits)

    model, prompt = tiny.oracle("narrow"), [5, 9, 2]
    replay = coupled_rounds(model, prompt, Sampling(), 3, 20, (), once)
    assert len({*prompt, *replay.token_ids}) == 23
    assert sum(replay.rounds) > 0
    text = 20
    rounds = [min(3, 19 - sum(replay.rounds[:i]) - i - 1) for i in range(len(replay.rounds))]
    assert len(seen) == text + sum(rounds), "every draft is chosen from processed logits"


@pytest.mark.parametrize("model", tiny.CONFIGS)
def test_at_temperature_zero_it_is_the_greedy_oracle(model: str) -> None:
    oracle, prompt = tiny.oracle(model), [5, 9, 2, 9]
    for num_drafts in range(5):
        greedy = greedy_rounds(oracle, prompt, num_drafts, 20, (0, 17))
        replay = coupled_rounds(oracle, prompt, Sampling(), num_drafts, 20, (0, 17))
        assert (replay.token_ids, replay.rounds) == (greedy.token_ids, greedy.rounds)


@pytest.mark.parametrize("model", first(2, tiny.CONFIGS))
def test_tiny_models_are_worth_testing_with(model: str) -> None:
    """Accepted counts from 0 to K occur, texts have many different tokens, and most choices are clear."""
    replays = [coupled_rounds(tiny.oracle(model), [i + 1, 3 * i], Sampling(t), 3, 40, ()) for i in range(3) for t in (0.0, 1.0)]
    rounds = [accepted for replay in replays for accepted in replay.rounds]
    assert set(rounds) == {0, 1, 2, 3}
    assert 1.3 < 1 + sum(rounds) / len(rounds) < 3
    assert np.mean([len(set(replay.token_ids)) for replay in replays]) > 12
    assert sum(replay.clear for replay in replays) >= 5
