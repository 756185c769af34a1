"""Defines `gated_delta`: the gated delta rule over packed rows, with a recurrent state of each slot.

Every gated delta layer launches it once a pass. The state in its cache is that of committed positions only: rows of a window
wait in a ring until a later pass knows how many of them were accepted, and nothing is ever rolled back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Args, Array, Case, Contract, param, tensor
from polydraft.contracts.scenes import grant, pack
from polydraft.device import Buffer
from polydraft.sentinels import PAD_SLOT

EPS = 1e-6
"""Added to the squared length of a query or a key before it is divided by its length."""


class GatedDeltaV1(Args):
    """Arguments of `gated_delta`. For each head, with keys and queries of length 1, alpha = sigmoid(a) and beta = sigmoid(b):

        S_t = S_{t-1} alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,   o_t = S_t q_t

    The rows of a slot lie together, positions ascending by one. Its *committed* positions are those below `kv_len` and below its
    first row. A launch first brings `state` to them: where they end at a block border, from what `borders` holds there (at
    position 0, from nothing); elsewhere over the rows of the ring from `state_len` on. Then it goes on, without storing it, over
    the rows of the ring between the committed positions and its first row (drafts of earlier passes), and over its own rows. Of
    these the last W wait in the ring, since they may be rejected; those before them belong to a prompt, and `state` takes them.

    Position p is place p mod W of the ring. Preconditions: where the committed positions end within a block, the ring has all of
    them from `state_len` on; it has all drafts; and every block that holds a row is granted. In an MTP layer a slot that never
    drafts may lack some of them: a launch then leaves numbers that nobody looks at.
    """

    qkv: Buffer = tensor("N DX", "act", "Queries, keys and values of all heads, in this order.")
    gates: Buffer = tensor("N DG", "act", "a of every head, then b.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    positions: Buffer = tensor("N", "i32", "Absolute position of each row.")
    kv_len: Buffer = tensor("B", "i32", "Committed rows, by slot.")
    block_table: Buffer = tensor("B MB", "i32", "Block of each slot's positions from i * block_size on.")
    state: Buffer = tensor("B DH DV DK", "f32", "S of each slot, behind `state_len` positions.", access="inout")
    state_len: Buffer = tensor("B", "i32", "Positions that the state of each slot has seen.", access="inout")
    ring: Buffer = tensor("B W DC", "act", "Keys, values, a and b of rows that `state` has not seen.", access="inout")
    borders: Buffer = tensor("NB DH DV DK", "f32", "S at the end of each block.", access="inout")
    out: Buffer = tensor("N DO", "act", "o of every head.", access="out", pad=0.0)
    block_size: int = param("Positions of a block.")


def unit(x: Array) -> Array:
    """Return x at length 1."""
    return np.asarray(x / math.sqrt(sum(e * e for e in x) + EPS))


def sigmoid(x: float) -> float:
    """Return the logistic function of x."""
    return 1.0 / (1.0 + math.exp(-x))


def advanced(state: Array, row: Array) -> Array:
    """Return the state [heads, DV, DK] behind one row of the ring."""
    heads, dv, dk = state.shape
    keys, values, a, b = np.split(row, np.cumsum([heads * dk, heads * dv, heads]))
    new = np.empty_like(state)
    for h in range(heads):
        k, v, alpha, beta = unit(keys[h * dk : (h + 1) * dk]), values[h * dv : (h + 1) * dv], sigmoid(a[h]), sigmoid(b[h])
        new[h] = state[h] @ (alpha * (np.eye(dk) - beta * np.outer(k, k))) + beta * np.outer(v, k)
    return new


def golden(a: Any, n: int) -> None:
    """Slot by slot and row by row."""
    a.out[:n] = 0.0
    for slot in dict.fromkeys(a.row_slot[:n]):
        if slot >= 0:
            _run(a, slot, [r for r in range(n) if a.row_slot[r] == slot])


def _run(a: Any, slot: int, rows: Sequence[int]) -> None:
    """The rows of one slot."""
    window, (heads, dv, dk) = a.ring.shape[1], a.state.shape[1:]
    first, end = a.positions[rows[0]], a.positions[rows[-1]] + 1
    committed = min(a.kv_len[slot], first)
    if committed == 0:
        state = np.zeros((heads, dv, dk))
    elif committed % a.block_size == 0:
        state = a.borders[a.block_table[slot, committed // a.block_size - 1]]
    else:
        state = a.state[slot]
        for p in range(a.state_len[slot], committed):
            state = advanced(state, a.ring[slot, p % window])
    a.state[slot], a.state_len[slot] = state, committed
    for p in range(committed, first):
        state = advanced(state, a.ring[slot, p % window])
    for r in rows:
        p = a.positions[r]
        row = np.concatenate([a.qkv[r, heads * dk :], a.gates[r]])
        state = advanced(state, row)
        for h in range(heads):
            a.out[r, h * dv : (h + 1) * dv] = state[h] @ unit(a.qkv[r, h * dk : (h + 1) * dk])
        if (p + 1) % a.block_size == 0:
            a.borders[a.block_table[slot, p // a.block_size]] = state
        if p + window < end:
            a.state[slot], a.state_len[slot] = state, p + 1
        else:
            a.ring[slot, p % window] = row


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """The largest number that goes in: every step keeps a share of the state and adds a share of a value."""
    del n
    largest = np.nanmax(np.abs(np.concatenate([x.ravel() for x in (a.qkv, a.state, a.ring, a.borders)])))
    return dict.fromkeys(("state", "borders", "out"), np.array(largest))


class Run(NamedTuple):
    """Rows of one slot in a case: `waiting` committed ones before them that `state` has not seen, `drafted` ones behind those."""

    slot: int
    first: int
    rows: int
    waiting: int = 0
    drafted: int = 0


def _case(
    name: str, runs: Sequence[Run], *, window: int = 4, block_size: int = 4, heads: int = 2, dk: int = 3, dv: int = 2,
    beyond: int = 1, seed: int = 5,
) -> Case:  # fmt: skip
    """Random rows and states; what a launch has no business to read is NaN. The last `beyond` rows lie beyond the launch."""
    rng = np.random.default_rng(seed)
    plain = [(run.slot, run.first, run.rows) for run in runs]
    row_slot, positions = pack(plain)
    table, num_blocks = grant(rng, plain, block_size=block_size)
    slots, width = len(table), heads * (dk + dv + 2)
    kv_len, state_len = np.full((2, slots), 6, np.int32)
    ring = np.full((slots, window, width), np.nan, np.float32)
    state, borders = (rng.standard_normal((size, heads, dv, dk), np.float32) for size in (slots, num_blocks))
    for run in runs:
        if run.slot < 0:
            continue
        kv_len[run.slot] = committed = run.first - run.drafted
        state_len[run.slot] = committed - run.waiting
        for p in range(committed - run.waiting, run.first):
            ring[run.slot, p % window] = rng.standard_normal(width, np.float32)
        if committed % block_size == 0:
            state[run.slot] = np.nan
    qkv, gates = (rng.standard_normal((len(row_slot), heads * size), np.float32) for size in (2 * dk + dv, 2))
    qkv[row_slot < 0] = gates[row_slot < 0] = np.nan
    arrays = {
        "qkv": qkv, "gates": gates, "row_slot": row_slot, "positions": positions, "kv_len": kv_len, "block_table": table,
        "state": state, "state_len": state_len, "ring": ring, "borders": borders,
    }  # fmt: skip
    out = (len(row_slot), heads * dv), "act"
    return Case(name, arrays, {"block_size": block_size}, len(row_slot) - beyond, {"out": out})


def cases() -> Iterator[Case]:
    """Named cases of `gated_delta`."""
    yield _case("a_text_begins", [Run(1, 0, 3), Run(0, 0, 1), Run(2, 0, 2)])
    yield _case("accepted_rows_reach_the_state", [Run(0, 6, 3, waiting=1), Run(2, 11, 4, waiting=3), Run(1, 5, 1)])
    yield _case("a_prompt_is_longer_than_the_window", [Run(1, 0, 7), Run(0, 5, 6, waiting=1), Run(2, 2, 5, waiting=2)], beyond=0)
    yield _case(
        "rows_end_at_block_borders", [Run(0, 2, 2, waiting=1), Run(1, 3, 6, waiting=3), Run(2, 7, 1, waiting=3)], beyond=0
    )
    yield _case("a_run_begins_at_a_block_border", [Run(2, 4, 2), Run(0, 8, 6), Run(1, 12, 1, waiting=3)])
    yield _case(
        "drafted_rows_stay_out", [Run(1, 7, 1, waiting=1, drafted=2), Run(0, 6, 1, drafted=1), Run(2, 10, 1, 2, 2)], beyond=0
    )
    yield _case("drafts_begin_at_a_block_border", [Run(1, 6, 1, waiting=2, drafted=2), Run(0, 9, 1, drafted=1)])
    yield _case("a_window_of_one_row", [Run(0, 5, 1, waiting=1), Run(1, 6, 3), Run(2, 0, 1)], window=1)
    yield _case("blocks_of_one_position", [Run(0, 5, 2), Run(1, 0, 3)], block_size=1)
    yield _case("values_wider_than_keys", [Run(0, 5, 2, waiting=1), Run(1, 0, 3)], heads=3, dk=2, dv=4)
    yield _case("rows_that_carry_nothing", [Run(PAD_SLOT, 3, 2), Run(1, 5, 2, waiting=1), Run(PAD_SLOT, 0, 1), Run(0, 1, 1)])
    yield _case("nothing_to_do", [Run(0, 1, 2)], beyond=2)


def generate(rng: np.random.Generator) -> Case:
    """Random runs of distinct slots, some of them padding, with rows and drafts that wait."""
    window, size = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    runs = []
    for slot in rng.permutation(size):
        waiting = int(rng.integers(0, window + 1))
        drafted = int(rng.integers(0, window - waiting + 1)) if rng.random() < 0.4 else 0
        first = waiting + drafted + int(rng.integers(0, 9))
        rows = 1 if drafted else int(rng.integers(1, 2 * window + 1))
        runs.append(Run(PAD_SLOT if rng.random() < 0.2 else int(slot), first, rows, waiting, drafted))
    return _case(
        "random", runs, window=window, block_size=int(rng.choice([1, 3, 4])), heads=int(rng.integers(1, 3)),
        dk=int(rng.choice([2, 4])), dv=int(rng.choice([2, 3])), beyond=int(rng.integers(0, 2)), seed=int(rng.integers(1 << 30)),
    )  # fmt: skip


CONTRACT = REGISTRY.add(
    Contract(
        name="gated_delta",
        version=1,
        unit="any",
        args=GatedDeltaV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="The gated delta rule over packed rows; its state has seen committed rows only.",
        source="Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464.",
        tolerance={"state": 4.0, "borders": 4.0, "out": 4.0},
        scale=scale,
        equivalent_mutants={"unpad(block_table)": "entries of blocks in reach are granted, and no other entry is read"},
        constraints=(
            "DX == DH * (2 * DK + DV)", "DG == 2 * DH", "DC == DH * (DK + DV + 2)", "DO == DH * DV", "block_size >= 1",
        ),
        symbols={
            "DX": "query, key and value features of all heads", "DG": "gates of all heads", "DH": "heads",
            "DK": "features of a key", "DV": "features of a value", "DC": "features of a row of the ring",
            "DO": "value features of all heads", "NB": "blocks of the pool",
        },
    )
)  # fmt: skip
