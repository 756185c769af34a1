"""Describes the routes as an OpenAPI document, made from the same records that bodies are decoded with.

`/openapi.json` serves it; fuzzing tools read it. It describes only what exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

import msgspec

from polydraft._version import __version__
from polydraft.serving import protocol

BODIES: dict[str, tuple[type[Any], str]] = {
    "/v1/completions": (protocol.CompletionRequest, "Complete a prompt."),
    "/v1/chat/completions": (protocol.ChatRequest, "Answer a conversation."),
    "/v1/responses": (protocol.ResponsesRequest, "Answer items, without keeping them."),
    "/tokenize": (protocol.TokenizeRequest, "Token ids of a text or conversation."),
    "/detokenize": (protocol.DetokenizeRequest, "Text of token ids."),
}
ADMIN: dict[str, tuple[type[Any], str]] = {
    "/admin/update_weights": (protocol.UpdateWeightsRequest, "Replace the weights."),
    "/admin/sleep": (protocol.SleepRequest, "Give the memory of weights and caches back."),
    "/admin/wake_up": (protocol.WakeUpRequest, "Take it again."),
}
PLAIN = {
    "/v1/models": "The model that is served.",
    "/v1/models/{model}": "The same, by its name.",
    "/health": "Whether the server lives.",
    "/ready": "Whether requests are served.",
    "/metrics": "Figures for Prometheus.",
    "/stats": "Counts of the engine.",
}
STATUSES = {
    "200": "Served.", "400": "The request is wrong.", "401": "The API key is missing or wrong.",
    "403": "A page of another origin has sent it.", "404": "No such model.",
    "405": "No such method.", "408": "The body came too slowly.", "413": "The body is too large.",
    "415": "The body is compressed.", "429": "Too many requests wait.",
    "503": "Not served now; try again.",
}  # fmt: skip


def document(model: str, own: Mapping[type[Any], type[Any]], *, admin: bool) -> dict[str, Any]:
    """The document of this server. `own`: bodies that have fields for parameters of its plugins, by what they are without;
    `admin`: whether the administrative routes are open."""
    bodies = BODIES | (ADMIN if admin else {})
    schemas, components = msgspec.json.schema_components(
        [own.get(kind, kind) for kind, _ in bodies.values()], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for (path, (_, text)), schema in zip(bodies.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": _responses()}}
    for path, text in PLAIN.items():
        named = [name for _, name, _, _ in Formatter().parse(path) if name]
        given = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named]
        paths[path] = {"get": {"summary": text, "parameters": given, "responses": _responses()}}
    info = {"title": f"polydraft: {model}", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _responses() -> dict[str, Any]:
    return {status: {"description": text} for status, text in STATUSES.items()}
