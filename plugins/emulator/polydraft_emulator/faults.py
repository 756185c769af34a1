"""Faults on request: single operations that fail, and single operations that are delayed.

The device asks it once for every operation in the order in which the host issues them, so that a fault strikes the same operation
in every schedule. The failing itself is done by the device, when the operation would have run.

`fault=<what>@<n>[:<how>]` and `delay=<what>@<n>[:<microseconds>]`, several joined by commas. `what` is a kind of operation
(`kernel`, `upload`, `download`, `copy` for both, `replay`, `op` for all of these), a contract by name, or for faults `alloc`;
`n` counts from 1 since the device was opened. `how`: `fail` (the default), `oom` (out of memory) or `lost` (the device
answers nothing any more). An allocation that fails raises at once; everything else surfaces at the next wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from polydraft.errors import ConfigError

KINDS = ("kernel", "upload", "download", "copy", "replay", "op")
HOW = {"fail": "failed", "oom": "ran out of memory", "lost": "lost the device"}
"""Kinds of fault, and how an error says it."""

_TRIGGER = re.compile(r"([a-z_+]+)@([1-9]\d*)(?::([a-z]+|\d+(?:\.\d+)?))?")


@dataclass
class Trigger:
    """Fires once, at the `at`-th operation that it matches. `argument` is what follows the colon."""

    what: str
    at: int
    argument: str
    text: str
    seen: int = 0

    def fires(self, kind: str, name: str) -> bool:
        """Count an operation; True when it is the one."""
        if not (self.what in (kind, name) or (self.what == "op" and kind != "alloc") or self._is_copy(kind)):
            return False
        self.seen += 1
        return self.seen == self.at

    def _is_copy(self, kind: str) -> bool:
        return self.what == "copy" and kind in ("upload", "download")


def triggers(option: str, text: str, *, names: frozenset[str], arguments: str) -> list[Trigger]:
    """Read the triggers of the option called `option`. `names`: contracts by name, and kinds beside `KINDS`; `arguments`: what
    may follow the colon, a regular expression. Raises `ConfigError`."""
    found = []
    for part in filter(None, text.split(",")):
        match = _TRIGGER.fullmatch(part)
        if match is None or (match[3] and not re.fullmatch(arguments, match[3])):
            raise ConfigError(f"emulator option {option} has {part!r}, wanted <what>@<n>[:{arguments}] with n from 1; correct it")
        if match[1] not in KINDS and match[1] not in names:
            raise ConfigError(
                f"emulator option {option} names {match[1]!r}, wanted one of {', '.join((*KINDS, *sorted(names)))}; correct it"
            )
        found.append(Trigger(match[1], int(match[2]), match[3] or "", part))
    return found


class Faults:
    """The faults and delays of one device."""

    def __init__(self, fault: str, delay: str, names: frozenset[str]) -> None:
        self._faults = triggers("fault", fault, names=names | {"alloc"}, arguments="|".join(HOW))
        self._delays = triggers("delay", delay, names=names, arguments=r"\d+(?:\.\d+)?")
        self.any = bool(self._faults or self._delays)

    def strike(self, kind: str, name: str) -> Trigger | None:
        """Count an operation; the fault that strikes it, if one does."""
        fired = [trigger for trigger in self._faults if trigger.fires(kind, name)]
        return fired[0] if fired else None

    def delay(self, kind: str, name: str) -> float | None:
        """Count an operation; the seconds that hold it back on the virtual clock, None when nothing does."""
        fired = [trigger for trigger in self._delays if trigger.fires(kind, name)]
        return 1e-6 * float(fired[0].argument or 0) if fired else None
