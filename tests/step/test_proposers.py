"""Proposers that need no model: the built-in n-gram proposer, and the example plugin, which must stay as short as it claims.

Whoever drafts, the text is the one of plain decoding; only the rounds differ.
"""

from __future__ import annotations

from typing import Any

import pytest

from polydraft import LLM, SamplingParams
from tests.support.project import ROOT

EXAMPLE = ROOT / "plugins" / "lookup_proposer.py"
PROMPTS = ["def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n", "for i in range(10):\n    print(i)\n", "x = [1, 2, 3, 1, 2"]
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=3)


def generate(params: SamplingParams, **options: Any) -> list[Any]:
    llm = LLM(**{"backend": "reference", "invariant": True, "max_num_seqs": 2, **options})
    try:
        return llm.generate(PROMPTS, params)
    finally:
        llm.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    "options",
    [
        {"proposer": "ngram", "draft_tokens": 1},
        {"proposer": "ngram", "draft_tokens": 4, "overlap": 1, "block_size": 4},
        {"proposer": "lookup", "draft_tokens": 4, "plugins": (str(EXAMPLE),)},
    ],
    ids=["ngram-1", "ngram-4", "example"],
)
def test_text_is_that_of_plain_decoding(params: SamplingParams, options: dict[str, Any]) -> None:
    plain = generate(params, draft_tokens=0)
    drafted = generate(params, **options)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert sum(o.accepted for o in drafted) > 0, "nothing was ever accepted, so this shows nothing"


def test_the_example_accepts_drafts_that_a_longer_run_would_not_make() -> None:
    short = generate(GREEDY, proposer="lookup", draft_tokens=4, plugins=(str(EXAMPLE),))
    long = generate(GREEDY, proposer="ngram", draft_tokens=4)
    assert sum(o.drafted for o in short) > sum(o.drafted for o in long)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 100
