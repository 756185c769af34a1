"""Runs a server: uvicorn around the application, the engine beside it, a message when it is ready, and a clean end.

`polydraft serve` calls `run`; tests call it in a separate process. It returns only when the engine's process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from polydraft.errors import ConfigError
from polydraft.serving.app import build
from polydraft.serving.connection import KEEP_ALIVE_S, MOST_BACKLOG, Connection, Connections
from polydraft.serving.engine_client import EngineClient
from polydraft.serving.logs import Log
from polydraft.serving.service import Service
from polydraft.serving.settings import ServerSettings

Ready = Callable[[str, Mapping[str, str]], None]
"""Takes where the server listens, and what was chosen for it, with the reason of each choice, by name."""
TELL_S = 5
"""Seconds for the last answers of a server that stops to be taken."""
HURRY_S = 0.5
"""Seconds that an engine has to leave after a second signal."""
REPEATED_S = 1.0
"""Seconds within which a library's message is not written again."""


class _ToLog(logging.Handler):
    """What uvicorn and asyncio say, as events. A client can have them say the same thing thousands of times a second."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._last: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it without its traceback, of which the last line says what happened, and how often it was left out before."""
        now = time.monotonic()  # `record.created` goes back where somebody sets the clock
        if now - self._last.get(record.msg, -REPEATED_S) < REPEATED_S:
            self._left_out[record.msg] += 1
            return
        self._last[record.msg] = now
        lines = record.getMessage().strip().splitlines() or [""]
        message = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        raised = record.exc_info[1] if record.exc_info else None
        why = {"error": repr(raised)} if raised is not None else {}
        left_out = self._left_out.pop(record.msg, 0)
        more = {"left_out": left_out} if left_out else {}
        self._log.tell("http", level=record.levelname.lower(), message=message, **why, **more)


class _Uvicorn(uvicorn.Server):
    """Listens while the engine is started, says when it stands, and ends when it is given up. When asked to end it lets texts end
    before it stops for good, for `drain_s`, or until a second signal comes; then it tells whoever still waits. It listens until
    then, so that `/ready` can tell."""

    def __init__(self, config: uvicorn.Config, service: Service, client: EngineClient, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._client, self._ready = service, client, ready
        self._hurry = asyncio.Event()
        self.asked = False
        """A signal has come."""
        self.failure: Exception | None = None
        """Why there is no engine."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, beside the engine."""
        self._loop = asyncio.get_running_loop()
        with self.capture_signals():  # until the engine has left, which uvicorn knows nothing of
            engine = asyncio.create_task(self._engine())
            try:
                await super().serve(sockets)
            finally:
                engine.cancel()
                await self._stop_engine()
                self._service.log.tell("stopped")

    async def _stop_engine(self) -> None:
        """Let its process leave; after a second signal, end it."""
        client = self._client
        stop, hurry = asyncio.create_task(client.stop()), asyncio.create_task(self._hurry.wait())
        await asyncio.wait((stop, hurry), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((stop,), timeout=HURRY_S)
        hurry.cancel()
        client.kill()
        await stop

    async def _engine(self) -> None:
        """Start it, and end the server where there is none any more."""
        try:
            await self._service.open()
            self._ready()
            await self._client.until_failed()
        except Exception as error:  # noqa: BLE001  whatever it is, `run` raises it
            self.failure = error
            self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM, SIGINT and, where it is not ignored (`nohup`), SIGHUP end the server; unlike uvicorn's, without being raised
        again behind its end."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets texts end, the second ends them, a third one does not wait for anything."""
        again, self.asked = self.asked, True
        if again and not self._hurry.is_set():
            self._loop.call_soon_threadsafe(self._hurry.set)
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and let more clients wait than asyncio accepts at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(MOST_BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which would cut off whoever is still served instead of telling them; before it, texts may end."""
        service, loop = self._service, asyncio.get_running_loop()
        service.draining = True
        drain_s = service.settings.drain_s
        service.log.tell("draining", requests=self._client.num_requests, seconds=drain_s)
        hurry, until = asyncio.create_task(self._hurry.wait()), loop.time() + drain_s
        while self.server_state.tasks and not hurry.done() and loop.time() < until:
            waited = {hurry, *self.server_state.tasks}
            await asyncio.wait(waited, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        self._client.dismiss("the server stops before the text has ended; send the request to another one")
        await super().shutdown(sockets)


def run(engine: Mapping[str, Any], settings: ServerSettings, *, ready: Ready) -> int:
    """Serve until a signal ends it (`_Uvicorn`); `ready(url, chosen)` is called once requests are served. Returns 0. Raises
    `ConfigError` for an address that cannot be listened on and a file that cannot be opened, `DeviceError` where the engine could
    not be started or was given up, and what else kept the server from being opened."""
    log = Log(settings.log_file, prompts=settings.log_prompts)
    try:
        return _run(engine, settings, log, ready)
    finally:
        log.close()


def _run(engine: Mapping[str, Any], settings: ServerSettings, log: Log, ready: Ready) -> int:
    client = EngineClient(
        engine, most=settings.max_requests, tell=log.tell, start_s=settings.start_s, watchdog_s=settings.watchdog_s
    )
    shared = Connections.of(settings)
    service = Service(settings, client, shared, log)
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    protocol: Any = partial(Connection, shared=shared)
    config = uvicorn.Config(
        build(service), http=protocol, ws="none", log_config=None, access_log=False, lifespan="off", server_header=False,
        date_header=False, backlog=shared.backlog, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=TELL_S, h11_max_incomplete_event_size=1 << 16,
    )  # fmt: skip

    def say() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody has to listen
            ready(url, service.chosen)

    server = _Uvicorn(config, service, client, say)
    handler = _ToLog(log)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    log.tell("listening", url=url)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve([listener]))
    if server.failure is not None and not server.asked:
        raise server.failure
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
