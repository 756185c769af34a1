"""Guard bands: patterned buffers before and after every buffer that a check allocates, and whether the patterns survive.

L1 and L2 put them around a device. A write outside of a buffer is detected where it lands in a neighbour, which is likely on
devices that hand out memory in order, but not certain: therefore every case also looks at rows beyond the launch inside the
buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from polydraft.conformance.check import Tally
from polydraft.conformance.target import Proxy
from polydraft.device import DTYPES, Array, Device

ELEMENTS: Final = 96
"""Of a guard; no multiple of what a device might round to."""


@functools.lru_cache(maxsize=256)
def _pattern(number: int, dtype: str) -> Array:
    """What a guard holds; a dozen of them are made for each of thousands of cases."""
    pattern = np.random.default_rng(number).integers(0, 100, ELEMENTS).astype(DTYPES[dtype])
    pattern.flags.writeable = False
    return pattern


class GuardedDevice(Proxy):
    """A device whose buffers lie between guards. `read(device, buffer)` brings one back to the host."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self._guards: list[tuple[str, Any, Array]] = []

    def empty(self, name: str, shape: Sequence[int], dtype: str) -> Any:
        """Allocate a guard, the buffer, and another guard."""
        self._guard(f"in front of {name}", dtype)
        buffer = self._inner.empty(name, shape, dtype)
        self._guard(f"behind {name}", dtype)
        return buffer

    def _guard(self, where: str, dtype: str) -> None:
        pattern = _pattern(len(self._guards), dtype)
        guard = self._inner.empty("conform.guard", (ELEMENTS,), dtype)
        self._inner.load(guard, pattern)
        self._guards.append((where, guard, pattern))

    def hold(self, tally: Tally, what: str, read: Callable[[Device, Any], Array]) -> None:
        """Every guard still holds its pattern."""
        for where, guard, pattern in self._guards:
            found = read(self._inner, guard)
            tally.equal(f"the guard {where} ({what})", found.view(np.uint8), pattern.view(np.uint8))
