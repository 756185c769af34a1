"""The engine's end of the wire with a reader that stalls or is gone: no step waits, nothing is lost, and the end comes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from polydraft import LLM, SamplingParams
from polydraft.child_process import running
from polydraft.errors import CapabilityError, RecordError
from polydraft.output.engine_outputs import EngineOutputs
from polydraft.output.request_delta import RequestDelta, unpack
from polydraft.serving import wire
from polydraft.serving import worker as module
from polydraft.serving.worker import Worker
from tests.serving.conftest import MODEL
from tests.support import tiny

CONFIG: dict[str, Any] = {
    "model": str(tiny.checkpoint(MODEL)), "backend": "reference", "invariant": True, "logprobs": 2, "max_num_seqs": 3,
    "weights_digest": True,
}  # fmt: skip
PARAMS: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "logprobs": 1}


class Wire:
    """A worker on a thread of this process, and the other ends of its sockets, which take one message each."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets = [self._context.socket(zmq.PAIR) for _ in range(4)]
        for socket in sockets:
            socket.setsockopt(zmq.SNDHWM, 1)
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.LINGER, 0)
        self.commands, self.events, *ends = sockets
        for name, here, there in zip(("commands", "events"), sockets[:2], ends, strict=True):
            here.bind(f"inproc://{name}")
            there.connect(f"inproc://{name}")
        self.worker = Worker(ends[0], ends[1], os.getppid())
        self.sent: list[bool] = []
        self.first: list[int] = []
        """Tokens that were read already."""
        self.thread = threading.Thread(target=lambda: self.sent.append(self.worker.run()))
        self.thread.start()

    def tell(self, command: wire.Command) -> None:
        assert self.commands.poll(20_000, zmq.POLLOUT)
        self.commands.send(wire.encode(command))

    def read(self) -> wire.Event:
        assert self.events.poll(20_000), "the worker says nothing"
        return wire.decode_event(self.events.recv())

    def close(self) -> None:
        """Whatever a test left behind: tell the worker to stop, and take what it says meanwhile."""
        with contextlib.suppress(zmq.ZMQError):
            self.commands.send(wire.encode(wire.Stop()), zmq.NOBLOCK)
        deadline = time.monotonic() + 20
        while (self.thread.is_alive() or self.worker._sender._thread.is_alive()) and time.monotonic() < deadline:
            if self.events.poll(10):
                self.events.recv()
            if not self.thread.is_alive():
                self.worker._sender.end(0.01)
        self._context.destroy(linger=0)


@pytest.fixture
def other_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr(module, "MOST_BATCHES", 2)
    monkeypatch.setattr(module, "ORPHANED_S", 0.3)
    made = Wire()
    made.tell(wire.Start(CONFIG))
    assert isinstance(made.read(), wire.Ready)
    yield made
    made.close()


def rests(worker: Worker) -> None:
    deadline = time.monotonic() + 20
    engine = worker._engine
    assert engine is not None
    while (engine.has_work or not engine.totals.new_tokens) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.has_work, "the engine waits for its reader"


def test_a_reader_that_stalls_holds_no_step_up_and_misses_nothing(other_end: Wire) -> None:
    for handle in range(3):
        other_end.tell(wire.Add(handle, [5, 9 + handle], {**PARAMS, "seed": handle, "temperature": 0.8}))
    rests(other_end.worker)
    assert other_end.worker._sender._queue.qsize() <= 2, "what there is no room for stays in the engine"
    tokens: dict[int, list[int]] = {handle: [] for handle in range(3)}
    numbers: dict[int, list[float]] = {handle: [] for handle in range(3)}
    ended: set[int] = set()
    batches = 0
    while len(ended) < 3:
        event = other_end.read()
        assert isinstance(event, wire.Outputs)
        batches += 1
        for delta in unpack(event.deltas):
            tokens[delta.handle] += delta.token_ids.tolist()
            numbers[delta.handle] += delta.logprobs["logprobs"][:, 0].tolist()
            if delta.finish:
                ended.add(delta.handle)
    assert batches < 12, "what came meanwhile is one batch"
    llm = LLM(**CONFIG)
    for handle in range(3):
        params = SamplingParams(**{**PARAMS, "seed": handle, "temperature": 0.8})
        (wanted,) = llm.generate([[5, 9 + handle]], params)
        assert tokens[handle] == list(wanted.token_ids)
        assert numbers[handle] == [token.logprob for token in wanted.tokens]
    other_end.tell(wire.Stop())
    other_end.thread.join(20)
    assert other_end.sent == [True]


def test_a_worker_whose_reader_takes_nothing_ends_all_the_same(other_end: Wire) -> None:
    for handle in range(3):
        other_end.tell(wire.Add(handle, [5, 9 + handle], PARAMS))
    rests(other_end.worker)
    other_end.tell(wire.Stop())
    other_end.thread.join(20)
    assert other_end.sent == [False], "it says that not all was sent"


def test_a_record_that_cannot_be_read_ends_what_runs_and_nothing_else(other_end: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender finds it, and the engine's thread ends what it came from."""
    processor, engine = other_end.worker._sender._processor, other_end.worker._engine
    assert processor is not None
    assert engine is not None
    deltas, step, errors = processor.deltas, engine.step, [RecordError("a record says nonsense")]

    def lying(outputs: EngineOutputs) -> list[RequestDelta]:
        if errors:
            processor.error = errors.pop()
        return deltas(outputs)

    def slowly() -> bool:
        time.sleep(0.01)  # so that the sender has its turn long before the text ends
        return step()

    monkeypatch.setattr(processor, "deltas", lying)
    monkeypatch.setattr(engine, "step", slowly)
    other_end.tell(wire.Add(1, [5, 9], {"max_new_tokens": 90, "ignore_eos": True}))
    ends: dict[int, tuple[str, str]] = {}
    while 1 not in ends:
        event = other_end.read()
        assert isinstance(event, wire.Outputs)
        ends |= {delta.handle: (delta.finish, delta.error) for delta in unpack(event.deltas) if delta.finish}
    assert ends == {1: ("error", "a record says nonsense")}
    other_end.tell(wire.Add(3, [5, 9], PARAMS))
    while 3 not in ends:
        event = other_end.read()
        assert isinstance(event, wire.Outputs)
        ends |= {delta.handle: (delta.finish, delta.error) for delta in unpack(event.deltas) if delta.finish}
    assert ends[3] == ("length", "")
    other_end.tell(wire.Stop())


def test_a_worker_whose_server_is_gone_before_it_begins_ends(tmp_path: Path) -> None:
    """Somebody else is its parent then from the beginning."""
    with subprocess.Popen([sys.executable, "-c", ""]) as server:
        pass
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("commands", "events")]
    process = subprocess.Popen(running("polydraft.serving.worker", str(server.pid), *endpoints))
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("error", [CapabilityError("grammars need the package llguidance"), OSError(24, "Too many open files")])
def test_a_request_that_the_engine_cannot_take_does_not_end_it(
    other_end: Wire, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(other_end.worker._engine, "add", refuse)
        other_end.tell(wire.Add(1, [5, 9], PARAMS))
        assert other_end.read() == wire.Refused(1, str(error), "engine")
    other_end.tell(wire.Add(2, [5, 9], PARAMS))
    assert isinstance(other_end.read(), wire.Outputs), "others are served"


def test_a_command_that_is_none_ends_the_worker(other_end: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda given: failed.append(given.exc_value))
    other_end.commands.send(b"\x00")
    other_end.thread.join(20)
    assert "command to the engine cannot be read" in str(failed[0])


@pytest.fixture
def slow(other_end: Wire, monkeypatch: pytest.MonkeyPatch) -> Wire:
    """One whose steps take long enough that commands come in the middle of a text, with such a text."""
    engine = other_end.worker._engine
    assert engine is not None
    step = engine.step

    def slowly() -> bool:
        time.sleep(0.005)
        return step()

    monkeypatch.setattr(engine, "step", slowly)
    other_end.tell(wire.Add(1, [5, 9], PARAMS))
    event = other_end.read()
    assert isinstance(event, wire.Outputs)
    other_end.first = unpack(event.deltas)[0].token_ids.tolist()
    return other_end


def test_while_running_requests_finish_the_worker_serves_them_and_answers(slow: Wire) -> None:
    """Changes of weights are done one after the other, and whoever comes meanwhile is served afterwards."""
    for number, model in ((1, tiny.moved(MODEL)), (2, MODEL)):
        slow.tell(wire.UpdateWeights(number, str(tiny.checkpoint(model)), "finish"))
    slow.tell(wire.AskStats())
    slow.tell(wire.Add(2, [5, 9], PARAMS))
    slow.tell(wire.Add(3, [5, 9], PARAMS))
    slow.tell(wire.Abort(3))
    said: list[str] = []
    while "end 2" not in said:
        event = slow.read()
        if isinstance(event, wire.Outputs):
            said += [f"{'end' if delta.finish else 'more'} {delta.handle}" for delta in unpack(event.deltas)]
        else:
            said.append(f"{type(event).__name__} {event.number if isinstance(event, wire.Done) else ''}".strip())
    first = said.index("Done 1")
    assert said.index("Stats") < said.index("end 1") < first < said.index("Done 2")
    assert "more 1" in said[said.index("Stats") : first], "the text that is waited for goes on to its reader"
    assert said.index("end 3") < first, "one that waited was aborted"
    assert all(first < place for place, what in enumerate(said) if what.endswith(" 2") and "Done" not in what)


def test_outputs_name_the_weights_that_drew_them_also_where_nobody_reads(slow: Wire) -> None:
    """They wait in the engine while weights are replaced, and are told apart from what follows."""
    engine = slow.worker._engine
    assert engine is not None
    first = engine.weights.digest
    rests_at = time.monotonic() + 20
    while not slow.worker._pending and time.monotonic() < rests_at:
        time.sleep(0.002)
    slow.tell(wire.UpdateWeights(1, str(tiny.checkpoint(tiny.moved(MODEL))), "recompute"))
    while engine.weights.digest == first and time.monotonic() < rests_at:
        time.sleep(0.002)
    drawn: dict[str, list[int]] = {}
    ended = done = False
    while not (ended and done):
        event = slow.read()
        if isinstance(event, wire.Outputs):
            for delta in unpack(event.deltas):
                drawn.setdefault(event.weights_digest, []).extend(delta.token_ids.tolist())
                ended |= bool(delta.finish)
        done |= isinstance(event, wire.Done)
    assert list(drawn) == [first, engine.weights.digest]
    text: list[int] = slow.first
    for model, tokens in zip((MODEL, tiny.moved(MODEL)), drawn.values(), strict=True):
        with LLM(**{**CONFIG, "model": str(tiny.checkpoint(model))}) as llm:
            count = len(tokens) + (len(text) if model == MODEL else 0)
            (wanted,) = llm.generate(
                [[5, 9, *(text if model != MODEL else ())]], SamplingParams(**{**PARAMS, "max_new_tokens": count})
            )
        text = [*text, *tokens]
        assert list(wanted.token_ids) == text[len(text) - count :]


def test_a_worker_that_waits_for_requests_to_finish_stops_all_the_same(slow: Wire) -> None:
    slow.tell(wire.UpdateWeights(1, str(tiny.checkpoint(MODEL)), "finish"))
    slow.tell(wire.UpdateWeights(2, str(tiny.checkpoint(MODEL)), "finish"))
    slow.tell(wire.Stop())
    while isinstance(event := slow.read(), wire.Outputs):
        pass
    assert isinstance(event, wire.Done)
    assert event.error == "the server stops, and running requests have not finished; start it again"
    slow.thread.join(20)
    assert slow.sent == [True]
