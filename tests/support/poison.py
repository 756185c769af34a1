"""Free KV blocks hold what shows when it is read: NaN, or numbers far out of range, in every cache that an engine has.

Tests pass `poison_free_blocks` to `drive` as `each_step`. Whoever reads a row that it no longer owns, or never wrote, has NaN
logits, and its request ends with an error.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import numpy as np

from polydraft import Engine
from polydraft.errors import DeviceError
from polydraft.instruments.base import bare
from polydraft.reference.device import ReferenceDevice, poison_array
from polydraft.reference.table import NumpyCache
from tests.support.emulator import EmulatorDevice

BF16_NAN = 0x7FC0


def paged_buffers(engine: Engine) -> list[str]:
    """The plain buffers with rows for blocks in which layers of target and proposer keep what they have besides the keys and
    values that the backend lays out. A cache's other buffers have a row for each slot."""
    blocks = {**engine.model.layers, **engine.proposers.layers(engine.resolved.proposer, engine.model, engine.config.draft_model)}
    kinds = ((prefix, cache) for prefix, block in blocks.items() for cache in block.caches)
    buffers = (buffer for prefix, cache in kinds for buffer in cache.buffers(prefix, engine.resolved.limits))
    return [buffer.name for buffer in buffers if buffer.shape.split()[0] != "B"]


def poison_free_blocks(engine: Engine) -> None:
    """Poison every block that is free now, behind what was issued by now."""
    ledger, memory, device = engine.ledger, engine.runner.memory, cast("Any", bare(engine.device))
    blocks = ledger._free[: ledger._num_free].copy()
    paged: dict[Any, int] = {}
    for name in paged_buffers(engine):
        paged[memory.buffers[name]] = memory.buffers[name].shape[0] // ledger.num_blocks
    if isinstance(device, EmulatorDevice):
        with suppress(DeviceError):  # a device that is lost has nothing left to spoil
            device.discard(blocks, paged)
        return
    caches, reference = list(memory.caches.values()), isinstance(device, ReferenceDevice)
    arrays = [(device.memory_of(buffer) if reference else buffer.host_array, rows) for buffer, rows in paged.items()]

    def spoil() -> None:
        for cache in caches:
            _spoil_cache(cache, blocks)
        for array, rows in arrays:
            for block in blocks.tolist():
                poison_array(array[block * rows : (block + 1) * rows])

    if reference:
        device.enqueue(device.stream, spoil)
    else:  # the cpu backend would wait for what it has queued, as no step does
        spoil()


def _spoil_cache(cache: Any, blocks: np.ndarray[Any, Any]) -> None:
    if isinstance(cache, NumpyCache):
        size = cache.spec.block_size
        cache.kv[:, :, (blocks[:, None] * size + np.arange(size)).ravel()] = np.nan
        return
    for rows in (cache._k, cache._v):  # of the cpu backend
        rows[blocks] = np.nan if rows.dtype == np.float32 else BF16_NAN
