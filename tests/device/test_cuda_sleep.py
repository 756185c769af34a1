"""Memory of the CUDA backend that is given back while its addresses stay, and arrays of another process."""
# ruff: noqa: N802  the driver's own names

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, Engine, SamplingParams
from polydraft.errors import CheckpointError, DeviceError
from polydraft_cuda import driver, ipc
from polydraft_cuda.remapped import RemappedMemory
from tests.step.test_weights_from_memory import MODEL, MOVED, PROMPTS, arrays, mix_no_policies, served, tokens
from tests.support import tiny

GRANULE = 1 << 21
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=0)


# -- on paper -----------------------------------------------------------------------------------------
class Driver:
    """The driver's virtual memory, with so many granules behind it. `codes`: of a call's name, what its next calls return."""

    CUmemAllocationProp = CUmemAccessDesc = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, granules: int) -> None:
        self.free, self.next = granules, GRANULE
        self.reserved: dict[int, int] = {}
        self.created: dict[int, int] = {}
        self.mapped: dict[int, bytearray] = {}
        self.codes: dict[str, list[int]] = {}

    def code(self, name: str) -> int:
        return self.codes[name].pop(0) if self.codes.get(name) else 0

    def cuMemGetAllocationGranularity(self, properties: Any, least: int) -> tuple[int, int]:
        return 0, GRANULE

    def cuMemAddressReserve(self, size: int, *rest: int) -> tuple[int, int]:
        assert size % GRANULE == 0
        start, self.next = self.next, self.next + size + GRANULE
        self.reserved[start] = size
        return 0, start

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[int, int]:
        if code := 2 if size // GRANULE > self.free else self.code("cuMemCreate"):
            return code, 0
        self.free -= size // GRANULE
        handle = len(self.created) + 1
        self.created[handle] = size
        return 0, handle

    def cuMemMap(self, start: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        assert start not in self.mapped
        if not (code := self.code("cuMemMap")):
            self.mapped[start] = bytearray(self.reserved[start])
        return (code,)

    def cuMemSetAccess(self, start: int, size: int, access: list[Any], count: int) -> tuple[int]:
        assert (self.reserved[start], len(access), count) == (size, 1, 1)
        return (self.code("cuMemSetAccess"),)

    def cuMemUnmap(self, start: int, size: int) -> tuple[int]:
        return (int(self.mapped.pop(start, None) is None),)

    def cuMemRelease(self, handle: int) -> tuple[int]:
        self.free += self.created[handle] // GRANULE
        self.created[handle] = 0
        return (0,)

    def cuMemAddressFree(self, start: int, size: int) -> tuple[int]:
        assert self.reserved.pop(start) == size
        return (0,)


class OnPaper:
    """A device over it."""

    index, spec = 0, "cuda:0"

    def __init__(self, granules: int = 64) -> None:
        self.cuda = Driver(granules)

    def call(self, name: str, *arguments: Any, doing: str = "") -> Any:
        return driver.check(getattr(self.cuda, name)(*arguments), doing or name)

    def _span(self, pointer: int) -> tuple[bytearray, int]:
        start = max(start for start in self.cuda.mapped if start <= pointer)
        return self.cuda.mapped[start], pointer - start

    def read(self, pointer: int, shape: tuple[int, ...], dtype: str) -> Any:
        if self.cuda.code("read"):
            raise MemoryError("the host has no room")
        memory, begin = self._span(pointer)
        return np.frombuffer(memory, np.uint8)[begin : begin + shape[0]].copy()

    def write(self, pointer: int, value: Any) -> None:
        driver.check((self.cuda.code("write"),), "loading")
        memory, begin = self._span(pointer)
        memory[begin : begin + value.nbytes] = value.tobytes()


def test_weights_come_back_at_their_addresses_and_caches_empty():
    device = OnPaper()
    memory = RemappedMemory(device)  # type: ignore[arg-type]
    sizes = {"weight": (256, 3 * GRANULE + 256, 512, GRANULE // 2), "cache": (GRANULE, 256)}
    places = {(kind, size): memory.allocate(kind, size) for kind, of in sizes.items() for size in of}
    assert len(set(places.values())) == 6
    assert len(device.cuda.mapped) == 4, "what is small shares a granule with its kind"
    for number, ((_, size), place) in enumerate(places.items()):
        device.write(place, np.full(size, number + 1, np.uint8))
    for keep, deeper in ((True, False), (True, True), (True, False), (False, False)):
        memory.sleep(keep_weights=keep)
        if deeper:
            memory.sleep(keep_weights=False)
            assert all(span.kept is None for span in memory._all()), "what was kept is dropped"
        assert (device.cuda.mapped, device.cuda.free) == ({}, 64)
        with pytest.raises(DeviceError, match="asleep; wake it up before a weight"):
            memory.allocate("weight", 256)
        memory.wake()
        for number, ((kind, size), place) in enumerate(places.items()):
            found = device.read(place, (size,), "u8")
            assert (found == (number + 1 if keep and not deeper and kind == "weight" else 0)).all(), (kind, size, keep)
            device.write(places[kind, size], np.full(size, number + 1, np.uint8))
    for place in places.values():
        assert memory.free(place)
    assert not memory.free(1)
    assert (device.cuda.mapped, device.cuda.reserved, device.cuda.free) == ({}, {}, 64)


def test_where_memory_is_short_nothing_is_taken_and_it_sleeps_on():
    device = OnPaper(8)
    memory = RemappedMemory(device)  # type: ignore[arg-type]
    places = [memory.allocate("weight", 3 * GRANULE) for _ in range(2)]
    assert memory.allocate("weight", 3 * GRANULE) == 0
    assert len(device.cuda.reserved) == 2
    device.write(places[1], np.full(256, 7, np.uint8))
    memory.sleep(keep_weights=True)
    device.cuda.free -= 4
    with pytest.raises(DeviceError, match=r"no 0\.01 GiB for weights and caches that slept; free memory there"):
        memory.wake()
    assert (device.cuda.mapped, device.cuda.free) == ({}, 4)
    device.cuda.free += 4
    memory.wake()
    assert (device.read(places[1], (256,), "u8") == 7).all()


def three_weights() -> tuple[OnPaper, RemappedMemory, Callable[[], bool]]:
    """A device with three weights in memory of their own and a cache, and whether all of the weights are whole."""
    device = OnPaper()
    memory = RemappedMemory(device)  # type: ignore[arg-type]
    places = [memory.allocate("weight", GRANULE) for _ in range(3)]
    memory.allocate("cache", GRANULE)
    for number, place in enumerate(places):
        device.write(place, np.full(GRANULE, number + 1, np.uint8))
    return device, memory, lambda: all((device.read(place, (GRANULE,), "u8") == i + 1).all() for i, place in enumerate(places))


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "write"])
def test_a_wake_up_that_fails_takes_nothing_and_can_be_tried_again(call: str, before: int):
    device, memory, is_whole = three_weights()
    memory.sleep(keep_weights=True)
    device.cuda.codes[call] = [0] * before + [1]
    with pytest.raises(DeviceError, match="the driver refused"):
        memory.wake()
    assert (device.cuda.mapped, device.cuda.free) == ({}, 64)
    with pytest.raises(DeviceError, match="asleep"):
        memory.allocate("weight", GRANULE)
    memory.wake()
    assert is_whole()
    memory.wake()
    assert is_whole(), "awake already, it does nothing"
    assert memory.allocate("weight", GRANULE)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_sleep_that_the_host_has_no_room_for_takes_nothing(before: int):
    device, memory, is_whole = three_weights()
    device.cuda.codes["read"] = [0] * before + [1]
    with pytest.raises(MemoryError):
        memory.sleep(keep_weights=True)
    assert (len(device.cuda.mapped), device.cuda.free) == (4, 60)
    assert is_whole()
    assert memory.allocate("weight", GRANULE), "it is awake"
    memory.sleep(keep_weights=True)
    assert (device.cuda.mapped, device.cuda.free) == ({}, 64)
    memory.sleep(keep_weights=True)
    memory.wake()
    assert is_whole(), "asleep already, it read nothing anew"


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_an_allocation_that_fails_leaves_nothing(call: str):
    device = OnPaper()
    memory = RemappedMemory(device)  # type: ignore[arg-type]
    device.cuda.codes[call] = [1]
    with pytest.raises(DeviceError, match="the driver refused"):
        memory.allocate("weight", GRANULE)
    assert (device.cuda.mapped, device.cuda.reserved, device.cuda.free) == ({}, {}, 64)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (None, "wanted dtype, handle, offset, shape; send what"),
        ({"handle": "00", "offset": 0, "shape": [1], "dtype": "float32"}, "is malformed"),
        ({"handle": "zz" * 64, "offset": 0, "shape": [1], "dtype": "float32"}, "is malformed"),
        ({"handle": "00" * 64, "offset": -1, "shape": [1], "dtype": "float32"}, "is malformed"),
        ({"handle": "00" * 64, "offset": 0, "shape": [True], "dtype": "float32"}, "is malformed"),
        ({"handle": "00" * 64, "offset": 0, "shape": 1, "dtype": "float32"}, "is malformed"),
        ({"handle": "00" * 64, "offset": 0, "shape": [1], "dtype": "object"}, "is malformed"),
    ],
)
def test_what_is_no_shared_tensor_is_refused_before_the_driver_is_asked(one: Any, said: str):
    with pytest.raises(CheckpointError, match=f"shared tensor w .*{said}"):
        ipc._checked("w", one)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros(3), "is ndarray, wanted an array on a GPU"),
        (SimpleNamespace(data_ptr=lambda: 0, device="cpu"), "is on cpu or not contiguous"),
        (SimpleNamespace(__cuda_array_interface__={"strides": (8, 4)}), "has strides"),
        (SimpleNamespace(__cuda_array_interface__={"typestr": "<f8", "data": (0, False), "shape": (1,)}), "is float64, wanted"),
    ],
)
def test_what_cannot_be_shared_is_said(value: Any, said: str):
    with pytest.raises(CheckpointError, match=f"tensor w {said}"):
        ipc._described("w", value)


def test_bits_of_bfloat16_are_floats():
    device = SimpleNamespace(read=lambda pointer, shape, dtype: np.array([0x3FC0, 0xC000], np.uint16).view(np.uint8))
    lent = ipc._Lent(device, 0, (2,), "bfloat16")  # type: ignore[arg-type]
    assert lent.float().tolist() == [1.5, -2.0]


# -- on a GPU ------------------------------------------------------------------------------------------
def engine(**options: Any) -> Engine:
    config = {"model": str(tiny.checkpoint(MODEL)), "plugins": tiny.PLUGINS, "backend": "cuda", "dtype": "f32", "logprobs": 0}
    return LLM(**{**config, "draft_tokens": 3, "enable_sleep_mode": True, **options}).engine


@pytest.mark.device("cuda")
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("graph", ["off", "decode"])
def test_an_engine_sleeps_and_writes_the_same_texts(level: Any, graph: str):
    """The driver counts the memory of all processes, so nobody else may use the GPU meanwhile."""
    with closing(engine(graph=graph)) as slept:
        before = tokens(served(slept, PROMPTS, PARAMS))
        taken = slept.device.memory_taken()  # type: ignore[attr-defined]
        for _ in range(2):
            slept.sleep(level)
            assert taken - slept.device.memory_taken() >= 2 * GRANULE  # type: ignore[attr-defined]
            slept.wake_up()
            assert abs(slept.device.memory_taken() - taken) < 2 * GRANULE  # type: ignore[attr-defined]
            assert tokens(served(slept, PROMPTS, PARAMS)) == before


@pytest.mark.device("cuda")
@pytest.mark.parametrize("running", ["finish", "recompute"])
@pytest.mark.parametrize("graph", ["off", "decode"])
def test_no_text_mixes_policies_unasked(graph: str, running: Any):
    mix_no_policies(lambda model, **options: engine(model=str(tiny.checkpoint(model)), graph=graph, **options), running)


TRAINER = """
import json, sys
import numpy as np
from polydraft.models.checkpoint import Checkpoint
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.ipc import share
device, kept = CudaDevice(0), {}
with Checkpoint(sys.argv[1]) as opened:
    for name in opened.names():
        value = np.ascontiguousarray(opened.tensor(name), np.float32)
        kept[name] = device.empty(name, value.shape, "f32")
        device.load(kept[name], value)
print(json.dumps(share(kept)), flush=True)
sys.stdin.read()
"""


@pytest.mark.device("cuda")
def test_weights_of_another_process_on_the_same_gpu():
    with closing(engine(model=str(tiny.checkpoint(MOVED)))) as other:
        wanted = tokens(served(other, PROMPTS, PARAMS))
    command = [sys.executable, "-c", TRAINER, str(tiny.checkpoint(MOVED))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer, closing(engine()) as run:
        assert trainer.stdout is not None
        handles = json.loads(trainer.stdout.readline())
        assert tokens(served(run, PROMPTS, PARAMS)) != wanted
        with run.shared(handles) as shared:
            run.update_weights(shared)
        assert tokens(served(run, PROMPTS, PARAMS)) == wanted
        name = next(iter(handles))
        with (
            pytest.raises(CheckpointError, match="reaches beyond its allocation"),
            run.shared({name: {**handles[name], "offset": 1 << 40}}),
        ):
            pass
        run.sleep(2)
        with run.shared(handles) as shared:
            run.wake_up(shared)
        assert tokens(served(run, PROMPTS, PARAMS)) == wanted
        trainer.communicate("")
    assert arrays().keys() == handles.keys()


@pytest.mark.device("cuda")
def test_tensors_of_pytorch_are_shared_in_bfloat16():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch is built without CUDA")
    source = (
        "import json, sys, torch\n"
        "from polydraft_cuda.ipc import share\n"
        "values = {'w': torch.arange(6, device='cuda').reshape(2, 3).bfloat16(), 'v': torch.ones(2, device='cuda').half()}\n"
        "torch.cuda.synchronize()\n"
        "print(json.dumps(share(values)), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer, closing(engine()) as run:
        assert trainer.stdout is not None
        with run.shared(json.loads(trainer.stdout.readline())) as shared:
            assert shared["w"].float().tolist() == [[0, 1, 2], [3, 4, 5]]
            assert np.asarray(shared["v"]).tolist() == [1, 1]
        trainer.communicate("")
