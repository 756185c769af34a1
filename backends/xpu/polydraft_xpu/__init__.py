"""The Kunlun XPU backend: the Paddle backend, and what is different there.

The chip's attention wants all prefill slots packed before all decode slots: that order is declared, and core lays steps out so.
Kernels, graphs and copies are inherited; what could not be run on silicon here says so in its evidence.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from polydraft_paddle import (
    describe,
    open_place,
    polydraft_collectives,
    polydraft_graph_capture,
    polydraft_init_forward_meta,
    polydraft_kernels,
)
from polydraft_paddle.installation import installed

from polydraft.backend import BackendInfo
from polydraft.errors import DeviceError
from polydraft.hooks import hookimpl

if TYPE_CHECKING:
    from polydraft_paddle.device import PaddleDevice

    from polydraft.backend import DeviceOptions

__all__ = [
    "polydraft_backend_info",
    "polydraft_collectives",
    "polydraft_graph_capture",
    "polydraft_init_forward_meta",
    "polydraft_kernels",
    "polydraft_off_device",
    "polydraft_open_device",
    "polydraft_visible_devices",
]

DEFAULT_DEVICE = "xpu:0"


@hookimpl
def polydraft_backend_info(spec: str) -> BackendInfo:
    """Identity; rows are packed prefill first."""
    info = describe("xpu", "Kunlun XPU through Paddle: prefill slots are packed before decode slots", spec or DEFAULT_DEVICE)
    reason = info.reason
    if not reason and (spec or DEFAULT_DEVICE).startswith("xpu") and "paddlepaddle-xpu" not in installed():
        reason = "the installed Paddle is not that for Kunlun XPU; install paddlepaddle-xpu from Paddle's own index in its place"
    return dataclasses.replace(
        info,
        available=not reason,
        reason=reason,
        device_pattern="xpu:<index>; cpu or a custom device to try it without the chip",
        devices=(),
        capabilities=dataclasses.replace(info.capabilities, row_order="prefill_first"),
    )


@hookimpl
def polydraft_open_device(spec: str, options: DeviceOptions) -> PaddleDevice:
    """Import Paddle and open the place; `DeviceError` names the places there are where no XPU is one of them, or the operation
    that a kernel needs and the place lacks, unless it may fall back to the CPU. On a chip only a trial shows that beforehand:
    there Paddle takes what is missing from the CPU whatever it was told."""
    from polydraft_paddle.probe import refuse_lacking

    device = open_place(spec or DEFAULT_DEVICE, options)
    if not options.allow_cpu_fallback:
        try:
            refuse_lacking(device)
        except DeviceError:
            device.close()
            raise
    return device


@hookimpl
def polydraft_visible_devices() -> tuple[str, ...]:
    """The chips that Paddle sees."""
    from polydraft_paddle.visible import visible

    return tuple(place for place in visible() if place.startswith("xpu"))


@hookimpl
def polydraft_off_device(spec: str) -> dict[str, tuple[str, ...]]:
    """What Paddle runs on the CPU instead of on the chip, which its flag of falling back does not prevent."""
    from polydraft_paddle.probe import leaving

    return leaving(spec or DEFAULT_DEVICE)
