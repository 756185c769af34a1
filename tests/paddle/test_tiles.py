"""Attention by tiles of rows on a device of its own: when it is taken, and that it says what rows one by one say."""

from __future__ import annotations

import json

import pytest

from tests.support.depth import deep
from tests.support.paddle import forked, needs_device, needs_paddle, script

SHAPES = """
import json
from polydraft_paddle.installation import import_paddle
import_paddle()
from polydraft_paddle.tiles import Heads, shape_of
seven = Heads(32, 8, 128)
many = (128, 32, 4, True), (128, 32, 4, False), (512, 1, 4, False)
few = (32, 8, 4, True), (4, 1, 4, True), (32, 32, 4, True), (8, 8, 1, True)
print(json.dumps([shape_of(*case[:3], seven, windows_alone=case[3]) for case in many + few]))
"""


@needs_paddle
def test_tiles_are_enough_for_whatever_the_rows_are_and_taken_where_they_cost_less():
    run = script(SHAPES)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == [[32, 4], [56, 4], [32, 16], [8, 4], [1, 4], None, None]


KERNEL = """
import json, sys
(size, most), (place, dtype, products) = map(int, sys.argv[1:3]), sys.argv[3:]
from polydraft.backend import DeviceOptions
from polydraft.conformance.harness import check_kernel
from polydraft.contracts import REGISTRY
from polydraft.contracts.inputs import default_cases
from polydraft_paddle import open_place, polydraft_init_forward_meta
device = open_place(place, DeviceOptions(dtype=dtype))
from polydraft_paddle import row_layout
from polydraft_paddle.kernels import numeric
from polydraft_paddle.table import PaddleTable
from polydraft_paddle.tiles import Shape, Tiles
made = []
class Made(Tiles):
    def __init__(self, *arguments):
        made.append(arguments[-1])
        super().__init__(*arguments)
row_layout.Tiles, numeric.MOST_GATHERED = Made, most
numeric.MOST_BY_ROW = numeric.MOST_IN_ONE = 0
row_layout.shape_of = lambda rows, slots, window, heads, **_: Shape((rows + min(slots, rows) * (size - 1)) // size, size)
kernel, table, wrong, count = REGISTRY["paged_attention"], PaddleTable(device), [], 0
for init_meta in (polydraft_init_forward_meta, None):
    for case in default_cases(kernel, 2):
        outcome = check_kernel(kernel, case, device, table, act=dtype, init_meta=init_meta, products=products)
        count, wrong = count + 1, wrong + ([] if outcome.ok else [outcome.describe()])
print(json.dumps([count, len(made), wrong]))
"""
ALL = 1 << 28


@needs_device
@pytest.mark.parametrize(
    ("size", "most", "device", "dtype"),
    [
        (4, ALL, "polyemu:0", "f32"),
        *(deep((size, most, "polyemu:0", dtype)) for size, most, dtype in ((2, ALL, "bf16"), (3, 1, "f32"), (16, ALL, "f16"))),
        deep((4, 1, "polyemu:0?ops=xpu3", "f32")),  # a tile at a time
    ],
)
def test_the_kernel_holds_by_tiles_broken_keys_and_values_included(size: int, most: int, device: str, dtype: str):
    run = script(KERNEL, str(size), str(most), device, dtype, "tf32" if "xpu3" in device else "f32")
    assert run.returncode == 0, run.stderr[-2000:]
    count, made, wrong = json.loads(run.stdout)
    assert wrong == []
    assert count > 30
    assert made > 0.9 * count  # all but those with a sliding window


TEXTS = """
import json, sys
from polydraft import LLM, SamplingParams
graph, device = sys.argv[1:]
taken = set()

def shape_of(rows, slots, window, heads, *, windows_alone):
    slots = max(1, min(slots, rows))
    size = window if windows_alone and window > 1 else 4
    taken.add((windows_alone, size))
    return Shape(slots if windows_alone and window > 1 else (rows + slots * (size - 1)) // size, size)

texts = ["def fibonacci(n):", "import os", "class A:", "for i in range(10):", "# The", "x = [1, 2, 3]"]
said = []
for by_tiles in (False, True):
    if by_tiles:
        from polydraft_paddle import row_layout
        from polydraft_paddle.kernels import numeric
        from polydraft_paddle.tiles import Shape
        numeric.MOST_BY_ROW = numeric.MOST_IN_ONE = 0
        row_layout.shape_of = shape_of
    llm = LLM(backend="paddle", device=device, draft_tokens=2, max_num_seqs=4, max_model_len=64, graph=graph)
    out = llm.generate(texts, SamplingParams(max_new_tokens=20, ignore_eos=True))
    said.append([[list(one.token_ids), list(one.rounds)] for one in out])
    llm.engine.close()
print(json.dumps([said, sorted(taken)]))
"""


@needs_device
@pytest.mark.parametrize("graph", ["off", deep("auto")])
def test_texts_and_rounds_are_those_of_rows_one_by_one(graph: str):
    """Whole windows are one tile each where no prompt is among them."""
    run = forked(TEXTS, graph, "polyemu:0")
    assert run.returncode == 0, run.stderr[-2000:]
    (rows, tiles), taken = json.loads(run.stdout.splitlines()[-1])
    assert tiles == rows
    assert [True, 3] in taken
    assert [False, 4] in taken
