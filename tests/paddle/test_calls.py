"""How many kernels and copies a greedy decode step queues on a device of its own: what a place pays for, graphs or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.depth import deep
from tests.support.paddle import HAS_GRAPHS, needs_device, script
from tools import make_checkpoint

BLOCKS = 36
"""Of the 7B shape's target; with K = 3 a step has 39, whose widths say nothing of the number of calls."""
WITH_3_2 = 1492
"""Paddle 3.2 has no product with a bias, and its norm, which the list of an XPU has by that name, does not write to a buffer."""
COUNT = """
import json, sys
from polydraft import LLM, SamplingParams
import polydraft_paddle_emu as emu
model, device = sys.argv[1:]
llm = LLM(backend="paddle", device=device, model=model, draft_tokens=3, max_num_seqs=1, max_model_len=64, graph="off", overlap=0)

def run(tokens):
    before = emu.counter("kernels") + emu.counter("copies")
    out = llm.generate([[3, 1, 4]], SamplingParams(max_new_tokens=tokens, ignore_eos=True))[0]
    return emu.counter("kernels") + emu.counter("copies") - before, len(out.rounds)

run(8)  # constants are made
(few, short), (many, long) = run(4), run(12)
print(json.dumps((many - few) / (long - short)))
llm.engine.close()
"""


@needs_device
@pytest.mark.parametrize(
    ("device", "most"),
    [
        ("polyemu:0", 1371),
        deep(("polyemu:0?ops=xpu3", 1586)),  # whose list has no fused norm of Paddle 3.3
    ],
)
def test_calls_of_a_greedy_decode_step_of_the_7b_shape(tmp_path: Path, device: str, most: int):
    """6,784 before kernels wrote where results belong and rows were laid out once a pass, 2,031 before heads were turned by one
    gather and state was computed slot by slot."""
    shape = {"num_hidden_layers": BLOCKS, "num_attention_heads": 8}
    model = make_checkpoint.make(tmp_path, make_checkpoint.FAMILIES["mimo"] | shape)
    run = script(COUNT, str(model), device)
    assert run.returncode == 0, run.stderr[-2000:]
    assert 1000 < json.loads(run.stdout) <= (most if HAS_GRAPHS else WITH_3_2)
