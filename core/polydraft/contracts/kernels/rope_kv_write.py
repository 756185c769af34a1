"""Defines `rope_kv_write`: rotate queries and keys by their position and store keys and values in the paged cache.

Every attention layer launches it between its qkv projection and attention. It never grants a block and never reads the
cache.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, LogicalCache, opaque, param, tensor
from polydraft.contracts.kernels.rms_norm import normalize
from polydraft.contracts.scenes import Runs, beyond_of, grant, grouped, in_blocks, pack, random_runs
from polydraft.contracts.sizes import CACHED, SMALL, Sizes, fitted
from polydraft.device import Buffer
from polydraft.sentinels import NO_BLOCK, PAD_SLOT


class RopeKvWriteV1(Args):
    """Arguments of `rope_kv_write`. Preconditions: no two valid rows of a launch share slot and position, no block is
    granted twice, and q_norm and k_norm are given together or not at all."""

    qkv: Buffer = tensor("N Q", "act", "Heads of q, then k, then v: Q = (num_heads + 2 * num_kv_heads) * head_dim.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; a negative slot writes a zero q_out row and no cache row.")
    positions: Buffer = tensor("N", "i32", "Absolute position of each row in its slot's text, below MB * block_size.")
    block_table: Buffer = tensor("B MB", "i32", "Block of each slot's positions from i * block_size on.")
    cache: Any = opaque("cache", "KV cache of the layer; rows without a granted block are not stored.", access="inout")
    meta: Any = opaque("meta", "Forward metadata filled for these rows; None: do without.", optional=True)
    q_norm: Any = opaque("weight", "RMSNorm gain of every q head before rotation; None: off.", shape="D", optional=True)
    k_norm: Any = opaque("weight", "RMSNorm gain of every k head before rotation; None: off.", shape="D", optional=True)
    q_out: Buffer = tensor("N P", "act", "Rotated queries, P = num_heads * head_dim.", access="out", pad=0.0)
    num_heads: int = param("Query heads.")
    num_kv_heads: int = param("Key and value heads; divides num_heads.")
    head_dim: int = param("Elements of a head (D).")
    frequencies: tuple[float, ...] = param(
        "Pair i turns by position * frequencies[i] radians; elements of a head behind these pairs pass unchanged."
    )
    attention_factor: float = param("Factor of all cosines and sines, so of every element that turns.")
    style: Literal["half", "interleaved"] = param(
        '"half" pairs elements (i, i + pairs), with as many pairs as frequencies; "interleaved" pairs (2 * i, 2 * i + 1).'
    )
    block_size: int = param("Positions of a block.")
    eps: float = param("RMSNorm epsilon of q_norm and k_norm.")


def plain_frequencies(dims: int, theta: float) -> tuple[float, ...]:
    """Frequencies of `dims` elements that turn, without any scaling: theta ** (-2 * i / dims) for pair i."""
    return tuple(theta ** (-2.0 * i / dims) for i in range(dims // 2))


def turns(a: Any, length: int) -> tuple[Array, Array]:
    """Cosines and sines, [length, pairs] float64, by which the pairs of a head turn at each position: what the tables of backends
    are made of. `a`: a record of the contract."""
    angle = np.outer(np.arange(length), a.frequencies)
    return np.cos(angle) * a.attention_factor, np.sin(angle) * a.attention_factor


def pair(a: Any, i: int) -> tuple[int, int]:
    """Return the two elements of a head that form rotation pair `i`."""
    return (i, i + len(a.frequencies)) if a.style == "half" else (2 * i, 2 * i + 1)


def rotate(head: Array, a: Any, r: int) -> Array:
    """Return one float64 head of row `r` rotated to its position; every rotated pair stays where it was."""
    out = head.copy()
    for i, frequency in enumerate(a.frequencies):
        angle = int(a.positions[r]) * frequency
        cos, sin = a.attention_factor * math.cos(angle), a.attention_factor * math.sin(angle)
        j, k = pair(a, i)
        out[j] = head[j] * cos - head[k] * sin
        out[k] = head[k] * cos + head[j] * sin
    return out


def heads_of(a: Any, r: int) -> tuple[list[Array], list[Array], list[Array]]:
    """Return row `r` split into its q, k and v heads, q and k normalised where the layer wants it."""
    heads = list(a.qkv[r].reshape(a.num_heads + 2 * a.num_kv_heads, a.head_dim))
    q, k, v = heads[: a.num_heads], heads[a.num_heads : -a.num_kv_heads], heads[-a.num_kv_heads :]
    q = q if a.q_norm is None else [normalize(head, a.q_norm, eps=a.eps, plus_one=False) for head in q]
    k = k if a.k_norm is None else [normalize(head, a.k_norm, eps=a.eps, plus_one=False) for head in k]
    return q, k, v


def place_of(a: Any, r: int) -> tuple[int, int]:
    """Return block and offset where row `r` is stored; the block is negative where none is granted."""
    position = a.positions[r]
    return a.block_table[a.row_slot[r], position // a.block_size], position % a.block_size


def golden(a: Any, n: int) -> None:
    """Row by row and head by head: norm, rotate, store."""
    for r in range(n):
        a.q_out[r] = 0.0
        if a.row_slot[r] < 0:
            continue
        q, k, v = heads_of(a, r)
        a.q_out[r] = np.concatenate([rotate(head, a, r) for head in q])
        block, offset = place_of(a, r)
        for g in range(a.num_kv_heads if block >= 0 else 0):
            rotated = rotate(k[g], a, r)
            for i in range(a.head_dim):
                a.cache.k[block, offset, g, i], a.cache.v[block, offset, g, i] = rotated[i], v[g][i]


def condition(head: Array, a: Any, r: int, *, normalized: bool) -> Array:
    """Return what the error of one rotated head scales with: its pair's magnitude, and the angle, which float32 rounds.

    Elements that only move have none and must be exact.
    """
    out = np.abs(head) if normalized else np.zeros_like(head)
    for i, frequency in enumerate(a.frequencies):
        j, k = pair(a, i)
        out[j] = out[k] = (abs(head[j]) + abs(head[k])) * a.attention_factor * (1.0 + a.positions[r] * frequency)
    return out


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """(|x_j| + |x_k|) * attention_factor * (1 + position * frequency) for both elements of a pair (j, k) that is rotated, x the
    head behind its norm: float32 may round the angle. Elsewhere it is |x| where the head has a norm, and 0, that is exact, where
    it only moves."""
    q_out, keys = np.zeros((len(a.qkv), a.num_heads * a.head_dim)), np.zeros_like(a.cache.k)
    for r in range(n):
        if a.row_slot[r] < 0:
            continue
        q, k, _ = heads_of(a, r)
        q_out[r] = np.concatenate([condition(head, a, r, normalized=a.q_norm is not None) for head in q])
        block, offset = place_of(a, r)
        for g in range(a.num_kv_heads if block >= 0 else 0):
            keys[block, offset, g] = condition(k[g], a, r, normalized=a.k_norm is not None)
    return {"q_out": q_out, "cache.k": keys}


def _case(
    name: str, runs: Runs, *, beyond: int = 1, seed: int = 8, heads: int = 4, kv_heads: int = 2, head_dim: int = 8,
    rope_dims: int = 8, theta: float = 1e4, attention_factor: float = 1.0, style: str = "half", block_size: int = 4,
    norms: bool = False, factor: float = 1.0, ungranted: Collection[tuple[int, int]] = (), pool: int = 0,
) -> Case:  # fmt: skip
    """Random heads; the last `beyond` rows lie beyond the launch. Rows that carry nothing hold NaN."""
    rng = np.random.default_rng(seed)
    row_slot, positions = pack(runs)
    table, num_blocks = grant(rng, runs, block_size=block_size, pool=pool)
    for slot, index in ungranted:
        table[slot, index] = NO_BLOCK
    qkv = rng.standard_normal((len(row_slot), (heads + 2 * kv_heads) * head_dim), np.float32) * np.float32(factor)
    qkv[row_slot < 0] = np.nan
    k, v = rng.standard_normal((2, num_blocks, block_size, kv_heads, head_dim), np.float32)
    q_norm, k_norm = rng.standard_normal((2, head_dim), np.float32)
    arrays: dict[str, Any] = {"qkv": qkv, "row_slot": row_slot, "positions": positions, "block_table": table, "meta": None}
    arrays |= {"cache": LogicalCache(k, v), "q_norm": q_norm if norms else None, "k_norm": k_norm if norms else None}
    params: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    params |= {"frequencies": plain_frequencies(rope_dims, theta), "attention_factor": attention_factor, "style": style}
    params |= {"block_size": block_size, "eps": 1e-5}
    outputs = {"q_out": ((len(row_slot), heads * head_dim), "act")}
    return Case(name, arrays, params, len(row_slot) - beyond, outputs)


MIXED: Runs = [(2, 5, 3), (PAD_SLOT, 2, 1), (0, 0, 6), (3, 11, 2), (PAD_SLOT, 0, 1), (1, 4, 1)]
"""Windows beside a prefill chunk, rows that carry nothing between them, slots in no order."""


def cases() -> Iterator[Case]:
    """Named cases of `rope_kv_write`."""
    yield _case("windows_beside_a_prefill_chunk", MIXED)
    yield _case("interleaved_pairs", MIXED, style="interleaved")
    yield _case("partial_rotation", MIXED, rope_dims=4)
    yield _case("partial_rotation_interleaved", MIXED, rope_dims=6, style="interleaved", theta=1e6)
    yield _case("turned_elements_are_scaled", MIXED, rope_dims=6, attention_factor=1.2)
    yield _case("turned_elements_are_scaled_interleaved", MIXED, rope_dims=4, attention_factor=0.75, style="interleaved")
    yield _case("heads_are_normalised_first", MIXED, norms=True)
    yield _case("epsilon_outweighs_the_squares", MIXED, norms=True, factor=1e-3, rope_dims=4)
    yield _case("one_kv_head", MIXED, kv_heads=1, norms=True, style="interleaved")
    yield _case("as_many_kv_heads_as_heads", MIXED, heads=3, kv_heads=3)
    yield _case("first_position_does_not_turn", [(1, 0, 1), (0, 0, 1), (2, 0, 1)])
    yield _case("around_a_block_border", [(0, 3, 1), (1, 4, 1), (2, 5, 1), (3, 3, 3), (4, 7, 2)], beyond=2)
    yield _case("ungranted_block_is_not_written", [(1, 3, 3), (0, 4, 2), (2, 0, 2)], ungranted=[(1, 1), (0, 1)])
    yield _case("far_position", [(0, 1021, 2), (1, 700, 2)], theta=1e6, block_size=64, beyond=0)
    yield _case("all_padding", [(PAD_SLOT, 0, 3), (0, 1, 1)])
    yield _case("nothing_to_do", [(0, 1, 2)], beyond=2)


def border_case() -> Case:
    """Values at the borders of quantisation, for caches of quantised rows alone: ties, the largest number of an exponent and the
    next one, zeros, numbers beyond the range of exponents, numbers far below the largest of their row, and rows with a NaN or an
    infinity, of which nothing else is left."""
    case = _case("values_at_borders", [(0, 0, 4), (2, 3, 5)], beyond=0)
    heads = case.arrays["qkv"].reshape(9, 8, 8)
    k, v = heads[:, 4:6], heads[:, 6:]
    ties = np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 63.5], np.float32)
    v[0] = ties, ties * np.float32(2.0**-40)
    v[1, 0], v[1, 1] = np.nextafter(ties, np.float32(np.inf)), ties * np.float32(1.0 + 2.0**-7)
    v[2], k[2, 1] = 0.0, 0.0
    v[3] = ties * np.float32(2.0**-105), ties * np.float32(2.0**105)
    v[8, 0] = np.ldexp([1.0, 2.0, 1.5, 0.5, 0.25, 0.75, 3.96, -1.0], [0, *[-16] * 7])
    v[4, 0, 5], v[5, 1, 0], k[6, 1, 2], k[7, 0, 7] = np.nan, -np.inf, np.nan, np.inf
    return case


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random runs of distinct slots, some of them padding, and random switches."""
    runs = random_runs(rng, sizes if "N" not in sizes else {**sizes, "N": sizes["N"] + 1})  # the last row is not launched
    groups, kv_heads, head_dim = int(rng.choice([1, 2, 4])), int(rng.integers(1, 3)), int(rng.choice([4, 6, 8]))
    if "num_blocks" in sizes:  # which are copied and compared one and all
        kv_heads, head_dim = 1, 2
    heads, head_dim = fitted(sizes, num_heads=groups * kv_heads, head_dim=head_dim)
    beyond, seed, rope_dims = (
        beyond_of(rng, sizes),
        int(rng.integers(1 << 30)),
        int(2 * rng.integers(1, head_dim // 2 + 1)),
    )
    theta, style = float(rng.choice([1e4, 1e6])), str(rng.choice(["half", "interleaved"]))
    runs, block_size = in_blocks(sizes, runs, int(rng.choice([2, 4, 16])), spare=2)
    heads, kv_heads = grouped(sizes, heads, kv_heads)
    return _case(
        "random", runs, beyond=beyond, seed=seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope_dims=rope_dims,
        theta=theta, attention_factor=float(rng.choice([1.0, 1.1])), style=style, block_size=block_size,
        norms=bool(rng.integers(2)), pool=sizes.get("num_blocks", 0),
    )  # fmt: skip


CONTRACT = REGISTRY.add(
    Contract(
        name="rope_kv_write",
        version=1,
        unit="any",
        args=RopeKvWriteV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Optional per-head norm of q and k, rotary position embedding, paged store of k and v.",
        source="Su et al. 2021, RoFormer; paged cache after Kwon et al. 2023, PagedAttention.",
        tolerance={"q_out": 6.0, "cache.k": 6.0},
        scale=scale,
        deterministic="run-to-run",
        constraints=(
            "num_heads % num_kv_heads == 0",
            "Q == (num_heads + 2 * num_kv_heads) * head_dim",
            "P == num_heads * head_dim",
            "2 * len(frequencies) <= head_dim",
            "block_size >= 1",
            'style in ("half", "interleaved")',
        ),
        feature="dense",
        compute=True,
        grows=CACHED,
    )
)
