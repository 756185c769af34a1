"""The numeric part of the CUDA backend without a GPU: storage, which kernel runs for how many rows, cuBLASLt's plans."""

import ctypes
import gc
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.gpu_rounds import floor_bytes
from polydraft.backend import CacheSpec, StepMeta
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.contracts import (
    ArgmaxV1,
    LinearV1,
    PagedAttentionV1,
    ProcessLogitsV1,
    ResidualAddV1,
    RmsNormV1,
    RopeKvWriteV1,
    SwigluV1,
)
from polydraft.contracts.base import Limits
from polydraft.contracts.compare import to_host
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.kernels.expert_mlp import ExpertMlpV1
from polydraft.contracts.kernels.pack_logprobs import PackLogprobsV2
from polydraft.contracts.kernels.rope_kv_write import plain_frequencies
from polydraft.contracts.kernels.top_logprobs import TopLogprobsV1
from polydraft.contracts.kv_quant import KV_DTYPES, LARGEST, exponents, quantise
from polydraft.contracts.packing import PACKINGS
from polydraft.errors import ContractError
from polydraft.models.families import FamilyRegistry
from polydraft.plugins.program_pass import Entry, Node, Rewritten, UnboundProgram
from polydraft_cuda import cublaslt, storage
from polydraft_cuda.kernels import attention, experts, kernels, linear, logprobs, routed, sampling
from polydraft_cuda.kernels.packed import rounded_bytes
from polydraft_cuda.kernels.provider import CudaProvider
from polydraft_cuda.kernels.screen import screen_of
from polydraft_cuda.program_pass import CudaPass
from tests.device.paper import HALF, Bound, PaperDevice, experts_of_half, packed_on_paper, weight_on_paper

NO_STREAM: Any = None
"""Recorded launches go nowhere."""

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(64, 3, 512, 64, 1024, 16, 64, 64, 4, 32000)

FREQUENCIES = plain_frequencies(128, 1e4)


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of a machine that has a GPU must not be given addresses on paper."""
    monkeypatch.setattr(cublaslt, "library", lambda: None)


@dataclass(eq=False)
class Recorder(PaperDevice):
    """A paper device with memory whose launches are noted as (source, defines, rows)."""

    launched: list[tuple[str, dict[str, Any], int]] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    """Names of the kernels of these."""
    memory: dict[int, Any] = field(default_factory=dict)
    at_once: int = 66
    """Clusters that run at once."""

    def function(self, source: Path, name: str, **defines: Any) -> Any:
        def bind(grid: Any, block: Any, *arguments: Any, **options: Any) -> Callable[[Any, int], None]:
            self.bound.append(Bound(source, name, defines, grid, arguments, block, options.get("shared", 0)))

            def launch(stream: Any, n: int) -> None:
                self.launched.append((source.name, defines, n))
                self.called.append(name)

            return launch

        return SimpleNamespace(bind=bind, name=name, most_clusters=lambda block, shared, cluster: self.at_once)

    def write(self, pointer: int, value: Any) -> None:
        self.memory[pointer] = value.copy()

    def load(self, target: Any, value: Any) -> None:
        self.memory[target.pointer] = value.copy()

    def read(self, pointer: int, shape: Any, dtype: str) -> Any:
        return self.memory[pointer].reshape(shape)


# -- storage ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_weights_are_rounded_and_refilled_in_place(dtype: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "CHUNK", 5)
    device: Any = Recorder(dtype=dtype)
    first, second = np.random.default_rng(0).standard_normal((2, 3, 4), np.float32)
    weight = storage.prepare_weight(device, "linear", first, dtype)
    assert (weight.shape, weight.dtype, weight.nbytes) == ((3, 4), dtype, 12 * (4 if dtype == "f32" else 2))
    for value in (first, second):
        assert storage.prepare_weight(device, "linear", value, dtype, weight) is weight
        size = weight.nbytes // 12
        stored = np.concatenate([device.memory[weight.pointer + at * size] for at in (0, 5, 10)])
        assert np.array_equal(stored, to_host(value, dtype).reshape(-1))
    for other in (first[:2], first.reshape(4, 3)):
        with pytest.raises(ContractError, match="weight update"):
            storage.prepare_weight(device, "linear", other, dtype, weight)
    with pytest.raises(ContractError, match="bf16 or f16, got 'f64'"):
        storage.prepare_weight(device, "linear", first, "f64")


def test_rows_that_overlap_travel_as_the_memory_they_span():
    device: Any = Recorder(dtype="bf16")
    pool = np.arange(40, dtype=np.float32)
    view = np.lib.stride_tricks.as_strided(pool, (5, 12), (28, 4), writeable=False)
    weight = storage.prepare_weight(device, "linear", view, "bf16")
    (source, defines, _) = device.launched[0]
    assert (source, defines["ACT"], weight.shape) == ("rows.cu", 1, (5, 12))
    (sent,) = device.memory.values()
    assert np.array_equal(sent, to_host(pool, "bf16"))


def head_of(weight: Any, bias: Any = None) -> Any:
    return SimpleNamespace(weight=weight, bias=bias)


def test_the_bytes_of_a_large_head_are_made_when_they_are_wanted_and_anew_with_an_update():
    device: Any = Recorder(dtype="bf16", num_sms=1)
    order = device.called

    def noted(name: str) -> Callable[..., None]:
        return lambda *arguments: order.append(name)

    device.write, device.synchronize = noted("write"), noted("synchronize")
    value = np.ones((520, 128), np.float32)
    weight = storage.prepare_weight(device, "linear", value, "bf16")
    assert (weight.screen, order) == (None, ["write"])
    screen: Any = screen_of(device, head_of(weight))
    assert weight.screen is screen
    made = {name: getattr(screen, name) for name in ("columns", "bytes", "scales", "slacks")}
    assert {name: (buffer.shape, buffer.dtype) for name, buffer in made.items()} == {
        "columns": ((128,), "f32"), "bytes": ((768, 128), "u8"), "scales": ((520,), "f32"), "slacks": ((520, 2), "f32"),
    }  # fmt: skip
    packing = ["screen_columns", "screen_weights", "synchronize"]
    assert order == ["write", *packing]
    first, second = device.bound
    assert [one.defines for one in (first, second)] == [{"ACT": 1}] * 2
    assert (first.grid, first.arguments) == (2, (weight, made["columns"], 520, 128))
    assert (second.grid, second.arguments, second.shared) == (520, (weight, *made.values(), 128), 4 * 132)
    assert screen_of(device, head_of(weight)) is screen, "draft passes and target share them"
    assert storage.prepare_weight(device, "linear", 2 * value, "bf16", weight) is weight
    assert order == ["write", *packing] * 2, "what reads the numbers is enqueued behind them"
    assert weight.screen is screen
    assert [one.arguments[1:5] for one in device.bound[1::2]] == [tuple(made.values())] * 2, "over the bytes that there are"
    with pytest.raises(ContractError, match="weight update"):
        storage.prepare_weight(device, "linear", value[:512], "bf16", weight)


def test_what_bytes_fill_up_to_whole_tiles_is_zero():
    device: Any = Recorder(dtype="f16", num_sms=1)
    filled: list[tuple[Any, int]] = []
    device.fill_bytes = lambda buffer, byte: filled.append((buffer, byte))
    weight = storage.prepare_weight(device, "linear", np.ones((513, 128), np.float32), "f16")
    screen: Any = screen_of(device, head_of(weight))
    assert filled == [(screen.bytes, 0), (screen.state, 0)]


def test_a_weight_that_is_another_s_or_of_broken_chunks_has_no_bytes():
    device: Any = Recorder(dtype="bf16")
    weight = storage.CudaWeight("linear", device.empty("w", (768, 128), "bf16"))
    assert screen_of(device, head_of(borrowed(device, (768, 128)))) is None
    assert screen_of(device, head_of(weight, bias=device.empty("bias", (768,), "bf16"))) is None
    assert screen_of(device, head_of(storage.CudaWeight("linear", device.empty("w", (768, 192), "bf16")))) is None
    assert weight.screen is None


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_tiles_of_a_cache_hold_every_element_where_a_lane_wants_it(head_dim: int):
    keys, values = storage.tile_orders(head_dim)
    for order in (keys, values):
        assert sorted(order) == list(range(16 * head_dim))
    place = keys.reshape(16, head_dim)
    row, d = 11, head_dim - 32 + 9  # second eight of keys, lane (3, 1), its second element
    assert place[row, d] == ((head_dim // 32 + (head_dim // 32 - 1)) * 32 + 3 * 4 + 1) * 8 + 1
    pairs = values.reshape(16, head_dim)
    assert (pairs[4, 5], pairs[5, 5]) == (pairs[4, 5], pairs[4, 5] + 1), "neighbouring keys share a word"
    assert pairs[12, 5] == pairs[4, 5] + 2, "eight keys on lies the next word"
    assert pairs[4, 13] == pairs[4, 5] + 4, "eight elements on lie the two words after"


@pytest.mark.parametrize(("dtype", "head_dim", "block_size", "tiled"), [
    ("bf16", 64, 32, True), ("f16", 32, 16, True), ("f32", 64, 16, False), ("bf16", 24, 16, False), ("bf16", 64, 8, False),
])  # fmt: skip
def test_a_cache_gives_back_what_was_written(dtype: str, head_dim: int, block_size: int, tiled: bool):
    device: Any = Recorder(dtype=dtype)
    cache = storage.allocate_cache(device, CacheSpec(3, block_size, 2, head_dim, dtype))
    k, v = np.random.default_rng(1).integers(-8, 8, (2, 3, block_size, 2, head_dim)).astype(np.float32)
    cache.write_logical(k, v)
    assert cache.tiled is tiled
    assert all(np.array_equal(a, b) for a, b in zip(cache.read_logical(), (k, v), strict=True))
    assert cache.values.pointer - cache.keys.pointer == cache.nbytes // 2


# -- projections --------------------------------------------------------------------------------------
@pytest.fixture(params=[True, False], ids=["with cuBLASLt", "without"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    def bind(device: Any, *arguments: Any) -> Any:
        def launch(stream: Any, n: int) -> None:
            device.launched.append(("cuBLASLt", {}, n))
            device.called.append("product")

        return launch if request.param else None

    monkeypatch.setattr(cublaslt, "library", lambda: request.param or None)
    monkeypatch.setattr(cublaslt, "bind", bind)
    return bool(request.param)


def borrowed(device: Any, shape: tuple[int, ...]) -> Any:
    """A weight of somebody else, who does not tell of updates."""
    memory = device.empty("w", shape, device.dtype)
    return SimpleNamespace(pointer=memory.pointer, shape=shape, dtype=memory.dtype, nbytes=memory.nbytes)


def projection(
    device: Any, outputs: int, inputs: int, rows: int = 512, to: str = "", *, own: bool = True
) -> tuple[LinearV1, Any]:
    x, out = device.empty("x", (rows, inputs), device.dtype), device.empty("out", (rows, outputs), to or device.dtype)
    shape = outputs, inputs
    weight = storage.CudaWeight("linear", device.empty("w", shape, device.dtype)) if own else borrowed(device, shape)
    a = LinearV1(x=x, weight=weight, bias=None, out=out)
    nbytes = linear.workspace_bytes(device, a, LIMITS)
    workspace = SimpleNamespace(buffer=device.empty("workspace", (max(nbytes, 1),), "u8"), nbytes=nbytes)
    return a, linear.linear(device, a, LIMITS, workspace)


def chosen(device: Any, launch: Any, n: int) -> list[str]:
    """Sources launched for n rows, with the size where there are several."""
    device.launched.clear()
    launch(None, n)
    return [f"{source} {defines['TOKENS']}" if "TOKENS" in defines else source for source, defines, _ in device.launched]


def test_large_matrices_stream_and_many_rows_go_to_the_library(library: bool):
    device: Any = Recorder(dtype="bf16")
    _, wide = projection(device, 22016, 4096)
    rows = {1: 8, 8: 8, 9: 16, 17: 32, 33: 64, 128: 128}
    assert [chosen(device, wide, n) for n in rows] == [[f"linear_rows.cu {t}"] for t in rows.values()]
    _, narrow = projection(device, 4096, 11008)
    expected = [["linear_pair.cu 8"], ["linear_pair.cu 16"], *([f"linear_split.cu {t}"] for t in (32, 64, 128))]
    assert [chosen(device, narrow, n) for n in (1, 16, 17, 33, 65)] == expected
    _, between = projection(device, 6144, 4096)
    expected = [["linear_rows.cu 8"], ["linear_rows.cu 32"], ["linear_split.cu 64"], ["linear_split.cu 128"]]
    assert [chosen(device, between, n) for n in (8, 9, 64, 65)] == expected
    _, head = projection(device, 151680, 4096)
    expected = [[f"linear_tile.cu {t}"] for t in (8, 32, 64, 128, 256)]
    assert [chosen(device, head, n) for n in (1, 32, 64, 65, 256)] == expected, "blocks have whole tiles of so many outputs"
    for launch in (narrow, projection(device, 4000, 8256)[1]):
        assert [chosen(device, launch, n) for n in (129, 192)] == [["linear_parts.cu 192"]] * 2
    for launch in (wide, narrow, between, head):
        many = ["linear_tile.cu 256"] * 2 if not library else ["cuBLASLt"]
        assert chosen(device, launch, 300) == many
    assert chosen(device, wide, 0) == []


def packed_projection(device: Any, outputs: int, inputs: int, packing: str) -> tuple[LinearV1, Any, int]:
    """Its arguments, its launch, and the bytes of its workspace."""
    weight = packed_on_paper(device, (outputs, inputs), PACKINGS[packing])
    x, out = device.empty("x", (512, inputs), device.dtype), device.empty("out", (512, outputs), device.dtype)
    a = LinearV1(x=x, weight=weight, bias=None, out=out)
    nbytes = linear.workspace_bytes(device, a, LIMITS)
    return a, linear.linear(device, a, LIMITS, SimpleNamespace(buffer=device.empty("workspace", (nbytes,), "u8"))), nbytes


@pytest.mark.parametrize(
    ("outputs", "inputs", "whole", "blocks"),
    [(4096, 11008, 0, 4), (6144, 4096, 0, 2), (22016, 4096, 1, 3), (19184, 768, 1, 4), (102400, 256, 6, 2)],
)
def test_tiles_of_packed_rows_that_are_left_are_split_over_blocks(outputs: int, inputs: int, whole: int, blocks: int):
    device: Any = Recorder(dtype="bf16")
    a, launch, nbytes = packed_projection(device, outputs, inputs, "fp8-channel-a8")
    sizes = {n: chosen(device, launch, n)[1] for n in (64, 65, 128, 129, 256, 257)}
    of_parts = {65: 128, 128: 128, 129: 256, 256: 256}
    assert sizes == {n: f"linear_parts.cu {of_parts[n]}" if n in of_parts else f"linear_tile.cu {min(n, 256)}" for n in sizes}
    for one in (one for one in device.bound if one.name == "linear_parts"):
        told = one.defines
        assert (told["WHOLE"], told["SPLIT"]) == (whole, blocks)
        tiles = -(-outputs // 128)
        left = tiles - whole * 132
        assert one.grid == (132 if whole else tiles * blocks)
        assert left * blocks <= one.grid <= 132, "the blocks of a tile run at once"
        assert blocks <= inputs // 128, "each has some of its inputs, for the others wait for what it leaves"
        assert one.shared + 16 * told["STAGES"] <= device.shared_bytes
        most = -(-told["TOKENS"] // 8 // blocks) * 8
        assert left * blocks**2 * most * 128 * 4 <= nbytes - rounded_bytes(a), (
            "what they leave for each other lies in front of rows"
        )


def test_tiles_are_not_split_where_blocks_would_idle_or_scales_are_of_groups():
    device: Any = Recorder(dtype="bf16")
    for outputs, inputs, packing in (
        (1024, 16384, "fp8-channel-a8"),
        (4096, 11008, "fp8-block128-a8"),
        (4096, 11008, "fp8-channel"),
    ):
        _, launch, _ = packed_projection(device, outputs, inputs, packing)
        assert {chosen(device, launch, n)[-1].split()[0] for n in (65, 129, 256)} == {"linear_tile.cu"}
    for outputs, inputs in ((2048, 11008), (3584, 8192), (4096, 4096), (6144, 8192)):
        assert chosen(device, projection(device, outputs, inputs)[1], 150) == ["linear_tile.cu 256"]
    invariant: Any = Recorder(dtype="bf16", row_invariant=True)
    assert chosen(invariant, packed_projection(invariant, 4096, 11008, "fp8-channel-a8")[1], 150)[-1] == "linear_tile.cu 256"


def test_small_matrices_and_other_architectures(library: bool):
    device: Any = Recorder(dtype="bf16")
    _, small = projection(device, 512, 256)
    assert [chosen(device, small, n) for n in (3, 9)] == [["linear_stream.cu 8"], ["linear_stream.cu 16"]]
    assert chosen(device, small, 17) == ["linear_pair.cu 32"]
    older: Any = Recorder(dtype="f16", arch="sm_80")
    _, large = projection(older, 4096, 4096)
    assert chosen(older, large, 5) == ["linear_stream.cu 8"]
    assert chosen(older, large, 64) == (["cuBLASLt"] if library else ["linear_plain.cu"])
    exact: Any = Recorder(dtype="f32")
    assert chosen(exact, projection(exact, 4096, 4096)[1], 5) == ["linear_plain.cu"]
    assert chosen(device, projection(device, 7, 30)[1], 5) == ["linear_plain.cu"]


def test_row_invariant_projections_have_one_order_of_sums():
    device: Any = Recorder(dtype="bf16", row_invariant=True)
    usual, wide, odd, head = (
        projection(device, outputs, inputs, rows=600)[1]
        for outputs, inputs in ((4096, 4096), (22016, 4096), (4100, 4096), (151680, 4096))
    )
    rows = {1: 8, 8: 8, 9: 32, 32: 32, 33: 64, 65: 128, 128: 128, 129: 128, 256: 128, 257: 128, 600: 128}
    assert [chosen(device, usual, n) for n in rows] == [[f"linear_split.cu {t}"] for t in rows.values()]
    assert [chosen(device, wide, n) for n in (1, 9, 128)] == [[f"linear_rows.cu {t}"] for t in (8, 16, 128)]
    assert [chosen(device, wide, n) for n in (129, 600)] == [["linear_split.cu 256"]] * 2, "in blocks of so many rows"
    for tiles in (odd, head):
        assert [chosen(device, tiles, n) for n in (1, 65, 256)] == [[f"linear_tile.cu {t}"] for t in (16, 128, 256)]
        assert chosen(device, tiles, 600) == ["linear_tile.cu 256"] * 3
    assert {one.defines["ORDER"] for one in device.bound} == {1}


@pytest.mark.parametrize("inputs", [64, 192, 2816, 4096])
def test_a_share_of_the_outputs_is_summed_as_all_of_them_are(inputs: int):
    """Whichever kernel takes it: one block all inputs of an output, in their order. Blocks of a tile have it as a whole."""
    for outputs in (8, 40, 100, 101, 1024, 5504, 11008, 22016, 37888, 75840, 151680):
        device: Any = Recorder(dtype="bf16", row_invariant=True)
        projection(device, outputs, inputs, rows=600)
        assert {(one.defines["ORDER"], one.defines.get("SPLIT", 1)) for one in device.bound} == {(1, 1)}
        for one in device.bound:
            assert one.shared + 16 * one.defines["STAGES"] <= device.shared_bytes
            if one.name == "linear_tile":
                assert one.grid <= 132
                assert one.grid <= -(-outputs // (128 * one.defines["CLUSTER"])) * one.defines["CLUSTER"]
            elif one.name == "linear_rows":
                assert one.defines["OUTPUTS"] > 64, "else two warp groups take turns"


@pytest.mark.parametrize("shape", [(4096, 4096), (6144, 4096), (4096, 11008), (1024, 2816), (5632, 1024), (256, 256)])
def test_rows_in_any_number_have_a_block_each_so_many(shape: tuple[int, int]):
    device: Any = Recorder(dtype="bf16", row_invariant=True)
    _, launch = projection(device, *shape, rows=600)
    for one in device.bound:
        sharing = one.defines["SHARED"]
        tiles = -(-shape[0] // (one.defines["WIDTH"] * sharing)) * sharing
        assert one.grid(600) == (tiles, -(-600 // one.defines["TOKENS"]), 1)
    assert chosen(device, launch, 600) == ["linear_split.cu 128"]


Named = tuple[str, Any]
"""A contract with its argument record."""


def rewritten(
    device: Any, *launches: Named, own: Limits = LIMITS, readers: tuple[Named, ...] = (), stage: str = "draft 0"
) -> list[Entry]:
    """What the pass makes of these launches of a program, with `readers` in the other program of the step."""
    nodes, others = ([Node(name, args, "rows", stage) for name, args in each] for each in (launches, readers))
    served = frozenset(kernels())
    brought = CudaPass(device, lambda kernel: CudaProvider(kernel, device))
    return list(brought.rewrite(UnboundProgram("a program", tuple(nodes), served, own, (others,))))


def shown(device: Any, *launches: Named, **options: Any) -> list[str]:
    """The same, by name: of a contract, or of the kernel that launches were given to."""
    return [one.kernel if isinstance(one, Rewritten) else one.contract for one in rewritten(device, *launches, **options)]  # type: ignore[union-attr]


def bound(device: Any, *launches: Named, **options: Any) -> Callable[[int], list[tuple[str, str, dict[str, Any]]]]:
    """Launches of the program that the pass makes of these: source, kernel and defines of each."""
    brought = CudaPass(device, lambda kernel: CudaProvider(kernel, device))
    calls = []
    for one in rewritten(device, *launches, **options):
        provider: Any = brought.kernels[one.kernel].provider if isinstance(one, Rewritten) else None
        if isinstance(one, Node):
            provider = CudaProvider(kernels()[one.contract], device)
        args: Any = one.args if isinstance(one, Node) else CompositeArgs(one.records)  # type: ignore[union-attr]
        nbytes = provider.workspace_bytes(args, LIMITS)
        workspace = SimpleNamespace(buffer=device.empty("workspace", (max(nbytes, 1),), "u8"), nbytes=nbytes)
        calls.append(provider.bind(args, options.get("own", LIMITS), workspace))

    def launched(n: int) -> list[tuple[str, str, dict[str, Any]]]:
        device.launched.clear()
        device.called.clear()
        for call in calls:
            call(NO_STREAM, n)
        return [(source, name, defines) for name, (source, defines, _) in zip(device.called, device.launched, strict=True)]

    return launched


def sources(found: list[tuple[str, str, dict[str, Any]]], define: str) -> list[tuple[str, int | None]]:
    return [(source, defines.get(define)) for source, _, defines in found]


def gate_and_up(device: Any, width: int = 11008) -> tuple[Named, Named]:
    """A projection large enough to be one launch with its activation, and that."""
    up, _ = projection(device, 2 * width, 4096)
    return ("linear", up), ("swiglu", SwigluV1(gate_up=up.out, out=device.empty("gated", (512, width), device.dtype)))


def test_an_activation_is_one_launch_with_its_projection(library: bool):
    device: Any = Recorder(dtype="bf16")
    project, activate = gate_and_up(device)
    assert shown(device, project, activate) == ["gated"]
    both = bound(device, project, activate)
    assert sources(both(4), "GATED") == sources(both(128), "GATED") == [("linear_rows.cu", 1)]
    assert sources(both(129), "GATED") == sources(both(256), "GATED") == [("linear_split.cu", 1)]
    assert [defines["TOKENS"] for n in (129, 192, 193, 256) for _, _, defines in both(n)] == [192, 192, 256, 256]
    assert sources(both(257), "GATED")[-1] == ("mlp.cu", None)
    assert len(both(257)) == (2 if library else 3)
    half = bound(device, *gate_and_up(device, 5504))
    assert [sources(half(n), "GATED") for n in (32, 33, 128)] == [[("linear_rows.cu", 1)], *[[("linear_split.cu", 1)]] * 2]
    assert [defines["TOKENS"] for n in (33, 64, 65) for _, _, defines in half(n)] == [64, 64, 128]
    assert sources(half(129), "GATED")[-1] == ("mlp.cu", None)
    elsewhere = SwigluV1(gate_up=device.empty("elsewhere", (512, 22016), "bf16"), out=activate[1].out)
    assert shown(device, project, ("swiglu", elsewhere)) == ["linear", "swiglu"]


def test_an_activation_stays_alone_where_somebody_reads_gate_and_up():
    device: Any = Recorder(dtype="bf16")
    project, activate = gate_and_up(device)
    reader = "swiglu", SwigluV1(gate_up=project[1].out, out=device.empty("other", (512, 11008), "bf16"))
    assert shown(device, project, activate, reader) == ["linear", "swiglu", "swiglu"]
    assert shown(device, project, activate, readers=(reader,)) == ["linear", "swiglu"]
    assert shown(device, reader, project, activate) == ["swiglu", "linear", "swiglu"], "in the next step"
    assert shown(device, project, activate, readers=(project, reader)) == ["gated"], "what is read has been written anew"


def head_of_program(device: Any, *, rows: int = 512, bias: bool = False, own: bool = True, valid: int = 0) -> tuple[Named, ...]:
    """A large head, the processing of its logits, and the choice behind it."""
    shape, dtype = (SCREENED, 256), device.dtype
    weight = storage.CudaWeight("linear", device.empty("w", shape, dtype)) if own else borrowed(device, shape)
    logits = device.empty("logits", (rows, SCREENED), "f32")
    added = device.empty("bias", (SCREENED,), dtype) if bias else None
    rows_of = {name: device.empty(name, (rows,), "i32") for name in ("row_slot", "tokens")}
    process = ProcessLogitsV1(logits=logits, row_slot=rows_of["row_slot"], num_valid=valid or SCREENED)
    a = LinearV1(x=device.empty("x", (rows, 256), dtype), weight=weight, bias=added, out=logits)
    return ("linear", a), ("process_logits", process), ("argmax", ArgmaxV1(logits=logits, **rows_of))


APART = ["linear", "process_logits", "argmax"]


def test_a_choice_is_one_with_its_head_unless_somebody_reads_the_logits():
    device: Any = Recorder(dtype="bf16")
    head = head_of_program(device, own=False)
    assert shown(device, *head) == ["screened"]
    both = bound(device, *head)
    assert sources(both(4), "BEST") == sources(both(256), "BEST") == [("linear_tile.cu", 1), ("sampling.cu", None)]
    assert sources(both(257), "BEST")[-1] == ("sampling.cu", None)
    assert ("linear_tile.cu", 1) not in sources(both(257), "BEST")
    assert shown(device, *head, head[2]) == ["kept", "argmax"], "a later launch reads them"
    assert shown(device, *head, readers=head[2:]) == ["kept"], "another program of the step"
    stored = bound(device, *head, readers=head[2:])
    assert sources(stored(4), "BEST") == sources(stored(256), "BEST") == [("linear_tile.cu", 2), ("sampling.cu", None)]
    assert not [one.name for one in device.bound if "screen" in one.name]
    assert shown(device, *head[::2], head[1]) == ["linear", "argmax", "process_logits"], "another order"
    assert shown(device, *head_of_program(device, valid=SCREENED - 80)) == APART, "the vocabulary is padded"
    assert shown(device, head[0], *head_of_program(device)[1:]) == APART, "other logits"


SCREENED = 151680
"""Outputs of a head of an odd number of tiles."""


class Choice:
    """A head of an own weight and the choice behind it, as the pass has them launched."""

    def __init__(self, device: Any, stage: str = "draft 0", **options: Any) -> None:
        self.device, self._launched = device, bound(device, *head_of_program(device, **options), stage=stage)

    def __call__(self, n: int) -> list[tuple[str, int | None]]:
        """Kernels launched for n rows, with the size where there are several."""
        return [(name, defines.get("TOKENS")) for _, name, defines in self._launched(n)]

    def best(self, n: int) -> list[int | None]:
        """Whether each of these kernels leaves the best only."""
        return [defines.get("BEST") for _, _, defines in self._launched(n)]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_head_with_bytes_looks_at_them_first(dtype: str):
    choice = Choice(Recorder(dtype=dtype))
    device = choice.device
    looks = "screen_turn", "linear_screen", "screen_settle", "screen_choose", "linear_tile", "argmax_among"
    for n, tokens in {1: 8, 8: 8, 9: 16, 17: 32, 33: 64, 64: 64, 65: 128, 128: 128}.items():
        sizes = None, *[tokens] * 4, None
        assert choice(n) == list(zip(looks, sizes, strict=True)), n
        sources = "screen.cu", "linear_screen.cu", "screen.cu", "screen.cu", "linear_tile.cu", "sampling.cu"
        assert [source for source, _, _ in device.launched] == [*sources]
        own = 1 if dtype == "bf16" else 2
        assert [defines["ACT"] for _, defines, _ in device.launched[:-1]] == [own, 2, own, own, own], "looks are in float16"
    for n in (129, 256):
        assert choice(n) == [("linear_tile", 256), ("argmax_among", None)]
        assert choice.best(n) == [1, None], "more rows take all numbers of the weight"
    assert choice(300)[-1] == ("argmax", None)
    assert not any(choice.best(300)), "logits are written"


@pytest.mark.parametrize("given", [{"bias": True}, {"own": False}])
def test_without_bytes_or_with_a_bias_every_output_of_a_head_is_summed(given: dict):
    choice = Choice(Recorder(dtype="bf16"), **given)
    for n in (1, 8, 128, 256):
        assert [name for name, _ in choice(n)] == ["linear_tile", "argmax_among"]
        assert choice.best(n) == [1, None]
    assert not [one.name for one in choice.device.bound if "screen" in one.name]


def test_where_rows_are_invariant_a_choice_is_among_the_sums_that_logits_are_of():
    device: Any = Recorder(dtype="bf16", row_invariant=True)
    head = head_of_program(device)
    assert shown(device, *head, stage="verify") == ["chosen"]
    assert shown(device, *head) == ["screened"], "a draft changes no text"
    together = Choice(device, "verify")
    for n in (1, 8, 16, 32, 64, 65, 256):
        assert [name for name, _ in together(n)] == ["linear_tile", "argmax_among"]
        assert together.best(n) == [1, None]
        (_, best, _), _ = device.launched
        apart = bound(device, head[0])(n)
        assert [{**defines, "BEST": 1} for _, _, defines in apart] == [best], "the same tiles"
    assert not [one.name for one in device.bound if "screen" in one.name], "whose products are summed in another order"
    grids = {(one.defines["TOKENS"], one.grid) for one in device.bound if one.name == "linear_tile"}
    assert len(grids) == len(linear.INVARIANT), "in the same shares"


@pytest.mark.parametrize("options", [{"arch": "sm_80"}, {"dtype": "f32"}])
def test_where_the_device_is_another_no_head_is_looked_at(options: dict):
    device: Any = Recorder(**{"dtype": "bf16"} | options)
    assert shown(device, *head_of_program(device)) == APART
    names = [name for n in (1, 128) for name, _ in Choice(device)(n)]
    assert names[2::3] == ["argmax"] * 2
    assert not [one.name for one in device.bound if "screen" in one.name]


@pytest.mark.parametrize("at_once", [66, 60])
@pytest.mark.parametrize("rows", [5, 40, 128, 512])
def test_a_first_look_has_stage_for_what_it_reads_and_writes(rows: int, at_once: int):
    noted = Choice(Recorder(dtype="bf16", at_once=at_once), rows=rows).device.bound
    looks = [one for one in noted if one.name == "linear_screen"]
    assert max(one.defines["TOKENS"] for one in looks) >= min(rows, 128)
    for one in looks:
        tokens, cluster = one.defines["TOKENS"], one.defines["CLUSTER"]
        _, weight, scales, pairs, best, _, outputs, inputs = one.arguments
        assert (outputs, inputs, scales.shape) == (SCREENED, 256, (SCREENED,))
        tiles = -(-SCREENED // (128 * cluster)) * cluster
        assert weight.shape[0] >= 128 * tiles
        assert weight.shape[1] == inputs
        assert pairs.nbytes >= tiles * 64 * tokens * 2
        assert pairs is looks[0].arguments[3], "one after the other"
        assert best.shape == (8 * one.grid, tokens, 2), "every warp of every block has its own"
        assert one.grid % cluster == 0
        assert one.grid <= (cluster * at_once if cluster > 1 else 132)
    for name in ("screen_settle", "screen_choose"):
        behind = [one for one in noted if one.name == name]
        assert [one.defines["TOKENS"] for one in behind] == [one.defines["TOKENS"] for one in looks]
        for one, look in zip(behind, looks, strict=True):
            if name == "screen_settle":
                assert one.arguments[0] is look.arguments[4]
                assert one.arguments[7:] == (8 * look.grid, one.defines["TOKENS"], 256)
            else:
                assert one.arguments[0] is look.arguments[3]
                assert one.arguments[-2:] == (SCREENED, 256)


def test_a_look_and_the_head_that_is_read_whole_behind_it_know_one_state():
    """They are told through it who chooses; the head of more rows, which nobody looks at, is always read."""
    noted = Choice(Recorder(dtype="bf16"), rows=512).device.bound
    (state,) = {id(one.arguments[5]) for one in noted if one.name == "linear_screen"}
    places = {"screen_turn": 5, "screen_settle": 6, "screen_choose": 8, "linear_tile": 7, "argmax_among": 3}
    for name, place in places.items():
        told = [one.arguments[place] for one in noted if one.name == name and one.defines.get("BEST", 1)]
        looked = [one for one in told if one is not None]
        assert len(looked) == 5, name
        assert {id(one) for one in looked} == {state}, name
        assert len(told) - len(looked) == (1 if name in ("linear_tile", "argmax_among") else 0)
    among = [one.arguments for one in noted if one.name == "argmax_among"]
    tiles = [one.arguments for one in noted if one.name == "linear_tile" and one.defines["BEST"]]
    assert [one[0] for one in among] == [one[3] for one in tiles], "what one keeps the other looks at"


def test_an_activation_of_invariant_rows_is_joined_where_sums_stay_in_order():
    device: Any = Recorder(dtype="bf16", row_invariant=True)
    launches = gate_and_up(device)
    assert shown(device, *launches) == ["gated"]
    both = bound(device, *launches)
    assert [sources(both(n), "ORDER") for n in (4, 256)] == [[("linear_rows.cu", 1)], [("linear_split.cu", 1)]]
    assert sources(both(257), "ORDER") == [("linear_split.cu", 1), ("mlp.cu", None)]
    wide, _ = projection(device, 40960, 4096)
    alone = SwigluV1(gate_up=wide.out, out=device.empty("gated", (512, 20480), "bf16"))
    assert shown(device, ("linear", wide), ("swiglu", alone)) == ["linear", "swiglu"], "blocks share its tiles"


def test_log_probabilities_go_into_their_record_unless_somebody_else_reads_them():
    device: Any = Recorder(dtype="bf16")
    shapes: dict[str, tuple[int, ...]] = {
        "out_tokens": (8, 4), "ids": (8, 4, 3), "ranks": (8, 4), "record": (512,),
        **dict.fromkeys(("slot_order", "logit_start", "num_top", "extra"), (8,)),
    }  # fmt: skip
    ints = {name: device.empty(name, shape, "i32") for name, shape in shapes.items()}
    logits, numbers = device.empty("logits", (32, 5000), "f32"), device.empty("logprobs", (8, 4, 3), "f32")
    of_top = {name: ints[name] for name in ("slot_order", "logit_start", "out_tokens", "num_top", "ids", "ranks")}
    top = "top_logprobs", TopLogprobsV1(logits=logits, temperature=None, logprobs=numbers, **of_top)
    of_pack = {name: ints[name] for name in ("slot_order", "num_top", "ids", "ranks", "extra", "record")}
    none: dict[str, Any] = dict.fromkeys(("drafts", "draft_logprobs", "draft_top_ids", "draft_tops"))
    pack = "pack_logprobs", PackLogprobsV2(logprobs=numbers, flag=7, **none, **of_pack)
    assert shown(device, top, pack) == ["reported"]
    assert shown(device, top, pack, pack) == ["top_logprobs", "pack_logprobs", "pack_logprobs"], "somebody else reads them"
    other = "pack_logprobs", replace(pack[1], slot_order=device.empty("other", (8,), "i32"))
    assert shown(device, top, other) == ["top_logprobs", "pack_logprobs"], "of other sequences"
    assert [name for _, name, _ in bound(device, top, pack)(4)] == ["survey_windows", "report_logprobs"]
    alone = {name: device.empty(name, (8, 4, 1), kind) for name, kind in (("ids", "i32"), ("logprobs", "f32"))}
    bound(device, ("top_logprobs", replace(top[1], **alone)), ("pack_logprobs", replace(pack[1], **alone)))(4)
    threads = [one.threads for one in device.bound if one.name == "report_logprobs"]
    assert threads == [sampling.THREADS, logprobs.ALONE], "few where nobody may ask for other tokens"
    assert [name for _, name, _ in bound(device, top, other)(4)] == ["survey_windows", "top_logprobs", "pack_logprobs"]


def test_clusters_that_do_not_run_at_once_are_not_used(library: bool):
    device: Any = Recorder(dtype="bf16", at_once=4)
    _, narrow = projection(device, 4096, 11008)
    assert chosen(device, narrow, 17) == ["linear_pair.cu 32"]
    _, wide = projection(device, 22016, 4096)
    assert chosen(device, wide, 9) == ["linear_rows.cu 16"]
    assert chosen(device, wide, 17) == ["linear_tile.cu 32"]


# -- experts ------------------------------------------------------------------------------------------
def experts_of(device: Any, rows: int = 512, *, gate_up: str = "", down: str = "") -> Any:
    """The experts of ernie21, bound for up to so many rows, packed where a packing is named."""
    count, width, hidden, each = 64, 1536, 2560, 6
    ids, weights = device.empty("ids", (rows, each), "i32"), device.empty("weights", (rows, each), "f32")
    x, out = (device.empty(name, (rows, hidden), device.dtype) for name in ("x", "out"))
    stacks: Any = {
        name: weight_on_paper(device, PACKINGS[packing] if packing else None)(name, "experts", shape)
        for name, packing, shape in (
            ("gate_up", gate_up, (count, 2 * width, hidden)), ("down", down, (count, hidden, width)),
        )
    }  # fmt: skip
    a = ExpertMlpV1(x=x, expert_ids=ids, expert_weights=weights, shared=None, shared_gate=None, out=out, **stacks)
    nbytes = experts.workspace_bytes(device, a, LIMITS)
    workspace = SimpleNamespace(buffer=device.empty("workspace", (nbytes,), "u8"), nbytes=nbytes)
    return experts.expert_mlp(device, a, LIMITS, workspace)


def test_rows_of_experts_go_through_tiles_that_few_experts_exceed():
    device: Any = Recorder(dtype="bf16")
    launch = experts_of(device)
    for n, tokens in {2: 8, 50: 8, 51: 16, 117: 16, 118: 32, 256: 32, 262: 32, 263: 64, 566: 64, 1195: 128, 1196: 256}.items():
        assert chosen(device, launch, n) == ["experts.cu", *[f"experts_tile.cu {tokens}"] * 2, "experts.cu"], n
        assert [defines.get("GATED") for _, defines, _ in device.launched] == [None, 1, 0, None]
        rng = np.random.default_rng(n)
        rows = np.bincount(np.concatenate([rng.choice(64, 6, replace=False) for _ in range(n)]), minlength=64)
        assert np.mean(rows > tokens) < 0.15, "the weights of the others are read once"
    lists = [one.arguments for one in device.bound if one.name == "list_experts"]
    assert [one[4] is None for one in lists] == [False] * len(experts.TILE_TOKENS), "tiles want rows gathered"


def test_one_row_has_nothing_to_list():
    device: Any = Recorder(dtype="bf16")
    launch = experts_of(device)
    assert chosen(device, launch, 1) == ["experts_row.cu", "experts_row.cu", "experts.cu"]
    assert device.called[-1] == "sum_experts"


@pytest.mark.parametrize(("height", "each", "unit", "width"), [
    (3072, 6, 16, 144), (2560, 6, 8, 120), (2816, 8, 16, 176), (4096, 8, 8, 256), (5120, 8, 8, 160), (64, 1, 16, 16),
])  # fmt: skip
def test_the_rows_of_weights_of_one_row_are_shared_out_evenly(height: int, each: int, unit: int, width: int):
    found = experts.row_width(132, height, each, unit)
    blocks = each * -(-height // found)
    assert (found, found % unit) == (width, 0)
    waves = -(-blocks // 132)
    assert waves == -(-each * height // (132 * 256)), "as few at a time as there can be"
    assert found * 132 * waves < 1.1 * each * height + unit * 132 * waves


@pytest.mark.parametrize("options", [{"row_invariant": True}, {"arch": "sm_80"}])
def test_without_tiles_or_where_rows_are_invariant_experts_are_streamed(options: dict):
    device: Any = Recorder(**{"dtype": "bf16"} | options)
    launch = experts_of(device)
    for n, tokens in {1: 8, 50: 8, 51: 16, 118: 32, 5000: 32}.items():
        assert chosen(device, launch, n) == ["experts.cu", *[f"experts_stream.cu {tokens}"] * 2, "experts.cu"]


@pytest.mark.parametrize("invariant", [False, True])
def test_packed_experts_go_through_tiles_few_rows_and_many(invariant: bool):
    device: Any = Recorder(dtype="bf16", row_invariant=invariant)
    launch = experts_of(device, gate_up="fp8-channel", down="int4-channel-zeros")
    assert chosen(device, launch, 1) == [*["experts_tile.cu 8"] * 2, "experts.cu"]
    assert [defines.get("ALONE") for _, defines, _ in device.launched] == [1, 1, None]
    for n, tokens in {2: 8, 50: 8, 51: 16, 256: 32, 512: 64, 5000: 128}.items():
        assert chosen(device, launch, n) == ["experts.cu", *[f"experts_tile.cu {tokens}"] * 2, "experts.cu"], n
        assert [defines.get("NUMBER") for _, defines, _ in device.launched] == [None, 1, 3, None]
    for one in (one for one in device.bound if one.name == "expert_tile"):
        groups, gated, (*_, scales, zeros, of_rows, _, each, count, outputs, inputs) = (
            one.defines["GROUPS"], one.defines["GATED"], one.arguments,
        )  # fmt: skip
        chunk, rows = 64 if gated else 32, 64 * groups
        assert one.threads == 128 * groups + 32
        assert one.defines["STAGES"] * 2 * (rows * chunk + one.defines["TOKENS"] * 128) <= one.shared - 1024
        assert one.shared + 2 * 513 * 4 + 1024 < device.shared_bytes
        assert scales is not None
        assert (zeros is None, of_rows, each, count) == (bool(gated), None, 6, 64)
        assert (outputs, inputs) == ((1536, 2560) if gated else (2560, 1536))
        if one.defines["ALONE"]:
            assert (one.grid(1), groups) == ((96, 3) if gated else (120, 2)), "all at once, in shares as even as can be"


def test_rows_are_rounded_once_before_either_product_of_packed_experts():
    device: Any = Recorder(dtype="bf16")
    launch = experts_of(device, gate_up="fp8-channel-a8", down="int8-channel-a8")
    assert chosen(device, launch, 1) == ["packed.cu", "experts_tile.cu 8", "packed.cu", "experts_tile.cu 8", "experts.cu"]
    assert chosen(device, launch, 8)[:2] == ["packed.cu", "experts.cu"], "rows are gathered as they are multiplied"
    rounding = [one for one in device.bound if one.name == "round_rows"]
    assert {(one.grid(7)[0], one.arguments[3], one.defines["EIGHT"]) for one in rounding} == {(7, 2560, 0), (42, 1536, 0)}
    lists = next(one for one in device.bound if one.name == "list_experts")
    numbers, scales, _ = rounding[0].arguments[1], rounding[0].arguments[2], rounding[0].arguments[3]
    assert lists.arguments[3].pointer == numbers.pointer, "gathered are the rounded rows"
    up = next(one for one in device.bound if one.name == "expert_tile" and one.defines["GATED"])
    assert up.arguments[7].pointer == scales.pointer


def test_scales_of_groups_travel_with_what_they_are_of():
    device: Any = Recorder(dtype="bf16")
    experts_of(device, gate_up="fp8-block128-a8", down="int4-group32-zeros")
    tiles = [one for one in device.bound if one.name == "expert_tile"]
    assert [(one.defines["GROUP"], one.defines["BLOCK"]) for one in tiles] == [(128, 128), (32, 1)] * 6
    assert [one.threads for one in tiles[2:]] == [288] * 6 + [384] * 4, "a warp group more gives its registers away"
    lists = next(one for one in device.bound if one.name == "list_experts")
    _, rows, scales, of_entries, pitch, entries_pitch, groups = lists.arguments[3:10]
    assert (scales.shape, of_entries.shape) == ((20, 512), (20, 3072)) == ((groups, pitch), (groups, entries_pitch))
    assert of_entries.pointer == rows.pointer + 3072 * 2560 * 2, "behind the rows that they are of"
    for one in tiles[::2]:
        wanted = (scales.pointer, pitch) if one.defines["ALONE"] else (of_entries.pointer, entries_pitch)
        assert (one.arguments[7].pointer, one.arguments[8]) == wanted


@pytest.mark.parametrize(
    ("options", "packings", "pieces"),
    [
        ({"arch": "sm_80"}, {"gate_up": "fp8-channel", "down": "fp8-channel"}, [0, 0]),
        ({"dtype": "f32"}, {"gate_up": "int4-channel", "down": "int8-channel"}, [0, 0]),
        ({"row_invariant": True}, {"gate_up": "fp8-channel"}, [1, 0]),
    ],
)  # fmt: skip
def test_packed_experts_elsewhere_are_left_to_plain_kernels(options: dict, packings: dict, pieces: list[int]):
    device: Any = Recorder(**{"dtype": "bf16"} | options)
    launch = experts_of(device, **packings)
    for n in (1, 100):
        chosen(device, launch, n)
        assert device.called[-3:] == ["expert_plain", "expert_plain", "sum_experts"]
        assert [defines["PIECES"] for _, defines, _ in device.launched[:2]] == pieces


def test_one_stack_of_experts_may_be_packed_and_the_other_not():
    device: Any = Recorder(dtype="bf16")
    launch = experts_of(device, down="fp8-channel")
    assert chosen(device, launch, 1) == ["experts_row.cu", "experts_tile.cu 8", "experts.cu"]
    assert chosen(device, launch, 8) == ["experts.cu", *["experts_tile.cu 8"] * 2, "experts.cu"]
    assert [defines.get("NUMBER") for _, defines, _ in device.launched] == [None, 0, 1, None]


def test_tiles_of_experts_have_room_and_every_output_is_in_one():
    device: Any = Recorder(dtype="bf16")
    experts_of(device)
    tiles = [one for one in device.bound if one.name == "expert_tile"]
    assert [one.defines["TOKENS"] for one in tiles] == [tokens for tokens in experts.TILE_TOKENS for _ in range(2)]
    for one in tiles:
        stages, tokens, (*_, count, outputs, inputs) = one.defines["STAGES"], one.defines["TOKENS"], one.arguments
        assert stages >= 3
        assert stages * (128 + tokens) * 128 <= one.shared - 1024
        assert one.shared + 2 * 513 * 4 + 1024 < device.shared_bytes, "and lists of items"
        assert (count, outputs, inputs) == (64, 1536, 2560) if one.defines["GATED"] else (64, 2560, 1536)
        assert one.grid(2) == min(132, 12 * outputs // (64 if one.defines["GATED"] else 128))
        assert one.grid(512) == 132
    for one in (one for one in device.bound if one.name == "expert_row"):
        stages, width = one.defines["STAGES"], one.defines["WIDTH"]
        assert stages * (width + 8) * 128 + 56 * 128 <= one.shared - 1024, "a product reads 64 rows of x, whatever lies there"
        assert one.shared + 16 * stages + 1024 < device.shared_bytes


def half_of(device: Any, **changes: Any) -> tuple[Named, ...]:
    """A half with experts of ernie21; `changes` of its sizes."""
    return tuple(experts_of_half(device, HALF._replace(**changes), 512, weight_on_paper(device)))


def test_a_half_with_experts_is_one_chain_without_pauses():
    device: Any = Recorder(dtype="bf16")
    half = half_of(device)
    assert shown(device, *half) == ["routed_and_shared_experts"]
    (joined,) = rewritten(device, *half)
    assert isinstance(joined, Rewritten)
    assert {one.name for one in joined.dead} == {"gate_up", "branch"}
    called = bound(device, *half)
    begun = ["linear_rows.cu", "route.cu"]
    assert [source for source, *_ in called(1)] == [*begun, "linear_pair.cu", *["experts_row.cu"] * 2, "experts_sum.cu"]
    found = called(8)
    assert [source for source, *_ in found] == [
        *begun,
        "experts.cu",
        "linear_pair.cu",
        *["experts_tile.cu"] * 2,
        "experts_sum.cu",
    ]
    assert found[1][2]["EARLY"] == 1, "the router runs beside the shared experts"
    assert found[0][2]["FETCHES"] == 1, "which bring its weights into the second cache"
    assert found[1][2]["CLUSTER"] == 8, "blocks bring each other logits"
    assert [defines["EARLY"] for _, _, defines in found[4:6]] == [1, 0], "lists are made before the shared experts end"
    narrow = bound(device, *half_of(device, hidden=4096, width=1408, experts=128, chosen=8, shared=1408))
    assert next(defines for source, _, defines in narrow(1) if source == "route.cu")["CLUSTER"] == 0, "more than a cluster has"
    for n in (1, 33, 65, 128):  # too few outputs for every multiprocessor to have some: two blocks share a tile
        project = next(defines for source, _, defines in narrow(n) if source == "linear_split.cu")
        assert (project["GATED"], project["SPLIT"], project["WIDTH"]) == (1, 2, 48)
    alone = half_of(device, shared=0)
    assert shown(device, *alone) == ["routed_experts"]
    found = bound(device, *alone)(8)
    assert [source for source, *_ in found] == ["route.cu", "experts.cu", *["experts_tile.cu"] * 2, "experts_sum.cu"]
    assert [found[place][2]["EARLY"] for place in (0, 2, 3)] == [0, 0, 0]
    assert found[-1][2]["NORM"] == 1
    for launches, kernel in ((half, "last_routed_and_shared_experts"), (alone, "last_routed_experts")):
        end: Named = "residual_add", launches[-1][1].parts[0]
        assert shown(device, *launches[:-1], end) == [kernel]
        assert bound(device, *launches[:-1], end)(8)[-1][2]["NORM"] == 0


def test_a_router_and_the_projection_beside_it_do_not_meet_in_their_flags():
    device: Any = Recorder(dtype="bf16")
    kept = projection(device, 22016, 4096), bound(device, *half_of(device))
    flags = {
        one.name: {getattr(flag, "pointer", 0) for flag in one.arguments if getattr(flag, "shape", None) == (1024,)}
        for one in device.bound
    }
    assert kept
    assert all(flags[kernel] for kernel in ("linear_tile", "router"))
    assert not flags["linear_tile"] & flags["router"]


@pytest.mark.parametrize("rows", [240, 241])
def test_a_router_has_clusters_while_all_of_them_run_at_once(rows: int):
    device: Any = Recorder(dtype="bf16")
    called = bound(device, *experts_of_half(device, HALF, rows, weight_on_paper(device)))
    assert {one.defines["CLUSTER"] for one in device.bound if one.name == "router" and one.defines["CHOOSES"]} == {
        240: {8}, 241: {8, 0},
    }[rows]  # fmt: skip
    for n in (8, 9, 240, rows):
        (found,) = (defines for source, _, defines in called(n) if source == "route.cu")
        assert (found["FEW"], found["CLUSTER"]) == (int(n <= 8), 8 if n <= 240 else 0)


@pytest.mark.parametrize(("begun", "vector"), [((0, 0), 1), ((4, 0), 0), ((0, 2), 0)])
def test_a_router_whose_numbers_begin_beside_vectors_takes_them_one_by_one(begun: tuple[int, int], vector: int):
    """And counts them: all are there by themselves only as vectors."""
    device: Any = Recorder(dtype="bf16")
    half = half_of(device)
    project = half[0][1]
    for buffer, offset in zip((project.weight.buffer, project.x), begun, strict=True):
        buffer.pointer += offset
    called = bound(device, *half)(8)
    (defines,) = (defines for source, _, defines in called if source == "route.cu")
    assert (defines["VECTOR"], defines["WHOLE"]) == (vector, vector)
    assert called[0][2]["FETCHES"] == int(begun[0] == 0), "the copy engine wants 16 bytes"


@pytest.mark.parametrize("rows", [16, 512])
def test_the_launches_of_shared_experts_do_not_write_over_lists(rows: int):
    """They have the place of the terms, which nobody has written then, and no memory of their own where that is enough."""
    device: Any = Recorder(dtype="bf16")
    half = [args for _, args in experts_of_half(device, HALF._replace(shared=256), rows, weight_on_paper(device))]
    parts = CompositeArgs((*half[:-1], *half[-1].parts))
    listed, nbytes = experts.workspace_bytes(device, half[5], LIMITS), routed.workspace_bytes(device, parts, LIMITS)
    workspace = SimpleNamespace(buffer=device.empty("workspace", (nbytes,), "u8"), nbytes=nbytes)
    begin, room = experts.idle_at_first(half[5])
    wanted = max(linear.workspace_bytes(device, half[place], LIMITS) for place in (2, 4))
    assert (nbytes == listed) == (wanted <= room) == (rows == 512)
    device.bound.clear()
    routed.routed_experts(device, parts, LIMITS, workspace)
    start, seen = workspace.buffer.pointer, set()
    for one in device.bound:
        pointers = [getattr(argument, "pointer", 0) for argument in one.arguments]
        inside = {pointer - start for pointer in pointers if start <= pointer < start + nbytes}
        if one.name.startswith("linear"):
            seen |= inside
        else:
            assert all(place < listed for place in inside), one.name
    assert seen == {begin if rows == 512 else listed}


def test_other_halves_with_experts_stay_launches_of_their_own():
    device: Any = Recorder(dtype="bf16")
    half = half_of(device)
    (_, project), *_, (_, mlp), (_, end) = half
    reader: Named = "rms_norm", replace(end.parts[1], x=mlp.out)
    assert shown(device, *half, readers=(reader,))[:2] == ["linear", "route_experts"], "somebody reads what the experts add"
    other: Named = "linear", replace(project, x=end.parts[0].x)
    assert "routed_and_shared_experts" not in shown(device, other, *half[1:]), "the router looks at other rows"
    gate = device.empty("gate", (512, 1), "f32")
    gated: Named = "expert_mlp", replace(mlp, shared_gate=gate)
    assert "routed_and_shared_experts" not in shown(device, *half[:-2], gated, half[-1])
    for options in ({"row_invariant": True}, {"arch": "sm_80"}):
        elsewhere: Any = Recorder(**{"dtype": "bf16"} | options)
        assert "routed_and_shared_experts" not in shown(elsewhere, *half_of(elsewhere))


# -- quantised rows -----------------------------------------------------------------------------------
SPECS = [("bf16", 64, 32, True), ("bf16", 8, 16, False), ("f16", 128, 16, True), ("f32", 64, 16, False), ("bf16", 32, 4, False)]


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(("dtype", "head_dim", "block_size", "tiled"), SPECS)
def test_a_cache_of_quantised_rows_holds_what_it_is_given(dtype: str, head_dim: int, block_size: int, tiled: bool, kv: Any):
    device: Any = Recorder(dtype=dtype)
    cache = storage.allocate_cache(device, CacheSpec(3, block_size, 2, head_dim, dtype, kv=kv))
    assert (cache.tiled, cache.nbytes) == (tiled, 2 * 3 * block_size * 2 * (head_dim + 1))
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, block_size, 2, head_dim)) * np.exp2(rng.integers(-30, 30, (2, 3, block_size, 2, 1)))
    k[0, 1], v[2, 0, 1], v[1, 1, 0, 3] = 0.0, 2.0**-149, np.nan
    cache.write_logical(k, v)
    for found, wanted in zip(cache.read_logical(), (k, v), strict=True):
        assert np.array_equal(found, quantise(wanted, kv).astype(np.float32), equal_nan=True)
    (stored,) = device.memory.values()
    rows = 16 if tiled else block_size
    of_first_head = stored[0, 0, 0].reshape(-1, rows * (head_dim + 1))[:, -rows:].view(np.int8)
    assert np.array_equal(of_first_head.reshape(-1), exponents(k[0, :, 0], kv)), (
        "exponents stand behind the numbers of their group"
    )


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_bytes_stand_for_the_numbers_that_they_should(kv: str):
    codes = np.array([c for c in range(256) if kv == "int8" or c & 127 != 127], np.uint8)
    numbers = storage.decode(codes, kv)
    assert np.array_equal(storage.encode(numbers, kv), codes)
    assert numbers.max() == -numbers.min() == LARGEST[kv]
    magnitudes = numbers[codes < 128]
    assert (np.diff(magnitudes) > 0).all()
    wanted = np.linspace(-LARGEST[kv], LARGEST[kv], 999)
    wanted[0] = LARGEST[kv]  # so that the exponent is 0
    assert set(quantise(wanted, kv).tolist()) <= set(numbers.tolist())


def test_quantised_rows_have_kernels_of_their_own():
    device: Any = Recorder(dtype="bf16")
    meta, both = layer(device, kv="fp8")
    assert both(4) == both(256) == [("rope_quant.cu", None), ("attention_quant.cu", None)]
    assert {defines["KV"] for _, defines, _ in device.launched[-2:]} == {2}
    meta.step = StepMeta(0, 400, 2, has_prefill=True)
    assert both(400) == [("rope_quant.cu", None), ("attention_quant_prefill.cu", None)]


@pytest.mark.parametrize("options", [{"row_invariant": True}, {"arch": "sm_80"}])
def test_quantised_rows_have_one_shape_where_rows_are_invariant_or_clusters_missing(options: dict):
    device: Any = Recorder(dtype="bf16", **options)
    meta, both = layer(device, kv="int8")
    found = []
    for n in (4, 256):
        both(n)
        found.append(device.launched[-1][1]["SPLITS"])
    assert len(set(found)) == 1
    meta.step = StepMeta(0, 400, 2, has_prefill=True)
    assert both(400)[1][0] == ("attention_quant.cu" if "row_invariant" in options else "attention_quant_prefill.cu")


@pytest.mark.parametrize("options", [{"head_dim": 256}, {"head_dim": 24}, {"block_size": 8}])
def test_quantised_rows_of_other_sizes_take_the_plain_kernel(options: dict):
    device: Any = Recorder(dtype="bf16")
    _, launch = attend(device, kv="fp8", **options)
    launch(None, 4)
    assert (device.launched[-1][0], device.launched[-1][1]["KV"]) == ("attention_plain.cu", 2)


# -- attention ----------------------------------------------------------------------------------------
def attend(
    device: Any, own: Limits = LIMITS, *, head_dim: int = 128, block_size: int = 16, kv: Any = "", sliding_window: int = 0
) -> tuple[Any, Any]:
    def ints(*shape: int) -> Any:
        return device.empty("ints", shape, "i32")

    meta = SimpleNamespace(
        tiles=ints(512, 4), num_tiles=ints(1), step=StepMeta(0, 4, 1, has_prefill=False), max_tiles=lambda n: n // 4
    )
    cache = storage.allocate_cache(device, CacheSpec(64, block_size, 8, head_dim, device.dtype, kv=kv))
    q, out = device.empty("q", (512, 32 * head_dim), device.dtype), device.empty("out", (512, 32 * head_dim), device.dtype)
    a = PagedAttentionV1(
        q=q, row_slot=ints(512), positions=ints(512), block_table=ints(64, 64), cache=cache, meta=meta, out=out, num_heads=32,
        num_kv_heads=8, head_dim=head_dim, block_size=block_size, softmax_scale=0.1, sliding_window=sliding_window,
    )  # fmt: skip
    return meta, attention.paged_attention(device, a, own, None)


@pytest.mark.parametrize(("options", "kernels"), [({}, 2), ({"head_dim": 256}, 1)], ids=["tiles", "plain"])
@pytest.mark.parametrize("kv", ["", *KV_DTYPES])
def test_every_kernel_of_attention_knows_the_sliding_window(kv: str, options: dict, kernels: int):
    device: Any = Recorder(dtype="bf16")
    meta, launch = attend(device, kv=kv, sliding_window=9, **options)
    for prefill in (False, True):
        meta.step = StepMeta(0, 4, 1, has_prefill=prefill)
        launch(None, 4)
    assert len({source for source, *_ in device.launched}) == kernels
    assert [defines["WINDOW"] for _, defines, *_ in device.launched] == [9, 9]


def test_attention_splits_long_contexts_over_as_many_blocks_as_there_is_stage_for():
    device: Any = Recorder(dtype="bf16")
    meta, launch = attend(device)
    splits = []
    for seqs in (1, 2, 8, 32, 64):
        launch(None, 4 * seqs)
        splits.append(device.launched[-1][1]["SPLITS"])
    assert splits == [8, 8, 2, 1, 1]
    meta.step = StepMeta(0, 400, 2, has_prefill=True)
    launch(None, 400)
    assert device.launched[-1][0] == "attention_prompt.cu"


@pytest.mark.parametrize("window", [1, 4])
def test_no_multiprocessor_has_stage_for_more_blocks_of_attention_than_its_share(window: int):
    """It would get them where it is free before others, and they would have none."""
    device: Any = Recorder(dtype="bf16")
    attend(device, replace(LIMITS, num_drafts=window - 1))
    alone = [b for b in device.bound if b.name == "attention_decode" and b.defines["SPLITS"] == 1]
    assert len(alone) == 6, "of passes of windows alone, and of windows beside prompts"
    for bound in alone:
        blocks = (device.shared_bytes + 1024) // (bound.shared + 1024)  # a multiprocessor keeps 1024 bytes a block
        assert blocks == max(8 // (bound.threads // 32), 1)


@pytest.mark.parametrize("options", [{"row_invariant": True}, {"arch": "sm_80"}])
def test_attention_is_dealt_to_as_many_warps_where_rows_are_invariant_or_clusters_missing(options: dict):
    device: Any = Recorder(dtype="bf16", **options)
    meta, launch = attend(device)
    for n in (4, 32, 256):
        launch(None, n)
    meta.step = StepMeta(0, 400, 2, has_prefill=True)
    launch(None, 400)
    shapes = {(one["SPLITS"], one["KEY_WARPS"]) for source, one, _ in device.launched if source == "attention_decode.cu"}
    assert len({splits * warps for splits, warps in shapes}) == 1
    assert len(shapes) == (2 if "row_invariant" in options else 1)
    assert device.launched[-1][0] == ("attention_decode.cu" if "row_invariant" in options else "attention_prefill.cu")


def test_a_norm_reads_its_stream_ahead_only_behind_the_projection_that_it_adds():
    device: Any = Recorder(dtype="bf16")
    x, y, out = (device.empty(name, (512, 4096), "bf16") for name in ("x", "y", "out"))
    weight = storage.CudaWeight("linear", device.empty("w", (4096, 4096), "bf16"))
    gain = storage.CudaWeight("norm", device.empty("g", (4096,), "bf16"))
    normed = RmsNormV1(x=x, weight=gain, out=out, eps=1e-6, plus_one=False)  # type: ignore[arg-type]
    add: Named = "residual_add+rms_norm", CompositeArgs((ResidualAddV1(x=x, y=y), normed))
    there, elsewhere = (("linear", LinearV1(x=x, weight=weight, bias=None, out=target)) for target in (y, out))  # type: ignore[arg-type]
    assert shown(device, there, add) == ["linear", "early_norm"]
    for launches in ((elsewhere, add), (add,), (there, elsewhere, add), (there, ("rms_norm", normed), add)):
        assert "early_norm" not in shown(device, *launches), "another launch stands in front"
    early = [bound(device, one, add)(4)[-1][2]["EARLY"] for one in (there, elsewhere)]
    assert [*early, bound(device, ("rms_norm", normed))(4)[-1][2]["EARLY"]] == [1, 0, 0]


def layer(device: Any, kv: Any = "", *, behind: bool = True, **changes: Any) -> tuple[Any, Any]:
    """The launches between the projection into an attention and the one out of it, `behind` that projection or not; `changes` of
    the turn's arguments."""
    x, qkv, attended = (device.empty("x", (512, width), device.dtype) for width in (4096, 6144, 4096))
    weight: Any = storage.CudaWeight("linear", device.empty("w", (6144, 4096), device.dtype))

    def ints(*shape: int) -> Any:
        return device.empty("ints", shape, "i32")

    step = StepMeta(0, 4, 1, has_prefill=False)
    meta = SimpleNamespace(tiles=ints(512, 4), num_tiles=ints(1), step=step, max_tiles=lambda n: n // 4)
    shared: dict[str, Any] = {
        "row_slot": ints(512), "positions": ints(512), "block_table": ints(64, 64), "meta": meta, "num_heads": 32,
        "num_kv_heads": 8, "head_dim": 128, "block_size": 16,
        "cache": storage.allocate_cache(device, CacheSpec(64, 16, 8, 128, device.dtype, kv=kv)),
    }  # fmt: skip
    own = {"q_norm": None, "k_norm": None, "frequencies": FREQUENCIES, "attention_factor": 1.0, "style": "half", "eps": 1e-6}
    own |= changes
    q = device.empty("q", (512, 4096), device.dtype)
    turn = RopeKvWriteV1(qkv=qkv, q_out=q, **own, **shared)
    attended_by = PagedAttentionV1(q=q, out=attended, softmax_scale=0.1, sliding_window=0, **shared)
    project = LinearV1(x=x, weight=weight, bias=None, out=qkv if behind else device.empty("other", (512, 6144), device.dtype))
    launched = bound(device, ("linear", project), ("rope_kv_write", turn), ("paged_attention", attended_by))

    def both(n: int) -> list[tuple[str, int | None]]:
        return [one for one in sources(launched(n), "ROPE") if not one[0].startswith(("linear", "cuBLASLt"))]

    return meta, both


def test_attention_turns_and_stores_its_rows_itself():
    device: Any = Recorder(dtype="bf16")
    meta, both = layer(device)
    assert both(4) == both(256) == [("attention_decode.cu", LIMITS.window)]
    meta.step = StepMeta(0, 400, 2, has_prefill=True)
    apart = [("rope.cu", None), ("attention_decode.cu", 0), ("attention_prompt.cu", None)]
    assert both(400) == apart, "rows of a prompt lie in several tiles, those of a window in one"
    meta.step = StepMeta(0, 400, 1, has_prefill=True)
    assert both(400) == [apart[0], apart[2]], "a slot that is alone has nobody beside it"


@pytest.mark.parametrize(
    ("changes", "defines"),
    [({}, {}), ({"style": "interleaved"}, {"INTERLEAVED": 1}), ({"frequencies": FREQUENCIES[:32]}, {"ROTARY": 64})],
)
def test_it_turns_whole_heads_either_way_and_half_of_a_head(changes: dict, defines: dict):
    device: Any = Recorder(dtype="bf16")
    _, both = layer(device, **changes)
    assert both(4) == [("attention_decode.cu", LIMITS.window)]
    assert {name: value for name, value in device.launched[-1][1].items() if name in ("INTERLEAVED", "ROTARY")} == defines


@pytest.mark.parametrize(
    "changes",
    [
        {"style": "interleaved", "frequencies": FREQUENCIES[:32]}, {"frequencies": FREQUENCIES[:16]},
        {"q_norm": SimpleNamespace(pointer=0)}, {"behind": False},
    ],
)  # fmt: skip
def test_other_turns_stay_a_launch_of_their_own(changes: dict):
    device: Any = Recorder(dtype="bf16")
    _, both = layer(device, **changes)
    assert both(4) == [("rope.cu", None), ("attention_decode.cu", 0)]


def test_so_they_do_where_launches_do_not_overlap():
    device: Any = Recorder(dtype="bf16", arch="sm_80")
    _, both = layer(device)
    assert both(4) == [("rope.cu", None), ("attention_decode.cu", 0)]


@pytest.mark.parametrize(
    ("name", "launches"), [("linear.flags", lambda device: projection(device, 22016, 4096)), ("rope.turns", layer)]
)
def test_launches_share_what_is_freed_with_them_and_their_device(name: str, launches: Callable[[Any], Any]):
    device: Any = Recorder(dtype="bf16")
    bound, seen = [launches(device) for _ in range(2)], weakref.ref(device)
    arguments = [argument for one in device.bound for argument in one.arguments if getattr(argument, "name", "") == name]
    assert len(arguments) > 1
    assert len({argument.pointer for argument in arguments}) == 1
    del bound, device, arguments
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("options", [{"head_dim": 256}, {"head_dim": 24}, {"block_size": 8}])
def test_other_sizes_of_attention_take_the_plain_kernel(options: dict):
    device: Any = Recorder(dtype="bf16")
    _, launch = attend(device, **options)
    launch(None, 4)
    assert device.launched[-1][0] == "attention_plain.cu"


# -- cuBLASLt -----------------------------------------------------------------------------------------
class Library:
    """Stands for the library: notes calls, gives handles, finds an algorithm unless told otherwise."""

    def __init__(self, status: int = 0, found: int = 1) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._status, self._found = status, found

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = self._found
            return self._status if name == "cublasLtMatmul" else 0

        return call

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)


def product(monkeypatch: pytest.MonkeyPatch, library: Library) -> Any:
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    cublaslt._handle.cache_clear()
    device: Any = Recorder(dtype="bf16")
    weight = storage.CudaWeight("linear", device.empty("w", (24, 16), "bf16"))
    x, out, bias = (device.empty(n, s, "bf16") for n, s in (("x", (512, 16)), ("out", (512, 24)), ("bias", (24,))))
    return cublaslt.bind(device, x, weight, bias, out, 4096)


def test_a_product_plans_once_for_a_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    library = Library()
    launch, stream = product(monkeypatch, library), SimpleNamespace(handle=7)
    for n in (100, 100, 200, 0):
        launch(stream, n)
    assert library.count("cublasLtMatmulAlgoGetHeuristic") == 2
    products = [arguments for name, arguments in library.calls if name == "cublasLtMatmul"]
    assert len(products) == 3
    assert [argument.value for argument in products[0][13:]] == [4096, cublaslt.WORKSPACE, 7]
    layouts = [tuple(getattr(v, "value", v) for v in a[1:]) for name, a in library.calls if name == "cublasLtMatrixLayoutCreate"]
    assert layouts[:3] == [(14, 16, 24, 16), (14, 16, 100, 16), (14, 24, 100, 24)], "column-major views of row-major matrices"


@pytest.mark.parametrize("library", [Library(status=13), Library(found=0)], ids=["fails", "knows no way"])
def test_a_product_that_fails_is_one_sentence(library: Library, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(Exception, match=r"^cuBLASLt failed in .*100 rows \(status 1[35]\); update nvidia-cublas"):
        product(monkeypatch, library)(SimpleNamespace(handle=1), 100)


def test_the_result_of_a_choice_has_the_size_of_the_library_s():
    assert ctypes.sizeof(cublaslt._Choice) == 96


# -- tools and results --------------------------------------------------------------------------------
def test_the_bytes_of_a_round():
    checkpoint = RandomCheckpoint(ROOT / "bench" / "shapes" / "tiny.json")
    model, _ = FamilyRegistry().describe(checkpoint)
    block = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 768
    for drafts, passes in ((0, 0), (3, 3)):
        for vocab, kv, row in ((4096, "", 2 * 128), (1024, "", 2 * 128), (4096, "fp8", 2 * (64 + 1))):
            chosen = {"draft_vocab": vocab}
            limits = SimpleNamespace(num_drafts=drafts)
            resolved = SimpleNamespace(dtype="bf16", kv=kv, packing=None, limits=limits, describe=chosen.copy)
            config = SimpleNamespace(weights_ignore=())
            engine: Any = SimpleNamespace(model=model, resolved=resolved, config=config)
            weights = 8 * block + 256 * 4096 + passes * (block + 2 * 256 * 256 + 256 * vocab)
            cached = (8 + passes) * 2 * row * 5 * 600
            assert floor_bytes(engine, 5, 600) == 2 * weights + cached
            resolved.packing, config.weights_ignore = PACKINGS["fp8-channel"], ("head",)
            heads = 256 * (4096 + passes * vocab)
            assert floor_bytes(engine, 5, 600) == pytest.approx(weights + heads + cached, rel=1e-3)
    checkpoint.close()


@pytest.mark.parametrize(
    ("shape", "drafts", "milliseconds"),
    [
        ("ernie21", 0, (1.6, 5.8, 9.8, 10.2)), ("ernie21", 3, (4.3, 10.3, 10.6, 10.6)),
        ("glm12", 0, (1.8, 5.6, 10.9, 12.2)), ("glm12", 3, (4.9, 13.3, 16.0, 16.5)),
    ],
)  # fmt: skip
def test_the_bytes_of_a_round_count_the_experts_that_uniform_draws_touch(shape: str, drafts: int, milliseconds: Sequence[float]):
    """Beside floors that were worked out apart, at 4.3 TB/s and without keys and values."""
    checkpoint = RandomCheckpoint(ROOT / "bench" / "shapes" / f"{shape}.json")
    model, _ = FamilyRegistry().describe(checkpoint)
    limits, whole = SimpleNamespace(num_drafts=drafts), {"draft_vocab": model.vocab_size}
    resolved = SimpleNamespace(dtype="bf16", kv="", packing=None, limits=limits, describe=whole.copy)
    engine: Any = SimpleNamespace(model=model, resolved=resolved, config=SimpleNamespace(weights_ignore=()))
    for batch, wanted in zip((1, 8, 32, 64), milliseconds, strict=True):
        found = floor_bytes(engine, batch, 0.0, tokens_per_round=2.85 if drafts else 1.0) / 4.3e9
        assert found == pytest.approx(wanted, rel=0.04), batch
    checkpoint.close()


def test_the_committed_rounds_are_whole_and_say_that_they_are_synthetic():
    result = json.loads((ROOT / "bench" / "results" / "cuda.json").read_text(encoding="utf-8"))
    assert (result["schema"], result["device"]) == ("polydraft.bench/1", "NVIDIA H200")
    cells = [(row["shape"], row["draft_tokens"], row["batch"]) for row in result["rows"]]
    assert cells == [("mimo-7b", drafts, batch) for drafts in (0, 3) for batch in (1, 8, 32, 64)]
    for row in result["rows"]:
        assert row["weights"] == "random"
        assert row["acceptance"] == ("synthetic" if row["draft_tokens"] else "measured")
        share = row["floor_bytes"] / row["copy_bytes_per_s"] / (1e-3 * row["ms_per_round"])
        assert row["copy_rate_share"] == pytest.approx(share)
