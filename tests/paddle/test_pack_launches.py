"""The kernel pack `paddle/cuda` and the CUDA backend launch the same kernels, in the same sizes and dtypes, joined alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.paddle import forked, needs_paddle

TRACE = """
import json, sys
from types import SimpleNamespace
import polydraft_cuda.device, polydraft_cuda.probe, polydraft_paddle
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.engine import Engine
from polydraft.reference.device import ImmediateEvent, ReferenceDevice
from polydraft.program.program import lengths
from polydraft_cuda import paddle_pack
from tests.device.paper import PaperDevice

class Traced(PaperDevice):
    "A GPU on paper that notes what is launched; whatever else an engine asks goes to `host`."
    def __init__(self, host):
        super().__init__()
        self.host, self.spec, self.trace = host, "cuda:0", []
    def __getattr__(self, name):
        return getattr(self.__dict__["host"], name)
    def free_memory(self):
        return 1 << 40
    def function(self, source, name, **defines):
        def bind(grid, block, *arguments, **options):
            told = sorted(defines.items()), block, sorted(options.items()), [getattr(one, "dtype", "") for one in arguments]
            def launch(stream, n):
                size = grid(n) if callable(grid) else grid
                if all(size) if isinstance(size, tuple) else size:
                    self.trace.append((source.name, name, size, *told))
            return launch
        return SimpleNamespace(bind=bind, name=name, most_clusters=lambda block, shared, cluster: self.num_sms // cluster)

made = []
def alone(index, dtype, row_invariant, can_sleep, meets):
    made.append(Traced(ReferenceDevice("cpu")))
    return made[-1]
def guest(host, index):
    host.host_visible, host.event = False, lambda: ImmediateEvent(host.counters)
    made.append(Traced(host))
    return made[-1]
polydraft_cuda.probe.look = lambda: SimpleNamespace(reason="", devices=("cuda:0",))
polydraft_cuda.device.CudaDevice = alone
paddle_pack.GuestDevice, paddle_pack.index_of = guest, lambda spec: 0
polydraft_paddle.DTYPES["cpu"] = ("bf16",)
polydraft_paddle.COMPOSITES += polydraft_paddle.QUEUED_COMPOSITES
found = {}
for own in ({"backend": "cuda"}, {"backend": "paddle", "device": "cpu", "kernels": ("paddle/cuda",)}):
    options = {"graph": "off", "overlap": 0, "dtype": "bf16", "max_num_seqs": 32, "max_model_len": 64, "draft_tokens": 3}
    engine = Engine(EngineConfig.from_mapping({**options, **own}), checkpoint=RandomCheckpoint(sys.argv[1]))
    device, runner = made[-1], engine.runner
    for captured in (False, True):
        for seqs in (1, 8, 32):
            runner.context.real_slots = seqs
            for kind, parts in [*runner.programs.items(), ("", runner.writes)]:
                for part, program in parts.items():
                    device.trace.clear()
                    size = lengths(rows=4 * seqs, logit_rows=4 * seqs, seqs=seqs, runs=1)
                    for launch, unit in [call[1:] for call in program.recorded()] if captured else program.calls:
                        launch(device.stream, size[unit])
                    found.setdefault((captured, seqs, kind, part), []).append(list(device.trace))
for key, (wanted, got) in found.items():
    assert wanted and wanted == got, (key, [(a[1], b[1]) for a, b in zip(wanted, got) if a != b][:4], len(wanted), len(got))
eager, captured = ([each[1] for each in found[captured, 1, "greedy", "target"][1]] for captured in (False, True))
print(json.dumps([len(found), eager, captured]))
"""
SHAPE = {
    "architectures": ["MiMoForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 512, "max_position_embeddings": 4096,
    "rope_theta": 640000, "rms_norm_eps": 1e-05, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
"""One block that is wide enough for every way in which kernels become one launch."""


EXPERTS = {
    **SHAPE, "architectures": ["Glm4MoeForCausalLM"], "intermediate_size": 512, "moe_intermediate_size": 128,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 0, "attention_bias": True,
}  # fmt: skip
"""Routers with a selection bias, which kernels read as float32 beside activations of 16 bits."""


def traced(folder: Path, shape: Mapping[str, Any]) -> list[Any]:
    """How many programs launched alike, and which kernels a greedy target's of one request does, eager and captured."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings are not installed: pip install 'polydraft[cuda]'")
    file = folder / "block.json"
    file.write_text(json.dumps(shape))
    run = forked(TRACE, str(file))
    assert run.returncode == 0, run.stderr[-3000:]
    found: list[Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@needs_paddle
def test_every_program_launches_what_the_cuda_backend_launches(tmp_path: Path):
    """The pass decides by the buffers of the Paddle backend, its kernels are bound to addresses."""
    programs, eager, captured = traced(tmp_path, SHAPE)
    assert programs == 60
    assert {"rope_kv_write", "swiglu"} <= set(eager)
    assert not {"rope_kv_write", "swiglu"} & set(captured)


@needs_paddle
def test_experts_are_launched_with_the_dtypes_that_the_cuda_backend_gives_them(tmp_path: Path):
    assert "router" in traced(tmp_path, EXPERTS)[1]
