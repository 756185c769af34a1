"""Texts of checkpoints whose matrices are packed as others publish them: those of the matrices that they stand for, whatever the
number of drafts and the backend, and updated in place."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, SamplingParams
from polydraft.conformance.oracle.checkpoints import tensor_shapes
from polydraft.errors import CapabilityError, CheckpointError, ConfigError
from polydraft.instruments.record import CallRecorder
from polydraft.models.checkpoint import Checkpoint, load_weights
from polydraft.models.families import FamilyRegistry
from tests.conformance.doubles import BACKENDS
from tests.support.cpu import needs_kernels
from tests.support.depth import among
from tests.support.published_packings import PUBLISHED, packed
from tools import make_checkpoint

CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": {**make_checkpoint.FAMILIES["mimo"], "hidden_size": 64, "head_dim": 16, "intermediate_size": 96},
    "glm4-moe": {**make_checkpoint.FAMILIES["glm4-moe"], "hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32},
}
EVERY = list(itertools.product(PUBLISHED, CONFIGS))
PROMPTS = [[5, 9, 11, 4], [7] * 9, [3, 8, 3, 8, 3, 8, 3]]


Made = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A packed checkpoint, and the one with the floats that it stands for."""

    @functools.cache
    def make(family: str, name: str, seed: int = 0) -> tuple[Path, Path]:
        config = CONFIGS[family]
        rng = np.random.default_rng(seed)
        tensors = make_checkpoint.draw(tensor_shapes(config), config, rng, embedding_first=family != "mimo")
        stored, packed_config, meant = packed(tensors, config, PUBLISHED[name])
        root = tmp_path_factory.mktemp(f"{family}-{name}-{seed}")
        return make_checkpoint.write(root / "packed", packed_config, stored), make_checkpoint.write(
            root / "floats", config, meant
        )

    return make


def texts(model: Path, **options: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with closing(LLM(model=str(model), max_num_seqs=3, block_size=4, **options)) as llm:
        return [one.token_ids for one in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(("name", "family"), among([("awq", "glm4-moe")], EVERY))
def test_drafts_and_backends_leave_a_text_as_it_is(made: Made, family: str, name: str):
    model, floats = made(family, name)
    plain = texts(model, backend="reference", draft_tokens=0, invariant=True)
    for drafts in (3, 5):
        assert texts(model, backend="reference", draft_tokens=drafts, invariant=True) == plain
    assert texts(model, plugin=BACKENDS["emulator"], draft_tokens=3, overlap=1, invariant=True) == plain
    if not PUBLISHED[name].packing.endswith("-a8"):  # those round activations, too
        assert texts(floats, backend="reference", draft_tokens=3, invariant=True) == plain


@needs_kernels
@pytest.mark.parametrize(("name", "family"), among([("ct-int8-w8a8", "glm4-moe")], EVERY))
def test_compiled_kernels_take_what_is_stored(made: Made, family: str, name: str):
    model, _ = made(family, name)
    plain = texts(model, backend="cpu", draft_tokens=0)
    for drafts in (3, 5):
        assert texts(model, backend="cpu", draft_tokens=drafts, graph="decode") == plain
    assert texts(model, backend="reference", draft_tokens=0) == plain


def test_weights_of_the_same_layout_are_replaced_in_place(made: Made, caplog: pytest.LogCaptureFixture):
    first, floats = made("mimo", "awq")
    second, _ = made("mimo", "awq", 1)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with caplog.at_level(logging.WARNING), closing(LLM(model=str(first), backend="reference", draft_tokens=3)) as llm:
        before = llm.generate(PROMPTS, params)[0].token_ids
        llm.engine.update_weights(second)
        assert llm.generate(PROMPTS, params)[0].token_ids != before
        for other in (floats, made("mimo", "ct-int4")[0]):
            with pytest.raises(CheckpointError, match=r"weights of .* do not fit the running"):
                llm.engine.update_weights(other)
        llm.engine.update_weights(first)
        assert llm.generate(PROMPTS, params)[0].token_ids == before
    assert caplog.messages == []


def test_what_becomes_of_them_is_said(made: Made, caplog: pytest.LogCaptureFixture):
    model, _ = made("glm4-moe", "fp8-block")
    with caplog.at_level(logging.WARNING), closing(LLM(model=str(model), backend="reference")) as llm:
        decision = next(one for one in llm.engine.resolved.decisions if one.name == "weights")
        assert (decision.chosen, decision.reason) == ("fp8-block128-a8", "as the checkpoint stores them")
    (said,) = caplog.messages
    assert said.startswith(
        "8 tensors that are stored in few bits, such as layers.0.qkv, are dequantised to f32: parts in several packings,"
    )


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"weights": "int8"}, CapabilityError, r"--weights int8: model packed is stored as int4-group32-zeros already; leave"),
        ({"instruments": [CallRecorder()]}, ConfigError, r"a record cannot hold weights packed as int4-group32-zeros; leave"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(made: Made, options: dict[str, Any], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        LLM(model=str(made("mimo", "awq")[0]), backend="reference", **options)


def test_a_packed_matrix_takes_no_float_copy(tmp_path: Path):
    """Bytes that are alive while one matrix is read: those of what is stored, and a few."""
    config = {**CONFIGS["mimo"], "hidden_size": 256, "intermediate_size": 1024}
    tensors = make_checkpoint.draw(tensor_shapes(config), config, np.random.default_rng(0), embedding_first=False)
    for name in ("awq", "gptq", "ct-int4", "ct-fp8-channel"):
        stored, packed_config, _ = packed(tensors, config, PUBLISHED[name])
        directory = make_checkpoint.write(tmp_path / name, packed_config, stored)
        assert json.loads((directory / "config.json").read_text())["quantization_config"]
        with Checkpoint(directory) as opened:
            weights = load_weights(opened, *FamilyRegistry().describe(opened))
            tracemalloc.start()
            packed_matrix = weights.packed("layers.0.down")
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert packed_matrix.shape == (256, 1024)
        assert most < 3.5 * 256 * 1024, name
