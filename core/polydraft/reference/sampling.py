"""The reference backend's choice of tokens: `process_logits`, argmax, counter-based noise and filtered sampling.

The kernel table lists them; target rows and draft rows use the same code. A row's choice depends only on its logits, its slot's
parameters and the noise of its position, not on its neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polydraft.device import Array
from polydraft.sentinels import NO_TOKEN

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
FIRST_CANDIDATES = 256
"""Sampling looks at this many best tokens first; only a flatter distribution needs the whole row sorted."""


def process_logits(a: Any, n: int) -> None:
    """Columns beyond the vocabulary can never be chosen."""
    if a.num_valid < a.logits.shape[1]:
        a.logits[:n][a.row_slot[:n] >= 0, a.num_valid :] = -np.inf


def argmax(a: Any, n: int) -> None:
    """Highest logit, lowest id among equals; NaN rows and padding choose nothing."""
    a.tokens[:n] = best(a.logits[:n], a.row_slot[:n])


def best(logits: Array, row_slot: Array) -> Array:
    """A row whose best logit is not finite chooses nothing. NumPy's argmax returns the first NaN where there is one, which is
    how such rows are found without a scan."""
    tokens = logits.argmax(axis=1)
    top = logits[np.arange(len(tokens)), tokens]
    chosen: Array = np.where((row_slot < 0) | ~np.isfinite(top), NO_TOKEN, tokens)
    return chosen


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds on uint32 arrays that broadcast (Salmon et al. 2011)."""
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ PARITY)
    x0, x1 = counter[0] + k0, counter[1] + k1
    for block in range(5):
        for rotation in ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
            x1 ^= x0
        x0 = x0 + schedule[(block + 1) % 3]
        x1 = x1 + (schedule[(block + 2) % 3] + np.uint32(block + 1))
    return x0, x1


def gumbel(seed: Array, positions: Array, draw: int, vocab: int) -> Array:
    """Noise [rows, vocab] float32 for seeds [rows, 2], the bits of uint32 words, and absolute positions [rows]."""
    seed = seed.view(np.uint32)
    pairs = (vocab + 1) // 2
    key = (seed[:, :1], seed[:, 1:])
    counter = (
        np.broadcast_to(positions.astype(np.uint32)[:, None], (len(positions), pairs)),
        np.arange(pairs, dtype=np.uint32)[None, :] + np.uint32(draw << 20),
    )
    with np.errstate(over="ignore"):
        even, odd = threefry(key, counter)
    bits = np.stack((even, odd), axis=-1).reshape(len(positions), -1)[:, :vocab]
    k = bits >> np.uint32(8)
    # u = (k + 1/2) / 2**24 would round near 1, where the largest noise is made; its distance from the nearer end never does.
    lower = k < np.uint32(1 << 23)
    t = np.where(lower, k, np.uint32((1 << 24) - 1) - k).astype(np.float32)
    t += np.float32(0.5)
    t *= np.float32(2.0**-24)
    noise: Array = -np.log(-np.where(lower, np.log(t), np.log1p(-t)))
    return noise


def gumbel_noise(a: Any, n: int) -> None:
    """Noise rows for slots that sample; zeros for padding and greedy slots."""
    slots = a.row_slot[:n]
    sampling = np.flatnonzero((slots >= 0) & (a.temperature[np.maximum(slots, 0)] > 0))
    a.noise[:n] = 0.0
    if sampling.size:
        chosen = slots[sampling]
        a.noise[sampling] = gumbel(a.seed[chosen], a.positions[sampling] + a.ahead, a.draw, a.noise.shape[1])


def sample(a: Any, n: int) -> None:
    """Greedy rows take the best logit; the others the best of filtered logits plus noise."""
    noise = a.noise
    _choose(a, n, lambda rows: noise[rows])


def noise_and_sample(a: Any, n: int) -> None:
    """Composite `gumbel_noise+sample`: the noise is made for sampling rows only and never stored."""
    noise, chooser = a.parts
    vocab = chooser.logits.shape[1]

    def make(rows: Array) -> Array:
        return gumbel(noise.seed[noise.row_slot[rows]], noise.positions[rows] + noise.ahead, noise.draw, vocab)

    _choose(chooser, n, make)


def _choose(a: Any, n: int, noise_of: Any) -> None:
    slots = a.row_slot[:n]
    tokens = best(a.logits[:n], slots)
    rows = np.flatnonzero((tokens != NO_TOKEN) & (a.temperature[np.maximum(slots, 0)] > 0))
    if rows.size:
        chosen = slots[rows]
        z = a.logits[rows] / a.temperature[chosen, None]
        tokens[rows] = filtered_argmax(z, noise_of(rows), top_k=a.top_k[chosen], top_p=a.top_p[chosen], min_p=a.min_p[chosen])
    a.tokens[:n] = tokens


def filtered_argmax(z: Array, noise: Array, *, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Argmax of z + noise over the tokens that the filters keep, each row by itself. z, noise [rows, V]; parameters [rows]."""
    finite = np.isfinite(z).any(axis=1)
    filtered = finite & (((top_k > 0) & (top_k < z.shape[1])) | (top_p < 1.0) | (min_p > 0.0))
    tokens: Array = (z + noise).argmax(axis=1)
    tokens[~finite] = NO_TOKEN
    for row in np.flatnonzero(filtered):
        kept = kept_tokens(z[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))
        score = z[row, kept] + noise[row, kept]
        winners = kept[score == score.max()]
        tokens[row] = winners.min()
    return tokens


def kept_tokens(z: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """Ids that survive top-k, then top-p, then min-p. Tries the best few first, the whole row only when they do not settle it."""
    size = z.shape[0]
    top = z.max()
    if FIRST_CANDIDATES < size:
        few = np.argpartition(z, size - FIRST_CANDIDATES)[size - FIRST_CANDIDATES :]
        # Everything tied with the smallest of the few must come along, or the tie rule would depend on the partition.
        few = np.flatnonzero(z >= z[few].min())
        settled = 0 < top_k <= FIRST_CANDIDATES
        if not settled and not 0 < top_k < size:
            total = np.exp(z - top).sum(dtype=np.float64)
            settled = float(np.exp(z[few] - top).sum(dtype=np.float64)) >= top_p * total and top_p < 1.0
            if settled:
                return _filter(z, few, 0, top_p, min_p, total)
        if settled:
            return _filter(z, few, top_k, top_p, min_p, None)
    return _filter(z, np.arange(size), top_k, top_p, min_p, None)


def _filter(z: Array, candidates: Array, top_k: int, top_p: float, min_p: float, total: float | None) -> Array:
    order = candidates[np.lexsort((candidates, -z[candidates]))]
    if 0 < top_k < len(order):
        order = order[:top_k]
    mass = np.exp(z[order] - z[order[0]]).astype(np.float64)
    probability = mass / (mass.sum() if total is None else total)
    keep = np.ones(len(order), bool)
    if top_p < 1.0:
        keep = np.cumsum(probability) - probability < top_p
        keep[0] = True
    if min_p > 0.0:
        keep &= probability >= min_p * probability[0]
    kept: Array = order[keep]
    return kept
