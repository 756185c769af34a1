"""The picture of a recording: the layout that every format shares, and the PNG where matplotlib is installed.

`polydraft trace FILE` draws with it. It never measures: it lays out the spans of a few steps, host above device, one strip of
numbered steps on either side and an arrow from each launch to what it started, so that overlap is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polydraft.errors import ConfigError
from polydraft.instruments.output_file import writing
from polydraft.instruments.timeline import DEVICE, HOST, Recording, Span
from polydraft.instruments.trace_figures import summary

COLOURS = {
    "plan": "#4e79a7", "upload": "#86bcb6", "launch": "#a0cbe8", "wait": "#d7d7d7", "collect": "#8c6d8f", "commit": "#e15759",
    "inputs": "#9c755f", "output": "#ffbe7d", "pack": "#79706e", "target": "#59a14f", "verify": "#f1a340", "snapshot": "#b07aa1",
    "draft": "#edc948", "step": "#76b7b2",
}  # fmt: skip
"""By stage; host stages first."""
STEPS = ("#f2f2f2", "#dfe6ee")
"""Steps of even and of odd number."""
SHOWN_STEPS = 6


@dataclass(frozen=True)
class Box:
    """A span as it is drawn: seconds since the picture's left edge, colour, what fits into it, what pointing at it tells."""

    start_s: float
    end_s: float
    colour: str
    text: str
    tip: str


@dataclass(frozen=True)
class Row:
    """One strip of the picture."""

    side: int
    name: str
    boxes: tuple[Box, ...]
    low: bool = False
    """A strip of steps: half as high."""


@dataclass(frozen=True)
class Arrow:
    """From a host row to a device row: indices of rows, seconds since the left edge."""

    row: int
    at_s: float
    to_row: int
    to_s: float


@dataclass(frozen=True)
class Picture:
    """What both formats draw."""

    rows: tuple[Row, ...]
    arrows: tuple[Arrow, ...]
    seconds: float
    legend: dict[str, str]


# -- layout ----------------------------------------------------------------------------------------
def picture(recording: Recording, steps: int = SHOWN_STEPS) -> Picture:
    """Lay out `steps` steps from the middle of a recording, where nothing starts or ends. Raises `ConfigError` for a recording
    without any."""
    shown, origin, end = middle(recording.spans, steps)
    shown = [replace(s, start_s=max(s.start_s, origin) - origin, end_s=min(s.end_s, end) - origin) for s in shown]
    rows = [row for row in (*_host_rows(shown), *_device_rows(shown)) if row.boxes]
    used = {_stage(s) for s in shown}
    legend = {stage: colour for stage, colour in COLOURS.items() if stage in used}
    return Picture(tuple(rows), tuple(_arrows(rows, shown)), end - origin, legend)


def middle(spans: Sequence[Span], steps: int) -> tuple[list[Span], float, float]:
    """The spans that touch the time of `steps` steps from the middle, and that time."""
    launches = {s.step: s for s in spans if s.side == HOST and s.name == "launch"}
    if not launches:
        raise ConfigError(
            "the timeline holds no step that was launched, so there is nothing to draw; record a run that generates"
        )
    numbers = sorted(launches)
    first = max((len(numbers) - steps) // 2, 0)
    chosen = set(numbers[first : first + steps])
    mine = [s for s in spans if s.step in chosen]
    start, end = min(s.start_s for s in mine), max(s.end_s for s in mine)
    return [s for s in spans if s.end_s > start and s.start_s < end], start, end


def _host_rows(spans: Sequence[Span]) -> Iterator[Row]:
    host = [s for s in spans if s.side == HOST]
    yield Row(HOST, "step", tuple(_step_box(s, str(s.step)) for s in host if s.kind == "step"), low=True)
    yield Row(HOST, "stages", tuple(_box(s) for s in host if s.kind == "stage"))  # a stage inside another comes behind it
    yield Row(HOST, "calls", tuple(_box(s) for s in host if s.kind == "call"))


def _device_rows(spans: Sequence[Span]) -> Iterator[Row]:
    """For each lane its steps, its graphs where there are any, and its work."""
    device = [s for s in spans if s.side == DEVICE]
    for lane in dict.fromkeys(s.lane for s in device):
        mine = [s for s in device if s.lane == lane]
        if any(s.kind == "step" for s in mine):
            yield Row(DEVICE, lane, tuple(_step_box(s, str(s.step)) for s in mine))
            continue
        numbers = dict.fromkeys(s.step for s in mine if s.step)
        whole = [[s for s in mine if s.step == number] for number in numbers]
        steps = [replace(each[0], start_s=each[0].start_s, end_s=max(s.end_s for s in each)) for each in whole]
        yield Row(DEVICE, f"{lane}: step", tuple(_step_box(s, str(s.step)) for s in steps), low=True)
        yield Row(DEVICE, f"{lane}: graphs", tuple(_box(s) for s in mine if s.kind == "graph"))
        yield Row(DEVICE, lane, tuple(_box(s) for s in mine if s.kind == "work"))


def _stage(span: Span) -> str:
    """What decides a span's colour: all passes of the draft are one stage."""
    stage = span.name if span.kind == "stage" else span.stage
    return "draft" if "draft" in stage else stage


def _box(span: Span) -> Box:
    name = {"launch": f"launch {span.step}", "commit": f"commit {span.step}", "collect": ""}.get(span.name, span.name)
    rows = f", {span.rows} rows" if span.rows else ""
    tip = f"{span.name}: {1e6 * span.seconds:.1f} us, step {span.step}{rows}"
    # The wait fills the collect around it, whose name would stand behind the other.
    return Box(span.start_s, span.end_s, COLOURS.get(_stage(span), "#bbbbbb"), name, tip)


def _step_box(span: Span, text: str) -> Box:
    tip = f"step {span.step}: {1e6 * span.seconds:.1f} us"
    return Box(span.start_s, span.end_s, STEPS[span.step % 2], text, tip)


def _arrows(rows: Sequence[Row], spans: Sequence[Span]) -> Iterator[Arrow]:
    """From the first call of each step to what it brought about; all others would only hide the picture."""
    ends = {flow: s for s in spans if s.side == DEVICE for flow in s.flows}
    places = {(row.side, row.name): index for index, row in enumerate(rows)}
    seen: set[int] = set()
    for span in (s for s in spans if s.side == HOST and s.flows and s.flows[0] in ends and s.step not in seen):
        seen.add(span.step)
        end = ends[span.flows[0]]
        row = places[HOST, "calls" if span.kind == "call" else "stages"]
        yield Arrow(row, span.start_s, places.get((DEVICE, f"{end.lane}: step"), places[DEVICE, end.lane]), end.start_s)


# -- geometry ---------------------------------------------------------------------------------------
WIDTH, LEFT, HIGH, LOW, GAP = 1400.0, 172.0, 27.0, 15.0, 5.0
"""Units of the picture: its width, room for names, the height of rows and of strips of steps, what is between rows."""


def tops(rows: Sequence[Row]) -> tuple[list[float], float]:
    """Upper edges of the rows and the lower edge of the last; some space between host and device, where arrows pass."""
    found, y, side = [], 4.0, HOST
    for row in rows:
        y += 26.0 if row.side != side else 0.0
        side = row.side
        found.append(y)
        y += (LOW if row.low else HIGH) + GAP
    return found, y


# -- PNG -------------------------------------------------------------------------------------------
def write_png(path: Path, recording: Recording, steps: int = SHOWN_STEPS) -> None:
    """The same picture through matplotlib. Raises `ConfigError` when that is not installed, or as `write_html`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            "a PNG needs matplotlib, which is not installed; run pip install matplotlib, or ask for --html"
        ) from error
    drawn, idle = picture(recording, steps), summary(recording)["device_idle_share"]
    upper, bottom = tops(drawn.rows)
    figure = Figure(figsize=(14, bottom / 46 + 1.5), layout="constrained")
    axes = figure.subplots()
    for row, top in zip(drawn.rows, upper, strict=True):
        height = LOW if row.low else HIGH
        places = [(1e6 * box.start_s, max(1e6 * (box.end_s - box.start_s), 1e-3)) for box in row.boxes]
        axes.broken_barh(places, (top, height), facecolors=[box.colour for box in row.boxes], edgecolors="white", linewidth=0.3)
        for box in row.boxes:
            if (box.end_s - box.start_s) / drawn.seconds > 0.0062 * len(box.text):
                middle_us = 0.5e6 * (box.start_s + box.end_s)
                axes.text(middle_us, top + height / 2, box.text, ha="center", va="center", fontsize=7, clip_on=True)
    for arrow in drawn.arrows:
        tip, tail = (1e6 * arrow.to_s, upper[arrow.to_row]), (1e6 * arrow.at_s, upper[arrow.row] + HIGH)
        axes.annotate("", xy=tip, xytext=tail, arrowprops={"arrowstyle": "->", "lw": 0.8, "color": "#333333"})
    names = [f"{'host' if row.side == HOST else 'device'} {row.name}" for row in drawn.rows]
    axes.set_yticks([top + (LOW if row.low else HIGH) / 2 for row, top in zip(drawn.rows, upper, strict=True)], names, fontsize=8)
    axes.set_ylim(bottom, 0)
    axes.set_xlim(0, 1e6 * drawn.seconds)
    axes.set_xlabel("microseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    about = recording.about
    idled = "" if idle is None else f"; the device idles {idle:.1%} of the time"
    title = f"{about.get('model', '')} on {about.get('backend', '')}, overlap {about.get('overlap', '')}{idled}"
    axes.set_title(f"{title}\ndevice times {recording.device_times}", fontsize=10)
    patches = [Patch(facecolor=colour, label=stage) for stage, colour in drawn.legend.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    with writing(path):
        figure.savefig(path, dpi=110, format="png")
