"""Finds what the Python packages of custom devices provide besides the runtime that Paddle loads: pinned memory, or why there is
none.

The Paddle device calls it when it is opened and for staging. It does not import Paddle, and a place without a companion is not an
error.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

from polydraft.errors import DeviceError

PACKAGES: Final = {"polycuda": "polydraft_paddle_cuda", "polyemu": "polydraft_paddle_emu"}
"""Kind of place to the package that comes with its runtime."""


def companion(spec: str) -> Any:
    """The package of the place `spec`, or None."""
    name = PACKAGES.get(spec.partition(":")[0], "")
    return importlib.import_module(name) if name and importlib.util.find_spec(name) else None


def reason(spec: str) -> str:
    """Why a kind of place has no device on this machine, in its package's words; "" where it has one, or nobody knows."""
    package = companion(spec)
    return str(package.reason()) if package is not None else ""


def graph_memory(spec: str) -> int:
    """Bytes that captured graphs hold on the place, as far as its package tells them apart from other memory; else 0."""
    package = companion(spec)
    return int(package.graph_memory()) if package is not None else 0


def host_memory(spec: str, nbytes: int) -> Any:
    """Page-locked memory of `nbytes` bytes for copies to and from the place, as something with the buffer protocol; None where
    nobody offers any. Raises `DeviceError` when it is short."""
    package = companion(spec)
    if package is None:
        return None
    try:
        return package.pinned_memory(int(spec.partition(":")[2] or 0), nbytes)
    except MemoryError as error:
        raise DeviceError(f"device {spec}: {error}; lower --max-num-seqs or --max-batched-tokens") from error
