"""Runs a server: uvicorn around the application, a message when it is ready, and a clean end on SIGTERM.

`polydraft serve` calls `run`; tests call it in a separate process. It returns only when the engine's process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import uvicorn

from polydraft.errors import ConfigError, DeviceError
from polydraft.serving.app import build
from polydraft.serving.engine_client import EngineClient
from polydraft.serving.logs import Log
from polydraft.serving.settings import ServerSettings


class _ToLog(logging.Handler):
    """What uvicorn says, as events."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it without its traceback, of which the last line says what happened."""
        lines = record.getMessage().strip().splitlines() or [""]
        message = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        self._log.tell("http", level=record.levelname.lower(), message=message)


class _Uvicorn(uvicorn.Server):
    """Says when it listens, gives up a start when asked to, and lets texts end before it is stopped for good: for
    `drain_s`, or until a second signal comes; then it tells whoever still waits."""

    def __init__(
        self, config: uvicorn.Config, client: EngineClient, log: Log, *, ready: Callable[[], None], drain_s: float
    ) -> None:
        super().__init__(config)
        self._client, self._log, self._ready, self._drain_s = client, log, ready, drain_s
        self._hurry = asyncio.Event()
        self.asked = False
        """A signal has come."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the server; unlike uvicorn's, without being raised again behind its end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets texts end, the second ends them, a third one does not wait for anything."""
        again, self.asked = self.asked, True
        if not self.started:
            self._loop.call_soon_threadsafe(self._client.abandon)
        if again and not self._hurry.is_set():
            self._loop.call_soon_threadsafe(self._hurry.set)
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; the engine stands behind it."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which would cut off whoever is still served instead of telling them."""
        self._log.tell("draining", requests=self._client.num_requests, seconds=self._drain_s)
        patience = asyncio.create_task(self._lose_patience())
        try:
            await super().shutdown(sockets)
        finally:
            patience.cancel()

    async def _lose_patience(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._drain_s)
        self._client.dismiss("the server stops before the text has ended; send the request to another one")


TELL_S = 5
"""Seconds for the last answers of a server that stops to be taken."""


def run(engine: Mapping[str, Any], settings: ServerSettings, *, ready: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; `ready(url)` is called once requests are served. Returns 0, or 1 where the engine could not
    be started. Raises `ConfigError` for an address that cannot be listened on, and for a file that cannot be opened."""
    log = Log(settings.log_file, prompts=settings.log_prompts)
    client = EngineClient(engine, most=settings.max_requests, tell=log.tell)
    application = build(settings, client, log)
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="on", server_header=False, date_header=False,
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + TELL_S, timeout_keep_alive=30,
        h11_max_incomplete_event_size=1 << 16,
    )  # fmt: skip

    def say() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody has to listen
            ready(url)

    server = _Uvicorn(config, client, log, ready=say, drain_s=settings.drain_s)
    handler = _ToLog(log)
    handler.addFilter(lambda _: server.started or not client.reason)  # why an engine could not start has been reported
    logging.getLogger("uvicorn.error").addHandler(handler)
    logging.getLogger("uvicorn.error").propagate = False
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # uvicorn leaves by it where a start fails
        asyncio.run(server.serve([listener]))
    if not server.started and not server.asked:
        raise DeviceError(client.reason or "the server could not be started; see the messages above")
    return 0


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{settings.host} port {settings.port} cannot be listened on: {error.strerror}; choose another --host or --port"
        ) from error
    return listener
