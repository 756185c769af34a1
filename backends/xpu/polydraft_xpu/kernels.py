"""Owns the kernels that are different on a Kunlun XPU, in Paddle operations: which hidden row of each sequence is its newest.

The chip's own operator is fed by the phase and the lengths of a slot. So is this one, in the chip's row order; what it may never
be fed by is a step counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
from polydraft_paddle.ops import at, choose, put
from polydraft_paddle.provider import Kernel, PaddleProvider, plain
from polydraft_paddle.table import PaddleTable

from polydraft.contracts.base import Provider


def select_last_rows(a: Any, n: int) -> None:
    """The row of each drafting sequence lies as far behind the sequence's first row as its newest committed position lies behind
    the first one packed: what the encoder length is to a prefill slot and the accepted count to a decode slot."""
    active = a.draft_slot[:n] >= 0
    start = choose(active, a.seq_start[:n], 0)
    committed_rows = a.draft_position[:n] - paddle.gather(a.positions, start) + 1
    row = choose(active, start + committed_rows - 1, 0)
    picked = at(a.hidden, row)
    put(a.out[:n], choose(active.unsqueeze(1).expand_as(picked), picked, 0.0))


KERNELS: dict[str, Kernel] = {"select_last_rows": plain(select_last_rows)}
"""Contract to kernel, in place of the Paddle backend's."""


class XpuTable(PaddleTable):
    """The Paddle backend's table with this chip's kernels."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        own = {name: PaddleProvider(kernel, device.counters, device.spec) for name, kernel in KERNELS.items()}
        self.providers: Mapping[str, Provider] = {**self.providers, **own}
