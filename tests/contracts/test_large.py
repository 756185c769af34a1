"""Cases at the sizes of real models, and cases on no list: as large as was asked, filled to the end, and rightly judged by a
golden that runs over a small part of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polydraft.conformance.harness import _allowed, deliver, run_golden
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Case, Contract, LogicalCache, TensorSpec
from polydraft.contracts.compare import NORMAL, compare
from polydraft.contracts.inputs import Kernel, arrays, contract_of, default_cases, limits_of, namespace, symbols
from polydraft.contracts.kernels.argmax import best_first, highest
from polydraft.contracts.kernels.sample import MANY_KEPT
from polydraft.contracts.large import (
    called,
    large,
    large_names,
    large_packed,
    large_sizes,
    of_model,
    repeated,
    several_large,
    sizes_of,
    surprise,
)
from polydraft.contracts.packing import PACKINGS, PackedWeight
from polydraft.contracts.sizes import MODELS
from polydraft.device import Array
from tests.support.depth import among, deep

CONTRACTS = list(REGISTRY)
KERNELS: list[Kernel] = [*CONTRACTS, *COMPOSITES.values()]
each = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
LISTED = [(kernel, symbol, size) for kernel in KERNELS for symbol, size in large_names(kernel)]


def steps(kernel: Any, symbol: str) -> tuple[int, ...]:
    return contract_of(kernel).grows[symbol].steps


def some(listed: list[tuple[Any, str, int]]) -> list[Any]:
    """The second size of each ladder, and for `make deep` its last; the kit runs every backend over all of them."""
    of_ladders = [(one, steps(*one[:2])) for one in listed]
    return [one if one[2] == sizes[1] else deep(one) for one, sizes in of_ladders if one[2] in (sizes[1], sizes[-1])]


def named(value: Any) -> str:
    return str(getattr(value, "name", value))


def rounded(contract: Contract) -> list[str]:
    """Outputs in the dtype of activations."""
    return [
        name
        for name, spec in contract.args.specs().items()
        if isinstance(spec, TensorSpec) and spec.dtype == "act" and spec.access != "in"
    ]


# -- the cases ------------------------------------------------------------------------------------------
@each
def test_every_contract_says_what_can_be_large(contract: Contract):
    params = {name for name, spec in contract.args.specs().items() if not hasattr(spec, "shape")}
    known = {symbol for spec in contract.args.specs().values() for symbol in getattr(spec, "shape", "").split()}
    assert contract.grows
    cached = {"num_blocks"} if any(getattr(spec, "kind", "") == "cache" for spec in contract.args.specs().values()) else set()
    assert set(contract.grows) <= known | params | {"B"} | cached
    assert {symbol for sizes in contract.together for symbol in sizes} <= set(contract.grows)
    assert set(contract.independent) <= set(contract.grows)
    assert all(list(ladder.steps) == sorted(set(ladder.steps)) for ladder in contract.grows.values())


@pytest.mark.parametrize(("kernel", "symbol", "size"), some(LISTED), ids=named)
def test_a_case_is_as_large_as_its_name_says(kernel: Any, symbol: str, size: int):
    contract, case = contract_of(kernel), large(kernel, symbol, size)
    sizes = symbols(contract, case)
    assert case.name == f"{symbol}-{size}"
    blocks = limits_of(contract, case).num_blocks
    assert size <= {**sizes, **case.params, "num_blocks": blocks}[symbol] <= size + 2, "rows and two beyond the launch"
    launched = "N" if contract.unit == "any" else ""
    assert case.n == size if symbol == launched and contract.name != "pack_logprobs" else case.n > 0
    others = [length for other, length in sizes.items() if other != symbol and other in contract.grows]
    assert max(others, default=0) < 3100, "one dimension at a time, and what follows from it"


@pytest.mark.parametrize(("contract", "sizes"), [(c, sizes) for c in CONTRACTS for sizes in c.together], ids=named)
def test_a_case_with_several_large_sizes_has_them_all(contract: Contract, sizes: dict[str, int]):
    case = several_large(contract, sizes)
    found = symbols(contract, case)
    assert called(contract, case.name) is not None
    assert case.name == "+".join(f"{symbol}-{size}" for symbol, size in sizes.items())
    assert all(size <= found[symbol] <= size + 2 for symbol, size in sizes.items())


ALONE = [(kernel, sizes) for kernel in KERNELS for sizes in large_sizes(kernel) if sizes.get("N") == 1]


@pytest.mark.parametrize(("kernel", "sizes"), among(ALONE[::8], ALONE), ids=named)
def test_a_row_alone_carries_something(kernel: Any, sizes: dict[str, int]):
    case = several_large(kernel, sizes)
    assert case.n == 1
    assert all(case.arrays[name][0] >= 0 for name in ("row_slot", "index") if name in case.arrays)


@pytest.mark.parametrize("packing", among(["int4-group32"], PACKINGS))
@pytest.mark.parametrize("name", ["linear", "expert_mlp"])
def test_packed_matrices_are_large_along_each_axis(name: str, packing: str):
    cases = list(large_packed(REGISTRY[name], packing))
    weights = [one for case in cases for one in case.arrays.values() if isinstance(one, PackedWeight)]
    assert {case.n == 1 for case in cases} == {True, False}
    assert {weight.packing.name for weight in weights} == {packing}
    assert all(max(weight.shape[axis] for weight in weights) > 1000 for axis in (-1, -2))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("N-7", {"N": 7}), ("N-70+I-300", {"N": 70, "I": 300}), ("Q-7", {}), ("N-7+Q-7", {}), ("N-", {}), ("one_row", {}), ("", {})],
)
def test_any_sizes_may_be_asked_for_by_name(name: str, sizes: dict[str, int]):
    assert sizes_of(REGISTRY["linear"], name) == sizes


@pytest.mark.parametrize("name", ["paged_attention", "rope_kv_write"])
def test_blocks_of_a_large_pool_are_those_at_its_end(name: str):
    case = large(REGISTRY[name], "num_blocks", 65_700)
    granted = case.arrays["block_table"][case.arrays["block_table"] >= 0]
    assert len(granted) > 10
    assert granted.min() > 0xFFFF


@pytest.mark.parametrize("name", ["paged_attention", "rope_kv_write"])
def test_a_large_block_is_filled_and_another_begun(name: str):
    case = large(REGISTRY[name], "block_size", 128)
    valid = case.arrays["row_slot"][: case.n] >= 0
    assert case.arrays["positions"][: case.n][valid].max() >= 256


@pytest.mark.parametrize("name", ["paged_attention", "rope_kv_write"])
def test_most_of_many_rows_are_one_chunk_of_a_prompt(name: str):
    slots = large(REGISTRY[name], "N", 512).arrays["row_slot"]
    assert np.bincount(slots[slots >= 0]).max() > 256


def test_filters_of_a_large_vocabulary_keep_more_than_a_short_list():
    case = large(REGISTRY["filter_probs"], "V", 32_000)
    assert (run_golden(REGISTRY["filter_probs"], case)["logits"].value > 0).sum(axis=1).max() == MANY_KEPT
    case = large(REGISTRY["sample"], "V", 32_000)
    chosen, slots = run_golden(REGISTRY["sample"], case)["tokens"].value, case.arrays["row_slot"]
    places = [
        best_first(case.arrays["logits"][r]).index(chosen[r])
        for r in range(case.n)
        if slots[r] >= 0 and case.arrays["top_k"][slots[r]] == MANY_KEPT
    ]
    assert max(places) >= 64


def flat(case: Case) -> list[Any]:
    values = [part for v in case.arrays.values() for part in (v if isinstance(v, tuple) else (v,))]
    halves = [part for v in values for part in ((v.k, v.v) if isinstance(v, LogicalCache) else (v,))]
    return [v if v is None else v.tobytes() for v in halves] + [case.n, sorted(case.params.items())]


@each
def test_what_is_drawn_hangs_on_the_seed_alone(contract: Contract):
    cases = [surprise(contract, 4, number) for number in range(8)]
    drawn = [flat(case) for case in cases[:2]]
    assert drawn == [flat(surprise(contract, 4, number)) for number in range(2)]
    other = [flat(surprise(contract, 5, number)) for number in range(2)]
    assert all(one not in other for one in drawn)
    shapes = {repr(sorted(symbols(contract, case).items())) for case in cases}
    assert len(shapes) > 4


def test_a_model_gives_all_its_sizes_at_once():
    head = of_model(REGISTRY["linear"], "qwen2.5-0.5b")
    assert (head.name, head.n, head.arrays["x"].shape[1]) == ("model-qwen2.5-0.5b", 64, 896)
    assert len(head.arrays["weight"]) == (1 << 27) // (64 * 896) * 64 or head.arrays["weight"].size <= 1 << 27
    attention = of_model(REGISTRY["paged_attention"], "mimo-7b")
    assert (attention.params["num_heads"], attention.params["head_dim"]) == (32, 128)
    assert set(MODELS) == {"qwen2.5-0.5b", "mimo-7b", "llama-3-70b"}


# -- filled to the end ------------------------------------------------------------------------------------
def later_half(array: Array, axis: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(array.shape[axis] // 2, None))


def spoilt(array: Array, axis: int) -> list[Array]:
    """The array with its later half changed: floats of the other sign; integers elsewhere, one more, or sentinels."""
    half, ways = later_half(array, axis), []
    part = array[half]
    others = (
        [-part] if array.dtype.kind == "f" else [np.roll(part, 1, axis=axis), part + part.dtype.type(1), ~np.zeros_like(part)]
    )
    for other in others:
        ways.append(array.copy())
        ways[-1][half] = other
    return ways


def left(contract: Contract, case: Case) -> dict[str, Array]:
    """What the golden writes, zero where it writes nothing."""
    a = namespace(contract, case)
    before = {name: array.copy() for name, array in arrays(contract, a).items()}
    with np.errstate(all="ignore"):
        contract.golden(a, case.n)
    found = arrays(contract, a)
    kept = {name: (found[name] == old) | (_nan(found[name]) & _nan(old)) for name, old in before.items()}
    return {name: np.where(kept[name], 0, found[name]) for name in before}


def _nan(array: Array) -> Array:
    return np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)


def matters(contract: Contract, case: Case, symbol: str) -> bool:
    """Whether somebody who stops in the middle of the axis would be noticed: the golden writes something behind it that is no
    padding, or writes something else where the inputs behind it are changed."""
    specs: dict[str, Any] = {n: spec for n, spec in contract.args.specs().items() if symbol in getattr(spec, "shape", "").split()}
    wanted = left(contract, case)
    for name, spec in specs.items():
        if isinstance(spec, TensorSpec) and spec.access != "in":
            written = wanted[name][later_half(wanted[name], spec.symbols.index(symbol))]
            if (written[written != (spec.pad if isinstance(spec.pad, (int, float)) else 0)] != -1).any():
                return True
    for name, spec in specs.items():
        if spec.access == "out" or case.arrays.get(name) is None:
            continue
        for array in spoilt(case.arrays[name], spec.shape.split().index(symbol)):
            try:
                found = left(contract, dataclasses.replace(case, arrays={**case.arrays, name: array}))
            except (IndexError, ValueError):
                return True
            if any(not np.array_equal(found[key], wanted[key], equal_nan=wanted[key].dtype.kind == "f") for key in wanted):
                return True
    return False


DEFINED = [
    (contract, symbol, size)
    for contract, symbol, size in LISTED
    if isinstance(contract, Contract)
    and symbol not in contract.independent
    and any(symbol in getattr(spec, "shape", "").split() for spec in contract.args.specs().values())
]


@pytest.mark.parametrize(("contract", "symbol", "size"), some(DEFINED), ids=named)
def test_the_later_half_of_what_is_large_matters(contract: Contract, symbol: str, size: int):
    assert matters(contract, large(contract, symbol, size), symbol)


@pytest.mark.parametrize("contract", [c for c in CONTRACTS if rounded(c)], ids=named)
def test_what_comes_out_of_large_cases_is_a_number_in_half_precision(contract: Contract):
    """float16 ends at 65504: a device that computes in it would be called wrong where the true value lies beyond."""
    cases = [large(contract, symbol, ladder.steps[-1]) for symbol, ladder in contract.grows.items()]
    for case in (*cases, *(surprise(contract, 5, number) for number in range(4))):
        expected = run_golden(contract, case, "f16")
        for name in rounded(contract):
            most = np.nanmax(np.abs(expected[name].value))
            assert most <= 65504, f"{case.name}: {name} is {most}"


# -- the golden of a part is the golden ---------------------------------------------------------------------
@pytest.mark.parametrize("kernel", [k for k in KERNELS if contract_of(k).independent], ids=named)
def test_axes_that_are_called_independent_are(kernel: Any):
    """Every element of a case that repeats places of a small one is what the golden makes of the whole."""
    contract, rng = contract_of(kernel), np.random.default_rng(1)
    for case in default_cases(kernel, 6):
        if case.n == 0:
            continue
        have = symbols(contract, case)
        whole = repeated(contract, case, {symbol: have[symbol] + 5 for symbol in contract.independent}, rng)
        assert whole.repeats is not None
        said, meant = run_golden(kernel, whole), run_golden(kernel, dataclasses.replace(whole, repeats=None))
        assert said.keys() == meant.keys()
        for name, one in meant.items():
            for part in ("value", "before", "allowed", "loose"):
                mine, its = getattr(said[name], part), getattr(one, part)
                assert (mine is None) == (its is None), (case.name, name, part)
                if its is not None:  # scales may sum in another order
                    near = 1e-12 if part == "allowed" else 0
                    np.testing.assert_allclose(mine, np.broadcast_to(its, one.value.shape), near, err_msg=f"{case.name} {name}")


def test_a_place_that_looks_at_another_is_found():
    """The other way round: an axis that is not independent would be noticed by the test above."""
    contract = dataclasses.replace(REGISTRY["argmax"], independent=("V",))
    whole = repeated(contract, next(iter(contract.cases())), {"V": 40}, np.random.default_rng(1))
    said, meant = run_golden(contract, whole), run_golden(contract, dataclasses.replace(whole, repeats=None))
    assert (said["tokens"].value != meant["tokens"].value).any()


# -- what an honest first kernel does -----------------------------------------------------------------------
def added(terms: Array) -> Array:
    """A float32 sum over the last axis, one number after the other."""
    return np.cumsum(terms.astype(np.float32), axis=-1, dtype=np.float32)[..., -1]


def rms_norm(a: Any, n: int) -> None:
    for r in range(n):
        a.out[r] = _normalised(a.x[r], a.weight, a)


def _normalised(x: Array, weight: Array, a: Any) -> Array:
    single, gain = x.astype(np.float32), weight.astype(np.float32)
    inverse = np.float32(1) / np.sqrt(added(single * single) / np.float32(len(single)) + np.float32(a.eps))
    return np.asarray(single * inverse * (np.float32(1) + gain if a.plus_one else gain))


def combine_draft_inputs(a: Any, n: int) -> None:
    for r in range(n):
        masked = a.mask_first_position and a.positions[r] == 0
        halves = [_normalised(a.hidden[r], a.hid_norm, a), _normalised(a.embedding[r] * (0 if masked else 1), a.emb_norm, a)]
        a.out[r] = np.concatenate(halves if a.order == "hidden_first" else halves[::-1])


def linear(a: Any, n: int) -> None:
    for r in range(n):
        a.out[r] = added(a.x[r].astype(np.float32) * a.weight.astype(np.float32))
        a.out[r] += 0 if a.bias is None else a.bias.astype(np.float32)


def paged_attention(a: Any, n: int) -> None:
    for r in range(n):
        a.out[r] = 0.0
        if a.row_slot[r] < 0:
            continue
        places = np.arange(a.positions[r] + 1)
        at = a.block_table[a.row_slot[r], places // a.block_size], places % a.block_size
        for h, q in enumerate(a.q[r].astype(np.float32).reshape(a.num_heads, -1)):
            k, v = (half[at][:, h * a.num_kv_heads // a.num_heads].astype(np.float32) for half in (a.cache.k, a.cache.v))
            scores = added(q * k) * np.float32(a.softmax_scale)
            weights = np.exp(scores - scores.max())
            a.out[r, h * a.head_dim : (h + 1) * a.head_dim] = added((weights[:, None] * v).T) / added(weights)


def top_logprobs(a: Any, n: int) -> None:
    a.ids[:n], a.logprobs[:n], a.ranks[:n] = -1, 0.0, 0
    for i, slot in enumerate(a.slot_order[:n]):
        for j, token in enumerate(a.out_tokens[i] if slot >= 0 and a.num_top[slot] >= 0 else ()):
            if token >= 0:
                warm = 1.0 if a.temperature is None or a.temperature[slot] == 0 else a.temperature[slot]
                z = a.logits[a.logit_start[i] + j].astype(np.float32) / np.float32(warm)
                order = best_first(z)
                chosen = [token, *order[: a.num_top[slot]]]
                a.ranks[i, j], a.ids[i, j, : len(chosen)] = 1 + order.index(token), chosen
                a.logprobs[i, j, : len(chosen)] = (z - z.max() - np.log(added(np.exp(z - z.max()))))[chosen]


def draft_logprobs(a: Any, n: int) -> None:
    for r, slot in enumerate(a.row_slot[:n]):
        if slot >= 0 and a.num_top[slot] >= 0 and a.tokens[r] >= 0:
            z = a.logits[r].astype(np.float32)
            whole = np.float32(0) if a.given == "probs" else z.max() + np.log(added(np.exp(z - z.max())))
            a.draft_logprobs[slot, a.draft_len[slot]] = (np.log(z) if a.given == "probs" else z)[a.tokens[r]] - whole


def argmax(a: Any, n: int) -> None:
    for r in range(n):
        a.tokens[r] = highest(a.logits[r]) if a.row_slot[r] >= 0 else -1


PLAIN: dict[str, Callable[[Any, int], None]] = {
    one.__name__: one for one in (rms_norm, combine_draft_inputs, linear, paged_attention, top_logprobs, draft_logprobs, argmax)
}


@pytest.mark.parametrize(
    ("contract", "symbol", "size"), [one for one in LISTED if one[0].name in PLAIN and one[2] == steps(*one[:2])[-1]], ids=named
)
def test_float32_sums_one_after_the_other_are_near_enough(contract: Contract, symbol: str, size: int):
    """Tolerances are for honest kernels: the plainest ones in float32 keep them at every size."""
    case = large(contract, symbol, size)
    small = case.repeats.case if case.repeats else case
    a = namespace(contract, small)
    with np.errstate(all="ignore"):
        PLAIN[contract.name](a, small.n)
    found = compare(contract, small, deliver(contract, small, arrays(contract, a)), run_golden(contract, small))
    assert found.ok, found.describe()


@pytest.mark.parametrize("inputs", [64, 512])
def test_float32_products_of_one_sign_are_near_enough(inputs: int):
    """Nothing cancels, so every step of the sum rounds a number as large as the result: so do the down projections of models."""
    contract = REGISTRY["linear"]
    case = large(contract, "I", inputs)
    case = dataclasses.replace(case, arrays={n: None if v is None else np.abs(v) for n, v in case.arrays.items()})
    a = namespace(contract, case)
    linear(a, case.n)
    found = compare(contract, case, deliver(contract, case, arrays(contract, a)), run_golden(contract, case))
    assert found.ok, found.describe()


def test_a_float32_sum_is_allowed_no_more_in_fewer_bits():
    """What a sum in float32 may be off does not grow with the dtype in which its result is rounded."""
    contract = REGISTRY["rms_norm"]
    wide, narrow = large(contract, "D", 8192), large(contract, "D", 257)
    for act, most in (("f32", 8.0), ("bf16", 1.01)):
        share = [run_golden(contract, case, act)["out"] for case in (wide, narrow)]
        relative = [
            float(np.median(one.allowed / np.maximum(np.abs(one.value), 1e-9))) for one in share if one.allowed is not None
        ]
        assert 1.0 <= relative[0] / relative[1] < most


@pytest.mark.parametrize(("dtype", "flushed"), [("f32", True), ("bf16", True), ("f16", False)])
def test_a_subnormal_result_may_be_flushed_where_devices_flush(dtype: str, flushed: bool):
    """Float32's, not float16's: 6e-5 is a probability like others."""
    kernel = REGISTRY["swiglu"]
    small = float(np.float64(NORMAL[dtype]) / 4)
    zero, value = np.zeros((1, 1)), np.full((1, 1), small)
    allowed = _allowed(kernel, "out", value, zero, {"out": value}, dtype)
    assert allowed is not None
    assert bool(allowed[0, 0] >= small) is flushed
    nothing = _allowed(kernel, "out", zero, zero, {"out": zero}, dtype)
    assert nothing is not None
    assert nothing.max() == 0.0
