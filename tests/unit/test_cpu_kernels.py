"""Compiled kernels where the kit's small cases do not reach: real sizes, every instruction level, threads, weight formats.

What is compared is worked out in NumPy in float64, or is the same kernel's own result in another way that may not matter.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft.backend import CacheSpec
from polydraft.conformance.harness import check_kernel
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.inputs import generated
from polydraft.contracts.kernels.linear import LinearV1
from polydraft.contracts.kernels.paged_attention import PagedAttentionV1
from polydraft.contracts.kernels.rms_norm import RmsNormV1
from polydraft.contracts.packing import PACKINGS, Matrix, PackedWeight, multiplied, pack, stacked
from tests.support.cpu import LEVELS, bound, loaded, needs_kernels, opened
from tests.support.depth import among, crossed

pytestmark = needs_kernels
NUMERIC = (
    "embed", "rms_norm", "residual_add", "linear", "rope_kv_write", "paged_attention", "swiglu", "gather_rows",
    "select_last_rows", "combine_draft_inputs", "argmax", "gumbel_noise", "sample", "filter_probs", "top_logprobs",
    "residual_add+rms_norm", "gumbel_noise+sample",
)  # fmt: skip
"""What has code of its own for each instruction level."""


def rounded(value: np.ndarray) -> np.ndarray:
    """The values cut to bfloat16, as float32."""
    return (value.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def product(spec: str, x: np.ndarray, w: Matrix, bias: np.ndarray | None = None, dtype: str = "f32") -> np.ndarray:
    device, table = opened(spec, dtype)
    weight = table.prepare_weight("linear", w if isinstance(w, PackedWeight) else w.astype(np.float32), dtype)
    extra = None if bias is None else table.prepare_weight("bias", bias.astype(np.float32), dtype)
    out = device.empty("out", (len(x), w.shape[0]), "f32")
    bound(device, table, "linear", LinearV1(x=loaded(device, "x", x), weight=weight, bias=extra, out=out))(len(x))
    result = out.host_array.copy()
    device.close()
    return result


# -- levels ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("level", "name", "dtype"), crossed(2, LEVELS, NUMERIC, ["f32", "bf16"], most=math.inf))
def test_every_level_keeps_every_contract(level: str, name: str, dtype: str):
    kernel: Any = COMPOSITES[name] if name in COMPOSITES else REGISTRY[name]
    device, table = opened(f"cpu?isa={level}&threads=2", dtype)
    for seed in range(6):
        comparison = check_kernel(kernel, generated(kernel, seed), device, table, act=dtype)
        assert comparison.ok, comparison.describe()
    device.close()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weights", ["exact", "f32", "int8"])
@settings(max_examples=12)
@given(st.data())
def test_products_of_any_shape(level: str, weights: str, data: st.DataObject):
    """Ragged panels, odd columns, every tile of rows; with and without bias."""
    n, o, i = (data.draw(st.integers(1, top)) for top in (19, 131, 75))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    x, w = rng.standard_normal((n, i)), rounded(rng.standard_normal((o, i)))
    bias = rng.standard_normal(o) if data.draw(st.booleans()) else None
    x, exact = x.astype(np.float32).astype(np.float64), w.astype(np.float64)
    if weights == "int8":
        scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
        scale = np.where(scale == 0, np.float32(1), scale)
        exact = np.trunc(w / scale + np.copysign(np.float32(0.5), w)).astype(np.float64) * scale
    got = product(f"cpu?isa={level}&weights={weights}&threads=2", x, w, bias)
    want = x @ exact.T + (0 if bias is None else bias.astype(np.float32))
    room = 1.5e-6 * (np.abs(x) @ np.abs(exact).T + 1)
    assert (np.abs(got - want) <= room).all()


def keeps_packed(contract: str, level: str, packing: str) -> None:
    """The packed cases of a contract, in both dtypes."""
    kernel: Any = REGISTRY[contract]
    for dtype in ("f32", "bf16"):
        device, table = opened(f"cpu?isa={level}&threads=2", dtype)
        for case in kernel.packed_cases(packing):
            comparison = check_kernel(kernel, case, device, table, act=dtype)
            assert comparison.ok, comparison.describe()
        device.close()


@pytest.mark.parametrize(("level", "packing"), crossed(2, LEVELS, PACKINGS, most=math.inf))
def test_every_level_keeps_packed_weights(level: str, packing: str):
    keeps_packed("linear", level, packing)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("packing", among(("int8-channel-a8", "int4-group32-zeros", "fp8-block128"), PACKINGS))
def test_every_level_keeps_packed_experts(level: str, packing: str):
    keeps_packed("expert_mlp", level, packing)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40)
@given(st.data())
def test_packed_products_of_any_shape(level: str, data: st.DataObject):
    """Ragged panels and groups, last columns that fill no word, every tile of rows; with and without bias."""
    packing = PACKINGS[data.draw(st.sampled_from(sorted(PACKINGS)))]
    n, o, i = (data.draw(st.integers(1, top)) for top in (19, 131, 275))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    x, w = rounded(rng.standard_normal((n, i))), pack(rng.standard_normal((o, i), np.float32), packing)
    bias = rng.standard_normal(o) if data.draw(st.booleans()) else None
    rows, exact = multiplied(x.astype(np.float64), w)
    got = product(f"cpu?isa={level}&threads=2", x, w, bias, dtype=data.draw(st.sampled_from(("f32", "bf16"))))
    want = rows @ exact.T + (0 if bias is None else bias.astype(np.float32))
    room = 1.5e-6 * (np.abs(rows) @ np.abs(exact).T + 1)
    assert (np.abs(got - want) <= room).all()


# -- a row's bits ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("level", "dtype", "weights"),
    crossed(
        2, LEVELS, ["f32", "bf16"],
        ["exact", "f32", "int8", "int4-group32-zeros", "int4-group32-a8", "fp8-block128", "int8-channel-a8"], most=math.inf,
    ),
)  # fmt: skip
def test_a_rows_bits_depend_on_nothing_else(level: str, dtype: str, weights: str):
    """Width of the launch, place in it and number of threads, at sizes where threads are used."""
    rng = np.random.default_rng(3)
    x, floats = rng.standard_normal((45, 320)), rng.standard_normal((600, 320), np.float32)
    w, weights = (pack(floats, PACKINGS[weights]), "exact") if weights in PACKINGS else (floats, weights)
    whole = product(f"cpu?isa={level}&weights={weights}&threads=3", x, w, dtype=dtype)
    for width, threads in itertools.product((1, 2, 3, 4, 7, 8, 9, 16, 31), (1, 2)):
        first = int(rng.integers(0, 45 - width + 1))
        part = product(f"cpu?isa={level}&weights={weights}&threads={threads}", x[first : first + width], w, dtype=dtype)
        assert np.array_equal(part, whole[first : first + width])


@pytest.mark.parametrize("packing", ["int8-channel-a8", "int4-group64-a8"])
@pytest.mark.parametrize("inputs", [320, 322])
def test_a_rounded_rows_bits_depend_on_nothing_else_in_a_long_prompt(packing: str, inputs: int):
    """Rows are shared out where there are enough, and rounded some at a time; the last columns may fill no word."""
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((300, inputs)), pack(rng.standard_normal((250, inputs), np.float32), PACKINGS[packing])
    whole = product("cpu?threads=1", x, w)
    rows, exact = multiplied(x.astype(np.float32), w)
    assert np.abs(whole - rows @ exact.T).max() < 1e-3
    for first, width, threads in ((0, 300, 2), (5, 290, 8), (127, 3, 1), (200, 70, 3), (299, 1, 1)):
        part = product(f"cpu?threads={threads}", x[first : first + width], w)
        assert np.array_equal(part, whole[first : first + width])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_attention_of_a_row_depends_on_nothing_else(level: str, dtype: str):
    """One row alone, and the same row among others of its slot and of other slots, with blocks elsewhere."""
    heads, kv_heads, dim, size, length = 6, 2, 80, 16, 150
    rng = np.random.default_rng(4)
    k, v = (rng.standard_normal((length, kv_heads, dim)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((9, heads * dim)).astype(np.float32)

    def attend(rows: list[int], positions: list[int], shuffle: int, threads: int, window: int = 0) -> np.ndarray:
        device, table = opened(f"cpu?isa={level}&threads={threads}", dtype)
        blocks = np.random.default_rng(shuffle).permutation(12)
        keys, values = (np.full((12, size, kv_heads, dim), np.nan, np.float32) for _ in range(2))
        for p in range(length):
            keys[blocks[p // size], p % size], values[blocks[p // size], p % size] = k[p], v[p]
        cache = table.allocate_cache(CacheSpec(12, size, kv_heads, dim, dtype))
        cache.write_logical(keys, values)
        out = device.empty("out", (len(rows), heads * dim), dtype)
        ints = {
            "row_slot": np.zeros(len(rows), np.int32), "positions": np.array(positions, np.int32),
            "block_table": blocks[None, :].astype(np.int32),
        }  # fmt: skip
        args = PagedAttentionV1(
            q=loaded(device, "q", q[rows]), cache=cache, out=out, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
            block_size=size, softmax_scale=dim**-0.5, sliding_window=window,
            **{name: loaded(device, name, value) for name, value in ints.items()},
        )  # fmt: skip
        bound(device, table, "paged_attention", args)(len(rows))
        return out.host_array.copy()

    for window in (0, 2, 37):
        together = attend(list(range(9)), list(range(140, 149)), 1, 3, window)
        for row in range(9):
            assert np.array_equal(attend([row], [140 + row], 2, 1, window)[0], together[row])
    together = attend(list(range(9)), list(range(140, 149)), 1, 3)
    if dtype == "f32":  # and it is attention
        scores = (q[8].reshape(2, 3, dim) @ k[:149].transpose(1, 2, 0)) * dim**-0.5
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        want = (shares / shares.sum(-1, keepdims=True)) @ v[:149].transpose(1, 0, 2)
        assert np.abs(together[8] - want.reshape(-1)).max() < 1e-5


# -- weights ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wish", "values", "bytes_a_number"),
    [("exact", "bf16", 2), ("exact", "f32", 4), ("bf16", "f32", 2), ("f32", "bf16", 4), ("int8", "f32", 1)],
)
def test_how_weights_are_kept(wish: str, values: str, bytes_a_number: int):
    """`exact` keeps bfloat16 only where that changes nothing."""
    _, table = opened(f"cpu?weights={wish}")
    value = np.random.default_rng(5).standard_normal((64, 32)).astype(np.float32)
    weight = table.prepare_weight("linear", rounded(value) if values == "bf16" else value, "f32")
    scales = 64 * 4 if wish == "int8" else 0
    assert weight.nbytes == value.size * bytes_a_number + scales


@pytest.mark.parametrize(
    ("packing", "bits"),
    [("int8-channel", 8), ("int4-group32", 4 + 16 / 32), ("int4-group128-zeros", 4 + 24 / 128), ("fp8-block128", 8 + 32 / 128)],
)
def test_packed_weights_take_their_bits(packing: str, bits: float):
    """And scales of an output beside them; those of groups are in 16 bits where that changes nothing."""
    _, table = opened()
    weight = pack(np.random.default_rng(5).standard_normal((64, 256), np.float32), PACKINGS[packing])
    scales = 64 * 4 if weight.scales.shape[1] == 1 else 0
    assert table.prepare_weight("linear", weight, "f32").nbytes == 64 * 256 * bits / 8 + scales
    both = stacked([weight, weight])
    assert table.prepare_weight("experts", both, "f32").nbytes == 2 * (64 * 256 * bits / 8 + scales)
    if packing == "int4-group32":
        exact = dataclasses.replace(weight, scales=weight.scales * np.float32(1.0001))
        assert table.prepare_weight("linear", exact, "f32").nbytes == 64 * 256 * (bits + 0.5) / 8


@pytest.mark.parametrize("packing", ["int8-channel", "int4-group32", "int4-group64-zeros"])
def test_a_packed_weight_is_refilled_where_it_lies(packing: str):
    device, table = opened()
    rng = np.random.default_rng(6)
    x, both = rng.standard_normal((3, 96)), [pack(one, PACKINGS[packing]) for one in rng.standard_normal((2, 40, 96), np.float32)]
    weight = table.prepare_weight("linear", both[0], "f32")
    out = device.empty("out", (3, 40), "f32")
    run = bound(device, table, "linear", LinearV1(x=loaded(device, "x", x), weight=weight, bias=None, out=out))
    places = weight._struct.data, weight._struct.scale, weight._struct.groups, weight._struct.zeros
    for one in both:
        assert table.prepare_weight("linear", one, "f32", weight) is weight
        run(3)
        assert np.allclose(out.host_array, x @ one.read().T, atol=1e-4)
    assert places == (weight._struct.data, weight._struct.scale, weight._struct.groups, weight._struct.zeros)


def test_a_weight_that_changes_its_form_is_seen_by_who_is_bound_to_it():
    """An update may bring numbers that bfloat16 does not have."""
    device, table = opened()
    rng = np.random.default_rng(6)
    x, first, second = rng.standard_normal((3, 32)), rounded(rng.standard_normal((40, 32))), rng.standard_normal((40, 32))
    weight = table.prepare_weight("linear", first, "f32")
    out = device.empty("out", (3, 40), "f32")
    run = bound(device, table, "linear", LinearV1(x=loaded(device, "x", x), weight=weight, bias=None, out=out))
    run(3)
    assert np.allclose(out.host_array, x @ first.T, atol=1e-4)
    assert table.prepare_weight("linear", second.astype(np.float32), "f32", weight) is weight
    run(3)
    assert np.allclose(out.host_array, x @ second.T, atol=1e-4)


# -- ends of rows ----------------------------------------------------------------------------------
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_written_behind_a_row(level: str):
    device, table = opened(f"cpu?isa={level}")
    for columns in range(1, 40):
        out = device.empty("out", (3, columns), "f32")
        out.host_array[:] = 7.0
        x = loaded(device, "x", np.ones((3, columns)))
        gain = table.prepare_weight("norm", np.full(columns, 2.0, np.float32), "f32")
        bound(device, table, "rms_norm", RmsNormV1(x=x, weight=gain, out=out, eps=1e-6, plus_one=False))(2)
        assert np.allclose(out.host_array[:2], 2.0, atol=1e-5)
        assert (out.host_array[2] == 7.0).all()
