"""Planted hazards: small mutants of an engine watched by the hazard checker, each with the names the report must contain.

It has the list `PLANTED`, and the run that all of them share: requests that come and go, so that batches grow and shrink. The
tests of the checker use it and assert; what must detect a mutant is in its record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polydraft import LLM, Engine, SamplingParams
from polydraft.contracts.base import UNITS, Unit
from polydraft.contracts.kernels.scatter import Run
from polydraft.instruments.sanitize import Sanitizer
from polydraft.instruments.sanitize.staging import WatchedStaging
from polydraft.program.columns import BLOCK_TABLE
from polydraft.program.program import Program
from polydraft.step.graphs import GraphPolicy
from polydraft.step.uploads import StagingSet
from tests.support import tiny
from tests.support.planted_device import KernelOf, PlantedPlugin
from tests.support.runs import Ask

MODEL, SLOTS, DRAFTS = "narrow", 3, 2
ASKS = [
    Ask((3 + i, 1, 4), SamplingParams(max_new_tokens=4 + 2 * (i % 3), ignore_eos=True, temperature=i % 2, seed=i), arrival=i)
    for i in range(4)
]

Plant = Callable[[Engine], None]


@dataclass(frozen=True)
class Planted:
    """One mutant. `hazard`: the name it must be found by; `also`: names that come with it; `consequences`: names that may turn up
    once texts have gone wrong; `harmless`: the texts come out right on a synchronous device all the same; `about`: what at least
    one finding of that name must be about."""

    name: str
    plant: Plant
    hazard: str
    also: frozenset[str] = frozenset()
    consequences: frozenset[str] = frozenset()
    harmless: bool = False
    about: str = ""
    overlap: int = 1
    graph: bool = False
    observing: bool = False
    kernels: Mapping[str, KernelOf] = field(default_factory=dict)

    def engine(self, plugin: object | None = None) -> Engine:
        """A watched engine for it, on the planted device or on that of `plugin`, before anything is planted in it."""
        return watched(
            plugin or PlantedPlugin(self.kernels, observing=self.observing),
            overlap=self.overlap, graph="decode" if self.graph else "off",
        )  # fmt: skip


def watched(plugin: object, **options: Any) -> Engine:
    """The engine that all mutants share, with other options where some are given."""
    return LLM(
        plugin=plugin,
        **{
            "model": str(tiny.checkpoint(MODEL)), "plugins": tiny.PLUGINS, "draft_tokens": DRAFTS, "invariant": True,
            "max_num_seqs": SLOTS, "max_batched_tokens": 32, "overlap": 1, "graph": "off", "sanitize": True, **options,
        },
    ).engine  # fmt: skip


PLANTED: list[Planted] = []
CHAOS = frozenset({"slot-released-in-flight", "stale-host-read", "snapshot-overwritten"})
"""What a host that works with somebody else's snapshot, or refuses it and voids the steps in flight, may do next."""


def planted(hazard: str, *also: str, **options: Any) -> Callable[[Plant], Plant]:
    """Add a mutant of a built engine to the list."""

    def add(plant: Plant) -> Plant:
        PLANTED.append(Planted(plant.__name__, plant, hazard, frozenset(also), **options))
        return plant

    return add


def planted_kernel(contract: str, hazard: str, **options: Any) -> Callable[[KernelOf], KernelOf]:
    """Add a mutant of one kernel to the list, whose device sees what it touches."""

    def add(kernel: KernelOf) -> KernelOf:
        mutant = Planted(kernel.__name__, lambda engine: None, hazard, kernels={contract: kernel}, observing=True, **options)
        PLANTED.append(mutant)
        return kernel

    return add


def device_of(engine: Engine) -> Any:
    """The device that core holds, as what it is here."""
    return engine.device


# -- events and snapshots ------------------------------------------------------------------------------
class Detour:
    """Stands in for an object, some of whose attributes are others."""

    def __init__(self, inner: Any, **others: Any) -> None:
        self._inner = inner
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def detour_events(engine: Engine, make: Callable[[Any], Any]) -> None:
    engine.runner._outputs = [(staging, make(event)) for staging, event in engine.runner._outputs]


@planted("unrecorded-event", "early-host-read", "staging-rewritten", overlap=0, harmless=True, about="event 1")
def removed_event_record(engine: Engine) -> None:
    detour_events(engine, lambda event: Detour(event, record=lambda stream: None))


@planted("early-host-read", harmless=True, about="snapshot1")
def event_recorded_before_the_copy(engine: Engine) -> None:
    device, outputs = device_of(engine), list(engine.runner._outputs)
    download = device.download

    def late(stream: Any, target: Any, source: Any, rows: int) -> None:
        next(event for staging, event in outputs if staging is target).record(stream)
        download(stream, target, source, rows)

    device.download = late
    detour_events(engine, lambda event: Detour(event, record=lambda stream: None))


@planted("early-host-read", "staging-rewritten", harmless=True)
def event_recorded_on_another_stream(engine: Engine) -> None:
    side = device_of(engine).make_stream("side")
    detour_events(engine, lambda event: Detour(event, record=lambda stream: event.record(side)))


@planted("early-host-read", harmless=True)
def snapshot_looked_at_during_the_launch(engine: Engine) -> None:
    launch = engine.runner.launch

    def looking(plan: Any) -> Any:
        flight = launch(plan)
        bool(flight.staging.array[0, 0] >= 0)
        return flight

    engine.runner.launch = looking  # type: ignore[method-assign]


@planted("early-host-read", "event-rerecorded", "staging-rewritten", harmless=True)
def collected_without_waiting(engine: Engine) -> None:
    detour_events(engine, lambda event: Detour(event, synchronize=lambda: None))


@planted("snapshot-overwritten", "early-host-read", about="snapshot0", consequences=CHAOS)
def snapshot_staging_shared_by_steps(engine: Engine) -> None:
    staging, _ = engine.runner._outputs[0]
    engine.runner._outputs = [(staging, event) for _, event in engine.runner._outputs]


@planted("event-rerecorded", harmless=True)
def one_event_for_all_steps(engine: Engine) -> None:
    _, event = engine.runner._outputs[0]
    engine.runner._outputs = [(staging, event) for staging, _ in engine.runner._outputs]


@planted("stale-host-read", about="snapshot", consequences=CHAOS)
def too_few_rows_downloaded(engine: Engine) -> None:
    download = device_of(engine).download
    device_of(engine).download = lambda stream, target, source, rows: download(stream, target, source, rows - 1)


@planted("above-capacity", harmless=True, about=r"^record\b")
def too_many_rows_downloaded(engine: Engine) -> None:
    download = device_of(engine).download
    device_of(engine).download = lambda stream, target, source, rows: download(stream, target, source, rows + SLOTS)


# -- uploads -------------------------------------------------------------------------------------------
def detour_uploads(engine: Engine, upload: Callable[..., None]) -> None:
    """Have `upload(original, stream, target, source, rows)` do the uploads."""
    original = device_of(engine).upload
    device_of(engine).upload = lambda *arguments: upload(original, *arguments)


@planted("staging-rewritten", harmless=True, about="staging0")
def staging_shared_by_steps(engine: Engine) -> None:
    del engine.runner.uploads._ring[1:]


@planted("staging-rewritten", harmless=True)
def staging_tidied_behind_the_upload(engine: Engine) -> None:
    def upload(original: Any, stream: Any, target: Any, source: Any, rows: int) -> None:
        original(stream, target, source, rows)
        source.array[:rows] = -1

    detour_uploads(engine, upload)


@planted("stale-upload", harmless=True, about="slot_order")
def padding_of_the_launch_order_not_written(engine: Engine) -> None:
    class NoTail(WatchedStaging):
        @property
        def array(self) -> Any:
            return _NoTail(super().array)

    for staging in engine.runner.uploads._ring:
        staging.slot_order.__class__ = NoTail  # type: ignore[assignment]


class _NoTail:
    """A view of staging that drops writes to its end."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not (isinstance(key, slice) and key.start is not None):
            self._view[key] = value


@planted("stale-padding", harmless=True, about=r"^slot_order\b")
def padding_of_the_launch_order_not_sent(engine: Engine) -> None:
    def upload(original: Any, stream: Any, target: Any, source: Any, rows: int) -> None:
        real = np.count_nonzero(np.asarray(source.inner.array) >= 0) if target.name == "slot_order" else rows
        original(stream, target, source, real)

    detour_uploads(engine, upload)


@planted("stale-padding", about=r"^payload\b")
def payload_not_sent_to_its_end(engine: Engine) -> None:
    def upload(original: Any, stream: Any, target: Any, source: Any, rows: int) -> None:
        original(stream, target, source, rows - (target.name == "payload"))

    detour_uploads(engine, upload)


@planted("unordered-access", "staging-rewritten", harmless=True, about=r"^slot_order\b")
def uploads_on_a_side_stream(engine: Engine) -> None:
    side = device_of(engine).make_stream("side")
    detour_uploads(engine, lambda original, stream, target, source, rows: original(side, target, source, rows))


@planted("unordered-access", harmless=True, about=r"^slot_order\b")
def uploads_on_a_side_stream_joined_too_early(engine: Engine) -> None:
    """The compute stream waits for the uploads, but for an event in front of each; the host waits properly."""
    device = device_of(engine)
    side = device.make_stream("side")

    def upload(original: Any, stream: Any, target: Any, source: Any, rows: int) -> None:
        event = device.event()
        event.record(side)
        original(side, target, source, rows)
        stream.wait(event)
        done = device.event()
        done.record(side)
        while not done.query():
            pass

    detour_uploads(engine, upload)


@planted("unrecorded-event", "unordered-access", "staging-rewritten", harmless=True)
def uploads_joined_by_an_event_that_nobody_records(engine: Engine) -> None:
    side, never = device_of(engine).make_stream("side"), device_of(engine).event()

    def upload(original: Any, stream: Any, target: Any, source: Any, rows: int) -> None:
        original(side, target, source, rows)
        stream.wait(never)

    detour_uploads(engine, upload)


# -- buffers -------------------------------------------------------------------------------------------
def send_into(engine: Engine, **buffers: Any) -> None:
    stage = engine.runner.uploads
    stage._buffers = [buffers.get(name, buffer) for name, buffer in zip(StagingSet._fields, stage._buffers, strict=True)]


@planted("captured-buffer-rebound", "unbound-buffer", graph=True, about=r"^slot_order\b", consequences=CHAOS)
def graph_input_assigned_anew(engine: Engine) -> None:
    send_into(engine, slot_order=engine.device.empty("slot_order", (SLOTS,), "i32"))


@planted("unbound-buffer", about="spare")
def input_sent_into_a_spare_buffer(engine: Engine) -> None:
    send_into(engine, seq_rows=engine.device.empty("spare", (SLOTS,), "i32"))


@planted("captured-buffer-rebound", "rebound-buffer", harmless=True, graph=True, about=r"^choices\b")
def captured_buffer_moved(engine: Engine) -> None:
    device_of(engine).move(engine.runner.memory.buffers["choices"])


@planted("rebound-buffer", harmless=True, about=r"^temperature\b")
def buffer_moved(engine: Engine) -> None:
    device_of(engine).move(engine.runner.memory.buffers["temperature"])


@planted("freed-memory", harmless=True, about="target.hidden")
def buffer_freed_while_it_is_used(engine: Engine) -> None:
    at_step(engine, 4, lambda: device_of(engine).free(engine.runner.memory.buffers["target.hidden"]))


@planted("unordered-access", harmless=True, about="weight")
def weights_refilled_under_the_draft_passes(engine: Engine) -> None:
    """The snapshot of a step says nothing of the draft passes behind it."""
    weight = engine.runner.memory.weights["lm_head"]
    value = tiny.weights(MODEL)["lm_head.weight"]
    at_step(engine, 4, lambda: engine.table.prepare_weight("linear", value, "f32", weight))


def at_step(engine: Engine, number: int, act: Callable[[], object]) -> None:
    """Have `act` called before the launch of that step."""
    launch = engine.runner.launch

    def acting(plan: Any) -> Any:
        if plan.step_id == number:
            act()
        return launch(plan)

    engine.runner.launch = acting  # type: ignore[method-assign]


# -- streams -------------------------------------------------------------------------------------------
def detour_drafts(engine: Engine, around: Callable[[Callable[[Any], None]], None]) -> None:
    """Have `around(drafts)` run the draft passes, where `drafts(stream)` runs them on a stream."""
    runner, device = engine.runner, device_of(engine)
    run, main = runner._run, device.stream

    def detoured(piece: Any, flight: Any) -> None:
        def drafts(stream: Any) -> None:
            device.stream = stream
            run(piece, flight)
            device.stream = main

        if piece == "draft":
            around(drafts)
        else:
            run(piece, flight)

    runner._run = detoured  # type: ignore[method-assign]


@planted("unordered-access", harmless=True, about=r"^drafts\b")
def draft_passes_on_a_side_stream(engine: Engine) -> None:
    side = device_of(engine).make_stream("side")
    detour_drafts(engine, lambda drafts: drafts(side))


@planted("unordered-access", harmless=True, graph=True, overlap=0, about=r"^scratch\.")
def target_and_draft_graphs_share_scratch(engine: Engine) -> None:
    """The draft graph comes after its target's, on a stream of its own; the next target graph does not wait for it."""
    device = device_of(engine)
    side, main = device.make_stream("side"), device.stream

    def around(drafts: Callable[[Any], None]) -> None:
        fork = device.event()
        fork.record(main)
        side.wait(fork)
        drafts(side)

    detour_drafts(engine, around)


# -- waiting and allocating ----------------------------------------------------------------------------
@planted("sync-in-launch", harmless=True)
def host_waits_in_the_launch_path(engine: Engine) -> None:
    def upload(original: Any, stream: Any, target: Any, source: Any, rows: int) -> None:
        original(stream, target, source, rows)
        engine.device.synchronize()

    detour_uploads(engine, upload)


@planted("sync-in-launch", harmless=True)
def host_waits_twice_for_a_step(engine: Engine) -> None:
    def twice(event: Any) -> Any:
        def synchronize() -> None:
            event.synchronize()
            engine.device.synchronize()

        return Detour(event, synchronize=synchronize)

    detour_events(engine, twice)


@planted("allocation-in-launch", harmless=True)
def buffer_allocated_in_the_launch_path(engine: Engine) -> None:
    def upload(original: Any, stream: Any, target: Any, source: Any, rows: int) -> None:
        engine.device.empty("temporary", (1,), "i32")
        original(stream, target, source, rows)

    detour_uploads(engine, upload)


@planted("sync-in-launch", harmless=True, about="compute")
def kernel_waits_for_its_device(engine: Engine) -> None:
    in_first_launch(engine, engine.device.inner.synchronize)  # type: ignore[attr-defined]


@planted("allocation-in-launch", harmless=True, about="pack_rows")
def kernel_allocates_in_its_launch(engine: Engine) -> None:
    inner = engine.device.inner  # type: ignore[attr-defined]
    in_first_launch(engine, lambda: inner.empty("temporary", (1,), "i32"))


def in_first_launch(engine: Engine, act: Callable[[], object]) -> None:
    """Have the provider of `pack_rows` call `act` whenever it is launched."""
    for parts in engine.runner.programs.values():
        launch: Any = next(entry.launch for entry in parts["target"].entries if "pack_rows" in entry.contract)
        genuine = launch._inner

        def planted_launch(stream: Any, n: int, genuine: Any = genuine) -> None:
            act()
            genuine(stream, n)

        launch._inner = planted_launch


def capture_with(engine: Engine, act: Callable[[], object]) -> None:
    """Capture programs of which one calls `act` while it is captured."""
    runner, done = engine.runner, engine.runner.programs["greedy"]["target"]
    checker = engine.instruments[Sanitizer].checker

    def acting(stream: Any, n: int) -> None:
        if checker.recording is not None:
            act()
        done.calls[0][0](stream, n)

    calls = ((acting, done.calls[0][1]), *done.calls[1:])
    runner.programs["greedy"]["target"] = Program(done.name, done.entries, calls)
    runner.capture(GraphPolicy("decode", (SLOTS,)), engine.plugins.graph_capture(engine.device), frozenset())


@planted("sync-in-capture", harmless=True)
def host_waits_in_a_capture(engine: Engine) -> None:
    capture_with(engine, engine.device.synchronize)


@planted("sync-in-capture", harmless=True)
def event_asked_in_a_capture(engine: Engine) -> None:
    capture_with(engine, engine.device.event().query)


@planted("allocation-in-capture", harmless=True)
def buffer_allocated_in_a_capture(engine: Engine) -> None:
    capture_with(engine, lambda: engine.device.empty("temporary", (1,), "i32"))


@planted("host-access-in-capture", harmless=True, about="snapshot0")
def staging_read_in_a_capture(engine: Engine) -> None:
    staging, _ = engine.runner._outputs[0]
    capture_with(engine, staging.array.copy)


# -- lengths and slots ---------------------------------------------------------------------------------
def detour_lengths(engine: Engine, unit: Unit, change: Callable[[int], int]) -> None:
    lengths, place = engine.runner._lengths, UNITS.index(unit)

    def changed(plan: Any) -> Any:
        n = list(lengths(plan))
        n[place] = change(n[place])
        return tuple(n)

    engine.runner._lengths = changed  # type: ignore[method-assign]


@planted("above-capacity", about=r"^ids\b")
def launch_longer_than_its_buffers(engine: Engine) -> None:
    detour_lengths(engine, "rows", lambda rows: rows + 32)


@planted("negative-length", harmless=True)
def launch_of_negative_length(engine: Engine) -> None:
    detour_lengths(engine, "runs", lambda runs: -1)


@planted("slot-released-in-flight", about="slot ")
def slot_released_while_a_step_is_in_flight(engine: Engine) -> None:
    release, slots = engine.scheduler.release_drained, engine.slots

    def early() -> None:
        slots.in_flight[slots.draining] = 0
        release()

    engine.scheduler.release_drained = early  # type: ignore[method-assign]


# -- what kernels really touch -------------------------------------------------------------------------
@planted("foreign-block", harmless=True, observing=True, about="KV cache")
def block_table_with_a_block_that_was_not_granted(engine: Engine) -> None:
    launch, ledger, done = engine.runner.launch, engine.ledger, list[Any]()
    table = next(i for i, column in enumerate(engine.runner.columns) if column.name == BLOCK_TABLE)

    def planted_launch(plan: Any) -> Any:
        if plan.writes and not done:
            runs, payload = plan.writes.runs, plan.writes.payload.copy()
            first = runs[runs[:, Run.COLUMN] == table][0] if plan.writes.admits else runs[0]
            payload[first[Run.OFFSET]] = ledger._free[0]  # the last that would be granted: nobody else comes to use it
            plan = dataclasses.replace(plan, writes=dataclasses.replace(plan.writes, payload=payload))
            done.append(plan)
        return launch(plan)

    engine.runner.launch = planted_launch  # type: ignore[method-assign]


@planted_kernel("argmax", "undeclared-write", harmless=True, about="logits")
def kernel_writes_its_input(device: Any, genuine: Any) -> Any:
    def bind(a: Any, limits: Any) -> Any:
        run = genuine(a, limits)

        def planted_run(n: int) -> None:
            run(n)
            a.logits[:n] -= 1

        return planted_run

    return bind


@planted_kernel("argmax", "undeclared-write", harmless=True, about=r"^choices\b")
def kernel_writes_behind_its_length(device: Any, genuine: Any) -> Any:
    def bind(a: Any, limits: Any) -> Any:
        run = genuine(a, limits)

        def planted_run(n: int) -> None:
            run(n)
            a.tokens[n:] -= 7

        return planted_run

    return bind


@planted_kernel("swiglu", "undeclared-read", harmless=True, about="target.hidden")
def kernel_reads_a_buffer_it_was_not_given(device: Any, genuine: Any) -> Any:
    def bind(a: Any, limits: Any) -> Any:
        run = genuine(a, limits)

        def planted_run(n: int) -> None:
            next(buffer for buffer in device.buffers if buffer.name == "target.hidden").host_array.sum()
            run(n)

        return planted_run

    return bind
