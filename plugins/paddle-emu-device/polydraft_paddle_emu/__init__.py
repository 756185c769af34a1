"""The Python side of the emulated Paddle device: where its library lies, what it counts, and the faults it can be told to have.

Tests and tools use it. It has to be asked after `import paddle`, which loads the library; the device works without it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

DEVICE: Final = "polyemu:0"
"""What `paddle.set_device` and `--device` call it."""
COUNTERS: Final = ("kernels", "copies", "synchronous_copies", "graph_launches", "bytes_in_use", "peak_bytes", "graph_bytes")
"""What `counter` knows: device kernels queued, copies queued, copies that the host waited for, graphs launched, bytes in use and
their peak, and bytes among them that captured work was given, which all graphs share."""
KNOBS: Final = ("latency_us", "copies_until_failure", "bytes_limit", "lost")
"""What `set_knob` knows: microseconds that every piece of work takes at least; copies until one fails (-1: none does); bytes of
device memory; and, not 0, a device that answers nothing any more."""


def library() -> Path:
    """The device's library, in the folder in which Paddle looks for custom devices."""
    return Path(__file__).parent.parent / "paddle_custom_device" / "libpaddle-polyemu.so"


@cache
def _loaded() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library()))
    loaded.polyemu_counter.restype = ctypes.c_int64
    loaded.polyemu_counter.argtypes = [ctypes.c_char_p]
    loaded.polyemu_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    return loaded


def counter(name: str) -> int:
    """One of `COUNTERS`, since the process began. Raises `KeyError` for another name."""
    if name not in COUNTERS:
        raise KeyError(f"the device counts {', '.join(COUNTERS)}, got {name!r}; name one of these")
    return int(_loaded().polyemu_counter(name.encode()))


def set_knob(name: str, value: int) -> None:
    """Set one of `KNOBS` for the process. Raises `KeyError` for another name."""
    if name not in KNOBS:
        raise KeyError(f"the device has the knobs {', '.join(KNOBS)}, got {name!r}; name one of these")
    _loaded().polyemu_set(name.encode(), value)
