"""Checks of engines that sleep (L5, L6): texts afterwards are those of before, and memory in use is less meanwhile.

Declared by the capability `sleep`. Memory is asked of the driver or framework, as `memory_checks.py` does; how a backend gives it
back is not examined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from polydraft.conformance.check import Check, Tally, Unseen, Unsupported
from polydraft.conformance.host_checks import OTHER
from polydraft.conformance.lossless_checks import K, working_dtype
from polydraft.conformance.memory_checks import heap
from polydraft.conformance.probe import checkpoint, prompts
from polydraft.conformance.serving import Ask, as_expected, serve
from polydraft.conformance.target import Target, bare
from polydraft.contracts.packing import MADE
from polydraft.engine import Engine, SleepLevel

LEVELS: Final[tuple[SleepLevel, ...]] = (1, 2, 1, 2)
"""Those of one engine whose memory is looked at, one after the other."""
BLOCKS: Final = 2048
"""Of its caches, which then are much larger than what a process takes and gives back in passing."""
LARGE: Final = 1 << 25
"""Bytes of an allocation that has to show: more than the C library ever takes from what is free."""
KEPT: Final = 1 << 18
"""Bytes by which a process may grow in passing."""
RESIDENT: Final = Path("/proc/self/status")
"""Where Linux says how much of a process is in memory."""


def checks() -> Iterator[Check]:
    """Those of texts."""
    for level in (1, 2):
        yield Check(f"L5/sleep/level-{level}", partial(_texts, level, "off"), ("sleep",))
        yield Check(f"L5/sleep/level-{level}-replayed", partial(_texts, level, "decode"), ("sleep", "graph_capture"))
    yield Check("L5/sleep/new-weights", _new_weights, ("sleep", "update_weights"), basic=False)
    yield Check("L5/sleep/beside-another-engine", _beside, ("sleep",), basic=False)
    yield Check("L5/sleep/packed-weights", _packed, ("sleep", "weight_packings"), basic=False)


def memory() -> Iterator[Check]:
    """That of memory."""
    yield Check("L6/memory-while-asleep", _memory, ("sleep",))


def _texts(level: SleepLevel, graph: str, target: Target, tally: Tally) -> None:
    """Twice at a level, the second time from level 1."""
    _texts_again(target, tally, (level, level), graph=graph)


def _texts_again(target: Target, tally: Tally, levels: Sequence[SleepLevel], **options: Any) -> None:
    """Requests in the same order before, between and after: greedy texts do not change."""
    asks = [Ask(prompt) for prompt in prompts(3)]
    with target.engine(draft_tokens=K, dtype=working_dtype(target), enable_sleep_mode=True, **options) as engine:
        before = [output.token_ids for output in serve(engine, asks, tally)]
        for turn, level in enumerate(levels):
            if turn:
                engine.sleep(1)  # and from there to the level
            engine.sleep(level)
            engine.wake_up()
            for number, (text, output) in enumerate(zip(before, serve(engine, asks, tally), strict=True)):
                who = f"request {number} after sleep {turn + 1}"
                tally.no_error(who, output.error)
                tally.equal(f"tokens of {who}", output.token_ids, text)


def _new_weights(target: Target, tally: Tally) -> None:
    """Weights that were replaced between two sleeps are those that it wakes with, whatever it slept with before."""
    asks = [Ask(prompt) for prompt in prompts(3)]
    with target.engine(draft_tokens=K, dtype=working_dtype(target), graph="off", enable_sleep_mode=True) as engine:
        texts: list[list[tuple[int, ...]]] = []
        for seed in (0, OTHER):
            engine.update_weights(checkpoint(seed))
            texts.append([output.token_ids for output in serve(engine, asks, tally)])
            for level in LEVELS[:2]:
                engine.sleep(level)
                engine.wake_up()
                for number, (text, output) in enumerate(zip(texts[-1], serve(engine, asks, tally), strict=True)):
                    who = f"request {number} on weights {seed} behind a sleep of level {level}"
                    tally.no_error(who, output.error)
                    tally.equal(f"tokens of {who}", output.token_ids, text)
    tally.true("texts on other weights are other ones", texts[0] != texts[1])


def _packed(target: Target, tally: Tally) -> None:
    """Packed weights come back with their scales, and quantised rows are written anew where there are any."""
    declared = target.info.capabilities
    weights = next((name for name, one in MADE.items() if one.packing.name in declared.weight_packings), "")
    if not weights:
        raise Unsupported("no packing that is made when weights are loaded is declared")
    kv = {"kv_dtype": declared.kv_dtypes[0]} if declared.kv_dtypes else {}
    _texts_again(target, tally, LEVELS[:2], graph="off", weights=weights, **kv)


def _beside(target: Target, tally: Tally) -> None:
    """An engine that can sleep and does not writes what it always does while another one sleeps, and afterwards."""
    asks, dtype = [Ask(prompt) for prompt in prompts(3)], working_dtype(target)
    options: dict[str, Any] = {"draft_tokens": K, "dtype": dtype, "graph": "off", "enable_sleep_mode": True}
    with target.engine(**options) as engine, target.engine(**options) as other:
        for level in LEVELS[:2]:
            engine.sleep(level)
            as_expected(tally, asks, serve(other, asks, tally), K, target.rounding(dtype))
            engine.wake_up()
            for one in (engine, other):
                as_expected(tally, asks, serve(one, asks, tally), K, target.rounding(dtype))


def _memory(target: Target, tally: Tally) -> None:
    """By at least half of what caches are at level 1, where the weights may lie in the same memory, and of what caches and
    weights are at level 2; and not less each time."""
    options: dict[str, Any] = {"num_blocks": BLOCKS, "enable_sleep_mode": True}
    with target.engine(draft_tokens=K, dtype=working_dtype(target), **options) as engine:
        ask, *others = _witnesses(engine)
        serve(engine, [Ask(prompts(1)[0])], tally)
        caches = int(engine.resolved.describe()["kv_cache_bytes"])
        weights = sum(int(one.nbytes) for one in engine.runner.memory.weights.values())
        awake: list[list[int]] = []
        for level in LEVELS:
            held = caches + (weights if level == 2 else 0)
            _fill(engine)
            awake.append([one() for one in (ask, *others)])
            engine.sleep(level)
            less = awake[-1][0] - ask()
            engine.wake_up()
            tally.true(f"at least {held // 2:,} bytes are given back at level {level}, seen {less:,}", less >= held // 2)
        for seen in zip(*awake, strict=True):
            grown = [after - before for before, after in pairwise(seen)]
            what = f"memory in use does not grow each time that the engine sleeps, grows by {grown} bytes"
            tally.true(what, min(grown) < KEPT)


def _fill(engine: Engine) -> None:
    """Write every row: the system brings pages back when they are."""
    for cache in engine.runner.memory.caches.values():
        cache.write_logical(*map(np.zeros_like, cache.read_logical()))


def _witnesses(engine: Engine) -> list[Callable[[], int]]:
    """Who sees the bytes in use: a driver or framework; or the system, of pages of the process that are in memory, whoever holds
    their addresses, and the C library's heap, which takes back what it has without giving pages back. Raises `Unseen` where
    what is allocated on the device does not show."""
    device: Any = bare(engine.device)
    ask: Callable[[], int] | None = getattr(device, "memory_taken", None)
    if ask is not None:
        return [ask]
    if RESIDENT.exists():
        before = _resident()
        buffer = device.empty("conform.seen", (LARGE,), "u8")
        device.load(buffer, np.ones(LARGE, np.uint8))
        device.synchronize()
        if _resident() - before >= LARGE // 2:
            return [_resident, *filter(None, [heap()])]
    raise Unseen(
        "memory in use while the engine sleeps: no memory_taken() of the device, and it does not lie in the host's memory"
    )


def _resident() -> int:
    """Bytes of this process that are in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", RESIDENT.read_text())
    return 1024 * int(found[1]) if found else 0
