"""Owns the engine's process: one engine on one thread, commands in, the news of each step out.

`python -m polydraft.serving.worker ENDPOINT` is started by the server's engine client and connects to its socket. What cannot
be sent at once waits here, a record a step, so that a slow reader never holds a step up; it never opens a port and never
looks at HTTP.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from typing import Any

import zmq

from polydraft.config import EngineConfig
from polydraft.engine import Engine
from polydraft.errors import DeviceError, PolydraftError, RequestError
from polydraft.runtime.news import news_of, pack
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import Phase
from polydraft.serving import wire

IDLE_MS = 200
"""How long the worker sleeps at most without work; a command wakes it."""
ORPHANED_S = 10
"""Seconds after the server's process vanished within which the worker ends."""


class Worker:
    """The loop: take commands, step, send. `socket` is connected."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._backlog: deque[bytes] = deque()
        """Events that the reader has not made room for yet, in order; bounded by what the engine's requests can still say."""
        self._engine: Engine | None = None
        self._begin = self._last = time.monotonic()
        self._step_s = self._gap_s = self._idle_s = 0.0
        self._parent = os.getppid()
        self._stopping = False

    def run(self) -> None:
        """Serve until told to stop, or until nobody is there any more."""
        while not self._stopping:
            busy = self._engine is not None and self._engine.has_work
            self._take(0 if busy else IDLE_MS)
            if self._engine is not None and self._engine.has_work:
                self._step(self._engine)
            self._flush()
            if os.getppid() != self._parent:
                return  # the server is gone
        if self._engine is not None:
            self._engine.close()

    # -- commands ----------------------------------------------------------------------------------
    def _take(self, wait_ms: int) -> None:
        """Handle every command that is there; wait for the first one at most so long."""
        start = time.monotonic()
        if wait_ms and not self._socket.poll(min(wait_ms, 20) if self._backlog else wait_ms):
            self._idle_s += time.monotonic() - start
            self._last = time.monotonic()
            return
        if wait_ms:
            self._idle_s += time.monotonic() - start
            self._last = time.monotonic()
        while not self._stopping:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(wire.decode_command(data))

    def _handle(self, command: wire.Command) -> None:
        if isinstance(command, wire.Start):
            self._start(command)
        elif isinstance(command, wire.Stop):
            self._stopping = True
        elif self._engine is None:
            pass  # nothing can be asked of an engine that could not be built
        elif isinstance(command, wire.Add):
            self._add(self._engine, command)
        elif isinstance(command, wire.Abort):
            if str(command.handle) in self._engine.requests:
                self._engine.abort(str(command.handle))
                self._send_news(self._engine)
        elif isinstance(command, wire.UpdateWeights):
            self._update(self._engine, command)
        else:
            self._send(self._stats(self._engine))

    def _start(self, command: wire.Start) -> None:
        try:
            self._engine = engine = Engine(EngineConfig.from_mapping(command.config))
        except PolydraftError as error:
            self._send(wire.Unready(str(error)))
            self._stopping = True
            return
        limits, resolved = engine.resolved.limits, engine.resolved
        self._send(
            wire.Ready(
                model=engine.model.name, model_dir=str(engine.model_path), backend=resolved.backend, max_model_len=limits.max_len,
                max_num_seqs=limits.max_seqs, max_logprobs=limits.max_logprobs, vocab_size=limits.vocab_size,
                decisions={name: _plain(value) for name, value in resolved.describe().items()},
            )
        )  # fmt: skip
        self._begin = self._last = time.monotonic()
        self._idle_s = 0.0

    def _add(self, engine: Engine, command: wire.Add) -> None:
        try:
            engine.add(command.prompt_ids, SamplingParams.from_mapping(command.params), id=str(command.handle), stream=True)
        except RequestError as error:
            self._send(wire.Refused(command.handle, str(error), "client"))
        except DeviceError as error:
            self._send(wire.Refused(command.handle, str(error), "engine"))

    def _update(self, engine: Engine, command: wire.UpdateWeights) -> None:
        try:
            engine.update_weights(command.path, running="recompute" if command.running == "recompute" else "finish")
        except PolydraftError as error:
            self._send(wire.Done(command.number, str(error)))
        else:
            self._send(wire.Done(command.number, ""))
        self._send_news(engine)

    # -- steps -------------------------------------------------------------------------------------
    def _step(self, engine: Engine) -> None:
        start = time.monotonic()
        gap = start - self._last
        self._gap_s += gap
        engine.step()
        self._last = time.monotonic()
        self._step_s += self._last - start
        self._send_news(engine, 1000 * (self._last - start), 1000 * gap)

    def _send_news(self, engine: Engine, step_ms: float = 0.0, host_gap_ms: float = 0.0) -> None:
        outputs = engine.poll()
        if outputs:
            self._send(wire.News(pack([news_of(int(output.id), output) for output in outputs]), step_ms, host_gap_ms))

    def _stats(self, engine: Engine) -> wire.Stats:
        totals, slots, ledger = engine.totals, engine.slots, engine.ledger
        return wire.Stats(
            running=int((slots.phase != Phase.IDLE).sum()), waiting=len(engine.scheduler.waiting), kv_blocks=ledger.num_blocks,
            kv_blocks_free=ledger.num_free, steps=totals.steps, new_tokens=totals.new_tokens, rounds=totals.rounds,
            drafted=totals.drafted, accepted=totals.accepted, drafted_at=list(totals.drafted_at),
            accepted_at=list(totals.accepted_at), preemptions=engine.scheduler.num_preemptions, step_s=self._step_s,
            host_gap_s=self._gap_s, idle_s=self._idle_s, uptime_s=time.monotonic() - self._begin, failure=engine.failure,
        )  # fmt: skip

    # -- sending -----------------------------------------------------------------------------------
    def _send(self, event: wire.Event) -> None:
        self._backlog.append(wire.encode(event))
        self._flush()

    def _flush(self) -> None:
        """Hand over what there is room for."""
        while self._backlog:
            try:
                self._socket.send(self._backlog[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._backlog.popleft()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def main() -> None:
    """Connect and serve. Interrupts are the server's business: it says when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000 * ORPHANED_S)
    socket.connect(sys.argv[1])
    with contextlib.suppress(KeyboardInterrupt):
        Worker(socket).run()
    socket.close()
    context.term()


if __name__ == "__main__":
    main()
