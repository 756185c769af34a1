"""The recording of a step timeline: what it holds on every kind of device, and that it costs nothing when it is off.

A recording is checked for its structure (what is nested in what, what belongs to what, what began before what), never for
how long anything took.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from polydraft import LLM, Engine, SamplingParams
from polydraft.conformance.lossless_checks import Listed
from polydraft.errors import ConfigError
from polydraft.instruments.base import bare
from polydraft.instruments.timeline import BOUND, DEVICE, EXACT, HOST, HOST_STAGES, Recording, Span
from polydraft.instruments.trace import Trace
from polydraft.instruments.trace_figures import busy_seconds, by_stage, host_seconds, idle_share, operations, summary
from polydraft.instruments.trace_file import read, write
from polydraft.instruments.trace_page import write_html
from polydraft.instruments.trace_view import middle, picture, write_png
from tests.support import tiny
from tests.support.drafting import deciding
from tests.support.emulator import Emulator
from tests.support.runs import engine

SLOW = "latency=kernel:2000,upload:100,download:100,op:50,issue:1"
"""Modelled microseconds: so long that no host is slower than the device."""
KINDS = ("reference", "lazy-0", "lazy-1", "lazy-2", "emulator-0", "emulator-1", "emulator-1-eager")


def made(kind: str, trace: Trace | None = None, **options: Any) -> Engine:
    """An engine of three drafts and two slots."""
    options = {"draft_tokens": 3, "max_num_seqs": 2, "instruments": (trace,) if trace else (), **options}
    if not kind.startswith("emulator"):
        return engine("narrow", device=kind, **options)
    if kind.endswith("eager"):
        options["graph"] = "off"
    plugin = Emulator(f"emulator:0?seed=3&{SLOW}")
    options |= {"model": str(tiny.checkpoint("narrow")), "plugins": tiny.PLUGINS, "overlap": int(kind.split("-")[1])}
    return LLM(plugin=plugin, invariant=True, **options).engine


def served(running: Engine) -> Recording:
    """Three requests to their ends, one of which waits for a slot."""
    for i in range(3):
        running.add((i + 1, 5, 9), SamplingParams(max_new_tokens=20, ignore_eos=True, seed=i, temperature=i % 2))
    while running.has_work:
        running.step()
        running.poll()
    return running.instruments[Trace].finish()


@pytest.fixture(scope="module", params=KINDS)
def recording(request: pytest.FixtureRequest) -> Iterator[tuple[str, Recording]]:
    running = made(request.param, Trace())
    yield request.param, served(running)
    running.close()


def lanes(recording: Recording) -> dict[tuple[int, str], list[Span]]:
    found: dict[tuple[int, str], list[Span]] = {}
    for span in recording.spans:
        found.setdefault((span.side, span.lane), []).append(span)
    return found


def stages(recording: Recording, name: str) -> dict[int, Span]:
    return {s.step: s for s in recording.spans if s.kind == "stage" and s.name == name}


# -- what a recording holds ---------------------------------------------------------------------------------------------
def test_spans_nest_on_every_lane(recording: tuple[str, Recording]) -> None:
    for lane, spans in lanes(recording[1]).items():
        open_spans: list[Span] = []
        for span in spans:
            assert span.end_s >= span.start_s
            while open_spans and open_spans[-1].end_s <= span.start_s:
                open_spans.pop()
            assert not open_spans or span.end_s <= open_spans[-1].end_s, f"{lane}: {span} ends behind {open_spans[-1]}"
            open_spans.append(span)


def test_every_step_has_its_stages_in_order(recording: tuple[str, Recording]) -> None:
    held = recording[1]
    steps = {name: stages(held, name) for name in HOST_STAGES}
    assert len(steps["launch"]) > 5
    for name in ("upload", "wait", "collect", "commit"):
        assert steps[name].keys() == steps["launch"].keys(), name
    for step, launch in steps["launch"].items():
        upload, wait, collect, commit = (steps[name][step] for name in ("upload", "wait", "collect", "commit"))
        assert launch.start_s <= upload.start_s <= upload.end_s <= launch.end_s <= collect.start_s
        assert collect.start_s <= wait.start_s <= wait.end_s <= collect.end_s <= commit.start_s
    assert sum(s.name == "plan" for s in held.spans) >= len(steps["launch"])
    assert sum(s.name == "output" for s in held.spans) == sum(s.kind == "step" and s.side == HOST for s in held.spans)


def test_flows_pair_a_call_with_what_it_started(recording: tuple[str, Recording]) -> None:
    kind, held = recording
    host = Counter(flow for s in held.spans if s.side == HOST for flow in s.flows)
    device = Counter(flow for s in held.spans if s.side == DEVICE for flow in s.flows)
    assert host == device
    assert set(host.values()) == {1}
    starts = {flow: s for s in held.spans if s.side == HOST for flow in s.flows}
    for span in (s for s in held.spans if s.side == DEVICE and s.flows):
        start = starts[span.flows[0]]
        assert start.step == span.step
        assert start.start_s <= span.start_s
        assert start.stage == span.stage
        if span.kind == "work" and start.kind == "call" and not kind.startswith("emulator"):
            assert (start.name, start.rows) == (span.name, span.rows)


def test_device_times_say_where_they_come_from(recording: tuple[str, Recording]) -> None:
    kind, held = recording
    assert held.device_times == {"reference": EXACT, "lazy": BOUND, "emulator": "modelled"}[kind.split("-")[0]]
    assert held.about["overlap"] == int(kind.split("-")[1] if "-" in kind else 0)


def test_overlap_is_seen(recording: tuple[str, Recording]) -> None:
    """With overlap a step is launched before the wait for the one before it begins; without it, never."""
    kind, held = recording
    depth = int(kind.split("-")[1]) if "-" in kind else 0
    launches, waits = stages(held, "launch"), stages(held, "wait")
    pairs = [(launches[step + 1].start_s, waits[step].start_s) for step in launches if step + 1 in launches]
    if depth == 0:
        assert all(launch > wait for launch, wait in pairs)
    else:
        assert sum(launch < wait for launch, wait in pairs) > len(pairs) / 2
    in_flight = [s for s in held.spans if s.side == DEVICE and s.kind == "step"]
    if kind.startswith("lazy"):
        assert len({s.lane for s in in_flight}) == depth + 1
        ends = {s.step: s.end_s for s in in_flight}
        overlapping = sum(s.start_s < ends.get(s.step - 1, s.start_s) for s in in_flight)
        assert (overlapping > len(in_flight) / 2) == (depth > 0)


@pytest.mark.parametrize("kind", ["emulator-0", "emulator-1"])
def test_a_graph_is_one_span_around_its_work(kind: str) -> None:
    running = made(kind, Trace())
    held = served(running)
    graphs = [s for s in held.spans if s.kind == "graph"]
    calls = {flow: s for s in held.spans if s.side == HOST and s.kind == "call" for flow in s.flows}
    assert {s.name for s in graphs} == ({"graph step"} if kind == "emulator-1" else {"graph target", "graph draft"})
    assert len(graphs) == running.device.counters.graph_replays
    for graph in graphs:
        assert calls[graph.flows[0]].name == graph.name
        inside = [s for s in held.spans if s.kind == "work" and graph.start_s <= s.start_s and s.end_s <= graph.end_s]
        assert len(inside) > 3
        assert all(s.flows == () and s.step == graph.step for s in inside)


def test_an_asynchronous_device_without_timeline_shows_steps_alone() -> None:
    running = LLM(
        plugin=Emulator("emulator:0?seed=3"), model=str(tiny.checkpoint("narrow")), plugins=tiny.PLUGINS, invariant=True,
        instruments=(Trace(),),
    ).engine  # fmt: skip
    held = served(running)
    assert held.device_times == BOUND
    assert {s.kind for s in held.spans if s.side == DEVICE} == {"step"}


def test_work_of_building_the_engine_is_left_out() -> None:
    """Graphs were captured, and warmed up, before the recording began."""
    running = made("emulator-0", Trace())
    built = len(running.device.timeline().spans)  # type: ignore[attr-defined]
    held = served(running)
    assert built > 0
    assert all(s.step > 0 for s in held.spans if s.side == DEVICE)


@pytest.mark.parametrize("kind", ["reference", "emulator-1"])
def test_programs_that_are_bound_anew_are_recorded(kind: str) -> None:
    """As after a weight update that moved an address; binding and capturing them is no part of any step."""
    running = made(kind, Trace())
    old = running.runner.programs["greedy"]["target"]
    running.runner.rebind()
    assert running.instruments[Trace].finish().spans == ()
    held = served(running)
    assert {"argmax", "linear"} <= {s.name for s in held.spans if s.kind == "call"}
    assert ("graph step" in {s.name for s in held.spans}) == (running.runner.graphs is not None)
    assert running.runner.programs["greedy"]["target"].entries[0].launch is not old.entries[0].launch


# -- nothing is paid when it is off -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["reference", "lazy-1", "emulator-1"])
def test_a_trace_that_is_off_records_nothing_and_can_be_turned_on(kind: str) -> None:
    running = made(kind, Trace(on=False))
    trace = running.instruments[Trace]
    assert not any(vars(running.points).values())
    assert served(running).spans == ()
    trace.start()
    held = served(running)
    trace.stop()
    assert not any(vars(running.points).values())
    assert {"step", "stage", "call"} <= {s.kind for s in held.spans}
    served(running)
    assert trace.finish() == held, "what is served behind it is not recorded"
    trace.start()
    again = served(running)
    assert Counter(s.name for s in again.spans if s.side == HOST) == Counter(s.name for s in held.spans if s.side == HOST)


def test_a_trace_of_stages_alone_leaves_device_and_launches() -> None:
    running = made("reference", Trace(calls="none"))
    assert running.runner.device is bare(running.device)
    programs = [program for parts in running.runner.programs.values() for program in parts.values()]
    bound = [e.launch for program in (*programs, *running.runner.writes.values()) for e in program.entries]
    assert not any("instruments" in launch.__module__ for launch in bound)
    assert {s.kind for s in served(running).spans} == {"step", "stage"}


@pytest.mark.parametrize(("kind", "recorded"), [("reference", True), ("lazy-1", False), ("emulator-1", False)])
def test_immediate_calls_are_those_of_a_device_that_computes_in_them(kind: str, recorded: bool) -> None:
    held = served(made(kind, Trace(calls="immediate")))
    assert any(s.kind == "call" for s in held.spans) == recorded


def test_recording_changes_no_text() -> None:
    texts = []
    for trace in (None, Trace()):
        running = made("reference", trace)
        running.add((1, 2, 3), SamplingParams(max_new_tokens=30, temperature=0.8, seed=5))
        while running.has_work:
            running.step()
        texts.append([(o.token_ids, o.rounds) for o in running.poll()])
        assert trace is None or trace.finish().spans
    assert texts[0] == texts[1]


# -- the file -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["reference", "lazy-1", "emulator-1"])
def test_every_launched_step_says_how_much_it_verified_and_drafted(kind: str, tmp_path: Path) -> None:
    with deciding(lambda limits: Listed((3, 0, 1), limits.num_drafts)):
        running = made(kind, Trace())
    held, totals = served(running), running.totals
    running.close()
    write(tmp_path / "run.json", held)
    for recording in (held, read(tmp_path / "run.json")):
        widths = recording.widths
        assert widths.keys() == stages(recording, "launch").keys()
        assert [widths[step].num_drafts for step in (1, 2, 3, 4)] == [3, 0, 1, 3]
        assert [width.window for width in widths.values()] == [4, *(width.num_drafts + 1 for width in widths.values())][:-1]
        assert summary(recording)["drafts_per_step"] == totals.drafts_per_step


def test_steps_whose_drafts_nobody_wants_made_none() -> None:
    running = made("reference", Trace())
    running.add((1, 5, 9), SamplingParams(max_new_tokens=6, ignore_eos=True, max_drafts=0))
    while running.has_work:
        running.step()
    assert {width.num_drafts for width in running.instruments[Trace].finish().widths.values()} == {0}
    running.close()


def test_the_file_is_a_chrome_trace(recording: tuple[str, Recording], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write(file, recording[1])
    document = json.loads(file.read_text())
    events = document["traceEvents"]
    assert document["displayTimeUnit"] == "ms"
    assert Counter(e["ph"] for e in events).keys() == {"M", "X", "s", "f"}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {HOST, DEVICE}
    for event in (e for e in events if e["ph"] != "M"):
        assert (event["pid"], event["tid"]) in named
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
    complete = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and isinstance(e["args"]["step"], int) for e in complete)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events)
    begun = {(e["pid"], e["tid"], e["ts"]) for e in complete}
    for flow, end in ends.items():
        assert starts[flow]["ts"] <= end["ts"]
        assert end["bp"] == "e"  # bound to the span that encloses it, which begins there
        assert {(e["pid"], e["tid"], e["ts"]) for e in (starts[flow], end)} <= begun


def test_a_file_reads_back_as_it_was(recording: tuple[str, Recording], tmp_path: Path) -> None:
    held, file = recording[1], tmp_path / "run.json"
    write(file, held)
    back = read(file)
    assert (back.device_times, back.about, back.widths) == (held.device_times, held.about, held.widths)
    origin = held.spans[0].start_s
    for old, new in zip(held.spans, back.spans, strict=True):
        assert (new.start_s, new.end_s) == pytest.approx((old.start_s - origin, old.end_s - origin), abs=1e-9)
        same = ("side", "lane", "kind", "name", "step", "stage", "rows", "flows")
        assert [getattr(new, name) for name in same] == [getattr(old, name) for name in same]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no JSON", "is no valid JSON, got Expecting value"),
        ("[]", "holds a JSON list, wanted a JSON object"),
        ("{}", "is no timeline of polydraft (KeyError: 'otherData')"),
        ('{"otherData": {"schema": "polydraft.timeline/9"}, "traceEvents": []}', "another schema"),
        ('{"otherData": {"schema": "polydraft.timeline/1", "device_times": ""}, "traceEvents": [{"ph": "X"}]}', "KeyError"),
        (b"\xff\xfe", "is no valid JSON, got 'utf-8' codec"),
    ],
)
def test_another_file_is_refused_in_one_sentence(content: str | bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="make one with polydraft generate --trace FILE") as caught:
        read(file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_files_that_cannot_be_opened(tmp_path: Path, recording: tuple[str, Recording]) -> None:
    with pytest.raises(ConfigError, match="is missing, wanted a JSON file; make one with"):
        read(tmp_path / "nowhere.json")
    for save in (write, write_html, write_png):
        arguments = (tmp_path / "no" / "folder.x", recording[1])
        with pytest.raises(ConfigError, match="cannot be written, got No such file"):
            save(*arguments)  # type: ignore[operator]


# -- figures ------------------------------------------------------------------------------------------------------------
def span(start: float, end: float, *, side: int = DEVICE, kind: str = "work", name: str = "x", step: int = 1) -> Span:
    return Span(side, "lane", kind, name, start, end, step)


def test_idle_share_is_of_the_union() -> None:
    spans = [span(0, 4), span(1, 2), span(3, 5), span(9, 10), span(0, 100, side=HOST)]
    assert busy_seconds(spans[:4]) == 6
    assert idle_share(spans) == pytest.approx(0.4)
    assert idle_share([spans[-1]]) is None
    assert idle_share([span(3, 3)]) == 0


@pytest.mark.parametrize(("device_times", "launch"), [(EXACT, 4.0), (BOUND, 6.0)])
def test_a_stage_is_counted_without_the_stages_inside_it(device_times: str, launch: float) -> None:
    """By hand: a step of 20 s whose launch takes 10, 4 of them in the upload and 2 in a call; a synchronous call is the
    device's time and not the host's."""
    host = [
        ("step", "step", 0, 20), ("stage", "plan", 1, 3), ("stage", "launch", 3, 13), ("stage", "upload", 4, 8),
        ("call", "x", 9, 11), ("stage", "collect", 13, 17), ("stage", "wait", 14, 16), ("stage", "commit", 17, 19),
        ("stage", "output", 20, 21),
    ]  # fmt: skip
    spans = tuple(span(start, end, side=HOST, kind=kind, name=name) for kind, name, start, end in host)
    steps = host_seconds(Recording(spans, device_times, {}))
    assert steps == {1: {"plan": 2, "upload": 4, "launch": launch, "wait": 2, "collect": 2, "commit": 2, "output": 1, "other": 2}}
    assert by_stage(steps)["launch"].median == launch


def test_a_step_that_was_not_applied_has_no_figures() -> None:
    spans = (span(0, 1, side=HOST, kind="stage", name="launch"),)
    assert host_seconds(Recording(spans, BOUND, {})) == {}
    assert summary(Recording(spans, BOUND, {}))["drafts_per_step"] == []
    assert summary(Recording(spans, BOUND, {}))["host_us_per_step"] is None


def test_operations_are_counted_once(recording: tuple[str, Recording]) -> None:
    kind, held = recording
    found = operations(held)
    assert sum(count for count, _ in found.values()) == sum(s.side == DEVICE and s.kind != "graph" for s in held.spans)
    assert (set(found) == {"step"}) == kind.startswith("lazy")


def test_the_summary_has_every_stage(recording: tuple[str, Recording]) -> None:
    figures = summary(recording[1])
    assert set(figures["host_us_by_stage"]) == {*HOST_STAGES, "other"}
    assert figures["steps"] == len(stages(recording[1], "commit"))
    assert figures["drafts_per_step"] == [0, 0, 0, figures["steps"]]
    assert 0 <= figures["device_idle_share"] < 1


# -- pictures -----------------------------------------------------------------------------------------------------------
def test_a_picture_shows_whole_steps_from_the_middle(recording: tuple[str, Recording]) -> None:
    held = recording[1]
    spans, start, end = middle(held.spans, 2)
    numbers = sorted(stages(held, "launch"))
    first = (len(numbers) - 2) // 2
    for step in numbers[first : first + 2]:
        assert start <= stages(held, "launch")[step].start_s <= stages(held, "commit")[step].end_s <= end
    assert len(spans) < len(held.spans)
    assert picture(held, 2).arrows


def test_a_page_is_whole_and_well_formed(recording: tuple[str, Recording], tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    write_html(file, recording[1], 3)
    page = file.read_text()
    assert "http://" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "https://" not in page
    assert "<script" not in page
    drawing = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    boxes = [e for e in drawing if e.tag.endswith("rect")]
    assert len(boxes) > 20
    assert all(next(iter(box)).tag.endswith("title") for box in boxes)
    assert all(float(box.get("width", "0")) > 0 and float(box.get("x", "-1")) >= 0 for box in boxes)


def test_a_png_is_drawn(recording: tuple[str, Recording], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "run.png"
    write_png(file, recording[1], 3)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 10_000


def test_a_png_without_matplotlib_is_refused(
    recording: tuple[str, Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="a PNG needs matplotlib"):
        write_png(tmp_path / "run.png", recording[1])


def test_a_recording_without_steps_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no step that was launched"):
        write_html(tmp_path / "run.html", Recording((), BOUND, {}))
