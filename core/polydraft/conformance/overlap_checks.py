"""Level L4: launching steps before the result of the previous one is known changes nothing.

Ordering faults are provoked by delays, not left to luck: the same requests are served at every depth, with every launch waited
for, and with work put before every copy or every launch. All runs have to give the oracle's tokens and rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from polydraft.conformance.check import Check, Tally
from polydraft.conformance.lossless_checks import K, at_place, working_dtype
from polydraft.conformance.probe import prompts
from polydraft.conformance.serving import Ask, as_expected, serve
from polydraft.conformance.target import Proxy, TableProxy, Target, bare, wrap

NEEDS = ("asynchronous",)
DEPTHS = (0, 1, 2)
DELAY_ELEMENTS = 1 << 18
"""Elements of a copy that stands in front of another one: some tens of microseconds on a real device, a turn on a lazy one."""


def checks() -> Iterator[Check]:
    """Every check of L4."""
    for depth in DEPTHS:
        yield Check(f"L4/overlap-{depth}/arrivals", partial(_arrivals, depth), NEEDS)
        yield Check(f"L4/overlap-{depth}/stop-in-flight", partial(_stop, depth), NEEDS)
        yield Check(f"L4/overlap-{depth}/abort-in-flight", partial(_abort, depth), NEEDS)
        yield Check(f"L4/overlap-{depth}/preempt-in-flight", partial(_preempt, depth), NEEDS)
    yield Check("L4/waiting-behind-every-launch", _synchronous, NEEDS)
    yield Check("L4/delayed-copies", _delayed_copies, NEEDS)
    yield Check("L4/delayed-launches", _delayed_launches, NEEDS)
    yield Check("L4/slow-host", _slow_host, NEEDS)
    yield Check("L4/graphs-and-overlap", _graphs, (*NEEDS, "graph_capture"))


def _serve(
    target: Target,
    tally: Tally,
    asks: list[Ask],
    *,
    plugin: object = None,
    drafts: int = K,
    each_step: Any = None,
    **options: Any,
) -> Any:
    options = {"max_num_seqs": 3, "block_size": 4, "graph": "off", **options}
    dtype = working_dtype(target)
    with target.engine(plugin=plugin, draft_tokens=drafts, dtype=dtype, **options) as engine:
        outputs = serve(engine, asks, tally, each_step=each_step)
        drafts = engine.resolved.limits.num_drafts
    as_expected(tally, asks, outputs, drafts, target.rounding(dtype))
    return engine


def _mixed() -> list[Ask]:
    """Requests of different lengths that arrive while others are in flight; their rounds accept anything from none to all."""
    return [Ask(prompt, max_new=10 + 3 * i, arrival=2 * i) for i, prompt in enumerate(prompts(6))]


def _arrivals(depth: int, target: Target, tally: Tally) -> None:
    """Requests join and leave a running batch."""
    for drafts in (K, 5):
        _serve(target, tally, _mixed(), drafts=drafts, overlap=depth)


def _stop(depth: int, target: Target, tally: Tally) -> None:
    """A request ends while further steps of it are in flight: once, and without another token."""
    asks = [ask for place in range(K + 1) for ask in at_place(place, 2)]
    _serve(target, tally, asks, overlap=depth, block_size=2)


def _abort(depth: int, target: Target, tally: Tally) -> None:
    """A request is taken out while steps of it are in flight; the others go on."""
    asks = [Ask(prompt, arrival=i, abort=i + 2 + i % 3 if i % 2 else None) for i, prompt in enumerate(prompts(6))]
    _serve(target, tally, asks, overlap=depth)


def _preempt(depth: int, target: Target, tally: Tally) -> None:
    """Blocks run out while steps are in flight."""
    asks = [Ask(prompt, arrival=i) for i, prompt in enumerate(prompts(10)[4:])]
    engine = _serve(target, tally, asks, max_num_seqs=4, num_blocks=26, prefix_cache=False, overlap=depth)
    tally.true("a request was preempted", engine.scheduler.num_preemptions > 0)


class _WaitingProvider(Proxy):
    """A provider whose launches are waited for."""

    def __init__(self, inner: Any, device: Any) -> None:
        super().__init__(inner)
        self._device = device

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        launch, device = self._inner.bind(args, limits, workspace), self._device

        def waited(stream: Any, n: int) -> None:
            launch(stream, n)
            device.synchronize()

        return waited


def _synchronous(target: Target, tally: Tally) -> None:
    """With a wait behind every launch the results are the same; where only this passes, some order is missing."""

    def table(answer: Any, device: Any) -> Any:
        return TableProxy(answer, {name: _WaitingProvider(p, bare(device)) for name, p in answer.providers.items()})

    for depth in (0, 2):
        _serve(target, tally, _mixed(), plugin=wrap(target.plugin, polydraft_kernels=table), overlap=depth)


class _Busy:
    """Work in front of other work: a copy that takes a while, in buffers that nobody else knows."""

    def __init__(self, device: Any) -> None:
        self._upload = device.upload
        self.buffer = device.empty("conform.busy", (DELAY_ELEMENTS,), "i32")
        self.staging = device.staging("conform.busy", (DELAY_ELEMENTS,), "i32")
        self.staging.array[...] = np.int32(7)

    def enqueue(self, stream: Any) -> None:
        """One such copy."""
        self._upload(stream, self.buffer, self.staging, DELAY_ELEMENTS)


def _delaying(device: Any, **_: Any) -> Any:
    """The device, whose copies come late from now on. It stays what it is: a kernel pack may know its device by the class."""
    busy, methods = _Busy(device), {name: getattr(device, name) for name in ("upload", "download")}
    for name, method in methods.items():

        def late(stream: Any, target: Any, source: Any, rows: int, method: Any = method) -> None:
            busy.enqueue(stream)
            method(stream, target, source, rows)

        setattr(device, name, late)
    return device


def _delayed_copies(target: Target, tally: Tally) -> None:
    """Every copy of a step comes late: staging is not rewritten early, and no snapshot is read early."""
    plugin = wrap(target.plugin, polydraft_open_device=_delaying)
    for depth in DEPTHS:
        _serve(target, tally, _mixed(), plugin=plugin, overlap=depth)


class _LateProvider(Proxy):
    """A provider whose launches come late."""

    def __init__(self, inner: Any, busy: _Busy) -> None:
        super().__init__(inner)
        self._busy = busy

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        launch, busy = self._inner.bind(args, limits, workspace), self._busy

        def late(stream: Any, n: int) -> None:
            busy.enqueue(stream)
            launch(stream, n)

        return late


LATE = ("scatter", "verify_match", "commit_window", "snapshot_output", "advance_draft")
"""Contracts whose launches come late: the ends of stages, where one hands over to the next."""


def _delayed_launches(target: Target, tally: Tally) -> None:
    """The launches at the ends of stages come late."""

    def table(answer: Any, device: Any) -> Any:
        busy = _Busy(bare(device))
        return TableProxy(
            answer, {n: _LateProvider(p, busy) for n, p in answer.providers.items() if set(LATE) & set(n.split("+"))}
        )

    for depth in (1, 2):
        _serve(target, tally, _mixed(), plugin=wrap(target.plugin, polydraft_kernels=table), overlap=depth)


def _slow_host(target: Target, tally: Tally) -> None:
    """The host comes late, so that everything has run before it looks."""
    _serve(target, tally, _mixed()[:3], overlap=2, each_step=lambda engine, step: time.sleep(0.002))


def _graphs(target: Target, tally: Tally) -> None:
    """Replayed steps in flight."""
    for depth in DEPTHS:
        _serve(target, tally, _mixed(), overlap=depth, graph="decode", graph_sizes=(1, 2, 3))
