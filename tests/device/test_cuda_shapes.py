"""Projections, attention and filters on a GPU in the shapes of real models, which take other kernels than small cases do."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import polydraft_cuda
from polydraft.backend import CacheSpec, DeviceOptions, PassBuffers, StepMeta
from polydraft.contracts.base import Limits
from polydraft.contracts.compare import EPS, from_host, to_host
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.kernels.argmax import ArgmaxV1
from polydraft.contracts.kernels.expert_mlp import ExpertMlpV1
from polydraft.contracts.kernels.linear import LinearV1
from polydraft.contracts.kernels.paged_attention import PagedAttentionV1
from polydraft.contracts.kernels.process_logits import ProcessLogitsV1
from polydraft.contracts.kernels.residual_add import ResidualAddV1
from polydraft.contracts.kernels.rms_norm import RmsNormV1
from polydraft.contracts.kernels.rope_kv_write import RopeKvWriteV1, plain_frequencies
from polydraft.contracts.kernels.route_experts import RouteExpertsV1
from polydraft.contracts.kernels.spread_logits import SpreadLogitsV1
from polydraft.contracts.kernels.sum_leaves import SumLeavesV1
from polydraft.contracts.kernels.swiglu import SwigluV1
from polydraft.contracts.kv_quant import quantise
from polydraft.contracts.packing import PACKINGS, pack
from polydraft.device import Array
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import attention as attention_module
from polydraft_cuda.kernels import linear as linear_module
from polydraft_cuda.kernels import routing
from tests.device.paper import SHAPES, Half, Shape, experts_of_half

pytestmark = [pytest.mark.device("cuda"), pytest.mark.timeout(600)]
ROWS = (1, 2, 4, 7, 8, 9, 16, 17, 33, 64, 65, 100, 129, 192, 193, 256, 257)


@pytest.fixture(params=["bf16", "f16"])
def opened(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions(request.param))
    yield device
    device.close()


@pytest.fixture(params=["bf16", "f16"])
def invariant(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions(request.param, row_invariant=True))
    yield device
    device.close()


def limits(rows: int, window: int = 4, block_size: int = 16) -> Limits:
    return Limits(64, window - 1, rows, rows, 4096, block_size, 2048, 256, 4, 32000)


def filled(device: CudaDevice, name: str, value: Array, dtype: str) -> Any:
    buffer = device.empty(name, value.shape, dtype)
    device.load(buffer, to_host(value, dtype))
    return buffer


def launch_of(device: CudaDevice, name: str, args: Any, own: Limits) -> Any:
    """Bind the kernel of a contract, or one of the pass."""
    table: Any = polydraft_cuda.polydraft_kernels(device)
    own_kernels = table.program_pass.kernels
    provider = own_kernels[name].provider if name in own_kernels else table.providers[name]
    nbytes = provider.workspace_bytes(args, own)
    workspace = SimpleNamespace(buffer=device.empty("workspace", (max(nbytes, 1),), "u8"), nbytes=nbytes)
    return provider.bind(args, own, workspace)


class Projection:
    """A projection with random numbers; `run(n)` gives the first n rows of what it leaves, and `wanted` what they should be."""

    def __init__(
        self, device: CudaDevice, inputs: int, outputs: int, *, to_f32: bool = False, bias: bool = False, rows: int = max(ROWS)
    ) -> None:
        rng, act = np.random.default_rng(inputs + outputs), device.dtype
        x = rng.standard_normal((rows, inputs), np.float32)
        w = rng.standard_normal((outputs, inputs), np.float32) / np.float32(np.sqrt(inputs))
        self.device, self.dtype = device, "f32" if to_f32 else act
        table: Any = polydraft_cuda.polydraft_kernels(device)
        weight, added = table.prepare_weight("linear", w, act), rng.standard_normal(outputs, np.float32) * np.float32(bias)
        self.out = device.empty("out", (rows, outputs), self.dtype)
        self.x, self.weight = filled(device, "x", x, act), weight.buffer
        addend = table.prepare_weight("bias", added, act) if bias else None
        self.args = LinearV1(x=self.x, weight=weight, bias=addend, out=self.out)
        self.launch = launch_of(device, "linear", self.args, limits(rows))
        seen, by, more = (from_host(to_host(value, act), act).astype(np.float32) for value in (x, w, added))
        self.wanted = seen @ by.T + more

    def run(self, n: int) -> Array:
        self.device.fill_bytes(self.out, 0xFF)
        self.launch(self.device.stream, n)
        found = from_host(self.device.read(self.out.pointer, self.out.shape, self.dtype), self.dtype)
        assert np.isnan(found[n:]).all(), "nothing behind the launch length is written"
        return found[:n]


def projections(shape: Shape) -> list[tuple[int, int, bool]]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    block = [(shape.hidden, q + 2 * kv), (q, shape.hidden), (shape.hidden, 2 * shape.ffn), (shape.ffn, shape.hidden)]
    return [*((a, b, False) for a, b in block), (2 * shape.hidden, shape.hidden, False), (shape.hidden, 4096 + 16, True)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_a_projection_is_right_for_every_number_of_rows(opened: CudaDevice, shape: Shape):
    for inputs, outputs, to_f32 in projections(shape):
        projection = Projection(opened, inputs, outputs, to_f32=to_f32)
        for n in ROWS:
            found, wanted = projection.run(n), projection.wanted[:n]
            allowed = (2e-5 if to_f32 else EPS[opened.dtype]) * np.maximum(np.abs(wanted), 1.0)
            assert (np.abs(found - wanted) <= allowed).all(), (inputs, outputs, n, float(np.abs(found - wanted).max()))


def test_blocks_that_split_the_inputs_of_a_tile_find_what_the_others_left_each_time(opened: CudaDevice):
    projection = Projection(opened, 8256, 4000, bias=True)  # inputs and outputs that parts and tiles do not divide
    for n in (129, 192, 150):
        found = [projection.run(n) for _ in range(3)]
        assert all(np.array_equal(found[0], other) for other in found[1:])
        allowed = EPS[opened.dtype] * np.maximum(np.abs(projection.wanted[:n]), 1.0)
        assert (np.abs(found[0] - projection.wanted[:n]) <= allowed).all(), n


@pytest.mark.parametrize(
    ("inputs", "width", "most"),
    [(512, SHAPES[0].ffn, 256), (2560, 3072, 128), (4096, 1408, 128), (1024, SHAPES[0].ffn // 2, 128)],
)
def test_a_captured_activation_leaves_what_two_launches_leave(
    opened: CudaDevice, inputs: int, width: int, most: int, monkeypatch: pytest.MonkeyPatch
):
    least, rows = 300, 700
    monkeypatch.setattr(linear_module, "LEAST_PROMPT_ROWS", least)
    projection, gated = Projection(opened, inputs, 2 * width, rows=rows), opened.empty("gated", (rows, width), opened.dtype)
    activation = SwigluV1(gate_up=projection.out, out=gated)
    activate = launch_of(opened, "swiglu", activation, limits(rows))
    together = launch_of(opened, "gated", CompositeArgs((projection.args, activation)), limits(rows))

    def run(n: int, *, captured: bool) -> tuple[Array, int]:
        opened.fill_bytes(gated, 0xFF)
        before = opened.counters.launches
        if captured:
            capture = polydraft_cuda.polydraft_graph_capture(opened)
            capture.capture(opened.stream, lambda: together(opened.stream, n)).replay(opened.stream)
        else:
            projection.launch(opened.stream, n)
            activate(opened.stream, n)
        launches = opened.counters.launches - before
        found = from_host(opened.read(gated.pointer, gated.shape, opened.dtype), opened.dtype)
        assert np.isnan(found[n:]).all(), "nothing behind the launch length is written"
        return found[:n], launches

    for n in (1, 9, 17, 33, 64, 65, 128, 129, 192, 193, 256, 257, least - 1, least, rows - 2):
        (wanted, apart), (found, once) = (run(n, captured=captured) for captured in (False, True))
        assert (apart, once) == (2, 1 if n <= most or n >= least else 2)
        assert np.abs(found - wanted).max() <= 4 * EPS[opened.dtype] * max(float(np.abs(wanted).max()), 1.0), n


class Head:
    """A head so large that a captured choice is one with it, and that choice. `run` gives its tokens, and whether logits were
    left as they were."""

    def __init__(self, device: CudaDevice, x: Array, weight: Array, slots: Array) -> None:
        rows, act = len(x), device.dtype
        self.device, self.table = device, polydraft_cuda.polydraft_kernels(device)
        self.weight: Any = self.table.prepare_weight("linear", weight, act)
        self.x, self.out = filled(device, "x", x, act), device.empty("logits", (rows, len(weight)), "f32")
        self.tokens, row_slot = device.empty("tokens", (rows,), "i32"), device.empty("row_slot", (rows,), "i32")
        device.load(row_slot, slots)
        self.bind, self.args = limits(rows), ArgmaxV1(logits=self.out, row_slot=row_slot, tokens=self.tokens)
        self.process = ProcessLogitsV1(logits=self.out, row_slot=row_slot, num_valid=len(weight))

    def bound(self, kernel: str = "screened", *, screened: bool = True) -> "Head":
        """Bind both launches, and what is one launch of them by `kernel` of the pass; as with somebody else's weight, which has
        no bytes, unless `screened`."""
        w = self.weight
        other: Any = SimpleNamespace(pointer=w.pointer, shape=w.shape, dtype=w.dtype, nbytes=w.nbytes)
        args = LinearV1(x=self.x, weight=w if screened else other, bias=None, out=self.out)
        self.launch = launch_of(self.device, "linear", args, self.bind)
        self.choose = launch_of(self.device, "argmax", self.args, self.bind)
        self.together = launch_of(self.device, kernel, CompositeArgs((args, self.process, self.args)), self.bind)
        self.capture = polydraft_cuda.polydraft_graph_capture(self.device)
        return self

    def run(self, n: int, *, captured: bool) -> tuple[Array, bool]:
        device, stream = self.device, self.device.stream
        device.fill_bytes(self.out, 0xFF)
        device.fill_bytes(self.tokens, 0x55)
        if captured:
            self.capture.capture(stream, lambda: self.together(stream, n)).replay(stream)
        else:
            self.launch(stream, n)
            self.choose(stream, n)
        found = device.read(self.tokens.pointer, self.tokens.shape, "i32").copy()
        return found[:n], bool(np.isnan(device.read(self.out.pointer, (1, self.out.shape[1]), "f32")).all())


def head_numbers(rows: int, vocab: int, hidden: int) -> tuple[Array, Array]:
    """Rows of x, and weights with equals in them."""
    rng = np.random.default_rng(hidden)
    x, weight = rng.standard_normal((rows, hidden), np.float32), rng.standard_normal((vocab, hidden), np.float32)
    weight[vocab - 1], weight[777] = weight[4], weight[vocab - 16]  # the lowest wins
    x[0], x[1] = weight[4], weight[777]
    return x, weight / np.float32(np.sqrt(hidden))


@pytest.mark.parametrize("screened", [True, False])
def test_a_captured_head_leaves_the_choice_and_not_the_logits(opened: CudaDevice, screened: bool):
    leaves_the_choice(opened, screened)


def test_a_captured_head_of_invariant_rows_chooses_by_the_same_sums(invariant: CudaDevice):
    leaves_the_choice(invariant, screened=True, kernel="chosen")


def test_a_captured_head_of_invariant_rows_is_screened_for_drafts(invariant: CudaDevice):
    leaves_the_choice(invariant, screened=True)


def test_a_captured_head_leaves_logits_that_somebody_reads(opened: CudaDevice):
    rows, vocab = 257, 4 * 128 * opened.num_sms + 16
    x, weight = head_numbers(rows, vocab, 256)
    head = Head(opened, x, weight, np.where(np.arange(rows) % 7 == 3, -1, 0).astype(np.int32)).bound("kept")
    for n in (1, 8, 9, 33, 64, 65, 128, 129, 256, 257):
        wanted, _ = head.run(n, captured=False)
        written = opened.read(head.out.pointer, head.out.shape, "f32").copy()
        found, lost = head.run(n, captured=True)
        logits = opened.read(head.out.pointer, head.out.shape, "f32")
        assert not lost
        assert np.array_equal(found, wanted), n
        assert np.abs(logits[:n] - written[:n]).max() <= 1e-5 * np.abs(written[:n]).max(), n
        assert np.isnan(logits[n:]).all(), "nothing behind the launch length is written"


def leaves_the_choice(opened: CudaDevice, screened: bool, kernel: str = "screened") -> None:
    rows, vocab, broken = 257, 4 * 128 * opened.num_sms + 16, 5
    x, weight = head_numbers(rows, vocab, 256)
    x[broken] = np.nan
    slots = np.where(np.arange(rows) % 7 == 3, -1, 0).astype(np.int32)
    head = Head(opened, x, weight, slots).bound(kernel, screened=screened)
    for n in (1, 8, 9, 17, 33, 64, 65, 128, 129, 256, 257):
        (wanted, lost_apart), (found, lost) = head.run(n, captured=False), head.run(n, captured=True)
        assert (lost_apart, lost) == (False, n <= 256)
        assert np.array_equal(found, wanted), n
        assert wanted[0] == 4
        assert n <= broken or (wanted[1] == 777 and wanted[3] == wanted[broken] == -1)


def state_of(head: Head) -> list[int]:
    """Choices that take no look any more, what they last were, and whether the last choice read the head whole."""
    skips, wait, given_up, whole = head.device.read(head.weight.screen.state.pointer, (4,), "i32").tolist()
    assert given_up == 0, "it is told once"
    return [skips, wait, whole]


def test_a_first_look_by_bytes_chooses_what_all_logits_would(opened: CudaDevice):
    """Where bytes tell little: outliers among inputs and weights, rows of many near ties, weights that are no numbers."""
    rows, vocab = 64, 4 * 128 * opened.num_sms + 208
    x, weight = head_numbers(rows, vocab, 1024)
    x[2] *= 1e-3
    x[3, 7] = 300.0  # what a few channels of real models look like
    weight[1000:1020] = weight[1000] * np.float32(1 + 2**-9) ** np.arange(-10, 10, dtype=np.float32)[:, None]  # nearly equal
    x[4] = weight[1000]
    weight[2000, 5] = 8.0  # one weight takes the scale
    x[5] = weight[2000]
    weight[:, 11] *= 64  # a column that stands out, and one of nobody
    weight[:, 12] = 0
    weight[3000] = 0
    weight[3001:3010] = weight[3001:3010] * 2.0 ** np.arange(-120, 0, 14, dtype=np.float32)[:9, None]  # whose squares vanish
    head = Head(opened, x, weight, np.zeros(rows, np.int32)).bound()
    for n in (3, 16, rows):
        (wanted, _), (found, lost) = head.run(n, captured=False), head.run(n, captured=True)
        assert lost
        assert np.array_equal(found, wanted), n
        assert state_of(head) == [0, 0, 0], "a look was enough"
    weight[10] = -np.inf  # never the highest where x is positive, no number elsewhere
    x[7:] = np.abs(x[7:])
    opened.load(head.x, to_host(x, opened.dtype))
    head.table.prepare_weight("linear", weight, opened.dtype, previous=head.weight)
    (wanted, _), (found, _) = head.run(rows, captured=False), head.run(rows, captured=True)
    assert np.array_equal(found, wanted)
    assert found[0] == -1
    assert (found[7:] >= 0).all()
    weight[10], weight[vocab - 3] = 0, x[9] * 5
    head.table.prepare_weight("linear", weight, opened.dtype, previous=head.weight)
    assert head.run(rows, captured=True)[0][9] == vocab - 3, "an update makes the bytes anew"


def test_where_too_many_outputs_may_be_the_highest_the_head_is_read_whole(opened: CudaDevice):
    """In the same choice, on the device; and for a while nobody looks. A look that is enough again is believed step by step."""
    rows, vocab = 9, 4 * 128 * opened.num_sms + 16
    x, weight = head_numbers(rows, vocab, 256)
    plain = x.copy()
    x[6] = 0  # every output is its highest
    x[7] *= 2.0**-120 if opened.dtype == "bf16" else 1
    head = Head(opened, x, weight, np.zeros(rows, np.int32)).bound()
    wanted = head.run(rows, captured=False)[0]
    assert wanted[6] == 0
    seen = []
    for _ in range(7):
        found = head.run(rows, captured=True)[0]
        assert np.array_equal(found, wanted)
        seen.append(state_of(head))
    assert seen == [[skips, 4, 1] for skips in (4, 3, 2, 1, 0)] + [[skips, 20, 1] for skips in (20, 19)]
    opened.load(head.x, to_host(plain, opened.dtype))
    opened.load(head.weight.screen.state, np.array([1, 20, 0, 1], np.int32))
    wanted = head.run(rows, captured=False)[0]
    for state in ([0, 20, 1], [0, 10, 0], [0, 5, 0]):
        assert np.array_equal(head.run(rows, captured=True)[0], wanted)
        assert state_of(head) == state
    common = weight[:1] * 64 + weight / 64  # rows that have most in common
    head.table.prepare_weight("linear", common, opened.dtype, previous=head.weight)
    wanted, found = head.run(rows, captured=False)[0], head.run(rows, captured=True)[0]
    assert state_of(head) == [4, 4, 1]
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_a_row_of_an_invariant_projection_has_its_bits_whatever_the_others(invariant: CudaDevice, shape: Shape):
    rows = (*ROWS, 128, 129, 200, 256, 385)
    for inputs, outputs, to_f32 in projections(shape):
        projection = Projection(invariant, inputs, outputs, to_f32=to_f32, rows=513)
        all_rows, wanted = projection.run(513), projection.wanted
        allowed = (2e-5 if to_f32 else EPS[invariant.dtype]) * np.maximum(np.abs(wanted), 1.0)
        assert (np.abs(all_rows - wanted) <= allowed).all(), (inputs, outputs)
        for n in rows:
            assert np.array_equal(projection.run(n), all_rows[:n]), (inputs, outputs, n)


def test_gate_and_up_of_invariant_rows_are_the_same_bits_with_their_activation(invariant: CudaDevice):
    rows, width = 257, SHAPES[0].ffn
    projection, gated = Projection(invariant, 512, 2 * width, rows=rows), invariant.empty("gated", (rows, width), invariant.dtype)
    activation = SwigluV1(gate_up=projection.out, out=gated)
    activate = launch_of(invariant, "swiglu", activation, limits(rows))
    together = launch_of(invariant, "gated", CompositeArgs((projection.args, activation)), limits(rows))
    found = []
    for n in (rows, 256, 129, 128, 64, 33, 16, 1):
        for launches in ((projection.launch, activate), (together,)):
            invariant.fill_bytes(gated, 0xFF)
            before = invariant.counters.launches
            for launch in launches:
                launch(invariant.stream, n)
            assert invariant.counters.launches - before == (2 if n > 256 else len(launches))
            found.append(invariant.read(gated.pointer, gated.shape, invariant.dtype)[:n].copy())
            assert np.array_equal(found[-1], found[0][:n]), (n, len(launches))


@pytest.mark.parametrize("count", [1, 3, 8, 32, 64])
def test_windows_of_invariant_rows_are_the_same_bits_turned_in_attention(invariant: CudaDevice, count: int):
    turned = Turned(invariant, SHAPES[0], windows(count, SHAPES[0].window))
    assert turned.joins == (invariant.dtype == "bf16")
    if not turned.joins:
        return
    (out, cache, apart), (joined, stored, once) = (turned.run(captured=captured) for captured in (False, True))
    assert (apart, once) == (3, 2)
    assert np.array_equal(cache.view(np.uint16), stored.view(np.uint16)), "bits: what nobody has written is NaN"
    assert np.array_equal(joined, out)


def test_invariant_attention_is_the_same_bits_in_blocks_of_any_shape(invariant: CudaDevice, monkeypatch: pytest.MonkeyPatch):
    found = []
    for _, shape in attention_module.INVARIANT:
        monkeypatch.setattr(attention_module, "INVARIANT", ((1 << 30, shape),))
        found.append(Attention(invariant, SHAPES[0], windows(8, SHAPES[0].window), prefill=False).run())
    assert len(found) > 1
    assert all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize("n", [1, 8, 64])
def test_a_captured_norm_adds_to_the_newest_stream(opened: CudaDevice, n: int):
    """It reads the stream while the projection in front still runs: rounds of both give what they do launch by launch."""
    rng, act, hidden, rounds = np.random.default_rng(n), opened.dtype, 4096, 40
    table = polydraft_cuda.polydraft_kernels(opened)
    weight = table.prepare_weight("linear", rng.standard_normal((hidden, hidden), np.float32) / 64, act)
    gain = table.prepare_weight("norm", np.ones(hidden, np.float32), act)
    start = rng.standard_normal((n, hidden), np.float32)
    x, normed, branch = (filled(opened, name, start, act) for name in ("x", "normed", "branch"))
    launches = [launch_of(opened, "linear", LinearV1(x=normed, weight=weight, bias=None, out=branch), limits(n))]
    parts = ResidualAddV1(x=x, y=branch), RmsNormV1(x=x, weight=gain, out=normed, eps=1e-6, plus_one=False)
    launches.append(launch_of(opened, "early_norm", CompositeArgs(parts), limits(n)))

    def step(after: Callable[[], None]) -> None:
        for _ in range(rounds):
            for launch in launches:
                launch(opened.stream, n)
                after()

    def run(*, captured: bool) -> Array:
        for buffer in (x, normed, branch):
            opened.load(buffer, to_host(start, act))
        if captured:
            capture = polydraft_cuda.polydraft_graph_capture(opened)
            capture.capture(opened.stream, lambda: step(lambda: None)).replay(opened.stream)
        else:
            step(opened.synchronize)
        return opened.read(x.pointer, x.shape, act)

    one_by_one = run(captured=False)
    assert np.isfinite(from_host(one_by_one, act)).all()
    for _ in range(3):
        assert np.array_equal(run(captured=True), one_by_one)


MANY = 70_000
"""Rows, more than the second axis of a grid has blocks."""


def gated(gate_up: Array) -> Array:
    gate, up = np.split(gate_up, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def left_by(device: CudaDevice, name: str, args: Any) -> Array:
    """What a kernel leaves for `MANY` rows."""
    device.fill_bytes(args.out, 0xFF)
    launch_of(device, name, args, limits(MANY))(device.stream, MANY)
    return from_host(device.read(args.out.pointer, args.out.shape, args.out.dtype), args.out.dtype).astype(np.float32)


@pytest.mark.parametrize("width", [24, 5])
def test_an_activation_takes_many_rows(opened: CudaDevice, width: int):
    act = opened.dtype
    both = from_host(to_host(np.random.default_rng(1).standard_normal((MANY, 2 * width), np.float32), act), act)
    args = SwigluV1(gate_up=filled(opened, "both", both, act), out=opened.empty("out", (MANY, width), act))
    found, wanted = left_by(opened, "swiglu", args), gated(both.astype(np.float32))
    assert (np.abs(found - wanted) <= EPS[act] * np.maximum(np.abs(wanted), 1.0)).all()


def test_a_sum_of_leaves_takes_many_rows(opened: CudaDevice):
    x, act = np.random.default_rng(2).standard_normal((MANY, 10), np.float32), opened.dtype
    args = SumLeavesV1(x=filled(opened, "x", x, "f32"), leaves=2, out=opened.empty("out", (MANY, 5), act))
    assert np.array_equal(left_by(opened, "sum_leaves", args), from_host(to_host(x[:, :5] + x[:, 5:], act), act))


def test_logits_of_many_rows_are_spread(opened: CudaDevice):
    x, places = np.random.default_rng(3).standard_normal((MANY, 3), np.float32), np.array([2, -1, 0, 1, -1], np.int32)
    args = SpreadLogitsV1(
        x=filled(opened, "x", x, "f32"), places=filled(opened, "places", places, "i32"),
        out=opened.empty("out", (MANY, len(places)), "f32"),
    )  # fmt: skip
    assert np.array_equal(left_by(opened, "spread_logits", args), np.where(places < 0, -np.inf, x[:, places]))


def test_plain_experts_take_many_rows(opened: CudaDevice):
    """Of sizes that no other kernel takes; of a row's experts one may be missing."""
    rng, act, (count, width, hidden) = np.random.default_rng(4), opened.dtype, (3, 8, 24)
    table: Any = polydraft_cuda.polydraft_kernels(opened)

    def rounded(value: Array) -> Array:
        return from_host(to_host(value, act), act).astype(np.float32)

    x, gate_up, down = (
        rounded(rng.standard_normal(shape, np.float32) / 2)
        for shape in ((MANY, hidden), (count, 2 * width, hidden), (count, hidden, width))
    )
    ids = np.arange(2 * MANY, dtype=np.int32).reshape(MANY, 2) % (count + 1) - 1
    by = rng.random(ids.shape, np.float32) + np.float32(0.5)
    args = ExpertMlpV1(
        x=filled(opened, "x", x, act), expert_ids=filled(opened, "ids", ids, "i32"), shared=None, shared_gate=None,
        expert_weights=filled(opened, "weights", by, "f32"), out=opened.empty("out", x.shape, act),
        gate_up=table.prepare_weight("experts", gate_up, act), down=table.prepare_weight("experts", down, act),
    )  # fmt: skip
    wanted, size = np.zeros((2, *x.shape), np.float32)
    for expert in range(count):
        between, weight = rounded(gated(x @ gate_up[expert].T)), np.where(ids == expert, by, 0).sum(axis=1, keepdims=True)
        wanted += weight * (between @ down[expert].T)
        size += weight * (np.abs(between) @ np.abs(down[expert]).T)
    assert (np.abs(left_by(opened, "expert_mlp", args) - wanted) <= 2 * EPS[act] * size).all()


HALVES: dict[str, tuple[Half, dict[str, Any]]] = {
    "ernie21": (Half(2560, 1536, 64, 6, 3072), {"bias": True, "renormalize": "clamp"}),
    "glm12": (Half(4096, 1408, 128, 8, 1408), {"bias": True, "scoring": "sigmoid", "scale": 2.5}),
    "groups, none shared": (Half(2048, 768, 96, 4, 0), {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2}),
    "the last of a model, odd": (Half(1088, 192, 13, 5, 64), {"renormalize": "none"}),
    "the last, none shared": (Half(1024, 64, 32, 2, 0), {"scale": 0.5}),
    "packed": (Half(1024, 256, 32, 4, 256), {"packing": "fp8-channel"}),
    "the last, packed, odd": (Half(1088, 192, 13, 5, 64), {"packing": "int8-channel"}),
}
"""Sizes of halves with experts, and what differs in the choice, or the packing of the experts; no norm is behind the last of a
model."""


class Experts:
    """A half with experts over random numbers; `run` gives logits, choices, what they weigh, stream and norm, launch by launch or
    captured as one, and `stream_of` what the stream of one row should be, by the choices that were made."""

    def __init__(self, device: CudaDevice, half: Half, rows: int, *, last: bool, **routing: Any) -> None:
        self.rng, self.device, self.table = np.random.default_rng(rows), device, polydraft_cuda.polydraft_kernels(device)
        self.made: dict[str, Array] = {}
        self.packing = routing.pop("packing", "")
        if "bias" in routing:
            routing["bias"] = self.weight("bias", "router", (half.experts,))
        launches = experts_of_half(device, half, rows, self.weight, **routing)
        if last:
            launches[-1] = "residual_add", launches[-1][1].parts[0]
        records = [args for _, args in launches]
        self.x, self.choice, self.logits = records[0].x, records[1], records[0].out
        self.stream = records[-1].x if last else records[-1].parts[0].x
        self.start = [self.rng.standard_normal((rows, half.hidden), np.float32) for _ in range(2)]
        slots = np.arange(rows, dtype=np.int32)
        slots[5::7] = -1
        device.load(self.choice.row_slot, slots)
        self.apart = [launch_of(device, name, args, limits(rows)) for name, args in launches]
        parts = CompositeArgs(tuple(one for args in records for one in getattr(args, "parts", (args,))))
        joined = "routed_and_shared_experts" if half.shared else "routed_experts"
        self.together = launch_of(device, f"last_{joined}" if last else joined, parts, limits(rows))

    def weight(self, name: str, role: Any, shape: tuple[int, ...]) -> Any:
        """A vector, or matrices whose rows overlap in memory, so that they are made quickly."""
        count = int(np.prod(shape[:-1]))
        pool = self.rng.standard_normal(61 * count + shape[-1], np.float32) * np.float32(shape[-1] ** -0.5)
        pool += np.float32(role == "norm")
        strides = tuple(61 * 4 * int(np.prod(shape[k + 1 : -1])) for k in range(len(shape) - 1))
        self.made[name] = np.lib.stride_tricks.as_strided(pool, shape, (*strides, 4), writeable=False)
        if role == "experts" and self.packing:
            packed = pack(self.made[name], PACKINGS[self.packing])
            self.made[name] = packed.read()
            return self.table.prepare_weight(role, packed, self.device.dtype)
        return self.table.prepare_weight(role, self.made[name], "f32" if role == "router" else self.device.dtype)

    def rounded(self, value: Array) -> Array:
        return from_host(to_host(value, self.device.dtype), self.device.dtype).astype(np.float32)

    def gated(self, x: Array, gate_up: Array) -> Array:
        gate, up = np.split(self.rounded(gate_up) @ x, 2)
        return self.rounded(gate / (1 + np.exp(-gate)) * up)

    def stream_of(self, r: int, ids: Array, weights: Array) -> Array:
        x, stream = (self.rounded(value[r]) for value in self.start)
        total = np.zeros_like(stream)
        for expert, weight in zip(ids[r], weights[r], strict=True):
            if expert >= 0:
                hidden = self.gated(x, self.made["experts_up"][expert])
                total += weight * (self.rounded(self.made["experts_down"][expert]) @ hidden)
        if "up" in self.made:
            total += self.rounded(self.rounded(self.made["down"]) @ self.gated(x, self.made["up"]))
        return stream + self.rounded(total)

    def run(self, n: int, *, captured: bool) -> list[Array]:
        device = self.device
        for buffer, value in zip((self.x, self.stream), self.start, strict=True):
            device.load(buffer, to_host(value, device.dtype))
        buffers = self.logits, self.choice.expert_ids, self.choice.expert_weights
        for buffer in buffers:
            device.fill_bytes(buffer, 0xFF)
        if captured:
            capture = polydraft_cuda.polydraft_graph_capture(device)
            capture.capture(device.stream, lambda: self.together(device.stream, n)).replay(device.stream)
        else:
            for launch in self.apart:
                launch(device.stream, n)
                device.synchronize()
        read = (*buffers, self.stream, self.x)  # x is the norm in the end
        return [from_host(device.read(one.pointer, one.shape, one.dtype), one.dtype) for one in read]


@pytest.mark.parametrize("name", HALVES)
def test_captured_experts_leave_what_launches_one_by_one_leave(opened: CudaDevice, name: str):
    half, routing = HALVES[name]
    experts, eps = Experts(opened, half, 257, last=name.startswith("the last"), **routing), EPS[opened.dtype]
    for n in (1, 2, 4, 8, 9, 16, 17, 33, 64, 65, 128, 200, 240, 241, 256, 257):
        wanted, found = (experts.run(n, captured=captured) for captured in (False, True))
        for apart, together in zip(wanted[:3], found[:3], strict=True):
            assert np.array_equal(apart, together, equal_nan=True), (n, "logits, choices and what they weigh")
        assert (found[1][:n][5::7] == -1).all()
        assert (np.delete(found[1][:n], np.s_[5::7], 0) >= 0).all()
        for apart, together in zip(wanted[3:], found[3:], strict=True):
            assert (np.abs(together[:n] - apart[:n]) <= 4 * eps * np.maximum(np.abs(apart[:n]), 1.0)).all(), n
            assert np.array_equal(together[n:], apart[n:]), "nothing behind the launch length is written"
        if n in (1, 8):
            for r in (0, n - 1):
                x, router = experts.rounded(experts.start[0][r]).astype(np.float64), experts.made["router"]
                assert (np.abs(found[0][r] - router @ x) <= 1e-6 * (np.abs(router) @ np.abs(x))).all(), "weights stay float32"
                exact = experts.stream_of(r, *found[1:3])
                assert (np.abs(found[3][r] - exact) <= 8 * eps * np.maximum(np.abs(exact), 1.0)).all(), (n, r)
    again = [experts.run(64, captured=True)[3:] for _ in range(3)]
    assert all(np.array_equal(again[0], one) for one in again), "weights that come early are those of the rows' experts"


def test_a_router_finds_the_same_in_clusters_and_without(opened: CudaDevice):
    """A launch has clusters while all of them run at once, here with up to 240 rows."""
    rng, (hidden, _, count, chosen, _), rows = np.random.default_rng(6), HALVES["ernie21"][0], 256
    table: Any = polydraft_cuda.polydraft_kernels(opened)
    x, matrix = rng.standard_normal((rows, hidden), np.float32), rng.standard_normal((count, hidden), np.float32)
    weight = table.prepare_weight("router", matrix / np.float32(np.sqrt(hidden)), "f32")
    logits = opened.empty("logits", (rows, count), "f32")
    project = LinearV1(x=filled(opened, "x", x, opened.dtype), weight=weight, bias=None, out=logits)
    slots = np.where(np.arange(rows) % 7 == 5, -1, 0).astype(np.int32)
    choice = RouteExpertsV1(
        logits=logits, bias=None, row_slot=filled(opened, "row_slot", slots, "i32"), scoring="softmax", renormalize="sum",
        expert_ids=opened.empty("ids", (rows, chosen), "i32"), expert_weights=opened.empty("weights", (rows, chosen), "f32"),
        num_groups=1, top_groups=1, floor=1e-12, scale=1.0,
    )  # fmt: skip
    buffers: tuple[Any, ...] = logits, choice.expert_ids, choice.expert_weights

    def run(n: int, *launches: Any) -> list[Array]:
        for buffer in buffers:
            opened.fill_bytes(buffer, 0xFF)
        for launch in launches:
            launch(opened.stream, n)
        return [opened.read(one.pointer, one.shape, one.dtype).view(np.uint32) for one in buffers]

    apart = [launch_of(opened, name, a, limits(rows)) for name, a in (("linear", project), ("route_experts", choice))]
    together = routing.router(opened, project, choice)
    wanted = run(rows, *apart)
    assert (wanted[1].view(np.int32)[slots < 0] == -1).all()
    for n in (8, 9, 240, 241, 255, 256, 240):
        for found, one in zip(run(n, together), wanted, strict=True):
            assert np.array_equal(found[:n], one[:n]), n
            assert (found[n:] == 0xFFFFFFFF).all(), "nothing behind the launch length is written"


LOUDEST = {"f16": (-6e4, 6e4), "bf16": (-1e30, 1e30)}
"""Numbers of queries and keys in each dtype."""


class Attention:
    """Paged attention over random keys and values. `seqs`: (positions before, rows) of each slot. Keys are longer by `steep` of
    their length with every 256 positions, and so are scores. Queries and keys are `loud` times as long as others, up to what the
    dtype has. What no row attends to is NaN."""

    def __init__(
        self, device: CudaDevice, shape: Shape, seqs: list[tuple[int, int]], *, prefill: bool, holes: int = 2, kv: Any = "",
        steep: float = 0.0, sliding_window: int = 0, loud: float = 1.0,
    ) -> None:  # fmt: skip
        rng, act, size = np.random.default_rng(len(seqs)), device.dtype, shape.block_size
        order = rng.permutation(len(seqs))
        slots = [np.full(seqs[s][1], s) for s in order]
        places = [np.arange(seqs[s][1]) + seqs[s][0] for s in order]
        slot, position = np.concatenate([*slots, np.full(holes, -1)]), np.concatenate([*places, np.zeros(holes, int)])
        n = len(slot)
        own = limits(n, shape.window, size)
        needed = [-(-(before + rows) // size) for before, rows in seqs]
        pool = rng.permutation(sum(needed) + 3)
        table, taken = np.full((own.max_seqs, own.max_blocks), -1, np.int32), 0
        for s, count in enumerate(needed):
            table[s, :count] = pool[taken : taken + count]
            taken += count
        cache = polydraft_cuda.polydraft_kernels(device).allocate_cache(
            CacheSpec(len(pool), size, shape.kv_heads, shape.head_dim, act, kv=kv)
        )
        k, v = (rng.standard_normal((len(pool), size, shape.kv_heads, shape.head_dim), np.float32) for _ in range(2))
        if loud > 1:
            k = np.clip(k * np.float32(loud), *LOUDEST[act])
        for s, (before, rows) in enumerate(seqs):
            end, blocks = before + rows, table[s, : needed[s]]
            k[blocks] *= (1 + steep / 256 * np.arange(blocks.size * size)).reshape(-1, size, 1, 1)
            if end % size:  # what nobody has written must not be read
                k[table[s, needed[s] - 1], end % size :] = v[table[s, needed[s] - 1], end % size :] = np.nan
            unseen = np.arange(before + 1 - sliding_window if sliding_window else 0)
            k[table[s, unseen // size], unseen % size] = v[table[s, unseen // size], unseen % size] = np.nan
        cache.write_logical(k, v)
        q = np.clip(rng.standard_normal((n, shape.heads * shape.head_dim), np.float32) * np.float32(loud), *LOUDEST[act])
        described = {"row_slot": filled(device, "row_slot", slot.astype(np.int32), "i32"),
                "positions": filled(device, "positions", position.astype(np.int32), "i32"),
                "block_table": filled(device, "block_table", table, "i32")}  # fmt: skip
        meta = polydraft_cuda.polydraft_init_forward_meta(device, PassBuffers("target", **described), own)
        self.out = device.empty("out", q.shape, act)
        self.device, self.n, scale = device, n, shape.head_dim**-0.5
        args = PagedAttentionV1(
            q=filled(device, "q", q, act), cache=cache, meta=meta, out=self.out, num_heads=shape.heads,
            num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, block_size=size, softmax_scale=scale,
            sliding_window=sliding_window, **described,
        )  # fmt: skip
        self.args, self.slot = args, slot
        self.launch = launch_of(device, "paged_attention", args, own)
        self.fill = lambda: meta.fill(device.stream, StepMeta(0, n, len(seqs), has_prefill=prefill))
        if kv:
            k, v = (quantise(x, kv).astype(np.float32) for x in (k, v))
        rounded = (from_host(to_host(x, act), act).astype(np.float32) for x in (q, k, v))
        self.wanted = self._naive(shape, slot, position, table, *rounded)

    def _naive(self, shape: Shape, slot: Array, position: Array, table: Array, q: Array, k: Array, v: Array) -> Array:
        wanted, group = np.zeros(q.shape, np.float32), shape.heads // shape.kv_heads
        for r in np.flatnonzero(slot >= 0):
            blocks = table[slot[r], : position[r] // shape.block_size + 1]
            first = max(position[r] + 1 - self.args.sliding_window, 0) if self.args.sliding_window else 0
            keys, values = (x[blocks].reshape(-1, shape.kv_heads, shape.head_dim)[first : position[r] + 1] for x in (k, v))
            heads = q[r].reshape(shape.kv_heads, group, shape.head_dim)
            scores = np.einsum("hgd,chd->hgc", heads, keys) * self.args.softmax_scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("hgc,chd->hgd", weights / weights.sum(-1, keepdims=True), values)
            wanted[r] = mixed.reshape(-1)
        return wanted

    def run(self) -> Array:
        self.device.fill_bytes(self.out, 0xFF)
        self.fill()
        self.launch(self.device.stream, self.n)
        return from_host(self.device.read(self.out.pointer, self.out.shape, self.device.dtype), self.device.dtype)


CHUNKS = [(0, 1), (0, 64), (0, 130), (100, 65), (1000, 200), (37, 3), (16, 16), (15, 1)]


def windows(count: int, width: int) -> list[tuple[int, int]]:
    """Sequences in decode: contexts from nothing to thousands, windows of up to `width` rows."""
    rng = np.random.default_rng(count)
    return [(int(before), int(rng.integers(1, width + 1))) for before in np.r_[0, 15, 16, 17, rng.integers(0, 3000, 60)][:count]]


@pytest.mark.parametrize("count", [1, 3, 8, 32, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_windows_attend_to_what_is_before_them(opened: CudaDevice, shape: Shape, count: int):
    for one in (shape, dataclasses.replace(shape, window=1)):
        attention = Attention(opened, one, windows(count, one.window), prefill=False)
        assert np.abs(attention.run() - attention.wanted).max() <= 4 * EPS[opened.dtype]


@pytest.mark.parametrize("kv", ["", "fp8", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_scores_may_outgrow_those_before_them(opened: CudaDevice, shape: Shape, kv: str):
    """By less than what weights have room for, where older sums stay as they are, and by more, where they do not."""
    for steep in (0.5, 8.0):
        for seqs, prefill in ((windows(8, shape.window), False), (windows(64, shape.window), False), (CHUNKS, True)):
            attention = Attention(opened, shape, seqs, prefill=prefill, kv=kv, steep=steep)
            assert np.abs(attention.run() - attention.wanted).max() <= 4 * EPS[opened.dtype], (steep, len(seqs), prefill)


@pytest.mark.parametrize("kv", ["", "fp8", "int8"])
@pytest.mark.parametrize("loud", [1.2e4, 1e6])
def test_scores_may_be_beyond_whole_numbers_of_float32(opened: CudaDevice, loud: float, kv: str):
    """One key has all of a row's weight: the next score is millions of powers of two below, in all but a few rows and heads."""
    if opened.dtype == "f16" and loud > 2e4:
        pytest.skip("float16 has no such numbers")
    for seqs, prefill in ((windows(8, SHAPES[0].window), False), (CHUNKS[-4:], True)):
        attention = Attention(opened, SHAPES[0], seqs, prefill=prefill, kv=kv, loud=loud)
        found = attention.run()
        assert np.isfinite(found).all(), (len(seqs), prefill)
        off = np.abs(found - attention.wanted) > 16 * EPS[opened.dtype]
        assert off.mean() < 1e-3, (len(seqs), prefill)


@pytest.mark.parametrize("kv", ["", "fp8", "int8"])
@pytest.mark.parametrize("sliding_window", [1, 67, 512])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_rows_attend_to_their_sliding_window_alone(opened: CudaDevice, shape: Shape, sliding_window: int, kv: str):
    for seqs, prefill in ((windows(3, shape.window), False), (windows(16, shape.window), False), (CHUNKS, True)):
        attention = Attention(opened, shape, seqs, prefill=prefill, kv=kv, sliding_window=sliding_window)
        assert np.abs(attention.run() - attention.wanted).max() <= 4 * EPS[opened.dtype], (len(seqs), prefill)


class Turned:
    """The launches of an attention behind its projection: what they leave when each is by itself, and when they are captured."""

    def __init__(
        self, device: CudaDevice, shape: Shape, seqs: list[tuple[int, int]], holes: int = 2, sliding_window: int = 0,
        style: Any = "half", share: float = 1.0,
    ) -> None:  # fmt: skip
        act, width = device.dtype, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.plain = Attention(device, shape, seqs, prefill=False, holes=holes, sliding_window=sliding_window)
        a, self.device = self.plain.args, device
        rng = np.random.default_rng(1)
        x, weight = rng.standard_normal((self.plain.n, 256), np.float32), rng.standard_normal((width, 256), np.float32) / 16
        table = polydraft_cuda.polydraft_kernels(device)
        self.qkv = device.empty("qkv", (self.plain.n, width), act)
        packed = table.prepare_weight("linear", weight, act)
        self.x, self.numbers = filled(device, "x", x, act), x
        args = LinearV1(x=self.x, weight=packed, bias=None, out=self.qkv)
        own = limits(self.plain.n, shape.window, shape.block_size)
        self.launches = [launch_of(device, "linear", args, own)]
        shared = ("row_slot", "positions", "block_table", "cache", "meta", "num_heads", "num_kv_heads", "head_dim", "block_size")
        turn = RopeKvWriteV1(
            qkv=self.qkv, q_out=a.q, q_norm=None, k_norm=None,
            frequencies=plain_frequencies(int(share * shape.head_dim), 1e4), attention_factor=1.0, style=style, eps=1e-6,
            **{name: getattr(a, name) for name in shared},
        )  # fmt: skip
        self.joins = attention_module.turns_inside(device, turn, a, own)
        together = launch_of(device, "turned_attention", CompositeArgs((turn, a)), own)
        self.together = [self.launches[0], together]
        self.launches += [launch_of(device, "rope_kv_write", turn, own), launch_of(device, "paged_attention", a, own)]
        self.cache, self.pristine = a.cache, device.read(a.cache.keys.pointer, a.cache.buffer.shape, act)

    def run(self, *, captured: bool) -> tuple[Array, Array, int]:
        """What lies in `out` and in the cache afterwards, and how many launches it took."""
        device, plain = self.device, self.plain
        device.write(self.cache.keys.pointer, self.pristine)
        for buffer in (plain.out, plain.args.q):
            device.fill_bytes(buffer, 0xFF)
        plain.fill()

        def step() -> None:
            for launch in self.together if captured else self.launches:
                launch(device.stream, plain.n)

        before = device.counters.launches
        if captured:
            polydraft_cuda.polydraft_graph_capture(device).capture(device.stream, step).replay(device.stream)
        else:
            step()
        launches = device.counters.launches - before
        out = from_host(device.read(plain.out.pointer, plain.out.shape, device.dtype), device.dtype)
        return out, device.read(self.cache.keys.pointer, self.pristine.shape, device.dtype), launches


@pytest.mark.parametrize("sliding_window", [0, 3, 67])
@pytest.mark.parametrize("count", [1, 3, 8, 32, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_captured_windows_are_turned_stored_and_attended_in_one_launch(
    opened: CudaDevice, shape: Shape, count: int, sliding_window: int
):
    if shape.window * shape.heads // shape.kv_heads > 16:
        pytest.skip("the rows of a window are more than one tile")
    held_to_launches_one_by_one(Turned(opened, shape, windows(count, shape.window), sliding_window=sliding_window))


def held_to_launches_one_by_one(turned: Turned) -> None:
    (out, cache, apart), (joined, stored, once) = (turned.run(captured=captured) for captured in (False, True))
    assert (apart, once) == (3, 2)
    real = turned.plain.slot >= 0
    keys, found = from_host(cache, turned.device.dtype), from_host(stored, turned.device.dtype)
    written = np.isfinite(keys)
    assert np.array_equal(written, np.isfinite(found)), "keys and values lie where the launch of their own puts them"
    assert np.abs(found[written] - keys[written]).max() <= 2 * EPS[turned.device.dtype] * np.abs(keys[written]).max()
    assert np.abs(joined - out).max() <= 4 * EPS[turned.device.dtype] * max(np.abs(out).max(), 1)
    assert not joined[~real].any()


@pytest.mark.parametrize(("style", "share"), [("interleaved", 1.0), ("half", 0.5)], ids=["interleaved", "half of a head"])
@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize("window", [1, 4])
def test_so_are_other_turns(opened: CudaDevice, window: int, count: int, style: str, share: float):
    shape = Shape(1024, 12, 3, 128, 2816, 64, window)
    held_to_launches_one_by_one(Turned(opened, shape, windows(count, window), style=style, share=share))


TWO_TILES = Shape(1024, 20, 4, 128, 2816, 64)
"""Rows of a window and heads of a key head that two tiles of 16 hold."""


@pytest.mark.parametrize(("style", "sliding_window"), [("interleaved", 0), ("half", 67)])
@pytest.mark.parametrize("count", [1, 3, 8, 32, 64])
def test_so_are_windows_of_two_tiles(opened: CudaDevice, count: int, style: str, sliding_window: int):
    turned = Turned(opened, TWO_TILES, windows(count, TWO_TILES.window), style=style, sliding_window=sliding_window)
    assert turned.joins
    held_to_launches_one_by_one(turned)


@pytest.mark.parametrize("shape", [*SHAPES, TWO_TILES], ids=lambda shape: f"hidden{shape.hidden}-heads{shape.heads}")
def test_a_captured_row_without_a_number_spoils_none_before_it(opened: CudaDevice, shape: Shape):
    """Its keys and values have a weight of zero in the rows before it, which are computed again: 0 * NaN is NaN."""
    if shape.window < 2:
        pytest.skip("windows of several rows have some before it")
    turned = Turned(opened, shape, [(before, shape.window) for before in (0, 15, 700)])
    last = np.arange(3) * shape.window + shape.window - 1
    turned.numbers[last] = np.nan
    opened.load(turned.x, to_host(turned.numbers, opened.dtype))
    (out, _, _), (joined, _, _) = (turned.run(captured=captured) for captured in (False, True))
    spoilt = np.isin(np.arange(len(out)), last)
    assert np.isnan(joined[spoilt]).all()
    assert np.isfinite(joined[~spoilt]).all()
    assert np.abs(joined[~spoilt] - out[~spoilt]).max() <= 4 * EPS[opened.dtype] * np.abs(out[~spoilt]).max()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_chunks_of_prompts_attend_to_what_is_before_them(opened: CudaDevice, shape: Shape):
    attention = Attention(opened, shape, CHUNKS, prefill=True)
    assert np.abs(attention.run() - attention.wanted).max() <= 4 * EPS[opened.dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_invariant_attention_is_right_in_both_kinds_of_pass(invariant: CudaDevice, shape: Shape):
    passes = (windows(32, shape.window), False), (CHUNKS, True)
    for (seqs, prefill), most in itertools.product(passes, (0, 67)):
        attention = Attention(invariant, shape, seqs, prefill=prefill, sliding_window=most)
        assert np.abs(attention.run() - attention.wanted).max() <= 4 * EPS[invariant.dtype]


@pytest.mark.parametrize("act", ["bf16", "f16"])
def test_a_sort_free_filter_keeps_what_a_sort_keeps(act: str):
    """A row as long as a real vocabulary, peaked and flat, under every kind of filter, against NumPy."""
    from polydraft.contracts.kernels.filter_probs import FilterProbsV1
    from polydraft.reference.rejection import filter_probs

    device = polydraft_cuda.polydraft_open_device("", DeviceOptions(act))
    rng, vocab = np.random.default_rng(4), 151_680
    settings = [
        (0.8, 0, 0.95, 0.0),
        (1.0, 50, 1.0, 0.0),
        (1.3, 1, 1.0, 0.0),
        (0.7, 2000, 0.9, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.0, 40, 0.5, 0.1),
    ]
    rows = [(scale, s) for scale in (0.01, 1.0, 6.0) for s in range(len(settings))]
    logits = np.stack([rng.standard_normal(vocab) * scale for scale, _ in rows]).astype(np.float32)
    arrays = {
        "logits": logits, "row_slot": np.array([s for _, s in rows], np.int32),
        "temperature": np.array([s[0] for s in settings], np.float32), "top_k": np.array([s[1] for s in settings], np.int32),
        "top_p": np.array([s[2] for s in settings], np.float32), "min_p": np.array([s[3] for s in settings], np.float32),
    }  # fmt: skip
    buffers = {name: filled(device, name, value, "i32" if value.dtype == np.int32 else "f32") for name, value in arrays.items()}
    launch_of(device, "filter_probs", FilterProbsV1(**buffers), limits(len(rows)))(device.stream, len(rows))
    found = device.read(buffers["logits"].pointer, logits.shape, "f32")
    wanted = SimpleNamespace(**arrays)
    filter_probs(wanted, len(rows))
    for r in range(len(rows)):
        differing = np.flatnonzero((found[r] > 0) != (wanted.logits[r] > 0))
        assert len(differing) <= 2, (rows[r], len(differing))  # rounding at the border of top-p and min-p
        assert np.allclose(found[r], wanted.logits[r], rtol=2e-3, atol=1e-9) or len(differing), rows[r]
    device.close()
