"""What surrounds the command: outputs that are closed or full, Ctrl-C at any time, pipes, and packages that misbehave.

Nobody is told of a bug for what he can mend.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.demo import demo_model_path
from polydraft.errors import CheckpointError, PluginError
from polydraft.models.config_file import read_json_object
from polydraft.plugins.default_backend import default_backend
from polydraft.plugins.plugins import Plugins
from tests.support.depth import deep, first

PROGRAM = "from polydraft.cli import main; main()"
GENERATE = ("generate", "x", "--backend", "reference", "--max-new-tokens", "2")
FULL = Path("/dev/full")
full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


def run(*arguments: str, program: str = PROGRAM, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run(command, text=True, check=False, timeout=60, **given)  # type: ignore[call-overload, no-any-return]


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence on standard error."""
    (line,) = done.stderr.split("\n\n")[-1].strip().splitlines()  # click begins a line of its own behind ^C
    assert "this is a bug" not in line
    return line


# -- outputs ------------------------------------------------------------------------------------------------------------
@full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [("contracts", "linear", "--json"), ("--version",)], ids=" ".join)
def test_a_full_output_is_told(command: tuple[str, ...], unbuffered: str) -> None:
    with FULL.open("w") as out:
        done = run(*command, stdout=out, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 1
    assert "No space left on device; make room" in said(done)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_nobody_reads_ends_quietly(unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = run("contracts", "linear", "--json", stdout=write, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_closed_output_is_what_its_user_wants() -> None:
    done = run(*GENERATE, stdout=None, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


@full
def test_a_timeline_without_room_is_no_wrong_option() -> None:
    done = run(*GENERATE, "--trace", str(FULL))
    assert done.returncode == 1
    assert "/dev/full cannot be written, got No space left on device; make room" in said(done)


# -- inputs -------------------------------------------------------------------------------------------------------------
def test_a_line_of_many_brackets_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("[" * 100_000)
    done = run("generate", "--prompts", str(file))
    assert done.returncode == 2
    assert f"{file} line 1 is no valid JSON, got " in said(done)


def test_keys_that_are_no_text(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="the extra `serve` is not installed")
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe\x00")
    done = run("serve", "--api-key-file", str(file))
    assert done.returncode == 2
    assert "is no text in UTF-8" in said(done)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read, got a pipe or a device"):
        read_json_object(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("length", "status", "wanted"),
    [(10**15, 2, "; give --max-model-len"), deep((10**9, 1, "--max-num-seqs, --max-batched-tokens or --max-model-len"))],
)
def test_a_length_that_no_machine_has_names_the_option_that_helps(tmp_path: Path, length: int, status: int, wanted: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model_path(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length}))
    command = ("generate", "x", "--backend", "reference", "--num-blocks", "64", "--max-num-seqs", "4000", "--model", str(model))
    done = run(*command)
    assert done.returncode == status
    assert wanted in said(done)


# -- interrupts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", first(1, ["polydraft.cli", "click", "numpy"]))
def test_ctrl_c_during_imports_is_a_sentence(module: str) -> None:
    program = f"""
import sys
class Pressed:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Pressed())
from polydraft.__main__ import main
main()
"""
    done = run(*GENERATE, program=program)
    assert (done.returncode, done.stdout) == (130, "")
    assert said(done) == "polydraft: interrupted before there was a result"


# -- plugins ------------------------------------------------------------------------------------------------------------
EXITS = "import sys\nsys.exit(7)\n"
EXITS_LATER = """
import sys
from polydraft import hookimpl

@hookimpl
def polydraft_parameters():
    sys.exit(7)
"""


@pytest.mark.parametrize("source", [EXITS, EXITS_LATER], ids=["import", "hook"])
def test_a_plugin_that_ends_the_program_is_named(tmp_path: Path, source: str) -> None:
    plugin = tmp_path / "ender.py"
    plugin.write_text(source)
    done = run(*GENERATE, "--plugin", str(plugin))
    assert done.returncode == 1
    assert "ender" in said(done)
    assert "SystemExit: 7" in said(done)


def test_what_ends_the_program_anywhere_else_is_named_as_well(tmp_path: Path) -> None:
    program = """
import sys
from polydraft.cli import main
from polydraft.engine import Engine
def step(self):
    sys.exit(7)
Engine.step = step
main()
"""
    done = run(*GENERATE, program=program)
    assert done.returncode == 1
    assert "<string>:6, in step ended the program with status 7" in said(done)


def test_a_package_that_takes_the_name_of_a_backend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be passed over, and everybody had the reference, which is slow."""
    (tmp_path / "evil.py").write_text("")
    info = tmp_path / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polydraft.backends]\ncpu = evil\ncuda = evil\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert default_backend().name in ("cuda", "cpu")
    for name in ("cuda", "cpu"):
        with pytest.raises(PluginError, match=rf"several packages register '{name}' .*evil \(evil\).*; uninstall all but one"):
            Plugins.load(name)
    done = run(
        "generate", "x", env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    )
    assert done.returncode == 1
    assert "evil (evil)" in said(done)
