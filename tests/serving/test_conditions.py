"""What a server says of itself while it starts, serves, hangs, drains and fails, and what its clients get meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from polydraft.cli import main
from polydraft.errors import DeviceError
from polydraft.serving import engine_client as module
from polydraft.serving import wire
from polydraft.serving.engine_client import EngineClient, EngineGone
from polydraft.serving.main import _Uvicorn
from tests.serving.conftest import MODEL, Served
from tests.serving.test_limits import LONG, SHORT, offline, post, serve, slow_down, worker
from tests.support import tiny
from tests.support.cpu import needs_kernels

__all__ = ["serve"]  # the fixture
PROGRAM = "from polydraft.cli import main; main()"


def figures(served: Served) -> dict[str, float]:
    lines = httpx.get(f"{served.url}/metrics", timeout=20).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


# -- a whole server -----------------------------------------------------------------------------------------------------
@needs_kernels
@pytest.mark.deep
def test_an_engine_that_has_lost_a_rank_is_replaced(serve: Callable[..., Served]) -> None:
    """It would serve nothing any more."""
    served = serve("--backend", "cpu", "--device", "cpu?threads=1", "--tensor-parallel", "2")
    first = worker(served)
    assert post(served, **SHORT).status_code == 200
    assert figures(served)[f'polydraft:rank_plans_waiting{{model_name="{MODEL}",rank="1"}}'] <= 2
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        signal_ranks(first, signal.SIGSTOP)  # so that the text waits for them
        text = pool.submit(post, served, **SHORT)
        time.sleep(2)  # of the 10 seconds for which it does
        signal_ranks(first, signal.SIGKILL)
        lost = text.result()
    assert (lost.status_code, "rank 1 " in lost.text) == (500, True)
    second = wait_for_another(served, first)
    assert post(served, **SHORT).status_code == 200
    signal_ranks(second, signal.SIGKILL)  # while nobody asks for anything, and nobody has to, to find it out
    wait_for_another(served, second)
    assert post(served, **SHORT).status_code == 200
    assert sum(value for name, value in figures(served).items() if name.startswith("polydraft:engine_restarts")) == 2


def signal_ranks(engine: int, how: signal.Signals) -> None:
    """Send this to the ranks of an engine's process."""
    for one in Path(f"/proc/{engine}/task/{engine}/children").read_text().split():
        if b"polydraft.rank_worker" in Path(f"/proc/{one}/cmdline").read_bytes():
            os.kill(int(one), how)


def wait_for_another(served: Served, before: int) -> int:
    """Wait until another process than the one of `before` serves."""
    until = time.monotonic() + 60
    while worker(served) in (0, before) or served.status("/ready")[0] != 200:
        assert time.monotonic() < until
        time.sleep(0.05)
    return worker(served)


SLOW_LOADING = """
from polydraft import loading
from polydraft.hooks import hookimpl

loading.INTERVAL_S = 0.0  # as if every tensor and every size of step took ten seconds


@hookimpl
def polydraft_instruments():
    return ()
"""


def test_the_log_says_how_far_a_slow_engine_is_that_is_built(serve: Callable[..., Served], tmp_path: Path) -> None:
    plugin = tmp_path / "slow_loading.py"
    plugin.write_text(SLOW_LOADING)
    served = serve("--plugin", str(plugin), "--device", "queued")
    told = [event for event in served.events() if event["event"] == "loading"]
    assert {event["stage"] for event in told} == {"weights", "graphs"}
    for last in (told[-1], [event for event in told if event["stage"] == "weights"][-1]):
        assert last["done"] == last["total"] > 1


def test_a_server_tells_what_it_does_while_it_starts_and_drains(serve: Callable[..., Served]) -> None:
    served = serve(wait=False)
    served.listens()
    while not (pid := worker(served)):
        time.sleep(0.01)
    slow_down(pid)
    assert served.status("/health") == (200, "starting")
    assert served.status("/ready") == (503, "starting")
    early = post(served, **SHORT)
    assert (early.status_code, early.headers["retry-after"]) == (503, "2")
    assert "is being started" in early.json()["error"]["message"]
    os.kill(pid, signal.SIGCONT)
    served.wait()
    assert served.status("/health") == served.status("/ready") == (200, "ok")
    found = figures(served)
    assert found[f'polydraft:server_state{{model_name="{MODEL}",state="ok"}}'] == 1
    assert found[f'polydraft:server_state{{model_name="{MODEL}",state="draining"}}'] == 0
    assert found[f'polydraft:connections{{model_name="{MODEL}"}}'] >= 1
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**LONG, "stream": True}, timeout=20) as answer:
        lines = answer.iter_lines()
        texts = [next(lines)]
        slow_down(pid)
        served.process.send_signal(signal.SIGTERM)
        assert served.becomes("draining")
        assert served.status("/health") == (200, "draining")
        assert served.status("/ready") == (503, "draining")
        late = post(served, **SHORT)
        assert late.status_code == 503
        assert "takes no more requests" in late.json()["error"]["message"]
        os.kill(pid, signal.SIGCONT)
        texts += [line for line in lines if line]
    pieces = [json.loads(line.removeprefix("data: ")) for line in texts if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == offline(LONG["max_tokens"])
    assert served.process.wait(20) == 0
    assert not [event for event in served.events() if event["event"] == "http"], "and quietly"


@pytest.mark.deep
def test_an_engine_that_hangs_is_told_to_everybody_and_replaced(serve: Callable[..., Served]) -> None:
    served = serve("--watchdog-timeout", "1")
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        httpx.stream("POST", f"{served.url}/v1/completions", json={**LONG, "n": 60, "stream": True}, timeout=20) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        slow_down(worker(served))
        whole = pool.submit(post, served, **LONG)
        assert served.becomes("stalled")
        assert served.status("/health") == (200, "stalled")
        assert served.status("/ready")[0] == 503
        rest = [line for line in lines if line]
    said = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert "said nothing for 1 seconds and was ended" in said["message"]
    assert whole.result().status_code == 503
    assert served.becomes("ok")
    assert post(served, **LONG).json()["choices"][0]["text"] == offline(LONG["max_tokens"])
    assert figures(served)[f'polydraft:engine_hangs{{model_name="{MODEL}"}}'] >= 1


@pytest.mark.deep
def test_a_second_signal_does_not_wait_for_an_engine_that_is_stopped(serve: Callable[..., Served]) -> None:
    served = serve()
    pid = worker(served)
    slow_down(pid)
    answer = httpx.get(f"{served.url}/stats", timeout=20)
    assert answer.status_code == 503
    assert "has not answered for 2 seconds" in answer.json()["error"]["message"]
    served.process.send_signal(signal.SIGTERM)
    while served.events()[-1].get("state") != "stopped":
        time.sleep(0.01)
    begin = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(20) == 0
    assert time.monotonic() - begin < 2
    assert served.events()[-1]["event"] == "stopped"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN], ids=["on a terminal", "nohup"])
def test_a_terminal_that_goes_away_ends_a_server_unless_that_is_ignored(before: signal.Handlers) -> None:
    server = _Uvicorn(uvicorn.Config(app=None, log_config=None), None, None, lambda: None)  # type: ignore[arg-type]
    own = signal.signal(signal.SIGHUP, before)
    try:
        with server.capture_signals():
            assert (signal.getsignal(signal.SIGHUP) == server.handle_exit) == (before == signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, own)


def test_a_server_whose_engine_cannot_come_back_ends_with_a_status(serve: Callable[..., Served], tmp_path: Path) -> None:
    model = tmp_path / MODEL
    shutil.copytree(tiny.checkpoint(MODEL), model)
    served = serve(model=str(model))
    (model / "config.json").unlink()
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**LONG, "n": 60, "stream": True}, timeout=20) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        os.kill(worker(served), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert "process ended" in rest[-2]
    assert served.process.wait(20) == 1
    assert served.process.stderr is not None
    assert "config.json is missing" in served.process.stderr.read().splitlines()[-1]
    assert [event["state"] for event in served.events() if event["event"] == "engine"] == ["ready", "restarting", "failed"]


@pytest.mark.deep
def test_six_deaths_are_the_end(serve: Callable[..., Served]) -> None:
    served = serve()
    for deaths in range(6):
        assert served.becomes("ok"), deaths
        os.kill(worker(served), signal.SIGKILL)
        while sum(event.get("state") in ("restarting", "failed") for event in served.events()) <= deaths:
            time.sleep(0.01)
    assert served.process.wait(20) == 1
    assert served.process.stderr is not None
    assert "ended 6 times within 120 seconds of service" in served.process.stderr.read().splitlines()[-1]


@pytest.mark.deep
def test_half_requests_on_every_descriptor_do_no_harm(serve: Callable[..., Served]) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    served = serve(preexec_fn=few)
    host, _, port = served.url.removeprefix("http://").partition(":")
    opened = [socket.socket() for _ in range(260)]
    try:
        for one in opened:
            one.setblocking(False)
            one.connect_ex((host, int(port)))
        for one in opened:
            select.select([], [one], [], 10)
            one.send(b"GET /health HTTP/1.1\r\nHost: x\r\nX-")
        begin = time.monotonic()
        assert served.status("/ready") == (200, "ok")
        assert post(served, **SHORT).status_code == 200
        assert time.monotonic() - begin < 5
        assert figures(served)[f'polydraft:connections_ended{{limit="displaced",model_name="{MODEL}"}}'] > 100
    finally:
        for one in opened:
            one.close()
    assert served.log.stat().st_size < 10_000
    served.process.terminate()
    _, told = served.process.communicate(timeout=20)
    assert told == "", "all that was said is in the log"


def test_a_template_that_is_none_is_told_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", "--chat-template", str(template)])
    assert ended.value.code == 2
    assert "the chat template does not compile" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.deep
def test_a_model_whose_template_is_none_is_not_served(tmp_path: Path) -> None:
    model = tmp_path / MODEL
    shutil.copytree(tiny.checkpoint(MODEL), model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}")
    command = ["serve", "--port", "0", "--backend", "reference", "--model", str(model)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the chat template does not compile" in done.stderr.splitlines()[-1]


def test_ctrl_c_on_a_terminal_is_for_the_server_alone(serve: Callable[..., Served]) -> None:
    """A terminal sends it to every process of the group, and a worker that is still importing would end with a traceback."""
    served = serve(wait=False, start_new_session=True)
    served.listens()
    while not worker(served):
        time.sleep(0.01)
    os.killpg(served.process.pid, signal.SIGINT)
    out, told = served.process.communicate(timeout=20)
    assert (served.process.returncode, out, told) == (0, "", "")


# -- the client of the engine by itself ---------------------------------------------------------------------------------
SILENT = "import time; time.sleep(600)"
SERVING = """
import sys, zmq
from polydraft.serving import wire
context = zmq.Context()
commands, events = (context.socket(zmq.PAIR) for _ in range(2))
for one, place in zip((commands, events), sys.argv[1:]):
    one.connect(place)
commands.recv()
events.send(wire.encode(wire.Ready("m", "/", "reference", 8, 1, 0, 8, "", {}, [])))
while not isinstance(wire.decode_command(commands.recv()), wire.Stop):
    pass
"""
"""It says nothing, and leaves when it is asked to."""

FAILED = SERVING.replace(
    "while not",
    "from typing import get_origin, get_type_hints\n"
    "counts = {name: (get_origin(kind) or kind)() for name, kind in get_type_hints(wire.Stats).items()}\n"
    "commands.recv()\n"
    "events.send(wire.encode(wire.Stats(**{**counts, 'failure': 'rank 1 is gone'})))\n"
    "while not",
)


class Scene:
    """A client whose processes run these programs, the last one again and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *programs: str, **limits: float) -> None:
        self.told: list[tuple[str, str]] = []
        self.client = EngineClient({}, most=8, tell=self._tell, **limits)  # type: ignore[arg-type]
        sources = itertools.chain(programs, itertools.repeat(programs[-1]))

        def spawn(endpoints: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, "-c", next(sources), *endpoints], stdin=subprocess.DEVNULL)

        monkeypatch.setattr(self.client, "_spawn", spawn)

    def _tell(self, event: str, **fields: Any) -> None:
        self.told.append((fields.get("state", event), fields.get("reason", "")))

    def play(self, act: Callable[[EngineClient], Any]) -> None:
        async def scene() -> None:
            try:
                await asyncio.wait_for(act(self.client), 30)
            finally:
                await self.client.stop()

        asyncio.run(scene())


def test_a_process_that_dies_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, SERVING, "raise SystemExit(7)")

    async def act(client: EngineClient) -> None:
        await client.start()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"ended 6 times within 120 seconds of service, at last so: .*\(exit status 7\)"):
            await client.until_failed()
        with pytest.raises(EngineGone, match="failed for good"):
            await anext(client.generate([([1], {})], first_s=5))

    scene.play(act)
    assert [state for state, _ in scene.told] == ["ready", *["restarting"] * 5, "failed"]


def test_hung_processes_are_given_up_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which nothing came is no service: by the clock six hangs of five minutes would never be close together."""
    monkeypatch.setattr(module, "MOST_RESTARTS", 1)
    monkeypatch.setattr(module, "RESTART_WINDOW_S", 0.3)
    scene = Scene(monkeypatch, SERVING, watchdog_s=0.4)

    async def act(client: EngineClient) -> None:
        await client.start()
        with pytest.raises(EngineGone, match=r"said nothing for 0.4 seconds and was ended while the request was served"):
            await anext(client.generate([([1], {})], first_s=5))
        with pytest.raises(DeviceError, match="ended 2 times"):
            await client.until_failed()
        assert client.hangs == 2

    scene.play(act)


def test_nothing_is_sent_to_an_engine_that_has_failed_until_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may take long to end, by closing the engine."""
    scene = Scene(monkeypatch, FAILED, SERVING)

    async def act(client: EngineClient) -> None:
        await client.start()
        await client.stats()
        assert client.stalled
        with pytest.raises(EngineGone, match="the engine has failed: rank 1 is gone; send the request again in a while"):
            await anext(client.generate([([1], {})], first_s=5))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        while client.restarts == 0 or client.state != "ready":
            await client._next_state()
        assert not client.stalled

    scene.play(act)


def test_a_process_that_never_becomes_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, SILENT, start_s=0.2)

    async def act(client: EngineClient) -> None:
        with pytest.raises(DeviceError, match=r"said nothing for 0.2 seconds and was ended before it was ready"):
            await client.start()

    scene.play(act)


def test_deaths_far_apart_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    client = EngineClient({}, most=8, tell=lambda *given, **more: None)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    ready = wire.Ready("m", "/", "reference", 8, 1, 0, 8, "", {}, [])
    for _ in range(20):
        client._take(ready)
        clock[0] += module.RESTART_WINDOW_S / 4
        client._take(wire.Done(0, ""))
        client._after("it ended")
        assert client.state == "restarting", "five of them are never within the window"
        clock[0] += 1000
    for _ in range(5):
        client._take(ready)
        clock[0] += 1000  # in which the engine said nothing
        client._after("it ended")
    assert client.state == "failed"
