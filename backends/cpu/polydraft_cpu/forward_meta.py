"""Forward metadata of the CPU backend. It is empty, because attention walks the block tables itself, row by row.

`polydraft_init_forward_meta` returns it. Creating it allocates nothing, and filling it launches nothing.
"""

from __future__ import annotations

from polydraft.backend import StepMeta
from polydraft.device import Stream


class CpuForwardMeta:
    """No metadata."""

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Nothing to prepare."""
