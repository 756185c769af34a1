"""Sets Paddle's current place and stream. Paddle has one of each in a process, and several devices may be open.

Devices, kernels, metadata and graphs call `use` before they give Paddle work. Without that, opening a second device would send
the work of the first to another stream, where its events say nothing about it.
"""

from __future__ import annotations

import atexit
import contextlib
from typing import Any

import paddle

from polydraft_paddle.device_name import take_apart

_STREAMS: dict[str, Any] = {}
_CURRENT = [""]


def use(spec: str) -> None:
    """Make `spec` Paddle's current place, and the compute stream of that place its current stream, unless they are."""
    if spec != _CURRENT[0]:
        paddle.set_device(place_of(spec))
        if spec != "cpu":
            paddle.device.set_stream(compute_stream(spec))
        _CURRENT[0] = spec


def place_of(spec: str) -> Any:
    """What Paddle's functions take for `spec`: of a custom device the place itself, since Paddle reads "cuda:" within a name as
    "gpu:"; else the text."""
    name = take_apart(spec)
    return paddle.CustomPlace(name.kind, name.number) if name.kind in paddle.device.get_all_custom_device_type() else name.place


def compute_stream(spec: str) -> Any:
    """The one Paddle stream on which every device of the place computes."""
    if spec not in _STREAMS:
        if not _STREAMS:
            atexit.register(_settle)
        _STREAMS[spec] = paddle.device.Stream(place_of(spec))
    return _STREAMS[spec]


def _settle() -> None:
    """Wait for what is still queued when the process ends: it must not run on while memory is being given back."""
    for spec in _STREAMS:
        with contextlib.suppress(OSError, RuntimeError):  # of a lost device
            paddle.device.synchronize(place_of(spec))
