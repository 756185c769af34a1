"""Parses the device string `emulator:<index>?option=value&...`, which holds everything that determines one run of the emulator.

The plugin parses it when a device is opened and prints it in every error, so that a failure is replayed from one line. It does
not read the environment, and options do not change.

| option         | values                       | effect                                                                       |
|----------------|------------------------------|------------------------------------------------------------------------------|
| `seed`         | whole number; 0              | every choice that the device makes: order, progress, cache layout            |
| `policy`       | random, lazy, fifo,          | the legal order in which work runs (`schedule.py`)                           |
|                | reversed, eager; random      |                                                                              |
| `layout`       | blocked, plain; blocked      | whether cache rows lie in a seeded permutation (`memory.py`)                 |
| `rows`         | slot, prefill-first, seeded; | the order of scheduled slots that the backend declares, checked in each step |
|                | slot                         |                                                                              |
| `uncapturable` | names of launches; none      | what the backend declares as impossible to capture, refused in a capture     |
| `latency`      | kernel:20,linear:80+0.5; off | a virtual clock and a timeline (`timeline.py`)                               |
| `delay`        | download@3:500; none         | single operations that run as late as is legal (`faults.py`)                 |
| `fault`        | copy@12,op@40:lost; none     | single operations that fail (`faults.py`)                                    |
| `ranks`        | late,skip@1:12; none         | ranks that come late, stall, fail or leave a collective out (`ranks.py`)     |
| `memory`       | MiB; unlimited               | device memory; more than that raises `DeviceError`                           |

`rows` and `uncapturable` are capabilities of the device that the string names.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass

from polydraft.backend import RowOrder
from polydraft.contracts import COLLECTIVES, COMPOSITES, REGISTRY
from polydraft.errors import ConfigError

POLICIES = ("random", "lazy", "fifo", "reversed", "eager")
LAYOUTS = ("blocked", "plain")
ROWS: dict[str, RowOrder] = {"slot": "slot", "prefill-first": "prefill_first", "seeded": "seeded"}
"""Row orders as they are written in a device string, and as `Capabilities.row_order` calls them."""

_DEVICE = re.compile(r"(?:emulator(?::\d+)?)?")


@dataclass(frozen=True)
class Options:
    """The options of one device; the table above says what they mean. `device` is what stands before the question mark."""

    device: str = "emulator:0"
    seed: int = 0
    policy: str = "random"
    layout: str = "blocked"
    rows: str = "slot"
    uncapturable: str = ""
    latency: str = ""
    delay: str = ""
    fault: str = ""
    ranks: str = ""
    memory: str = ""

    def __str__(self) -> str:
        """The device string that opens the same device again; options at their defaults are left out."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default}
        query = "&".join(f"{name}={value}" for name, value in given.items())
        return f"{self.device}?{query}" if query else self.device

    @property
    def refused_names(self) -> tuple[str, ...]:
        """What cannot be captured, by name."""
        return tuple(filter(None, self.uncapturable.split(",")))

    @property
    def capacity(self) -> int | None:
        """Bytes of device memory, None for no limit."""
        return int(self.memory) << 20 if self.memory else None


def parse(spec: str, base: Options | None = None) -> Options:
    """Read a device string over the options `base`; "" is `base` itself.

    Errors: `ConfigError` for another device, an unknown or repeated option, or a value that an option does not take."""
    device, _, query = spec.partition("?")
    if not _DEVICE.fullmatch(device):
        raise ConfigError(
            f"device {spec!r} is none of this backend, wanted emulator:<index>?option=value&... with the options {_known()}; "
            "correct it or leave it out"
        )
    given: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"unknown emulator option {name!r} in {spec!r}; {hint}known: {_known()}")
        if name in given:
            raise ConfigError(f"emulator option {name!r} is given twice in {spec!r}; give it once")
        given[name] = value
    changes: dict[str, str | int] = {name: _checked(name, value) for name, value in given.items()}
    if device:
        changes["device"] = device if ":" in device else f"{device}:0"
    return dataclasses.replace(base or Options(), **changes)  # type: ignore[arg-type]


_NAMES = tuple(f.name for f in dataclasses.fields(Options))[1:]


def _known() -> str:
    return ", ".join(_NAMES)


def _checked(name: str, value: str) -> str | int:
    """The value of a simple option; those with a grammar of their own are checked where they are read."""
    choices = {"policy": POLICIES, "layout": LAYOUTS, "rows": tuple(ROWS)}.get(name)
    if choices and value not in choices:
        raise ConfigError(f"emulator option {name} is {value!r}, wanted one of {', '.join(choices)}; correct it or leave it out")
    if name in ("seed", "memory") and not re.fullmatch(r"\d+", value):
        raise ConfigError(f"emulator option {name} is {value!r}, wanted a whole number; correct it or leave it out")
    unknown = sorted(set(filter(None, value.split(","))) - launch_names()) if name == "uncapturable" else ()
    if unknown:
        raise ConfigError(
            f"emulator option uncapturable names {', '.join(unknown)}, wanted some of {', '.join(sorted(launch_names()))}; "
            "correct it"
        )
    return int(value) if name == "seed" else value


def launch_names() -> frozenset[str]:
    """Everything that is launched by a name: contracts, composites, collectives, and the filling of metadata."""
    return frozenset((*REGISTRY.names(), *COMPOSITES, *COLLECTIVES.names(), "forward_meta"))
