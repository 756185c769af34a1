"""Owns what `--backend auto` means: the first backend of a short list that is installed and usable here, and why it is that one.

The engine asks when no backend is named, `doctor` shows the answer. It opens no device, and it never chooses silently: what was
passed over, and why, is part of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from polydraft.errors import PluginError
from polydraft.plugin_checks import BACKEND
from polydraft.plugins import Loaded, find

PREFERRED = ("cpu", "reference")
"""Best first; the last one is part of core and always there."""


@dataclass(frozen=True)
class Default:
    """The backend that is used when none is named. `passed_over`: one sentence for each better one that cannot be used."""

    name: str
    passed_over: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Why it is this one, for `--explain` and `doctor`."""
        return "; ".join(("the embedded default", *self.passed_over))


def default_backend() -> Default:
    """Choose it."""
    passed_over: list[str] = []
    for name in PREFERRED[:-1]:
        problem = unusable(name)
        if not problem:
            return Default(name, tuple(passed_over))
        passed_over.append(f"{name} is not used: {problem}")
    return Default(PREFERRED[-1], tuple(passed_over))


def unusable(name: str) -> str:
    """Why a backend cannot be used here; "" where it can."""
    if name not in find(BACKEND.group):
        return "it is not installed; reinstall polydraft"
    try:
        info = Loaded.from_entry(BACKEND, name).info
    except PluginError as error:
        return str(error)
    assert info is not None, "a backend says who it is when it is loaded"
    return "" if info.available else info.reason
