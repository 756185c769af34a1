"""The tutorial on proposers: its code is that of the package, its commands do what it says, its files are as long as it says."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs.pages import fences, read, rows, section
from tests.support.project import ROOT

PAGE = read(ROOT / "docs" / "tutorials" / "add_a_proposer.md")
PACKAGE = ROOT / "plugins" / "examples" / "eagle"


@pytest.mark.parametrize("code", [fence.text for fence in fences(PAGE, "py")], ids=lambda code: code.splitlines()[0])
def test_code_is_that_of_the_package(code: str) -> None:
    indented = [textwrap.indent(code, " " * 4 * depth) for depth in range(3)]
    assert any(text in read(file) for text in indented for file in PACKAGE.rglob("*.py"))


def test_lines_are_counted() -> None:
    table = {file.strip("`"): int(lines) for _, file, lines in rows(section(PAGE, "What you write"))}
    files = {*PACKAGE.glob("polydraft_eagle/*.py"), *PACKAGE.glob("tests/*.py")}
    assert table == {file.relative_to(ROOT).as_posix(): len(read(file).splitlines()) for file in files}


def run(heading: str, tmp_path: Path) -> str:
    """The commands of a section, in one shell of this interpreter's environment; what they print."""
    script = "".join(fence.text for fence in fences(section(PAGE, heading), "console"))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    command = ["bash", "-euc", script.replace("my-draft-model", str(tmp_path / "my-draft-model"))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.deep
def test_commands_of_the_first_section(tmp_path: Path) -> None:
    printed = run("Try it", tmp_path)
    drafted, plain = printed.split("backend cpu | K = 3" if "backend cpu" in printed else "backend reference | K = 3")
    text = [part.partition("24 tokens |")[0].strip() for part in (drafted, plain)]
    assert text[0] == text[1] != ""


@pytest.mark.deep  # they run tests that `make test` runs as well
def test_commands_of_the_tests(tmp_path: Path) -> None:
    assert run("5. Tests", tmp_path).count(" passed, ") == 2
