"""The routes of the server: OpenAI's completions and chat, models, tokens, health, metrics, administration, and the playground.

`polydraft serve` builds the application with an engine client. A route decodes the body, calls the service, and reports errors;
it decides nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from polydraft.errors import RequestError
from polydraft.serving import protocol
from polydraft.serving.engine_client import EngineGone
from polydraft.serving.http import (
    REQUEST_ID,
    BodyRoom,
    Gone,
    HttpError,
    RequestIds,
    check_key,
    check_origin,
    new_id,
    read_body,
)
from polydraft.serving.openapi import document
from polydraft.serving.service import Job, Service, as_http

PLAYGROUND = Path(__file__).with_name("playground.html")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the playground may do: talk to this server, and nothing else."""
CLIENT_GONE = 499
BODIES = 64
"""Bodies of the largest size that there is room for at once."""
Handler = Callable[[Request], Awaitable[Any]]


class Routes:
    """One handler a route; all errors are reported in one place."""

    def __init__(self, service: Service) -> None:
        self._service, self._settings, self._client, self._log = service, service.settings, service.client, service.log
        self._started, self._room = int(time.time()), BodyRoom(BODIES * service.settings.max_body_bytes)

    def guarded(self, handler: Handler, keys: tuple[str, ...], *, engine: bool = True) -> Handler:
        """The handler behind checks of origin and keys and, where it needs an `engine`, of there being one; every failure has an
        answer."""

        async def call(request: Request) -> Any:
            try:
                if request.method == "POST":
                    check_origin(request, self._settings.cors_origins, self._settings.host)
                check_key(request, keys)
                if engine:
                    self._check_open(request)
                with self._room.held() as request.state.take:
                    return await handler(request)
            except Gone as gone:
                self._log.tell("client_gone", path=request.url.path, **gone.fields)
                return Response(status_code=CLIENT_GONE)
            except Exception as error:  # noqa: BLE001  every failure has an answer
                failure = as_http(error)
                if self._service.opened:
                    self._service.metrics.refused(failure.status)
                unexpected = failure.status == 500 and not isinstance(error, HttpError)
                where = {"traceback": traceback.format_exception(error)} if unexpected else {}
                error_text = self._log.sentence(str(failure), failure.kind, failure.status)
                self._log.tell("refused", path=request.url.path, status=failure.status, error=error_text, **where)
                return failure.response()

        return call

    def _check_open(self, request: Request) -> None:
        if not self._service.opened:
            raise EngineGone("the engine is being started; send the request again in a while")
        if self._service.draining and request.method == "POST":
            raise HttpError(503, "the server stops and takes no more requests; send it to another one", "server_error")

    async def _body(self, request: Request, kind: type[Any]) -> tuple[Any, int]:
        """The body of a request, and its size in bytes."""
        most, within_s = self._settings.max_body_bytes, self._settings.stall_s
        data = await read_body(request, most=most, within_s=within_s, take=request.state.take)
        return protocol.decode(data, kind), len(data)

    async def completions(self, request: Request) -> Any:
        """`/v1/completions`."""
        return await self._text(request, protocol.CompletionRequest, self._service.completion)

    async def chat(self, request: Request) -> Any:
        """`/v1/chat/completions`."""
        return await self._text(request, protocol.ChatRequest, self._service.chat)

    async def responses(self, request: Request) -> Any:
        """`/v1/responses`."""
        return await self._text(request, protocol.ResponsesRequest, self._service.response)

    async def _text(self, request: Request, kind: type[protocol.Sampling], make: Callable[[Any], Job]) -> Any:
        """Text for a body of `kind`. Its id is the header's, the body's, or a new one, in this order, as vLLM has it."""
        body, size = await self._body(request, self._service.bodies[kind])
        body.request_id = request.state.request_id = request.state.request_id or body.request_id or new_id()
        with protocol.named(body):
            return await self._service.answer(request, await self._service.made(make, body, size))

    async def models(self, request: Request) -> Any:
        """`/v1/models`."""
        del request
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Any:
        """`/v1/models/NAME`."""
        self._service.check_model(request.path_params["model"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        entry = {"id": self._service.name, "object": "model", "created": self._started, "owned_by": "polydraft"}
        ready = self._service.ready
        digest = {"weights_digest": ready.weights_digest} if ready.weights_digest else {}
        return {**entry, "max_model_len": ready.max_model_len, **digest}

    async def health(self, request: Request) -> Any:
        """`/health`: 200 while the server lives, whatever it waits for; 503 where its engine is given up."""
        del request
        return self._condition(healthy=self._client.state != "failed")

    async def ready(self, request: Request) -> Any:
        """`/ready`: 200 while requests are served, 503 otherwise."""
        del request
        return self._condition(healthy=self._service.state == "ok")

    def _condition(self, *, healthy: bool) -> JSONResponse:
        return JSONResponse({"status": self._service.state, **self._client.condition()}, 200 if healthy else 503)

    async def metrics(self, request: Request) -> Any:
        """`/metrics`; without the engine's answer, what it last reported."""
        del request
        stats = {}
        with contextlib.suppress(EngineGone):
            stats = await self._client.stats()
        return Response(self._service.metrics.text(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stats(self, request: Request) -> Any:
        """`/stats`: the same counts as JSON; by replica where engines have names."""
        del request
        stats = {replica: msgspec.structs.asdict(one) for replica, one in (await self._client.stats()).items()}
        return JSONResponse(stats.get("", stats))

    async def tokenize(self, request: Request) -> Any:
        """`/tokenize`."""
        body, size = await self._body(request, protocol.TokenizeRequest)
        with protocol.named(body):
            ids = await self._service.made(self._service.tokens, body, size)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._service.ready.max_model_len})

    async def detokenize(self, request: Request) -> Any:
        """`/detokenize`."""
        text = await self._service.made(self._service.text, *await self._body(request, protocol.DetokenizeRequest))
        return JSONResponse({"prompt": text})

    async def update_weights(self, request: Request) -> Any:
        """`/admin/update_weights`."""

        def update(body: Any) -> Awaitable[str]:
            if not body.path and not body.shared:
                raise RequestError("got no weights, wanted path or shared; name one", "path")
            return self._client.update_weights(body.path, body.running, body.shared)

        return await self._administer(request, protocol.UpdateWeightsRequest, "path", update)

    async def sleep(self, request: Request) -> Any:
        """`/admin/sleep`."""
        return await self._administer(
            request, protocol.SleepRequest, "", lambda body: self._client.sleep(body.level, body.running)
        )

    async def wake_up(self, request: Request) -> Any:
        """`/admin/wake_up`."""
        return await self._administer(
            request, protocol.WakeUpRequest, "path", lambda body: self._client.wake_up(body.path, body.shared)
        )

    async def _administer(self, request: Request, kind: type[Any], param: str, command: Callable[[Any], Awaitable[str]]) -> Any:
        """Do what a body of `kind` asks for, with the key of administration. `param`: what is blamed where that fails."""
        key = self._settings.admin_key
        if not key:
            raise HttpError(403, "administration is closed; start the server with --admin-key-file", "permission_error")
        check_key(request, (key,))
        body, _ = await self._body(request, kind)
        if getattr(body, "path", "") and body.shared:
            raise RequestError("got both path and shared, wanted one of them; leave one out", "shared")
        begin = time.monotonic()
        error = await command(body)
        digest = self._service.ready.weights_digest
        fields = {name: getattr(body, name) for name in body.__struct_fields__ if name != "shared"} | (
            {"weights_digest": digest} if digest else {}
        )
        self._log.tell(request.url.path.rpartition("/")[2], **fields, error=error, ms=round(1000 * (time.monotonic() - begin)))
        if error:
            raise RequestError(error, param)
        said = {"status": "ok", "seconds": round(time.monotonic() - begin, 3)}
        return JSONResponse(said | ({"weights_digest": digest} if digest else {}))

    async def openapi(self, request: Request) -> Any:
        """`/openapi.json`."""
        del request
        return JSONResponse(document(self._service.name, self._service.bodies, admin=bool(self._settings.admin_key)))

    async def playground(self, request: Request) -> Any:
        """`/`."""
        del request
        page = await asyncio.to_thread(PLAYGROUND.read_text, "utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})

    def all(self) -> list[Route]:
        """Every route. Health, readiness and the playground's page take no key, administration has one of its own."""
        post, get, keys = ["POST"], ["GET"], self._settings.api_keys
        free: list[tuple[str, Handler, list[str]]] = [("/health", self.health, get), ("/ready", self.ready, get)]
        if self._settings.playground:
            free.append(("/", self.playground, get))
        keyed: list[tuple[str, Handler, list[str]]] = [
            ("/v1/completions", self.completions, post), ("/v1/chat/completions", self.chat, post),
            ("/v1/responses", self.responses, post),
            ("/v1/models", self.models, get), ("/v1/models/{model:path}", self.model, get),
            ("/metrics", self.metrics, get), ("/stats", self.stats, get),
            ("/tokenize", self.tokenize, post), ("/detokenize", self.detokenize, post), ("/openapi.json", self.openapi, get),
        ]  # fmt: skip
        return [
            *(Route(path, self.guarded(handler, (), engine=False), methods=methods) for path, handler, methods in free),
            *(
                Route(f"/admin/{handler.__name__}", self.guarded(handler, ()), methods=post)
                for handler in (self.update_weights, self.sleep, self.wake_up)
            ),
            *(Route(path, self.guarded(handler, keys), methods=methods) for path, handler, methods in keyed),
        ]


async def no_route(request: Request, error: Exception) -> Any:
    """The answer for paths and methods that there are none of."""
    path = request.url.path
    allow = (getattr(error, "headers", None) or {}).get("Allow", "")
    if allow:
        return HttpError(405, f"{path} takes {allow}, got {request.method}; see /openapi.json", allow=allow).response()
    return HttpError(404, f"{path} is no route of this server; see /openapi.json", "not_found_error").response()


def build(service: Service) -> Starlette:
    """The ASGI application. Its engine is started and stopped by who runs it."""
    middleware = [Middleware(RequestIds)]
    origins = service.settings.cors_origins
    if origins:
        allowed: Any = {"allow_origins": list(origins), "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        allowed["expose_headers"] = [REQUEST_ID]
        middleware.append(Middleware(CORSMiddleware, **allowed))
    handlers: Any = {404: no_route, 405: no_route}
    application = Starlette(routes=Routes(service).all(), middleware=middleware, exception_handlers=handlers)
    application.router.redirect_slashes = False  # to a place whose name the client has chosen (`Host`)
    return application
