"""Grammars as an engine sees them: processes that compile them and work out masks (`grammar_process.py`), and what they answer.

`Constraints` opens grammars and texts here, asks, and takes answers when they are there. Everything runs on the engine's thread
and nothing waits for a process unless `poll` is given the time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import socket
import subprocess
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from polydraft.child_process import await_end, running
from polydraft.device import Array
from polydraft.errors import CapabilityError
from polydraft.sampling.automaton import ALL
from polydraft.sampling.grammar_process import ANSWER, GRAMMAR, LENGTH
from polydraft.sampling.thinking import Thinking

if TYPE_CHECKING:
    from polydraft.host.request import Request

MOST_KEPT: Final = 16
"""Compiled grammars that are kept for further requests, each a process."""
MOST_COMPILING: Final = 8
"""Grammars that are compiled at the same time."""
QUICK_S: Final = 0.002
"""Processor time of a window's masks below which the next ones are expected in the middle of a step."""
MOST_LATE: Final = 4
"""Times that masks may come late after which they are not expected there any more."""
END_S: Final = 5.0
"""Seconds that the fork server may take to end."""


class Binding:
    """What binds the output of one request, which a grammar's process works out. `ask` says what was committed and which drafts
    wait; once it is `ready`, `take` has the masks of that window. `error`: why the text cannot go on, "" while it can."""

    request: Request | None = None
    """Whose it is."""

    def __init__(self, grammar: Grammar, number: int) -> None:
        self._grammar, self._number = grammar, number
        self.consumed = 0
        """Committed tokens that it was told of."""
        self.error = ""
        self.late = 0
        """Times that a step went on without its masks."""
        self._single: list[bool] = []
        self._masks: Array = np.empty((0, 0), np.uint32)
        self._asked = self._answered = 0
        self._took_s = 0.0

    @property
    def compiled(self) -> bool:
        """Whether it is known that the grammar can be used, or that it cannot."""
        return self._grammar.compiled or bool(self.error)

    @property
    def ready(self) -> bool:
        """Whether the process has answered the last question, or has failed."""
        return self._answered == self._asked or bool(self.error)

    @property
    def quick(self) -> bool:
        """Whether masks are expected while a target pass runs, so that the next step may begin before they are there: as the last
        answer was."""
        return self._took_s < QUICK_S and self.late < MOST_LATE

    def ask(self, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Ask for masks behind `tokens`, which were committed since the last question, and each of `drafts`. Never waits."""
        self.consumed += len(tokens)
        self._asked += 1
        self._grammar.send(["ask", self._number, self._asked, list(tokens), list(drafts)])

    def answer(self, question: int, took_s: float, single: Sequence[bool], masks: Array, error: str) -> bool:
        """Take an answer in; whether it is one to the last question."""
        if question != self._asked and not error:
            return False
        self._answered, self._took_s, self.error = question, took_s, error
        self._single, self._masks = list(single), masks
        return True

    def take(self, rows: Array) -> list[bool]:
        """Write the masks into `rows` [n, words], one a place, and return which of the places allow one token alone."""
        count = min(len(self._single), len(rows))
        rows[:count], rows[count:] = self._masks[:count], ALL
        return self._single[:count]

    def end(self) -> None:
        """Nobody asks any more: the process forgets the text."""
        self._grammar.forget(self._number)


class Grammar:
    """The process of one grammar, from this side."""

    def __init__(self, grammars: Grammars, kind: str, text: str) -> None:
        self._grammars, self._kind = grammars, kind
        self.stream, self.remote = socket.socketpair()
        self.stream.setblocking(False)
        self.compiled, self.error = False, ""
        self.texts: dict[int, Binding] = {}
        self._in, self._out = bytearray(), bytearray()
        self._number = 0
        self.send([kind, text])

    def bind(self, thinking: Thinking | None, prompt: Sequence[int]) -> Binding:
        """A text, which begins behind `prompt`."""
        self._number += 1
        binding = self.texts[self._number] = Binding(self, self._number)
        about = None
        if thinking is not None:
            around = thinking.markers
            about = [[around.start, around.end, around.forced], thinking.limit, thinking.reply]
        self.send(["open", self._number, list(prompt) if thinking is not None else [], about])
        return binding

    def forget(self, number: int) -> None:
        """A text has ended."""
        if self.texts.pop(number, None) is not None and not self.error:
            self.send(["end", number])

    def send(self, message: list[Any]) -> None:
        """Send a message, now or when there is room for it."""
        data = json.dumps(message).encode()
        self._out += LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self._out:
                del self._out[: self.stream.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended; whatever it said before that is still to be read
            self._out.clear()
        self._grammars.watch(self, writing=bool(self._out))

    def receive(self) -> list[Binding]:
        """Read what has come; returns the texts that it changes something for."""
        found: list[Binding] = []
        ended = False
        try:
            while not ended:
                data = self.stream.recv(2**18)
                self._in += data
                ended = not data
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        while len(self._in) >= LENGTH.size and len(self._in) >= (end := LENGTH.size + LENGTH.unpack_from(self._in)[0]):
            found += self._take(bytes(self._in[LENGTH.size : end]))
            del self._in[:end]
        if ended and not self.error:
            found += self._fail(self._grammars.failure() or self._end())
        return found

    def _end(self) -> str:
        doing = "a window of it" if self.compiled else "it"
        return (
            f"the process of the {self._kind} of the request ended while it worked {doing} out: that takes too much time or "
            "memory, or it is nested too deep; simplify it"
        )

    def _take(self, body: bytes) -> list[Binding]:
        number, question, took_s, places, said = ANSWER.unpack_from(body)
        begin = ANSWER.size + places
        error = body[begin : begin + said].decode()
        if number == GRAMMAR:
            self.compiled = True
            self._grammars.compiled(self)
            return self._fail(error) if error else list(self.texts.values())
        binding = self.texts.get(number)
        if error:
            error = f"the {self._kind} of the request cannot be followed: {error}; simplify it"
        masks = np.frombuffer(body, np.uint32, offset=begin + said).reshape(places, -1) if places else _NO_MASKS
        single = [bool(one) for one in body[ANSWER.size : begin]]
        return [binding] if binding is not None and binding.answer(question, took_s, single, masks, error) else []

    def _fail(self, error: str) -> list[Binding]:
        """The grammar cannot be used, or no longer."""
        self.error = error
        self._grammars.drop(self)
        for binding in self.texts.values():
            binding.error = binding.error or error
        return list(self.texts.values())


_NO_MASKS: Final = np.empty((0, 0), np.uint32)


def lacking() -> str:
    """Why there are no grammars here, as a sentence with the next step; "" where there are."""
    if importlib.util.find_spec("llguidance") is None:
        return "grammars need the package llguidance; install it: pip install 'polydraft[grammar]'"
    return "" if hasattr(os, "fork") else "grammars need processes that fork, which this system has not; use Linux or macOS"


class Grammars:
    """All grammars of an engine, and the fork server of their processes, which is started with the first of them."""

    def __init__(self, tokenizer: Path, vocab: int, eos: Sequence[int]) -> None:
        self._arguments = [str(tokenizer), str(vocab), *map(str, eos)]
        self._selector = selectors.DefaultSelector()
        self._grammars: dict[tuple[str, str], Grammar] = {}
        """By kind and text, the last used one last."""
        self._streams: dict[int, Grammar] = {}
        """By descriptor. The selector must not know them: what closes it at the end would keep all of this alive."""
        self._waiting: deque[Grammar] = deque()
        """Those that no process compiles yet."""
        self._compiling: set[Grammar] = set()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._close: weakref.finalize[..., Grammars] | None = None
        """What ends the fork server, once there is one."""

    def bind(self, kind: str, text: str, thinking: Thinking | None, prompt: Sequence[int]) -> Binding:
        """A text that a grammar binds. Raises `CapabilityError` where there are no grammars here."""
        if lack := lacking():
            raise CapabilityError(lack)
        grammar = self._grammars.pop((kind, text), None)
        if grammar is None:
            self._make_room()
            grammar = Grammar(self, kind, text)
            self._waiting.append(grammar)
            self._start_more()
        self._grammars[kind, text] = grammar
        return grammar.bind(thinking, prompt)

    def _make_room(self) -> None:
        idle = [key for key, grammar in self._grammars.items() if not grammar.texts]
        for key in idle[: max(len(idle) - MOST_KEPT + 1, 0)]:
            self.drop(self._grammars[key])

    def _start_more(self) -> None:
        while self._waiting and len(self._compiling) < MOST_COMPILING:
            grammar = self._waiting.popleft()
            self._compiling.add(grammar)
            self._hand_over(grammar.remote)
            self._streams[grammar.stream.fileno()] = grammar
            self._selector.register(grammar.stream, selectors.EVENT_READ)
            grammar.flush()

    def _hand_over(self, remote: socket.socket) -> None:
        """Have a process forked for one end of a socket. Where there is none, the other end finds out."""
        for _ in range(2):
            try:
                socket.send_fds(self._server(), [b"g"], [remote.fileno()])
                break
            except OSError:  # the server has ended; the next one does better, unless it was because of the tokenizer
                if self.failure():
                    break
        remote.close()

    def _server(self) -> socket.socket:
        """The socket of the fork server, which is started where it does not run."""
        if self._control is None:
            self._control, remote = socket.socketpair()
            command = running("polydraft.sampling.grammar_process", str(remote.fileno()), *self._arguments)
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[remote.fileno()])  # noqa: S603  this interpreter
            remote.close()
            if self._close is not None:
                self._close.detach()
            if self._process is not None:
                await_end(self._process, END_S)
            self._process = server
            self._close = weakref.finalize(self, _close, server, self._control, self._selector)
        return self._control

    def _is_watched(self, grammar: Grammar) -> bool:
        """Whether what it sends is read; of nothing once all are closed."""
        return grammar.stream.fileno() in (self._selector.get_map() or ())

    def watch(self, grammar: Grammar, *, writing: bool) -> None:
        """Whether a grammar has something left to send."""
        if self._is_watched(grammar):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            self._selector.modify(grammar.stream, events)

    def compiled(self, grammar: Grammar) -> None:
        """The process of a grammar has room for another one beside it."""
        self._compiling.discard(grammar)
        self._start_more()

    def failure(self) -> str:
        """What the fork server said of the tokenizer, where it could not read it."""
        if self._control is not None and not self._said:
            self._control.setblocking(False)
            try:
                self._said = self._control.recv(2**16)
            except BlockingIOError:
                return ""
            finally:
                self._control.setblocking(True)
            if not self._said:  # it was ended; the next grammar starts another
                self._control.close()
                self._control = None
        said = self._said.decode()
        return f"grammars cannot be used with the tokenizer of this model: {said}; leave them out" if said else ""

    def drop(self, grammar: Grammar) -> None:
        """End the process of a grammar."""
        self._grammars = {key: one for key, one in self._grammars.items() if one is not grammar}
        if grammar in self._waiting:
            self._waiting.remove(grammar)
        if self._is_watched(grammar):
            del self._streams[grammar.stream.fileno()]
            self._selector.unregister(grammar.stream)
        grammar.stream.close()
        grammar.remote.close()
        self.compiled(grammar)

    def poll(self, timeout_s: float | None) -> list[Binding]:
        """Texts that something has come for, within so many seconds; None: however long it takes."""
        found: list[Binding] = []
        for key, events in self._selector.select(timeout_s):
            grammar = self._streams[key.fd]
            if events & selectors.EVENT_WRITE:
                grammar.flush()
            if events & selectors.EVENT_READ:
                found += grammar.receive()
        return found

    def close(self) -> None:
        """End all processes."""
        for grammar in list(self._grammars.values()):
            self.drop(grammar)
        if self._close is not None:
            self._close()


def _close(server: subprocess.Popen[bytes], control: socket.socket, selector: selectors.BaseSelector) -> None:
    """Without the other ends of their sockets the processes end by themselves."""
    for key in list(selector.get_map().values()):
        stream: Any = key.fileobj
        stream.close()
    selector.close()
    control.close()
    await_end(server, END_S)
