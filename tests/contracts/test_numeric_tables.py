"""Numbers worked out by hand, and laws that hold whatever the numbers are, for every numeric contract.

What is expected here never comes from a golden: goldens and the reference kernels are both held to the same tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from polydraft.backend import DeviceOptions
from polydraft.conformance.harness import run_golden, run_kernel
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Case, Contract, LogicalCache, ParamSpec, TensorSpec
from polydraft.contracts.kernels.gumbel_noise import gumbel, threefry2x32
from polydraft.contracts.kernels.rope_kv_write import plain_frequencies
from polydraft.device import DTYPES, Array
from polydraft.reference import polydraft_kernels, polydraft_open_device

NAN, INF = math.nan, math.inf
Compute = Callable[[Contract, Case], Mapping[str, Array]]


def golden(contract: Contract, case: Case) -> Mapping[str, Array]:
    return {name: expected.value for name, expected in run_golden(contract, case).items()}


def reference(contract: Contract, case: Case) -> Mapping[str, Array]:
    device = polydraft_open_device("cpu", DeviceOptions())
    return run_kernel(contract, case, device, polydraft_kernels(device))


@pytest.fixture(params=[golden, reference])
def compute(request: pytest.FixtureRequest) -> Compute:
    subject: Compute = request.param
    return subject


def launch(compute: Compute, name: str, n: int | None = None, *, shape: tuple[int, ...] = (), **given: Any) -> Any:
    """Run one contract on plain lists; `shape` is that of its only output, which is returned (else every array)."""
    contract, arrays, params, outputs = REGISTRY[name], {}, {}, {}
    for field, spec in contract.args.specs().items():
        if isinstance(spec, TensorSpec) and spec.access == "out":
            outputs[field] = (shape, "act" if spec.dtype in ("act", "float") else spec.dtype)
        elif isinstance(spec, ParamSpec):
            params[field] = given.pop(field)
        else:
            value = given.pop(field, None)
            dtype = DTYPES.get(spec.dtype, np.float32) if isinstance(spec, TensorSpec) else np.float32
            arrays[field] = value if value is None or isinstance(value, LogicalCache) else np.array(value, dtype)
    assert not given
    got = compute(contract, Case("by hand", arrays, params, shape[0] if n is None else n, outputs))
    return got[next(iter(outputs))] if outputs and not any(name.startswith("cache") for name in got) else got


def near(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)


# -- rows: look up, pick, add, normalise, multiply ---------------------------------------------------------


def test_embed(compute: Compute) -> None:
    table = [[1, 2], [3, 4], [5, 6]]
    near(launch(compute, "embed", shape=(4, 2), ids=[2, -1, 0, 2], weight=table), [[5, 6], [0, 0], [1, 2], [5, 6]])


def test_gather_rows(compute: Compute) -> None:
    x = [[1, 2], [3, 4], [5, 6]]
    near(launch(compute, "gather_rows", shape=(4, 2), x=x, index=[1, 1, -1, 0]), [[3, 4], [3, 4], [0, 0], [1, 2]])


def test_residual_add(compute: Compute) -> None:
    got = launch(compute, "residual_add", 2, x=[[1, 2], [3, 4], [5, 6]], y=[[0.5, -2], [1, 1], [9, 9]])
    near(got["x"], [[1.5, 0], [4, 5], [5, 6]])


@pytest.mark.parametrize(("plus_one", "wanted"), [(False, [[1.5, 3], [0, 0]]), (True, [[2.25, 4], [0, 0]])])
def test_rms_norm(compute: Compute, plus_one: bool, wanted: Any) -> None:
    # mean(3**2, 4**2) + 3.5 = 16, so 3, 4 become 0.75, 1 before the gain.
    x, weight = [[3, 4], [0, 0]], [2, 3]
    near(launch(compute, "rms_norm", shape=(2, 2), x=x, weight=weight, eps=3.5, plus_one=plus_one), wanted)


def test_rms_norm_ignores_the_scale_of_its_input(compute: Compute) -> None:
    x = np.random.default_rng(0).standard_normal((3, 9))
    given: dict[str, Any] = {"weight": np.ones(9), "eps": 1e-12, "plus_one": False}
    out = launch(compute, "rms_norm", shape=(3, 9), x=x, **given)
    near(launch(compute, "rms_norm", shape=(3, 9), x=1000 * x, **given), out)
    near((out**2).mean(axis=1), np.ones(3))


@pytest.mark.parametrize(("bias", "wanted"), [(None, [[5, 11, 17]]), ([1, 0, -20], [[6, 11, -3]])])
def test_linear(compute: Compute, bias: Any, wanted: Any) -> None:
    near(launch(compute, "linear", shape=(1, 3), x=[[1, 2]], weight=[[1, 2], [3, 4], [5, 6]], bias=bias), wanted)


def test_swiglu(compute: Compute) -> None:
    # The logistic function is 3/4 at log 3 and 1/4 at -log 3.
    log3 = 1.0986122886681098
    gate_up = [[log3, -log3, 2, 2], [0, 100, 7, 0.5], [-100, log3, 1, 8]]
    near(launch(compute, "swiglu", shape=(3, 2), gate_up=gate_up), [[1.5 * log3, -0.5 * log3], [0, 50], [0, 6 * log3]])


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("order", ["hidden_first", "embedding_first"])
def test_combine_draft_inputs(compute: Compute, order: str, mask: bool) -> None:
    # mean(3**2, 4**2) + 3.5 = mean(5**2, 0) + 3.5 = 16.
    got = launch(
        compute, "combine_draft_inputs", shape=(2, 4), embedding=[[5, 0], [0, 5]], hidden=[[3, 4], [3, 4]],
        emb_norm=[4, 8], hid_norm=[8, 2], positions=[0, 1], eps=3.5, plus_one=False, order=order,
        mask_first_position=mask,
    )  # fmt: skip
    hidden, embedding = np.array([[6, 2], [6, 2]]), np.array([[0 if mask else 5, 0], [0, 10]])
    near(got, np.hstack([hidden, embedding] if order == "hidden_first" else [embedding, hidden]))


def test_select_last_rows(compute: Compute) -> None:
    # Sequence 0: window at 4, 5, 6, one draft accepted, so row 5. Sequence 1 idle. Sequence 2: chunk 0..3, all committed.
    out = launch(
        compute, "select_last_rows", shape=(3, 1), hidden=[[10], [11], [12], [20], [30], [31], [32], [33]],
        positions=[4, 5, 6, 9, 0, 1, 2, 3], seq_start=[0, 3, 4], draft_slot=[2, -1, 0], draft_position=[5, 0, 3],
    )  # fmt: skip
    near(out, [[11], [0], [33]])


# -- rotation and store ------------------------------------------------------------------------------------

ROPE: dict[str, Any] = {
    "num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "attention_factor": 1.0, "style": "half", "block_size": 2, "eps": 1e-6,
}  # fmt: skip


def rope(
    compute: Compute, qkv: Any, positions: Any, slots: Any = None, table: Any = None, rope_dims: int = 4, theta: float = 4.0,
    **params: Any,
) -> Any:  # fmt: skip
    """Rotate rows of slot 0, whose block of positions 2 * i, 2 * i + 1 is block i unless `table` says otherwise."""
    given = ROPE | {"frequencies": plain_frequencies(rope_dims, theta)} | params
    qkv = np.array(qkv, float)
    table = [list(range(max(positions) // 2 + 1))] if table is None else table
    shape = (np.max(table) + 1, given["block_size"], given["num_kv_heads"], given["head_dim"])
    cache = LogicalCache(*np.full((2, *shape), 7.0, np.float32))
    rows = {"qkv": qkv, "row_slot": [0] * len(qkv) if slots is None else slots, "positions": positions}
    q_shape = (len(qkv), given["num_heads"] * given["head_dim"])
    return launch(compute, "rope_kv_write", shape=q_shape, block_table=table, cache=cache, **rows, **given)


HEAD = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("style", "rope_dims", "wanted"),
    [
        # Position 2, theta 4: pair 0 turns by 2, pair 1 by 2 * 4 ** (-2 / 4) = 1 radian; cos 2 = -0.4161, cos 1 = 0.5403.
        ("half", 4, [-3.1440391, -2.2852793, -0.3391429, 3.8441511]),
        ("interleaved", 4, [-2.2347417, 0.0770037, -1.7449770, 4.6856222]),
        # Two dimensions: both styles turn the same pair by 2 radians and leave the rest.
        ("half", 2, [-2.2347417, 0.0770037, 3, 4]),
        ("interleaved", 2, [-2.2347417, 0.0770037, 3, 4]),
    ],
)
def test_rotation_by_hand(compute: Compute, style: str, rope_dims: int, wanted: Any) -> None:
    got = rope(compute, [HEAD * 3], [2], style=style, rope_dims=rope_dims)
    near(got["q_out"], [wanted])
    near(got["cache.k"][1, 0, 0], wanted)
    near(got["cache.v"][1, 0, 0], HEAD)


def test_frequencies_are_those_that_are_given(compute: Compute) -> None:
    # Position 2: pair 0 by 1 radian, pair 1 by 2, as above in the other order; everything that turns times 1.5.
    got = rope(compute, [[2.0, 1.0, 4.0, 3.0] * 3], [2], frequencies=(0.5, 1.0), attention_factor=1.5)
    wanted = [-2.2852793 * 1.5, -3.1440391 * 1.5, 3.8441511 * 1.5, -0.3391429 * 1.5]
    near(got["q_out"], [wanted])
    near(got["cache.k"][1, 0, 0], wanted)


def test_the_factor_is_of_what_turns_alone(compute: Compute) -> None:
    got = rope(compute, [HEAD * 3], [0], frequencies=(1.0,), attention_factor=2.0)
    near(got["q_out"], [[2, 4, 3, 4]])
    near(got["cache.v"][0, 0, 0], HEAD)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_position_zero_is_the_identity(compute: Compute, style: str) -> None:
    got = rope(compute, [HEAD * 3], [0], style=style)
    assert got["q_out"].tolist() == [HEAD]
    assert got["cache.k"][0, 0, 0].tolist() == HEAD


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("position", [1, 5, 300])
def test_rotation_is_a_complex_product(compute: Compute, style: str, position: int) -> None:
    head = np.random.default_rng(position).standard_normal(8)
    x, y = (head[0:6:2], head[1:6:2]) if style == "interleaved" else (head[0:3], head[3:6])
    z = (x + 1j * y) * np.exp(1j * position * 500.0 ** (-np.arange(3) / 3))
    turned = np.stack([z.real, z.imag], axis=1 if style == "interleaved" else 0).ravel()
    got = rope(compute, [np.tile(head, 3)], [position], style=style, head_dim=8, rope_dims=6, theta=500.0)
    np.testing.assert_allclose(got["q_out"][0], [*turned, *head[6:]], rtol=0, atol=1e-4 if position > 100 else 3e-6)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_scores_depend_on_the_distance_only(compute: Compute, style: str) -> None:
    q, k = np.random.default_rng(1).standard_normal((2, 8))
    rows = [np.concatenate([q, k, k])] * 4
    got = rope(compute, rows, [9, 4, 26, 21], style=style, head_dim=8, rope_dims=8)
    stored = {position: got["cache.k"][position // 2, position % 2, 0] for position in (4, 21)}
    near(got["q_out"][0] @ stored[4], got["q_out"][2] @ stored[21])
    near(np.linalg.norm(got["q_out"], axis=1), [np.linalg.norm(q)] * 4)


def test_rows_go_where_the_block_table_says(compute: Compute) -> None:
    # Block size 2: slot 1's positions 2, 3, 4 lie in blocks 0, 0 and nowhere; slot 0's position 1 in block 3; row 3 is padding.
    qkv = [[0, 0, 0, 0, *[row] * 4, *[row + 10] * 4] for row in range(1, 6)]
    table = [[3, -1, -1], [1, 0, -1]]
    got = rope(compute, qkv, [2, 3, 4, 0, 1], slots=[1, 1, 1, -1, 0], table=table)
    assert got["cache.v"][:, :, 0, 0].tolist() == [[11, 12], [7, 7], [7, 7], [7, 15]]
    untouched = [[False, False], [True, True], [True, True], [True, False]]
    assert (got["cache.k"] == 7).all(axis=(2, 3)).tolist() == untouched
    assert got["q_out"][3].tolist() == [0, 0, 0, 0]


def test_a_row_without_a_block_still_has_its_query(compute: Compute) -> None:
    got = rope(compute, [HEAD * 3] * 2, [0, 2], table=[[0, -1]])
    near(got["q_out"][1], [-3.1440391, -2.2852793, -0.3391429, 3.8441511])
    assert (got["cache.k"][0, 1] == 7).all()


def test_heads_are_normalised_before_they_turn(compute: Compute) -> None:
    # mean(3**2, 4**2) + 3.5 = 16; the gains 4, 2 and 8, 4 then give (3, 2) and (6, 4); values stay.
    norms: dict[str, Any] = {"q_norm": [4, 2], "k_norm": [8, 4], "eps": 3.5, "head_dim": 2, "rope_dims": 2}
    got = rope(compute, [[3, 4, 3, 4, 3, 4]] * 2, [0, 1], **norms)
    c, s = 0.54030230587, 0.84147098481
    near(got["q_out"], [[3, 2], [3 * c - 2 * s, 2 * c + 3 * s]])
    near(got["cache.k"][0, :, 0], [[6, 4], [6 * c - 4 * s, 4 * c + 6 * s]])
    near(got["cache.v"][0, :, 0], [[3, 4], [3, 4]])


# -- attention ---------------------------------------------------------------------------------------------


def attend(
    compute: Compute, q: Any, positions: Any, cache: LogicalCache, *, slots: Any = None, table: Any = None, heads: int = 1,
    softmax_scale: float = 1.0, sliding_window: int = 0,
) -> Any:  # fmt: skip
    """Attend rows of slot 0, whose table lists the blocks in order unless `table` says otherwise."""
    blocks, block_size, kv_heads, head_dim = cache.k.shape
    return launch(
        compute, "paged_attention", shape=np.shape(q), q=q, row_slot=[0] * len(q) if slots is None else slots,
        positions=positions, block_table=[list(range(blocks))] if table is None else table, cache=cache,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, softmax_scale=softmax_scale,
        sliding_window=sliding_window,
    )["out"]  # fmt: skip


def cache_of(keys: Any, values: Any, block_size: int = 2) -> LogicalCache:
    """A cache of one head from keys and values by position."""
    shape = (-1, block_size, 1, np.shape(keys)[1])
    return LogicalCache(np.array(keys, np.float32).reshape(shape), np.array(values, np.float32).reshape(shape))


def random_cache(seed: int, blocks: int = 3, kv_heads: int = 2) -> LogicalCache:
    k, v = np.random.default_rng(seed).standard_normal((2, blocks, 2, kv_heads, 3), np.float32)
    return LogicalCache(k, v)


def test_one_key_returns_its_value(compute: Compute) -> None:
    cache = cache_of([[9, -9], [NAN, NAN]], [[3, 4], [NAN, NAN]])
    near(attend(compute, [[5, 5]], [0], cache), [[3, 4]])


def test_equal_keys_average_their_values(compute: Compute) -> None:
    cache = cache_of([[1, 2]] * 4, [[0, 1], [3, 1], [6, 1], [100, 1]])
    near(attend(compute, [[1, 1], [2, -5]], [2, 3], cache), [[3, 1], [27.25, 1]])


@pytest.mark.parametrize(("window", "wanted"), [(0, 3.0), (1, 5.0), (2, 4.5), (4, 3.5), (5, 3.0), (9, 3.0)])
def test_a_window_holds_the_rows_own_key_and_those_just_before(compute: Compute, window: int, wanted: float) -> None:
    # All scores are equal, so a row returns the mean of the values it attends to: of 1, 2, 3, 4, 5, the last `window`.
    cache = cache_of([[0]] * 6, [[1], [2], [3], [4], [5], [NAN]])
    near(attend(compute, [[7]], [4], cache, sliding_window=window), [[wanted]])


@pytest.mark.parametrize(("softmax_scale", "wanted"), [(1.0, 0.75), (0.5, 0.6339746), (2.0, 0.9)])
def test_softmax_by_hand(compute: Compute, softmax_scale: float, wanted: float) -> None:
    # Scores 0 and log 3 weigh 1 : 3; halved 1 : sqrt(3); doubled 1 : 9.
    cache = cache_of([[0, 0], [0, 1.0986123]], [[0, 4], [1, 4]])
    near(attend(compute, [[5, 1]], [1], cache, softmax_scale=softmax_scale), [[wanted, 4]])


def test_heads_share_the_kv_head_of_their_group(compute: Compute) -> None:
    values = np.array([10, 20], np.float32).reshape(1, 1, 2, 1)
    cache = LogicalCache(np.ones_like(values), values)
    near(attend(compute, [[1, 1, 1, 1]], [0], cache, heads=4), [[10, 10, 20, 20]])
    near(attend(compute, [[1, 1]], [0], cache, heads=2), [[10, 20]])


def test_what_lies_beyond_a_row_changes_nothing(compute: Compute) -> None:
    q = np.random.default_rng(2).standard_normal((2, 12))
    clean, poisoned = random_cache(3), random_cache(3)
    poisoned.k[1, 1:], poisoned.v[1, 1:], poisoned.k[2:], poisoned.v[2:] = NAN, INF, NAN, NAN
    results = [attend(compute, q, [1, 2], cache, heads=4, table=[[0, 1, -1]]) for cache in (clean, poisoned)]
    assert np.isfinite(results[0]).all()
    assert np.array_equal(*results)


def test_where_blocks_lie_does_not_matter(compute: Compute) -> None:
    q = np.random.default_rng(4).standard_normal((2, 12))
    cache = random_cache(5)
    moved = LogicalCache(cache.k[[2, 0, 1]], cache.v[[2, 0, 1]])
    near(attend(compute, q, [3, 4], moved, heads=4, table=[[1, 2, 0]]), attend(compute, q, [3, 4], cache, heads=4))


def test_rows_attend_as_if_alone(compute: Compute) -> None:
    q = np.random.default_rng(6).standard_normal((6, 12))
    cache, table = random_cache(7, blocks=6), [[0, 1, 2], [5, 4, 3]]
    slots, positions = [1, 1, 1, -1, 0, 0], [3, 4, 5, 0, 0, 1]
    together = attend(compute, q, positions, cache, slots=slots, table=table, heads=4)
    assert (together[3] == 0).all()
    for row in (0, 1, 2, 4, 5):
        one = slice(row, row + 1)
        alone = attend(compute, q[one], positions[one], cache, slots=slots[one], table=table, heads=4)
        near(together[row], alone[0])


# -- choosing tokens ---------------------------------------------------------------------------------------


def test_process_logits(compute: Compute) -> None:
    logits = [[1, 2, 3, 4], [5, 6, NAN, INF], [1, 2, 3, 4]]
    got = launch(compute, "process_logits", 3, logits=logits, row_slot=[1, 0, -1], num_valid=2)
    near(got["logits"], [[1, 2, -INF, -INF], [5, 6, -INF, -INF], [1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ([1, 5, 3, 2], 1), ([7, 5, 3, 2], 0), ([1, 5, 3, 9], 3), ([-4, -2, -3, -2], 1), ([0, 0, 0, 0], 0),
        ([-INF, -INF, -8, -INF], 2), ([NAN, 5, 3, 2], -1), ([1, 5, 3, NAN], -1), ([1, INF, 3, 2], -1), ([-INF] * 4, -1),
    ],
)  # fmt: skip
def test_argmax(compute: Compute, row: Any, wanted: int) -> None:
    logits = [[3, 2, 1, 0], row, row]
    assert launch(compute, "argmax", shape=(3,), logits=logits, row_slot=[4, 0, -1]).tolist() == [0, wanted, -1]


HALF = np.log([0.1, 0.5, 0.15, 0.25])
"""Best first: token 1, 3, 2, 0. With noise 0, 0, 3, 2 the sums are -2.30, -0.69, 1.10, 0.61."""


def sample(
    compute: Compute, logits: Any, noise: Any, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    """Sample one row of slot 1; slot 0 is greedy and its row must not change that."""
    rows: dict[str, Any] = {"logits": [logits, logits], "noise": [noise, noise], "row_slot": [1, 0]}
    slots: dict[str, Any] = {"temperature": [0, temperature], "top_k": [1, top_k], "top_p": [0.1, top_p], "min_p": [0.9, min_p]}
    tokens = launch(compute, "sample", shape=(2,), **rows, **slots)
    assert tokens[1] == (-1 if tokens[0] < 0 else np.argmax(logits))
    return int(tokens[0])


@pytest.mark.parametrize(
    ("filters", "noise", "wanted"),
    [
        ({}, [0, 0, 3, 2], 2),
        ({"top_k": 3}, [9, 0, 3, 2], 2),
        ({"top_k": 2}, [9, 0, 3, 2], 3),
        ({"top_k": 1}, [9, 0, 3, 2], 1),
        ({"top_k": 4}, [9, 0, 3, 2], 0),
        ({"top_k": 99}, [9, 0, 3, 2], 0),
        # Before token 1 there is nothing, before 3 a half, before 2 three quarters, before 0 nine tenths.
        ({"top_p": 0.0}, [9, 0, 9, 9], 1),
        ({"top_p": 0.49}, [9, 0, 9, 9], 1),
        ({"top_p": 0.51}, [9, 0, 9, 8], 3),
        ({"top_p": 0.76}, [9, 0, 9, 8], 2),
        ({"top_p": 0.89}, [9, 0, 6, 6], 3),
        ({"top_p": 0.91}, [9, 0, 6, 6], 0),
        ({"top_p": 1.0}, [9, 0, 6, 6], 0),
        # Shares of the best: 0.2, 1, 0.3, 0.5.
        ({"min_p": 0.19}, [9, 0, 6, 6], 0),
        ({"min_p": 0.21}, [9, 0, 6, 4], 2),
        ({"min_p": 0.31}, [9, 0, 6, 4], 3),
        ({"min_p": 0.51}, [9, 0, 6, 4], 1),
        # After top-k 2 the probabilities are 2/3 and 1/3, so two thirds lie before token 3.
        ({"top_k": 2, "top_p": 0.66}, [9, 0, 9, 9], 1),
        ({"top_k": 2, "top_p": 0.67}, [9, 0, 9, 9], 3),
        # Temperature 1/2 squares the probabilities: 1 : 25 : 2.25 : 6.25 of 34.5, so 0.7246 lies before token 3.
        ({"temperature": 0.5, "top_p": 0.72}, [9, 0, 9, 9], 1),
        ({"temperature": 0.5, "top_p": 0.73}, [9, 0, 9, 9], 3),
        ({"temperature": 0.5, "min_p": 0.24}, [9, 0, 9, 9], 3),
        ({"temperature": 0.5, "min_p": 0.26}, [9, 0, 9, 9], 1),
        # Sums at temperature t: log(0.5) / t + 0 against log(0.25) / t + 1; they meet where log(2) / t = 1.
        ({"temperature": 0.68}, [0, 0, 0, 1], 1),
        ({"temperature": 0.70}, [0, 0, 0, 1], 3),
    ],
)
def test_sampling_by_hand(compute: Compute, filters: dict[str, Any], noise: Any, wanted: int) -> None:
    assert sample(compute, HALF, noise, **filters) == wanted


@pytest.mark.parametrize(
    ("logits", "noise", "filters", "wanted"),
    [
        ([2, 2, 2, 2], [1, 1, 1, 1], {}, 0),
        ([1, 1.5, 0.5, 1.5], [0.5, 0, 1, 0], {}, 0),
        ([1, 2, 2, 2], [0, 0, 1, 9], {"top_k": 2}, 2),
        ([2, 2, 2, 2], [0, 1, 2, 3], {"top_p": 0.5}, 1),
        ([2, 2, 2, 1], [0, 1, 2, 30], {"min_p": 1.0}, 2),
        ([1, -INF, 2, -INF], [0, 90, 0, 99], {}, 2),
        ([-INF, -INF, -INF, -5], [9, 9, 9, 0], {"top_k": 2, "top_p": 0.5, "min_p": 0.5}, 3),
        ([1, NAN, 2, 3], [0, 0, 0, 0], {}, -1),
        ([1, 2, 3, INF], [0, 0, 0, 0], {"top_k": 1}, -1),
        ([-INF] * 4, [0, 1, 2, 3], {"top_p": 0.9}, -1),
    ],
)
def test_ties_and_broken_rows(compute: Compute, logits: Any, noise: Any, filters: dict[str, Any], wanted: int) -> None:
    assert sample(compute, logits, noise, **filters) == wanted


# -- noise -------------------------------------------------------------------------------------------------

KNOWN_ANSWERS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]
"""Key, counter and both words of Threefry-2x32 with 20 rounds, from the known answers of Random123."""


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_threefry_known_answers(key: tuple[int, int], counter: tuple[int, int], words: tuple[int, int]) -> None:
    assert threefry2x32(key, counter) == words


@pytest.mark.parametrize(
    ("bits", "wanted"),
    [
        # u = 2**-25, 1 - 2**-25, (2**23 + 0.5) / 2**24; the low 8 bits do not count.
        (0x00000000, -2.8523629), (0x000000FF, -2.8523629), (0xFFFFFFFF, 17.3286795), (0x80000000, 0.3665130),
    ],
)  # fmt: skip
def test_gumbel_of_known_bits(bits: int, wanted: float) -> None:
    assert gumbel(bits) == pytest.approx(wanted, abs=1e-6)


def noise_of(compute: Compute, rows: Any, vocab: int = 6, *, seeds: Any = ((0, 0), (1, 2)), **params: int) -> Any:
    slots, positions = zip(*rows, strict=True)
    given = {"ahead": 0, "draw": 0, **params}
    return launch(
        compute, "gumbel_noise", shape=(len(rows), vocab), row_slot=slots, positions=positions, seed=seeds,
        temperature=[1.0] * len(seeds), **given,
    )  # fmt: skip


def test_noise_from_the_known_words(compute: Compute) -> None:
    # Seed and counter 0: u = 0x6b2001.8 / 2**24 and 0x99ba4e.8 / 2**24.
    near(noise_of(compute, [(0, 0)], vocab=2), [[0.1379057, 0.6733559]])


def test_words_of_the_seed_do_not_stand_for_each_other(compute: Compute) -> None:
    low, high = (noise_of(compute, [(0, 0)], seeds=[seed]) for seed in ((1, 0), (0, 1)))
    assert not np.isclose(low, high).any()


def test_noise_depends_on_seed_and_position_alone(compute: Compute) -> None:
    wide = noise_of(compute, [(1, 7), (0, 8), (-1, 3), (1, 8), (0, 7)])
    assert (wide[2] == 0).all()
    for row, at in ((0, (1, 7)), (1, (0, 8)), (3, (1, 8)), (4, (0, 7))):
        assert np.array_equal(noise_of(compute, [at], vocab=3)[0], wide[row, :3])
        assert np.array_equal(noise_of(compute, [(at[0], at[1] - 2)], ahead=2)[0], wide[row])
    assert np.unique(wide[[0, 1, 3, 4]]).size == 24


def test_draws_differ(compute: Compute) -> None:
    noise = np.concatenate([noise_of(compute, [(1, 7)], draw=draw) for draw in range(3)])
    assert np.unique(noise).size == 18


def test_noise_is_gumbel_and_samples_the_softmax(compute: Compute) -> None:
    noise = noise_of(compute, [(1, p) for p in range(4000)], vocab=4)
    # Mean: Euler's constant; variance: pi**2 / 6; five standard errors of 16000 numbers.
    assert noise.mean() == pytest.approx(0.5772, abs=5 * math.sqrt(1.645 / 16000))
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.08)
    rows: dict[str, Any] = {"logits": np.tile(HALF, (4000, 1)), "noise": noise, "row_slot": [0] * 4000}
    slots: dict[str, Any] = {"temperature": [1.0], "top_k": [0], "top_p": [1.0], "min_p": [0.0]}
    counts = np.bincount(launch(compute, "sample", shape=(4000,), **rows, **slots), minlength=4)
    expected = 4000 * np.array([0.1, 0.5, 0.15, 0.25])
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees of freedom, 1 in 1000
