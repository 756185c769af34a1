"""Lossless: in `invariant` mode a request's text and rounds do not depend on how it was served, on any kind of device.

The text is that of the request alone at K = 0, the rounds are those of the request alone at its K, and both are what the
recomputing oracles find. Elsewhere a token may differ only where the float64 oracle sees a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from polydraft import Engine, RequestOutput, SamplingParams
from tests.oracle import CODE_PROMPTS, STOPPING_PROMPT, greedy_rounds
from tests.support import tiny
from tests.support.runs import DEVICES, ORDERS, Ask, demo_prompt, drive, engine, essence, oracle, replay, solo

KS = range(6)
SAMPLED = (
    SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(temperature=1.0, top_k=20, seed=2**63 + 5),
    SamplingParams(temperature=1.3, min_p=0.05, top_p=0.9, seed=2**32 - 1),
)


PROMPTS = (*CODE_PROMPTS, STOPPING_PROMPT)


def check(model: str, num_drafts: int, ask: Ask, got: RequestOutput) -> None:
    """Text of the request alone without drafts, rounds of the request alone with them, both as the oracle has them."""
    context = f"{model or 'demo'} K={num_drafts} {ask}"
    alone = solo(model, num_drafts, ask.prompt_ids, ask.params)
    plain = solo(model, 0, ask.prompt_ids, ask.params)
    assert got.token_ids == plain.token_ids, context
    assert (got.text, got.finish_reason) == (plain.text, plain.finish_reason), context
    assert essence(got) == essence(alone), context
    if not ask.params.stop:
        check_against_oracle(model, num_drafts, ask, got)


def check_against_oracle(model: str, num_drafts: int, ask: Ask, got: RequestOutput) -> None:
    expected = replay(model, num_drafts, ask)
    if not expected.clear:
        event("left out by the oracle: a choice within 1e-4 of another one")
        return
    found = list(got.token_ids), list(got.rounds)
    assert found == (expected.token_ids, expected.rounds), f"{model or 'demo'} K={num_drafts} {ask}"
    if ask.params.temperature == 0:
        greedy = greedy_rounds(oracle(model), ask.prompt_ids, num_drafts, ask.params.max_new_tokens, ask.stop_ids)
        assert found == (greedy.token_ids, greedy.rounds), "the two oracles differ"


# -- random tiny checkpoints -----------------------------------------------------------------------
@dataclass(frozen=True)
class Scene:
    """How a set of requests is served."""

    model: str
    device: str
    num_drafts: int
    options: dict[str, Any]
    asks: tuple[Ask, ...]

    def run(self, **options: Any) -> tuple[Engine, list[RequestOutput]]:
        served_by = engine(self.model, device=self.device, draft_tokens=self.num_drafts, **self.options, **options)
        return served_by, drive(served_by, self.asks)


def params(vocab_size: int) -> st.SearchStrategy[SamplingParams]:
    common: dict[str, Any] = {
        "max_new_tokens": st.integers(1, 24),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(1, vocab_size - 1), max_size=3).map(tuple),
        "stop": st.sampled_from(((), (), (), (" w5",), ("w1", "9 w"))),
    }
    sampled = {
        "temperature": st.sampled_from((0.6, 1.0, 1.7)),
        "top_k": st.sampled_from((0, 0, 4, 20, 1000)),
        "top_p": st.sampled_from((1.0, 0.9, 0.5)),
        "min_p": st.sampled_from((0.0, 0.02, 0.3)),
        "seed": st.integers(0, 2**64 - 1),
    }
    return st.builds(SamplingParams, **common) | st.builds(SamplingParams, **common, **sampled)


@st.composite
def prompts(draw: st.DrawFn, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Prompts of which some begin like an earlier one, so that blocks are shared and rows differ only late, and some fill
    the model (96 tokens) nearly up."""
    found: list[list[int]] = []
    for _ in range(draw(st.integers(1, 7))):
        shares = bool(found) and draw(st.booleans())
        beginning = draw(st.sampled_from(found))[: draw(st.integers(0, 30))] if shares else []
        length = draw(st.integers(1, 40) | st.integers(1, 9) | st.integers(75, 95)) - len(beginning)
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        found.append(beginning + rng.integers(0, vocab_size, max(length, 1)).tolist())
    return tuple(map(tuple, found))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    model = draw(st.sampled_from(sorted(tiny.CONFIGS)))
    vocab_size, num_drafts, slots = tiny.CONFIGS[model]["vocab_size"], draw(st.sampled_from(KS)), draw(st.integers(1, 16))
    arrivals = st.integers(0, 25)
    asks = tuple(Ask(prompt, draw(params(vocab_size)), draw(arrivals)) for prompt in draw(prompts(vocab_size)))
    options = {
        "max_num_seqs": slots,
        "block_size": draw(st.sampled_from((1, 2, 3, 5, 8, 16))),
        "max_batched_tokens": slots * (num_drafts + 1) + draw(st.sampled_from((0, 1, 2, 7, 60))),
        "prefix_cache": draw(st.booleans()),
    }
    return Scene(model, draw(st.sampled_from(sorted(DEVICES | ORDERS))), num_drafts, options, asks)


def is_lossless(scene: Scene) -> None:
    _, outputs = scene.run()
    for ask, output in zip(scene.asks, outputs, strict=True):
        check(scene.model, scene.num_drafts, ask, output)


few = settings(max_examples=20)
many = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@few
@given(scenes())
def test_text_and_rounds_do_not_depend_on_how_a_request_is_served(scene: Scene) -> None:
    is_lossless(scene)


@pytest.mark.deep
@many
@given(scenes())
def test_text_and_rounds_do_not_depend_on_how_a_request_is_served_deep(scene: Scene) -> None:
    is_lossless(scene)


def mixed_asks(model: str, count: int) -> tuple[Ask, ...]:
    """Greedy and sampled requests of all lengths, one of them arriving with every second step."""
    vocab_size = tiny.CONFIGS[model]["vocab_size"]
    kinds = (SamplingParams(), *SAMPLED)
    prompts = [tuple((7 * i * i + 3 * j + 1) % vocab_size for j in range(1 + 5 * i % 23)) for i in range(count)]
    return tuple(Ask(prompt, replace(kinds[i % 4], max_new_tokens=18), 2 * i) for i, prompt in enumerate(prompts))


@pytest.mark.parametrize("device", DEVICES | ORDERS)
@pytest.mark.parametrize("num_drafts", KS)
def test_every_k_on_every_kind_of_device(device: str, num_drafts: int) -> None:
    """What the property above draws at random, once for each pair, with a batch that fills up and drains."""
    model = sorted(tiny.CONFIGS)[num_drafts % len(tiny.CONFIGS)]
    asks = mixed_asks(model, 8)
    is_lossless(Scene(model, device, num_drafts, {"max_num_seqs": 5, "block_size": 4}, asks))


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 9, 15, 16])
def test_every_batch_size(batch: int) -> None:
    """Around the tile of 8 rows in which the invariant products work."""
    is_lossless(Scene("shared", "reference", 2, {"max_num_seqs": batch}, mixed_asks("shared", batch)))


# -- the demo checkpoint ---------------------------------------------------------------------------
def serve_demo(device: str, num_drafts: int, num_tokens: int, **options: Any) -> tuple[list[Ask], list[RequestOutput]]:
    """The test prompts greedily, and the first of them sampled, arriving one by one."""
    served_by = engine(device=device, draft_tokens=num_drafts, **options)
    kinds = [(prompt, SamplingParams()) for prompt in PROMPTS]
    kinds += [(prompt, kind) for prompt, kind in zip(PROMPTS, SAMPLED, strict=False)]
    asks = [Ask(demo_prompt(text), replace(kind, max_new_tokens=num_tokens), 3 * i) for i, (text, kind) in enumerate(kinds)]
    outputs = drive(served_by, asks)
    served_by.close()
    return asks, outputs


def demo_is_lossless(device: str, num_drafts: int, num_tokens: int, **options: Any) -> None:
    asks, outputs = serve_demo(device, num_drafts, num_tokens, **options)
    for ask, output in zip(asks, outputs, strict=True):
        plain = solo("", 0, ask.prompt_ids, ask.params)
        assert (output.token_ids, output.text) == (plain.token_ids, plain.text)
        if ask.params.temperature == 0:
            greedy = greedy_rounds(oracle(""), ask.prompt_ids, num_drafts, num_tokens, ask.stop_ids)
            assert (output.token_ids, output.rounds) == (tuple(greedy.token_ids), tuple(greedy.rounds))
        elif num_drafts:
            assert output.accepted > 0, "no draft of a sampled request was accepted"


@pytest.mark.parametrize(
    ("device", "num_drafts", "options"),
    [
        ("lazy-0", 0, {"max_num_seqs": 3, "max_batched_tokens": 3}),
        ("reference", 1, {"max_num_seqs": 16, "block_size": 7}),
        ("lazy-1", 2, {"max_num_seqs": 1, "max_batched_tokens": 4}),
        ("lazy-2", 3, {"max_num_seqs": 5, "block_size": 1, "max_batched_tokens": 27}),
        ("reference", 4, {"max_num_seqs": 2, "prefix_cache": False}),
        ("lazy-1", 5, {"max_num_seqs": 9, "block_size": 64}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_demo_checkpoint(device: str, num_drafts: int, options: dict[str, Any]) -> None:
    demo_is_lossless(device, num_drafts, 24, **options)


@pytest.mark.deep
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_drafts", KS)
def test_demo_checkpoint_deep(device: str, num_drafts: int) -> None:
    for options in ({"max_num_seqs": 1}, {"max_num_seqs": 4, "block_size": 5, "max_batched_tokens": 29}, {"max_num_seqs": 16}):
        demo_is_lossless(device, num_drafts, 128, **options)


def test_demo_drafts_of_sampled_requests_are_accepted_as_the_oracle_accepts_them() -> None:
    for device in ("reference", "lazy-1"):
        asks, outputs = serve_demo(device, 3, 8)
        for ask, output in zip(asks[-3:], outputs[-3:], strict=True):
            check_against_oracle("", 3, ask, output)


@pytest.mark.deep
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_demo_drafts_of_sampled_requests_are_accepted_as_the_oracle_accepts_them_deep(num_drafts: int) -> None:
    for device in DEVICES:
        asks, outputs = serve_demo(device, num_drafts, 64)
        for ask, output in zip(asks[-3:], outputs[-3:], strict=True):
            check_against_oracle("", num_drafts, ask, output)


# -- the default mode ------------------------------------------------------------------------------
TIE = 1e-3


def count_ties(model: str, ask: Ask, output: RequestOutput) -> int:
    """Tokens that differ from the oracle's choice behind the very same prefix; each must be a tie of the oracle's.

    The prefix is the engine's own text, so a comparison goes on behind a tie instead of ending with it."""
    begin, known = len(ask.prompt_ids), [*ask.prompt_ids, *output.token_ids]
    judge = oracle(model)
    logits = judge.target_logits(judge.target_states(known[:-1])[begin - 1 :])
    ties = 0
    for position, (token_id, row) in enumerate(zip(output.token_ids, logits, strict=True), begin):
        chosen, clear = ask.sampling.choose(row, position, tolerance=TIE)
        if token_id != chosen:
            assert not clear, f"position {position} of {ask}: {token_id} instead of {chosen}, which is no tie"
            ties += 1
    return ties


@pytest.mark.parametrize(("num_drafts", "slots"), [(0, 8), (2, 1), (3, 8), (5, 16)])
def test_demo_prompts_have_no_tie_in_the_default_mode(num_drafts: int, slots: int) -> None:
    asks, outputs = serve_demo("reference", num_drafts, 48, invariant=False, max_num_seqs=slots)
    ties = [count_ties("", ask, output) for ask, output in zip(asks, outputs, strict=True)]
    assert ties == [0] * len(asks)


def only_ties_differ(scene: Scene) -> None:
    _, outputs = scene.run(invariant=False)
    for ask, output in zip(scene.asks, outputs, strict=True):
        if not ask.params.stop and output.token_ids:
            event(f"{count_ties(scene.model, ask, output)} ties in a request")


@few
@given(scenes())
def test_default_mode_differs_only_at_ties(scene: Scene) -> None:
    only_ties_differ(scene)


@pytest.mark.deep
@many
@given(scenes())
def test_default_mode_differs_only_at_ties_deep(scene: Scene) -> None:
    only_ties_differ(scene)


# -- these tests can fail --------------------------------------------------------------------------
def test_a_wrong_token_that_is_no_tie_is_found() -> None:
    ask = Ask(demo_prompt(PROMPTS[0]), SamplingParams(max_new_tokens=6))
    right = solo("", 0, ask.prompt_ids, ask.params)
    wrong: Sequence[int] = (*right.token_ids[:3], right.token_ids[3] + 1, *right.token_ids[4:])
    with pytest.raises(AssertionError, match="no tie"):
        count_ties("", ask, replace(right, token_ids=tuple(wrong)))


def test_a_draft_head_with_another_convention_shows_in_the_rounds_alone() -> None:
    """The demo's head run with its halves swapped (as DeepSeek's are): every token stays, nearly every draft goes."""
    ask = Ask(demo_prompt(PROMPTS[0]), SamplingParams(max_new_tokens=20))
    right = solo("", 3, ask.prompt_ids, ask.params)
    swapped = engine(draft_tokens=3)
    weight = swapped.runner.weights["mtp.0.proj"].array  # type: ignore[attr-defined]
    half = weight.shape[1] // 2
    weight[:] = weight[:, [*range(half, 2 * half), *range(half)]]
    wrong = drive(swapped, [ask])[0]
    assert wrong.token_ids == right.token_ids
    assert wrong.rounds != right.rounds
