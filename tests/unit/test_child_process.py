"""Children of the product: they import what their parent imports, and how they end is told in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.child_process import ending, executing, last_place, last_words, running

TRAPS = {"queue.py": "raise SystemExit('queue of the working directory')", "logging.py": "raise SystemExit('logging, too')"}


def run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A directory whose files have names that everybody imports."""
    for name, text in TRAPS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "polydraft").mkdir()
    (tmp_path / "polydraft" / "__init__.py").write_text("raise SystemExit('polydraft of the working directory')")
    return tmp_path


def test_nothing_is_imported_from_the_working_directory(trapped: Path):
    source = "import logging, queue, sys, polydraft\nprint(polydraft.__file__, sys.argv[1:], sys.path == PATH)"
    here = f"PATH = {sys.path!r}\n"
    said = run(executing(here + source, "a b", "c"), cwd=trapped)
    import polydraft

    assert said == f"{polydraft.__file__} ['a b', 'c'] True\n"
    assert run(running("polydraft", "--version"), cwd=trapped).startswith("polydraft ")


def test_a_module_runs_as_python_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shown.py").write_text("import sys; print(__name__, sys.argv, __file__)")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(running("shown", "1", "-x")) == f"__main__ {[str(tmp_path / 'shown.py'), '1', '-x']!r} {tmp_path / 'shown.py'}\n"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exit status 0"), (3, "exit status 3"), (-11, "SIGSEGV, Segmentation fault"), (-9, "SIGKILL, Killed"),
        (-int(signal.SIGRTMIN) - 1, f"signal {int(signal.SIGRTMIN) + 1}"),
    ],
)  # fmt: skip
def test_how_a_process_ended(status: int, words: str):
    assert ending(status) == words


DUMP = f"""about to start
a driver speaks
Fatal Python error: Segmentation fault

Thread 0x01 (most recent call first):
  File "/x/waiting.py", line 1 in wait

Current thread 0x02 (most recent call first):
  File "{os.__file__.replace("os.py", "ctypes/__init__.py")}", line 519 in string_at
  File "/y/kernels.py", line 12 in linear
  File "/y/table.py", line 3 in bind

Extension modules: numpy.random (total: 1)
"""


def test_where_it_was_and_what_it_said_last():
    assert (last_place(DUMP), last_words(DUMP)) == ("kernels.py:12, in linear", "a driver speaks")
    assert (last_place("a\n\nb \n"), last_words("a\n\nb \n")) == ("", "b")
    assert (last_place(""), last_words("")) == ("", "")
    own = DUMP.replace('"/y/', f'"{Path(os.__file__).parent}/site-packages/chip/')
    assert last_place(own) == "kernels.py:12, in linear", "installed packages are no library of Python's"
    library = DUMP.replace('"/y/', f'"{Path(os.__file__).parent}/')
    assert last_place(library) == "__init__.py:519, in string_at"
    nowhere = DUMP.partition("Current thread")[0] + "Current thread 0x02 (most recent call first):\n  <no Python frame>\n"
    assert last_place(nowhere) == ""
