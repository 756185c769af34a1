"""Replicas on a cluster of several nodes, which Ray simulates on this machine: placement, routing, and what happens to requests
while engines and nodes are killed, their number changes, and the application is deployed anew.

Every text is held against the offline run. The cluster asks for tokens; one application is deployed after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cpu import needs_kernels
from tests.support.letters import checkpoint
from tests.support.progress import say

httpx = pytest.importorskip("httpx", reason="the extra `test` is not installed: no httpx")
ray = pytest.importorskip("ray", reason="the extra `ray` is not installed: no ray")
pytest.importorskip("ray.serve", reason="the extra `ray` is not installed: no ray[serve]")

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of Ray's own modules
]
SLOTS = 4
ENGINE: dict[str, Any] = {"backend": "reference", "invariant": True, "max_num_seqs": SLOTS, "block_size": 16}
SCALING = {"upscale_delay_s": 1.0, "downscale_delay_s": 2.0, "metrics_interval_s": 0.5, "look_back_period_s": 1.0}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "OPENBLAS_NUM_THREADS": "1", "RAY_SERVE_LOG_TO_STDERR": "0"}
PROMPTS = [f"{{{word}: {number}, " for word in ("alpha", "beta", "gamma", "delta") for number in range(4)]


@dataclass(frozen=True)
class Answer:
    """What became of a request."""

    prompt: str
    begin: float
    end: float
    status: int
    text: str


class Site:
    """The cluster, and the application on it."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **self._small()})
        self.nodes = [self.add_node() for _ in range(3)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="error")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        ray.serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port})

    @staticmethod
    def _small() -> dict[str, Any]:
        return {"include_dashboard": False, "object_store_memory": 80 << 20}

    def add_node(self) -> Any:
        """A node with room for one engine."""
        return self.cluster.add_node(num_cpus=1, resources={"engine": 1}, object_store_memory=80 << 20)

    def deploy(self, model: str, **more: Any) -> None:
        """Run the application, or another one in its place; returns when it runs."""
        from polydraft.ray.application import application

        engine = {**ENGINE, "model": model, **more.pop("engine", {})}
        given = {"replicas": 2, "resources": {"engine": 1}, **more, "engine": engine, "server": {"drain_s": 20.0}}
        ray.serve.run(application(given), name="polydraft", route_prefix="/")

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counts of the engines, by replica."""
        found: dict[str, dict[str, Any]] = httpx.get(f"{self.url}/stats", timeout=20).json()
        return found

    def engines(self, deployment: str = "Engine") -> dict[str, tuple[str, int]]:
        """Of every running replica of a deployment, its node and process."""
        details = ray.serve.context._get_global_client().get_serve_details()
        found = details["applications"]["polydraft"]["deployments"][deployment]["replicas"]
        return {one["replica_id"]: (one["node_id"], one["pid"]) for one in found if one["state"] == "RUNNING"}

    def becomes(self, true: Callable[[], bool], seconds: float = 60.0) -> bool:
        """Wait for it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(Exception):
                if true():
                    return True
            time.sleep(0.2)
        return False


def worker_of(pid: int, module: bytes = b"polydraft.serving.worker") -> int:
    """The engine's process of a replica's; or another one, that runs a module, of its parent's."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid and module in (folder / "cmdline").read_bytes():
                    return int(folder.name)
    raise AssertionError(f"process {pid} has none that runs {module.decode()}")


class Load:
    """Clients that ask one request after the other while the block runs; `answers` is what became of them."""

    def __init__(self, url: str, clients: int = 6, tokens: int = 24) -> None:
        self._url, self._tokens = url, tokens
        self.answers: list[Answer] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:  # noqa: PYI034  typing.Self needs Python 3.11
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        chosen = random.Random(number)
        with httpx.Client(timeout=90) as client:
            while not self._stop.is_set():
                prompt, begin = chosen.choice(PROMPTS), time.monotonic()
                body = {"prompt": prompt, "max_tokens": self._tokens, "temperature": 0}
                try:
                    answer = client.post(f"{self._url}/v1/completions", json=body)
                    status, text = answer.status_code, answer.text
                    text = json.loads(text)["choices"][0]["text"] if status == 200 else text
                except httpx.HTTPError as error:
                    status, text = 0, repr(error)
                self.answers.append(Answer(prompt, begin, time.monotonic(), status, text))

    @property
    def lost(self) -> list[Answer]:
        """Requests without their text."""
        return [one for one in self.answers if one.status != 200]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    before = dict(os.environ)
    os.environ.update(QUIET, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    ray._raylet.Config.initialize("")  # Ray has read the environment when it was imported
    made = Site()
    try:
        yield made
    finally:
        ray.serve.shutdown()
        ray.shutdown()
        made.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        ray._raylet.Config.initialize("")


@pytest.fixture(scope="module")
def model() -> str:
    return checkpoint(512)


@pytest.fixture(scope="module")
def texts(model: str) -> dict[str, str]:
    from polydraft.llm import LLM
    from polydraft.sampling_params import SamplingParams

    llm = LLM(model=model, **ENGINE)
    outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=24))
    return {prompt: one.text for prompt, one in zip(PROMPTS, outputs, strict=True)}


def wrong(load: Load, texts: dict[str, str]) -> list[Answer]:
    """Texts that differ from the offline run."""
    return [one for one in load.answers if one.status == 200 and one.text != texts[one.prompt]]


def told(name: str, load: Load, **more: Any) -> None:
    """Say what was seen."""
    kinds = sorted({f"{one.status} {one.text[:120]}" for one in load.lost})
    say(json.dumps({"scene": name, "requests": len(load.answers), "lost": len(load.lost), "said": kinds, **more}))


def test_every_engine_has_a_node_and_texts_are_those_of_one_engine(site: Site, model: str, texts: dict[str, str]) -> None:
    site.deploy(model, replicas=3)
    placed = site.engines()
    assert len({node for node, _ in placed.values()}) == 3
    with Load(site.url) as load:
        assert site.becomes(lambda: len(load.answers) > 60)
    told("placement", load, stats={name: one["new_tokens"] for name, one in site.stats().items()})
    assert not load.lost
    assert not wrong(load, texts)
    page = httpx.get(f"{site.url}/metrics", timeout=20).text
    labels = {line.partition('replica="')[2].partition('"')[0] for line in page.splitlines() if "polydraft:steps_total{" in line}
    assert labels == set(site.stats())
    assert httpx.get(f"{site.url}/ready", timeout=20).json() == {"status": "ok", "replicas": 3}


def test_a_killed_engine_costs_what_it_was_serving(site: Site, model: str, texts: dict[str, str]) -> None:
    site.deploy(model)
    with Load(site.url) as load:
        assert site.becomes(lambda: len(load.answers) > 20)
        victims = site.engines()
        name, (_, pid) = next(iter(victims.items()))
        killed = time.monotonic()
        os.kill(worker_of(pid), signal.SIGKILL)
        assert site.becomes(lambda: name not in site.engines() and len(site.engines()) == 2)
        again = time.monotonic() - killed
        count = len(load.answers)
        assert site.becomes(lambda: len(load.answers) > count + 20)
    told("killed engine", load, seconds=round(again, 1))
    assert not wrong(load, texts)
    assert len(load.lost) <= SLOTS
    for one in load.lost:
        assert one.begin < killed < one.end
        assert one.status == 503
        assert "ended" in one.text


@needs_kernels
def test_a_killed_rank_costs_what_its_engine_was_serving(site: Site, model: str, texts: dict[str, str]) -> None:
    """Its engine ends with a sentence, and all of its ranks are started anew."""
    site.deploy(model, engine={"backend": "cpu", "device": "cpu?threads=1", "tensor_parallel": 2})
    with Load(site.url, clients=3) as load:
        assert site.becomes(lambda: len(load.answers) > 20)
        name, (_, pid) = next(iter(site.engines().items()))
        killed = time.monotonic()
        os.kill(worker_of(worker_of(pid), b"polydraft.rank_worker"), signal.SIGKILL)
        assert site.becomes(lambda: name not in site.engines() and len(site.engines()) == 2)
        again = time.monotonic() - killed
        count = len(load.answers)
        assert site.becomes(lambda: len(load.answers) > count + 20)
    told("killed rank", load, seconds=round(again, 1))
    assert not wrong(load, texts)
    assert len(load.lost) <= SLOTS
    for one in load.lost:  # the engine knows it by the next step
        assert one.begin < killed + 12, "an engine has as long to end its ranks"
        assert one.status in (500, 503)


def test_a_killed_node_costs_what_it_was_serving(site: Site, model: str, texts: dict[str, str]) -> None:
    site.deploy(model)
    with Load(site.url) as load:
        assert site.becomes(lambda: len(load.answers) > 20)
        name, (node, _) = next(iter(site.engines().items()))
        index = next(index for index, one in enumerate(site.nodes) if one.node_id == node)
        killed = time.monotonic()
        site.cluster.remove_node(site.nodes.pop(index), allow_graceful=False)
        assert site.becomes(lambda: name not in site.engines() and len(site.engines()) == 2)
        again = time.monotonic() - killed
        count = len(load.answers)
        assert site.becomes(lambda: len(load.answers) > count + 20)
    site.nodes.append(site.add_node())
    told("killed node", load, seconds=round(again, 1))
    assert not wrong(load, texts)
    assert len(load.lost) <= SLOTS
    for one in load.lost:
        assert one.begin < killed + 1
        assert one.status == 503


def test_a_killed_ingress_costs_what_it_was_passing_on(site: Site, model: str, texts: dict[str, str]) -> None:
    site.deploy(model, ingresses=2)
    with Load(site.url) as load:
        assert site.becomes(lambda: len(load.answers) > 20)
        name, (_, pid) = next(iter(site.engines("Ingress").items()))
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert site.becomes(lambda: name not in site.engines("Ingress") and len(site.engines("Ingress")) == 2)
        count = len(load.answers)
        assert site.becomes(lambda: len(load.answers) > count + 20)
    told("killed ingress", load)
    assert not wrong(load, texts)
    assert len(load.lost) <= 6
    assert all(one.begin < killed < one.end and one.status == 500 for one in load.lost), "by the proxy"


def test_a_client_that_leaves_ends_its_text_in_the_engine(site: Site, model: str) -> None:
    site.deploy(model)
    body = {"prompt": PROMPTS[0], "max_tokens": 480, "stream": True, "ignore_eos": True}
    before = sum(one["new_tokens"] for one in site.stats().values())
    with httpx.stream("POST", f"{site.url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    assert site.becomes(lambda: not any(one["running"] for one in site.stats().values()), 20)
    made = sum(one["new_tokens"] for one in site.stats().values()) - before
    say(json.dumps({"scene": "a client that left", "tokens": made}))
    assert made < 480


def test_the_number_of_engines_follows_the_load_and_nothing_is_lost(site: Site, model: str, texts: dict[str, str]) -> None:
    site.deploy(model, replicas="1:3", scaling=SCALING)
    assert site.becomes(lambda: len(site.engines()) == 1)
    begin = time.monotonic()
    with Load(site.url, clients=12, tokens=24) as load:
        assert site.becomes(lambda: len(site.engines()) == 3)
        up = time.monotonic() - begin
    begin = time.monotonic()
    with Load(site.url, clients=1) as little:
        assert site.becomes(lambda: len(site.engines()) == 1)
    told("up", load, seconds=round(up, 1))
    told("down", little, seconds=round(time.monotonic() - begin, 1))
    assert not load.lost
    assert not little.lost
    assert not wrong(load, texts)
    assert not wrong(little, texts)


def test_an_application_that_is_deployed_anew_loses_nothing(site: Site, model: str, texts: dict[str, str]) -> None:
    site.deploy(model)
    before = set(site.engines())
    with Load(site.url) as load:
        assert site.becomes(lambda: len(load.answers) > 20)
        begin = time.monotonic()
        site.deploy(model, engine={"draft_tokens": 1})
        assert site.becomes(lambda: not before & set(site.engines()) and len(site.engines()) == 2)
        seconds = time.monotonic() - begin
        count = len(load.answers)
        assert site.becomes(lambda: len(load.answers) > count + 20)
    told("rolling update", load, seconds=round(seconds, 1))
    assert not load.lost
    assert not wrong(load, texts)


def conversations(site: Site, model: str, *, prefixes: bool) -> float:
    """The share of prompt tokens that engines had, in rounds of conversations that grow, in an order without a pattern."""
    site.deploy(model, replicas=3, prefixes=prefixes, engine={"num_blocks": 1024})
    chosen = random.Random(5)
    talks = [f"{chr(97 + number)}{number}" * 32 for number in range(12)]
    rounds = [number for number in range(12) for _ in range(6)]
    chosen.shuffle(rounds)
    with httpx.Client(timeout=60) as client:
        for number in rounds:
            body = {"prompt": talks[number], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = client.post(f"{site.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            talks[number] += "".join(chosen.choice("0123456789abcdef") for _ in range(32))
    counts = site.stats().values()
    return sum(one["prefix_hits"] for one in counts) / sum(one["prefix_queries"] for one in counts)


def test_requests_go_where_their_prefix_is(site: Site, model: str) -> None:
    without, having = (conversations(site, model, prefixes=wanted) for wanted in (False, True))
    say(json.dumps({"scene": "prefixes", "hit share without": round(without, 3), "with": round(having, 3)}))
    assert having > without + 0.1


def said_by(command: list[str], address: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself, on the cluster at `address`."""
    words = [sys.executable, "-c", "from polydraft.cli import main; main()", *command]
    return subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=240, env={**os.environ, "RAY_ADDRESS": address}
    )


def test_the_command_serves_until_it_is_told_to_stop_and_lets_texts_end(site: Site, model: str) -> None:
    ray.serve.delete("polydraft")
    command = [
        sys.executable, "-c", "from polydraft.cli import main; main()", "serve", "--ray", "--json", "--ray-resources", "engine=1",
        "--ray-replicas", "2", "--backend", "reference", "--invariant", "--model", model, "--max-num-seqs", str(SLOTS),
        "--port", str(site.port),
    ]  # fmt: skip
    environment = {**os.environ, "RAY_ADDRESS": site.cluster.address}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    said = process.stdout.readline()
    assert said, process.stderr.read()
    assert json.loads(said)["url"] == site.url
    second = said_by(command[3:], site.cluster.address)
    assert second.returncode == 2
    assert "has an application 'polydraft' already" in second.stderr
    body = {"prompt": PROMPTS[0], "max_tokens": 300, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{site.url}/v1/completions", json=body, timeout=60) as stream:
        events = stream.iter_lines()
        next(events)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in events if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert process.wait(60) == 0
    assert "polydraft" not in ray.serve.status().applications


def test_an_application_that_cannot_start_says_why(site: Site) -> None:
    command = ["serve", "--ray", "--ray-resources", "engine=1", "--model", "/nowhere", "--port", str(site.port)]
    began = time.monotonic()
    done = said_by(command, site.cluster.address)
    say(json.dumps({"scene": "no model", "seconds": round(time.monotonic() - began, 1), "said": done.stderr[-300:]}))
    assert done.returncode == 1
    assert "/nowhere" in done.stderr


def test_a_cluster_that_asks_for_no_token_is_refused() -> None:
    from ray.cluster_utils import Cluster

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray._raylet.Config.initialize("")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        done = said_by(["serve", "--ray"], cluster.address)
    finally:
        cluster.shutdown()
    assert done.returncode == 2
    assert "wanted RAY_AUTH_MODE=token on all nodes" in done.stderr
