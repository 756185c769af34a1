"""Two builds, with kernels and without, and two installations, shared by all packaging tests of a session.

The checkout is copied to temporary folders, so that no build leaves anything behind in it and nothing left behind there gets into
a build. pip is used as it is configured and has to be able to install from an index.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.project import ROOT

SETUPTOOLS = 77
"""The oldest that pyproject.toml builds with."""
BUILD_FOLDERS = ("core", "backends", "bench", "docs", "tests", "tools", ".ci", ".github")


@dataclass(frozen=True)
class Distributions:
    """A built source distribution and the wheel that was built from it."""

    sdist: Path
    wheel: Path


@dataclass(frozen=True)
class Installation:
    """A virtual environment that holds what was installed into it and nothing else, not even pip."""

    folder: Path
    scripts: Path
    packages: Path

    def python(self, code: str) -> str:
        """Return what `code` prints when it runs in this environment."""
        return run(self.scripts / "python", "-c", code, cwd=self.folder)

    def install(self, *arguments: str | Path) -> None:
        """Install by this session's pip, which also works where the environment's own Python came with an old one. Without
        byte code: compiling all of NumPy takes longer than the few modules that are then imported."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.scripts / "python")
        run(*pip, "install", "--quiet", "--no-compile", *arguments, cwd=self.folder)


def clean_environ() -> dict[str, str]:
    """The environment without what would let an installation see other packages."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}


def run(*command: str | Path, cwd: Path) -> str:
    """Return the standard output of a command; where it fails, the test fails with all that it printed."""
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=clean_environ(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def copy_project(target: Path) -> Path:
    """Copy what a build reads, and return the copy."""
    target.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for folder in BUILD_FOLDERS:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, target / folder, ignore=ignore)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, target)
    return target


def create_environment(folder: Path) -> Installation:
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    return installation_of(folder)


def installation_of(folder: Path) -> Installation:
    """A virtual environment that is there already."""
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    where = run(scripts / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    return Installation(folder, scripts, Path(where.strip()))


def build(*arguments: str | Path, cwd: Path) -> None:
    """Build without an environment of its own where the session's setuptools will do: an environment takes longer than what is
    built in it. That pyproject.toml names all that a build needs is shown where pip builds the source distribution in one
    (`test_install_matrix.py`, in `make deep`)."""
    newest = importlib.metadata.version("setuptools") if importlib.util.find_spec("setuptools") else "0"
    here = ("--no-isolation",) if int(newest.partition(".")[0]) >= SETUPTOOLS else ()
    run(sys.executable, "-m", "build", *here, *arguments, cwd=cwd)


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Its kernels are not optimised: which takes half the time. The installation that runs these tests has optimised ones."""
    return build_distributions(tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="session")
def without_kernels(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """As where there is no compiler: compiling takes the longest of all."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CC", "CXX"):
            patch.setenv(name, "no-such-compiler")
        return build_distributions(tmp_path_factory.mktemp("without_kernels"))


def build_distributions(base: Path) -> Distributions:
    """A source distribution, and the wheel that is built from it."""
    source = copy_project(base / "source")
    text, changes = re.subn('"-O2"', '"-O0"', (source / "setup.py").read_text(encoding="utf-8"))
    assert changes == 1, "setup.py no longer has the compiler optimise as this fixture expects"
    (source / "setup.py").write_text(text, encoding="utf-8")
    build("--sdist", "--outdir", base / "dist", source, cwd=base)
    (sdist,) = (base / "dist").glob("*.tar.gz")
    shutil.unpack_archive(sdist, base / "unpacked")
    (unpacked,) = (base / "unpacked").iterdir()
    build("--wheel", "--outdir", base / "dist", unpacked, cwd=base)
    (wheel,) = (base / "dist").glob("*.whl")
    return Distributions(sdist, wheel)


@pytest.fixture(scope="session")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    environment = create_environment(tmp_path_factory.mktemp("installed") / "venv")
    environment.install(distributions.wheel)
    return environment


@pytest.fixture(scope="session")
def two_roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with a second import root, joined in pyproject.toml exactly as a backend's root will be."""
    project = copy_project(tmp_path_factory.mktemp("two_roots") / "source")
    package = project / "backends" / "second" / "polydraft_second"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""A second root."""\n', encoding="utf-8")
    (package / "device.py").write_text('NAME = "second"\n', encoding="utf-8")
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    text, changes = re.subn(r'(?m)^where = \["core"', 'where = ["core", "backends/second"', text)
    assert changes == 1, "pyproject.toml no longer lists the import roots as this fixture expects"
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    return project
