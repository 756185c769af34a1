"""What the XPU plugin has that the upstream platform lacks, on the emulated Paddle device: sampling on the device, graphs of
prefill alone, overlap and log probabilities, all together and as the reference has them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.paddle import needs_graphs, script

RUN = """
import json
from polydraft import LLM, SamplingParams

options = dict(draft_tokens=3, max_num_seqs=2, max_model_len=64, logprobs=2)
sampled = SamplingParams(max_new_tokens=7, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3, logprobs=2)
greedy = SamplingParams(max_new_tokens=7, ignore_eos=True, logprobs=2)

def answer(llm):
    outputs = llm.generate(["def fibonacci(n):"] * 2, [sampled, greedy])
    return [[list(one.token_ids), list(one.rounds), [token.logprob for token in one.tokens]] for one in outputs]

def uploads(llm, params):
    "Uploads of each step behind that of the prompt."
    engine, found = llm.engine, []
    engine.add("x", params)
    engine.step()
    while engine.has_work:
        before = engine.device.counters.uploads
        engine.step()
        found.append(engine.device.counters.uploads - before)
        engine.poll()
    return found

reference = LLM(backend="reference", **options)
xpu = LLM(backend="xpu", device="polyemu:0", graph="prefill", graph_sizes=(32,), overlap=1, **options)
said = [answer(reference), answer(xpu)]
replays = xpu.engine.runner.graphs.counters.replayed_steps
print(json.dumps({"said": said, "replays": replays, "uploads": [uploads(xpu, greedy), uploads(xpu, sampled)]}))
xpu.engine.close()
"""


@needs_graphs
@pytest.mark.deep
def test_prefill_graphs_overlap_log_probabilities_and_sampling_on_the_device():
    run = script(RUN)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    for wanted, got in zip(*found["said"], strict=True):
        assert got[:2] == wanted[:2]
        assert np.allclose(got[2], wanted[2], atol=1e-4)
    assert found["replays"] > 0
    for steps in found["uploads"]:  # of a greedy request, and of one that samples
        assert len(steps) > 2
        assert not any(steps[1:]), "the first step is told of the request; from then on nothing goes up"
