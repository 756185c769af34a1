"""What blocks, kinds and caches declare, what negotiation and loading make of it, and the launches of equal layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft import LLM
from polydraft.config import EngineConfig
from polydraft.conformance.oracle.checkpoints import TINY_MIMO, random_tensors, write_checkpoint
from polydraft.conformance.oracle.model import OracleModel
from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.rope_kv_write import plain_frequencies
from polydraft.engine import Engine
from polydraft.errors import CheckpointError
from polydraft.models import (
    Attention,
    Block,
    Checkpoint,
    FamilyRegistry,
    GatedMlp,
    Rope,
    Stretch,
    Tensor,
    TensorTable,
    Weights,
    load_weights,
)
from polydraft.models.block import At, Norm, emit_block, emit_block_rows, lacking, scratch_buffers
from polydraft.models.decoder import HIDDEN
from polydraft.models.tensor_table import stored_parts
from polydraft.program.caches import KvRows, PagedRows, SlotState, block_bytes, never_hit, slot_bytes
from polydraft.program.declare import StepBuffer
from polydraft.program.program import ProgramBuilder
from polydraft.resolve import resolve
from polydraft.sampling_params import SamplingParams
from tests.support import mixed_layers, tiny
from tests.support.plugin_doubles import info

LIMITS = Limits(
    max_seqs=3, num_drafts=2, max_rows=20, max_logit_rows=9, max_len=32, block_size=4, num_blocks=10, max_blocks=8,
    max_stop_tokens=4, vocab_size=40,
)  # fmt: skip
DENSE = Block(Attention(4, 2, 8, Rope(plain_frequencies(8, 1e4))), GatedMlp(48))
BLOCK_LAUNCHES = ["linear", "rope_kv_write", "paged_attention", "linear", "residual_add+rms_norm", "linear", "swiglu", "linear"]


def test_launches_of_equal_layers():
    """The lists that the demo model has had since there were steps: kinds and taps changed no launch of them."""
    engine = LLM(draft_tokens=2, backend="reference").engine
    programs = engine.runner.programs["greedy"]
    forward = ["embed", "forward_meta", "rms_norm"]
    for _ in range(engine.model.num_layers):
        forward += [*BLOCK_LAUNCHES, "residual_add+rms_norm"]
    forward[-1:] = ["residual_add", "gather_rows", "rms_norm", "linear"]
    start = ["reserve_blocks", "pack_rows", "pack_logit_rows"]
    assert programs["target"].describe()[: len(start) + len(forward)] == start + forward
    combine = ["forward_meta", "embed", "combine_draft_inputs", "linear"]
    narrowed = ["rms_norm", "linear", "rope_kv_write", "paged_attention", "select_last_rows", "select_last_rows"]
    rest = [*BLOCK_LAUNCHES[3:], "residual_add+rms_norm", "linear"]
    first = ["pack_draft_rows", "begin_draft", *combine, *narrowed, *rest]
    assert programs["draft"].describe()[: len(first)] == first
    later = [*combine, "rms_norm", *BLOCK_LAUNCHES, "residual_add+rms_norm", "linear"]
    behind = programs["draft"].describe()[len(first) :]
    second = behind.index("advance_draft") + 1
    assert behind[second : second + len(later)] == later


# -- declarations ------------------------------------------------------------------------------------
def test_scratch_is_shared_by_shape():
    wide = dataclasses.replace(DENSE, feed_forward=GatedMlp(64))
    names = [buffer.name for buffer in scratch_buffers([DENSE, wide, DENSE], 32)]
    assert names == [
        "scratch.normed32", "scratch.qkv64", "scratch.q32", "scratch.attended32", "scratch.branch32", "scratch.gate_up96",
        "scratch.gated48", "scratch.gate_up128", "scratch.gated64",
    ]  # fmt: skip
    assert DENSE.scratch(32)["gate_up"] == "scratch.gate_up96"


def test_weights_of_a_block_in_the_order_in_which_they_load():
    block = Block(
        Attention(4, 2, 8, Rope(plain_frequencies(8, 1e4)), qkv_bias=True, output_bias=True, qk_norm=True),
        GatedMlp(48, bias=True),
    )
    declared = {one.name: (one.shape, one.role, one.split) for one in block.weights(32)}
    assert list(declared.items()) == [
        ("input_norm", ((32,), "norm", None)), ("qkv", ((64, 32), "linear", 0)), ("qkv_bias", ((64,), "bias", 0)),
        ("o", ((32, 32), "linear", 1)), ("o_bias", ((32,), "bias", "first")), ("q_norm", ((8,), "norm", None)),
        ("k_norm", ((8,), "norm", None)), ("post_norm", ((32,), "norm", None)), ("gate_up", ((96, 32), "linear", 0)),
        ("gate_up_bias", ((96,), "bias", 0)), ("down", ((32, 48), "linear", 1)), ("down_bias", ((32,), "bias", "first")),
    ]  # fmt: skip


def test_a_mixer_that_normalises_its_own_input():
    """The block has neither the norm before it nor the weight of that norm."""
    usual, own = DENSE, dataclasses.replace(DENSE, input_norm=False)
    names, fewer = ([one.name for one in block.weights(16)] for block in (usual, own))
    assert names == ["input_norm", *fewer]
    engine = LLM(draft_tokens=2, backend="reference").engine
    runner = engine.runner
    launches = {}
    (rows,) = runner._target.passes
    for normalises in (True, False):
        block = dataclasses.replace(engine.model.blocks[0], input_norm=normalises)
        scratch = block.scratch(engine.model.hidden_size)
        for emit in (emit_block, emit_block_rows):
            program = ProgramBuilder("x", engine.table, runner.memory, runner.context)
            emit(program, block, Norm(1e-5, plus_one=False), "layers.0", x=HIDDEN, rows=rows, scratch=scratch, stage="target")
            launches[normalises, emit] = program.build().describe()
    for emit in (emit_block, emit_block_rows):
        assert launches[True, emit] == ["rms_norm", *launches[False, emit]]


@pytest.mark.parametrize(("ranks", "act", "launched"), [
    (1, "f32", ["sum_leaves 2 branch"]), (1, "bf16", ["sum_leaves 2 branch"]),
    (2, "f32", ["sum_leaves 2 branch", "all_reduce branch"]),
    (2, "bf16", ["sum_leaves 2 total", "all_reduce total", "sum_leaves 1 branch"]),
])  # fmt: skip
def test_a_sum_by_leaf_is_rounded_once_behind_its_last_rank(ranks: int, act: str, launched: list[str]):
    """In float32 nothing is rounded, and "branch" is where ranks meet: nobody needs another place, nor has one."""
    block = Block(Attention(4, 2, 8, Rope(plain_frequencies(8, 1e4)), leaves=2), GatedMlp(48, leaves=2))
    scratch, found = block.scratch(32), list[str]()
    names = {buffer: name for name, buffer in scratch.items()}
    allocated = {one.name for one in scratch_buffers([block], 32, across=ranks > 1 and act != "f32")}
    assert set(names) - allocated == ({scratch["total"]} if len(launched) < 3 else set())

    def add(contract: str, *_: Any, leaves: int | str = "", **fields: Any) -> None:
        out = names[fields.get("out", fields["x"])]
        found.append(" ".join(str(word) for word in (contract, leaves, out) if word))

    program: Any = SimpleNamespace(add=add, memory=SimpleNamespace(ranks=ranks, buffers=allocated))
    rows: Any = None
    at = At(program, Norm(1e-5, plus_one=False), "layers.0", rows, "rows", "target", "x", None, scratch)
    at.sum_leaves(2)
    at.join()
    assert found == launched


def test_contracts_that_a_composite_alone_owns_are_owned():
    owned = {"rms_norm", "linear", "paged_attention", "rope_kv_write", "residual_add+rms_norm", "swiglu"}
    assert lacking({"layers.0": DENSE}, owned) == {}
    assert lacking({"layers.0": DENSE}, owned - {"swiglu"}) == {"swiglu": "layers.0"}


def test_what_caches_cost_and_allocate():
    rows, border, state = PagedRows("rows", 6), PagedRows("kept", 5, "f32", per="block"), SlotState("state", "W 7", hit="border")
    kv = KvRows(2, 8)
    assert [one.block_bytes(4, "bf16", "") for one in (kv, rows, border, state)] == [4 * 2 * 16 * 2, 4 * 6 * 2, 5 * 4, 0]
    assert kv.block_bytes(4, "bf16", "int8") == 4 * 2 * (16 + 2)
    assert [one.slot_bytes(LIMITS, "bf16") for one in (kv, rows, border, state)] == [0, 0, 0, 3 * 7 * 4]
    assert [buffer for one in (kv, rows, border, state) for buffer in one.buffers("layers.1", LIMITS)] == [
        StepBuffer("layers.1.rows", "40 6", "act", initial=0), StepBuffer("layers.1.kept", "10 5", "f32", initial=0),
        StepBuffer("layers.1.state", "B W 7", "f32", initial=0),
    ]  # fmt: skip
    layers = {"a": dataclasses.make_dataclass("Layer", ["caches"])((rows, state)), "b": DENSE}
    assert block_bytes(layers, 4, "f32", "") == 4 * 6 * 4 + 4 * 2 * 16 * 4
    assert (slot_bytes(layers, LIMITS, "f32"), never_hit(layers)) == (84, [])
    assert never_hit({"c": dataclasses.make_dataclass("Layer", ["caches"])((SlotState("s", "1"),))}) == ["c"]


def test_a_model_that_keeps_nothing_in_blocks_has_blocks_all_the_same():
    from tests.unit.test_resolve import PLAIN

    recurrent = Block(mixed_layers.RunningMean(6), GatedMlp(8))
    no_rows: Any = dataclasses.make_dataclass("Recurrent", [], bases=(mixed_layers.RunningMean,), frozen=True)
    no_rows.caches = property(lambda self: (SlotState("state", "4"),))
    model = dataclasses.replace(PLAIN, blocks=(Block(no_rows(6), recurrent.feed_forward),))
    resolved = resolve(EngineConfig(), info("chip"), model, proposers={"none": "none"})
    assert (resolved.describe()["kv_cache_bytes"], resolved.describe()["slot_state_bytes"]) == (0, 8 * 4 * 4)
    assert resolved.limits.num_blocks == 64
    assert not resolved.prefix_cache


# -- tensors -----------------------------------------------------------------------------------------
def test_mtp_tensors_among_the_layers(tmp_path: Path):
    registry = FamilyRegistry()
    registry.register(mixed_layers.family(), plugin="mixed")
    with Checkpoint(mixed_layers.write(tmp_path)) as checkpoint:
        model, table = registry.describe(checkpoint)
        assert model.mtp is not None
        assert [part.name for part in table.parts["mtp.0.proj"]] == ["model.layers.2.eh_proj.weight"]
        assert [part.name for part in table.parts["mtp.0.o"]] == ["model.layers.2.self_attn.o_proj.weight"]
        assert load_weights(checkpoint, model, table)["layers.1.value"].shape == (mixed_layers.RANK, 32)
        checkpoint.config["num_nextn_predict_layers"] = 0
        plain, table = registry.describe(checkpoint)
        assert "yet 16 tensors model.layers.* are stored" in plain.mtp_note
        weights = load_weights(checkpoint, plain, table)  # the target's own layers are no strangers, nor left unread
        assert "layers.1.value" in weights
        assert not table.is_known("model.layers.3.eh_proj.weight")


@pytest.mark.parametrize(
    "biases", [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
def test_every_bias_counts(tmp_path: Path, biases: dict[str, bool]):
    config = {**TINY_MIMO, "architectures": ["LlamaForCausalLM"], "num_nextn_predict_layers": 0, **biases}
    directory = write_checkpoint(tmp_path, config, random_tensors(config))
    (directory / "tokenizer.json").write_text((tiny.checkpoint("narrow") / "tokenizer.json").read_text())
    engine = Engine(EngineConfig(model=str(directory), backend="reference", max_num_seqs=1))
    prompt = [3, 9, 27, 14]
    engine.add(prompt, SamplingParams(max_new_tokens=1))
    while engine.has_work:
        engine.step()
    oracle = OracleModel.from_dir(directory)
    states = oracle.target_states(prompt)
    hidden = engine.runner.memory.buffers["target.hidden"].host_array[: len(prompt)]  # type: ignore[attr-defined]
    assert np.allclose(hidden, states, atol=1e-4 * abs(states).max())


def test_pieces_of_a_stack_are_one_weight(tmp_path: Path):
    rng = np.random.default_rng(0)
    stored = {
        f"mlp.experts.{e}.{part}.weight": rng.normal(size=(4, 6)).astype(np.float32) for e in range(3) for part in ("gate", "up")
    }
    tensor = Tensor("experts", ((4, 6), (4, 6)), stack=3, split=0)
    names = {"experts": ("mlp.experts.{e}.gate.weight", "mlp.experts.{e}.up.weight")}
    parts = stored_parts((tensor,), names, "")
    with Checkpoint(write_checkpoint(tmp_path, {}, stored)) as checkpoint:
        weights = Weights(checkpoint, TensorTable(parts, {"experts": tensor.stack}))
        assert weights.shape("experts") == weights["experts"].shape == tensor.shape == (3, 8, 6)
        wanted = [[stored[f"mlp.experts.{e}.{part}.weight"] for part in ("gate", "up")] for e in range(3)]
        assert np.array_equal(weights["experts"], np.reshape(wanted, (3, 8, 6)))


@pytest.mark.parametrize("axis", [0, 1])
def test_weights_may_share_a_stored_tensor(tmp_path: Path, axis: int):
    stored = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    shape = ((2, 6), (6, 2))[axis]
    tensors = tuple(Tensor(f"fc.{i}", (shape,), stretch=Stretch(axis, 2 * i, 6)) for i in range(3))
    table = TensorTable(stored_parts(tensors, {one.name: ("fc.weight",) for one in tensors}, ""))
    with Checkpoint(tiny.checkpoint("narrow")) as checkpoint:
        model, _ = FamilyRegistry().describe(checkpoint)
    directory = write_checkpoint(tmp_path, {}, {"fc.weight": stored})
    with Checkpoint(directory) as checkpoint:
        weights = load_weights(checkpoint, model, table)
        assert weights.shape("fc.1") == shape
        assert all(weights[one.name].flags.c_contiguous for one in tensors)
        assert np.array_equal(np.concatenate([weights[one.name] for one in tensors], axis), stored)
    stored[4, 5] = np.nan
    with Checkpoint(write_checkpoint(directory, {}, {"fc.weight": stored})) as checkpoint:
        weights = load_weights(checkpoint, model, table)
        with pytest.raises(CheckpointError, match=r"fc.weight holds nan at \[4, 5\]"):
            weights["fc.0"]
    short = Checkpoint(write_checkpoint(directory, {}, {"fc.weight": stored[:5, :5]}))
    with short, pytest.raises(CheckpointError, match=r"has shape \[5, 5\], wanted \[6, 6\]"):
        load_weights(short, model, table)
