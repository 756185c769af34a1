"""Draws docs/images/demo.svg: the terminal of a real run of `polydraft generate`, as `make demo` shows it.

Runs the installed command on a pseudo-terminal of its own and lets rich draw what was written there; nothing is typeset by
hand, so the picture changes only with the program, the demo model, or the speed of the machine (the last figure).
Needs a system with pseudo-terminals (Linux, macOS).

    .venv/bin/python tools/make_demo_picture.py
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
COMMAND = ("polydraft", "generate", "def fibonacci(n):", "--draft-tokens", "3")
WIDTH = 116
"""Columns: the line of figures fits into one."""


def shown_by(arguments: tuple[str, ...]) -> str:
    """What a terminal with colours gets from polydraft with `arguments`; standard error, with its progress, is dropped."""
    terminal, end = pty.openpty()
    colourful = {"TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "CI")} | colourful
    program = [sys.executable, "-c", "from polydraft.cli import main; main()", *arguments]
    process = subprocess.Popen(program, stdin=end, stdout=end, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT)
    os.close(end)
    written = b""
    while chunk := _read(terminal):
        written += chunk
    os.close(terminal)
    if process.wait():
        raise SystemExit(f"polydraft {shlex.join(arguments)} ended with status {process.returncode}; run it to see why")
    return written.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    """The next bytes; none once the other end is closed, which Linux reports as an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def draw(command: tuple[str, ...], output: str) -> str:
    """The SVG of a terminal window with the command and its output. No font is fetched: a reader's monospace font serves."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text(f"$ {shlex.join(command)}", style="bold"))
    console.print(Text.from_ansi(output))
    svg = console.export_svg(title="make demo", theme=MONOKAI, unique_id="demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code,", "").replace("arial", "sans-serif")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    """Run, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "demo.svg")
    out: Path = parser.parse_args().out
    out.write_text(draw(COMMAND, shown_by(COMMAND[1:])), encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
