"""Decoder blocks that compute themselves, among the weights of a model: the same tokens and rounds, over core's rows and KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, SamplingParams
from polydraft.device import Array
from polydraft.errors import CapabilityError
from polydraft.models import Checkpoint
from polydraft.models.block import BlockCall
from tests.support import tiny

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], list(range(1, 21))]


class NumpyBlock:
    """A block of MiMo's family in NumPy, with the weights of a checkpoint."""

    nbytes = 0

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.calls = 0
        self._tensor: Callable[[str], Array] = lambda name: checkpoint.tensor(prefix + name)

    def bind(self, call: BlockCall) -> Callable[[Any, int], None]:
        rotate_and_store, attend = call.attention()
        x, qkv, attended = (b.host_array for b in (call.x, call.scratch.qkv, call.scratch.attended))  # type: ignore[attr-defined]
        names = ("q", "k", "v")
        weight = np.concatenate([self._tensor(f"self_attn.{n}_proj.weight") for n in names])
        bias = np.concatenate([self._tensor(f"self_attn.{n}_proj.bias") for n in names])
        o, gate, up, down = map(
            self._tensor, ("self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
        )
        norms = self._tensor("input_layernorm.weight"), self._tensor("post_attention_layernorm.weight")

        def norm(rows: Array, gain: Array) -> Array:
            return np.asarray(rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + call.norm.eps) * gain)

        def launch(stream: Any, n: int) -> None:
            self.calls += 1
            qkv[:n] = norm(x[:n], norms[0]) @ weight.T + bias
            rotate_and_store(stream, n)
            attend(stream, n)
            x[:n] += attended[:n] @ o.T
            y = norm(x[:n], norms[1])
            gated = y @ gate.T
            x[:n] += (gated / (1 + np.exp(-gated)) * (y @ up.T)) @ down.T

        return launch


class CustomBlocks(Checkpoint):
    """A checkpoint some of whose blocks compute themselves, by prefix there and here."""

    def __init__(self, path: Path, prefixes: dict[str, str]) -> None:
        super().__init__(path)
        self.blocks = {name: NumpyBlock(self, prefix) for name, prefix in prefixes.items()}

    def custom_blocks(self) -> dict[str, Any]:
        return self.blocks


@pytest.mark.parametrize(
    "prefixes",
    [
        {"layers.1": "model.layers.1."},
        {"mtp.0": "model.mtp_layers.0."},
        {"layers.0": "model.layers.0.", "layers.1": "model.layers.1.", "mtp.0": "model.mtp_layers.0."},
    ],
    ids="+".join,
)
def test_tokens_and_rounds_are_the_same(prefixes: dict[str, str]):
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    model = CustomBlocks(tiny.checkpoint("deep"), prefixes)
    wanted = LLM(model=str(tiny.checkpoint("deep")), backend="reference", draft_tokens=3).generate(PROMPTS, params)
    llm = LLM(checkpoint=model, backend="reference", draft_tokens=3)
    got = llm.generate(PROMPTS, params)
    assert [(g.token_ids, g.rounds) for g in got] == [(w.token_ids, w.rounds) for w in wanted]
    assert all(block.calls for block in model.blocks.values())
    loaded = set(llm.engine.runner.memory.weights)
    assert set(prefixes) <= loaded
    assert not [name for name in loaded for prefix in prefixes if name.startswith(f"{prefix}.") and name.endswith("qkv")]
    assert {"mtp.0.proj", "mtp.0.hid_norm"} <= loaded, "what stands around an MTP block"
    with pytest.raises(CapabilityError, match=r"of this model compute themselves and keep their own weights"):
        llm.engine.update_weights(tiny.checkpoint("deep"))
