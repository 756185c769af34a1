"""The command `polydraft trace`: figures and pictures of a recorded step timeline. It also holds `--trace` of other commands.

It reads what `generate --trace` wrote, and runs no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.options import common

if TYPE_CHECKING:
    from polydraft.engine import Engine

SCHEMA = "polydraft.trace/1"
EXAMPLES = """\b
Examples:
  polydraft trace run.json
  polydraft trace run.json --html run.html --png run.png
  polydraft generate "def f(x):" --trace run.json    (make one; Perfetto opens it, too)
"""


@click.command("trace", epilog=EXAMPLES)
@click.argument("file")
@click.option("--html", metavar="OUT", help="Draw a self-contained page.")
@click.option("--png", metavar="OUT", help="Draw a picture; needs matplotlib.")
@click.option("--steps", type=click.IntRange(min=1), default=6, metavar="N", show_default=True, help="Steps that are drawn.")
@click.option("--no-color", is_flag=True, help="Plain text on a terminal too.")
@common
def command(file: str, html: str | None, png: str | None, steps: int, no_color: bool, as_json: bool) -> int:
    """Show where the time of a run went that was recorded with --trace: host stages, device operations, idle time.

    FILE itself opens in Perfetto and chrome://tracing.
    """
    from polydraft.instruments.output_file import check_distinct
    from polydraft.instruments.trace_figures import summary
    from polydraft.instruments.trace_file import read
    from polydraft.instruments.trace_page import write_html
    from polydraft.instruments.trace_view import write_png

    check_distinct({"FILE": file, "--html": html, "--png": png})
    recording = read(file)
    figures = summary(recording)
    if html:
        write_html(Path(html), recording, steps)
    if png:
        write_png(Path(png), recording, steps)
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, "file": file, "html": html, "png": png, **figures}))
    else:
        _show(figures, [name for name in (html, png) if name], color=not no_color)
    return 0


def _show(figures: dict[str, Any], pictures: list[str], *, color: bool) -> None:
    from polydraft.cli.show import Screen

    screen, idle = Screen(color=color), figures["device_idle_share"]
    screen.line(", ".join(f"{name} {value}" for name, value in figures["about"].items()))
    screen.line(f"{figures['steps']} steps; device times {figures['device_times']}")
    made = {number: count for number, count in enumerate(figures["drafts_per_step"]) if count}
    if idle is not None:
        screen.line(f"the device did nothing for {idle:.1%} of the time between its first and its last operation")
    stages = {stage: values for stage, values in figures["host_us_by_stage"].items() if stage != "wait"}
    if figures["host_us_per_step"]:
        stages["all but the wait"] = figures["host_us_per_step"]
    screen.line()
    screen.table(
        ("host time a step", "median us", "10 %", "90 %"),
        [(stage, *(f"{values[name]:.1f}" for name in ("median", "p10", "p90"))) for stage, values in stages.items()],
    )
    screen.line()
    screen.table(
        ("device operation", "count", "total us", "mean us"),
        [
            (name, str(row["count"]), f"{row['total_us']:.0f}", f"{row['total_us'] / row['count']:.1f}")
            for name, row in figures["device_operations"].items()
        ],
    )
    if len(made) > 1:
        screen.line()
        screen.table(("drafts a step", "steps"), [(str(number), str(count)) for number, count in made.items()])
    for name in pictures:
        screen.line(f"\nwrote {name}")


# -- --trace of other commands ---------------------------------------------------------------------
@contextmanager
def recorded(engine: Engine, file: str | None) -> Iterator[None]:
    """Write what the engine does inside, which was built with a `Trace`, to `file`, also when it ends by an error; None writes
    nothing."""
    if file is None:
        yield
        return
    from polydraft.instruments.trace import Trace
    from polydraft.instruments.trace_file import write

    trace = engine.instruments[Trace]
    try:
        yield
    finally:
        trace.stop()
        write(file, trace.finish())
