"""A replica of the engine on a cluster: the engine's process and its ranks on one node, behind a deployment of Ray Serve.

Serve starts it, asks it for its health, and starts another where it ends; the engine's client, which elsewhere starts a process
anew, leaves that to Serve. Ingresses reach it through its handle, with the records of `polydraft.ray.records`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from ray import serve

from polydraft.errors import DeviceError
from polydraft.output.request_delta import pack
from polydraft.ray import records
from polydraft.ray.cluster import asks_tokens, check_tokens
from polydraft.serving import wire
from polydraft.serving.engine_client import EngineClient, EngineGone
from polydraft.serving.logs import Log
from polydraft.serving.settings import ServerSettings

LAST_S = 0.5
"""Seconds in which the requests of an engine that ended are told so, before its replica ends as well."""


class EngineReplica:
    """One engine. Raises `DeviceError` where it cannot be built, and `ConfigError` on a node without token authentication, unless
    `insecure`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engine: Mapping[str, Any], server: Mapping[str, Any], *, insecure: bool
    ) -> None:
        check_tokens(asked=asks_tokens(), insecure=insecure)
        settings = ServerSettings(**server)
        self._log = Log(settings.log_file, prompts=settings.log_prompts)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._client = EngineClient(
            engine, most=settings.max_requests, tell=self._tell, start_s=settings.start_s, watchdog_s=settings.watchdog_s,
            restarts=False,
        )  # fmt: skip
        await self._client.start()
        self._end = asyncio.create_task(self._leave())

    def _tell(self, event: str, **fields: Any) -> None:
        self._log.tell(event, replica=self._name, **fields)

    async def _leave(self) -> None:
        """End with the engine: then Serve need not wait for its next question about health, and routes nothing here any more."""
        try:
            await self._client.until_failed()
        except DeviceError:
            await asyncio.sleep(LAST_S)
            self._log.close()
            os._exit(1)

    async def generate(self, data: bytes, prefix: bytes) -> AsyncGenerator[bytes, None]:
        """Serve one request: `Taken`, then what steps bring, or `Failed`; `prefix` is for the router. Cancelled, texts end."""
        del prefix
        try:
            ask = records.decode_ask(data)
            async with contextlib.aclosing(self._client.generate(ask.prompts, first_s=ask.first_s)) as stream:
                if self._client.state == "ready":
                    yield records.encode(records.Taken(self._name))
                async for index, delta, event in stream:
                    deltas = pack([delta._replace(handle=index)])
                    yield records.encode(msgspec.structs.replace(event, deltas=deltas))
        except Exception as error:  # noqa: BLE001  what no replica reports is raised again
            yield records.encode(records.failed(error))

    async def ready(self) -> bytes:
        """What the engine says of itself."""
        assert self._client.ready is not None, "the constructor waits for it"
        return wire.encode(self._client.ready)

    async def stats(self) -> bytes:
        """Its counts. Raises `EngineGone` where there are none."""
        return records.encode(records.Report(self._name, (await self._client.stats())[""]))

    async def check_health(self) -> None:
        """Serve ends the replica where this raises several times: the engine is gone, or its thread says nothing."""
        if self._client.state != "ready":
            raise EngineGone(f"the engine is {self._client.state}: {self._client.reason}")

    async def __del__(self) -> None:
        """Serve calls it when the replica has ended its requests, or has no more time to."""
        if hasattr(self, "_end"):
            self._end.cancel()
            await self._client.stop()
            self._log.close()
