"""Connections within limits: clients that send a request's head for ever, read nothing, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from polydraft.errors import ConfigError
from polydraft.serving import connection as module
from polydraft.serving.connection import Connection, Connections
from polydraft.serving.settings import ServerSettings

ASK = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET / HTTP/1.1\r\nHost: x\r\nX-"
SMALL = 4096


class Place:
    """A server of connections alone. `GET /large` is more than any buffer takes, `GET /held` waits for `free`."""

    def __init__(self, *, most: int = 100, backlog: int = 100, head_s: float = 20, stall_s: float = 20) -> None:
        self.shared = Connections(most, backlog, head_s, stall_s)
        self.free, self.left = asyncio.Event(), asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/held":
            await self.free.wait()
        size = {"/large": 64 << 20, "/middling": 300_000}.get(path, 2)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(size).encode())]})
        await send({"type": "http.response.body", "body": b"o" * size, "more_body": path == "/large"})
        if path == "/large":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            self.left.set()

    async def connect(self, data: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=SMALL)
        self.writers.append(writer)
        writer.write(data)
        return reader

    async def turns(self) -> None:
        """Let the server take what it has been sent."""
        for _ in range(3):
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        config = uvicorn.Config(self.app, interface="asgi3", ws="none", log_config=None)
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        server = await loop.create_server(
            lambda: Connection(config=config, server_state=state, app_state={}, shared=self.shared),
            sock=listener,
            backlog=self.shared.backlog,
        )
        listener.listen(module.MOST_BACKLOG)
        try:
            yield
        finally:
            server.close()
            for writer in self.writers:
                writer.transport.abort()
            await asyncio.sleep(0.02)


def scene(act: Callable[[Place], Awaitable[None]], **limits: Any) -> Place:
    async def play() -> Place:
        place = Place(**limits)
        async with place.serving():
            await asyncio.wait_for(act(place), 20)
        return place

    return asyncio.run(play())


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until a connection is ended to which we write; a byte on its way then resets it, and takes the answer along."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half a head"])
def test_a_head_that_does_not_end_is_answered_and_its_connection_ended(sent: bytes) -> None:
    async def act(place: Place) -> None:
        answer = await (await place.connect(sent)).read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"timeout_error"' in answer
        assert place.shared.open == 0

    assert scene(act, head_s=0.05).shared.ended == {"head": 1}


def test_a_head_in_small_pieces_has_no_more_time_than_another() -> None:
    async def act(place: Place) -> None:
        reader = await place.connect(ASK % b"")
        assert (await reader.readuntil(b"oo")).startswith(b"HTTP/1.1 200 ")
        place.writers[-1].write(HALF)
        end = asyncio.ensure_future(rest(reader))
        for _ in range(200):
            place.writers[-1].write(b"x")
            if end.done():
                break
            await asyncio.sleep(0.01)
        assert (await end)[:13] in (b"HTTP/1.1 408 ", b"")

    assert scene(act, head_s=0.1).shared.ended == {"head": 1}


def test_a_body_that_nobody_waits_for_ends_its_connection_as_well() -> None:
    async def act(place: Place) -> None:
        reader = await place.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        await reader.readuntil(b"oo")
        end = asyncio.ensure_future(rest(reader))
        while not end.done():
            place.writers[-1].write(b"x")
            await asyncio.sleep(0.01)
        assert await end == b"", "the answer was given before"

    assert scene(act, head_s=0.1).shared.ended == {"head": 1}


def test_who_reads_nothing_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    async def act(place: Place) -> None:
        await place.connect(ASK % b"large")
        await place.left.wait()
        await place.turns()
        assert place.shared.open == 0

    assert scene(act, stall_s=0.1).shared.ended == {"stalled": 1}
    assert not caplog.records, "which is nobody's error"


def test_the_end_of_an_answer_must_be_read_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application has sent it all, and uvicorn would wait for ever to close."""
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0)

    async def act(place: Place) -> None:
        place.app = large  # type: ignore[method-assign]
        await place.connect(ASK % b"")
        await asyncio.sleep(0.3)
        assert place.shared.open == 0

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"o" * (64 << 20)})

    assert scene(act, stall_s=0.1).shared.ended == {"stalled": 1}


def test_one_that_reads_slowly_is_served() -> None:
    async def act(place: Place) -> None:
        reader = await place.connect(ASK % b"middling")
        await reader.readuntil(b"\r\n\r\n")
        taken = 0
        while taken < 300_000:
            taken += len(await reader.read(60_000))
            await asyncio.sleep(0.02)
        assert taken == 300_000

    assert not scene(act, stall_s=0.1).shared.ended


def test_idle_connections_make_room_and_the_oldest_first() -> None:
    async def act(place: Place) -> None:
        held = await place.connect(ASK % b"held")
        await place.turns()
        halves = [await place.connect(HALF) for _ in range(8)]
        await place.turns()
        for _ in range(3):
            answer = await (await place.connect(ASK % b"")).readuntil(b"oo")
            assert answer.startswith(b"HTTP/1.1 200 ")
        assert place.shared.open == 4
        for half in halves:
            assert await half.read() == b""
        place.free.set()
        assert (await held.readuntil(b"oo")).startswith(b"HTTP/1.1 200 "), "who is served has the place"

    assert scene(act, most=4).shared.ended == {"displaced": 8}


def test_where_all_are_served_one_more_is_told_so() -> None:
    async def act(place: Place) -> None:
        held = [await place.connect(ASK % b"held") for _ in range(3)]
        await place.turns()
        head, _, told = (await (await place.connect(ASK % b"")).read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head.lower()
        assert "3 connections are served" in json.loads(told)["error"]["message"]
        place.free.set()
        for one in held:
            assert (await one.readuntil(b"oo")).startswith(b"HTTP/1.1 200 ")

    assert scene(act, most=3).shared.ended == {"full": 1}


@pytest.mark.parametrize("version", [b"9.9", b"2.0", b"0.9"])
def test_another_http_is_not_spoken(version: bytes) -> None:
    async def act(place: Place) -> None:
        answer = await (await place.connect(b"GET / HTTP/%s\r\nHost: x\r\n\r\n" % version)).read()
        assert answer.startswith(b"HTTP/1.1 505 ")
        assert b"wanted HTTP/1.1" in answer
        later = await (await place.connect(b"GET / HTTP/1.2\r\nHost: x\r\n\r\n")).readuntil(b"oo")
        assert later.startswith(b"HTTP/1.1 200 "), "a later one of the same kind is"

    scene(act)


def test_what_is_no_http_is_told_as_every_other_error() -> None:
    async def act(place: Place) -> None:
        head, _, told = (await (await place.connect(b"\0garbage\r\n\r\n")).read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert "is no HTTP/1.1" in json.loads(told)["error"]["message"]

    scene(act)


@pytest.mark.parametrize("path", [b"", b"held"], ids=["behind its answer", "before it"])
def test_a_body_that_is_no_http_ends_the_connection_and_is_nobodys_error(path: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def act(place: Place) -> None:
        reader = await place.connect(b"POST /%s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path)
        if path:
            await place.turns()
        else:
            await reader.readuntil(b"oo")
        place.writers[-1].write(b"no length\r\n")
        rest = await reader.read()
        assert rest.startswith(b"HTTP/1.1 400 ") if path else rest == b""
        place.free.set()

    scene(act)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_flood_of_connections_leaves_descriptors() -> None:
    """Those that are accepted but not counted yet, and those that are ended but not closed yet, have descriptors, too."""
    before, most = module._open_descriptors(), 0

    async def act(place: Place) -> None:
        nonlocal most
        opened = [socket.socket() for _ in range(400)]
        for one in opened:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", place.port))
        for _ in range(200):
            most = max(most, module._open_descriptors())
            await asyncio.sleep(0)
        for one in opened:
            one.close()

    place = scene(act, most=16, backlog=32)
    assert place.shared.ended["displaced"] > 300
    assert most - before - 400 <= place.shared.most + module.ROUNDS * place.shared.backlog + 8


def test_as_many_connections_as_there_are_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    monkeypatch.setattr(module, "_open_descriptors", lambda: 20)
    shared = Connections.of(ServerSettings())
    assert shared.most + module.ROUNDS * shared.backlog + 20 + module.RESERVED <= 256
    assert shared.most > 100
    assert Connections.of(ServerSettings(max_connections=7)).most == 7
    with pytest.raises(ConfigError, match=r"200 connections .* descriptors for 143; raise the limit"):
        Connections.of(ServerSettings(max_connections=200))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (32, 32))
    with pytest.raises(ConfigError, match="descriptors for 0; raise the limit"):
        Connections.of(ServerSettings())
