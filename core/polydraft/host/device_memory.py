"""Checks whether weights, and then the KV blocks of an engine, fit into the free memory of its device, and says what would fit if
they do not; takes as many blocks as fit where their number was left open.

The engine calls it before it reads weights, and once they are loaded. It allocates nothing, and leaves a device alone that does
not report its free memory (`free_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polydraft.config import AUTO
from polydraft.device import Device
from polydraft.errors import DeviceError
from polydraft.resolve import EVERY_SLOT, Resolved

RESERVE = 1 << 28
"""Bytes that are left to buffers of the step, graphs and the driver."""
SHARE = 0.9
"""Of what is free behind the weights, what KV blocks take at most where nobody says how many: others use the device, too."""
LOGITS = 3
"""Buffers as large as a step's logits that a step may have: logits, probabilities, what is left of them."""


def check_weights(device: Device, resolved: Resolved, nbytes: Mapping[str, int], draft_model: int = 0) -> None:
    """`nbytes`: of each tensor, by name; `draft_model`: of a proposer's own. Raises `DeviceError` that says what they take, and
    what can be left out."""
    ask: Callable[[], int] | None = getattr(device, "free_memory", None)
    total = sum(nbytes.values()) + draft_model
    if ask is None or total <= (free := ask()):
        return
    head = sum(size for name, size in nbytes.items() if name.startswith("mtp."))
    plans = []
    for name, size in {"MTP head": head, "draft model": draft_model}.items():
        if size and total - size <= free:
            plans.append(f"without the {_gib(size)} of the {name} they fit: --proposer none")
    if resolved.dtype == "f32" and total <= 2 * free:
        plans.append("in 16 bits they fit: --dtype bf16, where the backend has it")
    plans = plans or ["choose a smaller model, or a device with more memory"]
    held = f"the weights take {_gib(total)} in {resolved.dtype}, and device {device.spec} has {_gib(free)} free"
    raise DeviceError(f"{held}; {', or '.join(plans)}")


def fill(device: Device, resolved: Resolved, least: Callable[[int], int], collectives: int = 0) -> Resolved:
    """The plan with as many KV blocks as `SHARE` of the free memory holds, at most every slot at full length, where `num_blocks`
    is "auto", and not fewer than a device that does not tell would be given, if they fit. `least`: the least of what all ranks
    have, which all ask; `collectives`: bytes in which they will meet. One request at full length that does not fit is left to
    `check_fits`."""
    limits = resolved.limits
    block = int(resolved.describe()["kv_cache_bytes"]) // limits.num_blocks
    left_open = any(one.name == "num_blocks" and one.asked == AUTO for one in resolved.decisions)
    free = _free_for_blocks(device, resolved, collectives) if block and left_open else None
    if free is None:
        return resolved
    free -= RESERVE
    logits = 4 * limits.max_logit_rows * limits.vocab_size
    share = max(int(SHARE * free) - LOGITS * logits, 0) // block
    fit = least(max(share, min(limits.num_blocks, max(free, 0) // block)))
    every = limits.max_seqs * limits.max_blocks
    if fit >= every:
        return resolved.with_blocks(every, EVERY_SLOT)
    return resolved.with_blocks(max(fit, limits.max_blocks), f"what {SHARE:.0%} of the memory hold that weights have left")


def check_fits(device: Device, resolved: Resolved, collectives: int = 0) -> None:
    """`collectives`: bytes in which ranks will meet. Raises `DeviceError` with the number of blocks that would fit."""
    free = _free_for_blocks(device, resolved, collectives)
    if free is None:
        return
    limits, wanted = resolved.limits, int(resolved.describe()["kv_cache_bytes"])
    block = max(wanted // limits.num_blocks, 1)
    if wanted + min(RESERVE, free) <= free:
        return
    fit = max(free - RESERVE, 0) // block
    behind = f"the weights and {_gib(collectives)} in which ranks meet" if collectives else "the weights"
    held = f"device {device.spec} has {_gib(free)} free behind {behind}, and {limits.num_blocks} KV blocks take {_gib(wanted)}"
    if fit >= limits.max_blocks:
        raise DeviceError(f"{held}; {fit} would fit: --num-blocks {fit}")
    if fit > 0:
        tokens = fit * limits.block_size
        raise DeviceError(
            f"{held}; {fit} would fit, too few for one request of {limits.max_len} tokens: --max-model-len {tokens} "
            f"--num-blocks {fit}"
        )
    raise DeviceError(f"{held}; not one would fit: choose a smaller model, or free the device of what else runs on it")


def _free_for_blocks(device: Device, resolved: Resolved, collectives: int) -> int | None:
    """Bytes that are free behind the weights and what else is certain; None where the device does not tell."""
    ask: Callable[[], int] | None = getattr(device, "free_memory", None)
    return None if ask is None else ask() - int(resolved.describe().get("slot_state_bytes", 0)) - collectives


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"
