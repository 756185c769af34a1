"""The manners of HTTP by themselves: a client that leaves is noticed, whatever else happens at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request

from polydraft.output.request_delta import pack
from polydraft.serving import wire
from polydraft.serving.engine_client import EngineClient
from polydraft.serving.http import BodyRoom, EventStream, Gone, HttpError, read_body, until_gone
from tests.serving.test_engine_client import delta

TICKS = range(6)
"""Turns of the event loop between two things that happen together: in some of them a cancellation meets what
it ends when that has just ended."""


class Leaving:
    """A client that leaves when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def leave(self, ticks: int) -> None:
        self.left.set()
        for _ in range(ticks):
            await asyncio.sleep(0)


async def numbers(taken: list[int]) -> AsyncIterator[dict[str, Any]]:
    """A text that does not end by itself."""
    for number in range(1000):
        taken.append(number)
        yield {"number": number}


@pytest.mark.parametrize("ticks", TICKS)
def test_a_stream_ends_when_its_client_leaves_while_a_piece_goes(ticks: int) -> None:
    """A socket that is closed is free as well: uvicorn's `send` returns."""
    taken: list[int] = []
    told: list[str] = []

    async def scene() -> None:
        client, free = Leaving(), asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await free.wait()

        stream = EventStream(numbers(taken), describe=lambda error: {}, gone=lambda: told.append("gone"))
        running = asyncio.ensure_future(stream({}, client.receive, send))
        await asyncio.sleep(0.001)
        await client.leave(ticks)
        free.set()
        await running

    asyncio.run(scene())
    assert 1 <= len(taken) < 20
    assert told == ["gone"]


def test_a_stream_that_is_taken_to_its_end_lost_nobody() -> None:
    taken: list[int] = []
    told: list[str] = []
    sent: list[bytes] = []

    async def scene() -> None:
        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        stream = EventStream(numbers(taken), describe=lambda error: {}, gone=lambda: told.append("gone"))
        await stream({}, Leaving().receive, send)

    asyncio.run(scene())
    assert (len(taken), len(sent), sent[-1], told) == (1000, 1002, b"data: [DONE]\n\n", [])


@pytest.mark.parametrize("ticks", TICKS)
def test_a_client_that_leaves_when_the_first_news_come_is_not_served_on(ticks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[wire.Command] = []

    async def send(command: wire.Command) -> None:
        sent.append(command)

    async def scene() -> None:
        engine, client = EngineClient({}, most=8, tell=lambda *given, **more: None), Leaving()
        monkeypatch.setattr(engine, "_send", send)
        engine.state = "ready"

        async def whole() -> None:
            async for _ in engine.generate([([1], {})], first_s=20):
                pass

        running = asyncio.ensure_future(until_gone(Request({"type": "http"}, client.receive), whole()))
        await asyncio.sleep(0.001)
        await client.leave(ticks)
        engine._take(wire.Outputs(pack([delta(1, 5)])))
        await asyncio.wait((running,), timeout=1)
        assert running.done(), "the text is waited for, though nobody wants it"
        with pytest.raises(Gone):
            await running

    asyncio.run(scene())
    assert [command.handle for command in sent if isinstance(command, wire.Abort)] == [1]


def test_bodies_share_their_room() -> None:
    room = BodyRoom(10)

    class Sending:
        def __init__(self, *parts: bytes) -> None:
            self.parts = list(parts)

        async def receive(self) -> Any:
            return {"type": "http.request", "body": self.parts.pop(0), "more_body": bool(self.parts)}

    async def body(sending: Sending, take: Any) -> bytes:
        return await read_body(Request({"type": "http", "headers": []}, sending.receive), most=8, within_s=5, take=take)

    async def scene() -> None:
        with room.held() as first:
            assert await body(Sending(b"abcd", b"efgh"), first) == b"abcdefgh"
            with room.held() as second:
                with pytest.raises(HttpError, match="take all the room") as refused:
                    await body(Sending(b"ab", b"c"), second)
                assert (refused.value.status, refused.value.retry_s) == (503, 1)
            with room.held() as third:
                assert await body(Sending(b"ab"), third) == b"ab", "what the one before had taken is free"
        with room.held() as last:
            assert await body(Sending(b"abcdefgh"), last) == b"abcdefgh"

    asyncio.run(scene())
