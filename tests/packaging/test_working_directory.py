"""The command from directories in which files and folders have the names of modules: everything runs, children included."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.depth import among
from tests.support.project import ROOT

POLYDRAFT = str(Path(sys.executable).with_name("polydraft"))
TRAPS = ("queue.py", "logging.py", "json.py", "polydraft/__init__.py", "numpy/__init__.py")
CASE = ("--contract", "swiglu", "--case", "one_column")
COMMANDS = (
    ("--version",),
    ("doctor",),
    ("contracts", "linear"),
    ("generate", "def f(x):", "--backend", "reference", "--max-new-tokens", "4"),
    ("bench", "--backend", "reference", "--repeats", "1", "--new-tokens", "8"),
    ("conform", "--matrix", "reference,reference=queued", *CASE),
    ("conform", "reference", "--enable-variants"),
    ("conform", "reference", "--prove"),
)
"""Those that `test_all_commands` tries beside the one that is always tried."""
NOTHING = 4
"""The status of `--enable-variants` where there are none."""


PLACES = ("the parent of a clone", "the root", "traps")


@pytest.fixture(params=PLACES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A working directory: one with a clone called polydraft, which is a namespace package then; none of ours; one of traps."""
    if request.param == "the root":
        return Path("/")
    if request.param == "the parent of a clone":
        (tmp_path / "polydraft").symlink_to(ROOT)
        return tmp_path
    for name in TRAPS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise SystemExit('{name} of the working directory was imported')\n")
    return tmp_path


def run(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([POLYDRAFT, *args], cwd=directory, capture_output=True, text=True, check=False)


def test_the_kit_runs_its_children(directory: Path):
    done = run(directory, "conform", "reference", *CASE)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("directory", among(PLACES[-1:], PLACES), indirect=True)
@pytest.mark.skipif(find_spec("zmq") is None or find_spec("starlette") is None, reason="the extra `serve` is not installed")
def test_the_server_runs_its_engine(directory: Path):
    command = [POLYDRAFT, "serve", "--port", "0", "--json", "--backend", "reference", "--max-num-seqs", "1"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            assert said, server.stderr.read() if server.stderr else ""
            assert ready(json.loads(said)["url"]), "its engine did not become ready"
        finally:
            server.terminate()


def ready(url: str) -> bool:
    """Wait until the server says that its engine is ready."""
    for _ in range(600):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/ready", timeout=20) as answer:
            if answer.status == 200:
                return True
        time.sleep(0.05)
    return False


@pytest.mark.deep
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_all_commands(directory: Path, command: tuple[str, ...]):
    done = run(directory, *command)
    assert done.returncode == (NOTHING if "--enable-variants" in command else 0), done.stderr
