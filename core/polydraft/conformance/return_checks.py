"""Checks of asynchrony from outside (L4): launches, replays, copies and whole steps return while work in front of them runs.

The stream is busy (`busy.py`) when something is tried, and the work in front of it must still be running when the call is over.
What was computed is not looked at, save of whole steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from polydraft.backend import StepMeta
from polydraft.conformance.busy import BUSY_S, COPIES, LONGER, Busy, Filling, at_rest, busy
from polydraft.conformance.check import Check, Tally, Unseen, Unsupported
from polydraft.conformance.graph_checks import uncapturable
from polydraft.conformance.lossless_checks import K, working_dtype
from polydraft.conformance.modes import Mode, first_mode, further_modes
from polydraft.conformance.probe import prompts
from polydraft.conformance.serving import Ask, as_expected, serve
from polydraft.conformance.target import Opened, Target, bare
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.composite import Composite
from polydraft.contracts.inputs import Kernel, kernel_of
from polydraft.device import Device, further_stream
from polydraft.instruments.base import Instrument
from polydraft.program.points import Stage

NEEDS: Final = ("asynchronous",)
CALLS: Final = 128
"""More calls than a step makes: where it is asked whether a device is still busy behind so many."""
CONTROLS: Final = 16
"""How often that is asked."""
SURELY: Final = 0.85
"""Share of such questions in which it has to be."""
MOSTLY: Final = 0.5
"""Share of steps in front of which work has to be running; a host that is busy with something else misses some."""
RUNS: Final = 3
"""Runs of which one has to show it."""


def checks() -> Iterator[Check]:
    """Every check of this kind."""
    yield Check("L4/work-is-queued", _queued, NEEDS)
    for kernel in (*REGISTRY, *COMPOSITES.values()):
        run, whole = partial(_launch, kernel), isinstance(kernel, Composite)
        yield Check(f"L4/launch-returns/{kernel.name}", run, NEEDS, kernel.name, optional=whole, features=kernel.features)
    yield Check("L4/launches-of-other-devices-return", _other_devices, NEEDS)
    yield Check("L4/copies-return", _copies, NEEDS)
    yield Check("L4/events-return", _events, NEEDS)
    yield Check("L4/replays-return", _replays, (*NEEDS, "graph_capture"))
    yield Check("L4/steps-return", partial(_steps, "off"), NEEDS)
    yield Check("L4/replayed-steps-return", partial(_steps, "decode"), (*NEEDS, "graph_capture"))


def _opened(target: Target) -> tuple[Opened, Busy]:
    """A device and the ways to keep it busy, both for all of these checks."""
    opened = target.opened(key="returns")
    if "busy" not in opened.aside:
        opened.aside["busy"] = busy(opened.device, opened.table, target.info.capabilities.dtypes[0])
    return opened, opened.aside["busy"]


def _queued(target: Target, tally: Tally) -> None:
    """Many copies, and many launches, are issued in less time than they take, none waits for the one before it, and asking for
    an event takes none."""
    opened, keeps = _opened(target)
    keeps.need()
    tally.equal("calls that wait for work that was issued", list(keeps.waits), [])
    for work in (filling.work for filling in keeps.fillings):
        twice = keeps.returns(partial(_twice, partial(work.issue, opened.device.stream, whole=False)))
        tally.true(f"two {work.name} return while the work in front of them is running", twice)


def _twice(call: Callable[[], object]) -> None:
    call()
    call()


def _launch(kernel: Kernel, target: Target, tally: Tally) -> None:
    """A launch, and the filling of the metadata that it takes, return while the work in front of them runs: over plain rows and
    weights, over quantised ones and packed ones."""
    opened, keeps = _opened(target)
    keeps.need()
    for mode in (first_mode(target), *further_modes(kernel, target.info.capabilities)):
        if mode.on_first_device(target):
            _launched(kernel, mode, opened, keeps, target, tally)


def _other_devices(target: Target, tally: Tally) -> None:
    """Launches on devices of every further dtype, and on one of row-invariant kernels."""
    each: dict[tuple[str, bool], list[tuple[Kernel, Mode]]] = {}
    for kernel in map(kernel_of, target.offered):
        for mode in further_modes(kernel, target.info.capabilities):
            if not mode.on_first_device(target):
                each.setdefault((mode.act, mode.row_invariant), []).append((kernel, mode))
    if not each:
        raise Unsupported("it computes in one dtype alone, and in one way")
    for (dtype, invariant), launches in each.items():
        opened = target.opened(dtype=dtype, row_invariant=invariant, key="returns")
        keeps = busy(opened.device, opened.table, dtype)
        keeps.need()
        for kernel, mode in launches:
            _launched(kernel, mode, opened, keeps, target, tally)


def _launched(kernel: Kernel, mode: Mode, opened: Opened, keeps: Busy, target: Target, tally: Tally) -> None:
    """One kernel in one mode."""
    case, _ = mode.cases(kernel, target)
    bound = mode.bound(kernel, case, opened, opened.init_meta)
    stream, n = opened.device.stream, case.n
    launched = keeps.returns(lambda: bound.launch(stream, n), before=lambda: bound.load(case))
    tally.true(f"a launch of {kernel.name} ({mode.name}) returns while the work in front of it is running", launched)
    step = StepMeta(0, launch_rows=n, real_slots=1, has_prefill=True)
    for name in bound.metas:
        filled = keeps.returns(lambda: bound.fill(step), before=lambda: bound.load(case))
        tally.true(f"filling {name} of {kernel.name} returns while the work in front of it is running", filled)


def _copies(target: Target, tally: Tally) -> None:
    """Copies of every size, both ways, on each stream."""
    opened, keeps = _opened(target)
    if not _copied(keeps, "the compute stream", tally):
        return  # the others take their time as well
    other = further_stream(opened.device, "conform")
    if other is not opened.device.stream:
        _copied(busy(opened.device, opened.table, target.info.capabilities.dtypes[0], other), "a further stream", tally)


def _copied(keeps: Busy, which: str, tally: Tally) -> bool:
    """Copies on one stream, until one waits; whether none does."""
    device = keeps.device
    for size in COPIES:
        buffer, staging = device.empty("conform.b", (size,), "i32"), device.staging("conform.s", (size,), "i32")
        staging.array[...] = 1
        for what, copy in (
            ("an upload", partial(device.upload, keeps.stream, buffer, staging, size)),
            ("a download", partial(device.download, keeps.stream, staging, buffer, size)),
        ):
            returns = keeps.returns(copy)
            tally.true(f"{what} of {4 * size} bytes on {which} returns while the work in front of it is running", returns)
            if not returns:
                return False
    return True


def _events(target: Target, tally: Tally) -> None:
    """Recording an event, and making a stream wait for one: the host does not wait meanwhile. Waiting for an event that was
    reached is over while work behind it runs."""
    opened, keeps = _opened(target)
    device, event = opened.device, opened.device.event()
    tally.true("record() returns while the work in front of it is running", keeps.returns(lambda: event.record(device.stream)))
    reached = keeps.returns(event.synchronize, before=lambda: event.record(device.stream))
    tally.true("synchronize() of an event returns while work behind the event is running", reached)
    other = further_stream(device, "conform")
    for filling in keeps.fillings:
        waits = Busy(device, device.stream, [filling], ()).returns(partial(other.wait, filling.event))
        tally.true("stream.wait() returns while the work that the stream waits for is running", waits)


def _replays(target: Target, tally: Tally) -> None:
    """A graph of several launches, the host's calls of which are long over."""
    opened = target.open()
    capture, stream = target.plugins.graph_capture(opened.device), opened.device.stream
    keeps = busy(opened.device, opened.table, target.info.capabilities.dtypes[0])
    keeps.need()
    for name in (one for one in ("residual_add", "swiglu", "argmax", "verify_match") if one not in uncapturable(opened, target)):
        case, _ = first_mode(target).cases(REGISTRY[name], target)
        bound = first_mode(target).bound(REGISTRY[name], case, opened, opened.init_meta)
        graph = capture.capture(stream, partial(_twice, partial(bound.launch, stream, case.n)))
        returns = keeps.returns(partial(graph.replay, stream), before=partial(bound.load, case))
        tally.true(f"a replay of {name} returns while the work in front of it is running", returns)
        if not returns:
            break
    opened.device.close()


# -- whole steps -----------------------------------------------------------------------------------------
class _Ahead(Instrument):
    """Keeps the compute stream busy when a step is launched, each time in the next of several ways, and notes whether it still is
    when the launch is over."""

    name = "ahead"
    stages = ("launch",)

    def __init__(self) -> None:
        super().__init__()
        self.fillings: Sequence[Filling] = ()
        self.seconds = BUSY_S
        self.running: list[bool] = []
        self.took: list[float] = []
        self._began = 0.0

    def begin(self, stage: Stage, subject: Any) -> None:
        """Work in front of the step."""
        del stage, subject
        if self.fillings:
            self.engine.device.synchronize()
            filling = self.fillings[len(self.running) % len(self.fillings)]
            filling.fill(self.engine.device.stream, max(self.seconds, CALLS * filling.piece_s))
        self._began = time.perf_counter()

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        """Is it still there?"""
        del stage, subject, result
        self.took.append(time.perf_counter() - self._began)
        if self.fillings:
            self.running.append(self.fillings[len(self.running) % len(self.fillings)].runs())


def _steps(graph: str, target: Target, tally: Tally) -> None:
    """Uploads, launches or replays, and the copy of the snapshot: nothing of a step waits. A device has to be busy behind as many
    calls as a step makes, so that one which makes progress with every call is not asked."""
    ahead, dtype = _Ahead(), working_dtype(target)
    asks = [Ask(prompt, max_new=20) for prompt in prompts(2)]
    options: dict[str, Any] = {"graph": graph, "invariant": False, **({"graph_sizes": (1, 2)} if graph != "off" else {})}
    with target.engine(draft_tokens=K, dtype=dtype, max_num_seqs=2, instruments=(ahead,), **options) as engine:
        as_expected(tally, asks, serve(engine, asks, tally), K, target.rounding(dtype))
        keeps = busy(bare(engine.device), engine.table, dtype)
        keeps.need()
        ahead.seconds = max(ahead.seconds, LONGER * statistics.median(ahead.took))
        lasting = [filling for filling in keeps.fillings if _lasts(keeps.device, filling, ahead.seconds)]
        if not lasting:
            raise Unseen(f"that steps are launched before others have run: the device is never busy behind {CALLS} calls")
        share = 0.0
        for _ in range(RUNS):
            ahead.fillings, ahead.running = lasting, []
            as_expected(tally, asks, serve(engine, asks, tally), K, target.rounding(dtype))
            ahead.fillings = ()
            each = [ahead.running[place :: len(lasting)] for place in range(len(lasting))]
            share = max(share, min(sum(one) / len(one) for one in each))
            if share >= MOSTLY:
                break
    tally.true(f"the work in front of a step is running when it has been launched, got that of {share:.0%}", share >= MOSTLY)


def _lasts(device: Device, filling: Filling, seconds: float) -> bool:
    """Whether its work runs on behind as many calls as a step makes."""
    running = 0
    for _ in range(CONTROLS):
        with at_rest(device):
            filling.fill(device.stream, max(seconds, CALLS * filling.piece_s))
            for _ in range(CALLS):
                filling.work.issue(device.stream, whole=False)
            running += filling.runs()
    return running >= SURELY * CONTROLS
