"""Decides what `--backend auto` means: the first backend of a short list that is installed and usable here, and why.

The engine calls it when no backend is named, `doctor` shows the answer. It opens no device. The answer includes which backends
were passed over, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from polydraft.errors import PluginError
from polydraft.plugins.checks import BACKEND
from polydraft.plugins.plugins import Loaded, find, identify

ACCELERATORS = ("cuda",)
"""Used where their device is, best first; that it is not there is nothing to warn of."""
EVERYWHERE = ("cpu", "reference")
"""What follows; meant to work on any machine. The last one is part of core and always there."""


@dataclass(frozen=True)
class Default:
    """The backend that is used when none is named. `absent`: one sentence for each accelerator that cannot be used here,
    `broken`: one for each better backend that should work on any machine and does not."""

    name: str
    absent: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def passed_over(self) -> tuple[str, ...]:
        """All better ones."""
        return (*self.absent, *self.broken)

    @property
    def reason(self) -> str:
        """Why it is this one, for `--explain` and `doctor`."""
        first = "the embedded default" if self.name in EVERYWHERE else "its device is there"
        return "; ".join((first, *self.passed_over))


def default_backend() -> Default:
    """Choose it."""
    absent: list[str] = []
    broken: list[str] = []
    for names, passed_over in ((ACCELERATORS, absent), (EVERYWHERE[:-1], broken)):
        for name in names:
            problem = unusable(name)
            if not problem:
                return Default(name, tuple(absent), tuple(broken))
            passed_over.append(f"{name} is not used: {problem}")
    return Default(EVERYWHERE[-1], tuple(absent), tuple(broken))


def unusable(name: str) -> str:
    """Why a backend cannot be used here; "" where it can, and where several packages claim its name: who loads it is told so, and
    nobody has a slower one without a word."""
    entries = find(BACKEND.group).get(name, ())
    if len(entries) != 1:
        return "" if entries else "it is not installed; reinstall polydraft"
    try:
        info = identify(Loaded.from_entry(BACKEND, name))
    except PluginError as error:
        return str(error)
    return "" if info.available else info.reason
