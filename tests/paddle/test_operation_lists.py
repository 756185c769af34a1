"""The emulated device with no more operations than a chip, by a list read from public source, or than a poor device: what is
outside is refused by name, what waits is named, and the device's log says so."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from polydraft.plugins.plugins import Plugins
from tests.support.depth import deep
from tests.support.paddle import HAS_DEVICE, forked, polydraft

pytestmark = pytest.mark.skipif(
    not HAS_DEVICE or importlib.util.find_spec("polydraft_paddle_emu.operation_lists") is None,
    reason="the emulated Paddle device is missing, or older than its lists: "
    "pip install --no-build-isolation plugins/paddle-emu-device",
)

# -- the lists -----------------------------------------------------------------------------------------


def test_what_is_offered_is_both_listed_and_registered():
    from polydraft_paddle_emu.operation_lists import NAMES, read

    assert NAMES == ("minimal", "xpu3")
    kernels = read("xpu3").kernels
    assert kernels["add"] == {"float32", "float16", "bfloat16", "float64", "int32", "int64"}
    assert kernels["any"] == {"bool"}, "float32 is listed, and not registered"
    assert not kernels["add_n_array"], "it is registered, and not listed"
    assert not {"searchsorted", "cummax", "log1p", "bitwise_xor"} & set(kernels)
    assert "int32" not in kernels["min"] | kernels["take_along_axis"]
    assert read("xpu3").waits == {"scatter", "index_put", "flash_attn_unpadded"}


@pytest.mark.parametrize("name", ["minimal", "xpu3"])
def test_a_list_says_where_it_was_read_and_when(name: str):
    from polydraft_paddle_emu.operation_lists import FOLDER

    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert content["read"].startswith("2026-")
    assert content["chip"]
    assert all(content["sources"].values())


# -- what the device does with one ---------------------------------------------------------------------
START = """
import json, sys
from polydraft.backend import DeviceOptions
from polydraft.conformance.harness import run_kernel
from polydraft.contracts import REGISTRY
from polydraft.errors import DeviceError
from polydraft_paddle import open_place
from polydraft_paddle.provider import PaddleProvider, plain
from polydraft_paddle.table import PaddleTable
device = open_place(sys.argv[1], DeviceOptions())
import paddle
import polydraft_paddle_emu as emu
"""
LAUNCHES = """
contract = REGISTRY["swiglu"]
case = next(iter(contract.cases()))

def launched(extra=lambda a: None):
    table = PaddleTable(device)
    def swiglu(a, n):
        extra(a)
        half = a.out.shape[1]
        a.out[:n].copy_(paddle.nn.functional.silu(a.gate_up[:n, :half]) * a.gate_up[:n, half:], False)
    table.providers = {"swiglu": PaddleProvider(plain(swiglu), device.counters, device.spec)}
    try:
        run_kernel(contract, case, device, table)
    except DeviceError as error:
        return str(error)
    return ""

def leave_events(a):
    import gc
    garbage = [paddle.device.Event()]
    garbage[0].record(device.stream.stream)
    garbage.append(garbage)
    del garbage
    gc.collect()

ends, index = paddle.to_tensor([1, 2]), paddle.to_tensor([0])
ends = ends.astype("int32")
said = [
    launched(),
    emu.log().kernels["swiglu"], emu.log().waits.get("swiglu", {}),
    launched(lambda a: paddle.searchsorted(ends, ends)),
    launched(lambda a: paddle.scatter_(a.out, index, a.out[:1])),
    launched(lambda a: a.out.numpy()),
    launched(lambda a: paddle.to_tensor([1.0])),
    launched(leave_events),
    emu.log().waits["swiglu"],
    emu.log().waits[emu.COLLECTING],
]
print(json.dumps(said))
"""
OUTSIDE = "for device polyemu:0?ops=xpu3, which swiglu needs, and falling back to the CPU is off"
WAITS = "swiglu makes the host wait on device polyemu:0?ops=xpu3: {what}; use operations that the device only queues"


def answers(code: str, *arguments: str) -> list[Any]:
    run = forked(code, *arguments)
    assert run.returncode == 0, run.stderr[-2000:]
    said: list[Any] = json.loads(run.stdout)
    return said


def test_what_is_outside_the_list_is_refused_and_what_waits_is_named():
    clean, ran, waited, outside, scatter, down, up, collected, waits, of_collecting = answers(
        START + LAUNCHES, "polyemu:0?ops=xpu3"
    )
    assert clean == collected == ""
    assert set(ran) >= {"silu in float32", "multiply in float32"}
    assert waited == {}
    assert outside.startswith(f"Paddle has no kernel of 'searchsorted' in int32 {OUTSIDE}")
    assert scatter == WAITS.format(what="scatter in float32")
    assert down.startswith("swiglu makes the host wait")
    assert "bytes to the host" in down
    assert up.startswith("swiglu makes the host wait")
    assert "a copy of 4 bytes from the host" in up
    assert waits["scatter in float32"] == 1
    assert of_collecting["a wait for an event"] >= 1, "which is nobody's launch"


EVERY = """
import itertools
from polydraft_paddle import polydraft_init_forward_meta as init_meta
from polydraft.conformance.harness import check_kernel, contract_of
from polydraft.contracts import COMPOSITES
from polydraft.contracts.inputs import default_cases
table, wrong = PaddleTable(device), []
for name in table.providers:
    kernel = COMPOSITES.get(name) or REGISTRY[name]
    contract = contract_of(kernel)
    seeds = int(sys.argv[2]) or (name in COMPOSITES)  # whose parts have few cases in common
    for case in itertools.islice(default_cases(contract, seeds), int(sys.argv[3]) or None):
        outcome = check_kernel(kernel, case, device, table, init_meta=init_meta, products="tf32")
        wrong += [] if outcome.ok else [outcome.describe()]
print(json.dumps([wrong, len(table.providers), emu.log()]))
"""


@pytest.mark.parametrize(("seeds", "most"), [("0", "2"), deep(("20", "0"))])
def test_every_kernel_stays_within_what_a_chip_has(seeds: str, most: str):
    """With the first `most` cases of each; 0: with all."""
    from polydraft_paddle_emu.operation_lists import read

    wrong, count, (kernels, waits) = answers(START + EVERY, "polyemu:0?ops=xpu3", seeds, most)
    assert wrong == []
    assert set(waits) <= {"", "garbage collection"}, "the host waits outside launches alone, for what it has to see"
    assert len(set(kernels) - {"", "forward_meta"}) == count
    ran = {tuple(kernel.split(" in ")) for counts in kernels.values() for kernel in counts}
    assert [kernel for kernel in ran if kernel[1] not in read("xpu3").kernels[kernel[0]]] == []


CHECKS = """
import json, sys
from polydraft.conformance.catalogue import every_check
from polydraft.conformance.target import Target
target = Target("xpu", device=sys.argv[1])
found = {one.id: one.result(target) for one in every_check() if one.id in sys.argv[2:]}
print(json.dumps([[id_, result.outcome, result.message] for id_, result in found.items()]))
"""


@pytest.mark.parametrize("check", ["L5/taps/eager", deep("L5/taps/replayed"), deep("L5/ranks/experts")])
def test_rounded_factors_are_taken_for_no_fault(check: str):
    """Rows and choices that are off by what TF32 does to products, as the device declares it."""
    assert answers(CHECKS, "polyemu:0?ops=xpu3", check) == [[check, "pass", ""]]


def test_a_device_computes_in_what_it_multiplies():
    """Where an operation is missing the CPU's is no help in 16 bits: Paddle has few of them there."""
    from polydraft_paddle_emu.operation_lists import NAMES, read

    assert {name: read(name).activations for name in NAMES} == {"minimal": ("f32",), "xpu3": ("f32", "bf16", "f16")}
    found = Plugins.load("paddle", device="polyemu:0?ops=minimal").info().capabilities.dtypes
    assert (found, *Plugins.load("paddle", device="polyemu:0").info().capabilities.dtypes) == (("f32",), "f32", "bf16", "f16")


TEXT = """
import json, sys
from polydraft import LLM, SamplingParams
options, sampling = json.loads(sys.argv[1])
llm = LLM(max_num_seqs=1, max_model_len=96, **options)
out = llm.generate(["def fibonacci(n):"], SamplingParams(max_new_tokens=24, ignore_eos=True, **sampling))[0]
waits = {}
if "device" in options:
    import polydraft_paddle_emu as emu
    waits = {contract: found for contract, found in emu.log().waits.items() if contract not in ("", emu.COLLECTING)}
print(json.dumps([list(out.token_ids), llm.engine.totals.rounds, waits]))
"""
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"draft_tokens": 3, "overlap": 1, "graph": "off"}, SAMPLED),
        ({"draft_tokens": 3, "overlap": 1}, SAMPLED),
        ({"draft_tokens": 0}, {}),
        ({"draft_tokens": 3, "verify": "rejection"}, SAMPLED),
    ],
)
def test_text_is_the_references_within_what_a_chip_has(options: dict[str, Any], sampling: dict[str, Any]):
    """With products in TF32 as well: these prompts have no choices as near as that."""
    on_host = {**options, "backend": "reference", "overlap": 0, "graph": "off"}
    there = {**options, "backend": "xpu", "device": "polyemu:0?ops=xpu3"}
    reference, seen = (answers(TEXT, json.dumps([one, sampling])) for one in (on_host, there))
    assert seen == reference


ARITHMETIC = """
import numpy as np
x = np.float32([[1.0 + 2.0**-11], [1.0 + 3 * 2.0**-11], [2.0**-20], [np.inf]])
products = paddle.matmul(paddle.to_tensor(x), paddle.ones([1, 1])).numpy()[:, 0].tolist()
ties = paddle.to_tensor(np.float32([[1, 5, 5, 2], [3, 3, 3, 3], [9, 0, 0, 1]]))
found = [ties.argmax(axis=1, dtype="int32"), ties.argmax(axis=0), ties[1].argmax()]
print(json.dumps([products, *(one.numpy().tolist() for one in found)]))
"""


@pytest.mark.parametrize(
    ("ops", "products", "ties"),
    [
        ("?ops=xpu3", [1.0, 1.0 + 2.0**-9, 2.0**-20, float("inf")], [[2, 3, 0], [2, 0, 0, 1], 3]),
        deep(("", [1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 2.0**-20, float("inf")], [[1, 0, 0], [2, 0, 0, 1], 0])),
    ],
)
@pytest.mark.deep
def test_products_and_equal_maxima_are_the_chips(ops: str, products: list[float], ties: list[Any]):
    """Factors have 10 bits of mantissa, ties to even; the last of equal maxima counts, since nobody says which one does."""
    assert answers(START + ARITHMETIC, f"polyemu:0{ops}") == [products, *ties]


# -- what starts there ---------------------------------------------------------------------------------
REFUSED = """
import sys
from polydraft import LLM
from polydraft.errors import DeviceError
import paddle
from polydraft_paddle.kernels import numeric
from polydraft_paddle.provider import plain
backend, device, planted = sys.argv[1:]
if planted:
    swiglu = numeric.swiglu
    def searching(a, n):
        swiglu(a, n)
        paddle.searchsorted(*[paddle.zeros([2], "int32")] * 2)
    numeric.KERNELS["swiglu"] = plain(searching)
try:
    LLM(backend=backend, device=device, max_num_seqs=1, max_model_len=64, graph="off").engine.close()
    print("started")
except DeviceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("backend", "ops", "planted", "said"),
    [
        deep(("xpu", "xpu3", "searchsorted", f"Paddle has no kernel of 'searchsorted' in int32 {OUTSIDE}")),
        (
            "xpu",
            "minimal",
            "",
            "Paddle has no kernel of 'full_like' in int32 for device polyemu:0?ops=minimal, which scatter needs",
        ),
        deep(("xpu", "xpu3", "", "started")),
        deep(("paddle", "xpu3", "searchsorted", "started")),
    ],
)
def test_xpu_refuses_at_start_what_a_kernel_lacks(backend: str, ops: str, planted: str, said: str):
    run = forked(REFUSED, backend, f"polyemu:0?ops={ops}", planted)
    assert run.stdout.startswith(said), run.stderr[-2000:]
    assert len(run.stdout.splitlines()) == 1


# -- names of devices ----------------------------------------------------------------------------------
OPENED = """
import sys
from polydraft.backend import DeviceOptions
from polydraft.errors import PolydraftError
from polydraft_paddle import open_place
for spec in sys.argv[1:]:
    try:
        open_place(spec, DeviceOptions())
        print("opened")
    except PolydraftError as error:
        print(error)
"""


def test_options_that_there_are_not_are_one_sentence():
    run = forked(OPENED, "polyemu:0?ops=xpu2", "cpu?ops=xpu3", "polyemu:0", "polyemu:0?ops=xpu3", "polyemu:0")
    one_only = "this process has opened the device without options, which lasts until it ends; use another process"
    assert run.stdout.splitlines() == [
        "device polyemu:0?ops=xpu2: got the options 'ops=xpu2', wanted ops=minimal or ops=xpu3",
        "device cpu?ops=xpu3: got the options 'ops=xpu3', wanted none; a place of this kind has none",
        "opened",
        f"device polyemu:0?ops=xpu3: {one_only}",
        "opened",
    ], run.stderr[-2000:]


@pytest.mark.deep  # `make test` asks it on the backend `xpu`
def test_a_poor_device_names_the_first_operation_that_it_lacks():
    arguments = ("--backend", "paddle", "--device", "polyemu:0?ops=minimal", "--max-num-seqs", "1", "--max-model-len", "64")
    run = polydraft("generate", "def f(x):", *arguments)
    assert run.returncode == 1
    assert "Paddle has no kernel of 'full_like' in int32 for device polyemu:0?ops=minimal, which scatter needs" in run.stderr
