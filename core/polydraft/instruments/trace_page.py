"""The page of a recording: one HTML file with picture, legend and tables, and nothing that it would have to fetch.

`polydraft trace --html` writes it. It never measures and lays nothing out: `trace_view` does.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polydraft.instruments.output_file import writing
from polydraft.instruments.timeline import HOST, Recording
from polydraft.instruments.trace_figures import summary
from polydraft.instruments.trace_view import HIGH, LEFT, LOW, SHOWN_STEPS, WIDTH, Box, Picture, picture, tops


def svg(drawn: Picture) -> str:
    """The picture; every box says what it is when pointed at."""
    upper, bottom = tops(drawn.rows)
    scale = (WIDTH - LEFT - 8) / max(drawn.seconds, 1e-9)
    parts = [
        f'<svg viewBox="0 0 {WIDTH:.0f} {bottom + 26:.0f}" xmlns="http://www.w3.org/2000/svg" font-size="11" role="img">',
        '<defs><marker id="head" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">',
        '<path d="M0 0L6 3L0 6z" class="arrow"/></marker></defs>',
    ]
    for row, top in zip(drawn.rows, upper, strict=True):
        height = LOW if row.low else HIGH
        name = f"{'host' if row.side == HOST else 'device'} {row.name}"
        parts.append(f'<text x="{LEFT - 8:.0f}" y="{top + height / 2 + 4:.1f}" text-anchor="end">{html.escape(name)}</text>')
        parts += [_rect(box, LEFT + scale * box.start_s, top, scale * (box.end_s - box.start_s), height) for box in row.boxes]
    for arrow in drawn.arrows:
        x, y = LEFT + scale * arrow.at_s, upper[arrow.row] + HIGH
        to_x, to_y = LEFT + scale * arrow.to_s, upper[arrow.to_row] - 1
        curve = f"M{x:.1f} {y:.1f}C{x:.1f} {y + 14:.1f} {to_x:.1f} {to_y - 14:.1f} {to_x:.1f} {to_y:.1f}"
        parts.append(f'<path d="{curve}" class="flow" marker-end="url(#head)"/>')
    for mark in _ticks(drawn.seconds):
        x = LEFT + scale * mark
        parts.append(f'<path d="M{x:.1f} 0V{bottom:.0f}" class="tick"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{_time(mark)}</text>')
    return "".join((*parts, "</svg>"))


def _rect(box: Box, x: float, y: float, width: float, height: float) -> str:
    tip = html.escape(box.tip)
    shape = f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.5):.2f}" height="{height:.0f}" fill="{box.colour}">'
    text = ""
    if width > 6.6 * len(box.text) + 4:
        text = f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" class="in">{html.escape(box.text)}</text>'
    return f"{shape}<title>{tip}</title></rect>{text}"


def _ticks(seconds: float) -> Iterator[float]:
    """Round times, five to twelve of them."""
    step = 1e-9
    for factor in (2, 2.5, 2) * 12:
        if seconds / step <= 12:
            break
        step *= factor
    yield from (step * i for i in range(int(seconds / step) + 1))


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:g} ms" if seconds >= 1e-3 else f"{round(1e6 * seconds, 3):g} us"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>polydraft timeline: {title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #222; --soft: #666; --line: #ddd; --page: #fff; --card: #fafafa }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e6e6; --soft: #aaa; --line: #444; --page: #17191c; --card: #202327 }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1440px; padding: 0 1.2rem; color: var(--ink);
  background: var(--page) }}
h1 {{ font-size: 1.5rem; margin-bottom: .2rem }} h2 {{ font-size: 1.1rem; margin: 0 0 .4rem }}
p {{ color: var(--soft); margin: .2rem 0 }}
.cards {{ display: flex; gap: 1rem; flex-wrap: wrap; margin: 1rem 0 }}
.card {{ background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .5rem 1rem; min-width: 8rem }}
.card b {{ display: block; font-size: 1.3rem }} .card span {{ color: var(--soft) }}
.picture {{ border: 1px solid var(--line); border-radius: 8px; padding: .6rem; background: var(--card); overflow-x: auto }}
svg {{ width: 100%; min-width: 900px; height: auto; display: block }} svg text {{ fill: var(--ink) }}
svg .in {{ fill: #111; text-anchor: middle; pointer-events: none }} rect {{ stroke: var(--card); stroke-width: .4 }}
rect:hover {{ stroke: var(--ink); stroke-width: 1.5 }}
.flow {{ fill: none; stroke: var(--ink); stroke-width: 1.1; opacity: .75 }} .arrow {{ fill: var(--ink) }}
.tick {{ stroke: var(--line); stroke-width: .6 }}
.legend {{ display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .5rem 0 0; color: var(--soft) }}
.legend i {{ display: inline-block; width: .9em; height: .9em; border-radius: 2px; margin-right: .35em; vertical-align: -.08em }}
.tables {{ display: flex; gap: 3rem; flex-wrap: wrap; margin-top: 1.4rem }}
table {{ border-collapse: collapse }} td, th {{ padding: .15rem .7rem; text-align: right; border-bottom: 1px solid var(--line) }}
td:first-child, th:first-child {{ text-align: left }} th {{ color: var(--soft); font-weight: 500 }}
</style></head><body>
<h1>{title}</h1><p>{about}</p>
<div class="cards">{cards}</div>
<div class="picture">{picture}<div class="legend">{legend}</div></div>
<p>{shown} Point at a box to read it; open the recording itself in Perfetto to zoom.</p>
<div class="tables"><div><h2>Host, by stage</h2>{stages}</div><div><h2>Device, by operation</h2>{kernels}</div></div>
</body></html>
"""


def write_html(path: Path, recording: Recording, steps: int = SHOWN_STEPS) -> None:
    """One page without any other file. Raises `ConfigError` where it cannot be written, or nothing can be drawn."""
    drawn, figures = picture(recording, steps), summary(recording)
    about = recording.about
    page = PAGE.format(
        title=html.escape(f"{about.get('model', '')} on {about.get('backend', '')}"),
        about=html.escape(_about(recording)),
        cards="".join(
            f'<div class="card"><b>{value}</b><span>{html.escape(name)}</span></div>' for name, value in _cards(figures)
        ),
        picture=svg(drawn),
        legend="".join(f'<span><i style="background:{colour}"></i>{stage}</span>' for stage, colour in drawn.legend.items()),
        shown=html.escape(shown_sentence(drawn)),
        stages=_table(("stage", "median us", "10 %", "90 %"), _stage_rows(figures)),
        kernels=_table(("operation", "count", "total us", "mean us"), _operation_rows(figures)),
    )
    with writing(path):
        path.write_text(page, encoding="utf-8")


def shown_sentence(drawn: Picture) -> str:
    """What a picture shows, below it."""
    length = _time(round(drawn.seconds, 5))
    return f"Steps from the middle of the recording, {length}; arrows lead from a step's first launch to its execution."


def _about(recording: Recording) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in recording.about.items() if name not in {"model", "backend"})
    return f"{settings}; device times {recording.device_times}"


def _cards(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    idle, host = figures["device_idle_share"], figures["host_us_per_step"]
    yield "steps", str(figures["steps"])
    if idle is not None:
        yield "of the time the device idles", f"{idle:.1%}"
    if host is not None:
        yield "host time a step (median)", f"{host['median']:.0f} us"


def _stage_rows(figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for stage, values in figures["host_us_by_stage"].items():
        yield (stage, *(f"{values[name]:.1f}" for name in ("median", "p10", "p90")))


def _operation_rows(figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, found in figures["device_operations"].items():
        yield name, str(found["count"]), f"{found['total_us']:.0f}", f"{found['total_us'] / found['count']:.1f}"


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{cells}</table>"
