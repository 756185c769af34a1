"""Level L3: a captured graph does, when it is replayed, what the same launches do eagerly.

Kernels are captured one by one over the contents of one case and replayed over those of another; engines replay whole steps at
every edge of a bucket. It applies only to backends that declare `graph_capture`, and leaves out what they declare
uncapturable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from polydraft.conformance import refill
from polydraft.conformance.check import Check, Tally, Unsupported
from polydraft.conformance.device_checks import read
from polydraft.conformance.harness import held, run_golden
from polydraft.conformance.kernel_checks import moved_on, pairs
from polydraft.conformance.lossless_checks import K, drafts_per_step, run
from polydraft.conformance.modes import Mode, first_mode, further_modes
from polydraft.conformance.probe import NUM_TOKENS, prompts
from polydraft.conformance.serving import Ask
from polydraft.conformance.target import Opened, Target
from polydraft.conformance.wear import FEW, LAUNCHES, Use, worn
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Case, Limits
from polydraft.contracts.composite import Composite
from polydraft.contracts.inputs import Kernel, contract_of
from polydraft.contracts.kernels.residual_add import ResidualAddV1
from polydraft.device import Graph, GraphCapture, Stream
from polydraft.engine import Engine
from polydraft.errors import PolydraftError
from polydraft.instruments.allocations import Allocations

NEEDS = ("graph_capture",)
GRAPHS: Final = 96
"""Graphs that are alive at once."""
LIMITS = Limits(1, 1, 8, 8, 16, 4, 4, 4, 1, 8)


def checks() -> Iterator[Check]:
    """Every check of L3."""
    for kernel in (*REGISTRY, *COMPOSITES.values()):
        if not contract_of(kernel).unit.endswith("_updates"):  # staged writes are never captured
            whole = isinstance(kernel, Composite)
            run = partial(_kernel, kernel)
            yield Check(f"L3/kernel/{kernel.name}", run, NEEDS, kernel.name, optional=whole, features=kernel.features)
    for name, function in (
        ("capture/runs-nothing", _capture_runs_nothing),
        ("capture/refuses-a-wait", _refuses_wait),
        ("capture/refuses-an-allocation", _refuses_allocation),
        ("replay/new-contents", _new_contents),
        ("replay/two-graphs", _two_graphs),
        ("replay/many-graphs", _many_graphs),
        ("replay/rebinding", _rebinding),
        ("engine/bucket-edges", _edges),
        ("engine/shrinking-batch", _shrinking),
        ("engine/rounds-of-every-k", _drafts),
        ("engine/drafts-per-step", _drafts_per_step),
        ("engine/prefill-graphs", _prefill),
        ("engine/is-replayed", _is_replayed),
        ("engine/nothing-allocated", _nothing_allocated),
    ):
        yield Check(f"L3/{name}", function, NEEDS)
    yield Check("L3/replay/refilled-weight", _refilled, (*NEEDS, "update_weights"))


# -- kernels -------------------------------------------------------------------------------------------
def uncapturable(opened: Opened, target: Target) -> frozenset[str]:
    """What the backend, or the kernel pack that serves it, declares uncapturable."""
    return opened.table.uncapturable.union(target.info.capabilities.uncapturable)


def _kernel(kernel: Kernel, target: Target, tally: Tally) -> None:
    """Captured over one case, then replayed and launched by turns over another of the same form, too, in every mode: the golden's
    result, and the bits of what was launched before the capture."""
    first, graphs = first_mode(target), _graphs(target)
    for place, cases in enumerate(pairs(kernel.name, target.info.capabilities.row_order)):
        _captured(kernel, first, cases, FEW if place else 2 * LAUNCHES, graphs, target, tally)
    for mode in further_modes(kernel, target.info.capabilities):
        of_mode = graphs if mode.on_first_device(target) else _graphs(target, mode)
        _captured(kernel, mode, mode.cases(kernel, target), FEW, of_mode, target, tally)
        if of_mode is not graphs:
            of_mode[0].device.close()


def _captured(
    kernel: Kernel,
    mode: Mode,
    pair: tuple[Case, Case],
    count: int,
    graphs: tuple[Opened, GraphCapture],
    target: Target,
    tally: Tally,
) -> None:
    """One binding in one mode, captured once."""
    (opened, capture), (one, other) = graphs, pair
    without = uncapturable(opened, target)
    if without.intersection(kernel.name.split("+")):
        raise Unsupported(f"{kernel.name} is declared uncapturable")
    cases = [one, other] if one.n == other.n else [other, moved_on(other)]  # a graph has one launch length
    bound = mode.bound(kernel, cases[0], opened, None if "forward_meta" in without else opened.init_meta)
    stream, products = opened.device.stream, opened.products
    launch = partial(bound.launch, stream)
    before: dict[str, Use] = {f"launched before a capture, {mode.name}": launch}
    first = worn(kernel, cases, bound, before, tally, products=products, count=FEW)
    graph = capture.capture(stream, partial(launch, cases[0].n))
    uses: dict[str, Use] = {f"replayed, {mode.name}": partial(_replay, graph, stream), "launched behind a capture": launch}
    worn(kernel, cases, bound, uses, tally, products=products, count=count, first=first)


def _replay(graph: Graph, stream: Stream, n: int) -> None:
    """Of the launch length that was captured."""
    del n
    graph.replay(stream)


def _graphs(target: Target, mode: Mode | None = None) -> tuple[Opened, GraphCapture]:
    """A fresh device with its capture facility, which is asked for once a device."""
    opened = target.open() if mode is None else target.open(dtype=mode.act, row_invariant=mode.row_invariant)
    return opened, target.plugins.graph_capture(opened.device)


# -- the facility --------------------------------------------------------------------------------------
class _Adding:
    """`residual_add` on two buffers of its own: a launch whose every run shows."""

    def __init__(self, opened: Opened, dtype: str) -> None:
        self.device = opened.device
        self.x, self.y = (self.device.empty(f"conform.{name}", (4, 8), dtype) for name in "xy")
        provider, args = opened.table.providers["residual_add"], ResidualAddV1(x=self.x, y=self.y)
        self.launch = provider.bind(args, LIMITS, opened.table.workspace(provider.workspace_bytes(args, LIMITS)))
        self.fill(1.0, 2.0)
        self.run()  # whatever settles at a first launch
        self.device.synchronize()

    def fill(self, x: float, y: float) -> None:
        for buffer, value in ((self.x, x), (self.y, y)):
            self.device.load(buffer, to_dtype(np.full((4, 8), value), buffer.dtype))

    def run(self) -> None:
        self.launch(self.device.stream, 4)

    def value(self) -> float:
        from polydraft.contracts.compare import from_host

        found = np.unique(from_host(read(self.device, self.x), self.x.dtype))
        return float(found[0]) if len(found) == 1 else float("nan")


def to_dtype(value: Any, dtype: str) -> Any:
    """Host representation of an array."""
    from polydraft.contracts.compare import to_host

    return to_host(value, dtype)


def _adding(target: Target) -> tuple[_Adding, GraphCapture, Opened]:
    opened, capture = _graphs(target)
    return _Adding(opened, target.info.capabilities.dtypes[0]), capture, opened


def _capture_runs_nothing(target: Target, tally: Tally) -> None:
    """Capturing records and does not run; every replay runs once."""
    adding, capture, _ = _adding(target)
    adding.fill(1.0, 2.0)
    graph = capture.capture(adding.device.stream, adding.run)
    adding.device.synchronize()
    tally.equal("the buffer behind a capture", adding.value(), 1.0)
    for replays in (1, 2, 3):
        graph.replay(adding.device.stream)
        tally.equal(f"the buffer behind {replays} replays", adding.value(), 1.0 + 2.0 * replays)


def _raises(target: Target, tally: Tally, what: str, call: Callable[[_Adding], object]) -> None:
    adding, capture, _ = _adding(target)

    def captured() -> None:
        adding.run()
        call(adding)

    tally.raises(Exception, f"{what} in a capture", lambda: capture.capture(adding.device.stream, captured))


def _refuses_wait(target: Target, tally: Tally) -> None:
    """The host may not wait for the device while it captures."""
    _raises(target, tally, "device.synchronize", lambda adding: adding.device.synchronize())


def _refuses_allocation(target: Target, tally: Tally) -> None:
    """Nothing is allocated while it captures."""
    _raises(target, tally, "device.empty", lambda adding: adding.device.empty("conform.late", (4,), "i32"))


def _new_contents(target: Target, tally: Tally) -> None:
    """A replay works on what lies at its addresses now."""
    adding, capture, _ = _adding(target)
    graph = capture.capture(adding.device.stream, adding.run)
    for x, y in ((5.0, 3.0), (-1.0, 0.5), (0.0, 0.0)):
        adding.fill(x, y)
        graph.replay(adding.device.stream)
        tally.equal(f"{x} + {y} replayed", adding.value(), x + y)


def _two_graphs(target: Target, tally: Tally) -> None:
    """Two graphs alive, as target and draft are, replayed in turn: neither disturbs the other."""
    opened, capture = _graphs(target)
    dtype = target.info.capabilities.dtypes[0]
    one, other = _Adding(opened, dtype), _Adding(opened, dtype)
    graphs = [capture.capture(opened.device.stream, adding.run) for adding in (one, other)]
    one.fill(0.0, 1.0)
    other.fill(0.0, 16.0)
    for which in (0, 1, 1, 0, 0, 1, 0):
        graphs[which].replay(opened.device.stream)
    tally.equal("what the first graph added to", one.value(), 4.0)
    tally.equal("what the second graph added to", other.value(), 48.0)
    tally.true(f"memory() counts bytes of graphs, got {capture.memory()}", capture.memory() >= 0)


def _many_graphs(target: Target, tally: Tally) -> None:
    """As many graphs alive as an engine has of all its batches and numbers of drafts, each over buffers of its own, replayed in
    random order: each is for itself."""
    opened, capture = _graphs(target)
    dtype, rng = target.info.capabilities.dtypes[0], np.random.default_rng(GRAPHS)
    each = [_Adding(opened, dtype) for _ in range(GRAPHS)]
    graphs = [capture.capture(opened.device.stream, adding.run) for adding in each]
    for place, adding in enumerate(each):
        adding.fill(0.0, 1.0 + place % 8)
    for place in rng.permutation(np.repeat(np.arange(GRAPHS), 2)):
        graphs[place].replay(opened.device.stream)
    for place, adding in enumerate(each):
        tally.equal(f"what graph {place + 1} of {GRAPHS} added to in two replays", adding.value(), 2.0 * (1 + place % 8))


def _rebinding(target: Target, tally: Tally) -> None:
    """Memory that a graph was captured on and that lies elsewhere now: the replay refuses. For devices that can be made to move
    a buffer, by a method `move(buffer)` that is there for tests."""
    adding, capture, _ = _adding(target)
    move = getattr(adding.device, "move", None)
    if move is None:
        raise Unsupported("the device has no method move(buffer), with which a test could rebind one")
    graph = capture.capture(adding.device.stream, adding.run)
    move(adding.x)

    def replayed() -> None:
        graph.replay(adding.device.stream)
        adding.device.synchronize()

    tally.raises(PolydraftError, "a replay on memory that has moved", replayed)


def _refilled(target: Target, tally: Tally) -> None:
    """Weights that were refilled in place are what a replay reads, in whatever role and packing they are."""
    opened, capture = _graphs(target)
    stream, act = opened.device.stream, target.info.capabilities.dtypes[0]
    without = uncapturable(opened, target)
    for kernel, case, other in refill.cases(target, opened):
        if kernel.name in without:
            continue
        bound = refill.bound(kernel, other, target, opened, None if "forward_meta" in without else opened.init_meta)
        bound.launch(stream, case.n)
        opened.device.synchronize()
        graph = capture.capture(stream, partial(bound.launch, stream, case.n))
        for one, which in ((other, "first"), (case, "refilled")):
            if one is case:
                bound.refill(case)
            bound.load(one)
            graph.replay(stream)
            want = run_golden(kernel, one, act, products=opened.products)
            tally.compared(held(kernel, one, bound.read(), want, act=act), f", replayed on its {which} weights")


# -- engines -------------------------------------------------------------------------------------------
def _edges(target: Target, tally: Tally) -> None:
    """One fewer, as many and one more sequence than each bucket holds."""
    for size in (1, 2, 3, 4, 5):
        run(target, tally, [Ask(p) for p in prompts(5)[:size]], max_num_seqs=6, graph="decode", graph_sizes=(2, 4))


def _shrinking(target: Target, tally: Tally) -> None:
    """A large batch, then a small one in the same buffers: what lies beyond it must not matter."""
    asks = [Ask(prompt, max_new=4 + 4 * i) for i, prompt in enumerate(prompts(6))]
    engine = run(target, tally, asks, max_num_seqs=6, graph="decode", graph_sizes=(1, 2, 4, 6))
    _was_replayed(engine, tally)


def _drafts(target: Target, tally: Tally) -> None:
    """Every number of drafts, so that every pass of a captured chain shows in the rounds."""
    for drafts in (0, 1, 2, 5):
        run(target, tally, [Ask(prompt) for prompt in prompts(3)], drafts=drafts, graph="decode", graph_sizes=(4,))


def _drafts_per_step(target: Target, tally: Tally) -> None:
    """Graphs of every rung of a ladder, another in each step."""
    _was_replayed(drafts_per_step(target, tally, graph="decode", graph_sizes=(1, 2, 4)), tally)


def _prefill(target: Target, tally: Tally) -> None:
    """Steps that only prefill are replayed by their rows, windows run eagerly."""
    asks = [Ask(prompt, arrival=3 * i) for i, prompt in enumerate(prompts(10)[5:])]
    engine = run(target, tally, asks, max_num_seqs=2, max_batched_tokens=2 * (K + 1) + 16, graph="prefill", graph_sizes=(8, 24))
    _was_replayed(engine, tally)


def _is_replayed(target: Target, tally: Tally) -> None:
    """Graphs that are asked for are used: replays are counted, one for every replayed step and more where it is captured in
    pieces."""
    engine = run(target, tally, [Ask(prompt) for prompt in prompts(2)], max_num_seqs=2, graph="decode", graph_sizes=(1, 2))
    _was_replayed(engine, tally)


def _was_replayed(engine: Engine, tally: Tally) -> None:
    graphs, replays = engine.runner.graphs, engine.device.counters.graph_replays
    tally.true("the engine holds graphs", graphs is not None)
    if graphs is not None:
        steps = graphs.counters.replayed_steps
        tally.true(f"steps were replayed, got {steps}", steps > 0)
        tally.true(f"the device counts a replay or more a replayed step, got {replays} in {steps}", replays >= steps)


def _nothing_allocated(target: Target, tally: Tally) -> None:
    """Replayed steps allocate nothing."""
    counting = Allocations()
    ask = [Ask(prompt, max_new=NUM_TOKENS) for prompt in prompts(2)]
    run(target, tally, ask, max_num_seqs=2, graph="decode", graph_sizes=(2,), instruments=(counting,))
    tally.equal("allocations during the steps of a run", sum(step.number for step in counting.steps), 0)
