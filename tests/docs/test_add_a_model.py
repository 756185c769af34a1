"""docs/tutorials/add_a_model.md against the package it goes through: its code, its lines, and what it says to run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.sampling.verify import Verifier
from polydraft.step.batch import Batch
from tests.docs.pages import code_spans, fences, read, rows, section
from tests.support.project import ROOT

PAGE = read(ROOT / "docs" / "tutorials" / "add_a_model.md")
PACKAGE = ROOT / "plugins" / "examples" / "gated-delta"
SHOWN = re.findall(r'^```py title="(\S+)" linenums="(\d+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("file", "line", "text"), SHOWN, ids=[f"{file}-{line}" for file, line, _ in SHOWN])
def test_code_is_that_of_the_package(file: str, line: str, text: str) -> None:
    begin = int(line) - 1
    assert "".join(read(PACKAGE / file).splitlines(keepends=True)[begin : begin + text.count("\n")]) == text


def test_all_code_has_its_lines() -> None:
    assert len(SHOWN) == len(list(fences(PAGE, "py"))) == 8


def test_lines_are_counted() -> None:
    counted = {row[0].partition("`")[2].rstrip("`"): int(row[2]) for row in rows(PAGE)}
    assert counted == {file.name: len(read(file).splitlines()) for file in (PACKAGE / "polydraft_gated_delta").glob("*.py")}
    assert f"The tests are {len(read(PACKAGE / 'tests' / 'test_gated_delta.py').splitlines())} lines." in PAGE


def test_slot_columns_are_those_of_every_engine() -> None:
    listed = [name for first, _ in rows(section(PAGE, "What a cache may rely on")) for name in code_spans(first)]
    assert sorted(listed) == sorted(column.name for column in (*Batch.columns, *Verifier.columns))


@pytest.mark.deep
def test_commands_run(tmp_path: Path) -> None:
    """All of them, in one shell, in a folder that has the repository's plugins and takes what is written."""
    (tmp_path / "plugins").symlink_to(ROOT / "plugins")
    environment = {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
    }
    script = "".join(fence.text for fence in fences(PAGE, "console"))
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 tokens |" in done.stdout
    assert " passed, " in done.stdout
    assert "what was asked for holds" in done.stdout


@pytest.mark.parametrize("page", ["index.md", "plugins.md", "checkpoints.md"])
def test_pages_lead_to_it(page: str) -> None:
    assert "(tutorials/add_a_model.md)" in read(ROOT / "docs" / page)
