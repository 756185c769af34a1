"""Checkpoints whose matrices are packed as others publish them: what is read, in which packing, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft.conformance.oracle.checkpoints import random_tensors, write_checkpoint
from polydraft.contracts.packing import PackedWeight
from polydraft.errors import CheckpointError
from polydraft.models.checkpoint import Checkpoint, Weights, load_weights
from polydraft.models.config_file import ConfigFile
from polydraft.models.families import FamilyRegistry
from polydraft.models.quantization import Bytes, PackQuantized, quantization
from polydraft.models.weights import AsStored
from tests.support.published_packings import PUBLISHED, packed
from tools.make_checkpoint import BASE, FAMILIES

MIMO: dict[str, Any] = {
    **BASE, "architectures": ["MiMoForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 40, "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM = {**FAMILIES["glm4-moe"], "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
QKV, DOWN = "layers.0.qkv", "layers.0.down"
each_form = pytest.mark.parametrize("name", PUBLISHED)


def opened(directory: Path) -> Weights:
    checkpoint = Checkpoint(directory)
    return load_weights(checkpoint, *FamilyRegistry().describe(checkpoint))


def stored(config: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return packed(random_tensors(config), config, PUBLISHED[name])


@each_form
@pytest.mark.parametrize("config", [MIMO, GLM], ids=["mimo", "glm"])
def test_every_tensor_is_what_the_format_says(tmp_path: Path, config: dict[str, Any], name: str):
    """As floats to the bit, fused parts and stacks of experts, too; and packed wherever that can be had."""
    tensors, packed_config, meant = stored(config, name)
    weights = opened(write_checkpoint(tmp_path / "packed", packed_config, tensors))
    wanted = opened(write_checkpoint(tmp_path / "floats", config, meant))
    as_stored = AsStored(weights)
    assert list(weights) == list(wanted)
    for canonical in wanted:
        assert np.array_equal(weights[canonical], wanted[canonical]), canonical
        kept = as_stored[canonical]
        if weights.packing(canonical) is None:
            assert isinstance(kept, np.ndarray)
            continue
        assert isinstance(kept, PackedWeight)
        assert (kept.packing, kept.packing.name) == (weights.packing(canonical), PUBLISHED[name].packing)
        assert np.array_equal(kept.read(), wanted[canonical]), canonical
    found = {canonical.rpartition(".")[2] for canonical in weights.packings}
    experts = {"shared_gate_up", "shared_down", "experts_gate_up", "experts_down"} if config is GLM else {"proj"}
    parts = {"qkv", "gate_up", "shared_gate_up", "experts_gate_up"} if "block" in name else set()  # blocks of 128 would overlap
    in_order = {"qkv", "o", "gate_up", "down", *experts} - parts
    one_group = {"shared_down", "experts_down"} if config is GLM else set()  # which is in order whatever its order
    assert found - {"proj"} == (in_order - {"proj"} if PUBLISHED[name].in_order else one_group)
    assert {"experts_down", "experts_gate_up"} <= {one.rpartition(".")[2] for one in weights.stored_packed} or config is MIMO


def test_experts_whose_parts_end_with_a_block_stay_in_blocks(tmp_path: Path):
    """Blocks of 128 rows of gate and up beside each other, an expert's last block smaller than the others."""
    config = {**GLM, "hidden_size": 160, "moe_intermediate_size": 128}
    tensors, packed_config, meant = stored(config, "fp8-block")
    weights = opened(write_checkpoint(tmp_path / "packed", packed_config, tensors))
    wanted = opened(write_checkpoint(tmp_path / "floats", config, meant))
    names = [name for name in wanted if name.endswith(("experts_gate_up", "experts_down"))]
    assert names
    for name in names:
        kept = weights.packed(name)
        assert kept.packing.name == "fp8-block128-a8"
        assert kept.shape == wanted[name].shape
        assert kept.scales.shape == (len(kept), 2, 2 if name.endswith("gate_up") else 1)
        assert np.array_equal(kept.read(), wanted[name])


def test_a_description_says_in_what_matrices_are_packed(tmp_path: Path):
    tensors, config, _ = stored(MIMO, "awq")
    with Checkpoint(write_checkpoint(tmp_path, config, tensors)) as checkpoint:
        assert FamilyRegistry().describe(checkpoint)[0].packed_as == ("int4-group32-zeros",)


def test_what_is_stored_in_floats_stays_so(tmp_path: Path):
    """Heads and MTP layers are often left out of the lists of a configuration."""
    tensors, config, meant = stored(MIMO, "gptq")
    head = [name for name in meant if "mtp" in name or name.endswith("o_proj.weight")]
    modules = tuple(name.removesuffix("weight") for name in head)
    tensors = {name: value for name, value in tensors.items() if not name.startswith(modules)}
    weights = opened(write_checkpoint(tmp_path, config, {**tensors, **{name: meant[name] for name in head}}))
    assert set(weights.packings) == {QKV, "layers.0.gate_up", DOWN}
    assert np.array_equal(weights["mtp.0.proj"], meant["model.mtp_layers.0.input_proj.weight"])


@pytest.mark.parametrize("nearest_first", [True, False], ids=["nearest first", "nearest last"])
def test_groups_of_modules_have_their_own_scheme(tmp_path: Path, nearest_first: bool):
    """A pattern comes before a class of modules, whichever group is listed first, as in the formats' own library."""
    tensors, config, meant = stored(MIMO, "ct-int8-w8a16")
    other, said = PUBLISHED["ct-fp8-channel"], config["quantization_config"]
    down = "model.layers.0.mlp.down_proj."
    tensors = {name: value for name, value in tensors.items() if not name.startswith(down)}
    found, meant[f"{down}weight"] = other.form(random_tensors(MIMO)[f"{down}weight"])
    tensors |= {down + name: value for name, value in found.items()}
    first = {
        **other.config["config_groups"]["group_0"],
        "targets": [r"re:model\.layers\.\d+\.mlp\.down_proj"],
        "format": "float-quantized",
    }
    rest = {**said["config_groups"]["group_0"], "format": "pack-quantized"}
    groups = dict(zip(("group_0", "group_1"), (first, rest) if nearest_first else (rest, first), strict=True))
    config["quantization_config"] = {**said, "format": "mixed-precision", "config_groups": groups}
    weights = opened(write_checkpoint(tmp_path, config, tensors))
    assert {name: one.name for name, one in weights.packings.items()}[DOWN] == "fp8-channel-a8"
    assert weights.packings[QKV].name == "int8-channel"
    assert np.array_equal(weights[DOWN], meant[f"{down}weight"])


def test_a_module_named_in_full_comes_before_patterns_and_classes():
    groups = {
        f"group_{i}": {**PUBLISHED[name].config["config_groups"]["group_0"], "targets": targets, "format": form}
        for i, (name, form, targets) in enumerate((
            ("ct-int4", "pack-quantized", ["Linear"]),
            ("ct-int8-w8a16", "pack-quantized", ["re:.*down_proj", "re:.*up_proj"]),
            ("ct-fp8-channel", "float-quantized", ["model.layers.1.mlp.down_proj"]),
        ))
    }  # fmt: skip
    found = quantization(ConfigFile(Path("config.json"), {"quantization_config": settings("ct-int4", config_groups=groups)}))
    assert found is not None
    for module, packing in (
        ("model.layers.1.mlp.down_proj", "fp8-channel-a8"),
        ("model.layers.0.mlp.down_proj", "int8-channel"),
        ("model.layers.1.mlp.gate_proj", "int4-group32"),
    ):
        layout = found.layout(module)
        assert layout is not None
        assert layout.packing.name == packing


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("ct-")])
def test_older_writers_called_compressed_files_frozen(tmp_path: Path, name: str):
    tensors, config, meant = stored(MIMO, name)
    config["quantization_config"] = settings(name, quantization_status="frozen")
    weights = opened(write_checkpoint(tmp_path, config, tensors))
    assert weights.packings[DOWN].name == PUBLISHED[name].packing
    assert np.array_equal(weights[DOWN], meant["model.layers.0.mlp.down_proj.weight"])


def test_biases_of_zeros_that_a_quantiser_added_are_let_be(tmp_path: Path):
    tensors, config, _ = stored({**MIMO, "architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}, "gptq")
    tensors["model.layers.0.mlp.down_proj.bias"] = np.zeros(64, np.float32)
    opened(write_checkpoint(tmp_path / "zeros", config, tensors))
    tensors["model.layers.0.mlp.down_proj.bias"][3] = 1
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.down_proj\.bias \(one of 1\) does not belong"):
        opened(write_checkpoint(tmp_path / "ones", config, tensors))


def settings(name: str, **changes: Any) -> dict[str, Any]:
    return {**PUBLISHED[name].config, **changes}


def weights_of(name: str, **changes: Any) -> dict[str, Any]:
    group = PUBLISHED[name].config["config_groups"]["group_0"]
    return settings(name, config_groups={"group_0": {**group, "weights": {**group["weights"], **changes}}})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, r"\.quant_method is 'bitsandbytes', wanted one of compressed-tensors,"),
        ({"bits": 4}, r"quantization_config\.quant_method is None, wanted a name"),
        (settings("awq", bits=3), r"quantization_config\.bits is 3, wanted 4; use another export"),
        (settings("awq", version="gemv"), r"version is 'gemv', wanted one of 'gemm', 'GEMM'"),
        (settings("awq", zero_point=False), r"zero_point is False, wanted True"),
        (settings("awq", group_size=48), r"group_size is 48, wanted one of the packings int4-.*, not int4-group48-zeros"),
        (settings("awq", group_size="64"), r"group_size is '64', wanted a number of inputs, or -1"),
        (settings("gptq", dynamic={"-:a": {}, "+:b": {"bits": 8}}), r"dynamic is .*'\+:b': \{'bits': 8\}\}, wanted rules '-:'"),
        (settings("gptq", dynamic={"b": {"group_size": 32}}), r"dynamic is .*, wanted rules '-:' of modules that are left in"),
        (settings("gptq", dynamic={"-:(": {}}), r"dynamic is \{'-:\(': \{\}\}, wanted .* a regular expression \(missing \)"),
        (settings("gptq", dynamic=["-:a"]), r"dynamic is \['-:a'\], wanted an object"),
        (settings("gptq", bits=8), r"bits is 8, wanted 4"),
        (settings("fp8-block", fmt="e5m2"), r"fmt is 'e5m2', wanted 'e4m3'"),
        (settings("fp8-block", weight_block_size=[64, 64]), r"weight_block_size is \[64, 64\], wanted \[128, 128\]"),
        (settings("ct-int4", format="marlin-24"), r"group_0\.format is None, wanted one of naive-.*, not 'marlin-24'"),
        (settings("ct-int4", sparsity_config={"format": "sparse-24"}), r"sparsity_config is .*, wanted none: nothing sparse"),
        (settings("ct-int4", transform_config={"config_groups": {}}), r"transform_config is .*, wanted none: nothing sparse"),
        (settings("ct-int4", config_groups={}), r"config_groups is \{\}, wanted groups of modules"),
        (settings("ct-int4", config_groups={"group_0": None}), r"groups\.group_0 is None, wanted how a group of modules is"),
        (settings("ct-int4", ignore=["lm_head", "re:*gate"]), r"ignore is \['lm_head', 're:\*gate'\], wanted names, or 're:'"),
        (settings("ct-int4", config_groups={"group_0": {"targets": ["re:("]}}), r"group_0\.targets is \['re:\('\], wanted names"),
        (weights_of("ct-int4", num_bits=3), r"weights\.num_bits is 3, wanted one of 8, 4"),
        (weights_of("ct-int8-w8a8", symmetric=False), r"weights\.symmetric is False, wanted true for 8 bits"),
        (weights_of("ct-int8-w8a8", strategy="group", group_size=128), r"strategy is 'group', wanted one of the packings int8-"),
        (weights_of("ct-fp8-block", block_structure=[1, 128]), r"block_structure is \[1, 128\], wanted \[128, 128\]"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, config: dict[str, Any], said: str):
    tensors, whole, _ = stored(MIMO, "awq")
    with pytest.raises(CheckpointError, match=said):
        opened(write_checkpoint(tmp_path, {**whole, "quantization_config": config}, tensors))


Change = Callable[[dict[str, Any]], object]
Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("awq", lambda t: t.pop(Q + "scales"), rf"holds no tensor {Q}scales, wanted it with shape \[2, 64\] beside the packed"),
        ("awq", lambda t: t.update({Q + "scales": t[Q + "scales"].T}), r"scales is F32 \[64, 2\], wanted F32 or F16 or BF16"),
        ("gptq", lambda t: t.update({Q + "qzeros": t[Q + "qzeros"][:1]}), r"qzeros is I32 \[1, 8\], wanted I32 \[2, 8\]"),
        ("gptq", lambda t: t[Q + "g_idx"].fill(1), rf"{Q[:-1]} cannot be read, got its groups of inputs are not 2 of 32 each"),
        ("fp8-block", lambda t: t[Q + "weight"].fill(127), rf"matrix of {Q[:-1]} cannot be read, got weight holds NaN"),
        ("ct-int4", lambda t: t[Q + "weight_scale"].fill(np.inf), rf"of {Q[:-1]} cannot be read, got a scale is NaN or infinite"),
        ("ct-int4", lambda t: t.update({Q + "other": np.zeros(1)}), rf"tensor {Q}other \(one of 1\) does not belong"),
        ("awq", lambda t: t.pop(Q + "qweight"), rf"holds no tensor {Q}weight, wanted it with shape \[64, 64\]"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named(tmp_path: Path, name: str, change: Change, said: str):
    tensors, config, _ = stored(MIMO, name)
    change(tensors)
    directory = write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=said.replace("model.", r"model\.")):
        dict(opened(directory))


def test_a_packed_module_that_the_configuration_leaves_out_is_a_contradiction(tmp_path: Path):
    tensors, config, _ = stored(MIMO, "ct-int4")
    config["quantization_config"] = settings("ct-int4", ignore=["lm_head", r"re:.*q_proj"])
    with pytest.raises(CheckpointError, match=re.escape(f"leaves {Q[:-1]} out, but")):
        opened(write_checkpoint(tmp_path, config, tensors))


def test_modules_that_gptqmodel_leaves_in_floats(tmp_path: Path):
    """Its rules "-:" are patterns that the beginning of a module's name has to fit."""
    tensors, config, meant = stored(MIMO, "gptq")
    left = ("model.layers.0.self_attn.q_proj.", "model.layers.0.mlp.down_proj.")
    held = {name: value for name, value in tensors.items() if not name.startswith(left) or name.endswith("bias")}
    held |= {f"{module}weight": meant[f"{module}weight"] for module in left}
    config["quantization_config"] = settings(
        "gptq", dynamic={r"-:model\.layers\..*q_proj": {}, r"-:model\.layers\.0\.mlp\.down": {}, "-:mlp": {}}
    )
    weights = opened(write_checkpoint(tmp_path / "left", config, held))
    wanted = opened(write_checkpoint(tmp_path / "floats", MIMO, meant))
    assert DOWN not in weights.packings
    assert "layers.0.gate_up" in weights.packings, "-:mlp is not the beginning of its name"
    assert all(np.array_equal(weights[name], wanted[name]) for name in wanted)
    with pytest.raises(CheckpointError, match=re.escape(f"leaves {Q[:-1]} out, but")):
        opened(write_checkpoint(tmp_path / "packed", config, tensors))


def test_shapes_that_no_word_holds_are_refused():
    with pytest.raises(ValueError, match="12 outputs, wanted a multiple of 8"):
        _layout("awq").wanted((12, 64))
    with pytest.raises(ValueError, match="36 inputs, wanted a multiple of 8"):
        _layout("gptq").wanted((16, 36))


def _layout(name: str) -> Any:
    found = quantization(ConfigFile(Path("config.json"), {"quantization_config": PUBLISHED[name].config}))
    assert found is not None
    return found.layout("any")


@pytest.mark.deep  # importing it takes seconds; `make test` reads what the library wrote
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("ct-")])
def test_the_formats_own_library_agrees(name: str):
    """What it compresses is read as what it decompresses that to."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed; it is in the test extra")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    said = PUBLISHED[name].config
    scheme = QuantizationScheme(**said["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(said["format"])
    layout = _layout(name)
    shape = (256, 384) if "block" in name else (24, 96)
    matrix = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    stored, _ = PUBLISHED[name].form(matrix)
    scale = torch.from_numpy(stored["weight_scale"])
    given = {"weight": torch.from_numpy(matrix), "weight_scale": scale}
    if layout.packing.zeros:
        points = np.random.default_rng(2).integers(-8, 8, tuple(scale.shape)).astype(np.int8)
        given["weight_zero_point"] = torch.from_numpy(points)
    packed_there = compressor.compress(given, scheme)
    meant = compressor.decompress(dict(packed_there), scheme)["weight"].numpy()

    class Module:
        def __contains__(self, name: object) -> bool:
            return name in packed_there

        def floats(self, name: str) -> Any:
            return packed_there[name].numpy()

        def stored(self, name: str) -> Any:
            value = packed_there[name]
            return value.view(torch.uint8).numpy() if value.dtype == torch.float8_e4m3fn else value.numpy()

    assert isinstance(layout, (Bytes, PackQuantized))
    assert np.array_equal(layout.read(Module(), shape).read(), meant)
