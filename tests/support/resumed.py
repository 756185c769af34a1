"""A pytest plugin with which a run goes on where it was stopped: what passed at this commit, with these packages, is left out.

`make deep` takes hours and loads it; a machine that is switched off, or a first failure that was not the code's, should not cost
what has passed. Tests that pass are noted in pytest's cache, a file for each commit and set of installed packages, so that what
is left out has run with the very same code. Where the working tree differs from its commit, or there is none, nothing is noted
or left out.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import pytest


def state_of(folder: Path) -> str:
    """The commit of a working tree, and a digest of Python and the packages that it is tested with; "" where files that git
    knows differ from the commit, or git knows none."""
    commit, changes = (_git(folder, *what) for what in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")))
    if not commit or changes is None or changes:
        return ""
    packages = sorted({f"{one.name}=={one.version}" for one in importlib.metadata.distributions()})
    digest = hashlib.sha256("\n".join((platform.python_version(), *packages)).encode()).hexdigest()
    return f"{commit[:12]}-{digest[:12]}"


def _git(folder: Path, *what: str) -> str | None:
    """What it says; None where it cannot say."""
    try:
        said = subprocess.run(["git", *what], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return said.stdout.strip() if said.returncode == 0 else None


class Resumed:
    """Notes what passes, and leaves out what has. `state`: `state_of` the working tree."""

    def __init__(self, file: Path | None, state: str, *, notes: bool) -> None:
        """`file`: where tests are noted, one a line; `notes`: whether this process does so, which only one of several does."""
        self._file, self._state, self._notes = file, state, notes
        self._passed = set(file.read_text(encoding="utf-8").splitlines()) if file is not None and file.exists() else set[str]()
        self._failed = set[str]()
        self._left_out = 0

    def pytest_report_header(self) -> str:
        """How many have passed before."""
        if self._file is None:
            return "resumed: nothing is noted or left out, since the working tree is no commit as it is"
        return f"resumed: {len(self._passed)} tests have passed at {self._state} and are left out"

    @pytest.hookimpl(trylast=True)  # behind the selection by `-m` and `-k`
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has passed."""
        left_out = [item for item in items if item.nodeid in self._passed]
        if left_out:
            items[:] = [item for item in items if item.nodeid not in self._passed]
            config.hook.pytest_deselected(items=left_out)
        self._left_out = len(left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that has passed from its set-up to its end."""
        if self._file is None or not self._notes:
            return
        if report.outcome != "passed":
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            with self._file.open("a", encoding="utf-8") as noted:
                noted.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Take part in the session. With pytest-xdist every process leaves out the same tests, and the one that reports notes."""
    state = state_of(config.rootpath)
    file = config.cache.mkdir("resumed") / state if state and config.cache is not None else None
    config.pluginmanager.register(Resumed(file, state, notes=not hasattr(config, "workerinput")), "resumed")
