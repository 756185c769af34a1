"""Where there is no compiler, a note that says why takes the place of the compiled kernels, and what is built is built once (the
rest: test_distributions.py)."""

import os
import subprocess
import sys
import tempfile
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


def test_an_editable_installation_takes_what_the_last_one_has_built_of_the_same(tmp_path: Path):
    pytest.importorskip("setuptools", reason="setuptools is not installed here; the build of the wheel brings its own")
    project = copy_project(tmp_path / "source")
    package, calls, version = project / "backends/cpu" / FOLDER, tmp_path / "calls", tmp_path / "version"
    compiler = tmp_path / "compiler"  # makes what it is asked for, and counts
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec cat {version}\nprintf x >> {calls}\n'
        'while [ "$1" != -o ]; do shift; done\nprintf made > "$2"\n',
        encoding="utf-8",
    )
    compiler.chmod(0o755)
    version.write_text("1", encoding="utf-8")

    def built(*options: str, base: Path | None = None, **changes: str) -> int:
        """Calls of the compiler. `base`: where it builds, a folder of its own if None, as pip has it."""
        calls.write_text("", encoding="utf-8")
        base = base or Path(tempfile.mkdtemp(dir=tmp_path))
        environment = {**os.environ, "CC": str(compiler), "CXX": str(compiler), **changes}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(base), "--build-temp", str(base), *options]
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return len(calls.read_text(encoding="utf-8"))

    def changes(file: Path) -> None:
        file.write_text(f"{file.read_text(encoding='utf-8')}\n", encoding="utf-8")

    everything = len(list((package / "src").glob("*.cpp"))) + 1
    made = package / library.PATH.name
    assert (built("--inplace"), built("--inplace"), made.read_text(encoding="utf-8")) == (everything, 0, "made")
    assert built() == everything, "a wheel is made of sources alone"
    for one in (next((package / "src").glob("*.h")), project / "setup.py", version):
        changes(one)
        assert built("--inplace") == everything, one
    made.unlink()
    assert built("--inplace", base=tmp_path / "kept") == everything
    assert built("--inplace", base=tmp_path / "kept", CFLAGS="-O1") == everything
    assert built("--inplace", CFLAGS="-O1") == 0
