"""Families: what config.json says becomes a description, and what cannot be computed that way is refused by name."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft.conformance.oracle.checkpoints import TINY_MIMO, random_tensors, tensor_shapes, write_checkpoint
from polydraft.contracts.kernels.rope_kv_write import plain_frequencies
from polydraft.errors import CapabilityError, CheckpointError, PluginError, PolydraftError
from polydraft.models import (
    Attention,
    Block,
    Checkpoint,
    Family,
    FamilyRegistry,
    GatedMlp,
    ModelDescription,
    Mtp,
    MtpLayout,
    Rope,
    TensorTable,
    load_weights,
)
from polydraft.models.families import BUILT_IN

LLAMA = {key: value for key, value in TINY_MIMO.items() if key not in {"num_nextn_predict_layers", "attention_bias"}}
LLAMA["architectures"] = ["LlamaForCausalLM"]


def describe(directory: Path, registry: FamilyRegistry | None = None) -> tuple[ModelDescription, TensorTable]:
    with Checkpoint(directory) as checkpoint:
        return (registry or FamilyRegistry()).describe(checkpoint)


def described(directory: Path, config: dict[str, Any]) -> ModelDescription:
    """Describe a checkpoint whose weights are those of `config`."""
    with Checkpoint(write_checkpoint(directory, config)) as checkpoint:
        description, table = FamilyRegistry().describe(checkpoint)
        load_weights(checkpoint, description, table)
    return description


EXPERTS: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "moe_intermediate_size": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 0,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64}


def refusal(directory: Path, kind: type[PolydraftError], config: dict[str, Any], *wanted: str) -> str:
    """Describe the MiMo weights under `config` and return the one sentence that refuses them."""
    with pytest.raises(kind) as caught:
        describe(write_checkpoint(directory, config, random_tensors(TINY_MIMO)))
    sentence = str(caught.value)
    assert [part for part in ("config.json", *wanted) if part not in sentence] == [], sentence
    assert "\n" not in sentence
    return sentence


# --- what a configuration becomes -------------------------------------------------------------------------------------


def test_mimo(tmp_path: Path) -> None:
    block = Block(
        Attention(num_heads=4, num_kv_heads=2, head_dim=6, rope=Rope(plain_frequencies(6, 10000.0)), qkv_bias=True),
        GatedMlp(24),
    )
    assert described(tmp_path / "a-model", TINY_MIMO) == ModelDescription(
        name="a-model",
        architecture="MiMoForCausalLM",
        hidden_size=16,
        vocab_size=40,
        eps=1e-5,
        blocks=(block, block),
        max_model_len=128,
        eos_token_ids=(0,),
        mtp=Mtp((block,), order="hidden_first", feed="pre", final_norm="own", recycle="pre", mask_first_position=False),
    )


def test_qwen2_is_mimo_without_drafts(tmp_path: Path) -> None:
    mimo = described(tmp_path / "model", TINY_MIMO)
    qwen = described(tmp_path / "model", {**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    note = "Qwen2ForCausalLM has no MTP layers"
    assert qwen == dataclasses.replace(mimo, architecture="Qwen2ForCausalLM", mtp=None, mtp_note=note)


def test_qwen3_norms_queries_and_keys(tmp_path: Path) -> None:
    description = described(tmp_path, {**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
    attention: Any = description.blocks[1].mixer
    assert (attention.qk_norm, attention.qkv_bias, attention.output_bias) == (True, False, False)
    table = describe(tmp_path)[1]
    assert [part.shape for part in table.parts["layers.1.q_norm"] + table.parts["layers.1.k_norm"]] == [(6,), (6,)]


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_llama_biases(tmp_path: Path, attention_bias: bool, mlp_bias: bool) -> None:
    config = {**LLAMA, "attention_bias": attention_bias, "mlp_bias": mlp_bias}
    description = described(tmp_path, config)
    block: Any = description.blocks[0]
    assert (block.mixer.qkv_bias, block.mixer.output_bias) == (attention_bias, attention_bias)
    assert block.feed_forward.bias == mlp_bias
    biases = {key for key in describe(tmp_path)[1].parts if key.endswith("_bias") and key.startswith("layers.0.")}
    assert biases == {
        f"layers.0.{name}"
        for name, present in {"qkv": attention_bias, "o": attention_bias, "gate_up": mlp_bias, "down": mlp_bias}.items()
        if present
        for name in [f"{name}_bias"]
    }


def test_defaults_where_a_key_is_absent_or_null(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key not in {"head_dim", "rope_theta", "eos_token_id"}}
    config |= {"num_key_value_heads": None, "hidden_act": None, "rope_scaling": None, "tie_word_embeddings": None}
    shapes = {**config, "head_dim": 4, "num_key_value_heads": 4}
    description = describe(write_checkpoint(tmp_path, config, random_tensors(shapes)))[0]
    attention: Any = description.blocks[0].mixer
    assert (attention.num_kv_heads, attention.head_dim, attention.rope) == (4, 4, Rope(plain_frequencies(4, 10000.0)))
    assert (description.eos_token_ids, description.bos_token_id, description.tie_embeddings) == ((), None, False)


@pytest.mark.parametrize("spelling", ["rope_theta", "rope_parameters", "rope_scaling and rope_theta"])
def test_rotary_base_in_every_spelling(tmp_path: Path, spelling: str) -> None:
    config = {key: value for key, value in TINY_MIMO.items() if key != "rope_theta"}
    spellings: dict[str, dict[str, Any]] = {
        "rope_theta": {"rope_theta": 640000},
        "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 640000.0}},
        "rope_scaling and rope_theta": {"rope_theta": 640000, "rope_scaling": {"type": "default"}},
    }
    attention: Any = described(tmp_path, config | spellings[spelling]).blocks[0].mixer
    assert attention.rope == Rope(plain_frequencies(6, 640000.0))


@pytest.mark.parametrize(("dtype", "name"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_dtype_is_that_of_the_file(tmp_path: Path, dtype: str, name: str) -> None:
    config = {**TINY_MIMO, "torch_dtype": "float64", "dtype": "float8"}  # what they say is not what is stored
    assert describe(write_checkpoint(tmp_path, config, dtype=dtype))[0].dtype == name


def test_stop_tokens_are_the_union(tmp_path: Path) -> None:
    config = {**TINY_MIMO, "eos_token_id": [7, 3], "bos_token_id": 5, "pad_token_id": 6}
    write_checkpoint(tmp_path, config)
    assert describe(tmp_path)[0].eos_token_ids == (3, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 39]}')
    description = describe(tmp_path)[0]
    assert (description.eos_token_ids, description.bos_token_id, description.pad_token_id) == ((3, 7, 39), 5, 6)
    for text, reason in {'{"eos_token_id": 40}': "from 0 to 39", '{"eos_token_id": "x"}': "'x'", "{": "JSON"}.items():
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"generation_config\.json") as caught:
            describe(tmp_path)
        assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("said", "stored", "tied"), [(True, False, True), (True, True, True), (None, False, True), (None, True, False)]
)
def test_tied_embeddings(tmp_path: Path, said: bool | None, stored: bool, tied: bool) -> None:
    config = {**TINY_MIMO, "tie_word_embeddings": said}
    tensors = random_tensors({**config, "tie_word_embeddings": not stored})
    description, table = describe(write_checkpoint(tmp_path, config, tensors))
    assert description.tie_embeddings == tied
    assert (table.parts["lm_head"] == table.parts["embed"]) == tied


# --- MTP: configuration and tensors must agree ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, None])
def test_stored_mtp_layers_that_the_configuration_denies(tmp_path: Path, count: int | None) -> None:
    config = {**TINY_MIMO, "num_nextn_predict_layers": count}
    description, table = describe(write_checkpoint(tmp_path, config, random_tensors(TINY_MIMO)))
    assert description.mtp is None
    assert "16 tensors model.mtp_layers.* are stored" in description.mtp_note
    assert "num_nextn_predict_layers" in description.mtp_note
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_weights(checkpoint, description, table)
        assert not any(name.startswith("mtp.") for name in weights)


def test_no_mtp_layers_at_all(tmp_path: Path) -> None:
    description = described(tmp_path, {**TINY_MIMO, "num_nextn_predict_layers": 0})
    assert description.mtp is None
    assert description.mtp_note == f"{tmp_path / 'config.json'} sets num_nextn_predict_layers to 0"


def test_the_newer_spelling_of_the_count(tmp_path: Path) -> None:
    config = {key: value for key, value in TINY_MIMO.items() if key != "num_nextn_predict_layers"}
    description, _ = describe(write_checkpoint(tmp_path, {**config, "num_mtp_layers": 1}, random_tensors(TINY_MIMO)))
    assert description.mtp is not None


def test_several_mtp_layers_are_described_and_refused_by_name(tmp_path: Path) -> None:
    description = described(tmp_path, {**TINY_MIMO, "num_nextn_predict_layers": 3})
    assert description.mtp is not None
    assert list(description.mtp.layers) == ["mtp.0", "mtp.1", "mtp.2"]
    assert "3 distinct MTP layers" in description.mtp.unsupported()[0]
    assert sum(name.startswith("mtp.2.") for name in describe(tmp_path)[1].parts) == 11


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "hint"),
    [
        (["MimoForCausalLM"], "did you mean MiMoForCausalLM"),
        (["Qwen3MoEForCausalLM"], "did you mean Qwen3MoeForCausalLM"),
        (["GPTBigCode"], "a plugin"),
        ([], "a plugin"),
        (None, "a plugin"),
        ([3], "a plugin"),
    ],
)
def test_unknown_architecture(tmp_path: Path, named: Any, hint: str) -> None:
    known = "LlamaForCausalLM, MiMoForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    refusal(tmp_path, CheckpointError, {**TINY_MIMO, "architectures": named}, repr(named), known, hint)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"vocab_size": 40.0}, "vocab_size is 40.0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": None}, "has no rms_norm_eps"),
        ({"max_position_embeddings": None}, "has no max_position_embeddings"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_nextn_predict_layers": 10**12}, "num_nextn_predict_layers is 1000000000000"),
        ({"num_nextn_predict_layers": 2**70}, f"num_nextn_predict_layers is {2**70}"),
        ({"head_dim": 10**12}, "heads have 1000000000000 elements"),
        ({"hidden_size": 2**70, "head_dim": None}, "heads have 2951"),
        ({"head_dim": 10**400}, "elements"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({**EXPERTS, "n_routed_experts": 10**9}, "describes 6000000000 matrices of experts"),
        ({**EXPERTS, "n_routed_experts": 10**9, "first_k_dense_replace": 9}, "describes 2000000000 matrices of experts"),
        ({"head_dim": 7}, "head_dim 7"),
        ({**EXPERTS, "partial_rotary_factor": 0.55}, "partial_rotary_factor is 0.55"),
        ({**EXPERTS, "partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({**EXPERTS, "partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e+308"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 1}, "mlp_only_layers is 1, wanted a list"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": ["0"]}, "mlp_only_layers is ['0'], wanted a list"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window None"),
        ({"layer_types": ["full_attention"]}, "what these say of 2 layers"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({**WINDOWS, "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (
            {**WINDOWS, "architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            "wanted what these say",
        ),
        ({**WINDOWS, "sliding_window": 0}, "sliding_window is 0"),
        ({**WINDOWS, "max_window_layers": -1}, "max_window_layers is -1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "has no factor"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor is -2"),
        ({**EXPERTS, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "partial_rotary_factor": 0.34}, "at least 4"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "partial_rotary_factor": 0.5}, "0.5 beside a rotation of type yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor 4.0 and high_freq_factor 4.0",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1}, "'yarn', 'factor': 4.0} with a rope_theta of 1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1e-308}}, "wanted numbers that make frequencies"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, "wanted numbers that make frequencies"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "wanted one of the two",
        ),
        ({"eos_token_id": 40}, "eos_token_id is 40"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"bos_token_id": 1.5}, "bos_token_id is 1.5"),
    ],
)
def test_malformed_key(tmp_path: Path, change: dict[str, Any], wanted: str) -> None:
    refusal(tmp_path, CheckpointError, {**TINY_MIMO, **change}, wanted, "wanted")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "longrope', 'short_factor'",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "unknown keys ['alpha']"),
        ({"rope_scaling": {"factor": 4.0}}, "unknown keys ['factor']"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "architectures": ["Ernie4_5ForCausalLM"]},
            "sliding_window 64",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"], "architectures": ["LlamaForCausalLM"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_setting_that_is_not_built(tmp_path: Path, change: dict[str, Any], wanted: str) -> None:
    refusal(tmp_path, CapabilityError, {**TINY_MIMO, **change}, wanted, "wanted")


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": None},
        {"layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_sliding_window_that_is_not_in_use(tmp_path: Path, change: dict[str, Any]) -> None:
    assert windows(described(tmp_path, {**TINY_MIMO, **change})) == [0, 0]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, [0, 0]),  # the first 28 layers have none, where nothing is said
        ({"max_window_layers": 0}, [64, 64]),
        ({"max_window_layers": 1}, [0, 64]),
        ({"max_window_layers": 1, "layer_types": ["sliding_attention", "full_attention"]}, [64, 0]),
    ],
)
def test_layers_with_sliding_windows(tmp_path: Path, change: dict[str, Any], wanted: list[int]) -> None:
    description = described(tmp_path, {**TINY_MIMO, **WINDOWS, **change})
    assert windows(description) == wanted
    assert description.mtp is not None
    assert description.mtp.blocks[0] == description.blocks[-1]
    assert [block.capabilities for block in description.blocks] == [("sliding_window",) if keys else () for keys in wanted]


def windows(description: ModelDescription) -> list[int]:
    mixers: list[Any] = [block.mixer for block in description.blocks]
    return [mixer.sliding_window for mixer in mixers]


# --- plugins ----------------------------------------------------------------------------------------------------------


def renamed_family(**changes: Any) -> Family:
    """A family as a plugin would add it: other names, other conventions."""
    layout = MtpLayout(
        prefix="draft.{i}.",
        emb_norm="enorm",
        hid_norm="hnorm",
        proj="fc",
        order="embedding_first",
        feed="post",
        final_norm="target",
        recycle="post",
        mask_first_position=True,
    )
    names = {key: tuple(name.replace("self_attn.", "attn.") for name in names) for key, names in BUILT_IN[0].block_names.items()}
    return dataclasses.replace(
        BUILT_IN[0], architecture="OtherForCausalLM", mtp=layout, block_names=names, norm_plus_one=True, **changes
    )


def test_plugin_family_is_data(tmp_path: Path) -> None:
    tensors = {}
    for name, array in random_tensors(TINY_MIMO).items():
        renamed = name.replace("self_attn.", "attn.").replace("model.mtp_layers.", "draft.")
        renamed = renamed.replace("token_layernorm.weight", "enorm").replace("hidden_layernorm.weight", "hnorm")
        tensors[renamed.replace("input_proj.weight", "fc")] = array
    del tensors["draft.0.final_layernorm.weight"]
    write_checkpoint(tmp_path, {**TINY_MIMO, "architectures": ["OtherForCausalLM"]}, tensors)
    registry = FamilyRegistry()
    registry.register(renamed_family(), plugin="other")
    description, table = describe(tmp_path, registry)
    assert description.mtp == Mtp(description.blocks[:1], "embedding_first", "post", "target", "post", mask_first_position=True)
    assert description.norm_plus_one
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_weights(checkpoint, description, table)
        assert "mtp.0.final_norm" not in weights
        assert np.array_equal(weights["mtp.0.proj"], tensors["draft.0.fc"])
    with pytest.raises(CheckpointError, match="OtherForCausalLM"):
        describe(tmp_path)  # another registry knows nothing of the plugin


def test_two_families_for_one_architecture() -> None:
    registry = FamilyRegistry()
    registry.register(renamed_family(), plugin="first")
    with pytest.raises(PluginError, match=r"plugin second .* OtherForCausalLM .* from first"):
        registry.register(renamed_family(), plugin="second")
    with pytest.raises(PluginError, match=r"MiMoForCausalLM .* from polydraft"):
        registry.register(BUILT_IN[0], plugin="third")


def test_family_that_forgot_a_name(tmp_path: Path) -> None:
    names = {key: value for key, value in BUILT_IN[0].block_names.items() if key != "qkv_bias"}
    registry = FamilyRegistry()
    registry.register(dataclasses.replace(BUILT_IN[0], architecture="Other", block_names=names), plugin="p")
    write_checkpoint(tmp_path, {**TINY_MIMO, "architectures": ["Other"]}, random_tensors(TINY_MIMO))
    with pytest.raises(PluginError, match="lack qkv_bias"):
        describe(tmp_path, registry)


def test_the_tables_of_families_and_tests_agree(tmp_path: Path) -> None:
    _, table = describe(write_checkpoint(tmp_path))
    named = {part.name: part.shape for parts in table.parts.values() for part in parts}
    assert named == tensor_shapes(TINY_MIMO)
