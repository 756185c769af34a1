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
    package, calls = project / "backends/cpu" / FOLDER, tmp_path / "calls"
    compiler = tmp_path / "compiler"  # makes what it is asked for, and counts
    compiler.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text('made')\n"
        f"with open({str(calls)!r}, 'a') as file: file.write('x')\n",
        encoding="utf-8",
    )
    compiler.chmod(0o755)

    def built(**changes: str) -> int:
        """Calls of the compiler."""
        calls.write_text("", encoding="utf-8")
        environment = {**os.environ, "CC": str(compiler), "CXX": str(compiler), **changes}
        base = Path(tempfile.mkdtemp(dir=tmp_path))  # as pip has it
        folders = "--build-lib", str(base), "--build-temp", str(base)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", *folders]
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert (package / library.PATH.name).read_text(encoding="utf-8") == "made"
        return len(calls.read_text(encoding="utf-8"))

    sources = len(list((package / "src").glob("*.cpp")))
    assert (built(), built()) == (sources + 1, 0)
    (package / library.PATH.name).unlink()
    assert (built(), built()) == (sources + 1, 0)
    header = next((package / "src").glob("*.h"))
    header.write_text(f"{header.read_text(encoding='utf-8')}// changed\n", encoding="utf-8")
    assert (built(), built()) == (sources + 1, 0)
    assert (built(CFLAGS="-O1"), built(CFLAGS="-O1"), built()) == (sources + 1, 0, sources + 1)
