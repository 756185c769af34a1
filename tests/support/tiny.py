"""Tiny random checkpoints for tests of the step: real model directories whose drafts are neither always right nor always wrong.

It has the list of tiny models; each is written once per test session, by `tools/make_checkpoint.py`. The tests of `tests/step`
use it through `checkpoint` and `oracle`.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.conformance.oracle.checkpoints import Tensors, tensor_shapes
from polydraft.conformance.oracle.model import OracleModel
from polydraft.models import Checkpoint, FamilyRegistry, load_weights
from tests.support import tiny_families
from tools import make_checkpoint

PLUGINS = (tiny_families.__file__,)
"""What an engine's `plugins` must name to know the families of the tiny models."""

_STRETCHED: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"], "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 90, "max_position_embeddings": 24,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "narrow": {
        "architectures": ["MiMoForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": 64,
    },
    "deep": {
        "architectures": ["MiMoForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 12, "intermediate_size": 72, "vocab_size": 97,
    },
    "mirrored": {
        "architectures": ["TinyMirrored"], "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 80,
    },
    "shared": {
        "architectures": ["TinyShared"], "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 56, "vocab_size": 128,
    },
    "sparse-ernie": {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 56, "vocab_size": 90, "moe_intermediate_size": 16,
        "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 0, "moe_layer_end_index": 0,
    },
    "sparse-glm": {
        "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 12, "intermediate_size": 48, "vocab_size": 80, "moe_intermediate_size": 24,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5,
    },
    "stretched-dynamic": {**_STRETCHED, "vocab_size": 96, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "stretched-llama3": {
        **_STRETCHED, "max_position_embeddings": 96,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0,
            "original_max_position_embeddings": 24,
        },
    },
    "stretched-yarn": {
        **_STRETCHED, "architectures": ["TinyPartial"], "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 0.1},
    },
    "with-biases": {
        "architectures": ["Ernie4_5ForCausalLM"], "use_bias": True, "hidden_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 56, "vocab_size": 101,
    },
    "with-windows": {
        "architectures": ["MiMoForCausalLM"], "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 64, "vocab_size": 96, "use_sliding_window": True,
        "sliding_window": 5, "max_window_layers": 1,
    },
}  # fmt: skip
"""config.json of each tiny model: two of MiMo's family, one for each of `tiny_families`, two with experts, three with scaled
rotation, one with biases everywhere, one with sliding windows. Weights are drawn from the place of a name among the
sorted ones."""
_MOVED = "-moved"


def moved(name: str) -> str:
    """The name of the same model with other weights, to replace those of `name` by."""
    return name + _MOVED


def weights(name: str) -> Tensors:
    """The tensors of the model `name`; the same at every call."""
    if name.endswith(_MOVED):
        still = weights(name.removesuffix(_MOVED))
        return {t: v + np.float32(0.05) * np.sin(np.arange(v.size, dtype=np.float32)).reshape(v.shape) for t, v in still.items()}
    config = CONFIGS[name]
    rng = np.random.default_rng(sorted(CONFIGS).index(name))
    architecture = config["architectures"][0]
    like = "MiMoForCausalLM" if architecture.startswith("Tiny") else architecture  # `tiny_families` have its layout
    like_config = {**make_checkpoint.WITH_HEAD, **config, "architectures": [like]}
    shapes = tensor_shapes(like_config)
    if config["architectures"] == ["TinyShared"]:
        shapes = _with_qk_norm(shapes, config["head_dim"])
    tensors = make_checkpoint.draw(
        shapes, like_config, rng, embedding_first=architecture not in ("MiMoForCausalLM", "TinyShared", "TinyPartial")
    )
    if config["architectures"] == ["TinyMirrored"]:
        tensors = {t: value - 1 if "norm.weight" in t else value for t, value in tensors.items()}
    return tensors


def _with_qk_norm(shapes: dict[str, tuple[int, ...]], head_dim: int) -> dict[str, tuple[int, ...]]:
    """The shapes of TinyShared: norms of queries and keys instead of biases, and no final norm of the head's own."""
    kept = {t: shape for t, shape in shapes.items() if not t.endswith("_proj.bias") and "final_layernorm" not in t}
    layers = [t.removesuffix("input_layernorm.weight") for t in kept if t.endswith("input_layernorm.weight")]
    return kept | {f"{layer}self_attn.{n}_norm.weight": (head_dim,) for layer in layers for n in "qk"}


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="polydraft-tiny-"))
    atexit.register(shutil.rmtree, root)
    return root


@functools.cache
def checkpoint(name: str) -> Path:
    """The directory of the model `name`, written at the first call of a session."""
    config = {**make_checkpoint.WITH_HEAD, **CONFIGS[name.removesuffix(_MOVED)]}
    return make_checkpoint.write(_root() / name, config, weights(name))


@functools.cache
def token_counts(vocab_size: int) -> Path:
    """A file of counts for `--draft-vocab`: tokens of no meaning have no order worth having, so any will do."""
    file = _root() / f"counts-{vocab_size}.json"
    counts = np.random.default_rng(vocab_size).permutation(vocab_size)
    file.write_text(json.dumps({str(token): int(count) for token, count in enumerate(counts)}))
    return file


@functools.cache
def oracle(name: str) -> OracleModel:
    """The float64 oracle of the model `name`."""
    registry = FamilyRegistry()
    for family in tiny_families.polydraft_models():
        registry.register(family, plugin="tiny_families")
    with Checkpoint(checkpoint(name)) as opened:
        description, table = registry.describe(opened)
        return OracleModel(description, dict(load_weights(opened, description, table)))
