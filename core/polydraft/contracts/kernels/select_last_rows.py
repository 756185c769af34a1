"""Defines `select_last_rows`: of each drafting sequence's hidden rows, the one at its newest committed position.

The MTP proposer launches it between the draft's first pass over the target's rows and the passes that draft on. It
never guesses from counters which row that is: position and row offset are explicit inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.sizes import HIDDEN, ROWS, SLOTS, SMALL, Sizes, fitted, launched
from polydraft.device import Buffer
from polydraft.sentinels import PAD_SLOT


class SelectLastRowsV1(Args):
    """Arguments of `select_last_rows`. Precondition: the row of an active sequence lies among its packed rows.

    A sequence packed from row `seq_start` holds consecutive positions, so the wanted row is
    seq_start + draft_position - positions[seq_start]; rows of rejected drafts may follow it. The draft's first pass has the
    target's rows and their positions; later ones have one row a sequence, of which none is selected.
    """

    hidden: Buffer = tensor("R H", "act", "Hidden rows of the packed pass.")
    positions: Buffer = tensor("RP", "i32", "Absolute position of each packed row; there may be fewer than hidden rows.")
    seq_start: Buffer = tensor("B", "i32", "First packed row of each sequence, in launch order.")
    draft_slot: Buffer = tensor("B", "i32", "Slot of each sequence that drafts; negative: the sequence does not.")
    draft_position: Buffer = tensor("B", "i32", "Position of each drafting sequence's newest committed row.")
    out: Buffer = tensor("B H", "act", "The row of each sequence, moved bit for bit.", access="out", pad=0.0)


def golden(a: Any, n: int) -> None:
    """Copy one row a sequence; a sequence that does not draft gets a zero row."""
    for i in range(n):
        a.out[i] = 0.0
        if a.draft_slot[i] >= 0:
            start = a.seq_start[i]
            a.out[i] = a.hidden[start + a.draft_position[i] - a.positions[start]]


Sequences = Sequence[tuple[int, int, int, int]]
"""Slot (negative: packed, yet drafts no further), first position, packed rows, rows up to the committed one."""


def _case(name: str, sequences: Sequences, n: int, *, seed: int = 6, capacity: int = 0, width: int = 4) -> Case:
    """Pack the sequences one after the other; two spare rows and `capacity` spare sequences follow."""
    rng = np.random.default_rng(seed)
    num_rows = sum(rows for _, _, rows, _ in sequences) + 2
    size = len(sequences) + capacity
    positions = np.zeros(num_rows, np.int32)
    seq_start, draft_position = np.zeros(size, np.int32), np.zeros(size, np.int32)
    draft_slot = np.full(size, PAD_SLOT, np.int32)
    row = 0
    for i, (slot, first, rows, wanted) in enumerate(sequences):
        positions[row : row + rows] = first + np.arange(rows)
        seq_start[i], draft_slot[i] = row, slot
        draft_position[i] = first + wanted - 1 if slot >= 0 else 0
        row += rows
    hidden = rng.standard_normal((num_rows, width), np.float32)
    arrays = {"hidden": hidden, "positions": positions, "seq_start": seq_start, "draft_slot": draft_slot}
    return Case(name, {**arrays, "draft_position": draft_position}, {}, n, {"out": ((size, width), "act")})


def cases() -> Iterator[Case]:
    """Named cases of `select_last_rows`."""
    yield _case("rejected_rows_follow_the_wanted_one", [(2, 7, 4, 1), (0, 5, 4, 4), (1, 9, 4, 2)], 3)
    yield _case("prefill_chunk_beside_windows", [(3, 12, 3, 2), (0, 0, 6, 6), (1, 20, 3, 3)], 3, capacity=1)
    yield _case("last_chunk_of_a_long_prompt", [(1, 16, 5, 5), (0, 30, 1, 1)], 2)
    yield _case("idle_sequences_between", [(-1, 0, 5, 0), (2, 8, 3, 2), (-1, 0, 0, 0), (0, 3, 3, 3)], 4, capacity=2)
    yield _case("resumed_prefill_is_no_special_case", [(0, 40, 7, 7), (4, 1, 2, 1)], 2)
    yield _case("every_sequence_idle", [(-1, 0, 2, 0), (-1, 0, 2, 0)], 2)
    yield _case("later_sequences_stay", [(1, 4, 3, 1), (0, 6, 3, 3), (2, 8, 3, 2)], 1)
    yield _case("nothing_to_do", [(1, 4, 3, 1)], 0)
    yield _later_pass()


def _later_pass() -> Case:
    """One row a sequence, in a buffer that has more of them than there are positions."""
    case = _case("one_row_a_sequence", [(2, 7, 1, 1), (-1, 0, 1, 0), (0, 5, 1, 1)], 3, capacity=1)
    return replace(case, arrays={**case.arrays, "positions": case.arrays["positions"][:4]})


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random windows and chunks, some sequences idle, slots in no order."""
    (size,) = fitted(sizes, B=int(rng.integers(1, 7)))
    slots = np.where(rng.random(size) < 0.25, PAD_SLOT, rng.permutation(size + 2)[:size])
    rows = rng.integers(1, 7, size)
    rows[0] += max(0, sizes.get("R", 0) - 2 - rows.sum())
    sequences = [
        (int(slot), int(rng.integers(0, 30)), int(num), int(rng.integers(1, num + 1)))
        for slot, num in zip(slots, rows, strict=True)
    ]
    spare, n, seed = int(rng.integers(0, 3)), launched(rng, sizes, size), int(rng.integers(1 << 30))
    spare = 0 if "B" in sizes else spare
    (width,) = fitted(sizes, H=4)
    return _case("random", sequences, n, seed=seed, capacity=spare, width=width)


CONTRACT = REGISTRY.add(
    Contract(
        name="select_last_rows",
        version=1,
        unit="seqs",
        args=SelectLastRowsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Hidden row at each drafting sequence's newest committed position; zero rows for the others.",
        source="FastDeploy eagle_get_self_hidden_states and eagle_gather_hidden_states, as one contract.",
        constraints=("RP <= R",),
        equivalent_mutants={"plus(draft_slot)": "only the sign of a slot is read, and this leaves every sign as it is"},
        feature="dense",
        compute=True,
        grows={"B": SLOTS, "R": ROWS, "H": HIDDEN},
        independent=("H",),
    )
)
