"""The engine as the HTTP side sees it: what comes for a client that takes nothing is bounded, and ends with a reason."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq.asyncio

from polydraft.errors import DeviceError, PolydraftError
from polydraft.output.request_delta import RequestDelta, pack
from polydraft.program.packed import NO_ROWS
from polydraft.serving import engine_client as module
from polydraft.serving import wire
from polydraft.serving.engine_client import EngineClient, EngineGone, Overrun
from polydraft.serving.service import as_http


def delta(handle: int, token: int, finish: str = "") -> RequestDelta:
    none = np.empty(0, np.int32)
    return RequestDelta(handle, finish, np.array([token], np.int32), none, none, none, none, NO_ROWS, NO_ROWS, "x", "")


def test_a_client_that_takes_nothing_is_given_up_and_its_requests_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 5)
    sent: list[wire.Command] = []

    async def send(command: wire.Command) -> None:
        sent.append(command)

    async def scene() -> tuple[list[RequestDelta], PolydraftError, list[RequestDelta]]:
        client = EngineClient({}, most=8, tell=lambda *given, **more: None)
        monkeypatch.setattr(client, "_send", send)
        client.state = "ready"
        slow, other = client.generate([([1], {}), ([2], {})], first_s=5), client.generate([([3], {})], first_s=5)
        waiting, quick = asyncio.ensure_future(anext(slow)), asyncio.ensure_future(anext(other))
        await asyncio.sleep(0)
        got: list[RequestDelta] = []
        kept: list[RequestDelta] = []
        for token in range(9):
            client._take(wire.Outputs(pack([delta(1, token), delta(2, token), delta(3, token)])))
            if token == 0:
                got.append((await waiting)[1])
            kept.append((await quick)[1])
            quick = asyncio.ensure_future(anext(other))
            await asyncio.sleep(0)
        client._take(wire.Outputs(pack([delta(3, 9, "stop")])))
        kept.append((await quick)[1])
        aborted = [command.handle for command in sent if isinstance(command, wire.Abort)]
        assert aborted == [1, 2], "at once, and not when somebody looks"

        async def rest() -> None:
            async for _, brought, _ in slow:
                got.append(brought)

        with pytest.raises(Overrun, match="5 pieces of the text wait") as raised:
            await rest()
        with pytest.raises(StopAsyncIteration):
            await anext(other)
        assert client.num_requests == 0
        return got, raised.value, kept

    got, error, kept = asyncio.run(scene())
    tokens: dict[int, list[Any]] = {1: [], 2: []}
    for one in got:
        tokens[one.handle] += one.token_ids.tolist()
    assert all(part == list(range(len(part))) for part in tokens.values()), "what was there comes, in order, and then the error"
    assert 5 <= len(got) <= 7
    assert as_http(error).status == 408
    assert [one.token_ids.tolist() for one in kept] == [[i] for i in range(10)], "nobody else minds"
    assert [command.handle for command in sent if isinstance(command, wire.Abort)] == [1, 2]


def test_a_process_that_ends_before_it_connects_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is to be told waits for it, and so must nobody else."""

    def spawn(endpoints: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"], stdin=subprocess.DEVNULL)

    async def scene() -> None:
        client = EngineClient({}, most=8, tell=lambda *given, **more: None)
        monkeypatch.setattr(client, "_spawn", spawn)
        try:
            with pytest.raises(DeviceError, match=r"\(exit status 7\) before it was ready"):
                await asyncio.wait_for(client.start(), 20)
        finally:
            await client.stop()

    asyncio.run(scene())


def test_weights_that_no_process_took_are_told_once() -> None:
    said: list[Any] = []

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        client, context = EngineClient({}, most=8, tell=lambda *given, **more: None), zmq.asyncio.Context()
        client._socket = context.socket(zmq.PAIR)
        waiting = asyncio.ensure_future(client.update_weights("/", "finish", {}))
        await asyncio.sleep(0)
        client._socket.close(linger=0)
        client.dismiss("the engine's process ended")
        with pytest.raises(EngineGone, match="ended before it took the request"):
            await waiting
        context.term()

    asyncio.run(scene())
    gc.collect()
    assert not said


def test_a_command_that_no_process_took_is_told_and_not_cancelled() -> None:
    """Closing a socket cancels what waits in it; the request's own task was not, and its client waits for an answer."""

    async def scene() -> None:
        client, context = EngineClient({}, most=8, tell=lambda *given, **more: None), zmq.asyncio.Context()
        client.state, client._socket = "ready", context.socket(zmq.PAIR)
        waiting = asyncio.ensure_future(anext(client.generate([([1], {})], first_s=5)))
        left = asyncio.ensure_future(anext(client.generate([([1], {})], first_s=5)))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        client._socket.close(linger=0)
        try:
            with pytest.raises(EngineGone, match="ended before it took the request; send it again"):
                await asyncio.wait_for(waiting, 5)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(left, 5)
        finally:
            context.term()
        assert client.num_requests == 0

    asyncio.run(scene())


def test_a_request_waits_for_its_first_token_while_the_engine_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while it falls asleep is told so at once."""

    async def scene() -> None:
        client = EngineClient({}, most=8, tell=lambda *given, **more: None)

        async def send(command: wire.Command) -> None:
            del command

        monkeypatch.setattr(client, "_send", send)
        client.state = "ready"
        waiting = asyncio.ensure_future(anext(client.generate([([1], {})], first_s=0.1)))
        await asyncio.sleep(0.02)
        falling = asyncio.ensure_future(client.sleep(1, "recompute"))
        await asyncio.sleep(0.02)
        with pytest.raises(EngineGone, match="the engine is asleep"):
            await anext(client.generate([([1], {})], first_s=5))
        client._take(wire.Done(1, "", 1))
        assert await falling == ""
        await asyncio.sleep(0.3)
        assert not waiting.done()
        client._take(wire.Done(2, ""))
        begin = asyncio.get_running_loop().time()
        with pytest.raises(asyncio.TimeoutError):
            await waiting
        assert asyncio.get_running_loop().time() - begin > 0.04, "what it had left"

    asyncio.run(scene())


def test_weights_that_went_with_a_process_are_not_replaced_by_those_of_the_start_in_silence() -> None:
    """Nor are those of an update that failed half-way served."""
    told: list[tuple[str, str]] = []
    client = EngineClient({}, most=8, tell=lambda event, **more: told.append((more["state"], more["reason"])))
    ready = wire.Ready("m", "/", "reference", 8, 1, 0, 8, "", {}, [])

    def lost() -> str:
        try:
            asyncio.run(anext(client.generate([([1], {})], first_s=5)))  # type: ignore[arg-type]
        except EngineGone as error:
            return str(error)
        raise AssertionError("it was served")

    client._take(ready)
    client._after("it was killed")
    client._take(ready)
    assert client.lost == "", "nothing had been given"
    client._take(wire.Done(1, "broken", torn="half of them"))
    assert client.lost == client.reason == lost() == "half of them"
    client._take(wire.Done(2, "", given=True))
    assert client.lost == client.reason == ""
    client._after("it was killed")
    client._take(msgspec.structs.replace(ready, sleep_level=2))
    assert client.asleep
    why = "it was killed, and the weights that had been given with it; give them again"
    client._take(wire.Done(3, ""))
    assert client.lost == lost() == why, "waking alone brings no weights"
    client._take(wire.Done(4, "not these"))
    assert client.lost == why
    client._take(wire.Done(5, "", given=True))
    assert client.lost == client.reason == ""
    assert told == [
        ("ready", ""),
        ("restarting", "it was killed"),
        ("ready", ""),
        ("restarting", "it was killed"),
        ("ready", why),
    ]


@pytest.mark.parametrize("served", [False, True])
def test_a_process_that_cannot_be_had_is_told_to_everybody(monkeypatch: pytest.MonkeyPatch, served: bool) -> None:
    """Such as where memory, processes or places for files have run out, which a restart may meet as well."""

    def spawn(endpoints: Any) -> subprocess.Popen[bytes]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def scene() -> None:
        client = EngineClient({}, most=8, tell=lambda *given, **more: None)
        monkeypatch.setattr(client, "_spawn", spawn)
        client.state = "restarting" if served else client.state
        try:
            with pytest.raises(DeviceError, match=r"process could not be run.*Resource temporarily unavailable"):
                await asyncio.wait_for(client.start(), 20)
            assert client.state == "failed"
        finally:
            await client.stop()

    asyncio.run(scene())


def test_what_cannot_be_told_to_a_process_is_a_reason_to_start_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        client = EngineClient({"model": "\udcff"}, most=8, tell=lambda *given, **more: None)
        try:
            with pytest.raises(DeviceError, match=r"process could not be run.*surrogates not allowed"):
                await asyncio.wait_for(client.start(), 20)
        finally:
            await client.stop()

    asyncio.run(scene())


def test_a_client_that_reads_is_not_given_up_for_what_came_while_the_loop_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that lies in the socket is there at once, behind a pause in which nobody could read."""
    monkeypatch.setattr(module, "MOST_WAITING", 5)

    class Socket:
        """Has as many messages as were put there, without a wait."""

        def __init__(self) -> None:
            self.messages = [wire.encode(wire.Outputs(pack([delta(1, token)]))) for token in range(20)]

        def recv(self) -> asyncio.Future[bytes]:
            found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            if self.messages:
                found.set_result(self.messages.pop(0))
            return found

    async def scene() -> None:
        client = EngineClient({}, most=8, tell=lambda *given, **more: None)

        async def send(command: wire.Command) -> None:
            assert not isinstance(command, wire.Abort)

        monkeypatch.setattr(client, "_send", send)
        client.state = "ready"
        texts = client.generate([([1], {})], first_s=5)
        first = asyncio.ensure_future(anext(texts))
        await asyncio.sleep(0)
        reader = asyncio.create_task(client._read(Socket()))  # type: ignore[arg-type]
        got = [(await first)[1], *[(await anext(texts))[1] for _ in range(19)]]
        reader.cancel()
        assert [int(one.token_ids[0]) for one in got] == list(range(20))

    asyncio.run(scene())


def test_a_process_that_hangs_while_weights_are_replaced_is_ended_some_day(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        client = EngineClient({}, most=8, tell=lambda *given, **more: None, start_s=0.4, watchdog_s=0.1)

        async def send(command: wire.Command) -> None:
            """Nobody answers."""

        monkeypatch.setattr(client, "_send", send)
        client.state = "ready"
        client._done[1] = asyncio.get_running_loop().create_future()
        why = await asyncio.wait_for(client._watch(), 20)
        assert why == "the engine's process said nothing for 0.4 seconds and was ended"

    asyncio.run(scene())


def test_a_process_that_died_asleep_is_started_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys, zmq; from polydraft.serving import wire; context = zmq.Context(); "
        "commands, events = (context.socket(zmq.PAIR) for _ in range(2)); "
        "[one.connect(place) for one, place in zip((commands, events), sys.argv[1:])]; "
        "sys.exit(40 + wire.decode_command(commands.recv()).sleep_level)"
    )

    def spawn(endpoints: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", program, *endpoints], stdin=subprocess.DEVNULL)

    async def scene() -> None:
        client = EngineClient({}, most=8, tell=lambda *given, **more: None)
        monkeypatch.setattr(client, "_spawn", spawn)
        client._take(wire.Done(1, "", 2))
        try:
            with pytest.raises(DeviceError, match=r"\(exit status 42\)"):
                await asyncio.wait_for(client.start(), 20)
        finally:
            await client.stop()

    asyncio.run(scene())
