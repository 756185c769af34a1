"""Checks whether the KV blocks of an engine fit into the free memory of its device, and says what would fit if they do not.

The engine calls it once, after loading weights and before anything of the step is allocated. It allocates nothing, and does not
check a device that does not report its free memory (`free_memory`).
"""

from __future__ import annotations

from collections.abc import Callable

from polydraft.device import Device
from polydraft.errors import DeviceError
from polydraft.resolve import Resolved

RESERVE = 1 << 28
"""Bytes that are left to buffers of the step, graphs and the driver."""


def check_fits(device: Device, resolved: Resolved) -> None:
    """Raises `DeviceError` with the number of blocks that would fit."""
    ask: Callable[[], int] | None = getattr(device, "free_memory", None)
    if ask is None:
        return
    limits, wanted = resolved.limits, int(resolved.describe()["kv_cache_bytes"])
    free = ask() - int(resolved.describe().get("slot_state_bytes", 0))
    block = max(wanted // limits.num_blocks, 1)
    if wanted + min(RESERVE, free) <= free:
        return
    fit = max(free - RESERVE, 0) // block
    held = f"device {device.spec} has {_gib(free)} free behind the weights, and {limits.num_blocks} KV blocks take {_gib(wanted)}"
    if fit >= limits.max_blocks:
        raise DeviceError(f"{held}; {fit} would fit: --num-blocks {fit}")
    if fit > 0:
        tokens = fit * limits.block_size
        raise DeviceError(
            f"{held}; {fit} would fit, too few for one request of {limits.max_len} tokens: --max-model-len {tokens} "
            f"--num-blocks {fit}"
        )
    raise DeviceError(f"{held}; not one would fit: choose a smaller model, or free the device of what else runs on it")


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"
