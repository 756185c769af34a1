"""What an ingress and a replica of the engine say to each other: one request down, records up, typed and without pickles.

Ray carries the bytes. What a step brought is the same record as between the processes of a server (`polydraft.serving.wire`).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from polydraft.errors import DeviceError, RecordError, RequestError
from polydraft.serving import wire
from polydraft.serving.engine_client import Busy, EngineGone, Overrun

VERSION = 1


class Ask(msgspec.Struct, tag=True, frozen=True):
    """Serve prompts together. `prompts`: of each its tokens and fields of `SamplingParams`; `first_s`: longest wait, seconds."""

    prompts: list[tuple[list[int], dict[str, Any]]]
    first_s: float
    version: int = VERSION


class Taken(msgspec.Struct, tag=True, frozen=True):
    """The engine has the request, which from now on may not be sent to another one."""

    replica: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Nothing more will come, and why: a name of `ERRORS` and a sentence; `param` as of `RequestError`, `retry_s` of `Busy`."""

    kind: str
    error: str
    param: str = ""
    retry_s: int = 0


class Report(msgspec.Struct, tag=True, frozen=True):
    """Counts of one replica."""

    replica: str
    stats: wire.Stats


Reply = Taken | wire.Outputs | Failed
ERRORS: Final[dict[str, type[Exception]]] = {
    "request": RequestError, "busy": Busy, "gone": EngineGone, "overrun": Overrun, "late": asyncio.TimeoutError,
    "engine": DeviceError,
}  # fmt: skip
"""By name, what a replica reports by itself; anything else is a bug, which Ray reports."""
_encoder = msgspec.msgpack.Encoder()
_asks, _replies, _reports = (msgspec.msgpack.Decoder(kind) for kind in (Ask, Reply, Report))


def encode(record: Ask | Reply | Report) -> bytes:
    """One record."""
    return _encoder.encode(record)


def decode_ask(data: bytes) -> Ask:
    """Raises `RecordError` for anything that is no request of this version."""
    ask: Ask = _decoded(_asks, data)
    if ask.version != VERSION:
        raise RecordError(f"a request has version {ask.version} of its record, wanted {VERSION}; run one version on all nodes")
    return ask


def decode_reply(data: bytes) -> Reply:
    """Raises `RecordError` for anything that is no reply."""
    reply: Reply = _decoded(_replies, data)
    return reply


def decode_report(data: bytes) -> Report:
    """Raises `RecordError` for anything that is no report."""
    report: Report = _decoded(_reports, data)
    return report


def _decoded(decoder: Any, data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RecordError(f"a record between replicas cannot be read: {error}; run one version on all nodes") from error


def failed(error: Exception) -> Failed:
    """An error as a record. Raises what no replica reports."""
    for kind, known in ERRORS.items():
        if isinstance(error, known):
            return Failed(kind, str(error), getattr(error, "param", ""), getattr(error, "retry_s", 0))
    raise error


def raised(record: Failed) -> Exception:
    """The error of a record."""
    if record.kind == "request":
        return RequestError(record.error, record.param)
    if record.kind == "busy":
        return Busy(record.error, record.retry_s)
    return ERRORS.get(record.kind, DeviceError)(record.error)
