"""A device on paper: addresses without memory and kernels that are bound but never run, to check what needs no GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from polydraft.backend import CacheSpec, PassBuffers
from polydraft.conformance.harness import weight_role
from polydraft.conformance.rank_jobs import of_rank
from polydraft.contracts import (
    COLLECTIVES,
    COMPOSITES,
    REGISTRY,
    AllReduceV1,
    ArgmaxPairV1,
    ArgmaxV1,
    ExpertMlpV1,
    LinearLeavesV1,
    LinearV1,
    PagedAttentionV1,
    ProcessLogitsV1,
    ResidualAddV1,
    RmsNormV1,
    RopeKvWriteV1,
    RouteExpertsV1,
    SumLeavesV1,
    SwigluV1,
)
from polydraft.contracts.base import Case, ColumnsSpec, Limits, LogicalCache, ParamSpec, TensorSpec
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.inputs import contract_of, default_cases, dtype_of, limits_of
from polydraft.contracts.kernels.rope_kv_write import plain_frequencies
from polydraft.contracts.kv_quant import KV_DTYPES
from polydraft.contracts.packing import PACKINGS, PackedWeight, Packing
from polydraft.contracts.stacking import stacked
from polydraft.device import DTYPES, DeviceCounters
from polydraft.plugins.program_pass import Node, Rewritten, UnboundProgram
from polydraft_cuda import CAPABILITIES
from polydraft_cuda.compiler import ROWS, _value
from polydraft_cuda.forward_meta import CudaForwardMeta
from polydraft_cuda.kernels import kernels
from polydraft_cuda.kernels.carried import kernels as carried
from polydraft_cuda.kernels.collectives import kernels as collectives
from polydraft_cuda.kernels.packed import CudaPackedWeight
from polydraft_cuda.kernels.packed import prepare as prepare_packed
from polydraft_cuda.kernels.provider import CudaProvider
from polydraft_cuda.program_pass import CudaPass
from polydraft_cuda.storage import CudaWeight, allocate_cache, prepare_weight

SIGNATURE = r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s+)?{name}\s*\(([^)]*)\)'


@dataclass
class Buffer:
    """What a provider sees of a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pointer: int
    device: Any = field(repr=False, compare=False)
    """As memory of a GPU, it keeps its device."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPES[self.dtype].itemsize


@dataclass
class Bound:
    """A kernel with what it was bound to."""

    source: Path
    name: str
    defines: dict[str, Any]
    grid: Any
    arguments: tuple[Any, ...]
    threads: int = 0
    shared: int = 0


@dataclass(eq=False)
class PaperDevice:
    """As much of `CudaDevice` as binding touches."""

    arch: str = "sm_90"
    dtype: str = "bf16"
    row_invariant: bool = False
    index: int = 0
    num_sms: int = 132
    shared_bytes: int = 232448
    capturing: bool = False
    uniform_routing: bool = False
    bound: list[Bound] = field(default_factory=list)
    next: int = 1 << 20
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counters = DeviceCounters()
        self.stream = SimpleNamespace(handle=0)

    def allocate(self, name: str, nbytes: int) -> int:
        del name
        start, self.next = self.next, self.next + -(-max(nbytes, 1) // 256) * 256
        return start

    def empty(self, name: str, shape: Any, dtype: str) -> Buffer:
        shape = tuple(shape)
        return Buffer(name, shape, dtype, self.allocate(name, int(np.prod(shape)) * DTYPES[dtype].itemsize), self)

    def zeros(self, name: str, shape: Any, dtype: str) -> Buffer:
        return self.empty(name, shape, dtype)

    def call(self, name: str, *arguments: Any, doing: str = "") -> Any:
        return SimpleNamespace(opaque=[0] * 16)

    def write(self, pointer: int, value: Any) -> None:
        pass

    def load(self, target: Any, value: Any) -> None:
        pass

    def fill_bytes(self, buffer: Any, byte: int) -> None:
        pass

    def free(self, pointer: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def function(self, source: Path, name: str, **defines: Any) -> Any:
        def bind(grid: Any, block: Any, *arguments: Any, **options: Any) -> Any:
            self.bound.append(Bound(source, name, defines, grid, arguments, block, options.get("shared", 0)))
            return lambda stream, n: None

        return SimpleNamespace(bind=bind, name=name, most_clusters=lambda block, shared, cluster: self.num_sms // cluster)


def bind_on_paper(name: str, case: Case, act: str = "f32", **options: Any) -> list[Bound]:
    """Bind the kernel of a contract or composite to arguments shaped as in `case`; what was bound."""
    device = PaperDevice(dtype=act, **options)
    kernel = COMPOSITES.get(name) or REGISTRY[name]
    contract = contract_of(kernel)
    values: dict[str, Any] = {}
    for key, spec in contract.args.specs().items():
        value = case.params.get(key) if isinstance(spec, ParamSpec) else case.arrays.get(key)
        if isinstance(spec, ColumnsSpec):
            value = tuple(device.empty(key, c.shape, "f32" if c.dtype.kind == "f" else "i32") for c in value or ())
        elif isinstance(spec, TensorSpec):
            shape = case.outputs[key][0] if key in case.outputs else None if value is None else value.shape
            value = None if shape is None else device.empty(key, shape, dtype_of(contract, case, key, act))
        elif isinstance(value, LogicalCache):
            blocks, block_size, heads, head_dim = value.k.shape
            value = allocate_cache(device, CacheSpec(blocks, block_size, heads, head_dim, act))  # type: ignore[arg-type]
        elif value is not None and not isinstance(spec, ParamSpec):
            role = weight_role(key, spec)
            if isinstance(value, PackedWeight):
                value = prepare_packed(device, role, value, act)  # type: ignore[arg-type]
            else:
                value = prepare_weight(device, role, value.astype(np.float32), act, None)  # type: ignore[arg-type]
        values[key] = value
    if name in COMPOSITES:
        args: Any = CompositeArgs(tuple(p.args(**{k: values[k] for k in p.args.specs()}) for p in COMPOSITES[name].contracts))
    else:
        args = contract.args(**values)
    limits = limits_of(contract, case)
    provider = CudaProvider(kernels()[name], device)  # type: ignore[arg-type]
    nbytes = provider.workspace_bytes(args, limits)
    workspace = SimpleNamespace(buffer=device.empty("workspace", (nbytes,), "u8"), nbytes=nbytes) if nbytes else None
    provider.bind(args, limits, workspace)
    return device.bound


def bind_collectives(name: str, act: str, ranks: int, **options: Any) -> list[Bound]:
    """Bind a collective of one of so many ranks to arguments shaped as in the contract's cases, over memory of each other's GPUs
    and over NCCL; what was bound."""
    device, contract = PaperDevice(dtype=act, **options), COLLECTIVES[name]
    place = paper_place(device, ranks)
    for case in map(of_rank, default_cases(stacked(contract), 2), itertools.repeat(0)):
        values: dict[str, Any] = {}
        for key, spec in contract.args.specs().items():
            if isinstance(spec, ParamSpec):
                values[key] = case.params[key]
                continue
            shape = case.outputs[key][0] if key in case.outputs else case.arrays[key].shape
            values[key] = device.empty(key, shape, dtype_of(contract, case, key, act))
        for made in (collectives(place), carried(place)):
            provider = CudaProvider(made[name], device)  # type: ignore[arg-type]
            provider.bind(contract.args(**values), limits_of(contract, case), None)
    return device.bound


class PaperRegion(ctypes.Structure):
    """Stands for the memory in which ranks meet."""


def paper_place(device: Any, ranks: int) -> Any:
    """Where the last of so many ranks meets the others."""
    return SimpleNamespace(
        device=device, rank=ranks - 1, size=ranks, number=lambda: 0, region=PaperRegion, come=lambda nbytes: None,
        rows_with_room=lambda row_bytes: 1024, rows_of_words=lambda row_bytes: 64,
    )  # fmt: skip


def sum_and_norm(device: Any, rows: int, width: int, act: str) -> tuple[Any, list[tuple[str, Any]]]:
    """What ranks add up, and the launches of its sum, the residual addition and the norm."""
    stream, branch, out = (device.empty(name, (rows, width), act) for name in ("stream", "branch", "out"))
    gain: Any = CudaWeight("norm", device.empty("gain", (width,), act))
    norm = RmsNormV1(x=stream, weight=gain, out=out, eps=1e-6, plus_one=False)
    summed = AllReduceV1(x=branch, step=device.empty("step", (1,), "i32"))
    added = CompositeArgs((ResidualAddV1(x=stream, y=branch), norm))
    return branch, [("all_reduce", summed), ("residual_add+rms_norm", added)]


def share_of_head(device: Any, rows: int, hidden: int, outputs: int, act: str, tokens: int) -> list[tuple[str, Any]]:
    """A rank's share of a head of so many tokens, and the choice among those of all ranks."""
    weight: Any = CudaWeight("linear", device.empty("weight", (outputs, hidden), act))
    x, y = device.empty("x", (rows, hidden), act), device.empty("logits", (rows, outputs), "f32")
    of_rows = {name: device.empty(name, (rows,), "i32") for name in ("row_slot", "tokens")}
    choice = ArgmaxPairV1(logits=y, num_valid=tokens, step=device.empty("step", (1,), "i32"), **of_rows)
    return [("linear", LinearV1(x=x, weight=weight, bias=None, out=y)), ("argmax_pair", choice)]


def bind_of_ranks(shape: Shape, act: str, ranks: int, **options: Any) -> list[Bound]:
    """Bind what one of so many ranks joins, behind a projection and not: sums with a norm, and a head with its choice."""
    device: Any = PaperDevice(dtype=act, **options)
    place, n = paper_place(device, ranks), shape.rows
    branch, launches = sum_and_norm(device, n, shape.hidden, act)
    weight: Any = CudaWeight("linear", device.empty("weight", (shape.hidden, shape.hidden), act))
    project = LinearV1(x=device.empty("x", (n, shape.hidden), act), weight=weight, bias=None, out=branch)
    _bind(device, launches, shape, place)
    _bind(device, [("linear", project), *launches], shape, place)
    _bind(device, share_of_head(device, n, shape.hidden, HEAD // 2, act, HEAD // 2 * ranks), shape, place)
    return device.bound  # type: ignore[no-any-return]


# -- shapes of real models, which take other kernels than the small cases of contracts -------------------------------------
@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of the launches that it is bound for."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rows: int
    window: int = 4
    block_size: int = 16


HEAD = 151680
"""Outputs of a head whose blocks have whole tiles."""
WINDOW = 700
"""Keys of a sliding window."""
SHAPES = (Shape(4096, 32, 8, 128, 11008, 1024), Shape(1024, 8, 4, 128, 2816, 64, 8), Shape(256, 4, 2, 64, 768, 16, 1))


class Half(NamedTuple):
    """Sizes of a feed-forward half with experts; `shared`: intermediate features of the shared ones."""

    hidden: int
    width: int
    experts: int
    chosen: int
    shared: int


HALF = Half(2560, 1536, 64, 6, 3072)
"""That of ernie21."""


def experts_of_half(
    device: Any, half: Half, rows: int, weight: Callable[[str, str, tuple[int, ...]], Any], **routing: Any
) -> list[tuple[str, Any]]:
    """The launches of a half with experts, from the router's projection to the norm of the stream. `weight(name, role, shape)`
    makes weights; `routing`: what differs in the arguments of the choice."""
    routing = {
        "scoring": "softmax",
        "num_groups": 1,
        "top_groups": 1,
        "renormalize": "sum",
        "floor": 1e-12,
        "scale": 1.0,
    } | routing
    act, hidden, (up, down) = device.dtype, half.hidden, ((2 * half.shared, half.hidden), (half.hidden, half.shared))

    def empty(name: str, width: int, dtype: str = act) -> Any:
        return device.empty(name, (rows, width), dtype)

    normed, stream, branch, shared = (empty(name, hidden) for name in ("normed", "stream", "branch", "shared"))
    logits, ids, by = empty("logits", half.experts, "f32"), empty("ids", half.chosen, "i32"), empty("weights", half.chosen, "f32")
    router = weight("router", "router", (half.experts, hidden))
    launches: list[tuple[str, Any]] = [
        ("linear", LinearV1(x=normed, weight=router, bias=None, out=logits)),
        ("route_experts", RouteExpertsV1(
            logits=logits, bias=routing.pop("bias", None), row_slot=device.empty("row_slot", (rows,), "i32"), expert_ids=ids,
            expert_weights=by, **routing,
        )),
    ]  # fmt: skip
    if half.shared:
        gate_up, gated = empty("gate_up", 2 * half.shared), empty("gated", half.shared)
        launches += [
            ("linear", LinearV1(x=normed, weight=weight("up", "linear", up), bias=None, out=gate_up)),
            ("swiglu", SwigluV1(gate_up=gate_up, out=gated)),
            ("linear", LinearV1(x=gated, weight=weight("down", "linear", down), bias=None, out=shared)),
        ]
    add = ResidualAddV1(x=stream, y=branch)
    norm = RmsNormV1(x=stream, weight=weight("gain", "norm", (hidden,)), out=normed, eps=1e-5, plus_one=False)
    mlp = ExpertMlpV1(
        x=normed, expert_ids=ids, expert_weights=by, shared=shared if half.shared else None, shared_gate=None, out=branch,
        gate_up=weight("experts_up", "experts", (half.experts, 2 * half.width, hidden)),
        down=weight("experts_down", "experts", (half.experts, hidden, half.width)),
    )  # fmt: skip
    return [*launches, ("expert_mlp", mlp), ("residual_add+rms_norm", CompositeArgs((add, norm)))]


def weight_on_paper(device: Any, packing: Packing | None = None) -> Callable[[str, str, tuple[int, ...]], Any]:
    """Makes weights for `experts_of_half`, those of a router in float32, those of experts in a packing if there is one."""

    def weight(name: str, role: str, shape: tuple[int, ...]) -> Any:
        if role == "experts" and packing is not None:
            return packed_on_paper(device, shape, packing)
        return CudaWeight(role, device.empty(name, shape, "f32" if role == "router" else device.dtype))  # type: ignore[arg-type]

    return weight


def bind_shape(shape: Shape, act: str, **options: Any) -> list[Bound]:
    """Bind every projection of a decoder block, those by leaf too where rows are invariant, and its attention, with metadata, a
    half with experts, and a large head, of an own weight and of somebody else's; what was bound."""
    device: Any = PaperDevice(dtype=act, **options)
    q, kv, n = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.rows
    for inputs, outputs, out in (
        (shape.hidden, q + 2 * kv, act), (q, shape.hidden, act), (shape.hidden, 2 * shape.ffn, act),
        (shape.ffn, shape.hidden, act), (shape.hidden, 32000, "f32"),
    ):  # fmt: skip
        weight = CudaWeight("linear", device.empty("weight", (outputs, inputs), act))
        x, y = device.empty("x", (n, inputs), act), device.empty("y", (n, outputs), out)
        launches: list[tuple[str, Any]] = [("linear", LinearV1(x=x, weight=weight, bias=None, out=y))]
        if outputs == 2 * shape.ffn:
            launches.append(("swiglu", SwigluV1(gate_up=y, out=device.empty("gated", (n, shape.ffn), act))))
        if inputs == shape.ffn:
            stream, normed, gain = (device.empty(name, (n, shape.hidden), act) for name in ("stream", "normed", "gain"))
            norm = RmsNormV1(x=stream, weight=gain, out=normed, eps=1e-6, plus_one=False)
            launches.append(("residual_add+rms_norm", CompositeArgs((ResidualAddV1(x=stream, y=y), norm))))
        _bind(device, launches, shape)
    for inputs in (q, shape.ffn) if device.row_invariant else ():
        weight = CudaWeight("linear", device.empty("weight", (4, shape.hidden, inputs // 4), act))
        x, y = device.empty("x", (n, inputs), act), device.empty("y", (n, 4 * shape.hidden), "f32")
        branch = device.empty("branch", (n, shape.hidden), act)
        project = LinearLeavesV1(x=x, weight=weight, bias=None, leaves=4, out=y)
        _bind(device, [("linear_leaves", project), ("sum_leaves", SumLeavesV1(x=y, leaves=4, out=branch))], shape)
    if shape is SHAPES[0]:
        for half in (HALF, HALF._replace(shared=0)):
            _bind(device, experts_of_half(device, half, n, weight_on_paper(device)), shape)
        own = CudaWeight("linear", device.empty("weight", (HEAD, shape.hidden), act))
        other = SimpleNamespace(pointer=own.pointer, shape=own.shape, dtype=act, nbytes=own.nbytes)
        for head in (own, other):
            x, y = device.empty("x", (n, shape.hidden), act), device.empty("logits", (n, HEAD), "f32")
            chosen = {name: device.empty(name, (n,), "i32") for name in ("row_slot", "tokens")}
            process = ProcessLogitsV1(logits=y, row_slot=chosen["row_slot"], num_valid=HEAD)
            project = LinearV1(x=x, weight=head, bias=None, out=y)
            choice = ArgmaxV1(logits=y, **chosen)
            _bind(device, [("linear", project), ("process_logits", process), ("argmax", choice)], shape)
    attention = {
        "row_slot": device.empty("row_slot", (n,), "i32"), "positions": device.empty("positions", (n,), "i32"),
        "block_table": device.empty("block_table", (8, 64), "i32"),
    }  # fmt: skip
    joined = device.empty("qkv", (n, q + 2 * kv), act), device.empty("q", (n, q), act)
    weight = CudaWeight("linear", device.empty("weight", (q + 2 * kv, shape.hidden), act))
    x = device.empty("x", (n, shape.hidden), act)
    project = LinearV1(x=x, weight=weight, bias=None, out=joined[0])
    meta = CudaForwardMeta(device, PassBuffers("target", **attention), _limits(shape))
    cache = allocate_cache(device, CacheSpec(8, shape.block_size, shape.kv_heads, shape.head_dim, act))
    shared = {
        "num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "block_size": shape.block_size,
        "cache": cache, "meta": meta, **attention,
    }  # fmt: skip
    turn = RopeKvWriteV1(
        qkv=joined[0], q_out=joined[1], q_norm=None, k_norm=None,
            frequencies=plain_frequencies(shape.head_dim, 1e4), attention_factor=1.0, style="half", eps=1e-6,
        **shared,
    )  # fmt: skip
    record = PagedAttentionV1(q=joined[1], out=device.empty("out", (n, q), act), softmax_scale=0.1, sliding_window=0, **shared)
    if shape is SHAPES[0] or act != "bf16":  # then attention has a second set of kernels; in bfloat16 one of each is enough
        _bind(device, [("linear", project), ("rope_kv_write", turn), ("paged_attention", record)], shape)
    else:
        _bind(device, [("linear", project), ("paged_attention", record)], shape)
    if shape is SHAPES[0]:
        fewer = turn.frequencies[: shape.head_dim // 4]
        for turned in (dataclasses.replace(turn, style="interleaved"), dataclasses.replace(turn, frequencies=fewer)):
            _bind(device, [("linear", project), ("rope_kv_write", turned), ("paged_attention", record)], shape)
        record = dataclasses.replace(record, sliding_window=WINDOW)
        _bind(device, [("linear", project), ("rope_kv_write", turn), ("paged_attention", record)], shape)
        _bind(device, [("paged_attention", dataclasses.replace(record, meta=None))], shape)
        for form in KV_DTYPES:
            rows = allocate_cache(device, CacheSpec(8, shape.block_size, shape.kv_heads, shape.head_dim, act, kv=form))
            _bind(device, [("rope_kv_write", dataclasses.replace(turn, cache=rows))], shape)
            _bind(device, [("paged_attention", dataclasses.replace(record, cache=rows))], shape)
            _bind(device, [("paged_attention", dataclasses.replace(record, cache=rows, meta=None))], shape)
    return device.bound  # type: ignore[no-any-return]


def bind_packed(shape: Shape, act: str, packing: str, **options: Any) -> list[Bound]:
    """Bind two projections, one of them gate and up with their activation, a large head with its choice, and a half whose experts
    are taken so, packed; what was bound."""
    device: Any = PaperDevice(dtype=act, **options)
    for outputs, out in (((shape.heads + 2 * shape.kv_heads) * shape.head_dim, act), (2 * shape.ffn, act), (HEAD, "f32")):
        weight = packed_on_paper(device, (outputs, shape.hidden), PACKINGS[packing])
        x, y = device.empty("x", (shape.rows, shape.hidden), act), device.empty("y", (shape.rows, outputs), out)
        launches: list[tuple[str, Any]] = [("linear", LinearV1(x=x, weight=weight, bias=None, out=y))]
        if out == "f32":
            chosen = {name: device.empty(name, (shape.rows,), "i32") for name in ("row_slot", "tokens")}
            launches.append(("process_logits", ProcessLogitsV1(logits=y, row_slot=chosen["row_slot"], num_valid=outputs)))
            launches.append(("argmax", ArgmaxV1(logits=y, **chosen)))
        elif outputs == 2 * shape.ffn:
            gated = device.empty("gated", (shape.rows, shape.ffn), act)
            launches.append(("swiglu", SwigluV1(gate_up=y, out=gated)))
        _bind(device, launches, shape)
        if out != "f32":
            stream, gain = device.empty("stream", x.shape, act), device.empty("gain", (shape.hidden,), act)
            norm = RmsNormV1(x=stream, weight=gain, out=x, eps=1e-6, plus_one=False)
            added = CompositeArgs((ResidualAddV1(x=stream, y=device.empty("branch", x.shape, act)), norm))
            _bind(device, [("residual_add+rms_norm", added), *launches], shape)
    if packing in CAPABILITIES.expert_packings:
        _bind(device, experts_of_half(device, HALF, shape.rows, weight_on_paper(device, PACKINGS[packing])), shape)
    return device.bound  # type: ignore[no-any-return]


def packed_on_paper(device: Any, shape: tuple[int, ...], packing: Packing) -> CudaPackedWeight:
    """A packed weight, or a stack of experts, whose numbers are one in memory, whatever its size."""
    *rows, inputs = shape
    width = -(-inputs // 2) if packing.number == "int4" else inputs
    numbers = np.broadcast_to(np.zeros(1, np.int8 if packing.number == "int8" else np.uint8), (*rows, width))
    scales = np.broadcast_to(np.ones(1, np.float32), packing.scales_of(shape))
    zeros = np.broadcast_to(np.zeros(1, np.uint8), scales.shape) if packing.zeros else None
    role = "linear" if len(shape) == 2 else "experts"
    return CudaPackedWeight(device, role, PackedWeight(packing, shape, numbers, scales, zeros), device.dtype)


def _limits(shape: Shape) -> Limits:
    return Limits(8, shape.window - 1, shape.rows, shape.rows, 1024, shape.block_size, 64, 64, 4, 32000)


def _bind(device: Any, launches: Sequence[tuple[str, Any]], shape: Shape, place: Any = None) -> None:
    """Bind these launches one by one, and what the pass makes of them. `place`: where ranks meet, if there are several."""
    limits, nodes = _limits(shape), [Node(name, args, "rows", "stage") for name, args in launches]
    brought = CudaPass(device, lambda kernel: CudaProvider(kernel, device), place=place)
    served = {**kernels(), **(collectives(place) if place else {})}
    found = brought.rewrite(UnboundProgram("shape", tuple(nodes), frozenset(served), limits))
    providers: list[tuple[Any, Any]] = [(CudaProvider(served[name], device), args) for name, args in launches]
    providers += [
        (brought.kernels[one.kernel].provider, CompositeArgs(one.records)) for one in found if isinstance(one, Rewritten)
    ]
    for provider, args in providers:
        nbytes = provider.workspace_bytes(args, limits)
        workspace = SimpleNamespace(buffer=device.empty("workspace", (nbytes,), "u8"), nbytes=nbytes) if nbytes else None
        device.kept.append(provider.bind(args, limits, workspace))


def parameters(source: Path, name: str) -> list[str]:
    """Types of a kernel's parameters as its source declares them: "pointer", "int", "float", or the type's own name."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", source.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.search(SIGNATURE.format(name=re.escape(name)), text)
    assert found, f"{source.name} has no kernel called {name}"
    return [_kind(parameter) for parameter in found[1].split(",") if parameter.strip()]


def _kind(parameter: str) -> str:
    if "*" in parameter:
        return "pointer"
    words = [w for w in parameter.replace("__grid_constant__", "").split() if w not in ("const", "__restrict__")]
    return words[0]


def given(argument: Any) -> str:
    """The type that an argument is passed as."""
    if argument is ROWS:
        return "int"
    value = _value(argument)
    kinds = {ctypes.c_int32: "int", ctypes.c_float: "float", ctypes.c_void_p: "pointer", ctypes.c_int64: "int64_t"}
    kinds |= {ctypes.c_uint32: "uint32_t", ctypes.c_uint64: "uint64_t"}
    return kinds.get(type(value), "struct")
