"""Defines `scatter`: staged runs of words into slot columns, which is how requests reach the device.

A step that admits requests or grants blocks launches it first. Token history, block tables, sampling parameters and whatever a
plugin adds are columns alike, so a backend never learns their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, columns, tensor
from polydraft.contracts.sizes import ROWS, SLOTS, SMALL, WORDS, Sizes, fitted, launched
from polydraft.device import Buffer


class Run(IntEnum):
    """Word of a run."""

    COLUMN = 0
    """Index into the columns that the launch is bound to."""
    SLOT = 1
    """The slot that is written; negative: no run."""
    START = 2
    """First place that is written in the slot's row of the column; 0 in a column [B]."""
    COUNT = 3
    """Words written."""
    OFFSET = 4
    """First word of the run in the payload."""


def payload_words(runs: Array) -> int:
    """Words of the payload that these runs [n, 5] reach."""
    real = runs[runs[:, Run.SLOT] >= 0]
    return int((real[:, Run.OFFSET] + real[:, Run.COUNT]).max(initial=0))


class ScatterV1(Args):
    """Buffers of `scatter`. Launch length: runs. At most one run of a launch names a column of a slot, and each lies within its
    column and within the payload; one of no words may begin at the end of either."""

    runs: Buffer = tensor("U 5", "i32", "Words `Run`: column, slot (negative: no run), start, count, offset into the payload.")
    payload: Buffer = tensor("T", "i32", "The words of all runs; those for a column of floats are the bits of a float32.")
    columns: tuple[Buffer, ...] = columns("Slot columns; places that no run names keep what they hold.")


def golden(a: Any, n: int) -> None:
    """Copy each run word by word."""
    for run in a.runs[:n]:
        slot = int(run[Run.SLOT])
        if slot < 0:
            continue
        column = a.columns[run[Run.COLUMN]]
        for i in range(run[Run.COUNT]):
            word = a.payload[run[Run.OFFSET] + i]
            value = np.array([word], np.int32).view(np.float32)[0] if column.dtype.kind == "f" else word
            place = slot if column.ndim == 1 else (slot, run[Run.START] + i)
            column[place] = value


NUM_SLOTS = 5
WIDTHS = (None, None, 3, 4, 6)
"""Of the columns of a case; None: a column [B]."""
FLOATS = (1, 3)
"""Columns of floats among them."""
MAX_RUNS, MAX_WORDS = 16, 96


def _columns(num_slots: int = NUM_SLOTS, widths: Sequence[int | None] = WIDTHS) -> tuple[Array, ...]:
    """Old contents everywhere, each number once, so that a place that is left alone or taken for another shows."""
    made = []
    for i, width in enumerate(widths):
        old = 1000 * (i + 1) + np.arange(num_slots * (width or 1)).reshape((num_slots, width) if width else (num_slots,))
        made.append(old.astype(np.float32 if i in FLOATS else np.int32))
    return tuple(made)


def _case(
    name: str, rows: Sequence[tuple[int, int, int, Sequence[float]]], n: int, *, num_slots: int = NUM_SLOTS,
    widths: Sequence[int | None] = WIDTHS, max_runs: int = MAX_RUNS, max_words: int = MAX_WORDS,
) -> Case:  # fmt: skip
    """Rows are (column, slot, start, values)."""
    runs, payload = [], [7, 8]  # a payload may begin before its first run
    for column, slot, start, values in rows:
        runs.append((column, slot, start, len(values), len(payload)))
        kind = np.float32 if column in FLOATS else np.int32
        payload += np.array(values, kind).view(np.int32).tolist()
    runs += [(0, 2, 0, 1, 0)] * (max_runs - len(runs))  # what an earlier step has left behind
    payload += [9] * (max_words - len(payload))
    arrays = {"runs": np.array(runs, np.int32), "payload": np.array(payload, np.int32), "columns": _columns(num_slots, widths)}
    return Case(name, arrays, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `scatter`."""
    rows: list[tuple[int, int, int, Sequence[float]]] = [
        (2, 3, 0, (11, 12, 13)), (0, 1, 0, (14,)), (4, 0, 2, (15, 16)), (1, 4, 0, (0.5,)), (3, 2, 1, (-1.5, 2.5, 1e-8)),
        (4, 4, 5, (17,)), (2, 1, 1, (18,)), (0, 3, 0, (2**31 - 1,)),
    ]  # fmt: skip
    yield _case("columns_of_every_kind", rows, 8)
    yield _case("stale_runs_beyond_the_launch_length", rows, 3)
    yield _case("run_that_names_no_slot", [rows[0], (1, -1, 0, (3.0,)), (4, -1, 1, (20, 21)), rows[3]], 4)
    yield _case("run_of_no_words", [(4, 2, 3, ()), rows[2], (2, 0, 0, ())], 3)
    yield _case("first_and_last_place_of_the_last_slot", [(4, 4, 0, (22, 23, 24, 25, 26, 27)), (2, 4, 2, (28,))], 2)
    at_end = [rows[0], (1, 2, 0, ()), (4, 1, 0, ())]
    yield _case("runs_of_no_words_at_the_end_of_the_payload", at_end, 3, max_words=5)
    bits = [(1, 0, 0, (-0.0,)), (3, 4, 0, (float("inf"), -2.0, 1e-38, 3e38)), (0, 4, 0, (-(2**31),))]
    yield _case("floats_are_bits_and_integers_have_signs", bits, 3)
    yield _case("nothing_to_do", rows, 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random runs, at most one for a column of a slot, some naming no slot."""
    (max_runs,) = fitted(sizes, U=MAX_RUNS)
    num_slots, max_words = fitted(sizes, B=max(NUM_SLOTS, max_runs // 4), T=max(MAX_WORDS, 6 * max_runs))
    widths = (*WIDTHS[:-1], sizes["T"] // 5) if "T" in sizes else WIDTHS
    pairs = rng.permutation(len(WIDTHS) * num_slots)[: rng.integers(3 * max_runs // 4 if sizes else 1, max_runs)]
    rows: list[tuple[int, int, int, Sequence[float]]] = []
    left = max_words - 2
    for pair in pairs.tolist():
        column, slot = pair % len(WIDTHS), pair // len(WIDTHS)
        width = widths[column] or 1
        start = int(rng.integers(0, width))
        start, least = (0, width) if width > 6 else (start, 0)  # a long run goes from end to end
        values = rng.integers(-200_000, 200_000, int(rng.integers(least, width - start + 1))).tolist()[:left]
        left -= len(values)
        rows.append((column, slot if rng.random() < 0.85 else -1, start, values))
    n = launched(rng, sizes, len(rows), least=0)
    return _case("random", rows, n, num_slots=num_slots, widths=widths, max_runs=max_runs, max_words=max_words)


CONTRACT = REGISTRY.add(
    Contract(
        name="scatter",
        version=1,
        unit="runs",
        args=ScatterV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Write staged runs of words into slot columns.",
        source="FastDeploy insert_tasks, which writes such fields one host call at a time; vLLM's staged writes of ranges.",
        equivalent_mutants={"reverse(runs)": "no two runs name the same place, so their order is free"},
        feature="dense",
        symbols={"U": "staged runs", "T": "words of staged runs"},
        grows={"U": ROWS, "B": SLOTS, "T": WORDS},
    )
)
