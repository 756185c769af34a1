"""Every extra alone, from the wheel and from the source distribution, each in an empty environment of its own.

A row installs as a user would, asks `polydraft doctor`, generates one text, uses what the extra brings, and sees what it does not
bring refused by the name of the extra that would. Commands run among files with the names of modules. An extra of pyproject.toml
is a row here, or one of those that say why not; the interpreters that the metadata names are rows as well.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from polydraft import LLM, SamplingParams
from tests.packaging.conftest import Distributions, Installation, clean_environ, installation_of, run
from tests.support.project import pyproject
from tests.support.surroundings import serving, set_traps

pytestmark = pytest.mark.timeout(900)  # environments, an index, and up to a gigabyte of libraries

PROMPT, LENGTH = "def f(x):", 12
TEXT = ("generate", PROMPT, "--draft-tokens", "3", "--max-new-tokens", str(LENGTH), "--ignore-eos", "--json")
BROUGHT: dict[str, tuple[str, ...]] = {
    "none": (), "cuda": ("cuda",), "paddle": ("paddle",), "custom-device": ("paddle",), "serve": ("serve",),
    "grammar": ("grammar",), "conform": ("conform",), "docs": ("docs",), "dev": ("dev", "serve"),
    "ray": ("ray", "serve"),
}  # fmt: skip
"""Extra to what works with it alone."""
RESOLVED = ("test", "all", "nccl")
"""Extras of gigabytes: pip finds a set of packages for them here, and `make test` installs what is in them."""
ELSEWHERE = {"paddle-gpu": "paddlepaddle-gpu", "xpu": "paddlepaddle-xpu"}
"""Extras whose package is on an index of Paddle's own, and is to be refused by name where that is not given."""
REFUSED: dict[str, tuple[str, ...]] = {
    "cuda": ("generate", "x", "--backend", "cuda"),
    "paddle": ("generate", "x", "--backend", "paddle"),
    "serve": ("serve", "--port", "0"),
    "grammar": ("generate", "x", "--backend", "reference", "--regex", "[0-9]+"),
    "ray": ("serve", "--ray"),
}
"""What an extra brings to a command that is refused without it."""
VENDOR = """from polydraft.conformance.vendor import Conformance


class TestReference(Conformance):
    backend = "reference"
"""
COMPILE = """import os, tempfile
os.environ["POLYDRAFT_CACHE_DIR"] = tempfile.mkdtemp(dir=".")
from polydraft_cuda import compiler
source = next(path for path in compiler.all_sources() if path.stem == "rows")
print(len(compiler.compile_source(source, defines=compiler.act("f32"), arch="sm_90")))
"""


@dataclass(frozen=True)
class Place:
    """An environment with pip of its own, and a working directory of traps beside it."""

    environment: Installation
    traps: Path

    @classmethod
    def create(cls, folder: Path, interpreter: str | Path) -> Place:
        run(interpreter, "-m", "venv", folder / "venv", cwd=folder)
        return cls(installation_of(folder / "venv"), set_traps(folder / "traps"))

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self._attempt("pip", "--disable-pip-version-check", *arguments, "--quiet")

    def install(self, distribution: Path, extra: str) -> None:
        done = self.pip("install", f"{distribution}[{extra}]" if extra != "none" else distribution)
        assert done.returncode == 0, done.stderr

    def polydraft(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._attempt("polydraft", *arguments)

    def answer(self, *arguments: str) -> Any:
        """What a command of polydraft prints as JSON."""
        done = self.polydraft(*arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def ids(self, *options: str) -> list[int]:
        ids: list[int] = self.answer(*TEXT, *options)["requests"][0]["token_ids"]
        return ids

    def backends(self) -> dict[str, Any]:
        """Backend to its row in `doctor`."""
        return {row["name"]: row for row in self.answer("doctor", "--json")["backends"]}

    def _attempt(self, command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        program = [str(self.environment.scripts / command), *map(str, arguments)]
        return subprocess.run(program, cwd=self.traps, env=clean_environ(), capture_output=True, text=True, check=False)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Removed at once: an environment may take a gigabyte."""
    yield Place.create(tmp_path, sys.executable)
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="session")
def wanted() -> list[int]:
    """The text as this checkout's reference has it."""
    with_drafts = LLM(backend="reference", draft_tokens=3, max_num_seqs=1)
    (output,) = with_drafts.generate([PROMPT], SamplingParams(max_new_tokens=LENGTH, ignore_eos=True))
    return list(output.token_ids)


@pytest.fixture(scope="session")
def archives(distributions: Distributions) -> Iterator[Distributions]:
    """pip keeps the wheel that it builds from a source distribution, for the further rows; later sessions have no use for it."""
    yield distributions
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "cache", "remove", "polydraft", cwd=Path("/"))


# -- what an extra brings -------------------------------------------------------------------------------------------------
def cuda_works(place: Place, wanted: list[int]) -> None:
    """The text where there is a GPU; a kernel compiled by the extra's own compiler where there is none."""
    row = place.backends()["cuda"]
    if row["available"]:
        assert place.ids("--backend", "cuda") == wanted
        return
    assert "install the extra" not in row["reason"]
    assert "driver" in row["reason"]
    assert int(place.environment.python(COMPILE)) > 1000, "bytes of machine code"


def paddle_works(place: Place, wanted: list[int]) -> None:
    row = place.backends()["paddle"]
    assert (row["available"], row["reason"]) == (True, "")
    assert "cpu" in row["devices"]
    assert place.ids("--backend", "paddle") == wanted


def serve_works(place: Place, wanted: list[int]) -> None:
    command = place.environment.scripts / "polydraft"
    asked = {"model": "mimo-tiny-python", "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    text = place.answer(*TEXT)["requests"][0]["text"]
    with serving(command, "--backend", "reference", cwd=place.traps, env=clean_environ()) as url:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"] == text


def grammar_works(place: Place, wanted: list[int]) -> None:
    text = place.answer(*REFUSED["grammar"], "--max-new-tokens", "4", "--json")["requests"][0]["text"]
    assert text.isdigit()


def ray_works(place: Place, wanted: list[int]) -> None:
    """There is no cluster here, which only Ray can say."""
    done = place.polydraft(*REFUSED["ray"])
    assert done.returncode == 2, done.stderr
    assert "start one with `ray start --head`" in done.stderr


def conform_works(place: Place, wanted: list[int]) -> None:
    tests = place.traps.with_name("vendor")
    tests.mkdir()
    (tests / "test_reference.py").write_text(VENDOR, encoding="utf-8")
    pytest_ = place.environment.scripts / "pytest"
    assert "passed" in run(pytest_, "-q", "-k", "L1 or swiglu", "-p", "no:cacheprovider", tests, cwd=tests)


def programs_work(*commands: Sequence[str]) -> Callable[[Place, list[int]], None]:
    """Programs of packages that polydraft itself does not call."""

    def work(place: Place, wanted: list[int]) -> None:
        for program, *arguments in commands:
            run(place.environment.scripts / program, *arguments, cwd=place.environment.folder)

    return work


WORKS: dict[str, Callable[[Place, list[int]], None]] = {
    "cuda": cuda_works,
    "paddle": paddle_works,
    "serve": serve_works,
    "grammar": grammar_works,
    "ray": ray_works,
    "conform": conform_works,
    "docs": programs_work(["mkdocs", "--version"]),
    "dev": programs_work(["ruff", "--version"], ["mypy", "--version"], ["lint-imports", "--help"], ["pre-commit", "--version"]),
}


# -- rows -----------------------------------------------------------------------------------------------------------------
def test_every_extra_is_a_row():
    extras = set(pyproject()["project"]["optional-dependencies"])
    assert {*BROUGHT, *RESOLVED, *ELSEWHERE} - {"none"} == extras
    assert {name for brought in BROUGHT.values() for name in brought} == set(WORKS)
    assert set(REFUSED) <= set(WORKS)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("extra", BROUGHT)
def test_an_extra_alone(
    archives: Distributions, place: Place, wanted: list[int], kind: Literal["wheel", "sdist"], extra: str
) -> None:
    place.install(getattr(archives, kind), extra)
    hold(place, wanted, extra)


def hold(place: Place, wanted: list[int], extra: str) -> None:
    """What is asked of a row."""
    assert (done := place.pip("check")).returncode == 0, done.stdout
    rows = place.backends()
    assert [rows[name]["reason"] for name in ("cpu", "reference")] == ["", ""], "the CPU's are there in any case"
    assert place.ids() == place.ids("--backend", "reference") == wanted
    for name, command in REFUSED.items():
        if name not in BROUGHT[extra]:
            done = place.polydraft(*command)
            assert done.returncode == 2, done.stderr
            assert f"pip install 'polydraft[{name}]'" in done.stderr
            assert name not in rows or f"pip install 'polydraft[{name}]'" in rows[name]["reason"], "the backend's line"
    for name in BROUGHT[extra]:
        WORKS[name](place, wanted)


@pytest.mark.deep
def test_what_a_refusal_says_to_install_is_what_lacked(archives: Distributions, place: Place, wanted: list[int]) -> None:
    """Also while polydraft itself is on no index: the one that is installed will do."""
    place.install(archives.wheel, "none")
    command = re.search("pip (install '.+')", place.polydraft(*REFUSED["grammar"]).stderr)
    assert command
    assert (done := place.pip(*shlex.split(command[1]))).returncode == 0, done.stderr
    grammar_works(place, wanted)


@pytest.mark.deep
@pytest.mark.parametrize("extra", RESOLVED)
def test_an_extra_of_gigabytes_has_a_solution(archives: Distributions, place: Place, extra: str) -> None:
    done = place.pip("install", "--dry-run", f"{archives.wheel}[{extra}]")
    assert done.returncode == 0, done.stderr


@pytest.mark.deep
@pytest.mark.parametrize("extra", ELSEWHERE)
def test_an_extra_of_another_index_is_refused_by_name(archives: Distributions, place: Place, extra: str) -> None:
    done = place.pip("install", f"{archives.wheel}[{extra}]")
    assert done.returncode != 0
    assert f"No matching distribution found for {ELSEWHERE[extra]}<3.4,>=3.2" in done.stderr
    assert not (place.environment.packages / "polydraft").exists(), "nothing by halves"


@pytest.mark.deep
@pytest.mark.parametrize(
    "version",
    [line.rpartition(" ")[2] for line in pyproject()["project"]["classifiers"] if "Python :: 3." in line],
)
def test_each_python_that_the_metadata_names(archives: Distributions, tmp_path: Path, wanted: list[int], version: str) -> None:
    interpreter = found(version) or ""
    if not interpreter:
        pytest.skip(f"no python{version} on the path here")
    place = Place.create(tmp_path, interpreter)
    place.install(archives.wheel, "none")
    hold(place, wanted, "none")
    shutil.rmtree(tmp_path)


def found(version: str) -> str | None:
    """An interpreter of this version; what only stands for one, as pyenv's, does not run."""
    for folder in os.get_exec_path():
        if path := shutil.which(f"python{version}", path=folder):
            done = subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True, check=False)
            if done.returncode == 0:
                return path
    return None
