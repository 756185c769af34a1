"""What clients may do wrong, and what may go wrong beneath: each ends in a clear answer, and the server serves on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import gzip
import http.client
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
from starlette.requests import Request

from polydraft import LLM, SamplingParams
from polydraft.cli import main
from polydraft.cli.serve import NEEDED
from polydraft.errors import ConfigError
from polydraft.serving import logs
from polydraft.serving.http import HttpError, check_origin
from polydraft.serving.logs import Log
from polydraft.serving.main import REPEATED_S, _ToLog
from tests.serving.conftest import MODEL, Served
from tests.support import tiny

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"

LONG = {"prompt": "w2", "max_tokens": 90, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "w5 w9", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start servers with options; they are stopped behind the test."""
    started: list[Served] = []

    def start(*options: str, **more: Any) -> Served:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Served(folder, *options, **more))
        return started[-1]

    yield start
    for served in started:
        served.stop()


def shared(folder: Path, *options: str) -> Iterator[Served]:
    """One server for all tests of the file, which has to end in order."""
    served = Served(folder, *options)
    yield served
    assert served.stop() == 0


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with limits of several kinds."""
    limits = ("--max-body-bytes", "2000", "--stall-timeout", "1", "--max-requests", "2", "--max-new-tokens", "8")
    yield from shared(tmp_path_factory.mktemp("bounded"), *limits)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with room for one request, which may wait for half a second."""
    room = ("--num-blocks", "3", "--block-size", "16", "--max-num-seqs", "1", "--queue-timeout", "0.5")
    yield from shared(tmp_path_factory.mktemp("small"), *room)


def post(served: Served, route: str = "/v1/completions", /, *, headers: Any = None, **body: Any) -> httpx.Response:
    return httpx.post(served.url + route, json=body, headers=headers, timeout=30)


def slow_down(pid: int) -> None:
    """Stop the engine's process for good."""
    assert pid, "0 would be the tests themselves"
    os.kill(pid, signal.SIGSTOP)


def worker(served: Served | SimpleNamespace) -> int:
    """The engine's process of a server; 0 before there is one."""
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(served.process.pid)], capture_output=True, text=True, check=False
    )
    return int(next((line.split()[0] for line in found.stdout.splitlines() if "polydraft.serving.worker" in line), 0))


# -- requests that are wrong --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        ("/v1/completions", b"", 400),
        ("/v1/completions", b"\xff\xfe", 400),
        ("/v1/completions", b"[" * 100_000, 400),
        ("/v1/completions", b'{"prompt": "w1", "max_tokens": 1e400}', 400),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400),
        ("/v1/completions", b'{"prompt": 5}', 400),
        ("/v1/completions", json.dumps({"prompt": "w1", "logit_bias": {"x": 1}}).encode(), 400),
        ("/v1/completions", json.dumps({"prompt": "w1", "stop": [""]}).encode(), 400),
        ("/v1/chat/completions", b'{"messages": []}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}]}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 5}]}', 400),
        ("/tokenize", b'{"messages": [{"role": "user", "content": null}]}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}', 400),
        ("/tokenize", b"{}", 400),
        ("/detokenize", b'{"tokens": [1, 99999]}', 400),
        ("/admin/update_weights", b'{"path": "/"}', 403),
        ("/v1/nothing", b"{}", 404),
        ("/health", b"{}", 405),
    ],
)
def test_wrong_requests_are_answered(server: Served, path: str, data: bytes, status: int) -> None:
    answer = httpx.post(server.url + path, content=data, timeout=20)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert ("allow" in answer.headers) == (status == 405)
    assert post(server, **SHORT).status_code == 200


HUGE = 10**30


@pytest.mark.parametrize(
    "ask",
    [
        {"max_tokens": HUGE}, {"n": HUGE}, {"top_k": HUGE}, {"top_k": -HUGE}, {"min_tokens": HUGE}, {"logprobs": HUGE},
        {"thinking_limit": HUGE}, {"reply_budget": HUGE}, {"max_drafts": HUGE}, {"num_speculative_tokens": HUGE},
        {"thinking_token_budget": HUGE}, {"reply_start_token_ids": [1] * 33},
        {"seed": HUGE}, {"seed": -HUGE},
        {"seed": 2**64}, {"seed": -(2**63) - 1}, {"structured_outputs": {"json": {"const": HUGE}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": HUGE}}}},
        {"structured_outputs": {"json": HUGE}}, {"structured_outputs": {"regex": HUGE}},
        {"structured_outputs": {"grammar": HUGE}},
    ],
    ids="-".join,
)  # fmt: skip
def test_numbers_beyond_all_bounds_are_the_clients_error(server: Served, ask: dict[str, Any]) -> None:
    answer = post(server, **{**SHORT, **ask})
    assert answer.status_code == 400, answer.text
    assert "; " in answer.json()["error"]["message"]


def test_a_negative_seed_is_the_one_with_the_same_64_bits(server: Served) -> None:
    asks = [{**SHORT, "max_tokens": 12, "temperature": 1, "seed": seed} for seed in (-5, 2**64 - 5, -(2**63), 2**63)]
    texts = [post(server, **ask).json()["choices"][0]["text"] for ask in asks]
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_a_body_that_is_too_large_or_lies_about_its_length(bounded: Served) -> None:
    served = bounded
    assert post(served, prompt="w1 " * 1000).status_code == 413
    chunks = (b" " * 500 for _ in range(10))
    assert httpx.post(f"{served.url}/v1/completions", content=chunks, timeout=20).status_code == 413
    with contextlib.closing(http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b'{"prompt"')
        assert connection.getresponse().status == 408
    assert post(served, **SHORT).status_code == 200


def test_garbage_on_the_socket_does_no_harm(server: Served) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    for data in (
        b"\x00" * 4000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"A" * 200_000,
    ):
        with socket.create_connection((host, int(port)), timeout=10) as raw, contextlib.suppress(OSError):
            raw.sendall(data)
            raw.recv(1000)
    assert post(server, **SHORT).status_code == 200


# -- clients that vanish or stall ---------------------------------------------------------------------------------------
def running(served: Served) -> int:
    return int(served.get("/stats")["running"])


def comes_to_rest(served: Served) -> bool:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if served.get("/health")["requests"] == 0 and running(served) == 0:
            return True
        time.sleep(0.05)
    return False


def test_a_client_that_vanishes_without_streaming_ends_its_text(server: Served) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps({**LONG, "n": 8}).encode()
    raw = socket.create_connection((host, int(port)), timeout=10)
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    time.sleep(0.05)
    raw.close()
    assert comes_to_rest(server)


def aborted(served: Served) -> float:
    """Texts that ended because nobody wanted them any more."""
    with urllib.request.urlopen(served.url + "/metrics", timeout=20) as answer:
        counts = [line for line in answer.read().decode().splitlines() if line.startswith("vllm:request_success_total")]
    return sum(float(line.rpartition(" ")[2]) for line in counts if '"abort"' in line)


@pytest.mark.parametrize("streaming", [True, False])
def test_whoever_goes_away_leaves_a_trace(server: Served, streaming: bool) -> None:
    before, told, host = aborted(server), len(server.events()), server.url.removeprefix("http://")
    body = json.dumps({**LONG, "n": 60, "stream": streaming})
    with contextlib.closing(http.client.HTTPConnection(host, timeout=20)) as connection:
        connection.request("POST", "/v1/completions", body)
        while running(server) == 0:
            time.sleep(0.01)
        if streaming:
            connection.getresponse().read(10)
    assert comes_to_rest(server)
    (gone,) = [event for event in server.events()[told:] if event["event"] == "client_gone"]
    assert gone["path"] == "/v1/completions"
    assert gone["id"].startswith("cmpl-")
    assert 0 < gone["completion_tokens"] < 60 * 90
    assert 1 <= aborted(server) - before <= 60
    assert not [event for event in server.events()[told:] if event["event"] == "request"]


@pytest.mark.deep
def test_a_client_that_does_not_read_loses_its_stream_alone(serve: Callable[..., Served]) -> None:
    served = serve("--stall-timeout", "1")
    host, _, port = served.url.removeprefix("http://").partition(":")
    body = json.dumps({**LONG, "n": 64, "stream": True, "provenance": True, "logprobs": 20}).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((host, int(port)))
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert post(served, **SHORT).status_code == 200, "the others are served meanwhile"
    assert comes_to_rest(served)
    raw.close()
    assert not [event for event in served.events() if event["event"] == "http"], "it is nobody's error"


# -- limits -------------------------------------------------------------------------------------------------------------
def test_more_requests_than_are_admitted_are_told_when_to_come_back(bounded: Served) -> None:
    served, pid = bounded, worker(bounded)

    def prompt_tokens() -> float:
        found = re.search(r"^vllm:prompt_tokens_total\{.*\} (.*)$", httpx.get(f"{served.url}/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = prompt_tokens()
    slow_down(pid)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        two = [pool.submit(post, served, **SHORT) for _ in range(2)]
        while served.get("/health")["requests"] < 2:
            time.sleep(0.02)
        refused = post(served, **SHORT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        os.kill(pid, signal.SIGCONT)
        assert [answer.result().status_code for answer in two] == [200, 200]
    answer = post(served, **SHORT)
    assert answer.status_code == 200
    assert prompt_tokens() - before == 3 * answer.json()["usage"]["prompt_tokens"], "that which was refused has none"
    for ask in ({"n": 3}, {"prompt": ["w1", "w2", "w3"]}):
        answer = post(served, **{**SHORT, **ask})
        assert answer.status_code == 400, "it would never be admitted"
        assert "asks for 3 texts, wanted at most 2 (--max-requests)" in answer.json()["error"]["message"]
        assert "retry-after" not in answer.headers


def test_a_request_that_waits_too_long_is_told_so(small: Served) -> None:
    served, pid = small, worker(small)
    slow_down(pid)
    for streaming in (False, True):
        answer = post(served, **SHORT, stream=streaming)
        assert answer.status_code == 503
        assert "waited too long" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
    os.kill(pid, signal.SIGCONT)
    assert comes_to_rest(served)
    assert post(served, **SHORT).status_code == 200


def test_a_request_that_names_no_length_has_one_that_the_server_allows(bounded: Served) -> None:
    messages = [{"role": "user", "content": "w2"}]
    for route, ask in (("/v1/completions", {"prompt": "w2"}), ("/v1/chat/completions", {"messages": messages})):
        answer = post(bounded, route, **ask, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == 8, answer.text


def test_a_chat_that_names_no_length_fits_into_the_blocks_that_there_are(small: Served) -> None:
    assert small.get("/v1/models")["data"][0]["max_model_len"] == 48
    answer = post(small, "/v1/chat/completions", messages=[{"role": "user", "content": "w2"}], ignore_eos=True)
    assert answer.json()["usage"]["total_tokens"] == 48, answer.text


def test_keys_and_origins(serve: Callable[..., Served], tmp_path: Path) -> None:
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("first\nsecond\nschl\u00fcssel\n", encoding="utf-8")
    admin.write_text("third\n")
    served = serve("--api-key-file", str(keys), "--admin-key-file", str(admin), "--cors-origin", "https://page.example")
    assert served.get("/health")["status"] == "ok"
    for key, status in ((None, 401), ("wrong", 401), ("third", 401), ("first", 200), ("second", 200)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = post(served, **SHORT, headers=headers)
        assert answer.status_code == status
        assert ("www-authenticate" in answer.headers) == (status == 401)
    for key, status in (("schl\u00fcssel", 200), ("schlussel", 401), ("\u00fc", 401)):
        raw = {b"Authorization": f"Bearer {key}".encode()}
        assert post(served, **SHORT, headers=raw).status_code == status, key
    for header, status in (("bearer first", 200), ("first", 401), ("Basic first", 401), ("Bearer firs", 401), ("Bearer", 401)):
        assert post(served, **SHORT, headers={"Authorization": header}).status_code == status, header
    for key, status in (("first", 401), ("third", 400)):
        answer = post(served, "/admin/update_weights", path="/nowhere", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status
    for origin, allowed in (("https://page.example", "https://page.example"), ("https://other.example", None)):
        answer = httpx.options(
            f"{served.url}/v1/completions", headers={"Origin": origin, "Access-Control-Request-Method": "POST"}, timeout=20
        )
        assert answer.headers.get("access-control-allow-origin") == allowed
        headers = {"Origin": origin, "Authorization": "Bearer first"}
        assert post(served, **SHORT, headers=headers).status_code == (200 if allowed else 403)
    assert httpx.get(f"{served.url}/metrics", timeout=20).status_code == 401


@pytest.mark.parametrize("origin", ["https://page.example", "http://127.0.0.1:1", "http://127.0.0.1", "null", "http://[", ""])
def test_no_page_of_another_origin_may_call_by_default(server: Served, origin: str) -> None:
    headers = {"Origin": origin, "Content-Type": "text/plain"}  # a browser asks nobody before it sends this
    answer = post(server, **SHORT, headers=headers)
    assert answer.status_code == 403
    assert "--cors-origin" in answer.json()["error"]["message"]
    assert "access-control-allow-origin" not in answer.headers


def test_pages_of_the_server_itself_may_call(server: Served) -> None:
    port = server.url.rpartition(":")[2]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST:9", "[::1]:9"):  # the last ones through a tunnel
        assert post(server, **SHORT, headers={"Origin": f"http://{host.lower()}", "Host": host}).status_code == 200
    rebound = post(server, **SHORT, headers={"Origin": f"http://evil.example:{port}", "Host": f"evil.example:{port}"})
    assert rebound.status_code == 403, "its name has come to mean this machine"


@pytest.mark.parametrize(
    ("host", "allowed", "origin", "served"),
    [
        ("0.0.0.0", (), "http://box.example:8000", True),
        ("0.0.0.0", (), "https://box.example:8000", True),
        ("0.0.0.0", (), "http://box.example", False),
        ("127.0.0.1", (), "http://box.example:8000", False),
        ("localhost", (), "http://box.example:8000", False),
        ("127.0.0.1", ("http://box.example:8000",), "http://box.example:8000", True),
        ("127.0.0.1", ("*",), "null", True),
    ],
)  # fmt: skip
def test_whose_pages_may_call(host: str, allowed: tuple[str, ...], origin: str, served: bool) -> None:
    headers = [(b"host", b"box.example:8000"), (b"origin", origin.encode())]
    request = Request({"type": "http", "method": "POST", "headers": headers})
    with contextlib.nullcontext() if served else pytest.raises(HttpError, match="wanted a page of this server itself"):
        check_origin(request, allowed, host)


@pytest.mark.deep
def test_weights_are_replaced_while_texts_run(serve: Callable[..., Served], tmp_path: Path) -> None:
    admin = tmp_path / "admin"
    admin.write_text("key\n")
    served = serve("--admin-key-file", str(admin))
    assert served.get("/openapi.json")["paths"]["/admin/update_weights"]["post"]["requestBody"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        text = pool.submit(post, served, **LONG)
        answer = post(served, "/admin/update_weights", path=str(tiny.checkpoint(MODEL)), headers={"Authorization": "Bearer key"})
        assert answer.status_code == 200
        assert text.result().json()["choices"][0]["text"] == offline(LONG["max_tokens"])


def test_a_server_that_sleeps(serve: Callable[..., Served], tmp_path: Path) -> None:
    admin = tmp_path / "admin"
    admin.write_text("key\n")
    served = serve("--admin-key-file", str(admin), "--enable-sleep-mode", "--weights-digest")
    key = {"Authorization": "Bearer key"}
    assert {"/admin/sleep", "/admin/wake_up"} <= served.get("/openapi.json")["paths"].keys()
    assert post(served, "/admin/sleep").status_code == 401
    first = served.get("/v1/models")["data"][0]["weights_digest"]
    assert len(first) == 64
    with concurrent.futures.ThreadPoolExecutor() as pool:
        text = pool.submit(post, served, **LONG)
        while not served.get("/stats")["running"] and not text.done():
            time.sleep(0.005)
        assert post(served, "/admin/sleep", level=2, headers=key).json()["weights_digest"] == first
        assert text.result().json()["choices"][0]["text"] == offline(LONG["max_tokens"]), "it ended first"
    assert served.status("/ready") == (503, "asleep")
    assert served.status("/health") == (200, "asleep")
    refused = post(served, **SHORT)
    assert refused.status_code == 503
    assert "asleep" in refused.json()["error"]["message"]
    failed = post(served, "/admin/update_weights", path=str(tiny.checkpoint(MODEL)), headers=key)
    assert (failed.status_code, "asleep" in failed.json()["error"]["message"]) == (400, True)
    assert post(served, "/admin/wake_up", path="/nowhere", headers=key).status_code == 400
    assert served.status("/ready") == (503, "asleep")
    one = {"w": {"handle": "00" * 64, "offset": 0, "shape": [1], "dtype": "float32"}}
    for fields, said in (
        ({"shared": one}, "reads no memory of other processes"),
        ({"shared": one, "path": "/"}, "got both path and shared"),
    ):
        refused = post(served, "/admin/wake_up", headers=key, **fields)
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text
    far = {"w": {**one["w"], "offset": 10**30}}
    assert "cannot be sent to the engine" in post(served, "/admin/wake_up", headers=key, shared=far).json()["error"]["message"]
    broken = tmp_path / "broken"
    shutil.copytree(tiny.checkpoint(MODEL), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2**70}))
    assert post(served, "/admin/wake_up", headers=key, path=str(broken)).status_code == 400
    assert "got no weights" in post(served, "/admin/update_weights", headers=key).json()["error"]["message"]
    assert served.status("/ready") == (503, "asleep")
    assert post(served, "/admin/wake_up", headers=key).status_code == 200
    assert served.status("/ready") == (200, "ok")
    answer = post(served, **LONG).json()
    assert answer["choices"][0]["text"] == offline(LONG["max_tokens"])
    assert answer["system_fingerprint"].endswith(f"+{first}")
    other = post(served, "/admin/update_weights", path=str(tiny.checkpoint(tiny.moved(MODEL))), headers=key).json()
    assert other["weights_digest"] != first
    assert served.get("/v1/models")["data"][0]["weights_digest"] == other["weights_digest"]
    assert post(served, **SHORT).json()["system_fingerprint"].endswith(other["weights_digest"])
    drew = post(served, "/v1/chat/completions", messages=[{"role": "user", "content": "w2"}], max_tokens=3, weights_digests=True)
    assert drew.json()["choices"][0]["weights_digests"] == [other["weights_digest"]]
    as_documented(served)
    assert served.get("/v1/models")["data"][0]["weights_digest"] == other["weights_digest"]
    assert post(served, "/admin/sleep", headers=key).status_code == 200
    os.kill(worker(served), signal.SIGKILL)
    assert served.becomes("restarting")
    assert served.becomes("asleep"), "as it was"
    assert served.get("/v1/models")["data"][0]["weights_digest"] == first, "those of its start"
    assert post(served, "/admin/wake_up", headers=key).status_code == 200
    lost = httpx.get(served.url + "/ready")
    assert (lost.status_code, lost.json()["status"]) == (503, "lost")
    reason = "the engine's process ended (SIGKILL, Killed), and the weights that had been given with it; give them again"
    assert (served.get("/health")["reason"], [e for e in served.events() if e["event"] == "engine"][-1]["reason"]) == (
        reason,
    ) * 2
    refused = post(served, **SHORT)
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, reason)
    assert post(served, "/admin/update_weights", path=str(tiny.checkpoint(tiny.moved(MODEL))), headers=key).json() == {
        **other, "seconds": ANY,
    }  # fmt: skip
    assert served.get("/health") == {"status": "ok", "requests": 0, "restarts": 1}


def as_documented(served: Served) -> None:
    """Make the administrative calls of the page, in order, with models that there are."""
    calls = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("curl ") and "/admin/" in line]
    models = {"/models/step-200": tiny.checkpoint(MODEL), "/models/step-201": tiny.checkpoint(tiny.moved(MODEL))}
    assert [line.split()[1].rpartition("/")[2] for line in calls] == ["update_weights", "sleep", "wake_up"]
    for line in calls:
        for name, there in {"http://127.0.0.1:8000": served.url, "$ADMIN_KEY": "key", **models}.items():
            line = line.replace(name, str(there))  # noqa: PLW2901  one text, word by word
        _, url, *options = shlex.split(line)
        given = list(zip(options[::2], options[1::2], strict=True))
        headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl says
        headers |= dict(value.split(": ") for option, value in given if option == "-H")
        (body,) = (value for option, value in given if option == "-d")
        answer = httpx.post(url, headers=headers, content=body, timeout=20)
        assert answer.status_code == 200, answer.text


def offline(length: Any) -> str:
    llm = LLM(model=str(tiny.checkpoint(MODEL)), backend="reference", invariant=True)
    return llm.generate("w2", SamplingParams(max_new_tokens=length, ignore_eos=True))[0].text


# -- what goes wrong beneath --------------------------------------------------------------------------------------------
def test_an_engine_that_dies_is_told_to_everybody_and_replaced(serve: Callable[..., Served]) -> None:
    served = serve()
    pid = worker(served)
    slow_down(pid)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = [pool.submit(post, served, **LONG, stream=streaming) for streaming in (False, True, False)]
        while served.get("/health")["requests"] < 3:
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        for answer in waiting:
            assert answer.result().status_code == 503
            assert "process ended" in answer.result().json()["error"]["message"]
    assert served.becomes("ok")
    assert served.get("/health")["restarts"] == 1
    assert post(served, **LONG).json()["choices"][0]["text"] == offline(LONG["max_tokens"])
    assert [event["state"] for event in served.events() if event["event"] == "engine"] == ["ready", "restarting", "ready"]


@pytest.mark.deep  # `make test` sees it where the engine cannot come back
def test_a_stream_whose_engine_dies_ends_with_an_error(serve: Callable[..., Served]) -> None:
    served = serve()
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**LONG, "n": 60, "stream": True}, timeout=20) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        os.kill(worker(served), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert "process ended" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
    assert rest[-1] == "data: [DONE]"


@pytest.mark.deep
@pytest.mark.parametrize("gap", [0, 0.05, 0.3, 1.0])
def test_a_server_that_is_stopped_while_its_engine_starts_anew_ends(serve: Callable[..., Served], gap: float) -> None:
    served = serve()
    os.kill(worker(served), signal.SIGKILL)
    time.sleep(gap)
    assert served.stop() == 0
    assert served.events()[-1]["event"] == "stopped"
    assert not [event for event in served.events() if event["event"] == "http"], "and quietly"


@pytest.mark.deep  # `make test` sees it of a server that tells what it does
def test_sigterm_lets_texts_end_and_refuses_new_ones(serve: Callable[..., Served]) -> None:
    served = serve()
    texts: list[Any] = []
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**LONG, "stream": True}, timeout=20) as answer:
        lines = answer.iter_lines()
        texts.append(next(lines))
        served.process.send_signal(signal.SIGTERM)
        texts += [line for line in lines if line]
    assert texts[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in texts if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == offline(LONG["max_tokens"])
    assert served.process.wait(20) == 0
    assert served.events()[-1]["event"] == "stopped"


def test_a_server_that_is_stopped_while_its_engine_starts_does_not_wait_for_it() -> None:
    command = [sys.executable, "-c", "from polydraft.cli import main; main()", "serve", "--port", "0", "--backend", "reference"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        served = SimpleNamespace(process=process)
        while not (pid := worker(served)):
            time.sleep(0.02)
        slow_down(pid)
        process.send_signal(signal.SIGTERM)
        out, told = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "")
    events = [json.loads(line) for line in told.splitlines()]
    assert [(event["event"], event.get("state", "")) for event in events] == [
        ("listening", ""), ("draining", ""), ("engine", "stopped"), ("stopped", ""),
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["too long", "another signal"])
def test_whoever_is_served_when_a_server_stops_for_good_is_told_so(serve: Callable[..., Served], how: str) -> None:
    served = serve("--drain-timeout", "0.3" if how == "too long" else "30")
    pid, ask = worker(served), {**LONG, "n": 60, "stream": True}
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        httpx.stream("POST", f"{served.url}/v1/completions", json=ask, timeout=20) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        slow_down(pid)
        streaming = served.get("/health")["requests"]
        whole = pool.submit(post, served, **LONG)
        while served.get("/health")["requests"] == streaming:
            time.sleep(0.02)
        served.process.send_signal(signal.SIGINT)
        if how == "another signal":
            while served.events()[-1]["event"] != "draining":
                time.sleep(0.02)
            served.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert "server stops" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
    assert rest[-1] == "data: [DONE]"
    assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, 503)
    os.kill(pid, signal.SIGCONT)
    assert served.process.wait(20) == 0
    assert not [event for event in served.events() if event["event"] == "http"], "and quietly"


def test_a_compressed_body_is_refused_as_that(server: Served) -> None:
    body = gzip.compress(json.dumps(SHORT).encode())
    answer = httpx.post(server.url + "/v1/completions", content=body, headers={"Content-Encoding": "gzip"}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        415, "the body's Content-Encoding is 'gzip', wanted none; send it as it is",
    )  # fmt: skip


def test_a_body_with_two_lengths_is_refused_and_ends_the_connection(server: Served) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(SHORT).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        answer = b""
        while more := raw.recv(1 << 16):
            answer += more
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"wanted one of them" in answer


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no device that is always full")
    log = Log(str(full))
    for _ in range(3):
        log.tell("request", id="x")
    log.close()
    assert log.lost == 3


def test_a_message_is_not_lost_where_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    log, since = SimpleNamespace(tell=lambda event, **fields: told.append(fields)), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: since[0])
    handler = _ToLog(log)  # type: ignore[arg-type]
    for seconds, clock in ((0, 5000.0), (0.5, 5000.5), (0.6, 1400.0), (REPEATED_S, 1401.0)):
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "no descriptor left", None, None)
        since[0], record.created = since[0] + seconds, clock
        handler.emit(record)
    assert [fields.get("left_out", 0) for fields in told] == [0, 1, 0]


def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LAST_S", 0.2)
    monkeypatch.setattr(logs, "MOST_WAITING", 100)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="nobody reads this pipe"):
        Log(str(pipe))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = Log(str(pipe))
    began = time.monotonic()
    for number in range(2000):
        log.tell("request", id=str(number), why="x" * 1000)
    assert time.monotonic() - began < 1.0, "it did not wait for a pipe of 64 kB"
    assert log.lost > 1500
    log.close()
    read = b""
    with contextlib.suppress(BlockingIOError):
        while more := os.read(reader, 1 << 16):
            read += more
    os.close(reader)
    ids = [int(json.loads(line)["id"]) for line in read.splitlines()[:40]]  # 16 pages of a pipe have three lines each
    assert ids == list(range(40)), "what was written is whole and in order"


F_SETPIPE_SZ = 1031
"""Of Linux; `fcntl` has it from Python 3.10 on, but not in every build."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a pipe be made small")
@pytest.mark.deep
def test_a_server_whose_standard_error_nobody_reads_serves_on(tmp_path: Path) -> None:
    served = Served(tmp_path, "--log-file", "", "--max-requests", "4")
    assert served.process.stderr is not None
    fcntl.fcntl(served.process.stderr, F_SETPIPE_SZ, 4096)
    for _ in range(60):  # each failed one is a line
        assert post(served, prompt="w1", model="y" * 60).status_code == 404
    assert post(served, **SHORT).status_code == 200
    assert served.stop() == 0


@pytest.mark.deep
def test_a_server_with_a_full_log_and_a_closed_output_serves_on(serve: Callable[..., Served]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    served = serve("--log-file", "/dev/full")
    assert served.process.stdout is not None
    served.process.stdout.close()
    for _ in range(3):
        assert post(served, **SHORT).status_code == 200
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=20) as answer:
        lost = next(line for line in answer.read().decode().splitlines() if line.startswith("polydraft:log_lines_lost"))
    assert float(lost.rpartition(" ")[2]) > 0


def test_a_model_that_cannot_be_loaded_is_told_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from polydraft.cli import main; main()", "serve", "--port", "0", "--model", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "config.json" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert [json.loads(line)["event"] for line in result.stderr.splitlines()[:-1]] == [
        "listening", "engine", "draining", "stopped",
    ], "said once"  # fmt: skip
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--log-file", "/no/such/place/log"), "--log-file /no/such/place/log cannot be written: No such file or directory"),
        (("--chat-template", "/no/template"), "--chat-template /no/template cannot be read"),
        (("--drain-timeout", "0"), "--drain-timeout is 0.0, wanted a number above 0"),
        (("--queue-timeout", "nan"), "--queue-timeout is nan, wanted a number above 0"),
        (("--max-new-tokens", "-3"), "--max-new-tokens is -3, wanted 0 (no bound) or more"),
        (("--port", "80000"), "--port is 80000, wanted 0 (any free one) to 65535"),
        (("--host", "192.0.2.1"), "192.0.2.1 port 0 cannot be listened on"),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, tuple) else "",
)
def test_what_a_server_cannot_do_is_told_before_anything_starts(
    option: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", *option])
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert said in told.err.splitlines()[-1]
    assert told.out == ""


def test_a_file_with_several_keys_for_administration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", "--admin-key-file", str(keys)])
    assert ended.value.code == 2
    assert "has 2 lines, wanted one key" in capsys.readouterr().err.splitlines()[-1]


def test_several_clients_at_once_have_the_texts_of_one(server: Served) -> None:
    """A small version of the load that `bench/serve_load.py` puts on a server."""
    wanted = post(server, **LONG).json()["choices"][0]["text"]
    found: list[str] = []

    def stream() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
            lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        found.append("".join(line["choices"][0]["text"] for line in lines))

    threads = [threading.Thread(target=stream) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [wanted] * 12


def test_the_extra_names_what_is_needed() -> None:
    assert set(NEEDED) == {"starlette", "uvicorn", "msgspec", "zmq", "prometheus_client"}
