"""The loader: exact conversion, canonical concatenation, and one clear sentence for every defect of a checkpoint."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from polydraft.conformance.oracle.checkpoints import TINY_MIMO, random_tensors, tensor_shapes, write_checkpoint, write_safetensors
from polydraft.errors import CheckpointError
from polydraft.models import Checkpoint, FamilyRegistry, Weights, load_weights, safetensors_file

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
PARTS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x[2:5], "columns": lambda x: x[:, 2:4], "features": lambda x: x[..., 1:3], "turned": lambda x: x.T[1:3],
    "as rows": lambda x: x.reshape(-1)[7:90], "one row": lambda x: x[3], "one number": lambda x: x[2, 3, 1],
    "nothing": lambda x: x[4:4], "every other": lambda x: x[::2, 1::3], "backwards": lambda x: x[::-1],
    "chosen": lambda x: x[[1, 6]], "again": lambda x: x[:, None],
}  # fmt: skip
MTP_NAMES = [name for name in tensor_shapes(TINY_MIMO) if name.startswith("model.mtp_layers.")]


def load(directory: Path) -> Weights:
    checkpoint = Checkpoint(directory)
    return load_weights(checkpoint, *FamilyRegistry().describe(checkpoint))


def load_all(directory: Path) -> dict[str, Any]:
    return dict(load(directory))


def refusal(directory: Path, *wanted: str) -> str:
    """Load `directory` completely and return the one sentence of its refusal, which must contain all of `wanted`."""
    with pytest.raises(CheckpointError) as caught:
        load_all(directory)
    sentence = str(caught.value)
    assert [part for part in wanted if part not in sentence] == [], sentence
    assert "\n" not in sentence
    assert ", wanted " in sentence or "; " in sentence, sentence
    return sentence


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **changes}))


def raw_file(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_every_bfloat16_is_read_exactly(tmp_path: Path) -> None:
    patterns = np.arange(65536, dtype=np.uint32) << 16
    write_checkpoint(tmp_path, tensors={"x": patterns.view(np.float32).reshape(256, 256)}, dtype="BF16")
    read = Checkpoint(tmp_path).tensor("x")
    assert np.array_equal(read.view(np.uint32).reshape(-1), patterns)  # bit by bit, NaN payloads and signs included


@pytest.mark.parametrize(("dtype", "name"), [("F32", "float32"), ("F16", "float16")])
def test_float32_and_float16_are_read_exactly(tmp_path: Path, dtype: str, name: str) -> None:
    values = np.array([[1.5, -0.0, 6e-8], [65504, -2.25, 0.333251953125]], np.float32)
    write_checkpoint(tmp_path, tensors={"pad": np.array([1, 2, 3], np.float32), "x": values}, dtype=dtype)
    checkpoint = Checkpoint(tmp_path)
    expected = values.astype(np.float16).astype(np.float32) if dtype == "F16" else values
    assert np.array_equal(checkpoint.tensor("x"), expected)
    assert (checkpoint.dtype("x"), checkpoint.shape("x")) == (name, (2, 3))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"])
def test_whole_numbers_are_read_exactly(tmp_path: Path, dtype: str) -> None:
    extremes = [0, 1] if dtype == "bool" else [np.iinfo(dtype).min, np.iinfo(dtype).max]
    values = np.array([[0, *extremes], [1, 1, 0]]).astype(dtype)
    write_checkpoint(tmp_path, tensors={})
    save_file({"x": values, "weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        read = checkpoint.integers("x")
        assert (str(read.dtype), read.tolist()) == ("int64", values.astype(np.int64).tolist())
        with pytest.raises(CheckpointError, match=r"tensor weight is stored as F32, wanted whole numbers .*; convert it"):
            checkpoint.integers("weight")
        with pytest.raises(CheckpointError, match="holds no tensor d2t"):
            checkpoint.integers("d2t")


def test_a_header_of_odd_length_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors={"x": np.array([3], np.float32)})
    header = b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}' + b" " * 4
    assert len(header) % 4
    raw_file(tmp_path / "model.safetensors", header, struct.pack("<f", 7.5))
    assert Checkpoint(tmp_path).tensor("x").tolist() == [7.5]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_tensor_is_what_is_seen_of_the_whole(tmp_path: Path, monkeypatch: Any, part: str, dtype: str) -> None:
    """However much is read at once: the whole tensor, some rows, parts of one row."""
    values = np.arange(8 * 6 * 4, dtype=np.float32).reshape(8, 6, 4)
    write_checkpoint(tmp_path, tensors={"pad": np.array([1, 2, 3], np.float32), "x": values}, dtype=dtype)
    with Checkpoint(tmp_path) as checkpoint:
        for size in (3, 8, 50, 1 << 18):
            monkeypatch.setattr(safetensors_file, "_PIECE", size)
            assert np.array_equal(checkpoint.piece("x", PARTS[part]), PARTS[part](values))
            assert np.array_equal(checkpoint.tensor("x"), values)


READ: dict[str, Callable[[Checkpoint], object]] = {
    "whole": lambda one: one.tensor(Q_PROJ), "part": lambda one: one.piece(Q_PROJ, lambda stored: stored[1:, 1:]),
    "stored": lambda one: one.stored(Q_PROJ), "compared": lambda one: one.same_bytes(Q_PROJ, Q_PROJ),
}  # fmt: skip


@pytest.mark.parametrize("how", READ)
def test_a_file_that_is_cut_while_it_is_open_is_an_error(tmp_path: Path, how: str) -> None:
    """Such as that of a trainer that writes its next weights over it. In a process of its own, which a signal would end."""
    write_checkpoint(tmp_path)

    def read() -> str:
        with Checkpoint(tmp_path) as checkpoint:
            with (tmp_path / "model.safetensors").open("r+b") as file:
                file.truncate(4096)
            try:
                READ[how](checkpoint)
            except CheckpointError as error:
                return str(error)
        return "no error"

    status, said = in_child(read)
    assert (status, "was cut short while it was read, got 4096 bytes, wanted at least" in said) == (0, True), said


def in_child(work: Callable[[], str]) -> tuple[int, str]:
    """The status of a child process that does this, negative for a signal, and what came of it."""
    end, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begin, work().encode())
        os._exit(0)
    os.close(begin)
    _, status = os.waitpid(child, 0)
    with os.fdopen(end) as said:
        return os.waitstatus_to_exitcode(status), said.read()


def test_tensors_are_fresh_contiguous_and_survive_closing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        first, second = checkpoint.tensor(Q_PROJ), checkpoint.tensor(Q_PROJ)
    assert first.dtype == np.float32
    assert first.flags.c_contiguous
    assert not np.shares_memory(first, second)
    first[:] = 0
    assert np.array_equal(second, random_tensors(TINY_MIMO)[Q_PROJ])
    with pytest.raises(CheckpointError, match=f"model.safetensors is closed, wanted tensor {Q_PROJ}"):
        checkpoint.tensor(Q_PROJ)
    checkpoint.close()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_canonical_weights_concatenate_in_order(tmp_path: Path, num_shards: int) -> None:
    write_checkpoint(tmp_path, num_shards=num_shards)
    stored, weights = random_tensors(TINY_MIMO), load(tmp_path)
    loaded = dict(weights)
    assert {name: array.shape for name, array in loaded.items()} == {name: weights.shape(name) for name in weights}
    for canonical, prefix in {"layers.1": "model.layers.1", "mtp.0": "model.mtp_layers.0"}.items():
        joins = {
            "qkv": [f"self_attn.{x}_proj.weight" for x in "qkv"],
            "qkv_bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
            "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            "o": ["self_attn.o_proj.weight"],
            "down": ["mlp.down_proj.weight"],
            "input_norm": ["input_layernorm.weight"],
            "post_norm": ["post_attention_layernorm.weight"],
        }
        for key, names in joins.items():
            expected = np.concatenate([stored[f"{prefix}.{name}"] for name in names])
            assert np.array_equal(loaded[f"{canonical}.{key}"], expected), key
    plain = {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "lm_head": "lm_head.weight",
        "mtp.0.emb_norm": "model.mtp_layers.0.token_layernorm.weight",
        "mtp.0.hid_norm": "model.mtp_layers.0.hidden_layernorm.weight",
        "mtp.0.proj": "model.mtp_layers.0.input_proj.weight",
        "mtp.0.final_norm": "model.mtp_layers.0.final_layernorm.weight",
    }
    assert all(np.array_equal(loaded[key], stored[name]) for key, name in plain.items())
    assert len(loaded) == 3 + 3 * 7 + 4
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in loaded.values())


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_MIMO)
    tensors[Q_PROJ][3, 2] = np.nan
    weights = load(write_checkpoint(tmp_path, tensors=tensors))
    assert np.isfinite(weights["layers.0.qkv"]).all()
    with pytest.raises(CheckpointError, match="nan"):
        weights["layers.1.qkv"]


# --- directories ------------------------------------------------------------------------------------------------------


def test_no_directory(tmp_path: Path) -> None:
    refusal(tmp_path / "absent", "absent", "is no directory", "nothing there")
    with pytest.raises(CheckpointError, match=r"^model '' is no directory, got an empty name, wanted a local directory"):
        Checkpoint("")
    (tmp_path / "file").write_text("")
    refusal(tmp_path / "file", "is no directory", "a file")
    refusal(tmp_path / ("x" * 5000), "is no directory", "got an error (File name too long)")


def test_config_is_missing_or_malformed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    config = tmp_path / "config.json"
    for text, reason in {"{": "is no valid JSON", "[1]": "holds a JSON list", "\udcff": "is no valid JSON"}.items():
        config.write_bytes(text.encode("utf-8", "surrogateescape"))
        refusal(tmp_path, str(config), reason)
    config.write_bytes(b"[" * 100_000)
    refusal(tmp_path, str(config), "is no valid JSON")
    config.unlink()
    refusal(tmp_path, str(config), "is missing")


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refusal(tmp_path, "holds no weights", "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")  # a pickle that would run a command
    refusal(tmp_path, "pytorch_model.bin", "pickled", "unpickling runs code", "save_pretrained")


def test_several_files_need_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    load_all(tmp_path)
    write_safetensors(tmp_path / "two.safetensors", {"x": np.array([1], np.float32)})
    refusal(tmp_path, "one.safetensors, two.safetensors", INDEX)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_shards=3)
    index = tmp_path / INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    (tmp_path / "model-00002-of-00003.safetensors").rename(tmp_path / "aside")
    missing = next(name for name, shard in weight_map.items() if shard.startswith("model-00002"))
    refusal(tmp_path, INDEX, missing, "model-00002-of-00003.safetensors, which is missing")
    (tmp_path / "aside").rename(tmp_path / "model-00002-of-00003.safetensors")

    edit_json(index, weight_map={**weight_map, Q_PROJ: "model-00003-of-00003.safetensors"})
    assert weight_map[Q_PROJ] != "model-00003-of-00003.safetensors"
    refusal(tmp_path, "model-00003-of-00003.safetensors lacks", Q_PROJ, INDEX)

    for outside in ("../model.safetensors", "/etc/passwd", 7):
        edit_json(index, weight_map={**weight_map, Q_PROJ: outside})
        refusal(tmp_path, INDEX, Q_PROJ, repr(outside))
    edit_json(index, weight_map={})
    refusal(tmp_path, INDEX, "no weight_map")


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 100])
def test_truncated_shard(tmp_path: Path, cut: int) -> None:
    write_checkpoint(tmp_path, num_shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-cut])
    refusal(tmp_path, str(shard), "is truncated", "tensor model.mtp_layers.0.")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is truncated, got 0 bytes"),
        (b"1234", "is truncated, got 4 bytes"),
        (struct.pack("<Q", 1 << 40) + b"{}", "is truncated or corrupt"),
        (b'{"schema": "polydraft.error/1"}', "is no safetensors file, got b'{\"schema' at its beginning"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (struct.pack("<Q", 4) + b"{{}}", "is no valid JSON, got "),
        (struct.pack("<Q", 2) + b"[]", "holds a JSON list, wanted a JSON object"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "is no valid JSON, got values that nest too deep"),
        (struct.pack("<Q", 8) + b'{"x": 1}', "corrupt header"),
    ],
)
def test_file_without_a_header(tmp_path: Path, content: bytes, reason: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    refusal(tmp_path, "model.safetensors", reason)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "tensor x starts at byte"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "tensor x (F32, shape [3]) takes 8 bytes, wanted 12"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "is corrupt, got"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "corrupt header"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "corrupt header"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "corrupt header"),
        ({"dtype": "F32", "shape": [2]}, "corrupt header"),
    ],
)
def test_header_that_contradicts_the_data(tmp_path: Path, entry: object, reason: str) -> None:
    write_checkpoint(tmp_path)
    raw_file(tmp_path / "model.safetensors", {"x": entry}, bytes(8))
    refusal(tmp_path, "model.safetensors", reason)


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "lm_head.weight", *MTP_NAMES])
def test_missing_tensor(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(TINY_MIMO)
    shape = tensors.pop(name).shape
    sentence = refusal(write_checkpoint(tmp_path, tensors=tensors), str(tmp_path), name, str(list(shape)))
    assert ("set num_nextn_predict_layers to 0" in sentence) == (name in MTP_NAMES)


def test_there_are_sixteen_mtp_tensors_and_configuration_alone_makes_no_head(tmp_path: Path) -> None:
    assert len(MTP_NAMES) == 16
    tensors = {name: array for name, array in random_tensors(TINY_MIMO).items() if name not in MTP_NAMES}
    refusal(write_checkpoint(tmp_path, tensors=tensors), "model.mtp_layers.0.", "num_nextn_predict_layers")


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_MIMO)
    tensors[Q_PROJ] = tensors[Q_PROJ].T
    refusal(write_checkpoint(tmp_path, tensors=tensors), "model.safetensors", Q_PROJ, "[16, 24]", "[24, 16]")


def test_unsupported_dtype(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_MIMO)
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(np.int64)
    refusal(write_checkpoint(tmp_path, tensors=tensors), "model.safetensors", Q_PROJ, "stored as I64", "BF16")
    with pytest.raises(CheckpointError, match="stored as I64"):
        load(tmp_path)  # before anything is read


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "BF16"), (np.inf, "F16"), (-np.inf, "F32")])
def test_weight_that_is_no_number(tmp_path: Path, value: float, dtype: str) -> None:
    tensors = random_tensors(TINY_MIMO)
    tensors["model.mtp_layers.0.mlp.up_proj.weight"][5, 7] = value
    write_checkpoint(tmp_path, tensors=tensors, dtype=dtype, num_shards=2)
    refusal(tmp_path, "model-00002-of", "model.mtp_layers.0.mlp.up_proj.weight", f"holds {value} at [5, 7]")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"num_hidden_layers": 1}, "model.layers.1."),
        ({"num_hidden_layers": 3}, "model.layers.2."),
        ({"vocab_size": 41}, "model.embed_tokens.weight"),
        ({"head_dim": 8}, "model.layers.0.self_attn.q_proj.weight"),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight"),
        ({"intermediate_size": 32}, "model.layers.0.mlp.gate_proj.weight"),
        ({"num_nextn_predict_layers": 2}, "model.mtp_layers.1."),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": False}, "self_attn.k_proj.bias"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "model.mtp_layers.0."),
        ({"architectures": ["Qwen3ForCausalLM"]}, "o_proj.bias"),
    ],
)
def test_configuration_of_other_weights(tmp_path: Path, change: dict[str, Any], wanted: str) -> None:
    refusal(write_checkpoint(tmp_path, {**TINY_MIMO, **change}, random_tensors(TINY_MIMO)), "config.json", wanted)


def test_what_is_derived_from_the_configuration_is_not_read(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_MIMO)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.arange(3)  # not even a float
    assert "layers.0.qkv" in load_all(write_checkpoint(tmp_path, tensors=tensors))


@pytest.mark.parametrize("present", [False, True])
def test_tied_head(tmp_path: Path, present: bool) -> None:
    config = {**TINY_MIMO, "tie_word_embeddings": True}
    tensors = random_tensors(config)
    assert "lm_head.weight" not in tensors
    if present:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    loaded = load_all(write_checkpoint(tmp_path, config, tensors))
    assert np.array_equal(loaded["lm_head"], tensors["model.embed_tokens.weight"])
    assert not np.shares_memory(loaded["lm_head"], loaded["embed"])


@pytest.mark.parametrize(
    ("copy", "original", "tied"),
    [
        ("lm_head.weight", "model.embed_tokens.weight", True),
        ("model.mtp_layers.0.embed_tokens.weight", "model.embed_tokens.weight", False),
        ("model.mtp_layers.0.lm_head.weight", "lm_head.weight", False),
    ],
)
def test_repeated_tensors_must_repeat(tmp_path: Path, copy: str, original: str, tied: bool) -> None:
    config = {**TINY_MIMO, "tie_word_embeddings": tied}
    tensors = random_tensors(config)
    tensors[copy] = tensors[original].copy()
    loaded = load_all(write_checkpoint(tmp_path, config, tensors))
    assert not any("lm_head" in name or "embed" in name for name in loaded if name.startswith("mtp."))
    tensors[copy][0, 0] += 1
    refusal(write_checkpoint(tmp_path, config, tensors), "model.safetensors", copy, f"differs from {original}")
    for other in (tensors[original][:-1], tensors[original].reshape(16, 40)):
        tensors[copy] = other
        refusal(write_checkpoint(tmp_path, config, tensors), "model.safetensors", copy, f"differs from {original}")


def test_unknown_name_on_an_open_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path))
    for ask in (checkpoint.tensor, checkpoint.shape, checkpoint.dtype, checkpoint.file):
        with pytest.raises(CheckpointError, match="holds no tensor nowhere"):
            ask("nowhere")
    assert checkpoint.file(Q_PROJ) == tmp_path / "model.safetensors"
    assert set(checkpoint.names()) == set(tensor_shapes(TINY_MIMO))
