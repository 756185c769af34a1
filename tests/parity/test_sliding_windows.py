"""Layers with sliding windows equal Hugging Face transformers' on random tiny models, however a configuration says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

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

pytest.importorskip("torch")

WINDOW = 4
QWEN = {"use_sliding_window": True, "sliding_window": WINDOW}
MODELS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("Mistral", {"sliding_window": WINDOW}),
    ("Mistral", {"sliding_window": None}),
    ("Qwen2", {**QWEN, "max_window_layers": 1}),
    ("Qwen2", {**QWEN, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("Qwen2", {**QWEN, "use_sliding_window": False}),
    ("Qwen3", {**QWEN, "max_window_layers": 2}),
    ("Qwen3Moe", QWEN),
)


def windowed(architecture: str, changes: Mapping[str, Any]) -> Any:
    return sparse(architecture, **changes) if architecture in SPARSE else build(architecture, **changes)


@pytest.mark.parametrize("logits_fn", IMPLEMENTATIONS)
@pytest.mark.parametrize(("architecture", "changes"), MODELS, ids=str)
def test_target(tmp_path: Path, logits_fn: LogitsFn, architecture: str, changes: Mapping[str, Any]) -> None:
    model = windowed(architecture, changes)
    theirs = target_logits(model, PROMPT)[1].numpy()
    assert distance(logits_fn(save(model, tmp_path), PROMPT, 0, {})[0], theirs) < TOLERANCE


SWITCHES: tuple[tuple[int, Mapping[str, Any]], ...] = (
    (0, {"sliding_window": WINDOW + 1}),
    (0, {"sliding_window": WINDOW - 1}),
    (0, {"sliding_window": None}),
    (2, {"max_window_layers": 2, "layer_types": None}),
    (2, {"sliding_window": WINDOW + 1}),
    (2, {"layer_types": ["sliding_attention"] * 3}),
    (2, {"use_sliding_window": False, "layer_types": None}),
    (6, {"sliding_window": WINDOW + 1}),
    (6, {"use_sliding_window": False}),
)


@pytest.mark.parametrize(("place", "changes"), SWITCHES, ids=str)
def test_every_switch_matters(tmp_path: Path, place: int, changes: Mapping[str, Any]) -> None:
    """The same weights under another configuration have other logits: no key is dropped in silence."""
    model = windowed(*MODELS[place])
    theirs = target_logits(model, PROMPT)[1].numpy()
    config = save(model, tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    assert distance(oracle_logits(tmp_path, PROMPT, 0, {})[0], theirs) > 10 * TOLERANCE


def test_a_configuration_of_before_layer_types(tmp_path: Path) -> None:
    """Qwen2's own files say which layers have windows by their number alone."""
    model = windowed("Qwen2", {**QWEN, "max_window_layers": 1})
    theirs = target_logits(model, PROMPT)[1].numpy()
    config = save(model, tmp_path) / "config.json"
    config.write_text(json.dumps({key: value for key, value in json.loads(config.read_text()).items() if key != "layer_types"}))
    assert distance(oracle_logits(tmp_path, PROMPT, 0, {})[0], theirs) < TOLERANCE
