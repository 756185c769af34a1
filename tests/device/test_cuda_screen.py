"""The first look at a head by bytes, in NumPy: how weights and rows are turned, what a byte stands for, where it lies, how far a
score may be off, and when the device gives looks up.

Constants and short functions are read from the kernels' sources and translated, so that what is shown here is shown of them.
"""

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydraft.contracts.compare import from_host, to_host
from polydraft_cuda.compiler import HEADERS

ACTS = ("bf16", "f16")
FUNCTION = r"\b{name}\([^)]*\) \{{(.*?)\n?\}}\n"
SINGLE = np.float32


@cache
def source(name: str) -> str:
    """Its text, without comments."""
    return re.sub(r"//[^\n]*", "", (HEADERS / name).read_text(encoding="utf-8"))


def numbered(text: str) -> str:
    """With C++ literals as Python's."""
    text = re.sub(r"0x1p(-\d+)f", r"2.0**\1", text)
    return re.sub(r"\b(\d+\.\d*)f\b", r"\1", text)


@cache
def constant(name: str, file: str = "screen.cuh") -> float:
    """A constant of a source."""
    found = re.search(rf"\b{name} = ([^,;]*)[,;]", source(file))
    assert found, name
    return float(eval(numbered(found[1])))


@cache
def function(name: str, *arguments: str) -> Any:
    """A function of screen.cuh, of arrays."""
    found = re.search(FUNCTION.format(name=name), source("screen.cuh"), flags=re.DOTALL)
    assert found, name
    body = numbered(found[1]).replace("rintf", "np.rint").replace("(int64_t)", "").replace("return int(", "return (")
    body = re.sub(r"return \((.*?) \? (.*?) : (.*)\);", r"return np.where(\1, \2, \3);", body)
    if "float" not in found[0]:
        body = body.replace("/", "//")
    declared = re.sub(r"const int |,(?= \w+ = )", ";", body)
    lines = "".join(f"    {line.strip()}\n" for line in declared.split(";") if line.strip())
    space: dict[str, Any] = {"np": np, "LEAST": SINGLE(constant("LEAST")), "SCREEN_TILE": int(constant("SCREEN_TILE"))}
    exec(f"def {name}({', '.join(arguments)}):\n{lines}", space)
    return space[name]


def high() -> int:
    """The upper byte of all numbers."""
    found = re.search(r"HIGH = 0x([\da-f]+)", source("screen.cuh"))
    assert found
    return int(found[1], 16)


def number_of(byte: Any) -> Any:
    """The numbers of bytes, float32."""
    bits = (high() << 8 | np.asarray(byte, np.int64)).astype(np.uint16)
    return bits.view(np.float16).astype(SINGLE)


def rounded(value: Any, act: str) -> Any:
    """What is left of numbers in the dtype, float32."""
    return from_host(to_host(value, act), act).astype(SINGLE)


def columns_of(w: Any) -> Any:
    """What each input's weights are divided by, as `screen_columns` finds it; float32."""
    found, inputs = re.search(r"unsigned\(input\) \* 0x([\da-f]+)u >> (\d+)", source("screen.cuh")), w.shape[1]
    assert found, "column_of has changed, and this test has to"
    least, most = (int(constant(name)) for name in ("LEAST_POWER", "MOST_POWER"))
    with np.errstate(divide="ignore"):
        power = np.clip(np.floor(np.log2(np.abs(w).mean(0, dtype=np.float64))), least, most)
    bits = (np.arange(inputs, dtype=np.uint32) * np.uint32(int(found[1], 16))) >> np.uint32(int(found[2]))
    odd = np.array([one.bit_count() & 1 for one in bits.tolist()], bool)
    return np.where(odd, -1, 1).astype(SINGLE) * np.exp2(power).astype(SINGLE)


def turned(values: Any) -> Any:
    """What `turn` makes of rows, float32, sum by sum."""
    values = np.array(values, SINGLE)
    rows, inputs = values.shape
    half = 1
    while half < (inputs & -inputs):
        pairs = values.reshape(rows, -1, 2, half)
        a, b = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        pairs[:, :, 0], pairs[:, :, 1] = a + b, a - b
        half *= 2
    return values


def packed(w: Any) -> tuple[Any, Any, Any, Any]:
    """Turned weights less their middle, scales, and slacks and lengths of rows, as `screen_weights` finds them."""
    least, middle, most = (SINGLE(constant(name)) for name in ("LEAST", "MIDDLE", "MOST"))
    u = turned(w / columns_of(w))
    top, length = np.abs(u).max(1), (u * u).sum(1, dtype=SINGLE)
    scale = (top / (most - middle)).astype(SINGLE)
    with np.errstate(over="ignore", invalid="ignore"):  # no number is the least one
        by = np.divide(most - middle, top, out=np.zeros_like(top), where=top > 0)
        t = np.fmin(np.fmax(u * by[:, None] + middle, least), most)
    byte = function("byte_of", "t")(t).astype(np.int64)
    assert ((byte >= 0) & (byte <= 255)).all()
    number = number_of(byte) - middle
    rest = u - scale[:, None] * number
    found = re.search(
        r"slack = \(sqrtf\(rest\) \+ sqrtf\(all\) \* \(ROUNDING \* inputs \+ TURNING\)\) \* ([\d.]+)f \+ ([\de.-]+)f;",
        source("screen.cu"),
    )
    assert found, "screen_weights has changed, and this test has to"
    more, least_slack = (SINGLE(float(one)) for one in found.groups())
    share = constant("ROUNDING", "screen.cu") * w.shape[1] + constant("TURNING")
    slack = (np.sqrt((rest * rest).sum(1, dtype=SINGLE)) + np.sqrt(length) * SINGLE(share)) * more + least_slack
    return number, scale, slack, np.sqrt(length) * more + least_slack


def looked_at(x: Any, columns: Any) -> tuple[Any, Any, Any, Any]:
    """Rows as a look wants them, their lengths, how far they are off, and what products are multiplied with, as `screen_turn`
    finds them."""
    y = turned(x * columns)
    top, inputs = np.abs(y).max(1), x.shape[1]
    by = np.exp2(-np.floor(np.log2(np.where(top > 0, top, 1)))).astype(SINGLE)
    y *= by[:, None]
    z = rounded(y, "f16")
    assert "sqrtf(d2) + sqrtf(y2) * TURNING) * 1.001f" in source("screen.cu")
    length, rest, whole = (np.sqrt((one * one).sum(1, dtype=SINGLE)) for one in (z, y - z, y))
    off = (rest + whole * SINGLE(constant("TURNING"))) * SINGLE(1.001) + SINGLE(1e-20)
    return z, length * SINGLE(1.001) + SINGLE(1e-20), off, by * (inputs & -inputs)


def summed(a: Any, b: Any) -> Any:
    """Products of rows, one number after the other in float32."""
    return np.cumsum(a * b, axis=-1, dtype=SINGLE)[..., -1]


def off(w: Any, x: Any) -> tuple[Any, Any]:
    """How far scores [outputs, rows] are from the products, and how far they may be."""
    number, scale, slack, lengths = packed(w)
    z, length, beside, factor = looked_at(x, columns_of(w))
    scores = summed(number[:, None], z[None]) * scale[:, None]
    exact = w.astype(np.float64) @ x.T.astype(np.float64) * factor
    return np.abs(scores - exact), slack[:, None] * length + lengths[:, None] * beside


# -- bytes --------------------------------------------------------------------------------------------
def test_a_byte_is_a_number_of_its_own_that_is_exact_without_its_middle():
    numbers, middle = number_of(np.arange(256)), constant("MIDDLE")
    assert (numbers[0], numbers[255]) == (constant("LEAST"), constant("MOST"))
    assert (np.diff(numbers) > 0).all()
    assert np.array_equal(rounded(numbers - SINGLE(middle), "f16"), numbers.astype(np.float64) - middle)
    assert np.array_equal(function("byte_of", "t")(numbers), np.arange(256))
    words = re.search(r'MIDDLES "0x(\w\w)(\w\w)(\w\w)(\w\w)"', source("screen.cuh"))
    assert words
    first, second, *others = (int(word, 16) for word in words.groups())
    assert (first, number_of(second)) == (high(), middle), "what is subtracted is such a number"
    assert others == [first, second]


def test_a_number_gets_the_byte_next_to_it():
    least, most = constant("LEAST"), constant("MOST")
    t = np.random.default_rng(0).uniform(least, most, 4096).astype(SINGLE)
    numbers = number_of(np.arange(256))
    nearest = np.abs(numbers - t[:, None]).min(1)
    assert np.array_equal(np.abs(number_of(function("byte_of", "t")(t)) - t), nearest)


def test_a_byte_lies_where_a_lane_widens_it_into_its_operand():
    inputs, k = 256, np.arange(256)[None]
    row = np.arange(384)[:, None]
    place = function("place_of_byte", "output", "input", "inputs")(row, k, inputs)
    assert sorted(place.reshape(-1)) == list(range(384 * inputs))
    chunk, rest = place // 8192, place % 8192
    assert (chunk == row // 128 * 4 + k // 64).all(), "a chunk of a tile is one stretch"
    warp, half, lane, word, byte = rest // 1024, rest // 512 % 2, rest // 16 % 32, rest // 4 % 4, rest % 4
    operand = 8 * half + 2 * word + byte % 2  # what `widen` makes of it, and of bytes 0 and 2, or 1 and 3, which part
    step, register, part = operand // 4, operand % 4, byte // 2
    # the first operand of a product of 16: registers of rows g, g + 8, then the same eight inputs on; a lane's are two in turn
    assert (row % 128 == warp * 16 + register % 2 * 8 + lane // 4).all()
    assert (k % 64 == step * 16 + register // 2 * 8 + lane % 4 * 2 + part).all()


@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128])
def test_a_score_is_of_the_token_whose_sum_a_lane_stored(tokens: int):
    place = np.arange(tokens)
    token = function("token_at", "p", "tokens")(place, tokens)
    assert sorted(token) == list(range(tokens))
    for lane in range(4):
        sums = [at for at in range(tokens // 2) if not at & 2]  # and those with the bit are of the output eight on
        stored = [at // 4 * 8 + lane * 2 + at % 2 for at in sums]
        assert list(token[lane * tokens // 4 :][: tokens // 4]) == stored


# -- how far scores may be off ------------------------------------------------------------------------
def rows(seed: int, act: str, kind: str, inputs: int = 256) -> Any:
    """Rows of numbers of the dtype."""
    rng = np.random.default_rng(seed)
    value = rng.standard_normal((24, inputs))
    if kind == "outliers":
        value[:, rng.integers(0, inputs, 3)] *= 300
    elif kind == "sparse":
        value *= rng.random(value.shape) < 0.02
    elif kind == "wide":
        value *= np.exp2(rng.uniform(-12, 0, value.shape))
    elif kind == "alike":
        value = np.sign(value) * rng.uniform(0.99, 1, value.shape)
    elif kind == "one sign":
        value = np.abs(value)
    return rounded(value, act)


KINDS = ("normal", "outliers", "sparse", "wide", "alike", "one sign")


@pytest.mark.parametrize("act", ACTS)
@given(
    seed=st.integers(0, 1 << 30), of_w=st.sampled_from(KINDS), of_x=st.sampled_from(KINDS), power=st.integers(-140, 6),
    inputs=st.sampled_from([128, 512]),
)  # fmt: skip
def test_no_score_is_off_by_more_than_its_slack(act: str, seed: int, of_w: str, of_x: str, power: int, inputs: int):
    w = rounded(rows(seed, act, of_w, inputs) * 2.0 ** (power if act == "bf16" else max(power, -10)), act)
    error, allowed = off(w, rows(seed + 1, act, of_x, inputs))
    assert (error <= allowed).all()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sparse"])
def test_a_row_along_the_rest_is_off_by_nearly_as_much(act: str, kind: str):
    """The most that is possible: so a slack is little larger than it has to be."""
    w = rows(7, act, kind)
    number, scale, slack, lengths = packed(w)
    columns = columns_of(w)
    rest = turned(w / columns) - scale[:, None] * number
    x = rounded(turned(rest / np.abs(rest).max(1, keepdims=True).clip(1e-30)) / columns, act)  # what is turned twice is itself
    z, length, beside, factor = looked_at(x, columns)
    scores = (number.astype(np.float64) * z).sum(1) * scale
    error = np.abs(scores - (w.astype(np.float64) * x).sum(1) * factor)
    assert (error <= slack * length + lengths * beside).all()
    assert (error >= 0.9 * slack * length).all()


@pytest.mark.parametrize("kind", ["heavy tails", "columns", "one sign", "alike", "sparse"])
def test_whatever_weights_are_distributed_like_little_is_left_of_them(kind: str):
    """As of normal ones, of whose length one in a hundred is."""
    rng = np.random.default_rng(11)
    w = rng.standard_normal((64, 1024)) if kind in ("heavy tails", "columns") else rows(11, "bf16", kind, 1024)
    if kind == "heavy tails":
        w = rng.standard_t(3, w.shape)
    elif kind == "columns":
        w[:, :16] *= 64
    _, _, slack, lengths = packed(rounded(w, "bf16"))
    assert (slack / lengths).mean() < 0.0105


def test_turning_keeps_products():
    rng = np.random.default_rng(5)
    for inputs in (128, 384, 1024):
        w, x = rng.standard_normal((8, inputs)), rng.standard_normal((3, inputs))
        columns = columns_of(w)
        assert {abs(float(np.log2(abs(one)))) % 1 for one in columns} == {0.0}
        assert 0.4 * inputs < (columns < 0).sum() < 0.6 * inputs
        found = turned(w / columns) @ turned(x * columns).T / (inputs & -inputs)
        assert np.abs(found - w @ x.T).max() < 1e-4 * np.abs(w @ x.T).max() + 1e-3


def test_weights_of_zero_are_exact():
    number, scale, slack, _ = packed(np.zeros((2, 128), SINGLE))
    assert not number.any()
    assert not scale.any()
    assert (slack < 1e-19).all()


def test_a_stored_score_is_off_by_no_more_than_what_is_added():
    s = np.random.default_rng(1).uniform(-4, 4, 1 << 16).astype(SINGLE)
    stored, share = rounded(s, "bf16"), SINGLE(constant("STORED", "screen.cu"))
    assert (stored + np.abs(stored) * share >= s).all()
    assert 0.99 < (np.abs(s - stored) / np.abs(stored)).max() / share <= 1


# -- the choice ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", ["normal", "outliers", "near ties"])
def test_what_reaches_the_product_of_the_best_score_has_the_highest_in_it(act: str, kind: str):
    rng = np.random.default_rng(3)
    w = rounded(rng.standard_normal((4096, 512)) / 16, act)
    x = rounded(rng.standard_normal((16, 512)) * 2, act)
    if kind == "outliers":
        x[:, 5] *= 100
    elif kind == "near ties":
        w[1000:1400] = rounded(w[1000] + rng.standard_normal((400, 512)) * 2e-3, act)
        x[:] = rounded(w[1000] * 16 + rng.standard_normal(x.shape), act)
    number, scale, slack, lengths = packed(w)
    z, length, beside, factor = looked_at(x, columns_of(w))
    scores = (number @ z.T) * scale[:, None]
    products = w.astype(np.float64) @ x.T.astype(np.float64) * factor
    bound = products[scores.argmax(0), np.arange(len(x))]
    pairs = rounded(scores.reshape(-1, 2, 8, len(x)).max(1), "bf16")
    slacks, longest = (one.reshape(-1, 2, 8).max(1)[..., None] for one in (slack, lengths))
    stored = np.abs(pairs) * SINGLE(constant("STORED", "screen.cu"))
    reached = pairs + stored + slacks * length + longest * beside >= bound
    highest = products.argmax(0)
    pair = highest // 16, highest % 8
    assert reached[(*pair, np.arange(len(x)))].all()
    assert (scores.argmax(0) != highest).any() == (kind == "near ties"), "by scores alone it would be another"
    assert reached.mean() < 0.2, "few are computed"


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 1, 1), (0.05, 0.75, 1), (0.5, 0, 0.02), (1.0, 0, 0.005)])
def test_looks_that_fail_too_often_are_given_up(share: float, least: float, most: float):
    """The rule of the last block of `screen_choose`, for looks of which such a share fails: how many choices still look."""
    text, longest = source("screen_state.cuh"), int(constant("MOST_WAIT", "screen_state.cuh"))
    assert "longer_wait(int wait) { return wait * 4 + 4 < MOST_WAIT ? wait * 4 + 4 : MOST_WAIT; }" in text
    assert "shorter_wait(int wait) { return wait / 2; }" in text
    assert "skipped ? state->wait : whole ? longer_wait(state->wait) : shorter_wait(state->wait)" in source("screen.cu")
    rng, wait, skips, looks, choices = np.random.default_rng(0), 0, 0, 0, 40000
    for failed in (rng.random(choices) < share).tolist():
        if skips:
            skips -= 1
            continue
        looks += 1
        wait = min(wait * 4 + 4, longest) if failed else wait // 2
        skips = wait if failed else 0
    assert least <= looks / choices <= most
