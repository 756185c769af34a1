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


def block_shapes(config: Mapping[str, Any], *, sparse: bool = False) -> dict[str, tuple[int, ...]]:
    """Name below a layer's prefix to shape, in the layout of Llama, which Qwen, MiMo, GLM and ERNIE share; with experts in place
    of the gated network where it is `sparse`."""
    h, heads = config["hidden_size"], config["num_attention_heads"]
    d = config.get("head_dim") or h // heads
    q, kv = heads * d, (config.get("num_key_value_heads") or heads) * d
    architecture = config["architectures"][0]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "post_attention_layernorm.weight": (h,),
    }
    shapes |= _expert_shapes(config) if sparse else _gated_shapes("mlp.", h, config["intermediate_size"])
    always_biased = architecture in {"MiMoForCausalLM", "Qwen2ForCausalLM"}
    if always_biased or config.get("attention_bias"):
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if not always_biased and architecture != "Glm4MoeForCausalLM" and config.get("attention_bias"):
        shapes["self_attn.o_proj.bias"] = (h,)
    if config.get("use_bias"):
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in {"q": q, "k": kv, "v": kv, "o": h}.items()}
    if config.get("mlp_bias") or config.get("use_bias"):
        i = config["intermediate_size"]
        shapes |= {"mlp.gate_proj.bias": (i,), "mlp.up_proj.bias": (i,), "mlp.down_proj.bias": (h,)}
    if architecture in {"Qwen3ForCausalLM", "Qwen3MoeForCausalLM"} or config.get("use_qk_norm"):
        shapes |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    return shapes


def _gated_shapes(prefix: str, h: int, i: int) -> dict[str, tuple[int, ...]]:
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"{prefix}{name}.weight": (h, i) if name == "down_proj" else (i, h) for name in names}


def _expert_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, i = config["hidden_size"], config["moe_intermediate_size"]
    keys = ("n_routed_experts", "moe_num_experts", "num_experts")
    experts = next(config[key] for key in keys if key in config)
    shared = i * config.get("n_shared_experts", config.get("moe_num_shared_experts", 0))
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, h)}
    if config["architectures"] == ["Glm4MoeForCausalLM"]:
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    if config["architectures"] == ["Ernie4_5_MoeForCausalLM"]:
        shapes["mlp.moe_statics.e_score_correction_bias"] = (1, experts)
    for expert in range(experts):
        shapes |= _gated_shapes(f"mlp.experts.{expert}.", h, i)
    return shapes | (_gated_shapes("mlp.shared_experts.", h, shared) if shared else {})


def mtp_names(config: Mapping[str, Any], index: int = 0) -> tuple[str, dict[str, str]]:
    """What the names of the block of an MTP layer begin with, and the names of its other tensors: "embedding", "hidden" and
    "final" norms (the last one where it has its own), "projection"."""
    architecture = config["architectures"][0]
    if architecture == "Glm4MoeForCausalLM":
        layer = f"model.layers.{config['num_hidden_layers'] + index}."
        names = {"embedding": "enorm", "hidden": "hnorm", "final": "shared_head.norm", "projection": "eh_proj"}
        return layer, {kind: f"{layer}{name}.weight" for kind, name in names.items()}
    if architecture.startswith("Ernie"):
        names = {"embedding": "emb_norm", "hidden": "hidden_norm", "projection": "linear_proj"}
        return f"model.mtp_block.{index}.", {kind: f"model.mtp_{name}.{index}.weight" for kind, name in names.items()}
    layer = f"model.mtp_layers.{index}."
    names = {"embedding": "token_layernorm", "hidden": "hidden_layernorm", "final": "final_layernorm", "projection": "input_proj"}
    return layer, {kind: f"{layer}{name}.weight" for kind, name in names.items()}


def sparse_layers(config: Mapping[str, Any]) -> range:
    """The target's layers with experts: consecutive ones, in models written here."""
    count = config["num_hidden_layers"]
    if "moe_intermediate_size" not in config:
        return range(0)
    first = config.get("first_k_dense_replace", config.get("moe_layer_start_index", 0))
    return range(first, config.get("moe_layer_end_index", count - 1) + 1)


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that a checkpoint with this config.json holds."""
    h, v = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (v, h)
    sparse = sparse_layers(config)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block_shapes(config, sparse=i in sparse).items()}
    as_target = config["architectures"] == ["Glm4MoeForCausalLM"]
    for i in range(config.get("num_nextn_predict_layers") or 0):
        prefix, names = mtp_names(config, i)
        shapes |= {prefix + name: shape for name, shape in block_shapes(config, sparse=as_target).items()}
        shapes |= {name: (h, 2 * h) if kind == "projection" else (h,) for kind, name in names.items()}
    return shapes


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """float32 tensors of the right shapes: norm weights around 1, everything else, biases too, well away from 0."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        fan_in = shape[-1] if len(shape) == 2 and "embed" not in name else 4
        is_norm = "norm.weight" in name or "norm.0.weight" in name
        tensors[name] = 1 + 0.3 * noise if is_norm else noise * np.float32(1.4 / np.sqrt(fan_in))
    return tensors


_SMALL = {"int32": "I32", "int8": "I8", "uint8": "F8_E4M3"}


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]], dtype: str = "F32") -> None:
    """Store `tensors` as "F32", "F16", "BF16" (rounded towards zero) or "U16" (the same bits, as Paddle calls them); booleans as
    BOOL, int32 and int8 as such, uint8 as the bits of E4M3, other integers as I64."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        stored = {"f": dtype, "b": "BOOL"}.get(array.dtype.kind) or _SMALL.get(array.dtype.name, "I64")
        raw = _encode(array, stored)
        header[name] = {"dtype": stored, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _encode(array: NDArray[Any], stored: str) -> bytes:
    if stored in ("BF16", "U16"):
        return (np.ascontiguousarray(array, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return array.astype({"F32": "<f4", "F16": "<f2", "I64": "<i8", "BOOL": "?"}.get(stored, array.dtype)).tobytes()


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
