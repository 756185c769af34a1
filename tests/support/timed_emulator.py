"""An emulator whose clock the recorder can read: what `polydraft.timeline.TimedDevice` asks of a device with a timeline."""

from __future__ import annotations

from typing import Any

from polydraft import hookimpl
from polydraft.errors import DeviceError
from tests.support.emulator import Emulator


class TimedEmulator(Emulator):
    """The emulator, its devices with `now_s` where they keep a timeline."""

    @hookimpl
    def polydraft_open_device(self, spec: str, options: Any) -> Any:
        device: Any = super().polydraft_open_device(spec, options)
        if hasattr(device, "now_s"):
            return device

        def now_s() -> float:
            if device.executor.clock is None:
                raise DeviceError("no timeline")
            return float(device.executor.clock.now())

        device.now_s = now_s
        return device
