"""Ranks on NVIDIA GPUs: collectives by threads on one GPU, in every dtype, and whole engines over two."""

from __future__ import annotations

import gc
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import polydraft_cuda
from polydraft import LLM, Engine, RequestOutput
from polydraft.backend import DeviceOptions
from polydraft.conformance import collective_checks
from polydraft.conformance.harness import run_kernel
from polydraft.conformance.target import Target
from polydraft.contracts import COLLECTIVES
from polydraft.contracts.base import Case
from polydraft.contracts.compare import from_host, to_host
from polydraft.contracts.kernels.sum_leaves import tree_sum
from polydraft.errors import DeviceError
from polydraft.host.followers import ProcessChannel
from polydraft.models import Checkpoint
from polydraft.ranks import Exchange, Group
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.collectives import _blocks
from polydraft_cuda.probe import look
from polydraft_cuda.ranks import CHUNK, MeetingPlace, span
from tests.step.test_ranks_faults import run
from tests.support import tiny
from tests.support.of_ranks import OPTIONS, asks
from tests.support.runs import drive, essence

pytestmark = pytest.mark.timeout(300)
on_a_gpu = pytest.mark.device("cuda")
on_two = pytest.mark.skipif(len(look().devices) < 2, reason="needs two GPUs that reach each other's memory")


# -- on paper -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "rank", "index"),
    [("", 0, 0), ("", 1, 1), ("cuda", 3, 3), ("cuda:2", 0, 2), ("cuda:2", 1, 3), ("cuda:3,1", 0, 3), ("cuda:3,1", 1, 1)],
)
def test_each_rank_opens_a_device_of_its_own(spec: str, rank: int, index: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polydraft_cuda.probe.look", lambda: replace(look(), reason=""))
    opened: list[int] = []
    monkeypatch.setattr("polydraft_cuda.device.CudaDevice", lambda index, **_: opened.append(index))
    polydraft_cuda.polydraft_open_device(spec, DeviceOptions(rank=rank))
    assert opened == [index]


@pytest.mark.parametrize(("spec", "words"), [("cuda:0,1", "name one for each rank"), ("cuda:0,", "runs on 'cuda:<index>'")])
def test_devices_that_do_not_suffice_are_refused(spec: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polydraft_cuda.probe.look", lambda: replace(look(), reason=""))
    with pytest.raises(DeviceError, match=words):
        polydraft_cuda.polydraft_open_device(spec, DeviceOptions(rank=2))


def test_a_stretch_holds_what_a_block_brings():
    """As `stretch` of `collectives.cu` cuts a message up: at capacity, where the next stretch begins at once, too."""
    for capacity in (64, 1 << 16, 1 << 18, (1 << 20) - 4, 1 << 20, (1 << 20) + 4, 256 * 76288 * 4):
        for row_bytes in (2, 4, 14, 16, 8196, 76288 * 4):
            most = capacity // row_bytes
            for n in {most // 2, most - 1, most} - {0, -1}:
                each = math.ceil(n * row_bytes / _blocks(row_bytes)(n))
                brought = math.ceil(each / 16) * 16
                assert brought <= span(capacity), f"{n} rows of {row_bytes} bytes, {capacity} at most"


def test_more_than_a_region_has_room_for_is_refused():
    place = MeetingPlace(SimpleNamespace(), Group(0, 2, Exchange.of_threads(2, 64)[0]))  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="rank 0 brought 68 bytes to a launch, wanted at most 64"):
        place.come(68)


@pytest.mark.parametrize("first", ["device", "place"])
def test_memory_of_other_ranks_is_let_go_once_with_the_device_or_the_last_launch(first: str):
    """In the context that it was opened in, whichever is current."""
    calls: list[tuple[Any, ...]] = []

    def call(name: str) -> Any:
        def note(*given: Any) -> tuple[int, ...]:
            calls.append((name, *given))
            return (0, 4096) if name == "cuIpcOpenMemHandle" else (0,)

        return note

    names = ("cuCtxSetCurrent", "cuCtxSynchronize", "cuStreamDestroy", "cuIpcOpenMemHandle", "cuIpcCloseMemHandle")
    device: Any = CudaDevice.__new__(CudaDevice)
    device.cuda = SimpleNamespace(
        CUipcMemHandle=SimpleNamespace, CUipcMem_flags=SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1),
        **{name: call(name) for name in names},
    )  # fmt: skip
    device._open, device._context, device._memory, device.stream = True, "its context", {}, SimpleNamespace(handle=0)
    device.at_close, device.held, device.index, device.spec = [], [object()], 0, "cuda:0"
    place = MeetingPlace(device, Group(0, 2, Exchange.of_threads(2, 64)[0]))
    told = np.concatenate([np.array([-1, 1, 0], np.int64).view(np.uint8), np.zeros(64, np.uint8)])
    assert place._opened(1, told) == 4096
    calls.clear()
    if first == "device":
        device.close()
    del place
    gc.collect()
    device.close()
    at = calls.index(("cuIpcCloseMemHandle", 4096))
    assert [name for name, *_ in calls].count("cuIpcCloseMemHandle") == 1
    assert calls[at - 1] == ("cuCtxSetCurrent", "its context")
    assert not device.held


# -- on one GPU ---------------------------------------------------------------------------------------
@on_a_gpu
@pytest.mark.parametrize("check", list(collective_checks.checks()), ids=lambda check: check.id.rpartition("/")[2])
def test_collectives_keep_their_contracts(check: Any):
    if "ordered-sums" in check.id:
        check = replace(check, needs=("ranks",))  # not declared, since no sum of a product is taken by leaf; the order holds
    found = check.result(Target(polydraft_cuda))
    assert found.outcome == "pass", found.message


@on_a_gpu
@pytest.mark.parametrize("act", polydraft_cuda.CAPABILITIES.rank_dtypes)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_of_many_blocks_are_rounded_once(size: int, act: str):
    """Rows whose bytes are no whole vectors, in one block, in several, and in more than there are."""
    rng, contract = np.random.default_rng(size), COLLECTIVES["all_reduce"]
    exchanges = Exchange.of_threads(size, 1 << 24, 20.0)
    devices = [polydraft_cuda.polydraft_open_device("cuda:0,0,0,0", DeviceOptions(act, rank=rank)) for rank in range(size)]
    tables: list[Any] = [
        polydraft_cuda.polydraft_collectives(device, Group(rank, size, exchanges[rank])) for rank, device in enumerate(devices)
    ]
    for rows, width in ((3, 7), (5, 515), (40, 4096), (301, 4098)):
        x = from_host(to_host(rng.standard_normal((size, rows, width)).astype(np.float32), act), act).astype(np.float32)

        def work(rank: int, x: Any = x, rows: int = rows) -> Any:
            case = Case("sums", {"x": x[rank], "step": np.full(1, 3, np.int32)}, {}, rows)
            return lambda: run_kernel(contract, case, devices[rank], tables[rank], act=act)["x"]

        wanted = to_host(tree_sum(list(x)), act)
        for found in collective_checks.together([work(rank) for rank in range(size)]):
            assert not isinstance(found, Exception), found
            np.testing.assert_array_equal(found, wanted, err_msg=f"{rows} rows of {width}, {CHUNK} bytes a block")
    for device in devices:
        device.close()


# -- on two -------------------------------------------------------------------------------------------
@contextmanager
def over(ranks: int, model: str, **options: Any) -> Iterator[Engine]:
    """An engine of the CUDA backend, closed behind the block."""
    given = {**OPTIONS, "block_size": 16, "num_blocks": 8, "dtype": "f32", **options}
    made = LLM(model=str(tiny.checkpoint(model)), plugins=tiny.PLUGINS, backend="cuda", tensor_parallel=ranks, **given).engine
    try:
        yield made
    finally:
        made.close()


def served(ranks: int, model: str, **options: Any) -> list[RequestOutput]:
    with over(ranks, model, **options) as running:
        return drive(running, asks(model))


@on_a_gpu
@on_two
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("graph", ["off", "decode"])
@pytest.mark.parametrize("drafts", [0, 3, 5])
@pytest.mark.parametrize("model", ["narrow", "sparse-glm", "sparse-ernie"])
def test_texts_and_rounds_are_those_of_one(model: str, drafts: int, graph: str, overlap: int):
    options = {"draft_tokens": drafts, "graph": graph, "overlap": overlap}
    wanted = served(1, model, **options)
    assert [dict(essence(one)) for one in served(2, model, **options)] == [dict(essence(one)) for one in wanted]


@on_a_gpu
@on_two
def test_experts_that_a_rank_keeps_whole():
    options = {"draft_tokens": 3, "expert_parallel": True}
    wanted = [dict(essence(one)) for one in served(1, "sparse-glm", draft_tokens=3)]
    assert [dict(essence(one)) for one in served(2, "sparse-glm", **options)] == wanted


@on_a_gpu
@on_two
@pytest.mark.parametrize("graph", ["off", "decode"])
@pytest.mark.parametrize("model", ["narrow", "sparse-glm"])
def test_new_weights_from_a_directory_and_from_memory(model: str, graph: str):
    options = {"draft_tokens": 3, "graph": graph}
    moved = tiny.checkpoint(tiny.moved(model))
    with Checkpoint(moved) as opened:
        arrays = {name: opened.tensor(name) for name in opened.names()}
    with over(1, model, **options) as alone:
        alone.update_weights(moved)
        wanted = [dict(essence(one)) for one in drive(alone, asks(model))]
    with over(2, model, **options) as running:
        before = [dict(essence(one)) for one in drive(running, asks(model))]
        for source in (moved, tiny.checkpoint(model), arrays):
            running.update_weights(source)
            found = [dict(essence(one)) for one in drive(running, asks(model))]
            assert found == (before if source == tiny.checkpoint(model) else wanted)
    assert before != wanted


@on_a_gpu
@on_two
@pytest.mark.parametrize("fatal", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_dies_or_stops_ends_all(fatal: signal.Signals):
    with over(2, "narrow", draft_tokens=2) as running:
        assert {output.finish_reason for output in run(running)} == {"length"}
        assert running._followers is not None
        (channel,) = running._followers._channels
        assert isinstance(channel, ProcessChannel)
        os.kill(channel._process.pid, fatal)
        begin = time.monotonic()
        try:
            outputs = run(running, count=4)
        finally:
            if fatal == signal.SIGSTOP:
                os.kill(channel._process.pid, signal.SIGKILL)
        assert time.monotonic() - begin < 20
        assert {output.finish_reason for output in outputs} == {"error"}
        assert "rank 1" in running.failure
        assert "every rank ends here" in running.failure
