"""Packed weights of the CUDA backend without a GPU: how numbers lie in pieces and are widened, and what is bound to them.

The layout and the widening are done here as `kernels/packed.cuh` and `packed.cu` do them, thread by thread, and what the lanes of
a warp hold is compared with where the instruction set wants the first operand of a product."""

import itertools
from typing import Any

import numpy as np
import pytest

from polydraft.contracts.compare import from_host
from polydraft.contracts.packing import PACKINGS, PackedWeight, Packing, pack
from polydraft.device import Array
from polydraft.errors import ContractError
from polydraft_cuda.kernels import packed
from tests.device.paper import SHAPES, PaperDevice, bind_packed, parameters

WHOLE, TIMES, EXPONENT = {"bf16": 0x4300, "f16": 0x6400}, {"bf16": 0x7B80, "f16": 0x5C00}, {"bf16": 4, "f16": 1}


def input_of(number: str, lane: int, word: int, at: int) -> int:
    """`input_of` of packed.cuh."""
    t = lane & 3
    if number == "int4":
        return word * 32 + (at >> 1 & 1) * 16 + (at & 1) * 8 + t * 2 + (at >> 2)
    return word * 16 + (at & 1) * 8 + t * 2 + (at >> 1)


def laid_out(value: PackedWeight) -> Array:
    """Words of pieces [runs of 8 outputs, chunks, 32 lanes, words], as `lay_out` makes them."""
    (outputs, inputs), number = value.shape, value.packing.number
    bits, words = (4, 2) if number == "int4" else (8, 4)
    source = value.numbers.view(np.uint8).astype(np.uint32)
    made = np.zeros((outputs // 8, inputs // 64, 32, words), np.uint32)
    for lane, word, at in itertools.product(range(32), range(words), range(32 // bits)):
        columns = np.arange(inputs // 64) * 64 + input_of(number, lane, word, at)
        rows = np.arange(outputs // 8) * 8 + (lane >> 2)
        found = (
            source[rows][:, columns >> 1] >> ((columns & 1) * 4).astype(np.uint32) & 15 if bits == 4 else source[rows][:, columns]
        )
        made[:, :, lane, word] |= found.astype(np.uint32) << np.uint32(at * bits)
    return made


def floats(bits: Array, act: str) -> Array:
    return np.asarray(
        from_host(bits.astype(np.uint16), "bf16") if act == "bf16" else bits.astype(np.uint16).view(np.float16), np.float32
    )


def both(pairs: Array, act: str) -> Array:
    """The two numbers of each register."""
    return np.stack([floats(pairs & 0xFFFF, act), floats(pairs >> 16, act)], axis=-1)


def widen_two(number: str, act: str, odd: int, word: Array) -> Array:
    """`widen_two` of packed.cuh."""
    mask = np.uint32(0xFFFFFFFF)
    if number == "fp8":
        high = word if odd else word << np.uint32(8) & mask
        pair = (high & 0x7F007F00) >> EXPONENT[act] | (high & 0x80008000)
        return both(pair, act) * floats(np.array(TIMES[act]), act)
    low, whole = (word >> np.uint32(8) if odd else word), WHOLE[act] * 0x10001
    if act == "bf16":
        return both((low & 0x007F007F) | whole, act) - both((low & 0x00800080) | whole, act)
    return both(((low & 0x00FF00FF) ^ 0x00800080) | whole, act) - both(np.array(whole + 0x00800080), act)


def operands(value: PackedWeight, act: str) -> Array:
    """Registers of a warp [pairs of runs, chunks, 32 lanes, 16 registers, 2], as `widen` makes them."""
    number, words = value.packing.number, laid_out(value)
    outputs, inputs = value.shape
    a = np.zeros((outputs // 16, inputs // 64, 32, 16, 2), np.float32)
    for half in range(2):
        mine = words[half::2]
        if number == "int4":
            zeros = value.zeros if value.zeros is not None else np.full(value.packing.scales_of(value.shape), 8, np.uint8)
            every = np.repeat(zeros, value.packing.columns or inputs, axis=1)
            for at, lane in itertools.product(range(8), range(32)):
                rows = np.arange(outputs // 16) * 16 + half * 8 + (lane >> 2)
                middle = every[rows][:, np.arange(inputs // 64) * 64 + at // 4 * 32]
                pairs = (mine[:, :, lane, at // 4] >> at % 4 * 4 & 0x000F000F) | WHOLE[act] * 0x10001
                less = both(WHOLE[act] * 0x10001 + middle.astype(np.uint32) * 0x10001, act)
                a[:, :, lane, at // 2 * 4 + at % 2 * 2 + half] = both(pairs, act) - less
        else:
            for k in range(4):
                a[:, :, :, k * 4 + half] = widen_two(number, act, 0, mine[..., k])
                a[:, :, :, k * 4 + 2 + half] = widen_two(number, act, 1, mine[..., k])
    return a


def multiplied(a: Array) -> Array:
    """The matrix whose products these registers are: register 4k + r of lane (g, t) has row g + 8 (r & 1) and columns
    16 k + 8 (r >> 1) + 2t and the next (PTX, first operand of `wgmma` and of `mma.m16n8k16`)."""
    tiles, chunks = a.shape[:2]
    matrix = np.full((tiles, 16, chunks, 64), np.nan, np.float32)
    for lane, k, r, odd in itertools.product(range(32), range(4), range(4), range(2)):
        g, t = lane >> 2, lane & 3
        matrix[:, g + 8 * (r & 1), :, 16 * k + 8 * (r >> 1) + 2 * t + odd] = a[:, :, lane, 4 * k + r, odd]
    return matrix.reshape(tiles * 16, chunks * 64)


@pytest.mark.parametrize("act", ["bf16", "f16"])
@pytest.mark.parametrize("packing", ["fp8-channel", "int8-channel", "int4-channel", "int4-group32-zeros", "int4-group128"])
def test_lanes_hold_every_number_where_a_product_wants_it(packing: str, act: str):
    rng, kind = np.random.default_rng(3), PACKINGS[packing]
    value = pack(rng.standard_normal((32, 256), np.float32), kind)
    if kind.number != "int4":  # every number that there is
        every = np.array([byte for byte in range(256) if kind.number == "int8" or byte & 127 != 127])
        value.numbers[...] = np.resize(rng.permutation(every), value.numbers.shape).astype(np.uint8).view(value.numbers.dtype)
        assert len(np.unique(value.numbers)) == len(every)
    assert np.array_equal(multiplied(operands(value, act)), value.signed())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("act", ["f32", "bf16"])
def test_a_kernel_gets_the_arguments_that_it_declares(packing: str, act: str):
    for one in bind_packed(SHAPES[0], act, packing):
        declared = parameters(one.source, one.name)
        assert len(declared) == len(one.arguments), (one.name, declared, one.arguments)


def test_a_block_has_shared_memory_for_what_it_has_in_flight():
    for packing, invariant in itertools.product(PACKINGS, (False, True)):
        bound = bind_packed(SHAPES[0], "bf16", packing, row_invariant=invariant)
        tiles = [one for one in bound if one.name == "linear_tile" and one.defines["NUMBER"]]
        assert tiles
        for one in tiles:
            tokens, stages = one.defines["TOKENS"], one.defines["STAGES"]
            eight = one.defines["EIGHT"]
            assert eight == ("fp8" in packing and "a8" in packing and not one.defines["OUT_F32"])
            width, grouped = (128 if eight else 32 if "int4" in packing else 64), PACKINGS[packing].columns
            assert 2 <= stages <= 16
            assert stages * (128 * width + tokens * 128) + 1024 == one.shared <= 232448 - 1024
            assert tokens <= (128 if grouped else 256)
            crowded = tokens >= (128 if grouped or eight else 256)
            assert one.threads == (384 if crowded else 288)


def prepared(device: Any, value: PackedWeight, previous: Any = None) -> Any:
    return packed.prepare(device, "linear", value, device.dtype, previous)


def test_an_update_takes_the_same_packing_at_the_same_address_and_no_other():
    device: Any = PaperDevice()
    first, second = (
        pack(np.random.default_rng(seed).standard_normal((24, 128), np.float32), PACKINGS["fp8-channel"]) for seed in (1, 2)
    )
    weight = prepared(device, first)
    assert prepared(device, second, weight) is weight
    with pytest.raises(ContractError, match=r"got int8-channel of shape \(24, 128\), wanted .* in the same packing"):
        prepared(device, pack(np.ones((24, 128), np.float32), PACKINGS["int8-channel"]), weight)


def test_only_what_products_take_is_laid_out():
    kind: Packing = PACKINGS["fp8-channel"]
    for (outputs, inputs), act, arch, tiled in (
        ((20, 256), "bf16", "sm_90", True), ((20, 192), "bf16", "sm_90", False), ((20, 256), "f32", "sm_90", False),
        ((20, 256), "bf16", "sm_80", False),
    ):  # fmt: skip
        device: Any = PaperDevice(dtype=act, arch=arch)
        weight = prepared(device, pack(np.ones((outputs, inputs), np.float32), kind))
        assert (weight.tiled, weight.eight, weight.numbers.shape) == (tiled, False, (24 if tiled else 20, inputs))
        assert [one.name for one in device.bound] == ["lay_out"] * tiled


def test_where_e4m3_meets_e4m3_only_a_head_has_pieces_beside_its_rows():
    device: Any = PaperDevice()
    value = pack(np.ones((20, 256), np.float32), PACKINGS["fp8-channel-a8"])
    weight = prepared(device, value)
    assert (weight.eight, weight.numbers.shape, weight.pieces, device.bound) == (True, (20, 256), None, [])
    assert weight.in_pieces(device) is weight.in_pieces(device)
    assert (weight.pieces.shape, [one.name for one in device.bound]) == ((24, 256), ["lay_out"])
    prepared(device, value, weight)
    assert [one.name for one in device.bound] == ["lay_out"] * 2, "they are made anew with an update"


def test_rows_that_overlap_travel_as_the_memory_that_they_span():
    pool = np.arange(100, dtype=np.uint8)
    rows = np.lib.stride_tricks.as_strided(pool, (9, 20), (7, 1), writeable=False)
    span, step, pitch = packed._memory(rows)
    assert (span.tolist(), step, pitch) == (list(range(8 * 7 + 20)), 0, 7)
    span, step, pitch = packed._memory(np.ascontiguousarray(rows))
    assert (span.size, step, pitch) == (180, 180, 20)
    stack = np.lib.stride_tricks.as_strided(pool, (3, 9, 20), (11, 7, 1), writeable=False)
    span, step, pitch = packed._memory(stack)
    assert (span.tolist(), step, pitch) == (list(range(2 * 11 + 8 * 7 + 20)), 11, 7)
    span, step, pitch = packed._memory(np.ascontiguousarray(stack))
    assert (span.size, step, pitch) == (540, 180, 20)


@pytest.mark.parametrize(
    ("act", "arch", "laid_out"), [("bf16", "sm_90", True), ("f32", "sm_90", False), ("bf16", "sm_80", False)]
)
def test_a_stack_of_experts_lies_matrix_by_matrix(act: str, arch: str, laid_out: bool):
    device, kind = PaperDevice(dtype=act, arch=arch), PACKINGS["fp8-channel-a8"]
    pool = np.arange(100, dtype=np.uint8)
    numbers = np.lib.stride_tricks.as_strided(np.resize(pool, 2000), (3, 32, 64), (11, 7, 1), writeable=False)
    value = PackedWeight(kind, (3, 32, 64), numbers, np.ones((3, 32, 1), np.float32))
    weight: Any = packed.prepare(device, "experts", value, act)  # type: ignore[arg-type]
    assert (weight.tiled, weight.eight, weight.numbers.shape) == (laid_out, False, (96, 64))
    (made,) = device.bound
    assert made.name == ("lay_out" if laid_out else "spread_bytes")
    assert made.arguments[-3:] == ((32, 11, 7)), "rows of a matrix, bytes from matrix to matrix and from row to row"


@pytest.mark.parametrize("number", ["int8", "int4"])
def test_a_number_is_found_in_pieces_where_it_was_laid(number: str):
    """`number_in_pieces` of packed.cuh."""
    for lane, word, at in itertools.product(range(32), range(2 if number == "int4" else 4), range(8 if number == "int4" else 4)):
        within = input_of(number, lane, word, at)
        assert lane & 3 == within >> 1 & 3
        if number == "int4":
            byte, nibble = (within >> 5) * 4 + (within & 1) * 2 + (within >> 4 & 1), within >> 3 & 1
            assert (byte, nibble) == (word * 4 + at // 2, at % 2)
        else:
            assert (within >> 4) * 4 + (within & 1) * 2 + (within >> 3 & 1) == word * 4 + at
