"""The Python side of the emulated Paddle device: where its library lies, pinned memory, what it counts, and faults it can have.

polydraft's Paddle backend, tests and tools use it. It has to be asked after `import paddle`, which loads the library; the device
works without it.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from pathlib import Path
from typing import Any, Final

DEVICE: Final = "polyemu:0"
"""What `paddle.set_device` and `--device` call it."""
COUNTERS: Final = (
    "kernels", "copies", "pageable_copies", "synchronous_copies", "graph_launches", "bytes_in_use", "peak_bytes", "graph_bytes",
)  # fmt: skip
"""What `counter` knows: device kernels queued; copies queued, those of them that on a chip would wait, because an end of them is
host memory that is not pinned, and copies that the host waited for; graphs launched; bytes in use and their peak, and bytes among
them that captured work was given, which all graphs share."""
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
    loaded.polyemu_pinned.restype = ctypes.c_void_p
    loaded.polyemu_pinned.argtypes = [ctypes.c_size_t]
    loaded.polyemu_unpinned.restype = None
    loaded.polyemu_unpinned.argtypes = [ctypes.c_void_p]
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


def reason() -> str:
    """Why there is no device: there always is one."""
    return ""


def graph_memory() -> int:
    """Bytes of device memory that graphs hold for what their work computes on the way, all graphs of the process together."""
    return counter("graph_bytes")


def pinned_memory(index: int, nbytes: int) -> Any:
    """A ctypes array of `nbytes` bytes of pinned memory for copies to and from device `index`. It is given back with the last
    reference to it or to a view of it. Raises `MemoryError` where there is none."""
    del index
    pointer = _loaded().polyemu_pinned(max(nbytes, 1))
    if not pointer:
        raise MemoryError(f"no {nbytes:,} bytes of pinned memory")
    memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(pointer)
    weakref.finalize(memory, _loaded().polyemu_unpinned, pointer).atexit = False  # copies may still be queued then
    return memory
