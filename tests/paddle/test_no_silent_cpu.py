"""Nothing runs on the CPU in secret: what would is refused by name, counted where it is allowed, and never captured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from polydraft.conformance.report import Selection, conform
from tests.support.depth import among
from tests.support.paddle import forked_command, needs_device, needs_graphs, needs_paddle, polydraft, script
from tests.support.plugin_doubles import backend as double

PROMPT = "def fibonacci(n):"
SMALL = ("--max-new-tokens", "4", "--max-num-seqs", "1", "--max-model-len", "64")
STEPS = """
import json, sys
from polydraft.environment import dictate
from polydraft_paddle.probe import leave, mark
for name, value in (("vmodule", "kernel_factory=3"), ("minloglevel", "0"), ("logtostderr", "1")):
    dictate(f"GLOG_{name}", value)
from polydraft import LLM, SamplingParams
import polydraft_paddle_emu as device
backend, graph, allowed, *plugins = json.loads(sys.argv[1])
mark("start")
options = dict(draft_tokens=3, max_num_seqs=1, max_model_len=64, graph=graph, overlap=1)
try:
    llm = LLM(backend=backend, device="polyemu:0", allow_cpu_fallback=allowed, plugins=tuple(plugins), **options)
except Exception as error:
    leave(str(error))
llm.generate(["def f(x):"], SamplingParams(max_new_tokens=6, ignore_eos=True))
before = {name: device.counter(name) for name in device.COUNTERS}
mark("decode")
out = llm.generate(["def f(x):"], SamplingParams(max_new_tokens=16, ignore_eos=True))[0]
mark("end")
after = {name: device.counter(name) - before[name] for name in device.COUNTERS}
print(json.dumps([len(out.token_ids), after["synchronous_copies"] + after["pageable_copies"], after["graph_launches"]]))
llm.engine.device.close()
leave()
"""
PLANTED = """
import paddle
from polydraft.hooks import hookimpl
from polydraft_paddle.provider import PaddleProvider, plain
from types import SimpleNamespace

def swiglu(a, n):
    half = a.out.shape[1]
    a.out[:n].copy_(paddle.erfinv(a.gate_up[:n, :half] * 0.0), False)

@hookimpl
def polydraft_kernels(device):
    provider = PaddleProvider(plain(swiglu), device.counters, device.spec)
    return SimpleNamespace(providers={"swiglu": provider}, versions={"swiglu": 1})
"""


class Steps(NamedTuple):
    """What a run of `STEPS` came to."""

    fallbacks: dict[str, tuple[str, ...]]
    """Operations that left the device, by what was being done."""
    tokens: int
    waits: int
    """Copies while decoding that the host waited for, or that would wait on a chip because an end of them is not pinned."""
    replays: int


def ran(backend: str, graph: str, *plugins: Path, allowed: bool = True) -> Steps:
    """Decode on the emulated device. Falling back is allowed, so that it would be counted; a run that is refused raises."""
    from polydraft_paddle.probe import by_contract, read

    run = script(STEPS, json.dumps([backend, graph, allowed, *map(str, plugins)]))
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, "decode", run.stdout, run.stderr)
    return Steps(by_contract(read(run.stderr.splitlines())), *json.loads(run.stdout.strip().splitlines()[-1]))


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    pack = tmp_path / "planted.py"
    pack.write_text(PLANTED)
    return pack


# -- the decode step -----------------------------------------------------------------------------------
@needs_graphs
@pytest.mark.parametrize("backend", among(["paddle"], ["paddle", "xpu"]))
def test_a_decode_step_in_graph_mode_has_no_fallback_at_all(backend: str):
    assert ran(backend, "decode")._replace(replays=1) == Steps({}, tokens=16, waits=0, replays=1)


@pytest.mark.deep
@needs_device
def test_an_operation_without_a_kernel_is_counted(planted: Path):
    """What the test above rests on: with one such operation it would not pass."""
    steps = ran("paddle", "off", planted)
    assert steps.fallbacks["decode"] == ("erfinv",)
    assert steps.waits > 0


@needs_graphs
@pytest.mark.deep
def test_a_step_with_an_operation_on_the_cpu_is_not_captured(planted: Path):
    """Falling back is allowed here; a replay would leave the operation out."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        ran("paddle", "decode", planted)
    assert "Paddle has no kernel of 'erfinv' for device polyemu:0, and what runs on the CPU instead is not captured" in (
        refused.value.stdout
    )


@pytest.mark.deep  # `make test` asks it of kernels alone, and where graphs are captured
@needs_device
def test_an_operation_without_a_kernel_is_refused_by_name(planted: Path):
    arguments = ("generate", PROMPT, "--backend", "paddle", "--device", "polyemu:0", "--graph", "off", "--plugin", str(planted))
    run = polydraft(*arguments, *SMALL)
    assert run.returncode == 1
    assert "Paddle has no kernel of 'erfinv' in float32 for device polyemu:0, which swiglu needs, and falling back" in run.stderr


# -- black lists, which count for more than the flag ---------------------------------------------------
@needs_device
def test_a_black_list_in_the_environment_is_refused():
    options = ("--backend", "paddle", "--device", "polyemu:0", *SMALL)
    run = forked_command("generate", PROMPT, *options, CUSTOM_DEVICE_BLACK_LIST="argsort")
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1] == (
        "polydraft: CUSTOM_DEVICE_BLACK_LIST is 'argsort' in the environment, which runs these operations of polyemu:0 "
        "on the CPU in secret; unset it, or allow it with --allow-cpu-fallback"
    )


@pytest.mark.parametrize(
    ("spec", "found"),
    [("cpu", ""), ("gpu:0", ""), ("xpu:0", "XPU_BLACK_LIST"), ("mychip:1", "CUSTOM_DEVICE_BLACK_LIST")],
)
def test_which_black_list_counts_where(monkeypatch: pytest.MonkeyPatch, spec: str, found: str):
    from polydraft_paddle.installation import black_list

    assert black_list(spec) == ""
    monkeypatch.setenv("XPU_BLACK_LIST", "softmax")
    monkeypatch.setenv("CUSTOM_DEVICE_BLACK_LIST", "softmax")
    assert black_list(spec) == found


# -- asking --------------------------------------------------------------------------------------------
@needs_paddle
def test_a_probe_that_cannot_be_made_is_no_success():
    run = forked_command("doctor", "--probe", "paddle=mychip:0", "--json")
    assert run.returncode == 1, run.stderr
    assert "Paddle has no device 'mychip:0'" in json.loads(run.stdout)["probe"]["problem"]


@needs_device
@pytest.mark.deep
def test_doctor_lists_what_leaves_the_device_by_contract(monkeypatch: pytest.MonkeyPatch):
    """On a black list an operation leaves the device although the flag of falling back is off: only a run shows that."""
    monkeypatch.setenv("CUSTOM_DEVICE_BLACK_LIST", "argsort")
    probe = json.loads(polydraft("doctor", "--probe", "xpu=polyemu:0", "--json").stdout)["probe"]
    asked = ("sample", "filter_probs", "top_logprobs", "draft_top_logprobs", "route_experts")
    assert probe["operations"] == {contract: ["argsort"] for contract in asked}


def test_the_log_is_read_by_contract():
    from polydraft_paddle.probe import MARK, Fallen, by_contract, read

    fallen = (
        "I1121 kernel_factory.cc:389] missing XPU kernel: {}, expected_kernel_key:(XPU, NCHW, float32), fallbacking to CPU one!"
    )
    lines = [fallen.format("full"), f"{MARK} sample", fallen.format("argsort"), fallen.format("cumsum"), fallen.format("argsort")]
    lines += [f"{MARK} ", "something else", f"{MARK} embed", f"{MARK} ", fallen.format("full")]
    fell = list(read(lines))
    assert fell[:2] == [Fallen("", "full", "float32"), Fallen("sample", "argsort", "float32")]
    assert by_contract(fell) == {"": ("full",), "sample": ("argsort", "cumsum")}


@pytest.mark.parametrize(
    ("status", "said", "wrote", "sentence"),
    [
        (-11, "", "", "on mychip:0 ended the process (SIGSEGV, Segmentation fault); see that its runtime was built for the"),
        (
            -6,
            "",
            "polydraft-probe: embed\npolydraft-probe: \npolydraft-probe: sample\nX\n",
            "(SIGABRT, Aborted) in sample; see",
        ),
        (1, "one thing\nPaddle has no device 'mychip:0'\n", "", "on mychip:0 failed: Paddle has no device 'mychip:0'"),
        (3, "", "", "on mychip:0 failed: exit status 3"),
    ],
)
def test_asking_that_ends_badly_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, status: int, said: str, wrote: str, sentence: str
):
    """A runtime that was built for another Paddle, and says so nowhere, ends the process with its first kernel."""
    from polydraft_paddle.probe import leaving

    from polydraft.errors import DeviceError

    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, status, said, wrote))
    with pytest.raises(DeviceError) as seen:
        leaving("mychip:0")
    assert sentence in str(seen.value)
    assert str(seen.value.__cause__) == wrote, "which --debug shows"


def test_a_chip_that_lacks_something_is_refused(monkeypatch: pytest.MonkeyPatch):
    """As Paddle's log tells, since no chip is here: on one, falling back cannot be switched off."""
    from polydraft_paddle import probe
    from polydraft_paddle.probe import MARK, refuse_lacking

    from polydraft.errors import DeviceError

    monkeypatch.setattr(probe, "_COMPLETE", set())

    key = "expected_kernel_key:(XPU, NCHW, int32), fallbacking to CPU one!"
    wrote = f"{MARK} swiglu\nI1121 kernel_factory.cc:389] missing XPU kernel: searchsorted, {key}\n{MARK} \n"
    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 0, "", wrote))
    with pytest.raises(DeviceError, match="'searchsorted' in int32 on the CPU instead of on device xpu:0, which swiglu needs;"):
        refuse_lacking(SimpleNamespace(spec="xpu:0", dtype="bf16", host_visible=False))
    wrote = ""
    refuse_lacking(SimpleNamespace(spec="xpu:0", dtype="bf16", host_visible=False))
    monkeypatch.setattr(subprocess, "run", None)
    refuse_lacking(SimpleNamespace(spec="xpu:0", dtype="bf16", host_visible=False))  # tried already


def test_the_cpu_itself_is_not_asked():
    from polydraft_paddle.probe import leaving

    assert leaving("cpu") == {}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({}, ""),
        ({"sample": ("argsort",), "": ("full",)}, "operations leave the device for the CPU: argsort (sample), full (loading)"),
        (None, "the device is gone"),
    ],
)
def test_a_claim_does_not_hold_when_operations_leave_the_device(answer: dict[str, tuple[str, ...]] | None, problem: str):
    from polydraft.conformance.report import make
    from polydraft.conformance.target import Target
    from polydraft.errors import DeviceError

    def polydraft_off_device(spec: str) -> dict[str, tuple[str, ...]]:
        if answer is None:
            raise DeviceError("the device is gone")
        return answer

    target = Target(double(polydraft_off_device=polydraft_off_device))
    results = conform(double(), selection=Selection(contract="swiglu", case="every_row_used")).results
    report = make(target, Selection(contract="swiglu"), results, off_device=target.plugins.off_device(""))
    assert (report.status == 0) == (not problem)
    assert problem in report.content["verdict"]["sentence"]
