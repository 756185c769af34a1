"""Faults of quantised KV rows: wrong exponents and wrong rounding in a kernel that stores them.

Faulty backends apply them around `rope_kv_write` of any backend. Each reads what the kernel stored, through the logical accessors
of the cache, and replaces it by what a broken kernel would have left. Rows that are not quantised are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.conformance import fault_injection as by
from polydraft.conformance.target import Proxy
from polydraft.contracts.compare import from_host
from polydraft.contracts.kv_quant import KV_DTYPES, LARGEST, LEAST_NORMAL, Kv, exponents, quantise
from polydraft.device import Array


@dataclass(frozen=True)
class Stored:
    """What one launch stored. Rows are [rows, num_kv_heads, head_dim] float64, in order of block and place; `before` is what lay
    in their places, `values` the numbers that V came from, `kv` how they are kept."""

    k: Array
    v: Array
    before: tuple[Array, Array]
    values: Array
    kv: Kv

    @property
    def both(self) -> tuple[Array, Array]:
        """Keys, then values."""
        return self.k, self.v

    def exponents(self, rows: Array) -> Array:
        """Of rows that are kept like these, int [rows, num_kv_heads]."""
        return exponents(rows, self.kv)

    def moved(self, rows: Array, by_exponents: Array) -> Array:
        """The numbers q of `rows` read with other exponents, int [rows, num_kv_heads]."""
        return np.asarray(np.ldexp(rows, (by_exponents - self.exponents(rows))[..., None]))


Change = Callable[[Stored], tuple[Array, Array]]
"""Keys and values that lie there instead."""


def of_the_next_head(stored: Stored) -> tuple[Array, Array]:
    """Exponents are read one head further."""
    k, v = (stored.moved(rows, np.roll(stored.exponents(rows), -1, axis=1)) for rows in stored.both)
    return k, v


def of_the_next_row(stored: Stored) -> tuple[Array, Array]:
    """Exponents are read one row further."""
    k, v = (stored.moved(rows, np.roll(stored.exponents(rows), -1, axis=0)) for rows in stored.both)
    return k, v


def of_the_keys(stored: Stored) -> tuple[Array, Array]:
    """One exponent for both halves."""
    return stored.k, stored.moved(stored.v, stored.exponents(stored.k))


def not_written(stored: Stored) -> tuple[Array, Array]:
    """The exponents of what was there before."""
    k, v = (stored.moved(rows, stored.exponents(before)) for rows, before in zip(stored.both, stored.before, strict=True))
    return k, v


def too_small(stored: Stored) -> tuple[Array, Array]:
    """Rounded down, so that the largest numbers of a row are cut."""
    most = [LARGEST[stored.kv] * np.ldexp(1.0, stored.exponents(rows) - 1)[..., None] for rows in stored.both]
    k, v = (np.clip(rows, -limit, limit) for rows, limit in zip(stored.both, most, strict=True))
    return k, v


def truncated(stored: Stored) -> tuple[Array, Array]:
    """Conversion to a whole number where rounding was meant."""
    quantum = np.ldexp(1.0, stored.exponents(stored.v))[..., None]
    return stored.k, np.trunc(stored.values / quantum) * quantum


def flushed(stored: Stored) -> tuple[Array, Array]:
    """Numbers below the normal ones of fp8 become zero."""
    k, v = (np.where(np.abs(rows) < _least_normal(stored, rows), 0.0, rows) for rows in stored.both)
    return k, v


def _least_normal(stored: Stored, rows: Array) -> Array:
    return np.asarray(np.ldexp(1.0, stored.exponents(rows) + LEAST_NORMAL)[..., None])


def stores(change: Change) -> by.Break:
    """A backend whose `rope_kv_write` leaves something else."""
    return by.with_table(lambda table, device: {"rope_kv_write": _Spoiled(table.providers["rope_kv_write"], device, change)})


class _Spoiled(Proxy):
    def __init__(self, inner: Any, device: Any, change: Change) -> None:
        super().__init__(inner)
        self._device, self._change = device, change

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        launch, device, change = self._inner.bind(args, limits, workspace), self._device, self._change

        def run(stream: Any, n: int) -> None:
            with by.uncounted(device):
                before = args.cache.read_logical()
            launch(stream, n)
            with by.uncounted(device):
                _spoil(args, device, n, before, change)

        return run


def _spoil(args: Any, device: Any, n: int, before: tuple[Array, Array], change: Change) -> None:
    after = [half.astype(np.float64) for half in args.cache.read_logical()]
    places, values = _placed(args, device, n)
    stored = [half[places] for half in after]
    kv = next((kv for kv in KV_DTYPES if all(np.array_equal(quantise(rows, kv), rows, equal_nan=True) for rows in stored)), None)
    if not len(values) or kv is None:
        return
    found = change(Stored(stored[0], stored[1], (before[0][places], before[1][places]), values, kv))
    for half, rows in zip(after, found, strict=True):
        half[places] = rows
    with np.errstate(over="ignore"):  # numbers of one row by exponents of another
        args.cache.write_logical(*(half.astype(np.float32) for half in after))


def _placed(args: Any, device: Any, n: int) -> tuple[tuple[Array, Array], Array]:
    """Block and place of each row that a launch stores, and its values [rows, num_kv_heads, head_dim]."""
    names = ("qkv", "row_slot", "positions", "block_table")
    qkv, slots, positions, table = (_read(device, getattr(args, name)) for name in names)
    rows = np.flatnonzero(slots[:n] >= 0)
    blocks = table[slots[rows], positions[rows] // args.block_size]
    rows, blocks = rows[blocks >= 0], blocks[blocks >= 0]
    heads = qkv[rows].reshape(len(rows), args.num_heads + 2 * args.num_kv_heads, args.head_dim)
    return (blocks, positions[rows] % args.block_size), heads[:, -args.num_kv_heads :]


def _read(device: Any, buffer: Any) -> Array:
    staging, event = device.staging("mutant.read", buffer.shape, buffer.dtype), device.event()
    device.download(device.stream, staging, buffer, buffer.shape[0])
    event.record(device.stream)
    event.synchronize()
    return from_host(staging.array, buffer.dtype).copy()
