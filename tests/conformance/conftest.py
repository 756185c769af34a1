"""What tests of the kit share: its checks in this process, for tests of what the command says and not of who survives what."""

from __future__ import annotations

import json
import subprocess
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polydraft.conformance import isolation
from polydraft.plugins.plugins import Plugins


class Here(AbstractContextManager["Here"]):
    """In the place of `subprocess.Popen`: does here, at once, what the kit's child would do."""

    returncode = 0

    def __init__(self, command: list[str], **options: Any) -> None:
        *_, lines, job = command
        with Path(lines).open("w", encoding="utf-8") as file:
            isolation._child(file, json.loads(job))

    def __exit__(self, *error: object) -> None:
        pass

    def poll(self) -> int:
        return self.returncode

    def kill(self) -> None:
        pass


def load_here(command: list[str], **options: Any) -> SimpleNamespace:
    """In the place of `subprocess.run`: what the child runs that only loads a backend."""
    *_, job, loaded = command
    with suppress(Exception):
        Plugins.load(**json.loads(job))
    return SimpleNamespace(returncode=int(loaded))


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting two processes takes longer than most of what tests ask of them. What the children are there for is shown in
    test_command.py and test_enabling.py by those that die or hang."""
    double = SimpleNamespace(**{**vars(subprocess), "Popen": Here, "run": load_here})
    monkeypatch.setattr(isolation, "subprocess", double)
