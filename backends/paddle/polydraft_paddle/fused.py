"""Which of Paddle's fused operations a place has, found out when it is opened.

The kernels of `kernels/numeric.py` ask `has`, and do with several operations what a place has not in one. A Kunlun XPU is not
tried: there Paddle takes from the CPU what it lacks, and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import paddle

from polydraft_paddle.installation import set_fallback
from polydraft_paddle.ops import Tensor, direct

unasked = paddle.Tensor
"""Makes a tensor without memory, for a result that nobody asks for."""


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, in float32."""
    if has("rms_norm_ext", x):
        return direct.fused_rms_norm_ext(x, gain, eps)[0]
    return paddle.incubate.nn.functional.fused_rms_norm(x, gain, None, eps, x.ndim - 1)[0]


def rms_norm_into(out: Tensor, inverse: Tensor, x: Tensor, gain: Tensor, eps: float) -> None:
    """RMSNorm of rows `x` [n, R] straight over `out`, on a place that has it; `x`, `gain` and `out` have one dtype, `inverse` [n]
    is float32 and may hold anything afterwards. Since Paddle 3.3: before, it has another name and writes elsewhere."""
    if has("rms_norm_ext", x):
        direct.fused_rms_norm_ext(x, gain, eps, out=(out, inverse))
    else:
        direct.fused_rms_norm_quant(x, None, None, gain, None, eps, 1, -1.0, 0, 0.0, 0.0, out=(out, inverse, inverse))


def add_and_norm_into(out: Tensor, inverse: Tensor, x: Tensor, y: Tensor, gain: Tensor, eps: float) -> None:
    """x += y, then its RMSNorm over `out`, like `rms_norm_into`. The sum lies where an addend does, which not every place takes:
    some add again where they read a second time."""
    direct.fused_rms_norm_quant(y, None, x, gain, None, eps, 1, -1.0, 0, 0.0, 0.0, out=(out, x, inverse))


def rotate_into(out: Tensor, heads: Tensor, sin: Tensor, cos: Tensor, interleaved: bool) -> None:
    """Heads [N, D] turned over `out` [N, D] by the angles of each, whose `sin` and `cos` are [N, D]; all float32."""
    shape = [1, heads.shape[0], 1, heads.shape[1]]
    q, sin, cos, turned = (direct.view_shape(t, shape) for t in (heads, sin, cos, out))
    direct.fused_rotary_position_embedding(
        q, None, None, sin, cos, None, interleaved, False, 1e4, out=(turned, unasked(), unasked())
    )


def attend_into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> None:
    """Softmax attention of q [n, 1, H, D] over k and v [n, C, G, D], over `out`, all of one dtype. Scores are D ** -0.5 times
    the products, plus `added` [n, H, 1, C]."""
    direct.flash_attn(q, k, v, None, added, 0.0, False, False, True, "", out=(out, unasked(), unasked(), unasked()))


ROW = np.array([[0.5, -1.0, 2.0, 0.25, -0.75, 1.5, -2.0, 1.0]], np.float32)
"""What trials compute with."""


def _same(found: Tensor, wanted: Any) -> bool:
    return bool(np.allclose(found.astype("float32").numpy(), wanted, rtol=1e-2, atol=1e-6))  # TF32 will do, and 16 bits


def _norms(row: Tensor) -> bool:
    out, inverse = paddle.zeros_like(row), paddle.zeros([1])
    direct.fused_rms_norm_ext(row, row[0], 1e-6, out=(out, inverse))
    return _same(out, ROW * ROW / np.sqrt((ROW**2).mean()))


def _adds_in_place(row: Tensor) -> bool:
    """For short rows and long ones, of which a place may keep less than all between two looks."""
    for width in (8, 4096, 1 << 16):
        x, y, gain, out = (paddle.full([1, width], value, row.dtype) for value in (1.0, 2.0, 1.0, 0.0))
        add_and_norm_into(out, paddle.zeros([1]), x, y, gain[0], 0.0)
        if not (_same(out, 1.0) and _same(x, 3.0)):
            return False
    return True


def _mixes(row: Tensor) -> bool:
    """A product of float32 with 16 bits, whose result is float32: factors of float32 are not rounded."""
    third = paddle.to_tensor(ROW / np.float32(3.0), place=row.place)
    out = paddle.zeros([1, 1], "float32")
    direct.matmul(third, row, False, True, out=out)
    return out.dtype == paddle.float32 and bool(np.allclose(out.numpy(), (ROW * ROW).sum() / 3.0, rtol=1e-6))


def _keeps_nan_and_small_weights(row: Tensor) -> bool:
    scores = paddle.to_tensor(np.array([[0.0, -80.0, -np.inf], [0.0, np.nan, 0.0]], np.float32), place=row.place)
    found = direct.softmax(scores, -1).numpy()
    return bool(np.allclose(found[0], [1.0, np.exp(-80.0), 0.0], rtol=1e-2, atol=0.0) and np.isnan(found[1]).all())


def _finds_the_first(row: Tensor) -> bool:
    """Of equal numbers, however far apart, in one row and in several."""
    equal = np.zeros((2, 3 << 16), np.float32)
    equal[1, [70_000, 70_001, 190_000]] = 1.0
    rows = paddle.to_tensor(equal, place=row.place)
    found = [some.argmax(axis=1, dtype="int32").numpy().tolist() for some in (rows, rows[1:])]
    return found == [[0, 70_000], [70_000]]


def _rotates(row: Tensor) -> bool:
    out, (first, second) = paddle.zeros_like(row), np.split(ROW, 2, axis=1)
    rotate_into(out, row, row, row, interleaved=False)
    halves = _same(out, ROW * (ROW + np.concatenate([-second, first], 1)))
    rotate_into(out, row, row, row, interleaved=True)
    return halves and _same(out, ROW * (ROW + np.stack([-ROW[0, 1::2], ROW[0, ::2]], 1).reshape(1, -1)))


def _attends(row: Tensor) -> bool:
    """Two heads of eight elements over two places of one head, of which one is hidden from each."""
    rows = np.concatenate([ROW, ROW[:, ::-1]])
    hides = np.array([[0.0, -1e30], [-1e30, 0.0]], np.float32)
    both, added = (paddle.to_tensor(values, place=row.place).astype(row.dtype) for values in (rows, hides))
    q, kv = direct.view_shape(both, [1, 1, 2, 8]), direct.view_shape(both, [1, 2, 1, 8])
    out = paddle.zeros_like(q)
    attend_into(out, q, kv, kv, direct.view_shape(added, [1, 2, 1, 2]))
    return _same(out, rows.reshape(1, 1, 2, 8))


TRIALS: Final[dict[str, Callable[[Tensor], object]]] = {
    "rms_norm": lambda row: paddle.incubate.nn.functional.fused_rms_norm(row, row[0], None, 1e-6, 1),
    "rms_norm_quant": lambda row: direct.fused_rms_norm_quant(row, None, None, row[0], None, 1e-6, 1, -1.0, 0, 0.0, 0.0),
    "rms_norm_ext": _norms,
    "add_and_norm": _adds_in_place,
    "norm": lambda row: direct.norm(row, -1, 1e-6, False),
    "swiglu": lambda row: direct.swiglu(row, None),
    "softmax": _keeps_nan_and_small_weights,
    "argmax": _finds_the_first,
    "logsumexp": lambda row: direct.logsumexp(row, [-1], True, False),
    "linear": lambda row: direct.linear_v2(row, row, row[0, :1], True),
    "mixed_product": _mixes,
    "rotate": _rotates,
    "attend": _attends,
}
"""Operation to what tries it on `ROW`; false where it is there and computes something else."""
TRIED: Final[dict[str, tuple[str, ...]]] = {
    "float32": tuple(name for name in TRIALS if name != "mixed_product"),
    "bfloat16": ("rms_norm_ext", "add_and_norm", "swiglu", "linear", "mixed_product", "attend"),
    "float16": ("rms_norm_ext", "add_and_norm", "swiglu", "linear", "mixed_product"),
}
"""What is tried in which dtype: in 16 bits, where operations sum in float32 and round once, those whose operands may all be of 16
bits. float16 has no number that hides a place whatever its score is."""
_FOUND: dict[Any, frozenset[tuple[str, Any]]] = {}


def learn(place: Any) -> None:
    """Find out what `place`, which is being opened and is current, has."""
    if place.is_xpu_place():
        return
    found, row = set(), paddle.to_tensor(ROW[0], place=place).reshape([1, -1])
    allowed = set_fallback(allowed=False)
    try:
        for dtype, names in TRIED.items():
            found |= {(name, getattr(paddle, dtype)) for name in names if name in TRIALS and _passes(TRIALS[name], row, dtype)}
    finally:
        set_fallback(allowed=allowed)
    _FOUND[place] = frozenset(found)


def _passes(trial: Callable[[Tensor], object], row: Tensor, dtype: str) -> bool:
    try:
        return trial(row.astype(dtype)) is not False
    except (RuntimeError, OSError, AttributeError, TypeError, ValueError):  # Paddle 3.2 lacks some by name, places a dtype
        return False


def has(operation: str, like: Tensor) -> bool:
    """Whether the place of `like` has it in its dtype."""
    return offers(operation, like.place, like.dtype)


def offers(operation: str, place: Any, dtype: Any = paddle.float32) -> bool:
    """Whether `place` has it in `dtype`."""
    return (operation, dtype) in _FOUND.get(place, ())


def has_norm(like: Tensor) -> bool:
    """Whether it has `rms_norm`."""
    return has("rms_norm_ext", like) or has("rms_norm", like)


def has_norm_into(like: Tensor) -> bool:
    """Whether it has `rms_norm_into`."""
    return has("rms_norm_ext", like) or has("rms_norm_quant", like)
