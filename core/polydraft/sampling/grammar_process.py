"""The processes of grammars: one for each grammar, forked from one that has read the tokenizer, so that a grammar which is slow,
large or fatal to its library harms nobody but the requests that brought it.

`python -m polydraft.sampling.grammar_process FD TOKENIZER VOCAB EOS...` is the fork server; `grammars.py` starts it and sends it
one socket a grammar. A process compiles its grammar, then answers questions about texts, one after the other, until the other
end of its socket is closed. It bounds itself: by the library's own limits, by timers of processor time and by a limit of memory,
whose signals end it in the middle of native code.

Messages to a process are JSON, those from it a header and bytes (`ANSWER`); both have a length in front.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from polydraft.json_text import parsed
from polydraft.sampling.automaton import NOTHING, Automaton, MatcherError, reason_of
from polydraft.sampling.thinking import Markers, Thinking

T = TypeVar("T")

COMPILE_S: Final = 5.0
"""Seconds of processor time that a grammar may take to compile."""
MASKS_S: Final = 1.0
"""Seconds of processor time that the masks of one window may take."""
MEMORY: Final = 2**30
"""Bytes that the process of a grammar may have beside those of the fork server."""
ITEMS: Final = 2000
"""Items in a row of the parser: the branches of a grammar that one text may be in at once."""
STATES: Final = 50_000
"""States of the lexer, of about 2 kB each."""
SLOW_S: Final = 0.01
"""Processor time of one window from which on a process gives way to all others."""
LENGTH: Final = struct.Struct("<I")
ANSWER: Final = struct.Struct("<IIfII")
"""The text's number, the question's, seconds of processor time, places with a mask, bytes of the error's sentence. Then come a
byte a place (whether it allows one token alone), the sentence, and the masks. Text 0 is the grammar itself."""
GRAMMAR: Final = 0


@dataclass
class Text:
    """One text: its automaton, and what is needed to make another."""

    prompt: list[int]
    thinking: Thinking | None
    tokens: list[int] = field(default_factory=list)
    automaton: Automaton | None = None
    gap: tuple[int, str] | None = None
    """The place from which on tokens had no mask, and why."""


class GrammarProcess:
    """A grammar in its process."""

    def __init__(self, stream: socket.socket, tokenizer: Any, vocab: int, eos: list[int]) -> None:
        self._stream, self._tokenizer, self._eos = stream, tokenizer, eos
        self._words = -(-vocab // 32)
        self._matcher: Any = None
        self._texts: dict[int, Text] = {}
        self._lowered = False

    def run(self) -> None:
        """Serve until nobody asks any more."""
        first = self._read()
        if first is None:
            return
        kind, text = first
        with _bounded(COMPILE_S):
            error = _aside(lambda: self._compile(kind, text))
        self._send(GRAMMAR, 0, 0.0, [], error, b"")
        while not error and (message := self._read()) is not None:
            about, number, *rest = message
            if about == "open":
                prompt, thinking = rest
                self._texts[number] = Text(prompt, _thinking(thinking) if thinking else None)
            elif about == "end":
                self._texts.pop(number, None)
            else:
                self._answer(number, *rest)

    def _compile(self, kind: str, text: str) -> str:
        """Compile and try the grammar; returns what is wrong with it."""
        import llguidance

        limits = llguidance.LLParserLimits(max_items_in_row=ITEMS, max_lexer_states=STATES, verbose_errors=False)
        try:
            self._matcher = llguidance.LLMatcher(self._tokenizer, _grammar(kind, text), log_level=0, limits=limits)
        except Exception as error:  # noqa: BLE001  whatever a converter makes of a text
            return f"the {kind} of the request cannot be used: {' '.join(str(error).split())}; correct it"
        if self._matcher.is_error():
            return f"the {kind} of the request cannot be used: {reason_of(self._matcher)}; correct it"
        filled = Automaton(self._matcher.deep_copy(), None, (), self._eos).fill((), np.zeros((1, self._words), np.uint32))
        if filled.broken == NOTHING:
            return f"the {kind} of the request allows no text at all; correct it"
        return f"the {kind} of the request cannot be followed: {filled.broken}; simplify it" if filled.broken else ""

    def _answer(self, number: int, question: int, tokens: list[int], drafts: list[int]) -> None:
        text, begin = self._texts[number], time.process_time()
        rows = np.empty((len(drafts) + 1, self._words), np.uint32)
        with _bounded(MASKS_S):
            single, error = self._masks(text, tokens, drafts, rows)
        took = time.process_time() - begin
        self._send(number, question, took, single, error, rows[: len(single)].tobytes())
        if took > SLOW_S and not self._lowered:
            self._lowered = True
            _lower()

    def _masks(self, text: Text, tokens: list[int], drafts: list[int], rows: Any) -> tuple[list[bool], str]:
        text.tokens += tokens
        if text.gap is not None and len(text.tokens) > text.gap[0]:
            return [], text.gap[1]
        text.gap, new = None, tokens
        if text.automaton is None:
            text.automaton = Automaton(self._matcher.deep_copy(), text.thinking, text.prompt, self._eos)
            new = text.tokens
        try:
            text.automaton.follow(new)
        except MatcherError as error:
            return [], str(error)
        single, broken = text.automaton.fill(drafts, rows)
        if not broken or not single:
            return single, broken
        text.automaton, text.gap = None, (len(text.tokens) + len(single), broken)
        return single, ""

    # -- messages ----------------------------------------------------------------------------------
    def _read(self) -> list[Any] | None:
        size = self._bytes(LENGTH.size)
        data = None if size is None else self._bytes(*LENGTH.unpack(size))
        return None if data is None else list(parsed(data))

    def _bytes(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = self._stream.recv(count - len(parts))
            if not part:
                return None
            parts += part
        return bytes(parts)

    def _send(self, number: int, question: int, took: float, single: list[bool], error: str, masks: bytes) -> None:
        said = error.encode(errors="replace")
        body = ANSWER.pack(number, question, took, len(single), len(said)) + bytes(single) + said + masks
        self._stream.sendall(LENGTH.pack(len(body)) + body)


def _thinking(sent: list[Any]) -> Thinking:
    """Limits of thinking as they came."""
    around, limit, reply = sent
    return Thinking(Markers(*map(tuple, around)), limit, reply)


def _grammar(kind: str, text: str) -> str:
    """A constraint in the library's own form; its converter reads EBNF as llama.cpp (GBNF) and xgrammar write it."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark, gbnf_to_lark

    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind in ("lark", "ebnf", "grammar"):
        convert = {"ebnf": gbnf_to_lark, "grammar": any_to_lark}.get(kind, str)
        return str(LLMatcher.grammar_from_lark(convert(text)))
    return str(LLMatcher.grammar_from_json_schema(text))


class _bounded:  # noqa: N801  read as a statement
    """Ends the process after so much processor time, whatever code it is in."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _lower() -> None:
    """Let every other thread go first that the machine has work for."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _aside(work: Callable[[], T]) -> T:
    """The result of work on a thread that gives way to all others: a priority that was lowered cannot be raised again."""
    results: list[T] = []

    def run() -> None:
        if sys.platform == "linux":  # elsewhere a priority is of the process
            _lower()
        results.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def _limit() -> None:
    """No core files, and no more memory than is said; what the library prints of its panics goes nowhere."""
    import resource  # which Windows does not have

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text("ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())


def main() -> None:
    """Read the tokenizer, then fork for each socket that comes; what is wrong with the tokenizer is sent instead."""
    import llguidance

    descriptor, file, vocab, *eos = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    for ending in (signal.SIGINT, signal.SIGTERM):  # whoever started this one ends it, when its own requests have ended
        signal.signal(ending, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)  # BLAS's threads idle
    ends = [int(token) for token in eos]
    try:
        tokenizer = llguidance.LLTokenizer(file, n_vocab=int(vocab), eos_token=ends[0] if ends else None)
    except ValueError as error:
        control.sendall(str(error).encode())
        return
    while True:
        data, sockets, *_ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            _limit()
            with socket.socket(fileno=sockets[0]) as stream:
                GrammarProcess(stream, tokenizer, int(vocab), ends).run()
            os._exit(0)
        os.close(sockets[0])


if __name__ == "__main__":
    main()
