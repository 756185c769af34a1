"""Owns the forward metadata of the CPU, which is nothing: attention walks block tables by itself, row by row.

`polydraft_init_forward_meta` returns it. It never allocates, and filling it launches nothing.
"""

from __future__ import annotations

from polydraft.backend import StepMeta
from polydraft.device import Stream


class CpuForwardMeta:
    """No metadata."""

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Nothing to prepare."""
