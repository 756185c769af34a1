"""One connection to the server: uvicorn's, within limits of its own.

uvicorn bounds the size of a request's head, and how long a kept connection may say nothing. Here the rest is bounded: how long a
head may take, how long a client may leave unread what it was sent, and how many connections there are. It knows nothing of
routes; `polydraft.serving.http.read_body` bounds the time of a body.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import h11
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from polydraft.errors import ConfigError
from polydraft.serving.http import REQUEST_ID, HttpError, RequestIds, new_id
from polydraft.serving.settings import ServerSettings

KEEP_ALIVE_S: Final = 30
"""Seconds that a connection is kept without a request."""
RESERVED: Final = 48
"""File descriptors that no connection may have: for the engine's process and its successors, pages, and logs."""
MOST_BACKLOG: Final = 2048
"""Clients that may wait to be accepted."""
ROUNDS: Final = 3
"""Of the event loop that a connection has a descriptor and is not counted: while it is accepted, and while it is ended."""
LIMITS: Final = ("head", "stalled", "displaced", "full")
"""What may end a connection: a request's head took too long, its client read nothing, another one needed its place, or there was
none for it."""


@dataclass
class Connections:
    """What all connections of a server share: their limits, and what became of them.

    `most`: connections at once; one more takes the place of the one that has been idle the longest.
    `backlog`: those that asyncio accepts in one round of its loop, before they can be counted.
    Seconds: `head_s` for a request's line and headers, `stall_s` for reading what was sent."""

    most: int
    backlog: int
    head_s: float
    stall_s: float
    open: int = 0
    idle: dict[Connection, None] = field(default_factory=dict)
    """Those without a request, first who has been so the longest."""
    ended: Counter[str] = field(default_factory=Counter)
    """Connections that a limit ended, by the limit (`LIMITS`)."""

    @classmethod
    def of(cls, settings: ServerSettings) -> Connections:
        """As many as the settings say, else as the process may still have descriptors for. Raises `ConfigError` where it may not
        have as many as are asked for, or next to none."""
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _open_descriptors() - RESERVED
        backlog = max(min(free // (4 * ROUNDS), MOST_BACKLOG), 1)
        room = free - ROUNDS * backlog
        most = settings.max_connections or room
        if not 0 < most <= room:
            raise ConfigError(
                f"{settings.max_connections or 1} connections are to be served, but this process may have file descriptors for "
                f"{max(room, 0)}; raise the limit (ulimit -n), or lower --max-connections"
            )
        return cls(most, backlog, settings.head_s, settings.stall_s)


def _open_descriptors() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        if Path(folder).is_dir():
            return len(list(Path(folder).iterdir()))
    return 16


class Connection(H11Protocol):
    """One client's connection. It is idle until a request's last header is there, and between two requests; it can be displaced
    then. One deadline is set at any time, or none."""

    def __init__(self, *given: Any, shared: Connections, **more: Any) -> None:
        super().__init__(*given, **more)
        self._shared = shared
        self._app, self.app = self.app, self._admitted
        self._deadline: asyncio.TimerHandle | None = None
        self._silent = False
        """Whether nothing has come since the last answer."""

    @property
    def _busy(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    # -- what a connection may ask -----------------------------------------------------------------
    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, for a request that this server speaks the HTTP of, and that it has room for."""
        major, shared = scope["http_version"].partition(".")[0], self._shared
        if major != "1":
            wrong = f"the request is in HTTP/{scope['http_version']}, wanted HTTP/1.1; send it in that"
            await RequestIds(HttpError(505, wrong, closes=True).response())(scope, receive, send)
        elif shared.open > shared.most:
            shared.ended["full"] += 1
            full = f"{shared.most} connections are served, which is all the server admits; try again"
            await RequestIds(HttpError(503, full, "server_error", 1, closes=True).response())(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def send_400_response(self, msg: str) -> None:
        """Tell a client that sends what is no HTTP. Behind an answer to its request there is nothing more to tell."""
        del msg
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            wrong = "what was sent is no HTTP/1.1, or its line and headers are larger than 64 KiB; correct the request"
            self.transport.write(_written(HttpError(400, wrong).response()))
        self.transport.close()

    # -- what happens to a connection --------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, in the place of an idle connection where there is no room. Where none is idle, its
        request is refused."""
        super().connection_made(transport)
        shared = self._shared
        shared.open += 1
        if shared.open > shared.most and shared.idle:
            done = (
                one for one in shared.idle if not one.transport.get_write_buffer_size()
            )  # rather than cut an answer's end off
            next(done, next(iter(shared.idle)))._end("displaced")
        shared.idle[self] = None
        self._within(shared.head_s, "head")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._shared.open -= 1
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; the first bytes of a request begin the time that its head may take."""
        super().data_received(data)
        if self._busy and self in self._shared.idle:
            self._leave()
        elif self._silent and not self._busy:
            self._silent = False
            self._within(self._shared.head_s, "head")

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has come already; what was sent must be read by then."""
        super().on_response_complete()
        if not self._busy:
            self._shared.idle[self], self._silent = None, True
            self._within(KEEP_ALIVE_S + self._shared.stall_s, "stalled")

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        if self._busy:
            self._within(self._shared.stall_s, "stalled")

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if self._busy:
            self._cancel()

    # -- deadlines ---------------------------------------------------------------------------------
    def _leave(self) -> None:
        self._shared.idle.pop(self, None)
        self._cancel()

    def _within(self, seconds: float, limit: str) -> None:
        self._cancel()
        self._deadline = self.loop.call_later(seconds, self._late, limit)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self, limit: str) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if limit == "head" and (cycle is None or not cycle.more_body):  # else it has had its answer, and still sends its body
            error = HttpError(408, f"no request came within {self._shared.head_s:g} seconds; send it faster", "timeout_error")
            self.transport.write(_written(error.response()))
        self._end(limit)

    def _end(self, limit: str) -> None:
        """End it at once: closing it would wait until what it was sent is read."""
        self._shared.ended[limit] += 1
        self._leave()
        self.transport.abort()


def _written(answer: Response) -> bytes:
    """An answer outside of any request, behind which its connection ends."""
    own = ((b"connection", b"close"), (REQUEST_ID.encode(), new_id().encode()))
    heads = (b"%s: %s" % head for head in (*answer.raw_headers, *own))
    return b"\r\n".join((b"HTTP/1.1 %d " % answer.status_code, *heads, b"", bytes(answer.body)))
