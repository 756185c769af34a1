"""Defines `uniform_noise`: one uniform number a row, a pure function of seed, position and draw.

The step program launches it before `verify_rejection`, whose rows compare it with the chance that a draft is accepted. It
never keeps a generator's state: key and counter are those of `gumbel_noise`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, param, tensor
from polydraft.contracts.kernels.gumbel_noise import DRAW_STRIDE, SEEDS, threefry2x32
from polydraft.contracts.sizes import ROWS, SLOTS, SMALL, Sizes, fitted, launched, several
from polydraft.device import Buffer


class UniformNoiseV1(Args):
    """Arguments of `uniform_noise`. Precondition: 0 <= draw < 2**12."""

    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    positions: Buffer = tensor("N", "i32", "Absolute position of each row in its slot's text.")
    seed: Buffer = tensor("B 2", "i32", "Threefry key of each slot: the bits of its low word and of its high word.")
    uniforms: Buffer = tensor("N", "f32", "A multiple of 2**-24 from 0 on, below 1; exact in float32.", access="out", pad=0.0)
    ahead: int = param("Added to positions: how far the token lies after the row.")
    draw: int = param("Which independent draw at that position: a `Draw`.")


def golden(a: Any, n: int) -> None:
    """The upper 24 bits of the first word of Threefry(seed, (position, draw * 2**20))."""
    for r in range(n):
        slot = a.row_slot[r]
        a.uniforms[r] = 0.0
        if slot >= 0:
            key, position = (int(a.seed[slot, 0]) % 2**32, int(a.seed[slot, 1]) % 2**32), int(a.positions[r]) + a.ahead
            a.uniforms[r] = (threefry2x32(key, (position, a.draw * DRAW_STRIDE))[0] >> 8) * 2.0**-24


def _case(
    name: str, rows: Sequence[tuple[int, int]], n: int, *, ahead: int = 0, draw: int = 2,
    seeds: Sequence[tuple[int, int]] = SEEDS,
) -> Case:  # fmt: skip
    """Rows are (slot, position)."""
    row_slot, positions = np.array(rows, np.int32).T
    arrays = {"row_slot": row_slot.copy(), "positions": positions.copy(), "seed": np.array(seeds, np.uint32).view(np.int32)}
    return Case(name, arrays, {"ahead": ahead, "draw": draw}, n, {"uniforms": ((len(rows),), "f32")})


def cases() -> Iterator[Case]:
    """Named cases of `uniform_noise`."""
    rows = [(2, 5), (2, 6), (-1, 3), (0, 0), (3, 6), (1, 6)]
    yield _case("windows_of_several_slots", rows, 5)
    yield _case("draws_are_independent", rows, 5, draw=0)
    yield _case("last_draw", rows, 6, draw=4095)
    yield _case("row_decides_a_later_position", rows, 5, ahead=2)
    yield _case("far_position", [(3, 1_048_575), (0, 131_072), (1, 2)], 2)
    yield _case("all_padding", [(-1, 5), (-7, 0), (0, 1)], 2)
    yield _case("nothing_to_do", rows, 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random seeds, positions and draws, some rows without a slot."""
    size, num_rows = fitted(sizes, B=int(rng.integers(1, 5)), N=several(sizes, int(rng.integers(1, 9))))
    seeds = [(int(low), int(high)) for low, high in rng.integers(0, 1 << 32, (size, 2))]
    slots = np.where(rng.random(num_rows) < 0.2, -1, rng.integers(0, size, num_rows))
    rows = [(int(slot), int(rng.integers(0, 5000))) for slot in slots]
    n = launched(rng, sizes, num_rows)
    return _case("random", rows, n, ahead=int(rng.integers(0, 4)), draw=int(rng.integers(0, 3)), seeds=seeds)


CONTRACT = REGISTRY.add(
    Contract(
        name="uniform_noise",
        version=1,
        unit="any",
        args=UniformNoiseV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Counter-based uniform numbers keyed by seed, absolute position and draw.",
        source="Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3.",
        constraints=("draw >= 0",),
        feature="rejection",
        grows={"N": ROWS, "B": SLOTS},
        independent=("N",),
    )
)
