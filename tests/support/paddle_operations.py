"""Every operation of a Paddle device against NumPy, on random contents of shapes that kernels get wrong; writes what disagrees.

    python -m tests.support.paddle_operations polycuda:0

Tests run it in a process of its own, over a double of the driver and on a GPU. Falling back to the CPU is off.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import paddle

RNG = np.random.default_rng(7)
Case = tuple[str, Callable[..., Any], tuple[Any, ...], Any]
"""Name, what to do with tensors of the place, the arrays that they hold, and what comes out."""
ANY: Any = np
"""NumPy, without the types of its functions."""


def case(name: str, function: Any, *arrays: Any, wanted: Any) -> Case:
    """One of them; a name stands for Paddle's function."""
    return name, getattr(paddle, function) if isinstance(function, str) else function, arrays, wanted


def real(*shape: int) -> Any:
    """Numbers on both sides of zero."""
    return RNG.standard_normal(shape).astype(np.float32)


def whole(*shape: int, low: int = -9, high: int = 10, dtype: str = "int32") -> Any:
    """Whole numbers, small enough to repeat."""
    return RNG.integers(low, high, shape).astype(dtype)


def elementwise() -> Iterator[Case]:
    """One to three operands, broadcast."""
    x, y, row, a, b = real(3, 5, 7), real(3, 5, 7), real(7), whole(4, 33), whole(4, 33, low=1)
    names = {"equal": "equal", "not_equal": "not_equal", "less_than": "less", "less_equal": "less_equal"}
    names |= {"greater_than": "greater", "greater_equal": "greater_equal"}
    names |= {name: name for name in ("add", "subtract", "multiply", "maximum", "minimum")}
    for name, numpys in names.items():
        for left, right in ((x, y), (x, row), (x[:, :1], row), (a, b)):
            yield case(name, name, left, right, wanted=getattr(ANY, numpys)(left, right))
    for name in ("floor_divide", "remainder"):
        yield case(name, name, a, -b, wanted=getattr(ANY, name)(a, -b))
    yield case("divide", "divide", x, y, wanted=x / y)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        yield case(name, name, a, b, wanted=getattr(ANY, name)(a, b))
    yield case("bitwise_not", lambda t: ~t, a, wanted=~a)
    yield case("not", lambda t: ~t, a > 0, wanted=~(a > 0))
    shift = whole(4, 33, low=0, high=32)
    yield case("bitwise_left_shift", "bitwise_left_shift", a, shift, wanted=np.left_shift(a, shift))
    yield case("bitwise_right_shift", "bitwise_right_shift", a, shift, wanted=a >> shift)
    logical = (a.view(np.uint32) >> shift.astype(np.uint32)).view(np.int32)
    yield case("logical shift", lambda t, s: paddle.bitwise_right_shift(t, s, is_arithmetic=False), a, shift, wanted=logical)
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0], np.float32)
    for name in ("isfinite", "isnan"):
        for values in (x, odd):
            yield case(name, name, values, wanted=getattr(ANY, name)(values))
    positive = np.abs(x)
    yield case("exp", "exp", x, wanted=np.exp(x))
    yield case("log", "log", positive, wanted=np.log(positive))
    yield case("log1p", "log1p", positive, wanted=np.log1p(positive))
    yield case("rsqrt", "rsqrt", positive, wanted=1 / np.sqrt(positive))
    yield case("silu", paddle.nn.functional.silu, x, wanted=x / (1 + np.exp(-x)))
    for values in (x, a):
        yield case("scale", lambda t: t * 3 + 2, values, wanted=values * 3 + 2)
    yield case("clip", lambda t: paddle.clip(t, -0.5, 0.5), x, wanted=np.clip(x, -0.5, 0.5))
    yield case("clip from below", lambda t: paddle.clip(t, min=0), a, wanted=np.maximum(a, 0))
    yield case("where", "where", x > 0, x, y, wanted=np.where(x > 0, x, y))
    yield case("full", lambda: paddle.full([3, 4], 7, "int64"), wanted=np.full((3, 4), 7, np.int64))
    yield case("full_like", lambda t: paddle.full_like(t, -1e30), x, wanted=np.full_like(x, -1e30))
    large = np.abs(x * 9)
    for dtype in ("int32", "int64", "float64", "bool", "uint8"):
        yield case(f"cast to {dtype}", lambda t, to=dtype: t.astype(to), large, wanted=large.astype(dtype))
    yield case("cast to bfloat16", lambda t: t.astype("bfloat16").astype("float32"), x, wanted=rounded(x))


def copied_between(to: Any, source: Any) -> Any:
    """Write a part of one tensor over a part of another, none of them contiguous."""
    to[:, 1:3].copy_(source[:, 3:5], False)
    return to


def shapes() -> Iterator[Case]:
    """Moves that change no value."""
    x, y = real(4, 6, 5), real(4, 6, 5)
    yield case("transpose", lambda t: t.transpose([2, 0, 1]), x, wanted=x.transpose(2, 0, 1))
    yield case("flip", lambda t: paddle.flip(t, [0, 2]), x, wanted=x[::-1, :, ::-1])
    both = np.concatenate([x, y[:, :2]], 1)
    yield case("concat", lambda s, t: paddle.concat([s, t], axis=1), x, y[:, :2], wanted=both)
    yield case("stack", lambda s, t: paddle.stack([s, t], axis=-1), x, y, wanted=np.stack([x, y], -1))
    yield case("expand", lambda t: t.expand([4, 9, 5]), x[:, :1], wanted=np.broadcast_to(x[:, :1], (4, 9, 5)))
    yield case("expand_as", lambda s, t: s.expand_as(t), x[:1], x, wanted=np.broadcast_to(x[:1], x.shape))
    yield case("contiguous", lambda t: t[:, 1:4, ::2].contiguous(), x, wanted=x[:, 1:4, ::2])
    target = x.copy()
    target[:, 1:3] = y[:, 3:5]
    yield case("strided_copy", copied_between, x, y, wanted=target)
    yield case("fill", lambda t: t.fill_(2.5), x, wanted=np.full_like(x, 2.5))
    yield case("assign", "assign", x, wanted=x)


def along() -> Iterator[Case]:
    """Folds, running folds, order; rows shorter and longer than a block of threads."""
    for x in (real(3, 5), real(2, 700), real(4, 3, 300)):
        wide, rounded = x.astype(np.float64), np.round(x)
        yield case("sum", lambda t: t.sum(), x, wanted=wide.sum().astype(np.float32))
        for axis in range(x.ndim):
            for name in ("sum", "mean", "max", "min"):
                wanted = getattr(wide, name)(axis).astype(np.float32)
                yield case(f"{name} along {axis}", lambda t, n=name, a=axis: getattr(t, n)(axis=a), x, wanted=wanted)
            yield case(f"any along {axis}", lambda t, a=axis: t.any(axis=a), x > 1.5, wanted=(x > 1.5).any(axis))
            yield case(f"all along {axis}", lambda t, a=axis: t.all(axis=a), x > -2.5, wanted=(x > -2.5).all(axis))
            yield case(f"argmax along {axis}", lambda t, a=axis: t.argmax(axis=a), x, wanted=x.argmax(axis))
        yield case("cumsum", lambda t: paddle.cumsum(t, axis=-1), wide, wanted=wide.cumsum(-1))
        yield case("cumprod", lambda t: paddle.cumprod(t, dim=-1), np.sign(x), wanted=np.sign(x).cumprod(-1))
        yield case("cummax", lambda t: paddle.cummax(t, axis=-1)[0], x, wanted=np.maximum.accumulate(x, -1))
        yield case("cummin", lambda t: paddle.cummin(t, axis=-1)[0], x, wanted=np.minimum.accumulate(x, -1))
        for sign in (1, -1):
            order = np.argsort(sign * rounded, axis=-1, kind="stable")
            yield case(
                "argsort", lambda t, d=sign < 0: paddle.argsort(t, axis=-1, descending=d, stable=True), rounded, wanted=order
            )
    ties = whole(3, 400, low=0, high=3)
    yield case("argmax of equals", lambda t: t.argmax(axis=1), ties, wanted=ties.argmax(1))
    ends, values = np.sort(whole(9, low=0, high=40)), whole(50, low=0, high=40)
    for side in ("left", "right"):
        found = ANY.searchsorted(ends, values, side).astype(np.int32)
        yield case(
            "searchsorted", lambda s, v, r=side == "right": paddle.searchsorted(s, v, out_int32=True, right=r), ends, values,
            wanted=found,
        )  # fmt: skip


def by_index() -> Iterator[Case]:
    """Moves by indices that repeat."""
    x, index = real(7, 5, 3), whole(11, low=0, high=7)
    yield case("gather", "gather", x, index, wanted=x[index])
    yield case("index_select", lambda t, i: paddle.index_select(t, i, axis=1), x, index % 5, wanted=x[:, index % 5])
    table, places = real(4, 300), whole(4, 20, low=0, high=300, dtype="int64")
    taken = np.take_along_axis(table, places, 1)
    yield case("take_along_axis", lambda t, i: paddle.take_along_axis(t, i, 1), table, places, wanted=taken)
    added, ones = np.zeros((4, 300), np.float32), np.ones((4, 20), np.float32)
    for row in range(4):
        np.add.at(added[row], places[row] % 9, 1.0)
    yield case(
        "put_along_axis",
        lambda t, i, v: paddle.put_along_axis(t, i, v, 1, reduce="add"),
        added * 0,
        places % 9,
        ones,
        wanted=added,
    )
    order, put = np.stack([RNG.permutation(300) for _ in range(4)]), np.empty_like(table)
    np.put_along_axis(put, order, table, 1)
    yield case("put by assign", lambda t, i, v: paddle.put_along_axis(t, i, v, 1), table * 0, order, table, wanted=put)
    rows, written = RNG.permutation(7)[:4].astype(np.int32), x.copy()
    written[rows] = real(4, 5, 3)
    yield case("scatter", "scatter", x, rows, written[rows], wanted=written)


def exact(x: Any, y: Any) -> Any:
    """A product in float64, rounded once."""
    return (x.astype(np.float64) @ y.astype(np.float64)).astype(np.float32)


def products() -> Iterator[Case]:
    """Matrices and batches of them, plain and transposed, in shapes that no library likes."""
    pairs = [(real(m, k), real(k, n)) for m, k, n in ((1, 8, 16), (5, 7, 3), (33, 64, 130), (17, 1, 9))]
    for x, y in [*pairs, (real(3, 2, 6, 10), real(3, 2, 10, 4))]:
        over, under = np.swapaxes(x, -1, -2), np.swapaxes(y, -1, -2)
        yield case("matmul", "matmul", x, y, wanted=exact(x, y))
        yield case("matmul, y transposed", lambda s, t: paddle.matmul(s, t, transpose_y=True), x, under, wanted=exact(x, y))
        yield case("matmul, x transposed", lambda s, t: paddle.matmul(s, t, transpose_x=True), over, y, wanted=exact(x, y))
    x, y, row, column = real(3, 2, 6, 10), real(10, 4), real(10), real(10)
    yield case("batch by matrix", "matmul", x, y, wanted=exact(x, y))
    yield case("vector by matrix", "matmul", row, y, wanted=exact(row, y))
    yield case("vector by vector", "matmul", row, column, wanted=exact(row, column))
    yield case(
        "bfloat16 product", lambda s, t: (s.astype("bfloat16") @ t.astype("bfloat16")).astype("float32"), x, y, wanted=exact(x, y)
    )


def attended(q: Any, k: Any, v: Any, added: Any) -> Any:
    """Softmax attention of q [b, r, h, d] over k and v [b, c, g, d] in float64."""
    shared = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x.astype(np.float64), shared, 2) for x in (k, v))
    scores = np.einsum("brhd,bchd->bhrc", q.astype(np.float64), k) / np.sqrt(q.shape[3]) + added
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed: Any = np.einsum("bhrc,bchd->brhd", weights / weights.sum(-1, keepdims=True), v)
    return mixed


def in_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same of numbers of 16 bits, and of what comes out float32."""
    return lambda *tensors: function(*(t.astype("bfloat16") for t in tensors)).astype("float32")


def fused() -> Iterator[Case]:
    """What Paddle makes one operation of, in float32 and bfloat16; rows shorter and longer than a block of threads."""
    from polydraft_paddle import fused as operations
    from polydraft_paddle.ops import direct

    def normed(x: Any, gain: Any) -> Any:
        out, inverse = paddle.zeros_like(x), paddle.zeros([x.shape[0]], "float32")
        operations.rms_norm_into(out, inverse, x, gain, 1e-5)
        return out

    def normed_sum(x: Any, y: Any, gain: Any) -> Any:
        x, out, inverse = x.clone(), paddle.zeros_like(x), paddle.zeros([x.shape[0]], "float32")
        operations.add_and_norm_into(out, inverse, x, y, gain, 1e-5)
        return paddle.concat([out, x])

    def turned(heads: Any, sin: Any, cos: Any, interleaved: bool) -> Any:
        out = paddle.zeros_like(heads)
        operations.rotate_into(out, heads, sin, cos, interleaved=interleaved)
        return out

    def mixed(q: Any, k: Any, v: Any, added: Any) -> Any:
        out = paddle.zeros_like(q)
        operations.attend_into(out, q, k, v, added)
        return out

    cases: list[Case] = []
    for width in (8, 67, 1000):
        x, y, gain, bias, w = (rounded(real(*shape)) for shape in ((5, width), (5, width), (width,), (16,), (16, width)))
        unit = lambda x: x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)  # noqa: E731
        cases.append(case("norm", normed, x, gain, wanted=unit(x) * gain))
        cases.append(case("norm of a sum", normed_sum, x, y, gain, wanted=np.concatenate([unit(x + y) * gain, x + y])))
        with_bias = lambda x, w, b: direct.linear_v2(x, w, b, True)  # noqa: E731
        cases.append(case("product and bias", with_bias, x, w, bias, wanted=exact(x, w.T) + bias))
        gated = x / (1 + np.exp(-x)) * y
        cases.append(case("swiglu", lambda both: direct.swiglu(both, None), np.concatenate([x, y], 1), wanted=gated))
        cases.append(case("swiglu of two", direct.swiglu, x, y, wanted=gated))
        weights = np.exp(x - x.max(-1, keepdims=True))
        cases.append(case("softmax", lambda x: direct.softmax(x, -1), x, wanted=weights / weights.sum(-1, keepdims=True)))
        q, k, v = (rounded(real(*shape)) for shape in ((3, 1, 6, 64), (3, width, 2, 64), (3, width, 2, 64)))
        hides = np.where(RNG.random((3, 6, 1, width)) < 0.5, np.float32(-1e30), np.float32(0))
        hides[..., -1] = 0.0
        cases.append(case("attention", mixed, q, k, v, hides, wanted=attended(q, k, v, hides)))
        for size in (3, 6, 20, 576):  # no multiple of 16 bytes, no power of two, more than a block of threads
            q, k, v = (rounded(real(*shape, size)) for shape in ((3, 1, 6), (3, width, 2), (3, width, 2)))
            cases.append(case(f"attention of {size}", mixed, q, k, v, hides, wanted=attended(q, k, v, hides)))
        shown = np.ascontiguousarray(hides[:, :1])
        q, k, v = (rounded(real(*shape)) for shape in ((3, 1, 6, 64), (3, width, 2, 64), (3, width, 2, 64)))
        spread = lambda q, k, v, added: mixed(q, k, v, added.expand([3, 6, 1, added.shape[3]]))  # noqa: E731
        cases.append(case("attention, one mask", spread, q, k, v, shown, wanted=attended(q, k, v, shown)))
        third = x / np.float32(3.0)
        mixed_product = lambda x, w: paddle.matmul(x, w.astype("bfloat16"), transpose_y=True)  # noqa: E731
        yield case("product of float32 and bfloat16", mixed_product, third, w, wanted=exact(third, w.T))
    heads, sin, cos = (rounded(real(7, 8)) for _ in range(3))
    first, second = np.split(heads, 2, axis=1)
    halves = heads * cos + np.concatenate([-second, first], 1) * sin
    pairs = heads * cos + np.stack([-heads[:, 1::2], heads[:, ::2]], 2).reshape(7, 8) * sin
    cases.append(case("rotation of halves", lambda x, s, c: turned(x, s, c, False), heads, sin, cos, wanted=halves))
    cases.append(case("rotation of pairs", lambda x, s, c: turned(x, s, c, True), heads, sin, cos, wanted=pairs))
    for name, function, arrays, wanted in cases:
        yield name, function, arrays, wanted
        yield f"{name} in bfloat16", in_bfloat16(function), arrays, wanted
    odd = np.array([[0.0, -80.0, -np.inf], [0.0, np.nan, 0.0]], np.float32)
    small = np.array([[1.0, np.exp(-80.0), 0.0], [np.nan] * 3], np.float32)
    yield case("softmax of NaN", lambda x: direct.softmax(x, -1), odd, wanted=small)


def rounded(x: Any) -> Any:
    """The nearest numbers of bfloat16, in float32."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def main(spec: str) -> int:
    """Number of disagreements."""
    kind, _, index = spec.partition(":")
    place = paddle.CustomPlace(kind, int(index or 0))
    paddle.set_device(place)
    paddle.set_flags({"FLAGS_enable_api_kernel_fallback": False})
    bad = count = 0
    for family in (elementwise, shapes, along, by_index, products, fused):
        for name, function, arrays, wanted in family():
            count += 1
            got = function(*(paddle.to_tensor(np.ascontiguousarray(a), place=place) for a in arrays)).numpy()
            close = 2e-2 if name.endswith("in bfloat16") or name == "bfloat16 product" else 2e-5
            if got.shape != np.shape(wanted) or not np.allclose(got, wanted, rtol=close, atol=close, equal_nan=True):
                bad += 1
                sys.stdout.write(f"{name}: got {got.shape} {got.ravel()[:5]}, wanted {np.shape(wanted)} {np.ravel(wanted)[:5]}\n")
    sys.stdout.write(f"{count} results, {bad} wrong\n")
    return bad


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1]), 1))
