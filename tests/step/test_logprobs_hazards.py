"""Log probabilities and constraints under the hazard checker: every access is declared and ordered, at every depth."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from polydraft import LLM, SamplingParams
from tests.support import tiny
from tests.support.depth import among
from tests.support.emulator import Emulator
from tests.support.runs import Ask, drive


@pytest.mark.parametrize(("depth", "graph"), among([(1, "decode"), (2, "off")], itertools.product([0, 1, 2], ["off", "decode"])))
def test_nothing_is_unordered_or_undeclared(depth: int, graph: str) -> None:
    options: dict[str, Any] = {"logprobs": 3, "constraints": depth < 2, "think_end_ids": (11, 12)}
    llm = LLM(
        model=str(tiny.checkpoint("narrow")), plugin=Emulator(f"emulator:0?seed={depth}"), sanitize=True, overlap=depth,
        graph=graph, draft_tokens=2, max_num_seqs=3, **options,
    )  # fmt: skip
    asks = [
        Ask((5, 9, 33), SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1)),
        Ask((7, 7), SamplingParams(max_new_tokens=7, ignore_eos=True), arrival=1),
        Ask((1,), SamplingParams(max_new_tokens=9, logprobs=0, temperature=0.8, seed=1, frequency_penalty=0.5), arrival=2),
    ]
    if depth < 2:
        asks.append(Ask((4, 4), SamplingParams(max_new_tokens=12, thinking_limit=3), arrival=3))
    outputs = drive(llm.engine, asks)
    assert all(output.finish_reason in ("length", "stop") for output in outputs)
    assert llm.engine.hazards == ()
    llm.close()
