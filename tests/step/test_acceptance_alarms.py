"""Alarms of a whole engine: a proposer that lost its weights, graphs that draft wrongly, and a text that loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, SamplingParams
from polydraft.demo import demo_model_path
from polydraft.host import acceptance_alarms

LONG = SamplingParams(max_new_tokens=65, ignore_eos=True, temperature=0.7)
PROMPTS = [
    "def add(a, b):",
    "class Stack:",
    "import os",
    "for i in range(3):",
    "x = [1, 2",
    "while True:",
    "def read(f):",
    "if a:",
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, for short runs."""
    monkeypatch.setattr(acceptance_alarms, "BLOCK", 64)


def served(llm: LLM) -> dict[str, int]:
    """The alarms behind a run."""
    llm.generate(PROMPTS, [replace(LONG, seed=seed) for seed in range(len(PROMPTS))])
    return {kind: count for kind, count in llm.engine.alarms.count.items() if count}


def test_a_proposer_whose_weights_were_lost(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(backend="reference", draft_tokens=2, max_num_seqs=8)
    assert served(llm) == {}
    rng = np.random.default_rng(3)
    for name in ("mtp.0.proj", "mtp.0.qkv", "mtp.0.o", "mtp.0.gate_up", "mtp.0.down"):
        weight: Any = llm.engine.weights.bound[name]
        weight.array[...] = rng.standard_normal(weight.array.shape) * weight.array.std()
    assert served(llm) == {"fall": 1}
    assert "see that the proposer's were, too" in caplog.text
    llm.close()


def test_what_graphs_drafted_with_other_weights_is_forgotten() -> None:
    llm = LLM(draft_tokens=2, max_num_seqs=4, graph="decode")
    llm.generate(PROMPTS, [replace(LONG, max_new_tokens=20 + 6 * place) for place in range(len(PROMPTS))])
    assert llm.engine.alarms._pairs
    llm.update_weights(demo_model_path())
    assert not llm.engine.alarms._pairs
    llm.close()


@pytest.mark.deep
def test_graphs_that_draft_from_wrong_rows(caplog: pytest.LogCaptureFixture) -> None:
    """On a device with queues, steps without a prompt are replayed, and whatever a graph drafted is another request's."""
    llm = LLM(backend="reference", device="queued", draft_tokens=2, max_num_seqs=4, graph="decode")
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    replay, drafts = graphs.replay, llm.engine.runner.memory.buffers["drafts"]

    def wrongly(*args: Any) -> None:
        replay(*args)
        llm.engine.device.synchronize()
        drafts.host_array[...] = np.roll(drafts.host_array, 1, axis=0)  # type: ignore[attr-defined]

    graphs.replay = wrongly  # type: ignore[assignment,method-assign]
    many = [replace(LONG, seed=place, max_new_tokens=20 + place) for place in range(4 * len(PROMPTS))]
    llm.generate(PROMPTS * 4, many)  # prompts arrive one by one, beside texts that go on
    found = llm.engine.alarms.count
    assert found["graphs"] == 1
    assert "serve with --graph off" in caplog.text
    llm.close()


@pytest.mark.deep  # the unit tests of alarms have loops
def test_a_text_that_loops(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(draft_tokens=2, max_num_seqs=2)
    loop = SamplingParams(max_new_tokens=250, ignore_eos=True, logit_bias={llm.engine.tokenizer.encode("a")[-1]: 100.0})
    llm.generate(["x"], loop)
    assert {kind: count for kind, count in llm.engine.alarms.count.items() if count} == {"loop": 1}
    assert "repeats its last 1 tokens" in caplog.text
    llm.close()
