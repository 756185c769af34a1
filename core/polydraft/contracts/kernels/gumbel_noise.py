"""Defines `gumbel_noise`: standard Gumbel noise for every logit, a pure function of seed, position, draw and token.

The sampling verifiers launch it before `sample`. It never keeps a generator's state: the same key and counter give the
same bits on every backend, whatever batch, window or launch the row is part of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, param, tensor
from polydraft.contracts.sizes import ROWS, SLOTS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
"""Left rotations of Threefry-2x32, repeated every eight rounds."""
PARITY = 0x1BD11BDA
"""Third key word is this, exclusive-or both key words."""
DRAW_STRIDE = 1 << 20
"""Counters of one draw: room for 2**21 tokens at two words a counter."""


class GumbelNoiseV1(Args):
    """Arguments of `gumbel_noise`. Preconditions: V <= 2**21 and 0 <= draw < 2**12."""

    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    positions: Buffer = tensor("N", "i32", "Absolute position of each row in its slot's text.")
    seed: Buffer = tensor("B 2", "i32", "Threefry key of each slot: the bits of its low word and of its high word.")
    temperature: Buffer = tensor("B", "f32", "Sampling temperature of each slot; 0: greedy, its rows get zeros.")
    noise: Buffer = tensor("N V", "f32", "-log(-log(u)) with u made from 24 bits.", access="out", pad=0.0)
    ahead: int = param("Added to positions: how far the chosen token lies after the row (1 for a target row).")
    draw: int = param("Which independent draw at that position: a `Draw`.")


def threefry2x32(key: tuple[int, int], counter: tuple[int, Any]) -> tuple[Any, Any]:
    """Return the two 32-bit words of Threefry-2x32 with 20 rounds (Salmon et al. 2011), all numbers unsigned 32-bit. The second
    word of the counter may be an array (int64) of many counters, and so are both results then."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    x, y = (counter[0] + key[0]) & 0xFFFFFFFF, (counter[1] + key[1]) & 0xFFFFFFFF
    for i in range(20):
        rotation = ROTATIONS[i % 8]
        x = (x + y) & 0xFFFFFFFF
        y = ((y << rotation | y >> (32 - rotation)) & 0xFFFFFFFF) ^ x
        if i % 4 == 3:
            injection = i // 4 + 1
            x = (x + schedule[injection % 3]) & 0xFFFFFFFF
            y = (y + schedule[(injection + 1) % 3] + injection) & 0xFFFFFFFF
    return x, y


def gumbel(bits: Any) -> Any:
    """Return the standard Gumbel variate of 32 random bits (of each, where they are an array): u = ((bits >> 8) + 1/2) / 2**24,
    never 0 nor 1.

    Computed plainly in float32, u rounds for k = bits >> 8 from 2**23 on: the largest noise, the one that wins, loses
    its digits or becomes infinite. t = (min(k, 2**24 - 1 - k) + 1/2) / 2**24 is exact in float32, and log(u) is log(t)
    for k < 2**23, else log1p(-t).
    """
    return -np.log(-np.log(((bits >> 8) + 0.5) * 2.0**-24))


def noise_row(a: Any, r: int) -> Array:
    """Return row `r`; token v of absolute position p takes word v % 2 of Threefry(seed, (p, draw * 2**20 + v // 2))."""
    slot = a.row_slot[r]
    if slot < 0 or a.temperature[slot] == 0:
        return np.zeros(a.noise.shape[1])
    key, position = (int(a.seed[slot, 0]) % 2**32, int(a.seed[slot, 1]) % 2**32), int(a.positions[r]) + a.ahead
    v = np.arange(a.noise.shape[1])
    even, odd = threefry2x32(key, (position, a.draw * DRAW_STRIDE + v // 2))
    noise: Array = gumbel(np.where(v % 2 == 0, even, odd))
    return noise


def golden(a: Any, n: int) -> None:
    """Make the noise row by row."""
    for r in range(n):
        a.noise[r] = noise_row(a, r)


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """1 + |noise|: the outer logarithm turns the relative error of the inner one into an absolute one."""
    magnitude = np.zeros_like(a.noise)
    for r in range(n):
        slot = a.row_slot[r]
        if slot >= 0 and a.temperature[slot] != 0:
            magnitude[r] = 1.0 + np.abs(noise_row(a, r))
    return {"noise": magnitude}


SEEDS = ((1, 0), (0, 1), (0xFFFFFFFF, 0x80000000), (0x243F6A88, 0x85A308D3))
"""Seeds of the slots of named cases."""


def _case(
    name: str, rows: Sequence[tuple[int, int]], n: int, *, vocab: int = 7, ahead: int = 1, draw: int = 0,
    seeds: Sequence[tuple[int, int]] = SEEDS, greedy: Sequence[int] = (),
) -> Case:  # fmt: skip
    """Rows are (slot, position); `greedy` lists the slots with temperature 0."""
    temperature = np.array([0 if slot in greedy else 0.5 + slot for slot in range(len(seeds))], np.float32)
    row_slot, positions = np.array(rows, np.int32).T
    arrays = {"row_slot": row_slot.copy(), "positions": positions.copy()}
    arrays |= {"seed": np.array(seeds, np.uint32).view(np.int32), "temperature": temperature}
    return Case(name, arrays, {"ahead": ahead, "draw": draw}, n, {"noise": ((len(rows), vocab), "f32")})


def cases() -> Iterator[Case]:
    """Named cases of `gumbel_noise`."""
    rows = [(2, 5), (2, 6), (-1, 3), (0, 0), (3, 6), (1, 6)]
    yield _case("windows_of_several_slots", rows, 5)
    yield _case("even_vocabulary", rows, 6, vocab=8)
    yield _case("one_token", rows, 5, vocab=1)
    yield _case("greedy_slots_get_zeros", rows, 5, greedy=[0, 3])
    yield _case("draws_are_independent", rows, 4, draw=1)
    yield _case("last_draw", rows, 4, draw=4095, vocab=4)
    yield _case("row_chooses_its_own_position", rows, 4, ahead=0)
    yield _case("far_position", [(3, 1_048_575), (0, 131_072), (1, 2)], 2, ahead=2)
    # Found by search: token 4 of the first and token 6 of the second slot have 24 one and 24 zero bits.
    extremes = [(2162313, 0), (311577, 0)]
    yield _case("extreme_bits_stay_finite_and_exact", [(0, 99), (1, 99)], 2, vocab=8, seeds=extremes)
    yield _case("wide_vocabulary", [(3, 40), (-1, 40)], 2, vocab=515)
    yield _case("all_padding", [(-1, 5), (-7, 0), (0, 1)], 2)
    yield _case("nothing_to_do", rows, 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random seeds, positions and draws, some rows without a slot, some slots greedy."""
    size, num_rows = fitted(sizes, B=int(rng.integers(1, 5)), N=several(sizes, int(rng.integers(1, 6))))
    seeds = [(int(low), int(high)) for low, high in rng.integers(0, 1 << 32, (size, 2))]
    slots = np.where(rng.random(num_rows) < 0.2, -1, rng.integers(0, size, num_rows))
    rows = [(int(slot), int(rng.integers(0, 5000))) for slot in slots]
    return _case(
        "random", rows, launched(rng, sizes, num_rows), vocab=fitted(sizes, V=int(rng.integers(1, 12)))[0],
        ahead=int(rng.integers(0, 4)), draw=int(rng.integers(0, 3)), seeds=seeds,
        greedy=[slot for slot in range(size) if rng.random() < 0.2],
    )  # fmt: skip


CONTRACT = REGISTRY.add(
    Contract(
        name="gumbel_noise",
        version=1,
        unit="any",
        args=GumbelNoiseV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Counter-based Gumbel noise keyed by seed, absolute position, draw and token.",
        source="Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3; Gumbel 1954.",
        tolerance={"noise": 2.0},
        scale=scale,
        constraints=("draw >= 0",),
        feature="sampling",
        grows={"N": ROWS, "B": SLOTS, "V": VOCABULARY},
        independent=("N",),
    )
)
