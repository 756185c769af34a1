"""Servers for the tests of serving: started as users start them, on a free port, and stopped after the tests.

The fixtures `server` and `agents` are one each for all files of a process, since whatever clients do to a server it serves on;
`Served` starts others with other options.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.agents import TEMPLATE as AGENTS
from tests.serving.agents import ids
from tests.support import tiny
from tests.support.letters import checkpoint as letters

httpx = pytest.importorskip("httpx", reason="the extra `test` is not installed: no httpx")
for needed in ("starlette", "uvicorn", "msgspec", "zmq", "prometheus_client"):
    pytest.importorskip(needed, reason=f"the extra `serve` is not installed: no {needed}")

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
MODEL = "narrow"


class Served:
    """A server in a process of its own, on the tiny model; `url` is where it listens, once it serves requests (`wait`)."""

    url = ""

    def __init__(
        self, folder: Path, *options: str, model: str | None = None, stdout: Any = subprocess.PIPE, wait: bool = True, **more: Any
    ) -> None:
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        self.log = folder / "server.log"
        command = [
            sys.executable, "-c", "from polydraft.cli import main; main()", "serve", "--port", "0", "--json",
            "--backend", "reference", "--invariant", "--draft-tokens", "3",
            "--model", model or str(tiny.checkpoint(MODEL)), "--max-num-seqs", "4", "--chat-template", str(template),
            "--log-file", str(self.log), *options,
        ]  # fmt: skip
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, text=True, **more)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until it serves requests."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said:
            _, told = self.process.communicate()
            raise AssertionError(f"the server did not start: {told}")
        self.url = str(json.loads(said)["url"])

    def listens(self) -> None:
        """Wait until it listens, which is before."""
        deadline = time.monotonic() + 20
        while not self.url and time.monotonic() < deadline:
            time.sleep(0.01)
            told = self.events() if self.log.exists() else []
            self.url = next((event["url"] for event in told if event["event"] == "listening"), "")

    def status(self, path: str) -> tuple[int, str]:
        """The status of a route, and what it tells of the server's."""
        answer = httpx.get(self.url + path, timeout=20)
        return answer.status_code, answer.json().get("status", "")

    def becomes(self, status: str) -> bool:
        """Wait until the server says so of itself."""
        deadline = time.monotonic() + 20
        while (said := self.status("/ready")[1]) != status and time.monotonic() < deadline:
            time.sleep(0.02)
        return said == status

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return json.load(answer)

    def events(self) -> list[dict[str, Any]]:
        """What the log says so far."""
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def event(self, name: str) -> dict[str, Any]:
        """The one event of this name, once it is in the log, which is written a little later than things happen."""
        deadline = time.monotonic() + 20
        while not (found := [event for event in self.events() if event["event"] == name]) and time.monotonic() < deadline:
            time.sleep(0.01)
        (one,) = found
        return one

    def stop(self) -> int:
        """End it as an init system does; returns its status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()
        return status


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that tells reasoning from replies and serves tools, bound by grammars."""
    folder = tmp_path_factory.mktemp("agents")
    template = folder / "agents.jinja"
    template.write_text(AGENTS)
    served = Served(
        folder, "--constraints", "--chat-template", str(template), "--think-start-ids", ids("<think>"),
        "--think-end-ids", ids("</think>"), model=letters(2048),
    )  # fmt: skip
    yield served
    assert served.stop() == 0


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    yield served
    assert served.stop() == 0
