"""Defines `snapshot_output`: one int32 record per sequence, with what every step reports to the host: tokens and slot state.

The runner launches it after `commit_window`; the record is copied to pinned memory behind it. It never changes state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.layout import SNAPSHOT_TOKENS, Snapshot
from polydraft.contracts.sizes import SLOTS, SMALL, WINDOW, Sizes, fitted, several
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT


class SnapshotOutputV1(Args):
    """Buffers of `snapshot_output`. Launch length: sequences.

    A sequence past the end has the record: slot PAD_SLOT, numbers 0, drafted -1, tokens NO_TOKEN.
    """

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    epoch: Buffer = tensor("B", "i32", "Count of requests the slot has served, by slot.")
    out_len: Buffer = tensor("B", "i32", "Tokens emitted, by sequence.")
    out_accepted: Buffer = tensor("B", "i32", "Accepted drafts that were emitted, by sequence.")
    drafted: Buffer = tensor("B", "i32", "Drafts this round verified, by sequence; -1: no decode round.")
    finish: Buffer = tensor("B", "i32", "`Finish` by slot.")
    phase: Buffer = tensor("B", "i32", "`Phase` by slot.")
    kv_len: Buffer = tensor("B", "i32", "Committed rows of the target's cache, by slot.")
    out_tokens: Buffer = tensor("B W", "i32", "Tokens emitted, by sequence; the rest NO_TOKEN.")
    record: Buffer = tensor("B C", "i32", "Columns `Snapshot`, then the W tokens.", access="out")


def golden(a: Any, n: int) -> None:
    """Gather what is known by sequence and by slot into one row."""
    for i, slot in enumerate(a.slot_order[:n]):
        a.record[i, :SNAPSHOT_TOKENS] = 0
        a.record[i, SNAPSHOT_TOKENS:] = NO_TOKEN
        a.record[i, Snapshot.SLOT], a.record[i, Snapshot.DRAFTED] = PAD_SLOT, -1
        if slot < 0:
            continue
        a.record[i, Snapshot.SLOT] = slot
        a.record[i, Snapshot.EPOCH] = a.epoch[slot]
        a.record[i, Snapshot.NUM_TOKENS] = a.out_len[i]
        a.record[i, Snapshot.ACCEPTED] = a.out_accepted[i]
        a.record[i, Snapshot.DRAFTED] = a.drafted[i]
        a.record[i, Snapshot.FINISH] = a.finish[slot]
        a.record[i, Snapshot.PHASE] = a.phase[slot]
        a.record[i, Snapshot.KV_LEN] = a.kv_len[slot]
        a.record[i, SNAPSHOT_TOKENS:] = a.out_tokens[i]


BY_SLOT = ("epoch", "finish", "phase", "kv_len")
BY_SEQUENCE = ("out_len", "out_accepted", "drafted")


def _case(name: str, order: tuple[int, ...], n: int, *, num_slots: int = 5, window: int = 3, seed: int = 1) -> Case:
    """Numbers that differ from field to field and from entry to entry; what they mean is nothing to this kernel."""
    rng = np.random.default_rng(seed)
    count = num_slots * (len(BY_SLOT) + len(BY_SEQUENCE) + window)
    numbers = rng.permutation(max(1000, 100 * count))[:count].astype(np.int32)
    lines = numbers.reshape(-1, num_slots)
    arrays: dict[str, Any] = dict(zip((*BY_SLOT, *BY_SEQUENCE), lines, strict=False))
    arrays["out_tokens"] = np.where(lines[-window:].T % 3 == 0, NO_TOKEN, lines[-window:].T)
    arrays["drafted"] = np.where(arrays["drafted"] % 3 == 0, -1, arrays["drafted"])
    arrays["slot_order"] = np.array([*order, *[PAD_SLOT] * (num_slots - len(order))], np.int32)
    return Case(name, arrays, {}, n, {"record": ((num_slots, SNAPSHOT_TOKENS + window), "i32")})


def cases() -> Iterator[Case]:
    """Named cases of `snapshot_output`."""
    yield _case("another_order_than_slots", (3, 0, 4, 1), 4)
    yield _case("order_shorter_than_the_launch", (2, 4), 4)
    yield _case("beyond_the_launch_length", (2, 4, 0), 2)
    yield _case("whole_batch", (4, 3, 2, 1, 0), 5)
    yield _case("window_of_one", (1, 2), 3, window=1)
    yield _case("empty_batch", (), 3)
    yield _case("no_sequences", (), 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random numbers and a random launch order."""
    (num_slots,) = fitted(sizes, B=several(sizes, int(rng.integers(1, 7))))
    order = tuple(int(s) for s in rng.permutation(num_slots)[: rng.integers(num_slots // 2 + 1 if sizes else 0, num_slots + 1)])
    n, window, seed = int(rng.integers(len(order), num_slots + 1)), int(rng.integers(1, 6)), int(rng.integers(2**31))
    return _case("random", order, n, num_slots=num_slots, window=sizes.get("W", window), seed=seed)


CONTRACT = REGISTRY.add(
    Contract(
        name="snapshot_output",
        version=1,
        unit="seqs",
        args=SnapshotOutputV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Gather what the host wants to know of a step into one record a sequence.",
        source="FastDeploy speculate_save_output, as one record instead of several messages.",
        constraints=(f"C == W + {SNAPSHOT_TOKENS}",),
        feature="dense",
        grows={"B": SLOTS, "W": WINDOW},
    )
)
