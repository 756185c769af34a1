"""Parses this backend's device string: `cpu`, optionally with options, as in `cpu?threads=2&weights=int8`.

`polydraft_open_device` calls it. Nothing else configures the backend: no environment variable, no global.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from polydraft.errors import DeviceError

WEIGHTS = ("exact", "bf16", "int8", "f32")
PATTERN = "cpu[?threads=N&weights=exact|bf16|int8|f32&isa=NAME&pin=0|1&queue=0|1]"
SWITCHES = ("pin", "queue")


@dataclass(frozen=True)
class CpuOptions:
    """What a user may choose; the defaults change no number that the checkpoint holds."""

    threads: int = 0
    """Threads of a launch; 0: one for each processor that this process may use."""
    weights: str = "exact"
    """How matrices are kept: `exact` in bfloat16 where that changes nothing and in float32 elsewhere, `bf16` rounded, `int8`
    with one scale an output, `f32` always in float32."""
    isa: str = ""
    """Instruction level, see `doctor`; "": the best that the processor has."""
    pin: int = 1
    """Whether each further thread stays on one processor."""
    queue: int = 1
    """Whether launches and copies return before they have run; 0: they are done when they return."""

    @property
    def num_threads(self) -> int:
        """Threads of a launch."""
        return self.threads or usable_processors()


def usable_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def says_no_queue(spec: str) -> bool:
    """Whether a device string, right or wrong, asks for launches that are done when they return."""
    return "queue=0" in spec.partition("?")[2].split("&")


def parse(spec: str) -> CpuOptions:
    """Read a device string; `DeviceError` for anything that it may not say."""
    name, _, text = spec.partition("?")
    if name not in ("", "cpu"):
        raise DeviceError(f"the cpu backend runs on 'cpu', got {spec!r}; use {PATTERN} or leave --device out")
    fields = {field.name: field for field in dataclasses.fields(CpuOptions)}
    values: dict[str, str | int] = {}
    for part in text.split("&") if text else ():
        key, _, value = part.partition("=")
        if key not in fields:
            raise DeviceError(f"device {spec!r} has the option {key!r}, known: {', '.join(fields)}; correct it")
        if key == "weights" and value not in WEIGHTS:
            raise DeviceError(f"device {spec!r}: weights is {value!r}, wanted one of {', '.join(WEIGHTS)}; correct it")
        if key in ("threads", *SWITCHES) and not (value.isdecimal() and int(value) <= (1024 if key == "threads" else 1)):
            wanted = "a number from 0 to 1024" if key == "threads" else "0 or 1"
            raise DeviceError(f"device {spec!r}: {key} is {value!r}, wanted {wanted}; correct it")
        values[key] = int(value) if key in ("threads", *SWITCHES) else value
    return CpuOptions(**values)  # type: ignore[arg-type]
