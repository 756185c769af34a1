"""Where there is no compiler, a note that says why takes the place of the compiled kernels (the rest: test_distributions.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft_cpu import library
from tests.packaging.conftest import copy_project

pytestmark = pytest.mark.timeout(600)  # building and installing wait for an index
FOLDER = "polydraft_cpu"


def test_without_a_compiler_the_build_goes_on_and_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("setuptools", reason="setuptools is not installed here; the build of the wheel brings its own")
    project = copy_project(tmp_path / "source")
    for name in (library.PATH.name, library.NOTE.name):
        (project / "backends/cpu" / FOLDER / name).unlink(missing_ok=True)
    environment = {**os.environ, "CC": "no-such-compiler", "CXX": "no-such-compiler"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "built")]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(library, "PATH", tmp_path / "built" / FOLDER / library.PATH.name)
    monkeypatch.setattr(library, "NOTE", tmp_path / "built" / FOLDER / library.NOTE.name)
    assert not library.PATH.exists()
    assert "no-such-compiler" in library.NOTE.read_text(encoding="utf-8")
    assert "the compiled kernels are missing: the build failed with" in library.missing()
    assert "install a C++17 compiler" in library.missing()
