"""Which of Paddle's fused operations a place has, found out when it is opened.

The kernels of `kernels/numeric.py` ask `has`, and do with several operations what a place has not in one. A Kunlun XPU is not
tried: there Paddle takes from the CPU what it lacks, and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import paddle

from polydraft_paddle.installation import set_fallback
from polydraft_paddle.ops import Tensor, direct


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, in float32."""
    return paddle.incubate.nn.functional.fused_rms_norm(x, gain, None, eps, x.ndim - 1)[0]


def rms_norm_into(out: Tensor, inverse: Tensor, x: Tensor, gain: Tensor, eps: float) -> None:
    """RMSNorm of rows `x` [n, R] straight over `out`, float32, on a place that has it; `inverse` [n] float32 may hold anything
    afterwards. Since Paddle 3.3: before, it has another name and writes elsewhere."""
    direct.fused_rms_norm_quant(x, None, None, gain, None, eps, 1, -1.0, 0, 0.0, 0.0, out=(out, inverse, inverse))


TRIALS: Final[dict[str, Callable[[Tensor], object]]] = {
    "rms_norm": lambda row: rms_norm(row, row[0], 1e-6),
    "rms_norm_into": lambda row: rms_norm_into(paddle.zeros_like(row), row[0, :1], row, row[0], 1e-6),
    "norm": lambda row: direct.norm(row, -1, 1e-6, False),
    "swiglu": lambda row: direct.swiglu(row, None),
    "logsumexp": lambda row: direct.logsumexp(row, [-1], True, False),
    "linear": lambda row: direct.linear_v2(row, row, row[0, :1], True),
}
"""Operation to what tries it on a row [1, 8] float32."""
_FOUND: dict[Any, frozenset[str]] = {}


def learn(place: Any) -> None:
    """Find out what `place`, which is being opened and is current, has."""
    if place.is_xpu_place():
        return
    found, row = set(), paddle.ones([1, 8], "float32")
    allowed = set_fallback(allowed=False)
    try:
        for name, trial in TRIALS.items():
            try:
                trial(row)
            except (RuntimeError, OSError, AttributeError):  # Paddle 3.2 lacks some by name
                continue
            found.add(name)
    finally:
        set_fallback(allowed=allowed)
    _FOUND[place] = frozenset(found)


def has(operation: str, like: Tensor) -> bool:
    """Whether the place of `like` has it in its dtype: they were tried in float32."""
    return like.dtype == paddle.float32 and operation in _FOUND.get(like.place, ())
