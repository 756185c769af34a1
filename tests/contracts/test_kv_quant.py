"""Quantised KV rows: the definition against exact arithmetic, the reference's own arithmetic against the definition, and what the
harness lets a kernel be off by."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from polydraft.conformance.harness import check_kernel, run_golden
from polydraft.contracts import REGISTRY
from polydraft.contracts.kernels.rope_kv_write import border_case
from polydraft.contracts.kv_quant import BROKEN, KV_DTYPES, LARGEST, exponents, quanta, quantise
from polydraft.reference.device import ReferenceDevice
from polydraft.reference.kv_grid import to_grid
from polydraft.reference.table import NumpyTable

Array = Any
EIGHTHS = [Fraction(m, 8) for m in range(16)]
Q = {
    "int8": [Fraction(q) for q in range(128)],
    "fp8": [m * Fraction(2) ** -6 for m in EIGHTHS] + [m * Fraction(2) ** p for p in range(-5, 9) for m in EIGHTHS[8:]][:-1],
}
"""The magnitudes that a number q may have, in order: whole ones; the 127 finite ones of E4M3."""
each_kv = pytest.mark.parametrize("kv", KV_DTYPES)


def rows(count: int = 3000) -> Array:
    """Rows of every magnitude that float32 has, and those at the borders."""
    rng = np.random.default_rng(3)
    some = rng.standard_normal((count, 8)) * np.exp2(rng.integers(-140, 125, (count, 1)))
    ties = np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 63.5])
    special = [ties, ties * 1.0000001, ties * 0.9999999, np.zeros(8), ties * 2.0**105, ties * 2.0**-105]
    return np.concatenate([some, special]).astype(np.float32)


def exact(row: Array, kv: str) -> list[Fraction]:
    """By the sentence of the definition, in fractions."""
    x = [Fraction(float(one)) for one in row]
    largest = max(map(abs, x))
    e = next((e for e in range(-100, 101) if largest <= LARGEST[kv] * Fraction(2) ** e), 100)
    quantum = Fraction(2) ** e
    return [nearest(one / quantum, kv) * quantum for one in x]


def nearest(x: Fraction, kv: str) -> Fraction:
    """Of the numbers q; between two, the one at an even place: whole numbers and codes of E4M3 are even or odd in turn."""
    q = Q[kv]
    place = min(range(len(q)), key=lambda i: (abs(abs(x) - q[i]), i % 2))
    return q[place] * (-1 if x < 0 else 1)


@each_kv
def test_what_is_kept_is_what_the_sentence_says(kv: str):
    some = rows(60)
    assert [[Fraction(float(one)) for one in row] for row in quantise(some, kv)] == [exact(row, kv) for row in some]


@each_kv
def test_what_is_on_the_grid_stays(kv: str):
    kept, most = quantise(rows(), kv), LARGEST[kv] * 2.0**100
    np.testing.assert_array_equal(quantise(kept, kv), kept)
    tipped = exponents(rows(), kv) - exponents(kept, kv)  # where a largest number was rounded to half of what there may be
    assert set(tipped.tolist()) == ({0} if kv == "int8" else {0, 1})
    assert (np.abs(kept - np.clip(rows(), -most, most)) <= quanta(rows(), kv) / 2).all()


@each_kv
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_broken_row_reads_as_nan_and_no_other_does(bad: float, kv: str):
    some = rows(4)
    some[2, 5] = bad
    assert [i for i, row in enumerate(quantise(some, kv)) if np.isnan(row).all()] == [2]
    assert np.isnan(quanta(some, kv)[2]).all()
    assert np.isfinite(quantise(some, kv)[[0, 1, 3]]).all()
    assert exponents(some, kv)[2] == BROKEN
    np.testing.assert_array_equal(to_grid(some, kv), quantise(some, kv))


@each_kv
def test_the_references_arithmetic_is_the_definitions(kv: str):
    np.testing.assert_array_equal(to_grid(rows(), kv), quantise(rows(), kv))
    assert to_grid(rows(), kv).dtype == np.float32


def test_the_quanta_of_fp8_are_those_of_e4m3():
    row = np.array([448.0, 224.0, 1.0, 0.99, 2.0**-6, 2.0**-7, 0.0, -17.0])
    assert quanta(row, "fp8").tolist() == [32.0, 16.0, 0.125, 0.0625, 2.0**-9, 2.0**-9, 2.0**-9, 2.0]


# -- the harness ---------------------------------------------------------------------------------------
def stored_otherwise(change: Any, kv: Any = "int8") -> Any:
    """The verdict over a reference whose stored rows are changed behind the launch: `change(k, v)`, of all rows."""
    device = ReferenceDevice()
    table = NumpyTable(device)
    inner = table.providers["rope_kv_write"]

    class Provider:
        def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
            launch = inner.bind(args, limits, workspace)

            def run(stream: Any, n: int) -> None:
                launch(stream, n)
                change(*args.cache.kv)

            return run

        def workspace_bytes(self, args: Any, limits: Any) -> int:
            return 0

    table.providers = {**table.providers, "rope_kv_write": Provider()}
    return check_kernel(REGISTRY["rope_kv_write"], border_case(), device, table, kv=kv)


@each_kv
def test_the_right_kernel_passes(kv: str):
    assert stored_otherwise(lambda k, v: None, kv).ok


def written() -> tuple[int, int]:
    """Head and flat row of a stored row that turns and is sound: the second of the case."""
    case = border_case()
    return 0, int(case.arrays["block_table"][0, 0]) * 4 + 1


@each_kv
def test_keys_may_be_a_quantum_off_and_values_may_not(kv: Any):
    head, row = written()
    want = run_golden(REGISTRY["rope_kv_write"], border_case(), kv=kv)
    k = want["cache.k"].value.reshape(-1, 2, 8)[row, head]
    quantum = float(quanta(k, kv)[3])

    def moved(quanta_off: float, half: int) -> Any:
        def change(k: Array, v: Array) -> None:
            (k, v)[half][head, row, 3] += np.float32(quanta_off * quantum)

        return stored_otherwise(change, kv)

    assert moved(1.0, 0).ok
    assert [one.argument for one in moved(2.0, 0).mismatches] == ["cache.k"]
    assert [one.argument for one in moved(1.0, 1).mismatches] == ["cache.v"]


def test_a_row_that_is_left_as_it_was_shows():
    """Also where quantisation makes old and new numbers alike."""
    head, row = written()
    want = run_golden(REGISTRY["rope_kv_write"], border_case(), kv="int8")["cache.k"]
    before = run_golden(REGISTRY["rope_kv_write"], border_case())["cache.k"].before.reshape(-1, 2, 8)[row, head]

    def change(k: Array, v: Array) -> None:
        k[head, row] = quantise(before, "int8")

    assert not stored_otherwise(change).ok
    assert np.isnan(want.before.reshape(-1, 2, 8)[row, head]).all(), "no element of a written row counts as kept"


def test_values_outside_what_was_written_are_kept():
    def change(k: Array, v: Array) -> None:
        v[0, -1, 0] = np.nan if np.isfinite(v[0, -1, 0]) else 0.0

    verdict = stored_otherwise(change)
    assert [one.argument for one in verdict.mismatches] == ["cache.v"]
