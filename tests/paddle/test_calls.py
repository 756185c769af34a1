"""How many kernels and copies a greedy decode step queues on a device of its own: what a place pays for, graphs or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.depth import deep
from tests.support.paddle import HAS_GRAPHS, forked, needs_device, script
from tools import make_checkpoint

BLOCKS = 36
"""Of the 7B shape's target; with K = 3 a step has 39, whose widths say nothing of the number of calls."""
WITH_3_2 = 1492
"""The emulated device has no fused rotation and attention with Paddle 3.2, and the norm of 3.2 does not write to a buffer."""
COUNT = """
import json, sys
from polydraft import LLM, SamplingParams
import polydraft_paddle_emu as emu
from polydraft_paddle import fused
model, device, dtype, *without = sys.argv[1:]
for operation in without:
    del fused.TRIALS[operation]
options = dict(draft_tokens=3, max_num_seqs=1, max_model_len=64, graph="off", overlap=0, dtype=dtype)
llm = LLM(backend="paddle", device=device, model=model, **options)

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
    ("device", "dtype", "without", "most"),
    [
        ("polyemu:0", "f32", (), 798),
        deep(("polyemu:0", "f32", ("attend",), 950)),  # as on a place that has no operation for attention
        deep(("polyemu:0?ops=xpu3", "f32", (), 930)),  # whose list has no norm of a sum, and no product with a bias into a buffer
        deep(("polyemu:0", "bf16", (), 895)),  # two conversions more in each block: rotation is in float32
    ],
)
def test_calls_of_a_greedy_decode_step_of_the_7b_shape(
    tmp_path: Path, device: str, dtype: str, without: tuple[str, ...], most: int
):  # fmt: skip
    """6,784 before kernels wrote where results belong and rows were laid out once a pass, 2,031 before heads were turned by one
    gather and state was computed slot by slot, 1,371 before rotation, attention and the norm of a sum were one operation each,
    962 before tables had a row behind them for what is looked up or written nowhere, 827 before windows were verified where they
    are committed, later drafts were made where the newest rows lie, and a draft's first pass took what the target's had found. In
    bfloat16 1,577 before fused operations were taken in 16 bits."""
    shape = {"num_hidden_layers": BLOCKS, "num_attention_heads": 8}
    model = make_checkpoint.make(tmp_path, make_checkpoint.FAMILIES["mimo"] | shape)
    run = forked(COUNT, str(model), device, dtype, *without)
    assert run.returncode == 0, run.stderr[-2000:]
    assert 700 < json.loads(run.stdout) <= (most if HAS_GRAPHS else WITH_3_2)


PLAIN = """
import json
from polydraft_paddle import fused
for name in set(fused.TRIALS) - {"norm"}:
    del fused.TRIALS[name]
from polydraft.backend import DeviceOptions
from polydraft.conformance.harness import check_kernel
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.inputs import default_cases
from polydraft_paddle import open_place, polydraft_init_forward_meta as init_meta
from polydraft_paddle.table import PaddleTable
device = open_place("polyemu:0", DeviceOptions())
table, wrong, count = PaddleTable(device), [], 0
fused_ones = "rope_kv_write paged_attention rms_norm residual_add+rms_norm swiglu linear argmax combine_draft_inputs"
for name in fused_ones.split():
    kernel = COMPOSITES.get(name) or REGISTRY[name]
    for case in default_cases(kernel, 1):
        outcome, count = check_kernel(kernel, case, device, table, init_meta=init_meta), count + 1
        wrong += [] if outcome.ok else [outcome.describe()]
print(json.dumps([count, wrong]))
"""


@pytest.mark.deep
@needs_device
def test_what_a_place_has_not_in_one_operation_is_done_with_several():
    run = script(PLAIN)
    assert run.returncode == 0, run.stderr[-2000:]
    count, wrong = json.loads(run.stdout)
    assert count > 80
    assert wrong == []
