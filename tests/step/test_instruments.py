"""Instruments together: each says what it says alone, no text changes, and where there are none nothing is paid."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from polydraft import LLM, Engine, SamplingParams, reference
from polydraft.config import EngineConfig
from polydraft.conformance.target import wrap
from polydraft.device import DeviceCounters, Launch
from polydraft.errors import ConfigError, HazardError
from polydraft.instruments.allocations import Allocations
from polydraft.instruments.base import Aside, Instrument, WrappedDevice, bare
from polydraft.instruments.idle import Idle
from polydraft.instruments.record import CallRecorder
from polydraft.instruments.sanitize import Sanitizer
from polydraft.instruments.timeline import DEVICE, HOST, Recording, clock_of
from polydraft.instruments.trace import Trace
from polydraft.plugins.kernel_table import Binding
from polydraft.program.points import STAGES, Points, Stage
from tests.support import tiny
from tests.support.depth import among, deep
from tests.support.emulator import Emulator
from tests.support.planted import ASKS, PLANTED, watched
from tests.support.planted_device import PlantedPlugin
from tests.support.project import ROOT
from tests.support.runs import Ask, drive, essence

STEPS = (1, 2, 5)
"""Steps that are recorded: prefill, and a round of both kinds of requests."""
MAKE: dict[str, Callable[[], Instrument]] = {
    "trace": Trace,
    "record": lambda: CallRecorder(STEPS),
    "sanitize": Sanitizer,
    "idle": Idle,
    "allocations": Allocations,
}
WHOLE = tuple(MAKE)
EMULATED = "latency=kernel:20,upload:5,download:5,issue:1"
KINDS: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"},
    "queued-1": {"backend": "reference", "device": "queued", "overlap": 1, "graph": "off"},
    "queued-1-graph": {"backend": "reference", "device": "queued", "overlap": 1, "graph": "decode"},
    "emulator-0-graph": {"emulator": f"seed=3&{EMULATED}", "overlap": 0, "graph": "decode"},
    "emulator-1-graph": {"emulator": f"seed=3&{EMULATED}", "overlap": 1, "graph": "decode"},
    "emulator-1": {"emulator": f"seed=3&policy=lazy&{EMULATED}", "overlap": 1, "graph": "off"},
}
LOAD = [
    Ask((3, 1, 4, 1, 5), SamplingParams(max_new_tokens=7, ignore_eos=True)),
    Ask((2, 7), SamplingParams(max_new_tokens=9, ignore_eos=True, temperature=0.9, seed=4, repetition_penalty=1.2), arrival=2),
]


def made(kind: str, names: Sequence[str] = (), **more: Any) -> Engine:
    """An engine of one of `KINDS` with instruments by name."""
    options: dict[str, Any] = {"draft_tokens": 2, "max_num_seqs": 2, "block_size": 8, "max_model_len": 40, **KINDS[kind], **more}
    emulator = options.pop("emulator", None)
    return LLM(
        plugin=None if emulator is None else Emulator(f"emulator:0?{emulator}"), model=str(tiny.checkpoint("narrow")),
        plugins=tiny.PLUGINS, invariant=True, instruments=[MAKE[name]() for name in names], **options,
    ).engine  # fmt: skip


class Seen:
    """What a run gave, and what each of its instruments says of it."""

    def __init__(self, engine: Engine) -> None:
        now, idle = clock_of(bare(engine.device)), engine.instruments.find(Idle)
        begin, between = now(), None
        if idle is None:
            self.texts = [essence(output) for output in drive(engine, LOAD)]
        else:
            with idle.watching(now, about=16) as share:
                self.texts = [essence(output) for output in drive(engine, LOAD)]
                between = share(begin, now())
        self.said: dict[str, Any] = {}
        for one in engine.instruments:
            if isinstance(one, Trace):
                self.said[one.name] = shape_of(one.finish())
            elif isinstance(one, CallRecorder):
                record = one.finish()
                self.said[one.name] = record.calls, {key: tensor.array for key, tensor in record.tensors.items()}
            elif isinstance(one, Sanitizer):
                self.said[one.name] = one.report.hazards
            elif isinstance(one, Allocations):
                self.said[one.name] = one.construction, one.steps, one.launches
            else:
                self.said[one.name] = between is not None and 0 <= between <= 1
        engine.close()


def shape_of(recording: Recording) -> Mapping[int, Counter[tuple[Any, ...]]]:
    """By step, what a recording has: all but how long it took."""
    found: dict[int, Counter[tuple[Any, ...]]] = {}
    for s in recording.spans:
        if s.side == HOST or s.kind != "step":
            found.setdefault(s.step, Counter())[s.side, s.lane, s.kind, s.name, s.stage, s.rows, len(s.flows)] += 1
    return found


@functools.cache
def bare_texts(kind: str) -> list[Mapping[str, Any]]:
    engine = made(kind)
    texts = [essence(output) for output in drive(engine, LOAD)]
    engine.close()
    return texts


@functools.cache
def alone(kind: str, name: str) -> Any:
    """What an instrument says alone; the text is that of the bare run."""
    seen = Seen(made(kind, (name,)))
    assert seen.texts == bare_texts(kind)
    return seen.said[name]


def same(name: str, got: Any, wanted: Any) -> None:
    """Hold what an instrument says against what it says alone."""
    if name != "record":
        assert got == wanted, name
        return
    assert got[0] == wanted[0]
    assert got[1].keys() == wanted[1].keys()
    for key, array in got[1].items():
        np.testing.assert_array_equal(array, wanted[1][key])


def check_together(kind: str, names: Sequence[str]) -> None:
    graphs = kind.endswith("graph")
    seen = Seen(made(kind, names))
    assert seen.texts == bare_texts(kind)
    assert seen.said.keys() == set(names)
    for name, said in seen.said.items():
        wanted = alone(kind, name)
        if name == "trace" and "record" in names and graphs:  # the recorded steps are launches instead of graphs
            said, wanted = ({step: what for step, what in one.items() if step not in STEPS} for one in (said, wanted))  # noqa: PLW2901
        same(name, said, wanted)


def possible(kind: str, names: Sequence[str]) -> bool:
    return not (kind.endswith("graph") and {"record", "idle"} <= set(names))


PAIRS = [(kind, names) for kind in KINDS for names in itertools.combinations(WHOLE, 2) if possible(kind, names)]
SETS = [
    (kind, names)
    for kind in KINDS
    for names in (WHOLE, tuple(n for n in WHOLE if n != "record"), tuple(n for n in WHOLE if n != "idle"))
    if possible(kind, names) and (names == WHOLE or kind.endswith("graph"))
]


@pytest.mark.parametrize(
    ("kind", "names"),
    among([*PAIRS[17::34], *SETS[::6]], [*PAIRS, *SETS]),
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_together_each_says_what_it_says_alone(kind: str, names: tuple[str, ...]) -> None:
    check_together(kind, names)


@pytest.mark.parametrize("kind", KINDS)
def test_alone_each_says_something(kind: str) -> None:
    """So that what is compared above is not nothing."""
    calls, tensors = alone(kind, "record")
    assert {call.step for call in calls} == set(STEPS)
    assert tensors
    trace = alone(kind, "trace")
    assert len([step for step in trace if step > 0]) > 5
    names = {key[3] for step in trace.values() for key in step}
    assert {"plan", "launch", "upload", "wait", "collect", "commit", "output", "argmax", "paged_attention"} <= names
    assert any(name.startswith("graph ") for name in names) == kind.endswith("graph")
    assert alone(kind, "sanitize") == ()
    construction, steps, _ = alone(kind, "allocations")
    assert construction.number > 50
    assert {step.number for step in steps} == {0}
    assert alone(kind, "idle") == kind.startswith("emulator")


# -- hazards, with all others looking on ---------------------------------------------------------------------------------
TOGETHER = (
    "removed_event_record", "too_few_rows_downloaded", "staging_shared_by_steps", "uploads_on_a_side_stream",
    "draft_passes_on_a_side_stream", "host_waits_in_the_launch_path", "buffer_allocated_in_the_launch_path",
    "captured_buffer_moved", "host_waits_in_a_capture", "kernel_writes_its_input", "kernel_reads_a_buffer_it_was_not_given",
    "slot_released_while_a_step_is_in_flight",
)  # fmt: skip


BRIEFLY = ("removed_event_record", "staging_shared_by_steps", "uploads_on_a_side_stream")
"""Those that `make test` takes; the others end late or take graphs."""


@pytest.mark.parametrize(
    "planted",
    [p if p.name in BRIEFLY else deep(p) for p in PLANTED if p.name in TOGETHER],
    ids=lambda planted: planted.name,
)
def test_a_planted_hazard_is_found_with_all_others_looking_on(planted: Any) -> None:
    others = [MAKE[name]() for name in WHOLE if name not in ("sanitize", "idle" if planted.graph else "")]
    engine = watched(
        PlantedPlugin(planted.kernels, observing=planted.observing), overlap=planted.overlap,
        graph="decode" if planted.graph else "off", instruments=others,
    )  # fmt: skip
    assert len(engine.instruments) == len(others) + 1
    planted.plant(engine)
    try:
        drive(engine, ASKS, limit=200)
    except Exception:  # noqa: BLE001  a host that trusts what it should not ends in many ways
        assert not planted.harmless
    found, expected = {hazard.name for hazard in engine.hazards}, {planted.hazard, *planted.also}
    assert expected <= found <= expected | planted.consequences
    with pytest.raises(HazardError, match=planted.hazard):
        engine.close()


def test_they_are_planted() -> None:
    assert set(TOGETHER) <= {planted.name for planted in PLANTED}


# -- order, life and failures --------------------------------------------------------------------------------------------
class Probe(Instrument):
    """Notes which launches it is given, how, and which stages go by."""

    name = "probe"
    stages = STAGES

    def __init__(self, order: int = 0, name: str = "probe") -> None:
        super().__init__()
        self.order, self.name = order, name  # type: ignore[misc]  # two of them are two instruments
        self.heard: list[tuple[str, str]] = []
        self.launched: list[str] = []
        self.bound: list[Launch] = []

    def bind(self, binding: Binding, launch: Launch) -> Launch:
        self.bound.append(launch)

        def call(stream: Any, n: int) -> None:
            self.launched.append(f"{binding.program} {binding.stage} {binding.contract}")
            launch(stream, n)

        return call

    def begin(self, stage: Stage, subject: Any) -> None:
        self.heard.append(("begin", stage))

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        self.heard.append(("end", stage))


def chain(device: Any) -> Iterator[str]:
    while isinstance(device, WrappedDevice):
        yield type(device).__name__
        device = device.inner


@pytest.mark.parametrize("names", [WHOLE, WHOLE[::-1]], ids=["in order", "the other way"])
def test_the_order_is_fixed(names: tuple[str, ...]) -> None:
    engine = made("reference", names)
    assert [one.name for one in engine.instruments] == ["record", "sanitize", "trace", "idle", "allocations"]
    assert list(chain(engine.device)) == ["WatchedDevice", "_TimedCopies"]
    assert type(bare(engine.device)).__name__ == "ReferenceDevice"
    launch: Any = engine.runner.programs["greedy"]["target"].entries[0].launch
    assert launch.__module__ == CallRecorder.__module__
    assert [type(one) for one in engine.points.launch] == [CallRecorder, Sanitizer, Trace]
    engine.close()


def test_an_outer_probe_begins_first_and_ends_last() -> None:
    outer, inner, told = Probe(5, "outer"), Probe(60, "inner"), list[tuple[str, str, str]]()
    for probe in (outer, inner):
        probe.begin = lambda stage, subject, name=probe.name: told.append((name, "begin", stage))  # type: ignore[method-assign, misc]
        probe.end = lambda stage, subject, result, name=probe.name: told.append((name, "end", stage))  # type: ignore[method-assign, misc]
    engine = LLM(
        backend="reference", model=str(tiny.checkpoint("narrow")), plugins=tiny.PLUGINS, instruments=(inner, outer)
    ).engine
    engine.add((1, 2, 3), SamplingParams(max_new_tokens=2))
    engine.step()
    around = [(name, what) for name, what, stage in told if stage == "upload"]
    assert around == [("outer", "begin"), ("inner", "begin"), ("inner", "end"), ("outer", "end")]


def test_every_launch_goes_by_in_its_place() -> None:
    probe = Probe()
    engine = LLM(
        backend="reference", model=str(tiny.checkpoint("narrow")), plugins=tiny.PLUGINS, draft_tokens=2, instruments=(probe,)
    ).engine
    engine.add((1, 2, 3), SamplingParams(max_new_tokens=20, ignore_eos=True))
    engine.step()
    probe.launched.clear()
    probe.heard.clear()
    engine.step()
    programs = engine.runner.programs["greedy"]
    entries = [
        (program.name, entry) for part in ("target", "draft") for program in (programs[part],) for entry in program.entries
    ]
    assert probe.launched == [f"{name} {entry.stage} {entry.contract}" for name, entry in entries]
    assert any(name.endswith("forward_meta") for name in probe.launched)
    told = [stage for what, stage in probe.heard if what == "begin"]
    assert told == ["step", "plan", "launch", "upload", "collect", "wait", "commit"]
    engine.poll()
    assert probe.heard[-2:] == [("begin", "output"), ("end", "output")]


def test_a_trace_that_nobody_stopped_has_what_was_done_when_its_engine_was_closed() -> None:
    seen = made("emulator-1-graph", ("trace",))
    trace = seen.instruments[Trace]
    drive(seen, LOAD)
    seen.close()
    assert not trace.is_on
    assert shape_of(trace.finish()) == alone("emulator-1-graph", "trace")


def test_what_is_asked_aside_is_nobodys() -> None:
    """Neither an access of the operation that was launched last, nor an allocation of the engine."""
    device: Any = SimpleNamespace(counters=DeviceCounters(), operation=7, observed_accesses=list)
    aside = Aside()
    for _ in range(2):
        with aside.of(device):
            assert device.operation == 0
            device.counters.allocations += 1
            device.counters.bytes_allocated += 8
        assert device.operation == 7
        device.counters.allocations += 1
    assert aside.allocated == (2, 16)


@pytest.mark.parametrize("kind", [deep("emulator-1"), "emulator-1-graph"])
def test_an_update_that_binds_anew_keeps_them(kind: str) -> None:
    names = [name for name in WHOLE if possible(kind, (name, "idle"))]
    engine = made(kind, names)
    engine.runner.rebind()
    seen = Seen(engine)
    assert seen.texts == bare_texts(kind)
    for name in names:
        if name != "allocations":  # what is bound anew may want workspace
            same(name, seen.said[name], alone(kind, name))


def test_a_failing_device_ends_every_stage() -> None:
    probe = Probe()
    engine = watched(Emulator(f"emulator:0?seed=5&fault=op@300:fail&{EMULATED}"), instruments=(probe, Trace(), Allocations()))
    reasons = {output.finish_reason for output in drive(engine, ASKS)}
    assert "error" in reasons
    open_stages: list[str] = []
    for what, stage in probe.heard:
        if what == "begin":
            open_stages.append(stage)
        else:
            assert open_stages.pop() == stage
    assert open_stages == []
    held = engine.instruments[Trace].finish()
    assert {s.step for s in held.spans if s.side == DEVICE}
    engine.close()


class Broken(Probe):
    """Raises at its first commit."""

    def __init__(self, place: str, order: int) -> None:
        super().__init__(order, "broken")
        self.place = place

    def _raise_at(self, place: str, stage: Stage) -> None:
        if (place, stage) == (self.place, "commit"):
            self.place = ""
            raise ValueError("broken")

    def begin(self, stage: Stage, subject: Any) -> None:
        self._raise_at("begin", stage)
        super().begin(stage, subject)

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        super().end(stage, subject, result)
        self._raise_at("end", stage)


@pytest.mark.parametrize("place", ["begin", "end"])
def test_an_instrument_that_raises_leaves_no_stage_of_another_open(place: str) -> None:
    """Outside of it, and within; those within have not begun where its own beginning raises."""
    probes, trace = (Probe(-5, "outer"), Broken(place, 40), Probe(60, "inner")), Trace()
    engine = watched(reference, instruments=(*probes, trace))
    engine.add((1, 2, 3), SamplingParams(max_new_tokens=8, ignore_eos=True))
    while engine.has_work:
        try:
            engine.step()
        except ValueError:
            engine.add((4, 5), SamplingParams(max_new_tokens=8, ignore_eos=True))
    for probe in probes:
        began, ended = (Counter(stage for what, stage in probe.heard if what == which) for which in ("begin", "end"))
        assert began == ended
        assert began["commit"] > 1
    assert trace._begun == []
    engine.close()


# -- what cannot be ------------------------------------------------------------------------------------------------------
def refused(*given: Any, **options: Any) -> str:
    """The refusal, which comes before the device is opened."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a device was opened")

    plugin = wrap(reference, polydraft_open_device=never)
    config = EngineConfig.from_mapping({"model": str(tiny.checkpoint("narrow")), "plugins": tiny.PLUGINS, **options})
    with pytest.raises(ConfigError) as caught:
        Engine(config, backend=plugin, instruments=given)
    return str(caught.value)


class Graphs(Probe):
    graphs = "on"


class Eager(Probe):
    graphs = "off"


class Shy(Probe):
    apart: ClassVar[Mapping[str, str]] = {"trace": "it wants to be looked at by nobody"}


QUEUED = {"device": "queued", "overlap": 1, "graph": "decode"}


def test_refusals_have_their_reason() -> None:
    assert refused(CallRecorder(), Idle(), **QUEUED) == (
        "instruments record and idle: record has launches enqueued one by one, and idle measures steps that are replayed as "
        "graphs (decode); run them one by one, or both with --graph off"
    )
    assert refused(Trace(), Trace(calls="none")) == "instruments trace and trace: there may be one of each; leave one out"
    assert refused(Graphs()).startswith("instrument probe: it looks at graphs, and this engine has none; choose --graph decode")
    assert refused(Eager(), **QUEUED).startswith("instrument probe: it needs launches, and this engine replays graphs (decode)")
    assert refused(Trace(), Shy()) == "instruments probe and trace: it wants to be looked at by nobody; run them one by one"
    assert "wanted objects of polydraft.instruments" in refused("trace")
    used = Trace()
    made_with = LLM(backend="reference", instruments=(used,))
    assert "looks at an engine already" in refused(used)
    with pytest.raises(ConfigError, match=r"no instrument 'idle', .*instruments=\(Idle\(\),\)"):
        made_with.engine.instruments[Idle]
    made_with.close()
    with pytest.raises(ConfigError, match="trace looks at no engine yet"):
        Trace().start()
    with pytest.raises(ConfigError, match="sanitize follows a run to its end"):
        Sanitizer().stop()


def test_the_configuration_adds_one_checker() -> None:
    engine = watched(PlantedPlugin(), instruments=(Sanitizer(strict=True),))
    assert [one.name for one in engine.instruments] == ["sanitize"]
    assert engine.instruments[Sanitizer].report.strict
    engine.close()


# -- nothing is paid without any -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", among(["queued-1"], KINDS))
def test_an_empty_list_adds_no_call(kind: str) -> None:
    """Programs hold the providers' own launches and the device is the backend's; a step calls into no instrument and no point."""
    engine = made(kind)
    assert not any(vars(engine.points).values())
    assert engine.points.__dict__.keys() == Points().__dict__.keys()
    assert engine.runner.device is engine.device is bare(engine.device)
    assert engine.table.instruments == ()
    for parts in engine.runner.programs.values():
        for program in parts.values():
            assert program.calls == tuple((entry.launch, entry.unit) for entry in program.entries)
            assert not any(type(entry.launch).__module__.startswith("polydraft.instruments") for entry in program.entries)
            assert not any(
                getattr(entry.launch, "__module__", "").startswith("polydraft.instruments") for entry in program.entries
            )
    places = (str(ROOT / "core/polydraft/instruments"), str(ROOT / "core/polydraft/program/points.py"))
    called: Counter[str] = Counter()

    def note(frame: Any, event: str, arg: object) -> None:
        del arg
        if event == "call":
            called[str(Path(frame.f_code.co_filename))] += 1

    for ask in LOAD:
        engine.add(ask.prompt_ids, ask.params)
    gc.collect()  # what earlier engines left behind calls what it likes when it is collected
    gc.disable()
    sys.setprofile(note)
    try:
        while engine.has_work:
            engine.step()
            engine.poll()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert sum(called.values()) > 100
    assert not [file for file in called if file.startswith(places)]
    engine.close()
