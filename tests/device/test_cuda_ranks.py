"""Ranks on NVIDIA GPUs: collectives by threads on one GPU, in every dtype, and whole engines over two."""

from __future__ import annotations

import gc
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import polydraft_cuda
from polydraft import LLM, Engine, RequestOutput, SamplingParams
from polydraft.backend import DeviceOptions
from polydraft.config import EngineConfig
from polydraft.conformance import collective_checks, rank_jobs
from polydraft.conformance.harness import Bound, run_golden, run_kernel
from polydraft.conformance.target import Target
from polydraft.contracts import COLLECTIVES, AllReduceV1, ArgmaxPairV1, LinearV1, ResidualAddV1, RmsNormV1
from polydraft.contracts.base import Case, Limits
from polydraft.contracts.compare import compare, from_host, to_host
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.kernels.sum_leaves import tree_sum
from polydraft.contracts.stacking import stacked
from polydraft.errors import DeviceError
from polydraft.host.followers import ProcessChannel
from polydraft.models import Checkpoint
from polydraft.plugins.plugins import Plugins
from polydraft.plugins.program_pass import Node, Rewritten, UnboundProgram
from polydraft.ranks import Exchange, Group, Note
from polydraft.sentinels import NO_TOKEN
from polydraft_cuda import nccl
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import kernels
from polydraft_cuda.kernels.collectives import _blocks
from polydraft_cuda.kernels.provider import CudaProvider
from polydraft_cuda.probe import look
from polydraft_cuda.program_pass import CudaPass
from polydraft_cuda.ranks import CHUNK, WAYS, MeetingPlace, collectives, span
from polydraft_cuda.storage import CudaWeight
from tests.device.paper import PaperDevice, paper_place, share_of_head, sum_and_norm
from tests.step.test_ranks_faults import run
from tests.support import letters, packed_models, tiny
from tests.support.eagle3 import pair
from tests.support.gpus import on_two
from tests.support.of_ranks import OPTIONS, asks
from tests.support.runs import Ask, drive, essence

pytestmark = pytest.mark.timeout(300)
on_a_gpu = pytest.mark.device("cuda")
LIMITS = Limits(64, 3, 512, 256, 1024, 16, 64, 64, 4, 151680)
over_nccl = pytest.mark.skipif(nccl.library() is None, reason="needs NCCL, which the extra nccl brings")
PEERS, NCCL = "cuda:0?collectives=peers", "cuda:0?collectives=nccl"
meetings = pytest.mark.parametrize("meets", [PEERS, pytest.param(NCCL, marks=over_nccl)], ids=["peers", "nccl"])
"""Both ways in which ranks meet."""


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


@pytest.mark.parametrize(
    ("option", "linked", "installed", "wanted"),
    [
        ("", True, True, ("peers", "the GPUs reach each other's memory")),
        ("", False, True, ("nccl", "cuda:0 cannot reach memory of cuda:1")),
        ("?collectives=nccl", True, True, ("nccl", "asked for")),
        ("?collectives=peers", True, False, ("peers", "asked for")),
        ("", False, False, "cuda:0 cannot reach memory of cuda:1 .*: ranks would meet over NCCL, which is not installed"),
        ("?collectives=nccl", True, False, r"pip install 'polydraft\[nccl\]'"),
        ("?collectives=peers", False, True, "cuda:0 cannot reach memory of cuda:1 .*leave the option out"),
        ("?collectives=ring", True, True, "has the option 'collectives=ring', wanted collectives=peers or nccl"),
    ],
)  # fmt: skip
def test_ranks_meet_as_asked_or_as_their_gpus_allow(
    option: str, linked: bool, installed: bool, wanted: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("polydraft_cuda.probe.look", lambda: replace(look(), reason=""))
    monkeypatch.setattr("polydraft_cuda.device.reaches", lambda index, other: linked)
    monkeypatch.setattr("polydraft_cuda.device.CudaDevice", lambda index, **options: SimpleNamespace(index=index, **options))
    monkeypatch.setattr("polydraft_cuda.nccl.library", lambda: object() if installed else None)
    for spec, rank in itertools.product((f"cuda{option}", f"cuda:0{option}", f"cuda:0,1{option}"), range(2)):
        if isinstance(wanted, str):
            with pytest.raises(DeviceError, match=wanted):
                polydraft_cuda.polydraft_open_device(spec, DeviceOptions(rank=rank, num_ranks=2))
        else:
            opened: Any = polydraft_cuda.polydraft_open_device(spec, DeviceOptions(rank=rank, num_ranks=2))
            assert (opened.index, opened.meets[0]) == (rank, wanted[0])
            assert opened.meets[1].startswith(wanted[1])
            info = Plugins.load("cuda").info_of(opened)
            assert info.capabilities.ordered_sums == (wanted[0] == "peers")


def test_two_ranks_on_one_gpu_do_not_meet_over_nccl(monkeypatch: pytest.MonkeyPatch):
    """A process that is one of several ranks and was not told so, as in the kit, looks at nothing."""
    monkeypatch.setattr("polydraft_cuda.nccl.library", object)
    with pytest.raises(DeviceError, match="two ranks on one GPU"):
        nccl.choose("nccl", [0, 0], lambda index, other: True)
    assert nccl.choose("", [0, 0], lambda index, other: False)[0] == "peers"


@pytest.mark.parametrize("meets", [("nccl", "asked for"), ("peers", "linked")])
def test_only_over_memory_launches_are_joined(meets: tuple[str, str]):
    device: Any = PaperDevice()
    device.meets = meets
    found = collectives(device, Group(0, 2, Exchange.of_threads(2, 1 << 20)[0]))
    assert (found.program_pass is None) == (meets[0] == "nccl")
    assert set(found.providers) == set(COLLECTIVES.names())
    assert found.meets == (WAYS[meets[0]], meets[1])


@pytest.mark.parametrize("why", ["patience", "another rank gives up", "a rank fails", "closed"])
def test_a_communicator_is_aborted_when_its_launches_wait_in_vain(why: str):
    exchanges, aborted = Exchange.of_threads(2, 64), threading.Event()
    exchange = exchanges[0]
    came, fault, closing, ended = np.array([3, 2, 1, 5, 7, 4, 64, 0]), np.zeros(8, np.int64), threading.Event(), threading.Event()
    exchange.patience_s = 0.1 if why == "patience" else math.inf
    watcher = threading.Thread(target=nccl._watch, args=(exchange, came, fault, 1, closing, ended, aborted.set), daemon=True)
    watcher.start()
    assert not aborted.wait(0.08)
    if why == "another rank gives up":
        exchanges[1].patience_s = 0.05
        with pytest.raises(DeviceError):
            exchanges[1].judge(Note("all_reduce", 5, 7, 4, 64), 0)
    elif why == "a rank fails":
        with pytest.raises(DeviceError):
            exchanges[1].fail("it fails")
    elif why == "closed":
        closing.set()
    assert aborted.wait(5)
    assert ended.is_set()
    assert fault.tolist() == ([0] * 8 if why == "closed" else [1, 1, 5, 7, 4, 64, 1, 0])


def test_a_communicator_whose_launches_go_on_is_not_aborted():
    exchange, aborted = Exchange.of_threads(2, 64, 0.1)[0], threading.Event()
    came, fault, closing, ended = np.zeros(8, np.int64), np.zeros(8, np.int64), threading.Event(), threading.Event()
    watcher = threading.Thread(target=nccl._watch, args=(exchange, came, fault, 1, closing, ended, aborted.set), daemon=True)
    watcher.start()
    for count in range(1, 8):
        came[:2] = count, count - 1
        time.sleep(0.05)
    came[1] = came[0]
    assert not aborted.wait(0.3)
    closing.set()
    watcher.join(5)
    assert aborted.is_set()


class Binding:
    """Stands for NVIDIA's: ranks of this process meet once all have come, where that is to happen."""

    class NCCLError(Exception):
        """As its own."""

    UniqueId = SimpleNamespace(from_buffer=bytes)

    def __init__(self, size: int) -> None:
        self.all_here, self.aborted = threading.Barrier(size), list[int]()

    def get_unique_id(self) -> bytes:
        return bytes(range(nccl.ID_BYTES))

    def comm_init_rank(self, size: int, told: bytes, rank: int) -> int:
        assert told == self.get_unique_id()
        try:
            self.all_here.wait(20)
        except threading.BrokenBarrierError:
            raise self.NCCLError("remote process exited") from None
        return 100 + rank

    def all_gather(self, *arguments: Any) -> None:
        assert arguments[4] >= 100

    def comm_abort(self, communicator: int) -> None:
        self.aborted.append(communicator)


def communicators(binding: Binding, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> tuple[list[Any], list[Any]]:
    """Those of all ranks, over devices that do nothing; rank 0 waits for NCCL for half a second."""
    monkeypatch.setattr(nccl, "library", lambda: binding)
    monkeypatch.setattr(nccl, "FIND", 0.5)
    exchanges = Exchange.of_threads(size, nccl.ID_BYTES, math.inf)
    exchanges[0].patience_s = 1.0
    devices = [
        SimpleNamespace(
            spec=f"cuda:{rank}", held=[], at_close=[], counters=SimpleNamespace(launches=0), stream=SimpleNamespace(address=7),
            make_current=lambda: None, synchronize=lambda: None,
            staging=lambda *_: SimpleNamespace(array=np.zeros((2, 64), np.uint8), pointer=0),
            empty=lambda *_: SimpleNamespace(pointer=1), zeros=lambda *_: SimpleNamespace(pointer=2),
        )
        for rank in range(size)
    ]  # fmt: skip
    made: list[Any] = [
        nccl.Communicator(device, Group(rank, size, exchange))  # type: ignore[arg-type]
        for rank, (device, exchange) in enumerate(zip(devices, exchanges, strict=True))
    ]
    for one in made:
        one.region()
    return made, devices


def test_ranks_that_nccl_brings_together_go_on(monkeypatch: pytest.MonkeyPatch):
    binding = Binding(2)
    made, devices = communicators(binding, monkeypatch)
    for found in collective_checks.together([partial(one.come, 64) for one in made]):
        assert not isinstance(found, Exception), found
    assert [one._group.exchange.patience_s for one in made] == [1.0, math.inf]
    assert [device.counters.launches for device in devices] == [2, 2]
    for device in devices:
        for end in reversed(device.at_close):
            end()
    assert sorted(binding.aborted) == [100, 101]


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("its host", r"rank 2 did not come to start \(ranks wait for each other\), within 0.5 s"),
        ("its thread", r"NCCL did not bring the ranks together \(NCCL_DEBUG=INFO says .*\) within 0.5 s"),
        ("its process", "rank 2 .process 4711. ended: SIGKILL"),
        ("its network", r"rank 2 on cuda:2 cannot meet the others over NCCL \(no network\)"),
    ],
)
def test_a_rank_that_does_not_come_to_nccl_is_named(missing: str, words: str, monkeypatch: pytest.MonkeyPatch):
    """On all ranks, within seconds. Where it comes late there is nobody any more."""
    binding = Binding(3)
    (*others, late), _ = communicators(binding, monkeypatch, 3)

    def absent() -> None:
        if missing == "its thread":
            late._join = lambda told, met: None
            late.come(64)
        elif missing == "its network":
            late._join = lambda told, met: met.set_exception(binding.NCCLError("no network"))
            try:
                late.come(64)
            except DeviceError as error:
                late._group.exchange.fail(str(error))
        else:
            late._group.exchange.share(np.zeros(nccl.ID_BYTES, np.uint8))
            if missing == "its process":
                late._group.exchange.fail("rank 2 (process 4711) ended: SIGKILL, Killed")

    begin = time.monotonic()
    found = collective_checks.together([*(partial(one.come, 64) for one in others), absent])
    assert time.monotonic() - begin < 10
    for one in found[:2]:
        assert isinstance(one, DeviceError), one
        assert re.search(words, str(one))
    assert not binding.aborted
    binding.all_here.wait(20)
    while len(binding.aborted) < 2:
        time.sleep(0.01)
    assert sorted(binding.aborted) == [100, 101]


def test_a_stretch_holds_what_a_block_brings():
    """As `stretch` of `collectives.cu` cuts a message up: at capacity, where the next stretch begins at once, too."""
    for capacity in (64, 1 << 16, 1 << 18, (1 << 20) - 4, 1 << 20, (1 << 20) + 4, 256 * 76288 * 4):
        for row_bytes in (2, 4, 14, 16, 8196, 76288 * 4):
            most = capacity // row_bytes
            for n in {most // 2, most - 1, most} - {0, -1}:
                each = math.ceil(n * row_bytes / _blocks(row_bytes)(n))
                brought = math.ceil(each / 16) * 16
                assert brought <= span(capacity), f"{n} rows of {row_bytes} bytes, {capacity} at most"


def joined(device: Any, place: Any, *launches: tuple[str, Any], readers: tuple[tuple[str, Any], ...] = ()) -> list[str]:
    """What the pass makes of these launches of a rank, with `readers` in the other program of the step, by name."""
    nodes, others = ([Node(name, args, "rows", "stage") for name, args in each] for each in (launches, readers))
    brought = CudaPass(device, lambda kernel: CudaProvider(kernel, device), place=place)
    served = frozenset((*kernels(), *COLLECTIVES.names()))
    found = brought.rewrite(UnboundProgram("a program", tuple(nodes), served, LIMITS, (others,)))
    return [one.kernel if isinstance(one, Rewritten) else one.contract for one in found]  # type: ignore[union-attr]


def test_a_sum_takes_the_norm_behind_it_where_a_block_can_keep_rows():
    device: Any = PaperDevice()
    place = paper_place(device, 2)
    branch, launches = sum_and_norm(device, 512, 4096, "bf16")
    weight: Any = CudaWeight("linear", device.empty("w", (4096, 4096), "bf16"))
    x, y = (device.empty(name, (512, 4096), "bf16") for name in "xy")
    written, between = (("linear", LinearV1(x=x, weight=weight, bias=None, out=out)) for out in (branch, y))
    assert joined(device, place, written, *launches) == ["linear", "early_norm_of_sum"]
    assert joined(device, place, written, between, *launches) == ["linear", "linear", "norm_of_sum"]
    apart = [name for name, _ in launches]
    reads = "linear", LinearV1(x=branch, weight=weight, bias=None, out=x)
    assert joined(device, place, written, *launches, readers=(reads,)) == ["linear", *apart]
    assert joined(device, place, *launches) == apart, "it reads what it has left there itself"
    assert joined(device, None, written, *launches)[1:] == apart
    other, odd = sum_and_norm(device, 512, 4098, "bf16")
    written = "linear", LinearV1(x=x, weight=weight, bias=None, out=other)
    assert joined(device, place, written, *odd)[1:] == apart, "rows are no whole vectors"


def test_ranks_choose_where_logits_are_computed_unless_some_are_padding():
    device: Any = PaperDevice()
    for outputs, tokens, wanted in ((75840, 151680, True), (75840, 151679, False), (4096, 8192, False)):
        launches = share_of_head(device, 64, 4096, outputs, "bf16", tokens)
        found = joined(device, paper_place(device, 2), *launches)
        assert found == (["chosen_of_ranks"] if wanted else ["linear", "argmax_pair"])
        assert joined(device, None, *launches) == ["linear", "argmax_pair"]


def test_few_rows_are_brought_as_words_and_no_more_than_blocks_have_room_for_whole():
    place = MeetingPlace(SimpleNamespace(), Group(0, 2, Exchange.of_threads(2, 1 << 20)[0]))  # type: ignore[arg-type]
    assert span(1 << 20) == 8192
    assert [place.rows_with_room(row_bytes) for row_bytes in (2048, 4096, 8192, 8208)] == [512, 256, 128, 0]
    assert [place.rows_of_words(row_bytes) for row_bytes in (8192, 16384, 16400)] == [16, 16, 0]


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
        CUipcMem_flags=SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1),
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


class OfRank:
    """One of several ranks of this process, which has a stream of rows, a branch that ranks add up, and the launches behind it:
    apart and joined."""

    def __init__(self, rank: int, exchanges: list[Exchange], act: str, rows: int, width: int, *, spec: str) -> None:
        self.rank, self.act, self.shape = rank, act, (rows, width)
        self.device: Any = polydraft_cuda.polydraft_open_device(spec, DeviceOptions(act, rank=rank))
        self.table: Any = polydraft_cuda.polydraft_kernels(self.device)
        self.ours: Any = polydraft_cuda.polydraft_collectives(self.device, Group(rank, len(exchanges), exchanges[rank]))
        self.kernels: Any = self.ours.program_pass.kernels  # type: ignore[union-attr]
        self.stream, self.branch, self.out = (self.device.zeros(name, self.shape, act) for name in ("x", "y", "out"))
        gain = np.random.default_rng(5).uniform(0.5, 2, width).astype(np.float32)
        step = self.device.zeros("step", (1,), "i32")
        normed = RmsNormV1(
            x=self.stream, weight=self.table.prepare_weight("norm", gain, act), eps=1e-6, plus_one=False, out=self.out
        )
        added = ResidualAddV1(x=self.stream, y=self.branch)
        summed = AllReduceV1(x=self.branch, step=step)
        self.apart = [
            self.ours.providers["all_reduce"].bind(summed, LIMITS, None),
            self.table.providers["residual_add+rms_norm"].bind(CompositeArgs((added, normed)), LIMITS, None),
        ]
        self.joined = {
            name: self.kernels[name].provider.bind(CompositeArgs((summed, added, normed)), LIMITS, None)
            for name in ("norm_of_sum", "early_norm_of_sum")
        }

    def load(self, seed: int) -> None:
        """The stream and the normed rows are those of all ranks, the branch each rank's own."""
        for buffer, whose in ((self.stream, 0), (self.out, 0), (self.branch, self.rank + 1)):
            rows = np.random.default_rng((seed, whose)).standard_normal(self.shape).astype(np.float32)
            self.device.load(buffer, to_host(rows, self.act))

    def found(self) -> tuple[Any, Any]:
        return tuple(self.device.read(one.pointer, one.shape, self.act) for one in (self.stream, self.out))  # type: ignore[return-value]


def of_ranks(
    size: int, act: str, rows: int, width: int, *, spec: str, room: int = 1 << 24, patience_s: float = 20.0
) -> list[OfRank]:
    exchanges = Exchange.of_threads(size, room, patience_s)
    return [OfRank(rank, exchanges, act, rows, width, spec=spec) for rank in range(size)]


def bound(device: Any, provider: Any, *records: Any) -> Any:
    """A launch with as much workspace as it wants."""
    args = CompositeArgs(records) if len(records) > 1 else records[0]
    nbytes = provider.workspace_bytes(args, LIMITS)
    workspace = SimpleNamespace(buffer=device.zeros("workspace", (max(nbytes, 1),), "u8"), nbytes=nbytes)
    return provider.bind(args, LIMITS, workspace)


ROOM = 1 << 24
JOINED = [
    (2, 1, 64, ROOM), (2, 5, 4096, ROOM), (2, 16, 4104, ROOM), (2, 17, 5120, ROOM), (2, 64, 12288, ROOM), (2, 200, 4096, ROOM),
    (2, 300, 8192, ROOM), (2, 40, 12288, 40 * 12288 * 4), (3, 15, 4096, ROOM), (3, 70, 520, ROOM), (4, 33, 2048, ROOM),
]  # fmt: skip
"""Ranks, rows, width and room: rows of one vector, of some for each thread and of a part of that; as words, by flags, several a
block, and apart where blocks have no room for whole ones."""


@on_a_gpu
@pytest.mark.parametrize("act", polydraft_cuda.CAPABILITIES.rank_dtypes)
@pytest.mark.parametrize(("size", "rows", "width", "room"), JOINED)
def test_a_norm_joined_to_a_sum_has_the_bits_of_both(size: int, rows: int, width: int, room: int, act: str):
    """Several times, so that both turns of the regions are used, and beside sums alone. Ranks that share a GPU launch nothing
    behind a sum that waits for others, which may lack its place meanwhile."""
    ranks = of_ranks(size, act, rows, width, spec="cuda:0,0,0,0", room=room)

    def work(one: OfRank) -> Any:
        def run() -> list[Any]:
            found = []
            for seed in range(3):
                for launches in (one.apart, *([joined] for joined in one.joined.values())):
                    one.load(seed)
                    for launch in launches:
                        launch(one.device.stream, rows)
                        one.device.synchronize()
                    found.append(one.found())
            return found

        return run

    for found in collective_checks.together([work(one) for one in ranks]):
        assert not isinstance(found, Exception), found
        for apart, *others in (found[i : i + 3] for i in range(0, len(found), 3)):
            assert np.isfinite(from_host(apart[1], act)).all()
            for other in others:
                for got, wanted in zip(other, apart, strict=True):
                    np.testing.assert_array_equal(got, wanted)
    for one in ranks:
        one.device.close()


@on_a_gpu
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_choose_the_highest_logit_of_all_by_what_their_heads_keep(size: int):
    """Whether heads are looked at by bytes first, read whole, or write logits. Rows without a slot or with NaN choose nothing."""
    hidden, share, most = 128, 67584, 300
    rng, exchanges = np.random.default_rng(size), Exchange.of_threads(size, 1 << 20, 20.0)
    whole = from_host(to_host(rng.standard_normal((size * share, hidden), np.float32), "bf16"), "bf16").astype(np.float32)
    x = from_host(to_host(rng.standard_normal((most, hidden), np.float32), "bf16"), "bf16").astype(np.float32)
    slots = np.where(np.arange(most) % 7 == 3, -1, 0).astype(np.int32)
    wanted = np.where(slots < 0, NO_TOKEN, np.argmax(x.astype(np.float64) @ whole.T, axis=1))
    x[4], wanted[4] = np.nan, NO_TOKEN

    def work(rank: int) -> Any:
        def run() -> list[Any]:
            device: Any = polydraft_cuda.polydraft_open_device("cuda:0,0,0", DeviceOptions("bf16", rank=rank))
            table = polydraft_cuda.polydraft_kernels(device)
            ours: Any = polydraft_cuda.polydraft_collectives(device, Group(rank, size, exchanges[rank]))
            weight = table.prepare_weight("linear", whole[rank * share : (rank + 1) * share], "bf16")
            rows, logits = device.zeros("x", x.shape, "bf16"), device.zeros("logits", (most, share), "f32")
            row_slot, tokens, step = (device.zeros("ids", (n,), "i32") for n in (most, most, 1))
            device.load(rows, to_host(x, "bf16"))
            device.load(row_slot, slots)
            project = LinearV1(x=rows, weight=weight, bias=None, out=logits)
            choice = ArgmaxPairV1(logits=logits, row_slot=row_slot, num_valid=size * share, tokens=tokens, step=step)
            launch, found = bound(device, ours.program_pass.kernels["chosen_of_ranks"].provider, project, choice), []
            for n in (1, 8, 64, 100, 200, most):
                device.load(tokens, np.full(most, 7, np.int32))
                launch(device.stream, n)
                found.append(device.read(tokens.pointer, tokens.shape, "i32"))
                assert (found[-1][n:] == 7).all()
            device.close()
            return found

        return run

    for found in collective_checks.together([work(rank) for rank in range(size)]):
        assert not isinstance(found, Exception), found
        for n, tokens in zip((1, 8, 64, 100, 200, most), found, strict=True):
            np.testing.assert_array_equal(tokens[:n], wanted[:n])


ALONE = """
import math
import threading

import numpy as np

import polydraft_cuda
from polydraft.backend import DeviceOptions
from polydraft.device import DeviceCounters
from polydraft.errors import DeviceError
from polydraft.ranks import Exchange, Group
from polydraft_cuda.nccl import ID_BYTES, Communicator

def find(*exchanges):
    device = polydraft_cuda.polydraft_open_device("cuda:0", DeviceOptions())
    place = Communicator(device, Group(0, len(exchanges), exchanges[0]))
    place.region()
    try:
        place.come(64)
        place.gather(device.stream, 64)
        device.synchronize()
        print("together")
    except DeviceError as error:
        print(error)
    device.close()

first, other = Exchange.of_threads(2, 1 << 20, 0.5)
other.patience_s = math.inf
threading.Thread(target=other.share, args=(np.zeros(ID_BYTES, np.uint8),)).start()
find(first, other)
find(*Exchange.of_threads(1, 1 << 20))
"""


@on_a_gpu
@over_nccl
def test_a_rank_that_nobody_comes_to_over_nccl_says_so_and_its_process_goes_on():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=100, check=False)
    said = "rank 1 did not come to start (ranks wait for each other), within 3 s; every rank ends here, start the engine again"
    assert (done.returncode, done.stdout) == (0, f"{said}\ntogether\n"), done.stderr


# -- on two -------------------------------------------------------------------------------------------
@on_a_gpu
@on_two
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (64, 4096), (256, 4096), (3, 5120)])
def test_captured_norms_of_sums_add_to_the_newest_stream(rows: int, width: int):
    """The stream is read while the projection in front still runs, over and over."""
    ranks = of_ranks(2, "bf16", rows, width, spec="cuda:0")

    def work(one: OfRank) -> Any:
        def run() -> list[Any]:
            device = one.device
            weight = np.random.default_rng((9, one.rank)).standard_normal((width, width), np.float32) / 100
            prepared = one.table.prepare_weight("linear", weight, "bf16")
            project = bound(
                device, one.table.providers["linear"], LinearV1(x=one.out, weight=prepared, bias=None, out=one.branch)
            )

            def steps(*launches: Any) -> None:
                for launch in (project, *launches) * 30:
                    launch(device.stream, rows)

            one.load(2)
            steps(*one.apart)
            found = [one.found()]
            capture = polydraft_cuda.polydraft_graph_capture(device)
            graph = capture.capture(device.stream, lambda: steps(one.joined["early_norm_of_sum"]))
            for _ in range(3):
                one.load(2)
                graph.replay(device.stream)
                found.append(one.found())
            return found

        return run

    first, second = collective_checks.together([work(one) for one in ranks])
    for found in (first, second):
        assert not isinstance(found, Exception), found
        assert np.isfinite(from_host(found[0][1], "bf16")).all()
        for one in found:
            for got, wanted in zip(one, first[0], strict=True):
                np.testing.assert_array_equal(got, wanted)
    for one in ranks:
        one.device.close()


class OverNccl:
    """Two ranks of this process that meet over NCCL, a GPU each; use it in `with`. Nothing is allocated while one of them waits
    for the other, which might wait for that."""

    def __init__(self, act: str, patience_s: float = 20.0) -> None:
        self.exchanges = Exchange.of_threads(2, 1 << 24, patience_s)
        options = [DeviceOptions(act, rank=rank, num_ranks=2) for rank in range(2)]
        self.devices: list[Any] = [polydraft_cuda.polydraft_open_device(NCCL, one) for one in options]
        groups = [Group(rank, 2, exchange) for rank, exchange in enumerate(self.exchanges)]
        self.made = [polydraft_cuda.polydraft_collectives(*one) for one in zip(self.devices, groups, strict=True)]
        self.act = act

    def __enter__(self) -> OverNccl:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(self, *exc: object) -> None:
        for exchange in self.exchanges:
            exchange.close()
        for device in self.devices:
            device.close()

    def bind(self, name: str, *cases: Case) -> list[Bound]:
        """A collective of each rank, bound to its case."""
        made = zip(cases, self.devices, self.made, strict=True)
        return [Bound(COLLECTIVES[name], case, device, ours, act=self.act) for case, device, ours in made]  # type: ignore[arg-type]

    def launch(self, bound: list[Bound], *lengths: int) -> list[Any]:
        """What ranks are left with behind a launch of these lengths, or raise."""

        def work(one: Bound, n: int) -> Any:
            def run() -> Any:
                one.launch(one.stream, n)
                one.device.synchronize()
                return one

            return run

        found = collective_checks.together([work(one, n) for one, n in zip(bound, lengths, strict=True)])
        return [one if isinstance(one, Exception) else one.read() for one in found]


@on_a_gpu
@on_two
@over_nccl
@pytest.mark.parametrize("name", COLLECTIVES.names())
def test_collectives_over_nccl_keep_their_contracts(name: str):
    contract = COLLECTIVES[name]
    whole = stacked(contract)
    with OverNccl("f32") as ranks:
        for case in rank_jobs.cases(name):
            if rank_jobs.num_ranks(case) != 2:
                continue
            found = ranks.launch(ranks.bind(name, *(rank_jobs.of_rank(case, rank) for rank in range(2))), case.n, case.n)
            got = {key: np.stack([one[key] for one in found]) for key in found[0]}
            compared = compare(whole, case, got, run_golden(whole, case))
            assert compared.ok, compared


@on_a_gpu
@on_two
@over_nccl
@pytest.mark.parametrize("act", polydraft_cuda.CAPABILITIES.rank_dtypes)
def test_sums_over_nccl_have_the_bits_of_those_over_memory(act: str):
    rng = np.random.default_rng(3)
    with OverNccl(act) as ranks:
        for rows, width in ((1, 4096), (3, 7), (5, 515), (40, 4096), (301, 4098)):
            x = from_host(to_host(rng.standard_normal((2, rows, width)).astype(np.float32), act), act).astype(np.float32)
            cases = [Case("sums", {"x": x[rank], "step": np.full(1, 3, np.int32)}, {}, rows) for rank in range(2)]
            for found in ranks.launch(ranks.bind("all_reduce", *cases), rows, rows):
                np.testing.assert_array_equal(found["x"], to_host(tree_sum(list(x)), act))


@on_a_gpu
@on_two
@over_nccl
@pytest.mark.parametrize("comes", ["not", "for as many bytes of something else", "for more rows"])
def test_a_gather_that_a_rank_does_not_come_to_names_it(comes: str):
    x = np.ones((128, 1), np.float32)
    case = Case("sums", {"x": x, "step": np.full(1, 3, np.int32)}, {}, 100)
    with OverNccl("f32", 1.0) as ranks:
        first, second = ranks.bind("all_reduce", case, case), ranks.bind("all_reduce", case, case)
        assert not any(isinstance(one, Exception) for one in ranks.launch(first, 100, 100))
        begin = time.monotonic()
        if comes == "not":
            found = ranks.launch([second[0], first[1]][:1], 100)
        else:
            found = ranks.launch([second[0], first[1] if "else" in comes else second[1]], 100, 100 if "else" in comes else 101)
        assert time.monotonic() - begin < 10
        assert isinstance(found[0], DeviceError)
        assert ("rank 1 did not come to all_reduce" if comes == "not" else "rank 1 came for all_reduce") in str(found[0])


@on_a_gpu
@on_two
@pytest.mark.parametrize("n", [4, 100])
@pytest.mark.parametrize("comes", ["not", "for more rows"])
def test_a_joined_sum_that_a_rank_does_not_come_to_names_it(comes: str, n: int):
    ranks = of_ranks(2, "bf16", 128, 512, spec="cuda:0", patience_s=1.0)

    def work(one: OfRank) -> Any:
        def run() -> None:
            launch = one.joined["norm_of_sum"]
            one.load(1)
            launch(one.device.stream, n)
            one.device.synchronize()
            if one.rank == 0 or comes != "not":
                launch(one.device.stream, n + one.rank)
            one.device.synchronize()

        return run

    begin = time.monotonic()
    found = collective_checks.together([work(one) for one in ranks])
    assert time.monotonic() - begin < 10
    assert isinstance(found[0], DeviceError)
    parts = f"rank 1 came for all_reduce .*{n + 1} rows.*, rank 0 for .*{n} rows"
    assert re.search("rank 1 did not come to .*all_reduce" if comes == "not" else parts, str(found[0]))


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
@pytest.mark.parametrize(
    ("drafts", "overlap", "meets"),
    [
        *((drafts, overlap, PEERS) for drafts in (0, 3, 5) for overlap in (0, 1)),
        *(pytest.param(drafts, 1, NCCL, marks=over_nccl) for drafts in (0, 3)),
    ],
)
@pytest.mark.parametrize("graph", ["off", "decode"])
@pytest.mark.parametrize("model", ["narrow", "sparse-glm", "sparse-ernie"])
def test_texts_and_rounds_are_those_of_one(model: str, graph: str, drafts: int, overlap: int, meets: str):
    options = {"draft_tokens": drafts, "graph": graph, "overlap": overlap}
    wanted = served(1, model, **options)
    assert [dict(essence(one)) for one in served(2, model, device=meets, **options)] == [dict(essence(one)) for one in wanted]


@on_a_gpu
@pytest.mark.parametrize(
    ("model", "drafts", "graph", "options"),
    [("narrow", 3, "decode", {}), ("sparse-glm", 5, "off", {"expert_parallel": True}), ("sparse-ernie", 0, "decode", {})],
)
def test_four_ranks_that_share_a_gpu_write_what_one_writes(model: str, drafts: int, graph: str, options: dict[str, Any]):
    """With new weights as well, which rank 0 reads or has in memory; a rank that dies then ends all."""
    moved = tiny.checkpoint(tiny.moved(model))
    with over(1, model, draft_tokens=drafts, graph=graph) as alone:
        wanted = [dict(essence(one)) for one in drive(alone, asks(model))]
        alone.update_weights(moved)
        wanted += [dict(essence(one)) for one in drive(alone, asks(model))]
    with over(4, model, draft_tokens=drafts, graph=graph, device="cuda:0,0,0,0", **options) as running:
        found = [dict(essence(one)) for one in drive(running, asks(model))]
        running.update_weights(moved)
        found += [dict(essence(one)) for one in drive(running, asks(model))]
        assert found == wanted
        assert running._followers is not None
        channel = running._followers._channels[2]
        assert isinstance(channel, ProcessChannel)
        os.kill(channel._process.pid, signal.SIGKILL)
        assert {output.finish_reason for output in run(running)} == {"error"}
        assert running.failure.startswith("rank 3 (process ")


@on_a_gpu
@on_two
def test_experts_that_a_rank_keeps_whole():
    options = {"draft_tokens": 3, "expert_parallel": True}
    wanted = [dict(essence(one)) for one in served(1, "sparse-glm", draft_tokens=3)]
    assert [dict(essence(one)) for one in served(2, "sparse-glm", **options)] == wanted


PROMPTS = ((5, 9, 33), tuple(range(3, 24)), (1,), (*range(3, 24), 7, 7))
GREEDY: dict[str, Any] = {}
COUPLED = {"temperature": 1.0, "top_p": 0.95}


def drafted(ranks: int, of: tuple[Path, Path], drafts: int, sampling: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Texts and rounds of a target with its draft model (`tests.support.eagle3`)."""
    target, draft_model = of
    config = {
        "model": str(target), "draft_model": str(draft_model), "draft_tokens": drafts, "proposer": "eagle3", "backend": "cuda",
        "tensor_parallel": ranks, "max_num_seqs": 3, "block_size": 16, "num_blocks": 10, "max_batched_tokens": 20, "dtype": "f32",
        "invariant": False, **options,
    }  # fmt: skip
    running = Engine(EngineConfig.from_mapping(config))
    params = [SamplingParams(max_new_tokens=16, ignore_eos=True, seed=i, **sampling) for i in range(len(PROMPTS))]
    given = [Ask(prompt, one, arrival=3 * i) for i, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True))]
    try:
        outputs = drive(running, given)
        assert running.resolved.ranks == ranks
    finally:
        running.close()
    assert sum(output.accepted for output in outputs) > 5
    return [dict(essence(output)) for output in outputs]


@on_a_gpu
@on_two
@pytest.mark.parametrize(
    ("layout", "drafts", "graph", "sampling"),
    [
        ("sglang", 3, "decode", GREEDY), ("speculators, two layers", 3, "off", COUPLED), ("wide", 5, "decode", GREEDY),
        ("3.1", 3, "decode", COUPLED),
    ],
)  # fmt: skip
def test_drafts_of_a_draft_model_are_those_of_one(layout: str, drafts: int, graph: str, sampling: dict[str, Any]):
    """It scores a part of the vocabulary, has two layers, is wider than its target, or shares its embedding."""
    of = pair(layout, 0.02)
    wanted = drafted(1, of, drafts, sampling, graph=graph, overlap=1)
    assert drafted(2, of, drafts, sampling, graph=graph, overlap=1) == wanted


@on_a_gpu
@on_two
@pytest.mark.parametrize("graph", ["off", "decode"])
def test_so_are_those_beside_a_lookup(graph: str):
    options: dict[str, Any] = {"proposer": "hybrid", "proposer_options": ("min_token_prob=0",), "graph": graph}
    of = pair("sglang", 0.02)
    assert drafted(2, of, 5, GREEDY, **options) == drafted(1, of, 5, GREEDY, **options)


@on_a_gpu
@on_two
@pytest.mark.parametrize(("model", "tokens"), [("narrow", 40), ("narrow", 1), ("sparse-glm", 16)])
def test_so_are_those_of_a_reduced_vocabulary(model: str, tokens: int):
    """With few tokens some rank has none of them."""
    vocab = tiny.CONFIGS[model]["vocab_size"]
    options = {"draft_tokens": 3, "draft_vocab": f"{tiny.token_counts(vocab)}:{tokens}", "graph": "decode"}
    wanted = [dict(essence(one)) for one in served(1, model, **options)]
    assert [dict(essence(one)) for one in served(2, model, **options)] == wanted


@on_a_gpu
@on_two
@pytest.mark.parametrize(
    ("proposer", "model", "graph"),
    [
        ("suffix", "narrow", "off"),
        ("suffix", "narrow", "decode"),
        ("ngram", "narrow", "decode"),
        ("hybrid", "sparse-glm", "decode"),
    ],
)
def test_what_rank_0_looks_up_reaches_the_other(proposer: str, model: str, graph: str):
    options = {"proposer": proposer, "draft_tokens": 3, "graph": graph, "overlap": 1}
    wanted = served(1, model, **options)
    assert [dict(essence(one)) for one in served(2, model, **options)] == [dict(essence(one)) for one in wanted]
    assert sum(sum(one.rounds) for one in wanted) > 5, "drafts are accepted"


@on_a_gpu
@on_two
@pytest.mark.parametrize("graph", ["off", "decode"])
def test_so_do_masks_of_grammars(graph: str):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    from tests.step.test_constraints import params, prompt_of

    given = [Ask(prompt_of(name), params(name), arrival=4 * i) for i, name in enumerate(("regex", "sampled schema"))]
    given.append(Ask((3, 4), SamplingParams(max_new_tokens=50, ignore_eos=True)))
    options: dict[str, Any] = {
        "model": letters.checkpoint(),
        "backend": "cuda",
        "dtype": "f32",
        "invariant": True,
        "graph": graph,
    }
    found = []
    for ranks in (2, 1):
        llm = LLM(**options, constraints=True, draft_tokens=3, max_num_seqs=4, overlap=1, tensor_parallel=ranks)
        with closing(llm.engine) as running:
            found.append([dict(essence(one)) for one in drive(running, given)])
    assert found[0] == found[1]
    assert [one["finish_reason"] for one in found[0]] == ["stop", "stop", "length"]


@on_a_gpu
@on_two
@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("mimo", "", {"weights": "int8"}), ("mimo", "", {"weights": "int4"}), ("glm4-moe", "", {"weights": "fp8"}),
        ("glm4-moe", "", {"weights": "int4", "expert_parallel": True}), ("mimo", "awq", {}), ("glm4-moe", "ct-int4-zeros", {}),
    ],
)  # fmt: skip
def test_packed_matrices_are_shared_out(family: str, layout: str, options: dict[str, Any]):
    """Packed when they are loaded, and stored so; new weights as well."""
    config: dict[str, Any] = {
        "backend": "cuda",
        "dtype": "f32",
        "max_num_seqs": 3,
        "graph": "decode",
        "draft_tokens": 3,
        **options,
    }
    model, moved = (packed_models.checkpoint(family, layout, seed) for seed in range(2))
    prompts, params = [list(one) for one in PROMPTS], SamplingParams(max_new_tokens=20, ignore_eos=True)
    found = []
    for ranks in (2, 1):
        config["expert_parallel"] = ranks > 1 and options.get("expert_parallel", False)
        with closing(LLM(model=str(model), **config, tensor_parallel=ranks)) as llm:
            first = llm.generate(prompts, params)
            llm.engine.update_weights(moved)
            found.append([(one.token_ids, one.rounds) for one in (*first, *llm.generate(prompts, params))])
    assert found[0] == found[1]


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
@pytest.mark.parametrize("graph", ["off", "decode"])
@pytest.mark.parametrize("fatal", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@meetings
def test_a_rank_that_dies_or_stops_ends_all(fatal: signal.Signals, meets: str, graph: str):
    """And the next engine of the process starts anew."""
    with over(2, "narrow", draft_tokens=2, device=meets, graph=graph) as running:
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
                channel._process.kill()  # nothing where it was ended already
        assert time.monotonic() - begin < 20
        assert {output.finish_reason for output in outputs} == {"error"}
        assert "rank 1" in running.failure
        assert "every rank ends here" in running.failure
    with over(2, "narrow", draft_tokens=2, device=meets, graph=graph) as running:
        assert {output.finish_reason for output in run(running)} == {"length"}
