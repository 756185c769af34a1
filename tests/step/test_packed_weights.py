"""Engines whose matrices are packed when they are loaded: drafts leave the text as it is, memory is counted, and what a backend
does not take is dequantised."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, SamplingParams, reference
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.conformance.oracle.checkpoints import tensor_shapes
from polydraft.conformance.probe import checkpoint, prompts
from polydraft.conformance.target import wrap
from polydraft.contracts.packing import MADE, PACKINGS, PackedWeight, pack
from polydraft.errors import CapabilityError, ConfigError, PluginError
from polydraft.instruments.record import CallRecorder
from polydraft.models.checkpoint import Checkpoint, load_weights
from polydraft.models.families import FamilyRegistry
from polydraft.models.weights import PackedAtLoad, sizes
from tests.conformance.doubles import BACKENDS
from tests.support.cpu import needs_kernels
from tests.support.depth import among
from tools import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]

PROBE = str(checkpoint())
OPTIONS: dict[str, Any] = {"model": PROBE, "max_num_seqs": 3, "block_size": 4, "weights": "int8"}
each_made = pytest.mark.parametrize("made", MADE)
each_of_whole_rows = pytest.mark.parametrize("made", [made for made, one in MADE.items() if not one.packing.activations])
"""Those of which a dequantised model writes the text: it rounds no rows of activations."""
BARE = wrap(reference, polydraft_backend_info=lambda info: dataclasses.replace(
    info, name="bare", capabilities=dataclasses.replace(info.capabilities, weight_packings=(), expert_packings=())))  # fmt: skip
WITHOUT_EXPERTS = wrap(reference, polydraft_backend_info=lambda info: dataclasses.replace(
    info, name="bare", capabilities=dataclasses.replace(info.capabilities, expert_packings=())))  # fmt: skip


def texts(**options: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with closing(LLM(**{**OPTIONS, **options})) as llm:
        found = llm.generate([list(prompt) for prompt in prompts(10)[6:]], params)
    return [(one.token_ids, one.rounds) for one in found]


@pytest.mark.deep
@pytest.mark.parametrize("made", MADE)
def test_every_number_of_drafts_changes_nothing(made: str):
    plain = [tokens for tokens, _ in texts(backend="reference", draft_tokens=0, invariant=True, weights=made)]
    for drafts in (1, 2, 3, 4):
        assert [tokens for tokens, _ in texts(backend="reference", draft_tokens=drafts, invariant=True, weights=made)] == plain


@pytest.mark.parametrize("made", among(["fp8-a8"], MADE))
def test_drafts_batches_chunks_and_devices_change_nothing(made: str):
    plain = [tokens for tokens, _ in texts(backend="reference", draft_tokens=0, invariant=True, weights=made)]
    drafted = texts(backend="reference", draft_tokens=5, invariant=True, weights=made)
    assert [tokens for tokens, _ in drafted] == plain
    assert any(sum(rounds) for _, rounds in drafted)
    assert texts(backend="reference", draft_tokens=5, invariant=True, max_batched_tokens=19, weights=made) == drafted
    assert texts(backend=BACKENDS["emulator"], draft_tokens=5, overlap=1, invariant=True, sanitize=True, weights=made) == drafted


@needs_kernels
@each_made
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_compiled_kernels_write_one_text_for_every_number_of_drafts(made: str, dtype: str):
    given: dict[str, Any] = {"backend": "cpu", "dtype": dtype, "weights": made}
    plain = [tokens for tokens, _ in texts(draft_tokens=0, **given)]
    for drafts in (1, 2, 3, 4, 5):
        assert [tokens for tokens, _ in texts(draft_tokens=drafts, graph="decode", **given)] == plain
    if dtype == "f32":
        assert plain == [tokens for tokens, _ in texts(backend="reference", draft_tokens=0, weights=made)]


@each_of_whole_rows
def test_who_does_not_take_it_dequantises_and_says_so(made: str, caplog: pytest.LogCaptureFixture):
    """The text is that of the packed model."""
    with caplog.at_level(logging.WARNING):
        found = texts(plugin=BARE, draft_tokens=3, invariant=True, weights=made)
    said = (
        f"backend bare takes no weights packed as {MADE[made].packing.name}, so they are dequantised to f32 when they are loaded"
    )
    assert said in caplog.messages
    assert found == texts(backend="reference", draft_tokens=3, invariant=True, weights=made)
    with closing(LLM(**{**OPTIONS, "weights": made}, plugin=BARE)) as llm:
        assert said in next(one.reason for one in llm.engine.resolved.decisions if one.name == "weights")


def test_what_is_packed_and_what_packing_changed():
    def errors(**options: Any) -> dict[str, float]:
        with closing(LLM(**{**OPTIONS, "backend": "reference", **options})) as llm:
            return dict(llm.engine.weights.packing_errors)

    every = errors()
    layer = {f"{name}.{matrix}" for name in ("layers.0", "layers.1", "mtp.0") for matrix in ("qkv", "o", "gate_up", "down")}
    assert set(every) == layer & set(every) | {"lm_head", "mtp.0.proj"}
    assert {"layers.0.qkv", "mtp.0.down"} < set(every)
    assert set(errors(weights_ignore=("head",))) == set(every) - {"lm_head"}
    assert set(errors(weights_ignore=("head", "mtp"))) == {name for name in every if name.startswith("layers.")}
    assert errors(weights="auto") == {}
    with Checkpoint(PROBE) as opened:
        matrix = load_weights(opened, *FamilyRegistry().describe(opened))["layers.0.down"]
    off = np.linalg.norm(pack(matrix, PACKINGS["int8-channel"]).read(np.float64) - matrix) / np.linalg.norm(matrix)
    assert every["layers.0.down"] == pytest.approx(off, rel=1e-3)
    assert 10 * every["layers.0.down"] < errors(weights="int4")["layers.0.down"] < 0.2


@pytest.mark.parametrize("made", ["fp8", "int8", "int4"])
def test_random_weights_of_a_shape_are_packed_as_the_pool_that_they_are_rows_of(made: str):
    with closing(RandomCheckpoint(ROOT / "bench" / "shapes" / "tiny.json")) as shape:
        model, table = FamilyRegistry().describe(shape)
        canonical, packing = load_weights(shape, model, table), MADE[made].packing
        packed, name = PackedAtLoad(canonical, model, packing, ()), "layers.0.gate_up"
        found, matrix = packed[name], canonical[name]
        assert isinstance(found, PackedWeight)
        assert (found.shape, found.packing) == (matrix.shape, packing)
        assert (found.numbers.strides[0] < found.numbers.shape[1]) == (made != "int4"), "nothing of its size is made"
        changed = found.read() - matrix
        assert packed.errors[name] == pytest.approx(np.linalg.norm(changed) / np.linalg.norm(matrix), rel=0.05)
        assert np.abs(changed).max() < {"fp8": 0.07, "int8": 0.01, "int4": 0.2}[made] * np.abs(matrix).max()


def test_planning_counts_the_bytes_of_packed_matrices():
    with Checkpoint(PROBE) as opened:
        model, table = FamilyRegistry().describe(opened)
        names = list(load_weights(opened, model, table))
        packed = {name: one.nbytes for name, one in PackedAtLoad(load_weights(opened, model, table), model,
                  PACKINGS["fp8-channel"], ("head",)).items() if one.nbytes}  # fmt: skip
    taken: Any = {"linear": ("fp8-channel",)}
    assert sizes(model, names, dtype="f32", packing=PACKINGS["fp8-channel"], ignored=("head",), taken=taken) == packed
    floats = sizes(model, names, dtype="f32", packing=PACKINGS["fp8-channel"], taken={"experts": ("fp8-channel",)})
    assert floats == sizes(model, names, dtype="f32")
    assert PACKINGS["int4-group32"].nbytes((10, 100)) == 10 * 50 + 10 * 4 * 2
    assert PACKINGS["int4-group128-zeros"].nbytes((10, 129)) == 10 * 65 + 10 * 2 * 3


def test_updated_weights_are_packed_alike():
    prompt, params = list(prompts(1)[0]), SamplingParams(max_new_tokens=12, ignore_eos=True)
    with (
        closing(LLM(**OPTIONS, backend="reference", draft_tokens=3)) as llm,
        closing(LLM(**{**OPTIONS, "model": str(checkpoint(1))}, backend="reference", draft_tokens=3)) as other,
    ):
        before = llm.generate([prompt], params)[0].token_ids
        llm.engine.update_weights(checkpoint(1))
        assert llm.generate([prompt], params)[0].token_ids == other.generate([prompt], params)[0].token_ids != before
        assert llm.engine.weights.packing_errors == other.engine.weights.packing_errors


def test_a_kernel_pack_that_serves_linear_gets_floats():
    """What the backend declares says nothing about other kernels."""
    with closing(LLM(**OPTIONS, backend="reference")) as llm:
        assert llm.engine.weights._taken_packings() == {"linear": tuple(PACKINGS), "experts": tuple(PACKINGS)}
        for contract, role in (("linear", "linear"), ("expert_mlp", "experts")):
            llm.engine.weights._table = dataclasses.replace(
                llm.engine.table, overrides=(type("O", (), {"contract": contract})(),)
            )
            assert [one for one, packings in llm.engine.weights._taken_packings().items() if not packings] == [role]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "int3"}, ConfigError, r"^weights is 'int3', wanted one of auto, int8, int8-a8, int4, int4-a8, fp8, fp8-a8;"),
        ({"weights_ignore": ["attention"]}, ConfigError, r"^weights_ignore has 'attention', wanted head or mtp; correct it"),
        ({"weights": "auto", "weights_ignore": ["mtp"]}, CapabilityError, r"--weights-ignore mtp: nothing is packed without"),
        ({"instruments": [CallRecorder()]}, ConfigError, r"instrument record: a record cannot hold weights packed as"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        LLM(**{**OPTIONS, **options}, backend="reference")


def test_unknown_packings_are_no_capability():
    odd = wrap(reference, polydraft_backend_info=lambda info: dataclasses.replace(
        info, capabilities=dataclasses.replace(info.capabilities, weight_packings=("int2-channel",))))  # fmt: skip
    with pytest.raises(PluginError, match=r"weight_packings \('int2-channel',\), wanted some of int8-channel, .* or none"):
        LLM(**OPTIONS, plugin=odd)
    odd = wrap(reference, polydraft_backend_info=lambda info: dataclasses.replace(
        info, capabilities=dataclasses.replace(info.capabilities, expert_packings=("int2-channel",))))  # fmt: skip
    with pytest.raises(PluginError, match=r"expert_packings \('int2-channel',\), wanted some of .* what expert_mlp takes"):
        LLM(**OPTIONS, plugin=odd)


# -- experts ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with experts, in floats."""
    config = {**make_checkpoint.FAMILIES["glm4-moe"], "hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 48}
    tensors = make_checkpoint.draw(tensor_shapes(config), config, np.random.default_rng(2), embedding_first=True)
    return str(make_checkpoint.write(tmp_path_factory.mktemp("sparse"), config, tensors))


def of_experts(model: str, made: str, **options: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    with closing(LLM(model=model, max_num_seqs=3, block_size=4, weights=made, **options)) as llm:
        return [one.token_ids for one in llm.generate([[5, 9, 11, 4], [7] * 9, [3, 8, 3, 8]], params)]


@needs_kernels
@each_of_whole_rows
def test_experts_are_packed_at_load_and_texts_stay_those_of_the_packed_model(made: str, sparse: str):
    plain = of_experts(sparse, made, backend="reference", draft_tokens=0, invariant=True)
    assert of_experts(sparse, made, backend="reference", draft_tokens=3, invariant=True) == plain
    assert of_experts(sparse, made, plugin=BACKENDS["emulator"], draft_tokens=3, overlap=1, invariant=True) == plain
    assert of_experts(sparse, made, plugin=WITHOUT_EXPERTS, draft_tokens=3, invariant=True) == plain
    compiled = of_experts(sparse, made, backend="cpu", draft_tokens=0)
    assert of_experts(sparse, made, backend="cpu", draft_tokens=5, graph="decode") == compiled == plain


@needs_kernels
def test_experts_keep_their_bits_and_say_so_where_not(sparse: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING), closing(LLM(model=sparse, backend="cpu", weights="int4")) as llm:
        weight: Any = llm.engine.weights.bound["layers.1.experts_down"]
        assert weight.nbytes < 5 / 32 * 4 * np.prod(weight.shape)
        assert {"layers.1.experts_down", "mtp.0.experts_gate_up"} <= set(llm.engine.weights.packing_errors)
        assert "layers.1.router" not in llm.engine.weights.packing_errors
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING), closing(LLM(model=sparse, plugin=WITHOUT_EXPERTS, weights="int4")) as llm:
        reason = next(one.reason for one in llm.engine.resolved.decisions if one.name == "weights")
    said = "backend bare takes no experts packed as int4-group32, so they are dequantised to f32 when they are loaded"
    assert caplog.messages == [said]
    assert reason.endswith(said)
