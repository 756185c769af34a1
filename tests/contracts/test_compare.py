"""The comparison itself: every way in which a result can be wrong has a row here and must fail.

Each row spoils one thing of a right answer; the right answer passes, and so does one at the edge of its tolerance.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

from polydraft.contracts.compare import EPS, Comparison, Expected, Headroom, Mismatch, compare, from_host, share, to_host
from polydraft.device import DTYPES
from tests.contracts import toy

C = 4.0
CASE = toy.case("table", [0, 1], 2)


def expected(value: Any, dtype: str = "f32", *, c: float | None = C, scale: float = 1.0, **more: Any) -> Expected:
    """What a golden left that overwrote everything."""
    value = np.array(value, np.float64 if dtype in EPS else DTYPES[dtype])
    allowed = None if c is None or dtype not in EPS else np.full(value.shape, c * EPS[dtype] * scale)
    return Expected(value, np.full_like(value, 77), dtype, allowed, **more)


def verdict(got: dict[str, Any], want: dict[str, Expected]) -> Comparison:
    return compare(toy.CONTRACT, CASE, got, want)


FLOATS = expected([[1.0, 0.5, np.nan], [np.inf, -np.inf, -1.0]])
INTS = expected([3, -1, 0, 7], "i32")
RIGHT = {"y": to_host(FLOATS.value, "f32"), "ids": to_host(INTS.value, "i32")}
WANT = {"y": FLOATS, "ids": INTS}


def spoiled(name: str, index: Any, value: Any) -> dict[str, Any]:
    array = RIGHT[name].copy()
    array[index] = value
    return {**RIGHT, name: array}


def test_exact_equality_passes_and_counts_every_element():
    result = verdict(RIGHT, WANT)
    assert result.ok
    assert result.elements == 10
    assert result.describe() == "blend/1, case 'table': 10 elements as specified; y[0, 0] used 0% of its tolerance"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(0.0, "0% of"), (0.314, "31% of"), (2.0, "200% of"), (9.99, "999% of"), (10.0, "10 times"), (8384139.46, "8.4e+06 times")],
)
def test_nobody_counts_a_tolerance_in_millions_of_per_cent(ratio: float, words: str):
    assert share(ratio) == words
    assert Headroom(ratio, "out", (2, 0)).describe() == f"out[2, 0] used {words} its tolerance"


def test_what_was_not_written_is_told():
    result = verdict({"ids": np.array([1, 77, 3], np.int32)}, {"ids": expected([1, 2, 4], "i32")})
    assert result.describe() == (
        "blend/1, case 'table': ids[1] is 77, wanted exactly 2 (2 of 3 elements are wrong); it was left as before the launch"
    )
    written = verdict({"ids": np.array([1, 5, 3], np.int32)}, {"ids": expected([1, 2, 3], "i32")})
    assert written.describe() == "blend/1, case 'table': ids[1] is 5, wanted exactly 2"
    assert (result.mismatches[0].left, written.mismatches[0].left) == (True, False)
    want = Expected(np.array([7]), np.array([7]), "i32")
    touched = verdict({"ids": np.array([8], np.int32)}, {"ids": want})
    assert (touched.mismatches[0].kind, touched.mismatches[0].left) == ("touched", False)


def test_zeros_of_either_sign_are_equal():
    want = {"y": expected([0.0, -0.0], c=None)}
    assert verdict({"y": np.array([-0.0, 0.0], np.float32)}, want).ok


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "wrong shape": ({**RIGHT, "y": RIGHT["y"].T.copy()}, "shape"),
    "one axis less": ({**RIGHT, "y": RIGHT["y"].ravel()}, "shape"),
    "one axis more": ({**RIGHT, "ids": RIGHT["ids"][None]}, "shape"),
    "broadcastable row": ({**RIGHT, "y": RIGHT["y"][:1]}, "shape"),
    "broadcastable scalar": ({**RIGHT, "ids": np.array(3, np.int32)}, "shape"),
    "empty": ({**RIGHT, "ids": np.zeros(0, np.int32)}, "shape"),
    "wider dtype": ({**RIGHT, "y": RIGHT["y"].astype(np.float64)}, "dtype"),
    "narrower dtype": ({**RIGHT, "y": RIGHT["y"].astype(np.float16)}, "dtype"),
    "integers of another width": ({**RIGHT, "ids": RIGHT["ids"].astype(np.int64)}, "dtype"),
    "integers of another sign": ({**RIGHT, "ids": RIGHT["ids"].astype(np.uint32)}, "dtype"),
    "floats for integers": ({**RIGHT, "ids": RIGHT["ids"].astype(np.float32)}, "dtype"),
    "list": ({**RIGHT, "ids": [3, -1, 0, 7]}, "type"),
    "missing output": ({"y": RIGHT["y"]}, "missing"),
    "None for an output": ({**RIGHT, "y": None}, "missing"),
    "extra output": ({**RIGHT, "z": RIGHT["y"]}, "extra"),
    "one NaN": (spoiled("y", (0, 1), np.nan), "value"),
    "NaN made a number": (spoiled("y", (0, 2), 0.0), "value"),
    "NaN made an infinity": (spoiled("y", (0, 2), np.inf), "value"),
    "swapped infinities": (spoiled("y", (1, [0, 1]), [-np.inf, np.inf]), "value"),
    "infinity made the largest number": (spoiled("y", (1, 0), np.finfo(np.float32).max), "value"),
    "number made an infinity": (spoiled("y", (0, 0), np.inf), "value"),
    "other sign": (spoiled("y", (1, 2), 1.0), "value"),
    "last integer off by one": (spoiled("ids", 3, 8), "value"),
    "all poison": ({**RIGHT, "ids": np.full(4, 0x5A5A5A5A, np.int32)}, "value"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_fault_is_reported(fault: str):
    got, kind = WRONG[fault]
    result = verdict(got, WANT)
    assert not result.ok
    assert [mismatch.kind for mismatch in result.mismatches] == [kind]
    assert result.describe().startswith("blend/1, case 'table': ")


def test_every_wrong_argument_is_reported():
    result = verdict({"y": RIGHT["y"] + np.float32(1), "z": RIGHT["y"]}, WANT)
    assert [mismatch.argument for mismatch in result.mismatches] == ["y", "ids", "z"]


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_tolerance_is_c_eps_no_more_and_no_less(dtype: str, sign: float):
    want = {"y": expected([1.0, 1.0], dtype)}

    def off_by(eps: float) -> Comparison:
        return verdict({"y": to_host(np.array([1.0, 1.0 + sign * eps * EPS[dtype]]), dtype)}, want)

    inside, edge, outside = off_by(C - 1), off_by(C), off_by(C + 1)
    assert inside.ok
    assert edge.ok
    assert not outside.ok
    assert inside.headroom is not None
    assert inside.headroom.index == (1,)
    assert inside.headroom.ratio == pytest.approx((C - 1) / C)
    assert outside.headroom is not None
    assert outside.headroom.ratio == pytest.approx((C + 1) / C)


def test_headroom_is_that_of_computed_numbers_alone():
    values = np.array([1.0, 2.0, np.inf, 3.0, 0.0])
    allowed = np.array([C, C, C, C, 0.0]) * EPS["f32"]
    want = Expected(values, np.array([9.0, 2.0, 9.0, 9.0, 9.0]), "f32", allowed)
    near = 1 + EPS["f32"]
    # Off by one eps; touched; not infinite; not finite; off where nothing is allowed. Only the first one has a headroom.
    result = verdict({"x": np.array([near, 2.5, 5.0, np.nan, 1.0], np.float32)}, {"x": want})
    assert result.headroom is not None
    assert result.headroom.index == (0,)
    assert result.headroom.ratio == pytest.approx(1 / C)
    assert result.mismatches[0].count == 4


def test_tolerance_follows_its_scale():
    value = {"y": np.array([1.0 + 100 * EPS["f32"]], np.float32)}
    assert not verdict(value, {"y": expected([1.0], scale=1.0)}).ok
    assert verdict(value, {"y": expected([1.0], scale=50.0)}).ok


def test_without_tolerance_one_bit_is_too_much():
    want = {"y": expected([1.0], c=None)}
    assert not verdict({"y": np.nextafter(np.ones(1, np.float32), np.float32(2))}, want).ok


@pytest.mark.parametrize("allowed", [np.nan, np.inf])
def test_broken_tolerance_allows_nothing(allowed: float):
    want = {"y": dataclasses.replace(expected([1.0]), allowed=np.array([allowed]))}
    assert not verdict({"y": np.array([2.0], np.float32)}, want).ok
    assert verdict({"y": np.array([1.0], np.float32)}, want).ok


def test_what_may_not_be_written_has_no_tolerance():
    value, before = np.array([1.0, 2.0]), np.array([1.0, 9.0])
    want = {"x": Expected(value, before, "f32", allowed=np.array([0.5, 0.5]))}
    assert verdict({"x": np.array([1.0, 2.25], np.float32)}, want).ok
    result = verdict({"x": np.array([1.25, 2.0], np.float32)}, want)
    assert [mismatch.kind for mismatch in result.mismatches] == ["touched"]
    assert "x[0] is 1.25, wanted 1 as before the launch (this element may not be written)" in result.describe()


def test_untouched_nan_stays_nan():
    want = {"x": Expected(np.array([np.nan]), np.array([np.nan]), "f32", allowed=np.array([0.5]))}
    assert verdict({"x": np.array([np.nan], np.float32)}, want).ok
    assert not verdict({"x": np.array([0.0], np.float32)}, want).ok


def test_open_elements_may_be_anything_finite():
    want = {"y": dataclasses.replace(expected([1.0, 5.0]), loose=np.array([False, True]))}
    assert verdict({"y": np.array([1.0, 123.0], np.float32)}, want).ok
    result = verdict({"y": np.array([1.0, np.nan], np.float32)}, want)
    assert [mismatch.kind for mismatch in result.mismatches] == ["unspecified"]
    assert not verdict({"y": np.array([1.1, 123.0], np.float32)}, want).ok
    where_inputs_are_not = {"y": dataclasses.replace(want["y"], loose_finite=False)}
    assert verdict({"y": np.array([1.0, np.nan], np.float32)}, where_inputs_are_not).ok


def test_comparing_nothing_is_a_failure():
    assert [mismatch.kind for mismatch in verdict({}, {}).mismatches] == ["nothing"]
    empty = {"y": expected(np.zeros((0, 3)))}
    assert [m.kind for m in verdict({"y": np.zeros((0, 3), np.float32)}, empty).mismatches] == ["nothing"]


def test_description_names_the_worst_element_and_counts_the_rest():
    want = {"y": expected([[1.0, 2.0], [3.0, 4.0]])}
    result = verdict({"y": np.array([[1.0, 2.5], [3.75, 4.0]], np.float32)}, want)
    assert result.describe() == ("blend/1, case 'table': y[1, 0] is 3.75, wanted 3 within 4.77e-07 (2 of 4 elements are wrong)")
    assert verdict({"ids": np.array([1, 5], np.int32)}, {"ids": expected([1, 2], "i32")}).describe() == (
        "blend/1, case 'table': ids[1] is 5, wanted exactly 2"
    )


@pytest.mark.parametrize(
    ("number", "bits"),
    [
        (1.0, 0x3F80), (-2.0, 0xC000), (np.inf, 0x7F80), (-np.inf, 0xFF80), (0.0, 0x0000),
        (1.0 + 2.0**-8, 0x3F80),  # halfway, to even: down
        (1.0 + 3 * 2.0**-8, 0x3F82),  # halfway, to even: up
        (1.0 + 2.0**-8 + 2.0**-16, 0x3F81),  # just above halfway
        (3.4e38, 0x7F80),  # beyond the largest number
        (9.2e-41, 0x0001),  # subnormal
    ],
)  # fmt: skip
def test_bf16_is_rounded_to_nearest_even(number: float, bits: int):
    host = to_host(np.array([number]), "bf16")
    assert host.dtype == np.uint16
    assert host.tolist() == [bits]


def test_bf16_nan_stays_nan():
    almost_inf = np.array([0x7F800001], np.uint32).view(np.float32)  # the NaN whose upper bits are those of infinity
    assert np.isnan(from_host(to_host(almost_inf, "bf16"), "bf16")).all()


@pytest.mark.parametrize("dtype", EPS)
def test_host_form_and_back_loses_nothing_that_the_dtype_holds(dtype: str):
    numbers = np.array([0.0, 1.0, -1.5, 2.0**-14, 24576.0, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(from_host(to_host(numbers, dtype), dtype), numbers)


# -- what the report says, word for word ---------------------------------------------------------------
def test_numbers_come_back_in_canonical_form():
    """Floats in float64, whole numbers in their own dtype; bf16 NaN has one form."""
    assert from_host(np.ones(2, np.float16), "f16").dtype == np.float64
    assert from_host(np.ones(2, np.float32), "f32").dtype == np.float64
    assert from_host(np.ones(2, np.int32), "i32").dtype == np.int32
    assert to_host(np.array([np.nan]), "bf16").tolist() == [0x7FC0]


def test_a_mismatch_counts_nothing_by_itself():
    alone = Mismatch("blend/1", "table", "y", "type", "of type list", "a NumPy array")
    assert (alone.count, alone.total) == (0, 0)
    assert alone.describe() == "y is of type list, wanted a NumPy array"


def test_structure_is_told_in_words():
    got = {"ids": [3], "z": RIGHT["y"]}
    assert verdict(got, {"y": FLOATS, "ids": INTS}).describe() == (
        "blend/1, case 'table': y is missing, wanted an array of shape (2, 3); "
        "ids is of type list, wanted a NumPy array; z is delivered, wanted no such argument"
    )
    assert verdict({"y": RIGHT["y"].ravel()}, {"y": FLOATS}).describe() == (
        "blend/1, case 'table': y is of shape (6,), wanted shape (2, 3)"
    )
    assert verdict({"y": np.zeros((2, 3), np.int32)}, {"y": expected(np.zeros((2, 3)), "bf16")}).describe() == (
        "blend/1, case 'table': y is of dtype int32, wanted uint16 (the host form of bf16)"
    )


def test_nothing_compared_is_said_once():
    """Where an argument is wrong anyway, that is what is said."""
    assert verdict({}, {}).describe() == (
        "blend/1, case 'table': the comparison is without a single element, wanted at least one"
    )
    only = verdict({"z": RIGHT["y"]}, {"y": expected(np.zeros((0, 3)))})
    assert [mismatch.kind for mismatch in only.mismatches] == ["missing", "extra"]


def test_the_nearest_argument_is_named():
    """The largest headroom of all arguments; the first of equals."""

    def off(*eps: float) -> Comparison:
        want = {f"y{i}": expected([1.0]) for i in range(len(eps))}
        return verdict({f"y{i}": np.array([1.0 + one * EPS["f32"]], np.float32) for i, one in enumerate(eps)}, want)

    for eps, argument in (((1, 3, 2), "y1"), ((3, 1), "y0"), ((1, 3), "y1"), ((2, 2), "y0")):
        near = off(*eps).headroom
        assert near is not None
        assert near.argument == argument
    assert off(1).describe().endswith("; y0[0] used 25% of its tolerance")


def test_an_element_that_is_not_open_is_a_wrong_value():
    want = {"y": dataclasses.replace(expected([1.0, 5.0]), loose=np.array([False, True]))}
    (wrong,) = verdict({"y": np.array([1.5, 123.0], np.float32)}, want).mismatches
    assert (wrong.kind, wrong.wanted) == ("value", f"1 within {C * EPS['f32']:.3g}")
    (left_open,) = verdict({"y": np.array([1.0, np.nan], np.float32)}, want).mismatches
    assert left_open.wanted == "any finite number (the row carries nothing)"


@pytest.mark.parametrize(("allowed", "wanted"), [(np.inf, "exactly 1"), (0.0, "exactly 1"), (0.25, "1 within 0.25")])
def test_a_tolerance_is_told_where_there_is_one(allowed: float, wanted: str):
    want = {"y": dataclasses.replace(expected([1.0]), allowed=np.array([allowed]))}
    (wrong,) = verdict({"y": np.array([2.0], np.float32)}, want).mismatches
    assert wrong.wanted == wanted
