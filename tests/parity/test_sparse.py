"""Mixture-of-experts families equal Hugging Face transformers' on random tiny models, targets and MTP heads, in every export.

Models, randomisation and what transformers computes come from `test_transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft.conformance.oracle.checkpoints import write_safetensors
from tests.parity.test_transformers import (
    IMPLEMENTATIONS,
    NUM_DRAFTS,
    PROMPT,
    TOLERANCE,
    Array,
    LogitsFn,
    build,
    build_mtp,
    distance,
    mtp_logits,
    oracle_logits,
    save,
    target_logits,
)
from tests.support.recording import engine_logits
from tools.make_checkpoint import as_paddle

torch = pytest.importorskip("torch")

HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SPARSE: Mapping[str, Mapping[str, Any]] = {
    "Glm4Moe": {
        "num_mtp_layers": 0, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.7,
        "rope_parameters": HALF,
    },
    "Ernie4_5_Moe": {
        "moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2, "head_dim": 12,
        "tie_word_embeddings": False,
    },
    "Ernie4_5": {},
    "Qwen3Moe": {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
}  # fmt: skip
CONVENTIONS: Mapping[str, Mapping[str, Any]] = {
    "Glm4Moe": {
        "order": "embedding_first", "feed": "post", "final_norm": "own", "recycle": "post", "mask_first_position": False,
    },
    "Ernie4_5_Moe": {
        "order": "embedding_first", "feed": "pre", "final_norm": "target", "recycle": "pre", "mask_first_position": False,
    },
}  # fmt: skip
OTHER: Mapping[Any, Any] = {"pre": "post", "post": "pre", "embedding_first": "hidden_first", False: True}
NAMES: Mapping[str, Mapping[str, str | None]] = {
    "Glm4Moe": {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"},
    "Ernie4_5_Moe": {"enorm": "mtp_emb_norm.0", "hnorm": "mtp_hidden_norm.0", "eh_proj": "mtp_linear_proj.0", "post_norm": None},
}


def sparse(architecture: str, **changes: Any) -> Any:
    model = build(architecture, **{**SPARSE[architecture], **changes})
    for name, bias in [*model.named_parameters(), *model.named_buffers()]:
        if "e_score_correction_bias" in name:  # a buffer in some families, which `build` leaves at zero
            bias.data.copy_(torch.linspace(-0.6, 0.7, bias.numel()).reshape(bias.shape))
    return model


@pytest.mark.parametrize("logits_fn", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Glm4Moe", {}),
        ("Glm4Moe", {"n_group": 4, "topk_group": 2, "use_qk_norm": False, "norm_topk_prob": False}),
        ("Glm4Moe", {"first_k_dense_replace": 0, "n_shared_experts": 1, "attention_bias": False}),
        ("Ernie4_5_Moe", {}),
        ("Ernie4_5_Moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 2}),
        ("Ernie4_5_Moe", {"moe_num_shared_experts": 0, "tie_word_embeddings": True, "moe_norm_min": 0.9}),
        ("Ernie4_5", {}),
        ("Qwen3Moe", {}),
        ("Qwen3Moe", {"attention_bias": True}),
        ("Qwen3Moe", {"norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    ],
)
def test_target(tmp_path: Path, logits_fn: LogitsFn, architecture: str, changes: dict[str, Any]) -> None:
    model = sparse(architecture, **changes)
    theirs = target_logits(model, PROMPT)[1].numpy()
    ours, _ = logits_fn(save(model, tmp_path), PROMPT, 0, {})
    assert distance(ours, theirs) < TOLERANCE


SWITCHES: list[tuple[str, Mapping[str, Any]]] = [
    ("Glm4Moe", {"norm_topk_prob": False}),
    ("Glm4Moe", {"routed_scaling_factor": 1.0}),
    ("Glm4Moe", {"num_experts_per_tok": 2}),
    ("Glm4Moe", {"n_group": 2, "topk_group": 1}),
    ("Glm4Moe", {"rope_parameters": {**HALF, "partial_rotary_factor": 1.0}}),
    ("Ernie4_5_Moe", {"moe_k": 2}),
    ("Ernie4_5_Moe", {"moe_norm_min": 0.95}),
    ("Ernie4_5_Moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    ("Qwen3Moe", {"norm_topk_prob": False}),
    ("Qwen3Moe", {"num_experts_per_tok": 2}),
]


@pytest.mark.parametrize(("architecture", "changes"), SWITCHES)
def test_every_switch_of_a_target_matters(tmp_path: Path, architecture: str, changes: Mapping[str, Any]) -> None:
    """The same weights under another configuration have other logits: no key is dropped in silence."""
    model = sparse(architecture)
    theirs = target_logits(model, PROMPT)[1].numpy()
    config = tmp_path / "config.json"
    save(model, tmp_path)
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    assert distance(oracle_logits(tmp_path, PROMPT, 0, {})[0], theirs) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["e_score_correction_bias", "shared_experts", "experts.7"])
@pytest.mark.parametrize("architecture", ["Glm4Moe", "Ernie4_5_Moe"])
def test_every_tensor_of_the_experts_matters(tmp_path: Path, architecture: str, name: str) -> None:
    from safetensors.torch import load_file, save_file

    model = sparse(architecture)
    theirs = target_logits(model, PROMPT)[1].numpy()
    tensors = load_file(save(model, tmp_path) / "model.safetensors")
    changed = {key: value.flip(-1).contiguous() if name in key else value for key, value in tensors.items()}
    assert any(name in key for key in tensors)
    save_file(changed, tmp_path / "model.safetensors")
    assert distance(oracle_logits(tmp_path, PROMPT, 0, {})[0], theirs) > 10 * TOLERANCE


# --- MTP heads --------------------------------------------------------------------------------------------------------


def save_with_mtp(architecture: str, target: Any, mtp: Any, directory: Path) -> Path:
    """A target and its MTP layer, named as the family publishes them."""
    from safetensors.torch import load_file, save_file

    layers, names = target.config.num_hidden_layers, NAMES[architecture]
    prefix, block = {
        "Glm4Moe": (f"model.layers.{layers}.", f"model.layers.{layers}."),
        "Ernie4_5_Moe": ("model.", "model.mtp_block.0."),
    }[architecture]
    tensors = load_file(save(target, directory) / "model.safetensors")
    for name, tensor in mtp.layers[0].state_dict().items():
        stem, _, rest = name.partition(".")
        if stem == "mtp_block":
            tensors |= {block + key: value.contiguous() for key, value in one_expert_each(rest, tensor).items()}
        elif names[stem] is not None:
            tensors[f"{prefix}{names[stem]}.{rest}"] = tensor.contiguous()
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def one_expert_each(name: str, tensor: Any) -> dict[str, Any]:
    """Transformers stacks experts in memory; files keep them apart."""
    stem, _, kind = name.rpartition(".experts.")
    if not stem:
        return {name: tensor}
    found = {}
    for expert, matrix in enumerate(tensor):
        parts = {"gate_proj": matrix[: len(matrix) // 2], "up_proj": matrix[len(matrix) // 2 :]}
        for part, value in parts.items() if kind == "gate_up_proj" else {"down_proj": matrix}.items():
            found[f"{stem}.experts.{expert}.{part}.weight"] = value
    return found


def with_head(architecture: str, directory: Path) -> tuple[Any, Any, Path]:
    target = sparse(architecture)
    target.config.mtp_mlp_layer_types = ["sparse"]
    mtp = build_mtp(target, seed=2)
    for name, bias in mtp.named_buffers():
        if "e_score_correction_bias" in name:
            bias.copy_(torch.linspace(0.5, -0.6, bias.numel()))
    return target, mtp, save_with_mtp(architecture, target, mtp, directory)


@pytest.fixture(scope="module", params=["Glm4Moe", "Ernie4_5_Moe"])
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any, Path]:
    return request.param, *with_head(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def ernie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head("Ernie4_5_Moe", tmp_path_factory.mktemp("ernie"))[2]


@pytest.mark.parametrize("logits_fn", IMPLEMENTATIONS)
def test_drafts(drafting: tuple[str, Any, Any, Path], logits_fn: LogitsFn) -> None:
    architecture, target, mtp, directory = drafting
    ours = logits_fn(directory, PROMPT, NUM_DRAFTS, {})
    assert distance(ours[0], target_logits(target, PROMPT)[1].numpy()) < TOLERANCE
    assert distance(ours[1], mtp_logits(target, mtp, PROMPT, NUM_DRAFTS, CONVENTIONS[architecture])) < TOLERANCE


@pytest.mark.parametrize("switch", ["order", "feed", "recycle", "mask_first_position"])
def test_every_convention_matters(drafting: tuple[str, Any, Any, Path], switch: str) -> None:
    architecture, target, mtp, directory = drafting
    usual = CONVENTIONS[architecture]
    flip = {switch: OTHER[usual[switch]]}
    theirs = mtp_logits(target, mtp, PROMPT, 2, {**usual, **flip})
    assert distance(oracle_logits(directory, PROMPT, 2, flip)[1], theirs) < TOLERANCE
    assert distance(oracle_logits(directory, PROMPT, 2, {})[1], theirs) > 10 * TOLERANCE


# --- Paddle's export of ERNIE -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ["BF16", "U16"])
def test_paddle_and_pytorch_exports_are_one_model(ernie: Path, tmp_path: Path, bits: str) -> None:
    from safetensors.torch import load_file

    tensors = {name: value.bfloat16().float().numpy() for name, value in load_file(ernie / "model.safetensors").items()}
    found: list[tuple[Array, Array]] = []
    for export, dtype in ((tensors, "BF16"), (as_paddle(tensors), bits)):
        where = tmp_path / str(len(found))
        where.mkdir()
        (where / "config.json").write_text((ernie / "config.json").read_text())
        write_safetensors(where / "model.safetensors", export, dtype)
        found.append(engine_logits(where, PROMPT, NUM_DRAFTS, {}))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)
