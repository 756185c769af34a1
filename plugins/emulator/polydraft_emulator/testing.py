"""Helpers shared by tests on the emulator: a device by its options, work that records when it ran, free blocks filled with
poison.

Tests of this package and of the step import it. The emulator itself does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from polydraft.backend import DeviceOptions
from polydraft.errors import DeviceError
from polydraft_emulator import Emulator
from polydraft_emulator.device import EmulatorDevice
from polydraft_emulator.graph import EmulatorCapture, EmulatorGraph
from polydraft_emulator.streams import EmulatorStream

if TYPE_CHECKING:
    from polydraft.engine import Engine


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


def poison_free_blocks(engine: Engine) -> None:
    """Fill every KV block that is free now with NaN, behind what was issued by now: whoever reads a row that it no longer owns,
    or never wrote, gets NaN logits. Called after a step of an engine on an emulator."""
    ledger, device = engine.ledger, engine.device
    assert isinstance(device, EmulatorDevice), "only the emulator can be told"
    with suppress(DeviceError):  # a device that is lost has nothing left to spoil
        device.discard(ledger._free[: ledger._num_free])
