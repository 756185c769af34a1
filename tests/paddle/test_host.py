"""The Paddle backend's CPU place: who sees which keys however a pass falls into windows, whose kernels work on the memory of
tensors, and how many threads a product gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "backends" / "paddle"))
from polydraft_paddle import threads

from tests.support.paddle import forked, needs_device, needs_paddle

LAYOUTS = '''
import numpy as np
from polydraft_paddle.installation import import_paddle
import_paddle()
import paddle
paddle.set_device("cpu")
from polydraft_paddle.host_layout import HostLayout
from polydraft_paddle.ops import Kept

SIZE, WINDOW, HEADS, KV, ROWS = 4, 3, 4, 2, 8 * 5 * 4  # of a block; block table: 8 slots of 5 blocks
random = np.random.default_rng(0)
table = random.permutation(40).reshape(8, 5).astype(np.int32)
kept = Kept()

def expand(runs):
    """(slot, first position, rows) each, slot -1 for rows that carry nothing, whose position may be anything."""
    slots = np.concatenate([np.full(n, slot, np.int32) for slot, _, n in runs])
    return slots, np.concatenate([np.arange(p, p + n) if slot >= 0 else np.full(n, 99) for slot, p, n in runs]).astype(np.int32)

def check(name, runs, segments):
    slots, positions = expand(runs)
    layout = HostLayout(kept, row_slot=slots, positions=positions, block_table=table, block_size=SIZE, window=WINDOW)
    assert layout.complete == (slots >= 0).all() and layout.some, name
    at = lambda slot, places: table[slot, places // SIZE] * SIZE + places % SIZE
    moved = layout.head_rows(HEADS, KV, 2 * ROWS + 1)
    heads = moved.heads.numpy().reshape(-1)
    each = np.arange(len(slots))[:, None] * (HEADS + 2 * KV)
    wanted = [each + np.arange(HEADS), each + np.arange(HEADS, HEADS + KV), each + np.arange(HEADS + KV, HEADS + 2 * KV)]
    assert (heads == np.concatenate([w.ravel() for w in wanted])).all(), name
    turned = heads[: len(slots) * (HEADS + KV)]
    assert (moved.halves.numpy() == np.stack([2 * turned + 1, 2 * turned], 1).ravel()).all(), name
    row_of = turned // (HEADS + 2 * KV)
    assert (moved.positions.numpy() == np.where(slots >= 0, positions, 0)[row_of]).all(), name
    to = np.where(slots >= 0, at(slots, np.where(slots >= 0, positions, 0)), 2 * ROWS)
    assert (moved.destinations.numpy() == np.concatenate([to, np.where(slots >= 0, to + ROWS, to)])).all(), name
    made = layout.segments(HEADS, KV)
    assert len(made) == segments, (name, len(made))
    met = []
    for one in made:
        keys = one.keys.numpy()[..., 0]
        runs_, groups, count = len(keys), HEADS // KV, keys.shape[2]
        rows = np.arange(len(slots)) if one.rows is None else one.rows.numpy()
        q = np.arange(len(rows) * HEADS).reshape(runs_, KV, -1) if one.q is None else one.q.numpy()[..., 0]
        out = np.arange(q.size).reshape(len(rows), KV, groups) if one.out is None else one.out.numpy()[..., 0]
        mask = np.zeros((*q.shape, count), np.float32) if one.mask is None else one.mask.numpy()
        flat = q.reshape(-1), mask.reshape(-1, count), np.broadcast_to(keys[:, :, None], (*q.shape, count)).reshape(-1, count)
        for i, row in enumerate(rows):
            if slots[row] < 0:
                assert one.rows is None
                continue
            met.append(row)
            for head in range(HEADS):
                place = out[i, head // groups, head % groups]
                assert flat[0][place] == row * HEADS + head, name
                seen = flat[2][place][flat[1][place] == 0]
                assert (seen == at(slots[row], np.arange(positions[row] + 1)) * KV + head // groups).all(), (name, row)
            assert set(np.unique(mask)) <= {0.0, -np.inf}
    assert met == sorted(met) or segments > 1, name
    assert sorted(met) == (slots >= 0).nonzero()[0].tolist(), name
    if not layout.complete:
        assert layout.empty.numpy().tolist() == (slots < 0).nonzero()[0].tolist(), name
    return made

for turn in range(2):  # the second time over tensors that are kept
    assert check("windows", [(0, 7, 3), (3, 0, 3), (5, 16, 3)], 1)[0].rows is None
    assert check("windows of which less is left", [(0, 7, 1), (-1, 0, 2), (3, 0, 3), (5, 16, 2), (-1, 0, 1)], 1)[0].rows is None
    assert check("a window that is nobody's", [(2, 7, 3), (-1, 0, 3), (2, 10, 3)], 1)[0].rows is None
    assert check("rows alone", [(4, 3, 1), (2, 8, 1), (-1, 0, 2), (6, 0, 1)], 1)[0].q is None
    assert check("one row", [(4, 3, 1)], 1)[0].q is None
    assert check("windows of different lengths", [(0, 7, 2), (3, 0, 3), (5, 16, 1)], 1)[0].rows is not None
    assert check("a window behind rows of nobody", [(-1, 0, 1), (3, 4, 2), (1, 4, 3)], 1)[0].rows is not None
    check("a long run beside windows", [(0, 7, 2), (3, 0, 9), (5, 16, 1)], 2)
    check("a run of whole windows", [(3, 0, 9)], 1)
    check("two long runs", [(3, 0, 5), (1, 2, 6), (2, 1, 1)], 3)
    full = HostLayout(kept, row_slot=np.full(3, -1, np.int32), positions=np.zeros(3, np.int32), block_table=table,
                      block_size=SIZE, window=WINDOW)
    assert not full.some and not full.complete
table[3, 1] = -1  # a block that is not granted: its rows go to the spare row
slots, positions = expand([(3, 2, 3)])
layout = HostLayout(kept, row_slot=slots, positions=positions, block_table=table, block_size=SIZE, window=WINDOW)
block = table[3, 0] * SIZE
wanted = [block + 2, block + 3, 2 * ROWS, ROWS + block + 2, ROWS + block + 3, 2 * ROWS]
assert layout.head_rows(HEADS, KV, 2 * ROWS + 1).destinations.numpy().tolist() == wanted
print("seen")
'''


SOFTMAX = """
import numpy as np
from polydraft_paddle.installation import import_paddle
import_paddle()
import paddle
paddle.set_device("cpu")
from polydraft_paddle.kernels.host_attention import mix

random = np.random.default_rng(0)
q, k, v = (random.standard_normal(shape, np.float32) for shape in ((2, 3, 4, 8), (2, 3, 20, 8), (2, 3, 20, 8)))
hidden = np.zeros((2, 3, 4, 20), np.float32)
hidden[..., :2, 15:] = -np.inf

def mixed(q, k, v, mask=None):
    result, sound = mix(*(paddle.to_tensor(t) for t in (q, k, v)), None if mask is None else paddle.to_tensor(mask))
    return result.numpy(), np.isfinite(sound)

def wanted(q, k, v, mask=0.0):
    scores = np.float64(q) @ np.float64(k).swapaxes(2, 3) + mask
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    return weights / weights.sum(axis=3, keepdims=True) @ v

def near(q, k, *rest):
    got, sound = mixed(q, k, *rest)
    assert sound and np.abs(got - wanted(q, k, *rest)).max() < 1e-5

near(q, k, v)
near(q, k, v, hidden)
for scale in (8.0, 100.0):  # with the higher, exponentials overflow
    near(scale * q, k, v, hidden)
low = np.concatenate([q, np.full((2, 3, 4, 1), -1, np.float32)], 3)
for depth in (60.0, 84.0, 200.0):  # all scores of a row far below 0: some exponentials vanish, then all
    deep = np.concatenate([k, np.full((2, 3, 20, 1), depth, np.float32)], 3)
    near(low, deep, v, hidden)
for place in range(2):
    broken = [k.copy(), v.copy()]
    broken[place][1, 2, 3, 4] = np.nan
    assert not mixed(q, *broken)[1]
    assert not mixed(100 * q, *broken)[1]
print("seen")
"""


SHARED = """
import gc
from polydraft.backend import DeviceOptions
from polydraft_paddle import open_place, polydraft_kernels

device = open_place("cpu", DeviceOptions())
for shape, dtype in (((4, 0), "i32"), ((3, 2), "u32"), ((5,), "f32"), ((2, 3), "i32")):
    buffer = device.empty("x", shape, dtype)
    array = buffer.host_array
    assert array.shape == shape and array.dtype.kind == dtype[0], (dtype, array.dtype)
    array[...] = 7
    assert (buffer.tensor.numpy() == 7).all(), dtype
before = device.empty("x", (1 << 16,), "i32").host_array
before[...] = 7
gc.collect()
after = [device.empty("y", (1 << 16,), "i32").host_array for _ in range(4)]
for array in after:
    array[...] = 9
assert (before == 7).all(), "memory of a tensor was given back while an array of it was there"
providers = polydraft_kernels(device).providers
print([type(providers[name]).__name__ for name in ("scatter", "advance_draft", "linear")])
"""


@needs_paddle
def test_state_kernels_are_the_references_over_the_memory_of_tensors():
    run = forked(SHARED)
    assert run.stdout == "['EagerProvider', 'EagerProvider', 'PaddleProvider']\n", run.stderr[-3000:]


@needs_device
def test_no_kernel_in_numpy_is_bound_where_the_host_does_not_see_the_memory():
    """Kernel packs look for `bind_kernel`, and leave a device without it alone (docs/plugins.md)."""
    code = "from polydraft_paddle import open_place; from polydraft.backend import DeviceOptions\n"
    run = forked(code + "print([hasattr(open_place(spec, DeviceOptions()), 'bind_kernel') for spec in ('cpu', 'polyemu:0')])")
    assert run.stdout.endswith("[True, False]\n"), run.stdout + run.stderr[-3000:]


@needs_paddle
def test_attention_is_softmax_however_high_or_low_the_scores_are():
    run = forked(SOFTMAX)
    assert run.stdout == "seen\n", run.stderr[-3000:]


@needs_paddle
def test_every_row_sees_its_own_keys_and_no_others():
    run = forked(LAYOUTS)
    assert run.stdout == "seen\n", run.stderr[-3000:]


@pytest.mark.parametrize(
    ("said", "wanted"),
    [("", 5), ("1", 1), ("3", 3), ("2,4", 2), ("0", 1), ("many", 5)],
)
def test_threads_are_the_users_number_or_the_processors(monkeypatch: pytest.MonkeyPatch, said: str, wanted: int):
    monkeypatch.setattr(threads, "_COUNT", [1])
    monkeypatch.setattr(threads, "processors", lambda: 5)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.delitem(sys.modules, "paddle", raising=False)
    threads.note_wanted()
    assert threads.count() == wanted


def test_threads_stay_as_they_are_where_paddle_is_there_already(monkeypatch: pytest.MonkeyPatch):
    """It has overwritten the variable by then."""
    monkeypatch.setattr(threads, "_COUNT", [2])
    monkeypatch.setattr(threads, "processors", lambda: 5)
    monkeypatch.setitem(sys.modules, "paddle", threads)
    threads.note_wanted()
    assert threads.count() == 2


def test_a_large_product_gets_all_threads_and_gives_them_back(monkeypatch: pytest.MonkeyPatch):
    changes: list[int] = []
    monkeypatch.setattr(threads, "_COUNT", [4])
    monkeypatch.setattr(threads, "_change", lambda: changes.append)
    assert threads.spread(threads.MANY - 1, max, 1, 2) == 2
    assert changes == []
    assert threads.spread(threads.MANY, max, 1, 2) == 2
    assert changes == [4, 1]
    with pytest.raises(ZeroDivisionError):
        threads.spread(threads.MANY, lambda: 1 // 0)
    assert changes == [4, 1, 4, 1]


@needs_paddle
def test_paddle_says_nothing_about_several_threads():
    """It would write two lines to standard error for each process with more than one."""
    code = (
        "from polydraft import LLM, SamplingParams; from polydraft_paddle import threads\n"
        "out = LLM(backend='paddle', draft_tokens=1, max_num_seqs=1, max_model_len=32, block_size=16)"
        ".generate(['x'], SamplingParams(max_new_tokens=2))\n"
        "print(out[0].finish_reason, threads.count())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert (run.stdout.split(), run.stderr) == (["length", "2"], "")


NARROW = """
import numpy as np
from polydraft_paddle.installation import import_paddle
import_paddle()
import paddle
paddle.set_device("cpu")
from polydraft_paddle.kernels import host

host.processor = lambda: ("AuthenticAMD", frozenset({"avx", "avx2", "fma"}))
host.fused_rms_norm = None  # is not to be called
x, weight = np.random.default_rng(0).standard_normal((3, 64), np.float32), np.linspace(0.5, 2, 64, dtype=np.float32)
for plus_one in (False, True):
    found = host.normalized(paddle.to_tensor(x), paddle.to_tensor(weight), 1e-5, plus_one).numpy()
    wanted = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * (weight + plus_one)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
"""


@needs_paddle
def test_a_processor_without_avx_512_norms_by_other_operations():
    """Paddle's fused norm ends the process there with an illegal instruction."""
    done = forked(NARROW)
    assert done.returncode == 0, done.stderr
