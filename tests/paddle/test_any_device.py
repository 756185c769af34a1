"""Devices with less than ours: few operations, no graphs, runtimes that print. What is missing is named, and nothing is lost.

The emulated device plays them: it has a list of eight operations and no graphs, a black list takes one away, and graphs are
broken where Paddle is asked for them.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from polydraft.cli.doctor import examine
from tests.support.paddle import forked, needs_device, needs_graphs, needs_paddle, polydraft, script

PROMPT = "def fibonacci(n):"
SMALL = ("--max-new-tokens", "12", "--max-num-seqs", "1", "--max-model-len", "64")
POLYEMU = ("--backend", "paddle", "--device", "polyemu:0")
POOR = ("--backend", "paddle", "--device", "polyemu:0?ops=minimal")
"""With less than what a step needs: no graphs, and eight operations."""


def written(run: subprocess.CompletedProcess[str]) -> tuple[Any, ...]:
    """Ids and tokens per round of a run of the command."""
    assert run.returncode == 0, run.stderr[-2000:] + run.stdout[-500:]
    answer = json.loads(run.stdout)
    return *(request["token_ids"] for request in answer["requests"]), answer["totals"]["tokens_per_round"]


# -- the fallback --------------------------------------------------------------------------------------
WRITES = """
from polydraft.backend import DeviceOptions
from polydraft_paddle import open_place
device = open_place("polyemu:0", DeviceOptions(allow_cpu_fallback=True))
import numpy as np
import paddle
from polydraft_paddle.ops import in_place, scatter_rows

def made():
    return paddle.to_tensor(np.ones((6, 2), np.float32))

index, valid = paddle.to_tensor(np.array([1, 0], np.int32)), paddle.to_tensor(np.array([True, False]))
values = paddle.to_tensor(np.full((2, 2), 5, np.float32))
base = made()
view = base[2:4]
paddle.scatter_(view, index, values)
print("Paddle keeps it:", bool((base == view[0, 0]).any()))
for write in (lambda t: in_place(paddle.scatter_, t, index, values), lambda t: scatter_rows(t, index, values, valid)):
    base = made()
    before, view, address = base[:6], base[2:4], base.data_ptr()
    write(view)
    write(base)
    print(base.data_ptr() == address, before.numpy().tolist() == base.numpy().tolist(), base.numpy()[:, 0].tolist())
"""


@needs_device
@pytest.mark.deep
@pytest.mark.parametrize("missing", ["scatter", ""])
def test_what_is_written_in_place_reaches_the_memory_it_was_given(monkeypatch: pytest.MonkeyPatch, missing: str):
    """Paddle's fallback gives the tensor at hand new memory: its base, and views made before, never see the result. The first
    line notices when that has changed."""
    monkeypatch.setenv("CUSTOM_DEVICE_BLACK_LIST", missing)
    run = script(WRITES)
    assert run.returncode == 0, run.stderr[-2000:]
    first, both, one = run.stdout.splitlines()
    assert first == f"Paddle keeps it: {not missing}"
    assert both == "True True [5.0, 5.0, 5.0, 5.0, 1.0, 1.0]"
    assert one == "True True [1.0, 5.0, 1.0, 5.0, 1.0, 1.0]"


@pytest.mark.deep
@needs_device
@pytest.mark.parametrize("drafts", ["3", "0"])
def test_text_and_rounds_with_operations_on_the_cpu(drafts: str):
    arguments = ("generate", PROMPT, *SMALL, "--json", "--draft-tokens", drafts)
    reference = written(polydraft(*arguments, "--backend", "reference"))
    assert written(polydraft(*arguments, *POOR, "--allow-cpu-fallback")) == reference


@pytest.mark.deep
@pytest.mark.timeout(1800)
@needs_device
def test_a_claim_of_a_poor_device_says_what_ran_on_the_cpu():
    arguments = ("conform", "paddle", *POOR[2:], "--json")
    report = json.loads(polydraft(*arguments, "--allow-cpu-fallback", "--timeout", "600", timeout=1700).stdout)
    gone = {operation for operations in report["off_device"]["operations"].values() for operation in operations}
    assert gone >= {"put_along_axis", "where", "argsort", "cumsum"}
    assert report["verdict"]["status"] == 0, report["verdict"]["problems"]
    assert report["verdict"]["sentence"].endswith(f"; with {len(gone)} operations on the CPU")
    refused = json.loads(polydraft(*arguments).stdout)["verdict"]
    assert (refused["status"], "which scatter needs, and falling back" in str(refused["problems"])) == (1, True)


# -- what is missing -----------------------------------------------------------------------------------
SENTENCES = """
import json, sys
from polydraft_paddle.installation import import_paddle
import_paddle()
from polydraft_paddle.provider import device_error
for text in json.loads(sys.argv[1]):
    print(device_error("chip:0", RuntimeError(text), "swiglu"))
"""
KEY = "(NotFound) The kernel with key (chip, Undefined(AnyLayout), {dtype}) of kernel `{operation}` is not registered."
OFF = (
    " Selected wrong Backend `chip`. Paddle support following Backends: {backends}. The current value of "
    "FLAGS_enable_api_kernel_fallback(bool, default true) is false. If you want to fallback this kernel to CPU one, please set "
    "the flag true before run again.\n  [Hint: Expected kernel_iter != iter->second.end().]"
)
OTHER_DTYPES = OFF.format(backends="").replace("Backend `chip`", "DataType `int32`").replace("Backends: ", "DataTypes: float32")
REFUSED = "and falling back to the CPU is off; register one in the device's plugin, or allow it with --allow-cpu-fallback"


@needs_paddle
def test_a_missing_operation_is_named_with_dtype_contract_and_advice_that_helps():
    said = [
        KEY.format(dtype="bfloat16", operation="flip") + OFF.format(backends="ONEDNN, CPU"),
        KEY.format(dtype="int32", operation="min") + OTHER_DTYPES,
        KEY.format(dtype="float32", operation="strided_copy") + OFF.format(backends="CPU"),
        KEY.format(dtype="float32", operation="contiguous"),  # with the fallback allowed
        "(NotFound) The kernel `fused_rope` is not registered.\n  [Hint: Expected iter != kernels_.end().]",
        KEY.format(dtype="float32", operation="fused_linear") + OFF.format(backends="GPU"),
    ]
    answers = forked(SENTENCES, json.dumps(said)).stdout.splitlines()
    missing, never = "Paddle has no kernel of", "and never runs it on the CPU instead; register one in the device's plugin"
    assert answers == [
        f"{missing} 'flip' in bfloat16 for device chip:0, which swiglu needs, {REFUSED}",
        f"{missing} 'min' in int32 for device chip:0, which swiglu needs, {REFUSED}",
        f"{missing} 'strided_copy' in float32 for device chip:0, which swiglu needs, {never}",
        f"{missing} 'contiguous' in float32 for device chip:0, which swiglu needs, {never}",
        f"{missing} 'fused_rope' for device chip:0, which swiglu needs, {never}",
        f"{missing} 'fused_linear' in float32 for device chip:0, which swiglu needs, {never}",
    ]


SET_UP = """
from polydraft_paddle.installation import import_paddle
import_paddle()
import paddle
import polydraft_paddle_emu
from polydraft import LLM
from polydraft.errors import DeviceError
from polydraft_paddle.kernels import numeric

uploaded, bound = paddle.to_tensor, numeric.KERNELS["rope_kv_write"]

def weights(value, *arguments, **options):
    made = uploaded(value, *arguments, **options)
    return paddle.erfinv(made) if made.ndim == 2 else made

def caches(value, *arguments, **options):
    made = uploaded(value, *arguments, **options)
    return paddle.erfinv(made) if made.ndim == 2 and bool(paddle.isnan(made).all()) else made

def tables(a, limits):
    paddle.erfinv(a.qkv)
    return bound(a, limits)

for to_tensor, kernel in ((weights, bound), (caches, bound), (uploaded, tables)):
    paddle.to_tensor, numeric.KERNELS["rope_kv_write"] = to_tensor, kernel
    try:
        LLM(backend="paddle", device="polyemu:0", max_num_seqs=1, max_model_len=64)
    except DeviceError as error:
        print(error)
"""


@needs_device
def test_an_operation_that_is_missing_while_an_engine_is_built_is_no_bug_of_ours():
    run = forked(SET_UP)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines() == [
        f"Paddle has no kernel of 'erfinv' in float32 for device polyemu:0, which {needs} needs, {REFUSED}"
        for needs in ("embedding", "the KV cache", "rope_kv_write")
    ]


# -- graphs --------------------------------------------------------------------------------------------
NO_GRAPHS = """
import sys
from polydraft_paddle.installation import import_paddle
import_paddle()
from paddle.device.cuda import graphs
from polydraft import LLM, SamplingParams
from polydraft_paddle import graph
import polydraft_paddle_emu

def refuse(self):
    raise RuntimeError("(InvalidArgument) The handle is nullptr.")

def ends_and_refuses(self, end=graphs.CUDAGraph.capture_end):
    end(self)
    refuse(self)

faults = {"capture_begin": refuse, "capture_end": ends_and_refuses, "replay": lambda self: None}
for name, fault in faults.items():
    genuine = getattr(graphs.CUDAGraph, name)
    setattr(graphs.CUDAGraph, name, fault)
    graph._TRIED.clear()
    llm = LLM(backend="paddle", device="polyemu:0", max_num_seqs=1, max_model_len=64, draft_tokens=1)
    text = llm.generate(["def f(x):"], SamplingParams(max_new_tokens=4, ignore_eos=True))[0]
    decision = next(one for one in llm.engine.resolved.decisions if one.name == "graph")
    print(decision.chosen, len(text.token_ids), llm.engine.device.counters.graph_replays, decision.reason)
    llm.engine.close()
    setattr(graphs.CUDAGraph, name, genuine)
graphs.is_cuda_graph_supported = lambda: False
graph._TRIED.clear()
LLM(backend="paddle", device="polyemu:0", max_num_seqs=1, max_model_len=64, graph="decode")
"""


@pytest.mark.deep
@needs_graphs
def test_graphs_that_do_not_work_are_off_with_the_reason():
    """They are tried when the device is opened, whatever Paddle's version promises. A process in which captures failed ends
    without a word of them."""
    run = script(NO_GRAPHS)
    off, null = "every launch is enqueued by the host", "could not capture a step: (InvalidArgument) The handle is nullptr."
    assert run.stdout.splitlines() == [
        f"off 4 0 {off}: device polyemu:0 {null}",
        f"off 4 0 {off}: device polyemu:0 {null}",
        f"off 4 0 {off}: device polyemu:0 captured a copy that did nothing when it was replayed",
    ], run.stderr[-2000:]
    assert run.stderr.splitlines()[-1] == (
        "polydraft.errors.CapabilityError: this engine cannot be built: --graph decode: Paddle offers no graphs on polyemu:0; "
        "use --graph off"
    )
    assert run.stderr.count("Traceback") == 1


FAILED = """
from polydraft.backend import DeviceOptions
from polydraft.errors import DeviceError
from polydraft_paddle import open_place, polydraft_graph_capture
device = open_place("polyemu:0", DeviceOptions())
capture = polydraft_graph_capture(device)
import paddle
x, out = paddle.ones([4]), paddle.zeros([4])

def breaks_off():
    out.copy_(x + 1.0, False)
    raise DeviceError("no more")

for _ in range(2):
    try:
        capture.capture(device.stream, breaks_off)
    except DeviceError as error:
        print(error)
graph = capture.capture(device.stream, lambda: out.copy_(x + 2.0, False))
graph.replay(device.stream)
device.synchronize()
print(out.numpy().tolist(), len(device.graphs))
"""


@needs_graphs
def test_a_capture_that_broke_off_leaves_nothing_behind():
    run = forked(FAILED)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr[-2000:]
    assert run.stdout.splitlines() == ["no more", "no more", "[3.0, 3.0, 3.0, 3.0] 1"]


# -- runtimes that print -------------------------------------------------------------------------------
PRINTING = """
import ctypes, importlib, os, sys
import polydraft_paddle.installation as installation

def speak(word):
    ctypes.CDLL(None).puts(f"C, {word}".encode())
    os.write(1, f"write, {word}\\n".encode())
    print(f"Python, {word}")

load = importlib.import_module
def import_module(name, *rest):
    if name == "paddle":
        speak("loaded")
    return load(name, *rest)
installation.importlib.import_module = import_module

@installation.contextlib.contextmanager
def opening(kept=installation.standard_output_kept):
    with kept():
        speak("opened")
        yield
installation.standard_output_kept = opening
from polydraft.cli import main
sys.exit(main(["generate", "def f(x):", "--backend", "paddle", "--max-new-tokens", "4", "--json"]))
"""


@needs_paddle
def test_what_a_runtime_prints_when_it_is_loaded_is_not_in_the_answer():
    """Through C's streams, which are flushed only later, through the descriptor, and through Python."""
    run = script(PRINTING)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout)["schema"] == "polydraft.generate/1"
    assert {"C, loaded", "write, loaded", "C, opened", "write, opened"} <= set(run.stderr.splitlines())


CLOSED = """
import os
from polydraft_paddle.installation import standard_output_kept
os.close({closed})
with standard_output_kept():
    pass
os.write({open}, b"still here")
"""


@pytest.mark.parametrize(("closed", "still"), [(1, 2), (2, 1)])
def test_a_process_without_standard_streams_may_load_runtimes_too(closed: int, still: int):
    run = script(CLOSED.format(closed=closed, open=still))
    assert (run.returncode, (run.stdout, run.stderr)[still - 1]) == (0, "still here")


# -- what is there -------------------------------------------------------------------------------------
@pytest.mark.deep
@needs_device
def test_doctor_lists_the_devices_that_paddle_sees():
    devices = {backend["name"]: backend["devices"] for backend in examine()["backends"]}
    assert devices["paddle"][0] == "cpu"
    assert "polyemu:0" in devices["paddle"]
    assert "polyemu:0" not in devices["xpu"]
