"""Helpers shared by tests on the emulator: a device by its options, and work that records when it ran.

Tests of this package and of the step import it. The emulator itself does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from polydraft.backend import DeviceOptions
from polydraft_emulator import Emulator
from polydraft_emulator.device import EmulatorDevice
from polydraft_emulator.graph import EmulatorCapture, EmulatorGraph
from polydraft_emulator.streams import EmulatorStream


def open_device(query: str = "") -> EmulatorDevice:
    """A device with the options of `query`, e.g. `seed=7&policy=lazy`."""
    device: EmulatorDevice = Emulator(f"emulator:0?{query}").polydraft_open_device("", DeviceOptions())
    return device


@dataclass
class Log:
    """Work that leaves its name in `ran` when it runs."""

    device: EmulatorDevice
    ran: list[str] = field(default_factory=list)

    def issue(self, name: str, stream: EmulatorStream | None = None) -> None:
        """Issue a piece of work called `name`, on the compute stream unless told otherwise."""
        self.device.enqueue(stream or self.device.stream, lambda: self.ran.append(name), name)

    def capture(self, names: Iterable[str]) -> EmulatorGraph:
        """A graph of such work on the compute stream."""

        def fn() -> None:
            for name in names:
                self.issue(name)

        return EmulatorCapture(self.device, frozenset()).capture(self.device.stream, fn)
