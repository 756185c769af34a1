"""HTTP handling for the routes: bodies within bounds, keys compared in constant time, streams to clients that may stall or
vanish.

It knows nothing of models, and lets no client cost more than the settings allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polydraft.serving.answers import error_body
from polydraft.serving.protocol import ID_PATTERN

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
REQUEST_ID = "x-request-id"


class HttpError(Exception):
    """An answer with an error: a status, OpenAI's kind of error, one sentence, and the field of the body that it is about."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", retry_s: int | None = None, allow: str = "",
        closes: bool = False, param: str = "",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.kind, self.retry_s, self.allow, self.closes = status, kind, retry_s, allow, closes
        self.param = param

    def response(self) -> JSONResponse:
        """As it is sent."""
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allow:
            headers["Allow"] = self.allow
        if self.closes:
            headers["Connection"] = "close"
        return JSONResponse(self.body(), self.status, headers)

    def body(self) -> dict[str, Any]:
        """OpenAI's object of it."""
        return error_body(str(self), self.kind, self.status, self.param)


class RequestIds:
    """An ASGI application whose answers all have an `x-request-id`: the request's own, where it has one that fits
    (`ID_PATTERN`), or what the application left in `state.request_id`, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if re.fullmatch(ID_PATTERN, given) else ""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = state["request_id"] or new_id()
            await send(message)

        await self._app(scope, receive, named)


def new_id() -> str:
    """An id for a request that brings none."""
    return uuid.uuid4().hex


class Gone(Exception):  # noqa: N818  what has happened, not a mistake
    """The client went away; `fields` are what the log says of its request."""

    def __init__(self, **fields: Any) -> None:
        super().__init__("the client went away")
        self.fields = fields


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Raises `HttpError` 401 where the request has none of `keys`; every key is compared, in constant time. Digests are, so
    that not even a key's length shows."""
    if not keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    digest = _digest(given.strip().encode("latin-1"))  # as which Starlette decodes the bytes of headers
    matches = [hmac.compare_digest(digest, _digest(key.encode())) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise HttpError(401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`", "authentication_error")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def check_origin(request: Request, allowed: Sequence[str], host: str) -> None:
    """Raises `HttpError` 403 for what a page of another origin has sent, where that is none of `allowed`: browsers send simple
    requests without asking. The origin of the server's own pages is where the request was sent to; where `host`, which the server
    listens on, is loopback, that must be loopback's name as well: any other may have come to mean this machine afterwards."""
    origin = request.headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    own = origin.partition("://")[2] == request.headers.get("host", "").lower()
    if not own or (_is_loopback(host) and not _is_loopback(_name(origin))):
        raise HttpError(
            403, f"the request comes from a page of {origin!r}, wanted a page of this server itself; allow it with --cors-origin",
            "permission_error",
        )  # fmt: skip


def _name(origin: str) -> str:
    """The host of an origin without its port; "" where there is none."""
    with contextlib.suppress(ValueError):
        return urlsplit(origin).hostname or ""
    return ""


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


class BodyRoom:
    """Room for the bodies of all requests together, `most` bytes: many that are each allowed may be more than a machine has."""

    def __init__(self, most: int) -> None:
        self._left = most

    @contextlib.contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """For the time of a request: a function that takes room for more bytes; `HttpError` 503 where there is none."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if size > self._left:
                raise HttpError(503, "the bodies of other requests take all the room there is; try again", "server_error", 1)
            taken, self._left = taken + size, self._left - size

        try:
            yield take
        finally:
            self._left += taken


async def read_body(request: Request, *, most: int, within_s: float, take: Callable[[int], None]) -> bytes:
    """The whole body, part by part taken room for. Raises `HttpError` 400 for one with two lengths, 415 for one that is
    compressed, 413 above `most` bytes, 408 where it takes longer than `within_s`, and what `take` does."""
    if "transfer-encoding" in request.headers and "content-length" in request.headers:  # proxies differ in which they believe
        raise HttpError(
            400, "the request has a Content-Length and a Transfer-Encoding, wanted one of them; leave one out", closes=True
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, f"the body's Content-Encoding is {encoding!r}, wanted none; send it as it is")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    parts: list[bytes] = []

    async def read() -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise _too_large(most)
            take(len(part))
            parts.append(part)

    try:
        await asyncio.wait_for(read(), within_s)
    except asyncio.TimeoutError:
        raise HttpError(408, f"the body did not arrive within {within_s:g} seconds; send it faster", "timeout_error") from None
    except ClientDisconnect as gone:
        raise Gone from gone
    return b"".join(parts)


def _too_large(most: int) -> HttpError:
    return HttpError(413, f"the body is larger than {most} bytes; send less")


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; raises `Gone` then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for one in (task, watch):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one


async def _gone(request: Request) -> None:
    """Return when the client has gone away; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """Server-sent events from an iterator of JSON objects; ends with OpenAI's [DONE], or is `typed`, where each event says what
    it is (`type`) and the last one that it is the last.

    A client that goes away ends the iterator, and `gone` is called; so does one that reads nothing, whose connection is ended
    (`polydraft.serving.connection`). An error of the iterator becomes the last event: `describe` makes its object."""

    def __init__(
        self, events: AsyncIterator[dict[str, Any]], *, describe: Callable[[Exception], dict[str, Any]], gone: Callable[[], None],
        typed: bool = False,
    ) -> None:  # fmt: skip
        self._events, self._describe, self._gone, self._typed = events, describe, gone, typed
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, watching for the client to leave."""
        del scope
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sender, watch = asyncio.create_task(self._send(send)), asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sender, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, watch):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await asyncio.shield(close())
            if not self._complete:
                self._gone()

    async def _send(self, send: Send) -> None:
        async def piece(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})
            await asyncio.sleep(0)  # where much waits for one client, the others have their turn all the same

        try:
            async for event in self._events:
                await piece(self._coded(event))
        except OSError:
            return  # the client can no longer be reached
        except Exception as error:  # noqa: BLE001  reported to the client, which waits
            await piece(self._coded(self._describe(error)))
        await piece(b"" if self._typed else DONE, more=False)
        self._complete = True

    def _coded(self, event: dict[str, Any]) -> bytes:
        head = f"event: {event['type']}\n".encode() if self._typed else b""
        return head + b"data: " + json.dumps(event, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
