"""Writes a tiny target and an EAGLE-3 draft model for it, in any published layout, whose drafts are right as often as is wanted.

    python tools/make_eagle3.py work/pair
    python tools/make_eagle3.py work/pair --layout speculators --family qwen3 --noise 0
    python -m polydraft generate "w7 w12" --model work/pair/target --proposer eagle3 --draft-model work/pair/draft-model

No model is trained. The target goes from each token to its successor, and the draft model knows it; noise on every weight makes
both err: with 0 every draft is right, with 0.02 about every other one, with 0.5 hardly any. Layouts with a reduced vocabulary
never draft a fifth of the tokens. A word of the tokenizer is a token. The tests of EAGLE-3 take theirs from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.conformance.oracle.checkpoints import tensor_shapes, write_checkpoint
from polydraft.conformance.probe import tokenizer_json

Array = NDArray[Any]
V = 48
"""Tokens; also the hidden size of targets, whose embedding is the identity."""
_CYCLE = np.random.default_rng(1).permutation(V)
SUCCESSOR = np.roll(_CYCLE, -1)[np.argsort(_CYCLE)]
"""[V]: the token that follows each one, where nothing disturbs."""
FOLLOW = np.eye(V)[:, np.argsort(SUCCESSOR)].T
"""Takes the vector of a token to that of its successor."""
PART = tuple(token for token in range(V) if token % 5)
"""A reduced draft vocabulary."""
LAYERS = 6
_SHAPE: dict[str, Any] = {
    "hidden_size": V, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": V, "vocab_size": V,
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_TARGET: dict[str, Any] = {**_SHAPE, "num_hidden_layers": LAYERS, "max_position_embeddings": 96, "eos_token_id": 0}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], **_EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "mimo": {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    "glm-moe": {
        "architectures": ["Glm4MoeForCausalLM"], **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    "ernie": {"architectures": ["Ernie4_5ForCausalLM"], "num_nextn_predict_layers": 0},
}  # fmt: skip
"""config.json of targets, by family, beside `_TARGET`."""


@dataclass(frozen=True)
class Layout:
    """How a draft model is stored."""

    architecture: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Of EAGLE-3, in config.json."""
    layer: Mapping[str, Any] = field(default_factory=dict)
    """Of its decoder layers, where they are not the target's."""
    nested: bool = False
    """As the speculators library stores them."""
    mid: bool = True
    """The first layer is called `midlayer`; else `layers.0`."""
    stem: str = ""
    biases: tuple[str, ...] = ()
    """Projections with a bias."""
    head_norms: bool = False
    """Norms of queries and keys."""
    part: bool = False
    """A reduced vocabulary."""
    embedding: str = ""
    """The embedding of tokens that is stored: "" for none, "copy" for that of the target, "own"."""
    head: bool = True
    """A head is stored."""
    depth: int = 1
    left_over: tuple[str, ...] = ()
    """Tensors that trainers leave behind and nobody needs."""


def _ids(*ids: int) -> dict[str, Any]:
    return {"eagle_aux_hidden_state_layer_ids": list(ids)}


LAYOUTS: dict[str, Layout] = {
    "eagle": Layout("LlamaForCausalLM", part=True, embedding="copy"),
    "sglang": Layout("LlamaForCausalLMEagle3", {"eagle_config": {**_ids(1, 2, 4), "use_aux_hidden_state": True}}, part=True),
    "sglang, all tokens": Layout("LlamaForCausalLMEagle3", {"draft_vocab_size": None}, head=False),
    "vllm": Layout(
        "Eagle3LlamaForCausalLM", _ids(2, 3, 6), {"attention_bias": True, "mlp_bias": True}, mid=False,
        biases=("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"),
        left_over=("layers.0.self_attn.rotary_emb.inv_freq",),
    ),
    "qwen3": Layout(
        "Qwen3ForCausalLMEagle3", {**_ids(0, 3, 5), "swap_h_and_emb": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 64}, stem="model.",
        biases=("fc",), head_norms=True, part=True,
    ),
    "five taps": Layout("Eagle3LlamaForCausalLM", _ids(2, 3, 4, 5, 6)),
    "speculators": Layout(
        "Eagle3Speculator", {**_ids(1, 3, 6), "norm_before_residual": True, "norm_before_fc": False}, nested=True, mid=False,
        part=True, embedding="copy", left_over=("verifier_norm.weight",),
    ),
    "speculators, two layers": Layout(
        "Eagle3DraftModel", {"norm_before_residual": False, "embed_requires_grad": True}, {"model_type": "qwen3"}, nested=True,
        mid=False, head_norms=True, embedding="own", depth=2,
    ),
    "3.1": Layout("Eagle3LlamaForCausalLM", {**_ids(2, 3, 5), "fc_norm": True, "norm_output": True}, mid=False, part=True),
    "3.1, speculators": Layout(
        "Eagle3DraftModel", {**_ids(2, 4, 6), "fc_norm": True, "norm_output": True, "norm_before_residual": True}, nested=True,
        mid=False, embedding="copy",
    ),
    "wide": Layout(
        "LlamaForCausalLMEagle3", {**_ids(2, 3, 5), "target_hidden_size": V}, {"hidden_size": 64, "intermediate_size": 64},
        embedding="own",
    ),
    "tied": Layout("LlamaForCausalLMEagle3", _ids(2, 3, 5), {"tie_word_embeddings": True}, embedding="own", head=False),
}  # fmt: skip


def draft_config(layout: Layout) -> dict[str, Any]:
    """config.json of a draft model."""
    layer = {**_SHAPE, "num_hidden_layers": layout.depth, **layout.layer}
    keys = {"architectures": [layout.architecture], **({"draft_vocab_size": len(PART)} if layout.part else {}), **layout.keys}
    if layout.nested:
        return {**keys, "speculators_model_type": "eagle3", "transformer_layer_config": layer}
    return {**layer, **keys}


def draft_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Every tensor of a draft model but the tables."""
    layer = {**_SHAPE, **layout.layer}
    h, i, m = layer["hidden_size"], layer["intermediate_size"], len(PART) if layout.part else V
    q, kv = (layer[name] * layer["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    eagle = layout.keys.get("eagle_config", layout.keys)
    taps = len(eagle.get("eagle_aux_hidden_state_layer_ids", (0, 0, 0)))
    stem = layout.stem
    shapes: dict[str, tuple[int, ...]] = {f"{stem}fc.weight": (h, taps * V), f"{stem}norm.weight": (h,)}
    if layout.keys.get("fc_norm"):
        shapes |= {f"{stem}fc_norm.{tap}.weight": (V,) for tap in range(taps)}
    if "fc" in layout.biases:
        shapes[f"{stem}fc.bias"] = (h,)
    if layout.head:
        shapes["lm_head.weight"] = (m, h)
    if layout.embedding:
        shapes[f"{stem}embed_tokens.weight"] = (V, h)
    for place in range(layout.depth):
        wide = h if place else 2 * h
        prefix = stem + ("midlayer." if layout.mid and not place else f"layers.{place}.")
        norms = ("input_layernorm", "post_attention_layernorm", *(() if place else ("hidden_norm",)))
        projections = {
            "self_attn.q": (q, wide), "self_attn.k": (kv, wide), "self_attn.v": (kv, wide), "self_attn.o": (h, q),
            "mlp.gate": (i, h), "mlp.up": (i, h), "mlp.down": (h, i),
        }  # fmt: skip
        shapes |= {f"{prefix}{norm}.weight": (h,) for norm in norms}
        if layout.head_norms:
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (layer["head_dim"],) for name in "qk"}
        for name, shape in projections.items():
            shapes[f"{prefix}{name}_proj.weight"] = shape
            if name in layout.biases:
                shapes[f"{prefix}{name}_proj.bias"] = shape[:1]
    return shapes | {stem + name: (4,) for name in layout.left_over}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], noise: float, seed: int) -> dict[str, Array]:
    """Norms around 1, everything else around 0."""
    rng = np.random.default_rng(seed)
    drawn = {name: noise * rng.standard_normal(shape) / np.sqrt(shape[-1]) for name, shape in shapes.items()}
    return {name: (value + (value.ndim == 1 and not name.endswith("bias"))).astype(np.float32) for name, value in drawn.items()}


def tables(draft_ids: Sequence[int] = PART) -> dict[str, Array]:
    """The tensors that say which token each row of a head scores, and which tokens are scored."""
    return {"d2t": np.array(draft_ids) - np.arange(len(draft_ids)), "t2d": np.isin(np.arange(V), draft_ids)}


def draft_tensors(layout: Layout, noise: float, seed: int, embedding: Array) -> dict[str, Array]:
    """The tensors of a draft model that takes the state of a token to that of its successor, all with noise. `embedding`: the
    target's."""
    layer = {**_SHAPE, **layout.layer}
    h, keys = layer["hidden_size"], layout.keys
    wide = np.eye(h, V)  # a token's vector in the target, to that in the draft model
    eagle = keys.get("eagle_config", keys)
    taps = len(eagle.get("eagle_aux_hidden_state_layer_ids", (0, 0, 0)))
    gated = h / (1 + np.exp(-np.sqrt(h)))  # silu(x) x of the one element that a normed unit vector has
    unit = np.sqrt(1 / h)  # the gain that makes a unit vector of a normed one
    first = layout.stem + ("midlayer." if layout.mid else "layers.0.")
    planted: dict[str, Array] = {
        f"{layout.stem}fc.weight": np.concatenate([0 * wide] * (taps - 1) + [wide], axis=1),
        f"{first}mlp.gate_proj.weight": np.eye(h), f"{first}mlp.up_proj.weight": np.eye(h),
        f"{first}mlp.down_proj.weight": (wide @ FOLLOW @ wide.T - wide @ wide.T) / gated,
    }  # fmt: skip
    head = FOLLOW @ wide.T
    if keys.get("norm_output"):
        planted[f"{layout.stem}norm.weight"] = np.full(h, unit - 1)
        head = head / unit
    if keys.get("norm_before_residual"):
        planted[f"{first}hidden_norm.weight"] = np.full(h, unit - 1)
    if keys.get("fc_norm"):
        planted |= {f"{layout.stem}fc_norm.{tap}.weight": np.full(V, np.sqrt(1 / V) - 1) for tap in range(taps)}
    if layout.head:
        planted["lm_head.weight"] = head[list(PART)] if layout.part else head
    elif layout.embedding == "own":
        planted[f"{layout.stem}embed_tokens.weight"] = head
    tensors = random_tensors(draft_shapes(layout), noise, seed)
    tensors = {name: value + np.float32(planted.get(name, 0)) for name, value in tensors.items()}
    if layout.embedding == "copy":
        tensors[f"{layout.stem}embed_tokens.weight"] = embedding
    return tensors | (tables() if layout.part else {})


def write_draft(directory: Path, layout: str, noise: float, *, seed: int = 0, target: Path) -> Path:
    """A draft model in a layout, beside a target that `write_target` wrote."""
    embedding = target_tensors(json.loads((target / "config.json").read_text()), noise, seed)["model.embed_tokens.weight"]
    of = LAYOUTS[layout]
    return write_checkpoint(directory, draft_config(of), draft_tensors(of, noise, seed, embedding))


def target_tensors(config: Mapping[str, Any], noise: float, seed: int) -> dict[str, Array]:
    """The tensors of a target that goes from each token to its successor, all with noise."""
    tensors = random_tensors(tensor_shapes(config), noise, seed)
    planted = {"model.embed_tokens.weight": np.eye(V), "lm_head.weight": FOLLOW}
    return {name: value + np.float32(planted.get(name, 0)) for name, value in tensors.items()}


def write_target(directory: Path, family: str, noise: float, *, seed: int = 0) -> Path:
    """A target of a family."""
    config = {**_TARGET, **TARGETS[family]}
    write_checkpoint(directory, config, target_tensors(config, noise, seed))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(V)))
    return directory


def write_pair(directory: Path, layout: str, noise: float, *, seed: int = 0, family: str = "llama") -> tuple[Path, Path]:
    """A target and its draft model, in `target` and `draft-model` of the directory."""
    target = write_target(directory / "target", family, noise, seed=seed)
    return target, write_draft(directory / "draft-model", layout, noise, seed=seed, target=target)


def main(arguments: list[str] | None = None) -> None:
    """Write what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where to write both")
    parser.add_argument("--layout", choices=LAYOUTS, default="eagle", help="of the draft model (default: %(default)s)")
    parser.add_argument("--family", choices=TARGETS, default="llama", help="of the target (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.02, help="on every weight (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: %(default)s)")
    args = parser.parse_args(arguments)
    target, draft = write_pair(args.directory, args.layout, args.noise, seed=args.seed, family=args.family)
    print(f"{target} and {draft}: {_TARGET['num_hidden_layers']} layers and {LAYOUTS[args.layout].depth}, {V} tokens")


if __name__ == "__main__":
    main()
