"""The harness: broken kernels are caught whatever they break, on any device, in any dtype, and the sentence says where.

Every broken kernel is the correct one with one fault; the correct one passes.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft.backend import CacheSpec, StepMeta
from polydraft.conformance.harness import check_kernel, deliver, run_golden, run_kernel, weight_role
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Args, Case, Contract, Limits, LogicalCache, opaque, param, tensor
from polydraft.contracts.compare import EPS, Products, compare, from_host, to_host
from polydraft.contracts.inputs import Poison, arrays, default_cases, generated, limits_of, namespace, symbols
from polydraft.errors import ContractError
from polydraft.reference.device import ReferenceDevice
from polydraft.reference.provider import plain
from tests.contracts import toy

CASE = toy.case("two_of_four", [2, -1, 0], 3)


def table_of(device: Any, body: toy.Body = toy.kernel, name: str = "blend") -> Any:
    """A kernel table with one kernel."""
    return SimpleNamespace(providers={name: device.bind_kernel(plain(body))})


def check(body: toy.Body, case: Case = CASE, device: Any = None) -> Any:
    device = device or ReferenceDevice()
    return check_kernel(toy.CONTRACT, case, device, table_of(device, body))


def then(fault: Callable[[Any, int], None]) -> toy.Body:
    """The correct kernel with something after it."""

    def body(a: Any, n: int) -> None:
        toy.kernel(a, n)
        fault(a, n)

    return body


def at(name: str, index: Any, value: Any) -> toy.Body:
    def fault(a: Any, n: int) -> None:
        getattr(a, name)[index] = value

    return then(fault)


def accumulating(a: Any, n: int) -> None:
    before = a.out.copy()
    toy.kernel(a, n)
    a.out[:n] += before[:n]


def replaced(a: Any, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(a), **changes})


@pytest.mark.parametrize("case", list(toy.strong_cases()), ids=lambda case: case.name)
def test_correct_kernel_passes(case: Case):
    result = check(toy.kernel, case)
    assert result.ok, result.describe()
    assert result.headroom is not None
    assert result.headroom.argument == "out"
    assert 0 < result.headroom.ratio < 1
    assert "elements as specified; out[" in result.describe()


FAULTS: Mapping[str, tuple[toy.Body, str]] = {
    "row beyond the launch": (at("out", 3, 0.0), r"out\[3, 0\] is 0, wanted -24576 as before the launch"),
    "padding row not written": (at("out", 1, -24576.0), r"out\[1, 0\] is -24576, wanted exactly 0"),
    "NaN in a padding row": (at("out", (1, 1), np.nan), r"out\[1, 1\] is nan, wanted exactly 0"),
    "input changed": (at("x", (3, 1), 5.0), r"x\[3, 1\] is 5, wanted .* as before the launch"),
    "index changed": (at("row_slot", 1, 0), r"row_slot\[1\] is 0, wanted -1 as before the launch"),
    "state of a slot without rows": (at("count", 1, 0), r"count\[1\] is 0, wanted \d+ as before the launch"),
    "state not written": (then(lambda a, n: a.last.fill(7)), r"last\[0\] is 7, wanted exactly 2"),
    "one row short": (lambda a, n: toy.kernel(a, n - 1), r"out\[2, \d\] is -24576, wanted .* within"),
    "one row too many": (lambda a, n: toy.kernel(a, n + 1), r"out\[3, 0\] is 0, wanted -24576 as before the launch"),
    "small error": (then(lambda a, n: a.out[:n].__imul__(np.float32(1 + 1e-5))), r"out\[\d, \d\] is .* within \d"),
    "adds to what it should write": (accumulating, r"out\[\d, \d\] is -24\d{3}\.?\d*, wanted"),
    "does nothing": (lambda a, n: None, r"count\[0\] is \d+, wanted exactly \d+ \(2 of 3 elements are wrong\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_kernel_is_caught(fault: str):
    body, wanted = FAULTS[fault]
    result = check(body)
    assert not result.ok
    assert "blend/1, case 'two_of_four': " in result.describe()
    assert re.search(wanted, result.describe()), result.describe()


@pytest.mark.parametrize("act", EPS)
def test_every_activation_dtype(act: str):
    device = ReferenceDevice()

    def body(a: Any, n: int) -> None:
        wide = replaced(a, x=from_host(a.x, act).astype(np.float32), out=from_host(a.out, act).astype(np.float32))
        toy.kernel(wide, n)
        a.out[...] = to_host(wide.out, act)

    def sloppy(a: Any, n: int) -> None:
        body(a, n)
        a.out[0] = to_host(from_host(a.out[0], act) * (1 + 32 * EPS[act]), act)

    assert check_kernel(toy.CONTRACT, CASE, device, table_of(device, body), act=act).ok
    assert not check_kernel(toy.CONTRACT, CASE, device, table_of(device, sloppy), act=act).ok


def test_nothing_is_read_before_its_event():
    class LazyDevice(ReferenceDevice):
        """Runs nothing until an event is waited for."""

        def __init__(self) -> None:
            super().__init__()
            self.queue: list[Callable[[], None]] = []

        def enqueue(self, stream: Any, work: Callable[[], None]) -> None:
            self.queue.append(work)

        def run(self) -> None:
            while self.queue:
                self.queue.pop(0)()

        def event(self) -> Any:
            return SimpleNamespace(record=lambda stream: None, synchronize=self.run)

        synchronize = run

    device = LazyDevice()

    def enqueued(args: Any, limits: Any, workspace: Any) -> Any:
        a = SimpleNamespace(**{name: getattr(v, "host_array", v) for name, v in vars(args).items()})
        return lambda stream, n: device.enqueue(stream, lambda: toy.kernel(a, n))

    provider = SimpleNamespace(bind=enqueued, workspace_bytes=lambda args, limits: 0)
    result = check_kernel(toy.CONTRACT, CASE, device, SimpleNamespace(providers={"blend": provider}))  # type: ignore[arg-type]
    assert result.ok, result.describe()


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (lambda device: 7, "the launch returned 7, wanted None; let it return nothing$"),
        (lambda device: device.empty("temporary", (1,), "f32") and None, "the launch allocated 1 and .* to `bind`$"),
        (lambda device: device.synchronize(), "allocated 0 and synchronised 1 times, wanted 0 and 0; move that work to `bind`$"),
        (lambda device: device.synchronize() or 7, "the launch returned 7, .*, and it allocated 0 and synchronised 1 times"),
    ],
)
def test_launch_keeps_what_launches_promise(launch: Callable[[Any], Any], words: str):
    device = ReferenceDevice()
    provider = SimpleNamespace(
        bind=lambda args, limits, workspace: lambda stream, n: launch(device), workspace_bytes=lambda args, limits: 0
    )
    with pytest.raises(ContractError, match=words):
        run_kernel(toy.CONTRACT, CASE, device, SimpleNamespace(providers={"blend": provider}))  # type: ignore[arg-type]


def test_workspace_has_the_size_that_was_asked_for():
    device, seen = ReferenceDevice(), []

    def bind(args: Any, limits: Any, workspace: Any) -> Any:
        seen.append((workspace.nbytes, workspace.buffer.shape, workspace.buffer.dtype))
        return lambda stream, n: None

    provider = SimpleNamespace(bind=bind, workspace_bytes=lambda args, limits: 48)
    run_kernel(toy.CONTRACT, CASE, device, SimpleNamespace(providers={"blend": provider}))  # type: ignore[arg-type]
    assert seen == [(48, (48,), "u8")]


def test_everything_happens_on_the_stream_that_is_given():
    class NotingDevice(ReferenceDevice):
        """Notes the streams that are used."""

        used: list[Any] = []  # noqa: RUF012  one device

        def enqueue(self, stream: Any, work: Callable[[], None]) -> None:
            self.used.append(stream)
            work()

    device = NotingDevice()
    provider = SimpleNamespace(
        bind=lambda args, limits, workspace: lambda stream, n: device.used.append(stream), workspace_bytes=lambda args, limits: 0
    )
    table: Any = SimpleNamespace(providers={"blend": provider})
    other = device.make_stream("other")
    run_kernel(toy.CONTRACT, CASE, device, table, stream=other)
    assert set(map(id, device.used)) == {id(other)}
    device.used.clear()
    run_kernel(toy.CONTRACT, CASE, device, table)
    assert set(map(id, device.used)) == {id(device.stream)}


def test_kernel_that_is_not_there():
    with pytest.raises(ContractError, match="blend/1 has no provider, got other; add it"):
        run_kernel(toy.CONTRACT, CASE, ReferenceDevice(), table_of(ReferenceDevice(), name="other"))


def contract_over(args: type[Args], golden: Any, case: Case, **changes: Any) -> Contract:
    """A contract with one case."""
    name = args.__name__.removesuffix("V1").lower()
    return Contract(name, 1, "any", args, golden, lambda: iter([case]), lambda rng: case, "Toy.", "None.", **changes)


class LayerV1(Args):
    """Arguments that a backend owns."""

    row_slot: Any = tensor("N", "i32", "Slots.")
    positions: Any = tensor("N", "i32", "Positions.")
    block_table: Any = tensor("B MB", "i32", "Blocks.")
    weight: Any = opaque("weight", "Matrix.", shape="O I")
    norm: Any = opaque("weight", "Gain.", shape="D", optional=True)
    cache: Any = opaque("cache", "Cache.", access="inout")
    meta: Any = opaque("meta", "Metadata.", optional=True)
    block_size: int = param("Positions of a block.")


def add_one(a: Any, n: int) -> None:
    a.cache.k[0, :, 0] += a.weight[0, 0]


def layer(**changes: Any) -> tuple[Contract, Case]:
    third = np.float32(1 / 3)
    arrays = {
        "row_slot": np.array([1, -1, 1, 0, 3], np.int32), "positions": np.zeros(5, np.int32),
        "block_table": np.zeros((4, 3), np.int32), "weight": np.full((2, 2), third),
        "cache": LogicalCache(np.full((6, 2, 1, 2), third), np.full((6, 2, 1, 2), third)),
    }  # fmt: skip
    case = Case("layer", arrays, {"block_size": 2}, 4)
    contract = Contract("layer", 1, "any", LayerV1, add_one, lambda: iter([case]), lambda rng: case, "Layer.", "None.", **changes)
    return contract, case


def test_weights_caches_and_metadata_come_from_the_backend():
    contract, case = layer(tolerance={"cache.k": 1.0})
    device = ReferenceDevice()
    asked: list[Any] = []
    filled: list[StepMeta] = []

    class Cache:
        """A backend's cache."""

        nbytes = 0

        def write_logical(self, k: Any, v: Any) -> None:
            self.k, self.v = k.copy(), v.copy()

        def read_logical(self) -> Any:
            return self.k, self.v

    def bind(args: Any, limits: Any, workspace: Any) -> Any:
        asked.append((args.norm, args.meta, limits.block_size, limits.max_blocks, limits.num_blocks, limits.max_len))

        def launch(stream: Any, n: int) -> None:
            args.cache.k[0, :, 0] += args.weight[0, 0]

        return launch

    def prepare_weight(role: str, value: Any, dtype: str, previous: Any = None) -> Any:
        asked.append((role, value.dtype, value[0, 0], dtype))
        return value

    def allocate_cache(spec: CacheSpec) -> Any:
        asked.append(spec)
        return Cache()

    def init_meta(device: Any, buffers: Any, limits: Any) -> Any:
        assert buffers.row_slot.host_array.tolist() == [1, -1, 1, 0, 3]
        assert buffers.block_table.shape == (4, 3)
        return SimpleNamespace(fill=lambda stream, step: filled.append(step))

    provider = SimpleNamespace(bind=bind, workspace_bytes=lambda args, limits: 0)
    table: Any = SimpleNamespace(providers={"layer": provider}, prepare_weight=prepare_weight, allocate_cache=allocate_cache)
    result = check_kernel(contract, case, device, table, act="bf16", init_meta=init_meta)
    assert result.ok, result.describe()
    third = from_host(to_host(np.array(1 / 3), "bf16"), "bf16")
    assert asked[:2] == [("linear", np.float32, np.float32(third), "bf16"), CacheSpec(6, 2, 1, 2, "bf16")]
    assert asked[2][0] is None
    assert asked[2][1] is not None
    assert asked[2][2:] == (2, 3, 6, 6)
    assert filled == [StepMeta(0, launch_rows=4, real_slots=2, has_prefill=True)]
    assert set(run_golden(contract, case)) == {"row_slot", "positions", "block_table", "cache.k", "cache.v"}


def test_tolerance_of_a_cache_may_name_a_half_or_the_whole():
    for tolerance, halves in (({"cache": 1.0}, {"cache.k", "cache.v"}), ({"cache.k": 1.0}, {"cache.k"})):
        contract, case = layer(tolerance=tolerance)
        assert {name for name, want in run_golden(contract, case).items() if want.allowed is not None} == halves


@pytest.mark.parametrize("act", EPS)
def test_default_scale_of_a_cache_is_that_of_one_token(act: str):
    contract, case = layer(tolerance={"cache.k": 1.0})
    allowed = run_golden(contract, case, act)["cache.k"].allowed
    third = from_host(to_host(np.array(1 / 3), act), act)
    assert allowed is not None
    wanted = np.zeros((6, 2, 1, 1))
    wanted[0] = 2 * third * EPS[act]  # `add_one` writes both tokens of block 0 and leaves the others alone
    np.testing.assert_array_equal(allowed, wanted)


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("weight", "V H", "embedding"), ("weight", "O I", "linear"), ("bias", "O", "bias"), ("q_norm", "D", "norm"),
        ("weight", "D", "norm"),
    ],
)  # fmt: skip
def test_role_of_a_weight(name: str, shape: str, role: str):
    spec = opaque("weight", "Weight.", shape=shape).metadata["spec"]
    assert weight_role(name, spec) == role


def test_default_scale_is_what_the_golden_wrote_in_the_row():
    class PartV1(Args):
        """Half of every row is written."""

        out: Any = tensor("N H", "f32", "Output.", access="out")

    def golden(a: Any, n: int) -> None:
        a.out[:n, :2] = [[0.5, -2.0], [0.0, np.inf]]

    case = Case("part", {}, {}, 2, {"out": ((3, 4), "f32")})
    want = run_golden(contract_over(PartV1, golden, case, tolerance={"out": 3.0}), case)["out"]
    # 24576, the poison of the other half, is no magnitude; neither is infinity.
    np.testing.assert_array_equal(want.allowed, np.array([[2.0], [0.0], [0.0]]) * 3.0 * EPS["f32"])


@pytest.mark.parametrize(("name", "factor"), [("linear", "x"), ("paged_attention", "q")])
def test_products_in_tf32_are_right_where_they_are_declared(name: str, factor: str):
    """A device that keeps 10 bits of a factor's mantissa is right where it says so, one that keeps 4 is not. Numbers of bf16 are
    numbers of TF32: nothing is rounded, and nothing more is allowed."""
    kernel = REGISTRY[name]
    case = generated(kernel, 2)

    def held(bits: int, products: Products) -> bool:
        a, rounded = namespace(kernel, case), namespace(kernel, case)
        mantissa, exponent = np.frexp(getattr(a, factor))
        setattr(rounded, factor, np.ldexp(np.round(mantissa * 2.0 ** (bits + 1)), exponent - bits - 1))
        kernel.golden(rounded, case.n)
        a.out[...] = rounded.out
        got = deliver(kernel, case, arrays(kernel, a))
        return compare(kernel, case, got, run_golden(kernel, case, products=products)).ok

    assert (held(10, "f32"), held(10, "tf32"), held(4, "tf32")) == (False, True, False)
    plain, coarse = (run_golden(kernel, case, "bf16", products=products)["out"].allowed for products in ("f32", "tf32"))
    assert plain is not None
    assert coarse is not None
    np.testing.assert_array_equal(plain, coarse)


def test_a_tolerance_does_not_shrink_below_the_distance_of_subnormal_numbers():
    class SmallV1(Args):
        """A row of tiny numbers and a row of zeros."""

        out: Any = tensor("N H", "act", "Output.", access="out")

    def golden(a: Any, n: int) -> None:
        a.out[:n] = [[5e-8, 1e-7], [0.0, 0.0]]

    case = Case("small", {}, {}, 2, {"out": ((2, 2), "act")})
    contract = contract_over(SmallV1, golden, case, tolerance={"out": 1.0})
    allowed = run_golden(contract, case, "f16")["out"].allowed
    np.testing.assert_array_equal(allowed, [[2.0**-24], [0.0]])  # neighbours of f16 below 2**-14; zeros stay exact
    np.testing.assert_array_equal(run_golden(contract, case)["out"].allowed, np.array([[1e-7], [0.0]]) * EPS["f32"])


def test_rows_that_carry_nothing_may_be_declared_open():
    class OpenV1(Args):
        """Padding rows hold anything."""

        row_slot: Any = tensor("N", "i32", "Slots.")
        out: Any = tensor("N", "f32", "Output.", access="out", pad="any")

    def golden(a: Any, n: int) -> None:
        a.out[:n][a.row_slot[:n] >= 0] = 1.0

    case = Case("open", {"row_slot": np.array([0, -1, 2, -1], np.int32)}, {}, 3, {"out": ((4,), "f32")})
    contract = contract_over(OpenV1, golden, case)
    assert run_golden(contract, case)["out"].loose.tolist() == [False, True, False, False]  # type: ignore[union-attr]
    device = ReferenceDevice()

    def verdict(*values: float) -> bool:
        body = lambda a, n: a.out.__setitem__(slice(n), values)  # noqa: E731
        return check_kernel(contract, case, device, table_of(device, body, "open")).ok

    assert verdict(1.0, 5.0, 1.0)
    assert not verdict(1.0, np.nan, 1.0)
    assert not verdict(1.0, 5.0, 2.0)


def test_open_rows_need_not_be_finite_where_inputs_are_not():
    class OpenV1(Args):
        """A float input beside an open output."""

        x: Any = tensor("N", "f32", "Floats.")
        out: Any = tensor("N", "f32", "Output.", access="out", pad="any")

    for x, finite in ((1.0, True), (np.inf, False), (np.nan, False)):
        case = Case("open", {"x": np.array([x], np.float32)}, {}, 1, {"out": ((1,), "f32")})
        assert run_golden(contract_over(OpenV1, lambda a, n: None, case), case)["out"].loose_finite is finite


def test_poison_has_no_effect_on_a_golden_that_does_not_read_it():
    one, two = (run_golden(toy.CONTRACT, CASE, poison=poison)["out"] for poison in (Poison(), Poison(real=1536.0)))
    np.testing.assert_array_equal(one.value[:3], two.value[:3])
    assert (one.value[3], two.value[3]) == pytest.approx((-24576.0, 1536.0))


def test_poison_of_integers_fills_every_byte():
    assert [Poison().of(dtype) for dtype in ("i32", "u32", "u8")] == [0x5A5A5A5A, 0x5A5A5A5A, 0x5A]
    assert Poison(integer=0x1234).of("u8") == 0x34


@pytest.mark.parametrize("dtype", EPS)
def test_poison_is_exact_in_every_dtype(dtype: str):
    assert from_host(to_host(np.array(Poison().real), dtype), dtype) == Poison().real


def test_golden_runs_on_copies():
    before = {name: array.copy() for name, array in CASE.arrays.items()}
    for _ in range(2):
        run_golden(toy.CONTRACT, CASE)
    check(toy.kernel)
    for name, array in before.items():
        np.testing.assert_array_equal(CASE.arrays[name], array)


def test_arguments_are_widened_and_rounded():
    a = namespace(toy.CONTRACT, CASE, "bf16")
    assert (a.x.dtype, a.out.dtype, a.gain.dtype, a.row_slot.dtype) == (np.float64, np.float64, np.float64, np.int32)
    np.testing.assert_array_equal(a.x, from_host(to_host(CASE.arrays["x"], "bf16"), "bf16"))
    np.testing.assert_array_equal(a.gain, CASE.arrays["gain"].astype(np.float64))  # f32 whatever the activation dtype


def test_generated_cases_are_named_by_their_seed_and_repeat():
    names = [case.name for case in default_cases(toy.CONTRACT, seeds=2)]
    assert names == ["padding_between_rows", "rows_of_one_slot", "negated", "seed-0", "seed-1"]
    np.testing.assert_array_equal(generated(toy.CONTRACT, 1).arrays["x"], generated(toy.CONTRACT, 1).arrays["x"])
    assert (generated(toy.CONTRACT, 1).arrays["x"] != generated(toy.CONTRACT, 0).arrays["x"]).all()


def test_symbols_of_a_case():
    assert symbols(toy.CONTRACT, CASE) == {"N": 4, "H": 2, "B": 3}
    assert symbols(toy.CONTRACT, dataclasses.replace(CASE, n=0)) == {"N": 4, "H": 2, "B": 3}


def test_capacities_of_a_case():
    assert limits_of(toy.CONTRACT, CASE) == Limits(3, 0, 4, 4, 1, 1, 1, 1, 1, 1)
    assert limits_of(*layer()) == Limits(4, 0, 5, 5, 3 * 2, 2, 6, 3, 1, 1)

    class SizesV1(Args):
        """One symbol of every capacity."""

        a: Any = tensor("B K", "i32", "Drafts.")
        b: Any = tensor("B S", "i32", "Stop tokens.")
        c: Any = tensor("B L", "i32", "Tokens.")
        d: Any = tensor("R V", "f32", "Rows.")
        e: Any = tensor("NL", "i32", "Logit rows.")
        f: Any = tensor("B W", "i32", "Window.", access="out")

    def sized(**changes: Any) -> tuple[Contract, Case]:
        shapes = {"a": (2, 3), "b": (2, 4), "c": (2, 50), "e": (7,)}
        arrays = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
        case = Case("sizes", {**arrays, "d": np.zeros((6, 9), np.float32)}, {}, 1, {"f": ((2, 4), "i32")})
        return contract_over(SizesV1, lambda a, n: None, case, **changes), case

    assert limits_of(*sized()) == Limits(2, 3, 6, 7, 50, 1, 1, 1, 4, 9)

    class WindowV1(Args):
        """A window without drafts."""

        window: Any = tensor("B W", "i32", "Window.")

    case = Case("window", {"window": np.zeros((2, 4), np.int32)}, {}, 1)
    assert limits_of(contract_over(WindowV1, lambda a, n: None, case), case).num_drafts == 3


@pytest.mark.parametrize(("declared", "given", "fits"), [
    ("float", "act", True), ("float", "f32", True), ("float", "f16", False), ("float", "i32", False),
    ("act", "act", True), ("act", "f32", False), ("f32", "f32", True), ("f32", "act", False),
])  # fmt: skip
def test_dtype_of_an_output(declared: str, given: str, fits: bool):
    args = type("OutV1", (Args,), {"__annotations__": {"out": Any}, "out": tensor("N", declared, "Out.", access="out")})
    case = Case("out", {}, {}, 1, {"out": ((2,), given)})
    contract = contract_over(args, lambda a, n: None, case)
    if fits:
        assert symbols(contract, case) == {"N": 2}
        assert run_golden(contract, case, "bf16")["out"].dtype == ("bf16" if given == "act" else "f32")
    else:
        with pytest.raises(ContractError, match=r"out has .* in `outputs`, wanted a shape and"):
            symbols(contract, case)


def test_only_optional_arguments_may_be_left_out():
    contract, case = layer()
    assert symbols(contract, case)
    without = {name: value for name, value in case.arrays.items() if name != "weight"}
    with pytest.raises(ContractError, match=r"weight has .*NoneType"):
        symbols(contract, dataclasses.replace(case, arrays=without))


INCONSISTENT: dict[str, tuple[dict[str, Any], str]] = {
    "argument missing": ({"arrays": {"x": None}}, "x has .*NoneType.*, wanted an array of float32"),
    "argument unknown": ({"arrays": {"y": np.zeros(4, np.float32)}}, "y has a value, wanted fields of BlendV1 only"),
    "sizes that differ": ({"arrays": {"gain": np.zeros(2, np.float32)}}, r"offset has shape \(3,\), wanted \[B\], here \[2\]"),
    "one axis too many": ({"arrays": {"gain": np.zeros((3, 1), np.float32)}}, r"gain has shape \(3, 1\), wanted \[B\]"),
    "other dtype": ({"arrays": {"row_slot": np.zeros(4, np.int64)}}, "row_slot has int64, wanted an array of int32"),
    "no array": ({"arrays": {"row_slot": [0, 0, 0, 0]}}, "row_slot has .*list.*, wanted an array of int32"),
    "activations in float64": ({"arrays": {"x": np.zeros((4, 2))}}, "x has float64, wanted an array of float32"),
    "parameter missing": ({"params": {"times": 1}}, "mode has no value, wanted one"),
    "output missing": ({"outputs": {}}, "out has .* in `outputs`, wanted a shape and act"),
    "output of another dtype": ({"outputs": {"out": ((4, 2), "f16")}}, "out has .*f16.* in `outputs`, wanted a shape and act"),
    "output of another size": ({"outputs": {"out": ((5, 2), "act")}}, r"out has shape \(5, 2\), wanted \[N H\], here \[4, 2\]"),
    "negative launch": ({"n": -1}, "the launch has length -1, wanted 0 or more"),
}


@pytest.mark.parametrize("fault", INCONSISTENT)
def test_case_that_contradicts_its_record(fault: str):
    changes, words = INCONSISTENT[fault]
    changes = {key: {**CASE.arrays, **value} if key == "arrays" else value for key, value in changes.items()}
    with pytest.raises(ContractError, match=f"blend/1, case 'two_of_four': {words}.*; correct the case"):
        symbols(toy.CONTRACT, dataclasses.replace(CASE, **changes))
