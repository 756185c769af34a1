"""Activations, weights and KV rows of 16 bits on devices of Paddle: kernels within the kit's tolerances, texts that part from the
exact ones at near-ties alone, and weights that are never whole in float32 there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import half
from tests.support.depth import deep
from tests.support.paddle import forked, needs_device, needs_graphs, script
from tools import make_checkpoint

pytestmark = needs_device

KERNELS = """
import json, sys
from polydraft.backend import DeviceOptions
from polydraft.conformance.harness import check_kernel
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.inputs import default_cases
from polydraft_paddle import open_place, polydraft_init_forward_meta as init_meta, polydraft_kernels
spec, seeds, products, *dtypes = sys.argv[1:]
wrong = []
for act in dtypes:
    device = open_place(spec, DeviceOptions(dtype=act))
    table = polydraft_kernels(device)
    for name in table.providers:
        kernel = COMPOSITES.get(name) or REGISTRY[name]
        for case in default_cases(kernel, int(seeds)):
            outcome = check_kernel(kernel, case, device, table, act=act, init_meta=init_meta, products=products)
            wrong += [] if outcome.ok else [outcome.describe()]
    device.close()
print(json.dumps(wrong))
"""


@pytest.mark.parametrize(
    ("spec", "seeds", "products", "dtypes"),
    [
        deep(("polyemu:0", "0", "f32", ("bf16",))),
        deep(("polyemu:0?ops=xpu3", "0", "tf32", ("bf16", "f16"))),
        deep(("polyemu:0", "20", "f32", ("bf16", "f16"))),
    ],
)
def test_every_kernel_holds_in_16_bits(spec: str, seeds: str, products: str, dtypes: tuple[str, ...]):
    run = script(KERNELS, spec, seeds, products, *dtypes)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == []


ROUTER = """
import numpy as np
from polydraft.backend import DeviceOptions
from polydraft_paddle import open_place, polydraft_kernels

table = polydraft_kernels(open_place("polyemu:0", DeviceOptions(dtype="bf16")))
for value in (np.array([1.0, 1.001, -2.003], np.float32), np.array([[0.1, 0.2], [0.3, 1.001]], np.float32)):
    weight = table.prepare_weight("router", value, "bf16")
    assert weight.tensor.numpy().tolist() == value.tolist()
    again = table.prepare_weight("router", value + 1, "bf16", weight)
    assert again.tensor.numpy().tolist() == (value + 1).tolist()
    assert table.prepare_weight("linear", np.ones((2, 2), np.float32), "bf16").tensor.dtype != weight.tensor.dtype
"""


def test_a_router_keeps_what_16_bits_would_round():
    """Scores of experts differ by less, so that others would be chosen."""
    run = script(ROUTER)
    assert run.returncode == 0, run.stderr[-2000:]


ROUNDED = """
import json
import numpy as np
from polydraft_paddle.installation import import_paddle
import_paddle()
import paddle
paddle.set_device("polyemu:0")
tiny = [0, 7e-26, 2**-26, 2**-25, 3 * 2**-25, 2**-24, 1e-5, 2**-14]
numbers = np.float32([*tiny, 1 / 3, 1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, np.inf, np.nan])
numbers = np.concatenate([numbers, -numbers, np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 1e-5])
seen = paddle.to_tensor(numbers).astype("float16")
with np.errstate(over="ignore"):
    wanted = numbers.astype(np.float16)
back = seen.astype("float32").numpy()
doubled = (seen + seen).astype("float32").numpy()
equal = [np.array_equal(back, wanted.astype(np.float32), equal_nan=True)]
with np.errstate(over="ignore"):
    equal.append(np.array_equal(doubled, (wanted + wanted).astype(np.float32), equal_nan=True))
print(json.dumps(equal))
"""


@pytest.mark.deep
def test_float16_is_rounded_to_nearest():
    """Paddle's own conversion makes 7e-26 into 1.25e-6."""
    run = script(ROUNDED)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == [True, True]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("backend", "device", "family", "dtype", "graph"),
    [
        ("paddle", "polyemu:0", "mimo", "bf16", "auto"),
        ("xpu", "polyemu:0?ops=xpu3", "mimo", "f16", "off"),
        ("paddle", "polyemu:0", "glm4-moe", "f16", "auto"),
        ("xpu", "polyemu:0?ops=xpu3", "glm4-moe", "bf16", "auto"),
        ("xpu", "polyemu:0?ops=xpu3", "ernie", "bf16", "auto"),
    ],
)
def test_texts_part_from_the_exact_ones_at_near_ties_alone(
    tmp_path: Path, backend: str, device: str, family: str, dtype: str, graph: str, record_property: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    make_checkpoint.make(tmp_path, make_checkpoint.FAMILIES[family], dtype="BF16" if dtype == "bf16" else "F16")
    parted = half.parted(tmp_path, backend, device, dtype, graph=graph)
    record_property("near_ties", len(parted))
    with capsys.disabled():
        sys.stdout.write(f"\n{backend} on {device}, {family} in {dtype}: {len(half.PROMPTS)} texts, {len(parted)} near-ties\n")
    assert all(divergence.gap < half.CLOSE[dtype] for divergence in parted), parted
    assert len(parted) < len(half.PROMPTS), "few texts part at all"


def test_experts_are_chosen_by_what_16_bits_would_round(tmp_path: Path):
    parted = half.parted(half.with_close_selection_biases(tmp_path), "paddle", "polyemu:0", "bf16")
    assert all(divergence.gap < half.CLOSE["bf16"] for divergence in parted), parted


LOADED = """
import json
import numpy as np
from polydraft.backend import DeviceOptions
from polydraft_paddle import open_place
import polydraft_paddle_emu as emu
device = open_place("polyemu:0", DeviceOptions(dtype="bf16"))
weight = device.empty("weight", (1 << 14, 2048), "bf16")
value = np.random.default_rng(0).standard_normal(weight.shape, np.float32)
before = emu.counter("peak_bytes")
device.load(weight, value)
grew = emu.counter("peak_bytes") - before
error = np.abs(weight.tensor.astype("float32").numpy() - value) - np.abs(value) * 2.0**-8
print(json.dumps([grew / value.nbytes, float(error.max())]))
"""


@pytest.mark.deep
def test_a_weight_is_converted_part_by_part():
    run = script(LOADED)
    assert run.returncode == 0, run.stderr[-2000:]
    share, error = json.loads(run.stdout)
    assert share < 1.3, "of its bytes in float32 the device needs, which converted whole would be 1.5"
    assert error <= 0


UPDATED = """
import json, sys
from polydraft import LLM, SamplingParams
from polydraft_paddle import fused
first, second, device, *without = sys.argv[1:]
for operation in without:
    del fused.TRIALS[operation]
options = dict(backend="paddle", device=device, draft_tokens=3, max_num_seqs=2, max_model_len=64, dtype="bf16")

def texts(llm):
    out = llm.generate([[3, 1, 4], [2, 7, 1, 8]], SamplingParams(max_new_tokens=16, ignore_eos=True))
    return [list(one.token_ids) for one in out]

llm, fresh = LLM(model=first, **options), LLM(model=second, **options)
before = texts(llm)
llm.update_weights(second)
print(json.dumps([before, texts(llm), texts(fresh)]))
llm.engine.close()
fresh.engine.close()
"""


@pytest.mark.parametrize(
    "without", [pytest.param((), id="read in 16 bits", marks=pytest.mark.deep), pytest.param(("mixed_product",), id="a copy")]
)
def test_new_weights_reach_a_head_whose_logits_are_float32(tmp_path: Path, without: tuple[str, ...]):
    """Where the place multiplies float32 by 16 bits, and where the head has a copy that was made when it was bound."""
    for name, seed in (("first", 1), ("second", 2)):
        make_checkpoint.make(tmp_path / name, make_checkpoint.FAMILIES["mimo"], seed=seed, dtype="BF16")
    run = forked(UPDATED, str(tmp_path / "first"), str(tmp_path / "second"), "polyemu:0", *without)
    assert run.returncode == 0, run.stderr[-2000:]
    before, after, fresh = json.loads(run.stdout)
    assert after == fresh != before


OFFERED = """
import json
from polydraft.backend import DeviceOptions
from polydraft_paddle import fused, open_place
device = open_place("polyemu:0", DeviceOptions())
print(json.dumps(sorted([name, str(dtype).rpartition(".")[2]] for name, dtype in fused._FOUND[device.place])))
"""


@needs_graphs
def test_what_a_place_fuses_is_tried_in_each_dtype():
    run = forked(OFFERED)
    assert run.returncode == 0, run.stderr[-2000:]
    found = {dtype: {name for name, of in json.loads(run.stdout) if of == dtype} for dtype in ("float32", "bfloat16", "float16")}
    assert found["bfloat16"] == {"rms_norm_ext", "add_and_norm", "swiglu", "linear", "mixed_product", "attend"}
    assert found["float16"] == found["bfloat16"] - {"attend"}, "no number of float16 hides a place whatever its score is"
    assert found["float32"] >= found["bfloat16"] - {"mixed_product"} | {"rotate", "softmax", "argmax"}


WITHOUT_CAST = """
import paddle
from polydraft.backend import DeviceOptions
from polydraft_paddle import open_place
device = open_place("cpu", DeviceOptions())
def cast(tensor, dtype):
    raise NotImplementedError("The kernel `cast` is not registered.")
paddle.Tensor.astype = cast
print(device.empty("rows", (31, 1), "f16").tensor.and_behind[31:].numpy().tolist())
"""


def test_memory_of_float16_is_had_where_nothing_converts_to_it():
    run = forked(WITHOUT_CAST)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == [[0.0]]
