"""Owns the run of a server: uvicorn around the application, a word when it is ready, and a quiet end on SIGTERM.

`polydraft serve` calls `run`; tests call it in a process of its own. It never returns before the engine's process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
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
        told = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        self._log.tell("http", level=record.levelname.lower(), message=told)


class _Uvicorn(uvicorn.Server):
    """Says when it listens, and tells streams to end before it is stopped for good."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the server; unlike uvicorn's, without being raised again behind its end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; the engine stands behind it."""
        await super().startup(sockets)
        if self.started:
            self._ready()


def run(engine: Mapping[str, Any], settings: ServerSettings, *, ready: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; `ready(url)` is called once requests are served. Returns 0, or 1 where the engine could not
    be started. Raises `ConfigError` for an address that cannot be listened on, and for a file that cannot be opened."""
    log = Log(settings.log_file, prompts=settings.log_prompts)
    client = EngineClient(engine, most=settings.max_requests, tell=log.tell)
    application = build(settings, client, log)
    listener = _listen(settings)
    logging.getLogger("uvicorn.error").addHandler(_ToLog(log))
    logging.getLogger("uvicorn.error").propagate = False
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="on", server_header=False, date_header=False,
        timeout_graceful_shutdown=int(settings.drain_s) or 1, timeout_keep_alive=30, h11_max_incomplete_event_size=1 << 16,
    )  # fmt: skip

    def say() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody has to listen
            ready(url)

    server = _Uvicorn(config, say)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # uvicorn leaves by it where a start fails
        asyncio.run(server.serve([listener]))
    if not server.started:
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
