"""Defines `paged_attention`: causal grouped-query attention of packed rows over their slots' paged keys and values.

Every attention layer launches it after `rope_kv_write`, which has stored the row's own key. It never writes the cache
and never lets a key beyond a row's position, or in front of its window, count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, LogicalCache, opaque, param, tensor
from polydraft.contracts.kernels.rope_kv_write import MIXED
from polydraft.contracts.scenes import Runs, beyond_of, grant, grouped, in_blocks, pack, random_runs
from polydraft.contracts.sizes import CACHED, SMALL, Sizes, fitted
from polydraft.device import Buffer
from polydraft.sentinels import PAD_SLOT


class PagedAttentionV1(Args):
    """Arguments of `paged_attention`. Preconditions: every block that holds a position 0..positions[r] of a valid row is
    granted, and the rows of a slot lie together, positions ascending by one.

    Later entries of the table may be NO_BLOCK, slots may share blocks, and what a row does not attend to may be NaN.
    """

    q: Buffer = tensor("N P", "act", "Rotated queries, P = num_heads * head_dim.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    positions: Buffer = tensor("N", "i32", "Absolute position of each row; it attends to keys of its slot up to this one.")
    block_table: Buffer = tensor("B MB", "i32", "Block of each slot's positions from i * block_size on.")
    cache: Any = opaque("cache", "KV cache of the layer.")
    meta: Any = opaque("meta", "Forward metadata filled for these rows; None: do without.", optional=True)
    out: Buffer = tensor("N P", "act", "Weighted values, heads in q's order.", access="out", pad=0.0)
    num_heads: int = param("Query heads; head h reads key/value head h // (num_heads / num_kv_heads).")
    num_kv_heads: int = param("Key and value heads; divides num_heads.")
    head_dim: int = param("Elements of a head.")
    block_size: int = param("Positions of a block.")
    softmax_scale: float = param("Factor of every score before the softmax, usually head_dim ** -0.5.")
    sliding_window: int = param(
        "Keys that a row attends to at most, its own the last of them; 0: all. Other than 0 for those alone who declare the "
        "capability sliding_window."
    )


def attend(a: Any, r: int, h: int, blocks: Array, offsets: Array) -> tuple[Array, Array]:
    """Return one head's output for row `r` over the keys at `offsets` of `blocks`, and what its error scales with.

    That is the weighted sum of absolute values, times 1 + the largest sum of absolute terms of a score: exp turns an
    absolute error of a score into a relative one of its weight.
    """
    q = a.q[r, h * a.head_dim : (h + 1) * a.head_dim]
    g = h // (a.num_heads // a.num_kv_heads)
    terms = q * a.cache.k[blocks, offsets, g] * a.softmax_scale
    scores = terms.sum(axis=1)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    values = a.cache.v[blocks, offsets, g]
    return weights @ values, weights @ np.abs(values) * (1.0 + np.abs(terms).sum(axis=1).max())


def attend_all(a: Any, n: int, out: Array, magnitude: Array) -> None:
    """Fill `out` and `magnitude` row by row and head by head; rows that carry nothing become zero."""
    for r in range(n):
        out[r] = magnitude[r] = 0.0
        slot = a.row_slot[r]
        if slot < 0:
            continue
        first = max(a.positions[r] + 1 - a.sliding_window, 0) if a.sliding_window else 0
        keys = np.arange(first, a.positions[r] + 1)
        blocks, offsets = a.block_table[slot, keys // a.block_size], keys % a.block_size
        for h in range(a.num_heads):
            head = slice(h * a.head_dim, (h + 1) * a.head_dim)
            out[r, head], magnitude[r, head] = attend(a, r, h, blocks, offsets)


def golden(a: Any, n: int) -> None:
    """Scores of all keys up to the row's own, softmax, weighted sum of values."""
    attend_all(a, n, a.out, np.zeros_like(a.out))


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """The sum of weight * |value| over the keys, weights those of the softmax, times 1 + the largest sum over the head of
    |query * key * softmax_scale| of one key: exp turns an error of a score into a relative one of its weight."""
    magnitude = np.zeros_like(a.q)
    attend_all(a, n, np.zeros_like(a.q), magnitude)
    return {"out": magnitude}


Places = Sequence[tuple[int, int]]
"""Slot and position of cache rows."""


def _case(
    name: str, runs: Runs, *, beyond: int = 1, seed: int = 9, heads: int = 4, kv_heads: int = 2, head_dim: int = 4,
    block_size: int = 4, softmax_scale: float | None = None, factor: float = 1.0,
    nan_keys: Places = (), nan_values: Places = (), shared: tuple[int, int] | None = None, sliding_window: int = 0, pool: int = 0,
) -> Case:  # fmt: skip
    """Random keys and values at the positions of every run and before it, NaN in every other cache row.

    Those in `nan_keys` and `nan_values` hold NaN as well; the first block of slot `shared[1]` is that of `shared[0]`.
    """
    rng = np.random.default_rng(seed)
    row_slot, positions = pack(runs)
    table, num_blocks = grant(rng, runs, block_size=block_size, ahead=1, pool=pool)
    if shared is not None:
        table[shared[1], 0] = table[shared[0], 0]
    k, v = np.full((2, num_blocks, block_size, kv_heads, head_dim), np.nan, np.float32)
    for slot, first, rows in runs:
        reach = np.arange(first + rows if slot >= 0 else 0)
        blocks, offsets = table[slot, reach // block_size], reach % block_size
        k[blocks, offsets], v[blocks, offsets] = np.moveaxis(
            rng.standard_normal((len(reach), 2, kv_heads, head_dim), np.float32), 1, 0
        )
    for cache, places in ((k, nan_keys), (v, nan_values)):
        for slot, p in places:
            cache[table[slot, p // block_size], p % block_size] = np.nan
    q = rng.standard_normal((len(row_slot), heads * head_dim), np.float32) * np.float32(factor)
    q[row_slot < 0] = np.nan
    arrays = {"q": q, "row_slot": row_slot, "positions": positions, "block_table": table, "meta": None}
    params: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    params |= {"softmax_scale": head_dim**-0.5 if softmax_scale is None else softmax_scale, "sliding_window": sliding_window}
    return Case(name, arrays | {"cache": LogicalCache(k, v)}, params, len(row_slot) - beyond, {"out": (q.shape, "act")})


def cases() -> Iterator[Case]:
    """Named cases of `paged_attention`."""
    yield _case("windows_beside_a_prefill_chunk", MIXED)
    yield _case("one_group_of_two_heads", MIXED, heads=2, kv_heads=1)
    yield _case("a_kv_head_for_every_head", MIXED, heads=3, kv_heads=3)
    yield _case("four_heads_share_a_kv_head", MIXED, heads=8, kv_heads=2)
    yield _case("one_key_returns_its_value", [(0, 0, 1), (2, 0, 1), (1, 0, 1)])
    yield _case("context_around_a_block_border", [(0, 2, 1), (1, 3, 1), (2, 4, 1), (3, 6, 3), (4, 8, 1)])
    later = [(1, 8), (1, 9)]
    yield _case("nan_in_later_rows_of_the_window", [(1, 6, 4), (0, 2, 2)], nan_keys=later, nan_values=later, beyond=0)
    yield _case("nan_key_in_reach_is_not_hidden", [(1, 4, 3), (0, 2, 2)], nan_keys=[(1, 5)], beyond=0)
    yield _case("nan_value_in_reach_is_not_hidden", [(1, 4, 3), (0, 2, 2)], nan_values=[(1, 5)], beyond=0)
    yield _case("two_slots_share_a_block", [(0, 6, 2), (1, 9, 2)], shared=(0, 1), beyond=0)
    yield _case("scores_too_large_for_a_plain_exp", MIXED, factor=60.0)
    yield _case("scale_is_a_parameter", MIXED, softmax_scale=0.11)
    yield _case("context_of_many_blocks", [(1, 70, 3), (0, 33, 2)], block_size=8, heads=2, kv_heads=1)
    yield _case("all_padding", [(PAD_SLOT, 3, 3), (0, 5, 1)])
    yield _case("nothing_to_do", [(0, 1, 2)], beyond=2)


def window_cases() -> Iterator[Case]:
    """Cases of rows that do not attend to all keys before them; the last are generated ones."""
    yield _case("window_of_three", MIXED, sliding_window=3)
    yield _case("window_of_one_returns_the_rows_own_value", MIXED, sliding_window=1)
    yield _case("window_as_long_as_the_context", [(0, 0, 5), (1, 3, 2), (2, 4, 1)], sliding_window=5)
    yield _case("window_from_inside_a_block", [(1, 9, 4), (0, 7, 1), (2, 8, 1)], sliding_window=6)
    yield _case("window_of_whole_blocks", [(1, 7, 1), (0, 8, 1), (2, 10, 3)], sliding_window=8)
    yield _case("window_shorter_than_the_rows_of_a_slot", [(1, 5, 9), (0, 0, 7)], sliding_window=2, heads=8, kv_heads=1)
    long: Runs = [(1, 150, 4), (0, 33, 2), (2, 200, 1)]
    yield _case("window_in_a_long_context", long, block_size=16, heads=2, kv_heads=1, sliding_window=67)
    longer: Runs = [(1, 1400, 3), (0, 33, 2), (2, 2100, 1)]
    yield _case("window_of_a_thousand_keys", longer, block_size=16, heads=2, sliding_window=1031)
    yield _case("window_of_large_heads", long, block_size=16, heads=8, kv_heads=1, head_dim=128, sliding_window=67)
    yield _case("window_within_a_long_chunk", [(0, 40, 300), (1, 9, 1)], block_size=16, heads=2, kv_heads=1, sliding_window=65)
    gone: dict[str, Any] = {"nan_keys": [(1, 0), (1, 3), (0, 1)], "nan_values": [(1, 0), (1, 3), (0, 1)]}
    yield _case("nan_in_front_of_the_window", [(1, 6, 4), (0, 4, 2)], sliding_window=3, beyond=0, **gone)
    inside = [(1, 5)]
    yield _case("nan_key_in_some_windows", [(1, 5, 6), (0, 2, 2)], sliding_window=3, nan_keys=inside, beyond=0)
    yield _case("nan_value_in_some_windows", [(1, 5, 6), (0, 2, 2)], sliding_window=3, nan_values=inside, beyond=0)
    for seed in range(8):
        rng = np.random.default_rng(1000 + seed)
        case = generate(rng)
        yield replace(case, name=f"window_seed_{seed}", params={**case.params, "sliding_window": int(rng.integers(1, 12))})


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random runs of distinct slots, some of them padding, and random head counts."""
    runs = random_runs(rng, sizes if "N" not in sizes else {**sizes, "N": sizes["N"] + 1})  # the last row is not launched
    groups, kv_heads, dims = int(rng.choice([1, 2, 4])), int(rng.integers(1, 3)), [3, 4, 8]
    if "num_blocks" in sizes:  # which are copied and compared one and all
        kv_heads, dims = 1, [2]
    beyond, seed = beyond_of(rng, sizes), int(rng.integers(1 << 30))
    heads, head_dim = fitted(sizes, num_heads=groups * kv_heads, head_dim=int(rng.choice(dims)))
    if sizes:  # every score is worked out one by one
        heads = sizes.get("num_heads", min(heads, 2))
    heads, kv_heads = grouped(sizes, heads, kv_heads)
    runs, block_size = in_blocks(sizes, runs, int(rng.choice([1, 4, 16])), spare=3)
    return _case(
        "random", runs, beyond=beyond, seed=seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        pool=sizes.get("num_blocks", 0),
    )  # fmt: skip


CONTRACT = REGISTRY.add(
    Contract(
        name="paged_attention",
        version=1,
        unit="any",
        args=PagedAttentionV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Causal grouped-query attention over a paged cache, row by row.",
        source="Vaswani et al. 2017; Ainslie et al. 2023, GQA; Kwon et al. 2023, PagedAttention.",
        tolerance={"out": 2.0},
        products=True,
        equivalent_mutants={"unpad(block_table)": "entries of keys in reach are granted, and no other entry is read"},
        scale=scale,
        deterministic="run-to-run",
        constraints=("num_heads % num_kv_heads == 0", "P == num_heads * head_dim", "block_size >= 1", "sliding_window >= 0"),
        optional_cases={"sliding_window": window_cases},
        feature="dense",
        compute=True,
        grows=CACHED,
    )
)
