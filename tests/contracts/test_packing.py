"""Packed weights: the definition by hand and in fractions, and the reference's own arithmetic against it."""

from __future__ import annotations

import itertools
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft.contracts.kernels import expert_mlp as experts
from polydraft.contracts.kernels.linear import golden
from polydraft.contracts.packing import (
    E4M3,
    LARGEST,
    MADE,
    PACKINGS,
    PackedWeight,
    Packing,
    e4m3_bits,
    moves,
    multiplied,
    pack,
    rounded,
)
from polydraft.errors import ContractError
from polydraft.reference.packed_weights import rounding, unpacked

each_packing = pytest.mark.parametrize("packing", PACKINGS.values(), ids=list(PACKINGS))
GROUPED = Packing("int4", 1, 32)


def matrix(outputs: int = 150, inputs: int = 300) -> Any:
    """Weights whose magnitudes differ from place to place."""
    rng = np.random.default_rng(4)
    return (rng.standard_normal((outputs, inputs)) * np.exp2(rng.integers(-4, 4, (outputs, inputs)))).astype(np.float32)


def test_int4_by_hand():
    """The even column is in the low half of a byte, 8 stands for 0, and the second group has a scale of its own."""
    numbers = np.full((1, 17), 0x88, np.uint8)
    numbers[0, 0], numbers[0, 15], numbers[0, 16] = 0x1F, 0x9A, 0xE0
    weight = PackedWeight(GROUPED, (1, 34), numbers, np.array([[0.5, 4.0]], np.float32))
    assert {i: v for i, v in enumerate(weight.read()[0].tolist()) if v} == {
        0: 3.5,
        1: -3.5,
        30: 1.0,
        31: 0.5,
        32: -32.0,
        33: 24.0,
    }


def test_zero_points_by_hand():
    zeros = PackedWeight(PACKINGS["int4-group32-zeros"], (1, 33), np.full((1, 17), 0x53, np.uint8),
                         np.array([[2.0, 0.25]], np.float32), np.array([[0, 15]], np.uint8))  # fmt: skip
    assert zeros.read()[0, :3].tolist() == [6.0, 10.0, 6.0]
    assert zeros.read()[0, 32] == -3.0


def test_blocks_by_hand():
    """Each block of 128 x 128 has a scale; the last ones are smaller."""
    numbers = np.full((130, 129), 0x38, np.uint8)  # 1.0
    scales = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    read = PackedWeight(PACKINGS["fp8-block128"], (130, 129), numbers, scales).read()
    assert [read[0, 0], read[127, 128], read[128, 127], read[129, 128]] == [1.0, 2.0, 3.0, 4.0]


@each_packing
def test_a_stack_is_its_matrices(packing: Packing):
    """Packed one by one, read one by one, and of the shapes and bytes that a packing says."""
    matrices = np.stack([matrix(), -2 * matrix(), matrix()[::-1]])
    packed = pack(matrices, packing)
    assert (packed.shape, len(packed), packed.ndim) == ((3, 150, 300), 3, 3)
    assert packed.scales.shape == packing.scales_of(packed.shape) == (3, *packing.scales_of((150, 300)))
    assert packing.nbytes(packed.shape) == 3 * packing.nbytes((150, 300))
    for one, value in zip(packed, matrices, strict=True):
        np.testing.assert_array_equal(one.read(), pack(np.ascontiguousarray(value), packing).read())
    np.testing.assert_array_equal(packed.read(), np.stack([one.read() for one in packed]))
    np.testing.assert_allclose(unpacked(packed), packed.read(np.float64), rtol=1e-7)


def test_the_golden_of_experts_rounds_in_front_of_both_products():
    """x = [127, 1.4] becomes [127, 1]. Gates 128 and 100 times 2 and 127 are [256, 12700], in steps of 100 [300, 12700]."""
    packing = PACKINGS["int8-channel-a8"]
    numbers = np.array([[[1, 1], [0, 100], [0, 2], [1, 0]]], np.int8)
    gate_up = PackedWeight(packing, (1, 4, 2), numbers, np.ones((1, 4, 1), np.float32))
    down = PackedWeight(packing, (1, 2, 2), np.array([[[1, 0], [0, 1]]], np.int8), np.array([[[0.5], [1.0]]], np.float32))
    a = SimpleNamespace(x=np.array([[127.0, 1.4]]), expert_ids=np.array([[0]]), expert_weights=np.array([[2.0]]), gate_up=gate_up,
                        down=down, shared=None, shared_gate=None, out=np.zeros((1, 2)))  # fmt: skip
    experts.golden(a, 1)
    np.testing.assert_array_equal(a.out, [[2 * 0.5 * 300, 2 * 12700]])


def test_how_far_a_rounded_number_moves():
    """Nothing far from a border, a step beside one; of E4M3 a step is an eighth of the power of two below."""
    int8, fp8 = PACKINGS["int8-channel-a8"], PACKINGS["fp8-channel-a8"]
    x = np.array([[127.0, 10.4, 10.49, -10.51, 0.0]])
    np.testing.assert_array_equal(moves(x, np.full(x.shape, 0.02), int8), [[0, 0, 1, 1, 0]])
    np.testing.assert_array_equal(moves(np.array([[448.0, 17.01, 30.0]]), np.full((1, 3), 0.02), fp8), [[0, 2, 0]])
    assert np.isnan(moves(np.array([[np.nan, 1.0]]), np.zeros((1, 2)), int8)).all()


def test_the_golden_multiplies_what_weights_and_activations_stand_for():
    """x = [127, 1] at scale 1, and [-63.5, 1] at scale 0.5: the halfway 1 / 0.5 is exact, and -63.5 / 0.5 is -127."""
    weight = PackedWeight(PACKINGS["int8-channel-a8"], (1, 2), np.array([[3, -100]], np.int8), np.array([[0.5]], np.float32))
    x = np.array([[127.0, 1.4], [-63.5, 1.1], [0.0, 0.0], [np.nan, 1.0]])
    a = type("A", (), {"x": x, "weight": weight, "bias": np.array([10.0]), "out": np.zeros((4, 1))})()
    golden(a, 4)
    np.testing.assert_array_equal(a.out[:, 0], [127 * 1.5 - 50 + 10, -63.5 * 1.5 - 50 * 1 + 10, 10.0, np.nan])


def test_groups_of_int4_and_of_its_rows_by_hand():
    """Each 32 inputs of a row have a scale of their own and become int8: [127, 1.4] is [127, 1], and of the second group, whose
    scale is 2, 5 lies halfway between 4 and 6 and becomes the even multiple."""
    numbers = np.full((1, 17), 0x88, np.uint8)
    numbers[0, 0], numbers[0, 16] = 0x3F, 0x79
    weight = PackedWeight(PACKINGS["int4-group32-a8"], (1, 34), numbers, np.array([[0.5, 4.0]], np.float32))
    x = np.zeros((1, 34))
    x[0, :2], x[0, 32:] = (127.0, 1.4), (254.0, 5.0)
    a = SimpleNamespace(x=x, weight=weight, bias=None, out=np.zeros((1, 1)))
    golden(a, 1)
    np.testing.assert_array_equal(a.out[0], [0.5 * (7 * 127 - 5 * 1) + 4 * (1 * 254 - 1 * 4)])


def test_e4m3_is_every_byte_and_the_nearest():
    codes = np.flatnonzero(np.isfinite(E4M3))
    assert e4m3_bits(E4M3[codes]).tolist() == codes.tolist()
    numbers = sorted({Fraction(float(v)): int(c) for c, v in zip(codes, E4M3[codes], strict=True) if c < 127}.items())
    rng = np.random.default_rng(7)
    halves = [float(a + b) / 2 for (a, _), (b, _) in itertools.pairwise(numbers)]
    for value in [*halves, *np.exp2(rng.uniform(-12, 9.5, 300)).tolist()]:
        exact = Fraction(float(np.float32(value)))
        wanted = min(numbers, key=lambda one: (abs(one[0] - exact), one[1] % 2))[1]
        assert e4m3_bits(np.array([value, -value], np.float32)).tolist() == [wanted, wanted | 128]


@each_packing
def test_numbers_are_the_nearest(packing: Packing):
    weight, wanted = pack(matrix(), packing), matrix()
    read, scale = weight.read(np.float64), weight._spread(weight.scales)
    if packing.number == "fp8":
        assert (np.abs(read - wanted) <= np.maximum(np.abs(wanted) / 16, scale * 2.0**-10) * 1.001).all()
    elif packing.number == "int8" or packing.zeros:
        assert (np.abs(read - wanted) <= 0.51 * scale * (2 if packing.zeros else 1)).all()
    else:
        inside = np.abs(wanted) <= 7.5 * scale
        assert (np.abs(read - wanted)[inside] <= 0.501 * np.broadcast_to(scale, read.shape)[inside]).all()
        assert inside.mean() > 0.98


@each_packing
def test_the_references_arithmetic_is_the_definitions(packing: Packing):
    weight = pack(matrix(), packing)
    np.testing.assert_allclose(unpacked(weight), weight.read(np.float64), rtol=1e-7)
    assert unpacked(weight).flags.c_contiguous, "products of rows that lie otherwise are summed in another order"
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((40, 300)) * np.exp2(rng.integers(-110, 100, (40, 1)))).astype(np.float32)
    x[3], x[5, 200], x[6, 10] = 0.0, np.nan, np.inf
    np.testing.assert_array_equal(rounding(packing)(x.copy()), rounded(x, packing).astype(np.float32))


def test_rounding_is_a_rows_own():
    """Rows of other magnitudes change nothing, and a row is rounded to its own 127 or 448 steps."""
    x = matrix(6, 300)
    x[2] *= 1e6
    for name in ("int8-channel-a8", "int4-group32-a8", "fp8-channel-a8", "fp8-block128-a8"):
        packing = PACKINGS[name]
        whole = rounded(x, packing)
        for row in range(6):
            np.testing.assert_array_equal(rounded(x[row : row + 1], packing)[0], whole[row])
        grain = np.abs(x).max(axis=1, keepdims=True) / (254 if packing.rounded_to == "int8" else 28)
        assert (np.abs(whole - x) <= grain * 1.001).all()
        assert np.abs(whole - x).max() > 0
    assert multiplied(x, x)[0] is x


def test_other_forms_are_refused():
    numbers, scales = np.zeros((4, 16), np.uint8), np.ones((4, 1), np.float32)
    PackedWeight(GROUPED, (4, 32), numbers, scales)
    for wrong in (
        {"numbers": numbers[:, :15]}, {"numbers": numbers.astype(np.int8)}, {"scales": scales.astype(np.float64)},
        {"scales": np.ones((4, 2), np.float32)}, {"packing": PACKINGS["int4-group32-zeros"]},
    ):  # fmt: skip
        given: dict[str, Any] = {"packing": GROUPED, "shape": (4, 32), "numbers": numbers, "scales": scales, **wrong}
        with pytest.raises(ContractError, match=r"packed as int4-group32(-zeros)?: got (numbers|scales|zeros) .*, wanted"):
            PackedWeight(**given)


def test_names_are_those_of_the_packings():
    assert {one.name for one in PACKINGS.values()} == set(PACKINGS)
    assert {one.packing.number for one in MADE.values()} == set(LARGEST)
    assert all(
        one.packing.number == made.partition("-")[0] and one.packing.activations == made.endswith("-a8")
        for made, one in MADE.items()
    )
