"""The CUDA backend on a GPU: every kernel against its golden, the device, graphs, exchange of memory, whole engines."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polydraft_cuda
from polydraft import LLM, SamplingParams
from polydraft.backend import DeviceOptions
from polydraft.bench.measure import Load, instruments, profiled, timed
from polydraft.config import EngineConfig
from polydraft.conformance.device_checks import checks as device_checks
from polydraft.conformance.harness import check_kernel
from polydraft.conformance.oracle import OracleModel
from polydraft.conformance.target import Target
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.inputs import default_cases
from polydraft.demo import demo_model_path
from polydraft.device import Launch
from polydraft.engine import Engine
from polydraft.errors import DeviceError
from polydraft_cuda.device import CudaBuffer, CudaDevice
from polydraft_cuda.interop import adopt
from polydraft_cuda.kernels import kernels
from polydraft_cuda.kernels.provider import source
from tests.support.gpus import on_two
from tests.support.near_ties import divergences

pytestmark = [pytest.mark.device("cuda"), pytest.mark.timeout(300)]
PROMPTS = ["def fibonacci(n):", "class Stack:", "import os\n", "for i in range(10):\n", "while True:\n    try:"]


init_meta: Any = polydraft_cuda.polydraft_init_forward_meta


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    opened = polydraft_cuda.polydraft_open_device("", DeviceOptions("f32"))
    yield opened
    opened.close()


@pytest.mark.parametrize("act", polydraft_cuda.CAPABILITIES.dtypes)
@pytest.mark.parametrize("name", sorted(kernels()))
def test_a_kernel_does_what_its_contract_says(name: str, act: str):
    device = polydraft_cuda.polydraft_open_device("", DeviceOptions(act))
    table = polydraft_cuda.polydraft_kernels(device)
    kernel = COMPOSITES.get(name) or REGISTRY[name]
    for case in default_cases(kernel):
        found = check_kernel(kernel, case, device, table, act=act, init_meta=init_meta)
        assert found.ok, found.describe()
    device.close()


@pytest.mark.parametrize("check", list(device_checks()), ids=lambda check: check.id)
def test_the_device_keeps_the_promises_of_its_protocol(check):
    found = check.result(Target(polydraft_cuda))
    assert found.outcome == "pass", found.message


def scatter(device: CudaDevice, **options: bool) -> tuple[Launch, CudaBuffer]:
    """A launch that writes 7 at [1, 2] of a table [4, 16] of zeros."""
    shapes = {"runs": (1, 5), "payload": (1,), "columns": (1, 4), "table": (4, 16)}
    runs, payload, columns, table = (device.zeros(name, shape, "i32") for name, shape in shapes.items())
    device.load(runs, np.array([[0, 1, 2, 1, 0]], np.int32))
    device.load(payload, np.array([7], np.int32))
    device.load(columns, np.array([[table.pointer, 16]], np.int64).view(np.int32))
    kernel = device.function(source("scatter.cu"), "scatter")
    return kernel.bind(lambda n: n, 32, runs, payload, columns, **options), table


def test_a_graph_runs_when_it_is_replayed_and_not_before(device: CudaDevice):
    launch, table = scatter(device)
    capture = polydraft_cuda.polydraft_graph_capture(device)
    graph = capture.capture(device.stream, lambda: launch(device.stream, 1))
    device.synchronize()
    assert device.read(table.pointer, (4, 16), "i32").sum() == 0
    graph.replay(device.stream)
    assert device.read(table.pointer, (4, 16), "i32")[1, 2] == 7
    assert (device.counters.graph_replays, capture.memory() >= 0) == (1, True)


def both(launch: Launch, device: CudaDevice, forbidden: Callable[[], object]) -> None:
    launch(device.stream, 1)
    forbidden()


def test_a_capture_refuses_what_cannot_be_captured_and_leaves_the_stream_usable(device: CudaDevice):
    launch, table = scatter(device)
    capture, event = polydraft_cuda.polydraft_graph_capture(device), device.event()
    for forbidden in (
        device.synchronize, event.synchronize, event.query, lambda: device.empty("late", (1,), "i32"),
        lambda: device.staging("late", (1,), "i32"), lambda: device.load(table, np.zeros((4, 16), np.int32)),
        lambda: capture.capture(device.stream, lambda: None),
    ):  # fmt: skip
        with pytest.raises(DeviceError, match="not allowed while a graph is captured"):
            capture.capture(device.stream, partial(both, launch, device, forbidden))
    launch(device.stream, 1)
    assert device.read(table.pointer, (4, 16), "i32")[1, 2] == 7


def test_an_empty_launch_is_none(device: CudaDevice):
    launch, table = scatter(device)
    before = device.counters.launches
    launch(device.stream, 0)
    assert device.counters.launches == before
    assert device.read(table.pointer, (4, 16), "i32").sum() == 0


def test_any_thread_may_launch_copy_and_wait(device: CudaDevice):
    launch, table = scatter(device)
    found: list[object] = []

    def work() -> None:
        down, event = device.staging("down", (4, 16), "i32"), device.event()
        launch(device.stream, 1)
        device.download(device.stream, down, table, 4)
        event.record(device.stream)
        event.synchronize()
        found.append(int(down.array[1, 2]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [7]


def test_streams_are_ordered_by_events(device: CudaDevice):
    other, event = device.make_stream("other"), device.event()
    big, down = device.zeros("big", (1 << 22,), "i32"), device.staging("down", (1 << 22,), "i32")
    up = device.staging("up", (1 << 22,), "i32")
    for value in range(1, 9):
        up.array[:] = value
        device.upload(device.stream, big, up, 1 << 22)
        event.record(device.stream)
        other.wait(event)
        device.download(other, down, big, 1 << 22)
        event.record(other)
        event.synchronize()
        assert down.array.min() == down.array.max() == value


def test_a_timeline_says_when_graphs_and_copies_ran_while_it_is_kept(device: CudaDevice):
    launch, table = scatter(device)
    graph = polydraft_cuda.polydraft_graph_capture(device).capture(device.stream, lambda: launch(device.stream, 1))
    down = device.staging("down", (4, 16), "i32")
    with pytest.raises(DeviceError, match="keeps no timeline"):
        device.now_s()
    with device.keep_timeline():
        before = device.now_s()
        for _ in range(3):
            graph.replay(device.stream)
            device.download(device.stream, down, table, 4)
        spans, after = device.timeline().spans, device.now_s()
    assert [span.kind for span in spans] == ["replay", "download"] * 3
    times = [moment for span in spans for moment in (span.start_s, span.end_s)]
    assert times == sorted(times)
    assert before < times[0] < times[-1] < after
    graph.replay(device.stream)
    with pytest.raises(DeviceError, match="keeps no timeline"):
        device.timeline()


def test_a_benchmark_knows_how_long_the_device_was_idle():
    config = EngineConfig(backend="cuda", dtype="bf16", draft_tokens=3, max_num_seqs=2, prefix_cache=False)
    engine, load = Engine(config, instruments=instruments()), Load(2, 16, 64)
    timed(engine, load)
    idle = timed(engine, load)["idle_share"]
    host, _ = profiled(engine, load)
    engine.close()
    assert 0.0 <= idle < 0.9
    assert "idle_share" not in host, "the run that is timed knows it"


# -- other libraries -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i32", "u8"])
def test_memory_goes_to_torch_and_comes_back_without_a_copy(device: CudaDevice, dtype: str):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this build of torch has no CUDA")
    buffer = device.zeros("buffer", (3, 5), dtype)
    tensor = torch.from_dlpack(buffer)
    assert (tensor.data_ptr(), tuple(tensor.shape)) == (buffer.pointer, (3, 5))
    tensor += 3
    back = adopt(device, "back", tensor)
    assert (back.pointer, back.shape, back.dtype) == (buffer.pointer, (3, 5), dtype)
    wanted = tensor.view(torch.int16 if dtype == "bf16" else tensor.dtype).cpu().numpy().view(np.uint8)
    assert np.array_equal(device.read(back.pointer, back.shape, dtype).view(np.uint8), wanted)


def test_memory_of_torch_outlives_its_tensor_while_it_is_adopted(device: CudaDevice):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this build of torch has no CUDA")
    adopted = adopt(device, "x", torch.arange(1000, device="cuda", dtype=torch.int32))
    spoil = [torch.full((1000,), -1, device="cuda", dtype=torch.int32) for _ in range(8)]
    assert np.array_equal(device.read(adopted.pointer, (1000,), "i32"), np.arange(1000))
    del spoil


def test_memory_goes_to_cupy_and_comes_back(device: CudaDevice):
    cupy = pytest.importorskip("cupy")
    buffer = device.zeros("buffer", (3, 5), "f32")
    for array in (cupy.from_dlpack(buffer), cupy.asarray(buffer)):
        assert array.data.ptr == buffer.pointer
    x = cupy.arange(6, dtype=cupy.float32)
    assert adopt(device, "x", x).pointer == x.data.ptr


def test_what_cannot_be_adopted_is_said(device: CudaDevice):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this build of torch has no CUDA")
    for array, said in (
        (torch.zeros(3, 5, device="cuda").T, "strides"),
        (torch.zeros(3), "DLPack device"),
        (torch.zeros(3, device="cuda", dtype=torch.float64), "DLPack type"),
        ([1, 2], "got a list"),
    ):
        with pytest.raises(DeviceError, match=said):
            adopt(device, "x", array)


# -- what goes wrong -------------------------------------------------------------------------------------
LOST = """
import ctypes, pathlib, sys
import polydraft_cuda
from polydraft.backend import DeviceOptions
device = polydraft_cuda.polydraft_open_device("", DeviceOptions())
launch = device.function(pathlib.Path(sys.argv[1]), "wild").bind(1, 1, ctypes.c_void_p(64))
launch(device.stream, 1)
event = device.event()
event.record(device.stream)
try:
    event.synchronize()
except Exception as error:
    print(error)
device.close()
"""


def test_a_lost_device_is_one_sentence(tmp_path: Path):
    file = tmp_path / "wild.cu"
    file.write_text('extern "C" __global__ void wild(int* x) { *x = 1; }', encoding="utf-8")
    found = subprocess.run([sys.executable, "-c", LOST, str(file)], capture_output=True, text=True, check=True, timeout=120)
    assert "the device was lost to an access to an illegal address" in found.stdout
    assert found.stdout.count("\n") == 1


KILLED = """
import os, signal, sys
from polydraft import LLM, SamplingParams
llm = LLM(backend="cuda", draft_tokens=3)
ballast = llm.engine.device.empty("ballast", (16 << 30,), "u8")
llm.engine.add("def f(", SamplingParams(max_new_tokens=64, ignore_eos=True))
for _ in range(8):
    llm.engine.step()
print("running", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_nothing_behind(device: CudaDevice, cache: Path):
    """It held 16 GiB and more; what others take or give back on the device meanwhile is less."""
    before = device.free_memory()
    found = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False, timeout=120)
    assert (found.returncode, found.stdout) == (-9, "running\n")
    for _ in range(50):
        if before - device.free_memory() < 8 << 30:
            break
        time.sleep(0.1)
    assert before - device.free_memory() < 8 << 30
    assert texts("cuda", 1, prompts=PROMPTS[:1])
    assert not list(cache.glob("*/*.part"))


def test_blocks_that_there_is_no_memory_for_are_refused_with_what_would_fit(device: CudaDevice):
    with pytest.raises(DeviceError, match=r"free behind the weights, and .* KV blocks take .*; (\d+) would fit: --num-blocks \1"):
        LLM(backend="cuda", draft_tokens=3, num_blocks=1 << 26)
    assert device.free_memory() > 1 << 30


def test_memory_that_there_is_not(device: CudaDevice):
    with pytest.raises(DeviceError, match=r"has no .* GiB for cache.*would fit with --num-blocks at \d+%"):
        device.empty("cache", (1 << 42,), "u8")
    device.empty("small", (1,), "u8")


def test_a_closed_device_has_given_everything_back():
    first = polydraft_cuda.polydraft_open_device("", DeviceOptions())
    free = first.call("cuMemGetInfo")[0]
    first.empty("large", (1 << 30,), "u8")
    first.close()
    second = polydraft_cuda.polydraft_open_device("", DeviceOptions())
    assert free - second.call("cuMemGetInfo")[0] < 1 << 29
    second.close()


# -- engines ---------------------------------------------------------------------------------------------
def texts(
    backend: str, drafts: int, params: dict[str, Any] | None = None, prompts: Sequence[str] = PROMPTS, **options: Any
) -> list[tuple]:
    llm = LLM(backend=backend, draft_tokens=drafts, **{"max_num_seqs": 4, "dtype": "f32", **options})
    asked = [SamplingParams(max_new_tokens=40, ignore_eos=True, seed=i, **(params or {})) for i in range(len(prompts))]
    found = [(out.token_ids, out.rounds) for out in llm.generate(prompts, asked)]
    llm.engine.close()
    return found


@pytest.mark.parametrize("mode", [{"overlap": 0, "graph": "off"}, {"overlap": 1, "graph": "decode"}, {"overlap": 2}], ids=str)
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_the_demo_model_writes_the_text_of_the_reference(drafts: int, mode: dict):
    assert texts("cuda", drafts, **mode) == texts("reference", drafts)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_a_reduced_draft_vocabulary_does_what_it_does_on_the_reference(params: dict, verify: str, tmp_path: Path):
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({str(token): 4096 - token for token in range(0, 4096, 3)}), encoding="utf-8")
    own = {"draft_vocab": str(counts), "verify": verify}
    found = texts("cuda", 3, params, **own)
    assert found == texts("reference", 3, params, **own)
    if verify == "coupled":
        assert [ids for ids, _ in found] == [ids for ids, _ in texts("reference", 3, params)]


@pytest.mark.parametrize("params", [{"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_k": 20}], ids=str)
def test_sampled_texts_are_those_of_the_reference(params: dict):
    assert texts("cuda", 3, params=params) == texts("reference", 3, params=params)


VERBS = ["get", "set", "find", "make", "load", "sort", "read", "move", "copy", "drop"]
NOUNS = [
    "item", "list", "name", "file", "node", "path", "user", "data", "line", "key", "row", "word", "page", "tree", "map", "set",
    "graph", "time", "code", "value",
]  # fmt: skip
MANY = [f"def {verb}_{noun}(" for verb in VERBS for noun in NOUNS]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_p": 0.95}], ids=["greedy", "coupled"])
def test_invariant_texts_do_not_depend_on_drafts_or_batch(params: dict, dtype: str):
    """200 prompts, in batches of 4 without drafts and of 32 with three, bit for bit."""
    assert len(MANY) == 200
    alone = texts("cuda", 0, params, MANY, dtype=dtype, invariant=True)
    drafted = texts("cuda", 3, params, MANY, dtype=dtype, invariant=True, max_num_seqs=32)
    assert [ids for ids, _ in drafted] == [ids for ids, _ in alone]
    assert sum(sum(rounds) for _, rounds in drafted) > 0


CLOSE = {"bf16": 0.2, "f16": 0.03}
"""Logits between choices that rounding to a dtype, of the weights as well, may decide."""


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=on_two)])
def test_in_few_bits_texts_part_from_the_exact_ones_at_near_ties_alone(
    ranks: int, dtype: str, record_property: Callable[..., None]
):
    """Every divergence is looked at: how far apart the recomputing oracle has the two choices."""
    model, prompts = OracleModel.from_dir(demo_model_path()), MANY[::8]
    llm = LLM(backend="cuda", dtype=dtype, draft_tokens=3, max_num_seqs=8, tensor_parallel=ranks)
    outputs = llm.generate(prompts, [SamplingParams(max_new_tokens=40, ignore_eos=True)] * len(prompts))
    llm.engine.close()
    found = [part for o in outputs for part in divergences(model, o.prompt_ids, o.token_ids, o.rounds, 3)]
    gaps = {what: sorted(round(part.gap, 4) for part in found if part.what == what) for what in ("token", "draft")}
    record_property("near_ties", f"{dtype}, {ranks} ranks: {len(outputs)} texts, gaps {gaps}")
    assert all(part.gap < CLOSE[dtype] for part in found), gaps
    assert len(found) < len(outputs), "few texts part at all"


def test_sanitized_steps_have_no_hazard():
    assert texts("cuda", 3, overlap=1, graph="decode", sanitize=True) == texts("reference", 3)
