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
"""The emulated device has no fused rotation and attention with Paddle 3.2, and the norm of 3.2 does not write to a buffer."""
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
        ("polyemu:0", 1003),
        deep(("polyemu:0?ops=xpu3", 1117)),  # whose list has no norm of a sum, and no product with a bias that writes to a buffer
    ],
)
def test_calls_of_a_greedy_decode_step_of_the_7b_shape(tmp_path: Path, device: str, most: int):
    """6,784 before kernels wrote where results belong and rows were laid out once a pass, 2,031 before heads were turned by one
    gather and state was computed slot by slot, 1,371 before rotation, attention and the norm of a sum were one operation each."""
    shape = {"num_hidden_layers": BLOCKS, "num_attention_heads": 8}
    model = make_checkpoint.make(tmp_path, make_checkpoint.FAMILIES["mimo"] | shape)
    run = script(COUNT, str(model), device)
    assert run.returncode == 0, run.stderr[-2000:]
    assert 800 < json.loads(run.stdout) <= (most if HAS_GRAPHS else WITH_3_2)
