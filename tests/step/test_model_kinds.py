"""Models with experts, scaled rotation and biases: greedy texts and rounds are the recomputing oracle's, for every number of
drafts and on every backend."""

from __future__ import annotations

from typing import Any

import pytest

from polydraft import LLM, SamplingParams
from tests.oracle import greedy_rounds
from tests.support import tiny
from tests.support.depth import crossed
from tests.support.runs import Ask, drive, oracle

MODELS = ("sparse-ernie", "sparse-glm", "stretched-dynamic", "stretched-llama3", "stretched-yarn", "with-biases", "with-windows")
BACKENDS: tuple[dict[str, Any], ...] = (
    {"backend": "reference", "invariant": True},
    {"backend": "reference", "device": "queued", "graph": "decode", "overlap": 1},
    {"backend": "cpu"},
    {"backend": "emulator", "overlap": 2},
)
PROMPTS = ((3, 1, 4, 1, 5), (9, 2, 6), (5, 35, 8, 9, 7, 9, 3, 2, 3))
CLOSE = 1e-3
"""Logits: an engine in float32 may choose otherwise where the best two are nearer."""


@pytest.mark.parametrize(("num_drafts", "options", "model"), crossed(13, range(6), BACKENDS, MODELS), ids=str)
def test_texts_and_rounds_are_the_oracles(model: str, options: dict[str, Any], num_drafts: int) -> None:
    llm = LLM(
        model=str(tiny.checkpoint(model)), plugins=tiny.PLUGINS, draft_tokens=num_drafts, max_num_seqs=3, block_size=4, **options
    )
    asks = [Ask(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True), place) for place, prompt in enumerate(PROMPTS)]
    accepted = 0
    for ask, output in zip(asks, drive(llm.engine, asks), strict=True):
        wanted = greedy_rounds(oracle(model), ask.prompt_ids, num_drafts, 20, ask.stop_ids)
        assert min(wanted.margins) > CLOSE
        assert (output.token_ids, output.rounds) == (tuple(wanted.token_ids), tuple(wanted.rounds))
        accepted += sum(output.rounds)
    assert accepted or not num_drafts, "no draft is ever accepted"
    llm.engine.close()
