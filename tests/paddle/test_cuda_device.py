"""Paddle on NVIDIA GPUs where none is needed: the kernel pack on paper, its refusals, the device over a double of the driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from polydraft_paddle import companions

from polydraft.errors import DeviceError
from tests.support.paddle import forked, needs_paddle, polydraft

PLUGIN = Path("plugins/paddle-cuda-device")
PROMPT = "def fibonacci(n):"
SMALL = ("--max-new-tokens", "12", "--max-num-seqs", "1", "--max-model-len", "64", "--block-size", "16", "--dtype", "f32")


def test_every_operation_has_a_kernel_on_the_device():
    """The list that devices share, and the device's, name the same operations: the build holds them against each other, too."""
    listed = Path("plugins/paddle-device-skeleton/include/paddle_device/operations.h").read_text()
    kernels = (PLUGIN / "src" / "kernels.cc").read_text().partition("using FusedKernels")[0]
    wanted = re.findall(r"operation_\w+", listed[listed.index("using AllOperations") :])
    assert len(wanted) == 62
    assert re.findall(r"Kernel<known::(operation_\w+)", kernels) == wanted


def test_every_call_of_the_driver_has_a_double():
    """What the device asks of the driver, and nothing else, is what tests answer for it."""
    asked = set(re.findall(r"CALL\((cu\w+)\)", (PLUGIN / "src" / "driver.h").read_text()))
    doubled = set(re.findall(r"^CUresult (cu\w+)\(", (PLUGIN / "tests" / "fake_driver.cc").read_text(), re.MULTILINE))
    assert len(asked) > 30
    assert asked == doubled


# -- what a device's package brings ------------------------------------------------------------------
class Package:
    """A companion that has no GPU to speak of."""

    @staticmethod
    def reason() -> str:
        return "no driver is installed; install one"

    @staticmethod
    def graph_memory() -> int:
        return 77

    @staticmethod
    def pinned_memory(index: int, nbytes: int) -> bytearray:
        if nbytes > 100:
            raise MemoryError(f"no {nbytes} bytes of page-locked memory")
        return bytearray(nbytes + index)


def test_a_companion_is_asked_for_its_kind_of_place_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(companions, "PACKAGES", {"mychip": "mychip_package"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "mychip_package" else None)
    monkeypatch.setattr("importlib.import_module", lambda name: Package)
    assert companions.reason("mychip:0") == "no driver is installed; install one"
    assert companions.reason("cpu") == ""
    assert (companions.graph_memory("mychip:1"), companions.graph_memory("cpu")) == (77, 0)
    assert companions.host_memory("other:0", 8) is None
    assert len(companions.host_memory("mychip:3", 8)) == 11
    with pytest.raises(DeviceError, match=r"device mychip:3: no 101 bytes.*lower --max-num-seqs"):
        companions.host_memory("mychip:3", 101)


def test_without_the_package_there_is_no_companion(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(companions, "PACKAGES", {"mychip": "a_package_that_is_not_there"})
    assert companions.reason("mychip:0") == ""
    assert companions.host_memory("mychip:0", 8) is None


# -- the kernel pack ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--backend", "reference"), "goes with --backend paddle; leave it out of --kernels, or choose that backend"),
        pytest.param(
            ("--backend", "paddle", "--device", "cpu"),
            "runs on gpu:<index> and polycuda:<index>, got 'cpu'; leave it out of --kernels, or choose another --device",
            marks=needs_paddle,
        ),
    ],
)
def test_the_pack_is_refused_in_one_sentence_where_it_cannot_run(options: tuple[str, ...], sentence: str):
    run = polydraft("generate", "x", *options, "--plugin", "polydraft_cuda.paddle_pack")
    assert run.returncode == 1
    assert f"kernel pack paddle/cuda {sentence}" in run.stderr
    assert "Traceback" not in run.stderr


BIND = """
import sys
from types import SimpleNamespace
import numpy as np, paddle
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import ColumnsSpec, LogicalCache, ParamSpec, TensorSpec
from polydraft.contracts.composite import CompositeArgs
from polydraft.conformance.harness import weight_role
from polydraft.contracts.inputs import contract_of, dtype_of, limits_of
from polydraft.backend import CacheSpec
from polydraft_cuda.kernels import kernels
from polydraft_cuda.kernels.provider import CudaProvider
from polydraft_cuda import paddle_pack as pack
from polydraft_paddle.device import PaddleDevice
from polydraft_paddle.table import PaddleTable
from tests.device.paper import PaperDevice
host = PaddleDevice("cpu")
paper = PaperDevice(dtype="f32")
host.guest = pack.Guest(paper, host.empty)
table = PaddleTable(host)
for name, kernel in kernels().items():
    contract = contract_of(COMPOSITES.get(name) or REGISTRY[name])
    case = next(iter(contract.cases()))
    values, addresses = {}, set()
    for key, spec in contract.args.specs().items():
        value = case.params.get(key) if isinstance(spec, ParamSpec) else case.arrays.get(key)
        if isinstance(spec, ColumnsSpec):
            kinds = ["f32" if column.dtype.kind == "f" else "i32" for column in value]
            value = tuple(host.empty(key, column.shape, kind) for column, kind in zip(value, kinds))
            addresses |= {column.tensor.data_ptr() for column in value}
        elif isinstance(spec, TensorSpec):
            shape = case.outputs[key][0] if key in case.outputs else None if value is None else value.shape
            value = None if shape is None else host.empty(key, shape, dtype_of(contract, case, key, "f32"))
        elif isinstance(value, LogicalCache):
            value = table.allocate_cache(CacheSpec(*value.k.shape, "f32"))
            addresses.add(value.buffer.pointer)
        elif value is not None and not isinstance(spec, ParamSpec):
            buffer = host.empty(key, value.shape, "f32")
            value = SimpleNamespace(role=weight_role(key, spec), tensor=buffer.tensor)
        if hasattr(value, "tensor") and value.tensor.size:
            addresses.add(value.tensor.data_ptr())
        values[key] = value
    if name in COMPOSITES:
        args = CompositeArgs(tuple(p.args(**{k: values[k] for k in p.args.specs()}) for p in COMPOSITES[name].contracts))
    else:
        args = contract.args(**values)
    provider, limits = pack.GuestProvider(CudaProvider(kernel, paper), paper), limits_of(contract, case)
    nbytes = provider.workspace_bytes(args, limits)
    workspace = SimpleNamespace(buffer=host.empty("workspace", (nbytes,), "u8")) if nbytes else None
    paper.bound.clear()
    launch = provider.bind(args, limits, workspace)
    given = set()
    for bound in paper.bound:
        for argument in bound.arguments:
            if hasattr(argument, "pointer"):
                given.add(argument.pointer)
    assert paper.bound and (given & addresses or name.startswith("pack_")), name
    launch(None, 1)
copies = []
paper.copy = lambda call, stream, to, source, nbytes: copies.append((call, stream, to, source, nbytes))
buffer, staging = host.empty("b", (6, 4), "i32"), host.staging("s", (6, 4), "i32")
there, here = buffer.tensor.data_ptr(), staging.array.ctypes.data
host.upload("one", buffer, staging, 2)
host.download("two", staging, buffer, 3)
host.upload("none", buffer, staging, 0)
assert copies == [("cuMemcpyHtoDAsync", "one", there, here, 32), ("cuMemcpyDtoHAsync", "two", here, there, 48)]
closed = []
paper.close = lambda: closed.append(paper)
host.close()
host.close()
assert closed == [paper]
print(len(kernels()), "bound")
"""


@needs_paddle
def test_the_pack_hands_every_kernel_the_addresses_of_paddle_s_tensors():
    """Each kernel of the CUDA backend, bound on paper through the pack: what it is handed are Paddle's own addresses."""
    run = forked(BIND)
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.fullmatch(r"\d+ bound", run.stdout.strip().splitlines()[-1])


# -- the device over a double of the driver ------------------------------------------------------------
@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which Paddle finds the device, and the device a driver."""
    folder = tmp_path_factory.mktemp("double")
    built = subprocess.run(
        [sys.executable, str(PLUGIN / "tests" / "build_double.py"), str(folder)], capture_output=True, text=True, check=False
    )
    if "needs cuda.h" in built.stderr:
        pytest.skip(built.stderr.strip())
    assert built.returncode == 0, built.stderr[-3000:]
    return {
        "PYTHONPATH": str(folder / "site"), "CUSTOM_DEVICE_ROOT": str(folder / "site" / "paddle_custom_device"),
        "DRIVER": str(folder / "driver"),
    }  # fmt: skip


def python(environment: dict[str, str], *arguments: str, driver: bool = True) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, **environment, "OMP_NUM_THREADS": "1"} | ({"LD_LIBRARY_PATH": environment["DRIVER"]} if driver else {})
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=own, check=False)


def command(environment: dict[str, str], *arguments: str, driver: bool = True) -> subprocess.CompletedProcess[str]:
    code = "import sys; from polydraft.cli import main; sys.exit(main(sys.argv[1:]))"
    return python(environment, "-c", code, *arguments, driver=driver)


@pytest.mark.deep
@needs_paddle
@pytest.mark.timeout(600)
def test_every_operation_computes_what_numpy_does(double: dict[str, str]):
    run = python(double, "-m", "tests.support.paddle_operations", "polycuda:0")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert "265 results, 0 wrong" in run.stdout


@pytest.mark.deep
@needs_paddle
@pytest.mark.timeout(1800)
def test_the_device_conforms_over_a_double_of_the_driver(double: dict[str, str], tmp_path: Path):
    """Runtime, capture, graph memory and every kernel, with kernels as C++ and a driver that is slow where drivers are: a copy
    that has not happened when its call returns fails here."""
    run = command(double, "conform", "paddle", "--device", "polycuda:0", "--profile", "graph", "--out", str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert [c["id"] for c in report["results"] if c["outcome"] in ("fail", "error")] == [], run.stdout[-3000:]
    assert run.returncode == 0


@pytest.mark.deep
@needs_paddle
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("overlap", "graph"), [("0", "off"), ("1", "decode")])
def test_the_device_says_what_the_reference_says(double: dict[str, str], overlap: str, graph: str):
    def answer(*options: str) -> dict[str, Any]:
        run = command(double, "generate", PROMPT, *options, *SMALL, "--json")
        assert run.returncode == 0, run.stderr[-2000:]
        found: dict[str, Any] = json.loads(run.stdout)["requests"][0]
        return found

    got = answer("--backend", "paddle", "--device", "polycuda:0", "--overlap", overlap, "--graph", graph)
    wanted = answer("--backend", "reference")
    assert (got["token_ids"], got["rounds"]) == (wanted["token_ids"], wanted["rounds"])


MEMORY = """
import paddle
import polydraft_paddle_cuda as cuda
place = paddle.CustomPlace("polycuda", 0)
paddle.set_device(place)
stream = paddle.device.Stream(place)
paddle.device.set_stream(stream)
from paddle.device.cuda.graphs import CUDAGraph
x = paddle.ones([1024, 256])
out = paddle.zeros([1024, 256])
def long_chain():
    y = x
    for _ in range(50):
        y = y + 1.0
    out.copy_(y, False)
graphs = []
for _ in range(3):
    paddle.device.synchronize(place)
    graph = CUDAGraph(place)
    graph.capture_begin()
    long_chain()
    graph.capture_end()
    graphs.append(graph)
held = cuda.graph_memory()
others = [paddle.full([1024, 256], 7.0) for _ in range(60)]  # what Paddle's pool hands out meanwhile
for graph in graphs:
    out.zero_()
    graph.replay()
    paddle.device.synchronize(place)
    assert float(out.min()) == float(out.max()) == 51.0
assert all(float(other.min()) == float(other.max()) == 7.0 for other in others), "a graph wrote over memory of others"
assert cuda.counter("graph_launches") == 3
print(held // (1024 * 256 * 4))
for graph in graphs:
    graph.reset()
"""


@pytest.mark.deep
@needs_paddle
@pytest.mark.timeout(300)
def test_graphs_share_memory_of_their_own(double: dict[str, str]):
    """Fifty results of a graph need room for two, three graphs no more, and nobody else is ever given it."""
    run = python(double, "-c", MEMORY)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout.split()[-1]) <= 3


CAPTURE = """
import gc, paddle
place = paddle.CustomPlace("polycuda", 0)
paddle.set_device(place)
stream = paddle.device.Stream(place)
paddle.device.set_stream(stream)
from paddle.device.cuda.graphs import CUDAGraph
x, out = paddle.ones([64, 32]), paddle.zeros([64, 32])
def captured(work):
    paddle.device.synchronize(place)
    graph = CUDAGraph(place)
    graph.capture_begin()
    try:
        work()
    finally:
        graph.capture_end()
    return graph
old = [captured(lambda: out.copy_(x + 1.0, False))]
event = paddle.device.Event()
event.record(stream)
def work():
    out.copy_(x + 2.0, False)
    old.pop().reset()
    gc.collect()
    event.query()
    out.copy_(out + 3.0, False)
graph = captured(work)
graph.replay()
paddle.device.synchronize(place)
assert float(out.min()) == float(out.max()) == 6.0 and not old
try:
    captured(lambda: x[0, 0].expand([1 << 31]))
except MemoryError as error:
    print(error)
graph.reset()
"""


@pytest.mark.deep
@needs_paddle
@pytest.mark.timeout(300)
def test_a_capture_outlives_a_graph_that_is_given_back_meanwhile(double: dict[str, str]):
    """Python's collector gives back what it finds when it likes, and the driver drops a capture for less; memory that is short
    is an error of Python's, and not the end of the process."""
    run = python(double, "-c", CAPTURE)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "The device polycuda is out of memory in a capture." in run.stdout


@pytest.mark.deep
@needs_paddle
@pytest.mark.timeout(900)
def test_without_a_driver_the_device_says_so_in_one_sentence(double: dict[str, str]):
    run = command(double, "generate", PROMPT, "--backend", "paddle", "--device", "polycuda:0", driver=False)
    if "libcuda.so.1" not in run.stderr:
        pytest.skip("this machine has a driver")
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1] == (
        "polydraft: Paddle has no device 'polycuda:0': no NVIDIA driver is installed (libcuda.so.1 cannot be loaded); install "
        "one, or choose another --device"
    )
