"""A Paddle `nn.Layer` as a model: a Qwen2-style layer, as target, as MTP block and as both, says what the reference says."""

from __future__ import annotations

from pathlib import Path

import pytest

from polydraft.conformance.oracle.checkpoints import write_checkpoint
from polydraft.demo import demo_model_path
from tests.support.paddle import forked, needs_graphs, needs_paddle

LAYER = """
import json, sys
import numpy as np
from polydraft_paddle.installation import import_paddle
import_paddle()
import paddle
paddle.set_device("cpu")
from paddle import nn
from polydraft import LLM, SamplingParams
from polydraft.models.checkpoint import Checkpoint
from polydraft_paddle.layers import LayerModel

class Norm(nn.Layer):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = self.create_parameter([size]), eps

    def forward(self, x):
        return x * paddle.rsqrt((x * x).mean(axis=-1, keepdim=True) + self.eps) * self.weight

class Attention(nn.Layer):
    def __init__(self, c):
        super().__init__()
        q, kv = (c[f"num_{name}_heads"] * c["head_dim"] for name in ("attention", "key_value"))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(c["hidden_size"], n) for n in (q, kv, kv))
        self.o_proj = nn.Linear(q, c["hidden_size"], bias_attr=False)

class Mlp(nn.Layer):
    def __init__(self, c):
        super().__init__()
        h, i = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj = (nn.Linear(h, i, bias_attr=False) for _ in range(2))
        self.down_proj = nn.Linear(i, h, bias_attr=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

class Block(nn.Layer):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.calls = 0

    def forward(self, x, positions, attend):
        self.calls += 1
        assert positions.shape[0] == x.shape[0]
        a, y = self.self_attn, self.input_layernorm(x)
        x = x + a.o_proj(attend(a.q_proj(y), a.k_proj(y), a.v_proj(y)))
        return x + self.mlp(self.post_attention_layernorm(x))

class MtpBlock(Block):
    def __init__(self, c):
        super().__init__(c)
        h, eps = c["hidden_size"], c["rms_norm_eps"]
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (Norm(h, eps) for _ in range(3))
        self.input_proj = nn.Linear(2 * h, h, bias_attr=False)

class Body(nn.Layer):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.LayerList([Block(c) for _ in range(c["num_hidden_layers"])])
        self.mtp_layers = nn.LayerList([MtpBlock(c)])
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])

class Model(nn.Layer):
    def __init__(self, c):
        super().__init__()
        self.model, self.lm_head = Body(c), nn.Linear(c["hidden_size"], c["vocab_size"], bias_attr=False)

folder, device, graph = sys.argv[1:4]
options = dict(draft_tokens=3, max_num_seqs=2, max_model_len=64, block_size=16, num_blocks=8)
prompts = [[5, 9, 3, 37, 5, 9], [8, 1, 2]]
params = SamplingParams(max_new_tokens=14, ignore_eos=True)
wanted = LLM(model=folder, backend="reference", **options).generate(prompts, params)
with Checkpoint(folder) as checkpoint:
    model = Model(checkpoint.config)
    for name, parameter in model.named_parameters():
        value = checkpoint.tensor(name)
        parameter.set_value(value.T if value.ndim == 2 and "embed" not in name else value)

def run(mode):
    blocks = {f"layers.{i}": block for i, block in enumerate(model.model.layers)} if mode != "draft" else {}
    if mode != "target":
        blocks["mtp.0"] = model.model.mtp_layers[0]
    llm = LLM(backend="paddle", device=device, checkpoint=LayerModel(folder, model, blocks), graph=graph, **options)
    got = llm.generate(prompts, params)
    assert [(g.token_ids, g.rounds) for g in got] == [(w.token_ids, w.rounds) for w in wanted]
    assert all(block.calls for block in blocks.values())
    names = [entry.contract for program in llm.engine.runner.programs["greedy"].values() for entry in program.entries]
    print(mode, names.count("custom_block"), llm.engine.device.counters.graph_replays > 0)
    return llm

for mode in sys.argv[4:]:
    llm = run(mode)
    try:
        llm.engine.update_weights(folder)
    except Exception as error:
        print(error)
    llm.engine.device.close()
try:
    LLM(backend="reference", checkpoint=LayerModel(folder, model, {"layers.1": model.model.layers[1]}), **options)
except Exception as error:
    print(error)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("layers") / "tiny")
    (path / "tokenizer.json").write_bytes((demo_model_path() / "tokenizer.json").read_bytes())
    return path


def lines(folder: Path, *arguments: str) -> list[str]:
    run = forked(LAYER, str(folder), *arguments)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.strip().splitlines()


@needs_paddle
def test_layers_say_what_the_reference_says(folder: Path):
    said = lines(folder, "cpu", "off", "target", "draft", "both")
    own = " of this model compute themselves and keep their own weights; change these there, or start another engine"
    assert said[:6] == [
        "target 2 False",
        "layers.0, layers.1" + own,
        "draft 3 False",  # K passes of one block
        "mtp.0" + own,
        "both 5 False",
        "layers.0, layers.1, mtp.0" + own,
    ]
    assert said[6] == (
        "block layers.1 of this model is a Paddle layer, got the device cpu of another library; name the backend paddle or xpu"
    )


@pytest.mark.deep
@needs_graphs
def test_layers_are_captured_in_a_graph(folder: Path):
    assert lines(folder, "polyemu:0", "decode", "both")[0] == "both 5 True"
