"""Writes a random checkpoint of a model family: config.json, weights and a tokenizer, tiny unless options say otherwise.

    python tools/make_checkpoint.py glm4-moe work/glm
    python tools/make_checkpoint.py qwen3-moe work/qwen --hidden-size 256 --num-experts 32 --dtype BF16
    python tools/make_checkpoint.py ernie-moe work/ernie --export paddle
    python tools/make_checkpoint.py glm4-moe work/large --config bench/shapes/moe-cpu.json

Each family is a command whose options are the keys of its config.json. No model is trained. A token's embedding dominates its
row and the best two logits are a good unit apart, so that a text does not hang on rounding. An MTP head is a disturbed copy of
the target's last layer, so that some of its drafts are accepted and some are not. A word of the tokenizer is a token: "w7 w12".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from polydraft.conformance.oracle.checkpoints import Tensors, mtp_names, tensor_shapes, write_checkpoint
from polydraft.conformance.probe import imitate_target, random_tensor, tokenizer_json

BASE: Final[dict[str, Any]] = {
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "tie_word_embeddings": False, "max_position_embeddings": 96, "eos_token_id": 0,
    "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip
"""What tiny models have in common."""
WITH_HEAD: Final[dict[str, Any]] = {"num_nextn_predict_layers": 1, **BASE}
_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "intermediate_size": 64, "vocab_size": 96,
}  # fmt: skip
_ERNIE_EXPERTS: Final[dict[str, Any]] = {
    "moe_intermediate_size": 16, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 0,
    "moe_layer_end_index": 0,
}  # fmt: skip
"""The target's last layer is dense, as the block of the head is, which copies it."""
_GLM_EXPERTS: Final[dict[str, Any]] = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
_QWEN_EXPERTS: Final[dict[str, Any]] = {
    "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": False,
}  # fmt: skip
FAMILIES: Final[Mapping[str, dict[str, Any]]] = {
    "mimo": {"architectures": ["MiMoForCausalLM"], **_SIZES, **WITH_HEAD},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_SIZES, **BASE},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **_SIZES, "attention_bias": False, **BASE},
    "mistral": {"architectures": ["MistralForCausalLM"], **_SIZES, "sliding_window": 16, **BASE},
    "llama": {"architectures": ["LlamaForCausalLM"], **_SIZES, "attention_bias": False, "mlp_bias": False, **BASE},
    "glm4-moe": {"architectures": ["Glm4MoeForCausalLM"], **_SIZES, **_GLM_EXPERTS, **WITH_HEAD},
    "ernie-moe": {"architectures": ["Ernie4_5_MoeForCausalLM"], **_SIZES, **_ERNIE_EXPERTS, **WITH_HEAD},
    "ernie": {"architectures": ["Ernie4_5ForCausalLM"], **_SIZES, "use_bias": False, **WITH_HEAD},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], **_SIZES, **_QWEN_EXPERTS, **BASE},
}
"""config.json of a tiny model of each family, by the command that writes it."""
SHARD_BYTES: Final = 1 << 26
"""float32 bytes of a file of weights."""


def draw(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], rng: np.random.Generator, *, embedding_first: bool
) -> Tensors:
    """float32 tensors of these shapes. A head whose layer is of another kind than the target's last one stays random."""
    last = f"layers.{config['num_hidden_layers'] - 1}."
    tensors = {name: random_tensor(name, shape, rng, last=last in name) for name, shape in shapes.items()}
    if config.get("num_nextn_predict_layers"):
        head, layer = mtp_names(config)[0], f"model.{last}"
        if all(head + name.removeprefix(layer) in shapes for name in shapes if name.startswith(layer)):
            imitate_target(tensors, config, rng, embedding_first=embedding_first)
    return tensors


def as_paddle(tensors: Tensors) -> Tensors:
    """The tensors of ERNIE's PyTorch export as Paddle's: names of its own, joined projections, matrices as [in, out]."""
    stored: Tensors = {}
    for name, value in tensors.items():
        keeps = value.ndim == 1 or "embed_tokens" in name or "e_score" in name
        stored[name.replace("model.", "ernie.", 1)] = value if keeps else np.ascontiguousarray(value.T)
    joined: Tensors = {}
    for name in list(stored):
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "up_gate_proj")):
            if f".{parts[0]}." in name:
                pieces = [stored.pop(name.replace(parts[0], part)) for part in parts]
                joined[name.replace(parts[0], whole)] = np.concatenate(pieces, axis=-1)
    return stored | joined


def write(directory: Path, config: Mapping[str, Any], tensors: Tensors, *, dtype: str = "F32") -> Path:
    """Write a whole checkpoint, with a tokenizer of one word a token, and return its directory. `dtype` is F32, F16, BF16 or
    U16, which is what Paddle calls BF16."""
    shards = 1 + sum(value.nbytes for value in tensors.values()) // SHARD_BYTES
    write_checkpoint(directory, config, tensors, dtype=dtype, num_shards=shards)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(config["vocab_size"])), encoding="utf-8")
    return directory


def make(directory: Path, config: Mapping[str, Any], *, seed: int = 0, dtype: str = "F32", export: str = "pytorch") -> Path:
    """Write a random checkpoint with this config.json and return its directory; `export` is "pytorch", or "paddle" for ERNIE."""
    embedding_first = config["architectures"] != ["MiMoForCausalLM"]
    tensors = draw(tensor_shapes(config), config, np.random.default_rng(seed), embedding_first=embedding_first)
    return write(directory, config, as_paddle(tensors) if export == "paddle" else tensors, dtype=dtype)


def main(arguments: list[str] | None = None) -> None:
    """Write what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="family", required=True, metavar="FAMILY")
    for family, tiny in FAMILIES.items():
        help_text = f"a random {tiny['architectures'][0]}"
        command = commands.add_parser(family, help=help_text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.add_argument("directory", type=Path, help="where to write it")
        command.add_argument("--config", type=Path, help="begin with this config.json instead of the tiny one")
        command.add_argument("--seed", type=int, default=0, help="of the weights")
        exports = ("pytorch", "paddle") if family.startswith("ernie") else ("pytorch",)
        command.add_argument("--export", choices=exports, default="pytorch", help="whose names and layout")
        command.add_argument("--dtype", choices=("F32", "F16", "BF16", "U16"), default="F32", help="of the stored weights")
        for key, value in tiny.items():
            if key != "architectures":
                command.add_argument(f"--{key.replace('_', '-')}", type=type(value) if type(value) is not bool else _flag,
                                     default=argparse.SUPPRESS, metavar="VALUE", help=f"{value} in the tiny one")  # fmt: skip
    args = vars(parser.parse_args(arguments))
    tiny = FAMILIES[args["family"]]
    config = dict(tiny) if args["config"] is None else json.loads(args["config"].read_text(encoding="utf-8"))
    if config["architectures"] != tiny["architectures"]:
        parser.error(f"{args['config']} is of {config['architectures'][0]}, wanted {tiny['architectures'][0]}; name its family")
    config |= {key: value for key, value in args.items() if key in tiny}
    directory = make(args["directory"], config, seed=args["seed"], dtype=args["dtype"], export=args["export"])
    print(f"{directory}: {tiny['architectures'][0]}, {sum(f.stat().st_size for f in directory.iterdir()) / 2**20:.1f} MiB")


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted true or false")
    return text == "true"


if __name__ == "__main__":
    main()
