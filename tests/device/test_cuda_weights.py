"""Packed weights on a GPU: each packing against its contract, in shapes that tiles take, joined launches, and whole engines."""

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

import polydraft_cuda
from polydraft import LLM, SamplingParams
from polydraft.backend import DeviceOptions
from polydraft.conformance.harness import check_kernel
from polydraft.conformance.oracle.checkpoints import tensor_shapes
from polydraft.contracts import (
    REGISTRY,
    ArgmaxV1,
    ExpertMlpV1,
    LinearV1,
    ProcessLogitsV1,
    ResidualAddV1,
    RmsNormV1,
    SwigluV1,
)
from polydraft.contracts.base import Case
from polydraft.contracts.compare import EPS, from_host, to_host
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.kernels.expert_mlp import chosen_ids, expert_arrays
from polydraft.contracts.packing import E4M3, PACKINGS, PackedWeight, Packing, pack, rounded
from polydraft.device import Array
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import packed
from tests.device.test_cuda_gpu import PROMPTS, texts
from tests.device.test_cuda_shapes import filled, launch_of, limits
from tests.support import published_packings
from tools import make_checkpoint

pytestmark = [pytest.mark.device("cuda"), pytest.mark.timeout(600)]
ROWS = (1, 4, 8, 9, 17, 33, 65, 100, 129, 256, 257)


TAKEN, OF_EXPERTS = polydraft_cuda.CAPABILITIES.weight_packings, polydraft_cuda.CAPABILITIES.expert_packings
OF_CONTRACTS = [*(("linear", one) for one in TAKEN), *(("expert_mlp", one) for one in OF_EXPERTS)]
SHAPED = ("fp8-channel", "fp8-channel-a8", "fp8-block128-a8", "int4-group32-zeros")
"""Packings that are tried in every way; the others differ from some of these by numbers, groups or zero points."""


@contextmanager
def opened(act: str = "bf16", *, invariant: bool = False) -> Iterator[CudaDevice]:
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions(act, row_invariant=invariant))
    yield device
    device.close()


def random_weight(packing: Packing, *shape: int) -> PackedWeight:
    """Numbers of every size, and scales and zero points that differ from place to place; `pack` would take longer."""
    *rows, inputs = shape
    rng = np.random.default_rng(sum(shape))
    width = inputs // 2 if packing.number == "int4" else inputs
    bits = rng.integers(0, 256, (*rows, width), np.uint8)
    if packing.number == "fp8":
        bits[bits & 127 == 127] = 5
    places = packing.scales_of(shape)
    largest = {"fp8": 100.0, "int8": 73.0, "int4": 5.0}[packing.number]
    scales = (rng.uniform(0.25, 4, places) / (largest * np.sqrt(inputs))).astype(np.float32)
    zeros = rng.integers(0, 16, places).astype(np.uint8) if packing.zeros else None
    return PackedWeight(packing, shape, bits.view(np.int8) if packing.number == "int8" else bits, scales, zeros)


class Projection:
    """A projection by a packed weight; `run(n)` gives the first n rows of what it leaves, `allowed` how far they may be from
    `wanted`."""

    def __init__(
        self, device: CudaDevice, value: PackedWeight, *, to_f32: bool = False, bias: bool = False, rows: int = max(ROWS)
    ) -> None:
        rng, act = np.random.default_rng(7), device.dtype
        self.device, self.value, self.dtype = device, value, "f32" if to_f32 else act
        outputs, inputs = value.shape
        table: Any = polydraft_cuda.polydraft_kernels(device)
        x = rng.standard_normal((rows, inputs), np.float32) * np.float32(2.0) ** rng.integers(-3, 4, (rows, 1))
        added = rng.standard_normal(outputs, np.float32) if bias else np.zeros(outputs, np.float32)
        self.weight = table.prepare_weight("linear", value, act)
        self.out = device.empty("out", (rows, outputs), self.dtype)
        self.x = filled(device, "x", x, act)
        self.args = LinearV1(
            x=self.x, weight=self.weight, bias=table.prepare_weight("bias", added, act) if bias else None, out=self.out
        )
        self.launch = launch_of(device, "linear", self.args, limits(rows))
        seen, matrix = rounded(from_host(to_host(x, act), act).astype(np.float32), value.packing), value.read(np.float64)
        addend = from_host(to_host(added, act), act).astype(np.float64)
        self.wanted = seen @ matrix.T + addend
        magnitude = np.abs(seen) @ np.abs(matrix).T + np.abs(addend)
        rough = device.dtype != "f32" and self.weight.eight and not to_f32  # tensor cores keep 13 places of products of E4M3
        self.allowed = (2.0**-11 if rough else 2.0**-18) * magnitude + (0 if to_f32 else EPS[act]) * np.abs(self.wanted)

    def run(self, n: int) -> Array:
        self.device.fill_bytes(self.out, 0xFF)
        self.launch(self.device.stream, n)
        found = from_host(self.device.read(self.out.pointer, self.out.shape, self.dtype), self.dtype)
        assert np.isnan(found[n:]).all(), "nothing behind the launch length is written"
        return found[:n]

    def holds(self, n: int) -> None:
        off = np.abs(self.run(n) - self.wanted[:n])
        assert (off <= self.allowed[:n]).all(), (
            self.value.packing.name, self.value.shape, n, float((off / self.allowed[:n]).max()),
            np.argwhere(~(off <= self.allowed[:n]))[:4].tolist(),
        )  # fmt: skip


@pytest.mark.parametrize("act", polydraft_cuda.CAPABILITIES.dtypes)
@pytest.mark.parametrize(("contract", "packing"), OF_CONTRACTS)
def test_a_packed_product_is_what_its_contract_says(contract: str, packing: str, act: str):
    for invariant in (False, True):
        with opened(act, invariant=invariant) as device:
            cases: Any = REGISTRY[contract].packed_cases
            for case in cases(packing):
                found = check_kernel(REGISTRY[contract], case, device, polydraft_cuda.polydraft_kernels(device), act=act)
                assert found.ok, found.describe()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("packing", "act"), [*((one, "bf16") for one in TAKEN), *((one, "f16") for one in SHAPED)])
def test_a_packed_projection_is_right_for_every_number_of_rows(packing: str, act: str, invariant: bool):
    shapes: list[tuple[int, int, dict[str, bool]]] = [(1024 + 72, 2048, {})]
    if packing in SHAPED and act == "bf16":
        shapes += [(6144, 1024, {}), (1024, 11008, {}), (4096 + 24, 512, {"to_f32": True}), (200, 256, {"bias": True})]
        shapes += [(128, 128, {})]
    with opened(act, invariant=invariant) as device:
        for outputs, inputs, options in shapes:
            projection = Projection(device, random_weight(PACKINGS[packing], outputs, inputs), **options)
            assert projection.weight.tiled
            for n in ROWS:
                projection.holds(n)


@pytest.mark.parametrize("act", ["bf16", "f16"])
def test_blocks_that_split_the_inputs_of_a_packed_tile_leave_each_other_their_sums(act: str):
    with opened(act) as device:
        # four blocks a tile, two, and whole tiles besides, with four and with three
        for outputs, inputs in ((4000, 4224), (6000, 2304), (19184, 768), (22016, 768)):
            projection = Projection(device, random_weight(PACKINGS["fp8-channel-a8"], outputs, inputs), bias=outputs < 5000)
            for n in (65, 128, 129, 256, 200):
                projection.holds(n)
                assert np.array_equal(projection.run(n), projection.run(n)), "a sum has one order"


@pytest.mark.parametrize("packing", TAKEN)
def test_where_rows_are_invariant_a_row_is_the_same_alone(packing: str):
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions("bf16", row_invariant=True))
    projection = Projection(device, random_weight(PACKINGS[packing], 1024 + 72, 2048))
    every = projection.run(max(ROWS))
    for n in ROWS:
        assert np.array_equal(projection.run(n), every[:n]), n
    device.close()


@pytest.mark.parametrize(
    ("packing", "width", "inputs"),
    [
        *((one, 5632, 4096) for one in ("fp8-channel", "fp8-channel-a8", "fp8-block128-a8")), ("int4-group32-zeros", 8192, 4096),
        ("fp8-channel-a8", 9592, 768), ("fp8-channel-a8", 11008, 768),
    ],
)  # fmt: skip
def test_gate_up_and_their_activation_are_one_launch(packing: str, width: int, inputs: int):
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions("bf16"))
    rows, kind = 257, PACKINGS[packing]
    projection = Projection(device, random_weight(kind, 2 * width, inputs), rows=rows)
    gated = device.empty("gated", (rows, width), "bf16")
    activation = SwigluV1(gate_up=projection.out, out=gated)
    activate = launch_of(device, "swiglu", activation, limits(rows))
    together = launch_of(device, "gated", CompositeArgs((projection.args, activation)), limits(rows))
    most = 128 if kind.columns else 256
    for n in (1, 9, 17, 33, 65, 128, 129, 256, 257):
        projection.launch(device.stream, n)
        activate(device.stream, n)
        wanted = from_host(device.read(gated.pointer, gated.shape, "bf16"), "bf16")[:n].copy()
        device.fill_bytes(gated, 0xFF)
        device.fill_bytes(projection.out, 0xFF)
        together(device.stream, n)
        found = from_host(device.read(gated.pointer, gated.shape, "bf16"), "bf16")
        assert np.isnan(found[n:]).all()
        assert np.abs(found[:n] - wanted).max() <= 4 * EPS["bf16"] * max(float(np.abs(wanted).max()), 1.0), n
        stored = from_host(device.read(projection.out.pointer, (1, 16), "bf16"), "bf16")
        assert np.isnan(stored).all() == (n <= most), "gate and up are not stored"
    device.close()


@pytest.mark.parametrize("packing", ["fp8-channel-a8", "fp8-block128-a8", "int8-channel-a8"])
@pytest.mark.parametrize(("act", "outputs", "inputs"), [("bf16", 19184, 768), ("bf16", 4000, 4224), ("f16", 1096, 1024)])
@pytest.mark.parametrize("front", ["norm", "added_norm", "early_added_norm"])
def test_a_norm_that_rounds_its_rows_leaves_the_bits_of_launches_by_themselves(
    packing: str, act: str, outputs: int, inputs: int, front: str
):
    rows, rng = 257, np.random.default_rng(outputs)
    with opened(act) as device:
        projection = Projection(device, random_weight(PACKINGS[packing], outputs, inputs), rows=rows)
        table: Any = polydraft_cuda.polydraft_kernels(device)
        x, y = (rng.standard_normal((rows, inputs), np.float32) * np.float32(3) for _ in range(2))
        x[2] = 0 if front == "norm" else -y[2]
        x[5, 7] = np.inf
        stream, branch = filled(device, "stream", x, act), filled(device, "branch", y, act)
        gain = table.prepare_weight("norm", rng.standard_normal(inputs).astype(np.float32), act)
        norm = RmsNormV1(x=stream, weight=gain, out=projection.x, eps=1e-5, plus_one=False)
        added = (norm,) if front == "norm" else (ResidualAddV1(x=stream, y=branch), norm)
        gated = device.empty("gated", (rows, outputs // 2), act)
        activation = SwigluV1(gate_up=projection.out, out=gated)
        first: tuple[str, Any] = ("rms_norm", norm) if front == "norm" else ("residual_add+rms_norm", CompositeArgs(added))
        apart = {
            "projection": ("linear", projection.args, projection.out),
            "gated": ("gated", CompositeArgs((projection.args, activation)), gated),
        }
        for product, (name, args, out) in apart.items():
            whole = CompositeArgs((*added, *getattr(args, "parts", (args,))))
            normed, alone = launch_of(device, *first, limits(rows)), launch_of(device, name, args, limits(rows))
            together = launch_of(device, f"{front}_and_{product}", whole, limits(rows))
            for n in (1, 9, 64, 65, 128, 129, 256, 257):
                found = []
                for launches in ((normed, alone), (together,)):
                    device.load(stream, to_host(x, act))
                    device.fill_bytes(projection.x, 0xFF)
                    device.fill_bytes(out, 0xFF)
                    for launch in launches:
                        launch(device.stream, n)
                    found.append([device.read(one.pointer, one.shape, act).view(np.uint16) for one in (stream, out)])
                for wanted, got in zip(*found, strict=True):
                    assert np.array_equal(got, wanted), (product, n, np.argwhere(got != wanted)[:4].tolist())
                stored = device.read(projection.x.pointer, projection.x.shape, act).view(np.uint16)
                assert (stored == 0xFFFF).all(), "norms are not stored"


@pytest.mark.parametrize("packing", ["fp8-channel", "fp8-channel-a8", "fp8-block128-a8", "int4-group64"])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_packed_head_leaves_the_choice(packing: str, invariant: bool):
    with opened(invariant=invariant) as device:
        leaves_the_choice(device, packing)


def leaves_the_choice(opened: CudaDevice, packing: str) -> None:
    vocab, rows = 4 * 128 * opened.num_sms + 16, 257
    projection = Projection(opened, random_weight(PACKINGS[packing], vocab, 256), to_f32=True, rows=rows)
    tokens, row_slot = (opened.empty(name, (rows,), "i32") for name in ("tokens", "row_slot"))
    opened.load(row_slot, np.where(np.arange(rows) % 7 == 3, -1, 0).astype(np.int32))
    process = ProcessLogitsV1(logits=projection.out, row_slot=row_slot, num_valid=vocab)
    choice = ArgmaxV1(logits=projection.out, row_slot=row_slot, tokens=tokens)
    apart = launch_of(opened, "argmax", choice, limits(rows))
    together = launch_of(opened, "chosen", CompositeArgs((projection.args, process, choice)), limits(rows))

    def chosen(n: int, *, joined: bool) -> Array:
        opened.fill_bytes(tokens, 0x55)
        if joined:
            together(opened.stream, n)
        else:
            projection.launch(opened.stream, n)
            apart(opened.stream, n)
        return opened.read(tokens.pointer, tokens.shape, "i32")[:n].copy()

    for n in (1, 8, 9, 33, 65, 128, 129, 256, 257):
        wanted = chosen(n, joined=False)
        projection.holds(n)
        assert np.array_equal(chosen(n, joined=True), wanted), n
        assert (wanted[np.arange(n) % 7 != 3] >= 0).all()


@pytest.mark.parametrize("packing", ["fp8-channel", "fp8-channel-a8"])
def test_what_is_no_number_spoils_the_output_it_belongs_to_and_the_row_it_is_in(packing: str):
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions("bf16"))
    value = random_weight(PACKINGS[packing], 200, 256)
    value.numbers[77, 130] = 0x7F
    projection = Projection(device, value, rows=9)
    x = from_host(device.read(projection.x.pointer, (9, 256), "bf16"), "bf16").astype(np.float32).copy()
    x[3, 9], x[5, 200] = np.nan, np.inf
    device.load(projection.x, to_host(x, "bf16"))
    found = projection.run(9)
    ordinary = np.array([row for row in range(9) if row not in (3, 5)])
    assert np.isnan(found[:, 77]).all()
    assert np.isnan(found[3]).all()
    assert not np.isfinite(found[5]).any()
    kept = np.delete(np.arange(200), 77)
    assert (np.abs(found - projection.wanted) <= projection.allowed)[np.ix_(ordinary, kept)].all()
    device.close()


@pytest.mark.parametrize("act", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("packing", [name for name in TAKEN if PACKINGS[name].activations])
@pytest.mark.parametrize("inputs", [128, 1024, 11008, 16512, 300])
def test_rows_are_rounded_to_the_bit(packing: str, act: str, inputs: int):
    device, kind = polydraft_cuda.polydraft_open_device("", DeviceOptions(act)), PACKINGS[packing]
    rng, rows = np.random.default_rng(inputs), 9
    x = (rng.standard_normal((rows, inputs)) * 2.0 ** rng.integers(-12, 8, (rows, inputs))).astype(np.float32)
    x[1], x[2], x[3, 7], x[4, 100] = 0, 1e-30, np.nan, -np.inf
    x[5] = np.round(x[5] * 8) / 8  # ties
    seen = from_host(to_host(x, act), act).astype(np.float32)
    buffer = filled(device, "x", x, act)
    for to_f32 in (False, True):
        weight = polydraft_cuda.polydraft_kernels(device).prepare_weight("linear", random_weight(kind, 8, inputs), act)
        out = device.empty("out", (rows, 8), "f32" if to_f32 else act)
        a = LinearV1(x=buffer, weight=weight, bias=None, out=out)
        scratch = device.zeros("scratch", (packed.rounded_bytes(a),), "u8")
        to = packed.place_rounded(a, scratch.pointer)
        assert to.scales is not None
        packed.round_rows(device, a, to)(device.stream, rows)
        scales = device.read(to.scales.pointer, to.scales.shape, "f32")[:, :rows].T
        stored = device.read(to.x.pointer, to.x.shape, to.x.dtype)
        assert to.x.dtype == ("u8" if packed.is_eight(a) else act)
        numbers = E4M3[stored] if packed.is_eight(a) else from_host(stored, act)
        spread = np.repeat(scales, kind.columns or inputs, axis=1)[:, :inputs]
        with np.errstate(invalid="ignore"):
            wanted = rounded(seen, kind)
        assert np.array_equal(numbers.astype(np.float64) * spread, wanted, equal_nan=True)
    device.close()


def test_an_update_keeps_the_address_and_takes_the_new_numbers():
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions("bf16"))
    kind, table = PACKINGS["fp8-channel"], polydraft_cuda.polydraft_kernels(device)
    projection = Projection(device, random_weight(kind, 256, 256), rows=8)
    other = Projection(device, pack(np.random.default_rng(1).standard_normal((256, 256), np.float32), kind), rows=8)
    refilled = table.prepare_weight("linear", other.value, "bf16", previous=projection.weight)
    assert refilled is projection.weight
    assert np.array_equal(projection.run(8), other.run(8))
    device.close()


@pytest.mark.parametrize("packing", ["fp8-channel", "fp8-channel-a8"])
def test_rows_that_overlap_in_memory_are_spread_out(packing: str):
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions("bf16"))
    kind = PACKINGS[packing]
    pool = np.random.default_rng(5).integers(0, 120, 61 * 256 + 512).astype(np.uint8)
    numbers = np.lib.stride_tricks.as_strided(pool, (256, 512), (61, 1), writeable=False)
    Projection(device, PackedWeight(kind, (256, 512), numbers, np.full((256, 1), 1e-3, np.float32)), rows=8).holds(8)
    device.close()


# -- experts ------------------------------------------------------------------------------------------
SIZES = ((256, 128, 5, 2), (1088, 192, 13, 5), (320, 96, 4, 3), (192, 64, 512, 2))
"""Hidden features, those of an expert, experts, experts of a row: whole pairs of chunks, halves of pairs, a first product in
pieces for plain kernels, since the second is none for tiles, and as many experts as a list has room for."""


def experts_case(packing: Packing, size: tuple[int, int, int, int], rows: int) -> Case:
    """Random packed experts, with shared ones; some places of some rows have none."""
    (hidden, width, experts, chosen), rng = size, np.random.default_rng(size)
    x, shared = rng.standard_normal((2, rows, hidden), np.float32) * np.float32(2.0) ** rng.integers(-2, 3, (rows, 1))
    ids = np.where(rng.random((rows, chosen)) < 0.1, -1, chosen_ids(rng, rows, experts, chosen))
    gate_up: Any = random_weight(packing, experts, 2 * width, hidden)
    down: Any = random_weight(packing, experts, hidden, width)
    arrays = expert_arrays(x.astype(np.float32), ids, gate_up, down, None, shared.astype(np.float32), None)
    return Case(f"{size} {packing.name}", arrays, {}, rows, {"out": (x.shape, "act")})


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("packing", "act"), [*((one, "bf16") for one in OF_EXPERTS), *((one, "f16") for one in SHAPED)])
def test_packed_experts_in_sizes_of_tiles_are_what_their_contract_says(packing: str, act: str, invariant: bool):
    with opened(act, invariant=invariant) as device:
        table = polydraft_cuda.polydraft_kernels(device)
        for size, rows in itertools.product(SIZES, (1, 2, 19)):
            case = experts_case(PACKINGS[packing], size, rows)
            found = check_kernel(REGISTRY["expert_mlp"], case, device, table, act=act)
            assert found.ok, (rows, found.describe())


class PackedExperts:
    """Packed experts of whole tiles, bound for many rows; `run(rows)` gives what these rows of x get. `broken`: a place of `down`
    that holds no number."""

    def __init__(
        self, device: CudaDevice, packing: str, size: tuple[int, int, int, int], rows: int,
        broken: tuple[int, int, int] | None = None,
    ) -> None:  # fmt: skip
        self.device, self.case = device, experts_case(PACKINGS[packing], size, rows)
        if broken:
            self.case.arrays["down"].numbers[broken] = 0x7F
        arrays, act, table = self.case.arrays, device.dtype, polydraft_cuda.polydraft_kernels(device)
        self.buffers = {
            name: device.empty(name, arrays[name].shape, kind)
            for name, kind in (("x", act), ("shared", act), ("expert_ids", "i32"), ("expert_weights", "f32"))
        }
        stacks: Any = {name: table.prepare_weight("experts", arrays[name], act) for name in ("gate_up", "down")}
        assert all(stack.tiled for stack in stacks.values())
        self.out = device.empty("out", arrays["x"].shape, act)
        self.args = ExpertMlpV1(**self.buffers, **stacks, shared_gate=None, out=self.out)
        self.launch = launch_of(device, "expert_mlp", self.args, limits(rows))

    def run(self, rows: Array) -> Array:
        self.device.fill_bytes(self.out, 0xFF)
        for name, buffer in self.buffers.items():
            value = self.case.arrays[name]
            turned = np.concatenate([value[rows], np.delete(value, rows, 0)])
            self.device.load(buffer, turned if buffer.dtype == "i32" else to_host(turned, buffer.dtype))
        self.launch(self.device.stream, len(rows))
        found = from_host(self.device.read(self.out.pointer, self.out.shape, self.device.dtype), self.device.dtype)
        assert np.isnan(found[len(rows) :]).all(), "nothing behind the launch length is written"
        return found[: len(rows)]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("packing", OF_EXPERTS)
def test_a_row_of_packed_experts_is_the_same_in_every_launch(packing: str, invariant: bool):
    """So tiles of every number of rows are as right as those that the contract was compared with."""
    with opened(invariant=invariant) as device:
        experts = PackedExperts(device, packing, SIZES[1], 700)
        every = experts.run(np.arange(700))
        for n in (1, 2, 9, 10, 11, 20, 21, 41, 42, 82, 83, 166, 333, 500):
            rows = np.random.default_rng(n).permutation(700)[:n]
            assert np.array_equal(experts.run(rows), every[rows]), n
        many = PackedExperts(device, packing, (128, 64, 2, 1), 700)
        every = many.run(np.arange(700))
        assert np.array_equal(many.run(np.arange(1)), every[:1]), "more rows of one expert than a tile has"
        assert np.array_equal(many.run(np.arange(31)), every[:31])


@pytest.mark.parametrize(("packing", "height"), [("fp8-channel", 1), ("fp8-block128", 128)])
def test_what_is_no_number_spoils_its_outputs_of_the_rows_of_its_expert(packing: str, height: int):
    size, place = (320, 192, 5, 2), (2, 300, 130)
    with opened() as device:
        whole, broken = PackedExperts(device, packing, size, 19), PackedExperts(device, packing, size, 19, place)
        wanted, found = (one.run(np.arange(19)) for one in (whole, broken))
    spoilt = np.zeros(found.shape, bool)
    spoilt[(whole.case.arrays["expert_ids"] == 2).any(axis=1), 300 // height * height : (300 // height + 1) * height] = True
    assert spoilt.any()
    assert np.array_equal(np.isnan(found), spoilt)
    assert np.array_equal(found[~spoilt], wanted[~spoilt])


def test_experts_of_a_large_model_are_laid_out_from_rows_that_overlap():
    hidden, width, experts, chosen, rows = 4096, 1408, 128, 8, 67
    rng, kind = np.random.default_rng(8), PACKINGS["fp8-channel"]

    def stack(outputs: int, inputs: int) -> PackedWeight:
        pool = rng.integers(0, 256, 1021 * (experts - 1) + 61 * (outputs - 1) + inputs, np.uint8)
        pool[pool & 127 == 127] = 5
        numbers = np.lib.stride_tricks.as_strided(pool, (experts, outputs, inputs), (1021, 61, 1), writeable=False)
        scales = rng.uniform(0.25, 4, (experts, outputs, 1)).astype(np.float32) / np.float32(100 * np.sqrt(inputs))
        return PackedWeight(kind, (experts, outputs, inputs), numbers, scales)

    with opened() as device:
        table, values = polydraft_cuda.polydraft_kernels(device), (stack(2 * width, hidden), stack(hidden, width))
        stacks: list[Any] = [table.prepare_weight("experts", value, "bf16") for value in values]
        x, ids = rng.standard_normal((rows, hidden), np.float32), chosen_ids(rng, rows, experts, chosen)
        args = ExpertMlpV1(
            x=filled(device, "x", x, "bf16"), expert_ids=device.empty("ids", ids.shape, "i32"), gate_up=stacks[0],
            expert_weights=filled(device, "weights", np.full(ids.shape, 0.125, np.float32), "f32"), down=stacks[1],
            shared=None, shared_gate=None, out=device.empty("out", x.shape, "bf16"),
        )  # fmt: skip
        device.load(args.expert_ids, ids.astype(np.int32))
        launch = launch_of(device, "expert_mlp", args, limits(rows))
        x = from_host(to_host(x, "bf16"), "bf16").astype(np.float32)
        for n in (1, 8, 67):
            launch(device.stream, n)
            found = from_host(device.read(args.out.pointer, args.out.shape, "bf16"), "bf16")
            for r in {0, n - 1}:
                wanted, size = np.zeros(hidden, np.float32), np.zeros(hidden, np.float32)
                for expert in ids[r]:
                    gate, up = np.split(values[0][int(expert)].read() @ x[r], 2)
                    term = values[1][int(expert)].read() @ (gate / (1 + np.exp(-gate)) * up)
                    wanted, size = wanted + term / 8, size + np.abs(term) / 8
                assert (np.abs(found[r] - wanted) <= 4 * EPS["bf16"] * np.maximum(size, size.mean())).all(), (n, r)


@pytest.fixture(scope="module")
def wide_experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random tiny model with experts whose sizes tiles take."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 192, "head_dim": 64, "intermediate_size": 384}
    config = {**make_checkpoint.FAMILIES["glm4-moe"], **sizes}
    drawn = make_checkpoint.draw(tensor_shapes(config), config, np.random.default_rng(4), embedding_first=True)
    return str(make_checkpoint.write(tmp_path_factory.mktemp("wide") / "experts", config, drawn))


def of_experts(model: str, backend: str, drafts: int, **options: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    llm = LLM(model=model, backend=backend, draft_tokens=drafts, **{"max_num_seqs": 4, "weights": "fp8", **options})
    with closing(llm):
        prompts = [[5, 9, 11, 4], [7] * 9, [3, 8, 3, 8], list(range(1, 40))]
        return [tuple(one.token_ids) for one in llm.generate(prompts, params)]


@pytest.mark.parametrize("weights", ["fp8", "fp8-a8", "int8", "int4"])
def test_texts_of_packed_experts_are_those_of_the_reference(wide_experts: str, weights: str):
    own = {"dtype": "f32", "weights": weights}
    wanted = of_experts(wide_experts, "reference", 0, **own)
    for drafts, graph in itertools.product((0, 3), ("off", "decode")):
        assert of_experts(wide_experts, "cuda", drafts, graph=graph, **own) == wanted, (drafts, graph)


@pytest.mark.parametrize("weights", ["fp8", "fp8-a8", "int8", "int4"])
def test_texts_of_packed_experts_by_tiles_do_not_depend_on_drafts(wide_experts: str, weights: str):
    own: dict[str, Any] = {"dtype": "bf16", "weights": weights}
    wanted = of_experts(wide_experts, "cuda", 0, invariant=True, **own)
    for drafts, graph in itertools.product((0, 3), ("off", "decode")):
        assert of_experts(wide_experts, "cuda", drafts, graph=graph, invariant=True, **own) == wanted, (drafts, graph)
        joined = of_experts(wide_experts, "cuda", drafts, graph=graph, **own)  # texts may part where logits tie
        assert sum(one == other for one, other in zip(joined, wanted, strict=True)) >= 3, (drafts, graph)


PUBLISHED_EXPERTS = ("fp8-block", "awq", "gptq")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A random tiny Qwen3-MoE whose sizes tiles take, in published layouts."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64, "intermediate_size": 384}
    config = {**make_checkpoint.FAMILIES["qwen3-moe"], **sizes}
    drawn = make_checkpoint.draw(tensor_shapes(config), config, np.random.default_rng(5), embedding_first=True)
    found, root = {}, tmp_path_factory.mktemp("published")
    for name in PUBLISHED_EXPERTS:
        stored, packed_config, _ = published_packings.packed(drawn, config, published_packings.PUBLISHED[name])
        found[name] = str(make_checkpoint.write(root / name, packed_config, stored))
    return found


@pytest.mark.parametrize("layout", PUBLISHED_EXPERTS)
def test_published_experts_stay_in_their_bits_and_write_one_text(
    published: dict[str, str], layout: str, caplog: pytest.LogCaptureFixture
):
    def found(backend: str, drafts: int, **options: Any) -> list[tuple[int, ...]]:
        proposer = {"proposer": "ngram"} if drafts else {}  # the family has no head of its own
        return of_experts(published[layout], backend, drafts, weights="auto", **proposer, **options)

    wanted, invariant = found("reference", 0, dtype="f32"), found("cuda", 0, dtype="bf16", invariant=True)
    for drafts, graph in itertools.product((0, 3), ("off", "decode")):
        assert found("cuda", drafts, graph=graph, dtype="f32") == wanted, (drafts, graph)
        assert found("cuda", drafts, graph=graph, dtype="bf16", invariant=True) == invariant, (drafts, graph)
        joined = found("cuda", drafts, graph=graph, dtype="bf16")  # texts may part where logits tie
        assert sum(one == other for one, other in zip(joined, invariant, strict=True)) >= 3, (drafts, graph)
    assert caplog.messages == [], "nothing is dequantised"


# -- engines ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
def test_an_engine_writes_the_texts_of_the_reference_with_and_without_drafts(weights: str):
    wanted = [ids for ids, _ in texts("reference", 0, prompts=PROMPTS[:3], weights=weights)]
    for drafts, graph in itertools.product((0, 3), ("off", "decode")):
        found = [ids for ids, _ in texts("cuda", drafts, prompts=PROMPTS[:3], weights=weights, graph=graph)]
        assert found == wanted, (drafts, graph)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_invariant_texts_do_not_depend_on_drafts(weights: str):
    own: dict[str, Any] = {"dtype": "bf16", "invariant": True, "weights": weights}
    found = [[ids for ids, _ in texts("cuda", drafts, **own)] for drafts in (0, 1, 3)]
    assert found[1:] == found[:1] * 2
