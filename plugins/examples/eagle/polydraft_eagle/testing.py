"""Draft models and targets to try things with, and their drafts worked out a second time: naive NumPy, without a cache.

The tests call it; as a program (`python -m polydraft_eagle.testing DIR [TARGET]`) it writes a random draft model. It shares no
arithmetic and no names with the rest of the package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.conformance.oracle.checkpoints import tensor_shapes, write_checkpoint
from polydraft.conformance.probe import tokenizer_json
from polydraft.demo import demo_model_path
from polydraft.models import Checkpoint

Array = NDArray[Any]
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": 48, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
    "tie_word_embeddings": False, "max_position_embeddings": 96, "eos_token_id": 0, "hidden_act": "silu",
}  # fmt: skip
SHARED = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "rope_theta",
    "rms_norm_eps",
)  # fmt: skip
"""What a random draft model has from its target's config.json."""
_CYCLE = np.random.default_rng(1).permutation(TARGET["vocab_size"])
SUCCESSOR = np.roll(_CYCLE, -1)[np.argsort(_CYCLE)]
"""[V]: the token that follows each one, where nothing disturbs the target that `write_pair` writes."""


def draft_model_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a draft model's checkpoint."""
    h, i = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q),
        "post_attention_layernorm": (h,), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i),
    }  # fmt: skip
    return {"fc.weight": (h, 2 * h), "fc.bias": (h,), **{f"layers.0.{name}.weight": shape for name, shape in layer.items()}}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], noise: float, seed: int) -> dict[str, Array]:
    """Norms around 1, everything else around 0."""
    rng = np.random.default_rng(seed)
    drawn = {name: noise * rng.standard_normal(shape) / np.sqrt(shape[-1]) for name, shape in shapes.items()}
    return {name: (value + ("norm" in name)).astype(np.float32) for name, value in drawn.items()}


def write_draft_model(directory: Path, target: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random draft model of the target in `target`."""
    of_target = json.loads((target / "config.json").read_text())
    config = {**{key: of_target[key] for key in SHARED}, "architectures": ["EagleLlamaForCausalLM"], **changes}
    return write_checkpoint(directory, config, random_tensors(draft_model_shapes(config), 1.0, seed))


def write_pair(directory: Path, noise: float = 0.0, seed: int = 0) -> tuple[Path, Path]:
    """A target that goes from each token to its successor, and a draft model that knows it: its layer takes a state from a token
    to the successor. `noise` is added to every weight of both: at 0 each draft is right, at 0.02 about every other one."""
    size = TARGET["hidden_size"]
    unit = np.eye(size)
    follow = unit[:, np.argsort(SUCCESSOR)].T  # column t has its 1 in row SUCCESSOR[t]
    gated = np.sqrt(size) / (1 + np.exp(-np.sqrt(size)))  # silu(x) of the one element that a normed unit vector has
    planted = {
        "fc.weight": np.concatenate([0 * unit, unit], axis=1), "lm_head.weight": follow,
        "layers.0.mlp.gate_proj.weight": unit, "layers.0.mlp.up_proj.weight": unit,
        "layers.0.mlp.down_proj.weight": (follow - unit) / gated, "model.embed_tokens.weight": unit,
    }  # fmt: skip
    target, draft_model = directory / "target", directory / "draft-model"
    write_checkpoint(target, TARGET, _planted(random_tensors(tensor_shapes(TARGET), noise, seed), planted))
    (target / "tokenizer.json").write_text(json.dumps(tokenizer_json(TARGET["vocab_size"])))
    config = {**TARGET, "architectures": ["EagleLlamaForCausalLM"]}
    write_checkpoint(draft_model, config, _planted(random_tensors(draft_model_shapes(config), noise, seed), planted))
    return target, draft_model


def _planted(tensors: Mapping[str, Array], planted: Mapping[str, Array]) -> dict[str, Array]:
    return {name: value + np.float32(planted.get(name, 0)) for name, value in tensors.items()}


class Naive:
    """Both models in float64, from the files. Every call computes all rows of all layers."""

    def __init__(self, target: Path, draft_model: Path) -> None:
        self._models = [self._read(path) for path in (target, draft_model)]

    @staticmethod
    def _read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
        with Checkpoint(path) as checkpoint:
            tensors = {name.removesuffix(".weight"): checkpoint.tensor(name).astype(np.float64) for name in checkpoint.names()}
            return checkpoint.config, tensors

    def drafts(self, token_ids: Sequence[int], num_drafts: int) -> tuple[list[int], float]:
        """Greedy drafts behind a text whose last token the target has not computed, and how far the best logits are apart."""
        (config, target), (own, draft) = self._models
        x = target["model.embed_tokens"][list(token_ids[:-1])]
        for i in range(config["num_hidden_layers"]):
            x = _layer(config, target, f"model.layers.{i}.", x, _norm(config, x, target[f"model.layers.{i}.input_layernorm"]))
        fed = _norm(config, x, target["model.norm"])
        next_ids, apart = list(token_ids[1:]), np.inf
        for _ in range(num_drafts):
            x = np.concatenate([target["model.embed_tokens"][next_ids], fed], axis=1) @ draft["fc"].T + draft["fc.bias"]
            last = _layer(own, draft, "layers.0.", x, x)[-1:]
            logits = (last @ target["lm_head"].T)[0]
            second, first = np.sort(logits)[-2:]
            apart = min(apart, first - second)
            next_ids.append(int(np.argmax(logits)))
            fed = np.concatenate([fed, last])
        return next_ids[len(next_ids) - num_drafts :], float(apart)


def _norm(config: Mapping[str, Any], x: Array, gain: Array) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + config["rms_norm_eps"]) * gain)


def _layer(config: Mapping[str, Any], w: Mapping[str, Array], prefix: str, x: Array, seen: Array) -> Array:
    """A decoder layer over the residual stream `x` [n, H], whose attention is computed from `seen`."""
    n, d = len(x), config["head_dim"]
    q, k, v = ((seen @ w[f"{prefix}self_attn.{name}_proj"].T).reshape(n, -1, d).swapaxes(0, 1) for name in "qkv")
    angle = np.arange(n)[:, None] * config["rope_theta"] ** (-np.arange(0, d, 2) / d)
    turn = np.exp(1j * angle)
    q, k = (_rotated(heads, turn) for heads in (q, k))
    k, v = (np.repeat(heads, len(q) // len(heads), axis=0) for heads in (k, v))
    scores = np.where(np.tri(n, dtype=bool), q @ k.swapaxes(1, 2) / np.sqrt(d), -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    mixed = (weights / weights.sum(axis=2, keepdims=True) @ v).swapaxes(0, 1).reshape(n, -1)
    x = x + mixed @ w[f"{prefix}self_attn.o_proj"].T
    normed = _norm(config, x, w[f"{prefix}post_attention_layernorm"])
    gate, up = (normed @ w[f"{prefix}mlp.{name}_proj"].T for name in ("gate", "up"))
    return np.asarray(x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}mlp.down_proj"].T)


def _rotated(heads: Array, turn: Array) -> Array:
    """Element i of a head and element i + d/2 are a complex number, which turns with the position."""
    left, right = np.split(heads, 2, axis=2)
    turned = (left + 1j * right) * turn
    return np.concatenate([turned.real, turned.imag], axis=2)


if __name__ == "__main__":
    write_draft_model(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else demo_model_path())
