"""The kernel of `top_n_sigma` in NumPy, and its launch on devices whose memory NumPy can see.

`polydraft_kernels` returns the table. It never copies: other memory is refused when the engine is built.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from polydraft.device import Array
from polydraft.reference.provider import plain
from polydraft_top_n_sigma.contract import CONTRACT


def top_n_sigma(a: Any, n: int) -> None:
    """The kernel: row by row, so that the bits of a row depend on that row alone."""
    for row in np.flatnonzero(a.row_slot[:n] >= 0):
        sigmas, logits = a.top_n_sigma[a.row_slot[row]], a.logits[row]
        finite: Array = logits[np.isfinite(logits)]
        if sigmas > 0 and finite.size:
            logits[logits < finite.max() - sigmas * finite.std(dtype=np.float64)] = -np.inf


def table(device: Any) -> SimpleNamespace:
    """The kernel by its contract; none for a device whose memory NumPy cannot see."""
    if not hasattr(device, "bind_kernel"):
        return SimpleNamespace(providers={}, versions={})
    provider = device.bind_kernel(plain(top_n_sigma))
    return SimpleNamespace(providers={CONTRACT.name: provider}, versions={CONTRACT.name: CONTRACT.version})
