"""Sums by leaf on NVIDIA GPUs: how they are launched, what one rank has of them to the bit, and texts over two GPUs that are
those of one, with `--invariant`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import polydraft_cuda
from polydraft import LLM, Engine
from polydraft.backend import DeviceOptions
from polydraft.conformance.leaf_checks import checks
from polydraft.conformance.target import Target
from polydraft.contracts import ExpertLeavesV1, LinearLeavesV1, LinearV1, ResidualAddV1, RmsNormV1, SumLeavesV1, SwigluV1
from polydraft.contracts.base import Limits
from polydraft.contracts.compare import from_host, to_host
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.kernels.expert_mlp import chosen_ids
from polydraft.device import Array
from polydraft.plugins.program_pass import Node, Rewritten, UnboundProgram
from polydraft_cuda.kernels import experts, kernels, linear
from polydraft_cuda.kernels.provider import CudaProvider
from polydraft_cuda.program_pass import KERNELS, CudaPass
from polydraft_cuda.storage import CudaWeight
from tests.device.paper import PaperDevice
from tests.step.test_ranks_bits import bits, tokens
from tests.support import tiny
from tests.support.gpus import on_two
from tests.support.of_ranks import OPTIONS, asks
from tests.support.runs import drive

pytestmark = pytest.mark.timeout(300)
on_a_gpu = pytest.mark.device("cuda")
LIMITS = Limits(64, 3, 512, 256, 1024, 16, 64, 64, 4, 151680)
CHECKS = {check.id.rpartition("/")[2]: check for check in checks()}
HALVES = ("bf16", "f16")


# -- on paper ----------------------------------------------------------------------------------------------------------------
def weight(device: Any, role: str, *shape: int) -> Any:
    return CudaWeight(role, device.empty("w", shape, device.dtype))


def by_leaf(device: Any, leaves: int, outputs: int, inputs: int, rows: int = 600) -> list[Any]:
    """What `linear_leaves` of matrices [outputs, inputs] is bound to."""
    x, out = device.empty("x", (rows, leaves * inputs), device.dtype), device.empty("out", (rows, leaves * outputs), "f32")
    args = LinearLeavesV1(x=x, weight=weight(device, "linear", leaves, outputs, inputs), bias=None, leaves=leaves, out=out)
    bound(device, "linear_leaves", args)
    return list(device.bound)


def bound(device: Any, name: str, *records: Any) -> Any:
    """A launch of a kernel, or of one that joins several, with as much workspace as it wants."""
    args = CompositeArgs(records) if len(records) > 1 else records[0]
    provider = CudaProvider(KERNELS[name][1] if len(records) > 1 else kernels()[name], device)
    nbytes = max(provider.workspace_bytes(args, LIMITS), 1)
    workspace = SimpleNamespace(buffer=device.zeros("workspace", (nbytes,), "u8"), nbytes=nbytes)
    return provider.bind(args, LIMITS, workspace)


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 1024), (4096, 2752), (512, 64)])
def test_the_leaves_of_a_projection_are_one_launch_each_in_blocks_of_its_own(outputs: int, inputs: int):
    for leaves in (1, 2, 4):
        device: Any = PaperDevice(row_invariant=True)
        for one in by_leaf(device, leaves, outputs, inputs):
            assert (one.name, one.defines["ORDER"], one.defines["SPLIT"], one.defines["OUT_F32"]) == ("linear_split", 1, 1, 1)
            across, down, deep = one.grid(600)
            assert (deep, down) == (leaves, -(-600 // one.defines["TOKENS"]))
            assert outputs <= across * one.defines["WIDTH"] < outputs + one.defines["WIDTH"] * one.defines["SHARED"]
            assert one.shared + 16 * one.defines["STAGES"] <= device.shared_bytes


@pytest.mark.parametrize(
    ("dtype", "arch", "outputs", "inputs"),
    [("f32", "sm_90", 512, 64), ("bf16", "sm_80", 512, 64), ("bf16", "sm_90", 511, 64), ("bf16", "sm_90", 512, 48)],
)
def test_what_is_of_another_dtype_or_size_takes_the_plain_kernel_whatever_a_rank_keeps(
    dtype: str, arch: str, outputs: int, inputs: int
):
    for leaves in (1, 2, 4):
        (one,) = by_leaf(PaperDevice(dtype=dtype, arch=arch, row_invariant=True), leaves, outputs, inputs)
        assert (one.name, one.grid(9)) == ("linear_plain", (-(-outputs // 4), 2, leaves))


def in_a_row(device: Any, leaves: int, outputs: int, inputs: int, *, rows: int = 600, biased: bool = False) -> tuple[Any, Any]:
    """A projection by leaf, and the sum of its leaves."""
    x, out = device.empty("x", (rows, leaves * inputs), device.dtype), device.empty("leaves", (rows, leaves * outputs), "f32")
    bias = weight(device, "bias", outputs) if biased else None
    project = LinearLeavesV1(x=x, weight=weight(device, "linear", leaves, outputs, inputs), bias=bias, leaves=leaves, out=out)
    total = SumLeavesV1(x=out, leaves=leaves, out=device.empty("branch", (rows, outputs), device.dtype))
    return ("linear_leaves", project), ("sum_leaves", total)


def shown(device: Any, *launches: tuple[str, Any]) -> list[str]:
    """What the pass makes of a program of these, by name."""
    nodes = tuple(Node(name, args, "rows", "target") for name, args in launches)
    brought = CudaPass(device, lambda kernel: CudaProvider(kernel, device))
    found: Any = brought.rewrite(UnboundProgram("a program", nodes, frozenset(kernels()), LIMITS))
    return [one.kernel if isinstance(one, Rewritten) else one.contract for one in found]


def test_leaves_are_added_where_they_are_computed():
    device: Any = PaperDevice(row_invariant=True)
    project, total = in_a_row(device, 4, 4096, 2752)
    stream, normed = (device.empty(name, (600, 4096), "bf16") for name in ("stream", "normed"))
    norm = RmsNormV1(x=stream, weight=weight(device, "norm", 4096), out=normed, eps=1e-6, plus_one=False)
    add = "residual_add+rms_norm", CompositeArgs((ResidualAddV1(x=stream, y=total[1].out), norm))
    assert shown(device, project, total, add) == ["summed", "early_norm"]
    assert shown(device, project, total, ("sum_leaves", total[1])) == ["linear_leaves", "sum_leaves", "sum_leaves"]
    other = replace(total[1], x=device.empty("other", (600, 4 * 4096), "f32"))
    assert shown(device, project, ("sum_leaves", other), add) == ["linear_leaves", "sum_leaves", add[0]]
    for options, sizes in (
        ({"biased": True}, (4, 4096, 2752)), ({}, (3, 4096, 2752)), ({}, (4, 4096, 2750)), ({}, (4, 4100, 64)),
    ):  # fmt: skip
        assert shown(device, *in_a_row(device, *sizes, **options)) == ["linear_leaves", "sum_leaves"]
    for device in (PaperDevice(arch="sm_80", row_invariant=True), PaperDevice(dtype="f32", row_invariant=True)):
        assert shown(device, *in_a_row(device, 4, 4096, 2752)) == ["linear_leaves", "sum_leaves"]


@pytest.mark.parametrize("outputs", [256, 4096, 8448, 9216])
def test_leaves_of_some_outputs_lie_in_one_block_or_two(outputs: int):
    """So that sums are added in the order of the tree: the halves of it by two blocks, which share outputs as few as they may."""
    for leaves in (1, 2, 4):
        device: Any = PaperDevice(row_invariant=True)
        bound(device, "summed", *(args for _, args in in_a_row(device, leaves, outputs, 704)))
        assert {one.name for one in device.bound} == {"linear_split"}
        for one in device.bound:
            told = one.defines
            assert (told["ORDER"], told["LEAVES"], told["OUT_F32"], told["BIAS"]) == (1, leaves, 0, 0)
            across, down, deep = one.grid(600)
            assert (deep, down) == (1, -(-600 // told["TOKENS"]))
            assert outputs <= across // told["SPLIT"] * told["WIDTH"] < outputs + told["WIDTH"] * told["SHARED"]
            assert one.shared + 16 * told["STAGES"] <= device.shared_bytes
        few, many = {one.defines["SPLIT"] for one in device.bound[:-2]}, {one.defines["SPLIT"] for one in device.bound[-2:]}
        assert (few, many) == ({2 if leaves > 1 and outputs <= 8448 else 1}, {1})


@pytest.mark.parametrize("split", ["features", "experts"])
@pytest.mark.parametrize(("hidden", "width"), [(256, 64), (256, 48), (40, 64)])
def test_leaves_of_experts_take_the_kernels_that_one_leaf_takes(split: str, hidden: int, width: int):
    num, chosen, rows = 8, 3, 64
    for leaves in (1, 2, 4):
        device: Any = PaperDevice(row_invariant=True)
        of_features = leaves if split == "features" else 1
        args = ExpertLeavesV1(
            x=device.empty("x", (rows, hidden), "bf16"), expert_ids=device.empty("ids", (rows, chosen), "i32"),
            expert_weights=device.empty("weights", (rows, chosen), "f32"), leaves=leaves, split=split, shared=None,
            shared_gate=None, gate_up=weight(device, "experts", num, 2 * width * of_features, hidden),
            down=weight(device, "experts", num * of_features, hidden, width),
            out=device.empty("out", (rows, leaves * hidden), "f32"),
        )  # fmt: skip
        bound(device, "expert_leaves", args)
        products = [one for one in device.bound if one.name in ("expert_stream", "expert_plain")]
        assert {one.name for one in products} == {"expert_stream" if hidden == 256 and width == 64 else "expert_plain"}
        axis = 1 if products[0].name == "expert_stream" else 2
        assert {(one.defines["GATED"], one.grid(8)[axis]) for one in products} == {(1, 1), (0, of_features)}
        (last,) = (one for one in device.bound if one.name == "sum_experts")
        assert last.arguments[-3:] == (hidden * of_features, leaves * hidden, 0 if split == "features" else num // leaves)
        assert experts.workspace_bytes(device, args, LIMITS) > rows * chosen * of_features * hidden * 4


# -- on a GPU ----------------------------------------------------------------------------------------------------------------
@on_a_gpu
@pytest.mark.parametrize("name", CHECKS)
def test_the_checks_of_the_kit(name: str):
    result = CHECKS[name].result(Target(polydraft_cuda))
    assert result.outcome == "pass", result.message


@dataclass
class Gpu:
    """A device whose rows are invariant, and its table."""

    act: str

    def __post_init__(self) -> None:
        self.device: Any = polydraft_cuda.polydraft_open_device("cuda:0", DeviceOptions(self.act, row_invariant=True))
        self.table: Any = polydraft_cuda.polydraft_kernels(self.device)

    def rows(self, value: Array, dtype: str = "") -> Any:
        buffer = self.device.zeros("rows", value.shape, dtype or self.act)
        self.device.load(buffer, value if dtype in ("i32", "f32") else to_host(value, self.act))
        return buffer

    def weight(self, value: Array, role: str = "linear") -> Any:
        return self.table.prepare_weight(role, np.ascontiguousarray(value), self.act)

    def found(self, name: str, n: int, *records: Any) -> Array:
        """What the last record's `out` has in its first `n` rows; others are left alone."""
        out = records[-1].out
        self.device.fill_bytes(out, 0xFF)
        bound(self.device, name, *records)(self.device.stream, n)
        self.device.synchronize()
        stored: Array = self.device.read(out.pointer, out.shape, out.dtype)
        assert (np.ascontiguousarray(stored[n:]).view(np.uint8) == 0xFF).all()
        return stored[:n]


@contextmanager
def gpu(act: str) -> Iterator[Gpu]:
    made = Gpu(act)
    try:
        yield made
    finally:
        made.device.close()


def drawn(seed: int, *shape: int) -> Array:
    found: Array = np.random.default_rng(seed).standard_normal(shape, np.float32) / 8
    return found


ROWS = (1, 8, 20, 64, 100, 200, 300)


@on_a_gpu
@pytest.mark.parametrize("act", HALVES)
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 1024), (22016, 1024), (4100, 256), (75840, 256)])
def test_a_rank_has_the_bits_of_its_outputs(act: str, outputs: int, inputs: int):
    """Whichever kernel a share takes, and whatever number of rows: wide ones, those of heads, odd ones, logits. As sums, too."""
    with gpu(act) as at:
        x, matrix, most = drawn(1, max(ROWS), inputs), drawn(2, outputs, inputs), max(ROWS)
        given = at.rows(x)

        def product(part: Any, n: int, dtype: str) -> Array:
            out = at.device.zeros("out", (most, part.shape[0]), dtype)
            return at.found("linear", n, LinearV1(x=given, weight=part, bias=None, out=out))

        everything, parts = at.weight(matrix), []
        for ranks in (2, 4):
            width = -(-outputs // ranks)
            parts.append((slice(width, 2 * width), at.weight(matrix[width : 2 * width])))
        exact = from_host(to_host(x, act), act).astype(np.float64) @ from_host(to_host(matrix, act), act).astype(np.float64).T
        for dtype in ("f32", act):
            whole = product(everything, most, dtype)
            off = np.abs(from_host(whole, dtype).astype(np.float64) - exact)
            assert off.max() < (1e-3 if dtype == "f32" else 0.05)
            for n in ROWS:
                np.testing.assert_array_equal(product(everything, n, dtype), whole[:n])
                for columns, part in parts:
                    found = product(part, n, dtype)
                    np.testing.assert_array_equal(found, whole[:n, columns], err_msg=f"{columns}, {n} rows, {dtype}")


@on_a_gpu
@pytest.mark.parametrize("act", HALVES)
def test_gate_and_up_of_a_rank_are_joined_or_not(act: str):
    """A large matrix is one launch with its activation, a quarter of it two."""
    inputs, width, most = 1024, 11008, 300
    with gpu(act) as at:
        x, matrix = at.rows(drawn(1, most, inputs)), drawn(2, 2, width, inputs)

        def activated(part: Any, n: int, *, joined: bool) -> Array:
            own = part.shape[0] // 2
            both, out = (at.device.zeros("out", (most, size), act) for size in (2 * own, own))
            up = LinearV1(x=x, weight=part, bias=None, out=both)
            activation = SwigluV1(gate_up=both, out=out)
            assert linear.is_gated(at.device, up) == joined
            if joined:
                return at.found("gated", n, up, activation)
            bound(at.device, "linear", up)(at.device.stream, n)
            return at.found("swiglu", n, activation)

        columns = slice(width // 4, width // 2)
        everything, quarter = (at.weight(part.reshape(-1, inputs)) for part in (matrix, matrix[:, columns]))
        for n in (1, 20, 100, 200, most):
            whole, part = activated(everything, n, joined=True), activated(quarter, n, joined=False)
            np.testing.assert_array_equal(part, whole[:, columns], err_msg=f"{n} rows")


@on_a_gpu
@pytest.mark.parametrize("act", HALVES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 1024), (4096, 704), (40, 64), (40, 48)])
def test_a_leaf_has_the_bits_of_a_projection(act: str, outputs: int, inputs: int):
    """Of as many inputs, whichever other leaves there are, with NaN in the neighbour's and a bias on the first."""
    leaves, most = 4, max(ROWS)
    with gpu(act) as at:
        x, matrices, bias = drawn(1, most, leaves * inputs), drawn(2, leaves, outputs, inputs), drawn(3, outputs)
        x[5, inputs : 2 * inputs] = np.nan
        alone = []
        for leaf in range(leaves):
            own = at.rows(x[:, leaf * inputs : (leaf + 1) * inputs])
            out = at.device.zeros("out", (most, outputs), "f32")
            added = None if leaf else at.weight(bias, "bias")
            alone.append(at.found("linear", most, LinearV1(x=own, weight=at.weight(matrices[leaf]), bias=added, out=out)))
        assert np.isfinite(np.delete(np.stack(alone), 5, axis=1)).all()
        for first, count in ((0, 4), (0, 2), (2, 2), (0, 1), (3, 1)):
            out = at.device.zeros("out", (most, count * outputs), "f32")
            kept = at.rows(x[:, first * inputs : (first + count) * inputs])
            args = LinearLeavesV1(
                x=kept, weight=at.weight(matrices[first : first + count]), leaves=count, out=out,
                bias=None if first else at.weight(bias, "bias"),
            )  # fmt: skip
            for n in ROWS:
                found = at.found("linear_leaves", n, args).reshape(n, count, outputs)
                for leaf in range(count):
                    wanted = alone[first + leaf][:n]
                    np.testing.assert_array_equal(found[:, leaf], wanted, err_msg=f"leaf {first + leaf} of {count}, {n} rows")


@on_a_gpu
@pytest.mark.parametrize(
    ("act", "outputs", "inputs"), [("bf16", 4096, 704), ("bf16", 40, 64), ("bf16", 9216, 192), ("f16", 1032, 1024)]
)
def test_leaves_that_are_added_at_once_have_the_bits_of_a_sum_apart(act: str, outputs: int, inputs: int):
    """Those that one rank has, or each of two or four, whose sums go on; whatever number of rows there is."""
    most = max(ROWS)
    with gpu(act) as at:
        for leaves, dtype in ((4, act), (2, "f32"), (1, "f32")):
            x, matrices = drawn(1, most, leaves * inputs), drawn(2, leaves, outputs, inputs)
            apart = at.device.zeros("leaves", (most, leaves * outputs), "f32")
            project = LinearLeavesV1(x=at.rows(x), weight=at.weight(matrices), bias=None, leaves=leaves, out=apart)
            total = SumLeavesV1(x=apart, leaves=leaves, out=at.device.zeros("out", (most, outputs), dtype))
            at.found("linear_leaves", most, project)
            wanted = at.found("sum_leaves", most, total)
            for n in ROWS:
                found = at.found("summed", n, project, total)
                np.testing.assert_array_equal(found, wanted[:n], err_msg=f"{leaves} leaves, {n} rows, {dtype}")


@on_a_gpu
@pytest.mark.parametrize("act", HALVES)
@pytest.mark.parametrize(("hidden", "width"), [(256, 64), (512, 192), (72, 24)])
def test_the_experts_of_a_rank_have_their_bits(act: str, hidden: int, width: int):
    leaves, num, chosen, most = 4, 8, 3, 200
    with gpu(act) as at:
        rng = np.random.default_rng(5)
        ids, by = chosen_ids(rng, most, num, chosen), rng.random((most, chosen), np.float32)
        x, shared, gates = at.rows(drawn(1, most, hidden)), drawn(2, most, leaves * hidden), at.rows(drawn(3, most, 1), "f32")
        gate_up, down = drawn(4, num, 2, leaves, width, hidden), drawn(5, num, leaves, hidden, width)
        joined = np.moveaxis(down, 1, 2).reshape(num, hidden, -1)

        def summed(n: int, split: str, ids: Array, gate_up: Array, down: Array, shared: Array) -> Array:
            args = ExpertLeavesV1(
                x=x, expert_ids=at.rows(ids.astype(np.int32), "i32"), expert_weights=at.rows(by, "f32"),
                gate_up=at.weight(gate_up.reshape(len(gate_up), -1, hidden), "experts"),
                down=at.weight(down.reshape(-1, hidden, down.shape[-1]), "experts"), shared=at.rows(shared.copy(), "f32"),
                shared_gate=gates, leaves=shared.shape[1] // hidden, split=split, out=at.device.zeros("out", shared.shape, "f32"),
            )  # fmt: skip
            return at.found("expert_leaves", n, args)

        for n in (1, 5, 40, most):
            by_features, by_experts = (
                summed(n, "features", ids, gate_up, down, shared), summed(n, "experts", ids, gate_up, joined, shared)
            )  # fmt: skip
            totals = [found.reshape(n, leaves, hidden).sum(axis=1) for found in (by_features, by_experts)]
            np.testing.assert_allclose(totals[0], totals[1], atol=2e-2)
            for ranks, rank in ((2, 1), (4, 2)):
                columns, some, mine = (
                    slice(rank * size // ranks, (rank + 1) * size // ranks) for size in (leaves * hidden, leaves, num)
                )
                part = summed(n, "features", ids, gate_up[:, :, some], down[:, some], shared[:, columns])
                np.testing.assert_array_equal(part, by_features[:, columns])
                own = np.where((ids >= mine.start) & (ids < mine.stop), ids - mine.start, -1)
                part = summed(n, "experts", own, gate_up[mine], joined[mine], shared[:, columns])
                np.testing.assert_array_equal(part, by_experts[:, columns])


@on_a_gpu
def test_leaves_add_up_in_the_tree():
    with gpu("bf16") as at:
        x = drawn(1, 3, 4, 5)
        tree = (x[:, 0] + x[:, 1]) + (x[:, 2] + x[:, 3])
        for dtype in ("f32", "bf16"):
            out = at.device.zeros("out", (3, 5), dtype)
            found = at.found("sum_leaves", 3, SumLeavesV1(x=at.rows(x.reshape(3, 20), "f32"), leaves=4, out=out))
            np.testing.assert_array_equal(found, to_host(tree, dtype))


# -- on two ------------------------------------------------------------------------------------------------------------------
_EVEN: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1024, "vocab_size": 512,
}  # fmt: skip
LARGE: dict[str, dict[str, Any]] = {
    "x-mimo": {"architectures": ["MiMoForCausalLM"], **_EVEN},
    "x-glm": {
        **tiny.CONFIGS["sparse-glm"], **_EVEN, "moe_intermediate_size": 256, "num_key_value_heads": 2,
    },
    "x-ernie": {**tiny.CONFIGS["sparse-ernie"], **_EVEN, "moe_intermediate_size": 256, "moe_num_experts": 8},
}  # fmt: skip
"""Sizes that the kernels of sm_90 take. Names behind those of all other tiny models, whose weights are drawn by their places."""


@pytest.fixture(autouse=True, scope="module")
def large() -> Iterator[None]:
    """`tiny` knows the large ones as well."""
    tiny.CONFIGS.update(LARGE)
    yield
    for name in LARGE:
        del tiny.CONFIGS[name]


@contextmanager
def over(ranks: int, model: str, **options: Any) -> Iterator[Engine]:
    given = {**OPTIONS, "block_size": 16, "num_blocks": 8, "invariant": True, "logprobs": 3, **options}
    made = LLM(model=str(tiny.checkpoint(model)), plugins=tiny.PLUGINS, backend="cuda", tensor_parallel=ranks, **given).engine
    try:
        assert made.resolved.leaves
        yield made
    finally:
        made.close()


@functools.cache
def served(ranks: int, model: str, **options: Any) -> list[tuple[Any, ...]]:
    """Tokens, rounds and log probabilities of requests that are not aborted."""
    with over(ranks, model, **options) as running:
        outputs = drive(running, [replace(ask, params=replace(ask.params, logprobs=3)) for ask in asks(model)])
    return [(one.token_ids, tuple(one.rounds), bits(one).tobytes()) for one in outputs if one.finish_reason != "abort"]


EVERY = [
    ("x-mimo", "bf16", 3, "decode"), ("x-glm", "bf16", 3, "decode"), ("x-ernie", "bf16", 3, "off"),
    ("narrow", "f32", 3, "decode"), ("x-mimo", "bf16", 0, "decode"), ("sparse-glm", "f32", 3, "off"),
    ("sparse-ernie", "f32", 3, "decode"), ("x-glm", "bf16", 0, "decode"), ("x-mimo", "f16", 3, "decode"),
    ("x-ernie", "bf16", 0, "off"), ("narrow", "f32", 0, "decode"), ("x-mimo", "f32", 3, "off"), ("narrow", "bf16", 3, "off"),
    ("sparse-glm", "f32", 0, "off"), ("sparse-ernie", "bf16", 3, "off"),
]  # fmt: skip


@on_a_gpu
@on_two
@pytest.mark.parametrize(("model", "dtype", "drafts", "graph"), EVERY)
def test_bits_do_not_depend_on_the_number_of_gpus(model: str, dtype: str, drafts: int, graph: str):
    """Tokens, rounds and log probabilities; and tokens not on the number of drafts."""
    found = served(2, model, dtype=dtype, draft_tokens=drafts, graph=graph)
    assert found == served(1, model, dtype=dtype, draft_tokens=drafts, graph=graph)
    assert tokens(found) == tokens(served(1, model, dtype=dtype, draft_tokens=3 - drafts, graph=graph))


@on_a_gpu
def test_nor_on_that_of_ranks_which_share_one():
    """Four, each a process with a quarter of the model, whose launches take turns."""
    options: dict[str, Any] = {"dtype": "f32", "draft_tokens": 3, "graph": "decode"}
    assert served(4, "narrow", device="cuda:0,0,0,0", **options) == served(1, "narrow", **options)


@on_a_gpu
@on_two
@pytest.mark.parametrize(("model", "dtype"), [("x-glm", "bf16"), ("sparse-glm", "f32")])
def test_nor_do_those_of_experts_that_a_rank_keeps_whole(model: str, dtype: str):
    options: dict[str, Any] = {"dtype": dtype, "draft_tokens": 3, "expert_parallel": True, "graph": "decode"}
    assert served(2, model, **options) == served(1, model, **options)
