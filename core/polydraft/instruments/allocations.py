"""The counting of device memory that is allocated: while an engine is built, in each of its steps, and by which launch.

The conformance kit holds steady steps to none with it. It reads the device's own counters and looks at no memory.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from polydraft.device import Device, DeviceCounters, Launch, Stream
from polydraft.instruments.base import Allocated, Instrument, bare
from polydraft.program.points import Stage

if TYPE_CHECKING:
    from polydraft.engine import Engine
    from polydraft.plugins.kernel_table import Binding


class Allocations(Instrument):
    """Counts from the beginning. What other instruments allocate for themselves is not the engine's, and left out."""

    name = "allocations"
    order = 50
    stages = ("step",)

    def __init__(self) -> None:
        super().__init__()
        self.construction = Allocated(0, 0)
        """By building the engine."""
        self.steps: list[Allocated] = []
        """By each call of `Engine.step`."""
        self.launches: Counter[str] = Counter()
        """By which launches, once the engine was built."""
        self._device: Device | None = None
        self._before = Allocated(0, 0)

    def device(self, device: Device) -> Device:
        """Its counters tell."""
        self._device = bare(device)
        return device

    @property
    def counters(self) -> DeviceCounters:
        """The device's own."""
        assert self._device is not None, "the device is opened first"
        return self._device.counters

    def bind(self, binding: Binding, launch: Launch) -> Launch:
        """A launch that allocates is named."""
        name = binding.contract

        def call(stream: Stream, n: int) -> None:
            before = self.counters.allocations
            launch(stream, n)
            if self.counters.allocations != before:
                self.launches[name] += self.counters.allocations - before

        return call

    def built(self, engine: Engine) -> None:
        """What was allocated so far was for the engine."""
        super().built(engine)
        self.construction = self.total
        self.launches.clear()  # of launches that ran before their capture

    @property
    def total(self) -> Allocated:
        """All so far."""
        aside = self.engine.instruments.aside
        return Allocated(self.counters.allocations, self.counters.bytes_allocated) - aside.allocated

    def begin(self, stage: Stage, subject: Any) -> None:
        """A step begins."""
        del stage, subject
        self._before = self.total

    def end(self, stage: Stage, subject: Any, result: Any) -> None:
        """It has ended."""
        del stage, subject, result
        self.steps.append(self.total - self._before)
