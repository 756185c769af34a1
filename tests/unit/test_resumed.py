"""The plugin of `make deep`: a run that was stopped goes on with the tests that have not passed at this commit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os, pytest

@pytest.fixture
def ends(request):
    yield
    assert os.environ["BROKEN"] != "end"

@pytest.mark.parametrize("case", ["a b", "[c]"])
def test_good(case): pass

def test_call(): assert os.environ["BROKEN"] != "call"

def test_end(ends): pass

def test_skipped(): pytest.skip("always")
"""


def git(folder: Path, *what: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *what], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A commit with tests."""
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Test")
    return tmp_path


def run(folder: Path, broken: str = "", *options: str) -> tuple[dict[str, int], str]:
    """How many tests ended how, and all that was said."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.resumed", "-p", "no:randomly", *options]
    environment = {**os.environ, "BROKEN": broken, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    said = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout
    return {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", said.splitlines()[-1].partition(" in ")[0])}, said


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "2"), marks=pytest.mark.deep)], ids=["one process", "several"])
def test_what_passed_is_left_out_until_the_commit_is_another(folder: Path, options: tuple[str, ...]) -> None:
    assert run(folder, "call", *options)[0] == {"failed": 1, "passed": 3, "skipped": 1}
    counts, said = run(folder, "", *options)
    assert counts == {"passed": 1, "skipped": 1, **({} if options else {"deselected": 3})}
    assert re.search(r"resumed: 3 tests have passed at [0-9a-f]{12}-[0-9a-f]{12} and are left out", said)
    assert "passed" not in run(folder, "", *options)[0]
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "Another")
    assert run(folder, "", *options)[0] == {"passed": 4, "skipped": 1}


def test_a_test_that_fails_at_its_end_has_not_passed(folder: Path) -> None:
    assert run(folder, "end")[0] == {"passed": 4, "skipped": 1, "error": 1}
    assert run(folder, "")[0] == {"passed": 1, "skipped": 1, "deselected": 3}


def test_nothing_is_noted_of_what_is_no_commit(folder: Path) -> None:
    (folder / "test_it.py").write_text(TESTS + "\n", encoding="utf-8")
    for _ in range(2):
        counts, said = run(folder)
        assert counts == {"passed": 4, "skipped": 1}
        assert "nothing is noted or left out" in said
