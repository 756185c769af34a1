"""Every kind of rotary scaling: frequencies equal transformers', and so do logits of every family that is published with it.

`dynamic` is the one kind of which transformers' frequencies change with the text: ours are those that it has for the longest one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft.errors import CheckpointError
from polydraft.models import ConfigFile
from polydraft.models.rotary import KINDS, Rotation
from tests.parity.test_sparse import SPARSE, sparse
from tests.parity.test_transformers import (
    IMPLEMENTATIONS,
    PROMPT,
    TOLERANCE,
    LogitsFn,
    build,
    distance,
    oracle_logits,
    save,
    target_logits,
)
from tests.support.depth import crossed

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Llama 3.1": {
        "head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Llama 3.2": {
        "head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Qwen2.5 with YaRN": {
        "head_dim": 128, "rope_theta": 1000000.0, "max_position_embeddings": 32768,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "Qwen3 with YaRN": {
        "head_dim": 128, "rope_theta": 1000000, "max_position_embeddings": 40960,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "YaRN over half a head": {
        "head_dim": 128, "rope_theta": 1000000, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536, "truncate": False},
    },
    "YaRN with all its keys": {
        "head_dim": 64, "rope_theta": 10000.0, "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 20, "beta_slow": 2,
            "mscale": 0.707, "mscale_all_dim": 1.2,
        },
    },
    "YaRN with a factor of its own": {
        "head_dim": 64, "rope_theta": 10000.0, "max_position_embeddings": 65536,
        "rope_scaling": {
            "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "attention_factor": 1.5, "finetuned": True,
        },
    },
    "YaRN whose factor lies in the lengths": {
        "head_dim": 64, "rope_theta": 10000.0, "max_position_embeddings": 65536,
        "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096, "mscale_all_dim": 0},
    },
    "YaRN of a few positions, whose range is empty": {
        "head_dim": 16, "rope_theta": 10000.0, "max_position_embeddings": 8, "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "linear": {
        "head_dim": 128, "rope_theta": 100000, "max_position_embeddings": 16384,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "dynamic": {
        "head_dim": 128, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
}  # fmt: skip
LENGTHS = {
    "Llama 3.1": 131072, "Llama 3.2": 131072, "Qwen2.5 with YaRN": 131072, "Qwen3 with YaRN": 131072,
    "YaRN over half a head": 131072, "YaRN with all its keys": 163840, "linear": 65536, "dynamic": 8192,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_frequencies_are_those_of_transformers(name: str, spelling: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated = json.loads(json.dumps(PUBLISHED[name]))
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, **json.loads(json.dumps(stated)))
    kind = config.rope_parameters["rope_type"]
    length = LENGTHS[name] if kind == "dynamic" else None
    theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    if spelling == "rope_parameters":
        moved = {key: stated.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in stated}
        stated[spelling] = stated.pop("rope_scaling") | moved
    rotation = Rotation.read(ConfigFile(Path("config.json"), stated), stated["head_dim"], theta=1.0, share=1.0)
    ours = rotation.rope("half")
    np.testing.assert_allclose(ours.frequencies, theirs.double().numpy(), rtol=2e-6)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)
    assert rotation.max_len == LENGTHS.get(name, rotation.max_len)


DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
ORIGINAL = 8
"""Tokens for which the tiny models below are "trained": their prompts are longer."""
SCALED: Mapping[str, Mapping[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 0.5, "beta_slow": 0.1,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.05, "high_freq_factor": 1.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Glm4Moe", "Ernie4_5_Moe", "Ernie4_5", "Qwen3Moe")


def scaled(architecture: str, kind: str, **changes: Any) -> Any:
    """A tiny model with rotary scaling; one of the "dynamic" kind as it is once it has seen a text of the greatest length."""
    share = {"partial_rotary_factor": 0.5} if architecture == "Glm4Moe" else {}
    length = ORIGINAL if kind in ("linear", "dynamic") else 4 * ORIGINAL
    own = {"rope_parameters": {**SCALED[kind], "rope_theta": 100.0, **share}, "max_position_embeddings": length, **changes}
    model = sparse(architecture, **own) if architecture in SPARSE else build(architecture, **own)
    if kind == "dynamic":
        longest = torch.zeros((1, 4 * ORIGINAL), dtype=torch.long)
        model.model.rotary_emb(torch.zeros(1), position_ids=torch.arange(longest.shape[1])[None])
    return model


@pytest.mark.parametrize(("logits_fn", "kind", "architecture"), crossed(5, IMPLEMENTATIONS, SCALED, FAMILIES))
def test_target(tmp_path: Path, logits_fn: LogitsFn, architecture: str, kind: str) -> None:
    model = scaled(architecture, kind)
    theirs = target_logits(model, PROMPT)[1].numpy()
    ours, _ = logits_fn(save(model, tmp_path), PROMPT, 0, {})
    assert distance(ours, theirs) < TOLERANCE


WHOLE = ("Mistral", *(name for name in FAMILIES if name != "Glm4Moe"))
"""Families of which no model was published that rotates a share of its heads."""


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_theta"])
@pytest.mark.parametrize("architecture", WHOLE)
def test_a_share_of_heads_that_rotate_whole(tmp_path: Path, architecture: str, spelling: str) -> None:
    """Transformers' models of these families do not read it, wherever it stands."""
    model = (sparse if architecture in SPARSE else build)(architecture, rope_parameters={**DEFAULT, "partial_rotary_factor": 0.5})
    theirs = target_logits(model, PROMPT)[1].numpy()
    config = save(model, tmp_path) / "config.json"
    stated = json.loads(config.read_text())
    assert stated["rope_parameters"]["partial_rotary_factor"] == 0.5
    if spelling == "rope_theta":
        del stated["rope_parameters"]
        config.write_text(json.dumps({**stated, "rope_theta": 100.0, "partial_rotary_factor": 0.5}))
    assert distance(oracle_logits(tmp_path, PROMPT, 0, {})[0], theirs) < TOLERANCE


@pytest.mark.parametrize("kind", SCALED)
def test_a_share_of_heads_that_rotate_whole_and_are_scaled(tmp_path: Path, kind: str) -> None:
    """Transformers' tables are then of the share, and its models of these families fail."""
    model = build("Llama", rope_parameters={**SCALED[kind], "rope_theta": 100.0, "partial_rotary_factor": 0.5})
    with pytest.raises(RuntimeError, match="size of tensor"):
        target_logits(model, PROMPT)
    with pytest.raises(CheckpointError, match=f"partial_rotary_factor is 0.5 beside a rotation of type {kind}, wanted 1"):
        oracle_logits(save(model, tmp_path), PROMPT, 0, {})


CHANGES: list[tuple[str, Mapping[str, Any]]] = [
    *((kind, {"rope_type": "default", "rope_theta": 100.0}) for kind in SCALED),
    *((kind, {**SCALED[kind], "rope_theta": 100.0, "factor": 2.0}) for kind in SCALED),
    ("yarn", {**SCALED["yarn"], "rope_theta": 100.0, "attention_factor": 1.0}),
    ("yarn", {**SCALED["yarn"], "rope_theta": 100.0, "mscale": 1.0, "mscale_all_dim": 2.0}),
    ("yarn", {**SCALED["yarn"], "rope_theta": 100.0, "beta_fast": 20.0}),
    ("yarn", {**SCALED["yarn"], "rope_theta": 100.0, "beta_slow": 0.02}),
    ("yarn", {**SCALED["yarn"], "rope_theta": 100.0, "truncate": False}),
    ("yarn", {**SCALED["yarn"], "rope_theta": 100.0, "original_max_position_embeddings": 2 * ORIGINAL}),
    ("llama3", {**SCALED["llama3"], "rope_theta": 100.0, "low_freq_factor": 0.5}),
    ("llama3", {**SCALED["llama3"], "rope_theta": 100.0, "high_freq_factor": 2.0}),
    ("llama3", {**SCALED["llama3"], "rope_theta": 100.0, "original_max_position_embeddings": 2 * ORIGINAL}),
]


@pytest.mark.parametrize(("kind", "stated"), CHANGES, ids=str)
def test_every_key_matters(tmp_path: Path, kind: str, stated: Mapping[str, Any]) -> None:
    """The same weights under another configuration have other logits: no key is dropped in silence."""
    model = scaled("Llama", kind)
    theirs = target_logits(model, PROMPT)[1].numpy()
    config = save(model, tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_parameters": stated}))
    assert distance(oracle_logits(tmp_path, PROMPT, 0, {})[0], theirs) > 10 * TOLERANCE


def test_dynamic_frequencies_do_not_depend_on_the_text(tmp_path: Path) -> None:
    """Logits of a prompt are the same rows whatever follows it, where transformers' change as a text grows."""
    model = scaled("Llama", "dynamic")
    whole = oracle_logits(save(model, tmp_path), PROMPT * 2, 0, {})[0]
    assert distance(oracle_logits(tmp_path, PROMPT, 0, {})[0], whole[: len(PROMPT)]) < 1e-12
    fresh = build("Llama", rope_parameters=model.config.rope_parameters, max_position_embeddings=ORIGINAL)
    assert distance(target_logits(fresh, PROMPT)[1].numpy(), whole[: len(PROMPT)]) > 10 * TOLERANCE
    assert set(KINDS) == {"default", *SCALED}
