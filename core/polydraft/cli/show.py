"""Writes to standard output and standard error for people: colours, tables, and progress.

The commands write through it; it knows whether standard output is a terminal that shows colours, a plain one, or a pipe. What is
written is decided by the commands, and JSON does not go through here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from polydraft import environment
from polydraft.loading import Loading, Stage, at_intervals, said, unheard

if TYPE_CHECKING:
    from rich.console import Console

_VISIBLE = {**{c: 0x2400 + c for c in range(0x20) if c not in (9, 10)}, 0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
"""Control characters to what a terminal shows in their place: generated text must not steer the terminal."""


class Screen:
    """Standard output. Text goes to a pipe exactly as it is; a terminal gets control characters as symbols, and colours
    unless `color` is False, NO_COLOR is set or it has none."""

    def __init__(self, *, color: bool = True) -> None:
        self._out = sys.stdout
        encoding = (self._out.encoding or "").lower().replace("-", "")
        if encoding != "utf8" and hasattr(self._out, "reconfigure"):
            self._out.reconfigure(errors="replace")
        self._console = console(color=color)
        self.is_terminal = self._console.is_terminal
        self.has_color = self.is_terminal and not self._console.no_color and self._console.color_system is not None
        self._codes: dict[str, tuple[str, str]] = {}

    def write(self, text: str, style: str = "") -> None:
        """Write at once, also to a pipe."""
        if self.is_terminal:
            text = text.translate(_VISIBLE)
        if style and self.has_color and text:
            before, after = self._code(style)
            text = f"{before}{text}{after}"
        self._out.write(text)
        self._out.flush()

    def line(self, text: str = "", style: str = "") -> None:
        """Write a line."""
        self.write(text, style)
        self.write("\n")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Write a table; cells wrap at the width of the terminal (80 columns into a pipe)."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(*head, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        with self._console.capture() as captured:
            self._console.print(table)
        self._out.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")

    def _code(self, style: str) -> tuple[str, str]:
        """The characters that switch a style on and off on this terminal."""
        if style not in self._codes:
            from rich.segment import Segment, Segments
            from rich.style import Style

            with self._console.capture() as captured:
                self._console.print(Segments([Segment("x", Style.parse(style))]), end="")
            before, _, after = captured.get().partition("x")
            self._codes[style] = before, after
        return self._codes[style]


def console(*, color: bool = True, stderr: bool = False) -> Console:
    """A rich console on standard output or standard error."""
    from rich.console import Console

    return Console(stderr=stderr, no_color=not color or environment.no_color(), highlight=False, soft_wrap=False)


def watched() -> bool:
    """Whether somebody looks at standard error: a terminal that is not a CI system's."""
    return sys.stderr is not None and sys.stderr.isatty() and not environment.is_ci()


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show on standard error that something takes a while."""
    if not watched():
        yield
        return
    with console(stderr=True).status(what):
        yield


@contextmanager
def loading(model: str) -> Iterator[Loading]:
    """Show on standard error how far an engine is that is built with `model`, by a function for it to tell: bars on a terminal,
    a line every ten seconds where that is a pipe, nothing in a CI system."""
    if environment.is_ci():
        yield unheard
        return
    if not watched():

        def line(stage: Stage, done: int, total: int) -> None:
            with suppress(OSError):  # nobody has to read it
                click.echo(f"polydraft: {said(stage, done, total)}", err=True)

        yield at_intervals(line)
        return
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

    read = DownloadColumn(binary_units=True), TransferSpeedColumn()
    weights, graphs = (
        Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console(stderr=True), transient=True)
        for columns in (read, (MofNCompleteColumn(),))
    )
    weights.add_task(f"loading {model}", total=None)
    graphs.add_task("capturing steps of all sizes", total=None)
    shown = weights

    def told(stage: Stage, done: int, total: int) -> None:
        nonlocal shown
        if stage == "graphs" and shown is weights:
            weights.stop()
            graphs.start()
            shown = graphs
        shown.update(shown.task_ids[0], completed=done, total=total)

    weights.start()
    try:
        yield told
    finally:
        shown.stop()


class Progress:
    """A bar on standard error that counts requests and tokens; nothing for a single request or where nobody looks."""

    def __init__(self, total: int, num_tokens: Callable[[], int]) -> None:
        """`num_tokens` is read whenever the bar is drawn, from a thread of its own."""
        self._bar: Any = None
        if total > 1 and watched():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
            from rich.text import Text

            class Tokens(ProgressColumn):
                """The count as it is now."""

                def render(self, task: Task) -> Text:
                    del task
                    return Text(f"requests, {num_tokens():,} tokens")

            columns = BarColumn(), MofNCompleteColumn(), Tokens(), TimeElapsedColumn()
            self._bar = Progress(*columns, console=console(stderr=True), transient=True, redirect_stdout=False)
            self._task = self._bar.add_task("", total=total)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar for a while."""
        if not self._bar:
            yield
            return
        self._bar.start()
        try:
            yield
        finally:
            self._bar.stop()

    def advance(self) -> None:
        """One more request has ended."""
        if self._bar:
            self._bar.advance(self._task)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the bar away while something is written to the same terminal."""
        if not self._bar:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()
