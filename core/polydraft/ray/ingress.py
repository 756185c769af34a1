"""The HTTP side on a cluster: the server's application as a deployment of Ray Serve, whose engine is behind a handle.

It has no state but figures and what its router has sent where, so there may be any number of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from polydraft.errors import DeviceError, PolydraftError, RecordError
from polydraft.output.request_delta import RequestDelta, unpack
from polydraft.ray import records
from polydraft.ray.prefixes import prefix_of
from polydraft.serving import wire
from polydraft.serving.app import build
from polydraft.serving.engine_client import Busy, EngineGone, Gauges
from polydraft.serving.logs import Log
from polydraft.serving.service import Service
from polydraft.serving.settings import ServerSettings, read_keys

BEAT_S = 2.0
"""Seconds between two looks at the replicas."""
PATIENCE_S = 4.0
"""Seconds for the counts of all of them: longer than each waits for its engine, so that a busy one does not hide the others."""
AGAIN_S = 0.1
"""Seconds before a request that no engine has taken is sent again."""


class Engines:
    """All replicas of the engine as routes see one (`AnyClient`). `ready`: what one of them has said of itself."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self.state, self.lost, self.asleep, self.stalled = "starting", "", False, False
        self.ready: wire.Ready | None = None
        self._reports: dict[str, wire.Stats] = {}
        self._beat: asyncio.Task[None] | None = None

    def condition(self) -> dict[str, Any]:
        """The replicas that answered last."""
        return {"replicas": len(self._reports)}

    def gauges(self) -> Gauges:
        """Likewise."""
        return (("engine_replicas", "Replicas of the engine that answer.", lambda: len(self._reports)),)

    async def start(self) -> None:
        """Wait until one replica stands."""
        said = wire.decode_event(await self._handle.ready.remote())
        if not isinstance(said, wire.Ready):
            raise RecordError(f"a replica has said {type(said).__name__}, wanted Ready; run one version on all nodes")
        self.ready, self.state = said, "ready"
        self._beat = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Ask now and then which replicas there are."""
        while True:
            with contextlib.suppress(PolydraftError, RayError):
                await self.stats()
            await asyncio.sleep(BEAT_S)

    async def stats(self) -> dict[str, wire.Stats]:
        """Counts of all replicas now. Raises `EngineGone` where there are none."""
        answers: list[Any] = []
        with contextlib.suppress(DeploymentUnavailableError, asyncio.TimeoutError, TimeoutError):
            answers = await self._handle.broadcast("stats").results_async(timeout_s=PATIENCE_S, return_exceptions=True)
        reports = [records.decode_report(one) for one in answers if isinstance(one, bytes)]
        self._reports = {one.replica: one.stats for one in reports}
        self.state = "ready" if reports else "restarting"
        if not reports:
            raise EngineGone("no replica of the engine answers; ask again in a while")
        return dict(self._reports)

    async def generate(
        self, prompts: Sequence[tuple[Sequence[int], Mapping[str, Any]]], *, first_s: float
    ) -> AsyncGenerator[tuple[int, RequestDelta, wire.Outputs], None]:
        """As `EngineClient.generate`, on the replica that the router chooses. A request that no engine has taken is sent
        again; one that an engine has is not, since it may be what ended it."""
        loop, given = asyncio.get_running_loop(), [(list(prompt), dict(params)) for prompt, params in prompts]
        until, prefix = loop.time() + first_s, prefix_of(given[0][0])
        while True:
            taken, left = False, until - loop.time()
            ask = records.encode(records.Ask(given, max(left, AGAIN_S)))
            try:
                async with contextlib.aclosing(self._records(ask, prefix, until)) as stream:
                    async for record in stream:
                        if isinstance(record, records.Taken):
                            taken = True
                        elif isinstance(record, records.Failed):
                            raise records.raised(record)
                        else:
                            for delta in unpack(record.deltas):
                                yield delta.handle, delta, record
                return
            except (RayActorError, DeploymentUnavailableError) as error:
                if taken:
                    raise EngineGone("the engine's replica ended while the request was served; send it again") from error
            except EngineGone:
                if taken:
                    raise
            except BackPressureError as error:
                raise Busy(f"as many requests wait as the server admits ({error}); try again", 1) from error
            if loop.time() + AGAIN_S > until:
                raise asyncio.TimeoutError
            await asyncio.sleep(AGAIN_S)

    async def _records(self, ask: bytes, prefix: bytes, until: float) -> AsyncGenerator[records.Reply, None]:
        """What a replica says. Raises `TimeoutError` where nothing of a text has come by `until`."""
        loop = asyncio.get_running_loop()
        stream, begun = self._handle.options(stream=True).generate.remote(ask, prefix), False
        following = asyncio.ensure_future(anext(stream))
        try:
            while True:
                # Not `wait_for`: before Python 3.12 it loses a cancellation that comes together with a record.
                await asyncio.wait((following,), timeout=None if begun else max(until - loop.time(), 0))
                if not following.done():
                    raise asyncio.TimeoutError
                try:
                    record = records.decode_reply(following.result())
                except StopAsyncIteration:
                    return
                begun = begun or isinstance(record, wire.Outputs)
                following = asyncio.ensure_future(anext(stream))
                yield record
        finally:
            following.cancel()
            stream.cancel()

    async def update_weights(self, path: str, running: str, shared: Mapping[str, Any]) -> str:
        """Refused: a replica that starts later would have others."""
        del path, running, shared
        raise DeviceError("weights of replicas are replaced by deploying again; see docs/ray.md")

    async def sleep(self, level: int, running: str) -> str:
        """Refused, likewise."""
        del level, running
        raise DeviceError("replicas are taken away by their number; see docs/ray.md")

    async def wake_up(self, path: str, shared: Mapping[str, Any]) -> str:
        """Refused, likewise."""
        return await self.sleep(0, path or str(shared))


@serve.ingress()
class Ingress:
    """The routes of the server, on as many replicas as wanted. `api_key_file` is read on this node."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engine: DeploymentHandle[Any], server: Mapping[str, Any], api_key_file: str | None
    ) -> None:
        settings = ServerSettings(**server, api_keys=read_keys(api_key_file))
        name = serve.get_replica_context().replica_id.unique_id
        self._service = Service(
            settings, Engines(engine), None, Log(settings.log_file, prompts=settings.log_prompts), replica=name
        )
        await self._service.open()

    def __serve_build_asgi_app__(self) -> Starlette:
        """Serve asks for it once the constructor has returned."""
        return build(self._service)
