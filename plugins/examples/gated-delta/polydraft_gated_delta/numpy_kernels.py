"""The kernel of `gated_delta` in NumPy: a kernel pack for devices that bind NumPy kernels, those of `cpu` and `reference`.

Enabled beside the family, or left out where a backend brings a kernel of its own. It shares no code with the golden: all heads
at once, and the rule in the form S' = alpha S, S = S' + beta (v - S' k) k^T. Every row is computed by itself in the same shapes,
so its bits depend on nothing else in the launch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from polydraft import hookimpl
from polydraft.device import Array
from polydraft.errors import DeviceError
from polydraft.reference.provider import plain
from polydraft_gated_delta.contract import CONTRACT, EPS


def gated_delta(a: Any, n: int) -> None:
    """Slots one after the other."""
    a.out[:n] = 0.0
    slots = a.row_slot[:n]
    for slot in np.unique(slots[slots >= 0]):
        _run(a, slot, np.flatnonzero(slots == slot))


def _run(a: Any, slot: int, rows: Array) -> None:
    window, size = a.ring.shape[1], a.block_size
    first, end = a.positions[rows[0]], a.positions[rows[-1]] + 1
    committed = min(first, a.kv_len[slot])
    state, seen = a.state[slot], a.state_len[slot]
    if committed % size == 0:
        state[...] = a.borders[a.block_table[slot, committed // size - 1]] if committed else 0.0
    else:
        for p in range(seen, committed):
            _advance(state, a.ring[slot, p % window])
    a.state_len[slot] = committed
    ahead = state.copy()
    for p in range(committed, first):
        _advance(ahead, a.ring[slot, p % window])
    num_queries = state.shape[0] * state.shape[2]
    for r, p in zip(rows, range(first, end), strict=True):
        row = np.concatenate([a.qkv[r, num_queries:], a.gates[r]])
        _advance(ahead, row)
        q = _unit(a.qkv[r, :num_queries].reshape(state.shape[0], 1, -1))
        a.out[r] = (ahead * q).sum(axis=2).ravel()
        if (p + 1) % size == 0:
            a.borders[a.block_table[slot, p // size]] = ahead
        if p + window < end:
            state[...], a.state_len[slot] = ahead, p + 1
        else:
            a.ring[slot, p % window] = row


def _advance(state: Array, row: Array) -> None:
    """The state [heads, DV, DK] behind one row of the ring, in place."""
    heads, dv, dk = state.shape
    keys, values, gates = np.split(row, [heads * dk, heads * (dk + dv)])
    alpha, beta = 0.5 + 0.5 * np.tanh(0.5 * gates.reshape(2, heads))  # the logistic function, without overflow
    k = _unit(keys.reshape(heads, 1, dk))
    state *= alpha[:, None, None]
    error = values.reshape(heads, dv) - (state * k).sum(axis=2)
    state += (beta[:, None] * error)[:, :, None] * k


def _unit(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).sum(axis=2, keepdims=True) + np.float32(EPS)))


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    """One provider. Raises `DeviceError` for a device whose memory NumPy cannot see."""
    if not hasattr(device, "bind_kernel"):
        raise DeviceError(
            f"{CONTRACT.name} has a kernel in NumPy, got the device {device.spec}; give --backend cpu or reference, or enable a "
            "pack that has one for this device instead"
        )
    return SimpleNamespace(
        providers={CONTRACT.name: device.bind_kernel(plain(gated_delta))}, versions={CONTRACT.name: CONTRACT.version}
    )
