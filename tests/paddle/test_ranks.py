"""Ranks on Paddle places: several processes write what one device writes, and whatever goes wrong with a rank is named."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from polydraft_paddle import describe
from polydraft_paddle.device_name import of_rank

from tests.support.depth import first
from tests.support.of_ranks import on_one_rank
from tests.support.paddle import forked, needs_device, needs_graphs, needs_paddle, script

SERVED = """
import json, sys
from polydraft import LLM
from tests.support import tiny
from tests.support.of_ranks import OPTIONS, served
from tests.support.runs import essence
options = json.loads(sys.argv[1])
model = options.pop("model")
llm = LLM(model=str(tiny.checkpoint(model)), plugins=tiny.PLUGINS, **OPTIONS, **options)
found = [dict(essence(output)) for output in served(llm.engine, model)]
counts = llm.engine.scheduler.num_preemptions, llm.engine.ledger.num_hits, llm.engine.device.counters.graph_replays
llm.engine.close()
print(json.dumps([found, counts], default=str))
"""


def plain(value: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(value, default=str))


def same_as_one_rank(model: str = "narrow", *, draft_tokens: int = 3, graph: str = "off", **options: Any) -> None:
    given = {"model": model, "tensor_parallel": 2, "draft_tokens": draft_tokens, "graph": graph, **options}
    run = forked(SERVED, json.dumps(given))
    assert run.returncode == 0, run.stderr[-3000:]
    found, (preemptions, hits, replays) = json.loads(run.stdout.splitlines()[-1])
    assert found == plain(on_one_rank(model, draft_tokens))
    assert preemptions > 0
    assert hits > 0
    assert (replays > 0) == (graph != "off")


EMULATED = {"backend": "paddle", "device": "polyemu:0"}


@needs_device
@pytest.mark.timeout(300)
@pytest.mark.parametrize("draft_tokens", first(1, [3, 0]))
def test_two_processes_write_what_one_device_writes(draft_tokens: int):
    same_as_one_rank(draft_tokens=draft_tokens, **EMULATED)


@pytest.mark.deep
@needs_graphs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_collectives_lie_in_graphs(draft_tokens: int):
    same_as_one_rank(draft_tokens=draft_tokens, graph="decode", **EMULATED)


@pytest.mark.deep
@needs_device
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("narrow", {"tensor_parallel": 4}),
        ("sparse-glm", {}),
        ("sparse-glm", {"expert_parallel": True}),
        ("with-biases", {"overlap": 0}),
        ("narrow", {"backend": "xpu", "device": "polyemu:0?ops=xpu3"}),
        ("narrow", {"device": "cpu"}),
        ("sparse-glm", {"device": "cpu", "expert_parallel": True}),
    ],
)
def test_models_places_and_lists_of_operations(model: str, options: dict[str, Any]):
    """With the operations of a chip nothing waits for the host, either."""
    same_as_one_rank(model, **{**EMULATED, **options})


ENDED = """
import os, signal, sys, time
from polydraft import LLM, SamplingParams
from polydraft.ranks import exchange
from tests.support import tiny
from tests.support.of_ranks import OPTIONS
exchange.PATIENCE_S = 2.0
device, fatal = sys.argv[1], getattr(signal, sys.argv[2])
llm = LLM(model=str(tiny.checkpoint("narrow")), plugins=tiny.PLUGINS, **OPTIONS, backend="paddle", device=device, draft_tokens=1,
          graph="off", tensor_parallel=2)
params = SamplingParams(max_new_tokens=12, ignore_eos=True)
print(llm.generate(["x"], params)[0].finish_reason)
(channel,) = llm.engine._followers._channels
os.kill(channel._process.pid, fatal)
begin = time.monotonic()
print(llm.generate(["x"], params)[0].error)
assert time.monotonic() - begin < 20
channel._process.kill()
llm.engine.close()
"""


@pytest.mark.deep
@needs_device
@pytest.mark.parametrize("device", ["cpu", "polyemu:0"])
@pytest.mark.parametrize(("fatal", "sentence"), [("SIGKILL", "ended: SIGKILL, Killed"), ("SIGSTOP", "rank 1 ")])
def test_a_rank_that_dies_or_stops_ends_all(device: str, fatal: str, sentence: str):
    run = script(ENDED, device, fatal)
    assert run.returncode == 0, run.stderr[-3000:]
    before, error = run.stdout.strip().splitlines()
    assert before == "length"
    assert sentence in error
    assert error.endswith("every rank ends here, start the engine again")


LEFT = """
import os, signal, sys, time
from polydraft import LLM, SamplingParams
from tests.support import tiny
from tests.support.of_ranks import OPTIONS
llm = LLM(model=str(tiny.checkpoint("narrow")), plugins=tiny.PLUGINS, **OPTIONS, backend="paddle", device=sys.argv[1],
          draft_tokens=1, graph="off", tensor_parallel=2)
engine = llm.engine
engine.add((1, 2, 3), SamplingParams(max_new_tokens=40, ignore_eos=True))
for _ in range(6):
    engine.step()
engine._followers.send(engine.scheduler.plan())
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.deep
@needs_device
@pytest.mark.timeout(100)
@pytest.mark.parametrize("device", ["cpu", "polyemu:0"])
def test_no_rank_outlives_rank_0(device: str):
    """The other one waits in a collective to which rank 0 will not come; it holds the pipes that the script waits for."""
    assert script(LEFT, device, timeout=80).returncode == -signal.SIGKILL


SERVING = """
import socket
from polydraft_paddle import ranks
taken = socket.socket()
taken.bind(("127.0.0.2", 0))
taken.listen()
class Choosing(socket.socket):
    def bind(self, address):
        try:
            super().bind((address[0], taken.getsockname()[1]))  # the system may choose any that is free there
        except OSError:
            super().bind(address)
ranks.socket.socket = Choosing
server, port = ranks._serve()
print(port != taken.getsockname()[1])
"""


@pytest.mark.deep
@needs_paddle
def test_the_stores_port_is_free_on_every_interface():
    """Where another process listens on one of them, Paddle's store ends this one."""
    run = script(SERVING)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "True"


CHECKED = """
import sys
from polydraft.conformance import collective_checks
from polydraft.conformance.target import Target
target = Target("paddle", device=sys.argv[1])
for check in collective_checks.checks():
    result = check.result(target)
    print(check.id, result.outcome, result.message)
"""


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=needs_paddle), pytest.param("polyemu:0", marks=needs_device)])
def test_collectives_keep_their_contracts(device: str):
    run = script(CHECKED, device, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    found = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert found.pop("L2/collectives/ordered-sums").strip() == "unsupported capability ordered_sums is not declared"
    assert {said.strip() for said in found.values()} == {"pass"}
    assert len(found) == 8


# -- what is declared --------------------------------------------------------------------------------
def test_who_is_a_rank_and_where():
    found = {spec: describe("paddle", "", spec).capabilities for spec in ("cpu", "polyemu:0", "xpu:0", "mychip:1", "polycuda:0")}
    ranks = {spec: (one.ranks, one.rank_devices, one.single_rank) for spec, one in found.items()}
    assert ranks == {
        "cpu": ("processes", False, False), "polyemu:0": ("processes", False, True), "xpu:0": ("processes", True, True),
        "mychip:1": ("processes", True, True), "polycuda:0": ("", False, False),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "rank", "wanted"),
    [
        ("xpu:0", 1, "xpu:1"),
        ("mychip:2?ops=few", 3, "mychip:5?ops=few"),
        ("gpu", 2, "gpu:2"),
        ("xpu:4,2", 0, "xpu:4"),
        ("xpu:4,2", 1, "xpu:2"),
    ],
)
def test_each_rank_has_a_place_of_its_own(spec: str, rank: int, wanted: str):
    assert of_rank(spec, rank) == wanted
