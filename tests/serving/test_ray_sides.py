"""The two sides of a server on Ray without a cluster: what an ingress makes of what replicas say, and what a replica does when
its engine ends. A handle that plays back stands in for Serve's."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft.errors import RequestError
from polydraft.output.request_delta import RequestDelta, pack
from polydraft.program.packed import NO_ROWS
from polydraft.ray import records
from polydraft.serving import wire
from polydraft.serving.engine_client import Busy, EngineGone
from tests.support.letters import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's own modules
exceptions = pytest.importorskip("ray.exceptions", reason="the extra `ray` is not installed: no ray")
of_serve = pytest.importorskip("ray.serve.exceptions", reason="the extra `ray` is not installed: no ray[serve]")
ingress = pytest.importorskip("polydraft.ray.ingress", reason="the extra `ray` is not installed")
replica = pytest.importorskip("polydraft.ray.replica", reason="the extra `ray` is not installed")

TAKEN = records.Taken("r1")
GONE = records.Failed("gone", "the engine's process ended")


def brought(text: str, finish: str = "") -> wire.Outputs:
    none = np.empty(0, np.int32)
    return wire.Outputs(pack([RequestDelta(0, finish, none, none, none, none, none, NO_ROWS, NO_ROWS, text, "")]))


class Stream:
    """What one call brings: records, errors, and None for a silence without an end."""

    def __init__(self, script: list[Any]) -> None:
        self._script, self.cancelled = list(script), False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._script:
            raise StopAsyncIteration
        said = self._script.pop(0)
        if said is None:
            await asyncio.Event().wait()
        if isinstance(said, Exception):
            raise said
        return records.encode(said)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Serve's handle: one script a call."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.streams = [Stream(script) for script in scripts]
        self.asked: list[records.Ask] = []
        self.generate = SimpleNamespace(remote=self._remote)

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def _remote(self, data: bytes, prefix: bytes) -> Stream:
        assert prefix
        self.asked.append(records.decode_ask(data))
        return self.streams[len(self.asked) - 1]


def texts(handle: Handle, first_s: float = 5.0) -> list[str]:
    """What a request gets."""

    async def scene() -> list[str]:
        stream = ingress.Engines(handle).generate([(list(range(20)), {})], first_s=first_s)
        return [delta.text async for _, delta, _ in stream]

    return asyncio.run(scene())


def test_a_text_comes_piece_by_piece() -> None:
    handle = Handle([TAKEN, brought("a"), brought("b", "stop")])
    assert texts(handle) == ["a", "b"]
    assert handle.asked[0].prompts == [(list(range(20)), {})]


@pytest.mark.parametrize(
    "first", [[GONE], [exceptions.RayActorError()], [of_serve.DeploymentUnavailableError("Engine")]], ids=repr
)
def test_a_request_that_no_engine_has_taken_is_sent_again(first: list[Any]) -> None:
    handle = Handle(first, first, [TAKEN, brought("a", "stop")])
    assert texts(handle) == ["a"]
    assert len(handle.asked) == 3
    assert handle.asked[2].first_s < handle.asked[0].first_s


@pytest.mark.parametrize("last", [GONE, exceptions.RayActorError()], ids=repr)
@pytest.mark.parametrize("pieces", [[], [brought("a")]], ids=len)
def test_one_that_an_engine_has_taken_is_not(last: Any, pieces: list[Any]) -> None:
    handle = Handle([TAKEN, *pieces, last], [TAKEN, brought("b", "stop")])
    with pytest.raises(EngineGone, match="ended"):
        texts(handle)
    assert len(handle.asked) == 1


def test_what_is_wrong_with_a_request_is_told_at_once() -> None:
    handle = Handle([TAKEN, records.Failed("request", "too long", "prompt")])
    with pytest.raises(RequestError, match="too long") as raised:
        texts(handle)
    assert raised.value.param == "prompt"


def test_a_full_queue_is_told_as_such() -> None:
    full = of_serve.BackPressureError(num_queued_requests=7, max_queued_requests=7)
    with pytest.raises(Busy, match="as many requests wait as the server admits"):
        texts(Handle([full]))


@pytest.mark.parametrize("script", [[None], [TAKEN, None]], ids=len)
def test_a_text_that_does_not_begin_in_time_is_given_up_and_its_call_ended(script: list[Any]) -> None:
    handle = Handle(script)
    with pytest.raises(asyncio.TimeoutError):
        texts(handle, first_s=0.1)
    assert handle.streams[0].cancelled


def test_engines_that_stay_away_end_the_wait() -> None:
    handle = Handle(*[[GONE] for _ in range(9)])
    with pytest.raises(asyncio.TimeoutError):
        texts(handle, first_s=0.35)
    assert 2 <= len(handle.asked) <= 4


def test_a_client_that_leaves_ends_the_call() -> None:
    handle = Handle([TAKEN, brought("a"), None])

    async def scene() -> None:
        stream = ingress.Engines(handle).generate([(list(range(20)), {})], first_s=5)
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await stream.aclose()

    asyncio.run(scene())
    assert handle.streams[0].cancelled


def with_replica(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], Any]) -> None:
    """Do something with a replica on its own, as Serve would construct it."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr(replica.serve, "get_replica_context", lambda: context)
    config = {"model": checkpoint(512), "backend": "reference", "max_num_seqs": 4}

    async def scene() -> None:
        one = object.__new__(replica.EngineReplica)
        await one.__init__(config, {}, insecure=True)
        try:
            await act(one)
        finally:
            await one.__del__()
            monkeypatch.setattr(replica.EngineReplica, "__del__", lambda _: None)  # Serve calls it once, and its process ends

    asyncio.run(scene())
    gc.collect()


async def said(one: Any, **params: Any) -> list[Any]:
    ask = records.Ask([(list(range(1, 20)), {"max_new_tokens": 6, "ignore_eos": True, **params})] * 2, 20.0)
    return [records.decode_reply(data) async for data in one.generate(records.encode(ask), b"")]


def test_a_replica_serves_and_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(replica.os, "_exit", ended.append)
    monkeypatch.setattr(replica, "LAST_S", 0.3)

    async def act(one: Any) -> None:
        first, *rest = await said(one)
        assert first == TAKEN
        deltas = [delta for reply in rest for delta in replica_deltas(reply)]
        assert {handle: sum(len(d.token_ids) for d in deltas if d.handle == handle) for handle in (0, 1)} == {0: 6, 1: 6}
        assert [reply.kind for reply in await said(one, temperature=-1.0) if isinstance(reply, records.Failed)] == ["request"]
        assert records.decode_report(await one.stats()).replica == "r1"
        await one.check_health()
        running = asyncio.ensure_future(said(one, max_new_tokens=400))
        for _ in range(500):
            await asyncio.sleep(0.01)
            if records.decode_report(await one.stats()).stats.running:
                break
        os.kill(one._client.pid, signal.SIGKILL)
        *_, last = await running
        assert last.kind == "gone"
        assert "SIGKILL" in last.error
        (away,) = await said(one)
        assert away.kind == "gone", "and nobody has taken it"
        with pytest.raises(EngineGone, match="the engine is failed"):
            await one.check_health()
        assert not ended, "its requests are told first"
        await asyncio.sleep(0.4)
        assert ended == [1]

    with_replica(monkeypatch, act)


def replica_deltas(reply: Any) -> list[RequestDelta]:
    assert isinstance(reply, wire.Outputs)
    return list(ingress.unpack(reply.deltas))
