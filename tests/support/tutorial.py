"""The tutorial as steps: what `docs/backends/tutorial.md` has a reader write, run and try, in the order of the page.

It reads the blocks of the page, and can do all of it in the current folder. `tests/mission.sh` runs it as a program of the
environment to walk in, and `tests/docs/test_reference.py` imports it. polydraft has to be installed already.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PAGE = Path(__file__).parents[2] / "docs" / "backends" / "tutorial.md"
PACKAGE = "polydraft-mychip"
"""Folder that the paths of the page's files begin in."""
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\S+\.py)\n")
_STATUS = re.compile(r"\s*# status (\d)$")


@dataclass(frozen=True)
class Step:
    """`run`: a command that ends with `status`. `write`: a file of the package. `try`: Python to run."""

    kind: Literal["run", "write", "try"]
    text: str
    path: str = ""
    status: int = 0


def steps(page: str) -> Iterator[Step]:
    """Every step, in order."""
    for language, text in _BLOCK.findall(page):
        if language == "console":
            for line in text.splitlines():
                status = _STATUS.search(line)
                yield Step("run", _STATUS.sub("", line), status=int(status[1]) if status else 0)
        elif (file := _FILE.match(text)) is not None:
            yield Step("write", text[file.end() :], file[1])
        else:
            yield Step("try", text)


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def walk() -> None:
    """Take every step in the current folder, with the interpreter that runs this."""
    scripts = Path(sys.executable).parent
    for step in steps(PAGE.read_text(encoding="utf-8")):
        if step.kind == "write":
            (Path(PACKAGE) / step.path).write_text(step.text, encoding="utf-8")
            _tell(f"wrote {step.path}")
            continue
        command = [sys.executable, "-c", step.text] if step.kind == "try" else shlex.split(step.text)
        if command[0] == "pip":
            if "polydraft" in command[-1] and PACKAGE not in command[-1]:
                continue  # it is what the walk is about
            command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *command[1:]]
        elif command[0] == "polydraft":
            command[0] = str(scripts / "polydraft")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        _tell(f"{done.returncode}  {step.text.splitlines()[0]}")
        if done.returncode != step.status:
            sys.exit(f"wanted status {step.status}, got {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    walk()
