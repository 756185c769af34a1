"""Writes tiny random checkpoints, byte by byte and name by name, for the kit, the loader, the engine and parity.

The names and shapes are written out here a second time: nothing is taken from the families under test.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]

TINY_MIMO: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "num_nextn_predict_layers": 1,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
"""config.json of a model with all that MiMo has; its head_dim is not hidden_size / num_attention_heads."""


def block_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name below a layer's prefix to shape, in the layout of Llama, Qwen2, Qwen3 and MiMo."""
    h, i, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    architecture = config["architectures"][0]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (i, h),
        "mlp.up_proj.weight": (i, h),
        "mlp.down_proj.weight": (h, i),
    }
    always_biased = architecture in {"MiMoForCausalLM", "Qwen2ForCausalLM"}
    if always_biased or config.get("attention_bias"):
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if not always_biased and config.get("attention_bias"):
        shapes["self_attn.o_proj.bias"] = (h,)
    if config.get("mlp_bias"):
        shapes |= {"mlp.gate_proj.bias": (i,), "mlp.up_proj.bias": (i,), "mlp.down_proj.bias": (h,)}
    if architecture == "Qwen3ForCausalLM":
        shapes |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    return shapes


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that a checkpoint with this config.json holds."""
    h, v = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (v, h)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block_shapes(config).items()}
    for i in range(config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.mtp_layers.{i}."
        shapes |= {prefix + name: shape for name, shape in block_shapes(config).items()}
        shapes |= {prefix + f"{name}_layernorm.weight": (h,) for name in ("token", "hidden", "final")}
        shapes[prefix + "input_proj.weight"] = (h, 2 * h)
    return shapes


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """float32 tensors of the right shapes: norm weights around 1, everything else, biases too, well away from 0."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        fan_in = shape[-1] if len(shape) == 2 and "embed" not in name else 4
        tensors[name] = 1 + 0.3 * noise if "norm.weight" in name else noise * np.float32(1.4 / np.sqrt(fan_in))
    return tensors


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]], dtype: str = "F32") -> None:
    """Store `tensors` as "F32", "F16", "BF16" (rounded towards zero) or "U16" (the same bits, as Paddle calls them); integers are
    stored as I64, booleans as BOOL."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        stored = {"f": dtype, "b": "BOOL"}.get(array.dtype.kind, "I64")
        raw = _encode(array, stored)
        header[name] = {"dtype": stored, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _encode(array: NDArray[Any], stored: str) -> bytes:
    if stored in ("BF16", "U16"):
        return (np.ascontiguousarray(array, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return array.astype({"F32": "<f4", "F16": "<f2", "I64": "<i8", "BOOL": "?"}[stored]).tobytes()


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any]] | None = None,
    *,
    dtype: str = "F32",
    seed: int = 0,
    num_shards: int = 1,
) -> Path:
    """Write config.json and weights (one file, or shards with an index) into `directory` and return it.

    Without `config` the tiny MiMo model, without `tensors` random ones; a tokenizer is not written.
    """
    config = TINY_MIMO if config is None else config
    tensors = random_tensors(config, seed) if tensors is None else tensors
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors, dtype)
        return directory
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        write_safetensors(directory / file, {name: tensors[name] for name in mine}, dtype)
        weight_map |= dict.fromkeys(mine, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
