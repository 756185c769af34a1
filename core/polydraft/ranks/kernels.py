"""The collectives of devices whose memory is the host's, in NumPy: the reference, the emulator and the CPU backend bind them.

A kernel binds a namespace of arrays and returns what runs for a launch length, as the reference's do. Floats are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.device import Array
from polydraft.ranks.exchange import Group
from polydraft.sentinels import NO_TOKEN

Run = Callable[[int], None]


def kernels(group: Group) -> Mapping[str, Callable[[Any, Limits], Run]]:
    """Every collective of one rank, by contract."""
    made = {
        "all_reduce": _all_reduce, "all_gather": _all_gather, "argmax_pair": _argmax_pair, "broadcast": _broadcast,
        "own_experts": _own_experts,
    }  # fmt: skip
    return {name: partial(bind, group) for name, bind in made.items()}


def _all_reduce(group: Group, a: Any, limits: Limits) -> Run:
    """Sums in one balanced binary tree over the ranks, by every rank for itself: the same bits on all of them."""
    del limits
    swap, x = group.swapper("all_reduce", a.step), a.x

    def run(n: int) -> None:
        terms, apart = list(swap(n, x[:n])), 1
        while apart < len(terms):
            for i in range(0, len(terms) - apart, 2 * apart):
                terms[i] = terms[i] + terms[i + apart]
            apart *= 2
        x[:n] = terms[0]

    return run


def _all_gather(group: Group, a: Any, limits: Limits) -> Run:
    """Copies columns."""
    del limits
    swap, x, out = group.swapper("all_gather", a.step), a.x, a.out
    width, columns = x.shape[1], out.shape[1]

    def run(n: int) -> None:
        for rank, share in enumerate(swap(n, x[:n])):
            begin = rank * width
            out[:n, begin : begin + width] = share[:, : max(columns - begin, 0)]

    return run


def _argmax_pair(group: Group, a: Any, limits: Limits) -> Run:
    """A row's highest logit and its id, of each rank: the first of the highest wins, and ranks are in the order of ids."""
    del limits
    swap, width = group.swapper("argmax_pair", a.step), a.logits.shape[1]
    first = group.rank * width
    valid = min(max(a.num_valid - first, 0), width)

    def run(n: int) -> None:
        pairs = np.empty((n, 2), np.int32)
        highest: Array = pairs[:, 0].view(np.float32)
        if valid:
            logits = a.logits[:n, :valid]
            pairs[:, 1] = ids = np.argmax(logits, axis=1)  # of the first NaN, where there is one
            pairs[:, 1] += first
            highest[:] = logits[np.arange(n), ids]
            highest[np.isnan(highest)] = np.inf
        else:
            highest[:], pairs[:, 1] = -np.inf, NO_TOKEN
        brought = np.stack(swap(n, pairs))
        values = np.ascontiguousarray(brought[:, :, 0]).view(np.float32)
        best, rows = np.argmax(values, axis=0), np.arange(n)
        chooses = np.isfinite(values[best, rows]) & (a.row_slot[:n] >= 0)
        a.tokens[:n] = np.where(chooses, brought[best, rows, 1], NO_TOKEN)

    return run


def _broadcast(group: Group, a: Any, limits: Limits) -> Run:
    """Copies what rank 0 brought."""
    del limits
    swap, x = group.swapper("broadcast", a.step), a.x

    def run(n: int) -> None:
        x[:n] = swap(n, x[:n])[0]

    return run


def _own_experts(group: Group, a: Any, limits: Limits) -> Run:
    """Counts from the rank's first expert."""
    del limits
    first, kept, ids, own = group.rank * a.num_kept, a.num_kept, a.expert_ids, a.own

    def run(n: int) -> None:
        counted = ids[:n] - first
        own[:n] = np.where((ids[:n] >= first) & (counted < kept), counted, -1)

    return run
