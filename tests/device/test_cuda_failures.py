"""What the CUDA backend says when something is missing or breaks: one sentence each, with the next step."""

import re
import subprocess
import sys
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import polydraft_cuda
from polydraft.backend import DeviceOptions
from polydraft.device import DeviceCounters
from polydraft.errors import DeviceError
from polydraft.plugins.plugins import Plugins
from polydraft_cuda import driver, probe
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.remapped import RemappedMemory

H200 = ("NVIDIA H200", (9, 0))


def test_a_usable_machine_gives_no_reason():
    assert probe.judge(13000, [H200, H200]) == probe.Findings(("cuda:0", "cuda:1"))


@pytest.mark.parametrize(
    ("version", "devices", "said"),
    [
        (13000, [], r"sees no device; check CUDA_VISIBLE_DEVICES"),
        (12080, [H200], r"supports CUDA 12\.8, wanted 13\.0 or newer; update the driver"),
        (13000, [("Tesla T4", (7, 5))], r"Tesla T4 has compute capability 7\.5, wanted 8\.0 or newer; choose another --backend"),
    ],
)
def test_what_keeps_a_machine_from_being_used(version: int, devices: list, said: str):
    reason = probe.judge(version, devices).reason
    assert re.search(said, reason)
    assert "\n" not in reason


def test_one_device_that_is_new_enough_is_enough():
    assert not probe.judge(13000, [("Tesla T4", (7, 5)), H200]).reason


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch):
    """A fresh look, forgotten afterwards."""
    probe.look.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    probe.look.cache_clear()


def test_without_the_extra(looked: pytest.MonkeyPatch):
    looked.setattr(probe, "_importable", lambda name: False)
    assert probe.look().reason == ("the package cuda-bindings is not installed; install the extra: pip install 'polydraft[cuda]'")


def test_without_a_driver(looked: pytest.MonkeyPatch):
    looked.setattr(probe, "_importable", lambda name: True)
    looked.setattr(probe, "DRIVER", "libcuda-that-nobody-has.so.1")
    assert "no NVIDIA driver is installed" in probe.look().reason
    with pytest.raises(DeviceError, match=r"^cuda is not available: no NVIDIA driver is installed"):
        polydraft_cuda.polydraft_open_device("cuda:0", DeviceOptions())
    info = Plugins.load(polydraft_cuda).info()
    assert not info.available
    assert "driver" in info.reason


def test_a_driver_that_does_not_start(looked: pytest.MonkeyPatch):
    found = probe._ask(SimpleNamespace(cuInit=lambda flags: 803))  # type: ignore[arg-type]
    assert found.reason == "the NVIDIA driver does not start (CUDA error 803); see what nvidia-smi says"


@pytest.mark.parametrize("spec", ["cpu", "cuda:x", "cuda:-1", "gpu:0"])
def test_a_device_that_is_not_ours(spec: str):
    with pytest.raises(DeviceError, match=r"runs on 'cuda:<index>', got"):
        polydraft_cuda.polydraft_open_device(spec, DeviceOptions())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (2, "loading: the device is out of memory; lower --num-blocks"),
        (209, "loading: the kernel image has no code for this architecture"),
        (222, "the driver is older than the compiler that built the kernel; update the driver"),
        (700, "the device was lost to an access to an illegal address (CUDA error 700); nothing runs on it in this process"),
        (719, "the device was lost to a failed launch"),
        (12345, "loading: the driver refused (CUDA error 12345"),
    ],
)
def test_a_failed_driver_call_is_one_sentence(code: int, said: str):
    message = str(driver.failure(code, "loading"))
    assert said in message
    assert "\n" not in message


def test_handles_of_memory_are_read_and_made_whatever_fields_the_bindings_have():
    """13.5 of the bindings has dropped the one that held the bytes."""
    pytest.importorskip("cuda.bindings", reason="the extra cuda brings them")
    told = bytes(range(64))
    assert driver.bytes_of_handle(driver.handle_of_bytes(told)) == told
    with pytest.raises(ValueError, match="a handle has 63 bytes, wanted 64"):
        driver.handle_of_bytes(told[1:])


def test_what_is_used_of_the_bindings_is_there():
    """Names of calls, types and values, and fields of records: most of the calls need a GPU, and doubles have whatever is asked
    for."""
    bindings = pytest.importorskip("cuda.bindings.driver", reason="the extra cuda brings them")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in Path(polydraft_cuda.__file__).parent.rglob("*.py"))
    calls = set(re.findall(r'"(cu[A-Z]\w+)"', sources)) | set(re.findall(r"\bcuda\.(cu[A-Z]\w+)", sources))
    names = calls | set(re.findall(r"\b(?:cuda|driver)\.(CU\w+(?:\.CU_\w+|\.CUDA_\w+)?)", sources))
    assert len(names) > 60, "they were found"
    found = {name: reduce(lambda at, part: getattr(at, part, None), name.split("."), bindings) for name in names}
    lacking = sorted(name for name, value in found.items() if value is None)
    assert not lacking
    device: Any = SimpleNamespace(cuda=bindings, index=3, call=lambda name, *given: 1 << 21)
    memory = RemappedMemory(device)
    assert (int(memory._properties.location.id), int(memory._access.location.id)) == (3, 3)
    assert hasattr(bindings.CUtensorMap(), "opaque")


def test_a_result_is_its_value_or_an_error():
    assert driver.check((0,)) is None
    assert driver.check((0, 5)) == 5
    assert driver.check((0, 5, 6)) == (5, 6)
    with pytest.raises(DeviceError, match=r"^copying: the device was lost"):
        driver.check((714,), "copying")


@pytest.fixture
def full() -> CudaDevice:
    """A device without memory left: 3 of 80 GiB are free."""
    device = object.__new__(CudaDevice)
    given = iter(range(1 << 20, 1 << 40, 1 << 20))
    cuda = SimpleNamespace(
        cuCtxSetCurrent=lambda context: (0,), cuMemGetInfo=lambda: (0, 3 << 30, 80 << 30), cuMemFree=lambda pointer: (0,),
        cuMemAlloc=lambda size: (2, 0) if size > 3 << 30 else (0, next(given)),
    )  # fmt: skip
    device.__dict__.update(spec="cuda:0", cuda=cuda, counters=DeviceCounters(), capturing=False, _open=True, _context=0)
    device.__dict__.update(_held=0, _peak=0, _memory={}, _remapped=None, index=0)
    return device


def test_out_of_memory_says_what_is_held_and_what_would_fit(full: CudaDevice):
    kept = [full.empty("weight", (2 << 30,), "u8"), full.empty("cache.0", (1 << 30,), "u8")]
    with pytest.raises(DeviceError) as raised:
        full.empty("cache.1", (4 << 30,), "u8")
    message = str(raised.value)
    assert "cuda:0 has no 4.00 GiB for cache.1: 3.00 GiB of 80.00 GiB are free, this engine holds 3.00 GiB" in message
    assert "(weight 2.00 GiB, cache 1.00 GiB), others 74.00 GiB" in message
    assert "--num-blocks at 80% of what it is" in message
    assert "\n" not in message
    with pytest.raises(DeviceError, match=r"for step\.logits.*lower --max-num-seqs or --max-batched-tokens"):
        full.empty("step.logits", (4 << 30,), "u8")
    assert full.memory() == 3 << 30
    assert full.counters.allocations == 2
    del kept
    assert full._held == 0


def test_memory_that_the_driver_lacks_in_a_step_says_what_would_leave_it_some(full: CudaDevice):
    kept = full.empty("cache.0", (2 << 30,), "u8")
    message = str(full.failure(2, "replaying a graph"))
    assert message.startswith("replaying a graph: the driver has no memory left for itself: 3.00 GiB of 80.00 GiB are free, ")
    assert message.endswith("; --num-blocks at 88% of what it is would leave it 0.25 GiB")
    assert "\n" not in message
    del kept
    assert str(full.failure(2, "a copy")).endswith("; a smaller --max-num-seqs would leave it 0.25 GiB")
    assert str(full.failure(719, "a copy")).startswith("a copy: the device was lost to a failed launch")


def test_a_device_that_does_not_answer_any_more_still_has_a_sentence(full: CudaDevice):
    full.cuda.cuMemGetInfo = lambda: (719, 0, 0)
    assert "the device is out of memory; lower --num-blocks" in str(full.failure(2, "a copy"))


def test_nothing_is_allocated_in_a_capture_or_on_a_closed_device(full: CudaDevice):
    full.capturing = True
    with pytest.raises(DeviceError, match="allocating late is not allowed while a graph is captured"):
        full.empty("late", (1,), "i32")
    full.capturing, full._open = False, False
    with pytest.raises(DeviceError, match="cuda:0 is closed; open a new engine to allocate late"):
        full.empty("late", (1,), "i32")


IMPORTS = """
import sys
import polydraft_cuda
polydraft_cuda.polydraft_backend_info()
print([name for name in sys.modules if name.startswith("cuda.bindings.") or name in ("torch", "cupy", "paddle")])
"""


def test_identity_imports_no_library_of_cuda():
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, cwd="backends/cuda")
    assert result.stdout.strip() == "[]"
