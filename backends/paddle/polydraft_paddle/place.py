"""Owns which place and stream are Paddle's current ones: it has one of each in a process, and several devices may be open.

Devices, kernels, metadata and graphs call `use` before they hand Paddle work. Without that, opening a second device would send
the first one's work to another stream, where its events say nothing about it.
"""

from __future__ import annotations

from typing import Any

import paddle

_STREAMS: dict[str, Any] = {}
_CURRENT = [""]


def use(spec: str) -> None:
    """Make `spec` Paddle's current place, and the compute stream of that place its current stream, unless they are."""
    if spec != _CURRENT[0]:
        paddle.set_device(spec)
        if spec != "cpu":
            paddle.device.set_stream(compute_stream(spec))
        _CURRENT[0] = spec


def compute_stream(spec: str) -> Any:
    """The one Paddle stream on which every device of the place computes."""
    if spec not in _STREAMS:
        _STREAMS[spec] = paddle.device.Stream(spec)
    return _STREAMS[spec]
