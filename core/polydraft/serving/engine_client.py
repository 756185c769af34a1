"""The engine as the HTTP side sees it: its process, its restarts, and one queue of deltas a request.

The routes call `generate`, `stats` and `update_weights`. When the process dies, or its engine answers nothing any more, every
waiting request gets an error, and another one is started; how often is bounded. It never blocks the event loop and never sees a
token that the engine did not send.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from polydraft.child_process import ending, running
from polydraft.errors import DeviceError, PolydraftError, RecordError, RequestError
from polydraft.output.request_delta import RequestDelta, unpack
from polydraft.serving import wire

MOST_RESTARTS, RESTART_WINDOW_S = 5, 120.0
"""More deaths than this within so many seconds of service, and the engine is given up. Time in which an engine was built, or did
not answer, counts for nothing: the larger a model, the longer six deaths take."""
BEAT_S = 1.0
"""Seconds between two questions to the engine's thread."""
STALLED_S = 10.0
"""Seconds without an answer after which an engine is said not to serve; a step may take longer, and its requests are kept."""
MOST_WAITING = 4096
"""Deltas that may wait for one client."""
STOP_S = 5.0
"""Seconds that a worker has to leave when it is asked to."""


class EngineGone(PolydraftError):  # noqa: N818  what has happened, not a mistake
    """The engine's process ended while a request waited for it; the request may be sent again."""


class Busy(PolydraftError):  # noqa: N818  likewise
    """More requests wait than the server admits; `retry_s`: when it is worth another try."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Overrun(PolydraftError):  # noqa: N818  likewise
    """A client takes its text so slowly that it is given up."""


_Queue: TypeAlias = "asyncio.Queue[tuple[RequestDelta, wire.Outputs] | PolydraftError | asyncio.TimeoutError]"
"""Deltas, each beside the event that brought it, which has the timing of its step; or why there will be no more."""


Gauges: TypeAlias = "Sequence[tuple[str, str, Callable[[], float]]]"
"""Figures: name behind `polydraft:`, what it is, and how it is read."""


class AnyClient(Protocol):
    """What routes need of an engine, wherever it is: `EngineClient` has one beside it, `polydraft.ray` several on a cluster."""

    state: str
    ready: wire.Ready | None
    lost: str

    @property
    def asleep(self) -> bool: ...

    @property
    def stalled(self) -> bool: ...

    def condition(self) -> dict[str, Any]:
        """What `/health` and `/ready` tell of it beside the state."""

    def gauges(self) -> Gauges: ...

    async def start(self) -> None: ...

    def generate(
        self, prompts: Sequence[tuple[Sequence[int], Mapping[str, Any]]], *, first_s: float
    ) -> AsyncGenerator[tuple[int, RequestDelta, wire.Outputs], None]: ...

    async def stats(self) -> dict[str, wire.Stats]:
        """Counts now, by replica; by "" where there is but one engine, which has no name."""

    async def update_weights(self, path: str, running: str, shared: Mapping[str, Any]) -> str: ...

    async def sleep(self, level: int, running: str) -> str: ...

    async def wake_up(self, path: str, shared: Mapping[str, Any]) -> str: ...


class _Patience:
    """Ends a wait in which nothing has come for so long, time in which the engine slept aside."""

    def __init__(self, client: EngineClient, queue: _Queue, seconds: float) -> None:
        self._client, self._queue, self._slept_s = client, queue, client.slept_s
        self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        slept, self._slept_s = self._client.slept_s - self._slept_s, self._client.slept_s
        if slept > 0:
            self._wait(slept)
        elif self._queue.empty():
            self._queue.put_nowait(asyncio.TimeoutError())

    def cancel(self) -> None:
        """Wait no longer."""
        self._timer.cancel()


class EngineClient:
    """One engine in a process of its own. `state`: starting, ready, restarting, failed or stopped.

    `most`: requests in the engine at most, running and waiting. `start_s`, `watchdog_s`: seconds without a word after which a
    process that builds its engine, or has one, is ended. `restarts` False: a process that ended is the end, since somebody else
    supervises. `tell(event, **fields)` files what happens to the process."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        most: int,
        tell: Callable[..., None],
        start_s: float = 1800.0,
        watchdog_s: float = 300.0,
        restarts: bool = True,
    ) -> None:
        self._config, self._most, self._tell, self._restarts = dict(config), most, tell, restarts
        self._start_s, self._watchdog_s = start_s, watchdog_s
        self._beat_s = min(BEAT_S, watchdog_s / 4, start_s / 4)
        self._unanswered = 0
        """Beats since the process last said anything. They are counted, and not seconds: where a container was paused, so was the
        process."""
        self._ready_at = self._heard_at = self._served_s = 0.0
        self.state, self.reason = "starting", ""
        self.ready: wire.Ready | None = None
        self._waiting: dict[int, _Queue] = {}
        self._handles, self._numbers = itertools.count(1), itertools.count(1)
        self._done: dict[int, asyncio.Future[str]] = {}
        self._stats: list[asyncio.Future[wire.Stats]] = []
        self._alarms: dict[str, str] = {}
        self.lost = ""
        """Why requests are refused until weights are given: an update failed half-way, or others had been given to an engine
        whose process died. "" where they are served."""
        self._failure = ""
        """Why the engine serves nothing any more, told by its process, which ends of it."""
        self._given = False
        """Whether other weights than those of the start were given."""
        self._level = 0
        """How the engine sleeps, 0 where it is awake."""
        self._falling = 0
        """Commands to fall asleep that are under way."""
        self._slept_s = self._slept_at = 0.0
        """Seconds asleep until the last waking, and when it last fell asleep."""
        self._aborts: set[asyncio.Future[None]] = set()
        self._changed = asyncio.Event()
        self._deaths: list[float] = []
        """When processes have ended, in seconds of service."""
        self.restarts = self.hangs = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._main: asyncio.Task[None] | None = None

    @property
    def num_requests(self) -> int:
        """Requests in the engine, running or waiting."""
        return len(self._waiting)

    @property
    def asleep(self) -> bool:
        """Whether the engine has given its memory back, or finishes what runs in order to."""
        return self._level > 0 or self._falling > 0

    @property
    def slept_s(self) -> float:
        """Seconds that the engine was asleep so far."""
        return self._slept_s + (time.monotonic() - self._slept_at if self.asleep else 0.0)

    def _sleep(self, level: int, falling: int = 0) -> None:
        """Note that it sleeps so from now on, and that so many more commands to fall asleep are under way."""
        self._slept_s, self._slept_at = self.slept_s, time.monotonic()
        self._level, self._falling = level, self._falling + falling

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return self._process.pid if self._process else None

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's process last said anything."""
        return self._unanswered * self._beat_s

    @property
    def stalled(self) -> bool:
        """Whether new requests had better go elsewhere: the engine has not answered for long, or its process ends."""
        return self.state == "ready" and (bool(self._failure) or self.silent_s > min(STALLED_S, self._watchdog_s / 2))

    # -- the process -------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start the process and wait until the engine stands. Raises `DeviceError` with its sentence where it cannot."""
        self._main = asyncio.create_task(self._supervise())
        while self.state == "starting":
            await self._next_state()
        if self.state != "ready":
            await self.until_failed()

    async def until_failed(self) -> None:
        """Wait until the engine is given up, and raise `DeviceError` that says why; return where it was stopped."""
        while self.state not in ("failed", "stopped"):
            await self._next_state()
        if self.state == "failed":
            raise DeviceError(self.reason)

    async def _next_state(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _become(self, state: str, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self._changed.set()
        self._tell("engine", state=state, reason=reason)

    async def _supervise(self) -> None:
        """Run one process after the other."""
        context = zmq.asyncio.Context()
        try:
            while self.state not in ("failed", "stopped"):
                await self._one_life(context)
        except Exception as error:  # noqa: BLE001  a folder, a socket or a process that cannot be had, a start that cannot be told
            why = f"the engine's process could not be run: {error}"
            self.dismiss(f"{why}; send the request to another server")
            self._become("failed", f"{why}; start the server again once that is mended")
        finally:
            context.destroy(linger=0)

    async def _one_life(self, context: zmq.asyncio.Context) -> None:
        begin = wire.encode(wire.Start(self._config, self._level))
        with tempfile.TemporaryDirectory(prefix="polydraft-") as folder:  # its mode keeps other users out
            endpoints = [f"ipc://{Path(folder) / name}" for name in ("commands", "events")]
            commands, events = (context.socket(zmq.PAIR) for _ in endpoints)
            try:
                commands.setsockopt(zmq.SNDHWM, 0)  # bounded by admission
                commands.bind(endpoints[0])
                events.bind(endpoints[1])
                self._socket = commands
                self._process = process = self._spawn(endpoints)
                try:
                    why = await self._attend(process, commands, events, begin)
                finally:
                    process.kill()  # nothing where it has ended; else whoever waits for it in a thread would wait for ever
            finally:
                self._socket = None
                commands.close(linger=0)
                events.close(linger=0)
            self._after(why)

    async def _attend(
        self, process: subprocess.Popen[bytes], commands: zmq.asyncio.Socket, events: zmq.asyncio.Socket, begin: bytes
    ) -> str:
        """Talk to a process, `begin` first, until it ends, or is ended; returns how that came."""
        self._unanswered, self._failure = 0, ""
        death = asyncio.create_task(asyncio.to_thread(process.wait))
        reader, watchdog = asyncio.create_task(self._read(events)), asyncio.create_task(self._watch())
        start = asyncio.ensure_future(commands.send(begin))  # sent once it has connected
        await asyncio.wait((death, reader, watchdog), return_when=asyncio.FIRST_COMPLETED)
        start.cancel()
        watchdog.cancel()
        if not death.done():  # what the process said could not be read, or it says nothing
            process.kill()
        status = await death
        with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError, zmq.ZMQError):
            await asyncio.wait_for(reader, 0.2)  # what it said before it died
        hung = watchdog.done() and not watchdog.cancelled()
        return watchdog.result() if hung else f"the engine's process ended ({ending(status)})"

    async def _watch(self) -> str:
        """Ask the engine's thread for a word now and then, which it gives between two steps; return what is wrong where it gives
        none. While weights are replaced it may take as long as a start."""
        while True:
            await asyncio.sleep(self._beat_s)
            self._unanswered += 1
            limit = self._watchdog_s if self.state == "ready" and not self._done else self._start_s
            if self.silent_s > limit:
                self.hangs += 1
                return f"the engine's process said nothing for {limit:g} seconds and was ended"
            if self.state == "ready" and self._unanswered == 1:
                with contextlib.suppress(EngineGone, zmq.ZMQError):
                    await self._send(wire.AskStats())

    def _spawn(self, endpoints: Sequence[str]) -> subprocess.Popen[bytes]:
        command = running("polydraft.serving.worker", str(os.getpid()), *endpoints)
        # In a session of its own: a terminal's Ctrl-C is for the server alone, which lets texts end.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603  this very interpreter

    def _after(self, why: str) -> None:
        """The process has ended: tell everybody who waits, and say what comes next."""
        self.dismiss(f"{why} while the request was served; send it again")
        if self.state in ("stopped", "failed"):
            return
        if self.ready is None:
            self._become("failed", f"{why} before it was ready; see its messages above")
            return
        if self.state == "ready":
            self._served_s += self._heard_at - self._ready_at
        self._deaths = [then for then in self._deaths if self._served_s - then < RESTART_WINDOW_S] + [self._served_s]
        if not self._restarts:
            self._become("failed", why)
            return
        if len(self._deaths) > MOST_RESTARTS:
            times = f"{len(self._deaths)} times within {RESTART_WINDOW_S:.0f} seconds of service"
            self._become("failed", f"the engine's process ended {times}, at last so: {why}; see its messages above")
            return
        self.restarts += 1
        self._become("restarting", why)

    def dismiss(self, why: str) -> None:
        """Tell everybody who waits that nothing more will come."""
        gone = EngineGone(why)
        for queue in self._waiting.values():
            queue.put_nowait(gone)
        futures: list[asyncio.Future[Any]] = [*self._done.values(), *self._stats]
        for future in futures:
            if not future.done():
                future.set_exception(gone)
                future.exception()  # whoever waits for it gets it; asyncio need not say that nobody does
        self._stats.clear()
        self._done.clear()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            try:
                self._take(wire.decode_event(data))
            except RecordError as error:
                self._tell("engine_protocol", error=str(error))
                return
            await asyncio.sleep(0)  # whoever waits for this reads it before the next one, which may be there already

    def _take(self, event: wire.Event) -> None:
        self._unanswered, self._heard_at = 0, time.monotonic()
        if isinstance(event, wire.Outputs):
            self._deliver(event)
        elif isinstance(event, wire.Refused):
            if event.handle in self._waiting:
                wrong = event.fault == "client"
                self._waiting[event.handle].put_nowait(
                    RequestError(event.error, event.param) if wrong else DeviceError(event.error)
                )
        elif isinstance(event, wire.Loading):
            self._tell("loading", stage=event.stage, done=event.done, total=event.total)
        elif isinstance(event, wire.Ready):
            self.ready, self._ready_at = event, self._heard_at
            self._sleep(event.sleep_level)
            self.lost = f"{self.reason}, and the weights that had been given with it; give them again" if self._given else ""
            self._become("ready", self.lost)
        elif isinstance(event, wire.Unready):
            self._become("failed", event.error)
        elif isinstance(event, wire.Done):
            future = self._done.pop(event.number, None)
            self._sleep(event.sleep_level)
            self._given |= event.given
            if event.given or event.torn:
                self.lost = self.reason = event.torn
            if self.ready is not None:
                self.ready = msgspec.structs.replace(self.ready, weights_digest=event.weights_digest)
            if future is not None and not future.done():
                future.set_result(event.error)
        elif isinstance(event, wire.Stats):
            self._count(event)

    def _count(self, event: wire.Stats) -> None:
        """Counts to whoever asked for them; alarms that are new are told, and a failure ends what is admitted."""
        for kind, sentence in event.alarms_said.items() - self._alarms.items():
            self._tell("acceptance", alarm=kind, message=sentence)
        self._alarms, self._failure = event.alarms_said, event.failure
        for waiting in self._stats:
            if not waiting.done():
                waiting.set_result(event)
        self._stats.clear()

    def _deliver(self, event: wire.Outputs) -> None:
        """Deltas to their queues; those of requests that nobody waits for any more are dropped."""
        for delta in unpack(event.deltas):
            queue = self._waiting.get(delta.handle)
            if queue is None:
                continue
            if queue.qsize() < MOST_WAITING:
                queue.put_nowait((delta, event))
            else:
                self._drop(queue)

    def _drop(self, queue: _Queue) -> None:
        """Nobody takes what comes for some requests: end them. Whoever looks at last gets what there was, and then the error."""
        handles = [handle for handle, other in self._waiting.items() if other is queue]
        for handle in handles:
            del self._waiting[handle]
        task = asyncio.ensure_future(self._abort(handles))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        queue.put_nowait(Overrun(f"{MOST_WAITING} pieces of the text wait for the client, which takes none; read faster"))

    async def stop(self) -> None:
        """Ask the process to leave, and end it where it does not."""
        process, before = self._process, self.state
        if before not in ("failed", "stopped"):
            self._become("stopped")
        if process is not None and (self.ready is None or before == "restarting"):
            process.kill()  # it has nothing to end
        with contextlib.suppress(EngineGone, zmq.ZMQError, asyncio.TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(self._send(wire.Stop()), STOP_S)
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._main is not None:
            with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
                await asyncio.wait_for(self._main, STOP_S)

    def kill(self) -> None:
        """End the process at once, if there still is one."""
        if self._process is not None:
            self._process.kill()

    async def _send(self, command: wire.Command) -> None:
        """Raises `EngineGone` where there is no process, or none any more that takes it."""
        socket = self._socket
        if socket is None:
            raise EngineGone("the engine's process is being started; send the request again")
        try:
            await socket.send(wire.encode(command))
        except asyncio.CancelledError:
            if not socket.closed:
                raise
            raise EngineGone("the engine's process ended before it took the request; send it again") from None

    # -- requests ----------------------------------------------------------------------------------
    async def generate(
        self, prompts: Sequence[tuple[Sequence[int], Mapping[str, Any]]], *, first_s: float
    ) -> AsyncGenerator[tuple[int, RequestDelta, wire.Outputs], None]:
        """Serve requests together: yields (index, delta, event that brought it) as they come, until all have ended. Closing it
        aborts what is left.

        Raises `Busy` where the engine has no room for all of them, `RequestError` for a wrong one, `EngineGone` when its process
        ends, and `TimeoutError` when nothing has come `first_s` seconds after the start, in which the engine was awake."""
        if self.state in ("failed", "stopped"):
            raise EngineGone(f"the engine has {self.state} for good, and the server ends; send the request to another one")
        if self.state != "ready":
            raise EngineGone(f"the engine is {self.state}; send the request again in a while")
        if self._failure:
            raise EngineGone(f"the engine has failed: {self._failure}; send the request again in a while")
        if self.asleep:
            raise EngineGone("the engine is asleep; send the request again once it was woken up")
        if self.lost:
            raise EngineGone(self.lost)
        if len(self._waiting) + len(prompts) > self._most:
            raise Busy(f"{len(self._waiting)} requests are being served, which is all the server admits; try again", 1)
        handles = {next(self._handles): index for index in range(len(prompts))}
        queue: _Queue = asyncio.Queue()
        left = set(handles)
        self._waiting |= dict.fromkeys(handles, queue)
        # Not `wait_for`: before Python 3.12 it loses a cancellation that comes together with a delta.
        late = _Patience(self, queue, first_s)
        try:
            for handle, (prompt, params) in zip(handles, prompts, strict=True):
                await self._send(wire.Add(handle, list(prompt), dict(params)))
            while left:
                brought = await queue.get()
                late.cancel()
                if isinstance(brought, Exception):
                    raise brought
                delta, event = brought
                if delta.finish:
                    left.discard(delta.handle)
                    self._waiting.pop(delta.handle, None)
                yield handles[delta.handle], delta, event
        finally:
            late.cancel()
            await asyncio.shield(self._abort([handle for handle in left if self._waiting.pop(handle, None) is not None]))

    async def _abort(self, handles: Sequence[int]) -> None:
        """End requests that nobody waits for any more."""
        for handle in handles:
            with contextlib.suppress(EngineGone, zmq.ZMQError):
                await self._send(wire.Abort(handle))

    def condition(self) -> dict[str, Any]:
        """Requests, processes after the first, and why the state is what it is."""
        said: dict[str, Any] = {"requests": self.num_requests, "restarts": self.restarts}
        return said | ({"reason": self.reason} if self.reason else {})

    def gauges(self) -> Gauges:
        """Those of the engine's process."""
        return (
            ("engine_restarts", "Engine processes after the first.", lambda: self.restarts),
            ("engine_hangs", "Engine processes that were ended because they said nothing.", lambda: self.hangs),
            ("engine_silent_seconds", "Since the engine's process last said anything.", lambda: self.silent_s),
        )

    async def stats(self, timeout_s: float = 2.0) -> dict[str, wire.Stats]:
        """Counts of the engine now, which has no name. Raises `EngineGone` where there is none, or it does not answer in time."""
        future: asyncio.Future[wire.Stats] = asyncio.get_running_loop().create_future()
        await self._send(wire.AskStats())
        self._stats.append(future)
        try:
            return {"": await asyncio.wait_for(future, timeout_s)}
        except asyncio.TimeoutError:
            raise EngineGone(f"the engine has not answered for {timeout_s:g} seconds; ask again in a while") from None

    async def update_weights(self, path: str, running: str, shared: Mapping[str, Any]) -> str:
        """Replace the weights; returns the sentence of what went wrong, "" where nothing did."""
        return await self._ended(wire.UpdateWeights(next(self._numbers), path, running, dict(shared)))

    async def sleep(self, level: int, running: str) -> str:
        """Let the engine give its memory back; the same. Requests that come meanwhile are refused at once."""
        self._sleep(self._level, falling=1)
        try:
            return await self._ended(wire.Sleep(next(self._numbers), level, running))
        finally:
            self._sleep(self._level, falling=-1)

    async def wake_up(self, path: str, shared: Mapping[str, Any]) -> str:
        """Let it take its memory again, with other weights where some are named; the same."""
        return await self._ended(wire.WakeUp(next(self._numbers), path, dict(shared)))

    async def _ended(self, command: wire.UpdateWeights | wire.Sleep | wire.WakeUp) -> str:
        future = self._done[command.number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(command)
        except BaseException as error:
            self._done.pop(command.number, None)  # nobody answers, and the watchdog waits for answers
            if isinstance(error, (OverflowError, RecursionError, TypeError)):
                return f"what was given cannot be sent to the engine ({type(error).__name__}: {error}); correct it"
            raise
        said: str = await future
        return said
