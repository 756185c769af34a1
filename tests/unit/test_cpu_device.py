"""The CPU device and what is around it: options, refusals, captures, threads, and a machine without the compiled kernels."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import polydraft_cpu
from polydraft import LLM, SamplingParams, hookimpl
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.kernels.linear import LinearV1
from polydraft.contracts.kernels.residual_add import ResidualAddV1
from polydraft.contracts.kernels.rms_norm import RmsNormV1
from polydraft.contracts.packing import PACKINGS, pack
from polydraft.errors import ContractError, DeviceError, PluginError
from polydraft.instruments.timeline import DEVICE
from polydraft.instruments.trace import Trace
from polydraft.plugins.default_backend import EVERYWHERE, default_backend, unusable
from polydraft.plugins.kernel_table import DeviceWorkspace
from polydraft.reference.provider import plain
from polydraft_cpu import library
from polydraft_cpu.graph import CpuCapture
from polydraft_cpu.kernels import CpuTable, versions
from polydraft_cpu.options import CpuOptions, parse, usable_processors
from tests.support import tiny
from tests.support.cpu import LEVELS, LIMITS, bound, loaded, needs_kernels, opened
from tests.support.launched import launched
from tests.support.project import ROOT


# -- options ---------------------------------------------------------------------------------------
def test_options_of_a_device_string():
    assert parse("") == parse("cpu") == CpuOptions()
    assert parse("cpu?threads=3&weights=int8&isa=avx2&pin=0&queue=0") == CpuOptions(3, "int8", "avx2", 0, 0)
    assert CpuOptions().num_threads == usable_processors()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gpu", "runs on 'cpu', got 'gpu'"), ("cpu?speed=9", "the option 'speed', known: threads, weights, isa, pin, queue"),
        ("cpu?threads=two", "threads is 'two', wanted a number"), ("cpu?weights=int4", "weights is 'int4', wanted one of exact"),
        ("cpu?pin=2", "pin is '2', wanted 0 or 1"), ("cpu?queue=yes", "queue is 'yes', wanted 0 or 1"),
    ],
)  # fmt: skip
def test_wrong_device_strings(spec: str, said: str):
    with pytest.raises(DeviceError, match=re.escape(said)):
        parse(spec)


@needs_kernels
def test_an_instruction_level_that_is_not_there():
    with pytest.raises(DeviceError, match=r"isa=mmx: this processor has no mmx; it has (portable|neon)"):
        opened("cpu?isa=mmx")


# -- the table -------------------------------------------------------------------------------------
@needs_kernels
def test_every_contract_that_something_launches_is_served():
    """In the version the kernels were written for, whatever the newest is."""
    served = {name for name in versions() if name not in COMPOSITES}
    assert launched() <= served <= set(REGISTRY.names())


@needs_kernels
@pytest.mark.parametrize("name", versions())
def test_records_have_the_size_that_the_library_takes(name: str):
    device, _ = opened()
    parts = COMPOSITES[name].parts if name in COMPOSITES else (name,)
    sizes = {"TensorSpec": 5}
    words = sum(sizes.get(type(spec).__name__, 1) for part in parts for spec in REGISTRY[part].args.specs().values())
    extra = {"rope_kv_write": 1, "expert_mlp": 1, "expert_leaves": 2}.get(name, 0)  # tables of rotations and claims, a run
    assert device.library.pd_words(device.context, name.encode(), device.act_code) == words + extra


@needs_kernels
def test_a_record_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch):
    device, table = opened()
    monkeypatch.setattr("polydraft_cpu.kernels.words_of", lambda record, extra=(): [0])
    with pytest.raises(ContractError, match="residual_add takes 10 words, got 1; reinstall"):
        bound(device, table, "residual_add", ResidualAddV1(x=None, y=None))  # type: ignore[arg-type]


@needs_kernels
def test_weights_of_another_dtype_or_shape_are_refused():
    _, table = opened()
    with pytest.raises(ContractError, match="weight of dtype 'bf16'"):
        table.prepare_weight("norm", np.ones(4, np.float32), "bf16")
    weight = table.prepare_weight("norm", np.ones(4, np.float32), "f32")
    with pytest.raises(ContractError, match=r"got shape \(5,\), wanted \(4,\)"):
        table.prepare_weight("norm", np.ones(5, np.float32), "f32", weight)


# -- captures and closing --------------------------------------------------------------------------
@needs_kernels
def test_a_capture_refuses_what_it_must():
    device, table = opened()
    x, y = (loaded(device, name, np.ones((2, 8))) for name in "xy")
    run = bound(device, table, "residual_add", ResidualAddV1(x=x, y=y))
    capture = CpuCapture(device)
    graph = capture.capture(device.stream, lambda: run(2))
    staging = device.staging("staging", (2, 8), "f32")
    forbidden: dict[str, Callable[[], Any]] = {
        "allocating": lambda: device.empty("late", (1,), "i32"), "waiting": device.synchronize,
        "loading": lambda: device.load(x, np.ones((2, 8), np.float32)),
        "an upload": lambda: device.upload(device.stream, x, staging, 2),
        "a download": lambda: device.download(device.stream, staging, x, 2), "a replay": lambda: graph.replay(device.stream),
        "another capture": lambda: capture.capture(device.stream, lambda: None),
    }  # fmt: skip
    for what, call in forbidden.items():
        with pytest.raises(DeviceError, match=f"{what}.* while a graph is captured"):
            capture.capture(device.stream, call)
    graph.replay(device.stream)
    run(2)
    assert (x.host_array == 3.0).all(), "a broken capture leaves nothing behind"
    assert capture.memory() == graph.nbytes > 0


@needs_kernels
def test_a_closed_device_refuses_launches_and_replays():
    device, table = opened()
    x, y = (loaded(device, name, np.ones((2, 8))) for name in "xy")
    run = bound(device, table, "residual_add", ResidualAddV1(x=x, y=y))
    graph = CpuCapture(device).capture(device.stream, lambda: run(2))
    device.close()
    device.close()
    capture = CpuCapture(device)
    for call in (
        lambda: capture.capture(device.stream, lambda: None), lambda: run(2), lambda: graph.replay(device.stream),
        lambda: device.empty("late", (1,), "i32"),
    ):  # fmt: skip
        with pytest.raises(DeviceError, match="device cpu is closed; open a new engine"):
            call()


WITHOUT_THREADS = """
import threading
threading.stack_size(1 << 20)  # of Python's own, so that only those of kernels are refused
from polydraft import LLM, SamplingParams

for device in ("cpu?threads=2&queue=1", "cpu?threads=3&queue=0"):
    with LLM(backend="cpu", device=device, draft_tokens=3) as llm:
        print(llm.generate("def f(x):", SamplingParams(max_new_tokens=8))[0].token_ids)
"""


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="how a system is made to refuse threads is Linux's")
def test_a_system_that_gives_no_threads_is_served_by_one():
    """As in a container with a limit of processes; here none has room for the stack of a thread."""
    command = ["/bin/sh", "-c", 'ulimit -s 137438953472 && exec "$@"', "sh", sys.executable, "-c", WITHOUT_THREADS]
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    if "ulimit" in ran.stderr:
        pytest.skip(f"the limit cannot be set: {ran.stderr.strip()}")
    with LLM(backend="cpu", draft_tokens=3) as llm:
        wanted = llm.generate("def f(x):", SamplingParams(max_new_tokens=8))[0].token_ids
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", f"{wanted}\n" * 2)


@needs_kernels
def test_devices_of_many_threads_come_and_go():
    """More threads than processors, each device used by a thread of its own: nobody waits for ever."""
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((5, 256)), rng.standard_normal((512, 256)).astype(np.float32)
    results: list[np.ndarray] = []

    def use(threads: int) -> None:
        device, table = opened(f"cpu?threads={threads}")
        out = device.empty("out", (5, 512), "f32")
        weight = table.prepare_weight("linear", w, "f32")
        run = bound(device, table, "linear", LinearV1(x=loaded(device, "x", x), weight=weight, bias=None, out=out))
        for _ in range(50):
            run(5)
        results.append(out.host_array.copy())
        device.close()

    users = [threading.Thread(target=use, args=(threads,)) for threads in (1, 2, 3, 8)]
    for user in users:
        user.start()
    for user in users:
        user.join(60)
    assert len(results) == 4
    assert all(np.array_equal(one, results[0]) for one in results)


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_on_its_own_thread():
    device, table = opened("cpu?threads=2")
    out = device.empty("out", (4, 512), "f32")
    weight = table.prepare_weight("linear", np.ones((512, 512), np.float32), "f32")
    run = bound(device, table, "linear", LinearV1(x=loaded(device, "x", np.ones((4, 512))), weight=weight, bias=None, out=out))
    run(4)
    child = os.fork()
    if child == 0:
        out.host_array[:] = 0
        run(4)
        right = (out.host_array == 512).all()
        device.close()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


# -- the queue -------------------------------------------------------------------------------------
def adding(spec: str) -> tuple[Any, Any, Any, Callable[[int], None]]:
    """A device, x of zeros, y of ones, and the launch that adds y to x."""
    device, table = opened(spec)
    x, y = loaded(device, "x", np.zeros((4, 8))), loaded(device, "y", np.ones((4, 8)))
    return device, x, y, bound(device, table, "residual_add", ResidualAddV1(x=x, y=y))


SPECS = pytest.mark.parametrize("spec", ["cpu?threads=1", "cpu?threads=2", "cpu?threads=4", "cpu?queue=0"])


@needs_kernels
@pytest.mark.parametrize(("spec", "queued"), [("", True), ("cpu?threads=2", True), ("cpu?threads=2&queue=0", False)])
def test_what_the_device_string_says_is_what_is_declared(spec: str, queued: bool):
    assert polydraft_cpu.polydraft_backend_info(spec).capabilities.asynchronous is queued
    engine = LLM(model=str(tiny.checkpoint("narrow")), backend="cpu", device=spec).engine
    assert engine.resolved.overlap == queued
    engine.close()


@needs_kernels
@SPECS
def test_more_launches_than_the_queue_has_room_for(spec: str):
    device, x, _, run = adding(spec)
    for _ in range(3000):
        run(4)
    assert (x.host_array == 3000).all()
    device.close()


@needs_kernels
@SPECS
def test_launches_and_copies_keep_their_order(spec: str):
    """Nobody waits in between, and each download has memory of its own."""
    device, x, y, run = adding(spec)
    up, event = device.staging("up", (4, 8), "f32"), device.event()
    up.array[...] = 2
    downs = [device.staging(f"down{i}", (4, 8), "f32") for i in range(20)]
    for i, down in enumerate(downs):
        run(4)
        if i == 9:
            device.upload(device.stream, y, up, 4)
        device.download(device.stream, down, x, 4)
    assert event.query(), "it stands behind nothing"
    event.record(device.stream)
    event.synchronize()
    assert event.query()
    assert [down.array[3, 7] for down in downs] == [*range(1, 11), *range(12, 32, 2)]
    assert device.counters.host_syncs == 1
    device.close()


@needs_kernels
@SPECS
def test_what_a_launch_works_on_lives_until_it_has_run(spec: str):
    device, x, y, run = adding(spec)
    memory = weakref.ref(y)
    run(4)
    del x, y, run
    gc.collect()
    assert memory() is not None, "the launch may still be waiting"
    device.synchronize()
    gc.collect()
    assert memory() is None
    device.close()


@needs_kernels
@SPECS
def test_closing_lets_run_what_was_issued(spec: str):
    device, x, _, run = adding(spec)
    for _ in range(100):
        run(4)
    device.close()
    assert (x.host_array == 100).all()


@needs_kernels
def test_several_threads_wait_for_one_device():
    """One of them works along, the others wait."""
    device, table = opened("cpu?threads=2")
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((32, 256)), rng.standard_normal((768, 256)).astype(np.float32)
    weight, out = table.prepare_weight("linear", w, "f32"), device.empty("out", (32, 768), "f32")
    run = bound(device, table, "linear", LinearV1(x=loaded(device, "x", x), weight=weight, bias=None, out=out))
    for _ in range(20):
        run(32)
    waiters = [threading.Thread(target=device.library.pd_wait, args=(device.context, device.last)) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join(60)
    assert device.reached(device.last)
    assert np.abs(out.host_array - x @ w.T).max() < 1e-3
    device.close()


# -- kernels in Python -----------------------------------------------------------------------------
def python_kernel(device: Any, x: Any, y: Any, function: Callable[[Any, int], None]) -> Callable[[int], None]:
    """The launch of a kernel for `residual_add`."""
    launch = device.bind_kernel(plain(function)).bind(ResidualAddV1(x=x, y=y), LIMITS, None)
    return lambda n: launch(device.stream, n)


def doubled(a: Any, n: int) -> None:
    a.x[:n] *= 2


@needs_kernels
@SPECS
def test_a_kernel_in_python_runs_in_its_place(spec: str):
    """Behind compiled kernels that take long enough, ahead of the next one, and so in every replay of a graph."""
    device, x, y, add = adding(spec)
    double = python_kernel(device, x, y, doubled)
    weight_rows = np.ones((512, 512), np.float32)
    _, table = opened(spec)
    weight, out = table.prepare_weight("linear", weight_rows, "f32"), device.empty("out", (64, 512), "f32")
    slow = bound(device, CpuTable(device), "linear", LinearV1(
        x=loaded(device, "in", np.ones((64, 512))), weight=weight, bias=None, out=out))  # fmt: skip

    def step() -> None:
        slow(64)
        add(4)
        double(3)

    step()
    step()
    assert x.host_array[:, 0].tolist() == [6, 6, 6, 2]
    graph = CpuCapture(device).capture(device.stream, step)
    assert x.host_array[:, 0].tolist() == [6, 6, 6, 2], "recorded, not run"
    launches = device.counters.launches
    for _ in range(3):
        graph.replay(device.stream)
    assert x.host_array[:, 0].tolist() == [62, 62, 62, 5]
    assert device.counters.launches == launches
    device.close()


@needs_kernels
def test_a_launch_of_a_kernel_in_python_does_not_wait():
    device, x, y, add = adding("cpu?threads=2")
    go = threading.Event()
    wait = python_kernel(device, x, y, lambda a, n: go.wait(60))  # type: ignore[arg-type, return-value]
    wait(4)
    add(4)
    event = device.event()
    event.record(device.stream)
    assert not event.query()
    go.set()
    event.synchronize()
    assert (x.host_array == 1).all()
    device.close()


@needs_kernels
@pytest.mark.skipif(
    not {"avx512bf16", "avx512vnni"} & set(LEVELS), reason="kernels of other processors write nothing into a thread's own memory"
)
@pytest.mark.parametrize("captured", [False, True])
def test_who_waits_helps_again_after_a_launch_that_it_could_not_help_with(captured: bool):
    """A kernel that takes longer than the patience of who waits comes first. Rows are rounded in the memory of the thread that
    has the part, eight at a time, and the second thread is the one that waits."""
    device, x, y, _ = adding("cpu?threads=2")
    pause = python_kernel(device, x, y, lambda a, n: time.sleep(0.005))
    table = CpuTable(device)
    weight = table.prepare_weight("linear", pack(np.ones((1024, 512), np.float32), PACKINGS["fp8-channel-a8"]), "f32")
    rows, out = loaded(device, "in", np.ones((64, 512))), device.empty("out", (64, 1024), "f32")
    args, provider = LinearV1(x=rows, weight=weight, bias=None, out=out), table.providers["linear"]
    nbytes = provider.workspace_bytes(args, LIMITS)
    memory = device.empty("workspace", (nbytes,), "u8")
    launch, theirs = provider.bind(args, LIMITS, DeviceWorkspace(memory, nbytes)), memory.host_array[8 * 512 * 4 :]

    def step() -> None:
        pause(4)
        for _ in range(20):
            launch(device.stream, 64)

    run = CpuCapture(device).capture(device.stream, step) if captured else None
    for _ in range(100):  # on a busy machine it may come too late
        step() if run is None else run.replay(device.stream)
        device.synchronize()
        if theirs.any():
            break
    assert theirs.any()
    device.close()


@needs_kernels
@SPECS
@pytest.mark.parametrize("captured", [False, True])
def test_what_a_kernel_in_python_raises_is_raised_by_who_waits_and_voids_the_rest(spec: str, *, captured: bool):
    device, x, y, add = adding(spec)
    event, fails = device.event(), [True]

    def divide(a: Any, n: int) -> None:
        a.x[:n] += 10
        if fails[0]:
            raise ZeroDivisionError("by nothing")

    divide_ = python_kernel(device, x, y, divide)

    def step() -> None:
        add(4)
        divide_(4)
        add(4)

    graph = CpuCapture(device).capture(device.stream, step)
    down = device.staging("down", (4, 8), "f32")
    for _ in range(2):
        graph.replay(device.stream) if captured else step()
        device.download(device.stream, down, x, 4)
    event.record(device.stream)
    said = r"^kernel residual_add failed on device cpu \(ZeroDivisionError: by nothing\); every step in flight is void, ask"
    with pytest.raises(DeviceError, match=said) as caught:
        event.synchronize()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (x.host_array == 11).all(), "nothing behind it was carried out"
    assert (down.array == 0).all()
    fails[0] = False
    step()
    device.synchronize()
    assert (x.host_array == 23).all(), "the device is as good as before"
    fails[0] = True
    step()
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        x.host_array  # noqa: B018  whoever looks is told
    device.close()


@needs_kernels
@SPECS
def test_a_failure_is_told_behind_the_end_of_the_device(spec: str):
    device, x, y, _ = adding(spec)
    python_kernel(device, x, y, lambda a, n: a.nothing)(4)
    device.close()
    with pytest.raises(DeviceError, match="AttributeError"):
        x.host_array  # noqa: B018


@needs_kernels
@SPECS
def test_an_interrupt_in_a_kernel_stays_one(spec: str):
    device, x, y, _ = adding(spec)

    def interrupted(a: Any, n: int) -> None:
        raise KeyboardInterrupt

    python_kernel(device, x, y, interrupted)(4)
    with pytest.raises(KeyboardInterrupt):
        device.synchronize()
    device.synchronize()
    device.close()


@needs_kernels
@SPECS
def test_what_a_kernel_in_python_is_made_of_lives_until_it_has_run_and_no_longer(spec: str):
    device, x, y, add = adding(spec)
    go = threading.Event()
    wait = python_kernel(device, y, y, lambda a, n: go.wait(60))  # type: ignore[arg-type, return-value]
    double = python_kernel(device, x, y, doubled)
    if device.options.queue:
        wait(4)
    double(4)
    memory = weakref.ref(x)
    del x, y, add, wait, double
    gc.collect()
    assert not device.options.queue or memory() is not None
    go.set()
    device.synchronize()
    gc.collect()
    assert memory() is None
    alive = weakref.ref(device)
    device.close()
    del device
    gc.collect()
    assert alive() is None


ENDS = """
import gc, sys, threading, time
import numpy as np
from polydraft.contracts.kernels.residual_add import ResidualAddV1
from polydraft.reference.provider import plain
from polydraft_cpu.graph import CpuCapture
from tests.support.cpu import LIMITS, opened

done = []

def slow(a, n):
    time.sleep(0.05)
    gc.collect()
    a.x[:n] += 1
    done.append(float(a.x[0, 0]))

def begin():
    device, table = opened("cpu?threads=2")
    x = device.empty("x", (4, 8), "f32")
    providers = device.bind_kernel(plain(slow)), table.providers["residual_add"]
    kernel, add = (provider.bind(ResidualAddV1(x=x, y=x), LIMITS, None) for provider in providers)
    def step():
        for launch in (kernel, add, kernel):
            launch(device.stream, 4)
    capture = CpuCapture(device)
    graphs = [capture.capture(device.stream, step) for _ in range(3)]
    device.cycle = graphs
    for graph in graphs:
        graph.replay(device.stream)
    return device, graphs
"""
"""Three replays of +1, * 2, +1 that take a while; device and graphs keep each other."""


@needs_kernels
@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(["import atexit\natexit.register(lambda: print(done))\nheld = begin()"], id="the process ends"),
        pytest.param(
            [
                "begin()\ngc.collect()\nprint(done)",
                "held = begin()\ndel held\ntime.sleep(1)\ngc.collect()\nprint(done)",
                "device, graphs = begin()\ndevice.close()\nprint(done)",
            ],
            id="it is garbage, a kernel collects it, it is closed",
        ),
    ],
)
def test_what_was_issued_runs_to_its_end_whatever_ends_the_device(ends: list[str]):
    command = [sys.executable, "-X", "faulthandler", "-c", ENDS + "\ndone.clear()\n".join(ends)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "[1.0, 3.0, 4.0, 9.0, 10.0, 21.0]\n" * len(ends))


@needs_kernels
def test_a_composite_in_python_has_the_names_of_its_parts():
    device, x, y, _ = adding("cpu")
    weight = CpuTable(device).prepare_weight("norm", np.ones(8, np.float32), "f32")
    out = device.empty("out", (4, 8), "f32")
    parts = ResidualAddV1(x=x, y=y), RmsNormV1(x=x, weight=weight, out=out, eps=1e-6, plus_one=False)
    launch = device.bind_kernel(plain(lambda a, n: a.parts[2])).bind(CompositeArgs(parts), LIMITS, None)
    launch(device.stream, 4)
    with pytest.raises(DeviceError, match=r"^kernel residual_add\+rms_norm failed on device cpu \(IndexError"):
        device.synchronize()
    device.close()


@needs_kernels
def test_a_kernel_in_python_is_not_given_bfloat16():
    """Its arrays would be of integers, and its results plausible."""
    device, _ = opened("cpu", "bf16")
    y, numbers = loaded(device, "y", np.ones((4, 8))), device.empty("numbers", (4, 8), "f32")
    kernel = device.bind_kernel(plain(doubled))
    kernel.bind(ResidualAddV1(x=numbers, y=numbers), LIMITS, None)
    said = r"^the kernel of residual_add is in NumPy, which has no bfloat16, got the buffer y in it; give --dtype f32$"
    for args in (ResidualAddV1(x=numbers, y=y), CompositeArgs((ResidualAddV1(x=numbers, y=y),))):
        with pytest.raises(DeviceError, match=said):
            kernel.bind(args, LIMITS, None)
    device.close()


@needs_kernels
def test_work_of_the_host_waits_for_what_was_issued():
    device, x, _, add = adding("cpu")
    for _ in range(300):
        add(4)
    seen: list[float] = []
    device.enqueue(device.stream, lambda: seen.append(float(x._array[0, 0])))
    assert seen == [300]
    with pytest.raises(DeviceError, match=r"^work of the host while a graph is captured"):
        CpuCapture(device).capture(device.stream, lambda: device.enqueue(device.stream, lambda: None))
    device.close()


@needs_kernels
@pytest.mark.parametrize("options", [{"graph": "off"}, {"graph": "decode"}, {"device": "cpu?queue=0"}], ids=str)
def test_a_kernel_that_fails_ends_the_requests_and_not_the_engine(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    fails = [False]

    @hookimpl
    def polydraft_kernels(device: Any) -> Any:
        def snapshot_output(a: Any, n: int) -> None:
            if fails[0]:
                raise ValueError("no more")
            REGISTRY["snapshot_output"].golden(a, n)

        provider = device.bind_kernel(plain(snapshot_output))
        return SimpleNamespace(providers={"snapshot_output": provider}, versions={"snapshot_output": 1})

    pack = types.ModuleType("failing_pack")
    pack.polydraft_kernels = polydraft_kernels  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "failing_pack", pack)
    engine = LLM(model=str(tiny.checkpoint("narrow")), backend="cpu", draft_tokens=2, plugins=("failing_pack",), **options).engine
    ids = [engine.add([1, 2, 3], SamplingParams(max_new_tokens=30, ignore_eos=True)) for _ in range(2)]
    for _ in range(4):
        engine.step()
    fails[0] = True
    while engine.has_work:
        engine.step()
    fails[0] = False
    outputs = [output for output in engine.poll() if output.finished]
    assert sorted(output.id for output in outputs) == sorted(ids)
    for output in outputs:
        assert output.finish_reason == "error"
        assert "kernel snapshot_output failed on device cpu (ValueError: no more)" in output.error
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=8, ignore_eos=True))
    while engine.has_work:
        engine.step()
    (output,) = engine.poll()
    assert (output.finish_reason, len(output.token_ids)) == ("length", 8)
    engine.close()


# -- times -----------------------------------------------------------------------------------------
@needs_kernels
@SPECS
def test_a_timeline_says_when_launches_and_copies_ran_while_it_is_kept(spec: str):
    device, x, _, run = adding(spec)

    def step() -> None:
        run(4)
        run(2)

    graph = CpuCapture(device).capture(device.stream, step)
    down = device.staging("down", (4, 8), "f32")
    with pytest.raises(DeviceError, match="keeps no timeline"):
        device.now_s()
    run(4)
    with device.keep_timeline():
        before = device.now_s()
        for _ in range(3):
            graph.replay(device.stream)
            run(0)  # nothing is issued
            run(3)
            device.download(device.stream, down, x, 4)
        spans, after = device.timeline().spans, device.now_s()
    turn = [("replay", "graph", 0), *(("kernel", "residual_add", n) for n in (4, 2, 3)), ("download", "copy down", 4)]
    assert [(span.kind, span.name, span.rows) for span in spans] == turn * 3
    times = [moment for span in spans for moment in (span.start_s, span.end_s)]
    assert times == sorted(times)
    assert before < times[0] < times[-1] < after
    assert all(before < span.issued_s <= span.start_s for span in spans)
    run(4)
    with pytest.raises(DeviceError, match="keeps no timeline"):
        device.timeline()
    device.close()


@needs_kernels
def test_a_recording_shows_what_the_device_did(tmp_path: Path):
    trace = Trace()
    llm = LLM(model=str(tiny.checkpoint("narrow")), backend="cpu", draft_tokens=2, instruments=(trace,))
    llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12, ignore_eos=True))
    trace.stop()
    llm.engine.close()
    recording = trace.finish()
    assert recording.device_times == "measured: the clock of the device's own thread"
    works = [span for span in recording.spans if span.side == DEVICE and span.kind == "work"]
    assert {"linear", "paged_attention", "copy snapshot0", "start of the graph"} <= {span.name for span in works}
    assert all(span.step > 0 for span in works), "each belongs to the step that issued it"


# -- the default -----------------------------------------------------------------------------------
@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch):
    """Whatever this machine has."""

    def asked(name: str) -> str:
        return "no device is there" if name == "cuda" else unusable(name)

    monkeypatch.setattr("polydraft.plugins.default_backend.unusable", asked)


ABSENT = "cuda is not used: no device is there"


@needs_kernels
@pytest.mark.usefixtures("no_accelerator")
def test_the_default_is_the_best_that_can_be_used():
    chosen = default_backend()
    assert (chosen.name, chosen.absent, chosen.broken) == ("cpu", (ABSENT,), ())
    assert chosen.reason == f"the embedded default; {ABSENT}"
    engine = LLM(model=str(tiny.checkpoint("narrow"))).engine
    assert (engine.resolved.backend, engine.default) == ("cpu", chosen)


def test_a_device_that_is_there_comes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polydraft.plugins.default_backend.unusable", lambda name: "")
    chosen = default_backend()
    assert (chosen.name, chosen.passed_over, chosen.reason) == ("cuda", (), "its device is there")


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("note", ["the build failed with 'no g++'", ""], ids=["failed", "never run"])
def test_without_the_kernels_the_reference_takes_over_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, note: str):
    monkeypatch.setattr(library, "PATH", tmp_path / "_kernels.so")
    monkeypatch.setattr(library, "NOTE", tmp_path / "note.txt")
    if note:
        library.NOTE.write_text(note)
    chosen = default_backend()
    assert chosen.name == "reference" == EVERYWHERE[-1]
    (sentence,) = chosen.broken
    assert sentence.startswith(
        f"cpu is not used: the compiled kernels are missing: {note or 'its build was never run'}; install a C++17"
    )
    llm = LLM(model=str(tiny.checkpoint("narrow")), draft_tokens=1)
    assert llm.engine.resolved.backend == "reference"
    (decision,) = (d for d in llm.engine.resolved.decisions if d.name == "backend")
    assert decision.reason == f"the embedded default; {ABSENT}; {sentence}"
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, ignore_eos=True))[0].token_ids) == 4
    assert not polydraft_cpu.polydraft_backend_info("").available


def test_a_library_that_does_not_load_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    library.load.cache_clear()
    monkeypatch.setattr(library, "PATH", tmp_path / "_kernels.so")
    library.PATH.write_bytes(b"no library")
    try:
        assert "the compiled kernels cannot be loaded" in library.missing()
    finally:
        library.load.cache_clear()


def test_a_backend_that_does_not_import_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    def broken(role: object, name: str) -> None:
        raise PluginError(f"plugin {name!r} failed to import")

    monkeypatch.setattr("polydraft.plugins.default_backend.Loaded.from_entry", broken)
    assert default_backend().broken == ("cpu is not used: plugin 'cpu' failed to import",)


def test_a_backend_that_is_not_installed_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polydraft.plugins.default_backend.find", lambda group: {})
    assert default_backend().broken == ("cpu is not used: it is not installed; reinstall polydraft",)
