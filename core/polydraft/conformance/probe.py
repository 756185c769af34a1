"""The probe models: tiny checkpoints with an MTP head, and prompts along which no choice is close.

L3 to L6 run engines on it and compare them with the recomputing oracle. Margins are enforced: along every prompt's text the two
best logits of the target, and of the draft, are so far apart that no legal rounding swaps them, so every backend can be required
to give the exact tokens and rounds. The models are not trained: the head drafts well because its weights are the target's last
block with noise added. "dense" is what nearly every check takes; "experts" has a mixture of experts in target and head.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from polydraft.conformance.oracle import OracleModel, greedy_text
from polydraft.conformance.oracle.checkpoints import Tensors, mtp_names, tensor_shapes, write_checkpoint
from polydraft.device import Array

VOCAB: Final = 64
MAX_LEN: Final = 96
NUM_TOKENS: Final = 28
"""Tokens of every prompt's text whose margins are enforced."""
MOST_DRAFTS: Final = 5
MARGIN: Final[Mapping[str, float]] = {"f32": 0.02, "tf32": 0.12, "f16": 0.12, "bf16": 0.35}
"""Least distance of the best two logits by `Target.rounding`, in logits (which spread over some ten)."""
KV_MARGIN: Final = 0.05
"""Added where KV rows are quantised: rounding may put a key on the other side of a border, a whole quantum away."""
Model = Literal["dense", "experts"]
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["MiMoForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": VOCAB, "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "tie_word_embeddings": False, "max_position_embeddings": MAX_LEN,
    "eos_token_id": 0, "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip
EXPERTS: Final[dict[str, Any]] = {
    **CONFIG, "architectures": ["Glm4MoeForCausalLM"], "moe_intermediate_size": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1,
    "attention_bias": True, "use_qk_norm": True,
    "routed_scaling_factor": 1.5, "partial_rotary_factor": 0.5,
}  # fmt: skip
"""Both kinds of groups, shared experts, and the conventions of another head."""
CONFIGS: Final[Mapping[Model, dict[str, Any]]] = {"dense": CONFIG, "experts": EXPERTS}
DISTURBANCE: Final = 0.1
"""Noise on the MTP head relative to the weights it copies: 0 would accept nearly everything, 1 nearly nothing."""
LENGTHS: Final = (1, 2, 3, 5, 8, 9, 16, 17, 24, 30)
"""Lengths of prompts, in turn."""


def random_tensor(tensor: str, shape: tuple[int, ...], rng: np.random.Generator, *, last: bool = True) -> Array:
    """Noise for one tensor. A token's embedding dominates its row, `lm_head` is scaled until the best two logits are a good
    unit apart, and blocks before the last one contribute little, since the MTP head does not have them."""
    noise = rng.standard_normal(shape).astype(np.float32)
    if "norm.weight" in tensor or "norm.0.weight" in tensor:
        return np.asarray(1 + np.float32(0.3) * noise)
    if tensor == "model.embed_tokens.weight" or tensor.endswith(".bias"):
        return noise
    if tensor.endswith("correction_bias"):
        return np.asarray(np.float32(0.2) * noise)
    gain = 3.0 if tensor == "lm_head.weight" else 1.4
    if "o_proj" in tensor or "down_proj" in tensor:
        gain = 0.7 if last else 0.2
    return np.asarray(noise * np.float32(gain / np.sqrt(shape[-1])))


def imitate_target(tensors: Tensors, config: Mapping[str, Any], rng: np.random.Generator, *, embedding_first: bool) -> None:
    """Make the MTP head a disturbed copy of the target's last block that reads the embedding through an identity."""
    head, names = mtp_names(config)
    layer = f"model.layers.{config['num_hidden_layers'] - 1}."
    for tensor in [t for t in tensors if t.startswith(layer)]:
        mine = head + tensor.removeprefix(layer)
        noise = random_tensor(mine, tensors[mine].shape, rng) - ("norm.weight" in mine)
        tensors[mine] = tensors[tensor] + np.float32(DISTURBANCE) * noise
    if names.get("final") in tensors:
        tensors[names["final"]] = tensors["model.norm.weight"].copy()
    size = config["hidden_size"]
    halves = [DISTURBANCE * rng.standard_normal((size, size)) / np.sqrt(size), np.eye(size)]
    if embedding_first:
        halves.reverse()
    tensors[names["projection"]] = np.concatenate(halves, axis=1).astype(np.float32)


def weights(seed: int = 0, model: Model = "dense") -> Tensors:
    """A probe's tensors, exact in bfloat16, so that every dtype holds the same ones; other seeds are for other weights."""
    rng, config = np.random.default_rng(seed), CONFIGS[model]
    tensors = {tensor: random_tensor(tensor, shape, rng) for tensor, shape in tensor_shapes(config).items()}
    imitate_target(tensors, config, rng, embedding_first=model == "experts")
    return {name: _short(array) for name, array in tensors.items()}


def _short(array: Array) -> Array:
    """Cut to the upper 16 bits."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def tokenizer_json(vocab_size: int) -> dict[str, Any]:
    """tokenizer.json of one word a token: "w7 w12" is [7, 12]; id 0 is special."""
    vocab = {"<eos>": 0} | {f"w{i}": i for i in range(1, vocab_size)}
    eos: dict[str, Any] = {"id": 0, "content": "<eos>", "special": True}
    eos |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [eos], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<eos>"},
    }  # fmt: skip


@functools.cache
def checkpoint(seed: int = 0, model: Model = "dense") -> Path:
    """A probe's directory, written at the first call of a process and removed at its end. Margins are of seed 0 alone."""
    root = Path(tempfile.mkdtemp(prefix="polydraft-probe-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    directory = write_checkpoint(root / "probe", CONFIGS[model], weights(seed, model))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(VOCAB)))
    return directory


@functools.cache
def oracle(seed: int = 0, kv: str = "", model: Model = "dense", packed: str = "") -> OracleModel:
    """A probe recomputed naively in float64, its KV rows as `kv` says, its matrices as `--weights` does with `packed`; it
    remembers the texts it has worked out."""
    return OracleModel.from_dir(checkpoint(seed, model), kv=kv, weights=packed)


@functools.cache
def prompts(count: int, kv: str = "", model: Model = "dense", packed: str = "") -> tuple[tuple[int, ...], ...]:
    """The first `count` prompts along whose text every choice has the margin of f32, of the lengths `LENGTHS` in turn."""
    rng = np.random.default_rng(1)
    found: list[tuple[int, ...]] = []
    while len(found) < count:
        prompt = tuple(rng.integers(1, VOCAB, LENGTHS[len(found) % len(LENGTHS)]).tolist())
        close = _tokens_before_a_close_one(prompt, "f32", kv, model, packed)
        if close == NUM_TOKENS == certain(prompt, kv=kv, model=model, packed=packed):
            found.append(prompt)
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def certain(prompt: tuple[int, ...], rounding: str = "f32", kv: str = "", model: Model = "dense", packed: str = "") -> int:
    """Tokens of a prompt's text before the first close choice: of the target's at any place, of the drafts up to the first
    wrong one behind any place, which are all that rounds depend on. At most `NUM_TOKENS`."""
    text = greedy_text(oracle(kv=kv, model=model, packed=packed), prompt)
    close = _tokens_before_a_close_one(prompt, rounding, kv, model, packed)
    for at in range(1, close):
        drafts = text.drafts(len(prompt) + at, min(MOST_DRAFTS, close - at))
        if any(draft.margin < _margin(rounding, kv) for draft in drafts):
            return at
    return close


def _tokens_before_a_close_one(prompt: tuple[int, ...], rounding: str, kv: str, model: Model, packed: str) -> int:
    """Of the target's choices alone; the text is worked out no further than that."""
    text = greedy_text(oracle(kv=kv, model=model, packed=packed), prompt)
    for count in range(NUM_TOKENS):
        text.need(len(prompt) + count)
        if text.margins[len(prompt) + count] < _margin(rounding, kv):
            return count
    return NUM_TOKENS


def _margin(rounding: str, kv: str) -> float:
    """What a choice has to lead by."""
    return MARGIN[rounding] + (KV_MARGIN if kv else 0.0)
