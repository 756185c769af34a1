"""The engine's process of the server: one engine on one thread, commands in, what its steps bring out on another.

`python -m polydraft.serving.worker PARENT COMMANDS EVENTS` is started by the server's engine client, the process PARENT, and
connects to its two sockets; it ends when that process has gone. The engine's thread takes commands and steps, also while it waits
for requests to finish before weights change or it falls asleep; what is new it hands over as arrays (`EngineOutputs`). The other
thread makes texts and deltas of them and sends those. A slow reader never holds a step up: what nobody has made room for stays
in the engine, where what further steps bring joins it. It never opens a port and never looks at HTTP.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import zmq

from polydraft.config import EngineConfig
from polydraft.engine import Engine, Running, SleepLevel
from polydraft.errors import DeviceError, PolydraftError, RequestError
from polydraft.instruments.trace import Trace
from polydraft.loading import at_intervals
from polydraft.models.tokenizer import Tokenizer
from polydraft.output.engine_outputs import EngineOutputs
from polydraft.output.output_processor import OutputProcessor
from polydraft.output.request_delta import pack
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import Phase
from polydraft.serving import wire
from polydraft.serving.lanes import Lanes
from polydraft.serving.protocol import refuse_taken

IDLE_MS = 200
"""How long the worker sleeps at most without work; a command wakes it."""
FULL_MS = 20
"""Likewise while outputs wait for room."""
ORPHANED_S = 10
"""Seconds after the server's process vanished within which the worker ends."""
MOST_BATCHES = 32
"""Batches of outputs on their way out; while there are as many, further ones stay in the engine and become one."""
SWITCH_S = 5e-4
"""How long a thread may keep the interpreter from the other one."""

Change = wire.UpdateWeights | wire.Sleep | wire.WakeUp
Beside = tuple[float, float, list[wire.Span], str]
"""What goes with outputs: how long a step took on the host and how long the host took before it, in ms, what went on where, and
the digest of the weights; see `wire.Outputs`."""


class _Orphaned(BaseException):
    """The server's process is gone."""


class Sender:
    """The thread that makes deltas of outputs and sends them, and every other event in its turn. `failure`: what it ended of."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._queue: queue.Queue[tuple[EngineOutputs, Beside] | wire.Event | Tokenizer | None] = queue.Queue()
        self._processor: OutputProcessor | None = None
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self.failure: BaseException | None = None
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether outputs should stay where they are for now."""
        return self._queue.qsize() >= MOST_BATCHES

    @property
    def error(self) -> DeviceError | None:
        """A record that could not be read, reported once."""
        if self._processor is None or self._processor.error is None:
            return None
        error, self._processor.error = self._processor.error, None
        return error

    def put(self, what: tuple[EngineOutputs, Beside] | wire.Event | Tokenizer) -> None:
        """Send this behind what was put before: outputs of one or more steps and what goes with the last one, or an event. The
        first thing is the tokenizer, once there is an engine. Never waits."""
        self._queue.put(what)

    def end(self, timeout_s: float) -> bool:
        """Send what there is, and leave; False where it gave up on a reader that takes nothing."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (what := self._queue.get()) is not None:
                self._handle(what)
        except BaseException as error:  # noqa: BLE001  the engine's thread raises it
            self.failure = error

    def _handle(self, what: tuple[EngineOutputs, Beside] | wire.Event | Tokenizer) -> None:
        if isinstance(what, Tokenizer):
            self._processor = OutputProcessor(what)
        elif not isinstance(what, tuple):
            self._socket.send(wire.encode(what))
        elif self._processor is not None:
            outputs, beside = what
            deltas = self._processor.deltas(outputs)
            if deltas:
                self._socket.send(wire.encode(wire.Outputs(pack(deltas), *beside)))


class Worker:
    """The loop: take commands, step, hand over. `commands` and `events` are connected. `parent` is the process that reads them,
    which may be gone already."""

    def __init__(self, commands: zmq.Socket[bytes], events: zmq.Socket[bytes], parent: int) -> None:
        self._socket, self._sender = commands, Sender(events)
        self._engine: Engine | None = None
        self._begin = self._last = time.monotonic()
        self._step_s = self._gap_s = self._idle_s = 0.0
        self._parent = parent
        self._stopping = self._pending = False
        """Whether outputs wait in the engine for room."""
        self._timing: tuple[float, float] = 0.0, 0.0
        self._digest = ""
        """Of the weights that drew what waits in the engine."""
        self._changes: deque[Change] = deque()
        """Administrative commands, in their order; the first one is being done."""
        self._lanes: Lanes | None = None
        self.failure = ""
        """Why the engine serves nothing any more; another one has to take its place."""

    def run(self) -> bool:
        """Serve until asked to stop, until the engine has failed for good, or until the other process is gone; whether all was
        sent."""
        try:
            while not self._stopping and not self.failure:
                self._turn()
                self.failure = self._engine.failure if self._engine is not None else ""
        except _Orphaned:
            return False
        if self._engine is not None:
            if self.failure:
                self._sender.put(self._stats(self._engine))  # closing the engine takes its time: nothing more is sent here
                self._tell(self._engine, always=True)
            with suppress(DeviceError) if self.failure else nullcontext():
                self._engine.close()
        return self._sender.end(ORPHANED_S)

    def _turn(self) -> None:
        """Take what there is to take, and make a step where there is one."""
        busy = self._engine is not None and self._engine.has_work
        self._take(0 if busy else FULL_MS if self._pending else IDLE_MS)
        if not busy and self._lanes is not None:
            self._lanes.drain()  # what was left over of the last work belongs to nobody
        if self._engine is not None:
            if not busy:
                self._engine.heed_ranks()
            self._serve(self._engine)
        if self._sender.failure is not None:
            raise self._sender.failure
        if os.getppid() != self._parent:
            raise _Orphaned

    def _meanwhile(self) -> None:
        """A turn while the engine waits for requests to finish."""
        self._turn()
        if self._stopping:
            raise DeviceError("the server stops, and running requests have not finished; start it again")

    def _serve(self, engine: Engine) -> None:
        """One step where there is one, and what it brought."""
        error = self._sender.error
        if error is not None:
            engine.fail(error)
            self._tell(engine)
        if engine.has_work:
            self._step(engine)
        elif self._pending:
            self._tell(engine)

    # -- commands ----------------------------------------------------------------------------------
    def _take(self, wait_ms: int) -> None:
        """Handle every command that is there; wait for the first one at most so long."""
        start = time.monotonic()
        if wait_ms and not self._socket.poll(wait_ms):
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
                self._tell(self._engine)
        elif isinstance(command, wire.UpdateWeights | wire.Sleep | wire.WakeUp):
            self._administer(self._engine, command)
        else:
            self._sender.put(self._stats(self._engine))

    def _start(self, command: wire.Start) -> None:
        try:
            told = at_intervals(lambda stage, done, total: self._sender.put(wire.Loading(stage, done, total)))
            engine = Engine(EngineConfig.from_mapping(command.config), instruments=(Trace(calls="none"),), loading=told)
            parameters = engine.runner.processing.parameters.values()
            refuse_taken(one.name for one in parameters)
            if command.sleep_level:
                engine.sleep(_level(command.sleep_level))
        except PolydraftError as error:
            self._sender.put(wire.Unready(str(error)))
            self._stopping = True
            return
        self._engine, self._digest = engine, engine.weights.digest
        limits, resolved, self._lanes = engine.resolved.limits, engine.resolved, Lanes(engine)
        self._sender.put(engine.tokenizer)
        self._sender.put(
            wire.Ready(
                model=engine.model.name, model_dir=str(engine.checkpoint.path), backend=resolved.backend,
                max_model_len=min(limits.max_len, limits.num_blocks * limits.block_size), max_num_seqs=limits.max_seqs,
                max_logprobs=limits.max_logprobs,
                vocab_size=limits.vocab_size, thinks=bool(engine.config.think_end_ids),
                weights_digest=engine.weights.digest, device_times=self._lanes.said, sleep_level=command.sleep_level,
                decisions={name: _plain(value) for name, value in resolved.describe().items()},
                parameters=[wire.Parameter(one.name, one.doc, one.wanted) for one in parameters],
            )
        )  # fmt: skip
        self._begin = self._last = time.monotonic()
        self._idle_s = 0.0

    def _add(self, engine: Engine, command: wire.Add) -> None:
        try:
            params = SamplingParams.from_mapping(command.params)
            engine.add(command.prompt_ids, params, id=str(command.handle), stream=True, compiled=False)
        except RequestError as error:
            self._sender.put(wire.Refused(command.handle, str(error), "client", error.param))
        except (PolydraftError, OSError) as error:
            self._sender.put(wire.Refused(command.handle, str(error), "engine"))

    def _administer(self, engine: Engine, command: Change) -> None:
        """Do this, and what of its kind comes until it is done."""
        self._changes.append(command)
        if len(self._changes) > 1:
            return
        while self._changes and not self._stopping:
            self._change(engine, self._changes[0])
            self._changes.popleft()

    def _change(self, engine: Engine, command: Change) -> None:
        error, given = "", False
        self._tell(engine, always=True)  # a preempted request is told of when it runs again
        try:
            if isinstance(command, wire.Sleep):
                engine.sleep(_level(command.level), running=_running(command.running), step=self._meanwhile)
                return
            with ExitStack() as opened:
                source = opened.enter_context(engine.shared(command.shared)) if command.shared else command.path
                if isinstance(command, wire.WakeUp):
                    engine.wake_up(source or None)
                else:
                    engine.update_weights(source, running=_running(command.running), step=self._meanwhile)
                given = bool(source)
        except PolydraftError as raised:
            error = str(raised)
        except Exception as raised:  # noqa: BLE001  whatever is wrong with what was given, the engine's requests go on
            error = f"{type(raised).__name__}: {raised}; correct what was given"
        finally:
            self._tell(engine, always=True)  # what the weights of before drew, by itself
            self._digest = engine.weights.digest
            self._sender.put(
                wire.Done(command.number, error, engine.sleep_level or 0, engine.weights.digest, given, engine.weights.torn)
            )

    # -- steps -------------------------------------------------------------------------------------
    def _step(self, engine: Engine) -> None:
        start = time.monotonic()
        gap = start - self._last
        self._gap_s += gap
        engine.step()
        self._last = time.monotonic()
        self._step_s += self._last - start
        self._timing = 1000 * (self._last - start), 1000 * gap
        self._tell(engine)

    def _tell(self, engine: Engine, *, always: bool = False) -> None:
        """Hand over what is new, unless as much as may is on its way already."""
        self._pending = self._sender.full and not always
        if not self._pending and (outputs := engine.take()):
            spans = self._lanes.drain() if self._lanes is not None else []
            self._sender.put((outputs, (*self._timing, spans, self._digest)))
        elif self._lanes is not None:
            self._lanes.note()

    def _stats(self, engine: Engine) -> wire.Stats:
        totals, slots, ledger, lanes = engine.totals, engine.slots, engine.ledger, self._lanes
        if lanes is not None:
            lanes.note()
        return wire.Stats(
            running=int((slots.phase != Phase.IDLE).sum()), kv_blocks=ledger.num_blocks,
            waiting=len(engine.scheduler.waiting) + len(engine.scheduler.held),
            kv_blocks_free=ledger.num_free, steps=totals.steps, new_tokens=totals.new_tokens, rounds=totals.rounds,
            drafted=totals.drafted, accepted=totals.accepted, drafted_at=list(totals.drafted_at),
            accepted_at=list(totals.accepted_at), drafts_per_step=list(totals.drafts_per_step), alarms=dict(engine.alarms.count),
            alarms_said=dict(engine.alarms.said),
            preemptions=engine.scheduler.num_preemptions, step_s=self._step_s,
            host_gap_s=self._gap_s, idle_s=self._idle_s, uptime_s=time.monotonic() - self._begin, failure=engine.failure,
            device_busy_s=lanes.busy_s if lanes is not None else 0.0, prefix_queries=engine.scheduler.num_looked_up,
            prefix_hits=ledger.num_hits, behind=engine.behind,
        )  # fmt: skip


def _level(what: int) -> SleepLevel:
    return 2 if what == 2 else 1


def _running(what: str) -> Running:
    return "recompute" if what == "recompute" else "finish"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def main() -> None:
    """Connect and serve. Interrupts are the server's business: it says when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    commands, events = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    parent, *endpoints = sys.argv[1:]
    for socket, endpoint in zip((commands, events), endpoints, strict=True):
        socket.setsockopt(zmq.LINGER, 1000 * ORPHANED_S)
        socket.connect(endpoint)
    worker = Worker(commands, events, int(parent))
    try:
        sent = worker.run()
    except (Exception, SystemExit):  # noqa: BLE001  the process ends of it, whatever its other thread waits for
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if not sent:
        os._exit(0)  # nobody reads: a socket would wait for that to change
    for socket in (commands, events):
        socket.close()
    context.term()
    if worker.failure:
        sys.exit(f"polydraft: the engine has failed: {worker.failure}")


if __name__ == "__main__":
    main()
