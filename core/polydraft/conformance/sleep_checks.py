"""Checks of engines that sleep (L5, L6): texts afterwards are those of before, and memory in use is less meanwhile.

Declared by the capability `sleep`. Memory is asked of the driver or framework, as `memory_checks.py` does; how a backend gives it
back is not examined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from polydraft.conformance.check import Check, Tally, Unseen
from polydraft.conformance.lossless_checks import K, working_dtype
from polydraft.conformance.probe import prompts
from polydraft.conformance.serving import Ask, serve
from polydraft.conformance.target import Target
from polydraft.engine import SleepLevel

TURNS: Final = 2
"""Times that an engine sleeps: what was kept once must not be what is kept for ever."""


def checks() -> Iterator[Check]:
    """Those of texts."""
    for level in (1, 2):
        yield Check(f"L5/sleep/level-{level}", partial(_texts, level, "off"), ("sleep",))
        yield Check(f"L5/sleep/level-{level}-replayed", partial(_texts, level, "decode"), ("sleep", "graph_capture"))


def memory() -> Iterator[Check]:
    """That of memory."""
    yield Check("L6/memory-while-asleep", _memory, ("sleep",))


def _texts(level: SleepLevel, graph: str, target: Target, tally: Tally) -> None:
    """Requests in the same order before, between and after: greedy texts do not change."""
    asks = [Ask(prompt) for prompt in prompts(3)]
    with target.engine(draft_tokens=K, dtype=working_dtype(target), graph=graph, enable_sleep_mode=True) as engine:
        before = [output.token_ids for output in serve(engine, asks, tally)]
        for turn in range(TURNS):
            if turn:
                engine.sleep(1)  # and from there to the level
            engine.sleep(level)
            engine.wake_up()
            for number, (text, output) in enumerate(zip(before, serve(engine, asks, tally), strict=True)):
                who = f"request {number} after sleep {turn + 1}"
                tally.no_error(who, output.error)
                tally.equal(f"tokens of {who}", output.token_ids, text)


def _memory(target: Target, tally: Tally) -> None:
    """By at least half of what caches and weights are."""
    with target.engine(draft_tokens=K, dtype=working_dtype(target), enable_sleep_mode=True) as engine:
        ask: Callable[[], int] | None = getattr(engine.device, "memory_taken", None)
        if ask is None:
            raise Unseen("memory in use while the engine sleeps: the device has no memory_taken()")
        serve(engine, [Ask(prompts(1)[0])], tally)
        weights: list[Any] = list(engine.runner.memory.weights.values())
        held = sum(int(one.nbytes) for one in weights)
        before = ask()
        engine.sleep(2)
        less = before - ask()
        engine.wake_up()
        tally.true(f"at least {held // 2:,} bytes are given back, seen {less:,}", less >= held // 2)
