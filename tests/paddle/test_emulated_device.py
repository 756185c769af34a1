"""The emulated Paddle device itself: memory of graphs, what happens when it is short, and that a process ends quietly then."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from tests.support.paddle import needs_graphs, script
from tests.support.project import ROOT

MEMORY = """
from polydraft_paddle.installation import import_paddle
import_paddle()
import paddle
import polydraft_paddle_emu as device
from polydraft.backend import DeviceOptions
from polydraft.errors import DeviceError
from polydraft_paddle import open_place, polydraft_graph_capture

place = open_place("polyemu:0", DeviceOptions())
x, out = paddle.ones([1024, 256]), paddle.zeros([1024, 256])
nbytes = 1024 * 256 * 4

def long_chain():
    y = x
    for _ in range(50):
        y = y + 1.0
    out.copy_(y, False)

capture = polydraft_graph_capture(place)
graphs = [capture.capture(place.stream, long_chain) for _ in range(3)]
print("blocks", device.counter("graph_bytes") // nbytes)
others = [paddle.full([1024, 256], 7.0) for _ in range(60)]  # what Paddle's pool hands out meanwhile
for graph in graphs:
    out.zero_()
    graph.replay(place.stream)
    place.synchronize()
    assert float(out.min()) == float(out.max()) == 51.0
assert all(float(other.min()) == float(other.max()) == 7.0 for other in others), "a graph wrote over memory of others"

def too_much():
    kept = [x + 1.0 for _ in range(8)]

device.set_knob("bytes_limit", device.counter("bytes_in_use") + 2 * nbytes)
try:
    capture.capture(place.stream, too_much)
except DeviceError as error:
    print(error)
"""


@needs_graphs
@pytest.mark.deep
def test_graphs_share_memory_of_their_own():
    """Fifty results of a graph need room for two, three graphs no more, and nobody else is ever given it. Where it is short there
    is one sentence, and the process ends as it should with four graphs that nobody has given back, one of them never finished."""
    run = script(MEMORY)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr[-2000:]
    blocks, short = run.stdout.splitlines()
    assert int(blocks.split()[1]) <= 3
    assert short.startswith("device polyemu:0 could not capture a step: (ResourceExhausted) no 1048576 bytes of device memory")
    assert short.endswith("; use --graph off")


def test_building_without_what_it_takes_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    """Without build isolation, which Paddle's headers ask for, nobody else looks at the version of setuptools."""
    setuptools: Any = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    monkeypatch.syspath_prepend(str(ROOT / "plugins" / "paddle-device-skeleton"))
    monkeypatch.delitem(sys.modules, "build_device", raising=False)
    with pytest.raises(SystemExit, match=r"needs setuptools 77 or newer, got 65\.5\.0; pip install 'setuptools>=77' wheel"):
        importlib.import_module("build_device")
