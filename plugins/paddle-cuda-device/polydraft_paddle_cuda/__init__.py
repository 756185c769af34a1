"""The Python side of the CUDA device for Paddle: where its library lies, why it sees no GPU, page-locked memory and counters.

polydraft's Paddle backend asks it, and so do tests. It has to be asked after `import paddle`, which loads the library; the device
works without it.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from pathlib import Path
from typing import Any, Final

DEVICE: Final = "polycuda:0"
"""What `paddle.set_device` and `--device` call the first GPU."""
COUNTERS: Final = (
    "copies", "synchronous_copies", "graph_launches", "bytes_in_use", "graph_bytes", "library_products", "own_products",
)  # fmt: skip
"""What `counter` knows: copies queued, copies that the host waited for, graphs launched, bytes of device memory in Paddle's
hands, bytes that captured work was given, which all graphs share, and products queued by cuBLASLt and by the device's own
kernel (those of a replayed graph are not counted again)."""


def library() -> Path:
    """The device's library, in the folder in which Paddle looks for custom devices."""
    return Path(__file__).parent.parent / "paddle_custom_device" / "libpaddle-polycuda.so"


@cache
def _loaded() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library()))
    loaded.polycuda_reason.restype = ctypes.c_char_p
    loaded.polycuda_counter.restype = ctypes.c_int64
    loaded.polycuda_counter.argtypes = [ctypes.c_char_p]
    loaded.polycuda_pinned.restype = ctypes.c_void_p
    loaded.polycuda_pinned.argtypes = [ctypes.c_int, ctypes.c_size_t]
    loaded.polycuda_unpinned.argtypes = [ctypes.c_void_p]
    loaded.polycuda_unpinned.restype = None
    return loaded


def reason() -> str:
    """Why no GPU can be used, as one sentence with the next step; "" when one can."""
    return bytes(_loaded().polycuda_reason()).decode()


def counter(name: str) -> int:
    """One of `COUNTERS`, since the process began. Raises `KeyError` for another name."""
    if name not in COUNTERS:
        raise KeyError(f"the device counts {', '.join(COUNTERS)}, got {name!r}; name one of these")
    return int(_loaded().polycuda_counter(name.encode()))


def graph_memory() -> int:
    """Bytes of device memory that graphs hold for what their work computes on the way, all graphs of the process together."""
    return counter("graph_bytes")


def pinned_memory(index: int, nbytes: int) -> Any:
    """A ctypes array of `nbytes` bytes of page-locked memory, from which and to which GPU `index` copies while the host goes on.
    It is given back with the last reference to it or to a view of it. Raises `MemoryError` where there is none."""
    pointer = _loaded().polycuda_pinned(index, max(nbytes, 1))
    if not pointer:
        raise MemoryError(f"no {nbytes:,} bytes of page-locked memory")
    memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(pointer)
    weakref.finalize(memory, _loaded().polycuda_unpinned, pointer)
    return memory
