"""Decides which of a backend's variants are in use: those that the kit has passed on this device, driver and library.

`Plugins.load` asks it which kernel packs to add, `conform --enable-variants` records its results in it, `doctor` shows the file.
It runs no kernel and does not ask which backend it serves.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from polydraft import environment, json_text
from polydraft.backend import BackendInfo
from polydraft.errors import ConfigError, PluginError

SCHEMA: Final = "polydraft.variants/1"
AGAIN: Final = "delete it, then run polydraft conform BACKEND --enable-variants again"


@dataclass(frozen=True)
class Judgement:
    """What the kit found of one variant. It stands for that device, driver and library, and for that code, alone."""

    backend: str
    variant: str
    runs_with: Mapping[str, str]
    """The backend's `BackendInfo.runs_with` of that day."""
    digests: Mapping[str, str]
    """Of the backend's code and of the variant's."""
    spec: str
    """As `--device` named the device; another of the same kind is served as well."""
    contracts: tuple[str, ...]
    passed: bool
    sentence: str
    """What the checks came to."""
    day: str
    kit: str
    """Version of the kit, and the digest of its lists."""

    @property
    def key(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """What a newer judgement replaces it for."""
        return self.backend, self.variant, tuple(sorted(self.runs_with.items()))

    def changed(self, runs_with: Mapping[str, str], digests: Mapping[str, str]) -> str:
        """What is different from when it was judged; "" where nothing is."""
        for name in sorted({*self.runs_with, *runs_with}):
            was, now = self.runs_with.get(name, "unknown"), runs_with.get(name, "unknown")
            if was != now:
                return f"the {name} was {was or 'unknown'} and is {now or 'unknown'}"
        return next((f"the code of the {name} was another" for name in digests if digests[name] != self.digests.get(name)), "")

    @property
    def describe(self) -> str:
        """Outcome, day, and what it stands for, in a phrase."""
        where = ", ".join(f"{name} {value}" for name, value in sorted(self.runs_with.items()) if value)
        return f"{'passed' if self.passed else 'failed'} on {self.day} ({where}; {self.sentence})"


# -- the file ------------------------------------------------------------------------------------------
def file() -> Path:
    """Where judgements are kept; it need not exist."""
    return environment.cache_folder() / "variants.json"


def filed() -> tuple[Judgement, ...]:
    """Every judgement on file, the newest first. Raises `ConfigError` for a file that cannot be read as one."""
    path = file()
    if not path.exists():
        return ()
    content = json_text.read(path, dict, AGAIN)
    try:
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}")
        found = [_judgement(record) for record in content["judgements"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no file of schema {SCHEMA} ({error}); {AGAIN}") from error
    return tuple(sorted(found, key=lambda one: one.day, reverse=True))


def _judgement(record: Mapping[str, Any]) -> Judgement:
    wanted = {one.name for one in fields(Judgement)}
    if set(record) != wanted or not isinstance(record["passed"], bool):
        raise ValueError("a judgement lacks fields or has others")
    mappings = {name: {str(k): str(v) for k, v in record[name].items()} for name in ("runs_with", "digests")}
    return Judgement(**{**record, **mappings, "contracts": tuple(record["contracts"])})


def add(judgements: Sequence[Judgement]) -> Path:
    """File judgements, each instead of an older one of the same variant with the same device, driver and library, and return the
    file. It is written beside and moved into place, so that nobody ever reads half of one."""
    kept = {one.key: one for one in (*filed(), *judgements)}
    content = {"schema": SCHEMA, "judgements": [asdict(kept[key]) for key in sorted(kept)]}
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".variants-", suffix=".json")
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(json.dumps(content, indent=1) + "\n")
    Path(name).replace(path)
    return path


# -- what follows from it ------------------------------------------------------------------------------
Digests = Callable[[str], Mapping[str, str] | None]
"""By variant, the digests of the backend's code and of its own as a judgement has them, None where its pack is not installed."""


def verdicts(info: BackendInfo, digests: Digests, spec: str = "") -> dict[str, str]:
    """Each variant of `info` with why it may not be used, "" where it may; `spec`: as the user names the device. `digests` is
    asked only of variants that were tried. Raises `ConfigError` where the file cannot be read."""
    on_file = [one for one in filed() if one.backend == info.name] if info.variants else []
    return {one.name: _verdict(info, one.name, digests, on_file, spec) for one in info.variants}


def _verdict(info: BackendInfo, name: str, digests: Digests, on_file: Sequence[Judgement], spec: str) -> str:
    device = f" --device {spec}" if spec else ""
    again = f"run polydraft conform {info.name}{device} --enable-variants"
    mine = [one for one in on_file if one.variant == name]
    if not mine:
        return f"it has not been tried here; {again}"
    here = [one for one in mine if one.runs_with == info.runs_with]
    judged = (here or mine)[0]
    if not judged.passed:  # it is not so much as imported, which it may not survive
        return f"it {judged.describe}; where it has changed since, {again}"
    try:
        now = digests(name)
    except PluginError as error:
        return f"its kernel pack cannot be loaded: {error}"
    if now is None:
        return "its kernel pack is not installed; install the package that brings it anew"
    changed = judged.changed(info.runs_with, now)
    return f"it {judged.describe}, but {changed}; {again}" if changed else ""
