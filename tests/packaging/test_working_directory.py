"""The command from directories in which files and folders have the names of modules: everything runs, children included."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from polydraft.cli import COMMANDS as EVERY
from tests.support.depth import among
from tests.support.project import ROOT
from tests.support.surroundings import serving, set_traps

POLYDRAFT = str(Path(sys.executable).with_name("polydraft"))
CASE = ("--contract", "swiglu", "--case", "one_column")
GENERATE = ("generate", "def f(x):", "--backend", "reference", "--max-new-tokens", "4")
COMMANDS = (
    ("--version",),
    ("doctor",),
    ("contracts", "linear"),
    (*GENERATE, "--trace", "OUT/steps.json", "--sanitize"),
    ("replay", "MADE/calls.safetensors", "--backend", "reference"),
    ("trace", "MADE/steps.json", "--html", "OUT/steps.html"),
    ("new-backend", "mychip", "--into", "OUT"),
    ("mtp-check", "--backend", "cpu", "--max-new-tokens", "4"),
    ("bench", "--backend", "reference", "--repeats", "1", "--new-tokens", "8"),
    ("conform", "--matrix", "reference,reference=queued", *CASE),
    ("conform", "reference", "--enable-variants"),
    ("conform", "reference", "--prove"),
)
"""Those that `test_all_commands` tries beside the one that is always tried. MADE has a record and a timeline, OUT is empty."""
NOTHING = 4
"""The status of `--enable-variants` where there are none."""


PLACES = ("the parent of a clone", "the root", "traps")


@pytest.fixture(params=among(PLACES[-1:], PLACES))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A working directory: one with a clone called polydraft, which is a namespace package then; none of ours; one of traps."""
    if request.param == "the root":
        return Path("/")
    if request.param == "the parent of a clone":
        (tmp_path / "polydraft").symlink_to(ROOT)
        return tmp_path
    return set_traps(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands read, in a folder that nobody works in."""
    folder = tmp_path_factory.mktemp("made")
    files = ("--trace", "steps.json", "--record", "calls.safetensors", "--record-weights")
    done = run(folder, *GENERATE, *files)
    assert done.returncode == 0, done.stderr
    return folder


def run(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([POLYDRAFT, *args], cwd=directory, capture_output=True, text=True, check=False)


def test_the_kit_runs_its_children(directory: Path):
    done = run(directory, "conform", "reference", *CASE)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.skipif(find_spec("zmq") is None or find_spec("starlette") is None, reason="the extra `serve` is not installed")
def test_the_server_runs_its_engine(directory: Path):
    with serving(POLYDRAFT, "--backend", "reference", cwd=directory):
        pass


def test_no_command_is_left_out():
    assert {command[0] for command in COMMANDS} - {"--version"} | {"serve"} == set(EVERY)


@pytest.mark.deep
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_all_commands(directory: Path, made: Path, tmp_path_factory: pytest.TempPathFactory, command: tuple[str, ...]):
    folders = {"MADE": str(made), "OUT": str(tmp_path_factory.mktemp("out"))}
    done = run(directory, *(re.sub("MADE|OUT", lambda name: folders[name[0]], part) for part in command))
    assert done.returncode == (NOTHING if "--enable-variants" in command else 0), done.stderr
