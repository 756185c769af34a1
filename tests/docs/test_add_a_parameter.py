"""docs/tutorials/add_a_parameter.md against the package it goes through: its code, its lines, and what it says to run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.docs.pages import read, rows
from tests.support.project import ROOT, pyproject

PAGE = read(ROOT / "docs" / "tutorials" / "add_a_parameter.md")
PACKAGE = ROOT / "plugins" / "examples" / "top-n-sigma"
BLOCKS = re.findall(r"^```(\w+)([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SHOWN = [
    (title, int(line), text) for _, info, text in BLOCKS for title, line in re.findall(r'title="(\S+)" linenums="(\d+)"', info)
]
SCRIPTS = [text for language, info, text in BLOCKS if language == "py" and not info]
COMMANDS = [line for language, _, text in BLOCKS if language == "console" for line in text.splitlines()]


def run(command: list[str], folder: Path) -> None:
    path = os.pathsep.join([str(PACKAGE), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("file", "line", "text"), SHOWN, ids=[f"{file}-{line}" for file, line, _ in SHOWN])
def test_code_is_that_of_the_package(file: str, line: int, text: str) -> None:
    lines = read(PACKAGE / file).splitlines(keepends=True)
    assert "".join(lines[line - 1 : line - 1 + text.count("\n")]) == text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda text: text.splitlines()[0])
def test_scripts_run(script: str, tmp_path: Path) -> None:
    """In processes of their own: they register a contract, which no other test is to meet."""
    run([sys.executable, "-c", script], tmp_path)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("polydraft ")])
@pytest.mark.deep
def test_commands_run(line: str, tmp_path: Path) -> None:
    (prompts,) = (text for language, info, text in BLOCKS if 'title="prompts.jsonl"' in info)
    (tmp_path / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    run([sys.executable, "-m", *shlex.split(line)], tmp_path)


def test_all_of_it_is_shown_and_tried() -> None:
    assert {file.rpartition("/")[2] for file, _, _ in SHOWN} == {row[0].partition("`")[2].rstrip("`") for row in rows(PAGE)}
    assert (len(SCRIPTS), len(COMMANDS)) == (4, 7)
    others = [line for line in COMMANDS if not line.startswith("polydraft ")]
    folder = PACKAGE.relative_to(ROOT).as_posix()
    assert others == [f"pip install -e {folder}", f"python -m pytest {folder}/tests"]
    paths = pyproject()["tool"]["pytest"]["ini_options"]["testpaths"]
    assert any(fnmatchcase(f"{folder}/tests", path) for path in paths), "which the suite runs as well"


def test_lines_are_counted() -> None:
    for row in rows(PAGE):
        name = row[0].partition("`")[2].rstrip("`")
        file = PACKAGE / name if name == "pyproject.toml" else PACKAGE / "polydraft_top_n_sigma" / name
        assert len(read(file).splitlines()) == int(row[2]), name
    said = re.search(r"has them in (\d+) lines", PAGE)
    assert said is not None
    assert int(said[1]) == len(read(PACKAGE / "tests" / "test_top_n_sigma.py").splitlines())
