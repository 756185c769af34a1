"""The compiled kernels: in a wheel for every Python where there is a compiler, elsewhere replaced by a note that says why."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from polydraft_cpu import library
from tests.packaging.conftest import Distributions, Installation, copy_project

pytestmark = pytest.mark.timeout(600)  # building and installing wait for an index
FOLDER = "polydraft_cpu"


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="there is no C++ compiler (g++ or c++) here")
def test_a_wheel_holds_the_library_and_fits_every_python(distributions: Distributions):
    assert "-py3-none-" in distributions.wheel.name
    assert not distributions.wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(distributions.wheel) as wheel:
        names = set(wheel.namelist())
        assert f"{FOLDER}/{library.PATH.name}" in names
        assert f"{FOLDER}/{library.NOTE.name}" not in names
        assert wheel.getinfo(f"{FOLDER}/{library.PATH.name}").file_size < 2_000_000


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="there is no C++ compiler (g++ or c++) here")
def test_an_installed_wheel_computes_on_it(installed: Installation):
    code = "from polydraft import LLM; print(LLM(max_num_seqs=1).engine.resolved.backend)"
    assert installed.python(code).strip() == "cpu"


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
