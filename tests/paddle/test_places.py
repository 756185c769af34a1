"""Several devices of Paddle in one process, and copies that must not leave their buffer: Paddle itself guards neither."""

from __future__ import annotations

import json

import pytest

from tests.support.paddle import forked, needs_device, needs_paddle, script

INTERLEAVED = """
import sys
from polydraft import Engine, EngineConfig, SamplingParams
options = dict(backend="paddle", draft_tokens=1, max_num_seqs=1, max_model_len=48, graph="off", overlap=0)
engines = [Engine(EngineConfig(device=device, **options)) for device in sys.argv[1:]]
for engine in engines:
    engine.add("def f(x):", SamplingParams(max_new_tokens=4, ignore_eos=True))
outputs = [[] for _ in engines]
while not all(outputs):
    for engine, found in zip(engines, outputs):
        engine.step()
        found += [one for one in engine.poll() if one.finished]
print([list(found[0].token_ids) for found in outputs])
for engine in engines:
    engine.close()
"""


@pytest.mark.deep
@needs_device
def test_engines_of_one_process_take_turns():
    """The second one opened took the stream, or the place, of the first one's work along."""
    run = script(INTERLEAVED, "polyemu:0", "polyemu:0", "cpu")
    assert run.returncode == 0, run.stderr[-2000:]
    texts = json.loads(run.stdout.strip().splitlines()[-1])
    assert texts == [texts[0]] * 3
    assert len(texts[0]) == 4


SHARED = """
import ctypes, sys
import numpy as np
from polydraft.backend import DeviceOptions
from polydraft_paddle import open_place

device = open_place(sys.argv[1], DeviceOptions())
buffer = device.empty("b", (2, 3), "f32")
device.load(buffer, np.full((2, 3), 7.0, np.float32))
device.synchronize()
address = buffer.tensor.data_ptr()
assert np.frombuffer(ctypes.string_at(address, 24), np.float32).tolist() == [7.0] * 6
if sys.argv[1] == "cpu":
    theirs = np.from_dlpack(buffer.tensor)
    assert theirs.ctypes.data == address
    device.load(buffer, np.full((2, 3), 8.0, np.float32))
    assert theirs.tolist() == [[8.0] * 3] * 2
else:
    assert device.stream.stream.stream_base.raw_stream
    try:
        buffer.tensor.__dlpack__()
    except (RuntimeError, NotImplementedError):
        print("no DLPack")
device.close()
"""


@needs_device
@pytest.mark.parametrize(("spec", "said"), [("cpu", ""), ("polyemu:0", "no DLPack")])
def test_memory_is_exchanged_without_a_copy_as_the_page_says(spec: str, said: str):
    run = forked(SHARED, spec)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == said


TOO_LONG = """
import paddle
from polydraft_paddle.ops import put
small, behind = paddle.zeros([4]), paddle.zeros([4])
for shape in ([8], [2], [4, 1]):
    try:
        put(small, paddle.ones(shape))
    except Exception as error:
        print(type(error).__name__, error)
print(small.shape, float(small.sum()))
"""


@needs_paddle
def test_a_result_of_another_shape_is_refused_and_not_copied():
    """Paddle's `copy_` takes on the shape of what it copies, and writes past the end of the memory it had."""
    lines = forked(TOO_LONG).stdout.strip().splitlines()
    assert lines[0] == ("ContractError a kernel's result has shape (8,), wanted (4,); bind buffers of the launch's capacity")
    assert len(lines) == 4
    assert lines[3].endswith(("[4]) 0.0", "[4] 0.0"))  # Paddle 3.2 has lists of sizes
