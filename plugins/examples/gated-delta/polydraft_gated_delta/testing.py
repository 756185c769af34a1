"""A random checkpoint of the family, and the model recomputed naively: what tests need besides the package.

`python -m polydraft_gated_delta.testing DIR` writes the checkpoint. Shapes, names and equations are written out here a second
time; of polydraft only the names of weights and attention are taken, from the recomputing oracle of its conformance kit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.conformance.oracle.checkpoints import tensor_shapes, write_checkpoint
from polydraft.conformance.oracle.model import OracleModel
from polydraft.conformance.probe import imitate_target, random_tensor, tokenizer_json
from polydraft.device import Array
from polydraft.models import Checkpoint, FamilyRegistry, Mixer, load_weights
from polydraft_gated_delta.family import GATED_DELTA, GatedDelta

HEADS, DK, DV = 2, 6, 10
CONFIG: dict[str, Any] = {
    "architectures": ["GatedDeltaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 4, "full_attention_interval": 3,
    "linear_num_heads": HEADS, "linear_key_head_dim": DK, "linear_value_head_dim": DV, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": 64, "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "tie_word_embeddings": False, "max_position_embeddings": 128, "eos_token_id": 0,
    "hidden_act": "silu",
}  # fmt: skip


def write(directory: Path, *, num_layers: int = 4) -> Path:
    """Write a checkpoint of random weights. Layer 3 is attention, the others are gated delta, and the MTP layer is a disturbed
    copy of the last one: of attention with 3 layers, of gated delta with 4."""
    config = {**CONFIG, "num_hidden_layers": num_layers}
    hidden, rng = CONFIG["hidden_size"], np.random.default_rng(2)
    linear = {
        "q_proj.weight": (HEADS * DK, hidden), "k_proj.weight": (HEADS * DK, hidden), "v_proj.weight": (HEADS * DV, hidden),
        "a_proj.weight": (HEADS, hidden), "b_proj.weight": (HEADS, hidden), "a_proj.bias": (HEADS,), "b_proj.bias": (HEADS,),
        "o_proj.weight": (hidden, HEADS * DV),
    }  # fmt: skip
    shapes = tensor_shapes(config)
    layers = [f"model.layers.{i}." for i in range(num_layers)] + ["model.mtp_layers.0."]
    for index, layer in enumerate(layers):
        if min(index, num_layers - 1) % 3 != 2:
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith(f"{layer}self_attn")}
            shapes |= {f"{layer}linear_attn.{name}": shape for name, shape in linear.items()}
    tensors = {name: random_tensor(name, shape, rng, last=layers[-2] in name) for name, shape in shapes.items()}
    for name in (name for name in tensors if name.endswith("a_proj.bias")):
        tensors[name] += 3  # a long memory: alpha is mostly near 1
    imitate_target(tensors, config, rng, embedding_first=False)
    write_checkpoint(directory, config, tensors)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(CONFIG["vocab_size"])))
    return directory


class NaiveModel(OracleModel):
    """The target in float64, all rows of all layers from the beginning. `states` has the state of each gated delta layer behind
    every row of the text that was computed last: [n, heads, DV, DK], by the layer's prefix."""

    def __init__(self, directory: Path) -> None:
        registry = FamilyRegistry()
        registry.register(GATED_DELTA)
        with Checkpoint(directory) as checkpoint:
            description, table = registry.describe(checkpoint)
            super().__init__(description, dict(load_weights(checkpoint, description, table)))
        self.states: dict[str, Array] = {}

    def mix(self, x: Array, mixer: Mixer, prefix: str) -> Array:
        """The rule with a whole state for every row."""
        if not isinstance(mixer, GatedDelta):
            return super().mix(x, mixer, prefix)
        q, k, v = np.split(x @ self.w[f"{prefix}delta_qkv"].T, [HEADS * DK, 2 * HEADS * DK], axis=1)
        gates = 1 / (1 + np.exp(-(x @ self.w[f"{prefix}delta_gates"].T + self.w[f"{prefix}delta_gates_bias"])))
        state, states, recalled = np.zeros((HEADS, DV, DK)), [], []
        for row, (alpha, beta) in enumerate(zip(gates[:, :HEADS], gates[:, HEADS:], strict=True)):
            query, key = (_unit(part[row].reshape(HEADS, DK)) for part in (q, k))
            forget = np.eye(DK) - beta[:, None, None] * np.einsum("hi,hj->hij", key, key)
            write = beta[:, None, None] * np.einsum("hi,hj->hij", v[row].reshape(HEADS, DV), key)
            state = state @ (alpha[:, None, None] * forget) + write
            states.append(state)
            recalled.append(np.einsum("hij,hj->hi", state, query).ravel())
        self.states[prefix.removesuffix(".")] = np.array(states)
        return np.asarray(np.array(recalled) @ self.w[f"{prefix}delta_o"].T)


def _unit(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).sum(axis=1, keepdims=True) + 1e-6))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
