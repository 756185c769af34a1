"""Capture and replay: what a capture forbids, that a replay runs on the addresses it was captured with, and what it holds."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.residual_add import ResidualAddV1
from polydraft.contracts.kernels.rms_norm import RmsNormV1
from polydraft.errors import DeviceError, GraphBufferError
from polydraft_emulator import Emulator
from polydraft_emulator.device import EmulatorDevice
from polydraft_emulator.graph import NODE_BYTES, EmulatorCapture
from polydraft_emulator.kernels import EmulatorTable
from polydraft_emulator.memory import EmulatorBuffer, EmulatorWeight
from polydraft_emulator.options import POLICIES
from polydraft_emulator.testing import Log, open_device

LIMITS = Limits(
    max_seqs=4, num_drafts=3, max_rows=8, max_logit_rows=8, max_len=32, block_size=4, num_blocks=8, max_blocks=8,
    max_stop_tokens=2, vocab_size=16,
)  # fmt: skip


class Adder:
    """x += y, then out = norm(x): two launches over three buffers and a weight, and a graph of them."""

    def __init__(self, query: str = "policy=lazy") -> None:
        self.device = open_device(query)
        self.capture = EmulatorCapture(self.device, frozenset(self.device.options.refused_names))
        table: Any = EmulatorTable(self.device)
        self.x, self.y, self.out = (self.device.empty(name, (4, 2), "f32") for name in ("x", "y", "out"))
        self.weight: EmulatorWeight = table.prepare_weight("norm", np.ones(2), "f32")
        self._add: Any
        self._norm: Any
        add, norm = (table.providers[name] for name in ("residual_add", "rms_norm"))
        self._add = add.bind(ResidualAddV1(x=self.x, y=self.y), LIMITS, None)
        self._norm = norm.bind(RmsNormV1(x=self.x, weight=self.weight, eps=0.0, plus_one=False, out=self.out), LIMITS, None)
        self.set(self.x, 0)
        self.set(self.y, 1)

    def set(self, buffer: EmulatorBuffer, value: float) -> None:
        self.device.load(buffer, np.full(buffer.shape, value, np.float32))

    def launch(self) -> None:
        self._add(self.device.stream, 4)
        self._norm(self.device.stream, 4)

    def graph(self) -> Any:
        return self.capture.capture(self.device.stream, self.launch)


def test_a_capture_runs_nothing_and_a_replay_everything():
    adder = Adder()
    graph = adder.graph()
    adder.device.synchronize()
    assert (adder.device.read(adder.x) == 0).all()
    assert adder.device.counters.launches == 0
    for _ in range(3):
        graph.replay(adder.device.stream)
    assert (adder.device.read(adder.x) == 3).all()
    assert (adder.device.read(adder.out) == 1).all()
    assert (adder.device.counters.graph_replays, adder.device.counters.launches) == (3, 0)


def test_a_replay_works_on_new_contents():
    adder = Adder()
    graph = adder.graph()
    adder.set(adder.y, 5)
    graph.replay(adder.device.stream)
    assert (adder.device.read(adder.x) == 5).all()
    assert (adder.device.read(adder.out) == 1).all()


def test_a_replay_is_lazy_like_a_launch():
    adder = Adder()
    adder.graph().replay(adder.device.stream)
    assert adder.device.outstanding
    staging = adder.device.staging("s", (4, 2), "f32")
    adder.device.download(adder.device.stream, staging, adder.x, 4)
    assert np.isnan(staging.array).all()
    adder.device.synchronize()
    assert (staging.array == 1).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_replays_and_launches_keep_their_order(policy: str, seed: int):
    adder = Adder(f"policy={policy}&seed={seed}")
    graph = adder.graph()
    staging = adder.device.staging("s", (4, 2), "f32")
    staging.array[:] = 10
    for _ in range(2):
        graph.replay(adder.device.stream)
        adder.launch()
        adder.device.upload(adder.device.stream, adder.y, staging, 4)
    adder.device.synchronize()
    assert (adder.device.read(adder.x) == 1 + 1 + 10 + 10).all()


def test_another_stream_may_come_between_the_launches_of_a_replay_or_not():
    orders = set()
    for seed in range(60):
        device = open_device(f"seed={seed}")
        log, other = Log(device), device.make_stream("other")
        log.capture("ab").replay(device.stream)
        log.issue("x", other)
        device.synchronize()
        orders.add("".join(log.ran))
    assert orders == {"abx", "xab", "axb"}


# -- what a capture forbids -----------------------------------------------------------------------------------


def forbidden(device: EmulatorDevice) -> dict[str, Callable[[], Any]]:
    buffer, staging, event = device.empty("b", (2,), "i32"), device.staging("s", (2,), "i32"), device.event()
    other = device.make_stream("other")
    event.record(device.stream)
    device.synchronize()
    table = EmulatorTable(device)
    weight = table.prepare_weight("norm", np.ones(2), "f32")
    return {
        "event.synchronize": event.synchronize,
        "event.query": event.query,
        "event.record": lambda: event.record(device.stream),
        "stream.wait": lambda: device.stream.wait(event),
        "device.synchronize": device.synchronize,
        "allocating more": lambda: device.empty("more", (1,), "i32"),
        "allocating pinned": lambda: device.staging("pinned", (1,), "i32"),
        "allocating a weight": lambda: table.prepare_weight("norm", np.ones(2), "f32"),
        "refilling weight": lambda: table.prepare_weight("norm", np.ones(2), "f32", weight),
        "load of b": lambda: device.load(buffer, np.zeros(2, np.int32)),
        "a second capture": lambda: EmulatorCapture(device, frozenset()).capture(device.stream, lambda: None),
        "stream other while compute": lambda: device.upload(other, buffer, staging, 1),
        "cannot read": lambda: buffer.host_array,
    }


@pytest.mark.parametrize("call", forbidden(open_device()))
def test_a_capture_forbids(call: str):
    device = open_device()
    forbid, log, capture = forbidden(device)[call], Log(device), EmulatorCapture(device, frozenset())

    def fn() -> None:
        log.issue("captured")
        forbid()

    with pytest.raises(DeviceError, match=call):
        capture.capture(device.stream, fn)
    device.synchronize()
    assert log.ran == [], "a capture that was broken off leaves nothing behind"
    log.issue("afterwards")
    device.synchronize()
    assert log.ran == ["afterwards"]
    assert capture.memory() == 0


def test_copies_can_be_captured():
    device = open_device("policy=lazy")
    buffer, source, back = device.empty("b", (2,), "i32"), device.staging("in", (2,), "i32"), device.staging("out", (2,), "i32")

    def fn() -> None:
        device.upload(device.stream, buffer, source, 2)
        device.download(device.stream, back, buffer, 2)

    graph = EmulatorCapture(device, frozenset()).capture(device.stream, fn)
    for value in (3, 4):
        source.array[:] = value
        graph.replay(device.stream)
        assert (back.array != value).all()
        device.synchronize()
        assert (back.array == value).all()


def test_what_is_declared_uncapturable_is_refused():
    adder = Adder("uncapturable=rms_norm,forward_meta")
    with pytest.raises(DeviceError, match="rms_norm cannot be captured"):
        adder.graph()
    info = Emulator("?uncapturable=rms_norm,forward_meta").polydraft_backend_info("")
    assert info.capabilities.uncapturable == ("rms_norm", "forward_meta")
    assert Emulator().polydraft_backend_info("").capabilities.uncapturable == ()


# -- addresses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "name"), [("x", "x"), ("y", "y"), ("out", "out"), ("weight", r"weight \(norm\)")])
@pytest.mark.parametrize("how", ["move", "free"])
def test_a_replay_refuses_memory_that_is_not_where_it_was(which: str, name: str, how: str):
    adder = Adder()
    graph = adder.graph()
    getattr(adder.device, how)(getattr(adder, which))
    said = "lies at another address" if how == "move" else "was freed"
    with pytest.raises(GraphBufferError, match=f"{name} {said} since this graph was captured on emulator:0.*capture again"):
        graph.replay(adder.device.stream)
    assert not adder.device.outstanding


def test_a_graph_captured_after_a_move_works():
    adder = Adder()
    adder.device.move(adder.y)
    adder.__init__("policy=lazy")  # type: ignore[misc]  # everything bound anew
    graph = adder.graph()
    graph.replay(adder.device.stream)
    assert (adder.device.read(adder.x) == 1).all()


def test_two_graphs_are_alive_at_once():
    adder, other = Adder(), Adder()
    first = adder.graph()
    second = adder.capture.capture(adder.device.stream, lambda: adder._add(adder.device.stream, 2))
    for graph in (first, second, first, second):
        graph.replay(adder.device.stream)
    assert adder.device.read(adder.x).tolist() == [[4, 4], [4, 4], [2, 2], [2, 2]]
    with pytest.raises(DeviceError, match="no memory of device"):
        EmulatorTable(other.device).providers["residual_add"].bind(ResidualAddV1(x=adder.x, y=adder.y), LIMITS, None)


# -- memory ---------------------------------------------------------------------------------------------------


def test_graphs_hold_memory_while_they_are_alive():
    adder = Adder()
    before = adder.device.memory()
    graphs = [adder.graph() for _ in range(3)]
    assert adder.capture.memory() == 3 * 2 * NODE_BYTES
    assert adder.device.memory() == before + adder.capture.memory()
    graphs.clear()
    gc.collect()
    assert adder.capture.memory() == 0
    adder.graph()
    assert adder.device.memory() == before + 6 * NODE_BYTES, "what was given back is used again; the peak stays"


def test_a_graph_that_does_not_fit_is_refused():
    adder = Adder("memory=1")
    adder.device.empty("most", ((1 << 20) - 4096,), "u8")
    with pytest.raises(DeviceError, match="for a graph of 2 launches"):
        adder.graph()
    adder.launch()
    assert (adder.device.read(adder.x) == 1).all()
