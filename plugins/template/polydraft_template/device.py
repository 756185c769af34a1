"""Memory of template: four functions over its driver. As long as there is none, host memory stands in for the chip's."""

from __future__ import annotations

from typing import Any

import numpy as np

from polydraft.plugins.bring_up import BringUpDevice


class TemplateDevice(BringUpDevice):
    """One chip. What `allocate` returns is `a.x` in a kernel."""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Device memory for an array of this shape."""
        return np.empty(shape, dtype)

    def write(self, memory: Any, value: np.ndarray[Any, Any]) -> None:
        """Host to device: the first `len(value)` rows."""
        memory[: len(value)] = value

    def read(self, memory: Any, into: np.ndarray[Any, Any]) -> None:
        """Device to host: the first `len(into)` rows; blocks until they are there."""
        into[...] = memory[: len(into)]

    def wait(self) -> None:
        """Block until everything enqueued has run; nothing is ever outstanding here."""
